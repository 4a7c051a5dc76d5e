r"""The library's one currency: ``weights``, a dict from site to tensor; and flat vectors of unconstrained numbers.

Every entry has shape ``batch_shape + site_shape`` with the same ``batch_shape``, as ``MCMC.get_samples``,
``Predictive`` and ``torch.func.functional_call`` already speak it. These helpers read, check and reshape such dicts.

Samplers and guides move a vector :math:`z \in \mathbb R^D`. It concatenates a model's sites, each mapped to
unconstrained values by the bijection of its support. A vector never travels without its :class:`Layout`, which is keyed
by site name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from numbers import Number
from typing import Any

import torch
from pyro.distributions import Delta, SineBivariateVonMises, SineSkewed
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    Transform,
    VonMises,
    biject_to,
    constraints,
    identity_transform,
)
from torch.distributions.transforms import ComposeTransform, ExpTransform, IndependentTransform

from pyro_symmetric import arguments
from pyro_symmetric.arguments import as_tensor

Weights = dict[str, Tensor]
Shapes = Mapping[str, torch.Size]


def shapes_of(weights: Mapping[str, Any], name: str = "example_weights") -> dict[str, torch.Size]:
    """The shape of each entry; entries may be tensors or shapes already."""
    return {
        site: value.shape if isinstance(value, Tensor) else arguments.shape(f"{name}[{site!r}]", value)
        for site, value in weights.items()
    }


def batch_shape(weights: Mapping[str, Tensor], site_shapes: Shapes, name: str = "weights") -> torch.Size:
    """The leading dimensions that all of ``weights`` share in front of ``site_shapes``.

    Sites that ``site_shapes`` doesn't name are not looked at.

    :param name: what messages call the weights.
    :raises ValueError: naming the site whose shape doesn't fit, what was found and what would be right.
    :raises TypeError: if they are no mapping, or an entry is no tensor.
    """
    arguments.weights(name, weights)
    found: dict[str, torch.Size] = {}
    for site in weights.keys() & site_shapes.keys():
        shape, whole = site_shapes[site], weights[site].shape
        split = len(whole) - len(shape)
        if split < 0 or whole[split:] != shape:
            raise ValueError(
                f"{name}[{site!r}] has shape {tuple(whole)}, which doesn't end in {tuple(shape)}, the site's"
            )
        found[site] = whole[:split]
    if len(set(found.values())) > 1:
        raise ValueError(
            f"{name} must have one batch shape, but they have { ({s: tuple(b) for s, b in found.items()}) }"
        )
    if not found:
        raise ValueError(f"{name} holds none of the expected sites {sorted(site_shapes)}; found {sorted(weights)}")
    return next(iter(found.values()))


def is_running_statistic(site: str) -> bool:
    """True if a site is one of a normalisation layer, which follows from the weights and the data."""
    return site.rpartition(".")[2] in ("running_mean", "running_var")


def is_bias(site: str) -> bool:
    """True if the last part of a site's name says so in a word of its own: ``bias``, ``in_proj_bias``, ``bias_ih_l0``.

    A weight called ``unbiased`` is none.
    """
    return "bias" in site.rpartition(".")[2].split("_")


def require_sites(weights: Mapping[str, Tensor], sites: Iterable[str], name: str = "weights") -> None:
    """:raises ValueError: if ``weights`` lacks one of ``sites``."""
    arguments.instance(name, weights, Mapping, "weights (site -> tensor)")
    if missing := [site for site in sites if site not in weights]:
        raise ValueError(f"{name} lacks the sites {missing}; it has {sorted(weights)}")


def require_same_network(sites: Iterable[str], site_shapes: Shapes, name: str = "weights") -> None:
    """Further sites of a model (a noise scale, a second network) are none of a symmetry's business; parameters are.

    Parameters are known by their names: they lie in the module in which all sites of the symmetry lie, and are called
    what those are called: ``weight``, ``bias``.

    :raises ValueError: if there are parameters that the symmetry doesn't know, so that it is another network's.
    """
    known = [site.split(".") for site in site_shapes if not is_running_statistic(site)]
    levels = zip(*(parts[:-1] for parts in known), strict=False)
    root = [level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)]
    kinds = {parts[-1] for parts in known}
    found = [site for site in sites if site not in site_shapes]
    unknown = [s for s in found if "." in s and s.split(".")[: len(root)] == root and s.rpartition(".")[2] in kinds]
    if unknown:
        raise ValueError(
            f"{name} holds the parameters {unknown}, which the symmetry doesn't know: it is that of another network, "
            "or these are second names of tied parameters"
        )


def require_finite(weights: Mapping[str, Tensor], name: str = "weights") -> None:
    """:raises ValueError: naming the first site that holds NaN or infinite values."""
    for site, value in arguments.weights(name, weights).items():
        # NaN and infinity reach the sum; a sum that overflows by itself is looked at entry by entry.
        if not bool(value.sum().isfinite()) and (bad := int((~value.isfinite()).sum())):
            raise ValueError(f"{name}[{site!r}] holds {bad} NaN or infinite values; all weights must be finite")


def unflatten(vector: Tensor, shapes: Shapes) -> Weights:
    """Vectors ``batch_shape + (D,)`` that concatenate sites of these shapes, in this order, by site."""
    pieces = vector.split([math.prod(shape) for shape in shapes.values()], dim=-1)
    named = zip(shapes.items(), pieces, strict=True)
    return {site: piece.reshape((*vector.shape[:-1], *shape)) for (site, shape), piece in named}


# flat vectors ---------------------------------------------------------------------------------------------------------

ANGLES = (VonMises, SineBivariateVonMises, SineSkewed)


class Layout:
    """The place of each site in a flat unconstrained vector of shape ``batch_shape + (dim,)``.

    :param site_shapes: site -> shape of its (constrained) value, in the order in which the vector concatenates them.
    :param transforms: site -> map from its unconstrained to its constrained values; the identity for all others.
    :ivar unconstrained_shapes: site -> shape of its unconstrained value; a simplex of 3 has 2 coordinates.
    :ivar dim: length ``D`` of the vector.
    """

    def __init__(self, site_shapes: Mapping[str, Iterable[int]], transforms: Mapping[str, Transform] | None = None):
        given = transforms or {}
        self.site_shapes = {site: torch.Size(shape) for site, shape in site_shapes.items()}
        self.transforms: dict[str, Transform] = {site: given.get(site, identity_transform) for site in site_shapes}
        self.unconstrained_shapes = {
            site: torch.Size(self.transforms[site].inverse_shape(shape)) for site, shape in self.site_shapes.items()
        }
        self.dim = sum(shape.numel() for shape in self.unconstrained_shapes.values())
        self._curved = tuple(site for site, transform in self.transforms.items() if not is_identity(transform))

    @classmethod
    def of(cls, sites: Mapping[str, Distribution]) -> Layout:
        """The layout of sites with these distributions, in this order.

        :raises ValueError: naming a site whose support no continuous sampler can move on.
        """
        shapes = {site: torch.Size(fn.batch_shape) + torch.Size(fn.event_shape) for site, fn in sites.items()}
        return cls(shapes, {site: transform_of(site, fn) for site, fn in sites.items()})

    def flatten(self, pieces: Mapping[str, Tensor]) -> Tensor:
        """Unconstrained values by site -> vectors."""
        batch = batch_shape(pieces, self.unconstrained_shapes)
        return torch.cat([pieces[site].reshape(*batch, -1) for site in self.unconstrained_shapes], dim=-1)

    def unflatten(self, z: Tensor) -> Weights:
        """The inverse of :meth:`flatten`."""
        return unflatten(z, self.unconstrained_shapes)

    def constrain(self, z: Tensor) -> Weights:
        """Vectors -> weights."""
        pieces = unflatten(z, self.unconstrained_shapes)
        for site in self._curved:
            pieces[site] = self.transforms[site](pieces[site])
        return pieces

    def constrain_with_log_det(self, z: Tensor, sites: Iterable[str] | None = None) -> tuple[Weights, Tensor]:
        r"""Weights, and :math:`\log |\det \partial w / \partial z|` of shape ``batch_shape``.

        :param sites: which are mapped and count, by default all that aren't mapped by the identity.
        """
        weights = unflatten(z, self.unconstrained_shapes)
        log_det = z.new_zeros(z.shape[:-1])
        for site in self._curved if sites is None else sites:
            free, transform = weights[site], self.transforms[site]
            weights[site] = transform(free)
            log_det = log_det + transform.log_abs_det_jacobian(free, weights[site]).reshape(*z.shape[:-1], -1).sum(-1)
        return weights, log_det

    def unconstrain(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Weights -> vectors. Sites that the layout doesn't know are left out.

        :raises ValueError: naming a site that is missing, or whose shape doesn't fit.
        """
        require_sites(weights, self.site_shapes)
        batch_shape(weights, self.site_shapes)
        return self.flatten({site: transform.inv(weights[site]) for site, transform in self.transforms.items()})


