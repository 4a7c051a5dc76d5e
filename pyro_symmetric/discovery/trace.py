"""The graph of a forward pass, and labels carried through it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.modules.conv import _ConvNd

from pyro_symmetric._process import drawn_seed
from pyro_symmetric.discovery.export import exported, site_names
from pyro_symmetric.discovery.facts import Entangled, Facts
from pyro_symmetric.discovery.labeller import Labeller
from pyro_symmetric.discovery.labels import Part, Value, opaque
from pyro_symmetric.discovery.nodes import arguments_of, operator_name
from pyro_symmetric.discovery.operators import applied, index_map, module_of
from pyro_symmetric.discovery.plan import planned, stacked
from pyro_symmetric.discovery.rules.random_numbers import RANDOM
from pyro_symmetric.discovery.rules.registry import rule_for
from pyro_symmetric.discovery.rules.spatial import convolution
from pyro_symmetric.discovery.slices import Slices
from pyro_symmetric.discovery.statistics import Use, statistics
from pyro_symmetric.discovery.tensors_only import TensorsOnly
from pyro_symmetric.generators import own_generators, repeated


class UnknownOperator(UserWarning):
    """An operator without a rule was met; what reaches it was left out of the group.

    >>> import warnings
    >>> class Net(nn.Sequential):
    ...     def forward(self, x):
    ...         return self[1](torch.linalg.pinv(self[0](x)).mT)
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     symmetry = ps.find_symmetry(Net(nn.Linear(2, 4), nn.Linear(4, 1)), torch.randn(3, 2))
    >>> any(warning.category is ps.discovery.UnknownOperator for warning in caught), symmetry.group.factors
    (True, {})
    """


class Trace:
    """The functional graph of one forward pass, with in-place operators turned into pure ones.

    Operators without a rule are taken apart into others, if PyTorch knows how.

    :param net: the network; what tracing leaves behind stays in it.
    :param args: an example of what its forward pass takes; so are ``kwargs``.
    :ivar program: the graph.
    :ivar specs: what the graph takes, in this order, by the names that the network has for it.
    :ivar tensors: the tensors among the example inputs, in the order in which the graph takes them.
    :ivar returned: the nodes whose values the network returns (and not those that are written back to buffers).
    :ivar host_draws: whether the pass draws from NumPy's or Python's generator, or from one of the network's own, so
        that another pass may be different.
    :raises UntraceableError: if there is no such graph.
    """

    def __init__(self, net: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None):
        self.net = net
        with repeated(drawn_seed()) as draws:
            function = TensorsOnly(net, args, kwargs)
            self.program = exported(function)
        self.tensors = function.tensors
        self.host_draws = draws.host or any(
            not isinstance(place[name], torch.Generator) for place, name in own_generators(net)
        )
        signature = self.program.graph_signature
        self.specs = [
            replace(spec, target=spec.target and spec.target.removeprefix("net.")) for spec in signature.input_specs
        ]
        self._specs = {spec.arg.name: spec for spec in self.specs if hasattr(spec.arg, "name")}
        flat = torch.utils._pytree.tree_leaves(self.program.graph.output_node().args[0])
        ends = [n for n, s in zip(flat, signature.output_specs, strict=True) if s.kind == OutputKind.USER_OUTPUT]
        self.returned = [node for node in ends if isinstance(node, torch.fx.Node)]
        self._lives = _needed(self.program.graph)
        self._sites = site_names(net)
        self._noise = _noise(self.program.graph)
        self._constants = (self.program.state_dict, self.program.constants)

    def propagate(self, facts: Facts) -> dict[torch.fx.Node, Any]:
        """Carry labels through the graph, recording facts; returns the labels of every node's value."""
        values: dict[torch.fx.Node, Any] = {}
        labeller = Labeller(facts)
        for node in self.program.graph.nodes:
            if node not in self._lives:
                continue
            if node.op in ("placeholder", "get_attr"):
                values[node] = self._input(node, facts)
            elif node.op == "call_function":
                labeller.where = f"{operator_name(node.target)} in {module_of(node)}{self._circumstances(node)}"
                values[node] = applied(node, values, labeller, self.returned)
        labeller.where = "the network's output"
        for node in self.returned:
            if isinstance(values[node], Value):
                labeller.pin(values[node])
        return values

    def constant(self, target: str | None) -> Any:
        """The value of a buffer or a constant of the graph, by its name in the network."""
        found = (held.get(name) for name in (f"net.{target}", str(target)) for held in self._constants)
        return next((value for value in found if value is not None), None)

    def statistics(self) -> dict[str, Use | None]:
        """The buffers that the graph reads: how they are used, if they are statistics of units."""
        nodes = {n: self._specs[n.name] for n in self.program.graph.nodes if n.name in self._specs and n.users}
        buffers = {n: str(spec.target) for n, spec in nodes.items() if spec.kind == InputKind.BUFFER}
        saved = {n: name.rpartition(".")[0] for n, name in buffers.items() if nodes[n].persistent}
        learned = [n for n, spec in nodes.items() if spec.kind == InputKind.PARAMETER]
        found = statistics(self.program.graph.nodes, saved, learned)
        return {self._sites.get(name, name): found.get(n) for n, name in buffers.items()}

    def used_sites(self) -> set[str]:
        """The parameters and buffers that the graph reads."""
        used = [node.name for node in self.program.graph.nodes if node.op == "placeholder" and node.users]
        targets = [self._specs[name].target for name in used if name in self._specs]
        return {self._sites.get(target, target) for target in targets if target}

    def calls_again(self) -> bool:
        """True if a module with parameters is called more than once."""
        stacks = (node.meta.get("nn_module_stack") or {} for node in self.program.graph.nodes)
        again = {path.removeprefix("net.") for stack in stacks for key, (path, _) in stack.items() if "@" in key}
        return any(site.startswith(f"{path}.") for path in again for site in self._sites.values())

    def shifted_biases(self, logits: bool) -> set[str]:
        """The bias of the last linear layer, if nothing but a softmax over its units follows.

        :param logits: whether that softmax comes after the network.
        """
        aten = torch.ops.aten
        if len(self.returned) != 1:
            return set()
        node: Any = self.returned[0]
        softmax = logits
        if node.target in (aten._softmax.default, aten._log_softmax.default):
            dims = node.meta["val"].dim()
            softmax = node.args[1] % dims == dims - 1
            node = node.args[0]
        if not softmax or node.target is not aten.linear.default or len(node.users) != 1 or len(node.args) < 3:
            return set()
        bias = node.args[2]
        spec = self._specs.get(bias.name) if isinstance(bias, torch.fx.Node) and len(bias.users) == 1 else None
        return {self._sites[spec.target]} if spec is not None and spec.kind == InputKind.PARAMETER else set()

    def _circumstances(self, node: torch.fx.Node) -> str:
        """The values that meet the units there besides, in words that a network's author knows."""
        name = self._noise.get(node) or next((self._noise[n] for n in node.all_input_nodes if n in self._noise), None)
        if name:
            return f", where each unit meets a random number of its own ({name}): a symmetry in law at most"
        specs = [self._specs[n.name] for n in node.all_input_nodes if n.op == "placeholder" and n.name in self._specs]
        if any(spec.kind == InputKind.USER_INPUT for spec in specs):
            return " with the network's input"
        constant = next((spec.target for spec in specs if spec.kind != InputKind.PARAMETER), None)
        return f" with the constant {constant}" if constant else ""

    def _input(self, node: torch.fx.Node, facts: Facts) -> Any:
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


def walked(traces: Sequence[Trace]) -> tuple[Facts, list[Labels]]:
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
            labels = [trace.propagate(facts) for trace in traces]
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


def _noise(graph: torch.fx.Graph) -> dict[torch.fx.Node, str]:
    """Nodes whose values are random numbers, and nothing else but numbers -> the operator that draws them."""
    plain: set[torch.fx.Node] = set()
    noise: dict[torch.fx.Node, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        drawn = next((noise[n] for n in node.all_input_nodes if n in noise), None)
        if operator_name(node.target) in RANDOM:
            noise[node] = operator_name(node.target)
        elif all(n in noise or n in plain for n in node.all_input_nodes):
            plain.add(node)
            if drawn:
                noise[node] = drawn
    return noise
