"""A whole study: fit every method, save each as it finishes, compare all with the
reference, write the report.

Its folder holds ``settings.json``, which identifies the study, ``results.json``,
``report.html``, the draws of finished methods in ``samples`` and the progress of others
in ``unfinished``. In any other folder, files of these names are left alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyro
import torch

from pyro_symmetric import datasets
from pyro_symmetric._process import forked
from pyro_symmetric.arguments import Json
from pyro_symmetric.compare.results import plain
from pyro_symmetric.mcmc.digest import digest
from pyro_symmetric.mcmc.resume import VERSIONS, differences
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import StoreError, write_whole
from pyro_symmetric.study.measure import (
    MIN_REFERENCE,
    Draws,
    concerns,
    draws_of,
    judge_together,
    measure,
    reference_of,
)
from pyro_symmetric.study.methods import Fit, Method, TooLarge, make_method
from pyro_symmetric.study.problem import Problem, StudySettings, build_problem
from pyro_symmetric.weights import map_values

Say = Callable[[str], None]

# What a study needs: module -> package.
PACKAGES = {
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "laplace": "laplace-torch",
}
# weights times rows below which one thread computes as fast as several
SMALL_PROBLEM = 10_000_000
FORMAT = "pyro-symmetric study"
SETTINGS, RESULTS, REPORT, SAMPLES, UNFINISHED, *DERIVED = (
    "settings.json",
    "results.json",
    "report.html",
    "samples",
    "unfinished",
    "figures",
    "tables",
)


@dataclass(frozen=True)
class Study:
    """The findings of a study.

    :param problem: the data, model and symmetry.
    :param fits: label -> fit, in the order of the methods.
    :param draws: label -> the draws that were compared.
    :param results: the numbers of the report, as JSON.
    :param out: the study's folder.
    """

    problem: Problem
    fits: dict[str, Fit]
    draws: dict[str, Draws]
    results: Json
    out: Path

    @property
    def report(self) -> Path:
        """The path of the report."""
        return self.out / REPORT


def run_study(
    settings: StudySettings, out: str | Path, *, progress: bool = True, say: Say = print
) -> Study:
    """Run the study that ``settings`` describe, in the folder ``out``.

    Every method is saved to ``out/samples`` when it finishes; chains and ensembles save
    their progress to ``out/unfinished``. Called again with the same settings and
    folder, the study resumes where it stopped. The caller's random generators and Pyro
    parameters are left alone: see :func:`own_randomness`.

    :param say: receives progress messages, a line each.
    :raises ValueError: if the settings can't be met, or differ from those of the study
        in ``out``.
    :raises ImportError: if a package is missing that the methods or the report need.
    :raises OSError: if ``out`` can't be written, or holds files of a study's names that
        no study wrote.
    """
    methods = [make_method(title, settings.quick) for title in settings.methods]
    settings = replace(settings, reference=named_reference(methods, settings))
    for name in filter(None, (settings.data, settings.ood)):
        datasets.require_known(name)
    if missing := [
        package
        for module, package in PACKAGES.items()
        if importlib.util.find_spec(module) is None
    ]:
        raise ImportError(
            f"the study needs {' and '.join(missing)}: pip install "
            f"{' '.join(missing)}, or, in a checkout, pip install '.[study]'"
        )
    with own_randomness(settings.seed, settings.torch_device):
        problem = build_problem(settings)
    with threads_for(problem):
        return _run(problem, methods, Path(out), progress, say)


def _run(
    problem: Problem, methods: Sequence[Method], out: Path, progress: bool, say: Say
) -> Study:
    """Fit, or load, and measure the methods one by one; then write results and
    report.
    """
    settings = problem.settings
    fingerprint = claim_folder(out, problem)
    for line in problem.describe():
        say(line)
    title = settings.reference
    fits = dict[str, Fit]()
    remarks = []
    if title not in settings.methods:
        say(
            f"No distances are measured: the reference {title} is not among "
            f"{', '.join(settings.methods)}."
        )
    for method in methods:
        if fitted := load(method, out, fingerprint, say):
            say(f"Reusing {method.title} from {out / SAMPLES}.")
        else:
            say(f"Fitting {method.title} ...")
            try:
                fit_and_save(method, problem, out, fingerprint, progress, say)
            except TooLarge as error:
                remarks.append(f"{method.title} is left out: {error}.")
                say(remarks[-1])
                continue
            fitted = load(method, out, fingerprint, say)
        fits |= fitted
    if not fits:
        raise ValueError("the problem is too large for every method")
    draws = map_values(lambda fit: draws_of(fit.posterior, problem), fits)
    reference = (
        reference_of(title, fits[title].posterior, draws[title], problem)
        if title in fits
        else None
    )
    rows = {}
    for label, fit in fits.items():
        say(f"Measuring {label} ...")
        # a test may simulate its null distribution
        with own_randomness(settings.seed, problem.x.device):
            rows[label] = measure(label, fit, draws[label], reference, problem)
    judge_together(rows.values())
    remarks += concerns(rows, title)
    for line in remarks:
        say(line)
    results = {
        "settings": settings.to_dict(),
        "problem": problem.describe(),
        "environment": environment(settings),
        "methods": rows,
        "concerns": remarks,
    }
    study = Study(problem, fits, draws, plain(results), out)
    write_whole(
        out / RESULTS,
        json.dumps(study.results, indent=1, allow_nan=False).encode(),
        "table of results",
    )
    from pyro_symmetric.study.report import write_report  # with matplotlib

    write_report(study)
    return study


def named_reference(methods: Sequence[Method], settings: StudySettings) -> str:
    """Return the title of the method that ``settings.reference`` names, with or without
    its budget.

    :raises ValueError: if it gives too few draws to be split in halves.
    """
    make_method(settings.reference)
    named = {method.name: method for method in reversed(methods)}
    named |= {method.title: method for method in methods}
    if settings.reference not in named:
        return settings.reference
    method = named[settings.reference]
    draws = method.most_draws(method.parts) if method.most_draws else settings.draws
    if draws < MIN_REFERENCE:
        raise ValueError(
            f"--reference {method.title} gives {draws} draws; at least {MIN_REFERENCE} "
            "are needed"
        )
    return method.title


# fitting ------------------------------------------------------------------------------


def fit_and_save(
    method: Method,
    problem: Problem,
    out: Path,
    fingerprint: Any,
    progress: bool,
    say: Say,
) -> None:
    """Fit a method, or resume it where it stopped, and save each of its fits."""
    # A seed of its own: its draws don't depend on the methods before it.
    seed = int(digest([problem.settings.seed, method.title])[:8], 16)
    scratch = scratch_path(out, method)
    start = time.perf_counter()
    resumed = scratch.exists()
    own_problem = replace(problem, seed=seed, scratch=scratch)

    def attempt() -> list[Fit]:
        with own_randomness(seed, problem.x.device):
            return list(method.fit(own_problem, method.parts, progress))

    try:
        fits = attempt()
    except StoreError as error:
        if not resumed:
            raise
        say(f"{scratch} can't be resumed and is started again: {error}")
        shutil.rmtree(scratch)
        fits = attempt()
    if problem.x.is_cuda:
        torch.cuda.synchronize()
    # The time before an interrupt counts, too.
    seconds = max(time.perf_counter() - start, sum(map(_recorded_seconds, fits)))
    for label, fit in zip(method.rows, fits, strict=True):
        metadata = {
            "study": identity(method, label, fingerprint),
            "found": {**fit.found, "seconds": seconds},
        }
        # another study's, or damaged
        shutil.rmtree(store_path(out, label), ignore_errors=True)
        replace(fit.posterior, metadata={**fit.posterior.metadata, **metadata}).save(
            store_path(out, label)
        )
    say(f"  {method.title} took {seconds:.1f} s.")


def _recorded_seconds(fit: Fit) -> float:
    """Return the seconds that the posterior's metadata record for its draws, or 0."""
    recorded = fit.posterior.metadata.get("seconds", 0.0)
    return float(sum(recorded.values()) if isinstance(recorded, Mapping) else recorded)


