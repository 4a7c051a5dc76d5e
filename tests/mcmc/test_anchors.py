"""Control variates: unbiased, with the noise that a quadratic's own formula predicts, and the exact gradient there."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_symmetric.mcmc import SGHMC, SGLD, Density, sample
from pyro_symmetric.mcmc.kernels.anchors import Anchor, batches_of_a_pass, estimated
from pyro_symmetric.mcmc.kernels.landscape import Landscape
from pyro_symmetric.mcmc.kernels.spread import Spread

N, D, BATCH = 50, 3, 8


def regression(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(D, dtype=x.dtype), 1.0).to_event(1))
    with pyro.plate("rows", N, subsample=y):
        pyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, D, dtype=torch.float64)
    return x, torch.bernoulli(torch.sigmoid(x @ torch.tensor([1.0, -1.0, 0.5]).double()))


def densities(batch: int = BATCH) -> tuple[Density, Density]:
    given = data()
    return Density(regression, given), Density(regression, given, batch_size=batch, subsampled=True)


@pytest.mark.parametrize("batch", [7, 8, 10, 49])
def test_an_anchor_knows_the_energy_and_gradient_of_all_data(batch):
    full, parts = densities(batch)
    z = torch.randn(4, D, dtype=torch.float64)
    anchor = Anchor.at(parts, z)
    energy, gradient = full.energy_and_gradient(z)
    assert torch.allclose(anchor.energy, energy, rtol=1e-10)
    assert torch.allclose(anchor.gradient, gradient, rtol=1e-10)
    assert batches_of_a_pass(parts) == (5 if batch == 10 else -(-N // batch) + 1)
    assert batches_of_a_pass(full) is None


def test_with_an_anchor_estimates_average_to_those_of_all_data():
    full, parts = densities(10)
    z = torch.randn(4, D, dtype=torch.float64)
    anchor = Anchor.at(parts, z + 0.1 * torch.randn_like(z))
    order = torch.randperm(N)
    found = [estimated(parts, z, {"rows": rows.expand(4, -1)}, anchor) for rows in order.split(10)]
    energy, gradient = full.energy_and_gradient(z)
    assert torch.allclose(torch.stack([e for e, _ in found]).mean(0), energy, rtol=1e-10)
    assert torch.allclose(torch.stack([g for _, g in found]).mean(0), gradient, rtol=1e-10)
    at_itself = Anchor.at(parts, z)
    for rows in order.split(10):  # without any noise there
        assert torch.allclose(estimated(parts, z, {"rows": rows.expand(4, -1)}, at_itself)[1], gradient, rtol=1e-10)


@pytest.mark.stochastic
def test_the_landscape_measures_the_noise_with_and_without_an_anchor(generator):
    _, parts = densities()
    near = 0.05 * torch.randn(400, D, dtype=torch.float64)
    anchor, found = Anchor.at(parts, torch.zeros_like(near)), Landscape.start(near, generator)
    for _ in range(10):
        found = found.update(parts, near, generator, anchor=anchor)
    rows = [{"rows": torch.tensor([[i]]).expand(400, 1)} for i in range(N)]
    bare = torch.stack([parts.energy_and_gradient(near, row)[1] for row in rows])
    change = bare - torch.stack([parts.energy_and_gradient(anchor.z, row)[1] for row in rows])
    # 4,000 squared differences: relative standard errors below 0.05; at five of them, false alarms below 1e-6 each.
    assert torch.allclose(found.bare_noise, bare.var(0, correction=0).mean(0) / BATCH, rtol=0.25)
    assert torch.allclose(found.noise, change.var(0, correction=0).mean(0) / BATCH, rtol=0.25)
    assert found.anchor_pays


@pytest.mark.stochastic
def test_slopes_tell_the_variance_of_chains_that_have_yet_to_spread(generator):
    variance = torch.tensor([0.01, 1.0, 25.0], dtype=torch.float64)
    z = torch.zeros(200, 3, dtype=torch.float64)
    spread = Spread.start(z)
    for _ in range(40):  # far fewer steps of Langevin dynamics than the wide coordinates need
        spread = spread.update(z, z / variance)
        z = z - 0.0025 * z / variance + (0.005**0.5) * torch.randn(z.shape, generator=generator, dtype=z.dtype)
    assert spread.variance(by_slope=False)[2] < 1.0
    by_slope = spread.variance(by_slope=True)
    assert by_slope[0].item() == pytest.approx(0.01, rel=1e-3)
    # The share of its spread that the widest has reached is below what is trusted.
    assert by_slope[2].item() == pytest.approx(10 * spread.variance(by_slope=False)[2].item(), rel=1e-3)
    assert torch.equal(spread.unless(torch.tensor(True), Spread.start(z)).squares, torch.zeros(3).double())


def hierarchy(x: Tensor, y: Tensor) -> None:
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("features", x.shape[1]):
        b = pyro.sample("b", dist.Normal(0.0, scale))
    with pyro.plate("data", 2000, subsample=y):
        pyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


@pytest.mark.slow
@pytest.mark.stochastic
@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_the_defaults_are_right_for_a_regression_with_a_scale_to_infer(kind):
    from pyro_symmetric.mcmc import NUTS

    x = torch.randn(2000, 8)
    y = torch.bernoulli(torch.sigmoid(x @ torch.linspace(-1, 1, 8)))
    truth = sample(NUTS(hierarchy), x, y, num_chains=8, num_samples=500, num_warmup=200, progress=False)
    found = sample(kind(hierarchy, batch_size=100), x, y, num_chains=8, progress=False)
    for site, value in truth.get_samples().items():
        own = found.get_samples()[site]
        # Over 1,500 effective draws of either: standard errors of at most 0.04 deviations, and 2 % of a deviation.
        assert ((own.mean(0) - value.mean(0)) / value.std(0)).abs().max() < 0.2
        assert (own.std(0) / value.std(0) - 1).abs().max() < 0.15
