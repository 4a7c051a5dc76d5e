r"""Bring many posteriors, networks or draws into one frame, without a privileged member.

.. math:: \min_{g_1 \dots g_S \in G} \sum_k W_2^2(g_{k\#} q_k, \bar q), \qquad
    \bar q = \arg\min_q \sum_k W_2^2(g_{k\#} q_k, q)

For mean-field Gaussians the Wasserstein barycentre :math:`\bar q` has the mean of the means and the mean of the
standard deviations. Aligning every member to the barycentre and taking the barycentre anew never raises the sum; this
goes on until nothing changes. Then, of few members, each is aligned in turn to the barycentre of the others, which lets
go of what a member found only because it is part of the barycentre itself.

Many draws can be told apart better: by the density that each has under independent Gaussians fitted to all of them,

.. math:: \max_{g_1 \dots g_S \in G,\, m,\, s} \sum_k \log \mathcal N(g_k w_k;\ m, s^2),

which counts every weight by its own spread within its label, so that sites of large numbers don't decide alone. But
Gaussians fitted to mixed labels are as wide as the mixture, and from there the descent may end with labels mixed. So it
starts from where distances are least, and from a random draw, measured by the spread of all; the better end is kept.
The labels of the common frame are those in which most members came.

As every member has an element of its own, the maps between members, :math:`g_i^{-1} g_j`, agree around every cycle;
aligned pair by pair they need not (Crisostomi et al. 2024, arXiv 2405.17897).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.alignment.costs.weights import WeightCost
from pyro_symmetric.alignment.elements import at_home, on_device, shaped
from pyro_symmetric.alignment.gaussian import GaussianWeights, moved_to
from pyro_symmetric.alignment.matching import BAR_DELAY, COSTS, require_fit
from pyro_symmetric.alignment.members import Members, read_members
from pyro_symmetric.alignment.moments import comparable, moments_of
from pyro_symmetric.alignment.rounds import Rounds
from pyro_symmetric.discovery.model_check import require_of_posterior
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior import Posterior

Objective = Literal["gaussian", "wasserstein", "l2"]

# How many draws tell the spread of every weight well enough to measure by it.
MANY = 100
# Ends that differ by less than this part are the same.
SAME = 1e-3
# Rounds by distances before those by densities: a start needn't be an end.
NEAR_ROUNDS = 3


@dataclass(frozen=True)
class Frame:
    """The result of :func:`align_many`.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> frame = ps.align_many([{"w": torch.tensor([1.0, 2.0, 3.0])}, {"w": torch.tensor([3.0, 1.0, 2.0])}], group)
    >>> isinstance(frame, ps.alignment.Frame), frame.cost.tolist(), frame.converged
    (True, [0.0, 0.0], True)
    >>> torch.equal(frame.aligned[0]["w"], frame.aligned[1]["w"])
    True

    :param element: one element for each member, a batch of the members' shape: ``(S,)`` for a list or a batch,
        ``(chains, draws)`` or ``(chains, 1)`` for a posterior.
    :param aligned: the members moved: a list for a list, with networks for networks, else as they came.
    :param barycentre: means and standard deviations of the Wasserstein barycentre.
    :param cost: squared distance of each member to it, float64 ``(S,)``, on the CPU; under ``"gaussian"`` minus the
        log-density.
    :param history: the mean of these costs as the members came, then after each round that lies below; it never rises.
    :param converged: whether it ended because nothing changed, rather than by ``max_rounds``.
    :param objective: which cost was minimised: ``"gaussian"``, ``"wasserstein"`` or ``"l2"``.
    :param ends: the mean cost at the end of each start, of which the lowest was kept.
    """

    element: Element
    aligned: Any
    barycentre: GaussianWeights
    cost: Tensor
    history: tuple[float, ...]
    converged: bool
    objective: str = "wasserstein"
    ends: tuple[float, ...] = ()

    @property
    def starts_agree(self) -> bool:
        """True if all starts ended at the same cost, to one part in a thousand: then it is hardly a local optimum."""
        return all(math.isclose(end, min(self.ends), rel_tol=SAME) for end in self.ends)

    @property
    def displaced(self) -> Tensor:
        """Members that did not come in the copy in which most came, bool, of the element's batch shape, on the CPU."""
        here = self.element.group.identity()
        result = torch.zeros(self.element.batch_shape, dtype=torch.bool, device="cpu")
        for mine, neutral in ((self.element.permutations, here.permutations), (self.element.signs, here.signs)):
            for name, value in mine.items():
                different = value != neutral[name].to(value)
                result |= different.flatten(len(result.shape)).any(-1).cpu()
        return result

    @property
    def posterior(self) -> Posterior:
        """The aligned posterior, if a posterior was given."""
        if not isinstance(self.aligned, Posterior):
            raise ValueError("align_many was not given a Posterior; .aligned holds what it was given, moved")
        return self.aligned

    def __repr__(self) -> str:
        steps = "converged" if self.converged else "cut short"
        ends = "" if self.starts_agree else f"; starts disagree, they end at {', '.join(f'{e:.4g}' for e in self.ends)}"
        return (
            f"Frame({self.cost.numel()} members, mean cost {self.history[0]:.6g} -> {self.history[-1]:.6g}, "
            f"{len(self.history) - 1} rounds, {steps}{ends})"
        )


