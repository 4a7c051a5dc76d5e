"""Compiled potentials: the same energies and gradients as uncompiled ones, for any number of chains and any model."""

import shutil

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_symmetric.mcmc import Potential
from pyro_symmetric.mcmc import compiled as compiled_module
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
    potential = Potential(model, args=args, compile=True, chain_chunk=8)
    plain = Potential(model, args=args, compile=False)
    assert potential.route == "compiled"
    z = plain.initial(11, "uniform", radius=1.0)
    for count in (1, 2, 3, 8, 11):  # a small program, a whole one, padded ones, more than one
        for found, expected in zip(potential.value_and_grad(z[:count]), plain.value_and_grad(z[:count]), strict=True):
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert len(potential._compiled._programs) == 2
    assert potential.route == "compiled"


@needs_compiler
@pytest.mark.slow
def test_compiled_mini_batches_are_each_chains_own():
    model = PyroNet()
    potential = Potential(model, args=(X, Y), compile=True, chain_chunk=4, batch_size=2, subsampled=True)
    plain = Potential(model, args=(X, Y), compile=False, batch_size=2, subsampled=True)
    z = plain.initial(3, "uniform", radius=1.0)
    for _ in range(2):
        rows = {"rows": torch.stack([torch.randperm(8)[:2] for _ in z])}
        for found, expected in zip(potential.value_and_grad(z, rows), plain.value_and_grad(z, rows), strict=True):
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.slow
def test_singular_matrices_cost_one_chain_only_when_compiled_as_well():
    def model() -> None:
        s = pyro.sample("s", dist.Normal(0.0, 0.1))
        matrix = torch.eye(2) + s * torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # positive definite for |s| < 1
        pyro.factor("f", torch.linalg.cholesky(matrix).diagonal().log().sum())

    z = torch.tensor([[0.5], [2.0], [-0.5], [0.1]])
    found = Potential(model, compile=True, chain_chunk=4).value_and_grad(z)
    expected = Potential(model, compile=False).value_and_grad(z)
    assert torch.isinf(found[0]).tolist() == [False, True, False, False]
    assert torch.allclose(found[0], expected[0])
    assert torch.allclose(found[1], expected[1])


def test_where_compiling_fails_one_warning_says_so_and_the_potential_runs_on(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compiled_module.torch, "compile", broken)
    potential = Potential(PyroNet(), args=(X, Y), compile=True)
    z = torch.rand(5, potential.dim) - 0.5
    with pytest.warns(RuntimeWarning, match=r"torch.compile failed; the potential runs uncompiled.*no compiler here"):
        found = potential.value_and_grad(z)
    assert potential.route == "vmap"
    assert torch.equal(potential.value_and_grad(z)[1], found[1])  # and no second warning


def test_nothing_but_networks_is_compiled_unless_asked_for():
    assert Potential(hierarchical, args=(X, Y)).route == "vmap"
    assert Potential(PyroNet(), args=(X, Y), compile=False).route == "vmap"
