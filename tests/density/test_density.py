"""Density: by each engine the batched energy of every kind of model equals a loop over
Pyro's own log-densities.

Engine "layers" has ``test_layers``, distributions have ``test_distributions``, users'
models ``test_pyro_models``.
"""

import math
import shutil
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

from pyro_symmetric.density.compiled import Compiled
from pyro_symmetric.density.eager import is_as_exact
from pyro_symmetric.mcmc import HMC, MCLMC, NUTS, SGHMC, AdaptiveHMC, Density, sample
from pyro_symmetric.mcmc.settings import Settings
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.models import BayesianModel, GaussianPrior
from pyro_symmetric.networks import resnet20

X, Y = torch.linspace(-2, 2, 24).reshape(8, 3), torch.linspace(-1, 1, 8)

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)


def hierarchical(x: Tensor, y: Tensor) -> None:
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    mix = pyro.sample("mix", dist.Dirichlet(torch.ones(3)))
    bounded = pyro.sample("bounded", dist.Uniform(-1.0, 2.0))
    factor = pyro.sample("factor", dist.LKJCholesky(3, 2.0))
    with pyro.plate("outer", 2, dim=-2), pyro.plate("inner", 8, dim=-1):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        with poutine.scale(scale=0.7):
            pyro.sample(
                "y",
                dist.Normal(theta * mix[0] + bounded + factor[2, 0] + x[:, 0], 0.5),
                obs=y,
            )


class PyroNet(PyroModule):
    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        zero = torch.tensor(0.0, dtype=dtype)
        self.first = PyroModule[nn.Linear](3, 4)
        self.first.weight = PyroSample(
            dist.Normal(zero, 1.0).expand([4, 3]).to_event(2)
        )
        self.first.bias = PyroSample(dist.Normal(zero, 1.0).expand([4]).to_event(1))
        self.norm = nn.BatchNorm1d(4)
        self.second = PyroModule[nn.Linear](4, 1)
        nn.init.zeros_(self.second.bias)
        self.second.weight = PyroSample(
            dist.Laplace(zero, 1.0).expand([1, 4]).to_event(2)
        )

    def forward(self, x: Tensor, y: Tensor) -> None:
        sigma = pyro.sample("sigma", dist.Gamma(2.0, 2.0))
        mean = self.second(self.norm(self.first(x)).tanh()).squeeze(-1)
        with pyro.plate("data", len(x), subsample=torch.arange(len(x))):
            pyro.sample("y", dist.Normal(mean, sigma), obs=y)


def simplex_mixture(y: Tensor) -> None:
    shares = pyro.sample("shares", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 3.0))
        scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    mixture = dist.MixtureSameFamily(
        dist.Categorical(shares), dist.Normal(locs, scales)
    )
    with pyro.plate("data", len(y)):
        pyro.sample("y", mixture, obs=y)


def network(likelihood: str = "gaussian", **kwargs) -> BayesianModel:
    torch.manual_seed(0)
    out = 1 if likelihood == "gaussian" else 3
    return BayesianModel(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, out)),
        likelihood=likelihood,
        **kwargs,
    )


def convolutional() -> BayesianModel:
    net = nn.Sequential(nn.Conv1d(1, 2, 2), nn.GELU(), nn.Flatten(), nn.Linear(4, 1))
    return BayesianModel(net.double(), likelihood="gaussian")


MODELS = {
    "hierarchical": (hierarchical, (X, Y)),
    "pyro_module": (PyroNet(torch.float64).double().eval(), (X, Y)),
    "mixture": (simplex_mixture, (Y,)),
    "convolutional": (convolutional(), (X[:, None], Y)),
}


