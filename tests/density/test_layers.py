"""Engine "layers": energy and gradient of every chain equal a loop with autograd, by
tiles and by batched products.
"""

import copy
import math
import pickle

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_symmetric.density import layers
from pyro_symmetric.density.layers import Prior, Problem, Tiles, read_layers
from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.models import (
    BayesianModel,
    CategoricalLikelihood,
    GaussianLikelihood,
    GaussianPrior,
)


@pytest.fixture(params=[pytest.param("tiles", marks=pytest.mark.cpu), "products"])
def way(request, monkeypatch):
    """One way of evaluating a network's loss."""
    if request.param == "products":
        monkeypatch.setattr(layers, "is_tiled", lambda problem: False)
    return request.param


def data(
    rows: int = 37,
    inputs: int = 5,
    outputs: int = 1,
    classes: int = 0,
    dtype=torch.float64,
):
    x = torch.randn(rows, inputs, dtype=dtype)
    y = (
        torch.randint(classes, (rows,))
        if classes
        else torch.randn(rows, outputs, dtype=dtype).squeeze(-1)
    )
    return x, y


def by_pyro(
    model: BayesianModel,
    x: Tensor,
    y: Tensor,
    z: Tensor,
    density: Density,
    rows: Tensor | None = None,
):
    """Energy and gradient of Pyro's own log joint, chain by chain."""
    model.num_data = len(x)  # of which a mini-batch's rows are so many
    energies, gradients = [], []
    for chain, row in enumerate(z):
        part = slice(None) if rows is None else rows[chain]
        leaf = row.clone().requires_grad_()
        weights, log_det = density.layout.constrain_with_log_det(leaf)
        trace = poutine.trace(poutine.condition(model, weights)).get_trace(
            x[part], y[part]
        )
        energy = -trace.log_prob_sum() - log_det
        energies.append(energy.detach())
        gradients.append(torch.autograd.grad(energy, leaf)[0])
    return torch.stack(energies), torch.stack(gradients)


def check(model: BayesianModel, x: Tensor, y: Tensor, by_hand: bool = True, **options):
    density = Density(model, args=(x, y), dtype=x.dtype, **options)
    assert density.engine == ("layers" if by_hand else "eager"), repr(density)
    rows = None
    z = starting_points(density, 7, "prior")
    if density.row_counts:
        total, size = density.row_counts["rows"]
        rows = torch.stack([torch.randperm(total)[:size] for _ in z])
    found = density.energy_and_gradient(z, None if rows is None else {"rows": rows})
    expected = by_pyro(model, x, y, z, density, rows)
    tolerance = {torch.float64: 1e-10, torch.float32: 2e-4}[x.dtype]
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == x.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()
    return density, z, found


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "silu": nn.SiLU(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_equals_a_loop_over_chains(name, dtype, way):
    activation = ACTIVATIONS[name]
    net = nn.Sequential(
        nn.Linear(5, 7), activation, nn.Linear(7, 11), activation, nn.Linear(11, 1)
    ).to(dtype)
    density, _, _ = check(
        BayesianModel(net, likelihood=GaussianLikelihood(0.5)), *data(dtype=dtype)
    )
    assert (density.fast.tiles is not None) == (way == "tiles")
    net[-1] = nn.Linear(11, 3, dtype=dtype)
    check(BayesianModel(net), *data(classes=3, dtype=dtype))


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 6e-7), (torch.float64, 2e-15)]
)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_and_their_slopes_are_right_to_rounding_wherever_the_input_is(
    name, dtype, tolerance
):
    # One row, x = 1, weights (w, 1): the loss is f(w)² / 2, its gradients are f(w)
    # f'(w) and f(w)².
    net = nn.Sequential(
        nn.Linear(1, 1, bias=False), ACTIVATIONS[name], nn.Linear(1, 1, bias=False)
    ).to(dtype)
    w = torch.cat(
        [
            torch.linspace(-120, 120, 20_001),
            torch.linspace(-1, 1, 20_001),
            torch.tensor([1e4, -1e4]),
        ]
    )
    w = torch.stack([w, torch.ones_like(w)], 1).to(dtype)
    one, zero = torch.ones(1, 1, dtype=dtype), torch.zeros(1, 1, dtype=dtype)
    flat = torch.zeros(2, dtype=dtype)
    problem = Problem(read_layers(net, one), one, zero, False)
    tiles = Tiles(problem, Prior(flat, flat, 0.0, 0.0, 1.0))
    loss, gradient = tiles(w, 1.0, None)
    exact = w[:, 0].double().requires_grad_()
    value = ACTIVATIONS[name](exact)
    (slope,) = torch.autograd.grad(value.sum(), exact)
    value = value.detach()
    size = value.abs().clamp(min=1)
    assert ((loss - 0.5 * value.square()).abs() <= tolerance * size.square()).all()
    assert ((gradient[:, 0] - value * slope).abs() <= 2 * tolerance * size).all()
    assert (
        (gradient[:, 1] - value.square()).abs() <= 2 * tolerance * size.square()
    ).all()


