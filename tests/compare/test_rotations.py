"""Summaries of units that rotate: how certain their common frame is, against quadrature
over O(2); varimax axes, against random rotations; invariants.
"""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.compare.rotations import invariants
from pyro_symmetric.distributions.rotations import angular_spread
from pyro_symmetric.posterior.statistics import chain_statistics


def factors(entries: int = 8, size: int = 3) -> ps.Group:
    return ps.Group.declare(
        {"W": (None, "f")}, {"W": torch.Size([entries, size])}, "rotate"
    )


def turned_chains(centre: Tensor, spread: float) -> ps.Posterior:
    """Four chains about a matrix, each turned as a whole."""
    draws = centre + spread * torch.randn(4, 250, *centre.shape, dtype=torch.float64)
    turns = factors(*centre.shape).sample((4, 1), dtype=torch.float64)
    return ps.Posterior(turns({"W": draws}), kind="chains")


def density_along_orbits(units: Tensor) -> tuple[Tensor, Tensor]:
    """Return densities of draws turned by evenly spaced angles, and reflected, under
    the Gaussians that fit all of them, ``(2, angles, draws)``, and the angles.
    """
    angles = torch.arange(720, dtype=torch.float64) * 2 * math.pi / 720
    cosine, sine = angles.cos(), angles.sin()
    turns = torch.stack([cosine, -sine, sine, cosine], -1).view(-1, 2, 2)
    reflection = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    matrices = torch.stack([turns, turns @ reflection])
    fitted = torch.distributions.Normal(units.mean(0), units.std(0))
    moved = matrices.unsqueeze(2) @ units
    logs = fitted.log_prob(moved).sum((-1, -2))
    return (logs - logs.amax((0, 1))).exp(), angles


@pytest.mark.parametrize("size", [0.15, 0.4, 2.0])
def test_spread_along_orbits_is_that_of_quadrature(size):
    """Two units, of which one is small, so that its sign is uncertain."""
    torch.manual_seed(0)
    scales = torch.tensor([[2.0], [size]], dtype=torch.float64)
    units = scales * torch.randn(2, 9).double() + 0.3 * torch.randn(200, 2, 9).double()
    found = angular_spread(units)
    density, angles = density_along_orbits(units)
    masses = density.sum(1)
    elsewhere = float((masses.amin(0) / masses.sum(0)).mean())
    assert found.elsewhere == pytest.approx(elsewhere, abs=0.03)
    best = density.gather(0, masses.argmax(0).expand(1, 720, -1))[0]
    share = best / best.sum(0)
    mean = torch.polar(share, angles.unsqueeze(-1).expand_as(share)).sum(0)
    variance = float((-2 * mean.abs().log()).mean())
    assert float(found.radians) == pytest.approx(variance**0.5, rel=0.1)


def test_determined_units_are_shown_in_their_frame():
    torch.manual_seed(1)
    centre = torch.randn(8, 3, dtype=torch.float64)
    posterior = turned_chains(centre, 0.12)
    assert chain_statistics(posterior.samples["W"]).r_hat.max() > 2
    shown = str(ps.summary(posterior, factors(), progress=False, seed=0))
    assert "intervals of 'f' are conditional on their common frame" in shown
    assert "W[7,2]" in shown
    frame = ps.align_many(posterior, factors(), progress=False, seed=0)
    assert chain_statistics(frame.posterior.samples["W"]).r_hat.max() < 1.03


def test_of_units_without_a_frame_only_invariants_are_shown():
    torch.manual_seed(2)
    noise = turned_chains(torch.zeros(8, 3, dtype=torch.float64), 0.3)
    noise = noise.thin(4)
    shown = str(ps.summary(noise, factors(), progress=False, seed=0))
    assert "'f' have no certain frame" in shown
    assert "W communalities[7]" in shown
    assert "W[0,0]" not in shown


def test_invariants_are_those_of_every_frame():
    torch.manual_seed(3)
    posterior = turned_chains(torch.randn(8, 3, dtype=torch.float64), 0.1)
    moved = posterior.map(factors().sample((4, 250), dtype=torch.float64))
    for samples in (posterior.samples, moved.samples):
        fixed = invariants(samples, factors(), "f")
        products = posterior.samples["W"] @ posterior.samples["W"].mT
        torch.testing.assert_close(fixed["W products"], products)
        diagonal = products.diagonal(dim1=-2, dim2=-1)
        torch.testing.assert_close(fixed["W communalities"], diagonal)


@pytest.mark.parametrize("gap", [1.0, 0.03])
def test_common_frames_do_not_depend_on_how_close_moments_are(gap):
    """Draws of deviation 0.05, whose own principal axes deviate by 0.1 to 0.5."""
    torch.manual_seed(5)
    columns = torch.linalg.qr(torch.randn(8, 3).double())[0]
    centre = 8**0.5 * columns * torch.tensor([1 + gap, 1.0, 0.5]).double()
    draws = centre + 0.05 * torch.randn(2, 100, 8, 3).double()
    turned = factors().sample((2, 100), dtype=torch.float64)({"W": draws})["W"]
    frames = [
        torch.cat([side["W"] for side in ps.common_frame(*sides, factors())])
        for sides in ([{"W": side} for side in pair] for pair in (draws, turned))
    ]
    torch.testing.assert_close(*frames)
    assert frames[0].std(0).square().mean().sqrt() < 0.06


def varimax_criterion(loadings: Tensor) -> Tensor:
    return loadings.square().var(-2, correction=0).sum(-1)


