r"""Consequences for labels if branches of the graph may be exchanged.

Branch ``k`` is a unit of its own, :math:`s_k`. Operators and parameters of branches that are alike share the numbers of
their facts (:meth:`Facts.at`), so that nothing tells branches apart but what tells :math:`s_k` apart; and whatever
belongs to one branch alone is a member of :math:`s_k`, so that it moves with it. If every unit of the results follows
from its own rows of the parameters, these rows are exchanged one by one instead: the two rows :math:`a_i, b_i` of
``a(x) * b(x)`` are members of a unit :math:`c_i`, and no branch moves as a whole.

Soundness. An exchange of two branches maps the graph onto itself, apart from the operators in which branches meet. A
sum doesn't change; what lies side by side changes places, which labels must show: along a ``cat`` each branch must have
labels of its own. What branches take of one value (their columns of a router) must have such labels, too. Branches of
which this doesn't hold are given up, and labels are carried anew.

In the end the parameters of branches that are alike become one leaf, a stack.
"""

from __future__ import annotations

import operator
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pyro_symmetric.discovery.branches import Branches, Node, Slot
from pyro_symmetric.discovery.facts import Facts
from pyro_symmetric.discovery.labels import Array, Part, Value
from pyro_symmetric.discovery.leaf_stacks import Stack, joined_leaves
from pyro_symmetric.discovery.nodes import cat_axis, unit_axis
from pyro_symmetric.discovery.plan import SLICED_LIMIT


class NotExchangeable(Exception):
    """Labels show that these branches can't be exchanged after all."""

    def __init__(self, branches: Branches):
        super().__init__(f"branches with the parameters {branches.sites}")
        self.branches = branches


