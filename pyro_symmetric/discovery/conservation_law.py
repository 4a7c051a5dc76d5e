r"""Scales, signs and shifts of units, from conservation laws of the gradient.

Let :math:`W_a[u]` be the weights of a unit ``u`` along an axis ``a``. If outputs are
invariant under
:math:`W_a[u] \to \lambda^{e_a} W_a[u]`, so is every loss :math:`L` of them, and its
derivative in :math:`\log\lambda` vanishes, at all weights and for all inputs. This is a
conservation law, in the sense of Noether:

.. math:: \sum_a e_a \, \langle W_a[u], \partial L / \partial W_a[u] \rangle = 0.

Each random loss adds one row for each unit to the matrix of these inner products, whose
columns are the axes; the exponents are the small integers of its null space. If a bias
may be shifted, the entries of its gradient sum to zero.

Gradients are taken in a twin of the network, in which a clamp, say, blocks scales even
where its inputs don't reach its bounds. Signs obey the same law, modulo two, in a
linearised twin (:mod:`~pyro_symmetric.discovery.linear_twin`), in which each read of a
parameter has a law of its own (:mod:`~pyro_symmetric.discovery.reads`). Whatever the
law proposes is then tried on the network itself.

Source: Kunin et al. 2021, arXiv 2012.04728 (conservation laws of the gradient);
Laurent, Aldea & Franchi 2024, arXiv 2310.08287 (scalings); Wiese et al. 2023, arXiv
2304.02902 (signs).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pyro_symmetric.discovery.cells import module_name, unused
from pyro_symmetric.discovery.exponents import (
    MAGNITUDE,
    PRODUCT,
    ROUNDING,
    SPARE,
    NullSpace,
    Products,
    agreeing,
    columns_of_axes,
    columns_of_reads,
    dead_cells,
    exponents_of_entries,
    has_enough_rows,
    independent_of_others,
    integer_null_space,
    matrix_of,
)
from pyro_symmetric.discovery.integer_algebra import Exponents, echelon, independent
from pyro_symmetric.discovery.linear_twin import NotDifferentiable, Pass
from pyro_symmetric.discovery.registry import Array
from pyro_symmetric.discovery.repeats import (
    Repeats,
    UnequalBlocks,
    copies,
    without_repeats,
)
from pyro_symmetric.discovery.rotations import Slope, rotating_units
from pyro_symmetric.discovery.trace import Trace
from pyro_symmetric.discovery.trials import (
    RESCALED,
    Bases,
    LawCell,
    Loss,
    Network,
    Place,
    Point,
    Trials,
    pairs_in,
    place_of,
)
from pyro_symmetric.discovery.whole_sites import EXACT, moves_of_whole_sites
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.axes import spanned
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.weights import Weights

FLOAT64 = 6_000_000  # networks with more weights are differentiated in float32
SMALL = 20_000  # networks with fewer weights are probed at several points
# that replace the first one of a large network, if its laws can't be solved there
MORE_POINTS = 3
# of a large and of a small network; cells that need more get no multipliers
MOST_LOSSES = (6, 48)
# signs that are tried of each cell of a small network, if some have no law
MOST_PARITIES = 63
# scales of trials; a larger one shows the epsilon of a norm, too
FACTOR = {torch.float64: 4.0, torch.float32: 64.0}

# whether these are the exponents of scales, of signs, or of both
Moves = dict[Exponents, frozenset[Move]]


@torch.inference_mode(False)
@torch.enable_grad()
def with_multipliers(
    units: Sequence[Units],
    fixed: Sequence[Units],
    traces: Sequence[Trace],
    net: nn.Module,
    shapes: Mapping[str, torch.Size],
    slices: Mapping[str, Array],
    held: Collection[str] = (),
    logits: bool = False,
) -> Multiplied:
    """Add to units the multipliers that they admit, and units that are only multiplied
    or shifted.

    :param units: the units that permute, outer ones first.
    :param fixed: units that nothing permutes.
    :param traces: the forward passes whose outputs matter.
    :param net: the network that was traced.
    :param shapes: the shapes of all sites.
    :param slices: for matrices whose rows fall into slices that read different inputs,
        the slice of each row.
    :param held: sites that stay: frozen, or used by no pass.
    :param logits: whether outputs go through a softmax.
    """
    by_name = {unit_set.name: unit_set for unit_set in units}
    network = Network.of(
        [Pass(trace, logits) for trace in traces], net, shapes, SMALL, FLOAT64
    )
    cells = list[LawCell]()
    for unit_set in (*units, *fixed):
        inner = [inner_set for inner_set in units if inner_set.parent == unit_set.name]
        spanning = {inner_set.name for inner_set in inner}
        # all others together may do what a lone unit does
        if network.small and unit_set.count == 1 and not unit_set.moves:
            spanning = {cell.units.name for cell in cells}
        axes = _axes_of(unit_set, inner, network, slices, held)
        if axes:
            cells.append(LawCell(unit_set, axes, frozenset(spanning)))
    try:
        law = _solved(network, cells)
    except NotDifferentiable:  # permutations alone are found
        return Multiplied(list(units), True)
    multipliers = _multipliers(law.scales, law.signs)
    for cell in cells:
        _add_multipliers(by_name, cell, multipliers.pop(cell, {}))
    shifted = _add_whole_sites(by_name, law, held)
    for cell, moves in multipliers.items():  # of all units of a cell together
        if shifted & {axis.site for axis in cell.axes}:
            law.undecided = True  # what is shifted isn't multiplied in a group
        else:
            _add_multipliers(by_name, cell, moves)
    return Multiplied(list(by_name.values()), law.undecided, law)


def grouped(units: Sequence[Units], shapes: Mapping[str, torch.Size]) -> Group:
    """Build the group of all units, without multipliers that permutations don't carry
    onto one another.
    """
    with contextlib.suppress(ValueError):
        return Group(units, shapes, of_network=True)
    permuted = dict[str, Units]()
    for unit_set in units:
        if "permute" in unit_set.moves:
            axes = tuple(replace(a, exponent=0, epsilon=None) for a in unit_set.axes)
            moves = frozenset[Move]({"permute"})
            permuted[unit_set.name] = replace(unit_set, axes=axes, moves=moves)

    def widened(known: dict[str, Units], further: Sequence[Units]) -> dict[str, Units]:
        """Add the units that fit in with the others, by bisection."""
        wider = known | {unit_set.name: unit_set for unit_set in further}
        try:
            return dict(Group(wider.values(), shapes).units)
        except ValueError:
            half = len(further) // 2
            if not half:
                return known
            return widened(widened(known, further[:half]), further[half:])

    families = widened(permuted, units)
    return Group(families.values(), shapes, of_network=True)


class Multiplied(NamedTuple):
    """Units with their multipliers; whether there may be more (of units that nothing
    switches on, or of networks without derivatives, nothing is known); and the law, if
    there is one.
    """

    units: list[Units]
    undecided: bool
    law: Law | None = None


# the law ------------------------------------------------------------------------------


@dataclass(eq=False)
class Law:
    """The conservation laws of a network's units, from random losses at random points.

    :ivar scales: for each cell a basis of the exponents of scales.
    :ivar signs: for each cell a basis of the parities of signs.
    :ivar undecided: whether units may have more multipliers.
    :ivar slopes: of the first loss of the twin of scales at each point.
    """

    network: Network
    cells: Sequence[LawCell]
    repeats: Repeats
    points: list[Point] = field(default_factory=list)
    scales: Bases = field(default_factory=dict)
    signs: Bases = field(default_factory=dict)
    undecided: bool = False
    slopes: list[Slope] = field(default_factory=list)

    def rotating(self, group: Group) -> tuple[str, ...]:
        """Return the names of units that may rotate, by a loss at each point."""
        tolerance = self.network.tolerances.law
        repeats = self.repeats
        return rotating_units(
            group, self.slopes, tolerance, repeats.stand_in, repeats.keys
        )

    def whole_sites(self) -> dict[str, list[Move]]:
        """Find the moves of whole sites, in at most two blocks of each run."""
        return moves_of_whole_sites(self.network, self.slopes[0])

    def solve(self) -> None:
        """Find the scales and the signs of all cells."""
        network = self.network
        cells = self.cells
        self.points = network.points()
        test_points = network.test_points()
        most = MOST_LOSSES[network.small]
        factor = FACTOR[network.dtype]
        num_losses = max(len(self.points), min(most, self._needed_losses(most)))
        products = self._inner_products(num_losses, "scale")
        null_spaces = self._null_spaces(products)
        unsolved = self._unsolved(products, null_spaces)
        if unsolved and not network.small:
            # A unit that is silent at one point (a ReLU that no input switches on)
            # isn't at another. Without fitted statistics, signals may grow from layer
            # to layer, until they drown what running means contribute.
            test_points = [*test_points, *self.points]
            self.points = [
                network.fresh_point(fits_statistics=True) for _ in range(MORE_POINTS)
            ]
            self.slopes = []
            num_losses = max(num_losses, MORE_POINTS)
            products = self._inner_products(num_losses, "scale")
            null_spaces = self._null_spaces(products)
            unsolved = self._unsolved(products, null_spaces)
        sites = {axis.site for cell in unsolved for axis in cell.axes}
        if any(site in self.repeats.block for site in sites):
            raise UnequalBlocks
        self.undecided = bool(unsolved)
        trials = Trials(network, [*self.points, *test_points])
        scales = {cell: space.basis for cell, space in null_spaces.items()}
        scales = trials.confirmed(scales, factor)
        self.scales = independent_of_others(scales, network.shapes, False)
        if network.small:
            num_losses = max(num_losses, min(most, self._most_reads() + SPARE))
        try:
            linear = self._inner_products(num_losses, "flip")
            signs = {
                cell: self._signs(cell, self.scales[cell], products, linear)
                for cell in cells
            }
        except NotDifferentiable:
            self.undecided = True
            self.signs = {cell: [] for cell in cells}
            return
        self.signs = trials.confirmed(signs, -1.0)
        if network.small:
            self._add_signs_that_laws_miss(trials, products, linear)
            together = [_together(cell) for cell in cells]
            self.scales |= self._scales_together(trials, together, products)
            self.signs |= self._signs_together(trials, together, products, linear)
        self.signs = independent_of_others(self.signs, network.shapes, True)

    # inner products -------------------------------------------------------------------

    def _needed_losses(self, most: int) -> int:
        """Return how many losses the cells need that have few enough axes.

        There are rows to spare in a small network, as units may be dead; but an image's
        three channels, with one axis, take one.
        """
        small = self.network.small
        needed = 1
        for cell in self.cells:
            axes = len(cell.axes)
            count = cell.units.count
            if axes + 4 <= most * count:
                needed = max(needed, math.ceil((3 * axes + 4 * small) / count))
            if small:  # all units together have one row a loss
                needed = max(needed, axes + 4)
        return needed

    def _most_reads(self) -> int:
        """Return how many reads of its axes a cell has at most."""
        further_reads = Counter(self.network.leaves("flip").values())
        most = 0
        for cell in self.cells:
            most = max(most, sum(1 + further_reads[axis.site] for axis in cell.axes))
        return most

    def _inner_products(self, num_losses: int, twin: Move) -> Products:
        r"""Compute :math:`\langle W_a[i], \partial L / \partial W_a[i]\rangle` for all
        positions ``i`` of all axes, and what goes with them.
        """
        network = self.network
        products = Products()
        leaves = network.leaves(twin)
        for axis in itertools.chain.from_iterable(cell.axes for cell in self.cells):
            further = (leaf for leaf, site in leaves.items() if site == axis.site)
            for leaf in (axis.site, *further):
                shape = (3, num_losses, axis.length(network.shapes))
                values = torch.zeros(shape, dtype=torch.float64, device="cpu")
                products[leaf, axis.dim, axis.span] = values
        for number, loss in enumerate(self._losses(num_losses, twin)):
            self._add_products(products, loss.weights, loss.gradient, number)
            if loss.rescaled:
                self._add_rounding(products, loss)
            known = self.slopes
            is_new_point = not known or known[-1].weights is not loss.weights
            if twin == "scale" and is_new_point:
                known.append(Slope(loss.weights, loss.gradient))
            enough = (has_enough_rows(cell, products) for cell in self.cells)
            if len(self.points) == 1 and all(enough):
                break  # losses of large networks are dear
        return products

    def _add_products(
        self, products: Products, weights: Weights, gradient: Weights, number: int
    ) -> None:
        """Fill in the inner products of a loss, and the sums of their terms'
        magnitudes.
        """
        places = defaultdict[str, list[Place]](list)
        for place in products:
            places[place[0]].append(place)
        for leaf in places.keys() & gradient.keys():
            weight = weights[leaf]
            epsilon = self.network.epsilons.get(leaf)
            weight = weight + epsilon if epsilon else weight
            terms = (weight * gradient[leaf].conj()).real
            for place in places[leaf]:
                products[place][PRODUCT, number] = _sums(terms, place)
            magnitudes = terms.abs_()
            for place in places[leaf]:
                products[place][MAGNITUDE, number] = _sums(magnitudes, place)

    def _add_rounding(self, products: Products, loss: Loss) -> None:
        """Fill in the rounding errors of the first loss in the backward pass: how much
        its inner products differ from those of the rescaled loss.
        """
        again = {p: torch.zeros_like(value[:, :1]) for p, value in products.items()}
        self._add_products(again, loss.weights, loss.rescaled, 0)
        for place, value in products.items():
            product = again[place][PRODUCT, 0] / RESCALED
            value[ROUNDING, 0] = (product - value[PRODUCT, 0]).abs()

    def _losses(self, num_losses: int, twin: Move) -> Iterator[Loss]:
        """Iterate over random losses of a twin, at one point after another."""
        for k, point in enumerate(self.points):
            count = len(range(k, num_losses, len(self.points)))
            rescales = k == 0 and self.network.dtype == torch.float32
            yield from self.network.losses(point, count, twin, rescales)

    # proposals ------------------------------------------------------------------------

    def _unsolved(
        self, products: Products, null_spaces: Mapping[LawCell, NullSpace]
    ) -> list[LawCell]:
        """Return the cells whose law has too few rows, or too many alike."""
        unsolved = dead_cells(self.cells, products)
        for cell, null_space in null_spaces.items():
            if not null_space.is_complete:
                unsolved.append(cell)
        return unsolved

    def _null_spaces(self, products: Products) -> dict[LawCell, NullSpace]:
        """Solve the laws of all cells for the exponents of scales."""
        return {cell: self._null_space(cell, products) for cell in self.cells}

    def _null_space(self, cell: LawCell, products: Products) -> NullSpace:
        """Solve a cell's law for the exponents of scales."""
        matrix = matrix_of(cell, products)
        # nothing is known of an expert that no input reaches, say
        if not bool((matrix.magnitude > 0).all()):
            return NullSpace([], True)
        movable = [
            not axis.buffer or axis.site.rpartition(".")[2].startswith("running_")
            for axis in cell.axes
        ]
        live = matrix.audible & torch.tensor(movable, device="cpu")
        buffers = np.array([axis.buffer for axis in cell.axes])
        return integer_null_space(matrix, live, buffers, self.network.tolerances.null)

    def _signs(
        self,
        cell: LawCell,
        scales: list[Exponents],
        products: Products,
        linear: Products,
    ) -> list[Exponents]:
        """Propose a basis of the parities of a cell's axes: 1 where a sign enters, else
        0.

        :param products: inner products in the twin of scales.
        :param linear: inner products in the linearised twin.
        """
        tolerances = self.network.tolerances
        count = len(cell.axes)
        matrix = matrix_of(cell, products)
        if not bool((matrix.magnitude > 0).all()):
            return []
        columns = columns_of_reads(cell, linear)
        of_reads = matrix_of(cell, linear, columns)
        if len(of_reads.law) < len(columns) + SPARE:
            # too few losses to tell reads apart
            self.undecided |= len(columns) > count
            columns = columns_of_axes(cell, columns)
            of_reads = matrix_of(cell, linear, columns)
        movable = torch.tensor([a.epsilon is None for a in cell.axes], device="cpu")
        live = matrix.audible & movable
        axis_of = torch.tensor([column.axis for column in columns], device="cpu")
        seen = live[axis_of] & of_reads.audible
        seen_axes = torch.zeros_like(live)
        seen_axes[axis_of[seen]] = True
        # Axes that only even functions read flip together; what is nearly silent,
        # trials can't decide.
        unseen = live & ~seen_axes & (matrix.magnitude > tolerances.outputs)
        buffers = np.array([cell.axes[k].buffer for k in axis_of])
        vectors = integer_null_space(of_reads, seen, buffers, tolerances.null).basis
        null_space = agreeing(vectors, axis_of.numpy(), seen.numpy(), count)
        proposed = np.array([unseen.tolist(), *null_space], dtype=int)
        # Gains and biases are the pivots, so that streams flip without the gains of
        # their normalisations.
        sizes = [self.network.shapes[axis.site].numel() for axis in cell.axes]
        order = np.argsort(sizes, kind="stable")
        reduced = echelon(proposed[:, order], True)[0][:, order.argsort()].astype(int)
        basis = [tuple(parity) for parity in reduced.tolist()]
        shared = [
            parity
            for parity in map(_parity, scales)
            if len(independent([*basis, parity], True)) == len(basis)
        ]
        return _independent([*shared, *basis])

    def _add_signs_that_laws_miss(
        self, trials: Trials, products: Products, linear: Products
    ) -> None:
        """Try further parities, one by one, and add those that hold.

        An even power has no law: ``z @ z.T`` keeps its value when a unit of ``z``
        changes sign, though no other factor undoes that. Nor have several axes that
        only even functions read.
        """
        for cell, basis in self.signs.items():
            if not self._has_effect(cell, products):
                continue  # what has no effect may change sign in any case
            unseen = int((~matrix_of(cell, linear).audible).sum())
            if not self.network.has_powers and unseen < 2:
                continue
            further = [
                parity
                for parity in _further_parities(cell, basis)
                if trials.confirmed({cell: [parity]}, -1.0)[cell]
            ]
            self.signs[cell] = _independent([*basis, *further])

    def _has_effect(self, cell: LawCell, products: Products) -> bool:
        return bool(matrix_of(cell, products).audible.all())

    def _scales_together(
        self, trials: Trials, together: Sequence[LawCell], products: Products
    ) -> Bases:
        """Find scales of all units of a cell together, none of which has its own.

        A norm without an epsilon lets all units in front of it be scaled together. Of
        one with an epsilon that trials don't show nothing is known.
        """
        proposed = Bases()
        exact = Bases()
        self.undecided |= bool(dead_cells(together, products))
        for cell in together:
            # whole sites are scaled by moves of their own
            proposed[cell] = [
                exponents
                for exponents in self._null_space(cell, products).basis
                if len(_moved_sites(cell, exponents)) > 1
            ]
        factor = FACTOR[self.network.dtype]
        for cell, basis in self._further(trials, proposed, self.scales, factor).items():
            law = matrix_of(cell, products).law
            errors = (law @ law.new_tensor(basis).T).abs().amax(0)
            pairs = zip(basis, errors.tolist(), strict=True)
            exact[cell] = [exponents for exponents, error in pairs if error <= EXACT]
            self.undecided |= len(exact[cell]) < len(basis)
        return exact

    def _signs_together(
        self,
        trials: Trials,
        together: Sequence[LawCell],
        products: Products,
        linear: Products,
    ) -> Bases:
        """Find signs of all units of a cell together, none of which has its own."""
        proposed = Bases()
        for cell in together:
            if self._has_effect(cell, products):
                parities = self._signs(cell, [], products, linear)
                if self.network.has_powers or not self._has_effect(cell, linear):
                    parities += _further_parities(cell, parities)
                parities.append(tuple(int(axis.epsilon is None) for axis in cell.axes))
                proposed[cell] = parities
        return self._further(trials, proposed, self.signs, -1.0)

    def _further(
        self, trials: Trials, proposed: Bases, known: Bases, factor: float
    ) -> Bases:
        """Return the proposals for lone units that hold, and that neither other units
        nor earlier proposals span.
        """
        known_pairs = pairs_in(known)
        proposed_pairs = pairs_in(proposed)
        if not proposed_pairs:
            return {}
        shapes = self.network.shapes
        further = Bases()
        entries = exponents_of_entries([*known_pairs, *proposed_pairs], 1, shapes)
        spanning, rows = np.split(entries, [len(known_pairs)])
        for (cell, exponents), row in zip(proposed_pairs, rows, strict=True):
            with_row = np.vstack([spanning, row])
            if len(spanning) in independent(with_row, factor < 0):
                if trials.confirmed({cell: [exponents]}, factor)[cell]:
                    further.setdefault(cell, []).append(exponents)
                    spanning = with_row
        return further


