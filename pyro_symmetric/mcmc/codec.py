"""States as JSON and tensors, and back to the last bit.

A :class:`~pyro_symmetric.mcmc.kernel.State` is a tree of frozen dataclasses whose leaves are tensors, numbers, strings,
devices and dtypes. :func:`encode` takes it apart; :func:`decode` rebuilds it, from dataclasses of trusted modules only:
those of :mod:`pyro_symmetric.mcmc`, and those that the caller names. Nothing in a file can run code.

Floats travel in hexadecimal. Tensors keep their strides, since the order in which a sum runs through memory decides
how it is rounded.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.storage import StoreError

ROOM = __name__.rpartition(".")[0]


def encode(tree: Any, tensors: dict[str, Tensor], modules: Collection[str] = ()) -> Any:
    """What JSON can hold of ``tree``; its tensors go into ``tensors``.

    :param modules: whose dataclasses are trusted, beside those of :mod:`pyro_symmetric.mcmc`.
    :raises TypeError: for a leaf of another type, or a dataclass of another module.
    """
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return {"float": tree.hex()}
    if isinstance(tree, Tensor):
        name = str(len(tensors))
        tensors[name] = tree.detach()
        return {"tensor": name, "stride": list(tree.stride()), "host": tree.device.type == "cpu"}
    if isinstance(tree, torch.device):
        return {"device": "cpu" if tree.type == "cpu" else "run"}
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, torch.Size):
        return {"size": list(tree)}
    if type(tree) is tuple or type(tree) is list:
        return {type(tree).__name__: [encode(part, tensors, modules) for part in tree]}
    if isinstance(tree, Mapping) and all(isinstance(key, str) for key in tree):
        return {"dict": {key: encode(part, tensors, modules) for key, part in tree.items()}}
    if is_dataclass(tree) and not isinstance(tree, type):
        kind = type(tree)
        _require_trusted(kind.__module__, kind.__qualname__, modules)
        parts = {f.name: encode(getattr(tree, f.name), tensors, modules) for f in fields(tree) if f.init}
        return {"class": [kind.__module__, kind.__qualname__], "fields": parts}
    raise TypeError(f"a kernel's state holds a {type(tree).__name__}, which a store can't keep; see State")


def decode(tree: Any, tensors: Mapping[str, Tensor], device: torch.device, modules: Collection[str] = ()) -> Any:
    """What :func:`encode` was given.

    :param device: of the run; tensors that were on the CPU stay there.
    :raises StoreError: if the tree isn't one that :func:`encode` made, or of another version of the dataclasses.
    """
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"float": text}:
            return float.fromhex(text)
        case {"tensor": name, "stride": stride, "host": host}:
            return _laid_out(tensors[name], stride, torch.device("cpu") if host else device)
        case {"device": place}:
            return torch.device("cpu") if place == "cpu" else device
        case {"dtype": name}:
            return getattr(torch, name)
        case {"size": sizes}:
            return torch.Size(sizes)
        case {"tuple": parts}:
            return tuple(decode(part, tensors, device, modules) for part in parts)
        case {"list": parts}:
            return [decode(part, tensors, device, modules) for part in parts]
        case {"dict": parts}:
            return {key: decode(part, tensors, device, modules) for key, part in parts.items()}
        case {"class": [module, name], "fields": parts}:
            kind = _trusted_class(module, name, modules)
            if set(parts) != {f.name for f in fields(kind) if f.init}:
                raise StoreError(f"the stored {name} has the fields {sorted(parts)}; this version has others")
            return kind(**{key: decode(part, tensors, device, modules) for key, part in parts.items()})
    raise StoreError(f"a stored state is damaged: it holds {sorted(tree)}")


# small steps --------------------------------------------------------------------------------------------------------


def _require_trusted(module: str, name: str, modules: Collection[str]) -> None:
    if not (module.startswith(f"{ROOM}.") or module in modules):
        raise TypeError(
            f"the dataclass {module}.{name} in a kernel's state is neither of {ROOM} nor of the kernel's module"
        )


def _trusted_class(module: str, name: str, modules: Collection[str]) -> Any:
    _require_trusted(module, name, modules)
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise StoreError(f"the stored state needs the dataclass {module}.{name}, which this version doesn't have")
    return kind


def _laid_out(value: Tensor, stride: list[int], device: torch.device) -> Tensor:
    """A copy with these strides; axes of stride 0 are expanded again, as they were."""
    narrow = value
    for axis, step in enumerate(stride):
        if step == 0 and value.shape[axis] > 1:
            narrow = narrow.narrow(axis, 0, 1)
    result = torch.empty_strided(narrow.shape, stride, dtype=value.dtype, device=device)
    return result.copy_(narrow).expand(value.shape)
