r"""Overlap of labels: whether canonical forms of many draws mix them up, and how certain labels of aligned draws are.

A canonical form sorts units by a key, and gives each the sign that makes its largest weight positive. If two units'
keys overlap, they change places from draw to draw, and what is averaged over a label is a mixture of both. With
:math:`v_i` the weights of unit ``i`` in one draw and :math:`m_i` their mean over draws, both in units of the spread
within labels, exchanging neighbours lowers the distance of that draw to the means if

.. math:: \|v_i - m_i\|^2 + \|v_{i+1} - m_{i+1}\|^2 > \|v_{i+1} - m_i\|^2 + \|v_i - m_{i+1}\|^2
    \iff \langle v_{i+1} - v_i,\ m_{i+1} - m_i \rangle < 0,

and flipping a unit's sign does if :math:`\langle v_i, m_i \rangle < 0`. In one dimension sorting leaves no such pair.

Aligned draws have the best labels there are, which may be hardly better than others: units that are the same under the
posterior are given means of their own all the same. Under independent Gaussians fitted to the aligned draws, the odds
of a draw's labels against those with units ``i`` and ``j`` exchanged, or with unit ``i`` flipped, are

.. math:: \frac{\mathcal N(v_i; m_i, s_i^2)\, \mathcal N(v_j; m_j, s_j^2)}
    {\mathcal N(v_j; m_i, s_i^2)\, \mathcal N(v_i; m_j, s_j^2)}, \qquad
    \frac{\mathcal N(v_i; m_i, s_i^2)}{\mathcal N(-v_i; m_i, s_i^2)}.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.places import rows

Move = Literal["permute", "flip"]

# Fewer draws than this aren't judged; of more, so many evenly spaced ones are, holding at most so many numbers.
FEW, LOOKED_AT, NUMBERS = 100, 250, 2**24
# Up to which share of the draws may be nearer to the means otherwise: distant tails, of no weight in any summary.
RARE = 0.05
# Labels are uncertain if the odds against the next best are lower than so many to one.
ODDS = 3
# A weight that varies by less than this part of its size says nothing of any label.
LEAST_SPREAD = 1e-7
# How many scores of units for places to hold at once.
SCORES = 2**24


def warn_of_overlap(form: Mapping[str, Tensor], group: Group, *moves: Move) -> None:
    """Warn if labels are mixed in more than one of twenty draws.

    :param form: canonical forms; their batch dimensions are draws.
    :param moves: what was removed: ``"permute"``, ``"flip"``, or both.
    """
    share = mixed_share(form, group, *moves)
    if share > RARE:
        warnings.warn(
            f"the units' keys overlap: labels are mixed in {share:.0%} of draws; canonical forms are for comparing "
            "orbits (tests, distances), use align_many or summary for means and deviations",
            UserWarning,
            stacklevel=3,
        )


def mixed_share(form: Mapping[str, Tensor], group: Group, *moves: Move) -> float:
    """The share of the draws that an exchange of neighbours, or the flip of a unit, brings nearer to the means."""
    if group.batch_shape(form).numel() < FEW:
        return 0.0
    mixed = torch.zeros((), dtype=torch.bool, device="cpu")
    for move in moves:
        for pieces in _units(form, group, move):
            gain = torch.stack([_lowered(units, move) for units in pieces]).sum(0)
            mixed = mixed | (gain > 0).flatten(1).any(1).cpu()
    return float(mixed.double().mean())


def uncertain_share(aligned: Mapping[str, Tensor], group: Group) -> float:
    """The share of aligned draws in which two units could as well change places, or one its sign, at odds under 3 : 1.

    Of several sets of units, of the worst. 0 of fewer than 100 draws, which don't tell.
    """
    worst = 0.0
    if group.batch_shape(aligned).numel() < FEW:
        return worst
    odds: tuple[tuple[Move, Callable[[Tensor], Tensor]], ...] = (("permute", _exchange_odds), ("flip", _flip_odds))
    for move, of in odds:
        for pieces in _units(aligned, group, move):
            uncertain = (of(torch.cat(pieces, -1)) < math.log(ODDS)).any(-1)
            worst = max(worst, float(uncertain.double().mean(0).max()))
    return worst


# small steps --------------------------------------------------------------------------------------------------------


def _units(form: Mapping[str, Tensor], group: Group, move: Move) -> Iterator[list[Tensor]]:
    """For each set of units their weights along each axis, ``(draws, copies, units, weights)``, of some draws."""
    group = group.restricted(move)
    shape = group.batch_shape(form)
    numbers = sum(form[site].numel() for site in group.required_sites) // shape.numel()
    every = -(-shape.numel() // max(FEW, min(LOOKED_AT, NUMBERS // max(1, numbers))))
    sites = {site: form[site].flatten(0, len(shape) - 1)[::every] for site in group.required_sites}
    viewed = group.viewed(sites)
    for name in group.names(move):
        units = group[name]
        pieces = [
            rows(viewed[axis.site], axis, len(group.view_shapes[axis.site]))
            .unflatten(1, (units.copies, units.size))
            .double()
            for axis in group.axes(name)
            if axis.site in viewed and (move == "permute" or axis.exponent % 2)  # no sign flips an even power
        ]
        if pieces:
            yield pieces


def _lowered(units: Tensor, move: Move) -> Tensor:
    """One axis's share of a gain, up to a positive factor: ``(draws, copies, pairs)`` of neighbours, or ``units``."""
    mean = units.mean(0, keepdim=True)
    spread = (units - mean).square().mean(0, keepdim=True).mean(2, keepdim=True)
    weight = torch.where(spread > 0, 1 / spread, 0.0)
    if move == "permute":
        units, mean = units.diff(dim=2), mean.diff(dim=2)
    return -(units * mean * weight).sum(-1)


def _exchange_odds(units: Tensor) -> Tensor:
    """Log-odds of a draw's labels against those with two exchanged, ``(draws, copies, pairs)``; of many units fewer
    draws."""
    copies, n = units.shape[1:3]
    mean, precision = _fitted(units)
    units = units[: max(1, SCORES // (copies * n**2))]
    scores = units @ (mean * precision).mT - 0.5 * units.square() @ precision.mT  # of units (rows) for places
    scores -= 0.5 * (mean.square() * precision - precision.log()).sum(-1).unsqueeze(-2)
    own = scores.diagonal(dim1=-2, dim2=-1)
    odds = own.unsqueeze(-1) + own.unsqueeze(-2) - scores - scores.mT
    pairs = torch.triu_indices(n, n, 1, device=units.device)
    return odds[..., pairs[0], pairs[1]]


def _flip_odds(units: Tensor) -> Tensor:
    """Log-odds of each draw's signs against those with one flipped, ``(draws, copies, units)``."""
    mean, precision = _fitted(units)
    return 2 * (units * mean * precision).sum(-1)


def _fitted(units: Tensor) -> tuple[Tensor, Tensor]:
    """Means and precisions over draws, ``(copies, units, weights)``; what doesn't vary, such as a zero, has precision
    1."""
    mean, variance = units.mean(0), units.var(0, correction=0)
    return mean, torch.where(variance > LEAST_SPREAD**2 * mean.square(), variance, 1.0).reciprocal()
