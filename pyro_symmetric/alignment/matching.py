r"""Align one posterior, or one network, to another.

.. math:: \min_{g \in G} W_2^2(g_\# q_1, q_0) = \|m_0 - g \cdot m_1\|^2 + \|s_0 - |g| \cdot s_1\|^2

for mean-field Gaussians with means :math:`m` and standard deviations :math:`s` (Rossi
et al. 2023, arXiv 2310.10171, section 4); for plain networks, :math:`s = 0`, this is
weight matching (Ainsworth et al. 2023, arXiv 2209.04836). The group comes from
``find_symmetry`` or ``Group.declare``: permutations, nested or not, signs, positive
scales, of any architecture. (Shifts in front of a softmax stay.) With several coupled
layers the problem is NP-hard, and the result is the best of several local optima.

Where scales are a symmetry, weights may lie anywhere on their orbit. Before the match
the scales of a source are *evened*: moved to the point of the orbit whose weights are
nearest to one in size (:func:`~pyro_symmetric.canonical.scales.evened`), times the mean
scale of each layer of the reference. Afterwards the scales of all units are fitted at
once. With entries :math:`A_t` of the reference and :math:`B_t` of the source, which
units multiply by :math:`e^{a_t \cdot u}`, they minimise

.. math:: F(u) = \sum_t (A_t - e^{a_t \cdot u} B_t)^2 .

Scales of neighbouring layers are coupled: unit by unit they take hundreds of sweeps,
and L-BFGS fits them jointly. In front of batch normalisation only running statistics,
which don't enter :math:`F`, compensate for a scale, and units that match badly would
vanish. So each scale ends within a factor of four of the one that evens the unit as its
partner in the reference is.
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

# The default number of restarts, for sets of at most so many units. In a network with
# three hidden layers of 512 restarts lower the cost by a factor of 0.0007, in five
# times the time.
RESTARTS, NARROW = 3, 256
# The most rounds of fitting scales and matching again, and the relative gain that a
# further round needs.
REFITS, REFIT_GAIN = 10, 1e-4
# Steps of L-BFGS; then of Newton's method, while these are shorter than so much.
LBFGS_STEPS, NEWTON_STEPS, NEWTON_LENGTH = 200, 2, 1e-3
# The largest log-scale relative to that which evens a unit. Two scales multiply a
# running variance, squared: in 60 pairs of networks the smallest variance was 0.0003 of
# the reference's smallest.
BOUND = math.log(4)
# Seconds before a progress bar shows.
BAR_DELAY = 2.0


@dataclass(frozen=True)
class Alignment:
    """The result of :func:`align`.

    For a batch of sources, all numbers are tensors of the batch's shape, on the CPU.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> result = ps.align(
    ...     {"w": torch.tensor([3.0, 1.0, 2.0])},
    ...     {"w": torch.tensor([1.0, 2.0, 3.0])},
    ...     group,
    ... )
    >>> (
    ...     isinstance(result, ps.alignment.Alignment),
    ...     result.initial_cost,
    ...     result.cost,
    ...     result.converged,
    ... )
    (True, 6.0, 0.0, True)
    >>> result.element({"w": torch.tensor([3.0, 1.0, 2.0])})
    {'w': tensor([1., 2., 3.])}

    :param element: the element ``g`` for which ``g(source)`` is close to the reference;
        on the source's device.
    :param cost: the cost of ``g(source)``, over all sites that the group knows, moved
        or not.
    :param initial_cost: the cost of the source.
    :param converged: whether the best descent ended at a local optimum, not after a
        hundred sweeps.
    :param start_costs: the costs at the ends of all descents over permutations and
        signs: the forward start's, then those of the restarts.
    """

    element: Element
    cost: Any
    initial_cost: Any
    converged: Any
    start_costs: tuple[Any, ...]

    def __repr__(self) -> str:
        numbers = (self.initial_cost, self.cost, self.converged)
        before, after, share = (
            float(v.double().mean()) if isinstance(v, Tensor) else float(v)
            for v in numbers
        )
        ended = "converged" if share == 1 else f"{1 - share:.0%} cut short"
        return f"Alignment(cost {before:.6g} -> {after:.6g}, {len(self.start_costs)} descents, {ended}, {self.element})"


@torch.no_grad()
def align(
    source: Any,
    reference: Any,
    symmetry: Any,
    cost: str = "wasserstein",
    *,
    activations: Sequence[Any] | None = None,
    restarts: int | None = None,
    tolerance: float = 1e-7,
    progress: bool = True,
) -> Alignment:
    """Find the element of ``symmetry`` that brings ``source`` closest to ``reference``.

    >>> group = ps.Group.declare({"w": ("hidden", None)}, {"w": torch.zeros(3, 2)})
    >>> reference = {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])}
    >>> result = ps.align({"w": reference["w"][[2, 0, 1]]}, reference, group)
    >>> result.cost, result.element["hidden"].tolist()
    (0.0, [1, 2, 0])

    *Scales* are evened before the match, and fitted to the reference after it, within a
    factor of four of its sizes.

    :param source: weights (site -> tensor; with leading batch dimensions, several
        sources), a network, a ``Posterior`` of draws in one frame, ``GaussianWeights``,
        or a Gaussian guide, whose marginal moments count (see
        :func:`~pyro_symmetric.alignment.to_gaussian`).
    :param reference: likewise, without batch dimensions, on any device.
    :param symmetry: a network's or model's, or its group. Buffers (running statistics) and sites that it doesn't
        know don't count.
    :param cost: ``"wasserstein"`` (squared 2-Wasserstein distance of mean-field
        Gaussians), ``"l2"`` (squared distance of the means), or ``"gaussian"`` (minus
        the expected log-density under the reference's Gaussian).
    :param activations: ``(net, *inputs)``, to match by activations instead: the cost is
        minus the sum of correlations of hidden activations; signs and scales on which
        these don't depend are fitted to the weights.
    :param restarts: further descents, each from the best element so far with some units
        of one layer shuffled (drawn from PyTorch's generator), if layers are coupled.
        ``None``: three, or none with more than 256 units in a layer.
    :param tolerance: a step is accepted if it lowers the cost by more than this
        fraction of the initial cost.
    :param progress: whether to show a progress bar over the descents, after two
        seconds.
    :raises ValueError: naming the site, if source and reference don't fit each other or
        the group, or aren't finite.
    """
    arguments.one_of("cost", cost, COSTS)
    group = group_of(symmetry)
    narrow = (
        max((group[name].size for name in group.names("permute")), default=0) <= NARROW
    )
    restarts = (RESTARTS if narrow else 0) if restarts is None else restarts
    (first, _), (second, device) = (
        on_host(reference, "reference"),
        on_host(source, "source"),
    )
    require_fit(cost, group)
    if several := batch_shape_of(first, group, "reference"):
        raise ValueError(
            f"reference has batch shape {tuple(several)}; it must be one set of "
            "weights at a time; align_many brings a "
            "batch into one frame"
        )
    shape = batch_shape_of(second, group, "source")
    sites = compared_sites({"source": second, "reference": first}, group)
    target, given = moments_of([first, second], sites, group, COSTS[cost])
    shown = None
    if activations is not None:
        weights = {
            site: value.reshape(-1, *value.shape[len(shape) :])
            for site, value in second.loc.items()
        }
        shown = shown_by(activations, weights, first.loc, group)
    with tqdm(
        total=1 + restarts, desc="align", disable=not progress, delay=BAR_DELAY
    ) as bar:
        result = _matched(
            group, COSTS[cost], target, given, shown, restarts, tolerance, bar.update
        )
    element, *costs, ends = result
    unbatched: Any = lambda value: value.reshape(shape) if shape else value[0].item()  # noqa: E731
    total, initial, converged = map(unbatched, costs)
    return Alignment(
        reshape(element, shape).to(device),
        total,
        initial,
        converged,
        tuple(map(unbatched, ends)),
    )


def _matched(
    group: Group, cost: Cost, reference: Moments, given: Moments, shown: Shown | None, restarts: int, tolerance: float,
    tick: Any,
) -> tuple[Element, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Match sources; return elements, costs, initial costs, whether descents converged,
    and the costs at their ends.

    :param reference: site -> moments ``(channels, 1, *site_shape)``; ``given``:
        ``(channels, B, *site_shape)``.
    :param shown: features of activations, if these are matched where they tell.
    """
    (even_source, even_reference), remaining = (
        evening(group, given, reference),
        group.finite,
    )
    element = even_source

    def placed() -> Moments:
        return {site: act(element, site, value) for site, value in given.items()}

    def by_weights() -> Descent:
        features = {site: cost.of_source(value) for site, value in placed().items()}
        return Descent(remaining, cost, reference, features, tolerance)

    if shown is not None:
        descent = Descent(
            shown.group, CORRELATION, shown.reference, shown.source, tolerance
        )
        by_activations, ends = descent.search(restarts, tick)
        element, remaining = (
            by_activations.element.within(group) @ element,
            shown.remaining,
        )
        best, _ = by_weights().search(0)
    else:
        best, ends = by_weights().search(restarts, tick)
    element, total = best.element.within(group) @ element, best.cost
    for _ in range(REFITS if group.names("scale") else 0):
        even = (
            even_reference
            @ element.within(group.finite).within(group)
            @ even_source
            @ element.inverse()
        )
        element = fitted(group, reference, placed(), even) @ element
        refit = by_weights()
        total, optimum = refit.initial, refit.descend(refit.begin, refit.roots)
        if not bool((total - optimum.cost > REFIT_GAIN * total).any()):
            break
        element, total = optimum.element.within(group) @ element, optimum.cost
    if shown is not None:
        return (
            element,
            by_activations.cost,
            descent.initial,
            by_activations.converged,
            ends,
        )
    initial = cost.total(
        reference, {site: cost.of_source(value) for site, value in given.items()}
    )
    return element, total, initial, best.converged, ends


# scales -------------------------------------------------------------------------------


def evening(
    group: Group, source: Moments, reference: Moments | None = None
) -> tuple[Element, Element]:
    """Return the scales that even all sources, ``(B,)``, up to the mean of each layer
    of the reference; and those that give evened units the sizes of the reference's
    units.

    :param source: site -> moments ``(channels, B, *site_shape)``; ``reference``:
        likewise, by default all sources.
    """
    log_scales = _evened(group.scalings, source)
    of_reference = (
        log_scales if reference is None else _evened(group.scalings, reference)
    )
    common = torch.zeros_like(log_scales[:1])
    for slot in group.scalings.slots.values():
        common[:, slot] = of_reference[:, slot].mean()
    return _scales(group, log_scales - common), _scales(group, common - of_reference)


def fitted(group: Group, reference: Moments, source: Moments, even: Element) -> Element:
    """Fit the scales that minimise the squared distance from the reference; none raises
    it.

    :param even: the scales that give units the reference's sizes, which bound the fit.
    """
    scalings = group.scalings
    sites = [site for site in source if scalings.members(site)]
    batch = next((value.shape[1] for value in source.values()), 1)
    if not sites:
        return Element(group, batch_shape=(batch,), dtype=torch.float64)
    view = {
        s: [scalings.view(s, v.double()) for v in (reference[s], source[s])]
        for s in sites
    }
    squares = Mass(
        scalings, {site: second.square().sum(0) for site, (_, second) in view.items()}
    )
    products = Mass(
        scalings,
        {site: (first * second).sum(0) for site, (first, second) in view.items()},
    )
    up, down = Mass(
        scalings,
        {site: (one * other).abs().sum(0) for site, (one, other) in view.items()},
    ).sides()
    return _scales(
        group,
        _minimum(
            squares, products, even.within(scalings).numbers["scale"], up + down > 0
        ),
    )


def _evened(scalings: Group, moments: Moments) -> Tensor:
    """Return the log-scales of all units, ``(B, units)``, that even the weights; dead
    units stay.
    """
    sizes = {
        s: v.double().square().sum(0).sqrt()
        for s, v in moments.items()
        if scalings.members(s)
    }
    viewed = {site: scalings.view(site, value) for site, value in sizes.items()}
    if not viewed:
        return torch.zeros(1, scalings.size, device="cpu").double()
    down, up = Mass(
        scalings, {site: value.square() for site, value in viewed.items()}
    ).sides()
    return evened(scalings, viewed, down + up > 0)


def _scales(group: Group, u: Tensor) -> Element:
    return Element(
        group, log_scales=group.scalings.by_name(u, "scale"), batch_shape=(len(u),)
    )


def _minimum(squares: Mass, products: Mass, even: Tensor, free: Tensor) -> Tensor:
    """Minimise :math:`F`, without the norm of the reference, over log-scales, ``(B,
    units)``.

    :param even: the log-scales of the reference's sizes, which bound the result.
    :param free: units with entries that aren't zero in both; the others stay.
    """
    even = torch.where(free, even, 0.0)

    def distance(u: Tensor) -> Tensor:
        return squares(u) - 2 * products(u / 2)

    def bounded(u: Tensor) -> Tensor:
        return u.clamp(even - BOUND, even + BOUND)

    with torch.inference_mode(False), torch.enable_grad():
        up, down = squares.sides()
        # a diagonal preconditioner
        unit = torch.where(free, (up + down).clamp_min(1e-300).rsqrt(), 0.0)
        start = torch.where(even.abs() < BOUND, 0.0, even)
        position = torch.where(free, start / unit, 0.0).requires_grad_()
        optimiser = torch.optim.LBFGS(
            [position],
            max_iter=LBFGS_STEPS,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def total() -> Tensor:
            return distance(bounded(position * unit)).sum()

        def closure() -> Tensor:
            optimiser.zero_grad()
            (value := total()).backward()
            return value

        optimiser.step(closure)
        # a line search by values loses the last eight digits to rounding
        for _ in range(NEWTON_STEPS):
            (gradient,) = torch.autograd.grad(total(), position, create_graph=True)

            def hessian(p: Tensor, gradient: Tensor = gradient) -> Tensor:
                return torch.autograd.grad(gradient, position, p, retain_graph=True)[0]

            step = conjugate_gradients(
                hessian,
                -gradient.detach(),
                torch.ones_like(unit),
                torch.full_like(unit[:, :1], 1e-10),
            )
            short = (step * unit).abs().amax(1, keepdim=True) < NEWTON_LENGTH
            if not bool(short.any()):
                break
            position.data += torch.where(short, step, 0.0)
        u = bounded(position * unit).detach()
    rounding = 1e-13 * distance(torch.zeros_like(u)).abs()
    return torch.where(
        (distance(u) <= distance(torch.zeros_like(u)) + rounding).unsqueeze(-1), u, 0.0
    )


# the nearest copy ---------------------------------------------------------------------


class NearestCopy(NamedTuple):
    r"""The element that moves weights least, the distance, and its upper bound.

    All copies of ``D`` weights lie on one sphere, and balls of half their smallest
    distance around them are disjoint; volumes bound it (Gelberg et al. 2024, arXiv
    2408.05496, Theorem 3.1 and its proof):

    .. math:: \|g \cdot w - w\| \le 2\, \|w\| \,/\, (|G|^{1/D} - 1).
    """

    element: Element
    distance: float
    bound: float


@torch.no_grad()
def nearest_copy(weights: Weights, symmetry: Any) -> NearestCopy:
    """Find the nearest other weights on the orbit under permutations and signs.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> nearest = ps.alignment.nearest_copy(
    ...     {"w": torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 1.0]])}, group
    ... )
    >>> nearest.element["unit"].tolist(), round(nearest.distance, 3)
    ([0, 2, 1], 4.243)

    A permutation moves at least two units, each at least as far as to its nearest
    neighbour. So the exchange of the closest pair, up to a sign, or the flip of the
    smallest unit is nearest. Exact for one set of units; for several, the nearest
    exchange or flip of single units.

    :param weights: one set of weights; running statistics don't count.
    """
    group, candidates = group_of(symmetry).finite.without_buffers(), []
    group.batch_shape(weights)
    given = {site: weights[site].double().cpu() for site in group.sites}
    for name, one in group.units.items():
        parts = [
            [torch.zeros(one.count, 1, dtype=torch.float64, device="cpu")]
            for _ in range(2)
        ]
        # entries that a sign leaves, and those that it flips
        for axis in group.axes(name):
            view = group.view(axis.site, given[axis.site])
            parts["flip" in one.moves and bool(axis.exponent % 2)].append(
                rows(view, axis, view.dim())
            )
        even, odd = (torch.cat(part, 1) for part in parts)
        copy = torch.arange(one.count, device="cpu") // one.size
        apart = (copy != copy[:, None]) | torch.eye(
            one.count, dtype=torch.bool, device="cpu"
        )
        steps = [([int(odd.norm(dim=1).argmin())], -1.0)] if "flip" in one.moves else []
        for sign in (
            ((1.0, -1.0) if "flip" in one.moves else (1.0,))
            if "permute" in one.moves and one.size > 1
            else ()
        ):
            pairs = (even, even), (odd, sign * odd)
            squares = torch.stack(
                [
                    torch.cdist(*own, compute_mode="donot_use_mm_for_euclid_dist") ** 2
                    for own in pairs
                ]
            )
            nearest = int(squares.sum(0).masked_fill(apart, math.inf).argmin())
            steps.append(([nearest // one.count, nearest % one.count], sign))
        for units, sign in steps:
            images, signs = (
                torch.arange(one.size, device="cpu").repeat(one.copies),
                torch.ones_like(even[:, 0]),
            )
            images[units], signs[units] = images[units[::-1]], sign
            element = Element(
                group,
                {name: images.reshape(one.shape)},
                {name: signs.reshape(one.shape)},
            )
            moved = element.on_sites(given)
            candidates.append(
                (
                    sum(float((moved[s] - v).square().sum()) for s, v in given.items()),
                    element,
                )
            )
    square, element = min(candidates, key=lambda pair: pair[0])
    norm = math.sqrt(sum(float(value.square().sum()) for value in given.values()))
    root = group.log_order() / sum(value.numel() for value in given.values())
    return NearestCopy(
        element.within(group_of(symmetry)),
        math.sqrt(square),
        2 * norm / math.expm1(root),
    )
