"""A whole study: fit every method, keep each as it finishes, compare all with the reference, write the report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch

from pyro_symmetric._process import forked
from pyro_symmetric.compare.results import plain
from pyro_symmetric.fingerprint import digest
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.storage import StoreError, write_text
from pyro_symmetric.study.folder import REPORT, RESULTS, Finished, Folder
from pyro_symmetric.study.measure import MIN_REFERENCE, Draws, concerns, draws_of, measure, reference_of
from pyro_symmetric.study.methods import Method, make_method
from pyro_symmetric.study.problem import Problem, build_problem
from pyro_symmetric.study.settings import StudySettings

Say = Callable[[str], None]

# Module -> the package that brings it: what a report is made with.
PACKAGES = {"jinja2": "jinja2", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}
VERSIONS = ("pyro-symmetric", "torch", "pyro-ppl", "numpy", "scipy", "arviz-stats", "scikit-learn")
# Weights times rows below which one thread computes as fast as several.
SMALL_PROBLEM = 10_000_000


@dataclass(frozen=True)
class Study:
    """The findings of a study.

    :param problem: the data, model and symmetry.
    :param fits: label -> what was fitted, in the order of the methods.
    :param draws: label -> the draws that were compared.
    :param results: all that the report's tables hold, as JSON.
    :param out: the folder that holds everything.
    """

    problem: Problem
    fits: dict[str, Finished]
    draws: dict[str, Draws]
    results: dict[str, Any]
    out: Path

    @property
    def report(self) -> Path:
        """The report to open."""
        return self.out / REPORT


def run_study(settings: StudySettings, out: str | Path, *, progress: bool = True, say: Say = print) -> Study:
    """Do the study that ``settings`` describe, in the folder ``out``.

    Every method is written to ``out/samples`` when it finishes; chains and ensembles are written to ``out/unfinished``
    as they go. Run again with the same settings and folder, the study resumes where it stopped; with other settings it
    is refused, and so is a folder that holds other things in their place.

    The caller's random generators and Pyro parameters stay as they are: see :func:`own_randomness`.

    :raises ValueError: if the settings can't be met, or differ from those of the study in ``out``.
    :raises ImportError: if a package is missing that the methods or the report need.
    :raises OSError: if the folder can't be written, or holds files of these names that no study wrote.
    """
    methods = [make_method(name, settings.quick, settings.budgets.get(name)) for name in settings.methods]
    make_method(settings.reference)
    require_packages(methods)
    for method in methods:
        if method.title == settings.reference:
            require_reference(method, settings)
    with own_randomness(settings.seed, settings.torch_device):
        problem = build_problem(settings)
    with threads_for(problem):
        return _run(problem, methods, Path(out), progress, say)


def _run(problem: Problem, methods: Sequence[Method], out: Path, progress: bool, say: Say) -> Study:
    settings, folder = problem.settings, Folder.of(out, problem)
    for line in problem.describe():
        say(line)
    methods = suited(methods, problem, say)
    titles = [method.title for method in methods]
    if settings.reference not in titles:
        say(
            f"No distances will be measured: the reference {settings.reference!r} is not among the methods "
            f"{', '.join(titles)}."
        )
    fits: dict[str, Finished] = {}
    for method in methods:
        fits |= folder.load(method, say) or fit(method, problem, folder, progress, say)
    draws = {label: draws_of(finished.fit.posterior, problem) for label, finished in fits.items()}
    basis = fits.get(settings.reference)
    reference = reference_of(basis.fit, draws[settings.reference], problem) if basis else None
    rows = {}
    for label, finished in fits.items():
        say(f"Measuring {label} ...")
        with own_randomness(settings.seed, problem.x.device):  # some tests simulate their null distribution
            rows[label] = measure(finished.fit, draws[label], reference, problem, finished.seconds)
    from pyro_symmetric.study.report import write_report  # with matplotlib

    results = {
        "settings": settings.to_dict(),
        "problem": problem.describe(),
        "environment": environment(settings),
        "methods": rows,
        "concerns": concerns(rows, settings.reference),
    }
    for line in results["concerns"]:
        say(line)
    study = Study(problem, fits, draws, plain(results), out)
    write_text(out / RESULTS, json.dumps(study.results, indent=1, allow_nan=False), "table of results")
    write_report(study)
    return study


def require_packages(methods: Sequence[Method]) -> None:
    """:raises ImportError: naming what isn't installed of all that the study will need."""
    needed = dict(PACKAGES)
    for method in methods:
        needed |= method.packages
    if missing := [package for module, package in needed.items() if importlib.util.find_spec(module) is None]:
        raise ImportError(
            f"the study needs {' and '.join(missing)}, not installed here; pip install 'pyro-symmetric[study]' brings "
            "what is missing"
        )


