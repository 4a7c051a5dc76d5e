"""Find the weight-space symmetries of a network: trace it, let axes flow through every
operator, solve, verify.

``torch.export`` traces the network on example inputs. Every position along every axis
of a parameter starts as a unit of its own; a rule for each operator
(:mod:`pyro_symmetric.discovery.rules`) ties units that must move together and pins
those that can't move. Operators without a rule pin their operands. Colour refinement of
these facts gives permutations (nested if heads or groups move as wholes); gradients
give positive scalings, signs and shifts
(:mod:`~pyro_symmetric.discovery.conservation_law`). Random elements of the whole group
must then leave the outputs unchanged.

Sources: Ainsworth, Hayase & Srinivasa 2023, arXiv 2209.04836 (permutations, by
hand-written specifications); Laurent, Aldea & Franchi 2024, arXiv 2310.08287, section 2
and appendix (scalings, normalisation layers); colour refinement as in Weisfeiler &
Leman 1968.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from torch.nn.parameter import is_lazy

from pyro_symmetric import arguments
from pyro_symmetric._process import forked, keep_freed_memory
from pyro_symmetric.arguments import Keywords, Names
from pyro_symmetric.discovery import rules  # noqa: F401  (registers the rules of PyTorch's operators)
from pyro_symmetric.discovery.alike import alike
from pyro_symmetric.discovery.cells import Cells, fixed_units, permuted_units, solve
from pyro_symmetric.discovery.conservation_law import (
    Multiplied,
    grouped,
    with_multipliers,
)
from pyro_symmetric.discovery.flow import Flow, Leaf
from pyro_symmetric.discovery.linear_twin import NotDifferentiable, is_bounded
from pyro_symmetric.discovery.members import members_of
from pyro_symmetric.discovery.model_symmetry import (
    find_model_symmetry,
    is_pyro_model,
    of_bayesian_model,
)
from pyro_symmetric.discovery.propagate import propagate
from pyro_symmetric.discovery.registry import Array, Part
from pyro_symmetric.discovery.symmetry import (
    AxisExplanation,
    Explanation,
    Selection,
    Symmetry,
    copied,
    named,
)
from pyro_symmetric.discovery.trace import Trace, UntraceableError, site_names, try_out
from pyro_symmetric.discovery.verify import repaired
from pyro_symmetric.discovery.wholes import with_wholes
from pyro_symmetric.groups import Group, Units
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import require_finite

# networks with fewer weights are examined for units that look alike
EXAMINED = 20_000


class UnknownOperator(UserWarning):
    """An operator has no rule; units that reach it are left out of the group."""


def find_symmetry(
    net: nn.Module | Callable[..., Any],
    *example_inputs: Any,
    kwargs: Keywords | None = None,
    only: Selection | None = None,
    freeze: Selection = (),
    buffers: bool = True,
    verify: bool = True,
    logits: bool = False,
    accidents: bool = False,
) -> Symmetry:
    """Find how a network's weights may be permuted, multiplied and shifted without a
    change of its function; or how the sites of a Pyro model may be permuted and flipped
    without a change of its joint density.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> symmetry = ps.find_symmetry(net, torch.randn(4, 3))
    >>> symmetry.permutations.factors, symmetry.scalings.factors
    ({'0': 8}, {'0': 8})

    >>> def mixture(x):
    ...     weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    ...     with pyro.plate("components", 3):
    ...         locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    ...     components = dist.Normal(locs, 1.0)
    ...     with pyro.plate("data", len(x)):
    ...         fn = dist.MixtureSameFamily(dist.Categorical(weights), components)
    ...         pyro.sample("x", fn, obs=x)
    >>> ps.find_symmetry(mixture, torch.randn(20)).permutations.factors
    {'locs': 3}

    A network's function maps the tensors among the inputs to those among the outputs.
    Random numbers that the network draws are held fixed; masks of dropout, and noise in
    train mode, are replaced by their means. :doc:`/explanation/orbits` says what isn't
    found, and how networks on the meta device are treated.

    :param net: any module that ``torch.export`` can trace, which isn't changed; or a
        Pyro model, a function or a module that observes data.
    :param example_inputs: arguments of its ``forward``, with a batch of two or more;
        of a model, its arguments, data included.
    :param kwargs: keyword arguments of ``forward``, such as ``{"attention_mask":
        mask}``.
    :param only: names of the sites (parameters and buffers) that may move, or of
        modules, or patterns such as ``"*.bias"``. Default: all but frozen parameters,
        or all if every parameter is frozen.
    :param freeze: names, as for ``only``, of sites that keep any values they have.
    :param buffers: whether running statistics move along; see
        :meth:`~pyro_symmetric.Symmetry.holding`.
    :param verify: whether to try random elements on a copy in float64. Moves that fail
        are dropped, with a warning; an inconclusive check warns
        (``UnverifiedSymmetry``). Of a model: whether to try random elements of the
        whole group at generic points; moves that fail are dropped, with a remark.
    :param logits: whether outputs go through a softmax, so that one constant may be
        added to the last bias.
    :param accidents: of a model, whether to keep what holds for these data, but not for
        data that the model itself simulates, such as the exchange of two equal rows.
    :raises TypeError: if parameters of the network are random (Pyro's ``PyroSample``).
    :raises UntraceableError: if the forward pass branches on the data that flow through
        it.
    :raises ValueError: if the network doesn't run on the inputs, returns no tensor, or
        holds NaN or infinite weights; if a name matches no site.
    """
    if isinstance(net, BayesianModel):
        symmetry = _of_network(
            net.net, example_inputs[:1], kwargs, only, freeze, buffers, verify, logits
        )
        return of_bayesian_model(net, symmetry)
    is_class = isinstance(net, type)
    if not is_class and is_pyro_model(net, example_inputs, kwargs or {}):
        return find_model_symmetry(
            net, example_inputs, kwargs, only, freeze, accidents, verify
        )
    arguments.instance("net", net, nn.Module, "a torch.nn.Module, or a Pyro model")
    assert isinstance(net, nn.Module)
    _require_parameters(net)
    return _of_network(
        net, example_inputs, kwargs, only, freeze, buffers, verify, logits
    )


@forked()
def _of_network(
    net: nn.Module,
    example_inputs: Sequence[Any],
    kwargs: Keywords | None,
    only: Selection | None,
    freeze: Selection,
    buffers: bool,
    verify: bool,
    logits: bool,
) -> Symmetry:
    """Find the symmetry of a network; see :func:`find_symmetry`."""
    frozen = frozen_sites(net, only, freeze)
    parameters = {
        name: p.detach()
        for name, p in net.named_parameters()
        if not (is_lazy(p) or p.is_meta)
    }
    if verify and parameters:
        require_finite(parameters, "net")
    keep_freed_memory()
    traces = _traces(net, example_inputs, kwargs)
    flow = Flow()
    for trace in traces:
        propagate(flow, trace)
    members = members_of(flow, traces)
    if members.axes:
        flow = Flow(members.axes)
        for trace in traces:
            propagate(flow, trace)
    used = set[str]().union(*(trace.used_sites() for trace in traces))
    for site, leaf in flow.leaves.items():
        why = (
            f"because {site} {frozen.get(site)}"
            if site in used
            else "because no forward pass uses it"
        )
        if site in frozen or site not in used:
            flow.pin(leaf.value, why)
    cells = solve(flow)
    units = permuted_units(flow, cells)
    held = {*frozen, *(flow.leaves.keys() - used)}
    solution = _with_multipliers(
        flow, cells, list(units.values()), traces, held, logits
    )
    symmetry = Symmetry(
        solution.group,
        _explained(flow, cells, units),
        logits,
        solution.undecided
        or bool(members.refused)
        or _at_least(flow, cells, traces, held, logits),
        rotating=solution.rotating,
    )
    if flow.given_up:
        warnings.warn(
            f"units are left out of the group at {', '.join(sorted(flow.given_up))}. "
            "help(pyro_symmetric.discovery.register_rule) says how to add a rule",
            UnknownOperator,
            stacklevel=3,
        )
    symmetry = symmetry if buffers else symmetry.holding(net)
    if not verify:
        return symmetry
    bounded = any(is_bounded(trace) for trace in traces)
    symmetry = repaired(symmetry, net, example_inputs, kwargs, bounded)
    return with_wholes(symmetry, net, traces[0], held)


# small steps --------------------------------------------------------------------------


def frozen_sites(
    net: nn.Module, only: Selection | None, freeze: Selection
) -> dict[str, str]:
    """Return the sites that keep their values, and why; see :func:`find_symmetry`."""
    first_names = site_names(net)
    if only is None:
        trained = {name: value.requires_grad for name, value in net.named_parameters()}
        untrained = (
            name
            for name, trains in trained.items()
            if any(trained.values()) and not trains
        )
        frozen = dict.fromkeys(untrained, "is frozen (requires_grad=False)")
    else:
        chosen = {first_names[name] for name in named("only", only, first_names)}
        if not chosen:
            raise ValueError(
                "only is empty; it must name at least one module, parameter or buffer "
                "that may move"
            )
        frozen = dict.fromkeys(
            set(first_names.values()) - chosen, "isn't named by only"
        )
    return frozen | {
        first_names[name]: "is named by freeze"
        for name in named("freeze", freeze, first_names)
    }


def _require_parameters(net: nn.Module) -> None:
    """Raise ``TypeError`` if a module samples its parameters."""
    random = []
    for path, module in net.named_modules():
        for name in getattr(module, "_pyro_samples", ()):
            random.append(f"{path}.{name}".lstrip("."))
    if random:
        raise TypeError(
            f"{type(net).__name__} has no parameters {random}, but random values "
            "(PyroSample) of these names. Find the "
            "symmetry in the plain network that it was made of. If that is an "
            "attribute 'net' of a Pyro model, "
            "find_symmetry(net, x).prefixed('net') is the symmetry of the model's sites"
        )


def _traces(
    net: nn.Module, inputs: Sequence[Any], kwargs: Keywords | None
) -> list[Trace]:
    """Trace a copy of the network in eval mode, and in train mode if eval mode leaves
    parameters unused.
    """
    copy = copied(net, shared=True).eval()  # tracing leaves marks on some modules
    try:
        traces = [Trace(copy, inputs, kwargs)]
    except UntraceableError:
        try_out(copied(net).eval(), inputs, kwargs)
        raise
    used = traces[0].used_sites()
    if any(name not in used for name, _ in copy.named_parameters()):
        # parameters of a branch that can't be traced stay
        with contextlib.suppress(ValueError):
            traces.append(Trace(copy.train(), inputs, kwargs))
    return traces


class _Found(NamedTuple):
    """The group of all units, whether there may be more moves, and the units that may
    rotate.
    """

    group: Group
    undecided: bool
    rotating: Names


def _with_multipliers(
    flow: Flow,
    cells: Cells,
    units: list[Units],
    traces: Sequence[Trace],
    held: set[str],
    logits: bool,
) -> _Found:
    """Return the group of all units, with the scales, signs and shifts that gradients
    give, and what else these say.
    """
    net = traces[0].net
    buffers = {site for site, leaf in flow.leaves.items() if leaf.buffer}
    shapes = {name: value.shape for name, value in net.named_parameters()}
    shapes |= {
        name: value.shape for name, value in net.named_buffers() if name in buffers
    }
    multiplied = Multiplied(units, any(value.is_meta for value in net.parameters()))
    if not multiplied.undecided:
        slices = {
            site: leaf.slices
            for site, leaf in flow.leaves.items()
            if leaf.slices is not None
        }
        multiplied = with_multipliers(
            units, fixed_units(flow, cells), traces, net, shapes, slices, held, logits
        )
    group = grouped(multiplied.units, shapes)
    law = multiplied.law
    rotating = law.rotating(group) if law else ()
    return _Found(group, multiplied.undecided, rotating)


def _at_least(
    flow: Flow,
    cells: Cells,
    traces: Sequence[Trace],
    held: set[str],
    logits: bool,
) -> bool:
    """Return whether the network may have more symmetries than the group.

    Large networks are examined only if an operator pinned units that might move.
    """
    if any(trace.calls_again() for trace in traces):
        return True
    parameters = [*traces[0].net.parameters()]
    doubtful = bool(flow.doubts) or cells.doubtful
    small = sum(value.numel() for value in parameters) < EXAMINED
    if not doubtful and not small:
        return False
    if any(value.is_meta for value in parameters):
        return doubtful
    try:
        return alike(flow, cells, traces, held, logits, doubtful) is not None
    except NotDifferentiable:
        return doubtful


# why axes move or stay ----------------------------------------------------------------


def _explained(flow: Flow, cells: Cells, units: Mapping[int, Units]) -> Explanation:
    """Explain every axis of every site: the units that move it, or the operator that
    pinned it.

    :param units: cell -> its units; cells that ride along with others have none.
    """
    chains = _Chains(flow)
    axes = []
    # class -> the first refinement that coloured its atoms differently
    pinned_by = np.full(len(cells.colour), -1)
    for number, (atoms, colours, _) in reversed([*enumerate(flow.refinements)]):
        if len(atoms) == 1 or (colours != colours[:1]).any():
            pinned_by[cells.unit[atoms]] = number
    for leaf in flow.leaves.values():
        if not leaf.value.shape:
            reason = "a single number has no axis"
            axes.append(AxisExplanation(leaf.site, 0, 1, 0, (), reason))
        for part in leaf.value.parts:
            dim = _own_axis(leaf, part)
            atoms = np.unique(part.atoms)
            cell = cells.cell[cells.unit[atoms]]
            moves = np.isin(cell, list(cells.cells))
            moving = {
                up
                for moving_cell in np.unique(cell[moves]).tolist()
                for up in (moving_cell, *cells.cells[moving_cell].parents)
            }
            movers = [
                unit_set for number, unit_set in units.items() if number in moving
            ]
            pins, counts = np.unique(
                pinned_by[cells.unit[atoms[~moves]]], return_counts=True
            )
            reason = ""
            target = atoms
            if len(pins):
                reason = "each of its units plays a role of its own"
                if (number := pins[counts.argmax()]) >= 0:
                    target, _, fact = flow.refinements[number]
                    why = flow.origins[fact]
                    is_cause = why.startswith("because")
                    reason = f"pinned {why}" if is_cause else f"pinned by {why}"
            if movers:
                home = movers[0].axes[0]
                target = next(
                    part.atoms
                    for part in flow.leaves[home.site].value.parts
                    if home.dim in part.axes
                )
            names = tuple(unit_set.name for unit_set in movers)
            chain = chains.between(atoms, target)
            axes.append(
                AxisExplanation(
                    leaf.site, dim, len(atoms), int(moves.sum()), names, reason, chain
                )
            )
    return Explanation(axes)


def _own_axis(leaf: Leaf, part: Part) -> int:
    """Return the axis along which units lie inside a slice or a member."""
    if leaf.members == part.axes[-1]:
        return part.axes[0]
    return part.axes[-1]


class _Chains:
    """Shortest chains of facts between arrays of atoms, by breadth-first search."""

    def __init__(self, flow: Flow):
        self.flow = flow
        self.starts = np.array(flow.starts)
        leaves = [
            (leaf.site, _own_axis(leaf, part), part)
            for leaf in flow.leaves.values()
            for part in leaf.value.parts
        ]
        self.names = {
            self._arrays(part.atoms)[0]: f"{site}[{dim}]"
            for site, dim, part in leaves
            if part.atoms.size
        }
        # target -> each array -> the next array on its way to the target
        self.trees = dict[int, dict[int, int]]()
        # array -> arrays tied to it -> the fact that ties them
        self.neighbours = dict[int, dict[int, int]]()
        for first, second, number in (*flow.unions, *flow.relations):
            for a, b in {*zip(self._arrays(first), self._arrays(second), strict=True)}:
                self.neighbours.setdefault(a, {}).setdefault(b, number)
                self.neighbours.setdefault(b, {}).setdefault(a, number)

    def _arrays(self, atoms: Array) -> list[int]:
        """Return the arrays to which a sample of these atoms belongs."""
        sample = atoms.reshape(-1)[:: max(1, atoms.size // 16)]
        return (np.searchsorted(self.starts, sample, side="right") - 1).tolist()

    def between(self, atoms: Array, target: Array) -> Names:
        """Return the axes on the way to a target, each with the operator that ties it
        to the one before.
        """
        if not atoms.size or not target.size:
            return ()
        array = self._arrays(atoms)[0]
        end = self._arrays(target)[0]
        steps = []
        if end not in self.trees:
            tree = {end: end}
            queue = [end]
            for reached in queue:
                new = [
                    neighbour
                    for neighbour in self.neighbours.get(reached, ())
                    if neighbour not in tree
                ]
                tree |= dict.fromkeys(new, reached)
                queue += new
            self.trees[end] = tree
        while array != end and array in self.trees[end]:
            array, before = self.trees[end][array], array
            origin = self.flow.origins[self.neighbours[before][array]]
            steps.append(
                f"{self.names[array]} by {origin}" if array in self.names else origin
            )
        return tuple(steps)