class Exchange:
    """Branches of one network while labels are carried through its graphs.

    :param sets: for each graph its sets of branches, the same in all, in the same order.
    """

    def __init__(self, sets: Sequence[Sequence[Branches]], facts: Facts):
        self.sets, self.facts = sets, facts
        self.place = _places([own for every in sets for own in every])
        self.made: dict[Node, range] = {}
        self.first = list(sets[0]) if sets else []
        self.units = [facts.fresh((own.count,)) for own in self.first]
        self.rows: dict[int, Array] = {}  # set of branches by unit -> the atoms of the units in which rows meet
        self.takers: dict[Node, tuple[int, Slot]] = {}
        self.ends: dict[tuple[Node, Node], tuple[int, int]] = {}  # (operator, result of a branch) -> set, branch
        for every in sets:
            for number, own in enumerate(every):
                for slot in own.slots:
                    self.takers |= {node: (number, slot) for node in slot.takers}
                for k, end in ((k, end) for _, ends in own.joins for k, end in enumerate(ends)):
                    self.ends |= {(user, end): (number, k) for user in end.users if user not in own.nodes[k]}

    # while labels are carried ---------------------------------------------------------------------------------------

    def enter(self, node: Node, values: Mapping[Node, Any]) -> None:
        """From now on facts are about this operator."""
        pieces = node.users.keys() if self.takers and node.op == "call_function" else ()
        split = bool(pieces) and all(user in self.takers and user.target is operator.getitem for user in pieces)
        self.facts.at(self.place.get(node, node), None if split else 0)
        if node in self.takers:
            self._tie_slot(node, values)

    def _tie_slot(self, node: Node, values: Mapping[Node, Any]) -> None:
        """Tie the share of a branch in a value to the branch."""
        number, slot = self.takers[node]
        k = slot.takers.index(node)
        value = values[slot.source]
        part = value.part_on(slot.axis) if isinstance(value, Value) else None
        if part is None or part.axes != (slot.axis,) or value.routes:
            raise NotExchangeable(self.first[number])
        start, end = slot.stretches[k]
        taken = part.atoms[start:end]
        self.facts.relate(taken, np.broadcast_to(self.units[number][k : k + 1], taken.shape))

    def operands(self, node: Node, values: Mapping[Node, Any]) -> Mapping[Node, Any]:
        """All values, and results of branches as an operator sees them in which they meet."""
        ends = {end: own for end in node.all_input_nodes if (own := self.ends.get((node, end)))} if self.ends else {}
        if not ends:
            return values
        return ChainMap({end: self._operand(values[end], node, *own) for end, own in ends.items()}, dict(values))

    def _operand(self, value: Any, join: Node, number: int, k: int) -> Any:
        if not isinstance(value, Value):
            return value
        # No group of ours holds the two multipliers of a product's factors together with their exchange.
        if join.target is torch.ops.aten.mul.Tensor and not all(self.facts.is_still(p.atoms) for p in value.parts):
            raise NotExchangeable(self.first[number])
        if self.first[number].by_unit:
            return self._by_unit(number, value) if _is_sum(join) else value
        return self._side_by_side(number, k, value, join) if not _is_sum(join) else value

    def _by_unit(self, number: int, value: Value) -> Value:
        """The rows of a branch are members of the units in which they meet those of the others."""
        axis = unit_axis(self.first[number].nodes[0])
        part = value.part_on(axis)
        if part is None or part.axes != (axis,) or len(value.parts) > 1:
            raise NotExchangeable(self.first[number])
        meeting = self.rows.setdefault(number, self.facts.fresh(part.atoms.shape))
        fresh = self.facts.fresh(part.atoms.shape)
        self.facts.unify(fresh, meeting)
        self.facts.balance([(1.0, part.atoms), (-1.0, fresh)])
        before = self.facts.at(("rows", self._rank(number)))
        self.facts.relate(part.atoms, meeting)
        self.facts.at(*before)
        return replace(value, parts=(Part((axis,), fresh),))

    def _side_by_side(self, number: int, k: int, value: Value, join: Node) -> Value:
        """Along an axis of length one, on which results are put side by side, lies the branch itself."""
        axis = cat_axis(join)
        if value.shape[axis] != 1 or value.part_on(axis) is not None or axis in value.fixed:
            return value
        unit = self.units[number][k : k + 1]
        if len(value.parts) == 1 and value.parts[0].axes:
            own = value.parts[0]
            place = sum(other < axis for other in own.axes)
            axes = (*own.axes[:place], axis, *own.axes[place:])
            return replace(value, parts=(Part(axes, np.expand_dims(own.atoms, place)),))
        return replace(value, parts=(*value.parts, Part((axis,), unit)))

    def _rank(self, number: int) -> object:
        """The same for sets of branches that are alike: those in branches of others."""
        node = self.first[number].joins[0][1][0]
        return self.place.get(node, node)

    # when all labels are known --------------------------------------------------------------------------------------

    def settle(self, values: Mapping[Node, Any]) -> dict[str, Stack]:
        """State what belongs to which branch, and make leaves of stacks.

        :raises NotExchangeable: if labels don't bear out an exchange.
        """
        if not self.first:
            return {}
        _, unit = self.facts.classes()
        for number, own in enumerate(self.first):
            (self._settle_by_unit if own.by_unit else self._settle_whole)(number, unit, values)
        self._require_functions(unit)
        return joined_leaves(self.facts, self.first, self.units)

    def _settle_whole(self, number: int, unit: Array, values: Mapping[Node, Any]) -> None:
        own = self.first[number]
        count = int(unit.max(initial=-1)) + 1
        met = np.zeros((own.count, count), dtype=bool)
        for k in range(own.count):
            met[k, unit[self.units[number][k]]] = True
            for every in self.sets:
                met[k, unit[self._atoms(every[number].nodes[k], own)]] = True
            for slot in own.slots:
                start, end = slot.stretches[k]
                met[k, unit[values[slot.source].part_on(slot.axis).atoms[start:end]]] = True
        times = met.sum(0)
        if ((times > 1) & (times < own.count)).any() or (times[unit[self.units[number]]] > 1).any():
            raise NotExchangeable(own)
        for slot in own.slots:
            atoms = values[slot.source].part_on(slot.axis).atoms
            if any((times[unit[atoms[start:end]]] > 1).any() for start, end in slot.stretches):
                raise NotExchangeable(own)
        for every in self.sets:
            for join, ends in every[number].joins:
                if not _is_sum(join) and not self._told_apart(join, ends, met & (times == 1), unit, values):
                    raise NotExchangeable(own)
        # One atom of each class that belongs to one branch alone.
        first = np.zeros(count, dtype=np.int64)
        first[unit[::-1]] = np.arange(len(unit))[::-1]
        branch, classes = np.nonzero(met & (times == 1))
        self.facts.at(("members", self._rank(number)))
        self.facts.relate(first[classes], self.units[number][branch])
        self.facts.at(("branches", self._rank(number)))
        self.facts.occur(self.units[number])
        self.facts.still(self.units[number])
        self.facts.at(None)

    def _atoms(self, nodes: Sequence[Node], own: Branches) -> Array:
        """All atoms that were made by operators of a branch, those of branches inside it among them."""
        inside = set(nodes)
        made = [np.arange(span.start, span.stop) for node in nodes if (span := self.made.get(node))]
        made += [
            self.units[other]
            for other, inner in enumerate(self.first)
            if inner is not own and all(inside.issuperset(every) for every in inner.nodes)
        ]
        return np.concatenate([np.empty(0, dtype=np.int64), *made])

    def _told_apart(
        self, join: Node, ends: Sequence[Node], alone: Array, unit: Array, values: Mapping[Node, Any]
    ) -> bool:
        """True if labels along the axis of a ``cat`` belong to one branch each."""
        result = values[join]
        axis = cat_axis(join)
        part = result.part_on(axis)
        if part is None:
            return False
        lines = np.moveaxis(part.atoms, part.axes.index(axis), 0)
        start, where = 0, {}
        for operand in join.args[0]:  # type: ignore[union-attr]
            length = int(operand.meta["val"].shape[axis])  # type: ignore[union-attr]
            where[operand] = lines[start : start + length]
            start += length
        return all(bool(alone[k, unit[where[end]]].all()) for k, end in enumerate(ends))

    def _settle_by_unit(self, number: int, unit: Array, values: Mapping[Node, Any]) -> None:
        """Rows must belong to their own branch alone; what else the parameters know is the same in all branches."""
        own, leaves = self.first[number], self.facts.leaves
        inside = {node for every in self.sets for nodes in every[number].nodes for node in nodes}
        outside = np.ones(len(unit), dtype=bool)
        for node in inside:
            if node in self.made:
                outside[self.made[node].start : self.made[node].stop] = False
        rows = [unit[leaves[sites[0]].labels[0]] for sites in own.sites]
        every_row = np.concatenate(rows)
        meet = _is_sum(own.joins[0][0])  # side by side, rows are the rows of one map, which all else may know
        for k, sites in enumerate(own.sites):
            if not all(leaves[site].shape and np.array_equal(unit[leaves[site].labels[0]], rows[k]) for site in sites):
                raise NotExchangeable(own)
        if len(np.unique(every_row)) < len(every_row) or (meet and np.isin(every_row, unit[outside]).any()):
            raise NotExchangeable(own)
        for sites in zip(*own.sites, strict=True):
            for dim in range(1, len(leaves[sites[0]].shape)):
                for site in sites[1:]:
                    self.facts.unify(leaves[sites[0]].labels[dim], leaves[site].labels[dim])

    def _require_functions(self, unit: Array) -> None:
        """Branches that share members (streams) must agree on what these are members of."""
        by_number: dict[int, list[tuple[Array, Array]]] = {}
        for child, parent, number in self.facts.relations:
            by_number.setdefault(number, []).append((unit[child], unit[parent]))
        for number, every in by_number.items():
            if len(every) < 2:
                continue
            if _is_function(*(np.concatenate(side) for side in zip(*every, strict=True))):
                continue
            if all(_is_function(*pair) for pair in every):
                raise NotExchangeable(self._about(number))

    def _about(self, number: int) -> Branches:
        """The largest branches that a fact is about."""
        place = self.facts.place_of(number)
        about = [own for own in self.first if any(self.place.get(n, n) is place for nodes in own.nodes for n in nodes)]
        return max(about or self.first, key=lambda own: len(own.nodes[0]))


