"""Exact elimination of sparse linear equations: in rational numbers for scales, modulo two for signs."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction


def eliminated(equations: Iterable[dict[int, Fraction]]) -> dict[int, dict[int, Fraction]]:
    """Gauss-Jordan elimination on sparse rows: pivot -> the combination of free unknowns that it equals."""
    solved: dict[int, dict[int, Fraction]] = {}
    for terms in equations:
        terms = _substituted(terms, solved)
        if not terms:
            continue
        pivot = max(terms)
        scale = -terms.pop(pivot)
        solved[pivot] = {k: v / scale for k, v in terms.items()}
        for known in [known for known, form in solved.items() if pivot in form]:
            solved[known] = _substituted(solved[known], {pivot: solved[pivot]})
    return solved


def eliminated_signs(equations: Iterable[dict[int, Fraction]]) -> dict[int, dict[int, Fraction]]:
    """The same modulo two, with rows as bits."""
    solved: dict[int, int] = {}
    for terms in equations:
        row = 0
        for unknown, coefficient in terms.items():
            row ^= (int(coefficient) % 2) << unknown
        for pivot, form in solved.items():
            if row >> pivot & 1:
                row ^= form | 1 << pivot
        if row:
            pivot = row.bit_length() - 1
            row ^= 1 << pivot
            solved = {known: form ^ row ^ (1 << pivot) if form >> pivot & 1 else form for known, form in solved.items()}
            solved[pivot] = row
    return {p: {i: Fraction(1) for i in range(form.bit_length()) if form >> i & 1} for p, form in solved.items()}


def _substituted(terms: dict[int, Fraction], solved: dict[int, dict[int, Fraction]]) -> dict[int, Fraction]:
    result: dict[int, Fraction] = {}
    for unknown, coefficient in terms.items():
        for k, v in solved.get(unknown, {unknown: Fraction(1)}).items():
            result[k] = result.get(k, Fraction(0)) + coefficient * v
    return {k: v for k, v in result.items() if v}
