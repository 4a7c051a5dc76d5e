"""Fast evaluation of networks: the energy and gradient of every chain equal a loop with autograd, by any engine."""

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor, nn
from torch.func import functional_call

from pyro_symmetric.likelihoods import CategoricalLikelihood, GaussianLikelihood, HeteroscedasticLikelihood
from pyro_symmetric.mcmc import HMC, Density, sample
from pyro_symmetric.mcmc.density.engine import Unavailable
from pyro_symmetric.mcmc.density.feedforward import read_layers
from pyro_symmetric.mcmc.density.native.compiler import library
from pyro_symmetric.mcmc.density.targets import NetworkTarget
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.models import BayesianModel, GaussianPrior


def has_compiler() -> bool:
    try:
        library()
    except Unavailable:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
ENGINES = [pytest.param("native", marks=[needs_compiler, pytest.mark.cpu]), "torch"]


def data(rows: int = 37, inputs: int = 5, outputs: int = 1, classes: int = 0, dtype=torch.float64):
    x = torch.randn(rows, inputs, dtype=dtype)
    y = torch.randint(classes, (rows,)) if classes else torch.randn(rows, outputs, dtype=dtype).squeeze(-1)
    return x, y


def loop(model: BayesianModel, x: Tensor, y: Tensor, z: Tensor, density: Density, rows: Tensor | None = None):
    """Energy and gradient, chain by chain: Normal and Categorical by formula, everything else by the definition."""
    energies, gradients = [], []
    for chain, row in enumerate(z):
        own_x, own_y = (x, y) if rows is None else (x[rows[chain]], y[rows[chain]])
        leaf = row.clone().requires_grad_()
        weights, log_det = density.layout.constrain_with_log_det(leaf)
        outputs = functional_call(model.net, {n: weights[n] for n, _ in model.net.named_parameters()}, (own_x,))
        likelihood = model.likelihood
        if isinstance(likelihood, CategoricalLikelihood):
            loss = nn.functional.cross_entropy(outputs, own_y, reduction="sum")
        elif isinstance(likelihood, HeteroscedasticLikelihood):
            mean, raw = outputs[:, : outputs.shape[1] // 2], outputs[:, outputs.shape[1] // 2 :]
            noise = (1 + raw.exp()).log() + 1e-6
            error = (mean.reshape(own_y.shape) - own_y) / noise.reshape(own_y.shape)
            loss = 0.5 * error.square().sum() + (noise.log() + 0.5 * math.log(2 * math.pi)).sum()
        else:
            noise = (
                weights["noise_scale"] if likelihood.scale is None else torch.tensor(likelihood.scale, dtype=z.dtype)
            )
            error = (outputs.reshape(own_y.shape) - own_y) / noise
            loss = (0.5 * error.square() + noise.log() + 0.5 * math.log(2 * math.pi)).sum()
        prior = sum(fn.log_prob(weights[name]) for name, fn in model.priors().items())
        energy = len(x) / len(own_x) / likelihood.temperature * loss - prior - log_det
        energies.append(energy.detach())
        gradients.append(torch.autograd.grad(energy, leaf)[0])
    return torch.stack(energies), torch.stack(gradients)


def check(model: BayesianModel, x: Tensor, y: Tensor, engine: str, by_hand: bool = True, **options):
    density = Density(model, args=(x, y), engine=engine, dtype=x.dtype, **options)
    assert density.engine == ("torch" if engine == "auto" else engine), repr(density)
    assert (density._fast is not None) == by_hand, repr(density)
    rows = None
    z = starting_points(density, 7, "prior")
    if density.row_counts:
        total, size = density.row_counts["rows"]
        rows = torch.stack([torch.randperm(total)[:size] for _ in z])
    found = density.energy_and_gradient(z, None if rows is None else {"rows": rows})
    expected = loop(model, x, y, z, density, rows)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4}[x.dtype]
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == x.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()
    return density, z, found


NATIVE = {
    "relu": nn.ReLU(),
    "leaky": nn.LeakyReLU(0.2),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "silu": nn.SiLU(),
    "elu": nn.ELU(0.7),
}
BATCHED = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU("tanh"),
    "softplus": nn.Softplus(2.0),
    "hardtanh": nn.Hardtanh(-1, 2),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", NATIVE)
def test_every_activation_equals_a_loop_over_chains(name, dtype, engine):
    net = nn.Sequential(nn.Linear(5, 7), NATIVE[name], nn.Linear(7, 6), NATIVE[name], nn.Linear(6, 1)).to(dtype)
    check(BayesianModel(net, likelihood=GaussianLikelihood(0.5)), *data(dtype=dtype), engine)
    net[-1] = nn.Linear(6, 3, dtype=dtype)
    check(BayesianModel(net), *data(classes=3, dtype=dtype), engine)


