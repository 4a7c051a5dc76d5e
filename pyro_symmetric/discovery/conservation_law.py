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

Gradients are those of a twin of the network, in which no scale passes, say, a clamp
that its inputs don't reach. Signs obey the same law, modulo two, in a linearised twin
(:mod:`~pyro_symmetric.discovery.linear_twin`), in which each read of a parameter has a
law of its own (:mod:`~pyro_symmetric.discovery.reads`). Whatever the law proposes is
then tried on the network itself.

Source: Kunin et al. 2021, arXiv 2012.04728 (conservation laws of the gradient);
Laurent, Aldea & Franchi 2024, arXiv 2310.08287 (scalings); Wiese et al. 2023, arXiv
2304.02902 (signs).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from pyro_symmetric._process import without_fast_attention, without_warnings
from pyro_symmetric.discovery.cells import module_name, unused
from pyro_symmetric.discovery.integer_algebra import (
    Exponents,
    echelon,
    independent,
    saturated,
    small_integers,
    vanishing,
)
from pyro_symmetric.discovery.linear_twin import (
    NotDifferentiable,
    Pass,
    gradients,
    in_dtype,
    is_bounded,
    random_like,
)
from pyro_symmetric.discovery.reads import READ
from pyro_symmetric.discovery.registry import Array
from pyro_symmetric.discovery.repeats import (
    Repeats,
    UnequalBlocks,
    copies,
    without_repeats,
)
from pyro_symmetric.discovery.rotations import rotating_units
from pyro_symmetric.discovery.symmetry import fresh, near
from pyro_symmetric.discovery.trace import Trace
from pyro_symmetric.discovery.verify import difference, guilty
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.units import Move
from pyro_symmetric.weights import Weights

