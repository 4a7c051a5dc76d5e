"""Products and sums of several labelled tensors: the one engine behind ``+``, ``*``, linear, conv, matmul, einsum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, permutations
from typing import NamedTuple

from pyro_symmetric.discovery.flow import Part, positions, spread
from pyro_symmetric.discovery.scaling.labels import Passes, Value
from pyro_symmetric.discovery.scaling.recorder import Recorder

Sizes = dict[int, int]
Lettered = tuple[Value, Sequence[int]]

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
    recorder: Recorder,
    operands: Sequence[Lettered],
    out: list[int],
    kind: str,
    passes: Passes,
    coefficients: Sequence[float],
) -> Value:
    """See :meth:`Labeller.combine`."""
    operands, routes = _routed(recorder, operands, out)
    lengths, sizes = _lengths(operands, _shape), _lengths(operands, lambda value: value.sizes)
    for value, letters in operands:  # not how many entries were routed, but to how many places each may be
        sizes |= {letters[axis]: value.sizes[axis] for axis in value.routes}
    terms = [
        _operand(recorder, value, letters, sizes, coefficient)
        for (value, letters), coefficient in zip(operands, coefficients, strict=True)
    ]
    if kind == "product":
        _note_stacks(recorder, terms, operands, out)
        _note_crossed(recorder, terms)
    _tie(recorder, terms, sizes, {letter for letter, route in routes.items() if route in recorder.facts.moving})
    groups = _overlapping([part for operand in terms for part in operand.parts])
    left: list[Part] = []
    zero = any(op.zero for op in terms) if kind == "product" else all(op.zero for op in terms)
    for group in groups:
        own = [(op, part) for op in terms for part in op.parts if any(part is member for member in group)]
        left += _result(recorder, terms, own, out, sizes, kind, passes, alone=len(groups) == 1)
    place = {letter: i for i, letter in enumerate(out)}
    fixed = {place[letter] for operand in terms for letter in operand.fixed if letter in place}
    fixed |= {place[letter] for letter in routes}
    return recorder.value(
        [lengths.get(l, 1) for l in out],
        [p.renumbered(place) for p in left],
        fixed,
        zero,
        {place[letter]: route for letter, route in routes.items()},
    )


def _shape(value: Value) -> dict[int, int]:
    return dict(enumerate(value.shape))


def _lengths(operands: Sequence[Lettered], of: Callable[[Value], Mapping[int, int]]) -> Sizes:
    """The length of each letter: the longest of the axes that carry it."""
    lengths: Sizes = {}
    for value, letters in operands:
        own = of(value)
        for axis, letter in enumerate(letters):
            lengths[letter] = max(lengths.get(letter, 1), own[axis])
    return lengths


def _routed(
    recorder: Recorder, operands: Sequence[Lettered], out: Sequence[int]
) -> tuple[list[Lettered], dict[int, int]]:
    """Operands whose routed axes meet those of the same router, over lists of one length, only; letter -> router.

    Labels that meet another router's choice, or units along the axis itself, or a sum over it, mustn't depend on it.
    """
    given: dict[int, set[tuple[int | None, int]]] = {}
    for value, letters in operands:
        labelled = {axis for part in value.parts for axis in part.axes}
        for axis, letter in enumerate(letters):
            if (axis in labelled and value.shape[axis] > 1) or axis in value.routes:
                given.setdefault(letter, set()).add((value.routes.get(axis), value.sizes[axis]))
    routes = {l: next(iter(own))[0] for l, own in given.items() if len(own) == 1 and l in out}
    kept = {letter: route for letter, route in routes.items() if route is not None}
    settled = [
        (recorder.settled(value, [axis for axis, letter in enumerate(letters) if letter not in kept]), letters)
        for value, letters in operands
    ]
    return settled, kept


def _note_stacks(recorder: Recorder, terms: Sequence[_Operand], operands: Sequence[Lettered], out: list[int]) -> None:
    """Factors are stacks of matrices along a letter that all of those share that are summed over another one.

    So they are if it isn't summed over, or if further factors have it, which aren't summed over the other.
    """
    having: dict[int, set[int]] = {}
    for number, (value, letters) in enumerate(operands):
        for letter, n in zip(letters, value.shape, strict=True):
            if n > 1:
                having.setdefault(letter, set()).add(number)
    shared = {letter: own for letter, own in having.items() if len(own) > 1}
    summed = [(letter, own) for letter, own in shared.items() if letter not in out]
    stacks = {
        letter
        for letter, own in shared.items()
        if any(inner < own or (inner == own and letter in out) for other, inner in summed if other != letter)
    }
    for term in terms:
        recorder.facts.stacks += [part.atoms for part in term.parts if len(part.axes) == 1 and part.axes[0] in stacks]


def _note_crossed(recorder: Recorder, terms: Sequence[_Operand]) -> None:
    """A factor with labels along two axes, each for itself, meets units that lie along both together: of each head."""
    for one, other in permutations(terms, 2):
        alone = {part.axes[0]: part.atoms for part in other.parts if len(part.axes) == 1}
        recorder.facts.crossed += [
            (alone[part.axes[0]], alone[part.axes[1]])
            for part in one.parts
            if len(part.axes) == 2 and alone.keys() >= set(part.axes)
        ]


def _operand(recorder: Recorder, value: Value, letters: Sequence[int], sizes: Sizes, coefficient: float) -> _Operand:
    own, to = value.sizes, dict(enumerate(letters))
    whole = {axis for axis, n in own.items() if n == sizes[to[axis]]}
    parts = [thin.renumbered(to) for part in value.parts for thin in recorder.thinned(part, whole, own)]
    return _Operand(parts, {to[axis] for axis in value.fixed}, value.zero, coefficient)


def _tie(recorder: Recorder, terms: Sequence[_Operand], sizes: Sizes, chosen: set[int]) -> None:
    """State which units of different operands are the same, or members of each other.

    :param chosen: letters along which entries were chosen from units that move: what others have there, a token for
        each entry, tells none of these apart.
    """
    facts = recorder.facts
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
                    shared = shared or recorder.larger(p, letters, sizes)
                    for part in (p, q):
                        if part is not shared:
                            facts.relate(part.atoms, spread(shared, part.axes, sizes))
    for one in terms:
        for part in one.parts:
            facts.occur(part.atoms)
            for other in terms:
                apart = (other.fixed & set(part.axes)) - chosen
                if other is not one and apart:
                    facts.refine(part.atoms, positions(apart, part.axes, sizes), recorder.where)


def _overlapping(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts that must be looked at together: those that meet on some axis; multipliers that all share go with any."""
    groups: list[list[Part]] = []
    for part in (part for part in parts if part.axes):
        touching = [g for g in groups if any(set(part.axes) & set(other.axes) for other in g)]
        groups = [g for g in groups if all(g is not t for t in touching)]
        groups.append([*(other for g in touching for other in g), part])
    shared = [part for part in parts if not part.axes]
    if shared:
        kept, *others = groups or [[]]
        groups = [[*kept, *shared], *others]
    return groups


