r"""Bring one posterior, or one network, as close as a symmetry allows to another.

.. math:: \min_{g \in G} W_2^2(g_\# q_1, q_0) = \|m_0 - g \cdot m_1\|^2 + \|s_0 - |g| \cdot s_1\|^2

for mean-field Gaussians with means :math:`m` and standard deviations :math:`s` (Rossi et al. 2023, arXiv 2310.10171,
section 4); for plain networks, :math:`s = 0`, it is weight matching (Ainsworth et al. 2023, arXiv 2209.04836). The
group is whatever ``find_symmetry`` or ``Group.declare`` gives: permutations (nested ones, too), signs, positive
scalings, the shift of a softmax; no architecture is special. Over several coupled layers the problem is NP-hard: what
comes back is a local optimum, the best of several starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.alignment.costs.gaussian import GaussianCost
from pyro_symmetric.alignment.costs.protocol import CostFunction, MatchCost
from pyro_symmetric.alignment.costs.weights import Moments, PlainCost, WeightCost
from pyro_symmetric.alignment.descent import Descent, Ended, Found, Search
from pyro_symmetric.alignment.elements import joined, on_device, shaped
from pyro_symmetric.alignment.gaussian import GaussianWeights, on_host, to_gaussian
from pyro_symmetric.alignment.moments import batch_shape_of, chunks_of, compared_sites, moments_of, shifted
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group, group_of

COSTS: dict[str, type[WeightCost]] = {"wasserstein": WeightCost, "l2": PlainCost, "gaussian": GaussianCost}
# How many restarts by default, and up to how many units in a set. In a network with three hidden layers of 512 they
# lower the cost by 0.0007 of it, in five times the time.
RESTARTS, NARROW = 3, 256
# Work that takes fewer seconds shows no progress bar.
BAR_DELAY = 2.0


@dataclass(frozen=True)
class Alignment:
    """The result of :func:`align`.

    Of a batch of sources, ``cost``, ``initial_cost`` and ``converged`` are tensors of the batch's shape, ``history`` is
    a tuple of histories, source by source, and ``start_costs`` is a tuple of tensors. All of them lie on the CPU.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> result = ps.align({"w": torch.tensor([3.0, 1.0, 2.0])}, {"w": torch.tensor([1.0, 2.0, 3.0])}, group)
    >>> isinstance(result, ps.alignment.Alignment), result.initial_cost, result.cost, result.converged
    (True, 6.0, 0.0, True)
    >>> result.element({"w": torch.tensor([3.0, 1.0, 2.0])})
    {'w': tensor([1., 2., 3.])}

    :param element: the element ``g`` for which ``g(source)`` is close to the reference; on the source's device.
    :param cost: the cost that it attains, over all sites that the group knows, moved or not.
    :param initial_cost: the cost of the source as it came.
    :param history: the cost at the start of the best descent and after each of its accepted steps; it never rises.
    :param converged: whether that descent ended because nothing could improve, rather than by ``max_sweeps``: no new
        match of one set of units, with what lies inside them matched anew.
    :param start_costs: the cost at the end of every descent: forward start first, then the restarts (and last a descent
        from the identity, made if all others ended above the initial cost).
    """

    element: Element
    cost: Any
    initial_cost: Any
    history: tuple[Any, ...]
    converged: Any
    start_costs: tuple[Any, ...]

    def __repr__(self) -> str:
        count = len(self.start_costs)
        tried = "one descent" if count == 1 else f"best of {count} descents"
        if isinstance(self.cost, Tensor):
            return (
                f"Alignment({self.cost.numel()} sources, mean cost {float(self.initial_cost.mean()):.6g} -> "
                f"{float(self.cost.mean()):.6g}, {tried}, {int(self.converged.sum())} converged, {self.element})"
            )
        ended = "converged" if self.converged else "cut short"
        return f"Alignment(cost {self.initial_cost:.6g} -> {self.cost:.6g}, {tried}, {ended}, {self.element})"


@torch.no_grad()
def align(
    source: Any,
    reference: Any,
    group: Any,
    cost: str | CostFunction = "wasserstein",
    *,
    restarts: int | None = None,
    max_sweeps: int = 100,
    tolerance: float = 1e-7,
    progress: bool = True,
) -> Alignment:
    """Find the element of ``group`` that brings ``source`` closest to ``reference``.

    >>> group = ps.Group.declare({"w": ("hidden", None)}, {"w": torch.zeros(3, 2)})
    >>> reference = {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])}
    >>> result = ps.align({"w": reference["w"][[2, 0, 1]]}, reference, group)
    >>> result.cost, result.element["hidden"].tolist()
    (0.0, [1, 2, 0])

    *Scales.* A scale is chosen with the match, to minimise the cost. Where nothing but running statistics makes up for
    it (in front of batch normalisation) the source's rows shrink to their projections on the reference's.

    :param source: weights (site -> tensor; with leading batch dimensions, several sources at once), a network (its
        parameters and running statistics), a ``Posterior`` of draws, :class:`GaussianWeights`, or a Gaussian guide (see
        :func:`~pyro_symmetric.alignment.gaussian.to_gaussian`). Of a guide with correlations the marginal moments are
        aligned: the sum of marginal distances is a lower bound of the distance between correlated Gaussians, which
        isn't linear in a permutation, and equals it if correlations agree.
    :param reference: likewise, but one set, on any device. A given ``cost`` sees both where they are; under the
        others both come to the CPU, once.
    :param group: the symmetry, all of whose parts are decided over. Buffers (running statistics) and sites that it
        doesn't know are not looked at.
    :param cost: ``"wasserstein"`` (squared 2-Wasserstein distance of mean-field Gaussians), ``"l2"`` (squared distance
        of the means), ``"gaussian"`` (how likely the source is under the reference's Gaussian),
        :class:`~pyro_symmetric.alignment.ActivationCost` (correlation of hidden activations), or a function of
        (weights of the sources, ``(B, *site_shape)``; weights of the reference; group) that returns
        :class:`~pyro_symmetric.alignment.costs.protocol.MatchCost`. What it doesn't see, signs and scales that it
        leaves as they are, is fitted to the weights afterwards.
    :param restarts: further descents, each from the best matching so far with some units of one layer shuffled, drawn
        from PyTorch's generator. The best is kept. There are none where units share no site, which is solved exactly.
        ``None``: three, or none if there are more than 256 units of a kind: in wide networks they take most of the
        time, and gain less than a thousandth of the cost.
    :param max_sweeps: how often one descent goes through what waits at most.
    :param tolerance: a step is accepted if it lowers the cost by more than this part of the initial cost.
    :param progress: whether to show a progress bar over the descents, if they take more than two seconds.
    :raises ValueError: naming the site, if the two don't fit each other or the group, or hold NaN or infinite values.
    :raises TypeError: if there are no Gaussian moments to read.
    """
    if not callable(cost):
        arguments.one_of("cost", cost, COSTS, "a function that returns a MatchCost")
    group = group_of(group)
    narrow = max((group[name].size for name in group.names("permute")), default=0) <= NARROW
    restarts = (RESTARTS if narrow else 0) if restarts is None else restarts
    arguments.whole("restarts", restarts, 0)
    arguments.whole("max_sweeps", max_sweeps, 1)
    arguments.number("tolerance", tolerance, least=0)
    # A function of one's own is asked where the source is, all else decided on the CPU.
    (first, _), (second, device) = (
        (to_gaussian(own, name), None) if callable(cost) else on_host(own, name)
        for own, name in ((reference, "reference"), (source, "source"))
    )
    kind = PlainCost if callable(cost) else COSTS[cost]
    require_fit(kind, group, first)
    if several := batch_shape_of(first, group, "reference"):
        raise ValueError(
            f"reference has batch shape {tuple(several)}; it must be one set of weights at a time; align_many brings a "
            "batch into one frame"
        )
    shape = batch_shape_of(second, group, "source")
    sites = compared_sites({"source": second, "reference": first}, group)
    fixed, came = moments_of([first, second], sites, group, kind)
    sources, shifts = shifted(group, fixed, came)
    decided, chunks = group.restricted("permute", "flip", "scale"), chunks_of(group, sources)

    def by_weights(rows: Tensor) -> WeightCost:
        return kind(decided, fixed, _features(kind, sources, rows))

    def matching(rows: Tensor) -> MatchCost:
        return _given(cost, first, second, shape, rows, decided) if callable(cost) else by_weights(rows)

    search = Search(restarts, max_sweeps, tolerance)
    with tqdm(total=len(chunks) * (1 + restarts), desc="align", disable=not progress, delay=BAR_DELAY) as bar:
        found = search((matching(rows) for rows in chunks), bar.update)
    if callable(cost):
        found = replace(found, best=_fitted(found.best, decided, by_weights, chunks, search))
    elif shifts:
        initial = [kind.total(fixed, _features(kind, came, rows)) for rows in chunks]
        found = replace(found, initial=torch.cat(initial))
    return _result(found, on_device(shaped(found.best.element, group, shifts, shape), device), shape)


def require_fit(kind: type[WeightCost], group: Group, reference: GaussianWeights | None = None) -> None:
    """:raises ValueError: if a cost has no least value over scales, or the reference no spread."""
    if not kind.squared and group.names("scale"):
        raise ValueError(
            f"cost is 'gaussian', but the group scales {group.names('scale')[0]!r}, and scales make any density as "
            "high as one likes: use cost='wasserstein', or the symmetry's .finite part"
        )
    for site, scale in reference.scale.items() if reference is not None and not kind.squared else ():
        if site in group.site_shapes and not bool((scale > 0).all()):
            raise ValueError(f"reference has deviations of zero at site {site!r}; cost 'gaussian' needs them positive")


# small steps --------------------------------------------------------------------------------------------------------


def _features(kind: type[WeightCost], moments: Moments, rows: Tensor) -> Moments:
    return {site: kind.features(value[:, rows.to(value.device)]) for site, value in moments.items()}


def _given(
    cost: CostFunction, first: GaussianWeights, second: GaussianWeights, shape: torch.Size, rows: Tensor, group: Group
) -> MatchCost:
    """The user's own cost of some sources."""
    every = second.each(lambda value: value.reshape(-1, *value.shape[len(shape) :])[rows.to(value.device)])
    sources, reference = (own.constrained(own.loc) for own in (every, first))
    given = cost(sources, reference, group)
    if not isinstance(given, MatchCost):
        raise TypeError(
            f"cost returned {arguments.shown(given)}; it must return a MatchCost, e.g. TableCost(group, tables)"
        )
    if given.batch != len(rows):
        raise ValueError(f"cost returned a MatchCost of {given.batch} sources; it was given {len(rows)}")
    return given


def _fitted(
    best: Ended, group: Group, by_weights: Callable[[Tensor], WeightCost], chunks: Sequence[Tensor], search: Search
) -> Ended:
    """The same end, with scales, and signs that the cost leaves as they are, fitted to the weights."""
    seen = [name for name, sign in best.element.signs.items() if bool((sign != 1).any())]
    left = group.restricted("flip", "scale").without(seen, "flip") if seen else group.restricted("flip", "scale")
    if not left.moves & {"flip", "scale"}:
        return best
    ends = []
    for rows in chunks:
        cost = by_weights(rows)
        features = cost.features_after(best.element.select(rows))
        descent = Descent(PlainCost(left, cost.reference, features), search.max_sweeps, search.tolerance)
        ends.append(descent.descend(descent.identity(), descent.everything))
    rest, converged = joined([end.element for end in ends]), torch.cat([end.converged for end in ends])
    rest = Element(group, signs=rest.signs, log_scales=rest.log_scales)
    return replace(best, element=rest @ best.element, converged=best.converged & converged)


def _result(found: Found, element: Element, shape: torch.Size) -> Alignment:
    best, histories = found.best, found.best.histories()
    if shape:
        cost, initial, converged, *ends = (
            value.reshape(shape) for value in (best.cost, found.initial, best.converged, *found.ends)
        )
        return Alignment(element, cost, initial, histories, converged, tuple(ends))
    costs = tuple(float(end) for end in found.ends)
    return Alignment(element, float(best.cost), float(found.initial), histories[0], bool(best.converged), costs)
