"""Acting on flat vectors, which never travel without their layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.factored import gather_last, moved_weights
from pyro_symmetric.symmetry.weights import Weights, flatten, unflatten

if TYPE_CHECKING:
    from pyro_symmetric.symmetry.permutation import Permutation, PermutationGroup


class FlatAction:
    """How a group acts on vectors ``batch_shape + (D,)`` that concatenate ``sites`` in a fixed order.

    Acting is one gather; the map preserves volume (:meth:`log_abs_det` is zero).
    """

    def __init__(self, group: PermutationGroup, sites: Sequence[str]):
        self.group = group
        self.sites = tuple(arguments.listed("sites", sites, str, "sites"))
        unknown = [site for site in self.sites if site not in group.site_shapes]
        if unknown:
            raise ValueError(f"the group doesn't know the sites {unknown}; it knows {sorted(group.site_shapes)}")
        left_out = [site for site in group.required_sites if site not in self.sites]
        if left_out:
            raise ValueError(f"the group moves the sites {left_out}, which the vector doesn't hold: {list(self.sites)}")
        self.dim = sum(math.prod(group.site_shapes[site]) for site in self.sites)

    def __repr__(self) -> str:
        return f"FlatAction(dim={self.dim}, sites={list(self.sites)})"

    def index(self, element: Permutation) -> Tensor:
        """LongTensor ``element.batch_shape + (D,)`` such that acting is ``vector.gather(-1, index)``."""
        device = next(iter(element.images.values())).device if element.images else None
        return self.flatten(moved_weights(element, self.unflatten(torch.arange(self.dim, device=device)), ()))

    def __call__(self, vector: Tensor, element: Permutation) -> Tensor:
        """Act on vectors; batch shapes broadcast."""
        if vector.shape[-1:] != (self.dim,):
            raise ValueError(f"vector has shape {tuple(vector.shape)}, but this action needs a last axis of {self.dim}")
        return gather_last(vector, self.index(element).to(vector.device))

    def log_abs_det(self, vector: Tensor, element: Permutation) -> Tensor:
        """Log-determinant of the action's Jacobian, ``batch_shape``: zero, for a permutation."""
        return vector.new_zeros(torch.broadcast_shapes(vector.shape[:-1], element.batch_shape))

    def flatten(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Weights -> vectors."""
        return flatten(weights, self.sites, self.group.site_shapes)

    def unflatten(self, vector: Tensor) -> Weights:
        """Vectors -> weights."""
        return unflatten(vector, self.sites, self.group.site_shapes)
