"""Chains in modes that hold next to nothing, against mixtures of Gaussians whose shares are known."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import pyro_symmetric as ps
from pyro_symmetric.mcmc.kernels.outweighed import LEAST_GAP, MOST_DRAWS, Passed, below_the_first_gap

CHAINS, DRAWS = 24, 40


def passed(generator: torch.Generator, log_shares: tuple[float, float], factors: tuple[Tensor, Tensor]) -> Passed:
    """Independent draws of two Gaussian modes, with the exact energy of each: a third of the chains is in the first."""
    found = Passed()
    for _ in range(DRAWS):
        z, energy = [], []
        for chain in range(CHAINS):
            mode = int(chain >= CHAINS // 3)
            noise = torch.randn(len(factors[0]), generator=generator, dtype=torch.float64)
            z.append(100.0 * mode + factors[mode] @ noise)
            energy.append(0.5 * noise @ noise + factors[mode].logdet() - log_shares[mode])
        found = found.update(torch.stack(z), torch.stack(energy))
    return found


def factor(width: float, correlation: float = 0.0, dim: int = 6) -> Tensor:
    covariance = torch.full((dim, dim), correlation, dtype=torch.float64).fill_diagonal_(1.0)
    return width * torch.linalg.cholesky(covariance)


# In each case the modes' energies differ by far more than the least gap.
@pytest.mark.parametrize(
    ("log_shares", "factors", "expected"),
    [
        ((-60.0, 0.0), (factor(1.0), factor(1.0)), "first"),
        ((0.0, -60.0), (factor(1.0), factor(1.0)), "second"),
        ((0.0, 0.0), (factor(1e-3), factor(1.0)), "none"),  # 41 nats lower, and not a bit more
        ((0.0, 0.0), (factor(1.0), factor(1e3)), "none"),
        ((-30.0, 0.0), (factor(1e-6), factor(1.0)), "none"),  # 53 nats lower, and it is this one that holds nothing
        ((0.0, -60.0), (factor(1e-3), factor(1.0)), "second"),
        ((0.0, -60.0), (factor(1.0), factor(1e-2)), "second"),  # narrow, and above all the same
        ((0.0, -15.0), (factor(1e-3), factor(1.0)), "none"),  # a share of 3e-7
        ((0.0, 0.0), (factor(1.0, 0.999), factor(10.0)), "none"),  # by the determinant, not by the deviations
        ((0.0, -80.0), (factor(1.0, 0.999), factor(1.0)), "second"),
    ],
)
def test_a_chain_is_outweighed_by_what_its_mode_holds_and_not_by_its_energy(
    log_shares: tuple[float, float], factors: tuple[Tensor, Tensor], expected: str, generator: torch.Generator
) -> None:
    lost, lowest = passed(generator, log_shares, factors).outweighed()
    first = torch.arange(CHAINS) < CHAINS // 3
    assert lost.equal({"first": first, "second": ~first, "none": torch.zeros(CHAINS, dtype=torch.bool)}[expected])
    assert not (lost & lowest).any()


def test_chains_of_one_law_stay_whatever_its_tails(generator: torch.Generator) -> None:
    """A hundred sets of draws with variances without bound: chains of a Student-t law and of a funnel."""
    for repetition in range(100):
        found, funnel = Passed(), repetition % 2
        scale = torch.empty(8, 1, dtype=torch.float64).exponential_(generator=generator).rsqrt()
        for _ in range(24):  # each chain at a scale of its own, as chains of short memory are
            z = scale * torch.randn(8, 6, generator=generator, dtype=torch.float64)
            rest = 0.5 * (z / scale).square().sum(1) + 6 * scale[:, 0].log()
            energy = rest if funnel else 4.5 * (1 + z.square().sum(1) / 3).log()
            found = found.update(z, energy)
        assert not found.outweighed()[0].any()


def test_what_cannot_be_told_leaves_chains_where_they_are() -> None:
    nothing = Passed()
    for step in range(10):
        z = torch.randn(4, 6, dtype=torch.float64)
        nothing = nothing.update(z, torch.tensor([0.0, 100.0, 100.0, 100.0], dtype=torch.float64) + 0.1 * step)
    assert not nothing.outweighed()[0].any()  # five draws of one chain have no covariance of six coordinates
    still = Passed()
    for step in range(60):
        still = still.update(torch.zeros(4, 2), torch.tensor([0.0, 0.0, 0.0, 90.0 + step]))
    assert not still.outweighed()[0].any()


def test_of_a_long_window_draws_are_thinned_and_the_second_half_counts() -> None:
    found = Passed.start(torch.zeros(3, 2))
    assert found is not None
    for step in range(1000):
        found = found.update(torch.full((3, 2), float(step)), torch.full((3,), float(step)))
        assert len(found.z) == len(found.energy) <= MOST_DRAWS
    places = torch.stack(found.z)[:, 0, 0]
    assert places.equal(torch.arange(0, 1000, found.stride).float())
    assert Passed.start(torch.zeros(1, 2)) is None
    assert Passed.start(torch.zeros(4, 500)) is None


def test_the_first_gap_is_counted_from_below() -> None:
    values = torch.tensor([5.0, 100.0, 8.0, math.nan, 60.0])
    assert below_the_first_gap(values, LEAST_GAP).tolist() == [True, False, True, False, False]
    assert below_the_first_gap(values[:1], LEAST_GAP).all()


def two_modes(log_share: float) -> object:
    def model() -> None:
        x = pyro.sample("x", dist.Normal(torch.zeros(6), 100.0).to_event(1))
        prior = dist.Normal(torch.zeros(6), 100.0).log_prob(x).sum(-1)
        modes = [dist.Normal(torch.full((6,), at), 1.0).log_prob(x).sum(-1) for at in (-6.0, 6.0)]
        pyro.factor("modes", torch.logaddexp(modes[0], modes[1] + log_share) - prior)

    return model


@pytest.mark.parametrize("kind", [ps.AdaptiveHMC, ps.MCLMC])
def test_warm_up_leaves_a_mode_that_holds_nothing_and_no_other(kind: type[ps.Kernel]) -> None:
    starts = {"x": torch.cat([torch.full((6, 6), -6.0), torch.full((6, 6), 6.0)])}
    for log_share, expected in ((-60.0, 0.0), (-10.0, 0.5)):
        kernel = kind(two_modes(log_share), mass="dense")  # type: ignore[call-arg]
        posterior = ps.sample(kernel, num_samples=50, num_warmup=150, num_chains=12, initial=starts, progress=False)
        right = (posterior.samples["x"][..., 0] > 0).float().mean().item()
        assert right == expected
        assert posterior.metadata.get("relocated_chains", []) == ([*range(6, 12)] if expected == 0.0 else [])