@pytest.mark.parametrize("name", BATCHED)
def test_activations_without_native_code_run_batched(name):
    net = nn.Sequential(nn.Linear(5, 7), BATCHED[name], nn.Linear(7, 6), BATCHED[name], nn.Linear(6, 3)).double()
    check(BayesianModel(net), *data(classes=3), "auto")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rows", [1, 16, 300, 531])
@pytest.mark.parametrize("inputs", [1, 8, 21])
def test_any_number_of_rows_and_inputs(rows, inputs, engine):
    net = nn.Sequential(nn.Linear(inputs, 13), nn.Tanh(), nn.Linear(13, 2, bias=False)).double()
    model = BayesianModel(net, GaussianPrior(fan_in=True), GaussianLikelihood(0.3))
    check(model, *data(rows, inputs, outputs=2), engine)


def laplace_or_shifted(name: str, parameter: Tensor) -> dist.TorchDistribution:
    like = torch.ones_like(parameter)
    fn = dist.Laplace(0 * like, like) if name == "0.weight" else dist.Normal(0.3 * like, like)
    return fn.to_event(parameter.dim())


def positive_head(name: str, parameter: Tensor) -> dist.TorchDistribution:
    like = torch.ones_like(parameter)
    fn = dist.HalfNormal(like) if name == "2.weight" else dist.Normal(0 * like, like)
    return fn.to_event(parameter.dim())


def shifted(name: str, parameter: Tensor) -> dist.TorchDistribution:
    like = torch.ones_like(parameter)
    return dist.Normal(0.3 * like, 0.5 * like).to_event(parameter.dim())


PRIORS = {
    "fan_in": GaussianPrior(2.0, fan_in=True),
    "patterns": GaussianPrior(1.0, scales={"0.*": 0.5, "*.bias": 2.0}),
    "shifted": shifted,
    "laplace": laplace_or_shifted,
    "positive": positive_head,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("batch_size", [None, 9])
def test_priors_noise_temperature_and_mini_batches(prior, batch_size, engine):
    options = {} if batch_size is None else {"batch_size": batch_size, "subsampled": True}
    for likelihood, classes in (
        (GaussianLikelihood(prior_scale=0.7, temperature=0.5), 0),
        (GaussianLikelihood(0.2, temperature=3.0), 0),
        (CategoricalLikelihood(temperature=0.1), 4),
    ):
        net = nn.Sequential(nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, classes or 1)).double()
        check(BayesianModel(net, PRIORS[prior], likelihood), *data(classes=classes), engine, **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("targets", [1, 3])
@pytest.mark.parametrize("batch_size", [None, 9])
def test_noise_that_the_network_gives(targets, engine, batch_size):
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2 * targets)).double()
    options = {} if batch_size is None else {"batch_size": batch_size, "subsampled": True}
    model = BayesianModel(net, 0.5, HeteroscedasticLikelihood(temperature=0.7))
    check(model, *data(outputs=targets), engine, **options)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "likelihood",
    [CategoricalLikelihood(), GaussianLikelihood(0.3), GaussianLikelihood(prior_scale=0.7)],
    ids=["categorical", "fixed noise", "learnt noise"],
)
def test_any_engine_equals_the_mapped_gradient_of_pyros_own_log_joint(likelihood, engine):
    classes = 4 if isinstance(likelihood, CategoricalLikelihood) else 0
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, classes or 1)).double()
    model, (x, y) = BayesianModel(net, GaussianPrior(fan_in=True), likelihood), data(classes=classes)
    density = Density(model, args=(x, y), engine=engine)

    def stock(z: Tensor) -> Tensor:
        weights, log_det = density.layout.constrain_with_log_det(z)
        return -poutine.trace(poutine.condition(model, weights)).get_trace(x, y).log_prob_sum() - log_det

    z = starting_points(density, 9)
    with pyro.validation_enabled(False):
        gradient, energy = torch.func.vmap(torch.func.grad_and_value(stock))(z)
    found = density.energy_and_gradient(z)
    assert torch.allclose(found[0], energy, rtol=1e-12)
    assert torch.allclose(found[1], gradient, rtol=1e-10, atol=1e-10 * float(gradient.abs().max()))


