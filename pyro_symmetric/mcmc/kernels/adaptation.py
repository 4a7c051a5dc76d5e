r"""How warm-up learns a step size, by dual averaging, and when it renews the mass matrix.

Dual averaging (Hoffman & Gelman 2014, section 3.2, eq. 6) is fed the chains' pooled acceptance. The windows are Stan's:
a fast start, windows of doubling length at whose ends the mass matrix is renewed, and a fast end.

All quantities are tensors, so nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DualAveraging:
    r"""Stochastic optimisation of a log step size :math:`x` such that acceptance averages to a target.

    .. math:: x_{t+1} = \mu - \frac{\sqrt t}{\gamma} \frac{1}{t + t_0} \sum_{i \le t} (\delta - \alpha_i), \quad
        \bar x_{t+1} = t^{-\kappa} x_{t+1} + (1 - t^{-\kappa}) \bar x_t

    :param log_step: :math:`x`, the next iteration's log step size, ``()``.
    :param log_average: :math:`\bar x`, what to keep when warm-up ends.
    :param error: the weighted mean of :math:`\delta - \alpha_i`.
    :param count: :math:`t`.
    :param anchor: :math:`\mu`, towards which steps shrink.
    """

    log_step: Tensor
    log_average: Tensor
    error: Tensor
    count: Tensor
    anchor: Tensor

    @classmethod
    def start(cls, step_size: Tensor) -> DualAveraging:
        """Start from a step size; the search leans to ten times larger ones, which are cheap to try."""
        log_step = step_size.double().log()
        zero = torch.zeros_like(log_step)
        return cls(log_step, log_step, zero, zero, log_step + torch.tensor(10.0, dtype=torch.float64).log())

    def update(
        self, acceptance: Tensor, target: float, gamma: float = 0.05, t0: float = 10.0, kappa: float = 0.75
    ) -> DualAveraging:
        """Learn from the mean acceptance ``()`` of one iteration."""
        count = self.count + 1
        weight = 1 / (count + t0)
        error = (1 - weight) * self.error + weight * (target - acceptance)
        log_step = self.anchor - error * count.sqrt() / gamma
        share = count**-kappa
        return replace(
            self,
            log_step=log_step,
            log_average=share * log_step + (1 - share) * self.log_average,
            error=error,
            count=count,
        )


def window_ends(num_warmup: int, first: int = 75, last: int = 50, base: int = 25) -> tuple[int, tuple[int, ...]]:
    """When the mass matrix is learnt: the iteration where it begins, and those before which it is renewed.

    Short warm-ups use 15 % and 10 % of their length in place of ``first`` and ``last``; under 20 iterations there is
    nothing to learn from.
    """
    if num_warmup < 20:
        return num_warmup, ()
    if first + base + last > num_warmup:
        first, last = int(0.15 * num_warmup), int(0.1 * num_warmup)
        base = num_warmup - first - last
    ends: list[int] = []
    end, length = first, base
    while end < num_warmup - last:
        end += length
        length *= 2
        if end + length > num_warmup - last:  # the next window wouldn't fit: this one takes what is left
            end = num_warmup - last
        ends.append(end)
    return first, tuple(ends)
