"""The flow of axes through a network: which entries of a tensor belong to which unit.

A network's symmetry moves *units*: channels, features, heads. Every position along
every axis of a parameter starts as a unit of its own, an *atom*. One pass over the
traced graph carries arrays of atoms, laid out like the data, so that reshape,
transpose, slice and cat move them as they move numbers::

    for node in graph:
        values[node] = rule(flow, node)  # propagate; the rules are in rules.py
    cells = nested(colour_refine(facts))  # cells.solve

Rules state three kinds of facts, entry by entry: two atoms belong to the same unit
(:meth:`Flow.unify`); the unit of one is a member of that of the other, a head, say
(:meth:`Flow.relate`); units of different colours aren't interchangeable
(:meth:`Flow.refine`). Operators without a rule pin their operands.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric.discovery.registry import (
    Array,
    Call,
    Part,
    Value,
    bound,
    opaque,
    operator_name,
    rule_for,
)
from pyro_symmetric.discovery.trace import Trace

# products of units cost one atom for each entry; beyond, units are pinned, with a
# warning
PRODUCT_LIMIT = 4_000_000
# Buffers with one number for each unit, which move along: statistics of normalisations,
# singular vectors.
STATISTICS = frozenset(
    [
        "running_mean",
        "running_var",
        "weight",
        "bias",
        "_u",
        "_v",
        "weight_u",
        "weight_v",
    ]
)
SPLITS = frozenset(["slice", "split", "split_with_sizes", "unsafe_split_with_sizes"])
# units of a matrix in slices are found entry by entry; larger matrices aren't sliced
SLICED_LIMIT = 2**22
STAND_IN = 101  # a prime number in place of sizes that depend on data


def propagate(flow: Flow, trace: Trace) -> None:
    """Let axes flow through the graph of a forward pass: apply every operator's rule,
    then pin the outputs.
    """
    values: dict[Node, Any] = {}
    for node in trace.nodes():
        if node.op == "call_function":
            flow.operator = f"{operator_name(node.target)} in {_module_of(node)}"
            values[node] = _apply_rule(flow, trace, node, values)
        else:
            values[node] = _leaf(flow, trace, node)
    flow.operator = "the network's output"
    for node in trace.returned:
        if isinstance(values[node], Value):
            flow.pin(values[node])


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter, or a running statistic.

    :param value: its atoms, along each axis.
    :param kernel: whether it belongs to a convolution.
    :param slices: of a matrix whose rows fall into slices with columns of their own,
        the slice of each row.
    """

    site: str
    value: Value
    buffer: bool = False
    kernel: bool = False
    slices: Array | None = None


class Fact(NamedTuple):
    """A statement of an operator about two arrays of atoms, or about atoms and their
    colours.
    """

    one: Array
    other: Array
    number: int


