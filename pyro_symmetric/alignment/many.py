r"""Bring many posteriors, networks or draws into one frame, without a privileged member.

.. math:: \min_{g_1 \dots g_S \in G} \sum_k W_2^2(g_{k\#} q_k, \bar q), \qquad
    \bar q = \arg\min_q \sum_k W_2^2(g_{k\#} q_k, q)

For mean-field Gaussians the barycentre :math:`\bar q` has the mean of the means and the mean of the deviations.
Aligning every member to it and taking it anew never raises the sum; this goes on until nothing changes. Then, of few
members, each is aligned in turn to the barycentre of the others, which lets go of what a member found only because it
is part of the barycentre itself.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.alignment.descent import Descent, act, put, recentre, reshape
from pyro_symmetric.alignment.matching import BAR_DELAY, evening
from pyro_symmetric.alignment.moments import (
    COSTS,
    GaussianWeights,
    Moments,
    compared_sites,
    members_of,
    moments_of,
    plain,
    require_fit,
    to_gaussian,
)
from pyro_symmetric.discovery.model_check import require_of_posterior
from pyro_symmetric.discovery.symmetry import with_weights
from pyro_symmetric.groups import Element, Group, group_of
from pyro_symmetric.posterior.posterior import Posterior

Objective = Literal["gaussian", "wasserstein", "l2"]

# How many draws tell the spread of every weight well enough to measure by it.
MANY = 100
# Ends that differ by less than this part are the same.
SAME = 1e-3
# Rounds at most, and those by distances before those by densities: a start needn't be an end.
MAX_ROUNDS, NEAR_ROUNDS = 50, 3
# Up to so many members each is aligned to the others in turn at the end.
FEW = 32
# In how many rounds members start anew as well as where they are.
FRESH_ROUNDS = 2
# A round that lowers the mean cost by less than this part is the last one.
TOLERANCE = 1e-6
# How many numbers the members that are matched together may hold, with their scores.
CHUNK_ENTRIES = 2**26


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
    :param aligned: the members moved: a list for a list, with networks for networks, else as they came; their
        barycentre is ``ps.barycentre(frame.aligned)``.
    :param cost: squared distance of each member to the barycentre, float64 ``(S,)``, on the CPU; under ``"gaussian"``
        minus the log-density.
    :param history: the mean of these costs as the members came, but for evened scales, then after each round that lies
        below; it never rises.
    :param converged: whether it ended because nothing changed, not after fifty rounds.
    :param objective: which cost was minimised: ``"gaussian"``, ``"wasserstein"`` or ``"l2"``.
    :param ends: the mean cost at the end of each start, of which the lowest was kept.
    """

    element: Element
    aligned: Any
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
        moved, here = self.element.to("cpu"), self.element.group.identity()
        result = torch.zeros(moved.batch_shape, dtype=torch.bool, device="cpu")
        for move, still in here.numbers.items():
            result |= (moved.numbers[move] != still).any(-1) if move in ("permute", "flip") else False
        return result

    @property
    def posterior(self) -> Posterior:
        """The aligned posterior, if a posterior was given."""
        return arguments.instance("aligned", self.aligned, Posterior, "a Posterior, as align_many was given one")

    def __repr__(self) -> str:
        ends = "" if self.starts_agree else f"; starts disagree, they end at {', '.join(f'{e:.4g}' for e in self.ends)}"
        return (
            f"Frame({self.cost.numel()} members, mean cost {self.history[0]:.6g} -> {self.history[-1]:.6g}, "
            f"{len(self.history) - 1} rounds, {'converged' if self.converged else 'cut short'}{ends})"
        )


