"""Products and sums of several labelled tensors: the one engine behind ``+``, ``*``, linear, conv, matmul, einsum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from pyro_symmetric.discovery.labels import Part, Value, positions, spread

if TYPE_CHECKING:
    from pyro_symmetric.discovery.labeller import Labeller, Passes

Sizes = dict[int, int]

# Equations over more entries than this aren't stated: the units that they are about aren't rescaled, and a warning
# says so.
EQUATION_LIMIT = 4_000_000


class _Operand(NamedTuple):
    """A value whose axes are letters, without axes of length one that are broadcast."""

    parts: list[Part]
    fixed: set[int]
    zero: bool
    coefficient: float


def combine(
    labeller: Labeller,
    operands: Sequence[tuple[Value, Sequence[int]]],
    out: list[int],
    kind: str,
    passes: Passes,
    coefficients: Sequence[float],
) -> Value:
    """See :meth:`Labeller.combine`."""
    sizes: Sizes = {}
    for value, letters in operands:
        for letter, n in zip(letters, value.shape, strict=True):
            sizes[letter] = max(sizes.get(letter, 1), n)
    if any(len(set(letters)) < len(letters) for _, letters in operands):  # a diagonal
        shape = [sizes.get(letter, 1) for letter in out]
        return labeller.give_up([value for value, _ in operands], shape, "one operand has the same axis twice")
    terms = [
        _operand(labeller, value, letters, sizes, coefficient)
        for (value, letters), coefficient in zip(operands, coefficients, strict=True)
    ]
    _tie(labeller, terms, sizes)
    groups = _overlapping([part for operand in terms for part in operand.parts])
    left: list[Part] = []
    for group in groups:
        own = [(op, part) for op in terms for part in op.parts if any(part is member for member in group)]
        left += _result(labeller, terms, own, out, sizes, kind, passes)
    place = {letter: i for i, letter in enumerate(out)}
    fixed = {place[letter] for operand in terms for letter in operand.fixed if letter in place}
    zero = any(op.zero for op in terms) if kind == "product" else all(op.zero for op in terms)
    return labeller.value([sizes.get(l, 1) for l in out], [p.renumbered(place) for p in left], fixed, zero)


def _operand(labeller: Labeller, value: Value, letters: Sequence[int], sizes: Sizes, coefficient: float) -> _Operand:
    own, to = dict(enumerate(value.shape)), dict(enumerate(letters))
    whole = {axis for axis, n in own.items() if n == sizes[to[axis]]}
    parts = [thin.renumbered(to) for part in value.parts for thin in labeller.thinned(part, whole, own)]
    return _Operand(parts, {to[axis] for axis in value.fixed}, value.zero, coefficient)


def _tie(labeller: Labeller, terms: Sequence[_Operand], sizes: Sizes) -> None:
    """State which units of different operands are the same, or members of each other."""
    facts = labeller.facts
    for one, other in combinations(terms, 2):
        for p in one.parts:
            for q in other.parts:
                common = set(p.axes) & set(q.axes)
                if not common:
                    continue
                if p.axes == q.axes:
                    facts.unify(p.atoms, q.atoms)
                else:
                    letters = tuple(sorted(common))
                    shared = next((part for part in (p, q) if part.axes == letters), None)
                    shared = shared or labeller.larger(p, letters, sizes)
                    for part in (p, q):
                        if part is not shared:
                            facts.relate(part.atoms, spread(shared, part.axes, sizes))
    for one in terms:
        for part in one.parts:
            facts.occur(part.atoms)
            for other in terms:
                apart = other.fixed & set(part.axes)
                if other is not one and apart:
                    facts.refine(part.atoms, positions(apart, part.axes, sizes), labeller.where)


def _overlapping(parts: Sequence[Part]) -> list[list[Part]]:
    groups: list[list[Part]] = []
    for part in parts:
        touching = [g for g in groups if any(set(part.axes) & set(other.axes) for other in g)]
        groups = [g for g in groups if all(g is not t for t in touching)]
        groups.append([*(other for g in touching for other in g), part])
    return groups


def _result(
    labeller: Labeller,
    terms: Sequence[_Operand],
    own: Sequence[tuple[_Operand, Part]],
    out: list[int],
    sizes: Sizes,
    kind: str,
    passes: Passes,
) -> list[Part]:
    """The labels that remain of parts that overlap, and the equations between their multipliers."""
    facts = labeller.facts
    for _, part in own:
        facts.still(part.atoms, not passes.scale, not passes.sign)
    if kind == "product":
        summed = [(op, p) for op, p in own if set(p.axes) - set(out)]
        kept = [(op.coefficient, p) for op, p in own if not set(p.axes) - set(out)]
        common = _balance_summed(labeller, summed, out, sizes, free=not kept)
        narrowed = [_narrowed(labeller, p, out, sizes) for _, p in own]
        left = [p for p in narrowed if p is not None]
        return [_labelled(labeller, labeller.joint(left, sizes), [*kept, *common], sizes)] if left else []
    top = labeller.joint([p for _, p in own], sizes)
    # All summands, zeros apart, have the same multiplier, entry by entry.
    forms = [[(1.0, p) for op, p in own if op is operand] for operand in terms if not operand.zero]
    for form in forms[1:]:
        equal = [*forms[0], *((-c, p) for c, p in form)]
        facts.balance([(c, spread(p, top.axes, sizes)) for c, p in equal])
    return [_labelled(labeller, top, forms[0], sizes) if forms else top]


Form = list[tuple[float, Part]]


def _balance_summed(
    labeller: Labeller, summed: Sequence[tuple[_Operand, Part]], out: list[int], sizes: Sizes, free: bool
) -> Form:
    """Summands need one common multiplier. It is set to one if other parts carry the result's multiplier.

    (It could as well move between the factors of the product; to fix it loses no symmetry of a linear layer.)
    """
    if not summed:
        return []
    facts = labeller.facts
    axes = tuple(sorted(set().union(*(p.axes for _, p in summed))))
    if math.prod(sizes[a] for a in axes) > EQUATION_LIMIT:
        for _, part in summed:
            facts.still(part.atoms)
        labeller.lose([part for _, part in summed], f"multipliers of more than {EQUATION_LIMIT} products")
        return []
    form = [(op.coefficient, spread(p, axes, sizes)) for op, p in summed]
    keep = tuple(a for a in axes if a in out)
    if not (free and keep):
        facts.balance(form)
        return []
    common = Part(keep, facts.fresh([sizes[a] for a in keep]))
    facts.balance([*form, (-1.0, spread(common, axes, sizes))])
    return [(1.0, common)]


def _narrowed(labeller: Labeller, part: Part, out: list[int], sizes: Sizes) -> Part | None:
    """What remains of a part in the result: itself, or larger units. (Multipliers are balanced elsewhere.)"""
    axes = tuple(a for a in part.axes if a in out)
    if axes == part.axes or not axes:
        return part if axes else None
    return labeller.larger(part, axes, sizes)


def _labelled(labeller: Labeller, top: Part, form: Form, sizes: Sizes) -> Part:
    """A part like ``top`` whose atoms carry the multiplier ``form``: an old one if it fits, else a new one."""
    facts = labeller.facts
    form = [(c, p) for c, p in form if not facts.is_still(p.atoms)] or form[:1]
    if len(form) == 1 and form[0][0] == 1.0 and form[0][1].axes == top.axes:
        facts.unify(form[0][1].atoms, top.atoms)
        return form[0][1]
    fresh = Part(top.axes, facts.fresh(top.atoms.shape))
    facts.unify(fresh.atoms, top.atoms)
    facts.balance([*((c, spread(p, top.axes, sizes)) for c, p in form), (-1.0, fresh.atoms)])
    return fresh