def _result(
    recorder: Recorder,
    terms: Sequence[_Operand],
    own: Sequence[tuple[_Operand, Part]],
    out: list[int],
    sizes: Sizes,
    kind: str,
    passes: Passes,
    alone: bool,
) -> list[Part]:
    """The labels that remain of parts that overlap, and the equations between their multipliers.

    :param alone: whether no other parts take part in the operation.
    """
    facts = recorder.facts
    for _, part in own:
        facts.still(part.atoms, not passes.scale, not passes.sign)
    if kind == "product":
        summed = [(op, p) for op, p in own if set(p.axes) - set(out)]
        kept = [(op.coefficient, p) for op, p in own if not set(p.axes) - set(out)]
        stacked = any(_overlap(op.parts) for op, _ in own)
        form = list(kept)
        for axes in _matrices((p.axes for _, p in summed), stacked) if not any(op.zero for op in terms) else ():
            chosen = [(op, p) for op, p in summed if p.axes in axes]
            form += _balance_summed(recorder, chosen, out, sizes, free=not kept, alone=alone and not stacked)
        narrowed = [_narrowed(recorder, p, out, sizes) for _, p in own]
        left = [p for p in narrowed if p is not None] or [p for _, p in form]
        result = []
        for axes in _matrices([p.axes for p in left], stacked):
            top = recorder.joint([p for p in left if p.axes in axes], sizes)
            carried = [(c, p) for c, p in form if set(p.axes) <= set(top.axes)]
            form = [(c, p) for c, p in form if not set(p.axes) <= set(top.axes)]
            result.append(_labelled(recorder, top, carried, sizes))
        return result
    if any(_overlap(op.parts) for op, _ in own):
        return _sum_of_stacks(recorder, terms, own)
    top = recorder.joint([p for _, p in own if p.axes] or [own[0][1]], sizes)
    # All summands, zeros apart, have the same multiplier, entry by entry.
    forms = [[(1.0, p) for op, p in own if op is operand] for operand in terms if not operand.zero]
    for form in forms[1:]:
        equal = [*forms[0], *((-c, p) for c, p in form)]
        facts.balance([(c, spread(p, top.axes, sizes)) for c, p in equal])
    return [_labelled(recorder, top, forms[0], sizes) if forms else top]


Form = list[tuple[float, Part]]


