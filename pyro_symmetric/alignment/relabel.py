r"""Relabel the draws of a mixture by what they say of the data: who belongs to whom (Stephens 2000).

With :math:`p_{sik}` the probability that observation ``i`` belongs to component ``k`` under draw ``s``, find

.. math:: \min_{\pi_1 \dots \pi_S,\, \bar p} \sum_s \sum_{ik} p_{s i \pi_s(k)} \log \frac{p_{s i \pi_s(k)}}{\bar p_{ik}}

by turns: :math:`\bar p` is the mean of the relabelled probabilities, and each draw's labels solve an assignment problem
given it. Neither raises the sum. Components that overlap in every parameter are told apart by the observations that
they explain, and no site's units of measurement enter.

Source: M. Stephens, "Dealing with label switching in mixture models", JRSS B 62(4), 2000, Algorithm 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.alignment.assignment import assign
from pyro_symmetric.alignment.elements import at_home
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior import Posterior

# How far the probabilities of an observation may be from a sum of one.
ROUNDING = 1e-3
# Gains below this part of the whole are those of rounding.
ROUNDED = 1e-10


@torch.no_grad()
def relabel(
    posterior: Posterior, group: Any, probabilities: Tensor, *, starts: int = 3, max_rounds: int = 50
) -> Posterior:
    """The same draws of a mixture, relabelled so that every observation keeps its component.

    >>> component = dist.Normal(locs[..., None, :], scales[..., None, :])
    >>> log_joint = weights.log()[..., None, :] + component.log_prob(x[:, None])
    >>> relabelled = ps.relabel(posterior, group, log_joint.softmax(-1))

    :param posterior: the draws.
    :param group: one set of units, the components, and the axes of all sites along which they lie.
    :param probabilities: ``(chains, draws, observations, components)``: how likely each observation belongs to each
        component, under each draw.
    :param starts: from how many random draws to start, besides the mean of all as they came; the best end is kept.
    :param max_rounds: how often to take the mean anew at most.
    :raises ValueError: if the group has other units or moves, or the probabilities don't fit or are none.
    """
    arguments.instance("posterior", posterior, Posterior, "a Posterior")
    group = group_of(group)
    name, components = _components(group)
    _check_probabilities(probabilities, posterior, components)
    arguments.whole("starts", starts, 1)
    arguments.whole("max_rounds", max_rounds, 1)
    draws = probabilities.detach().double().flatten(0, 1)
    random = draws[torch.randperm(len(draws), device=draws.device)[:starts]]
    means = [draws.mean(0), *(0.5 * (random + random.mean(-1, keepdim=True)))]
    labels, _ = min((_settled(draws, mean, max_rounds) for mean in means), key=lambda end: end[1])
    labels = at_home(group.element({name: labels}))[name]
    return posterior.map(group.element({name: labels.reshape(posterior.num_chains, posterior.num_samples, -1)}))


# small steps --------------------------------------------------------------------------------------------------------


def _settled(draws: Tensor, mean: Tensor, max_rounds: int) -> tuple[Tensor, float]:
    """Labels of all draws, ``(S, K)``, and their mean divergence but for the entropy, which no labels change.

    :param draws: ``(S, observations, K)``.
    :param mean: where to start.
    """
    least = math.inf
    for _ in range(max_rounds):
        scores = mean.clamp_min(torch.finfo(mean.dtype).tiny).log().mT @ draws
        labels = assign(scores)
        before, least = least, -float(scores.gather(-1, labels.unsqueeze(-1)).sum((-1, -2)).mean())
        if before - least <= ROUNDED * abs(least):
            break
        mean = draws.gather(-1, labels.unsqueeze(-2).expand_as(draws)).mean(0)
    return labels, least


def _components(group: Group) -> tuple[str, int]:
    if len(group.factors) != 1 or group.moves != {"permute"}:
        raise ValueError(
            f"group has the units {list(group.factors)} with {sorted(group.moves)}; it must permute one set, the "
            "components"
        )
    return next(iter(group.factors.items()))


def _check_probabilities(probabilities: Tensor, posterior: Posterior, components: int) -> None:
    expected = (posterior.num_chains, posterior.num_samples)
    shape = tuple(arguments.tensor("probabilities", probabilities).shape)
    if len(shape) != 4 or shape[:2] != expected or shape[3] != components or 0 in shape:
        raise ValueError(
            f"probabilities has shape {shape}; it must be (chains, draws, observations, components), here "
            f"({expected[0]}, {expected[1]}, observations, {components})"
        )
    if probabilities.is_complex():
        raise ValueError(f"probabilities are of {probabilities.dtype}; they must be real numbers")
    sums = probabilities.sum(-1)
    if not bool(((probabilities >= 0).all(-1) & ((sums - 1).abs() <= ROUNDING)).all()):
        raise ValueError(
            "probabilities hold values that are negative or NaN, or don't sum to one over components: pass the softmax "
            "of the components' log-densities"
        )
