"""Members on their way into one frame, round by round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.weights import Moments, WeightCost
from pyro_symmetric.alignment.descent import Descent, Search
from pyro_symmetric.alignment.elements import put
from pyro_symmetric.alignment.moments import chunks_of, shifted
from pyro_symmetric.canonical.scales import Sum, by_units
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group

# Up to so many members each is aligned to the others in turn at the end.
FEW = 32
# In how many rounds members start anew as well as where they are.
FRESH_ROUNDS = 2


@dataclass(frozen=True, eq=False)
class Settled:
    """A frame.

    :param element: the members' elements, but for shifts.
    :param history: the mean cost at the start, then after each round.
    :param converged: whether it ended because nothing changed.
    """

    element: Element
    history: tuple[float, ...]
    converged: bool

    @property
    def cost(self) -> float:
        """The mean cost at the end."""
        return self.history[-1]


class Rounds:
    """Members on their way into one frame, round by round.

    :param group: the group.
    :param kind: the cost.
    :param moments: site -> moments of all members, ``(channels, S, *site_shape)``.
    :param max_sweeps: as in ``align``.
    :param tolerance: the part of the mean cost that a round must gain.
    :ivar given: the mean cost of the members as they came.
    :ivar shifts: name of units -> the constants that were added in front of a softmax, ``(S, *units.shape)``.
    """

    def __init__(self, group: Group, kind: type[WeightCost], moments: Moments, max_sweeps: int, tolerance: float):
        self._group = group.restricted("permute", "flip", "scale")
        self._kind, self._max_sweeps, self._tolerance = kind, max_sweeps, tolerance
        self._chunks = chunks_of(self._group, moments)
        self._present = {site: kind.features(value) for site, value in moments.items()}
        self.given = float(self.costs().mean())
        # Shifts concern nothing else: the mean of all is as good as any.
        mean = {site: value.mean(1, keepdim=True) for site, value in moments.items()}
        self._moments, self.shifts = shifted(group, mean, moments)
        self._source = {site: kind.features(value) for site, value in self._moments.items()}

    def __len__(self) -> int:
        return next(iter(self._present.values())).shape[1]

    def identity(self) -> Element:
        """All members stay as they came."""
        device = next(iter(self._present.values())).device
        return self._group.identity((len(self),), device, torch.float64)

    def aligned_to_one(self) -> Element:
        """The elements that bring all members to one random one of them."""
        one = _some(self._moments, torch.randint(len(self), (1,), device="cpu"))
        exchanged = {site: sorted(self._group.permutations.dims(site)) for site in one}
        alone = {site: self._kind.alone(one[site], every, exchanged[site]) for site, every in self._moments.items()}
        search = Search(0, self._max_sweeps, self._tolerance)
        return search(self._cost(alone, rows) for rows in self._chunks).best.element

    def settle(self, element: Element, max_rounds: int) -> Settled:
        """Align to the common reference until nothing changes; then, of few members, each to the others.

        :param element: where the members begin.
        """
        self.element = element
        history = [self._placed()]

        def until_nothing_changes(step: Callable[[int], None], least: int) -> bool:
            for number in range(max_rounds):
                step(number)
                history.append(self._placed())
                if number >= least and history[-2] - history[-1] <= self._tolerance * abs(history[-2]):
                    return True
            return False

        converged = until_nothing_changes(self._align, FRESH_ROUNDS)
        if converged and 2 <= len(self) <= FEW:
            converged = until_nothing_changes(self._leave_one_out, 0)
        return Settled(self.element, tuple(history), converged)

    def costs(self, element: Element | None = None) -> Tensor:
        """The share of each member in its distance from the common reference, float64 ``(S,)``.

        :param element: where the members are; ``None``: where they were left.
        """
        if element is not None:
            self.element = element
            self._placed()
        centre = self._centre(self._total(), len(self))
        return torch.cat([self._kind.total(centre, _some(self._present, rows)) for rows in self._chunks])

    # small steps ----------------------------------------------------------------------------------------------------

    def _align(self, number: int) -> None:
        """Align all to the common reference, and at first from a new start too."""
        centre = self._centre(self._total(), len(self))
        for rows in self._chunks:
            self._descend(centre, rows, fresh=number < FRESH_ROUNDS)

    def _leave_one_out(self, _: int) -> None:
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

    def _descend(self, centre: Moments, rows: Tensor, fresh: bool) -> None:
        """Resume from the present elements of some members or, if that is better, from a forward start."""
        cost, present = self._cost(centre, rows), self.element.select(rows)
        descent = Descent(cost, self._max_sweeps)
        descent.threshold = self._tolerance * 0.1 * cost.costs(present, descent.rows).sum(1).abs()
        best = descent.descend(present, descent.everything, shuffled=True)
        if fresh:
            best = best.better(descent.descend(*descent.forward_start()), 10 * descent.threshold)
        self.element = put(self.element, rows, best.element)

    def _placed(self) -> float:
        """Move the members to where their elements bring them; returns the mean cost there."""
        every = torch.arange(len(self), device="cpu")
        self._present = self._cost(self._source, every).features_after(self.element)
        if self._kind.squared and self._group.names("scale"):
            self.element = self._common_scales() @ self.element
            self._present = self._cost(self._source, every).features_after(self.element)
        return float(self.costs().mean())

    def _common_scales(self) -> Element:
        """The scales of the whole frame in which distances are least.

        Each member's own follow the reference, and the reference follows them: together they move hardly at all. The
        deviations from the reference are the weights of least mass.
        """
        scalings = self._group.scalings
        sums = {
            site: (value - self._centre(self._total(), len(self))[site]).double().square().sum((0, 1))
            for site, value in self._present.items()
        }
        mass = Sum(scalings, {site: scalings.view(site, value[None]) for site, value in sums.items()})
        free = mass.bounded()
        logs = mass.without(~free).minimise(free)[0]
        return Element(self._group, log_scales=by_units(logs, scalings, torch.Size()))

    def _cost(self, reference: Moments, rows: Tensor) -> WeightCost:
        return self._kind(self._group, reference, _some(self._source, rows))

    def _total(self) -> Moments:
        """The sum of the features of all members in the frame, ``(channels, 1, *site_shape)``."""
        return {site: value.sum(1, keepdim=True) for site, value in self._present.items()}

    def _centre(self, total: Moments, count: int) -> Moments:
        """The reference that is best for as many members, whose features have this sum."""
        return {site: self._kind.centre(value / count) for site, value in total.items()}


def _some(values: Moments, rows: Tensor) -> Moments:
    return {site: value[:, rows.to(value.device)] for site, value in values.items()}
