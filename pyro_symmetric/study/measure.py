"""The measurements of a fit: scores of its predictions, distances to the reference,
invariance, convergence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.compare import (
    independent_draws,
    invariance_tests,
    marginal_wasserstein,
    mmd,
    scores,
)
from pyro_symmetric.compare import total_variation as total_variation_of
from pyro_symmetric.compare.frames import canonical_frame, pooled_frame
from pyro_symmetric.compare.results import DistanceResult, plain
from pyro_symmetric.compare.scores import Prediction
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.posterior.diagnostics import R_HAT
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import chain_statistics, evenly_spaced
from pyro_symmetric.study.methods import Fit
from pyro_symmetric.study.problem import Problem, noise_scale
from pyro_symmetric.weights import Weights, first_value, map_values, select_rows

# enough to tell underfitting from overfitting
TRAINING_ROWS = 1_000
TRAINING_DRAWS = 100
MIN_REFERENCE = 4
OWN_HALF = "its own other half"  # of the draws, with which the reference is compared
FOLLOWED_ROWS = 32  # test rows whose predictions are followed along chains
CHUNK = 32

# "raw", "removed" and "prediction" -> distance -> result
Distances = dict[str, dict[str, DistanceResult]]


@dataclass(frozen=True)
class Draws:
    """Draws of a fit, thinned evenly to the number that is compared.

    :param raw: the draws as they came.
    :param canonical: the draws in canonical form.
    :param predictive: predictions on the test rows, as
        :func:`~pyro_symmetric.compare.total_variation` takes them.
    :param nll: the mean negative log-likelihood of the test targets.
    """

    raw: Weights
    canonical: Weights
    predictive: Prediction
    nll: float

    @property
    def count(self) -> int:
        """The number of draws."""
        return len(first_value(self.raw))


@dataclass(frozen=True)
class Reference:
    """The method that all others are compared with.

    :param halves: the two halves of its chains, each thinned to the number of draws
        that is compared.
    :param own: the distances between the halves, whose kernels serve all methods.
    """

    label: str
    draws: Draws
    halves: tuple[Draws, Draws]
    own: Distances


def draws_of(posterior: Posterior, problem: Problem) -> Draws:
    """Select the draws to compare, evenly spaced over all chains, on the study's
    device.
    """
    keep = evenly_spaced(
        posterior.num_chains * posterior.num_samples, problem.settings.draws
    )
    raw = {
        site: value[keep].to(problem.x.device)
        for site, value in posterior.get_samples().items()
    }
    prediction = predictive(raw, problem, problem.dataset.test_x)
    scored = nll(_scores(prediction, problem, problem.dataset.test_y))
    return Draws(raw, canonical_frame(raw, problem.symmetry), prediction, scored)


def reference_of(
    label: str, posterior: Posterior, draws: Draws, problem: Problem
) -> Reference:
    """Make a fit the reference: split it in halves, by chains if it has several, and
    measure their distances.
    """
    by_chain = "chains" if posterior.num_chains > 1 else "draws"
    half = (
        posterior.num_chains if by_chain == "chains" else posterior.num_samples
    ) // 2
    cuts = (
        posterior.select(**{by_chain: part})
        for part in (slice(0, half), slice(half, None))
    )
    first, second = (draws_of(part, problem) for part in cuts)
    return Reference(
        label, draws, (first, second), between(first, second, problem.symmetry)
    )


def between(
    first: Draws, second: Draws, symmetry: Symmetry, like: Distances | None = None
) -> Distances:
    """Measure distances between two samples: of predictions, of weights as drawn, and
    with symmetries removed, in the frame that brings the draws of both closest
    together.

    :param like: earlier distances, whose kernels are reused.
    """
    distances = {
        "prediction": {
            "total_variation": total_variation_of(first.predictive, second.predictive)
        }
    }
    removed = pooled_frame([first.canonical, second.canonical], symmetry)
    for kind, (p, q) in {"raw": (first.raw, second.raw), "removed": removed}.items():
        kernels = None if like is None else like[kind]["mmd"]
        distances[kind] = {
            "mmd": mmd(p, q, bandwidths=kernels),
            "wasserstein": marginal_wasserstein(p, q),
        }
    return distances


def measure(
    label: str, fit: Fit, draws: Draws, reference: Reference | None, problem: Problem
) -> dict[str, Any]:
    """Measure one row of the report, as JSON."""
    data = problem.dataset
    posterior = fit.posterior
    # a single network is no sample
    is_chain = posterior.kind == "chains"
    is_sample = draws.count > 1
    independent = (
        min(draws.count, max(2, independent_draws(posterior)))
        if is_chain
        else draws.count
    )
    outside = (
        None if data.ood_x is None else predictions(draws.raw, problem, data.ood_x)
    )
    return {
        **fit.found,
        "draws": draws.count,
        "prediction": _scores(draws.predictive, problem, data.test_y, outside),
        "training": _training_scores(draws.raw, problem),
        "invariance": _invariance(draws, problem, independent) if is_sample else None,
        "chains": _chains(posterior, problem) if is_chain else None,
        "distance": _distance(label, draws, reference, problem)
        if reference and is_sample
        else None,
    }


def concerns(rows: Mapping[str, Mapping[str, Any]], reference: str) -> list[str]:
    """Return a sentence for each fault of the reference that puts the comparison in
    doubt.
    """
    chains = (rows.get(reference) or {}).get("chains")
    sentences = []
    if chains and not chains["r_hat_predictions"] <= R_HAT[1]:
        sentences.append(
            "The reference has not converged: R-hat of its predictions is "
            f"{chains['r_hat_predictions']:.2f}, above "
            f"{R_HAT[1]}. Distances to it mean little; run it for longer."
        )
    if chains and chains["divergences"]:
        sentences.append(
            f"{chains['divergences']} trajectories of the reference diverged; it may "
            "miss regions of the posterior."
        )
    return sentences


@torch.no_grad()
def predictions(weights: Weights, problem: Problem, x: Tensor) -> Tensor:
    """Predict class probabilities ``(S, N, C)`` or regression means ``(S, N, D)``, one
    for each draw.
    """
    return problem.model.likelihood.mean(
        problem.model.outputs(weights, x, chunk_size=CHUNK)
    )


def predictive(weights: Weights, problem: Problem, x: Tensor) -> Prediction:
    """Predict as :func:`predictions` does; a regression's means come with the noise
    scale.
    """
    members = predictions(weights, problem, x)
    return (
        members
        if problem.is_classification
        else (members, noise_scale(problem.model, weights))
    )


def nll(scores: Mapping[str, Any]) -> float:
    """Return the mean negative log-likelihood of a method's scores."""
    return float(
        scores["nll"] if "nll" in scores else -scores["log_predictive_density"]
    )


