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
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.flat import Evaluate, loop
from pyro_symmetric.mcmc.density.programs import compiles, run
from pyro_symmetric.mcmc.kernels.integrator import (
    MAX_ENERGY_ERROR,
    PhasePoint,
    choose,
    energy_error,
    mapped,
    one_step,
)
from pyro_symmetric.mcmc.kernels.kernel import State
from pyro_symmetric.mcmc.kernels.mass import Mass
from pyro_symmetric.mcmc.kernels.randomness import hashed, normal
from pyro_symmetric.mcmc.kernels.warmup import HamiltonianKernel, HamiltonianTuning

AT_HAND = ("cpu",)  # kinds of devices that the host needn't wait for
# Places of a trajectory's uniform numbers: of its first doubling, two less with each later one; leaves' are 1, 2, ...
DIRECTION, JOINT = -1, -2
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

    def _moved(self, density: Density, state: State, most: int | None) -> State:
        tuning: HamiltonianTuning = state.tuning
        doublings = self.max_treedepth if most is None else min(self.max_treedepth, most.bit_length())
        chain = torch.arange(len(state.z), device=state.z.device)
        noise, seeds = normal(state.z, state.generator), chain.random_(generator=state.generator)
        start = PhasePoint(state.z, state.momentum, state.energy, state.gradient)
        tree, batches = self._grown(density, start, noise, seeds, tuning.steps, tuning.mass, doublings)
        at, cost = tree.draw, tree.cost
        statistics = {
            "lp": -at.energy,
            "acceptance_rate": cost.acceptance / cost.steps,
            "energy": at.total_energy(tuning.mass),
            "diverging": cost.diverging,
            "step_size": tuning.steps[:, 0],
            "n_steps": cost.steps,
            "tree_depth": tree.depth,
            "reached_max_treedepth": tree.depth >= self.max_treedepth,
            "occupancy": (cost.steps.to(at.energy).mean() / batches).expand_as(at.energy),
        }
        tuning = self._learnt(tuning, statistics["acceptance_rate"]).noted(*at)
        return State(*at, tuning, state.generator, statistics)

    def _grown(
        self,
        density: Density,
        at: PhasePoint,
        noise: Tensor,
        seeds: Tensor,
        steps: Tensor,
        mass: Mass,
        max_depth: int,
    ) -> tuple[_Tree, Tensor]:
        """Trajectories from here, and of how many batches they are, ``()``."""
        tree = _planted(at, noise, steps, mass)
        if not compiles(density):
            return _Batches(density, tree, mass, seeds).grown(max_depth)
        batches = torch.zeros((), dtype=torch.long, device=steps.device)
        for depth in range(max_depth):
            place = torch.tensor(depth, device=steps.device)
            tree, more = run(density, _doubled, tree.left.z, tree, place, seeds, mass, levels=self.max_treedepth)
            batches = batches + more
            if not bool(tree.growing.any()):
                break
        return tree, batches


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

    valid: Tensor  # (A,), whether it has neither turned nor diverged
    step: Tensor  # (A, 1), negative where it grows backwards in time
    end: PhasePoint
    log_weight: Tensor  # as above
    draw: PhasePoint