def _solved(network: Network, cells: Sequence[LawCell]) -> Law:
    """Solve the laws of a network: in two of each run of equal blocks, if it is large
    and that tells those of all.
    """
    if not network.small and len(network.passes) == 1:
        (forward,) = network.passes
        repeats = without_repeats(forward.trace, [cell.axes for cell in cells])
        if repeats.block:
            with contextlib.suppress(UnequalBlocks):
                return _solved_in_two_blocks(network, cells, repeats)
    law = Law(network, cells, Repeats(None, {}, {}))
    law.solve()
    return law


def _solved_in_two_blocks(
    network: Network, cells: Sequence[LawCell], repeats: Repeats
) -> Law:
    """Solve the laws of two of each run of equal blocks, and copy them to the others.

    :raises UnequalBlocks: if that can't be.
    """
    (forward,) = network.passes
    reduced = replace(
        network,
        passes=[Pass(forward.trace, forward.logits, repeats.graph)],
        weights={
            site: value
            for site, value in network.weights.items()
            if repeats.of(site)[1] < 2
        },
    )
    of_two = _in_two_blocks(cells, repeats)
    # Units inside the second block tell which multipliers of outer ones, heads say, are
    # products of theirs.
    second = [
        cell
        for cell in cells
        if all(repeats.of(axis.site)[1] == 1 for axis in cell.axes)
    ]
    law = Law(reduced, [*dict.fromkeys(of_two.values()), *second], repeats)
    law.solve()
    of_whole_sites = law.whole_sites()
    for site, first in repeats.stand_in.items():
        if site in reduced.weights and of_whole_sites.get(site) != of_whole_sites.get(
            first
        ):
            raise UnequalBlocks
    scales = law.scales
    signs = law.signs
    law.scales = {}
    law.signs = {}
    for cell, two in of_two.items():
        law.scales[cell] = copies(scales[two], two.axes, cell.axes, repeats, False)
        law.signs[cell] = copies(signs[two], two.axes, cell.axes, repeats, True)
    return law


