"""Models and their arguments in the place and precision that a computation is asked for."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.utils._pytree import tree_map


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor where it is; a number, a list or an array on the CPU, whatever PyTorch's default device is."""
    return torch.as_tensor(value, dtype=dtype, device=value.device if isinstance(value, Tensor) else "cpu")


def placed(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model and its arguments on the device and, if floating-point, in the dtype; ``None``: as they are.

    The caller's own objects stay as they are: a module that isn't there yet is copied. Tensors are found in lists,
    tuples and dictionaries too, at any depth.
    """

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

    if isinstance(model, nn.Module):
        parts = [*model.parameters(), *model.buffers()]
        if any(place(part) is not part for part in parts):
            model = copy.deepcopy(model).to(device=device, dtype=dtype)
    return model, tree_map(place, args), tree_map(place, kwargs)


class Placement(Messenger):
    """Moves what a model draws to a device and dtype: a prior ``Normal(0.0, 1.0)`` draws on the CPU in float32."""

    def __init__(self, device: torch.device | str | None, dtype: torch.dtype | None):
        super().__init__()
        self.device, self.dtype = device, dtype

    def _pyro_post_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and isinstance(msg["value"], Tensor) and msg["value"].is_floating_point():
            msg["value"] = msg["value"].to(device=self.device, dtype=self.dtype)


def promoted(values: list[Tensor]) -> torch.dtype | None:
    """The dtype that holds all floating-point tensors of a list; ``None`` if it has none."""
    dtypes = [value.dtype for value in values if value.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None
