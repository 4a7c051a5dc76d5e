r"""Overlap of labels: how certain the labels of units are, in canonical forms of many draws and in aligned ones.

Where two units' keys overlap they change places from draw to draw, and what is averaged over a label is a mixture of
both. Aligned draws have the best labels there are, which may be hardly better.

With independent Gaussians fitted to all draws of each unit, the odds of a draw's labels against those with units ``i``
and ``j`` exchanged, or with unit ``i`` flipped, are

.. math:: \frac{\mathcal N(v_i; m_i, s_i^2)\, \mathcal N(v_j; m_j, s_j^2)}
    {\mathcal N(v_j; m_i, s_i^2)\, \mathcal N(v_i; m_j, s_j^2)}, \qquad
    \frac{\mathcal N(v_i; m_i, s_i^2)}{\mathcal N(-v_i; m_i, s_i^2)}.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from pyro_symmetric.canonical.order import entries_of
from pyro_symmetric.groups.group import Group

Move = Literal["permute", "flip"]

# Fewer draws than this aren't judged; of more, so many evenly spaced ones are, holding at most so many numbers.
FEW, LOOKED_AT, NUMBERS = 100, 250, 2**24
RARE = 0.05  # the share of draws up to which other labels may be likelier: distant tails, of no weight in any summary
ODDS = 3  # labels are uncertain if the odds against the next best are lower than so many to one
LEAST_SPREAD = 1e-7  # a weight that varies by less than this part of its size says nothing of any label
SCORES = 2**24  # of units for places, that are held at once


def uncertain_share(
    draws: Mapping[str, Tensor], group: Group, odds: float = ODDS, moves: Collection[Move] = ("permute", "flip")
) -> float:
    """The share of draws in which two units could as well change places, or one its sign, at lower odds than these.

    Of several sets of units, of the worst. 0 of fewer than 100 draws, which don't tell.
    """
    worst = 0.0
    for move in moves if group.batch_shape(draws).numel() >= FEW else ():
        for units in _units(draws, group, move):
            worst = max(worst, float((_log_odds(units, move) < math.log(odds)).any(-1).double().mean(0).max()))
    return worst


# small steps --------------------------------------------------------------------------------------------------------


def _units(form: Mapping[str, Tensor], group: Group, move: Move) -> Iterator[Tensor]:
    """The weights of each set of units, ``(draws, copies, units, weights)``, of some draws."""
    group = group.restricted(move)
    shape = group.batch_shape(form)
    numbers = sum(form[site].numel() for site in group.required_sites) // shape.numel()
    every = -(-shape.numel() // max(FEW, min(LOOKED_AT, NUMBERS // max(1, numbers))))
    viewed = group.viewed({site: form[site].flatten(0, len(shape) - 1)[::every] for site in group.required_sites})
    for name in group.names(move):
        axes = [a for a in group.axes(name) if a.site in viewed and (move == "permute" or a.exponent % 2)]
        if axes:  # no sign flips an even power
            yield entries_of(group, viewed, axes).unflatten(1, (group[name].copies, group[name].size)).double()


def _log_odds(units: Tensor, move: Move) -> Tensor:
    """Log-odds of a draw's labels against those with one sign flipped, or two units exchanged (of many units fewer
    draws), ``(draws, copies, units or pairs)``; where nothing varies the precision is 1."""
    mean, variance = units.mean(0), units.var(0, correction=0)
    precision = torch.where(variance > LEAST_SPREAD**2 * mean.square(), variance, 1.0).reciprocal()
    if move == "flip":
        return 2 * (units * mean * precision).sum(-1)
    copies, n = units.shape[1:3]
    units = units[: max(1, SCORES // (copies * n**2))]
    scores = units @ (mean * precision).mT - 0.5 * units.square() @ precision.mT  # of units (rows) for places
    scores -= 0.5 * (mean.square() * precision - precision.log()).sum(-1).unsqueeze(-2)
    own = scores.diagonal(dim1=-2, dim2=-1)
    odds = own.unsqueeze(-1) + own.unsqueeze(-2) - scores - scores.mT
    first, second = torch.triu_indices(n, n, 1, device=units.device)
    return odds[..., first, second]
