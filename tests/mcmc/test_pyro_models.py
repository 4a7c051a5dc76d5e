"""Users' models: deterministic sites, handlers, reparametrised sites, modules, Gaussian
processes, loops.
"""

import math
from collections.abc import Callable
from typing import ClassVar

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.mcmc.util import initialize_model
from pyro.infer.reparam import LocScaleReparam, NeuTraReparam, TransformReparam
from pyro.nn import PyroModule, PyroSample
from scipy import special
from torch import Tensor, nn

from pyro_symmetric.mcmc import HMC, Density, sample
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.predict import predict
from pyro_symmetric.weights import unflatten

X, Y = torch.linspace(-2, 2, 8).reshape(4, 2), torch.tensor([0.3, -1.2, 2.0, 0.8])
QUICK = {
    "num_samples": 6,
    "num_warmup": 4,
    "num_chains": 3,
    "seed": 0,
    "progress": False,
    "engine": "eager",
}


def schools(y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta, 1.0), obs=y)


def with_deterministic(y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    b = pyro.sample("b", dist.HalfNormal(1.0))
    pyro.deterministic("ratio", a / b)
    pyro.deterministic("line", a + b * torch.arange(3.0))
    pyro.deterministic("positive", a > 0)
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(a, b), obs=y)


def require_values(posterior: Posterior) -> None:
    a, b = posterior.samples["a"], posterior.samples["b"]
    torch.testing.assert_close(posterior.samples["ratio"], a / b)
    torch.testing.assert_close(
        posterior.samples["line"], a[..., None] + b[..., None] * torch.arange(3.0)
    )
    assert torch.equal(posterior.samples["positive"], (a > 0).float())


# deterministic sites ------------------------------------------------------------------


def test_deterministic_sites_are_computed_for_each_draw():
    posterior = sample(HMC(with_deterministic), Y, **{**QUICK, "thinning": 2})
    assert posterior.metadata["deterministic"] == ["ratio", "line", "positive"]
    assert posterior.site_shapes["line"] == (3,)
    require_values(posterior)
    hidden = sample(
        HMC(poutine.block(with_deterministic, hide=["line", "positive"])), Y, **QUICK
    )
    assert set(hidden.samples) == {"a", "b", "ratio"}


def test_deterministic_sites_lie_in_the_store_and_resume_with_it(tmp_path):
    whole = sample(HMC(with_deterministic), Y, **QUICK)
    sample(
        HMC(with_deterministic),
        Y,
        store=tmp_path / "run",
        **{**QUICK, "num_samples": 4},
    )
    resumed = sample(HMC(with_deterministic), Y, store=tmp_path / "run", **QUICK)
    loaded = Posterior.load(tmp_path / "run")
    for site, value in whole.samples.items():
        assert torch.equal(resumed.samples[site], value)
        assert torch.equal(loaded.samples[site], value)
    require_values(loaded)
    parts = sample(HMC(with_deterministic), Y, chains_per_task=2, **QUICK)
    require_values(parts)


def test_a_map_of_the_draws_leaves_deterministic_sites_of_the_old_ones_out():
    posterior = sample(HMC(with_deterministic), Y, **QUICK)
    moved = posterior.map(
        lambda weights: {site: 2 * value for site, value in weights.items()}
    )
    assert set(moved.samples) == {"a", "b"}
    torch.testing.assert_close(moved.samples["a"], 2 * posterior.samples["a"])
    anew = predict(moved, with_deterministic, Y, kind="samples", progress=False)
    torch.testing.assert_close(
        anew["ratio"], (moved.samples["a"] / moved.samples["b"]).flatten()
    )


# handlers -----------------------------------------------------------------------------


def test_reparametrised_sites_are_in_the_posterior_and_in_predictions():
    model = poutine.reparam(schools, {"theta": LocScaleReparam(0.0)})
    posterior = sample(HMC(model), Y, **QUICK)
    found = posterior.samples
    expected = (
        found["mu"][..., None] + found["tau"][..., None] * found["theta_decentered"]
    )
    torch.testing.assert_close(found["theta"], expected)
    predicted = predict(posterior, model, Y, kind="samples", progress=False)
    torch.testing.assert_close(predicted["theta"], expected.flatten(0, 1))


def trained_flow() -> NeuTraReparam:
    guide = AutoDiagonalNormal(schools, init_scale=0.3)
    guide(Y)
    return NeuTraReparam(guide.requires_grad_(False))


def lognormal(y: Tensor) -> None:
    a = pyro.sample("a", dist.LogNormal(0.0, 1.0))
    pyro.factor("penalty", -a.square())
    with (
        poutine.scale(scale=0.5),
        poutine.mask(mask=torch.tensor([True, False, True, True])),
        pyro.plate("data", 4),
    ):
        pyro.sample("y", dist.Normal(a, 1.0), obs=y)


def with_parameter(y: Tensor) -> None:
    scale = pyro.param("scale", torch.tensor(2.0), constraint=dist.constraints.positive)
    a = pyro.sample("a", dist.Normal(0.0, scale))
    pyro.sample("y", dist.Normal(a, 1.0).expand([4]).to_event(1), obs=y)


def partly_observed(y: Tensor) -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 4):
        pyro.sample(
            "y",
            dist.Normal(a, 1.0),
            obs=y,
            obs_mask=torch.tensor([True, False, True, True]),
        )


def improper(y: Tensor) -> None:
    a = pyro.sample("a", dist.ImproperUniform(dist.constraints.positive, (), ()))
    pyro.sample("y", dist.Normal(a, 1.0).expand([4]).to_event(1), obs=y)


