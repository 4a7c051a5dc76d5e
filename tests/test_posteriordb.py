"""posteriordb's models agree with their Stan programs on simulated data, and the benchmark's judgement is right."""

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro.distributions as dist
import pytest
import torch

ROOT = Path(__file__).parent.parent
DRAWS = 6


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


class Simulated:
    """A database of data and parameters that make sense to a program, but are nobody's."""

    def __init__(self, data: dict[str, Any], draws: dict[str, Callable[[np.random.Generator], float]]):
        self._data, self._draws = data, draws

    def data(self, posterior: str) -> dict[str, np.ndarray]:
        return {name: np.asarray(value, float) for name, value in self._data.items()}

    def draws(self, posterior: str) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(1)
        return {name: np.array([[draw(generator) for _ in range(DRAWS)]]) for name, draw in self._draws.items()}


def near(centre: float, spread: float = 0.2) -> Callable[[np.random.Generator], float]:
    return lambda generator: centre * float(np.exp(spread * generator.normal()))


def cases() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    new = np.random.default_rng(0)
    y, x = new.normal(size=40), np.arange(40) / 10
    yield "arK-arK", {"K": 2, "T": 40, "y": y}, {"alpha": near(1), "beta[1]": near(0.3), "beta[2]": near(-0.2)}
    yield "arma-arma11", {"T": 40, "y": y}, {"mu": near(0.1), "phi": near(0.9), "theta": near(0.2)}
    garch = {"mu": near(0.3), "alpha0": near(1), "alpha1": near(0.3), "beta1": near(0.2)}
    yield "garch-garch11", {"T": 40, "y": y, "sigma1": 0.5}, garch
    rows = {
        f"theta{k}[{j}]": (lambda g, v=v: v)
        for k, row in ((1, (0.7, 0.3)), (2, (0.2, 0.8)))
        for j, v in enumerate(row, 1)
    }
    hidden = {"N": 37, "K": 2, "u": y[:37] ** 2, "v": y[:37] ** 2 + 1, "alpha": [[4, 2], [2, 3]]}
    place = {f"{name}[{k}]": near(k) for name in ("phi", "lambda") for k in (1, 2)}
    yield "bball_drive_event_0-hmm_drive_0", hidden, {**rows, **place}
    yield "bball_drive_event_1-hmm_drive_1", {**hidden, "tau": 0.8, "rho": 0.6}, {**rows, **place}
    yield "hmm_example-hmm_example", {"N": 37, "K": 2, "y": 5 * y[:37]}, {**rows, "mu[1]": near(2), "mu[2]": near(9)}
    schools = {f"theta[{k + 1}]": near(k - 3.5) for k in range(8)}
    effects = {"J": 8, "y": 9 * y[:8], "sigma": 5 + y[:8] ** 2}
    yield "eight_schools-eight_schools_noncentered", effects, {**schools, "mu": near(3), "tau": near(2)}
    places = {"N": 11, "x": np.linspace(-10, 10, 11), "y": y[:11], "k": new.poisson(3.0, 11)}
    process = {"rho": near(3), "alpha": near(1)}
    yield "gp_pois_regr-gp_regr", places, process
    yield (
        "gp_pois_regr-gp_pois_regr",
        places,
        {**process, **{f"f[{k + 1}]": near(0.3 + k / 10, 0.01) for k in range(11)}},
    )
    hares = {"N": 5, "ts": np.arange(1, 6), "y_init": [30, 4], "y": np.exp(new.normal(3, 0.3, (5, 2)))}
    rates = {f"theta[{k + 1}]": near(v) for k, v in enumerate((0.5, 0.03, 0.8, 0.02))}
    both = {f"{name}[{k}]": near(v) for name, v in (("z_init", 20), ("sigma", 0.3)) for k in (1, 2)}
    yield "hudson_lynx_hare-lotka_volterra", hares, {**rates, **both}
    drug = {"t0": 0, "D": 30, "V": 2, "N_t": 4, "times": [0.5, 1, 1.5, 2], "C_hat": [4, 6, 7, 9]}
    yield "one_comp_mm_elim_abs-one_comp_mm_elim_abs", drug, {"k_a": near(0.8), "K_m": near(1), "V_m": near(1)}
    two = {"mu[1]": near(-1), "mu[2]": near(1), "sigma[1]": near(1), "sigma[2]": near(0.5), "theta": near(0.4)}
    yield "low_dim_gauss_mix-low_dim_gauss_mix", {"N": 40, "y": y}, two
    line = {"x": x, "y": y, "pmualpha": 1, "psalpha": 2, "pmubeta": 0.5, "psbeta": 3}
    yield "kilpisjarvi_mod-kilpisjarvi", line, {"alpha": near(1), "beta": near(1)}
    matrix = new.normal(size=(40, 3)) + 2
    yield "sblrc-blr", {"N": 40, "D": 3, "X": matrix, "y": y}, coefficients(3)
    diamonds = {"b[1]": near(0.3), "b[2]": near(-0.2), "Intercept": near(7)}
    yield "diamonds-diamonds", {"N": 40, "K": 3, "X": matrix, "Y": y}, diamonds
    people = {name: new.integers(1, 9, 40) for name in ("earn", "height", "kid_score", "mom_iq")}
    people |= {name: new.integers(0, 2, 40) for name in ("male", "mom_hs")} | {"mom_work": new.integers(1, 5, 40)}
    bushes = {name: new.integers(1, 9, 40) for name in ("weight", "diam1", "diam2", "canopy_height", "total_height")}
    bushes |= {"density": new.integers(1, 5, 40), "group": new.integers(0, 2, 40)}
    voters = {name: new.normal(size=40) for name in ("partyid7", "real_ideo", "race_adj", "educ1", "gender", "income")}
    voters |= {"age_discrete": new.integers(1, 5, 40)}
    from benchmarks.posteriordb import regressions

    for data, own in (
        ("earnings", regressions.EARNINGS),
        ("kidiq", regressions.KIDIQ),
        ("kidiq_with_mom_work", regressions.KIDIQ_WITH_MOM_WORK),
    ):
        for name, columns in own.items():
            yield f"{data}-{name}", people, coefficients(1 + len(columns({k: v * 1.0 for k, v in people.items()})[0]))
    for name, columns in regressions.MESQUITE.items():
        yield f"mesquite-{name}", bushes, coefficients(1 + len(columns(bushes)[0]))
    yield "nes1972-nes", voters, coefficients(9)


