"""Objectives that weight draws by the guide's density refuse a bound; those that average it go on."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import (
    SVI,
    Importance,
    JitTrace_ELBO,
    JitTraceMeanField_ELBO,
    Predictive,
    RenyiELBO,
    ReweightedWakeSleep,
    Trace_ELBO,
    TraceEnum_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
    TraceTailAdaptive_ELBO,
    WeighedPredictive,
    config_enumerate,
)
from pyro.infer.importance import psis_diagnostic, vectorized_importance_weights

from pyro_symmetric.distributions import ExactOrbit, InfoNCE
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import AutoSymmetrized
from pyro_symmetric.guides.bound_tensor import BoundTensor, NotADensityError
from pyro_symmetric.guides.objectives import SymmetrizedMeanField_ELBO

DATA = torch.tensor([-2.0, -1.5, 0.3, 2.5, 3.0])
GROUP = Group.declare({"locs": ("k",)}, {"locs": torch.Size([3])})


def model(data: torch.Tensor) -> torch.Tensor:
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    with pyro.plate("data", len(data)):
        pyro.sample(
            "x",
            dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), dist.Normal(locs, torch.ones(3))),
            obs=data,
        )
    return locs


def guide(estimator: Any) -> AutoSymmetrized:
    return AutoSymmetrized(model, GROUP, estimator=estimator, init_scale=0.5).setup(DATA)  # type: ignore[return-value]


def svi_steps(loss: Any) -> Callable[[Any], None]:
    def run(q: Any) -> None:
        svi = SVI(model, q, pyro.optim.Adam({"lr": 0.01}), loss)
        for _ in range(3):
            value = svi.step(DATA)
            assert type(value) is float
        svi.evaluate_loss(DATA)

    return run


def elbo_module(loss: Any) -> Callable[[Any], None]:
    return lambda q: loss(model, q)(DATA).backward()


PARTICLES = {"num_particles": 4, "vectorize_particles": True, "max_plate_nesting": 1}
NEEDS_A_DENSITY: dict[str, Callable[[Any], Any]] = {
    "Renyi": svi_steps(RenyiELBO(num_particles=3)),
    "Renyi, vectorised": svi_steps(RenyiELBO(alpha=0.5, **PARTICLES)),
    "Renyi, value only": lambda q: RenyiELBO(num_particles=3).loss(model, q, DATA),
    "wake-sleep": lambda q: ReweightedWakeSleep(num_particles=3).loss(model, q, DATA),
    "wake-sleep, vectorised": lambda q: ReweightedWakeSleep(**PARTICLES).loss_and_grads(model, q, DATA),
    "tail-adaptive": lambda q: TraceTailAdaptive_ELBO(**PARTICLES).loss_and_grads(model, q, DATA),
    "importance": lambda q: Importance(model, q, num_samples=3).run(DATA),
    "psis": lambda q: psis_diagnostic(model, q, DATA, num_particles=100, max_plate_nesting=1),
    "weights by hand": lambda q: vectorized_importance_weights(model, q, DATA, num_samples=5, max_plate_nesting=1)[
        0
    ].exp(),
}
AVERAGES: dict[str, Callable[[Any], Any]] = {
    "Trace_ELBO": svi_steps(Trace_ELBO()),
    "Trace_ELBO, particles": svi_steps(Trace_ELBO(num_particles=3)),
    "Trace_ELBO, vectorised": svi_steps(Trace_ELBO(num_particles=4, vectorize_particles=True)),
    "TraceMeanField_ELBO": svi_steps(TraceMeanField_ELBO()),
    "TraceGraph_ELBO": svi_steps(TraceGraph_ELBO()),
    "SymmetrizedMeanField_ELBO": svi_steps(SymmetrizedMeanField_ELBO(**PARTICLES)),
    "JitTrace_ELBO": lambda q: svi_steps(JitTrace_ELBO(ignore_jit_warnings=True))(q),  # it keeps its first guide
    "JitTraceMeanField_ELBO": lambda q: SVI(
        model, q, pyro.optim.Adam({"lr": 0.01}), JitTraceMeanField_ELBO(ignore_jit_warnings=True)
    ).step(DATA),
    "a torch optimiser": elbo_module(Trace_ELBO()),
    "Predictive": lambda q: Predictive(model, guide=q, num_samples=4)(DATA),
}


@pytest.mark.parametrize("objective", NEEDS_A_DENSITY)
def test_a_bound_is_refused_with_advice_where_a_density_is_needed(objective: str) -> None:
    with pytest.raises(NotADensityError, match=r"ExactOrbit\(\).*Trace_ELBO"):
        NEEDS_A_DENSITY[objective](guide(InfoNCE(2)))


@pytest.mark.parametrize("objective", [name for name in NEEDS_A_DENSITY if name != "psis"])
def test_the_same_objectives_take_the_exact_density(objective: str) -> None:
    NEEDS_A_DENSITY[objective](guide(ExactOrbit()))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("objective", AVERAGES)
@pytest.mark.parametrize("estimator", [InfoNCE(2), ExactOrbit()])
def test_objectives_that_average_take_both(objective: str, estimator: Any) -> None:
    AVERAGES[objective](guide(estimator))


@config_enumerate
def assigned(data: torch.Tensor) -> None:
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    with pyro.plate("data", len(data)):
        z = pyro.sample("z", dist.Categorical(torch.ones(3)))
        pyro.sample("x", dist.Normal(locs[..., z] if locs.dim() == 1 else locs.gather(-1, z), 1.0), obs=data)


@pytest.mark.parametrize("estimator", [InfoNCE(2), ExactOrbit()])
@pytest.mark.parametrize("nesting", [{}, {"max_plate_nesting": 1}])
def test_assignments_that_the_model_enumerates_leave_the_guide_to_the_continuous_sites(
    estimator: Any, nesting: dict[str, int]
) -> None:
    continuous = pyro.poutine.block(assigned, hide=["z"])
    q = AutoSymmetrized(continuous, GROUP, estimator=estimator, init_scale=0.5).setup(DATA)
    svi = SVI(assigned, q, pyro.optim.Adam({"lr": 0.01}), TraceEnum_ELBO(**nesting))
    assert all(type(svi.step(DATA)) is float for _ in range(3))
    written_out = AutoSymmetrized(model, GROUP, estimator=estimator).setup(DATA)
    written_out.load_state_dict(q.state_dict())
    values = []
    for given, guide_, loss in ((assigned, q, TraceEnum_ELBO(max_plate_nesting=1)), (model, written_out, Trace_ELBO())):
        pyro.set_rng_seed(1)
        values.append(loss.loss(given, guide_, DATA))
    assert values[0] == pytest.approx(values[1], rel=1e-4)


@pytest.mark.stochastic
def test_weights_of_draws_with_the_exact_density_estimate_the_evidence() -> None:
    """Importance sampling with q̄ itself: against enumeration of the 3^5 assignments; at 6 standard errors."""
    q = guide(ExactOrbit())
    with torch.no_grad():
        q.base.loc.copy_(torch.tensor([-1.5, 0.0, 2.5]))
        q.base.scale = torch.full((3,), 1.3)
    weights = vectorized_importance_weights(model, q, DATA, num_samples=20_000, max_plate_nesting=1)[0].exp().double()
    total = 0.0
    for assignment in torch.cartesian_prod(*[torch.arange(3)] * len(DATA)):
        log_prob = torch.zeros(())
        for k in range(3):
            x = DATA[assignment == k]
            if len(x):
                covariance = torch.eye(len(x)) + 9.0
                log_prob += dist.MultivariateNormal(torch.zeros(len(x)), covariance).log_prob(x)
        total += float(log_prob.exp()) / 3 ** len(DATA)
    error = float(weights.detach().std()) / 20_000**0.5
    assert float(weights.detach().mean()) == pytest.approx(total, abs=6 * error)


def test_weighed_predictive_refuses_a_bound_when_its_weights_are_used() -> None:
    found = WeighedPredictive(model, guide=guide(InfoNCE(2)), num_samples=4)(DATA, model_guide=model)
    with pytest.raises(NotADensityError):
        found.log_weights.exp()


def test_the_mark_lets_sums_means_and_gradients_through_and_can_be_looked_at() -> None:
    parameter = torch.tensor([1.0, 2.0], requires_grad=True)
    bound = (2 * parameter).as_subclass(BoundTensor)
    mean = (torch.zeros(2) - bound).mean()
    assert isinstance(mean, BoundTensor)
    mean.backward()
    torch.testing.assert_close(parameter.grad, torch.tensor([-1.0, -1.0]))
    assert mean.item() == -3.0
    for forbidden in (torch.exp, lambda t: t.logsumexp(0), lambda t: t.softmax(0), torch.argsort):
        with pytest.raises(NotADensityError):
            forbidden(bound)
