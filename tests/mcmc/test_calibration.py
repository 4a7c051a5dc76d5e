"""Simulation-based calibration: the rank of the true parameter among draws of its
posterior is uniform.

Chains are replications with data of their own. A p-value is corrected for its
quantities; below 1e-6 a test fails, so false alarms are at most 1e-6 each. ``python -m
benchmarks.performance.calibration`` has more replications and samplers.
"""

from pathlib import Path

import pytest
import torch

REPLICATIONS, DRAWS, LEVEL = 300, 15, 1e-6
SLOW = (
    "AdaptiveHMC",
    "NUTS",
    "SGHMC, all rows",
    "SGLD, all rows",
    "SGHMC",
    "SGLD",
    "pSGLD",
)


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "name", ["HMC", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_ranks_are_uniform(name):
    from benchmarks.performance.calibration import CONTESTANTS

    value, _ = CONTESTANTS[name](
        REPLICATIONS, DRAWS, **({"num_warmup": 75} if name == "HMC" else {})
    )
    assert value > LEVEL


@pytest.mark.slow
@pytest.mark.stochastic
@pytest.mark.parametrize(
    "name", ["accepts twice as often", "accepts always", "Langevin steps too long"]
)
def test_a_sampler_that_is_wrong_is_seen(name):
    from benchmarks.performance.calibration import CONTESTANTS

    value, _ = CONTESTANTS[name](2 * REPLICATIONS, DRAWS, num_warmup=75)
    assert value < LEVEL


def test_p_values_see_ranks_that_crowd_in_the_middle_and_not_uniform_ones():
    from benchmarks.performance.calibration import p_value

    uniform = torch.arange(32).repeat(16)[:, None]
    assert p_value(uniform, 31) > 0.99
    assert p_value((uniform + 16) // 2, 31) < 1e-12