@pytest.mark.parametrize("rows", [1, 128, 531])
@pytest.mark.parametrize("inputs", [1, 21])
def test_any_number_of_rows_and_inputs(rows, inputs, way):
    net = nn.Sequential(
        nn.Linear(inputs, 13), nn.Tanh(), nn.Linear(13, 2, bias=False)
    ).double()
    model = BayesianModel(net, GaussianPrior(fan_in=True), GaussianLikelihood(0.3))
    check(model, *data(rows, inputs, outputs=2))


def positive_head(name: str, parameter: Tensor) -> dist.TorchDistribution:
    like = torch.ones_like(parameter)
    fn = dist.HalfNormal(like) if name == "2.weight" else dist.Normal(0 * like, like)
    return fn.to_event(parameter.dim())


def shifted(name: str, parameter: Tensor) -> dist.TorchDistribution:
    like = torch.ones_like(parameter)
    return dist.Normal(0.3 * like, 0.5 * like).to_event(parameter.dim())


def of_plain_numbers(name: str, parameter: Tensor) -> dist.TorchDistribution:
    # in single precision
    return dist.Normal(0.25, 1.0).expand(parameter.shape).to_event(parameter.dim())


PRIORS = {
    "plain": of_plain_numbers,
    "fan_in": GaussianPrior(2.0, fan_in=True),
    "patterns": GaussianPrior(1.0, scales={"0.*": 0.5, "*.bias": 2.0}),
    "shifted": shifted,
    "positive": positive_head,
}


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("batch_size", [None, 9])
def test_priors_noise_temperature_and_mini_batches(prior, batch_size, way):
    options = (
        {} if batch_size is None else {"batch_size": batch_size, "subsampled": True}
    )
    for likelihood, classes in (
        (GaussianLikelihood(prior_scale=0.7, temperature=0.5), 0),
        (GaussianLikelihood(0.2, temperature=3.0), 0),
        (CategoricalLikelihood(temperature=0.1), 4),
    ):
        net = nn.Sequential(
            nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, classes or 1)
        ).double()
        model = BayesianModel(net, PRIORS[prior], likelihood)
        # which the model itself serves
        check(model, *data(classes=classes), prior != "positive", **options)


def test_data_and_priors_may_require_gradients(way):
    def prior(name: str, parameter: Tensor) -> dist.TorchDistribution:
        return dist.Normal(0.0, torch.ones_like(parameter).requires_grad_()).to_event(
            parameter.dim()
        )

    x, y = data()
    check(
        BayesianModel(nn.Linear(5, 1).double(), prior, "gaussian"),
        x.requires_grad_(),
        y.requires_grad_(),
    )


