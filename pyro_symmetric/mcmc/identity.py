"""Whether a store holds the run that a call asks for, so that one never resumes from another's draws.

Runs are the same if all that decides their draws is: the kernel and its settings, sites, counts, seed, dtype, data
(compared by their hash, see :mod:`~pyro_symmetric.mcmc.digest`), and the density itself: whatever changed it, be it a
prior, a network's buffer or a parameter that isn't sampled, shows there. It is compared at fixed points near 0 and up
to 5 from it, of models that subsample their data on batches that go through them, and at places that the run itself
has passed (:mod:`~pyro_symmetric.mcmc.witnesses`). ``num_samples`` is left out, so that more may be added.

What differs at none of these places by more than rounding isn't seen: a model that is changed only where no chain has
been yet, a row among millions in single precision, rows of a plate beyond the first ``PIECES * NEAR`` batches.
"""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.mcmc.digest import digest
from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.mcmc.starts import resolve
from pyro_symmetric.mcmc.targets import ROWS, Rows
from pyro_symmetric.mcmc.witnesses import close, energies
from pyro_symmetric.samples import Posterior
from pyro_symmetric.storage import StoreError

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}  # of the density, relative
COARSE = 1e-2  # in other precisions
ELSEWHERE = 100.0  # times as much where other threads, processors or versions round otherwise
NEAR, FAR, NUMBERS = 16, 14, 2**24  # points to compare densities at, and how many numbers the far ones may have in all
PIECES = 64  # of NEAR batches each, at most
OTHER_MODEL = "the model (its density at the same weights is another)"
DECIDING = ("kernel", "sites")  # where they differ, what else does follows from it


class OtherRun(StoreError):
    """A store holds another run than the one that a call asks for."""

    @classmethod
    def of(cls, path: Path, differing: Sequence[str], hint: str = "") -> OtherRun:
        """The words for it."""
        return cls(
            f"the draw store {path} holds another run; it was left as it is. What differs: {'; '.join(differing)}. "
            f"Name another folder, or call as before{hint}"
        )


def identify(job: Any, potential: Potential) -> dict[str, Any]:
    """What decides the draws of a :class:`~pyro_symmetric.mcmc.job.Job`, as JSON."""
    found = {
        "sites": {site: list(shape) for site, shape in potential.layout.site_shapes.items()},
        "device": str(potential.device),
        "dtype": str(potential.dtype).removeprefix("torch."),
        "density": _density(potential, job.num_chains),
    }
    return {**identify_call(job), **found}


def identify_call(job: Any) -> dict[str, Any]:
    """As much of it as can be told without the model's density."""
    asked = {
        "kernel": type(job.kernel).__name__,
        "settings": job.kernel.settings(),
        "num_chains": job.num_chains,
        "num_warmup": job.num_warmup,
        "thinning": job.thinning,
        "initial": _described(job),
        "seed": job.seed,
        "data": digest([job.args, job.kwargs]),
    }
    return json.loads(json.dumps(asked, default=lambda value: f"{type(value).__name__} {digest(value)}"))


def versions() -> dict[str, str]:
    """What the arithmetic of a run depends on, beside the run itself."""
    try:
        own = version("pyro-symmetric")
    except PackageNotFoundError:  # a source tree that isn't installed
        own = "unknown"
    return {"pyro_symmetric": own, "torch": torch.__version__, "pyro": version("pyro-ppl")}


def surroundings() -> dict[str, Any]:
    """What may change the last digits of a sum."""
    return {
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
    }


def require_same(path: Path, found: Mapping[str, Any], now: Mapping[str, Any], tolerant: bool) -> None:
    """Check the ``identity``, ``versions``, ``chain_chunk`` and ``surroundings`` of a store against those of a call.

    :param tolerant: resume in spite of other versions, with a warning.
    :raises OtherRun: naming what differs.
    """
    differing = differences(found["identity"], now["identity"], tolerance_of(found, now))
    if found["chain_chunk"] != now["chain_chunk"]:
        differing.append(f"chain_chunk: {found['chain_chunk']} there, {now['chain_chunk']} here")
    newer = _differences(found["versions"], now["versions"], 0)
    if differing or (newer and not tolerant):
        hint = "" if differing else "; or pass resume=True to resume in spite of it"
        raise OtherRun.of(path, differing + newer, hint)
    if newer or (loose := _differences(found["surroundings"], now["surroundings"], 0)):
        warnings.warn(
            f"the draw store {path} is resumed, but from here its draws may differ from an unbroken run's, since what "
            f"decides their rounding has changed: {'; '.join(newer or loose)}",
            RuntimeWarning,
            stacklevel=2,
        )


