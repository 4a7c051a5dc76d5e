"""Members of batched products: networks of an ensemble, experts, heads, stacked in one
parameter.

``einsum("ehi,bi->beh", w, x)`` multiplies each member ``w[e]`` by itself. The units of
one member, along ``h``, may be permuted without those of another, but an axis that is a
unit at every member has a single permutation. So axes flow twice. The first time, sums
of products are noted in which several operands and the result share an axis; all axes
that are tied to it are axes of members. The second time, parameters have units of their
own at each member.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pyro_symmetric.discovery.cells import unified
from pyro_symmetric.discovery.flow import SLICED_LIMIT, Flow, Leaf
from pyro_symmetric.discovery.reads import reads_of
from pyro_symmetric.discovery.registry import Array, operator_name
from pyro_symmetric.discovery.trace import Trace

# operators that leave the axes of a parameter apart, and those that combine axes of
# several operands by name; others see entries one after the other
VIEWS = frozenset(
    """permute transpose t movedim unsqueeze squeeze expand clone contiguous detach
    alias to _to_copy view reshape _unsafe_view lift_fresh_copy""".split()  # noqa: SIM905
)
PRODUCTS = frozenset(
    ["bmm", "baddbmm", "matmul", "mm", "einsum", "mul", "add", "sub", "div"]
)


class Members(NamedTuple):
    """Parameters that products read member by member.

    :ivar axes: site -> the axis of its members.
    :ivar refused: further sites, which are read in other ways, too, or are large: their
        members keep units in common.
    """

    axes: dict[str, int]
    refused: list[str]


def members_of(flow: Flow, traces: Sequence[Trace]) -> Members:
    """Return the parameters that products read member by member."""
    axes = dict[str, int]()
    refused = list[str]()
    for site, axis in _candidates(flow).items():
        large = math.prod(flow.leaves[site].value.shape) > SLICED_LIMIT
        if large or not _read_by_axes(site, traces):
            refused.append(site)
        else:
            axes[site] = axis
    return Members(axes, refused)


def _candidates(flow: Flow) -> dict[str, int]:
    """Return the sites with an axis of members and another that is summed, or free, in
    products of these; and the axis of members.
    """
    if not flow.batches:
        return {}
    count, unit = unified(flow)
    candidates = dict[str, int]()
    for batch, operands in flow.batches:
        in_batch = _among(unit, count, batch)
        outside = _among(unit, count, operands)
        for leaf in flow.leaves.values():
            plain = leaf.slices is None and not (leaf.kernel or leaf.buffer)
            if leaf.site in candidates or not plain:
                continue
            along = _axes_in(leaf, unit, in_batch)
            further = _axes_in(leaf, unit, outside)
            if len(along) == 1 and any(axis != along[0] for axis in further):
                candidates[leaf.site] = along[0]
    return candidates


def _among(unit: Array, count: int, arrays: Sequence[Array]) -> Array:
    """Return for each of ``count`` units whether it has atoms in these arrays."""
    among = np.zeros(count, dtype=bool)
    for atoms in arrays:
        among[unit[atoms]] = True
    return among


def _axes_in(leaf: Leaf, unit: Array, among: Array) -> list[int]:
    """Return the axes of a parameter all of whose positions are some of the units."""
    return [
        part.axes[0]
        for part in leaf.value.parts
        if part.atoms.size > 1 and among[unit[part.atoms]].all()
    ]


def _read_by_axes(site: str, traces: Sequence[Trace]) -> bool:
    """Return whether products read all of a parameter, or views of it."""
    for trace in traces:
        for node in trace.nodes():
            spec = trace.inputs.get(node.name)
            if spec is None or not spec.target:
                continue
            if trace.sites.get(spec.target, spec.target) != site:
                continue
            for read in reads_of(node):
                views = {operator_name(view.target) for view in read.views}
                if operator_name(read.call.target) not in PRODUCTS or views - VIEWS:
                    return False
    return True