def test_a_mixture_is_the_same_site_in_a_plate_and_as_one_event():
    def mixture() -> dist.TorchDistribution:
        components = dist.LogNormal(torch.tensor([0.0, 1.0]), 1.0)
        weights = dist.Categorical(torch.ones(2))
        return dist.MixtureSameFamily(weights, components).expand([3])

    def in_plate() -> None:
        with pyro.plate("rows", 3):
            pyro.sample("scales", mixture())

    def one_event() -> None:
        pyro.sample("scales", mixture().to_event(1))

    z = torch.linspace(-1, 1, 12).reshape(4, 3)
    found, expected = (
        Density(model).energy_and_gradient(z) for model in (one_event, in_plate)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "engine",
    ["eager", pytest.param("compiled", marks=[pytest.mark.slow, needs_compiler])],
)
@pytest.mark.parametrize("name", MODELS)
def test_batched_energies_and_gradients_equal_a_loop_over_pyros_potential(name, engine):
    model, args = MODELS[name]
    args = tuple(a.double() for a in args)
    torch.set_default_dtype(torch.float64)
    density = Density(
        model, args=args, dtype=torch.float64, engine=engine, chain_chunk=8
    )
    assert density.engine == engine
    z = starting_points(density, 11, "uniform")
    _, pyro_potential, _, _ = initialize_model(model, args)
    expected = []
    for chain in z:
        leaf = chain.clone().requires_grad_()
        energy = pyro_potential(density.layout.unflatten(leaf))
        expected.append((energy.detach(), *torch.autograd.grad(energy, leaf)))
    energies, gradients = (
        torch.stack(values) for values in zip(*expected, strict=True)
    )
    for count in (1, 2, 3, 8, 11):  # whole programs, a padded one, more than one
        energy, gradient = density.energy_and_gradient(z[:count])
        assert torch.allclose(energy, energies[:count], rtol=1e-9, atol=0)
        assert torch.allclose(gradient, gradients[:count], rtol=1e-6, atol=1e-8)
    if engine == "compiled":
        assert len(density.fast._programs) == 4
        assert density.engine == "compiled"


# mini-batches -------------------------------------------------------------------------


def in_plate(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 8):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


def subsampling(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 8, subsample_size=2) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])


@pytest.mark.parametrize(
    ("model", "whole", "y", "plate"),
    [
        (network(num_data=8), None, Y, "rows"),
        (network("categorical"), None, torch.arange(8) % 3, "rows"),
        (subsampling, in_plate, Y, "data"),
    ],
)
def test_mini_batches_of_each_chains_own_that_cover_the_data_average_to_the_full_energy(
    model, whole, y, plate
):
    options = {"args": (X, y), "dtype": torch.float64}
    full = Density(whole or model, **options)
    cut = Density(model, **options, subsampled=True, batch_size=None if whole else 2)
    assert cut.row_counts == {plate: (8, 2)}
    z = starting_points(full, 4)
    order = torch.stack([torch.randperm(8) for _ in range(4)])
    parts = [
        cut.energy_and_gradient(z, {plate: order[:, 2 * k : 2 * k + 2]})
        for k in range(4)
    ]
    energies, gradients = (torch.stack(values) for values in zip(*parts, strict=True))
    energy, gradient = full.energy_and_gradient(z)
    torch.testing.assert_close(energies.mean(0), energy)
    torch.testing.assert_close(gradients.mean(0), gradient)
    assert (energies.std(0) > 1e-3).all()


def test_chains_of_a_resnet20_have_the_gradients_of_their_own_batches_and_part():
    x, y = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    net = resnet20(width=2)
    model = BayesianModel(net, GaussianPrior(1.0, fan_in=True))
    density = Density(model, args=(x, y), batch_size=4, subsampled=True)
    z = starting_points(density, 2, model.initial_weights())
    rows = torch.stack([torch.arange(4), torch.arange(10, 14)])
    _, gradient = density.energy_and_gradient(z, {"rows": rows})
    for chain in range(2):  # by plain backpropagation
        loss = (
            nn.functional.cross_entropy(
                net(x[rows[chain]]), y[rows[chain]], reduction="sum"
            )
            * 16
            / 4
        )
        loss = loss - sum(
            model.priors()[name].log_prob(p) for name, p in net.named_parameters()
        )
        expected = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))]
        )
        assert (gradient[chain] - expected).norm() < 1e-4 * expected.norm()
    kernel = SGHMC(model, batch_size=4, step_size=0.003, friction=10.0, num_steps=1)
    options = {
        "num_chains": 2,
        "num_samples": 1,
        "num_warmup": 1,
        "initial": model.initial_weights(),
    }
    weights = sample(kernel, x, y, progress=False, **options).samples["0.weight"]
    assert weights.flatten(1).unique(dim=0).shape[0] == 2  # one start, two ways


def fixed_subsample(x: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 100, subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Normal(w, 1.0), obs=x[:, 0])


