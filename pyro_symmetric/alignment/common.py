"""Members on their way into one frame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pyro_symmetric.alignment.elements import joined, put
from pyro_symmetric.alignment.moments import chunks_of, shifted
from pyro_symmetric.alignment.scores.weights import Moments, WeightScores
from pyro_symmetric.alignment.search import Search
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group

# Up to so many members each is aligned to the others in turn at the end.
FEW = 32
# In how many rounds members start anew as well as where they are.
FRESH_ROUNDS = 2


class Common:
    """Members on their way into one frame.

    :param group: the group.
    :param kind: the cost.
    :param moments: site -> moments of all members, ``(channels, S, *site_shape)``.
    :param search: how each member is matched.
    :ivar element: the members' elements, but for shifts.
    :ivar shifts: name of units -> the constants that were added in front of a softmax, ``(S, *units.shape)``.
    """

    def __init__(self, group: Group, kind: type[WeightScores], moments: Moments, search: Search):
        self._whole, self._group = group, group.restricted("permute", "flip", "scale")
        self._kind, self._search, self._moments = kind, search, moments
        self._source = self._moved = {site: kind.features(value) for site, value in moments.items()}
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
        """What each member has to its distance from the common reference, float64 ``(S,)``."""
        centre = self._centre(self._features(), len(self))
        return torch.cat([self._kind.total(centre, _some(self._moved, rows)) for rows in self._chunks()])

    def fallen(self) -> tuple[float, ...]:
        """The mean cost of the members as they came, then after each round that lies below; it never rises."""
        given = self._history[0]
        return (given, *(cost for cost in self._history[1:] if cost < given))

    def alone(self, rows: Tensor) -> Moments:
        """The references that some members are by themselves."""
        found = {}
        for site, every in self._moments.items():
            exchanged = sorted(self._group.permutations.dims(site))
            found[site] = self._kind.alone(every[:, rows.to(every.device)], every, exchanged)
        return found

    def apart(self, to: Tensor, rows: Tensor) -> Element:
        """The elements that bring some members to others, each pair by itself."""
        pieces = []
        for part in torch.arange(len(rows)).split(max(map(len, self._chunks()))):
            scores = self._kind(self._group, self.alone(to[part]), _some(self._source, rows[part]))
            pieces.append(self._search(scores).ended.element)
        return joined(pieces)

    # rounds ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Align all to one random member. (It is soon forgotten.)"""
        # Shifts concern nothing else: the mean of all is as good as any.
        mean = {site: value.mean(1, keepdim=True) for site, value in self._moments.items()}
        self._moments, self.shifts = shifted(self._whole, mean, self._moments)
        self._source = {site: self._kind.features(value) for site, value in self._moments.items()}
        reference = self.alone(torch.randint(len(self), (1,)))
        for rows in self._chunks():
            found = self._search(self._kind(self._group, reference, _some(self._source, rows))).ended
            self.element = put(self.element, rows, found.element)
        self._update()

    def _iterate(self, max_rounds: int, tick: Callable[[], object]) -> bool:
        """Align to the common reference until nothing changes; then, of few members, each to the others."""
        for number in range(max_rounds):
            before = self._history[-1]
            centre = self._centre(self._features(), len(self))
            for rows in self._chunks():
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
        total = self._features()
        for k in torch.randperm(len(self)).tolist():
            row = torch.tensor([k])
            others = {site: value - self._moved[site][:, k : k + 1] for site, value in total.items()}
            self._descend(self._centre(others, len(self) - 1), row, fresh=True)
            own = self._kind(self._group, others, _some(self._source, row)).moved(self.element.select(row))
            for site, value in own.items():
                total[site] = others[site] + value
                self._moved[site][:, k : k + 1] = value
        self._update()

    # small steps ----------------------------------------------------------------------------------------------------

    def _descend(self, centre: Moments, rows: Tensor, fresh: bool) -> None:
        """Go on from the present elements of some members or, if that is better, from a forward start."""
        scores = self._kind(self._group, centre, _some(self._source, rows))
        present = self.element.select(rows)
        descent = replace(self._search, tolerance=0.0).descent(scores)
        descent.threshold = self._search.tolerance * 0.1 * scores.costs(present, descent.rows).sum(1).abs()
        every = torch.ones(len(rows), len(descent.moves), dtype=torch.bool)
        best = descent.descend(present, every, shuffled=True)
        if fresh:
            best = best.better(descent.descend(*descent.forward_start()), 10 * descent.threshold)
        self.element = put(self.element, rows, best.element)

    def _identity(self) -> Element:
        device = next(iter(self._moments.values())).device
        return self._group.identity((len(self),), device, torch.float64)

    def _features(self) -> Moments:
        """The sum of the features of all members, moved, ``(channels, 1, *site_shape)``."""
        return {site: value.sum(1, keepdim=True) for site, value in self._moved.items()}

    def _centre(self, features: Moments, count: int) -> Moments:
        """The reference that is best for as many members, whose features have this sum."""
        return {site: self._kind.centre(value / count) for site, value in features.items()}

    def _chunks(self) -> list[Tensor]:
        return chunks_of(self._group, self._moments)

    def _update(self) -> None:
        self._moved = self._kind(self._group, self._source, self._source).moved(self.element)
        self._history.append(float(self.costs().mean()))


def _some(values: Moments, rows: Tensor) -> Moments:
    return {site: value[:, rows.to(value.device)] for site, value in values.items()}
