"""A whole study: fit every method, keep each as it finishes, compare all with the reference, write the report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import platform
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.util import get_rng_state, set_rng_state

from pyro_symmetric.generators import forked
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import StoreError, write_text
from pyro_symmetric.study.folder import REPORT, RESULTS, prepare_folder, scratch_path, store_path
from pyro_symmetric.study.measure import Draws, concerns, draws_of, measure, reference_of
from pyro_symmetric.study.methods import Fit, Method, make_method
from pyro_symmetric.study.problem import Problem, build_problem, fingerprint
from pyro_symmetric.study.report import write_report
from pyro_symmetric.study.settings import StudySettings

Say = Callable[[str], None]

NO_OOD = "No out-of-distribution inputs: classes are held out where there are at least 5; --ood names another data set."

# Weights times rows below which one thread computes as fast as several.
SMALL_PROBLEM = 10_000_000

# Points of a curve that are kept: more than a plot can show.
CURVE_POINTS = 1000


@dataclass(frozen=True)
class Finished:
    """A fit that is on disk, and how long its method took."""

    fit: Fit
    seconds: float


@dataclass(frozen=True)
class Study:
    """What a study found.

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


def run_study(
    settings: StudySettings, out: str | Path, *, overwrite: bool = False, progress: bool = True, say: Say = print
) -> Study:
    """Do the study that ``settings`` describe, in the folder ``out``.

    Every method is written to ``out/samples`` when it finishes; chains and ensembles are written to ``out/unfinished``
    as they go. Run again with the same settings and folder, the study resumes where it stopped; with other settings it
    is refused, unless ``overwrite``. A folder that holds other things in their place is refused in any case.

    Parameters and random generators are the study's own meanwhile: the caller's are afterwards as they were.

    :raises ValueError: if the settings can't be met, or differ from those of the study in ``out``.
    :raises OSError: if the folder can't be written, or holds files of these names that no study wrote.
    """
    methods = [make_method(name, settings.quick, settings.budgets.get(name)) for name in settings.methods]
    make_method(settings.reference)
    with on_its_own(settings):
        problem = build_problem(settings)
        with threads_for(problem):
            return _run(problem, methods, Path(out), overwrite, progress, say)


@contextlib.contextmanager
def on_its_own(settings: StudySettings) -> Iterator[None]:
    """An empty parameter store, and generators of PyTorch, numpy and Python that are put back afterwards."""
    if settings.torch_device.type == "cuda":
        torch.cuda.init()  # so that all GPUs' generators are put back: seeding seeds them all
    with forked(settings.seed, settings.torch_device), pyro.get_param_store().scope():
        found = get_rng_state()
        try:
            yield
        finally:
            set_rng_state(found)


def _run(problem: Problem, methods: Sequence[Method], out: Path, overwrite: bool, progress: bool, say: Say) -> Study:
    settings = problem.settings
    mark = fingerprint(problem)
    out = prepare_folder(out, settings, mark, overwrite)
    of_study = json.loads(json.dumps({"settings": settings.deciding(), "fingerprint": mark}))  # as files give it back
    for line in describe(problem):
        say(line)
    if settings.reference not in settings.methods:
        say(
            f"No distances will be measured: the reference {settings.reference!r} is not among the methods "
            f"{', '.join(settings.methods)}."
        )
    fits: dict[str, Finished] = {}
    for method in methods:
        fits |= stored(method, of_study, out, say) or fit_and_store(method, of_study, problem, out, progress, say)
    draws = {label: draws_of(finished.fit.posterior, problem) for label, finished in fits.items()}
    basis = fits.get(settings.reference)
    reference = reference_of(basis.fit, draws[settings.reference], problem) if basis else None
    rows = {}
    for label, finished in fits.items():
        say(f"Measuring {label} ...")
        pyro.set_rng_seed(settings.seed)  # some tests simulate their null distribution
        rows[label] = measure(finished.fit, draws[label], reference, problem, finished.seconds)
    results = {
        "settings": settings.to_dict(),
        "problem": describe(problem),
        "environment": environment(settings),
        "methods": rows,
    }
    results["concerns"] = concerns(rows, settings.reference)
    for line in results["concerns"]:
        say(line)
    results = without_nan(results)
    write_text(out / RESULTS, json.dumps(results, indent=1, allow_nan=False), "table of results")
    study = Study(problem, fits, draws, results, out)
    write_report(study)
    return study


@contextlib.contextmanager
def threads_for(problem: Problem) -> Iterator[None]:
    """One thread where the network and the data are small.

    Threads that meet after every tiny operation gain little on an idle machine and lose severalfold on a busy one. The
    choice depends on the problem alone, so that a seed reproduces a run to the last bit.
    """
    weights = sum(shape.numel() for shape in problem.model.site_shapes.values())
    before = torch.get_num_threads()
    if weights * len(problem.x) < SMALL_PROBLEM:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# one method ---------------------------------------------------------------------------------------------------------


