r"""Maximum mean discrepancy modulo symmetry, with no canonical form.

For a finite group :math:`G` that acts by orthonormal maps, a kernel that looks at distances only, averaged over the
orbit,

.. math:: \bar k(x, y) = E_{g \sim U(G)}\, k(x, g \cdot y),

is a kernel on orbits (Haasdonk & Burkhardt 2007, "transformation integration"; Raj et al. 2017), and its discrepancy
is that of the symmetrised distributions: :math:`\mathrm{MMD}_{\bar k}(p, q) = \mathrm{MMD}_k(\bar p, \bar q)` with
:math:`\bar p = E_g\, g \# p`. It compares posteriors modulo symmetry if canonical forms are in doubt: a canonical
form cuts orbits open, and near the cut it tears apart what lies close together.

Nothing is enumerated. With :math:`g_i, h_j` independent and uniform, :math:`k(g_i x_i, h_j y_j)` has the mean
:math:`\bar k(x_i, y_j)`, so the ordinary unbiased estimate for samples that were each moved by their own random element
is unbiased for the averaged kernel, whatever the group's size. It is averaged over ``num_elements`` draws of all
elements.

*What it can't do.* The larger the group, the more alike :math:`\bar k` finds all pairs: of the :math:`|G|` terms few
are large. Two posteriors that differ in detail are told apart better by :func:`~pyro_symmetric.compare.mmd` with
``symmetry=``, which compares one representative each. The two answer different questions, and a small value of this one
is a statement about symmetrised posteriors only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare._pairs import Pairs, unbiased
from pyro_symmetric.compare.frames import canonical_frame
from pyro_symmetric.compare.layers import Layers, PairedSamples, Samples, require_site_shapes, samples_of
from pyro_symmetric.compare.mmd import bandwidth_grid, kernels_of, over_kernels
from pyro_symmetric.compare.results import DistanceResult
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of


@torch.no_grad()
def orbit_mmd(
    weights_p: Samples,
    weights_q: Samples,
    symmetry: Symmetry | Group,
    *,
    num_elements: int = 8,
    layers: Layers | None = None,
    bandwidths: DistanceResult | None = None,
) -> DistanceResult:
    """Squared discrepancy modulo symmetry under orbit-averaged kernels, unbiased, per layer and over twenty kernels.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> p = {"w": torch.randn(100, 3, 2) + torch.tensor([[5.0], [0.0], [-5.0]])}  # in one copy
    >>> q = {"w": torch.randn(100, 3, 2) + torch.tensor([[-5.0], [0.0], [5.0]])}  # in another
    >>> result = ps.orbit_mmd(p, q, group)
    >>> abs(result["mean"]) < 0.05 < ps.mmd(p, q)["mean"]
    True

    The result is that of :func:`~pyro_symmetric.compare.mmd`, and two errors of each layer and kernel:

    * ``element_error``: the standard error *given the samples*, from the spread over draws of group elements; it falls
      as ``num_elements ** -0.5``.
    * ``standard_error``: one that counts the samples too (jackknife over samples, each with its elements). If ``p =
      q``, the estimate's law is not normal and this is a rough guide only.

    Permutations and signs are averaged over. Scalings and shifts, over which there is no uniform average, are removed
    first: least norm, biases before a softmax of mean zero. Time and memory are those of
    :func:`~pyro_symmetric.compare.mmd`, the time ``num_elements`` times, and one moved layer of all samples besides.

    :param weights_p: site -> samples ``(m,) + site_shape``; or a ``Posterior``, chains end to end.
    :param weights_q: the same sites, ``n`` samples.
    :param symmetry: the group, or a network's symmetry.
    :param num_elements: random elements drawn for every sample, at least 2.
    :param layers: layer -> its sites. Default: sites whose names agree up to the last dot form a layer,
        running statistics left out.
    :param bandwidths: an earlier result whose kernels are used again; exactly unbiased then. Default: a grid chosen by
        the distances between p and q under a draw of elements of its own.
    :raises ValueError: if the sites or shapes don't fit, a side has fewer than three samples, a weight isn't finite, or
        ``num_elements`` is under 2.
    """
    arguments.whole("num_elements", num_elements, 2)
    whole = group_of(symmetry, "symmetry")
    if whole.names("scale") or whole.names("shift"):
        weights_p, weights_q = (
            canonical_frame(weights, whole, permutations=None, signs=False)
            for weights in (samples_of(weights_p), samples_of(weights_q))
        )
    group = whole.finite
    samples = PairedSamples(weights_p, weights_q, layers, minimum=3)
    for name, weights in zip(("weights_p", "weights_q"), samples.weights, strict=True):
        require_site_shapes(weights, symmetry, name)
    kernels = kernels_of(bandwidths, samples.layers)
    m, n = samples.num_samples
    pairs = Pairs(m, n)
    values, chosen, element_errors, standard_errors = {}, {}, [], []
    for layer in samples.layers:
        grids = kernels.get(layer) or [
            bandwidth_grid(pairs.cross(distances)) for distances in _moved_distances(samples, pairs, layer, group)
        ]
        # sums over pairs within p, within q and across, of every sample, for every draw of elements and kernel
        draws = torch.stack([_sums(samples, pairs, layer, group, grids) for _ in range(num_elements)]).cpu()
        sums = torch.cat([draws[..., :m, :], draws[..., m:, :].flip(-1)], -2).mT  # with its own side, with the other
        estimates = unbiased(*_totals(sums, m), m, n)
        values[layer], chosen[layer] = estimates.mean(0), torch.cat([grid.cpu() for grid in grids])
        element_errors.append(estimates.std(0) / math.sqrt(num_elements))
        standard_errors.append(_jackknife(sums.mean(0), m, n))
    errors = {"element_error": torch.stack(element_errors), "standard_error": torch.stack(standard_errors)}
    title = f"Squared MMD modulo symmetry ({num_elements} elements of each sample)"
    return over_kernels(title, samples, values, chosen, errors, {"num_elements": num_elements})


# small steps --------------------------------------------------------------------------------------------------------


def _moved_distances(samples: PairedSamples, pairs: Pairs, layer: str, group: Group) -> Iterator[Tensor]:
    """Euclid's, then city-block distances of all pairs, each sample moved by a random element of its own."""

    (p, q), (m, n) = samples.weights, samples.num_samples
    elements = group.sample((m + n,), device=p[samples.layers[layer][0]].device)

    def moved(weights: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor]:
        return elements.select(rows).on_sites(
            {site: weights[site].detach().reshape(-1, *samples.shapes[site]) for site in samples.layers[layer]}
        )

    both = PairedSamples(moved(p, slice(m)), moved(q, slice(m, None)), {layer: samples.layers[layer]})
    for norm in (2, 1):
        yield pairs.distances(both, layer, norm)


