r"""The best sign and scale of a unit, in closed form or by a few safeguarded Newton steps, for many units at once.

A multiplier :math:`\sigma e^{t}`, :math:`\sigma = \pm 1`, enters the weights of a unit with exponents :math:`e` (1
where something comes in, -1 where it goes out). What it contributes to the score that a matching maximises is

.. math:: g(\sigma, t) = \sum_e \big[ e^{et} (\sigma^e a_e + b_e) + e^{2et} c_e \big] + \gamma t

with inner products :math:`a_e` of what a sign flips (means), :math:`b_e` of what it doesn't (deviations), and what is
quadratic in the multiplier (for squared distances :math:`c_e = -\frac12 \|w_e\|^2`); :math:`\gamma` stems from the
log-determinant of a divergence. For squared distances and one exponent the maximum is :math:`e^{et} = -a_e / 2 c_e`;
for the two exponents 1 and -1 it is a root of the quartic
:math:`2 c_1 \lambda^4 + a_1 \lambda^3 - a_{-1} \lambda - 2 c_{-1} = 0` in :math:`\lambda = e^t`, which may have three
positive roots. Candidates are the maxima of both sides alone, the balance of both quadratic terms, and the present
scale; the best of them is polished by Newton's method. No result is worse than the present scale. Where no finite scale
is best (a unit into which nothing flows), the present one stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LIMIT = 30.0  # of log-scales
# Every so many Newton steps it is looked whether one still moves a log-scale by more than this.
CHECKED, SETTLED = 4, 1e-10


@dataclass(frozen=True)
class Side:
    """What enters with one exponent: ``linear`` times the multiplier, ``quadratic`` times its square."""

    exponent: int
    linear: Tensor
    quadratic: Tensor


def best_scale(sides: Sequence[Side], gamma: float, present: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """The largest ``g`` and the log-scale ``t`` that attains it, elementwise.

    :param present: the log-scale to fall back to; broadcasts against the entries.
    :param steps: how many Newton steps polish the best candidate.
    """
    tops = [s for s in sides if s.exponent > 0]
    bottoms = [s for s in sides if s.exponent < 0]
    best = present.to(sides[0].linear).expand(torch.broadcast_shapes(*(s.linear.shape for s in sides)))
    value = _value(sides, gamma, best)
    for candidate, usable in _candidates(tops, bottoms):
        found = _value(sides, gamma, candidate)
        better = usable & (found > value)
        best, value = torch.where(better, candidate, best), torch.where(better, found, value)
    # Steps are safe only where both ends of the axis fall off.
    walled = _falls(tops, gamma < 0, value) & _falls(bottoms, gamma > 0, value)
    t = best
    for number in range(1, steps + 1):
        slope, curvature = _derivatives(sides, gamma, t)
        newton = torch.where(curvature < 0, -slope / curvature.clamp_max(-1e-30), slope.sign())
        before, t = t, torch.where(walled, (t + newton.clamp(-1.0, 1.0)).clamp(-LIMIT, LIMIT), t)
        if number % CHECKED == 0 and bool(((t - before).abs() <= SETTLED).all()):
            break
    polished = _value(sides, gamma, t)
    better = polished > value
    return torch.where(better, polished, value), torch.where(better, t, best)


def equal_norm_scale(exponent: int, reference: Tensor, source: Tensor) -> Tensor:
    """The log-scale that gives a source unit the norm of the reference unit; zero where either has none.

    :param reference: squared norms, ``(..., n)``, of the reference's units.
    :param source: likewise, of the source's.
    :return: ``(..., n, n)``.
    """
    reference, source = reference.unsqueeze(-1), source.unsqueeze(-2)
    known = (reference > 0) & (source > 0)
    ratio = torch.where(known, reference, 1.0).log() - torch.where(known, source, 1.0).log()
    return ratio / (2 * exponent)


def value_at(sides: Sequence[Side], gamma: float, t: Tensor) -> Tensor:
    """``g`` at given log-scales."""
    return _value(sides, gamma, t)


# small steps --------------------------------------------------------------------------------------------------------


def _value(sides: Sequence[Side], gamma: float, t: Tensor) -> Tensor:
    total = gamma * t
    for side in sides:
        power = (side.exponent * t).exp()
        total = total + power * (side.linear + power * side.quadratic)
    return total


def _derivatives(sides: Sequence[Side], gamma: float, t: Tensor) -> tuple[Tensor, Tensor]:
    slope, curvature = torch.full_like(t, gamma), torch.zeros_like(t)
    for side in sides:
        power = (side.exponent * t).exp()
        linear, quadratic = power * side.linear, power.square() * side.quadratic
        slope = slope + side.exponent * (linear + 2 * quadratic)
        curvature = curvature + side.exponent**2 * (linear + 4 * quadratic)
    return slope, curvature


def _candidates(tops: Sequence[Side], bottoms: Sequence[Side]) -> list[tuple[Tensor, Tensor]]:
    found = []
    for side in (*tops, *bottoms):
        usable = (side.linear > 0) & (side.quadratic < 0)
        peak = torch.where(usable, side.linear, 2.0) / torch.where(usable, -2 * side.quadratic, 2.0)
        found.append(((peak.log() / side.exponent).clamp(-LIMIT, LIMIT), usable))
    for up in tops:
        for down in bottoms:
            usable = (up.quadratic < 0) & (down.quadratic < 0)
            ratio = torch.where(usable, -down.quadratic, 1.0).log() - torch.where(usable, -up.quadratic, 1.0).log()
            t = ratio / (2 * (up.exponent - down.exponent))
            found.append((t.clamp(-LIMIT, LIMIT), usable))
    return found


def _falls(sides: Sequence[Side], otherwise: bool, like: Tensor) -> Tensor:
    falls = torch.full_like(like, otherwise, dtype=torch.bool)
    for side in sides:
        falls = falls | (side.quadratic < 0)
    return falls
