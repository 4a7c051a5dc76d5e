r"""Disagreement of an ensemble's members (or of a posterior's samples) in their predictions.

Mutual information between prediction and member (BALD; Depeweg et al. 2018, arXiv 1710.07283, equation 3) is the
entropy of the mean prediction minus the mean entropy of the predictions,

.. math:: I = H\Big[\frac{1}{S} \sum_s p_s\Big] - \frac{1}{S} \sum_s H[p_s] \in [0, \log \min(S, C)],

zero if all members predict alike. Of two members it is their Jensen-Shannon divergence, at most log 2; if many
pairs are close to 0 the ensemble has collapsed in function space (Laurent et al. 2024, section 5). All entropies in
nats.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments


def mutual_information(probabilities: Tensor) -> Tensor:
    """Mutual information between prediction and member, for each input.

    >>> mutual_information(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))  # two members that are sure of different classes
    tensor([0.6931], dtype=torch.float64)

    :param probabilities: ``(S, N, C)``, members first, classes last.
    :returns: ``(N,)`` in nats, float64, never negative.
    """
    p = members_of(probabilities)
    return (entropy(p.mean(0, dtype=torch.float64)) - entropy(p).mean(0)).clamp(min=0)


@torch.no_grad()
def pairwise_mutual_information(probabilities: Tensor, name: str = "probabilities") -> Tensor:
    """Mutual information of every pair of members, averaged over inputs.

    The time is that of ``S² N C / 2`` logarithms; one member is compared with all later ones at a time.

    :param probabilities: ``(S, N, C)``.
    :param name: what messages call them.
    :returns: ``(S, S)``, symmetric, in [0, log 2] nats with a zero diagonal, float64.
    """
    p = members_of(probabilities, name).double()
    members, inputs, _ = p.shape
    flat, own = p.flatten(1), entropy(p).sum(1)
    result = p.new_zeros(members, members)
    for k in range(members):
        result[k, k:] = torch.special.entr((flat[k] + flat[k:]) / 2).sum(-1) - (own[k] + own[k:]) / 2
    upper = (result / inputs).triu(1).clamp(min=0)
    return upper + upper.T


class FunctionalCollapse(NamedTuple):
    """Similarity of an ensemble's members as functions; see :func:`functional_collapse`.

    :param within: mutual information of every pair of members on inputs from the distribution, ``(pairs,)`` in nats.
    :param outside: the same on inputs from elsewhere.
    :param correlation: Pearson's correlation of the two over pairs; NaN if one of them is constant.
    :param rank_correlation: Spearman's.
    """

    within: Tensor
    outside: Tensor
    correlation: float
    rank_correlation: float


@torch.no_grad()
def functional_collapse(probabilities: Tensor, ood_probabilities: Tensor) -> FunctionalCollapse:
    """Compare the members' disagreement on the data with that elsewhere: pairwise mutual information in and out
    of distribution, and its correlation over pairs (Laurent et al. 2024, figures 3 and 15).

    >>> probabilities = torch.randn(4, 20, 3).softmax(-1)  # four members at 20 inputs
    >>> result = ps.compare.functional_collapse(probabilities, torch.randn(4, 50, 3).softmax(-1))
    >>> result.within.shape, result.outside.shape  # of six pairs
    (torch.Size([6]), torch.Size([6]))

    :param probabilities: predictions for inputs from the distribution, ``(S, N, C)``.
    :param ood_probabilities: the same members' for inputs from elsewhere, ``(S, M, C)``.
    :raises ValueError: with fewer than 3 members, or if the members differ in number.
    """
    from scipy.stats import rankdata  # which takes a quarter of a second to load

    within = pairwise_mutual_information(probabilities)
    outside = pairwise_mutual_information(ood_probabilities, "ood_probabilities").to(within.device)
    if len(within) != len(outside) or len(within) < 3:
        raise ValueError(
            f"probabilities holds {len(within)} members and ood_probabilities {len(outside)}; both must be predictions "
            "of the same members, at least 3"
        )
    first, second = torch.triu_indices(len(within), len(within), 1, device=within.device)
    pairs = torch.stack([within[first, second], outside[first, second]])
    ranks = torch.from_numpy(rankdata(pairs.cpu().numpy(), axis=1))
    return FunctionalCollapse(*pairs, *(float(torch.corrcoef(rows)[0, 1]) for rows in (pairs, ranks)))


def members_of(probabilities: Any, name: str = "probabilities") -> Tensor:
    """Class probabilities ``(members, inputs, classes)``, checked; without an axis of members, those of one.

    :raises ValueError: if their shape is another, or the last axis holds no probabilities.
    """
    shape = tuple(arguments.tensor(name, probabilities).shape)
    if len(shape) not in (2, 3) or 0 in shape or shape[-1] < 2:
        raise ValueError(
            f"{name} has shape {shape}; it must be (members, inputs, classes) or (inputs, classes), of two classes or "
            "more"
        )
    # rounding of a softmax in this precision, generously
    floats = probabilities.is_floating_point()
    tolerance = max(1e-6, 32 * torch.finfo(probabilities.dtype).eps) if floats else 0.0
    worst = float((probabilities.sum(-1, dtype=torch.float64) - 1).abs().max())  # NaN if any is
    if not floats or not worst <= tolerance or float(probabilities.min()) < -tolerance:
        raise ValueError(
            f"{name} ({probabilities.dtype}) holds values from {float(probabilities.min()):.3g} to "
            f"{float(probabilities.max()):.3g}, whose sums over classes are off 1 by up to {worst:.3g}; they must be "
            "probabilities (are these logits?)"
        )
    return probabilities.clamp(min=0) if len(shape) == 3 else probabilities.clamp(min=0)[None]


def entropy(p: Tensor) -> Tensor:
    """The entropy of class probabilities ``(..., C)`` in nats, float64."""
    return torch.special.entr(p.double()).sum(-1)
