r"""Coordinate descent over permutations, signs and scales, for a batch of sources at once.

With all but one set of units held, the best permutation of that one solves a linear assignment problem whose scores
come from :class:`~pyro_symmetric.alignment.scores.protocol.Scores`; its signs and scales follow. Of units with others
inside them every pair is tried with its inside at its best: under each cyclic shift of the outer units, of which ``n``
meet all pairs, the units inside are matched first.

Two habits make this fast and good (compare ``textbook``, which starts at the identity and visits all units in every
sweep): the *forward start* matches each set of units by that alone whose other units are placed already, so that
nothing is compared with what lies in no meaningful order yet; the *work-list* then looks again only at those units
whose neighbours have changed. Further descents visit units in random order, from a *kick* of the best element so far
(iterated local search).

All sources of a batch go through the same steps together; those for which there is nothing to do sit out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_symmetric.alignment.assignment import assign
from pyro_symmetric.alignment.elements import put, replaced, some
from pyro_symmetric.alignment.scores.protocol import Scores
from pyro_symmetric.groups.element import Element

# How many units a kick shuffles. On random networks of widths 16 to 256, shares of 0.2 and 0.3 ended lowest among
# 0.1 to 1; in tiny layers, six units (that is, all) reached the enumerated optimum more often than two to four.
KICKED_UNITS = 6
KICKED_SHARE = 0.25
# How often at most to shorten the step of units whose scores are a linearisation; a third time was never needed.
SHORTER_STEPS = 3
# Which part of the largest gain a flip must have, in shorter and shorter steps.
FLIPS = (0.0, 0.5, 0.9, 1.0)
# How much more than another a step has to gain that changes scales alone: descents over scales of many layers converge
# slowly, by ever smaller steps that no one will notice. Log-scales that are closer than this are the same.
SCALE_STEPS, SAME_SCALE = 100.0, 1e-9
# How often at most to go through sets of units that lie inside the same ones and meet in one site.
INSIDE_SWEEPS = 10
# How often at most to fit the scales of such sets by turns.
RESCALINGS = 200
# From how many places these are matched; the best end of each pair of outer units counts.
INSIDE_STARTS = 4
# How many pairs of a shift and a source are tried together.
TRIED_TOGETHER = 256

Events = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Ended:
    """Where descents of a batch of sources ended.

    :param element: of batch shape ``(B,)``.
    :param cost: float64 ``(B,)``.
    :param events: the cost at the start and at each step that some sources accepted: (sources, their costs).
    :param converged: bool ``(B,)``: whether no step was left that could still improve.
    """

    element: Element
    cost: Tensor
    events: Events
    converged: Tensor

    def histories(self) -> list[tuple[float, ...]]:
        """The costs of each source; they never rise."""
        rows, costs = (torch.cat(parts) for parts in zip(*self.events, strict=True))
        order = rows.argsort(stable=True)
        pieces = costs[order].split(rows.bincount(minlength=len(self.cost)).tolist())
        return [tuple(piece.tolist()) for piece in pieces]

    def better(self, other: Ended, margin: Tensor | float = 0.0) -> Ended:
        """For each source the better of two ends; the other one has to be better by more than ``margin``."""
        rows = (other.cost < self.cost - margin).nonzero().flatten()
        if len(rows) == len(self.cost):
            return other
        number = torch.full((len(self.cost),), -1)
        number[rows] = torch.arange(len(rows))
        events = [(number[own][number[own] >= 0], costs[number[own] >= 0]) for own, costs in other.events]
        return self.replaced(Ended(other.element.select(rows), other.cost[rows], events, other.converged[rows]), rows)

    def replaced(self, other: Ended, rows: Tensor) -> Ended:
        """The same, with another end for some sources: ``other`` holds just these."""
        if not len(rows):
            return self
        cost, converged = self.cost.index_copy(0, rows, other.cost), self.converged.index_copy(0, rows, other.converged)
        taken = torch.isin(torch.arange(len(cost)), rows)
        events = [(own[~taken[own]], costs[~taken[own]]) for own, costs in self.events]
        events += [(rows[own], costs) for own, costs in other.events]
        return Ended(put(self.element, rows, other.element), cost, events, converged)


class Descent:
    """Coordinate descent by some scores.

    :param scores: of a batch of sources.
    :param max_sweeps: how often at most one descent goes through what waits.
    :ivar initial: the cost of each source at the identity, float64 ``(B,)``.
    :ivar threshold: by how much a step must lower the cost of each source.
    """

    def __init__(self, scores: Scores, max_sweeps: int):
        self.scores, self.group = scores, scores.group
        self._max_sweeps = max_sweeps
        self.rows = torch.arange(scores.batch)
        self.initial = scores.costs(None, self.rows).sum(1)
        self.threshold = torch.zeros_like(self.initial)
        self._everything = frozenset(self.group.units)
        self._riding = {rider for name in self.group.units for rider in scores.riders(name)}
        # What is matched within a unit; a multiplier that doesn't ride along is moved alone.
        lone = [n for n, u in self.group.units.items() if n not in self._riding and u.size == 1 and u.parent is not None
                and "permute" not in u.moves and not self.group.children(n)]  # fmt: skip
        self._inside = {
            name: [child for child in self.group.children(name) if child not in self._riding and child not in lone]
            for name in self.group.units
        }
        self._own = {name: [name, *scores.riders(name)] for name in self.group.units}
        self.moves = [*self.group.roots, *lone]
        self._families = {m: [n for n in self.group.family(m) if n == m or n not in lone] for m in self.group.units}
        # Those in which sets that lie inside the same units meet in one site.
        self._meeting = {
            name for name, inside in self._inside.items()
            if any(scores.coupled(one, other) for one in inside for other in inside)
        }  # fmt: skip
        # Row m: the moves to look at again after move m has changed something.
        self.coupled = torch.tensor(
            [[scores.coupled(one, other) for other in self.moves] for one in self.moves], dtype=torch.bool
        ).reshape(len(self.moves), len(self.moves))

    @cached_property
    def kickable(self) -> list[int]:
        """Numbers of the moves that a kick shuffles: coupled units, or else coupled signs.

        Without coupling, one assignment each is the exact optimum; between scales there are no barriers to jump over.
        """
        coupled = [m for m in range(len(self.moves)) if bool(self.coupled[m].any())]
        permuted = [m for m in coupled if self._permutes(self.moves[m])]
        return permuted or [m for m in coupled if "flip" in self.group[self.moves[m]].moves]

    def identity(self) -> Element:
        """Nothing is moved."""
        return self.group.identity((self.scores.batch,), self.scores.device, torch.float64)

    def forward_start(self) -> tuple[Element, Tensor]:
        """Match one set of units after the other, each by that alone whose other units are placed already.

        Next comes the set of which the largest part is known, so a chain of layers is walked from its wide end.

        :return: the element, and the moves ``(B, moves)`` that others to which they are coupled came after.
        """
        unsettled = torch.zeros(self.scores.batch, len(self.moves), dtype=torch.bool)
        known: set[str] = set()
        element, left = self.identity(), torch.ones(len(self.moves), dtype=torch.bool)
        for name in self._in_order(self.moves, known):
            m = self.moves.index(name)
            unsettled[:, m] = bool((self.coupled[:, m] & left).any())
            left[m] = False
            element = self.decided(name, element, self.rows, known)
            known |= set(self._families[name])
        return element, unsettled

    def kicked_start(self, element: Element) -> tuple[Element, Tensor, Tensor]:
        """Shuffle some units (or flip some signs) of one random set of each source: starts near a good matching.

        They lie in other basins. Starts that are random altogether hardly ever beat the forward start in wide networks;
        small kicks mostly do.

        :return: the new element, the moves to look at, and those to look at after them: the kicked ones themselves.
        """
        chosen = torch.tensor(self.kickable)[torch.randint(len(self.kickable), (len(self.rows),))]
        first = self.coupled[chosen]
        first[self.rows, chosen] = False
        later = torch.nn.functional.one_hot(chosen, len(self.moves)).bool()
        for m in self.kickable:
            hit = (chosen == m).nonzero().flatten()
            name, kicked = self.moves[m], element.select(hit)
            if not len(hit):
                continue
            if self._permutes(name):
                kicked = replaced(kicked, permutations={name: _shuffled(kicked[name])})
            else:
                kicked = replaced(kicked, signs={name: _flipped(kicked.signs[name])})
            element = put(element, hit, kicked)
        return element, first, later

    def descend(
        self,
        element: Element,
        waiting: Tensor,
        *,
        rows: Tensor | None = None,
        later: Tensor | None = None,
        shuffled: bool = False,
    ) -> Ended:
        """Decide moves anew until none improves the cost.

        :param element: of the sources ``rows``.
        :param waiting: bool ``(rows, moves)``: the moves to look at first; others follow when a neighbour changes.
        :param rows: the sources; all, if left out.
        :param later: moves to look at once these have been.
        :param shuffled: whether to visit the moves in random order.
        """
        rows = self.rows if rows is None else rows
        waiting = waiting.clone()
        costs = self.scores.costs(element, rows)
        total = costs.sum(1)
        events: Events = [(torch.arange(len(rows)), total.clone())]
        for _ in range(self._max_sweeps):
            order = torch.randperm(len(self.moves)) if shuffled else torch.arange(len(self.moves))
            for m in order.tolist():
                looking = waiting[:, m].nonzero().flatten()
                if not len(looking):
                    continue
                waiting[looking, m] = False
                element, accepted = self._step(self.moves[m], element, rows, looking, costs)
                if len(accepted):
                    total[accepted] = costs[accepted].sum(1)
                    events.append((accepted, total[accepted]))
                    waiting[accepted] |= self.coupled[m]
            if later is not None:
                waiting, later = waiting | later, None
            if not bool(waiting.any()):
                break
        return Ended(element, total, events, ~waiting.any(1))

    def decided(self, name: str, element: Element, rows: Tensor, known: Collection[str], shorter: int = 0) -> Element:
        """The best places, signs and scales of some units and all that lies inside them, given the others.

        :param element: of batch shape ``(..., R)``, for the sources ``rows``.
        :param known: names of the units whose places mean something.
        :param shorter: how often the step was shortened.
        """
        if self._inside[name]:
            if not self._permutes(name):
                return self._multiplied(name, self._inside_matched(name, element, rows, known), rows, known, shorter)
            return self._matched_with_inside(name, element, rows, known, shorter)
        present = element
        if self._permutes(name):
            found = self._assigned(name, element, self.scores.pairs(name, element, rows, known), shorter)
            element = replaced(element, permutations={name: found})
        return self._multiplied(name, element, rows, known, shorter, present)

    # small steps ----------------------------------------------------------------------------------------------------

    def _permutes(self, name: str) -> bool:
        return "permute" in self.group[name].moves

    def _outer(self, name: str, element: Element) -> Tensor | None:
        """Which copy is in the place of each; None if there is one copy, or nothing outside."""
        parent = self.group[name].parent
        return None if parent is None else element.unit_index(parent)

    def _in_order(self, names: Collection[str], known: Collection[str]) -> Iterator[str]:
        """The units, those of which the largest part is known first; what is known grows meanwhile."""
        waiting = list(names)
        while waiting:
            name = max(waiting, key=lambda name: self.scores.share(name, known))
            waiting.remove(name)
            yield name

    def _inside_matched(
        self, name: str, element: Element, rows: Tensor, known: Collection[str], start: int = 0
    ) -> Element:
        """All that lies inside some units, matched where these are now: a forward start, and sweeps if sets meet.

        :param start: which start it is; all but the first are from random places.
        """
        inside = self._inside[name]
        within = {n for child in inside for n in self._families[child]}
        placed = (set(known) | {name}) - within
        if start:
            element = replaced(element, permutations={n: _random(element[n]) for n in within if self._permutes(n)})
            placed |= within
        for child in () if start else self._in_order(inside, placed):
            element = self.decided(child, element, rows, placed)
            placed |= set(self._families[child])
        for _ in range(INSIDE_SWEEPS if name in self._meeting else 0):
            before = element
            for child in inside:
                element = self.decided(child, element, rows, placed)
            if not bool(self._differ(self._families[name], before, element)[0].any()):
                break
        return element

    def _matched_with_inside(
        self, name: str, element: Element, rows: Tensor, known: Collection[str], shorter: int
    ) -> Element:
        """Units matched with each pair's inside at its best, which all cyclic shifts of the units go through."""
        units, n = self.group[name], self.group[name].size
        places = torch.arange(n, device=self.scores.device)
        together = max(1, TRIED_TOGETHER // max(1, element.batch_shape.numel()))
        tried: list[Element] = []
        gains = []
        for start in range(INSIDE_STARTS if name in self._meeting else 1):
            for shifts in places.split(together):
                trial = element.expand((len(shifts), *element.batch_shape))
                images = (places + shifts.unsqueeze(1)) % n
                images = images.reshape(len(shifts), *[1] * (trial[name].dim() - 2), n).expand(trial[name].shape)
                trial = replaced(trial, permutations={name: images})
                trial = self._inside_matched(name, trial, rows, known, start)
                trial = self._multiplied(name, trial, rows, known)
                tried.append(trial)
                gains.append(self.scores.matched(name, trial, rows, known).score)
        # (start, shift s, ..., copy, i): the score of i with i + s, from the best start of each pair.
        gain, best = torch.cat(gains).unflatten(-1, (units.copies, n)).unflatten(0, (-1, n)).max(0)
        shift_of = (places - places.unsqueeze(1)) % n
        scores = gain.movedim(0, -1).gather(-1, shift_of.expand(*gain.shape[1:], n))
        found = self._assigned(name, element, scores, shorter)
        element = replaced(element, permutations={name: found})
        # The trial in which each of the source's units came to where it is now.
        index = element.unit_index(name)
        chosen = (index.unflatten(-1, (units.copies, n)) % n - places) % n
        chosen = chosen + n * best.movedim(0, -1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        element = self._taken(name, element, tried, _by_source(chosen.flatten(-2), index))
        return self._rescaled(name, element, rows, known) if name in self._meeting else element

    def _rescaled(self, name: str, element: Element, rows: Tensor, known: Collection[str]) -> Element:
        """Scales of sets that lie inside the same units and meet in one site, by turns, until none changes."""
        scaled = [inner for inner in self._families[name] if inner not in self._riding
                  and any("scale" in self.group[own].moves for own in self._own[inner])]  # fmt: skip
        for _ in range(RESCALINGS if len(scaled) > 1 else 0):
            before = element
            for inner in scaled:
                element = self._multiplied(inner, element, rows, known)
            if not bool(self._differ(self._families[name], before, element)[1].any()):
                break
        return element

    def _assigned(self, name: str, element: Element, scores: Tensor, shorter: int) -> Tensor:
        """The permutation of some units with the largest sum of scores ``(..., copies, size, size)``."""
        units, outer = self.group[name], self._outer(name, element)
        if shorter:
            stay = element[name].reshape(*element.batch_shape, units.copies, units.size)
            scores = _staying(scores, stay if outer is None else _copies(stay, outer), shorter)
        places = assign(scores)
        if outer is not None:  # permutations are named after the copies that units come from
            places = _copies(places, outer.argsort(-1))
        return places.reshape(element[name].shape)

    def _taken(self, name: str, element: Element, tried: Sequence[Element], by_source: Tensor) -> Element:
        """What lies inside each unit, and its multipliers, from the trial that is named for it."""
        parts: dict[str, dict[str, Tensor]] = {"permutations": {}, "signs": {}, "log_scales": {}}
        for kind, found in parts.items():
            for inner in self._families[name]:
                given = [getattr(trial, kind).get(inner) for trial in tried]
                if given[0] is None or (kind == "permutations" and inner == name):
                    continue
                every = torch.cat(given).flatten(1 + len(element.batch_shape))
                count = self.group[inner].count // self.group[name].count
                index = by_source.repeat_interleave(count, -1).unsqueeze(0)
                found[inner] = every.gather(0, index).reshape(*element.batch_shape, *self.group[inner].shape)
        return replaced(element, **parts)

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
        best = self.scores.matched(name, element, rows, known)
        signs, logs = {}, {}
        index = element.unit_index(name)
        stays = index == (element if present is None else present).unit_index(name)
        for own, pull in best.pulls.items():
            before = element.signs[own].flatten(len(element.batch_shape)).gather(-1, index)
            gain = torch.where(stays, -pull * before, 0.0)
            sign = torch.where(pull == 0, before, torch.where(pull < 0, -1.0, 1.0).to(before))
            if shorter:
                held = stays & (gain < FLIPS[shorter] * gain.amax(-1, keepdim=True))
                sign = torch.where(held, before, sign)
            signs[own] = _by_source(sign, index).reshape(element.signs[own].shape)
        for own, log in best.log_scales.items():
            before = element.log_scales[own].flatten(len(element.batch_shape)).gather(-1, index)
            log = torch.where(stays, before + (log - before) * 0.5**shorter, log) if shorter else log
            logs[own] = _by_source(log, index).reshape(element.log_scales[own].shape)
        return replaced(element, signs=signs, log_scales=logs)

    def _step(
        self, name: str, element: Element, rows: Tensor, looking: Tensor, costs: Tensor
    ) -> tuple[Element, Tensor]:
        """Decide one move for some sources, and accept what improves; also, the sources that accepted.

        The scores of units that are coupled with themselves are a linearisation. Shorter steps follow, by a growing
        bonus for units that stay. It adds a constant to the (maximised) objective and makes it convex in the end; a
        convex objective lies nowhere below its linearisation, so that the step can't fail.
        """
        parts = list(self.scores.parts[name])
        taken = []
        m = self.moves.index(name)
        for shorter in range(1 + SHORTER_STEPS if bool(self.coupled[m, m]) else 1):
            here = some(element, looking)
            proposal = self.decided(name, here, rows[looking], self._everything, shorter)
            rearranged, scaled = self._differ(self._families[name], here, proposal)
            changed = (rearranged | scaled).nonzero().flatten()
            if not len(changed):
                break
            looking, proposal = looking[changed], some(proposal, changed)
            least = self.threshold[rows[looking]] * torch.where(rearranged[changed], 1.0, SCALE_STEPS)
            found = self.scores.costs(proposal, rows[looking], parts)
            good = (costs[looking][:, parts] - found).sum(1) > least
            if bool(good.any()):
                accepted = looking[good]
                element = put(element, accepted, some(proposal, good.nonzero().flatten()))
                costs[accepted.unsqueeze(1), torch.tensor(parts)] = found[good]
                taken.append(accepted)
            looking = looking[~good]
            if not len(looking):
                break
        return element, torch.cat(taken) if taken else looking[:0]

    def _differ(self, names: Collection[str], one: Element, other: Element) -> tuple[Tensor, Tensor]:
        """Where permutations or signs of some units differ, and where scales, bool of the batch's shape each."""
        batch = len(one.batch_shape)
        rearranged, scaled = torch.zeros(2, *one.batch_shape, dtype=torch.bool).unbind()
        for name in names:
            for mine, theirs in ((one.permutations, other.permutations), (one.signs, other.signs)):
                if name in mine:
                    rearranged = rearranged | (mine[name] != theirs[name]).flatten(batch).any(-1).cpu()
            if name in one.log_scales:
                far = (one.log_scales[name] - other.log_scales[name]).abs() > SAME_SCALE
                scaled = scaled | far.flatten(batch).any(-1).cpu()
        return rearranged, scaled


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


def _flipped(signs: Tensor) -> Tensor:
    """Flip some entries of each row, one at least."""
    draws = torch.rand(signs.shape)
    flips = (draws <= draws.amin(-1, keepdim=True).clamp_min(KICKED_SHARE)).to(signs.device)
    return torch.where(flips, -signs, signs)


def _random(images: Tensor) -> Tensor:
    """Random permutations, as many as given."""
    return torch.rand(images.shape, device=images.device).argsort(-1)


def _shuffled(images: Tensor) -> Tensor:
    """Shuffle some entries of each row among themselves."""
    n = images.shape[-1]
    count = min(n, max(KICKED_UNITS, int(KICKED_SHARE * n)))
    units = torch.rand(images.shape).argsort(-1)[..., :count]
    to = units.gather(-1, torch.rand(units.shape).argsort(-1)).to(images.device)
    units = units.to(images.device)
    return images.scatter(-1, units, images.gather(-1, to))
