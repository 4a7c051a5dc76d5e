"""Mixtures of Gaussians, and what symmetrising them does, against closed forms, quadrature and enumeration."""

import math
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_symmetric.distributions import ExactOrbit, InfoNCE, Modes, SinkhornImportance, Symmetrized
from pyro_symmetric.distributions.modes import score_parts
from pyro_symmetric.groups import Action, Group

GROUP = Group.declare(
    {"weight": ("hidden", None), "out": (None, "hidden")},
    {"weight": torch.Size([4, 2]), "out": torch.Size([1, 4])},
)
FLAT = Action(GROUP, ["weight", "out"])
LOGITS = torch.tensor([0.7, -0.4, 0.1], dtype=torch.float64)


def components(dim: int, spread: float = 1.0, count: int = 3) -> list[Any]:
    torch.manual_seed(1)
    return [
        dist.Normal(
            spread * torch.randn(dim, dtype=torch.float64), 0.3 + torch.rand(dim, dtype=torch.float64)
        ).to_event(1)
        for _ in range(count)
    ]


def families(dim: int) -> list[Any]:
    torch.manual_seed(2)
    loc = torch.randn(3, dim, dtype=torch.float64)
    factor = torch.randn(dim, 2, dtype=torch.float64)
    return [
        dist.Normal(loc[0], 0.5 * torch.ones(dim, dtype=torch.float64)).to_event(1),
        dist.LowRankMultivariateNormal(loc[1], factor, torch.full((dim,), 0.2, dtype=torch.float64)),
        dist.MultivariateNormal(
            loc[2], scale_tril=torch.eye(dim, dtype=torch.float64) + 0.1 * (factor @ factor.mT).tril()
        ),
    ]


def test_the_density_is_that_of_torch_s_mixture() -> None:
    parts = components(5)
    stacked = dist.Normal(
        torch.stack([p.base_dist.loc for p in parts]), torch.stack([p.base_dist.scale for p in parts])
    ).to_event(1)
    torch_s = torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=LOGITS), stacked)
    mixture, points = Modes(parts, LOGITS), torch.randn(7, 2, 5, dtype=torch.float64)
    torch.testing.assert_close(mixture.log_prob(points), torch_s.log_prob(points))
    torch.testing.assert_close(mixture.mean, torch_s.mean)
    torch.testing.assert_close(mixture.variance, torch_s.variance)


def test_components_of_different_families_mix() -> None:
    parts, points = families(4), torch.randn(6, 4, dtype=torch.float64)
    expected = torch.logsumexp(torch.stack([p.log_prob(points) for p in parts], -1) + LOGITS.log_softmax(-1), -1)
    torch.testing.assert_close(Modes(parts, LOGITS).log_prob(points), expected)


@pytest.mark.stochastic
def test_draws_have_the_mixture_s_moments_and_shares() -> None:
    """100,000 draws: 5 standard errors of each of 10 moments, false alarms below 1e-5."""
    mixture = Modes(components(5, spread=3.0), LOGITS)
    draws = mixture.sample((100_000,))
    error = (mixture.variance / len(draws)).sqrt()
    assert bool(((draws.mean(0) - mixture.mean).abs() < 5 * error).all())
    torch.testing.assert_close(draws.var(0), mixture.variance, rtol=0.05, atol=0)


@pytest.mark.stochastic
def test_draws_made_at_once_are_spread_systematically_and_each_is_fair() -> None:
    mixture = Modes([dist.Normal(torch.full((1,), 100.0 * k), torch.ones(1)).to_event(1) for k in range(3)], LOGITS)
    shares = LOGITS.softmax(-1)
    counts = torch.stack(
        [torch.bincount((mixture.sample((10,)).squeeze(-1) / 100).round().long(), minlength=3) for _ in range(200)]
    )
    assert bool(((counts - 10 * shares).abs() < 1 + 1e-6).all())
    # The first of ten draws, by itself: 2000 times, 5 standard errors in three shares.
    first = torch.stack([(mixture.sample((10,))[0, 0] / 100).round().long() for _ in range(2000)])
    found = torch.bincount(first, minlength=3) / 2000
    assert bool(((found - shares).abs() < 5 * (shares * (1 - shares) / 2000).sqrt()).all())


def test_strata_come_in_turn_whatever_their_weights() -> None:
    parts = [dist.Normal(torch.full((1,), 100.0 * k), torch.ones(1)).to_event(1) for k in range(3)]
    draws = Modes(parts, torch.tensor([5.0, -5.0, -5.0]), stratum=1).expand((2, 3)).sample()
    assert (draws.squeeze(-1) / 100).round().tolist() == [[1, 2, 0], [1, 2, 0]]


