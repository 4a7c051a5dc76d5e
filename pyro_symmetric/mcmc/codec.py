"""States as JSON and tensors, and back to the last bit.

A :class:`~pyro_symmetric.mcmc.kernel.State` is a tree of frozen dataclasses whose leaves are tensors, numbers, strings,
devices and dtypes. :func:`encode` takes it apart; :func:`decode` rebuilds it, from known dataclasses only: those of the
modules of :mod:`pyro_symmetric.mcmc` that define states, and those that the kernel's own modules define. Nothing is
imported for a file, and nothing in it can run other code.

Floats travel in hexadecimal. Tensors keep their strides, since the order in which a sum runs through memory decides
how it is rounded.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernel import Kernel
from pyro_symmetric.storage import StoreError, dtype_of

ROOM = __name__.rpartition(".")[0]
STATES = frozenset(  # modules that define parts of states
    f"{ROOM}.{name}"
    for name in (
        "adaptation",
        "batches",
        "chees",
        "kernel",
        "landscape",
        "mass",
        "psgld",
        "stochastic",
        "warmup",
    )
)


def encode(tree: Any, tensors: dict[str, Tensor], modules: Collection[str] = ()) -> Any:
    """What JSON can hold of ``tree``; its tensors go into ``tensors``.

    :param modules: whose dataclasses are trusted, beside those of states of :mod:`pyro_symmetric.mcmc`.
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
        if _trusted(kind.__module__, kind.__qualname__, modules) is None:
            raise TypeError(
                f"the dataclass {kind.__module__}.{kind.__qualname__} in a kernel's state is neither one of {ROOM} nor "
                "defined at the top of the kernel's module, so a store can't keep it"
            )
        parts = {f.name: encode(getattr(tree, f.name), tensors, modules) for f in fields(tree) if f.init}
        return {"class": [kind.__module__, kind.__qualname__], "fields": parts}
    raise TypeError(f"a kernel's state holds a {type(tree).__name__}, which a store can't keep; see State")


def decode(tree: Any, tensors: Mapping[str, Tensor], device: torch.device, modules: Collection[str] = ()) -> Any:
    """What :func:`encode` was given.

    :param device: of the run; tensors that were on the CPU stay there.
    :raises StoreError: if the tree isn't one that :func:`encode` made, or of another version of the dataclasses.
    """
    try:
        return _decoded(tree, tensors, device, modules)
    except StoreError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StoreError(f"a stored state is damaged: {error!r}") from error


# small steps --------------------------------------------------------------------------------------------------------


def _decoded(tree: Any, tensors: Mapping[str, Tensor], device: torch.device, modules: Collection[str]) -> Any:
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
            return dtype_of(name)
        case {"size": sizes}:
            return torch.Size(sizes)
        case {"tuple": parts}:
            return tuple(_decoded(part, tensors, device, modules) for part in parts)
        case {"list": parts}:
            return [_decoded(part, tensors, device, modules) for part in parts]
        case {"dict": parts}:
            return {key: _decoded(part, tensors, device, modules) for key, part in parts.items()}
        case {"class": [module, name], "fields": parts}:
            kind = _trusted(module, name, modules)
            if kind is None:
                raise StoreError(f"the stored state needs {module}.{name}, which is no part of this kernel's states")
            if set(parts) != {f.name for f in fields(kind) if f.init}:
                raise StoreError(f"the stored {name} has the fields {sorted(parts)}; this version has others")
            return kind(**{key: _decoded(part, tensors, device, modules) for key, part in parts.items()})
    raise StoreError(f"a stored state is damaged: it holds {sorted(tree)}")


def _trusted(module: Any, name: Any, modules: Collection[str]) -> Any:
    """The dataclass of that name, or ``None`` if it isn't one that a state may hold."""
    if not isinstance(name, str) or (module not in STATES and module not in modules):
        return None
    kind: Any = sys.modules.get(module)
    for part in name.split("."):
        kind = getattr(kind, "__dict__", {}).get(part)
    if not isinstance(kind, type) or issubclass(kind, Kernel) or not is_dataclass(kind):
        return None
    return kind if (kind.__module__, kind.__qualname__) == (module, name) else None


def _laid_out(value: Tensor, stride: list[int], device: torch.device) -> Tensor:
    """A copy with these strides; axes of stride 0 are expanded again, as they were."""
    narrow = value
    for axis, step in enumerate(stride):
        if step == 0 and value.shape[axis] > 1:
            narrow = narrow.narrow(axis, 0, 1)
    result = torch.empty_strided(narrow.shape, stride, dtype=value.dtype, device=device)
    return result.copy_(narrow).expand(value.shape)
