"""Whether a store holds the run that a call asks for, so that one never goes on with another's draws.

Runs are the same if all that decides their draws is: the kernel and its settings, sites, counts, seed, dtype, data
(compared by their hash), and the density itself, compared at two fixed points: whatever changed it, be it a prior, a
network's buffer or a parameter that isn't sampled, shows there. ``num_samples`` is left out, so that more may be added.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.storage import StoreError, raw_bytes

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}  # of the density, relative: other threads may round otherwise
COARSE = 1e-2
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
        "density": _density(potential),
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
        "initial": _described(job.initial),
        "seed": job.seed,
        "data": digest([job.args, job.kwargs]),
    }
    return json.loads(json.dumps(asked, default=repr))


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

    :param tolerant: go on in spite of other versions, with a warning.
    :raises OtherRun: naming what differs.
    """
    differing = differences(found["identity"], now["identity"])
    if found["chain_chunk"] != now["chain_chunk"]:
        differing.append(f"chain_chunk: {found['chain_chunk']} there, {now['chain_chunk']} here")
    newer = _differences(found["versions"], now["versions"], 0)
    if differing or (newer and not tolerant):
        hint = "" if differing else "; or pass resume=True to go on in spite of it"
        raise OtherRun.of(path, differing + newer, hint)
    if newer or (loose := _differences(found["surroundings"], now["surroundings"], 0)):
        warnings.warn(
            f"the draw store {path} goes on, but from here its draws may differ from an unbroken run's, since what "
            f"decides their rounding has changed: {'; '.join(newer or loose)}",
            RuntimeWarning,
            stacklevel=2,
        )


def differences(found: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two runs say differently, in words, of what :func:`identify` or :func:`identify_call` told of both."""
    both = [name for name in now if name in found]
    if deciding := next((name for name in DECIDING if name in both and found[name] != now[name]), None):
        both = [deciding]  # the others follow from it
    elif "data" in both and found["data"] != now["data"]:
        both = [name for name in both if name != "density"]
    tolerance = TOLERANCE.get(now.get("dtype", ""), COARSE)
    return _differences({name: found[name] for name in both}, {name: now[name] for name in both}, tolerance)


def digest(value: Any) -> str:
    """A hash of data: tensors, arrays, numbers, strings and containers of them; of other objects, their type."""
    state = hashlib.blake2b(digest_size=16)
    _feed(state.update, value)
    return state.hexdigest()


# small steps --------------------------------------------------------------------------------------------------------


def _feed(update: Callable[[Any], None], value: Any) -> None:
    if isinstance(value, Tensor):
        update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        update(raw_bytes(value).numpy().data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(f"array {value.dtype} {value.shape}".encode())
        update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif isinstance(value, Mapping):
        update(f"dict {len(value)}".encode())
        for key, part in sorted(value.items(), key=lambda item: repr(item[0])):  # no order decides a draw
            update(repr(key).encode())
            _feed(update, part)
    elif isinstance(value, list | tuple):
        update(f"list {len(value)}".encode())
        for part in value:
            _feed(update, part)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        update(repr(value).encode())
    else:
        update(f"{type(value).__module__}.{type(value).__qualname__}".encode())


def _described(initial: Any) -> str | None:
    if initial is None or isinstance(initial, str):
        return initial
    return f"weights {digest(initial)}" if isinstance(initial, Mapping) else type(initial).__name__


def _density(potential: Potential) -> list[float]:
    wave = torch.arange(potential.dim, dtype=torch.float64).cos().to(potential.device, potential.dtype)
    rows = {
        name: torch.arange(size, device=potential.device).expand(2, size)
        for name, (_, size) in potential.row_counts.items()
    }
    return potential(torch.stack([0.1 * wave, 0.3 * wave]), rows or None).tolist()


def _differences(found: Any, now: Any, tolerance: float, name: str = "") -> list[str]:
    if name == "sites":
        return [] if found == now else [f"the model: its sites are {_listed(found)} there, {_listed(now)} here"]
    if isinstance(found, dict) and isinstance(now, dict):
        keys = sorted(set(found) | set(now))
        parts = (_differences(found.get(k), now.get(k), tolerance, f"{name}.{k}".lstrip(".")) for k in keys)
        return [line for part in parts for line in part]
    if name == "density":
        same = len(found) == len(now) and all(_close(a, b, tolerance) for a, b in zip(found, now, strict=True))
        return [] if same else ["the model (its density at the same weights is another)"]
    if found == now:
        return []
    return ["data: their hash is another" if name == "data" else f"{name}: {found!r} there, {now!r} here"]


def _listed(sites: Mapping[str, Sequence[int]], most: int = 8) -> str:
    named = [f"{site} {tuple(shape)}" for site, shape in sites.items()]
    return ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")


def _close(a: float, b: float, tolerance: float) -> bool:
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= tolerance * max(1.0, abs(a))