@pytest.mark.stochastic
def test_the_score_of_the_weights_leaves_values_as_they_are_and_gives_their_gradient() -> None:
    """d/dlogits of E_q f for f(w) = -w²/2 - log q(w), by quadrature in one dimension; 400,000 draws, 5 standard errors
    of each of three numbers."""
    logits = LOGITS.clone().requires_grad_()
    loc, scale = torch.tensor([-2.0, 0.0, 2.5], dtype=torch.float64), torch.tensor([0.5, 1.0, 0.7], dtype=torch.float64)

    def mixture(weights: Tensor) -> Modes:
        return Modes([dist.Normal(m[None], s[None]).to_event(1) for m, s in zip(loc, scale, strict=True)], weights)

    grid = torch.linspace(-12, 12, 20_001, dtype=torch.float64)
    log_q = mixture(logits).log_prob(grid[:, None])
    integrand = log_q.exp() * (-(grid**2) / 2 - log_q)
    (exact,) = torch.autograd.grad(torch.trapezoid(integrand, grid), logits)

    draws = mixture(logits.detach()).sample((400_000,))
    base = mixture(logits)
    parts = score_parts(base, base.log_prob(draws), draws)
    torch.testing.assert_close(parts.entropy_term, parts.log_prob)
    target = (-(draws.squeeze(-1) ** 2) / 2).detach()
    surrogate = target * parts.score_function - parts.entropy_term
    responsibilities = base.responsibilities(draws).detach()
    score = responsibilities - logits.detach().softmax(-1)
    each = (target - parts.log_prob.detach()).unsqueeze(-1) * score - score
    (found,) = torch.autograd.grad(surrogate.mean(), logits)
    torch.testing.assert_close(found, each.mean(0))
    assert bool(((found - exact).abs() < 5 * each.std(0) / math.sqrt(len(draws))).all())


def test_the_exact_sum_over_the_orbit_of_a_mixture_is_enumeration() -> None:
    base = Modes(components(FLAT.dim), LOGITS)
    draws = base.sample((5,))
    everywhere = GROUP.enumerate().select((slice(None), None))
    by_hand = torch.logsumexp(base.log_prob(FLAT(draws, everywhere)), 0) - GROUP.log_order()
    torch.testing.assert_close(ExactOrbit().log_prob(base, FLAT, draws), by_hand)


@pytest.mark.stochastic
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("estimator", [SinkhornImportance(1), SinkhornImportance(4), InfoNCE(3)])
def test_bounds_of_a_symmetrised_mixture_are_bounds(estimator: Any, spread: float) -> None:
    """4000 draws; the mean may fall short of the exact one by 5 standard errors. False alarms below 1e-6 a case."""
    base = Modes(components(FLAT.dim, spread), LOGITS)
    draws = base.sample((4000,))
    exact = ExactOrbit().log_prob(base, FLAT, draws)
    excess = estimator.log_prob(base, FLAT, draws) - exact
    assert float(excess.mean()) > -5 * float(excess.std()) / math.sqrt(len(excess)) - 1e-9


@pytest.mark.stochastic
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_matching_each_component_finds_nearly_all_of_the_sum(spread: float) -> None:
    base = Modes(components(FLAT.dim, spread), LOGITS)
    draws = base.sample((4000,))
    exact = ExactOrbit().log_prob(base, FLAT, draws)
    gap = {k: float((SinkhornImportance(k).log_prob(base, FLAT, draws) - exact).mean()) for k in (1, 16)}
    assert gap[16] < 0.05
    assert gap[16] < gap[1] + 0.02


@pytest.mark.stochastic
def test_copies_of_one_component_are_one_component() -> None:
    """Components that are copies of each other: the symmetrised mixture is the symmetrised component."""
    (one,) = components(FLAT.dim, 3.0, count=1)
    p = GROUP.sample()
    other = dist.Normal(FLAT(one.base_dist.loc, p), FLAT(one.base_dist.scale, p)).to_event(1)
    base = Modes([one, other], torch.tensor([0.3, -0.2], dtype=torch.float64))
    draws = base.sample((20,))
    expected = ExactOrbit().log_prob(one, FLAT, draws)
    torch.testing.assert_close(ExactOrbit().log_prob(base, FLAT, draws), expected)
    found = SinkhornImportance(16).log_prob(base, FLAT, draws)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)


def test_sticking_the_landing_detaches_components_and_weights() -> None:
    loc = torch.zeros(FLAT.dim, requires_grad=True)
    logits = torch.zeros(2, requires_grad=True)
    parts = [dist.Normal(loc + k, torch.ones(FLAT.dim)).to_event(1) for k in range(2)]
    symmetrised = Symmetrized(Modes(parts, logits), FLAT, ExactOrbit(), sticking_the_landing=True)
    assert not symmetrised.log_prob(torch.zeros(3, FLAT.dim)).requires_grad


def test_shapes_that_make_no_mixture_are_named() -> None:
    with pytest.raises(ValueError, match="at least one component"):
        Modes([], torch.zeros(0))
    with pytest.raises(ValueError, match="one logit for each"):
        Modes(components(3), torch.zeros(2))
    with pytest.raises(ValueError, match=r"all must be \(\(\), \(D,\)\)"):
        Modes([*components(3)[:2], *components(4)[:1]], torch.zeros(3))
    with pytest.raises(NotImplementedError):
        Modes(components(3), LOGITS).entropy()


def test_expanded_mixtures_draw_and_score_under_plates() -> None:
    mixture = Modes(components(3), LOGITS).expand((4, 1))
    draws = mixture.rsample((2,))
    assert draws.shape == (2, 4, 1, 3)
    assert mixture.log_prob(draws).shape == (2, 4, 1)
    assert mixture.mean.shape == (4, 1, 3)
    assert "Modes(Independent x 3" in repr(mixture)
