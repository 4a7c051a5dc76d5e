"""The units that multipliers belong to: the last step from solved facts to a group.

Multipliers that belong one to one to units that permute are recorded on these units, once: their axes get exponents.
The second multiplier of the same units (batch normalisation leaves one before it and one after it) is one unit inside
each of them, and rides along. What permutations leave alone (one scale of a whole stream, units that are pinned) is
units of its own. Anything else would be no group together with the permutations, and is left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.discovery.scaling.views import views_of
from pyro_symmetric.discovery.units import module_name, unused
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.units import Move

Axes = tuple[Axis, ...]
Place = tuple[str, int, int]  # a site, an axis of it, and how many axes count as one


class _Table(NamedTuple):
    """Some units' axes at one place: for each position the unit and the block there (-1: none), and all blocks."""

    unit: Tensor
    block: Tensor
    blocks: Tensor


def attached(
    units: Sequence[Units],
    found: Mapping[Move, Sequence[Axes]],
    others: Sequence[Units],
    site_shapes: Mapping[str, torch.Size],
) -> Group:
    """The group of units that permute, with multipliers.

    :param units: the units that permute.
    :param found: ``"scale"`` and ``"flip"`` -> the axes of each set of multipliers.
    :param others: units that are neither permuted nor multiplied.
    """
    attachment = _Attachment(units, found, site_shapes)
    for move, every in found.items():
        for axes in every:
            attachment.add(move, axes)
    return attachment.group(others)


