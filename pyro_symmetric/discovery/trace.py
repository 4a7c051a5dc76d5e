"""From a module to a graph of plain ATen operators, and labels carried through it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.modules.conv import _ConvNd

from pyro_symmetric._process import without_fast_attention, without_messages, without_warnings
from pyro_symmetric.discovery.facts import Facts
from pyro_symmetric.discovery.labeller import Labeller
from pyro_symmetric.discovery.labels import Value, opaque
from pyro_symmetric.discovery.rules.registry import Call, rule_for
from pyro_symmetric.discovery.rules.spatial import convolution

# Statistics that a module keeps about its units: they move along. All other buffers are constants of the architecture.
RUNNING_STATISTICS = ("running_mean", "running_var", "_u", "_v", "weight_u", "weight_v")

UNTRACEABLE = """\
{net} can't be traced by torch.export ({error}).

find_symmetry follows the operators of one forward pass, so the pass may not depend on the numbers that flow through it
(no `if x.sum() > 0`, no `.item()`). Either trace the part that has no such branches, or declare the group by hand:

    group = ps.Group.declare(
        {{"0.weight": ("hidden", None), "0.bias": ("hidden",), "2.weight": (None, "hidden")}},  # per axis
        dict(net.named_parameters()),
    )"""


class UntraceableError(ValueError):
    """The network can't be traced; the message says why, and what to do instead."""


class UnknownOperator(UserWarning):
    """An operator without a rule was met; what reaches it was left out of the group."""


class Trace:
    """The functional graph of one forward pass, with in-place operators turned into pure ones.

    Operators without a rule are taken apart into others, if PyTorch knows how.

    :ivar program: the graph.
    :ivar returned: the nodes whose values the network returns (and not those that are written back to buffers).
    :raises UntraceableError: if there is no such graph.
    """

    def __init__(self, net: nn.Module, inputs: Sequence[Any]):
        self.net = net
        self.program = _exported(net, inputs)
        signature = self.program.graph_signature
        self._specs = {spec.arg.name: spec for spec in signature.input_specs if hasattr(spec.arg, "name")}
        flat = torch.utils._pytree.tree_leaves(self.program.graph.output_node().args[0])
        ends = [n for n, s in zip(flat, signature.output_specs, strict=True) if s.kind == OutputKind.USER_OUTPUT]
        self.returned = [node for node in ends if isinstance(node, torch.fx.Node)]
        self._sites = site_names(net)

    def propagate(self, facts: Facts) -> dict[torch.fx.Node, Any]:
        """Carry labels through the graph, recording facts; returns the labels of every node's value."""
        values: dict[torch.fx.Node, Any] = {}
        labeller = Labeller(facts)
        for node in self.program.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                values[node] = self._input(node, facts)
            elif node.op == "call_function":
                values[node] = _apply(node, values, labeller, self.returned)
        labeller.where = "the network's output"
        for node in self.returned:
            if isinstance(values[node], Value):
                labeller.pin(values[node])
        return values

    def used_sites(self) -> set[str]:
        """The parameters and buffers that the graph reads."""
        used = [node.name for node in self.program.graph.nodes if node.op == "placeholder" and node.users]
        targets = [self._specs[name].target for name in used if name in self._specs]
        return {self._sites.get(target, target) for target in targets if target}

    def shifted_biases(self, logits: bool) -> set[str]:
        """The bias of the last linear layer, if nothing but a softmax over its units follows.

        :param logits: whether that softmax comes after the network.
        """
        aten = torch.ops.aten
        if len(self.returned) != 1:
            return set()
        node: Any = self.returned[0]
        softmax = logits
        if node.target in (aten._softmax.default, aten._log_softmax.default):
            dims = node.meta["val"].dim()
            softmax = node.args[1] % dims == dims - 1
            node = node.args[0]
        if not softmax or node.target is not aten.linear.default or len(node.users) != 1 or len(node.args) < 3:
            return set()
        bias = node.args[2]
        spec = self._specs.get(bias.name) if isinstance(bias, torch.fx.Node) and len(bias.users) == 1 else None
        return {self._sites[spec.target]} if spec is not None and spec.kind == InputKind.PARAMETER else set()

    def _input(self, node: torch.fx.Node, facts: Facts) -> Any:
        value, spec = node.meta.get("val"), self._specs.get(node.name)
        if not isinstance(value, Tensor):
            return value
        if spec is None or spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            return opaque(value.shape)
        site = self._sites.get(spec.target, spec.target)
        if spec.kind == InputKind.PARAMETER:
            return self._parameter(node, site, spec.target, facts)
        statistic = spec.kind == InputKind.BUFFER and spec.target.rsplit(".", 1)[-1] in RUNNING_STATISTICS
        if not (statistic and value.is_floating_point()):
            constants = {**self.program.constants, **self.program.state_dict}
            return opaque(value.shape, _small(constants.get(spec.target)))
        leaf = facts.leaf(site, value.shape, buffer=True)
        if "running" not in spec.target:  # singular vectors have length one: they keep it
            for part in leaf.parts:
                facts.still(part.atoms, sign=False)
        return leaf.value()

    def _parameter(self, node: torch.fx.Node, site: str, name: str, facts: Facts) -> Value:
        groups = _kernel_groups(node)
        leaf = facts.leaf(site, node.meta["val"].shape, groups=groups)
        module = self.net.get_submodule(name.partition(".parametrizations.")[0].rpartition(".")[0])
        for part in leaf.parts[2:] if isinstance(module, _ConvNd) else ():
            facts.pin(part.atoms, f"the pixels of a convolution's kernel in {name.rpartition('.')[0]}")
        if leaf.groups not in (1, groups):  # a grouped kernel that is tied to something else: its columns stay
            facts.pin(leaf.columns, f"the other use of {leaf.site} as {name}")
            return replace(leaf.value(), parts=(leaf.parts[0], *leaf.parts[2:]), fixed=frozenset({1}))
        return leaf.value()