class Flow:
    """Facts about atoms, and the methods that rules are written in."""

    def __init__(self) -> None:
        # the operator that is being applied and its module, in words
        self.operator = ""
        self.size = 0
        self.starts: list[int] = []  # the first atom of each new array
        self.origins: list[str] = []  # fact number -> the operator that states it
        # first atom of an array of product units -> the factor of each
        self.products: dict[int, Array] = {}
        self.unions: list[Fact] = []
        self.relations: list[Fact] = []
        self.refinements: list[Fact] = []
        # id of an array of atoms -> the array, its fact number
        self.occurrences: dict[int, tuple[Array, int]] = {}
        self.leaves: dict[str, Leaf] = {}  # by site
        # operators that pinned units for lack of a rule, and why
        self.given_up: dict[str, None] = {}

    # facts ----------------------------------------------------------------------------

    def _number(self, why: str = "") -> int:
        """Number a new fact."""
        self.origins.append(why or self.operator)
        return len(self.origins) - 1

    def fresh(self, shape: Sequence[int]) -> Array:
        """Return an array of new atoms."""
        count = math.prod(shape)
        self.starts.append(self.size)
        self.size += count
        return np.arange(self.size - count, self.size, dtype=np.int64).reshape(shape)

    def unify(self, one: Array, other: Array) -> None:
        """State that, entry by entry, both atoms belong to the same unit."""
        if one is not other:
            self.unions.append(Fact(one.reshape(-1), other.reshape(-1), self._number()))

    def relate(self, child: Array, parent: Array) -> None:
        """State that, entry by entry, the unit of ``child`` is a member of the unit of
        ``parent`` and moves with it.
        """
        self.relations.append(
            Fact(child.reshape(-1), parent.reshape(-1), self._number())
        )

    def refine(self, atoms: Array, colours: Array, why: str = "") -> None:
        """State that units whose atoms have different colours aren't
        interchangeable.
        """
        self.refinements.append(
            Fact(atoms.reshape(-1), colours.reshape(-1), self._number(why))
        )

    def occur(self, atoms: Array) -> None:
        """State that these are all atoms of one tensor: a symmetry maps them onto each
        other.
        """
        if id(atoms) not in self.occurrences:
            self.occurrences[id(atoms)] = atoms, self._number()

    def pin(self, value: Value, why: str = "") -> None:
        """Pin all units of an operand."""
        for part in value.parts:
            self.refine(part.atoms, np.arange(part.atoms.size), why)

    def give_up(
        self, operands: Iterable[Value], shape: Iterable[int], why: str
    ) -> Value:
        """Pin all operands, with a warning, and return a result in which nothing
        moves.
        """
        for value in operands:
            if any(part.atoms.size for part in value.parts):
                self.given_up[f"{self.operator} ({why})"] = None
            self.pin(value)
        return opaque(shape)

    def leaf(
        self,
        site: str,
        shape: Sequence[int],
        buffer: bool = False,
        kernel: bool = False,
        slices: Array | None = None,
    ) -> Leaf:
        """Return a parameter's leaf: every position along every axis is a unit of its
        own until a fact ties or pins it.

        A second pass that doesn't read the same slices of a matrix reads the same
        columns in all of them.
        """
        if site not in self.leaves:
            parts = [Part((i,), self.fresh((n,))) for i, n in enumerate(shape)]
            if slices is not None:
                parts[1] = Part(
                    (0, 1), self.fresh((int(slices[-1]) + 1, shape[1]))[slices]
                )
            for part in parts:
                self.occur(np.unique(part.atoms))
            self.leaves[site] = Leaf(
                site, Value(tuple(shape), tuple(parts)), buffer, kernel, slices
            )
        leaf = self.leaves[site]
        if leaf.slices is None or (
            slices is not None and np.array_equal(leaf.slices, slices)
        ):
            return leaf
        rows, columns, *rest = leaf.value.parts
        self.unify(
            columns.atoms, np.broadcast_to(columns.atoms[0], columns.atoms.shape)
        )
        return replace(
            leaf,
            value=replace(
                leaf.value, parts=(rows, Part((1,), columns.atoms[0]), *rest)
            ),
        )

    # values ---------------------------------------------------------------------------

    def value(
        self,
        shape: Iterable[int],
        parts: Iterable[Part] = (),
        fixed: Iterable[int] = (),
    ) -> Value:
        """Return a value, and note each of its parts as all that lies in one tensor."""
        parts, shape = tuple(parts), tuple(shape)
        for part in parts:
            self.occur(part.atoms)
        labelled = {axis for part in parts for axis in part.axes}
        return Value(
            shape,
            parts,
            frozenset(i for i in fixed if i not in labelled and shape[i] > 1),
        )

    def parent_units(
        self, part: Part, axes: tuple[int, ...], sizes: Mapping[int, int]
    ) -> Part:
        """Return new units over some axes of a part, of which the part's units are
        members.
        """
        parent = Part(axes, self.fresh([sizes[a] for a in axes]))
        self.relate(part.atoms, spread(parent, part.axes, sizes))
        return parent

    def product_units(
        self, parts: Sequence[Part], sizes: Mapping[int, int], axes: Iterable[int] = ()
    ) -> Part:
        """Return units over all axes of ``parts`` (and further ones), members of the
        units of each part.
        """
        union = tuple(sorted(set(axes).union(*(part.axes for part in parts))))
        widest = next((part for part in parts if part.axes == union), None)
        units = widest or Part(union, self.fresh([sizes[a] for a in union]))
        for part in parts:
            if part.axes == union:
                self.unify(units.atoms, part.atoms)
            else:
                self.relate(units.atoms, spread(part, union, sizes))
        return units

    def project(
        self, part: Part, keep: Collection[int], sizes: Mapping[int, int]
    ) -> list[Part]:
        """Project a part on the axes ``keep``: return its parents there, or nothing if
        it depends on none of them.
        """
        axes = tuple(axis for axis in part.axes if axis in keep)
        return (
            [part]
            if axes == part.axes
            else [self.parent_units(part, axes, sizes)]
            if axes
            else []
        )

    def restrict(self, value: Value, keep: Iterable[int]) -> Value:
        """Keep units along the axes ``keep`` only; tell entries along all others apart
        by their position.
        """
        keep, sizes = set(keep), dict(enumerate(value.shape))
        parts, fixed = list[Part](), set(value.fixed)
        for part in value.parts:
            dropped = set(part.axes) - keep
            if dropped:
                fixed |= dropped
                self.refine(part.atoms, positions(dropped, part.axes, sizes))
            parts += self.project(part, keep, sizes)
        return (
            value
            if parts == list(value.parts)
            else self.value(value.shape, parts, fixed)
        )

    def collapse(self, value: Value, axes: Collection[int]) -> Value:
        """Restrict units to all other axes; these get length one."""
        return self.restrict(value, set(range(value.dim)).difference(axes)).collapsed(
            axes
        )

    def reduce(self, value: Value, axes: Iterable[int], keepdim: bool = False) -> Value:
        """Apply a symmetric reduction (sum, mean, largest entry) over some axes, along
        which units vanish.
        """
        reduced = {value.axis(axis) for axis in axes}
        keep = [axis for axis in range(value.dim) if axis not in reduced]
        parts = tuple(
            up
            for part in value.parts
            for up in self.project(part, keep, dict(enumerate(value.shape)))
        )
        order = (
            [None if i in reduced else i for i in range(value.dim)] if keepdim else keep
        )
        return self.relaid(replace(value, parts=parts), order)

    def normalise(self, value: Value, axes: Iterable[int]) -> Value:
        """Apply any function of an entry and of symmetric statistics along some
        axes.
        """
        self.reduce(value, axes)
        return value

    # rearranged axes and entries ------------------------------------------------------

    def relaid(
        self,
        value: Value,
        axes: Sequence[int | None],
        shape: Iterable[int] | None = None,
    ) -> Value:
        """Rearrange the axes.

        :param axes: for each new axis the old one, or None if all entries along it are
            equal. Axes that are left out are dropped.
        :param shape: the new shape; axes without an old one have length one by default.
        """
        to = {old: new for new, old in enumerate(axes) if old is not None}
        parts = [
            renumbered
            for part in value.parts
            if (renumbered := part.renumbered(to)).axes
        ]
        shape = shape or [1 if old is None else value.shape[old] for old in axes]
        return self.value(shape, parts, [to[i] for i in value.fixed if i in to])

    def squeeze(self, value: Value, axes: Iterable[int]) -> Value:
        """Drop axes of length one."""
        dropped = {
            value.axis(axis)
            for axis in axes
            if value.dim and value.shape[value.axis(axis)] == 1
        }
        return self.relaid(
            value, [axis for axis in range(value.dim) if axis not in dropped]
        )

    def unsqueeze(self, value: Value, axis: int) -> Value:
        """Insert an axis of length one."""
        order: list[int | None] = [*range(value.dim)]
        order.insert(axis % (value.dim + 1), None)
        return self.relaid(value, order)

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Broadcast: axes that grow or are new hold equal entries."""
        new = len(shape) - value.dim
        kept = (
            i if value.shape[i] == shape[new + i] else None for i in range(value.dim)
        )
        return self.relaid(value, [*[None] * new, *kept], shape)

    def take(self, value: Value, axis: int, index: Array) -> Value:
        """Select positions along an axis; those of a unit that is selected twice are
        told apart by their order.
        """
        if np.array_equal(index, np.arange(value.shape[axis])):
            return value
        repeated, parts = np.unique(index).size < index.size, []
        for part in value.parts:
            if part is value.columns:  # the selected rows belong to one slice
                part = Part((1,), part.atoms[index[0]])
            elif axis in part.axes:
                atoms = np.take(part.atoms, index, axis=part.axes.index(axis))
                part = Part(
                    part.axes,
                    self._copies(atoms, part.axes.index(axis)) if repeated else atoms,
                )
            parts.append(part)
        return self.value(
            [len(index) if i == axis else n for i, n in enumerate(value.shape)],
            parts,
            value.fixed,
        )

    def _copies(self, atoms: Array, axis: int) -> Array:
        """Return new atoms for an array that holds units repeatedly along an axis:
        first copies, second copies, ...
        """
        line = np.moveaxis(atoms, axis, 0).reshape(atoms.shape[axis], -1)[:, 0]
        rank = rank_within(line).reshape(
            [-1 if i == axis else 1 for i in range(atoms.ndim)]
        )
        copies = self.fresh(atoms.shape)
        # positions of one unit, also where another atom of the same unit is copied
        self.unify(copies, atoms)
        self.refine(copies, np.broadcast_to(rank, atoms.shape))
        return copies

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Reshape: axes that are merged get products of units, axes that are split keep
        theirs.
        """
        known = math.prod(n for n in shape if n != -1)
        shape = tuple(
            math.prod(value.shape) // known if n == -1 else int(n) for n in shape
        )
        if 0 in value.shape:
            return self.give_up([value], shape, "there are no entries")
        runs = matching_runs(value.shape, shape)
        for old, _ in runs:
            value = self._merge(value, old)
        merged = [
            reshaped
            for part in value.parts
            for reshaped in reshape_part(part, runs, shape)
        ]
        fixed = {new for olds, news in runs for new in news if value.fixed & set(olds)}
        parts = [self._undo_merge(part) for part in merged]
        fixed |= {
            axis
            for old, new in zip(merged, parts, strict=True)
            for axis in old.axes
            if axis not in new.axes
        }
        return self.value(shape, parts, fixed)

    def _merge(self, value: Value, axes: Sequence[int]) -> Value:
        """Make one part cover all axes of a run that are longer than one, if any part
        touches them.
        """
        long = {axis for axis in axes if value.shape[axis] > 1}
        touching = [part for part in value.parts if set(part.axes) & set(axes)]
        if not touching or (len(touching) == 1 and long <= set(touching[0].axes)):
            return value
        sizes = dict(enumerate(value.shape))
        labelled = {axis for part in touching for axis in part.axes}
        if math.prod(sizes[a] for a in long | labelled) > PRODUCT_LIMIT:
            self.given_up[
                f"{self.operator} (they belong to more than {PRODUCT_LIMIT} products)"
            ] = None
            return self.restrict(value, set(range(value.dim)) - labelled)
        units = self.product_units(touching, sizes, long)
        fixed = [
            axis for axis in units.axes if axis not in labelled and axis in value.fixed
        ]
        if fixed:
            self.refine(units.atoms, positions(fixed, units.axes, sizes))
        if len(touching) == 1 and labelled.union(fixed) == set(units.axes):
            self.products[int(units.atoms.flat[0])] = spread(
                touching[0], units.axes, sizes
            ).reshape(-1)
        others = [part for part in value.parts if part not in touching]
        return replace(
            value, parts=(*others, units), fixed=value.fixed - set(units.axes)
        )

    def _undo_merge(self, part: Part) -> Part:
        """Return the units that were merged with positions along fixed axes, if a
        reshape splits these off again.

        Attention merges a batch with heads and splits it off. Without this, the batch
        would multiply the atoms of all that follows.
        """
        first = int(part.atoms.min(initial=self.size))
        start = self.starts[max(0, bisect_right(self.starts, first) - 1)]
        factor = self.products.get(start)
        if factor is None or int(part.atoms.max()) >= start + len(factor):
            return part
        atoms = factor[part.atoms - start]
        equal = [
            n > 1 and bool((atoms == atoms.take([0], i)).all())
            for i, n in enumerate(atoms.shape)
        ]
        atoms = atoms[tuple(0 if same else slice(None) for same in equal)]
        if not any(equal) or not atoms.ndim or np.unique(atoms).size < atoms.size:
            return part
        return Part(
            tuple(
                axis for axis, same in zip(part.axes, equal, strict=True) if not same
            ),
            atoms,
        )

    # several operands -----------------------------------------------------------------

    def elementwise(self, operands: Iterable[Value | None]) -> Value:
        """Apply any function of entries at the same position, with broadcasting; ignore
        operands that are None.
        """
        values = [value for value in operands if value is not None]
        dim = max(value.dim for value in values)
        return self.combine(
            [(value, range(dim - value.dim, dim)) for value in values], range(dim)
        )

    def einsum(self, equation: str, *operands: Value) -> Value:
        """Combine operands by an equation of ``torch.einsum``, in which no operand has
        a letter twice.
        """
        inputs, _, out = equation.partition("->")
        texts = inputs.split(",")
        hidden = [
            value.dim - len(text.replace("...", ""))
            for text, value in zip(texts, operands, strict=True)
        ]
        terms = [
            (value, letters_of(text, n))
            for text, value, n in zip(texts, operands, hidden, strict=True)
        ]
        return self.combine(terms, letters_of(out, max(hidden)))

    def combine(
        self, operands: Sequence[tuple[Value, Sequence[int]]], out: Iterable[int]
    ) -> Value:
        """Multiply or add operands whose axes carry letters, and sum over all letters
        that ``out`` lacks.

        Units along equal letters are tied: as the same units if they depend on the same
        letters, as members of larger units if one depends on more letters than the
        other. No operand has a letter twice.
        """
        out, sizes = list(out), dict[int, int]()
        for value, letters in operands:
            for letter, n in zip(letters, value.shape, strict=True):
                sizes[letter] = n if sizes.get(letter, 1) == 1 else sizes[letter]
        terms = []
        for value, letters in operands:
            full = {
                axis: letter
                for axis, letter in enumerate(letters)
                if value.shape[axis] == sizes[letter]
            }
            parts = [
                renumbered
                for part in value.parts
                if (renumbered := part.renumbered(full)).axes
            ]
            terms.append((parts, {letters[axis] for axis in value.fixed}))
        self._tie(terms, sizes)
        fixed = {letter for _, own in terms for letter in own}
        moving = [
            part
            for parts, _ in terms
            for part in parts
            if not fixed.issuperset(part.axes)
        ]
        # parts that share axes, directly or through others
        connected: list[list[Part]] = []
        for part in [
            parent for one in moving for parent in self.project(one, out, sizes)
        ]:
            touching = [
                group
                for group in connected
                if any(set(part.axes) & set(other.axes) for other in group)
            ]
            connected = [group for group in connected if group not in touching]
            connected.append([*(other for group in touching for other in group), part])
        to = {letter: i for i, letter in enumerate(out)}
        parts = [self.product_units(group, sizes).renumbered(to) for group in connected]
        return self.value(
            [sizes.get(letter, 1) for letter in out],
            parts,
            {to[letter] for letter in fixed & to.keys()},
        )

    def _tie(
        self, terms: Sequence[tuple[list[Part], set[int]]], sizes: Mapping[int, int]
    ) -> None:
        """State which units of different operands are the same, or members of each
        other.
        """
        for (parts, _), (others, _) in combinations(terms, 2):
            for one, other in product(parts, others):
                common = tuple(axis for axis in one.axes if axis in other.axes)
                if one.axes == other.axes:
                    self.unify(one.atoms, other.atoms)
                elif common:
                    shared = next(
                        (part for part in (one, other) if part.axes == common), None
                    )
                    shared = shared or self.parent_units(one, common, sizes)
                    for part in (one, other):
                        if part is not shared:
                            self.relate(part.atoms, spread(shared, part.axes, sizes))
        for number, (parts, _) in enumerate(terms):
            for part in parts:
                self.occur(part.atoms)
                for fixed in (
                    own & set(part.axes)
                    for i, (_, own) in enumerate(terms)
                    if i != number
                ):
                    if fixed:
                        self.refine(part.atoms, positions(fixed, part.axes, sizes))

    def cat(self, values: Sequence[Value], axis: int) -> Value:
        """Concatenate along ``axis``: units on it are joined end to end, units on other
        axes are tied as in a sum.
        """
        along = [value.part_on(axis) for value in values]
        axes = {part.axes for part in along if part is not None}
        # units of different kinds: reduce to this axis
        if len(axes) > 1 or (None in along and not axes <= {(axis,)}):
            dropped = set[int]().union(*axes) - {axis}
            values = [
                self.restrict(value, set(range(value.dim)) - dropped)
                for value in values
            ]
            along = [value.part_on(axis) for value in values]
        tied = self.elementwise([value.collapsed([axis]) for value in values])
        shape = [
            sum(value.shape[axis] for value in values) if i == axis else n
            for i, n in enumerate(tied.shape)
        ]
        like = next((part for part in along if part is not None), None)
        if like is None:
            return self.value(shape, tied.parts, tied.fixed | {axis})
        pieces = []
        for value, part in zip(values, along, strict=True):
            atoms = self.fresh((value.shape[axis],)) if part is None else part.atoms
            # nothing in this stretch may move, unless all entries are equal
            if axis in value.fixed:
                self.refine(atoms, np.arange(atoms.size))
            pieces.append(atoms)
        joined = np.concatenate(pieces, like.axes.index(axis))
        # the same units twice, as in cat(x, -x)
        if np.unique(joined).size < joined.size:
            joined = self._copies(joined, like.axes.index(axis))
        return self.value(
            shape, [*tied.parts, Part(like.axes, joined)], tied.fixed - {axis}
        )


