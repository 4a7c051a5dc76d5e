"""The minimum scaled representation against closed forms, SciPy, a convex solver, and
itself from elsewhere.
"""

import itertools
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import nn
from torch.func import functional_call

from pyro_symmetric.canonical import scales
from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.canonical.scales import MinimalMass, evened, minimal_mass
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.groups import Axis, Group, Units

SEEDS = st.integers(0, 2**31 - 1)
quick = settings(max_examples=25, deadline=None, derandomize=True)


def scaled(name: str, size: int, axes: list[tuple], **options) -> Units:
    """Units that are scaled: [(site, dim, exponent)], each along a plain axis."""
    own = tuple(
        Axis(site, dim, torch.arange(size)[None], exponent)
        for site, dim, exponent in axes
    )
    return Units(name, size, own, moves={"scale"}, **options)


def group_of(where: dict, shapes: dict) -> Group:
    """Name -> [(site, dim, exponent)]."""
    return Group(
        [
            scaled(name, shapes[axes[0][0]][axes[0][1]], axes)
            for name, axes in where.items()
        ],
        shapes,
    )


def by_scipy(weights: dict, group: Group) -> float:
    """The minimum by a trust-region method on the sum written out entry by entry."""
    offsets = dict(
        zip(group.factors, np.cumsum([0, *group.factors.values()]), strict=False)
    )
    rows, masses = [], []
    for site in group.weight_sites:
        for where in itertools.product(*map(range, group.site_shapes[site])):
            row = np.zeros(sum(group.factors.values()))
            for dim, members in group.members(site).items():
                for name, axis in members:
                    for unit in (axis.index == where[dim]).nonzero()[:, 1].tolist():
                        row[offsets[name] + unit] += axis.exponent
            rows.append(row)
            masses.append(float(weights[site][where]) ** 2)
    a, m = np.array(rows), np.array(masses)

    def value(u: np.ndarray) -> float:
        return float((m * np.exp(2 * a @ u)).sum())

    def gradient(u: np.ndarray) -> np.ndarray:
        return 2 * a.T @ (m * np.exp(2 * a @ u))

    def hessian(u: np.ndarray) -> np.ndarray:
        return 4 * (a.T * (m * np.exp(2 * a @ u))) @ a

    start = np.zeros(a.shape[1])
    found = minimize(
        value,
        start,
        jac=gradient,
        hess=hessian,
        method="trust-exact",
        options={"gtol": 1e-10},
    )
    return found.fun


def pinned_counts(found: MinimalMass) -> dict[str, int]:
    """Name -> the largest number of pinned units in any sample; none are left out."""
    counts = {
        name: int(pinned.flatten(found.mass.dim()).sum(-1).max())
        for name, pinned in found.pinned.items()
    }
    return {name: count for name, count in counts.items() if count}


def norm(weights: dict, sites: tuple[str, ...]) -> float:
    return sum(float(weights[site].square().sum()) for site in sites)


# the minimum --------------------------------------------------------------------------


def test_one_hidden_layer_has_mass_twice_the_product_of_in_and_out_norms(mlp):
    net = mlp([5, 30, 3])
    weights = net.weights(7)
    found = minimal_mass(weights, net)
    expected = (
        2 * weights["0.weight"].norm(dim=-1) * weights["1.weight"].norm(dim=-2)
    ).sum(-1)
    torch.testing.assert_close(found.mass, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        found.weights["0.weight"].norm(dim=-1), found.weights["1.weight"].norm(dim=-2)
    )
    ratio = (
        weights["1.weight"].norm(dim=-2) / weights["0.weight"].norm(dim=-1)
    ).log() / 2
    torch.testing.assert_close(found.log_scales["hidden.0"], ratio)


