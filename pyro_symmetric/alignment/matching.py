r"""Bring one posterior, or one network, as close as a symmetry allows to another.

.. math:: \min_{p \in G} W_2^2(p_\# q_1, q_0) = \|m_0 - p \cdot m_1\|^2 + \|s_0 - p \cdot s_1\|^2

for mean-field Gaussians with means :math:`m` and standard deviations :math:`s` (Rossi et al. 2023, arXiv 2310.10171,
section 4); for plain networks, :math:`s = 0`, it is weight matching (Ainsworth et al. 2023, arXiv 2209.04836). The
group is whatever :class:`~pyro_symmetric.symmetry.permutation.PermutationGroup` declares; no architecture is special.
Over several coupled layers the problem is NP-hard: what comes back is a local optimum, the best of several starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric.alignment.costs import COSTS, Cost
from pyro_symmetric.alignment.descent import Matcher
from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.symmetry.permutation import Permutation, PermutationGroup
from pyro_symmetric.symmetry.weights import require_finite


@dataclass(frozen=True)
class Alignment:
    """What :func:`align` found.

    :param permutation: the element ``p`` for which ``p(source)`` is close to the reference; on the source's device.
    :param cost: the cost that it attains, over all sites that the group knows, moved or not.
    :param initial_cost: the cost of the source as it came.
    :param history: the cost at the start of the best descent and after each of its accepted steps; it never rises.
    :param converged: whether that descent ended because no factor could improve, rather than by ``max_sweeps``.
    :param start_costs: the cost at the end of every descent: forward start first, then the restarts (and last a descent
        from the identity, made if all others ended above the initial cost).
    """

    permutation: Permutation
    cost: float
    initial_cost: float
    history: tuple[float, ...]
    converged: bool
    start_costs: tuple[float, ...]

    def __repr__(self) -> str:
        steps = "converged" if self.converged else "cut short"
        return (
            f"Alignment(cost={self.cost:.6g}, initial_cost={self.initial_cost:.6g}, {len(self.history) - 1} steps "
            f"({steps}), {len(self.start_costs)} starts, {self.permutation})"
        )


@torch.no_grad()
def align(
    source: Any,
    reference: Any,
    group: PermutationGroup,
    cost: str = "wasserstein",
    *,
    restarts: int = 3,
    max_sweeps: int = 100,
    tolerance: float = 1e-7,
    progress: bool = False,
) -> Alignment:
    """Find the element of ``group`` that brings ``source`` closest to ``reference``.

    >>> group = PermutationGroup.declare({"w": ("hidden", None)}, {"w": torch.zeros(3, 2)})
    >>> reference = {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])}
    >>> result = align({"w": reference["w"][[2, 0, 1]]}, reference, group)
    >>> result.cost, result.permutation["hidden"].tolist()
    (0.0, [1, 2, 0])

    :param source: weights (site -> tensor, without batch dimensions), :class:`GaussianWeights`, or a Gaussian guide
        (see :func:`~pyro_symmetric.alignment.gaussian.to_gaussian`).
    :param reference: likewise; moved to the source's device.
    :param group: the symmetry. Buffers (running statistics) and sites that it doesn't know are not looked at.
    :param cost: ``"wasserstein"`` (squared 2-Wasserstein distance of mean-field Gaussians), ``"l2"`` (squared distance
        of the means) or ``"kl"`` (``KL(p#source || reference)``); see :mod:`pyro_symmetric.alignment.costs`.
    :param restarts: further descents, each from the best matching so far with some units of one layer shuffled, drawn
        from PyTorch's generator. The best is kept. A group whose factors share no site is solved exactly without any.
    :param max_sweeps: how often one descent goes through the factors that wait at most.
    :param tolerance: a step is accepted if it lowers the cost by more than this part of the initial cost.
    :param progress: whether to show a progress bar over the restarts.
    :raises ValueError: naming the site, if the two don't fit each other or the group, or hold NaN or infinite values.
    :raises TypeError: if there are no Gaussian moments to read.
    """
    if cost not in COSTS:
        raise ValueError(f"cost is {cost!r}; it must be one of {list(COSTS)}")
    for name, number, least in (("restarts", restarts, 0), ("max_sweeps", max_sweeps, 1), ("tolerance", tolerance, 0)):
        if not number >= least:
            raise ValueError(f"{name} is {number}; it must be at least {least}")
    if not isinstance(group, PermutationGroup):
        raise TypeError(
            f"group is a {type(group).__name__}; it must be a PermutationGroup, e.g. find_symmetry(net, x).permutations"
        )
    terms = COSTS[cost]
    matcher = Matcher(group, *_moments(to_gaussian(source), to_gaussian(reference), group, terms), terms)
    identity = dict(group.identity(device=matcher.device).images)
    initial_cost = sum(matcher.costs(identity).values())
    descend = partial(matcher.descend, max_sweeps=max_sweeps, threshold=tolerance * abs(initial_cost))

    descents = [descend(*matcher.forward_start())]
    best = descents[0]
    count = 0 if matcher.separable else restarts
    for _ in tqdm(range(count), desc="align", disable=not (progress and count)):
        descents.append(descend(*matcher.kicked_start(best.images)))
        best = min(best, descents[-1], key=attrgetter("cost"))
    if best.cost > initial_cost:
        best = descend(identity, list(identity))
        descents.append(best)
    return Alignment(
        permutation=Permutation(group, best.images),
        cost=best.cost,
        initial_cost=initial_cost,
        history=best.history,
        converged=best.converged,
        start_costs=tuple(descent.cost for descent in descents),
    )


def _moments(
    source: GaussianWeights, reference: GaussianWeights, group: PermutationGroup, cost: Cost
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The moments of both, site by site, checked: ``(reference, source)``, each ``site_shape + (channels,)``."""
    moments: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    sites = _compared_sites(source, reference, group)
    # Of plain weights no deviations need to be carried along.
    spread = cost.needs_scale or any(bool(w.scale[site].any()) for w in (source, reference) for site in sites)
    for site in sites:
        _check_site(site, source, reference, group, cost)
        device, dtype = source.loc[site].device, _dtype(source.loc[site], reference.loc[site])
        for result, weights in zip(moments, (reference, source), strict=True):
            channels = [weights.loc[site], weights.scale[site]] if cost.uses_scale and spread else [weights.loc[site]]
            result[site] = torch.stack([channel.to(device, dtype) for channel in channels], -1)
    return moments


def _compared_sites(source: GaussianWeights, reference: GaussianWeights, group: PermutationGroup) -> list[str]:
    """The sites that count: those that the group knows, without buffers, held by both."""
    buffers = {site for site in group.sites if site not in group.required_sites}
    required = set(group.required_sites)
    sites = []
    for site in group.site_shapes:
        held = {"source": site in source.loc, "reference": site in reference.loc}
        if site in buffers or not (any(held.values()) or site in required):
            continue
        for name, holds in held.items():
            if not holds:
                found = sorted((source if name == "source" else reference).loc)
                raise ValueError(f"{name} lacks the site {site!r}, which alignment needs; it has {found}")
        sites.append(site)
    return sites


def _check_site(
    site: str, source: GaussianWeights, reference: GaussianWeights, group: PermutationGroup, cost: Cost
) -> None:
    moved = bool(group.members(site))
    for name, weights in (("source", source), ("reference", reference)):
        loc = weights.loc[site]
        bijection = weights.bijection(site)
        if bijection is not None and bijection.domain.event_dim and moved:
            raise ValueError(
                f"the group moves site {site!r} of {name}, whose support {weights.supports[site]} isn't mapped to "
                "unconstrained values element by element; its moments can't be permuted"
            )
        shape = group.site_shapes[site] if bijection is None else bijection.inverse_shape(group.site_shapes[site])
        if loc.shape != shape:
            batched = loc.dim() > len(shape) and loc.shape[loc.dim() - len(shape) :] == shape
            raise ValueError(
                f"{name}[{site!r}] has shape {tuple(loc.shape)}, but the group expects {tuple(shape)}"
                + ("; align takes one set of weights at a time, without batch dimensions" if batched else "")
            )
        require_finite({site: loc}, name)
        require_finite({site: weights.scale[site]}, f"scale of {name}")
        if cost.needs_scale and not bool((weights.scale[site] > 0).all()):
            raise ValueError(f"{name} has deviations of zero at site {site!r}; cost 'kl' needs them positive")
    if (site in source.supports) != (site in reference.supports):
        transformed, plain = ("source", "reference") if site in source.supports else ("reference", "source")
        support = (source if site in source.supports else reference).supports[site]
        raise ValueError(
            f"{transformed}[{site!r}] is unconstrained, as a guide has it, but {plain}[{site!r}] isn't: map it by "
            f"biject_to(support).inv and pass GaussianWeights(loc, scale, supports={{{site!r}: {support}}})"
        )


def _dtype(source: Tensor, reference: Tensor) -> torch.dtype:
    """The wider of both dtypes, and at least float32, in which inner products are meaningful."""
    return torch.promote_types(torch.promote_types(source.dtype, reference.dtype), torch.float32)
