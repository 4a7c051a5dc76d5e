"""Checks of the arguments of public functions, in one sentence: the name, what was found, what would be right.

Each check raises ``TypeError`` for a wrong type and ``ValueError`` for a wrong value. They stand at entry points; what
lies behind trusts its arguments.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric.calls import described, did_you_mean
from pyro_symmetric.placement import as_tensor


def shown(value: Any) -> str:
    """One value in words: short ones as they are written, others by what they are."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str | Real | torch.dtype | torch.device) and len(repr(value)) < 80:
        return repr(value)
    return described(value)


def whole(name: str, value: Any, least: int | None = None, most: int | None = None, *, none: str = "") -> Any:
    """A whole number, as an ``int``; a bool or 1.0 is none.

    :param none: what ``None`` stands for; empty if it isn't allowed.
    """
    if value is None and none:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {shown(value)}; it must be a whole number{_or_none(none)}")
    return int(number(name, value, least=least, most=most, none=none))


def number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    none: str = "",
) -> Any:
    """A real number, not NaN, within bounds; ``below=math.inf`` asks for a finite one."""
    if value is None and none:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {shown(value)}; it must be a number{_or_none(none)}")
    bounds = {"at least": least, "more than": above, "at most": most, "less than": below}
    fits = {"at least": operator.ge, "more than": operator.gt, "at most": operator.le, "less than": operator.lt}
    asked = {words: bound for words, bound in bounds.items() if bound is not None}
    if math.isnan(value) or not all(fits[words](value, bound) for words, bound in asked.items()):
        wanted = " and ".join(f"{words} {bound}" for words, bound in asked.items()) or "a number, not NaN"
        raise ValueError(f"{name} is {value}; it must be {wanted}{_or_none(none)}")
    return value


positive = partial(number, above=0, below=math.inf)
"""A positive finite number."""

fraction = partial(number, above=0, below=1)
"""A number strictly between 0 and 1."""


def flag(name: str, value: Any) -> bool:
    """``True`` or ``False``."""
    return instance(name, value, bool, "True or False")


def one_of(name: str, value: Any, choices: Iterable[Any], besides: str = "") -> Any:
    """One of a few values.

    :param besides: what else is allowed, in words.
    """
    choices = list(choices)
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        hint = did_you_mean(value, (choice for choice in choices if isinstance(choice, str)))
        others = f" or {besides}" if besides else ""
        raise ValueError(f"{name} is {shown(value)}; it must be one of {choices}{others}{hint}")
    return value


def options(of: Callable[..., Any], given: Iterable[str], taker: Callable[..., Any]) -> None:
    """Keyword arguments that ``of`` passes on to ``taker``, which must know them.

    If ``taker`` passes on what it doesn't know, only names that are nearly one of ``of``'s own are refused.

    :raises TypeError: naming the first that isn't known, and the one that may be meant.
    """
    own, passed = (
        {p.name: p.kind for p in inspect.signature(f).parameters.values() if p.name != "self"} for f in (of, taker)
    )
    names = [name for name, kind in {**own, **passed}.items() if kind is not inspect.Parameter.VAR_KEYWORD]
    for name in given:
        hint = "" if name in passed else did_you_mean(name, names)
        if hint or (name not in passed and inspect.Parameter.VAR_KEYWORD not in passed.values()):
            through = "" if of is taker else f", nor has {taker.__name__}"
            raise TypeError(f"{of.__name__} has no argument {name!r}{through}{hint}")


def instance(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> Any:
    """An object of one of some classes.

    :param what: these classes, in words.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is {shown(value)}; it must be {what}{_held(name, value)}")
    return value


def function(name: str, value: Any, what: str, *, none: str = "") -> Any:
    """Something that can be called, and no class."""
    if value is None and none:
        return None
    if isinstance(value, type) or not callable(value):
        raise TypeError(f"{name} is {shown(value)}; it must be {what}{_or_none(none)}")
    return value


def tensor(name: str, value: Any) -> Tensor:
    """A tensor."""
    if not isinstance(value, Tensor):
        hint = f": torch.as_tensor({name})" if hasattr(value, "__array__") else ""
        raise TypeError(f"{name} is {shown(value)}; it must be a tensor{hint}")
    return value


def real(name: str, value: Any) -> Tensor:
    """A tensor of real numbers."""
    if tensor(name, value).is_complex():
        raise TypeError(f"{name} is of {value.dtype}; it must be real: torch.view_as_real gives both parts")
    return value


def numbers(name: str, value: Any) -> Tensor:
    """A tensor, or numbers or lists of them, or an array, as a tensor; Python's floats in float64."""
    try:
        found = as_tensor(value)
        typed = hasattr(value, "dtype") or not found.is_floating_point()
        return found if typed else as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} is {shown(value)}; it must hold numbers") from error


