"""The number of elements that act differently, beside all elements one by one."""

from __future__ import annotations

import itertools
import math
import random

import pyro.distributions as dist
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.groups import Axis, Element, Group, Units

from .cases import GROUPS, weights_of
from .test_random_groups import drawn_group

MOST_ELEMENTS = 5_000
SEEDS = st.integers(0, 2**31 - 1)
quick = settings(max_examples=60, deadline=None, derandomize=True)


def every_element(group: Group) -> Element | None:
    """All permutations with all signs, whether they act or not; none if there are too
    many.
    """
    permuted = [group[name] for name in group.names("permute")]
    flipped = [group[name] for name in group.names("flip")]
    number = math.prod(math.factorial(one.size) ** one.copies for one in permuted)
    number *= 2 ** sum(one.count for one in flipped)
    if number > MOST_ELEMENTS:
        return None
    choices = [
        list(itertools.permutations(range(one.size)))
        for one in permuted
        for _ in range(one.copies)
    ]
    choices += [[1.0, -1.0]] * sum(one.count for one in flipped)
    rows = list(itertools.product(*choices))
    permutations, signs, column = {}, {}, 0
    for one in permuted:
        chosen = [row[column : column + one.copies] for row in rows]
        permutations[one.name] = torch.tensor(chosen, dtype=torch.long).reshape(
            number, *one.shape
        )
        column += one.copies
    for one in flipped:
        chosen = [row[column : column + one.count] for row in rows]
        signs[one.name] = torch.tensor(chosen).reshape(number, *one.shape)
        column += one.count
    return Element(group, permutations, signs, batch_shape=(number,))


def images(elements: Element, group: Group) -> torch.Tensor:
    """The images of generic weights, a row for each that differs."""
    torch.manual_seed(0)
    moved = elements(weights_of(group))
    rows = [torch.zeros(*elements.batch_shape, 1)]  # so that there are entries
    rows += [value.reshape(len(value), value[0].numel()) for value in moved.values()]
    return torch.cat(rows, 1).unique(dim=0)


def assert_right_order(group: Group) -> None:
    elements = every_element(group.finite)
    if elements is None:
        return
    expected = images(elements, group)
    assert group.order() == len(expected)
    assert group.log_order() == pytest.approx(math.log(len(expected)))
    enumerated = group.finite.enumerate()
    assert enumerated.batch_shape == (len(expected),)
    assert enumerated.select(0).equal(group.finite.identity())
    assert torch.equal(images(enumerated, group), expected)


@quick
@given(seed=SEEDS)
def test_the_order_of_nested_units_is_the_number_of_distinct_actions(seed):
    assert_right_order(drawn_group(seed))


@pytest.mark.parametrize("name", GROUPS)
def test_the_order_of_each_case_is_the_number_of_distinct_actions(name):
    assert_right_order(GROUPS[name]())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=SEEDS)
def test_the_order_of_declared_units_is_the_number_of_distinct_actions(seed):
    """Units along several axes of a site, twice along one site, of length 0 or 1, with
    sites that are even.
    """
    draw = random.Random(seed)
    sizes = {name: draw.choice([0, 1, 2, 2, 3]) for name in "abc"}
    names = [*sizes, None]
    axes = {f"site {i}": draw.choices(names, k=draw.randint(0, 3)) for i in range(3)}
    shapes = {
        site: torch.Size(
            [draw.choice([0, 1, 1, 2]) if n is None else sizes[n] for n in lying]
        )
        for site, lying in axes.items()
    }
    used = {name for lying in axes.values() for name in lying if name is not None}
    moves = {
        name: draw.choice(["permute", "flip", ("permute", "flip")])
        for name in sorted(used)
    }
    even = [site for site in axes if draw.random() < 0.3]
    assert_right_order(Group.declare(axes, shapes, moves=moves, even=even))


