"""Variational methods: mean-field and unit-block Gaussians, plain, symmetrised and
aligned, fitted by SVI.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuide, AutoNormal
from pyro.infer.autoguide.initialization import init_to_median, init_to_value
from pyro.optim import ClippedAdam
from tqdm import trange

from pyro_symmetric.alignment import align, loss_barrier
from pyro_symmetric.distributions import SinkhornImportance
from pyro_symmetric.ensembles import fresh_members
from pyro_symmetric.groups import Action
from pyro_symmetric.guides import (
    AutoSymmetrized,
    AutoUnitBlocks,
    WeightsGuide,
    barycentre,
    push_forward,
)
from pyro_symmetric.guides.evidence import evidence
from pyro_symmetric.guides.gaussian import AutoGaussian, plain_posterior, unit_positions
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.study.methods import Fit, TooLarge, register
from pyro_symmetric.study.problem import Problem
from pyro_symmetric.weights import map_values

BUDGET = {
    "modes": 1,
    "steps": 3000,
    "learning_rate": 0.02,
    "batch_size": 512,
    "init_scale": 0.03,
}
QUICK = {"steps": 400, "learning_rate": 0.03}
PARTICLES = 4


@register("mean-field", BUDGET, quick=QUICK)
def mean_field(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Fit Pyro's AutoNormal by SVI: an independent Gaussian for each weight."""
    fits = []
    for _ in range(budget.modes):
        fits.append(_fit(problem, *_mean_field(problem, budget, progress)))
    yield pooled(fits)


