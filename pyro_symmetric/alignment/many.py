r"""Bring many posteriors, networks or draws into one frame, without a privileged member.

.. math:: \min_{g_1 \dots g_S \in G} \sum_k W_2^2(g_{k\#} q_k, \bar q), \qquad
    \bar q = \arg\min_q \sum_k W_2^2(g_{k\#} q_k, q)

For mean-field Gaussians the Wasserstein barycentre :math:`\bar q` has the mean of the means and the mean of the
standard deviations. Aligning every member to the barycentre and taking the barycentre anew never raises the sum; this
goes on until nothing changes. Then, of few members, each is aligned in turn to the barycentre of the others, which lets
go of what a member found only because it is part of the barycentre itself.

Many draws can be told apart better: by the density that each has under independent Gaussians fitted to all of them,

.. math:: \max_{g_1 \dots g_S \in G,\, m,\, s} \sum_k \log \mathcal N(g_k w_k;\ m, s^2),

which counts every weight by its own spread within its label, so that sites of large numbers don't decide alone. But
Gaussians fitted to mixed labels are as wide as the mixture, and from there the descent may end with labels mixed. So it
starts from where distances are least, and from a random draw, measured by the spread of all; the better end is kept.
The labels of the common frame are those in which most members came.

As every member has an element of its own, the maps between members, :math:`g_i^{-1} g_j`, agree around every cycle;
aligned pair by pair they need not (Crisostomi et al. 2024, arXiv 2405.17897).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.alignment.descent import Descent, chosen
from pyro_symmetric.alignment.features import (
    COSTS,
    Moments,
    batch_shape_of,
    chunks_of,
    compared_sites,
    moments_of,
    require_fit,
    shifted,
)
from pyro_symmetric.alignment.gaussian import GaussianWeights, draws_of, moved_to, on_host, plain
from pyro_symmetric.alignment.matching import BAR_DELAY
from pyro_symmetric.alignment.scales import evened_together, scaled
from pyro_symmetric.discovery.model_check import require_of_posterior
from pyro_symmetric.discovery.symmetry import with_weights
from pyro_symmetric.groups import Element, Group, group_of
from pyro_symmetric.groups.element import require_buffers
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Weights

Objective = Literal["gaussian", "wasserstein", "l2"]

# How many draws tell the spread of every weight well enough to measure by it.
MANY = 100
# Ends that differ by less than this part are the same.
SAME = 1e-3
# Rounds by distances before those by densities: a start needn't be an end.
NEAR_ROUNDS = 3
# Up to so many members each is aligned to the others in turn at the end.
FEW = 32
# In how many rounds members start anew as well as where they are.
FRESH_ROUNDS = 2


@dataclass(frozen=True)
class Frame:
    """The result of :func:`align_many`.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> frame = ps.align_many([{"w": torch.tensor([1.0, 2.0, 3.0])}, {"w": torch.tensor([3.0, 1.0, 2.0])}], group)
    >>> isinstance(frame, ps.alignment.Frame), frame.cost.tolist(), frame.converged
    (True, [0.0, 0.0], True)
    >>> torch.equal(frame.aligned[0]["w"], frame.aligned[1]["w"])
    True

    :param element: one element for each member, a batch of the members' shape: ``(S,)`` for a list or a batch,
        ``(chains, draws)`` or ``(chains, 1)`` for a posterior.
    :param aligned: the members moved: a list for a list, with networks for networks, else as they came.
    :param barycentre: means and standard deviations of the Wasserstein barycentre.
    :param cost: squared distance of each member to it, float64 ``(S,)``, on the CPU; under ``"gaussian"`` minus the
        log-density.
    :param history: the mean of these costs as the members came, then after each round that lies below; it never rises.
    :param converged: whether it ended because nothing changed, rather than by ``max_rounds``.
    :param objective: which cost was minimised: ``"gaussian"``, ``"wasserstein"`` or ``"l2"``.
    :param ends: the mean cost at the end of each start, of which the lowest was kept.
    """

    element: Element
    aligned: Any
    barycentre: GaussianWeights
    cost: Tensor
    history: tuple[float, ...]
    converged: bool
    objective: str = "wasserstein"
    ends: tuple[float, ...] = ()

    @property
    def starts_agree(self) -> bool:
        """True if all starts ended at the same cost, to one part in a thousand: then it is hardly a local optimum."""
        return all(math.isclose(end, min(self.ends), rel_tol=SAME) for end in self.ends)

    @property
    def displaced(self) -> Tensor:
        """Members that did not come in the copy in which most came, bool, of the element's batch shape, on the CPU."""
        here = self.element.group.identity()
        result = torch.zeros(self.element.batch_shape, dtype=torch.bool, device="cpu")
        for mine, neutral in ((self.element.permutations, here.permutations), (self.element.signs, here.signs)):
            for name, value in mine.items():
                different = value != neutral[name].to(value)
                result |= different.flatten(len(result.shape)).any(-1).cpu()
        return result

    @property
    def posterior(self) -> Posterior:
        """The aligned posterior, if a posterior was given."""
        if not isinstance(self.aligned, Posterior):
            raise ValueError("align_many was not given a Posterior; .aligned holds what it was given, moved")
        return self.aligned

    def __repr__(self) -> str:
        steps = "converged" if self.converged else "cut short"
        ends = "" if self.starts_agree else f"; starts disagree, they end at {', '.join(f'{e:.4g}' for e in self.ends)}"
        return (
            f"Frame({self.cost.numel()} members, mean cost {self.history[0]:.6g} -> {self.history[-1]:.6g}, "
            f"{len(self.history) - 1} rounds, {steps}{ends})"
        )