@pytest.mark.parametrize(
    ("where", "shapes"),
    [
        pytest.param(
            {
                "a": [("x", 0, 1), ("y", 1, -1)],
                "b": [("y", 0, 1), ("z", 1, -1)],
                "c": [("z", 0, 1), ("v", 1, -1)],
            },
            {"x": (3, 2), "y": (4, 3), "z": (3, 4), "v": (2, 3)},
            id="layers",
        ),
        pytest.param(
            {"h": [("in", 0, 1), ("loop", 0, 1), ("loop", 1, -1), ("out", 1, -1)]},
            {"in": (4, 3), "loop": (4, 4), "out": (2, 4)},
            id="recurrent",
        ),
        pytest.param(
            {
                "s": [("in", 0, 1), ("up", 1, -1), ("down", 0, 1), ("out", 1, -1)],
                "h": [("up", 0, 1), ("down", 1, -1)],
            },
            {"in": (4, 5), "up": (3, 4), "down": (4, 3), "out": (2, 4)},
            id="residual",
        ),
        pytest.param(
            {
                "a": [("t", 0, 1), ("out", 1, -1)],
                "b": [("t", 1, -1), ("in", 0, 1)],
                "c": [("t", 2, -1), ("in2", 0, 1)],
            },
            {"t": (3, 4, 5), "in": (4, 2), "in2": (5, 2), "out": (2, 3)},
            id="three axes",
        ),
        pytest.param(
            {"a": [("x", 0, 1), ("y", 1, -1)], "b": [("x", 0, 1), ("z", 0, -1)]},
            {"x": (4, 3), "y": (2, 4), "z": (4, 2)},
            id="two factors on one axis",
        ),
        pytest.param(
            {"a": [("x", 0, 2), ("y", 1, -1)], "b": [("y", 0, 1), ("z", 1, -3)]},
            {"x": (4, 3), "y": (3, 4), "z": (2, 3)},
            id="other exponents",
        ),
        pytest.param(
            {"a": [("x", 0, 2), ("y", 1, -1)], "b": [("x", 0, 2), ("y", 1, -1)]},
            {"x": (4, 3), "y": (2, 4)},
            id="two that scale the same entries",
        ),
    ],
)
def test_any_pattern_of_axes_and_exponents_reaches_the_minimum_that_scipy_finds(
    where, shapes
):
    group = group_of(where, shapes)
    weights = {
        site: torch.randn(shape, dtype=torch.float64) for site, shape in shapes.items()
    }
    found = minimal_mass(weights, group)
    assert float(found.mass) == pytest.approx(by_scipy(weights, group), rel=1e-9)
    assert float(found.mass) == pytest.approx(
        norm(found.weights, group.weight_sites), rel=1e-12
    )
    assert not pinned_counts(found)


@quick
@given(
    widths=st.lists(st.integers(1, 6), min_size=3, max_size=6),
    seed=SEEDS,
    batch=st.sampled_from([(), (4,), (2, 3)]),
)
def test_the_answer_is_the_same_from_any_rescaled_copy_and_the_function_stays(
    mlp, widths, seed, batch
):
    torch.manual_seed(seed)
    net = mlp(widths)
    weights, x = net.weights(*batch), torch.randn(5, widths[0], dtype=torch.float64)
    found = minimal_mass(weights, net)
    other = minimal_mass(
        net.scalings.sample(batch, spread=3.0, dtype=torch.float64)(weights), net
    )
    torch.testing.assert_close(other.mass, found.mass, rtol=1e-10, atol=0)
    for site in weights:
        torch.testing.assert_close(
            other.weights[site], found.weights[site], rtol=1e-8, atol=1e-8
        )
    torch.testing.assert_close(
        net(found.weights, x), net(weights, x), rtol=1e-8, atol=1e-8
    )
    assert found.mass.shape == batch
    assert bool((found.imbalance <= 1e-12).all())


def test_a_batch_is_solved_like_a_loop_over_samples_and_in_chunks(mlp, monkeypatch):
    net = mlp([3, 5, 4, 2])
    weights = net.weights(6)
    weights["0.weight"][2, 1] = 0.0
    found = minimal_mass(weights, net)
    monkeypatch.setattr(scales, "CHUNK_ENTRIES", 100)
    chunked = minimal_mass(weights, net)
    torch.testing.assert_close(chunked.mass, found.mass, rtol=1e-12, atol=0)
    for i in range(6):
        one = minimal_mass({site: value[i] for site, value in weights.items()}, net)
        assert float(one.mass) == pytest.approx(float(found.mass[i]), rel=1e-12)
        assert torch.equal(one.pinned["hidden.0"], found.pinned["hidden.0"][i])
        assert torch.equal(chunked.pinned["hidden.0"], found.pinned["hidden.0"])


def chain(squares: list[float]) -> tuple[dict, Group]:
    """Entries in a row, with a unit between neighbours: one enters it, the next leaves
    it.
    """
    n = len(squares) - 1
    axes = (
        Axis("w", 0, torch.arange(n)[None], 1),
        Axis("w", 0, torch.arange(1, n + 1)[None], -1),
    )
    weights = {"w": torch.tensor(squares, dtype=torch.float64).sqrt()}
    return weights, Group(
        [Units("u", n, axes, moves={"scale"})], {"w": torch.Size([n + 1])}
    )


