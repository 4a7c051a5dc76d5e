"""Branches of the graph that may be exchanged: copies of one piece, with parameters of their own.

Experts, heads and parallel layers kept in a list are branches: their results meet in an operator that doesn't mind the
order of its operands (a sum, a product, the larger of two), or lie side by side (``cat``), so that what reads them has
to tell them apart. They are found by form alone: operators are numbered from the inputs on by what they do to what, all
parameters of one shape counting as alike; operands of equal number are then compared pair by pair, down to what both
read. The match is exact: exchanging all parameters of two branches maps the graph onto itself. What follows from that
for labels is the business of :mod:`~pyro_symmetric.discovery.exchange`.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.discovery.nodes import arguments_of, cat_axis, maps_units, operator_name, unit_axis

Node = torch.fx.Node

aten = torch.ops.aten
COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default)
TAKING = (aten.select.int, aten.slice.Tensor, operator.getitem)
SPLITTING = (aten.split.Tensor, aten.split_with_sizes.default)
# Of these, each entry of the result depends on its own entry of the operand alone.
ENTRYWISE = {
    "relu",
    "gelu",
    "silu",
    "tanh",
    "sigmoid",
    "leaky_relu",
    "elu",
    "softplus",
    "hardtanh",
    "hardswish",
    "clone",
}
ENTRYWISE |= {"alias", "exp", "neg", "abs", "sin", "cos", "dropout", "hardsigmoid", "mish"}


@dataclass(frozen=True, eq=False)
class Slot:
    """The shares of each branch in one value: stretches ``(start, end)`` along an axis, one for each branch."""

    takers: tuple[Node, ...]
    source: Node
    axis: int
    stretches: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Branches:
    """Branches that may be exchanged.

    :param nodes: for each branch its operators and parameters, in corresponding order.
    :param sites: for each branch its parameters and running statistics, in corresponding order.
    :param joins: the operators in which results of the branches meet, with these results.
    :param slots: what the branches take of common values.
    :param by_unit: whether every unit of the results follows from its own rows of the parameters, so that units may be
        exchanged between branches one by one.
    """

    nodes: tuple[tuple[Node, ...], ...]
    sites: tuple[tuple[str, ...], ...]
    joins: tuple[tuple[Node, tuple[Node, ...]], ...]
    slots: tuple[Slot, ...]
    by_unit: bool

    @property
    def count(self) -> int:
        return len(self.nodes)

    @property
    def key(self) -> frozenset[tuple[str, ...]]:
        """The key that tells sets of branches of one graph apart."""
        return frozenset(self.sites)

    def in_order(self, sites: Sequence[tuple[str, ...]]) -> Branches | None:
        """The same branches in the order of these parameters of theirs; None if they aren't the same.

        :param sites: as another graph has them, of which this one may lack some (statistics, in train mode).
        """
        order = [k for own in sites for k, mine in enumerate(self.sites) if set(mine) <= set(own)]
        if len(order) != self.count or len(sites) != self.count:
            return None
        if not set(zip(*(self.sites[k] for k in order), strict=True)) <= set(zip(*sites, strict=True)):
            return None
        return self._chosen(order)

    def without(self, held: Collection[str]) -> Branches | None:
        """The branches without these parameters; None if these are less than two."""
        order = [k for k, mine in enumerate(self.sites) if not set(mine) & set(held)]
        return self._chosen(order) if len(order) > 1 else None

    def _chosen(self, order: Sequence[int]) -> Branches:
        return Branches(
            tuple(self.nodes[k] for k in order),
            tuple(self.sites[k] for k in order),
            tuple((join, tuple(ends[k] for k in order)) for join, ends in self.joins),
            tuple(
                Slot(tuple(s.takers[k] for k in order), s.source, s.axis, tuple(s.stretches[k] for k in order))
                for s in self.slots
            ),
            self.by_unit,
        )


class BranchSearch:
    """All branches of one graph.

    :param nodes: the graph's nodes.
    :param site_of: the site that a node reads, if it may be exchanged for another of its shape.
    :param constant_of: the value of a constant of the graph.
    :param returned: the nodes whose values the network returns.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        site_of: Callable[[Node], str | None],
        constant_of: Callable[[Node], Any],
        returned: Collection[Node],
    ):
        self.nodes = list(nodes)
        self.site_of, self.constant_of, self.returned = site_of, constant_of, set(returned)
        self.lives = set(self.returned)  # what the network's results depend on: not what buffers are told alone
        for node in reversed(self.nodes):
            if node.op != "output" and any(user in self.lives for user in node.users):
                self.lives.add(node)
        self.joins: dict[Node, tuple[Node, ...]] = {}  # the last operator of each chain -> its operands
        self.join_of: dict[Node, Node] = {}  # every operator of a chain -> the last one
        for node in self.nodes:
            if node.op == "call_function":
                self._note_join(node)

    def found(self) -> list[Branches]:
        """All sets of branches, in the order of the operators in which they meet."""
        candidates = {join: operands for join, operands in self.joins.items() if _some_alike(operands)}
        if not candidates:
            return []
        forms, result, known = self._forms(), [], set()
        for operands in candidates.values():
            by_form: dict[int, list[Node]] = {}
            for node in dict.fromkeys(operands):
                if node.op == "call_function" and operands.count(node) == 1:
                    by_form.setdefault(forms[node], []).append(node)
            for group in by_form.values():
                for own in self._sets(group):
                    if own.key not in known:  # the same branches may meet in several operators
                        known.add(own.key)
                        result.append(own)
        return result

    # operators in which branches meet -------------------------------------------------------------------------------

    def _note_join(self, node: Node) -> None:
        if node.target is aten.cat.default:
            self.joins[node] = tuple(node.args[0])  # type: ignore[arg-type]
            self.join_of[node] = node
        elif _is_commutative(node):
            if any(_continues(node, user) for user in node.users):
                return
            operands: list[Node] = []
            waiting: list[Any] = [node]
            while waiting:
                own = waiting.pop()
                if own is node or (_is_commutative(own) and own.target is node.target and len(own.users) == 1):
                    self.join_of[own] = node
                    waiting += reversed([a for a in own.args if isinstance(a, Node)])
                else:
                    operands.append(own)
            self.joins[node] = tuple(operands)

    # what looks alike -----------------------------------------------------------------------------------------------

    def _forms(self) -> dict[Node, int]:
        """For each node a number, the same for nodes of the same form."""
        numbers: dict[Any, int] = {}
        forms: dict[Node, int] = {}
        for node in self.nodes:
            if node.op != "call_function":
                exchangeable = node.op != "output" and self.site_of(node) is not None
                key: Any = ("site", *_looks(node)) if exchangeable else node
            else:
                flat, _ = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
                own = [forms[a] if isinstance(a, Node) else repr(a) for a in flat]
                key = (node.target, *_looks(node), *(own[:1] if node.target in TAKING else own))
            forms[node] = numbers.setdefault(key, len(numbers))
        return forms

    def _sets(self, group: Sequence[Node]) -> list[Branches]:
        """Sets of branches that end in nodes of one form."""
        result, left = [], list(group)
        while len(left) > 1:
            first, others = left[0], left[1:]
            matches = {other: match for other in others if (match := self._match(first, other)) is not None}
            own = self._exchangeable(first, matches) if matches else None
            if own is None:
                left = others
            else:
                result.append(own)
                left = [node for node in others if all(node not in nodes for nodes in own.nodes)]
        return result

    def _match(self, first: Node, other: Node) -> dict[Node, Node] | None:
        """Node of one branch -> its counterpart in another; None if they aren't alike."""
        pairs: dict[Node, Node] = {}
        shared: set[Node] = set()
        waiting = [(first, other)]
        while waiting:
            one, two = waiting.pop()
            if one is two:
                shared.add(one)
            elif one in pairs:
                if pairs[one] is not two:
                    return None
            else:
                operands = self._operands(one, two)
                if operands is None:
                    return None
                pairs[one] = two
                waiting += operands
        images = set(pairs.values())
        apart = len(images) == len(pairs) and not images & pairs.keys() and not shared & (images | pairs.keys())
        return pairs if apart and any(self.site_of(node) for node in pairs if node.op != "call_function") else None

    def _operands(self, one: Node, two: Node) -> list[tuple[Node, Node]] | None:
        """The values that both read, pair by pair; None if they do different things."""
        if one.op != two.op or _looks(one) != _looks(two):
            return None
        if one.op != "call_function":
            if self.site_of(one) is not None and self.site_of(two) is not None:
                return []
            values = self.constant_of(one), self.constant_of(two)
            same = all(isinstance(value, Tensor) for value in values) and torch.equal(*values)
            return [] if same else None
        if one.target is not two.target:
            return None
        (mine, spec), (theirs, other) = (torch.utils._pytree.tree_flatten((n.args, n.kwargs)) for n in (one, two))
        if spec != other:
            return None
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if isinstance(a, Node) and isinstance(b, Node)]
        rest = [(a, b) for a, b in zip(mine, theirs, strict=True) if not (isinstance(a, Node) and isinstance(b, Node))]
        if any(type(a) is not type(b) or a != b for a, b in rest):
            taken = [_taken(node) for node in (one, two)]
            if taken[0] is None or taken[1] is None or taken[0][:2] != taken[1][:2]:
                return None
        return pairs

    # whether they may be exchanged ----------------------------------------------------------------------------------

    def _exchangeable(self, first: Node, matches: dict[Node, dict[Node, Node]]) -> Branches | None:
        """The branch of ``first`` and all others that may be exchanged with it; None if there are none."""
        largest = Counter(map(frozenset, matches.values())).most_common(1)[0][0]
        order = [node for node in self.nodes if node in largest]
        common = [match for match in matches.values() if match.keys() == largest]
        every = [tuple(order), *(tuple(match[node] for node in order) for match in common)]
        meets = [self._outside(nodes) for nodes in every]
        if meets[0] is None or not common:
            return None
        every = [nodes for nodes, own in zip(every, meets, strict=True) if own == meets[0]]
        seen: set[Node] = set()
        kept = []
        for nodes in every:
            if not seen & set(nodes):
                seen |= set(nodes)
                kept.append(nodes)
        joins = []
        for place, join in sorted(meets[0], key=lambda pair: pair[0]):
            ends = tuple(nodes[place] for nodes in kept)
            if any(self.joins[join].count(end) != 1 for end in ends):
                return None
            joins.append((join, ends))
        slots = [self._slot([nodes[place] for nodes in kept]) for place in range(len(order))]
        sites = tuple(tuple(s for n in nodes if n.op != "call_function" and (s := self.site_of(n))) for nodes in kept)
        if len(kept) < 2 or any(slot is False for slot in slots) or len(set(sum(sites, ()))) < sum(map(len, sites)):
            return None
        taken = tuple(slot for slot in slots if isinstance(slot, Slot))
        by_unit = not taken and _is_by_unit(kept[0], joins)
        return Branches(tuple(kept), sites, tuple(joins), taken, by_unit)

    def _outside(self, nodes: Sequence[Node]) -> set[tuple[int, Node]] | None:
        """Numbers of nodes, each with the operator in which it meets others; None if results go anywhere else."""
        own, found = set(nodes), set()
        for place, node in enumerate(nodes):
            if node in self.returned:
                return None
            for user in node.users:
                if user in own or user not in self.lives:
                    continue
                join = self.join_of.get(user)
                if join is None:
                    return None
                found.add((place, join))
        return found

    def _slot(self, nodes: Sequence[Node]) -> Slot | bool:
        """Shares of corresponding operators in a common value; True if it is no such operator, False if it can't be."""
        taken = [_taken(node) for node in nodes]
        if taken[0] is None or len({own[0] for own in taken if own}) > 1:
            return True
        stretches = tuple(own[2] for own in taken if own)
        if len(set(stretches)) == 1:
            return True
        ends = sorted(stretches)
        apart = all(before[1] <= after[0] for before, after in itertools.pairwise(ends))
        return Slot(tuple(nodes), taken[0][0], taken[0][1], stretches) if apart else False