class _Attachment:
    def __init__(
        self, units: Sequence[Units], found: Mapping[Move, Sequence[Axes]], site_shapes: Mapping[str, torch.Size]
    ):
        self.given = {one.name: one for one in units}
        self.units = dict(self.given)
        self.permuting = tuple(sorted(self.units, key=lambda name: -self.units[name].count))
        self.shapes = site_shapes
        every = [*(a for u in units for a in u.axes), *(a for own in found.values() for axes in own for a in axes)]
        self.views = views_of({(a.site, a.dim, a.span) for a in every if a.span > 1}, site_shapes)
        self.tables: dict[Place, dict[str, _Table]] = {}
        for name in self.permuting:
            own, lifted = self.units[name].axes, [self._spanning(axis) for axis in self.units[name].axes]
            for axes in (own, lifted):  # in the form in which they were given, if there is one for a place
                for place in dict.fromkeys(map(_place, axes)):
                    alike = [axis for axis in axes if _place(axis) == place]
                    self.tables.setdefault(place, {}).setdefault(name, self._table(alike))

    def add(self, move: Move, axes: Axes) -> None:
        """Attach multipliers to the units that they fit, the innermost first; the rest are units of their own."""
        left = torch.arange(axes[0].index.shape[1], device="cpu")
        for name in self.permuting:
            fits = self._fits(name, axes, left)
            doubtful = len(fits) > 1  # if something else exchanges the units inside, no unit owns their multipliers
            fits = self._unmixed(name, fits) if doubtful else fits
            together = bool(doubtful and fits) and self._recorded(move, name, _side_by_side([f[1] for f in fits]), True)
            for chosen, own in fits:
                if together or self._recorded(move, name, [own], doubtful):
                    left = left[~torch.isin(left, chosen)]
        if len(left):
            rest = tuple(replace(axis, index=axis.index[:, left]) for axis in axes)
            self._put(Units(self._name(rest), len(left), rest, moves=frozenset({move})))

    def _recorded(self, move: Move, name: str, every: Sequence[Axes], doubtful: bool) -> bool:
        """Let some units be multiplied along these axes; if in doubt, only if all that permutes carries it along."""
        before = dict(self.units)
        for own in every:
            self._record(move, self.units[name], own)
        changed = [one for key, one in self.units.items() if before.get(key) is not one]
        carried = not doubtful or self._are_carried(changed)
        self.units = self.units if carried else before
        return carried

    def group(self, others: Sequence[Units]) -> Group:
        """All units; multipliers that permutations don't carry onto one another are left out."""
        with contextlib.suppress(ValueError):
            return Group([*self.units.values(), *others], self.shapes, of_network=True)
        proposed, self.units = self.units, {name: self.given[name] for name in self.permuting}
        multiplied = dict.fromkeys(axis.site for one in proposed.values() for axis in one.axes if axis.exponent)
        # Where all of them together are carried, each is.
        doubtful = {site for site in multiplied if not self._are_carried(proposed.values(), (site,), proposed)}
        for name, one in proposed.items():
            before = dict(self.units)
            self._put(one)
            sites = doubtful & {axis.site for axis in one.axes}
            if before.get(name) is not one and sites and not self._are_carried([one], sites, proposed):
                self.units = before
        with contextlib.suppress(ValueError):
            return Group([*self.units.values(), *others], self.shapes, of_network=True)
        return Group(self.given.values(), self.shapes, of_network=True)

    # small steps ----------------------------------------------------------------------------------------------------

    def _name(self, axes: Sequence[Axis]) -> str:
        return unused(module_name(axes[0].site), self.units)

    def _unmixed(self, name: str, fits: Sequence[tuple[Tensor, Axes]]) -> list[tuple[Tensor, Axes]]:
        """The multipliers of units that nothing else which permutes carries onto others inside them.

        Looked at before a group is made of them: of 512 channels in two groups each, that takes minutes.
        """
        found = []
        others = [self.units[other] for other in self.permuting if other != name]
        alike: dict[object, list[tuple[Tensor, Axes]]] = {}
        for fit in fits:
            alike.setdefault(tuple((_place(axis), len(axis.index)) for axis in fit[1]), []).append(fit)
        for own in alike.values():
            kept = torch.ones(len(own), dtype=torch.bool, device="cpu")
            for axes in zip(*(axes for _, axes in own), strict=True):
                index = torch.stack([axis.index for axis in axes])  # (multipliers, blocks, units)
                number = torch.full((axes[0].length(self.shapes),), -1, device="cpu")
                number[index] = torch.arange(len(own), device="cpu")[:, None, None]
                here = self.tables.get(_place(axes[0]), {})
                for table, images in ((here[o.name], i) for o in others if o.name in here for i in _generators(o)):
                    place = torch.arange(len(number), device="cpu")
                    place[table.blocks] = table.blocks[:, images]
                    kept &= (number[place[index]] == number[index]).all(2).all(1)
            found += [fit for fit, keeps in zip(own, kept.tolist(), strict=True) if keeps]
        return found

    def _are_carried(
        self, chosen: Collection[Units], sites: Collection[str] = (), names: Iterable[str] | None = None
    ) -> bool:
        """True if all that permutes on the sites of some units carries their multipliers along.

        :param sites: the sites that are looked at; all of these units by default.
        :param names: the units that are looked at; those that permute by default.
        """
        sites = sites or {axis.site for one in chosen for axis in one.axes}
        every = {**self.units, **{one.name: one for one in chosen}}
        among = dict.fromkeys([*(one.name for one in chosen), *(self.permuting if names is None else names)])
        waiting = [n for n in among if n in every and any(axis.site in sites for axis in every[n].axes)]
        near: dict[str, Units] = {}
        while waiting:
            name = waiting.pop()
            if name not in near:
                here = tuple(axis for axis in every[name].axes if axis.site in sites)  # what is elsewhere is far
                near[name] = replace(every[name], axes=here or every[name].axes)
                waiting += [parent for parent in [near[name].parent] if parent is not None]
        try:
            Group(near.values(), {a.site: self.shapes[a.site] for units in near.values() for a in units.axes})
        except ValueError:
            return False
        return True

    def _put(self, units: Units) -> None:
        self.units[units.name] = units

    def _record(self, move: Move, host: Units, own: Axes) -> None:
        """Let units, or units inside each of them, be multiplied along these axes."""
        size = own[0].index.shape[1] // host.count
        riders = [one for one in self.units.values() if one.parent == host.name and one.moves <= {"scale", "flip"}]
        for one in (host, *riders):  # the other move multiplies the same
            if one.moves & {"scale", "flip"} and move not in one.moves and _odd(one.axes) == _odd(own):
                return self._put(replace(one, moves=one.moves | {move}))
        if size == 1 and not host.moves & {"scale", "flip"}:
            axes = self._with_exponents(host, own)
            if axes is not None:
                return self._put(replace(host, axes=axes, moves=host.moves | {move}))
        self._put(Units(self._name(own), size, own, host.name, host.count, frozenset({move})))

    def _with_exponents(self, host: Units, multiplied: Axes) -> Axes | None:
        """The axes of units, cut into those that multipliers enter, and the rest; None if some enter elsewhere."""
        result: list[Axis] = []
        recorded, places = 0, set(map(_place, multiplied))
        for axis in host.axes:
            spanning = self._spanning(axis)
            if _place(axis) not in places and _place(spanning) in places:
                axis = spanning
            rows = {tuple(row): i for i, row in enumerate(axis.index.tolist())}
            untouched = set(rows.values())
            for other in multiplied:
                if _place(other) != _place(axis):
                    continue
                own = sorted(rows[key] for key in map(tuple, other.index.tolist()) if key in rows)
                if own:
                    index = axis.index if len(own) == len(axis.index) else axis.index[own]
                    result.append(replace(axis, index=index, exponent=other.exponent, epsilon=other.epsilon))
                    untouched -= set(own)
                    recorded += len(own)
            if untouched:
                whole = len(untouched) == len(axis.index)
                result.append(axis if whole else replace(axis, index=axis.index[sorted(untouched)]))
        return tuple(result) if recorded == sum(len(axis.index) for axis in multiplied) else None

    def _fits(self, name: str, axes: Axes, left: Tensor) -> list[tuple[Tensor, Axes]]:
        """The multipliers among ``left`` that belong to some units: one to each unit, or several, each in its place.

        :return: the numbers of the multipliers, unit by unit, and the units' blocks that they enter.
        """
        owner: Tensor | None = None
        met: list[tuple[Axis, _Table, Tensor]] = []
        for axis in axes:
            if name not in self.tables.get(_place(axis), {}):
                axis = self._spanning(axis)
            table = self.tables.get(_place(axis), {}).get(name)
            if table is None:
                return []
            index = axis.index[:, left]
            owner = table.unit[index[0]] if owner is None else owner
            owner = torch.where(((table.unit[index] == owner) & (owner >= 0)).all(0), owner, -1)
            met.append((axis, table, table.block[index]))
        assert owner is not None
        chosen = (owner >= 0).nonzero().flatten()
        if not len(chosen):
            return []
        places = torch.cat([block[:, chosen].sort(0).values for _, _, block in met])
        place = places.unique(dim=1, return_inverse=True)[1]
        result = []
        for own in (chosen[place == number] for number in range(int(place.max()) + 1)):
            own = own[owner[own].argsort()]
            if torch.equal(owner[own], torch.arange(self.units[name].count, device="cpu")):
                entered = (replace(a, index=t.blocks[block[:, own[0]].sort().values]) for a, t, block in met)
                result.append((left[own], tuple(entered)))
        return result

    def _spanning(self, axis: Axis) -> Axis:
        """An axis as one that spans the whole run of axes that its site's view flattens."""
        if axis.site not in self.views:
            return axis
        view = self.views[axis.site]
        first = view.start[axis.dim]
        return replace(view.lift(axis), dim=first, span=len(view.runs[first]))

    def _table(self, axes: Sequence[Axis]) -> _Table:
        blocks = torch.cat([axis.index for axis in axes])
        unit, block = torch.full((2, axes[0].length(self.shapes)), -1, device="cpu")
        unit[blocks] = torch.arange(blocks.shape[1], device="cpu")
        block[blocks] = torch.arange(len(blocks), device="cpu")[:, None]
        return _Table(unit, block, blocks)