def stored(method: Method, of_study: Mapping[str, Any], out: Path, say: Say) -> dict[str, Finished]:
    """The fits of a method that finished earlier; empty if any is missing, damaged or another's.

    :param of_study: what every fit of this study says of it.
    """
    found = {}
    for label in method.rows:
        path = store_path(out, label)
        if not path.exists():
            return {}
        try:
            posterior = Posterior.load(path)
            found[label] = finished_from(posterior)
        except (StoreError, KeyError) as error:
            say(f"{path} is damaged and will be made anew: {error}")
            return {}
        origin = [posterior.metadata.get(name) for name in ("study", "method", "label")]
        if origin != [of_study, method.title, label]:
            say(f"{path} is of another study or method, as if it had been copied there, and will be made anew.")
            return {}
        if posterior.metadata["budget"] != method.budget:
            say(f"{path} was made on another budget and will be made anew.")
            return {}
    shutil.rmtree(scratch_path(out, method), ignore_errors=True)  # of a stop just before it was removed
    seconds = found[method.rows[0]].seconds
    say(f"Reusing {method.title} from {out / 'samples'} (it took {seconds:.1f} s).")
    return found


def fit_and_store(
    method: Method, of_study: Mapping[str, Any], problem: Problem, out: Path, progress: bool, say: Say
) -> dict[str, Finished]:
    """Fit a method under a seed of its own, and write each of its fits."""
    scratch = scratch_path(out, method)
    if scratch.exists():
        try:
            return _fit_and_store(method, of_study, problem, out, progress, say)
        except StoreError as error:
            say(f"{scratch} can't resume and is made anew: {error}")
            shutil.rmtree(scratch)
    return _fit_and_store(method, of_study, problem, out, progress, say)


def _fit_and_store(
    method: Method, of_study: Mapping[str, Any], problem: Problem, out: Path, progress: bool, say: Say
) -> dict[str, Finished]:
    say(f"Fitting {method.title} ...")
    # Its own seed, so that a method gives the same draws whichever others run before it.
    pyro.set_rng_seed((problem.settings.seed + zlib.crc32(method.title.encode())) % 2**32)
    pyro.clear_param_store()
    start = time.perf_counter()
    scratch = scratch_path(out, method)
    found = method.fit(replace(problem, scratch=scratch), progress)
    fits = [replace(fit, label=method.prefix + fit.label) for fit in found]
    if problem.x.is_cuda:
        torch.cuda.synchronize()
    # Of a method that was stopped, the earlier parts count as well.
    seconds = max(time.perf_counter() - start, sum(spent(fit.posterior) for fit in fits))
    for fit in fits:
        to_store(Finished(fit, seconds), method, of_study).save(store_path(out, fit.label))
    say(f"  {method.title} took {seconds:.1f} s.")
    if not scratch.exists():
        return {fit.label: Finished(fit, seconds) for fit in fits}
    # Draws may be mapped from files in there: from here on, from those that were written last.
    shutil.rmtree(scratch, ignore_errors=True)
    return {fit.label: finished_from(Posterior.load(store_path(out, fit.label))) for fit in fits}


def spent(posterior: Posterior) -> float:
    """Seconds that the draws took, where that was noted as they were made."""
    noted = posterior.metadata.get("seconds", 0.0)
    return float(sum(noted.values()) if isinstance(noted, Mapping) else noted)


def to_store(finished: Finished, method: Method, of_study: Mapping[str, Any]) -> Posterior:
    """The posterior with all that belongs to the fit in its metadata."""
    fit = finished.fit
    stride = max(1, len(fit.losses) // CURVE_POINTS)
    metadata = {
        **fit.posterior.metadata,
        "label": fit.label,
        "method": method.title,
        "study": of_study,
        "budget": method.budget,
        "seconds": finished.seconds,
        "losses": fit.losses[::stride],
        "loss_stride": stride,
        "loss_label": fit.loss_label,
        "evidence": fit.evidence,
        "barrier": fit.barrier,
        "details": fit.details,
    }
    return Posterior(fit.posterior.samples, fit.posterior.statistics, metadata, rows=fit.posterior.rows)


def finished_from(posterior: Posterior) -> Finished:
    """The inverse of :func:`to_store`."""
    data = posterior.metadata
    fit = Fit(
        data["label"],
        posterior,
        data["losses"],
        data["loss_label"],
        data["evidence"],
        data["barrier"],
        data["details"],
    )
    return Finished(fit, data["seconds"])


# what to say of it --------------------------------------------------------------------------------------------------


def describe(problem: Problem) -> list[str]:
    """The problem in a few lines."""
    data, symmetry = problem.dataset, problem.symmetry
    weights = sum(shape.numel() for shape in problem.model.site_shapes.values())
    factors = ", ".join(f"{n} units of layer {name}" for name, n in symmetry.permutations.factors.items()) or "nothing"
    flips = sum(symmetry.signs.factors.values())
    return [
        f"Data: {data.title}, {data.task}, {len(data.train_x)} training and {len(data.test_x)} test rows of shape "
        f"{tuple(data.input_shape)}" + (f", out of distribution: {data.ood_name}" if data.ood_name else ""),
        f"Network: {weights} weights; symmetries permute {factors}"
        + (f" and flip the signs of {flips}" if flips else "")
        + f", so that every mode has exp({symmetry.log_order():.1f}) copies",
        *data.notes,
        *([] if data.ood_name or not problem.is_classification else [NO_OOD]),
    ]


def environment(settings: StudySettings) -> dict[str, Any]:
    """Versions and machine, for whoever repeats the study."""
    packages = ("pyro-symmetric", "torch", "pyro-ppl", "numpy", "scipy", "arviz-stats", "scikit-learn")
    device = settings.torch_device
    return {
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        "platform": f"{platform.system()} {platform.machine()}",
        "command": " ".join(sys.argv[1:]),
    }


def without_nan(value: Any) -> Any:
    """JSON knows neither NaN nor infinity; both become ``None``."""
    if isinstance(value, dict):
        return {str(key): without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