CHAINS = {
    "growing": [2.9**i for i in range(21)],
    "shrinking": [2.9**-i for i in range(21)],
    "tent": [2.9 ** min(i, 60 - i) for i in range(61)],
    "notch": [27.0] * 30 + [9.0, 3.0, 1.0, 3.0, 9.0] + [27.0] * 30,
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_long_chain_reaches_the_geometric_mean_and_no_step_raises_the_mass(
    name, monkeypatch
):
    squares = CHAINS[name]
    weights, group = chain(squares)
    least = len(squares) * np.exp(np.log(squares).mean())
    found = minimal_mass(weights, group, sites=["w"])
    assert float(found.mass) == pytest.approx(least, rel=1e-9)
    assert float(found.imbalance) < 1e-12
    before = sum(squares)
    for steps in range(1, 12):
        monkeypatch.setattr(scales, "STEPS", steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            mass = float(minimal_mass(weights, group, sites=["w"]).mass)
        assert mass <= before * (1 + 1e-12)
        before = mass


def test_a_minimum_that_is_not_reached_is_called_so(monkeypatch):
    weights, group = chain(CHAINS["tent"])
    monkeypatch.setattr(scales, "STEPS", 5)
    with pytest.warns(UserWarning, match="stopped before the minimum"):
        minimal_mass(weights, group, sites=["w"])


def test_evened_scales_are_those_that_scipy_finds():
    """The least sum of ``x - log x``, of exponents whose signs alone give no minimum of
    ``x``.
    """
    shapes = {"x": (4, 3), "y": (3, 2)}
    group = group_of(
        {"a": [("x", 0, 1)], "b": [("x", 1, 2), ("y", 0, 1)], "c": [("y", 1, -1)]},
        shapes,
    )
    weights = {
        site: torch.randn(shape, dtype=torch.float64) for site, shape in shapes.items()
    }
    weights["x"][0, 0] = 0.0

    def logs(u: np.ndarray) -> np.ndarray:
        a, b, c = u[:4, None], u[4:7], u[7:]
        parts = (
            (weights["x"].numpy(), a + 2 * b),
            (weights["y"].numpy(), b[:, None] - c),
        )
        return np.concatenate(
            [
                np.log(w[w != 0] ** 2) + 2 * np.broadcast_to(e, w.shape)[w != 0]
                for w, e in parts
            ]
        )

    best = minimize(
        lambda u: (np.exp(logs(u)) - logs(u)).sum(),
        np.zeros(9),
        method="BFGS",
        options={"gtol": 1e-9},
    )
    found = evened(
        group,
        {site: value[None] for site, value in weights.items()},
        torch.ones(1, 9, dtype=torch.bool),
    )
    np.testing.assert_allclose(logs(found[0].numpy()), logs(best.x), atol=1e-6)


# units without a best scale -----------------------------------------------------------


def test_dead_units_and_those_that_hang_on_them_are_pinned_and_left_out(mlp):
    net = mlp([3, 4, 5, 2])
    weights = net.weights()
    weights["0.weight"][1] = 0.0  # nothing enters
    weights["2.weight"][:, 3] = 0.0  # nothing leaves
    weights["1.weight"][0, [0, 2, 3]] = 0.0  # fed by the dead unit only
    found = minimal_mass(weights, net)
    assert found.pinned["hidden.0"].tolist() == [False, True, False, False]
    assert found.pinned["hidden.1"].tolist() == [True, False, False, True, False]
    assert pinned_counts(found) == {"hidden.0": 1, "hidden.1": 2}
    assert not bool(found.log_scales["hidden.0"][1])
    small = mlp([3, 3, 3, 2])
    kept = {
        "0.weight": weights["0.weight"][[0, 2, 3]],
        "0.bias": weights["0.bias"][[0, 2, 3]],
        "1.weight": weights["1.weight"][[1, 2, 4]][:, [0, 2, 3]],
        "1.bias": weights["1.bias"][[1, 2, 4]],
        "2.weight": weights["2.weight"][:, [1, 2, 4]],
        "2.bias": weights["2.bias"],
    }
    assert float(found.mass) == pytest.approx(
        float(minimal_mass(kept, small).mass), rel=1e-12
    )
    moved = minimal_mass(net.scalings.sample(dtype=torch.float64)(weights), net)
    assert float(moved.mass) == pytest.approx(float(found.mass), rel=1e-12)


@pytest.mark.parametrize(
    ("where", "shapes", "pinned"),
    [
        # v isn't counted, so that it takes over from s, and all before it shrinks
        pytest.param(
            {
                "z": [("e", 1, 1), ("w1", 1, -1)],
                "s": [("w1", 0, 1), ("w2", 1, -1)],
                "v": [("v", 0, 1), ("w2", 1, -1)],
                "t": [("w2", 0, 1), ("w3", 1, -1)],
            },
            {"e": (5, 2), "w1": (3, 2), "v": (3,), "w2": (4, 3), "w3": (2, 4)},
            {"z": 2, "s": 3, "v": 3, "t": 4},
            id="chain",
        ),
        pytest.param(  # all but x depend on the sum of both
            {
                "s": [("x", 0, 1), ("w", 0, 1), ("w", 1, -1)],
                "v": [("v", 0, 1), ("w", 0, 1), ("w", 1, -1)],
                "t": [("y", 0, 1), ("z", 1, -1)],
            },
            {"x": (3, 2), "w": (3, 3), "v": (3,), "y": (4, 2), "z": (2, 4)},
            {"s": 3, "v": 3},
            id="loop",
        ),
        # layers before normalisations; what feeds only one has no best scale either
        pytest.param(
            {
                "0": [("a", 0, 1)],
                "1": [("gain", 0, 1), ("b", 1, -1)],
                "3": [("b", 0, 1)],
                "t": [("y", 0, 1), ("z", 1, -1)],
            },
            {"a": (4, 3), "gain": (4,), "b": (5, 4), "y": (4, 2), "z": (2, 4)},
            {"0": 4, "1": 4, "3": 5},
            id="normalised",
        ),
    ],
)
def test_multipliers_that_shrink_together_for_nothing_are_pinned(where, shapes, pinned):
    group = group_of(where, shapes)
    weights = {
        site: torch.randn(20, *shape, dtype=torch.float64)
        for site, shape in shapes.items()
    }
    found = minimal_mass(weights, group)
    assert pinned_counts(found) == pinned
    left = (
        2 * (weights["y"].norm(dim=-1) * weights["z"].norm(dim=-2)).sum(-1)
        if "y" in shapes
        else torch.zeros(20)
    )
    torch.testing.assert_close(found.mass, left.double(), rtol=1e-12, atol=0)
    other = minimal_mass(
        group.sample((20,), spread=1.0, dtype=torch.float64)(weights), group
    )
    torch.testing.assert_close(other.mass, found.mass, rtol=1e-12, atol=0)
    assert pinned_counts(other) == pinned
    for rule in ("minimal_mass", "minimal_norm"):
        form = canonicalize(weights, group, scalings=rule)
        for site, value in canonicalize(other.weights, group, scalings=rule).items():
            torch.testing.assert_close(value, form[site], rtol=1e-9, atol=1e-9)


def normalised_network() -> tuple[nn.Module, dict, Group]:
    net = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(),
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(),
        nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2),
    ).double().eval()  # fmt: skip
    weights = {
        **{k: v.detach().clone() for k, v in net.named_parameters()},
        **dict(net.named_buffers()),
    }
    for site in ("1.weight", "4.weight", "1.bias", "4.bias"):
        weights[site].normal_()
    units = []
    for linear, bn, after, n in ((0, 1, 3, 4), (3, 4, 6, 5)):
        index = torch.arange(n)[None]
        before = [Axis(f"{linear}.{kind}", 0, index, 1) for kind in ("weight", "bias")]
        before.append(Axis(f"{bn}.running_mean", 0, index, 1, buffer=True))
        before.append(Axis(f"{bn}.running_var", 0, index, 2, buffer=True, epsilon=1e-5))
        units.append(Units(f"{linear}", n, tuple(before), moves={"scale"}))
        units.append(
            scaled(
                f"{bn}",
                n,
                [
                    (f"{bn}.weight", 0, 1),
                    (f"{bn}.bias", 0, 1),
                    (f"{after}.weight", 1, -1),
                ],
            )
        )
    units.append(
        scaled("6", 6, [("6.weight", 0, 1), ("6.bias", 0, 1), ("8.weight", 1, -1)])
    )
    return (
        net,
        weights,
        Group(units, {site: value.shape for site, value in weights.items()}),
    )


