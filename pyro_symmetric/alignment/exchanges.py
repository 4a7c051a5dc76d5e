r"""Places of units that lie on two axes of one site: a quadratic assignment problem, by exchanges of two units.

.. math:: \max_\pi \sum_i L_{i \pi(i)} + \sum_{c, i, j} A^c_{ij} B^c_{\pi(i) \pi(j)}

Steps of linear assignments alone end in poor optima if the rest tells units hardly apart, as in a transition matrix by
itself. Two remedies, for all sources at once. The *signature* of a unit, its sorted values and its entry with itself,
doesn't depend on where other units are; by the rearrangement inequality it bounds what a pair can contribute (Gilmore
1962, Lawler 1963), and without noise it tells all units. And exchanges of two units, each the best of all, end where
none is left; they start from the signatures and from random places, and the best end counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric.alignment.assignment import assign

# Of how many units at most: the best exchange of 128 units is found in the time of some linear assignments.
EXCHANGED = 128
# From how many random places at most, and how many numbers are moved at once for all of them and all sources.
STARTS, MOVED = 32, 2**19
# Gains below this part of the largest slope are those of rounding.
ROUNDED = 1e-10


@dataclass(frozen=True, eq=False)
class Quadratic:
    """The objective of the places of some units of a batch of sources, by where these are now.

    :param linear: float64 ``(B, n, n)``: places of the reference (rows), units of the source.
    :param ours: float64 ``(B, c, n, n)``, or one for all: matrices of the reference.
    :param theirs: float64 ``(B, c, n, n)``: those of the source.
    """

    linear: Tensor
    ours: Tensor
    theirs: Tensor

    def best(self) -> Tensor:
        """The best places found, ``(B, n)``: from the signatures, where units are, and random places."""
        batch, n = self.linear.shape[:2]
        count = min(STARTS, MOVED // max(1, self.theirs.numel()))
        here = torch.arange(n, device=self.linear.device).expand(1, batch, n)
        random = torch.rand(count, batch, n, device="cpu").argsort(-1).to(here.device)
        ends = self.exchanged(torch.cat([here, assign(self._signatures()).unsqueeze(0), random]))
        return ends.gather(0, self.value(ends).argmax(0)[None, :, None].expand(1, batch, n))[0]

    def value(self, places: Tensor) -> Tensor:
        """The sum that is maximised: places ``(starts, B, n)`` -> ``(starts, B)``."""
        linear, theirs = self._placed(places)
        return linear.diagonal(dim1=-2, dim2=-1).sum(-1) + (self.ours * theirs).sum((-1, -2, -3))

    def exchanged(self, places: Tensor) -> Tensor:
        r"""Places ``(starts, B, n)`` after the best exchanges of two units, one after the other, until none gains.

        With units in place and :math:`u = e_i - e_j`, an exchange gains what the slope says,
        :math:`S_{ij} + S_{ji} - S_{ii} - S_{jj}`, and :math:`\sum_c u^T A^c u \, u^T B^c u`.
        """
        n, shared = places.shape[-1], len(self.ours) == 1
        linear, theirs = (value.flatten(0, 1) for value in self._placed(places))
        rows = torch.arange(places.shape[1], device=places.device).repeat(len(places))
        number = torch.arange(len(rows), device=places.device)
        found = places.flatten(0, 1).clone()
        own, among = _features(self.ours), _differences(self.ours)
        for _ in range(n * n):
            slope = linear + (_features(theirs) @ (own[0] if shared else own[rows]).mT).mT
            stay = slope.diagonal(dim1=-2, dim2=-1)
            gain = slope + slope.mT - stay.unsqueeze(-1) - stay.unsqueeze(-2)
            gain += ((among if shared else among[rows]) * _differences(theirs)).sum(-3)
            most, pair = gain.flatten(-2).max(-1)
            moving = (most > ROUNDED * slope.abs().amax((-1, -2))).nonzero().flatten()
            if not len(moving):
                break
            number, rows, pair = number[moving], rows[moving], pair[moving]
            swap = torch.arange(n, device=places.device).repeat(len(moving), 1)
            first, second = (pair // n).unsqueeze(-1), (pair % n).unsqueeze(-1)
            swap.scatter_(-1, first, second).scatter_(-1, second, first)
            linear, theirs = _moved(linear[moving], theirs[moving], swap)
            found[number] = found[number].gather(-1, swap)
        return found.reshape(-1, len(self.linear), n)

    # small steps ----------------------------------------------------------------------------------------------------

    def _placed(self, places: Tensor) -> tuple[Tensor, Tensor]:
        linear, theirs = (value.expand(len(places), *value.shape) for value in (self.linear, self.theirs))
        return _moved(linear, theirs, places)

    def _signatures(self) -> Tensor:
        """Bounds of what each pair can contribute, ``(B, n, n)``; of each entry half as part of its row and column."""
        (ours, own), (theirs, other) = _sorted(self.ours), _sorted(self.theirs)
        return self.linear + 0.5 * ours @ theirs.mT + own @ other.mT


def _moved(linear: Tensor, theirs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    columns = places.unsqueeze(-2).expand(linear.shape)
    across = places[..., None, None, :].expand(theirs.shape)
    return linear.gather(-1, columns), theirs.gather(-1, across).gather(-2, across.mT)


def _features(matrices: Tensor) -> Tensor:
    """``(..., c, n, n)`` -> rows and columns of each unit, ``(..., n, 2 c n)``."""
    rows, columns = matrices.movedim(-2, -3).flatten(-2), matrices.movedim(-1, -3).flatten(-2)
    return torch.cat([rows, columns], -1)


def _differences(matrices: Tensor) -> Tensor:
    """:math:`u^T M u` with :math:`u = e_i - e_j` for all pairs: what two exchanged units have with each other."""
    own = matrices.diagonal(dim1=-2, dim2=-1)
    return own.unsqueeze(-1) + own.unsqueeze(-2) - matrices - matrices.mT


def _sorted(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted rows and columns of each unit without the entry with itself, and this entry."""
    n = matrices.shape[-1]
    own = torch.eye(n, dtype=torch.bool, device=matrices.device)
    outside = matrices.masked_fill(own, math.inf)
    rows, columns = outside.sort(-1).values[..., :-1], outside.sort(-2).values[..., :-1, :].mT
    features = torch.cat([rows.movedim(-2, -3).flatten(-2), columns.movedim(-2, -3).flatten(-2)], -1)
    return features, matrices.diagonal(dim1=-2, dim2=-1).mT
