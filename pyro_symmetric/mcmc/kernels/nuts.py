r"""The No-U-Turn Sampler of many chains at once (Hoffman & Gelman 2014, arXiv 1111.4246), multinomial (Betancourt 2017,
arXiv 1701.02434, appendix A.3), without recursion.

A trajectory doubles, forwards or backwards in time at random, until it turns back on itself: until for one of its
balanced subtrees, with first and last momenta :math:`p_-, p_+` and sum of momenta :math:`\rho`,

.. math:: p_-^\top M^{-1} \rho \le 0 \quad\text{or}\quad p_+^\top M^{-1} \rho \le 0,

also checked, as Stan does, between each half and the nearest state of the other one. States are drawn with weights
:math:`e^{-H}`: fairly within the new half, with a bias towards the new half between the two.

**Many chains.** All unfinished chains build their :math:`j`-th doubling at the same time, so every one of them is at
the same leaf of the same tree. A binary counter, shared by all, stands for the recursion: leaf :math:`n`
completes as many subtrees as :math:`n` has trailing ones (as in Phan & Pradhan 2019, arXiv 1912.11554, algorithm 2, and
Lao et al. 2020, arXiv 2002.01184). A chain that has finished leaves the batch, so no gradient is spent on it. What is
lost is that an iteration's last chains run in smaller batches; the statistic ``occupancy`` says how much: the mean
share of the chains that is in a batch. To look who has finished, the host waits for the device. So elsewhere than on a
CPU it looks once in ``PATIENCE`` batches, and chains that have finished stay, masked, until half of the batch has.
If a leaf is a program, which serves one number of chains, they stay until all have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.compiled import compiles, run
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.eager import Evaluate
from pyro_symmetric.mcmc.kernels.adaptation import BLIND_STEPS, HamiltonianKernel, HamiltonianTuning
from pyro_symmetric.mcmc.kernels.integrator import (
    MAX_ENERGY_ERROR,
    PhasePoint,
    choose,
    energy_error,
    leapfrog,
    mapped,
)
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.mass import Mass
from pyro_symmetric.mcmc.kernels.randomness import uniform

AT_HAND = ("cpu",)  # kinds of devices that the host needn't wait for
PATIENCE = 7  # batches, at least, between two looks at a device: three doublings before the first


@dataclass(frozen=True, eq=False, repr=False)
class NUTS(HamiltonianKernel):
    """The No-U-Turn Sampler: HMC that finds the length of each trajectory itself.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> posterior = ps.sample(ps.NUTS(model), num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> bool(posterior.statistics["tree_depth"].max() <= 10)
    True

    :param max_treedepth: a trajectory has at most ``2 ** max_treedepth - 1`` leapfrog steps.
    """

    max_treedepth: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("max_treedepth", self.max_treedepth, 1)

    def step(self, density: Density, state: State) -> State:
        tuning: HamiltonianTuning = state.tuning
        most = min(self.max_treedepth, BLIND_STEPS.bit_length()) if tuning.blind else self.max_treedepth
        start = PhasePoint(state.z, tuning.mass.draw(state.z, state.generator), state.energy, state.gradient)
        batches = _Batches(density, _planted(start, tuning), tuning.mass, state.generator)
        tree = batches.grown(most)
        at, cost = tree.draw, tree.cost
        acceptance = cost.acceptance / cost.steps
        statistics = {
            "lp": -at.energy,
            "acceptance_rate": acceptance,
            "energy": at.total_energy(tuning.mass),
            "diverging": cost.diverging,
            "step_size": tuning.step_size,
            "n_steps": cost.steps,
            "tree_depth": tree.depth,
            "reached_max_treedepth": tree.depth >= self.max_treedepth,
            "occupancy": (cost.steps.to(at.energy).mean() / batches.count).expand_as(at.energy),
        }
        return State(*at, self._learnt(tuning, acceptance).noted(at.z), state.generator, statistics)


# what a trajectory consists of; A chains ---------------------------------------------------------------------------


class _Span(NamedTuple):
    """A balanced tree's momenta, in the order in which they were visited."""

    first: Tensor  # (A, D)
    last: Tensor
    total: Tensor


class _Cost(NamedTuple):
    """The cost of a trajectory so far, ``(A,)`` each."""

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

    end: PhasePoint
    draw: PhasePoint
    step: Tensor  # (A, 1), negative where it grows backwards in time
    valid: Tensor  # (A,), whether it has neither turned nor diverged
    log_weight: Tensor  # as above


class _Batches:
    """Trajectories that grow in batches of those that haven't finished."""

    def __init__(self, density: Density, tree: _Tree, mass: Mass, generator: torch.Generator):
        self.density, self.tree, self.mass, self.generator = density, tree, mass, generator
        self.finished: list[_Tree] = []
        self.count = self.looked = 0
        self.everyone = tree.start_energy
        self.waits = tree.chain.device.type not in AT_HAND
        self.parts = not compiles(density)

    def grown(self, max_depth: int) -> _Tree:
        """Let all grow; what they have become."""
        for depth in range(max_depth):
            branch, span = self._grow(depth)
            if span is None:  # no trajectory is left
                self.tree = self.tree._replace(growing=branch.valid)
                break
            self.tree = _joined(self.tree, branch, span, self._chance(), self.mass)
            if depth + 1 < max_depth and not self._part(self.tree.growing)[0]:
                break
        trees = mapped(lambda *parts: torch.cat(parts), *self.finished, self.tree)
        return _select(trees, trees.chain.argsort()) if self.finished else trees

    def _chance(self) -> Tensor:
        """A uniform number for each trajectory; one is drawn for each chain, whoever is in the batch."""
        return uniform(self.everyone, self.generator)[self.tree.chain]

    def _grow(self, depth: int) -> tuple[_Branch, _Span | None]:
        """Add ``2 ** depth`` states; chains whose branch turns or diverges on the way finish without it.

        :return: the branch, and its span; ``None`` if no chain is left.
        """
        branch = _branched(self.tree, self._chance())
        spans: list[_Span] = []
        for leaf in range(2**depth):
            tree = self.tree
            branch, cost = run(
                self.density, _with_leaf, branch, tree.cost, tree.start_energy, self._chance(), self.mass
            )
            self.tree, self.count = tree._replace(cost=cost), self.count + 1
            span = _Span(branch.end.momentum, branch.end.momentum, branch.end.momentum)
            for level in range((~leaf & leaf + 1).bit_length() - 1):  # the subtrees that this leaf completes
                valid, span = _merged(branch.valid, spans.pop(), span, self.mass, is_pair=level == 0)
                branch = branch._replace(valid=valid)
            spans.append(span)
            # Looking costs a wait for the device: at every other leaf, when the counter holds no single leaves.
            if leaf % 2 == 1 or depth == 0:
                left, (branch, spans) = self._part(branch.valid, branch, spans)
                if not left:
                    return branch, None
        return branch, spans[0]

    def _part(self, going_on: Tensor, *others: Any) -> tuple[bool, Any]:
        """Take chains that have finished out of the batch: whether any is left, and what is left of ``others``."""
        if self.waits and self.count - self.looked < PATIENCE:
            return True, others
        left, everyone, self.looked = int(going_on.sum()), len(going_on), self.count
        if left in (0, everyone) or not self.parts or (self.waits and 2 * left > everyone):
            return left > 0, others
        stay, done = (~going_on).byte().argsort(stable=True).split([left, everyone - left])
        self.finished.append(_select(self.tree, done))
        self.tree = _select(self.tree, stay)
        return True, tuple(_select(other, stay) for other in others)


# small steps --------------------------------------------------------------------------------------------------------


def _planted(start: PhasePoint, tuning: HamiltonianTuning) -> _Tree:
    """Trajectories of one state each."""
    energy, chain = start.total_energy(tuning.mass), torch.arange(len(start.z), device=start.z.device)
    zero, none = torch.zeros_like(energy), torch.zeros_like(chain)
    cost = _Cost(none, zero, none > 0)
    return _Tree(
        energy, chain, tuning.steps, start, start, start.momentum, zero, start, cost, none, torch.ones_like(none) > 0
    )


def _branched(tree: _Tree, chance: Tensor) -> _Branch:
    """A branch without leaves, forwards or backwards in time."""
    forward = chance < 0.5
    step = torch.where(forward[:, None], tree.step, -tree.step)
    nothing = torch.full_like(tree.log_weight, -torch.inf)
    return _Branch(choose(forward, tree.right, tree.left), tree.draw, step, tree.growing, nothing)


def _with_leaf(
    evaluate: Evaluate, branch: _Branch, cost: _Cost, start_energy: Tensor, chance: Tensor, mass: Mass
) -> tuple[_Branch, _Cost]:
    """The branch with one more state, and what the trajectory has cost by now."""
    valid, end = branch.valid, leapfrog(evaluate, branch.end, branch.step, mass)
    end = choose(valid, end, branch.end)  # a trajectory that has ended doesn't run away
    error = energy_error(end.total_energy(mass), start_energy)
    diverging = valid & (error > MAX_ENERGY_ERROR)
    cost = _Cost(
        cost.steps + valid,
        cost.acceptance + valid * (-error).clamp(max=0).exp(),
        cost.diverging | diverging,
    )
    log_weight = torch.logaddexp(branch.log_weight, -error)
    take = chance.log() < -error - log_weight
    return _Branch(end, choose(take, end, branch.draw), branch.step, valid & ~diverging, log_weight), cost


def _merged(valid: Tensor, one: _Span, two: _Span, mass: Mass, is_pair: bool) -> tuple[Tensor, _Span]:
    """Two neighbouring subtrees as one, and which branches are still valid."""
    whole = _Span(one.first, two.last, one.total + two.total)
    return valid & ~_turns(one, two, mass, is_pair), whole


def _joined(tree: _Tree, branch: _Branch, span: _Span, chance: Tensor, mass: Mass) -> _Tree:
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
    """True if the trajectory that consists of two neighbouring spans turns, ``(A,)``."""

    def turns(first: Tensor, last: Tensor, total: Tensor) -> Tensor:
        velocity = mass.velocity(total)
        return ((first * velocity).sum(-1) <= 0) | ((last * velocity).sum(-1) <= 0)

    whole = turns(one.first, two.last, one.total + two.total)
    if is_pair:
        return whole
    return whole | turns(one.first, two.first, one.total + two.first) | turns(one.last, two.last, one.last + two.total)


def _select(value: Any, index: Tensor) -> Any:
    return mapped(lambda tensor: tensor.index_select(0, index), value)
