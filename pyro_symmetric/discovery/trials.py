"""A network at random weights and inputs, where multipliers of its units are tried.

A law that holds at a few points may not hold at others: units may be off, clamps out of
reach. So units are multiplied at points near the network's weights, at fresh weights,
and at inputs of many sizes, and outputs are compared. Signs that the law can't see are
decided in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import is_lazy

from pyro_symmetric._process import without_fast_attention, without_warnings
from pyro_symmetric.discovery.integer_algebra import Exponents
from pyro_symmetric.discovery.linear_twin import (
    NotDifferentiable,
    Pass,
    gradients,
    in_dtype,
    is_bounded,
    random_like,
)
from pyro_symmetric.discovery.symmetry import fresh, near
from pyro_symmetric.discovery.verify import difference, guilty
from pyro_symmetric.groups import Axis, Units
from pyro_symmetric.groups.axes import spanned
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.weights import Weights

# Distances of points near the network's weights, in their deviations. A point with
# fresh weights follows each: there units are on that the network's own weights, a bias
# of minus six, say, never switch on.
NEAR = (0.3, 0.6, 1.2)
# Further points, at which proposals are tried only: as far as the last ones above, at
# weights as large as those of new layers, and, if there are bounds to reach, with fresh
# weights that are multiplied, and inputs of these sizes.
TEST_POINTS = 6
FAR = (
    *((factor, 1.0) for factor in (10.0, 100.0)),
    *((1.0, size) for size in (0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)),
)
# the least deviation of biases and gains in single precision, which hides what small
# ones contribute
AUDIBLE = 0.3
RESCALED = 1.1  # no power of two, so that losses times this round differently

# site, or leaf of one of its reads; dim and span of an axis
Place = tuple[str, int, int]


@dataclass(frozen=True, eq=False)
class LawCell:
    """Units with a common law.

    :param axes: the axes of the law, with one exponent each: pieces of the units' own.
    :param spanning: names of other units, whose combined multipliers may equal these.
    """

    units: Units
    axes: tuple[Axis, ...]
    spanning: frozenset[str]


Proposal = tuple[LawCell, Exponents]
Bases = dict[LawCell, list[Exponents]]


def pairs_in(bases: Bases) -> list[Proposal]:
    """List the exponents of all cells."""
    return [(cell, exponents) for cell, basis in bases.items() for exponents in basis]


def place_of(axis: Axis) -> Place:
    """Return what axes share that differ in their positions alone."""
    return axis.site, axis.dim, axis.span


class Tolerances(NamedTuple):
    """Relative tolerances in one precision.

    :param null: of singular values of laws.
    :param law: of the law of one gradient.
    :param outputs: of changes that pass as rounding.
    """

    null: float
    law: float
    outputs: float


TOLERANCES = {
    torch.float64: Tolerances(null=1e-8, law=1e-8, outputs=1e-7),
    torch.float32: Tolerances(null=1e-5, law=1e-4, outputs=1e-3),
}


class Point(NamedTuple):
    """Random weights, random inputs of each pass, and the network's outputs there."""

    weights: Weights
    inputs: list[list[Tensor]]
    outputs: list[Tensor]


class Loss(NamedTuple):
    """Weights, and the gradient of a random loss there; each read of a site may have a
    leaf of its own.

    :param rescaled: the gradient of :data:`RESCALED` times the loss, which rounds
        differently, if it was asked for.
    """

    weights: Weights
    gradient: Weights
    rescaled: Weights