def growth(y: Tensor) -> None:
    rate, state, states = (
        pyro.sample("rate", dist.LogNormal(0.0, 0.3)),
        torch.tensor(0.1),
        [],
    )
    for _ in range(4):
        state = state + 0.5 * rate * state * (1 - state)
        states.append(state)
    pyro.sample("y", dist.Normal(torch.stack(states), 1.0).to_event(1), obs=y)


class Regression(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.line = PyroModule[nn.Linear](2, 1)
        nn.init.zeros_(self.line.bias)
        self.line.weight = PyroSample(dist.Normal(torch.zeros(1, 2), 1.0).to_event(2))
        self.noise = PyroSample(dist.HalfNormal(torch.tensor(1.0)))

    def forward(self, y: Tensor) -> Tensor:
        mean = self.line(X).squeeze(-1)
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, self.noise), obs=y)
        return mean


def gaussian_process() -> Callable[[Tensor], None]:
    kernel = gp.kernels.RBF(2)
    kernel.variance = PyroSample(dist.LogNormal(torch.tensor(0.0), 1.0))
    kernel.lengthscale = PyroSample(dist.LogNormal(torch.tensor(0.0), 1.0))
    made = gp.models.GPRegression(X, Y, kernel, noise=torch.tensor(0.1))
    return lambda y: made.model()


HANDLED = {
    "LocScaleReparam": lambda: poutine.reparam(
        schools, {"theta": LocScaleReparam(0.3)}
    ),
    "TransformReparam": lambda: poutine.reparam(lognormal, {"a": TransformReparam()}),
    "NeuTra": lambda: trained_flow().reparam(schools),
    "condition": lambda: poutine.condition(schools, {"mu": torch.tensor(0.5)}),
    "scale, mask, factor": lambda: lognormal,
    "param": lambda: with_parameter,
    "obs_mask": lambda: partly_observed,
    "PyroModule": Regression,
    "Gaussian process": gaussian_process,
    "loop": lambda: growth,
}


@pytest.mark.parametrize("name", HANDLED)
def test_energies_and_gradients_are_those_of_pyros_potential(name):
    model = HANDLED[name]()
    density = Density(model, (Y,))
    assert density.target.one_by_one == ""
    z = 0.5 * torch.randn(
        2, density.dim, generator=torch.Generator(torch.empty(0).device).manual_seed(1)
    )
    energy, gradient = density.energy_and_gradient(z)
    _, potential, _, _ = initialize_model(model, (Y,))
    shapes = density.layout.unconstrained_shapes
    for chain in range(2):
        leaf = z[chain].clone().requires_grad_()
        expected = potential(unflatten(leaf, shapes))
        torch.testing.assert_close(energy[chain], expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            gradient[chain],
            torch.autograd.grad(expected, leaf)[0],
            rtol=1e-3,
            atol=1e-3,
        )


@pytest.mark.cpu
def test_an_improper_prior_counts_for_nothing_and_starts_in_the_box():
    density = Density(improper, (Y,))
    z = torch.tensor([[-0.5], [0.7]], requires_grad=True)
    expected = -(dist.Normal(z.exp(), 1.0).log_prob(Y).sum(-1) + z[:, 0])
    energy, gradient = density.energy_and_gradient(z.detach())
    torch.testing.assert_close(energy, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), z)[0])
    assert (
        density.draw_prior(
            50, torch.Generator(torch.empty(0).device).manual_seed(0)
        ).abs()
        <= 2
    ).all()


def test_deterministic_sites_of_a_mini_batch_are_not_recorded():
    def in_parts(y: Tensor) -> None:
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=2) as rows:
            pyro.sample("y", dist.Normal(a, 1.0), obs=y[rows])
        pyro.deterministic("error", y[rows] - a)

    density = Density(in_parts, (Y,), subsampled=True)
    assert set(density.draws(torch.zeros(3, 1))) == {"a"}


def test_angles_stay_on_their_circle():
    """Mean direction and length by Bessel functions, and by the trapezoidal rule over
    unconstrained values.
    """
    loc, concentration = torch.tensor(2.5), torch.tensor(1.5)
    density = Density(
        lambda: pyro.sample("a", dist.VonMises(loc, concentration)), dtype=torch.float64
    )
    z = torch.linspace(-30, 30, 20_001, dtype=torch.float64)[:, None]
    mass, angles = (-density.energy(z)).exp(), density.layout.constrain(z)["a"]
    assert bool((angles.abs() <= math.pi).all())
    length = special.iv(1, 1.5) / special.iv(0, 1.5)
    for values, expected in (
        (1.0, 1.0),
        (angles.cos(), length * math.cos(2.5)),
        (angles.sin(), length * math.sin(2.5)),
    ):
        assert float(torch.trapezoid(values * mass, z[:, 0])) == pytest.approx(
            expected, abs=1e-5
        )


class Recordings(dist.TorchDistribution):
    """Any number of values for each subject: what a list can hold and a tensor
    can't.
    """

    arg_constraints: ClassVar = {}

    def __init__(self, centre: Tensor) -> None:
        self.centre = centre
        super().__init__(validate_args=False)

    def log_prob(self, value: list[Tensor]) -> Tensor:
        return torch.stack(
            [dist.Normal(self.centre, 1.0).log_prob(own).sum() for own in value]
        ).sum()


def test_a_distribution_of_ones_own_scores_lists():
    def model(y: list[Tensor]) -> None:
        pyro.sample("y", Recordings(pyro.sample("mean", dist.Normal(0.0, 1.0))), obs=y)

    z = torch.tensor([[0.3], [-1.0]])
    expected = -dist.Normal(z, 1.0).log_prob(torch.cat([X[:, 0], Y])).sum(
        -1
    ) - dist.Normal(0.0, 1.0).log_prob(z[:, 0])
    torch.testing.assert_close(Density(model, ([X[:, 0], Y],)).energy(z), expected)