def coefficients(count: int) -> dict[str, Any]:
    return {f"beta[{k + 1}]": near(0.3 + k / 10) for k in range(count)}


WITHOUT_SIGMA = ("garch", "hmm", "schools", "pois_regr-gp_pois", "hare", "mix")


def agreement(posterior: str, data: dict[str, Any], draws: dict[str, Any]) -> float:
    from benchmarks.posteriordb.check import in_pyro, spread

    if not any(part in posterior for part in WITHOUT_SIGMA):
        draws = {**draws, "sigma": near(1.2)}
    (found,) = spread(posterior, Simulated(data, draws), [in_pyro], DRAWS)
    return found


def test_every_model_agrees_with_its_stan_program_on_simulated_data():
    from benchmarks.posteriordb.catalogue import ENTRIES
    from benchmarks.posteriordb.check import LIMIT, LIMITS

    found = {posterior: agreement(posterior, data, draws) for posterior, data, draws in cases()}
    assert {name for name, value in found.items() if not value < LIMITS.get(name, LIMIT)} == set()
    programs = {name.partition("-")[2] for name in ENTRIES}
    assert programs == {name.partition("-")[2] for name in found}


def test_the_check_notices_another_prior(monkeypatch: pytest.MonkeyPatch):
    from benchmarks.posteriordb.catalogue import ENTRIES

    right = ENTRIES["arK-arK"]

    def wider(d: Any, sample: Any, *rest: Any) -> None:
        right.write(
            d, lambda name, fn, **own: sample(name, dist.HalfCauchy(2.6) if name == "sigma" else fn, **own), *rest
        )

    monkeypatch.setitem(ENTRIES, "arK-arK", replace(right, write=wider))
    assert agreement(*next(cases())) > 1e-3


def test_recurrences_are_those_of_a_loop():
    from benchmarks.posteriordb.series import filtered, log_product
    from benchmarks.posteriordb.stan_programs import forward

    b, a, value, expected = torch.randn(13, dtype=torch.float64), torch.tensor(-0.7, dtype=torch.float64), 0.0, []
    for entry in b.tolist():
        value = -0.7 * value + entry
        expected.append(value)
    np.testing.assert_allclose(filtered(torch, a, b).numpy(), expected)
    for length in (1, 2, 7, 8):
        theta, emissions = np.array([[0.9, 0.1], [0.4, 0.6]]), np.random.default_rng(0).normal(size=(length, 2))
        factors = torch.as_tensor(np.log(theta) + emissions[:, None, :])
        found = torch.logsumexp(log_product(torch, factors)[1], 0).item()  # from the second state
        assert found == pytest.approx(forward(np.array([-np.inf, 0.0]), emissions, theta))


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
    from benchmarks.posteriordb.catalogue import ENTRIES, gathered, named

    draws = {"mu": np.random.rand(2, 3), "beta": np.random.rand(2, 3, 4), "one": np.random.rand(2, 3, 1)}  # noqa: NPY002
    numbers = named(draws)
    assert list(numbers) == ["mu", "beta[1]", "beta[2]", "beta[3]", "beta[4]", "one[1]"]
    back = gathered(numbers)
    assert all((back[name] == draws[name]).all() for name in draws)
    for posterior in ("garch-garch11", "gp_pois_regr-gp_pois_regr", "hmm_example-hmm_example"):
        own = {p: d for p, _, d in cases()}[posterior]
        stan = gathered(Simulated({}, own).draws(posterior))
        entry = ENTRIES[posterior]
        again = entry.to_stan(entry.to_sites(stan))
        assert set(again) == set(stan)
        for name, value in stan.items():
            np.testing.assert_allclose(again[name], value, rtol=1e-5)
