"""Moves that lie along no axis, tried one by one: what holds becomes a remark.

Layers that exchange as wholes, a gain in front of a layer, or units that go from one
member of an ensemble to another lie along no axis. A small network is evaluated in
double precision, at fresh weights, after each of a list of such moves. A move lists the
places, from 1, that each weight comes from, negative if it changes sign.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import (
    combinations,
    combinations_with_replacement,
    compress,
    islice,
    product,
)

import numpy as np
import torch
from torch import Tensor, nn

from pyro_symmetric._process import without_fast_attention, without_warnings
from pyro_symmetric.discovery.integer_algebra import independent
from pyro_symmetric.discovery.linear_twin import (
    NotDifferentiable,
    Pass,
    in_double,
    random_like,
)
from pyro_symmetric.discovery.symmetry import Symmetry, fresh, plain_weights
from pyro_symmetric.discovery.trace import Trace
from pyro_symmetric.groups import Axis
from pyro_symmetric.groups.axes import spanned
from pyro_symmetric.weights import Weights, drop_names, map_values, select_rows

# weights and parameters of a network, and moves, at most
WEIGHTS, PARAMETERS, MOVES = 20_000, 30, 120
FEW = 20  # moves of a network that can't be batched
SUBSETS = 8  # of more parameters, two at most change sign together
SIZES = 2 * (1.0, 0.3, 30.0)  # of inputs
SAME = 1e-9  # the relative change of outputs that is rounding

Move = tuple[str, Tensor]  # in words, and as a list of places


def with_wholes(
    symmetry: Symmetry, net: nn.Module, trace: Trace, held: set[str]
) -> Symmetry:
    """Add a remark if moves hold that aren't in the group, which then says at least.

    :param held: the sites that don't move.
    """
    weights = plain_weights(net, symmetry.group)
    if symmetry.at_least or len(weights) > PARAMETERS:
        return symmetry
    values = weights.values()
    if any(not v.is_floating_point() or v.device.type != "cpu" for v in values):
        return symmetry
    if sum(value.numel() for value in values) > WEIGHTS:
        return symmetry
    try:
        with torch.no_grad(), without_fast_attention(), without_warnings():
            moves = _Wholes(symmetry, weights, trace, held).moves_that_hold()
    except NotDifferentiable:
        return symmetry
    if not moves:
        return symmetry
    remark = f"these hold, but aren't in the group: {'; '.join(moves[:3])}"
    return replace(symmetry, at_least=True, remarks=(*symmetry.remarks, remark))


class _Wholes:
    """A network as a function of one vector of weights.

    :ivar places: site -> the places of its weights, in its shape.
    """

    def __init__(
        self, symmetry: Symmetry, weights: Weights, trace: Trace, held: set[str]
    ):
        self.group = symmetry.group
        self.run = Pass(trace, symmetry.logits)
        self.weights = map_values(in_double, weights)
        self.batched = True
        self.places = dict[str, Tensor]()
        self.still = torch.arange(0, device="cpu")
        for site, value in self.weights.items():
            if site not in held:
                start = len(self.still)
                self.still = torch.arange(1, start + value.numel() + 1, device="cpu")
                self.places[site] = self.still[start:].reshape(value.shape) - 1

    def moves_that_hold(self) -> list[str]:
        """Return the moves that hold and that the group lacks, in words."""
        exchanges, _ = self._held(self._exchanges())
        flips, idle = self._held(self._flips())
        known = [("", self.still), *idle, *self._flips_of_group()]
        signs = torch.stack([move for _, move in (*known, *flips)]).sign().numpy()
        # columns that are alike count once
        codes = np.random.default_rng(0).standard_normal(len(signs)) @ signs
        columns = np.unique(codes.round(9), return_index=True)[1]
        new = [row - len(known) for row in independent(signs[:, columns] < 0, True)]
        flips = [flips[number] for number in new if number >= 0]
        return [text for text, _ in (*exchanges, *flips)]

    def _changed(self, rows: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Return whether outputs differ from those at the first of several weights."""

        def outputs(drawn: Weights) -> Tensor:
            results = self.run.outputs(self.weights | drawn, inputs, torch.float64)
            return torch.cat([*map(_real_entries, results)])

        drawn = {site: rows[:, places] for site, places in self.places.items()}
        if self.batched:
            try:
                moved = torch.vmap(outputs)(drawn)
            except (NotDifferentiable, RuntimeError):
                self.batched = False
        if not self.batched:
            one_by_one = [select_rows(drawn, row) for row in range(len(rows))]
            moved = torch.stack([*map(outputs, one_by_one)])
        first = moved[0]
        finite = first.isfinite()  # masked logits aren't
        as_finite = (moved.isfinite() == finite).all(1)
        change = torch.where(finite, moved - first, 0.0).abs().amax(1)
        size = torch.where(finite, first, 0.0).abs().max()
        return ~(as_finite & (change <= SAME * size))

    def _held(self, moves: Iterator[Move]) -> tuple[list[Move], list[Move]]:
        """Return the moves that change no output: of weights that matter, and of
        others. If they exchange, more than their sum must matter.
        """
        most = MOVES if self.batched else FEW
        hold = [("", self.still), *islice(moves, most)]
        matter = torch.zeros(len(hold), dtype=torch.bool, device="cpu")
        for size in SIZES:
            if len(hold) == 1:
                break
            inputs = []
            for value in self.run.trace.tensors:
                inputs.append(random_like(in_double(value), size=size))
            drawn = []
            for site in self.places:
                value = fresh(self.weights[site], site in self.group.buffers)
                drawn.append(value.flatten())
            weights = torch.cat(drawn)
            noise = torch.randn_like(weights)
            order = torch.stack([move for _, move in hold])
            unchanged = ~self._changed(order.sign() * weights[order.abs() - 1], inputs)
            hold = [*compress(hold, unchanged.tolist())]
            order = order[unchanged]
            matter = matter[unchanged]
            nudges = noise - noise[order.abs() - 1] + noise * (order < 0)
            matter |= self._changed(weights + nudges, inputs)
        idle = compress(hold, (~matter).tolist())
        return [*compress(hold, matter.tolist())], [*idle]

    # signs ----------------------------------------------------------------------------

    def _flips(self) -> Iterator[Move]:
        """Iterate over flips of parameters, and of one unit or two along some axes."""
        yield from self._subsets(drop_names(self.places, self.group.buffers), "")
        for units in self.group.units.values():
            for chosen in ([0], [1], [0, 1]) if units.size > 1 else ():
                axes = self._axes(units.name)[:4]
                blocks = {str(axis): self._of_units(axis, chosen) for axis in axes}
                yield from self._subsets(blocks, f"units {chosen} of ")

    def _subsets(self, blocks: Mapping[str, Tensor], what: str) -> Iterator[Move]:
        most = len(blocks) if len(blocks) <= SUBSETS else 2
        for count in range(1, most + 1):
            for names in combinations(blocks, count):
                text = f"{what}{', '.join(names)} change sign"
                yield text, self._flip([blocks[name] for name in names])

    def _flips_of_group(self) -> Iterator[Move]:
        """Iterate over the group's flips, as far as these are tried."""
        for name in self.group.names("flip"):
            units = self.group[name]
            odd = [axis for axis in self._axes(name) if axis.exponent % 2]
            for width, start in product((units.count, units.size, 1), (0, 1)):
                chosen = range(units.count)[start * width : (start + 1) * width]
                yield name, self._flip([self._of_units(axis, chosen) for axis in odd])

    def _flip(self, blocks: Iterable[Tensor]) -> Tensor:
        move = self.still.clone()
        for places in blocks:
            move[places] *= -1
        return move

    # exchanges ------------------------------------------------------------------------

    def _exchanges(self) -> Iterator[Move]:
        """Iterate over exchanges of parameters and modules that are alike in shape; of
        units of two sets, or copies; and of units at one place of another axis.
        """
        below = dict[str, dict[str, Tensor]]()
        for site, places in self.places.items():
            for dot in re.finditer(r"\.|$", site):
                path = site[: dot.start()]
                below.setdefault(path, {})[site[dot.start() :]] = places
        for first_group, second_group in combinations(below, 2):
            first = below[first_group]
            second = below[second_group]
            if [*first] == [*second]:
                pairs = [*zip(first.values(), second.values(), strict=True)]
                yield from self._exchange(f"{first_group} and {second_group}", pairs)
        yield from self._exchanges_of_units()
        yield from self._exchanges_in_members()

    def _exchanges_of_units(self) -> Iterator[Move]:
        for first, second in combinations_with_replacement(self.group.units, 2):
            start = self.group[first].size if first == second else 0
            if self.group[second].count > start != 1:
                axes = self._axes(first)
                second_axes = self._axes(second)
                if len(axes) == len(second_axes):
                    pairs = []
                    for axis, second_axis in zip(axes, second_axes, strict=True):
                        to = self._of_units(second_axis, [start])
                        pairs.append((self._of_units(axis, [0]), to))
                    text = f"units of {first} and others of {second}"
                    yield from self._exchange(text, pairs)

    def _exchanges_in_members(self) -> Iterator[Move]:
        for name in self.group.names("permute"):
            axes = self._axes(name) if self.group[name].size > 1 else []
            choices = product(*(range(self.places[axis.site].dim()) for axis in axes))
            for dims in islice(choices, SUBSETS):
                pairs = []
                lengths = set()
                for axis, dim in zip(axes, dims, strict=True):
                    places = self.places[axis.site]
                    lengths.add(places.shape[dim])
                    member = places.select(dim, 0).flatten()
                    first = self._of_units(axis, [0])
                    second = self._of_units(axis, [1])
                    first = first[torch.isin(first, member)]
                    second = second[torch.isin(second, member)]
                    pairs.append((first, second))
                if len(lengths - {1}) == 1:
                    yield from self._exchange(f"units of {name} in one member", pairs)

    def _exchange(
        self, text: str, pairs: Sequence[tuple[Tensor, Tensor]]
    ) -> Iterator[Move]:
        """Iterate over the exchange of pairs of places, if these are alike in shape."""
        if all(first.shape == second.shape for first, second in pairs):
            move = self.still.clone()
            for first, second in pairs:
                move[first], move[second] = move[second], move[first]
            yield f"{text} exchange", move

    # axes -----------------------------------------------------------------------------

    def _axes(self, name: str) -> list[Axis]:
        return [axis for axis in self.group[name].axes if axis.site in self.places]

    def _of_units(self, axis: Axis, chosen: Sequence[int]) -> Tensor:
        """Return the places of some units along an axis."""
        places = self.places[axis.site]
        along = spanned(places, axis.dim, axis.span).movedim(axis.dim, 0)
        return along[axis.index[:, [*chosen]]].flatten()


def _real_entries(value: Tensor) -> Tensor:
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.flatten()
