"""Sparse linear equations, solved exactly by sympy: in rational numbers for scales, modulo two for signs."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

Equation = dict[int, Fraction]  # unknown -> coefficient: the terms add up to zero (modulo two: to an even number)


def nullspace(equations: Sequence[Equation], size: int, modulo_two: bool = False) -> list[list[int]]:
    """A basis of all solutions, in small whole numbers: one vector for each free unknown, in their order.

    An unknown is free if no equation expresses it by unknowns before it; the vector is positive there, and zero at all
    other free unknowns.

    :param size: the number of unknowns, which are numbered from zero.
    :param modulo_two: whether the equations count modulo two; their coefficients are whole numbers then.
    """
    from sympy import GF, QQ  # takes a third of a second, which only those wait for who need it
    from sympy.polys.matrices import DomainMatrix

    field = GF(2) if modulo_two else QQ
    rows = []  # Sympy solves for the first unknown that it can, we for the last: columns are reversed.
    for terms in equations:
        row = {size - 1 - unknown: field(c.numerator) / field(c.denominator) for unknown, c in terms.items()}
        rows.append({column: value for column, value in row.items() if value})
    rows = [row for row in rows if row]
    solutions = DomainMatrix(dict(enumerate(rows)), (len(rows), size), field).nullspace(divide_last=True)
    whole = solutions if modulo_two else solutions.clear_denoms_rowwise(convert=True)[1]
    return [[int(value) for value in reversed(row)] for row in reversed(whole.to_list())]
