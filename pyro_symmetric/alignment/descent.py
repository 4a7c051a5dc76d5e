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

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.alignment.assignment import (
    ScoresBySigns,
    add_to,
    assign,
    best_signs,
)
from pyro_symmetric.alignment.covers import (
    MOST_INSIDE,
    Cover,
    cover_of,
    log_count,
)
from pyro_symmetric.alignment.elements import act, choose, reshape
from pyro_symmetric.alignment.moments import Cost, Moments
from pyro_symmetric.alignment.terms import (
    Term,
    family_of,
    group_inside,
    is_simple,
    terms_of,
)
from pyro_symmetric.groups import Element, Group, Units
from pyro_symmetric.groups.axes import rows
from pyro_symmetric.groups.moves import MOVES, Move, polar
from pyro_symmetric.weights import ByName, Tensors, pick

# How many units a kick shuffles. On random networks of widths 16 to 256, shares of 0.2
# and 0.3 ended lowest among 0.1 to 1; in tiny layers, six units (that is, all) reached
# the enumerated optimum more often than two to four.
KICKED_UNITS = 6
KICKED_SHARE = 0.25
# Bonuses for units that stay, in standard deviations of the scores.
BONUSES = (0.0, 1.0, 3.0, 7.0)
# The most sweeps of one descent.
MAX_SWEEPS = 100
# The most entries of all moved sources of a group that is enumerated (a second or two);
# of those that are moved at once; and of chains of restarts side by side, which pay
# while the overhead of an operation exceeds its work.
MOST_ENTRIES = 2**24
CHUNK_ENTRIES = 2**20
RESTART_ENTRIES = 2**17
# The default number of restarts of a source, at most and at least, and the entries that
# they may take together. In a network with three hidden layers of 512 restarts lower
# the cost by a factor of 0.0007, in five times the time: there are none with more than
# so many units in a set.
MOST_RESTARTS = 64
RESTARTS = 3
RESTARTS_ENTRIES = 2**20
NARROW = 256
# The most chains of restarts, and the least restarts of each. Of 400 alignments of
# three and four layers of eight units to noisy copies, two missed the planted one, and
# neither was called converged; one that found it wasn't either.
MOST_CHAINS = 8
LEAST_KICKS = 4
# Ends of chains agree if their costs differ by no more than this fraction.
AGREEMENT = 1e-6
# The small alignments inside pairs of units: restarts, if sets of units share a site
# there, sweeps, and tolerance.
RESTARTS_INSIDE = 3
SWEEPS_INSIDE = 10
TOLERANCE_INSIDE = 1e-7


class State(NamedTuple):
    """The sources of a descent, as moved so far.

    :ivar elements: root -> elements ``(B,)`` of the group of its family alone.
    :ivar features: site -> features of the moved sources,
        ``(channels, B, *site_shape)``.
    :ivar costs: site -> its share of the cost, float64 ``(B,)``.
    """

    elements: dict[str, Element]
    features: Moments
    costs: ByName


class Optimum(NamedTuple):
    """End of a descent.

    :ivar element: the elements of all sources, ``(B,)``.
    :ivar cost: their costs, ``(B,)``.
    :ivar converged: whether no step could lower these, ``(B,)``.
    """

    element: Element
    cost: Tensor
    converged: Tensor

    def better(self, candidate: Optimum) -> Optimum:
        """Take the better of two optima for each source."""
        lower = candidate.cost < self.cost
        return Optimum(
            choose(lower, candidate.element, self.element),
            torch.where(lower, candidate.cost, self.cost),
            torch.where(lower, candidate.converged, self.converged),
        )

    def repeated(self, count: int) -> Optimum:
        """Repeat the optimum of each source."""
        element = self.element.changed(
            lambda _, value: value.repeat_interleave(count, 0),
            (self.element.batch_shape[0] * count,),
        )
        return Optimum(
            element,
            self.cost.repeat_interleave(count),
            self.converged.repeat_interleave(count),
        )

    def best_of(self, count: int) -> Optimum:
        """Take the best of each ``count`` successive optima."""
        least = self.cost.reshape(-1, count).min(1)
        rows = least.indices + count * torch.arange(len(least.indices), device="cpu")
        return Optimum(self.element.select(rows), least.values, self.converged[rows])


