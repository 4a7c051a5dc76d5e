"""Any network as a function from tensors to tensors, whatever its forward pass takes and returns.

Tensors are found wherever they are: in lists, dictionaries, dataclasses, distributions, or objects of other libraries.
Everything else among the inputs is part of the architecture. Among the outputs, caches are left out: they hold what a
later call may reuse, in which heads and channels keep their order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CACHES = frozenset({"past_key_value", "past_key_values", "past_buckets_states", "cache_params", "mems"})


class TensorsOnly(nn.Module):
    """A network that takes tensors one after the other, and returns a list of tensors.

    :param net: the network.
    :param args: an example of what its forward pass takes, which can be copied; so are ``kwargs``.
    :ivar tensors: the different tensors among these, which :meth:`forward` takes others in place of.
    """

    def __init__(self, net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None):
        super().__init__()
        self.net = net
        self.given = tuple(args), dict(kwargs or {})
        with _Met() as mode:
            copy.deepcopy(self.given)
        self.tensors = [*mode.tensors.values()]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The outputs of the network for its example with these tensors in place of the example's."""
        args, kwargs = copy.deepcopy(self.given, dict(zip(map(id, self.tensors), tensors, strict=True)))
        return list(outputs_in(self.net(*args, **kwargs)))


class _Met(TorchFunctionMode):
    """Notes the different tensors that are to be copied, and doesn't copy them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self.tensors.setdefault(id(args[0]), args[0])
        return func(*args, **(kwargs or {}))


def outputs_in(value: Any, name: str = "") -> Iterator[Tensor]:
    """The tensors of what a network returns; caches, numbers and texts are left out.

    :param name: the attribute or key that the value was found under.
    """
    if name in CACHES or type(value).__name__.endswith("Cache") or isinstance(value, type | str | nn.Module):
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from outputs_in(entry)
    elif isinstance(value, Mapping) or not callable(value):  # a dataclass, a distribution, or whatever has attributes
        for key, entry in (value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).items():
            yield from outputs_in(entry, str(key))
