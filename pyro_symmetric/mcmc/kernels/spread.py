r"""The variances of the coordinates, learnt from chains that may have yet to spread.

Under any posterior whose density vanishes at infinity, :math:`\operatorname{Cov}(z_i, \partial_i U) = 1` (integrate by
parts). So the slope of a regression of gradients on positions,

.. math:: \frac{\operatorname{Cov}(z_i, \partial_i U)}{\operatorname{Var}(z_i)} ,

is the inverse of the variance if chains have settled. If a chain has only begun to spread, its variance is too
small, but the slope is the curvature there, and for a Gaussian of independent coordinates still the inverse variance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SHARE = 0.1  # of its spread that a chain is taken to have reached


@dataclass(frozen=True, eq=False)
class Spread:
    """Running sums within chains, pooled over the chains (Welford 1962).

    :param mean: each chain's mean, ``(C, D)``.
    :param slope: each chain's mean gradient, likewise.
    :param squares: of positions' distances from the mean, summed over chains and draws, ``(D,)``.
    :param products: of these distances and the gradients', likewise.
    :param count: draws of each chain so far.
    """

    mean: Tensor
    slope: Tensor
    squares: Tensor
    products: Tensor
    count: int = 0

    @classmethod
    def start(cls, z: Tensor) -> Spread:
        """Nothing seen yet, for chains ``(C, D)``."""
        zero = torch.zeros_like(z)
        return cls(zero, zero, zero[0], zero[0])

    def update(self, z: Tensor, gradient: Tensor) -> Spread:
        """Take in one draw of every chain and its gradient, ``(C, D)`` each."""
        count = self.count + 1
        away = z - self.mean
        mean, slope = self.mean + away / count, self.slope + (gradient - self.slope) / count
        products = self.products + (away * (gradient - slope)).sum(0)
        return Spread(mean, slope, self.squares + (away * (z - mean)).sum(0), products, count)

    @property
    def mean_of_others(self) -> Tensor | None:
        """The mean of all chains but one, ``(C, D)``: near that one, and independent of it; ``None`` of one chain."""
        count = len(self.mean)
        return None if count == 1 else (self.mean.sum(0) - self.mean) / (count - 1)

    def unless(self, broken: Tensor, before: Spread) -> Spread:
        """This, or what there was before if ``broken``, a bool ``()``; the count stays."""
        mean, slope = torch.where(broken, before.mean, self.mean), torch.where(broken, before.slope, self.slope)
        squares = torch.where(broken, before.squares, self.squares)
        return Spread(mean, slope, squares, torch.where(broken, before.products, self.products), self.count)

    def variance(self, by_slope: bool) -> Tensor:
        """Variances ``(D,)``, shrunk towards a small constant as if by five draws, as Stan does.

        :param by_slope: whether gradients are exact enough to tell which share of its spread a chain has reached.
        """
        degrees = len(self.mean) * max(self.count - 1, 0)
        if degrees < 1:
            return torch.ones_like(self.squares)
        variance, share = self.squares / degrees, degrees / (degrees + 5.0)
        if by_slope:
            variance = variance / (self.products / degrees).clamp(min=LEAST_SHARE)
        return share * variance + 1e-3 * (1 - share)
