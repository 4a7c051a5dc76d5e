"""One pass over a traced graph, which lets axes flow through every operator."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric.discovery.flow import (
    CONSTANT_LIMIT,
    SLICED_LIMIT,
    Flow,
    as_constant,
)
from pyro_symmetric.discovery.registry import (
    CARRIERS,
    Array,
    Call,
    Value,
    bound,
    opaque,
    operator_name,
    rule_for,
)
from pyro_symmetric.discovery.trace import Trace

# Buffers with one number for each unit, which move along: statistics of normalisations,
# singular vectors.
STATISTICS = frozenset(
    [
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "_u",
        "_v",
        "weight_u",
        "weight_v",
    ]
)
SPLITS = frozenset(["slice", "split", "split_with_sizes", "unsafe_split_with_sizes"])
STAND_IN = 101  # a prime number in place of sizes that depend on data


def propagate(flow: Flow, trace: Trace) -> None:
    """Let axes flow through the graph of a forward pass: apply every operator's rule,
    then pin the outputs.
    """
    values: dict[Node, Any] = {}
    for node in trace.nodes():
        if node.op == "call_function":
            flow.operator = f"{operator_name(node.target)} in {_module_of(node)}"
            values[node] = _apply_rule(flow, trace, node, values)
        else:
            values[node] = _leaf(flow, trace, node)
    flow.operator = "the network's output"
    for node in trace.returned:
        if isinstance(values[node], Value):
            flow.pin(values[node])


# small steps -------------------------------------------------------------------------


def _leaf(flow: Flow, trace: Trace, node: Node) -> Any:
    """Return the value of a graph's input: units along the axes of parameters and
    running statistics only.
    """
    tensor = node.meta.get("val")
    spec = trace.inputs.get(node.name)
    if not isinstance(tensor, Tensor):
        return tensor
    mask = tensor.dtype == torch.bool
    if spec is None or not spec.target:  # data
        return opaque(tensor.shape, mask=mask)
    path, _, name = spec.target.rpartition(".")
    site = trace.sites.get(spec.target, spec.target)
    if spec.kind == InputKind.PARAMETER:
        module = trace.net.get_submodule(path.partition(".parametrizations.")[0])
        return flow.leaf(
            site, tensor.shape, kernel=isinstance(module, _ConvNd), slices=_slices(node)
        ).value
    statistic = spec.kind == InputKind.BUFFER and spec.persistent and name in STATISTICS
    if statistic and tensor.is_floating_point() and tensor.dim() == 1:
        return flow.leaf(site, tensor.shape, buffer=True).value
    constant = trace.constant(spec.target)
    if type(constant) is not Tensor or constant.is_meta:
        return opaque(tensor.shape, mask=mask)
    return flow.known(constant)


def _slices(node: Node) -> Array | None:
    """Return the slice of each row of a matrix whose slices read different inputs:
    groups of a kernel, or splits.
    """
    shape = tuple(node.meta["val"].shape)
    pieces = set[tuple[int, int]]()
    users = [(user, bound(user.target, user.args, user.kwargs)) for user in node.users]
    groups = set()
    for _, call in users:
        is_kernel = call.get("weight") is node and "groups" in call
        groups.add(call["groups"] if is_kernel else 1)
    if len(groups) == 1 and min(groups) > 1 < shape[1]:
        return np.arange(shape[0]) * groups.pop() // shape[0]
    if len(shape) != 2 or shape[0] * shape[1] > SLICED_LIMIT:
        return None
    for user, call in users:
        is_split = operator_name(user.target) in SPLITS
        if not is_split or call["dim"] % 2 or call.get("step", 1) != 1:
            return None
        start = range(shape[0])[call.get("start") : call.get("end")].start
        for piece in tree_leaves(user.meta["val"]):
            pieces.add((start, start + piece.shape[0]))
            start += piece.shape[0]
    starts, ends = zip(*sorted(pieces), strict=True) if pieces else ((), ())
    # a single piece, gaps or overlaps
    if len(starts) < 2 or (*starts, shape[0]) != (0, *ends):
        return None
    return np.searchsorted(starts, np.arange(shape[0]), side="right") - 1


def _apply_rule(
    flow: Flow, trace: Trace, node: Node, values: Mapping[Node, Any]
) -> Any:
    """Return the values of an operator's results, from those of its operands."""
    # loads SymPy, which takes long
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    args: Any = torch.fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = torch.fx.map_arg(node.kwargs, values.__getitem__)
    if node.target is operator.getitem:
        return args[0][int(args[1])] if isinstance(args[0], list | tuple) else args[0]
    tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
    if not tensors:
        return _read_number(flow, node, args)
    shapes = tuple(tuple(map(_concrete, t.shape)) for t in tensors)
    arguments = bound(node.target, args, kwargs)
    call = Call(node.target, arguments, shapes, trace.results_read(node))
    try:
        results = _constants(flow, call, args, kwargs) or _results(flow, call)
    except GuardOnDataDependentSymNode:  # the rule reads a number that depends on data
        results = _given_up(flow, call, "a position or a size depends on data")
    complete = []
    for tensor, result in zip(tensors, results, strict=True):
        constant = result.constant
        if not all(isinstance(n, int) for n in tensor.shape):
            constant = None
        elif constant is not None:  # a rule gives values, not their dtype
            constant = constant.to(tensor.dtype)
        mask = tensor.dtype == torch.bool
        complete.append(replace(result, constant=constant, mask=mask))
    remaining = iter(complete)
    return tree_map(
        lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf,
        node.meta["val"],
    )