class _Batches:
    """Trajectories that grow in batches of those that haven't finished."""

    def __init__(self, density: Density, tree: _Tree, mass: Mass, seeds: Tensor):
        self.density, self.tree, self.mass, self.seeds = density, tree, mass, seeds
        self.finished: list[_Tree] = []
        self.count = self.looked = 0
        self.waits = tree.chain.device.type not in AT_HAND

    def grown(self, max_depth: int) -> tuple[_Tree, Tensor]:
        """Let all grow; what they have become, and by how many batches."""
        for depth in range(max_depth):
            branch, spans = self._grow(depth)
            if spans:
                joint = hashed(self.seeds[self.tree.chain], JOINT - 2 * depth, self.tree.start_energy)
                self.tree = _joined(self.tree, branch, spans[0], joint, self.mass)
                if depth + 1 < max_depth:
                    self._part(self.tree.growing)
            else:  # no trajectory is left
                self.tree = self.tree._replace(growing=branch.valid)
            if len(self.tree.growing) == 0:
                break
        trees = mapped(lambda *parts: torch.cat(parts), *self.finished, self.tree)
        trees = _select(trees, trees.chain.argsort()) if self.finished else trees
        return trees, self.seeds.new_full((), self.count)

    def _grow(self, depth: int) -> tuple[_Branch, list[_Span]]:
        """Add ``2 ** depth`` states; chains whose branch turns or diverges on the way finish without it.

        :return: the branch, and its one span; none if no chain is left.
        """
        like, leaves = self.tree.start_energy, torch.arange(2**depth, 2 ** (depth + 1), device=self.seeds.device)
        branch = _branched(self.tree, hashed(self.seeds[self.tree.chain], DIRECTION - 2 * depth, like))
        chances = hashed(self.seeds, leaves[:, None], like)
        spans: list[_Span] = []
        for leaf in range(2**depth):
            end = one_step(self.density.energy_and_gradient, branch.end, branch.step, self.mass)
            if self.waits:
                end = choose(branch.valid, end, branch.end)  # a trajectory that has ended doesn't run away
            chance = chances[leaf, self.tree.chain]
            branch, cost = _counted(branch, self.tree.cost, self.tree.start_energy, end, chance, self.mass)
            span, self.tree, self.count = (
                _Span(end.momentum, end.momentum, end.momentum),
                self.tree._replace(cost=cost),
                self.count + 1,
            )
            for level in range((~leaf & leaf + 1).bit_length() - 1):  # the subtrees that this leaf completes
                valid, span = _merged(branch.valid, spans.pop(), span, self.mass, is_pair=level == 0)
                branch = branch._replace(valid=valid)
            spans.append(span)
            # Looking costs a wait for the device: at every other leaf, when the counter holds no single leaves.
            if leaf % 2 == 1 or depth == 0:
                branch, spans = self._part(branch.valid, branch, spans)
                if len(branch.valid) == 0:
                    return branch, []
        return branch, spans

    def _part(self, going_on: Tensor, *others: Any) -> Any:
        """Take chains that have finished out of the batch; what is left of ``others``."""
        if self.waits and self.count - self.looked < PATIENCE:
            return others
        left, everyone, self.looked = int(going_on.sum()), len(going_on), self.count
        if left == everyone or (self.waits and 2 * left > everyone):
            return others
        stay, done = (~going_on).byte().argsort(stable=True).split([left, everyone - left])
        self.finished.append(_select(self.tree, done))
        self.tree = _select(self.tree, stay)
        return tuple(_select(other, stay) for other in others)


# growth as one program: all chains stay, masked where they have finished -----------------------------------------


class _Leaves(NamedTuple):
    leaf: Tensor  # (), how many there are
    branch: _Branch
    cost: _Cost
    pending: _Span  # (levels, A, D), of the complete subtrees, by their depth


def _doubled(
    evaluate: Evaluate, z: Tensor, tree: _Tree, depth: Tensor, seeds: Tensor, mass: Mass, levels: int
) -> tuple[_Tree, Tensor]:
    """The trees after their doubling of this depth, ``()``, and by how many batches.

    :param z: any points, in the shape in which energies are asked for.
    :param levels: more than any depth.
    """
    branch = _branched(tree, hashed(seeds, DIRECTION - 2 * depth, tree.start_energy))
    none = tree.momenta.new_zeros(levels, *tree.momenta.shape)
    leaves = _Leaves(torch.zeros_like(depth), branch, tree.cost, _Span(none, none, none))
    others = (torch.ones_like(depth) << depth, torch.arange(levels, device=z.device))
    leaves = loop(evaluate, _leaves_are_left, _with_a_leaf, leaves, *others, tree.start_energy, seeds, mass)
    span = _Span(*[_row(part, depth) for part in leaves.pending])
    joint = hashed(seeds, JOINT - 2 * depth, tree.start_energy)
    return _joined(tree._replace(cost=leaves.cost), leaves.branch, span, joint, mass), leaves.leaf


