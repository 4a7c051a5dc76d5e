r"""Blocks that repeat: a deep network, cut down to two blocks of each kind.

Many networks apply one function several times, with other weights each time:
:math:`x_{i+1} = f(x_i, w_i)`, as do the layers of a transformer. Their laws are found
in a network that holds two blocks of each run, and copied to the others: what the
weights of one block obey by themselves, those of each do; and what ties both blocks to
the rest in the same way (a residual stream, whose scale is the same everywhere) ties
all. Laws of other kinds aren't copied.

Blocks are stretches of operators in the graph that begin where numbered modules do,
each equal to the one before it but for its weights: masks and other constants are the
same. For example::

    start = Linear(4, 24)
    blocks.0, blocks.1, blocks.2: x + last(relu(first(x))), first of 16 units
    end = Linear(24, 2)

The graph that is solved has ``start``, ``blocks.0``, ``blocks.1`` and ``end``. The law
of the 16 units of ``blocks.0`` has axes in ``first.weight``, ``first.bias`` and
``last.weight``, and the basis (1, 1, -1); the units of ``blocks.2`` lie along the same
axes of their block, and have the same basis. The stream of 24 units has axes in all
blocks, in ``start`` and in ``end``. Its sign, with the parity 1 at each axis, is equal
in both blocks, and is copied with the same numbers to the third. A parity that is 1 in
``blocks.0`` and 0 at ``start`` and in ``blocks.1`` is what one block obeys by itself,
and gives one for each block. A basis that isn't made of such vectors raises
:class:`UnequalBlocks`: then all blocks are solved.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import operator
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves

from pyro_symmetric.discovery.integer_algebra import Exponents, independent, vanishing
from pyro_symmetric.discovery.propagate import STATISTICS
from pyro_symmetric.discovery.reads import arguments_of
from pyro_symmetric.discovery.registry import Array
from pyro_symmetric.discovery.trace import Trace
from pyro_symmetric.groups import Axis

Calls = Sequence[fx.Node]  # operators in the order of the graph


class Repeats(NamedTuple):
    """A graph with two blocks of each run.

    :ivar graph: the graph, in which the second block stands for those that follow it;
        None if none was searched.
    :ivar block: site of a block -> the number of its run, and that of the block in it.
    :ivar stand_in: site of any block but the first -> the site in its place in the
        first.
    """

    graph: fx.Graph | None
    block: dict[str, tuple[int, int]]
    stand_in: dict[str, str]

    def of(self, site: str) -> tuple[int, int]:
        """Return the run and the block to which a site belongs; -1 and 0 for none."""
        return self.block.get(site, (-1, 0))

    def keys(self, axes: Sequence[Axis]) -> list[Any]:
        """Return a key for each axis: equal for axes in the same place of other blocks,
        and for no others.
        """
        return [(self.stand_in.get(a.site, a.site), *_along(a)) for a in axes]


def without_repeats(trace: Trace, laws: Sequence[Sequence[Axis]]) -> Repeats:
    """Return a traced graph with two blocks in place of each run of more.

    :param laws: the axes of each set of units that obeys a law. A set has all of its
        axes in one block, or the same in all blocks of a run; runs between whose blocks
        other sets lie, layers that follow one another, say, stay.
    """
    site_of = {}
    constants = {}
    for name, spec in trace.inputs.items():
        if not spec.target:
            continue
        target = str(spec.target)
        site_of[name] = trace.sites.get(target, target)
        constant = spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        if constant and target.rpartition(".")[2] not in STATISTICS:
            constants[name] = _digest(trace.constant(target))
    graph = copy.deepcopy(trace.program.graph)
    repeats = Repeats(graph, {}, {})
    while run := _longest_run(graph, site_of, constants, laws, repeats.block):
        number = len(repeats.block)
        first, second, *copied = run
        for k, block in enumerate(run):
            repeats.block.update(dict.fromkeys(block.sites, (number, k)))
        for block in run[1:]:
            repeats.stand_in.update(zip(block.sites, first.sites, strict=True))
        for block in copied:
            for node, second_call in zip(block.calls, second.calls, strict=True):
                node.replace_all_uses_with(second_call)
        for block in reversed(copied):
            for node in reversed(block.calls):
                graph.erase_node(node)
        remaining = []
        for axes in laws:
            remaining.append([a for a in axes if repeats.of(a.site)[1] < 2])
        laws = remaining
    return repeats


class UnequalBlocks(Exception):
    """The laws of two blocks don't tell those of all: they tie neighbours, differ, or
    are those of dead units.
    """


def copies(
    basis: list[Exponents],
    two: Sequence[Axis],
    axes: Sequence[Axis],
    repeats: Repeats,
    modulo_two: bool,
) -> list[Exponents]:
    """Copy exponents from the axes of two blocks of each run to those of every block.

    What one block obeys by itself, each does; what both obey with equal exponents, all
    do.

    :raises UnequalBlocks: if the basis isn't the sum of these.
    """
    if not basis:
        return []
    keys = repeats.keys(two)
    places = [repeats.of(axis.site) for axis in two]
    column = dict[tuple[Any, int], int]()
    for number, (key, (_, k)) in enumerate(zip(keys, places, strict=True)):
        column[key, k] = number
    # for each column that of its place in the other block
    exchanged = [
        column.get((key, 1 - k), number) for (key, k), number in column.items()
    ]
    by_block, by_all = _split(np.array(basis), places, exchanged, modulo_two)
    in_first = [column[key, 0] for key in repeats.keys(axes)]
    in_all = [repeats.of(axis.site) for axis in axes]
    copied = list[Array]()
    for run, vector in by_block:
        for block in sorted({place for place in in_all if place[0] == run}):
            inside = [place == block for place in in_all]
            copied.append(np.where(inside, vector[in_first], 0))
    copied += [vector[in_first] for vector in by_all]
    return [tuple(map(int, numbers)) for numbers in copied]


def _split(
    vectors: Array,
    places: Sequence[tuple[int, int]],
    exchanged: list[int],
    modulo_two: bool,
) -> tuple[list[tuple[int, Array]], list[Array]]:
    """Split a basis of exponents of two blocks of each run.

    :param places: the run and the block of each column.
    :param exchanged: for each column that of its place in the other block.
    :return: what the first block of a run obeys by itself, with the run's number; and
        what all blocks obey with equal exponents, and none by itself.
    :raises UnequalBlocks: if the basis isn't the sum of these.
    """
    by_block = list[tuple[int, Array]]()
    for run in sorted({run for run, _ in places} - {-1}):
        elsewhere = vectors[:, [place != (run, 0) for place in places]]
        for vector in vanishing(vectors, elsewhere, modulo_two):
            by_block.append((run, vector))
    in_either = [vector for _, vector in by_block]
    in_either += [vector[exchanged] for vector in in_either]
    difference = vectors - vectors[:, exchanged]
    # What ties two blocks to nothing else, two flips that cancel, say, wouldn't do in
    # three.
    outside = vectors[:, [run < 0 for run, _ in places]]
    pairs = vanishing(vectors, np.hstack([difference, outside]), modulo_two)
    if len(independent([*in_either, *pairs], modulo_two)) > len(in_either):
        raise UnequalBlocks
    candidates = [*in_either, *vanishing(vectors, difference, modulo_two)]
    chosen = independent(candidates, modulo_two)
    spanned = independent([*vectors, *candidates], modulo_two)
    if not len(chosen) == len(spanned) == len(vectors):
        raise UnequalBlocks
    return by_block, [candidates[k] for k in chosen if k >= len(in_either)]


# one run of blocks --------------------------------------------------------------------


class _Block(NamedTuple):
    """Calls, and the sites that these alone read, in the same order in each block of a
    run.
    """

    calls: Calls
    sites: list[str]


def _longest_run(
    graph: fx.Graph,
    site_of: Mapping[str, str],
    constants: Mapping[str, bytes],
    laws: Sequence[Sequence[Axis]],
    taken: Collection[str],
) -> list[_Block]:
    """Return the run of blocks, without sites that are taken, that saves the most
    operators.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    labels = {node: node.name for node in graph.nodes}
    for node in graph.nodes:
        if node.name in site_of:
            labels[node] = f"{constants.get(node.name)!r} {_form(node)}"
    candidates = list[list[Calls]]()
    for starts in _starts(calls):
        candidates += _equal_stretches(calls, starts, labels)
    for run in sorted(candidates, key=lambda run: -len(run[0]) * (len(run) - 2)):
        blocks = _blocks(run, site_of)
        sites = [block.sites for block in blocks]
        if blocks and set(taken).isdisjoint(itertools.chain(*sites)):
            if _alone(blocks, graph, site_of, laws) and _obey_alike(sites, laws):
                return blocks
    return []


