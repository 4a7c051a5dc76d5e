r"""Whether canonical forms of many draws mix labels up, and how certain the labels of aligned draws are.

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
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.rescaling import SignGroup

# Fewer draws than this aren't judged; of more, so many evenly spaced ones are, holding at most so many numbers.
FEW, LOOKED_AT, NUMBERS = 100, 250, 2**24
# Up to which share of the draws may be nearer to the means otherwise: distant tails, of no weight in any summary.
RARE = 0.05
# Labels are uncertain where the odds against the next best are lower than so many to one.
ODDS = 3
# A weight that varies by less than this part of its size says nothing of any label.
LEAST_SPREAD = 1e-7
# How many scores of units for places to hold at once.
SCORES = 2**24


def warn_of_overlap(form: Mapping[str, Tensor], permutations: PermutationGroup | None, signs: SignGroup | None) -> None:
    """Warn if labels are mixed in more than one of twenty draws.

    :param form: canonical forms; their batch dimensions are draws.
    """
    share = mixed_share(form, permutations, signs)
    if share > RARE:
        warnings.warn(
            f"the units' keys overlap: labels are mixed in {share:.0%} of draws; canonical forms are for comparing "
            "orbits (tests, distances), use align or summary(symmetry=...) for means and deviations",
            UserWarning,
            stacklevel=3,
        )


def mixed_share(form: Mapping[str, Tensor], permutations: PermutationGroup | None, signs: SignGroup | None) -> float:
    """The share of the draws that an exchange of neighbours, or the flip of a unit, brings nearer to the means."""
    group = permutations if permutations is not None else signs
    if group is None or group.batch_shape(form).numel() < FEW:
        return 0.0
    mixed = torch.zeros((), dtype=torch.bool)
    for part in (permutations, signs):
        for gain in [] if part is None else _gains(form, part):
            mixed = mixed | (gain > 0).any(-1).cpu()
    return float(mixed.double().mean())


def uncertain_share(
    aligned: Mapping[str, Tensor], permutations: PermutationGroup | None, signs: SignGroup | None
) -> float:
    """The share of aligned draws in which two units could as well change places, or one its sign, at odds under 3 : 1.

    Of several factors, of the worst. 0 of fewer than 100 draws, which don't tell.
    """
    worst = 0.0
    for group in (permutations, signs):
        if group is None or group.batch_shape(aligned).numel() < FEW:
            continue
        for pieces in _units(aligned, group):
            units = torch.cat(pieces, -1)
            certain = _exchange_odds(units) if isinstance(group, PermutationGroup) else _flip_odds(units)
            worst = max(worst, float((certain < math.log(ODDS)).any(-1).double().mean()))
    return worst


# small steps --------------------------------------------------------------------------------------------------------


def _gains(form: Mapping[str, Tensor], group: PermutationGroup | SignGroup) -> Iterator[Tensor]:
    """For each factor and draw, by how much each exchange or flip lowers the distance, up to a positive factor."""
    for pieces in _units(form, group):
        total = sum(_lowered(units, isinstance(group, PermutationGroup)) for units in pieces)
        if isinstance(total, Tensor) and total.shape[-1]:
            yield total


def _units(form: Mapping[str, Tensor], group: PermutationGroup | SignGroup) -> Iterator[list[Tensor]]:
    """For each factor, the weights of its units along each of its axes, ``(draws, units, weights)``, of some draws."""
    shape = group.batch_shape(form)
    numbers = sum(form[site].numel() for site in group.required_sites) // shape.numel()
    every = -(-shape.numel() // max(FEW, min(LOOKED_AT, NUMBERS // max(1, numbers))))
    sites = {site: form[site].flatten(0, len(shape) - 1)[::every] for site in group.required_sites}
    viewed = {site: group.view(site, value) for site, value in sites.items()}
    for name in group.factors:
        axes: list[Any] = [axis for axis in group.axes(name) if axis.site in viewed]
        pieces = [
            viewed[axis.site].movedim(axis.dim + 1, 1)[:, axis.index.T.to(viewed[axis.site].device)].flatten(2).double()
            for axis in axes
            if getattr(axis, "exponent", 1) % 2  # no sign flips an even power
        ]
        if pieces:
            yield pieces


def _lowered(units: Tensor, exchanged: bool) -> Tensor:
    """One axis's share of a gain, ``(draws, pairs)`` of neighbours or ``(draws, units)``."""
    mean = units.mean(0, keepdim=True)
    spread = (units - mean).square().mean((0, 1), keepdim=True)
    weight = torch.where(spread > 0, 1 / spread, 0.0)
    if exchanged:
        units, mean = units.diff(dim=1), mean.diff(dim=1)
    return -(units * mean * weight).sum(-1)


def _exchange_odds(units: Tensor) -> Tensor:
    """Log-odds of a draw's labels against those with two exchanged, ``(draws, pairs)``; of many units fewer draws."""
    n = units.shape[1]
    mean, precision = _fitted(units)
    units = units[: max(1, SCORES // n**2)]
    scores = units @ (mean * precision).T - 0.5 * units.square() @ precision.T  # of units (rows) for places
    scores -= 0.5 * (mean.square() * precision - precision.log()).sum(-1)
    own = scores.diagonal(dim1=-2, dim2=-1)
    odds = own[:, :, None] + own[:, None, :] - scores - scores.mT
    pairs = torch.triu_indices(n, n, 1, device=units.device)
    return odds[:, pairs[0], pairs[1]]


def _flip_odds(units: Tensor) -> Tensor:
    """Log-odds of each draw's signs against those with one flipped, ``(draws, units)``."""
    mean, precision = _fitted(units)
    return 2 * (units * mean * precision).sum(-1)


def _fitted(units: Tensor) -> tuple[Tensor, Tensor]:
    """Means and precisions over draws, ``(units, weights)``; what doesn't vary, such as a zero, has precision 1."""
    mean, variance = units.mean(0), units.var(0, correction=0)
    return mean, torch.where(variance > LEAST_SPREAD**2 * mean.square(), variance, 1.0).reciprocal()