# axes of the law ----------------------------------------------------------------------


def _axes_of(
    units: Units,
    inner: Sequence[Units],
    network: Network,
    slices: Mapping[str, Array],
    held: Collection[str],
) -> tuple[Axis, ...]:
    """Cut the axes of units into pieces with one exponent each: blocks that hold the
    same inner unit share theirs.
    """
    axes = list[Axis]()
    for axis in units.axes:
        if axis.site in held:
            continue
        # the inner unit's block at each position
        owner = torch.full((axis.length(network.shapes),), -1, device="cpu")
        blocks = (
            unit_axis.index
            for unit_set in inner
            for unit_axis in unit_set.axes
            if place_of(unit_axis) == place_of(axis)
        )
        for number, row in enumerate(itertools.chain.from_iterable(blocks)):
            owner[row] = number
        pieces = defaultdict[int, list[Tensor]](list)
        for k, row in enumerate(axis.index):
            first = int(owner[row[0]])
            shared = first >= 0 and bool((owner[row] == first).all())
            pieces[first if shared else -1 - k].append(row)
        for rows in pieces.values():
            piece = replace(
                axis,
                exponent=0,
                epsilon=network.epsilons.get(axis.site),
                index=torch.stack(rows),
            )
            axes += _cut(piece, slices.get(axis.site), network.shapes)
    return tuple(axes)


