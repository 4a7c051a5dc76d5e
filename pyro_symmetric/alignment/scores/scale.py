r"""The best positive multiplier of a unit.

A multiplier :math:`e^t` enters the weights of a unit with exponents :math:`e`: 1 where something comes in, -1 where it
goes out. What it contributes to the score of a squared distance is

.. math:: f(t) = \sum_e e^{et} a_e - \tfrac12 e^{2et} w_e

with inner products :math:`a_e` and the source's squared norms :math:`w_e`. For one exponent the maximum is
:math:`e^{et} = a_e / w_e`; for 1 and -1 it is a root of a quartic in :math:`e^t`, which may have three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

LIMIT = 30.0  # of log-scales
# Every so many steps it is looked whether one still moves a log-scale by more than this.
CHECKED, SETTLED = 4, 1e-10


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
