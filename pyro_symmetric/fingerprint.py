"""All that decides a computation, as one JSON value: two of them are the same, or it can be said in words what differs.

A fingerprint holds settings as they are, and data and code by a hash (:func:`digest`), which is the same in every
process. The hash sees tensors, numbers, texts and containers by what they hold (lists and tuples are alike, and
dictionaries in any order); networks by their modules, parameters, buffers and public attributes; functions by their
code, constants, defaults, closures and the globals that they read; classes by their bases and methods; other objects by
their class and what pickle would keep. Functions and classes of installed libraries count by their names.
"""

from __future__ import annotations

import dis
import hashlib
import json
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_symmetric._version import __version__
from pyro_symmetric.storage import raw_bytes

VERSIONS = {"pyro_symmetric": __version__, "torch": torch.__version__, "pyro": pyro.__version__}
LIBRARIES = {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parent)}
METHODS = types.FunctionType | property | staticmethod | classmethod
NAMED = types.BuiltinFunctionType | types.ModuleType | torch.dtype | torch.device


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


# small steps --------------------------------------------------------------------------------------------------------


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
