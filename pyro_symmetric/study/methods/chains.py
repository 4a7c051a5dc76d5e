"""Markov chains, many at once, from independent initial values of the network; ``chains`` is their number."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from pyro_symmetric.ensembles import fresh_starts
from pyro_symmetric.mcmc import HMC, NUTS, SGHMC, SGLD, Kernel, pSGLD, sample
from pyro_symmetric.study.methods.base import Fit, register
from pyro_symmetric.study.problem import Problem

CHAINS = {"chains": 16, "warmup": 300, "draws": 200, "thinning": 1}
STOCHASTIC = {**CHAINS, "batch_size": 256, "num_steps": 20}
MANY: dict[str, Any] = {"counted": "chains", "many": (16, 8), "most_draws": lambda budget: budget.chains * budget.draws}
QUICK = {"chains": 8, "warmup": 60, "draws": 50}


def _run(kernel: Kernel, problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    posterior = sample(
        kernel,
        problem.x,
        problem.y,
        num_samples=budget.draws,
        num_warmup=budget.warmup,
        num_chains=budget.chains,
        thinning=budget.thinning,
        initial=functools.partial(fresh_starts, problem.model),
        store=problem.scratch,
        seed=problem.seed,
        device=problem.x.device,
        dtype=problem.settings.torch_dtype,
        progress=progress,
    )
    if posterior.metadata.get("interrupted"):
        raise KeyboardInterrupt  # a shorter run than was asked for is not a finished method
    yield Fit(posterior, (-posterior.statistics["lp"]).mean(0).tolist(), "mean potential energy (nats)")


def _batches(problem: Problem, budget: Any) -> dict[str, Any]:
    return {"batch_size": min(budget.batch_size, len(problem.x)), "num_steps": budget.num_steps}


@register("sghmc", {**STOCHASTIC, "step_size": 0.005, "friction": 5.0}, quick={**QUICK, "num_steps": 10}, **MANY)
def sghmc(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Stochastic-gradient Hamiltonian Monte Carlo: chains on mini-batches, without an accept step (Chen et al.
    2014)."""
    own = {"step_size": budget.step_size, "friction": budget.friction}
    return _run(SGHMC(problem.model, **_batches(problem, budget), **own), problem, budget, progress)


@register("sgld", STOCHASTIC, quick={**QUICK, "num_steps": 10}, **MANY)
def sgld(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Stochastic-gradient Langevin dynamics: chains on mini-batches, without momentum or accept step (Welling & Teh
    2011)."""
    return _run(SGLD(problem.model, **_batches(problem, budget)), problem, budget, progress)


@register("psgld", STOCHASTIC, quick={**QUICK, "num_steps": 10}, **MANY)
def psgld(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Preconditioned stochastic-gradient Langevin dynamics: each weight has a step size of its own (Li et al. 2016)."""
    return _run(pSGLD(problem.model, **_batches(problem, budget)), problem, budget, progress)


@register("hmc", {**CHAINS, "num_steps": 32}, quick={**QUICK, "num_steps": 16}, **MANY)
def hmc(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Hamiltonian Monte Carlo on all data, many chains at once, step size and mass matrix adapted: the reference."""
    return _run(HMC(problem.model, num_steps=budget.num_steps), problem, budget, progress)


@register(
    "nuts",
    {**CHAINS, "warmup": 200, "draws": 100, "max_treedepth": 7},
    quick={"chains": 8, "warmup": 40, "draws": 30, "max_treedepth": 5},
    **MANY,
)
def nuts(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """The No-U-Turn Sampler (Hoffman & Gelman 2014) on all data: trajectories that find their own length."""
    return _run(NUTS(problem.model, max_treedepth=budget.max_treedepth), problem, budget, progress)