def _generators(units: Units) -> list[Tensor]:
    """A cycle in every copy of some units, and an exchange: images of all units."""
    within = torch.arange(units.size, device="cpu")
    exchange = within.clone()
    exchange[:2] = within[:2].flip(0)
    starts = units.size * torch.arange(units.copies, device="cpu")[:, None]
    return [(starts + images).flatten() for images in (within.roll(1), exchange)] if units.size > 1 else []


def _side_by_side(every: Sequence[Axes]) -> list[Axes]:
    """Multipliers of the same units, of which each has several: those that enter alike lie side by side in one set."""
    alike: dict[object, list[Axes]] = {}
    for own in every:
        alike.setdefault(
            tuple((_place(axis), axis.exponent, axis.epsilon, len(axis.index)) for axis in own), []
        ).append(own)
    return [
        tuple(
            replace(same[0], index=torch.stack([axis.index for axis in same], 2).flatten(1))
            for same in zip(*sorted(together, key=lambda own: int(own[0].index.min())), strict=True)
        )
        for together in alike.values()
    ]


def _place(axis: Axis) -> Place:
    return axis.site, axis.dim, axis.span


def _odd(axes: Iterable[Axis]) -> set[tuple[Place, tuple[int, ...]]]:
    """The blocks that a sign flips."""
    return {(_place(axis), tuple(row)) for axis in axes if axis.exponent % 2 for row in axis.index.tolist()}
