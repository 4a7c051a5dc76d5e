r"""How elements of a group act on the flat vectors of guides, and on Gaussians over them.

Permutations, scalings, signs and shifts act on real sites by affine maps :math:`g \cdot w = A w + b`, so the
push-forward of a Gaussian is one:

.. math:: g_\# \mathcal N(m, \Sigma) = \mathcal N(A m + b,\; A \Sigma A^\top) .

``A`` has one entry in each row: mean-field Gaussians stay mean-field, and low ranks stay low.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_symmetric.distributions.constrained import commutes_with_permutations
from pyro_symmetric.guides.layout import SiteLayout
from pyro_symmetric.symmetry.factored import require_buffers
from pyro_symmetric.symmetry.permutation import Permutation
from pyro_symmetric.symmetry.rescaling import Multipliers
from pyro_symmetric.symmetry.shift import Shift
from pyro_symmetric.symmetry.weight_symmetry import Action
from pyro_symmetric.symmetry.weights import flatten, require_same_network, unflatten


class AffineAction:
    """How one element acts on a guide's flat unconstrained vectors, ``batch_shape + (D,)``.

    :raises TypeError: for what is no element of a group.
    :raises ValueError: for a batch of elements, for sites that the guide lacks or whose supports don't fit.
    """

    def __init__(self, element: Action, sites: Sequence[SiteLayout]):
        self.steps: tuple[Any, ...] = getattr(element, "steps", (element,))  # of a product, the first one first
        self.names = [site.name for site in sites]
        self.shapes = {site.name: site.unconstrained_shape for site in sites}
        for step in self.steps:
            _require_affine(step, {site.name: site for site in sites})

    def __call__(self, vector: Tensor) -> Tensor:
        weights = unflatten(vector, self.names, self.shapes)
        for step in self.steps:
            moved = {site: weights[site] for site in step.group.required_sites}
            weights |= step(moved) if moved else {}
        return flatten(weights, self.names, self.shapes)

    def linear(self, loc: Tensor, columns: Tensor) -> Tensor:
        """The linear part on the columns of ``(D, k)``: the action's derivative, which no constant can spoil."""
        rows = columns.mT.contiguous()
        # By two reverse passes: forward mode compiles deprecated scripts of torch's, with a warning for each.
        moved = torch.autograd.functional.jvp(self, loc.expand_as(rows).contiguous(), rows)[1]
        return moved.mT.contiguous()

    def pushed(self, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The moments of a Gaussian pushed forward: ``loc`` and ``scale``, ``cov_factor`` or ``scale_tril``."""
        loc = moments["loc"]
        result = {"loc": self(loc)}
        if "scale_tril" in moments:
            return result | {"scale_tril": triangular(self.linear(loc, moments["scale_tril"]))}
        result["scale"] = self.linear(loc, moments["scale"].unsqueeze(-1)).squeeze(-1).abs()
        if "cov_factor" in moments:
            result["cov_factor"] = self.linear(loc, moments["cov_factor"])
        return result


def triangular(rows: Tensor) -> Tensor:
    """The Cholesky factor of ``rows @ rows.mT``, by a QR decomposition in float64: no squares, no lost digits."""
    upper = torch.linalg.qr(rows.double().mT, mode="r").R
    signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper)
    return (upper * signs.unsqueeze(-1)).mT.to(rows.dtype)


# small steps --------------------------------------------------------------------------------------------------------


def _require_affine(step: Any, sites: dict[str, SiteLayout]) -> None:
    """:raises ValueError: unless one step of an element acts affinely on these unconstrained sites."""
    if not isinstance(step, Permutation | Multipliers | Shift):
        raise TypeError(
            f"element is a {type(step).__name__}; it must be a Permutation, Scaling, Sign, Shift, or a product of "
            "them, e.g. align(guide, reference, group).element"
        )
    if step.batch_shape:
        raise ValueError(
            f"element is a batch of shape {tuple(step.batch_shape)}; a guide is pushed forward by one element "
            "(element.select(0) is the first)"
        )
    shapes = step.group.site_shapes
    require_same_network(sites, shapes, "the guide")
    require_buffers(sites, step.group.buffers, "the guide")
    for name in step.group.required_sites:
        if name not in sites:
            raise ValueError(
                f"the element moves the site {name!r}, which the guide doesn't have; the guide's sites are "
                f"{sorted(sites)}. Where the network is an attribute 'net' of the model, take elements of "
                "symmetry.prefixed('net')"
            )
        site = sites[name]
        if torch.Size(site.shape) != shapes[name]:
            raise ValueError(
                f"site {name!r} has shape {tuple(site.shape)} in the guide, but {tuple(shapes[name])} in the group"
            )
        if isinstance(step, Permutation):
            if not commutes_with_permutations(site.support):
                raise ValueError(
                    f"the element permutes the entries of site {name!r}, which are constrained together (its support "
                    f"is {site.support}); the push-forward of a Gaussian need not be one"
                )
        elif getattr(site.support, "base_constraint", site.support) is not constraints.real:
            raise ValueError(
                f"the element is a {type(step).__name__} of site {name!r}, whose support is {site.support}; the "
                "push-forward of a Gaussian is one for real sites only"
            )
