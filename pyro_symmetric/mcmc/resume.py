"""The identity and the saved state of a run: a call resumes a stored run only if it
describes that very run.

Two calls describe one run if everything that decides its draws agrees: kernel and
settings, sites, counts, seed, dtype, hashes of the data and of the model's code with
the constants that it reads (:func:`digest`), and the potential energies at the stored
positions. ``num_samples`` is left out, so that a run can be extended. ``resume=True``
accepts other code and other versions. Differences are reported before anything is
drawn.

The hash is the same in every process. It covers tensors, numbers, strings and
containers by their contents (lists equal tuples; dictionaries and sets have no order);
networks by their modules, parameters, buffers and public attributes; functions by their
code, constants, defaults, closures and the globals that they read; classes by their
bases and methods; other objects by their class and the state that pickle would keep.
Functions and classes of installed libraries count by name.
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
from pyro_symmetric.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import Kernel
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.store import StoreError, raw_bytes

if TYPE_CHECKING:
    from pyro_symmetric.mcmc.run import Settings

KERNELS = Kernel.__module__.rpartition(".")[0]
OTHER_MODEL = "the model (its density at the same weights differs)"
OTHER_CODE = (
    "the model's code, or a value that it reads from outside (their digest differs)"
)
# relative; processors differ in the order of summation
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
MAX_COMPARED = 64  # chains
VERSIONS = {
    "pyro_symmetric": __version__,
    "torch": torch.__version__,
    "pyro": pyro.__version__,
}
LIBRARIES = {
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
}
METHODS = types.FunctionType | property | staticmethod | classmethod
NAMED = types.BuiltinFunctionType | types.ModuleType | torch.dtype | torch.device


# the identity of a run ----------------------------------------------------------------


def identify(settings: Settings, density: Density, seed: int) -> dict[str, Any]:
    """Return the fingerprint of a run: its call, which must match; its code and
    versions, which must match unless ``resume=True``; and its sources of rounding,
    which only warn.

    :param seed: from the settings, or drawn for this run.
    """
    initial, device, model = settings.initial, density.device, settings.kernel.model
    # the initial values of sampled weights don't matter
    if isinstance(model, BayesianModel):
        model = copy.deepcopy(model)
        for name, weight in model.net.named_parameters():
            if name in model.priors():
                weight.data = torch.zeros_like(weight)
    call = {
        "kernel": type(settings.kernel).__name__,
        "settings": settings.kernel.settings(),
        **{
            name: getattr(settings, name)
            for name in ("num_chains", "num_warmup", "thinning")
        },
        # Guides and functions count by type, since their draws aren't reproducible
        # here.
        "initial": initial
        if isinstance(initial, Mapping | str | None)
        else type(initial).__name__,
        "data": digest([settings.args, settings.kwargs]),
        "sites": {
            site: list(shape) for site, shape in density.layout.site_shapes.items()
        },
        # "cuda" equals "cuda:0"; the model of the GPU belongs to rounding
        "device": device.type,
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


def require_same(
    settings: Settings, stored: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Check that a stored fingerprint matches the current call's.

    :raises StoreError: listing the differences.
    """
    changed = differences(stored["versions"], current["versions"]) + [OTHER_CODE] * (
        stored["code"] != current["code"]
    )
    if other_call := differences(stored["call"], current["call"]):
        raise _other_run(settings, other_call)
    if changed and settings.resume is not True:
        raise _other_run(
            settings, changed, "; or pass resume=True to resume all the same"
        )
    if changed := changed + differences(stored["rounding"], current["rounding"]):
        warnings.warn(
            f"the draw store {settings.store} is resumed, but from here its draws may "
            "differ from an unbroken run's, "
            "since what decides them or their rounding has changed: "
            f"{'; '.join(changed)}",
            RuntimeWarning,
            stacklevel=3,
        )


def require_same_energies(
    settings: Settings, density: Density, z: Tensor, stored: Tensor
) -> None:
    """Check that the density gives the stored energies at the stored positions ``z``,
    up to rounding.

    :raises StoreError: if they differ, or only one of two is finite.
    """
    current, tolerance = (
        energies(density, z),
        TOLERANCE.get(density.dtype, 1e-2) * stored.abs().clamp(min=1.0),
    )
    close = ((stored - current).abs() <= tolerance) | ~stored.isfinite()
    same = (stored.isfinite() == current.isfinite()) & close
    if stored.shape != current.shape or not bool(same.all()):
        raise _other_run(settings, [OTHER_MODEL])


