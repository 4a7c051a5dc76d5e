"""Quantiles of mixtures in one dimension, by bisection: no closed form, but a cumulative distribution that rises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments

BISECTIONS = 60  # of a bracket; more than the digits of a float64


def mixture_quantiles(components: Sequence[Distribution], weights: Tensor, levels: Tensor) -> Tensor:
    """The quantiles of a mixture, of the shape of the components' own.

    :param components: with ``icdf`` and ``cdf``, of one batch shape.
    :param weights: of the components, of sum one, ``(M,)``.
    :param levels: between 0 and 1, of a shape that broadcasts with the components' batch shape.
    """
    ends = torch.stack([component.icdf(levels) for component in components])
    low, high = ends.amin(0), ends.amax(0)  # where all components agree, so does the mixture
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = sum(w * component.cdf(middle) for w, component in zip(weights, components, strict=True)) < levels
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def checked(quantiles: Any) -> Tensor:
    """Quantiles as a tensor ``(n,)`` in float64.

    :raises ValueError: unless each lies between 0 and 1.
    """
    given = arguments.numbers("quantiles", quantiles).double().reshape(-1)
    if not len(given) or not bool(((given > 0) & (given < 1)).all()):
        raise ValueError(f"quantiles are {given.tolist()}; each must lie between 0 and 1")
    return given