def _exported(net: nn.Module, inputs: Sequence[Any]) -> ExportedProgram:
    with _quiet(), torch.enable_grad():
        try:
            program = torch.export.export(net, tuple(inputs), strict=False)
            table = torch.export.default_decompositions()
            return program.run_decompositions({op: steps for op, steps in table.items() if rule_for(op) is None})
        except Exception as error:  # torch.export raises whatever the forward pass met
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            raise UntraceableError(UNTRACEABLE.format(net=type(net).__name__, error=reason)) from error


def try_out(net: nn.Module, inputs: Sequence[Any]) -> None:
    """Run the network as its user would, so that inputs which don't fit aren't taken for a graph that can't be had.

    :raises ValueError: if it doesn't take them.
    """
    try:
        with _quiet(), torch.no_grad():
            net(*inputs)
    except Exception as error:
        raise unfit(net, inputs, error) from error


def unfit(net: nn.Module, inputs: Sequence[Any], error: Exception) -> ValueError:
    """What to raise if a network fails on the user's inputs."""
    shapes = [tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in inputs]
    return ValueError(
        f"{type(net).__name__} fails on the example inputs, of shapes {shapes}: {type(error).__name__}: {error}"
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No fused fast paths (they hide attention from us), no warnings about torch.export's own insides.

    If the pass branches on numbers, torch.export prints the graph so far before it raises.
    """
    with without_fast_attention(), without_warnings(), without_messages("torch.fx.experimental.symbolic_shapes"):
        yield


def site_names(net: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> its first name: tied weights are one site."""
    first: dict[int, str] = {}
    names = {}
    for name, tensor in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
        names[name] = first.setdefault(id(tensor), name)
    return names


def _kernel_groups(node: torch.fx.Node) -> int:
    """Of how many groups the convolutions are that this is the kernel of; 1 if anything else reads it."""
    found = set()
    for user in node.users:
        if rule_for(user.target) is not convolution:
            return 1
        target: Any = user.target
        call = _bound(target._schema, user.args, user.kwargs)
        if call["weight"] is not node or call["input"] is node or call["bias"] is node:
            return 1
        found.add(int(call["groups"]))
    return found.pop() if len(found) == 1 else 1


def _small(constant: Any) -> Tensor | None:
    """Index maps are worth remembering; anything else is data."""
    if not isinstance(constant, Tensor) or constant.is_floating_point() or constant.is_complex():
        return None
    return constant.detach().cpu() if type(constant) is Tensor else None


def _apply(
    node: torch.fx.Node, values: dict[torch.fx.Node, Any], labeller: Labeller, returned: Sequence[torch.fx.Node]
) -> Any:
    target: Any = node.target
    args: Any = torch.fx.map_arg(node.args, lambda n: values[n])
    kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: values[n])
    if target is operator.getitem:
        return args[0][int(args[1])] if isinstance(args[0], list | tuple) else args[0]
    shapes, floating = _results(node)
    if not shapes:  # a number, or nothing
        return node.meta.get("val")
    schema = getattr(target, "_schema", None)
    given = (
        _bound(schema, args, kwargs) if schema is not None else {"args": list(args), "kwargs": list(kwargs.values())}
    )
    call = Call(target, given, shapes, floating, _read(node, len(shapes), returned))
    labeller.where = f"{call.name} in {_module(node)}"
    rule = rule_for(target)
    if rule is None:
        results = [labeller.give_up(call.operands, shape, "there is no rule") for shape in shapes]
    else:
        result = rule(labeller, call)
        results = [result] if isinstance(result, Value) else list(result)
    if [tuple(r.shape) for r in results] != [tuple(s) for s in shapes]:
        raise RuntimeError(f"the rule of {labeller.where} gave shapes {[r.shape for r in results]}, not {list(shapes)}")
    if call.operands:
        results = [replace(r, constant=c) for r, c in zip(results, _constants(call, args, kwargs), strict=True)]
    return results if isinstance(node.meta["val"], list | tuple) else results[0]


