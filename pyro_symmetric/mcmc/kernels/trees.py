r"""Trajectories that double: what they consist of, and the arithmetic of their growth, for ``A`` chains at once.

A trajectory doubles, forwards or backwards in time at random, until it turns back on itself: until for one of its
balanced subtrees, with first and last momenta :math:`p_-, p_+` and sum of momenta :math:`\rho`,

.. math:: p_-^\top M^{-1} \rho \le 0 \quad\text{or}\quad p_+^\top M^{-1} \rho \le 0,

also checked, as Stan does, between each half and the nearest state of the other one. States are drawn with weights
:math:`e^{-H}`: fairly within the new half, with a bias towards the new half between the two (Betancourt 2017, arXiv
1701.02434, appendix A.3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.mcmc.kernels.integrator import MAX_ENERGY_ERROR, PhasePoint, choose, energy_error
from pyro_symmetric.mcmc.kernels.mass import Mass


class Span(NamedTuple):
    """A balanced tree's momenta, in the order in which they were visited."""

    first: Tensor  # (A, D)
    last: Tensor
    total: Tensor


class Cost(NamedTuple):
    """The cost of a trajectory so far, ``(A,)`` each."""

    steps: Tensor
    acceptance: Tensor  # sum over the steps
    diverging: Tensor


class Tree(NamedTuple):
    """A trajectory, between doublings."""

    start_energy: Tensor  # (A,), total
    chain: Tensor  # (A,), which of all chains it is
    step: Tensor  # (A, 1), its step size
    left: PhasePoint
    right: PhasePoint
    momenta: Tensor  # their sum, (A, D)
    log_weight: Tensor  # log of the sum of exp(start energy - energy), (A,)
    draw: PhasePoint  # the state that is drawn from it so far
    cost: Cost
    depth: Tensor  # (A,)
    growing: Tensor  # (A,), whether it may double


class Branch(NamedTuple):
    """The half that is added by a doubling, while it grows."""

    valid: Tensor  # (A,), whether it has neither turned nor diverged
    step: Tensor  # (A, 1), negative where it grows backwards in time
    end: PhasePoint
    log_weight: Tensor  # as above
    draw: PhasePoint


# growth ---------------------------------------------------------------------------------------------------------------


def planted(at: PhasePoint, noise: Tensor, step: Tensor, mass: Mass) -> Tree:
    """Trajectories of a single state, with momenta of standard normal noise ``(A, D)``."""
    start = at._replace(momentum=mass.momentum(noise))
    energy = start.total_energy(mass)
    zero = torch.zeros_like(energy)
    none, chain, growing = zero.long(), torch.arange(len(zero), device=zero.device), torch.ones_like(zero.bool())
    cost = Cost(none, zero, ~growing)
    return Tree(energy, chain, step, start, start, start.momentum, zero, start, cost, none, growing)


def branched(tree: Tree, chance: Tensor) -> Branch:
    """A branch without leaves, forwards or backwards in time."""
    forward = chance < 0.5
    step = torch.where(forward[:, None], tree.step, -tree.step)
    nothing = torch.full_like(tree.log_weight, -torch.inf)
    return Branch(tree.growing, step, choose(forward, tree.right, tree.left), nothing, tree.draw)


def counted(
    branch: Branch, cost: Cost, start_energy: Tensor, end: PhasePoint, chance: Tensor, mass: Mass
) -> tuple[Branch, Cost]:
    """The branch with one more state, and what the trajectory has cost by now."""
    error = energy_error(end.total_energy(mass), start_energy)
    diverging = branch.valid & (error > MAX_ENERGY_ERROR)
    cost = Cost(
        cost.steps + branch.valid,
        cost.acceptance + branch.valid * (-error).clamp(max=0).exp(),
        cost.diverging | diverging,
    )
    log_weight = torch.logaddexp(branch.log_weight, -error)
    take = chance.log() < -error - log_weight
    after = Branch(branch.valid & ~diverging, branch.step, end, log_weight, choose(take, end, branch.draw))
    return after, cost


def merged(valid: Tensor, one: Span, two: Span, mass: Mass, is_pair: bool) -> tuple[Tensor, Span]:
    """Two neighbouring subtrees as one, and which branches are still valid."""
    whole = Span(one.first, two.last, one.total + two.total)
    return valid & ~_turns(one, two, mass, is_pair), whole


def joined(tree: Tree, branch: Branch, span: Span, chance: Tensor, mass: Mass) -> Tree:
    """The tree with its complete branch, unless that turned; a tree that turns grows no more."""
    forward, ok = branch.step[:, 0] > 0, branch.valid
    take = chance.log() < branch.log_weight - tree.log_weight
    left, right, rows = tree.left.momentum, tree.right.momentum, forward[:, None]
    far, near = torch.where(rows, left, right), torch.where(rows, right, left)
    turning = _turns(Span(far, near, tree.momenta), span, mass, is_pair=False)
    return tree._replace(
        left=choose(forward | ~ok, tree.left, branch.end),
        right=choose(forward & ok, branch.end, tree.right),
        momenta=torch.where(ok[:, None], tree.momenta + span.total, tree.momenta),
        log_weight=torch.where(ok, torch.logaddexp(tree.log_weight, branch.log_weight), tree.log_weight),
        draw=choose(take & ok, branch.draw, tree.draw),
        depth=tree.depth + ok,
        growing=ok & ~turning,
    )


def _turns(one: Span, two: Span, mass: Mass, is_pair: bool) -> Tensor:
    """True if the trajectory that consists of two neighbouring spans turns, ``(A,)``."""

    def turns(first: Tensor, last: Tensor, total: Tensor) -> Tensor:
        velocity = mass.velocity(total)
        return ((first * velocity).sum(-1) <= 0) | ((last * velocity).sum(-1) <= 0)

    whole = turns(one.first, two.last, one.total + two.total)
    if is_pair:
        return whole
    return whole | turns(one.first, two.first, one.total + two.first) | turns(one.last, two.last, one.last + two.total)
