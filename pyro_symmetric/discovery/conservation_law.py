r"""Scales, signs and shifts of units, by gradients alone.

If all weights :math:`W_a` that a unit lies in may be multiplied by :math:`\lambda^{e_a}`, the derivative in
:math:`\log\lambda` is zero: :math:`\sum_a e_a \langle W_a, \partial L / \partial W_a \rangle = 0` for every loss
:math:`L` of the outputs, every input and all weights, a conservation law for each unit. So exponents are the whole
numbers in the null space of a small matrix, to which each random loss adds a row for each unit. A shift of a bias is a
direction along which its gradient adds up to zero.

Signs obey the same law, modulo two, in a linear twin of the network (:mod:`~pyro_symmetric.discovery.linear_twin`).
What follows for small steps, or for the twin, is then tried on the network itself.

Source: Kunin et al. 2021, arXiv 2012.04728 (conservation laws of the gradient); Laurent, Aldea & Franchi 2024, arXiv
2310.08287 (scalings); Wiese et al. 2023, arXiv 2304.02902 (signs).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from pyro_symmetric._process import without_fast_attention, without_warnings
from pyro_symmetric.discovery.flow import Array
from pyro_symmetric.discovery.integer_bases import echelon, independent, sparse, whole_numbers
from pyro_symmetric.discovery.invariance import difference, guilty
from pyro_symmetric.discovery.linear_twin import NotDifferentiable, Pass, evaluation, precise
from pyro_symmetric.discovery.multiplied import Place, Powers, add_multipliers, multiplied, odd_of, one_run, place_of
from pyro_symmetric.discovery.symmetry import in_precision, near
from pyro_symmetric.discovery.trace import Trace
from pyro_symmetric.groups import Axis, Units
from pyro_symmetric.groups.units import Move
from pyro_symmetric.weights import Weights

PRECISE = 2_000_000  # networks with more weights are differentiated in float32
SMALL = 20_000  # networks with fewer weights are looked at near several sets of weights, each farther off
SPREADS = (0.3, 0.3, 0.6, 0.6, 1.2, 1.2)  # of these around the network's own, relative to their standard deviation
# Random losses at most, of large and of small networks; units with more places than these tell have no multipliers.
MOST = (6, 48)
# Relative size of what counts as zero in a precision: of singular values, and of gradients.
NULL, SILENT = {torch.float64: 1e-8, torch.float32: 1e-4}, {torch.float64: 1e-9, torch.float32: 1e-5}

# Of the scale of a whole site: an epsilon in a norm makes a larger difference. What float32 proposes is tried in
# float64, at a site so many times smaller.
EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}
SMALLER = 1024


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
    law = _Law([Pass(trace, logits) for trace in traces], net, shapes)
    cells = list[_Cell]()
    for one in (*units, *fixed):
        inside = [other for other in units if other.parent == one.name]
        made_of = {other.name for other in inside}
        if law.small and one.count == 1 and not one.moves:  # all that others do together may be what one unit does
            made_of = {cell.units.name for cell in cells}
        if places := _places(one, inside, law, slices, held):
            cells.append(_Cell(one, places, frozenset(made_of)))
    found = {one.name: one for one in units}
    try:
        moves = law.moves(cells)
    except NotDifferentiable:  # then permutations alone are told
        return list(units)
    for cell, own in zip(cells, moves, strict=True):
        add_multipliers(found, cell.units, cell.places, own)
    alone = [{axis.site for axis in one.axes if axis.exponent} for one in found.values()]
    lying = {axis.site for one in found.values() for axis in one.axes}
    for site, move in law.whole():
        new = site not in held and (move == "shift" or {site} not in alone) and (move == "scale" or site not in lying)
        if new and law.stays(site, move):
            axis = Axis(site, 0, torch.arange(shapes[site][0], device="cpu")[:, None], int(move == "scale"))
            found[f"{move} of {site}"] = Units(f"{move} of {site}", 1, (axis,), moves=frozenset({move}))
    return list(found.values())


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
    places, whole = list[Axis](), set[str]()
    for axis in units.axes:
        length = axis.length(law.shapes)
        if axis.site in held or (length == 1 and axis.site in whole):
            continue  # rows and columns of a site that are all of it are the same numbers
        whole |= {axis.site} if length == 1 else set()
        inner = [row for one in inside for own in one.axes if place_of(own) == place_of(axis) for row in own.index]
        owner = torch.full((length,), -1, device="cpu")
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


class _Law:
    """The conservation laws of some passes: of random losses, at random weights near the network's own."""

    def __init__(self, passes: Sequence[Pass], net: nn.Module, shapes: Mapping[str, torch.Size]):
        self.passes, self.shapes = passes, shapes
        tensors = dict(net.named_parameters()) | dict(net.named_buffers())
        own = {site: tensors[site].detach() for site in shapes if not is_lazy(tensors[site])}
        size = sum(value.numel() for value in own.values())
        self.dtype = torch.float64 if size < PRECISE else torch.float32
        self.null, self.silent = NULL[self.dtype], SILENT[self.dtype]
        self.own = {site: precise(value, self.dtype) for site, value in own.items()}
        self.buffers = set(dict(net.named_buffers()))
        self.epsilons = {site: eps for one in passes for site, eps in one.epsilons.items()}
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.first: Weights = {}  # the gradients of the first loss
        # Where one unit is silent, because another is negative, say, another speaks farther off.
        self.small = size < SMALL
        self.draws = [
            ({site: near(v, site in self.buffers, far, self.generator) for site, v in self.own.items()}, self._inputs())
            for far in (SPREADS if self.small else SPREADS[:1])
        ]

    def moves(self, cells: Sequence[_Cell]) -> list[dict[Powers, frozenset[Move]]]:
        """For each cell, with which powers multipliers enter its places, and whether these are scales or signs."""
        asked = [math.ceil((2 * len(cell.places) + 4) / cell.units.count) for cell in cells]
        losses = max(len(self.draws), min(MOST[self.small], max(asked, default=1)))
        plain = self._sums(cells, losses, False)
        scales = self._right(cells, [self._scales(cell, plain) for cell in cells], (4.0, 0.25))
        scales = _besides(cells, scales, self.shapes, False)
        try:
            twin = self._sums(cells, losses, True)
            signs = [self._signs(cell, own, plain, twin) for cell, own in zip(cells, scales, strict=True)]
        except NotDifferentiable:
            signs = [[] for _ in cells]
        signs = _besides(cells, self._right(cells, signs, (-1.0,)), self.shapes, True)
        found = []
        for own, odd in zip(scales, signs, strict=True):
            moves: dict[Powers, frozenset[Move]] = {powers: frozenset({"scale"}) for powers in own}
            for parities in odd:
                same = next((powers for powers in moves if odd_of(powers) == parities), parities)
                moves[same] = moves.get(same, frozenset()) | {"flip"}
            found.append(moves)
        return found

    def whole(self) -> Iterator[tuple[str, Move]]:
        """The vectors that may be shifted, and the sites that may be scaled, as a whole, as far as one loss tells."""
        norms = {site: float(gradient.norm()) for site, gradient in self.first.items()}
        free = self._scale_free(self.draws[0][0], self.first)
        if free and self.dtype == torch.float32:  # an epsilon shows where all of them are small
            weights, inputs = self.draws[0]
            small = [(weights | {site: weights[site] / SMALLER for site in free}, inputs)]
            free &= set[str]().union(*(self._scale_free(*both) for both in self._gradients(1, False, small)))
        for site, norm in norms.items():
            if site in self.buffers or not self.shapes[site] or norm <= self.silent * max(norms.values()):
                continue
            shift = self.first[site].real
            if len(self.shapes[site]) == 1 < self.shapes[site][0] and float(shift.sum().abs()) <= self.null * norm:
                yield site, "shift"
            if site in free:
                yield site, "scale"

    def stays(self, site: str, move: Move) -> bool:
        """True if a move of a whole site that float32 proposes holds in float64, too, where the site is small."""
        if move == "shift" or self.dtype == torch.float64:
            return True
        weights = {name: precise(value, torch.float64) for name, value in self.draws[0][0].items()}
        inputs = [[precise(x, torch.float64) for x in own] for own in self.draws[0][1]]
        small = weights | {site: weights[site] / SMALLER}
        try:
            before, after = (self._outputs(own, inputs, dtype=torch.float64) for own in (weights, small))
        except NotDifferentiable:
            return False
        return difference(before, after) < NULL[torch.float64]

    # small steps ----------------------------------------------------------------------------------------------------

    def _scale_free(self, weights: Weights, gradients: Weights) -> set[str]:
        """The sites along which, as a whole, a loss has no slope."""
        slopes = {site: (weights[site] * gradient.conj()).real for site, gradient in gradients.items()}
        exact = EXACT[self.dtype]
        return {site for site, own in slopes.items() if float(own.sum().abs()) <= exact * float(own.abs().sum())}

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
        unseen = live & (loud <= self.silent)  # what only even functions read flips together
        proposed = [unseen.tolist(), *_null_vectors(rows, loud, live & ~unseen, cell, self.null)]
        # Gains and biases first: whatever the order of sites, streams flip without the gains of their normalisations.
        order = np.argsort([self.shapes[axis.site].numel() for axis in cell.places], kind="stable")
        basis = echelon(np.array(proposed, dtype=int)[:, order], True)[0].astype(int)[:, order.argsort()].tolist()
        shared = [odd for odd in map(odd_of, scales) if len(independent([*basis, odd], True)) == len(basis)]
        every = [*shared, *map(tuple, basis)]
        return [every[k] for k in independent(every, True)]

    def _right(
        self, cells: Sequence[_Cell], proposed: Sequence[list[Powers]], factors: Sequence[float]
    ) -> list[list[Powers]]:
        """The proposals that leave outputs as they are if units are multiplied by powers of these factors."""
        every = [(i, powers) for i, basis in enumerate(proposed) for powers in basis]

        def fails(chosen: Sequence[tuple[int, Powers]], factor: float) -> bool:
            moved = dict(weights)
            for number, powers in chosen:
                units = torch.rand(cells[number].units.count, generator=self.generator, device="cpu") < 0.5
                units[0] |= len(chosen) == 1
                for axis, power in zip(cells[number].places, powers, strict=True):
                    if power:
                        by = factor ** (power if factor < 0 else power / max(map(abs, powers)))
                        moved[axis.site] = multiplied(moved[axis.site], axis, units, by)
            return not difference(before, self._outputs(moved, inputs)) < 10 * self.null

        # Each alone, for what several change may cancel out; all together far off, where a clamp isn't odd any more.
        for number, (weights, inputs) in enumerate(self.draws):
            before = self._outputs(weights, inputs) if every else []
            for factor in factors:
                if self.small and number == 0:
                    every = [one for one in every if not fails([one], factor)]
                if every and fails(every, factor):
                    wrong = guilty(every, lambda chosen: fails(chosen, factor))  # noqa: B023
                    every = [one for one in every if one not in wrong]
        return [[powers for powers in basis if (i, powers) in every] for i, basis in enumerate(proposed)]

    def _sums(self, cells: Sequence[_Cell], losses: int, twin: bool) -> dict[Place, Tensor]:
        """For each place ``(2, losses, length)``: sums of weights times gradients, and of their magnitudes."""
        axes = {place_of(axis): axis for cell in cells for axis in cell.places}
        found: dict[Place, list[Tensor]] = {place: [] for place in axes}
        for weights, gradients in self._gradients(losses, twin):
            self.first = self.first or gradients
            products = dict[str, list[Tensor]]()
            for site, gradient in gradients.items():
                product = ((weights[site] + self.epsilons.get(site, 0.0)) * gradient.conj()).real
                products[site] = [product, product.abs()]
            for place, axis in axes.items():
                run = one_run(self.shapes[axis.site], axis)
                rest = [dim for dim in range(len(run)) if dim != axis.dim]
                both = [own.reshape(run) for own in products.get(axis.site, [torch.zeros(run, device="cpu")] * 2)]
                found[place].append(torch.stack([own.sum(rest) if rest else own for own in both]).double().cpu())
        nothing = {place: torch.zeros(2, 0, axis.length(self.shapes), device="cpu") for place, axis in axes.items()}
        return {place: torch.stack(own, 1) if own else nothing[place] for place, own in found.items()}

    def _gradients(
        self, losses: int, twin: bool, draws: Sequence[tuple[Weights, list[list[Tensor]]]] = ()
    ) -> Iterator[tuple[Weights, Weights]]:
        """Weights, and the gradients of random losses there."""
        draws = draws or self.draws
        for k, (own, inputs) in enumerate(draws):
            weights = {site: value.clone().requires_grad_() for site, value in own.items()}
            outputs = [out for out in self._outputs(weights, inputs, twin) if out.requires_grad]
            for _ in range(k, losses, len(draws)) if outputs else ():
                loss = torch.stack([(out * self._noise(out)).real.sum() for out in outputs]).sum()
                with evaluation():
                    every = torch.autograd.grad(loss, [*weights.values()], retain_graph=True, allow_unused=True)
                yield own, {site: g for site, g in zip(weights, every, strict=True) if g is not None}

    def _outputs(
        self, weights: Weights, inputs: Sequence[Sequence[Tensor]], twin: bool = False, dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        passes = zip(self.passes, inputs, strict=True)
        torch.default_generator.manual_seed(0)
        with without_fast_attention(), without_warnings(), sdpa_kernel(SDPBackend.MATH):
            return [out for one, own in passes for out in one.outputs(weights, own, twin, dtype or self.dtype)]

    def _noise(self, like: Tensor) -> Tensor:
        dtype = in_precision(like.dtype, self.dtype)
        return torch.randn(like.shape, generator=self.generator, dtype=dtype, device="cpu").to(like.device)

    def _inputs(self) -> list[list[Tensor]]:
        """Random numbers, or the example's if the network doesn't take others."""
        given = [one.trace.tensors for one in self.passes]
        drawn = [[self._noise(x) if x.is_floating_point() or x.is_complex() else x for x in own] for own in given]
        try:
            finite = all(bool(out.isfinite().all()) for out in self._outputs(self.own, drawn))
        except NotDifferentiable:
            finite = False
        return drawn if finite else [[precise(x, self.dtype) for x in own] for own in given]


# what follows from it -------------------------------------------------------------------------------------------------


def _rows(cell: _Cell, sums: Mapping[Place, Tensor]) -> tuple[Tensor, Tensor]:
    """A cell's law, one row for each loss and unit ``(rows, places)``, and how loud each place is at most.

    Both are relative to the loudest place of the row.
    """
    columns = [sums[place_of(axis)][..., axis.index].sum(2).flatten(1) for axis in cell.places]
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
    rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), 4 * len(where) + 32), device="cpu").long()]
    values, vectors = torch.linalg.svd(rows, full_matrices=False)[1:]
    basis = vectors[values <= null * math.sqrt(len(rows))] / loud
    reduced = echelon((basis / basis.norm(dim=1, keepdim=True)).numpy())[0]
    whole = [numbers for vector in reduced if (numbers := whole_numbers(vector))]
    found = []
    for vector in sparse(whole, [cell.places[k].buffer for k in where]):
        sign = 1 if next(e for e in vector if e) > 0 else -1  # what enters the units has a positive exponent
        full = dict(zip(where, vector, strict=True))
        found.append(tuple(sign * full.get(k, 0) for k in range(len(live))))
    return found


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
                    run = row.view(one_run(row.shape, axis)).movedim(axis.dim, 0)
                    run[axis.index[:, : cell.units.count // count].flatten()] += power
        flat = rows.flatten(1).numpy()
        mixed = np.random.default_rng(0).random(len(flat)) @ flat
        columns.append(flat[:, np.unique(mixed, return_index=True)[1]])
    return np.concatenate(columns, 1)
