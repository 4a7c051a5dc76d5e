r"""The No-U-Turn Sampler of many chains at once (Hoffman & Gelman 2014, arXiv 1111.4246), multinomial (Betancourt 2017,
arXiv 1701.02434, appendix A.3), without recursion.

A trajectory doubles, forwards or backwards in time at random, until it turns back on itself: until for one of its
balanced subtrees, with first and last momenta :math:`p_-, p_+` and sum of momenta :math:`\rho`,

.. math:: p_-^\top M^{-1} \rho \le 0 \quad\text{or}\quad p_+^\top M^{-1} \rho \le 0,

also checked, as Stan does, between each half and the nearest state of the other one. States are drawn with weights
:math:`e^{-H}`: fairly within the new half, with a bias towards the new half between the two.

**Many chains.** All unfinished chains build their :math:`j`-th doubling at the same time, so every one of them is at
the same leaf of the same tree. Where a recursion would be there is a binary counter, shared by all: leaf :math:`n`
completes as many subtrees as :math:`n` has trailing ones (as in Phan & Pradhan 2019, arXiv 1912.11554, algorithm 2, and
Lao et al. 2020, arXiv 2002.01184). A chain that has finished leaves the batch, so no gradient is spent on it. What is
lost is that an iteration's last chains run in smaller batches; the statistic ``occupancy`` says how much: the mean
share of the chains that is in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.integrator import MAX_ENERGY_ERROR, PhasePoint, choose, energy_error, leapfrog
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.randomness import uniform
from pyro_symmetric.mcmc.kernels.warmup import HamiltonianKernel, HamiltonianTuning

BLIND_DEPTH = 6  # while the mass matrix is unknown, longer trajectories cost more than they teach


@dataclass(frozen=True, eq=False, repr=False)
class NUTS(HamiltonianKernel):
    """The No-U-Turn Sampler: HMC that finds the length of each trajectory itself.

    :param max_treedepth: a trajectory has at most ``2 ** max_treedepth - 1`` leapfrog steps.
    """

    max_treedepth: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("max_treedepth", self.max_treedepth, 1)

    def step(self, density: Density, state: State) -> State:
        tuning: HamiltonianTuning = state.tuning
        max_depth = min(self.max_treedepth, BLIND_DEPTH) if tuning.blind else self.max_treedepth
        tree, occupancy = _Trajectories(density, state).grown(max_depth)
        statistics = {
            "lp": -tree.draw.energy,
            "acceptance_rate": tree.acceptance / tree.steps,
            "energy": tree.draw.total_energy(tuning.mass),
            "diverging": tree.diverging,
            "step_size": tuning.steps.expand(len(state.z), 1)[:, 0],
            "n_steps": tree.steps,
            "tree_depth": tree.depth,
            "reached_max_treedepth": tree.depth >= self.max_treedepth,
            "occupancy": torch.full_like(tree.draw.energy, occupancy),
        }
        return State(*tree.draw, tuning, state.generator, statistics)


# what a trajectory consists of; A chains, all of which are unfinished -----------------------------------------------


class _Span(NamedTuple):
    """A balanced tree's momenta, in the order in which they were visited."""

    first: Tensor  # (A, D)
    last: Tensor
    total: Tensor


class _Tree(NamedTuple):
    """A trajectory, between doublings."""

    chain: Tensor  # (A,), which of all chains it is
    step: Tensor  # (A, 1), its step size
    start_energy: Tensor  # (A,), total
    left: PhasePoint
    right: PhasePoint
    momenta: Tensor  # their sum, (A, D)
    log_weight: Tensor  # log of the sum of exp(start energy - energy), (A,)
    draw: PhasePoint  # the state that is drawn from it so far
    steps: Tensor  # (A,)
    acceptance: Tensor  # (A,), sum over the steps
    depth: Tensor  # (A,)
    diverging: Tensor  # (A,)


class _Branch(NamedTuple):
    """The half that is added by a doubling, while it grows."""

    forward: Tensor  # (A,), whether it grows forwards in time
    end: PhasePoint
    log_weight: Tensor  # as above
    draw: PhasePoint
    spans: list[_Span]  # complete subtrees, the largest first
    valid: Tensor  # (A,), whether it has neither turned nor diverged


