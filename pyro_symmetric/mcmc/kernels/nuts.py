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
        forest = _Forest(density, state)
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


class _Branch(NamedTuple):
    """The half that is added by a doubling, while it grows."""

    end: PhasePoint
    draw: PhasePoint
    step: Tensor  # (A, 1), negative where it grows backwards in time, 0 once it has turned or diverged
    log_weight: Tensor  # as above


class _Forest:
    """Trajectories that grow in batches of those that haven't finished."""

    def __init__(self, density: Density, state: State):
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

    def doubled(self, depth: int) -> bool:
        """Add ``2 ** depth`` states to each; whether any may grow on. Trees whose new half turns or diverges on the way
        finish without it."""
        tree, forward = self.tree, self._chance() < 0.5
        step = tree.step * (self.growing * torch.where(forward, 1, -1))[:, None]
        nothing = torch.full_like(tree.log_weight, -torch.inf)
        branch = _Branch(choose(forward, tree.right, tree.left), tree.draw, step, nothing)
        spans: list[_Span] = []
        for leaf in range(2**depth):
            tree = self.tree
            branch, cost = run(
                self.density, _with_leaf, branch, tree.cost, tree.start_energy, self._chance(), self.mass
            )
            self.tree = tree._replace(cost=cost)
            span = _Span(branch.end.momentum, branch.end.momentum, branch.end.momentum)
            for level in range((~leaf & leaf + 1).bit_length() - 1):  # the subtrees that this leaf completes
                half = spans.pop()
                turning = _turns(half, span, self.mass, is_pair=level == 0)
                branch = branch._replace(step=branch.step.masked_fill(turning[:, None], 0.0))
                span = _Span(half.first, span.last, half.total + span.total)
            spans.append(span)
            # Looking costs a wait for the device: at every other leaf, when the counter holds no single leaves.
            if leaf % 2 == 1 or depth == 0:
                self.growing = branch.step[:, 0] != 0
                left, (branch, spans) = self._parted(branch, spans)
                if not left:
                    return False
        self.tree, self.growing = _joined(self.tree, branch, spans[0], self._chance(), self.mass)
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


def _with_leaf(
    evaluate: Evaluate, branch: _Branch, cost: _Cost, start_energy: Tensor, chance: Tensor, mass: Mass
) -> tuple[_Branch, _Cost]:
    """The branch with one more state, and what the trajectory has cost by now."""
    grows, end = branch.step[:, 0] != 0, leapfrog(evaluate, branch.end, branch.step, mass)
    error = energy_error(end.total_energy(mass), start_energy)
    diverging = grows & (error > MAX_ENERGY_ERROR)
    acceptance = (-error).clamp(max=0).exp()
    cost = _Cost(cost.steps + grows, cost.acceptance + grows * acceptance, cost.diverging | diverging)
    log_weight = torch.logaddexp(branch.log_weight, -error)
    take = chance.log() < -error - log_weight
    step = branch.step.masked_fill(diverging[:, None], 0.0)
    return _Branch(end, choose(take, end, branch.draw), step, log_weight), cost


def _joined(tree: _Tree, branch: _Branch, span: _Span, chance: Tensor, mass: Mass) -> tuple[_Tree, Tensor]:
    """The tree with its complete branch, unless that turned; and whether it may grow on, which one that turns may
    not."""
    forward, ok = branch.step[:, 0] > 0, branch.step[:, 0] != 0
    take = chance.log() < branch.log_weight - tree.log_weight
    left, right, rows = tree.left.momentum, tree.right.momentum, forward[:, None]
    far, near = torch.where(rows, left, right), torch.where(rows, right, left)
    turning = _turns(_Span(far, near, tree.momenta), span, mass, is_pair=False)
    tree = tree._replace(
        left=choose(forward | ~ok, tree.left, branch.end),
        right=choose(forward & ok, branch.end, tree.right),
        momenta=torch.where(ok[:, None], tree.momenta + span.total, tree.momenta),
        log_weight=torch.where(ok, torch.logaddexp(tree.log_weight, branch.log_weight), tree.log_weight),
        draw=choose(take & ok, branch.draw, tree.draw),
        depth=tree.depth + ok,
    )
    return tree, ok & ~turning


def _turns(one: _Span, two: _Span, mass: Mass, is_pair: bool) -> Tensor:
    """True if the trajectory that consists of two neighbouring spans turns, ``(A,)``."""
    parts = _Span(one.first, two.last, one.total + two.total)
    if not is_pair:
        left, right = (one.first, two.first, one.total + two.first), (one.last, two.last, one.last + two.total)
        parts = _Span(*(torch.stack(values) for values in zip(parts, left, right, strict=True)))
    velocity = mass.velocity(parts.total)
    turning = ((parts.first * velocity).sum(-1) <= 0) | ((parts.last * velocity).sum(-1) <= 0)
    return turning if is_pair else turning.any(0)


def _select(value: Any, index: Tensor) -> Any:
    """These rows of every tensor."""
    return tree_map(lambda tensor: tensor.index_select(0, index), value)
