"""Scores of pairs of units, with all that isn't decided held, for a batch of sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.choices import FLIPS, POLISH, Block, Choices
from pyro_symmetric.alignment.costs.cost import Cost
from pyro_symmetric.alignment.costs.rescale import Side, best_scale, equal_norm_scale
from pyro_symmetric.alignment.parts.mover import Mover
from pyro_symmetric.alignment.parts.problem import Parts
from pyro_symmetric.alignment.parts.state import State
from pyro_symmetric.alignment.parts.units import Move, Term, Units


class Scorer:
    """The scores of one batch of sources; see :class:`~pyro_symmetric.alignment.descent.matcher.Matcher`."""

    def __init__(self, parts: Parts, reference: Mapping[str, Tensor], source: Mapping[str, Tensor], cost: Cost):
        self._parts, self._cost = parts, cost
        self._reference, self._source = reference, source
        example = next(iter(source.values()), torch.zeros(1))
        self._device, self._batch = example.device, len(example)
        self._mover = Mover(parts, self._device)
        self._units: dict[Term, Tensor] = {}
        self._kept: dict[Term, tuple[Tensor, Block]] = {}

    def moved(self, site: str, state: State, rows: Tensor) -> Tensor:
        """One site of some sources, moved by a state of theirs."""
        return self._mover.moved(self._rows(self._source[site], rows), site, state)

    def size(self, term: Term) -> int:
        """How many entries of the reference a term compares."""
        return self._reference_units(term)[0].numel()

    def choices(self, move: Move, units: Units, terms: Sequence[Term], state: State, rows: Tensor) -> Choices:
        """What is to be chosen for the pairs of one set of a move's units.

        :param terms: those of the move's terms to look at.
        :param state: of the sources ``rows``.
        """
        slots = move.slots[units.name]
        own = [term for term in terms if term.units == units.name]
        blocks = [self._block(move, term, state, rows) for term in own]
        present = [state.multipliers[slot.kind][:, slot.units.to(self._device)] for slot in slots]
        # A scale of which not all is known yet gives the source's unit the norm of the reference's.
        fixed = {}
        for k in range(len(slots)):
            every = [term for term in move.terms if term.units == units.name and term.scale == k]
            known = [term for term in every if any(term is t for t in own)]
            exponents = {term.exponent for term in known}
            if known and len(known) < len(every) and len(exponents) == 1:
                fixed[k] = self._equal_norms(move, known, exponents.pop(), state, rows)
        shape = (len(rows), units.count, units.count)
        entries = {term: self._reference_units(term).shape[2] for term in own}
        return Choices(slots, own, blocks, present, fixed, entries, self._cost, shape, self._device)

    def decide_multiplier(
        self, move: Move, terms: Sequence[Term], state: State, new: State, rows: Tensor, shorter: int
    ) -> None:
        """Put the best signs, or scales, of one factor into ``new``, each for itself with all else held."""
        assert move.multiplier is not None
        kind, name = move.multiplier
        where = self._parts.offsets(kind)[name]
        n = where.stop - where.start
        zero = torch.zeros(len(rows), n + 1, dtype=torch.float64, device=self._device)
        sums: dict[int, list[Tensor]] = {}
        gamma = 0.0
        for term in terms:
            odd, even, quadratic = self._sums(move, term, state, rows)
            totals = sums.setdefault(term.exponent, [zero.clone() for _ in range(3)])
            unit = torch.full((odd.shape[-1],), n, device=self._device)
            unit[term.index.to(self._device)] = torch.arange(n, device=self._device)
            unit = unit[self._mover.order(*term.place, state)].expand(odd.shape)
            for total, part in zip(totals, (odd, even, quadratic), strict=True):
                total.scatter_add_(-1, unit, part)
            entries = self._reference[term.place[0]][0, ..., 0].numel() // odd.shape[-1] * term.index.shape[0]
            gamma += 0.0 if self._cost.squared else term.exponent * entries
        before = state.multipliers[kind][:, where]
        if kind == "sign":
            pull = torch.stack([parts[0] for e, parts in sums.items() if e % 2] or [zero]).sum(0)[:, :-1]
            gain = -2 * pull * before
            flip = (gain > 0) & (gain >= FLIPS[shorter] * gain.amax(-1, keepdim=True))
            new.multipliers[kind][:, where] = torch.where(flip, -before, before)
        elif sums:
            sides = [Side(e, (odd + even)[:, :-1], quadratic[:, :-1]) for e, (odd, even, quadratic) in sums.items()]
            _, best = best_scale(sides, gamma, before, POLISH)
            new.multipliers[kind][:, where] = before + (best - before) * 0.5**shorter

    # blocks of scores -----------------------------------------------------------------------------------------------

    def _equal_norms(self, move: Move, terms: Sequence[Term], exponent: int, state: State, rows: Tensor) -> Tensor:
        norms = []
        for moments in (self._reference, None):
            total: Tensor | float = 0.0
            for term in terms:
                if moments is None:
                    value = self._released(move, term, state, rows)
                else:
                    value = self._rows(moments[term.place[0]], rows)
                total = total + _units(value, term).double().square().sum((-1, -2))
            norms.append(torch.as_tensor(total))
        return equal_norm_scale(exponent, *norms)

    def _block(self, move: Move, term: Term, state: State, rows: Tensor) -> Block:
        """One term's share of the scores, kept until something that it depends on is another."""
        depends = sorted(term.depends)
        stamps = torch.stack([state.stamps[name] for name in depends], -1) if depends else torch.zeros(len(rows), 0)
        if term not in self._kept:
            kept = torch.full((self._batch, len(depends)), -1), self._computed(move, term, state, rows)
            if len(rows) == self._batch:
                kept[0][rows] = stamps.long()
                self._kept[term] = kept
            return kept[1]
        known, block = self._kept[term]
        stale = (known[rows] != stamps).any(-1).nonzero().flatten()
        if len(stale):
            fresh = self._computed(move, term, state.rows(stale), rows[stale])
            if len(stale) == self._batch:
                self._kept[term] = stamps.long().clone(), fresh
                return fresh
            block.put(rows[stale], fresh)
            known[rows[stale]] = stamps[stale].long()
        return block if len(rows) == self._batch else block.rows(rows)

    def _computed(self, move: Move, term: Term, state: State, rows: Tensor) -> Block:
        features = _units(self._cost.source_features(self._released(move, term, state, rows)), term)
        reference = self._rows(self._reference_units(term), rows)
        if not term.signs and term.scale is None:
            return Block(reference.flatten(2) @ features.flatten(2).mT)
        odd = reference[..., 0] @ features[..., 0].mT
        even = reference[..., 1] @ features[..., 1].mT if features.shape[-1] > 1 else None
        if self._cost.squared:
            return Block(odd, even, -0.5 * features.square().sum((-1, -2)).unsqueeze(-2))
        return Block(odd, None, even) if term.scale is not None else Block(odd, even)

    def _released(self, move: Move, term: Term, state: State, rows: Tensor) -> Tensor:
        """The site of a term, moved by all but the move itself along the term's axis."""
        site, dim = term.place
        names = [name for units in move.active for name in units.names]
        released: dict[str, Tensor] = {}
        slots = [slot for k, slot in enumerate(move.slots.get(term.units, ())) if k in (*term.signs, term.scale)]
        for kind, group in self._parts.rescalings.items():
            mask = torch.zeros(1 + sum(group.factors.values()), dtype=torch.bool, device=self._device)
            for slot in slots:
                if slot.kind == kind:
                    mask[slot.units.to(self._device)] = True
            if move.multiplier is not None and move.multiplier[0] == kind:
                mask[self._parts.offsets(kind)[move.multiplier[1]]] = True
            if bool(mask.any()):
                released[kind] = mask
        return self._mover.moved(self._rows(self._source[site], rows), site, state, dim, names, released)

    def _reference_units(self, term: Term) -> Tensor:
        if term not in self._units:
            self._units[term] = _units(self._cost.reference_features(self._reference[term.place[0]]), term)
        return self._units[term]

    def _rows(self, value: Tensor, rows: Tensor) -> Tensor:
        return value if len(value) == 1 or len(rows) == self._batch else value[rows.to(value.device)]

    def _sums(self, move: Move, term: Term, state: State, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a multiplier at each position of a term's axis enters: odd, even, quadratic, ``(B, length)`` each."""
        site, dim = term.place
        features = self._cost.source_features(self._released(move, term, state, rows))
        reference = self._rows(self._cost.reference_features(self._reference[site]), rows)

        def along(value: Tensor) -> Tensor:
            return value.movedim(dim + 1, 1).flatten(2).sum(2, dtype=torch.float64)

        products = [along((reference[..., k] * features[..., k]).unsqueeze(-1)) for k in range(features.shape[-1])]
        spread = products[1] if len(products) > 1 else torch.zeros_like(products[0])
        if self._cost.squared:
            return products[0], spread, -0.5 * along(features.square())
        return products[0], torch.zeros_like(spread), spread


# small steps --------------------------------------------------------------------------------------------------------


def _units(value: Tensor, term: Term) -> Tensor:
    """``(B, *view_shape, channels)`` -> ``(B, units, everything else, channels)`` along a term's axis."""
    dim = term.place[1] + 1
    blocks, n = term.index.shape
    if term.plain and value.shape[dim] == n:
        return value.movedim(dim, 1).flatten(2, -2) if value.dim() > 3 else value.movedim(dim, 1).unsqueeze(2)
    selected = value.index_select(dim, term.index.reshape(-1).to(value.device)).movedim(dim, 1)
    selected = selected.unflatten(1, (blocks, n)).transpose(1, 2)
    return selected.flatten(2, -2) if selected.dim() > 4 else selected