def _starts(calls: Calls) -> list[list[int]]:
    """Return where modules begin that differ in a number of their path, ``layers.0``
    and ``layers.1``, say.
    """
    first = dict[str, dict[str, int]]()  # path without the number -> path -> its start
    for place, call in enumerate(calls):
        for path, _ in (call.meta.get("nn_module_stack") or {}).values():
            first.setdefault(path.rstrip("0123456789"), {}).setdefault(path, place)
    return [[*places.values()] for places in first.values() if len(places) > 2]


def _equal_stretches(
    calls: Calls, starts: list[int], labels: dict[fx.Node, Any]
) -> list[list[Calls]]:
    """Cut calls at the starts of modules, the last as long as the one before it, and
    return stretches of three and more that are equal but for the sites that they read.

    A result of the same or of the previous module counts by how far back it is.
    """
    ends = [*starts[1:], 2 * starts[-1] - starts[-2]]
    blocks = []
    for start, end in zip(starts, ends, strict=True):
        first = max(0, 2 * start - end)
        near = {call: at - start for at, call in enumerate(calls[first:end], first)}
        seen = ChainMap[fx.Node, Any](near, labels)
        signatures = [_signature(call, seen) for call in calls[start:end]]
        blocks.append((signatures, calls[start:end]))
    stretches = []
    for _, equal in itertools.groupby(blocks, operator.itemgetter(0)):
        stretch = [block for _, block in equal]
        if len(stretch) > 2:
            stretches.append(stretch)
    return stretches


