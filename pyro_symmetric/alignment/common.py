"""Members on their way into one frame."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.cost import Cost, Moments
from pyro_symmetric.alignment.descent.matcher import Matcher
from pyro_symmetric.alignment.descent.search import Search, chunks_of, move_sources, shifted
from pyro_symmetric.alignment.parts.problem import Problem
from pyro_symmetric.alignment.parts.state import State

# Up to so many members each is aligned to the others in turn at the end.
FEW = 32
# In how many rounds members start anew as well as where they are.
FRESH_ROUNDS = 2


class Common:
    """Members on their way into one frame.

    :ivar state: their elements.
    :ivar shifts: site -> the constants that were added in front of a softmax, ``(S,)``.
    """

    def __init__(self, problem: Problem, cost: Cost, moments: Moments, max_sweeps: int, tolerance: float):
        self._problem, self._cost, self._moments = problem, cost, moments
        self._max_sweeps, self._tolerance = max_sweeps, tolerance
        self._source = self._moved = moments
        self.state = State.identity(problem.parts, len(self), next(iter(moments.values())).device)
        self.shifts: dict[str, Tensor] = {}
        self._history = [float(self.costs().mean())]

    def __len__(self) -> int:
        return len(next(iter(self._moments.values())))

    def settle(self, search: Search, max_rounds: int, tick: Callable[[], object] = int) -> bool:
        """Bring them into one frame; returns whether that ended because nothing changed.

        :param tick: called after the start and after every round, of which there may be twice as many as given.
        """
        given = self._history[0]
        self._start(search)
        tick()
        converged = self._iterate(max_rounds, tick)
        if self._history[-1] > given:  # the members came in a better frame than a start from any one of them finds
            self._restart()
            converged = self._iterate(max_rounds, tick)
        return converged

    def costs(self) -> Tensor:
        """What each member has to its distance from the common reference, ``(S,)``."""
        centre = self._centre(self._features(), len(self))
        total = torch.zeros(len(self), dtype=torch.float64)
        for rows in self._chunks():
            for site, reference in centre.items():
                distance = self._cost.distance(reference, _some(self._moved[site], rows))
                total[rows] += distance.flatten(1).sum(1, dtype=torch.float64).cpu()
        return total

    def fallen(self) -> tuple[float, ...]:
        """The mean cost of the members as they came, then after each round that lies below; it never rises."""
        given = self._history[0]
        return (given, *(cost for cost in self._history[1:] if cost < given))

    def alone(self, members: Moments) -> Moments:
        """The references that some members are by themselves."""
        of = self._problem.parts.permutations.members
        return {site: self._cost.alone(value, self._source[site], sorted(of(site))) for site, value in members.items()}

    # rounds ---------------------------------------------------------------------------------------------------------

    def _start(self, search: Search) -> None:
        """Align all to one random member. (It is soon forgotten.)"""
        # Shifts concern nothing else: the mean of all is as good as any.
        mean = self._centre(self._features(), len(self))
        self._source, self.shifts = shifted(self._problem, self._cost, mean, self._moments)
        first = int(torch.randint(len(self), ()))
        reference = self.alone({site: value[first : first + 1] for site, value in self._source.items()})
        for rows in self._chunks():
            found = search(reference, {site: value[rows] for site, value in self._source.items()})
            self.state.put(rows, found.descent.state, self.state.stamps)
        self._update()

    def _restart(self) -> None:
        """Go back to where the members came from (but for shifts, which only bring them closer)."""
        self.state = State.identity(self._problem.parts, len(self), next(iter(self._moments.values())).device)
        del self._history[1:]
        self._update()

    def _iterate(self, max_rounds: int, tick: Callable[[], object]) -> bool:
        """Align to the common reference until nothing changes; then, of few members, each to the others."""
        for number in range(max_rounds):
            before = self._history[-1]
            self._round(fresh=number < FRESH_ROUNDS)
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
        return before - self._history[-1] <= self._tolerance * abs(before)

    def _round(self, fresh: bool) -> None:
        centre = self._centre(self._features(), len(self))
        for rows in self._chunks():
            source = {site: value[rows] for site, value in self._source.items()}
            self.state.put(rows, self._descended(centre, source, self.state.rows(rows), fresh), self.state.stamps)
        self._update()

    def _leave_one_out(self) -> None:
        total = self._features()
        for k in torch.randperm(len(self)).tolist():
            row = torch.tensor([k])
            own = {site: self._cost.source_features(value[row]) for site, value in self._moved.items()}
            others = self._centre({site: total[site] - own[site] for site in total}, len(self) - 1)
            source = {site: value[row] for site, value in self._source.items()}
            state = self._descended(others, source, self.state.rows(row), fresh=True)
            self.state.put(row, state, self.state.stamps)
            for site, value in move_sources(self._problem, source, state).items():
                total[site] += self._cost.source_features(value) - own[site]
                self._moved[site][row] = value
        self._update()

    # small steps ----------------------------------------------------------------------------------------------------

    def _descended(self, centre: Moments, source: Moments, state: State, fresh: bool) -> State:
        """Where descents from the present elements end, or, if better, one from a forward start."""
        matcher = Matcher(self._problem.parts, centre, source, self._cost)
        rows = torch.arange(matcher.batch)
        threshold = self._tolerance * 0.1 * matcher.costs(state, rows).sum(1).abs()
        every = torch.ones(matcher.batch, len(matcher.moves), dtype=torch.bool)
        best = matcher.descend(state, every, max_sweeps=self._max_sweeps, threshold=threshold, shuffled=True)
        if fresh:
            other = matcher.descend(*matcher.forward_start(), max_sweeps=self._max_sweeps, threshold=threshold)
            best = best.better(other, 10 * threshold)
        return best.state

    def _features(self) -> Moments:
        """The sum of the features of all members, moved, ``(1, *view_shape, channels)``."""
        total: Moments = {}
        for rows in self._chunks():
            for site, value in self._moved.items():
                part = self._cost.source_features(_some(value, rows)).sum(0, keepdim=True)
                total[site] = total[site] + part if site in total else part
        return total

    def _centre(self, features: Moments, count: int) -> Moments:
        """The reference that is best for as many members, whose features have this sum."""
        return {site: self._cost.centre(value / count) for site, value in features.items()}

    def _chunks(self) -> list[Tensor]:
        return chunks_of(self._problem, self._source)

    def _update(self) -> None:
        self._moved = move_sources(self._problem, self._source, self.state)
        self._history.append(float(self.costs().mean()))


def _some(value: Tensor, rows: Tensor) -> Tensor:
    return value if len(rows) == len(value) else value[rows.to(value.device)]
