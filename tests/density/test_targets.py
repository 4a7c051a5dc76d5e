"""Targets: networks run in parallel threads, traced models alone; neither draws from or
switches what others use.

Data that don't fit a network are named before the chains meet them.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule, PyroSample
from pyro.poutine.runtime import _PYRO_STACK
from torch import Tensor, nn
from torch.distributions import Distribution

from pyro_symmetric import log_joint
from pyro_symmetric.density.eager import require_data
from pyro_symmetric.mcmc import Density
from pyro_symmetric.models import BayesianModel, GaussianLikelihood

X, Y = torch.linspace(-1, 1, 12).reshape(6, 2), torch.linspace(-1, 1, 6)
MEETING, GATE = threading.Event(), threading.Barrier(2)
CHECKS: list[bool] = []  # whether distributions check values while a network runs


class Meeting(nn.Module):
    """A network that isn't a chain of layers, and waits for another thread within its
    forward pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        if MEETING.is_set():
            GATE.wait(30)
            CHECKS.append(Distribution._validate_args)
        return self.linear(x).tanh() + x.sum(-1, keepdim=True)


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
def test_networks_run_in_parallel_threads_and_switch_no_check_off(likelihood):
    class Two(Meeting):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            return found if likelihood == "gaussian" else torch.cat([found, -found], -1)

    model = BayesianModel(Two(), likelihood=likelihood)
    y = Y if likelihood == "gaussian" else torch.arange(6) % 2
    densities = [Density(model, (X, y)) for _ in range(2)]  # of one and the same model
    assert all(density.engine == "eager" for density in densities)
    points = [
        density.draw_prior(3, torch.Generator(torch.empty(0).device).manual_seed(k))
        for k, density in enumerate(densities)
    ]
    alone = [
        density.energy_and_gradient(z)
        for density, z in zip(densities, points, strict=True)
    ]
    own = {name: value.clone() for name, value in model.net.named_parameters()}
    MEETING.set()
    CHECKS.clear()
    try:
        # if one waited for the other, the gate would stay shut
        with ThreadPoolExecutor(2) as threads:
            both = list(
                threads.map(
                    lambda density, z: density.energy_and_gradient(z), densities, points
                )
            )
    finally:
        MEETING.clear()
    for found, expected in zip(both, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(CHECKS) == 2
    assert all(CHECKS)
    assert all(
        torch.equal(value, own[name]) for name, value in model.net.named_parameters()
    )


def test_traced_models_run_alone_and_leave_pyros_handlers_and_checks_as_they_were():
    inside, most = [], []

    def model(y: Tensor) -> None:
        inside.append(1)
        most.append(len(inside))
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        time.sleep(1e-3)  # another thread's chance
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)
        inside.pop()

    density, joint, z = (
        Density(model, (Y,)),
        log_joint(model, Y),
        torch.linspace(-2, 2, 5)[:, None],
    )
    energy = (
        0.5 * z[:, 0].square()
        + 0.5 * (Y - z).square().sum(1)
        + 7 * 0.5 * torch.log(torch.tensor(2 * torch.pi))
    )

    def evaluate(k: int) -> Tensor:
        return density.energy_and_gradient(z)[0] if k % 2 else -joint({"loc": z[:, 0]})

    before = Distribution._validate_args
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(evaluate, range(24)))
    assert all(torch.allclose(one, energy, rtol=1e-5) for one in found)
    assert max(most) == 1
    assert _PYRO_STACK == []
    assert Distribution._validate_args == before


