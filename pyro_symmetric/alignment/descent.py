r"""Coordinate descent over permutations and signs, for a batch of sources at once.

With all sets of units but one held fixed, the score of an alignment is linear in the
permutation of that one. Between unit :math:`i` of the reference, with features
:math:`A_i`, and unit :math:`j` of the source as moved so far, it is

.. math:: S_{ij} = \max_\sigma \sum_{\text{axes}} \sigma \langle A_i, B_j \rangle

over every axis along which the units lie, and the best permutation solves a linear
assignment problem (Ainsworth et al. 2023, arXiv 2209.04836, Algorithm 1). Features are
tensors ``(channels, batch, *site_shape)``; a sign flips the first channel only. Between
units with others inside them, :math:`S_{ij}` is the score of the best alignment of
their insides, a small problem of the same kind.

:meth:`Descent.descend` is that algorithm. It differs from the paper's in three ways.
The *forward start* matches each set of units by its matched neighbours alone, where the
paper starts at the identity. A set is matched again only after a neighbour has moved.
Restarts *kick* the best element so far (iterated local search).

The scores of units on two axes of one site (a recurrent matrix) are a linearisation: a
bonus for units that stay shortens the step until the cost falls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_symmetric.alignment.moments import Cost, Moments
from pyro_symmetric.groups import Axis, Element, Group, Units
from pyro_symmetric.groups.units import rows

# How many units a kick shuffles. On random networks of widths 16 to 256, shares of 0.2
# and 0.3 ended lowest among 0.1 to 1; in tiny layers, six units (that is, all) reached
# the enumerated optimum more often than two to four.
KICKED_UNITS, KICKED_SHARE = 6, 0.25
# Bonuses for units that stay, in standard deviations of the scores.
BONUSES = (0.0, 1.0, 3.0, 7.0)
# The most sweeps of one descent.
MAX_SWEEPS = 100
# Assignment problems of at most so many rows are solved by enumeration, all at once.
ENUMERATED = 4
# Restarts of the small alignments inside pairs of units, if sets of units share a site
# there.
RESTARTS_INSIDE = 3


class State(NamedTuple):
    """The sources of a descent, as moved so far.

    :ivar elements: root -> elements ``(B,)`` of the group of its family alone.
    :ivar features: site -> features of the moved sources, ``(channels, B,
        *site_shape)``.
    :ivar costs: site -> its share of the cost, float64 ``(B,)``.
    """

    elements: dict[str, Element]
    features: Moments
    costs: dict[str, Tensor]


class Optimum(NamedTuple):
    """The elements ``(B,)`` where a descent ends, their costs ``(B,)``, and whether no
    step could lower these.
    """

    element: Element
    cost: Tensor
    converged: Tensor

    def better(self, other: Optimum) -> Optimum:
        """Take the better of two optima for each source."""
        lower = other.cost < self.cost
        cost, converged = (
            torch.where(lower, theirs, ours)
            for ours, theirs in zip(self[1:], other[1:], strict=True)
        )
        return Optimum(choose(lower, other.element, self.element), cost, converged)


class Descent:
    """Coordinate descent over the permutations and signs of a group.

    Its coordinates are the *roots*: sets of units inside no others, each with its
    family, all that lies inside it.

    :param group: the group, of which permutations and signs count.
    :param reference: site -> moments ``(channels, 1, *site_shape)``, or of one
        reference for each source.
    :param source: site -> features ``(channels, B, *site_shape)``.
    :param tolerance: a step is accepted if it lowers the cost by more than this
        fraction of the initial cost.
    :ivar begin: the state before any step.
    :ivar initial: the cost there, float64 ``(B,)``.
    """

    def __init__(
        self,
        group: Group,
        cost: Cost,
        reference: Moments,
        source: Moments,
        tolerance: float = 0.0,
        max_sweeps: int = MAX_SWEEPS,
    ):
        self.group, self.cost, self.max_sweeps = group.finite, cost, max_sweeps
        self.reference, self.source = reference, source
        self.batch = next((value.shape[1] for value in source.values()), 1)
        self.roots = self.group.roots
        self._groups = {root: family_of(self.group, root) for root in self.roots}
        self._terms = {
            root: terms_of(self.group, root, tuple(source)) for root in self.roots
        }
        coupled = {
            root: {other for term in self._terms[root] for other in term.coupled}
            for root in self.roots
        }
        # The roots whose scores change when this one moves: itself, too, if its scores
        # are a linearisation.
        self._neighbours = {
            root: [other for other in self.roots if root in coupled[other]]
            for root in self.roots
        }
        self._products: dict[Term, tuple[Tensor, Tensor]] = {}
        self._identity = {
            root: own.identity((self.batch,), dtype=torch.float64)
            for root, own in self._groups.items()
        }
        self.begin = State(self._identity, source, self._costs(source))
        self.initial = self._total(self.begin)
        self._threshold = tolerance * self.initial.abs()

    def descend(self, state: State, queue: Iterable[str]) -> Optimum:
        """Match one set of units after another until no match lowers the cost.

        :param queue: the roots to match first; the neighbours of those that move follow
            in the next sweep.
        """
        queue = list(queue)
        for _ in range(self.max_sweeps):
            sweep, queue = queue, []
            while sweep:
                root = sweep.pop(0)
                improved = torch.zeros(self.batch, dtype=torch.bool, device="cpu")
                for bonus in BONUSES if root in self._neighbours[root] else BONUSES[:1]:
                    step = self._match(root, state, bonus=bonus)
                    if step is None or step.equal(self._identity[root]):
                        break
                    trial = self._moved(state, root, step)
                    accepted = self._total(state) - self._total(trial) > self._threshold
                    if bool(accepted.any()):
                        step = choose(accepted, step, self._identity[root])
                        state = (
                            trial
                            if bool(accepted.all())
                            else self._moved(state, root, step)
                        )
                    improved |= accepted
                    if bool(improved.all()):
                        break
                if bool(improved.any()):
                    queue += [
                        own
                        for own in self._neighbours[root]
                        if own not in sweep and own not in queue
                    ]
            if not queue:
                break
            queue = [
                queue[k] for k in torch.randperm(len(queue), device="cpu").tolist()
            ]
        permutations, signs = (
            {
                name: v
                for own in state.elements.values()
                for name, v in own.parts[k].items()
            }
            for k in range(2)
        )
        element = Element(
            self.group,
            permutations,
            signs,
            batch_shape=(self.batch,),
            dtype=torch.float64,
        )
        return Optimum(
            element,
            self._total(state),
            torch.full((self.batch,), not queue, device="cpu"),
        )

    # one match ------------------------------------------------------------------------

    def _match(
        self,
        root: str,
        state: State,
        matched: Collection[str] | None = None,
        bonus: float = 0.0,
    ) -> Element | None:
        """Return the step of highest score of a root's family; ``None`` if no term can
        be compared.

        :param matched: the roots that are matched already; only terms of these count.
            ``None``: all.
        :param bonus: for units that stay, in standard deviations of the scores.
        """
        units, simple, by_rank = self.group[root], is_simple(self.group, root), False
        terms = self._known_terms(root, matched)
        if not terms and simple and matched is not None:
            # Sorted, the entries of units depend on no other units of the site, and
            # bound what a pair can score.
            terms, by_rank = self._known_terms(root, {*matched, root}), True
        if not terms:
            return None
        permutations: dict[str, Tensor] = {}
        if simple:
            scores, signs = best_signs(self._scores(terms, state, by_rank))
        else:
            scores, permutations, signs = self._nested_scores(root, terms, state)
        images = torch.arange(units.size, device="cpu").expand(
            self.batch, units.copies, -1
        )
        if "permute" in units.moves:
            spread = (
                bonus * scores.flatten(1).std(1, correction=0)[:, None, None, None]
                if bonus
                else 0.0
            )
            images = assign(
                scores
                + spread * torch.eye(units.size, dtype=scores.dtype, device="cpu")
            )
        partners = images.argsort(-1).unsqueeze(2)  # of the source's units

        def of_pairs(name: str, value: Tensor) -> Tensor:
            """Take from all pairs, ``(B, copies, size, size, ...)``, the values of the
            assigned ones.
            """
            index = partners.reshape(*partners.shape, *[1] * (value.dim() - 4))
            return value.take_along_dim(index, 2).reshape(
                self.batch, *self.group[name].shape
            )

        permutations = {
            name: of_pairs(name, value) for name, value in permutations.items()
        }
        permutations |= (
            {root: images.reshape(self.batch, *units.shape)}
            if "permute" in units.moves
            else {}
        )
        signs = {name: of_pairs(name, value) for name, value in signs.items()}
        return Element(
            self._groups[root],
            permutations,
            signs,
            batch_shape=(self.batch,),
            dtype=torch.float64,
        )

    def _scores(
        self, terms: Sequence[Term], state: State, by_rank: bool
    ) -> dict[frozenset[str], Tensor]:
        """Return the scores ``(B, copies, size, size)`` of all pairs (reference,
        source), by the signs in front.
        """
        scores: dict[frozenset[str], Tensor] = {}
        for term in terms:
            for channel, product in enumerate(
                self._inner_products(term, state, by_rank).double()
            ):
                signs = frozenset() if by_rank or channel else term.signs
                scores[signs] = scores[signs] + product if signs in scores else product
        return scores

    def _inner_products(self, term: Term, state: State, by_rank: bool) -> Tensor:
        """Return the inner products of all pairs, ``(channels, B, copies, size,
        size)``; kept until features change.

        :param by_rank: whether to sort the entries of each unit first (without signs,
            if these count).
        """
        moved = state.features[term.axis.site]
        features, kept = self._products.get(term, (None, None))
        if features is moved and kept is not None and not by_rank:
            return kept
        ours, theirs = (
            self._entries(term, v)
            for v in (self.cost.of_reference(self.reference[term.axis.site]), moved)
        )
        if by_rank:
            ours, theirs = (
                (v.abs() if term.signs else v).sort(-1).values for v in (ours, theirs)
            )
        products = ours.flatten(-2) @ theirs.flatten(-2).mT
        if not by_rank:
            self._products[term] = moved, products
        return products

    def _nested_scores(
        self, root: str, terms: Sequence[Term], state: State
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Align the insides of all pairs of units.

        :return: scores ``(B, copies, size, size)``, and permutations and signs by name,
            each of all pairs.
        """
        units, (group, sites) = (
            self.group[root],
            group_inside(self.group, root, tuple(self.source)),
        )
        shape = (self.batch, units.copies, units.size, units.size)
        reference, source = {}, {}
        for term, site in sites:
            if term in terms:
                ours = self._entries(term, self.reference[term.axis.site]).unsqueeze(4)
                theirs = self._entries(term, state.features[term.axis.site]).unsqueeze(
                    3
                )
                reference[site], source[site] = (
                    value.expand(len(value), *shape, *value.shape[5:]).flatten(1, 4)
                    for value in (ours, theirs)
                )
        pairs = Descent(group, self.cost, reference, source, 1e-7, 10)
        best, _ = pairs.search(
            RESTARTS_INSIDE if any(pairs._neighbours.values()) else 0
        )
        element = reshape(best.element, shape)
        return -best.cost.reshape(shape), element.permutations, element.signs

    def _moved(self, state: State, root: str, step: Element) -> State:
        """Return the state after a step of one root's family."""
        sites = dict.fromkeys(term.axis.site for term in self._terms[root])
        features = {site: act(step, site, state.features[site]) for site in sites}
        elements = {**state.elements, root: step @ state.elements[root]}
        return State(
            elements,
            {**state.features, **features},
            {**state.costs, **self._costs(features)},
        )

    def _known_terms(self, root: str, matched: Collection[str] | None) -> list[Term]:
        return [
            term
            for term in self._terms[root]
            if matched is None or term.coupled <= set(matched)
        ]

    def _entries(self, term: Term, value: Tensor) -> Tensor:
        """Return the entries of each unit in a site, ``(channels, B, copies, size,
        blocks, entries)``.
        """
        site = term.axis.site
        value = rows(
            self.group.view(site, value), term.axis, len(self.group.view_shapes[site])
        )
        return value.unflatten(-1, (len(term.axis.index), -1)).unflatten(2, term.shape)

    def _costs(self, features: Moments) -> dict[str, Tensor]:
        return {
            site: self.cost.of_site(self.reference[site], value)
            for site, value in features.items()
        }

    def _total(self, state: State) -> Tensor:
        return sum(
            state.costs.values(),
            torch.zeros(self.batch, dtype=torch.float64, device="cpu"),
        )

    # starts and restarts --------------------------------------------------------------

    def search(
        self, restarts: int, tick: Callable[[], object] = int
    ) -> tuple[Optimum, list[Tensor]]:
        """Run several descents; return the best optimum of each source, and the costs
        at the ends of all.

        :param tick: called after every descent.
        """
        best = self.descend(*self.start())
        ends = [best.cost]
        tick()

        def attempt(state: State, queue: Iterable[str]) -> None:
            nonlocal best
            optimum = self.descend(state, queue)
            ends.append(optimum.cost)
            best = best.better(optimum)

        kickable = self._kickable()
        for _ in range(restarts if kickable else 0):
            root = kickable[int(torch.randint(len(kickable), (), device="cpu"))]
            attempt(*self._kicked(root, self.at(best.element)))
            tick()
        # Under the wrong sign of a whole normalised vector no unit fits, and no single
        # step leads to the right one.
        lone_signs = [
            root
            for root in self.roots
            if self.group[root].moves == {"flip"} and self.group[root].count == 1
        ]
        for flipped in lone_signs:
            attempt(
                *self.start(
                    {
                        n: best.element.signs[n] * (-1.0 if n == flipped else 1.0)
                        for n in lone_signs
                    }
                )
            )
        if bool((best.cost > self.initial).any()):
            attempt(self.begin, self.roots)
        return best, ends

    def start(
        self, signs: Mapping[str, Tensor] | None = None
    ) -> tuple[State, list[str]]:
        """Match each set of units once, by the terms of matched units alone.

        The set with the largest share of such entries comes next: a chain of layers is
        walked from its wide end.

        :param signs: signs that are given from the start.
        :return: the state reached, and the roots matched before one of their
            neighbours.
        """
        state, matched, early = self.begin, set(signs or ()), []
        for root, value in (signs or {}).items():
            state = self._moved(
                state, root, Element(self._groups[root], signs={root: value})
            )
        unmatched = [root for root in self.roots if root not in matched]
        while unmatched:
            root = max(unmatched, key=lambda own: self._known_share(own, matched))
            unmatched.remove(root)
            if (step := self._match(root, state, matched)) is not None:
                state = self._moved(state, root, step)
            matched.add(root)
            if not {*unmatched, root}.isdisjoint(self._neighbours[root]):
                early.append(root)
        return state, early

    def at(self, element: Element) -> State:
        """Return the state of the sources moved by an element."""
        features = {
            site: act(element, site, value) for site, value in self.source.items()
        }
        elements = {root: element.within(group) for root, group in self._groups.items()}
        return State(elements, features, self._costs(features))

    def _known_share(self, root: str, matched: Collection[str]) -> float:
        known = sum(term.size for term in self._known_terms(root, matched))
        return known / max(1, sum(term.size for term in self._terms[root]))

    def _kickable(self) -> list[str]:
        """Return the roots worth a kick: coupled permutations, or else coupled signs.

        Without coupling, a single assignment each is the exact optimum.
        """
        coupled = [
            root
            for root in self.roots
            if self._neighbours[root] and is_simple(self.group, root)
        ]
        by_move = (
            [root for root in coupled if move in self.group[root].moves]
            for move in ("permute", "flip")
        )
        return next(filter(None, by_move), [])

    def _kicked(self, root: str, state: State) -> tuple[State, list[str]]:
        """Shuffle some units of one set, or flip some signs; return the state and the
        roots to match, this one last.
        """
        units, permutations, signs = self.group[root], {}, {}
        keys = torch.rand(self.batch, *units.shape, device="cpu")
        if "permute" in units.moves:
            kicked = keys.argsort(-1)[
                ..., : max(KICKED_UNITS, int(KICKED_SHARE * units.size))
            ]
            shuffled = kicked.gather(
                -1, torch.rand(kicked.shape, device="cpu").argsort(-1)
            )
            images = torch.arange(units.size, device="cpu").expand(keys.shape)
            permutations = {root: images.scatter(-1, kicked, shuffled)}
        else:  # one sign at least
            flipped = keys <= keys.amin(-1, keepdim=True).clamp_min(KICKED_SHARE)
            signs = {root: 1.0 - 2.0 * flipped.double()}
        step = Element(
            self._groups[root],
            permutations,
            signs,
            batch_shape=(self.batch,),
            dtype=torch.float64,
        )
        others = sorted(set(self._neighbours[root]) - {root})
        order = torch.randperm(len(others), device="cpu").tolist()
        return self._moved(state, root, step), [*(others[k] for k in order), root]


