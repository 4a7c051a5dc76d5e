"""A whole study: fit every method, keep each as it finishes, compare all with the reference, write the report.

Its folder holds ``settings.json``, by which a study is known, ``results.json``, ``report.html``, the draws of finished
methods in ``samples`` and what the others have so far in ``unfinished``. Nothing of these names is touched in a folder
that is no study's.
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

from pyro_symmetric._process import forked
from pyro_symmetric.compare.results import plain
from pyro_symmetric.mcmc.resume import VERSIONS, differences, digest
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import StoreError, write_whole
from pyro_symmetric.study.measure import MIN_REFERENCE, Draws, concerns, draws_of, measure, reference_of
from pyro_symmetric.study.methods import Fit, Method, TooLarge, make_method
from pyro_symmetric.study.problem import Problem, StudySettings, build_problem

Say = Callable[[str], None]

# Module -> the package that brings it: what a study is made with.
PACKAGES = {"jinja2": "jinja2", "matplotlib": "matplotlib", "sklearn": "scikit-learn", "laplace": "laplace-torch"}
SMALL_PROBLEM = 10_000_000  # weights times rows below which one thread computes as fast as several
FORMAT = "pyro-symmetric study"
NOTED, RESULTS, REPORT, SAMPLES, UNFINISHED = "settings.json", "results.json", "report.html", "samples", "unfinished"


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
    fits: dict[str, Fit]
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
    if missing := [package for module, package in PACKAGES.items() if importlib.util.find_spec(module) is None]:
        names = " and ".join(missing)
        raise ImportError(f"the study needs {names}, not installed here; pip install 'pyro-symmetric[study]' brings it")
    methods = [make_method(title, settings.quick) for title in settings.methods]
    settings = replace(settings, reference=named_reference(methods, settings))
    with own_randomness(settings.seed, settings.torch_device):
        problem = build_problem(settings)
    with threads_for(problem):
        return _run(problem, methods, Path(out), progress, say)


def _run(problem: Problem, methods: Sequence[Method], out: Path, progress: bool, say: Say) -> Study:
    settings, mark = problem.settings, claim(out, problem)
    for line in problem.describe():
        say(line)
    basis, fits, doubts = settings.reference, dict[str, Fit](), list[str]()
    if basis not in settings.methods:
        say(f"No distances will be measured: the reference {basis} is not among {', '.join(settings.methods)}.")
    for method in methods:
        if found := load(method, out, mark, say):
            say(f"Reusing {method.title} from {out / SAMPLES}.")
        else:
            say(f"Fitting {method.title} ...")
            try:
                fit_and_save(method, problem, out, mark, progress, say)
            except TooLarge as error:
                doubts.append(f"{method.title} is left out: {error}.")
                say(doubts[-1])
                continue
            found = load(method, out, mark, say)
        fits |= found
    if not fits:
        raise ValueError("the problem is too large for every method")
    draws = {label: draws_of(fit.posterior, problem) for label, fit in fits.items()}
    reference = reference_of(basis, fits[basis].posterior, draws[basis], problem) if basis in fits else None
    rows = {}
    for label, fit in fits.items():
        say(f"Measuring {label} ...")
        with own_randomness(settings.seed, problem.x.device):  # some tests simulate their null distribution
            rows[label] = measure(label, fit, draws[label], reference, problem)
    doubts += concerns(rows, basis)
    for line in doubts:
        say(line)
    results = {
        "settings": settings.to_dict(),
        "problem": problem.describe(),
        "environment": environment(settings),
        "methods": rows,
        "concerns": doubts,
    }
    study = Study(problem, fits, draws, plain(results), out)
    write_whole(out / RESULTS, json.dumps(study.results, indent=1, allow_nan=False).encode(), "table of results")
    from pyro_symmetric.study.report import write_report  # with matplotlib

    write_report(study)
    return study


def named_reference(methods: Sequence[Method], settings: StudySettings) -> str:
    """The title of the method that the reference names, with or without its budget.

    :raises ValueError: if it will have too few draws to be split.
    """
    make_method(settings.reference)
    named = [method for method in methods if settings.reference in (method.title, method.name)]
    if not named:
        return settings.reference
    method = min(named, key=lambda method: method.title != settings.reference)
    draws = method.most_draws(method.parts) if method.most_draws else settings.draws
    if draws < MIN_REFERENCE:
        raise ValueError(f"--reference {method.title} gives {draws} draws; at least {MIN_REFERENCE} are needed")
    return method.title


# fitting ------------------------------------------------------------------------------------------------------------


def fit_and_save(method: Method, problem: Problem, out: Path, mark: Any, progress: bool, say: Say) -> None:
    """Fit a method, or resume where it was stopped, and write each of its fits."""
    # Its own seed, so that a method gives the same draws whichever others run before it.
    seed = int(digest([problem.settings.seed, method.title])[:8], 16)
    scratch, start = scratch_of(out, method), time.perf_counter()
    resumed, own = scratch.exists(), replace(problem, seed=seed, scratch=scratch)

    def attempt() -> list[Fit]:
        with own_randomness(seed, problem.x.device):
            return list(method.fit(own, method.parts, progress))

    try:
        found = attempt()
    except StoreError as error:
        if not resumed:
            raise
        say(f"{scratch} can't resume and is made anew: {error}")
        shutil.rmtree(scratch)
        found = attempt()
    if problem.x.is_cuda:
        torch.cuda.synchronize()
    # Of a method that was stopped, the earlier parts count as well.
    seconds = max(time.perf_counter() - start, sum(map(_noted_seconds, found)))
    for label, fit in zip(method.rows, found, strict=True):
        noted = {"study": marked(method, label, mark), "found": {**fit.found, "seconds": seconds}}
        shutil.rmtree(store_of(out, label), ignore_errors=True)  # another study's, or damaged
        replace(fit.posterior, metadata={**fit.posterior.metadata, **noted}).save(store_of(out, label))
    say(f"  {method.title} took {seconds:.1f} s.")


def _noted_seconds(fit: Fit) -> float:
    """Seconds that the draws took, if that was noted as they were made."""
    noted = fit.posterior.metadata.get("seconds", 0.0)
    return float(sum(noted.values()) if isinstance(noted, Mapping) else noted)


@contextlib.contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """PyTorch's generators (the CPU's and the device's) that begin at a seed, and an empty parameter store; the
    caller's are put back afterwards. They belong to the process, so one thread at a time has them."""
    with forked(seed, device), pyro.get_param_store().scope():
        yield


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
        **VERSIONS,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "platform": f"{platform.system()} {platform.machine()}",
    }


