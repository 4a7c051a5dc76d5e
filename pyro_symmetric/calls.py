"""Calls of models: which sites they have, and calls that fail, in words: with what, why, and what would be right.

The model's own error always stays: it is chained, or passed on with a note.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from pyro.distributions import Delta, ImproperUniform
from pyro.distributions.torch_distribution import MaskedDistribution, TorchDistributionMixin
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from pyro_symmetric._process import without_fast_attention

# Networks that vmap has failed on, and why.
_UNMAPPABLE: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

WRAP = "BayesianModel(net, prior=1.0, likelihood='categorical' or 'gaussian')"


def with_weights(
    net: nn.Module, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
) -> Any:
    """The network's result with these weights in place of its own, also under :func:`torch.func.vmap`."""
    with without_fast_attention():
        return torch.func.functional_call(net, dict(weights), args, dict(kwargs or {}))


def unmappable(net: nn.Module) -> str:
    """The reason why a network can't be mapped over its weights, if one has been met; else empty."""
    return _UNMAPPABLE.get(net, "")


def over_weights(
    net: nn.Module,
    function: Callable[..., Any],
    *args: Any,
    in_dims: Sequence[int | None] | None = None,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Any:
    """``function(*args)`` for every index of the first axis, results stacked: by :func:`torch.func.vmap`, or by a loop,
    with a warning, if the network has an operator that can't be mapped. Arguments are as those of ``vmap``.
    """
    axes = tuple(in_dims or [0] * len(args))
    failure: Exception | None = None
    if not unmappable(net):
        try:
            return torch.func.vmap(function, axes, randomness=randomness, chunk_size=chunk_size)(*args)
        except (torch.OutOfMemoryError, torch.linalg.LinAlgError):
            raise
        except (RuntimeError, ValueError) as error:
            # Dropout would draw other numbers for each; on a CPU memory that is missing is a plain RuntimeError.
            if "randomness" in str(error) or "memory" in str(error):
                raise
            failure = error
    results = [function(*own) for own in _each(args, axes)]
    if failure is not None:  # the network itself is in order, then
        said = str(failure.__cause__ or failure).splitlines()[0]
        _UNMAPPABLE[net] = f"the network can't be mapped over weights (torch.func.vmap): {said}"
        warnings.warn(f"networks are evaluated one by one, which takes longer: {_UNMAPPABLE[net]}", stacklevel=3)
    return tree_map(lambda *leaves: torch.stack(leaves), *results)


def _each(args: Sequence[Any], axes: Sequence[int | None]) -> Iterator[list[Any]]:
    """Arguments of each function by itself."""
    mapped = [value for value, axis in zip(args, axes, strict=True) if axis == 0]
    for k in range(len(tree_leaves(mapped)[0])):
        own = operator.itemgetter(k)
        yield [value if axis is None else tree_map(own, value) for value, axis in zip(args, axes, strict=True)]


@contextlib.contextmanager
def explaining(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Around a call of a Pyro model that draws its sites: say what it was called with if that fails.

    :raises TypeError: if the model doesn't take such arguments.
    :raises ValueError: if PyTorch can't compute with them (their shapes don't fit, as of arguments in the wrong order),
        or if a site can't be drawn. Any other error is passed on, with a note.
    """
    while isinstance(model, functools.partial):
        model, args, kwargs = model.func, (*model.args, *args), {**model.keywords, **kwargs}
    try:
        with _Drawable():
            yield
    except Exception as error:
        called = described_call(args, kwargs)
        if type(error) is RuntimeError:  # PyTorch's own, and nothing that stands for more, such as too little memory
            said = (str(error).strip() or repr(error)).splitlines()[0]
            hint = _dtype_hint(said, args) or ("; are its arguments in order?" if len(args) > 1 else "")
            raise ValueError(f"{name_of(model)} fails, called with {called}: {said}{hint}") from error
        reason = _mismatch(model, args, kwargs) if isinstance(error, TypeError) else ""
        if not reason:
            error.add_note(f"This came from {name_of(model)}, called with {called}.")
            raise
        hint = ""
        if isinstance(model, nn.Module):
            hint = f". If it is a network, which draws no weights by pyro.sample, make a model of it: {WRAP}"
        raise TypeError(f"{name_of(model)} can't be called with {called}: {reason}{hint}") from error


def _dtype_hint(said: str, args: Sequence[Any]) -> str:
    """The advice if a model's numbers and its arguments are of two dtypes; empty if that isn't what was said."""
    own = torch.get_default_dtype()
    others = {v.dtype for v in args if isinstance(v, Tensor) and v.is_floating_point() and v.dtype != own}
    if not others or not any(word in said for word in ("dtype", "Double", "Float", "Half")):
        return ""
    other = ", ".join(sorted(map(str, others)))
    return f"; its arguments are of {other}, its own numbers of {own}: pass x.to({own}), or sample with dtype={other}"


def input_problem(net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str:
    """The reason why a network, with its weights, can't take these inputs; empty if it can."""
    kwargs = kwargs or {}
    try:
        with torch.no_grad():
            net(*args, **kwargs)
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        problem = f"the network ({type(net).__name__}) can't take {described_call(args, kwargs)}: {said}"
        if (first := next(iter(net.named_parameters()), None)) is not None:
            dtypes = {value.dtype for value in args if isinstance(value, Tensor) and value.is_floating_point()}
            devices = {value.device for value in args if isinstance(value, Tensor)}
            cast = f"; pass inputs.to({first[1].dtype})" if dtypes - {first[1].dtype} else ""
            cast += f"; pass inputs.to({str(first[1].device)!r})" if devices - {first[1].device} else ""
            problem += f". (Its first parameter, {first[0]!r}, is {described(first[1])}{cast}.)"
        return problem
    return ""


def model_arguments(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a model's call, as a tuple and a dictionary.

    :raises TypeError: if ``args`` is no tuple or list, or ``kwargs`` no mapping with names as keys.
    """
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"args is {described(args)}; it must be a tuple of the model's arguments, as in args=(x, y) or args=(x,)"
        )
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise TypeError(
            f"kwargs is {described(kwargs)}; it must be a dictionary of the model's keyword arguments, as in "
            'kwargs={"scale": 2.0}'
        )
    return tuple(args), dict(kwargs or {})


def refuse_options(model: Any, kwargs: Mapping[str, Any], options: Iterable[str], of: str) -> None:
    """Refuse options that were put among a model's arguments, whose ``**kwargs`` would swallow them, and options that
    are misspelt, which the model would refuse as its own.

    :param options: names that mean something else, unless the model has an argument of that very name.
    :param of: whose options they are.
    :raises TypeError: naming the option.
    """
    options = set(options)
    try:
        named = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters
    except (TypeError, ValueError):  # which names it has can't be told
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    own = {name for name, parameter in named.items() if parameter.kind not in kinds}
    swallows = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in named.values())
    for name in () if swallows else (name for name in kwargs if name not in own | options):
        if hint := did_you_mean(name, options | own):
            raise TypeError(f"{name} is an argument neither of {of} nor of {name_of(model)}{hint}")
    if taken := [name for name in kwargs if name in options - own]:
        raise TypeError(
            f"{taken[0]} is an option of {of}, but stands among the arguments of {name_of(model)}, which names no such "
            f"argument; give it to {of}, or give a model that is to have it: functools.partial(model, {taken[0]}=...)"
        )


def did_you_mean(found: Any, names: Iterable[str]) -> str:
    """The end of a message about a name that isn't known: the most similar one that is; empty if none is similar.

    >>> did_you_mean("estimater", ["base", "estimator"])
    "; did you mean 'estimator'?"
    """
    close = difflib.get_close_matches(found, list(names), 1, 0.7) if isinstance(found, str) else ()
    return f"; did you mean {close[0]!r}?" if close else ""


class Undrawable(ValueError):
    """An improper prior, of which there are no draws."""


def require_drawable(site: str, prior: Any) -> None:
    """:raises Undrawable: if a site's prior is improper, so that it has no draws."""
    while hasattr(prior, "base_dist"):
        prior = prior.base_dist
    if isinstance(prior, ImproperUniform):
        raise Undrawable(
            f"the prior of site {site!r} is ImproperUniform, which can't be drawn from; give it a proper one, such as "
            "Normal(0, 10)"
        )


def refuse_complex_observations(observed: Iterable[Any]) -> None:
    """:raises ValueError: naming the observed sites that hold complex numbers."""
    values = {site["name"]: site["value"] for site in observed}
    if several := [
        name for name, v in values.items() if isinstance(v, complex) or (torch.is_tensor(v) and v.is_complex())
    ]:
        raise ValueError(
            f"the observed sites {several} hold complex numbers, whose imaginary parts would be lost; observe real "
            "and imaginary parts, as torch.view_as_real gives them"
        )


def refuse_training_batch_norm(model: Any) -> None:
    """:raises ValueError: naming the module."""
    if not isinstance(model, nn.Module):
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"the module {name or type(module).__name__!r} is batch normalisation in train mode: the likelihood of "
                "one row would depend on the other rows. Call .eval() on the model, so that it uses its running "
                "statistics"
            )


def is_deterministic(site: Any) -> bool:
    """True if a site's value follows from others: a ``pyro.deterministic``, or what ``poutine.reparam`` made of a site.

    Pyro makes an observed sample site of both: its distribution is a :class:`~pyro.distributions.Delta` at its value,
    whose density is switched off, or stands for the change of variables.
    """
    if site["type"] != "sample" or not site["is_observed"]:
        return False
    fn = site["fn"]
    switched_off = isinstance(fn, MaskedDistribution) and fn._mask is False and isinstance(fn.base_dist, Delta)
    at_its_value = isinstance(fn, Delta) and fn.v is site["value"]
    return bool(site["infer"].get("_deterministic")) or switched_off or at_its_value


def is_enumerated(site: Any) -> bool:
    """True if a sample site is latent and has finitely many values, so that it can be summed out."""
    fn = site["fn"]
    return not site["is_observed"] and isinstance(fn, TorchDistributionMixin) and bool(fn.has_enumerate_support)


def name_of(model: Any) -> str:
    """A model in words: a function with its parameters, a module by its class."""
    if isinstance(model, nn.Module):
        return f"the module {type(model).__name__}.forward{_signature(model.forward)}"
    return f"the model {getattr(model, '__name__', type(model).__name__)}{_signature(model)}"


def described_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Arguments in words: tensors by their shape and dtype, other things by their type."""
    parts = [described(value) for value in args] + [f"{name}={described(value)}" for name, value in kwargs.items()]
    return ", ".join(parts) or "no arguments"


def described(value: Any) -> str:
    """One argument in words."""
    if isinstance(value, Tensor):
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"a tensor {tuple(value.shape)} of {value.dtype}{place}"
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, DataLoader):
        return "a DataLoader (tensors of all its rows: x, y = map(torch.cat, zip(*loader)))"
    kind = type(value)
    return f"a {kind.__qualname__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


# small steps --------------------------------------------------------------------------------------------------------


class _Drawable(Messenger):
    """Names a site that is to be drawn, but can't be."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is None and not msg["done"]:
            require_drawable(msg["name"], msg["fn"])


def _signature(function: Any) -> str:
    try:
        names = [str(p).partition(":")[0] for p in inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return "(...)"
    return f"({', '.join(names)})"


def _mismatch(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The reason why a signature can't take these arguments; empty if it can or that can't be told."""
    try:
        signature = inspect.signature(model.forward if isinstance(model, nn.Module) else model)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""
