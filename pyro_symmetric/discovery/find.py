"""Find the weight-space symmetries of a network: trace it, carry labels through every operator, solve, verify.

The network is traced by ``torch.export`` on an example input. Every entry of every parameter axis starts as a unit of
its own; one rule for each operator (:mod:`pyro_symmetric.discovery.rules`) ties units that must move together, pins
those that can't move, and states how multipliers pass. What no rule understands is pinned, never freed. Solving these
facts gives permutations (nested if heads or groups move as wholes), positive scalings, signs and shifts; then a
random element of the whole group must leave the output unchanged.

Sources: Ainsworth, Hayase & Srinivasa 2023, arXiv 2209.04836 (permutations, by hand-written specifications); Laurent,
Aldea & Franchi 2024, arXiv 2310.08287, section 2 and appendix (scalings, normalisation layers); colour refinement as in
Weisfeiler & Leman 1968.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pyro_symmetric import arguments
from pyro_symmetric.discovery.assembly import permuted_units
from pyro_symmetric.discovery.attachment import attached
from pyro_symmetric.discovery.explain import explain
from pyro_symmetric.discovery.facts import Facts
from pyro_symmetric.discovery.multipliers import multipliers
from pyro_symmetric.discovery.structure import solve
from pyro_symmetric.discovery.symmetry import Symmetry, copied
from pyro_symmetric.discovery.trace import Trace, UnknownOperator, UntraceableError, try_out
from pyro_symmetric.discovery.verify import repaired
from pyro_symmetric.generators import forked
from pyro_symmetric.groups import Axis, Units
from pyro_symmetric.groups.units import Move
from pyro_symmetric.weights import require_finite


@forked()
def find_symmetry(
    net: nn.Module, *example_inputs: Any, strict: bool = False, verify: bool = True, logits: bool = False
) -> Symmetry:
    """The symmetries of a network's weights: which permutations, scalings, signs and shifts leave its function alone.

    >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> find_symmetry(net, torch.randn(4, 3)).permutations.factors
    {'0': 8}

    :param net: any module that ``torch.export`` can trace. It isn't changed.
    :param example_inputs: what its ``forward`` takes, of the size that it is meant for, with a batch of two or more.
        May be left out for an ``nn.Sequential`` that starts with a linear layer.
    :param strict: raise if an operator isn't understood; otherwise what reaches it is left out, with a warning.
    :param verify: try a random element of the group on a copy, in float64 if the network runs in it. Moves that fail
        are dropped, with a warning that names them.
    :param logits: whether the outputs go through a softmax over their last axis, so that one constant may be added to
        the last bias.
    :raises TypeError: if parameters of the network are random (Pyro's ``PyroSample``).
    :raises UntraceableError: if the forward pass depends on the data that flows through it.
    :raises ValueError: if the network doesn't take the inputs, or holds NaN or infinite weights; if ``strict`` and an
        operator isn't understood.
    """
    arguments.instance("net", net, nn.Module, "a torch.nn.Module")
    for name, value in {"strict": strict, "verify": verify, "logits": logits}.items():
        arguments.flag(name, value)
    _require_parameters(net)
    parameters = {name: p.detach() for name, p in net.named_parameters() if not is_lazy(p)}
    if verify and parameters:
        require_finite(parameters, "net")
    inputs = example_inputs or _default_inputs(net)
    facts = Facts()
    traced = copied(net).eval()  # tracing leaves marks on some modules
    try:
        used, shifted = _propagate(traced, inputs, facts, logits)
    except UntraceableError:
        try_out(copied(net).eval(), inputs)
        raise
    if any(name not in used for name, _ in traced.named_parameters()):  # another (training) branch may use them
        with contextlib.suppress(ValueError):  # what only the training branch uses then stays as it is
            used |= _propagate(traced.train(), inputs, facts, logits)[0]
    _report_lost(facts, strict)
    symmetry = _solved(traced, facts, used, shifted, logits)
    if verify:
        symmetry = repaired(symmetry, net, inputs)
    return symmetry


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


def _default_inputs(net: nn.Module) -> tuple[torch.Tensor]:
    """A batch of two for a sequence of layers that starts (apart from flattening) with a linear one."""
    first = next((m for m in net if not isinstance(m, nn.Flatten)), None) if isinstance(net, nn.Sequential) else net
    if not isinstance(first, nn.Linear):
        raise TypeError(
            f"find_symmetry needs an example input for {type(net).__name__}: pass what its forward takes, "
            "e.g. find_symmetry(net, torch.randn(2, 3, 32, 32))"
        )
    return (torch.randn(2, first.in_features, device=first.weight.device, dtype=first.weight.dtype),)


def _propagate(net: nn.Module, inputs: Sequence[Any], facts: Facts, logits: bool) -> tuple[set[str], set[str]]:
    """Record the facts of one forward pass; returns the sites that it uses, and the biases in front of a softmax."""
    trace = Trace(net, inputs)
    trace.propagate(facts)
    return trace.used_sites(), trace.shifted_biases(logits)


def _report_lost(facts: Facts, strict: bool) -> None:
    if not facts.lost:
        return
    text = (
        f"units are left out of the group at {', '.join(sorted(facts.lost))}. "
        "pyro_symmetric.discovery.rules.registry says how to add a rule"
    )
    if strict:
        raise ValueError(text)
    warnings.warn(text, UnknownOperator, stacklevel=3)


def _solved(net: nn.Module, facts: Facts, used: set[str], shifted: set[str], logits: bool) -> Symmetry:
    for site in list(facts.leaves):
        if site not in used:  # nothing is known about what no forward pass has touched
            for part in facts.leaves[site].parts:
                facts.pin(part.atoms, "no forward pass uses it")
    structure = solve(facts)
    buffers = {site for site, leaf in facts.leaves.items() if leaf.buffer}
    shapes = {name: value.shape for name, value in net.named_parameters()}
    shapes |= {name: value.shape for name, value in net.named_buffers() if name in buffers}
    moves: tuple[Move, ...] = ("scale", "flip")
    found = {move: multipliers(facts, move) for move in moves}
    shifts = [_shift(site, shapes[site]) for site in sorted(shifted)]
    units = permuted_units(facts, structure)
    group = attached(list(units.values()), found, shifts, shapes)
    return Symmetry(group, explain(facts, structure, {cell: one.name for cell, one in units.items()}), logits)


def _shift(site: str, shape: torch.Size) -> Units:
    """One constant, added to all entries along the last axis of a site."""
    dim = len(shape) - 1
    return Units(
        f"shift of {site}", 1, (Axis(site, dim, torch.arange(shape[dim])[:, None]),), moves=frozenset({"shift"})
    )
