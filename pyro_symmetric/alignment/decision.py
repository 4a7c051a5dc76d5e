r"""One decision: the best places, signs and scales of some units, and of all that lies inside them, given the others.

Places solve a linear assignment problem whose scores come from
:class:`~pyro_symmetric.alignment.costs.protocol.MatchCost`; signs and scales follow. Of units with others inside them
every pair is tried with its inside at its best: under each cyclic shift of the outer units, of which ``n`` meet all
pairs, the units inside are matched first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from pyro_symmetric.alignment.assignment import assign
from pyro_symmetric.alignment.costs.protocol import MatchCost, Matched
from pyro_symmetric.alignment.elements import differing, joined, replaced
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.units import MOVES

# Which part of the largest gain a flip must have, in shorter and shorter steps.
FLIPS = (0.0, 0.5, 0.9, 1.0)
# How often at most to go through sets of units that lie inside the same ones and meet in one site.
INSIDE_SWEEPS = 10
# From how many places these are matched; the best end of each pair of outer units counts.
INSIDE_STARTS = 4
# How many pairs of a shift and a source are tried together.
TRIED_TOGETHER = 256


class Decision:
    """The way in which units are decided.

    :param cost: of a batch of sources.
    :ivar moves: the units that are decided one after the other; all others are decided with what they lie inside.
    :ivar families: name of the units -> these, and what is decided with them.
    :ivar meeting: those in which sets that lie inside the same units meet in one site: they are matched by turns.
    """

    def __init__(self, cost: MatchCost):
        self.cost, self.group = cost, cost.group
        units = self.group.units
        self._permuted = set(self.group.names("permute"))
        self._own = {name: [name, *cost.riders(name)] for name in units}
        self._riding = {rider for own in self._own.values() for rider in own[1:]}
        lone = [
            name
            for name, one in units.items()
            if one.size == 1
            and one.parent
            and name not in self._riding | self._permuted
            and not self.group.children(name)
        ]
        self.moves = [*self.group.roots, *lone]
        self.families = {m: [n for n in self.group.family(m) if n == m or n not in lone] for m in units}
        # What is matched within a unit; a multiplier that doesn't ride along is moved alone.
        self._inside = {
            name: [child for child in self.group.children(name) if child not in {*self._riding, *lone}]
            for name in units
        }
        self.meeting = {
            name
            for name, inside in self._inside.items()
            if any(cost.coupled(one, other) for one in inside for other in inside)
        }

    def __call__(self, name: str, element: Element, rows: Tensor, known: Collection[str], shorter: int = 0) -> Element:
        """The element with some units, and all that lies inside them, where they are best.

        :param element: of batch shape ``(..., R)``, for the sources ``rows``.
        :param known: names of the units whose places mean something.
        :param shorter: how often the step was shortened.
        """
        before = element
        if name in self._permuted and self._inside[name]:
            return self._matched_with_inside(name, element, rows, known, shorter)
        if self._inside[name]:
            before = element = self._inside_matched(name, element, rows, known)
        elif name in self._permuted:
            scores = self.cost.pairs(name, element, rows, known)
            element = replaced(element, {name: self._assigned(name, element, scores, shorter)})
        return self._multiplied(name, element, rows, known, shorter, before)

    def in_order(self, names: Collection[str], known: Collection[str]) -> Iterator[str]:
        """The units, those of which the largest part is known first; what is known grows meanwhile."""
        waiting = list(names)
        while waiting:
            name = max(waiting, key=lambda name: self.cost.share(name, known))
            waiting.remove(name)
            yield name

    # what lies inside -----------------------------------------------------------------------------------------------

    def _inside_matched(
        self, name: str, element: Element, rows: Tensor, known: Collection[str], start: int = 0
    ) -> Element:
        """All that lies inside some units, matched where these are now: a forward start, and sweeps if sets meet.

        :param start: which start it is; all but the first are from random places.
        """
        inside = self._inside[name]
        within = {n for child in inside for n in self.families[child]}
        placed = (set(known) | {name}) - within
        if start:
            element = replaced(element, {n: _random(element[n]) for n in within & self._permuted})
            placed |= within
        for child in () if start else self.in_order(inside, placed):
            element = self(child, element, rows, placed)
            placed |= set(self.families[child])
        for _ in range(INSIDE_SWEEPS if name in self.meeting else 0):
            before = element
            for child in inside:
                element = self(child, element, rows, placed)
            if not bool(differing(self.families[name], before, element)[0].any()):
                break
        return element

    def _matched_with_inside(
        self, name: str, element: Element, rows: Tensor, known: Collection[str], shorter: int
    ) -> Element:
        """Units matched with each pair's inside at its best, which all cyclic shifts of the units go through."""
        units, n = self.group[name], self.group[name].size
        places = torch.arange(n, device=self.cost.device)
        together = max(1, TRIED_TOGETHER // max(1, element.batch_shape.numel()))
        tried, gains = [], []
        for start in range(INSIDE_STARTS if name in self.meeting else 1):
            for shifts in places.split(together):
                trial = element.expand((len(shifts), *element.batch_shape))
                images = (places + shifts.unsqueeze(1)) % n
                images = images.reshape(len(shifts), *[1] * (trial[name].dim() - 2), n).expand(trial[name].shape)
                trial = self._inside_matched(name, replaced(trial, {name: images}), rows, known, start)
                best = self.cost.matched(name, trial, rows, known)
                tried.append(self._with_multipliers(name, trial, best))
                gains.append(best.score)
        # (start, shift s, ..., copy, i): the score of i with i + s, from the best start of each pair.
        gain, start_of = torch.cat(gains).unflatten(-1, (units.copies, n)).unflatten(0, (-1, n)).max(0)
        shift_of = (places - places.unsqueeze(1)) % n
        scores = gain.movedim(0, -1).gather(-1, shift_of.expand(*gain.shape[1:], n))
        element = replaced(element, {name: self._assigned(name, element, scores, shorter)})
        # The trial in which each of the source's units came to where it is now.
        index = element.unit_index(name)
        chosen = (index.unflatten(-1, (units.copies, n)) % n - places) % n
        chosen = chosen + n * start_of.movedim(0, -1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        return self._taken(name, element, joined(tried), _by_source(chosen.flatten(-2), index))

    def _taken(self, name: str, element: Element, tried: Element, by_source: Tensor) -> Element:
        """Moves of all inside each unit, and its multipliers, from the trial that is named for it."""
        parts = []
        for move, part in zip(MOVES, tried.parts[:3], strict=False):
            found = {}
            for inner in self.families[name]:
                if inner in part and not (move == "permute" and inner == name):
                    count = self.group[inner].count // self.group[name].count
                    index = by_source.repeat_interleave(count, -1).unsqueeze(0)
                    every = part[inner].flatten(1 + len(element.batch_shape))
                    found[inner] = every.gather(0, index).reshape(*element.batch_shape, *self.group[inner].shape)
            parts.append(found)
        return replaced(element, *parts)

    # places and multipliers -----------------------------------------------------------------------------------------

    def _assigned(self, name: str, element: Element, scores: Tensor, shorter: int) -> Tensor:
        """The permutation of some units with the largest sum of scores ``(..., copies, size, size)``."""
        units = self.group[name]
        # Permutations are named after the copies that units come from.
        outer = None if units.parent is None else element.unit_index(units.parent)
        if shorter:
            stay = element[name].reshape(*element.batch_shape, units.copies, units.size)
            scores = _staying(scores, stay if outer is None else _copies(stay, outer), shorter)
        places = assign(scores)
        places = places if outer is None else _copies(places, outer.argsort(-1))
        return places.reshape(element[name].shape)

    def _multiplied(
        self,
        name: str,
        element: Element,
        rows: Tensor,
        known: Collection[str],
        shorter: int = 0,
        present: Element | None = None,
    ) -> Element:
        """The best signs and scales of units, and of what rides along, where they are.

        In shorter steps, units that stay where they were flip only if that gains much, and their scales go part of the
        way.
        """
        if not any(self.group[own].moves & {"flip", "scale"} for own in self._own[name]):
            return element
        best = self.cost.matched(name, element, rows, known)
        return self._with_multipliers(name, element, best, shorter, present)

    def _with_multipliers(
        self, name: str, element: Element, best: Matched, shorter: int = 0, present: Element | None = None
    ) -> Element:
        """The element with given signs and scales of what is in place."""
        index = element.unit_index(name)
        stays = index == (present or element).unit_index(name)

        def now(numbers: Tensor) -> Tensor:
            return numbers.flatten(len(element.batch_shape)).gather(-1, index)

        signs, logs = {}, {}
        for own, pull in best.pulls.items():
            before = now(element.signs[own])
            gain = torch.where(stays, -pull * before, 0.0)
            sign = torch.where(pull == 0, before, torch.where(pull < 0, -1.0, 1.0).to(before))
            held = stays & (gain < FLIPS[shorter] * gain.amax(-1, keepdim=True))
            signs[own] = _by_source(torch.where(held, before, sign), index).reshape(element.signs[own].shape)
        for own, log in best.log_scales.items():
            before = now(element.log_scales[own])
            log = torch.where(stays, before + (log - before) * 0.5**shorter, log) if shorter else log
            logs[own] = _by_source(log, index).reshape(element.log_scales[own].shape)
        return replaced(element, signs=signs, log_scales=logs)


# small steps --------------------------------------------------------------------------------------------------------


def _copies(values: Tensor, order: Tensor) -> Tensor:
    """Reorder the copies of ``batch + (copies, n)``."""
    return values.gather(-2, order.unsqueeze(-1).expand(*order.shape, values.shape[-1]))


def _by_source(values: Tensor, index: Tensor) -> Tensor:
    """Numbers of what is in each place, ``batch + (count,)``, by the number of the unit that came there."""
    index = index.expand(values.shape)
    return torch.empty_like(values).scatter_(-1, index, values)


def _staying(scores: Tensor, stay: Tensor, shorter: int) -> Tensor:
    """Scores with a bonus for the pairs that are in place, which grows as steps get shorter."""
    bonus = (2**shorter - 1) * scores.flatten(-3).std(-1, correction=0)
    return scores.scatter_add(-1, stay.unsqueeze(-1), bonus[..., None, None, None].expand(*stay.shape, 1))


def _random(images: Tensor) -> Tensor:
    """Random permutations, as many as given."""
    return torch.rand(images.shape, device=images.device).argsort(-1)
