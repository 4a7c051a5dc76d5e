"""Where a batch of alignments stands: a permutation, signs and log-scales for each source, and how they act."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.alignment.units import Units, actor
from pyro_symmetric.symmetry.factored import along_axis
from pyro_symmetric.symmetry.permutation import Permutation, PermutationGroup, _permute_axis
from pyro_symmetric.symmetry.rescaling import RescalingGroup, ScalingGroup, SignGroup

# Stamps. One count for all: states go from one matcher to the next, and `next` is safe between threads.
CLOCK = count(1)


@dataclass(frozen=True, eq=False)
class Groups:
    """The parts of a symmetry that alignment decides over, all in one view of the sites.

    :param roots: the sets of units, see :mod:`~pyro_symmetric.alignment.units`.
    """

    permutations: PermutationGroup
    signs: SignGroup
    scalings: ScalingGroup
    roots: tuple[Units, ...]

    @property
    def rescalings(self) -> dict[str, RescalingGroup[Any]]:
        """The multipliers, by kind."""
        return {"sign": self.signs, "scale": self.scalings}

    def offsets(self, kind: str) -> dict[str, slice]:
        """Where the units of each multiplier lie among all of its kind."""
        offsets, start = {}, 0
        for name, n in self.rescalings[kind].factors.items():
            offsets[name] = slice(start, start + n)
            start += n
        return offsets


class State:
    """The elements of a batch of sources.

    :ivar images: factor -> LongTensor ``(B, n)``.
    :ivar multipliers: ``"sign"`` -> ``(B, all signs)`` of 1 and -1; ``"scale"`` -> ``(B, all scales)``, log-scales.
    :ivar stamps: actor -> LongTensor ``(B,)``; equal stamps mean equal contents.
    """

    def __init__(self, images: dict[str, Tensor], multipliers: dict[str, Tensor], stamps: dict[str, Tensor]):
        self.images = images
        self.multipliers = multipliers
        self.stamps = stamps

    @classmethod
    def identity(cls, groups: Groups, batch: int, device: torch.device | None) -> State:
        """Nothing is moved."""
        images = {n: torch.arange(k, device=device).repeat(batch, 1) for n, k in groups.permutations.factors.items()}
        sizes = {kind: sum(group.factors.values()) for kind, group in groups.rescalings.items()}
        empty = torch.zeros(batch, sizes["scale"], dtype=torch.float64, device=device)
        signs = torch.ones(batch, sizes["sign"], dtype=torch.float64, device=device)
        names = [units.name for root in groups.roots for units in root.tree()]
        names += [actor(kind, name) for kind, group in groups.rescalings.items() for name in group.factors]
        stamps = {name: torch.zeros(batch, dtype=torch.long) for name in names}
        return cls(images, {"sign": signs, "scale": empty}, stamps)

    def rows(self, rows: Tensor) -> State:
        """Some of the sources, as a state of its own."""
        if len(rows) == len(next(iter(self.stamps.values()), rows)):
            return self.copy()  # rows are always in order
        here = {name: value[rows.to(value.device)] for name, value in self.images.items()}
        multipliers = {kind: value[rows.to(value.device)] for kind, value in self.multipliers.items()}
        return State(here, multipliers, {name: value[rows] for name, value in self.stamps.items()})

    def put(self, rows: Tensor, other: State, actors: Iterable[str] | None = None) -> None:
        """Take over what ``other`` holds for these sources; ``actors`` are what has changed (None: stamps are kept)."""
        for mine, theirs in ((self.images, other.images), (self.multipliers, other.multipliers)):
            for name, value in mine.items():
                value[rows.to(value.device)] = theirs[name]
        if actors is None:
            for name, value in self.stamps.items():
                value[rows] = other.stamps[name]
        else:
            self.touch(rows, actors)

    def copy(self) -> State:
        """An independent copy."""
        return State(
            {name: value.clone() for name, value in self.images.items()},
            {kind: value.clone() for kind, value in self.multipliers.items()},
            {name: value.clone() for name, value in self.stamps.items()},
        )

    def joined(self, others: Sequence[State]) -> State:
        """Several batches as one."""
        states = (self, *others)
        return State(
            {name: torch.cat([state.images[name] for state in states]) for name in self.images},
            {kind: torch.cat([state.multipliers[kind] for state in states]) for kind in self.multipliers},
            {name: torch.cat([state.stamps[name] for state in states]) for name in self.stamps},
        )

    def touch(self, rows: Tensor, actors: Iterable[str]) -> None:
        """Mark actors as changed."""
        now = next(CLOCK)
        for name in actors:
            self.stamps[name][rows] = now


class Action:
    """How states act on sites: multipliers first, then permutations, all of them or some."""

    def __init__(self, groups: Groups, device: torch.device | None):
        self._groups, self._device = groups, device
        self._layers: dict[tuple[str, int], list[tuple[str, Tensor, Tensor]]] = {}
        # Axes that one factor fills in order need no lookup.
        self._plain = {
            (site, dim): members[0][0]
            for site in groups.permutations.sites
            for dim, members in groups.permutations.members(site).items()
            if len(members) == 1 and is_plain(members[0][1].index, groups.permutations.view_shapes[site][dim])
        }
        for kind, group in groups.rescalings.items():
            offsets, count = groups.offsets(kind), sum(group.factors.values())
            for site in group.sites:
                for dim, members in group.members(site).items():
                    length = group.view_shapes[site][dim]
                    unit, exponent = torch.full((length,), count), torch.zeros(length, dtype=torch.float64)
                    layers = []
                    for name, axis in members:
                        index = axis.index.cpu()
                        if bool((unit[index] < count).any()):  # two multipliers at one position: a layer each
                            layers.append((kind, unit.to(device), exponent.to(device)))
                            unit, exponent = torch.full((length,), count), torch.zeros(length, dtype=torch.float64)
                        unit[index] = offsets[name].start + torch.arange(index.shape[1])
                        exponent[index] = float(axis.exponent)
                    layers.append((kind, unit.to(device), exponent.to(device)))
                    self._layers.setdefault((site, dim), []).extend(layers)

    def moved(
        self,
        value: Tensor,
        site: str,
        state: State,
        dim: int | None = None,
        active: Sequence[str] = (),
        released: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """A site of every source, moved.

        :param value: moments ``(B, *view_shape, channels)``, the deviations (if any) in the second channel.
        :param dim: an axis on which the factors ``active`` don't act, nor the multipliers of the units ``released``
            (kind -> bool, all units of the kind and one more).
        """
        value = self._multiplied(value, site, state, dim, released or {})
        dims = value.dim() - 1
        for own, members in self._groups.permutations.members(site).items():
            held = [name for name, _ in members if own != dim or name not in active]
            if not held:
                continue
            index = self._index(site, own, state, held)
            value = _permute_axis(value, own, dims, index if len(index) > 1 else index[0])
        return value

    def order(self, site: str, dim: int, state: State) -> Tensor:
        """Where each position of an axis is filled from, ``(B, length)``."""
        names = [name for name, _ in self._groups.permutations.members(site).get(dim, [])]
        return self._index(site, dim, state, names)

    def _index(self, site: str, dim: int, state: State, names: Sequence[str]) -> Tensor:
        """Where each position of an axis is filled from by these of its factors, the others left out."""
        if (site, dim) in self._plain:
            return state.images[self._plain[site, dim]]
        group = self._groups.permutations
        images = {name: state.images[name] for name in names}
        for name, _ in group.members(site).get(dim, []):
            if name not in images:
                images[name] = torch.arange(group.factors[name], device=self._device)
        index = Permutation(group, images).axis_index(site, dim)
        return index if index.dim() > 1 else index.to(self._device)[None]

    def _multiplied(
        self, value: Tensor, site: str, state: State, dim: int | None, released: Mapping[str, Tensor]
    ) -> Tensor:
        axes = [key for key in self._layers if key[0] == site]
        if not axes:
            return value
        flips: list[Tensor] = []
        for _, own in axes:
            for kind, unit, exponent in self._layers[site, own]:
                if own == dim and kind in released:
                    unit = torch.where(released[kind][unit], len(released[kind]) - 1, unit)
                # Units past the last are not multiplied.
                padded = torch.nn.functional.pad(state.multipliers[kind], (0, 1), value=float(kind == "sign"))[:, unit]
                factor = padded**exponent if kind == "sign" else (exponent * padded).exp()
                factor = along_axis(factor, own, value.dim() - 2).unsqueeze(-1).to(value)
                if kind == "sign":
                    flips.append(factor)
                else:
                    value = value * factor
        for flip in flips:
            # Signs flip means, never deviations.
            value = torch.cat([value[..., :1] * flip, value[..., 1:]], -1)
        return value


def is_plain(index: Tensor, length: int) -> bool:
    """Whether unit ``i`` simply is position ``i``."""
    return index.shape == (1, length) and torch.equal(index[0].cpu(), torch.arange(length))
