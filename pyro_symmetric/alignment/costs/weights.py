r"""Costs by weights: squared distances of means, and of standard deviations.

.. math:: \|m_0 - g \cdot m_1\|^2 + \|s_0 - |g| \cdot s_1\|^2

is ``"l2"`` of the means alone, weight matching of plain networks (Ainsworth et al. 2023, arXiv 2209.04836), and, with
the deviations, ``"wasserstein"``, the squared 2-Wasserstein distance of mean-field Gaussians (Rossi et al. 2023, arXiv
2310.10171). It falls linearly, over all permutations, with the inner product of the reference's *features* :math:`A`
and the moved features :math:`g \cdot B` of the source, here means and deviations themselves. With all but one set of
units held, it is linear in the permutation of that one,

.. math:: S_{ij} = \max_{\sigma, t} \sum_{\text{axes}} \langle A_i, \sigma e^t (g_{\text{others}} \cdot B)_j \rangle -
    \tfrac12 e^{2t} \|B_j\|^2,

over every axis on which the units lie, with the best sign of each pair and, for its scale, that which makes norms
equal (:func:`~pyro_symmetric.alignment.costs.multipliers.balanced`): once units are matched,
:meth:`WeightCost.matched` finds the best one. If units lie on two axes of one site (a recurrent matrix, tied streams)
the objective is quadratic and :math:`S` its linearisation at the present element.

Moments and features are tensors ``(channels, batch, *site_shape)``: means first, then deviations, if there are any. A
sign flips the first channel only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.multipliers import Sums
from pyro_symmetric.alignment.costs.protocol import SETTLED, MatchCost, Matched
from pyro_symmetric.alignment.costs.rescaling import Distance
from pyro_symmetric.alignment.costs.terms import Term, plan_of
from pyro_symmetric.alignment.elements import replaced, some
from pyro_symmetric.alignment.exchanges import EXCHANGED, Quadratic
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import rows as rows_of
from pyro_symmetric.groups.units import Axis, Units

Moments = dict[str, Tensor]
# Newton steps for the scales of pairs: all scales are fitted together later.
STEPS = 1


class WeightCost(MatchCost):
    """The squared 2-Wasserstein distance of mean-field Gaussians; of moments of one channel, of plain weights.

    :param group: the group.
    :param reference: site -> moments ``(channels, 1, *site_shape)``, or of one reference for each source.
    :param source: site -> features ``(channels, B, *site_shape)``, see :meth:`features`.
    :ivar reference: as given.
    """

    deviations = True  # whether moments need a second channel if there are deviations
    squared = True  # whether scales have a best value

    def __init__(self, group: Group, reference: Mapping[str, Tensor], source: Mapping[str, Tensor]):
        self.group, self.sites = group, list(source)
        self.reference, self._source = dict(reference), dict(source)
        example = next(iter(source.values()), torch.zeros(1, 1, device="cpu"))
        self.batch, self.device = example.shape[1], example.device
        self._plan = plan_of(group, tuple(source))
        self.parts = self._plan.parts
        self.rescales = self.squared and bool(self._plan.multiplied)
        self._rows: dict[Term, Tensor] = {}
        self._kept: dict[Term, tuple[list[Tensor], list[Tensor]]] = {}
        self._here: _Here | None = None

    # what a cost is made of -----------------------------------------------------------------------------------------

    @classmethod
    def features(cls, moments: Tensor) -> Tensor:
        """The features of a source's moments."""
        return moments

    @classmethod
    def reference_features(cls, moments: Tensor) -> Tensor:
        """The features of a reference's moments."""
        return moments

    @classmethod
    def distance(cls, reference: Tensor, moved: Tensor) -> Tensor:
        """The cost, elementwise: moments of the reference, features of the moved source, ``(channels, ...)`` each."""
        return (reference - moved).square()

    @classmethod
    def site_cost(cls, reference: Tensor, moved: Tensor) -> Tensor:
        """The cost of one site, float64 ``(B,)``, on the CPU."""
        distance = cls.distance(reference, moved)
        distance = distance.reshape(-1, *moved.shape[1:]).transpose(0, 1).flatten(1)
        return distance.sum(1, dtype=torch.float64).cpu()

    @classmethod
    def total(cls, reference: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> Tensor:
        """The cost of all sites, ``(B,)``."""
        return torch.stack([cls.site_cost(reference[site], value) for site, value in moved.items()]).sum(0)

    @classmethod
    def centre(cls, features: Tensor) -> Tensor:
        """The moments of the best reference of many sources, from the mean of their features."""
        return features

    @classmethod
    def alone(cls, member: Tensor, every: Tensor, exchanged: Sequence[int]) -> Tensor:
        """The moments of the reference that some members are by themselves.

        :param member: their moments; ``every``: those of all members.
        :param exchanged: the site's axes along which entries can be exchanged.
        """
        return member

    # the protocol ---------------------------------------------------------------------------------------------------

    def pairs(self, name: str, element: Element, rows: Tensor, known: Collection[str]) -> Tensor:
        units = self.group[name]
        shape = (*element.batch_shape, units.copies, units.size)

        def products(term: Term) -> list[Tensor]:
            values = self._kept_products(term, element, rows, units)
            if term.scale:  # in the precision of the products, which take the time
                norms = _norms(self._reference_rows(term, rows)).reshape(-1, *shape[-2:], 1)
                values[-1:] = [norms.to(values[0]), values[-1].to(values[0])]
            return values

        total = torch.zeros(*shape, units.size, dtype=torch.float64, device=self.device)
        for sums, whole in self._sums(name, known, products):
            total += sums.highest(STEPS, whole)
        return total

    def matched(self, name: str, element: Element, rows: Tensor, known: Collection[str]) -> Matched:
        units = self.group[name]
        local = (element.unit_index(name) % units.size).unflatten(-1, (units.copies, units.size))

        def products(term: Term) -> list[Tensor]:
            reference = self._reference_rows(term, rows)
            fits = term in self._kept and element.batch_shape == rows.shape
            if fits and not len(self._stale(term, element, rows)[0]):
                values = self._kept_products(term, element, rows, units)
                own, of_sources = values[: len(reference)], values[len(reference) :]
                at_places = [v.gather(-1, local.unsqueeze(-1)).flatten(-3).double() for v in own]
                norms_at_places = [v.squeeze(-2).gather(-1, local).flatten(-2) for v in of_sources]
                return [*at_places, *([_norms(reference)] if of_sources else []), *norms_at_places]
            source = self._source_rows(term, element, rows, term.placed)
            norms = (_norms(reference), _norms(source)) if term.scale else ()
            return [*((a * b).sum(-1, dtype=torch.float64) for a, b in zip(reference, source, strict=True)), *norms]

        total = torch.zeros(*element.batch_shape, self.group[name].count, dtype=torch.float64, device=self.device)
        pulls: dict[str, Tensor] = {}
        found: dict[str, Tensor] = {}
        for sums, whole in self._sums(name, known, products):
            present = {}
            for scale in sums.scales if whole else ():
                before = element.log_scales[scale].flatten(len(element.batch_shape)).double()
                present[scale] = before.gather(-1, element.unit_index(scale))
            score, own, logs = sums.best(STEPS, present, whole)
            total += score
            pulls |= own
            found |= logs
        return Matched(total, pulls, found)

    def costs(self, element: Element | None, rows: Tensor, parts: Sequence[int] | None = None) -> Tensor:
        sites = self.sites if parts is None else [self.sites[part] for part in parts]
        columns = [
            self.site_cost(
                _some(self.reference[site], rows), self._site_after(site, self._plan.whole[site], element, rows)
            )
            for site in sites
        ]
        return torch.stack(columns, 1) if columns else torch.zeros(len(rows), 0, dtype=torch.float64, device="cpu")

    def rescaled(self, element: Element, rows: Tensor, settled: float = SETTLED) -> Element:
        group = self.group.scalings
        sites = self._plan.multiplied
        pairs = (
            (site, _some(self.reference[site], rows), self._site_after(site, self._plan.finite[site], element, rows))
            for site in sites
        )
        at = {name: element.unit_index(name) for name in self.group.names("scale")}
        now = [element.log_scales[name].flatten(1).gather(-1, index) for name, index in at.items()]
        best = Distance(group, self._plan.multiplied, pairs).least(torch.cat(now, -1).double(), settled)
        found = {}
        for (name, index), own in zip(at.items(), best.split([i.shape[-1] for i in at.values()], -1), strict=True):
            by_source = torch.empty_like(own).scatter_(-1, index, own)
            found[name] = by_source.to(element.log_scales[name]).reshape(element.log_scales[name].shape)
        return replaced(element, log_scales=found)

    def quadratic(self, name: str, element: Element, rows: Tensor, known: Collection[str]) -> Quadratic | None:
        n, terms = self.group[name].size, [term for part in self._plan.terms[name] for term in part]
        axes: dict[str, list[Axis]] = {}
        for axis in self.group.axes(name):
            if axis.site in self.sites:
                axes.setdefault(axis.site, []).append(axis)
        if n > EXCHANGED or max(len({axis.dim for axis in own}) for own in axes.values()) != 2:
            return None
        linear = torch.zeros(len(rows), n, n, dtype=torch.float64, device=self.device)
        ours, theirs = [linear.new_zeros(1, 0, n, n)], [linear.new_zeros(len(rows), 0, n, n)]
        for site, own in axes.items():
            if not all(term.depends <= {*known, name} for term in terms if term.axis.site == site):
                continue
            dims = len(self.group.view_shapes[site])
            first = self.group.view(site, self.reference_features(_some(self.reference[site], rows))).double()
            second = self.group.view(site, self._site_after(site, self._plan.whole[site], element, rows)).double()
            for axis in own:
                alone = rows_of(_outside(first, [a for a in own if a.dim != axis.dim]), axis, dims)
                linear += (alone @ rows_of(second, axis, dims).mT).sum(0)
            if len({axis.dim for axis in own}) == 2:
                ours.append(_matrices(first, own))
                theirs.append(_matrices(second, own))
        batch = max(map(len, ours))
        return Quadratic(linear, torch.cat([m.expand(batch, *m.shape[1:]) for m in ours], 1), torch.cat(theirs, 1))

    def share(self, name: str, known: Collection[str]) -> float:
        every = [term for terms in self._plan.terms[name] for term in terms]
        sizes = [(self._reference_rows(term)[0][0].numel(), term.depends <= set(known)) for term in every]
        return sum(size for size, usable in sizes if usable) / max(1, sum(size for size, _ in sizes))

    def riders(self, name: str) -> tuple[str, ...]:
        return self._plan.riders[name]

    def coupled(self, one: str, other: str) -> bool:
        return self._plan.coupled(one, other)

    # small steps ----------------------------------------------------------------------------------------------------

    def features_after(self, element: Element) -> Moments:
        """The features of all sources as an element moves them."""
        rows = torch.arange(self.batch, device="cpu")
        return {site: self._site_after(site, self._plan.whole[site], element, rows) for site in self.sites}

    def _sums(
        self, name: str, known: Collection[str], products: Callable[[Term], list[Tensor]]
    ) -> Iterator[tuple[Sums, bool]]:
        """Terms that compare by known units alone, in parts that share no multiplier, and whether a part is whole."""
        for terms in self._plan.terms[name]:
            if usable := [term for term in terms if term.depends.issubset(known)]:
                sums = Sums(usable)
                for term in usable:
                    sums.add(term, products(term))
                yield sums, len(usable) == len(terms)

    def _site_after(self, site: str, group: Group, element: Element | None, rows: Tensor) -> Tensor:
        """A site of some sources as a group moves it that knows some of the element's numbers."""
        value = _some(self._source[site], rows)
        shape = value.shape[1:2] if element is None else element.batch_shape
        several = value.reshape(len(value), *[1] * (len(shape) - 1), *value.shape[1:])
        if element is None or not group.members(site):
            return several.expand(len(value), *shape, *value.shape[2:])
        own = self._at(element).moving.within(group)
        if not own.batch_shape and (len(value) == 1 or not own.signs):
            return own.on_site(site, value)
        if len(own.batch_shape) > 1:
            value = several.expand(len(value), *shape, *value.shape[2:])
        first = own.on_site(site, value[0])
        own.signs = {}  # of the first channel only
        return torch.stack([first, *(own.on_site(site, channel) for channel in value[1:])])

    def _kept_products(self, term: Term, element: Element, rows: Tensor, units: Units) -> list[Tensor]:
        """The products, kept with the numbers that they come from, until these are others."""
        if element.batch_shape != rows.shape:
            return self._products(term, element, rows, units)
        stale, now = self._stale(term, element, rows)
        if len(rows) == self.batch and len(stale) in (0, self.batch):
            kept = self._kept[term][1] if not len(stale) else self._products(term, element, rows, units)
            self._kept[term] = now, kept
            return list(kept)
        if term not in self._kept:
            return self._products(term, element, rows, units)
        known, kept = self._kept[term]
        at = rows.to(self.device)
        if len(stale):
            changed = at[stale]
            known = [old.index_copy(0, changed, new[stale]) for old, new in zip(known, now, strict=True)]
            self._kept[term] = known, kept
            fresh = self._products(term, some(element, stale), rows[stale], units)
            for value, other in zip(kept, fresh, strict=True):
                value[changed] = other
        return [value if len(rows) == self.batch else value[at] for value in kept]

    def _stale(self, term: Term, element: Element, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The sources (places in ``rows``) whose kept products come from other numbers, and these numbers now."""
        now = [value for part in element.within(term.released).parts[:3] for value in part.values()]
        if term not in self._kept:
            return torch.arange(len(rows), device="cpu"), now
        differs = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        for old, new in zip(self._kept[term][0], now, strict=True):
            if old is not new:  # most are the same tensors
                old = old if len(rows) == self.batch else old[rows.to(self.device)]
                differs |= (old != new).flatten(1).any(1)
        return differs.nonzero().flatten().cpu(), now

    def _products(self, term: Term, element: Element, rows: Tensor, units: Units) -> list[Tensor]:
        """The inner products of each channel, ``batch_shape + (copies, size, size)``; the source's norms, if there is a
        scale."""
        source = self._source_rows(term, element, rows, term.released).unflatten(-2, (units.copies, units.size))
        reference = self._reference_rows(term, rows).unflatten(-2, (units.copies, units.size))
        products = [a @ b.mT for a, b in zip(reference, source, strict=True)]
        return [*products, _norms(source).unsqueeze(-2)] if term.scale else products

    def _source_rows(self, term: Term, element: Element, rows: Tensor, group: Group) -> Tensor:
        site = term.axis.site
        moved = self._at(element).moved
        if id(group) not in moved:
            moved[id(group)] = self.group.view(site, self._site_after(site, group, element, rows))
        return rows_of(moved[id(group)], term.axis, len(self.group.view_shapes[site]))

    def _at(self, element: Element) -> _Here:
        if self._here is None or self._here.element is not element:
            self._here = _Here(element)
        return self._here

    def _reference_rows(self, term: Term, rows: Tensor | None = None) -> Tensor:
        if term not in self._rows:
            site = term.axis.site
            value = self.group.view(site, self.reference_features(self.reference[site]))
            self._rows[term] = rows_of(value, term.axis, len(self.group.view_shapes[site]))
        return self._rows[term] if rows is None else _some(self._rows[term], rows)


class _Here:
    """The doings of one element, until another one comes.

    :ivar moved: sites as groups move them, by the group (its identity): terms of one axis share them.
    """

    def __init__(self, element: Element):
        self.element, self.moved = element, dict[int, Tensor]()

    @cached_property
    def moving(self) -> Element:
        """The element that moves sites: one alone without its batch, which takes half the time."""
        shape = self.element.batch_shape
        return self.element.select((0,) * len(shape)) if shape.numel() == 1 else self.element


class PlainCost(WeightCost):
    """The squared distance of means alone."""

    deviations = False


def _norms(value: Tensor) -> Tensor:
    """``(channels, ..., entries)`` -> squared norms over both."""
    return value.square().sum(-1, dtype=torch.float64).sum(0)


def _outside(value: Tensor, others: Sequence[Axis]) -> Tensor:
    """A viewed site ``(channels, B, ...)`` with zeros at all positions of some axes."""
    for axis in others:
        value = value.index_fill(2 + axis.dim, axis.index.reshape(-1).to(value.device), 0.0)
    return value


def _matrices(value: Tensor, axes: Sequence[Axis]) -> Tensor:
    """The entries of units with one another, on two axes of a viewed site ``(channels, B, ...)``: ``(B, c, n, n)``."""
    dims = sorted({axis.dim for axis in axes})
    rows, columns = (torch.cat([axis.index for axis in axes if axis.dim == dim]).to(value.device) for dim in dims)
    value = value.movedim([2 + dim for dim in dims], [2, 3]).unsqueeze(-1).flatten(4)
    value = value[:, :, rows][..., columns, :]  # (channels, B, blocks, n, blocks, n, entries)
    return value.permute(1, 0, 2, 4, 6, 3, 5).flatten(1, 4)


def _some(value: Tensor, rows: Tensor) -> Tensor:
    """Some of a batch ``(channels, B, ...)``; of one for all, that one."""
    return value if value.shape[1] in (1, len(rows)) else value[:, rows.to(value.device)]