def _results(flow: Flow, call: Call) -> list[Value]:
    """Apply the rule of an operator; results that it leaves out are opaque."""
    rule = rule_for(call.target)
    if rule not in CARRIERS:
        arguments = tree_map(
            lambda x: flow.noted(x) if isinstance(x, Value) else x, call.arguments
        )
        call = replace(call, arguments=arguments)
    if rule is None:
        return _given_up(flow, call, "there is no rule")
    returned = rule(flow, call)
    results = [returned] if isinstance(returned, Value) else list(returned or ())
    if not results or not all(isinstance(value, Value) for value in results):
        raise TypeError(
            f"the rule of {flow.operator} returned {returned!r}; it must return what "
            "the flow's methods do"
        )
    left_out = call.shapes[len(results) :]
    if left_out and max(call.read, default=0) >= len(results):
        return _given_up(flow, call, "its statistics are read")
    results += map(opaque, left_out)
    shapes = tuple(tuple(result.shape) for result in results)
    if shapes != call.shapes:
        raise RuntimeError(
            f"the rule of {flow.operator} gave shapes {shapes}, not {call.shapes}"
        )
    return results


def _given_up(flow: Flow, call: Call, why: str) -> list[Value]:
    return [flow.give_up(call.operands, shape, why) for shape in call.shapes]


def _constants(flow: Flow, call: Call, args: Any, kwargs: Any) -> list[Value]:
    """Compute results that depend on constants only; none if they depend on more.

    What is large, or can't be computed on the CPU, is opaque.
    """
    numbers = tree_leaves((args, kwargs))
    if any(isinstance(x, torch.SymInt | torch.SymFloat) for x in numbers):
        return []
    random = torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ())
    known = all(value.constant is not None for value in call.operands)
    if random or not known or call.name.startswith("empty"):
        return []
    results = [opaque(shape) for shape in call.shapes]
    if any(math.prod(shape) > CONSTANT_LIMIT for shape in call.shapes):
        return results if call.operands else []
    args, kwargs = tree_map(
        lambda x: x.constant if isinstance(x, Value) else x, (args, kwargs)
    )
    if kwargs.get("device") is not None:
        kwargs = dict(kwargs, device="cpu")
    with contextlib.suppress(RuntimeError):  # the CPU lacks some half precision
        with torch.no_grad():
            computed = tree_leaves(call.target(*args, **kwargs))
        constants = [as_constant(value) for value in computed]
        for number, constant in enumerate(constants):
            if constant is not None:
                results[number] = flow.known(constant)
    return results


def _read_number(flow: Flow, node: Node, args: Any) -> Any:
    """Pin a tensor off which an operator reads a number; sizes and assertions don't
    matter.
    """
    if not getattr(node.target, "__name__", "").startswith(("sym_", "_assert")):
        for value in args:
            if isinstance(value, Value):
                flow.pin(value)
    return node.meta.get("val")


def _concrete(size: Any) -> int:
    """Return a size, or a stand-in if it depends on data (as that of what a mask
    selects): no units lie there.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, STAND_IN)))


def _module_of(node: Node) -> str:
    """Name the innermost module that calls the operator."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "the network")
    path = path.removeprefix("net").removeprefix(".")
    kind = getattr(kind, "__name__", kind).rpartition(".")[2]
    return f"{path} ({kind})" if path else kind
