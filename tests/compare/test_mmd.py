import math
import sys

import numpy as np
import pytest
import torch

from pyro_symmetric.compare.mmd import bandwidth_grid, mmd

MODULE = sys.modules["pyro_symmetric.compare.mmd"]  # the package's name for it is that of the function


def naive_mmd(x, y, kernel):
    """The unbiased estimate, written as it is defined."""
    m, n = len(x), len(y)
    within_x = sum(kernel(x[i], x[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    within_y = sum(kernel(y[i], y[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    return within_x + within_y - 2 * sum(kernel(a, b) for a in x for b in y) / (m * n)


def naive_grid(distances):
    d = np.sort(distances)
    floor = 0.1 * np.quantile(d[d > 0], 0.5, method="lower")
    low = d[0] if d[0] >= floor else max(d[int(0.05 * len(d))], floor)
    return np.geomspace(low / 2, d[-1] * 2, 10)


def flat(weights, sites):
    return np.concatenate([weights[s].double().numpy().reshape(len(weights[s]), -1) for s in sites], axis=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("shift", "scale"), [(0.5, 1.0), (0.0, 0.02), (30.0, 0.001)])
def test_mmd_equals_a_naive_double_loop(dtype, shift, scale, monkeypatch):
    p = {"0.weight": scale * torch.randn(13, 3, 2), "0.bias": scale * torch.randn(13, 3)}
    q = {"0.weight": scale * torch.randn(9, 3, 2) + shift, "0.bias": scale * torch.randn(9, 3)}
    p, q = ({site: value.to(dtype) for site, value in w.items()} for w in (p, q))
    monkeypatch.setattr(MODULE, "_CACHE_ENTRIES", 1)
    monkeypatch.setattr(MODULE, "_LEAST_CHUNK", 4)
    layer = mmd(p, q).parts["0"]
    x, y = (flat(w, ["0.weight", "0.bias"]) for w in (p, q))
    grid_2 = naive_grid(np.array([np.linalg.norm(a - b) for a in x for b in y]))
    grid_1 = naive_grid(np.array([np.abs(a - b).sum() for a in x for b in y]))
    gaussian = [naive_mmd(x, y, lambda a, b, s=s: math.exp(-(((a - b) / s) ** 2).sum())) for s in grid_2]
    laplace = [naive_mmd(x, y, lambda a, b, s=s: math.exp(-np.abs(a - b).sum() / s)) for s in grid_1]
    np.testing.assert_allclose(layer["bandwidth"], [*grid_2, *grid_1], rtol=1e-5)
    both = gaussian + laplace
    np.testing.assert_allclose(layer["squared"], both, atol=1e-6)
    assert layer["median"] == pytest.approx(np.median(both), abs=1e-6)
    assert layer["mean"] == pytest.approx(np.mean(both), abs=1e-6)
    assert layer["maximum"] == pytest.approx(max(both), abs=1e-6)


def test_layers_count_by_their_number_of_weights():
    p = {"0.weight": torch.randn(20, 6, 2), "2.weight": torch.randn(20, 1, 3), "noise_scale": torch.rand(20)}
    q = {site: torch.randn_like(value) + 0.3 for site, value in p.items()}
    result = mmd(p, q)
    assert [own["num_weights"] for own in result.parts.values()] == [12, 3, 1]
    for statistic in ("median", "mean", "maximum"):
        parts = [result.parts[layer][statistic] for layer in ("0", "2", "noise_scale")]
        assert result[statistic] == pytest.approx(np.average(parts, weights=[12, 3, 1]))
    assert result.value == result["median"]


@pytest.mark.stochastic
def test_expectation_under_gaussians_is_the_closed_form():
    # E exp(-|x - y|^2 / s^2) for x - y ~ N(delta, v I) is (1 + 2v/s^2)^(-d/2) exp(-|delta|^2 / (s^2 + 2v)).
    # 40 independent repetitions, ten kernels: |z| < 5 under a t-law with 39 degrees of freedom; false alarm about 1e-4.
    d, shift, sd = 3, 0.4, 1.3

    def expected(s):
        def kernel_mean(delta2, v):
            return (1 + 2 * v / s**2) ** (-d / 2) * math.exp(-delta2 / (s**2 + 2 * v))

        return kernel_mean(0, 2) + kernel_mean(0, 2 * sd**2) - 2 * kernel_mean(d * shift**2, 1 + sd**2)

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
    # 300 repetitions, |z| < 5 for 20 correlated kernels: false alarm under 20 * 6e-7, skewness aside.
    def draw():
        return {"w": torch.randn(15, 4)}, {"w": torch.randn(12, 4)}

    kernels = mmd(*draw())
    values = torch.tensor(np.stack([mmd(*draw(), bandwidths=kernels).parts["w"]["squared"] for _ in range(300)]))
    z = values.mean(0) / (values.std(0) / len(values) ** 0.5)
    assert float(z.abs().max()) < 5
    assert bool((values < 0).any())  # an unbiased estimate of 0 must fall below it


@pytest.mark.parametrize(
    ("distances", "low", "high"),
    [
        ([0.2, 1.0, 4.0], 0.1, 8.0),  # half the smallest, twice the largest
        ([0.02, *[0.5] * 9, *[2.0] * 10], 0.25, 4.0),  # under a tenth of 2: order statistic of rank 0.05 * 20 = 1
        ([0.0, 0.01, 0.02], 0.0005, 0.04),  # a tenth of the median above 0, which is 0.01
        ([0.0, 0.0, 0.0, 0.01, 0.02, 0.03], 0.001, 0.06),  # more than half of them 0
        ([0.125, 1.25, 1.5], 0.0625, 3.0),  # a tenth itself is not under a tenth
        ([0.0, 0.0], 0.05, 2.0),  # samples that coincide
    ],
)
def test_bandwidths_follow_the_rule(distances, low, high):
    grid = bandwidth_grid(torch.tensor(distances))
    np.testing.assert_allclose(grid, np.geomspace(low, high, 10), rtol=1e-6)


@pytest.mark.parametrize("unit", [1e-3, 1e3])
def test_the_unit_of_the_weights_changes_nothing(unit):
    p, q = ({"w": torch.randn(20, 2, dtype=torch.float64)} for _ in range(2))
    q["w"] += 1
    scaled = ({"w": unit * side["w"]} for side in (p, q))
    np.testing.assert_allclose(
        mmd(*scaled).parts["w"]["squared"], mmd(p, q).parts["w"]["squared"], rtol=1e-9, atol=1e-12
    )
    assert mmd(p, q)["median"] > 0.05


@pytest.mark.cuda
def test_mmd_on_cuda_equals_mmd_on_cpu():
    p, q = {"w": torch.randn(40, 300)}, {"w": torch.randn(30, 300) + 0.1}
    there = mmd({"w": p["w"].cuda()}, {"w": q["w"].cuda()})
    here = mmd(p, q)
    np.testing.assert_allclose(there.parts["w"]["squared"], here.parts["w"]["squared"], atol=1e-6, rtol=0)
