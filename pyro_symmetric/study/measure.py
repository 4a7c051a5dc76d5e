"""Everything that is measured of a fit: its predictions, its distance to the reference, how its chains mixed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.chain_statistics import chain_statistics, evenly_spaced
from pyro_symmetric.compare import (
    DistanceResult,
    independent_draws,
    invariance_tests,
    marginal_wasserstein,
    mmd,
    scores,
    total_variation,
)
from pyro_symmetric.compare.frames import pooled_frame
from pyro_symmetric.compare.predictive_distance import Prediction
from pyro_symmetric.compare.results import plain
from pyro_symmetric.diagnostics import R_HAT
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.study.methods import Fit
from pyro_symmetric.study.problem import Problem, noise_scale
from pyro_symmetric.study.tables import OWN_HALF, nll
from pyro_symmetric.weights import Weights

# Training rows and draws that are enough to tell an underfit from an overfit.
TRAINING_ROWS, TRAINING_DRAWS = 1_000, 100
MIN_REFERENCE = 4
# Test rows whose predictions are followed along chains: enough for a worst case, few enough to be instant.
FOLLOWED_ROWS = 32
CHUNK = 32


@dataclass(frozen=True)
class Draws:
    """Draws of a fit, thinned evenly to at most as many as are compared, as they are and in canonical form."""

    raw: Weights
    canonical: Weights

    @property
    def count(self) -> int:
        """The number of draws."""
        return len(next(iter(self.raw.values())))


@dataclass(frozen=True)
class Predicted:
    """Predictions of draws on the test rows.

    :param law: the predictive distribution, as :func:`~pyro_symmetric.compare.total_variation` takes it.
    :param nll: the mean negative log-likelihood of the targets.
    """

    law: Prediction
    nll: float

    @classmethod
    def by(cls, draws: Draws, problem: Problem) -> Predicted:
        """Of draws whose scores aren't needed."""
        law = predictive(draws.raw, problem, problem.dataset.test_x)
        score = nll(_scores(law, problem, problem.dataset.test_y))
        return cls(law if isinstance(law, tuple) else law.mean(0, dtype=torch.float64), score)


@dataclass(frozen=True)
class Reference:
    """The reference that all methods are compared with.

    :param label: the method that made it.
    :param draws: its draws.
    :param predicted: what they predict.
    :param halves: as many draws again from each half of its chains.
    :param predicted_halves: what each half predicts.
    :param own: ``"raw"``, ``"removed"`` and ``"prediction"`` -> distance -> that of the halves, how far the reference
        is from itself; its choices (kernels) serve for all methods.
    """

    label: str
    draws: Draws
    predicted: Predicted
    halves: tuple[Draws, Draws]
    predicted_halves: tuple[Predicted, Predicted]
    own: dict[str, dict[str, DistanceResult]]


def draws_of(posterior: Posterior, problem: Problem) -> Draws:
    """The draws that are compared, thinned evenly over all chains, on the study's device."""
    flat = posterior.get_samples()
    total = posterior.num_chains * posterior.num_samples
    keep = evenly_spaced(total, problem.settings.draws)
    raw = {site: value[keep].to(problem.x.device) for site, value in flat.items()}
    return Draws(raw, problem.canonical(raw))


def reference_of(fit: Fit, draws: Draws, problem: Problem) -> Reference:
    """Make a fit the reference.

    :raises ValueError: if it has too few draws to be split.
    """
    if draws.count < MIN_REFERENCE:
        raise ValueError(
            f"the reference {fit.label!r} has {draws.count} draws; at least {MIN_REFERENCE} are needed, so that one "
            "half can be compared with the other"
        )
    samples, chains = fit.posterior.samples, fit.posterior.num_chains
    if chains > 1:
        cut = [{site: value[part] for site, value in samples.items()} for part in _halves(chains)]
    else:
        cut = [{site: value[:, part] for site, value in samples.items()} for part in _halves(fit.posterior.num_samples)]
    first, second = (draws_of(Posterior(part, rows=fit.posterior.rows), problem) for part in cut)
    predicted = Predicted.by(first, problem), Predicted.by(second, problem)
    own = between((first, second), predicted, problem.symmetry)
    return Reference(fit.label, draws, Predicted.by(draws, problem), (first, second), predicted, own)