def _cut(
    axis: Axis, slices: Array | None, shapes: Mapping[str, torch.Size]
) -> list[Axis]:
    """Cut the columns of a small matrix into those of each slice of rows, if slices
    read different inputs.
    """
    rows, columns = (*shapes[axis.site], 1)[:2]
    if (
        slices is None
        or (axis.dim, axis.span, len(axis.index)) != (1, 1, 1)
        or rows * columns > SMALL
    ):
        return [axis]
    pieces = (
        torch.from_numpy(np.flatnonzero(slices == number))[:, None]
        for number in np.unique(slices)
    )
    return [
        replace(axis, dim=0, span=2, index=piece * columns + axis.index)
        for piece in pieces
    ]


def _in_two_blocks(
    cells: Sequence[LawCell], repeats: Repeats
) -> dict[LawCell, LawCell]:
    """Map each cell to its part in two blocks of each run; one inside a block, to that
    in its place in the first.
    """
    parts = dict[frozenset[Any], LawCell]()
    for cell in cells:
        axes = tuple(axis for axis in cell.axes if repeats.of(axis.site)[1] < 2)
        if any(repeats.of(axis.site)[1] == 0 for axis in axes):
            parts[frozenset(repeats.keys(axes))] = replace(cell, axes=axes)
    return {cell: parts[frozenset(repeats.keys(cell.axes))] for cell in cells}


