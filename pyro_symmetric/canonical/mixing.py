r"""Units that mix, in canonical form: balanced, up to their signs and their order.

Of what enters :math:`n` units, :math:`A`, and what leaves them, :math:`B`, only :math:`M = A^\top B = U S V^\top`
matters (see :mod:`~pyro_symmetric.groups.mixing`). The balanced form is

.. math:: A = S^{1/2} U^\top, \qquad B = S^{1/2} V^\top.

Its norm is the least of all with this product, and :math:`A A^\top = B B^\top = S`. If the singular values differ, it
is unique up to signs, and the order of units; those that have the value zero have weights of zero. Singular values that
are equal leave an orthogonal map of their units open. Layers of linear maps are balanced one after the other until none
changes: a point of least norm in an orbit of all their linear maps, which is unique up to orthogonal ones.

Other scales multiply columns of :math:`A` and :math:`B`, and change :math:`S`. They are found first, while the rows of
:math:`A` are orthonormal: then columns of :math:`B` have the norms of those of :math:`M`.

Source: Kempf & Ness 1979, Lecture Notes in Mathematics 732 (vectors of least norm in an orbit).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from pyro_symmetric.canonical.unit_measures import norm, removing_element, rounding
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.mixing import Sides, replaced, sides
from pyro_symmetric.weights import Weights

ROUNDS = 200  # of what only settles step by step; most networks need two

Step = Callable[[Weights], Weights]


def without_mixes(weights: Weights, group: Group, rescaled: Step | None = None, unit_scales: bool = True) -> Weights:
    """Weights that compute the same, with all units that mix balanced.

    :param rescaled: what brings scales in canonical form by a rule under which no norm grows.
    :param unit_scales: whether other units' scales are removed otherwise, those whose incoming weights get norm one.
    """
    if rescaled is not None:
        return _settled(weights, group, [rescaled, lambda own: _balanced(own, group)])
    others = group.without(group.names("mix"), "scale")
    if unit_scales and others.names("scale"):
        steps: list[Step] = [lambda own: removing_element(own, others, "scale", norm)(own)]
        weights = _settled(weights, group, [*steps, lambda own: _each(own, group, _orthonormal)])
    return _balanced(weights, group)


# small steps --------------------------------------------------------------------------------------------------------


def _settled(weights: Weights, group: Group, steps: list[Step]) -> Weights:
    """Take steps until they change what enters and leaves the units by rounding alone."""
    sizes = _sizes(weights, group)
    for _ in range(ROUNDS):
        for step in steps:
            weights = step(weights)
        before, sizes = sizes, _sizes(weights, group)
        if bool(((sizes - before).abs() <= rounding(weights) * sizes.amax(-1, keepdim=True)).all()):
            break
    return weights


def _sizes(weights: Weights, group: Group) -> Tensor:
    """Norms over the units of a copy of all that enters and leaves them; orthogonal maps of units leave them alone."""
    every = [side.detach().norm(dim=-2).flatten(-2) for n in group.names("mix") for side in sides(group, n, weights)]
    return torch.cat(every, -1)


def _balanced(weights: Weights, group: Group) -> Weights:
    """All units that mix balanced; those that share weights one after the other, until none changes."""
    if not any(_meet(group, one, other) for one, other in itertools.combinations(group.names("mix"), 2)):
        return _each(weights, group, _of_least_norm)
    return _settled(weights, group, [lambda own: _each(own, group, _of_least_norm)])


def _each(weights: Weights, group: Group, change: Callable[[Sides], Sides]) -> Weights:
    for name in group.names("mix"):
        weights = replaced(group, name, weights, change(sides(group, name, weights)))
    return weights


def _meet(group: Group, one: str, other: str) -> bool:
    """True if units lie along different axes of one site, so that a linear map of either changes both."""
    along = [{(axis.site, axis.dim) for axis in group.axes(name)} for name in (one, other)]
    return any(site == own and dim != across for site, dim in along[0] for own, across in along[1])


def _orthonormal(own: Sides) -> Sides:
    """Both sides, with orthonormal rows in what enters the units."""
    turned, triangle = torch.linalg.qr(own.entering.mT)
    return _filled(own, turned.mT, triangle @ own.leaving)


def _of_least_norm(own: Sides) -> Sides:
    """Both sides balanced: from a singular value decomposition of the product of two triangles."""
    (entering, one), (leaving, other) = (torch.linalg.qr(side.mT) for side in own)
    left, values, right = torch.linalg.svd(one @ other.mT, full_matrices=False)
    root = values.sqrt().to(left)[..., None]
    return _filled(own, root * (left.mT @ entering.mT), root * (right @ leaving.mT))


def _filled(own: Sides, entering: Tensor, leaving: Tensor) -> Sides:
    """With rows of zeros, if there are fewer than units."""
    missing = own.entering.shape[-2] - entering.shape[-2]
    return Sides(*(torch.nn.functional.pad(side, (0, 0, 0, missing)) for side in (entering, leaving)))
