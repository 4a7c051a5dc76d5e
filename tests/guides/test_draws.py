"""Draws of symmetrised guides are those of their density, and training is unchanged."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroModule
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric._process import forked

DRAWS = 600
PLACES = torch.tensor([-4.0, 0.0, 5.0])
SHAPES = {"weights": torch.Size([3]), "locs": torch.Size([3])}
GROUP = ps.Group.declare({"weights": ("k",), "locs": ("k",)}, SHAPES)
DATA = torch.tensor([-4.2, -3.9, 0.1, 5.0, 4.8])


def mixture(data: Tensor = DATA) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 5.0).to_event(1))
    kinds = dist.Categorical(weights.unsqueeze(-2))
    rows = dist.MixtureSameFamily(kinds, dist.Normal(locs.unsqueeze(-2), 1.0))
    with pyro.plate("data", len(data)):
        pyro.sample("x", rows, obs=data)


def by_hand(data: Tensor = DATA) -> None:
    concentration = pyro.param("concentration", torch.tensor([20.0, 10.0, 15.0]))
    locs = pyro.param("places", PLACES.clone())
    pyro.sample("weights", dist.Dirichlet(concentration))
    pyro.sample("locs", dist.Normal(locs, 0.3).to_event(1))


class Module(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(PLACES.clone())

    def forward(self, data: Tensor = DATA) -> None:
        pyro.sample("weights", dist.Dirichlet(torch.tensor([20.0, 10.0, 15.0])))
        pyro.sample("locs", dist.Normal(self.places, 0.3).to_event(1))


def automatic(base: Any = pyro.infer.autoguide.AutoDiagonalNormal) -> Any:
    start = {"weights": torch.tensor([0.5, 0.2, 0.3]), "locs": PLACES}
    return ps.AutoSymmetrized(
        mixture, GROUP, base, init_loc_fn=lambda site: start[site["name"]].clone()
    ).setup(DATA)


def one_by_one(guide: Any) -> dict[str, Tensor]:
    traces = [pyro.poutine.trace(guide).get_trace(DATA) for _ in range(DRAWS)]
    return {
        site: torch.stack([trace.nodes[site]["value"] for trace in traces]).detach()
        for site in SHAPES
    }


def predicted(guide: Any, parallel: bool) -> dict[str, Tensor]:
    draw = Predictive(
        mixture,
        guide=guide,
        num_samples=DRAWS,
        parallel=parallel,
        return_sites=list(SHAPES),
    )
    draws = draw(DATA)
    return {site: draws[site].reshape(DRAWS, 3) for site in SHAPES}


WAYS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "call": lambda: one_by_one(automatic()),
    "Predictive": lambda: predicted(automatic(), False),
    "Predictive, parallel": lambda: predicted(automatic(), True),
    "sample_posterior": lambda: automatic().sample_posterior((DRAWS,)),
    "sample_posterior of guides": lambda: ps.guides.sample_posterior(
        automatic(), (DRAWS,)
    ),
    "get_posterior": lambda: (
        guide := automatic(),
        guide.unpack(guide.get_posterior().sample((DRAWS,))),
    )[1],
    "by hand": lambda: one_by_one(ps.symmetrize(by_hand, GROUP)),
    "by hand, parallel": lambda: predicted(ps.symmetrize(by_hand, GROUP), True),
    "module": lambda: one_by_one(ps.symmetrize(Module(), GROUP)),
}


@pytest.mark.stochastic
@pytest.mark.parametrize("way", WAYS)
def test_draws_are_those_of_the_symmetrised_density(way: str) -> None:
    """False alarms at 1 in 10^6; draws of one copy have a p-value below 10^-100."""
    draws = WAYS[way]()
    test = ps.invariance_tests(draws, GROUP, level=1e-6)
    assert not test.rejected, test
    places, order = draws["locs"].sort(-1)
    torch.testing.assert_close(places.mean(0), PLACES, atol=0.1, rtol=0)
    # the sites are moved by the same element
    shares = draws["weights"].gather(-1, order).mean(0)
    assert shares[0] > shares[2] > shares[1]


@pytest.mark.stochastic
def test_what_gives_one_copy() -> None:
    guide = automatic()
    single = [
        guide.sample_posterior((DRAWS,), orbit=False),
        guide.unpack(guide.plain.get_posterior().sample((DRAWS,))),
        {site: value[None] for site, value in guide.median().items()},
        guide.quantiles([0.2, 0.8]),
    ]
    for draws in single:
        torch.testing.assert_close(draws["locs"].mean(0), PLACES, atol=0.1, rtol=0)


class Plain(ps.InfoNCE):
    """The base's own density."""

    def log_prob(self, base: Any, action: Any, w: Tensor) -> Tensor:
        return base.log_prob(w)