def _constants(call: Call, args: Any, kwargs: Any) -> list[Tensor | None]:
    """The results themselves, if they are index maps and come from nothing but index maps."""
    if call.floating or any(value.constant is None for value in call.operands):
        return [None] * len(call.shapes)
    own = torch.utils._pytree.tree_map(lambda x: x.constant if isinstance(x, Value) else x, (args, kwargs))
    return [_small(t) for t in torch.utils._pytree.tree_leaves(call.target(*own[0], **own[1]))]


def _read(node: torch.fx.Node, count: int, returned: Sequence[torch.fx.Node]) -> tuple[bool, ...]:
    """Which results something reads, or the network returns (and not only buffers keep)."""
    if count == 1:
        return (True,)
    items: dict[Any, Any] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    used = {k for k, item in items.items() if item in returned or any(user.op != "output" for user in item.users)}
    return tuple(k in used for k in range(count))


def _results(node: torch.fx.Node) -> tuple[tuple[tuple[int, ...], ...], bool]:
    value = node.meta.get("val")
    tensors = [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]
    floating = bool(tensors) and (tensors[0].is_floating_point() or tensors[0].is_complex())
    return tuple(tuple(int(n) for n in t.shape) for t in tensors), floating


def _bound(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults."""
    bound = {argument.name: argument.default_value for argument in schema.arguments}
    bound |= dict(zip([argument.name for argument in schema.arguments], args, strict=False))
    return bound | dict(kwargs)


def _module(node: torch.fx.Node) -> str:
    """The innermost module that the operator was called in."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "")
    kind = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    path = path.removeprefix("L['self'].").removeprefix("L['self']")
    kind = kind.rsplit(".", 1)[-1]
    return f"{path} ({kind})" if path else (kind or "the network")


def has_training_branch(net: nn.Module) -> bool:
    """Whether some module (PyTorch's own apart, which are known) asks if it is being trained."""
    kinds: set[Any] = {type(module) for module in net.modules()}
    return any("self.training" in _source(kind) for kind in kinds)


@functools.cache
def _source(kind: Any) -> str:
    if kind.__module__.startswith("torch.nn."):
        return ""
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""
