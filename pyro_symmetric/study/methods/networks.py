"""Methods that start from trained networks: ensembles, Monte Carlo dropout, SWAG. All networks train at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_symmetric.ensembles.parts import Parts, joined
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.guides import swag
from pyro_symmetric.samples import Posterior
from pyro_symmetric.study.methods.base import Fit, Method, register
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.study.training import fit_networks
from pyro_symmetric.weights import Weights

LOSS = "negative log-posterior (nats)"
TOGETHER = 100  # networks of an ensemble that are trained and written at once


@dataclass(frozen=True)
class _Networks(Method):
    """Budget of a method that trains networks."""

    steps: int = 1500
    learning_rate: float = 0.01
    batch_size: int = 256

    quick_budget: ClassVar[Mapping[str, Any]] = {"steps": 300, "learning_rate": 0.02}
    many: ClassVar[int | None] = 10

    def _train(self, problem: Problem, progress: bool, **more: Any) -> tuple[Weights, list[float]]:
        options = {
            "num_networks": self.modes,
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            "batch_size": self.batch_size,
            "label": self.title,
            "progress": progress,
        }
        return fit_networks(problem.model, problem.x, problem.y, **{**options, **more})

    def _draws_each(self, problem: Problem) -> int:
        """Draws from each mode, so that all together are as many as are compared."""
        return -(-problem.settings.num_draws // self.modes)


@register
@dataclass(frozen=True)
class Ensemble(_Networks):
    """Independently trained networks. ``single-ensemble`` is one network, ``multi-ensemble`` a few that are trained
    apart from those of ``ensemble``, to be held against it as the reference."""

    modes: int = 100

    name: ClassVar[str] = "ensemble"
    labels: ClassVar[tuple[str, ...]] = ("ensemble",)
    summary: ClassVar[str] = "A deep ensemble: networks trained independently, each to a mode of the posterior (MAP)."
    quick_budget: ClassVar[Mapping[str, Any]] = {**_Networks.quick_budget, "modes": 40}

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        parts = Parts(problem.scratch, self.budget, int(torch.randint(2**62, ())))
        counts = [len(part) for part in torch.arange(self.modes).split(TOGETHER)]
        found = [parts.get(k) or self._part(parts, k, count, problem, progress) for k, count in enumerate(counts)]
        curves = torch.tensor([part.metadata["losses"] for part in found])
        losses = (torch.tensor(counts, dtype=curves.dtype) @ curves / self.modes).tolist()
        yield Fit(self.name, joined(found, self.budget), losses, LOSS)

    def _part(self, parts: Parts, index: int, count: int, problem: Problem, progress: bool) -> Posterior:
        """Train some of the networks, under a seed of their own, and keep them."""
        began = time.perf_counter()
        torch.manual_seed(parts.seed + index)
        label = self.title if count == self.modes else f"{self.title}, {index * TOGETHER + count} of {self.modes}"
        weights, losses = self._train(problem, progress, num_networks=count, label=label)
        metadata = {"losses": losses, "stopped": [], "seconds": time.perf_counter() - began}
        part = Posterior.from_samples(_on_cpu(weights), rows="independent", metadata=metadata)
        parts.put(index, part)
        return part


@register
@dataclass(frozen=True)
class Dropout(_Networks):
    """Networks whose hidden units are dropped at random, in training and afterwards."""

    rate: float = 0.1

    name: ClassVar[str] = "mc-dropout"
    labels: ClassVar[tuple[str, ...]] = ("mc-dropout",)
    summary: ClassVar[str] = (
        "Monte Carlo dropout (Gal & Ghahramani 2016): a trained network whose hidden units are dropped at random; each "
        "draw is the network with one set of units dropped, as weights."
    )

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        group = problem.symmetry.permutations

        def perturb(weights: Weights) -> Weights:
            return dropped(weights, group, self.rate)

        weights, losses = self._train(problem, progress, perturb=perturb)
        count = self._draws_each(problem)
        repeated = {site: value[:, None].expand(self.modes, count, *value.shape[1:]) for site, value in weights.items()}
        yield Fit(self.name, Posterior(_on_cpu(perturb(repeated)), rows="independent"), losses, LOSS)


@register
@dataclass(frozen=True)
class SWAG(_Networks):
    """A Gaussian from the path of stochastic gradient descent around a trained network."""

    iterates: int = 40
    every: int = 20
    rank: int = 20
    descent_rate: float = 0.02

    name: ClassVar[str] = "swag"
    labels: ClassVar[tuple[str, ...]] = ("swag",)
    summary: ClassVar[str] = (
        "SWAG (Maddox et al. 2019): a Gaussian, diagonal plus low rank, with the moments of the iterates of stochastic "
        "gradient descent at a constant step size, begun at a trained network."
    )
    quick_budget: ClassVar[Mapping[str, Any]] = {**_Networks.quick_budget, "iterates": 20, "every": 10}

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        start, losses = self._train(problem, progress)
        path: list[Weights] = []

        def watch(step: int, weights: Weights) -> None:
            if (step + 1) % self.every == 0:
                path.append({site: value.clone() for site, value in weights.items()})

        self._train(
            problem,
            progress,
            start=start,
            descent=True,
            steps=self.iterates * self.every,
            learning_rate=self.descent_rate,
            label=f"{self.title}: descent",
            watch=watch,
        )
        count = self._draws_each(problem)
        draws = []
        for mode in range(self.modes):
            iterates = {site: torch.stack([weights[site][mode] for weights in path]) for site in path[0]}
            draws.append(swag(problem.model, iterates, self.rank).sample_posterior((count,)))
        samples = {site: torch.stack([draw[site] for draw in draws]) for site in draws[0]}
        yield Fit(self.name, Posterior(_on_cpu(samples), rows="independent"), losses, LOSS)


def dropped(weights: Weights, group: Group, rate: float) -> Weights:
    """Weights with the outgoing weights of random hidden units at zero, and those of the others scaled up in return.

    A unit is what the symmetry permutes. Its outgoing weights lie along second axes or, those into grouped
    convolutions, along several axes at once.

    :param weights: of any batch shape; each member has its own units dropped.
    :param group: the permutations.
    :param rate: the probability with which a unit is dropped.
    """
    result = dict(weights)
    for units in group.units.values():
        axes = [axis for axis in units.axes if (axis.dim == 1 or axis.span > 1) and axis.site in result]
        if not axes:
            continue
        like = weights[axes[0].site]
        batch = like.shape[: like.dim() - len(group.site_shapes[axes[0].site])]
        kept = (torch.rand(*batch, units.count, device=like.device) >= rate).to(like.dtype) / (1 - rate)
        for axis in axes:
            result[axis.site] = _scaled(result[axis.site], axis, kept)
    return result


def _scaled(value: Tensor, axis: Axis, factors: Tensor) -> Tensor:
    """A site with its units along ``axis`` multiplied by ``factors`` of shape ``batch_shape + (n,)``."""
    first = factors.dim() - 1 + axis.dim
    flat = value.flatten(first, first + axis.span - 1)
    along = torch.ones_like(factors[..., :1]).repeat(*[1] * (factors.dim() - 1), flat.shape[first])
    along[..., axis.index.to(along.device)] = factors[..., None, :].expand(*factors.shape[:-1], *axis.index.shape)
    shape = [*factors.shape[:-1], *[1] * axis.dim, flat.shape[first], *[1] * (flat.dim() - first - 1)]
    return (flat * along.reshape(shape)).reshape(value.shape)


def _on_cpu(samples: Weights) -> Weights:
    return {site: value.cpu() for site, value in samples.items()}