def fixed_locals(x: Tensor) -> None:
    with pyro.plate("data", 100, subsample=torch.arange(len(x))):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=x[:, 0])


def test_a_subsample_that_never_changes_counts_as_often_as_in_pyro():
    with pytest.warns(
        UserWarning,
        match="8 of 100 rows, always the same ones, and each counts 12.5 times",
    ):
        density = Density(fixed_subsample, (X,))
    w = torch.tensor([[0.3], [-0.2]])
    expected = -dist.Normal(0.0, 1.0).log_prob(w[:, 0]) - 12.5 * dist.Normal(
        w, 1.0
    ).log_prob(X[:, 0]).sum(1)
    torch.testing.assert_close(density.energy(w), expected)
    with pytest.warns(UserWarning, match="always the same ones"):
        own = Density(fixed_locals, (X,))
    z = torch.randn(2, 8)
    expected = -12.5 * (
        dist.Normal(0.0, 1.0).log_prob(z) + dist.Normal(z, 1.0).log_prob(X[:, 0])
    ).sum(1)
    torch.testing.assert_close(own.energy(z), expected)


# where numbers end, and precision -----------------------------------------------------


def test_chains_that_start_without_finite_energy_are_drawn_anew():
    def half_plane() -> None:
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.factor(
            "wall", torch.where(x > 1.0, torch.tensor(0.0), torch.tensor(-torch.inf))
        )

    z = starting_points(Density(half_plane), 50, "uniform")
    assert (z > 1).all()
    assert z.unique().numel() == 50


def singular() -> None:
    """A matrix that has no root beyond |s| = 1."""
    s = pyro.sample("s", dist.Normal(0.0, 0.1))  # from which the model is run
    matrix = torch.eye(2) + s * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    # normal but for the root
    pyro.factor("f", torch.linalg.cholesky(matrix).diagonal().log().sum() + 49.5 * s**2)


def test_singular_matrices_cost_one_chain_only():
    s = torch.tensor([[0.5], [2.0], [-0.5], [0.1]])
    energy, gradient = Density(singular).energy_and_gradient(s)
    assert torch.isinf(energy).tolist() == [False, True, False, False]
    expected = (
        0.5 * s.square()
        + 0.9189
        + torch.log(torch.tensor(0.1))
        - 0.5 * torch.log1p(-s.square())
    )
    assert torch.allclose(energy[[0, 2, 3]], expected[[0, 2, 3], 0], atol=1e-3)
    assert torch.isfinite(gradient).all()


def ill_conditioned() -> None:
    """Single precision itself is off by more than rounding."""
    length = pyro.sample("length", dist.LogNormal(0.0, 1.0))
    x = torch.linspace(0, 3, 30)
    covariance = torch.exp(-(((x[:, None] - x) / length) ** 2)) + 1e-5 * torch.eye(30)
    y = dist.MultivariateNormal(torch.zeros(30), covariance)
    pyro.sample("y", y, obs=x.sin())


def test_double_precision_decides_where_the_model_itself_rounds_coarsely():
    density = Density(ill_conditioned, engine="eager")
    z = torch.linspace(-0.5, 1.0, 16)[:, None]
    exact = density._eager.in_double().energy_and_gradient(z.double(), None)
    expected = density.energy_and_gradient(z)
    # another order of sums: the mapped model against a loop
    alone = [density.energy_and_gradient(chain[None]) for chain in z]
    found = tuple(torch.cat(parts) for parts in zip(*alone, strict=True))
    rough = (expected[0] * (1 + 1e-3), expected[1])
    wrong = (expected[0], expected[1] * 1.1)
    error = (expected[0] - exact[0]).abs() / (1 + exact[0].abs())
    assert error.max() > 3e-4
    assert is_as_exact(found, expected, exact)
    assert is_as_exact(expected, expected, exact)
    assert not is_as_exact(rough, exact, exact)
    assert not is_as_exact(wrong, expected, exact)


def caught() -> None:
    """A model that mends singular matrices itself."""
    s = pyro.sample("s", dist.Normal(0.0, 0.1))  # from which the model is run
    matrix = torch.eye(2) * (1 + s)
    try:
        root = torch.linalg.cholesky(matrix)
    except torch.linalg.LinAlgError:
        root = torch.linalg.cholesky(matrix + 10 * torch.eye(2))
    pyro.factor("f", root.sum())


