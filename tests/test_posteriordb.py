"""The judgement of the benchmark on posteriordb is right, and so are the recurrences of
its models.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_recurrences_are_those_of_a_loop():
    from benchmarks.posteriordb.models import filtered, log_product

    b, a, value, expected = (
        torch.randn(13, dtype=torch.float64),
        torch.tensor(-0.7, dtype=torch.float64),
        0.0,
        [],
    )
    for entry in b.tolist():
        value = -0.7 * value + entry
        expected.append(value)
    np.testing.assert_allclose(filtered(torch, a, b).numpy(), expected)
    for length in (1, 2, 7, 8):
        theta, emissions = (
            np.array([[0.9, 0.1], [0.4, 0.6]]),
            np.random.default_rng(0).normal(size=(length, 2)),
        )
        factors = torch.as_tensor(np.log(theta) + emissions[:, None, :])
        # from the second state
        found = torch.logsumexp(log_product(torch, factors)[1], 0).item()
        gamma = np.array([0.0, 1.0])
        for emission in emissions:
            gamma = gamma @ theta * np.exp(emission)
        assert found == pytest.approx(np.log(gamma.sum()))


@pytest.mark.stochastic
def test_standard_errors_are_those_of_repeated_runs():
    """Of 500 runs; their deviation is known to 3.2 %, so 5 deviations are 16 %: a false
    alarm in a million.
    """
    from benchmarks.posteriordb.accuracy import Moments, distances

    generator = np.random.default_rng(int(torch.randint(2**31, ())))
    noise, chains = generator.normal(size=(500, 4, 1000)), np.empty((500, 4, 1000))
    chains[..., 0] = noise[..., 0]
    for t in range(1, 1000):  # correlated draws, of deviation 1
        chains[..., t] = 0.5 * chains[..., t - 1] + np.sqrt(0.75) * noise[..., t]
    found = Moments.of(chains)
    exact = Moments(np.zeros(500), np.zeros(500), np.ones(500), np.zeros(500))
    means, spread = distances(found, exact)
    assert means.std() == pytest.approx(1, abs=0.16)
    assert spread.std() == pytest.approx(1, abs=0.16)
    # (1 + a) / (1 - a) = 3
    np.testing.assert_allclose(found.mean_error.mean(), np.sqrt(3 / 4000), rtol=0.05)
    shifted, _ = distances(Moments.of(chains + 1), exact)
    assert shifted.min() > 10