class Start(NamedTuple):
    """Start of a descent, and the roots to match first."""

    state: State
    queue: Sequence[str]


class Pairs(NamedTuple):
    """All pairs of a reference unit and a source unit, ``(B, copies, size, size)``.

    :ivar scores: what a pair adds to the score.
    :ivar permutations: name -> permutations inside the pairs.
    :ivar signs: name -> the best signs of the pairs, and inside them.
    :ivar rotations: name -> rotations inside the pairs.
    """

    scores: Tensor
    permutations: ByName
    signs: ByName
    rotations: ByName


class Descent:
    """Coordinate descent over the permutations, signs and rotations of a group.

    Its coordinates are the *roots*: sets of units inside no others, each with its
    *family*, all that lies inside it.

    >>> from pyro_symmetric.alignment.descent import Descent
    >>> from pyro_symmetric.alignment.moments import COSTS
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> reference = {"w": torch.tensor([[[1.0, 2.0, 3.0]]])}  # one channel, one source
    >>> source = {"w": torch.tensor([[[3.0, 1.0, 2.0]]])}
    >>> descent = Descent(group, COSTS["l2"], reference, source)
    >>> optimum = descent.descend(descent.begin, descent.roots)
    >>> optimum.element["unit"].tolist(), optimum.cost.tolist()
    ([[1, 2, 0]], [0.0])

    A set that rotates is matched by the polar factor of the scores whose best
    assignment others take, which is exact if the cost is a squared distance.

    :param group: the group, of which permutations, signs and rotations count.
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
        self.group = group.compact
        self.cost = cost
        self.reference = reference
        self.source = source
        self.max_sweeps = max_sweeps
        self.batch = next((value.shape[1] for value in source.values()), 1)
        self.roots = self.group.roots
        self.entries = self._work()
        self._families = {root: family_of(self.group, root) for root in self.roots}
        sites = tuple(source)
        self._terms = {root: terms_of(self.group, root, sites) for root in self.roots}
        self._neighbours = {root: self._rescored(root) for root in self.roots}
        self._products: dict[Term, _Products] = {}
        self._identity = {}
        for root, family in self._families.items():
            identity = family.identity((self.batch,), dtype=torch.float64)
            self._identity[root] = identity
        self.begin = State(self._identity, source, self._costs(source))
        self.initial = self._total(self.begin)
        self._threshold = tolerance * self.initial.abs()

    def _work(self) -> int:
        """Return the entries of all sources, with their scores, as a measure of work.

        Assignments of ``n`` units take the time of :math:`n^3 / 64` entries.
        """
        entries = 1 + sum(value[0, 0].numel() for value in self.source.values())
        for name in self.group.names("permute"):
            units = self.group[name]
            entries += units.copies * (units.size**2 + units.size**3 // 64)
        return self.batch * entries

    def _rescored(self, moved: str) -> list[str]:
        """Return the roots whose scores change when one moves.

        It is one of them itself, if its scores are a linearisation.
        """

        def is_coupled(root: str) -> bool:
            return any(moved in term.coupled for term in self._terms[root])

        return [root for root in self.roots if is_coupled(root)]

    def descend(self, state: State, queue: Iterable[str]) -> Optimum:
        """Match one set of units after another until no match lowers the cost.

        :param queue: the roots to match first; the neighbours of those that move follow
            in the next sweep.
        """
        queue = list(queue)
        for _ in range(self.max_sweeps):
            state, queue = self._sweep(state, queue)
            if not queue:
                break
            order = torch.randperm(len(queue), device="cpu").tolist()
            queue = [queue[k] for k in order]
        return self.ended(state, converged=not queue)

    def ended(self, state: State, converged: bool) -> Optimum:
        """Return the elements and costs of a state."""
        flags = torch.full((self.batch,), converged, device="cpu")
        return Optimum(self._joined(state), self._total(state), flags)

    def _sweep(self, state: State, queue: Sequence[str]) -> Start:
        """Match some roots in turn; return the state, and the roots to match again."""
        waiting = list(queue)
        following = []
        while waiting:
            root = waiting.pop(0)
            improved = self._improved(state, root)
            if improved is None:
                continue
            state = improved
            for neighbour in self._neighbours[root]:
                if neighbour not in waiting and neighbour not in following:
                    following.append(neighbour)
        return Start(state, following)

    def _improved(self, state: State, root: str) -> State | None:
        """Match one root where that lowers the cost; None if it does so nowhere."""
        linearised = root in self._neighbours[root]
        identity = self._identity[root]
        improved = torch.zeros(self.batch, dtype=torch.bool, device="cpu")
        for bonus in BONUSES if linearised else BONUSES[:1]:
            step = self.match(root, state, bonus=bonus)
            if step is None or step.equal(identity):
                break
            trial = self.moved(state, root, step)
            accepted = self._total(state) - self._total(trial) > self._threshold
            if accepted.all():
                state = trial
            elif accepted.any():
                state = self.moved(state, root, choose(accepted, step, identity))
            improved |= accepted
            if improved.all():
                break
        return state if improved.any() else None

    def _joined(self, state: State) -> Element:
        """Return the elements of all families as those of the group."""
        permutations: ByName = {}
        signs: ByName = {}
        rotations: ByName = {}
        for element in state.elements.values():
            permutations |= element.permutations
            signs |= element.signs
            rotations |= element.rotations
        return self._element(self.group, permutations, signs, rotations)

    def _element(
        self,
        group: Group,
        permutations: ByName,
        signs: ByName,
        rotations: ByName | None = None,
    ) -> Element:
        return Element(
            group,
            permutations,
            signs,
            rotations=rotations,
            batch_shape=(self.batch,),
            dtype=torch.float64,
        )

    # one match ------------------------------------------------------------------------

    def match(
        self,
        root: str,
        state: State,
        matched: Collection[str] | None = None,
        bonus: float = 0.0,
    ) -> Element | None:
        """Return the step of highest score of a root's family.

        :param matched: the roots that are matched already; only terms of these count.
            ``None``: all.
        :param bonus: for units that stay, in standard deviations of the scores.
        :return: ``None`` if no term can be compared.
        """
        terms = self._known_terms(root, matched)
        if not is_simple(self.group, root):
            if not terms:
                return None
            return self._assigned(root, self._nested_pairs(root, terms, state), bonus)
        if "rotate" in self.group[root].moves:
            return self._turned(root, terms, state, bonus) if terms else None
        by_rank = False
        if not terms and matched is not None:
            # Sorted, the entries of units depend on no other units of the site, and
            # bound what a pair can score.
            terms = self._known_terms(root, {*matched, root})
            by_rank = True
        if not terms:
            return None
        scores, signs = best_signs(self._scores(terms, state, by_rank))
        return self._assigned(root, Pairs(scores, {}, signs, {}), bonus)

    def _turned(
        self, root: str, terms: Sequence[Term], state: State, bonus: float
    ) -> Element:
        """Return the rotations of highest score."""
        units = self.group[root]
        scores = sum(self._inner_products(term, state)[0].double() for term in terms)
        assert isinstance(scores, Tensor)
        spread = scores.flatten(1).std(1, correction=0)[:, None, None, None]
        stay = torch.eye(units.size, dtype=scores.dtype, device="cpu")
        turns = polar(scores + bonus * spread * stay)
        shaped = turns.reshape(self.batch, *units.shape, units.size)
        return self._element(self._families[root], {}, {}, {root: shaped})

    def _assigned(self, root: str, pairs: Pairs, bonus: float) -> Element:
        """Assign units to each other; return the step with what is inside the pairs."""
        units = self.group[root]
        shape = (self.batch, units.copies, units.size)
        images = torch.arange(units.size, device="cpu").expand(shape)
        if "permute" in units.moves:
            scores = pairs.scores
            if bonus:
                spread = scores.flatten(1).std(1, correction=0)[:, None, None, None]
                stay = torch.eye(units.size, dtype=scores.dtype, device="cpu")
                scores = scores + bonus * spread * stay
            images = assign(scores)
        partners = images.argsort(-1).unsqueeze(2)  # of the source's units
        permutations = self._of_partners(pairs.permutations, partners)
        if "permute" in units.moves:
            permutations[root] = images.reshape(self.batch, *units.shape)
        signs = self._of_partners(pairs.signs, partners)
        rotations = self._of_partners(pairs.rotations, partners, "rotate")
        return self._element(self._families[root], permutations, signs, rotations)

    def _of_partners(
        self, of_pairs: Tensors, partners: Tensor, move: Move = "permute"
    ) -> ByName:
        """Take from all pairs, ``(B, copies, size, size, ...)``, the assigned ones."""
        taken = {}
        for name, value in of_pairs.items():
            inner_dims = value.dim() - 4
            index = partners.reshape(*partners.shape, *[1] * inner_dims)
            value = value.take_along_dim(index, 2)
            ending = MOVES[move].shape(self.group[name])
            taken[name] = value.reshape(self.batch, *ending)
        return taken

    def _scores(
        self, terms: Sequence[Term], state: State, by_rank: bool
    ) -> ScoresBySigns:
        """Return the scores of all pairs, by the signs that multiply them.

        :param by_rank: whether to compare sorted entries, without signs.
        """
        scores: ScoresBySigns = {}
        for term in terms:
            if by_rank:
                products = self._sorted_products(term, state)
            else:
                products = self._inner_products(term, state)
            for channel, product in enumerate(products.double()):
                signed = channel == 0 and not by_rank
                add_to(scores, term.signs if signed else frozenset(), product)
        return scores

    def _inner_products(self, term: Term, state: State) -> Tensor:
        """Return the inner products of all pairs, kept until the features change.

        :return: ``(channels, B, copies, size, size)``.
        """
        features = state.features[term.axis.site]
        cached = self._products.get(term)
        if cached is not None and cached.features is features:
            return cached.products
        reference = self._entries(term, self._reference_features(term))
        products = reference.flatten(-2) @ self._entries(term, features).flatten(-2).mT
        self._products[term] = _Products(features, products)
        return products

    def _sorted_products(self, term: Term, state: State) -> Tensor:
        """Return the same of the sorted entries of units; if signs count, of sizes."""
        reference = self._entries(term, self._reference_features(term))
        source = self._entries(term, state.features[term.axis.site])
        if term.signs:
            reference = reference.abs()
            source = source.abs()
        reference = reference.sort(-1).values.flatten(-2)
        return reference @ source.sort(-1).values.flatten(-2).mT

    def _nested_pairs(self, root: str, terms: Sequence[Term], state: State) -> Pairs:
        """Align the insides of all pairs of units."""
        units = self.group[root]
        shape = (self.batch, units.copies, units.size, units.size)
        inside = group_inside(self.group, root, tuple(self.source))
        reference = {}
        source = {}
        for term, site in inside.sites.items():
            if term not in terms:
                continue
            site_reference = self._entries(term, self.reference[term.axis.site])
            site_source = self._entries(term, state.features[term.axis.site])
            reference[site] = _of_all_pairs(site_reference.unsqueeze(4), shape)
            source[site] = _of_all_pairs(site_source.unsqueeze(3), shape)
        pairs = Descent(
            inside.group, self.cost, reference, source, TOLERANCE_INSIDE, SWEEPS_INSIDE
        )
        best = _inside(pairs)
        element = reshape(best.element, shape)
        permutations, signs, _, _, rotations = element.parts
        return Pairs(-best.cost.reshape(shape), permutations, signs, rotations)

    def moved(self, state: State, root: str, step: Element) -> State:
        """Return the state after a step of one root's family."""
        features = {}
        for term in self._terms[root]:
            site = term.axis.site
            if site not in features:
                features[site] = act(step, site, state.features[site])
        return State(
            {**state.elements, root: step @ state.elements[root]},
            {**state.features, **features},
            {**state.costs, **self._costs(features)},
        )

    def _known_terms(self, root: str, matched: Collection[str] | None) -> list[Term]:
        if matched is None:
            return list(self._terms[root])
        return [term for term in self._terms[root] if term.coupled <= set(matched)]

    def _reference_features(self, term: Term) -> Tensor:
        return self.cost.of_reference(self.reference[term.axis.site])

    def _entries(self, term: Term, value: Tensor) -> Tensor:
        """Return the entries of each unit in a site.

        :return: ``(channels, B, copies, size, blocks, entries)``.
        """
        site = term.axis.site
        value = self.group.view(site, value)
        value = rows(value, term.axis, len(self.group.view_shapes[site]))
        value = value.unflatten(-1, (len(term.axis.index), -1))
        return value.unflatten(2, term.shape)

    def _costs(self, features: Moments) -> ByName:
        costs = {}
        for site, value in features.items():
            costs[site] = self.cost.of_site(self.reference[site], value)
        return costs

    def _total(self, state: State) -> Tensor:
        zero = torch.zeros(self.batch, dtype=torch.float64, device="cpu")
        return sum(state.costs.values(), zero)

    # starts and copies ----------------------------------------------------------------

    def start(self, signs: Tensors | None = None) -> Start:
        """Match each set of units once, by the terms of matched units alone.

        The set with the largest share of such entries comes next: a chain of layers is
        walked from its wide end.

        :param signs: signs that are known from the start.
        :return: the state, and the roots matched before one of their neighbours.
        """
        state = self.begin
        signs = signs or {}
        for root, value in signs.items():
            step = Element(self._families[root], signs={root: value})
            state = self.moved(state, root, step)
        matched = set(signs)
        unmatched = [root for root in self.roots if root not in matched]
        early = []
        while unmatched:
            shares = [self._known_share(root, matched) for root in unmatched]
            root = unmatched.pop(shares.index(max(shares)))
            match = self.match(root, state, matched)
            if match is not None:
                state = self.moved(state, root, match)
            matched.add(root)
            if not {*unmatched, root}.isdisjoint(self._neighbours[root]):
                early.append(root)
        return Start(state, early)

    def at(self, element: Element) -> State:
        """Return the state of the sources moved by an element."""
        features = {}
        for site, value in self.source.items():
            features[site] = act(element, site, value)
        elements = {}
        for root, family in self._families.items():
            elements[root] = element.within(family)
        return State(elements, features, self._costs(features))

    def _known_share(self, root: str, matched: Collection[str]) -> float:
        known = sum(term.size for term in self._known_terms(root, matched))
        return known / max(1, sum(term.size for term in self._terms[root]))

    def repeated(self, count: int) -> Descent:
        """Return the descent of several copies of each source, next to each other."""
        if count == 1:
            return self
        reference = {}
        for site, value in self.reference.items():
            shared = value.shape[1] == 1
            reference[site] = value if shared else value.repeat_interleave(count, 1)
        source = {}
        for site, value in self.source.items():
            source[site] = value.repeat_interleave(count, 1)
        copies = Descent(
            self.group, self.cost, reference, source, max_sweeps=self.max_sweeps
        )
        copies._threshold = self._threshold.repeat_interleave(count)
        return copies

    def kickable(self) -> list[str]:
        """Return the roots worth a kick: coupled permutations, or else coupled signs.

        Without coupling, a single assignment each is the exact optimum.
        """
        permuted = []
        flipped = []
        for root in self.roots:
            if not self._neighbours[root] or not is_simple(self.group, root):
                continue
            if "permute" in self.group[root].moves:
                permuted.append(root)
            if "flip" in self.group[root].moves:
                flipped.append(root)
        return permuted or flipped

    def kicked(self, root: str, state: State) -> Start:
        """Shuffle some units of one set, or flip some signs; match this set last."""
        units = self.group[root]
        permutations = {}
        signs = {}
        keys = torch.rand(self.batch, *units.shape, device="cpu")
        if "permute" in units.moves:
            number = max(KICKED_UNITS, int(KICKED_SHARE * units.size))
            kicked = keys.argsort(-1)[..., :number]
            order = torch.rand(kicked.shape, device="cpu").argsort(-1)
            images = torch.arange(units.size, device="cpu").expand(keys.shape)
            images = images.scatter(-1, kicked, kicked.gather(-1, order))
            permutations[root] = images
        else:  # one sign at least
            share = keys.amin(-1, keepdim=True).clamp_min(KICKED_SHARE)
            signs[root] = torch.where(keys <= share, -1.0, 1.0).double()
        step = self._element(self._families[root], permutations, signs)
        neighbours = sorted(set(self._neighbours[root]) - {root})
        shuffled = torch.randperm(len(neighbours), device="cpu").tolist()
        queue = [neighbours[k] for k in shuffled]
        return Start(self.moved(state, root, step), [*queue, root])


