"""Scalings, signs and shifts: axioms, action on networks, exactness through batch normalisation, errors."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from pyro_symmetric.symmetry.rescaling import (
    RescaledAxis,
    RescalingFactor,
    ScalingGroup,
    ShiftGroup,
    SignGroup,
)

WIDTHS = st.lists(st.integers(1, 6), min_size=3, max_size=5)
SEEDS = st.integers(0, 2**31 - 1)
BATCHES = st.sampled_from([(), (1,), (3,), (2, 3)])
quick = settings(max_examples=25, deadline=None, derandomize=True)


def close(a: dict, b: dict, tolerance: float = 1e-12) -> bool:
    return a.keys() == b.keys() and all(
        a[s].shape == b[s].shape and torch.allclose(a[s], b[s], rtol=tolerance, atol=tolerance) for s in a
    )


@quick
@given(widths=WIDTHS, seed=SEEDS, batch=BATCHES, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_relu_networks_do_not_change_under_scalings(mlp, widths, seed, batch, dtype):
    torch.manual_seed(seed)
    net = mlp(widths, "relu")
    weights, x = net.weights(*batch, dtype=dtype), torch.randn(5, widths[0], dtype=dtype)
    moved = net.scalings.sample(batch)(weights)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(net(moved, x), net(weights, x), rtol=tolerance, atol=tolerance)
    assert all(moved[site].dtype == dtype for site in moved)
    assert not torch.equal(moved["0.weight"], weights["0.weight"])


@quick
@given(widths=WIDTHS, seed=SEEDS, batch=BATCHES)
def test_tanh_networks_do_not_change_under_sign_flips(mlp, widths, seed, batch):
    torch.manual_seed(seed)
    net = mlp(widths, "tanh")
    weights, x = net.weights(*batch), torch.randn(5, widths[0], dtype=torch.float64)
    torch.testing.assert_close(net(net.signs.sample(batch)(weights), x), net(weights, x), rtol=1e-12, atol=1e-12)


@quick
@given(widths=WIDTHS, seed=SEEDS, batch=BATCHES)
def test_softmax_does_not_change_under_shifts(mlp, widths, seed, batch):
    torch.manual_seed(seed)
    net = mlp(widths)
    weights, x = net.weights(*batch), torch.randn(5, widths[0], dtype=torch.float64)
    moved = net.shifts.sample(batch, dtype=torch.float64)(weights)
    torch.testing.assert_close(net(moved, x).softmax(-1), net(weights, x).softmax(-1), rtol=1e-12, atol=1e-12)
    last = f"{net.depth - 1}.bias"
    assert not torch.equal(moved[last], weights[last])


@quick
@given(seed=SEEDS, batch=BATCHES, kind=st.sampled_from(["scalings", "signs", "shifts"]))
def test_elements_satisfy_the_group_axioms_and_act_as_a_commutative_group(mlp, seed, batch, kind):
    torch.manual_seed(seed)
    net = mlp([3, 4, 5, 2], "tanh" if kind == "signs" else "relu")
    group, weights = getattr(net, kind), net.weights(*batch)
    p, r, s = (group.sample(batch, dtype=torch.float64) for _ in range(3))
    identity = group.identity(batch, dtype=torch.float64)
    assert close(((p @ r) @ s).images, (p @ (r @ s)).images)
    assert close((p @ r).images, (r @ p).images)
    assert (p @ identity).equal(p)
    assert close((p.inverse() @ p).images, identity.images)
    assert close((p @ r)(weights), p(r(weights)))
    assert close(p.inverse()(p(weights)), weights)
    assert close(identity(weights), weights, 0.0)


@pytest.mark.parametrize("kind", ["scalings", "signs", "shifts"])
@pytest.mark.parametrize(("element", "batch"), [((4,), ()), ((), (4,)), ((3, 1), (1, 4)), ((4,), (3, 4))])
def test_batches_of_elements_and_weights_broadcast_like_a_loop(mlp, kind, element, batch):
    net = mlp([2, 4, 3, 2], "tanh" if kind == "signs" else "relu")
    group, weights = getattr(net, kind), net.weights(*batch)
    p = group.sample(element, dtype=torch.float64)
    moved = p(weights)
    shape = torch.broadcast_shapes(element, batch)
    for where in itertools.product(*map(range, shape)):
        single = {site: v.expand(*shape, *net.site_shapes[site])[where] for site, v in weights.items()}
        own = {n: im.expand(*shape, *im.shape[len(element) :])[where] for n, im in p.images.items()}
        assert close({site: v[where] for site, v in moved.items()}, group.element(own)(single), 0.0)


def test_scaling_multiplies_rows_and_divides_columns(mlp):
    net = mlp([2, 3, 2])
    weights = net.weights()
    moved = net.scalings.element({"hidden.0": torch.tensor([1.0, 2.0, 4.0])})(weights)
    factor = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    assert torch.equal(moved["0.weight"], weights["0.weight"] * factor[:, None])
    assert torch.equal(moved["0.bias"], weights["0.bias"] * factor)
    assert torch.equal(moved["1.weight"], weights["1.weight"] / factor)
    assert torch.equal(moved["1.bias"], weights["1.bias"])


@pytest.mark.stochastic
def test_log_order_of_signs_is_n_log_two_and_sampling_is_uniform(mlp):
    signs = mlp([2, 3, 2], "tanh").signs
    assert signs.order() == 8
    assert signs.log_order() == pytest.approx(3 * math.log(2))
    codes = ((signs.sample((8000,))["hidden.0"] > 0) * torch.tensor([4, 2, 1])).sum(-1)
    counts = codes.bincount(minlength=8).double()
    # Chi-squared with 7 degrees of freedom: above 33 with probability 3e-5; seeded.
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 33


@pytest.mark.stochastic
def test_scales_are_log_normal_with_the_given_spread(mlp):
    logs = mlp([2, 50, 2]).scalings.sample((2000,), spread=0.5, dtype=torch.float64)["hidden.0"].log()
    # 100,000 draws: five standard errors are 0.008 and 0.006; seeded.
    assert abs(float(logs.mean())) < 0.008
    assert abs(float(logs.std()) - 0.5) < 0.006
    assert mlp([2, 50, 2]).scalings.sample(spread=0.0).equal(mlp([2, 50, 2]).scalings.identity())


@pytest.mark.parametrize("train", [False, True])
def test_scaling_through_batch_normalisation_is_exact_including_its_epsilon(train):
    # Large epsilon, small variances: ignoring epsilon would be off by more than a tenth.
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, eps=0.1), nn.ReLU(), nn.Linear(4, 2)).double()
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.05, 0.2)
    weights = {**{k: v.detach() for k, v in net.named_parameters()}, **dict(net.named_buffers())}
    index = torch.arange(4)[None]
    before = RescalingFactor(
        "before",
        4,
        (
            RescaledAxis("0.weight", 0, index, 1),
            RescaledAxis("0.bias", 0, index, 1),
            RescaledAxis("1.running_mean", 0, index, 1, buffer=True),
            RescaledAxis("1.running_var", 0, index, 2, buffer=True, epsilon=0.1),
        ),
    )
    after = RescalingFactor(
        "after",
        4,
        (
            RescaledAxis("1.weight", 0, index, 1),
            RescaledAxis("1.bias", 0, index, 1),
            RescaledAxis("3.weight", 1, index, -1),
        ),
    )
    factors = [after] if train else [before, after]
    group = ScalingGroup(factors, {site: value.shape for site, value in weights.items()})
    moved = group.sample(dtype=torch.float64)(weights)
    x = torch.randn(6, 3, dtype=torch.float64)
    net = copy.deepcopy(net).train(train)
    torch.testing.assert_close(
        functional_call(copy.deepcopy(net), moved, x),
        functional_call(copy.deepcopy(net), weights, x),
        rtol=1e-12,
        atol=1e-12,
    )
    assert moved["1.num_batches_tracked"].dtype == torch.long
    assert group.required_sites == tuple(s for s in group.sites if "running" not in s)


def test_which_sites_are_weights_and_which_are_biases():
    index = torch.arange(4)[None]
    factor = RescalingFactor(
        "unit",
        4,
        (
            RescaledAxis("w", 0, index, 1),
            RescaledAxis("b", 0, index, 1),
            RescaledAxis("norm.weight", 0, index, 1),
            RescaledAxis("v", 0, index, -1),
            RescaledAxis("mean", 0, index, 1, buffer=True),
        ),
    )
    shapes = {"w": (4, 2), "b": (4,), "norm.weight": (4,), "v": (4,), "mean": (4,), "scale": (), "last.bias": (2, 2)}
    group = ScalingGroup([factor], {**shapes, "free": (3, 3), "c": (3,)})
    assert group.weight_sites == ("w", "norm.weight", "v", "free")


@pytest.mark.parametrize("kind", ["scalings", "signs", "shifts"])
def test_groups_survive_a_round_trip_through_json(mlp, kind):
    group = getattr(mlp([2, 3, 4, 2], "tanh" if kind == "signs" else "relu"), kind)
    again = type(group).from_dict(group.to_dict())
    assert again == group
    assert hash(again) == hash(group)
    assert getattr(mlp([2, 3, 4, 3], "tanh" if kind == "signs" else "relu"), kind) != group


def test_elements_move_between_precisions_and_index_their_batch(mlp):
    scaling = mlp([2, 3, 2]).scalings.sample((5,))
    assert scaling.to(dtype=torch.float64)["hidden.0"].dtype == torch.float64
    assert scaling.select(2).batch_shape == ()
    assert torch.equal(scaling.select(2)["hidden.0"], scaling["hidden.0"][2])


def test_trivial_groups_leave_weights_alone(mlp):
    net = mlp([2, 3, 2], "tanh")
    weights = net.weights(4)
    assert close(net.scalings.sample((4,))(weights), weights, 0.0)
    assert close(ShiftGroup([], net.site_shapes).identity()(weights), weights, 0.0)
    assert repr(net.scalings) == "ScalingGroup(trivial)"


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ({"hidden.0": [1.0, 0.0, 2.0]}, "> 0"),
        ({"hidden.0": [1.0, -1.0, 2.0]}, "> 0"),
        ({"hidden.0": [1.0, float("inf"), 2.0]}, "finite"),
        ({"hidden.0": [1.0, 2.0]}, "must be 3 long"),
        ({"hidden.7": [1.0, 2.0]}, "hidden.7"),
    ],
)
def test_elements_that_are_no_scalings_are_refused(mlp, images, words):
    with pytest.raises(ValueError, match=words):
        mlp([2, 3, 2]).scalings.element(images)


def test_signs_other_than_plus_and_minus_one_are_refused(mlp):
    with pytest.raises(ValueError, match=r"\+1 or -1"):
        mlp([2, 3, 2], "tanh").signs.element({"hidden.0": [1, -1, 2]})


def test_shifts_that_are_not_finite_or_unknown_are_refused(mlp):
    shifts = mlp([2, 3, 2]).shifts
    with pytest.raises(ValueError, match="finite"):
        shifts.element({"1.bias": float("nan")})
    with pytest.raises(ValueError, match=r"0\.bias"):
        shifts.element({"0.bias": 1.0})
    with pytest.raises(ValueError, match="unknown"):
        ShiftGroup(["nowhere"], {"a": torch.Size((2,))})


def test_a_negative_spread_is_refused(mlp):
    with pytest.raises(ValueError, match="spread"):
        mlp([2, 3, 2]).scalings.sample(spread=-1.0)


def test_elements_of_different_groups_do_not_compose(mlp):
    with pytest.raises(ValueError, match="one group"):
        mlp([2, 3, 2]).scalings.sample() @ mlp([2, 3, 3]).scalings.sample()
    with pytest.raises(TypeError):
        mlp([2, 3, 2]).scalings.sample() @ mlp([2, 3, 2], "tanh").signs.sample()


def test_an_index_that_does_not_fit_its_factor_is_refused():
    with pytest.raises(ValueError, match=r"must be \(blocks, 3\)"):
        RescalingFactor("unit", 3, (RescaledAxis("a", 0, torch.arange(2)[None], 1),))
    with pytest.raises(ValueError, match="rescales axis 0 of 'a'"):
        SignGroup([RescalingFactor("unit", 3, (RescaledAxis("a", 0, torch.arange(3)[None], 1),))], {"a": (2,)})


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["scalings", "signs", "shifts"])
def test_elements_act_on_the_device_of_the_weights(mlp, kind):
    net = mlp([2, 4, 3, 2], "tanh" if kind == "signs" else "relu")
    p, weights = getattr(net, kind).sample((5,)), net.weights(5)
    moved = p({site: value.cuda() for site, value in weights.items()})
    assert all(value.is_cuda for value in moved.values())
    assert close({site: value.cpu() for site, value in moved.items()}, p(weights))
