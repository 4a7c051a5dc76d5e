"""The state that a run resumes from, and a check that it is the run that a call asks for, never another's.

Runs are the same if all that decides their draws is: the kernel and its settings, sites, counts, seed, dtype, the data
by their hash, the model's code with the constants that it reads (:func:`digest`), and the density where the chains
stand. ``num_samples`` is left out, so that more may be added. ``resume=True`` resumes though code or versions differ.
All is told before anything is drawn.

The hash is the same in every process. It sees tensors, numbers, texts and containers by what they hold (lists and
tuples are alike, and dictionaries in any order); networks by their modules, parameters, buffers and public attributes;
functions by their code, constants, defaults, closures and the globals that they read; classes by their bases and
methods; other objects by their class and what pickle would keep. Functions and classes of installed libraries count by
their names.
"""

from __future__ import annotations

import copy
import dis
import hashlib
import io
import json
import pickle
import platform
import sys
import sysconfig
import types
import warnings
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyro
import torch
from torch import Tensor, nn

from pyro_symmetric._process import LOCK
from pyro_symmetric._version import __version__
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import Kernel
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.store import StoreError, raw_bytes

if TYPE_CHECKING:
    from pyro_symmetric.mcmc.run import Settings

KERNELS = Kernel.__module__.rpartition(".")[0]
OTHER_MODEL = "the model (its density at the same weights is another)"
OTHER_CODE = "the model's code, or a value that it reads from outside (their digest is another)"
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative: another processor sums in another order
MOST_COMPARED = 64  # chains
VERSIONS = {"pyro_symmetric": __version__, "torch": torch.__version__, "pyro": pyro.__version__}
LIBRARIES = {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parents[1])}
METHODS = types.FunctionType | property | staticmethod | classmethod
NAMED = types.BuiltinFunctionType | types.ModuleType | torch.dtype | torch.device


# the run that a call asks for ---------------------------------------------------------------------------------------


def identify(settings: Settings, density: Density, seed: int) -> dict[str, Any]:
    """The fingerprint of a run: what must be the same, what may differ if the user insists, and what rounds sums.

    :param seed: the settings' own, or the one that was drawn for them.
    """
    initial, device, model = settings.initial, density.device, settings.kernel.model
    if isinstance(model, BayesianModel):  # whose weights are sampled, and have no values of their own
        model = copy.deepcopy(model)
        for name, weight in model.net.named_parameters():
            if name in model.priors():
                weight.data = torch.zeros_like(weight)
    call = {
        "kernel": type(settings.kernel).__name__,
        "settings": settings.kernel.settings(),
        **{name: getattr(settings, name) for name in ("num_chains", "num_warmup", "thinning")},
        # Of guides and functions, whose draws can't be foretold, the type only.
        "initial": initial if isinstance(initial, Mapping | str | None) else type(initial).__name__,
        "data": digest([settings.args, settings.kwargs]),
        "sites": {site: list(shape) for site, shape in density.layout.site_shapes.items()},
        "device": device.type,  # cuda and cuda:0 are one; which GPU it is stands under rounding
        "dtype": str(density.dtype).removeprefix("torch."),
        "chain_chunk": density.chain_chunk,
        "seed": seed,
    }
    rounding = {
        "engine": density.engine,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
    }
    return as_json(call=call, code=digest(model), versions=VERSIONS, rounding=rounding)


