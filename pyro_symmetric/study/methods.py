"""The methods of a study, by name. To add one, write a small class with a ``fit`` and put ``@register`` above it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from pyro.infer.autoguide import AutoGuide, AutoNormal
from pyro.infer.autoguide.initialization import init_to_sample, init_to_value

from pyro_symmetric.alignment import align, loss_barrier, to_gaussian
from pyro_symmetric.distributions import SinkhornImportance
from pyro_symmetric.guides import (
    AutoAligned,
    AutoMeanField,
    AutoSymmetrized,
    WeightsGuide,
    distinct,
    evidence,
    interpolate,
    suggest_estimator,
)
from pyro_symmetric.guides.gaussian import flat_moments
from pyro_symmetric.guides.layout import layout_of
from pyro_symmetric.mcmc import HMC, SGHMC, Kernel, sample
from pyro_symmetric.samples import Posterior
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.study.training import fit_guide, fit_networks, fresh_starts


@dataclass(frozen=True)
class Fit:
    """What a method made of a problem: draws of the weights, and what else it can tell.

    :param label: the row of the report.
    :param posterior: the draws; chains where the method has chains, else one chain of independent draws.
    :param losses: a curve to look at, one number a step.
    :param loss_label: what that number is.
    :param is_chain: whether draws are successive states of Markov chains, so that R-hat and ESS mean something.
    :param evidence: ELBO and symmetrised ELBO, for variational methods.
    :param barrier: a loss barrier curve, for methods that measure one.
    :param details: further numbers, by name.
    """

    label: str
    posterior: Posterior
    losses: list[float]
    loss_label: str
    is_chain: bool = False
    evidence: dict[str, Any] | None = None
    barrier: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Method(ABC):
    """One way of approximating the posterior.

    Subclasses are dataclasses whose fields are the method's budget; ``quick_budget`` replaces some of them under
    ``--quick``.
    """

    name: ClassVar[str]
    labels: ClassVar[tuple[str, ...]]
    summary: ClassVar[str]
    quick_budget: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        """Fit, and yield one :class:`Fit` for each of ``labels``, in that order."""

    def quick(self) -> Method:
        """The same method on a small budget."""
        return replace(self, **self.quick_budget)  # type: ignore[type-var]


METHODS: dict[str, type[Method]] = {}


def register(cls: type[Method]) -> type[Method]:
    """Make a method known by its name."""
    if cls.name in METHODS:
        raise ValueError(f"there is a method {cls.name!r} already")
    METHODS[cls.name] = cls
    return cls


def make_method(name: str, quick: bool = False) -> Method:
    """The method of that name with its default, or its quick, budget.

    :raises ValueError: if there is none.
    """
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; known are {', '.join(METHODS)}")
    method = METHODS[name]()
    return method.quick() if quick else method


# variational methods ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Variational(Method):
    """Budget of a method that fits guides by SVI."""

    steps: int = 3000
    learning_rate: float = 0.02
    batch_size: int = 512
    init_scale: float = 0.03
    quick_budget: ClassVar[Mapping[str, Any]] = {"steps": 400, "learning_rate": 0.03}

    def _train(self, problem: Problem, guide: AutoGuide, label: str, progress: bool) -> list[float]:
        return fit_guide(
            problem.model,
            guide,
            problem.x,
            problem.y,
            steps=self.steps,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            label=label,
            progress=progress,
        )

    def _mean_field(self, problem: Problem, label: str, progress: bool) -> tuple[AutoMeanField, list[float]]:
        """Fit the stock mean-field guide from fresh initial values of the network; a copy that draws without data."""
        start = init_to_value(values=problem.model.initial_weights(fresh=True), fallback=init_to_sample)
        stock = distinct(AutoNormal(problem.model, init_loc_fn=start, init_scale=self.init_scale))
        losses = self._train(problem, stock, label, progress)
        sites = layout_of(stock)
        return AutoMeanField(sites, *flat_moments(to_gaussian(stock), sites)), losses

    def _fit(self, problem: Problem, guide: WeightsGuide, label: str, losses: list[float], **more: Any) -> Fit:
        shape, group = (problem.settings.num_draws,), problem.symmetry.permutations
        # A symmetrised guide is compared as what it is: with all its copies.
        if isinstance(guide, AutoSymmetrized):
            draws = guide.sample_posterior(shape, orbit=True)
        else:
            draws = guide.sample_posterior(shape)
        worth = evidence(
            guide,
            lambda weights: problem.model.log_joint(weights, problem.x, problem.y),
            group,
            suggest_estimator(AutoNormal, group, training=False).estimator,
        )
        return Fit(label, Posterior.from_samples(draws), losses, "negative ELBO (nats)", evidence=asdict(worth), **more)


@register
@dataclass(frozen=True)
class MeanField(_Variational):
    """Stock Pyro: one independent Gaussian for each weight."""

    name: ClassVar[str] = "mean-field"
    labels: ClassVar[tuple[str, ...]] = ("mean-field",)
    summary: ClassVar[str] = "Pyro's stock AutoNormal: one independent Gaussian for each weight, fitted by SVI."

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        guide, losses = self._mean_field(problem, self.name, progress)
        yield self._fit(problem, guide, self.name, losses)


@register
@dataclass(frozen=True)
class SymmetrizedMeanField(_Variational):
    """The mean-field guide averaged over all permutations of hidden units, trained with proposals that match units."""

    proposals: int = 4

    name: ClassVar[str] = "symmetrized"
    labels: ClassVar[tuple[str, ...]] = ("symmetrized",)
    summary: ClassVar[str] = (
        "AutoSymmetrized: the mean-field guide averaged over all permutations of hidden units (Gelberg et al. 2024), "
        "trained with SinkhornImportance, which matches units. Its draws come from all copies alike."
    )

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        guide = AutoSymmetrized(
            problem.model,
            problem.symmetry.permutations,
            estimator=SinkhornImportance(self.proposals),
            init_loc_fn=init_to_value(values=problem.model.initial_weights(fresh=True), fallback=init_to_sample),
            init_scale=self.init_scale,
        )
        losses = self._train(problem, guide, self.name, progress)
        yield self._fit(problem, guide, self.name, losses)


@register
@dataclass(frozen=True)
class AlignedMeanField(_Variational):
    """Two mean-field fits in one frame, and what lies half-way between them."""

    path_points: int = 21
    path_draws: int = 32
    quick_budget: ClassVar[Mapping[str, Any]] = {**_Variational.quick_budget, "path_points": 11, "path_draws": 16}

    name: ClassVar[str] = "aligned"
    labels: ClassVar[tuple[str, ...]] = ("aligned", "aligned midpoint", "unaligned midpoint")
    summary: ClassVar[str] = (
        "Two independent mean-field fits; the second is pushed forward by the permutation of hidden units that "
        "brings it "
        "closest to the first in Wasserstein distance (Rossi et al. 2023). The midpoints lie half-way along the "
        "Wasserstein "
        "geodesic between the two, with and without that permutation."
    )

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        first, _ = self._mean_field(problem, "aligned 1/2", progress)
        second, losses = self._mean_field(problem, "aligned 2/2", progress)
        found = align(second, first, problem.symmetry.permutations, cost="wasserstein", progress=progress)
        moved = AutoAligned(second, found.permutation)
        curves = {
            name: self._path(problem, first, end, progress) for name, end in (("aligned", moved), ("unaligned", second))
        }
        details = {"squared_wasserstein_before": found.initial_cost, "squared_wasserstein_after": found.cost}
        yield self._fit(problem, moved, self.labels[0], losses, barrier=curves, details=details)
        yield self._fit(problem, interpolate(first, moved, 0.5), self.labels[1], [])
        yield self._fit(problem, interpolate(first, second, 0.5), self.labels[2], [])

    def _path(self, problem: Problem, start: WeightsGuide, end: WeightsGuide, progress: bool) -> dict[str, Any]:
        model, data = problem.model, problem.dataset
        curve = loss_barrier(
            start,
            end,
            {
                "train": lambda weights: model.log_likelihood(weights, data.train_x, data.train_y),
                "test": lambda weights: model.log_likelihood(weights, data.test_x, data.test_y),
            },
            num_points=self.path_points,
            num_samples=self.path_draws,
            progress=progress,
        )
        return curve.to_dict()


# networks and chains ------------------------------------------------------------------------------------------------


@register
@dataclass(frozen=True)
class Ensemble(Method):
    """Independently trained networks."""

    networks: int = 100
    steps: int = 1500
    learning_rate: float = 0.01
    batch_size: int = 256

    name: ClassVar[str] = "ensemble"
    labels: ClassVar[tuple[str, ...]] = ("ensemble",)
    summary: ClassVar[str] = "A deep ensemble: networks trained independently, each to a mode of the posterior (MAP)."
    quick_budget: ClassVar[Mapping[str, Any]] = {"networks": 40, "steps": 300, "learning_rate": 0.02}

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        weights, losses = fit_networks(
            problem.model,
            problem.x,
            problem.y,
            num_networks=self.networks,
            steps=self.steps,
            learning_rate=self.learning_rate,
            batch_size=self.batch_size,
            label=self.name,
            progress=progress,
        )
        posterior = Posterior.from_samples({site: value.cpu() for site, value in weights.items()})
        yield Fit(self.name, posterior, losses, "negative log-posterior (nats)")


@dataclass(frozen=True)
class _Chains(Method):
    """Budget of a method that runs Markov chains from independent initial values of the network."""

    chains: int = 16
    warmup: int = 300
    draws: int = 200
    thinning: int = 1

    @abstractmethod
    def kernel(self, problem: Problem) -> Kernel:
        """The sampler."""

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        posterior = sample(
            self.kernel(problem),
            problem.x,
            problem.y,
            num_samples=self.draws,
            num_warmup=self.warmup,
            num_chains=self.chains,
            thinning=self.thinning,
            initial=fresh_starts(problem.model, self.chains),
            device=problem.x.device,
            dtype=problem.settings.torch_dtype,
            progress=progress,
        )
        if posterior.metadata.get("interrupted"):
            raise KeyboardInterrupt  # a shorter run than was asked for is not a finished method
        followed = [float(energy) for energy in posterior.metadata["trace"]["potential"]]
        yield Fit(self.name, posterior, followed, "mean potential energy (nats)", is_chain=True)


@register
@dataclass(frozen=True)
class StochasticGradientHMC(_Chains):
    """SGHMC on mini-batches."""

    step_size: float = 0.005
    friction: float = 5.0
    batch_size: int = 256
    num_steps: int = 20

    name: ClassVar[str] = "sghmc"
    labels: ClassVar[tuple[str, ...]] = ("sghmc",)
    summary: ClassVar[str] = (
        "Stochastic-gradient Hamiltonian Monte Carlo: chains on mini-batches, without an accept step (Chen et al. "
        "2014)."
    )
    quick_budget: ClassVar[Mapping[str, Any]] = {"chains": 8, "warmup": 60, "draws": 50, "num_steps": 10}

    def kernel(self, problem: Problem) -> Kernel:
        return SGHMC(
            problem.model,
            step_size=self.step_size,
            friction=self.friction,
            batch_size=min(self.batch_size, len(problem.x)),
            num_steps=self.num_steps,
        )


@register
@dataclass(frozen=True)
class HamiltonianMonteCarlo(_Chains):
    """HMC on all data: the reference."""

    num_steps: int = 32

    name: ClassVar[str] = "hmc"
    labels: ClassVar[tuple[str, ...]] = ("hmc",)
    summary: ClassVar[str] = (
        "Hamiltonian Monte Carlo on all data, many chains at once, step size and mass matrix adapted: the reference."
    )
    quick_budget: ClassVar[Mapping[str, Any]] = {"chains": 8, "warmup": 60, "draws": 50, "num_steps": 16}

    def kernel(self, problem: Problem) -> Kernel:
        return HMC(problem.model, num_steps=self.num_steps)