@torch.no_grad()
def align_many(
    sources: Sequence[Any] | Mapping[str, Tensor] | GaussianWeights | Posterior,
    group: Any,
    *,
    cost: Objective | None = None,
    each: Literal["draw", "chain"] = "draw",
    restarts: int = 1,
    max_rounds: int = 50,
    max_sweeps: int = 100,
    tolerance: float = 1e-6,
    seed: int | None = None,
    progress: bool = True,
) -> Frame:
    """Bring many sets of weights into one frame.

    >>> group = ps.Group.declare({"w": ("h",)}, {"w": torch.zeros(3)})
    >>> weights = {"w": torch.tensor([[1.0, 2.0, 3.0], [3.1, 1.1, 2.1], [2.2, 3.2, 1.2]])}
    >>> frame = ps.align_many(weights, group)
    >>> bool(frame.aligned["w"].std(0).max() < 0.2)
    True

    *Scales* are evened before all else. Those that no weight makes up for (in front of batch normalisation) stay as
    they are; remove them by ``canonicalize``.

    :param sources: a ``Posterior``, or site -> samples ``(samples, *site_shape)``; or a list of what
        :func:`~pyro_symmetric.alignment.align` takes. On any device: their moments come to the CPU once, and results
        are where they are.
    :param group: the symmetry.
    :param cost: ``"wasserstein"``; ``"l2"`` to look at the means alone; ``"gaussian"``, the density under Gaussians
        fitted to all members, weight by weight. ``None``: ``"gaussian"`` of 100 draws or more under a group without
        scales, else ``"wasserstein"``.
    :param each: of a ``Posterior``, whether each draw or each chain (by its moments) gets an element of its own.
    :param restarts: further starts, each from all members aligned to a random one; the best end is kept.
    :param max_rounds: how often to go to the new barycentre at most.
    :param max_sweeps: as in ``align``.
    :param tolerance: it ends when a round lowers the mean cost by less than this part.
    :param seed: of the random choices; ``None``: they are drawn from PyTorch's generator.
    :param progress: whether to show a progress bar over starts, if they take more than two seconds.
    :raises ValueError: for an empty list, naming the member and the site that doesn't fit, or if the model that a
        posterior was drawn from lacks a declared group.
    """
    arguments.one_of("cost", cost, [None, *get_args(Objective)])
    arguments.whole("restarts", restarts, 0)
    arguments.whole("max_rounds", max_rounds, 1)
    arguments.whole("max_sweeps", max_sweeps, 1)
    arguments.number("tolerance", tolerance, least=0)
    arguments.whole("seed", seed, 0, none="random choices from PyTorch's generator")
    require_of_posterior(group, sources)
    group = _two_sided(group_of(group))
    given, gaussian, device, shape = _read(sources, group, each)
    sites = compared_sites(given, group)
    objective = _objective(cost, sources, gaussian, group)
    (moments,) = moments_of([gaussian], sites, group, COSTS[objective])
    if objective == "gaussian":  # squares of weights must tell their spread
        moments = {site: value.double() for site, value in moments.items()}
    scales = evened_together(group, moments)
    even, settings = scaled(scales, moments), (max_sweeps, tolerance)
    rounds, near = _Rounds(group, objective, even, *settings), _Rounds(group, "wasserstein", even, *settings)
    with (
        contextlib.nullcontext() if seed is None else forked(seed),
        tqdm(total=1 + restarts, desc="align many", unit="start", disable=not progress, delay=BAR_DELAY) as bar,
    ):
        starts: list[Callable[[], Element]] = [rounds.aligned_to_one for _ in range(1 + restarts)]
        if objective == "gaussian":
            starts[0] = lambda: near.settle(near.aligned_to_one(), NEAR_ROUNDS).element
        settled = []
        for start in starts:
            settled.append(rounds.settle(start(), max_rounds))
            bar.update()
        best, frame = min(settled, key=lambda one: one.cost), rounds
        first = _Rounds(group, objective, moments, *settings)
        if best.cost > first.given:  # the members came in a better frame than a start from any one of them finds
            best, frame, scales = first.settle(first.identity(), max_rounds), first, Element(group, batch_shape=(1,))
    element = recentred(best.element).within(group) @ scales
    if frame.shifts:
        element = element @ Element(group, shifts=frame.shifts)
    permutations, signs, logs, shifts = (
        {n: v.reshape(*shape, *group[n].shape) for n, v in part.items()} for part in element.parts
    )
    element = Element(group, permutations, signs, logs, shifts, shape)
    moved = _moved(gaussian, element)
    barycentre = moved.each(
        lambda value: value.to(torch.promote_types(value.dtype, torch.float32)).mean(tuple(range(len(shape))))
    )
    element = element.to(device)
    return Frame(
        element,
        _as_given(sources, element, moved, device),
        moved_to(barycentre, device),
        frame.costs(best.element),
        (first.given, *(cost for cost in best.history if cost < first.given)),
        best.converged,
        objective,
        tuple(one.cost for one in settled),
    )