class _Products(NamedTuple):
    """The inner products of a term, and the features of which they are."""

    features: Tensor
    products: Tensor


def _of_all_pairs(entries: Tensor, shape: Sequence[int]) -> Tensor:
    """Expand entries to all pairs of units, as one batch."""
    channels = len(entries)
    return entries.expand(channels, *shape, *entries.shape[5:]).flatten(1, 4)


def _inside(pairs: Descent) -> Optimum:
    """Return the best optima of the insides of pairs."""
    if cover_of(pairs.group, tuple(pairs.source), MOST_INSIDE) is not None:
        optimum = best_of_all(pairs, math.inf)
        if optimum is not None:
            return optimum
    return search(pairs, RESTARTS_INSIDE).best


# searches -----------------------------------------------------------------------------


class Search(NamedTuple):
    """The result of a search.

    :ivar best: the best optimum of each source.
    :ivar end_costs: the costs at the ends of all descents.
    :ivar checked: whether all elements were tried, or two chains of restarts ended at
        the least cost, or this is zero, ``(B,)``.
    :ivar exact: whether all elements were tried.
    """

    best: Optimum
    end_costs: list[Tensor]
    checked: Tensor
    exact: bool


def search(
    descent: Descent,
    restarts: int | None = None,
    tick: Callable[[int], object] = int,
) -> Search:
    """Try all elements, or run several descents if there are too many.

    :param restarts: the number of further descents, if sets of units are coupled;
        ``None``: as many as are worth their cost.
    :param tick: called with the number of descents after these.
    """
    optimum = best_of_all(descent, MOST_ENTRIES)
    if optimum is not None:
        tick(1)
        return Search(optimum, [optimum.cost], optimum.converged, exact=True)
    first = descent.descend(*descent.start())
    tick(1)
    if restarts is None:
        restarts = usual_restarts(descent)
    kicks = _kick(descent, first, restarts, tick)
    best = kicks.best
    end_costs = [first.cost, *kicks.end_costs]

    def attempt(start: Start) -> None:
        nonlocal best
        optimum = descent.descend(*start)
        end_costs.append(optimum.cost)
        best = best.better(optimum)

    # Under the wrong sign of a whole normalised vector no unit fits, and no single step
    # leads to the right one.
    lone = [root for root in descent.roots if _is_lone_sign(descent.group[root])]
    for flipped in lone:
        signs = pick(best.element.signs, lone)
        signs[flipped] = -signs[flipped]
        attempt(descent.start(signs))
    if (best.cost > descent.initial).any():
        attempt(Start(descent.begin, descent.roots))
    checked = (kicks.agreeing > 1) & (best.cost >= kicks.best.cost)
    if descent.cost.squared:
        checked |= best.cost == 0
    return Search(best, end_costs, checked, exact=False)


