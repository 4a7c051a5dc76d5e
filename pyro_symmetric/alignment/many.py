r"""Bring many posteriors, networks or draws into one frame, without a privileged member.

.. math:: \min_{g_1 \dots g_S \in G} \sum_k W_2^2(g_{k\#} q_k, \bar q), \qquad
    \bar q = \arg\min_q \sum_k W_2^2(g_{k\#} q_k, q)

For mean-field Gaussians the Wasserstein barycentre :math:`\bar q` has the mean of the means and the mean of the
standard deviations. Aligning every member to the barycentre and taking the barycentre anew never raises the sum; this
goes on until nothing changes. Then, of few members, each is aligned in turn to the barycentre of the others, which lets
go of what a member found only because it is part of the barycentre itself.

As every member has an element of its own, the maps between members, :math:`g_i^{-1} g_j`, agree around every cycle;
aligned pair by pair they need not (Crisostomi et al. 2024, arXiv 2405.17897), which is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.alignment.costs.cost import COSTS, Cost, Moments
from pyro_symmetric.alignment.descent.matcher import Matcher
from pyro_symmetric.alignment.descent.search import BAR_DELAY, Search, chunks_of, move_sources, shifted
from pyro_symmetric.alignment.gaussian import GaussianWeights
from pyro_symmetric.alignment.members import read_members
from pyro_symmetric.alignment.moments import moments_of
from pyro_symmetric.alignment.parts.problem import AnyGroup, Element, Problem, problem_of
from pyro_symmetric.alignment.parts.state import State, element_of
from pyro_symmetric.samples import Posterior
from pyro_symmetric.symmetry.permutation import Permutation
from pyro_symmetric.symmetry.rescaling import ScalingGroup

# Up to so many members each is aligned to the others in turn at the end.
FEW = 32
# In how many rounds members start anew as well as where they are.
FRESH_ROUNDS = 2


@dataclass(frozen=True)
class Cycles:
    """How well alignments pair by pair agree, over random triples of members.

    :param triples: how many.
    :param fixed: the share of units that the three maps around a triple, found pair by pair, bring back to their place
        (one of ``n`` would be by chance). The frame's own maps bring back all.
    :param agreement: the share of units that a map found for the pair sends where the frame's map sends them.
    """

    triples: int
    fixed: float
    agreement: float


@dataclass(frozen=True)
class Frame:
    """What :func:`align_many` found.

    :param element: one element for each member, a batch of the members' shape: ``(S,)`` for a list or a batch,
        ``(chains, draws)`` or ``(chains, 1)`` for a posterior.
    :param aligned: the members moved: a list for a list, else as they came.
    :param barycentre: means and standard deviations of the Wasserstein barycentre.
    :param cost: squared distance of each member to it, float64 ``(S,)``.
    :param history: the mean of these costs as the members came, then after each round that lies below; it never rises.
    :param converged: whether it ended because nothing changed, rather than by ``max_rounds``.
    :param cycles: the consistency of pairwise alignments; None for fewer than three members, or if not asked for.
    """

    element: Element
    aligned: Any
    barycentre: GaussianWeights
    cost: Tensor
    history: tuple[float, ...]
    converged: bool
    cycles: Cycles | None

    @property
    def posterior(self) -> Posterior:
        """The aligned posterior, if a posterior was given."""
        if not isinstance(self.aligned, Posterior):
            raise ValueError("align_many was not given a Posterior; .aligned holds what it was given, moved")
        return self.aligned

    def __repr__(self) -> str:
        steps = "converged" if self.converged else "cut short"
        cycles = "" if self.cycles is None else f", pairs agree on {self.cycles.fixed:.1%} of units"
        return (
            f"Frame({self.cost.numel()} members, mean cost {self.history[0]:.6g} -> {self.history[-1]:.6g}, "
            f"{len(self.history) - 1} rounds, {steps}{cycles})"
        )


@torch.no_grad()
def align_many(
    sources: Sequence[Any] | Mapping[str, Tensor] | GaussianWeights | Posterior,
    group: AnyGroup,
    *,
    cost: Literal["wasserstein", "l2"] = "wasserstein",
    each: Literal["draw", "chain"] = "draw",
    restarts: int = 1,
    max_rounds: int = 50,
    max_sweeps: int = 100,
    tolerance: float = 1e-6,
    triples: int = 8,
    progress: bool = True,
) -> Frame:
    """Bring many sets of weights into one frame.

    >>> group = PermutationGroup.declare({"w": ("h",)}, {"w": torch.zeros(3)})
    >>> frame = align_many({"w": torch.tensor([[1.0, 2.0, 3.0], [3.1, 1.1, 2.1], [2.2, 3.2, 1.2]])}, group)
    >>> frame.aligned["w"].std(0).max() < 0.2
    tensor(True)

    *Scales.* Scales that no weight makes up for (in front of batch normalisation) stay as they are: in a common frame
    all would shrink together. Remove them by :func:`~pyro_symmetric.symmetry.canonicalize`.

    :param sources: a list of what :func:`~pyro_symmetric.alignment.align` takes, weights with a leading dimension, or a
        ``Posterior``.
    :param group: the symmetry.
    :param cost: ``"wasserstein"``, or ``"l2"`` to look at the means alone.
    :param each: of a ``Posterior``, whether each draw or each chain (by its moments) gets an element of its own.
    :param restarts: further descents of every member in the first round.
    :param max_rounds: how often to go to the new barycentre at most.
    :param max_sweeps: as in ``align``.
    :param tolerance: it ends when a round lowers the mean cost by less than this part.
    :param triples: how many random triples to align pair by pair, to report how consistent that would be; 0 for none.
    :param progress: whether to show a progress bar over rounds, if they take more than two seconds.
    :raises ValueError: for an empty list, or naming the member and the site that doesn't fit.
    """
    if cost not in ("wasserstein", "l2"):
        raise ValueError(f"cost is {cost!r}; it must be 'wasserstein' or 'l2'")
    arguments.whole("restarts", restarts, 0)
    arguments.whole("max_rounds", max_rounds, 1)
    arguments.whole("max_sweeps", max_sweeps, 1)
    arguments.number("tolerance", tolerance, least=0)
    arguments.whole("triples", triples, 0)
    problem = _two_sided(problem_of(group))
    members = read_members(sources, problem, each)
    _, moments, _ = moments_of(members.gaussian, members.first(), problem, COSTS[cost])
    search = Search(problem, COSTS[cost], restarts, max_sweeps, tolerance)
    common = _Common(problem, COSTS[cost], moments, max_sweeps, tolerance)
    with tqdm(total=1 + max_rounds, desc="align many", disable=not progress, delay=BAR_DELAY) as bar:
        common.start(search)
        bar.update()
        converged = common.iterate(max_rounds, bar.update)
        if common.cost > common.given:  # the members came in a better frame than a start from any one of them finds
            bar.reset()
            common.restart()
            converged = common.iterate(max_rounds, bar.update)
    element = element_of(problem, common.state, common.shifts, members.element_shape)
    gaussian = members.moved_gaussian(element)
    return Frame(
        element,
        members.moved(element, gaussian),
        members.barycentre(gaussian),
        common.costs(),
        (common.given, *(cost for cost in common.history if cost < common.given)),
        converged,
        _cycles(search, moments, common, triples) if len(common) > 2 and triples else None,
    )


class _Common:
    """Members on their way into one frame.

    :ivar state: their elements.
    :ivar moved: site -> moments of all members, moved.
    :ivar given: mean cost of the members as they came.
    :ivar history: mean cost after each round.
    """

    def __init__(self, problem: Problem, cost: Cost, moments: Moments, max_sweeps: int, tolerance: float):
        self._problem, self._cost, self._moments = problem, cost, moments
        self._max_sweeps, self._tolerance = max_sweeps, tolerance
        self._source = self.moved = moments
        self.state = State.identity(problem.parts, len(self), next(iter(moments.values())).device)
        self.shifts: dict[str, Tensor] = {}
        self.given = float(self.costs().mean())
        self.history: list[float] = []

    def __len__(self) -> int:
        return len(next(iter(self._moments.values())))

    @property
    def barycentre(self) -> Moments:
        """Means of means and of deviations, ``(1, *view_shape, channels)``."""
        return {site: value.mean(0, keepdim=True) for site, value in self.moved.items()}

    @property
    def cost(self) -> float:
        """The mean cost now."""
        return self.history[-1]

    def costs(self) -> Tensor:
        """Squared distance of each member to the barycentre, ``(S,)``."""
        total = torch.zeros(len(self), dtype=torch.float64)
        for site, centre in self.barycentre.items():
            total += (self.moved[site] - centre).square().flatten(1).sum(1, dtype=torch.float64).cpu()
        return total

    def start(self, search: Search) -> None:
        """Align all to one random member. (It is soon forgotten.)"""
        # Shifts concern nothing else: the mean of all is as good as any.
        mean = {site: value.mean(0, keepdim=True) for site, value in self._moments.items()}
        self._source, self.shifts = shifted(self._problem, self._cost, mean, self._moments)
        first = int(torch.randint(len(self), ()))
        reference = {site: value[first : first + 1] for site, value in self._source.items()}
        for rows in chunks_of(self._problem, self._source):
            found = search(reference, {site: value[rows] for site, value in self._source.items()})
            self.state.put(rows, found.descent.state, self.state.stamps)
        self._update()

    def restart(self) -> None:
        """Go back to where the members came from (but for shifts, which only bring them closer)."""
        self.state = State.identity(self._problem.parts, len(self), next(iter(self._moments.values())).device)
        self.history.clear()
        self._update()

    def iterate(self, max_rounds: int, tick: Any) -> bool:
        """Align to the barycentre until nothing changes; then, of few members, each to the others."""
        for number in range(max_rounds):
            before = self.history[-1]
            self._round(fresh=number < FRESH_ROUNDS)
            tick()
            if number >= FRESH_ROUNDS and before - self.history[-1] <= self._tolerance * before:
                break
        else:
            return False
        if not 2 <= len(self) <= FEW:
            return True
        for _ in range(max_rounds):
            before = self.history[-1]
            self._leave_one_out()
            if before - self.history[-1] <= self._tolerance * before:
                return True
        return False

    # small steps ----------------------------------------------------------------------------------------------------

    def _round(self, fresh: bool) -> None:
        centre = self.barycentre
        for rows in chunks_of(self._problem, self._source):
            source = {site: value[rows] for site, value in self._source.items()}
            self.state.put(rows, self._descended(centre, source, self.state.rows(rows), fresh), self.state.stamps)
        self._update()

    def _leave_one_out(self) -> None:
        total = {site: value.sum(0, keepdim=True) for site, value in self.moved.items()}
        for k in torch.randperm(len(self)).tolist():
            row = torch.tensor([k])
            others = {site: (total[site] - self.moved[site][row]) / (len(self) - 1) for site in total}
            source = {site: value[row] for site, value in self._source.items()}
            state = self._descended(others, source, self.state.rows(row), fresh=True)
            self.state.put(row, state, self.state.stamps)
            for site, value in move_sources(self._problem, source, state).items():
                total[site] += value - self.moved[site][row]
                self.moved[site][row] = value
        self._update()

    def _descended(self, centre: Moments, source: Moments, state: State, fresh: bool) -> State:
        """Where descents from the present elements end, or, if better, one from a forward start."""
        matcher = Matcher(self._problem.parts, centre, source, self._cost)
        rows = torch.arange(matcher.batch)
        threshold = self._tolerance * 0.1 * matcher.costs(state, rows).sum(1)
        every = torch.ones(matcher.batch, len(matcher.moves), dtype=torch.bool)
        best = matcher.descend(state, every, max_sweeps=self._max_sweeps, threshold=threshold, shuffled=True)
        if fresh:
            other = matcher.descend(*matcher.forward_start(), max_sweeps=self._max_sweeps, threshold=threshold)
            best = best.better(other, 10 * threshold)
        return best.state

    def _update(self) -> None:
        self.moved = move_sources(self._problem, self._source, self.state)
        self.history.append(float(self.costs().mean()))


# small steps --------------------------------------------------------------------------------------------------------


def _two_sided(problem: Problem) -> Problem:
    """Leave out scales that enter the compared sites with exponents of one sign only."""
    group = problem.parts.scalings
    kept = []
    for name in group.factors:
        exponents = [axis.exponent for axis in group.axes(name) if axis.site in problem.sites]
        if exponents and min(exponents) < 0 < max(exponents):
            kept.append(group.factor(name))
    scalings = ScalingGroup(kept, group.site_shapes, problem.parts.permutations.spans)
    return replace(problem, parts=replace(problem.parts, scalings=scalings))


def _cycles(search: Search, moments: Moments, common: _Common, triples: int) -> Cycles:
    group = search.problem.parts.permutations
    chosen = torch.rand(triples, len(common)).argsort(-1)[:, :3]
    to, source = chosen.flatten(), chosen.roll(-1, -1).flatten()
    pieces = []
    for rows in chunks_of(search.problem, {site: value[source] for site, value in moments.items()}):
        one, other = ({site: value[member[rows]] for site, value in moments.items()} for member in (to, source))
        pieces.append(search(one, other).descent.state)
    found = Permutation(group, pieces[0].joined(pieces[1:]).images)
    every = Permutation(group, common.state.images)
    framed = every.select(to).inverse() @ every.select(source)
    first, second, third = (found.select(slice(k, None, 3)) for k in range(3))
    around = first @ second @ third
    units = max(1, sum(group.factors.values()))
    home = {name: torch.arange(n, device=around.images[name].device) for name, n in group.factors.items()}
    fixed = sum(float((image == home[name]).double().mean(0).sum()) for name, image in around.images.items())
    same = sum(float((image == framed.images[name]).double().mean(0).sum()) for name, image in found.images.items())
    return Cycles(triples, fixed / units, same / units)
