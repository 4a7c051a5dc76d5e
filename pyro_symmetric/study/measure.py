"""The measurements of a fit: scores of its predictions, distances to the reference,
invariance, convergence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from pyro_symmetric.alignment import GaussianWeights, align
from pyro_symmetric.arguments import Json
from pyro_symmetric.compare import (
    independent_draws,
    invariance_tests,
    marginal_wasserstein,
    mmd,
    scores,
)
from pyro_symmetric.compare import total_variation as total_variation_of
from pyro_symmetric.compare.frames import (
    canonical_frame,
    frame_of_orbits,
    one_frame,
    pooled_frame,
)
from pyro_symmetric.compare.invariance import holm, p_value_text
from pyro_symmetric.compare.results import DistanceResult, plain
from pyro_symmetric.compare.scores import Prediction
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.posterior.diagnostics import R_HAT
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import chain_statistics, evenly_spaced
from pyro_symmetric.study.methods import Fit
from pyro_symmetric.study.problem import Problem, noise_scale
from pyro_symmetric.weights import (
    Weights,
    first_value,
    keep_names,
    map_values,
    select_rows,
)

# enough to tell underfitting from overfitting
TRAINING_ROWS = 1_000
TRAINING_DRAWS = 100
MIN_REFERENCE = 4
OWN_HALF = "its own other half"  # of the draws, with which the reference is compared
FOLLOWED_ROWS = 32  # test rows whose predictions are followed along chains
CHUNK = 32
FRAME_DRAWS = 100  # at least, whose moments others are aligned to
GROUPS = 20  # of test rows, each left out once for the standard errors of scores

# "raw", "removed" and "prediction" -> distance -> result
Distances = dict[str, dict[str, DistanceResult]]


@dataclass(frozen=True)
class Draws:
    """Draws of a fit, thinned evenly to the number that is compared.

    :param raw: the draws as they came.
    :param canonical: the draws in canonical form.
    :param predictive: predictions on the test rows, as
        :func:`~pyro_symmetric.compare.total_variation` takes them.
    :param scores: scores on the test rows.
    :param replicates: their numbers, by path, without each of some groups of rows.
    """

    raw: Weights
    canonical: Weights
    predictive: Prediction
    scores: Json
    replicates: list[dict[str, float]]

    @property
    def nll(self) -> float:
        """The mean negative log-likelihood of the test targets."""
        return nll(self.scores)

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
    drawn = select_rows(posterior.get_samples(), keep)
    raw = map_values(lambda value: value.to(problem.x.device), drawn)
    data = problem.dataset
    prediction = predictive(raw, problem, data.test_x)
    outside = None if data.ood_x is None else predictions(raw, problem, data.ood_x)
    scored = _scores(prediction, problem, data.test_y, outside)
    canonical = canonical_frame(raw, problem.symmetry)
    without = _replicates(prediction, problem, data.test_y, outside)
    return Draws(raw, canonical, prediction, scored, without)


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
    first: Draws, second: Draws, symmetry: Symmetry, earlier: Distances | None = None
) -> Distances:
    """Measure distances between two samples: of predictions, of weights as drawn, and
    with symmetries removed, in the frame that brings the draws of both closest
    together.

    :param earlier: earlier distances, whose kernels are reused.
    """
    distances = {
        "prediction": {
            "total_variation": total_variation_of(first.predictive, second.predictive)
        }
    }
    removed = pooled_frame([first.canonical, second.canonical], symmetry)
    for kind, (p, q) in {"raw": (first.raw, second.raw), "removed": removed}.items():
        kernels = None if earlier is None else earlier[kind]["mmd"]
        distances[kind] = {
            "mmd": mmd(p, q, bandwidths=kernels),
            "wasserstein": marginal_wasserstein(p, q),
        }
    return distances


def measure(
    label: str, fit: Fit, draws: Draws, reference: Reference | None, problem: Problem
) -> Json:
    """Measure one row of the report, as JSON."""
    posterior = fit.posterior
    # a single network is no sample
    is_chain = posterior.kind == "chains"
    is_sample = draws.count > 1
    independent = (
        min(draws.count, max(2, independent_draws(posterior)))
        if is_chain
        else draws.count
    )
    against = reference.draws if reference and label != reference.label else None
    return {
        **fit.found,
        **_uncertainty(draws, against),
        "draws": draws.count,
        "prediction": draws.scores,
        "training": _training_scores(draws.raw, problem),
        "invariance": _invariance(draws, problem, independent) if is_sample else None,
        "chains": _chains(posterior, problem) if is_chain else None,
        "distance": _distance(label, draws, reference, problem)
        if reference and is_sample
        else None,
    }


def judge_together(rows: Iterable[Json]) -> None:
    """Adjust the tests of invariance for the number of methods, by Holm's method: the
    level holds over all of them together.
    """
    tests = [row["invariance"] for row in rows if row["invariance"]]
    p_values = torch.tensor(
        [test["p_value"] for test in tests], dtype=torch.float64, device="cpu"
    )
    for test, p_value in zip(tests, holm(p_values).tolist(), strict=True):
        rejected = p_value <= test["level"]
        outcome = "not invariant" if rejected else "no evidence against invariance"
        _, colon, details = test["verdict"].partition(": ")
        test["verdict"] = (
            f"{outcome} at level {test['level']:g} over all {len(tests)} methods "
            f"(p-value {p_value_text(p_value)}, {test['num_draws']:,} draws)"
            f"{(colon + details) * rejected}"
        )
        test |= {"adjusted": p_value, "rejected": rejected}


def concerns(rows: Mapping[str, Json], reference: str) -> list[str]:
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
    return [*sentences, *_contradictions(rows)]


def _contradictions(rows: Mapping[str, Json]) -> Iterator[str]:
    """Yield a sentence for each symmetrised guide whose ELBO is below that of a
    mean-field guide symmetrised afterwards, which it should exceed.
    """
    bounds = {
        name: row["evidence"] for name, row in rows.items() if row.get("evidence")
    }
    afterwards = next(
        (bounds[name] for name in bounds if name.split(":")[0] == "mean-field"), None
    )
    for name, bound in bounds.items():
        if afterwards is None or not name.startswith("symmetrized"):
            continue
        elbo = bound["symmetrized_elbo"]
        other_elbo = afterwards["symmetrized_elbo"]
        error = math.hypot(bound["symmetrized_error"], afterwards["symmetrized_error"])
        if elbo < other_elbo - 2 * error:
            yield (
                f"{name} was trained for the symmetrised ELBO, but its own, "
                f"{elbo:,.1f}, is below that of mean-field symmetrised afterwards, "
                f"{other_elbo:,.1f} (standard error of the difference {error:.1f}): it "
                "hasn't converged, so give it more steps."
            )


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


def nll(scores: Json) -> float:
    """Return the mean negative log-likelihood of a method's scores."""
    return float(
        scores["nll"] if "nll" in scores else -scores["log_predictive_density"]
    )


