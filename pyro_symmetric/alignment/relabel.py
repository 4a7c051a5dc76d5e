r"""Relabel the draws of a mixture by their allocation probabilities (Stephens's
algorithm).

With :math:`p_{sik}` the probability that observation ``i`` belongs to component ``k``
under draw ``s``, the labels
:math:`\pi_s` of all draws minimise the divergence from the mean allocation :math:`\bar
    p`,

.. math:: \min_{\pi_1 \dots \pi_S,\, \bar p} \sum_s \sum_{ik} p_{s i \pi_s(k)} \log
    \frac{p_{s i \pi_s(k)}}{\bar p_{ik}}.

The algorithm alternates between the mean of the relabelled probabilities and an
assignment problem for each draw; no step raises the sum. Components that overlap in
every parameter are told apart by the observations that they explain.

Source: M. Stephens, "Dealing with label switching in mixture models", JRSS B 62(4),
2000, Algorithm 2.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.alignment.assignment import assign
from pyro_symmetric.alignment.elements import recentre
from pyro_symmetric.discovery.model_carried import AUTO, carried_symmetry
from pyro_symmetric.groups import Group
from pyro_symmetric.posterior.posterior import Draws, Posterior, chains_of

# How far the sum of an observation's probabilities may be from one.
SUM_TOLERANCE = 1e-3
# Relative gains below this are rounding.
ROUNDING = 1e-10
# The most updates of the mean.
MAX_ROUNDS = 50


@torch.no_grad()
def relabel(
    posterior: Draws,
    symmetry: Any = AUTO,
    probabilities: Tensor | None = None,
    *,
    starts: int = 3,
) -> Posterior:
    """Relabel the draws of a mixture so that every observation keeps its component.

    >>> x, locs = (
    ...     torch.tensor([-4.0, -3.0, 5.0]),
    ...     torch.tensor([-3.5, 5.0]) + 0.1 * torch.randn(2, 50, 2),
    ... )
    >>> locs[1] = locs[1].flip(
    ...     -1
    ... )  # the second chain has the components in the other order
    >>> posterior = ps.Posterior({"locs": locs}, kind="chains")
    >>> group = ps.Group.declare({"locs": ("k",)}, {"locs": torch.zeros(2)})
    >>> log_joint = dist.Normal(locs[..., None, :], 1.0).log_prob(x[:, None])
    >>> relabelled = ps.relabel(posterior, group, log_joint.softmax(-1))
    >>> bool(
    ...     relabelled.samples["locs"].std((0, 1)).max()
    ...     < 0.5
    ...     < posterior.samples["locs"].std((0, 1)).min()
    ... )
    True

    :param posterior: a ``Posterior``, or site -> chains ``(chains, draws,
        *site_shape)``.
    :param symmetry: permutations of one set of units, the components. ``"auto"``: those
        of the posterior's model, of as many units as there are components; without any,
        draws stay as they are, with a warning.
    :param probabilities: allocation probabilities ``(chains, draws, observations,
        components)``, or sampled allocations, one-hot.
    :param starts: the number of random draws to start from, besides the mean of all;
        the best result is kept.
    :raises ValueError: if the group has other units or moves, or the probabilities
        don't fit or are invalid.
    """
    if probabilities is None:
        raise ValueError(
            "probabilities is missing; it must be (chains, draws, observations, "
            "components), the allocation probabilities"
        )
    carried = carried_symmetry(symmetry, posterior)
    group = carried.group
    posterior = chains_of(posterior, shapes=group.site_shapes)
    if carried.is_found:
        group = _of_components(group, probabilities.shape[-1])
    if symmetry is None or (carried.is_found and not group.units):
        line = carried.line or "the model has no components that permute"
        warnings.warn(f"nothing is relabelled: {line}", stacklevel=3)
        return posterior
    if len(group.factors) != 1 or group.moves != {"permute"}:
        raise ValueError(
            f"symmetry has the units {list(group.factors)} with "
            f"{sorted(group.moves)}; it must permute one set, the components"
        )
    ((name, components),) = group.factors.items()
    shape = tuple(probabilities.shape)
    chains = posterior.num_chains
    draws = posterior.num_samples
    if (
        len(shape) != 4
        or (*shape[:2], shape[3]) != (chains, draws, components)
        or 0 in shape
    ):
        raise ValueError(
            f"probabilities has shape {shape}; it must be (chains, draws, "
            "observations, components), here "
            f"({chains}, {draws}, observations, {components})"
        )
    sums = probabilities.sum(-1)
    if not ((probabilities >= 0).all(-1) & ((sums - 1).abs() <= SUM_TOLERANCE)).all():
        raise ValueError(
            "probabilities hold values that are negative or NaN, or don't sum to one "
            "over components: pass the softmax "
            "of the components' log-densities"
        )
    flat = probabilities.detach().double().flatten(0, 1)
    random = flat[torch.randperm(len(flat), device=flat.device)[:starts]]
    means = [flat.mean(0), *(0.5 * (random + random.mean(-1, keepdim=True)))]
    labels, _ = min(
        (_relabelled(flat, mean) for mean in means), key=lambda result: result[1]
    )
    labels = recentre(group.element({name: labels}))[name]
    return posterior.map(group.element({name: labels.reshape(chains, draws, -1)}))


def _of_components(group: Group, count: int) -> Group:
    """Return the permutations of the units of a found group that are as many as the
    components.
    """
    permutations = group.permutations
    sizes = permutations.factors
    return permutations.only([name for name in sizes if sizes[name] == count])


def _relabelled(draws: Tensor, mean: Tensor) -> tuple[Tensor, float]:
    """Alternate between labels and mean; return the labels ``(S, K)`` and the mean
    cross-entropy with the mean.

    :param draws: ``(S, observations, K)``.
    :param mean: the allocation to start from, ``(observations, K)``.
    """
    least = math.inf
    for _ in range(MAX_ROUNDS):
        # Minus the divergence from the mean, up to the draws' entropies, which no
        # labels change.
        scores = mean.clamp_min(torch.finfo(mean.dtype).tiny).log().mT @ draws
        labels = assign(scores)
        before = least
        least = -float(scores.gather(-1, labels.unsqueeze(-1)).sum((-1, -2)).mean())
        if before - least <= ROUNDING * abs(least):
            break
        mean = draws.gather(-1, labels.unsqueeze(-2).expand_as(draws)).mean(0)
    return labels, least
