"""Of all frames that differ by one common element, the one in which most members came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_symmetric.alignment.parts.problem import Element, Problem
from pyro_symmetric.alignment.parts.state import State
from pyro_symmetric.symmetry.finite import FiniteGroup, SignedPermutation
from pyro_symmetric.symmetry.permutation import Permutation
from pyro_symmetric.symmetry.rescaling import Sign


def at_home(problem: Problem, state: State) -> State:
    """The same frame, its permutations and signs counted from those that most members have, of several the first's.

    With :math:`h` the commonest element every :math:`g` becomes :math:`h^{-1} g`, so that the commonest stay as they
    came. Scales, which come between an element's signs and its permutations, commute with signs.
    """
    signs = state.multipliers["sign"]
    rows = torch.cat([*state.images.values(), signs.long()], -1)
    if not rows.shape[-1]:
        return state
    group = FiniteGroup(problem.parts.permutations, problem.parts.signs)
    offsets = problem.parts.offsets("sign")
    every = SignedPermutation(
        group,
        Permutation(group.permutations, state.images),
        Sign(group.signs, {name: signs[:, at] for name, at in offsets.items()}),
    )
    found = every.select(slice(first := _commonest(rows), first + 1)).inverse() @ every
    result = state.copy()
    result.images = {name: image.expand_as(state.images[name]).clone() for name, image in _images(found.permutation)}
    for name, image in _images(found.sign):
        result.multipliers["sign"][:, offsets[name]] = image.to(signs.dtype)
    return result


def displaced(element: Element) -> Tensor:
    """Which elements of a batch permute or flip anything, bool, of the batch's shape."""
    result = torch.zeros(tuple(element.batch_shape), dtype=torch.bool)
    for step in getattr(element, "steps", (element,)):
        if isinstance(step, Permutation):
            for image in step.images.values():
                result |= (image != torch.arange(image.shape[-1], device=image.device)).any(-1).cpu()
        if isinstance(step, Sign):
            for image in step.images.values():
                result |= (image < 0).any(-1).cpu()
    return result


# small steps --------------------------------------------------------------------------------------------------------


def _commonest(rows: Tensor) -> int:
    """The number of the first row that has most likes."""
    _, kind, counts = rows.unique(dim=0, return_inverse=True, return_counts=True)
    return int((counts[kind] == counts.max()).nonzero()[0])


def _images(step: Permutation | Sign) -> Sequence[tuple[str, Tensor]]:
    return list(step.images.items())
