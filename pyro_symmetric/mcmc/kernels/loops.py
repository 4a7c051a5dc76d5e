"""Trajectories of HMC and NUTS, chain by chain in loops compiled with Numba.

The tensor operations of a leapfrog step take as long as the gradients of a small
network, and those of a doubling of NUTS take longer. The arithmetic is that of
:func:`~pyro_symmetric.mcmc.kernels.kernel.leapfrog` and of
:mod:`~pyro_symmetric.mcmc.kernels.nuts`, with a diagonal mass matrix.

Numba, and so this module, is slow to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor
from torch.utils._pytree import tree_map

from pyro_symmetric.arguments import Entries
from pyro_symmetric.density.density import Density
from pyro_symmetric.mcmc.kernels.kernel import (
    MAX_ENERGY_ERROR,
    ROUNDING,
    Mass,
    PhasePoint,
)

# Machine code is kept on disk until this file changes: change it with the fields of
# ``PhasePoint`` and of the trees of NUTS, and with the constants that it imports.
OPTIONS: Entries = {"error_model": "numpy", "nogil": True, "cache": True}
SINGLE_EPS = float(np.finfo(np.float32).eps)


# trajectories of HMC ------------------------------------------------------------------


def leapfrog_trajectory(
    density: Density, start: PhasePoint, step_size: Tensor, mass: Mass, num_steps: int
) -> PhasePoint:
    """Take leapfrog steps of sizes ``(C,)``; return the end points."""
    end = PhasePoint(*map(torch.clone, start))
    z, momentum = end.z.numpy(), end.momentum.numpy()
    steps, variance = step_size.numpy(), mass.variance.numpy()
    for _ in range(num_steps):
        _begin_steps(z, momentum, end.gradient.numpy(), steps, variance)
        energy, gradient = density.energy_and_gradient(end.z)
        end = end._replace(energy=energy, gradient=gradient)
        _end_steps(momentum, gradient.numpy(), steps)
    return end


@njit(**OPTIONS)
def _begin_steps(z, momentum, gradient, step_size, variance):
    """Advance momenta by half a step and positions by a whole one, ``(C, D)``, in
    place.
    """
    for c in range(len(z)):
        half = z.dtype.type(0.5) * step_size[c]
        for d in range(z.shape[1]):
            momentum[c, d] -= half * gradient[c, d]
            z[c, d] += step_size[c] * (variance[c, d] * momentum[c, d])


@njit(**OPTIONS)
def _end_steps(momentum, gradient, step_size):
    """Advance momenta by the other half of a step, ``(C, D)``, in place."""
    for c in range(len(momentum)):
        half = momentum.dtype.type(0.5) * step_size[c]
        for d in range(momentum.shape[1]):
            momentum[c, d] -= half * gradient[c, d]


# trajectories of NUTS -----------------------------------------------------------------


class Subtrees(NamedTuple):
    """The subtrees that are complete, ``(levels, C, D)``, by their levels.

    The last level is the present leaf. Fields are those of a span of NUTS.
    """

    first: Any
    before_first: Any
    after_first: Any
    last: Any
    before_last: Any


class Branch(NamedTuple):
    """The arrays of the branches of a doubling, ``(C,)`` or ``(C, D)``, changed in
    place.

    :param step: negative backwards in time; 0 if the chain has diverged or two subtrees
        of its branch turn as a pair.
    :param turns: whether the tree and its branch turn as a pair.
    """

    end: Any  # PhasePoint of arrays, likewise draw
    draw: Any
    subtrees: Subtrees
    step: Any
    log_weight: Any
    turns: Any
    # of the tree and the branch, in the tree's memory
    momenta: Any
    steps: Any
    acceptance: Any
    diverging: Any
    start_energy: Any
    variance: Any


def grow(
    density: Density,
    trees: Any,
    mass: Mass,
    max_depth: int,
    uniform: Callable[[], Tensor],
) -> None:
    """Double the trees of NUTS, tensors on a CPU, in place until they turn, diverge or
    reach a depth.

    :param trees: trees of one state for each of ``C`` chains. No two fields share
        memory.
    :param uniform: returns a random number for each chain, ``(C,)``.
    """
    tree = tree_map(Tensor.numpy, trees)
    branch = _branch_of(tree, mass.variance.contiguous().numpy(), max_depth)
    chains = tree.chain
    depth = 0
    while depth < max_depth and len(chains):
        chains = _double(density, tree, branch, chains, depth, uniform)
        depth += 1


def _branch_of(tree: Any, variance: Any, max_depth: int) -> Branch:
    """Return the arrays of a branch, which every doubling fills anew."""
    of_levels = (max_depth + 1, *tree.momenta.shape)
    dtype = tree.momenta.dtype
    return Branch(
        end=tree_map(np.empty_like, tree.left),
        draw=tree_map(np.empty_like, tree.left),
        subtrees=Subtrees(*(np.empty(of_levels, dtype) for _ in Subtrees._fields)),
        step=np.empty_like(tree.step[:, 0]),
        log_weight=np.empty_like(tree.log_weight),
        turns=np.empty_like(tree.cost.diverging),
        momenta=tree.momenta,
        steps=tree.cost.steps,
        acceptance=tree.cost.acceptance,
        diverging=tree.cost.diverging,
        start_energy=tree.start_energy,
        variance=variance,
    )


def _double(
    density: Density,
    tree: Any,
    branch: Branch,
    chains: Any,
    depth: int,
    uniform: Callable[[], Tensor],
) -> Any:
    """Add ``2 ** depth`` states to the trees of some chains; return the unfinished
    ones. The branch of a chain that turns or diverges is dropped.
    """
    begin_branch(tree, branch, chains, uniform().numpy(), depth)
    for leaf in range(2**depth):
        chances = uniform().numpy()
        if len(chains):
            z = torch.from_numpy(begin_leaf(branch, chains))
            energy, gradient = density.energy_and_gradient(z)
            evaluation = energy.numpy(), gradient.numpy()
            chains = end_leaf(branch, chains, *evaluation, chances, leaf, depth)
        # no sooner than without loops, so that random numbers are the same
        if not len(chains) and (leaf % 2 == 1 or depth == 0):
            return chains
    return join(tree, branch, chains, uniform().numpy())


@njit(**OPTIONS)
def begin_branch(tree, branch, chains, chances, depth):
    """Start a branch at a random end of each tree, and keep the tree as the complete
    subtree of level ``depth``.

    :param chances: a uniform number for each chain, ``(C,)``.
    """
    subtrees = branch.subtrees
    for c in chains:
        forward = chances[c] < 0.5
        end = tree.right if forward else tree.left
        beginning = tree.left if forward else tree.right
        _copy_point(end, branch.end, c)
        branch.step[c] = tree.step[c, 0] if forward else -tree.step[c, 0]
        branch.log_weight[c] = -math.inf
        branch.turns[c] = False
        for d in range(end.z.shape[1]):
            first = beginning.momentum[c, d]
            last = end.momentum[c, d]
            subtrees.first[depth, c, d] = branch.variance[c, d] * first
            subtrees.before_first[depth, c, d] = 0.0
            subtrees.after_first[depth, c, d] = first
            subtrees.last[depth, c, d] = branch.variance[c, d] * last
            subtrees.before_last[depth, c, d] = branch.momenta[c, d] - last


@njit(**OPTIONS)
def join(tree, branch, chains, chances):
    """Join trees and their complete branches, and draw between the two; return the
    chains that don't turn.

    :param chances: a uniform number for each chain, ``(C,)``.
    """
    unfinished = np.empty_like(chains)
    count = 0
    for c in chains:
        _copy_point(branch.end, tree.right if branch.step[c] > 0 else tree.left, c)
        weight = np.float64(tree.log_weight[c])
        branch_weight = np.float64(branch.log_weight[c])
        if math.log(chances[c]) < branch_weight - weight:
            _copy_point(branch.draw, tree.draw, c)
        tree.log_weight[c] = _logaddexp(weight, branch_weight)
        tree.depth[c] += 1
        if not branch.turns[c]:
            unfinished[count] = c
            count += 1
    return unfinished[:count]


@njit(**OPTIONS)
def _copy_point(source, target, c):
    """Copy the phase-space point of chain c."""
    target.energy[c] = source.energy[c]
    for d in range(source.z.shape[1]):
        target.z[c, d] = source.z[c, d]
        target.momentum[c, d] = source.momentum[c, d]
        target.gradient[c, d] = source.gradient[c, d]


@njit(**OPTIONS)
def _logaddexp(a, b):
    """Return the logarithm of the sum of two exponentials."""
    high = max(a, b)
    if high == -math.inf:
        return high
    return high + math.log(math.exp(a - high) + math.exp(b - high))


@njit(**OPTIONS)
def begin_leaf(branch, chains):
    """Take the first half of a leapfrog step of some chains; return their new
    positions, ``(len(chains), D)``.
    """
    end = branch.end
    width = end.z.shape[1]
    positions = np.empty((len(chains), width), end.z.dtype)
    for row in range(len(chains)):
        c = chains[row]
        half = end.z.dtype.type(0.5) * branch.step[c]
        for d in range(width):
            end.momentum[c, d] -= half * end.gradient[c, d]
            velocity = branch.variance[c, d] * end.momentum[c, d]
            end.z[c, d] += branch.step[c] * velocity
            positions[row, d] = end.z[c, d]
    return positions


@njit(**OPTIONS)
def end_leaf(branch, chains, energy, gradient, chances, leaf, depth):
    """Complete the step, draw a state, and stop chains that diverge or turn; return
    the others.

    :param energy: at the new positions, ``(len(chains),)``; ``gradient``:
        ``(len(chains), D)``.
    :param chances: a uniform number for each chain, ``(C,)``.
    :param leaf: number of the leaf in the branch, from 0 to ``2 ** depth - 1``.
    """
    level = 0  # number of subtrees that the leaf completes
    while leaf >> level & 1:
        level += 1
    is_last = leaf + 1 == 2**depth  # so that the tree and its branch become a pair
    unfinished = np.empty_like(chains)
    count = 0
    for row in range(len(chains)):
        c = chains[row]
        _finish_step(branch, c, energy[row], gradient[row])
        _weigh(branch, c, chances[c])
        _complete(branch, c, level, is_last)
        if branch.step[c] != 0:
            unfinished[count] = c
            count += 1
    return unfinished[:count]


@njit(**OPTIONS)
def _finish_step(branch, c, energy, gradient):
    """Take the second half of a leapfrog step of chain c."""
    end = branch.end
    half = end.z.dtype.type(0.5) * branch.step[c]
    end.energy[c] = energy
    for d in range(len(gradient)):
        end.gradient[c, d] = gradient[d]
        end.momentum[c, d] -= half * gradient[d]
        branch.momenta[c, d] += end.momentum[c, d]


@njit(**OPTIONS)
def _weigh(branch, c, chance):
    """Add the new state of chain c to its weights, and draw it or keep the draw."""
    end = branch.end
    kinetic = 0.0
    for d in range(end.z.shape[1]):
        kinetic += 0.5 * end.momentum[c, d] ** 2 * branch.variance[c, d]
    before = np.float64(branch.start_energy[c])
    error = end.energy[c] + kinetic - before
    if end.z.itemsize == 4:
        rounding = ROUNDING * SINGLE_EPS * abs(before)
        if rounding > 1 and abs(error) <= rounding:
            error = 0.0
    if not math.isfinite(error):
        error = math.inf
    branch.steps[c] += 1
    branch.acceptance[c] += math.exp(min(-error, 0.0))
    weight = _logaddexp(np.float64(branch.log_weight[c]), -error)
    branch.log_weight[c] = weight
    if math.log(chance) < -error - weight:
        _copy_point(end, branch.draw, c)
    if error > MAX_ENERGY_ERROR:
        branch.diverging[c] = True
        branch.step[c] = 0


@njit(**OPTIONS)
def _complete(branch, c, level, is_last):
    """Complete the subtrees of chain c that end at the last leaf, and stop it if one of
    them turns.
    """
    subtrees = branch.subtrees
    end = branch.end
    leaf = len(subtrees.first) - 1
    for d in range(end.z.shape[1]):
        velocity = branch.variance[c, d] * end.momentum[c, d]
        subtrees.first[leaf, c, d] = velocity
        subtrees.last[leaf, c, d] = velocity
        subtrees.after_first[leaf, c, d] = branch.momenta[c, d]
        before = branch.momenta[c, d] - end.momentum[c, d]
        subtrees.before_first[leaf, c, d] = before
        subtrees.before_last[leaf, c, d] = before
    begins = leaf  # the level at which the beginning of the subtree is kept
    for lower in range(level):
        if _turns(subtrees, c, lower, begins, leaf):
            branch.step[c] = 0
        begins = lower
    if is_last:
        branch.turns[c] = _turns(subtrees, c, level, begins, leaf)
    for d in range(end.z.shape[1]):
        subtrees.first[level, c, d] = subtrees.first[begins, c, d]
        subtrees.before_first[level, c, d] = subtrees.before_first[begins, c, d]
        subtrees.after_first[level, c, d] = subtrees.after_first[begins, c, d]
        subtrees.last[level, c, d] = subtrees.last[leaf, c, d]
        subtrees.before_last[level, c, d] = subtrees.before_last[leaf, c, d]


@njit(**OPTIONS)
def _turns(subtrees, c, half, begins, leaf):
    """Return whether a subtree and the next one, which ends at the leaf, turn together.

    :param half: level of the first subtree.
    :param begins: level at which the beginning of the second one is kept.
    """
    first, last = subtrees.first, subtrees.last
    start = subtrees.before_first[half, c]
    middle = subtrees.before_last[half, c]
    total = subtrees.after_first[leaf, c]
    if _is_turning(first[half, c], last[leaf, c], start, total):
        return True
    if begins == leaf:
        return False
    to_middle = subtrees.after_first[begins, c]
    return _is_turning(
        first[half, c], first[begins, c], start, to_middle
    ) or _is_turning(last[half, c], last[leaf, c], middle, total)


@njit(**OPTIONS)
def _is_turning(first, last, before, after):
    """Return the U-turn criterion of end velocities and of the sums of momenta before
    and after, ``(D,)``.
    """
    by_first = 0.0
    by_last = 0.0
    for d in range(len(first)):
        total = after[d] - before[d]
        by_first += first[d] * total
        by_last += last[d] * total
    return by_first <= 0 or by_last <= 0