@dataclass(frozen=True, eq=False)
class Network:
    """Forward passes of a network as functions of its weights.

    :param weights: the network's own, by site.
    :param buffers: the names of its buffers.
    :param small: whether it is probed at several points.
    :param dtype: the precision in which it is evaluated.
    """

    passes: Sequence[Pass]
    weights: Weights
    shapes: Mapping[str, torch.Size]
    buffers: set[str]
    small: bool
    dtype: torch.dtype
    generator: torch.Generator

    @classmethod
    def of(
        cls,
        passes: Sequence[Pass],
        net: nn.Module,
        shapes: Mapping[str, torch.Size],
        small: float = math.inf,
        large: float = math.inf,
    ) -> Network:
        """Return a network as a function of its weights at some sites.

        :param small: the number of weights from which on it isn't small.
        :param large: that from which on it is evaluated in single precision.
        """
        buffers = dict(net.named_buffers())
        tensors = dict(net.named_parameters()) | buffers
        values = {site: tensors[site].detach() for site in shapes}
        weights = {site: v for site, v in values.items() if not is_lazy(v)}
        size = sum(value.numel() for value in weights.values())
        return cls(
            passes,
            weights,
            shapes,
            set(buffers),
            size < small,
            torch.float64 if size < large else torch.float32,
            torch.Generator("cpu").manual_seed(0),
        )

    @property
    def tolerances(self) -> Tolerances:
        """The tolerances in the network's precision."""
        return TOLERANCES[self.dtype]

    @cached_property
    def center(self) -> Weights:
        """The network's weights in the precision of trials."""
        return {site: in_dtype(v, self.dtype) for site, v in self.weights.items()}

    @cached_property
    def epsilons(self) -> dict[str, float]:
        """Sites of running variances, with the constants that are added to them."""
        return {
            s: eps for forward in self.passes for s, eps in forward.epsilons.items()
        }

    @cached_property
    def untied(self) -> list[Pass]:
        """The passes with a leaf for each read."""
        return [forward.untied(self.weights) for forward in self.passes]

    @cached_property
    def has_powers(self) -> bool:
        """The verdict that a product depends on some weights more than once."""
        return any(forward.has_powers() for forward in self.untied)

    def leaves(self, twin: Move | None) -> dict[str, str]:
        """Return the further leaves of a twin, one for each read of a site, with the
        site.
        """
        leaves = dict[str, str]()
        for forward in self.untied if twin == "flip" else ():
            leaves |= forward.leaves
        return leaves

    def outputs(
        self,
        weights: Weights,
        inputs: Sequence[Sequence[Tensor]],
        twin: Move | None = None,
        unfitted: set[int] | None = None,
    ) -> list[Tensor]:
        """Compute the outputs of all passes; see :meth:`Pass.outputs`."""
        torch.default_generator.manual_seed(0)
        forwards = self.untied if twin == "flip" else self.passes
        outputs = list[Tensor]()
        with without_fast_attention(), without_warnings(), sdpa_kernel(SDPBackend.MATH):
            for forward, of_pass in zip(forwards, inputs, strict=True):
                outputs += forward.outputs(weights, of_pass, self.dtype, twin, unfitted)
        return outputs

    def losses(
        self, point: Point, count: int, twin: Move | None = None, rescales: bool = False
    ) -> Iterator[Loss]:
        """Iterate over random losses of the network, or of a twin, at a point.

        :param rescales: whether the first one is also rescaled.
        """
        values = dict(point.weights)
        for leaf, site in self.leaves(twin).items():
            values[leaf] = point.weights[site].clone()
        weights = {
            leaf: value.detach().requires_grad_() for leaf, value in values.items()
        }
        outputs = self.outputs(weights, point.inputs, twin)
        same_draws = torch.Generator("cpu").set_state(self.generator.get_state())
        slopes = gradients(outputs, weights, count, self.generator)
        for number, gradient in enumerate(slopes):
            rescaled: Weights = {}
            if rescales and number == 0:
                larger = [RESCALED * out for out in outputs]
                (rescaled,) = gradients(larger, weights, 1, same_draws)
            yield Loss(values, gradient, rescaled)

    # points ---------------------------------------------------------------------------

    def points(self) -> list[Point]:
        """Draw the points at which laws are read."""
        if not self.small:
            return [self.near_point(NEAR[0])]
        points = list[Point]()
        for spread in NEAR:
            points += [self.near_point(spread), self.fresh_point()]
        return points

    def test_points(self) -> list[Point]:
        """Draw further points, at which proposals for a small network are tried."""
        if not self.small:
            return []
        bounded = any(is_bounded(forward.trace) for forward in self.passes)
        return [
            *(self.near_point(NEAR[-1]) for _ in range(TEST_POINTS)),
            self.fresh_point(0.0),
            # norms undo the size of inputs
            *(self.fresh_point(*sizes) for sizes in (FAR if bounded else ())),
        ]

    def near_point(self, spread: float, center: Weights | None = None) -> Point:
        """Draw weights near others; inputs are the example's if the network doesn't
        take random ones.

        :param spread: the distance, in deviations of the weights.
        :param center: by default the network's own weights.
        """
        is_single = self.dtype == torch.float32
        weights = {
            site: near(
                value,
                site in self.buffers,
                spread,
                self.generator,
                AUDIBLE if is_single and value.dim() < 2 else 0.0,
            )
            for site, value in (center or self.center).items()
        }
        point = self._random_point(weights, 1.0)
        if point is not None:
            return point
        example = self.example
        return Point(weights, example, self.outputs(weights, example))

    def fresh_point(
        self, factor: float = 1.0, size: float = 1.0, fits_statistics: bool = False
    ) -> Point:
        """Draw fresh weights and inputs of a size; or a point near the network's
        weights times the factor, if outputs aren't finite there.

        :param factor: multiplies the weights' deviations; 0 for those of new layers.
        :param fits_statistics: whether running statistics are fitted in single
            precision, too.
        """
        center = dict[str, Tensor]()
        weights = dict[str, Tensor]()
        for site, value in self.center.items():
            is_buffer = site in self.buffers
            center[site] = value if is_buffer or factor == 1.0 else factor * value
            weights[site] = fresh(center[site], is_buffer, self.generator)
        point = self._random_point(weights, size, fits_statistics)
        return point or self.near_point(NEAR[-1], center)

    @property
    def example(self) -> list[list[Tensor]]:
        """The tensors among the example inputs of each pass."""
        return [
            [in_dtype(x, self.dtype) for x in forward.trace.tensors]
            for forward in self.passes
        ]

    def random_inputs(self, size: float = 1.0) -> list[list[Tensor]]:
        """Draw inputs of a size for each pass."""
        return [
            [random_like(x, self.generator, size) for x in of_pass]
            for of_pass in self.example
        ]

    def _random_point(
        self, weights: Weights, size: float, fits_statistics: bool = False
    ) -> Point | None:
        """Draw inputs at some weights, and fit the running statistics; None if the
        network has no finite outputs there.
        """
        # Fitted statistics keep every layer's signal, so that rounding accumulates: too
        # much for single precision, unless signals explode without them.
        fitted = self.epsilons if fits_statistics or self.dtype == torch.float64 else ()
        unfitted = {id(weights[site]) for site in fitted if site in weights}
        inputs = self.random_inputs(size)
        with suppress(NotDifferentiable):
            outputs = self.outputs(weights, inputs, None, unfitted)
            if all(bool(out.isfinite().all()) for out in outputs):
                return Point(weights, inputs, outputs)
        return None


