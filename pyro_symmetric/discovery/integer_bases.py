"""Bases of null spaces: in small whole numbers, and of bits modulo two."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from fractions import Fraction

import torch
from torch import Tensor

LARGEST = 12  # larger numbers aren't looked for


def reduced(basis: Tensor) -> Tensor:
    """The reduced echelon form: each vector is one where all others are zero."""
    basis, row = basis.clone(), 0
    for column in range(basis.shape[1]):
        if row == len(basis):
            break
        best = row + int(basis[row:, column].abs().argmax())
        if float(basis[best, column].abs()) < 1e-3:
            continue
        basis[[row, best]] = basis[[best, row]]
        basis[row] /= basis[row, column].clone()
        others = torch.arange(len(basis), device="cpu") != row
        basis[others] -= basis[others, column : column + 1] * basis[row]
        row += 1
    return basis


def whole_numbers(vector: Tensor) -> list[int]:
    """A multiple of a vector in whole numbers; none if there are no small ones."""
    fractions = [Fraction(float(x)).limit_denominator(LARGEST) for x in vector]
    found = torch.tensor([float(f) for f in fractions], dtype=vector.dtype, device="cpu")
    if float((vector - found).abs().max()) > 1e-3:
        return []
    common = math.lcm(*(f.denominator for f in fractions))
    numbers = [int(f * common) for f in fractions]
    return numbers if max(map(abs, numbers)) <= LARGEST else []


def sparse(vectors: list[list[int]], buffers: Sequence[bool]) -> list[list[int]]:
    """A basis of the same, in which fewer vectors touch buffers, and more numbers are zero."""

    def cost(vector: list[int]) -> tuple[bool, int, int]:
        touched = any(n and late for n, late in zip(vector, buffers, strict=True))
        return touched, sum(map(bool, vector)), sum(n < 0 for n in vector)

    for i, j in [*itertools.permutations(range(len(vectors)), 2)] * 2:
        if not any(map(operator.mul, vectors[i], vectors[j])):
            continue  # without a place in common their sum has more numbers than either
        for sign in (1, -1):
            other = [n + sign * m for n, m in zip(vectors[i], vectors[j], strict=True)]
            vectors[i] = other if cost(other) < cost(vectors[i]) else vectors[i]
    return vectors


def bits(vector: list[int]) -> int:
    return sum((exponent & 1) << k for k, exponent in enumerate(vector))


def independent(rows: Iterable[int]) -> list[int]:
    """The first of some rows of bits that those before them don't span, modulo two."""
    pivots: dict[int, int] = {}
    kept = []
    for row in rows:
        left = row
        while left and left.bit_length() in pivots:
            left ^= pivots[left.bit_length()]
        if left:
            pivots[left.bit_length()] = left
            kept.append(row)
    return kept


def echelon(rows: Iterable[int], columns: Iterable[int]) -> list[int]:
    """The reduced echelon form of some rows of bits, modulo two, with pivots in the order of these columns."""
    left, found = list(rows), list[int]()
    for column in columns:
        pivot = next((row for row in left if row >> column & 1), None)
        if pivot is not None:
            left.remove(pivot)
            left, found = ([row ^ pivot if row >> column & 1 else row for row in own] for own in (left, found))
            found.append(pivot)
    return found
