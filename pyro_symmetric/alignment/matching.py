r"""Bring one posterior, or one network, as close as a symmetry allows to another.

.. math:: \min_{g \in G} W_2^2(g_\# q_1, q_0) = \|m_0 - g \cdot m_1\|^2 + \|s_0 - |g| \cdot s_1\|^2

for mean-field Gaussians with means :math:`m` and standard deviations :math:`s` (Rossi et al. 2023, arXiv 2310.10171,
section 4); for plain networks, :math:`s = 0`, it is weight matching (Ainsworth et al. 2023, arXiv 2209.04836). The
group is whatever ``find_symmetry`` or ``Group.declare`` gives: permutations (nested ones, too), signs, positive
scalings; no architecture is special. (Constants in front of a softmax stay.) Over several coupled layers the problem
is NP-hard: what comes back is a local optimum, the best of several starts.

Weights whose scales are a symmetry lie anywhere on an orbit. Before the match sources go to the point of theirs at
which weights are nearest to one (:func:`~pyro_symmetric.canonical.scales.evened`), moved back by what the reference's
units of one set have in common, so that layers keep the sizes that they have in the reference. Afterwards the scales of
all units are fitted at once: with entries :math:`A_t` of the reference and :math:`B_t` of the source in its place, of
which units multiply the latter by :math:`e^{a_t \cdot u}`,

.. math:: F(u) = \sum_t (A_t - e^{a_t \cdot u} B_t)^2 .

Scales of neighbouring layers pull at one another, so that unit by unit it takes hundreds of rounds; L-BFGS takes them
all together. A unit that matches badly would vanish where nothing but running statistics, which :math:`F` doesn't look
at, makes up for it (in front of batch normalisation): so each scale ends within a factor of four of the one at which
the unit's weights are as far from one as those of the reference's unit in its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.alignment.descent import Descent, act, reshape
from pyro_symmetric.alignment.moments import (
    CORRELATION,
    COSTS,
    Cost,
    Moments,
    Shown,
    batch_shape_of,
    compared_sites,
    moments_of,
    on_host,
    require_fit,
    shown_by,
)
from pyro_symmetric.canonical.scales import Mass, conjugate_gradients, evened
from pyro_symmetric.groups import Element, Group, group_of
from pyro_symmetric.groups.units import rows
from pyro_symmetric.weights import Weights

# How many restarts by default, and up to how many units in a set. In a network with three hidden layers of 512 they
# lower the cost by 0.0007 of it, in five times the time.
RESTARTS, NARROW = 3, 256
# How often at most units are matched anew where scales are fitted, and the part of the cost that this must gain.
REFITS, REFITTED = 10, 1e-4
# Steps of the search for scales, and Newton's at its end, if they are so short.
STEPS, POLISH, SHORT = 200, 2, 1e-3
# How far at most, as a logarithm, a scale ends from the one at which a unit is of the reference's size. Two of them
# multiply a running variance, by their squares: of 60 pairs of networks the least was 0.0003 of the reference's least.
BOUND = math.log(4)
# Work that takes fewer seconds shows no progress bar.
BAR_DELAY = 2.0


@dataclass(frozen=True)
class Alignment:
    """The result of :func:`align`.

    Of a batch of sources, all numbers are tensors of the batch's shape, and ``start_costs`` a tuple of them. All lie on
    the CPU.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> result = ps.align({"w": torch.tensor([3.0, 1.0, 2.0])}, {"w": torch.tensor([1.0, 2.0, 3.0])}, group)
    >>> isinstance(result, ps.alignment.Alignment), result.initial_cost, result.cost, result.converged
    (True, 6.0, 0.0, True)
    >>> result.element({"w": torch.tensor([3.0, 1.0, 2.0])})
    {'w': tensor([1., 2., 3.])}

    :param element: the element ``g`` for which ``g(source)`` is close to the reference; on the source's device.
    :param cost: the cost that it attains, over all sites that the group knows, moved or not.
    :param initial_cost: the cost of the source as it came.
    :param converged: whether descents ended because nothing could improve, not after a hundred sweeps.
    :param start_costs: the cost at the end of every descent, of what permutations and signs are matched by: forward
        start first, then the restarts.
    """

    element: Element
    cost: Any
    initial_cost: Any
    converged: Any
    start_costs: tuple[Any, ...]

    def __repr__(self) -> str:
        numbers = (self.initial_cost, self.cost, self.converged)
        before, after, share = (float(v.double().mean()) if isinstance(v, Tensor) else float(v) for v in numbers)
        ended = "converged" if share == 1 else f"{1 - share:.0%} cut short"
        return f"Alignment(cost {before:.6g} -> {after:.6g}, {len(self.start_costs)} descents, {ended}, {self.element})"


@torch.no_grad()
def align(
    source: Any,
    reference: Any,
    group: Any,
    cost: str = "wasserstein",
    *,
    activations: Sequence[Any] | None = None,
    restarts: int | None = None,
    tolerance: float = 1e-7,
    progress: bool = True,
) -> Alignment:
    """Find the element of ``group`` that brings ``source`` closest to ``reference``.

    >>> group = ps.Group.declare({"w": ("hidden", None)}, {"w": torch.zeros(3, 2)})
    >>> reference = {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])}
    >>> result = ps.align({"w": reference["w"][[2, 0, 1]]}, reference, group)
    >>> result.cost, result.element["hidden"].tolist()
    (0.0, [1, 2, 0])

    *Scales* are evened before the match, and fitted to the reference after it, within a factor of four of its sizes.

    :param source: weights (site -> tensor; with leading batch dimensions, several sources at once), a network, a
        ``Posterior`` of draws in one frame, ``GaussianWeights``, or a Gaussian guide, of which the marginal moments
        count (see :func:`~pyro_symmetric.alignment.to_gaussian`).
    :param reference: likewise, but one set, on any device.
    :param group: the symmetry. Buffers (running statistics) and sites that it doesn't know are not looked at.
    :param cost: ``"wasserstein"`` (squared 2-Wasserstein distance of mean-field Gaussians), ``"l2"`` (squared distance
        of the means), or ``"gaussian"`` (how likely the source is under the reference's Gaussian).
    :param activations: ``(net, *inputs)``, to match by what units do instead: the cost is minus the sum of correlations
        of hidden activations; signs and scales that they don't show are fitted to the weights.
    :param restarts: further descents, each from the best matching so far with some units of one layer shuffled, drawn
        from PyTorch's generator, where units share a site. ``None``: three, or none for more than 256 units of a kind.
    :param tolerance: a step is accepted if it lowers the cost by more than this part of the initial cost.
    :param progress: whether to show a progress bar over the descents, if they take more than two seconds.
    :raises ValueError: naming the site, if the two don't fit each other or the group, or hold NaN or infinite values.
    """
    arguments.one_of("cost", cost, COSTS)
    group = group_of(group)
    narrow = max((group[name].size for name in group.names("permute")), default=0) <= NARROW
    restarts = (RESTARTS if narrow else 0) if restarts is None else restarts
    (first, _), (second, device) = on_host(reference, "reference"), on_host(source, "source")
    require_fit(cost, group)
    if several := batch_shape_of(first, group, "reference"):
        raise ValueError(
            f"reference has batch shape {tuple(several)}; it must be one set of weights at a time; align_many brings a "
            "batch into one frame"
        )
    shape = batch_shape_of(second, group, "source")
    sites = compared_sites({"source": second, "reference": first}, group)
    fixed, came = moments_of([first, second], sites, group, COSTS[cost])
    shown = None
    if activations is not None:
        weights = {site: value.reshape(-1, *value.shape[len(shape) :]) for site, value in second.loc.items()}
        shown = shown_by(activations, weights, first.loc, group)
    with tqdm(total=1 + restarts, desc="align", disable=not progress, delay=BAR_DELAY) as bar:
        found = _matched(group, COSTS[cost], fixed, came, shown, restarts, tolerance, bar.update)
    element, *costs, ends = found
    fit: Any = lambda value: value.reshape(shape) if shape else value[0].item()  # noqa: E731
    total, initial, converged = map(fit, costs)
    return Alignment(reshape(element, shape).to(device), total, initial, converged, tuple(map(fit, ends)))


def _matched(
    group: Group, cost: Cost, reference: Moments, given: Moments, shown: Shown | None, restarts: int, tolerance: float,
    tick: Any,
) -> tuple[Element, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """The best element for each source, its cost, that of the source, whether it converged, and the ends of descents.

    :param reference: site -> moments ``(channels, 1, *site_shape)``; ``given``: ``(channels, B, *site_shape)``.
    :param shown: what units do, if that decides where it shows.
    """
    (start, like), left = evening(group, given, reference), group.finite
    element = start

    def placed() -> Moments:
        return {site: act(element, site, value) for site, value in given.items()}

    def by_weights() -> Descent:
        features = {site: cost.of_source(value) for site, value in placed().items()}
        return Descent(left, cost, reference, features, tolerance)

    if shown is not None:
        descent = Descent(shown.group, CORRELATION, shown.reference, shown.source, tolerance)
        told, ends = descent.search(restarts, tick)
        element, left = told.element.within(group) @ element, shown.left
        best, _ = by_weights().search(0)
    else:
        best, ends = by_weights().search(restarts, tick)
    element, total = best.element.within(group) @ element, best.cost
    for _ in range(REFITS if group.names("scale") else 0):
        even = like @ element.within(group.finite).within(group) @ start @ element.inverse()
        element = fitted(group, reference, placed(), even) @ element
        again = by_weights()
        total, end = again.initial, again.descend(again.begin, again.roots)
        if not bool((total - end.cost > REFITTED * total).any()):
            break
        element, total = end.element.within(group) @ element, end.cost
    if shown is not None:
        return element, told.cost, descent.initial, told.converged, ends
    came = {site: cost.of_source(value) for site, value in given.items()}
    return element, total, cost.total(reference, came), best.converged, ends


# scales ---------------------------------------------------------------------------------------------------------------


def evening(group: Group, source: Moments, reference: Moments | None = None) -> tuple[Element, Element]:
    """The scales that even all sources, ``(B,)``, where layers keep the sizes that they have in the reference, and
    those by which even units get the sizes that they have in the reference one by one.

    :param source: site -> moments ``(channels, B, *site_shape)``; ``reference``: likewise, by default all sources.
    """
    found = _even(group.scalings, source)
    like = found if reference is None else _even(group.scalings, reference)
    common = torch.zeros_like(found[:1])
    for at in group.scalings.slots.values():
        common[:, at] = like[:, at].mean()
    return _element(group, found - common), _element(group, common - like)


def fitted(group: Group, reference: Moments, source: Moments, even: Element) -> Element:
    """The scales where the squared distance of what is in place is least, near none; no source ends farther away.

    :param even: those by which units get the sizes that they have in the reference; no unit ends far from there.
    """
    scalings = group.scalings
    sites = [site for site in source if scalings.members(site)]
    batch = next((value.shape[1] for value in source.values()), 1)
    if not sites:
        return Element(group, batch_shape=(batch,), dtype=torch.float64)
    view = {s: [scalings.view(s, v.double()) for v in (reference[s], source[s])] for s in sites}
    squares = Mass(scalings, {site: second.square().sum(0) for site, (_, second) in view.items()})
    products = Mass(scalings, {site: (first * second).sum(0) for site, (first, second) in view.items()})
    up, down = Mass(scalings, {site: (one * other).abs().sum(0) for site, (one, other) in view.items()}).sides()
    return _element(group, _least(squares, products, even.within(scalings).numbers["scale"], up + down > 0))


def _even(scalings: Group, moments: Moments) -> Tensor:
    """The log-scales of all units, ``(B, units)``, at which weights are nearest to one; dead ones stay."""
    sizes = {s: v.double().square().sum(0).sqrt() for s, v in moments.items() if scalings.members(s)}
    viewed = {site: scalings.view(site, value) for site, value in sizes.items()}
    if not viewed:
        return torch.zeros(1, scalings.size, device="cpu").double()
    down, up = Mass(scalings, {site: value.square() for site, value in viewed.items()}).sides()
    return evened(scalings, viewed, down + up > 0)


def _element(group: Group, u: Tensor) -> Element:
    return Element(group, log_scales=group.scalings.by_name(u, "scale"), batch_shape=(len(u),))


def _least(squares: Mass, products: Mass, even: Tensor, free: Tensor) -> Tensor:
    """The log-scales at which the distance, but for the reference's own norm, is least, ``(B, units)``.

    :param even: where sizes are the reference's; none ends far from there, though it fit nothing.
    :param free: units that share something with the reference's; the others stay.
    """
    even = torch.where(free, even, 0.0)

    def distance(u: Tensor) -> Tensor:
        return squares(u) - 2 * products(u / 2)

    def bounded(u: Tensor) -> Tensor:
        return u.clamp(even - BOUND, even + BOUND)

    with torch.inference_mode(False), torch.enable_grad():
        up, down = squares.sides()
        unit = torch.where(free, (up + down).clamp_min(1e-300).rsqrt(), 0.0)  # in such units all curve about alike
        start = torch.where(even.abs() < BOUND, 0.0, even)
        position = torch.where(free, start / unit, 0.0).requires_grad_()
        optimiser = torch.optim.LBFGS([position], max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe")

        def total() -> Tensor:
            return distance(bounded(position * unit)).sum()

        def closure() -> Tensor:
            optimiser.zero_grad()
            (value := total()).backward()
            return value

        optimiser.step(closure)
        for _ in range(POLISH):  # rounding hides from a search by values the last eight digits
            (gradient,) = torch.autograd.grad(total(), position, create_graph=True)
            hessian = lambda p: torch.autograd.grad(gradient, position, p, retain_graph=True)[0]  # noqa: B023, E731
            step = conjugate_gradients(
                hessian, -gradient.detach(), torch.ones_like(unit), torch.full_like(unit[:, :1], 1e-10)
            )
            short = (step * unit).abs().amax(1, keepdim=True) < SHORT
            if not bool(short.any()):
                break
            position.data += torch.where(short, step, 0.0)
        u = bounded(position * unit).detach()
    rounding = 1e-13 * distance(torch.zeros_like(u)).abs()
    return torch.where((distance(u) <= distance(torch.zeros_like(u)) + rounding).unsqueeze(-1), u, 0.0)


# the closest copy -----------------------------------------------------------------------------------------------------


class NearestCopy(NamedTuple):
    r"""The element that moves weights least, how far it moves them, and the most that this can be.

    All copies of ``D`` weights lie on one sphere; balls of half their least distance around them are disjoint, and
    their volumes bound it (Gelberg et al. 2024, arXiv 2408.05496, Theorem 3.1 and its proof):

    .. math:: \|g \cdot w - w\| \le 2\, \|w\| \,/\, (|G|^{1/D} - 1).
    """

    element: Element
    distance: float
    bound: float


@torch.no_grad()
def nearest_copy(weights: Weights, symmetry: Any) -> NearestCopy:
    """Find the closest other weights that a symmetry's permutations and signs lead to.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> nearest = ps.alignment.nearest_copy({"w": torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 1.0]])}, group)
    >>> nearest.element["unit"].tolist(), round(nearest.distance, 3)
    ([0, 2, 1], 4.243)

    An element that moves units moves two at least, each by no less than to its nearest neighbour (under a sign, where
    units have one): so the exchange of the closest pair, or the flip of the smallest unit, is closest. Exact for one
    set of units; of several the closest exchange or flip of single units.

    :param weights: one set of weights; running statistics don't count.
    """
    group, found = group_of(symmetry).finite.without_buffers(), []
    group.batch_shape(weights)
    given = {site: weights[site].double().cpu() for site in group.sites}
    for name, one in group.units.items():
        parts = [[torch.zeros(one.count, 1, dtype=torch.float64, device="cpu")] for _ in range(2)]
        for axis in group.axes(name):  # what a sign leaves, and what it turns
            view = group.view(axis.site, given[axis.site])
            parts["flip" in one.moves and bool(axis.exponent % 2)].append(rows(view, axis, view.dim()))
        even, odd = (torch.cat(part, 1) for part in parts)
        copy = torch.arange(one.count, device="cpu") // one.size
        apart = (copy != copy[:, None]) | torch.eye(one.count, dtype=torch.bool, device="cpu")
        steps = [([int(odd.norm(dim=1).argmin())], -1.0)] if "flip" in one.moves else []
        for sign in ((1.0, -1.0) if "flip" in one.moves else (1.0,)) if "permute" in one.moves and one.size > 1 else ():
            pairs = (even, even), (odd, sign * odd)
            squares = torch.stack(
                [torch.cdist(*own, compute_mode="donot_use_mm_for_euclid_dist") ** 2 for own in pairs]
            )
            at = int(squares.sum(0).masked_fill(apart, math.inf).argmin())
            steps.append(([at // one.count, at % one.count], sign))
        for units, sign in steps:
            images, signs = torch.arange(one.size, device="cpu").repeat(one.copies), torch.ones_like(even[:, 0])
            images[units], signs[units] = images[units[::-1]], sign
            element = Element(group, {name: images.reshape(one.shape)}, {name: signs.reshape(one.shape)})
            moved = element.on_sites(given)
            found.append((sum(float((moved[s] - v).square().sum()) for s, v in given.items()), element))
    square, element = min(found, key=lambda pair: pair[0])
    norm = math.sqrt(sum(float(value.square().sum()) for value in given.values()))
    root = group.log_order() / sum(value.numel() for value in given.values())
    return NearestCopy(element.within(group_of(symmetry)), math.sqrt(square), 2 * norm / math.expm1(root))
