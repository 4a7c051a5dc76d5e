"""Colours of units, and how their cells lie in one another, on random memberships that no network need have."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import nn

from pyro_symmetric.discovery.facts import Facts
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.structure import Structure, solve
from pyro_symmetric.discovery.verify import verify


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
    pairs = [zip(of[child].tolist(), of[parent].tolist(), strict=True) for child, parent, _ in facts.relations]
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


def test_units_with_two_owners_keep_each_entry_with_its_own() -> None:
    """Three pairs of entries: two of them lie with owners 0 and 1, the third the other way round."""
    facts = Facts()
    first, second, owners = facts.fresh((3,)), facts.fresh((3,)), facts.fresh((2,))
    for atoms in (first, second, owners):
        facts.occur(atoms)
    facts.unify(first, second)
    facts.relate(np.concatenate([first, second]), owners[[0, 0, 1, 1, 1, 0]])
    found = solve(facts)
    cells = found.cell[found.unit_class[first]]
    assert cells[0] == cells[1] != cells[2]
    assert [cell.size for cell in found.cells.values()] == [2]


def test_members_of_a_rigid_block_belong_to_one_of_its_places() -> None:
    """Units of two places each, as gate and product of a gated layer, with one member in each place."""
    facts = Facts()
    blocks, members = facts.fresh((6,)), facts.fresh((6,))
    for atoms in (blocks, members, blocks[::2], blocks[1::2]):
        facts.occur(atoms)
    facts.unify(blocks[::2], blocks[1::2])
    facts.relate(members, blocks)
    found = solve(facts)
    assert [cell.size for cell in found.cells.values()] == [3]  # and no exchange of a unit's two members
    assert found.cell[found.unit_class[members]].tolist() == found.cell[found.unit_class[blocks]].tolist()


def test_members_of_a_block_whose_places_look_alike_stay_put() -> None:
    """Both features are one unit, as they meet each other; they tell the columns of the next layer apart all the same.

    The columns see ``a, b, b, a``: no two of them may be exchanged without regard to which of the two they see.
    """

    class Mirrored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)[:, None]
            return self.second(torch.cat([y, y.flip(2)], 1).flatten(1))

    net, x = Mirrored().double(), torch.randn(4, 2, dtype=torch.float64)
    symmetry = find_symmetry(net, x, verify=False)
    assert verify(symmetry, net, x, trials=5)
    assert symmetry.permutations.order() == 1
