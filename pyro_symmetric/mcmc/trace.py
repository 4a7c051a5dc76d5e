"""How a run went and where its chains have been, in a bounded number of points however long it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernels.kernel import State

CURVES = ("energy", "acceptance_rate", "step_size")


class Thinned:
    """Every ``stride``-th of a run's iterations, one vector each.

    Whenever there are ``most``, every second one is dropped and the stride doubles. So what is kept depends on the
    iterations alone, not on where the run was broken or how many were first asked for.

    :param most: an even number.
    """

    def __init__(self, most: int):
        self._most, self.stride, self.kept = most, 1, list[Tensor]()

    def wants(self, iteration: int) -> bool:
        """Whether it is this iteration's turn."""
        return iteration % self.stride == 0

    def keep(self, iteration: int, vector: Tensor) -> None:
        """Keep an iteration's vector; it takes the place of all that came from this iteration on."""
        del self.kept[iteration // self.stride :]
        if len(self.kept) == self._most:
            self.kept, self.stride = self.kept[::2], 2 * self.stride
        self.kept.append(vector)

    def until(self, iterations: int) -> list[Tensor]:
        """The vectors of the first iterations."""
        return self.kept[: -(-iterations // self.stride)]

    def to_dict(self, iterations: int) -> dict[str, Any]:
        """What a checkpoint keeps of the first iterations."""
        return {"stride": self.stride, "kept": torch.stack(self.until(iterations)) if self.kept else None}

    def restore(self, found: dict[str, Any]) -> None:
        """Take up what :meth:`to_dict` gave."""
        self.stride = found["stride"]
        self.kept = [] if found["kept"] is None else list(found["kept"].unbind())


class Trace(Thinned):
    """The chains' mean energy, acceptance and step size, kept on their device."""

    def __init__(self) -> None:
        super().__init__(2000)

    def record(self, iteration: int, state: State) -> None:
        """Note the state after an iteration, counted from 0."""
        if self.wants(iteration):
            energy = state.energy.mean()
            values = [state.statistics.get(name) for name in CURVES[1:]]
            means = [energy.new_tensor(torch.nan) if value is None else value.mean().to(energy) for value in values]
            self.keep(iteration, torch.stack([energy, *means]).float())

    def curves(self, iterations: int) -> dict[str, Any]:
        """As JSON, over the first iterations: ``iteration``, then those of ``CURVES``; not finite: ``None``."""
        kept = self.until(iterations)
        rows = torch.stack(kept, 1).tolist() if kept else [[] for _ in CURVES]
        curves = {name: [_number(value) for value in row] for name, row in zip(CURVES, rows, strict=True)}
        return {"iteration": list(range(0, iterations, self.stride)), **curves}


def _number(value: float) -> float | None:
    """JSON knows neither NaN nor infinity."""
    return value if abs(value) < float("inf") else None
