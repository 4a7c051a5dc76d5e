"""Scalings and signs: the solutions of linear equations between the log-multipliers of atoms.

Equations tie few atoms at a time, unit by unit, so the system falls into many small components that look alike: each is
brought to a canonical form, solved once (exactly, in rational numbers or modulo two), and the units whose components
look alike form one factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from pyro_symmetric.symmetry.assembly import module_name
from pyro_symmetric.symmetry.elimination import eliminated, eliminated_signs
from pyro_symmetric.symmetry.facts import Facts, Leaf, Term
from pyro_symmetric.symmetry.forest import components
from pyro_symmetric.symmetry.labels import Array
from pyro_symmetric.symmetry.rescaling import RescaledAxis, RescalingFactor
from pyro_symmetric.symmetry.structure import mix
from pyro_symmetric.symmetry.view import length_of

# A component with so many unknowns, or so many free ones, is no unit but a tangle; its members aren't rescaled.
TANGLE, FREE = 1_000, 16


@dataclass(frozen=True, eq=False)
class _Entries:
    """All terms of all equations as flat arrays: which equation (of which kind), which atom, with which coefficient."""

    kind: Array
    equation: Array
    slot: Array
    atom: Array
    coefficient: Array


def scaling_factors(facts: Facts) -> list[RescalingFactor]:
    """The positive scalings."""
    return _factors(facts, facts.scale_equations, signs=False)


def sign_factors(facts: Facts) -> list[RescalingFactor]:
    """The sign flips."""
    return _factors(facts, facts.sign_equations, signs=True)


def _factors(facts: Facts, equations: Sequence[Sequence[Term]], signs: bool) -> list[RescalingFactor]:
    if signs:
        equations = [[(1.0, atoms) for c, atoms in terms if int(c) % 2] for terms in equations]
    zero = _still(facts.size, equations)
    used = [terms for terms in equations if any(not zero[atoms].all() for _, atoms in terms)]
    entries = _entries(used, zero)
    families = _families(facts.size, entries, _leaf_axes(facts)[0])
    found: list[_Family] = []
    for members, local in families:
        found += [_Family(members, vector) for vector in _solve(members[0], local, entries, signs)]
    return _assembled(facts, found)


def _still(size: int, equations: Sequence[Sequence[Term]]) -> Array:
    """Which atoms have multiplier one, as the only unknown that is left in some equation, again and again."""
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


def _entries(equations: Sequence[Sequence[Term]], zero: Array) -> _Entries:
    pieces: list[tuple[Array, ...]] = []
    start = 0
    for kind, terms in enumerate(equations):
        length = max(len(atoms) for _, atoms in terms)
        for slot, (coefficient, atoms) in enumerate(terms):
            keep = np.flatnonzero(~zero[atoms])
            pieces.append(
                (
                    np.full(len(keep), kind),
                    start + keep,
                    np.full(len(keep), slot),
                    atoms[keep],
                    np.full(len(keep), coefficient),
                )
            )
        start += length
    if not pieces:
        pieces = [(np.empty(0, dtype=np.int64),) * 5]
    return _Entries(*(np.concatenate(column) for column in zip(*pieces, strict=True)))


@dataclass(frozen=True, eq=False)
class _Family:
    """Units that are rescaled alike.

    :param atoms: (units, unknowns): the atoms of each unit in corresponding order.
    :param exponents: (unknowns,): the exponent with which the unit's multiplier enters each.
    """

    atoms: Array
    exponents: Sequence[int]


def _families(size: int, entries: _Entries, site_of: Array) -> list[tuple[Array, Array]]:
    """Components of the system, by what they look like: (atoms (units, unknowns), rows of entries of the first)."""
    if not len(entries.atom):
        return []
    order = np.argsort(entries.equation, kind="stable")
    equation, atom = entries.equation[order], entries.atom[order]
    same = np.flatnonzero(equation[1:] == equation[:-1])
    _, component = components(size, atom[same], atom[same + 1])
    order = np.lexsort([entries.slot, entries.equation, component[entries.atom]])
    own, equation, atom = component[entries.atom[order]], entries.equation[order], entries.atom[order]
    starts = np.flatnonzero(np.r_[True, own[1:] != own[:-1]])
    lengths = np.diff(np.r_[starts, len(own)])
    local, unknowns, atoms = _local_numbers(own, atom)
    # What one entry looks like from within its component; the sum of these is what the component looks like.
    key = np.zeros(len(own), dtype=np.uint64)
    rank = np.arange(len(own)) - np.repeat(starts, lengths)
    coefficient = entries.coefficient[order].astype(np.float64).view(np.int64)
    for aspect in (rank, entries.kind[order], entries.slot[order], local, _equation_numbers(own, equation),
                   coefficient, site_of[atom]):  # fmt: skip
        with np.errstate(over="ignore"):
            key = mix(key * np.uint64(3) + mix(aspect))
    with np.errstate(over="ignore"):
        look = np.add.reduceat(key, starts)
    sorted_ = np.argsort(look, kind="stable")
    cuts = np.flatnonzero(look[sorted_][1:] != look[sorted_][:-1]) + 1
    offsets = np.r_[0, np.cumsum(unknowns)]
    families = []
    for which in np.split(sorted_, cuts):
        count = int(unknowns[which[0]])
        if count <= TANGLE:
            first = which[0]
            rows = order[starts[first] : starts[first] + lengths[first]]
            families.append((atoms[offsets[which][:, None] + np.arange(count)], rows))
    return families


def _local_numbers(own: Array, atom: Array) -> tuple[Array, Array, Array]:
    """Number the atoms of each component as they appear: (number of each entry, how many, all atoms in order)."""
    distinct, first, where = np.unique(atom, return_index=True, return_inverse=True)
    by_appearance = np.argsort(first)  # entries are sorted by component, so components stay together
    position = np.empty(len(distinct), dtype=np.int64)
    position[by_appearance] = np.arange(len(distinct))
    component = own[first][by_appearance]
    starts = np.flatnonzero(np.r_[True, component[1:] != component[:-1]]) if len(component) else np.empty(0, np.int64)
    counts = np.diff(np.r_[starts, len(component)])
    number = np.arange(len(component)) - np.repeat(starts, counts)
    return number[position[where.reshape(-1)]], counts, distinct[by_appearance]


def _equation_numbers(own: Array, equation: Array) -> Array:
    """Number the equations of each component in order."""
    if not len(own):
        return own
    new = np.r_[False, (equation[1:] != equation[:-1]) & (own[1:] == own[:-1])]
    total = np.cumsum(new)
    starts = np.flatnonzero(np.r_[True, own[1:] != own[:-1]])
    return total - np.repeat(total[starts], np.diff(np.r_[starts, len(own)]))


def _solve(members: Array, rows: Array, entries: _Entries, signs: bool) -> list[list[int]]:
    """A basis of the solutions of one component, in small whole numbers."""
    number = {int(atom): i for i, atom in enumerate(members)}
    equations: dict[int, dict[int, Fraction]] = {}
    for row in rows.tolist():
        terms = equations.setdefault(int(entries.equation[row]), {})
        unknown = number[int(entries.atom[row])]
        terms[unknown] = terms.get(unknown, Fraction(0)) + Fraction(float(entries.coefficient[row])).limit_denominator(
            64
        )
    return _kernel(list(equations.values()), len(members), signs)


def _kernel(equations: Sequence[dict[int, Fraction]], size: int, signs: bool) -> list[list[int]]:
    """A basis of the solutions: one vector for each free unknown; none at all if too many are free."""
    if size - len(equations) > FREE:
        return []
    solved = eliminated_signs(equations) if signs else eliminated(equations)
    free = [i for i in range(size) if i not in solved]
    if len(free) > FREE:
        return []
    vectors = []
    for unknown in free:
        vector = [Fraction(int(i == unknown)) for i in range(size)]
        for pivot, form in solved.items():
            vector[pivot] = form.get(unknown, Fraction(0))
        denominator = int(np.lcm.reduce([v.denominator for v in vector]))
        vectors.append([int(v * denominator) for v in vector])
    return vectors


def _is_idle(parts: Sequence[RescaledAxis], shapes: Mapping[str, torch.Size]) -> bool:
    """Whether multipliers cancel within every site: all of one axis times, all of another axis divided by the same."""
    total: dict[str, int] = {}
    for axis in parts:
        if axis.index.shape[1] > 1 or axis.index.shape[0] < length_of(axis, shapes):
            return False
        total[axis.site] = total.get(axis.site, 0) + axis.exponent
    return not any(total.values())


def _leaf_axes(facts: Facts) -> tuple[Array, Array]:
    """For each atom: the number of the leaf axis that it lies on (-1: none), and its (first) position there."""
    axis, position = np.full(facts.size, -1, dtype=np.int64), np.zeros(facts.size, dtype=np.int64)
    parts = [(leaf, dim) for leaf in facts.leaves.values() for dim in range(len(leaf.parts))]
    for number, (leaf, dim) in enumerate(parts):
        atoms, place = leaf.parts[dim].atoms, np.arange(leaf.shape[dim])
        if leaf.groups > 1 and dim == 1:
            first = np.arange(0, leaf.shape[0], leaf.shape[0] // leaf.groups)
            atoms, place = leaf.columns, first[:, None] * leaf.shape[1] + place
        axis[atoms], position[atoms] = number, place
    return axis, position


def _rescaled_axis(leaf: Leaf, dim: int, index: Array, exponent: int, epsilon: float | None) -> RescaledAxis:
    """One axis of a leaf, at these positions; columns of a grouped kernel lie in all rows of their group."""
    span = 1
    if leaf.groups > 1 and dim == 1:
        rows = np.arange(leaf.shape[0] // leaf.groups) * leaf.shape[1]
        index = (index[:, None] + rows[:, None]).reshape(-1, index.shape[1])
        dim, span = 0, 1 if leaf.shape[1] == 1 else 2
    return RescaledAxis(
        leaf.site, dim, torch.from_numpy(np.ascontiguousarray(index)), exponent, leaf.buffer, epsilon, span
    )


def _assembled(facts: Facts, families: Sequence[_Family]) -> list[RescalingFactor]:
    """Where the atoms of each family lie in the leaves."""
    site_of, position = _leaf_axes(facts)
    axes = [(leaf, dim) for leaf in facts.leaves.values() for dim in range(len(leaf.parts))]
    found: list[tuple[int, list[RescaledAxis], str, int]] = []
    for family in families:
        rescaled: dict[tuple[int, int], list[Array]] = {}
        for column, exponent in zip(family.atoms.T, family.exponents, strict=True):
            where = site_of[column]
            if exponent == 0 or where[0] < 0:
                continue
            if (where != where[0]).any():
                raise RuntimeError("units that are rescaled alike lie in different sites")
            rescaled.setdefault((int(where[0]), exponent), []).append(position[column])
        if not rescaled:
            continue
        leading = min(rescaled, key=lambda key: (key[0], int(np.min(rescaled[key]))))
        first, sign = leading[0], 1 if leading[1] > 0 else -1  # what enters the units has a positive exponent
        order = np.argsort(rescaled[leading][0], kind="stable")
        parts = []
        for (number, exponent), rows in sorted(rescaled.items()):
            leaf, dim = axes[number]
            index = np.stack(rows)[:, order]
            parts.append(_rescaled_axis(leaf, dim, index, sign * exponent, facts.epsilons.get(leaf.site)))
        if not _is_idle(parts, {leaf.site: torch.Size(leaf.shape) for leaf, _ in axes}):
            found.append((first, parts, module_name(axes[first][0].site), len(order)))
    names: dict[str, int] = {}
    factors = []
    for _, parts, name, size in sorted(found, key=lambda item: (item[0], int(item[1][0].index.min()))):
        names[name] = names.get(name, 0) + 1
        unique = name if names[name] == 1 else f"{name}~{names[name]}"
        factors.append(RescalingFactor(unique, size, tuple(parts)))
    return factors
