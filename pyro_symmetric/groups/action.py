r"""The action of a group on flat vectors, constrained or not, with its log-determinant.

A vector concatenates sites in a fixed order. If supports are given, it holds
unconstrained coordinates ``u`` of values ``w = t(u)``, with ``t`` the bijection to a
site's support. The group acts on the values, and so on ``u`` by
:math:`u \mapsto t^{-1}(g \cdot t(u))`, with log-determinant

.. math:: \log|\det J_g(u)| = \log|\det t'(u)| - \log|\det t'(t^{-1}(g \cdot t(u)))|
    + \log|\det g| .

For permutations and signs it vanishes if ``t`` works entry by entry, and also for
stick-breaking, whose determinant, the product of all entries of ``w``, is symmetric.
Scales contribute :math:`\log|\det g|`, the sum of all log-multipliers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.constraints import Constraint, independent

from pyro_symmetric import arguments
from pyro_symmetric.arguments import as_tensor
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.weights import Layout, Shapes, map_values, pick


class Action:
    """The action of a group on vectors ``batch_shape + (D,)``.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> action = ps.groups.Action(group, ["w"])
    >>> action(
    ...     torch.tensor([10.0, 20.0, 30.0]),
    ...     group.element({"unit": torch.tensor([2, 0, 1])}),
    ... )
    tensor([30., 10., 20.])

    :param group: the group, or a symmetry that has one.
    :param sites: the sites in the order of the vector; or site -> support, for
        unconstrained coordinates.
    :param shapes: constrained shapes of further sites, on which the group acts
        trivially.
    :ivar layout: the :class:`~pyro_symmetric.weights.Layout` of the vector.
    :ivar nonlinear_sites: sites on whose coordinates the action is nonlinear, such as a
        simplex whose entries are permuted; ``simplex_sites``: those of them whose
        values lie on a simplex, or on one in each row.
    :raises ValueError: if ``sites`` lacks a site that the group moves, or holds one of
        unknown shape; if the group flips, scales or shifts a site whose support isn't
        the real line.
    """

    def __init__(
        self,
        group: Group,
        sites: Sequence[str] | Mapping[str, Constraint],
        shapes: Shapes | None = None,
    ):
        self.group = group_of(group)
        supports = sites if isinstance(sites, Mapping) else {}
        self.sites = tuple(arguments.listed("sites", sites, str, "sites"))
        known = {**(shapes or {}), **self.group.site_shapes}
        if (
            not self.sites
            or len(set(self.sites)) < len(self.sites)
            or not known.keys() >= set(self.sites)
        ):
            raise ValueError(
                f"sites is {list(self.sites)}; each must be there once, and one of "
                f"{sorted(known)}"
            )
        if left_out := [
            site for site in self.group.required_sites if site not in self.sites
        ]:
            raise ValueError(
                f"the group moves the sites {left_out}, which the vector doesn't hold: "
                f"{list(self.sites)}"
            )
        for site, support in supports.items():
            self.require_real(site, support)
        transforms = map_values(biject_to, supports)
        self.layout = Layout(pick(known, self.sites), transforms)
        self.dim = self.layout.dim
        moved = [
            site
            for site in supports
            if site in self.group.sites and not is_real(supports[site])
        ]
        self.nonlinear_sites = tuple(
            site for site in moved if not self._commutes(site, supports[site])
        )
        simplex = type(constraints.simplex)
        self.simplex_sites = tuple(
            s
            for s in self.nonlinear_sites
            if isinstance(of_entries(supports[s]), simplex)
        )

    def __call__(self, vector: Tensor, element: Element) -> Tensor:
        """Act on vectors; batch shapes broadcast. Nonlinear sites are computed in
        float64, which simplices need.
        """
        if vector.shape[-1:] != (self.dim,):
            raise ValueError(
                f"vector has shape {tuple(vector.shape)}, but this action needs a last "
                f"axis of {self.dim}"
            )
        batch = torch.broadcast_shapes(vector.shape[:-1], element.batch_shape)
        parts = []
        shapes = self.layout.unconstrained_shapes
        for site, piece in self.layout.unflatten(vector).items():
            dims = len(shapes[site])
            if site in self.nonlinear_sites:
                bijection = self.layout.transforms[site]
                moved = bijection.inv(
                    element.on_site(site, bijection(piece.double()))
                ).to(vector.dtype)
            else:
                reshaped = shapes[site] != self.layout.site_shapes[site]
                moved = element.on_site(site, piece, dims if reshaped else None)
            parts.append(
                moved.reshape(*moved.shape[: moved.dim() - dims], -1).expand(*batch, -1)
            )
        return torch.cat(parts, -1)

    def log_abs_det(self, vector: Tensor, element: Element) -> Tensor:
        """Return the log-determinant of the action's Jacobian at ``vector``,
        ``batch_shape``.
        """
        total = vector.new_zeros(
            torch.broadcast_shapes(vector.shape[:-1], element.batch_shape)
        )
        if self.nonlinear_sites:
            before, after = (
                self.layout.constrain_with_log_det(v, self.nonlinear_sites)[1]
                for v in (vector.double(), self(vector.double(), element))
            )
            total = total + (before - after).to(total)
        for site in self.sites if "scale" in element.numbers else ():
            shape = self.group.view_shapes[site]
            for dim, members in self.group.members(site).items():
                for name, axis in members:
                    log_scale = (
                        element.numbers["scale"][..., self.group.slots[name]]
                        .double()
                        .sum(-1)
                    )
                    power = (
                        axis.exponent * len(axis.index) * (shape.numel() // shape[dim])
                    )
                    total = total + (power * log_scale).to(total)
        return total

    def require_real(self, site: str, support: Constraint) -> None:
        """Raise ``ValueError`` if units flip, scale or shift a site whose support isn't
        the real line.
        """
        members = [pair for axes in self.group.members(site).values() for pair in axes]
        changing = sorted(
            {
                n
                for n, axis in members
                if axis.touched(self.group[n].moves - {"permute"})
            }
        )
        if changing and not is_real(support):
            raise ValueError(
                f"the units {changing} flip, scale or shift the site {site!r}, whose "
                f"support is {support}; that needs "
                "a site that can take every real number. Declare the site as even, or "
                "leave it out"
            )

    def _commutes(self, site: str, support: Constraint) -> bool:
        """Return whether the action commutes with the bijection, entry by entry or
        block by block (a simplex each).
        """
        base = of_entries(support)
        bounds = (
            as_tensor(getattr(base, name, 0.0))
            for name in ("lower_bound", "upper_bound")
        )
        if not all(bool((bound == bound.flatten()[:1]).all()) for bound in bounds):
            return False  # the bounds differ between entries
        if base.event_dim == 0 and biject_to(base).domain.event_dim == 0:
            return True
        batch_dims = len(self.layout.site_shapes[site]) - base.event_dim
        flattened = self.group.view_shapes[site] != self.group.site_shapes[site]
        return not flattened and all(
            dim < batch_dims for dim in self.group.members(site)
        )


def is_real(support: Constraint) -> bool:
    """Return whether a support is the real line, entry by entry."""
    return isinstance(of_entries(support), type(constraints.real))


def of_entries(support: Constraint) -> Constraint:
    """Unwrap ``independent``: return the support of the entries, or of the blocks, that
    a site repeats.
    """
    while isinstance(support, independent):
        support = support.base_constraint
    return support
