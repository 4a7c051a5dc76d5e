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

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.terms import Term

BOUNDS = math.exp(-30.0), math.exp(30.0)  # of scales
# Every so many steps it is looked whether one still moves a log-scale by more than this.
CHECKED, SETTLED = 4, 1e-10


class Sums:
    """The inner products and norms of terms, and the best signs and scales that enter them.

    Given the signs that enter one scale, its best value depends on no other. So each scale has a table of its scores
    under all choices of these signs, ``(2,) * signs + shape``, and the tables add up.

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

    def highest(self, steps: int, whole: bool = True) -> Tensor:
        """The best score alone: signs are chosen one after the other, each from the tables that it enters."""
        tables = [(flips, table) for flips, table, _ in self._tables(steps, {}, whole).values()]
        for name in self._flipped:
            entered = [one for one in tables if name in one[0]]
            rest = [own for own in self._flipped if own != name and any(own in flips for flips, _ in entered)]
            joined = sum(_spread(flips, table, [name, *rest]) for flips, table in entered)
            tables = [one for one in tables if name not in one[0]] + [(rest, torch.as_tensor(joined).amax(0))]
        return sum((table for _, table in tables[1:]), tables[0][1])

    def best(
        self, steps: int, present: Mapping[str, Tensor] | None = None, whole: bool = True
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The best score, what speaks for each sign minus what against, and the best log-scales.

        :param steps: Newton steps for the scales, from the best of several starts.
        :param present: log-scales, by name, that stay if no finite ones are best.
        :param whole: whether all that the multipliers enter is compared; if not, norms are made equal.
        """
        signs = len(self._flipped)
        tables = self._tables(steps, present or {}, whole)
        every = torch.as_tensor(sum(_spread(flips, table, self._flipped) for flips, table, _ in tables.values()))
        pulls = {}
        for number, name in enumerate(self._flipped):
            plus, minus = every.unbind(number)
            pulls[name] = _most(plus, signs - 1) - _most(minus, signs - 1)
        every = every.flatten(0, signs - 1) if signs else every.unsqueeze(0)
        best, which = every.max(0)
        logs = {}
        for scale, (flips, _, own) in tables.items():
            if scale is not None and own is not None:
                under = _spread(flips, own, self._flipped).expand(*[2] * signs, *own.shape[len(flips) :])
                logs[scale] = under.reshape(every.shape).gather(0, which.unsqueeze(0))[0]
        return best, pulls, logs

    def _tables(
        self, steps: int, present: Mapping[str, Tensor], whole: bool
    ) -> dict[str | None, tuple[list[str], Tensor, Tensor | None]]:
        """By scale: the signs that enter, the scores under each choice of them, and the best log-scales.

        Only products of signs matter, one for each set of units that flip together; choices that agree in these share
        one fit.
        """
        found: dict[str | None, tuple[list[str], Tensor, Tensor | None]] = {}
        for scale in dict.fromkeys(scale for _, scale, _ in self._sums):
            own = {key: values for key, values in self._sums.items() if key[1] == scale}
            flips = [name for name in self._flipped if any(name in key[0] for key in own)]
            choices = torch.tensor(list(product((1.0, -1.0), repeat=len(flips))), dtype=torch.float64)
            kinds = list(dict.fromkeys(key[0] for key in own))
            signs = torch.stack([choices[:, [flips.index(n) for n in kind]].prod(1) for kind in kinds], 1)
            distinct, which = signs.unique(dim=0, return_inverse=True)
            linear: dict[int, Tensor] = {}
            for (kind, _, exponent), (odd, even, *_) in own.items():
                sign = distinct[:, kinds.index(kind)].to(odd.device).reshape(-1, *[1] * odd.dim())
                linear[exponent] = linear.get(exponent, 0.0) + (sign * odd + even)
            logs = None
            if scale is None:
                score = torch.as_tensor(sum(linear.values()))
            else:
                reference, source = (_by_exponent(own, which) for which in (2, 3))
                equal = balanced(reference, source)
                if whole:
                    starts = [*([present[scale]] if scale in present else []), equal]
                    score, logs = best_scale(linear, source, starts, steps)
                else:
                    score, logs = score_at(linear, source, equal), equal.expand(len(distinct), *equal.shape)
                logs = logs[which.to(logs.device)].reshape(*[2] * len(flips), *logs.shape[1:])
            score = score[which.to(score.device)].reshape(*[2] * len(flips), *score.shape[1:])
            found[scale] = flips, score, logs
        return found