def require_same(settings: Settings, found: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Check the fingerprint of a store against that of a call.

    :raises StoreError: naming what differs.
    """
    newer = differences(found["versions"], now["versions"]) + [OTHER_CODE] * (found["code"] != now["code"])
    if differing := differences(found["call"], now["call"]):
        raise _other_run(settings, differing)
    if newer and settings.resume is not True:
        raise _other_run(settings, newer, "; or pass resume=True to resume all the same")
    if changed := newer + differences(found["rounding"], now["rounding"]):
        warnings.warn(
            f"the draw store {settings.store} is resumed, but from here its draws may differ from an unbroken run's, "
            f"since what decides them or their rounding has changed: {'; '.join(changed)}",
            RuntimeWarning,
            stacklevel=3,
        )


def require_same_energies(settings: Settings, density: Density, z: Tensor, before: Tensor) -> None:
    """Check the energies ``before`` of chains at ``z`` against those of the call's density, but for rounding; if one
    isn't finite, the other mustn't be either.

    :raises StoreError: if they differ.
    """
    now, near = energies(density, z), TOLERANCE.get(density.dtype, 1e-2) * before.abs().clamp(min=1.0)
    same = (before.isfinite() == now.isfinite()) & (((before - now).abs() <= near) | ~before.isfinite())
    if before.shape != now.shape or not bool(same.all()):
        raise _other_run(settings, [OTHER_MODEL])


def energies(density: Density, z: Tensor) -> Tensor:
    """Energies of the chains where they stand, of some of the chains if there are many; with all rows of the data."""
    z = z[:MOST_COMPARED]
    counts = density.row_counts.items()
    rows = {name: torch.arange(size, device=z.device).expand(len(z), size) for name, (_, size) in counts}
    with torch.no_grad():
        return density.without_compiling(z, rows or None)[0].to("cpu", torch.float64)


def _other_run(settings: Settings, differing: list[str], hint: str = "") -> StoreError:
    return StoreError(
        f"the draw store {settings.store} holds another run; it was left as it is. What differs: "
        f"{'; '.join(differing)}. Name another folder, or call as before{hint}"
    )


# the state that it resumes from -------------------------------------------------------------------------------------


def packed(at: Mapping[str, Any], where: Tensor) -> memoryview:
    """The parts of a run's state, and the energies where its chains stand, as bytes that can be written without another
    copy."""
    state, buffer = replace(at["state"], generator=None), io.BytesIO()
    torch.save({"at": {**at, "state": state}, "energies": where}, buffer)
    return buffer.getbuffer()


def unpacked(content: bytes | memoryview, kernel: Kernel) -> tuple[dict[str, Any], Tensor]:
    """The parts that :func:`packed` was given: tensors, plain values and dataclasses of the kernels here and of the
    modules that this kernel's classes come from.

    :raises pickle.UnpicklingError: if there is anything else.
    """
    names = {kind.__module__ for kind in type(kernel).__mro__}
    names |= {name for name in sys.modules if name.startswith(f"{KERNELS}.")}
    kinds = [value for name in names for value in vars(sys.modules[name]).values() if isinstance(value, type)]
    parts: list[Any] = [k for k in kinds if is_dataclass(k) and k.__module__ in names and not issubclass(k, Kernel)]
    with LOCK, torch.serialization.safe_globals(parts):  # a list of the whole process
        found = torch.load(io.BytesIO(content), weights_only=True)
    at = found["at"]
    generator = torch.Generator(at["state"].z.device)
    generator.set_state(at["generator"])
    return {**at, "state": replace(at["state"], generator=generator)}, found["energies"]


def require_storable(at: Mapping[str, Any], kernel: Kernel) -> None:
    """:raises TypeError: if the kernel's state holds what a store can't keep."""
    try:
        unpacked(packed(at, at["state"].energy), kernel)
    except (AttributeError, TypeError, pickle.PickleError) as error:
        said = str(error).splitlines()[0]
        raise TypeError(f"the kernel's state holds what a store can't keep: {said}; see State") from error


# data and code by a hash ----------------------------------------------------------------------------------------------


def as_json(**parts: Any) -> dict[str, Any]:
    """These parts as JSON; what JSON can't hold goes in by its hash."""
    return json.loads(json.dumps(parts, default=lambda value: f"{type(value).__name__} {digest(value)}"))


def differences(found: Any, now: Any, name: str = "") -> list[str]:
    """The differences between two fingerprints, in words: the one that was stored, and that of the call.

    :param name: of what is compared.
    """
    if isinstance(found, dict) and isinstance(now, dict):
        keys = sorted(found.keys() | now.keys())
        return [line for k in keys for line in differences(found.get(k), now.get(k), f"{name}.{k}".lstrip("."))]
    return [] if found == now else [f"{name}: {found!r} there, {now!r} here"]


def digest(value: Any) -> str:
    """The hash, in hexadecimal."""
    return _digest(value, {}).hex()


def _digest(value: Any, met: dict[int, tuple[bytes, Any]]) -> bytes:
    """:param met: the hashes of objects so far, which are kept alive; of those that hold this one, a stand-in."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return _hash(type(value).__name__, value if isinstance(value, bytes) else repr(value).encode())
    if isinstance(value, Tensor):
        dense = value if value.layout == torch.strided else value.to_dense()
        return _hash("tensor", f"{dense.dtype} {tuple(dense.shape)}".encode(), raw_bytes(dense).numpy().data)
    if isinstance(value, NAMED) or _is_of_library(value):
        return _hash("name", getattr(value, "__qualname__", str(value)).encode())
    if id(value) not in met:
        met[id(value)] = b"itself", value
        kind, parts = _parts(value)
        found = [_digest(part, met) for part in parts]
        met[id(value)] = _hash(kind, *(sorted(found) if kind == "set" else found)), value
    return met[id(value)][0]


def _parts(value: Any) -> tuple[str, list[Any]]:
    """The kind of a value, and its parts; the order of those of a set says nothing."""
    if isinstance(value, Mapping):
        return "set", ["dict", *value.items()]
    if isinstance(value, list | tuple):
        return "list", list(value)
    if isinstance(value, set | frozenset):
        return "set", list(value)
    if isinstance(value, nn.Module):
        public = {n: part for n, part in vars(value).items() if not n.startswith("_") or n == "_pyro_samples"}
        held = [dict(value.named_parameters(recurse=False)), dict(value.named_buffers(recurse=False))]
        return "module", [type(value), public, *held, dict(value.named_children())]
    if isinstance(value, types.FunctionType):
        names = _globals_of(value.__code__) if not _is_installed(value.__code__.co_filename) else set()
        read = [value.__globals__[name] for name in sorted(names & value.__globals__.keys())]
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return "function", [value.__code__, value.__defaults__, value.__kwdefaults__, cells, read]
    if isinstance(value, property | staticmethod | classmethod):
        return "wrapped", [value.fget if isinstance(value, property) else value.__func__]
    if isinstance(value, types.CodeType):
        return "code", [value.co_code, list(value.co_consts), value.co_names]
    if isinstance(value, type):
        methods = [part for part in vars(value).values() if isinstance(part, METHODS)]
        return "class", [value.__qualname__, value.__bases__, methods]
    return "object", [type(value), *_pickled(value)]


def _pickled(value: Any) -> list[Any]:
    """The parts of an object that pickle would keep, but for cached ones; none if it can't."""
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # whatever a class raises that refuses it
        return []
    make, arguments, state, *items = (*reduced, None) if isinstance(reduced, tuple) else (reduced, (), None)
    if isinstance(state, dict):  # cached_property, and PyTorch's like of it, stand in a class under the same name
        state = {n: p for n, p in state.items() if not hasattr(getattr(type(value), str(n), None), "__get__")}
    return [make, arguments, state, *(None if part is None else list(part) for part in items)]


def _is_of_library(value: Any) -> bool:
    """True if it is a class or function of an installed library, or of Python's own."""
    if isinstance(value, types.FunctionType):
        return not value.__closure__ and _is_installed(value.__code__.co_filename)
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
        return value.__module__ != "__main__" and _is_installed(getattr(module, "__file__", None) or "<frozen>")
    return False


def _is_installed(file: str) -> bool:
    return file.startswith("<frozen") or any(Path(file).is_relative_to(folder) for folder in LIBRARIES)


def _globals_of(code: types.CodeType) -> set[str]:
    """The names of globals that code reads, with that of functions inside."""
    inner = [_globals_of(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return {str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}.union(*inner)


def _hash(tag: str, *parts: Any) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in (tag.encode(), *parts):
        state.update(memoryview(part).nbytes.to_bytes(8, "little"))
        state.update(part)
    return state.digest()
