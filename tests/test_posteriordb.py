"""The judgement of the benchmark on posteriordb is right, and so are the recurrences of its models."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_recurrences_are_those_of_a_loop():
    from benchmarks.posteriordb.series import filtered, log_product

    b, a, value, expected = torch.randn(13, dtype=torch.float64), torch.tensor(-0.7, dtype=torch.float64), 0.0, []
    for entry in b.tolist():
        value = -0.7 * value + entry
        expected.append(value)
    np.testing.assert_allclose(filtered(torch, a, b).numpy(), expected)
    for length in (1, 2, 7, 8):
        theta, emissions = np.array([[0.9, 0.1], [0.4, 0.6]]), np.random.default_rng(0).normal(size=(length, 2))
        factors = torch.as_tensor(np.log(theta) + emissions[:, None, :])
        found = torch.logsumexp(log_product(torch, factors)[1], 0).item()  # from the second state
        gamma = np.array([0.0, 1.0])
        for emission in emissions:
            gamma = gamma @ theta * np.exp(emission)
        assert found == pytest.approx(np.log(gamma.sum()))


@pytest.mark.stochastic
def test_standard_errors_are_those_of_repeated_runs():
    """Of 500 runs; their deviation is known to 3.2 %, so 5 deviations are 16 %: a false alarm in a million."""
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
    np.testing.assert_allclose(found.mean_error.mean(), np.sqrt(3 / 4000), rtol=0.05)  # (1 + a) / (1 - a) = 3
    shifted, _ = distances(Moments.of(chains + 1), exact)
    assert shifted.min() > 10


def test_the_limit_grows_with_the_count_of_numbers():
    from benchmarks.posteriordb.accuracy import limit, passes

    assert limit(1) == 4.0
    assert limit(1000) == pytest.approx(4.417, abs=1e-3)  # half a hundred-thousandth on each side
    row = {"means": {"a": 1.0, "b": -4.2}, "deviations": {"a": 0.0, "b": 0.3}, "r_hat": 1.001}
    assert passes(row, 4.3)
    assert not passes(row, 4.1)
    assert not passes({**row, "r_hat": 1.02}, 4.3)
    assert not passes({**row, "deviations": {"a": float("nan"), "b": 0.0}}, 4.3)


def zipped(name: str, content: Any) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, json.dumps(content))
    return buffer.getvalue()


def test_the_database_is_read_from_a_copy_and_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from benchmarks.posteriordb import database

    chain = [{"beta[1]": [1.0, 2.0], "beta[2]": [0.0, 1.0], "sigma": [3.0, 4.0]}] * 2
    files = {
        "data/data/few.json.zip": zipped("few.json", {"N": 3, "y": [1, 2, 3]}),
        "reference_posteriors/draws/draws/few-line.json.zip": zipped("few-line.json", chain),
    }
    for name, content in files.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True)
        (tmp_path / "copy" / name).write_bytes(content)
    asked = []

    def urlopen(address: str, timeout: float) -> io.BytesIO:
        asked.append(address)
        return io.BytesIO(files[address.removeprefix(database.ADDRESS + "/")])

    monkeypatch.setattr(database, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(database.urllib.request, "urlopen", urlopen)
    for root in (tmp_path / "copy", None, None):
        found = database.Database(root)
        assert found.data("few-line")["y"].tolist() == [1.0, 2.0, 3.0]
        assert found.draws("few-line")["sigma"].tolist() == [[3.0, 4.0], [3.0, 4.0]]
    assert len(asked) == 2
    assert not list(tmp_path.rglob("*.part"))


def test_numbers_and_parameters_are_each_others_inverse():
    from benchmarks.posteriordb.catalogue import gathered, named

    draws = {"mu": np.random.rand(2, 3), "beta": np.random.rand(2, 3, 4), "one": np.random.rand(2, 3, 1)}  # noqa: NPY002
    numbers = named(draws)
    assert list(numbers) == ["mu", "beta[1]", "beta[2]", "beta[3]", "beta[4]", "one[1]"]
    back = gathered(numbers)
    assert all((back[name] == draws[name]).all() for name in draws)
