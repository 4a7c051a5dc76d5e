"""A folder that an ensemble is written to while it trains: one file for each part of its members, taken up again after
a stop.

The folder holds ``ensemble.json`` (settings and seed) and ``part-00000.safetensors``, ``part-00001.safetensors`` ...,
each a :class:`~pyro_symmetric.samples.Posterior` that appeared whole or not at all, and that says which part of which
ensemble it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pyro_symmetric import arguments
from pyro_symmetric.samples import Posterior
from pyro_symmetric.storage import PathLike, StoreError, inside, load_json, save_json

_HEAD, _KIND = "ensemble.json", "list of an ensemble's settings"


class Parts:
    """The parts of one ensemble, in memory or in a folder.

    :param folder: where to write; ``None`` keeps the parts in memory.
    :param settings: what the members depend on; a folder that was begun with others is refused.
    :raises StoreError: if the folder holds another ensemble, or something else.
    """

    def __init__(self, folder: PathLike | None, settings: Mapping[str, Any], seed: int):
        self.folder = None if folder is None else arguments.path("folder", folder)
        self.head = {"settings": json.loads(json.dumps(settings)), "seed": seed}
        self._held: dict[int, Posterior] = {}
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / _HEAD).exists():
            if any(self.folder.iterdir()):
                raise StoreError(f"folder {self.folder} isn't empty and holds no ensemble; name a new or an empty one")
            save_json(self.folder / _HEAD, self.head, _KIND)
        found = _head(self.folder)
        if found["settings"] != self.head["settings"]:
            changed = sorted(
                name
                for name in {**found["settings"], **self.head["settings"]}
                if found["settings"].get(name) != self.head["settings"].get(name)
            )
            raise StoreError(
                f"folder {self.folder} holds an ensemble of other settings ({', '.join(changed)} differ); name another "
                "folder, or give the settings that it was begun with"
            )
        self.head = found

    @property
    def seed(self) -> int:
        """The seed that the ensemble was begun with."""
        return int(self.head["seed"])

    def get(self, index: int) -> Posterior | None:
        """A finished part, or ``None``."""
        if self.folder is None:
            return self._held.get(index)
        return _load(self.folder, index, self.head) if _part(self.folder, index).exists() else None

    def put(self, index: int, part: Posterior) -> None:
        """Write a finished part."""
        if self.folder is None:
            self._held[index] = part
        else:
            metadata = {**part.metadata, "part": {"index": index, **self.head}}
            Posterior(part.samples, part.statistics, metadata, rows=part.rows).save(_part(self.folder, index))


def load_ensemble(folder: PathLike) -> Posterior:
    """The members of an ensemble that have been written to a folder so far.

    :raises OSError: if there is no such folder, or no finished part in it.
    :raises StoreError: naming the file that is damaged.
    """
    folder = arguments.path("folder", folder)
    head = _head(folder)
    indices = sorted(int(path.stem.removeprefix("part-")) for path in folder.glob("part-[0-9]*.safetensors"))
    parts = [_load(folder, index, head) for index in indices]
    if not parts:
        raise FileNotFoundError(f"the ensemble at {folder} has no finished part yet")
    return joined(parts, head["settings"])


def joined(parts: Sequence[Posterior], settings: Mapping[str, Any]) -> Posterior:
    """All members as one chain of independent draws."""
    samples = {site: torch.cat([part.samples[site] for part in parts], 1) for site in parts[0].samples}
    statistics = {name: torch.cat([part.statistics[name] for part in parts], 1) for name in parts[0].statistics}
    stopped = [entry for part in parts for entry in part.metadata["stopped"]]
    metadata = {
        "kernel": "ensemble",
        "settings": dict(settings),
        "stopped": stopped,
        "seconds": sum(part.metadata["seconds"] for part in parts),
    }
    return Posterior(samples, statistics, metadata, rows="independent")


# small steps --------------------------------------------------------------------------------------------------------


def _part(folder: Path, index: int) -> Path:
    return inside(folder, f"part-{index:05d}.safetensors")


def _load(folder: Path, index: int, head: Mapping[str, Any]) -> Posterior:
    """:raises StoreError: if it is damaged, or another part, or of another ensemble."""
    path = _part(folder, index)
    part = Posterior.load(path)
    if part.metadata.get("part") != {"index": index, **head}:
        raise StoreError(
            f"{path} is another part, or one of another ensemble, as if it had been copied there; remove it, and the "
            "same call trains it anew"
        )
    return part


def _head(folder: Path) -> dict[str, Any]:
    path = folder / _HEAD
    if not path.is_file():
        raise FileNotFoundError(f"there is no ensemble at {folder}: {_HEAD} is missing")
    head = load_json(path, _KIND)
    try:
        return {"settings": dict(head["settings"]), "seed": int(head["seed"])}
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path} is damaged: {error!r}") from error