# small steps --------------------------------------------------------------------------


def _distance(label: str, draws: Draws, reference: Reference, problem: Problem) -> Json:
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


def _training_scores(weights: Weights, problem: Problem) -> Json:
    """Score some training rows by some of the draws."""
    rows = evenly_spaced(len(problem.x), TRAINING_ROWS)
    chosen = evenly_spaced(len(first_value(weights)), TRAINING_DRAWS)
    prediction = predictive(select_rows(weights, chosen), problem, problem.x[rows])
    return _scores(prediction, problem, problem.y[rows])


def _scores(
    prediction: Prediction, problem: Problem, y: Tensor, outside: Tensor | None = None
) -> Json:
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


def _replicates(
    prediction: Prediction, problem: Problem, y: Tensor, outside: Tensor | None
) -> list[dict[str, float]]:
    """Return the numbers of scores without each of :data:`GROUPS` groups of rows."""
    groups = groups_of(len(y)).to(y.device)
    beyond = None if outside is None else groups_of(outside.shape[1]).to(y.device)
    replicates = []
    for group in range(GROUPS):
        rows = groups != group
        if isinstance(prediction, tuple):
            members: Prediction = (prediction[0][:, rows], prediction[1])
        else:
            members = prediction[:, rows]
        outside_rows = None if outside is None else outside[:, beyond != group]
        replicates.append(_numbers(_scores(members, problem, y[rows], outside_rows)))
    return replicates


