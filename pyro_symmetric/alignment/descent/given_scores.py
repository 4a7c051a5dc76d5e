"""Matching by scores of pairs of units that are given, rather than read off weights: activations, a user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.activation import ActivationCost
from pyro_symmetric.alignment.costs.cost import COSTS, Moments
from pyro_symmetric.alignment.descent.descent import Descent
from pyro_symmetric.alignment.descent.matcher import Matcher
from pyro_symmetric.alignment.descent.nesting import decide_units, sources_of
from pyro_symmetric.alignment.descent.search import Outcome, shifted
from pyro_symmetric.alignment.parts.moves import moves_of
from pyro_symmetric.alignment.parts.problem import Problem
from pyro_symmetric.alignment.parts.state import State
from pyro_symmetric.alignment.parts.units import Move, Slot, Units
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.weights import Weights

ScoreFunction = Callable[[Weights, Weights, PermutationGroup], Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class _Given:
    """Scores as they were given, ``(B, n, n)``; a sign that scores see makes a negative one positive.

    :param slots: that sign, or none.
    """

    given: Tensor
    slots: tuple[Slot, ...]

    def scores(self) -> Tensor:
        return self.given.abs() if self.slots else self.given

    def of_pairs(self, sources: Tensor, steps: int) -> tuple[dict[int, Tensor], dict[int, Tensor], Tensor]:
        chosen = self.given.gather(-1, sources.unsqueeze(-1)).squeeze(-1)
        return {0: torch.where(chosen < 0, -1.0, 1.0)}, {}, chosen.abs()


def align_by_scores(
    function: ScoreFunction,
    weights: tuple[Weights, Sequence[Weights]],
    moments: tuple[Moments, Moments],
    problem: Problem,
    max_sweeps: int,
    tolerance: float,
) -> Outcome:
    """The optimum of ``-sum of scores``, exactly, factor by factor.

    Where the units of a factor have a sign each that leaves them, it goes with the match, by the sign of the score (of
    several, one does; the others stay, and a combination of them that no score sees isn't fitted to the weights).
    A sign that is undone before it leaves (in front of a normalisation) no score can see. Such signs, and scales,
    minimise the squared distance of the weights afterwards, given the match.

    :param weights: the reference, and the sources one by one, as ``function`` takes them.
    :param moments: of both.
    """
    reference, source = moments
    source, shifts = shifted(problem, COSTS["l2"], reference, source)
    matcher = Matcher(problem.parts, reference, source, COSTS["l2"])
    given = _stacked(function, weights, problem, matcher.device)
    signs = {name: [s for s in slots if _seen(s)] for m in matcher.moves for name, slots in m.slots.items()}

    state, rows = matcher.identity(), torch.arange(matcher.batch)
    cost = -_total({name: value.diagonal(dim1=-2, dim2=-1) for name, value in given.items()}, matcher.batch)
    initial, events, chosen = cost, [(rows, cost)], set[str]()
    for root in problem.parts.roots:
        # Of several signs that scores see alike (on both sides of a normalisation) the first one serves.
        own = {u.name: tuple(signs[u.name][:1]) for u in root.tree()}
        move = Move(root, tuple(root.tree()), own)
        choices = {name: _Given(given[name], slots) for name, slots in own.items()}
        new = state.copy()
        decide_units(move, choices, state, new)
        matched = {
            name: choices[name].scores().gather(-1, found.unsqueeze(-1)).squeeze(-1)
            for name, found in sources_of(move, root, new).items()
        }
        before = {name: given[name].diagonal(dim1=-2, dim2=-1) for name in matched}
        cost = cost - _total(matched, matcher.batch) + _total(before, matcher.batch)
        events.append((rows, cost))
        state.put(rows, new, move.actors)
        chosen |= {name for u in root.tree() for slot in signs[u.name] for name in slot.factors}
    state, converged = _multiplied(problem, matcher, (reference, source), state, chosen, max_sweeps, tolerance)
    return Outcome(Descent(state, cost, events, converged), initial, shifts, (cost,))


def _seen(slot: Slot) -> bool:
    """Whether it is a sign with which what leaves the units changes: another layer makes up for it."""
    return slot.kind == "sign" and any(dim > 0 for _, dim in slot.exponents)


def _multiplied(
    problem: Problem,
    matcher: Matcher,
    moments: tuple[Moments, Moments],
    state: State,
    chosen: set[str],
    max_sweeps: int,
    tolerance: float,
) -> tuple[State, Tensor]:
    """Fit the multipliers that aren't chosen yet to the weights; also, whether that converged, ``(B,)``."""
    moves = moves_of((), problem.parts.rescalings, set(moments[0]))
    moves = [
        m for m in moves if m.multiplier is not None and not (m.multiplier[0] == "sign" and m.multiplier[1] in chosen)
    ]
    if not moves:
        return state, torch.ones(matcher.batch, dtype=torch.bool)
    alone = Matcher(replace(problem.parts, roots=()), *moments, COSTS["l2"], moves)
    rows = torch.arange(matcher.batch)
    every = torch.ones(matcher.batch, len(moves), dtype=torch.bool)
    threshold = tolerance * matcher.costs(state, rows).sum(1)
    found = alone.descend(state, every, max_sweeps=max_sweeps, threshold=threshold)
    return found.state, found.converged


def _stacked(
    function: ScoreFunction, weights: tuple[Weights, Sequence[Weights]], problem: Problem, device: torch.device
) -> dict[str, Tensor]:
    reference, sources = weights
    sets = [units for root in problem.parts.roots for units in root.tree()]
    permutations = problem.parts.permutations
    if isinstance(function, ActivationCost):
        many = function.of_many(sources, reference, permutations)
        return {units.name: many[units.name].double().to(device) for units in sets}
    every = [_checked(function(source, reference, permutations), sets) for source in sources]
    return {units.name: torch.stack([scores[units.name] for scores in every]).double().to(device) for units in sets}


def _checked(scores: Any, sets: Sequence[Units]) -> Mapping[str, Tensor]:
    if not isinstance(scores, Mapping):
        raise TypeError(f"cost returned a {type(scores).__name__}; it must be a dict of factor -> (n, n) scores")
    for units in sets:
        if units.name not in scores:
            raise ValueError(f"cost returned no scores of factor {units.name!r}; it returned {list(scores)}")
        value, n = scores[units.name], units.count
        if not isinstance(value, Tensor) or value.shape != (n, n):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            alike = f" (the units of all {len(units.names)} factors alike)" if len(units.names) > 1 else ""
            raise ValueError(f"cost returned {found} for factor {units.name!r}; it must be ({n}, {n}){alike}")
        if not bool(torch.isfinite(value).all()):
            raise ValueError(f"cost returned NaN or infinite scores of factor {units.name!r}")
    return scores


def _total(values: Mapping[str, Tensor], batch: int) -> Tensor:
    zero = torch.zeros(batch, dtype=torch.float64)
    return sum((value.double().sum(-1).cpu() for value in values.values()), zero)
