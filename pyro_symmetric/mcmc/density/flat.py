"""A density's evaluation as one flat graph of operations, and its compiler.

A graph is traced once for each number of chains. What the model holds (its data above all) are inputs of the graph, so
a compiled program serves another model of the same operations and shapes, too: the next fit to other data finds it in
PyTorch's cache.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_symmetric.mcmc.density.engine import Evaluation

# Inputs are those that a program was made for, so it needn't compare sizes; one thread starts no workers.
# PyTorch compiles and loads trial programs to see which vector instructions there are, which takes as long as all else
# (of an empty cache); where its own kernels use the widest, that is known.
OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "compile_threads": 1,
    "cpp.vec_isa_ok": True if torch.backends.cpu.get_cpu_capability() == "AVX512" else None,
}

Evaluate = Callable[..., Evaluation]


class Flat:
    """A density's evaluation, traced: an ``evaluate`` for functions that are traced themselves.

    :param evaluate: chains ``(C, D)`` and others -> energy ``(C,)`` and gradient ``(C, D)``.
    :param inputs: what it is traced with.
    """

    def __init__(self, evaluate: Evaluate, inputs: Sequence[Tensor]):
        from torch._guards import TracingContext, tracing
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.proxy_tensor import make_fx  # which takes long to load

        # Of one mode of fake tensors, or each operation would make its own, which is most of the tracing's time.
        with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            try:
                graph = make_fx(evaluate)(*inputs)
            except RuntimeError as error:
                if "value out of a tracing tensor" not in str(error):
                    raise
                graph = make_fx(_looking_at_data(evaluate))(*inputs)
            if _singular_apart(graph):
                graph = make_fx(graph)(*inputs)  # PyTorch's own operations again
        self.graph, self.constants = graph, _lifted(graph)
        """The tensors that the model holds, in the order in which the graph takes them after the inputs."""
        self.code = "\n".join(part.code for part in graph.modules() if isinstance(part, fx.GraphModule))
        """All that the graph computes, of its inputs and these tensors."""

    def __call__(self, *inputs: Tensor) -> Evaluation:
        energy, gradient = self.graph(*inputs, *self.constants)
        return energy, gradient


def compiled(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """The program of a function of tensors."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    modules = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    for node in (node for module in modules for node in module.graph.nodes):
        node.meta.clear()  # tensors of the tracing, which the compiler takes for its own
    # Without an environment of shapes, inductor doesn't use its cache on disk.
    try:
        with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))):
            return torch._inductor.compile(graph, [*inputs], options=OPTIONS)
    except Exception as error:  # of whatever kind the compiler wraps it in
        if not _torn_file_removed(str(error)):
            raise
    return compiled(function, inputs)


# small steps --------------------------------------------------------------------------------------------------------


def _torn_file_removed(words: str) -> bool:
    """True if the compiler met a library that a process had no time to finish; it is gone from PyTorch's cache now.

    A process that is killed while it compiles leaves such a file, which would spoil every later run of the model.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    torn = re.search(r"(/[^\n:]*\.so): (?:file too short|invalid ELF header)", words)
    path = Path(torn[1]).resolve() if torn else Path("/")
    if not (path.is_file() and path.is_relative_to(Path(cache_dir()).resolve())):
        return False
    path.unlink()
    return True


def flatten(value: Any, flat: list[Tensor]) -> Any:
    """Collect the tensors of nested tuples and dataclasses; what they are, to build them again."""
    if isinstance(value, Tensor):
        flat.append(value)
        return None
    parts: Iterable[Any] = vars(value).values() if is_dataclass(value) else value
    return type(value), tuple([flatten(part, flat) for part in parts])


def unflatten(kinds: Any, flat: Any) -> Any:
    """The value that :func:`flatten` was given, made of an iterator over other tensors."""
    if kinds is None:
        return next(flat)
    kind, parts = kinds
    values = [unflatten(part, flat) for part in parts]
    return tuple(values) if kind is tuple else kind(*values)


def _singular_apart(graph: fx.GraphModule) -> bool:
    """Let a singular matrix count for its own chain alone, whose energy is infinite, with gradient 0; true if there are
    matrices that may be.

    Where PyTorch checks a factor and would raise an error, the factor becomes NaN. The check must go: a program
    can't raise its error for one chain.
    """
    nodes, found = graph.graph, False
    for check in [node for node in nodes.nodes if node.target is torch.ops.aten._linalg_check_errors.default]:
        info = check.args[0]
        if not isinstance(info, fx.Node) or info.target is not operator.getitem:
            continue
        factors, place = info.args
        assert isinstance(factors, fx.Node)
        values = [user for user in factors.users if user.target is operator.getitem and user.args[1] != place]
        with nodes.inserting_after(factors):
            failed = nodes.call_function(operator.getitem, (factors, place))
        for value in values:
            with nodes.inserting_after(value):
                apart = nodes.call_function(_nan_if, (value, failed))
            value.replace_all_uses_with(apart)
            apart.args = (value, failed)  # it alone uses the value itself
        nodes.erase_node(check)
        found = True
    if found:
        (last,) = [node for node in nodes.nodes if node.op == "output"]
        with nodes.inserting_before(last):
            last.args = (nodes.call_function(_outside_if_nan, tuple(last.args[0])),)
        nodes.lint()
        graph.recompile()
    return found


def _nan_if(value: Tensor, failed: Tensor) -> Tensor:
    """NaN in place of the matrices whose number in ``failed`` isn't 0; whole numbers (pivots) stay."""
    if not value.is_floating_point():
        return value
    failed = failed.reshape(failed.shape + (1,) * (value.ndim - failed.ndim))
    return torch.where(failed == 0, value, torch.nan)


def _outside_if_nan(energy: Tensor, gradient: Tensor) -> Evaluation:
    """Infinite energies and gradients of 0, as of chains outside of the support, in place of energies that are NaN."""
    outside = energy.isnan()
    return torch.where(outside, torch.inf, energy), torch.where(outside[:, None], 0.0, gradient)


def _looking_at_data(evaluate: Evaluate) -> Evaluate:
    """An evaluation that may decide by what it computes of the model's data: that is no part of the graph."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, has_proxy_slot

    class OfDataAlone(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            mode = get_proxy_mode()
            followed = mode is None or any(has_proxy_slot(value, mode.tracer) for value in given)
            if followed or not given or func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
                return func(*args, **(kwargs or {}))
            with disable_proxy_modes_tracing():
                found = func(*args, **(kwargs or {}))
                return found

    def looking(*inputs: Any) -> Evaluation:
        with OfDataAlone():
            return evaluate(*inputs)

    return looking


def _lifted(graph: fx.GraphModule) -> tuple[Tensor, ...]:
    """Make inputs of the tensors that a graph holds, and return these."""
    nodes, held = graph.graph, dict[str, tuple[fx.Node, Tensor]]()
    last = [node for node in nodes.nodes if node.op == "placeholder"][-1]
    for node in [node for node in nodes.nodes if node.op == "get_attr"]:
        if node.target not in held:
            with nodes.inserting_after(last):
                last = nodes.placeholder(f"held_{len(held)}")
            held[node.target] = last, getattr(graph, node.target).detach()
        node.replace_all_uses_with(held[node.target][0])
        nodes.erase_node(node)
    graph.recompile()
    return tuple(value for _, value in held.values())