def energies(density: Density, z: Tensor) -> Tensor:
    """Evaluate the potential energy of the first :data:`MAX_COMPARED` chains at ``z``,
    on all rows of the data.
    """
    z = z[:MAX_COMPARED]
    counts = density.row_counts.items()
    rows = {
        name: torch.arange(size, device=z.device).expand(len(z), size)
        for name, (_, size) in counts
    }
    with torch.no_grad():
        return density.without_compiling(z, rows or None)[0].to("cpu", torch.float64)


def _other_run(settings: Settings, differing: list[str], hint: str = "") -> StoreError:
    return StoreError(
        f"the draw store {settings.store} holds another run; it was left as it is. "
        "What differs: "
        f"{'; '.join(differing)}. Name another folder, or call as before{hint}"
    )


# the saved state ----------------------------------------------------------------------


def pack(fields: Mapping[str, Any], potential: Tensor) -> memoryview:
    """Serialise the fields of a run's state and the energies at its positions, without
    another copy in memory.
    """
    state, buffer = replace(fields["state"], generator=None), io.BytesIO()
    torch.save({"at": {**fields, "state": state}, "energies": potential}, buffer)
    return buffer.getbuffer()


def unpack(
    content: bytes | memoryview, kernel: Kernel
) -> tuple[dict[str, Any], Tensor]:
    """Return the fields and energies that :func:`pack` serialised.

    :raises pickle.UnpicklingError: if they hold more than tensors, plain values, and
        dataclasses of this package's kernels and of the modules that define the classes
        of ``kernel``.
    """
    modules = {kind.__module__ for kind in type(kernel).__mro__}
    modules |= {name for name in sys.modules if name.startswith(f"{KERNELS}.")}
    kinds = [
        value
        for name in modules
        for value in vars(sys.modules[name]).values()
        if isinstance(value, type)
    ]
    allowed: list[Any] = [
        k
        for k in kinds
        if is_dataclass(k) and k.__module__ in modules and not issubclass(k, Kernel)
    ]
    with LOCK, torch.serialization.safe_globals(allowed):  # a list of the whole process
        saved = torch.load(io.BytesIO(content), weights_only=True)
    fields = saved["at"]
    generator = torch.Generator(fields["state"].z.device)
    generator.set_state(fields["generator"])
    return {**fields, "state": replace(fields["state"], generator=generator)}, saved[
        "energies"
    ]


def require_storable(fields: Mapping[str, Any], kernel: Kernel) -> None:
    """Raise ``TypeError`` if a store can't keep the kernel's state."""
    try:
        unpack(pack(fields, fields["state"].energy), kernel)
    except (AttributeError, TypeError, pickle.PickleError) as error:
        reason = str(error).splitlines()[0]
        raise TypeError(
            f"the kernel's state holds what a store can't keep: {reason}; see State"
        ) from error


# hashes of data and code --------------------------------------------------------------


def as_json(**parts: Any) -> dict[str, Any]:
    """Convert values to JSON; those that JSON can't represent are replaced by their
    hash.
    """
    return json.loads(
        json.dumps(
            parts, default=lambda value: f"{type(value).__name__} {digest(value)}"
        )
    )


def differences(stored: Any, current: Any, name: str = "") -> list[str]:
    """List the differences between a stored and a current fingerprint.

    :param name: of the entry that is compared.
    """
    if isinstance(stored, dict) and isinstance(current, dict):
        keys = sorted(stored.keys() | current.keys())
        return [
            line
            for k in keys
            for line in differences(
                stored.get(k), current.get(k), f"{name}.{k}".lstrip(".")
            )
        ]
    return [] if stored == current else [f"{name}: {stored!r} there, {current!r} here"]


def digest(value: Any) -> str:
    """Return the hash of a value, in hexadecimal."""
    return _digest(value, {}).hex()