@contextlib.contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Run with PyTorch's generators (CPU and device) seeded and an empty parameter
    store, then restore the caller's. One thread at a time."""
    with forked(seed, device), pyro.get_param_store().scope():
        yield


@contextlib.contextmanager
def threads_for(problem: Problem) -> Iterator[None]:
    """Run on one thread if the network and the data are small.

    Synchronising threads after every tiny operation gains little on an idle machine and
    loses severalfold on a busy one. The choice depends on the problem alone, so that a
    seed reproduces a run to the last bit.
    """
    before = torch.get_num_threads()
    if problem.num_weights * len(problem.x) < SMALL_PROBLEM:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def environment(settings: StudySettings) -> Json:
    """Return the versions and the machine, for the record."""
    device = settings.torch_device
    cpu = f"CPU, {torch.get_num_threads()} threads"
    return {
        "python": platform.python_version(),
        **VERSIONS,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "platform": f"{platform.system()} {platform.machine()}",
    }


# the folder ---------------------------------------------------------------------------


def claim_folder(path: Path, problem: Problem) -> Json:
    """Make the folder and record in it the study's fingerprint, or check that it is
    this study's.

    :returns: the fingerprint.
    :raises ValueError: if the folder is another study's.
    :raises OSError: if it holds files of these names that no study wrote, or can't be
        made.
    """
    fingerprint = problem.fingerprint()
    record = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        record = dict(json.loads((path / SETTINGS).read_text()))
    held = [
        name
        for name in (SETTINGS, RESULTS, REPORT, SAMPLES, UNFINISHED, *DERIVED)
        if os.path.lexists(path / name)
    ]
    if held and record.get("format") != FORMAT:
        raise FileExistsError(
            f"{path} is not the folder of a study but holds {', '.join(held)}, which a "
            "study would overwrite; choose "
            "another --out. Nothing was changed"
        )
    if held and (differing := differences(record.get("fingerprint"), fingerprint)):
        raise ValueError(
            f"{path} holds another study ({'; '.join(differing)}); choose another --out"
        )
    path.mkdir(parents=True, exist_ok=True)
    record = {
        "format": FORMAT,
        "settings": problem.settings.to_dict(),
        "fingerprint": fingerprint,
    }
    # first: it claims the folder
    write_whole(path / SETTINGS, json.dumps(record, indent=1).encode(), "settings")
    (path / SAMPLES).mkdir(exist_ok=True)
    return fingerprint


