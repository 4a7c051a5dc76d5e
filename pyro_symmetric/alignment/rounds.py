"""Members on their way into one frame, round by round."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.weights import Moments, WeightCost
from pyro_symmetric.alignment.descent import Descent, Search
from pyro_symmetric.alignment.elements import put
from pyro_symmetric.alignment.moments import chunks_of, shifted
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group

# Up to so many members each is aligned to the others in turn at the end.
FEW = 32
# In how many rounds members start anew as well as where they are.
FRESH_ROUNDS = 2


class Rounds:
    """Members on their way into one frame, round by round.

    :param group: the group.
    :param kind: the cost.
    :param moments: site -> moments of all members, ``(channels, S, *site_shape)``.
    :param search: how each member is matched.
    :ivar element: the members' elements, but for shifts.
    :ivar shifts: name of units -> the constants that were added in front of a softmax, ``(S, *units.shape)``.
    """

    def __init__(self, group: Group, kind: type[WeightCost], moments: Moments, search: Search):
        self._whole, self._group = group, group.restricted("permute", "flip", "scale")
        self._kind, self._search, self._moments = kind, search, moments
        self._chunks = chunks_of(self._group, moments)
        self._source = self._present = {site: kind.features(value) for site, value in moments.items()}
        self.element = self._identity()
        self.shifts: dict[str, Tensor] = {}
        self._history = [float(self.costs().mean())]

    def __len__(self) -> int:
        return next(iter(self._moments.values())).shape[1]

    def settle(self, max_rounds: int, tick: Callable[[], object] = int) -> bool:
        """Bring them into one frame; returns whether that ended because nothing changed.

        :param tick: called after the start and after every round, of which there may be twice as many as given.
        """
        given = self._history[0]
        self._start()
        tick()
        converged = self._iterate(max_rounds, tick)
        if self._history[-1] > given:  # the members came in a better frame than a start from any one of them finds
            self.element = self._identity()
            del self._history[1:]
            self._update()
            converged = self._iterate(max_rounds, tick)
        return converged

    def costs(self) -> Tensor:
        """The share of each member in its distance from the common reference, float64 ``(S,)``."""
        centre = self._centre(self._total(), len(self))
        return torch.cat([self._kind.total(centre, _some(self._present, rows)) for rows in self._chunks])

    def fallen(self) -> tuple[float, ...]:
        """The mean cost of the members as they came, then after each round that lies below; it never rises."""
        given = self._history[0]
        return (given, *(cost for cost in self._history[1:] if cost < given))

    # rounds ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Align all to one random member. (It is soon forgotten.)"""
        # Shifts concern nothing else: the mean of all is as good as any.
        mean = {site: value.mean(1, keepdim=True) for site, value in self._moments.items()}
        self._moments, self.shifts = shifted(self._whole, mean, self._moments)
        self._source = {site: self._kind.features(value) for site, value in self._moments.items()}
        one = _some(self._moments, torch.randint(len(self), (1,), device="cpu"))
        exchanged = {site: sorted(self._group.permutations.dims(site)) for site in one}
        alone = {site: self._kind.alone(one[site], every, exchanged[site]) for site, every in self._moments.items()}
        self.element = self._search(self._cost(alone, rows) for rows in self._chunks).best.element
        self._update()

    def _iterate(self, max_rounds: int, tick: Callable[[], object]) -> bool:
        """Align to the common reference until nothing changes; then, of few members, each to the others."""
        for number in range(max_rounds):
            before = self._history[-1]
            centre = self._centre(self._total(), len(self))
            for rows in self._chunks:
                self._descend(centre, rows, fresh=number < FRESH_ROUNDS)
            self._update()
            tick()
            if number >= FRESH_ROUNDS and self._is_end(before):
                break
        else:
            return False
        if not 2 <= len(self) <= FEW:
            return True
        for _ in range(max_rounds):
            before = self._history[-1]
            self._leave_one_out()
            if self._is_end(before):
                return True
        return False

    def _is_end(self, before: float) -> bool:
        return before - self._history[-1] <= self._search.tolerance * abs(before)

    def _leave_one_out(self) -> None:
        """Align each member in turn to the others, which lets go of what it found only because it is one of them."""
        total = self._total()
        for k in torch.randperm(len(self), device="cpu").tolist():
            row = torch.tensor([k], device="cpu")
            others = {site: value - self._present[site][:, k : k + 1] for site, value in total.items()}
            self._descend(self._centre(others, len(self) - 1), row, fresh=True)
            own = self._cost(others, row).features_after(self.element.select(row))
            for site, value in own.items():
                total[site] = others[site] + value
                self._present[site][:, k : k + 1] = value
        self._update()

    # small steps ----------------------------------------------------------------------------------------------------

    def _descend(self, centre: Moments, rows: Tensor, fresh: bool) -> None:
        """Resume from the present elements of some members or, if that is better, from a forward start."""
        cost, present = self._cost(centre, rows), self.element.select(rows)
        descent = Descent(cost, self._search.max_sweeps)
        descent.threshold = self._search.tolerance * 0.1 * cost.costs(present, descent.rows).sum(1).abs()
        best = descent.descend(present, descent.everything, shuffled=True)
        if fresh:
            best = best.better(descent.descend(*descent.forward_start()), 10 * descent.threshold)
        self.element = put(self.element, rows, best.element)

    def _cost(self, reference: Moments, rows: Tensor) -> WeightCost:
        return self._kind(self._group, reference, _some(self._source, rows))

    def _identity(self) -> Element:
        device = next(iter(self._moments.values())).device
        return self._group.identity((len(self),), device, torch.float64)

    def _total(self) -> Moments:
        """The sum of the features of all members in the frame, ``(channels, 1, *site_shape)``."""
        return {site: value.sum(1, keepdim=True) for site, value in self._present.items()}

    def _centre(self, total: Moments, count: int) -> Moments:
        """The reference that is best for as many members, whose features have this sum."""
        return {site: self._kind.centre(value / count) for site, value in total.items()}

    def _update(self) -> None:
        every = torch.arange(len(self), device="cpu")
        self._present = self._cost(self._source, every).features_after(self.element)
        self._history.append(float(self.costs().mean()))


def _some(values: Moments, rows: Tensor) -> Moments:
    return {site: value[:, rows.to(value.device)] for site, value in values.items()}
