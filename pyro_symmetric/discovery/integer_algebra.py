"""Linear algebra of small integers and of integers modulo two: exponents of scales, and
parities of signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pyro_symmetric.discovery.registry import Array

Exponents = tuple[int, ...]  # one for each axis; of signs, their parities
LARGEST_EXPONENT = 12


def small_integers(vector: Array, tolerance: float = 1e-3) -> list[int]:
    """Return the smallest integer multiple of a vector; nothing if its entries are
    large.
    """
    for denominator in range(1, LARGEST_EXPONENT + 1):
        numbers = (vector * denominator).round().astype(int)
        if np.abs(vector - numbers / denominator).max() <= tolerance:
            return [] if np.abs(numbers).max() > LARGEST_EXPONENT else numbers.tolist()
    return []


def echelon(rows: Array, modulo_two: bool = False) -> tuple[Array, list[int]]:
    """Return the reduced row echelon form without zero rows, and the columns of its
    pivots.
    """
    rows = rows.astype(float)
    pivots = list[int]()
    rows = rows % 2 if modulo_two else rows
    for column in range(rows.shape[1] if rows.size else 0):
        rank = len(pivots)
        best = rank + int(np.abs(rows[rank:, column]).argmax())
        if abs(rows[best, column]) < 1e-3:
            continue
        rows[[rank, best]] = rows[[best, rank]]
        rows[rank] /= rows[rank, column]
        rows -= (
            np.where(np.arange(len(rows)) == rank, 0.0, rows[:, column])[:, None]
            * rows[rank]
        )
        rows = rows % 2 if modulo_two else rows
        pivots.append(column)
        if len(pivots) == len(rows):
            break
    return rows[: len(pivots)], pivots


def independent(vectors: Sequence[Any] | Array, modulo_two: bool) -> list[int]:
    """Return the numbers of the vectors that earlier ones don't span."""
    return echelon(np.array(vectors).T, modulo_two)[1] if len(vectors) else []


def vanishing(vectors: Array, images: Array, modulo_two: bool) -> list[Array]:
    """Return a basis of the combinations of vectors of which those of their images
    vanish; vectors where possible.
    """
    reduced, pivots = echelon(np.hstack([images, vectors]), modulo_two)
    rank = sum(pivot < images.shape[1] for pivot in pivots)
    solutions = [
        np.array(numbers)
        for row in reduced[rank:, images.shape[1] :]
        if (numbers := small_integers(row))
    ]
    candidates = np.array([*vectors[~images.any(1)], *solutions])
    return [*candidates[independent(candidates, modulo_two)]] if len(candidates) else []


def saturated(vectors: Array) -> Array:
    """Return integer vectors with the same span that are independent modulo two.

    >>> import numpy as np
    >>> from pyro_symmetric.discovery.integer_algebra import saturated
    >>> vectors = np.array([[1, 1, 0], [1, -1, 2]])  # their sum is twice (1, 0, 1)
    >>> saturated(vectors)
    array([[1, 1, 0],
           [1, 0, 1]])
    """
    vectors, combinations = vectors.copy(), np.eye(len(vectors), dtype=int)
    while even := vanishing(combinations, vectors % 2, True):
        chosen = np.flatnonzero(even[0])
        vectors[chosen[-1]] = vectors[chosen].sum(0) // 2
    return vectors
