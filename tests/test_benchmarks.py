"""Experiments run from one command in their quick setting, resume from their results,
and can be kept on record.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path

import pytest

import pyro_symmetric as ps

ROOT = Path(__file__).parent.parent
EXPERIMENTS = {
    **{
        f"experiments.gelberg_2024.{name}": ["--seeds", "2"]
        for name in (
            "mixture_target",
            "two_weight_network",
            "width_study",
            "training_scan",
            "mode_proximity",
        )
    },
    "experiments.beyond.little_data": [],
    "experiments.beyond.transformer_barrier": [],
    "experiments.laurent_2024.two_blobs": ["--networks", "300"],
    "experiments.laurent_2024.two_circles": [],
    "experiments.laurent_2024.functional_collapse": [],
    "experiments.laurent_2024.unit_marginals": ["--data", "diabetes"],
    "experiments.laurent_2024.hmc_or_ensemble": ["--data", "diabetes"],
    "experiments.rossi_2023.mirrored_gaussians": [],
    "experiments.rossi_2023.log_posterior_map": [],
    "performance.mmd": [],
    "performance.first_use": ["--model", "linear"],
    "performance.effective_samples": ["--model", "linear"],
    "performance.test_levels": [],
    "performance.evidence": ["--only", "factors 1", "--seeds", "2"],
}


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_runs_and_resumes(name: str, tmp_path: Path) -> None:
    def run() -> str:
        arguments = [
            "--quick",
            "--no-progress",
            "--json",
            str(tmp_path / "results.json"),
            "--out",
            str(tmp_path),
        ]
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                f"benchmarks.{name}",
                *arguments,
                *EXPERIMENTS[name],
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    first = run()
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    again = run()
    assert f"{len(rows)} rows taken over" in again
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows
    last, same = (
        [line for line in text.splitlines() if "wrote" not in line][-3:]
        for text in (first, again)
    )
    assert last == same  # the same tables, from the file


def test_results_are_filled_with_the_rows_that_are_missing(tmp_path: Path) -> None:
    from benchmarks.harness import Results

    options = Namespace(
        json=tmp_path / "results.json", size=3, rates=[1, 2], progress=False
    )
    asked = []

    def run(seed: int, rate: int) -> dict[str, int]:
        asked.append((seed, rate))
        return {"sum": seed + rate}

    for seeds in (1, 2):
        results = Results.of(options, "size")
        results.fill(run, seed=range(seeds), rate=options.rates)
    assert asked == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert results.find(seed=1) == [
        {"seed": 1, "rate": rate, "sum": 1 + rate} for rate in options.rates
    ]
    options.size = 4
    with pytest.raises(SystemExit, match="other settings"):
        Results.of(options, "size")


def test_a_contestant_tells_draws_and_processor_time_in_the_precision_that_is_asked_for() -> (
    None
):
    import numpy as np
    import torch

    from benchmarks.contestants import Problem, ours, pyro_run

    def write(d, sample, plate, lib, data):  # type: ignore[no-untyped-def]
        place = sample("place", d.Normal(lib.zeros(2), 1.0).to_event(1))
        scale = sample("scale", d.HalfNormal(1.0))
        with plate("rows", len(data[0])):
            sample("y", d.Normal(place[0] + place[1], scale), obs=data[0])

    problem = Problem(write, (np.arange(5.0),), torch.float64)
    runs = {
        "ours": ours(problem, 20, 30, ps.NUTS, 2, "eager"),
        "pyro": pyro_run(problem, 100, 100),
    }
    for name, (chains, draws) in {"ours": (2, 30), "pyro": (1, 10)}.items():
        run = runs[name]
        assert (run.draws.shape, run.draws.dtype) == ((chains, draws, 3), torch.float64)
        assert run.sampling > 0
        assert run.warmup > 0
        assert run.row()["with warm-up"] == pytest.approx(
            run.row()["worst effective"] / (run.sampling + run.warmup)
        )


def test_every_record_has_a_command_and_says_how_old_it_is() -> None:
    from benchmarks.all import RECORDS, age

    files = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert files <= {entry.name for entry in RECORDS}
    for entry in RECORDS:
        assert all((ROOT / path).exists() for path in entry.paths())
        assert entry.module in entry.command()
        assert (age(entry).commit != "") == entry.path.exists()


def test_a_record_is_old_if_a_room_that_it_measures_changed_later(monkeypatch) -> None:
    from benchmarks import all as every
    from benchmarks import record

    asked = []

    def git(*arguments: str) -> str:
        asked.append(arguments)
        return "3" if "pyro_symmetric/alignment" in arguments else "0"

    monkeypatch.setattr(record, "git", git)
    every._changes.cache_clear()
    module = "experiments.rossi_2023.mirrored_gaussians"
    assert not every.age(every.Record(module, ("alignment",))).is_current
    assert every.age(every.Record(module, ("groups",))).is_current
    assert not every.age(every.Record("performance.no_such_record", ())).is_current
    assert all(f"benchmarks/{module.replace('.', '/')}.py" in call for call in asked)
    every._changes.cache_clear()


def test_pictures_are_drawn_from_the_records_that_are_there(
    tmp_path, monkeypatch
) -> None:
    from benchmarks import figures

    monkeypatch.setattr(figures, "PICTURES", tmp_path / "measured")
    figures.main()
    stored = {path.name for path in (ROOT / "docs/_static/measured").glob("*.svg")}
    assert stored == {path.name for path in (tmp_path / "measured").iterdir()}
    for name in stored:
        text = (ROOT / "docs/_static/measured" / name).read_text()
        # another Matplotlib draws the same in other words
        if f"Matplotlib v{version('matplotlib')}" in text:
            assert (tmp_path / "measured" / name).read_text() == text


def test_a_table_of_a_record_is_read_with_its_standard_errors() -> None:
    from benchmarks import figures

    table = figures.tables("experiments.beyond.little_data")[
        "plain → symmetrised training; paired differences ± standard errors"
    ]
    row = table[table["case"] == "digits 3 and 8, 40 rows, 50 tanh"]
    assert figures.estimate(row["difference"].iloc[0, 0]) == (0.174, 0.014)
