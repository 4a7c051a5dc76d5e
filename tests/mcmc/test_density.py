"""Density: the batched energy of every kind of model equals a loop over Pyro's own log-densities."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.run import starting_points
from pyro_symmetric.models import BayesianModel

X, Y = torch.linspace(-2, 2, 24).reshape(8, 3), torch.linspace(-1, 1, 8)


def hierarchical(x: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    mix = pyro.sample("mix", dist.Dirichlet(torch.ones(3)))
    bounded = pyro.sample("bounded", dist.Uniform(-1.0, 2.0))
    factor = pyro.sample("factor", dist.LKJCholesky(3, 2.0))
    with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 8, dim=-1):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with poutine.scale(scale=0.7):
            pyro.sample("y", dist.Normal(theta * mix[0] + bounded + factor[2, 0] + x[:, 0], 0.5), obs=y)


class PyroNet(PyroModule):
    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        zero = torch.tensor(0.0, dtype=dtype)
        self.first = PyroModule[nn.Linear](3, 4)
        self.first.weight = PyroSample(dist.Normal(zero, 1.0).expand([4, 3]).to_event(2))
        self.first.bias = PyroSample(dist.Normal(zero, 1.0).expand([4]).to_event(1))
        self.norm = nn.BatchNorm1d(4)
        self.second = PyroModule[nn.Linear](4, 1)
        nn.init.zeros_(self.second.bias)
        self.second.weight = PyroSample(dist.Laplace(zero, 1.0).expand([1, 4]).to_event(2))

    def forward(self, x: Tensor, y: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.Gamma(2.0, 2.0))
        mean = self.second(self.norm(self.first(x)).tanh()).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def simplex_mixture(y: Tensor) -> None:
    shares = pyro.sample("shares", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 3.0))
        scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    mixture = dist.MixtureSameFamily(dist.Categorical(shares), dist.Normal(locs, scales))
    with pyro.plate("data", len(y)):
        pyro.sample("y", mixture, obs=y)


def bayesian_model(likelihood: str = "gaussian", **kwargs) -> BayesianModel:
    torch.manual_seed(0)
    out = 1 if likelihood == "gaussian" else 3
    return BayesianModel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, out)), likelihood=likelihood, **kwargs)


MODELS = {
    "hierarchical": (hierarchical, (X, Y)),
    "pyro_module": (PyroNet(torch.float64).eval(), (X, Y)),
    "mixture": (simplex_mixture, (Y,)),
    "bayesian_gaussian": (bayesian_model(), (X, Y)),
    "bayesian_categorical": (bayesian_model("categorical"), (X, torch.arange(8) % 3)),
}


@pytest.mark.parametrize("name", MODELS)
def test_batched_energy_and_gradient_equal_a_loop_over_pyros_potential(name):
    model, args = MODELS[name]
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    torch.set_default_dtype(torch.float64)
    double = model.double() if isinstance(model, nn.Module) else model
    density = Density(double, args=args, dtype=torch.float64)
    z = starting_points(density, 5, "uniform")
    energy, gradient = density.energy_and_gradient(z)
    _, pyro_potential, _, _ = initialize_model(double, args)
    assert gradient.shape == z.shape
    for chain in range(5):
        leaf = z[chain].clone().requires_grad_()
        expected = pyro_potential(density.layout.unflatten(leaf))
        assert energy[chain].item() == pytest.approx(expected.item(), rel=1e-9)
        assert torch.allclose(gradient[chain], torch.autograd.grad(expected, leaf)[0], rtol=1e-6, atol=1e-8)
    chunked = Density(double, args=args, dtype=torch.float64, chain_chunk=3)
    assert torch.allclose(chunked.energy(z), energy)
    if isinstance(model, nn.Module):
        model.float()


def test_log_determinants_make_the_prior_integrate_to_one():
    # U(z) of a prior alone is -log of a density over z: its integral over the line is 1, by the trapezoidal rule.
    def prior() -> None:
        pyro.sample("s", dist.HalfNormal(2.0))

    z = torch.linspace(-12, 4, 4001, dtype=torch.float64)[:, None]
    density = (-Density(prior, dtype=torch.float64).energy(z)).exp()
    assert torch.trapezoid(density, z[:, 0]).item() == pytest.approx(1.0, abs=1e-4)


def test_mini_batches_that_cover_the_data_average_to_the_full_energy():
    for model, y in ((bayesian_model(num_data=8), Y), (bayesian_model("categorical"), torch.arange(8) % 3)):
        full = Density(model, args=(X, y))
        cut = Density(model, args=(X, y), batch_size=2, subsampled=True)
        assert cut.row_counts == {"rows": (8, 2)}
        z = starting_points(full, 4)
        order = torch.stack([torch.randperm(8) for _ in range(4)])  # each chain its own partition
        parts = [cut.energy_and_gradient(z, {"rows": order[:, 2 * k : 2 * k + 2]}) for k in range(4)]
        expected = full.energy_and_gradient(z)
        for i in range(2):
            assert torch.allclose(torch.stack([p[i] for p in parts]).mean(0), expected[i], rtol=1e-4, atol=1e-3)


def in_plate(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 8):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def subsampling(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 8, subsample_size=2) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])


def test_a_plate_that_subsamples_gets_each_chains_own_rows_and_no_bias():
    density = Density(subsampling, args=(X, Y), subsampled=True)
    assert density.row_counts == {"data": (8, 2)}
    z = starting_points(density, 3)
    order = torch.stack([torch.randperm(8) for _ in range(3)])
    batches = [{"data": order[:, 2 * k : 2 * k + 2]} for k in range(4)]
    parts = zip(*(density.energy_and_gradient(z, batch) for batch in batches), strict=True)
    energies, gradients = (torch.stack(values) for values in parts)
    energy, gradient = Density(in_plate, args=(X, Y)).energy_and_gradient(z)
    torch.testing.assert_close(energies.mean(0), energy)
    torch.testing.assert_close(gradients.mean(0), gradient, rtol=1e-4, atol=1e-4)
    assert (energies.std(0) > 1e-3).all()


def test_chains_that_start_without_finite_energy_are_drawn_anew():
    def half_plane() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor("wall", torch.where(x > 1.0, torch.tensor(0.0), torch.tensor(-torch.inf)))

    z = starting_points(Density(half_plane), 50, "uniform")
    assert (z > 1).all()
    assert z.unique().numel() == 50


def test_singular_matrices_cost_one_chain_only():
    def model() -> None:
        s = pyro.sample("s", dist.Normal(0.0, 0.1))
        matrix = torch.eye(2) + s * torch.tensor([[0.0, 1.0], [1.0, 0.0]])  # positive definite for |s| < 1
        pyro.factor("f", torch.linalg.cholesky(matrix).diagonal().log().sum())

    density = Density(model)
    energy, gradient = density.energy_and_gradient(torch.tensor([[0.5], [2.0], [-0.5], [0.1]]))
    assert torch.isinf(energy).tolist() == [False, True, False, False]
    expected = 0.5 * 25 + 0.9189 + torch.log(torch.tensor(0.1)) - 0.5 * torch.log(torch.tensor(0.75))
    assert energy[0].item() == pytest.approx(expected.item(), abs=1e-3)
    assert torch.isfinite(gradient).all()


def test_a_module_with_single_precision_priors_runs_in_double():
    single, double = PyroNet().eval(), PyroNet(torch.float64).eval()
    density = Density(single, args=(X, Y), dtype=torch.float64)
    z = starting_points(density, 3, "prior")
    reference = Density(double.double(), args=(X.double(), Y.double()), dtype=torch.float64)
    assert z.dtype == torch.float64
    assert torch.allclose(density.energy(z), reference.energy(z), rtol=1e-6)


# what is refused ----------------------------------------------------------------------------------------------------


def moving_support() -> None:
    a = pyro.sample("a", dist.HalfNormal(1.0))
    pyro.sample("b", dist.Uniform(0.0, a))


def varying_sites() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.sample(f"b{torch.randint(10**6, ()).item()}", dist.Normal(a, 1.0))


def fixed_subsample(x: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 100, subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Normal(w, 1.0), obs=x[:, 0])


def fixed_locals(x: Tensor) -> None:
    with pyro.plate("data", 100, subsample=torch.arange(len(x))):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=x[:, 0])


def local_latent(x: Tensor) -> None:
    with pyro.plate("data", 8, subsample_size=2) as rows:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=x[rows, 0])


def test_a_subsample_that_never_changes_counts_as_often_as_in_pyro():
    with pytest.warns(
        UserWarning, match="'data' holds 8 of 100 rows, always the same ones, and each counts 12.5 times"
    ):
        density = Density(fixed_subsample, (X,))
    w = torch.tensor([[0.3], [-0.2]])
    expected = -dist.Normal(0.0, 1.0).log_prob(w[:, 0]) - 12.5 * dist.Normal(w, 1.0).log_prob(X[:, 0]).sum(1)
    torch.testing.assert_close(density.energy(w), expected)
    with pytest.warns(UserWarning, match="always the same ones"):
        own = Density(fixed_locals, (X,))
    z = torch.randn(2, 8)
    expected = -12.5 * (dist.Normal(0.0, 1.0).log_prob(z) + dist.Normal(z, 1.0).log_prob(X[:, 0])).sum(1)
    torch.testing.assert_close(own.energy(z), expected)


def branching() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.factor("f", a if a > 0 else -a * a)


def noisy() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.factor("f", a + torch.randn(()))


def test_a_model_that_branches_on_a_value_is_evaluated_chain_by_chain_and_says_so():
    with pytest.warns(RuntimeWarning, match="one after another.*data-dependent control flow"):
        density = Density(branching, dtype=torch.float64, engine="compiled")
    assert density.engine == "eager"
    assert "data-dependent" in density.engine_reason
    a = torch.tensor([[1.5], [-2.0], [0.3]], dtype=torch.float64)
    energy, gradient = density.energy_and_gradient(a)
    factor, slope = torch.where(a > 0, a, -a * a), torch.where(a > 0, 1.0, -2 * a)
    torch.testing.assert_close(energy[:, None], -factor - dist.Normal(0.0, 1.0).log_prob(a))
    torch.testing.assert_close(gradient, a - slope)


def test_supports_that_move_with_a_discrete_site_are_seen_whatever_was_drawn():
    def model(shares):
        k = pyro.sample("k", dist.Categorical(shares))
        pyro.sample("u", dist.Uniform(0.0, torch.tensor([1.0, 2.0])[k]))

    for share in (0.5, 1e-6):
        with pytest.raises(ValueError, match="'u' depends on other sites"):
            Density(model, (torch.tensor([1 - share, share]),))
    Density(lambda: pyro.sample("s", dist.LogNormal(pyro.sample("z", dist.Bernoulli(0.3)), 1.0)))  # a fixed support


@pytest.mark.parametrize("rare", ["site", "support"])
def test_what_few_runs_have_is_refused_when_a_chain_comes_there(rare):
    """No prior draw in 20,000 comes there."""

    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        if rare == "site" and x > 4:
            pyro.sample("y", dist.Normal(5.0, 0.01))
        pyro.sample("u", dist.Uniform(0.0, 2.0 if rare == "support" and x > 4 else 1.0))

    with pytest.warns(RuntimeWarning, match="one after another"):
        density = Density(model)
    density.energy(torch.tensor([[3.9, 0.0]]))
    with pytest.raises(ValueError, match=r"'y'. exist in some runs|'u' depends on other sites"):
        density.energy(torch.tensor([[3.9, 0.0], [4.1, 0.0]]))


@pytest.mark.parametrize(
    ("model", "args", "options", "message"),
    [
        (moving_support, (), {}, "'b' depends on other sites"),
        (varying_sites, (), {}, "exist in some runs of the model only"),
        (subsampling, (X, Y), {}, "'data': 2 of 8 rows.*SGHMC"),
        (in_plate, (X, Y), {"batch_size": 4, "subsampled": True}, "subsample_size"),
        (local_latent, (X,), {"subsampled": True}, "'z' lies in the subsampled plate 'data'"),
        (PyroNet().train(), (X, Y), {}, "'norm' is batch normalisation in train mode"),
        (noisy, (), {}, "isn't a function of its sites"),
        (bayesian_model(num_data=100), (X, Y), {}, "num_data=100"),
        (bayesian_model(), (X, Y), {"batch_size": 9, "subsampled": True}, "batch_size is 9"),
    ],
)
def test_what_cannot_be_sampled_is_named(model, args, options, message):
    with pytest.raises(ValueError, match=message):
        Density(model, args=args, **options)


def test_a_model_of_finer_numbers_is_evaluated_in_the_chains_precision():
    def model() -> None:
        pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("b", dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64)))

    density = Density(model, dtype=torch.float32, engine="eager")
    energy, gradient = density.energy_and_gradient(density.draw_prior(3, torch.Generator(torch.empty(0).device)))
    assert energy.dtype == gradient.dtype == torch.float32