def is_identity(transform: Transform) -> bool:
    """True if a transform, looked into, does nothing."""
    if isinstance(transform, IndependentTransform):
        return is_identity(transform.base_transform)
    return isinstance(transform, ComposeTransform) and all(is_identity(part) for part in transform.parts)


def transform_of(site: str, fn: Distribution) -> Transform:
    """The map from unconstrained values to a site's support.

    :raises ValueError: naming a site whose support no continuous sampler can move on.
    """
    inner = fn
    while isinstance(inner, Independent | MaskedDistribution | ExpandedDistribution):
        inner = inner.base_dist
    if isinstance(inner, Delta):
        raise ValueError(f"site {site!r} is a Delta, which leaves nothing to sample; use pyro.deterministic")
    try:
        support: Any = fn.support
        if isinstance(inner, ANGLES):  # Pyro has them on the line, on which their densities repeat for ever
            support = constraints.independent(constraints.interval(-math.pi, math.pi), len(fn.event_shape))
        if not support.is_discrete:
            # A mixture's support is that of its components, wrapped in a constraint without a transform.
            if isinstance(support, constraints.MixtureSameFamilyConstraint):
                support = support.base_constraint
            return _map_to(support)
    except NotImplementedError as error:
        raise ValueError(
            f"the support of site {site!r} ({fn}) can't be mapped to unconstrained values; if it is no data, "
            "reparametrise the site (pyro.poutine.reparam)"
        ) from error
    raise ValueError(
        f"site {site!r} is discrete ({fn}), and Pyro can't list its values to sum them out. If it is no data, "
        "bound its values (a Categorical over them), or put independent ones into a pyro.plate instead of .to_event"
    )


def _map_to(support: Any) -> Transform:
    """PyTorch's map, but for intervals without an upper end, and without its shift of positive values by 0, which is
    felt where there are many such sites."""
    if isinstance(support, constraints.independent):
        return IndependentTransform(_map_to(support.base_constraint), support.reinterpreted_batch_ndims)
    upper = getattr(support, "upper_bound", None)
    if upper is not None and bool((as_tensor(upper) == torch.inf).all()):
        support = constraints.greater_than_eq(support.lower_bound)
    half_line = isinstance(support, constraints.greater_than | constraints.greater_than_eq)
    positive = half_line and isinstance(support.lower_bound, Number) and support.lower_bound == 0
    return ExpTransform() if positive else biject_to(support)
