"""The contract of a sampler: pure steps of all chains at once over one immutable state; and what kernels share.

A :class:`Kernel` holds settings and the model, nothing that changes. What changes is the :class:`State`: where the
chains are and what warm-up has learnt so far. A run drives it: :meth:`Kernel.init` once, then :meth:`Kernel.step` for
each iteration, and in warm-up :meth:`Kernel.adapt` after each. The state, its random generator included, determines
all that follows. Kernels of full gradients move in phase space: by a mass matrix, which gives momenta their scale, and
by the leapfrog method, but for the microcanonical one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.eager import Evaluate
from pyro_symmetric.traced import require_model

ROUNDING = 4.0  # of a sum, in units of the last place, about
MAX_ENERGY_ERROR = 1000.0  # beyond it a trajectory counts as divergent, as in Stan and Pyro


@dataclass(frozen=True, eq=False)
class State:
    """All chains at one iteration; C chains, D unconstrained coordinates.

    >>> z = torch.zeros(4, 3)
    >>> state = ps.mcmc.State(z, torch.zeros_like(z), torch.zeros(4), torch.zeros_like(z), None, torch.Generator())
    >>> state.z.shape, dict(state.statistics)
    (torch.Size([4, 3]), {})

    :param z: positions ``(C, D)``.
    :param momentum: momenta at ``z``, ``(C, D)``; zeros if the kernel has none.
    :param energy: potential energy at ``z``, ``(C,)``; of stochastic-gradient kernels a mini-batch's estimate.
    :param gradient: its gradient ``(C, D)``; zeros if the kernel needs none.
    :param tuning: what warm-up learns, or ``None``: tensors, numbers, strings, ``None``, tuples and dictionaries of
        these, and frozen dataclasses of these, which this package's kernels or the modules of the kernel's own classes
        define. So a run can be written to disk, read back without running code that the file brings, and resumed.
    :param generator: where every random number of the run comes from, on the chains' device. It is the one part of a
        state that changes: it moves on as it is used.
    :param statistics: name -> ``(C,)``, of this iteration, named as ArviZ names sample statistics. Progress shows
        ``acceptance_rate`` and ``step_size`` if they are there, and ``diverging`` is counted.
    """

    z: Tensor
    momentum: Tensor
    energy: Tensor
    gradient: Tensor
    tuning: Any
    generator: torch.Generator
    statistics: Mapping[str, Tensor] = field(default_factory=dict)


class Kernel(ABC):
    """A sampler of a model. Subclasses are frozen dataclasses whose first field is ``model``.

    The guide "How to extend" writes one in twenty lines.

    A kernel of mini-batches has ``subsampled = True`` and a ``batch_size``. ``warmups`` are the lengths at which a
    warm-up of ``num_warmup="auto"`` may end, rising. If there are several, :meth:`adapt` must do the same in warm-ups
    of all of them until it is told that this one ends: before, it is told the largest.
    """

    model: Callable[..., Any]
    subsampled = False  # whether the kernel works from mini-batches
    batch_size: int | None = None
    num_steps: int | None = None  # gradients of an iteration, if it is known beforehand how many, about
    warmups: ClassVar[tuple[int, ...]] = (500,)

    def __post_init__(self) -> None:
        if self.model is not None:  # a kernel without one can be driven by hand, on a Density
            require_model(self.model)

    @abstractmethod
    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        """The state of chains that start at ``z`` of shape ``(C, D)``.

        :param generator: on the device of ``z``; every random number of this kernel comes from it.
        """

    @abstractmethod
    def step(self, density: Density, state: State) -> State:
        """One iteration of all chains."""

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        """Learn from warm-up's iteration ``iteration`` (counted from 0) of ``num_warmup``; by default nothing."""
        return state

    def settings(self) -> dict[str, Any]:
        """The settings, for the metadata of a posterior."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}  # type: ignore[arg-type]
        return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in values.items()}

    def __repr__(self) -> str:
        """The model's name and the settings that aren't the defaults."""
        defaults = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        parts = [getattr(self.model, "__name__", type(self.model).__name__)]
        parts += [f"{name}={value!r}" for name, value in self.settings().items() if value != defaults[name]]
        return f"{type(self).__name__}({', '.join(parts)})"


# random numbers, all of a generator that is named, none of a global one ---------------------------------------------


def normal(like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers in the shape, dtype and place of ``like``."""
    return torch.empty_like(like).normal_(generator=generator)


def uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers uniform in [0, 1) in the shape, dtype and place of ``like``."""
    return torch.empty_like(like).uniform_(generator=generator)


def mini_batches(
    row_counts: Mapping[str, tuple[int, int]], num_chains: int, generator: torch.Generator
) -> dict[str, Tensor] | None:
    """A mini-batch of each chain's own, name -> LongTensor ``(C, B)``; ``None`` if all data are used.

    Chains that shared their mini-batches would share the noise of their gradients and no longer be independent.

    :param row_counts: name -> (rows there are, rows in a batch), as ``Density.row_counts``.
    """
    return {
        name: torch.randint(total, (num_chains, size), generator=generator, device=generator.device)
        for name, (total, size) in row_counts.items()
    } or None


# phase space ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Mass:
    r"""A mass matrix :math:`M = W^\top W` with :math:`W \Sigma W^\top = I`. Vectors are batched: ``batch + (D,)``.

    With :math:`M^{-1} = \Sigma`, the covariance of the unconstrained coordinates, all directions move at the same pace
    and one step size fits them all.

    :param covariance: :math:`\Sigma`, ``(D, D)``, or its diagonal ``(D,)`` if there is nothing else.
    :param whitener: :math:`W`, likewise.
    """

    covariance: Tensor
    whitener: Tensor

    @classmethod
    def of(cls, covariance: Tensor) -> Mass:
        """From a positive covariance, ``(D, D)`` or ``(D,)``."""
        if covariance.dim() == 1:
            return cls(covariance, covariance.rsqrt())
        exact = covariance.double()
        eye = torch.eye(len(exact), dtype=exact.dtype, device=exact.device)
        whitener = torch.linalg.solve_triangular(torch.linalg.cholesky(exact), eye, upper=False)
        return cls(covariance, whitener.to(covariance.dtype))

    @property
    def variance(self) -> Tensor:
        r"""The diagonal of :math:`\Sigma`, ``(D,)``."""
        return self.covariance if self.covariance.dim() == 1 else self.covariance.diagonal()

    def velocity(self, momentum: Tensor) -> Tensor:
        r""":math:`M^{-1} p = \Sigma p`."""
        return _product(momentum, self.covariance)

    def whiten(self, z: Tensor) -> Tensor:
        r""":math:`W z`, whose coordinates have variance 1 and no correlations."""
        return _product(z, self.whitener.t())

    def momentum(self, noise: Tensor) -> Tensor:
        r""":math:`W^\top \epsilon`: momenta :math:`\mathcal N(0, M)` from standard normal noise."""
        return _product(noise, self.whitener)

    def kinetic(self, momentum: Tensor) -> Tensor:
        r"""Kinetic energy :math:`\tfrac12 p^\top M^{-1} p`, of shape ``batch``."""
        return 0.5 * (momentum * self.velocity(momentum)).sum(-1)


def _product(vectors: Tensor, matrix: Tensor) -> Tensor:
    return vectors * matrix if matrix.dim() == 1 else vectors @ matrix


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


def with_fresh_momenta(state: State, mass: Mass) -> PhasePoint:
    """The places of the chains, with new momenta."""
    momentum = mass.momentum(normal(state.z, state.generator))
    return PhasePoint(state.z, momentum, state.energy, state.gradient)


def choose(mask: Tensor, if_true: PhasePoint, if_false: PhasePoint) -> PhasePoint:
    """For each chain the one point or the other, by a mask ``(C,)``."""
    rows = mask[:, None]
    return PhasePoint(
        *(torch.where(mask if a.dim() == 1 else rows, a, b) for a, b in zip(if_true, if_false, strict=True))
    )


def leapfrog(evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass) -> PhasePoint:
    """One step along the Hamiltonian flow: reversible, volume-preserving, energy error O(step²).

    :param evaluate: points ``(C, D)`` -> energy ``(C,)`` and gradient ``(C, D)``.
    :param step_size: ``(C, 1)``; negative ones go back in time.
    """
    momentum = torch.addcmul(start.momentum, step_size, start.gradient, value=-0.5)
    z = torch.addcmul(start.z, step_size, mass.velocity(momentum))
    energy, gradient = evaluate(z)
    return PhasePoint(z, torch.addcmul(momentum, step_size, gradient, value=-0.5), energy, gradient)


def energy_error(after: Tensor, before: Tensor) -> Tensor:
    """The change of a trajectory's energy, ``(C,)``; infinite where it left the support or all numbers behind.

    Far out, energies may be so large that rounding hides more than a unit. There what it may hide counts as none, or
    chains would be stuck: rounding alone would refuse every other step, however short.
    """
    error = after - before
    if error.dtype == torch.float32:
        blur = ROUNDING * torch.finfo(before.dtype).eps * before.abs()
        error = torch.where((blur > 1) & (error.abs() <= blur), 0.0, error)
    return error.nan_to_num(torch.inf, torch.inf, torch.inf)
