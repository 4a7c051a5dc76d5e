"""Operators of a traced graph: their names, their arguments, and the axes along which they place units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution")


def operator_name(target: Any) -> str:
    """The name of an operator, without its overload."""
    packet: Any = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


def bound(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults."""
    named = {argument.name: argument.default_value for argument in schema.arguments}
    named |= dict(zip([argument.name for argument in schema.arguments], args, strict=False))
    return named | dict(kwargs)


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of a node that calls an operator of PyTorch."""
    target: Any = node.target
    return bound(target._schema, node.args, node.kwargs)


def maps_units(node: Node) -> bool:
    """True for a linear map, or a convolution that isn't transposed and has one group: units are rows of its weight."""
    name = operator_name(node.target)
    if name not in CONVOLUTIONS:
        return name == "linear"
    given = arguments_of(node)
    return given["groups"] == 1 and not given.get("transposed", False)


def cat_axis(join: Node) -> int:
    """The axis along which a ``cat`` puts its operands side by side."""
    return int(arguments_of(join)["dim"]) % join.meta["val"].dim()


def unit_axis(nodes: Sequence[Node]) -> int:
    """The axis along which units lie in the result of a branch that is a linear map or a convolution."""
    own = next(node for node in nodes if maps_units(node))
    weight: Any = own.args[1]
    return own.meta["val"].dim() - weight.meta["val"].dim() + 1
