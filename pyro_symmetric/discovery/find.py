"""Find the weight-space symmetries of a network: trace it, let axes flow through every operator, solve, verify.

The network is traced by ``torch.export`` on an example input. Every entry of every parameter axis starts as a unit of
its own; one rule for each operator (:mod:`pyro_symmetric.discovery.rules`) ties units that must move together and pins
those that can't move. What no rule understands is pinned, never freed. Solving these facts gives permutations (nested
if heads or groups move as wholes); gradients give positive scalings, signs and shifts
(:mod:`~pyro_symmetric.discovery.conservation_law`). Then random elements of the whole group must leave the output
unchanged.

Sources: Ainsworth, Hayase & Srinivasa 2023, arXiv 2209.04836 (permutations, by hand-written specifications); Laurent,
Aldea & Franchi 2024, arXiv 2310.08287, section 2 and appendix (scalings, normalisation layers); colour refinement as in
Weisfeiler & Leman 1968.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn
from torch.nn.parameter import is_lazy

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.discovery.cells import Cells, fixed_units, permuted_units, solve
from pyro_symmetric.discovery.conservation_law import grouped, with_multipliers
from pyro_symmetric.discovery.flow import Array, Flow
from pyro_symmetric.discovery.symmetry import AxisExplanation, Explanation, Names, Symmetry, copied, named
from pyro_symmetric.discovery.trace import Trace, UnknownOperator, UntraceableError, site_names, try_out
from pyro_symmetric.discovery.verify import repaired
from pyro_symmetric.groups import Group, Units
from pyro_symmetric.weights import require_finite


@forked()
def find_symmetry(
    net: nn.Module,
    *example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    only: Names | None = None,
    freeze: Names = (),
    buffers: bool = True,
    verify: bool = True,
    logits: bool = False,
) -> Symmetry:
    """Find how a network's weights may be permuted, multiplied and shifted without a change of its function.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> symmetry = ps.find_symmetry(net, torch.randn(4, 3))
    >>> symmetry.permutations.factors, symmetry.scalings.factors
    ({'0': 8}, {'0': 8})

    The function is that from the tensors among the inputs to those among the outputs. Random numbers that the network
    draws count as given; masks of dropout, and noise of train mode, as their means. :doc:`/explanation/orbits` tells
    what isn't found, and of networks on the meta device.

    :param net: any module that ``torch.export`` can trace. It isn't changed.
    :param example_inputs: what its ``forward`` takes, with a batch of two or more.
    :param kwargs: keyword arguments of ``forward``, such as ``{"attention_mask": mask}``.
    :param only: names of the sites (parameters and buffers) that may move, or of modules, or patterns such as
        ``"*.bias"``. By default all may but frozen parameters; in a network of frozen parameters alone, all.
    :param freeze: names, as for ``only``, of what keeps its values, whatever these are.
    :param buffers: whether running statistics move along; see :meth:`~pyro_symmetric.Symmetry.holding`.
    :param verify: try random elements on a copy in float64. Moves that fail are dropped, with a warning;
        if nothing can be told, a warning (``UnverifiedSymmetry``) says so.
    :param logits: whether outputs go through a softmax, so that one constant may be added to the last bias.
    :raises TypeError: if parameters of the network are random (Pyro's ``PyroSample``).
    :raises UntraceableError: if the forward pass depends on the data that flows through it.
    :raises ValueError: if the network doesn't take the inputs, returns no tensor, or holds NaN or infinite weights; if
        a name fits nothing.
    """
    arguments.instance("net", net, nn.Module, "a torch.nn.Module")
    _require_parameters(net)
    held = frozen_sites(net, only, freeze)
    parameters = {name: p.detach() for name, p in net.named_parameters() if not (is_lazy(p) or p.is_meta)}
    if verify and parameters:
        require_finite(parameters, "net")
    traced = copied(net).eval()  # tracing leaves marks on some modules
    try:
        traces = [Trace(traced, example_inputs, kwargs)]
    except UntraceableError:
        try_out(copied(net).eval(), example_inputs, kwargs)
        raise
    used = traces[0].used_sites()
    if any(name not in used for name, _ in traced.named_parameters()):  # another (training) branch may use them
        with contextlib.suppress(ValueError):  # what only the training branch uses then stays as it is
            traces.append(Trace(traced.train(), example_inputs, kwargs))
            used |= traces[1].used_sites()
    flow = Flow()
    for trace in traces:
        trace.propagate(flow)
    stay = {site: f"because {site} {why}" for site, why in held.items()}
    stay |= dict.fromkeys(set(flow.leaves) - used, "because no forward pass uses it")
    for site, why in stay.items():
        if site in flow.leaves:
            flow.pin(flow.leaves[site].value, why)
    group, explanation = _solved(traced, flow, traces, set(held), logits)
    symmetry = Symmetry(group, explanation, logits, at_least=any(trace.calls_again() for trace in traces))
    if flow.lost:
        warnings.warn(
            f"units are left out of the group at {', '.join(sorted(flow.lost))}. "
            "help(pyro_symmetric.discovery.register_rule) says how to add a rule",
            UnknownOperator,
            stacklevel=3,
        )
    symmetry = symmetry if buffers else symmetry.holding(net)
    return repaired(symmetry, net, example_inputs, kwargs) if verify else symmetry


# small steps --------------------------------------------------------------------------------------------------------


def frozen_sites(net: nn.Module, only: Names | None, freeze: Names) -> dict[str, str]:
    """The sites that stay, and why; see :func:`find_symmetry`."""
    first_names = site_names(net)
    if only is None:
        trained = {name: value.requires_grad for name, value in net.named_parameters()}
        still = (name for name, trains in trained.items() if any(trained.values()) and not trains)
        frozen = dict.fromkeys(still, "is frozen (requires_grad=False)")
    else:
        chosen = {first_names[name] for name in named("only", only, first_names)}
        if not chosen:
            raise ValueError("only is empty; it must name at least one module, parameter or buffer that may move")
        frozen = dict.fromkeys(set(first_names.values()) - chosen, "isn't among those that may move")
    return frozen | {first_names[name]: "is among those that stay" for name in named("freeze", freeze, first_names)}


def _require_parameters(net: nn.Module) -> None:
    random = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in net.named_modules()
        for name in getattr(module, "_pyro_samples", ())
    ]
    if random:
        raise TypeError(
            f"{type(net).__name__} has no parameters {random}, but random values (PyroSample) of these names. Find the "
            "symmetry in the plain network that it was made of. If that is an attribute 'net' of a Pyro model, "
            "find_symmetry(net, x).prefixed('net') is the symmetry of the model's sites"
        )


def _solved(
    net: nn.Module, flow: Flow, traces: Sequence[Trace], held: set[str], logits: bool
) -> tuple[Group, Explanation]:
    cells = solve(flow)
    units = permuted_units(flow, cells)
    buffers = {site for site, leaf in flow.leaves.items() if leaf.buffer}
    shapes = {name: value.shape for name, value in net.named_parameters()}
    shapes |= {name: value.shape for name, value in net.named_buffers() if name in buffers}
    every = list(units.values())
    if not any(value.is_meta for value in net.parameters()):
        slices = {site: leaf.slices for site, leaf in flow.leaves.items() if leaf.slices is not None}
        every = with_multipliers(every, fixed_units(flow, cells), traces, net, shapes, slices, held, logits)
    return grouped(every, shapes), _explained(flow, cells, units)


# why axes move, or why they don't -------------------------------------------------------------------------------------


def _explained(flow: Flow, cells: Cells, units: Mapping[int, Units]) -> Explanation:
    """For every axis of every site: who moves it, or which operator pinned it.

    :param units: cell -> its units; cells that ride along with others have none.
    """
    chains, axes = _Chains(flow), list[AxisExplanation]()
    first = np.full(len(cells.colour), -1)  # of each class: the refinement that first gave it a colour of its own
    for number, (atoms, colours, _) in reversed([*enumerate(flow.refinements)]):
        if len(atoms) == 1 or (colours != colours[:1]).any():
            first[cells.unit[atoms]] = number
    for leaf in flow.leaves.values():
        for dim, part in enumerate(leaf.value.parts):
            atoms = np.unique(part.atoms)
            own = cells.cell[cells.unit[atoms]]
            moves = np.isin(own, list(cells.cells))
            movers = {up for cell in np.unique(own[moves]).tolist() for up in (cell, *cells.cells[cell].parents)}
            lying = [one for mover, one in units.items() if mover in movers]
            numbers, counts = np.unique(first[cells.unit[atoms[~moves]]], return_counts=True)
            reason, end = "", atoms
            if len(numbers):
                reason = "each of its units plays a role of its own"
                if (number := numbers[counts.argmax()]) >= 0:
                    end, why = flow.refinements[number].one, flow.origins[flow.refinements[number].number]
                    reason = f"pinned {why}" if why.startswith("because") else f"pinned by {why}"
            if lying:
                home = lying[0].axes[0]
                end = flow.leaves[home.site].value.parts[home.dim].atoms
            names, chain = tuple(one.name for one in lying), chains.between(atoms, end)
            axes.append(AxisExplanation(leaf.site, dim, len(atoms), int(moves.sum()), names, reason, chain))
    return Explanation(axes)


class _Chains:
    """Shortest chains of facts between arrays of atoms, of which each was new at once."""

    def __init__(self, flow: Flow):
        self.flow, self.starts, self.trees = flow, np.array(flow.starts), dict[int, dict[int, int]]()
        leaves = [(leaf.site, dim, part) for leaf in flow.leaves.values() for dim, part in enumerate(leaf.value.parts)]
        self.names = {self._blocks(part.atoms)[0]: f"{site}[{dim}]" for site, dim, part in leaves if part.atoms.size}
        self.near = dict[int, dict[int, int]]()  # an array -> those that it is tied to, and the fact that says so
        for one, other, number in (*flow.unions, *flow.relations):
            for a, b in {*zip(self._blocks(one), self._blocks(other), strict=True)}:
                self.near.setdefault(a, {}).setdefault(b, number)
                self.near.setdefault(b, {}).setdefault(a, number)

    def _blocks(self, atoms: Array) -> list[int]:
        """The arrays in which some of these atoms were new."""
        some = atoms.reshape(-1)[:: max(1, atoms.size // 16)]
        return (np.searchsorted(self.starts, some, side="right") - 1).tolist()

    def between(self, atoms: Array, target: Array) -> tuple[str, ...]:
        """The axes on the way, each with the operator that ties it to the one before."""
        if not atoms.size or not target.size:
            return ()
        block, end, steps = self._blocks(atoms)[0], self._blocks(target)[0], list[str]()
        if end not in self.trees:
            self.trees[end], waiting = {end: end}, [end]  # an array -> the next on its way to the end
            for at in waiting:
                new = [other for other in self.near.get(at, ()) if other not in self.trees[end]]
                self.trees[end] |= dict.fromkeys(new, at)
                waiting += new
        while block != end and block in self.trees[end]:
            block, before = self.trees[end][block], block
            origin = self.flow.origins[self.near[before][block]]
            steps.append(f"{self.names[block]} by {origin}" if block in self.names else origin)
        return tuple(steps)
