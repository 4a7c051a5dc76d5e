r"""How much the members of an ensemble (or samples of a posterior) disagree in what they predict.

Mutual information between prediction and member (BALD; Depeweg et al. 2018, arXiv 1710.07283, equation 3) is the
entropy of the mean prediction minus the mean entropy of the predictions,

.. math:: I = H\Big[\frac{1}{S} \sum_s p_s\Big] - \frac{1}{S} \sum_s H[p_s] \in [0, \log \min(S, C)],

zero where all members predict alike. Of two members it is their Jensen-Shannon divergence, at most log 2; where many
pairs are close to 0 the ensemble has collapsed in function space (Laurent et al. 2024, section 5). All entropies in
nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_ENTRIES = 2**22


def predictive_entropy(probabilities: Tensor) -> Tensor:
    """Entropy of the members' mean prediction: the total uncertainty.

    :param probabilities: ``(S, ..., C)``, members first, classes last.
    :returns: ``(...)`` in nats, float64.
    """
    return _entropy(_checked(probabilities).mean(0, dtype=torch.float64))


def mean_entropy(probabilities: Tensor) -> Tensor:
    """Mean entropy of the members' predictions: the uncertainty that no member resolves.

    :param probabilities: ``(S, ..., C)``, members first, classes last.
    :returns: ``(...)`` in nats, float64.
    """
    return _entropy(_checked(probabilities)).mean(0)


def mutual_information(probabilities: Tensor) -> Tensor:
    """Mutual information between prediction and member, for each input.

    >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))  # two members that are sure of different classes
    tensor([0.6931], dtype=torch.float64)

    :param probabilities: ``(S, ..., C)``, members first, classes last.
    :returns: ``(...)`` in nats, float64, never negative.
    """
    return (predictive_entropy(probabilities) - mean_entropy(probabilities)).clamp(min=0)


@torch.no_grad()
def pairwise_mutual_information(probabilities: Tensor, *, chunk: int | None = None) -> Tensor:
    """Mutual information of every pair of members, averaged over inputs.

    The time is that of ``S² N C / 2`` logarithms. Pairs are taken in blocks; the result alone has S² entries.

    :param probabilities: ``(S, N, C)``.
    :param chunk: how many numbers a temporary may hold, about 4 million by default.
    :returns: ``(S, S)``, symmetric, in [0, log 2] nats with a zero diagonal, float64.
    """
    p = _checked(probabilities).double()
    if p.dim() != 3 or p.shape[1] == 0:
        raise ValueError(f"probabilities has shape {tuple(p.shape)}; pairs of members need (members, inputs, classes)")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}; it counts numbers and must be at least 1")
    members, inputs, classes = p.shape
    flat = p.reshape(members, -1)
    own = _entropy(p).sum(1)
    result = p.new_zeros(members, members)
    budget = chunk or _CHUNK_ENTRIES
    width = max(1, min(inputs * classes, budget // members))  # columns of the flattened predictions
    rows = max(1, budget // (members * width))
    for first in range(0, members, rows):
        last = min(first + rows, members)
        for start in range(0, flat.shape[1], width):
            columns = slice(start, start + width)
            # the pairs (i, j) with j >= first suffice; the rest follows by symmetry
            middle = (flat[first:last, None, columns] + flat[None, first:, columns]) / 2
            result[first:last, first:] += torch.special.entr(middle).sum(-1)
        result[first:last, first:] -= (own[first:last, None] + own[first:]) / 2
    upper = (result / inputs).triu(1).clamp(min=0)
    return upper + upper.T


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p.double()).sum(-1)


def _checked(probabilities: Tensor) -> Tensor:
    if probabilities.dim() < 2 or 0 in (probabilities.shape[0], probabilities.shape[-1]):
        raise ValueError(f"probabilities has shape {tuple(probabilities.shape)}; it must be (members, ..., classes)")
    return check_probabilities(probabilities, "probabilities")


def check_probabilities(probabilities: Tensor, name: str) -> Tensor:
    """:raises ValueError: unless the last axis holds probabilities: finite, not negative, summing to one."""
    if not probabilities.is_floating_point():
        raise ValueError(f"{name} has dtype {probabilities.dtype}; probabilities are floating-point numbers")
    bad = int((~torch.isfinite(probabilities)).sum())
    if bad:
        raise ValueError(f"{name} holds {bad} NaN or infinite values")
    # rounding of a softmax in this precision, generously
    tolerance = max(1e-6, 32 * torch.finfo(probabilities.dtype).eps)
    if probabilities.numel() and float(probabilities.min()) < -tolerance:
        raise ValueError(
            f"{name} holds {float(probabilities.min()):.3g}; no probability is negative (are these logits?)"
        )
    sums = probabilities.sum(-1, dtype=torch.float64)
    worst = float((sums - 1).abs().max()) if sums.numel() else 0.0
    if worst > tolerance:
        raise ValueError(f"the last axis of {name} must sum to 1, but is off by up to {worst:.3g} (are these logits?)")
    return probabilities.clamp(min=0)
