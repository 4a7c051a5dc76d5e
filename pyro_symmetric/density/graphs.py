"""Functions of tensors as graphs of PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

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
