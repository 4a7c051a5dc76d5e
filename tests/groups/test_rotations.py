"""Units that rotate, inside units that permute, at shuffled positions of sites: what
elements do is written down once more as dense matrices of flattened sites.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import constraints

from pyro_symmetric.groups import Action, Axis, Element, Group, Units

from .cases import plain, weights_of
from .test_random_groups import SEEDS, assert_same, group_on_one_axis, place

quick = settings(max_examples=20, deadline=None, derandomize=True)


def drawn_chain(draw: random.Random, name: str) -> list[Units]:
    """Units that permute or flip, and inside them units that rotate; or others."""
    chain: list[Units] = []
    depth = draw.randint(1, 3)
    rotating = draw.random() < 0.7
    for level in range(depth):
        parent = chain[-1] if chain else None
        moves = {move for move in ("permute", "flip") if draw.random() < 0.7}
        if rotating:
            moves = {"rotate"} if level == depth - 1 else moves - {"flip"}
        copies = parent.count if parent else draw.choice([1, 1, 2])
        size, around = draw.randint(1, 3), parent and parent.name
        one = Units(f"{name}, {level}", size, (), around, copies, frozenset())
        chain.append(replace(one, moves=frozenset(moves)))
    return chain


def drawn_group(seed: int) -> Group:
    draw = random.Random(seed)
    chains = [drawn_chain(draw, f"chain {number}") for number in range(2)]
    axes: dict[str, list[Axis]] = {one.name: [] for chain in chains for one in chain}
    shapes: dict[str, torch.Size] = {}
    for number in range(draw.randint(2, 3)):
        lying = draw.sample(chains, draw.randint(1, 2))
        site = f"site {number}"
        lengths = [place(draw, site, dim, c, axes) for dim, c in enumerate(lying)]
        shapes[site] = torch.Size([*lengths, 2] if draw.random() < 0.5 else lengths)
    units = []
    for one in (one for chain in chains for one in chain):
        lying = axes[one.name]
        if "rotate" in one.moves:
            lying = [replace(axis, exponent=draw.choice([-1, 1])) for axis in lying]
        units.append(replace(one, axes=tuple(lying)))
    draw.shuffle(units)
    return Group(units, shapes)


def along(element: Element, site: str, dim: int, length: int) -> Tensor:
    """The matrix of one element along an axis of one site: multipliers and rotations,
    then permutations, inner ones first.
    """
    group, matrix = element.group, torch.eye(length, dtype=torch.float64)
    members = [
        (one, axis)
        for one in sorted(group.units.values(), key=lambda u: -len(around(group, u)))
        for axis in one.axes
        if (axis.site, axis.dim) == (site, dim)
    ]
    for one, axis in members:
        step = torch.eye(length, dtype=torch.float64)
        for block in axis.index:
            places = block.reshape(one.copies, one.size)
            if one.name in element.rotations:
                turns = element.rotations[one.name].reshape(-1, one.size, one.size)
                for own, turn in zip(places, turns, strict=True):
                    step[own[:, None], own] = turn
            if one.name in element.signs and axis.exponent % 2:
                step[block, block] = element.signs[one.name].flatten()
        matrix = step @ matrix
    for one, axis in members:
        if one.name not in element.permutations:
            continue
        step = torch.eye(length, dtype=torch.float64)
        for block in axis.index:
            places = block.reshape(one.copies, one.size)
            images = element[one.name].reshape(one.copies, one.size)
            for own, image in zip(places, images, strict=True):
                step[own] = 0.0
                step[own, own[image]] = 1.0
        matrix = step @ matrix
    return matrix


def around(group: Group, units: Units) -> tuple[str, ...]:
    return group.ancestors(units.name)


def dense(element: Element) -> dict[str, list[Tensor]]:
    """The matrices of one element along all axes of each site."""
    return {
        site: [along(element, site, dim, length) for dim, length in enumerate(shape)]
        for site, shape in element.group.site_shapes.items()
    }


@quick
@given(seed=SEEDS, batch=st.sampled_from([(), (2,), (3, 1)]))
def test_elements_are_dense_matrices(seed, batch):
    torch.manual_seed(seed)
    group = drawn_group(seed)
    g, h = (group.sample(batch, dtype=torch.float64) for _ in range(2))
    weights = weights_of(group)
    moved = g(weights)
    index = (0,) * len(batch)
    first, second = dense(g.select(index)), dense(h.select(index))
    product, inverse = (e.select(index) for e in (g @ h, g.inverse()))
    identity = group.identity(batch, dtype=torch.float64)
    of_product, of_inverse = dense(product), dense(inverse)
    for site, matrices in first.items():
        by_hand = weights[site]
        for dim, matrix in enumerate(matrices):
            by_hand = torch.tensordot(matrix, by_hand, ([1], [dim])).movedim(0, dim)
            still = torch.eye(len(matrix), dtype=torch.float64)
            torch.testing.assert_close(
                of_product[site][dim], matrix @ second[site][dim]
            )
            torch.testing.assert_close(of_inverse[site][dim] @ matrix, still)
        torch.testing.assert_close(moved[site][index], by_hand)
    assert_same((g @ h)(weights), g(h(weights)))
    assert_same((g @ g.inverse())(moved), moved)
    assert_same((g @ identity)(weights), moved)


@quick
@given(seed=SEEDS)
def test_parts_are_subgroups_and_survive_files(seed):
    torch.manual_seed(seed)
    group = drawn_group(seed)
    weights = weights_of(group)
    for part in (group.finite, group.rotations, group.compact, group.permutations):
        g, h = (part.sample((2,), dtype=torch.float64) for _ in range(2))
        assert_same((g @ h)(weights), g(h(weights)))
    assert group.finite.moves <= {"permute", "flip"}
    assert group.compact == group
    assert group.rotations.moves <= {"rotate"}
    assert group.log_order() == pytest.approx(group.finite.log_order())
    for name in group.names("rotate"):
        if group[name].axes:
            assert group.finite[name].moves == {"permute", "flip"}
        assert not group.without([name]).names("rotate") or len(group.units) > 1
    read = Group.from_dict(json.loads(json.dumps(group.to_dict())))
    assert read == group
    torch.manual_seed(0)
    element = group.sample(dtype=torch.float64)
    torch.manual_seed(0)
    assert read.sample(dtype=torch.float64).equal(element)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_what_is_taken_for_a_group_with_rotations_is_one(seed):
    """Two or three sets of units at any positions of one axis: of those that aren't
    refused, products have the form of elements.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)

    def any_moves() -> set[str]:
        kinds = ("permute", "flip", "scale", "shift")
        moves = {move for move in kinds if draw.random() < 0.3}
        return {"rotate"} if draw.random() < 0.4 else moves

    group = group_on_one_axis(draw, [-1, 1], any_moves)
    if group is None:
        return
    g, h = (group.sample((16,), dtype=torch.float64) for _ in range(2))
    weights = weights_of(group)
    assert_same((g @ h)(weights), g(h(weights)))


