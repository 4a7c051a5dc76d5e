r"""The minimum scaled representation: of all positive rescalings of a network, the one with the least squared weights.

For a multilayer perceptron with squared weights :math:`M_l` and log-scales :math:`u_l` of its hidden units it minimises

.. math:: \sum_l \sum_{ij} M_l[i, j] \exp(2 u_l[i] - 2 u_{l-1}[j]),

and likewise, with the exponents of the axes along which units lie, for any network. The
problem is convex, and strictly so in the scales of all units that lie on a path of nonzero weights from what isn't
rescaled (inputs) to what isn't rescaled (outputs): then the minimum is unique, and every point of an orbit leads to it.

Source: Laurent, Aldea & Franchi 2024, arXiv 2310.08287, section 3.3 and appendix (minimum scaled network mass).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.canonical.removal import as_it_came, weights_of
from pyro_symmetric.canonical.scales import Mass
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import acted_shape
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import require_finite, require_sites

CHUNK_ENTRIES = 2**26


class MinimalMass(NamedTuple):
    """The minimum scaled representation of a batch of weights.

    :ivar mass: float64 ``batch_shape``, the minimum: the squared L2 norm of ``weights``, biases and whatever a pinned
        unit multiplies left out; ``given``: the same before.
    :ivar log_scales: name -> float64 ``batch_shape + units.shape``, the logarithm of what each unit was multiplied by.
    :ivar weights: the rescaled weights, all sites, in the dtype they came in; a new network or posterior, if one was
        given.
    :ivar pinned: name -> bool ``batch_shape + units.shape``, units whose best scale isn't finite: they stay.
    :ivar imbalance: float64 ``batch_shape``: at a minimum the squared weights that enter a unit equal those that leave
        it; the largest difference that is left, relative to their sum.
    """

    mass: Tensor
    given: Tensor
    log_scales: dict[str, Tensor]
    weights: Any
    pinned: dict[str, Tensor]
    imbalance: Tensor


@torch.no_grad()
def minimal_mass(
    weights: Mapping[str, Tensor] | Posterior | nn.Module, symmetry: Any, sites: Iterable[str] | None = None
) -> MinimalMass:
    """Minimise the squared L2 norm of weights, biases left out, over all positive scalings; the function stays.

    The weights of normalisations count, as in the paper. No gradients flow through it.

    *Pinned units* have no best scale: the mass falls for ever as they grow or shrink. Their incoming or outgoing
    weights are all zero, or their output is free of scale (before batch normalisation), or they trade scale with a
    bias, or feed only such units, or are fed by them. They stay, and the weights that they multiply, which the infimum
    sends to zero, are left out of the mass, so that the answer is the same for every point of the orbit.

    >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> symmetry = ps.find_symmetry(net, torch.randn(3, 1))
    >>> result = ps.minimal_mass({"0.weight": torch.tensor([[4.0]]), "2.weight": torch.tensor([[1.0]])}, symmetry)
    >>> round(float(result.mass), 3), {name: round(float(w), 3) for name, w in result.weights.items()}
    (8.0, {'0.weight': 2.0, '2.weight': 2.0})

    :param weights: site -> tensor ``batch_shape + site_shape``; each sample has a minimum of its own, found in float64.
        Or a ``Posterior``, whose draws count chain after chain; or a network.
    :param symmetry: a symmetry or a group; its scalings count. Without any (tanh, say) the weights stay.
    :param sites: the sites whose squared norm is the mass; by default all weights, see
        :attr:`~pyro_symmetric.groups.group.Group.weight_sites`.
    :raises ValueError: if weights (running statistics that scales move, too) are missing, misshaped, NaN or infinite,
        or another network's; if ``sites`` are unknown.
    """
    whole = group_of(symmetry)
    group = whole.scalings
    given, weights = weights, weights_of(weights, whole)
    require_finite(weights)
    shape = acted_shape(group, weights)
    counted = [site for site in whole.weight_sites if site in weights]
    if sites is not None:
        counted = arguments.listed("sites", sites, str, "sites")
        require_sites({site: value for site, value in weights.items() if site in whole.site_shapes}, counted)
    flat = {site: weights[site].reshape(shape.numel(), *group.view_shapes[site]) for site in counted}
    size = max(1, CHUNK_ENTRIES // max(1, sum(math.prod(value.shape[1:]) for value in flat.values())))
    parts = [
        _minimum({site: value[i : i + size] for site, value in flat.items()}, group)
        for i in range(0, max(shape.numel(), 1), size)
    ]
    mass, before, u, pinned, imbalance = (torch.cat(part) for part in zip(*parts, strict=True))
    if bool((imbalance > 1e-8).any()):
        warnings.warn(
            f"minimal_mass stopped with a relative imbalance of {float(imbalance.max()):.1e}; the mass is close to its "
            "minimum, the scales of weakly connected units may be off",
            stacklevel=3,  # past no_grad
        )
    log_scales, held = (group.by_name(value.reshape(*shape, group.size), "scale") for value in (u, pinned))
    scaled = group.element(log_scales=log_scales).expand(shape)(weights)
    mass, before, imbalance = (value.reshape(shape) for value in (mass, before, imbalance))
    return MinimalMass(mass, before, log_scales, as_it_came(given, scaled), held, imbalance)


def _minimum(weights: Mapping[str, Tensor], group: Group) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mass, mass before, log-scales, pinned units and imbalance of ``(samples, ...)`` weights (of the view)."""
    whole = Mass(group, {site: value.double().square() for site, value in weights.items()})
    free = whole.bounded()
    left = whole.without(~free)
    u, imbalance = left.minimise(free)
    return left(u), left(torch.zeros_like(u)), u, ~free, imbalance
