r"""Scales, signs and shifts of units, by gradients alone.

If all weights :math:`W_a` that a unit lies in may be multiplied by :math:`\lambda^{e_a}`, the derivative in
:math:`\log\lambda` is zero: :math:`\sum_a e_a \langle W_a, \partial L / \partial W_a \rangle = 0` for every loss
:math:`L` of the outputs, every input and all weights, a conservation law for each unit. So exponents are the whole
numbers in the null space of a small matrix, to which each random loss adds a row for each unit. A shift of a bias is a
direction along which its gradient adds up to zero.

Gradients are those of a twin of the network, in which no scale passes through a clamp, say, that the inputs happen not
to reach. Signs obey the same law, modulo two, in a linear twin (:mod:`~pyro_symmetric.discovery.linear_twin`). What
follows for small steps, or for twins, is then tried on the network itself.

Source: Kunin et al. 2021, arXiv 2012.04728 (conservation laws of the gradient); Laurent, Aldea & Franchi 2024, arXiv
2310.08287 (scalings); Wiese et al. 2023, arXiv 2304.02902 (signs).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from pyro_symmetric._process import without_fast_attention, without_warnings
from pyro_symmetric.discovery.cells import module_name, unused
from pyro_symmetric.discovery.linear_twin import NotDifferentiable, Pass, gradients, precise, random_like
from pyro_symmetric.discovery.registry import Array
from pyro_symmetric.discovery.symmetry import near
from pyro_symmetric.discovery.trace import Trace
from pyro_symmetric.discovery.verify import difference, guilty
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.units import Move
from pyro_symmetric.weights import Weights

PRECISE = 6_000_000  # networks with more weights are differentiated in float32
SMALL = 20_000  # networks with fewer weights are looked at near several sets of weights, each farther off
SPREADS = (0.3, 0.3, 0.6, 0.6, 1.2, 1.2)  # of these around the network's own, relative to their standard deviation
FURTHER = 12 * (1.2,)  # of sets at which nothing is proposed, but proposals are tried
# Random losses at most, of large and of small networks; units with more places than these tell have no multipliers.
MOST = (6, 48)
# Relative size of what counts as zero in a precision: of singular values, and of gradients.
NULL, SILENT = {torch.float64: 1e-8, torch.float32: 1e-4}, {torch.float64: 1e-9, torch.float32: 1e-5}
EXACT = 1e-12  # of the scale of a whole site: an epsilon in a norm makes a larger difference
LARGEST = 12  # larger exponents aren't looked for

Place = tuple[str, int, int]  # a site, an axis, and how many axes count as one
Powers = tuple[int, ...]  # for each place of some units, the power with which a multiplier enters
Moves = dict[Powers, frozenset[Move]]  # whether these are the exponents of scales or of signs


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
) -> list[Units]:
    """Units with the multipliers that they admit, and further units that are only multiplied or shifted.

    :param units: the units that permute, outer ones first.
    :param fixed: units that nothing permutes.
    :param traces: the forward passes whose outputs matter.
    :param net: the network that was traced.
    :param shapes: the shapes of all sites.
    :param slices: of matrices whose rows fall into slices that read other inputs each, the slice of each row.
    :param held: sites that stay as they are.
    :param logits: whether outputs go through a softmax.
    """
    found = {one.name: one for one in units}
    try:
        law = _Law([Pass(trace, logits) for trace in traces], net, shapes)
        cells = list[_Cell]()
        for one in (*units, *fixed):
            inside = [other for other in units if other.parent == one.name]
            made_of = {other.name for other in inside}
            if law.small and one.count == 1 and not one.moves:  # all that others do together may be what one unit does
                made_of = {cell.units.name for cell in cells}
            places = _places(one, inside, law, slices, held)
            if places:
                cells.append(_Cell(one, places, frozenset(made_of)))
        moves = law.moves(cells)
    except NotDifferentiable:  # then permutations alone are told
        return list(units)
    for cell, own in zip(cells, moves, strict=True):
        _add_multipliers(found, cell, own)
    alone = [{axis.site for axis in one.axes if axis.exponent} for one in found.values()]
    lying = {axis.site for one in found.values() for axis in one.axes}
    for site, move in law.whole():
        if site not in held and ({site} not in alone if move == "scale" else site not in lying):
            axis = Axis(site, 0, torch.arange(shapes[site][0], device="cpu")[:, None], int(move == "scale"))
            found[f"{move} of {site}"] = Units(f"{move} of {site}", 1, (axis,), moves=frozenset({move}))
    return list(found.values())


def grouped(units: Sequence[Units], shapes: Mapping[str, torch.Size]) -> Group:
    """The group of all units; multipliers that permutations don't carry onto one another are left out."""
    with contextlib.suppress(ValueError):
        return Group(units, shapes, of_network=True)
    plain = ((one, [replace(axis, exponent=0, epsilon=None) for axis in one.axes]) for one in units)
    kept = {
        one.name: replace(one, axes=tuple(axes), moves=frozenset({"permute"}))
        for one, axes in plain
        if "permute" in one.moves
    }

    def add(some: Sequence[Units]) -> None:
        """Those that fit in with what is there, by halves."""
        try:
            kept.update(Group((kept | {one.name: one for one in some}).values(), shapes).units)
        except ValueError:
            for half in (some[: len(some) // 2], some[len(some) // 2 :]) if len(some) > 1 else ():
                add(half)

    add(units)
    return Group(kept.values(), shapes, of_network=True)


# where units lie ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Cell:
    """Units that are alike, and the places where each of them lies: axes with one exponent each.

    :param made_of: names of units whose combined multipliers may equal these.
    """

    units: Units
    places: tuple[Axis, ...]
    made_of: frozenset[str]


def _places(
    units: Units, inside: Sequence[Units], law: _Law, slices: Mapping[str, Array], held: Collection[str]
) -> tuple[Axis, ...]:
    """The places where units lie; those at which one further unit lies inside them have one exponent."""
    places = list[Axis]()
    for axis in units.axes:
        if axis.site in held:
            continue
        inner = [row for one in inside for own in one.axes if _place(own) == _place(axis) for row in own.index]
        owner = torch.full((axis.length(law.shapes),), -1, device="cpu")
        for number, row in enumerate(inner):
            owner[row] = number
        together: dict[int, list[Tensor]] = {}
        for k, (row, own) in enumerate(zip(axis.index, owner[axis.index], strict=True)):
            together.setdefault(int(own[0]) if bool((own == own[0].clamp_min(0)).all()) else -1 - k, []).append(row)
        blocks = (replace(axis, index=torch.stack(rows)) for rows in together.values())
        places += [piece for block in blocks for piece in _cut(block, slices.get(axis.site), law)]
    return tuple(replace(axis, exponent=0, epsilon=law.epsilons.get(axis.site)) for axis in places)


def _cut(axis: Axis, slices: Array | None, law: _Law) -> list[Axis]:
    """Columns of a small matrix of which slices of rows read other inputs each: those of each slice by themselves."""
    rows, columns = (*law.shapes[axis.site], 1)[:2]
    if slices is None or (axis.dim, axis.span, len(axis.index)) != (1, 1, 1) or rows * columns > SMALL:
        return [axis]
    pieces = (torch.from_numpy(np.flatnonzero(slices == number))[:, None] for number in np.unique(slices))
    return [replace(axis, dim=0, span=2, index=piece * columns + axis.index) for piece in pieces]


def _place(axis: Axis) -> Place:
    return axis.site, axis.dim, axis.span


def _one_run(shape: Sequence[int], axis: Axis) -> tuple[int, ...]:
    """A site's shape if the axes that an axis spans are one."""
    first, last = axis.dim, axis.dim + axis.span
    return (*shape[:first], math.prod(shape[first:last]), *shape[last:])


# the law --------------------------------------------------------------------------------------------------------------


class _Draw(NamedTuple):
    """Weights near the network's own, random inputs of each pass, and the outputs."""

    weights: Weights
    inputs: list[list[Tensor]]
    outputs: list[Tensor]


class _Law:
    """The conservation laws of some passes: of random losses, at random weights near the network's own."""

    def __init__(self, passes: Sequence[Pass], net: nn.Module, shapes: Mapping[str, torch.Size]):
        self.passes, self.shapes = passes, shapes
        tensors = dict(net.named_parameters()) | dict(net.named_buffers())
        own = {site: tensors[site].detach() for site in shapes if not is_lazy(tensors[site])}
        size = sum(value.numel() for value in own.values())
        self.dtype = torch.float64 if size < PRECISE else torch.float32
        self.null, self.silent = NULL[self.dtype], SILENT[self.dtype]
        self.buffers = set(dict(net.named_buffers()))
        self.epsilons = {site: eps for one in passes for site, eps in one.epsilons.items()}
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.first: Weights = {}  # the gradients of the first loss
        # Where one unit is silent, because another is negative, say, another speaks farther off.
        self.small = size < SMALL
        own = {site: precise(value, self.dtype) for site, value in own.items()}
        self.draws = [self._draw(own, far) for far in (SPREADS if self.small else SPREADS[:1])]
        self.further = [self._draw(own, far) for far in (FURTHER if self.small else ())]

    def moves(self, cells: Sequence[_Cell]) -> list[Moves]:
        """For each cell, with which powers multipliers enter its places, and whether these are scales or signs."""
        most = MOST[self.small]
        told = [cell for cell in cells if len(cell.places) + 4 <= most * cell.units.count]
        spare = 4 if self.small else 1  # three units with one place, an image's channels, say, ask for one loss then
        asked = [math.ceil((2 * len(cell.places) + spare) / cell.units.count) for cell in told]
        losses = max(len(self.draws), min(most, max(asked, default=1)))
        plain = self._sums(cells, losses, "scale")
        scales = self._right(cells, [self._scales(cell, plain) for cell in cells], 4.0)
        scales = _besides(cells, scales, self.shapes, False)
        try:
            twin = self._sums(cells, losses, "flip")
            signs = [self._signs(cell, own, plain, twin) for cell, own in zip(cells, scales, strict=True)]
        except NotDifferentiable:
            signs = [[] for _ in cells]
        signs = _besides(cells, self._right(cells, signs, -1.0), self.shapes, True)
        found = []
        for own, odd in zip(scales, signs, strict=True):
            moves: Moves = {powers: frozenset({"scale"}) for powers in own}
            for parities in odd:
                same = next((powers for powers in moves if _odd(powers) == parities), parities)
                moves[same] = moves.get(same, frozenset()) | {"flip"}
            found.append(moves)
        return found

    def whole(self) -> Iterator[tuple[str, Move]]:
        """The vectors that may be shifted, and the sites that may be scaled, as a whole, as far as one loss tells.

        In single precision nothing tells such a scale from one that an epsilon breaks.
        """
        norms = {site: float(gradient.norm()) for site, gradient in self.first.items()}
        for site, norm in norms.items():
            if site in self.buffers or not self.shapes[site] or norm <= self.silent * max(norms.values()):
                continue
            gradient = self.first[site].real
            if len(self.shapes[site]) == 1 < self.shapes[site][0] and abs(float(gradient.sum())) <= self.null * norm:
                yield site, "shift"
            slope = (self.draws[0].weights[site] * self.first[site].conj()).real
            if self.dtype == torch.float64 and abs(float(slope.sum())) <= EXACT * float(slope.abs().sum()):
                yield site, "scale"

    # small steps ----------------------------------------------------------------------------------------------------

    def _scales(self, cell: _Cell, sums: Mapping[Place, Tensor]) -> list[Powers]:
        """A basis of the exponents of a cell's scales."""
        rows, loud = _rows(cell, sums)
        if not bool((loud > 0).all()):  # of a place that no loss depends on, an expert's, say, nothing is known
            return []
        moved = [not a.buffer or a.site.rpartition(".")[2].startswith("running_") for a in cell.places]
        live = (loud > self.silent) & torch.tensor(moved, device="cpu")
        return _null_vectors(rows, loud, live, cell, self.null)

    def _signs(
        self, cell: _Cell, scales: Sequence[Powers], plain: Mapping[Place, Tensor], twin: Mapping[Place, Tensor]
    ) -> list[Powers]:
        """For a cell what may be a basis of the places that a sign enters (1; others are 0)."""
        heard, (rows, loud) = _rows(cell, plain)[1], _rows(cell, twin)
        if not bool((heard > 0).all()):
            return []
        live = (heard > self.silent) & torch.tensor([axis.epsilon is None for axis in cell.places], device="cpu")
        seen = live & (loud > self.silent)
        # What only even functions read flips together; of what is nearly silent, trials tell nothing.
        unseen = live & ~seen & (heard > 10 * self.null)
        proposed = np.array([unseen.tolist(), *_null_vectors(rows, loud, seen, cell, self.null)], dtype=int)
        # Gains and biases first: whatever the order of sites, streams flip without the gains of their normalisations.
        order = np.argsort([self.shapes[axis.site].numel() for axis in cell.places], kind="stable")
        basis = echelon(proposed[:, order], True)[0][:, order.argsort()].astype(int).tolist()
        shared = [odd for odd in map(_odd, scales) if len(independent([*basis, odd], True)) == len(basis)]
        every = [*shared, *map(tuple, basis)]
        return [every[k] for k in independent(every, True)]

    def _right(self, cells: Sequence[_Cell], proposed: Sequence[list[Powers]], factor: float) -> list[list[Powers]]:
        """The proposals that leave outputs as they are if units are multiplied by powers of a factor."""
        every = [(i, powers) for i, basis in enumerate(proposed) for powers in basis]
        # Each alone, for what several change may cancel out; all together far off, where a clamp isn't odd any more.
        for number, draw in enumerate([*self.draws, *self.further]):
            if self.small and number == 0:
                every = [one for one in every if not self._wrong([one], cells, draw, factor)]
            wrong = set(self._wrong(every, cells, draw, factor))
            every = [one for one in every if one not in wrong]
        return [[powers for powers in basis if (i, powers) in every] for i, basis in enumerate(proposed)]

    def _wrong(
        self, chosen: Sequence[tuple[int, Powers]], cells: Sequence[_Cell], draw: _Draw, factor: float
    ) -> list[tuple[int, Powers]]:
        """Return the proposals that change outputs, by the numbers of their cells.

        Random units are multiplied by a positive factor, and all others divided; random units are flipped.
        """
        units = {one: torch.rand(cells[one[0]].units.count, generator=self.generator, device="cpu") for one in chosen}
        others = 0.0 if factor < 0 else -1.0
        steps = {one: torch.where(own < 0.5, 1.0, others).double() for one, own in units.items()}
        for own in steps.values() if len(chosen) == 1 else ():
            own[0] = 1.0

        def fails(some: Sequence[tuple[int, Powers]]) -> bool:
            by = dict[Place, Tensor]()
            for number, powers in some:
                largest = 1 if factor < 0 else max(map(abs, powers))
                for axis, power in zip(cells[number].places, powers, strict=True):
                    if power:
                        none = torch.zeros(axis.length(self.shapes), dtype=torch.float64, device="cpu")
                        by.setdefault(_place(axis), none)[axis.index] += power / largest * steps[number, powers]
            moved = dict(draw.weights)
            for (site, dim, span), exponents in by.items():
                shape, epsilon = self.shapes[site], self.epsilons.get(site)
                run = moved[site].reshape(*shape[:dim], -1, *shape[dim + span :])
                factors = factor ** exponents.to(run.device).reshape(-1, *(1 for _ in shape[dim + span :]))
                factors = factors.to(run.real.dtype)
                run = (run + epsilon) * factors - epsilon if epsilon else run * factors
                moved[site] = run.reshape(shape)
            with torch.no_grad():
                return not difference(draw.outputs, self._outputs(moved, draw.inputs)) < 10 * self.null

        return guilty(chosen, fails) if chosen and fails(chosen) else []

    def _sums(self, cells: Sequence[_Cell], losses: int, twin: Move) -> dict[Place, Tensor]:
        """For each place ``(2, losses, length)``: sums of weights times gradients, and of their magnitudes."""
        axes = {_place(axis): axis for cell in cells for axis in cell.places}
        looked = {axis.site: set[int]() for axis in axes.values()}  # the axes of sites along which units lie
        for axis in axes.values():
            looked[axis.site].update(range(axis.dim, axis.dim + axis.span))
        found: dict[Place, list[Tensor]] = {place: [] for place in axes}
        for weights, slopes in self._gradients(losses, twin):
            self.first = self.first or slopes
            products = dict[str, list[Tensor]]()
            for site in looked.keys() & slopes.keys():
                weight = weights[site] + self.epsilons[site] if site in self.epsilons else weights[site]
                own = (weight * slopes[site].conj()).real
                rest = [dim for dim in range(own.dim()) if dim not in looked[site]]
                products[site] = [x.sum(rest, keepdim=True) if rest else x for x in (own, own.abs())]
            for place, axis in axes.items():
                own = torch.zeros(2, axis.length(self.shapes), device="cpu")
                if axis.site in products:
                    run = (*_one_run(products[axis.site][0].shape, axis), 1)
                    rest = [dim for dim in range(len(run)) if dim != axis.dim]
                    own = torch.stack([x.reshape(run).sum(rest) for x in products[axis.site]])
                found[place].append(own.double().cpu())
        return {place: torch.stack(own, 1) for place, own in found.items()}

    def _gradients(self, losses: int, twin: Move) -> Iterator[tuple[Weights, Weights]]:
        """Weights, and the gradients of random losses there."""
        for k, draw in enumerate(self.draws):
            weights = {site: value.detach().requires_grad_() for site, value in draw.weights.items()}
            outputs = self._outputs(weights, draw.inputs, twin)
            for own in gradients(outputs, weights, len(range(k, losses, len(self.draws))), self.generator):
                yield draw.weights, own

    def _outputs(
        self,
        weights: Weights,
        inputs: Sequence[Sequence[Tensor]],
        twin: Move | None = None,
        unsettled: set[int] | None = None,
    ) -> list[Tensor]:
        passes = zip(self.passes, inputs, strict=True)
        torch.default_generator.manual_seed(0)
        with without_fast_attention(), without_warnings(), sdpa_kernel(SDPBackend.MATH):
            return [out for one, own in passes for out in one.outputs(weights, own, self.dtype, twin, unsettled)]

    def _draw(self, own: Weights, far: float) -> _Draw:
        """Inputs are random numbers, or the example's if the network doesn't take others."""
        weights = {site: near(value, site in self.buffers, far, self.generator) for site, value in own.items()}
        # Where all layers are loud, rounding grows from layer to layer: too much for single precision.
        settled = self.epsilons if self.dtype == torch.float64 else ()
        unsettled = {id(weights[site]) for site in settled if site in weights}
        given = [[precise(x, self.dtype) for x in one.trace.tensors] for one in self.passes]
        inputs = [[random_like(x, self.generator) for x in own] for own in given]
        try:
            outputs = self._outputs(weights, inputs, None, unsettled)
            if all(bool(out.isfinite().all()) for out in outputs):
                return _Draw(weights, inputs, outputs)
        except NotDifferentiable:
            pass
        return _Draw(weights, given, self._outputs(weights, given))


# what follows from it -------------------------------------------------------------------------------------------------


def _rows(cell: _Cell, sums: Mapping[Place, Tensor]) -> tuple[Tensor, Tensor]:
    """A cell's law, one row for each loss and unit ``(rows, places)``, and how loud each place is at most.

    Both are relative to the loudest place of the row.
    """
    columns = [sums[_place(axis)][..., axis.index].sum(2).flatten(1) for axis in cell.places]
    signed, loud = torch.stack(columns, -1)
    signed, loud = (own[(loud.amax(1) > 0) & loud.isfinite().all(1)] for own in (signed, loud))
    if not len(loud):
        return signed, torch.zeros(len(cell.places), dtype=torch.float64, device="cpu")
    return signed / loud.amax(1, keepdim=True), (loud / loud.amax(1, keepdim=True)).amax(0)


def _null_vectors(rows: Tensor, loud: Tensor, live: Tensor, cell: _Cell, null: float) -> list[Powers]:
    """A basis of the small whole numbers with which the live columns of a cell's law add up to zero."""
    where = live.nonzero().flatten().tolist()
    if not where or len(rows) < len(where) + 2:
        return []
    rows, loud = (rows / loud)[:, where], loud[where]
    # Many, so that rounding averages out: it is what quiet places know least about.
    rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), 4 * len(where) + 1_000), device="cpu").long()]
    values, vectors = torch.linalg.svd(rows, full_matrices=False)[1:]
    basis = vectors[values <= null * math.sqrt(len(rows))] / loud
    reduced = echelon((basis / basis.norm(dim=1, keepdim=True)).numpy())[0]
    whole = [np.array(numbers) for vector in reduced if (numbers := whole_numbers(vector))]
    found = []
    for vector in _sparse(whole, np.array([cell.places[k].buffer for k in where])):
        powers = np.zeros(len(live), dtype=int)
        powers[where] = vector
        sign = np.sign(powers[powers != 0][0])  # what enters the units has a positive exponent
        found.append(tuple((sign * powers).tolist()))
    return found