def _sums(value: Tensor, place: Place) -> Tensor:
    """Sum a site's entries over all dimensions but those that an axis spans."""
    _, dim, span = place
    along = spanned(value, dim, span).unsqueeze(-1)
    return along.sum([other for other in range(along.dim()) if other != dim])


# units with their multipliers ---------------------------------------------------------


def _multipliers(scales: Bases, signs: Bases) -> dict[LawCell, Moves]:
    """Return for each cell the exponents of its multipliers, and whether these are
    scales, signs or both.
    """
    multipliers = defaultdict[LawCell, Moves](dict)
    for cell, exponents in pairs_in(scales):
        multipliers[cell][exponents] = frozenset({"scale"})
    for cell, parity in pairs_in(signs):
        moves = multipliers[cell]
        equal = (exponents for exponents in moves if _parity(exponents) == parity)
        exponents = next(equal, parity)
        moves[exponents] = moves.get(exponents, frozenset()) | {"flip"}
    return multipliers


def _add_whole_sites(
    by_name: dict[str, Units], law: Law, held: Collection[str]
) -> set[str]:
    """Add units for vectors that may be shifted as a whole, and for sites that may be
    scaled as a whole; return the sites that are shifted.
    """
    shifted = set[str]()
    scaled = list[set[str]]()
    acted_on = list[set[str]]()
    for unit_set in by_name.values():
        acted_on += [{axis.site} for axis in unit_set.axes]
        if "scale" in unit_set.moves:
            scaled.append({axis.site for axis in unit_set.axes if axis.exponent})
    taken = {"scale": scaled, "shift": acted_on}
    moves_of = law.whole_sites()
    for site, shape in law.network.shapes.items():
        for move in moves_of.get(law.repeats.stand_in.get(site, site), ()):
            if site in held or {site} in taken[move]:
                continue
            if move == "shift":
                shifted.add(site)
            name = f"{move} of {site}"
            index = torch.arange(shape[0], device="cpu")
            axis = Axis(site, 0, index[:, None], int(move == "scale"))
            by_name[name] = Units(name, 1, (axis,), moves=frozenset({move}))
    return shifted


