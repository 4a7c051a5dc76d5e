"""Reads of parameters: a graph in which each read of a parameter has a leaf of its own.

A parameter that is read twice enters outputs as a product. The sign of a hidden unit of
``tanh(x @ w.T) @ w`` passes through the first read as it is, and through the second as
its inverse; both change the same numbers. So each read follows a law of its own, and
then both must agree, modulo two.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import fx

from pyro_symmetric.discovery.registry import operator_name

# operators that return the entries of one tensor, beside those that alias it
COPIES = frozenset(
    ["clone", "contiguous", "_to_copy", "to", "detach", "reshape", "_unsafe_view"]
)
READ = "#"  # a leaf's name has it between site and number; no site's name has it
MOST = 6  # reads with a leaf of their own; of more, those that are alike share one


class Read(NamedTuple):
    """A read of a parameter.

    :param views: the views of it through which it is read, in order.
    :param call: the call that reads the last of them.
    :param place: the number of the call's argument.
    """

    views: tuple[fx.Node, ...]
    call: fx.Node
    place: int

    def kind(self) -> tuple[Any, ...]:
        """Return what reads have in common that are alike."""
        return (*(view.target for view in self.views), self.call.target, self.place)


class Untied(NamedTuple):
    """A graph with a leaf for each read.

    :param leaves: the names of further leaves, placeholders in this order, and the
        sites that they copy.
    """

    graph: fx.Graph
    leaves: dict[str, str]


def untied(
    graph: fx.Graph, site_of: Mapping[str, str], sites: Collection[str]
) -> Untied:
    """Return a graph with a leaf for each read of the sites that are read repeatedly.

    :param site_of: the name of a placeholder -> its site.
    """
    counts = dict[str, int]()
    for node in graph.nodes:
        if site_of.get(node.name) in sites:
            site = site_of[node.name]
            counts[site] = counts.get(site, 0) + len(reads_of(node))
    if max(counts.values(), default=0) < 2:
        return Untied(graph, {})
    graph = copy.deepcopy(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    last = placeholders[-1]
    numbers = dict[tuple[Any, ...], int]()
    nodes = dict[str, fx.Node]()
    leaves = dict[str, str]()
    for node in placeholders:
        site = site_of.get(node.name, "")
        if counts.get(site, 0) < 2:
            continue
        for read in reads_of(node):
            kind = (len(numbers),) if counts[site] <= MOST else read.kind()
            number = numbers.setdefault((site, *kind), len(numbers))
            if number == min(n for key, n in numbers.items() if key[0] == site):
                continue  # the first read keeps the parameter itself
            name = f"{site}{READ}{number}"
            if name not in nodes:
                with graph.inserting_after(last):
                    last = nodes[name] = graph.placeholder(f"read_{number}")
                leaves[name] = site
            _move(graph, node, read, nodes[name])
    return Untied(graph, leaves)


def reads_of(node: fx.Node, views: tuple[fx.Node, ...] = ()) -> list[Read]:
    """Return the reads of a node, those of its views included."""
    reads = list[Read]()
    for user in node.users:
        if user.op == "output":
            continue
        if is_view(user):
            reads += reads_of(user, (*views, user))
            continue
        for place, argument in enumerate(arguments_of(user)):
            if argument is node:
                reads.append(Read(views, user, place))
    return reads


def arguments_of(node: fx.Node) -> list[fx.Node]:
    """Return what a call reads, once for each argument."""
    arguments = list[fx.Node]()
    fx.map_arg((node.args, node.kwargs), arguments.append)
    return arguments


def viewed(node: fx.Node) -> fx.Node:
    """Return the tensor that a node is a view of; the node itself if it is none."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def is_view(node: fx.Node) -> bool:
    """Return whether a call returns entries of one tensor, rearranged."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or len(node.all_input_nodes) != 1 or len(schema.returns) != 1:
        return False
    (returned,) = schema.returns
    if str(returned.type) != "Tensor":
        return False
    alias = returned.alias_info
    if alias is not None and not alias.is_write:
        return True
    return operator_name(node.target) in COPIES


def _move(graph: fx.Graph, node: fx.Node, read: Read, leaf: fx.Node) -> None:
    """Let a call read a new leaf in place of a node, through copies of its views."""
    source = {node: leaf}
    for view in read.views:
        with graph.inserting_before(read.call):
            source[view] = graph.node_copy(view, source.__getitem__)
    new = source[read.views[-1] if read.views else node]
    places = iter(range(len(arguments_of(read.call))))

    def replaced(argument: fx.Node) -> fx.Node:
        return new if next(places) == read.place else argument

    read.call.args, read.call.kwargs = fx.map_arg(
        (read.call.args, read.call.kwargs), replaced
    )
