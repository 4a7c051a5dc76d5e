"""From a module to a graph of plain ATen operators, and what is asked of a module besides."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram

from pyro_symmetric._process import (
    running_pyro,
    with_both_branches,
    without_fast_attention,
    without_messages,
    without_warnings,
)
from pyro_symmetric.discovery.rules.registry import operator_name, rule_for
from pyro_symmetric.discovery.tensors_only import TensorsOnly
from pyro_symmetric.errors import Error

UNTRACEABLE = """\
{net} can't be traced by torch.export ({error}).

find_symmetry follows the operators of one forward pass, so the pass may not depend on the numbers that flow through it
(no `if x.sum() > 0`, no `.item()`). Either trace the part that has no such branches, or declare the group by hand:

    group = ps.Group.declare(
        {{"0.weight": ("hidden", None), "0.bias": ("hidden",), "2.weight": (None, "hidden")}},  # per axis
        dict(net.named_parameters()),
    )"""


class UntraceableError(Error, ValueError):
    """The network can't be traced; the message says why, and what to do instead."""


def exported(net: TensorsOnly) -> ExportedProgram:
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


def try_out(net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
    """Run the network as its user would, so that inputs which don't fit aren't taken for a graph that can't be had.

    :raises ValueError: if it doesn't take them.
    """
    try:
        with _quiet(), torch.no_grad():
            net(*args, **(kwargs or {}))
    except Exception as error:
        shapes = [_shape(value) for value in args] + [f"{name}={_shape(v)}" for name, v in (kwargs or {}).items()]
        where = f"{type(net).__name__} fails on the example inputs, of shapes [{', '.join(shapes)}]"
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from None


def site_names(net: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer -> its first name: tied weights are one site."""
    first: dict[int, str] = {}
    names = {}
    for name, tensor in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
        names[name] = first.setdefault(id(tensor), name)
    return names


# small steps ----------------------------------------------------------------------------------------------------------


def _made_pure(graph: fx.Graph) -> bool:
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


def _is_view(node: fx.Node) -> bool:
    """True if the result of an operator may share its numbers with an operand."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
        return operator_name(node.target) != "batch_norm"
    schema = node.target._schema
    return not schema.is_mutable and any(out.alias_info for out in schema.returns)


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No fused fast paths (they hide attention from us), no warnings about torch.export's own insides.

    If the pass branches on numbers, or shapes don't fit, torch.export prints the graph, or a traceback, before it
    raises.
    """
    talkative = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    with without_fast_attention(), without_warnings(), without_messages(*talkative):
        yield
