"""Colours of units, and how their cells lie in one another, on random memberships that
no network need have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from pyro_symmetric.discovery.cells import Cells, solve
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.flow import Flow
from pyro_symmetric.discovery.verify import verify


def random_flow(rng: np.random.Generator) -> Flow:
    """Sets of 2 to 12 units, and up to five times that the units of one are members of
    those of another.
    """
    flow = Flow()
    sets = [
        flow.fresh((n,))
        for n in sorted(rng.choice([2, 3, 4, 6, 8, 12], size=rng.integers(2, 6)))
    ]
    for atoms in sets:
        flow.occur(atoms)
    for _ in range(rng.integers(1, 6)):
        i, j = sorted(rng.choice(len(sets), 2, replace=False))
        upper, lower = sets[i], sets[j]
        each = len(lower) // len(upper)
        if each * len(upper) == len(lower):
            owner = (
                np.repeat(np.arange(len(upper)), each)
                if rng.random() < 0.5
                else np.arange(len(lower)) % len(upper)
            )
            flow.relate(
                lower, upper[rng.permutation(owner) if rng.random() < 0.3 else owner]
            )
        elif rng.random() < 0.2:
            flow.relate(lower, upper[rng.integers(0, len(upper), len(lower))])
    return flow


def random_blocks(rng: np.random.Generator) -> Flow:
    """Entries of a matrix of up to 6 x 6, and up to five times that they are members of
    its rows, its columns, or of two further units, anew each time as in the blocks of
    a residual network.
    """
    flow = Flow()
    height, width = rng.choice([2, 3, 4, 6], 2)
    entries = flow.fresh((height * width,))
    flow.occur(entries)
    row, column = np.divmod(np.arange(height * width), width)
    shuffled = rng.permutation(width)[column]
    before = entries
    for _ in range(rng.integers(2, 6)):
        number = rng.integers(0, 4)
        owners = flow.fresh(((height, width, 2, width)[number],))
        if rng.random() < 0.8:
            flow.occur(owners)
        if rng.random() < 0.3:
            flow.refine(owners, rng.integers(0, 2, len(owners)))
        flow.relate(entries, owners[(row, column, row % 2, shuffled)[number]])
        if rng.random() < 0.3 and len(owners) == len(before):
            flow.unify(owners, before)
        before = owners
    return flow


FLOWS = (random_flow, random_blocks)


def related(flow: Flow, cells: Cells) -> set[tuple[int, int, int]]:
    """Kind of membership, class of the member, class of the owner."""
    of = cells.unit
    pairs = [
        zip(of[child].tolist(), of[parent].tolist(), strict=True)
        for child, parent, _ in flow.relations
    ]
    return {
        (kind, child, parent)
        for kind, own in enumerate(pairs)
        for child, parent in own
        if child != parent
    }


@pytest.mark.parametrize("flow_of", FLOWS)
@pytest.mark.parametrize("seed", range(10))
def test_units_of_one_colour_have_equally_coloured_members_and_owners(
    seed: int, flow_of: Callable[[np.random.Generator], Flow]
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        flow = flow_of(rng)
        cells = solve(flow)
        look = defaultdict(list)
        for kind, child, parent in related(flow, cells):
            look[child].append(("owner", kind, int(cells.colour[parent])))
            look[parent].append(("member", kind, int(cells.colour[child])))
        looks = defaultdict(set)
        for unit, colour in enumerate(cells.colour.tolist()):
            looks[colour].add(tuple(sorted(look[unit])))
        assert all(len(alike) == 1 for alike in looks.values())


@pytest.mark.parametrize("flow_of", FLOWS)
@pytest.mark.parametrize("seed", range(10))
def test_what_cells_say_of_owners_is_what_the_memberships_say(
    seed: int, flow_of: Callable[[np.random.Generator], Flow]
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        flow = flow_of(rng)
        cells = solve(flow)
        for _, child, parent in related(flow, cells):
            lower, upper = int(cells.cell[child]), int(cells.cell[parent])
            if lower in cells.cells and upper in cells.cells and lower != upper:
                owners = cells.cells[lower].parents[upper]
                assert owners[cells.place[child]] == cells.place[parent]
        for cell in cells.cells.values():
            assert len(cell.direct) <= 2
            owner = list(
                zip(
                    *(cell.parents[upper].tolist() for upper in cell.direct),
                    strict=True,
                )
            )
            # every owner has equally many
            assert len({owner.count(one) for one in owner}) <= 1


def test_units_with_two_owners_keep_each_entry_with_its_own() -> None:
    """Three pairs of entries: two of them lie with owners 0 and 1, the third the other
    way round.
    """
    flow = Flow()
    first, second, owners = flow.fresh((3,)), flow.fresh((3,)), flow.fresh((2,))
    for atoms in (first, second, owners):
        flow.occur(atoms)
    flow.unify(first, second)
    flow.relate(np.concatenate([first, second]), owners[[0, 0, 1, 1, 1, 0]])
    found = solve(flow)
    cells = found.cell[found.unit[first]]
    assert cells[0] == cells[1] != cells[2]
    assert [cell.size for cell in found.cells.values()] == [2]


def test_members_of_a_rigid_block_belong_to_one_of_its_places() -> None:
    """Units of two places each, as gate and product of a gated layer, with one member
    in each place.
    """
    flow = Flow()
    blocks, members = flow.fresh((6,)), flow.fresh((6,))
    for atoms in (blocks, members, blocks[::2], blocks[1::2]):
        flow.occur(atoms)
    flow.unify(blocks[::2], blocks[1::2])
    flow.relate(members, blocks)
    found = solve(flow)
    # and no exchange of a unit's two members
    assert [cell.size for cell in found.cells.values()] == [3]
    assert (
        found.cell[found.unit[members]].tolist()
        == found.cell[found.unit[blocks]].tolist()
    )


def test_members_of_a_block_whose_places_look_alike_stay_put() -> None:
    """Both features are one unit, as they meet each other; they tell the columns of the
    next layer apart all the same.

    The columns see ``a, b, b, a``: no two of them may be exchanged without regard to
    which of the two they see.
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