def measure(fit: Fit, draws: Draws, reference: Reference | None, problem: Problem, seconds: float) -> dict[str, Any]:
    """One row of the report, as JSON."""
    statistics = (
        {site: chain_statistics(value) for site, value in fit.posterior.samples.items()} if fit.is_chain else {}
    )
    sites = {site: found.summary() for site, found in statistics.items()}
    independent = max(2, independent_draws(fit.posterior, statistics)) if fit.is_chain else draws.count
    law = predictive(draws.raw, problem, problem.dataset.test_x)
    prediction = scores_on_test_rows(law, draws.raw, problem)
    row: dict[str, Any] = {
        "draws": draws.count,
        "seconds": seconds,
        "prediction": prediction,
        "training": training_scores(draws.raw, problem),
        "invariance": invariance(draws, problem, min(independent, draws.count)) if draws.count > 1 else None,
        "evidence": fit.evidence,
        "barrier": fit.barrier,
        "details": fit.details,
        "chains": chain_diagnostics(fit.posterior, sites, problem) if fit.is_chain else None,
        "distance": None,
    }
    if reference is not None and draws.count > 1:  # a single network is no sample
        itself = fit.label == reference.label
        predicted = reference.predicted_halves if itself else (Predicted(law, nll(prediction)), reference.predicted)
        pair = (draws, reference.draws)
        found = reference.own if itself else between(pair, predicted, problem.symmetry, reference.own)
        row["distance"] = {
            "to": OWN_HALF if itself else reference.label,
            "prediction": {
                **{name: plain(result.totals) for name, result in found["prediction"].items()},
                "nll_gap": predicted[0].nll - predicted[1].nll,
            },
            **{kind: {name: result.to_dict() for name, result in found[kind].items()} for kind in ("raw", "removed")},
        }
    return row


def between(
    draws: Sequence[Draws],
    predicted: Sequence[Predicted],
    symmetry: Symmetry,
    like: Mapping[str, Mapping[str, DistanceResult]] | None = None,
) -> dict[str, dict[str, DistanceResult]]:
    """Distances between two samples: of what they predict, and of their weights, as they come, and with the symmetries
    removed: in the frame in which the draws of both lie closest together.

    :param like: earlier results, whose kernels are used again.
    """
    first, second = predicted
    found = {"prediction": {"total_variation": total_variation(first.law, second.law)}}
    sides = {
        "raw": [side.raw for side in draws],
        "removed": pooled_frame([side.canonical for side in draws], symmetry),
    }
    for kind, (p, q) in sides.items():
        kernels = None if like is None else like[kind]["mmd"]
        found[kind] = {"mmd": mmd(p, q, bandwidths=kernels), "wasserstein": marginal_wasserstein(p, q)}
    return found


def concerns(rows: Mapping[str, Mapping[str, Any]], reference: str) -> list[str]:
    """Facts that a reader must know before believing the comparison, a sentence each."""
    chains = (rows.get(reference) or {}).get("chains")
    if chains is None:
        return []
    found = []
    if not chains["r_hat_predictions"] <= R_HAT[1]:
        found.append(
            f"The reference has not converged: R-hat of its predictions is {chains['r_hat_predictions']:.2f}, over "
            f"{R_HAT[1]}. Distances to it say little; give it more draws."
        )
    if chains["divergences"]:
        found.append(f"{chains['divergences']} draws of the reference diverged; it may miss parts of the posterior.")
    return found


