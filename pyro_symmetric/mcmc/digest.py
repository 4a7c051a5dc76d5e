"""Hashes of data and code, the same in every process.

A value counts by its contents: tensors and arrays by their numbers; lists, which equal
tuples; dictionaries and sets, which have no order; modules of networks by their
parameters, buffers, children, hooks and attributes, private ones included; other
objects by their class and the state that pickle would keep.

A function counts by its instructions, without comments, line numbers and docstrings, by
its defaults, closure and attributes, and by what it reads: globals, imports within it,
and environment variables. A class counts by its bases and attributes. Of a module that
code reads, those attributes count whose names occur in any code that was met.

Installed libraries count by name. What can't be seen: files that a model reads, names
that it computes, the arguments of the process, and the state of libraries.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pyro_symmetric.arguments import Entries
from pyro_symmetric.store import raw_bytes

LIBRARIES = {
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
}
PLAIN = (bool, int, float, complex, str, bytes)
NAMED = types.BuiltinFunctionType | torch.dtype | torch.device
METHODS = types.FunctionType | property | staticmethod | classmethod
OWNERS = Tensor | np.ndarray | list | dict | set | str  # whose methods read them
PLAIN_MAPPINGS = (dict, collections.OrderedDict, types.MappingProxyType)
# what every network module has; its parameters, buffers, children and hooks are
# hashed by their contents
BOOKKEEPING = vars(nn.Module()).keys() - {"training"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
CACHES = {"_pyro_context"}  # of PyroModule: values of the last call
HEAP_TYPE = 1 << 9  # Python's flag of classes that aren't written in C
SILENT = {"NOP", "CACHE", "EXTENDED_ARG", "RESUME"}  # instructions without an effect
READING_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
READING_ENVIRONMENT = {"environ", "getenv"}
IMPORTING = {"import_module", "__import__", "modules"}
BY_STRING = {"globals", "vars", "eval", "exec"}  # calls that read globals by a string


def digest(value: Any) -> str:
    """Return the hash of a value, in hexadecimal."""
    return _Hasher().digest(value).hex()


def complete_digest(value: Any) -> str | None:
    """Return the hash of a value; ``None`` if its code imports what isn't loaded."""
    hasher = _Hasher()
    content = hasher.digest(value)
    return None if hasher.misses_imports else content.hex()


def is_installed(value: Any) -> bool:
    """Return whether a class, function or module belongs to an installed library or to
    Python itself.
    """
    if isinstance(value, types.FunctionType):
        return not value.__closure__ and _is_installed(value.__code__.co_filename)
    if isinstance(value, types.ModuleType):
        return _is_installed_module(value)
    if isinstance(value, type):
        return all(_is_installed_class(base) for base in value.__mro__)
    return False


class _Code(NamedTuple):
    """Names and strings in code, nested functions and classes included."""

    globals: set[str]  # names that it reads as globals
    names: set[str]  # globals, attributes and imports
    strings: set[str]
    imports: set[tuple[str, int]]  # name and level


