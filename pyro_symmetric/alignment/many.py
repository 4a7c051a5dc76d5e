r"""Align many posteriors, networks or draws to their barycentre, without a privileged
member.

.. math:: \min_{g_1 \dots g_S \in G} \sum_k W_2^2(g_{k\#} q_k, \bar q), \qquad
    \bar q = \arg\min_q \sum_k W_2^2(g_{k\#} q_k, q)

For mean-field Gaussians the barycentre :math:`\bar q` has the mean of the means and the
mean of the deviations. Aligning every member to it and updating it never raises the
sum, and alternates until nothing changes. Then few members are each aligned in turn to
the barycentre of the others, which removes a member's pull on itself.

Many draws allow a better objective, their density under independent Gaussians fitted to
all of them,

.. math:: \max_{g_1 \dots g_S \in G,\, m,\, s} \sum_k \log \mathcal N(g_k w_k;\ m, s^2),

which measures every weight in units of its own spread. But Gaussians fitted to mixed
labels are as wide as the mixture, and a descent from there may leave labels mixed. So
it starts from the frame of least distances, and from a random draw with the spread of
all; the better result is kept. The common frame is that in which most members were
given.

As every member has an element of its own, the maps between members, :math:`g_i^{-1}
g_j`, are cycle-consistent; those of pairwise alignments need not be (Crisostomi et al.
2024, arXiv 2405.17897).
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
from pyro_symmetric.alignment.descent import Descent, best_of_all, search
from pyro_symmetric.alignment.elements import act, put, recentre, reshape
from pyro_symmetric.alignment.moments import (
    COSTS,
    GaussianWeights,
    Moments,
    compared_sites,
    members_of,
    moments_of,
    plain,
    require_fit,
    require_rotatable,
    to_gaussian,
)
from pyro_symmetric.alignment.pairwise import BAR_DELAY
from pyro_symmetric.alignment.scale_fit import evening
from pyro_symmetric.canonical.removal import principal_axes, varimax_axes
from pyro_symmetric.discovery.model_carried import (
    AUTO,
    NO_MODEL,
    Carried,
    carried_symmetry,
)
from pyro_symmetric.discovery.symmetry import with_weights
from pyro_symmetric.groups import Element, Group
from pyro_symmetric.groups.moves import MOVES
from pyro_symmetric.posterior.posterior import FROM_ABOVE, Posterior
from pyro_symmetric.weights import Tensors, drop_names, first_value, map_values

Objective = Literal["gaussian", "wasserstein", "l2"]

# The number of draws from which on their spread is measured well enough for the
# density.
MANY = 100
# Starts agree if their costs differ by less than this fraction.
AGREEMENT = 1e-3
# The most rounds; and those by distances that precede those by densities, which needn't
# converge.
MAX_ROUNDS = 50
DISTANCE_ROUNDS = 3
# At most so many members are aligned to the others in turn.
FEW = 32
# In how many rounds a forward start is tried besides the present element.
FRESH_ROUNDS = 2
# The relative gain of the mean cost below which rounds end.
TOLERANCE = 1e-6
# The most entries of all moved members, of a group that is enumerated in each round.
MOST_ENTRIES = 2**21
# The most numbers, with scores, that members matched together may hold.
CHUNK_ENTRIES = 2**26


@dataclass(frozen=True)
class Frame:
    """The result of :func:`align_many`.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> frame = ps.align_many(
    ...     [
    ...         {"w": torch.tensor([1.0, 2.0, 3.0])},
    ...         {"w": torch.tensor([3.0, 1.0, 2.0])},
    ...     ],
    ...     group,
    ... )
    >>> isinstance(frame, ps.alignment.Frame), frame.cost.tolist(), frame.converged
    (True, [0.0, 0.0], True)
    >>> torch.equal(frame.aligned[0]["w"], frame.aligned[1]["w"])
    True

    :param element: one element for each member, a batch of the members' shape: ``(S,)``
        for a list or a batch, ``(chains, draws)`` or ``(chains, 1)`` for a posterior.
    :param aligned: the moved members, in the form in which they were given (networks in
        a list as networks); their barycentre is ``ps.barycentre(frame.aligned)``.
    :param cost: squared distance of each member to the barycentre, float64 ``(S,)``, on
        the CPU; under ``"gaussian"`` minus the log-density.
    :param history: the mean cost of the members as given, with evened scales, then
        after each round that lowers it.
    :param converged: whether rounds ended because nothing changed, not after fifty.
    :param objective: the cost that was minimised: ``"gaussian"``, ``"wasserstein"`` or
        ``"l2"``.
    :param ends: the mean cost at the end of each start, of which the lowest was kept.
    :param remark: the symmetry that was removed, if it wasn't given.
    """

    element: Element
    aligned: Any
    cost: Tensor
    history: tuple[float, ...]
    converged: bool
    objective: str = "wasserstein"
    ends: tuple[float, ...] = ()
    remark: str = ""

    def __bool__(self) -> bool:
        """Return whether rounds converged, and all starts to one cost."""
        return self.converged and self.starts_agree

    @property
    def starts_agree(self) -> bool:
        """Agreement of the costs of all starts, to one part in a thousand: evidence for
        a global optimum.
        """
        return all(
            math.isclose(end, min(self.ends), rel_tol=AGREEMENT) for end in self.ends
        )

    @property
    def displaced(self) -> Tensor:
        """The members given in another copy than most: bool, of the element's batch
        shape, on the CPU.
        """
        element = self.element.to("cpu")
        identity = self.element.group.identity()
        displaced = torch.zeros(element.batch_shape, dtype=torch.bool, device="cpu")
        for move, still in identity.numbers.items():
            displaced |= (
                (element.numbers[move] != still).any(-1)
                if MOVES[move].compact
                else False
            )
        return displaced

    @property
    def posterior(self) -> Posterior:
        """The aligned posterior, if a posterior was given."""
        return arguments.instance(
            "aligned",
            self.aligned,
            Posterior,
            "a Posterior, as align_many was given one",
        )

    def __repr__(self) -> str:
        ends = (
            ""
            if self.starts_agree
            else (
                "; starts disagree, they end at "
                f"{', '.join(f'{e:.4g}' for e in self.ends)}"
            )
        )
        return (
            f"Frame({self.cost.numel()} members, mean cost {self.history[0]:.6g} -> "
            f"{self.history[-1]:.6g}, "
            f"{len(self.history) - 1} rounds, "
            f"{'converged' if self.converged else 'cut short'}{ends}"
            f"{'; ' * bool(self.remark)}{self.remark})"
        )


@torch.no_grad()
def align_many(
    sources: Sequence[Any] | Tensors | GaussianWeights | Posterior,
    symmetry: Any = AUTO,
    *,
    cost: Objective | None = None,
    restarts: int = 1,
    seed: int | None = None,
    progress: bool = True,
    varimax: str | None = None,
) -> Frame:
    """Align many sets of weights to one frame.

    >>> group = ps.Group.declare({"w": ("h",)}, {"w": torch.zeros(3)})
    >>> weights = {
    ...     "w": torch.tensor([[1.0, 2.0, 3.0], [3.1, 1.1, 2.1], [2.2, 3.2, 1.2]])
    ... }
    >>> frame = ps.align_many(weights, group)
    >>> bool(frame.aligned["w"].std(0).max() < 0.2)
    True

    *Scales* are evened first. Those for which no weight compensates (in front of batch
    normalisation) stay; remove them by ``canonicalize``.

    :param sources: a ``Posterior``, each draw of which gets an element, or site ->
        samples ``(samples, *site_shape)``; or a list of what
        :func:`~pyro_symmetric.alignment.align` takes (a posterior's chains, say, by
        their moments). On any device, which is also that of the result.
    :param symmetry: a network's or model's, or its group. ``"auto"``: that of the model
        that a posterior was drawn from, with its rotations unless deviations count;
        other members stay as they are.
    :param cost: ``"wasserstein"``; ``"l2"``, of the means alone; ``"gaussian"``, the
        density under Gaussians fitted to all members, weight by weight. ``None``:
        ``"gaussian"`` for 100 draws or more under a group without scales and
        rotations, else ``"wasserstein"``.
    :param restarts: further starts, each from all members aligned to a random one; the
        best result is kept.
    :param seed: of the random choices; ``None`` takes PyTorch's generator.
    :param progress: whether to show a progress bar over starts, after two seconds.
    :param varimax: a site, to whose varimax axes the common frame of units that rotate
        along it is turned; by default to the principal axes of all their weights.
    :raises ValueError: for an empty list, naming the member and the site that doesn't
        fit, or if the model that a posterior was drawn from lacks a declared group.
    """
    arguments.one_of("cost", cost, [None, *get_args(Objective)])
    arguments.whole("seed", seed, 0, none="random choices from PyTorch's generator")
    carried = _carried_by(sources, symmetry)
    if carried.is_found and (cost == "gaussian" or not isinstance(sources, Posterior)):
        carried = carried.without_rotations()  # of which deviations have none
    group = _two_sided(carried.group)
    turned = group.rotations.sites
    if varimax is not None and varimax not in turned:
        raise ValueError(
            f"varimax is {varimax!r}; units rotate along the sites {list(turned)}"
        )
    members, device, shape = members_of(sources, group)
    sites = compared_sites(members, group)
    drawn = (
        isinstance(sources, Posterior | Mapping)
        and math.prod(shape) >= MANY
        and not group.moves & {"scale", "rotate"}
    )
    objective = cost or ("gaussian" if drawn else "wasserstein")
    require_fit(objective, group)
    require_rotatable(members.values(), group)
    member_moments = moments_of(list(members.values()), sites, group, COSTS[objective])
    moments = {
        site: torch.cat([of_member[site] for of_member in member_moments], 1)
        for site in sites
    }
    if objective == "gaussian":  # spreads are differences of squares
        moments = map_values(Tensor.double, moments)
    scales = evening(group, moments).of_source
    even = (
        {s: act(scales, s, v) for s, v in moments.items()}
        if group.names("scale")
        else moments
    )
    rounds = _Rounds(group, objective, even)
    with (
        contextlib.nullcontext() if seed is None else forked(seed),
        tqdm(
            total=1 + restarts,
            desc="align many",
            unit="start",
            disable=not progress,
            delay=BAR_DELAY,
        ) as bar,
    ):
        ends = []
        for number in range(1 + restarts):
            if objective == "gaussian" and number == 0:
                by_distance = _Rounds(group, "wasserstein", even)
                start = by_distance.alternate(
                    by_distance.aligned_to_one(), DISTANCE_ROUNDS
                ).element
            else:
                start = rounds.aligned_to_one()
            ends.append(rounds.alternate(start))
            bar.update()
        best = min(ends, key=lambda end: end.history[-1])
        # the frame in which the members were given is better
        if best.history[-1] > rounds.given:
            best = rounds.alternate(rounds.identity)
    rounds.place(best.element)
    element = rounds.framed(recentre(best.element), varimax).within(group) @ scales
    element = reshape(element, shape).to(device)
    history = (rounds.given, *(cost for cost in best.history if cost < rounds.given))
    costs = tuple(end.history[-1] for end in ends)
    return Frame(
        element,
        _as_given(sources, element),
        rounds.costs(),
        history,
        best.converged,
        objective,
        costs,
        carried.line,
    )


def _aligned(posterior: Posterior, symmetry: Any) -> Posterior:
    return align_many(posterior, symmetry, progress=False).posterior


FROM_ABOVE.align = _aligned


def _carried_by(sources: Any, symmetry: Any) -> Carried:
    """Return the symmetry of members; those of a list need one that is given, or found
    in a posterior among them.
    """
    if isinstance(sources, Posterior | Mapping | GaussianWeights):
        return carried_symmetry(symmetry, sources)
    members = arguments.listed("sources", sources, object, "members, or a batch")
    carried = carried_symmetry(symmetry, *members, None)
    if carried.line == NO_MODEL:
        raise ValueError(
            "sources are a list of members that carry no symmetry; pass one, such as "
            "find_symmetry(net, x)"
        )
    return carried


# rounds of alignment and barycentre ---------------------------------------------------


class _End(NamedTuple):
    """The members' elements, the mean cost at the start and after each round, and
    whether rounds converged.
    """

    element: Element
    history: tuple[float, ...]
    converged: bool


class _Rounds:
    """Members that are aligned to a common reference in rounds.

    :param moments: site -> moments of all members, ``(channels, S, *site_shape)``.
    :ivar identity: of all members; ``given``: their mean cost there.
    """

    def __init__(self, group: Group, objective: str, moments: Moments):
        self._group = group.compact
        self._cost = COSTS[objective]
        self._count = first_value(moments).shape[1]
        self.identity = self._group.identity((self._count,), dtype=torch.float64)
        weights = sum(value[:, 0].numel() for value in moments.values())
        scores = sum(
            u.count**2 * len(u.axes)
            for u in self._group.units.values()
            if "permute" in u.moves
        )
        together = max(1, CHUNK_ENTRIES // (3 * weights + 2 * scores))
        self._chunks = torch.arange(self._count, device="cpu").split(together)
        self._moments = moments
        self._source = map_values(self._cost.of_source, moments)
        self._present = dict(self._source)
        self.given = float(self.costs().mean())

    def aligned_to_one(self) -> Element:
        """Align all members to a random one, with the spread of all."""
        one = int(torch.randint(self._count, (), device="cpu"))
        reference = {}
        for site, moments in self._moments.items():
            reference[site] = moments[:, one : one + 1]
            if not self._cost.squared:
                scale = self._cost.centre(self._source[site].mean(1, keepdim=True))[1]
                axes = [
                    axis
                    for one in self._group.permutations.units.values()
                    for axis in one.axes
                    if axis.site == site
                ]
                if dims := {
                    dim
                    for axis in axes
                    for dim in range(axis.dim, axis.dim + axis.span)
                }:
                    scale = (
                        scale.square()
                        .mean([1 + dim for dim in sorted(dims)], keepdim=True)
                        .sqrt()
                    )
                reference[site] = torch.stack(
                    [reference[site][0], scale.expand_as(reference[site][0])]
                )
        element = self.identity
        for rows in self._chunks:
            element = put(
                element, rows, search(self._descent(reference, rows), 0).best.element
            )
        return element

    def alternate(self, element: Element, max_rounds: int = MAX_ROUNDS) -> _End:
        """Align all members and update the reference, until nothing changes; then few
        members each to the others.
        """
        self.place(element)
        history = [float(self.costs().mean())]
        converged = False
        for left_out in (False, True) if 2 <= self._count <= FEW else (False,):
            for number in range(max_rounds):
                fresh = left_out or number < FRESH_ROUNDS
                element = self._round(element, left_out, fresh)
                history.append(float(self.costs().mean()))
                gained = history[-2] - history[-1] > TOLERANCE * abs(history[-2])
                if converged := not gained and (left_out or not fresh):
                    break
            if not converged:
                break
        return _End(element, tuple(history), converged)

    def costs(self) -> Tensor:
        """Return the cost of each member against the common reference, float64
        ``(S,)``.
        """
        centre = self._centre(
            map_values(lambda value: value.sum(1, keepdim=True), self._present),
            self._count,
        )
        parts = (
            {site: value[:, rows] for site, value in self._present.items()}
            for rows in self._chunks
        )
        return torch.cat([self._cost.total(centre, part) for part in parts])

    def place(self, element: Element) -> None:
        """Move the members by their elements."""
        self._present = {
            site: act(element, site, value) for site, value in self._source.items()
        }

    def framed(self, element: Element, varimax: str | None) -> Element:
        """Turn the common frame of units that rotate to the principal axes of the
        members' mean, or the varimax axes of a site.
        """
        if not self._group.names("rotate"):
            return element
        self.place(element)
        mean = map_values(lambda value: value[0].mean(0), self._present)
        turning = self._group.rotations
        if varimax is None:
            turn = principal_axes(mean, turning)
        else:
            turn = varimax_axes(mean, turning, varimax)
        return turn.within(self._group) @ element

    def _round(self, element: Element, left_out: bool, fresh: bool) -> Element:
        """Align all members to the common reference, or each in turn to that of the
        others.

        :param fresh: whether to try a forward start besides the present element.
        """
        total = map_values(lambda value: value.sum(1, keepdim=True), self._present)
        # in any case, so that random numbers are the same
        order = torch.randperm(self._count, device="cpu")
        for rows in order.split(1) if left_out else self._chunks:
            remaining = (
                {s: v - self._present[s][:, rows] for s, v in total.items()}
                if left_out
                else total
            )
            descent = self._descent(
                self._centre(remaining, self._count - left_out), rows
            )
            best = best_of_all(descent, MOST_ENTRIES)
            if best is None:
                best = descent.descend(descent.at(element.select(rows)), descent.roots)
                if fresh:
                    best = best.better(descent.descend(*descent.start()))
            element = put(element, rows, best.element)
            for site, value in descent.at(best.element).features.items():
                self._present[site] = self._present[site].index_copy(1, rows, value)
                total[site] = remaining[site] + value if left_out else total[site]
        return element

    def _descent(self, reference: Moments, rows: Tensor) -> Descent:
        source = map_values(lambda value: value[:, rows], self._source)
        return Descent(self._group, self._cost, reference, source, 0.1 * TOLERANCE)

    def _centre(self, total: Moments, count: int) -> Moments:
        """Return the best reference for ``count`` members, by the sum of their
        features.
        """
        return map_values(lambda value: self._cost.centre(value / count), total)


# input and output ---------------------------------------------------------------------


def _two_sided(group: Group) -> Group:
    """Drop scales that multiply the compared sites with exponents of one sign only."""
    sites = set(group.site_shapes) - set(group.buffers)
    exponents = {
        n: [a.exponent for a in group.axes(n) if a.site in sites and a.exponent]
        for n in group.names("scale")
    }
    return group.without(
        [
            n
            for n, powers in exponents.items()
            if not powers or min(powers) > 0 or max(powers) < 0
        ],
        "scale",
    )


def _as_given(sources: Any, element: Element) -> Any:
    """Move the members, in the form in which they were given."""
    if isinstance(sources, Posterior):
        return sources.map(element)
    if isinstance(sources, Mapping):
        return element(sources)
    if isinstance(sources, GaussianWeights):
        # No element moves unconstrained values of another shape (of a simplex).
        held = {
            site
            for site in sources.supports
            if (b := sources.bijection(site)) is not None and b.domain.event_dim
        }
        loc, scale = (
            member | element(drop_names(member, held))
            for member in (sources.loc, sources.scale)
        )
        return GaussianWeights(loc, map_values(Tensor.abs, scale), sources.supports)
    members = []
    for k, member in enumerate(sources):
        weights = plain(member)
        member_element = element.select(k)
        if isinstance(member, nn.Module) and isinstance(weights, Mapping):
            members.append(with_weights(member, member_element(weights)))
        else:
            members.append(
                _as_given(
                    weights if isinstance(weights, Mapping) else to_gaussian(weights),
                    member_element,
                )
            )
    return members