class _Trajectories:
    """One iteration of all chains."""

    def __init__(self, density: Density, state: State):
        self.density, self.generator = density, state.generator
        self.mass = state.tuning.mass
        start = PhasePoint(state.z, self.mass.draw(state.z, state.generator), state.energy, state.gradient)
        zero = torch.zeros_like(state.energy)
        none, chain = zero.long(), torch.arange(len(zero), device=zero.device)
        energy = start.total_energy(self.mass)
        step = state.tuning.steps.expand(len(zero), 1)
        self.tree = _Tree(chain, step, energy, start, start, start.momentum, zero, start, none, zero, none, zero.bool())
        self.finished: list[_Tree] = []
        self.num_chains, self.num_batches, self.num_gradients = len(zero), 0, 0

    def grown(self, max_depth: int) -> tuple[_Tree, float]:
        """Let all trajectories grow; what they have become, and the occupancy of the batches."""
        for depth in range(max_depth):
            branch = self._grow(depth)
            if len(self.tree.chain) > 0:
                self._join(branch)
            if len(self.tree.chain) == 0:
                break
        self._finish(torch.zeros_like(self.tree.chain, dtype=torch.bool))
        trees = _map(lambda *parts: torch.cat(parts), *self.finished)
        return _select(trees, trees.chain.argsort()), self.num_gradients / (self.num_batches * self.num_chains)

    def _grow(self, depth: int) -> _Branch:
        """Add ``2 ** depth`` states; chains whose branch turns or diverges on the way finish without it."""
        tree = self.tree
        forward = uniform(tree.log_weight, self.generator) < 0.5
        nothing = torch.full_like(tree.log_weight, -torch.inf)
        end = choose(forward, tree.right, tree.left)
        branch = _Branch(forward, end, nothing, tree.draw, [], torch.ones_like(forward))
        for leaf in range(2**depth):
            branch = self._add_leaf(branch, leaf)
            # Looking costs a wait for the device: at every other leaf, when the counter holds no single leaves.
            if (leaf % 2 == 1 or depth == 0) and not bool(branch.valid.all()):
                branch = _select(branch, self._finish(branch.valid))
                if len(self.tree.chain) == 0:
                    break
        return branch

    def _add_leaf(self, branch: _Branch, leaf: int) -> _Branch:
        step = torch.where(branch.forward[:, None], self.tree.step, -self.tree.step)
        end = leapfrog(self.density, branch.end, step, self.mass)
        self.num_batches, self.num_gradients = self.num_batches + 1, self.num_gradients + len(end.z)
        tree, error = self.tree, energy_error(end.total_energy(self.mass), self.tree.start_energy)
        diverging = branch.valid & (error > MAX_ENERGY_ERROR)
        self.tree = tree._replace(
            steps=tree.steps + branch.valid,
            acceptance=tree.acceptance + branch.valid * (-error).clamp(max=0).exp(),
            diverging=tree.diverging | diverging,
        )
        log_weight = torch.logaddexp(branch.log_weight, -error)
        take = uniform(error, self.generator).log() < -error - log_weight
        spans, turning = self._count_up(branch.spans, end.momentum, leaf)
        valid = branch.valid & ~diverging & ~turning
        return _Branch(branch.forward, end, log_weight, choose(take, end, branch.draw), spans, valid)

    def _count_up(self, spans: list[_Span], momentum: Tensor, leaf: int) -> tuple[list[_Span], Tensor]:
        """Complete the subtrees that end at this leaf: the spans, and which chains turn within one of them."""
        spans, span = list(spans), _Span(momentum, momentum, momentum)
        turning = torch.zeros_like(momentum[:, 0], dtype=torch.bool)
        level = 0
        while leaf >> level & 1:
            half = spans.pop()
            turning |= self._turns(half, span, is_pair=level == 0)
            span = _Span(half.first, span.last, half.total + span.total)
            level += 1
        return [*spans, span], turning

    def _turns(self, one: _Span, two: _Span, is_pair: bool) -> Tensor:
        """Whether the trajectory that consists of two neighbouring spans turns, ``(A,)``."""

        def turns(first: Tensor, last: Tensor, total: Tensor) -> Tensor:
            velocity = self.mass.velocity(total)
            return ((first * velocity).sum(-1) <= 0) | ((last * velocity).sum(-1) <= 0)

        whole = turns(one.first, two.last, one.total + two.total)
        if is_pair:
            return whole
        return (
            whole | turns(one.first, two.first, one.total + two.first) | turns(one.last, two.last, one.last + two.total)
        )

    def _join(self, branch: _Branch) -> None:
        """Add the complete branch to the tree; chains that turn finish with it."""
        tree, (span,), forward = self.tree, branch.spans, branch.forward
        take = uniform(tree.log_weight, self.generator).log() < branch.log_weight - tree.log_weight
        left, right, rows = tree.left.momentum, tree.right.momentum, forward[:, None]
        far, near = torch.where(rows, left, right), torch.where(rows, right, left)
        turning = self._turns(_Span(far, near, tree.momenta), span, is_pair=False)
        self.tree = tree._replace(
            left=choose(forward, tree.left, branch.end),
            right=choose(forward, branch.end, tree.right),
            momenta=tree.momenta + span.total,
            log_weight=torch.logaddexp(tree.log_weight, branch.log_weight),
            draw=choose(take, branch.draw, tree.draw),
            depth=tree.depth + 1,
        )
        if bool(turning.any()):
            self._finish(~turning)

    def _finish(self, going_on: Tensor) -> Tensor:
        """Take chains out of the batch; the index of those that stay, ``(A',)``."""
        stay = going_on.nonzero().flatten()
        self.finished.append(_select(self.tree, (~going_on).nonzero().flatten()))
        self.tree = _select(self.tree, stay)
        return stay


# small steps --------------------------------------------------------------------------------------------------------


def _map(function: Callable[..., Tensor], *values: Any) -> Any:
    """Apply a function to every tensor of (nested) tuples and lists of one structure."""
    first = values[0]
    if isinstance(first, Tensor):
        return function(*values)
    parts = [_map(function, *parts) for parts in zip(*values, strict=True)]
    return parts if isinstance(first, list) else type(first)(*parts)


def _select(value: Any, index: Tensor) -> Any:
    return _map(lambda tensor: tensor.index_select(0, index), value)