@torch.no_grad()
def align_many(
    sources: Sequence[Any] | Mapping[str, Tensor] | GaussianWeights | Posterior,
    group: Any,
    *,
    cost: Objective | None = None,
    restarts: int = 1,
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

    :param sources: a ``Posterior``, each draw of which gets an element, or site -> samples ``(samples, *site_shape)``;
        or a list of what :func:`~pyro_symmetric.alignment.align` takes (of a posterior's chains, say, by their
        moments). On any device: their moments come to the CPU once, and results are where they are.
    :param group: the symmetry.
    :param cost: ``"wasserstein"``; ``"l2"`` to look at the means alone; ``"gaussian"``, the density under Gaussians
        fitted to all members, weight by weight. ``None``: ``"gaussian"`` of 100 draws or more under a group without
        scales, else ``"wasserstein"``.
    :param restarts: further starts, each from all members aligned to a random one; the best end is kept.
    :param seed: of the random choices; ``None``: they are drawn from PyTorch's generator.
    :param progress: whether to show a progress bar over starts, if they take more than two seconds.
    :raises ValueError: for an empty list, naming the member and the site that doesn't fit, or if the model that a
        posterior was drawn from lacks a declared group.
    """
    arguments.one_of("cost", cost, [None, *get_args(Objective)])
    arguments.whole("seed", seed, 0, none="random choices from PyTorch's generator")
    require_of_posterior(group, sources)
    group = _two_sided(group_of(group))
    given, device, shape = members_of(sources, group)
    sites = compared_sites(given, group)
    drawn = isinstance(sources, Posterior | Mapping) and math.prod(shape) >= MANY and not group.names("scale")
    objective: Any = cost or ("gaussian" if drawn else "wasserstein")
    require_fit(objective, group)
    every = moments_of(list(given.values()), sites, group, COSTS[objective])
    moments = {site: torch.cat([one[site] for one in every], 1) for site in sites}
    if objective == "gaussian":  # squares of weights must tell their spread
        moments = {site: value.double() for site, value in moments.items()}
    scales, _ = evening(group, moments)
    even = {s: act(scales, s, v) for s, v in moments.items()} if group.names("scale") else moments
    rounds = _Rounds(group, objective, even)
    with (
        contextlib.nullcontext() if seed is None else forked(seed),
        tqdm(total=1 + restarts, desc="align many", unit="start", disable=not progress, delay=BAR_DELAY) as bar,
    ):
        ends = []
        for number in range(1 + restarts):
            if objective == "gaussian" and number == 0:
                near = _Rounds(group, "wasserstein", even)
                start = near.settle(near.aligned_to_one(), NEAR_ROUNDS).element
            else:
                start = rounds.aligned_to_one()
            ends.append(rounds.settle(start))
            bar.update()
        best = min(ends, key=lambda one: one.history[-1])
        if best.history[-1] > rounds.given:  # the members came in a better frame than a start from any of them finds
            best = rounds.settle(rounds.still)
    rounds.place(best.element)
    element = recentre(best.element).within(group) @ scales
    element = reshape(element, shape).to(device)
    history = (rounds.given, *(cost for cost in best.history if cost < rounds.given))
    costs = tuple(one.history[-1] for one in ends)
    return Frame(element, _as_given(sources, element), rounds.costs(), history, best.converged, objective, costs)


# round by round -------------------------------------------------------------------------------------------------------


class _Settled(NamedTuple):
    """The members' elements, the mean cost at the start and after each round, whether nothing changed."""

    element: Element
    history: tuple[float, ...]
    converged: bool


class _Rounds:
    """Members on their way into one frame.

    :param moments: site -> moments of all members, ``(channels, S, *site_shape)``.
    :ivar still: all members stay as they came; ``given``: their mean cost then.
    """

    def __init__(self, group: Group, objective: str, moments: Moments):
        self._group, self._cost = group.finite, COSTS[objective]
        self._count = next(iter(moments.values())).shape[1]
        self.still = self._group.identity((self._count,), dtype=torch.float64)
        weights = sum(value[:, 0].numel() for value in moments.values())
        scores = sum(u.count**2 * len(u.axes) for u in self._group.units.values() if "permute" in u.moves)
        together = max(1, CHUNK_ENTRIES // (3 * weights + 2 * scores))
        self._chunks = torch.arange(self._count, device="cpu").split(together)
        self._moments = moments
        self._source = {site: self._cost.of_source(value) for site, value in moments.items()}
        self._present = dict(self._source)
        self.given = float(self.costs().mean())

    def aligned_to_one(self) -> Element:
        """The elements that bring all members to one random one of them, measured by the spread of all."""
        one, alone = int(torch.randint(self._count, (), device="cpu")), {}
        for site, every in self._moments.items():
            alone[site] = every[:, one : one + 1]
            if not self._cost.squared:
                scale = self._cost.centre(self._source[site].mean(1, keepdim=True))[1]
                axes = [
                    axis for one in self._group.permutations.units.values() for axis in one.axes if axis.site == site
                ]
                if dims := {dim for axis in axes for dim in range(axis.dim, axis.dim + axis.span)}:
                    scale = scale.square().mean([1 + dim for dim in sorted(dims)], keepdim=True).sqrt()
                alone[site] = torch.stack([alone[site][0], scale.expand_as(alone[site][0])])
        found = self.still
        for rows in self._chunks:
            found = put(found, rows, self._descent(alone, rows).search(0)[0].element)
        return found

    def settle(self, element: Element, max_rounds: int = MAX_ROUNDS) -> _Settled:
        """Align to the common reference until nothing changes; then, of few members, each to the others.

        :param element: where the members begin.
        """
        self.place(element)
        history, converged = [float(self.costs().mean())], False
        for alone in (False, True) if 2 <= self._count <= FEW else (False,):
            for number in range(max_rounds):
                fresh = alone or number < FRESH_ROUNDS
                element = self._round(element, alone, fresh)
                history.append(float(self.costs().mean()))
                gained = history[-2] - history[-1] > TOLERANCE * abs(history[-2])
                if converged := not gained and (alone or not fresh):
                    break
            if not converged:
                break
        return _Settled(element, tuple(history), converged)

    def costs(self) -> Tensor:
        """The share of each member in its distance from the common reference, float64 ``(S,)``."""
        centre = self._centre({site: value.sum(1, keepdim=True) for site, value in self._present.items()}, self._count)
        parts = ({site: value[:, rows] for site, value in self._present.items()} for rows in self._chunks)
        return torch.cat([self._cost.total(centre, part) for part in parts])

    def place(self, element: Element) -> None:
        """Move the members to where elements bring them."""
        self._present = {site: act(element, site, value) for site, value in self._source.items()}

    def _round(self, element: Element, alone: bool, fresh: bool) -> Element:
        """Align all members to the common reference, or each in turn to that of the others.

        :param fresh: whether members start anew, too, as well as where they are.
        """
        total = {site: value.sum(1, keepdim=True) for site, value in self._present.items()}
        singles = torch.randperm(self._count, device="cpu").split(1)
        for rows in singles if alone else self._chunks:
            rest = {s: v - self._present[s][:, rows] for s, v in total.items()} if alone else total
            descent = self._descent(self._centre(rest, self._count - alone), rows)
            best = descent.descend(descent.at(element.select(rows)), descent.roots)
            if fresh:
                best = best.better(descent.descend(*descent.start()))
            element = put(element, rows, best.element)
            for site, value in descent.at(best.element).features.items():
                self._present[site] = self._present[site].index_copy(1, rows, value)
                total[site] = rest[site] + value if alone else total[site]
        return element

    def _descent(self, reference: Moments, rows: Tensor) -> Descent:
        source = {site: value[:, rows] for site, value in self._source.items()}
        return Descent(self._group, self._cost, reference, source, 0.1 * TOLERANCE)

    def _centre(self, total: Moments, count: int) -> Moments:
        """The reference that is best for as many members, whose features have this sum."""
        return {site: self._cost.centre(value / count) for site, value in total.items()}


# what was given -------------------------------------------------------------------------------------------------------


def _two_sided(group: Group) -> Group:
    """Leave out scales that enter the compared sites with exponents of one sign only."""
    sites = set(group.site_shapes) - set(group.buffers)
    exponents = {n: [a.exponent for a in group.axes(n) if a.site in sites and a.exponent] for n in group.names("scale")}
    return group.without([n for n, own in exponents.items() if not own or min(own) > 0 or max(own) < 0], "scale")


def _as_given(sources: Any, element: Element) -> Any:
    """The members as they were given, moved."""
    if isinstance(sources, Posterior):
        return sources.map(element)
    if isinstance(sources, Mapping):
        return element(sources)
    if isinstance(sources, GaussianWeights):
        # What a guide maps to values of another shape (a simplex) no element moves.
        held = {site for site in sources.supports if (b := sources.bijection(site)) is not None and b.domain.event_dim}
        loc, scale = (
            own | element({site: value for site, value in own.items() if site not in held})
            for own in (sources.loc, sources.scale)
        )
        return GaussianWeights(loc, {site: value.abs() for site, value in scale.items()}, sources.supports)
    members: list[Any] = []
    for k, own in enumerate(sources):
        weights, one = plain(own), element.select(k)
        if isinstance(own, nn.Module) and isinstance(weights, Mapping):
            members.append(with_weights(own, one(weights)))
        else:
            members.append(_as_given(weights if isinstance(weights, Mapping) else to_gaussian(weights), one))
    return members