def weights(name: str, value: Any, besides: str = "") -> Mapping[str, Tensor]:
    """Weights: site -> tensor, at least one site.

    :param besides: what else the caller takes, in words.
    """
    if not isinstance(value, Mapping):
        kinds = f"weights (site -> tensor){f' or {besides}' if besides else ''}"
        raise TypeError(f"{name} is {shown(value)}; it must be {kinds}{_held(name, value)}")
    if not value:
        raise ValueError(f"{name} is empty; it must hold the weights of at least one site")
    for site, entry in mapping(name, value, "site -> tensor").items():
        tensor(f"{name}[{site!r}]", entry)
    return value


def mapping(name: str, value: Any, what: str, *, none: str = "") -> Any:
    """A mapping with names as keys."""
    if value is None and none:
        return None
    instance(name, value, Mapping, f"a dictionary, {what}{_or_none(none)}")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"{name} has the key {shown(key)}; its keys must be text: {what}")
    return value


def entries(name: str, value: Any, keys: Iterable[str]) -> Mapping[str, Any]:
    """A dictionary read from JSON, with these entries at least."""
    mapping(name, value, "as to_dict() gives it")
    if missing := [key for key in keys if key not in value]:
        raise ValueError(f"{name} lacks the entries {missing}; it must be as to_dict() gives it")
    return value


def listed(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> list[Any]:
    """Several objects of one of some classes, and no single text.

    :param what: these objects, in words.
    """
    if isinstance(value, str | Tensor) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {shown(value)}; it must be a list of {what}")
    return [instance(f"an entry of {name}", item, kinds, f"one of {what}") for item in value]


def shape(name: str, value: Any) -> torch.Size:
    """A shape: whole numbers, at least 0."""
    if isinstance(value, str | Tensor) or not isinstance(value, Sequence):
        raise TypeError(f"{name} is {shown(value)}; it must be a tuple of whole numbers, as in (100,)")
    return torch.Size([whole(f"{name}[{i}]", length, 0) for i, length in enumerate(value)])


def places(name: str, index: Any, length: int) -> Any:
    """Entries of an axis of this length that are meant: a slice, or whole numbers or a mask as a tensor ``(n,)``."""
    if isinstance(index, slice):
        return index
    known = isinstance(index, Tensor | np.ndarray | list | tuple | range | Integral)
    chosen = as_tensor(index) if known else None
    if chosen is None or chosen.is_floating_point() or chosen.dim() > 1:
        raise TypeError(f"{name} is {shown(index)}; it must be a slice, whole numbers, or a mask")
    chosen = chosen.reshape(-1)
    if chosen.dtype == torch.bool:
        if len(chosen) != length:
            raise ValueError(f"{name} is a mask of {len(chosen)} entries; there are {length} {name}")
    elif bool(((chosen < -length) | (chosen >= length)).any()):
        raise ValueError(f"{name} holds {chosen.tolist()[:10]}; there are {length} {name}, counted from 0")
    return chosen


def device(name: str, value: Any, *, here: bool = True, none: str = "the tensors' own") -> torch.device | None:
    """A device that PyTorch knows.

    :param here: whether this machine must have it, too.
    """
    if value is None and none:
        return None
    instance(name, value, (str, torch.device), f"a device such as 'cpu' or 'cuda:0'{_or_none(none)}")
    try:
        found = torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"{name} is {value!r}; it must be a device such as 'cpu' or 'cuda:0'") from error
    if here and found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{name} is {str(value)!r}, but PyTorch finds no GPU here")
    return found


def dtype(name: str, value: Any, choices: Iterable[torch.dtype] = (), *, none: str = "the tensors' own") -> Any:
    """A floating-point dtype.

    :param choices: those allowed; by default all.
    """
    if value is None and none:
        return None
    instance(name, value, torch.dtype, f"a dtype such as torch.float64{_or_none(none)}")
    if not value.is_floating_point or (choices and value not in choices):
        allowed = " or ".join(map(str, choices)) or "a floating-point dtype such as torch.float64"
        raise ValueError(f"{name} is {value}; it must be {allowed}{_or_none(none)}")
    return value


def path(name: str, value: Any) -> Path:
    """A path that isn't empty."""
    instance(name, value, (str, os.PathLike), "a path")
    if not os.fspath(value):
        raise ValueError(f"{name} is empty; it must be a path")
    return Path(os.fspath(value))


# small steps --------------------------------------------------------------------------------------------------------


def _held(name: str, value: Any) -> str:
    """Advice if a value isn't an argument, but has a property of the argument's name, as an MCMC has a posterior."""
    return f"; pass its .{name}" if isinstance(getattr(type(value), name, None), property) else ""


def _or_none(none: str) -> str:
    return f", or None for {none}" if none else ""