def _together(cell: LawCell) -> LawCell:
    """Return all units of a cell as one, whose moves are no units' own."""
    axes = [replace(axis, index=axis.index.reshape(-1, 1)) for axis in cell.axes]
    units = Units(f"all of {cell.units.name}", 1, tuple(axes), moves=frozenset())
    return LawCell(units, tuple(axes), frozenset())


def _moved_sites(cell: LawCell, exponents: Exponents) -> set[str]:
    """Return the sites that multipliers of a cell change."""
    pairs = zip(cell.axes, exponents, strict=True)
    return {axis.site for axis, exponent in pairs if exponent}


def _further_parities(cell: LawCell, basis: Sequence[Exponents]) -> Iterator[Exponents]:
    """Iterate over parities of a cell's axes that a basis doesn't span, those of few
    axes first, and :data:`MOST_PARITIES` at most.
    """
    pivots = echelon(np.array(basis), True)[1] if basis else []
    free = [k for k, a in enumerate(cell.axes) if k not in pivots and a.epsilon is None]
    sizes = range(1, len(free) + 1)
    choices = (
        chosen for size in sizes for chosen in itertools.combinations(free, size)
    )
    for chosen in itertools.islice(choices, MOST_PARITIES):
        yield tuple(int(k in chosen) for k in range(len(cell.axes)))