def kept(sets: Sequence[Sequence[Branches]], facts: Facts, held: set[str]) -> list[list[Branches]]:
    """The sets of branches that all graphs have, of parameters that may move and are labelled axis by axis.

    :param facts: of labels without branches.
    """
    result: list[list[Branches]] = [[] for _ in sets]
    sets = [[moving for own in every if (moving := own.without(held))] for every in sets]
    for own in sets[0]:
        sites = {site for branch in own.sites for site in branch}
        leaves = [facts.leaves.get(site) for site in sites]
        size = sum(int(np.prod(leaf.shape)) for leaf in leaves if leaf is not None)
        plain = all(leaf is not None and leaf.slices is None for leaf in leaves)
        apart = all(_apart_or_inside(own, other) for other in result[0])
        same = [next((o for other in every if (o := other.in_order(own.sites))), None) for every in sets]
        if plain and apart and size <= SLICED_LIMIT and None not in same:
            for mine, other in zip(result, same, strict=True):
                mine.append(other)  # type: ignore[arg-type]
    return result


# small steps ----------------------------------------------------------------------------------------------------------


def _places(sets: Sequence[Branches]) -> dict[Node, Node]:
    """For each node of a branch one that stands for it and all of its counterparts."""
    stands: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while stands.get(node, node) is not node:
            node = stands[node]
        return node

    for own in sets:
        for nodes in zip(*own.nodes, strict=True):
            for other in nodes[1:]:
                one, two = root(nodes[0]), root(other)
                if one is not two:
                    stands[two] = one
    return {node: root(node) for own in sets for nodes in own.nodes for node in nodes}


def _is_function(child: Array, parent: Array) -> bool:
    """True if members have one owner each; those that are one with it aside."""
    pairs = np.unique(np.stack([child, parent])[:, child != parent], axis=1)
    return len(np.unique(pairs[0])) == pairs.shape[1]


def _apart_or_inside(one: Branches, other: Branches) -> bool:
    """True if two sets of branches have nothing in common, or one lies inside one branch of the other."""
    mine, theirs = ([set(sites) for sites in own.sites] for own in (one, other))
    all_mine, all_theirs = set().union(*mine), set().union(*theirs)
    if not all_mine & all_theirs:
        return True
    return any(all_mine <= branch for branch in theirs) or any(all_theirs <= branch for branch in mine)


def _is_sum(join: Node) -> bool:
    return join.target is not torch.ops.aten.cat.default
