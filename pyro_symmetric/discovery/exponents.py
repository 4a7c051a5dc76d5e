"""Exponents of multipliers: integer null spaces of conservation laws.

The law of a cell is a matrix of inner products of weights and gradients, with a row for
each loss and unit, and a column for each axis, or each read of an axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric.discovery.integer_algebra import (
    Exponents,
    echelon,
    independent,
    saturated,
    small_integers,
    vanishing,
)
from pyro_symmetric.discovery.reads import READ
from pyro_symmetric.discovery.registry import Array
from pyro_symmetric.discovery.trials import Bases, LawCell, Place, Proposal, place_of
from pyro_symmetric.discovery.whole_sites import EXACT
from pyro_symmetric.groups import Axis

# ``(2, losses, length)``: inner products, and sums of their terms' magnitudes
Products = dict[Place, Tensor]


class Column(NamedTuple):
    """A column of a law.

    :param axis: the number of an axis of the cell.
    :param places: where its inner products are: of the axis itself, or of reads.
    """

    axis: int
    places: list[Place]


def columns_of_reads(cell: LawCell, products: Collection[Place]) -> list[Column]:
    """Return a column for each read of each axis."""
    columns = list[Column]()
    for number, axis in enumerate(cell.axes):
        for leaf, *lines in products:
            if (leaf.split(READ)[0], *lines) == place_of(axis):
                columns.append(Column(number, [(leaf, axis.dim, axis.span)]))
    return columns


def columns_of_axes(cell: LawCell, of_reads: Sequence[Column]) -> list[Column]:
    """Return a column for each axis, in which its reads are added up."""
    columns = [Column(number, []) for number in range(len(cell.axes))]
    for read in of_reads:
        columns[read.axis].places.extend(read.places)
    return columns


class Matrix(NamedTuple):
    """The law of a cell.

    :param law: ``(losses * units, columns)``, each row relative to the largest
        magnitude of its own.
    :param magnitude: the largest magnitude of each column.
    """

    law: Tensor
    magnitude: Tensor


def matrix_of(
    cell: LawCell, products: Products, columns: Sequence[Column] = ()
) -> Matrix:
    """Return the matrix of a cell's law, without rows of no magnitude.

    :param columns: the columns; one for each axis by default.
    """
    columns = columns or [Column(k, [place_of(a)]) for k, a in enumerate(cell.axes)]
    sums = []
    for number, places in columns:
        index = cell.axes[number].index
        terms = [products[place][..., index].sum(2).flatten(1) for place in places]
        sums.append(torch.stack(terms).sum(0) if len(terms) > 1 else terms[0])
    law, magnitude = torch.stack(sums, -1)
    # an output that is constant at a point has a gradient of rounding errors there
    least = EXACT * magnitude.nan_to_num(0.0, 0.0, 0.0).max() if len(magnitude) else 0.0
    valid = (magnitude.amax(1) > least) & magnitude.isfinite().all(1)
    law = law[valid]
    magnitude = magnitude[valid]
    if not len(law):
        return Matrix(law, magnitude.new_zeros(len(columns)))
    largest = magnitude.amax(1, keepdim=True)
    return Matrix(law / largest, (magnitude / largest).amax(0))


# are there enough rows? ---------------------------------------------------------------


class _Size(NamedTuple):
    """The rows of a cell's law, those that it would have if no unit were dead, and its
    axes with a gradient.
    """

    rows: int
    most: int
    axes: int


def _size(cell: LawCell, products: Products) -> _Size:
    law, magnitude = matrix_of(cell, products, columns_of_reads(cell, products))
    losses = products[place_of(cell.axes[0])].shape[1]
    return _Size(len(law), losses * cell.units.count, int((magnitude > 0).sum()))


def dead_cells(cells: Sequence[LawCell], products: Products) -> list[LawCell]:
    """Return the cells with an axis without gradient, or whose law has too few rows
    only because units are dead.
    """
    dead = list[LawCell]()
    for cell in cells:
        rows, most, axes = _size(cell, products)
        if axes < len(cell.axes) or rows < axes + 2 <= most:
            dead.append(cell)
    return dead


def has_rows(cell: LawCell, products: Products) -> bool:
    """Return whether live units give a cell's law as many rows as it needs, or all
    units together could not.
    """
    rows, most, axes = _size(cell, products)
    return axes + 2 > most or rows >= min(3 * axes, axes + 4, most)


# null spaces --------------------------------------------------------------------------


def agreeing(
    vectors: Sequence[Exponents], axis_of: Array, seen: Array, axes: int
) -> list[Exponents]:
    """Return a basis of the parities in which all reads of an axis agree.

    Two reads with exponents 1 and -1 agree, as both change signs.

    :param vectors: a basis of the exponents of reads.
    :param axis_of: the axis of each read.
    :param seen: whether the linearised twin sees a read; others agree with any.
    :param axes: the number of axes.
    """
    if not vectors:
        return []
    parities = saturated(np.array(vectors)) % 2
    reads = np.flatnonzero(seen)
    numbers, first, place = np.unique(
        axis_of[reads], return_index=True, return_inverse=True
    )
    columns = parities[:, reads[first]]
    apart = (parities[:, reads] + columns[:, place]) % 2
    by_axis = []
    for parity in vanishing(columns, apart, True):
        signs = np.zeros(axes, dtype=int)
        signs[numbers] = parity
        by_axis.append(tuple(signs.tolist()))
    return by_axis


def integer_null_space(
    law: Tensor, magnitude: Tensor, live: Tensor, buffers: Array, null: float
) -> list[Exponents]:
    """Return a basis of small integers of the null space of a law's live columns."""
    columns = live.nonzero().flatten().tolist()
    if not columns or len(law) < len(columns) + 2:
        return []
    law = (law / magnitude)[:, columns]
    magnitude = magnitude[columns]
    # Many rows average out rounding errors, which are relatively large where gradients
    # are small.
    count = min(len(law), 4 * len(columns) + 1_000)
    law = law[torch.linspace(0, len(law) - 1, count, device="cpu").long()]
    values, vectors = torch.linalg.svd(law, full_matrices=False)[1:]
    # Pivots are chosen among the normalised columns: magnitudes may differ by six
    # orders, which would hide small ones.
    reduced, pivots = echelon(vectors[values <= null * math.sqrt(len(law))].numpy())
    reduced *= magnitude[pivots, None].numpy() / magnitude.numpy()
    # single precision gives exponents of axes with small gradients to two digits
    integers = [small_integers(vector, max(1e-3, 100 * null)) for vector in reduced]
    null_space = []
    for vector in _sparse([np.array(v) for v in integers if v], buffers[columns]):
        exponents = np.zeros(len(live), dtype=int)
        exponents[columns] = vector
        # what enters the units has a positive exponent
        sign = np.sign(exponents[exponents != 0][0])
        null_space.append(tuple((sign * exponents).tolist()))
    return null_space


