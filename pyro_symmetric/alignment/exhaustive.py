"""The best match of small groups, by trying all places of some units and solving for those of all others.

Sets of units that share no site are matched exactly, each by itself, once all others are in place. So only the units of
a *cover* need to be tried: what is left when sets that share no site are taken out. Of two layers of five and four
units 24 matches are tried for 2880 that there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pyro_symmetric.alignment.costs.protocol import MatchCost
from pyro_symmetric.alignment.decision import Decision
from pyro_symmetric.alignment.elements import joined, replaced
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group

# How many elements to try at most. So much is tried for each source as takes the time of its descents; for one source
# or few these spend most of their time on calls of operators, in which so many numbers are moved.
TRIED, LIKE_DESCENTS, MOVED = 10**4, 32, 2**22
# An assignment problem takes as long as moving so many numbers, and some for each of its scores.
PROBLEM, SCORE = 500, 2
# Fitting the scales moves all numbers so many times.
RESCALING = 20
# How many numbers are moved at once.
TOGETHER = 2**21
# Whose logarithm of the number of matches, flips that do the same counted each, is larger isn't looked at more closely.
FAR = 40.0
# Of how many sets of units those that share no site are looked for.
SETS = 16
LOG_2 = math.log(2.0)


class Exhaustive:
    """A search through all places of some units.

    :param cost: of a batch of sources.
    :param decide: decides the other units.
    :ivar applies: whether the group is small enough.
    """

    def __init__(self, cost: MatchCost, decide: Decision):
        self._cost, self._decide = cost, decide
        numbers = sum(math.prod(shape) for shape in cost.group.site_shapes.values())
        self._together = max(1, TOGETHER // max(1, cost.batch * numbers))
        finite = [m for m in decide.moves if self._log_order([m])]
        free = [m for m in finite if m not in decide.meeting and not cost.coupled(m, m)]
        held = self._apart(free) if len(free) <= SETS else []
        self.applies, self._held = False, held
        # Matches by other scales than the best are good guesses: better than these is to try all.
        for self._held in [[], held] if cost.rescales else [held]:
            if self._log_order([name for name in finite if name not in self._held]) > FAR:
                continue
            inside = {own for name in self._held for own in decide.families[name]}
            self._cover: Group = cost.group.without(inside).finite
            solved = [cost.group[name] for name in inside if "permute" in cost.group[name].moves]
            work = numbers * (RESCALING if cost.rescales else 1)
            work += sum(one.copies * (PROBLEM + SCORE * one.size**2) for one in solved)
            most = min(TRIED, LIKE_DESCENTS + MOVED / max(1, work * cost.batch))
            if self._cover.moves and self._cover.log_order() <= math.log(most):
                self.applies = all(name in cost.group.roots for name in finite)
                break

    def best(self) -> Element:
        """The best element of each source; scales are fitted to each match."""
        cost, rows = self._cost, torch.arange(self._cost.batch, device="cpu")
        every = self._cover.enumerate().within(cost.group).to(cost.device, torch.float64)
        best, least = (
            cost.group.identity((len(rows),), cost.device, torch.float64),
            torch.full((len(rows),), math.inf, device="cpu"),
        )
        for part in torch.arange(every.batch_shape[0], device="cpu").split(self._together):
            tried = self._solved(every.select(part.to(every.device) if every.device else part), rows)
            again = rows.repeat(len(part))
            if cost.rescales:
                tried = cost.rescaled(tried, again)
            found, which = cost.costs(tried, again).sum(1).unflatten(0, (len(part), -1)).min(0)
            chosen = torch.where(found < least, which * len(rows) + rows, len(again) + rows)
            best, least = joined([tried, best]).select(chosen.to(best.device)), torch.minimum(found, least)
        return best

    # small steps ----------------------------------------------------------------------------------------------------

    def _apart(self, names: Sequence[str]) -> list[str]:
        """Of some sets of units, those that share no site with one another, of as many matches as can be."""
        if not names:
            return []
        first, *rest = names
        apart = [name for name in rest if not self._cost.coupled(first, name)]
        found = [[first, *self._apart(apart)]]
        if len(apart) < len(rest):
            found.append(self._apart(rest))
        return max(found, key=self._log_order)

    def _log_order(self, names: Sequence[str]) -> float:
        units = [self._cost.group[own] for name in names for own in self._decide.families[name]]
        return sum(
            one.copies
            * (math.lgamma(one.size + 1) * ("permute" in one.moves) + one.size * LOG_2 * ("flip" in one.moves))
            for one in units
        )

    def _solved(self, tried: Element, rows: torch.Tensor) -> Element:
        """Each element with each source, ``(elements * sources,)``, all other units matched."""
        shape = (tried.batch_shape[0], len(rows))
        parts = [{n: v.unsqueeze(1).expand(*shape, *v.shape[1:]) for n, v in part.items()} for part in tried.parts]
        element = replaced(tried.select(0).expand(shape), *parts[:3])
        for name in self._held:
            element = self._decide(name, element, rows, self._cost.group.units)
        permutations, signs, log_scales, shifts = (
            {n: v.flatten(0, 1) for n, v in part.items()} for part in element.parts
        )
        return Element(self._cost.group, permutations, signs, log_scales, shifts, (shape[0] * shape[1],))
