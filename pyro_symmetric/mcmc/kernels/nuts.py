r"""The No-U-Turn Sampler of many chains at once (Hoffman & Gelman 2014, arXiv
1111.4246), with multinomial sampling of states (Betancourt 2017, arXiv 1701.02434,
appendix A.3) and without recursion.

A trajectory doubles, forwards or backwards in time at random, until one of its balanced
subtrees makes a U-turn: with its first and last momenta :math:`p_-, p_+` and the sum of
its momenta :math:`\rho`,

.. math:: p_-^\top M^{-1} \rho \le 0 \quad\text{or}\quad p_+^\top M^{-1} \rho \le 0.

As in Stan, the criterion is also checked between each half and the nearest state of the
other half. States are drawn with weights :math:`e^{-H}`: uniformly within the new half,
with a bias towards the new half between the two.

**Many chains.** All unfinished chains build their :math:`j`-th doubling at the same
time, so they are at the same leaf of the same binary tree. A shared binary counter
replaces recursion: leaf :math:`n` completes as many subtrees as
:math:`n` has trailing ones (Phan & Pradhan 2019, arXiv 1912.11554, algorithm 2; Lao et
al. 2020, arXiv 2002.01184). A finished chain leaves the batch and costs no further
gradients. Compiled programs have a fixed number of chains: there it stays in the batch
with steps of size 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_symmetric import arguments
from pyro_symmetric.density.density import Density, compiles, fused
from pyro_symmetric.density.eager import Evaluate
from pyro_symmetric.mcmc.kernels.adaptation import (
    BLIND_STEPS,
    HamiltonianKernel,
    HamiltonianTuning,
)
from pyro_symmetric.mcmc.kernels.kernel import (
    MAX_ENERGY_ERROR,
    Mass,
    PhasePoint,
    State,
    choose,
    energy_error,
    leapfrog,
    resample_momenta,
    runs_in_loops,
    uniform,
)


@dataclass(frozen=True, eq=False, repr=False)
class NUTS(HamiltonianKernel):
    """The No-U-Turn Sampler: HMC with trajectories that end at a U-turn.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> posterior = ps.sample(
    ...     ps.NUTS(model),
    ...     num_samples=20,
    ...     num_warmup=20,
    ...     num_chains=4,
    ...     seed=0,
    ...     progress=False,
    ... )
    >>> bool(posterior.statistics["tree_depth"].max() <= 10)
    True

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: initial step size of the integrator, or the step size with
        ``adapt_step_size=False``. ``None``: found by doubling or halving at the initial
        positions.
    :param adapt_step_size: whether warm-up adapts the step size.
    :param adapt_mass_matrix: whether warm-up adapts the mass matrix; otherwise it is
        the identity.
    :param full_mass: whether the mass matrix is dense, for up to a few hundred
        dimensions, instead of diagonal.
    :param target_accept_prob: mean acceptance rate that the step size is adapted to.
        Larger values suit varying curvature, and are slower elsewhere.
    :param max_tree_depth: a trajectory has at most ``2 ** max_tree_depth - 1`` leapfrog
        steps.

    Pyro's ``jit_compile`` and the like may be given, and mean nothing.
    """

    max_tree_depth: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.whole("max_tree_depth", self.max_tree_depth, 1)

    def step(self, density: Density, state: State) -> State:
        tuning: HamiltonianTuning = state.tuning
        most = (
            min(self.max_tree_depth, BLIND_STEPS.bit_length())
            if tuning.blind
            else self.max_tree_depth
        )
        forest = _Forest(density, state)
        if runs_in_loops(density, state.z, tuning.mass):
            forest.grow_in_loops(most)
        else:
            forest.grow(most)
        tree = forest.all_trees()
        statistics = {
            "lp": -tree.draw.energy,
            "acceptance_rate": tree.cost.acceptance / tree.cost.steps,
            "energy": tree.draw.total_energy(tuning.mass),
            "diverging": tree.cost.diverging,
            "step_size": tuning.step_size,
            "n_steps": tree.cost.steps,
            "tree_depth": tree.depth,
            "reached_max_treedepth": tree.depth >= self.max_tree_depth,
        }
        return State(*tree.draw, tuning, state.generator, statistics)


# trajectories of A unfinished chains --------------------------------------------------


class _Cost(NamedTuple):
    """Leapfrog steps of a trajectory so far, ``(A,)`` each."""

    steps: Tensor
    acceptance: Tensor  # sum over the steps
    diverging: Tensor


class _Tree(NamedTuple):
    """A trajectory between doublings."""

    start_energy: Tensor  # Hamiltonian at its start, (A,)
    chain: Tensor  # index among all chains, (A,)
    step: Tensor  # step size, (A, 1)
    left: PhasePoint
    right: PhasePoint
    momenta: Tensor  # sum over its states, (A, D)
    log_weight: Tensor  # log of the sum of exp(start energy - energy), (A,)
    draw: PhasePoint  # multinomial draw from its states
    cost: _Cost
    depth: Tensor  # (A,)


class _Span(NamedTuple):
    """A complete balanced subtree, in the order in which its states were visited, ``(A,
    D)`` each.
    """

    first: Tensor  # velocity at its first state
    before_first: Tensor  # sum of all momenta before its first state
    after_first: Tensor  # the same with its first state
    last: Tensor  # velocity at its last state
    before_last: Tensor  # sum of all momenta before its last state


class _Branch(NamedTuple):
    """The new half of a trajectory during a doubling."""

    end: PhasePoint
    draw: PhasePoint
    step: Tensor  # (A, 1); negative backwards in time, 0 after a U-turn or divergence
    momenta: Tensor  # sum over the states of the tree and the branch, (A, D)
    log_weight: Tensor  # of the branch, (A,)
    cost: _Cost  # of the tree and the branch


class _Grown(NamedTuple):
    """A branch after a leaf."""

    branch: _Branch
    spans: dict[int, _Span]  # complete subtrees, by level
    turns: Tensor  # whether the last pair of subtrees turns, (A,)


class _Forest:
    """Trajectories of all chains, which double in batches of the unfinished ones."""

    def __init__(self, density: Density, state: State):
        self.density = density
        self.mass = state.tuning.mass
        self.generator = state.generator
        start = resample_momenta(state, self.mass)
        self.start_energy = energy = start.total_energy(self.mass)
        chain = torch.arange(len(energy), device=energy.device)
        zero = torch.zeros_like(energy)
        no_steps = torch.zeros_like(chain)
        cost = _Cost(no_steps, zero, no_steps > 0)
        step = state.tuning.step_size[:, None]
        self.tree = _Tree(
            energy,
            chain,
            step,
            start,
            start,
            start.momentum,
            zero,
            start,
            cost,
            no_steps,
        )
        self.growing = no_steps == 0
        self.finished = list[_Tree]()
        self.fixed_batch = compiles(density)

    def grow(self, max_depth: int) -> None:
        """Double all trajectories until they turn, diverge or reach a depth."""
        depth = 0
        while depth < max_depth and self._double(depth):
            depth += 1

    def grow_in_loops(self, max_depth: int) -> None:
        """Do the same by loops over chains, for a network of layers on a CPU."""
        from pyro_symmetric.mcmc.kernels import loops  # slow to import

        # The loops change trees in place. A tree of one state has the same tensors as
        # left end, right end and draw.
        self.tree = tree_map(
            lambda tensor: tensor.clone(memory_format=torch.contiguous_format),
            self.tree,
        )
        loops.grow(self.density, self.tree, self.mass, max_depth, self._uniform)

    def _double(self, depth: int) -> bool:
        """Add ``2 ** depth`` states to each trajectory; return whether any is
        unfinished. A trajectory whose new half turns or diverges ends without it."""
        forward = self._uniform() < 0.5
        branch, span = _start_branch(self.tree, self.growing, forward, self.mass)
        grown = _Grown(branch, {depth: span}, torch.zeros_like(forward))
        for leaf in range(2**depth):
            level = _num_completed(leaf)
            inputs = grown.branch, self.tree.start_energy, self._uniform()
            branch = fused(self.density, _add_leaf, *inputs, self.mass)
            is_last = leaf + 1 == 2**depth
            grown = _complete(branch, grown.spans, level, is_last, self.mass)
            # A check waits for the device. A branch can turn only at every other leaf.
            if leaf % 2 == 1 or depth == 0:
                self.tree = self.tree._replace(cost=grown.branch.cost)
                self.growing = grown.branch.step[:, 0] != 0
                any_growing, grown = self._retire(grown)
                if not any_growing:
                    return False
        self.tree = _join(self.tree, grown.branch, self._uniform())
        self.growing = self.growing & ~grown.turns
        return self._retire(None)[0]

    def all_trees(self) -> _Tree:
        """Return the trees of all chains, in order."""
        if not self.finished:
            return self.tree
        trees = tree_map(lambda *parts: torch.cat(parts), self.tree, *self.finished)
        return _select(trees, trees.chain.argsort())

    def _uniform(self) -> Tensor:
        """Draw a uniform number for each chain; return those of the batch. The stream
        is the same for any batch.
        """
        numbers = uniform(self.start_energy, self.generator)
        return numbers[self.tree.chain] if self.finished else numbers

    def _retire(self, grown: Any) -> tuple[bool, Any]:
        """Drop finished chains from the batch and from ``grown``; return whether any is
        unfinished, and the rest of ``grown``.
        """
        unfinished = int(self.growing.sum())
        total = len(self.growing)
        if unfinished in (0, total) or self.fixed_batch:
            return unfinished > 0, grown
        order = (~self.growing).byte().argsort(stable=True)
        stay, done = order.split([unfinished, total - unfinished])
        self.finished.append(_select(self.tree, done))
        self.tree = _select(self.tree, stay)
        self.growing = self.growing[stay]
        self.mass = self.mass.of_chains(stay)
        return True, grown and _select(grown, stay)


# steps of a doubling ------------------------------------------------------------------


def _num_completed(leaf: int) -> int:
    """Return how many subtrees a leaf completes: the trailing ones of its number in
    binary.
    """
    return (~leaf & leaf + 1).bit_length() - 1


def _start_branch(
    tree: _Tree, growing: Tensor, forward: Tensor, mass: Mass
) -> tuple[_Branch, _Span]:
    """Return an empty branch, and the tree as the neighbouring subtree."""
    rows = forward[:, None]
    step = tree.step * (growing * torch.where(forward, 1, -1))[:, None]
    end = choose(forward, tree.right, tree.left)
    first = torch.where(rows, tree.left.momentum, tree.right.momentum)
    last = end.momentum
    span = _Span(
        mass.velocity(first),
        torch.zeros_like(first),
        first,
        mass.velocity(last),
        tree.momenta - last,
    )
    empty = torch.full_like(tree.log_weight, -torch.inf)
    return _Branch(end, tree.draw, step, tree.momenta, empty, tree.cost), span


def _add_leaf(
    evaluate: Evaluate,
    branch: _Branch,
    start_energy: Tensor,
    chance: Tensor,
    mass: Mass,
) -> _Branch:
    """Extend a branch by one leapfrog step."""
    growing = branch.step[:, 0] != 0
    end = leapfrog(evaluate, branch.end, branch.step, mass)
    error = energy_error(end.total_energy(mass), start_energy)
    diverging = growing & (error > MAX_ENERGY_ERROR)
    steps, acceptance, diverged = branch.cost
    acceptance = acceptance + growing * (-error).clamp(max=0).exp()
    log_weight = torch.logaddexp(branch.log_weight, -error)
    take = chance.log() < -error - log_weight
    step = branch.step.masked_fill(diverging[:, None], 0.0)
    cost = _Cost(steps + growing, acceptance, diverged | diverging)
    return _Branch(
        end,
        choose(take, end, branch.draw),
        step,
        branch.momenta + end.momentum,
        log_weight,
        cost,
    )


def _complete(
    branch: _Branch, spans: dict[int, _Span], level: int, is_last: bool, mass: Mass
) -> _Grown:
    """Complete the subtrees that end at the last leaf, and stop branches in which one
    of them turns.

    :param spans: complete subtrees of ``2 ** level`` states, by level.
    :param level: number of subtrees that the leaf completes.
    :param is_last: whether the tree and its branch become a pair.
    """
    leaf = span = _leaf_span(branch, mass)
    for lower in range(level):
        turning = _pair_turns(spans[lower], span, leaf)
        branch = branch._replace(step=branch.step.masked_fill(turning[:, None], 0.0))
        span = _Span(*spans[lower][:3], leaf.last, leaf.before_last)
    turns = torch.zeros_like(branch.cost.diverging)
    if is_last:
        turns = _pair_turns(spans[level], span, leaf)
    higher = {number: spans[number] for number in spans if number > level}
    return _Grown(branch, {level: span, **higher}, turns)


def _pair_turns(half: _Span, next_half: _Span, leaf: _Span) -> Tensor:
    """Return whether two neighbouring subtrees turn together, ``(A,)``; the second ends
    at the last leaf.
    """
    total = leaf.after_first - half.before_first
    if next_half is leaf:
        return _is_turning(half.first, leaf.last, total)
    first = torch.stack([half.first, half.first, half.last])
    last = torch.stack([leaf.last, next_half.first, leaf.last])
    to_middle = next_half.after_first - half.before_first
    from_middle = leaf.after_first - half.before_last
    return _is_turning(first, last, torch.stack([total, to_middle, from_middle])).any(0)


def _leaf_span(branch: _Branch, mass: Mass) -> _Span:
    """Return the last state of a branch as a subtree."""
    velocity = mass.velocity(branch.end.momentum)
    before = branch.momenta - branch.end.momentum
    return _Span(velocity, before, branch.momenta, velocity, before)


def _is_turning(first: Tensor, last: Tensor, total: Tensor) -> Tensor:
    """Return the U-turn criterion of end velocities and summed momenta ``batch +
    (D,)``.
    """
    return ((first * total).sum(-1) <= 0) | ((last * total).sum(-1) <= 0)


def _join(tree: _Tree, branch: _Branch, chance: Tensor) -> _Tree:
    """Join the tree and its complete branch, unless the branch has stopped."""
    forward = branch.step[:, 0] > 0
    complete = branch.step[:, 0] != 0
    take = complete & (chance.log() < branch.log_weight - tree.log_weight)
    return tree._replace(
        # never the end of a diverged branch
        left=choose(forward | ~complete, tree.left, branch.end),
        right=choose(forward & complete, branch.end, tree.right),
        momenta=branch.momenta,
        log_weight=torch.logaddexp(tree.log_weight, branch.log_weight),
        draw=choose(take, branch.draw, tree.draw),
        depth=tree.depth + complete,
    )


def _select(value: Any, index: Tensor) -> Any:
    """Select rows of every tensor."""
    return tree_map(lambda tensor: tensor.index_select(0, index), value)
