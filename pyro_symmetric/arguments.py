"""Validation of arguments at entry points, and descriptions of values for error
messages.

Each check returns the value, or raises ``TypeError`` for a wrong type and
``ValueError`` for a wrong value, in one sentence with the name, the value and the
values allowed. What Python, PyTorch or Pyro refuse anyway isn't checked.
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial, wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Size, Tensor

P = ParamSpec("P")
T = TypeVar("T")
Names = tuple[str, ...]
Shape = tuple[int, ...]
Args = tuple[Any, ...]  # a function's positional arguments
Entries = dict[str, Any]  # values of any kind by name
Values = Mapping[str, Any]  # the same, read only
Json = Entries  # what JSON can hold
ByName = dict[str, Tensor]  # numbers that are no weights
Tensors = Mapping[str, Tensor]  # these or weights, read only
Device = torch.device | str | None  # PyTorch's default for None
Dtype = torch.dtype | None  # likewise
Function = Callable[..., Any]
Model = Function  # of Pyro
Keywords = Values  # its keyword arguments


def whole(
    name: str,
    value: Any,
    least: int | None = None,
    most: int | None = None,
    *,
    none: str = "",
) -> Any:
    """Require a whole number and return it as an ``int``; refuse booleans and floats
    such as 1.0.

    :param none: the meaning of ``None``; empty if it isn't allowed.
    """
    if value is None and none:
        return None
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(
            f"{name} is {described(value)}; it must be a whole number{_or_none(none)}"
        )
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
    """Require a real number within bounds, not NaN; ``below=math.inf`` requires a
    finite one.
    """
    if value is None and none:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name} is {described(value)}; it must be a number{_or_none(none)}"
        )
    bounds = {"at least": (operator.ge, least), "more than": (operator.gt, above)}
    bounds |= {"at most": (operator.le, most), "less than": (operator.lt, below)}
    holds = {
        f"{words} {bound}": test(value, bound)
        for words, (test, bound) in bounds.items()
        if bound is not None
    }
    if math.isnan(value) or not all(holds.values()):
        raise ValueError(
            f"{name} is {value}; it must be "
            f"{' and '.join(holds) or 'a number, not NaN'}{_or_none(none)}"
        )
    return value


positive = partial(number, above=0, below=math.inf)  # a positive finite number
fraction = partial(number, above=0, below=1)  # a number strictly between 0 and 1


def one_of(name: str, value: Any, choices: Iterable[Any], besides: str = "") -> Any:
    """Require one of a few values.

    :param besides: a description of other values that the caller allows.
    """
    choices = list(choices)
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        hint = did_you_mean(
            value, (choice for choice in choices if isinstance(choice, str))
        )
        alternative = f" or {besides}" if besides else ""
        raise ValueError(
            f"{name} is {described(value)}; it must be one of "
            f"{choices}{alternative}{hint}"
        )
    return value


def instance(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> Any:
    """Require an instance of one of some classes.

    :param what: a description of these classes.
    """
    if not isinstance(value, kinds):
        raise TypeError(f"{name} is {described(value)}; it must be {what}")
    return value


tensor = partial(instance, kinds=Tensor, what="a tensor")


def weights(name: str, value: Any, besides: str = "") -> Tensors:
    """Require weights: a mapping from site to tensor with at least one site.

    :param besides: a description of other types that the caller allows.
    """
    instance(
        name,
        value,
        Mapping,
        f"weights (site -> tensor){f' or {besides}' if besides else ''}",
    )
    if not value:
        raise ValueError(
            f"{name} is empty; it must hold the weights of at least one site"
        )
    for site, entry in value.items():
        instance(f"a key of {name}", site, str, "the name of a site")
        tensor(f"{name}[{site!r}]", entry)
    return value


def listed(
    name: str, value: Any, kinds: type | tuple[type, ...], what: str
) -> list[Any]:
    """Require an iterable of instances of some classes, and return it as a list; refuse
    a single string or tensor.

    :param what: a description of these instances.
    """
    if isinstance(value, str | Tensor) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {described(value)}; it must be a list of {what}")
    return [
        instance(f"an entry of {name}", item, kinds, f"one of {what}") for item in value
    ]


def shape(name: str, value: Any) -> Size:
    """Require a shape: whole numbers of at least 0."""
    instance(name, value, Sequence, "a tuple of whole numbers, as in (100,)")
    return Size([whole(f"{name}[{i}]", length, 0) for i, length in enumerate(value)])


def dtype(name: str, value: Any) -> Any:
    """Require a floating-point dtype, or ``None``."""
    if value is not None and not value.is_floating_point:
        raise ValueError(
            f"{name} is {value}; it must be a floating-point dtype such as "
            "torch.float64"
        )
    return value


def described_call(args: Sequence[Any], kwargs: Values) -> str:
    """Describe the arguments of a call."""
    parts = [described(value) for value in args] + [
        f"{name}={described(value)}" for name, value in kwargs.items()
    ]
    return ", ".join(parts) or "no arguments"


def described(value: Any) -> str:
    """Describe a value: a short one by its ``repr``, a tensor by its shape and dtype,
    others by their type.
    """
    if isinstance(value, Tensor):
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"a tensor {tuple(value.shape)} of {value.dtype}{device}"
    if value is None or (
        isinstance(value, str | Real | torch.dtype | torch.device)
        and len(repr(value)) < 80
    ):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return (
        f"a {kind.__qualname__}"
        if kind.__module__ == "builtins"
        else f"a {kind.__module__}.{kind.__qualname__}"
    )


def holding_nan(function: Function, args: Sequence[Any], kwargs: Values) -> str:
    """Return the end of a message that names arguments with NaN; empty if none has."""
    try:
        call = getattr(function, "forward", function)  # of a module
        bound = inspect.signature(call).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # of a builtin, say
        bound = dict(kwargs)
    names = []
    for name, value in bound.items():
        if isinstance(value, Tensor) and bool(value.isnan().any()):
            names.append(repr(name))
    verb = "holds" if len(names) == 1 else "hold"
    return f"; {' and '.join(names)} {verb} NaN" if names else ""


def did_you_mean(unknown: Any, names: Iterable[str]) -> str:
    """Suggest the known name most similar to an unknown one, as the end of a message;
    empty if none is similar.

    >>> from pyro_symmetric.arguments import did_you_mean
    >>> did_you_mean("estimater", ["base", "estimator"])
    "; did you mean 'estimator'?"
    """
    close = (
        difflib.get_close_matches(unknown, list(names), 1, 0.7)
        if isinstance(unknown, str)
        else ()
    )
    return f"; did you mean {close[0]!r}?" if close else ""


def require_keywords(
    title: str,
    known: Collection[str],
    keywords: Iterable[str],
    guesses: Mapping[str, str],
    advice: str = "",
) -> None:
    """Require keywords that a function has.

    :param title: its name in messages.
    :param known: the keywords that it has.
    :param guesses: names in other libraries, and the names here.
    :param advice: for a keyword that resembles none.
    """
    for keyword in keywords:
        if keyword in known:
            continue
        hint = did_you_mean(keyword, known)
        if guesses.get(keyword) in known:
            hint = f"; did you mean {guesses[keyword]!r}?"
        elif not hint and advice:
            hint = f"; {advice}"
        raise TypeError(f"{title} has no argument {keyword!r}{hint}")


def checks_keywords(
    guesses: Mapping[str, str], advice: str = ""
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a decorator of functions whose error of a wrong keyword names the right one;
    see :func:`require_keywords`.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = inspect.signature(function).parameters

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            require_keywords(function.__name__, known, kwargs, guesses, advice)
            return function(*args, **kwargs)

        return checked

    return decorate


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor: a tensor on its own device, numbers and arrays on the CPU
    whatever the default device.
    """
    return torch.as_tensor(
        value, dtype=dtype, device=value.device if isinstance(value, Tensor) else "cpu"
    )


def _or_none(none: str) -> str:
    return f", or None for {none}" if none else ""
