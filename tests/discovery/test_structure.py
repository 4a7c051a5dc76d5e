"""Colours of units, and how their cells lie in one another, on random memberships that no network need have."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from pyro_symmetric.discovery.facts import Facts
from pyro_symmetric.discovery.structure import Structure, solve


def random_facts(rng: np.random.Generator) -> Facts:
    """Sets of 2 to 12 units, and up to five times that the units of one are members of those of another."""
    facts = Facts()
    sets = [facts.fresh((n,)) for n in sorted(rng.choice([2, 3, 4, 6, 8, 12], size=rng.integers(2, 6)))]
    for atoms in sets:
        facts.occur(atoms)
    for _ in range(rng.integers(1, 6)):
        i, j = sorted(rng.choice(len(sets), 2, replace=False))
        upper, lower = sets[i], sets[j]
        each = len(lower) // len(upper)
        if each * len(upper) == len(lower):
            owner = np.repeat(np.arange(len(upper)), each) if rng.random() < 0.5 else np.arange(len(lower)) % len(upper)
            facts.relate(lower, upper[rng.permutation(owner) if rng.random() < 0.3 else owner])
        elif rng.random() < 0.2:
            facts.relate(lower, upper[rng.integers(0, len(upper), len(lower))])
    return facts


def related(facts: Facts, structure: Structure) -> set[tuple[int, int, int]]:
    """Kind of membership, class of the member, class of the owner."""
    of = structure.unit_class
    pairs = [zip(of[child].tolist(), of[parent].tolist(), strict=True) for child, parent in facts.relations]
    return {(kind, child, parent) for kind, own in enumerate(pairs) for child, parent in own if child != parent}


@pytest.mark.parametrize("seed", range(10))
def test_units_of_one_colour_have_equally_coloured_members_and_owners(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        facts = random_facts(rng)
        structure = solve(facts)
        look = defaultdict(list)
        for kind, child, parent in related(facts, structure):
            look[child].append(("owner", kind, int(structure.colour[parent])))
            look[parent].append(("member", kind, int(structure.colour[child])))
        looks = defaultdict(set)
        for unit, colour in enumerate(structure.colour.tolist()):
            looks[colour].add(tuple(sorted(look[unit])))
        assert all(len(alike) == 1 for alike in looks.values())


@pytest.mark.parametrize("seed", range(10))
def test_what_cells_say_of_owners_is_what_the_memberships_say(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        facts = random_facts(rng)
        structure = solve(facts)
        for _, child, parent in related(facts, structure):
            lower, upper = int(structure.cell[child]), int(structure.cell[parent])
            if lower in structure.cells and upper in structure.cells and lower != upper:
                owners = structure.cells[lower].parents[upper]
                assert owners[structure.place[child]] == structure.place[parent]
        for cell in structure.cells.values():
            assert len(cell.direct) <= 2
            owner = list(zip(*(cell.parents[upper].tolist() for upper in cell.direct), strict=True))
            assert len({owner.count(one) for one in owner}) <= 1  # every owner has equally many
