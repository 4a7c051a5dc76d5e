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
from pyro_symmetric.mcmc.density.programs import Evaluate, compiles, run
from pyro_symmetric.mcmc.kernels.integrator import (
    MAX_ENERGY_ERROR,
    PhasePoint,
    begun,
    choose,
    energy_error,
    steps_of_leapfrog,
)
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.mass import Mass
from pyro_symmetric.mcmc.kernels.randomness import normal, uniform
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
            "acceptance_rate": tree.cost.acceptance / tree.cost.steps,
            "energy": tree.draw.total_energy(tuning.mass),
            "diverging": tree.cost.diverging,
            "step_size": tuning.steps.expand(len(state.z), 1)[:, 0],
            "n_steps": tree.cost.steps,
            "tree_depth": tree.depth,
            "reached_max_treedepth": tree.depth >= self.max_treedepth,
            "occupancy": occupancy.to(state.energy).expand(len(state.z)),
        }
        return State(*tree.draw, tuning, state.generator, statistics)


# what a trajectory consists of; A chains ---------------------------------------------------------------------------


class _Span(NamedTuple):
    """A balanced tree's momenta, in the order in which they were visited."""

    first: Tensor  # (A, D)
    last: Tensor
    total: Tensor


class _Cost(NamedTuple):
    """What a trajectory has cost so far, ``(A,)`` each."""

    steps: Tensor
    acceptance: Tensor  # sum over the steps
    diverging: Tensor


class _Tree(NamedTuple):
    """A trajectory, between doublings."""

    start_energy: Tensor  # (A,), total
    chain: Tensor  # (A,), which of all chains it is
    step: Tensor  # (A, 1), its step size
    left: PhasePoint
    right: PhasePoint
    momenta: Tensor  # their sum, (A, D)
    log_weight: Tensor  # log of the sum of exp(start energy - energy), (A,)
    draw: PhasePoint  # the state that is drawn from it so far
    cost: _Cost
    depth: Tensor  # (A,)
    growing: Tensor  # (A,), whether it may double


class _Branch(NamedTuple):
    """The half that is added by a doubling, while it grows."""

    valid: Tensor  # (A,), whether it has neither turned nor diverged
    step: Tensor  # (A, 1), negative where it grows backwards in time
    end: PhasePoint
    log_weight: Tensor  # as above
    draw: PhasePoint


class _Trajectories:
    """One iteration of all chains."""

    def __init__(self, density: Density, state: State):
        self.density, self.generator, self.mass = density, state.generator, state.tuning.mass
        # A program is made for one number of chains; operations as they are get along with those that aren't finished.
        self.masked = compiles(density)
        noise = normal(state.z, state.generator)
        start, energy = run(density, begun, state.z, state.energy, state.gradient, noise, self.mass)
        zero = torch.zeros_like(energy)
        none, chain = zero.long(), torch.arange(len(zero), device=zero.device)
        step, cost = state.tuning.steps.expand(len(zero), 1).contiguous(), _Cost(none, zero, zero.bool())
        self.tree = _Tree(
            energy, chain, step, start, start, start.momentum, zero, start, cost, none, torch.ones_like(zero.bool())
        )
        self.finished: list[_Tree] = []
        self.num_chains, self.num_batches = len(zero), 0

    def grown(self, max_depth: int) -> tuple[_Tree, Tensor]:
        """Let all trajectories grow; what they have become, and the share of their batches that was theirs, ``()``."""
        for depth in range(max_depth):
            branch, spans = self._grow(depth)
            if spans:
                chance = uniform(self.tree.log_weight, self.generator)
                self.tree = run(self.density, _joined, self.tree, branch, spans[0], chance, self.mass)
                self._part(self.tree.growing)
            else:  # no trajectory is left
                self.tree = self.tree._replace(growing=branch.valid)
            if not self._any(self.tree.growing):
                break
        trees = _map(lambda *parts: torch.cat(parts), *self.finished, self.tree)
        trees = _select(trees, trees.chain.argsort()) if self.finished else trees
        return trees, trees.cost.steps.sum() / (self.num_batches * self.num_chains)

    def _grow(self, depth: int) -> tuple[_Branch, list[_Span]]:
        """Add ``2 ** depth`` states; chains whose branch turns or diverges on the way finish without it.

        :return: the branch, and its one span; none if no chain is left.
        """
        chance = uniform(self.tree.log_weight, self.generator)
        branch: _Branch = run(self.density, _branched, self.tree, chance)
        spans: list[_Span] = []
        for leaf in range(2**depth):
            chance = uniform(self.tree.log_weight, self.generator)
            branch, cost, span = run(self.density, _leaf, branch, self.tree, chance, self.mass, masked=self.masked)
            self.tree = self.tree._replace(cost=cost)
            self.num_batches += 1
            for level in range((~leaf & leaf + 1).bit_length() - 1):  # the subtrees that this leaf completes
                valid, span = run(self.density, _merged, branch.valid, spans.pop(), span, self.mass, is_pair=level == 0)
                branch = branch._replace(valid=valid)
            spans.append(span)
            # Looking costs a wait for the device: at every other leaf, when the counter holds no single leaves.
            if leaf % 2 == 1 or depth == 0:
                branch, spans = self._part(branch.valid, branch, spans)
                if not self._any(branch.valid):
                    return branch, []
        return branch, spans

    def _any(self, going_on: Tensor) -> bool:
        return bool(going_on.any()) if self.masked else len(going_on) > 0

    def _part(self, going_on: Tensor, *others: Any) -> Any:
        """Take chains that have finished out of the batch, unless it is masked; what is left of ``others``."""
        if self.masked or bool(going_on.all()):
            return others
        stay = going_on.nonzero().flatten()
        self.finished.append(_select(self.tree, (~going_on).nonzero().flatten()))
        self.tree = _select(self.tree, stay)
        return tuple(_select(other, stay) for other in others)


