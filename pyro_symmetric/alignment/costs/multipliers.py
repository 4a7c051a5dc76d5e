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
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.terms import Term
from pyro_symmetric.placement import as_tensor
from pyro_symmetric.weights import all_true

BOUNDS = math.exp(-30.0), math.exp(30.0)  # of scales
# Every so many steps it is looked whether one still moves a log-scale by more than this.
CHECKED, SETTLED = 4, 1e-10
# Scales of up to so many numbers are fitted together: calls of operators, not their work, take the time.
SMALL = 2**16


class Sums:
    """The inner products and norms of terms, and the best signs and scales that enter them.

    Given the signs that enter one scale, its best value depends on no other. So each scale has a table of its scores
    under all choices of these signs, ``(2,) * signs + shape``, and the tables add up. Many signs may enter (a
    transformer's stream has one for every layer that reads it), few of which meet in one table: the best choice of all
    is found by eliminating one after the other.

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
        """The best score alone."""
        return self._eliminated(self._tables(steps, {}, whole))[0]

    def best(
        self, steps: int, present: Mapping[str, Tensor] | None = None, whole: bool = True
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The best score, what speaks for each sign minus what against, and the best log-scales.

        :param steps: Newton steps for the scales, from the best of several starts.
        :param present: log-scales, by name, that stay if no finite ones are best.
        :param whole: whether all that the multipliers enter is compared; if not, norms are made equal.
        """
        tables = self._tables(steps, present or {}, whole)
        best, eliminated = self._eliminated(tables)
        pulls: dict[str, Tensor] = {}
        for name, rest, joined in reversed(eliminated):  # of the last one, no other sign is left to choose
            plus, minus = (_chosen(rest, table, pulls) for table in joined.unbind(0))
            pulls[name] = plus - minus
        return best, pulls, {t.scale: _chosen(t.flips, t.logs, pulls) for t in tables if t.scale and t.logs is not None}

    def _eliminated(self, tables: Sequence[Table]) -> tuple[Tensor, list[tuple[str, list[str], Tensor]]]:
        """The best score over all signs, chosen one after the other, each from the tables that it enters.

        Next comes the sign that meets the fewest others: a stream's own sign after those of what reads it.

        :return: the score; each sign, those that it meets, and the scores under its choices and theirs.
        """
        left: list[tuple[Sequence[str], Tensor]] = [(table.flips, table.score) for table in tables]
        waiting, found = list(self._flipped), []
        while waiting:
            met = {name: {own for flips, _ in left if name in flips for own in flips} - {name} for name in waiting}
            name = min(waiting, key=lambda name: len(met[name]))
            waiting.remove(name)
            rest = [own for own in waiting if own in met[name]]
            entered = [_spread(flips, table, [name, *rest]) for flips, table in left if name in flips]
            joined = sum(entered[1:], entered[0])
            left = [one for one in left if name not in one[0]] + [(rest, joined.amax(0))]
            found.append((name, rest, joined))
        return sum((table for _, table in left[1:]), left[0][1]), found

    def _tables(self, steps: int, present: Mapping[str, Tensor], whole: bool) -> list[Table]:
        """The scores of each scale under all choices of the signs that enter; of what has no scale, one for each set of
        signs.

        Only products of signs matter, one for each set of units that flip together; choices that agree in these share
        one fit.
        """
        kinds = dict.fromkeys((key[1], None if key[1] else key[0]) for key in self._sums)
        fits = []
        for scale, alone in kinds:
            own = {key: values for key, values in self._sums.items() if key[1] == scale and alone in (None, key[0])}
            flips = [name for name in self._flipped if any(name in key[0] for key in own)]
            signs, which = _products(tuple(flips), tuple(dict.fromkeys(key[0] for key in own)))
            linear: dict[int, Tensor] = {}
            for kind, (odd, even) in {key: values[:2] for key, values in own.items()}.items():
                sign = signs[kind[0]].to(odd).reshape(-1, *[1] * odd.dim())
                linear[kind[2]] = linear.get(kind[2], 0.0) + (sign * odd + even)
            dims = next(iter(linear.values())).dim() - 1
            norms = [_by_exponent(own, number, dims) for number in (2, 3)] if scale else []
            fits.append(_Fit(scale, flips, which, linear, *norms))
        return [table for alike in _alike(fits) for table in _fitted(alike, steps, present, whole)]


@dataclass(frozen=True)
class Table:
    """Scores under all choices of some signs.

    :param scale: the units whose scale was fitted, if any.
    :param flips: the units whose signs are chosen.
    :param score: ``(2,) * flips + shape``; ``logs``: the best log-scales, likewise.
    """

    scale: str | None
    flips: Sequence[str]
    score: Tensor
    logs: Tensor | None = None


