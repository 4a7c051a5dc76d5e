"""Trajectories of HMC, and the leaves of a doubling of NUTS, chain by chain in loops
compiled with Numba.

The tensor operations of a leapfrog step take as long as the gradients of a small
network, and those of a leaf take longer. The arithmetic is that of
:func:`~pyro_symmetric.mcmc.kernels.kernel.leapfrog` and of
:mod:`~pyro_symmetric.mcmc.kernels.nuts`, with a diagonal mass matrix.

Numba, and so this module, is slow to import.
"""

from __future__ import annotations

import math
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


# leaves of NUTS -----------------------------------------------------------------------


class Subtrees(NamedTuple):
    """The subtrees that are complete, ``(levels, A, D)``, by their levels.

    The last level is the present leaf. Fields are those of a span of NUTS.
    """

    first: Any
    before_first: Any
    after_first: Any
    last: Any
    before_last: Any


class Branch(NamedTuple):
    """The arrays of a branch of NUTS, ``(A,)`` or ``(A, D)``, changed in place.

    :param turns: whether the tree and its branch turn as a pair. Chains of which pairs
        inside the branch turn get steps of size 0.
    """

    end: Any  # PhasePoint of arrays, likewise draw
    draw: Any
    subtrees: Subtrees
    step: Any
    momenta: Any
    log_weight: Any
    steps: Any
    acceptance: Any
    diverging: Any
    turns: Any
    start_energy: Any
    variance: Any


def branch_of(
    branch: Any,
    tree: Any,
    depth: int,
    turns: Tensor,
    start_energy: Tensor,
    variance: Tensor,
) -> Branch:
    """Return the arrays of a branch, which share its memory.

    :param branch: a branch of NUTS, of tensors on a CPU.
    :param tree: the span of the tree, the subtree before the branch.
    :param depth: level of the tree.
    """
    shape = (depth + 2, *branch.end.z.shape)
    subtrees = Subtrees(*(np.empty(shape, variance.numpy().dtype) for _ in tree))
    for of_levels, of_tree in zip(subtrees, tree, strict=True):
        of_levels[depth] = of_tree
    return Branch(
        end=tree_map(Tensor.numpy, branch.end),
        draw=tree_map(Tensor.numpy, branch.draw),
        subtrees=subtrees,
        step=branch.step[:, 0].numpy(),
        momenta=branch.momenta.numpy(),
        log_weight=branch.log_weight.numpy(),
        steps=branch.cost.steps.numpy(),
        acceptance=branch.cost.acceptance.numpy(),
        diverging=branch.cost.diverging.numpy(),
        turns=turns.numpy(),
        start_energy=start_energy.numpy(),
        variance=variance.numpy(),
    )


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
def end_leaf(branch, chains, energy, gradient, chances, level, is_last):
    """Complete the step, draw a state, and stop chains that diverge or turn; return
    the others.

    :param energy: at the new positions, ``(len(chains),)``; ``gradient``:
        ``(len(chains), D)``.
    :param chances: a uniform number for each chain, ``(A,)``.
    :param level: number of subtrees that the leaf completes.
    :param is_last: whether it is the last leaf of the doubling, so that the tree and
        its branch become a pair.
    """
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
    draw = branch.draw
    width = end.z.shape[1]
    kinetic = 0.0
    for d in range(width):
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
    weight = np.float64(branch.log_weight[c])
    high = max(weight, -error)
    if high > -math.inf:
        weight = high + math.log(math.exp(weight - high) + math.exp(-error - high))
    branch.log_weight[c] = weight
    if math.log(chance) < -error - weight:
        draw.energy[c] = end.energy[c]
        for d in range(width):
            draw.z[c, d] = end.z[c, d]
            draw.momentum[c, d] = end.momentum[c, d]
            draw.gradient[c, d] = end.gradient[c, d]
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
    subtrees.first[level, c] = subtrees.first[begins, c]
    subtrees.before_first[level, c] = subtrees.before_first[begins, c]
    subtrees.after_first[level, c] = subtrees.after_first[begins, c]
    subtrees.last[level, c] = subtrees.last[leaf, c]
    subtrees.before_last[level, c] = subtrees.before_last[leaf, c]


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
