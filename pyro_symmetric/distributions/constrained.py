r"""The group's action on unconstrained coordinates of constrained sites.

Guides work in unconstrained coordinates ``u`` with ``w = t(u)``, ``t`` the bijection to the site's support. The group
permutes the constrained values, so it acts on ``u`` by :math:`u \mapsto t^{-1}(g \cdot t(u))`, whose Jacobian is

.. math:: \log|\det J_g(u)| = \log|\det t'(u)| - \log|\det t'(t^{-1}(g \cdot t(u)))| .

It vanishes where ``t`` works entry by entry (positive sites) and also for stick-breaking (simplex sites), which is not
equivariant but whose determinant, the product of all entries of ``w``, is symmetric; the formula is evaluated all the
same, for supports where it doesn't vanish.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from pyro.distributions.util import sum_rightmost
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.constraints import Constraint
from torch.distributions.transforms import Transform

from pyro_symmetric.symmetry.factored import moved_weights
from pyro_symmetric.symmetry.finite import AnyFiniteGroup, FiniteGroup, SignedFlatAction, SignedPermutation
from pyro_symmetric.symmetry.permutation import FlatAction, Permutation
from pyro_symmetric.symmetry.rescaling import SignGroup
from pyro_symmetric.symmetry.weights import Weights


class ConstrainedAction:
    """How a group acts on flat unconstrained vectors whose sites have constrained supports.

    :param group: the group, declared on the constrained values.
    :param supports: site -> support, in the order in which the vector concatenates the sites.
    """

    def __init__(self, group: AnyFiniteGroup, supports: Mapping[str, Constraint]):
        self.group = group
        self.transforms: dict[str, Transform] = {site: biject_to(support) for site, support in supports.items()}
        absent = [site for site in group.required_sites if site not in supports]
        if absent:
            raise ValueError(f"the group moves the sites {absent}, which the vector doesn't hold: {list(supports)}")
        self.shapes = {site: t.inverse_shape(group.site_shapes[site]) for site, t in self.transforms.items()}
        self.dim = sum(math.prod(shape) for shape in self.shapes.values())

    def __repr__(self) -> str:
        return f"ConstrainedAction(dim={self.dim}, sites={list(self.transforms)})"

    def unflatten(self, vector: Tensor) -> Weights:
        """Unconstrained vectors -> unconstrained values by site."""
        pieces = vector.split([math.prod(shape) for shape in self.shapes.values()], dim=-1)
        return {
            site: piece.reshape((*vector.shape[:-1], *shape))
            for (site, shape), piece in zip(self.shapes.items(), pieces, strict=True)
        }

    def constrain(self, vector: Tensor) -> Weights:
        """Unconstrained vectors -> constrained weights."""
        return {site: self.transforms[site](value) for site, value in self.unflatten(vector).items()}

    def __call__(self, vector: Tensor, element: Permutation | SignedPermutation) -> Tensor:
        """Act on unconstrained vectors; batch shapes broadcast.

        Computed in float64: near the boundary of a simplex, in float32, a bijection and its inverse lose the value.
        """
        moved = moved_weights(element, self.constrain(vector.double()), vector.shape[:-1])
        batch = torch.broadcast_shapes(vector.shape[:-1], element.batch_shape)
        parts = [self.transforms[site].inv(moved[site]).reshape(*batch, -1) for site in self.transforms]
        return torch.cat(parts, -1).to(vector.dtype)

    def log_abs_det(self, vector: Tensor, element: Permutation | SignedPermutation) -> Tensor:
        """Log-determinant of the action's Jacobian at ``vector``."""
        vector_64 = vector.double()
        return (self._log_volume(vector_64) - self._log_volume(self(vector_64, element))).to(vector.dtype)

    def _log_volume(self, vector: Tensor) -> Tensor:
        total = vector.new_zeros(vector.shape[:-1])
        for site, value in self.unflatten(vector).items():
            transform = self.transforms[site]
            density = transform.log_abs_det_jacobian(value, transform(value))
            total = total + sum_rightmost(density, density.dim() - len(vector.shape[:-1]))
        return total


def action_on_unconstrained(
    group: AnyFiniteGroup, supports: Mapping[str, Constraint], shapes: Mapping[str, torch.Size]
) -> FlatAction | SignedFlatAction | ConstrainedAction:
    """The action on vectors that concatenate the unconstrained values of all sites of a guide.

    Where every moved site is unconstrained, constrained entry by entry (positive), or moved in whole constrained blocks
    (topics, each on a simplex of its own), that is one gather, and one multiplication if there are signs; sites that
    the group doesn't move may have any support. Signs flip unconstrained sites only.

    :param group: the group, declared on constrained values; it may know fewer sites than the guide.
    :param supports: site -> support, in the order of concatenation.
    :param shapes: site -> shape of its constrained value.
    """
    for site in group.required_sites:
        if site not in shapes:
            raise ValueError(
                f"the group moves the site {site!r}, which the guide doesn't have; the guide's sites are "
                f"{list(shapes)}. "
                "Was the group found in another network, or declared with other names?"
            )
        if torch.Size(shapes[site]) != group.site_shapes[site]:
            raise ValueError(
                f"site {site!r} has shape {tuple(shapes[site])} in the guide, but {tuple(group.site_shapes[site])} "
                f"in the group"
            )
    if isinstance(group, FiniteGroup):
        _require_real(group.signs, supports)
    if all(_commutes(group, site, supports[site], torch.Size(shapes[site])) for site in group.required_sites):
        unconstrained = {site: biject_to(support).inverse_shape(shapes[site]) for site, support in supports.items()}
        buffers = {site: shape for site, shape in group.site_shapes.items() if site not in unconstrained}
        return group.over({**buffers, **unconstrained}).flat(list(supports))
    return ConstrainedAction(group.over({**group.site_shapes, **shapes}), supports)


def _require_real(signs: SignGroup, supports: Mapping[str, Constraint]) -> None:
    for site in signs.required_sites:
        if not is_real(supports[site]):
            factors = sorted({name for axes in signs.members(site).values() for name, _ in axes})
            raise ValueError(
                f"the sign factors {factors} flip the site {site!r}, whose support is {supports[site]}; signs need "
                "sites that can take every real number. Leave that site, or those factors, out of the signs"
            )


def _commutes(group: AnyFiniteGroup, site: str, support: Constraint, shape: torch.Size) -> bool:
    """Whether the group moves entries, or whole constrained blocks (topics, each on its simplex), without mixing."""
    permutations = group.permutations if isinstance(group, FiniteGroup) else group
    blocks = len(shape) - support.event_dim  # leading axes, along which the bijection is the same for each block
    whole = all(dim < blocks for dim in permutations.dims(site)) and _has_scalar_bounds(support)
    return whole or commutes_with_permutations(support)


def is_real(support: Constraint) -> bool:
    """Whether every number is feasible, entry by entry."""
    return isinstance(getattr(support, "base_constraint", support), type(constraints.real))


def commutes_with_permutations(support: Constraint) -> bool:
    """Whether the bijection to ``support`` is the same function of every single entry."""
    base = getattr(support, "base_constraint", support)
    if is_real(support):
        return True
    if base.event_dim > 0 or biject_to(base).domain.event_dim > 0:
        return False
    return _has_scalar_bounds(support)


def _has_scalar_bounds(support: Constraint) -> bool:
    base = getattr(support, "base_constraint", support)
    bounds = (getattr(base, name, 0.0) for name in ("lower_bound", "upper_bound"))
    return all(torch.as_tensor(bound).numel() == 1 for bound in bounds)
