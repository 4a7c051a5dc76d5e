"""Loaded data sets: standardised tensors, and what is needed to tell and undo what was done to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Task = Literal["classification", "regression"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training, test and out-of-distribution rows of one data set.

    Inputs are standardised by the training rows: ``x = (raw - x_mean) / x_scale``, per channel for images (whose pixels
    are brought to 0..1 first) and per feature for tables. Targets of a regression are standardised likewise.

    :param name: the name that it was loaded by.
    :param train_x: ``(num_train, *input_shape)``; ``input_shape`` is ``(channels, height, width)`` or ``(features,)``.
    :param train_y: ``(num_train,)``, class indices ``0..num_outputs-1`` as int64, or standardised targets.
    :param ood_x: ``(num_ood, *input_shape)`` inputs that don't belong to the training distribution, or ``None``.
    :param ood_name: where ``ood_x`` comes from, e.g. ``"digits: 8, 9"``.
    :param class_names: one name a class, in the order of the indices; empty for regression.
    :param feature_names: one name a feature of a table; empty for images.
    :param x_scale: broadcasts against ``input_shape``; 1 where a feature is constant.
    :param y_scale: scalar, 1 for classification.
    """

    name: str
    task: Task
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    ood_x: Tensor | None
    ood_name: str | None
    class_names: tuple[str, ...]
    feature_names: tuple[str, ...]
    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor

    @property
    def input_shape(self) -> torch.Size:
        """Shape of one row of inputs."""
        return self.train_x.shape[1:]

    @property
    def num_outputs(self) -> int:
        """Outputs that a network for this task has: one a class, or 1 for regression."""
        return len(self.class_names) or 1

    @property
    def is_image(self) -> bool:
        """True if rows are ``(channels, height, width)``."""
        return len(self.input_shape) == 3

    def unstandardize_y(self, y: Tensor) -> Tensor:
        """Bring standardised targets or predicted means, of any shape, back to the data's units."""
        return y * self.y_scale + self.y_mean

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Dataset:
        """The same data on another device, or with floats of another type; class indices stay integers."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = {n: v.to(device=device, dtype=dtype if v.is_floating_point() else None) for n, v in tensors.items()}
        return dataclasses.replace(self, **moved)  # type: ignore[arg-type]

    def describe(self) -> str:
        """A sentence for a report: rows, inputs and targets."""
        size, classes = "x".join(map(str, self.input_shape)), self.class_names
        parts = [
            f"{self.name}: {len(self.train_x):,} training and {len(self.test_x):,} test rows",
            f"{'images of' if self.is_image else 'features:'} {size}",
            f"{len(classes)} classes ({shorten(classes)})" if classes else f"targets of deviation {self.y_scale:.4g}",
        ]
        if self.ood_x is not None:
            parts.append(f"{len(self.ood_x):,} out-of-distribution rows ({self.ood_name})")
        return "; ".join(parts) + "."

    def __repr__(self) -> str:
        return f"Dataset({self.describe()})"


def shorten(names: Sequence[str], most: int = 12) -> str:
    """The names, with commas, and dots in place of what goes beyond ``most``."""
    return ", ".join(names if len(names) <= most else [*names[: most - 1], f"... {names[-1]}"])
