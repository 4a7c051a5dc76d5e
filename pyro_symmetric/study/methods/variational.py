"""Variational methods: guides that are fitted by stock SVI."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import pyro
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuide, AutoNormal
from pyro.infer.autoguide.initialization import init_to_median, init_to_value

from pyro_symmetric.alignment import align, loss_barrier
from pyro_symmetric.distributions import SinkhornImportance
from pyro_symmetric.groups import Action
from pyro_symmetric.guides import (
    AutoSymmetrized,
    AutoUnitBlocks,
    WeightsGuide,
    barycentre,
    push_forward,
)
from pyro_symmetric.guides.evidence import evidence_of
from pyro_symmetric.guides.unit_blocks import gaussian_copy, unit_positions
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.methods.base import Fit, Method, pooled, register
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.study.training import fit_guide


@dataclass(frozen=True)
class _Variational(Method):
    """Budget of a method that fits guides by SVI."""

    modes: int = 1
    steps: int = 3000
    learning_rate: float = 0.02
    batch_size: int = 512
    init_scale: float = 0.03

    many = 5
    quick_budget: ClassVar = {"steps": 400, "learning_rate": 0.03}

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

    def _mean_field(self, problem: Problem, label: str, progress: bool) -> tuple[WeightsGuide, list[float]]:
        """Fit the stock mean-field guide from fresh initial values of the network; a copy that draws without data."""
        start = init_to_value(values=problem.model.initial_weights(fresh=True), fallback=init_to_median)
        pyro.clear_param_store()  # stock guides of one class share their parameters
        stock = AutoNormal(problem.model, init_loc_fn=start, init_scale=self.init_scale)
        losses = self._train(problem, stock, label, progress)
        return gaussian_copy(stock), losses

    def _fit(self, problem: Problem, guide: WeightsGuide, label: str, losses: list[float], **more: Any) -> Fit:
        shape, model = (problem.settings.draws,), problem.model
        # A symmetrised guide is compared as what it is: with all its copies.
        orbit = {"orbit": True} if isinstance(guide, AutoSymmetrized) else {}
        draws = guide.sample_posterior(shape, **orbit)
        worth = evidence_of(guide, lambda w: model.log_joint(w, problem.x, problem.y), problem.symmetry.finite)
        posterior = Posterior.from_samples(draws, kind="independent")
        return Fit(label, posterior, losses, "negative ELBO (nats)", evidence=asdict(worth), **more)

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        yield pooled([self._fit_one(problem, progress) for _ in range(self.modes)])

    def _fit_one(self, problem: Problem, progress: bool) -> Fit:
        """One of the independent fits."""
        raise NotImplementedError


@register
@dataclass(frozen=True)
class MeanField(_Variational):
    """Pyro's stock AutoNormal: one independent Gaussian for each weight, fitted by SVI."""

    name = "mean-field"

    def _fit_one(self, problem: Problem, progress: bool) -> Fit:
        guide, losses = self._mean_field(problem, self.title, progress)
        return self._fit(problem, guide, self.name, losses)


@dataclass(frozen=True)
class _Symmetrized(_Variational):
    """A guide averaged over the network's finite group, trained with proposals that match units."""

    proposals: int = 4

    base: ClassVar[type[AutoGuide]]

    def _fit_one(self, problem: Problem, progress: bool) -> Fit:
        guide = AutoSymmetrized(
            problem.model,
            problem.symmetry.finite,
            base=self.base,
            estimator=SinkhornImportance(self.proposals),
            init_loc_fn=init_to_value(values=problem.model.initial_weights(fresh=True), fallback=init_to_median),
            init_scale=self.init_scale,
        )
        losses = self._train(problem, guide, self.title, progress)
        return self._fit(problem, guide, self.name, losses)


@register
@dataclass(frozen=True)
class SymmetrizedMeanField(_Symmetrized):
    """AutoSymmetrized: the mean-field guide averaged over all permutations of hidden units, and over all flips of their
    signs if the network has these (Gelberg et al. 2024), trained with SinkhornImportance, which matches units. Its
    draws come from all copies alike."""

    name = "symmetrized"
    base = AutoDiagonalNormal


@register
@dataclass(frozen=True)
class SymmetrizedUnitBlocks(_Symmetrized):
    """AutoSymmetrized over AutoUnitBlocks: the weights of each hidden unit are correlated, units are independent;
    averaged over the same group, and trained likewise. Left out of networks with too many weights a unit.

    A step costs the cube of a unit's weights: :attr:`largest` bounds the entries of all blocks together.
    """

    largest: int = 500_000

    name = "symmetrized-blocks"
    base = AutoUnitBlocks

    def too_large(self, problem: Problem) -> str:
        shapes = problem.model.site_shapes
        positions = unit_positions(Action(problem.symmetry.finite, list(shapes), shapes))
        entries = sum(where.shape[0] * where.shape[1] ** 2 for where in positions.values())
        if entries <= self.largest:
            return ""
        return (
            f"the covariances of its units have {entries:,} entries, more than {self.largest:,}; --budget "
            f"{self.title}.largest={entries} fits it all the same"
        )


@register
@dataclass(frozen=True)
class AlignedMeanField(_Variational):
    """Two independent mean-field fits; the second is pushed forward by the permutation of hidden units, and the flips
    of their signs if the network has these, that bring it closest to the first in Wasserstein distance (Rossi et al.
    2023). The midpoints lie half-way along the Wasserstein geodesic between the two, with and without that move. Of
    several runs all are brought to the first and drawn from alike; the midpoint is their barycentre."""

    path_points: int = 21
    path_draws: int = 32

    name = "aligned"
    labels = ("aligned", "aligned midpoint", "unaligned midpoint")
    quick_budget: ClassVar = {**_Variational.quick_budget, "path_points": 11, "path_draws": 16}

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        runs = max(2, self.modes)
        fits = [self._mean_field(problem, f"{self.title} {k + 1}/{runs}", progress) for k in range(runs)]
        first, *others = (guide for guide, _ in fits)
        group = problem.symmetry.finite
        found = [align(other, first, group, cost="wasserstein", progress=progress) for other in others]
        moved = [push_forward(other, alignment.element) for other, alignment in zip(others, found, strict=True)]
        ends = {"aligned": moved[0], "unaligned": others[0]}
        curves = {name: self._path(problem, first, end, progress) for name, end in ends.items()}
        details = {
            "squared_wasserstein_before": statistics.fmean(alignment.initial_cost for alignment in found),
            "squared_wasserstein_after": statistics.fmean(alignment.cost for alignment in found),
        }
        drawn = moved if self.modes == 1 else [first, *moved]
        losses = fits[1][1]
        both = pooled([self._fit(problem, guide, self.labels[0], losses) for guide in drawn])
        yield replace(both, barrier=curves, details=both.details | details)
        yield self._fit(problem, barycentre([first, *moved]), self.labels[1], [])
        yield self._fit(problem, barycentre([first, *others]), self.labels[2], [])

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
