"""Scales and signs: the solutions of linear equations between the log-multipliers of atoms.

Equations tie few atoms at a time, unit by unit, so the system falls into many small components that look alike: each is
brought to a canonical form and solved once (exactly, in rational numbers or modulo two) for all that look alike.
:mod:`~pyro_symmetric.discovery.scaling.attachment` then says which units the multipliers belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch

from pyro_symmetric.discovery.arrays import Array, by_appearance, components, mix
from pyro_symmetric.discovery.cells import Cells
from pyro_symmetric.discovery.scaling.common_signs import common_signs
from pyro_symmetric.discovery.scaling.facts import Facts, Leaf, Multiple
from pyro_symmetric.discovery.scaling.nullspace import nullspace
from pyro_symmetric.discovery.scaling.slices import Run, narrowed
from pyro_symmetric.groups import Axis

# A component with so many unknowns, or so many free ones, is no unit but a tangle; its members aren't rescaled.
TANGLE, FREE = 1_000, 16


class _Entries(NamedTuple):
    """All terms of all equations as flat arrays: which equation (of which kind), which atom, with which coefficient."""

    kind: Array
    equation: Array
    slot: Array
    atom: Array
    coefficient: Array


class _Alike(NamedTuple):
    """Units that are rescaled alike.

    :param atoms: (units, unknowns): the atoms of each unit in corresponding order.
    :param exponents: (unknowns,): the exponent with which the unit's multiplier enters each.
    """

    atoms: Array
    exponents: Sequence[int]


def multipliers(facts: Facts, structure: Cells, move: str) -> list[tuple[Axis, ...]]:
    """All scales or all signs: for each set of things that are multiplied alike, the axes along which they lie.

    :param structure: which units are exchanged.
    :param move: ``"scale"`` or ``"flip"``.
    """
    signs = move == "flip"
    equations: Sequence[Sequence[Multiple]] = facts.sign_equations if signs else facts.scale_equations
    if signs:
        equations = [[(1.0, atoms) for c, atoms in terms if int(c) % 2] for terms in equations]
    zero = known = _still(facts.size, equations)
    if signs:  # common ones are found by themselves
        zero = _still(facts.size, [[(1.0, np.array(facts.common, dtype=np.int64))], *equations])
    else:
        zero = _untangled(facts, equations, zero)
    used = [terms for terms in equations if any(not zero[atoms].all() for _, atoms in terms)]
    entries = _entries(used, zero)
    axes = _leaf_axes(facts.leaves.values())
    axis, position = _positions(facts.size, axes)
    dims = np.array([*(along.dim for along in axes), np.iinfo(int).max])
    found: list[_Alike] = []
    for atoms, local in _alike(facts.size, entries, axis):
        # Rows are free before columns, which follow what enters the units: so each unit has a multiplier of its own.
        members = atoms[:, dims[axis[atoms[0]]].argsort(kind="stable")]
        found += [_Alike(members, vector) for vector in _solve(members[0], local, entries, signs)]
    if signs:
        together = common_signs(facts, structure, equations, known)
        found += [_Alike(atoms[None, axis[atoms] >= 0], [1] * int((axis[atoms] >= 0).sum())) for atoms in together]
    return _placed(found, axes, axis, position, facts.epsilons, signs)


def _still(size: int, equations: Sequence[Sequence[Multiple]]) -> Array:
    """Find the atoms that have multiplier one, as the only unknown that is left in some equation, again and again."""
    zero = np.zeros(size, dtype=bool)
    todo = list(equations)
    while todo:
        before, later = int(zero.sum()), []
        for terms in todo:
            if not terms:
                continue
            free = np.stack([~zero[atoms] for _, atoms in terms])
            count = free.sum(0)
            for (_, atoms), open_ in zip(terms, free, strict=True):
                zero[atoms[open_ & (count == 1)]] = True
            if (count > 1).any():
                later.append(terms)
        todo = later
        if int(zero.sum()) == before:
            break
    return zero


def _untangled(facts: Facts, equations: Sequence[Sequence[Multiple]], zero: Array) -> Array:
    """Give up multipliers that all units of something share, if they tangle up what is free without them."""
    common = np.array(facts.common, dtype=np.int64)
    common = common[~zero[common]]
    if not len(common):
        return zero
    used = [terms for terms in equations if any(not zero[atoms].all() for _, atoms in terms)]
    entries = _entries(used, zero)
    order = np.argsort(entries.equation, kind="stable")
    equation, atom = entries.equation[order], entries.atom[order]
    same = equation[1:] == equation[:-1]
    count, component = components(facts.size, atom[:-1][same], atom[1:][same])
    unknowns = np.bincount(component[np.unique(atom)], minlength=count)
    stated = np.bincount(component[atom[np.r_[True, ~same][: len(atom)]]], minlength=count)
    tangled = (unknowns > TANGLE) | (unknowns - stated > FREE)
    dropped = common[tangled[component[common]]]
    return _still(facts.size, [[(1.0, dropped)], *equations]) if len(dropped) else zero


def _entries(equations: Sequence[Sequence[Multiple]], zero: Array) -> _Entries:
    pieces: list[tuple[Array, ...]] = [(np.empty(0, dtype=np.int64),) * 5]
    start = 0
    for kind, terms in enumerate(equations):
        for slot, (coefficient, atoms) in enumerate(terms):
            keep = np.flatnonzero(~zero[atoms])
            n = len(keep)
            row = np.full(n, kind), start + keep, np.full(n, slot), atoms[keep], np.full(n, coefficient)
            pieces.append(row)
        start += max(len(atoms) for _, atoms in terms)
    return _Entries(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


def _alike(size: int, entries: _Entries, site_of: Array) -> list[tuple[Array, Array]]:
    """Components of the system, by what they look like: (atoms (units, unknowns), rows of entries of the first)."""
    if not len(entries.atom):
        return []
    order = np.argsort(entries.equation, kind="stable")
    equation, atom = entries.equation[order], entries.atom[order]
    same = np.flatnonzero(equation[1:] == equation[:-1])
    _, component = components(size, atom[same], atom[same + 1])
    order = np.lexsort([entries.slot, entries.equation, component[entries.atom]])
    kind, equation, slot, atom, coefficient = (column[order] for column in entries)
    own = component[atom]
    starts = np.flatnonzero(np.r_[True, own[1:] != own[:-1]])
    lengths = np.diff(np.r_[starts, len(own)])

    def local(number: Array) -> Array:
        """Numbers that rise through all components, counted from the first of each component."""
        return number - np.repeat(number[starts], lengths)

    atoms, atom_number = by_appearance(atom)
    _, equation_number = by_appearance(equation)
    # What one entry looks like from within its component; the sum of these is what the component looks like.
    key = np.zeros(len(own), dtype=np.uint64)
    bits = coefficient.astype(np.float64).view(np.int64)
    rank = np.arange(len(own))
    for aspect in (local(rank), kind, slot, local(atom_number), local(equation_number), bits, site_of[atom]):
        with np.errstate(over="ignore"):
            key = mix(key * np.uint64(3) + mix(aspect))
    with np.errstate(over="ignore"):
        look = np.add.reduceat(key, starts)
    by_look = np.argsort(look, kind="stable")
    first = np.r_[atom_number[starts], len(atoms)]
    alike = []
    for which in np.split(by_look, np.flatnonzero(look[by_look][1:] != look[by_look][:-1]) + 1):
        unknowns, rows = np.diff(first)[which[0]], order[starts[which[0]] :][: lengths[which[0]]]
        if unknowns <= TANGLE:
            alike.append((atoms[first[which][:, None] + np.arange(unknowns)], rows))
    return alike


def _solve(members: Array, rows: Array, entries: _Entries, signs: bool) -> list[list[int]]:
    """A basis of the solutions of one component, in small whole numbers; none if too many unknowns are free."""
    number = {int(atom): i for i, atom in enumerate(members)}
    equations: dict[int, dict[int, Fraction]] = {}
    for row in rows.tolist():
        terms = equations.setdefault(int(entries.equation[row]), {})
        unknown, coefficient = number[int(entries.atom[row])], Fraction(float(entries.coefficient[row]))
        terms[unknown] = terms.get(unknown, Fraction(0)) + coefficient.limit_denominator(64)
    if len(members) - len(equations) > FREE:
        return []
    basis = nullspace(list(equations.values()), len(members), modulo_two=signs)
    return basis if len(basis) <= FREE else []


def _is_idle(axes: Sequence[Axis], shapes: Mapping[str, torch.Size], signs: bool) -> bool:
    """True if multipliers cancel within every site: all of one axis times, all of another axis divided by the same."""
    total: dict[str, int] = {}
    for axis in axes:
        if axis.index.shape[1] > 1 or axis.index.shape[0] < axis.length(shapes):
            return False
        total[axis.site] = total.get(axis.site, 0) + axis.exponent
    return not any(exponent % 2 if signs else exponent for exponent in total.values())


class _Along(NamedTuple):
    """Positions along one axis of a leaf; along an axis with slices, those of slices of one length.

    :param slices: the numbers of these slices; None along an axis without.
    """

    leaf: Leaf
    dim: int
    slices: Array | None


def _leaf_axes(leaves: Iterable[Leaf]) -> list[_Along]:
    found: list[_Along] = []
    for leaf in leaves:
        for dim, atoms in enumerate(leaf.labels):
            if atoms.ndim == 1 or leaf.slices is None:
                found.append(_Along(leaf, dim, None))
            else:
                sizes = leaf.slices.sizes
                found += [_Along(leaf, dim, np.flatnonzero(sizes == size)) for size in np.unique(sizes)]
    return found


def _positions(size: int, axes: Sequence[_Along]) -> tuple[Array, Array]:
    """For each atom: the number of the leaf axis that it lies on (-1: none), and its (first) position there."""
    axis, position = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)
    for number, (leaf, dim, slices) in enumerate(axes):
        atoms, place = leaf.labels[dim], np.arange(leaf.shape[dim])
        if slices is not None and leaf.slices is not None:
            run = Run(leaf.shape, [leaf.slices.axis, dim])
            first = np.searchsorted(leaf.slices.of, slices) * run.stride(leaf.slices.axis)
            atoms, place = atoms[slices], first[:, None] + place * run.stride(dim)
        axis[atoms], position[atoms] = number, place
    return axis, position


def _axis(along: _Along, index: Array, exponent: int, epsilon: float | None) -> Axis:
    """One axis of a leaf, at these positions; columns of a slice lie in all of its rows."""
    leaf, dim, slices = along
    span = 1
    if slices is not None and leaf.slices is not None:
        run = Run(leaf.shape, [leaf.slices.axis, dim])
        step = np.zeros(1, dtype=np.int64)
        for other, length in zip(run.dims, run.lengths, strict=True):
            if other != dim:
                own = leaf.slices.sizes[slices[0]] if other == leaf.slices.axis else length
                step = (step[:, None] + np.arange(own) * run.stride(other)).reshape(-1)
        index = (index[:, None] + step[:, None]).reshape(-1, index.shape[1])
        dim, span = run.dims[0], len(run.dims)
    positions = torch.from_numpy(np.ascontiguousarray(index))
    return narrowed(Axis(leaf.site, dim, positions, exponent, leaf.buffer, epsilon, span), leaf.shape)


def _merged(axes: Iterable[Axis], signs: bool) -> tuple[Axis, ...]:
    """The same axes, each block once; none if units share positions in another way, which no group has.

    Rows and columns of a depthwise kernel ``(channels, 1, ...)`` are the same numbers: their exponents add up, and two
    signs cancel.
    """
    places: dict[tuple[str, int, int], list[Axis]] = {}
    for axis in axes:
        places.setdefault((axis.site, axis.dim, axis.span), []).append(axis)
    merged: list[Axis] = []
    for own in places.values():
        if len(own) > 1:
            total: dict[tuple[int, ...], int] = {}
            for axis in own:
                for row in map(tuple, axis.index.tolist()):
                    total[row] = total.get(row, 0) + axis.exponent
            blocks = {exponent: [row for row in total if total[row] == exponent] for exponent in total.values()}
            if torch.tensor(list(total), device="cpu").unique().numel() < len(total) * own[0].index.shape[1]:
                return ()
            own = [
                replace(own[0], index=torch.tensor(rows, device="cpu"), exponent=n)
                for n, rows in blocks.items()
                if (n % 2 if signs else n)
            ]
        merged += own
    return tuple(merged)


def _placed(
    alike: Sequence[_Alike],
    axes: Sequence[_Along],
    leaf_axis: Array,
    position: Array,
    epsilons: Mapping[str, float],
    signs: bool,
) -> list[tuple[Axis, ...]]:
    """The places of the atoms in the leaves, in order of first use.

    Those that enter the same axes alike are one: the equations may have tangled them up, unit by unit.
    """
    shapes = {along.leaf.site: torch.Size(along.leaf.shape) for along in axes}
    found: list[tuple[int, int, tuple[Axis, ...]]] = []
    for one in alike:
        rows: dict[tuple[int, int], list[Array]] = {}
        for column, exponent in zip(one.atoms.T, one.exponents, strict=True):
            where = leaf_axis[column]
            if exponent == 0 or where[0] < 0:
                continue
            if (where != where[0]).any():
                raise RuntimeError("units that are multiplied alike lie in different sites")
            rows.setdefault((int(where[0]), exponent), []).append(position[column])
        if not rows:
            continue
        leading = min(rows, key=lambda key: (key[0], int(np.min(rows[key]))))
        sign = 1 if leading[1] > 0 else -1  # what enters the units has a positive exponent
        order = np.argsort(rows[leading][0], kind="stable")
        own_axes = (
            _axis(axes[number], np.stack(own)[:, order], sign * exponent, epsilons.get(axes[number].leaf.site))
            for (number, exponent), own in sorted(rows.items())
        )
        placed = _merged(own_axes, signs)
        if placed and not _is_idle(placed, shapes, signs):
            found.append((leading[0], int(placed[0].index.min()), placed))
    same: dict[tuple[Any, ...], list[tuple[Axis, ...]]] = {}
    for *_, placed in sorted(found, key=lambda item: item[:2]):
        look = tuple((a.site, a.dim, a.span, a.exponent, len(a.index)) for a in placed)
        same.setdefault(look, []).append(placed)
    return [
        tuple(replace(own[0], index=torch.cat([a.index for a in own], 1)) for own in zip(*every, strict=True))
        for every in same.values()
    ]