def load(method: Method, out: Path, fingerprint: Any, say: Say) -> dict[str, Fit]:
    """Load the fits of a method that has finished; return none if one is missing,
    damaged or another study's.
    """
    fits = {}
    for label in method.rows:
        path = store_path(out, label)
        if not path.exists():
            return {}
        try:
            posterior = Posterior.load(path)
            fits[label] = Fit(posterior, posterior.metadata["found"])
        except (StoreError, KeyError, FileNotFoundError) as error:
            say(f"{path} is damaged and will be fitted again: {error}")
            return {}
        if posterior.metadata.get("study") != identity(method, label, fingerprint):
            say(
                f"{path} is of another study, method or budget and will be fitted "
                "again."
            )
            return {}
    shutil.rmtree(scratch_path(out, method), ignore_errors=True)
    return fits


def identity(method: Method, label: str, fingerprint: Any) -> Json:
    """Identify a saved fit."""
    return {
        "study": fingerprint,
        "method": method.title,
        "label": label,
        "budget": dict(method.budget),
    }


def store_path(out: Path, label: str) -> Path:
    """Return the folder of a fit's draws."""
    return out / SAMPLES / label.replace(" ", "-").replace(":", ",")


def scratch_path(out: Path, method: Method) -> Path:
    """Return the folder of the progress of a method on its budget."""
    return (
        out
        / UNFINISHED
        / f"{method.name}-{digest([method.title, dict(method.budget)])[:8]}"
    )
