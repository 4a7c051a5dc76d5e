"""The graph of a forward pass, and axes that flow through it."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.export import exported, site_names
from pyro_symmetric.discovery.flow import Flow
from pyro_symmetric.discovery.rules.pointwise import drawn
from pyro_symmetric.discovery.rules.registry import Call, bound, operator_name, rule_for
from pyro_symmetric.discovery.tensors_only import TensorsOnly
from pyro_symmetric.discovery.values import Value, opaque

# Buffers with one number for each unit, which move along: statistics of normalisations, singular vectors.
STATISTICS = frozenset(["running_mean", "running_var", "weight", "bias", "_u", "_v", "weight_u", "weight_v"])
# Operators of which a matrix that is cut into slices keeps the slices.
CUTTING = frozenset(["slice", "split", "split_with_sizes", "unsafe_split_with_sizes"])
# A matrix with more entries isn't cut: units of slices are found entry by entry.
CUT_LIMIT = 2**22
# Sizes that depend on the data, of what a mask selects, say, have symbols. Such an axis is never labelled, so that its
# length doesn't matter: each symbol has a prime number as its stand-in, of which this is the number of the first.
FIRST = 26
# Operators that take such a size (or a factor) and make no other use of its value.
TAKE_SIZES = """view _unsafe_view reshape expand full full_like empty zeros ones new_full new_empty rand randn arange
    mul div add sub""".split()  # noqa: SIM905


class UnknownOperator(UserWarning):
    """An operator without a rule was met; what reaches it was left out of the group."""


class Trace:
    """The functional graph of one forward pass, with in-place operators turned into pure ones.

    Operators without a rule are taken apart into others, if PyTorch knows how.

    :param net: the network; what tracing leaves behind stays in it.
    :param args: an example of what its forward pass takes; so are ``kwargs``.
    :ivar program: the graph.
    :ivar specs: what the graph takes, in this order, by the names that the network has for it.
    :ivar tensors: the tensors among the example inputs, in the order in which the graph takes them.
    :ivar returned: the nodes whose values the network returns (and not those that are written back to buffers).
    :raises UntraceableError: if there is no such graph.
    """

    def __init__(self, net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None):
        self.net = net
        with forked(drawn_seed(), host=True):
            function = TensorsOnly(net, args, kwargs)
            self.program = exported(function)
        self.tensors = function.tensors
        signature = self.program.graph_signature
        self.specs = [
            replace(spec, target=spec.target and spec.target.removeprefix("net.")) for spec in signature.input_specs
        ]
        self._specs = {spec.arg.name: spec for spec in self.specs if hasattr(spec.arg, "name")}
        self._sites = site_names(net)
        self._graph = self.program.graph
        ends = tree_leaves(self._graph.output_node().args[0])
        ends = [n for n, s in zip(ends, signature.output_specs, strict=True) if s.kind == OutputKind.USER_OUTPUT]
        self.returned = [node for node in ends if isinstance(node, Node)]

    def propagate(self, flow: Flow) -> None:
        """Let axes flow through the graph."""
        values: dict[Node, Any] = {}
        needed = _needed(self._graph)
        for node in self._graph.nodes:
            if node in needed and node.op in ("placeholder", "get_attr"):
                values[node] = self._input(node, flow)
            elif node in needed and node.op == "call_function":
                flow.where = f"{operator_name(node.target)} in {_module_of(node)}{self._circumstances(node)}"
                values[node] = self._applied(node, values, flow)
        flow.where = "the network's output"
        for node in self.returned:
            if isinstance(values[node], Value):
                flow.pin(values[node])

    def constant(self, target: str | None) -> Any:
        """The value of a buffer or a constant of the graph, by its name in the network."""
        every = self.program.state_dict, self.program.constants
        found = (held.get(name) for name in (f"net.{target}", str(target)) for held in every)
        return next((value for value in found if value is not None), None)

    def used_sites(self) -> set[str]:
        """The parameters and buffers that the graph reads."""
        used = [node.name for node in self._graph.nodes if node.op == "placeholder" and node.users]
        targets = [self._specs[name].target for name in used if name in self._specs]
        return {self._sites.get(target, target) for target in targets if target}

    def calls_again(self) -> bool:
        """True if a module with parameters is called more than once."""
        stacks = (node.meta.get("nn_module_stack") or {} for node in self._graph.nodes)
        again = {path.removeprefix("net.") for stack in stacks for key, (path, _) in stack.items() if "@" in key}
        return any(site.startswith(f"{path}.") for path in again for site in self._sites.values())

    # small steps ----------------------------------------------------------------------------------------------------

    def _circumstances(self, node: Node) -> str:
        """The values that meet the units there besides, in words that a network's author knows."""
        near = [*node.all_input_nodes, *(n for own in node.all_input_nodes for n in own.all_input_nodes)]
        random = next((operator_name(n.target) for n in near if rule_for(n.target) is drawn), None)
        if random:
            return f" with random numbers ({random})"
        specs = [self._specs[n.name] for n in node.all_input_nodes if n.op == "placeholder" and n.name in self._specs]
        if any(spec.kind == InputKind.USER_INPUT for spec in specs):
            return " with the network's input"
        constant = next((spec.target for spec in specs if spec.kind != InputKind.PARAMETER), None)
        return f" with the constant {constant}" if constant else ""

    def _input(self, node: Node, flow: Flow) -> Any:
        value, spec = node.meta.get("val"), self._specs.get(node.name)
        if not isinstance(value, Tensor):
            return value
        mask = value.dtype == torch.bool
        if spec is None or spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            return opaque(value.shape, mask=mask)
        module, _, own = str(spec.target).rpartition(".")
        site = self._sites.get(spec.target, spec.target)
        if spec.kind == InputKind.PARAMETER:
            home = self.net.get_submodule(module.partition(".parametrizations.")[0])
            return flow.leaf(site, value.shape, kernel=isinstance(home, _ConvNd), slices=_slices(node)).value
        statistic = spec.kind == InputKind.BUFFER and spec.persistent and own in STATISTICS
        if statistic and value.is_floating_point() and value.dim() == 1:
            return flow.leaf(site, value.shape, buffer=True).value
        return opaque(value.shape, _index_map(self.constant(spec.target)), mask)

    def _applied(self, node: Node, values: Mapping[Node, Any], flow: Flow) -> Any:
        """Apply the rule of an operator to what is known of its operands."""
        args: Any = torch.fx.map_arg(node.args, lambda n: values[n])
        kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: values[n])
        if node.target is operator.getitem:
            return args[0][int(args[1])] if isinstance(args[0], list | tuple) else args[0]
        tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        if not tensors:
            return _number(node, args, flow)
        rule = rule_for(node.target)
        given = bound(node.target, args, kwargs)
        call = Call(node.target, given, tuple(tuple(_closed(n) for n in t.shape) for t in tensors), self._read(node))
        open_sizes = any(_is_open(n.meta.get("val")) for n in node.all_input_nodes)
        if open_sizes and _minds_sizes(call):
            results = [flow.give_up(call.operands, s, "a place or a size depends on data") for s in call.shapes]
        elif rule is None:
            results = [flow.give_up(call.operands, s, "there is no rule") for s in call.shapes]
        else:
            results = _results(rule(flow, call), call, flow)
        known = not open_sizes and not any(_is_open(n) for t in tensors for n in t.shape)
        constants = _constants(call, args, kwargs, tensors) if known else [None] * len(tensors)
        results = [
            replace(r, constant=r.constant if known and c is None else c, mask=t.dtype == torch.bool)
            for r, c, t in zip(results, constants, tensors, strict=True)
        ]
        left = iter(results)
        return tree_map(lambda own: next(left) if isinstance(own, Tensor) else own, node.meta["val"])

    def _read(self, node: Node) -> frozenset[int]:
        """The numbers of the results that something reads, or the network returns (and not only buffers keep)."""
        items = [user for user in node.users if user.target is operator.getitem]
        return frozenset(
            int(item.args[1])  # type: ignore[arg-type]
            for item in items
            if item in self.returned or any(user.op != "output" for user in item.users)
        )


