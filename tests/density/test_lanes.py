"""Chains along the last axis: energies and gradients against those of the mapped
model, in double precision, and of compiled programs against them.
"""

import math
import pickle
import shutil
from collections import deque

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_symmetric.density import compiled
from pyro_symmetric.density.compiled import Compiled
from pyro_symmetric.density.density import Density
from pyro_symmetric.density.eager import Unavailable, same_evaluation
from pyro_symmetric.density.lanes import ChainsLast

X, Y = torch.randn(30, 3), torch.randn(30)
COUNTS = torch.arange(30).remainder(4).float()
GROUPS = torch.arange(30).remainder(7)


def varying_slopes() -> None:
    """Rows of a site are picked by an index with repeats."""
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(2)).to_event(1))
    root = pyro.sample("root", dist.LKJCholesky(2, 2.0))
    with pyro.plate("groups", 7):
        z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    effects = z @ (scale[:, None] * root).T
    with pyro.plate("rows", 30):
        mean = effects[GROUPS, 0] + effects[GROUPS, 1] * X[:, 0]
        pyro.sample("y", dist.Poisson(mean.exp()), obs=COUNTS)


def mixture() -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
    components = dist.Normal(mean, scale)
    with pyro.plate("rows", 30):
        likelihood = dist.MixtureSameFamily(dist.Categorical(weights), components)
        pyro.sample("y", likelihood, obs=Y)


def enumerated_chain() -> None:
    rows = dist.Dirichlet(torch.ones(2, 2)).to_event(1)
    transition = pyro.sample("transition", rows)
    mean = pyro.sample("mean", dist.Normal(torch.tensor([-1.0, 1.0]), 1.0).to_event(1))
    state = 0
    for t in pyro.markov(range(4)):
        state = pyro.sample(f"state{t}", dist.Categorical(transition[state]))
        pyro.sample(f"y{t}", dist.Normal(mean[state], 1.0), obs=Y[t])


def network() -> None:
    w1 = pyro.sample("w1", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))
    b1 = pyro.sample("b1", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    w2 = pyro.sample("w2", dist.Normal(torch.zeros(4), 1.0).to_event(1))
    hidden = torch.nn.functional.linear(X.to(w1), w1, b1).tanh()
    pyro.sample("y", dist.Normal(hidden @ w2, 1.0).to_event(1), obs=Y)


def ordinal() -> None:
    slope = pyro.sample("slope", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    gaps = pyro.sample("gaps", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("rows", 30):
        likelihood = dist.OrderedLogistic((X * slope).sum(-1), gaps.cumsum(-1))
        pyro.sample("y", likelihood, obs=COUNTS)


def written_and_sorted() -> None:
    """In-place changes, flips, scattering, and integers of each chain."""
    x = pyro.sample("x", dist.Normal(torch.zeros(6), 1.0).to_event(1))
    knots, order = x.sort()
    padded = torch.nn.functional.pad(knots.flip(0), (1, 2))
    rows = torch.tensor([0, 0, 1, 2, 2, 2])
    summed = x.new_zeros(3).index_add(0, rows, x**2)
    picked = x[order] * torch.arange(6)
    running = torch.cumsum(torch.cat([x, x, x, x.exp()]), 0) / 10
    total = padded.cumprod(0).sum() + (summed * summed.amax()).sum() + picked.sum()
    pyro.factor("f", -(total**2) / 100 - running.square().mean() - x.prod())


def multivariate() -> None:
    length = pyro.sample("length", dist.LogNormal(0.0, 1.0))
    x = X[:8, 0].to(length)
    distance = (x[:, None] - x) / length
    covariance = torch.exp(-(distance**2)) + 0.1 * torch.eye(8)
    y = dist.MultivariateNormal(torch.zeros(8), covariance)
    pyro.sample("y", y, obs=Y[:8])
    target = Y[:8].to(covariance)
    solved = torch.linalg.solve(covariance, target)
    pyro.factor("f", -0.5 * target @ solved - torch.logdet(covariance))


def of_one_number() -> None:
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    pyro.sample("y", dist.NegativeBinomial(rate, logits=rate - 1), obs=COUNTS[3])


def heavy_tails() -> None:
    """Numbers of a parameter are repeated for all rows and summed along them."""
    freedom = pyro.sample("freedom", dist.Gamma(2.0, 0.1))
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros(5, 1), 1.0).to_event(2))
    with pyro.plate("rows", 30):
        moves = pyro.sample("moves", dist.Normal(0.0, 1.0))
    running = torch.cumsum(torch.stack([moves, -0.5 * moves]).expand(5, 2, 30), -1)
    likelihood = dist.StudentT(freedom, running.mean(1), scale).to_event(2)
    pyro.sample("y", likelihood, obs=Y.expand(5, 30))


def varying_intercepts() -> None:
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    with pyro.plate("groups", 7):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(scale * z[GROUPS], 1.0).to_event(1), obs=Y)


