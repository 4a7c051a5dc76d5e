r"""Scores of predictions: accuracy, proper scores, calibration, out-of-distribution
detection, functional diversity.

The prediction of an approximation is the mean of its members' predictive distributions
(members are draws of the weights), :math:`\bar p(y|x) = \frac{1}{S} \sum_s p(y|x,
w_s)`. Lower is better for NLL, Brier, calibration errors, RMSE and FPR95; higher for
the others. The log predictive density is a proper score (Gneiting & Raftery 2007, JASA
102); the calibration of a regression compares levels of central intervals with their
coverage (Kuleshov et al. 2018, arXiv 1807.00263).

Out-of-distribution inputs are the **positive** class of detection. Its scores are one
minus the largest probability (Hendrycks & Gimpel 2017), the predictive entropy, and the
mutual information of prediction and member.

>>> members = torch.tensor(
...     [[[0.9, 0.1], [0.2, 0.8]], [[0.7, 0.3], [0.4, 0.6]]]
... )  # two members, two inputs
>>> result = ps.scores.classification(members, torch.tensor([0, 1]))
>>> result.accuracy, round(result.nll, 3)
(1.0, 0.29)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.compare.results import DistanceResult, Scores
from pyro_symmetric.posterior.statistics import evenly_spaced
from pyro_symmetric.weights import ByName, drop_names, require_finite

# class probabilities, or a regression's means and noise scale
Prediction = Tensor | tuple[Tensor, Tensor | float]

LEVELS = tuple(k / 20 for k in range(1, 20))  # of central predictive intervals
BINS = 2048  # of equal mass in each of two mixtures, about
GOLDEN = (5**0.5 - 1) / 2
_POOL_ENTRIES = 2**24  # of bins' edges held at once
_CHUNK_ENTRIES = 2**18  # fit into a processor's cache


@torch.no_grad()
def classification(
    probabilities: Tensor,
    labels: Tensor,
    ood_probabilities: Tensor | None = None,
    *,
    num_bins: int = 15,
) -> Scores:
    """Score a classifier's predictive probabilities.

    * ``accuracy``: share of inputs whose most probable class is the label.
    * ``nll``: mean negative log probability of the label, in nats.
    * ``brier``: mean squared distance of the probabilities from the one-hot label,
      summed over classes: in [0, 2].
    * ``ece``, ``adaptive_ece``: expected calibration error of the top label, in
      ``num_bins`` bins of equal width (Guo et al. 2017), and of equal count (Nixon et
      al. 2019).
    * ``uncertainty``, ``uncertainty_ood``: ``"entropy"``, and of members
      ``"mutual_information"`` -> mean, in nats.
    * ``detection``: ``"maximum_probability"``, ``"entropy"``, ``"mutual_information"``
      -> scores of :func:`detect`; empty without out-of-distribution inputs.
    * ``calibration``: the reliability curve: the ``edges`` of the bins, and by bin the
      mean ``confidence``, the ``accuracy`` (both NaN if it is empty) and the ``count``.

    In the NLL a probability of 0, an underflow of the softmax, counts as the smallest
    normal number of its dtype.

    :param probabilities: ``(S, N, C)`` of S members, or ``(N, C)``.
    :param labels: ``(N,)``, integers in 0 .. C - 1.
    :param ood_probabilities: predictions for out-of-distribution inputs, ``(S, M, C)``
        or ``(M, C)``.
    :param num_bins: bins of the calibration errors and of the calibration curve.
    :raises ValueError: if shapes don't fit, values aren't probabilities or labels
        aren't classes.
    """
    arguments.whole("num_bins", num_bins, 1)
    members = members_of(probabilities)
    labels = _classes(labels, *members.shape[1:]).to(members.device)
    mean = members.mean(0, dtype=torch.float64)
    confidence, predicted = mean.max(-1)
    correct = (predicted == labels).double()
    of_label = mean.gather(-1, labels[:, None]).squeeze(-1)
    curve = _calibration_curve(confidence, correct, num_bins)
    misses = (curve.accuracy - curve.confidence).abs().nan_to_num(0.0)
    ece = (misses * curve.count).sum() / len(labels)
    by_confidence = confidence.argsort(stable=True)
    residuals = (correct - confidence)[by_confidence]
    bins = residuals.tensor_split(min(num_bins, len(labels)))
    adaptive_ece = float(sum(part.sum().abs() for part in bins)) / len(labels)
    least = torch.finfo(probabilities.dtype).tiny
    log_likelihood = of_label.clamp(min=least).log()
    squared_errors = mean.square().sum(-1) - 2 * of_label + 1
    inside = _uncertainties(members)
    outside: ByName = {}
    if ood_probabilities is not None:
        ood = members_of(ood_probabilities, "ood_probabilities")
        if ood.shape[::2] != members.shape[::2]:
            raise ValueError(
                f"ood_probabilities has shape {tuple(ood.shape)}, but probabilities "
                f"{tuple(members.shape)}; members and classes must agree"
            )
        outside = _uncertainties(ood)
    return Scores(
        accuracy=float(correct.mean()),
        nll=float(-log_likelihood.mean()),
        brier=float(squared_errors.mean()),
        ece=float(ece),
        adaptive_ece=adaptive_ece,
        uncertainty=_means(inside),
        uncertainty_ood=_means(outside),
        detection={name: detect(inside[name], outside[name]) for name in outside},
        calibration=curve,
    )


@torch.no_grad()
def regression(means: Tensor, noise_scale: Tensor | float, targets: Tensor) -> Scores:
    r"""Score a regression whose members predict Gaussians; its predictive distribution
    is their mixture.

    .. math:: \bar p(y|x) = \frac{1}{S} \sum_s \mathcal{N}(y \mid m_s(x), \sigma_s^2).

    * ``log_predictive_density``: mean log density of the targets, in nats per input.
    * ``rmse``, ``mae``: root mean squared and mean absolute error of the predictive
      mean.
    * ``coverage``: level of the central predictive interval, 0.05, 0.1, ... 0.95 ->
      share of targets inside.
    * ``calibration_error``: mean absolute difference of level and coverage.

    A target is inside the central interval of level ``c`` if the mixture's distribution
    function there is within ``c / 2`` of one half. With several outputs the density is
    joint (independent given the member), the rest pooled.

    :param means: ``(S, N, D)`` of S members and D outputs, as from ``predict(...,
        kind="mean")``, or ``(N, D)``.
    :param noise_scale: standard deviation of the noise, positive: a number, ``(S,)``
        with one per member, or a shape that broadcasts with ``(S, N, D)``.
    :param targets: ``(N, D)``, or ``(N,)`` of a single output.
    :raises ValueError: if shapes don't fit, or values are not finite or not positive.
    """
    means, scale = gaussians(means, noise_scale)
    expected = tuple(means.shape[1:])
    shape = tuple(arguments.tensor("targets", targets).shape)
    if expected not in (shape, (*shape, 1)):
        raise ValueError(
            f"targets has shape {shape}, but means predicts {expected}, inputs and "
            "outputs"
        )
    require_finite({"targets": targets}, "regression")
    targets = targets.reshape(expected).to(means)
    z = (targets - means) / scale
    log_density = -0.5 * z.square() - scale.log() - 0.5 * math.log(2 * math.pi)
    below = torch.special.ndtr(z).mean(0)  # the mixture's distribution function
    distance = (below - 0.5).abs().reshape(-1)
    coverage = {}
    misses = []
    for level in LEVELS:
        inside = (distance <= level / 2).double()
        coverage[level] = float(inside.mean())
        misses.append(abs(coverage[level] - level))
    error = means.mean(0) - targets
    sum_over_members = log_density.sum(-1).logsumexp(0)
    return Scores(
        log_predictive_density=float(sum_over_members.mean()) - math.log(len(means)),
        rmse=float(error.square().mean().sqrt()),
        mae=float(error.abs().mean()),
        coverage=coverage,
        calibration_error=sum(misses) / len(misses),
    )


def detect(scores_in: Tensor, scores_out: Tensor) -> Scores:
    """Score the detection of out-of-distribution inputs (the positive class) by an
    uncertainty.

    * ``aupr``: area under the precision-recall curve, as average precision.
    * ``auroc``: area under the receiver operating characteristic, 0.5 by chance.
    * ``fpr95``: share of in-distribution inputs flagged at the threshold that flags at
      least 95 % of the others.

    :param scores_in: uncertainties of in-distribution inputs, ``(N,)``.
    :param scores_out: uncertainties of out-of-distribution inputs, ``(M,)``.
    """
    require_finite({"scores_in": scores_in, "scores_out": scores_out}, "detect")
    from sklearn import metrics  # from the extra "study"

    score = torch.cat([scores_in, scores_out]).double().cpu().numpy()
    positive = np.arange(len(score)) >= len(scores_in)
    curve = metrics.roc_curve(positive, score, drop_intermediate=False)
    false_rate, true_rate, _ = curve
    sensitive = true_rate >= 0.95
    return Scores(
        aupr=float(metrics.average_precision_score(positive, score)),
        auroc=float(metrics.auc(false_rate, true_rate)),
        fpr95=float(false_rate[sensitive][0]),
    )


# functional diversity -----------------------------------------------------------------


def mutual_information(probabilities: Tensor) -> Tensor:
    r"""Compute the mutual information of prediction and member for each input (Depeweg
    et al. 2018, arXiv 1710.07283).

    .. math:: I = H\Big[\frac{1}{S} \sum_s p_s\Big] - \frac{1}{S} \sum_s H[p_s]
        \in [0, \log \min(S, C)],

    the entropy of the mean prediction minus the mean entropy; zero if all members
    predict alike.

    >>> certain = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # of different classes
    >>> ps.compare.mutual_information(certain)
    tensor([0.6931], dtype=torch.float64)

    :param probabilities: ``(S, N, C)``, members first, classes last.
    :returns: ``(N,)`` in nats, float64, never negative.
    """
    p = members_of(probabilities)
    total = entropy(p.mean(0, dtype=torch.float64))
    information = total - entropy(p).mean(0)
    return information.clamp(min=0)


@torch.no_grad()
def pairwise_mutual_information(probabilities: Tensor) -> Tensor:
    """Compute the mutual information (Jensen-Shannon divergence) of every pair of
    members, averaged over inputs.

    Many pairs close to 0 mean that the ensemble has collapsed in function space
    (Laurent et al. 2024, section 5). The time is that of ``S² N C / 2`` logarithms.

    :param probabilities: ``(S, N, C)``.
    :returns: ``(S, S)``, symmetric, in [0, log 2] nats with a zero diagonal, float64.
    """
    p = members_of(probabilities).double()
    flat = p.flatten(1)
    entropies = entropy(p).sum(1)
    result = p.new_zeros(len(p), len(p))
    for k, member in enumerate(flat):
        mixtures = (member + flat[k:]) / 2
        mixed = torch.special.entr(mixtures).sum(-1)
        apart = (entropies[k] + entropies[k:]) / 2
        result[k, k:] = mixed - apart
    upper = (result / p.shape[1]).triu(1).clamp(min=0)
    return upper + upper.T


class FunctionalCollapse(NamedTuple):
    """Pairwise similarity of an ensemble's members as functions; see
    :func:`functional_collapse`.

    :param within: mutual information of every pair of members in distribution,
        ``(pairs,)`` in nats.
    :param outside: the same out of distribution.
    :param correlation: Pearson's correlation of the two over pairs; NaN if one of them
        is constant.
    :param rank_correlation: Spearman's correlation.
    """

    within: Tensor
    outside: Tensor
    correlation: float
    rank_correlation: float


@torch.no_grad()
def functional_collapse(
    probabilities: Tensor, ood_probabilities: Tensor
) -> FunctionalCollapse:
    """Measure the functional collapse of an ensemble: pairwise mutual information in
    and out of distribution, and their correlation over pairs (Laurent et al. 2024,
    figures 3 and 15).

    >>> probabilities = torch.randn(4, 20, 3).softmax(-1)  # four members at 20 inputs
    >>> result = ps.compare.functional_collapse(
    ...     probabilities, torch.randn(4, 50, 3).softmax(-1)
    ... )
    >>> result.within.shape, result.outside.shape  # of six pairs
    (torch.Size([6]), torch.Size([6]))

    :param probabilities: predictions in distribution, ``(S, N, C)``.
    :param ood_probabilities: predictions of the same members out of distribution, ``(S,
        M, C)``.
    :raises ValueError: with fewer than 3 members, or if the members differ in number.
    """
    from scipy.stats import rankdata  # takes a quarter of a second to import

    within = pairwise_mutual_information(probabilities)
    beyond = members_of(ood_probabilities, "ood_probabilities")
    outside = pairwise_mutual_information(beyond).to(within)
    if len(within) != len(outside) or len(within) < 3:
        raise ValueError(
            f"probabilities holds {len(within)} members and ood_probabilities "
            f"{len(outside)}; both must be predictions "
            "of the same members, at least 3"
        )
    pair = torch.ones_like(within).triu(1).bool()
    pairs = torch.stack([within[pair], outside[pair]])
    ranks = torch.from_numpy(rankdata(pairs.cpu().numpy(), axis=1))
    correlation = torch.corrcoef(pairs)[0, 1]
    rank_correlation = torch.corrcoef(ranks)[0, 1]
    return FunctionalCollapse(
        pairs[0], pairs[1], float(correlation), float(rank_correlation)
    )


# distance -----------------------------------------------------------------------------


@torch.no_grad()
def total_variation(p: Prediction, q: Prediction) -> DistanceResult:
    r"""Compute the total variation distance of two predictive distributions: ``mean``
    and ``maximum`` over inputs, and ``each`` input's.

    .. math:: \mathrm{TV}(p, q) = \max_A |p(A) - q(A)|
        = \frac12 \int |p(y) - q(y)| \, dy \in [0, 1].

    Izmailov et al. (2021, arXiv 2104.14421) compare approximations with a long run of
    HMC by its mean over inputs.

    >>> round(
    ...     ps.total_variation(
    ...         torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]])
    ...     ).value,
    ...     3,
    ... )
    0.3

    A predictive distribution is the mean of its members'. For mixtures of Gaussians the
    value is a lower bound: that of the exact masses of bins of at most about 1/2048 of
    each mixture. Only bins in which the densities cross lose anything: about 1e-7 for
    two Gaussians one standard deviation apart. It is loose for predictives of many
    members with so little noise that they hardly overlap, which cross in most bins.
    With several outputs, distances of the marginals are averaged.

    :param p: class probabilities, ``(members, inputs, classes)`` or ``(inputs,
        classes)``; or a regression's pair ``(means, noise_scale)`` as in
        :func:`~pyro_symmetric.compare.scores.regression`, means ``(members, inputs,
        outputs)`` or ``(inputs, outputs)``.
    :param q: the other predictions, for the same inputs; the number of members may
        differ.
    :raises ValueError: if shapes don't fit, or values aren't probabilities, finite or
        positive.
    """
    if isinstance(p, tuple) != isinstance(q, tuple):
        raise TypeError(
            "p and q must both be class probabilities, or both pairs (means, "
            "noise_scale)"
        )
    first = _side(p, "p")
    second = _side(q, "q")
    shape = tuple(first[0].shape[1:])
    second_shape = tuple(second[0].shape[1:])
    if shape != second_shape:
        raise ValueError(
            f"p predicts {shape} and q {second_shape}; inputs, and classes or "
            "outputs, must be the same"
        )
    if isinstance(p, tuple):
        by_input = _between_mixtures(first, second)
    else:
        mean = first[0].mean(0, dtype=torch.float64)
        second_mean = second[0].mean(0, dtype=torch.float64)
        by_input = (mean - second_mean).abs().sum(-1) / 2
    return DistanceResult(
        title="Total variation of predictions",
        num_samples=(len(first[0]), len(second[0])),
        totals={"mean": float(by_input.mean()), "maximum": float(by_input.max())},
        each=by_input.cpu(),
    )


def _side(prediction: Prediction, name: str) -> tuple[Tensor, ...]:
    """Check one side of a distance: probabilities, or means and scales of members."""
    if isinstance(prediction, tuple):
        return gaussians(*prediction, name=f"the means of {name}")
    return (members_of(prediction, name),)


def _between_mixtures(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> Tensor:
    """Compute the distance of two mixtures, means and scales ``(S, N, D)``, at each
    input; a few inputs at a time.
    """
    sides = (*first, *second)
    held = max(map(len, sides)) + BINS
    inputs = max(1, _POOL_ENTRIES // (held * sides[0].shape[-1]))
    slices = [side.split(inputs, 1) for side in sides]
    distances = []
    for m, s, n, t in zip(*slices, strict=True):
        quantiles = torch.cat([_quantiles(m, s), _quantiles(n, t)])
        edges = quantiles.sort(0).values
        difference = _masses(m, s, edges) - _masses(n, t, edges)
        distances.append(difference.abs().sum(0) / 2)
    return torch.cat(distances).mean(-1)


def _quantiles(means: Tensor, scale: Tensor) -> Tensor:
    """Cut a mixture into bins of about equal mass, at quantiles of its members:
    ``(bins, N, ...)``.

    Each member's levels have an offset of their own, so that equal members have
    different quantiles.
    """
    levels = -(-BINS // len(means))
    numbers = torch.arange(len(means), dtype=means.dtype, device=means.device)
    offsets = (numbers + 0.5) * GOLDEN % 1
    steps = torch.arange(levels, device=means.device)[:, None]
    z = torch.special.ndtri((steps + offsets) / levels)
    of_members = means + scale * z[..., None, None]
    quantiles = of_members.flatten(0, 1).sort(0).values
    index = evenly_spaced(len(quantiles), BINS)
    return quantiles[index.to(quantiles.device)]


def _masses(means: Tensor, scale: Tensor, edges: Tensor) -> Tensor:
    """Compute a mixture's mass between edges ``(E, N, ...)`` and beyond the outer ones:
    ``(E + 1, N, ...)``.
    """
    slope = 0.5**0.5 / scale
    erfs = []
    for part in edges.split(max(1, _CHUNK_ENTRIES // means.numel())):
        erfs.append(torch.erf((part[:, None] - means) * slope).mean(1))
    below = (1 + torch.cat(erfs)) / 2
    from_zero = nn.functional.pad(below, (0, 0, 0, 0, 1, 0))
    return from_zero.diff(dim=0, append=torch.ones_like(below[:1]))


# small steps --------------------------------------------------------------------------


def members_of(probabilities: Any, name: str = "probabilities") -> Tensor:
    """Check class probabilities and return them as ``(members, inputs, classes)``;
    without members, as those of one.

    :raises ValueError: if the shape doesn't fit, or the last axis holds no
        probabilities.
    """
    shape = tuple(arguments.tensor(name, probabilities).shape)
    if len(shape) not in (2, 3) or 0 in shape or shape[-1] < 2:
        raise ValueError(
            f"{name} has shape {shape}; it must be (members, inputs, classes) or "
            "(inputs, classes), with two or more "
            "classes"
        )
    # generous for the rounding of a softmax
    floats = probabilities.is_floating_point()
    tolerance = max(1e-6, 32 * torch.finfo(probabilities.dtype).eps) if floats else 0.0
    least = float(probabilities.min())
    sums = probabilities.sum(-1, dtype=torch.float64)
    worst = float((sums - 1).abs().max())  # NaN if any is
    if not floats or not worst <= tolerance or least < -tolerance:
        raise ValueError(
            f"{name} ({probabilities.dtype}) holds values from {least:.3g} on, whose "
            f"sums over classes differ from 1 by up to {worst:.3g}; they must be "
            "probabilities (are these logits?)"
        )
    return probabilities.clamp(min=0).reshape(-1, *shape[-2:])


def entropy(p: Tensor) -> Tensor:
    """Compute the entropy of class probabilities ``(..., C)`` in nats, float64."""
    return torch.special.entr(p.double()).sum(-1)


def gaussians(
    means: Tensor, noise_scale: Tensor | float, name: str = "means"
) -> tuple[Tensor, Tensor]:
    """Check means and scales and return both as ``(S, N, D)`` in float64; means ``(N,
    D)`` are one member's.
    """
    shape = tuple(arguments.tensor(name, means).shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(
            f"{name} has shape {shape}; it must be (members, inputs, "
            "outputs) or (inputs, outputs). A "
            "single output needs an axis, too: means[..., None]"
        )
    means = means.double().reshape(-1, *shape[-2:])
    scale = torch.as_tensor(noise_scale, dtype=torch.float64, device=means.device)
    scale = scale[:, None, None] if scale.shape == means.shape[:1] else scale
    require_finite({name: means, "noise_scale": scale}, "predictions")
    least = float(scale.min())
    if least <= 0:
        raise ValueError(
            f"noise_scale must be positive, but its smallest value is {least:.3g}"
        )
    return means, scale.expand(means.shape)


def _classes(labels: Tensor, inputs: int, classes: int) -> Tensor:
    """Check labels and return them as int64."""
    arguments.tensor("labels", labels)
    allowed = torch.arange(classes, device=labels.device).to(labels)
    outside = labels[~torch.isin(labels, allowed)]
    if labels.shape != (inputs,) or len(outside):
        raise ValueError(
            f"labels has shape {tuple(labels.shape)} and holds {outside[:3].tolist()}; "
            f"it must be {inputs} whole numbers from 0 to {classes - 1}"
        )
    return labels.long()


def _uncertainties(members: Tensor) -> ByName:
    """Compute uncertainties ``(N,)`` by name; mutual information needs two members or
    more.
    """
    mean = members.mean(0, dtype=torch.float64)
    scores = {"maximum_probability": 1 - mean.amax(-1), "entropy": entropy(mean)}
    if len(members) > 1:
        scores["mutual_information"] = mutual_information(members)
    return scores


def _means(uncertainties: ByName) -> dict[str, float]:
    """Average the uncertainties that are in nats."""
    nats = drop_names(uncertainties, ["maximum_probability"])
    return {name: float(value.mean()) for name, value in nats.items()}


def _calibration_curve(confidence: Tensor, correct: Tensor, num_bins: int) -> Scores:
    """Bin predictions by confidence; compute the mean confidence and the accuracy of
    each bin.
    """
    confidence = confidence.cpu()
    correct = correct.cpu()
    edges = torch.linspace(0, 1, num_bins + 1, dtype=confidence.dtype, device="cpu")
    # Bins are closed on the left, as in torchmetrics; a confidence of exactly 1 is in
    # the last.
    index = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, num_bins - 1)
    count = torch.bincount(index, minlength=num_bins)
    return Scores(
        edges=edges,
        confidence=torch.bincount(index, confidence, num_bins) / count,
        accuracy=torch.bincount(index, correct, num_bins) / count,
        count=count,
    )