# round by round -------------------------------------------------------------------------------------------------------


class _Settled(NamedTuple):
    """A frame: the members' elements, the mean cost at the start and after each round, whether nothing changed."""

    element: Element
    history: tuple[float, ...]
    converged: bool

    @property
    def cost(self) -> float:
        """The mean cost at the end."""
        return self.history[-1]


class _Rounds:
    """Members on their way into one frame.

    :param moments: site -> moments of all members, ``(channels, S, *site_shape)``.
    :ivar given: the mean cost of the members as they came.
    :ivar shifts: name of units -> the constants that were added in front of a softmax, ``(S, *units.shape)``.
    """

    def __init__(self, group: Group, objective: str, moments: Moments, max_sweeps: int, tolerance: float):
        self._group, self._cost = group.finite, COSTS[objective]
        self._max_sweeps, self._tolerance = max_sweeps, tolerance
        self._chunks = chunks_of(self._group, moments)
        self._count = next(iter(moments.values())).shape[1]
        self._present = {site: self._cost.of_source(value) for site, value in moments.items()}
        self.given = float(self.costs().mean())
        # Shifts concern nothing else: the mean of all is as good as any.
        mean = {site: value.mean(1, keepdim=True) for site, value in moments.items()}
        self._moments, self.shifts = shifted(group, mean, moments)
        self._source = {site: self._cost.of_source(value) for site, value in self._moments.items()}

    def identity(self) -> Element:
        """All members stay as they came."""
        return self._group.identity((self._count,), dtype=torch.float64)

    def aligned_to_one(self) -> Element:
        """The elements that bring all members to one random one of them, measured by the spread of all."""
        one, alone = int(torch.randint(self._count, (), device="cpu")), {}
        for site, every in self._moments.items():
            alone[site] = every[:, one : one + 1]
            if not self._cost.squared:
                scale = self._cost.centre(self._source[site].mean(1, keepdim=True))[1]
                if dims := sorted(self._group.permutations.dims(site)):
                    scale = scale.square().mean([1 + dim for dim in dims], keepdim=True).sqrt()
                alone[site] = torch.stack([alone[site][0], scale.expand_as(alone[site][0])])
        found = self.identity()
        for rows in self._chunks:
            found = _put(found, rows, self._descent(alone, rows, self._tolerance).search(0)[0].element)
        return found

    def settle(self, element: Element, max_rounds: int) -> _Settled:
        """Align to the common reference until nothing changes; then, of few members, each to the others.

        :param element: where the members begin.
        """
        history = [self._place(element)]
        for others in (False, True):
            converged = False
            for number in range(max_rounds):
                fresh = number < FRESH_ROUNDS
                element = self._one_by_one(element) if others else self._all_at_once(element, fresh)
                history.append(self._place(element))
                gained = history[-2] - history[-1] > self._tolerance * abs(history[-2])
                if converged := not gained and (others or not fresh):
                    break
            if not converged or not 2 <= self._count <= FEW:
                break
        return _Settled(element, tuple(history), converged)

    def costs(self, element: Element | None = None) -> Tensor:
        """The share of each member in its distance from the common reference, float64 ``(S,)``.

        :param element: where the members are; ``None``: where they were left.
        """
        if element is not None:
            self._place(element)
        centre = self._centre(self._total(), self._count)
        return torch.cat([self._cost.total(centre, _some(self._present, rows)) for rows in self._chunks])

    def _place(self, element: Element) -> float:
        """Move the members to where their elements bring them; returns the mean cost there."""
        every = self._descent(self._present, torch.arange(self._count, device="cpu"))
        self._present = every.features_after(element)
        return float(self.costs().mean())

    def _all_at_once(self, element: Element, fresh: bool) -> Element:
        """Align all to the common reference, and at first from a new start, too."""
        centre = self._centre(self._total(), self._count)
        for rows in self._chunks:
            element = _put(element, rows, self._descended(centre, rows, element.select(rows), fresh)[0])
        return element

    def _one_by_one(self, element: Element) -> Element:
        """Align each member in turn to the others."""
        total = self._total()
        for k in torch.randperm(self._count, device="cpu").tolist():
            row = torch.tensor([k], device="cpu")
            others = {site: value - self._present[site][:, k : k + 1] for site, value in total.items()}
            own, features = self._descended(self._centre(others, self._count - 1), row, element.select(row), True)
            element = _put(element, row, own)
            for site, value in features.items():
                total[site] = others[site] + value
                self._present[site][:, k : k + 1] = value
        return element

    def _descended(self, centre: Moments, rows: Tensor, element: Element, fresh: bool) -> tuple[Element, Moments]:
        """Resume from the present elements of some members or, if that is better, from a forward start."""
        descent = self._descent(centre, rows)
        descent.threshold = self._tolerance * 0.1 * descent.cost_of(element).abs()
        best = descent.descend(element, descent.roots)
        if fresh:
            best = best.better(descent.descend(*descent.start()), 10 * descent.threshold)
        return best.element, descent.features_after(best.element)

    def _descent(self, reference: Moments, rows: Tensor, tolerance: float = 0.0) -> Descent:
        return Descent(self._group, self._cost, reference, _some(self._source, rows), tolerance, self._max_sweeps)

    def _total(self) -> Moments:
        """The sum of the features of all members in the frame, ``(channels, 1, *site_shape)``."""
        return {site: value.sum(1, keepdim=True) for site, value in self._present.items()}

    def _centre(self, total: Moments, count: int) -> Moments:
        """The reference that is best for as many members, whose features have this sum."""
        return {site: self._cost.centre(value / count) for site, value in total.items()}


