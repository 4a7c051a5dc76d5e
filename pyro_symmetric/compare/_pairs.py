"""Distances between all pairs of two pooled samples, and sums over them: what kernel statistics are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_symmetric.compare.layers import PairedSamples

_CACHE_ENTRIES = 2**19  # a chunk of all samples that stays in the cache, which pairwise distances need
_LEAST_CHUNK = 64  # weights
_BLOCK_ROWS = 256  # rows of distances taken at a time: small blocks leave most of the lower triangle out
_BLOCK_ENTRIES = 2**22  # entries of such a block at most: 32 MiB in float64


class Pairs:
    """All unordered pairs of the pooled sample, in the order of :func:`torch.pdist`, by blocks of rows.

    :param m: samples of p, which come first.
    :param n: samples of q.
    """

    def __init__(self, m: int, n: int):
        self.m, self.n, self.total = m, n, m + n

    def blocks(self, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks of rows: the rows, the pairs that start there, and which entries of ``rows x columns`` are those pairs
        (the columns begin at the block's first row)."""
        step = max(1, min(_BLOCK_ROWS, _BLOCK_ENTRIES // self.total))
        first = 0
        for start in range(0, self.total, step):
            stop = min(start + step, self.total)
            rows = torch.arange(start, stop, device=device)
            upper = torch.arange(start, self.total, device=device) > rows[:, None]
            last = first + sum(self.total - 1 - row for row in range(start, stop))
            yield slice(start, stop), slice(first, last), upper
            first = last

    def distances(self, samples: PairedSamples, layer: str, norm: int) -> Tensor:
        """Distances of all pairs, ``((m + n)(m + n - 1) / 2,)`` in float64, summed over chunks of as many weights
        as the cache holds of all samples.

        :param norm: 1 for the city-block distance, 2 for Euclid's.
        """
        chunk = max(_LEAST_CHUNK, _CACHE_ENTRIES // self.total)
        pooled = (torch.cat(pair) for pair in samples.columns(layer, chunk))
        result = self._city_block(pooled) if norm == 1 else self._euclidean(pooled)
        if result is None:
            raise ValueError(f"layer {layer!r} holds no weights; leave it out")
        if not bool(result.isfinite().all()):
            samples.require_finite(layer)
            raise ValueError(f"the distances between samples of layer {layer!r} overflow; its weights are too large")
        return result

    def _city_block(self, chunks: Iterator[Tensor]) -> Tensor | None:
        result: Tensor | None = None
        for pooled in chunks:
            if result is None:
                result = pooled.new_zeros(self.total * (self.total - 1) // 2, dtype=torch.float64)
            result += torch.pdist(pooled, p=1.0)
        return result

    def _euclidean(self, chunks: Iterator[Tensor]) -> Tensor | None:
        # |x - y|² = |x|² + |y|² - 2 xy: matrix products. Centring keeps the cancellation harmless in float64.
        norms: Tensor | None = None
        products: list[tuple[slice, Tensor]] = []
        for pooled in chunks:
            centred = pooled.double()
            centred -= centred.mean(0)
            if norms is None:
                norms = centred.new_zeros(self.total)
                products = [(rows, norms.new_zeros(upper.shape)) for rows, _, upper in self.blocks(norms.device)]
            norms += centred.square().sum(1)
            for rows, product in products:
                product.addmm_(centred[rows], centred[rows.start :].T)
        if norms is None:
            return None
        result = norms.new_empty(self.total * (self.total - 1) // 2)
        products.reverse()
        for rows, entries, upper in self.blocks(norms.device):
            squared = norms[rows, None] + norms[rows.start :] - 2 * products.pop()[1]
            result[entries] = squared.clamp_(min=0).sqrt_()[upper]
        return result

    def coefficients(self, rows: slice, upper: Tensor, device: torch.device) -> Tensor:
        """Coefficient of each pair in the unbiased estimate, for the pairs of one block."""
        is_q = torch.arange(self.total, device=device) >= self.m
        left, right = is_q[rows, None], is_q[None, rows.start :]
        within = torch.where(left, 2 / (self.n * (self.n - 1)), 2 / (self.m * (self.m - 1)))
        table = torch.where(left == right, within.double(), -2 / (self.m * self.n))
        return table[upper]

    def cross(self, distances: Tensor) -> Tensor:
        """The ``m n`` distances between a sample of p and one of q."""
        parts = []
        for rows, entries, upper in self.blocks(distances.device):
            if rows.start < self.m:
                parts.append(distances[entries][self.coefficients(rows, upper, distances.device) < 0])
        return torch.cat(parts)

    def discrepancies(self, distances: Tensor, bandwidths: Tensor, norm: int) -> Tensor:
        """The unbiased estimate of the squared discrepancy for each bandwidth."""
        result = torch.zeros_like(bandwidths)
        for rows, entries, upper in self.blocks(distances.device):
            weight = self.coefficients(rows, upper, distances.device)
            for k, bandwidth in enumerate(bandwidths):
                result[k] += kernel_values(distances[entries], bandwidth, norm) @ weight
        return result

    def sums(self, distances: Tensor, bandwidths: Tensor, norm: int) -> Tensor:
        """Sums of the kernel over the pairs of each sample, those with a sample of p and those with one of q:
        ``(kernels, m + n, 2)``."""
        is_p = (torch.arange(self.total, device=distances.device) < self.m).double()
        sides = torch.stack([is_p, 1 - is_p], 1)
        result = distances.new_zeros(len(bandwidths), self.total, 2)
        rates = [-((1 / float(bandwidth)) ** norm) for bandwidth in bandwidths]
        for rows, entries, upper in self.blocks(distances.device):
            # Entries that are no pairs are infinitely far apart: no kernel sees them.
            powers = distances.new_full(upper.shape, math.inf).masked_scatter_(upper, distances[entries]).pow_(norm)
            values, columns = torch.empty_like(powers), slice(rows.start, None)
            for k, rate in enumerate(rates):
                torch.mul(powers, rate, out=values).exp_()
                result[k, rows] += values @ sides[columns]
                result[k, columns] += values.T @ sides[rows]
        return result

    def square(self, values: Tensor) -> Tensor:
        """Values of the pairs as a symmetric matrix ``(m + n, m + n)`` with a diagonal of zeros."""
        matrix = values.new_zeros(self.total, self.total)
        for rows, entries, upper in self.blocks(values.device):
            matrix[rows, rows.start :][upper] = values[entries]
        return matrix + matrix.T


def kernel_values(distances: Tensor, bandwidth: Tensor, norm: int) -> Tensor:
    """Laplace (``norm=1``) or Gaussian (``norm=2``) kernel at these distances."""
    return (-((distances / bandwidth) ** norm)).exp_()


def unbiased(within_p: Tensor, within_q: Tensor, across: Tensor, m: int, n: int) -> Tensor:
    """The unbiased squared discrepancy, by the sums over all *ordered* pairs within a side, and across."""
    return within_p / (m * (m - 1)) + within_q / (n * (n - 1)) - 2 * across / (m * n)