def test_columns_of_a_table_rotate_beside_rows_that_permute():
    """As heads of queries that share values: positions lie row by row."""
    torch.manual_seed(0)
    table = torch.arange(6).view(2, 3)
    rows = Units("rows", 2, (Axis("w", 0, table.T),), moves=frozenset({"permute"}))
    turn = frozenset({"rotate"})
    columns = Units("columns", 3, (Axis("w", 0, table, 1),), moves=turn)
    group = Group([rows, columns], {"w": torch.Size([6, 4])})
    g, h = (group.sample((16,), dtype=torch.float64) for _ in range(2))
    weights = weights_of(group)
    assert_same((g @ h)(weights), g(h(weights)))
    swapped = group.element({"rows": [1, 0]}, rotations=g.select(0).rotations)
    by_hand = g.select(0).rotations["columns"] @ weights["w"].view(2, 3, 4)
    torch.testing.assert_close(swapped(weights)["w"].view(2, 3, 4), by_hand.flip(0))
    torn = torch.tensor([[0, 1, 2], [4, 3, 5]])
    columns = replace(columns, axes=(Axis("w", 0, torn, 1),))
    with pytest.raises(ValueError, match="make up no group"):
        Group([rows, columns], {"w": torch.Size([6, 4])})


def factors(**settings: object) -> Group:
    axes = {"W": (None, "f"), "z": (None, "f")}
    return Group.declare(axes, {"W": (8, 3), "z": (20, 3)}, **settings)


