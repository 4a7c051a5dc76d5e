r"""Disagreement of an ensemble's members (or of a posterior's samples) in their predictions.

Mutual information between prediction and member (BALD; Depeweg et al. 2018, arXiv 1710.07283, equation 3) is the
entropy of the mean prediction minus the mean entropy of the predictions,

.. math:: I = H\Big[\frac{1}{S} \sum_s p_s\Big] - \frac{1}{S} \sum_s H[p_s] \in [0, \log \min(S, C)],

zero if all members predict alike. Of two members it is their Jensen-Shannon divergence, at most log 2; if many
pairs are close to 0 the ensemble has collapsed in function space (Laurent et al. 2024, section 5). All entropies in
nats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.compare.results import plain, table

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
    return _pairwise(probabilities, "probabilities", chunk)


def _pairwise(probabilities: Tensor, name: str, chunk: int | None) -> Tensor:
    p = _checked(probabilities, name).double()
    if p.dim() != 3 or p.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(p.shape)}; pairs of members need (members, inputs, classes)")
    arguments.whole("chunk", chunk, 1, none="about 4 million")
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


@dataclass(frozen=True, eq=False)
class FunctionalCollapse:
    """Similarity of an ensemble's members as functions; see :func:`functional_collapse`.

    :param within: mutual information of every pair of members on inputs from the distribution, ``(S, S)`` in nats.
    :param outside: the same on inputs from elsewhere, ``(S, S)``.
    :param correlation: Pearson's correlation of the two over pairs; NaN if one of them is constant.
    :param rank_correlation: Spearman's.
    """

    within: Tensor
    outside: Tensor
    correlation: float
    rank_correlation: float

    def below(self, threshold: float) -> tuple[float, float]:
        """The share of pairs with less mutual information than ``threshold`` nats: within, outside."""
        within, outside = (_pairs(values) for values in (self.within, self.outside))
        return float((within < threshold).double().mean()), float((outside < threshold).double().mean())

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: summaries over pairs."""
        result: dict[str, Any] = {}
        for name, values in (("within", _pairs(self.within)), ("outside", _pairs(self.outside))):
            result[name] = {
                "mean": float(values.mean()),
                "median": float(values.median()),
                "minimum": float(values.min()),
                "maximum": float(values.max()),
            }
        return result | {
            "members": len(self.within),
            "correlation": plain(self.correlation),
            "rank_correlation": plain(self.rank_correlation),
        }

    def __repr__(self) -> str:
        rows: list[tuple[str, ...]] = [("inputs", "mean", "median", "minimum", "maximum")]
        summary = self.to_dict()
        rows += [(name, *(f"{v:.3g}" for v in summary[name].values())) for name in ("within", "outside")]
        head = f"Pairwise mutual information of {len(self.within):,} members in nats (collapsed at 0, log 2 at most)"
        return f"{head}\n{table(rows)}\n  correlation {self.correlation:.3f}, of ranks {self.rank_correlation:.3f}"


@torch.no_grad()
def functional_collapse(
    probabilities: Tensor, ood_probabilities: Tensor, *, chunk: int | None = None
) -> FunctionalCollapse:
    """Compare the members' disagreement on the data with that elsewhere: pairwise mutual information in and out
    of distribution, and its correlation over pairs (Laurent et al. 2024, figures 3 and 15).

    >>> probabilities = torch.randn(4, 20, 3).softmax(-1)  # four members at 20 inputs
    >>> result = ps.functional_collapse(probabilities, torch.randn(4, 50, 3).softmax(-1))
    >>> result.within.shape, result.outside.shape
    (torch.Size([4, 4]), torch.Size([4, 4]))

    :param probabilities: predictions for inputs from the distribution, ``(S, N, C)``.
    :param ood_probabilities: the same members' for inputs from elsewhere, ``(S, M, C)``.
    :param chunk: see :func:`pairwise_mutual_information`.
    :raises ValueError: with fewer than 3 members, or if the members differ in number.
    """
    within = _pairwise(probabilities, "probabilities", chunk)
    outside = _pairwise(ood_probabilities, "ood_probabilities", chunk).to(within.device)
    if len(within) != len(outside) or len(within) < 3:
        raise ValueError(
            f"probabilities holds {len(within)} members and ood_probabilities {len(outside)}; both must be predictions "
            "of the same members, at least 3"
        )
    x, y = _pairs(within), _pairs(outside)
    return FunctionalCollapse(within, outside, _correlation(x, y), _correlation(_ranks(x), _ranks(y)))


# small steps --------------------------------------------------------------------------------------------------------


def _pairs(matrix: Tensor) -> Tensor:
    first, second = torch.triu_indices(len(matrix), len(matrix), 1, device=matrix.device)
    return matrix[first, second]


def _correlation(x: Tensor, y: Tensor) -> float:
    """Pearson's; NaN if one of them is constant."""
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def _ranks(values: Tensor) -> Tensor:
    """Ranks, those of ties averaged."""
    from scipy.stats import rankdata  # which takes a quarter of a second to load

    return torch.from_numpy(rankdata(values.cpu().numpy())).to(values.device)


def _entropy(p: Tensor) -> Tensor:
    return torch.special.entr(p.double()).sum(-1)


def _checked(probabilities: Tensor, name: str = "probabilities") -> Tensor:
    arguments.tensor(name, probabilities)
    if probabilities.dim() < 2 or 0 in (probabilities.shape[0], probabilities.shape[-1]):
        raise ValueError(f"{name} has shape {tuple(probabilities.shape)}; it must be (members, ..., classes)")
    return _require_probabilities(probabilities, name)


def members_of(probabilities: Any, name: str) -> Tensor:
    """Class probabilities ``(members, inputs, classes)``; without an axis of members, those of one.

    :raises ValueError: if their shape is another, or the last axis holds no probabilities.
    """
    shape = tuple(arguments.tensor(name, probabilities).shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(f"{name} has shape {shape}; it must be (members, inputs, classes) or (inputs, classes)")
    if shape[-1] < 2:
        raise ValueError(f"{name} has shape {shape}: one class only; there must be at least 2")
    checked = _require_probabilities(probabilities, name)
    return checked if checked.dim() == 3 else checked[None]


def _require_probabilities(probabilities: Tensor, name: str) -> Tensor:
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