def test_layers_before_batch_normalisation_are_pinned_reported_and_left_out():
    net, weights, group = normalised_network()
    found = minimal_mass(weights, group)
    # "1" feeds only the scale-free "3", so it has no best scale either; "4" and "6"
    # have.
    assert pinned_counts(found) == {"0": 4, "1": 4, "3": 5}
    counted = ("4.weight", "6.weight", "8.weight")
    assert float(found.mass) == pytest.approx(norm(found.weights, counted), rel=1e-12)
    x = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(
        functional_call(net, found.weights, x), functional_call(net, weights, x)
    )
    moved = minimal_mass(group.sample(dtype=torch.float64)(weights), group)
    assert float(moved.mass) == pytest.approx(float(found.mass), rel=1e-10)
    for site in counted:
        torch.testing.assert_close(
            moved.weights[site], found.weights[site], rtol=1e-8, atol=1e-8
        )


def test_the_text_says_what_the_mass_leaves_out():
    _, weights, group = normalised_network()
    text = str(minimal_mass(weights, group))
    assert "13 of 24 units have no best scale ('0': 4, '1': 4, '3': 5)" in text
    assert "no weights are left to count" not in text


@pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
def test_a_mass_of_zero_is_the_infimum_and_says_that_it_measures_nothing(batch):
    """Every layer is followed by a batch normalisation."""
    net = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2)
    ).eval()
    symmetry = find_symmetry(net, torch.randn(5, 3))
    weights = {
        site: value.detach().expand(*batch, *value.shape)
        for site, value in symmetry.weights_of(net).items()
    }
    sites = ["0.weight", "2.weight"]
    found = minimal_mass(weights, symmetry, sites=sites)
    assert not bool(found.mass.any())
    assert bool(torch.cat([p.flatten() for p in found.pinned.values()]).any())
    assert "doesn't measure this network" in str(found)
    assert repr(found).startswith("MinimalMass(0, from 0")
    shrinking = {
        name: torch.full(symmetry.group[name].shape, -20.0)
        for name in symmetry.group.names("scale")
        if any(axis.site in sites for axis in symmetry.group[name].axes)
        and not any(axis.site == "1.weight" for axis in symmetry.group[name].axes)
    }
    shrunk = symmetry.group.element(log_scales=shrinking)(weights)
    assert max(float(shrunk[site].abs().max()) for site in sites) < 1e-7


