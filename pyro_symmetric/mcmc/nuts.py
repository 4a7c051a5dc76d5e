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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.integrator import MAX_ENERGY_ERROR, energy_error, leapfrog
from pyro_symmetric.mcmc.kernel import State
from pyro_symmetric.mcmc.mass import Mass
from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.mcmc.warmup import HamiltonianKernel, Tuning

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

    def step(self, potential: Potential, state: State) -> State:
        tuning: Tuning = state.tuning
        max_depth = min(self.max_treedepth, BLIND_DEPTH) if tuning.blind else self.max_treedepth
        draw, counts, occupancy = _Trajectories(potential, tuning, state).draw(max_depth)
        return replace(
            state,
            z=draw.z,
            potential=draw.potential,
            gradient=draw.gradient,
            statistics={
                "lp": -draw.potential,
                "acceptance_rate": counts.acceptance / counts.steps,
                "energy": draw.energy,
                "diverging": counts.diverging,
                "step_size": tuning.step_size.expand(len(draw.z)),
                "n_steps": counts.steps,
                "tree_depth": counts.depth,
                "reached_max_treedepth": counts.depth >= self.max_treedepth,
                "occupancy": torch.full_like(draw.energy, occupancy),
            },
        )


# what a trajectory consists of; A chains, all of which are unfinished -----------------------------------------------


class _Point(NamedTuple):
    """An end of a trajectory."""

    z: Tensor  # (A, D), likewise momentum and gradient
    momentum: Tensor
    gradient: Tensor


class _Draw(NamedTuple):
    """The state drawn from a trajectory so far."""

    z: Tensor
    gradient: Tensor
    potential: Tensor  # (A,), likewise energy
    energy: Tensor


class _Span(NamedTuple):
    """A balanced tree's momenta, in the order in which they were visited."""

    first: Tensor  # (A, D)
    last: Tensor
    total: Tensor


class _Counts(NamedTuple):
    """What a trajectory has gone through, each ``(A,)``."""

    steps: Tensor
    acceptance: Tensor  # sum over the steps
    depth: Tensor
    diverging: Tensor


class _Tree(NamedTuple):
    """A trajectory, between doublings."""

    chain: Tensor  # (A,), which of all chains it is
    start_energy: Tensor  # (A,)
    left: _Point
    right: _Point
    total: Tensor  # sum of all momenta, (A, D)
    log_weight: Tensor  # log of the sum of exp(start energy - energy), (A,)
    draw: _Draw
    counts: _Counts


class _Branch(NamedTuple):
    """The half that is added by a doubling, while it grows."""

    forward: Tensor  # (A,), whether it grows forwards in time
    end: _Point
    log_weight: Tensor
    draw: _Draw
    spans: list[_Span]  # complete subtrees, the largest first
    valid: Tensor  # (A,), whether it has neither turned nor diverged


class _Trajectories:
    """One iteration of all chains."""

    def __init__(self, potential: Potential, tuning: Tuning, state: State):
        self.potential = potential
        self.mass: Mass = tuning.mass
        self.step_size = tuning.step_size
        momentum = self.mass.draw(state.z)
        energy = state.potential + self.mass.kinetic(momentum)
        zero, none = torch.zeros_like(energy), torch.zeros_like(energy, dtype=torch.long)
        point = _Point(state.z, momentum, state.gradient)
        self.tree = _Tree(
            torch.arange(len(energy), device=energy.device),
            energy,
            point,
            point,
            momentum,
            zero,
            _Draw(state.z, state.gradient, state.potential, energy),
            _Counts(none, zero, none, torch.zeros_like(energy, dtype=torch.bool)),
        )
        self.finished: list[_Tree] = []
        self.num_chains, self.num_batches, self.num_gradients = len(energy), 0, 0

    def draw(self, max_depth: int) -> tuple[_Draw, _Counts, float]:
        """Grow all trajectories; the state drawn from each, what it took, and the occupancy of the batches."""
        for depth in range(max_depth):
            branch = self._grow(depth)
            if len(self.tree.chain) > 0:
                self._join(branch)
            if len(self.tree.chain) == 0:
                break
        self._finish(torch.zeros_like(self.tree.chain, dtype=torch.bool))
        order = torch.cat([tree.chain for tree in self.finished]).argsort()
        draw = _select(_cat([tree.draw for tree in self.finished]), order)
        counts = _select(_cat([tree.counts for tree in self.finished]), order)
        return draw, counts, self.num_gradients / (self.num_batches * self.num_chains)

    def _grow(self, depth: int) -> _Branch:
        """Add ``2 ** depth`` states; chains whose branch turns or diverges on the way finish without it."""
        tree = self.tree
        forward = torch.rand_like(tree.log_weight) < 0.5
        nothing = torch.full_like(tree.log_weight, -torch.inf)
        end = _choose(forward, tree.right, tree.left)
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
        step = torch.where(branch.forward, self.step_size, -self.step_size)[:, None]
        z, p, potential, gradient = leapfrog(self.potential, *branch.end, step, self.mass)
        self.num_batches, self.num_gradients = self.num_batches + 1, self.num_gradients + len(z)
        energy = potential + self.mass.kinetic(p)
        error = energy_error(energy, self.tree.start_energy)
        diverging = branch.valid & (error > MAX_ENERGY_ERROR)
        counts = self.tree.counts
        counts = _Counts(
            counts.steps + branch.valid,
            counts.acceptance + branch.valid * (-error).clamp(max=0).exp(),
            counts.depth,
            counts.diverging | diverging,
        )
        self.tree = self.tree._replace(counts=counts)
        log_weight = torch.logaddexp(branch.log_weight, -error)
        take = torch.rand_like(error).log() < -error - log_weight
        draw = _choose(take, _Draw(z, gradient, potential, energy), branch.draw)
        spans, turning = self._count_up(branch.spans, p, leaf)
        valid = branch.valid & ~diverging & ~turning
        return _Branch(branch.forward, _Point(z, p, gradient), log_weight, draw, spans, valid)

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
        take = torch.rand_like(tree.log_weight).log() < branch.log_weight - tree.log_weight
        far, near = (
            _choose(forward, tree.left.momentum, tree.right.momentum),
            _choose(forward, tree.right.momentum, tree.left.momentum),
        )
        turning = self._turns(_Span(far, near, tree.total), span, is_pair=False)
        self.tree = tree._replace(
            left=_choose(forward, tree.left, branch.end),
            right=_choose(forward, branch.end, tree.right),
            total=tree.total + span.total,
            log_weight=torch.logaddexp(tree.log_weight, branch.log_weight),
            draw=_choose(take, branch.draw, tree.draw),
            counts=tree.counts._replace(depth=tree.counts.depth + 1),
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


def _cat(values: list[Any]) -> Any:
    return _map(lambda *tensors: torch.cat(tensors), *values)


def _choose(mask: Tensor, if_true: Any, if_false: Any) -> Any:
    """For each chain the one or the other."""
    return _map(lambda a, b: torch.where(mask if a.dim() == 1 else mask[:, None], a, b), if_true, if_false)
