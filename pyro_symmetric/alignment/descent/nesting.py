"""Deciding a whole family at once: units matched, units inside units matched for every pair of the outer ones.

For a pair (i, k) of outer units the units inside have a best arrangement of their own; its score counts for the pair.
All sets of one kind are stacked, so that one matrix of scores over the units of all slots serves all pairs.

That makes ``B n^2`` problems of ``n`` outer units. Those that are small, or solved row by row, are decided together
(:func:`~pyro_symmetric.alignment.descent.assignment.assign`); all others go to the solver one by one, at about 10, 30
and 130 microseconds each for 16, 32 and 64 units inside: 0.02 s for twelve heads of 64 rows, 2 s for a hundred such
sources. That is 2 to 7 % of the time that their alignment takes; nearly all the rest goes into the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.choices import FLIPS, POLISH
from pyro_symmetric.alignment.descent.assignment import assign
from pyro_symmetric.alignment.parts.state import State
from pyro_symmetric.alignment.parts.units import Move, Slot, Units


class Candidates(Protocol):
    """Scores of pairs of units, and what is chosen for a pair."""

    @property
    def slots(self) -> Sequence[Slot]:
        """The multipliers that are chosen."""

    def scores(self) -> Tensor:
        """The best score of each pair, ``(B, n, n)``."""

    def of_pairs(self, sources: Tensor, steps: int) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        """Signs and log-scales, by number of the slot, and what they gain over the present signs."""


def decide_units(move: Move, choices: Mapping[str, Candidates], state: State, new: State, shorter: int = 0) -> None:
    """Put the best decision into ``new``.

    :param choices: name of each active set -> its candidates.
    :param state: where all stands.
    :param shorter: how often the step was shortened: the bonus for units that stay grows.
    """
    if move.root is None:
        raise ValueError("a move of multipliers alone decides no units")
    present = sources_of(move, move.root, state)
    scores, arranged = _pair_scores(move, move.root, choices, present, shorter)
    _write(move, move.root, assign(scores), arranged, choices, present, new, shorter)


def sources_of(move: Move, root: Units, state: State) -> dict[str, Tensor]:
    """For each active set, which of the source's units is in each of the reference's now, ``(B, count)``."""
    found: dict[str, Tensor] = {}

    def visit(units: Units, paths: Tensor) -> None:
        own = torch.stack([state.images[name] for name in units.names], 1)
        local = own.gather(1, paths.unsqueeze(-1).expand(-1, -1, units.size))
        found[units.name] = (paths.unsqueeze(-1) * units.size + local).flatten(1)
        for child in move.inside(units):
            visit(child, found[units.name])

    images = state.images[root.name]
    visit(root, torch.zeros(len(images), 1, dtype=torch.long, device=images.device))
    return found


# small steps --------------------------------------------------------------------------------------------------------


def _pair_scores(
    move: Move, units: Units, choices: Mapping[str, Candidates], present: Mapping[str, Tensor], shorter: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Scores of all pairs of units, those inside at their best: ``(B, count, count)``.

    :returns: the scores, and for each set inside its best arrangement for each pair, ``(B, count, count, size)``.
    """
    scores = choices[units.name].scores()
    arranged: dict[str, Tensor] = {}
    n = units.count
    for child in move.inside(units):
        inner, further = _pair_scores(move, child, choices, present, shorter)
        inner = inner.unflatten(2, (n, child.size)).unflatten(1, (n, child.size)).transpose(2, 3)
        arranged |= further | {child.name: assign(inner)}
        scores = scores + inner.gather(-1, arranged[child.name].unsqueeze(-1)).squeeze(-1).sum(-1)
    if shorter:
        bonus = (2**shorter - 1) * scores.flatten(1).std(1, correction=0)
        stay = present[units.name].unsqueeze(-1)
        scores = scores.scatter_add(-1, stay, bonus[:, None, None].expand(stay.shape))
    return scores, arranged


def _write(
    move: Move,
    units: Units,
    sources: Tensor,
    arranged: Mapping[str, Tensor],
    choices: Mapping[str, Candidates],
    present: Mapping[str, Tensor],
    new: State,
    shorter: int,
) -> None:
    """Put a decision into a state: ``sources``, ``(B, count)``, is the source's unit in each of the reference's."""
    m = units.size
    # Images are named after the slots that units come from.
    paths = sources.unflatten(1, (-1, m))[..., 0] // m
    local = torch.empty_like(sources).unflatten(1, (-1, m))
    local.scatter_(1, paths.unsqueeze(-1).expand_as(local), sources.unflatten(1, (-1, m)) % m)
    for name, image in zip(units.names, local.unbind(1), strict=True):
        new.images[name] = image
    _write_multipliers(choices[units.name], sources, present[units.name], new, shorter)
    for child in move.inside(units):
        index = sources[:, :, None, None].expand(-1, -1, 1, child.size)
        inner = arranged[child.name].gather(2, index).squeeze(2)
        child_sources = (sources.unsqueeze(-1) * child.size + inner).flatten(1)
        _write(move, child, child_sources, arranged, choices, present, new, shorter)


def _write_multipliers(choices: Candidates, sources: Tensor, present: Tensor, new: State, shorter: int) -> None:
    if not choices.slots:
        return
    signs, scales, gain = choices.of_pairs(sources, POLISH)
    stays = (sources == present) if shorter else torch.zeros_like(sources, dtype=torch.bool)
    largest = torch.where(stays, gain, 0.0).amax(-1, keepdim=True)
    held = stays & (gain < FLIPS[shorter] * largest)
    for k, slot in enumerate(choices.slots):
        units = slot.units.to(sources.device)[sources]
        before = new.multipliers[slot.kind].gather(-1, units)
        if slot.kind == "sign":
            value = torch.where(held, before, signs[k])
        else:
            value = torch.where(stays, before + (scales[k] - before) * 0.5**shorter, scales[k])
        new.multipliers[slot.kind].scatter_(-1, units, value.double())
