"""The experiments on weights and their symmetries run in their quick setting, and are taken up from their results."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXPERIMENTS = {
    "experiments.laurent_2024.two_blobs": ["--networks", "300"],
    "experiments.laurent_2024.two_circles": [],
    "experiments.laurent_2024.mass_at_convergence": [],
    "experiments.laurent_2024.sorting_dynamics": [],
    "experiments.laurent_2024.functional_collapse": [],
    "experiments.laurent_2024.unit_marginals": ["--data", "diabetes"],
    "experiments.laurent_2024.hmc_or_ensemble": ["--data", "diabetes"],
    "performance.mmd": [],
    "performance.test_levels": [],
    "performance.level_and_power": ["--only", "tied"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_runs_and_resumes(name: str, tmp_path: Path) -> None:
    def run() -> str:
        arguments = ["--quick", "--no-progress", "--json", str(tmp_path / "results.json"), "--out", str(tmp_path)]
        result = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *arguments, *EXPERIMENTS[name]],
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
    assert bool(list(tmp_path.glob("*.png"))) == name.startswith("experiments.")
    again = run()
    assert f"{len(rows)} rows taken over" in again
    last, same = ([line for line in text.splitlines() if "wrote" not in line][-3:] for text in (first, again))
    assert last == same  # the same tables, from the file
