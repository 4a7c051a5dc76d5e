"""Geweke's joint distribution test of Hamiltonian kernels; for calibration see ``mcmc/test_calibration``.

It needs chains that have data of their own. A model without data whose "data" are latent as well, with their
coordinates held where they are, is just that: its chains draw from the posterior given each chain's own data, through
the library's own potential and transforms.
"""

from __future__ import annotations

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import Tensor

from pyro_symmetric.mcmc import HMC, Density
from pyro_symmetric.mcmc.kernels.hmc import AdaptiveHMC
from pyro_symmetric.mcmc.kernels.kernel import Mass, State
from pyro_symmetric.mcmc.kernels.nuts import NUTS

GROUPS, ROWS = 3, 4


def hierarchy() -> None:
    """Scores of three groups; the spread of groups is positive, the shares of noise are a simplex."""
    spread = pyro.sample("spread", dist.Gamma(torch.tensor(2.0).double(), 2.0))
    shares = pyro.sample("shares", dist.Dirichlet(torch.full((2,), 3.0).double()))
    centre = pyro.sample("centre", dist.Normal(torch.tensor(0.0).double(), 1.0))
    offsets = pyro.sample("offsets", dist.Normal(torch.zeros(GROUPS).double(), 1.0).to_event(1))
    means = centre + spread * offsets
    scale = 0.5 + shares[..., :1]
    pyro.sample("scores", dist.Normal(means[..., None].expand(GROUPS, ROWS), scale).to_event(2))


PARAMETERS = ("spread", "shares", "centre", "offsets")


def draw_prior(count: int) -> dict[str, Tensor]:
    """Parameters and data, ancestrally and in one batch."""
    spread = dist.Gamma(torch.tensor(2.0).double(), 2.0).sample((count,))
    shares = dist.Dirichlet(torch.full((2,), 3.0).double()).sample((count,))
    centre, offsets = torch.randn(count).double(), torch.randn(count, GROUPS).double()
    weights = {"spread": spread, "shares": shares, "centre": centre, "offsets": offsets}
    return {**weights, "scores": draw_scores(weights)}


def draw_scores(weights: dict[str, Tensor]) -> Tensor:
    means = weights["centre"][:, None] + weights["spread"][:, None] * weights["offsets"]
    noise = torch.randn(*means.shape, ROWS).double()
    return means[..., None] + noise * (0.5 + weights["shares"][:, :1])[..., None]


def quantities(weights: dict[str, Tensor]) -> Tensor:
    """The quantities that are compared, ``batch + (K,)``: every parameter once, and a function of several."""
    first = weights["offsets"][..., 0]
    product = weights["spread"] * first * weights["shares"][..., 0]
    return torch.stack([weights["spread"], weights["shares"][..., 0], weights["centre"], first, product], -1)


def holding(density: Density, state: State) -> State:
    """The state with a mass matrix that holds the data."""
    ones = {site: torch.ones(shape) for site, shape in density.layout.unconstrained_shapes.items()}
    moving = torch.cat([(site in PARAMETERS) * value.flatten() for site, value in ones.items()]).double()
    return replace(state, tuning=replace(state.tuning, mass=Mass(moving, moving)))


OPTIONS = {"step_size": 0.2, "adapt_mass": False}
KERNELS = [
    HMC(hierarchy, **OPTIONS),
    NUTS(hierarchy, max_treedepth=6, **OPTIONS),
    AdaptiveHMC(hierarchy, **OPTIONS),
]


@pytest.mark.stochastic
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
def test_alternating_with_fresh_data_leaves_the_prior_as_it_is(kernel, generator):
    # Successive-conditional simulation (Geweke 2004): parameters move given the data, data are drawn given parameters.
    # Each of 1,000 independent chains starts in the joint distribution and must stay there, so plain two-sample
    # Kolmogorov-Smirnov tests apply: 5 quantities, false alarms 5e-4. About a quarter is rejected, so that the accept
    # step counts. (A density without its Jacobian gives p of 1e-50.)
    density = Density(hierarchy, dtype=torch.float64)
    weights = draw_prior(1000)
    state = holding(density, kernel.init(density, density.unconstrain(weights), 0, generator))
    rates = []
    for _ in range(3):
        state = kernel.step(density, state)
        rates.append(state.statistics["acceptance_rate"].mean().item())
        weights = density.layout.constrain(state.z)
        z = density.unconstrain({**weights, "scores": draw_scores(weights)})
        energy, gradient = density.energy_and_gradient(z)
        state = replace(state, z=z, energy=energy, gradient=gradient)
    assert 0.3 < sum(rates) / len(rates) < 0.9
    found, expected = quantities(weights), quantities(draw_prior(20_000))
    for k in range(found.shape[-1]):
        assert stats.ks_2samp(found[:, k].numpy(), expected[:, k].numpy()).pvalue > 1e-4, k
