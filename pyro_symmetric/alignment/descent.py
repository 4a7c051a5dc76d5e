r"""Coordinate descent over permutations and signs, for a batch of sources at once.

With all but one set of units held, the score is linear in the permutation of that one: with the features :math:`A` of
the reference and :math:`B` of the source, moved by all others,

.. math:: S_{ij} = \max_\sigma \sum_{\text{axes}} \sigma \langle A_i, B_j \rangle

over every axis on which the units lie, and the best permutation solves a linear assignment problem. Of units with
others inside them every pair is compared with its inside at its best, which is a small alignment of its own.

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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from pyro_symmetric.alignment.assignment import assign
from pyro_symmetric.alignment.features import Cost, Moments
from pyro_symmetric.groups import Axis, Element, Group, Units
from pyro_symmetric.groups.element import ByName
from pyro_symmetric.groups.places import rows

# How many units a kick shuffles. On random networks of widths 16 to 256, shares of 0.2 and 0.3 ended lowest among
# 0.1 to 1; in tiny layers, six units (that is, all) reached the enumerated optimum more often than two to four.
KICKED_UNITS, KICKED_SHARE = 6, 0.25
# Bonuses for units that stay, in standard deviations of scores: the steps of a linearisation get shorter.
BONUSES = (0.0, 1.0, 3.0, 7.0)
# Further descents of what lies inside each pair of units, if sets of it meet in one site.
RESTARTS_INSIDE = 3


@dataclass(frozen=True, eq=False)
class Ended:
    """The ends of descents of a batch of sources.

    :param element: of batch shape ``(B,)``.
    :param cost: float64 ``(B,)``.
    :param converged: bool ``(B,)``: whether no step was left that could still improve.
    """

    element: Element
    cost: Tensor
    converged: Tensor

    def better(self, other: Ended, margin: Tensor | float = 0.0) -> Ended:
        """For each source the better of two ends; the other one has to be better by more than ``margin``."""
        taken = other.cost < self.cost - margin
        choose = (other.element, self.element), (other.cost, self.cost), (other.converged, self.converged)
        return Ended(chosen(taken, *choose[0]), *(torch.where(taken, *pair) for pair in choose[1:]))


class Descent:
    """Coordinate descent over the permutations and signs of a group.

    :param group: the group; of its moves, permutations and signs count.
    :param cost: the cost.
    :param reference: site -> moments ``(channels, 1, *site_shape)``, or of one reference for each source.
    :param source: site -> features ``(channels, B, *site_shape)``.
    :param tolerance: the part of the cost at the identity by which a step must lower it.
    :param max_sweeps: how often at most one descent goes through what waits.
    """

    def __init__(
        self,
        group: Group,
        cost: Cost,
        reference: Moments,
        source: Moments,
        tolerance: float = 0.0,
        max_sweeps: int = 100,
    ):
        self.group, self.cost, self.max_sweeps = group.finite, cost, max_sweeps
        self.reference, self.source = reference, source
        self.batch = next((value.shape[1] for value in source.values()), 1)
        self.roots = self.group.roots
        self._places = {root: places_of(self.group, root, tuple(source)) for root in self.roots}
        self._rows: dict[Place, Tensor] = {}
        self._products: dict[Place, tuple[list[Tensor], Tensor]] = {}
        self._last: tuple[Element, tuple[ByName, ByName, ByName, ByName]] | None = None
        self._tolerance = tolerance

    @cached_property
    def initial(self) -> Tensor:
        """The cost of each source at the identity, float64 ``(B,)``."""
        return self._costs(None, list(self.source)).sum(1)

    @cached_property
    def threshold(self) -> Tensor:
        """By how much a step must lower the cost of each source, ``(B,)``."""
        return self._tolerance * self.initial.abs()

    # the search -----------------------------------------------------------------------------------------------------

    def search(self, restarts: int, tick: Callable[[], object] = int) -> tuple[Ended, list[Tensor]]:
        """The best of several descents, source by source, and the costs at the ends of all.

        :param tick: called after every descent.
        """
        ends = [self.descend(*self.start())]
        best = ends[0]
        tick()
        for _ in range(restarts if self._kickable else 0):
            ends.append(self.descend(*self._kicked(best.element)))
            best = best.better(ends[-1])
            tick()
        if bool((best.cost > self.initial).any()):
            ends.append(self.descend(self.identity(), self.roots))
            best = best.better(ends[-1])
        return best, [end.cost for end in ends]

    def start(self, signs: Mapping[str, Tensor] | None = None) -> tuple[Element, list[str]]:
        """Match one set of units after the other, each by that alone whose other units are placed already.

        Next comes the set of which the largest part is known, so a chain of layers is walked from its wide end.

        :param signs: those that are known from the start.
        :return: the element, and the units that others which matter to them came after.
        """
        known = set(signs or ())
        element, left, early = moved(self.identity(), {}, signs or {}), set(self.roots) - known, []
        while left:
            root = max((own for own in self.roots if own in left), key=lambda own: self._share(own, known))
            left.discard(root)
            element = self._decided(root, element, known)
            known.add(root)
            if self._neighbours[root] & (left | {root}):
                early.append(root)
        return element, early

    def descend(self, element: Element, first: Iterable[str]) -> Ended:
        """Decide units anew, those given first, until none improves the cost."""
        todo, costs = list(first), self._costs(element, list(self.source))
        for _ in range(self.max_sweeps):
            sweep, todo = todo, []
            while sweep:
                root = sweep.pop(0)
                element, accepted = self._step(root, element, costs)
                todo += [own for own in self._neighbours[root] if accepted and own not in sweep and own not in todo]
            if not todo:
                break
            todo = [todo[k] for k in torch.randperm(len(todo), device="cpu").tolist()]
        return Ended(element, costs.sum(1), torch.full((self.batch,), not todo, device="cpu"))

    def whole_signs(self, best: Ended) -> tuple[Ended, list[Tensor]]:
        """Try the other sign of each whole vector, and match all units anew under it.

        Under the wrong sign of a normalised vector its units fit nowhere, so that no single step leads to the other.

        :return: the best ends, and the costs of all that were tried.
        """
        whole = [root for root in self.roots if self.group[root].moves == {"flip"} and self.group[root].count == 1]
        ends: list[Tensor] = []
        for _ in whole:
            before = best.cost
            for name in whole:
                signs = {one: best.element.signs[one] * (-1.0 if one == name else 1.0) for one in whole}
                end = self.descend(*self.start(signs))
                ends.append(end.cost)
                best = best.better(end)
            if not bool((best.cost < before - self.threshold).any()):
                break
        return best, ends

    def identity(self) -> Element:
        """Nothing is changed."""
        return self.group.identity((self.batch,), dtype=torch.float64)

    def cost_of(self, element: Element) -> Tensor:
        """The cost of each source as an element moves it, float64 ``(B,)``."""
        return self._costs(element, list(self.source)).sum(1)

    def features_after(self, element: Element) -> Moments:
        """The features of all sources as an element moves them."""
        return {site: self._moved(site, self.group, element) for site in self.source}

    # one step -------------------------------------------------------------------------------------------------------

    def _step(self, root: str, element: Element, costs: Tensor) -> tuple[Element, bool]:
        """Decide some units, and accept where that improves the cost, whose parts ``(B, sites)`` are put right."""
        sites = sorted({place.axis.site for place in self._places[root]})
        at = [list(self.source).index(site) for site in sites]
        accepted = torch.zeros(self.batch, dtype=torch.bool, device="cpu")
        for bonus in BONUSES if root in self._neighbours[root] else BONUSES[:1]:
            trial = self._decided(root, element, None, bonus)
            if all(torch.equal(trial_part[n], part[n]) for trial_part, part in _numbers(trial, element) for n in part):
                break
            found = self._costs(trial, sites)
            good = (costs[:, at] - found).sum(1) > self.threshold
            element, accepted = chosen(good, trial, element), accepted | good
            costs[:, at] = torch.where(good.unsqueeze(1), found, costs[:, at])
            if bool(accepted.all()):
                break
        return element, bool(accepted.any())

    def _decided(self, root: str, element: Element, known: Collection[str] | None, bonus: float = 0.0) -> Element:
        """The element with some units, and all that lies inside them, where they are best.

        :param known: roots whose places mean something; ``None``: all.
        :param bonus: for units that stay, in standard deviations of the scores.
        """
        units = self.group[root]
        shape = (self.batch, units.copies, units.size)
        here = element.unit_index(root).reshape(shape) % units.size
        simple = _simple(self.group, root)
        if not self._usable(root, known) and not self._usable(root, {*(known or ()), root}):
            return element
        if simple:
            pieces = self._pieces(root, element, known)
            scores = _best_signs(pieces)[0] if "permute" in units.moves else None
        else:
            scores, inside = self._with_inside(root, element, known)
        places = here
        if scores is not None and "permute" in units.moves:
            if bonus:
                stay = bonus * scores.flatten(1).std(1, correction=0)[:, None, None, None]
                scores = scores.scatter_add(-1, here.unsqueeze(-1), stay.expand(*shape, 1))
            places = assign(scores)
        images = (places + units.size * torch.arange(units.copies, device="cpu")[:, None]).flatten(1)
        if simple:
            at = {own: value.gather(-1, places.unsqueeze(-1)).flatten(1) for own, value in pieces.items()}
            signs, within = _best_signs(at)[1], {name: images for name in self.group.family(root)}
            return moved(element, within, {n: _by_source(value, images) for n, value in signs.items()})
        return self._taken(root, element, inside, places, images)

    def _pieces(self, root: str, element: Element, known: Collection[str] | None) -> dict[frozenset[str], Tensor]:
        """Scores of units (reference, source), ``(B, copies, size, size)``, by the signs that multiply them.

        Where nothing at all can be compared yet, but for the units with one another, their sorted entries are: they
        don't depend on where other units are, and bound what a pair can contribute.
        """
        units = self.group[root]
        usable, ordered = self._usable(root, known), False
        if not usable and known is not None:
            usable, ordered = self._usable(root, {*known, root}), True
        zero = torch.zeros(self.batch, units.copies, units.size, units.size, dtype=torch.float64, device="cpu")
        pieces = {frozenset[str](): zero}
        for place in usable:
            first, *others = self._product(place, units, element, ordered).double()
            flips = place.flips if not ordered else frozenset()
            pieces[flips] = pieces[flips] + first if flips in pieces else first
            for even in others:
                pieces[frozenset()] = pieces[frozenset()] + even
        return pieces

    def _product(self, place: Place, units: Units, element: Element, ordered: bool) -> Tensor:
        """Inner products of all units along one axis, ``(channels, B, copies, size, size)``; kept until they change."""
        now = [part[name] for part in (element.images, element.signs) for name in place.rest.units if name in part]
        if not ordered and place in self._products:
            before, kept = self._products[place]
            if all(old is new or torch.equal(old, new) for old, new in zip(before, now, strict=True)):
                return kept
        if place not in self._rows:
            reference = torch.stack([self.cost.of_reference(self.reference[place.axis.site])]).squeeze(0)
            self._rows[place] = self._laid(place, reference)
        ours, theirs = self._rows[place], self._laid(place, self._moved(place.axis.site, place.rest, element))
        if ordered:
            ours, theirs = (_ordered(value.abs() if place.flips else value, place) for value in (ours, theirs))
        shape = (units.copies, units.size)
        found = ours.unflatten(-2, shape) @ theirs.unflatten(-2, shape).mT
        if not ordered:
            self._products[place] = now, found
        return found

    # units with others inside them ------------------------------------------------------------------------------------

    def _with_inside(self, root: str, element: Element, known: Collection[str] | None) -> tuple[Tensor, Element]:
        """Scores of all pairs of units, ``(B, copies, size, size)``, and the best of what lies inside each pair."""
        units, (group, sites) = self.group[root], _inside(self.group, root, tuple(self.source))
        shape = (self.batch, units.copies, units.size, units.size)
        usable = self._usable(root, known)
        reference, source = {}, {}
        for place, site in sites:
            if place in usable:
                own = self._cut(place, self.reference[place.axis.site], units).unsqueeze(4)
                other = self._cut(place, self._moved(place.axis.site, place.rest, element), units).unsqueeze(3)
                reference[site], source[site] = (
                    value.expand(len(value), *shape, *value.shape[5:]).flatten(1, 4) for value in (own, other)
                )
        if not source:
            return torch.zeros(shape, dtype=torch.float64, device="cpu"), group.identity(shape, dtype=torch.float64)
        pairs = Descent(group, self.cost, reference, source, 1e-7, 10)
        best, _ = pairs.search(RESTARTS_INSIDE if any(pairs._neighbours.values()) else 0)
        numbers = [
            {name: value.reshape(*shape, *value.shape[1:]) for name, value in part.items()}
            for part in (best.element.images, best.element.signs)
        ]
        return -best.cost.reshape(shape), Element._made(group, [*numbers, {}, {}], shape)

    def _cut(self, place: Place, value: Tensor, units: Units) -> Tensor:
        """All that each unit holds of a site: ``(channels, B, copies, size, blocks, entries)``."""
        value = self.group.view(place.axis.site, value).movedim(2 + place.axis.dim, 2)
        value = value.index_select(2, place.axis.index.T.reshape(-1))
        return value.reshape(*value.shape[:2], units.copies, units.size, len(place.axis.index), -1)

    def _taken(self, root: str, element: Element, inside: Element, places: Tensor, images: Tensor) -> Element:
        """The element with some units in their places, and in each of them what goes with its pair."""
        every, signs = {root: images}, {}

        def of_pair(value: Tensor) -> Tensor:
            index = places[..., None, None].expand(*places.shape, 1, value[0, 0, 0, 0].numel())
            return value.flatten(4).gather(3, index).flatten(1, 3)  # (B, count, numbers)

        for name in self.group.family(root):
            if name != root and name in self.group.carried:
                own = of_pair(inside.unit_index(name))
                every[name] = (images.unsqueeze(-1) * own.shape[-1] + own).flatten(1)
            if name in inside.signs:
                own = of_pair(inside.signs[name])
                signs[name] = torch.empty_like(own).scatter_(1, images.unsqueeze(-1).expand_as(own), own)
        return moved(element, every, signs)

    # small steps ------------------------------------------------------------------------------------------------------

    def _usable(self, root: str, known: Collection[str] | None) -> list[Place]:
        return [place for place in self._places[root] if known is None or place.others <= set(known)]

    def _share(self, root: str, known: Collection[str]) -> float:
        usable = sum(place.size for place in self._usable(root, known))
        return usable / max(1, sum(place.size for place in self._places[root]))

    @cached_property
    def _neighbours(self) -> dict[str, set[str]]:
        """The roots whose scores a root's moves change; itself, if its scores are a linearisation."""
        met = {root: {own for place in self._places[root] for own in place.others} for root in self.roots}
        return {root: {own for own in self.roots if root in met[own]} for root in self.roots}

    @cached_property
    def _kickable(self) -> list[str]:
        """The units that a kick shuffles: coupled ones, or else those with coupled signs.

        Without coupling, one assignment each is the exact optimum.
        """
        coupled = [root for root in self.roots if self._neighbours[root] and _simple(self.group, root)]
        by_move = ([root for root in coupled if move in self.group[root].moves] for move in ("permute", "flip"))
        return next(filter(None, by_move), [])

    def _kicked(self, element: Element) -> tuple[Element, list[str]]:
        """Shuffle some units (or flip some signs) of one random set: starts near a good matching, in other basins."""
        root = self._kickable[int(torch.randint(len(self._kickable), (), device="cpu"))]
        units = self.group[root]
        if "permute" in units.moves:
            images = element.unit_index(root).reshape(self.batch, units.copies, units.size)
            images = _shuffled(images).flatten(1)
            element = moved(element, {name: images for name in self.group.family(root)}, {})
        else:
            element = moved(element, {}, {root: _flipped(element.signs[root])})
        others = sorted(self._neighbours[root] - {root})
        return element, [*(others[k] for k in torch.randperm(len(others), device="cpu").tolist()), root]

    def _costs(self, element: Element | None, sites: Sequence[str]) -> Tensor:
        """The cost of each source at some sites, float64 ``(B, sites)``."""
        columns = [
            self.cost.of_site(
                self.reference[site], self.source[site] if element is None else self._moved(site, self.group, element)
            )
            for site in sites
        ]
        return torch.stack(columns, 1) if columns else torch.zeros(self.batch, 0, dtype=torch.float64, device="cpu")

    def _moved(self, site: str, group: Group, element: Element) -> Tensor:
        """A site of all sources as part of the group moves it."""
        value = self.source[site]
        if not group.members(site):
            return value
        here = _on_site(group, site)
        own = Element(here, *self._parts(element), element.batch_shape)
        if self.batch == 1:  # moving one alone without its batch takes half the time
            own, value = own.select(0), value[:, 0]
        plain = Element(here, own.permutations, batch_shape=own.batch_shape) if len(value) > 1 else own
        channels = [(plain if k else own).on_site(site, channel) for k, channel in enumerate(value)]
        result = torch.stack(channels) if len(channels) > 1 else channels[0].unsqueeze(0)
        return result.unsqueeze(1) if self.batch == 1 else result

    def _parts(self, element: Element) -> tuple[ByName, ByName, ByName, ByName]:
        """Permutations within copies, and signs; worked out once for all sites."""
        if self._last is None or self._last[0] is not element:
            self._last = element, element.parts
        return self._last[1]

    def _laid(self, place: Place, value: Tensor) -> Tensor:
        """All entries of each unit, ``(channels, B, count, entries)``."""
        return rows(self.group.view(place.axis.site, value), place.axis, len(self.group.view_shapes[place.axis.site]))