# arithmetic, of all chains at once ----------------------------------------------------------------------------------


def _branched(evaluate: Evaluate, tree: _Tree, chance: Tensor) -> _Branch:
    """A branch without leaves, forwards or backwards in time."""
    forward = chance < 0.5
    step = torch.where(forward[:, None], tree.step, -tree.step)
    nothing = torch.full_like(tree.log_weight, -torch.inf)
    return _Branch(tree.growing, step, choose(forward, tree.right, tree.left), nothing, tree.draw)


def _leaf(
    evaluate: Evaluate, branch: _Branch, tree: _Tree, chance: Tensor, mass: Mass, masked: bool
) -> tuple[_Branch, _Cost, _Span]:
    """One more state of the branch."""
    end = steps_of_leapfrog(evaluate, branch.end, branch.step, mass, 1)
    if masked:  # a trajectory that has ended stays where it is, rather than run away to where nothing is a number
        end = choose(branch.valid, end, branch.end)
    error = energy_error(end.total_energy(mass), tree.start_energy)
    diverging = branch.valid & (error > MAX_ENERGY_ERROR)
    cost = _Cost(
        tree.cost.steps + branch.valid,
        tree.cost.acceptance + branch.valid * (-error).clamp(max=0).exp(),
        tree.cost.diverging | diverging,
    )
    log_weight = torch.logaddexp(branch.log_weight, -error)
    take = chance.log() < -error - log_weight
    after = _Branch(branch.valid & ~diverging, branch.step, end, log_weight, choose(take, end, branch.draw))
    return after, cost, _Span(end.momentum, end.momentum, end.momentum)


def _merged(
    evaluate: Evaluate, valid: Tensor, one: _Span, two: _Span, mass: Mass, is_pair: bool
) -> tuple[Tensor, _Span]:
    """Two neighbouring subtrees as one, and which branches are still valid."""
    whole = _Span(one.first, two.last, one.total + two.total)
    return valid & ~_turns(one, two, mass, is_pair), whole


def _joined(evaluate: Evaluate, tree: _Tree, branch: _Branch, span: _Span, chance: Tensor, mass: Mass) -> _Tree:
    """The tree with its complete branch, unless that turned; a tree that turns grows no more."""
    forward, ok = branch.step[:, 0] > 0, branch.valid
    take = chance.log() < branch.log_weight - tree.log_weight
    left, right, rows = tree.left.momentum, tree.right.momentum, forward[:, None]
    far, near = torch.where(rows, left, right), torch.where(rows, right, left)
    turning = _turns(_Span(far, near, tree.momenta), span, mass, is_pair=False)
    return tree._replace(
        left=choose(forward | ~ok, tree.left, branch.end),
        right=choose(forward & ok, branch.end, tree.right),
        momenta=torch.where(ok[:, None], tree.momenta + span.total, tree.momenta),
        log_weight=torch.where(ok, torch.logaddexp(tree.log_weight, branch.log_weight), tree.log_weight),
        draw=choose(take & ok, branch.draw, tree.draw),
        depth=tree.depth + ok,
        growing=ok & ~turning,
    )


def _turns(one: _Span, two: _Span, mass: Mass, is_pair: bool) -> Tensor:
    """Whether the trajectory that consists of two neighbouring spans turns, ``(A,)``."""

    def turns(first: Tensor, last: Tensor, total: Tensor) -> Tensor:
        velocity = mass.velocity(total)
        return ((first * velocity).sum(-1) <= 0) | ((last * velocity).sum(-1) <= 0)

    whole = turns(one.first, two.last, one.total + two.total)
    if is_pair:
        return whole
    return whole | turns(one.first, two.first, one.total + two.first) | turns(one.last, two.last, one.last + two.total)


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