def _module_of(node: Node) -> str:
    """The innermost module that the operator was called in."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "the network")
    path, kind = path.removeprefix("net").removeprefix("."), getattr(kind, "__name__", kind).rsplit(".", 1)[-1]
    return f"{path} ({kind})" if path else kind


def _results(given: Any, call: Call, flow: Flow) -> list[Value]:
    """A rule's results; nothing is known of those that it leaves out."""
    results = [given] if isinstance(given, Value) else list(given or ())
    if not results or not all(isinstance(value, Value) for value in results):
        raise TypeError(f"the rule of {flow.where} returned {given!r}; it must return what the flow's methods do")
    left_out = call.shapes[len(results) :]
    if left_out and any(number >= len(results) for number in call.read):
        return [flow.give_up(call.operands, shape, "its statistics are read") for shape in call.shapes]
    results += map(opaque, left_out)
    if [tuple(r.shape) for r in results] != list(call.shapes):
        raise RuntimeError(f"the rule of {flow.where} gave shapes {[r.shape for r in results]}, not {call.shapes}")
    return results


def _index_map(constant: Any) -> Tensor | None:
    """Index maps are worth remembering; anything else is data."""
    if not isinstance(constant, Tensor) or constant.is_floating_point() or constant.is_complex():
        return None
    return constant.detach().cpu() if type(constant) is Tensor else None


