"""Bases of null spaces in small whole numbers, and of their parities."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from pyro_symmetric.discovery.flow import Array

LARGEST = 12  # larger numbers aren't looked for


def echelon(rows: Array, modulo_two: bool = False) -> tuple[Array, list[int]]:
    """The reduced echelon form: each row is one where all others are zero; and the columns where, its pivots."""
    rows, pivots = rows.astype(float), list[int]()
    rows = rows % 2 if modulo_two else rows
    for column in range(rows.shape[1] if rows.size else 0):
        done = len(pivots)
        best = done + int(np.abs(rows[done:, column]).argmax())
        if abs(rows[best, column]) < 1e-3:
            continue
        rows[[done, best]] = rows[[best, done]]
        rows[done] /= rows[done, column]
        rows -= np.where(np.arange(len(rows)) == done, 0.0, rows[:, column])[:, None] * rows[done]
        rows = rows % 2 if modulo_two else rows
        pivots.append(column)
        if len(pivots) == len(rows):
            break
    return rows[: len(pivots)], pivots


def independent(vectors: Sequence[Sequence[int]] | Array, modulo_two: bool) -> list[int]:
    """The numbers of the vectors that those before them don't span."""
    return echelon(np.array(vectors).T, modulo_two)[1] if len(vectors) else []


def whole_numbers(vector: Array) -> list[int]:
    """A multiple of a vector in whole numbers; none if there are no small ones."""
    fractions = [Fraction(x).limit_denominator(LARGEST) for x in vector.tolist()]
    common = math.lcm(*(f.denominator for f in fractions))
    numbers = [int(f * common) for f in fractions]
    near = np.allclose(vector, np.array(numbers) / common, rtol=0, atol=1e-3)
    return numbers if near and max(map(abs, numbers)) <= LARGEST else []


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