def _is_lone_sign(units: Units) -> bool:
    return units.moves == {"flip"} and units.count == 1


def usual_restarts(descent: Descent) -> int:
    """Return the number of restarts that are worth their cost."""
    sizes = [descent.group[name].size for name in descent.group.names("permute")]
    if max(sizes, default=0) > NARROW:
        return 0
    return min(MOST_RESTARTS, max(RESTARTS, RESTARTS_ENTRIES // descent.entries))


class _Kicks(NamedTuple):
    """The best optimum after kicks, the costs at the ends of all, and the number of
    chains of kicks that ended at the least cost, ``(B,)``.
    """

    best: Optimum
    end_costs: list[Tensor]
    agreeing: Tensor


def _kick(
    descent: Descent, first: Optimum, restarts: int, tick: Callable[[int], object]
) -> _Kicks:
    """Kick an optimum in chains side by side, each from its best element so far."""
    kickable = descent.kickable()
    if not kickable or not restarts:
        return _Kicks(first, [], torch.ones_like(first.converged, dtype=torch.long))
    together = RESTART_ENTRIES // descent.entries
    count = max(1, min(MOST_CHAINS, restarts // LEAST_KICKS, together))
    chains = descent.repeated(count)
    ends = first.repeated(count)
    end_costs: list[Tensor] = []
    for _ in range(restarts // count):
        root = kickable[int(torch.randint(len(kickable), (), device="cpu"))]
        optima = chains.descend(*chains.kicked(root, chains.at(ends.element)))
        end_costs += optima.cost.reshape(-1, count).unbind(1)
        ends = ends.better(optima)
        tick(count)
    best = ends.best_of(count)
    most = (best.cost + AGREEMENT * best.cost.abs()).unsqueeze(1)
    agreeing = (ends.cost.reshape(-1, count) <= most).sum(1)
    return _Kicks(best, end_costs, agreeing)


def best_of_all(descent: Descent, most_entries: float) -> Optimum | None:
    """Return the best of all elements; ``None`` if there are too many to try.

    Those of a cover are enumerated, and all other roots matched to each.

    :param most_entries: of all moved sources together.
    """
    cover = cover_of(descent.group, tuple(descent.source))
    if cover is None:
        return None
    family = [name for root in cover for name in descent.group.family(root)]
    covered = descent.group.only(family)
    count = round(math.exp(log_count(covered)))
    if cover and count * descent.entries > most_entries:
        return None
    elements = covered.enumerate()  # each action once
    best = None
    together = max(1, CHUNK_ENTRIES // descent.entries)
    total = elements.batch_shape.numel()
    for numbers in torch.arange(total, device="cpu").split(together):
        optimum = _best_of(descent, elements.select(numbers), cover)
        best = optimum if best is None else best.better(optimum)
    return best


def _best_of(descent: Descent, elements: Element, cover: Cover) -> Optimum:
    """Return the best of some elements of a cover, with all other roots matched."""
    (count,) = elements.batch_shape
    copies = descent.repeated(count)
    repeated = elements.changed(
        lambda _, value: value.repeat(descent.batch, 1), (copies.batch,)
    )
    state = copies.at(repeated.within(descent.group))
    for root in descent.roots:
        step = None if root in cover else copies.match(root, state)
        if step is not None:
            state = copies.moved(state, root, step)
    return copies.ended(state, converged=True).best_of(count)