def _independent(vectors: Sequence[Exponents]) -> list[Exponents]:
    """Return the parities that earlier ones don't span."""
    return [vectors[k] for k in independent(vectors, True)]


def _parity(exponents: Exponents) -> Exponents:
    """Return the exponents modulo two: those of a sign."""
    return tuple(exponent % 2 for exponent in exponents)


def _add_multipliers(
    by_name: dict[str, Units], cell: LawCell, multipliers: Moves
) -> None:
    """Record the exponents of a cell: the first on its units, if they permute; further
    ones ride along.

    :param by_name: name -> units, which are changed and added to.
    """

    def order(exponents: Exponents) -> tuple[bool, int]:
        """Rank exponents: those of running statistics, which may be held, ride
        along.
        """
        touched = [k for k, exponent in enumerate(exponents) if exponent]
        return any(cell.axes[k].buffer for k in touched), touched[0]

    host = by_name.get(cell.units.name)
    # columns that were cut lie elsewhere
    occupied = {place_of(axis) for axis in host.axes} if host else set()
    solved = {place_of(axis) for axis in cell.axes}
    for exponents in sorted(multipliers, key=order):
        axes = [
            replace(a, exponent=e, epsilon=a.epsilon if e else None)
            for a, e in zip(cell.axes, exponents, strict=True)
        ]
        multiplied = _joined(axis for axis in axes if axis.exponent)
        name = unused(module_name(multiplied[0].site), by_name)
        if host is None:
            by_name[name] = Units(
                name, cell.units.count, multiplied, moves=multipliers[exponents]
            )
        elif by_name[host.name].moves & {"scale", "flip"} or not occupied.issuperset(
            map(place_of, multiplied)
        ):
            by_name[name] = Units(
                name, 1, multiplied, host.name, host.count, multipliers[exponents]
            )
        else:
            host_axes = [axis for axis in axes if place_of(axis) in occupied]
            host_axes += [axis for axis in host.axes if place_of(axis) not in solved]
            by_name[host.name] = replace(
                host, axes=_joined(host_axes), moves=host.moves | multipliers[exponents]
            )


def _joined(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Join axes that differ in their blocks alone."""
    by_place: dict[tuple[Place, int], list[Axis]] = {}
    for axis in axes:
        by_place.setdefault((place_of(axis), axis.exponent), []).append(axis)
    return tuple(
        replace(of_place[0], index=torch.cat([axis.index for axis in of_place]))
        for of_place in by_place.values()
    )
