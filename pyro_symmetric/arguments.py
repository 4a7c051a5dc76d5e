"""Arguments at entry points: checks in one sentence (the name, what was found, what would be right), and their words.

Each check raises ``TypeError`` for a wrong type and ``ValueError`` for a wrong value. What Python, PyTorch or Pyro
would refuse anyway isn't checked.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor


def whole(name: str, value: Any, least: int | None = None, most: int | None = None, *, none: str = "") -> Any:
    """A whole number, as an ``int``; a bool or 1.0 is none.

    :param none: what ``None`` stands for; empty if it isn't allowed.
    """
    if value is None and none:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {described(value)}; it must be a whole number{_or_none(none)}")
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
        raise TypeError(f"{name} is {described(value)}; it must be a number{_or_none(none)}")
    bounds = {"at least": (operator.ge, least), "more than": (operator.gt, above)}
    bounds |= {"at most": (operator.le, most), "less than": (operator.lt, below)}
    asked = {f"{words} {bound}": fits(value, bound) for words, (fits, bound) in bounds.items() if bound is not None}
    if math.isnan(value) or not all(asked.values()):
        raise ValueError(f"{name} is {value}; it must be {' and '.join(asked) or 'a number, not NaN'}{_or_none(none)}")
    return value


positive = partial(number, above=0, below=math.inf)
"""A positive finite number."""

fraction = partial(number, above=0, below=1)
"""A number strictly between 0 and 1."""


def one_of(name: str, value: Any, choices: Iterable[Any], besides: str = "") -> Any:
    """One of a few values.

    :param besides: what else is allowed, in words.
    """
    choices = list(choices)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        hint = did_you_mean(value, (choice for choice in choices if isinstance(choice, str)))
        others = f" or {besides}" if besides else ""
        raise ValueError(f"{name} is {described(value)}; it must be one of {choices}{others}{hint}")
    return value


def instance(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> Any:
    """An object of one of some classes.

    :param what: these classes, in words.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is {described(value)}; it must be {what}")
    return value


tensor = partial(instance, kinds=Tensor, what="a tensor")
"""A tensor."""


def weights(name: str, value: Any, besides: str = "") -> Mapping[str, Tensor]:
    """Weights: site -> tensor, at least one site.

    :param besides: what else the caller takes, in words.
    """
    instance(name, value, Mapping, f"weights (site -> tensor){f' or {besides}' if besides else ''}")
    if not value:
        raise ValueError(f"{name} is empty; it must hold the weights of at least one site")
    for site, entry in value.items():
        instance(f"a key of {name}", site, str, "the name of a site")
        tensor(f"{name}[{site!r}]", entry)
    return value


def listed(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> list[Any]:
    """Several objects of one of some classes, and no single text.

    :param what: these objects, in words.
    """
    if isinstance(value, str | Tensor) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {described(value)}; it must be a list of {what}")
    return [instance(f"an entry of {name}", item, kinds, f"one of {what}") for item in value]


def shape(name: str, value: Any) -> torch.Size:
    """A shape: whole numbers, at least 0."""
    instance(name, value, Sequence, "a tuple of whole numbers, as in (100,)")
    return torch.Size([whole(f"{name}[{i}]", length, 0) for i, length in enumerate(value)])


def dtype(name: str, value: Any) -> Any:
    """A floating-point dtype, or ``None``."""
    if value is not None and not value.is_floating_point:
        raise ValueError(f"{name} is {value}; it must be a floating-point dtype such as torch.float64")
    return value


def described_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Arguments in words."""
    parts = [described(value) for value in args] + [f"{name}={described(value)}" for name, value in kwargs.items()]
    return ", ".join(parts) or "no arguments"


def described(value: Any) -> str:
    """One value in words: a short one as it is written, a tensor by its shape and dtype, others by their type."""
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"a tensor {tuple(value.shape)} of {value.dtype}{place}"
    if value is None or (isinstance(value, str | Real | torch.dtype | torch.device) and len(repr(value)) < 80):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def did_you_mean(found: Any, names: Iterable[str]) -> str:
    """The end of a message about a name that isn't known: the most similar one that is; empty if none is similar.

    >>> did_you_mean("estimater", ["base", "estimator"])
    "; did you mean 'estimator'?"
    """
    close = difflib.get_close_matches(found, list(names), 1, 0.7) if isinstance(found, str) else ()
    return f"; did you mean {close[0]!r}?" if close else ""


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor where it is; a number, a list or an array on the CPU, whatever PyTorch's default device is."""
    return torch.as_tensor(value, dtype=dtype, device=value.device if isinstance(value, Tensor) else "cpu")


def _or_none(none: str) -> str:
    return f", or None for {none}" if none else ""
