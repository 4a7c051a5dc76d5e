"""Reference posteriors of Bayesian networks and a mixture, modulo their symmetry.

A reference is a folder of ``benchmarks/references`` in a checkout::

    model.py            a Pyro model, its arguments, and predictions for draws
    data.csv            its rows
    draws/              1,000 draws in one frame: a Zarr group, see Posterior.load
    certificate.json    how they were made, what was checked, digests of the files

The draws of two samplers can't be compared as they come, since copies of a mode differ.
:func:`~pyro_symmetric.compare.against_reference` compares them modulo symmetry.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pyro_symmetric.arguments import Json, did_you_mean
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.store import PathLike

CHECKOUT = Path(__file__).parents[1] / "benchmarks" / "references"
CERTIFICATE = "certificate.json"


@dataclass(frozen=True, eq=False, repr=False)
class Reference:
    """A reference posterior.

    :param name: of its folder.
    :param posterior: 1,000 draws in one frame, with the model attached.
    :param symmetry: of the model, as it is on file.
    :param problem: ``model.py``: ``model``, ``arguments``, and ``predict(weights)``,
        which returns class probabilities ``(draws, rows, classes)``, or means ``(draws,
        rows, 1)`` with the noise.
    :param certificate: the samplers, checks, expectations and digests.
    """

    name: str
    posterior: Posterior
    symmetry: Any
    problem: ModuleType
    certificate: Json

    @property
    def is_certified(self) -> bool:
        """True if the chains of each of two samplers agree, and the two as well."""
        return not self.certificate["doubts"]

    def __repr__(self) -> str:
        doubts = "; ".join(self.certificate["doubts"])
        return (
            f"reference {self.name}: {self.posterior.num_samples:,} draws, "
            f"{f'not certified: {doubts}' if doubts else 'certified'}\n"
            f"{self.certificate['symmetry']}"
        )


def reference(name: str, root: PathLike | None = None) -> Reference:
    """Load a reference posterior; its ``model.py`` is run.

    :param name: a folder of ``benchmarks/references``, such as ``"moons-10"``.
    :param root: the folder that holds it; by default that of the checkout in which the
        package lies.
    :raises FileNotFoundError: if there is none of this name; an installed package holds
        no references.
    :raises ValueError: if model, data or draws aren't those that were certified.
    """
    folder = reference_folder(name, CHECKOUT if root is None else Path(root))
    certificate = json.loads((folder / CERTIFICATE).read_text())
    for file in ("model.py", "data.csv"):
        if digest_of(folder / file) != certificate["digests"][file]:
            raise ValueError(
                f"{folder / file} isn't the file from which the draws were made; "
                "restore it, or make the reference again"
            )
    posterior = Posterior.load(folder / "draws")
    if digest_of_draws(posterior) != certificate["digests"]["draws"]:
        raise ValueError(
            f"{folder / 'draws'} holds other draws than those that were certified; "
            "restore them, or make the reference again"
        )
    problem = load_problem(folder)
    attached = posterior.attach(problem.model, *problem.arguments)
    return Reference(name, attached, posterior.symmetry, problem, certificate)


def reference_names(root: Path = CHECKOUT) -> list[str]:
    """Return the names of all references in a folder."""
    return sorted(path.parent.name for path in root.glob(f"*/{CERTIFICATE}"))


def reference_folder(name: str, root: Path) -> Path:
    """Return the folder of a reference.

    :raises FileNotFoundError: if there is none.
    """
    names = reference_names(root)
    if not names:
        raise FileNotFoundError(
            f"{root} holds no reference posteriors; they are the folder "
            "benchmarks/references of a checkout of pyro_symmetric, which root= names"
        )
    if name not in names:
        raise FileNotFoundError(
            f"there is no reference {name!r}{did_you_mean(name, names)}; there are "
            f"{', '.join(names)}"
        )
    return root / name


def load_problem(folder: Path) -> ModuleType:
    """Run the ``model.py`` of a reference."""
    title = f"reference_{folder.name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(title, folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    problem = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(problem)
    return problem


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a text file, whatever its line ends."""
    return hashlib.sha256(path.read_text("utf-8").encode()).hexdigest()


def digest_of_draws(posterior: Posterior) -> str:
    """Return the SHA-256 of all draws, site by site."""
    digest = hashlib.sha256()
    for site, value in sorted(posterior.samples.items()):
        digest.update(f"{site} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()
