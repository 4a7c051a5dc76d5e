"""Pyro's own objectives take a symmetrised guide, be its density exact or an
estimate.
"""

import math
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
    config_enumerate,
)
from pyro.infer.importance import vectorized_importance_weights

from pyro_symmetric.distributions import ExactOrbit, InfoNCE, SinkhornImportance
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import AutoSymmetrized

DATA = torch.tensor([-2.0, -1.5, 0.3, 2.5, 3.0])
GROUP = Group.declare({"locs": ("k",)}, {"locs": torch.Size([3])})


def model(data: torch.Tensor) -> torch.Tensor:
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 3.0).to_event(1))
    with pyro.plate("data", len(data)):
        pyro.sample(
            "x",
            dist.MixtureSameFamily(
                dist.Categorical(torch.ones(3)), dist.Normal(locs, torch.ones(3))
            ),
            obs=data,
        )
    return locs


def guide(estimator: Any) -> AutoSymmetrized:
    return AutoSymmetrized(model, GROUP, estimator=estimator, init_scale=0.5).setup(
        DATA
    )  # type: ignore[return-value]


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
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "Renyi": svi_steps(RenyiELBO(num_particles=3)),
    "Renyi, vectorised": svi_steps(RenyiELBO(alpha=0.5, **PARTICLES)),
    "Renyi, value only": lambda q: RenyiELBO(num_particles=3).loss(model, q, DATA),
    "wake-sleep": lambda q: ReweightedWakeSleep(num_particles=3).loss(model, q, DATA),
    "wake-sleep, vectorised": lambda q: ReweightedWakeSleep(**PARTICLES).loss_and_grads(
        model, q, DATA
    ),
    "tail-adaptive": lambda q: TraceTailAdaptive_ELBO(**PARTICLES).loss_and_grads(
        model, q, DATA
    ),
    "importance": lambda q: Importance(model, q, num_samples=3).run(DATA),
    "weights by hand": lambda q: vectorized_importance_weights(
        model, q, DATA, num_samples=5, max_plate_nesting=1
    )[0].exp(),
}
AVERAGES: dict[str, Callable[[Any], Any]] = {
    "Trace_ELBO": svi_steps(Trace_ELBO()),
    "Trace_ELBO, particles": svi_steps(Trace_ELBO(num_particles=3)),
    "Trace_ELBO, vectorised": svi_steps(
        Trace_ELBO(num_particles=4, vectorize_particles=True)
    ),
    "TraceMeanField_ELBO": svi_steps(TraceMeanField_ELBO()),
    "TraceGraph_ELBO": svi_steps(TraceGraph_ELBO()),
    # it keeps its first guide
    "JitTrace_ELBO": lambda q: svi_steps(JitTrace_ELBO(ignore_jit_warnings=True))(q),
    "JitTrace_ELBO, vectorised": lambda q: svi_steps(
        JitTrace_ELBO(ignore_jit_warnings=True, **PARTICLES)
    )(q),
    "JitTraceMeanField_ELBO": lambda q: SVI(
        model,
        q,
        pyro.optim.Adam({"lr": 0.01}),
        JitTraceMeanField_ELBO(ignore_jit_warnings=True),
    ).step(DATA),
    "a torch optimiser": elbo_module(Trace_ELBO()),
    "Predictive": lambda q: Predictive(model, guide=q, num_samples=4)(DATA),
}


@pytest.mark.parametrize("objective", WEIGHTS)
@pytest.mark.parametrize("estimator", [InfoNCE(2), SinkhornImportance(2), ExactOrbit()])
def test_objectives_that_weight_draws_take_estimates_and_the_exact_density(
    objective: str, estimator: Any
) -> None:
    WEIGHTS[objective](guide(estimator))


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
        pyro.sample(
            "x",
            dist.Normal(locs[..., z] if locs.dim() == 1 else locs.gather(-1, z), 1.0),
            obs=data,
        )


@pytest.mark.parametrize("estimator", [InfoNCE(2), ExactOrbit()])
@pytest.mark.parametrize("nesting", [{}, {"max_plate_nesting": 1}])
def test_assignments_that_the_model_enumerates_leave_the_guide_to_the_continuous_sites(
    estimator: Any, nesting: dict[str, int]
) -> None:
    continuous = pyro.poutine.block(assigned, hide=["z"])
    q = AutoSymmetrized(continuous, GROUP, estimator=estimator, init_scale=0.5).setup(
        DATA
    )
    svi = SVI(assigned, q, pyro.optim.Adam({"lr": 0.01}), TraceEnum_ELBO(**nesting))
    assert all(type(svi.step(DATA)) is float for _ in range(3))
    written_out = AutoSymmetrized(model, GROUP, estimator=estimator).setup(DATA)
    written_out.load_state_dict(q.state_dict())
    values = []
    for given, guide_, loss in (
        (assigned, q, TraceEnum_ELBO(max_plate_nesting=1)),
        (model, written_out, Trace_ELBO()),
    ):
        pyro.set_rng_seed(1)
        values.append(loss.loss(given, guide_, DATA))
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def by_enumeration() -> float:
    """The log-evidence: a sum over the 3^5 assignments of rows to components."""
    terms = []
    for assignment in torch.cartesian_prod(*[torch.arange(3)] * len(DATA)):
        rows = [DATA[assignment == k] for k in assignment.unique()]
        laws = [
            dist.MultivariateNormal(torch.zeros(len(x)), torch.eye(len(x)) + 9.0)
            for x in rows
        ]
        terms.append(sum(law.log_prob(x) for law, x in zip(laws, rows, strict=True)))
    return float(torch.stack(terms).double().logsumexp(0)) - len(DATA) * math.log(3)


def fitted(estimator: Any) -> AutoSymmetrized:
    q = guide(estimator)
    with torch.no_grad():
        q.base.loc.copy_(torch.tensor([-1.5, 0.0, 2.5]))
        q.base.scale = torch.full((3,), 1.3)
    return q


@pytest.mark.stochastic
@pytest.mark.parametrize("estimator", [InfoNCE(2), SinkhornImportance(2), ExactOrbit()])
def test_weights_of_draws_estimate_the_evidence_without_bias(estimator: Any) -> None:
    """Ratios to the density or to an estimate of it, against enumeration; at 6 standard
    errors (1 in 10^8).
    """
    q = fitted(estimator)
    with torch.no_grad():
        log_weights = vectorized_importance_weights(
            model, q, DATA, num_samples=20_000, max_plate_nesting=1
        )[0]
    ratios = (log_weights.double() - by_enumeration()).exp()
    assert float(ratios.mean()) == pytest.approx(
        1.0, abs=6 * float(ratios.std()) / 20_000**0.5
    )
