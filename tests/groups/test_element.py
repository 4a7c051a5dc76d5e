"""Elements: the action against loops by hand, group axioms, products of restrictions,
batches, devices.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyro_symmetric.groups import Axis, Group, Units

from .cases import (
    GROUPS,
    attend,
    attention,
    close,
    convolve,
    grouped,
    weights_of,
)

SEEDS = st.integers(0, 2**31 - 1)
WIDTHS = st.lists(st.integers(1, 6), min_size=3, max_size=5)
BATCHES = st.sampled_from([(), (1,), (3,), (2, 3)])
quick = settings(max_examples=25, deadline=None, derandomize=True)


# acting -------------------------------------------------------------------------------


@quick
@given(
    widths=WIDTHS,
    seed=SEEDS,
    batch=BATCHES,
    dtype=st.sampled_from([torch.float32, torch.float64]),
    activation=st.sampled_from(["relu", "tanh"]),
    kind=st.sampled_from(["permutations", "scalings", "signs", "group"]),
)
def test_network_outputs_do_not_change(
    mlp, widths, seed, batch, dtype, activation, kind
):
    torch.manual_seed(seed)
    net = mlp(widths, activation)
    weights, x = (
        net.weights(*batch, dtype=dtype),
        torch.randn(5, widths[0], dtype=dtype),
    )
    group = getattr(net, kind)
    moved = group.sample(batch)(weights)
    before, after = (
        net(w, x).softmax(-1) if group.names("shift") else net(w, x)
        for w in (weights, moved)
    )
    tolerance = (
        (1e-3 if group.names("scale") else 1e-4) if dtype == torch.float32 else 1e-11
    )
    torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance)
    assert all(moved[site].dtype == dtype for site in moved)
    if "scale" in group.moves:
        assert not torch.equal(moved["0.weight"], weights["0.weight"])


@pytest.mark.parametrize(
    ("make", "function"), [(attention, attend), (grouped, convolve)]
)
def test_networks_with_units_inside_units_do_not_change(make, function):
    """All moves at once, riders and grouped kernels included."""
    group = make()
    weights = weights_of(group)
    x = (
        torch.randn(4, 2, dtype=torch.float64)
        if make is attention
        else torch.randn(3, 2, 4, dtype=torch.float64)
    )
    elements = group.sample((20,), dtype=torch.float64)
    moved = elements(weights)
    for k in range(20):
        one = {site: value[k] for site, value in moved.items()}
        torch.testing.assert_close(
            function(one, x), function(weights, x), rtol=1e-9, atol=1e-9
        )
        assert not any(torch.allclose(one[site], weights[site]) for site in group.sites)


def test_permuted_values_are_copied_bit_by_bit():
    """Also where scales act around an epsilon: adding and subtracting it would
    round.
    """
    group = GROUPS["normalised"]()
    weights, p = weights_of(group, dtype=torch.float32), group.permutations.sample()
    for site, value in p(weights).items():
        assert torch.equal(
            value.flatten().sort().values, weights[site].flatten().sort().values
        )


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize(
    ("element", "batch"),
    [((4,), ()), ((), (4,)), ((3, 1), (1, 4)), ((4,), (3, 4)), ((2,), (2,))],
)
def test_batches_of_elements_and_weights_broadcast_like_a_loop(name, element, batch):
    group = GROUPS[name]()
    p, weights = group.sample(element, dtype=torch.float64), weights_of(group, *batch)
    moved, shape = p(weights), torch.broadcast_shapes(element, batch)
    for where in itertools.product(*map(range, shape)):
        single = {
            site: v.expand(*shape, *group.site_shapes[site])[where]
            for site, v in weights.items()
        }
        one = p.expand(shape).select(where)(single)
        assert close({site: v[where] for site, v in moved.items()}, one, 1e-15)


# the group ----------------------------------------------------------------------------


def test_elements_of_different_groups_do_not_compose(mlp):
    with pytest.raises(ValueError, match="only elements of one group compose"):
        mlp([2, 3, 2]).group.sample() @ mlp([2, 3, 3]).group.sample()


# batches, devices, files --------------------------------------------------------------


@pytest.mark.parametrize("name", GROUPS)
def test_elements_index_and_expand_their_batch(name):
    group = GROUPS[name]()
    g = group.sample((2, 3))
    for index in (1, (slice(None), None, 2), torch.tensor([True, False])):
        assert g.select(index).batch_shape == torch.empty(2, 3)[index].shape
    assert g.select(1).select(2).equal(g.select((1, 2)))
    wide = g.select(0).expand((4, 3))
    assert wide.select(3).equal(g.select(0))
    assert not g.equal(g.select(0))


@pytest.mark.cuda
@pytest.mark.parametrize("name", GROUPS)
def test_elements_act_on_the_device_of_the_weights(name):
    group = GROUPS[name]()
    weights = weights_of(group, 5)
    g, h = (group.sample((5,), dtype=torch.float64) for _ in range(2))
    there = {site: value.cuda() for site, value in weights.items()}
    for element in (
        g @ h,
        g.to("cuda") @ h,
        g.to("cuda") @ h.to("cuda").inverse().inverse(),
    ):
        moved = element(there)
        assert all(value.is_cuda for value in moved.values())
        assert close(
            {site: value.cpu() for site, value in moved.items()}, (g @ h)(weights), 1e-9
        )
    drawn = group.sample((3,), device="cuda")
    assert all(
        v.is_cuda
        for v in (
            drawn.permutations | drawn.signs | drawn.log_scales | drawn.shifts
        ).values()
    )


def test_units_that_share_some_positions_of_an_axis_are_all_multiplied_there() -> None:
    def units(name: str, index: list[list[int]]) -> Units:
        axis = Axis("w", 0, torch.tensor(index), 1)
        return Units(name, len(index[0]), (axis,), moves=frozenset({"scale"}))

    every = [
        units("a", [[1, 3]]),
        units("b", [[1, 3]]),
        units("c", [[0, 2], [1, 3]]),
        units("d", [[0, 2]]),
    ]
    group = Group([*every, units("e", [[0, 2]])], {"w": torch.Size([4])})
    for name, first in (("a", [1]), ("b", [1]), ("c", [0, 1]), ("d", [0]), ("e", [0])):
        element = group.element(log_scales={name: torch.tensor([2.0, 1.0]).log()})
        expected = torch.ones(4).index_fill(0, torch.tensor(first), 2.0)
        torch.testing.assert_close(element({"w": torch.ones(4)})["w"], expected)


def test_a_product_of_a_flip_and_a_cycle_acts_as_one_after_the_other():
    weights = {"w": torch.tensor([10.0, 20.0, 30.0])}
    group = Group.declare({"w": ("k",)}, {"w": (3,)}, ("permute", "flip"))
    flip = group.element(signs={"k": torch.tensor([-1.0, 1.0, 1.0])})
    cycle = group.element({"k": torch.tensor([1, 2, 0])})
    assert (flip @ cycle)(weights)["w"].tolist() == [-20.0, 30.0, 10.0]
    assert (cycle @ flip)(weights)["w"].tolist() == [20.0, 30.0, -10.0]
