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
Lao et al. 2020, arXiv 2002.01184). A chain that has finished leaves the batch, so no gradient is spent on it; if a leaf
is a program, which serves one number of chains, it stays until all have, and takes steps of size 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.compiled import compiles, run
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.eager import Evaluate
from pyro_symmetric.mcmc.kernels.adaptation import BLIND_STEPS, HamiltonianKernel, HamiltonianTuning
from pyro_symmetric.mcmc.kernels.kernel import (
    MAX_ENERGY_ERROR,
    Mass,
    PhasePoint,
    State,
    choose,
    energy_error,
    leapfrog,
    uniform,
    with_fresh_momenta,
)

FEW_NUMBERS = 2**11  # of all chains, for which one program checks all levels of the tree in less time than it is called
MOST_LEVELS = 40  # of a tree; one of more would outlast the machine


@dataclass(frozen=True, eq=False, repr=False)
class NUTS(HamiltonianKernel):
    """The No-U-Turn Sampler: HMC that finds the length of each trajectory itself.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> posterior = ps.sample(ps.NUTS(model), num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> bool(posterior.statistics["tree_depth"].max() <= 10)
    True

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: of the integrator, where adaptation starts or, with ``adapt_step_size=False``, stays. ``None``:
        found by doubling and halving at the starting points.
    :param adapt_step_size: whether warm-up adapts the step size.
    :param adapt_mass: whether warm-up learns the mass matrix; otherwise it is 1.
    :param mass: form of the mass matrix: ``"diagonal"``, or ``"dense"`` for up to a few hundred dimensions.
    :param target_accept: mean acceptance that the step size is adapted to. More pays where curvature varies, and costs
        elsewhere.
    :param max_treedepth: a trajectory has at most ``2 ** max_treedepth - 1`` leapfrog steps.
    """

    max_treedepth: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("max_treedepth", self.max_treedepth, 1)

    def step(self, density: Density, state: State) -> State:
        tuning: HamiltonianTuning = state.tuning
        most = min(self.max_treedepth, BLIND_STEPS.bit_length()) if tuning.blind else self.max_treedepth
        forest = _Forest(density, state, self.max_treedepth)
        depth = 0
        while depth < most and forest.doubled(depth):
            depth += 1
        tree = forest.whole()
        statistics = {
            "lp": -tree.draw.energy,
            "acceptance_rate": tree.cost.acceptance / tree.cost.steps,
            "energy": tree.draw.total_energy(tuning.mass),
            "diverging": tree.cost.diverging,
            "step_size": tuning.step_size,
            "n_steps": tree.cost.steps,
            "tree_depth": tree.depth,
            "reached_max_treedepth": tree.depth >= self.max_treedepth,
        }
        return State(*tree.draw, tuning, state.generator, statistics)


# what a trajectory consists of; A chains ---------------------------------------------------------------------------


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


class _Span(NamedTuple):
    """A balanced tree that waits for its other half, in the order in which states were visited, ``(A, D)`` each."""

    first: Tensor  # the velocity at its first state
    before: Tensor  # the sum of all momenta before that
    after: Tensor  # and with it
    last: Tensor  # the velocity at its last state
    near: Tensor  # the sum of all momenta before that


class _Branch(NamedTuple):
    """The half that is added by a doubling, while it grows."""

    end: PhasePoint
    draw: PhasePoint
    step: Tensor  # (A, 1), negative where it grows backwards in time, 0 once it has turned or diverged
    momenta: Tensor  # their sum, with those of the tree that it is added to, (A, D)
    log_weight: Tensor  # as above
    cost: _Cost  # of the whole trajectory


