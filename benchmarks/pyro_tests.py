"""Pyro's own tests of HMC and NUTS with the import changed: which pass, which fail and why.

    python -m benchmarks.pyro_tests --source path/to/pyro [--select "test_nuts"] [--seed 1] [--theirs]

``path/to/pyro`` is a checkout of https://github.com/pyro-ppl/pyro; its tests aren't shipped with this library. Of the
files in :data:`FILES`, every ``from pyro.infer.mcmc... import`` of ``HMC``, ``NUTS`` and ``MCMC`` is made one from
``pyro_symmetric.infer``, in a copy, and random numbers are seeded before each test; nothing else is changed. Some of
these tests compare a posterior mean with the values that random data came from, and fail for some data whoever
samples: by quadrature, the exact mean fails ``test_hmc``'s logistic regression for 48 % of the seeds and
``test_nuts``'s ``test_gamma_beta`` for 33 %, neither for seed 4. ``--theirs`` leaves the import as it is, to compare.
Tests that ask for Pyro's internals are told apart by :data:`INTERNAL`, which says what each one asks for.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import print_table

FILES = ("test_hmc", "test_nuts", "test_mcmc_api", "test_valid_models")
OURS = ("HMC", "MCMC", "NUTS")
STREAMING = "StreamingMCMC, which keeps statistics and no draws"
BY_HAND = "drives the kernel by hand (setup, clear_cache, sample)"
CUSTOM = "runs a kernel of its own that derives from Pyro's MCMCKernel"
ADAPTER = "reads or replaces Pyro's mass_matrix_adapter"
STRAY = "expects a refusal of batch dimensions outside of plates, which are summed over here, as brute force does"
EVALUATOR = "tests Pyro's TraceTreeEvaluator, TraceEinsumEvaluator or initialize_model; no sampler runs"
INTERNAL = {
    r"run_streaming_mcmc": STREAMING,
    r"test_hmc.*(test_unnormalized_normal|test_singular_matrix_catch)": BY_HAND,
    r"test_mcmc_api.*(test_mcmc_interface|test_num_chains|test_mcmc_diagnostics)": CUSTOM,
    r"test_mcmc_api.*test_sequential_consistent": "derives from Pyro's NUTS and overrides setup",
    r"test_mcmc_api.*test_null_model_with_hook": "samples a model without sites, by Pyro's initialize_model",
    r"test_nuts.*(test_structured_mass|test_arrowhead_mass|test_dirichlet_categorical_grad_adapt)": ADAPTER,
    r"test_nuts.*test_gaussian_hmm\[30\]": "sets initial_trace on the kernel, which Pyro itself doesn't read",
    r"test_valid_models.*test_model_error_stray_batch_dims": STRAY,
    r"test_valid_models.*(log_prob|in_tree|in_dag|test_potential_fn_pickling)": EVALUATOR,
}


@dataclass
class Outcome:
    """The outcome of one test: ``"passed"``, ``"failed"`` or ``"skipped"``, and the words of its error."""

    name: str
    result: str
    words: str = ""
    seconds: float = 0.0

    @property
    def internal(self) -> str:
        """Which of Pyro's internals it asks for; empty if none."""
        return next((reason for pattern, reason in INTERNAL.items() if re.search(pattern, self.name)), "")


def changed(text: str) -> str:
    """A test file with the import changed."""

    def split(match: re.Match[str]) -> str:
        names = [name.strip() for name in match[2].strip("()").replace("\n", " ").split(",") if name.strip()]
        theirs = [name for name in names if name not in OURS]
        lines = [f"from pyro_symmetric.infer import {', '.join(n for n in names if n in OURS)}"] * (theirs != names)
        return "\n".join([*lines, *([f"from {match[1]} import {', '.join(theirs)}"] if theirs else [])])

    return re.sub(r"^from (pyro\.infer\.mcmc[\w.]*) import (\([^)]*\)|[^\n]*)", split, text, flags=re.MULTILINE)


SEEDED = """

@pytest.fixture(autouse=True)
def seeded():
    pyro.set_rng_seed({seed})
"""


def outcomes(source: Path, select: str = "", seed: int = 4, theirs: bool = False, timeout: int = 3600) -> list[Outcome]:
    """Run the tests in a copy."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        tests = root / "tests" / "infer" / "mcmc"
        tests.mkdir(parents=True)
        for name in ("__init__.py", "common.py", "conftest.py", "infer/__init__.py", "infer/mcmc/__init__.py"):
            shutil.copy(source / "tests" / name, root / "tests" / name)
        for name in FILES:
            text = (source / "tests/infer/mcmc" / f"{name}.py").read_text()
            (tests / f"{name}.py").write_text(text if theirs else changed(text))
        with (root / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(SEEDED.format(seed=seed))
        report = root / "report.xml"
        path = os.pathsep.join([str(Path(__file__).parents[1]), str(root)])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--tb=line"]
        command += [f"--junitxml={report}", f"--rootdir={root}", "tests/infer/mcmc", "-k", select or "test"]
        subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": path}, timeout=timeout, check=False)
        cases = ET.parse(report).getroot().iter("testcase")
        return [outcome_of(case) for case in cases]


def outcome_of(case: ET.Element) -> Outcome:
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    found = Outcome(name, "passed", seconds=float(case.get("time", 0)))
    for part in case:
        if part.tag in ("failure", "error", "skipped"):
            found.result = "skipped" if part.tag == "skipped" else "failed"
            found.words = (part.get("message") or "").replace("\n", " ")[:300]
    return found


def main(arguments: list[str] | None = None) -> list[Outcome]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of Pyro")
    parser.add_argument("--select", default="", help="an expression of pytest's -k")
    parser.add_argument("--seed", type=int, default=4, help="of every test")
    parser.add_argument("--theirs", action="store_true", help="don't change the import")
    parser.add_argument("--timeout", type=int, default=3600, help="seconds for all tests")
    options = parser.parse_args(arguments)
    found = outcomes(options.source, options.select, options.seed, options.theirs, options.timeout)
    rows = []
    for file in FILES:
        ours = [o for o in found if o.name.startswith(file) and not o.internal]
        count = Counter(o.result for o in ours)
        internal = sum(bool(o.internal) for o in found if o.name.startswith(file))
        rows.append([file, *(str(count[r]) for r in ("passed", "failed", "skipped")), str(internal)])
    print_table("Pyro's tests", ["file", "passed", "failed", "skipped", "internal"], rows)
    for outcome in found:
        if outcome.result != "passed" and not outcome.internal:
            print(f"{outcome.result}  {outcome.name}: {outcome.words}")
    for reason in dict.fromkeys(INTERNAL.values()):
        names = [o.name for o in found if o.internal == reason]
        print(f"internal  {reason}: {', '.join(sorted({n.partition('[')[0] for n in names}))} ({len(names)})")
    return found


if __name__ == "__main__":
    main()