# small steps of propagate -------------------------------------------------------------


def _leaf(flow: Flow, trace: Trace, node: Node) -> Any:
    """Return the value of a graph's input: units along the axes of parameters and
    running statistics only.
    """
    tensor, spec = node.meta.get("val"), trace.inputs.get(node.name)
    if not isinstance(tensor, Tensor):
        return tensor
    mask = tensor.dtype == torch.bool
    if spec is None or not spec.target:  # data
        return opaque(tensor.shape, mask=mask)
    path, _, name = spec.target.rpartition(".")
    site = trace.sites.get(spec.target, spec.target)
    if spec.kind == InputKind.PARAMETER:
        module = trace.net.get_submodule(path.partition(".parametrizations.")[0])
        return flow.leaf(
            site, tensor.shape, kernel=isinstance(module, _ConvNd), slices=_slices(node)
        ).value
    statistic = spec.kind == InputKind.BUFFER and spec.persistent and name in STATISTICS
    if statistic and tensor.is_floating_point() and tensor.dim() == 1:
        return flow.leaf(site, tensor.shape, buffer=True).value
    return opaque(tensor.shape, _index_map(trace.constant(spec.target)), mask)


def _slices(node: Node) -> Array | None:
    """Return the slice of each row of a matrix whose slices read different inputs:
    groups of a kernel, or splits.
    """
    shape, pieces = tuple(node.meta["val"].shape), set[tuple[int, int]]()
    users = [(user, bound(user.target, user.args, user.kwargs)) for user in node.users]
    groups = {
        call["groups"] if call.get("weight") is node and "groups" in call else 1
        for _, call in users
    }
    if len(groups) == 1 and min(groups) > 1 < shape[1]:
        return np.arange(shape[0]) * groups.pop() // shape[0]
    if len(shape) != 2 or shape[0] * shape[1] > SLICED_LIMIT:
        return None
    for user, call in users:
        if (
            operator_name(user.target) not in SPLITS
            or call["dim"] % 2
            or call.get("step", 1) != 1
        ):
            return None
        start = range(shape[0])[call.get("start") : call.get("end")].start
        for piece in tree_leaves(user.meta["val"]):
            pieces.add((start, start + piece.shape[0]))
            start += piece.shape[0]
    starts, ends = zip(*sorted(pieces), strict=True) if pieces else ((), ())
    # a single piece, gaps or overlaps
    if len(starts) < 2 or (*starts, shape[0]) != (0, *ends):
        return None
    return np.searchsorted(starts, np.arange(shape[0]), side="right") - 1


