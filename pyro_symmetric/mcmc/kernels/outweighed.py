r"""Chains in modes that hold next to nothing of the posterior, as warm-up finds them.

With the energy :math:`U`, a mode holds :math:`Z = \int e^{-U}` over its region. Draws from this part of the posterior,
:math:`e^{-U} / Z`, have the entropy :math:`H = \mathbb E[U] + \log Z`, so that

.. math:: \log Z = H - \mathbb E[U].

The entropy of any law with covariance :math:`\Sigma` is at most that of a Gaussian, :math:`\tfrac D2 \log 2 \pi e +
\tfrac12 \log \det \Sigma`, and this is at most :math:`\tfrac D2 \log 2 \pi e + \sum_d \log \sigma_d` (Cover &
Thomas 2006, "Elements of information theory", theorem 8.6.5 and Hadamard's inequality). A chain that may be in such a
mode is granted the last bound. Chains of the lowest energies are granted the one before less
:data:`SHORT_OF_GAUSSIAN` for each coordinate, by which laws that aren't Gaussian may fall short of it. Draws of few
iterations spread too little. So each :math:`\sigma_d` is at least that of the lowest chains, whose own errs to the safe
side. In doubt, chains stay where they are.

Energies alone don't tell: in a mode that holds as much and is :math:`s` times wider, they are higher by :math:`D \log
s`.

A chain whose mode holds a share of :math:`e^{-20}` shows what no independent sample would, and R-hat stays large for as
long as it is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_GAP = 20.0  # nats, that is 2e-9 of the other mode's share
SHORT_OF_GAUSSIAN = 1.0  # nats of a coordinate by which a mode's entropy may be less than a Gaussian's
MOST_DRAWS, MOST_NUMBERS = 64, 2**20  # of each chain that are kept, and numbers of all of them
DRAWS_OF_COORDINATE = 4  # that a covariance asks for


@dataclass(frozen=True, eq=False)
class Passed:
    """The places that chains have passed since a window of warm-up began, thinned.

    :param z: places of all chains, ``(C, D)`` each.
    :param energy: there, ``(C,)`` each.
    :param stride: iterations from one to the next.
    :param count: iterations so far.
    """

    z: tuple[Tensor, ...] = ()
    energy: tuple[Tensor, ...] = ()
    stride: int = 1
    count: int = 0

    @classmethod
    def start(cls, z: Tensor) -> Passed | None:
        """Nothing passed yet, by chains ``(C, D)``; ``None`` if there is a single one, or so many coordinates that
        covariances can't be told."""
        fits = len(z) > 1 and MOST_DRAWS * z.numel() <= MOST_NUMBERS
        enough = MOST_DRAWS // 2 * (len(z) - 1) >= DRAWS_OF_COORDINATE * z.shape[-1]
        return cls() if fits and enough else None

    def update(self, z: Tensor, energy: Tensor) -> Passed:
        """Take in one draw of every chain ``(C, D)`` and its energy ``(C,)``."""
        if self.count % self.stride:
            return Passed(self.z, self.energy, self.stride, self.count + 1)
        places, energies, stride = (*self.z, z.clone()), (*self.energy, energy.clone()), self.stride
        if len(places) > MOST_DRAWS:
            places, energies, stride = places[::2], energies[::2], 2 * stride
        return Passed(places, energies, stride, self.count + 1)

    def outweighed(self) -> tuple[Tensor, Tensor]:
        """The chains whose mode is outweighed by that of the chains of the lowest energies, and these; ``(C,)`` each.

        The first half of the draws doesn't count.
        """
        half = len(self.z) // 2
        z, energy = (torch.stack(values[half:], 1).double() for values in (self.z, self.energy))
        mean = energy.mean(1)
        lowest = below_the_first_gap(mean, LEAST_GAP)
        if bool(lowest.all()):
            return ~lowest, lowest
        deviations = z - z.mean(1, keepdim=True)
        covariance = _covariance(deviations[lowest])
        if covariance is None:
            return torch.zeros_like(lowest), lowest
        variances = (deviations.square().sum(1) / (z.shape[1] - 1)).clamp(min=covariance.diagonal())
        more_entropy = 0.5 * (variances.log().sum(1) - torch.linalg.slogdet(covariance).logabsdet)
        gap = mean - mean[lowest].mean() - more_entropy - SHORT_OF_GAUSSIAN * z.shape[-1]
        return gap > LEAST_GAP, lowest


def below_the_first_gap(values: Tensor, width: float) -> Tensor:
    """Which of the values ``(C,)`` lie below the first gap of at least that width; all, if there is none."""
    ordered = values.nan_to_num(math.inf).sort().values
    wide = (ordered.diff() > width).nonzero().flatten()
    return values <= (ordered[wide[0]] if len(wide) else math.inf)


def _covariance(deviations: Tensor) -> Tensor | None:
    """Within chains, ``(D, D)``, by deviations from their means ``(C, K, D)``; ``None`` if these don't tell."""
    chains, draws, dim = deviations.shape
    degrees = chains * (draws - 1)
    if degrees < DRAWS_OF_COORDINATE * dim or not bool(deviations.isfinite().all()):
        return None
    rows = deviations.flatten(0, 1)
    return rows.mT @ rows / degrees
