"""A density's evaluation as one flat graph of operations, loops of a kernel's arithmetic around it, and their compiler.

A graph is traced once for each number of chains. What the model holds (its data above all) are inputs of the graph, so
a compiled program serves another model of the same operations and shapes, too: the next fit to other data finds it in
PyTorch's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, fx

from pyro_symmetric.mcmc.density.engine import Evaluation
from pyro_symmetric.placement import as_tensor

# Inputs are those that a program was made for, so it needn't compare sizes; one thread starts no workers. PyTorch keeps
# no loop in its cache unless it is told that it may; these hold nothing but operations, which the cache's key lists.
# PyTorch compiles and loads trial programs to see which vector instructions there are, which takes as long as all else
# (of an empty cache); where its own kernels use the widest, that is known.
OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "compile_threads": 1,
    "cpp.vec_isa_ok": True if torch.backends.cpu.get_cpu_capability() == "AVX512" else None,
    "unsafe_marked_cacheable_functions": {"torch.ops.higher_order.while_loop": "1"},
}

Evaluate = Callable[..., Evaluation]


class Flat:
    """A density's evaluation, traced: an ``evaluate`` for functions that are traced themselves.

    :param evaluate: chains ``(C, D)`` and others -> energy ``(C,)`` and gradient ``(C, D)``.
    :param inputs: what it is traced with.
    """

    def __init__(self, evaluate: Evaluate, inputs: Sequence[Tensor]):
        from torch.fx.experimental.proxy_tensor import make_fx  # which takes long to load

        graph = make_fx(evaluate)(*inputs)
        self.graph, self.constants = graph, _lifted(graph)
        """The tensors that the model holds, in the order in which the graph takes them after the inputs."""
        self.code = "\n".join(part.code for part in graph.modules() if isinstance(part, fx.GraphModule))
        """All that the graph computes, of its inputs and these tensors."""

    def __call__(self, *inputs: Tensor) -> Evaluation:
        energy, gradient = self.graph(*inputs, *self.constants)
        return energy, gradient

    def loop(self, going_on: Callable[..., Tensor], body: Callable[..., Any], values: Any, others: Any) -> Any:
        """See :func:`loop`."""
        from torch._higher_order_ops.while_loop import while_loop_op

        outer, flat, more = self.constants, list[Tensor](), list[Tensor]()
        kinds, kinds_others = flatten(values, flat), flatten(others, more)

        def parts(given: tuple[Tensor, ...]) -> tuple[Any, Any]:
            around = iter(given[len(flat) :])
            others = unflatten(kinds_others, around)
            self.constants = tuple(around)
            return unflatten(kinds, iter(given)), others

        def condition(*given: Tensor) -> Tensor:
            values, others = parts(given)
            return going_on(values, *others)

        def step(*given: Tensor) -> tuple[Tensor, ...]:
            values, others = parts(given)
            results: list[Tensor] = []
            if flatten(body(self, values, *others), results) != kinds:
                raise TypeError("a loop's body returns what it is given, in other values")
            return _apart(results, given)

        try:
            given = _apart([*flat, *more], outer)
            carried: Any = given[: len(flat)]
            found = while_loop_op(condition, step, carried, (*given[len(flat) :], *outer))
        finally:
            self.constants = outer
        return unflatten(kinds, iter(found))


def loop(
    evaluate: Evaluate, going_on: Callable[..., Tensor], body: Callable[..., Any], values: Any, *others: Any
) -> Any:
    """``while going_on(values, *others): values = body(evaluate, values, *others)``, in a program a loop of its own.

    :param going_on: to a boolean tensor ``()``.
    :param values: tensors, tuples and dataclasses of tensors, of which ``body`` returns the like.
    :param others: likewise, what stays as it is. Neither function uses any other tensor.
    """
    if isinstance(evaluate, Flat):
        return evaluate.loop(going_on, body, values, others)
    while bool(going_on(values, *others)):
        values = body(evaluate, values, *others)
    return values


def repeat(evaluate: Evaluate, count: int | Tensor, body: Callable[..., Any], values: Any, *others: Any) -> Any:
    """``for _ in range(count): values = body(evaluate, values, *others)``, in a program a loop that serves all counts.

    :param count: a number, or a tensor ``()`` on the CPU.
    """
    if not isinstance(evaluate, Flat):
        for _ in range(int(count)):
            values = body(evaluate, values, *others)
        return values

    def left(values: Any, count: Tensor, *others: Any) -> Tensor:
        return values[0] < count

    def step(evaluate: Evaluate, values: Any, count: Tensor, *others: Any) -> Any:
        return values[0] + 1, body(evaluate, values[1], *others)

    count = as_tensor(count)
    return loop(evaluate, left, step, (torch.zeros_like(count), values), count, *others)[1]


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
    # Its wrapper stays in Python: inductor's wrapper in C++ is a third faster in loops, but of nested ones it computes
    # something else (PyTorch 2.13: the same graph, trajectories of NUTS that end too early).
    # Without an environment of shapes, inductor doesn't use its cache on disk.
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))):
        return torch._inductor.compile(graph, [*inputs], options=OPTIONS)


# small steps --------------------------------------------------------------------------------------------------------


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


def _apart(values: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors, contiguous, with copies of those that share memory with another or with one of the others."""
    taken = {value.untyped_storage()._cdata for value in others}
    found = []
    for value in values:
        value = value.contiguous()
        if value.untyped_storage()._cdata in taken:
            value = value.clone(memory_format=torch.contiguous_format)
        taken.add(value.untyped_storage()._cdata)
        found.append(value)
    return tuple(found)