def require_reference(method: Method, settings: StudySettings) -> None:
    """:raises ValueError: if the reference will have too few draws to be split."""
    if (draws := method.num_draws(settings)) < MIN_REFERENCE:
        raise ValueError(
            f"--reference {method.title} gives {draws} draws; at least {MIN_REFERENCE} are needed, so that one half "
            f"can be compared with the other: --budget {method.title}.{method.counted}={MIN_REFERENCE}, say"
        )


def suited(methods: Sequence[Method], problem: Problem, say: Say) -> list[Method]:
    """The methods for which the problem isn't too large; the others are told.

    :raises ValueError: if it is too large for all.
    """
    reasons = {method.title: method.too_large(problem) for method in methods}
    told = [f"{title} is left out: {reason}." for title, reason in reasons.items() if reason]
    if len(told) == len(methods):
        raise ValueError(f"the problem is too large for every method: {' '.join(told)}")
    for line in told:
        say(line)
    return [method for method in methods if not reasons[method.title]]


def fit(method: Method, problem: Problem, folder: Folder, progress: bool, say: Say) -> dict[str, Finished]:
    """Fit a method, or resume where it was stopped, and write each of its fits."""
    scratch = folder.scratch(method)
    resumed = scratch.exists()
    try:
        return _fit(method, problem, folder, progress, say)
    except StoreError as error:
        if not resumed:
            raise
        say(f"{scratch} can't resume and is made anew: {error}")
        shutil.rmtree(scratch)
    return _fit(method, problem, folder, progress, say)


def _fit(method: Method, problem: Problem, folder: Folder, progress: bool, say: Say) -> dict[str, Finished]:
    say(f"Fitting {method.title} ...")
    # Its own seed, so that a method gives the same draws whichever others run before it.
    seed = int(digest([problem.settings.seed, method.title])[:8], 16)
    scratch, start = folder.scratch(method), time.perf_counter()
    with own_randomness(seed, problem.x.device) if method.draws_globally else contextlib.nullcontext():
        found = list(method.fit(replace(problem, seed=seed, scratch=scratch), progress))
    if problem.x.is_cuda:
        torch.cuda.synchronize()
    # Of a method that was stopped, the earlier parts count as well.
    seconds = max(time.perf_counter() - start, sum(one.spent for one in found))
    labelled = [replace(one, label=method.prefix + one.label) for one in found]
    finished = {one.label: Finished(one, seconds) for one in labelled}
    for one in finished.values():
        folder.save(method, one)
    say(f"  {method.title} took {seconds:.1f} s.")
    if not scratch.exists():
        return finished
    # Draws may be mapped from files in there: from here on, from those that were written last.
    shutil.rmtree(scratch, ignore_errors=True)
    return {label: Finished.of(Posterior.load(folder.store(label))) for label in finished}


@contextlib.contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Generators of PyTorch (the CPU's and the device's), numpy and Python that begin at a seed, and an empty parameter
    store; all are put back afterwards. They belong to the process, so one thread at a time has them."""
    with forked(seed, device), pyro.get_param_store().scope():
        found = random.getstate(), np.random.get_state()  # noqa: NPY002 (what others draw from)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(found[0])
            np.random.set_state(found[1])  # noqa: NPY002


@contextlib.contextmanager
def threads_for(problem: Problem) -> Iterator[None]:
    """One thread where the network and the data are small.

    Threads that meet after every tiny operation gain little on an idle machine and lose severalfold on a busy one. The
    choice depends on the problem alone, so that a seed reproduces a run to the last bit.
    """
    before = torch.get_num_threads()
    if problem.num_weights * len(problem.x) < SMALL_PROBLEM:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment(settings: StudySettings) -> dict[str, Any]:
    """Versions and machine, for whoever repeats the study."""
    device = settings.torch_device
    cpu = f"CPU, {torch.get_num_threads()} threads"
    return {
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in VERSIONS},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "platform": f"{platform.system()} {platform.machine()}",
    }
