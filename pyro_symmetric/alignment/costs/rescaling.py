r"""The best scales of all units at once, with places and signs held.

With entries :math:`A_t` of the reference and :math:`B_t` of the source in its place, of which units multiply the latter
by :math:`e^{a_t \cdot u}`, the squared distance is

.. math:: F(u) = \sum_t (A_t - e^{a_t \cdot u} B_t)^2 = \sum_t b_t e^{2 a_t \cdot u} - 2 c_t e^{a_t \cdot u} + A_t^2,
    \qquad b_t = B_t^2,\ c_t = A_t B_t,

a difference of two sums of exponentials (:mod:`~pyro_symmetric.alignment.costs.sums`). Scales of neighbouring layers
pull at one another: unit by unit, what one gains the next one gives back, for hundreds of rounds. Newton's method with
conjugate gradients goes there in a few steps; each is shortened until it lowers the distance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.sums import Array, Balance, conjugate_gradients, slope_of
from pyro_symmetric.groups.group import Group

Multiplied = Mapping[str, Mapping[int, tuple[Tensor, Tensor]]]
STEPS, CG_STEPS, SHORTER = 30, 50, 8
LIMIT = 30.0  # of log-scales
# Newton steps shorter than this are right even if the distance seems to rise by a part that rounding explains.
SHORT, HIDDEN = 1e-4, 1e-13


class Distance:
    """The squared distance of a batch of sources as a function of the log-scales of all units.

    :param group: the scalings.
    :param multiplied: site -> axis -> the units that multiply each position, and their exponents.
    :param sites: site, moments of the reference and of the sources, ``(channels, B, *site_shape)`` each; sources are in
        place, not yet scaled.
    """

    def __init__(self, group: Group, multiplied: Multiplied, sites: Iterable[tuple[str, Tensor, Tensor]]):
        count = sum(group[name].count for name in group.names("scale"))
        arrays: list[Array] = []
        for site, reference, source in sites:
            dims = multiplied[site]
            reference, source = (group.view(site, value) for value in (reference, source))
            rest = [0, *(2 + dim for dim in range(source.dim() - 2) if dim not in dims)]
            here = ([part.to(source.device) for part in own] for own in dims.values())
            units, exponents = zip(*here, strict=True)
            masses = [(factor * source).sum(rest, dtype=torch.float64) for factor in (source, reference)]
            arrays.append(Array(torch.cat(masses), units, exponents))
        self._both = Balance(arrays, count)

    def _at(self, laid: Tensor) -> Tensor:
        """The distance, but for the reference's own norm: log-scales at all positions -> ``(B,)``."""
        squares, products = self._both.total(torch.cat([2 * laid, laid]).exp()).chunk(2)
        return squares - 2 * products

    def least(self, u: Tensor, settled: float) -> Tensor:
        """The log-scales where the distance is least, from given ones; no source ends farther than it was.

        :param settled: the part of the distance below which a step no longer counts.
        """
        reached = self._at(self._both.lay_out(u))
        for _ in range(STEPS):
            step = self._newton_step(self._both.lay_out(u))
            before, part = reached, 1.0
            waiting = torch.ones_like(reached, dtype=torch.bool)
            # Near the optimum rounding hides the gain of a step, but not the step.
            enough = torch.where(step.abs().amax(-1) < SHORT, reached + HIDDEN * reached.abs(), reached)
            for _ in range(SHORTER):
                trial = (u + part * step).clamp(-LIMIT, LIMIT)
                found = self._at(self._both.lay_out(trial))
                better = waiting & (found < enough)
                u, reached = torch.where(better.unsqueeze(-1), trial, u), torch.where(better, found, reached)
                waiting = waiting & ~better
                if not bool(waiting.any()):
                    break
                part *= 0.25
            if bool((before - reached <= settled * before.abs()).all()):
                break
        return u

    # small steps ----------------------------------------------------------------------------------------------------

    def _newton_step(self, laid: Tensor) -> Tensor:
        """Newton's step by conjugate gradients, cut off where the distance curves downwards."""
        both, slope = self._both, slope_of(self._at, laid)
        sums = both.masses_at(torch.cat([2 * laid, laid]).exp())
        # What pulls nowhere stays; so does what would shrink for ever.
        (up, pulled_up), (down, pulled_down) = (both.collect(sums, side).chunk(2) for side in (1, -1))
        held = torch.where(up > 0, pulled_up, pulled_down) > 0  # the pull of one side only keeps it away from zero
        free = ((up > 0) & (down > 0)) | ((up + down > 0) & (pulled_up != pulled_down) & held)
        downhill, diagonal = torch.where(free, -both.collect(slope.gradient), 0.0), 2 * (up + down).clamp_min(1e-300)
        p = conjugate_gradients(
            lambda p: free * both.collect(slope.hessian(both.lay_out(p))),
            downhill,
            diagonal,
            (downhill / diagonal).abs().amax(-1, keepdim=True).clamp_max(0.1).square().clamp_min(1e-20),
            CG_STEPS,
        )
        return p / p.abs().amax(-1, keepdim=True).clamp_min(1.0)
