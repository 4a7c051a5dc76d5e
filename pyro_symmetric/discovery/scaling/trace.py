"""Multipliers carried through the graph of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from torch.nn.modules.conv import _ConvNd

from pyro_symmetric.discovery.flow import Part
from pyro_symmetric.discovery.rules.registry import operator_name
from pyro_symmetric.discovery.scaling.facts import Entangled, Facts
from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import Value, opaque
from pyro_symmetric.discovery.scaling.nodes import arguments_of
from pyro_symmetric.discovery.scaling.operators import applied, index_map
from pyro_symmetric.discovery.scaling.plan import planned, stacked
from pyro_symmetric.discovery.scaling.rules.registry import rule_for
from pyro_symmetric.discovery.scaling.rules.spatial import convolution
from pyro_symmetric.discovery.scaling.slices import Slices
from pyro_symmetric.discovery.scaling.statistics import Use, statistics
from pyro_symmetric.discovery.trace import Trace, module_of


class MultiplierTrace(Trace):
    """A trace whose operators state equations between multipliers."""

    def equations(self, facts: Facts) -> dict[torch.fx.Node, Any]:
        """Carry labels through the graph, recording facts; returns the labels of every node's value."""
        values: dict[torch.fx.Node, Any] = {}
        labeller, lives = Labeller(facts), _needed(self.program.graph)
        for node in self.program.graph.nodes:
            if node not in lives:
                continue
            if node.op in ("placeholder", "get_attr"):
                values[node] = self._given(node, facts)
            elif node.op == "call_function":
                labeller.where = f"{operator_name(node.target)} in {module_of(node)}"
                values[node] = applied(node, values, labeller, self.returned)
        labeller.where = "the network's output"
        for node in self.returned:
            if isinstance(values[node], Value):
                labeller.pin(values[node])
        return values

    def statistics(self) -> dict[str, Use | None]:
        """The buffers that the graph reads: how they are used, if they are statistics of units."""
        nodes = {n: self._specs[n.name] for n in self.program.graph.nodes if n.name in self._specs and n.users}
        buffers = {n: str(spec.target) for n, spec in nodes.items() if spec.kind == InputKind.BUFFER}
        saved = {n: name.rpartition(".")[0] for n, name in buffers.items() if nodes[n].persistent}
        learned = [n for n, spec in nodes.items() if spec.kind == InputKind.PARAMETER]
        found = statistics(self.program.graph.nodes, saved, learned)
        return {self._sites.get(name, name): found.get(n) for n, name in buffers.items()}

    def _given(self, node: torch.fx.Node, facts: Facts) -> Any:
        value, spec = node.meta.get("val"), self._specs.get(node.name)
        if not isinstance(value, Tensor):
            return value
        if spec is None or spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            return replace(opaque(value.shape), mask=value.dtype == torch.bool)
        site = self._sites.get(spec.target, spec.target)
        if spec.kind == InputKind.PARAMETER:
            return self._parameter(node, site, spec.target, facts)
        use = facts.statistics.get(site)
        if use is None or spec.kind != InputKind.BUFFER:
            known = index_map(self.constant(spec.target))
            return replace(opaque(value.shape, known), mask=value.dtype == torch.bool)
        leaf = facts.leaf(site, value.shape, buffer=True)
        if use == "contracted":  # singular vectors have length one: they keep it
            for atoms in leaf.labels:
                facts.still(atoms, sign=False)
        return leaf.value()

    def _parameter(self, node: torch.fx.Node, site: str, name: str, facts: Facts) -> Value:
        shape = node.meta["val"].shape
        module = self.net.get_submodule(name.partition(".parametrizations.")[0].rpartition(".")[0])
        kernel = isinstance(module, _ConvNd)
        facts.kernels |= {site} if kernel else set()
        groups = _kernel_groups(node)
        slices = _cut_by_groups(shape, groups) if groups > 1 else None if kernel else planned(facts, node, site)
        leaf = facts.leaf(site, shape, slices=slices)
        for dim in range(2, len(shape)) if kernel else ():
            facts.pin(leaf.labels[dim], f"the pixels of a convolution's kernel in {name.rpartition('.')[0]}")
        own = leaf.slices
        if own is not None and not own.owned and own.count != groups:  # it is tied to something else: its columns stay
            facts.pin(leaf.labels[1], f"the other use of {leaf.site} as {name}")
            return Value(leaf.shape, tuple(Part((dim,), atoms) for dim, atoms in leaf.plain), frozenset({1}))
        return leaf.value()


Labels = dict[torch.fx.Node, Any]


def walked(traces: Sequence[MultiplierTrace]) -> tuple[Facts, list[Labels]]:
    """The facts of one forward pass, or of several, and all values' labels.

    If a first walk shows stacks of matrices, a second gives each matrix rows and columns of its own.
    """
    plan: dict[str, Slices | None] = {}
    uses: dict[str, set[Use | None]] = {}
    for trace in traces:
        for site, use in trace.statistics().items():
            uses.setdefault(site, set()).add(use)
    moving = {site: max(own, key=str) for site, own in uses.items() if None not in own}
    while True:
        facts = Facts(plan, moving)
        try:
            labels = [trace.equations(facts) for trace in traces]
        except Entangled as error:
            if not any(plan.get(site, True) for site in error.sites):
                raise RuntimeError(f"labels of {error} got entangled though they have no slices") from error
            plan |= dict.fromkeys(error.sites)
            continue
        found = stacked(facts)
        if not found:
            return facts, labels
        plan |= found


def _kernel_groups(node: torch.fx.Node) -> int:
    """Number of groups of the convolutions that this is the kernel of; 1 if anything else reads it."""
    found = set()
    for user in node.users:
        if rule_for(user.target) is not convolution:
            return 1
        call = arguments_of(user)
        if call["weight"] is not node or call["input"] is node or call["bias"] is node:
            return 1
        found.add(int(call["groups"]))
    return found.pop() if len(found) == 1 else 1


def _cut_by_groups(shape: Sequence[int], groups: int) -> Slices:
    """A grouped kernel: the rows of each group have columns of their own, of which the rule of convolutions knows."""
    return Slices(0, np.arange(shape[0]) * groups // shape[0], (1,), owned=False)


def _needed(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Nodes of results, of new values of buffers, and of inputs; only assertions read all others."""
    needed = {graph.output_node()}
    for node in reversed(graph.nodes):
        if node.op != "call_function" or any(user in needed for user in node.users):
            needed.add(node)
    return needed
