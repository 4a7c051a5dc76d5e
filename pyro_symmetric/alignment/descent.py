r"""Coordinate descent over permutations and signs, for a batch of sources at once.

With all but one set of units held, the score is linear in the permutation of that one: with the features :math:`A` of
the reference and :math:`B` of the source, as it has been moved so far,

.. math:: S_{ij} = \max_\sigma \sum_{\text{axes}} \sigma \langle A_i, B_j \rangle

over every axis on which the units lie, and the best step solves a linear assignment problem. Features are tensors
``(channels, batch, *site_shape)``, of which a sign flips the first channel only. Of units with others inside them every
pair is compared with its inside at its best, which is a small alignment of its own.

Two habits make this fast and good, where the textbook (Ainsworth et al. 2023, arXiv 2209.04836, Algorithm 1) starts at
the identity and visits all units in every sweep: the *forward start* matches each set of units by that alone whose
other units are placed already, so that nothing is compared with what lies in no meaningful order yet; then only those
are looked at again whose neighbours have changed. Further descents start from a *kick* of the best element so far
(iterated local search). If units lie on two axes of one site (a recurrent matrix) scores are a linearisation: steps
are shortened, by a bonus for units that stay, until they improve.
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

# How many units a kick shuffles. On random networks of widths 16 to 256, shares of 0.2 and 0.3 ended lowest among
# 0.1 to 1; in tiny layers, six units (that is, all) reached the enumerated optimum more often than two to four.
KICKED_UNITS, KICKED_SHARE = 6, 0.25
# Bonuses for units that stay, in standard deviations of scores: the steps of a linearisation get shorter.
BONUSES = (0.0, 1.0, 3.0, 7.0)
# How often at most one descent goes through what waits.
MAX_SWEEPS = 100
# Up to so many rows all permutations are compared, for all assignment problems at once.
ENUMERATED = 4
# Further descents of what lies inside each pair of units, if sets of it meet in one site.
RESTARTS_INSIDE = 3


class State(NamedTuple):
    """The place of a batch of sources.

    :ivar elements: root -> elements ``(B,)`` of the group of its family alone.
    :ivar present: site -> features of the sources, moved, ``(channels, B, *site_shape)``.
    :ivar costs: site -> its part of the cost, float64 ``(B,)``.
    """

    elements: dict[str, Element]
    present: Moments
    costs: dict[str, Tensor]


class Ended(NamedTuple):
    """The ends of descents: elements ``(B,)``, their cost ``(B,)``, and whether no step was left that could improve."""

    element: Element
    cost: Tensor
    converged: Tensor

    def better(self, other: Ended) -> Ended:
        """For each source the better of two ends."""
        taken = other.cost < self.cost
        cost, converged = (torch.where(taken, theirs, own) for own, theirs in zip(self[1:], other[1:], strict=True))
        return Ended(chosen(taken, other.element, self.element), cost, converged)


class Descent:
    """Coordinate descent over the permutations and signs of a group.

    :param group: the group; of its moves, permutations and signs count.
    :param reference: site -> moments ``(channels, 1, *site_shape)``, or of one reference for each source.
    :param source: site -> features ``(channels, B, *site_shape)``.
    :param tolerance: the part of the cost at the identity by which a step must lower it.
    :param max_sweeps: how often at most one descent goes through what waits.
    :ivar begin: the sources as they came; ``initial``: their cost, float64 ``(B,)``.
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
        self._places = {root: places_of(self.group, root, tuple(source)) for root in self.roots}
        met = {root: {own for place in self._places[root] for own in place.others} for root in self.roots}
        # The roots whose scores a root's moves change; itself, if its scores are a linearisation.
        self._neighbours = {root: {own for own in self.roots if root in met[own]} for root in self.roots}
        self._products: dict[Place, tuple[Tensor, Tensor]] = {}
        still = {root: own.identity((self.batch,), dtype=torch.float64) for root, own in self._groups.items()}
        self.begin = State(still, source, self._costs(source))
        self.initial = self._total(self.begin)
        self._threshold = tolerance * self.initial.abs()

    # the search -----------------------------------------------------------------------------------------------------

    def search(self, restarts: int, tick: Callable[[], object] = int) -> tuple[Ended, list[Tensor]]:
        """The best of several descents, source by source, and the costs at the ends of all.

        :param tick: called after every descent.
        """
        best = self.descend(*self.start())
        ends = [best.cost]
        tick()

        def attempt(state: State, first: Iterable[str]) -> None:
            nonlocal best
            end = self.descend(state, first)
            ends.append(end.cost)
            best = best.better(end)

        kickable = self._kickable()
        for _ in range(restarts if kickable else 0):
            root = kickable[int(torch.randint(len(kickable), (), device="cpu"))]
            attempt(*self._kicked(root, self.at(best.element)))
            tick()
        # Under the wrong sign of a whole normalised vector its units fit nowhere: no single step leads to the other.
        whole = [root for root in self.roots if self.group[root].moves == {"flip"} and self.group[root].count == 1]
        for name in whole:
            attempt(*self.start({one: best.element.signs[one] * (-1.0 if one == name else 1.0) for one in whole}))
        if bool((best.cost > self.initial).any()):
            attempt(self.begin, self.roots)
        return best, ends

    def start(self, signs: Mapping[str, Tensor] | None = None) -> tuple[State, list[str]]:
        """Match one set of units after the other, each by that alone whose other units are placed already.

        Next comes the set of which the largest part is known, so a chain of layers is walked from its wide end.

        :param signs: those that are known from the start.
        :return: where that leads, and the units that others which matter to them came after.
        """
        state, known, early = self.begin, set(signs or ()), []
        for root, value in (signs or {}).items():
            state = self._after(state, root, Element(self._groups[root], signs={root: value}))
        left = [root for root in self.roots if root not in known]
        while left:
            root = max(left, key=lambda own: self._share(own, known))
            left.remove(root)
            if (step := self._best_step(root, state, known)) is not None:
                state = self._after(state, root, step)
            known.add(root)
            if self._neighbours[root] & {*left, root}:
                early.append(root)
        return state, early

    def descend(self, state: State, first: Iterable[str]) -> Ended:
        """Decide units anew, those given first, until none improves the cost."""
        todo = list(first)
        for _ in range(self.max_sweeps):
            sweep, todo = todo, []
            while sweep:
                root = sweep.pop(0)
                state, accepted = self._stepped(root, state)
                todo += [own for own in self._neighbours[root] if accepted and own not in sweep and own not in todo]
            if not todo:
                break
            todo = [todo[k] for k in torch.randperm(len(todo), device="cpu").tolist()]
        permutations, signs = (
            {name: v for own in state.elements.values() for name, v in own.parts[k].items()} for k in range(2)
        )
        element = Element(self.group, permutations, signs, batch_shape=(self.batch,), dtype=torch.float64)
        return Ended(element, self._total(state), torch.full((self.batch,), not todo, device="cpu"))

    def at(self, element: Element) -> State:
        """The state that an element brings the sources to."""
        present = {site: acted(element, site, value) for site, value in self.source.items()}
        elements = {root: element.within(group) for root, group in self._groups.items()}
        return State(elements, present, self._costs(present))

    # one step -------------------------------------------------------------------------------------------------------

    def _stepped(self, root: str, state: State) -> tuple[State, bool]:
        """Decide some units, and accept where that improves the cost."""
        accepted = torch.zeros(self.batch, dtype=torch.bool, device="cpu")
        for bonus in BONUSES if root in self._neighbours[root] else BONUSES[:1]:
            step, still = self._best_step(root, state, None, bonus), self.begin.elements[root]
            if step is None or step.equal(still):
                break
            trial = self._after(state, root, step)
            good = self._total(state) - self._total(trial) > self._threshold
            accepted = accepted | good
            if bool(good.any()):
                state = trial if bool(good.all()) else self._after(state, root, chosen(good, step, still))
            if bool(accepted.all()):
                break
        return state, bool(accepted.any())

    def _after(self, state: State, root: str, step: Element) -> State:
        """The state that a step of some units leads to."""
        sites = dict.fromkeys(place.axis.site for place in self._places[root])
        present = {site: acted(step, site, state.present[site]) for site in sites}
        elements = {**state.elements, root: step @ state.elements[root]}
        return State(elements, {**state.present, **present}, {**state.costs, **self._costs(present)})

    def _best_step(self, root: str, state: State, known: Collection[str] | None, bonus: float = 0.0) -> Element | None:
        """The best step of some units, and all that lies inside them; None if nothing can be compared.

        :param known: roots whose places mean something; ``None``: all.
        :param bonus: for units that stay, in standard deviations of the scores.
        """
        units, simple = self.group[root], is_simple(self.group, root)
        usable, ordered = self._usable(root, known), False
        if simple and not usable and known is not None:
            # Units that meet nothing known but themselves are told apart by their sorted entries, which don't depend
            # on where other units are, and bound what a pair can contribute.
            usable, ordered = self._usable(root, {*known, root}), True
        if not usable:
            return None
        inside: dict[str, Tensor] = {}
        if simple:
            scores, signs = best_signs(self._pieces(usable, state, ordered))
        else:
            scores, inside, signs = self._by_insides(root, usable, state)
        places = torch.arange(units.size, device="cpu").expand(self.batch, units.copies, -1)
        if "permute" in units.moves:
            spread = bonus * scores.flatten(1).std(1, correction=0)[:, None, None, None] if bonus else 0.0
            places = assign(scores + spread * torch.eye(units.size, dtype=scores.dtype, device="cpu"))
        inverse = places.argsort(-1).unsqueeze(2)

        def by_source(name: str, pairs: Tensor) -> Tensor:
            """Take of what all pairs have, ``(B, copies, size, size, ...)``, that of each unit's chosen pair."""
            index = inverse.reshape(*inverse.shape, *[1] * (pairs.dim() - 4))
            return pairs.take_along_dim(index, 2).reshape(self.batch, *self.group[name].shape)

        permutations = {name: by_source(name, value) for name, value in inside.items()}
        permutations |= {root: places.reshape(self.batch, *units.shape)} if "permute" in units.moves else {}
        flips = {name: by_source(name, value) for name, value in signs.items()}
        return Element(self._groups[root], permutations, flips, batch_shape=(self.batch,), dtype=torch.float64)

    def _pieces(self, usable: Sequence[Place], state: State, ordered: bool) -> dict[frozenset[str], Tensor]:
        """Scores of units (reference, source), ``(B, copies, size, size)``, by the signs that multiply them."""
        pieces: dict[frozenset[str], Tensor] = {}
        for place in usable:
            products = self._product(place, state.present[place.axis.site], ordered)
            for channel, product in enumerate(products.double()):
                flips = place.flips if not (ordered or channel) else frozenset()
                pieces[flips] = pieces[flips] + product if flips in pieces else product
        return pieces

    def _product(self, place: Place, present: Tensor, ordered: bool) -> Tensor:
        """Inner products of all units along one axis, ``(channels, B, copies, size, size)``; kept until they change."""
        before, kept = self._products.get(place, (None, None))
        if before is present and kept is not None and not ordered:
            return kept
        reference = self.cost.of_reference(self.reference[place.axis.site])
        both = [self._laid(place, value) for value in (reference, present)]
        if ordered:
            both = [(value.abs() if place.flips else value).sort(-1).values for value in both]
        ours, theirs = (value.flatten(-2) for value in both)
        found = ours @ theirs.mT
        if not ordered:
            self._products[place] = present, found
        return found

    def _by_insides(
        self, root: str, usable: Sequence[Place], state: State
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Scores of all pairs of units, ``(B, copies, size, size)``, and the best of what lies inside each pair."""
        units, (group, sites) = self.group[root], inside_of(self.group, root, tuple(self.source))
        shape = (self.batch, units.copies, units.size, units.size)
        reference, source = {}, {}
        for place, site in sites:
            if place in usable:
                own = self._laid(place, self.reference[place.axis.site]).unsqueeze(4)
                other = self._laid(place, state.present[place.axis.site]).unsqueeze(3)
                reference[site], source[site] = (
                    value.expand(len(value), *shape, *value.shape[5:]).flatten(1, 4) for value in (own, other)
                )
        pairs = Descent(group, self.cost, reference, source, 1e-7, 10)
        best, _ = pairs.search(RESTARTS_INSIDE if any(pairs._neighbours.values()) else 0)
        found = reshaped(best.element, shape)
        return -best.cost.reshape(shape), found.permutations, found.signs

    # small steps ------------------------------------------------------------------------------------------------------

    def _costs(self, present: Moments) -> dict[str, Tensor]:
        return {site: self.cost.of_site(self.reference[site], value) for site, value in present.items()}

    def _total(self, state: State) -> Tensor:
        return sum(state.costs.values(), torch.zeros(self.batch, dtype=torch.float64, device="cpu"))

    def _laid(self, place: Place, value: Tensor) -> Tensor:
        """All entries of each unit, ``(channels, B, copies, size, blocks, entries)``."""
        site = place.axis.site
        value = rows(self.group.view(site, value), place.axis, len(self.group.view_shapes[site]))
        return value.unflatten(-1, (len(place.axis.index), -1)).unflatten(2, place.shape)

    def _usable(self, root: str, known: Collection[str] | None) -> list[Place]:
        return [place for place in self._places[root] if known is None or place.others <= set(known)]

    def _share(self, root: str, known: Collection[str]) -> float:
        usable = sum(place.size for place in self._usable(root, known))
        return usable / max(1, sum(place.size for place in self._places[root]))

    def _kickable(self) -> list[str]:
        """The units that a kick shuffles: coupled ones, or else those with coupled signs.

        Without coupling, one assignment each is the exact optimum.
        """
        coupled = [root for root in self.roots if self._neighbours[root] and is_simple(self.group, root)]
        by_move = ([root for root in coupled if move in self.group[root].moves] for move in ("permute", "flip"))
        return next(filter(None, by_move), [])

    def _kicked(self, root: str, state: State) -> tuple[State, list[str]]:
        """Shuffle some units (or flip some signs) of one set: starts near a good matching, in other basins."""
        units, permutations, signs = self.group[root], {}, {}
        draws = torch.rand(self.batch, *units.shape, device="cpu")
        if "permute" in units.moves:
            taken = draws.argsort(-1)[..., : max(KICKED_UNITS, int(KICKED_SHARE * units.size))]
            to = taken.gather(-1, torch.rand(taken.shape, device="cpu").argsort(-1))
            images = torch.arange(units.size, device="cpu").expand(draws.shape)
            permutations = {root: images.scatter(-1, taken, to)}
        else:  # one sign at least
            flipped = draws <= draws.amin(-1, keepdim=True).clamp_min(KICKED_SHARE)
            signs = {root: 1.0 - 2.0 * flipped.double()}
        step = Element(self._groups[root], permutations, signs, batch_shape=(self.batch,), dtype=torch.float64)
        others = sorted(self._neighbours[root] - {root})
        order = torch.randperm(len(others), device="cpu").tolist()
        return self._after(state, root, step), [*(others[k] for k in order), root]


# where units lie ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """Some blocks of an axis of a set of units: the same places in every unit, all multiplied alike.

    :param axis: in the group's view.
    :param shape: copies and size of the units.
    :param flips: the units, these or those of size one inside them, whose signs enter.
    :param others: the roots that have a part in these entries, but for the units along this axis.
    :param size: the number of entries.
    """

    axis: Axis
    shape: tuple[int, int]
    flips: frozenset[str]
    others: frozenset[str]
    size: int


@lru_cache(maxsize=4096)
def family_of(group: Group, root: str) -> Group:
    """The group of some units and all that lies inside them, alone."""
    return group.without([name for name in group.units if name not in group.family(root)])


@lru_cache(maxsize=4096)
def places_of(group: Group, root: str, sites: tuple[str, ...]) -> tuple[Place, ...]:
    """The places of the units of a root, at some sites."""
    found, family, units = [], group.family(root), group[root]
    signed = [name for name in (family if is_simple(group, root) else (root,)) if "flip" in group[name].moves]
    for axis in group.axes(root):
        if axis.site not in sites:
            continue
        others = {
            [name, *group.ancestors(name)][-1]
            for dim, members in group.members(axis.site).items()
            for name, other in members
            if dim != axis.dim or (name not in family and bool(torch.isin(axis.index, other.index).any()))
        }
        alike: dict[frozenset[str], list[int]] = {}
        for block, row in enumerate(axis.index):
            entering = [
                name
                for name in signed
                for own in group.axes(name)
                if (own.site, own.dim) == (axis.site, axis.dim) and own.exponent % 2
                if bool((own.index == row).all(-1).any())
            ]
            alike.setdefault(frozenset(entering), []).append(block)
        shape = group.view_shapes[axis.site]
        for flips, blocks in alike.items():
            part = replace(axis, index=axis.index[blocks])
            size = part.index.numel() * math.prod(shape) // shape[axis.dim]
            found.append(Place(part, (units.copies, units.size), flips, frozenset(others), size))
    return tuple(found)


@lru_cache(maxsize=4096)
def is_simple(group: Group, root: str) -> bool:
    """True if nothing lies inside these units but sets of size one, which have signs of their own."""
    return all(group[name].size == 1 and group[name].parent == root for name in group.family(root)[1:])


@lru_cache(maxsize=256)
def inside_of(group: Group, root: str, sites: tuple[str, ...]) -> tuple[Group, list[tuple[Place, str]]]:
    """The group of what lies inside one unit, and its sites: for each axis of the unit, the positions that it holds."""
    outer, named, shapes = group[root], [], {}
    axes: dict[str, list[Axis]] = {name: [] for name in group.family(root)}
    for number, place in enumerate(places_of(group, root, sites)):
        axis, site = place.axis, f"{number}: {place.axis.site}"
        named.append((place, site))
        shape = group.view_shapes[axis.site]
        shapes[site] = torch.Size((len(axis.index), math.prod(shape) // shape[axis.dim]))
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
            units += [Units(name, 1, tuple(own_axes), moves=frozenset({"flip"}))] if "flip" in one.moves else []
        else:
            parent = None if one.parent == root else one.parent
            copies = one.count // outer.count // one.size
            units.append(Units(name, one.size, tuple(own_axes), parent, copies, one.moves))
    return Group(units, shapes), named


# one assignment, many assignments ----------------------------------------------------------------------------------


def assign(scores: Tensor) -> Tensor:
    r"""The permutations :math:`\arg\max_\pi \sum_i S_{i \pi(i)}`, ``(..., n, n)`` -> LongTensor ``(..., n)``.

    What is common to a row or a column changes no choice, but costs SciPy's solver time: up to ten times at width 2048,
    where all features are positive, as deviations are. So it is taken off first. Threads don't pay: the solver holds
    the interpreter for small problems and is bound by memory for large ones.
    """
    n = scores.shape[-1]
    if n == 1:
        return torch.zeros(scores.shape[:-1], dtype=torch.long, device=scores.device)
    if n <= ENUMERATED:
        every = torch.tensor(list(itertools.permutations(range(n))), device=scores.device)
        return every[scores[..., torch.arange(n, device=scores.device), every].sum(-1).argmax(-1)]
    costs = scores.mean(-2, keepdim=True) - scores
    costs -= costs.amin(-1, keepdim=True)
    costs -= costs.amin(-2, keepdim=True)
    # Where the best columns of all rows differ there is nothing to solve.
    best = costs.argmin(-1)
    found = best.reshape(-1, n)
    open_ = (found.sort(-1).values != torch.arange(n, device=scores.device)).any(-1)
    if bool(open_.any()):
        solved = [linear_sum_assignment(cost)[1] for cost in costs.reshape(-1, n, n)[open_].double().cpu().numpy()]
        found[open_] = torch.as_tensor(np.stack(solved), dtype=torch.long, device=scores.device)
    return found.reshape(best.shape)


def best_signs(pieces: Mapping[frozenset[str], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The largest sum of pieces over the signs that multiply them, elementwise, and these signs by name."""
    tied = next((flips for flips in pieces if len(flips) > 1), None)
    if tied is None:
        score = torch.stack([value.abs() if flips else value for flips, value in pieces.items()]).sum(0)
        return score, {name: torch.where(v < 0, -1.0, 1.0).double() for flips, v in pieces.items() for name in flips}
    first, ends = min(tied), []
    for sign in (1.0, -1.0):
        left: dict[frozenset[str], Tensor] = {}
        for flips, value in pieces.items():
            own, value = flips - {first}, sign * value if first in flips else value
            left[own] = left[own] + value if own in left else value
        ends.append(best_signs(left))
    (plus, signs), (minus, turned) = ends
    flipped = minus > plus
    found = {name: torch.where(flipped, turned[name], value) for name, value in signs.items()}
    return torch.maximum(plus, minus), {**found, first: torch.where(flipped, -1.0, 1.0).double()}


# elements -------------------------------------------------------------------------------------------------------------


def acted(element: Element, site: str, value: Tensor) -> Tensor:
    """All channels of a site moved; all but the first without their sign."""
    first, *even = (element.on_site(site, channel) for channel in value)
    return torch.stack([first, *(channel.abs() for channel in even)])


def chosen(taken: Tensor, one: Element, other: Element) -> Element:
    """Take of two batches ``(B,)`` the elements of the first where ``taken``, else of the second."""
    return one.changed(lambda move, v: torch.where(taken.unsqueeze(-1), v, other.numbers[move]), one.batch_shape)


def reshaped(element: Element, shape: Sequence[int]) -> Element:
    """The elements of a batch ``(B,)`` as a batch of another shape."""
    return element.changed(lambda _, value: value.reshape(*shape, value.shape[-1]), shape)


def put(element: Element, rows: Tensor, other: Element) -> Element:
    """A batch ``(B,)`` in which some elements are those of another batch."""
    return element.changed(lambda move, v: v.index_copy(0, rows, other.numbers[move]), element.batch_shape)


def recentred(element: Element) -> Element:
    """The same frame, counted from the permutations and signs that most members have, of several the first's.

    With :math:`h` the commonest element every :math:`g` becomes :math:`h^{-1} g`.
    """
    finite = [value.flatten(1) for value in (*element.permutations.values(), *element.signs.values())]
    if not finite:
        return element
    numbers = torch.cat([value.long() for value in finite], 1)
    _, kind, counts = numbers.unique(dim=0, return_inverse=True, return_counts=True)
    return element.select(int((counts[kind] == counts.max()).nonzero()[0])).inverse() @ element
