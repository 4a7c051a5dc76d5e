"""One operator of a traced graph: what its rule makes of the labels of its operands."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import Value
from pyro_symmetric.discovery.scaling.nodes import bound
from pyro_symmetric.discovery.scaling.rules.registry import NUMBERS, Call, rule_for, takes_slices
from pyro_symmetric.discovery.sizes import TAKE_SIZES, closed, is_open
from pyro_symmetric.discovery.trace import module_of

# Operators that move integers about, and leave each of them what it is.
MOVING = frozenset(
    (
        *("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "permute", "transpose", "expand", "slice"),
        *("select", "split", "split_with_sizes", "alias", "clone", "detach", "_to_copy"),
    )
)


def applied(
    node: torch.fx.Node, values: Mapping[torch.fx.Node, Any], labeller: Labeller, returned: Sequence[torch.fx.Node]
) -> Any:
    target: Any = node.target
    args: Any = torch.fx.map_arg(node.args, lambda n: values[n])
    kwargs: Any = torch.fx.map_arg(node.kwargs, lambda n: values[n])
    if target is operator.getitem:
        return args[0][int(args[1])] if isinstance(args[0], list | tuple) else args[0]
    shapes, floating = _results(node)
    if not shapes:  # a number, or nothing
        return _number(node, args, labeller)
    schema = getattr(target, "_schema", None)
    given = bound(schema, args, kwargs) if schema is not None else {"args": list(args), "kwargs": list(kwargs.values())}
    call = Call(target, given, shapes, floating, _read(node, len(shapes), returned))
    rule = rule_for(target)
    call = _untangled(_without_numbers(call, rule, labeller), labeller)
    if _takes_open_size(node, call):
        results = [labeller.give_up(call.operands, shape, "a place or a size depends on data") for shape in shapes]
    elif rule is None:
        results = [labeller.give_up(call.operands, shape, "there is no rule") for shape in shapes]
    else:
        result = rule(labeller, call)
        results = [result] if isinstance(result, Value) else list(result or ())
        if not results or not all(isinstance(value, Value) for value in results):
            raise TypeError(
                f"the rule of {labeller.where} returned {result!r}; it must return what labeller's methods do"
            )
    if [tuple(r.shape) for r in results] != [tuple(s) for s in shapes]:
        raise RuntimeError(f"the rule of {labeller.where} gave shapes {[r.shape for r in results]}, not {list(shapes)}")
    if any(map(is_open, _sizes(node))) or any(is_open(n.meta.get("val")) for n in node.all_input_nodes):
        results = [replace(r, constant=None) for r in results]
    elif call.operands:
        results = [replace(r, constant=c) for r, c in zip(results, _constants(call, args, kwargs), strict=True)]
    if call.name in MOVING and not call.floating and call.value.numbers is not None:
        results = [replace(r, numbers=call.value.numbers) for r in results]
    results = [replace(r, mask=t.dtype == torch.bool) for r, t in zip(results, _tensors(node), strict=True)]
    return results if isinstance(node.meta["val"], list | tuple) else results[0]


def index_map(constant: Any) -> Tensor | None:
    """Index maps are worth remembering; anything else is data."""
    if not isinstance(constant, Tensor) or constant.is_floating_point() or constant.is_complex():
        return None
    return constant.detach().cpu() if type(constant) is Tensor else None


# small steps --------------------------------------------------------------------------------------------------------


def _without_numbers(call: Call, rule: Any, labeller: Labeller) -> Call:
    """The call with operands that its rule understands: numbered units stay if it doesn't know what numbers are."""
    if all(value.numbers is None for value in call.operands) or rule in NUMBERS:
        return call
    if call.name in MOVING and not call.floating:
        return call
    for value in call.operands:
        if value.numbers is not None:
            labeller.keep_order(value)
    plain = torch.utils._pytree.tree_map(
        lambda x: replace(x, numbers=None) if isinstance(x, Value) else x, call.arguments
    )
    return replace(call, arguments=plain)


def _untangled(call: Call, labeller: Labeller) -> Call:
    """The call with operands that its rule understands: most know neither slices nor routes."""
    if takes_slices(call.target) or not any(value.overlaps or value.routes for value in call.operands):
        return call
    if any(value.overlaps for value in call.operands):
        raise labeller.facts.entangled([part for value in call.operands if value.overlaps for part in value.parts])
    settled = torch.utils._pytree.tree_map(lambda x: labeller.settled(x) if isinstance(x, Value) else x, call.arguments)
    return replace(call, arguments=settled)


def _constants(call: Call, args: Any, kwargs: Any) -> list[Tensor | None]:
    """The results themselves, if they are index maps and come from nothing but index maps."""
    if call.floating or any(value.constant is None for value in call.operands):
        return [None] * len(call.shapes)
    own = torch.utils._pytree.tree_map(lambda x: x.constant if isinstance(x, Value) else x, (args, kwargs))
    return [index_map(t) for t in torch.utils._pytree.tree_leaves(call.target(*own[0], **own[1]))]


def _read(node: torch.fx.Node, count: int, returned: Sequence[torch.fx.Node]) -> tuple[bool, ...]:
    """The results that something reads, or the network returns (and not only buffers keep)."""
    if count == 1:
        return (True,)
    items: dict[Any, Any] = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    used = {k for k, item in items.items() if item in returned or any(user.op != "output" for user in item.users)}
    return tuple(k in used for k in range(count))


def _tensors(node: torch.fx.Node) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]


def _sizes(node: torch.fx.Node) -> list[Any]:
    return [n for t in _tensors(node) for n in t.shape]


def _results(node: torch.fx.Node) -> tuple[tuple[tuple[int, ...], ...], bool]:
    tensors = _tensors(node)
    floating = bool(tensors) and (tensors[0].is_floating_point() or tensors[0].is_complex())
    return tuple(tuple(closed(n) for n in t.shape) for t in tensors), floating


def _number(node: torch.fx.Node, args: Any, labeller: Labeller) -> Any:
    """A number that an operator reads off a tensor, in which nothing moves then; sizes and assertions don't matter."""
    name = getattr(node.target, "__name__", "")
    if not name.startswith(("sym_", "_assert")):
        labeller.where = f"{name} in {module_of(node)}"
        for value in args:
            if isinstance(value, Value):
                labeller.pin(value)
    return closed(node.meta.get("val"))


def _takes_open_size(node: torch.fx.Node, call: Call) -> bool:
    """True if an operator reads a number that depends on the data, and does more than make a tensor of that size."""
    if not any(is_open(n.meta.get("val")) for n in node.all_input_nodes):
        return False
    if call.name in ("split_with_sizes", "unsafe_split_with_sizes"):
        return call.value.part_on(call.axis) is not None
    return call.name not in TAKE_SIZES
