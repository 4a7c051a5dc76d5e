r"""Correlations of hidden activations on given inputs: units by what they do.

.. math:: S_{ij} = \operatorname{corr}_x\big( h^{(0)}_i(x),\; h^{(1)}_j(x) \big)

over inputs (and pixels, tokens, time steps), for every set of units by itself (Li et al. 2016, arXiv 1511.07543;
Ainsworth et al. 2023, section 3.1). The places at which units show are read off the labels that
:mod:`~pyro_symmetric.discovery.find` carries through every operator, so functional code, flattening, heads and
recurrent layers need no hooks of their own. Of the operators that carry all units of a set, that with the most entries
counts, the last of several: a layer's activations rather than its sums, before any pooling.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from pyro_symmetric import arguments
from pyro_symmetric.discovery.arrays import Array
from pyro_symmetric.discovery.export import site_names, try_out
from pyro_symmetric.discovery.flow import Leaf, Value
from pyro_symmetric.discovery.symmetry import copied
from pyro_symmetric.discovery.trace import Trace, walked
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.units import moves_of
from pyro_symmetric.weights import Weights

# How many numbers the activations of the sources that are evaluated together may hold.
CHUNK_ENTRIES = 2**26

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Show:
    """An operator in which units show.

    :param node: name of the operator.
    :param axes: the axes of its value along which they lie.
    :param index: positions on these axes, flattened: ``(blocks, count)``.
    """

    node: str
    axes: tuple[int, ...]
    index: Tensor


@dataclass(frozen=True, eq=False)
class Shown:
    """Features of what units do.

    :param group: the units, along sites of their own, ``(count, samples)``.
    :param reference: site -> features ``(1, 1, count, samples)``; ``source``: ``(1, B, count, samples)``.
    :param signed: name of the units -> the set of units, itself or inside it, whose sign shows.
    """

    group: Group
    reference: Weights
    source: Weights
    signed: Mapping[str, str]


class Activations:
    """Hidden activations of a network under many weights, unit by unit.

    :param net: the network, in whose place weights are put. It isn't changed; parameters and buffers that weights lack
        are taken from it. It runs in eval mode.
    :param inputs: what its ``forward`` takes. A few hundred rows do.
    :raises UntraceableError: if the network can't be traced.
    """

    def __init__(self, net: nn.Module, *inputs: Any):
        arguments.instance("activations[0]", net, nn.Module, "a torch.nn.Module")
        self._net = copied(net).eval()
        try_out(self._net, inputs)
        self._trace = Trace(self._net, inputs)
        self._flow, (self._values,) = walked([self._trace])
        _, self._classes = self._flow.classes()

    def __call__(self, sources: Weights, reference: Weights, group: Group) -> Shown:
        """Standardised activations of every set of units that is permuted.

        :param sources: weights with one leading batch dimension: one batched forward for as many as fit into memory.
        """
        count = len(next(iter(sources.values())))
        every = [{site: value[k] for site, value in sources.items()} for k in range(count)]
        shows = self._shows(group)
        known = self._activations([reference], shows)
        entries = sum(value.numel() for value in known.values()) + sum(v.numel() for v in reference.values())
        size = max(1, CHUNK_ENTRIES // max(1, 3 * entries))
        pieces = [self._activations(every[k : k + size], shows) for k in range(0, count, size)]

        def laid(value: Tensor) -> Tensor:  # (B, blocks, count, entries) -> one channel
            return value.transpose(1, 2).flatten(2).unsqueeze(0)

        first = {name: laid(value) / value.shape[1] for name, value in known.items()}
        signed = {name: own for name, own in _signed(group).items() if name in shows}
        whole = _of_shows(group.permutations, first, signed)
        return Shown(whole, first, {name: laid(torch.cat([own[name] for own in pieces])) for name in shows}, signed)

    # small steps ----------------------------------------------------------------------------------------------------

    def _shows(self, group: Group) -> dict[str, _Show]:
        """The operator in which each set's units show."""
        found: dict[str, _Show] = {}
        for name in group.names("permute"):
            unit, block = self._owners(name, group)
            shows = [
                show
                for node, value in self._values.items()
                for show in self._candidates(node, value, unit, block, group[name].count)
            ]
            if shows:
                found[name] = max(enumerate(shows), key=lambda pair: (pair[1][0], pair[0]))[1][1]
            elif bool((unit >= 0).any()):
                raise ValueError(
                    f"no operator's result shows all {group[name].count} units {name!r} (a layer inside "
                    "nn.LSTM(num_layers=...), say); align over a group without them, or by their weights"
                )
        return found

    def _owners(self, name: str, group: Group) -> tuple[Array, Array]:
        """For each class of atoms, which of some units it belongs to and its number among that unit's; -1 for none."""
        unit, block = np.full(self._flow.size, -1), np.full(self._flow.size, -1)
        inside = [
            axis for child in group.children(name) if "permute" in group[child].moves for axis in group[child].axes
        ]
        number = 0
        for axis in group[name].axes:
            if axis.site not in self._flow.leaves:
                raise ValueError(f"the network has no site {axis.site!r}, along which the units {name!r} lie")
            leaf, count = self._flow.leaves[axis.site], group[name].count
            taken = [a.index.reshape(-1) for a in inside if (a.site, a.dim, a.span) == (axis.site, axis.dim, axis.span)]
            for atoms in _atoms_along(leaf, axis):
                for row in axis.index:
                    if any(bool(torch.isin(row, own).any()) for own in taken):
                        continue
                    classes = self._classes[atoms[row.numpy()]]
                    if (unit[classes] < 0).all() and len(np.unique(classes)) == count:
                        unit[classes], block[classes] = np.arange(count), number
                        number += 1
        return unit, block

    def _candidates(
        self, node: torch.fx.Node, value: Any, unit: Array, block: Array, count: int
    ) -> list[tuple[float, _Show]]:
        """Labellings of one operator's result that show every unit equally often, with how many entries they have."""
        if node.op != "call_function" or not isinstance(value, Value) or value.columns is not None:
            return []
        found = []
        for part in value.parts:
            classes = self._classes[part.atoms.reshape(-1)]
            positions = np.flatnonzero(unit[classes] >= 0)
            owners = unit[classes[positions]]
            counts = np.bincount(owners, minlength=count)
            if not len(positions) or counts.min() != counts.max():
                continue
            order = np.lexsort((positions, block[classes[positions]], owners))
            index = torch.from_numpy(positions[order].reshape(count, -1).T.copy())
            entries = float(np.prod(value.shape)) / part.atoms.size * len(index)
            found.append((entries, _Show(node.name, part.axes, index)))
        return found

    def _activations(self, many: Sequence[Weights], shows: Mapping[str, _Show]) -> dict[str, Tensor]:
        """Standardised activations of every set, ``(B, blocks, count, entries)``; zero where a unit never changes."""
        results = self._results(many, {show.node for show in shows.values()})
        found = {}
        for name, show in shows.items():
            rows = _rows(results[show.node], show)
            rows = rows - rows.mean(-1, keepdim=True)
            norms = rows.norm(dim=-1, keepdim=True)
            found[name] = torch.where(norms > 0, rows / norms.clamp_min(1e-300), 0.0)
        return found

    def _results(self, many: Sequence[Weights], nodes: set[str]) -> dict[str, Tensor]:
        """The results of some operators for each of several weights, ``(B, ...)``."""
        arguments = [self._arguments(weights) for weights in many]
        if len(many) > 1:
            # What no weights replace is the same object for all.
            own = [any(value is not first for value in values) for first, *values in zip(*arguments, strict=True)]
            columns = zip(own, zip(*arguments, strict=True), strict=True)
            stacked = [torch.stack(values) if differs else values[0] for differs, values in columns]
            mapped = torch.func.vmap(
                lambda *given: _Recorder(self._trace.program, nodes).record(given),
                in_dims=tuple(0 if differs else None for differs in own),
            )
            try:
                found: dict[str, Tensor] = mapped(*stacked)
                return found
            except RuntimeError as error:  # a fused recurrent layer, say, for which vmap has no rule
                _log.debug("taken one by one, as the network can't be evaluated for many weights at once: %s", error)
        every = [_Recorder(self._trace.program, nodes).record(given) for given in arguments]
        return {name: torch.stack([results[name] for results in every]) for name in nodes}

    def _arguments(self, weights: Weights) -> list[Any]:
        names = site_names(self._net)
        own = dict(self._net.named_parameters()) | dict(self._net.named_buffers())
        arguments: list[Any] = []
        users = iter(self._trace.tensors)
        for spec in self._trace.specs:
            if spec.kind == InputKind.USER_INPUT:
                arguments.append(next(users))
                continue
            target = names.get(str(spec.target), str(spec.target))
            if target in weights:
                like = own[target]
                if weights[target].shape != like.shape:
                    raise ValueError(
                        f"the weights of site {target!r} have shape {tuple(weights[target].shape)}, but those of net "
                        f"{tuple(like.shape)}; is it another architecture?"
                    )
                arguments.append(weights[target].to(like.device, like.dtype))
            else:
                arguments.append(own[target] if target in own else self._trace.constant(spec.target))
        return arguments