def test_varimax_turns_the_common_frame_to_simple_structure():
    torch.manual_seed(4)
    centre = torch.zeros(9, 3, dtype=torch.float64)
    for factor, loading in enumerate((1.4, 1.2, 1.0)):
        centre[3 * factor : 3 * factor + 3, factor] = loading
    posterior, group = turned_chains(centre, 0.05), factors(9)
    frame = ps.align_many(posterior, group, progress=False, seed=0, varimax="W")
    mean = frame.posterior.samples["W"].mean((0, 1))
    torch.testing.assert_close(mean, centre, atol=0.03, rtol=0)
    turns = group.sample((2000,), dtype=torch.float64).rotations["f"]
    assert (varimax_criterion(mean @ turns) < varimax_criterion(mean)).all()
    with pytest.raises(ValueError, match="varimax is 'z'"):
        ps.align_many(posterior, group, progress=False, varimax="z")


def factors_and_scores(data: Tensor) -> None:
    loadings = pyro.sample("W", dist.Normal(torch.zeros(8, 3), 1.0).to_event(2))
    scores = dist.Normal(torch.zeros(len(data), 3), 1.0).to_event(2)
    scores = pyro.sample("z", scores)
    pyro.sample("y", dist.Normal(scores @ loadings.mT, 1.0).to_event(2), obs=data)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the chains disagree")
def test_chains_of_a_factor_model_agree_modulo_rotations():
    """Dense loadings of eight columns on three factors: chains explore the rotations
    slowly.
    """
    torch.manual_seed(7)
    truth = 1.5 * torch.randn(8, 3)
    data = torch.randn(40, 3) @ truth.mT + torch.randn(40, 8)
    kernel = ps.HMC(factors_and_scores, num_steps=8)
    posterior = ps.sample(
        kernel, data, num_samples=100, num_warmup=200, num_chains=16, seed=1
    )
    shapes = {"W": torch.Size([8, 3]), "z": torch.Size([40, 3])}
    group = ps.Group.declare(dict.fromkeys(shapes, (None, "f")), shapes, "rotate")
    frame = ps.align_many(posterior, group, progress=False, seed=0)
    for site in shapes:
        assert chain_statistics(posterior.samples[site]).r_hat.max() > 2
        assert chain_statistics(frame.posterior.samples[site]).r_hat.max() < 1.06


def loadings_alone(data: Tensor) -> None:
    """Sum out the scores of a probabilistic principal component analysis."""
    loadings = pyro.sample("W", dist.Normal(torch.zeros(8, 3), 1.0).to_event(2))
    noise = pyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    covariance = loadings @ loadings.mT + noise.square() * torch.eye(8)
    with pyro.plate("rows", len(data)):
        fn = dist.MultivariateNormal(torch.zeros(8), covariance_matrix=covariance)
        pyro.sample("y", fn, obs=data)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the chains disagree")
def test_chains_of_well_determined_loadings_agree_modulo_rotations_to_a_hundredth():
    torch.manual_seed(0)
    truth = torch.randn(8, 3)
    data = torch.randn(1_000, 3) @ truth.mT + 0.5 * torch.randn(1_000, 8)
    kernel = ps.HMC(loadings_alone, num_steps=8)
    posterior = ps.sample(
        kernel, data, num_samples=1_200, num_warmup=500, num_chains=16, seed=0
    )
    statistics = ps.diagnose(posterior).statistics
    assert statistics["weights"]["W"].r_hat.max() > 2
    assert statistics["modulo symmetry"]["W"].r_hat.max() < 1.01


def loadings_turn(x: Tensor) -> None:
    with pyro.plate("factors", 2):
        w = pyro.sample("w", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    covariance = w.mT @ w + torch.eye(5)
    with pyro.plate("rows", len(x)):
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(5), covariance), obs=x)


def test_rotations_of_the_model_are_found_and_removed():
    """In the frame of principal axes, draws are the centre and noise: its deviation is
    known. Noise alone has no axes, and fewer than 100 draws tell nothing."""
    torch.manual_seed(5)
    centre = torch.tensor([[2.0, -1.0, 1.0, 0, 0], [0, 0, 0, 0.7, 1.0]])
    noisy = centre + 0.1 * torch.randn(4, 100, 2, 5)
    turn = ps.Group.declare({"w": ("f", None)}, {"w": centre}, "rotate").sample
    drawn = ps.Posterior({"w": noisy}, kind="chains").map(turn((4, 100)))
    posterior = drawn.attach(loadings_turn, torch.randn(20, 5))
    found = "modulo rotations of (w), found in the model"

    shown = ps.summary(posterior, progress=False)
    assert shown.lead[0].startswith(f"{found}: aligned")
    assert shown["std"].max() < 0.15
    means = torch.tensor(shown["mean"].to_numpy()).view(2, 5).abs()
    torch.testing.assert_close(means, centre.abs().double(), atol=0.1, rtol=0)
    assert found in ps.diagnose(posterior).remarks
    given = posterior.symmetry.with_rotations()
    assert "modulo rotations of (w)" in ps.diagnose(posterior, given).remarks
    lead = ps.summary(posterior, given, progress=False).lead[0]
    assert lead.startswith("modulo rotations of (w): aligned")
    assert found in repr(ps.align_many(posterior, progress=False))
    for frame in (
        ps.align_many(posterior, cost="gaussian", progress=False),
        ps.align_many([posterior, posterior], progress=False),
    ):  # deviations don't rotate
        assert frame.remark.startswith("modulo 2! labels of (w), 2^2 signs of (w)")

    noise = posterior.map(lambda sites: {"w": torch.randn_like(sites["w"])})
    assert "have no certain frame" in ps.summary(noise, progress=False).lead[-1]
    assert "uncertain are the principal axes of 'w'" in str(ps.diagnose(noise))
    few = posterior.select(draws=slice(20))
    assert few.num_chains * few.num_samples == 80
    lines = ps.summary(few, progress=False).lead
    assert lines[0].startswith("left as drawn: rotations of (w), as fewer than 100")
