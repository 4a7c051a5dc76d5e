"""The course of a run and the places of its chains, in a bounded number of points however long it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

NAMES = ("energy", "acceptance_rate", "step_size")


class Thinned:
    """Every ``stride``-th of a run's iterations, one vector each.

    Whenever there are ``most``, every second one is dropped and the stride doubles. So what is kept depends on the
    iterations alone, not on where the run was broken or how many were first asked for.

    :param most: an even number.
    """

    def __init__(self, most: int):
        self._most, self.stride, self.kept = most, 1, list[Tensor]()

    def note(self, iteration: int, vector: Callable[[], Tensor]) -> None:
        """Keep an iteration's vector, if it is its turn; it takes the place of all that came from there on."""
        if iteration % self.stride:
            return
        del self.kept[iteration // self.stride :]
        if len(self.kept) == self._most:
            self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.kept.append(vector())

    def until(self, iterations: int) -> list[Tensor]:
        """The vectors of the first iterations."""
        return self.kept[: -(-iterations // self.stride)]

    def to_dict(self, iterations: int) -> dict[str, Any]:
        """The part of the first iterations that a checkpoint keeps."""
        return {"stride": self.stride, "kept": torch.stack(self.until(iterations)) if self.kept else None}

    def restore(self, found: dict[str, Any]) -> None:
        """Take up what :meth:`to_dict` gave."""
        self.stride = found["stride"]
        self.kept = [] if found["kept"] is None else list(found["kept"].unbind())


class Curves(Thinned):
    """The chains' mean energy, acceptance and step size, kept on their device."""

    def __init__(self) -> None:
        super().__init__(2000)

    def record(self, iteration: int, energy: Tensor, statistics: Mapping[str, Tensor]) -> None:
        """Note an iteration, counted from 0, with energies ``(C,)`` after it; likewise each of the statistics."""

        def means() -> Tensor:
            values = [statistics.get(name) for name in NAMES[1:]]
            found = [torch.full_like(energy, torch.nan) if value is None else value.to(energy) for value in values]
            return torch.stack([energy, *found]).mean(1).float()

        self.note(iteration, means)

    def curves(self, iterations: int) -> dict[str, Any]:
        """As JSON, over the first iterations: ``iteration``, then those of ``NAMES``; not finite: ``None``."""
        kept = self.until(iterations)
        rows = torch.stack(kept, 1).tolist() if kept else [[] for _ in NAMES]
        curves = {
            name: [value if math.isfinite(value) else None for value in row]  # JSON knows neither NaN nor infinity
            for name, row in zip(NAMES, rows, strict=True)
        }
        return {"iteration": list(range(0, iterations, self.stride)), **curves}
