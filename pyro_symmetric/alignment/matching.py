r"""Bring one posterior, or one network, as close as a symmetry allows to another.

.. math:: \min_{g \in G} W_2^2(g_\# q_1, q_0) = \|m_0 - g \cdot m_1\|^2 + \|s_0 - |g| \cdot s_1\|^2

for mean-field Gaussians with means :math:`m` and standard deviations :math:`s` (Rossi et al. 2023, arXiv 2310.10171,
section 4); for plain networks, :math:`s = 0`, it is weight matching (Ainsworth et al. 2023, arXiv 2209.04836). The
group is whatever ``find_symmetry`` or ``Group.declare`` gives: permutations (nested ones, too), signs, positive
scalings; no architecture is special. (Constants in front of a softmax stay.) Over several coupled layers the problem
is NP-hard: what comes back is a local optimum, the best of several starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.alignment.activations import Shown, shown_by
from pyro_symmetric.alignment.descent import Descent, acted, reshaped
from pyro_symmetric.alignment.features import (
    CORRELATION,
    COSTS,
    Cost,
    Moments,
    batch_shape_of,
    compared_sites,
    moments_of,
    require_fit,
)
from pyro_symmetric.alignment.gaussian import on_host
from pyro_symmetric.alignment.scales import evening, fitted
from pyro_symmetric.groups import Element, Group, group_of

# How many restarts by default, and up to how many units in a set. In a network with three hidden layers of 512 they
# lower the cost by 0.0007 of it, in five times the time.
RESTARTS, NARROW = 3, 256
# How often at most units are matched anew where scales are fitted, and the part of the cost that this must gain.
REFITS, REFITTED = 10, 1e-4
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

    *Scales* are evened before the match, and fitted to the reference after it.

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
    return Alignment(reshaped(element, shape).to(device), total, initial, converged, tuple(map(fit, ends)))


def _matched(
    group: Group, cost: Cost, reference: Moments, given: Moments, shown: Shown | None, restarts: int, tolerance: float,
    tick: Any,
) -> tuple[Element, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """The best element for each source, its cost, that of the source, whether it converged, and the ends of descents.

    :param reference: site -> moments ``(channels, 1, *site_shape)``; ``given``: ``(channels, B, *site_shape)``.
    :param shown: what units do, if that decides where it shows.
    """
    element, left = evening(group, given, reference), group.finite

    def placed() -> Moments:
        return {site: acted(element, site, value) for site, value in given.items()}

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
        element = fitted(group, reference, placed()) @ element
        again = by_weights()
        total, end = again.initial, again.descend(again.begin, again.roots)
        if not bool((total - end.cost > REFITTED * total).any()):
            break
        element, total = end.element.within(group) @ element, end.cost
    if shown is not None:
        return element, told.cost, descent.initial, told.converged, ends
    came = {site: cost.of_source(value) for site, value in given.items()}
    return element, total, cost.total(reference, came), best.converged, ends