def _by_exponent(sums: Mapping[tuple[tuple[str, ...], str | None, int], list[Tensor]], which: int) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for (_, _, exponent), values in sums.items():
        found[exponent] = found[exponent] + values[which] if exponent in found else values[which]
    return found


def _spread(flips: Sequence[str], table: Tensor, every: Sequence[str]) -> Tensor:
    """A table of some signs as one of more: its own dimensions in their places, and one entry along each other."""
    rest = table.shape[len(flips) :]
    order = sorted(range(len(flips)), key=lambda k: every.index(flips[k]))
    table = table.permute(*order, *range(len(flips), table.dim()))
    return table.reshape(*(2 if name in flips else 1 for name in every), *rest)


def _most(table: Tensor, signs: int) -> Tensor:
    """The largest entry over the first dimensions."""
    return table.flatten(0, signs - 1).amax(0) if signs else table


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
) -> tuple[Tensor, Tensor]:
    """The largest ``f`` and the log-scale there, elementwise: the best of some candidates, polished by Newton's method.

    :param starts: log-scales to start from; the first one stays if no finite scale is best.
    :param steps: how many steps at most.
    """
    score = torch.full_like(next(iter(linear.values())), -torch.inf)
    factor = torch.ones_like(score)  # e^t: nothing here needs logarithms
    for start in starts:
        factor, score = _better(linear, norms, start.exp(), factor, score)
    # Where one side alone is best; the other sides then decide whether that is better.
    for e, a in linear.items():
        usable = (a > 0) & (norms[e] > 0)
        alone = torch.where(usable, a, 1.0) / torch.where(norms[e] > 0, norms[e], 1.0)
        alone = torch.where(usable, alone if e == 1 else alone.pow(1 / e), factor).clamp(*BOUNDS)
        factor, score = _better(linear, norms, alone, factor, score)
    # Steps are safe only if the score falls off at both ends of the axis.
    walls = [[n > 0 for e, n in norms.items() if e * side > 0] for side in (1, -1)]
    if not (steps and all(walls)):
        return score, _logs(factor, starts[0])
    safe = torch.stack(walls[0]).any(0) & torch.stack(walls[1]).any(0)
    t = factor
    for number in range(steps):
        slope, curve = torch.zeros_like(score), torch.zeros_like(score)
        for e, a in linear.items():
            power = _power(t, e)
            pull, weight = power * a, power.square() * norms[e]
            slope, curve = slope + e * (pull - weight), curve + e * e * (pull - 2 * weight)
        step = torch.where(curve < 0, -slope / curve.clamp_max(-1e-30), slope.sign()).clamp_(-1.0, 1.0)
        t = torch.where(safe, (t * step.exp()).clamp(*BOUNDS), t)
        if number % CHECKED == 0 and steps > CHECKED and bool((step.abs() <= SETTLED).logical_or(~safe).all()):
            break
    factor, score = _better(linear, norms, t, factor, score)
    return score, _logs(factor, starts[0])


def _logs(factor: Tensor, first: Tensor) -> Tensor:
    """Logarithms; what stays where it started stays to the last bit."""
    return torch.where(factor == first.exp(), first, factor.log())


def _better(
    linear: Mapping[int, Tensor], norms: Mapping[int, Tensor], candidate: Tensor, factor: Tensor, score: Tensor
) -> tuple[Tensor, Tensor]:
    """The better of a candidate and what there is."""
    found: Tensor | float = 0.0
    for e, a in linear.items():
        power = _power(candidate, e)
        found = found + power * (a - 0.5 * power * norms[e])
    better = torch.as_tensor(found) > score
    return torch.where(better, candidate, factor), torch.where(better, found, score)


def _power(factor: Tensor, exponent: int) -> Tensor:
    return factor if exponent == 1 else factor.reciprocal() if exponent == -1 else factor.pow(exponent)