def _sums(samples: PairedSamples, pairs: Pairs, layer: str, group: Group, grids: Sequence[Tensor]) -> Tensor:
    """For one draw of elements and every kernel, sums over the pairs of each sample: with a sample of p, with one of q;
    ``(kernels, m + n, 2)``."""
    distances = _moved_distances(samples, pairs, layer, group)
    parts = [
        pairs.sums(values, grid.to(values.device), norm)
        for values, grid, norm in zip(distances, grids, (2, 1), strict=True)
    ]
    return torch.cat(parts)


def _totals(sums: Tensor, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums over ordered pairs within p, within q, and across."""
    own, other = sums.unbind(-2)
    return own[..., :m].sum(-1), own[..., m:].sum(-1), other[..., :m].sum(-1)


def _jackknife(sums: Tensor, m: int, n: int) -> Tensor:
    """Standard error ``(kernels,)`` of a statistic of two samples: each sample is left out once."""
    within_p, within_q, across = (total[:, None] for total in _totals(sums, m))
    own, other = sums.unbind(-2)
    without_p = unbiased(within_p - 2 * own[:, :m], within_q, across - other[:, :m], m - 1, n)
    without_q = unbiased(within_p, within_q - 2 * own[:, m:], across - other[:, m:], m, n - 1)
    parts = (values.var(-1, correction=0) * (values.shape[-1] - 1) for values in (without_p, without_q))
    return sum(parts, torch.zeros((), device="cpu")).sqrt()
