"""All that decides a computation, as one JSON value: two of them are the same, or it can be said in words what differs.

A fingerprint holds settings as they are and data by their hash. What the hash (:func:`digest`) sees:

* tensors, arrays, numbers, texts and containers of them by what they hold; lists and tuples count as the same, and so
  do dictionaries and sets in another order;
* networks by their modules, parameters, buffers and public attributes;
* functions by their code, defaults and closures, not by their names or by the globals that they read;
* other objects by the name of their class and what pickle would keep of them, without what they have only cached;
* classes, built-in functions and modules by name; what can't be pickled (open files, locks, generators) by its class.

:func:`digest_of_code` follows what a model refers to: the globals that its functions read, helpers, classes.

Both are the same in every process. Every part is hashed by itself, with a tag and its length, so that no two structures
run together.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import json
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
PROTOCOL = 4  # of pickle
LIBRARIES = {*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), str(Path(__file__).parent)}


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
        parts = (differences(found.get(k), now.get(k), f"{name}.{k}".lstrip(".")) for k in keys)
        return [line for part in parts for line in part]
    if found == now:
        return []
    return [f"{name}: their hash is another" if _is_hash(now) else f"{name}: {found!r} there, {now!r} here"]


def digest(value: Any) -> str:
    """The hash, in hexadecimal."""
    return _digest(value, ()).hex()


def digest_of_code(model: Any) -> str:
    """The hash of a model's code and of all that it refers to: closures, the globals that its functions read, and these
    ones' own. Code of installed libraries counts by its name; another version of Python writes other code."""
    queue, met, parts = [model], set[int](), list[str]()
    while queue:
        value = queue.pop(0)
        if id(value) not in met and not _is_of_library(value):
            met.add(id(value))
            parts.append(digest(value))
            queue += _referred(value)
    return digest(parts)


# small steps --------------------------------------------------------------------------------------------------------


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


def _referred(value: Any) -> list[Any]:
    """List the parts of a model, and the values that it reads from outside."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        if _is_installed(value.__code__.co_filename):  # a wrapper
            return cells
        names = sorted(_globals_of(value.__code__) & value.__globals__.keys())
        return [*cells, *(value.__globals__[name] for name in names)]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, property):
        return [value.fget]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, type):
        kinds = types.FunctionType | property | staticmethod | classmethod
        return [*value.__bases__, *(part for part in vars(value).values() if isinstance(part, kinds))]
    if isinstance(value, Mapping | list | tuple):
        return list(value.values() if isinstance(value, Mapping) else value)
    if isinstance(value, nn.Module):
        return [type(value), *value.children(), *vars(value).get("_pyro_samples", {}).values()]
    return [type(value), *([] if _is_of_library(type(value)) else getattr(value, "__dict__", {}).values())]


def _globals_of(code: types.CodeType) -> set[str]:
    """The names of globals that code reads, with that of functions inside."""
    inner = [_globals_of(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return {str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}.union(*inner)


def _is_hash(value: Any) -> bool:
    """True if it is a hash, with the name of a type in front of it or not."""
    digits = value.rpartition(" ")[2] if isinstance(value, str) else ""
    return len(digits) == 2 * HASH_BYTES and set(digits) <= set("0123456789abcdef")


def _digest(value: Any, above: tuple[int, ...]) -> bytes:
    """:param above: ids of the values that this one is a part of."""
    if value is None or type(value) in (bool, int, float, complex):
        return _hash(type(value).__name__, repr(value).encode())
    if isinstance(value, str | bytes):
        return _hash("str" if isinstance(value, str) else "bytes", _encoded(value))
    if isinstance(value, Tensor):
        return _digest_tensor(value)
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return _hash("array", repr((value.dtype, value.shape)).encode(), flat.data)
    if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType | torch.dtype | torch.device):
        return _hash("name", getattr(value, "__qualname__", str(value)).encode())
    if id(value) in above:
        return _hash("above", str(len(above) - above.index(id(value))).encode())
    try:
        return _digest_of_parts(value, (*above, id(value)))
    except RecursionError:
        return _hash("deep", type(value).__qualname__.encode())


def _digest_of_parts(value: Any, above: tuple[int, ...]) -> bytes:
    if isinstance(value, Mapping):
        return _hash("dict", *sorted(_digest(key, above) + _digest(part, above) for key, part in value.items()))
    if isinstance(value, list | tuple):
        return _hash("list", *(_digest(part, above) for part in value))
    if isinstance(value, set | frozenset):
        return _hash("set", *sorted(_digest(part, above) for part in value))
    if isinstance(value, nn.Module):
        public = {name: part for name, part in vars(value).items() if not name.startswith("_")}
        held = [dict(value.named_parameters(recurse=False)), dict(value.named_buffers(recurse=False))]
        return _hash("module", _digest([type(value), public, *held, dict(value.named_children())], above))
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
        return _hash("function", _digest(parts, above))
    if isinstance(value, types.MethodType):
        return _hash("method", _digest([value.__func__, value.__self__], above))
    if isinstance(value, types.CodeType):
        return _hash("code", value.co_code, _digest([list(value.co_consts), value.co_names], above))
    return _hash("object", _digest([type(value), _pickled(value)], above))


def _pickled(value: Any) -> Any:
    """The parts of an object that pickle would keep; ``None`` if it can't."""
    if isinstance(value, np.ndarray):  # of objects
        return [value.shape, value.reshape(-1).tolist()]
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


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _digest_tensor(value: Tensor) -> bytes:
    if value.layout != torch.strided:
        value = value.to_dense()
    about = f"{value.dtype} {tuple(value.shape)}".encode()
    return _hash("tensor", about, b"" if value.is_meta else raw_bytes(value).numpy().data)


def _encoded(value: str | bytes) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value


def _hash(tag: str, *parts: Any) -> bytes:
    state = hashlib.blake2b(digest_size=HASH_BYTES)
    for part in (tag.encode(), *parts):
        state.update(memoryview(part).nbytes.to_bytes(8, "little"))
        state.update(part)
    return state.digest()
