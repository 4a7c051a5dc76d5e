"""Buffers that say something about units, by what the network does with them.

A running mean holds one number for each channel, and nothing but that channel is normalised by it: exchanged channels
take their numbers along. A mask, a table of positions, frequencies of rotary embeddings are constants of the
architecture, which no symmetry may change. A buffer is a statistic if it is saved with the network (what isn't is
computed again, the same each time), holds real numbers along one axis, and is used in these ways alone:

* it normalises: a normalisation takes it as running mean or variance; or it meets, entry by entry, values that depend
  on the network's parameters, perhaps after functions of its entries and of those of other statistics, and it or
  another statistic of its module divides (``x * (weight / (variance + eps).sqrt())``);
* it is multiplied into a matrix of weights, as singular vectors are by spectral normalisation.

So what meets positions first isn't one, nor is what is added or multiplied alone, as a table or a mask is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.fx import Node

from pyro_symmetric.discovery.rules.registry import operator_name
from pyro_symmetric.discovery.scaling.rules.elementwise import ENTRYWISE

Use = Literal["entrywise", "contracted"]
# Operators that change a tensor's shape, or nothing at all.
SHAPES = {"view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose", "t"}
SHAPES |= {"alias", "clone", "detach", "_to_copy", "copy"}
ROOTS = {"sqrt", "rsqrt", "reciprocal"}
PRODUCTS = {"mv", "dot", "vdot", "matmul", "mm", "addmv", "linear"}


class Found(NamedTuple):
    """The use of a buffer that may be a statistic.

    :param divides: whether something is divided by it, or by a function of it.
    """

    use: Use
    divides: bool


def statistics(nodes: Iterable[Node], buffers: Mapping[Node, str], parameters: Iterable[Node]) -> dict[Node, Use]:
    """The buffers that are statistics, and how they are used.

    :param nodes: those of the graph, in order.
    :param buffers: the nodes of buffers that are saved with the network, and the modules that they belong to.
    :param parameters: the nodes of parameters.
    """
    every = list(nodes)
    learned = _reached(every, parameters)
    data = _reached(every, (n for n in every if n.op == "placeholder" and n not in buffers and n not in learned))
    found = {node for node in buffers if _is_row(node)}
    while True:  # what meets a constant is one
        uses = {node: use for node in found if (use := _use(node, found, learned, data)) is not None}
        normalising = {buffers[node] for node, one in uses.items() if one.divides}
        kept = {n: one.use for n, one in uses.items() if one.use == "contracted" or buffers[n] in normalising}
        if len(kept) == len(found):
            return kept
        found = set(kept)


def _use(buffer: Node, statistics: set[Node], learned: set[Node], data: set[Node]) -> Found | None:
    """The use of a buffer; None if it isn't a statistic."""
    uses: set[Use] = set()
    divides = False
    waiting, seen = [buffer], {buffer}
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user.op != "call_function" or user in seen:
                continue  # the network's output keeps labels where they are, or pins them
            name, running = operator_name(user.target), _is_running(user, node)
            divides |= running or name in ROOTS or (name == "div" and user.args[1] is node)
            others = [n for n in user.all_input_nodes if n is not node]
            if name in SHAPES or (name in ENTRYWISE and all(_is_made_of(n, statistics) for n in others)):
                if not _is_row(user):
                    return None
                seen.add(user)
                waiting.append(user)
            elif name in ENTRYWISE and any(n in learned for n in others):
                uses.add("entrywise")
            elif name in PRODUCTS and all(n in learned and n not in data for n in others):
                uses.add("contracted")
            elif running:
                uses.add("entrywise")
            else:
                return None
    return Found("contracted" if "contracted" in uses else "entrywise", divides) if uses else None


def _is_made_of(node: Node, statistics: set[Node]) -> bool:
    """True if a value is a function of the entries of statistics, and of nothing else."""
    if node.op == "placeholder":
        return node in statistics
    plain = (
        node.op == "call_function" and operator_name(node.target) in (SHAPES | ENTRYWISE) and bool(node.all_input_nodes)
    )
    return plain and all(_is_made_of(n, statistics) for n in node.all_input_nodes)


def _is_running(user: Node, node: Node) -> bool:
    """True if an operator takes a value as a running mean or variance, and as nothing else."""
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return False
    given = {a.name: value for a, value in zip(schema.arguments, user.args, strict=False)} | dict(user.kwargs)
    return {name for name, value in given.items() if value is node} <= {"running_mean", "running_var"}


def _is_row(node: Node) -> bool:
    """True if a node's value holds real numbers along one axis; all others are of length one."""
    value: Any = node.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim():
        return False
    return sum(not isinstance(n, int) or n > 1 for n in value.shape) <= 1


def _reached(nodes: Sequence[Node], starts: Iterable[Node]) -> set[Node]:
    """All that depends on some nodes."""
    reached = set(starts)
    for node in nodes:
        if any(n in reached for n in node.all_input_nodes):
            reached.add(node)
    return reached
