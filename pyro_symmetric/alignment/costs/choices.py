"""The best signs and scales of pairs of units, and the scores that the pairs have with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.cost import Cost
from pyro_symmetric.alignment.costs.rescale import Side, best_scale, value_at
from pyro_symmetric.alignment.parts.units import Slot, Term

# Newton steps for the scores of all pairs, and for the pairs that are chosen.
STEPS, POLISH = 3, 40
# Which part of the largest gain a flip must have, in shorter and shorter steps.
FLIPS = (0.0, 0.5, 0.9, 1.0)


@dataclass(frozen=True, eq=False)
class Block:
    """A term's scores of pairs, ``(B, n, n)``: what a sign flips, what it doesn't, what is quadratic in a scale."""

    odd: Tensor
    even: Tensor | None = None
    quadratic: Tensor | None = None

    def put(self, rows: Tensor, other: Block) -> None:
        """Overwrite the scores of some sources."""
        for mine, theirs in zip(self._parts(), other._parts(), strict=True):
            mine[rows.to(mine.device)] = theirs

    def rows(self, rows: Tensor) -> Block:
        """The scores of some sources."""
        parts = [None if part is None else part[rows.to(part.device)] for part in self._all()]
        return Block(parts[0], *parts[1:])  # type: ignore[arg-type]

    def of_pairs(self, sources: Tensor) -> Block:
        """The scores of unit ``i`` with unit ``sources[i]`` alone, ``(B, n)``, in float64."""
        n = sources.shape[-1]
        parts = [
            None if part is None else part.expand(-1, n, -1).gather(-1, sources.unsqueeze(-1)).squeeze(-1).double()
            for part in self._all()
        ]
        return Block(parts[0], *parts[1:])  # type: ignore[arg-type]

    def _all(self) -> tuple[Tensor | None, ...]:
        return self.odd, self.even, self.quadratic

    def _parts(self) -> list[Tensor]:
        return [part for part in self._all() if part is not None]


@dataclass(frozen=True, eq=False)
class Choices:
    """What is to be chosen for the pairs of one set of units.

    :param slots: the multipliers.
    :param terms: the terms, and
    :param blocks: their scores.
    :param present: the value of each slot's multipliers now, ``(B, n)`` by unit of the source.
    :param fixed: number of a scale -> log-scales that are given rather than chosen, ``(B, n, n)``.
    :param entries: how many entries each unit has in each term.
    :param shape: ``(B, n, n)``.
    """

    slots: tuple[Slot, ...]
    terms: Sequence[Term]
    blocks: Sequence[Block]
    present: Sequence[Tensor]
    fixed: Mapping[int, Tensor]
    entries: Mapping[Term, int]
    cost: Cost
    shape: tuple[int, int, int]
    device: torch.device

    def scores(self) -> Tensor:
        """The best score of each pair, float64 ``(B, n, n)``."""
        total = torch.zeros(self.shape, dtype=torch.float64, device=self.device)
        for term, block in zip(self.terms, self.blocks, strict=True):
            if not term.signs and term.scale is None:
                total += block.odd
        if self.slots and self.terms:
            present = [value.unsqueeze(-2) for value in self.present]
            best: Tensor | None = None
            for signs in self._signs():
                value, _ = self._with(signs, self.blocks, present, self.fixed, STEPS)
                best = value if best is None else torch.maximum(best, value)
            total = total if best is None else total + best
        return total

    def of_pairs(self, sources: Tensor, steps: int) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        """The best signs and log-scales of given pairs, and what they gain over the present signs: ``(B, n)`` each.

        :param sources: the unit of the source in each pair.
        """
        blocks = [block.of_pairs(sources) for block in self.blocks]
        present = [value.gather(-1, sources) for value in self.present]
        fixed = {k: t.gather(-1, sources.unsqueeze(-1)).squeeze(-1) for k, t in self.fixed.items()}
        now = {k: present[k] for k, slot in enumerate(self.slots) if slot.kind == "sign"}
        best, scales = self._with(now, blocks, present, fixed, steps)
        before, signs = best, dict(now)
        for given in self._signs():
            value, found = self._with(given, blocks, present, fixed, steps)
            better = value > best
            best = torch.where(better, value, best)
            signs = {k: torch.where(better, given[k], signs[k]) for k in signs}
            scales = {k: torch.where(better, found[k], scales[k]) for k in scales}
        return signs, scales, best - before

    # small steps ----------------------------------------------------------------------------------------------------

    def _signs(self) -> Iterator[dict[int, float]]:
        numbers = [k for k, slot in enumerate(self.slots) if slot.kind == "sign"]
        for values in product((1.0, -1.0), repeat=len(numbers)):
            yield dict(zip(numbers, values, strict=True))

    def _with(
        self,
        signs: Mapping[int, Tensor | float],
        blocks: Sequence[Block],
        present: Sequence[Tensor],
        fixed: Mapping[int, Tensor],
        steps: int,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Score and best log-scales under given signs; terms that nothing multiplies are left out."""
        total: Tensor | None = None
        sides: dict[int, dict[int, Side]] = {}
        gammas: dict[int, float] = {}
        for term, block in zip(self.terms, blocks, strict=True):
            if not term.signs and term.scale is None:
                continue
            linear = block.odd
            for k in term.signs:
                linear = linear * signs[k]
            linear = linear if block.even is None else linear + block.even
            if term.scale is None:
                total = linear if total is None else total + linear
                continue
            quadratic = torch.zeros_like(linear) if block.quadratic is None else block.quadratic
            own = sides.setdefault(term.scale, {})
            if term.exponent in own:
                linear, quadratic = linear + own[term.exponent].linear, quadratic + own[term.exponent].quadratic
            own[term.exponent] = Side(term.exponent, linear, quadratic)
            if not self.cost.squared:
                gammas[term.scale] = gammas.get(term.scale, 0.0) + term.exponent * self.entries[term]
        scales = {k: value for k, value in enumerate(present) if self.slots[k].kind == "scale"}
        for k, own in sides.items():
            gamma = gammas.get(k, 0.0)
            if k in fixed:
                scales[k] = fixed[k]
                value = value_at(list(own.values()), gamma, fixed[k])
            else:
                value, scales[k] = best_scale(list(own.values()), gamma, scales[k], steps)
            total = value if total is None else total + value
        if total is None:  # no term that the multipliers enter can be looked at yet
            total = present[0].new_zeros(())
        return total, scales