@quick
@given(seed=SEEDS)
def test_signs_that_meet_at_a_position_count_once(seed):
    """Several sets of units along one axis, some positions under two of them, some
    under none.
    """
    draw = random.Random(seed)
    units = []
    for name in "abc":
        size = draw.randint(1, 4)
        axes = tuple(
            Axis(
                site,
                dim,
                torch.tensor([draw.sample(range(4), size)]),
                draw.choice([1, -1, 2]),
            )
            for site in ("w", "v")
            for dim in (0, 1)
            if draw.random() < 0.5
        )
        units.append(Units(name, size, axes, moves=frozenset({"flip"})))
    assert_right_order(Group(units, {"w": (4, 4), "v": (4, 5)}))


def test_flipping_all_rows_and_all_columns_is_one_action_of_two():
    group = Group.declare(
        {"A": ("r", "c")}, {"A": torch.zeros(2, 3)}, moves=("permute", "flip")
    )
    assert group.order() == 192
    # 2 of 3 sets are joined by the sites between them: one flip of all does nothing
    chain = {"A": ("r", "c"), "B": ("c", "d"), "C": ("d", "r")}
    shapes = {"A": (2, 3), "B": (3, 4), "C": (4, 2)}
    assert Group.declare(chain, shapes, moves="flip").order() == 2 ** (2 + 3 + 4 - 1)


def test_large_groups_have_an_order_too():
    """Thousands of units in pairs that share their positions: x + y is constant."""
    n = 3000
    index = torch.arange(n)[None]
    pairs = [
        Units(name, n, (Axis("w", 0, index, 1),), moves=frozenset({"flip"}))
        for name in "xy"
    ]
    assert Group(pairs, {"w": (n,)}).log_order() == pytest.approx(n * math.log(2))


def far_apart() -> tuple[Group, dist.Distribution]:
    group = Group.declare(
        {"A": ("r", "c")}, {"A": torch.zeros(2, 3)}, moves=("permute", "flip")
    )
    loc = torch.tensor([1.0, -2.0, 4.0, 7.0, -11.0, 16.0], dtype=torch.float64)
    return group, dist.Normal(loc, 0.01).to_event(1)


def test_copies_that_do_not_overlap_have_the_log_order_as_information():
    group, base = far_apart()
    orbit = ps.Symmetrized(base, ps.groups.Action(group, ["A"]), ps.ExactOrbit())
    information = orbit.mutual_information(20)
    assert float(information.value) == pytest.approx(group.log_order(), abs=1e-9)
    assert float(information.value) == pytest.approx(math.log(192), abs=1e-9)


def test_the_exact_orbit_is_the_mean_over_all_elements_with_its_gradient():
    group, _ = far_apart()
    action = ps.groups.Action(group, ["A"])
    elements = every_element(group)
    torch.manual_seed(1)
    value = torch.randn(6, dtype=torch.float64, requires_grad=True)
    loc = torch.randn(6, dtype=torch.float64, requires_grad=True)
    base = dist.Normal(loc, 0.7).to_event(1)
    moved = base.log_prob(action(value, elements))
    expected = moved.logsumexp(0) - math.log(len(moved))
    log_prob = ps.Symmetrized(base, action, ps.ExactOrbit()).log_prob(value)
    torch.testing.assert_close(log_prob, expected)
    for got, wanted in zip(
        torch.autograd.grad(log_prob, (value, loc)),
        torch.autograd.grad(expected, (value, loc)),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_networks_count_each_function_preserving_sign_once(bias):
    """Signs of two layers of an autoencoder that nothing between them tells apart."""
    net = nn.Sequential(
        nn.Linear(2, 2, bias=bias), nn.Tanh(), nn.Linear(2, 2, bias=bias)
    )
    symmetry = ps.find_symmetry(net.double(), torch.randn(5, 2).double())
    elements = every_element(symmetry.finite)
    assert symmetry.finite.order() == len(images(elements, symmetry.finite))


def test_a_site_without_axes_stays():
    weights = {"w": torch.arange(3.0), "th": torch.tensor(0.5)}
    group = Group.declare(
        {"w": ("unit",), "th": ()}, weights, moves=("permute", "flip")
    )
    assert group.order() == 48
    moved = group.sample((4,))(weights)
    assert torch.equal(moved["th"], weights["th"].expand(4))
    assert Group.declare({"th": ()}, weights).order() == 1
    with pytest.raises(ValueError, match=r"axes\['w'\] is \(\)"):
        Group.declare({"w": ()}, weights)
