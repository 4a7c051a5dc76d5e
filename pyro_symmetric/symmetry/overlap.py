r"""Whether canonical forms of many draws mix labels up.

A canonical form sorts units by a key, and gives each the sign that makes its largest weight positive. If two units'
keys overlap, they change places from draw to draw, and what is averaged over a label is a mixture of both. With
:math:`v_i` the weights of unit ``i`` in one draw and :math:`m_i` their mean over draws, both in units of the spread
within labels, exchanging neighbours lowers the distance of that draw to the means if

.. math:: \|v_i - m_i\|^2 + \|v_{i+1} - m_{i+1}\|^2 > \|v_{i+1} - m_i\|^2 + \|v_i - m_{i+1}\|^2
    \iff \langle v_{i+1} - v_i,\ m_{i+1} - m_i \rangle < 0,

and flipping a unit's sign does if :math:`\langle v_i, m_i \rangle < 0`. In one dimension sorting leaves no such pair.
"""

from __future__ import annotations

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
    if group is None or (count := group.batch_shape(form).numel()) < FEW:
        return 0.0
    mixed = torch.zeros((), dtype=torch.bool)
    for part in (permutations, signs):
        for gain in [] if part is None else _gains(form, part, count):
            mixed = mixed | (gain > 0).any(-1).cpu()
    return float(mixed.double().mean())


# small steps --------------------------------------------------------------------------------------------------------


def _gains(form: Mapping[str, Tensor], group: PermutationGroup | SignGroup, count: int) -> Iterator[Tensor]:
    """For each factor and draw, by how much each exchange or flip lowers the distance, up to a positive factor."""
    numbers = sum(form[site].numel() for site in group.required_sites) // count
    every = -(-count // max(FEW, min(LOOKED_AT, NUMBERS // max(1, numbers))))
    dims = len(group.batch_shape(form))
    sites = {site: form[site].flatten(0, dims - 1)[::every] for site in group.required_sites}
    viewed = {site: group.view(site, value) for site, value in sites.items()}
    for name in group.factors:
        total: Tensor | None = None
        for axis in group.axes(name):
            if axis.site not in viewed or not getattr(axis, "exponent", 1) % 2:  # no sign flips an even power
                continue
            gain = _lowered(viewed[axis.site], axis, isinstance(group, PermutationGroup))
            total = gain if total is None else total + gain
        if total is not None and total.shape[-1]:
            yield total


def _lowered(value: Tensor, axis: Any, exchanged: bool) -> Tensor:
    """One axis's share of that, ``(draws, pairs)`` of neighbours or ``(draws, units)``."""
    units = value.movedim(axis.dim + 1, 1)[:, axis.index.T.to(value.device)].flatten(2).double()
    mean = units.mean(0, keepdim=True)
    spread = (units - mean).square().mean((0, 1), keepdim=True)
    weight = torch.where(spread > 0, 1 / spread, 0.0)
    if exchanged:
        units, mean = units.diff(dim=1), mean.diff(dim=1)
    return -(units * mean * weight).sum(-1)
