"""Operations of a computation: they decide how much of it to do at once, and whether to compile it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Watches operations: their ``count``, the size of the largest result, in ``bytes`` and in ``entries``, and the
    ``written`` bytes of all results.

    >>> with Operations() as largest:
    ...     torch.ones(3, 1) + torch.ones(1, 5)
    >>> largest.entries
    15
    """

    count = 0
    bytes = 0
    entries = 0
    written = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch's question: to skip its compiler it would load it, a second of work and 90 MB for nothing."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        result = func(*args, **(kwargs or {}))
        if all(value.alias_info is None for value in func._schema.returns):  # views cost nothing
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
                    self.entries = max(self.entries, leaf.numel())
                    self.written += leaf.numel() * leaf.element_size()
        return result