def _overlap(parts: Sequence[Part]) -> bool:
    axes = [axis for part in parts for axis in part.axes]
    return len(set(axes)) < len(axes)


def _matrices(axes: Iterable[tuple[int, ...]], stacked: bool) -> list[set[tuple[int, ...]]]:
    """Sets of axes, those together that lie within the axes of one of them; all together if nothing is stacked.

    If stacks of matrices are multiplied, rows carry what enters a matrix and columns what leaves it. (The multipliers
    of all rows of a matrix and of all its columns do the same. So to keep both apart loses no symmetry.)
    """
    left = dict.fromkeys(axes)
    if not stacked:
        return [set(left)] if left else []
    largest = sorted(own for own in left if not any(set(own) < set(other) for other in left))
    found: list[set[tuple[int, ...]]] = []
    for top in largest:
        found.append({own for own in left if set(own) <= set(top)}.difference(*found))
    return found


def _sum_of_stacks(recorder: Recorder, terms: Sequence[_Operand], own: Sequence[tuple[_Operand, Part]]) -> list[Part]:
    """Stacks of matrices of the same shape have the same units and multipliers; other sums don't keep slices apart."""
    each = [{part.axes: part for op, part in own if op is term} for term in terms if not term.zero]
    if any(parts and parts.keys() != {part.axes for _, part in own} for parts in each) or (
        sum(map(len, each)) < sum(not op.zero for op, _ in own)
    ):
        raise recorder.facts.entangled([part for _, part in own])
    if not all(each):  # something is added that has no units here, and no multiplier
        for _, part in own:
            recorder.facts.still(part.atoms)
    each = [parts for parts in each if parts]
    if not each:
        raise recorder.facts.entangled([part for _, part in own])
    for parts in each[1:]:
        for axes, part in parts.items():
            recorder.facts.unify(part.atoms, each[0][axes].atoms)
            recorder.facts.balance([(1.0, part.atoms), (-1.0, each[0][axes].atoms)])
    return list(each[0].values())


def _balance_summed(
    recorder: Recorder, summed: Sequence[tuple[_Operand, Part]], out: list[int], sizes: Sizes, free: bool, alone: bool
) -> Form:
    """Summands need one common multiplier. It is set to one if other parts carry the result's multiplier.

    (It could as well move between the factors of the product; to fix it loses no symmetry of a linear layer.) A product
    with something that can't be rescaled, which leaves no units, has the scale that all units share.
    """
    if not summed:
        return []
    facts = recorder.facts
    axes = tuple(sorted(set().union(*(p.axes for _, p in summed))))
    if math.prod(sizes[a] for a in axes) > EQUATION_LIMIT:
        for _, part in summed:
            facts.still(part.atoms)
        recorder.lose([part for _, part in summed], f"multipliers of more than {EQUATION_LIMIT} products")
        return []
    form = [(op.coefficient, spread(p, axes, sizes)) for op, p in summed]
    keep = tuple(a for a in axes if a in out)
    moving = [p for _, p in summed if not facts.is_unscaled(p.atoms)]
    if free and alone and not keep and len(moving) == 1:
        shared = Part((), facts.shared())
        facts.balance([*form, (-1.0, spread(shared, axes, sizes))], sign=False)
        facts.balance(form, scale=False)
        facts.still(shared.atoms, scale=False)
        return [(1.0, shared)]
    if not (free and keep):
        facts.balance(form)
        return []
    common = Part(keep, facts.fresh([sizes[a] for a in keep]))
    facts.balance([*form, (-1.0, spread(common, axes, sizes))])
    return [(1.0, common)]


def _narrowed(recorder: Recorder, part: Part, out: list[int], sizes: Sizes) -> Part | None:
    """The rest of a part in the result: itself, or larger units. (Multipliers are balanced elsewhere.)"""
    axes = tuple(a for a in part.axes if a in out)
    if axes == part.axes or not axes:
        return part if axes else None
    return recorder.larger(part, axes, sizes)


def _labelled(recorder: Recorder, top: Part, form: Form, sizes: Sizes) -> Part:
    """A part like ``top`` whose atoms carry the multiplier ``form``: an old one if it fits, else a new one."""
    facts = recorder.facts
    form = [(c, p) for c, p in form if not facts.is_still(p.atoms)] or form[:1]
    if len(form) == 1 and form[0][0] == 1.0 and form[0][1].axes == top.axes:
        facts.unify(form[0][1].atoms, top.atoms)
        return form[0][1]
    fresh = Part(top.axes, facts.fresh(top.atoms.shape))
    facts.unify(fresh.atoms, top.atoms)
    facts.balance([*((c, spread(p, top.axes, sizes)) for c, p in form), (-1.0, fresh.atoms)])
    return fresh
