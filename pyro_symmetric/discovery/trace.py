"""From a network to the graph of one forward pass, and axes that flow through it.

Whatever a forward pass takes and returns, the graph is a function from tensors to tensors. These are found wherever
they are: in lists, dictionaries, dataclasses, distributions, or objects of other libraries. Everything else among the
inputs is part of the architecture. Among the outputs, caches are left out: they hold what a later call may reuse, in
which heads and channels keep their order.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, Node
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import (
    drawn_seed,
    forked,
    running_pyro,
    with_both_branches,
    without_fast_attention,
    without_messages,
    without_warnings,
)
from pyro_symmetric.discovery.flow import Array, Flow, Value, opaque
from pyro_symmetric.discovery.rules.registry import Call, bound, operator_name, rule_for
from pyro_symmetric.discovery.symmetry import in_precision
from pyro_symmetric.errors import Error

UNTRACEABLE = """\
{net} can't be traced by torch.export ({error}). A forward pass may not depend on the
numbers that flow through it (no `if x.sum() > 0`). Trace the part that has no such branches, or declare the group:

    group = ps.Group.declare(
        {{"0.weight": ("hidden", None), "0.bias": ("hidden",), "2.weight": (None, "hidden")}},  # per axis
        dict(net.named_parameters()),
    )"""

# Buffers with one number for each unit, which move along: statistics of normalisations, singular vectors.
STATISTICS = frozenset(["running_mean", "running_var", "weight", "bias", "_u", "_v", "weight_u", "weight_v"])
# Operators of which a matrix that is cut into slices keeps the slices.
CUTTING = frozenset(["slice", "split", "split_with_sizes", "unsafe_split_with_sizes"])
# A matrix with more entries isn't cut: units of slices are found entry by entry.
CUT_LIMIT = 2**22
STAND_IN = 101  # a prime number in place of sizes that depend on data
CACHES = frozenset({"past_key_value", "past_key_values", "past_buckets_states", "cache_params", "mems"})


class UntraceableError(Error, ValueError):
    """The network can't be traced; the message says why, and what to do instead."""


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
    :raises ValueError: if the network returns no tensor.
    """

    def __init__(self, net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None):
        self.net = net
        with forked(drawn_seed(), host=True):  # what is drawn from NumPy or Python stands for all that may be
            function = TensorsOnly(net, args, kwargs)
            self.program = _exported(function)
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
        if not self.returned:
            raise ValueError(f"{type(net).__name__} returns no tensor: there is nothing for a symmetry to leave alone")

    def propagate(self, flow: Flow) -> None:
        """Let axes flow through the graph."""
        values: dict[Node, Any] = {}
        for node in _needed(self._graph):
            if node.op in ("placeholder", "get_attr"):
                values[node] = self._input(node, flow)
            elif node.op == "call_function":
                flow.where = f"{operator_name(node.target)} in {_module_of(node)}"
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
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # loads SymPy, which takes long

        args: Any = torch.fx.map_arg(node.args, values.__getitem__)
        kwargs: Any = torch.fx.map_arg(node.kwargs, values.__getitem__)
        if node.target is operator.getitem:
            return args[0][int(args[1])] if isinstance(args[0], list | tuple) else args[0]
        tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
        if not tensors:
            return _number(node, args, flow)
        shapes = tuple(tuple(map(_closed, t.shape)) for t in tensors)
        call = Call(node.target, bound(node.target, args, kwargs), shapes, self._read(node))
        try:
            results = _results(call, flow)
            constants = _constants(call, args, kwargs, tensors)
            results = [
                replace(r, constant=r.constant if c is None else c) for r, c in zip(results, constants, strict=True)
            ]
        except GuardOnDataDependentSymNode:  # a number that the rule has read
            results = [flow.give_up(call.operands, shape, "a place or a size depends on data") for shape in shapes]
        known = [all(isinstance(n, int) for n in t.shape) for t in tensors]
        left = (
            replace(r, constant=r.constant if k else None, mask=t.dtype == torch.bool)
            for r, k, t in zip(results, known, tensors, strict=True)
        )
        return tree_map(lambda own: next(left) if isinstance(own, Tensor) else own, node.meta["val"])

    def _read(self, node: Node) -> frozenset[int]:
        """The numbers of the results that something reads, or the network returns (and not only buffers keep)."""
        items = [user for user in node.users if user.target is operator.getitem]
        return frozenset(
            int(item.args[1])  # type: ignore[arg-type]
            for item in items
            if item in self.returned or any(user.op != "output" for user in item.users)
        )


def _needed(graph: Graph) -> list[Node]:
    """Nodes of results, of new values of buffers, and of inputs; only assertions read all others."""
    needed = {graph.output_node()}
    for node in reversed(graph.nodes):
        if node.op != "call_function" or any(user in needed for user in node.users):
            needed.add(node)
    return [node for node in graph.nodes if node in needed]


def _module_of(node: Node) -> str:
    """The innermost module that the operator was called in."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "the network")
    path, kind = path.removeprefix("net").removeprefix("."), getattr(kind, "__name__", kind).rsplit(".", 1)[-1]
    return f"{path} ({kind})" if path else kind