def _apply_rule(
    flow: Flow, trace: Trace, node: Node, values: Mapping[Node, Any]
) -> Any:
    """Return the values of an operator's results, from those of its operands."""
    # loads SymPy, which takes long
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    args: Any = torch.fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = torch.fx.map_arg(node.kwargs, values.__getitem__)
    if node.target is operator.getitem:
        return args[0][int(args[1])] if isinstance(args[0], list | tuple) else args[0]
    tensors = [t for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)]
    if not tensors:
        return _read_number(flow, node, args)
    shapes = tuple(tuple(map(_concrete, t.shape)) for t in tensors)
    call = Call(
        node.target, bound(node.target, args, kwargs), shapes, trace.results_read(node)
    )
    try:
        results = _results(flow, call)
        constants = _constants(call, args, kwargs, tensors)
    except GuardOnDataDependentSymNode:  # the rule reads a number that depends on data
        results = [
            flow.give_up(call.operands, shape, "a position or a size depends on data")
            for shape in shapes
        ]
        constants = [None] * len(tensors)
    complete = []
    for tensor, result, constant in zip(tensors, results, constants, strict=True):
        constant = result.constant if constant is None else constant
        static = all(isinstance(n, int) for n in tensor.shape)
        complete.append(
            replace(
                result,
                constant=constant if static else None,
                mask=tensor.dtype == torch.bool,
            )
        )
    remaining = iter(complete)
    return tree_map(
        lambda own: next(remaining) if isinstance(own, Tensor) else own,
        node.meta["val"],
    )


