"""The tables of a report: which numbers, under which heading, and what each means in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyro_symmetric.diagnostics import R_HAT

if TYPE_CHECKING:
    from pyro_symmetric.study.compare import Study

Row = Mapping[str, Any]

MISSING = "–"
"""The sign in place of a missing number."""

RISES = (
    "With symmetries removed the number can rise: as drawn, a method that is spread over all copies resembles any "
    "reference that is, whatever its shape within a copy; removed, only that shape is left to be compared."
)
"""Why a symmetrised guide may lie further away once symmetries are removed."""

OWN_HALF = "its own other half"
"""The half of its own draws that the reference is compared to, in words."""


@dataclass(frozen=True)
class Column:
    """One column: its heading, how to read it off a row of results, how to print it, what it means.

    :param best: ``max`` or ``min``, if one of them is better; ``None`` if neither is.
    """

    title: str
    path: tuple[str, ...]
    form: str
    meaning: str
    best: Callable[..., float] | None = None

    def value(self, row: Row) -> Any:
        """The number in a row of results, or ``None``."""
        found: Any = row
        for key in self.path:
            if found is None:
                return None
            found = found.get(key)
        return found

    def text(self, row: Row) -> str:
        """The number as a person reads it."""
        value = self.value(row)
        if value is None or isinstance(value, str):
            return value or MISSING
        # Below the smallest number that p-values are computed with.
        return "<1e-300" if self.form.endswith("g") and 0 <= value < 1e-300 else format(value, self.form)


@dataclass(frozen=True)
class Table:
    """A table of the report.

    :param title: its heading.
    :param lead: what it is about.
    :param columns: its columns, after the one that names the method.
    :param competes: whether a row may be the best of a column.
    """

    title: str
    lead: str
    columns: tuple[Column, ...]
    competes: Callable[[Row], bool] = lambda row: True

    def rows(self, methods: Mapping[str, Row]) -> dict[str, list[tuple[str, bool]]]:
        """Method -> for each column the text, and whether it is the best. Methods without any number are left out."""
        rivals = [row for row in methods.values() if self.competes(row)]
        best = [_best(column, rivals) for column in self.columns]
        shown = {name: row for name, row in methods.items() if any(c.value(row) is not None for c in self.columns)}
        return {
            name: [
                (column.text(row), self.competes(row) and winner is not None and column.value(row) == winner)
                for column, winner in zip(self.columns, best, strict=True)
            ]
            for name, row in shown.items()
        }

    def as_text(self, methods: Mapping[str, Row]) -> str:
        """For a terminal."""
        import pandas as pd

        rows = [[text for text, _ in row] for row in self.rows(methods).values()]
        frame = pd.DataFrame(rows, index=list(self.rows(methods)), columns=[column.title for column in self.columns])
        return f"{self.title}\n{frame.to_string()}"


def _columns(*rows: tuple[str, str, str, Callable[..., float] | None, str]) -> tuple[Column, ...]:
    """Title, path (parted by /), form, best and meaning of each."""
    return tuple(
        Column(title, tuple(path.split("/")), form, meaning, best) for title, path, form, best, meaning in rows
    )


# A row for each column.
# fmt: off
CLASSIFICATION = Table(
    "Predictions",
    "Averaged over each method's draws, on the test rows and on inputs from out of the distribution.",
    _columns(
        ("accuracy", "prediction/accuracy", ".1%", max, "Share of test rows whose most probable class is right."),
        ("NLL", "prediction/nll", ".4f", min, "Negative log-likelihood: mean of −log of the probability given to the right class, in nats."),
        ("NLL train", "training/nll", ".4f", None, "The same on training rows: high where a method underfits, far under “NLL” where it overfits."),
        ("Brier", "prediction/brier", ".4f", min, "Brier score: mean squared distance of the probabilities from the truth, 0 to 2."),
        ("ECE", "prediction/ece", ".4f", min, "Expected calibration error: how far confidence and accuracy lie apart, over 15 bins of confidence."),
        ("AUPR", "prediction/detection/maximum_probability/aupr", ".3f", max, "Telling out-of-distribution inputs (the positive class) apart by the largest probability: area under the precision-recall curve."),
        ("FPR95", "prediction/detection/maximum_probability/fpr95", ".3f", min, "The same: share of test rows taken for foreign when 95 % of the foreign ones are found."),
        ("MI in", "prediction/uncertainty/mutual_information", ".4f", None, "Mutual information of prediction and draw on test rows, in nats: how much the draws disagree."),
        ("MI out", "prediction/uncertainty_ood/mutual_information", ".4f", None, "The same on out-of-distribution inputs; the higher over “MI in”, the better the method knows what it doesn't know."),
        ("AUPR by MI", "prediction/detection/mutual_information/aupr", ".3f", max, "As AUPR, with mutual information as the score."),
    ),
)

REGRESSION = Table(
    "Predictions",
    "Averaged over each method's draws, on the test rows, in the target's own units.",
    _columns(
        ("RMSE", "prediction/rmse", ".4f", min, "Root mean squared error of the mean prediction."),
        ("log density", "prediction/log_predictive_density", ".4f", max, "Mean log predictive density of the test targets, in nats."),
        ("log density train", "training/log_predictive_density", ".4f", None, "The same of the training targets: low where a method underfits, far over “log density” where it overfits."),
        ("90 % covered", "prediction/coverage/0.9", ".1%", None, "Share of test targets inside the central 90 % predictive interval."),
        ("calibration error", "prediction/calibration_error", ".4f", min, "Mean difference between the level of a central predictive interval and the share of targets inside."),
    ),
)

INVARIANCE = _columns(
    ("invariance p", "invariance/p_value", ".3g", None, "The true posterior is the same for every hidden unit of a layer. Smallest p-value, corrected for their number, of the tests that the draws are so too; small means that they are not."),
    ("draws tested", "invariance/num_draws", "d", None, "Independent draws that the invariance tests could use; with few of them a large p-value says nothing."),
    ("compared to", "distance/to", "s", None, "What the draws are compared to."),
)

REMOVED = "The same after symmetries are removed: hidden units scaled to the least total norm, biases included, where their scale is free, and permuted (and their signs flipped, where that is a symmetry) to where the draws of both sides together lie closest to their mean."

DISTANCES = Table(
    "Distance to the reference",
    "Between each method's draws and the reference's: in what they predict; and weight by weight, as they are, and with one "
    "representative for all weights that compute the same function. The reference itself is split in two halves of its chains: "
    f"what its own Monte Carlo error looks like. All rows share the kernels of that split. {RISES}",
    _columns(
        ("TV predictions", "distance/prediction/total_variation/mean", ".4f", min, "Total variation of the predictive distributions, averaged over test rows, 0 to 1: the most by which the two differ in the probability of any event. Symmetries don't matter here."),
        ("NLL gap", "distance/prediction/nll_gap", "+.4f", None, "Negative log-likelihood of the test targets, in nats a row, less the reference's; under 0 the method predicts better than the reference."),
        ("MMD² raw", "distance/raw/mmd/median", ".4f", None, "Squared maximum mean discrepancy, unbiased (so it may fall under 0): median over ten Gaussian and ten Laplace kernels, averaged over layers by their number of weights. As the draws come, symmetries and all."),
        ("MMD² removed", "distance/removed/mmd/median", ".4f", min, REMOVED),
        ("MMD² max removed", "distance/removed/mmd/maximum", ".4f", min, "The same by the kernel that tells the two apart best."),
        ("W₁ raw", "distance/raw/wasserstein/mean", ".4f", None, "One-dimensional Wasserstein distance of each weight's marginal, averaged over weights. Even between equal distributions it falls to zero only with the number of draws. As the draws come, symmetries and all."),
        ("W₁ removed", "distance/removed/wasserstein/mean", ".4f", min, REMOVED),
    )
    + INVARIANCE,
    competes=lambda row: bool(row["distance"]) and row["distance"]["to"] != OWN_HALF,
)

EVIDENCE = Table(
    "Evidence",
    "For variational methods: lower bounds of the log-evidence of the training data, in nats (with a likelihood temperature other than 1, of the tempered evidence).",
    _columns(
        ("ELBO", "evidence/elbo", ",.1f", max, "Evidence lower bound of the Gaussian guide, one copy of the mode, not averaged over symmetries."),
        ("±", "evidence/elbo_error", ".1f", None, "Its Monte Carlo standard error."),
        ("symmetrised ELBO", "evidence/symmetrized_elbo", ",.1f", max, "ELBO of the guide averaged over the network's finite group G: all permutations of hidden units and, if the network has them, all flips of their signs. It exceeds the ELBO by at most log |G|."),
        ("±", "evidence/symmetrized_error", ".1f", None, "Its Monte Carlo standard error."),
        ("bound", "evidence/bound", "s", None, "“lower”: the estimate is, in expectation, a lower bound of the symmetrised ELBO; “exact”: it is that ELBO."),
        ("estimator", "evidence/estimator", "s", None, "How the density of the symmetrised guide was estimated."),
        ("log |G|", "evidence/log_order", ",.1f", None, "Logarithm of the number of elements of G, over all of which the guide is averaged: permutations and flips of signs. Scales are continuous and no symmetry of the prior."),
    ),
)

CHAINS = Table(
    "Chains",
    "For Markov chains: whether they agree. In weight space chains that sit in different copies of a mode never do; in function space they can.",
    _columns(
        ("chains", "chains/num_chains", "d", None, "Number of chains."),
        ("draws each", "chains/num_draws", "d", None, "Draws kept of each."),
        ("R-hat weights", "chains/r_hat_weights", ".2f", None, f"Rank-normalised split R-hat of the worst weight; up to {R_HAT[0]:g} is good."),
        ("R-hat predictions", "chains/r_hat_predictions", ".2f", min, "The same of the worst of the predictions of 32 test rows."),
        ("ESS weights", "chains/ess_weights", ",.0f", None, "Effective sample size of the worst weight."),
        ("ESS predictions", "chains/ess_predictions", ",.0f", max, "Effective sample size of the worst prediction."),
        ("divergences", "chains/divergences", "d", None, "Draws whose trajectory diverged."),
        ("acceptance", "chains/acceptance", ".2f", None, "Mean acceptance probability."),
        ("kinetic temperature", "chains/kinetic_temperature", ".3f", None, "Mean kinetic temperature, for stochastic gradients: 1 where the step is small enough and friction outweighs the noise of mini-batches."),
    ),
)

COST = Table(
    "Cost",
    "",
    _columns(
        ("draws", "draws", "d", None, "Weight samples that were compared."),
        ("seconds", "seconds", ".1f", None, "Wall time of the method; all rows of one method share it."),
    ),
)
# fmt: on


def tables(is_classification: bool) -> tuple[Table, ...]:
    """All tables of a report."""
    return (CLASSIFICATION if is_classification else REGRESSION, DISTANCES, EVIDENCE, CHAINS, COST)


def conclusion(rows: Mapping[str, Row], reference: str) -> list[str]:
    """The findings in up to three sentences: of predictions, of weights, of what symmetrising a guide gained."""
    said = []
    scored = {name: nll(row["prediction"]) for name, row in rows.items()}
    best = min(scored, key=scored.__getitem__)
    told = f"{best} predicts the test rows best, at {scored[best]:.4f} nats a row"
    if reference in scored and best != reference:
        told += f" (the reference {reference}: {scored[reference]:.4f})"
    compared = {n: row["distance"] for n, row in rows.items() if n != reference and row["distance"]}
    for kind, distance, total, words in (
        ("prediction", "total_variation", "mean", "in what they predict"),
        ("removed", "mmd", "median", "in weights (symmetries removed)"),
    ):
        found = {n: row[kind][distance][total] for n, row in compared.items() if distance in row[kind]}
        if len(found) > 1:
            near, far = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
            itself = rows[reference]["distance"][kind][distance][total]
            said.append(
                f"Closest to the reference {words} is {near} ({found[near]:.3g}; the reference's own halves "
                f"{itself:.3g}), furthest {far} ({found[far]:.3g})."
            )
    return [f"{told}.", *said]


def nll(scores: Row) -> float:
    """The mean negative log-likelihood among scores."""
    return float(scores["nll"] if "nll" in scores else -scores["log_predictive_density"])


def summary_table(study: Study) -> str:
    """The tables for a terminal."""
    rows = study.results["methods"]
    return "\n\n".join(t.as_text(rows) for t in tables(study.problem.is_classification) if t.rows(rows))


def _best(column: Column, rows: Sequence[Row]) -> Any:
    values = [column.value(row) for row in rows]
    known = [value for value in values if isinstance(value, int | float)]
    return column.best(known) if column.best and len(known) > 1 else None
