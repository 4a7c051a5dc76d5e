"""Programs: energies, gradients and whole steps as without compiling, for any number of chains and any model."""

import shutil
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_symmetric.mcmc import HMC, MCLMC, NUTS, AdaptiveHMC, Density, sample
from pyro_symmetric.mcmc.run import starting_points
from pyro_symmetric.models import BayesianModel

X, Y = torch.linspace(-2, 2, 24).reshape(8, 3), torch.linspace(-1, 1, 8)

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


class PyroNet(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.first = PyroModule[nn.Linear](3, 4)
        self.first.weight = PyroSample(dist.Normal(0.0, 1.0).expand([4, 3]).to_event(2))
        self.second = PyroModule[nn.Linear](4, 1)
        self.second.weight = PyroSample(dist.Laplace(0.0, 1.0).expand([1, 4]).to_event(2))

    def forward(self, x: Tensor, y: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.Gamma(2.0, 2.0))
        mean = self.second(self.first(x).tanh()).squeeze(-1)
        with pyro.plate("data", 8, subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def hierarchical(x: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    mix = pyro.sample("mix", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("groups", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta * mix[0] + x[:, 0], 0.5), obs=y)


def convolutional() -> BayesianModel:
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.GELU(), nn.Flatten(), nn.Linear(4, 1))
    return BayesianModel(net, likelihood="gaussian")


MODELS = {
    "pyro_module": (PyroNet, (X, Y)),
    "hierarchical": (lambda: hierarchical, (X, Y)),
    "convolutional": (convolutional, (X[:, None], Y)),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_energies_and_gradients_equal_uncompiled_ones(name):
    make, args = MODELS[name]
    model = make()
    density = Density(model, args=args, engine="compiled", chain_chunk=8)
    plain = Density(model, args=args, engine="eager")
    assert density.engine == "compiled"
    z = 0.5 * starting_points(plain, 11, "uniform")
    for count in (1, 2, 3, 8, 11):  # whole programs, a padded one, more than one
        for found, expected in zip(
            density.energy_and_gradient(z[:count]), plain.energy_and_gradient(z[:count]), strict=True
        ):
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert len(density.fast._programs) == 4
    assert density.engine == "compiled"


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of the draws diverged")
@pytest.mark.parametrize("chains", [1, 4])
def test_trajectories_cross_to_where_matrices_are_singular(chains):
    """Trajectories that cross over to where a matrix has no root, at |s| = 1, step for step as without a compiler."""

    def model() -> None:
        s = pyro.sample("s", dist.Normal(0.0, 0.1))  # from which the model is run
        matrix = torch.eye(2) + s * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
        pyro.factor("f", torch.linalg.cholesky(matrix).diagonal().log().sum() + 49.5 * s**2)  # normal but for the root

    settings = {"num_samples": 20, "num_warmup": 0, "num_chains": chains, "dtype": torch.float64, "seed": 0}
    settings["initial"] = {"s": torch.linspace(-1.0, 1.0, chains + 2, dtype=torch.float64)[1:-1]}
    kernel = HMC(model, step_size=0.4, trajectory_length=3.0)
    found, expected = (sample(kernel, engine=engine, progress=False, **settings) for engine in ("compiled", "eager"))
    assert found.metadata["engine"] == "compiled"
    assert expected.statistics["acceptance_rate"].eq(0).any()  # some trajectories ended outside
    assert expected.statistics["acceptance_rate"].ne(0).any()
    assert torch.allclose(found.samples["s"], expected.samples["s"])


def test_where_compiling_fails_one_warning_says_so_and_the_potential_runs_on(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", broken)
    density = Density(PyroNet(), args=(X, Y), engine="compiled")
    z = torch.rand(5, density.dim) - 0.5
    with pytest.warns(RuntimeWarning, match=r"failed.*no compiler here"):
        found = density.energy_and_gradient(z)
    assert density.engine == "eager"
    assert torch.equal(density.energy_and_gradient(z)[1], found[1])  # and no second warning


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [HMC, AdaptiveHMC, NUTS, MCLMC])
@pytest.mark.parametrize("mass", ["diagonal", "dense"])
def test_a_compiled_step_does_what_it_does_without(kernel, mass):
    """From the same state with the same random numbers, step for step: over many, rounding would move chains apart.

    Warm-up passes the places where a program's inputs change their layout: a step size for each chain, then one for
    all, and a mass matrix.
    """
    model, chains = kernel(hierarchical, mass=mass), 3
    arguments = {"args": (X.double(), Y.double()), "dtype": torch.float64}
    plain, compiled = (Density(hierarchical, **arguments, engine=engine) for engine in ("eager", "compiled"))
    generator, other = torch.Generator(torch.empty(0).device).manual_seed(1), torch.Generator()
    z = 0.3 * torch.randn(chains, plain.dim, generator=generator, dtype=torch.float64)
    state = model.init(plain, z, 25, generator)
    for iteration in range(30):
        other.set_state(generator.get_state())
        found = model.step(compiled, replace(state, generator=other))
        state = model.step(plain, state)
        assert torch.equal(generator.get_state(), other.get_state())
        assert torch.allclose(found.z, state.z, rtol=1e-9, atol=1e-9)
        assert torch.allclose(found.gradient, state.gradient, rtol=1e-7, atol=1e-7)
        for name, value in state.statistics.items():  # small differences of large energies among them
            assert torch.allclose(found.statistics[name].double(), value.double(), 1e-5, 1e-5, equal_nan=True), name
        state = model.adapt(plain, state, iteration, 25) if iteration < 25 else state
    assert compiled.engine == "compiled"


def test_auto_compiles_if_the_run_is_long_enough(monkeypatch):
    args = (X, Y)
    assert Density(hierarchical, args=args, iterations=300).engine == "eager"
    monkeypatch.setenv("CXX", "g++")
    assert Density(hierarchical, args=args, iterations=20_000).engine == "compiled"
    assert Density(hierarchical, args=args, iterations=20_000, engine="eager").engine == "eager"


@pytest.mark.cpu
def test_without_a_compiler_auto_says_what_serves(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.warns(RuntimeWarning, match=r"'eager' serves, not 'compiled'"):
        assert Density(hierarchical, args=(X, Y), iterations=20_000).engine == "eager"