def _of_shows(group: Group, features: Weights, signed: Mapping[str, str]) -> Group:
    """The permuted units, each along the site of its own activations and those of what lies inside it."""
    shapes = {name: value.shape[2:] for name, value in features.items()}
    units = []
    for name, one in group.units.items():
        axes = []
        for site in (own for own in group.family(name) if own in shapes):
            index = torch.arange(shapes[site][0], device="cpu").reshape(one.count, -1).T
            axes.append(Axis(site, 0, index, int(site == name and name in signed)))
        flips = moves_of("moves", "flip") if name in signed else frozenset()
        units.append(Units(name, one.size, tuple(axes), one.parent, one.copies, one.moves | flips))
    return Group(units, shapes)


def _rows(value: Tensor, show: _Show) -> Tensor:
    """The values of units, ``(B, blocks, count, entries)``, in an operator's results ``(B, ...)``."""
    axes, to = [1 + axis for axis in show.axes], list(range(1, 1 + len(show.axes)))
    value = value.movedim(axes, to).flatten(1, len(axes))
    rows = value.flatten(2) if value.dim() > 2 else value.unsqueeze(-1)
    return rows[:, show.index.to(value.device)].double()


def _atoms_along(leaf: Leaf, axis: Axis) -> list[Array]:
    """The atoms that lie along an axis, position by position; of columns of slices, slice by slice."""
    if leaf.slices is None or axis.dim > 1:
        return [leaf.value.parts[axis.dim].atoms]
    rows, columns = (part.atoms for part in leaf.value.parts[:2])
    if axis.span > 1:
        return [columns.reshape(-1), rows.repeat(columns.shape[1])]
    return [rows] if axis.dim == 0 else list(np.unique(columns, axis=0))


