"""Markov chains, all at once, from independent initial values of the network;
``chains`` is their number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from pyro_symmetric.arguments import Json
from pyro_symmetric.ensembles import fresh_members
from pyro_symmetric.mcmc import HMC, NUTS, SGHMC, SGLD, pSGLD, sample
from pyro_symmetric.study.methods import Fit, register
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.weights import drop_names

CHAINS = {"chains": 16, "warmup": 300, "draws": 200, "thinning": 1}
STOCHASTIC = {**CHAINS, "batch_size": 256, "num_steps": 20}
QUICK = {"chains": 8, "warmup": 60, "draws": 50}
MOST: Json = {"most_draws": lambda budget: budget.chains * budget.draws}


@register(
    "sghmc",
    {**STOCHASTIC, "step_size": 0.005, "friction": 5.0},
    quick={**QUICK, "num_steps": 10},
    **MOST,
)
def sghmc(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Sample by stochastic-gradient Hamiltonian Monte Carlo on mini-batches, without a
    Metropolis correction (Chen et al. 2014)."""
    return _run(SGHMC, problem, budget, progress)


@register("sgld", STOCHASTIC, quick={**QUICK, "num_steps": 10}, **MOST)
def sgld(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Sample by stochastic-gradient Langevin dynamics on mini-batches, without momentum
    or a Metropolis correction (Welling & Teh 2011)."""
    return _run(SGLD, problem, budget, progress)


@register("psgld", STOCHASTIC, quick={**QUICK, "num_steps": 10}, **MOST)
def psgld(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Sample by preconditioned stochastic-gradient Langevin dynamics, with a step size
    per weight (Li et al. 2016).
    """
    return _run(pSGLD, problem, budget, progress)


@register("hmc", {**CHAINS, "num_steps": 32}, quick={**QUICK, "num_steps": 16}, **MOST)
def hmc(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Sample by Hamiltonian Monte Carlo on all data, with adapted step size and mass
    matrix: the default reference.
    """
    return _run(HMC, problem, budget, progress)


@register(
    "nuts",
    {**CHAINS, "warmup": 200, "draws": 100, "max_tree_depth": 7},
    quick={"chains": 8, "warmup": 40, "draws": 30, "max_tree_depth": 5},
    **MOST,
)
def nuts(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Sample by the No-U-Turn Sampler on all data, with trajectories of adaptive length
    (Hoffman & Gelman 2014).
    """
    return _run(NUTS, problem, budget, progress)


def _run(kernel: Any, problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Sample with a kernel, whose options are the parts of the budget other than
    :data:`CHAINS`.
    """
    options = drop_names(vars(budget), CHAINS)
    if "batch_size" in options:
        options["batch_size"] = min(options["batch_size"], len(problem.x))
    posterior = sample(
        kernel(problem.model, **options),
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
        raise KeyboardInterrupt  # a run cut short is no finished method
    energy = (-posterior.statistics["lp"]).mean(0).tolist()
    yield Fit(posterior, {"losses": {"mean potential energy (nats)": energy}})
