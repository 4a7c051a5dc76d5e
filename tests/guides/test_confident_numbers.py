"""No confident wrong number: point masses, Jacobians, threads, improper priors,
intervals that mean nothing.
"""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoContinuous, AutoLaplaceApproximation

import pyro_symmetric as ps
from pyro_symmetric.guides.evidence import Evidence, evidence

GROUP = ps.Group.declare({"locs": ("k",)}, {"locs": torch.Size([2])})
DATA = torch.tensor([-2.1, -1.4, 0.9, 1.8, 2.2])


def pair(data: torch.Tensor) -> None:
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 2.0).to_event(1))
    with pyro.plate("rows", len(data)):
        pyro.sample(
            "x",
            dist.MixtureSameFamily(
                dist.Categorical(torch.ones(2)), dist.Normal(locs, 1.0)
            ),
            obs=data,
        )


def by_quadrature() -> float:
    grid = torch.linspace(-9, 9, 721, dtype=torch.float64)
    log_prior = dist.Normal(0.0, 2.0).log_prob(grid)
    rows = dist.Normal(grid[:, None], 1.0).log_prob(DATA.double())
    joint = torch.logaddexp(rows[:, None], rows[None]).sum(-1) - len(DATA) * math.log(2)
    joint = joint + log_prior[:, None] + log_prior
    return float(joint.flatten().logsumexp(0) + 2 * (grid[1] - grid[0]).log())


def at_the_mode(kind: Any = AutoLaplaceApproximation) -> Any:
    guide = kind(pair, init_loc_fn=lambda site: torch.tensor([-1.6, 1.6]))
    svi = pyro.infer.SVI(pair, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    for _ in range(300):
        svi.step(DATA)
    return guide


@pytest.mark.stochastic
def test_a_point_mass_is_not_taken_for_a_density() -> None:
    """Its Laplace approximation is a density: within 5 errors of quadrature (1 in
    10^6).
    """
    point = at_the_mode()
    with pytest.raises(TypeError, match="point mass"):
        ps.AutoSymmetrized(pair, GROUP, base=AutoLaplaceApproximation).setup(DATA)
    with pytest.raises(
        TypeError, match=r"AutoLaplaceApproximation.*guide\.laplace_approximation"
    ):
        evidence(point, log_joint=ps.log_joint(pair, DATA), symmetry=GROUP)
    spread = point.laplace_approximation(DATA)
    for guide in (spread, ps.AutoSymmetrized(pair, GROUP, base=spread).setup(DATA)):
        found = evidence(
            guide, log_joint=ps.log_joint(pair, DATA), symmetry=GROUP, num_samples=2000
        )
        assert (
            abs(found.best.log_evidence - by_quadrature()) < 5 * found.best.error + 1e-4
        )
        assert 0 < found.best.error < 0.5


def test_a_guide_without_spread_in_a_direction_is_refused() -> None:
    """In float32 a deviation of 1e-9 beside a mean of 2 is none."""
    sketch = ps.AutoSymmetrized(pair, GROUP).setup(DATA)
    guide = ps.AutoGaussian(
        sketch,
        dist.Normal(torch.tensor([-2.0, 2.0]), torch.tensor([0.5, 1e-9])).to_event(1),
    )
    with pytest.raises(TypeError, match="point mass in 1 of 2"):
        evidence(guide, log_joint=ps.log_joint(pair, DATA), symmetry=GROUP)


def test_two_threads_draw_different_numbers() -> None:
    """The second asks for the evidence while the first checks the symmetry, which
    leaves PyTorch's generator alone.
    """
    guide, checking, drawn = (
        ps.AutoSymmetrized(pair, GROUP).setup(DATA),
        threading.Event(),
        [],
    )
    joint = ps.log_joint(pair, DATA)

    def worth(first: bool) -> None:
        seen: list[Any] = []
        drawn.append(seen)

        def recorded(w: Any) -> torch.Tensor:
            seen.extend(map(tuple, w["locs"].tolist()))
            if first and len(w["locs"]) < 64:
                checking.set()
                time.sleep(0.2)
            return joint(w)

        if not first:
            checking.wait(20)
        evidence(guide, log_joint=recorded, symmetry=GROUP, num_samples=256)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(worth, [True, False]))
    assert len(set(drawn[0])) >= 256
    assert not set(drawn[0]) & set(drawn[1])