class _Forest:
    """Trajectories that grow in batches of those that haven't finished."""

    def __init__(self, density: Density, state: State, max_treedepth: int):
        self.density, self.mass, self.generator = density, state.tuning.mass, state.generator
        start = with_fresh_momenta(state, self.mass)
        self.everyone = energy = start.total_energy(self.mass)
        chain, zero = torch.arange(len(energy), device=energy.device), torch.zeros_like(energy)
        none = torch.zeros_like(chain)
        cost = _Cost(none, zero, none > 0)
        step = state.tuning.step_size[:, None]
        self.tree = _Tree(energy, chain, step, start, start, start.momentum, zero, start, cost, none)
        self.growing, self.finished = none == 0, list[_Tree]()
        self.keeps_all = compiles(density)
        self.in_one = self.keeps_all and state.z.numel() <= FEW_NUMBERS
        self.levels = torch.arange(min(max_treedepth, MOST_LEVELS), device=energy.device)

    def doubled(self, depth: int) -> bool:
        """Add ``2 ** depth`` states to each; whether any may grow on. Trees whose new half turns or diverges on the way
        finish without it."""
        branch, span = _begun(self.tree, self.growing, self._chance() < 0.5, self.mass)
        waiting: Any = {depth: span}
        if self.in_one:
            whole = torch.stack(span, 1)
            waiting = whole.new_zeros(len(whole), 1 + len(self.levels), *whole.shape[1:])
            waiting[:, 1 + depth] = whole
        for leaf in range(2**depth):
            level, is_last = (~leaf & leaf + 1).bit_length() - 1, leaf + 1 == 2**depth
            inputs = branch, self.tree.start_energy, self._chance()
            if self.in_one:
                number = self.levels[level : level + 1]
                branch, waiting[:, 1 + level], closed = run(self.density, _grown, *inputs, waiting, number, self.mass)
            else:
                branch = run(self.density, _with_leaf, *inputs, self.mass)
                branch, waiting, closed = _turned(branch, waiting, level, is_last, self.mass)
            # Looking costs a wait for the device; a branch can have turned after every other leaf only.
            if leaf % 2 == 1 or depth == 0:
                self.tree, self.growing = self.tree._replace(cost=branch.cost), branch.step[:, 0] != 0
                left, (branch, waiting, closed) = self._parted(branch, waiting, closed)
                if not left:
                    return False
        self.tree, self.growing = _joined(self.tree, branch, self._chance()), self.growing & ~closed
        return self._parted()[0]

    def whole(self) -> _Tree:
        """All trees, in the order of the chains."""
        if not self.finished:
            return self.tree
        trees = tree_map(lambda *parts: torch.cat(parts), self.tree, *self.finished)
        return _select(trees, trees.chain.argsort())

    def _chance(self) -> Tensor:
        """A uniform number for each trajectory; one is drawn for each chain, whoever is in the batch."""
        chance = uniform(self.everyone, self.generator)
        return chance[self.tree.chain] if self.finished else chance

    def _parted(self, *others: Any) -> tuple[bool, Any]:
        """Take trees that have finished out of the batch: whether any is left, and what is left of ``others``."""
        left, everyone = int(self.growing.sum()), len(self.growing)
        if left in (0, everyone) or self.keeps_all:
            return left > 0, others
        stay, done = (~self.growing).byte().argsort(stable=True).split([left, everyone - left])
        self.finished.append(_select(self.tree, done))
        self.tree, self.growing, others = _select((self.tree, self.growing, others), stay)
        return True, others


# small steps --------------------------------------------------------------------------------------------------------


def _begun(tree: _Tree, growing: Tensor, forward: Tensor, mass: Mass) -> tuple[_Branch, _Span]:
    """A branch without states, and the tree as the span that it is to join."""
    rows, step = forward[:, None], tree.step * (growing * torch.where(forward, 1, -1))[:, None]
    end = choose(forward, tree.right, tree.left)
    far, near = torch.where(rows, tree.left.momentum, tree.right.momentum), end.momentum
    span = _Span(mass.velocity(far), torch.zeros_like(far), far, mass.velocity(near), tree.momenta - near)
    nothing = torch.full_like(tree.log_weight, -torch.inf)
    return _Branch(end, tree.draw, step, tree.momenta, nothing, tree.cost), span


def _with_leaf(evaluate: Evaluate, branch: _Branch, start_energy: Tensor, chance: Tensor, mass: Mass) -> _Branch:
    """The branch with one more state."""
    grows, end = branch.step[:, 0] != 0, leapfrog(evaluate, branch.end, branch.step, mass)
    error = energy_error(end.total_energy(mass), start_energy)
    diverging = grows & (error > MAX_ENERGY_ERROR)
    steps, acceptance, diverged = branch.cost
    acceptance = acceptance + grows * (-error).clamp(max=0).exp()
    log_weight = torch.logaddexp(branch.log_weight, -error)
    take = chance.log() < -error - log_weight
    step = branch.step.masked_fill(diverging[:, None], 0.0)
    cost = _Cost(steps + grows, acceptance, diverged | diverging)
    return _Branch(end, choose(take, end, branch.draw), step, branch.momenta + end.momentum, log_weight, cost)