@torch.no_grad()
def align_many(
    sources: Sequence[Any] | Mapping[str, Tensor] | GaussianWeights | Posterior,
    group: Any,
    *,
    cost: Objective | None = None,
    each: Literal["draw", "chain"] = "draw",
    restarts: int = 1,
    max_rounds: int = 50,
    max_sweeps: int = 100,
    tolerance: float = 1e-6,
    seed: int | None = None,
    progress: bool = True,
) -> Frame:
    """Bring many sets of weights into one frame.

    >>> group = ps.Group.declare({"w": ("h",)}, {"w": torch.zeros(3)})
    >>> weights = {"w": torch.tensor([[1.0, 2.0, 3.0], [3.1, 1.1, 2.1], [2.2, 3.2, 1.2]])}
    >>> frame = ps.align_many(weights, group)
    >>> bool(frame.aligned["w"].std(0).max() < 0.2)
    True

    *Scales.* Scales that no weight makes up for (in front of batch normalisation) stay as they are: in a common frame
    all would shrink together. Remove them by ``canonicalize``.

    :param sources: a ``Posterior``, or site -> samples ``(samples, *site_shape)``; or a list of what
        :func:`~pyro_symmetric.alignment.align` takes. On any device: their moments come to the CPU once, and results
        are where they are.
    :param group: the symmetry.
    :param cost: ``"wasserstein"``; ``"l2"`` to look at the means alone; ``"gaussian"``, the density under Gaussians
        fitted to all members, weight by weight. ``None``: ``"gaussian"`` of 100 draws or more under a group without
        scales, else ``"wasserstein"``.
    :param each: of a ``Posterior``, whether each draw or each chain (by its moments) gets an element of its own.
    :param restarts: further starts, each from all members aligned to a random one; the best end is kept.
    :param max_rounds: how often to go to the new barycentre at most.
    :param max_sweeps: as in ``align``.
    :param tolerance: it ends when a round lowers the mean cost by less than this part.
    :param seed: of the random choices; ``None``: they are drawn from PyTorch's generator.
    :param progress: whether to show a progress bar over starts, if they take more than two seconds.
    :raises ValueError: for an empty list, naming the member and the site that doesn't fit, or if the model that a
        posterior was drawn from lacks a declared group.
    """
    arguments.one_of("cost", cost, [None, *get_args(Objective)])
    arguments.whole("restarts", restarts, 0)
    arguments.whole("max_rounds", max_rounds, 1)
    arguments.whole("max_sweeps", max_sweeps, 1)
    arguments.number("tolerance", tolerance, least=0)
    arguments.whole("seed", seed, 0, none="random choices from PyTorch's generator")
    require_of_posterior(group, sources)
    group = _two_sided(group_of(group))
    members = read_members(sources, group, each)
    objective = _objective(cost, members, group)
    kind = COSTS[objective]
    (moments,) = moments_of([members.gaussian], members.sites, group, kind)
    if objective == "gaussian":  # squares of weights must tell their spread
        moments = {site: value.double() for site, value in moments.items()}
    rounds = Rounds(group, kind, moments, max_sweeps, tolerance)
    near = Rounds(group, WeightCost, moments, max_sweeps, tolerance) if objective == "gaussian" else None
    with (
        contextlib.nullcontext() if seed is None else forked(seed),
        tqdm(total=1 + restarts, desc="align many", unit="start", disable=not progress, delay=BAR_DELAY) as bar,
    ):
        starts = [rounds.aligned_to_one for _ in range(1 + restarts)]
        if near:
            starts[0] = lambda: near.settle(near.aligned_to_one(), NEAR_ROUNDS).element
        settled = []
        for start in starts:
            settled.append(rounds.settle(start(), max_rounds))
            bar.update()
        best = min(settled, key=lambda one: one.cost)
        if best.cost > rounds.given:  # the members came in a better frame than a start from any one of them finds
            best = rounds.settle(rounds.identity(), max_rounds)
    element = shaped(at_home(best.element), group, rounds.shifts, members.element_shape)
    gaussian = members.gaussian_after(element)
    every = tuple(range(len(members.element_shape)))
    barycentre = gaussian.each(lambda value: value.to(torch.promote_types(value.dtype, torch.float32)).mean(every))
    element = on_device(element, members.device)
    return Frame(
        element,
        members.after(element, gaussian),
        moved_to(barycentre, members.device),
        rounds.costs(best.element),
        (rounds.given, *(cost for cost in best.history if cost < rounds.given)),
        best.converged,
        objective,
        tuple(one.cost for one in settled),
    )


# small steps --------------------------------------------------------------------------------------------------------


def _objective(cost: Objective | None, members: Members, group: Group) -> Objective:
    if cost is not None:
        require_fit(COSTS[cost], group)
        return cost
    many = members.are_draws and members.count >= MANY and not group.names("scale")
    return "gaussian" if many else "wasserstein"


def _two_sided(group: Group) -> Group:
    """Leave out scales that enter the compared sites with exponents of one sign only."""
    sites = set(comparable(group))
    exponents = {n: [a.exponent for a in group.axes(n) if a.site in sites and a.exponent] for n in group.names("scale")}
    return group.without([n for n, own in exponents.items() if not own or min(own) > 0 or max(own) < 0], "scale")
