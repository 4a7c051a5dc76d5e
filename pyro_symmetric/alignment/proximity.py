r"""The closest equivalent of given weights.

An element that moves units moves two at least, each by no less than to its nearest neighbour (under a sign, where units
have one): so the exchange of the closest pair, or the flip of the smallest unit, is closest. All copies of ``D``
weights lie on one sphere; balls of half their least distance around them are disjoint, and their volumes bound it:

.. math:: \|g \cdot w - w\| \le 2\, \|w\| \,/\, (|G|^{1/D} - 1).

Source: Gelberg et al. 2024 (arXiv 2408.05496), Theorem 3.1 and its proof.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from pyro_symmetric.groups import Element, group_of
from pyro_symmetric.groups.units import rows
from pyro_symmetric.weights import Weights


class NearestCopy(NamedTuple):
    """The element that moves weights least, how far it moves them, and the most that this can be."""

    element: Element
    distance: float
    bound: float


@torch.no_grad()
def nearest_copy(weights: Weights, symmetry: Any) -> NearestCopy:
    """Find the closest other weights that a symmetry's permutations and signs lead to.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> nearest = ps.alignment.nearest_copy({"w": torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 1.0]])}, group)
    >>> nearest.element["unit"].tolist(), round(nearest.distance, 3)
    ([0, 2, 1], 4.243)

    Exact for one set of units; of several the closest exchange or flip of single units.

    :param weights: one set of weights; running statistics don't count.
    """
    group, found = group_of(symmetry).finite.without_buffers(), []
    group.batch_shape(weights)
    given = {site: weights[site].double().cpu() for site in group.sites}
    for name, one in group.units.items():
        parts = [[torch.zeros(one.count, 1, dtype=torch.float64, device="cpu")] for _ in range(2)]
        for axis in group.axes(name):  # what a sign leaves, and what it turns
            view = group.view(axis.site, given[axis.site])
            parts["flip" in one.moves and bool(axis.exponent % 2)].append(rows(view, axis, view.dim()))
        even, odd = (torch.cat(part, 1) for part in parts)
        copy = torch.arange(one.count, device="cpu") // one.size
        apart = (copy != copy[:, None]) | torch.eye(one.count, dtype=torch.bool, device="cpu")
        steps = [([int(odd.norm(dim=1).argmin())], -1.0)] if "flip" in one.moves else []
        for sign in ((1.0, -1.0) if "flip" in one.moves else (1.0,)) if "permute" in one.moves and one.size > 1 else ():
            pairs = (even, even), (odd, sign * odd)
            squares = torch.stack(
                [torch.cdist(*own, compute_mode="donot_use_mm_for_euclid_dist") ** 2 for own in pairs]
            )
            at = int(squares.sum(0).masked_fill(apart, math.inf).argmin())
            steps.append(([at // one.count, at % one.count], sign))
        for units, sign in steps:
            images, signs = torch.arange(one.size, device="cpu").repeat(one.copies), torch.ones_like(even[:, 0])
            images[units], signs[units] = images[units[::-1]], sign
            element = Element(group, {name: images.reshape(one.shape)}, {name: signs.reshape(one.shape)})
            moved = element.on_sites(given)
            found.append((sum(float((moved[s] - v).square().sum()) for s, v in given.items()), element))
    square, element = min(found, key=lambda pair: pair[0])
    norm = math.sqrt(sum(float(value.square().sum()) for value in given.values()))
    root = group.log_order() / sum(value.numel() for value in given.values())
    return NearestCopy(element.within(group_of(symmetry)), math.sqrt(square), 2 * norm / math.expm1(root))
