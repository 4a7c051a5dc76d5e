"""Arrays of integers: distinct rows, ranks, hashes, connected components."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

Array = np.ndarray
_U = np.uint64


def distinct_rows(*columns: Array) -> tuple[Array, Array, Array]:
    """Rows of several integer columns: (index of the first of each distinct row, inverse, counts), rows sorted."""
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), dtype=bool)
    new[:1] = True
    for column in columns:
        new[1:] |= column[order][1:] != column[order][:-1]
    inverse = np.empty(len(order), dtype=np.int64)
    inverse[order] = np.cumsum(new) - 1
    return order[new], inverse, np.bincount(inverse)


def rank_within(owner: Array, by: Array | None = None) -> Array:
    """For each entry, how many of the same owner come before it, sorted by another array or as they lie."""
    order = np.argsort(owner, kind="stable") if by is None else np.lexsort([by, owner])
    place = np.arange(len(owner))
    starts = np.r_[True, owner[order][1:] != owner[order][:-1]][: len(owner)]
    rank = np.empty(len(owner), dtype=np.int64)
    rank[order] = place - np.maximum.accumulate(np.where(starts, place, 0))
    return rank


def components(size: int, one: Array, other: Array) -> tuple[int, Array]:
    """Connected components of a graph: their number, and the component of each node."""
    graph = coo_matrix((np.ones(len(one), dtype=np.int8), (one, other)), shape=(size, size))
    count, label = connected_components(graph, directed=False)
    return count, label.astype(np.int64)


def mix(values: Array) -> Array:
    """Hash integers to 64 bits (splitmix64): sums of hashes tell multisets apart but for a chance of 2^-64 a pair."""
    with np.errstate(over="ignore"):
        z = values.astype(_U) + _U(0x9E3779B97F4A7C15)
        z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
        return z ^ (z >> _U(31))


def salt(number: int) -> np.uint64:
    """A hash of one number, whose square of use is another salt."""
    return mix(np.array([number]))[0]
