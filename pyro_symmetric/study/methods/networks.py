"""Methods that start from trained networks: ensembles, Monte Carlo dropout, SWAG. All networks train at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_symmetric.ensembles import ensemble
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.guides import swag
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.methods.base import Fit, Method, register
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.study.settings import StudySettings
from pyro_symmetric.weights import Weights

LOSS = "negative log-posterior (nats)"
TOGETHER = 100  # networks of an ensemble that are trained at once


@dataclass(frozen=True)
class _Networks(Method):
    """Budget of a method that trains networks."""

    modes: int = 1
    steps: int = 1500
    learning_rate: float = 0.01
    batch_size: int = 256

    many = 10
    quick_budget: ClassVar = {"steps": 300, "learning_rate": 0.02}

    def _train(self, problem: Problem, progress: bool, steps: int | None = None, **more: Any) -> Posterior:
        """Train ``modes`` networks, each to a mode of the posterior, for about as many steps."""
        batch_size = min(self.batch_size, len(problem.x))
        options = {
            "epochs": max(1, round((steps or self.steps) / (len(problem.x) // batch_size))),
            "batch_size": batch_size,
            "optimizer": functools.partial(torch.optim.Adam, lr=self.learning_rate),
            "members_at_once": min(self.modes, TOGETHER),
            "seed": problem.seed,
            "progress": progress,
        }
        return ensemble(problem.model, (problem.x, problem.y), self.modes, **{**options, **more})

    def _draws_each(self, problem: Problem) -> int:
        """Draws from each mode, so that all together are as many as are compared."""
        return -(-problem.settings.draws // self.modes)


def losses_of(trained: Posterior, problem: Problem) -> list[float]:
    """The mean loss of an ensemble in each epoch, in nats: it is trained by the row."""
    return [len(problem.x) * loss for loss in trained.metadata["losses"]]


def weights_of(trained: Posterior, problem: Problem) -> Weights:
    """The networks' weights, of batch shape ``(modes,)``, where the data are."""
    return {site: value[0].to(problem.x.device) for site, value in trained.samples.items()}


@register
@dataclass(frozen=True)
class Ensemble(_Networks):
    """A deep ensemble: networks trained independently, each to a mode of the posterior (MAP).

    ``single-ensemble`` is one network, ``multi-ensemble`` a few that are trained apart from those of ``ensemble``, to
    be held against it as the reference."""

    modes: int = 100

    name = "ensemble"
    quick_budget: ClassVar = {**_Networks.quick_budget, "modes": 40}
    draws_globally = False

    def num_draws(self, settings: StudySettings) -> int:
        return self.modes

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        trained = self._train(problem, progress)
        yield Fit(self.name, trained, losses_of(trained, problem), LOSS)


@register
@dataclass(frozen=True)
class Dropout(_Networks):
    """Monte Carlo dropout (Gal & Ghahramani 2016): a trained network whose hidden units are dropped at random; each
    draw is the network with one set of units dropped, as weights."""

    rate: float = 0.1

    name = "mc-dropout"

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        group, model = problem.symmetry.permutations, copy.deepcopy(problem.model)
        call = model.call
        model.call = lambda weights, x: call(dropped(weights, group, self.rate), x)  # type: ignore[method-assign]
        trained = self._train(replace(problem, model=model), progress)
        weights, losses = weights_of(trained, problem), losses_of(trained, problem)
        count = self._draws_each(problem)
        repeated = {site: value[:, None].expand(self.modes, count, *value.shape[1:]) for site, value in weights.items()}
        yield Fit(self.name, Posterior(_on_cpu(dropped(repeated, group, self.rate)), kind="independent"), losses, LOSS)


@register
@dataclass(frozen=True)
class SwagNetworks(_Networks):
    """SWAG (Maddox et al. 2019): a Gaussian, diagonal plus low rank, with the moments of the iterates of stochastic
    gradient descent at a constant step size, begun at a trained network."""

    iterates: int = 40
    every: int = 20
    rank: int = 20
    descent_rate: float = 0.02

    name = "swag"
    quick_budget: ClassVar = {**_Networks.quick_budget, "iterates": 20, "every": 10}

    def fit(self, problem: Problem, progress: bool) -> Iterator[Fit]:
        trained = self._train(problem, progress)
        start, losses = weights_of(trained, problem), losses_of(trained, problem)
        path: list[Weights] = []

        def watch(step: int, weights: Weights) -> None:
            if (step + 1) % self.every == 0 and len(path) < self.iterates:
                path.append({site: value.clone() for site, value in weights.items()})

        ended = self._train(
            problem,
            progress,
            steps=self.iterates * self.every + len(problem.x) // self.batch_size,  # an epoch more, against rounding
            initial=lambda count: start,
            optimizer=functools.partial(torch.optim.SGD, lr=self.descent_rate, momentum=0.9),
            cosine=False,
            members_at_once=self.modes,
            watch=watch,
        )
        if ended.num_samples < self.modes:
            raise ValueError(f"{self.title}: the descent diverged; its descent_rate {self.descent_rate} is too large")
        count = self._draws_each(problem)
        draws = []
        for mode in range(self.modes):
            iterates = {site: torch.stack([weights[site][mode] for weights in path]) for site in path[0]}
            draws.append(swag(problem.model, iterates, self.rank).sample_posterior((count,)))
        samples = {site: torch.stack([draw[site] for draw in draws]) for site in draws[0]}
        yield Fit(self.name, Posterior(_on_cpu(samples), kind="independent"), losses, LOSS)


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
