"""Deterministic runs of a network while it is verified: in one precision, and with masks at their means."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.discovery.symmetry import in_precision

NUMBERS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128}
)
aten = torch.ops.aten
# Draws whose mean takes their place: the arguments that describe it with their defaults, and the mean.
MEANS: dict[Any, tuple[tuple[float, ...], Callable[..., float]]] = {
    **dict.fromkeys((aten.randn, aten.randn_like), ((), lambda: 0.0)),
    **dict.fromkeys((aten.rand, aten.rand_like), ((), lambda: 0.5)),
    aten.normal_: ((0.0, 1.0), lambda mean, deviation: mean),
    aten.uniform_: ((0.0, 1.0), lambda low, high: (low + high) / 2),
    aten.exponential_: ((1.0,), lambda rate: 1 / rate),
}


class Deterministic(TorchDispatchMode):
    """Masks of dropout have the value of their mean, and all real and complex numbers have one precision.

    So dropout and stochastic depth do nothing, whoever calls them, and no rounding hides behind a cast.

    :param dtype: the precision; every number keeps its own if none is given.
    :param noise: whether random numbers are drawn; otherwise normal, uniform and exponential ones are their means.
    :ivar coarsest: the largest relative rounding error of the numbers that were computed in their own precision.
    """

    def __init__(self, dtype: torch.dtype | None, noise: bool = True):
        super().__init__()
        self.dtype, self.noise, self.coarsest = dtype, noise, 0.0
        self.others = {own for own in NUMBERS if own != in_precision(own, dtype)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        mean = _mean_of_mask(func, args, kwargs)
        if mean is not None:
            return mean
        if not self.noise and getattr(func, "overloadpacket", None) in MEANS:
            return _mean_of_noise(func, args, kwargs)
        if self._differs(args) or self._differs(kwargs.values()):
            args, kwargs = self._raised(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.dtype is None and isinstance(result, Tensor) and result.dtype in NUMBERS:
            self.coarsest = max(self.coarsest, torch.finfo(result.dtype).eps)
        made = isinstance(result, Tensor) and not any(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        return self._in_precision(result) if made else result

    def _differs(self, values: Iterable[Any]) -> bool:
        """True if something among arguments has, or asks for, another precision."""
        for value in values:
            if isinstance(value, list | tuple):
                if self._differs(value):
                    return True
            elif isinstance(value, Tensor | torch.dtype) and getattr(value, "dtype", value) in self.others:
                return True
        return False

    def _raised(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments in the one precision; what is written to keeps its own, and the others follow it."""
        changed = next((args[i] for i in _written(func) if i < len(args) and isinstance(args[i], Tensor)), None)
        if changed is None:
            return pytree.tree_map(self._in_precision, (tuple(args), kwargs))
        if changed.dtype not in NUMBERS or func.overloadpacket is aten.copy_:
            return args, kwargs
        follow = Deterministic(changed.dtype)._in_precision
        return tuple(x if x is changed else pytree.tree_map(follow, x) for x in args), kwargs

    def _in_precision(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return in_precision(value, self.dtype)
        if isinstance(value, Tensor) and value.dtype in self.others:
            return value.to(in_precision(value.dtype, self.dtype))
        return value


# small steps --------------------------------------------------------------------------------------------------------


def _mean_of_mask(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator that drops entries with one probability; None for all other operators."""
    packet = getattr(func, "overloadpacket", None)
    probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    if packet is aten.bernoulli_ and not isinstance(probability, Tensor):
        return args[0].fill_(probability)
    if func is aten.bernoulli.p:
        return torch.full_like(args[0], probability)
    if packet is aten.native_dropout:
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if packet is aten.rrelu_with_noise and len(args) > 4 and args[4]:
        return func(*args[:4], False, *args[5:], **kwargs)
    return None


def _mean_of_noise(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The result of an operator that draws random numbers, with their means in place of these."""
    defaults, mean = MEANS[func.overloadpacket]
    schema = func._schema.arguments[1 : 1 + len(defaults)]
    given = [
        args[1 + i] if len(args) > 1 + i else kwargs.get(schema[i].name, default) for i, default in enumerate(defaults)
    ]
    return func(*args, **kwargs).fill_(mean(*given))


def _written(func: Any) -> list[int]:
    """The positional arguments that an operator writes to."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
