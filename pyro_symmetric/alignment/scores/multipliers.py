r"""The best sign and positive multiplier of a unit.

A multiplier :math:`e^t` enters the weights of a unit with exponents :math:`e`: 1 where something comes in, -1 where it
goes out. What it contributes to the score of a squared distance is

.. math:: f(t) = \sum_e e^{et} a_e - \tfrac12 e^{2et} w_e

with inner products :math:`a_e` and the source's squared norms :math:`w_e`. For one exponent the maximum is
:math:`e^{et} = a_e / w_e`; for 1 and -1 it is a root of a quartic in :math:`e^t`, which may have three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.alignment.scores.terms import Term

LIMIT = 30.0  # of log-scales
# Every so many steps it is looked whether one still moves a log-scale by more than this.
CHECKED, SETTLED = 4, 1e-10


class Sums:
    """The inner products and norms of terms, and the best signs and scales that enter them.

    :param terms: the terms to come.
    :ivar scales: the units whose scales enter.
    """

    def __init__(self, terms: Sequence[Term]):
        self._flipped = list(dict.fromkeys(name for term in terms for name in term.flips))
        self.scales = list(dict.fromkeys(term.scale for term in terms if term.scale))
        # (whose signs enter, whose scale, its exponent): what signs flip, what they don't, squared norms of both.
        self._sums: dict[tuple[tuple[str, ...], str | None, int], list[Tensor]] = {}

    def add(self, term: Term, values: list[Tensor]) -> None:
        """Take in the inner products of one or two channels; if there is a scale, the norms of reference and source."""
        if len(values) % 2:
            values = [values[0], torch.zeros((), device=values[0].device), *values[1:]]
        key = term.flips, term.scale, term.axis.exponent
        before = self._sums.get(key)
        self._sums[key] = values if before is None else [a + b for a, b in zip(before, values, strict=True)]

    def best(
        self, steps: int, present: Mapping[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The best score, what speaks for each sign minus what against, and the best log-scales.

        :param steps: Newton steps for the scales; without any, norms are made equal: the best guess while not all that
            a scale enters can be compared.
        :param present: log-scales, by name, that stay if no finite ones are best.
        """
        scales = self.scales
        equal = {scale: balanced(self._gathered(scale, {}, 2), self._gathered(scale, {}, 3)) for scale in scales}
        choices = torch.tensor(list(product((1.0, -1.0), repeat=len(self._flipped))), dtype=torch.float64)
        scores, logs = [], {scale: list[Tensor]() for scale in scales}
        for values in choices.tolist():
            signs = dict(zip(self._flipped, values, strict=True))
            score = sum(self._linear(None, signs).values(), 0.0)
            for scale in scales:
                linear, norms = self._linear(scale, signs), self._gathered(scale, {}, 3)
                starts = [*([present[scale]] if present else []), equal[scale]]
                logs[scale].append(best_scale(linear, norms, starts, steps) if steps else equal[scale])
                score = score + score_at(linear, norms, logs[scale][-1])
            scores.append(torch.as_tensor(score))
        every = torch.stack(scores)
        pulls = {}
        for name, side in zip(self._flipped, choices.to(every.device).unbind(-1), strict=True):
            pulls[name] = every[side > 0].amax(0) - every[side < 0].amax(0)
        best, which = every.max(0)
        return best, pulls, {s: torch.stack(own).gather(0, which.unsqueeze(0))[0] for s, own in logs.items()}

    def _linear(self, scale: str | None, signs: Mapping[str, Any]) -> dict[int, Tensor]:
        odd, even = self._gathered(scale, signs, 0), self._gathered(scale, {}, 1)
        return {exponent: value + even[exponent] for exponent, value in odd.items()}

    def _gathered(self, scale: str | None, signs: Mapping[str, Any], which: int) -> dict[int, Tensor]:
        """Sums by exponent of all that one scale enters, times signs by name."""
        found: dict[int, Tensor] = {}
        for (flips, own, exponent), values in self._sums.items():
            if own == scale:
                sign = math.prod(signs.get(name, 1.0) for name in flips)
                value = values[which] if sign == 1 else sign * values[which]
                found[exponent] = found[exponent] + value if exponent in found else value
        return found


def score_at(linear: Mapping[int, Tensor], norms: Mapping[int, Tensor], t: Tensor) -> Tensor:
    """``f(t)``; all tensors broadcast."""
    return sum(((e * t).exp() * (a - 0.5 * (e * t).exp() * norms[e]) for e, a in linear.items()), torch.zeros_like(t))


def balanced(reference: Mapping[int, Tensor], source: Mapping[int, Tensor]) -> Tensor:
    r"""The log-scale that makes norms equal on all sides together: the mean of
    :math:`\frac1{2e} \log(\|r_e\|^2 / \|w_e\|^2)` over the exponents at which neither is zero.

    :param reference: exponent -> squared norms of the reference's units; ``source``: of the source's, which broadcast.
    """
    total: Tensor | float = 0.0
    count: Tensor | float = 0.0
    for e, norm in reference.items():
        alive = (norm > 0) & (source[e] > 0)
        ratio = torch.where(norm > 0, norm, 1.0).log() - torch.where(source[e] > 0, source[e], 1.0).log()
        total, count = total + alive * ratio / (2 * e), count + alive
    return total / torch.as_tensor(count).clamp_min(1)


def best_scale(
    linear: Mapping[int, Tensor], norms: Mapping[int, Tensor], starts: Sequence[Tensor], steps: int
) -> Tensor:
    """The log-scale that maximises ``f``, elementwise: the best of some candidates, polished by Newton's method.

    :param starts: log-scales to start from; the first one stays if no finite scale is best.
    :param steps: how many steps at most.
    """
    t = starts[0]
    alone = [((a.clamp_min(1e-300) / norms[e].clamp_min(1e-300)).log() / e, (a > 0) & (norms[e] > 0))
             for e, a in linear.items()]  # fmt: skip
    for candidate, usable in [*((start, torch.ones_like(t, dtype=torch.bool)) for start in starts[1:]), *alone]:
        better = usable & (score_at(linear, norms, candidate) > score_at(linear, norms, t))
        t = torch.where(better, candidate.clamp(-LIMIT, LIMIT), t)
    # Steps are safe only if the score falls off at both ends of the axis.
    walled = [sum((n > 0 for e, n in norms.items() if e * side > 0), torch.zeros_like(t)) > 0 for side in (1, -1)]
    start, safe = t, walled[0] & walled[1]
    for number in range(steps if bool(safe.any()) else 0):
        powers = {e: (e * t).exp() for e in linear}
        slope = sum((e * p * (linear[e] - p * norms[e]) for e, p in powers.items()), torch.zeros_like(t))
        curve = sum((e * e * p * (linear[e] - 2 * p * norms[e]) for e, p in powers.items()), torch.zeros_like(t))
        step = torch.where(curve < 0, -slope / curve.clamp_max(-1e-30), slope.sign())
        before, t = t, torch.where(safe, (t + step.clamp(-1.0, 1.0)).clamp(-LIMIT, LIMIT), t)
        if number % CHECKED == 0 and bool(((t - before).abs() <= SETTLED).all()):
            break
    return torch.where(score_at(linear, norms, t) > score_at(linear, norms, start), t, start)
