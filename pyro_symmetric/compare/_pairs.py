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
_KERNEL_ENTRIES = 2**16  # entries up to which several kernels are evaluated at once: they stay in the cache


class Pairs:
    """All unordered pairs of the pooled sample, in the order of :func:`torch.pdist`, by blocks of rows.

    :param m: samples of p, which come first.
    :param n: samples of q.
    """

    def __init__(self, m: int, n: int):
        self.m, self.n, self.total = m, n, m + n
        self._only: tuple[slice, slice, Tensor] | None = None  # block, if one holds all pairs
        self._told: Tensor | None = None  # whose each sample is

    def blocks(self, device: torch.device) -> Iterator[tuple[slice, slice, Tensor]]:
        """Blocks of rows: the rows, the pairs that start there, and the number of each of these pairs among the entries
        of ``rows x columns`` (the columns begin at the block's first row)."""
        if self._only is not None and self._only[2].device == device:
            yield self._only
            return
        step = max(1, min(_BLOCK_ROWS, _BLOCK_ENTRIES // self.total))
        first = 0
        for start in range(0, self.total, step):
            stop = min(start + step, self.total)
            columns = self.total - start
            row, column = torch.triu_indices(stop - start, columns, 1, device=device)
            last = first + len(row)
            block = slice(start, stop), slice(first, last), row.mul_(columns).add_(column)
            if step >= self.total:
                self._only = block
            yield block
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
                products = [
                    (rows, norms.new_zeros(rows.stop - rows.start, self.total - rows.start))
                    for rows, _, _ in self.blocks(norms.device)
                ]
            norms += centred.square().sum(1)
            for rows, product in products:
                product.addmm_(centred[rows], centred[rows.start :].T)
        if norms is None:
            return None
        result = norms.new_empty(self.total * (self.total - 1) // 2)
        products.reverse()
        for rows, entries, pairs in self.blocks(norms.device):
            squared = torch.sub(norms[rows, None] + norms[rows.start :], products.pop()[1], alpha=2)
            torch.index_select(squared.clamp_(min=0).sqrt_().view(-1), 0, pairs, out=result[entries])
        return result

    def coefficients(self, rows: slice, pairs: Tensor) -> Tensor:
        """Coefficient of each pair in the unbiased estimate, for the pairs of one block."""
        table = pairs.new_full(
            (rows.stop - rows.start, self.total - rows.start), -2 / (self.m * self.n), dtype=torch.double
        )
        in_p = max(0, self.m - rows.start)
        table[:in_p, :in_p] = 2 / (self.m * (self.m - 1))
        table[in_p:, in_p:] = 2 / (self.n * (self.n - 1))
        return table.view(-1).index_select(0, pairs)

    def cross(self, distances: Tensor) -> Tensor:
        """The ``m n`` distances between a sample of p and one of q."""
        row = torch.arange(self.m, device=distances.device)
        before = row * (2 * self.total - 1 - row) // 2  # pairs that start at an earlier row
        columns = torch.arange(self.m, self.total, device=distances.device)
        return distances[((before - row - 1)[:, None] + columns).view(-1)]

    def discrepancies(self, distances: Tensor, bandwidths: Tensor, norm: int) -> Tensor:
        """The unbiased estimate of the squared discrepancy for each bandwidth."""
        result = torch.zeros_like(bandwidths)
        for rows, entries, pairs in self.blocks(distances.device):
            weight = self.coefficients(rows, pairs)
            for some in self._at_once(len(bandwidths), len(pairs)):
                result[some] += kernel_values(distances[entries], bandwidths[some, None], norm) @ weight
        return result

    @staticmethod
    def _at_once(kernels: int, entries: int) -> Iterator[slice]:
        """Kernels that are evaluated at once."""
        step = max(1, _KERNEL_ENTRIES // max(1, entries))
        return (slice(start, start + step) for start in range(0, kernels, step))

    def sums(self, distances: Tensor, bandwidths: Tensor, norm: int) -> Tensor:
        """Sums of the kernel over the pairs of each sample, those with a sample of p and those with one of q:
        ``(kernels, m + n, 2)``."""
        sides = self._sides(distances.device)
        result = distances.new_zeros(len(bandwidths), self.total, 2)
        rates = -bandwidths.reciprocal().pow_(norm)[:, None, None]
        for rows, entries, pairs in self.blocks(distances.device):
            # Entries that are no pairs are infinitely far apart: no kernel sees them.
            powers = distances.new_full((rows.stop - rows.start, self.total - rows.start), math.inf)
            powers.view(-1)[pairs] = distances[entries]
            powers.pow_(norm)
            for some in self._at_once(len(bandwidths), powers.numel()):
                values = torch.mul(powers, rates[some]).exp_()
                result[some, rows].add_(values @ sides[rows.start :])
                result[some, rows.start :].add_(values.mT @ sides[rows])
        return result

    def _sides(self, device: torch.device) -> Tensor:
        """Membership of each sample in p and in q: ``(m + n, 2)``."""
        if self._told is None or self._told.device != device:
            is_p = (torch.arange(self.total, device=device) < self.m).double()
            self._told = torch.stack([is_p, 1 - is_p], 1)
        return self._told

    def square(self, values: Tensor) -> Tensor:
        """Values of the pairs as a symmetric matrix ``(m + n, m + n)`` with a diagonal of zeros."""
        matrix = values.new_zeros(self.total, self.total)
        for rows, entries, pairs in self.blocks(values.device):
            # The columns begin at the block's first row, so that numbers within the block are as far apart as all rows.
            columns = self.total - rows.start
            matrix.view(-1)[rows.start * (self.total + 1) + pairs + pairs // columns * rows.start] = values[entries]
        return matrix + matrix.T


def kernel_values(distances: Tensor, bandwidth: Tensor, norm: int) -> Tensor:
    """Laplace (``norm=1``) or Gaussian (``norm=2``) kernel at these distances."""
    return (distances / bandwidth).pow_(norm).neg_().exp_()


def unbiased(within_p: Tensor, within_q: Tensor, across: Tensor, m: int, n: int) -> Tensor:
    """The unbiased squared discrepancy, by the sums over all *ordered* pairs within a side, and across."""
    return within_p / (m * (m - 1)) + within_q / (n * (n - 1)) - 2 * across / (m * n)