@torch.no_grad()
def predictions(weights: Weights, problem: Problem, x: Tensor) -> Tensor:
    """Members' class probabilities ``(S, N, C)`` or regression means ``(S, N, D)``."""
    return problem.model.likelihood.mean(problem.model.outputs(weights, x, chunk_size=CHUNK))


def predictive(weights: Weights, problem: Problem, x: Tensor) -> Prediction:
    """The members' class probabilities ``(S, N, C)``, or a regression's means ``(S, N, D)`` and noise."""
    members = predictions(weights, problem, x)
    return members if problem.is_classification else (members, noise_scale(problem.model, weights))


def scores_on_test_rows(law: Prediction, weights: Weights, problem: Problem) -> dict[str, Any]:
    """Accuracy, likelihood, calibration and out-of-distribution scores on the test rows."""
    data = problem.dataset
    outside = None if data.ood_x is None else predictions(weights, problem, data.ood_x)
    return _scores(law, problem, data.test_y, outside)


def training_scores(weights: Weights, problem: Problem) -> dict[str, Any]:
    """The same of (at most a thousand) training rows, by some of the draws."""
    rows = evenly_spaced(len(problem.x), TRAINING_ROWS)
    kept = evenly_spaced(len(next(iter(weights.values()))), TRAINING_DRAWS)
    law = predictive({site: value[kept] for site, value in weights.items()}, problem, problem.x[rows])
    return _scores(law, problem, problem.y[rows])


def _scores(law: Prediction, problem: Problem, y: Tensor, outside: Tensor | None = None) -> dict[str, Any]:
    if not isinstance(law, tuple):
        return scores.classification(law, y, outside).to_dict()
    (means, noise), data = law, problem.dataset
    targets = data.unstandardize_y(problem.model.likelihood.targets(y))
    return scores.regression(data.unstandardize_y(means), noise * data.y_scale, targets).to_dict()


def invariance(draws: Draws, problem: Problem, independent: int) -> dict[str, Any]:
    """Corollary tests of permutation invariance, on as many draws as are independent."""
    keep = evenly_spaced(draws.count, independent)
    known = {site: value[keep] for site, value in draws.raw.items() if site in problem.symmetry.site_shapes}
    posterior = Posterior.from_samples(known, rows="independent")
    result = invariance_tests(posterior, problem.symmetry.permutations).to_dict()
    return {**result, "num_draws": result["num_samples"][0]}


@torch.no_grad()
def chain_diagnostics(posterior: Posterior, sites: Mapping[str, Mapping[str, Any]], problem: Problem) -> dict[str, Any]:
    """R-hat and ESS of weights and of predictions, divergences, acceptance."""
    weights = {site: value.to(problem.x.device) for site, value in posterior.get_samples().items()}
    followed = predictions(weights, problem, problem.dataset.test_x[:FOLLOWED_ROWS]).cpu()
    chains = (posterior.num_chains, posterior.num_samples)
    in_function_space = Posterior({"prediction": followed.reshape(*chains, -1)}, rows="chains").diagnostics()[
        "prediction"
    ]
    statistics = posterior.statistics
    acceptance, temperature = statistics.get("acceptance_rate"), statistics.get("kinetic_temperature")
    return {
        "num_chains": chains[0],
        "num_draws": chains[1],
        "r_hat_weights": max((entry["r_hat"] for entry in sites.values()), default=math.nan),
        "ess_weights": min((entry["ess_bulk"] for entry in sites.values()), default=math.nan),
        "r_hat_predictions": in_function_space["r_hat"],
        "ess_predictions": in_function_space["ess_bulk"],
        "divergences": int(posterior.divergences.sum()) if "diverging" in statistics else None,
        "acceptance": None if acceptance is None else float(acceptance.double().mean()),
        "kinetic_temperature": None if temperature is None else float(temperature.double().mean()),
    }


def _halves(count: int) -> tuple[slice, slice]:
    return slice(0, count // 2), slice(count // 2, None)
