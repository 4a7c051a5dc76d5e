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
from pyro_symmetric.groups.axes import spanned

SPARE = 2  # rows of a law beyond its columns, so that no vector fits it by chance
NO_GRADIENT = 1e-9  # relative magnitude that counts as none
# relative magnitude below which gradients of single precision may be rounding errors
QUIET = 0.03
# share of rounding errors from which on a quiet column counts as noise: exponents are
# integers to two digits
NOISY = 0.01
TINY = 1e-300  # divides where a column has no gradient

# ``(3, losses, length)``, with these rows: inner products, sums of their terms'
# magnitudes, and rounding errors of the first loss (in single precision; else zeros)
Products = dict[Place, Tensor]
PRODUCT, MAGNITUDE, ROUNDING = range(3)


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
    :param noise: the share of rounding errors in each column, for the first loss.
    """

    law: Tensor
    magnitude: Tensor
    noise: Tensor

    @property
    def audible(self) -> Tensor:
        """Columns with a gradient beyond rounding errors."""
        return (self.magnitude > NO_GRADIENT) & ~self.noisy

    @property
    def noisy(self) -> Tensor:
        """Columns whose gradient may be rounding errors."""
        return (self.noise >= NOISY) & (self.magnitude < QUIET)


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
    law, magnitude, rounding = torch.stack(sums, -1)
    of_first_loss = magnitude[: cell.units.count].nan_to_num(0.0, 0.0, 0.0).sum(0)
    errors = rounding.nan_to_num(0.0, 0.0, 0.0).sum(0)
    noise = errors / of_first_loss.clamp_min(TINY)
    # an output that is constant at a point has a gradient of rounding errors there
    least = EXACT * magnitude.nan_to_num(0.0, 0.0, 0.0).max() if len(magnitude) else 0.0
    valid = (magnitude.amax(1) > least) & magnitude.isfinite().all(1)
    law = law[valid]
    magnitude = magnitude[valid]
    if not len(law):
        return Matrix(law, magnitude.new_zeros(len(columns)), noise)
    largest = magnitude.amax(1, keepdim=True)
    return Matrix(law / largest, (magnitude / largest).amax(0), noise)


# are there enough rows? ---------------------------------------------------------------


class _Size(NamedTuple):
    """The rows of a cell's law, those that it would have if no unit were dead, and its
    columns with a gradient.
    """

    rows: int
    most: int
    columns: int


def _size(cell: LawCell, products: Products) -> _Size:
    matrix = matrix_of(cell, products, columns_of_reads(cell, products))
    losses = products[place_of(cell.axes[0])].shape[1]
    columns = int((matrix.magnitude > 0).sum())
    return _Size(len(matrix.law), losses * cell.units.count, columns)


def dead_cells(cells: Sequence[LawCell], products: Products) -> list[LawCell]:
    """Return the cells with an axis without gradient, or whose law has too few rows
    only because units are dead.
    """
    dead = list[LawCell]()
    for cell in cells:
        rows, most, columns = _size(cell, products)
        if columns < len(cell.axes) or rows < columns + SPARE <= most:
            dead.append(cell)
    return dead


def has_enough_rows(cell: LawCell, products: Products) -> bool:
    """Return whether live units give a cell's law more rows than it has columns, or
    could not even if no unit were dead.
    """
    size = _size(cell, products)
    least = len(columns_of_reads(cell, products)) + SPARE
    return size.rows >= least or size.most < least


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


class NullSpace(NamedTuple):
    """Small integers in the null space of a law.

    :param basis: vectors of small integers, which are independent.
    :param is_complete: whether they span the null space; if not, rows of the law are
        too alike, as those of one unit and one input are. True, too, if the law has too
        few rows to look for vectors.
    """

    basis: list[Exponents]
    is_complete: bool


def integer_null_space(
    matrix: Matrix, live: Tensor, buffers: Array, tolerance: float
) -> NullSpace:
    """Find small integers in the null space of a law's live columns.

    :param tolerance: of the law, relative to the magnitudes of its terms.
    """
    columns = live.nonzero().flatten().tolist()
    if not columns or len(matrix.law) < len(columns) + SPARE:
        return NullSpace([], True)
    magnitude = matrix.magnitude[columns]
    law = matrix.law[:, columns] / magnitude
    # Many rows average out rounding errors, which are relatively large where gradients
    # are small.
    count = min(len(law), 4 * len(columns) + 1_000)
    law = law[torch.linspace(0, len(law) - 1, count, device="cpu").long()]
    values, vectors = torch.linalg.svd(law, full_matrices=False)[1:]
    # Rounding errors along an axis without effect, as a softmax's, are in the products
    # along others, too, where none cancels them without its column.
    errors = (matrix.noise * matrix.magnitude)[matrix.noisy]
    noise = max([0.0, *errors.tolist()])
    # Pivots are chosen among the normalised columns: magnitudes may differ by six
    # orders, which would hide small ones.
    vanishes = values <= max(tolerance, noise) * math.sqrt(len(law))
    reduced, pivots = echelon(vectors[vanishes].numpy())
    reduced *= magnitude[pivots, None].numpy() / magnitude.numpy()
    # single precision gives exponents of axes with small gradients to two digits
    rounded = [small_integers(vector, max(1e-3, 1e3 * tolerance)) for vector in reduced]
    integers = [np.array(vector) for vector in rounded if vector]
    basis = []
    for vector in _sparse(integers, buffers[columns]):
        exponents = np.zeros(len(live), dtype=int)
        exponents[columns] = vector
        # what enters the units has a positive exponent
        sign = np.sign(exponents[exponents != 0][0])
        basis.append(tuple((sign * exponents).tolist()))
    return NullSpace(basis, len(basis) == len(reduced))


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
                    entries = spanned(row, axis.dim, axis.span).movedim(axis.dim, 0)
                    first = axis.index[:, : cell.units.count // count].flatten()
                    entries[first] += exponent
        flat = rows.flatten(1).numpy()
        hashes = np.random.default_rng(0).random(len(flat)) @ flat
        columns.append(flat[:, np.unique(hashes, return_index=True)[1]])
    return np.concatenate(columns, 1)
