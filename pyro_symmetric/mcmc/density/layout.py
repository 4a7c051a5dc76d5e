r"""The flat, unconstrained vectors that samplers move, and how they map to weights.

A state is a vector :math:`z \in \mathbb R^D` for each chain. It concatenates the model's sites, each mapped to an
unconstrained one by :func:`torch.distributions.biject_to`. A vector never travels without its :class:`Layout`, which is
keyed by site name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.distributions import Delta
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from torch import Tensor
from torch.distributions import Distribution, Independent, Transform, biject_to, constraints
from torch.distributions.transforms import ComposeTransform, IndependentTransform

from pyro_symmetric.placement import as_tensor
from pyro_symmetric.weights import Weights, batch_shape, flatten, require_sites, unflatten


@dataclass(frozen=True, eq=False)
class Layout:
    """Where each site lies in a flat unconstrained vector.

    :param transforms: site -> map from its unconstrained to its constrained values.
    :param site_shapes: site -> shape of its (constrained) value.
    :param unconstrained_shapes: site -> shape of its unconstrained value; a simplex of 3 has 2 coordinates.
    """

    transforms: dict[str, Transform]
    site_shapes: dict[str, torch.Size]
    unconstrained_shapes: dict[str, torch.Size]
    _curved: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        curved = tuple(site for site, transform in self.transforms.items() if not is_identity(transform))
        object.__setattr__(self, "_curved", curved)

    @classmethod
    def of(cls, sites: Mapping[str, Distribution]) -> Layout:
        """The layout of sites with these distributions, in this order.

        :raises ValueError: naming a site whose support no continuous sampler can move on.
        """
        transforms = {site: transform_of(site, fn) for site, fn in sites.items()}
        shapes = {site: torch.Size(fn.batch_shape) + torch.Size(fn.event_shape) for site, fn in sites.items()}
        free = {site: torch.Size(transforms[site].inverse_shape(shapes[site])) for site in sites}
        return cls(transforms, shapes, free)

    @property
    def dim(self) -> int:
        """Length ``D`` of the vector."""
        return sum(shape.numel() for shape in self.unconstrained_shapes.values())

    def constrain(self, z: Tensor) -> Weights:
        """Vectors ``batch_shape + (D,)`` -> weights."""
        return self.constrain_with_log_det(z)[0]

    def constrain_with_log_det(self, z: Tensor) -> tuple[Weights, Tensor]:
        r"""Weights, and :math:`\log |\det \partial w / \partial z|` of shape ``batch_shape``."""
        weights = unflatten(z, self.unconstrained_shapes, self.unconstrained_shapes)
        log_det = z.new_zeros(z.shape[:-1])
        for site in self._curved:
            free, transform = weights[site], self.transforms[site]
            weights[site] = transform(free)
            log_det = log_det + transform.log_abs_det_jacobian(free, weights[site]).reshape(*z.shape[:-1], -1).sum(-1)
        return weights, log_det

    def unconstrain(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Weights -> vectors ``batch_shape + (D,)``. Sites that the layout doesn't know are left out."""
        require_sites(weights, self.site_shapes)
        batch_shape(weights, self.site_shapes)  # names the site whose shape doesn't fit
        free = {site: transform.inv(weights[site]) for site, transform in self.transforms.items()}
        return flatten(free, self.transforms, self.unconstrained_shapes)


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
        if not support.is_discrete:
            # A mixture's support is that of its components, wrapped in a constraint without a transform.
            mixed = isinstance(support, constraints.MixtureSameFamilyConstraint)
            return biject_to(_half_line(support.base_constraint if mixed else support))
    except NotImplementedError as error:
        raise ValueError(
            f"the support of site {site!r} ({fn}) can't be mapped to unconstrained values; if it is data, pass its "
            "values, else reparametrise the site (pyro.poutine.reparam)"
        ) from error
    raise ValueError(
        f"site {site!r} is discrete ({fn}), and Pyro can't list its values to sum them out. If it is data, pass obs= "
        "in the model (or was its data not passed?); else write the density of the sum, bound its values (a "
        "Categorical over them), or put independent ones into a pyro.plate instead of .to_event"
    )


def _half_line(support: Any) -> Any:
    """An interval without an upper end as what it is, which has another map."""
    upper = getattr(support, "upper_bound", None)
    endless = upper is not None and bool((as_tensor(upper) == torch.inf).all())
    return constraints.greater_than_eq(support.lower_bound) if endless else support
