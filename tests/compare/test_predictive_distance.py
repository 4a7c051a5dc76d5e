"""Total variation of predictions: against closed forms, quadrature and the definition."""

import math
import warnings

import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric import compare

NORMAL = torch.distributions.Normal(0.0, 1.0)


def total_variation(p, q):
    """Of each input."""
    return compare.total_variation(p, q).each


def test_of_two_classifiers_it_is_the_most_that_an_event_s_probabilities_differ_by():
    p, q = torch.rand(2, 7, 4, dtype=torch.float64).softmax(-1)
    events = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 4)
    torch.testing.assert_close(total_variation(p, q), ((p - q) @ events.T).abs().amax(-1))


def test_members_count_by_their_mean_whatever_their_number():
    p, q = torch.rand(5, 6, 3).softmax(-1), torch.rand(9, 6, 3).softmax(-1)
    expected = (p.double().mean(0) - q.double().mean(0)).abs().sum(-1) / 2
    torch.testing.assert_close(total_variation(p, q), expected)
    torch.testing.assert_close(total_variation(p, p[torch.randperm(5)]), torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("gap", [0.0, 0.01, 0.5, 1.0, 3.0, 20.0])
def test_of_gaussians_of_one_scale_it_is_the_closed_form(gap):
    """2 Φ(|gap| / 2) - 1, in units of the scale; from below."""
    means = torch.tensor([[-3.0], [100.0]], dtype=torch.float64)
    found = total_variation((means, 0.2), (means + torch.tensor([[0.2], [-0.2]], dtype=torch.float64) * gap, 0.2))
    exact = 2 * float(NORMAL.cdf(torch.tensor(gap / 2, dtype=torch.float64))) - 1
    assert float((exact - found).max()) < (1e-4 if gap < 5 else 0.002)
    assert float((exact - found).min()) > -1e-9


@pytest.mark.parametrize("scale", [0.05, 0.9, 1.1, 7.0])
def test_of_gaussians_of_one_mean_it_is_the_closed_form(scale):
    """The densities cross at ±x, x² = 2 s² ln s / (s² - 1)."""
    found = total_variation((torch.zeros(1, 1), 1.0), (torch.zeros(1, 1), scale))
    x = math.sqrt(2 * scale**2 * math.log(scale) / (scale**2 - 1))
    inside = [2 * float(NORMAL.cdf(torch.tensor(x / s, dtype=torch.float64))) - 1 for s in (1.0, scale)]
    assert float(found) == pytest.approx(abs(inside[0] - inside[1]), abs=2e-4)


def test_of_mixtures_it_is_what_quadrature_gives():
    m, n = 1.5 * torch.randn(30, 4, dtype=torch.float64), torch.randn(50, 4, dtype=torch.float64) + 0.5
    s, t = 0.2 + torch.rand(30, dtype=torch.float64), 0.2 + torch.rand(50, dtype=torch.float64)
    grid = torch.linspace(-20, 20, 20_001, dtype=torch.float64)

    def density(means, scale):
        law = torch.distributions.Normal(means[..., None], scale[:, None, None])
        return law.log_prob(grid).exp().mean(0)

    expected = torch.trapezoid((density(m, s) - density(n, t)).abs(), grid) / 2
    torch.testing.assert_close(total_variation((m[..., None], s), (n[..., None], t)), expected, atol=1e-3, rtol=0)
    assert float(total_variation((m[..., None], s), (m[torch.arange(29, -1, -1), :, None], s.flip(0))).max()) < 1e-12


def test_marginals_of_several_outputs_are_averaged():
    m, n = torch.randn(3, 5, 2), torch.randn(4, 5, 2)
    each = [total_variation((m[..., k : k + 1], 0.5), (n[..., k : k + 1], 0.7)) for k in range(2)]
    torch.testing.assert_close(total_variation((m, 0.5), (n, 0.7)), (each[0] + each[1]) / 2)


def test_many_members_with_little_noise_lie_as_far_apart_as_a_fine_grid_has_it() -> None:
    """To three thousandths, and from below; with a warning if bins as fine as they get still matter."""
    noise = 0.01
    p, q = torch.randn(2, 500, dtype=torch.float64)
    edges = torch.arange(-6, 6, noise / 8, dtype=torch.float64)
    below = [torch.special.ndtr((edges[:, None] - side) / noise).mean(1) for side in (p, q)]
    expected = float((below[0].diff() - below[1].diff()).abs().sum() / 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = ps.total_variation((p[:, None, None], noise), (q[:, None, None], noise)).value
    assert expected - 0.003 < found < expected + 1e-6


def test_members_in_a_regular_order_are_all_seen() -> None:
    """Modes at 0 and 10 against modes at 3 and 10, in alternation: half of the total variation of the first two."""
    p = torch.tensor([0.0, 10.0], dtype=torch.float64).repeat(64)
    q = torch.tensor([3.0, 10.0], dtype=torch.float64).repeat(64)
    expected = 0.5 * (2 * float(NORMAL.cdf(torch.tensor(1.5, dtype=torch.float64))) - 1)
    assert ps.total_variation((p[:, None, None], 1.0), (q[:, None, None], 1.0)).value == pytest.approx(
        expected, abs=1e-3
    )
