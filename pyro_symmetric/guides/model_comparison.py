r"""Models compared by their evidence: how many components, factors, hidden units?

.. math:: P(M_i \mid D) = \frac{P(M_i)\, p(D \mid M_i)}{\sum_j P(M_j)\, p(D \mid M_j)}, \qquad
    \operatorname{var} P_i \approx P_i^2 \Big[ (1 - P_i)^2 e_i^2 + \sum_{j \ne i} P_j^2 e_j^2 \Big]

with :math:`e_i` the standard errors of the log-evidences.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyro_symmetric import arguments
from pyro_symmetric.guides.bounds import Evidence

DRAWS = 20_000  # of log-evidences, for the errors of probabilities
CLUELESS = 1e6  # nats: an error that leaves everything open
SHOWN = ("log_evidence", "error", "difference", "difference_error", "probability", "probability_error", "method")


@dataclass(frozen=True, eq=False)
class ModelComparison:
    """Models by their evidence.

    :param table: a pandas ``DataFrame``, a row for each model, in the given order: ``log_evidence`` and its ``error``
        by ``method``, the ``difference`` to the best model and ``difference_error``, the posterior ``probability`` and
        ``probability_error``; then all methods: ``importance``, ``importance_error``, ``pareto_k``, ``bridge``,
        ``bridge_error``, ``elbo``, ``symmetrized_elbo``; and ``doubts``.
    """

    table: Any

    @property
    def best(self) -> str:
        """The model of the largest evidence."""
        return str(self.table["log_evidence"].idxmax())

    def __repr__(self) -> str:
        shown = self.table[list(SHOWN)].to_string(float_format=lambda value: f"{value:.2f}")
        return "\n".join([shown, *(f"! {name}: {doubt}" for name, doubt in self.table["doubts"].items() if doubt)])


def compare_models(evidences: Mapping[str, Evidence], prior: Mapping[str, float] | None = None) -> ModelComparison:
    """Differences of log-evidence and posterior probabilities of models of the same data.

    Whether the data were the same can't be seen from evidences. A model whose checks failed is named by a warning and
    in the table; its numbers, and all probabilities, are to be taken with that doubt.

    >>> group, found = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(2)}), {}
    >>> for scale in (0.5, 5.0):
    ...     def model():
    ...         w = pyro.sample("w", dist.Normal(torch.zeros(2), scale).to_event(1))
    ...         pyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=torch.zeros(2))
    ...     start = dict(init_loc_fn=lambda site: torch.zeros(2), init_scale=1.1 * (1 + scale**-2) ** -0.5)
    ...     guide = ps.AutoSymmetrized(model, group, **start).setup()
    ...     found[str(scale)] = ps.evidence(guide, ps.log_joint(model), group)
    >>> ps.compare_models(found).table["probability"].round(2).to_dict()
    {'0.5': 0.95, '5.0': 0.05}

    :param evidences: name of a model -> what :func:`~pyro_symmetric.guides.evidence` gave for it, two or more.
    :param prior: name of a model -> prior probability, up to a common factor; equal by default.
    :raises ValueError: if an evidence isn't finite, or ``prior`` names other models.
    """
    import pandas as pd

    arguments.mapping("evidences", evidences, "name of a model -> its Evidence")
    for name, found in evidences.items():
        arguments.instance(f"evidences[{name!r}]", found, Evidence, "an Evidence, as ps.evidence gives it")
        if not math.isfinite(found.best.log_evidence):
            raise ValueError(f"evidences[{name!r}] is {found.best.log_evidence}; a comparison needs finite ones")
    if len(evidences) < 2:
        raise ValueError(f"evidences holds {len(evidences)} models; a comparison needs at least two")
    log_prior = np.log(_shares(prior, evidences))
    best = [found.best for found in evidences.values()]
    value, error = np.array([e.log_evidence for e in best]), np.array([e.error for e in best])
    top = int(value.argmax())
    doubts = {name: "; ".join(found.doubts) for name, found in evidences.items()}
    table = pd.DataFrame(
        {
            "log_evidence": value,
            "error": error,
            "method": ["bridge" if found.bridge else "importance" for found in evidences.values()],
            "difference": value - value[top],
            "difference_error": np.where(np.arange(len(value)) == top, 0.0, np.hypot(error, error[top])),
            "probability": _probabilities(value + log_prior),
            "probability_error": _errors(value + log_prior, error),
            **pd.DataFrame([_by_method(found) for found in evidences.values()]).to_dict("list"),
            "doubts": list(doubts.values()),
        },
        index=pd.Index(list(evidences), name="model"),
    )
    if failed := [name for name, doubt in doubts.items() if doubt]:
        warnings.warn(
            f"the evidence of {failed} is in doubt: {next(doubt for doubt in doubts.values() if doubt)}. See the "
            "column doubts",
            stacklevel=2,
        )
    return ModelComparison(table)


# small steps --------------------------------------------------------------------------------------------------------


def _by_method(found: Evidence) -> dict[str, float]:
    return {
        "importance": found.importance.log_evidence,
        "importance_error": found.importance.error,
        "pareto_k": found.pareto_k,
        "bridge": found.bridge.log_evidence if found.bridge else math.nan,
        "bridge_error": found.bridge.error if found.bridge else math.nan,
        "elbo": found.elbo,
        "symmetrized_elbo": found.symmetrized_elbo,
    }


def _probabilities(log_weights: np.ndarray) -> np.ndarray:
    """Weights of models, known by their logarithms, that sum to one."""
    weights = np.exp(log_weights - log_weights.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def _errors(log_weights: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Standard deviations of the probabilities if the log-evidences have normal errors. By simulation: to first order
    an error of several nats would give more than a probability can be off."""
    noise = np.random.default_rng(0).standard_normal((DRAWS, len(error)))
    certain = np.nan_to_num(error, nan=CLUELESS, posinf=CLUELESS).clip(max=CLUELESS)
    return _probabilities(log_weights + noise * certain).std(0)


def _shares(prior: Mapping[str, float] | None, evidences: Mapping[str, Evidence]) -> list[float]:
    if prior is None:
        return [1.0] * len(evidences)
    arguments.mapping("prior", prior, "name of a model -> its prior probability")
    if set(prior) != set(evidences):
        raise ValueError(f"prior names the models {list(prior)}, but evidences has {list(evidences)}")
    return [arguments.number(f"prior[{name!r}]", prior[name], above=0) for name in evidences]