# where units lie ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """Some blocks of an axis of a set of units: the same places in every unit, all multiplied alike.

    :param axis: in the group's view.
    :param flips: the units, these or those of size one inside them, whose signs enter.
    :param others: the roots that have a part in these entries, but for the units along this axis.
    :param rest: the group at this site, without the units along this axis.
    :param size: the number of entries.
    """

    axis: Axis
    flips: frozenset[str]
    others: frozenset[str]
    rest: Group
    size: int


@lru_cache(maxsize=4096)
def places_of(group: Group, root: str, sites: tuple[str, ...]) -> tuple[Place, ...]:
    """The places of the units of a root, at some sites."""
    found = []
    family = group.family(root) if _simple(group, root) else (root,)
    for axis in group.axes(root):
        if axis.site not in sites:
            continue
        kept: dict[str, list[Axis]] = {}
        others = set()
        for name, one in group.units.items():
            for given, viewed in zip(one.axes, group.axes(name), strict=True):
                inside = name in group.family(root)
                if viewed.site == axis.site and not (inside and viewed.dim == axis.dim):
                    kept.setdefault(name, []).append(given)
                    if viewed.dim != axis.dim or bool(torch.isin(axis.index, viewed.index).any()):
                        others.add([name, *group.ancestors(name)][-1])
        rest = group.along(axis.site, kept)
        alike: dict[frozenset[str], list[int]] = {}
        for block, row in enumerate(axis.index):
            entering = [
                name
                for name in family
                for own in group.axes(name)
                if (own.site, own.dim) == (axis.site, axis.dim) and "flip" in group[name].moves and own.exponent % 2
                if bool((own.index == row).all(-1).any())
            ]
            alike.setdefault(frozenset(entering), []).append(block)
        shape = group.view_shapes[axis.site]
        for flips, blocks in alike.items():
            part = replace(axis, index=axis.index[blocks])
            size = part.index.numel() * math.prod(shape) // shape[axis.dim]
            found.append(Place(part, flips, frozenset(others), rest, size))
    return tuple(found)


@lru_cache(maxsize=4096)
def _simple(group: Group, root: str) -> bool:
    """True if nothing lies inside these units but sets of size one, which have signs of their own."""
    return all(group[name].size == 1 and group[name].parent == root for name in group.family(root)[1:])


@lru_cache(maxsize=4096)
def _on_site(group: Group, site: str) -> Group:
    """The group at one site: of many units few act there."""
    axes = {name: [a for a in one.axes if a.site == site] for name, one in group.units.items()}
    return group.along(site, {name: own for name, own in axes.items() if own})


@lru_cache(maxsize=256)
def _inside(group: Group, root: str, sites: tuple[str, ...]) -> tuple[Group, list[tuple[Place, str]]]:
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


# elements -------------------------------------------------------------------------------------------------------------


def moved(element: Element, images: Mapping[str, Tensor], signs: Mapping[str, Tensor]) -> Element:
    """The same element with some of its images (counted through all copies) and signs replaced."""
    group = element.group
    own = {name: value for name, value in images.items() if name in group.carried}
    shaped = {name: value.reshape(*element.batch_shape, *group[name].shape) for name, value in signs.items()}
    return Element._made(group, [{**element.images, **own}, {**element.signs, **shaped}, {}, {}], element.batch_shape)


def chosen(taken: Tensor, one: Element, other: Element) -> Element:
    """Take of two batches ``(B,)`` the elements of the first where ``taken``, else of the second."""
    parts = [
        {name: torch.where(taken.reshape(-1, *[1] * (v.dim() - 1)), v, theirs[name]) for name, v in mine.items()}
        for mine, theirs in _numbers(one, other)
    ]
    return Element._made(one.group, [*parts, {}, {}], one.batch_shape)


def _numbers(one: Element, other: Element) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return [(one.images, other.images), (one.signs, other.signs)]


def _by_source(values: Tensor, images: Tensor) -> Tensor:
    """Numbers of what is in each place, ``(B, count)``, by the number of the unit that came there."""
    return torch.empty_like(values).scatter_(-1, images, values)


def _best_signs(pieces: Mapping[frozenset[str], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The largest sum of pieces over the signs that multiply them, elementwise, and these signs by name."""
    counts = Counter(itertools.chain.from_iterable(flips for flips in pieces if len(flips) > 1))
    if not counts:
        score = torch.stack([value.abs() if flips else value for flips, value in pieces.items()]).sum(0)
        return score, {name: torch.where(v < 0, -1.0, 1.0).double() for flips, v in pieces.items() for name in flips}
    first = counts.most_common(1)[0][0]
    ends = []
    for sign in (1.0, -1.0):
        left: dict[frozenset[str], Tensor] = {}
        for flips, value in pieces.items():
            own, value = flips - {first}, sign * value if first in flips else value
            left[own] = left[own] + value if own in left else value
        ends.append(_best_signs(left))
    (plus, signs), (minus, turned) = ends
    flipped = minus > plus
    found = {name: torch.where(flipped, turned[name], value) for name, value in signs.items()}
    return torch.maximum(plus, minus), {**found, first: torch.where(flipped, -1.0, 1.0).double()}


def _ordered(value: Tensor, place: Place) -> Tensor:
    """The entries of each unit in order, block by block."""
    return value.unflatten(-1, (len(place.axis.index), -1)).sort(-1).values.flatten(-2)


def _flipped(signs: Tensor) -> Tensor:
    """Flip some entries of each row, one at least."""
    draws = torch.rand(signs.shape, device="cpu")
    return torch.where(draws <= draws.amin(-1, keepdim=True).clamp_min(KICKED_SHARE), -signs, signs)


def _shuffled(images: Tensor) -> Tensor:
    """Shuffle some entries of each row among themselves."""
    n = images.shape[-1]
    count = min(n, max(KICKED_UNITS, int(KICKED_SHARE * n)))
    units = torch.rand(images.shape, device="cpu").argsort(-1)[..., :count]
    to = units.gather(-1, torch.rand(units.shape, device="cpu").argsort(-1))
    return images.scatter(-1, units, images.gather(-1, to))
