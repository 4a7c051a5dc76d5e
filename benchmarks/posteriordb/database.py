"""Data and reference draws of posteriordb, read from a copy on disk or fetched file by
file, at one commit.

posteriordb (Magnusson et al. 2024, arXiv 2407.04967; github.com/stan-dev/posteriordb)
holds posteriors of Stan programs and, for 47 of them, 10 chains of 1,000 draws by long
runs of Stan. None of it is part of this repository.
"""

from __future__ import annotations

import io
import json
import os
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMMIT = "28f8d3d6e975315f42aa274a8399f21e07a43b30"  # of 2025-04-29
ADDRESS = f"https://raw.githubusercontent.com/stan-dev/posteriordb/{COMMIT}/posterior_database"
CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    / "pyro_symmetric"
    / "posteriordb"
    / COMMIT
)
Array = NDArray[Any]
# Rubin (1981): too few numbers to fetch
SCHOOLS = {
    "J": 8,
    "y": [28, 8, -3, 7, -1, 1, 18, 12],
    "sigma": [15, 10, 16, 11, 9, 11, 10, 18],
}


@dataclass(frozen=True)
class Database:
    """The files of the database.

    :param root: the folder ``posterior_database`` of a copy. ``None``: a cache folder,
        which files are fetched into.
    """

    root: Path | None = None

    def data(self, posterior: str) -> dict[str, Array]:
        """The data in float64 of a posterior such as ``"arK-arK"``: the name of its
        data, a hyphen, and its program.
        """
        name = posterior.partition("-")[0]
        if name == "eight_schools":
            found: dict[str, Any] = SCHOOLS
        else:
            found = self._read(f"data/data/{name}.json.zip")
        return {name: np.asarray(value, float) for name, value in found.items()}

    def draws(self, posterior: str) -> dict[str, Array]:
        """Reference draws: Stan's name of each number, such as ``"beta[1]"`` ->
        ``(chains, draws)``.
        """
        chains = self._read(f"reference_posteriors/draws/draws/{posterior}.json.zip")
        return {name: np.array([chain[name] for chain in chains]) for name in chains[0]}

    def _read(self, path: str) -> Any:
        with zipfile.ZipFile(io.BytesIO(self._bytes(path))) as archive:
            (name,) = archive.namelist()
            return json.loads(archive.read(name))

    def _bytes(self, path: str) -> bytes:
        if self.root is not None:
            return (self.root / path).read_bytes()
        kept = CACHE / path
        if not kept.exists():
            with urllib.request.urlopen(f"{ADDRESS}/{path}", timeout=60) as answer:
                content = answer.read()
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_name(f"{kept.name}.{os.getpid()}.part")
            part.write_bytes(content)
            os.replace(part, kept)
        return kept.read_bytes()
