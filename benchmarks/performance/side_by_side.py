"""This library and NumPyro in turn, each in a fresh process, and their ratios."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Results, Row, print_table, spread

OURS, NUMPYRO = "ours", "NumPyro"
# environment of JAX, which computes on all cores otherwise
ONE_THREAD = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


def libraries() -> list[str]:
    """Return the libraries to measure; without NumPyro, print how to install it."""
    if importlib.util.find_spec("numpyro"):
        return [OURS, NUMPYRO]
    print("NumPyro is missing: pip install numpyro==0.22 to measure it, too")
    return [OURS]


def in_fresh_process(code: str, programs: Path, *arguments: str) -> Row:
    """Run code on one thread, in a process that keeps compiled programs in a folder.

    :param programs: of PyTorch and of JAX, which keeps even what compiles quickly.
    :return: the last line that the code prints, as JSON.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(programs / "torch"),
        "JAX_COMPILATION_CACHE_DIR": str(programs / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **ONE_THREAD,
    }
    finished = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        raise RuntimeError(finished.stderr)
    result: Row = json.loads(finished.stdout.splitlines()[-1])
    return result


def print_ratios(results: Results, title: str, measures: Sequence[str]) -> None:
    """Print our measures over NumPyro's of the same model and seed, with their standard
    errors, and the median and the range over the models.
    """
    ratios: dict[str, list[list[float]]] = {}
    for row in results.find(library=OURS):
        for peer in results.find(library=NUMPYRO, model=row["model"], seed=row["seed"]):
            quotients = [row[measure] / peer[measure] for measure in measures]
            ratios.setdefault(row["model"], []).append(quotients)
    if not ratios:
        return
    lines = []
    means: list[list[float]] = []
    for model, by_seed in ratios.items():
        columns = list(zip(*by_seed, strict=True))
        lines.append([model, *(spread(column, 2) for column in columns)])
        means.append([statistics.fmean(column) for column in columns])
    for label, summary in (
        ("median", statistics.median),
        ("least", min),
        ("greatest", max),
    ):
        values = [summary(column) for column in zip(*means, strict=True)]
        lines.append([label, *(f"{value:.2f}" for value in values)])
    print_table(title, ["model", *measures], lines)
