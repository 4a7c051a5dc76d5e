"""Operators of a traced graph: their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node


def bound(schema: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, with the schema's defaults."""
    named = {argument.name: argument.default_value for argument in schema.arguments}
    named |= dict(zip([argument.name for argument in schema.arguments], args, strict=False))
    return named | dict(kwargs)


def arguments_of(node: Node) -> dict[str, Any]:
    """The arguments of a node that calls an operator of PyTorch."""
    target: Any = node.target
    return bound(target._schema, node.args, node.kwargs)
