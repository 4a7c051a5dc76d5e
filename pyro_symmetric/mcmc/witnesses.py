"""Places that a run has passed, with their energies there and then: by them its model is known again when it resumes.

The chains' last states and some earlier ones, spread over the run. Where the chains have been, a model that differs
shows, however alike it is at any points that could be fixed beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.mcmc.targets import Rows
from pyro_symmetric.storage import StoreError

MOST = 64  # earlier states, and last ones
NUMBERS = 2**18  # of all earlier states together, but 4 states at least


class Witnesses:
    """The states of one run.

    :param num_chains: as many are evaluated at once as there are chains, which memory is known to hold.
    """

    def __init__(self, potential: Potential, num_chains: int):
        self._potential, self._num_chains = potential, num_chains
        self._most = min(MOST, max(4, NUMBERS // potential.dim))
        self._stride = 1  # iterations between two of them; doubled when there are too many
        self._states: list[Tensor] = []
        self._energies: list[float] = []  # of the first of them
        self._last: list[float] = []  # of the chains at the last commit

    def note(self, iteration: int, z: Tensor) -> None:
        """Keep one chain's state, if it is its iteration's turn."""
        if iteration % self._stride:
            return
        if len(self._states) == self._most:
            self._states, self._energies, self._stride = self._states[::2], self._energies[::2], 2 * self._stride
        self._states.append(z[iteration // self._stride % len(z)].clone())

    def tensors(self, z: Tensor) -> dict[str, Tensor]:
        """What a checkpoint keeps, with the energies of the chains at ``z``."""
        if len(self._energies) < len(self._states):
            new = torch.stack(self._states[len(self._energies) :])
            self._energies += self._evaluate(new).tolist()
        return {
            "states": torch.stack(self._states),
            "energies": torch.tensor(self._energies, dtype=torch.float64),
            "last": self._evaluate(z[:MOST]),
            "stride": torch.tensor(self._stride),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """:raises StoreError: if they aren't those of such a run."""
        states, energies = tensors["states"], tensors["energies"]
        if states.shape != (len(energies), self._potential.dim) or not int(tensors["stride"]) > 0:
            raise StoreError(f"the checkpoint is damaged: its earlier states are of shape {tuple(states.shape)}")
        self._stride, self._energies, self._last = int(tensors["stride"]), energies.tolist(), tensors["last"].tolist()
        self._states = list(states.to(self._potential.device, self._potential.dtype, copy=True).unbind())

    def agree(self, z: Tensor, tolerance: float) -> bool:
        """Whether the energies are what they were then, at the last states ``z`` too."""
        before = torch.tensor(self._energies + self._last, dtype=torch.float64)
        now = self._evaluate(torch.cat([*(state[None] for state in self._states), z[:MOST]]))
        return len(before) == len(now) and close(before, now, tolerance)

    def _evaluate(self, z: Tensor) -> Tensor:
        rows = {
            name: torch.arange(size, device=z.device).expand(len(z), size)
            for name, (_, size) in self._potential.row_counts.items()
        }
        return energies(self._potential, z, rows or None, self._num_chains)


def energies(potential: Potential, z: Tensor, rows: Rows | None, at_once: int) -> Tensor:
    """Energies ``(C,)`` of states, so many at a time, in double precision on the CPU."""
    starts = range(0, len(z), at_once)
    with torch.no_grad():
        parts = [
            potential(z[i : i + at_once], rows and {name: index[i : i + at_once] for name, index in rows.items()})
            for i in starts
        ]
    return torch.cat(parts).to("cpu", torch.float64) if parts else torch.empty(0, dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether energies agree to this relative tolerance; where one isn't finite, the other mustn't be either."""
    finite = a.isfinite()
    near = (a - b).abs() <= tolerance * a.abs().clamp(min=1.0)
    return bool(((finite == b.isfinite()) & (near | ~finite)).all())