# small steps ----------------------------------------------------------------------------------------------------------


def _looks(node: Node) -> tuple[Any, ...]:
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return tuple((str(tuple(v.shape)), v.dtype) if isinstance(v, Tensor) else str(v) for v in values)


def _some_alike(operands: Sequence[Node]) -> bool:
    looks = [(node.target, _looks(node)) for node in operands if node.op == "call_function"]
    return len(set(looks)) < len(looks)


def _is_commutative(node: Any) -> bool:
    if not isinstance(node, Node) or node.target not in COMMUTATIVE or node.kwargs or len(node.args) != 2:
        return False
    kinds = [type(argument) for argument in node.args]
    return Node in kinds and all(kind in (Node, int, float) for kind in kinds)


def _continues(node: Node, user: Any) -> bool:
    """True if a chain of one operator continues with the user of a node."""
    return _is_commutative(user) and user.target is node.target and len(node.users) == 1


def _taken(node: Node) -> tuple[Node, int, tuple[int, int]] | None:
    """The value of which a node takes a stretch, the axis, and the stretch; None if it does something else."""
    if node.op != "call_function" or node.target not in TAKING:
        return None
    source: Any = node.args[0]
    if node.target is operator.getitem:
        if source.target not in SPLITTING:
            return None
        pieces = source.meta["val"]
        axis = arguments_of(source)["dim"] % pieces[0].dim()
        lengths = [int(piece.shape[axis]) for piece in pieces]
        start = sum(lengths[: int(node.args[1])])  # type: ignore[arg-type]
        return source.args[0], axis, (start, start + lengths[int(node.args[1])])  # type: ignore[arg-type]
    shape = source.meta["val"].shape
    given = arguments_of(node)
    axis, length = given["dim"] % len(shape), int(shape[given["dim"]])
    if node.target is aten.select.int:
        place = given["index"] % length
        return source, axis, (place, place + 1)
    own = range(length)[slice(given["start"], given["end"])]
    return (source, axis, (own.start, own.stop)) if given["step"] == 1 and len(own) else None


def _is_by_unit(nodes: Sequence[Node], joins: Sequence[tuple[Node, tuple[Node, ...]]]) -> bool:
    """True if a branch is a linear map or a convolution, and else works entry by entry, up to the one operator in which
    results meet: entry by entry, or side by side along the axis of the units."""
    own, seeds = set(nodes), 0
    if len(joins) != 1:
        return False
    join = joins[0][0]
    for node in nodes:
        if node.op != "call_function":
            continue
        inside = [a for a in node.all_input_nodes if a in own]
        if maps_units(node):
            seeds += 1
            if seeds > 1 or any(a.op == "call_function" for a in inside) or node.args[0] in own:
                return False
        elif operator_name(node.target) not in ENTRYWISE or any(a.op != "call_function" for a in inside):
            return False
    return seeds == 1 and (_is_commutative(join) or cat_axis(join) == unit_axis(nodes))
