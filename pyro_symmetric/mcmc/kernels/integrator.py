r"""Chains in phase space, the leapfrog method that moves them, a first guess of its step size, and iterations, of which
a program may do many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.chain_statistics import rounding
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.flat import Evaluate, repeat, scan
from pyro_symmetric.mcmc.density.programs import compiles, in_stretches, run
from pyro_symmetric.mcmc.kernels.kernel import State, Stretch, longest_stretch
from pyro_symmetric.mcmc.kernels.learning import Plan
from pyro_symmetric.mcmc.kernels.mass import Mass

MAX_ENERGY_ERROR = 1000.0  # beyond it a trajectory counts as divergent, as in Stan and Pyro


class PhasePoint(NamedTuple):
    """Points of C chains in phase space; these fields a :class:`~pyro_symmetric.mcmc.State` has, too.

    :param z: positions ``(C, D)``; likewise ``momentum``.
    :param energy: potential energy at ``z``, ``(C,)``; ``gradient`` is its gradient ``(C, D)``.
    """

    z: Tensor
    momentum: Tensor
    energy: Tensor
    gradient: Tensor

    def total_energy(self, mass: Mass) -> Tensor:
        """Potential and kinetic energy, ``(C,)``."""
        return self.energy + mass.kinetic(self.momentum)


def choose(mask: Tensor, if_true: PhasePoint, if_false: PhasePoint) -> PhasePoint:
    """For each chain the one point or the other, by a mask ``(C,)``."""
    rows = mask[:, None]
    return PhasePoint(
        *(torch.where(mask if a.dim() == 1 else rows, a, b) for a, b in zip(if_true, if_false, strict=True))
    )


def leapfrog(
    evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass, num_steps: int | Tensor = 1
) -> PhasePoint:
    """Follow the Hamiltonian flow for ``num_steps`` steps: reversible, volume-preserving, energy error O(step²).

    :param evaluate: points ``(C, D)`` -> energy ``(C,)`` and gradient ``(C, D)``.
    :param step_size: ``()``, or ``(C, 1)`` for each chain its own; negative ones go back in time.
    :param num_steps: a number, or a tensor ``()`` on the CPU, so that one program serves trajectories of all lengths.
    """
    begun = _kicked(start, 0.5 * step_size)
    end: PhasePoint = repeat(evaluate, num_steps, _moved_and_kicked, begun, step_size, mass)
    return _kicked(end, -0.5 * step_size)


def one_step(evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass) -> PhasePoint:
    """:func:`leapfrog` of one step."""
    momentum = start.momentum - 0.5 * step_size * start.gradient
    z = start.z + step_size * mass.velocity(momentum)
    energy, gradient = evaluate(z)
    return PhasePoint(z, momentum - 0.5 * step_size * gradient, energy, gradient)


def _moved_and_kicked(evaluate: Evaluate, at: PhasePoint, step_size: Tensor, mass: Mass) -> PhasePoint:
    z = at.z + step_size * mass.velocity(at.momentum)
    return _kicked(PhasePoint(z, at.momentum, *evaluate(z)), step_size)


def _kicked(at: PhasePoint, step_size: Tensor) -> PhasePoint:
    return at._replace(momentum=at.momentum - step_size * at.gradient)


class Outcome(NamedTuple):
    """The outcome of an iteration of HMC, for C chains.

    :param after: where the chains are now.
    :param end: where their trajectories ended.
    :param acceptance: the probability of going there, ``(C,)``.
    :param energy: total energy of what was chosen, ``(C,)``.
    :param diverging: ``(C,)``.
    """

    after: PhasePoint
    end: PhasePoint
    acceptance: Tensor
    energy: Tensor
    diverging: Tensor


def trajectory(
    evaluate: Evaluate,
    z: Tensor,
    energy: Tensor,
    gradient: Tensor,
    noise: Tensor,
    chance: Tensor,
    step_size: Tensor,
    mass: Mass,
    num_steps: Tensor,
) -> Outcome:
    """An iteration of HMC as arithmetic: from points with their energies and gradients, with momenta of standard normal
    noise ``(C, D)``, by so many steps of sizes ``(C, 1)``, to the end where a uniform number ``(C,)`` accepts it."""
    start = PhasePoint(z, mass.momentum(noise), energy, gradient)
    before = start.total_energy(mass)
    end = leapfrog(evaluate, start, step_size, mass, num_steps)
    error = energy_error(end.total_energy(mass), before)
    after, acceptance, accept = decided(start, end, error, chance)
    return Outcome(after, end, acceptance, before + torch.where(accept, error, 0.0), error > MAX_ENERGY_ERROR)


def decided(start: PhasePoint, end: PhasePoint, error: Tensor, chance: Tensor) -> tuple[PhasePoint, Tensor, Tensor]:
    """Metropolis' decision by energy errors and uniform numbers ``(C,)``: the next points, the acceptance ``(C,)`` and
    whether each end was accepted."""
    acceptance = (-error).clamp(max=0).exp()
    accept = chance < acceptance
    return choose(accept, end, start), acceptance, accept


def energy_error(after: Tensor, before: Tensor) -> Tensor:
    """The change of a trajectory's energy, ``(C,)``; infinite where it left the support or all numbers behind.

    Far out, energies may be so large that rounding hides more than a unit. There what it may hide counts as none, or
    chains would be stuck: rounding alone would refuse every other step, however short. If that lasts while chains are
    sampled, :func:`~pyro_symmetric.chain_findings.blurred` says so.
    """
    error = after - before
    if error.dtype == torch.float32:
        blur = rounding(before)
        error = torch.where((blur > 1) & (error.abs() <= blur), 0.0, error)
    return error.nan_to_num(torch.inf, torch.inf, torch.inf)


def find_step_size(
    acceptance: Callable[[Tensor], Tensor], step_size: Tensor, target: float, max_tries: int = 60
) -> Tensor:
    """Double or halve a step size until the acceptance of one step crosses ``target``, as Stan does.

    :param acceptance: of chains, ``(C,)``, whose momenta are drawn anew, with a step size.
    :param step_size: of all chains, ``()``, whose mean acceptance counts; or of each one by itself, ``(C, 1)``.
    :return: in the shape of ``step_size``.
    """

    def accepts(step: Tensor) -> Tensor:
        found = acceptance(step)
        return (found[:, None] if step.dim() else found.mean()) > target

    grow = accepts(step_size)
    factor, crossed = torch.where(grow, 2.0, 0.5).to(step_size), torch.zeros_like(grow)
    for _ in range(max_tries):
        step_size = torch.where(crossed, step_size, factor * step_size)
        crossed = crossed | (accepts(step_size) != grow)
        if bool(crossed.all()):
            break
    return step_size


# iterations of any kernel with full gradients, many as one program ---------------------------------------------------


def drawn(density: Density, state: State, count: int, *kinds: tuple[Tensor, str]) -> list[Tensor]:
    """Random numbers ``(B, ...)`` of so many iterations, in the order in which single iterations draw them; where a
    program does many iterations, with room for more, so that one program serves stretches of all lengths.

    :param kinds: tensors like that of one iteration, each with the name of the method that fills it.
    """
    size = max(count, longest_stretch(state.z)) if in_stretches(density) else count
    found = [like.new_empty(size, *like.shape) for like, _ in kinds]
    fills = [
        [getattr(row, fill) for row in rows[:count].unbind()] for rows, (_, fill) in zip(found, kinds, strict=True)
    ]
    for iteration in zip(*fills, strict=True):
        for fill in iteration:
            fill(generator=state.generator)
    return found


def iterations(
    density: Density,
    state: State,
    move: Callable[..., Any],
    learn: Callable[..., Any],
    like: Callable[[PhasePoint], Any],
    known: Any,
    rows: Any,
    count: int,
    plan: Plan,
    *others: Any,
    **static: Any,
) -> tuple[PhasePoint, Any, Any]:
    """So many iterations from a state; of more than one only if a program does many.

    :param move: ``(evaluate, at, known, row, mass, plan, *others, **static) -> at, seen, found``: one iteration.
    :param learn: ``(known, seen, mass, plan) -> known``: what is learnt of what it has seen.
    :param like: a point -> what such an iteration finds, of the same shapes and dtypes.
    :param known: what iterations learn, as tensors.
    :param rows: their random numbers, ``(B, ...)``.
    :return: the last point, what is known then, and what was found, ``(count, ...)``.
    """
    at, mass = PhasePoint(state.z, state.momentum, state.energy, state.gradient), state.tuning.mass
    if in_stretches(density):
        given: Any = ((at, known), rows, torch.tensor(count, device="cpu"), mass, plan.for_program(state.z))
        (at, known), found = run(density, _scanned, *given, *others, move=move, learn=learn, like=like, **static)
        return at, known, mapped(lambda value: value[:count], found)
    row = mapped(lambda value: value[0], rows)
    if compiles(density):  # what learns would take as long to compile as a small model
        given = at, known, row, mass, plan.for_program(state.z)
        at, seen, found = run(density, move, *given, *others, **static)
    else:
        at, seen, found = move(density.energy_and_gradient, at, known, row, mass, plan, *others, **static)
    known = learn(known, seen, mass, plan) if plan.learning else known
    return at, known, mapped(lambda value: value[None], found)


def stretch_of(state: State, at: PhasePoint, tuning: Any, found: Any, statistics: dict[str, Tensor]) -> Stretch:
    """The stretch of iterations from a state that have found this, with the tuning after them.

    :param found: has positions ``z``, the energies' ``slope`` there ``(B, C, D)`` and ``potential`` ``(B, C)``.
    """
    if tuning.learns:
        for draw in zip(found.z, found.potential, found.slope, strict=True):
            tuning = tuning.noted(*draw)
    last = State(*at, tuning, state.generator, {name: value[-1] for name, value in statistics.items()})
    return Stretch(last, found.z, found.potential, statistics)


def mapped(function: Callable[..., Tensor], *values: Any) -> Any:
    """Apply a function to every tensor of (nested) tuples and lists of one structure."""
    first = values[0]
    if isinstance(first, Tensor):
        return function(*values)
    parts = [mapped(function, *parts) for parts in zip(*values, strict=True)]
    return parts if isinstance(first, list) else type(first)(*parts)


def _scanned(
    evaluate: Evaluate,
    carried: tuple[PhasePoint, Any],
    rows: Any,
    count: Tensor,
    mass: Mass,
    plan: Plan,
    *others: Any,
    move: Callable[..., Any],
    learn: Callable[..., Any],
    like: Callable[[PhasePoint], Any],
    **static: Any,
) -> Any:
    def learns(evaluate: Evaluate, known: Any, *seen: Any) -> Any:
        return learn(known, *seen)

    def body(evaluate: Evaluate, carried: Any, row: Any, mass: Mass, plan: Plan, *others: Any) -> Any:
        at, seen, found = move(evaluate, *carried, row, mass, plan, *others, **static)
        return (at, repeat(evaluate, plan.learning, learns, carried[1], seen, mass, plan)), found

    return scan(evaluate, count, body, carried, rows, like(carried[0]), mass, plan, *others)