@dataclass(frozen=True, eq=False)
class Trials:
    """Trials of multipliers at some points."""

    network: Network
    points: Sequence[Point]

    def confirmed(self, bases: Bases, factor: float) -> Bases:
        """Keep the exponents under which outputs are invariant when units are
        multiplied by powers of a factor.
        """
        proposals = pairs_in(bases)
        # One by one first, since changes may cancel; then all at once far off, where a
        # clamp isn't odd any more.
        for k, point in enumerate(self.points):
            if self.network.small and k == 0:
                proposals = [
                    proposal
                    for proposal in proposals
                    if not self._refuted([proposal], point, factor)
                ]
            refuted = set(self._refuted(proposals, point, factor))
            proposals = [proposal for proposal in proposals if proposal not in refuted]
        return {
            cell: [exponents for exponents in basis if (cell, exponents) in proposals]
            for cell, basis in bases.items()
        }

    def _refuted(
        self, proposals: Sequence[Proposal], point: Point, factor: float
    ) -> list[Proposal]:
        """Return the proposals that change outputs at a point.

        Random units are multiplied by the factor; all others are divided by it. Of a
        sign they stay; in a large network they change next, as there are few points.
        """
        powers = dict[Proposal, Tensor]()
        for proposal in proposals:
            count = proposal[0].units.count
            noise = torch.rand(count, generator=self.network.generator, device="cpu")
            power = torch.where(noise < 0.5, 1.0, 0.0 if factor < 0 else -1.0).double()
            # else nothing may move
            if len(proposals) == 1 or (factor < 0 and count == 1):
                power[0] = 1.0
            powers[proposal] = power

        halves = [powers]
        if factor < 0 and not self.network.small:
            halves.append({proposal: 1.0 - power for proposal, power in powers.items()})

        def change(subset: Sequence[Proposal]) -> bool:
            """Return whether these proposals together change outputs."""
            for half in halves:
                of_subset = {proposal: half[proposal] for proposal in subset}
                moved = self._moved(point, of_subset, factor)
                with torch.no_grad():
                    outputs = self.network.outputs(moved, point.inputs)
                error = difference(point.outputs, outputs)
                if not error < self.network.tolerances.outputs:
                    return True
            return False

        return guilty(proposals, change) if proposals and change(proposals) else []

    def _moved(
        self, point: Point, powers: Mapping[Proposal, Tensor], factor: float
    ) -> Weights:
        """Return weights whose units are multiplied by powers of a factor."""
        network = self.network
        total = dict[Place, Tensor]()
        for (cell, exponents), of_units in powers.items():
            largest = 1 if factor < 0 else max(map(abs, exponents))
            for axis, exponent in zip(cell.axes, exponents, strict=True):
                if exponent:
                    length = axis.length(network.shapes)
                    zeros = torch.zeros(length, dtype=torch.float64, device="cpu")
                    power = exponent / largest * of_units
                    total.setdefault(place_of(axis), zeros)[axis.index] += power
        moved = dict(point.weights)
        for (site, dim, span), power in total.items():
            value = spanned(moved[site], dim, span)
            along = power.reshape(-1, *(1 for _ in value.shape[dim + 1 :]))
            factors = (factor ** along.to(value.device)).to(value.real.dtype)
            epsilon = network.epsilons.get(site)
            if epsilon:
                value = (value + epsilon) * factors - epsilon
            else:
                value = value * factors
            moved[site] = value.reshape(network.shapes[site])
        return moved