def _some(values: Moments, rows: Tensor) -> Moments:
    return {site: value[:, rows] for site, value in values.items()}


def _put(element: Element, rows: Tensor, other: Element) -> Element:
    """A batch ``(B,)`` in which some elements are those of another batch."""
    index = torch.zeros(element.batch_shape[0], dtype=torch.long, device="cpu").index_copy(
        0, rows, torch.arange(len(rows), device="cpu")
    )
    taken = torch.zeros(element.batch_shape[0], dtype=torch.bool, device="cpu").index_fill(0, rows, True)
    return chosen(taken, other.select(index), element)


def recentred(element: Element) -> Element:
    """The same frame, counted from the permutations and signs that most members have, of several the first's.

    With :math:`h` the commonest element every :math:`g` becomes :math:`h^{-1} g`.
    """
    finite = [value.flatten(1) for value in (*element.permutations.values(), *element.signs.values())]
    if not finite:
        return element
    _, kind, counts = torch.cat([value.long() for value in finite], 1).unique(
        dim=0, return_inverse=True, return_counts=True
    )
    return element.select(int((counts[kind] == counts.max()).nonzero()[0])).inverse() @ element


# what was given -------------------------------------------------------------------------------------------------------


def _objective(cost: Objective | None, sources: Any, gaussian: GaussianWeights, group: Group) -> Objective:
    if cost is not None:
        require_fit(cost, group)
        return cost
    count = len(next(iter(gaussian.loc.values())))
    drawn = isinstance(sources, Posterior | Mapping) and not any(bool(value.any()) for value in gaussian.scale.values())
    return "gaussian" if drawn and count >= MANY and not group.names("scale") else "wasserstein"


def _two_sided(group: Group) -> Group:
    """Leave out scales that enter the compared sites with exponents of one sign only."""
    sites = set(group.site_shapes) - set(group.buffers)
    exponents = {n: [a.exponent for a in group.axes(n) if a.site in sites and a.exponent] for n in group.names("scale")}
    return group.without([n for n, own in exponents.items() if not own or min(own) > 0 or max(own) < 0], "scale")


