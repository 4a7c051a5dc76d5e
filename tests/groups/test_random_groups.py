"""Groups drawn at random: units inside units, at shuffled positions of sites, with any
moves and exponents.

What an element does is written down once more, unit by unit in loops, and what groups
have in common is checked of all: the axioms, restrictions, files.
"""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.weights import Weights

from .cases import GROUPS, by_loops, weights_of

SEEDS = st.integers(0, 2**31 - 1)
WHICH = st.one_of(st.sampled_from(sorted(GROUPS)), SEEDS)
BATCHES = st.sampled_from([(), (2,), (3, 1)])
KINDS = ("permute", "flip", "scale")
quick = settings(max_examples=40, deadline=None, derandomize=True)


def group_of(which: str | int) -> Group:
    """One of the cases, or one drawn with a seed."""
    return GROUPS[which]() if isinstance(which, str) else drawn_group(which)


def drawn_group(seed: int) -> Group:
    """Two or three chains of units inside units, along one or two axes of each site,
    and a shift.
    """
    draw = random.Random(seed)
    chains = [
        drawn_chain(draw, f"chain {number}") for number in range(draw.randint(2, 3))
    ]
    shapes: dict[str, torch.Size] = {}
    axes: dict[str, list[Axis]] = {
        units.name: [] for chain in chains for units in chain
    }
    for number in range(draw.randint(2, 4)):
        site, lying = f"site {number}", draw.sample(chains, draw.randint(1, 2))
        lengths = [
            place(draw, site, dim, chain, axes) for dim, chain in enumerate(lying)
        ]
        shapes[site] = torch.Size([*lengths, 2] if draw.random() < 0.5 else lengths)
    shapes["bias"] = torch.Size([3])
    shift = Units(
        "shift",
        1,
        (Axis("bias", 0, torch.arange(3)[:, None]),),
        moves=frozenset({"shift"}),
    )
    units = [
        Units(
            one.name, one.size, tuple(axes[one.name]), one.parent, one.copies, one.moves
        )
        for chain in chains
        for one in chain
    ]
    draw.shuffle(units)
    return Group([*units, shift], shapes)


def drawn_chain(draw: random.Random, name: str) -> list[Units]:
    """Units, perhaps units inside them, perhaps units inside these."""
    chain: list[Units] = []
    for depth in range(draw.randint(1, 3)):
        moves = frozenset(move for move in KINDS if draw.random() < 0.7)
        parent = chain[-1] if chain else None
        copies = parent.count if parent else draw.choice([1, 1, 2])
        chain.append(
            Units(
                f"{name}, {depth}",
                draw.randint(1, 3),
                (),
                parent.name if parent else None,
                copies,
                moves,
            )
        )
    return chain


def place(
    draw: random.Random,
    site: str,
    dim: int,
    chain: list[Units],
    axes: dict[str, list[Axis]],
) -> int:
    """Lay a chain along an axis, at shuffled positions, of which some stay free;
    returns the axis's length.
    """
    leaf, blocks = chain[-1], draw.randint(1, 2)
    used = blocks * leaf.count
    length = used + draw.randint(0, 2)
    positions = torch.tensor(draw.sample(range(length), used)).reshape(
        blocks, leaf.count
    )
    for units in reversed(chain):
        inside = leaf.count // units.count
        index = (
            positions.reshape(blocks, units.count, inside)
            .transpose(1, 2)
            .reshape(-1, units.count)
        )
        axes[units.name].append(Axis(site, dim, index, draw.choice([-1, 0, 1, 2])))
    return length


def assert_same(one: Weights, other: Weights) -> None:
    for site in one:
        torch.testing.assert_close(one[site], other[site], rtol=1e-9, atol=1e-9)


@quick
@given(which=WHICH, batch=BATCHES)
def test_elements_act_as_loops_over_units_do(which, batch):
    torch.manual_seed(0)
    group = group_of(which)
    element, weights = (
        group.sample(batch, dtype=torch.float64),
        weights_of(group, *batch),
    )
    acted = element(weights)
    for i in itertools.product(*map(range, batch)):
        assert_same(
            {s: v[i] for s, v in acted.items()},
            by_loops(element.select(i), {s: v[i] for s, v in weights.items()}),
        )


@quick
@given(which=WHICH)
def test_elements_make_a_group(which):
    torch.manual_seed(0)
    group = group_of(which)
    g, h, k = (group.sample((2,), dtype=torch.float64) for _ in range(3))
    weights = weights_of(group, 2)
    assert_same((g @ h)(weights), g(h(weights)))
    assert_same(((g @ h) @ k)(weights), (g @ (h @ k))(weights))
    assert_same((g @ g.inverse())(weights), weights)
    assert_same((g.inverse() @ g)(weights), weights)
    assert_same((g @ group.identity(dtype=torch.float64))(weights), g(weights))