def _leaves_are_left(leaves: _Leaves, size: Tensor, *others: Any) -> Tensor:
    return (leaves.leaf < size) & leaves.branch.valid.any()


def _with_a_leaf(
    evaluate: Evaluate,
    leaves: _Leaves,
    size: Tensor,
    levels: Tensor,
    start_energy: Tensor,
    seeds: Tensor,
    mass: Mass,
) -> _Leaves:
    """One more leaf, and the subtrees that it completes."""
    leaf, branch = leaves.leaf, leaves.branch
    end = one_step(evaluate, branch.end, branch.step, mass)
    end = choose(branch.valid, end, branch.end)  # a trajectory that has ended doesn't run away
    branch, cost = _counted(branch, leaves.cost, start_energy, end, hashed(seeds, size + leaf, start_energy), mass)

    def completed(values: Any, leaf: Tensor, *others: Any) -> Tensor:
        return (leaf >> values[0]) & 1 == 1

    def merge(evaluate: Evaluate, values: Any, leaf: Tensor, pending: _Span, mass: Mass) -> Any:
        level, valid, span = values
        one = _Span(*[_row(part, level) for part in pending])
        return level + 1, *_merged(valid, one, span, mass, is_pair=False)

    values = (torch.zeros_like(leaf), branch.valid, _Span(end.momentum, end.momentum, end.momentum))
    level, valid, span = loop(evaluate, completed, merge, values, leaf, leaves.pending, mass)
    here = (levels == level)[:, None, None]
    pending = _Span(*[torch.where(here, new, old) for new, old in zip(span, leaves.pending, strict=True)])
    return _Leaves(leaf + 1, branch._replace(valid=valid), cost, pending)


def _row(values: Tensor, index: Tensor) -> Tensor:
    return values.index_select(0, index.reshape(1)).squeeze(0)


# arithmetic, of all chains at once ----------------------------------------------------------------------------------


def _planted(at: PhasePoint, noise: Tensor, step: Tensor, mass: Mass) -> _Tree:
    """Trajectories of a single state, with momenta of standard normal noise ``(A, D)``."""
    start = at._replace(momentum=mass.momentum(noise))
    energy = start.total_energy(mass)
    zero = torch.zeros_like(energy)
    none, chain, growing = zero.long(), torch.arange(len(zero), device=zero.device), torch.ones_like(zero.bool())
    cost = _Cost(none, zero, ~growing)
    return _Tree(energy, chain, step, start, start, start.momentum, zero, start, cost, none, growing)


def _branched(tree: _Tree, chance: Tensor) -> _Branch:
    """A branch without leaves, forwards or backwards in time."""
    forward = chance < 0.5
    step = torch.where(forward[:, None], tree.step, -tree.step)
    nothing = torch.full_like(tree.log_weight, -torch.inf)
    return _Branch(tree.growing, step, choose(forward, tree.right, tree.left), nothing, tree.draw)


def _counted(
    branch: _Branch, cost: _Cost, start_energy: Tensor, end: PhasePoint, chance: Tensor, mass: Mass
) -> tuple[_Branch, _Cost]:
    """The branch with one more state, and what the trajectory has cost by now."""
    error = energy_error(end.total_energy(mass), start_energy)
    diverging = branch.valid & (error > MAX_ENERGY_ERROR)
    cost = _Cost(
        cost.steps + branch.valid,
        cost.acceptance + branch.valid * (-error).clamp(max=0).exp(),
        cost.diverging | diverging,
    )
    log_weight = torch.logaddexp(branch.log_weight, -error)
    take = chance.log() < -error - log_weight
    after = _Branch(branch.valid & ~diverging, branch.step, end, log_weight, choose(take, end, branch.draw))
    return after, cost


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


# small steps --------------------------------------------------------------------------------------------------------


def _select(value: Any, index: Tensor) -> Any:
    return mapped(lambda tensor: tensor.index_select(0, index), value)