@pytest.fixture
def elements(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that lets the elements drawn move weights or not; either way
    they take no numbers from the stream of the guide's draws."""
    sample = ps.Group.sample

    def set_moving(moving: bool) -> None:
        def apart(group: ps.Group, shape: Any = (), **options: Any) -> Any:
            if not moving:
                return group.identity(shape)
            with forked():
                return sample(group, shape, **options)

        monkeypatch.setattr(ps.Group, "sample", apart)

    return set_moving


@pytest.mark.parametrize("objective", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize(
    "make", [automatic, lambda: ps.symmetrize(by_hand, GROUP)], ids=["auto", "by hand"]
)
@pytest.mark.parametrize("particles", [1, 5])
def test_losses_and_gradients_are_those_of_unmoved_draws(
    elements: Callable[[bool], None], make: Any, objective: Any, particles: int
) -> None:
    guide = make()
    loss = objective(
        num_particles=particles, vectorize_particles=particles > 1, max_plate_nesting=1
    )
    values = []
    for moving in (False, True):
        elements(moving)
        with pyro.poutine.trace(param_only=True) as recorded:
            loss.differentiable_loss(mixture, guide, DATA)
        parameters = [
            node["value"].unconstrained() for node in recorded.trace.nodes.values()
        ]
        # outside of the trace, in which no draw is moved
        pyro.set_rng_seed(5)
        value = loss.differentiable_loss(mixture, guide, DATA)
        values.append([value, *torch.autograd.grad(value, parameters)])
    assert len(values[0]) > 1
    for unmoved, moved in zip(*values, strict=True):
        torch.testing.assert_close(moved, unmoved, rtol=2e-4, atol=2e-4)


def test_steps_of_svi_spare_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[bool] = []
    act = ps.groups.Action.__call__

    def counted(action: Any, vector: Tensor, element: Any) -> Tensor:
        moved.append(True)
        return act(action, vector, element)

    guide = automatic()
    optimizer = pyro.optim.Adam({"lr": 0.01})
    svi = pyro.infer.SVI(mixture, guide, optimizer, Trace_ELBO(num_particles=3))
    # the estimator moves vectors as well
    guide.estimator = Plain()
    monkeypatch.setattr(ps.groups.Action, "__call__", counted)
    svi.step(DATA)
    assert not moved
    svi.evaluate_loss(DATA)
    assert moved


def test_steps_move_draws_where_the_symmetry_could_not_be_checked() -> None:
    """A model with dropout has no density that could be compared; one that isn't
    invariant would have a loss below that of the draws."""

    def model(data: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.arange(2.0), 1.0).to_event(1))
        noise = torch.nn.functional.dropout(torch.ones(2))
        pyro.factor("noise", 0 * (w * noise).sum() + noise.sum())

    group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(2)})
    guide = ps.AutoSymmetrized(model, group)
    guide.setup(DATA)
    with pyro.poutine.trace(param_only=True):
        assert guide.get_posterior().moves_draws


def test_steps_spare_moves_where_only_double_precision_tells_the_symmetry() -> None:
    """Wide priors and a likelihood counted 60,000 times: energies of a network change
    by nats with the last digit of its weights."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *[nn.Linear(8, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU()],
        nn.Linear(200, 10),
    )
    likelihood = ps.CategoricalLikelihood()
    model = ps.BayesianModel(net, ps.GaussianPrior(), likelihood, 60_000)
    x, y = torch.randn(100, 8), torch.randint(0, 10, (100,))
    group = ps.find_symmetry(net, x[:2]).permutations
    guide = ps.AutoSymmetrized(model, group).setup(x, y)
    with pyro.poutine.trace(param_only=True):
        assert not guide.get_posterior().moves_draws