@quick
@given(seed=SEEDS)
def test_restrictions_act_as_the_whole_and_their_elements_compose(seed):
    torch.manual_seed(seed)
    group, weights = drawn_group(seed), None
    weights = weights_of(group, 2)
    parts = [
        group.restricted(move).sample((2,), dtype=torch.float64)
        for move in ("shift", *KINDS[::-1])
    ]
    numbers = [
        getattr(part, kind)
        for part, kind in zip(
            parts, ("shifts", "log_scales", "signs", "permutations"), strict=True
        )
    ]
    parts = [part.within(group) for part in parts]
    whole = group.element(
        numbers[3], signs=numbers[2], log_scales=numbers[1], shifts=numbers[0]
    )
    step = weights
    for part in parts:
        step = part(step)
    assert_same(whole(weights), step)
    product = parts[3] @ parts[2] @ parts[1] @ parts[0]
    assert_same(product(weights), step)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(which=WHICH)
def test_units_that_are_left_out_stay_while_others_move(which):
    """Outer ones, middle ones, inner ones: as elements of the whole group that leave
    them alone.
    """
    torch.manual_seed(0)
    group = group_of(which)
    weights = weights_of(group)
    for name in group.units:
        part = group.without([name])
        g, h = (part.sample((2,), dtype=torch.float64) for _ in range(2))
        assert name not in part.factors
        assert_same(g(weights), g.within(group)(weights))
        assert_same((g @ h)(weights), g(h(weights)))
        assert_same(
            {s: v[1] for s, v in g(weights).items()}, by_loops(g.select(1), weights)
        )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(which=WHICH)
def test_groups_and_their_parts_survive_files_and_copies(which):
    group = group_of(which)
    parts = [
        group,
        group.restricted("permute", "scale"),
        group.without(list(group.units)[:1]),
    ]
    parts += [group.without_buffers(list(group.site_shapes)[:1])]
    for part in filter(lambda part: part.site_shapes, parts):
        weights = weights_of(part)
        # what is kept for the next call must not spoil a copy
        part.permutations.sample()(weights)
        read = Group.from_dict(json.loads(json.dumps(part.to_dict())))
        for again in (read, pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
            assert again == part
            assert (hash(again), repr(again), again.buffers) == (
                hash(part),
                repr(part),
                part.buffers,
            )
            torch.manual_seed(0)
            element = part.sample(dtype=torch.float64)
            torch.manual_seed(0)
            assert_same(again.sample(dtype=torch.float64)(weights), element(weights))


@pytest.mark.parametrize("key", ["first", "max", "norm"])
@quick
@given(seed=SEEDS)
def test_permutations_of_any_group_are_removed(key, seed):
    torch.manual_seed(seed)
    group = drawn_group(seed).permutations
    if not group.required_sites:
        return
    weights = weights_of(group, 3)
    form = canonicalize(weights, group, key)
    assert_same(canonicalize(group.sample((3,))(weights), group, key), form)
    assert_same(canonicalize(form, group, key), form)


def group_on_one_axis(
    draw: random.Random, exponents: list[int], draw_moves: Callable[[], set[str]]
) -> Group | None:
    """Two or three sets of units at any positions of one axis; None if refused."""
    units: list[Units] = []
    for name in "abc"[: draw.randint(2, 3)]:
        parent = draw.choice([None, *units])
        copies = parent.count if parent else draw.choice([1, 2])
        size = draw.randint(1, max(1, 6 // copies))
        blocks = draw.randint(1, 6 // (copies * size))
        index = torch.tensor(
            draw.sample(range(6), blocks * copies * size)
            if draw.random() < 0.4
            else range(6)
        )
        index = index[: blocks * copies * size].reshape(blocks, copies, size)
        index = index if draw.random() < 0.5 else index.movedim(0, -1)
        axis = Axis("w", 0, index.reshape(blocks, -1), draw.choice(exponents))
        around, moves = parent and parent.name, frozenset(draw_moves())
        units.append(Units(name, size, (axis,), around, copies, moves))
    try:
        return Group(units, {"w": torch.Size([6])})
    except ValueError:
        return None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_whatever_is_taken_for_a_group_is_one(seed):
    """Two or three sets of units at any positions of one axis: of those that aren't
    refused, elements compose.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def any_moves() -> set[str]:
        return {move for move in (*KINDS, "shift") if draw.random() < 0.4}

    group = group_on_one_axis(draw, [-1, 0, 1], any_moves)
    if group is None:
        return
    g, h = (group.sample((64,), dtype=torch.float64) for _ in range(2))
    weights = weights_of(group)
    assert_same((g @ h)(weights), g(h(weights)))
