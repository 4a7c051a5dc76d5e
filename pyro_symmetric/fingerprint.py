"""All that decides a computation, as one JSON value: two of them are the same, or it can be said in words what differs.

A fingerprint holds settings as they are, and data and code by a hash (:func:`digest`), which is the same in every
process. The hash sees tensors, arrays, numbers, texts and containers by what they hold (lists and tuples are alike, and
dictionaries in any order); networks by their modules, parameters, buffers and public attributes; functions by their
code, constants, defaults, closures and the globals that they read; classes by their bases and methods; other objects by
their class and what pickle would keep. Functions and classes of installed libraries count by their names.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import json
import re
import sys
import sysconfig
import types
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyro_symmetric.storage import raw_bytes

HASH_BYTES = 16
HASH = re.compile(f"(^| )[0-9a-f]{{{2 * HASH_BYTES}}}$")
PROTOCOL = 4  # of pickle
LIBRARIES = {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parent)}
METHODS = types.FunctionType | property | staticmethod | classmethod
CONTAINERS = Mapping | list | tuple | set | frozenset
NAMED = types.BuiltinFunctionType | types.ModuleType | torch.dtype | torch.device


def _own_version() -> str:
    try:
        return version("pyro-symmetric")
    except PackageNotFoundError:  # a source tree that isn't installed
        return "unknown"


VERSIONS = {"pyro_symmetric": _own_version(), "torch": torch.__version__, "pyro": version("pyro-ppl")}


def as_json(**parts: Any) -> dict[str, Any]:
    """These parts as JSON; what JSON can't hold goes in by its hash."""
    return json.loads(json.dumps(parts, default=lambda value: f"{type(value).__name__} {digest(value)}"))


def differences(found: Any, now: Any, name: str = "") -> list[str]:
    """The differences between two fingerprints, in words.

    :param found: the one that was stored.
    :param now: that of the call.
    :param name: of what is compared.
    """
    if isinstance(found, dict) and isinstance(now, dict):
        keys = sorted(found.keys() | now.keys())
        return [line for k in keys for line in differences(found.get(k), now.get(k), f"{name}.{k}".lstrip("."))]
    told = "their hash is another" if HASH.search(str(now)) else f"{found!r} there, {now!r} here"
    return [] if found == now else [f"{name}: {told}"]


def digest(value: Any) -> str:
    """The hash, in hexadecimal."""
    return _digest(value, {}).hex()


# small steps --------------------------------------------------------------------------------------------------------


def _digest(value: Any, met: dict[int, tuple[int, Any]]) -> bytes:
    """:param met: functions, classes and objects so far, which count by their number when they are met again."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return _hash(type(value).__name__, value if isinstance(value, bytes) else repr(value).encode())
    if isinstance(value, Tensor):
        value = value if value.layout == torch.strided else value.to_dense()
        about = f"{value.dtype} {tuple(value.shape)}".encode()
        return _hash("tensor", about, b"" if value.is_meta else raw_bytes(value).numpy().data)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return _hash("array", repr((value.dtype, value.shape)).encode(), flat.data)
    if isinstance(value, NAMED) or _is_of_library(value):
        return _hash("name", getattr(value, "__qualname__", str(value)).encode())
    if id(value) in met:
        return _hash("met", str(met[id(value)][0]).encode())
    met[id(value)] = len(met), value
    try:
        kind, parts = _parts(value)
        found = [_digest(part, met) for part in parts]
    except RecursionError:
        return _hash("deep", type(value).__qualname__.encode())
    if isinstance(value, CONTAINERS):  # which are the same as others that hold the same
        del met[id(value)]
    return _hash(kind, *(sorted(found) if kind in ("dict", "set") else found))


def _parts(value: Any) -> tuple[str, list[Any]]:
    """The kind of a value, and its parts."""
    if isinstance(value, Mapping):
        return "dict", [list(pair) for pair in value.items()]
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
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return "function", [value.__code__, value.__defaults__, value.__kwdefaults__, cells, read]
    if isinstance(value, types.MethodType):
        return "method", [value.__func__, value.__self__]
    if isinstance(value, property | staticmethod | classmethod):
        return "wrapped", [value.fget if isinstance(value, property) else value.__func__]
    if isinstance(value, types.CodeType):
        return "code", [value.co_code, list(value.co_consts), value.co_names]
    if isinstance(value, type):
        methods = [part for part in vars(value).values() if isinstance(part, METHODS)]
        return "class", [value.__qualname__, value.__bases__, methods]
    if isinstance(value, np.ndarray):  # of objects
        return "array", [value.shape, value.reshape(-1).tolist()]
    return "object", [type(value), _pickled(value)]


def _pickled(value: Any) -> Any:
    """The parts of an object that pickle would keep, but for cached ones; ``None`` if it can't."""
    try:
        reduced = value.__reduce_ex__(PROTOCOL)
    except Exception:  # whatever a class raises that refuses it
        return None
    if isinstance(reduced, str):
        return reduced
    make, arguments, state, items, pairs = (*reduced, None, None, None, None)[:5]
    if isinstance(state, dict):
        state = {name: part for name, part in state.items() if not _is_cache(type(value), name)}
    return [make, arguments, state, list(items or ()), list(pairs or ())]


def _is_cache(kind: type, name: Any) -> bool:
    """True if an object's attribute only keeps what a ``cached_property`` has computed."""
    found = inspect.getattr_static(kind, name, None) if isinstance(name, str) else None
    return hasattr(found, "__get__") and not hasattr(found, "__set__") and not callable(found)


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


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _hash(tag: str, *parts: Any) -> bytes:
    state = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (tag.encode(), *parts):
        state.update(memoryview(part).nbytes.to_bytes(8, "little"))
        state.update(part)
    return state.digest()
