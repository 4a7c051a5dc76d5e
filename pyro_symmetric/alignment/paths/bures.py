r"""Optimal transport between Gaussians with correlations, by square roots of their covariances.

Let :math:`\Sigma_i = L_i L_i^\top` with any roots of shape ``(D, k)``, ``k ≥ D``, and let :math:`R` be the orthogonal
polar factor of :math:`L_1^\top L_0`. Then :math:`L_1 R` is the root of :math:`\Sigma_1` nearest to :math:`L_0`, and

.. math:: W_2^2 = \|m_0 - m_1\|^2 + \|L_0 - L_1 R\|^2
          = \|m_0 - m_1\|^2 + \|L_0\|^2 + \|L_1\|^2 - 2 \|L_1^\top L_0\|_*

with the nuclear norm :math:`\|\cdot\|_*`; the barycentre is the fixed point of
:math:`L \leftarrow \sum_i \lambda_i\, L_i R_i(L)`. These are the formulas of Bures and of the optimal map :math:`T`, as
:math:`T L_0 = L_1 R`, without inverses or squares of roots: nothing is lost where a covariance is nearly singular.

References: Bhatia, Jain & Lim 2019 (arXiv 1712.01504), Theorem 1; Álvarez-Esteban, del Barrio, Cuesta-Albertos & Matrán
2016 (arXiv 1511.05355), Theorem 4.2 (the fixed point).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST = 2000
"""Most weights of Gaussians with correlations; a step costs a singular value decomposition of that size."""


def squared_distance(first: Tensor, second: Tensor) -> Tensor:
    """Squared Bures distance of the covariances with these roots, ``(D, k)``, in float64."""
    a, b = _alike([first, second])
    # As a sum of squares: the formula with traces would lose half of the digits where the two are close.
    return (a - _nearest_root(b, a)).square().sum()


def barycentre_root(
    roots: Sequence[Tensor], weights: Sequence[float], tolerance: float = 1e-12, max_steps: int = 500
) -> Tensor:
    """A root of the barycentre of the covariances with these roots, ``(D, k)``, in float64.

    :param weights: not negative, of sum one.
    :param tolerance: the fixed point is reached when a step moves the root by less than this part of its norm.
    """
    roots = _alike(roots)
    # It must start at a full rank, which no step can raise: the member that weighs most is as good as any.
    current = roots[max(range(len(roots)), key=lambda k: weights[k])]
    for _ in range(max_steps):
        nearest = [_nearest_root(root, current) for root in roots]
        following = torch.stack([w * root for w, root in zip(weights, nearest, strict=True)]).sum(0)
        moved = torch.linalg.norm(following - current)
        current = following
        if moved <= tolerance * torch.linalg.norm(current):
            break
    return current


# small steps --------------------------------------------------------------------------------------------------------


def _nearest_root(root: Tensor, reference: Tensor) -> Tensor:
    """The root of the same covariance that lies nearest to ``reference``, both ``(D, k)``."""
    left, _, right = torch.linalg.svd(root.mT @ reference)
    return root @ (left @ right)


def _alike(roots: Sequence[Tensor]) -> list[Tensor]:
    """In float64, with as many columns as the widest."""
    if len(roots[0]) > LARGEST:
        raise ValueError(
            f"the Gaussians have correlations and {len(roots[0])} weights; transport between their full covariances is "
            f"computed up to {LARGEST}. Pass correlations=False to compare the marginals"
        )
    columns = max(root.shape[-1] for root in roots)
    return [torch.nn.functional.pad(root.double(), (0, columns - root.shape[-1])) for root in roots]