FLOAT64 = 6_000_000  # networks with more weights are differentiated in float32
SMALL = 20_000  # networks with fewer weights are probed at several points
# Distances of points near the network's weights, in their deviations. A point with
# fresh weights follows each: there units are on that the network's own weights, a bias
# of minus six, say, never switch on.
NEAR = (0.3, 0.6, 1.2)
# further points, at which proposals are tried only: as far as the last ones above, at
# weights as large as those of new layers, and, if there are bounds to reach, with fresh
# weights and inputs of these sizes
TEST_POINTS = 6
LARGER = (10.0, 100.0)  # likewise, times weights
TEST_SIZES = (0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
# of a large network, if units that are dead at the first one would be needed
MORE_POINTS = 3
# of a large and of a small network; cells that need more get no multipliers
MOST_LOSSES = (6, 48)
# signs that are tried of each cell of a small network, if some have no law
MOST_PARITIES = 63
# Relative tolerances, by precision: singular values of the null space, and magnitudes
# of axes without gradient.
NULL, SILENT = (
    {torch.float64: 1e-8, torch.float32: 1e-4},
    {torch.float64: 1e-9, torch.float32: 1e-5},
)
# scales of trials; a larger one shows the epsilon of a norm, too
FACTOR = {torch.float64: 4.0, torch.float32: 64.0}
# the least deviation of biases and gains in single precision, which hides what small
# ones contribute
AUDIBLE = 0.3
# relative tolerance for the scale of a whole site; the epsilon of a norm exceeds it
EXACT = 1e-12

# site, or leaf of one of its reads; dim and span of an axis
Place = tuple[str, int, int]
# ``(2, losses, length)``: inner products, and sums of their terms' magnitudes
Products = dict[Place, Tensor]
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
    by_name = {one.name: one for one in units}
    try:
        law = _Law([Pass(trace, logits) for trace in traces], net, shapes)
        cells = list[_Cell]()
        for one in (*units, *fixed):
            inner = [other for other in units if other.parent == one.name]
            spanning = {other.name for other in inner}
            # all others together may do what a lone unit does
            if law.small and one.count == 1 and not one.moves:
                spanning = {cell.units.name for cell in cells}
            axes = _axes_of(one, inner, law, slices, held)
            if axes:
                cells.append(_Cell(one, axes, frozenset(spanning)))
        multipliers = law.multipliers(cells)
    except NotDifferentiable:  # permutations alone are found
        return Multiplied(list(units), True)
    for cell in cells:
        _add_multipliers(by_name, cell, multipliers.pop(cell, {}))
    scaled = [
        {axis.site for axis in one.axes if axis.exponent}
        for one in by_name.values()
        if "scale" in one.moves
    ]
    occupied = {axis.site for one in by_name.values() for axis in one.axes}
    shifted = set[str]()
    for site, move in law.whole_sites():
        if site in held or ({site} in scaled if move == "scale" else site in occupied):
            continue
        if move == "shift":
            shifted.add(site)
        name, index = f"{move} of {site}", torch.arange(shapes[site][0], device="cpu")
        axis = Axis(site, 0, index[:, None], int(move == "scale"))
        by_name[name] = Units(name, 1, (axis,), moves=frozenset({move}))
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
    kept = dict[str, Units]()
    for one in units:
        if "permute" in one.moves:
            axes = tuple(replace(axis, exponent=0, epsilon=None) for axis in one.axes)
            kept[one.name] = replace(one, axes=axes, moves=frozenset({"permute"}))

    def add(some: Sequence[Units]) -> None:
        """Add the units that fit in with the others, by bisection."""
        try:
            kept.update(
                Group((kept | {one.name: one for one in some}).values(), shapes).units
            )
        except ValueError:
            for half in (
                (some[: len(some) // 2], some[len(some) // 2 :])
                if len(some) > 1
                else ()
            ):
                add(half)

    add(units)
    return Group(kept.values(), shapes, of_network=True)


# the law ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Cell:
    """Units with a common law.

    :param axes: the axes of the law, with one exponent each: pieces of the units' own.
    :param spanning: names of other units, whose combined multipliers may equal these.
    """

    units: Units
    axes: tuple[Axis, ...]
    spanning: frozenset[str]


Proposal = tuple[_Cell, Exponents]
Bases = dict[_Cell, list[Exponents]]


class _Point(NamedTuple):
    """Random weights, random inputs of each pass, and the network's outputs there."""

    weights: Weights
    inputs: list[list[Tensor]]
    outputs: list[Tensor]


class Multiplied(NamedTuple):
    """Units with their multipliers; whether there may be more (of units that nothing
    switches on, or of networks without derivatives, nothing is known); and the law, if
    there is one.
    """

    units: list[Units]
    undecided: bool
    law: _Law | None = None


class _Law:
    """The conservation laws of a network's units, from random losses at random
    points.
    """

    def __init__(
        self, passes: Sequence[Pass], net: nn.Module, shapes: Mapping[str, torch.Size]
    ):
        self.passes, self.shapes = passes, shapes
        tensors = dict(net.named_parameters()) | dict(net.named_buffers())
        self.weights = {
            site: tensors[site].detach()
            for site in shapes
            if not is_lazy(tensors[site])
        }
        size = sum(value.numel() for value in self.weights.values())
        self.small = size < SMALL
        self.dtype = torch.float64 if size < FLOAT64 else torch.float32
        self.null, self.silent = NULL[self.dtype], SILENT[self.dtype]
        self.buffers = set(dict(net.named_buffers()))
        self.epsilons = {
            site: eps for one in passes for site, eps in one.epsilons.items()
        }
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.repeats = Repeats(None, {}, {})
        self.points, self.test_points = list[_Point](), list[_Point]()
        self.untied = list[Pass]()  # with a leaf for each read
        self.has_powers = False  # whether one of them has
        self.undecided = False  # whether units may have more multipliers
        self.first_gradient: Weights = {}

    def multipliers(self, cells: Sequence[_Cell]) -> dict[_Cell, Moves]:
        """Find for each cell the exponents of its multipliers, and whether these are
        scales, signs or both.
        """
        scales, signs = self._solved_by_blocks(cells) or self._solved(cells)
        solved: dict[_Cell, Moves] = {
            cell: dict.fromkeys(basis, frozenset({"scale"}))
            for cell, basis in scales.items()
        }
        for cell, parity in _pairs(signs):
            moves = solved.setdefault(cell, {})
            same = next(
                (exponents for exponents in moves if _parity(exponents) == parity),
                parity,
            )
            moves[same] = moves.get(same, frozenset()) | {"flip"}
        return solved

    def _solved_by_blocks(self, cells: Sequence[_Cell]) -> tuple[Bases, Bases] | None:
        """Solve the laws of two of each run of equal blocks, and copy them to the
        others; None if that can't be.
        """
        passes, weights = self.passes, self.weights
        if self.small or len(passes) > 1:
            return None
        self.repeats = repeats = without_repeats(
            passes[0].trace, [cell.axes for cell in cells]
        )
        if repeats.block:
            self.passes = [Pass(passes[0].trace, passes[0].logits, repeats.graph)]
            self.weights = {
                site: value
                for site, value in weights.items()
                if repeats.of(site)[1] < 2
            }
            kept = _in_two_blocks(cells, repeats)
            # Units inside the second block tell which multipliers of outer ones, heads
            # say, are products of theirs.
            second = [
                cell
                for cell in cells
                if all(repeats.of(axis.site)[1] == 1 for axis in cell.axes)
            ]
            with contextlib.suppress(UnequalBlocks):
                scales, signs = self._solved([*dict.fromkeys(kept.values()), *second])
                whole = self._whole_sites()
                pairs = (
                    (site, first)
                    for site, first in repeats.stand_in.items()
                    if site in self.weights
                )
                if any(whole.get(site) != whole.get(first) for site, first in pairs):
                    raise UnequalBlocks
                return (
                    {
                        cell: copies(scales[own], own.axes, cell.axes, repeats, False)
                        for cell, own in kept.items()
                    },
                    {
                        cell: copies(signs[own], own.axes, cell.axes, repeats, True)
                        for cell, own in kept.items()
                    },
                )
        self.passes, self.weights, self.repeats, self.first_gradient = (
            passes,
            weights,
            Repeats(None, {}, {}),
            {},
        )
        return None

    def _solved(self, cells: Sequence[_Cell]) -> tuple[Bases, Bases]:
        """Find for each cell a basis of the exponents of scales, and one of the
        parities of signs.
        """
        # A unit that is silent at one point (a ReLU that no input switches on) isn't at
        # another, farther off.
        weights = {
            site: in_dtype(value, self.dtype) for site, value in self.weights.items()
        }
        self.points, self.test_points = [self._near_point(weights, NEAR[0])], []
        if self.small:
            self.points.append(self._fresh_point(weights))
            for spread in NEAR[1:]:
                self.points.append(self._near_point(weights, spread))
                self.points.append(self._fresh_point(weights))
            for _ in range(TEST_POINTS):
                self.test_points.append(self._near_point(weights, NEAR[-1]))
            new = {site: torch.zeros_like(value) for site, value in weights.items()}
            new |= {site: weights[site] for site in self.buffers & weights.keys()}
            self.test_points.append(self._fresh_point(new))
            bounded = any(is_bounded(forward.trace) for forward in self.passes)
            for size in LARGER if bounded else ():  # norms undo the size of inputs
                larger = {
                    site: value if site in self.buffers else size * value
                    for site, value in weights.items()
                }
                self.test_points.append(self._fresh_point(larger))
            for size in TEST_SIZES if bounded else ():
                self.test_points.append(self._fresh_point(weights, size))
        most = MOST_LOSSES[self.small]
        soluble = [
            cell for cell in cells if len(cell.axes) + 4 <= most * cell.units.count
        ]
        # At most so many: rows to spare, as units may be dead; but an image's three
        # channels, with one axis, take one.
        spare = 4 if self.small else 0
        needed = [
            math.ceil((3 * len(cell.axes) + spare) / cell.units.count)
            for cell in soluble
        ]
        if self.small:  # all units together have one row a loss
            needed += [len(cell.axes) + 4 for cell in cells]
        losses = max(len(self.points), min(most, max(needed, default=1)))
        products = self._inner_products(cells, losses, "scale")
        while len(self.points) < MORE_POINTS and any(
            _is_dead(cell, products) for cell in cells
        ):
            self.points.append(self._fresh_point(weights))
            losses = max(losses, len(self.points))
            products = self._inner_products(cells, losses, "scale")
        dead = [
            axis.site
            for cell in cells
            if _is_dead(cell, products)
            for axis in cell.axes
        ]
        if any(site in self.repeats.block for site in dead):
            raise UnequalBlocks
        self.undecided = bool(dead)
        scales = self._confirmed(
            {cell: self._scales(cell, products) for cell in cells}, FACTOR[self.dtype]
        )
        scales = _independent_of_others(scales, self.shapes, False)
        self.untied = [one.untied(self.weights) for one in self.passes]
        self.has_powers = any(forward.has_powers() for forward in self.untied)
        if self.small:
            losses = max(losses, min(most, self._most_reads(cells) + 2))
        try:
            linear = self._inner_products(cells, losses, "flip")
            signs = {
                cell: self._signs(cell, scales[cell], products, linear)
                for cell in cells
            }
        except NotDifferentiable:
            self.undecided = True
            return scales, {cell: [] for cell in cells}
        signs = self._confirmed(signs, -1.0)
        if self.small:
            signs = self._with_signs_that_laws_miss(signs, products, linear)
            together = [_together(cell) for cell in cells]
            scales |= self._scales_together(together, scales, products)
            signs |= self._signs_together(together, signs, products, linear)
        return scales, _independent_of_others(signs, self.shapes, True)

    def whole_sites(self) -> Iterator[tuple[str, Move]]:
        """Iterate over vectors that may be shifted as a whole, and sites that may be
        scaled as a whole.
        """
        found = self._whole_sites()
        for site in self.shapes:
            for move in found.get(self.repeats.stand_in.get(site, site), ()):
                yield site, move

    def _whole_sites(self) -> dict[str, list[Move]]:
        """Find the moves of whole sites from one loss, with at most two blocks of each
        run.

        Single precision can't tell a scale of a whole site from one that an epsilon
        breaks.
        """
        norms = {
            site: float(gradient.norm())
            for site, gradient in self.first_gradient.items()
        }
        found = dict[str, list[Move]]()
        for site, norm in norms.items():
            if (
                site in self.buffers
                or not self.shapes[site]
                or norm <= self.silent * max(norms.values())
            ):
                continue
            gradient = self.first_gradient[site].real
            if (
                len(self.shapes[site]) == 1 < self.shapes[site][0]
                and abs(float(gradient.sum())) <= self.null * norm
            ):
                found.setdefault(site, []).append("shift")
            products = (
                self.points[0].weights[site] * self.first_gradient[site].conj()
            ).real
            if self.dtype == torch.float64 and abs(
                float(products.sum())
            ) <= EXACT * float(products.abs().sum()):
                found.setdefault(site, []).append("scale")
        return found

    def rotating(self, group: Group) -> tuple[str, ...]:
        """Return the names of units that may rotate, by the first loss."""
        if not self.points:
            return ()
        weights, gradient = self.points[0].weights, self.first_gradient
        stand_in = self.repeats.stand_in
        return rotating_units(group, weights, gradient, self.null, stand_in)

    # inner products -------------------------------------------------------------------

    def _most_reads(self, cells: Sequence[_Cell]) -> int:
        """Return how many reads of its axes a cell has at most."""
        further = Counter(self._leaves("flip").values())
        reads = (sum(1 + further[axis.site] for axis in c.axes) for c in cells)
        return max(reads, default=0)

    def _inner_products(
        self, cells: Sequence[_Cell], losses: int, twin: Move
    ) -> Products:
        r"""Compute :math:`\langle W_a[i], \partial L / \partial W_a[i]\rangle` for all
        positions ``i`` of all axes.
        """
        places = {_place(axis): axis for cell in cells for axis in cell.axes}
        axes = {
            site: [axis for axis in places.values() if axis.site == site]
            for site, _, _ in places
        }
        for leaf, site in self._leaves(twin).items():
            axes[leaf] = [replace(axis, site=leaf) for axis in axes.get(site, ())]
            places |= {(leaf, *_place(a)[1:]): a for a in axes.get(site, ())}
        lengths = {place: axis.length(self.shapes) for place, axis in places.items()}
        products = {
            place: torch.zeros(2, losses, n, dtype=torch.float64, device="cpu")
            for place, n in lengths.items()
        }
        for loss, (weights, gradient) in enumerate(self._gradients(losses, twin)):
            self.first_gradient = self.first_gradient or gradient
            for site in axes.keys() & gradient.keys():
                weight = (
                    weights[site] + self.epsilons[site]
                    if site in self.epsilons
                    else weights[site]
                )
                terms = (weight * gradient[site].conj()).real
                for row in range(2):
                    for axis, total in zip(
                        axes[site],
                        _sums(terms.abs_() if row else terms, axes[site]),
                        strict=True,
                    ):
                        products[_place(axis)][row, loss] = total
            if len(self.points) == 1 and all(
                _has_rows(cell, products) for cell in cells
            ):
                break  # losses of large networks are dear
        return products

    def _gradients(self, losses: int, twin: Move) -> Iterator[tuple[Weights, Weights]]:
        """Iterate over weights and the gradients of random losses of a twin there."""
        for k, point in enumerate(self.points):
            values = dict(point.weights)
            for leaf, site in self._leaves(twin).items():
                values[leaf] = point.weights[site].clone()
            weights = {
                leaf: value.detach().requires_grad_() for leaf, value in values.items()
            }
            outputs = self._outputs(weights, point.inputs, twin)
            for gradient in gradients(
                outputs,
                weights,
                len(range(k, losses, len(self.points))),
                self.generator,
            ):
                yield values, gradient

    def _leaves(self, twin: Move | None) -> dict[str, str]:
        """Return the further leaves of a twin, one for each read of a site, with the
        site.
        """
        leaves = dict[str, str]()
        for forward in self.untied if twin == "flip" else ():
            leaves |= forward.leaves
        return leaves

    def _outputs(
        self,
        weights: Weights,
        inputs: Sequence[Sequence[Tensor]],
        twin: Move | None = None,
        unfitted: set[int] | None = None,
    ) -> list[Tensor]:
        torch.default_generator.manual_seed(0)
        forwards = self.untied if twin == "flip" else self.passes
        passes = zip(forwards, inputs, strict=True)
        with without_fast_attention(), without_warnings(), sdpa_kernel(SDPBackend.MATH):
            return [
                out
                for one, own in passes
                for out in one.outputs(weights, own, self.dtype, twin, unfitted)
            ]

    def _near_point(self, center: Weights, spread: float) -> _Point:
        """Draw weights near a network's; inputs are the example's if it doesn't take
        random ones.

        :param spread: the distance, in deviations of the weights.
        """
        quiet = self.dtype == torch.float32
        weights = {
            site: near(
                value,
                site in self.buffers,
                spread,
                self.generator,
                AUDIBLE if quiet and value.dim() < 2 else 0.0,
            )
            for site, value in center.items()
        }
        point = self._random_point(weights)
        if point is not None:
            return point
        example = [
            [in_dtype(x, self.dtype) for x in forward.trace.tensors]
            for forward in self.passes
        ]
        return _Point(weights, example, self._outputs(weights, example))

    def _fresh_point(self, center: Weights, size: float = 1.0) -> _Point:
        """Draw weights as large as a network's, and inputs of any size; a point near it
        if it doesn't take these.
        """
        weights = {
            site: fresh(value, site in self.buffers, self.generator)
            for site, value in center.items()
        }
        return self._random_point(weights, size) or self._near_point(center, NEAR[-1])

    def _random_point(self, weights: Weights, size: float = 1.0) -> _Point | None:
        """Draw inputs at some weights, and fit the running statistics; None if the
        network has no finite outputs there.
        """
        # Fitted statistics keep every layer's signal, so that rounding accumulates: too
        # much for single precision.
        fitted = self.epsilons if self.dtype == torch.float64 else ()
        unfitted = {id(weights[site]) for site in fitted if site in weights}
        inputs = [
            [
                random_like(in_dtype(x, self.dtype), self.generator, size)
                for x in forward.trace.tensors
            ]
            for forward in self.passes
        ]
        with contextlib.suppress(NotDifferentiable):
            outputs = self._outputs(weights, inputs, None, unfitted)
            if all(bool(out.isfinite().all()) for out in outputs):
                return _Point(weights, inputs, outputs)
        return None

    # proposals ------------------------------------------------------------------------

    def _scales(self, cell: _Cell, products: Products) -> list[Exponents]:
        """Solve a cell's law for a basis of the exponents of scales."""
        law, magnitude = _matrix(cell, products)
        # nothing is known of an expert that no input reaches, say
        if not bool((magnitude > 0).all()):
            return []
        movable = [
            not a.buffer or a.site.rpartition(".")[2].startswith("running_")
            for a in cell.axes
        ]
        live = (magnitude > self.silent) & torch.tensor(movable, device="cpu")
        buffers = np.array([axis.buffer for axis in cell.axes])
        return _integer_null_space(law, magnitude, live, buffers, self.null)

    def _signs(
        self, cell: _Cell, scales: list[Exponents], products: Products, linear: Products
    ) -> list[Exponents]:
        """Propose a basis of the parities of a cell's axes: 1 where a sign enters, else
        0.

        :param products: inner products in the twin of scales.
        :param linear: inner products in the linearised twin.
        """
        magnitude = _matrix(cell, products)[1]
        if not bool((magnitude > 0).all()):
            return []
        columns = _columns(cell, linear)
        law, linear_magnitude = _matrix(cell, linear, columns)
        if len(law) < len(columns) + 2:  # too few losses to tell reads apart
            self.undecided |= len(columns) > len(cell.axes)
            columns = _columns_of_axes(cell, columns)
            law, linear_magnitude = _matrix(cell, linear, columns)
        movable = torch.tensor([a.epsilon is None for a in cell.axes], device="cpu")
        live = (magnitude > self.silent) & movable
        axis_of = torch.tensor([column.axis for column in columns], device="cpu")
        seen = live[axis_of] & (linear_magnitude > self.silent)
        seen_axes = torch.zeros_like(live)
        seen_axes[axis_of[seen]] = True
        # Axes that only even functions read flip together; what is nearly silent,
        # trials can't decide.
        unseen = live & ~seen_axes & (magnitude > 10 * self.null)
        buffers = np.array([cell.axes[k].buffer for k in axis_of])
        of_reads = _integer_null_space(law, linear_magnitude, seen, buffers, self.null)
        null_space = _agreeing(of_reads, axis_of.numpy(), seen.numpy(), len(cell.axes))
        proposed = np.array([unseen.tolist(), *null_space], dtype=int)
        # Gains and biases are the pivots, so that streams flip without the gains of
        # their normalisations.
        order = np.argsort(
            [self.shapes[axis.site].numel() for axis in cell.axes], kind="stable"
        )
        basis = (
            echelon(proposed[:, order], True)[0][:, order.argsort()]
            .astype(int)
            .tolist()
        )
        shared = [
            parity
            for parity in map(_parity, scales)
            if len(independent([*basis, parity], True)) == len(basis)
        ]
        candidates = [*shared, *map(tuple, basis)]
        return [candidates[k] for k in independent(candidates, True)]

    def _with_signs_that_laws_miss(
        self, signs: Bases, products: Products, linear: Products
    ) -> Bases:
        """Try further parities, one by one, and add those that hold.

        An even power has no law: ``z @ z.T`` keeps its value when a unit of ``z``
        changes sign, though no other factor undoes that. Nor have several axes that
        only even functions read.
        """
        found = dict(signs)
        for cell, basis in signs.items():
            magnitude = _matrix(cell, products)[1]
            if not bool((magnitude > self.silent).all()):
                continue  # what has no effect may change sign in any case
            linear_magnitude = _matrix(cell, linear)[1]
            unseen = int((linear_magnitude <= self.silent).sum())
            if not self.has_powers and unseen < 2:
                continue
            further = list[Exponents]()
            for parity in _further_parities(cell, basis):
                if self._confirmed({cell: [parity]}, -1.0)[cell]:
                    further.append(parity)
            chosen = independent([*basis, *further], True)
            found[cell] = [[*basis, *further][k] for k in chosen]
        return found

    def _scales_together(
        self, together: Sequence[_Cell], scales: Bases, products: Products
    ) -> Bases:
        """Find scales of all units of a cell together, none of which has its own.

        A norm without an epsilon lets all units in front of it be scaled together. Of
        one with an epsilon that trials don't show nothing is known.
        """
        proposed, exact = Bases(), Bases()
        for cell in together:
            self.undecided |= _is_dead(cell, products)
            # whole sites are scaled by moves of their own
            proposed[cell] = [
                exponents
                for exponents in self._scales(cell, products)
                if len(_moved_sites(cell, exponents)) > 1
            ]
        for cell, basis in self._further(proposed, scales, FACTOR[self.dtype]).items():
            law = _matrix(cell, products)[0]
            errors = (law @ law.new_tensor(basis).T).abs().amax(0)
            pairs = zip(basis, errors.tolist(), strict=True)
            exact[cell] = [own for own, error in pairs if error <= EXACT]
            self.undecided |= len(exact[cell]) < len(basis)
        return exact

    def _signs_together(
        self,
        together: Sequence[_Cell],
        signs: Bases,
        products: Products,
        linear: Products,
    ) -> Bases:
        """Find signs of all units of a cell together, none of which has its own."""
        proposed = Bases()
        for cell in together:
            if not bool((_matrix(cell, products)[1] > self.silent).all()):
                continue
            parities = self._signs(cell, [], products, linear)
            unseen = bool((_matrix(cell, linear)[1] <= self.silent).any())
            if unseen or self.has_powers:
                parities += _further_parities(cell, parities)
            parities.append(tuple(int(axis.epsilon is None) for axis in cell.axes))
            proposed[cell] = parities
        return self._further(proposed, signs, -1.0)

    def _further(self, proposed: Bases, known: Bases, factor: float) -> Bases:
        """Return the proposals for lone units that hold, and that neither other units
        nor earlier proposals span.
        """
        known_pairs, proposed_pairs = _pairs(known), _pairs(proposed)
        if not proposed_pairs:
            return {}
        entries = _exponents_of_entries([*known_pairs, *proposed_pairs], 1, self.shapes)
        spanning, further = entries[: len(known_pairs)], Bases()
        for (cell, exponents), row in zip(
            proposed_pairs, entries[len(known_pairs) :], strict=True
        ):
            with_row = np.concatenate([spanning, row[None]])
            if len(spanning) not in independent(with_row, factor < 0):
                continue
            if self._confirmed({cell: [exponents]}, factor)[cell]:
                further.setdefault(cell, []).append(exponents)
                spanning = with_row
        return further

    # trials ---------------------------------------------------------------------------

    def _confirmed(self, bases: Bases, factor: float) -> Bases:
        """Keep the exponents under which outputs are invariant when units are
        multiplied by powers of a factor.
        """
        proposals = _pairs(bases)
        # One by one first, since changes may cancel; then all at once far off, where a
        # clamp isn't odd any more.
        for k, point in enumerate([*self.points, *self.test_points]):
            if self.small and k == 0:
                proposals = [
                    one for one in proposals if not self._refuted([one], point, factor)
                ]
            refuted = set(self._refuted(proposals, point, factor))
            proposals = [one for one in proposals if one not in refuted]
        return {
            cell: [own for own in basis if (cell, own) in proposals]
            for cell, basis in bases.items()
        }

    def _refuted(
        self, proposals: Sequence[Proposal], point: _Point, factor: float
    ) -> list[Proposal]:
        """Return the proposals that change outputs at a point.

        Random units are multiplied by the factor; all others are divided by it, or stay
        if it is a sign.
        """
        powers = dict[Proposal, Tensor]()
        for one in proposals:
            chosen = (
                torch.rand(one[0].units.count, generator=self.generator, device="cpu")
                < 0.5
            )
            powers[one] = torch.where(chosen, 1.0, 0.0 if factor < 0 else -1.0).double()
            # else nothing may move
            if len(proposals) == 1 or (factor < 0 and one[0].units.count == 1):
                powers[one][0] = 1.0

        def change(some: Sequence[Proposal]) -> bool:
            """Return whether these proposals together change outputs."""
            return self._changes(point, {one: powers[one] for one in some}, factor)

        return guilty(proposals, change) if proposals and change(proposals) else []

    def _changes(
        self, point: _Point, powers: Mapping[Proposal, Tensor], factor: float
    ) -> bool:
        """Return whether units that are multiplied by powers of a factor change
        outputs at a point.
        """
        total = dict[Place, Tensor]()
        for (cell, exponents), of_units in powers.items():
            largest = 1 if factor < 0 else max(map(abs, exponents))
            for axis, exponent in zip(cell.axes, exponents, strict=True):
                if exponent:
                    zeros = torch.zeros(
                        axis.length(self.shapes), dtype=torch.float64, device="cpu"
                    )
                    power = exponent / largest * of_units
                    total.setdefault(_place(axis), zeros)[axis.index] += power
        moved = dict(point.weights)
        for (site, dim, span), power in total.items():
            value, epsilon = (
                moved[site].flatten(dim, dim + span - 1),
                self.epsilons.get(site),
            )
            factors = factor ** power.to(value.device).reshape(
                -1, *(1 for _ in value.shape[dim + 1 :])
            )
            factors = factors.to(value.real.dtype)
            value = (
                (value + epsilon) * factors - epsilon if epsilon else value * factors
            )
            moved[site] = value.reshape(self.shapes[site])
        with torch.no_grad():
            outputs = self._outputs(moved, point.inputs)
        return not difference(point.outputs, outputs) < 10 * self.null


# axes of the law ----------------------------------------------------------------------


def _axes_of(
    units: Units,
    inner: Sequence[Units],
    law: _Law,
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
        rows = (
            row
            for one in inner
            for other in one.axes
            if _place(other) == _place(axis)
            for row in other.index
        )
        # the inner unit's block at each position
        owner = torch.full((axis.length(law.shapes),), -1, device="cpu")
        for number, row in enumerate(rows):
            owner[row] = number
        pieces: dict[int, list[Tensor]] = {}
        for k, (row, owners) in enumerate(
            zip(axis.index, owner[axis.index], strict=True)
        ):
            shared = int(owners[0]) >= 0 and bool((owners == owners[0]).all())
            pieces.setdefault(int(owners[0]) if shared else -1 - k, []).append(row)
        for blocks in pieces.values():
            axes += _cut(
                replace(axis, index=torch.stack(blocks)),
                slices.get(axis.site),
                law.shapes,
            )
    return tuple(
        replace(axis, exponent=0, epsilon=law.epsilons.get(axis.site)) for axis in axes
    )


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


def _in_two_blocks(cells: Sequence[_Cell], repeats: Repeats) -> dict[_Cell, _Cell]:
    """Map each cell to its part in two blocks of each run; one inside a block, to that
    in its place in the first.
    """
    kept = dict[frozenset[Any], _Cell]()
    for cell in cells:
        axes = tuple(axis for axis in cell.axes if repeats.of(axis.site)[1] < 2)
        if any(repeats.of(axis.site)[1] == 0 for axis in axes):
            kept[frozenset(repeats.images(axes))] = replace(cell, axes=axes)
    return {cell: kept[frozenset(repeats.images(cell.axes))] for cell in cells}


def _place(axis: Axis) -> Place:
    return axis.site, axis.dim, axis.span


def _sums(value: Tensor, axes: Sequence[Axis]) -> list[Tensor]:
    """Sum a site's entries over all dimensions but that of an axis, for each of its
    axes.
    """
    kept = {dim for axis in axes for dim in range(axis.dim, axis.dim + axis.span)}
    rest = [dim for dim in range(value.dim()) if dim not in kept]
    value = value.sum(rest, keepdim=True) if rest else value
    spanned = [_spanned(value, axis).unsqueeze(-1) for axis in axes]
    return [
        x.sum([d for d in range(x.dim()) if d != axis.dim])
        for x, axis in zip(spanned, axes, strict=True)
    ]


def _spanned(value: Tensor, axis: Axis) -> Tensor:
    """Merge the dimensions that an axis spans."""
    return value.flatten(axis.dim, axis.dim + axis.span - 1)


# integer null spaces ------------------------------------------------------------------


class _Column(NamedTuple):
    """A column of a law.

    :param axis: the number of an axis of the cell.
    :param places: where its inner products are: of the axis itself, or of reads.
    """

    axis: int
    places: list[Place]


def _columns(cell: _Cell, products: Products) -> list[_Column]:
    """Return a column for each read of each axis."""
    places_of: dict[Place, list[Place]] = {}
    for place in products:
        places_of.setdefault((place[0].split(READ)[0], *place[1:]), []).append(place)
    return [
        _Column(number, [place])
        for number, axis in enumerate(cell.axes)
        for place in places_of[_place(axis)]
    ]


def _columns_of_axes(cell: _Cell, of_reads: Sequence[_Column]) -> list[_Column]:
    """Return a column for each axis, in which its reads are added up."""
    columns = [_Column(number, []) for number in range(len(cell.axes))]
    for read in of_reads:
        columns[read.axis].places.extend(read.places)
    return columns


def _matrix(
    cell: _Cell, products: Products, columns: Sequence[_Column] = ()
) -> tuple[Tensor, Tensor]:
    """Return the matrix of a cell's law, ``(losses * units, columns)``, and the largest
    magnitude of each column.

    Each row is relative to the largest magnitude of its own.

    :param columns: the columns; one for each axis by default.
    """
    columns = columns or [_Column(k, [_place(a)]) for k, a in enumerate(cell.axes)]
    sums = []
    for axis, places in columns:
        index = cell.axes[axis].index
        terms = [products[place][..., index].sum(2).flatten(1) for place in places]
        sums.append(torch.stack(terms).sum(0) if len(terms) > 1 else terms[0])
    law, magnitude = torch.stack(sums, -1)
    # an output that is constant at a point has a gradient of rounding errors there
    least = EXACT * magnitude.nan_to_num(0.0, 0.0, 0.0).max() if len(magnitude) else 0.0
    valid = (magnitude.amax(1) > least) & magnitude.isfinite().all(1)
    law, magnitude = law[valid], magnitude[valid]
    if not len(law):
        return law, torch.zeros(len(columns), dtype=torch.float64, device="cpu")
    largest = magnitude.amax(1, keepdim=True)
    return law / largest, (magnitude / largest).amax(0)


def _agreeing(
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
    first = {int(axis_of[k]): k for k in reversed(np.flatnonzero(seen))}
    others = [k for k in np.flatnonzero(seen) if first[axis_of[k]] != k]
    against = [first[axis_of[k]] for k in others]
    apart = (parities[:, others] + parities[:, against]) % 2
    by_axis = []
    for parity in vanishing(parities, apart, True):
        signs = [parity[first[k]] if k in first else 0 for k in range(axes)]
        by_axis.append(tuple(map(int, signs)))
    return by_axis


def _rows_and_axes(cell: _Cell, products: Products) -> tuple[int, int, int]:
    """Return the rows of a cell's law, those that it would have if no unit were dead,
    and its axes with a gradient.
    """
    law, magnitude = _matrix(cell, products, _columns(cell, products))
    return (
        len(law),
        products[_place(cell.axes[0])].shape[1] * cell.units.count,
        int((magnitude > 0).sum()),
    )


def _is_dead(cell: _Cell, products: Products) -> bool:
    """Return whether units are dead that would tell a cell's null space, or an axis has
    no gradient.
    """
    rows, most, axes = _rows_and_axes(cell, products)
    return axes < len(cell.axes) or rows < axes + 2 <= most


def _has_rows(cell: _Cell, products: Products) -> bool:
    """Return whether live units give a cell's law as many rows as it needs, or never
    will.
    """
    rows, most, axes = _rows_and_axes(cell, products)
    return axes + 2 > most or rows >= min(3 * axes, axes + 4, most)


def _integer_null_space(
    law: Tensor, magnitude: Tensor, live: Tensor, buffers: Array, null: float
) -> list[Exponents]:
    """Return a basis of small integers of the null space of a law's live columns."""
    columns = live.nonzero().flatten().tolist()
    if not columns or len(law) < len(columns) + 2:
        return []
    law, magnitude = (law / magnitude)[:, columns], magnitude[columns]
    # Many rows average out rounding errors, which are relatively large where gradients
    # are small.
    law = law[
        torch.linspace(
            0, len(law) - 1, min(len(law), 4 * len(columns) + 1_000), device="cpu"
        ).long()
    ]
    values, vectors = torch.linalg.svd(law, full_matrices=False)[1:]
    # Pivots are chosen among the normalised columns: magnitudes may differ by six
    # orders, which would hide small ones.
    reduced, pivots = echelon(vectors[values <= null * math.sqrt(len(law))].numpy())
    reduced *= magnitude[pivots, None].numpy() / magnitude.numpy()
    # single precision gives exponents of axes with small gradients to two digits
    tolerance = max(1e-3, 100 * null)
    integers = [
        np.array(numbers)
        for vector in reduced
        if (numbers := small_integers(vector, tolerance))
    ]
    null_space = []
    for vector in _sparse(integers, buffers[columns]):
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

    def cost(vector: Array) -> tuple[bool, int, int]:
        return (
            bool(vector[buffers].any()),
            int(np.count_nonzero(vector)),
            int(np.count_nonzero(vector < 0)),
        )

    for i, j in [*itertools.permutations(range(len(vectors)), 2)] * 2:
        # else neither sum is sparser than its terms
        if (vectors[i] * vectors[j]).any():
            vectors[i] = min(
                vectors[i], vectors[i] + vectors[j], vectors[i] - vectors[j], key=cost
            )
    return vectors


def _independent_of_others(
    bases: Bases, shapes: Mapping[str, torch.Size], modulo_two: bool
) -> Bases:
    """Keep of each cell's basis, sparse vectors first, what the multipliers of other
    units don't span.
    """
    remaining = dict(bases)
    for cell, basis in bases.items():
        others = [
            (one, own)
            for one, vectors in bases.items()
            if one.units.name in cell.spanning
            for own in vectors
        ]
        # a lone unit's rows and columns may cancel
        if basis and (others or cell.units.count == 1):
            basis = sorted(basis, key=np.count_nonzero)
            exponents = _exponents_of_entries(
                [*others, *((cell, own) for own in basis)], cell.units.count, shapes
            )
            kept = independent(exponents, modulo_two)
            remaining[cell] = [basis[k - len(others)] for k in kept if k >= len(others)]
    return remaining


def _exponents_of_entries(
    multipliers: Sequence[Proposal], count: int, shapes: Mapping[str, torch.Size]
) -> Array:
    """Return the exponents of all entries if the first of so many units is multiplied;
    equal columns once.
    """
    columns = []
    for site in sorted({axis.site for cell, _ in multipliers for axis in cell.axes}):
        rows = torch.zeros(
            len(multipliers), *shapes[site], dtype=torch.int16, device="cpu"
        )
        for row, (cell, exponents) in zip(rows, multipliers, strict=True):
            for axis, exponent in zip(cell.axes, exponents, strict=True):
                if axis.site == site and exponent:
                    entries = _spanned(row, axis).movedim(axis.dim, 0)
                    entries[axis.index[:, : cell.units.count // count].flatten()] += (
                        exponent
                    )
        flat = rows.flatten(1).numpy()
        hashes = np.random.default_rng(0).random(len(flat)) @ flat
        columns.append(flat[:, np.unique(hashes, return_index=True)[1]])
    return np.concatenate(columns, 1)


def _moved_sites(cell: _Cell, exponents: Exponents) -> set[str]:
    """Return the sites that multipliers of a cell change."""
    pairs = zip(cell.axes, exponents, strict=True)
    return {axis.site for axis, exponent in pairs if exponent}


def _together(cell: _Cell) -> _Cell:
    """Return all units of a cell as one, whose moves are no units' own."""
    axes = [replace(axis, index=axis.index.reshape(-1, 1)) for axis in cell.axes]
    units = Units(f"all of {cell.units.name}", 1, tuple(axes), moves=frozenset())
    return _Cell(units, tuple(axes), frozenset())


def _pairs(bases: Bases) -> list[Proposal]:
    """List the exponents of all cells."""
    return [(cell, exponents) for cell, basis in bases.items() for exponents in basis]


def _further_parities(cell: _Cell, basis: Sequence[Exponents]) -> Iterator[Exponents]:
    """Iterate over parities of a cell's axes that a basis doesn't span, those of few
    axes first, and :data:`MOST_PARITIES` at most.
    """
    pivots = echelon(np.array(basis), True)[1] if basis else []
    free = [k for k, a in enumerate(cell.axes) if k not in pivots and a.epsilon is None]
    choices = itertools.chain.from_iterable(
        itertools.combinations(free, size) for size in range(1, len(free) + 1)
    )
    for chosen in itertools.islice(choices, MOST_PARITIES):
        yield tuple(int(k in chosen) for k in range(len(cell.axes)))


def _parity(exponents: Exponents) -> Exponents:
    """Return the exponents modulo two: those of a sign."""
    return tuple(exponent % 2 for exponent in exponents)


# units with their multipliers ---------------------------------------------------------


def _add_multipliers(
    by_name: dict[str, Units], cell: _Cell, multipliers: Moves
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
    occupied = {_place(axis) for axis in host.axes} if host else set()
    solved = {_place(axis) for axis in cell.axes}
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
            map(_place, multiplied)
        ):
            by_name[name] = Units(
                name, 1, multiplied, host.name, host.count, multipliers[exponents]
            )
        else:
            own = [axis for axis in axes if _place(axis) in occupied]
            own += [axis for axis in host.axes if _place(axis) not in solved]
            by_name[host.name] = replace(
                host, axes=_joined(own), moves=host.moves | multipliers[exponents]
            )


def _joined(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Join axes that differ in their blocks alone."""
    alike: dict[tuple[Place, int], list[Axis]] = {}
    for axis in axes:
        alike.setdefault((_place(axis), axis.exponent), []).append(axis)
    return tuple(
        replace(own[0], index=torch.cat([axis.index for axis in own]))
        for own in alike.values()
    )