def test_declared_factors_rotate():
    group = factors(moves="rotate")
    assert group.order() == 48
    assert group.dimension == 3
    assert (group.finite.log_order(), group.finite.dimension) == (math.log(48), 0)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    weights = weights_of(group)
    moved = group.element(rotations={"f": turn})(weights)
    for site, value in weights.items():
        torch.testing.assert_close(moved[site], value @ turn.mT)
    product = weights["W"] @ weights["z"].mT
    torch.testing.assert_close(moved["W"] @ moved["z"].mT, product)
    lowered = {site: value.float() for site, value in weights.items()}
    assert group.sample(dtype=torch.float64)(lowered)["W"].dtype == torch.float32
    supports = {"W": constraints.real, "z": constraints.real}
    action, g = Action(group, supports), group.sample((4,), dtype=torch.float64)
    vector = action.layout.flatten(weights)
    assert action.log_abs_det(vector, g).abs().max() == 0
    jacobian = torch.autograd.functional.jacobian(
        lambda v: action(v, g.select(0)), vector
    )
    assert abs(float(torch.linalg.det(jacobian))) == pytest.approx(1.0)


def test_draws_are_uniform():
    """Means of entries, and of their products, over 4,000 Haar draws: within five
    standard errors, which all 24 exceed in fewer than one of 50,000 runs.
    """
    torch.manual_seed(0)
    turns = factors(moves="rotate").sample((4000,), dtype=torch.float64).rotations["f"]
    assert turns.mean(0).abs().max() < 5 * math.sqrt(1 / 3 / 4000)
    assert (turns.square().mean(0) - 1 / 3).abs().max() < 5 * math.sqrt(0.09 / 4000)
    assert abs(float(torch.linalg.det(turns).mean())) < 5 / math.sqrt(4000)


@quick
@given(seed=SEEDS)
def test_permutations_and_signs_become_rotations(seed):
    torch.manual_seed(seed)
    group = drawn_group(seed)
    weights = weights_of(group)
    g, h = (group.finite.sample((2,), dtype=torch.float64) for _ in range(2))
    turned = g.within(group)
    assert_same(turned(weights), g(weights))
    assert_same((turned @ h.within(group))(weights), g(h(weights)))


def one_axis(moves: set, exponent: int = 1, **options: object) -> Units:
    return Units("u", 3, (Axis("w", 0, plain(3), exponent),), moves=frozenset(moves))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: one_axis({"rotate", "scale"}), "can do nothing else"),
        (lambda: one_axis({"rotate"}, exponent=2), "exponents must be 1 or -1"),
        (lambda: factors(moves="rotate", even=["z"]), "keeps the signs"),
        (lambda: factors(moves="rotate").enumerate(), "can't be listed"),
        (
            lambda: factors(moves="rotate").element(rotations={"f": torch.ones(3, 3)}),
            "orthogonal matrices",
        ),
        (
            lambda: Action(
                factors(moves="rotate"),
                {"W": constraints.real, "z": constraints.positive},
            ),
            "real number",
        ),
        (
            lambda: Group(
                [one_axis({"rotate"}), replace(one_axis({"scale"}), name="v")],
                {"w": (3,)},
            ),
            "make up no group",
        ),
        (
            lambda: Group(
                [
                    one_axis({"rotate"}),
                    Units("in", 2, (Axis("v", 0, plain(6)),), "u", 3),
                ],
                {"w": (3,), "v": (6,)},
            ),
            "hold no others",
        ),
    ],
)
def test_what_rotates_can_do_nothing_else(build, message):
    with pytest.raises(ValueError, match=message):
        build()
