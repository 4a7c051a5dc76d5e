r"""Distance of two approximations in their predictions: total variation of the predictive distributions.

.. math:: \mathrm{TV}(p, q) = \max_A |p(A) - q(A)| = \frac12 \int |p(y) - q(y)| \, dy,

between 0 and 1, for each input. Between class probabilities it is half the sum of absolute differences; its mean over
test inputs is how Izmailov et al. (2021, arXiv 2104.14421) compare approximations with a long run of HMC. The same
distance serves regressions, whose predictive distributions are mixtures of Gaussians.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.chain_statistics import evenly_spaced
from pyro_symmetric.compare.diversity import members_of
from pyro_symmetric.compare.regression import gaussians
from pyro_symmetric.compare.results import DistanceResult

Prediction = Tensor | tuple[Tensor, Tensor | float]

_EDGES = 512  # of each predictive's own bins
_PLACING = 64  # members by which the bins are placed
_LEVELS = 32  # quantiles of each that are used for that, at least
_CHUNK_ENTRIES = 2**18  # a processor's cache holds them


@torch.no_grad()
def total_variation(p: Prediction, q: Prediction) -> DistanceResult:
    r"""Total variation of two predictive distributions: ``mean`` and ``maximum`` over inputs, and of each input.

    >>> round(ps.total_variation(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]])).value, 3)
    0.3

    A predictive distribution is the mean of its members'. Mixtures of Gaussians are compared as what falls into bins,

    .. math:: \frac12 \sum_b |P(b) - Q(b)| \le \mathrm{TV}(p, q),

    by their exact distribution functions. A bin holds about 1/512 of each at most, and only bins in which the densities
    cross lose anything: the bound is short by two thousandths at most, by about 1e-6 between two Gaussians one
    deviation apart. With several outputs the marginals are compared and averaged.

    It takes no ``symmetry=``, as distances between weights do: symmetries move weights and leave predictions as they
    are, so that there is nothing to remove.

    :param p: class probabilities, ``(members, inputs, classes)`` or ``(inputs, classes)``; or for a regression the pair
        ``(means, noise_scale)`` as :func:`~pyro_symmetric.compare.scores.regression` takes them, means ``(members,
        inputs)`` or ``(members, inputs, outputs)``.
    :param q: the other, for the same inputs; members may differ in number.
    :return: a result whose array ``distance`` is that of each input.
    :raises ValueError: if shapes don't fit, or values aren't probabilities, finite or positive.
    """
    if isinstance(p, tuple) != isinstance(q, tuple):
        raise TypeError("p and q must be of one kind: class probabilities both, or pairs (means, noise_scale) both")
    if isinstance(p, tuple) and isinstance(q, tuple):
        by_input = _between_mixtures(_mixture(p, "p"), _mixture(q, "q"))
        members = len(p[0]), len(q[0])
    else:
        sides = [members_of(side, name) for name, side in (("p", p), ("q", q))]
        first, second = (side.mean(0, dtype=torch.float64) for side in sides)
        _require_alike(first, second)
        by_input = (first - second).abs().sum(-1) / 2
        members = len(sides[0]), len(sides[1])
    values = by_input.cpu().numpy()
    return DistanceResult(
        title="Total variation of predictions",
        num_samples=members,
        labels={"input": [str(row) for row in range(len(values))]},
        arrays={"distance": (("input",), values)},
        totals={"mean": float(values.mean()), "maximum": float(values.max())},
    )


# small steps --------------------------------------------------------------------------------------------------------


def _between_mixtures(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    _require_alike(first[0][0], second[0][0])
    edges = torch.cat([_quantiles(*first), _quantiles(*second)]).sort(0).values
    difference = _masses(*first, edges) - _masses(*second, edges)
    return (difference.abs().sum(0) / 2).reshape(len(difference[0]), -1).mean(-1)


def _mixture(prediction: tuple[Tensor, Tensor | float], name: str) -> tuple[Tensor, Tensor]:
    """Means and scales ``(S, N, ...)``, checked."""
    if len(prediction) != 2:
        raise ValueError(f"{name} is a tuple of {len(prediction)}; it must be a pair (means, noise_scale)")
    means, scale = prediction
    arguments.tensor(name, means)
    if means.dim() not in (2, 3) or 0 in means.shape:
        raise ValueError(
            f"the means of {name} have shape {tuple(means.shape)}; it must be (members, inputs) or (members, inputs, "
            "outputs)"
        )
    means, scale, _ = gaussians(means, scale, means[0])
    return means, scale


def _require_alike(first: Tensor, second: Tensor) -> None:
    if first.shape != second.shape:
        raise ValueError(
            f"p predicts {tuple(first.shape)} and q {tuple(second.shape)}; both must be of the same inputs, and of the "
            "same classes or outputs"
        )


def _quantiles(means: Tensor, scale: Tensor) -> Tensor:
    """Places that cut a mixture into about equal parts, ``(_EDGES, N, ...)``, by some of its members' quantiles."""
    chosen = evenly_spaced(len(means), _PLACING)
    levels = max(_LEVELS, -(-_EDGES // len(chosen)))
    at = torch.special.ndtri((torch.arange(levels, dtype=means.dtype, device=means.device) + 0.5) / levels)
    spread = at.reshape(-1, *[1] * means.dim())
    pool = (means[chosen] + scale[chosen] * spread).flatten(0, 1).sort(0).values
    return pool[evenly_spaced(len(pool), _EDGES)]


def _masses(means: Tensor, scale: Tensor, edges: Tensor) -> Tensor:
    """A mixture's mass between edges ``(E, N, ...)``, before the first and after the last: ``(E + 1, N, ...)``."""
    chunk = max(1, _CHUNK_ENTRIES // means.numel())
    slope = 0.5**0.5 / scale
    signs = torch.cat([torch.erf((part[:, None] - means) * slope).mean(1) for part in edges.split(chunk)])
    below = (1 + signs) / 2
    return torch.diff(below, dim=0, prepend=torch.zeros_like(below[:1]), append=torch.ones_like(below[:1]))