@dataclass(frozen=True)
class _Fit:
    """The data that one scale is fitted to: inner products under different products of signs, ``(products,) + shape``,
    and norms of reference and source, by exponent; and which product each choice of signs has."""

    scale: str | None
    flips: list[str]
    which: Tensor
    linear: Mapping[int, Tensor]
    reference: Mapping[int, Tensor] = field(default_factory=dict)
    source: Mapping[int, Tensor] = field(default_factory=dict)


def _alike(fits: Sequence[_Fit]) -> list[list[_Fit]]:
    """Fits by what is fitted: those of the same exponents and shapes are fitted together, if they are small."""
    found: dict[object, list[_Fit]] = {}
    for number, fit in enumerate(fits):
        first = next(iter(fit.linear.values()))
        shapes = tuple((e, fit.linear[e].shape[1:], fit.reference[e].shape, fit.source[e].shape) for e in fit.reference)
        found.setdefault(shapes if fit.scale and first.numel() <= SMALL else number, []).append(fit)
    return list(found.values())


def _fitted(alike: Sequence[_Fit], steps: int, present: Mapping[str, Tensor], whole: bool) -> list[Table]:
    """The tables of some scales, of the same exponents and shapes each."""
    one, sizes = alike[0], [len(next(iter(fit.linear.values()))) for fit in alike]
    if one.scale is None:
        return [_table(fit, as_tensor(sum(fit.linear.values())), None) for fit in alike]
    linear = {e: torch.cat([fit.linear[e] for fit in alike]) for e in one.linear}
    repeats = torch.tensor(sizes, device=next(iter(linear.values())).device)
    reference, source = (
        {e: torch.stack([part[e] for part in parts]).repeat_interleave(repeats, 0) for e in one.linear}
        for parts in ([fit.reference for fit in alike], [fit.source for fit in alike])
    )
    equal = balanced(reference, source)
    if whole:
        here = [present[fit.scale] for fit in alike if fit.scale is not None and fit.scale in present]
        starts = [torch.stack(here).repeat_interleave(repeats, 0)] if here else []
        score, logs = best_scale(linear, source, [*starts, equal], steps)
    else:
        score = score_at(linear, source, equal)
        logs = equal.expand(score.shape)
    parts = zip(alike, score.split(sizes), logs.split(sizes), strict=True)
    return [_table(fit, own_score, own_logs) for fit, own_score, own_logs in parts]


def _table(fit: _Fit, score: Tensor, logs: Tensor | None) -> Table:
    def by_choice(value: Tensor) -> Tensor:
        return value[fit.which.to(value.device)].reshape(*[2] * len(fit.flips), *value.shape[1:])

    return Table(fit.scale, fit.flips, by_choice(score), None if logs is None else by_choice(logs))


@lru_cache(maxsize=1024)
def _products(
    flips: tuple[str, ...], kinds: tuple[tuple[str, ...], ...]
) -> tuple[dict[tuple[str, ...], Tensor], Tensor]:
    """The products of signs of some kinds that differ, kind -> ``(products,)``, and which one each choice of signs has.

    :param flips: the signs to choose.
    :param kinds: sets of them.
    """
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        choices = torch.tensor(list(product((1.0, -1.0), repeat=len(flips))), dtype=torch.float64, device="cpu")
        signs = torch.stack([choices[:, [flips.index(name) for name in kind]].prod(1) for kind in kinds], 1)
        distinct, which = signs.unique(dim=0, return_inverse=True)
        return dict(zip(kinds, distinct.unbind(1), strict=True)), which


def _chosen(flips: Sequence[str], table: Tensor, pulls: Mapping[str, Tensor]) -> Tensor:
    """The entries of a table under the choice of signs that the pulls make, elementwise."""
    for name in flips:
        plus, minus = table.unbind(0)
        table = torch.where(pulls[name] < 0, minus, plus)
    return table


def _by_exponent(
    sums: Mapping[tuple[tuple[str, ...], str | None, int], list[Tensor]], number: int, dims: int
) -> dict[int, Tensor]:
    """Sums of norms, of as many dimensions."""
    found: dict[int, Tensor] = {}
    for (_, _, exponent), values in sums.items():
        value = values[number].reshape(*[1] * (dims - values[number].dim()), *values[number].shape)
        found[exponent] = found[exponent] + value if exponent in found else value
    return found


def _spread(flips: Sequence[str], table: Tensor, every: Sequence[str]) -> Tensor:
    """A table of some signs as one of more: its own dimensions in their places, and one entry along each other."""
    rest = table.shape[len(flips) :]
    order = sorted(range(len(flips)), key=lambda k: every.index(flips[k]))
    table = table.permute(*order, *range(len(flips), table.dim()))
    return table.reshape(*(2 if name in flips else 1 for name in every), *rest)


def score_at(linear: Mapping[int, Tensor], norms: Mapping[int, Tensor], t: Tensor) -> Tensor:
    """``f(t)``; all tensors broadcast."""
    return sum(((e * t).exp() * (a - 0.5 * (e * t).exp() * norms[e]) for e, a in linear.items()), torch.zeros_like(t))