# terms of the score -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Term:
    """One term of the scores of a set of units: blocks of an axis along which the units
    lie, under the same signs.

    :param axis: in the group's view.
    :param shape: copies and size of the units.
    :param signs: the units whose signs multiply the term: these, or sets of size one
        inside them.
    :param coupled: the roots whose moves change the term, other than through this axis.
    :param size: the number of entries.
    """

    axis: Axis
    shape: tuple[int, int]
    signs: frozenset[str]
    coupled: frozenset[str]
    size: int


@lru_cache(maxsize=4096)
def family_of(group: Group, root: str) -> Group:
    """Return the group of some units and all inside them alone."""
    return group.without(
        [name for name in group.units if name not in group.family(root)]
    )


@lru_cache(maxsize=4096)
def terms_of(group: Group, root: str, sites: tuple[str, ...]) -> tuple[Term, ...]:
    """List the terms of a root's scores at some sites."""
    terms, family, units = [], group.family(root), group[root]
    signed = [
        name
        for name in (family if is_simple(group, root) else (root,))
        if "flip" in group[name].moves
    ]
    for axis in group.axes(root):
        if axis.site not in sites:
            continue
        coupled = {
            [name, *group.ancestors(name)][-1]
            for dim, members in group.members(axis.site).items()
            for name, other in members
            if dim != axis.dim
            or (name not in family and bool(torch.isin(axis.index, other.index).any()))
        }
        blocks_by_signs: dict[frozenset[str], list[int]] = {}
        for block, row in enumerate(axis.index):
            signs = [
                name
                for name in signed
                for own in group.axes(name)
                if (own.site, own.dim) == (axis.site, axis.dim) and own.exponent % 2
                if bool((own.index == row).all(-1).any())
            ]
            blocks_by_signs.setdefault(frozenset(signs), []).append(block)
        shape = group.view_shapes[axis.site]
        for multiplying, blocks in blocks_by_signs.items():
            part = replace(axis, index=axis.index[blocks])
            size = part.index.numel() * math.prod(shape) // shape[axis.dim]
            terms.append(
                Term(
                    part,
                    (units.copies, units.size),
                    multiplying,
                    frozenset(coupled),
                    size,
                )
            )
    return tuple(terms)


