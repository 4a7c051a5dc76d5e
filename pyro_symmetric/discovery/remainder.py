r"""The rank of a Jacobian, given tangents that are known to lie in its null space.

With unit columns, the null space of the Jacobian :math:`J` is the span of the tangents :math:`T` and of the null space
of :math:`\binom{J}{T^\top}`, in which no tangent is left. So one QR decomposition and a few of the smallest singular
values of its triangle (by inverse iteration) give the rank, without a full singular value decomposition.

If nothing is left, a Cholesky decomposition of the Gram matrix says so in half the time. It knows no singular value
below the root of the rounding error; but the direction in which it finds the smallest one tells that value itself.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS, BLOCK = 6, 24
NULL = 1e-8  # singular values above it, relative to the largest, are never taken for zero
CERTAIN = 1e-6  # singular values above it, relative to the largest, can be told from zero in a Gram matrix
PIECES = 8  # of the columns, so that of the symmetric Gram matrix little more than half is computed
CLEAR = 1e3  # a ratio of neighbouring singular values that leaves no doubt


class Remainder(NamedTuple):
    """Null directions beside the tangents.

    :ivar basis: orthonormal ``(weights, unexplained)``, orthogonal to all tangents.
    :ivar gap: the smallest singular value that counts over the largest that counts as zero.
    """

    basis: Tensor
    gap: float


def orthonormal(rows: Tensor, least: float = 0.0) -> Tensor:
    """An orthonormal basis ``(size, rank)`` of the span of rows ``(number, size)``, of which many may be dependent.

    :param least: the length from which on a row counts.
    """
    rows = rows[rows.norm(dim=1) > least]
    if not len(rows):
        return rows.new_empty(rows.shape[1], 0)
    rows = rows if least else rows / rows.norm(dim=1, keepdim=True)
    values, vectors = torch.linalg.eigh(rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows)
    kept = values > values[-1] * 1e-11
    if len(rows) > rows.shape[1]:
        return vectors[:, kept]
    return torch.linalg.qr(rows.T @ (vectors[:, kept] / values[kept].sqrt())).Q


def remainder(jacobian: Tensor, tangents: Tensor) -> Remainder:
    """The null space of a Jacobian ``(rows, size)`` without the tangents ``(size, number)``, which are orthonormal."""
    columns = jacobian.norm(dim=0)
    columns = columns.clamp_min(1e-4 * columns.max())  # what no output feels would be noise of length one
    scaled = jacobian / columns
    largest = _largest(scaled)
    known = torch.linalg.qr(columns[:, None] * tangents).Q
    noise = float((scaled @ known).norm(dim=0).max() / largest) if known.shape[1] else 0.0
    least = _least(scaled, known, largest)
    if least > CERTAIN:
        return Remainder(known[:, :0], least / max(noise, 1e-16))
    triangle = torch.linalg.qr(torch.cat([scaled, largest * known.T]), mode="r").R
    block, null, values = BLOCK, known[:, :0], known.new_zeros(1)
    while len(values) and float(values[0]) < NULL:
        values, vectors = _smallest(triangle, largest, block)
        number = int((values < NULL).sum())
        if number == 0:
            break
        null = torch.linalg.qr(torch.cat([null, vectors[:, :number]], 1)).Q
        noise = max(noise, float(values[number - 1]))
        triangle = torch.linalg.qr(torch.cat([triangle, largest * vectors[:, :number].T]), mode="r").R
        block = 4 * block
    basis = null / columns[:, None]
    basis = basis - tangents @ (tangents.T @ basis)
    basis = torch.linalg.qr(basis).Q
    return Remainder(basis, float(values[0]) / max(noise, 1e-16))


def _least(scaled: Tensor, known: Tensor, largest: float) -> float:
    """The smallest singular value of both together, relative to the largest; zero if the Gram matrix doesn't tell."""
    gram = torch.addmm(scaled.new_zeros(()).expand(len(known), len(known)), known, known.T, alpha=largest**2)
    starts = [len(known) * piece // PIECES for piece in range(PIECES + 1)]
    for start, end in itertools.pairwise(starts):  # the upper triangle alone counts
        gram[start:end, start:] += scaled[:, start:end].T @ scaled[:, start:]
    triangle, failed = torch.linalg.cholesky_ex(gram, upper=True)
    if int(failed):
        return 0.0
    _, vectors = _smallest(triangle, largest, BLOCK)
    return float(torch.linalg.svdvals(torch.cat([scaled @ vectors, largest * (known.T @ vectors)]))[-1]) / largest


def _largest(matrix: Tensor) -> float:
    """Its largest singular value, from below."""
    vector = matrix.new_ones(matrix.shape[1])
    for _ in range(20):
        vector = matrix.T @ (matrix @ (vector / vector.norm()))
    return float(vector.norm().sqrt())


def _smallest(triangle: Tensor, largest: float, block: int) -> tuple[Tensor, Tensor]:
    """The smallest singular values, relative to the largest, ascending, with their right vectors."""
    size = triangle.shape[0]
    diagonal = triangle.diagonal()
    tiny = 1e-15 * largest
    triangle = triangle.clone()
    triangle.diagonal().copy_(torch.where(diagonal.abs() < tiny, torch.full_like(diagonal, tiny), diagonal))
    generator = torch.Generator("cpu").manual_seed(0)
    vectors = torch.randn(size, min(block, size), generator=generator, dtype=triangle.dtype, device="cpu").to(
        triangle.device
    )
    for _ in range(ROUNDS):
        vectors = torch.linalg.qr(vectors).Q
        vectors = torch.linalg.qr(torch.linalg.solve_triangular(triangle.T, vectors, upper=False)).Q
        vectors = torch.linalg.solve_triangular(triangle, vectors, upper=True)
    vectors = torch.linalg.qr(vectors).Q
    _, values, right = torch.linalg.svd(triangle @ vectors, full_matrices=False)
    return values.flip(0) / largest, vectors @ right.mH.flip(1)