def _results(flow: Flow, call: Call) -> list[Value]:
    """Apply the rule of an operator; results that it leaves out are opaque."""
    rule = rule_for(call.target)
    if rule is None:
        return [
            flow.give_up(call.operands, shape, "there is no rule")
            for shape in call.shapes
        ]
    given = rule(flow, call)
    results = [given] if isinstance(given, Value) else list(given or ())
    if not results or not all(isinstance(value, Value) for value in results):
        raise TypeError(
            f"the rule of {flow.operator} returned {given!r}; it must return what the "
            "flow's methods do"
        )
    left_out = call.shapes[len(results) :]
    if left_out and any(number >= len(results) for number in call.read):
        return [
            flow.give_up(call.operands, shape, "its statistics are read")
            for shape in call.shapes
        ]
    results += map(opaque, left_out)
    if [tuple(r.shape) for r in results] != list(call.shapes):
        raise RuntimeError(
            f"the rule of {flow.operator} gave shapes {[r.shape for r in results]}, "
            f"not {call.shapes}"
        )
    return results


def _constants(
    call: Call, args: Any, kwargs: Any, tensors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Compute the results themselves, if they are index maps that depend on index maps
    only.
    """
    args, kwargs = tree_map(
        lambda x: x.constant if isinstance(x, Value) else x, (args, kwargs)
    )
    real = tensors[0].is_floating_point() or tensors[0].is_complex()
    symbolic = any(
        isinstance(x, torch.SymInt | torch.SymFloat)
        for x in tree_leaves((args, kwargs))
    )
    if (
        real
        or symbolic
        or not call.operands
        or any(value.constant is None for value in call.operands)
    ):
        return [None] * len(tensors)
    return [_index_map(t) for t in tree_leaves(call.target(*args, **kwargs))]


def _index_map(constant: Any) -> Tensor | None:
    """Return a constant of integers, which may be an index map; anything else is
    data.
    """
    integers = type(constant) is Tensor and not (
        constant.is_floating_point() or constant.is_complex()
    )
    return constant.detach().cpu() if integers else None


def _read_number(flow: Flow, node: Node, args: Any) -> Any:
    """Pin a tensor off which an operator reads a number; sizes and assertions don't
    matter.
    """
    if not getattr(node.target, "__name__", "").startswith(("sym_", "_assert")):
        for value in args:
            if isinstance(value, Value):
                flow.pin(value)
    return node.meta.get("val")


def _concrete(size: Any) -> int:
    """Return a size, or a stand-in if it depends on data (as that of what a mask
    selects): no units lie there.
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, STAND_IN)))