def products_and_scatters() -> None:
    """Matrices and vectors of each chain and of all; one number a row is replaced, or
    gets another one added.
    """
    a = pyro.sample("a", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))
    b = pyro.sample("b", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    every = torch.linspace(-1, 1, 12).reshape(4, 3).to(a)
    vector = torch.tensor([1.0, -2.0, 0.5]).to(a)
    products = a @ b + a @ vector + every @ b + (b @ vector) * (b @ b)
    column = torch.tensor([2, 0, 1, 1])[:, None]
    replaced = a.scatter(1, column, a.exp()[:, :1])
    filled = a.scatter(1, column, 0.5)
    added = a.scatter_add(1, column, a.square()[:, :1])
    of_rows = torch.stack([replaced, filled, added]).sin().sum(0)
    pyro.factor("f", -products.square().sum() - (of_rows * every).sum())


def factors() -> None:
    """Products of matrices of each chain: of few and of many terms, alone and in
    batches, with a constant and with itself.
    """
    few = pyro.sample("few", dist.Normal(torch.zeros(5, 2), 1.0).to_event(2))
    many = pyro.sample("many", dist.Normal(torch.zeros(3, 12), 1.0).to_event(2))
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(2, 12), 1.0).to_event(2))
    batch = pyro.sample("batch", dist.Normal(torch.zeros(2, 3, 12), 1.0).to_event(3))
    constant = torch.linspace(-1.0, 1.0, 24).reshape(2, 12, 1).to(few)
    products = [
        few @ loadings,
        many @ loadings.T,
        many @ many.T,
        batch @ many.T,
        batch.mT @ batch,
        batch @ constant,
    ]
    pyro.factor("f", -torch.stack([p.sin().sum() for p in products]).square().sum())


MODELS = [
    factors,
    products_and_scatters,
    varying_slopes,
    mixture,
    enumerated_chain,
    network,
    ordinal,
    written_and_sorted,
    multivariate,
    of_one_number,
    heavy_tails,
]


def positions(density: Density, num_chains: int) -> Tensor:
    generator = torch.Generator(torch.empty(0).device).manual_seed(1)
    z = torch.randn(num_chains, density.dim, generator=generator, dtype=density.dtype)
    return 0.5 * z


@pytest.mark.parametrize("model", MODELS)
def test_with_the_chains_last_a_model_has_the_energies_and_gradients_of_vmap(model):
    density = Density(model, dtype=torch.float64, engine="eager")
    z = positions(density, 5)
    energy, gradient = density.energy_and_gradient(z)
    found = ChainsLast(density._eager, z[2].clone())(z.t().contiguous().t())
    torch.testing.assert_close(found[0], energy, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1], gradient, rtol=1e-9, atol=1e-9)


def shapes_of_results(model, operator) -> list[list[int]]:
    """The shapes that an operator computes for 16 chains."""
    density = Density(model, engine="eager")
    z = positions(density, 16)
    lanes = ChainsLast(density._eager, z[0].clone())
    graph = make_fx(lanes)(z.t().contiguous().t())
    nodes = graph.graph.find_nodes(op="call_function", target=operator)
    return [[*node.meta["val"].shape] for node in nodes]


def test_numbers_that_all_rows_share_are_computed_once_a_chain():
    shapes = shapes_of_results(heavy_tails, torch.ops.aten.lgamma.default)
    assert [math.prod(shape) for shape in shapes] == [16, 16]


def test_weights_that_all_rows_share_are_normalised_once_a_chain():
    """Of 30 rows there are the exponentials of the rows' own sum over components, which
    its gradient uses too, and none for the logarithm of the weights' sum.
    """
    exps = shapes_of_results(mixture, torch.ops.aten.exp.default)
    logs = shapes_of_results(mixture, torch.ops.aten.log.default)
    assert [shape for shape in exps if shape[0] == 30] == [[30, 3, 16]]
    assert [math.prod(shape) for shape in logs if shape[0] == 30] == [30 * 16]