def test_errors_that_a_model_catches_reach_it():
    s = torch.tensor([[-2.0], [-3.0]])
    energy = Density(caught).energy(s)
    expected = -dist.Normal(0.0, 0.1).log_prob(s) - 2 * (11 + s).sqrt()
    torch.testing.assert_close(energy, expected[:, 0])
    assert torch.linalg.cholesky.__name__ != "factor_or_nan"


def test_programs_leave_errors_to_models_that_catch_them():
    for model, catches in [(caught, True), (singular, False), (hierarchical, False)]:
        arguments = (X, Y) if model is hierarchical else ()
        eager = Density(model, arguments, engine="eager")
        z = torch.zeros(2, eager.dim)
        compiled = Compiled(eager._eager, 8, z)
        assert compiled._catches_errors is catches
        assert compiled._has_lanes is not catches


def inverted() -> None:
    s = pyro.sample("s", dist.Normal(0.0, 0.1))
    matrix = torch.eye(2) + s * torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    root = torch.linalg.cholesky(matrix + torch.eye(2) * s)
    pyro.factor("f", torch.linalg.inv(matrix)[0, 1] + root[0, 0])


def test_singular_matrices_of_other_kinds_are_found_by_bisection():
    energy = Density(inverted).energy(torch.tensor([[0.0], [1.0], [0.5], [-1.0]]))
    assert energy.isfinite().tolist() == [True, False, True, False]


def test_a_module_with_single_precision_priors_runs_in_double():
    single, double = PyroNet().eval(), PyroNet(torch.float64).eval()
    density = Density(single, args=(X, Y), dtype=torch.float64)
    z = starting_points(density, 3, "prior")
    reference = Density(
        double.double(), args=(X.double(), Y.double()), dtype=torch.float64
    )
    assert z.dtype == torch.float64
    assert torch.allclose(density.energy(z), reference.energy(z), rtol=1e-6)