@lru_cache(maxsize=4096)
def is_simple(group: Group, root: str) -> bool:
    """Return whether units hold no others, or only sets of size one with signs of their
    own.
    """
    return all(
        group[name].size == 1 and group[name].parent == root
        for name in group.family(root)[1:]
    )


@lru_cache(maxsize=256)
def group_inside(
    group: Group, root: str, sites: tuple[str, ...]
) -> tuple[Group, list[tuple[Term, str]]]:
    """Build the group inside one unit of a root, whose sites are the unit's positions
    in each term.
    """
    outer, named, shapes = group[root], [], {}
    axes: dict[str, list[Axis]] = {name: [] for name in group.family(root)}
    for number, term in enumerate(terms_of(group, root, sites)):
        axis, site = term.axis, f"{number}: {term.axis.site}"
        named.append((term, site))
        shape = group.view_shapes[axis.site]
        shapes[site] = torch.Size(
            (len(axis.index), math.prod(shape) // shape[axis.dim])
        )
        block = torch.full((shape[axis.dim],), -1, device="cpu")
        block[axis.index[:, 0]] = torch.arange(len(axis.index), device="cpu")
        for name in axes:
            for own in group.axes(name):
                if (own.site, own.dim) == (axis.site, axis.dim):
                    local = block[own.index[:, : group[name].count // outer.count]]
                    if bool((local := local[(local >= 0).all(-1)]).numel()):
                        axes[name].append(Axis(site, 0, local, own.exponent))
    units = []
    for name, own_axes in axes.items():
        one = group[name]
        if name == root:
            units += (
                [Units(name, 1, tuple(own_axes), moves=frozenset({"flip"}))]
                if "flip" in one.moves
                else []
            )
        else:
            parent = None if one.parent == root else one.parent
            copies = one.count // outer.count // one.size
            units.append(
                Units(name, one.size, tuple(own_axes), parent, copies, one.moves)
            )
    return Group(units, shapes), named


# assignments and signs ----------------------------------------------------------------


def assign(scores: Tensor) -> Tensor:
    r"""Solve linear assignment problems: :math:`\arg\max_\pi \sum_i S_{i \pi(i)}`.

    A constant added to a row or a column changes no assignment, but it slows SciPy's
    solver: up to ten times at width 2048, where all features are positive, as
    deviations are. So row and column minima are subtracted first. Threads don't pay:
    the solver holds the interpreter for small problems and is bound by memory for large
    ones.

    :param scores: ``(..., n, n)``.
    :return: LongTensor ``(..., n)``.
    """
    n = scores.shape[-1]
    if n == 1:
        return torch.zeros(scores.shape[:-1], dtype=torch.long, device=scores.device)
    if n <= ENUMERATED:
        every = torch.tensor(
            list(itertools.permutations(range(n))), device=scores.device
        )
        return every[
            scores[..., torch.arange(n, device=scores.device), every].sum(-1).argmax(-1)
        ]
    costs = scores.mean(-2, keepdim=True) - scores
    costs -= costs.amin(-1, keepdim=True)
    costs -= costs.amin(-2, keepdim=True)
    best = costs.argmin(-1)
    images = best.reshape(-1, n)
    # If the best columns of all rows differ, they are the solution.
    unsolved = (images.sort(-1).values != torch.arange(n, device=scores.device)).any(-1)
    if bool(unsolved.any()):
        hard = costs.reshape(-1, n, n)[unsolved].double().cpu().numpy()
        solved = np.stack([linear_sum_assignment(cost)[1] for cost in hard])
        images[unsolved] = torch.as_tensor(
            solved, dtype=torch.long, device=scores.device
        )
    return images.reshape(best.shape)


def best_signs(
    scores: Mapping[frozenset[str], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Maximise the sum of scores over the signs that multiply them, elementwise; return
    it and these signs by name.
    """
    tied = next((names for names in scores if len(names) > 1), None)
    if tied is None:
        total = torch.stack(
            [value.abs() if names else value for names, value in scores.items()]
        ).sum(0)
        return total, {
            name: torch.where(v < 0, -1.0, 1.0).double()
            for names, v in scores.items()
            for name in names
        }
    first, maxima = min(tied), []
    for sign in (1.0, -1.0):
        rest: dict[frozenset[str], Tensor] = {}
        for names, value in scores.items():
            own, value = names - {first}, sign * value if first in names else value
            rest[own] = rest[own] + value if own in rest else value
        maxima.append(best_signs(rest))
    (plus, signs), (minus, turned) = maxima
    flipped = minus > plus
    signs = {
        name: torch.where(flipped, turned[name], value) for name, value in signs.items()
    }
    return torch.maximum(plus, minus), {
        **signs,
        first: torch.where(flipped, -1.0, 1.0).double(),
    }


# elements -----------------------------------------------------------------------------


def act(element: Element, site: str, channels: Tensor) -> Tensor:
    """Act on all channels of a site; signs change the first only."""
    first, *even = (element.on_site(site, channel) for channel in channels)
    return torch.stack([first, *(channel.abs() for channel in even)])


def choose(condition: Tensor, one: Element, other: Element) -> Element:
    """Choose from two batches ``(B,)``, as :func:`torch.where` does."""
    return one.changed(
        lambda move, v: torch.where(condition.unsqueeze(-1), v, other.numbers[move]),
        one.batch_shape,
    )


def reshape(element: Element, shape: Sequence[int]) -> Element:
    """Reshape a batch of elements ``(B,)``."""
    return element.changed(
        lambda _, value: value.reshape(*shape, value.shape[-1]), shape
    )


def put(element: Element, rows: Tensor, other: Element) -> Element:
    """Replace some elements of a batch ``(B,)`` by those of another."""
    return element.changed(
        lambda move, v: v.index_copy(0, rows, other.numbers[move]), element.batch_shape
    )


def recentre(element: Element) -> Element:
    """Multiply a batch of :math:`g` by :math:`h^{-1}`, the inverse of its commonest
    permutations and signs :math:`h`.

    The frame stays the same; of several commonest the first counts.
    """
    finite = [
        value.flatten(1)
        for value in (*element.permutations.values(), *element.signs.values())
    ]
    if not finite:
        return element
    numbers = torch.cat([value.long() for value in finite], 1)
    _, kind, counts = numbers.unique(dim=0, return_inverse=True, return_counts=True)
    return (
        element.select(int((counts[kind] == counts.max()).nonzero()[0])).inverse()
        @ element
    )