def _module_of(node: Node) -> str:
    """Name the innermost module that calls the operator."""
    stack = node.meta.get("nn_module_stack") or {}
    path, kind = list(stack.values())[-1] if stack else ("", "the network")
    path, kind = (
        path.removeprefix("net").removeprefix("."),
        getattr(kind, "__name__", kind).rsplit(".", 1)[-1],
    )
    return f"{path} ({kind})" if path else kind


# parts and arrays of atoms ------------------------------------------------------------


def letters_of(text: str, hidden: int) -> list[int]:
    """Return the letters of an operand's axes as numbers; the ``hidden`` axes of an
    ellipsis have negative ones.
    """
    before, ellipsis, after = text.partition("...")
    return [
        *map(ord, before),
        *(range(-hidden, 0) if ellipsis else ()),
        *map(ord, after),
    ]


def spread(part: Part, axes: tuple[int, ...], sizes: Mapping[int, int]) -> Array:
    """Broadcast a part's atoms to more axes (ascending, a superset of its own)."""
    shape = [sizes[a] if a in part.axes else 1 for a in axes]
    return np.broadcast_to(part.atoms.reshape(shape), [sizes[a] for a in axes])


def positions(
    along: Collection[int], axes: tuple[int, ...], sizes: Mapping[int, int]
) -> Array:
    """Number every entry over ``axes`` by its position along the axes ``along``."""
    own = tuple(axis for axis in axes if axis in along)
    lengths = [sizes[axis] for axis in own]
    return spread(
        Part(own, np.arange(math.prod(lengths)).reshape(lengths)), axes, sizes
    )


