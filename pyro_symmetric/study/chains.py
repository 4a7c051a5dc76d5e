"""Markov chains, many at once, from independent initial values of the network; ``chains`` is their number."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from pyro_symmetric.ensembles import fresh_members
from pyro_symmetric.mcmc import HMC, NUTS, SGHMC, SGLD, pSGLD, sample
from pyro_symmetric.study.methods import Fit, register
from pyro_symmetric.study.problem import Problem

CHAINS = {"chains": 16, "warmup": 300, "draws": 200, "thinning": 1}
STOCHASTIC = {**CHAINS, "batch_size": 256, "num_steps": 20}
QUICK = {"chains": 8, "warmup": 60, "draws": 50}
MOST: dict[str, Any] = {"most_draws": lambda budget: budget.chains * budget.draws}


@register("sghmc", {**STOCHASTIC, "step_size": 0.005, "friction": 5.0}, quick={**QUICK, "num_steps": 10}, **MOST)
def sghmc(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Stochastic-gradient Hamiltonian Monte Carlo: chains on mini-batches, without an accept step (Chen et al.
    2014)."""
    return _run(SGHMC, problem, budget, progress)


@register("sgld", STOCHASTIC, quick={**QUICK, "num_steps": 10}, **MOST)
def sgld(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Stochastic-gradient Langevin dynamics: chains on mini-batches, without momentum or accept step (Welling & Teh
    2011)."""
    return _run(SGLD, problem, budget, progress)


@register("psgld", STOCHASTIC, quick={**QUICK, "num_steps": 10}, **MOST)
def psgld(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Preconditioned stochastic-gradient Langevin dynamics: each weight has a step size of its own (Li et al. 2016)."""
    return _run(pSGLD, problem, budget, progress)


@register("hmc", {**CHAINS, "num_steps": 32}, quick={**QUICK, "num_steps": 16}, **MOST)
def hmc(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Hamiltonian Monte Carlo on all data, many chains at once, step size and mass matrix adapted: the reference."""
    return _run(HMC, problem, budget, progress)


@register(
    "nuts",
    {**CHAINS, "warmup": 200, "draws": 100, "max_treedepth": 7},
    quick={"chains": 8, "warmup": 40, "draws": 30, "max_treedepth": 5},
    **MOST,
)
def nuts(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """The No-U-Turn Sampler (Hoffman & Gelman 2014) on all data: trajectories that find their own length."""
    return _run(NUTS, problem, budget, progress)


def _run(kind: Any, problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Parts of the budget that don't count chains and draws are the kernel's own options."""
    own = {part: value for part, value in vars(budget).items() if part not in CHAINS}
    if "batch_size" in own:
        own["batch_size"] = min(own["batch_size"], len(problem.x))
    posterior = sample(
        kind(problem.model, **own),
        problem.x,
        problem.y,
        num_samples=budget.draws,
        num_warmup=budget.warmup,
        num_chains=budget.chains,
        thinning=budget.thinning,
        initial=functools.partial(fresh_members, problem.model),
        store=problem.scratch,
        seed=problem.seed,
        device=problem.x.device,
        dtype=problem.x.dtype,
        progress=progress,
    )
    if posterior.metadata.get("interrupted"):
        raise KeyboardInterrupt  # a shorter run than was asked for is not a finished method
    energy = (-posterior.statistics["lp"]).mean(0).tolist()
    yield Fit(posterior, {"losses": {"mean potential energy (nats)": energy}})