def _turned(
    branch: _Branch, waiting: dict[int, _Span], level: int, is_last: bool, mass: Mass
) -> tuple[_Branch, dict[int, _Span], Tensor]:
    """Stop branches of which a subtree that the last leaf completes turns.

    :param waiting: the balanced trees that wait, by level: of ``2 ** level`` states.
    :param level: how many levels the leaf completes.
    :return: the branch; what waits now; where the branch and the tree turn, ``(A,)``, if the leaf is the last.
    """
    own = span = _leaf(branch, mass)
    for one in range(level):
        turning = _turns_together(waiting[one], span, own)
        branch = branch._replace(step=branch.step.masked_fill(turning[:, None], 0.0))
        span = _Span(*waiting[one][:3], own.last, own.near)
    closed = _turns_together(waiting[level], span, own) if is_last else torch.zeros_like(branch.cost.diverging)
    return branch, {level: span, **{other: waiting[other] for other in waiting if other > level}}, closed


def _turns_together(half: _Span, other: _Span, own: _Span) -> Tensor:
    """True if two neighbouring trees turn together, ``(A,)``, of which the other ends with the last leaf, its own."""
    if other is own:
        return _turns(half.first, own.last, own.after - half.before)
    first, last = torch.stack([half.first, half.first, half.last]), torch.stack([own.last, other.first, own.last])
    return _turns(
        first, last, torch.stack([own.after - half.before, other.after - half.before, own.after - half.near])
    ).any(0)


def _leaf(branch: _Branch, mass: Mass) -> _Span:
    """The last state of a branch as a tree."""
    velocity, before = mass.velocity(branch.end.momentum), branch.momenta - branch.end.momentum
    return _Span(velocity, before, branch.momenta, velocity, before)


def _grown(
    evaluate: Evaluate, branch: _Branch, start_energy: Tensor, chance: Tensor, spans: Tensor, level: Tensor, mass: Mass
) -> tuple[_Branch, Tensor, Tensor]:
    """:func:`_with_leaf` and :func:`_turned` in one program, which looks at all levels at once.

    :param spans: what waits, at each level, ``(A, 1 + levels, 5, D)``, of which the first place is free.
    :param level: ``(1,)``
    :return: the branch; the subtree that now waits, ``(A, 5, D)``; where the branch and the tree turn, if the level is
        that of the tree.
    """
    branch = _with_leaf(evaluate, branch, start_energy, chance, mass)
    leaf = _leaf(branch, mass)
    own, velocity, now = torch.stack(leaf, 1), leaf.last[:, None], leaf.after[:, None]
    begun = torch.where(level == 0, own[:, :3], spans.index_select(1, level)[:, 0, :3])  # where the level below began
    span = torch.cat([begun, own[:, 3:]], 1)
    number = torch.arange(spans.shape[1] - 1, device=level.device)
    first, start, _, last, near = spans[:, 1:].unbind(2)
    lowest = (number == 0)[:, None]
    middle = torch.where(lowest, velocity, spans[:, :-1, 0])
    whole, left, right = now - start, torch.where(lowest, now, spans[:, :-1, 2]) - start, now - near
    turning = _turns(first, velocity, whole) | _turns(first, middle, left) | _turns(last, velocity, right)
    step = branch.step.masked_fill((turning & (number < level)).any(1, keepdim=True), 0.0)
    return branch._replace(step=step), span, (turning & (number == level)).any(1)


def _turns(first: Tensor, last: Tensor, total: Tensor) -> Tensor:
    """True if a trajectory turns, given the velocities at its ends and the sum of its momenta, ``batch + (D,)``."""
    return ((first * total).sum(-1) <= 0) | ((last * total).sum(-1) <= 0)


def _joined(tree: _Tree, branch: _Branch, chance: Tensor) -> _Tree:
    """The tree with its complete branch, unless that turned."""
    forward, ok = branch.step[:, 0] > 0, branch.step[:, 0] != 0
    take = ok & (chance.log() < branch.log_weight - tree.log_weight)
    return tree._replace(
        left=choose(forward | ~ok, tree.left, branch.end),  # who has left the support shan't be evaluated there again
        right=choose(forward & ok, branch.end, tree.right),
        momenta=branch.momenta,
        log_weight=torch.logaddexp(tree.log_weight, branch.log_weight),
        draw=choose(take, branch.draw, tree.draw),
        depth=tree.depth + ok,
    )


def _select(value: Any, index: Tensor) -> Any:
    """These rows of every tensor."""
    return tree_map(lambda tensor: tensor.index_select(0, index), value)
