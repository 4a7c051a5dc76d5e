"""Networks that people use, from five libraries, with random weights and an example of
what each takes.

Each library's module yields cases: a name, and what builds the network and its inputs.
Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]]


class Case(NamedTuple):
    """A network by name.

    :param build: builds the network and its example inputs.
    """

    name: str
    build: Callable[[], Built]


Cases = Iterator[Case]


class Tensors(nn.Module):
    """A network that takes tensors, in the order of their names, and returns all
    tensors of its outputs.

    Caches are switched off, for they hold what the outputs hold already.

    :param names: the keywords that the inputs are given by; none of them if inputs are
        given by position.
    :param options: further keywords, the same in each call.
    """

    def __init__(self, net: nn.Module, names: tuple[str, ...] = (), **options: Any):
        super().__init__()
        self.net, self.names, self.options = net, names, options

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.names:
            out = self.net(**dict(zip(self.names, inputs, strict=True)), **self.options)
        else:
            out = self.net(*inputs, **self.options)
        leaves = torch.utils._pytree.tree_leaves(
            dict(out) if hasattr(out, "keys") else out
        )
        return tuple(
            leaf
            for leaf in leaves
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        )