def tolerance_of(found: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """How much the densities of one model may differ, relative; for arguments see :func:`require_same`."""
    alike = all(found[name] == now[name] for name in ("versions", "surroundings"))
    return TOLERANCE.get(now["identity"]["dtype"], COARSE) * (1.0 if alike else ELSEWHERE)


def differences(found: Mapping[str, Any], now: Mapping[str, Any], tolerance: float | None = None) -> list[str]:
    """What two runs say differently, in words, of what :func:`identify` or :func:`identify_call` told of both.

    :param tolerance: of densities; by default that of runs on the same machine.
    """
    both = [name for name in now if name in found]
    if deciding := next((name for name in DECIDING if name in both and found[name] != now[name]), None):
        both = [deciding]  # the others follow from it
    elif "data" in both and found["data"] != now["data"]:
        both = [name for name in both if name != "density"]
    if tolerance is None:
        tolerance = TOLERANCE.get(now.get("dtype", ""), COARSE)
    return _differences({name: found[name] for name in both}, {name: now[name] for name in both}, tolerance)


# small steps --------------------------------------------------------------------------------------------------------


def _described(job: Any) -> str | None:
    """Weights by their hash; of guides and functions, whose draws can't be foretold, the type only."""
    initial = job.initial
    if isinstance(initial, Posterior):
        initial = resolve(initial, job.num_chains, job.args, job.kwargs)
    if initial is None or isinstance(initial, str):
        return initial
    return f"weights {digest(initial)}" if isinstance(initial, Mapping) else type(initial).__name__


def _density(potential: Potential, at_once: int) -> list[float]:
    """Energies at fixed points."""
    wave = torch.arange(potential.dim, dtype=torch.float64).cos().to(potential.device, potential.dtype)
    near = torch.stack([0.1 * wave, 0.3 * wave])
    points = torch.cat([near, _far_points(potential).to(wave)])
    found = energies(potential, points, _batches(potential, 0, len(points), len(points)), at_once).tolist()
    plates = [-(-total // size) for name, (total, size) in potential.row_counts.items() if name != ROWS]
    pieces = min(PIECES, -(-max(plates, default=0) // NEAR))  # what the arguments hold is in the data's hash already
    near = near.repeat(NEAR // 2, 1)
    for piece in range(pieces):
        found += energies(potential, near, _batches(potential, piece * NEAR, NEAR, pieces * NEAR), at_once).tolist()
    return found


def _far_points(potential: Potential) -> Tensor:
    """Up to 5 from 0; each coordinate takes as many different values as there are points (a Latin hypercube)."""
    count = min(FAR, NUMBERS // potential.dim)
    steps = torch.linspace(-1.0, 1.0, count)
    order = torch.rand(count, potential.dim, generator=torch.Generator().manual_seed(0)).argsort(0)
    return (5.0 * steps * steps.abs())[order]


def _batches(potential: Potential, begin: int, count: int, parts: int) -> Rows | None:
    """Mini-batches for ``count`` points from the ``begin``-th on, of ``parts`` that are spread over the data."""
    k = torch.arange(begin, begin + count, device=potential.device)[:, None]
    batches = {
        name: (k * total // parts + torch.arange(size, device=potential.device)) % total
        for name, (total, size) in potential.row_counts.items()
    }
    return batches or None


def _differences(found: Any, now: Any, tolerance: float, name: str = "") -> list[str]:
    if name == "sites":
        return [] if found == now else [f"the model: its sites are {_listed(found)} there, {_listed(now)} here"]
    if isinstance(found, dict) and isinstance(now, dict):
        keys = sorted(set(found) | set(now))
        parts = (_differences(found.get(k), now.get(k), tolerance, f"{name}.{k}".lstrip(".")) for k in keys)
        return [line for part in parts for line in part]
    if name == "density":
        there, here = (torch.tensor(values, dtype=torch.float64) for values in (found, now))
        return [] if there.shape == here.shape and close(there, here, tolerance) else [OTHER_MODEL]
    if found == now:
        return []
    return ["data: their hash is another" if name == "data" else f"{name}: {found!r} there, {now!r} here"]


def _listed(sites: Mapping[str, Sequence[int]], most: int = 8) -> str:
    named = [f"{site} {tuple(shape)}" for site, shape in sites.items()]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")
