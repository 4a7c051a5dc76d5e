"""Results are shown in a few lines and go to JSON; those of equal seeds are equal."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import pyro_symmetric as ps

GROUP = ps.Group.declare({"0.w": ("unit", None)}, {"0.w": torch.zeros(4, 2)})
P, Q = (
    {"0.w": torch.randn(count, 4, 2), "1.w": torch.randn(count)} for count in (10, 12)
)
PROBABILITIES = torch.rand(4, 9, 3).softmax(-1)
RESULTS: dict[str, Callable[[], Any]] = {
    "mmd": lambda: ps.mmd(P, Q),
    "mmd_test": lambda: ps.mmd_test(P, Q, num_permutations=49),
    "marginal_wasserstein": lambda: ps.marginal_wasserstein(P, Q),
    "invariance_tests": lambda: ps.invariance_tests(P, GROUP),
    "total_variation": lambda: ps.total_variation(PROBABILITIES, PROBABILITIES.flip(1)),
    "diagnose": lambda: ps.diagnose({"0.w": P["0.w"].reshape(2, 5, 4, 2)}, GROUP),
    "classification": lambda: ps.scores.classification(
        PROBABILITIES, torch.arange(9) % 3, PROBABILITIES.flip(0)
    ),
    "regression": lambda: ps.scores.regression(PROBABILITIES, 0.3, torch.zeros(9, 3)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_goes_to_json_and_is_shown(name: str) -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        result = RESULTS[name]()
        found.append(json.dumps(result.to_dict(), allow_nan=False))
    assert found[0] == found[1]
    assert len(repr(result).splitlines()) < 30


def test_distances_that_overflow_are_refused() -> None:
    huge = {"w": torch.full((3, 2), 3e38) * torch.tensor([[1.0], [-1.0], [1.0]])}
    with pytest.raises(ValueError, match="overflow"):
        ps.mmd(huge, huge)