def _digest(value: Any, seen: dict[int, tuple[bytes, Any]]) -> bytes:
    """Hash a value. ``seen`` maps ids to hashes, placeholders within cycles, and to the
    objects, so that they live.
    """
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return _hash(
            type(value).__name__,
            value if isinstance(value, bytes) else repr(value).encode(),
        )
    if isinstance(value, Tensor):
        dense = value if value.layout == torch.strided else value.to_dense()
        return _hash(
            "tensor",
            f"{dense.dtype} {tuple(dense.shape)}".encode(),
            raw_bytes(dense).numpy().data,
        )
    if isinstance(value, NAMED) or _is_of_library(value):
        return _hash("name", getattr(value, "__qualname__", str(value)).encode())
    if id(value) not in seen:
        seen[id(value)] = b"itself", value
        kind, parts = _parts(value)
        hashes = [_digest(part, seen) for part in parts]
        seen[id(value)] = (
            _hash(kind, *(sorted(hashes) if kind == "set" else hashes)),
            value,
        )
    return seen[id(value)][0]


def _parts(value: Any) -> tuple[str, list[Any]]:
    """Split a value into its kind and its parts; the parts of a ``"set"`` have no
    order.
    """
    if isinstance(value, Mapping):
        return "set", ["dict", *value.items()]
    if isinstance(value, list | tuple):
        return "list", list(value)
    if isinstance(value, set | frozenset):
        return "set", list(value)
    if isinstance(value, nn.Module):
        public = {
            n: part
            for n, part in vars(value).items()
            if not n.startswith("_") or n == "_pyro_samples"
        }
        tensors = [
            dict(value.named_parameters(recurse=False)),
            dict(value.named_buffers(recurse=False)),
        ]
        return "module", [type(value), public, *tensors, dict(value.named_children())]
    if isinstance(value, types.FunctionType):
        names = (
            _globals_of(value.__code__)
            if not _is_installed(value.__code__.co_filename)
            else set()
        )
        read = [
            value.__globals__[name] for name in sorted(names & value.__globals__.keys())
        ]
        cells = [
            cell.cell_contents
            for cell in value.__closure__ or ()
            if cell != types.CellType()
        ]
        return "function", [
            value.__code__,
            value.__defaults__,
            value.__kwdefaults__,
            cells,
            read,
        ]
    if isinstance(value, property | staticmethod | classmethod):
        return "wrapped", [
            value.fget if isinstance(value, property) else value.__func__
        ]
    if isinstance(value, types.CodeType):
        return "code", [value.co_code, list(value.co_consts), value.co_names]
    if isinstance(value, type):
        methods = [part for part in vars(value).values() if isinstance(part, METHODS)]
        return "class", [value.__qualname__, value.__bases__, methods]
    return "object", [type(value), *_pickled(value)]


def _pickled(value: Any) -> list[Any]:
    """Return the parts of an object that pickle would keep, without cached properties;
    none if it can't be pickled.
    """
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # a class may refuse with any exception
        return []
    make, arguments, state, *items = (
        (*reduced, None) if isinstance(reduced, tuple) else (reduced, (), None)
    )
    # a cached property is stored under the name of its descriptor in the class
    if isinstance(state, dict):
        state = {
            n: p
            for n, p in state.items()
            if not hasattr(getattr(type(value), str(n), None), "__get__")
        }
    return [
        make,
        arguments,
        state,
        *(None if part is None else list(part) for part in items),
    ]


def _is_of_library(value: Any) -> bool:
    """Return whether a value is a class or function of an installed library or of
    Python itself.
    """
    if isinstance(value, types.FunctionType):
        return not value.__closure__ and _is_installed(value.__code__.co_filename)
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
        return value.__module__ != "__main__" and _is_installed(
            getattr(module, "__file__", None) or "<frozen>"
        )
    return False


def _is_installed(file: str) -> bool:
    return file.startswith("<frozen") or any(
        Path(file).is_relative_to(folder) for folder in LIBRARIES
    )


def _globals_of(code: types.CodeType) -> set[str]:
    """Collect the names of the globals that code reads, nested functions included."""
    nested = [
        _globals_of(part) for part in code.co_consts if isinstance(part, types.CodeType)
    ]
    return {
        str(op.argval)
        for op in dis.get_instructions(code)
        if op.opname == "LOAD_GLOBAL"
    }.union(*nested)


def _hash(tag: str, *parts: Any) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in (tag.encode(), *parts):
        state.update(memoryview(part).nbytes.to_bytes(8, "little"))
        state.update(part)
    return state.digest()