def matching_runs(
    old: Sequence[int], new: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Pair runs of old axes with runs of new axes that hold equally many entries, as
    finely as possible.

    A run ends where equally many entries precede its end in both shapes.
    """
    before, after = np.cumprod(old, dtype=np.int64), np.cumprod(new, dtype=np.int64)
    ends = np.intersect1d(before, after)
    olds, news = np.searchsorted(ends, before), np.searchsorted(ends, after)
    return [
        (np.flatnonzero(olds == k).tolist(), np.flatnonzero(news == k).tolist())
        for k in range(len(ends))
    ]


def reshape_part(
    part: Part, runs: Sequence[tuple[list[int], list[int]]], new: Sequence[int]
) -> list[Part]:
    """Reshape a part that covers whole runs of axes; return nothing if no axis is
    left.
    """
    axes: list[int] = []
    for olds, news in runs:
        if set(olds) & set(part.axes):
            long = [axis for axis in news if new[axis] > 1]
            axes += long
            # else the new axis of a unit of size one is ambiguous
            if not long and len(olds) == len(news) == 1:
                axes += news
    return (
        [Part(tuple(axes), part.atoms.reshape([new[a] for a in axes]))] if axes else []
    )


def rank_within(owner: Array, by: Array | None = None) -> Array:
    """Count, for each entry, those of the same owner that precede it, in order or
    sorted by another array.
    """
    order = np.argsort(owner, kind="stable") if by is None else np.lexsort([by, owner])
    place = np.arange(len(owner))
    starts = np.r_[True, owner[order][1:] != owner[order][:-1]][: len(owner)]
    rank = np.empty(len(owner), dtype=np.int64)
    rank[order] = place - np.maximum.accumulate(np.where(starts, place, 0))
    return rank