class _Hasher:
    """The hash of one value and of all that it leads to."""

    def __init__(self) -> None:
        # by id: the hash, a placeholder within cycles; and the object, so that it lives
        self.seen: dict[int, tuple[bytes, Any]] = {}
        self.modules: dict[
            str, types.ModuleType
        ] = {}  # of the user, that code may read
        self.names = {"__getattr__"}  # that occur in the code met so far
        self.misses_imports = False

    def digest(self, value: Any) -> bytes:
        """Hash a value together with what its code reads from modules."""
        content = self.hash(value)
        attributes = self._module_attributes()
        if not attributes:
            return content
        parts = [
            _hash("attribute", f"{module}.{name}".encode(), part)
            for (module, name), part in attributes.items()
        ]
        return _hash("with modules", content, *sorted(parts))

    def hash(self, value: Any) -> bytes:
        """Hash a value; modules count by name."""
        if value is None or type(value) in PLAIN:
            content = value if isinstance(value, bytes) else repr(value).encode()
            return _hash(type(value).__name__, content)
        if isinstance(value, Tensor):
            return _tensor_hash(value)
        if isinstance(value, types.ModuleType):
            return self._module_hash(value)
        value = _not_compiled(value)
        if value is os.environ:
            return _hash("environment")
        if isinstance(value, NAMED) or is_installed(value):
            return self._name_hash(value)
        if id(value) not in self.seen:
            self.seen[id(value)] = b"itself", value
            kind, parts = self._parts(value)
            hashes = [self.hash(part) for part in parts]
            if kind == "set":
                hashes.sort()
            self.seen[id(value)] = _hash(kind, *hashes), value
        return self.seen[id(value)][0]

    def _module_attributes(self) -> dict[tuple[str, str], bytes]:
        """Hash the attributes of modules that code may read, by module and name.

        They may lead to other code and modules, hence the repetition.
        """
        attributes: dict[tuple[str, str], bytes] = {}
        while True:
            pending = [
                (module, name)
                for module in sorted(self.modules)
                for name in sorted(self.names & vars(self.modules[module]).keys())
                if (module, name) not in attributes
            ]
            if not pending:
                return attributes
            for module, name in pending:
                value = vars(self.modules[module])[name]
                attributes[module, name] = self.hash(value)

    def _module_hash(self, module: types.ModuleType) -> bytes:
        if is_installed(module):
            return _hash("name", module.__name__.encode())
        name = module.__name__.rpartition(".")[2]  # a package may have been moved
        if self.modules.get(name, module) is not module:
            name = module.__name__
        self.modules[name] = module
        return _hash("name", name.encode())

    def _name_hash(self, value: Any) -> bytes:
        content = _hash("name", getattr(value, "__qualname__", str(value)).encode())
        owner = getattr(value, "__self__", None)
        if isinstance(owner, OWNERS):
            return _hash("method", content, self.hash(owner))
        return content

    # parts ----------------------------------------------------------------------------

    def _parts(self, value: Any) -> tuple[str, list[Any]]:
        """Split a value into its kind and its parts; the parts of a ``"set"`` have no
        order.
        """
        if isinstance(value, Mapping):
            return "set", [
                "dict",
                *value.items(),
                *_beside_items(value, PLAIN_MAPPINGS),
            ]
        if isinstance(value, list | tuple):
            return "list", [*value, *_beside_items(value, (list, tuple, torch.Size))]
        if isinstance(value, set | frozenset):
            return "set", [*value, *_beside_items(value, (set, frozenset))]
        if isinstance(value, nn.Module):
            return "module", _module_parts(value)
        if isinstance(value, types.FunctionType):
            return "function", self._function_parts(value)
        if isinstance(value, property):
            return "wrapped", [value.fget]
        if isinstance(value, staticmethod | classmethod):
            return "wrapped", [value.__func__]
        if isinstance(value, types.CodeType):
            return "code", list(_instructions(value))
        if isinstance(value, type):
            return "class", _class_parts(value)
        return "object", [type(value), *_pickled(value)]

    def _function_parts(self, function: types.FunctionType) -> list[Any]:
        code = function.__code__
        cells = [
            cell.cell_contents
            for cell in function.__closure__ or ()
            if cell != types.CellType()
        ]
        parts = [code, function.__defaults__, function.__kwdefaults__, cells]
        if _is_installed(code.co_filename):
            return parts
        mentioned = _mentioned(code)
        self.names |= mentioned.names | mentioned.strings
        read = _globals_read(function, mentioned)
        inputs = [*read.values(), *cells, *(function.__defaults__ or ())]
        return [
            *parts,
            list(read.values()),
            self._imported(function, mentioned),
            _environment(mentioned, inputs),
            vars(function),
        ]

    def _imported(
        self, function: types.FunctionType, mentioned: _Code
    ) -> list[types.ModuleType]:
        """Return the modules of the user that a function imports."""
        package = function.__globals__.get("__package__") or ""
        names = {_absolute(name, level, package) for name, level in mentioned.imports}
        self.misses_imports |= not names <= sys.modules.keys()
        if mentioned.names & IMPORTING:
            names |= mentioned.strings
            self.misses_imports = True  # which of the strings are modules isn't known
        modules = [sys.modules[name] for name in sorted(names & sys.modules.keys())]
        return [module for module in modules if not is_installed(module)]


