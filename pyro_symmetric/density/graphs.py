"""Functions of tensors as graphs of PyTorch's operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pyro_symmetric.arguments import Function

# operator -> function in terms of others
Decompositions = dict[Any, Callable[..., Any]]


def graph_of(
    function: Function, decompositions: Decompositions, *inputs: Any
) -> fx.GraphModule:
    """Trace a function of tensors, or of containers of them, as a graph of operators.

    :param decompositions: operator -> function by which it is replaced.
    """
    from torch._guards import TracingContext, tracing  # slow to import
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # Otherwise each node gets a mode of its own, which takes as long as all else.
    mode = FakeTensorMode(allow_fallback_kernels=True)
    with tracing(TracingContext(mode)):
        return make_fx(function, decomposition_table=decompositions)(*inputs)


def largest_size(nested: Any) -> int:
    """Return how many numbers the largest tensor in a nested value holds."""
    tensors = [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]
    return max(map(num_stored, tensors), default=0)


def num_stored(value: Tensor) -> int:
    """Return how many numbers a tensor holds, of those repeated along an axis one."""
    if value.layout is not torch.strided or value.is_nested:
        return value.numel()
    axes = zip(value.shape, value.stride(), strict=True)
    return math.prod(size for size, stride in axes if stride or not size)
