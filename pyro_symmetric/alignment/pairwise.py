r"""Align one posterior, or one network, to another.

.. math:: \min_{g \in G} W_2^2(g_\# q_1, q_0)
   = \|m_0 - g \cdot m_1\|^2 + \|s_0 - |g| \cdot s_1\|^2

for mean-field Gaussians with means :math:`m` and standard deviations :math:`s` (Rossi
et al. 2023, arXiv 2310.10171, section 4); for plain networks, :math:`s = 0`, this is
weight matching (Ainsworth et al. 2023, arXiv 2209.04836). The group comes from
``find_symmetry`` or ``Group.declare``: permutations, nested or not, signs, positive
scales, of any architecture. (Shifts in front of a softmax stay.) With several coupled
layers the problem is NP-hard, and the result is the best of several local optima.

Where scales are a symmetry, they are evened before the match, and fitted to the
reference after it (:mod:`~pyro_symmetric.alignment.scale_fit`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments, plots
from pyro_symmetric.alignment.descent import (
    MOST_ENTRIES,
    Descent,
    Optimum,
    Search,
    best_of_all,
    search,
)
from pyro_symmetric.alignment.elements import act, reshape
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
    require_rotatable,
    shown_by,
)
from pyro_symmetric.alignment.scale_fit import Evening, evening, fitted
from pyro_symmetric.arguments import as_tensor
from pyro_symmetric.groups import Element, Group, group_of
from pyro_symmetric.posterior.tables import html_table
from pyro_symmetric.weights import Weights, map_values

# The most rounds of fitting scales and matching again, and the relative gain that a
# further round needs.
REFITS = 10
REFIT_GAIN = 1e-4
# Seconds before a progress bar shows.
BAR_DELAY = 2.0


@dataclass(frozen=True)
class Alignment:
    """The result of :func:`align`.

    For a batch of sources, all numbers are tensors of the batch's shape, on the CPU.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> source = {"w": torch.tensor([3.0, 1.0, 2.0])}
    >>> result = ps.align(source, {"w": torch.tensor([1.0, 2.0, 3.0])}, group)
    >>> isinstance(result, ps.alignment.Alignment), result.converged
    (True, True)
    >>> result.initial_cost, result.cost
    (6.0, 0.0)
    >>> result.element(source)
    {'w': tensor([1., 2., 3.])}

    :param element: the element ``g`` for which ``g(source)`` is close to the reference;
        on the source's device.
    :param cost: the cost of ``g(source)``, over all sites that the group knows, moved
        or not.
    :param initial_cost: the cost of the source.
    :param converged: whether no better element is known to be likely, over permutations
        and signs: all were tried, or two chains of restarts ended at the same least
        cost, or that is zero. ``False`` without restarts, unless the group is small or
        its units aren't coupled.
    :param start_costs: the costs at the ends of all descents over permutations and
        signs: the forward start's, then those of the restarts. One, if all elements
        were tried.
    :param exact: whether no element costs less: all were tried, and the group has no
        scales.
    """

    element: Element
    cost: Any
    initial_cost: Any
    converged: Any
    start_costs: tuple[Any, ...]
    exact: bool = False

    def __bool__(self) -> bool:
        """Return whether the alignment of every source has converged."""
        return bool(as_tensor(self.converged).all())

    def plot(self, ax: Any = None) -> Any:
        """Plot where each unit comes from, by the sets of units; return the axes."""
        sources = {}
        for name in self.element.permutations:
            images = self.element.images(name).reshape(-1, self.element[name].shape[-1])
            sources[name] = (range(images.shape[-1]), images[0])
        before = _mean(self.initial_cost)
        after = _mean(self.cost)
        xlabel = "unit of the reference"
        ylabel = "unit of the source"
        ax = plots.curves(ax, sources, xlabel, ylabel, marker="o", ls="none")
        ax.set_title(f"cost {before:.4g} to {after:.4g}")
        return ax

    def _repr_html_(self) -> str:
        costs = (f"{_mean(cost):.6g}" for cost in (self.initial_cost, self.cost))
        rows = [("", "source", "aligned"), ("cost", *costs)]
        return html_table("Alignment", rows, [self._tried(), repr(self.element)])

    def __repr__(self) -> str:
        before = _mean(self.initial_cost)
        after = _mean(self.cost)
        attempts = self._tried()
        return (
            f"Alignment(cost {before:.6g} -> {after:.6g}, {attempts}, {self.element})"
        )

    def _tried(self) -> str:
        share = _mean(self.converged)
        ended = "converged" if share == 1 else f"{1 - share:.0%} not converged"
        descents = len(self.start_costs)
        return "all elements tried" if self.exact else f"{descents} descents, {ended}"


def _mean(number: Any) -> float:
    return float(number.double().mean() if isinstance(number, Tensor) else number)


@torch.no_grad()
def align(
    source: Any,
    reference: Any,
    symmetry: Any = None,
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
    :param symmetry: a network's or model's, or its group. Buffers (running statistics)
        and sites that it doesn't know don't count.
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
    first, _ = on_host(reference, "reference")
    second, device = on_host(source, "source")
    require_fit(cost, group)
    if several := batch_shape_of(first, group, "reference"):
        raise ValueError(
            f"reference has batch shape {tuple(several)}; it must be one set of "
            "weights at a time; align_many brings a batch into one frame"
        )
    shape = batch_shape_of(second, group, "source")
    sites = compared_sites({"source": second, "reference": first}, group)
    reference, source = moments_of([first, second], sites, group, COSTS[cost])
    require_rotatable([first, second] if COSTS[cost].deviations else [], group)
    problem = _Problem(group, COSTS[cost], reference, source, tolerance)
    with tqdm(desc="align", unit="start", disable=not progress, delay=BAR_DELAY) as bar:
        if activations is None:
            match = problem.by_weights(restarts, bar.update)
        else:
            weights = _one_batch_dimension(second.loc, len(shape))
            shown = shown_by(activations, weights, first.loc, group)
            match = problem.by_activations(shown, restarts, bar.update)

    def unbatched(value: Tensor) -> Any:
        return value.reshape(shape) if shape else value[0].item()

    search_result = match.search
    return Alignment(
        element=reshape(match.element, shape).to(device),
        cost=unbatched(match.cost),
        initial_cost=unbatched(match.initial_cost),
        converged=unbatched(search_result.best.converged & search_result.checked),
        start_costs=tuple(unbatched(end) for end in search_result.end_costs),
        exact=search_result.exact
        and (activations is not None or not group.names("scale")),
    )


def _one_batch_dimension(weights: Weights, batch_dims: int) -> Weights:
    flat = {}
    for site, value in weights.items():
        flat[site] = value.reshape(-1, *value.shape[batch_dims:])
    return flat


class _Match(NamedTuple):
    """An alignment whose tensors have the batch shape ``(B,)``."""

    element: Element
    cost: Tensor
    initial_cost: Tensor
    search: Search


@dataclass(frozen=True)
class _Problem:
    """Sources to be matched to a reference.

    :param reference: site -> moments, ``(channels, 1, *site_shape)``.
    :param source: site -> moments, ``(channels, B, *site_shape)``.
    """

    group: Group
    cost: Cost
    reference: Moments
    source: Moments
    tolerance: float

    def by_weights(self, restarts: int | None, tick: Callable[[int], object]) -> _Match:
        """Match evened weights, then fit scales."""
        scales = evening(self.group, self.source, self.reference)
        descent = self._descent(scales.of_source, self.group.compact)
        result = search(descent, restarts, tick)
        element = self._joined(result.best, scales.of_source)
        fit = self._refitted(element, result.best.cost, scales, self.group.compact)
        unmoved = _features(self.cost, self.source)
        initial = self.cost.total(self.reference, unmoved)
        return _Match(fit.element, fit.cost, initial, result)

    def by_activations(
        self, shown: Shown, restarts: int | None, tick: Callable[[int], object]
    ) -> _Match:
        """Match activations, then what they don't show by weights."""
        scales = evening(self.group, self.source, self.reference)
        descent = Descent(
            shown.group, CORRELATION, shown.reference, shown.source, self.tolerance
        )
        result = search(descent, restarts, tick)
        element = self._joined(result.best, scales.of_source)
        by_weights = search(self._descent(element, shown.remaining), 0).best
        element = self._joined(by_weights, element)
        fit = self._refitted(element, by_weights.cost, scales, shown.remaining)
        return _Match(fit.element, result.best.cost, descent.initial, result)

    def _refitted(
        self, element: Element, cost: Tensor, scales: Evening, remaining: Group
    ) -> _Fit:
        """Fit scales and match again in turn, while that lowers the cost.

        :param remaining: the moves but scales that may still change.
        """
        if not self.group.names("scale"):
            return _Fit(element, cost)
        for _ in range(REFITS):
            moved = element.within(self.group.compact).within(self.group)
            even = scales.to_reference @ moved @ scales.of_source @ element.inverse()
            source = _acted(element, self.source)
            element = fitted(self.group, self.reference, source, even) @ element
            descent = self._descent(element, remaining)
            cost = descent.initial
            optimum = best_of_all(descent, MOST_ENTRIES)
            if optimum is None:
                optimum = descent.descend(descent.begin, descent.roots)
            if not (cost - optimum.cost > REFIT_GAIN * cost).any():
                break
            element = self._joined(optimum, element)
            cost = optimum.cost
        return _Fit(element, cost)

    def _descent(self, element: Element, remaining: Group) -> Descent:
        """Return a descent that starts from the sources moved by an element."""
        features = _features(self.cost, _acted(element, self.source))
        return Descent(remaining, self.cost, self.reference, features, self.tolerance)

    def _joined(self, optimum: Optimum, element: Element) -> Element:
        return optimum.element.within(self.group) @ element


class _Fit(NamedTuple):
    """Elements with fitted scales, and their costs."""

    element: Element
    cost: Tensor


def _acted(element: Element, moments: Moments) -> Moments:
    return {site: act(element, site, value) for site, value in moments.items()}


def _features(cost: Cost, moments: Moments) -> Moments:
    return map_values(cost.of_source, moments)