def _hash(tag: str, *parts: Any) -> bytes:
    state = hashlib.blake2b(digest_size=16)
    for part in (tag.encode(), *parts):
        state.update(memoryview(part).nbytes.to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def _tensor_hash(value: Tensor) -> bytes:
    """Hash a tensor's dtype, shape and numbers; of one that a transformation of
    PyTorch's left behind, its type only.
    """
    if torch._C._functorch.is_functorch_wrapped_tensor(value) or value.is_meta:
        return _hash("tensor without numbers")
    dense = value if value.layout == torch.strided else value.to_dense()
    header = f"{dense.dtype} {tuple(dense.shape)}".encode()
    return _hash("tensor", header, raw_bytes(dense).numpy().data)


def _not_compiled(value: Any) -> Any:
    """Return the function or module that :func:`torch.compile` was given."""
    if isinstance(value, types.FunctionType):
        return vars(value).get("_torchdynamo_orig_callable", value)
    if isinstance(value, nn.Module):
        return value._modules.get("_orig_mod", value)
    return value


# objects and classes ------------------------------------------------------------------


def _beside_items(value: Any, plain: tuple[type, ...]) -> list[Any]:
    """Return the class, attributes and default of a container; nothing if there is
    nothing besides its items.
    """
    kind = type(value)
    if kind in plain:
        return []
    attributes = getattr(value, "__dict__", {})
    default = getattr(value, "default_factory", None)
    if is_installed(kind) and not attributes and default is None:
        return []
    return [("class", kind), ("attributes", attributes), ("default", default)]


def _module_parts(module: nn.Module) -> list[Any]:
    """Return the parts of a module of a network."""
    attributes = {
        name: value
        for name, value in vars(module).items()
        if name == "_pyro_samples" or name not in BOOKKEEPING | CACHES
    }
    return [
        type(module),
        _without_cached(module, attributes),
        dict(module.named_parameters(recurse=False)),
        dict(module.named_buffers(recurse=False)),
        dict(module.named_children()),
        [list(vars(module)[hooks].values()) for hooks in HOOKS],
    ]


def _class_parts(kind: type) -> list[Any]:
    """Return the parts of a class: attributes and methods, and of a dataclass the
    defaults of its fields.
    """
    attributes = {}
    for name, value in vars(kind).items():
        dunder = name.startswith("__") and name.endswith("__")
        if name != "_abc_impl" and (not dunder or isinstance(value, METHODS)):
            attributes[name] = value
    fields = vars(kind).get("__dataclass_fields__", {}).values()
    defaults = {field.name: _field_default(field) for field in fields}
    return [kind.__qualname__, type(kind), kind.__bases__, attributes, defaults]


def _field_default(field: Any) -> Any:
    """Return the default of a dataclass's field, or the function that makes it."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return None


def _pickled(value: Any) -> list[Any]:
    """Return the parts of an object that pickle would keep, without cached properties;
    its attributes if it can't be pickled or only by its name.
    """
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # a class may refuse with any exception
        return [getattr(value, "__dict__", {})]
    if isinstance(reduced, str):
        return [reduced, getattr(value, "__dict__", {})]
    state = reduced[2] if len(reduced) > 2 else None
    if isinstance(state, dict):
        state = _without_cached(value, state)
    items = [None if part is None else list(part) for part in reduced[3:]]
    return [*reduced[:2], state, *items]


def _without_cached(value: Any, attributes: Mapping[Any, Any]) -> dict[Any, Any]:
    """Drop cached properties: each is stored under the name of its descriptor in the
    class.
    """
    return {
        name: part
        for name, part in attributes.items()
        if not hasattr(getattr(type(value), str(name), None), "__get__")
    }


# what belongs to libraries ------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    return file.startswith("<frozen") or any(
        Path(file).is_relative_to(folder) for folder in LIBRARIES
    )


def _is_installed_module(module: types.ModuleType) -> bool:
    if module.__name__ == "__main__":  # perhaps of a library that runs a script
        return False
    file = getattr(module, "__file__", None)
    if file is not None:
        return _is_installed(file)
    specification = getattr(module, "__spec__", None)
    return getattr(specification, "origin", None) in ("built-in", "frozen")


def _is_installed_class(kind: type) -> bool:
    """Return whether a class is defined in a module of a library.

    A class that a script defines may name a module that isn't there, or one of Python's
    that doesn't have it.
    """
    module = sys.modules.get(kind.__module__)
    if module is None or not _is_installed_module(module):
        return False
    is_written_in_python = bool(kind.__flags__ & HEAP_TYPE)
    if getattr(module, "__file__", None) is not None or not is_written_in_python:
        return True
    return hasattr(module, kind.__qualname__.partition(".")[0])


# code ---------------------------------------------------------------------------------


def _instructions(code: types.CodeType) -> Iterable[Any]:
    """Yield the instructions of code with the constants, names and places that they
    refer to, whatever its lines.
    """
    operations = [op for op in dis.get_instructions(code) if op.opname not in SILENT]
    offsets = [op.offset for op in operations]
    for op in operations:
        if op.opcode in dis.hasjrel or op.opcode in dis.hasjabs:
            yield op.opname, bisect.bisect_left(offsets, op.argval)
        elif op.opcode in dis.hasconst or op.opcode in dis.hasname:
            yield op.opname, op.argval
        else:
            yield op.opname, op.arg


def _mentioned(code: types.CodeType) -> _Code:
    """Collect what code mentions."""
    mentioned = _Code(set(), set(code.co_names), set(), set())
    operations = list(dis.get_instructions(code))
    for position, op in enumerate(operations):
        if op.opname in READING_GLOBALS:
            mentioned.globals.add(op.argval)
        elif op.opname == "IMPORT_NAME":
            level = operations[position - 2].argval
            mentioned.imports.add((op.argval, level))
    for constant in code.co_consts:
        if isinstance(constant, str):
            mentioned.strings.add(constant)
        elif isinstance(constant, types.CodeType):
            nested = _mentioned(constant)
            mentioned.globals.update(nested.globals)
            mentioned.names.update(nested.names)
            mentioned.strings.update(nested.strings)
            mentioned.imports.update(nested.imports)
    return mentioned


def _globals_read(function: types.FunctionType, mentioned: _Code) -> Entries:
    """Return the globals that a function reads, but for those that describe its module,
    such as ``__file__``.
    """
    names = set(mentioned.globals)
    if names & BY_STRING:
        names |= mentioned.strings
    return {
        name: function.__globals__[name]
        for name in sorted(names & function.__globals__.keys())
        if not (name.startswith("__") and name.endswith("__"))
    }


def _absolute(name: str, level: int, package: str) -> str:
    """Return the full name of an import; it is empty outside of any package."""
    if level == 0:
        return name
    try:
        return importlib.util.resolve_name("." * level + name, package)
    except ImportError:
        return ""


def _environment(mentioned: _Code, inputs: list[Any]) -> dict[str, str | None]:
    """Return the environment variables that a function may read: if it reads any, those
    whose names are strings in its code or inputs.
    """
    reads = any(value is os.environ or value is os.getenv for value in inputs)
    if not reads and not mentioned.names & READING_ENVIRONMENT:
        return {}
    names = set(mentioned.strings)
    names.update(value for value in inputs if isinstance(value, str))
    return {name: os.environ.get(name) for name in names}
