r"""Matching units by what they do: the correlation of hidden activations on given inputs.

.. math:: S_{ij} = \operatorname{corr}_x\big( h^{(0)}_i(x),\; h^{(1)}_j(x) \big)

over inputs (and pixels, tokens, time steps), for every factor by itself (Li et al. 2016, arXiv 1511.07543; Ainsworth et
al. 2023, section 3.1). Where a factor's units show in a network is read off the labels that
:mod:`~pyro_symmetric.symmetry.discovery` carries through every operator, so functional code, flattening, heads and
recurrent layers need no hooks of their own. Of the operators that carry all units of a factor, that with the most
entries counts, the last of several: a layer's activations rather than its sums, before any pooling.
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
from pyro_symmetric.alignment.parts.units import Units, covered_blocks, units_of
from pyro_symmetric.symmetry import trace as tracing
from pyro_symmetric.symmetry.facts import Facts
from pyro_symmetric.symmetry.forest import components
from pyro_symmetric.symmetry.labels import Array, Value
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.weight_symmetry import copied
from pyro_symmetric.symmetry.weights import Weights

# How many numbers the activations of the sources that are evaluated together may hold.
CHUNK_ENTRIES = 2**26

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class _Show:
    """Where the units of a set show.

    :param node: name of the operator.
    :param axes: the axes of its value along which they lie.
    :param index: positions on these axes, flattened: ``(blocks, count)``.
    """

    node: str
    axes: tuple[int, ...]
    index: Tensor


class ActivationCost:
    """Scores by correlation of hidden activations, for ``align(..., cost=ActivationCost(net, x))``.

    The costs that the alignment reports are minus the sums of correlations. Signs go with the match where units have
    one; scales, which no correlation sees, are fitted to the weights.

    :param net: the network, in whose place weights are put. It isn't changed; parameters and buffers that weights lack
        are taken from it. It runs in eval mode.
    :param inputs: what its ``forward`` takes. A few hundred rows do.
    :raises UntraceableError: if the network can't be traced.
    """

    def __init__(self, net: nn.Module, *inputs: Any):
        arguments.instance("net", net, nn.Module, "a torch.nn.Module")
        self._inputs = inputs
        self._net = copied(net).eval()
        tracing.try_out(self._net, inputs)
        self._program = tracing.trace(self._net, inputs)
        self._facts, self._values = Facts(), dict[torch.fx.Node, Any]()
        tracing.propagate(self._program, self._net, self._facts, set(), self._values)
        ends = [np.concatenate([pair[i] for pair in self._facts.unions] or [np.empty(0, int)]) for i in (0, 1)]
        _, self._classes = components(self._facts.size, *ends)

    def __call__(self, source: Weights, reference: Weights, permutations: PermutationGroup) -> dict[str, Tensor]:
        """Correlations of every unit of the reference (rows) with every unit of the source, for every factor.

        Of nested factors, the units of all of one kind are stacked.
        """
        arguments.weights("source", source)
        return {name: scores[0] for name, scores in self.of_many([source], reference, permutations).items()}

    def of_many(
        self, sources: Sequence[Weights], reference: Weights, permutations: PermutationGroup
    ) -> dict[str, Tensor]:
        """The same for several sources, ``(B, n, n)``: one batched forward for as many as fit into memory."""
        for source in arguments.listed("sources", sources, Mapping, "weights"):
            arguments.weights("sources", source)
        if not sources:
            raise ValueError("sources is empty; there is nothing to score")
        arguments.weights("reference", reference)
        arguments.instance("permutations", permutations, PermutationGroup, "a PermutationGroup")
        shows = self._shows(permutations)
        known = self._activations([reference], shows)
        entries = sum(value.numel() for value in known.values()) + sum(v.numel() for v in reference.values())
        size = max(1, CHUNK_ENTRIES // max(1, 3 * entries))
        pieces = [self._activations(sources[k : k + size], shows) for k in range(0, len(sources), size)]
        scores = {}
        for units in (u for root in units_of(permutations) for u in root.tree()):
            if units.name in shows:
                first = known[units.name][0]
                parts = [torch.einsum("bis,kbjs->kij", first, own[units.name]) / len(first) for own in pieces]
                scores[units.name] = torch.cat(parts)
            else:  # all that such a unit consists of is matched inside it
                scores[units.name] = torch.zeros(len(sources), units.count, units.count)
        return scores

    # small steps ----------------------------------------------------------------------------------------------------

    def _shows(self, permutations: PermutationGroup) -> dict[str, _Show]:
        found = {}
        for units in (u for root in units_of(permutations) for u in root.tree()):
            unit, block = self._owners(units, permutations)
            shows = [
                show
                for node, value in self._values.items()
                for show in self._candidates(node, value, unit, block, units)
            ]
            if shows:
                found[units.name] = max(enumerate(shows), key=lambda pair: (pair[1][0], pair[0]))[1][1]
            elif bool((unit >= 0).any()):
                raise ValueError(
                    f"no operator's result shows all {units.count} units of factor {units.name!r} (a layer inside "
                    "nn.LSTM(num_layers=...), say); align over a group without it, or by cost 'l2'"
                )
        return found

    def _owners(self, units: Units, permutations: PermutationGroup) -> tuple[Array, Array]:
        """For each class of atoms, the unit that it belongs to and its number among that unit's; -1 for none."""
        unit, block = np.full(self._facts.size, -1), np.full(self._facts.size, -1)
        number = 0
        for (site, dim), index in units.places.items():
            if site not in self._facts.leaves:
                raise ValueError(f"the network has no site {site!r}, which factor {units.name!r} moves")
            if permutations.view_shapes[site] != permutations.site_shapes[site]:
                continue  # units of a grouped kernel show in its rows and in its neighbours
            inside = {int(b) for child in units.inner for b in covered_blocks(units, child, (site, dim))}
            atoms = self._facts.leaves[site].parts[dim].atoms
            for b in sorted(set(range(len(index))) - inside):
                classes = self._classes[atoms[index[b].numpy()]]
                if (unit[classes] < 0).all():
                    unit[classes], block[classes] = np.arange(units.count), number
                    number += 1
        return unit, block

    def _candidates(
        self, node: torch.fx.Node, value: Any, unit: Array, block: Array, units: Units
    ) -> list[tuple[float, _Show]]:
        """Labellings of one operator's result that show every unit equally often, with how many entries they have."""
        if node.op != "call_function" or not isinstance(value, Value):
            return []
        found = []
        for part in value.parts:
            classes = self._classes[part.atoms.reshape(-1)]
            positions = np.flatnonzero(unit[classes] >= 0)
            owners = unit[classes[positions]]
            counts = np.bincount(owners, minlength=units.count)
            if not len(positions) or counts.min() != counts.max():
                continue
            order = np.lexsort((positions, block[classes[positions]], owners))
            index = torch.from_numpy(positions[order].reshape(units.count, -1).T.copy())
            entries = float(np.prod(value.shape)) / part.atoms.size * len(index)
            found.append((entries, _Show(node.name, part.axes, index)))
        return found

    def _activations(self, many: Sequence[Weights], shows: Mapping[str, _Show]) -> dict[str, Tensor]:
        """Standardised activations of every set, ``(B, blocks, count, entries)``; zero where a unit never changes."""
        results = self._results(many, {show.node for show in shows.values()})
        found = {}
        for name, show in shows.items():
            axes, to = [1 + axis for axis in show.axes], list(range(1, 1 + len(show.axes)))
            value = results[show.node].movedim(axes, to).flatten(1, len(axes))
            rows = value.flatten(2) if value.dim() > 2 else value.unsqueeze(-1)
            rows = rows[:, show.index.to(value.device)].double()
            rows = rows - rows.mean(-1, keepdim=True)
            norms = rows.norm(dim=-1, keepdim=True)
            found[name] = torch.where(norms > 0, rows / norms.clamp_min(1e-300), 0.0)
        return found

    def _results(self, many: Sequence[Weights], nodes: set[str]) -> dict[str, Tensor]:
        """What some operators return for each of several weights, ``(B, ...)``."""
        arguments = [self._arguments(weights) for weights in many]
        if len(many) > 1:
            # What no weights replace is the same object for all.
            own = [any(value is not first for value in values) for first, *values in zip(*arguments, strict=True)]
            columns = zip(own, zip(*arguments, strict=True), strict=True)
            stacked = [torch.stack(values) if differs else values[0] for differs, values in columns]
            mapped = torch.func.vmap(
                lambda *given: _Recorder(self._program, nodes).record(given),
                in_dims=tuple(0 if differs else None for differs in own),
            )
            try:
                found: dict[str, Tensor] = mapped(*stacked)
                return found
            except RuntimeError as error:  # a fused recurrent layer, say, for which vmap has no rule
                _log.debug("taken one by one, as the network can't be evaluated for many weights at once: %s", error)
        every = [_Recorder(self._program, nodes).record(given) for given in arguments]
        return {name: torch.stack([results[name] for results in every]) for name in nodes}

    def _arguments(self, weights: Weights) -> list[Any]:
        names = tracing.site_names(self._net)
        own = dict(self._net.named_parameters()) | dict(self._net.named_buffers())
        arguments: list[Any] = []
        users = iter(torch.utils._pytree.tree_leaves(self._inputs))
        for spec in self._program.graph_signature.input_specs:
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
                arguments.append(own[target] if target in own else self._program.constants[str(spec.target)])
        return arguments


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