def _read(
    sources: Any, group: Group, each: str
) -> tuple[dict[str, GaussianWeights], GaussianWeights, torch.device, tuple[int, ...]]:
    """The moments of a list, a batch or a posterior, by what messages call them, as one batch ``(S,)``; their device,
    and the batch shape of the elements that act on them.

    :raises ValueError: if there are none, or naming the member and the site that doesn't fit.
    """
    arguments.one_of("each", each, ("draw", "chain"))
    if isinstance(sources, Posterior):
        samples = _with_moments(draws_of(sources, "posterior"), group)
        if each == "draw":
            shape: tuple[int, ...] = (sources.num_chains, sources.num_samples)
            read: Any = {site: value.flatten(0, 1) for site, value in samples.items()}
        else:
            shape, spread = (sources.num_chains, 1), {s: v.std(1, correction=0) for s, v in samples.items()}
            read = GaussianWeights({site: value.mean(1) for site, value in samples.items()}, spread)
        gaussian, device = on_host(read, "posterior")
        given = {"sources": gaussian}
    elif isinstance(sources, Mapping | GaussianWeights):
        read = _with_moments(sources, group) if isinstance(sources, Mapping) else sources
        gaussian, device = on_host(read, "sources")
        shape, given = tuple(batch_shape_of(gaussian, group, "sources")), {"sources": gaussian}
        if len(shape) != 1:
            raise ValueError(f"sources has batch shape {shape}; it must be (number of members,), or a list of members")
    else:
        sources = arguments.listed("sources", sources, object, "members, or a batch")
        if not sources:
            raise ValueError("sources is an empty list; it must hold at least one set of weights, network or guide")
        names = [f"sources[{k}]" for k in range(len(sources))]
        read = {name: on_host(own, name) for name, own in zip(names, sources, strict=True)}
        given, device = {name: one for name, (one, _) in read.items()}, read[names[0]][1]
        for name, one in given.items():
            if batch_shape_of(one, group, name):
                raise ValueError(f"{name} has batch dimensions; a list holds one set of weights in each place")
        gaussian, shape = _stacked(list(given.values())), (len(sources),)
    batch_shape_of(gaussian, group, "sources")
    require_buffers(gaussian.loc, group.buffers, "sources")
    return given, gaussian, device, shape


def _with_moments(weights: Mapping[str, Tensor], group: Group) -> Weights:
    """Without the sites that a group knows nothing of and that have no mean: counters, labels."""
    arguments.weights("sources", weights)
    return {s: value for s, value in weights.items() if value.is_floating_point() or s in group.site_shapes}


def _stacked(every: Sequence[GaussianWeights]) -> GaussianWeights:
    """One batch, of the sites that all have in one shape."""
    first = every[0].loc
    sites = [s for s in first if all(s in one.loc and one.loc[s].shape == first[s].shape for one in every)]
    loc, scale = ({s: torch.stack([part(o)[s].to(first[s]) for o in every]) for s in sites} for part in (
        lambda one: one.loc, lambda one: one.scale))  # fmt: skip
    return GaussianWeights(loc, scale, {site: own for site, own in every[0].supports.items() if site in sites})


def _moved(own: GaussianWeights, element: Element) -> GaussianWeights:
    """The moments of all sites, moved, those that weren't compared (buffers, what no group knows) with them."""
    # What a guide maps to values of another shape (a simplex) no element moves.
    held = {site for site in own.supports if (b := own.bijection(site)) is not None and b.domain.event_dim}

    def act(weights: Mapping[str, Tensor]) -> Weights:
        shaped = {s: v.reshape(*element.batch_shape, *v.shape[1:]) for s, v in weights.items()}
        return shaped | element({site: value for site, value in shaped.items() if site not in held})

    loc = act(own.loc)
    # Elements are affine, weight by weight: deviations go with what is linear, without its sign.
    scale, shift = act(own.scale), act({site: torch.zeros_like(value) for site, value in own.scale.items()})
    return GaussianWeights(loc, {site: (v - shift[site]).abs() for site, v in scale.items()}, own.supports)


def _as_given(sources: Any, element: Element, gaussian: GaussianWeights, device: torch.device) -> Any:
    """The members as they were given, moved."""
    if isinstance(sources, Posterior):
        return sources.map(element)
    if isinstance(sources, Mapping):
        return element(sources)
    if isinstance(sources, GaussianWeights):
        return moved_to(gaussian, device)
    members: list[Any] = []
    for k, own in enumerate(sources):
        weights, one = plain(own), element.select(k)
        if not isinstance(weights, Mapping):
            members.append(moved_to(gaussian.each(itemgetter(k)), device))
        else:
            members.append(one(weights) if weights is own else with_weights(own, one(weights)))
    return members