def test_large_matrices_are_factored_with_the_chains_first():
    def model(size):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        y = dist.MultivariateNormal(torch.zeros(size), scale * torch.eye(size))
        pyro.sample("y", y, obs=torch.zeros(size))

    ChainsLast(Density(model, (5,))._eager, torch.zeros(1))
    with pytest.raises(Unavailable, match="large matrices"):
        ChainsLast(Density(model, (50,))._eager, torch.zeros(1))


needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)


@needs_compiler
def test_programs_of_many_chains_hold_them_last_and_add_to_repeated_rows_rightly():
    """PyTorch's compiler adds wrongly to an expanded tensor, in silence."""
    density = Density(varying_intercepts, engine="compiled")
    z = positions(density, 16)
    found = density.energy_and_gradient(z)
    assert density.engine == "compiled"
    assert density.fast._lanes is not None
    exact = Density(varying_intercepts, engine="eager", dtype=torch.float64)
    expected = exact.energy_and_gradient(z.double())
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-4, atol=1e-4)
    assert pickle.loads(pickle.dumps(density.fast))._lanes is None


@needs_compiler
@pytest.mark.slow
def test_a_model_that_cannot_be_traced_so_is_compiled_with_the_chains_first(
    monkeypatch,
):
    def refuse(*arguments):
        raise RuntimeError("no rule")

    monkeypatch.setattr("pyro_symmetric.density.compiled.ChainsLast", refuse)
    density = Density(of_one_number, engine="compiled")
    z = positions(density, 16)
    assert same_evaluation(density.energy_and_gradient(z), density.without_compiling(z))
    assert density.engine == "compiled"
    assert not density.fast._has_lanes


def counts_of(counts: Tensor) -> None:
    """Constants of the data are computed in advance, such as ``lgamma(y + 1)``."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(counts)):
        rate = (level + slope * counts).exp()
        pyro.sample("y", dist.Poisson(rate), obs=counts)


@needs_compiler
def test_programs_of_a_model_whose_parameters_train_are_those_of_each_step(monkeypatch):
    """They hold the chains last. Those of the last models are remembered, but not of
    large data.
    """
    monkeypatch.setattr("pyro_symmetric.density.compiled.RECENT_LANES", deque(maxlen=4))
    slope = nn.Linear(3, 1)

    def model() -> None:
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(level * slope(X)[:, 0], 1.0).to_event(1), obs=Y)

    for _ in range(3):
        with torch.no_grad():
            slope.weight += 1
        density = Density(model, engine="compiled")
        z = positions(density, 16)
        found = density.energy_and_gradient(z)
        assert density.fast._lanes is not None
        assert same_evaluation(found, density.without_compiling(z))
    assert len(compiled.RECENT_LANES) == 3
    monkeypatch.setattr("pyro_symmetric.density.lanes.MOST_REMEMBERED", 8)
    density = Density(model, engine="compiled")
    density.energy_and_gradient(z)
    assert density.fast._lanes is not None
    assert len(compiled.RECENT_LANES) == 3


@needs_compiler
def test_programs_serve_a_later_call_with_an_equal_model_and_equal_data(monkeypatch):
    """Data that changed in place, and a change of the model or of the precision, are
    compiled anew; programs of data that were there before are right again.
    """
    monkeypatch.setattr("pyro_symmetric.density.compiled.RECENT_LANES", deque(maxlen=4))
    programs = []
    original = Compiled._compile

    def counting(self, *arguments):
        programs.append(self)
        return original(self, *arguments)

    monkeypatch.setattr(Compiled, "_compile", counting)
    counts = torch.tensor([0.0, 1.0, 2.0, 5.0])

    def compiles_anew(model, **options) -> bool:
        """Tell whether programs were compiled; energies are right in any case."""
        before = len(programs)
        density = Density(model, (counts,), engine="compiled", **options)
        z = positions(density, 16)
        found = density.energy_and_gradient(z)
        assert density.fast._lanes is not None
        exact = Density(model, (counts,), engine="eager").energy_and_gradient(z.float())
        torch.testing.assert_close(found[0].float(), exact[0], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(found[1].float(), exact[1], rtol=1e-4, atol=1e-4)
        return len(programs) > before

    def scaled_model(counts):
        with pyro.poutine.scale(scale=2.0):
            counts_of(counts)

    assert compiles_anew(counts_of)
    assert not compiles_anew(counts_of)
    counts += 1
    assert compiles_anew(counts_of)
    counts -= 1
    assert not compiles_anew(counts_of)
    assert compiles_anew(scaled_model)
    assert compiles_anew(counts_of, dtype=torch.float64)
    assert not compiles_anew(counts_of)
