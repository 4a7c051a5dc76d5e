"""Methods that start from trained networks: ensembles, Monte Carlo dropout, SWAG. All networks train at once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.ensembles import ensemble
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.layout import Layout
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.methods.base import Fit, register
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.weights import Weights

LOSS = "negative log-posterior (nats)"
TOGETHER = 100  # networks of an ensemble that are trained at once
NETWORKS = {"modes": 1, "steps": 1500, "learning_rate": 0.01, "batch_size": 256}
QUICK = {"steps": 300, "learning_rate": 0.02}
MANY: dict[str, Any] = {"many": (10, 2)}


def train(problem: Problem, budget: Any, progress: bool, steps: int | None = None, **more: Any) -> Posterior:
    """Train ``modes`` networks, each to a mode of the posterior, for about as many steps."""
    batch_size = min(budget.batch_size, len(problem.x))
    options = {
        "epochs": max(1, round((steps or budget.steps) / (len(problem.x) // batch_size))),
        "batch_size": batch_size,
        "optimizer": functools.partial(torch.optim.Adam, lr=budget.learning_rate),
        "members_at_once": min(budget.modes, TOGETHER),
        "seed": problem.seed,
        "progress": progress,
    }
    return ensemble(problem.model, (problem.x, problem.y), budget.modes, **{**options, **more})


def losses_of(trained: Posterior, problem: Problem) -> list[float]:
    """The mean loss of an ensemble in each epoch, in nats: it is trained by the row."""
    return [len(problem.x) * loss for loss in trained.metadata["losses"]]


def weights_of(trained: Posterior, problem: Problem) -> Weights:
    """The networks' weights, of batch shape ``(modes,)``, where the data are."""
    return {site: value[0].to(problem.x.device) for site, value in trained.samples.items()}


def draws_each(problem: Problem, budget: Any) -> int:
    """Draws from each mode, so that all together are as many as are compared."""
    return -(-problem.settings.draws // budget.modes)


@register(
    "ensemble", {**NETWORKS, "modes": 100}, quick={**QUICK, "modes": 40}, most_draws=lambda budget: budget.modes, **MANY
)
def deep_ensemble(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """A deep ensemble: networks trained independently, each to a mode of the posterior (MAP)."""
    trained = train(problem, budget, progress)
    yield Fit(trained, losses_of(trained, problem), LOSS)


@register("mc-dropout", {**NETWORKS, "rate": 0.1}, quick=QUICK, **MANY)
def dropout(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Monte Carlo dropout (Gal & Ghahramani 2016): a trained network whose hidden units are dropped at random; each
    draw is the network with one set of units dropped, as weights."""
    group, model = problem.symmetry.permutations, copy.deepcopy(problem.model)
    call = model.call
    model.call = lambda weights, x: call(dropped(weights, group, budget.rate), x)  # type: ignore[method-assign]
    trained = train(replace(problem, model=model), budget, progress)
    shape = (budget.modes, draws_each(problem, budget))
    repeated = {s: v[:, None].expand(*shape, *v.shape[1:]) for s, v in weights_of(trained, problem).items()}
    samples = {site: value.cpu() for site, value in dropped(repeated, group, budget.rate).items()}
    yield Fit(Posterior(samples, kind="independent"), losses_of(trained, problem), LOSS)


@register(
    "swag",
    {**NETWORKS, "iterates": 40, "every": 20, "rank": 20, "descent_rate": 0.02},
    quick={**QUICK, "iterates": 20, "every": 10},
    **MANY,
)
def swag_networks(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """SWAG (Maddox et al. 2019): a Gaussian, diagonal plus low rank, with the moments of the iterates of stochastic
    gradient descent at a constant step size, begun at a trained network."""
    trained = train(problem, budget, progress)
    path: list[Weights] = []

    def watch(step: int, weights: Weights) -> None:
        if (step + 1) % budget.every == 0 and len(path) < budget.iterates:
            path.append({site: value.clone() for site, value in weights.items()})

    ended = train(
        problem,
        budget,
        progress,
        steps=budget.iterates * budget.every + len(problem.x) // budget.batch_size,  # an epoch more, against rounding
        initial=lambda count: weights_of(trained, problem),
        optimizer=functools.partial(torch.optim.SGD, lr=budget.descent_rate, momentum=0.9),
        cosine=False,
        members_at_once=budget.modes,
        watch=watch,
    )
    if ended.num_samples < budget.modes:
        raise ValueError(f"swag: the descent diverged; its descent_rate {budget.descent_rate} is too large")
    draws = []
    for mode in range(budget.modes):
        iterates = {site: torch.stack([weights[site][mode] for weights in path]) for site in path[0]}
        draws.append(swag(problem.model, iterates, budget.rank, draws_each(problem, budget)))
    samples = {site: torch.stack([draw[site] for draw in draws]).cpu() for site in draws[0]}
    yield Fit(Posterior(samples, kind="independent"), losses_of(trained, problem), LOSS)


@torch.no_grad()
def swag(model: BayesianModel, iterates: Weights, rank: int, count: int) -> Weights:
    """Draw from the SWAG posterior (section 3 of the paper); sites with constraints are averaged unconstrained.

    Deviations of the last ``rank`` iterates are taken from the final mean, not from the mean as it stood at each: with
    all of them, the low-rank part is half of the iterates' covariance.

    :param iterates: weights of batch shape ``(S,)``, in the order in which SGD went through them.
    """
    layout = Layout.of(model.priors())
    path = layout.unconstrain(iterates)
    mean, last = path.mean(0), path[-rank:] - path.mean(0)
    spread = (0.5 * path.var(0, correction=0)).sqrt() * path.new_empty(count, layout.dim).normal_()
    return layout.constrain(
        mean + spread + path.new_empty(count, len(last)).normal_() @ last / (2 * (len(last) - 1)) ** 0.5
    )


def dropped(weights: Weights, group: Group, rate: float) -> Weights:
    """Weights with the outgoing weights of random hidden units at zero, and those of the others scaled up in return.

    A unit is what the symmetry permutes. Its outgoing weights lie along second axes or, those into grouped
    convolutions, along several axes at once.

    :param weights: of any batch shape; each member has its own units dropped.
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
