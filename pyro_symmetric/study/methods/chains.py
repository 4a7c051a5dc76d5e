"""Markov chains, many at once; ``chains`` is their number."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from pyro_symmetric.ensembles import fresh_starts
from pyro_symmetric.mcmc import HMC, NUTS, SGHMC, SGLD, Kernel, pSGLD, sample
from pyro_symmetric.study.methods.base import Fit, Method, register
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.study.settings import StudySettings


@dataclass(frozen=True)
class _Chains(Method):
    """Budget of a method that runs Markov chains from independent initial values of the network."""

    chains: int = 16
    warmup: int = 300
    draws: int = 200
    thinning: int = 1

    many = 16
    quick_many = 8
    counted = "chains"
    draws_globally = False

    @abstractmethod
    def kernel(self, problem: Problem) -> Kernel:
        """The sampler."""

    def num_draws(self, settings: StudySettings) -> int:
        return self.chains * self.draws

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        posterior = sample(
            self.kernel(problem),
            problem.x,
            problem.y,
            num_samples=self.draws,
            num_warmup=self.warmup,
            num_chains=self.chains,
            thinning=self.thinning,
            initial=functools.partial(fresh_starts, problem.model),
            store=problem.scratch,
            seed=problem.seed,
            device=problem.x.device,
            dtype=problem.settings.torch_dtype,
            progress=progress,
        )
        if posterior.metadata.get("interrupted"):
            raise KeyboardInterrupt  # a shorter run than was asked for is not a finished method
        followed = (-posterior.statistics["lp"]).mean(0).tolist()
        yield Fit(self.name, posterior, followed, "mean potential energy (nats)")


@dataclass(frozen=True)
class _Stochastic(_Chains):
    """Budget of chains on mini-batches."""

    batch_size: int = 256
    num_steps: int = 20

    quick_budget: ClassVar = {"chains": 8, "warmup": 60, "draws": 50, "num_steps": 10}
    sampler: ClassVar[type[SGHMC] | type[SGLD] | type[pSGLD]]

    def kernel(self, problem: Problem) -> Kernel:
        own = {name: value for name, value in self.budget.items() if name in ("step_size", "friction")}
        batch_size = min(self.batch_size, len(problem.x))
        return self.sampler(problem.model, batch_size=batch_size, num_steps=self.num_steps, **own)


@register
@dataclass(frozen=True)
class StochasticGradientHMC(_Stochastic):
    """Stochastic-gradient Hamiltonian Monte Carlo: chains on mini-batches, without an accept step (Chen et al.
    2014)."""

    step_size: float = 0.005
    friction: float = 5.0

    name = "sghmc"
    sampler = SGHMC


@register
@dataclass(frozen=True)
class StochasticGradientLangevin(_Stochastic):
    """Stochastic-gradient Langevin dynamics: chains on mini-batches, without momentum or accept step (Welling & Teh
    2011)."""

    name = "sgld"
    sampler = SGLD


@register
@dataclass(frozen=True)
class PreconditionedLangevin(_Stochastic):
    """Preconditioned stochastic-gradient Langevin dynamics: each weight has a step size of its own (Li et al. 2016)."""

    name = "psgld"
    sampler = pSGLD


@register
@dataclass(frozen=True)
class HamiltonianMonteCarlo(_Chains):
    """Hamiltonian Monte Carlo on all data, many chains at once, step size and mass matrix adapted: the reference."""

    num_steps: int = 32

    name = "hmc"
    quick_budget: ClassVar = {"chains": 8, "warmup": 60, "draws": 50, "num_steps": 16}

    def kernel(self, problem: Problem) -> Kernel:
        return HMC(problem.model, num_steps=self.num_steps)


@register
@dataclass(frozen=True)
class NoUTurn(_Chains):
    """The No-U-Turn Sampler (Hoffman & Gelman 2014) on all data: trajectories that find their own length."""

    warmup: int = 200
    draws: int = 100
    max_treedepth: int = 7

    name = "nuts"
    quick_budget: ClassVar = {"chains": 8, "warmup": 40, "draws": 30, "max_treedepth": 5}

    def kernel(self, problem: Problem) -> Kernel:
        return NUTS(problem.model, max_treedepth=self.max_treedepth)
