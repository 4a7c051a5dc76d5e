r"""Random group elements for correlated normals: units are placed one after the other, given those already placed.

Of a draw ``w`` whose units ``p`` are put in order, the chain rule gives

.. math:: q(p \cdot w) = q(r) \prod_j q\big(w_{p(j)} \mid r, w_{p(1)}, \dots, w_{p(j-1)}\big) ,

with ``r`` the entries that nothing moves. For each place in turn, all units left are scored by the marginals of all
places left, given what is placed; that matrix is made doubly stochastic, so that a unit isn't taken from where it is
needed more, and the place draws from its row. The last places are filled exactly, by all their matchings (and signs):

.. math:: \log q(x_1, \dots, x_T \mid \dots) = \sum_j h_j^\top x_j - \tfrac12 \sum_{jk} x_j^\top P_{jk} x_k + c ,

``P`` their conditional precision: a table of numbers for each pair of places and pair of units. Up to ``T`` units are
so drawn from the posterior of the group element itself. The order of places is that of falling certainty if the base's
own means are matched: it depends on no draw.

Entries that several sets of units move count as soon as all of them are placed; until then, the marginal without them
is used.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.distributions.matchings import (
    certain_first,
    doubly_stochastic,
    draw_rows,
    log_row_choices,
    with_spread,
)
from pyro_symmetric.distributions.orbit import in_chunks
from pyro_symmetric.distributions.placements import Drawn
from pyro_symmetric.distributions.unit_densities import UnitDensities
from pyro_symmetric.distributions.unit_sets import UnitSet

# Matchings, signs included, of the last places, all of which are listed.
LISTED = 720
# Steps in which the places before these are filled; of more places, several draw from one matrix.
STEPS = 5
# Alternations of rows and columns at each step: enough to look ahead, as the next step corrects it.
ITERATIONS = 6
# Numbers that may be held at once while listed matchings are scored.
CHUNK_NUMBERS = 2**23


def has_conditionals(units: UnitDensities) -> bool:
    """True if the base is a correlated normal, and no units lie inside others."""
    return units.base.covariance is not None and all(one.is_plain for one in units.sets.values())


class ConditionalWalk:
    """Goes through the sets of units, and draws ``count`` elements for each draw, or scores given ones.

    :param order: in which it goes through the sets.
    """

    def __init__(self, units: UnitDensities, count: int, order: Sequence[str]):
        self.units, self._order = units, order
        self._shape = (count + 1, len(units.like))
        sizes = [value[0].numel() for value in units.draws.values()]
        self._entries = {
            site: torch.arange(sum(sizes[:at]), sum(sizes[: at + 1]), device=units.like.device).reshape(value[:1].shape)
            for at, (site, value) in enumerate(units.draws.items())
        }
        values = torch.cat([value.reshape(len(value), -1) for value in units.draws.values()], -1).double()[None]
        self._values = values.nan_to_num(0.0, 0.0, 0.0)  # a draw that isn't finite is matched anyhow

    def walk(self, given: Mapping[str, Drawn] | None) -> tuple[dict[str, Drawn], Tensor]:
        """Moves (the identity first), each ``(K + 1, N, n)``, and their log-probabilities, ``(K + 1, N)``.

        :param given: moves to score; drawn if ``None``.
        """
        sets, values = self.units.sets, self._values
        known = torch.ones(values.shape[-1], dtype=torch.bool, device=values.device)
        for index, _ in (part for one in sets.values() for part in self._axes(one)):
            known = known.index_fill(0, index.reshape(-1), False)
        drawn: dict[str, Drawn] = {}
        total = values.new_zeros(self._shape)
        for name in self._order:
            one = sets[name]
            told = [part for axis, part in zip(one.axes, self._axes(one), strict=True) if axis.neighbours <= set(drawn)]
            places = _Places.of(self.units, one, told, known, values)
            drawn[name], log_tau = places.fill(self._shape, None if given is None else given[name])
            total = total + log_tau
            for index, flips in self._axes(one):
                values = _moved(values, index, drawn[name], flips)
            for index, _ in told:
                known = known.index_fill(0, index.reshape(-1), True)
        return drawn, total

    def _axes(self, one: UnitSet) -> list[tuple[Tensor, bool]]:
        """For each axis the entries of each unit, ``(n, entries)``, and whether signs flip them."""
        return [(axis.rows(self._entries[axis.own.site], 1)[0], axis.flips) for axis in one.axes]


@dataclass(frozen=True, eq=False)
class _Places:
    """The places of one set of units, in the order in which they are filled, and the units to fill them.

    :param one: the set.
    :param order: of places, ``(n,)``.
    :param candidates: entries of units, and of units with the other sign behind these, ``(L, N, m n, d)``.
    :param mean: of places in order, given what is known, ``(L, N, n, d)``.
    :param root: Cholesky factor of their covariance, ``(n, d, n, d)``.
    """

    one: UnitSet
    order: Tensor
    candidates: Tensor
    mean: Tensor
    root: Tensor

    @classmethod
    def of(
        cls, units: UnitDensities, one: UnitSet, told: Sequence[tuple[Tensor, bool]], known: Tensor, values: Tensor
    ) -> _Places:
        base, n = units.base.covariance, one.units.size
        assert base is not None
        if not told:  # nothing tells the units apart
            nothing = values.new_zeros(1, values.shape[1], n, 1)
            root = torch.eye(n, dtype=values.dtype, device=values.device).reshape(n, 1, n, 1)
            both = torch.cat([nothing, nothing], -2) if one.is_flipped else nothing
            return cls(one, torch.arange(n, device=values.device), both, nothing, root)
        entries = torch.cat([index for index, _ in told], -1)
        loc, covariance, before = base.loc.double(), base.covariance.double(), known.nonzero()[:, 0]
        order = _certain_order(loc[entries], covariance[entries[:, :, None], entries[:, None]])
        flat = entries[order].reshape(-1)
        gain = torch.cholesky_solve(covariance[before][:, flat], _cholesky(covariance[before][:, before]))
        conditional = covariance[flat][:, flat] - covariance[flat][:, before] @ gain
        mean = loc[flat] + (values[..., before] - loc[before]) @ gain
        candidates = values[..., entries]
        if one.is_flipped:
            signs = torch.cat([values.new_full(index.shape[1:], -1.0 if flips else 1.0) for index, flips in told])
            candidates = torch.cat([candidates, candidates * signs], -2)
        root = _cholesky(conditional).reshape(n, -1, n, entries.shape[-1])
        return cls(one, order, candidates, mean.unflatten(-1, (n, -1)), root)

    def fill(self, shape: tuple[int, int], given: Drawn | None) -> tuple[Drawn, Tensor]:
        """Draw, or take, what comes to the places.

        :return: moves, each ``(K + 1, N, n)``, and log-probabilities, ``(K + 1, N)``.
        """
        n, device = self.one.units.size, self.order.device
        wanted = self._wanted(shape, given)
        chosen = torch.empty(*shape, n, dtype=torch.long, device=device)  # candidates by place, in order
        left = self.order.expand(1, shape[1], n)
        mean, total = self.mean, self.mean.new_zeros(shape)
        late, table = _listed(n, self.one.is_permuted, self.one.is_flipped, device)
        early = n - late
        for stop in range(0, early, max(1, math.ceil(early / STEPS))):
            part = slice(stop, min(early, stop + max(1, math.ceil(early / STEPS))))
            picked, left, log_tau = self._step(part, left, mean, wanted, shape)
            chosen[..., part], total = picked, total + log_tau
            mean = self._given(part, picked, mean)
        picked, log_tau = self._last(early, table, left, mean, wanted, shape)
        chosen[..., early:] = picked
        return self._moves(chosen), total + log_tau

    # small steps ----------------------------------------------------------------------------------------------------

    def _wanted(self, shape: tuple[int, int], given: Drawn | None) -> Tensor:
        """The candidates that given moves (else the identity, for one element) put into each place, in order."""
        n = self.one.units.size
        images = torch.arange(n, device=self.order.device).expand(1, shape[1], n)
        if given is not None and given.images is not None:
            images = given.images
        if given is not None and given.signs is not None:
            images = images + n * (given.signs.gather(-1, images.expand(given.signs.shape)) < 0)
        return images[..., self.order]

    def _moves(self, chosen: Tensor) -> Drawn:
        n = self.one.units.size
        by_place = torch.empty_like(chosen).scatter_(-1, self.order.expand_as(chosen), chosen)
        images, signs = by_place % n, None
        if self.one.is_flipped:
            drawn = 1.0 - 2.0 * (by_place >= n)
            signs = torch.empty_like(drawn).scatter_(-1, images, drawn)
        return Drawn(images if self.one.is_permuted else None, signs)

    def _densities(self, start: int, mean: Tensor) -> Tensor:
        """Of each candidate at each place from ``start`` on, given the places before: ``(L, N, n - start, m n)``."""
        rows = self.root[start:, :, start:]
        factors = torch.linalg.inv(_cholesky(torch.einsum("jasb,jcsb->jac", rows, rows)))
        white = torch.einsum("jab,lnib->lnjia", factors, self.candidates)
        centre = torch.einsum("jab,lnjb->lnja", factors, mean[..., start:, :])
        # |a - b|² without the differences, which are as many as draws, places and units together.
        squares = white.square().sum(-1) - 2 * (white @ centre.unsqueeze(-1)).squeeze(-1)
        squares = squares + centre.square().sum(-1, keepdim=True)
        return factors.diagonal(dim1=-2, dim2=-1).log().sum(-1).unsqueeze(-1) - 0.5 * squares

    def _step(
        self, part: slice, left: Tensor, mean: Tensor, wanted: Tensor, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fill some places: candidates, ``(K + 1, N, places)``, units left after that, and log-probabilities."""
        n, size, some = self.one.units.size, left.shape[-1], part.stop - part.start
        both = self._densities(part.start, mean).unflatten(-1, (-1, n))
        both = both.take_along_dim(left[:, :, None, None], -1)  # (L, N, places, signs, units left)
        # Given moves are all wanted; otherwise those of the identity alone are.
        images = (left.unsqueeze(-2) == (wanted % n)[..., part].unsqueeze(-1)).long().argmax(-1)
        total = both.new_zeros(shape)
        if self.one.is_permuted:
            rows = with_spread(doubly_stochastic(both.logsumexp(-2), ITERATIONS))[..., :some, :]
            rank = torch.arange(some, dtype=torch.int32, device=left.device).expand(*shape, some)
            if len(wanted) < shape[0]:
                images = torch.cat([images[:1], draw_rows(rows[1:] if len(rows) > 1 else rows, rank[1:])])
            total = log_row_choices(rows, rank, images).sum(-1)
        images = images.expand(*shape, some)
        chosen = left.expand(*shape, size).gather(-1, images)
        if self.one.is_flipped:
            odds = (both[..., 1, :] - both[..., 0, :])[:, :, :some].expand(*shape, some, size)
            odds = odds.gather(-1, images.unsqueeze(-1)).squeeze(-1)
            flipped = wanted[..., part] >= n
            if len(wanted) < shape[0]:
                flipped = torch.cat([flipped[:1], torch.rand_like(odds[1:]) < odds[1:].sigmoid()])
            total = total + torch.nn.functional.logsigmoid(torch.where(flipped, odds, -odds)).sum(-1)
            chosen = chosen + n * flipped
        kept = torch.ones(*shape, size, dtype=torch.bool, device=left.device).scatter_(-1, images, False)
        return chosen, left.expand(*shape, size)[kept].reshape(*shape, size - some), total

    def _given(self, part: slice, chosen: Tensor, mean: Tensor) -> Tensor:
        """The means of all places once some more are filled."""
        d = self.mean.shape[-1]
        values = self.candidates.take_along_dim(chosen.unsqueeze(-1), -2)
        own = self.root[part, :, part].flatten(2).flatten(0, 1)
        white = torch.linalg.solve_triangular(own, (values - mean[..., part, :]).flatten(-2).unsqueeze(-1), upper=False)
        return mean + torch.einsum("jasb,lnsb->lnja", self.root[:, :, part], white.squeeze(-1).unflatten(-1, (-1, d)))

    def _last(
        self, early: int, table: Tensor, left: Tensor, mean: Tensor, wanted: Tensor, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Fill the last places, all at once: candidates, ``(K + 1, N, late)``, and log-probabilities."""
        n, late = self.one.units.size, left.shape[-1]
        scores = self._listed_scores(early, table, left, mean)
        log_tau = scores.log_softmax(-1)
        here = left if not self.one.is_flipped else torch.cat([left, left + n], -1)
        # The listed matching that is wanted, by the place of its candidates among those left.
        images = (here.unsqueeze(-2) == wanted[..., early:].unsqueeze(-1)).long().argmax(-1)
        digits = here.shape[-1] ** torch.arange(late, device=here.device)
        codes, rank = (table * digits).sum(-1).sort()
        at = torch.searchsorted(codes, (images * digits).sum(-1)).clamp(max=len(table) - 1)
        number = rank[at].expand(shape[0], -1)
        if len(wanted) < shape[0]:
            total = log_tau[-shape[0] + 1 :].exp().cumsum(-1)
            uniform = torch.rand(*total.shape[:2], (shape[0] - 1) // len(total), dtype=total.dtype, device=total.device)
            drawn = torch.searchsorted(total, uniform * total[..., -1:], right=True).clamp(max=len(table) - 1)
            number = torch.cat([number[:1], drawn.movedim(-1, 1).flatten(0, 1)])
        chosen = here.expand(*shape, -1).gather(-1, table[number])
        return chosen, log_tau.expand(*shape, -1).gather(-1, number.unsqueeze(-1)).squeeze(-1)

    def _listed_scores(self, early: int, table: Tensor, left: Tensor, mean: Tensor) -> Tensor:
        """Log-densities, up to a constant, of all listed matchings of the last places: ``(L, N, listed)``."""
        n, late, d = self.one.units.size, left.shape[-1], self.mean.shape[-1]
        root = self.root[early:, :, early:].reshape(late * d, late * d)
        precision = torch.cholesky_inverse(root).reshape(late, d, late, d)
        first, second = torch.triu_indices(late, late, 1, device=left.device)
        field = torch.einsum("jakb,lnkb->lnja", precision, mean[..., early:, :])
        own = precision.diagonal(dim1=0, dim2=2).movedim(-1, 0)
        weighted = torch.einsum("jab,lnib->lnjia", own, self.candidates)
        single = field @ self.candidates.mT - 0.5 * (weighted * self.candidates.unsqueeze(-3)).sum(-1)
        between = torch.einsum("pab,lnib->lnpia", precision.movedim(2, 1)[first, second], self.candidates)
        pairs = -torch.einsum("lnia,lnpja->lnpij", self.candidates, between)
        here = left if not self.one.is_flipped else torch.cat([left, left + n], -1)
        size = here.shape[-1]
        single = single.take_along_dim(here.unsqueeze(-2), -1)
        both = (here.unsqueeze(-1) * pairs.shape[-1] + here.unsqueeze(-2)).flatten(-2).unsqueeze(-2)
        pairs = pairs.flatten(-2).take_along_dim(both, -1)
        lead = torch.broadcast_shapes(single.shape[:2], pairs.shape[:2])
        numbers = torch.cat([part.flatten(-2).expand(*lead, -1) for part in (single, pairs)], -1)
        index = torch.cat(
            [
                table + size * torch.arange(late, device=left.device),
                late * size
                + size * size * torch.arange(len(first), device=left.device)
                + table[:, first] * size
                + table[:, second],
            ],
            -1,
        )
        rows = numbers.flatten(0, 1)
        chunk = CHUNK_NUMBERS // index.numel()
        return in_chunks(lambda some: rows[some][:, index].sum(-1), len(rows), chunk).unflatten(0, lead)


def _certain_order(means: Tensor, covariances: Tensor) -> Tensor:
    """Places in order of falling certainty, if the means themselves are matched: ``(n,)``."""
    factors = torch.linalg.inv(_cholesky(covariances))
    white = torch.einsum("jab,jib->jia", factors, means - means.unsqueeze(1))
    densities = factors.diagonal(dim1=-2, dim2=-1).log().sum(-1).unsqueeze(-1) - 0.5 * white.square().sum(-1)
    return certain_first(doubly_stochastic(densities)).argsort()


def _cholesky(covariance: Tensor) -> Tensor:
    """Cholesky factors, of covariances without full rank nearly."""
    size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    return torch.linalg.cholesky(covariance + torch.diag_embed((1e-9 * size).expand(covariance.shape[:-1])))


def _moved(values: Tensor, index: Tensor, drawn: Drawn, flips: bool) -> Tensor:
    """The entries of units in other places, ``(K + 1, N, V)``."""
    moves = drawn.images if drawn.images is not None else drawn.signs
    assert moves is not None
    values = values.expand(len(moves), -1, -1)
    units = values[..., index]
    if flips and drawn.signs is not None:
        units = units * drawn.signs.unsqueeze(-1)
    if drawn.images is not None:
        units = units.take_along_dim(drawn.images.unsqueeze(-1), -2)
    return values.index_copy(-1, index.reshape(-1), units.flatten(-2))


@functools.lru_cache(maxsize=16)
def _listed(n: int, permuted: bool, flipped: bool, device: torch.device) -> tuple[int, Tensor]:
    """The number of places filled at once, of ``n``, and all ways to do so: candidates left, ``(listed, places)``."""

    def ways(count: int) -> int:
        return (math.factorial(count) if permuted else 1) * (2**count if flipped else 1)

    late = max(count for count in range(1, n + 1) if ways(count) <= LISTED)
    orders = itertools.permutations(range(late)) if permuted else [tuple(range(late))]
    signs = list(itertools.product((0, late), repeat=late)) if flipped else [(0,) * late]
    listed = [[unit + sign for unit, sign in zip(o, s, strict=True)] for o in orders for s in signs]
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        return late, torch.tensor(listed, device=device)