def _sparse(vectors: list[Array], buffers: Array) -> list[Array]:
    """A basis of the same, in which fewer vectors touch buffers, and more numbers are zero."""

    def cost(vector: Array) -> tuple[bool, int, int]:
        return bool(vector[buffers].any()), int(np.count_nonzero(vector)), int(np.count_nonzero(vector < 0))

    for i, j in [*itertools.permutations(range(len(vectors)), 2)] * 2:
        if (vectors[i] * vectors[j]).any():  # else their sum has more numbers than either
            vectors[i] = min(vectors[i], vectors[i] + vectors[j], vectors[i] - vectors[j], key=cost)
    return vectors


def whole_numbers(vector: Array) -> list[int]:
    """The smallest multiple of a vector in whole numbers; none if these are large."""
    for denominator in range(1, LARGEST + 1):
        numbers = (vector * denominator).round().astype(int)
        if np.abs(vector - numbers / denominator).max() <= 1e-3:
            return [] if np.abs(numbers).max() > LARGEST else numbers.tolist()
    return []


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


def _besides(
    cells: Sequence[_Cell], bases: Sequence[list[Powers]], shapes: Mapping[str, torch.Size], modulo_two: bool
) -> list[list[Powers]]:
    """Keep of each cell's vectors, sparse ones first, what isn't made of those of other units."""
    found = []
    for cell, basis in zip(cells, bases, strict=True):
        pairs = zip(cells, bases, strict=True)
        known = [(one, v) for one, own in pairs if one.units.name in cell.made_of for v in own]
        if basis and (known or cell.units.count == 1):  # a single unit's rows and columns may cancel out
            basis = sorted(basis, key=np.count_nonzero)
            entries = _entries([*known, *((cell, vector) for vector in basis)], cell.units.count, shapes)
            kept = independent(entries, modulo_two)
            basis = [basis[k - len(known)] for k in kept if k >= len(known)]
        found.append(basis)
    return found


