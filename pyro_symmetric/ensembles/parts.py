"""The parts of an ensemble: each is handed to a recorder when it is trained, so that a run that stopped can resume.

In a folder that is the recorder of :mod:`pyro_symmetric.store`: one file of all members, and one checkpoint that says
how many of them there are, of which ensemble, and how the training of each part went.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pyro_symmetric.fingerprint import COARSE, ELSEWHERE, TOLERANCE, agree, differences
from pyro_symmetric.mcmc.identity import OtherRun, warn_of_rounding
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.storage import StoreError
from pyro_symmetric.store import FolderRecorder, MemoryRecorder
from pyro_symmetric.weights import Weights

SURROUNDINGS = ("versions", "rounding")  # parts of a fingerprint: the GPU's name is one of the latter


@dataclass(frozen=True)
class Part:
    """The course of the training of a part.

    :param members: how many came through.
    :param stopped: epoch and loss of those that didn't.
    :param losses: the mean loss in each epoch.
    :param seconds: what it took.
    """

    members: int
    stopped: list[dict[str, float]]
    losses: list[float]
    seconds: float


class Parts:
    """The finished parts of one ensemble, in a recorder.

    :param found: what decides the members: see :func:`~pyro_symmetric.fingerprint.fingerprint`. A store keeps its seed.
    :param seed: what the call said; ``None`` takes that of the store.
    :raises StoreError: if the store is damaged, or holds another ensemble.
    """

    def __init__(self, recorder: MemoryRecorder | FolderRecorder, found: Mapping[str, Any], seed: int | None):
        self.recorder, self.fingerprint = recorder, dict(found)
        self.done: list[Part] = []
        if not isinstance(recorder, FolderRecorder):
            return
        if recorder.last is not None:
            there = recorder.last.fingerprint
            self._require_same(there, seed)
            self.fingerprint["seed"] = there["seed"]
            self.done = _parts(recorder)
        recorder.fingerprint = self.fingerprint

    @property
    def seed(self) -> int:
        """From which every part has its own."""
        return int(self.fingerprint["seed"])

    @property
    def count(self) -> int:
        """The number of members."""
        return sum(part.members for part in self.done)

    def put(self, weights: Weights, losses: Any, part: Part) -> None:
        """Keep a part that is finished, and make it safe."""
        members = {site: value[None] for site, value in weights.items()}  # draws of a single chain
        self.recorder.append(self.count, members, {"loss": losses[None]})
        self.done = [*self.done, part]
        self.recorder.commit(self.count, self.metadata, self._state)

    def posterior(self) -> Posterior:
        """All members as independent draws."""
        return Posterior(*self.recorder.draws(self.count, self.metadata()), rows="independent")

    def metadata(self) -> dict[str, Any]:
        """Of the posterior."""
        curves = zip(*(part.losses for part in self.done), strict=False)
        shares = [part.members / self.count for part in self.done]
        return {
            "kernel": "ensemble",
            "rows": "independent",
            "settings": self.fingerprint["settings"],
            "seed": self.seed,
            "stopped": [entry for part in self.done for entry in part.stopped],
            "losses": [sum(share * loss for share, loss in zip(shares, row, strict=True)) for row in curves],
            "seconds": sum(part.seconds for part in self.done),
        }

    # small steps ----------------------------------------------------------------------------------------------------

    def _state(self) -> bytes:
        return json.dumps([asdict(part) for part in self.done]).encode()

    def _require_same(self, there: Mapping[str, Any], seed: int | None) -> None:
        """:raises OtherRun: naming what differs."""
        here = self.fingerprint
        differing = differences(there.get("settings"), here["settings"])
        differing += [] if seed is None else differences(there.get("seed"), seed, "seed")
        tolerance = ELSEWHERE * TOLERANCE.get(here["dtype"], COARSE)
        if not differing and not agree(there.get("losses", []), here["losses"], tolerance):
            differing = ["the loss (at the same weights it is another)"]
        path = getattr(self.recorder, "path", None)
        if differing:
            raise OtherRun.of(path, differing)
        warn_of_rounding(path, [line for part in SURROUNDINGS for line in differences(there.get(part), here[part])])


def _parts(recorder: FolderRecorder) -> list[Part]:
    """:raises StoreError: if the checkpoint isn't of an ensemble."""
    assert recorder.last is not None
    try:
        parts = [Part(**entry) for entry in json.loads(bytes(recorder.last.state))]
        if sum(part.members for part in parts) == recorder.last.draws:
            return parts
    except (TypeError, ValueError) as error:
        raise StoreError(f"the draw store {recorder.path} holds draws, but no ensemble that could resume") from error
    raise StoreError(f"the draw store {recorder.path} is damaged: its parts and its draws disagree")
