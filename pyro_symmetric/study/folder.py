"""The folder of a study: whose it is, and where in it everything lies.

It holds ``settings.json``, by which a study is known, ``results.json``, ``report.html``, the draws of finished methods
in ``samples`` and what the others have so far in ``unfinished``. Nothing of these names is touched in a folder that is
no study's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyro_symmetric.fingerprint import differences, digest
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import StoreError, load_json, save_json
from pyro_symmetric.study.methods import Fit, Method
from pyro_symmetric.study.problem import Problem

FORMAT = "pyro-symmetric study"
NOTED, RESULTS, REPORT, SAMPLES, UNFINISHED = "settings.json", "results.json", "report.html", "samples", "unfinished"


CURVE_POINTS = 1000  # of a curve that are kept: more than a plot can show
KEPT = ("label", "losses", "loss_label", "evidence", "barrier", "details")  # of a fit, beside its posterior


@dataclass(frozen=True)
class Finished:
    """A fit that is on disk, and how long its method took."""

    fit: Fit
    seconds: float

    @classmethod
    def of(cls, posterior: Posterior) -> Finished:
        """The fit that :func:`save_fit` wrote."""
        about = posterior.metadata
        return cls(Fit(posterior=posterior, **{name: about[name] for name in KEPT}), about["seconds"])


def prepare_folder(out: Path, problem: Problem) -> Path:
    """Make the folder and note in it whose it is, or check that it is this study's.

    :raises ValueError: if the folder is another study's.
    :raises OSError: if it holds files of these names that no study wrote, or can't be made.
    """
    noted = _noted(out)
    if noted is None:
        _require_room(out)
    elif differing := differences(noted.get("fingerprint"), problem.fingerprint()):
        raise ValueError(f"{out} holds another study ({'; '.join(differing)}); choose another --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
        note = {"format": FORMAT, "settings": problem.settings.to_dict(), "fingerprint": problem.fingerprint()}
        save_json(out / NOTED, note, "settings")  # first: whose the rest is
        (out / SAMPLES).mkdir(exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise OSError(f"{out} can't be made a folder: {error}") from error
    return out


def save_fit(out: Path, method: Method, mark: Mapping[str, Any], finished: Finished) -> None:
    """Write the posterior with all that belongs to the fit in its metadata.

    :param mark: the study's fingerprint.
    """
    fit = finished.fit
    stride = max(1, len(fit.losses) // CURVE_POINTS)
    about = {
        **fit.posterior.metadata,
        **{name: getattr(fit, name) for name in KEPT},
        "losses": fit.losses[::stride],
        "loss_stride": stride,
        "method": method.title,
        "budget": method.budget,
        "seconds": finished.seconds,
        "study": mark,
    }
    replace(fit.posterior, metadata=about).save(store_path(out, fit.label))


def load_fits(out: Path, method: Method, mark: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Finished]:
    """The fits of a method that finished earlier; empty if any is missing, damaged or another's."""
    found = {}
    for label in method.rows:
        path = store_path(out, label)
        if not path.exists():
            return {}
        try:
            posterior = Posterior.load(path)
            found[label] = Finished.of(posterior)
        except (StoreError, KeyError) as error:
            say(f"{path} is damaged and will be made anew: {error}")
            return {}
        there = [posterior.metadata.get(name) for name in ("study", "method", "label", "budget")]
        if there != [mark, method.title, label, method.budget]:
            say(f"{path} is of another study, method or budget and will be made anew.")
            return {}
    shutil.rmtree(scratch_path(out, method), ignore_errors=True)  # of a stop just before it was removed
    seconds = found[method.rows[0]].seconds
    say(f"Reusing {method.title} from {out / SAMPLES} (it took {seconds:.1f} s).")
    return found


def store_path(out: Path, label: str) -> Path:
    """The folder of the draws of a fit."""
    return out / SAMPLES / f"{label.replace(' ', '-')}.safetensors"


def scratch_path(out: Path, method: Method) -> Path:
    """The folder in which a method keeps what it has before it is finished, on this budget."""
    return out / UNFINISHED / f"{method.title}-{digest(method.budget)[:8]}"


# small steps --------------------------------------------------------------------------------------------------------


def _noted(out: Path) -> dict[str, Any] | None:
    """The note of a study in the folder; ``None`` if it is no study's."""
    try:
        found = load_json(out / NOTED, "settings")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, StoreError):
        return None
    return found if found.get("format") == FORMAT else None


def _require_room(out: Path) -> None:
    """:raises FileExistsError: if others' files have the names of a study's."""
    if found := [name for name in (NOTED, RESULTS, REPORT, SAMPLES, UNFINISHED) if os.path.lexists(out / name)]:
        raise FileExistsError(
            f"{out} is no study's folder, but holds {', '.join(found)}, where a study would write; choose another "
            "--out. It was left as it is"
        )
