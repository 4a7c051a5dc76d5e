"""Discrepancies and distances against their definitions, and the two-sample test."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from scipy.stats import wasserstein_distance

from pyro_symmetric.compare import common_frame, distances, marginal_wasserstein
from pyro_symmetric.compare.distances import bandwidth_grid, mmd, mmd_test
from pyro_symmetric.groups.group import Group


def naive_mmd(x, y, kernel):
    """The unbiased estimate, written as it is defined."""
    m, n = len(x), len(y)
    within_x = sum(kernel(x[i], x[j]) for i in range(m) for j in range(m) if i != j) / (
        m * (m - 1)
    )
    within_y = sum(kernel(y[i], y[j]) for i in range(n) for j in range(n) if i != j) / (
        n * (n - 1)
    )
    return within_x + within_y - 2 * sum(kernel(a, b) for a in x for b in y) / (m * n)


def naive_grid(distances):
    d = np.sort(distances)
    floor = 0.1 * np.quantile(d[d > 0], 0.5, method="lower")
    low = d[0] if d[0] >= floor else max(d[int(0.05 * len(d))], floor)
    return np.geomspace(low / 2, d[-1] * 2, 10)


def flat(weights, sites):
    return np.concatenate(
        [weights[s].double().numpy().reshape(len(weights[s]), -1) for s in sites],
        axis=1,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shift", "scale"), [(0.5, 1.0), (0.0, 0.02), (30.0, 0.001)])
def test_mmd_equals_a_naive_double_loop(dtype, shift, scale, monkeypatch):
    p = {
        "0.weight": scale * torch.randn(13, 3, 2),
        "0.bias": scale * torch.randn(13, 3),
    }
    q = {
        "0.weight": scale * torch.randn(9, 3, 2) + shift,
        "0.bias": scale * torch.randn(9, 3),
    }
    p, q = ({site: value.to(dtype) for site, value in w.items()} for w in (p, q))
    monkeypatch.setattr(distances, "_CACHE_ENTRIES", 1)
    monkeypatch.setattr(distances, "_LEAST_CHUNK", 4)
    layer = mmd(p, q).parts["0"]
    x, y = (flat(w, ["0.weight", "0.bias"]) for w in (p, q))
    grid_2 = naive_grid(np.array([np.linalg.norm(a - b) for a in x for b in y]))
    grid_1 = naive_grid(np.array([np.abs(a - b).sum() for a in x for b in y]))
    gaussian = [
        naive_mmd(x, y, lambda a, b, s=s: math.exp(-(((a - b) / s) ** 2).sum()))
        for s in grid_2
    ]
    laplace = [
        naive_mmd(x, y, lambda a, b, s=s: math.exp(-np.abs(a - b).sum() / s))
        for s in grid_1
    ]
    np.testing.assert_allclose(layer["bandwidth"], [*grid_2, *grid_1], rtol=1e-5)
    both = gaussian + laplace
    np.testing.assert_allclose(layer["squared"], both, atol=1e-6)
    assert layer["median"] == pytest.approx(np.median(both), abs=1e-6)
    assert layer["mean"] == pytest.approx(np.mean(both), abs=1e-6)
    assert layer["maximum"] == pytest.approx(max(both), abs=1e-6)


def test_layers_count_by_their_number_of_weights():
    p = {
        "0.weight": torch.randn(20, 6, 2),
        "2.weight": torch.randn(20, 1, 3),
        "noise_scale": torch.rand(20),
    }
    q = {site: torch.randn_like(value) + 0.3 for site, value in p.items()}
    result = mmd(p, q)
    assert [own["num_weights"] for own in result.parts.values()] == [12, 3, 1]
    for statistic in ("median", "mean", "maximum"):
        parts = [result.parts[layer][statistic] for layer in ("0", "2", "noise_scale")]
        assert result[statistic] == pytest.approx(np.average(parts, weights=[12, 3, 1]))
    assert result.value == result["median"]


def test_many_samples_are_said_to_take_long(monkeypatch):
    monkeypatch.setattr(distances, "MANY", 49)
    p, q = ({"w": torch.randn(n, 3)} for n in (20, 30))
    with pytest.warns(UserWarning, match="comparing 20 with 30 samples takes") as said:
        mmd(p, q)
    assert said[0].filename == __file__
    mmd(p, p)


@pytest.mark.stochastic
def test_expectation_under_gaussians_is_the_closed_form():
    # E exp(-|x - y|^2 / s^2) for x - y ~ N(delta, v I) is (1 + 2v/s^2)^(-d/2)
    # exp(-|delta|^2 / (s^2 + 2v)). 40 independent repetitions, ten kernels: |z| < 5
    # under a t-law with 39 degrees of freedom; false alarm about 1e-4.
    d, shift, sd = 3, 0.4, 1.3

    def expected(s):
        def kernel_mean(delta2, v):
            return (1 + 2 * v / s**2) ** (-d / 2) * math.exp(-delta2 / (s**2 + 2 * v))

        return (
            kernel_mean(0, 2)
            + kernel_mean(0, 2 * sd**2)
            - 2 * kernel_mean(d * shift**2, 1 + sd**2)
        )

    def draw():
        return {"w": torch.randn(120, d)}, {"w": shift + sd * torch.randn(100, d)}

    kernels, errors = mmd(*draw()), []
    for _ in range(40):
        layer = mmd(*draw(), bandwidths=kernels).parts["w"]
        truth = torch.tensor([expected(float(s)) for s in layer["bandwidth"][:10]])
        errors.append(torch.from_numpy(layer["squared"][:10]) - truth)
    errors = torch.stack(errors)
    standard = errors.std(0) / len(errors) ** 0.5
    assert float((errors.mean(0) / standard).abs().max()) < 5
    # and the test has power: the truth is some 16 standard errors from nothing
    assert float((truth / standard).max()) > 8


@pytest.mark.stochastic
def test_equal_distributions_give_zero_on_average_under_given_kernels():
    # 300 repetitions, |z| < 5 for 20 correlated kernels: false alarm under 20 * 6e-7,
    # skewness aside.
    def draw():
        return {"w": torch.randn(15, 4)}, {"w": torch.randn(12, 4)}

    kernels = mmd(*draw())
    values = torch.tensor(
        np.stack(
            [mmd(*draw(), bandwidths=kernels).parts["w"]["squared"] for _ in range(300)]
        )
    )
    z = values.mean(0) / (values.std(0) / len(values) ** 0.5)
    assert float(z.abs().max()) < 5
    assert bool((values < 0).any())  # an unbiased estimate of 0 must fall below it


@pytest.mark.parametrize(
    ("pairs", "low", "high"),
    [
        ([0.2, 1.0, 4.0], 0.1, 8.0),  # half the smallest, twice the largest
        # under a tenth of 2: order statistic of rank 0.05 * 20 = 1
        ([0.02, *[0.5] * 9, *[2.0] * 10], 0.25, 4.0),
        # a tenth of the median above 0, which is 0.01
        ([0.0, 0.01, 0.02], 0.0005, 0.04),
        ([0.0, 0.0, 0.0, 0.01, 0.02, 0.03], 0.001, 0.06),  # more than half of them 0
        ([0.125, 1.25, 1.5], 0.0625, 3.0),  # a tenth itself is not under a tenth
        ([0.0, 0.0], 0.05, 2.0),  # samples that coincide
    ],
)
def test_bandwidths_follow_the_rule(pairs, low, high):
    grid = bandwidth_grid(torch.tensor(pairs))
    np.testing.assert_allclose(grid, np.geomspace(low, high, 10), rtol=1e-6)


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_the_unit_of_the_weights_changes_nothing(unit):
    p, q = ({"w": torch.randn(20, 2, dtype=torch.float64)} for _ in range(2))
    q["w"] += 1
    scaled = ({"w": unit * side["w"]} for side in (p, q))
    np.testing.assert_allclose(
        mmd(*scaled).parts["w"]["squared"],
        mmd(p, q).parts["w"]["squared"],
        rtol=1e-9,
        atol=1e-12,
    )
    assert mmd(p, q)["median"] > 0.05


@pytest.mark.cuda
def test_mmd_on_cuda_equals_mmd_on_cpu():
    p, q = {"w": torch.randn(40, 300)}, {"w": torch.randn(30, 300) + 0.1}
    there = mmd({"w": p["w"].cuda()}, {"w": q["w"].cuda()})
    here = mmd(p, q)
    np.testing.assert_allclose(
        there.parts["w"]["squared"], here.parts["w"]["squared"], atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(("m", "n"), [(20, 20), (20, 30), (17, 5), (1, 4), (12, 18)])
def test_first_order_equals_scipy(m, n):
    p, q = {"0.w": torch.randn(m, 3, 2)}, {"0.w": 2 * torch.randn(n, 3, 2) + 1}
    found = marginal_wasserstein(p, q).each["0.w"].numpy()
    for i, j in np.ndindex(3, 2):
        expected = wasserstein_distance(
            p["0.w"][:, i, j].numpy(), q["0.w"][:, i, j].numpy()
        )
        assert float(found[i, j]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("order", [1, 2, 3.5])
def test_every_order_equals_the_transport_problem(order):
    x, y = (
        torch.randn(5, dtype=torch.float64),
        torch.randn(7, dtype=torch.float64) + 0.5,
    )
    cost = (x[:, None] - y).abs() ** order
    rows, columns = np.kron(np.eye(5), np.ones(7)), np.kron(np.ones(5), np.eye(7))
    solution = linprog(
        cost.reshape(-1).numpy(),
        A_eq=np.vstack([rows, columns]),
        b_eq=np.concatenate([np.full(5, 1 / 5), np.full(7, 1 / 7)]),
    )
    found = marginal_wasserstein({"w": x}, {"w": y}, order)["mean"]
    assert found == pytest.approx(solution.fun ** (1 / order), rel=1e-6)


def test_layers_are_summarised(monkeypatch):
    p = {
        "0.w": torch.randn(9, 4, 2),
        "0.b": torch.randn(9, 4),
        "1.w": torch.randn(9, 3),
    }
    q = {site: torch.randn_like(value) for site, value in p.items()}
    whole = marginal_wasserstein(p, q)
    monkeypatch.setattr("pyro_symmetric.compare.distances._SORTED_ENTRIES", 18 * 3)
    result = marginal_wasserstein(p, q)
    values = {site: result.each[site].numpy().reshape(-1) for site in p}
    first = np.concatenate([values["0.w"], values["0.b"]])
    layer = result.parts["0"]
    expected = {
        "num_weights": 12,
        "median": np.median(first),
        "mean": first.mean(),
        "maximum": first.max(),
    }
    assert layer == pytest.approx(expected)
    everything = np.concatenate([first, values["1.w"]])
    assert result.totals == pytest.approx(
        {
            "median": np.median(everything),
            "mean": everything.mean(),
            "maximum": everything.max(),
        }
    )
    assert result.value == result["mean"]
    assert result.each["0.w"].shape == (4, 2)
    assert result.parts == whole.parts


@pytest.mark.parametrize(
    ("p", "scale"), [(8, 1e-45), (20, 1e-17), (50, 1e-8), (50, 1e8), (400, 1.0)]
)
def test_high_orders_of_small_and_large_weights_keep_their_digits(
    p: float, scale: float
) -> None:
    """Two samples of one shape, apart by twice the scale: any order has that
    distance.
    """
    x = {"w": torch.linspace(0, 1, 50, dtype=torch.float64)[:, None] * scale}
    y = {"w": x["w"] + 2 * scale}
    assert marginal_wasserstein(x, y, p)["mean"] == pytest.approx(2 * scale)


def two_normals(m, n, shift=0.0, dimension=3):
    return {"0.w": torch.randn(m, dimension)}, {
        "0.w": torch.randn(n, dimension) + shift
    }


@pytest.mark.parametrize("seed", range(4))
def test_the_p_value_is_the_rank_of_the_largest_standardised_discrepancy(seed):
    """By its definition: each order's discrepancies, by ``mmd`` under the kernels of
    the pooled sample.
    """
    torch.manual_seed(100 + seed)
    p, q = two_normals(9, 6, 0.5)
    torch.manual_seed(1)
    found = mmd_test(p, q, num_permutations=19)
    torch.manual_seed(1)
    orders = torch.rand(20, 15, dtype=torch.float64).argsort(1)
    orders[0] = torch.arange(15)
    pooled = torch.cat([p["0.w"], q["0.w"]])
    table = []
    for order in orders:  # the first nine places are p's
        sides = (
            {"0.w": pooled[order.argsort()[places]]}
            for places in (slice(9), slice(9, None))
        )
        table.append(mmd(*sides, bandwidths=found).parts["0"]["squared"])
    table = np.stack(table)
    np.testing.assert_allclose(found.parts["0"]["squared"], table[0], atol=1e-6)
    scores = ((table - table.mean(0)) / table.std(0)).max(1)
    assert found.p_value == pytest.approx(float((scores >= scores[0] - 1e-9).mean()))


@pytest.mark.stochastic
def test_a_difference_in_dependence_alone_is_found():
    # equal marginals, correlation 0.95 against 0: with 100 samples each a p-value over
    # 0.05 is out of the question
    x = torch.randn(100, 1)
    p = {"w": torch.cat([x, 0.95 * x + (1 - 0.95**2) ** 0.5 * torch.randn(100, 1)], 1)}
    result = mmd_test(p, {"w": torch.randn(100, 2)}, num_permutations=199)
    assert result.rejected
    assert "different at level 0.05" in result.verdict


@pytest.mark.stochastic
def test_the_layer_that_differs_is_named_and_the_other_is_not():
    # the null layer's adjusted p-value is at most the level in 2 of 10,000 seeds
    p = {"0.w": torch.randn(60, 4), "2.w": torch.randn(60, 3)}
    q = {"0.w": torch.randn(60, 4), "2.w": torch.randn(60, 3) + 1}
    result = mmd_test(p, q, level=2e-4, num_permutations=9_999)
    assert result.parts["2"]["p_value"] == result.p_value <= 2e-4
    assert result.parts["0"]["p_value"] > 2e-4
    assert "1 of 2 layers, most clearly '2'" in result.verdict


@pytest.mark.stochastic
def test_a_frame_found_from_both_samples_keeps_the_level_however_unequal_they_are():
    # Overlapping units, 12 draws against 40: the frame follows the larger sample, but
    # never knows whose draw is whose. 30 repetitions at level 0.1: over 9 rejections
    # with probability 0.0005.
    group = Group.declare({"w": ("unit", None)}, {"w": torch.zeros(4, 2)})
    rejected = 0
    for _ in range(30):
        p, q = ({"w": torch.randn(count, 4, 2)} for count in (12, 40))
        rejected += mmd_test(
            *common_frame(p, q, group), level=0.1, num_permutations=39
        ).rejected
    assert rejected <= 9
