"""Calls of models: many networks at once, which sites there are, and what to tell of a call that fails."""

from __future__ import annotations

import contextlib
import difflib
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from pyro.distributions import Delta
from pyro.distributions.torch_distribution import MaskedDistribution, TorchDistributionMixin
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import without_fast_attention

# Networks that vmap has failed on, and why.
_UNMAPPABLE: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


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
    mapped = [value for value, axis in zip(args, axes, strict=True) if axis == 0]
    results = []
    for k in range(len(tree_leaves(mapped)[0])):
        own = operator.itemgetter(k)
        results.append(function(*(v if axis is None else tree_map(own, v) for v, axis in zip(args, axes, strict=True))))
    if failure is not None:  # the network itself is in order, then
        said = str(failure.__cause__ or failure).splitlines()[0]
        _UNMAPPABLE[net] = f"the network can't be mapped over weights (torch.func.vmap): {said}"
        warnings.warn(f"networks are evaluated one by one, which takes longer: {_UNMAPPABLE[net]}", stacklevel=3)
    return tree_map(lambda *leaves: torch.stack(leaves), *results)


@contextlib.contextmanager
def explaining(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Around a call of a Pyro model: add to its error what it was called with."""
    try:
        yield
    except Exception as error:
        error.add_note(f"This came from {name_of(model)}, called with {described_call(args, kwargs)}.")
        raise


def input_problem(net: nn.Module, *args: Any) -> str:
    """The reason why a network, with its own weights, can't take these inputs; empty if it can."""
    try:
        with torch.no_grad():
            net(*args)
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        return f"the network ({type(net).__name__}) can't take {described_call(args, {})}: {said}"
    return ""


def refuse_complex_observations(observed: Iterable[Any]) -> None:
    """:raises ValueError: naming the observed sites that hold complex numbers."""
    values = {site["name"]: site["value"] for site in observed}
    if several := [n for n, v in values.items() if (v.is_complex() if torch.is_tensor(v) else type(v) is complex)]:
        raise ValueError(
            f"the observed sites {several} hold complex numbers, whose imaginary parts would be lost; observe both "
            "parts, as torch.view_as_real gives them"
        )


def refuse_training_batch_norm(model: Any) -> None:
    """:raises ValueError: naming the module."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"the module {name or type(module).__name__!r} is batch normalisation in train mode: a row's density "
                "would depend on the other rows. Call .eval() on the model, so that it uses its running statistics"
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
    """A model in words: a function by its name, a module by its class."""
    kind = "module" if isinstance(model, nn.Module) else "model"
    return f"the {kind} {getattr(model, '__name__', type(model).__name__)}"


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
