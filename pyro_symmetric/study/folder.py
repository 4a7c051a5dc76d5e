"""The folder of a study: whose it is, and where in it everything lies.

It holds ``settings.json``, by which a study is known, ``results.json``, ``report.html``, the draws of finished methods
in ``samples`` and what the others have so far in ``unfinished``. Nothing of these names is touched in a folder that is
no study's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyro_symmetric.fingerprint import differences, digest
from pyro_symmetric.posterior.posterior import Posterior
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
        """The fit that a folder keeps."""
        about = posterior.metadata
        return cls(Fit(posterior=posterior, **{name: about[name] for name in KEPT}), about["seconds"])


@dataclass(frozen=True)
class Folder:
    """The folder of a study.

    :param path: where it is.
    :param mark: the study's fingerprint.
    """

    path: Path
    mark: dict[str, Any]

    @classmethod
    def of(cls, path: Path, problem: Problem) -> Folder:
        """Make the folder and note in it whose it is, or check that it is this study's.

        :raises ValueError: if the folder is another study's.
        :raises OSError: if it holds files of these names that no study wrote, or can't be made.
        """
        noted, mark = _noted(path), problem.fingerprint()
        names = (NOTED, RESULTS, REPORT, SAMPLES, UNFINISHED)
        if noted is None and (found := [name for name in names if os.path.lexists(path / name)]):
            raise FileExistsError(
                f"{path} is no study's folder, but holds {', '.join(found)}, where a study would write; choose another "
                "--out. It was left as it is"
            )
        if noted is not None and (differing := differences(noted.get("fingerprint"), mark)):
            raise ValueError(f"{path} holds another study ({'; '.join(differing)}); choose another --out")
        try:
            path.mkdir(parents=True, exist_ok=True)
            note = {"format": FORMAT, "settings": problem.settings.to_dict(), "fingerprint": mark}
            save_json(path / NOTED, note, "settings")  # first: whose the rest is
            (path / SAMPLES).mkdir(exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise OSError(f"{path} can't be made a folder: {error}") from error
        return cls(path, mark)

    def save(self, method: Method, finished: Finished) -> None:
        """Write the posterior with all that belongs to the fit in its metadata."""
        fit = finished.fit
        stride = max(1, len(fit.losses) // CURVE_POINTS)
        own = {name: getattr(fit, name) for name in KEPT} | {"losses": fit.losses[::stride], "loss_stride": stride}
        made = {"method": method.title, "budget": method.budget, "seconds": finished.seconds, "study": self.mark}
        shutil.rmtree(self.store(fit.label), ignore_errors=True)  # another study's, or damaged
        replace(fit.posterior, metadata={**fit.posterior.metadata, **own, **made}).save(self.store(fit.label))

    def load(self, method: Method, say: Callable[[str], None]) -> dict[str, Finished]:
        """The fits of a method that finished earlier; empty if any is missing, damaged or another's."""
        found = {}
        for label in method.rows:
            path = self.store(label)
            if not path.exists():
                return {}
            try:
                posterior = Posterior.load(path)
                found[label] = Finished.of(posterior)
            except (StoreError, KeyError, FileNotFoundError) as error:
                say(f"{path} is damaged and will be made anew: {error}")
                return {}
            there = [posterior.metadata.get(name) for name in ("study", "method", "label", "budget")]
            if there != [self.mark, method.title, label, method.budget]:
                say(f"{path} is of another study, method or budget and will be made anew.")
                return {}
        shutil.rmtree(self.scratch(method), ignore_errors=True)  # of a stop just before it was removed
        seconds = found[method.rows[0]].seconds
        say(f"Reusing {method.title} from {self.path / SAMPLES} (it took {seconds:.1f} s).")
        return found

    def store(self, label: str) -> Path:
        """The folder of the draws of a fit."""
        return self.path / SAMPLES / label.replace(" ", "-")

    def scratch(self, method: Method) -> Path:
        """The folder in which a method keeps what it has before it is finished, on this budget."""
        return self.path / UNFINISHED / f"{method.title}-{digest(method.budget)[:8]}"


def _noted(path: Path) -> dict[str, Any] | None:
    """The note of a study in the folder; ``None`` if it is no study's."""
    try:
        found = load_json(path / NOTED, "settings")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, StoreError):
        return None
    return found if found.get("format") == FORMAT else None
