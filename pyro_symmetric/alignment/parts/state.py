"""Where a batch of alignments stands: a permutation, signs and log-scales for each source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.alignment.parts.problem import Element, Parts, Problem
from pyro_symmetric.alignment.parts.units import Move, actor
from pyro_symmetric.symmetry.finite import FiniteGroup, SignedPermutation
from pyro_symmetric.symmetry.permutation import Permutation, PermutationGroup
from pyro_symmetric.symmetry.rescaling import RescalingGroup, Scaling, ScalingGroup, Sign, SignGroup
from pyro_symmetric.symmetry.weight_symmetry import SymmetryElement

# Stamps. One count for all: states go from one matcher to the next, and `next` is safe between threads.
CLOCK = count(1)
# Log-scales that are closer than this are the same.
SAME_SCALE = 1e-9


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

    def __len__(self) -> int:
        return len(self.multipliers["sign"])

    @classmethod
    def identity(cls, parts: Parts, batch: int, device: torch.device | None) -> State:
        """Nothing is moved."""
        images = {n: torch.arange(k, device=device).repeat(batch, 1) for n, k in parts.permutations.factors.items()}
        sizes = {kind: sum(group.factors.values()) for kind, group in parts.rescalings.items()}
        empty = torch.zeros(batch, sizes["scale"], dtype=torch.float64, device=device)
        signs = torch.ones(batch, sizes["sign"], dtype=torch.float64, device=device)
        names = [units.name for root in parts.roots for units in root.tree()]
        names += [actor(kind, name) for kind, group in parts.rescalings.items() for name in group.factors]
        stamps = {name: torch.zeros(batch, dtype=torch.long) for name in names}
        return cls(images, {"sign": signs, "scale": empty}, stamps)

    def rows(self, rows: Tensor) -> State:
        """Some of the sources, as a state of its own."""
        if len(rows) == len(self):
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

    def differs(self, other: State, move: Move) -> tuple[Tensor, Tensor]:
        """For which sources another state differs in what a move decides, and in more than scales, bool ``(B,)``."""
        rearranged = torch.zeros(len(self), dtype=torch.bool)
        for name in (name for units in move.active for name in units.names):
            rearranged |= (self.images[name] != other.images[name]).any(-1).cpu()
        if move.multiplier is None and not any(move.slots.values()):
            return rearranged, rearranged
        rearranged |= (self.multipliers["sign"] != other.multipliers["sign"]).any(-1).cpu()
        scales = (self.multipliers["scale"] - other.multipliers["scale"]).abs() > SAME_SCALE
        return rearranged | scales.any(-1).cpu(), rearranged


def element_of(problem: Problem, state: State, shifts: Mapping[str, Tensor], batch_shape: Sequence[int]) -> Element:
    """A state as an element of the group that was given.

    :param shifts: site -> constants in front of a softmax, ``(B,)``.
    """
    shape, group = tuple(batch_shape), problem.group
    images = {name: value.reshape(*shape, -1) for name, value in state.images.items()}

    def cut(kind: str, whole: RescalingGroup[Any]) -> dict[str, Tensor]:
        values = state.multipliers[kind] if kind == "sign" else state.multipliers[kind].exp()
        found = {name: values[:, at].reshape(*shape, -1) for name, at in problem.parts.offsets(kind).items()}
        return {name: found.get(name, values.new_ones(*shape, n)) for name, n in whole.factors.items()}

    if isinstance(group, PermutationGroup):
        return Permutation(group, images)
    if isinstance(group, SignGroup):
        return Sign(group, cut("sign", group))
    if isinstance(group, ScalingGroup):
        return Scaling(group, cut("scale", group))
    permutation, sign = Permutation(group.permutations, images), Sign(group.signs, cut("sign", group.signs))
    if isinstance(group, FiniteGroup):
        return SignedPermutation(group, permutation, sign)
    shift = group.shifts.element({site: value.reshape(shape) for site, value in shifts.items()})
    return SymmetryElement((shift, sign, Scaling(group.scalings, cut("scale", group.scalings)), permutation))