@register("symmetrized", {**BUDGET, "proposals": 4}, quick=QUICK)
def symmetrized(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Fit AutoSymmetrized: the mean-field guide averaged over all permutations of
    hidden units and, where they are symmetries, all sign flips (Gelberg et al. 2024),
    trained with SinkhornImportance. Its draws visit all copies equally."""
    yield _symmetrized(problem, budget, AutoDiagonalNormal, progress)


@register(
    "symmetrized-blocks",
    # a step costs the cube of the number of weights of a unit
    {**BUDGET, "proposals": 4, "largest": 500_000},
    quick=QUICK,
)
def symmetrized_blocks(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Fit AutoSymmetrized over AutoUnitBlocks: correlated weights within each hidden
    unit, independent units; the same group and estimator. Left out if units have too
    many weights."""
    shapes = problem.model.site_shapes
    positions = unit_positions(Action(problem.symmetry.finite, list(shapes), shapes))
    entries = sum(block.numel() * block.shape[1] for block in positions)
    if entries > budget.largest:
        raise TooLarge(
            f"the covariances of its units have {entries:,} entries, more than "
            f"{budget.largest:,}; "
            f"symmetrized-blocks:largest={entries} fits it nevertheless"
        )
    yield _symmetrized(problem, budget, AutoUnitBlocks, progress)


@register(
    "aligned",
    {**BUDGET, "path_points": 21, "path_draws": 32},
    labels=("aligned", "aligned midpoint", "unaligned midpoint"),
    quick={**QUICK, "path_points": 11, "path_draws": 16},
)
def aligned(problem: Problem, budget: Any, progress: bool) -> Iterator[Fit]:
    """Fit two independent mean-field guides and align the second with the first: push
    it forward by the permutation of hidden units (and the sign flips, where they are
    symmetries) that minimises their Wasserstein distance (Rossi et al. 2023). The
    midpoints are those of the Wasserstein geodesic between the two, with and without
    alignment. With modes=2 or more, all fits are aligned with the first and pooled, and
    the midpoints are their barycentres."""
    fits = [_mean_field(problem, budget, progress) for _ in range(max(2, budget.modes))]
    first, *later_guides = (guide for guide, _ in fits)
    finite = problem.symmetry.finite
    moved = []
    before = []
    after = []
    for later_guide in later_guides:
        found = align(later_guide, first, finite, cost="wasserstein", progress=progress)
        moved.append(push_forward(later_guide, found.element))
        before.append(found.initial_cost)
        after.append(found.cost)
    drawn = moved if budget.modes == 1 else [first, *moved]
    pooled_draws = pooled([_fit(problem, guide, fits[1][1]) for guide in drawn])
    data = problem.dataset
    rows = {"train": (data.train_x, data.train_y), "test": (data.test_x, data.test_y)}
    curves = {}
    for name, end in {"aligned": moved[0], "unaligned": later_guides[0]}.items():
        curves[name] = loss_barrier(
            first,
            end,
            problem.model,
            rows,
            num_points=budget.path_points,
            num_samples=budget.path_draws,
            progress=progress,
        ).to_dict()
    details = {
        "squared_wasserstein_before": statistics.fmean(before),
        "squared_wasserstein_after": statistics.fmean(after),
    }
    yield Fit(
        pooled_draws.posterior,
        {**pooled_draws.found, "barrier": curves, "details": details},
    )
    yield _fit(problem, barycentre([first, *moved]), [])
    yield _fit(problem, barycentre([first, *later_guides]), [])


# small steps --------------------------------------------------------------------------


def pooled(fits: list[Fit]) -> Fit:
    """Combine independent fits into their mixture of equal shares. No evidence bound is
    known of it.
    """
    if len(fits) == 1:
        return fits[0]
    draws = Posterior.concat(
        [Posterior(fit.posterior.samples, kind=fit.posterior.kind) for fit in fits]
    )
    return Fit(draws, {**fits[0].found, "evidence": None})


def _mean_field(
    problem: Problem, budget: Any, progress: bool
) -> tuple[WeightsGuide, list[float]]:
    """Fit Pyro's mean-field guide from fresh initial values; return a copy that draws
    without data, and the losses.
    """
    stock = AutoNormal(
        problem.model, init_loc_fn=_start(problem), init_scale=budget.init_scale
    )
    losses = _train(problem, budget, stock, progress)
    return AutoGaussian(stock, plain_posterior(stock)), losses


def _symmetrized(
    problem: Problem, budget: Any, base: type[AutoGuide], progress: bool
) -> Fit:
    fits = []
    for _ in range(budget.modes):
        guide = AutoSymmetrized(
            problem.model,
            problem.symmetry.finite,
            base,
            SinkhornImportance(budget.proposals),
            init_loc_fn=_start(problem),
            init_scale=budget.init_scale,
        )
        losses = _train(problem, budget, guide, progress)
        fits.append(_fit(problem, guide, losses))
    return pooled(fits)


def _start(problem: Problem) -> Any:
    values = map_values(lambda value: value[0], fresh_members(problem.model.net, 1))
    return init_to_value(values=values, fallback=init_to_median)


def _fit(problem: Problem, guide: WeightsGuide, losses: list[float]) -> Fit:
    draws = guide.sample_posterior((problem.settings.draws,))
    joint = functools.partial(problem.model.log_joint, x=problem.x, y=problem.y)
    bounds = evidence(guide, log_joint=joint, symmetry=problem.symmetry.finite)
    posterior = Posterior.from_samples(draws, kind="independent")
    numbers = asdict(replace(bounds, units=None))  # which are tensors, not JSON
    return Fit(
        posterior, {"losses": {"negative ELBO (nats)": losses}, "evidence": numbers}
    )


def _train(
    problem: Problem, budget: Any, guide: AutoGuide, progress: bool
) -> list[float]:
    """Maximise the ELBO by SVI on random mini-batches, with an Adam step size that
    falls a hundredfold.

    :returns: the loss of each step.
    :raises ValueError: if a loss isn't finite.
    """
    pyro.clear_param_store()  # guides of one class name their parameters alike
    x = problem.x
    y = problem.y
    losses = []
    optimizer = ClippedAdam(
        {
            "lr": budget.learning_rate,
            "lrd": 0.01 ** (1 / budget.steps),
            "clip_norm": 1e3,
        }
    )
    elbo = Trace_ELBO(
        num_particles=PARTICLES, vectorize_particles=True, max_plate_nesting=1
    )
    svi = SVI(problem.model, guide, optimizer, elbo)
    for step in trange(
        budget.steps, desc=type(guide).__name__, unit="step", disable=not progress
    ):
        rows = torch.randperm(len(x), device=x.device)[: budget.batch_size]
        losses.append(svi.step(x[rows], y[rows]))
        if not math.isfinite(losses[-1]):
            raise ValueError(
                f"SVI: the loss is {losses[-1]} at step {step}; check the scales of "
                "the data and of the prior"
            )
    return losses
