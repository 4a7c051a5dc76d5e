r"""Coordinate descent over permutations, signs and scales, for a batch of sources at once.

With all but one set of units held, the best permutation of that one solves a linear assignment problem; its signs and
scales follow (:mod:`~pyro_symmetric.alignment.decision`).

Two habits make this fast and good, where the textbook (Ainsworth et al. 2023, arXiv 2209.04836, Algorithm 1) starts at
the identity and visits all units in every sweep: the *forward start* matches each set of units by that alone whose
other units are placed already, so that nothing is compared with what lies in no meaningful order yet; the *work-list*
then looks again only at those units whose neighbours have changed. Further descents visit units in random order, from a
*kick* of the best element so far (iterated local search). Sets of units that lie on two axes of one site have a search
of their own (:mod:`~pyro_symmetric.alignment.exchanges`): assignments, which are steps of a linearisation, seldom
suffice.

All sources of a batch go through the same steps together; those for which there is nothing to do sit out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.protocol import SETTLED, MatchCost
from pyro_symmetric.alignment.decision import Decision
from pyro_symmetric.alignment.elements import differing, joined, put, replaced, some
from pyro_symmetric.alignment.exchanges import Quadratic
from pyro_symmetric.groups.element import Element

# How many units a kick shuffles. On random networks of widths 16 to 256, shares of 0.2 and 0.3 ended lowest among
# 0.1 to 1; in tiny layers, six units (that is, all) reached the enumerated optimum more often than two to four.
KICKED_UNITS = 6
KICKED_SHARE = 0.25
# How often at most to shorten the step of units whose scores are a linearisation; a third time was never needed.
SHORTER_STEPS = 3
# How much more than another a step has to gain that changes scales alone, to be taken or to have places looked at anew.
# Between unrelated transformers a hundredth of it finds objectives lower by 2e-5 of themselves, in twice the time.
SCALE_STEPS = 1e4
# The part of the cost below which a step of all scales no longer counts while places may still change.
ROUGH = 1e-5


@dataclass(frozen=True, eq=False)
class Ended:
    """The ends of descents of a batch of sources.

    :param element: of batch shape ``(B,)``.
    :param costs: float64 ``(steps, B)``: the cost at the start, and after each step that some source accepted.
    :param converged: bool ``(B,)``: whether no step was left that could still improve.
    """

    element: Element
    costs: Tensor
    converged: Tensor

    @property
    def cost(self) -> Tensor:
        """The cost at the end, ``(B,)``."""
        return self.costs[-1]

    def histories(self) -> tuple[tuple[float, ...], ...]:
        """The costs of each source, which fall."""
        return tuple(tuple(own.unique_consecutive().tolist()) for own in self.costs.unbind(1))

    def better(self, other: Ended, margin: Tensor | float = 0.0) -> Ended:
        """For each source the better of two ends; the other one has to be better by more than ``margin``."""
        taken = other.cost < self.cost - margin
        rows = taken.nonzero().flatten()
        mine, theirs = _as_long([self.costs, other.costs])
        return Ended(
            put(self.element, rows, some(other.element, rows)),
            torch.where(taken, theirs, mine),
            torch.where(taken, other.converged, self.converged),
        )


@dataclass(frozen=True, eq=False)
class Found:
    """The outcome of a search for a batch of sources.

    :param best: the best end of each source.
    :param initial: the cost at the identity, float64 ``(B,)``.
    :param ends: the cost at the end of every descent, ``(descents, B)``.
    """

    best: Ended
    initial: Tensor
    ends: Tensor


@dataclass(frozen=True)
class Search:
    """Settings of a search: by several descents, the best of which is kept, source by source.

    :param restarts: how many further descents, each from a kick of the best end so far.
    :param max_sweeps: how often at most one descent goes through what waits.
    :param tolerance: which part of the initial cost a step must gain.
    """

    restarts: int
    max_sweeps: int
    tolerance: float

    def __call__(self, batches: Iterable[MatchCost], tick: Callable[[], object] = int) -> Found:
        """Search for the best element of each source, batch by batch.

        :param tick: called after every descent.
        """
        found = [self._of_batch(cost, tick) for cost in batches]
        costs, ends = (
            torch.cat(_as_long(parts), 1) for parts in ([f.best.costs for f in found], [f.ends for f in found])
        )
        converged = torch.cat([one.best.converged for one in found])
        best = Ended(joined([one.best.element for one in found]), costs, converged)
        return Found(best, torch.cat([one.initial for one in found]), ends)

    def _of_batch(self, cost: MatchCost, tick: Callable[[], object]) -> Found:
        descent = Descent(cost, self.max_sweeps, self.tolerance)
        best = descent.descend(*descent.forward_start())
        ends = [best.cost]
        tick()
        for _ in range(self.restarts if descent.kickable else 0):
            element, first, later = descent.kicked_start(best.element)
            end = descent.descend(element, first, later=later, shuffled=True)
            ends.append(end.cost)
            best = best.better(end)
            tick()
        best, tried = descent.whole_signs(best)
        ends += tried
        worse = best.cost > descent.initial
        if bool(worse.any()):
            end = descent.descend(descent.identity(), worse.unsqueeze(1).expand(-1, len(descent.moves)))
            ends.append(torch.where(worse, end.cost, best.cost))
            best = best.better(end)
        return Found(best, descent.initial, torch.stack(ends))


class Descent:
    """Coordinate descent by some cost.

    :param cost: of a batch of sources.
    :param max_sweeps: how often at most one descent goes through what waits.
    :param tolerance: which part of the initial cost a step must gain.
    :ivar initial: the cost of each source at the identity, float64 ``(B,)``.
    :ivar threshold: by how much a step must lower the cost of each source.
    """

    def __init__(self, cost: MatchCost, max_sweeps: int, tolerance: float = 0.0):
        self.cost, self.group = cost, cost.group
        self.rows = torch.arange(cost.batch, device="cpu")
        self.initial = cost.costs(None, self.rows).sum(1)
        self.threshold = tolerance * self.initial.abs()
        self._max_sweeps = max_sweeps
        self._decide = Decision(cost)
        self.moves = self._decide.moves
        # Row m: the moves to look at again after move m has changed something.
        pairs = [[cost.coupled(one, other) for other in self.moves] for one in self.moves]
        self.coupled = torch.tensor(pairs, dtype=torch.bool, device="cpu").reshape(len(self.moves), len(self.moves))
        # Moves that change more than scales, if these are fitted together.
        changing = [bool(self._moves_of(move) - ({"scale"} if cost.rescales else set())) for move in self.moves]
        self._rearranging = torch.tensor(changing, dtype=torch.bool, device="cpu")
        # The parts of the cost that scales enter.
        self._scaled = sorted({part for name in self.group.names("scale") for part in cost.parts[name]})

    @cached_property
    def kickable(self) -> list[int]:
        """Numbers of the moves that a kick shuffles: coupled units, or else coupled signs.

        Without coupling, one assignment each is the exact optimum; between scales there are no barriers to jump over.
        """
        coupled = [m for m in range(len(self.moves)) if bool(self.coupled[m].any())]
        by_move = ([m for m in coupled if move in self.group[self.moves[m]].moves] for move in ("permute", "flip"))
        return next(filter(None, by_move), [])

    def _moves_of(self, name: str) -> set[str]:
        """All that may happen to some units and what is decided with them."""
        return set().union(*(self.group[own].moves for own in self._decide.families[name]))

    @property
    def everything(self) -> Tensor:
        """All moves of all sources, bool ``(B, moves)``."""
        return torch.ones(len(self.rows), len(self.moves), dtype=torch.bool, device="cpu")

    def identity(self) -> Element:
        """Nothing is changed."""
        return self.group.identity((self.cost.batch,), self.cost.device, torch.float64)

    def forward_start(self, signs: Mapping[str, Tensor] | None = None) -> tuple[Element, Tensor]:
        """Match one set of units after the other, each by that alone whose other units are placed already.

        Next comes the set of which the largest part is known, so a chain of layers is walked from its wide end.

        :param signs: of whole vectors, which are known from the start.
        :return: the element, and the moves ``(B, moves)`` that others to which they are coupled came after.
        """
        unsettled = torch.zeros_like(self.everything)
        known = set(signs or ())
        element, left = self.identity(), torch.ones(len(self.moves), dtype=torch.bool, device="cpu")
        element = replaced(element, signs=dict(signs)) if signs else element
        for name in self._decide.in_order([name for name in self.moves if name not in known], known):
            m = self.moves.index(name)
            unsettled[:, m] = bool((self.coupled[:, m] & left).any())
            left[m] = False
            element = self._decide(name, element, self.rows, known)
            known |= set(self._decide.families[name])
            element = self._placed_anew(m, element, known)
        return element, unsettled

    def whole_signs(self, best: Ended) -> tuple[Ended, list[Tensor]]:
        """Try the other sign of each whole vector, and match all units anew under it.

        Under the wrong sign of a normalised vector its units fit nowhere, so that no single step leads to the other.

        :return: the best ends, and the costs of all that were tried.
        """
        whole = [name for name in self.moves if self.group[name].moves == {"flip"} and self.group[name].count == 1]
        ends: list[Tensor] = []
        for _ in range(len(whole)):
            before = best.cost
            for name in whole:
                signs = {one: best.element.signs[one] * (-1.0 if one == name else 1.0) for one in whole}
                end = self.descend(*self.forward_start(signs))
                ends.append(end.cost)
                best = best.better(end)
            if not bool((best.cost < before - self.threshold).any()):
                break
        return best, ends

    def kicked_start(self, element: Element) -> tuple[Element, Tensor, Tensor]:
        """Shuffle some units (or flip some signs) of one random set of each source: starts near a good matching.

        They lie in other basins. Starts that are random altogether hardly ever beat the forward start in wide networks;
        small kicks mostly do.

        :return: the new element, the moves to look at, and those to look at after them: the kicked ones themselves.
        """
        chosen = torch.tensor(self.kickable, device="cpu")[
            torch.randint(len(self.kickable), (len(self.rows),), device="cpu")
        ]
        first = self.coupled[chosen]
        first[self.rows, chosen] = False
        later = torch.nn.functional.one_hot(chosen, len(self.moves)).bool()
        for m in self.kickable:
            hit = (chosen == m).nonzero().flatten()
            name, kicked = self.moves[m], element.select(hit)
            if not len(hit):
                continue
            if "permute" in self.group[name].moves:
                kicked = replaced(kicked, {name: _shuffled(kicked[name])})
            else:
                kicked = replaced(kicked, signs={name: _flipped(kicked.signs[name])})
            element = put(element, hit, kicked)
        return element, first, later

    def descend(
        self, element: Element, waiting: Tensor, *, later: Tensor | None = None, shuffled: bool = False
    ) -> Ended:
        """Decide moves anew until none improves the cost.

        :param waiting: bool ``(B, moves)``: the moves to look at first; others follow when a neighbour changes.
        :param later: moves to look at once these have been.
        :param shuffled: whether to visit the moves in random order.
        """
        waiting = waiting & self._rearranging
        costs = self.cost.costs(element, self.rows)
        history = [costs.sum(1)]
        element, gained = self._rescaled(element, costs, history, ROUGH)
        waiting = waiting | (gained.unsqueeze(1) & self._rearranging)
        for _ in range(self._max_sweeps):
            order = (
                torch.randperm(len(self.moves), device="cpu")
                if shuffled
                else torch.arange(len(self.moves), device="cpu")
            )
            for m in order.tolist():
                looking = waiting[:, m].nonzero().flatten()
                if not len(looking):
                    continue
                waiting[looking, m] = False
                element, accepted = self._step(m, element, looking, costs)
                if len(accepted):
                    history.append(history[-1].index_copy(0, accepted, costs[accepted].sum(1)))
                    waiting[accepted] |= self.coupled[m] & self._rearranging
            if later is not None:
                waiting, later = waiting | later, None
            if not bool(waiting.any()):
                element, gained = self._rescaled(element, costs, history)
                waiting = waiting | (gained.unsqueeze(1) & self._rearranging)
            if not bool(waiting.any()):
                break
        return Ended(element, torch.stack(history), ~waiting.any(1))

    # small steps ----------------------------------------------------------------------------------------------------

    def _quadratic(self, m: int, element: Element, rows: Tensor, known: Collection[str]) -> Quadratic | None:
        """The objective of the places of units that are coupled with themselves."""
        if "permute" not in self.group[self.moves[m]].moves or not bool(self.coupled[m, m]):
            return None
        return self.cost.quadratic(self.moves[m], element, rows, known)

    def _placed_anew(self, m: int, element: Element, known: Collection[str]) -> Element:
        """Units that are coupled with themselves and are moved as they are, in the best places of many starts."""
        name = self.moves[m]
        alone = self._decide.families[name] == [name] and self.group[name].moves == {"permute"}
        quadratic = self._quadratic(m, element, self.rows, known) if alone else None
        if quadratic is None:
            return element
        return replaced(element, {name: element[name].gather(-1, quadratic.best())})

    def _exchanged(self, m: int, element: Element, looking: Tensor) -> Element | None:
        """Some sources' elements after exchanges of two units of one set, as long as these gain."""
        quadratic = self._quadratic(m, element, looking, self.group.units)
        if quadratic is None:
            return None
        name = self.moves[m]
        here = torch.arange(self.group[name].size, device=element.device).expand(1, len(looking), -1)
        return replaced(element, {name: element[name].gather(-1, quadratic.exchanged(here)[0])})

    def _rescaled(
        self, element: Element, costs: Tensor, history: list[Tensor], settled: float = SETTLED
    ) -> tuple[Element, Tensor]:
        """All scales at their best together, and the sources that gain so much by it that places may change.

        :param costs: the cost in parts; they and the history are brought up to date.
        """
        if not self.cost.rescales:
            return element, torch.zeros(len(self.rows), dtype=torch.bool, device="cpu")
        proposal = self.cost.rescaled(element, self.rows, settled)
        found = costs.clone()
        found[:, self._scaled] = self.cost.costs(proposal, self.rows, self._scaled)
        gain = costs.sum(1) - found.sum(1)
        better = (gain > 0).nonzero().flatten()
        if len(better):
            costs[better] = found[better]
            history.append(costs.sum(1))
            element = put(element, better, some(proposal, better))
        return element, gain > SCALE_STEPS * self.threshold

    def _step(self, m: int, element: Element, looking: Tensor, costs: Tensor) -> tuple[Element, Tensor]:
        """Decide one move for some sources, and accept what improves; also, the sources that accepted.

        The scores of units that are coupled with themselves are a linearisation. Shorter steps follow, by a growing
        bonus for units that stay. It adds a constant to the (maximised) objective and makes it convex in the end; a
        convex objective lies nowhere below its linearisation, so that the step can't fail. If no step gains,
        exchanges of two units are left to try.
        """
        name, left, taken = self.moves[m], looking, [looking[:0]]
        itself = bool(self.coupled[m, m])
        for shorter in range(1 + SHORTER_STEPS if itself else 1):
            proposal = self._decide(name, some(element, left), left, self.group.units, shorter)
            element, accepted, left = self._improved(m, element, proposal, left, costs)
            taken.append(accepted)
            if not len(left):
                break
        left = looking[~torch.isin(looking, torch.cat(taken))] if itself else looking[:0]
        if len(left) and (exchanged := self._exchanged(m, some(element, left), left)) is not None:
            element, accepted, _ = self._improved(m, element, exchanged, left, costs)
            taken.append(accepted)
        return element, torch.cat(taken)

    def _improved(
        self, m: int, element: Element, proposal: Element, looking: Tensor, costs: Tensor
    ) -> tuple[Element, Tensor, Tensor]:
        """Proposals for some sources, where they improve the cost; also, the sources that accepted, and those that
        didn't although something had changed."""
        parts = list(self.cost.parts[self.moves[m]])
        here = some(element, looking)
        rearranged, scaled = differing(self._decide.families[self.moves[m]], here, proposal)
        changed = (rearranged if self.cost.rescales else rearranged | scaled).nonzero().flatten()
        if not len(changed):
            return element, looking[:0], looking[:0]
        looking, proposal = looking[changed], some(proposal, changed)
        least = self.threshold[looking] * torch.where(rearranged[changed], 1.0, SCALE_STEPS)
        found = self.cost.costs(proposal, looking, parts)
        good = (costs[looking][:, parts] - found).sum(1) > least
        accepted = looking[good]
        if len(accepted):
            element = put(element, accepted, some(proposal, good.nonzero().flatten()))
            costs[accepted.unsqueeze(1), torch.tensor(parts, device="cpu")] = found[good]
        return element, accepted, looking[~good]


def _as_long(costs: Sequence[Tensor]) -> list[Tensor]:
    """Costs ``(steps, B)`` with as many steps each; the last of the shorter ones is repeated."""
    steps = max(map(len, costs))
    return [torch.cat([one, one[-1:].expand(steps - len(one), -1)]) for one in costs]


def _flipped(signs: Tensor) -> Tensor:
    """Flip some entries of each row, one at least."""
    draws = torch.rand(signs.shape, device="cpu")
    flips = (draws <= draws.amin(-1, keepdim=True).clamp_min(KICKED_SHARE)).to(signs.device)
    return torch.where(flips, -signs, signs)


def _shuffled(images: Tensor) -> Tensor:
    """Shuffle some entries of each row among themselves."""
    n = images.shape[-1]
    count = min(n, max(KICKED_UNITS, int(KICKED_SHARE * n)))
    units = torch.rand(images.shape, device="cpu").argsort(-1)[..., :count]
    to = units.gather(-1, torch.rand(units.shape, device="cpu").argsort(-1)).to(images.device)
    units = units.to(images.device)
    return images.scatter(-1, units, images.gather(-1, to))