def balanced(reference: Mapping[int, Tensor], source: Mapping[int, Tensor]) -> Tensor:
    r"""The log-scale that makes norms equal on all sides together: the mean of
    :math:`\frac1{2e} \log(\|r_e\|^2 / \|w_e\|^2)` over the exponents at which neither is zero.

    :param reference: exponent -> squared norms of the reference's units; ``source``: of the source's, which broadcast.
    """
    sides = {e: (norm > 0, source[e] > 0) for e, norm in reference.items()}
    if all_true(alive.all() for both in sides.values() for alive in both):  # numbers of pairs are dear
        logs = [(reference[e].log() / (2 * e), source[e].log() / (2 * e)) for e in sides]
        mine, theirs = (sum(own[1:], own[0]) / len(own) for own in zip(*logs, strict=True))
        return mine - theirs
    total: Tensor | float = 0.0
    count: Tensor | float = 0.0
    for e, (mine, theirs) in sides.items():
        alive, ratio = mine & theirs, reference[e] / source[e]
        total, count = total + torch.where(alive, ratio, 1.0).log() / (2 * e), count + alive
    return total / as_tensor(count).clamp_min(1)


def best_scale(
    linear: Mapping[int, Tensor], norms: Mapping[int, Tensor], starts: Sequence[Tensor], steps: int
) -> tuple[Tensor, Tensor]:
    """The largest ``f`` and the log-scale there, elementwise: the best of some candidates, polished by Newton's method.

    :param starts: log-scales to start from; the first one stays if no finite scale is best.
    :param steps: how many steps at most.
    """
    positive = {e: norm > 0 for e, norm in norms.items()}
    halves = {e: 0.5 * norm for e, norm in norms.items()}
    shape = next(iter(linear.values())).shape
    factor, *others = (start.exp().expand(shape) for start in starts)  # e^t: nothing here needs logarithms
    score = _score(linear, halves, factor)
    for candidate in others:
        factor, score = _better(linear, halves, candidate, factor, score)
    # Where one side alone is best; the other sides then decide whether that is better.
    for e, a in linear.items():
        alone = a / norms[e]
        alone = alone if e == 1 else alone.reciprocal() if e == -1 else alone.pow(1 / e)
        alone = torch.where((a > 0) & positive[e], alone, factor).clamp_(*BOUNDS)
        factor, score = _better(linear, halves, alone, factor, score)
    # Steps are safe only if the score falls off at both ends of the axis.
    walls = [[wall for e, wall in positive.items() if e * side > 0] for side in (1, -1)]
    if not (steps and all(walls)):
        return score, _logs(factor, starts[0])
    safe = _any(walls[0]) & _any(walls[1])
    t = factor
    for number in range(steps):
        slope, curve = [], []
        for e, a in linear.items():
            power = _power(t, e)
            pull, weight = power * a, power.square() * norms[e]
            gain = pull - weight
            slope.append(gain if e == 1 else e * gain)
            curve.append(gain - weight if e * e == 1 else e * e * (gain - weight))
        down, bend = sum(slope[1:], slope[0]), sum(curve[1:], curve[0])
        step = torch.where(bend < 0, -down / bend.clamp_max(-1e-30), down.sign()).clamp_(-1.0, 1.0)
        t = torch.where(safe, (t * step.exp()).clamp(*BOUNDS), t)
        if number % CHECKED == 0 and steps > CHECKED and bool((step.abs() <= SETTLED).logical_or(~safe).all()):
            break
    factor, score = _better(linear, halves, t, factor, score)
    return score, _logs(factor, starts[0])


def _logs(factor: Tensor, first: Tensor) -> Tensor:
    """Logarithms; what stays where it started stays to the last bit."""
    return torch.where(factor == first.exp(), first, factor.log())


def _better(
    linear: Mapping[int, Tensor], halves: Mapping[int, Tensor], candidate: Tensor, factor: Tensor, score: Tensor
) -> tuple[Tensor, Tensor]:
    """The better of a candidate and what there is."""
    found = _score(linear, halves, candidate)
    better = found > score
    return torch.where(better, candidate, factor), torch.where(better, found, score)


def _score(linear: Mapping[int, Tensor], halves: Mapping[int, Tensor], factor: Tensor) -> Tensor:
    """``f`` at a factor; ``halves`` are the squared norms' halves."""
    powers = {e: _power(factor, e) for e in linear}
    terms = [powers[e] * (a - powers[e] * halves[e]) for e, a in linear.items()]
    return sum(terms[1:], terms[0])


def _any(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(parts)).any(0) if parts[1:] else parts[0]


def _power(factor: Tensor, exponent: int) -> Tensor:
    return factor if exponent == 1 else factor.reciprocal() if exponent == -1 else factor.pow(exponent)