class Checking(PyroModule):
    """Its prior was made with checks of values, which switching the default off doesn't
    reach.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prior = (
            dist.HalfNormal(torch.ones(()), validate_args=True).expand([2]).to_event(1)
        )
        self.weight = PyroSample(self.prior)

    def forward(self, x: Tensor, y: Tensor) -> None:
        mean = x @ self.weight
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_a_chain_without_numbers_stops_no_other_and_the_users_prior_still_checks():
    model = Checking()
    density = Density(model, (X, Y))
    z = torch.tensor([[0.1, 0.2], [torch.nan, 0.0], [-0.3, 0.4]])
    energy, gradient = density.energy_and_gradient(z)
    expected = density.energy_and_gradient(z[[0, 2]])
    assert torch.equal(energy[[0, 2]], expected[0])
    assert torch.equal(gradient[[0, 2]], expected[1])
    assert energy[1].isnan()
    w = z[0].exp()  # half-normal prior, unit noise, and the transform's log-determinant
    normals = (
        0.5 * (Y - X @ w).square().sum()
        + 0.5 * w.square().sum()
        + 4 * torch.log(torch.tensor(2 * torch.pi))
    )
    assert energy[0].item() == pytest.approx(
        float(normals - 2 * torch.log(torch.tensor(2.0)) - z[0].sum()), rel=1e-5
    )
    with pytest.raises(ValueError, match="within the support"):
        model.prior.log_prob(torch.tensor([-1.0, 1.0]))


@pytest.mark.stochastic
@pytest.mark.parametrize("traced", [True, False])
def test_draws_from_the_prior_come_from_the_generator_that_is_given_and_from_no_other(
    traced,
):
    def scales() -> None:
        pyro.sample("loc", dist.Normal(torch.tensor([1.0, -1.0]), 2.0).to_event(1))

    net = BayesianModel(nn.Linear(1, 1), prior=2.0, likelihood="gaussian")
    density = Density(scales) if traced else Density(net, (X[:, :1], Y))
    before = torch.get_rng_state()
    generator = torch.Generator(torch.empty(0).device).manual_seed(3)
    first, second = (
        density.draw_prior(400, generator),
        density.draw_prior(400, generator),
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(
        density.draw_prior(400, torch.Generator(torch.empty(0).device).manual_seed(3)),
        first,
    )
    assert not torch.equal(first, second)
    both = torch.cat([first, second])[:, :2]
    mean = torch.tensor([1.0, -1.0]) if traced else torch.zeros(2)
    # Of 800 normal draws, the mean is off by 5 and the deviation by 5 standard errors
    # with probability below 1e-5.
    assert ((both.mean(0) - mean).abs() < 5 * 2 / 800**0.5).all()
    assert ((both.std(0) - 2).abs() < 5 * 2 / 1600**0.5).all()


def test_a_log_joint_takes_any_batch_shape():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)

    x, y, w = torch.randn(10, 3), torch.randn(10), torch.randn(2, 5, 3)
    density = log_joint(model, x, y)
    expected = dist.Normal(0.0, 1.0).log_prob(w).sum(-1) + dist.Normal(
        w @ x.T, 1.0
    ).log_prob(y).sum(-1)
    torch.testing.assert_close(density({"w": w}), expected)
    torch.testing.assert_close(density({"w": w[1, 2]}), expected[1, 2])


def test_priors_of_plain_numbers_are_evaluated_in_the_precision_of_the_weights():
    from scipy import stats

    def model():
        pyro.sample("rate", dist.Gamma(25.0, 0.4))
        pyro.sample("scale", dist.HalfCauchy(0.3))

    values = torch.tensor([0.123456789012345, 7.0], dtype=torch.float64)
    found = log_joint(model)({"rate": values, "scale": values})
    expected = stats.gamma.logpdf(values, 25, scale=1 / 0.4) + stats.halfcauchy.logpdf(
        values, scale=0.3
    )
    torch.testing.assert_close(found, torch.as_tensor(expected), rtol=1e-14, atol=0)
    assert (
        log_joint(model)({"rate": values.float(), "scale": values.float()}).dtype
        == torch.float32
    )
    assert torch.get_default_dtype() == torch.float32


# data that don't fit a network --------------------------------------------------------

ROWS, LABELS = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def classifier(**options):
    return BayesianModel(nn.Sequential(nn.Linear(4, 3)), **options)


def regression(outputs):
    return BayesianModel(nn.Linear(4, outputs), likelihood=GaussianLikelihood(0.5))


@pytest.mark.parametrize(
    ("model", "x", "y", "message"),
    [
        (classifier(), ROWS, LABELS[:5], "x has 6 rows but y has 5"),
        (BayesianModel(nn.Linear(4, 1)), ROWS, LABELS % 2, "one output.*at least 2"),
        (classifier(), ROWS, LABELS.float(), r"pass y.long\(\)"),
        (
            classifier(),
            ROWS,
            LABELS + 1,
            "labels from 1 to 3, but the network has 3 outputs",
        ),
        (regression(1), ROWS, torch.full((6,), torch.nan), "y contains NaN"),
        (
            regression(2),
            ROWS,
            torch.randn(6),
            r"outputs \(6, 2\) it must have shape \(6, 2\)",
        ),
    ],
)
def test_what_does_not_fit_is_named(model, x, y, message):
    with pytest.raises(ValueError, match=message):
        require_data(model, x, y)


def test_labels_of_any_whole_kind_have_the_density_of_long_ones():
    z = torch.randn(2, 15)
    expected = Density(classifier(), args=(ROWS, LABELS)).energy(z)
    for y in (LABELS.int(), LABELS.to(torch.uint8)):
        assert torch.allclose(Density(classifier(), args=(ROWS, y)).energy(z), expected)
    flags = LABELS > 0
    assert torch.allclose(
        Density(classifier(), args=(ROWS, flags)).energy(z),
        Density(classifier(), args=(ROWS, flags.long())).energy(z),
    )


def test_a_network_made_for_one_number_of_rows_is_asked_for_all_of_them():
    class AllAtOnce(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x.view(6, 4))

    require_data(BayesianModel(AllAtOnce()), ROWS, LABELS)