class Written(nn.Module):
    """A network written by hand, with inputs to flatten and outputs without a second
    axis.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, 5, bias=False), nn.Dropout(0.5), nn.Identity()
        )
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(torch.flatten(x, 1)))).squeeze(-1)


def test_modules_written_by_hand_are_read_from_their_graph(way):
    x, y = data(inputs=6)
    check(
        BayesianModel(Written().double(), likelihood="gaussian"), x.reshape(-1, 2, 3), y
    )


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + torch.tanh(self.inner(x)))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def tied() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1))
    net[2].weight = net[0].weight
    return net


OTHERS = {
    "calls add": Residual,
    "calls mul": lambda: nn.Sequential(Doubled(5, 1)),
    "share parameters": tied,
    "layer_norm": lambda: nn.Sequential(
        nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 1)
    ),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_other_networks_say_why_and_keep_their_own_density(reason):
    density, _, _ = check(
        BayesianModel(OTHERS[reason]().double(), likelihood="gaussian"),
        *data(),
        by_hand=False,
    )
    assert reason in repr(density)


def test_ragged_numbers_of_chains_and_chunks_agree(way):
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
    x, y = data(classes=3)
    density = Density(BayesianModel(net), args=(x, y), chain_chunk=4)
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
@pytest.mark.parametrize("width", [5, 800])
def test_a_loop_takes_all_chains_at_once_and_batched_products_as_many_as_fit(width):
    """Threads share the chains of a loop."""
    net = nn.Sequential(nn.Linear(400, width), nn.Tanh(), nn.Linear(width, 1))
    x, y = torch.randn(3000, 400), torch.randn(3000)
    model = BayesianModel(net, likelihood=GaussianLikelihood(1.0))
    density = Density(model, args=(x, y), engine="layers")
    is_loop = density.fast.tiles is not None
    assert is_loop == (width == 5)
    assert (density.chain_chunk is None) == is_loop


def test_a_chains_tiled_gradient_is_the_same_to_the_last_bit_whatever_runs_beside_it():
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x, y = data(rows=400, classes=3, dtype=torch.float32)
    density = Density(BayesianModel(net), args=(x, y))
    z = starting_points(density, 64)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = density.energy_and_gradient(z)
        alone = density.energy_and_gradient(z[5:6])
        # enough work that threads are worth their start
        density.fast.tiles._flops = 1e12
        torch.set_num_threads(3)
        three = density.energy_and_gradient(z)
    finally:
        torch.set_num_threads(threads)
    for a, b, c in zip(one, three, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[5:6], c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [0, 3])
def test_infinite_and_absurd_weights_spoil_their_own_chain_only(classes, way, dtype):
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, classes or 1)).to(
        dtype
    )
    x, y = data(classes=classes, dtype=dtype)
    likelihood = "categorical" if classes else "gaussian"
    density = Density(BayesianModel(net, likelihood=likelihood), args=(x, y))
    z = starting_points(density, 6)
    expected = density.energy_and_gradient(z)
    spoilt = z.clone()
    spoilt[1, 3], spoilt[2, 0], spoilt[4] = (
        math.nan,
        math.inf,
        1e200 if dtype == torch.float64 else 1e30,
    )
    energy, gradient = density.energy_and_gradient(spoilt)
    for found, right in ((energy, expected[0]), (gradient, expected[1])):
        assert torch.allclose(found[[0, 3, 5]], right[[0, 3, 5]], rtol=1e-5)
    assert not torch.isfinite(energy[[1, 2, 4]]).any()


@pytest.mark.cpu
def test_mini_batches_outside_of_the_data_are_refused():
    net = nn.Sequential(nn.Linear(5, 3)).double()
    x, y = data(classes=3)
    density = Density(BayesianModel(net), args=(x, y), batch_size=4, subsampled=True)
    z = starting_points(density, 2)
    for bad in (-1, len(x)):
        with pytest.raises(IndexError, match=f"between 0 and {len(x) - 1}"):
            density.energy_and_gradient(z, {"rows": torch.full((2, 4), bad)})
    # of another size
    other = density.energy_and_gradient(z, {"rows": torch.arange(5).expand(2, 5)})
    assert torch.allclose(
        other[1],
        by_pyro(density.target.model, x, y, z, density, torch.arange(5).expand(2, 5))[
            1
        ],
    )


def test_potentials_can_be_copied_and_sent(way):
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    density = Density(BayesianModel(net), args=data(classes=3, dtype=torch.float32))
    z = starting_points(density, 3)
    expected = density.energy_and_gradient(z)
    for other in (copy.deepcopy(density), pickle.loads(pickle.dumps(density))):
        assert torch.equal(other.energy_and_gradient(z)[1], expected[1])