class Written(nn.Module):
    """A network written by hand, with inputs to flatten and outputs without a second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Dropout(0.5), nn.Identity())
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.leaky_relu(self.body(torch.flatten(x, 1)), 0.3)).squeeze(-1)


class WrittenWithAxis(Written):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.elu(self.body(x.flatten(1)), alpha=0.5))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [Written, WrittenWithAxis])
def test_modules_written_by_hand_are_read_from_their_graph(kind, engine):
    x, y = data(inputs=6)
    check(BayesianModel(kind().double(), likelihood="gaussian"), x.reshape(-1, 2, 3), y, engine)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.tanh(self.inner(x)))


class Branching(Residual):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x)) if x.sum().isfinite() else x)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_network_of_one_layer_is_a_network(engine):
    check(BayesianModel(nn.Linear(5, 3).double()), *data(classes=3), engine)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def tied() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1))
    net[2].weight = net[0].weight
    return net


def hooked() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1))
    net[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return net


OTHERS = {
    "residual": (Residual, "doesn't follow"),
    "branching": (Branching, "can't be traced (TraceError)"),
    "subclass": (lambda: nn.Sequential(Doubled(5, 1)), "doesn't follow"),
    "shared": (tied, "share parameters"),
    "normalised": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).eval(), "BatchNorm1d"),
    "layer_norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 1)), "LayerNorm"),
    "hooked": (hooked, "differs from the model's own"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks_say_why_and_keep_their_own_density(name):
    make, reason = OTHERS[name]
    density, _, _ = check(BayesianModel(make().double(), likelihood="gaussian"), *data(), "auto", False)
    assert reason in repr(density)


def test_convolutions_run_under_vmap():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).double()
    x, y = data(rows=9, inputs=16, classes=3)
    check(BayesianModel(net), x.reshape(9, 1, 4, 4), y, "auto", False)


def test_custom_likelihoods_and_odd_data_keep_the_models_own_density():
    class Colder(CategoricalLikelihood):
        pass

    net = nn.Sequential(nn.Linear(5, 3)).double()
    x, y = data(classes=3)
    assert "its likelihood is a Colder" in Density(BayesianModel(net, likelihood=Colder()), args=(x, y)).engine_reason
    with pytest.raises(ValueError, match="labels from"):
        Density(BayesianModel(net), args=(x, y + 1))


@pytest.mark.parametrize("engine", ENGINES)
def test_ragged_numbers_of_chains_and_chunks_agree(engine):
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    x, y = data(classes=3)
    density = Density(BayesianModel(net), args=(x, y), engine=engine, chain_chunk=4)
    z = starting_points(density, 11)
    energy, gradient = density.energy_and_gradient(z)
    for count in (1, 3, 4, 5, 8):
        part = density.energy_and_gradient(z[:count])
        assert torch.allclose(part[0], energy[:count], rtol=1e-12)
        assert torch.allclose(part[1], gradient[:count], rtol=1e-10, atol=1e-10)
    strided = torch.cat([z, z], 1)[:, : z.shape[1]]
    assert torch.equal(density.energy_and_gradient(strided)[1], gradient)
    assert torch.allclose(density.energy(z), energy, rtol=1e-12)


@pytest.mark.cpu
@needs_compiler
def test_a_chains_native_gradient_is_the_same_to_the_last_bit_whatever_runs_beside_it():
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x, y = data(rows=400, classes=3, dtype=torch.float32)
    density = Density(BayesianModel(net), args=(x, y))
    z = starting_points(density, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = density.energy_and_gradient(z)
        alone = density.energy_and_gradient(z[5:6])
        density._fast._loss._flops = 1e12  # enough work that threads are worth their start
        torch.set_num_threads(3)
        three = density.energy_and_gradient(z)
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(one, three, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[5:6], c)


@pytest.mark.parametrize("engine", ENGINES)
def test_results_outlive_later_calls(engine):
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1)).double()
    for likelihood in ("gaussian", GaussianLikelihood(0.1)):
        density, z, (energy, gradient) = check(BayesianModel(net, likelihood=likelihood), *data(), engine)
        kept = energy.clone(), gradient.clone(), z.clone()
        density.energy_and_gradient(z + 1)
        assert torch.equal(energy, kept[0])
        assert torch.equal(gradient, kept[1])
        assert torch.equal(z, kept[2])
        assert not gradient.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("classes", [0, 3])
def test_infinite_and_absurd_weights_spoil_their_own_chain_only(classes, engine, dtype):
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, classes or 1)).to(dtype)
    x, y = data(classes=classes, dtype=dtype)
    likelihood = "categorical" if classes else "gaussian"
    density = Density(BayesianModel(net, likelihood=likelihood), args=(x, y), engine=engine)
    z = starting_points(density, 6)
    expected = density.energy_and_gradient(z)
    spoilt = z.clone()
    spoilt[1, 3], spoilt[2, 0], spoilt[4] = math.nan, math.inf, 1e200 if dtype == torch.float64 else 1e30
    energy, gradient = density.energy_and_gradient(spoilt)
    for found, right in ((energy, expected[0]), (gradient, expected[1])):
        assert torch.allclose(found[[0, 3, 5]], right[[0, 3, 5]], rtol=1e-5)
    assert not torch.isfinite(energy[[1, 2, 4]]).any()


@pytest.mark.cpu
@needs_compiler
def test_mini_batches_outside_of_the_data_are_refused():
    net = nn.Sequential(nn.Linear(5, 3)).double()
    x, y = data(classes=3)
    density = Density(BayesianModel(net), args=(x, y), batch_size=4, subsampled=True)
    z = starting_points(density, 2)
    for bad in (-1, len(x)):
        with pytest.raises(IndexError, match=f"between 0 and {len(x) - 1}"):
            density.energy_and_gradient(z, {"rows": torch.full((2, 4), bad)})
    other = density.energy_and_gradient(
        z, {"rows": torch.arange(5).expand(2, 5)}
    )  # another size: the model's own density
    assert torch.allclose(other[1], loop(density.target.model, x, y, z, density, torch.arange(5).expand(2, 5))[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_potentials_can_be_copied_and_sent(engine):
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    density = Density(BayesianModel(net), args=data(classes=3, dtype=torch.float32), engine=engine)
    z = starting_points(density, 3)
    expected = density.energy_and_gradient(z)
    for other in (copy.deepcopy(density), pickle.loads(pickle.dumps(density))):
        assert torch.equal(other.energy_and_gradient(z)[1], expected[1])


@pytest.mark.cpu
def test_the_default_chunk_depends_on_the_size_of_the_model_alone():
    small = Density(BayesianModel(nn.Sequential(nn.Linear(5, 3))), args=data(classes=3, dtype=torch.float32))
    wide = nn.Sequential(nn.Linear(5, 500), nn.ReLU(), nn.Linear(500, 3))
    large = Density(BayesianModel(wide), args=data(rows=2000, classes=3, dtype=torch.float32), engine="torch")
    assert small.chain_chunk >= 1024
    assert large.chain_chunk == 1  # 500 x 2,000 numbers of four bytes fill the cache by themselves


@pytest.mark.parametrize("engine", ENGINES)
def test_a_posterior_tells_which_engine_served_it_and_why_no_faster_one(engine):
    model, (x, y) = BayesianModel(nn.Linear(5, 3)), data(classes=3, dtype=torch.float32)
    options = {"num_chains": 2, "num_warmup": 1, "num_samples": 2, "engine": engine, "progress": False}
    metadata = sample(HMC(model, step_size=1e-3, num_steps=1), x, y, **options).metadata
    assert metadata["engine"] == engine
    assert metadata["engine_reason"] == ("" if engine == "native" else "engine='torch'")


def test_the_network_target_is_what_networks_use():
    assert isinstance(
        Density(BayesianModel(nn.Linear(5, 3)), args=data(classes=3, dtype=torch.float32)).target, NetworkTarget
    )


def test_modules_of_other_threads_are_called_as_ever_while_a_network_is_read():
    class Slow(nn.Module):
        def forward(self, x):
            found.extend(threads.submit(other, torch.ones(1, 2)).result() for _ in range(20))
            return self.layer(x)

        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

    found, other = [], nn.Sequential(nn.Linear(2, 3), nn.Tanh())
    with ThreadPoolExecutor(1) as threads:
        assert len(read_layers(Slow())) == 1
    assert all(torch.equal(value, other(torch.ones(1, 2))) for value in found)
    assert len(found) == 20


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("likelihood", "outputs", "classes"),
    [
        (GaussianLikelihood(scale=0.4), 2, 0),
        (GaussianLikelihood(), 1, 0),  # whose noise is learnt
        (CategoricalLikelihood(), 3, 3),
        (HeteroscedasticLikelihood(), 2, 0),
    ],
    ids=["known noise", "learnt noise", "labels", "noise by the network"],
)
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_gradient_without_its_energy_is_the_same(likelihood, outputs, classes, chunk, engine):
    net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    x, y = data(20, outputs=1 if isinstance(likelihood, HeteroscedasticLikelihood) else outputs, classes=classes)
    model = BayesianModel(net, prior=GaussianPrior(0.7), likelihood=likelihood, num_data=20)
    options = {"engine": engine, "chain_chunk": chunk}
    for batch_size in (None, 6):
        density = Density(model, (x, y), batch_size=batch_size, subsampled=True, **options)
        assert density.engine == engine
        z = 0.3 * torch.randn(5, density.dim, dtype=torch.float64)
        rows = None if batch_size is None else {"rows": torch.randint(20, (5, batch_size))}
        torch.testing.assert_close(density.gradient(z, rows), density.energy_and_gradient(z, rows)[1])
        torch.testing.assert_close(density.gradient(z, rows), density.without_compiling(z, rows)[1])
