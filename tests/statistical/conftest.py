"""Shared by the long tests: the distance that chains' means may have from the truth."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor


def assert_expectations_(values: Tensor, truth: Tensor | float, alarm: float) -> None:
    """Fail with probability ``alarm`` if draws ``(chains, draws, K)`` have the expectations ``(K,)``.

    Chains are independent, so the spread of their means is the standard error, whatever the autocorrelation: K values
    of Student's t with one degree of freedom less than chains, each at ``alarm / K`` by Bonferroni's correction.
    """
    means = values.mean(1)
    t = (means.mean(0) - torch.as_tensor(truth)) / (means.std(0) / len(means) ** 0.5)
    p = 2 * stats.t.sf(t.abs().numpy(), len(means) - 1)
    assert p.min() > alarm / len(p), (p.min(), int(p.argmin()), t)


@pytest.fixture
def assert_expectations() -> Callable[[Tensor, Tensor | float, float], None]:
    """``assert_expectations(values, truth, alarm=...)``."""
    return assert_expectations_
