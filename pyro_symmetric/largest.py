"""How large the tensors are that a computation meets on its way: what decides how much of it to do at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Watches operations, and keeps the size of the largest result, in ``bytes`` and in ``entries``.

    >>> with LargestTensor() as largest:
    ...     torch.ones(3, 1) + torch.ones(1, 5)
    >>> largest.entries
    15
    """

    bytes = 0
    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if all(value.alias_info is None for value in func._schema.returns):  # views cost nothing
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
                    self.entries = max(self.entries, leaf.numel())
        return result