def _constants(call: Call, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The results themselves, if they are index maps and come from nothing but index maps."""
    operands, real = call.operands, tensors[0].is_floating_point() or tensors[0].is_complex()
    if real or not operands or any(value.constant is None for value in operands):
        return [None] * len(tensors)
    own = tree_map(lambda x: x.constant if isinstance(x, Value) else x, (args, kwargs))
    return [_index_map(t) for t in tree_leaves(call.target(*own[0], **own[1]))]


def _number(node: Node, args: Any, flow: Flow) -> Any:
    """A number that an operator reads off a tensor, in which nothing moves then; sizes and assertions don't matter."""
    name = getattr(node.target, "__name__", "")
    if not name.startswith(("sym_", "_assert")):
        for value in args:
            if isinstance(value, Value):
                flow.pin(value)
    return _closed(node.meta.get("val"))


def _minds_sizes(call: Call) -> bool:
    """True if an operator does more with a size that depends on the data than make a tensor of that size."""
    if call.name in ("split_with_sizes", "unsafe_split_with_sizes"):
        return call.value.part_on(call.axis) is not None
    return call.name not in TAKE_SIZES


def _is_open(value: Any) -> bool:
    """True if a number is known only when data flows."""
    return isinstance(value, torch.SymInt | torch.SymFloat) and bool(value.node.expr.free_symbols)


def _closed(value: Any) -> Any:
    """A number, or its stand-in; no stand-in of a fraction may be taken for a number that is known."""
    if isinstance(value, torch.SymFloat) and _is_open(value):
        return float("nan")
    if not isinstance(value, torch.SymInt):
        return value
    from sympy import prime

    symbols = value.node.expr.free_symbols
    return int(value.node.expr.subs({s: prime(FIRST + int(re.sub(r"\D", "", s.name) or 0)) for s in symbols}))


def _slices(node: Node) -> Array | None:
    """The slice of each row of a matrix, if they read other inputs each: groups of a kernel, or what is cut apart."""
    shape, pieces = tuple(node.meta["val"].shape), set[tuple[int, int]]()
    users = [(user, bound(user.target, user.args, user.kwargs)) for user in node.users]
    groups = {call["groups"] if call.get("weight") is node and "groups" in call else 1 for _, call in users}
    if len(groups) == 1 and min(groups) > 1 < shape[1]:
        return np.arange(shape[0]) * groups.pop() // shape[0]
    if len(shape) != 2 or shape[0] * shape[1] > CUT_LIMIT:
        return None
    for user, call in users:
        if operator_name(user.target) not in CUTTING or call["dim"] % 2 or call.get("step", 1) != 1:
            return None
        start = range(shape[0])[call.get("start") : call.get("end")].start
        for piece in tree_leaves(user.meta["val"]):
            pieces.add((start, start + piece.shape[0]))
            start += piece.shape[0]
    starts, ends = zip(*sorted(pieces), strict=True) if pieces else ((), ())
    if len(starts) < 2 or (*starts, shape[0]) != (0, *ends):  # a single piece, or with gaps, or one inside another
        return None
    return np.searchsorted(starts, np.arange(shape[0]), side="right") - 1


def _needed(graph: Graph) -> set[Node]:
    """Nodes of results, of new values of buffers, and of inputs; only assertions read all others."""
    needed = {graph.output_node()}
    for node in reversed(graph.nodes):
        if node.op != "call_function" or any(user in needed for user in node.users):
            needed.add(node)
    return needed
