"""Every experiment runs from one command, in its quick setting, and is taken up from its results file."""

import json
import os
import runpy
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ("mixture_target", "two_weight_network", "width_study", "mode_proximity")


def run(name: str, folder: Path) -> str:
    command = [
        sys.executable,
        "-m",
        f"benchmarks.experiments.gelberg_2024.{name}",
        "--quick",
        "--seeds",
        "2",
        "--no-progress",
    ]
    result = subprocess.run(
        [*map(str, command), "--json", str(folder / "results.json"), "--out", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_runs_and_resumes(name: str, tmp_path: Path) -> None:
    report = run(name, tmp_path)
    assert " ± " in report
    assert list(tmp_path.glob("*.png"))
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    again = run(name, tmp_path)
    assert f"{len(rows)} rows taken over" in again
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows


def test_results_are_filled_with_the_rows_that_are_missing(tmp_path: Path) -> None:
    results_of = runpy.run_path(str(ROOT / "benchmarks" / "harness.py"))["Results"].of
    options = Namespace(json=tmp_path / "results.json", size=3, rates=[1, 2])
    asked = []

    def run(seed: int, rate: int) -> dict[str, int]:
        asked.append((seed, rate))
        return {"sum": seed + rate}

    for seeds in (1, 2):
        results = results_of(options, "size")
        results.fill(run, seed=range(seeds), rate=options.rates)
    assert asked == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert results.find(seed=1) == [{"seed": 1, "rate": rate, "sum": 1 + rate} for rate in options.rates]
    options.size = 4
    with pytest.raises(SystemExit, match="other settings"):
        results_of(options, "size")
