"""The folder of a study: whose it is, and where in it everything lies.

It holds ``settings.json``, by which a study is known, ``results.json``, ``report.html``, the draws of finished methods
in ``samples`` and what the others have so far in ``unfinished``. Nothing of these names is touched in a folder that is
no study's.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import StoreError, write_text
from pyro_symmetric.study.methods import Method
from pyro_symmetric.study.settings import StudySettings

FORMAT = "pyro-symmetric study"
NOTED, RESULTS, REPORT, SAMPLES, UNFINISHED = "settings.json", "results.json", "report.html", "samples", "unfinished"


def prepare_folder(out: Path, settings: StudySettings, mark: Mapping[str, str], overwrite: bool) -> Path:
    """Make the folder and note the settings in it, or check that those noted there are the same.

    :param mark: name -> fingerprint of what the settings only name: the data and the network.
    :param overwrite: whether to delete what another study wrote there.
    :raises ValueError: if the folder is another study's.
    :raises OSError: if it holds files of these names that no study wrote, or can't be made.
    """
    noted = _noted(out)
    if noted is None:
        _require_room(out)
    elif overwrite:
        _clear(out)
    else:
        _require_same(out, noted, settings, mark)
    try:
        out.mkdir(parents=True, exist_ok=True)
        note = {"format": FORMAT, "settings": settings.to_dict(), "fingerprint": mark}
        write_text(out / NOTED, json.dumps(note, indent=1), "settings")  # first: whose the rest is
        (out / SAMPLES).mkdir(exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise OSError(f"{out} can't be made a folder: {error}") from error
    return out


def store_path(out: Path, label: str) -> Path:
    """Where the draws of a fit lie."""
    return out / SAMPLES / f"{label.replace(' ', '-')}.safetensors"


def scratch_path(out: Path, method: Method) -> Path:
    """Where a method keeps what it has before it is finished, on this budget."""
    mark = zlib.crc32(json.dumps(method.budget, sort_keys=True).encode())
    return out / UNFINISHED / f"{method.title}-{mark:08x}"


# small steps --------------------------------------------------------------------------------------------------------


def _noted(out: Path) -> dict[str, Any] | None:
    """What a study noted in the folder; ``None`` if it is no study's."""
    try:
        found = json.loads((out / NOTED).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def _require_room(out: Path) -> None:
    """:raises FileExistsError: if others' files have the names of a study's."""
    if found := [name for name in (NOTED, RESULTS, REPORT, SAMPLES, UNFINISHED) if os.path.lexists(out / name)]:
        raise FileExistsError(
            f"{out} is no study's folder, but holds {', '.join(found)}, where a study would write; choose another "
            "--out. It was left as it is"
        )


def _require_same(out: Path, noted: Mapping[str, Any], settings: StudySettings, mark: Mapping[str, str]) -> None:
    try:
        there, marked = StudySettings.from_dict(noted["settings"]), dict(noted["fingerprint"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{out / NOTED} can't be read ({error}); choose another --out, or --overwrite") from error
    if changed := settings.differences(there):
        shown = "; ".join(f"{name}: {there!r} there, {here!r} now" for name, (here, there) in changed.items())
        raise ValueError(f"{out} holds a study with other settings ({shown}); choose another --out, or --overwrite")
    if changed_marks := [name for name, value in mark.items() if marked.get(name) != value]:
        raise ValueError(
            f"{out} holds a study of another {' and '.join(changed_marks)} of the same name; choose another --out, "
            "or --overwrite"
        )


def _clear(out: Path) -> None:
    """Delete the draws that a study wrote, and only these."""
    for file in (out / SAMPLES).glob("*.safetensors"):
        if _is_fit(out, file):
            file.unlink()
    for left in (out / UNFINISHED).glob("*"):
        if re.fullmatch(r".+-[0-9a-f]{8}", left.name) and left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)


def _is_fit(out: Path, file: Path) -> bool:
    try:
        metadata = Posterior.load(file).metadata
        return "method" in metadata and store_path(out, metadata["label"]) == file
    except (StoreError, KeyError, OSError):  # another file, or a damaged one, which is made anew if it is in the way
        return False