@pytest.mark.stochastic
def test_draws_of_a_proper_posterior_have_an_evidence_though_a_prior_is_improper() -> (
    None
):
    """A flat prior of a location given n rows: the evidence is that of the rows'
    deviations from their mean.
    """

    def flat(data: torch.Tensor) -> None:
        loc = pyro.sample("loc", dist.ImproperUniform(dist.constraints.real, (), ()))
        pairs = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.factor("none", 0.0 * pairs.sum())
        with pyro.plate("rows", len(data)):
            pyro.sample("x", dist.Normal(loc, 1.0), obs=data)

    n, apart = len(DATA), (DATA - DATA.mean()).double().square().sum()
    truth = float(
        -0.5 * apart - 0.5 * (n - 1) * math.log(2 * math.pi) - 0.5 * math.log(n)
    )
    draws = {
        "loc": DATA.mean() + torch.randn(4, 500) / n**0.5,
        "w": torch.randn(4, 500, 2),
    }
    posterior = ps.Posterior(draws, kind="independent").attach(flat, DATA)
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    first, second = (
        posterior.select(draws=half) for half in (slice(0, 250), slice(250, None))
    )
    found = ps.evidence(ps.guides.fit_gaussian(first, group), DATA, posterior=second)
    assert abs(found.best.log_evidence - truth) < 5 * found.best.error + 1e-3


@pytest.mark.parametrize("bridged", [False, True])
def test_no_interval_is_printed_where_it_means_nothing(bridged: bool) -> None:
    """Guide and chains far from each other: errors beyond all bounds, and a Pareto-k
    that says so.
    """
    sketch = ps.AutoSymmetrized(pair, GROUP).setup(DATA)
    guide = ps.AutoGaussian(
        sketch,
        dist.Normal(torch.tensor([-40.0, 40.0]), torch.full((2,), 0.05)).to_event(1),
    )
    draws = {"locs": torch.tensor([-1.6, 1.6]) + 0.5 * torch.randn(4, 100, 2)}
    posterior = ps.Posterior(draws, kind="independent") if bridged else None
    found = evidence(
        guide,
        log_joint=ps.log_joint(pair, DATA),
        symmetry=GROUP,
        posterior=posterior,
        num_samples=400,
    )
    assert found.doubts
    assert "interval" not in repr(found)
    assert all(len(word) < 15 for word in repr(found).split())
    importance = next(
        line for line in repr(found).splitlines() if "importance sampling ≈" in line
    )
    assert "±" not in importance
    huge = Evidence(
        -1e36, 2e36, -1e36, 2e36, "ExactOrbit()", "exact", 0.7, found.importance, 3.0
    )
    assert "ELBO                = -1e+36 ± 2e+36\n" in repr(huge)


# Pyro's own objectives ----------------------------------------------------------------


def constrained() -> None:
    pyro.sample("scale", dist.LogNormal(torch.zeros(3), 0.5).to_event(1))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    pyro.sample("shares", dist.Dirichlet(torch.full((3,), 2.0)))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("two", 2):
        pyro.sample("inside", dist.HalfNormal(1.0))
    pyro.sample("y", dist.Normal(w.sum(), rate), obs=torch.tensor(0.3))


EXCHANGED = ("scale", "shares", "w")
CONSTRAINED = ps.Group.declare(
    {name: ("k",) for name in EXCHANGED}, {name: torch.Size([3]) for name in EXCHANGED}
)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ps.AutoSymmetrized(constrained, CONSTRAINED, estimator=ps.ExactOrbit()),
        lambda: ps.AutoUnitBlocks(constrained, CONSTRAINED),
        lambda: ps.AutoGaussian(
            ps.AutoUnitBlocks(constrained, CONSTRAINED).setup(),
            dist.Normal(torch.randn(11), 0.1).to_event(1),
        ),
    ],
)
@pytest.mark.parametrize("particles", [1, 4])
def test_the_mean_field_objective_counts_the_jacobians_of_constrained_sites(
    make: Any, particles: int
) -> None:
    """Of our guides all of it is estimated from draws: the same number as that of
    ``Trace_ELBO``, draw for draw.
    """
    guide, losses, gradients = make(), [], []
    guide.setup()
    for kind in (Trace_ELBO, TraceMeanField_ELBO):
        pyro.set_rng_seed(3)
        loss = kind(
            num_particles=particles, vectorize_particles=particles > 1
        ).differentiable_loss(constrained, guide)
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss, list(guide.parameters())))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_guide_that_is_the_prior_of_a_positive_site_is_worth_nothing_by_the_mean_field_objective() -> (
    None
):
    def prior() -> None:
        pyro.sample("w", dist.LogNormal(torch.tensor([0.3, -0.2]), 0.7).to_event(1))

    sketch = ps.AutoUnitBlocks(
        prior, ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    ).setup()
    guide = ps.AutoGaussian(
        sketch,
        dist.Normal(torch.tensor([0.3, -0.2]), torch.full((2,), 0.7)).to_event(1),
    )
    assert TraceMeanField_ELBO(num_particles=3).loss(prior, guide) == pytest.approx(
        0.0, abs=1e-5
    )


def test_a_guide_whose_law_has_no_rsample_is_refused_as_its_training_would_lack_the_score() -> (
    None
):
    class Modes(AutoContinuous):
        def get_posterior(self, *args, **kwargs):
            parts = dist.Normal(torch.randn(2, self.latent_dim), 1.0).to_event(1)
            return dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), parts)

    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    with pytest.raises(TypeError, match="draws without rsample"):
        ps.AutoSymmetrized(model, group, base=Modes).setup()
