r"""Scores of regressions whose members predict Gaussians: density, errors, coverage of intervals.

The log predictive density is a proper score (Gneiting & Raftery 2007, JASA 102); coverage of central intervals against
their level is the calibration of Kuleshov et al. (2018, arXiv 1807.00263), here of intervals symmetric in probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare.results import Scores


@dataclass(frozen=True, eq=False, repr=False)
class RegressionScores(Scores):
    """Scores of a regression; see :func:`regression`.

    :param log_predictive_density: mean log density of the targets, in nats per input.
    :param rmse: root mean squared error of the mean prediction.
    :param mae: mean absolute error of the mean prediction.
    :param coverage: level of the central predictive interval -> share of targets inside.
    :param calibration_error: mean absolute difference of coverage and level, over the levels of ``calibration_levels``.
    :param calibration_levels: levels ``0.05, 0.10, ... 0.95``, ``(19,)``, for the calibration curve.
    :param calibration_coverage: share of targets inside the central interval of each level, ``(19,)``.
    """

    log_predictive_density: float
    rmse: float
    mae: float
    coverage: dict[float, float]
    calibration_error: float
    calibration_levels: Tensor
    calibration_coverage: Tensor


@torch.no_grad()
def regression(
    means: Tensor,
    noise_scale: Tensor | float,
    targets: Tensor,
    *,
    levels: Sequence[float] = (0.5, 0.8, 0.9, 0.95),
) -> RegressionScores:
    r"""Score a regression whose members predict Gaussians: the predictive is their mixture.

    .. math:: \bar p(y|x) = \frac{1}{S} \sum_s \mathcal{N}(y \mid m_s(x), \sigma_s^2).

    Coverage is that of the mixture's own central intervals: ``y`` lies in the one of level ``c`` if the mixture's
    distribution function at ``y`` lies within ``c / 2`` of one half. With several outputs the density is joint (outputs
    independent given the member), errors and coverage are pooled over outputs.

    :param means: ``(S, N, D)`` of S members and D outputs, as ``predict(..., kind="mean")`` gives them, or ``(N, D)``.
        A single output has its axis, too, so that members and inputs can't be mistaken for each other.
    :param noise_scale: standard deviation of the noise, positive: a number, ``(S,)`` for one of each member, or
        anything that broadcasts with ``(S, N, D)``.
    :param targets: ``(N, D)``, or ``(N,)`` of a single output.
    :param levels: levels of the central intervals to report, each between 0 and 1.
    :raises ValueError: if shapes don't fit or values are not finite or not positive.
    """
    arguments.tensor("targets", targets)
    if not isinstance(noise_scale, Tensor):
        arguments.positive("noise_scale", noise_scale)
    means, scale = gaussians(means, noise_scale)
    of_one = means.shape[2] == 1 and targets.dim() == 1
    if (targets[:, None] if of_one else targets).shape != means.shape[1:]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, but means predicts {tuple(means.shape[1:])}, inputs and outputs"
        )
    _require_finite("targets", targets)
    targets = targets.reshape(means.shape[1:]).to(means)
    for level in arguments.listed("levels", levels, object, "numbers"):
        arguments.fraction("each of levels", level)
    z = (targets - means) / scale
    log_density = -0.5 * z.square() - scale.log() - 0.5 * math.log(2 * math.pi)
    joint = log_density.reshape(*log_density.shape[:2], -1).sum(-1).logsumexp(0) - math.log(len(means))
    distance = (torch.special.ndtr(z).mean(0) - 0.5).abs().reshape(-1)
    grid = torch.arange(1, 20, dtype=torch.float64, device=distance.device) / 20
    covered = (distance <= grid[:, None] / 2).double().mean(-1)
    error = means.mean(0) - targets
    return RegressionScores(
        log_predictive_density=float(joint.mean()),
        rmse=float(error.square().mean().sqrt()),
        mae=float(error.abs().mean()),
        coverage={float(level): float((distance <= level / 2).double().mean()) for level in levels},
        calibration_error=float((covered - grid).abs().mean()),
        calibration_levels=grid.cpu(),
        calibration_coverage=covered.cpu(),
    )


# small steps ----------------------------------------------------------------------------------------------------------


def _require_finite(name: str, value: Tensor) -> None:
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"{name} holds NaN or infinite values")


def gaussians(means: Tensor, noise_scale: Tensor | float, name: str = "means") -> tuple[Tensor, Tensor]:
    """Means ``(S, N, D)`` and scales of that shape, checked, in float64; means ``(N, D)`` are those of one member.

    :param name: what messages call the means.
    """
    if arguments.tensor(name, means).dim() not in (2, 3) or 0 in means.shape:
        raise ValueError(
            f"{name} has shape {tuple(means.shape)}; it must be (members, inputs, outputs), or (inputs, outputs) "
            "of one prediction. Of a single output, give it an axis: means[..., None]"
        )
    means = means if means.dim() == 3 else means[None]
    scale = torch.as_tensor(noise_scale, dtype=torch.float64, device=means.device)
    _require_finite(name, means)
    _require_finite("noise_scale", scale)
    if not bool((scale > 0).all()):
        raise ValueError(f"noise_scale must be positive, but its smallest value is {float(scale.min()):.3g}")
    if scale.shape == means.shape[:1]:
        scale = scale[:, None, None]
    try:
        fits = torch.broadcast_shapes(scale.shape, means.shape) == means.shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(
            f"noise_scale has shape {tuple(scale.shape)}, but {name} has {tuple(means.shape)}; it must be a number, "
            f"({len(means)},) for one of each member, or broadcast with them"
        )
    return means.double(), scale.expand(means.shape)