def _blocks(run: Sequence[Calls], site_of: Mapping[str, str]) -> list[_Block]:
    """Return blocks with the sites that differ between them."""
    read = []
    for calls in run:
        nodes = itertools.chain.from_iterable(map(arguments_of, calls))
        read.append([site_of.get(node.name, "") for node in nodes])
    columns = dict.fromkeys(zip(*read, strict=True))
    differing = [column for column in columns if len(set(column)) > 1]
    sites = map(list, zip(*differing, strict=True))
    return [*itertools.starmap(_Block, zip(run, sites, strict=False))]


def _signature(call: fx.Node, seen: Mapping[fx.Node, Any]) -> str:
    """Return what equal calls share: operator, numbers, shapes and dtypes, and what
    their block sees of what they read.
    """
    arguments = fx.map_arg((call.args, call.kwargs), seen.__getitem__)
    return f"{call.target} {arguments} {_form(call)}"


def _digest(value: Tensor) -> bytes:
    """Return a hash of a constant's entries; of a sparse one, which equals no other,
    its identity.
    """
    if value.layout != torch.strided:
        return str(id(value)).encode()
    entries = value.detach().cpu().contiguous().flatten()
    return hashlib.sha256(entries.view(torch.uint8).numpy().tobytes()).digest()


def _alone(
    blocks: Sequence[_Block],
    graph: fx.Graph,
    site_of: Mapping[str, str],
    laws: Sequence[Sequence[Axis]],
) -> bool:
    """Return whether no call outside of a block reads its sites, and none inside reads
    others that obey a law.

    Of the blocks that become one, a single one may have its results read outside: two
    would be equal.
    """
    inside = dict[fx.Node, int]()
    owner = dict[str, int]()
    for number, block in enumerate(blocks):
        inside.update(dict.fromkeys(block.calls, number))
        owner.update(dict.fromkeys(block.sites, number))
    obeying = {axis.site for axis in itertools.chain.from_iterable(laws)}
    for node in graph.nodes:
        site = site_of.get(node.name, "")
        readers = set(map(inside.get, node.users))
        if site in obeying or site in owner:
            if readers - {owner.get(site)}:
                return False
    ends = set[int]()
    for call, number in inside.items():
        for user in call.users:
            if user.op == "call_function" and user not in inside:
                ends.add(number)
    return len(ends - {0}) < 2


def _obey_alike(sites: Sequence[Sequence[str]], laws: Sequence[Sequence[Axis]]) -> bool:
    """Return whether each law has all of its axes in one block, as those of all others,
    or the same in all blocks.
    """
    place = dict[str, tuple[int, int]]()
    for k, block_sites in enumerate(sites):
        for i, site in enumerate(block_sites):
            place[site] = k, i
    inner: list[set[frozenset[Any]]] = [set() for _ in sites]
    for axes in laws:
        images: list[set[Any]] = [set() for _ in sites]
        for axis in axes:
            if axis.site in place:
                k, i = place[axis.site]
                images[k].add((i, *_along(axis)))
        touched = [k for k, image in enumerate(images) if image]
        if len(touched) == 1 and all(axis.site in place for axis in axes):
            inner[touched[0]].add(frozenset(images[touched[0]]))
        elif touched and any(image != images[0] for image in images):
            return False
    return all(laws_of_block == inner[0] for laws_of_block in inner)


def _form(node: fx.Node) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shapes and dtypes of a node's results."""
    values = tree_leaves(node.meta.get("val"))
    return [(tuple(v.shape), v.dtype) for v in values if isinstance(v, Tensor)]


def _along(axis: Axis) -> tuple[Any, ...]:
    """Return what tells an axis from others of its site."""
    return axis.dim, axis.span, axis.index.shape, axis.index.numpy().tobytes()
