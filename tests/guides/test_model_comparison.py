"""Models by their evidence: probabilities, their errors, warnings."""

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric.guides import Evidence
from pyro_symmetric.guides.log_ratios import Estimate

from .conjugate import DATA, exact_draws, log_evidence, mixture, relabellings


def known(value: float, error: float = 0.1, bridge: float | None = None, doubts: tuple[str, ...] = ()) -> Evidence:
    importance = Estimate(value, error, 1000, 500.0)
    other = None if bridge is None else Estimate(bridge, error, 1000, 500.0)
    return Evidence(value - 1, 0.1, value - 0.5, 0.1, "ExactOrbit()", "exact", 0.7, importance, 0.2, other, doubts)


def test_probabilities_and_their_errors_are_those_of_bayes_rule() -> None:
    """The errors against many draws of the log-evidences."""
    found = ps.compare_models(
        {"a": known(-1000.0, 0.05), "b": known(-1001.0, 0.1), "c": known(-1e5)}, {"a": 1, "b": 3, "c": 1}
    )
    odds = 3 * math.exp(-1)
    np.testing.assert_allclose(found.table["probability"], [1 / (1 + odds), odds / (1 + odds), 0.0])
    np.testing.assert_allclose(found.table["difference"], [0.0, -1.0, -99_000.0])
    np.testing.assert_allclose(found.table["difference_error"], [0.0, math.hypot(0.05, 0.1), math.hypot(0.05, 0.1)])
    noise = torch.randn(200_000, 2, dtype=torch.float64) * torch.tensor([0.05, 0.1]) + torch.tensor(
        [0.0, math.log(odds)]
    )
    expected = noise.softmax(-1).std(0)
    np.testing.assert_allclose(found.table["probability_error"][:2], expected, rtol=0.02)
    assert found.best == "a"


def test_the_bridge_counts_if_there_is_one() -> None:
    found = ps.compare_models({"2": known(-10.0, bridge=-9.0), "3": known(-9.5)})
    assert list(found.table["log_evidence"]) == [-9.0, -9.5]
    assert list(found.table["method"]) == ["bridge", "importance"]
    assert found.table.index.name == "model"
    assert "probability" in repr(found)


def test_doubts_are_said_aloud() -> None:
    doubtful = {"2": known(-10.0), "3": known(-9.5, doubts=("Pareto-k is 0.9",))}
    with pytest.warns(UserWarning, match=r"\['3'\] is in doubt: Pareto"):
        found = ps.compare_models(doubtful)
    assert "! 3: Pareto-k is 0.9" in repr(found)


def test_errors_of_probabilities_are_probabilities_however_large_those_of_log_evidences_are() -> None:
    """Which of two is ahead is a coin toss then: a probability of 0 or 1, whose deviation is a half."""
    for error in (1e3, math.inf):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = ps.compare_models({"2": known(-10.0, error), "3": known(-10.0, error)})
        np.testing.assert_allclose(found.table["probability"], 0.5)
        np.testing.assert_allclose(found.table["probability_error"], 0.5, atol=0.01)


@pytest.mark.parametrize(
    ("evidences", "prior", "error", "message"),
    [
        ({"2": known(-1.0)}, None, ValueError, "at least two"),
        ({"2": known(-1.0), "3": -2.0}, None, TypeError, "evidences\\['3'\\]"),
        ({"2": known(-1.0), "3": known(math.nan)}, None, ValueError, "evidences\\['3'\\]"),
        ({"2": known(-1.0), "3": known(-2.0)}, {"2": 1.0}, ValueError, "prior"),
        ({"2": known(-1.0), "3": known(-2.0)}, {"2": 1.0, "3": 0.0}, ValueError, "prior\\['3'\\]"),
        ([known(-1.0)], None, TypeError, "evidences"),
    ],
)
def test_what_cannot_be_compared_is_named(evidences: Any, prior: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        ps.compare_models(evidences, prior)


@pytest.mark.stochastic
def test_the_number_of_components_has_the_probability_that_enumeration_gives() -> None:
    """Within 5 errors: 1 in 10^5."""
    found = {
        str(k): ps.evidence(
            exact_draws(k, (4, 1000)), ps.log_joint(mixture(k), DATA), relabellings(k), num_samples=2000, chunk=2000
        )
        for k in (2, 3)
    }
    found = {name: replace(one, doubts=()) for name, one in found.items()}
    table = ps.compare_models(found).table
    truth = torch.tensor([log_evidence(2), log_evidence(3)]).softmax(0)
    assert abs(table["probability"]["2"] - float(truth[0])) < 5 * table["probability_error"]["2"]
    assert table["probability_error"]["2"] < 0.05