def _signed(group: Group) -> dict[str, str]:
    """Units, themselves or riders, whose sign activations show: another layer's matrix takes it back.

    A sign that is undone before it leaves (in front of a normalisation) shows in no activation.
    """
    found: dict[str, str] = {}
    for name in group.names("permute"):
        for own in (name, *(child for child in group.children(name) if group[child].size == 1)):
            if "flip" in group[own].moves and any(_takes_back(group, axis) for axis in group[own].axes):
                found.setdefault(name, own)
    return found


def _takes_back(group: Group, axis: Axis) -> bool:
    """True if columns of a matrix lie along an axis, or rows that are multiplied by the units: keys, of queries."""
    rows = axis.exponent < 0 and len(group.site_shapes[axis.site]) > 1
    return bool(axis.exponent % 2) and (axis.dim > 0 or rows)


class _Recorder(torch.fx.Interpreter):
    """Runs a traced network and keeps the results of some operators."""

    def __init__(self, program: ExportedProgram, nodes: set[str]):
        super().__init__(program.graph_module)
        self._nodes = nodes
        self._results: dict[str, Tensor] = {}

    def record(self, arguments: Sequence[Any]) -> dict[str, Tensor]:
        """The results, by the operators' names."""
        with torch.no_grad():
            self.run(*arguments)
        return self._results

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.name in self._nodes:
            self._results[n.name] = result
        return result
