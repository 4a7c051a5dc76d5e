import itertools
import json

import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.compare.mmd import mmd
from pyro_symmetric.compare.orbit import orbit_mmd
from pyro_symmetric.groups.group import Group


def units(size=3, dimension=2):
    return Group.declare({"w": ("unit", None)}, {"w": torch.zeros(size, dimension)})


def enumerated(x, y, kernels):
    """Unbiased discrepancy under kernels averaged over all orders of the rows, by enumeration."""

    def averaged(a, b):
        orbit = torch.stack([b[list(order)] for order in itertools.permutations(range(len(b)))])
        difference = (a - orbit).flatten(1)
        gaussian = (-((difference.norm(dim=1)[:, None] / kernels[:10]) ** 2)).exp().mean(0)
        laplace = (-(difference.abs().sum(1)[:, None] / kernels[10:])).exp().mean(0)
        return torch.cat([gaussian, laplace])

    m, n = len(x), len(y)
    within_x = sum(averaged(a, b) for i, a in enumerate(x) for j, b in enumerate(x) if i != j) / (m * (m - 1))
    within_y = sum(averaged(a, b) for i, a in enumerate(y) for j, b in enumerate(y) if i != j) / (n * (n - 1))
    return within_x + within_y - 2 * sum(averaged(a, b) for a in x for b in y) / (m * n)


def values(result, name="squared", layer="w"):
    return torch.from_numpy(result.of(layer)[name])


@pytest.mark.stochastic
def test_estimate_agrees_with_enumeration_within_its_error():
    # 20 correlated kernels, normal by averaging 400 draws of elements: |z| < 5 has a false-alarm rate under 2e-5
    data = torch.Generator(torch.empty(0).device).manual_seed(
        0
    )  # samples between which the average makes a difference, with any seed
    p, q = (torch.randn(count, 3, 2, generator=data, dtype=torch.float64) for count in (7, 6))
    q += torch.tensor([[1.5], [0.0], [-1.5]])
    kernels = mmd({"w": p}, {"w": q})
    found = orbit_mmd({"w": p}, {"w": q}, units(), num_elements=400, bandwidths=kernels)
    z = (values(found) - enumerated(p, q, values(kernels, "bandwidth"))) / values(found, "element_error")
    assert float(z.abs().max()) < 5
    # and without the average the value is another one
    assert float((values(found) - values(kernels)).abs().max()) > 20 * float(values(found, "element_error").max())


@pytest.mark.stochastic
def test_error_of_elements_is_the_spread_over_repetitions():
    # sd of 60 repetitions against the mean of their own errors: relative error 1/sqrt(120) = 9 %; within 45 %: 5 sd
    p, q, group = torch.randn(6, 3, 2), torch.randn(6, 3, 2) + 1, units()
    kernels = mmd({"w": p}, {"w": q})
    runs = [orbit_mmd({"w": p}, {"w": q}, group, num_elements=6, bandwidths=kernels) for _ in range(60)]
    spread = torch.stack([values(run) for run in runs]).std(0)
    claimed = torch.stack([values(run, "element_error").square() for run in runs]).mean(0).sqrt()
    middling = slice(3, 8)  # the narrowest kernels see hardly any pair, their errors are no averages
    assert float((spread / claimed - 1)[middling].abs().max()) < 0.45


@pytest.mark.stochastic
def test_standard_error_covers_the_sampling_too():
    # the same over samples drawn anew, where p and q differ: the jackknife is consistent, on the large side
    group = units()
    draw = lambda: ({"w": torch.randn(25, 3, 2)}, {"w": 2 * torch.randn(25, 3, 2) + 1})  # noqa: E731
    kernels = mmd(*draw())
    runs = [orbit_mmd(*draw(), group, num_elements=3, bandwidths=kernels) for _ in range(60)]
    spread = torch.stack([values(run) for run in runs]).std(0)[4:8]
    claimed = torch.stack([values(run, "standard_error").square() for run in runs]).mean(0).sqrt()[4:8]
    assert float((claimed / spread - 1).abs().max()) < 0.5


@pytest.mark.stochastic
def test_posteriors_in_different_copies_are_one_modulo_symmetry():
    centres = torch.tensor([[4.0], [0.0], [-4.0]])
    p, q = {"w": torch.randn(60, 3, 2) + centres}, {"w": torch.randn(60, 3, 2) + centres.flip(0)}
    assert mmd(p, q)["mean"] > 0.2
    same = orbit_mmd(p, q, units())
    other = orbit_mmd(p, {"w": torch.randn(60, 3, 2) + 2 * centres}, units())
    # zero within 5 standard errors, and far from a posterior that differs
    assert bool((values(same).abs() < 5 * values(same, "standard_error") + 1e-3).all())
    assert other["maximum"] > 5 * max(same["maximum"], float(values(other, "element_error").max()))


@pytest.mark.stochastic
def test_signs_are_averaged_over():
    net = nn.Sequential(nn.Linear(2, 1), nn.Tanh(), nn.Linear(1, 1, bias=False))
    symmetry = ps.find_symmetry(net, torch.randn(3, 2))
    assert symmetry.group.names("flip")
    weights = {name: torch.randn(40, *value.shape) + 3 for name, value in net.named_parameters()}
    flipped = {name: -value for name, value in weights.items()}  # by the hidden unit's sign, all of them
    assert mmd(weights, flipped)["mean"] > 0.1
    assert abs(orbit_mmd(weights, flipped, symmetry)["mean"]) < 0.05


@pytest.mark.stochastic
def test_scalings_are_removed_first():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    symmetry = ps.find_symmetry(net, torch.randn(3, 2))
    weights = {name: torch.randn(30, *value.shape) for name, value in net.named_parameters()}
    scaled = symmetry.scalings.sample((30,))(weights)
    torch.manual_seed(1)
    found = orbit_mmd(weights, scaled, symmetry, num_elements=2)
    torch.manual_seed(1)  # the same elements
    expected = orbit_mmd(weights, weights, symmetry, num_elements=2)
    assert found["mean"] == pytest.approx(expected["mean"], abs=1e-6)


def test_a_layer_that_the_group_leaves_alone_is_compared_as_it_is():
    p, q = ({"w": torch.randn(9, 3, 2), "noise": torch.rand(9, 1) + shift} for shift in (0, 1))
    kernels = mmd(p, q)
    found = orbit_mmd(p, q, units(), num_elements=2, bandwidths=kernels)
    torch.testing.assert_close(values(found, layer="noise"), values(kernels, layer="noise"), atol=1e-6, rtol=0)


def test_result_is_readable_plain_and_checked():
    p, q = {"w": torch.randn(5, 3, 2)}, {"w": torch.randn(6, 3, 2)}
    result = orbit_mmd(p, q, units(), num_elements=2)
    assert "2 elements of each sample), 5 against 6 samples" in repr(result)
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert len(plain["parts"]["w"]["element_error"]) == 20
    with pytest.raises(ValueError, match="num_elements is 1; it must be at least 2"):
        orbit_mmd(p, q, units(), num_elements=1)
    with pytest.raises(ValueError, match="at least 3"):
        orbit_mmd({"w": torch.randn(2, 3, 2)}, q, units())
    with pytest.raises(TypeError, match="symmetry is 3"):
        orbit_mmd(p, q, 3)