# the folder ---------------------------------------------------------------------------------------------------------


def claim(path: Path, problem: Problem) -> dict[str, Any]:
    """Make the folder and note in it whose it is, or check that it is this study's; the study's fingerprint.

    :raises ValueError: if the folder is another study's.
    :raises OSError: if it holds files of these names that no study wrote, or can't be made.
    """
    mark, noted = problem.fingerprint(), dict[str, Any]()
    with contextlib.suppress(OSError, ValueError, TypeError):
        noted = dict(json.loads((path / NOTED).read_text()))
    held = [name for name in (NOTED, RESULTS, REPORT, SAMPLES, UNFINISHED) if os.path.lexists(path / name)]
    if held and noted.get("format") != FORMAT:
        raise FileExistsError(
            f"{path} is no study's folder, but holds {', '.join(held)}, where a study would write; choose another "
            "--out. It was left as it is"
        )
    if held and (differing := differences(noted.get("fingerprint"), mark)):
        raise ValueError(f"{path} holds another study ({'; '.join(differing)}); choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    note = {"format": FORMAT, "settings": problem.settings.to_dict(), "fingerprint": mark}
    write_whole(path / NOTED, json.dumps(note, indent=1).encode(), "settings")  # first: whose the rest is
    (path / SAMPLES).mkdir(exist_ok=True)
    return mark


def load(method: Method, out: Path, mark: Any, say: Say) -> dict[str, Fit]:
    """The fits of a method that finished earlier; empty if any is missing, damaged or another's."""
    fits = {}
    for label in method.rows:
        path = store_of(out, label)
        if not path.exists():
            return {}
        try:
            posterior = Posterior.load(path)
            fits[label] = Fit(posterior, posterior.metadata["found"])
        except (StoreError, KeyError, FileNotFoundError) as error:
            say(f"{path} is damaged and will be made anew: {error}")
            return {}
        if posterior.metadata.get("study") != marked(method, label, mark):
            say(f"{path} is of another study, method or budget and will be made anew.")
            return {}
    shutil.rmtree(scratch_of(out, method), ignore_errors=True)
    return fits


def marked(method: Method, label: str, mark: Any) -> dict[str, Any]:
    """All by which a written fit is known."""
    return {"study": mark, "method": method.title, "label": label, "budget": dict(method.budget)}


def store_of(out: Path, label: str) -> Path:
    """The folder of the draws of a fit."""
    return out / SAMPLES / label.replace(" ", "-").replace(":", ",")


def scratch_of(out: Path, method: Method) -> Path:
    """The folder in which a method keeps what it has before it is finished, on this budget."""
    return out / UNFINISHED / f"{method.name}-{digest([method.title, dict(method.budget)])[:8]}"
