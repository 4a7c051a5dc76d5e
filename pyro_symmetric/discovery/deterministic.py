"""Deterministic runs of a network while it is verified: in one precision, and with masks at their means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.discovery.rules.registry import bound
from pyro_symmetric.discovery.symmetry import in_precision

aten = torch.ops.aten
# Draws, and the means that take their place, by their arguments.
MEANS: dict[Any, Callable[[Mapping[str, Any]], float]] = {
    **dict.fromkeys((aten.randn, aten.randn_like), lambda given: 0.0),
    **dict.fromkeys((aten.rand, aten.rand_like), lambda given: 0.5),
    aten.normal_: lambda given: given["mean"],
    aten.uniform_: lambda given: (given["from"] + given["to"]) / 2,
    aten.exponential_: lambda given: 1 / given["lambd"],
}


class Deterministic(TorchDispatchMode):
    """Masks of dropout have the value of their mean, and all real and complex numbers have one precision.

    So dropout and stochastic depth do nothing, whoever calls them, and no rounding hides behind a cast.

    :param dtype: the precision.
    :param noise: whether random numbers are drawn; otherwise normal, uniform and exponential ones are their means.
    """

    def __init__(self, dtype: torch.dtype, noise: bool = True):
        super().__init__()
        self.dtype, self.noise = dtype, noise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, schema = getattr(func, "overloadpacket", func), getattr(func, "_schema", None)
        masked = _masked(func, args, kwargs)
        if masked is not None:
            return masked
        if not self.noise and packet in MEANS:
            return func(*args, **kwargs).fill_(MEANS[packet](bound(func, args, kwargs)))
        writes = schema is not None and schema.is_mutable and bool(args)
        if not writes or self._in_precision(args[0]) is args[0]:  # else it would write into a copy
            args, kwargs = pytree.tree_map(self._in_precision, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        made = isinstance(result, Tensor) and not any(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        return self._in_precision(result) if made else result

    def _in_precision(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return in_precision(value, self.dtype)
        return value.to(in_precision(value.dtype, self.dtype)) if isinstance(value, Tensor) else value


def _masked(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator that drops entries with one probability; None for all other operators."""
    packet = getattr(func, "overloadpacket", func)
    if packet is aten.bernoulli_:
        given = bound(func, args, kwargs)
        return None if isinstance(given["p"], Tensor) else args[0].fill_(given["p"])
    if func is aten.bernoulli.p:
        return torch.full_like(args[0], bound(func, args, kwargs)["p"])
    if packet is aten.native_dropout:
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if packet is aten.rrelu_with_noise:
        return func(*args[:4], False, *args[5:], **kwargs) if len(args) > 4 and args[4] else None
    return None
