"""Solutions of linear equations, against substitution and enumeration."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from pyro_symmetric.discovery.scaling.nullspace import Equation, nullspace


def random_equations(seed: int, size: int, modulo_two: bool) -> list[Equation]:
    """Few terms in each, as discovery states them; some equations are empty, some terms zero, some said twice."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    denominator = 1 if modulo_two else whole(1, 3)
    equations = [
        {whole(0, size): Fraction(whole(-2, 4), denominator) for _ in range(whole(0, 4))} for _ in range(whole(0, 6))
    ]
    return equations + equations[:1]


def value(equation: Equation, vector: tuple[int, ...] | list[int]) -> Fraction:
    return sum((c * vector[unknown] for unknown, c in equation.items()), Fraction(0))


@pytest.mark.parametrize("seed", range(20))
def test_rational_solutions_solve_and_are_as_many_as_the_rank_leaves(seed: int) -> None:
    size = 5
    equations = random_equations(seed, size, False)
    basis = nullspace(equations, size)
    assert all(value(equation, vector) == 0 for equation in equations for vector in basis)
    matrix = torch.zeros(len(equations) + 1, size, dtype=torch.float64)
    for row, equation in zip(matrix, equations, strict=False):
        for unknown, c in equation.items():
            row[unknown] = float(c)
    assert len(basis) == size - int(torch.linalg.matrix_rank(matrix))
    ranks = [int(torch.linalg.matrix_rank(matrix[:, i:])) for i in range(size)] + [0]
    free = [i for i in range(size) if ranks[i] == ranks[i + 1]]
    assert [[vector[i] for i in free] for vector in basis] == [
        [vector[i] if i == j else 0 for i in free] for vector, j in zip(basis, free, strict=True)
    ]
    assert all(vector[i] > 0 for vector, i in zip(basis, free, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_solutions_modulo_two_are_those_that_enumeration_finds(seed: int) -> None:
    size = 5
    equations = random_equations(seed, size, True)
    basis = nullspace(equations, size, modulo_two=True)
    sums = {
        tuple(sum(c * v[i] for c, v in zip(chosen, basis, strict=True)) % 2 for i in range(size))
        for chosen in itertools.product((0, 1), repeat=len(basis))
    }
    assert len(sums) == 2 ** len(basis)
    all_ = itertools.product((0, 1), repeat=size)
    assert sums == {v for v in all_ if all(value(equation, v) % 2 == 0 for equation in equations)}


def test_an_unknown_is_free_unless_those_before_it_determine_it() -> None:
    equations = [{0: Fraction(2), 2: Fraction(-1)}]
    assert nullspace(equations, 3) == [[1, 0, 2], [0, 1, 0]]
    assert nullspace([{0: Fraction(1), 2: Fraction(-2)}], 3) == [[2, 0, 1], [0, 1, 0]]  # no fractions
    assert nullspace(equations, 3, modulo_two=True) == [[1, 0, 0], [0, 1, 0]]