def groups_of(count: int) -> Tensor:
    """Assign rows, which may be ordered by class, to groups: the same at each call."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randperm(count, generator=generator, device="cpu") % GROUPS


def _numbers(scores: Json) -> dict[str, float]:
    """Return the single numbers among scores, by path."""
    (row,) = pd.json_normalize(scores, sep="/").to_dict("records")
    return {path: value for path, value in row.items() if isinstance(value, float)}


def _uncertainty(draws: Draws, reference: Draws | None) -> Json:
    """Return the differences of the scores from the reference's, and the standard
    errors, by path, of scores and of these differences, which share their rows.
    """
    scores = _numbers(draws.scores)
    of_reference = _numbers(reference.scores) if reference else {}
    errors = {}
    paired = {}
    for name, score in scores.items():
        replicates = [numbers[name] for numbers in draws.replicates]
        errors[f"prediction/{name}"] = _jackknife(replicates)
        if reference and name in of_reference:  # a network alone has fewer
            paired[name] = score - of_reference[name]
            pairs = zip(replicates, reference.replicates, strict=True)
            differences = [first - second[name] for first, second in pairs]
            errors[f"paired/{name}"] = _jackknife(differences)
    for name in {"nll", "log_predictive_density"} & paired.keys():
        errors["distance/prediction/nll_gap"] = errors[f"paired/{name}"]
    return {"paired": paired, "errors": errors}


def _jackknife(replicates: Sequence[float]) -> float:
    """Return the standard error of a number by the delete-a-group jackknife."""
    values = torch.tensor(replicates, dtype=torch.float64, device="cpu")
    return float(values.std(correction=0)) * (len(values) - 1) ** 0.5


def _invariance(draws: Draws, problem: Problem, independent: int) -> Json:
    """Test permutation invariance on as many draws as count as independent."""
    keep = evenly_spaced(draws.count, independent)
    named = keep_names(draws.raw, problem.symmetry.site_shapes)
    weights = select_rows(named, keep)
    return {
        **invariance_tests(weights, problem.symmetry.permutations).to_dict(),
        "num_draws": len(keep),
    }


def _modulo(posterior: Posterior, problem: Problem) -> Weights:
    """Align draws: as many as are compared with each other, then all to these."""
    symmetry = problem.symmetry
    most = max(FRAME_DRAWS, problem.settings.draws)
    count = posterior.num_chains * posterior.num_samples
    if count <= most:
        return frame_of_orbits(posterior, symmetry).samples
    canonical = canonical_frame(posterior, symmetry)
    compared = select_rows(canonical.get_samples(), evenly_spaced(count, most))
    frame = one_frame(compared, symmetry)
    means = map_values(lambda value: value.mean(0), frame)
    # a weight that never changes has a deviation, too
    deviations = map_values(lambda value: value.std(0).clamp(min=1e-6), frame)
    reference = GaussianWeights(means, deviations)
    group = symmetry.group.compact
    matched = align(canonical.samples, reference, group, "gaussian", restarts=0)
    return matched.element(canonical.samples)


@torch.no_grad()
def _chains(posterior: Posterior, problem: Problem) -> Json:
    """Measure convergence: R-hat and effective sample size of weights and predictions,
    and the sampler's statistics.
    """
    weights = map_values(lambda value: value.to(problem.x.device), posterior.samples)
    followed = chain_statistics(
        predictions(weights, problem, problem.dataset.test_x[:FOLLOWED_ROWS]).cpu()
    ).summary()
    sites = [chain_statistics(value).summary() for value in posterior.samples.values()]
    aligned = _modulo(posterior, problem).values()
    mean = map_values(lambda value: float(value.double().mean()), posterior.statistics)
    diverging = posterior.statistics.get("diverging")
    return {
        "num_chains": posterior.num_chains,
        "num_draws": posterior.num_samples,
        "r_hat_weights": max(site["r_hat"] for site in sites),
        "r_hat_modulo": max(chain_statistics(v).summary()["r_hat"] for v in aligned),
        "ess_weights": min(site["ess_bulk"] for site in sites),
        "r_hat_predictions": followed["r_hat"],
        "ess_predictions": followed["ess_bulk"],
        "divergences": None if diverging is None else int(diverging.sum()),
        "acceptance": mean.get("acceptance_rate"),
        "kinetic_temperature": mean.get("kinetic_temperature"),
    }