# small steps --------------------------------------------------------------------------


def _distance(
    label: str, draws: Draws, reference: Reference, problem: Problem
) -> dict[str, Any]:
    """Measure the distance to the reference, or that of the reference's own halves."""
    itself = label == reference.label
    first, second = reference.halves if itself else (draws, reference.draws)
    distances = (
        reference.own
        if itself
        else between(first, second, problem.symmetry, reference.own)
    )
    predicted = {
        "total_variation": plain(distances["prediction"]["total_variation"].totals)
    }
    return {
        "to": OWN_HALF if itself else reference.label,
        "prediction": {**predicted, "nll_gap": first.nll - second.nll},
        **{
            kind: map_values(lambda result: result.to_dict(), distances[kind])
            for kind in ("raw", "removed")
        },
    }


def _training_scores(weights: Weights, problem: Problem) -> dict[str, Any]:
    """Score some training rows by some of the draws."""
    rows = evenly_spaced(len(problem.x), TRAINING_ROWS)
    kept = evenly_spaced(len(first_value(weights)), TRAINING_DRAWS)
    prediction = predictive(select_rows(weights, kept), problem, problem.x[rows])
    return _scores(prediction, problem, problem.y[rows])


def _scores(
    prediction: Prediction, problem: Problem, y: Tensor, outside: Tensor | None = None
) -> dict[str, Any]:
    """Score predictions, a regression's in the data's own units.

    :param outside: class probabilities of out-of-distribution inputs.
    """
    if not isinstance(prediction, tuple):
        return scores.classification(prediction, y, outside).to_dict()
    (means, noise), data = prediction, problem.dataset
    targets = data.unstandardize_y(problem.model.likelihood.targets(y))
    return scores.regression(
        data.unstandardize_y(means), noise * data.y_scale, targets
    ).to_dict()


def _invariance(draws: Draws, problem: Problem, independent: int) -> dict[str, Any]:
    """Test permutation invariance on as many draws as count as independent."""
    keep = evenly_spaced(draws.count, independent)
    weights = {
        site: value[keep]
        for site, value in draws.raw.items()
        if site in problem.symmetry.site_shapes
    }
    return {
        **invariance_tests(weights, problem.symmetry.permutations).to_dict(),
        "num_draws": len(keep),
    }


@torch.no_grad()
def _chains(posterior: Posterior, problem: Problem) -> dict[str, Any]:
    """Measure convergence: R-hat and effective sample size of weights and predictions,
    and the sampler's statistics.
    """
    weights = map_values(lambda value: value.to(problem.x.device), posterior.samples)
    followed = chain_statistics(
        predictions(weights, problem, problem.dataset.test_x[:FOLLOWED_ROWS]).cpu()
    ).summary()
    sites = [chain_statistics(value).summary() for value in posterior.samples.values()]
    mean = map_values(lambda value: float(value.double().mean()), posterior.statistics)
    return {
        "num_chains": posterior.num_chains,
        "num_draws": posterior.num_samples,
        "r_hat_weights": max(site["r_hat"] for site in sites),
        "ess_weights": min(site["ess_bulk"] for site in sites),
        "r_hat_predictions": followed["r_hat"],
        "ess_predictions": followed["ess_bulk"],
        "divergences": int(posterior.statistics["diverging"].sum())
        if "diverging" in mean
        else None,
        "acceptance": mean.get("acceptance_rate"),
        "kinetic_temperature": mean.get("kinetic_temperature"),
    }