def _closed(size: Any) -> int:
    """A size, or a stand-in for one that depends on data, as that of what a mask selects: no axis of units has such."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, STAND_IN)))


def _results(call: Call, flow: Flow) -> list[Value]:
    """Apply the rule of an operator; nothing is known of results that it leaves out."""
    rule = rule_for(call.target)
    if rule is None:
        return [flow.give_up(call.operands, shape, "there is no rule") for shape in call.shapes]
    given = rule(flow, call)
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
    own = tree_map(lambda x: x.constant if isinstance(x, Value) else x, (args, kwargs))
    real = tensors[0].is_floating_point() or tensors[0].is_complex()
    numbers_of_data = any(isinstance(x, torch.SymInt | torch.SymFloat) for x in tree_leaves(own))
    if real or numbers_of_data or not call.operands or any(value.constant is None for value in call.operands):
        return [None] * len(tensors)
    return [_index_map(t) for t in tree_leaves(call.target(*own[0], **own[1]))]


def _number(node: Node, args: Any, flow: Flow) -> Any:
    """A number that an operator reads off a tensor, in which nothing moves then; sizes and assertions don't matter."""
    if not getattr(node.target, "__name__", "").startswith(("sym_", "_assert")):
        for value in args:
            if isinstance(value, Value):
                flow.pin(value)
    return node.meta.get("val")


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


# from a module to its graph -----------------------------------------------------------------------------------------