def _sparse(vectors: list[Array], buffers: Array) -> list[Array]:
    """Add or subtract vectors of a basis so that fewer touch buffers, and fewer
    exponents differ from zero.
    """

    def cost(vector: Array) -> list[int]:
        counts = (vector[buffers].any(), np.count_nonzero(vector), (vector < 0).sum())
        return [*map(int, counts)]

    for i, j in [*itertools.permutations(range(len(vectors)), 2)] * 2:
        first = vectors[i]
        second = vectors[j]
        # else neither sum is sparser than its terms
        if (first * second).any():
            sums = (first, first + second, first - second)
            vectors[i] = min(sums, key=cost)
    return vectors


def independent_of_others(
    bases: Bases, shapes: Mapping[str, torch.Size], modulo_two: bool
) -> Bases:
    """Keep of each cell's basis, sparse vectors first, what the multipliers of other
    units don't span.
    """
    remaining = dict(bases)
    for cell, basis in bases.items():
        multipliers_of_others = list[Proposal]()
        for spanning, vectors in bases.items():
            if spanning.units.name in cell.spanning:
                multipliers_of_others += [(spanning, vector) for vector in vectors]
        # a lone unit's rows and columns may cancel
        if basis and (multipliers_of_others or cell.units.count == 1):
            basis = sorted(basis, key=np.count_nonzero)
            multipliers = [
                *multipliers_of_others,
                *((cell, vector) for vector in basis),
            ]
            entries = exponents_of_entries(multipliers, cell.units.count, shapes)
            chosen = [
                k - len(multipliers_of_others) for k in independent(entries, modulo_two)
            ]
            remaining[cell] = [basis[k] for k in chosen if k >= 0]
    return remaining


def exponents_of_entries(
    multipliers: Sequence[Proposal], count: int, shapes: Mapping[str, torch.Size]
) -> Array:
    """Return a row for each multiplier: the exponents of all entries of its sites, if
    the first of ``count`` units is multiplied; of equal columns one is kept.
    """
    columns = []
    for site in sorted({axis.site for cell, _ in multipliers for axis in cell.axes}):
        shape = (len(multipliers), *shapes[site])
        rows = torch.zeros(shape, dtype=torch.int16, device="cpu")
        for row, (cell, exponents) in zip(rows, multipliers, strict=True):
            for axis, exponent in zip(cell.axes, exponents, strict=True):
                if axis.site == site and exponent:
                    entries = spanned(row, axis).movedim(axis.dim, 0)
                    first = axis.index[:, : cell.units.count // count].flatten()
                    entries[first] += exponent
        flat = rows.flatten(1).numpy()
        hashes = np.random.default_rng(0).random(len(flat)) @ flat
        columns.append(flat[:, np.unique(hashes, return_index=True)[1]])
    return np.concatenate(columns, 1)


def spanned(value: Tensor, axis: Axis) -> Tensor:
    """Merge the dimensions that an axis spans."""
    return value.flatten(axis.dim, axis.dim + axis.span - 1)
