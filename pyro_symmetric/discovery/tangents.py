"""Directions in which a symmetry moves weights, and those of known families that the Jacobian confirms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from pyro_symmetric.discovery.fields import Candidate, Field
from pyro_symmetric.discovery.jacobian import Jacobian
from pyro_symmetric.groups import Group
from pyro_symmetric.groups.tensors import along_axis
from pyro_symmetric.groups.units import Move
from pyro_symmetric.weights import Weights

SKETCH, TRIALS = 200, 2
EXACT = 1e-8  # relative change of the outputs that counts as none
BASIS = 4_000_000  # numbers of a basis that are computed at once


class Point(NamedTuple):
    """Weights, rows of the Jacobian there, and random combinations of these rows.

    Rows stay on the network's device, where the work on them is done; all else is on the CPU.
    """

    weights: Weights
    rows: Tensor
    sketch: Tensor


def point(jacobian: Jacobian, number: int, generator: torch.Generator, centred: bool = False) -> Point:
    """Random weights, and at least so many rows.

    :param centred: see :meth:`~pyro_symmetric.discovery.jacobian.Jacobian.draw`.
    """
    weights = jacobian.draw(generator, centred)
    rows = jacobian.rows(weights, number, generator)
    mixed = torch.randn(SKETCH, len(rows), generator=generator, dtype=torch.float64, device="cpu") / len(rows) ** 0.5
    return Point(weights, rows, (mixed.to(rows.device) @ rows).cpu())


def found_tangents(group: Group, jacobian: Jacobian, weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """For some units at a time: their move, and tangents ``(units, weights)`` of all scales and shifts of a group."""
    moves: tuple[Move, ...] = ("scale", "shift")
    for move in moves:
        for name in group.names(move):
            if all(axis.site in jacobian.shapes for axis in group[name].axes if axis.exponent or move == "shift"):
                yield move, jacobian.flat(_moved(group, name, move, weights))


def _moved(group: Group, name: str, move: Move, weights: Weights) -> Weights:
    """For each unit, how all sites move as its log-scale or its shift begins to grow."""
    one = group[name]
    each = torch.eye(one.count, dtype=torch.float64, device="cpu").reshape(one.count, *one.shape)
    element = group.element(log_scales={name: each}) if move == "scale" else group.element(shifts={name: each})
    moved = {}
    for site in dict.fromkeys(axis.site for axis in one.axes):
        value = group.view(site, weights[site])
        total = value.new_zeros(one.count, *value.shape)
        for dim in group.members(site):
            along = element.axis_multiplier(site, dim).log() if move == "scale" else element.axis_shift(site, dim)
            if along is not None:
                total = total + along_axis(along, dim, value.dim())
        moved[site] = group.view_back(site, total * (value + group.epsilon(site)) if move == "scale" else total)
    return moved


class Confirmed(NamedTuple):
    """A family that leaves the function alone, with the coefficients of its helpers."""

    candidate: Candidate
    coefficients: Tensor

    def basis(self, jacobian: Jacobian, weights: Weights, generator: torch.Generator) -> Tensor:
        """Tangents that span all of the family's: ``(number, weights)``, of random numbers."""
        kept = [(1.0, self.candidate.main)]
        kept += [(float(c), f) for c, f in zip(self.coefficients, self.candidate.helpers, strict=True) if abs(c) > 1e-9]

        def tangent(raw: Tensor) -> Tensor:
            raw = self.candidate.project(raw)
            return sum(
                (c * jacobian.flat(f(weights, raw)) for c, f in kept), torch.zeros(jacobian.size, device="cpu").double()
            )

        number = min(self.candidate.dimension, jacobian.size)
        raws = torch.randn(number, *self.candidate.shape, generator=generator, dtype=torch.float64, device="cpu")
        return vmap(tangent, chunk_size=max(1, BASIS // jacobian.size))(raws)


def confirmed(
    variants: Sequence[Candidate], jacobian: Jacobian, points: Sequence[Point], generator: torch.Generator
) -> Confirmed | None:
    """The first variant of a family that leaves the function alone, if any does."""
    for candidate in variants:
        coefficients = _coefficients(candidate, jacobian, points, generator)
        if coefficients is not None:
            return Confirmed(candidate, coefficients)
    return None


def _coefficients(
    candidate: Candidate, jacobian: Jacobian, points: Sequence[Point], generator: torch.Generator
) -> Tensor | None:
    """Constants with which the helpers undo what the main field does to the outputs, for random numbers and weights.

    Fewer unknowns than equations: a solution is no accident.
    """
    rows, sides, sizes = [], [], []
    for point in points:
        for _ in range(TRIALS):
            raw = candidate.project(
                torch.randn(candidate.shape, generator=generator, dtype=torch.float64, device="cpu")
            )
            main, *helpers = (_flat(f, jacobian, point.weights, raw) for f in (candidate.main, *candidate.helpers))
            if not bool(main.any()):
                return None
            sides.append(point.sketch @ main)
            sizes.append(point.sketch.norm() * main.norm())
            rows.append(point.sketch @ torch.stack(helpers, 1) if helpers else sides[-1].new_empty(len(sides[-1]), 0))
    side, matrix = torch.cat(sides), torch.cat(rows)
    solution = (
        torch.linalg.lstsq(matrix, -side[:, None], driver="gelsd").solution[:, 0] if matrix.shape[1] else side[:0]
    )
    left = side + matrix @ solution
    return solution if float(left.norm()) < EXACT * float(torch.stack(sizes).max()) else None


def _flat(along: Field, jacobian: Jacobian, weights: Weights, raw: Tensor) -> Tensor:
    """The change of the weights along a field; none, if it moves something that doesn't count as a weight."""
    moved = along(weights, raw)
    return jacobian.flat(moved if moved.keys() <= jacobian.shapes.keys() else {})
