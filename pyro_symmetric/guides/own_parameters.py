"""Parameters that a guide shares with no other guide, under names that don't depend on what ran before.

Pyro keeps parameters in one store, under names that start with the guide's. It names a guide after its class, so two
guides of one class would train the same parameters. Here the parameters belong to the guide's own module. The store
lists those of the guide of that name that ran last, which is all that SVI, ``pyro.param`` and
``get_param_store().save()`` need. What was loaded into the store goes to the next guide that runs under the name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, TypeVar

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyro_symmetric import arguments

AnyGuide = TypeVar("AnyGuide", bound=AutoGuide)


def distinct(guide: AnyGuide, name: str | None = None) -> AnyGuide:
    """Let a guide share its parameters with no other guide, and return it.

    Pyro names every stock guide after its class, so that two guides of one class silently share all parameters. Guides
    of this library don't. Wrap stock guides before their first use:

    >>> def model():
    ...     pyro.sample("w", dist.Normal(0.0, 1.0))
    >>> first, second = (ps.distinct(pyro.infer.autoguide.AutoNormal(model)) for _ in range(2))
    >>> draws = first(), second()
    >>> svi = pyro.infer.SVI(model, first, pyro.optim.Adam({"lr": 0.1}), loss=pyro.infer.Trace_ELBO())
    >>> loss = svi.step()
    >>> bool(first.median()["w"] == second.median()["w"])  # stock guides of one class would share it
    False

    :param name: what the guide's parameters and auxiliary sites are named after; by default its class. Guides of one
        name are distinct all the same. Only compiled objectives (``JitTrace_ELBO``), which look parameters up by name,
        need a name for each guide if several are trained in turns.
    """
    arguments.instance("guide", guide, AutoGuide, "an automatic guide")
    if name is not None:
        arguments.instance("name", name, str, "a string")
    if getattr(guide, "prototype_trace", None) is not None:
        raise ValueError("the guide has been used already, under its old name; call distinct() right after building it")
    guide._pyro_set_supermodule(name or f"Distinct{type(guide).__name__}", guide._pyro_context)
    if _take_place not in guide._forward_pre_hooks.values():
        guide.register_forward_pre_hook(_take_place)
        guide.register_forward_hook(_leave_record)
    return guide


# The guide to which a parameter in Pyro's store belongs, and whether it was read by a compiled objective. What else is
# in the store was loaded, or set by the user.
_OWNERS: Any = WeakIdKeyDictionary()


def _take_place(guide: AutoGuide, inputs: Any) -> None:
    """Before a guide runs: let Pyro's store list no parameters under its name but its own."""
    for part in guide.modules():
        if isinstance(part, PyroModule):
            part._pyro_context = guide._pyro_context  # which dask, unlike pickle, copies for each part
    store, own = pyro.get_param_store(), dict(_named(guide, guide._pyro_name))
    for name, held in _held(guide):
        if held is own.get(name):
            continue
        owner, compiled = _OWNERS.get(held, (None, False))
        if owner is None:  # loaded
            if name not in own:
                continue  # a stock guide that isn't set up takes it when it creates the parameter
            with torch.no_grad():
                own[name].copy_(held)
        elif compiled and owner() is not None:
            raise RuntimeError(
                f"a compiled objective (JitTrace_ELBO) reads the parameters of another guide by the name "
                f"{guide._pyro_name!r}, which this guide has, too. If that training is over, call "
                "pyro.clear_param_store(); else give each guide a name of its own, by distinct(guide, name)"
            )
        del store[name]


def _leave_record(guide: AutoGuide, inputs: Any, result: Any) -> None:
    """After a guide has run: remember which parameters in the store are its own."""
    tracing = torch._C._get_tracing_state() is not None
    for _, held in _held(guide):
        _OWNERS[held] = weakref.ref(guide), tracing or _OWNERS.get(held, (None, False))[1]


def _held(guide: AutoGuide) -> list[tuple[str, Tensor]]:
    """The unconstrained parameters that Pyro's store holds under a guide's name."""
    held = pyro.get_param_store()._params.items()
    return [(name, parameter) for name, parameter in held if name.startswith(f"{guide._pyro_name}.")]


def _named(module: PyroModule, prefix: str) -> Iterator[tuple[str, Any]]:
    """Unconstrained parameters by the names that Pyro's store gives them."""
    for name, parameter in module._parameters.items():
        short = name.removesuffix("_unconstrained")
        yield f"{prefix}.{short if short in module._pyro_params else name}", parameter
    for name, part in module._modules.items():
        if isinstance(part, PyroModule):
            yield from _named(part, f"{prefix}.{name}")
        elif part is not None:
            yield from ((f"{prefix}.{name}$$${inner}", parameter) for inner, parameter in part.named_parameters())
