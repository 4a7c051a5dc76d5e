r"""Distance of two approximations in their predictions: total variation of the predictive distributions.

.. math:: \mathrm{TV}(p, q) = \max_A |p(A) - q(A)| = \frac12 \int |p(y) - q(y)| \, dy,

between 0 and 1, for each input. Between class probabilities it is half the sum of absolute differences; its mean over
test inputs is how Izmailov et al. (2021, arXiv 2104.14421) compare approximations with a long run of HMC. The same
distance serves regressions, whose predictive distributions are mixtures of Gaussians.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_symmetric.compare.diversity import members_of
from pyro_symmetric.compare.results import DistanceResult
from pyro_symmetric.compare.scores import gaussians
from pyro_symmetric.posterior.statistics import evenly_spaced

Prediction = Tensor | tuple[Tensor, Tensor | float]

BINS = 2048  # that each of two mixtures is cut into
GOLDEN = (5**0.5 - 1) / 2
_POOL_ENTRIES = 2**24  # places of bins of some inputs that may be held at once
_CHUNK_ENTRIES = 2**18  # a processor's cache holds them


@torch.no_grad()
def total_variation(p: Prediction, q: Prediction) -> DistanceResult:
    r"""Total variation of two predictive distributions: ``mean`` and ``maximum`` over inputs; ``each`` input's.

    >>> round(ps.total_variation(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]])).value, 3)
    0.3

    A predictive distribution is the mean of its members'. Mixtures of Gaussians are compared as what falls into bins,

    .. math:: \frac12 \sum_b |P(b) - Q(b)| \le \mathrm{TV}(p, q),

    by their exact distribution functions. A bin holds about 1/2048 of each at most, and only bins in which the
    densities cross lose anything: about 1e-7 between two Gaussians one deviation apart. Predictives of many members
    with so little noise that they hardly overlap cross in most of them, and lie farther apart than is told. With
    several outputs the marginals are compared and averaged.

    :param p: class probabilities, ``(members, inputs, classes)`` or ``(inputs, classes)``; or for a regression the pair
        ``(means, noise_scale)`` as :func:`~pyro_symmetric.compare.scores.regression` takes them, means ``(members,
        inputs, outputs)`` or ``(inputs, outputs)``.
    :param q: the other, for the same inputs; members may differ in number.
    :raises ValueError: if shapes don't fit, or values aren't probabilities, finite or positive.
    """
    if isinstance(p, tuple) != isinstance(q, tuple):
        raise TypeError("p and q must be of one kind: class probabilities both, or pairs (means, noise_scale) both")
    sides = [
        gaussians(*side, name=f"the means of {name}") if isinstance(side, tuple) else (members_of(side, name),)
        for name, side in (("p", p), ("q", q))
    ]
    shapes = [tuple(side[0].shape[1:]) for side in sides]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"p predicts {shapes[0]} and q {shapes[1]}; both must be of the same inputs, and of the same classes or "
            "outputs"
        )
    if isinstance(p, tuple):
        by_input = _between_mixtures(*sides)
    else:
        first, second = (side[0].mean(0, dtype=torch.float64) for side in sides)
        by_input = (first - second).abs().sum(-1) / 2
    return DistanceResult(
        title="Total variation of predictions",
        num_samples=tuple(len(side[0]) for side in sides),
        totals={"mean": float(by_input.mean()), "maximum": float(by_input.max())},
        each=by_input.cpu(),
    )


def _between_mixtures(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> Tensor:
    """The distance at each input, of pairs of means and scales ``(S, N, D)``; some inputs at a time."""
    members = max(len(first[0]), len(second[0]))
    some = max(1, _POOL_ENTRIES // ((members + BINS) * max(1, first[0][0, 0].numel())))
    found = []
    for m, s, n, t in zip(*(value.split(some, 1) for side in (first, second) for value in side), strict=True):
        edges = torch.cat([_quantiles(m, s), _quantiles(n, t)]).sort(0).values
        found.append((_masses(m, s, edges) - _masses(n, t, edges)).abs().sum(0) / 2)
    return torch.cat(found).mean(-1)


def _quantiles(means: Tensor, scale: Tensor) -> Tensor:
    """Places that cut a mixture into about equal parts, ``(bins, N, ...)``: of its members' quantiles, all sorted. Each
    member has levels of its own, so that members that are alike have different ones."""
    levels = -(-BINS // len(means))
    own = (torch.arange(len(means), dtype=means.dtype, device=means.device) + 0.5) * GOLDEN % 1
    at = torch.special.ndtri((torch.arange(levels, device=means.device)[:, None] + own) / levels)
    every = (means + scale * at.reshape(*at.shape, *[1] * (means.dim() - 1))).flatten(0, 1).sort(0).values
    return every[evenly_spaced(len(every), BINS).to(every.device)]


def _masses(means: Tensor, scale: Tensor, edges: Tensor) -> Tensor:
    """A mixture's mass between edges ``(E, N, ...)``, before the first and after the last: ``(E + 1, N, ...)``."""
    chunk = max(1, _CHUNK_ENTRIES // means.numel())
    slope = 0.5**0.5 / scale
    signs = torch.cat([torch.erf((part[:, None] - means) * slope).mean(1) for part in edges.split(chunk)])
    below = (1 + signs) / 2
    return torch.diff(below, dim=0, prepend=torch.zeros_like(below[:1]), append=torch.ones_like(below[:1]))
