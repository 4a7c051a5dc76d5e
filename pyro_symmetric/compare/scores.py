r"""Scores of predictions: accuracy, proper scores, calibration, detection of inputs from elsewhere.

A prediction is that of the whole approximation: with members (samples of the weights) the mean of their predictive
distributions, :math:`\bar p(y|x) = \frac{1}{S} \sum_s p(y|x, w_s)`. Lower is better for NLL, Brier, calibration errors,
RMSE and FPR95; higher for the others. The log predictive density is a proper score (Gneiting & Raftery 2007, JASA 102);
coverage of central intervals against their level is the calibration of Kuleshov et al. (2018, arXiv 1807.00263).

Detection asks how well an uncertainty tells inputs from out of the distribution, which are **positive**, from those
within: one minus the largest probability (Hendrycks & Gimpel 2017), the predictive entropy, and with members the mutual
information of :mod:`.diversity`.

>>> members = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.7, 0.3], [0.4, 0.6]]])  # two members, two inputs
>>> result = ps.scores.classification(members, torch.tensor([0, 1]))
>>> result.accuracy, round(result.nll, 3)
(1.0, 0.29)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare.diversity import entropy, members_of, mutual_information
from pyro_symmetric.compare.results import Scores
from pyro_symmetric.weights import require_finite

LEVELS = tuple(k / 20 for k in range(1, 20))  # of central predictive intervals


@torch.no_grad()
def classification(
    probabilities: Tensor, labels: Tensor, ood_probabilities: Tensor | None = None, *, num_bins: int = 15
) -> Scores:
    """Score a classifier's predictive probabilities.

    * ``accuracy``: share of inputs whose most probable class is the label.
    * ``nll``: mean negative log probability of the label, in nats.
    * ``brier``: mean squared distance of the probabilities from the one-hot label, summed over classes: in [0, 2].
    * ``ece``, ``adaptive_ece``: expected calibration error of the top label, in ``num_bins`` bins of equal width (Guo
      et al. 2017), and of equal count (Nixon et al. 2019).
    * ``uncertainty``, ``uncertainty_ood``: ``"entropy"``, and ``"mutual_information"`` of members -> mean, in nats.
    * ``detection``: ``"maximum_probability"``, ``"entropy"``, ``"mutual_information"`` -> see :func:`detect`; empty
      without inputs from elsewhere.
    * ``calibration``: the reliability curve: ``edges`` of the bins, and of each its mean ``confidence``, ``accuracy``
      (both NaN if it is empty) and ``count``.

    A label's probability of 0, by underflow of a softmax, counts as the smallest normal number of the dtype in the NLL.

    :param probabilities: ``(S, N, C)`` of S members, or ``(N, C)``.
    :param labels: ``(N,)``, integers in 0 .. C - 1.
    :param ood_probabilities: predictions for inputs from out of the distribution, ``(S, M, C)`` or ``(M, C)`` likewise.
    :param num_bins: bins of the calibration errors and of the calibration curve.
    :raises ValueError: if shapes don't fit, values aren't probabilities or labels aren't classes.
    """
    arguments.whole("num_bins", num_bins, 1)
    members = members_of(probabilities)
    labels = _classes(labels, *members.shape[1:]).to(members.device)
    mean = members.mean(0, dtype=torch.float64)
    confidence, predicted = mean.max(-1)
    correct = (predicted == labels).double()
    of_label = mean.gather(-1, labels[:, None]).squeeze(-1)
    curve, inside, outside = _calibration_curve(confidence, correct, num_bins), _uncertainties(members), {}
    if ood_probabilities is not None:
        ood = members_of(ood_probabilities, "ood_probabilities")
        if ood.shape[::2] != members.shape[::2]:
            raise ValueError(
                f"ood_probabilities has shape {tuple(ood_probabilities.shape)}, but probabilities has "
                f"{tuple(probabilities.shape)}; members and classes must agree"
            )
        outside = _uncertainties(ood)
    means = [
        {name: float(v.mean()) for name, v in s.items() if name != "maximum_probability"} for s in (inside, outside)
    ]
    gaps = (correct - confidence)[confidence.argsort(stable=True)].tensor_split(min(num_bins, len(correct)))
    return Scores(
        accuracy=float(correct.mean()),
        nll=float(-of_label.clamp(min=torch.finfo(probabilities.dtype).tiny).log().mean()),
        brier=float((mean.square().sum(-1) - 2 * of_label + 1).mean()),
        ece=float(((curve.accuracy - curve.confidence).abs().nan_to_num(0.0) * curve.count).sum() / len(correct)),
        adaptive_ece=float(sum(part.sum().abs() for part in gaps)) / len(correct),
        uncertainty=means[0],
        uncertainty_ood=means[1],
        detection={name: detect(inside[name], outside[name]) for name in outside},
        calibration=curve,
    )


@torch.no_grad()
def regression(means: Tensor, noise_scale: Tensor | float, targets: Tensor) -> Scores:
    r"""Score a regression whose members predict Gaussians: the predictive is their mixture.

    .. math:: \bar p(y|x) = \frac{1}{S} \sum_s \mathcal{N}(y \mid m_s(x), \sigma_s^2).

    * ``log_predictive_density``: mean log density of the targets, in nats per input.
    * ``rmse``, ``mae``: root mean squared, and mean absolute, error of the mean prediction.
    * ``coverage``: level of the central predictive interval, 0.05, 0.1, ... 0.95 -> share of targets inside.
    * ``calibration_error``: mean absolute difference of the two.

    ``y`` lies in the mixture's own central interval of level ``c`` if its distribution function at ``y`` lies within
    ``c / 2`` of one half. Of several outputs the density is joint (independent given the member), the rest pooled.

    :param means: ``(S, N, D)`` of S members and D outputs, as ``predict(..., kind="mean")`` gives them, or ``(N, D)``.
    :param noise_scale: standard deviation of the noise, positive: a number, ``(S,)`` for one of each member, or
        anything that broadcasts with ``(S, N, D)``.
    :param targets: ``(N, D)``, or ``(N,)`` of a single output.
    :raises ValueError: if shapes don't fit or values are not finite or not positive.
    """
    means, scale = gaussians(means, noise_scale)
    shape = tuple(arguments.tensor("targets", targets).shape)
    if shape != means.shape[1:] and (*shape, 1) != means.shape[1:]:
        raise ValueError(f"targets has shape {shape}, but means predicts {tuple(means.shape[1:])}, inputs and outputs")
    require_finite({"targets": targets}, "regression")
    targets = targets.reshape(means.shape[1:]).to(means)
    z = (targets - means) / scale
    log_density = -0.5 * z.square() - scale.log() - 0.5 * math.log(2 * math.pi)
    distance = (torch.special.ndtr(z).mean(0) - 0.5).abs().reshape(-1)
    coverage = {level: float((distance <= level / 2).double().mean()) for level in LEVELS}
    error = means.mean(0) - targets
    return Scores(
        log_predictive_density=float(log_density.sum(-1).logsumexp(0).mean()) - math.log(len(means)),
        rmse=float(error.square().mean().sqrt()),
        mae=float(error.abs().mean()),
        coverage=coverage,
        calibration_error=sum(abs(share - level) for level, share in coverage.items()) / len(coverage),
    )


def detect(scores_in: Tensor, scores_out: Tensor) -> Scores:
    """Score how well an uncertainty separates inputs from out of the distribution (positive) from those within.

    ``aupr``: area under the precision-recall curve, as average precision; ``auroc``: area under the receiver operating
    characteristic, 0.5 by chance; ``fpr95``: share of inputs from within that are flagged at the threshold that flags
    at least 95 % of the others.

    :param scores_in: scores of inputs from the distribution, ``(N,)``; larger means more uncertain.
    :param scores_out: scores of inputs from elsewhere, ``(M,)``.
    """
    require_finite({"scores_in": scores_in, "scores_out": scores_out}, "detect")
    from sklearn import metrics  # of the extra "study"

    score = torch.cat([scores.double().cpu() for scores in (scores_in, scores_out)]).numpy()
    positive = torch.arange(len(score), device="cpu").numpy() >= len(scores_in)
    false_rate, true_rate, _ = metrics.roc_curve(positive, score, drop_intermediate=False)
    return Scores(
        aupr=float(metrics.average_precision_score(positive, score)),
        auroc=float(metrics.auc(false_rate, true_rate)),
        fpr95=float(false_rate[true_rate >= 0.95][0]),
    )


def gaussians(means: Tensor, noise_scale: Tensor | float, name: str = "means") -> tuple[Tensor, Tensor]:
    """Means ``(S, N, D)`` and scales of that shape, checked, in float64; means ``(N, D)`` are those of one member."""
    if arguments.tensor(name, means).dim() not in (2, 3) or 0 in means.shape:
        raise ValueError(
            f"{name} has shape {tuple(means.shape)}; it must be (members, inputs, outputs), or (inputs, outputs) "
            "of one prediction. Of a single output, give it an axis: means[..., None]"
        )
    means = means.double() if means.dim() == 3 else means.double()[None]
    scale = torch.as_tensor(noise_scale, dtype=torch.float64, device=means.device)
    scale = scale[:, None, None] if scale.shape == means.shape[:1] else scale
    require_finite({name: means, "noise_scale": scale}, "predictions")
    if not bool((scale > 0).all()):
        raise ValueError(f"noise_scale must be positive, but its smallest value is {float(scale.min()):.3g}")
    return means, scale.expand(means.shape)


def _classes(labels: Tensor, inputs: int, classes: int) -> Tensor:
    if arguments.tensor("labels", labels).shape != (inputs,) or labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels is {labels.dtype} of shape {tuple(labels.shape)}; it must be {inputs} integers")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels reach from {low} to {high}, but with {classes} classes they lie in 0 .. {classes - 1}"
        )
    return labels.long()


def _uncertainties(members: Tensor) -> dict[str, Tensor]:
    """Uncertainty score -> ``(N,)``, larger meaning more uncertain; mutual information only of two members or more."""
    mean = members.mean(0, dtype=torch.float64)
    scores = {"maximum_probability": 1 - mean.amax(-1), "entropy": entropy(mean)}
    return scores | ({"mutual_information": mutual_information(members)} if len(members) > 1 else {})


def _calibration_curve(confidence: Tensor, correct: Tensor, num_bins: int) -> Scores:
    edges = torch.linspace(0, 1, num_bins + 1, dtype=confidence.dtype, device=confidence.device)
    # bins are closed on the left, as in torchmetrics; a confidence of exactly 1 belongs to the last
    index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, num_bins - 1)
    rows = (torch.ones_like(confidence), confidence, correct)
    count, total, right = (torch.bincount(index, row, num_bins).cpu() for row in rows)
    return Scores(edges=edges.cpu(), confidence=total / count, accuracy=right / count, count=count.long())