def test_without_scalings_the_mass_is_the_squared_norm(mlp):
    net = mlp([3, 4, 2], "tanh")
    weights = net.weights(5)
    found = minimal_mass(weights, net)
    expected = weights["0.weight"].square().sum((-1, -2)) + weights[
        "1.weight"
    ].square().sum((-1, -2))
    torch.testing.assert_close(found.mass, expected)
    assert found.log_scales == {} == found.pinned


def test_wildly_unbalanced_and_nearly_dead_units_are_solved_too(mlp):
    net = mlp([4, 6, 6, 6, 3])
    weights = net.weights(5)
    weights["1.weight"][:, 0] *= 1e-12
    weights["2.weight"][:, :, 1] *= 1e-20
    found = minimal_mass(weights, net)
    other = minimal_mass(
        net.scalings.sample((5,), spread=8.0, dtype=torch.float64)(weights), net
    )
    assert bool((found.imbalance <= 1e-12).all())
    assert bool((other.imbalance <= 1e-12).all())
    for site in weights:
        torch.testing.assert_close(
            other.weights[site], found.weights[site], rtol=1e-8, atol=0
        )


def test_a_weight_called_unbiased_is_a_weight():
    group = group_of(
        {"h": [("unbiased", 0, 1), ("out", 1, -1)]}, {"unbiased": (2, 3), "out": (1, 2)}
    )
    weights = {"unbiased": torch.full((2, 3), 2.0), "out": torch.ones(1, 2)}
    assert group.weight_sites == ("unbiased", "out")
    assert float(minimal_mass(weights, group).mass) == pytest.approx(2 * 2 * 12**0.5)


def test_parameters_that_require_gradients_take_no_graph_along():
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    symmetry = find_symmetry(net, torch.randn(4, 2))
    found = minimal_mass(dict(net.named_parameters()), symmetry)
    moved = [found.weights[site] for site in ("0.weight", "0.bias", "2.weight")]
    assert not any(
        value.requires_grad
        for value in (found.mass, found.imbalance, *found.log_scales.values(), *moved)
    )
    assert all(
        value.requires_grad
        for value in minimal_mass(net, symmetry).weights.parameters()
    )
