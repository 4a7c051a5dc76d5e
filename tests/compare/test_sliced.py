import json
import math

import pytest
import torch
from scipy.stats import wasserstein_distance

from pyro_symmetric.compare.wasserstein import sliced_wasserstein
from pyro_symmetric.groups.group import Group


def test_one_weight_has_two_directions_and_gives_the_wasserstein_distance():
    x, y = torch.randn(30, 1), 2 * torch.randn(20, 1) + 1
    result = sliced_wasserstein({"w": x}, {"w": y}, 1, num_projections=3)
    assert result.value == pytest.approx(wasserstein_distance(x[:, 0].numpy(), y[:, 0].numpy()), rel=1e-6)


@pytest.mark.stochastic
@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_shift_has_its_closed_form(p, monkeypatch):
    # W_p(theta x, theta (x + d))^p = |theta d|^p; E |theta_1|^p on the sphere is
    # Gamma(D/2) Gamma((p+1)/2) / (Gamma((D+p)/2) sqrt(pi)). |z| < 5: false alarm under 1e-6.
    x = {"0.w": torch.randn(20, 2, 3, dtype=torch.float64), "1.w": torch.randn(20, 2, dtype=torch.float64)}
    shift = {"0.w": torch.full((2, 3), 0.5), "1.w": torch.tensor([1.0, -2.0])}
    monkeypatch.setattr("pyro_symmetric.compare.wasserstein._CHUNK", 4)
    result = sliced_wasserstein(x, {s: v + shift[s] for s, v in x.items()}, p, num_projections=4000)

    def expected(d, length):
        log = math.lgamma(d / 2) + math.lgamma((p + 1) / 2) - math.lgamma((d + p) / 2) - math.lgamma(0.5)
        return length * math.exp(log / p)

    assert [result.of(layer)["num_weights"] for layer in ("0", "1")] == [6, 2]
    for found, d, squared in ((result.totals, 8, 6.5), (result.of("0"), 6, 1.5), (result.of("1"), 2, 5)):
        assert abs(found["distance"] - expected(d, squared**0.5)) < 5 * found["standard_error"]
        assert found["standard_error"] < 0.05 * found["distance"]


def test_equal_samples_are_at_distance_zero_and_dependence_is_seen():
    x = torch.randn(200, 1)
    p, q = {"w": torch.cat([x, x], 1)}, {"w": torch.cat([x, -x], 1)}  # marginals alike, dependence opposite
    assert sliced_wasserstein(p, p).value == 0
    assert sliced_wasserstein(p, q).value > 0.3


def test_symmetry_can_be_removed_first():
    group = Group.declare({"w": ("unit", None)}, {"w": torch.zeros(4, 2)})
    p = {"w": torch.randn(30, 4, 2)}
    q = group.sample((30,))(p)
    assert sliced_wasserstein(p, q).value > 0.05
    assert sliced_wasserstein(p, q, symmetry=group).value < 1e-6


def test_result_is_readable_and_plain():
    result = sliced_wasserstein({"0.w": torch.randn(5, 3)}, {"0.w": torch.randn(6, 3)}, num_projections=7)
    assert "(7 directions), 5 against 6 samples" in repr(result)
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["parts"]["0"]["num_weights"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [({"p": 0.5}, "p is 0.5"), ({"p": math.inf}, "finite"), ({"num_projections": 0}, "num_projections is 0")],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        sliced_wasserstein({"w": torch.randn(5, 3)}, {"w": torch.randn(5, 3)}, **options)
