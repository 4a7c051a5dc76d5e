"""The parts of an ensemble: each is written to a folder when it is trained, so that a run that stopped can resume.

The folder holds ``part-00000.safetensors``, ``part-00001.safetensors`` ..., each a
:class:`~pyro_symmetric.posterior.Posterior` that appears whole or not at all and says which part of which ensemble
it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pyro_symmetric import arguments
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import PathLike, StoreError, inside

_PATTERN = "part-[0-9]*.safetensors"


class Parts:
    """The parts of one ensemble, in memory or in a folder.

    :param folder: where to write; ``None`` keeps the parts in memory.
    :param settings: what the members depend on; a folder that was begun with others is refused.
    :param seed: of the ensemble; a folder that was begun keeps its own.
    :raises StoreError: if the folder holds another ensemble, or something else.
    """

    def __init__(self, folder: PathLike | None, settings: Mapping[str, Any], seed: int):
        self.folder = None if folder is None else arguments.path("folder", folder)
        self.seed = seed
        self._settings = json.loads(json.dumps(settings))
        self._held: dict[int, Posterior] = {}
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        found = _indices(self.folder)
        if not found and any(not name.name.startswith(".") for name in self.folder.iterdir()):
            raise StoreError(f"folder {self.folder} isn't empty and holds no ensemble; name a new or an empty one")
        if found:
            head = _load(self.folder, found[0]).metadata["part"]
            self._require_same(head["settings"])
            self.seed = int(head["seed"])

    def get(self, index: int) -> Posterior | None:
        """A finished part, or ``None``.

        :raises StoreError: if it is damaged, or of another ensemble.
        """
        if self.folder is None:
            return self._held.get(index)
        if not _path(self.folder, index).exists():
            return None
        part = _load(self.folder, index)
        if part.metadata["part"] != self._head(index):
            raise _foreign(_path(self.folder, index))
        return part

    def put(self, index: int, part: Posterior) -> None:
        """Write a finished part."""
        if self.folder is None:
            self._held[index] = part
        else:
            metadata = {**part.metadata, "part": self._head(index)}
            Posterior(part.samples, part.statistics, metadata, rows=part.rows).save(_path(self.folder, index))

    def _head(self, index: int) -> dict[str, Any]:
        return {"index": index, "settings": self._settings, "seed": self.seed}

    def _require_same(self, found: Mapping[str, Any]) -> None:
        now = self._settings
        if changed := sorted(name for name in {**found, **now} if found.get(name) != now.get(name)):
            raise StoreError(
                f"folder {self.folder} holds an ensemble of other settings ({', '.join(changed)} differ); name another "
                "folder, or give the settings that it was begun with"
            )


def load_ensemble(folder: PathLike) -> Posterior:
    """The members of an ensemble that have been written to a folder so far.

    :raises OSError: if there is no such folder, or no finished part in it.
    :raises StoreError: naming the file that is damaged.
    """
    folder = arguments.path("folder", folder)
    parts = [_load(folder, index) for index in _indices(folder)]
    if not parts:
        raise FileNotFoundError(f"there is no finished part of an ensemble at {folder}")
    heads = [{**part.metadata["part"], "index": None} for part in parts]
    if other := next((k for k, head in enumerate(heads) if head != heads[0]), 0):
        raise _foreign(_path(folder, _indices(folder)[other]))
    return joined(parts, heads[0]["settings"])


def joined(parts: Sequence[Posterior], settings: Mapping[str, Any]) -> Posterior:
    """All members as one chain of independent draws."""
    samples = {site: torch.cat([part.samples[site] for part in parts], 1) for site in parts[0].samples}
    statistics = {name: torch.cat([part.statistics[name] for part in parts], 1) for name in parts[0].statistics}
    curves = torch.tensor([part.metadata["losses"] for part in parts], dtype=torch.float64)
    members = torch.tensor([part.num_samples for part in parts], dtype=torch.float64)
    metadata = {
        "kernel": "ensemble",
        "settings": dict(settings),
        "stopped": [entry for part in parts for entry in part.metadata["stopped"]],
        "losses": (members @ curves / members.sum()).tolist(),
        "seconds": sum(part.metadata["seconds"] for part in parts),
    }
    return Posterior(samples, statistics, metadata, rows="independent")


# small steps --------------------------------------------------------------------------------------------------------


def _path(folder: Path, index: int) -> Path:
    return inside(folder, f"part-{index:05d}.safetensors")


def _indices(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("part-")) for path in folder.glob(_PATTERN))


def _load(folder: Path, index: int) -> Posterior:
    """:raises StoreError: if it is damaged, or no part of that number."""
    part = Posterior.load(_path(folder, index))
    head = part.metadata.get("part")
    if not isinstance(head, dict) or head.keys() != {"index", "settings", "seed"} or head["index"] != index:
        raise _foreign(_path(folder, index))
    return part


def _foreign(path: Path) -> StoreError:
    return StoreError(
        f"{path} is another part, or one of another ensemble, as if it had been copied there; remove it, and the same "
        "call trains it anew"
    )