def site_names(net: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> its first name: tied weights are one site."""
    first: dict[int, str] = {}
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def try_out(net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
    """Run the network as its user would, so that inputs which don't fit aren't taken for a graph that can't be had.

    :raises ValueError: if it doesn't take them.
    """
    try:
        with _quiet(), torch.no_grad():
            net(*args, **(kwargs or {}))
    except Exception as error:
        where = f"{type(net).__name__} fails on the example inputs"
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from None


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
        return list(_outputs_in(self.net(*args, **kwargs)))


class _Met(TorchFunctionMode):
    """Notes the different tensors that are to be copied, and doesn't copy them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            return self.tensors.setdefault(id(args[0]), args[0])
        return func(*args, **(kwargs or {}))


def _outputs_in(value: Any, name: str = "") -> Iterator[Tensor]:
    """The tensors of what a network returns; caches, numbers and texts are left out.

    :param name: the attribute or key that the value was found under.
    """
    if name in CACHES or type(value).__name__.endswith("Cache") or isinstance(value, type | str | nn.Module):
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from _outputs_in(entry)
    elif isinstance(value, Mapping) or not callable(value):  # a dataclass, a distribution, or whatever has attributes
        for key, entry in (value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).items():
            yield from _outputs_in(entry, str(key))


def _exported(net: TensorsOnly) -> ExportedProgram:
    """The functional graph of one forward pass; operators without a rule are taken apart, if PyTorch knows how.

    :raises UntraceableError: if there is none.
    """
    # Distributions check their arguments.
    with running_pyro(), _quiet(), with_both_branches(), torch.enable_grad():
        try:
            program = torch.export.export(net, tuple(net.tensors), strict=False)
            if _made_pure(program.graph):
                return program
            table = torch.export.default_decompositions()
            return program.run_decompositions({op: steps for op, steps in table.items() if rule_for(op) is None})
        except Exception as error:  # torch.export raises whatever the forward pass met
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            raise UntraceableError(UNTRACEABLE.format(net=type(net.net).__name__, error=reason)) from error


def _made_pure(graph: Graph) -> bool:
    """Turn operators that write into their first operand into those that don't; true if all operators have rules then.

    PyTorch does this, too, and takes operators apart besides, in twice the time that all else takes. It is needed if a
    view of what is written may be read as well.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            packet, written = node.target.overloadpacket.__name__, node.args[0]
            home = torch.ops.aten if node.target.namespace == "aten" else None
            pure = getattr(getattr(home, packet.removesuffix("_"), None), node.target._overloadname, None)
            if pure is None or pure is node.target or any(map(_is_view, (written, *written.users))):
                return False
            node.target = pure
            written.replace_all_uses_with(node, delete_user_cb=lambda user, at=node: user > at)
        if not isinstance(node.target, OpOverload) or (node.target._schema.returns and rule_for(node.target) is None):
            return False
    return True


def _is_view(node: Node) -> bool:
    """True if the result of an operator may share its numbers with an operand."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
        return operator_name(node.target) != "batch_norm"
    schema = node.target._schema
    return not schema.is_mutable and any(out.alias_info for out in schema.returns)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No fused fast paths (they hide attention from us), no warnings about torch.export's own insides.

    If the pass branches on numbers, or shapes don't fit, torch.export prints the graph, or a traceback, before it
    raises.
    """
    talkative = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    with without_fast_attention(), without_warnings(), without_messages(*talkative):
        yield


# runs in one precision, without noise -------------------------------------------------------------------------------

aten = torch.ops.aten
Mean = Callable[[Mapping[str, Any]], float]
# Masks and noise, and the means that take their place, by their arguments.
MASKS: dict[Any, Mean] = dict.fromkeys((aten.bernoulli.p, aten.bernoulli_.float), lambda given: given["p"])
MEANS: dict[Any, Mean] = {
    **dict.fromkeys((aten.randn, aten.randn_like), lambda given: 0.0),
    **dict.fromkeys((aten.rand, aten.rand_like), lambda given: 0.5),
    aten.normal_: lambda given: given["mean"],
    aten.uniform_: lambda given: (given["from"] + given["to"]) / 2,
    aten.exponential_: lambda given: 1 / given["lambd"],
}


class Deterministic(TorchDispatchMode):
    """Masks of dropout have the value of their mean, and all real and complex numbers have one precision.

    So dropout and stochastic depth do nothing, whoever calls them, and no rounding hides behind a cast.

    :param dtype: the precision.
    :param noise: whether random numbers are drawn; otherwise normal, uniform and exponential ones are their means.
    """

    def __init__(self, dtype: torch.dtype, noise: bool = True):
        super().__init__()
        self.dtype, self.noise = dtype, noise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet, schema = getattr(func, "overloadpacket", func), getattr(func, "_schema", None)
        mean = MASKS.get(func) or (None if self.noise else MEANS.get(packet))
        if mean is not None:
            return func(*args, **kwargs).fill_(mean(bound(func, args, kwargs)))
        if packet is aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if packet is aten.rrelu_with_noise and len(args) > 4:  # without train mode
            args = (*args[:4], False, *args[5:])
        writes = schema is not None and schema.is_mutable and bool(args)
        if not writes or self._in_precision(args[0]) is args[0]:  # else it would write into a copy
            args, kwargs = tree_map(self._in_precision, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        made = isinstance(result, Tensor) and not any(isinstance(x, Tensor) for x in (*args, *kwargs.values()))
        return self._in_precision(result) if made else result

    def _in_precision(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return in_precision(value, self.dtype)
        return value.to(in_precision(value.dtype, self.dtype)) if isinstance(value, Tensor) else value
