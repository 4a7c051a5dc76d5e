r"""Exchanges of the two factors of a product, such as :math:`g_i` and :math:`u_i` of ``down(gate(x) * up(x))``.

They are symmetries that the library doesn't act with. Unit :math:`i` has two multipliers, :math:`a` of its row in
``gate`` and :math:`b` of that in ``up``, both of which the column of ``down`` is divided by. An exchange of the rows
exchanges the multipliers, so the rows would have to be two units inside unit :math:`i`, both with exponent -1 along one
column: but along an axis every position belongs to one unit. Written as :math:`ab` and :math:`a / b`, each
has a unit of its own, but the exchange turns the second one round, and permutations only carry multipliers along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pyro_symmetric.discovery.jacobian import Jacobian
from pyro_symmetric.groups import Axis, Group
from pyro_symmetric.weights import Weights

FACTORS = "exchanges of the two factors of a product"
SAME = 1e-9  # relative difference of outputs in float64

Pairs = list[tuple[Axis, Axis]]


def exchangeable_factors(group: Group, jacobian: Jacobian, weights: Weights, seed: int) -> Iterator[Pairs]:
    """For all units with two factors that may be exchanged, the axes of one factor with those of the other.

    :param weights: generic ones, at which the outputs are compared.
    :param seed: of the random inputs.
    """

    def outputs(weights: Weights) -> Tensor:
        return jacobian.outputs(weights, torch.Generator("cpu").manual_seed(seed))

    proposed = [
        pairs for pairs in _proposed(group) if all(axis.site in jacobian.shapes for pair in pairs for axis in pair)
    ]
    expected = outputs(weights) if proposed else None
    for pairs in proposed:
        moved = outputs({**weights, **_exchanged(group, weights, pairs)})
        if expected is not None and bool((moved - expected).norm() <= SAME * expected.norm()):
            yield pairs


def _proposed(group: Group) -> Iterator[Pairs]:
    """Units, and one unit inside each of them, whose multipliers meet at some places and are alike elsewhere."""
    for name in group.names("permute"):
        for child in (own for own in group.children(name) if group[own].size == 1):
            mine, theirs = ([axis for axis in group.axes(own) if axis.exponent] for own in (name, child))
            alone = [
                [a for a in own if not any(_same(a, b) for b in others)]
                for own, others in ((mine, theirs), (theirs, mine))
            ]
            pairs = list(zip(*alone, strict=False))
            if pairs and len(alone[0]) == len(alone[1]) < len(mine) and all(_alike(group, *pair) for pair in pairs):
                yield pairs


def _same(one: Axis, other: Axis) -> bool:
    places = (one.site, one.dim, one.exponent) == (other.site, other.dim, other.exponent)
    return places and torch.equal(one.index, other.index)


def _alike(group: Group, one: Axis, other: Axis) -> bool:
    same = (one.dim, one.exponent, one.epsilon) == (other.dim, other.exponent, other.epsilon)
    shapes = group.view_shapes[one.site], group.view_shapes[other.site]
    return same and one.site != other.site and shapes[0] == shapes[1] and torch.equal(one.index, other.index)


def _exchanged(group: Group, weights: Weights, pairs: Sequence[tuple[Axis, Axis]]) -> Weights:
    """The sites of both factors, with those of every second unit exchanged."""
    moved = {axis.site: group.view(axis.site, weights[axis.site]).clone() for pair in pairs for axis in pair}
    for one, other in pairs:
        own = one.index[:, ::2].flatten().to(moved[one.site].device)
        rows: list[Tensor] = [moved[axis.site].index_select(one.dim, own) for axis in (one, other)]
        moved[one.site].index_copy_(one.dim, own, rows[1])
        moved[other.site].index_copy_(one.dim, own, rows[0])
    return {site: group.view_back(site, value) for site, value in moved.items()}