def _entries(moves: Sequence[tuple[_Cell, Powers]], count: int, shapes: Mapping[str, torch.Size]) -> Array:
    """The exponents of all entries of sites, those that are alike once, if the first of so many units is multiplied."""
    columns = []
    for site in sorted({axis.site for cell, _ in moves for axis in cell.places}):
        rows = torch.zeros(len(moves), *shapes[site], dtype=torch.int16, device="cpu")
        for row, (cell, powers) in zip(rows, moves, strict=True):
            for axis, power in zip(cell.places, powers, strict=True):
                if axis.site == site and power:
                    run = row.view(_one_run(row.shape, axis)).movedim(axis.dim, 0)
                    run[axis.index[:, : cell.units.count // count].flatten()] += power
        flat = rows.flatten(1).numpy()
        mixed = np.random.default_rng(0).random(len(flat)) @ flat
        columns.append(flat[:, np.unique(mixed, return_index=True)[1]])
    return np.concatenate(columns, 1)


def _odd(powers: Powers) -> Powers:
    """The places that a sign enters whose multiplier enters them with these powers."""
    return tuple(power % 2 for power in powers)


def _add_multipliers(found: dict[str, Units], cell: _Cell, moves: Moves) -> None:
    """Record the exponents of units' places: the first on the units, if they permute; further ones ride along.

    :param found: name -> units, which are changed and added to.
    """

    def late(powers: Powers) -> tuple[bool, int]:
        """Multipliers of running statistics, which others may leave alone, ride along."""
        touched = [k for k, power in enumerate(powers) if power]
        return any(cell.places[k].buffer for k in touched), touched[0]

    host = found.get(cell.units.name)
    lying = {_place(axis) for axis in host.axes} if host else set()  # where pieces of what is cut don't lie
    given = {_place(axis) for axis in cell.places}
    for powers in sorted(moves, key=late):
        axes = [
            replace(a, exponent=e, epsilon=a.epsilon if e else None) for a, e in zip(cell.places, powers, strict=True)
        ]
        axes_moved = _together(axis for axis in axes if axis.exponent)
        name = unused(module_name(axes_moved[0].site), found)
        if host is None:
            found[name] = Units(name, cell.units.count, axes_moved, moves=moves[powers])
        elif found[host.name].moves & {"scale", "flip"} or not lying.issuperset(map(_place, axes_moved)):
            found[name] = Units(name, 1, axes_moved, host.name, host.count, moves[powers])
        else:
            own = [axis for axis in axes if _place(axis) in lying]
            own += [axis for axis in host.axes if _place(axis) not in given]
            found[host.name] = replace(host, axes=_together(own), moves=host.moves | moves[powers])


def _together(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Axes that differ in their blocks alone as one each."""
    alike: dict[tuple[Place, int], list[Axis]] = {}
    for axis in axes:
        alike.setdefault((_place(axis), axis.exponent), []).append(axis)
    return tuple(replace(own[0], index=torch.cat([axis.index for axis in own])) for own in alike.values())
