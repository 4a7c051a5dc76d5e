"""Every experiment runs from one command, in its quick setting, and is taken up from its results file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
EXPERIMENTS = ("mixture_target", "two_weight_network", "width_study", "mode_proximity")


def run(name: str, folder: Path) -> str:
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--seeds", "2", "--no-progress"]
    result = subprocess.run(
        [*map(str, command), "--json", str(folder / "results.json"), "--out", str(folder)],
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