def test_a_model_of_finer_numbers_is_evaluated_in_the_chains_precision():
    def model() -> None:
        pyro.sample("a", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("b", dist.HalfNormal(torch.tensor(1.0, dtype=torch.float64)))

    density = Density(model, dtype=torch.float32, engine="eager")
    energy, gradient = density.energy_and_gradient(
        density.draw_prior(3, torch.Generator(torch.empty(0).device))
    )
    assert energy.dtype == gradient.dtype == torch.float32


# programs -----------------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of the draws diverged")
@pytest.mark.parametrize("chains", [1, 4])
def test_trajectories_cross_to_where_matrices_are_singular(chains):
    """Step for step as without a compiler."""
    settings = {
        "num_samples": 20,
        "num_warmup": 0,
        "num_chains": chains,
        "dtype": torch.float64,
        "seed": 0,
    }
    settings["initial"] = {
        "s": torch.linspace(-1.0, 1.0, chains + 2, dtype=torch.float64)[1:-1]
    }
    kernel = HMC(singular, step_size=0.4, trajectory_length=3.0)
    found, expected = (
        sample(kernel, engine=engine, progress=False, **settings)
        for engine in ("compiled", "eager")
    )
    assert found.metadata["engine"] == "compiled"
    # some trajectories ended outside
    assert expected.statistics["acceptance_rate"].eq(0).any()
    assert expected.statistics["acceptance_rate"].ne(0).any()
    assert torch.allclose(found.samples["s"], expected.samples["s"])


def schools(x: Tensor, y: Tensor) -> None:
    """Smooth enough that rounding grows little in a step."""
    mu = pyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = pyro.sample("tau", dist.HalfCauchy(5.0))
    mix = pyro.sample("mix", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("groups", 8):
        theta = pyro.sample("theta", dist.Normal(mu, tau))
        pyro.sample("y", dist.Normal(theta * mix[0] + x[:, 0], 0.5), obs=y)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kernel", [HMC, AdaptiveHMC, NUTS, MCLMC])
@pytest.mark.parametrize("mass", ["diagonal", "dense"])
def test_a_compiled_step_does_what_it_does_without(kernel, mass):
    """From the same state with the same random numbers, step for step: over many,
    rounding would move chains apart.

    Warm-up passes the places where a program's inputs change their layout: a step size
    for each chain, then one for all, and a mass matrix.
    """
    model = kernel(schools, full_mass=mass == "dense")
    chains = 3 if mass == "diagonal" else 16  # first and last axis
    arguments = {"args": (X.double(), Y.double()), "dtype": torch.float64}
    plain, compiled = (
        Density(schools, **arguments, engine=engine) for engine in ("eager", "compiled")
    )
    generator, other = (
        torch.Generator(torch.empty(0).device).manual_seed(1),
        torch.Generator(),
    )
    z = 0.3 * torch.randn(chains, plain.dim, generator=generator, dtype=torch.float64)
    state = model.init(plain, z, 25, generator)
    for iteration in range(30):
        other.set_state(generator.get_state())
        found = model.step(compiled, replace(state, generator=other))
        state = model.step(plain, state)
        assert torch.equal(generator.get_state(), other.get_state())
        assert torch.allclose(found.z, state.z, rtol=1e-9, atol=1e-9)
        assert torch.allclose(found.gradient, state.gradient, rtol=1e-7, atol=1e-7)
        # small differences of large energies among them
        for name, value in state.statistics.items():
            assert torch.allclose(
                found.statistics[name].double(),
                value.double(),
                1e-5,
                1e-5,
                equal_nan=True,
            ), name
        state = model.adapt(plain, state, iteration, 25) if iteration < 25 else state
    assert compiled.engine == "compiled"


@needs_compiler
@pytest.mark.slow
def test_a_program_that_cannot_be_kept_on_disk_serves_in_silence(capfd):
    def correlated():
        # whose making is checked in the graph
        pyro.sample("a", dist.MultivariateNormal(torch.zeros(3), torch.eye(3)))

    density = Density(correlated, engine="compiled")
    energy, _ = density.energy_and_gradient(torch.zeros(2, 3))
    assert density.engine == "compiled"
    torch.testing.assert_close(energy, torch.full((2,), 1.5 * math.log(2 * math.pi)))
    assert not capfd.readouterr().err


def test_where_compiling_fails_one_warning_says_so_and_the_potential_runs_on(
    monkeypatch,
):
    def broken(*args, **kwargs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch.compile", broken)
    monkeypatch.setattr("torch._inductor.standalone_compile", broken)
    density = Density(hierarchical, args=(X, Y), engine="compiled")
    z = torch.rand(5, density.dim) - 0.5
    with pytest.warns(RuntimeWarning, match=r"failed.*no compiler here"):
        found = density.energy_and_gradient(z)
    assert density.engine == "eager"
    # and no second warning
    assert torch.equal(density.energy_and_gradient(z)[1], found[1])


@pytest.mark.cpu
def test_auto_compiles_if_the_run_is_long_enough_and_there_is_a_compiler(monkeypatch):
    long = {"args": (X, Y), "num_samples": 20_000}
    assert Density(hierarchical, args=(X, Y), num_samples=300).engine == "eager"
    assert (
        Density(hierarchical, args=(X, Y), num_samples=3_000, num_steps=1).engine
        == "eager"
    )
    monkeypatch.setenv("CXX", "g++")
    assert Density(hierarchical, **long).engine == "compiled"
    assert Density(hierarchical, **long, engine="eager").engine == "eager"
    # a warm-up of any length takes thousands of steps
    run = Settings(HMC(hierarchical), (X, Y), num_samples=10)
    assert run.build_density().engine == "compiled"
    assert replace(run, num_warmup=100).build_density().engine == "eager"
    monkeypatch.delenv("CXX")
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.warns(
        RuntimeWarning, match=r"using engine 'eager' instead of 'compiled'"
    ):
        assert Density(hierarchical, **long).engine == "eager"


# what is refused ----------------------------------------------------------------------


def branching() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    pyro.factor("f", a if a > 0 else -a * a)


def test_a_model_that_branches_on_a_value_is_evaluated_chain_by_chain_and_says_so():
    with pytest.warns(
        RuntimeWarning, match="one after another.*data-dependent control flow"
    ):
        density = Density(branching, dtype=torch.float64, engine="compiled")
    assert density.engine == "eager"
    a = torch.tensor([[1.5], [-2.0], [0.3]], dtype=torch.float64)
    energy, gradient = density.energy_and_gradient(a)
    factor, slope = torch.where(a > 0, a, -a * a), torch.where(a > 0, 1.0, -2 * a)
    torch.testing.assert_close(
        energy[:, None], -factor - dist.Normal(0.0, 1.0).log_prob(a)
    )
    torch.testing.assert_close(gradient, a - slope)


def test_supports_that_move_with_a_discrete_site_are_seen_whatever_was_drawn():
    def model(shares):
        k = pyro.sample("k", dist.Categorical(shares))
        pyro.sample("u", dist.Uniform(0.0, torch.tensor([1.0, 2.0])[k]))

    for share in (0.5, 1e-6):
        with pytest.raises(ValueError, match="'u' depends on other sites"):
            Density(model, (torch.tensor([1 - share, share]),))
    # a fixed support
    Density(
        lambda: pyro.sample(
            "s", dist.LogNormal(pyro.sample("z", dist.Bernoulli(0.3)), 1.0)
        )
    )


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
    with pytest.raises(
        ValueError, match=r"'y'. exist in some runs|'u' depends on other sites"
    ):
        density.energy(torch.tensor([[3.9, 0.0], [4.1, 0.0]]))


def moving_support() -> None:
    pyro.sample("b", dist.Uniform(0.0, pyro.sample("a", dist.HalfNormal(1.0))))


def varying_sites() -> None:
    pyro.sample(
        f"b{torch.randint(10**6, ()).item()}",
        dist.Normal(pyro.sample("a", dist.Normal(0.0, 1.0)), 1.0),
    )


def local_latent(x: Tensor) -> None:
    with pyro.plate("data", 8, subsample_size=2) as rows:
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z, 1.0), obs=x[rows, 0])


def noisy() -> None:
    pyro.factor("f", pyro.sample("a", dist.Normal(0.0, 1.0)) + torch.randn(()))


@pytest.mark.parametrize(
    ("model", "args", "options", "message"),
    [
        (moving_support, (), {}, "'b' depends on other sites"),
        (varying_sites, (), {}, "exist in some runs of the model only"),
        (subsampling, (X, Y), {}, "'data': 2 of 8 rows.*SGHMC"),
        (in_plate, (X, Y), {"batch_size": 4, "subsampled": True}, "subsample_size"),
        (
            local_latent,
            (X,),
            {"subsampled": True},
            "'z' lies in the subsampled plate 'data'",
        ),
        (
            PyroNet().train(),
            (X, Y),
            {},
            r"'norm' is batch normalisation in train mode.*\.eval\(\)",
        ),
        (noisy, (), {}, "isn't a function of its sites"),
        (network(num_data=100), (X, Y), {}, "num_data=100"),
        (network(), (X, Y), {"batch_size": 9, "subsampled": True}, "batch_size is 9"),
    ],
)
def test_what_cannot_be_sampled_is_named(model, args, options, message):
    with pytest.raises(ValueError, match=message):
        Density(model, args=args, **options)


def test_rounding_of_nearly_singular_matrices_is_no_failure_of_the_map():
    """Chains at once and one by one are equally far from double precision."""

    def model(x: Tensor) -> None:
        loadings = pyro.sample("w", dist.Normal(torch.zeros(2, 8), 1.0).to_event(2))
        noise = pyro.sample("s", dist.HalfCauchy(1.0))
        covariance = loadings.mT @ loadings + noise.square() * torch.eye(8)
        with pyro.plate("rows", len(x)):
            fn = dist.MultivariateNormal(torch.zeros(8), covariance)
            pyro.sample("x", fn, obs=x)

    x = torch.randn(120, 2) @ torch.randn(2, 8) + 0.5 * torch.randn(120, 8)
    density = Density(model, (x,), engine="eager")
    assert not density.target.one_by_one
    weights = {"w": torch.zeros(3, 2, 8), "s": torch.tensor([0.5, 1.0, 2.0])}
    energy = density.energy(density.unconstrain(weights))
    for value, s in zip(energy, weights["s"], strict=True):
        prior = dist.Normal(0.0, 1.0).log_prob(torch.zeros(16)).sum()
        prior = prior + dist.HalfCauchy(1.0).log_prob(s) + s.log()
        expected = -prior - dist.Normal(0.0, s).log_prob(x).sum()
        torch.testing.assert_close(value, expected)
