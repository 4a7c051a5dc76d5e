"""The kernel contract, and what kernels share: random numbers, mass matrices and the
leapfrog integrator.

A :class:`Kernel` holds a model and settings, and never changes. A :class:`State` holds
the positions of all chains and the results of warm-up so far. A run calls
:meth:`Kernel.init` once, :meth:`Kernel.step` in each iteration and, in warm-up,
:meth:`Kernel.adapt` after each step. The state, including its random generator,
determines all later states.
"""

from __future__ import annotations

import inspect
from abc import ABCMeta, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Json, Model, Names
from pyro_symmetric.density.density import Density, Uncompiled, evaluated_once, fused
from pyro_symmetric.density.eager import Evaluate
from pyro_symmetric.density.traced import require_model
from pyro_symmetric.weights import Tensors, Weights, map_values

ROUNDING = 4.0  # approximate rounding error of an energy, in units of the last place
MAX_ENERGY_ERROR = 1000.0  # of a trajectory that isn't divergent, as in Stan and Pyro


@dataclass(frozen=True, eq=False)
class State:
    """The state of ``C`` chains with ``D`` unconstrained coordinates after an
    iteration.

    >>> z = torch.zeros(4, 3)
    >>> state = ps.mcmc.State(
    ...     z,
    ...     torch.zeros_like(z),
    ...     torch.zeros(4),
    ...     torch.zeros_like(z),
    ...     None,
    ...     torch.Generator(),
    ... )
    >>> state.z.shape, dict(state.statistics)
    (torch.Size([4, 3]), {})

    :param z: positions ``(C, D)``.
    :param momentum: momenta ``(C, D)``; zeros if the kernel has none.
    :param energy: potential energy ``(C,)``; a mini-batch estimate in
        stochastic-gradient kernels.
    :param gradient: gradient of the potential energy, ``(C, D)``; zeros if the kernel
        needs none.
    :param tuning: results of warm-up, or ``None``: tensors, numbers, strings, and
        tuples, dictionaries and frozen dataclasses of these. The dataclasses must be
        defined in this package or in the modules of the kernel's classes, so that a
        stored run can be read back without executing code from the file.
    :param generator: source of all random numbers of the run, on the device of the
        chains. Drawing advances it; every other part of a state is immutable.
    :param statistics: sample statistics of this iteration, name -> ``(C,)``, with
        ArviZ's names. The progress bar shows ``acceptance_rate`` and ``step_size``, and
        counts ``diverging``.
    """

    z: Tensor
    momentum: Tensor
    energy: Tensor
    gradient: Tensor
    tuning: Any
    generator: Generator
    statistics: Tensors = field(default_factory=dict)

    def of_chains(self, chains: Tensor) -> State:
        """Select chains by their indices, which may repeat. The tuning must have such a
        method, too.
        """
        return replace(
            self,
            z=self.z[chains],
            momentum=self.momentum[chains],
            energy=self.energy[chains],
            gradient=self.gradient[chains],
            tuning=self.tuning.of_chains(chains),
            statistics={name: v[chains] for name, v in self.statistics.items()},
        )


# names in other libraries, and the names here
GUESSES = {
    "mass": "full_mass",
    "dense_mass": "full_mass",
    "adapt_mass": "adapt_mass_matrix",
    "adapt_delta": "target_accept_prob",
    "target_acceptance_rate": "target_accept_prob",
    "max_num_doublings": "max_tree_depth",
    "num_integration_steps": "num_steps",
    "learning_rate": "step_size",
}
OF_SAMPLE = {
    "num_samples",
    "num_warmup",
    "warmup_steps",
    "num_chains",
    "seed",
    "engine",
}


class _KernelType(ABCMeta):
    """Class of kernels, whose calls name the right argument for a wrong one."""

    ignored: Names
    refused: Mapping[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        for name in cls.ignored:
            kwargs.pop(name, None)
        for name, advice in cls.refused.items():
            if kwargs.pop(name, None) is not None:
                raise TypeError(f"{cls.__name__} takes no {name}: {advice}")
        strategy = kwargs.pop("init_strategy", None) if cls.refused else None
        if kwargs.get("trajectory_length", 0.0) is None:  # Pyro's default
            del kwargs["trajectory_length"]
        known = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
        if all(
            argument.kind is not argument.VAR_KEYWORD for argument in known.values()
        ):
            advice = "pass it to sample" if kwargs.keys() & OF_SAMPLE else ""
            arguments.require_keywords(cls.__name__, known, kwargs, GUESSES, advice)
        kernel = super().__call__(*args, **kwargs)
        if strategy is not None:
            object.__setattr__(kernel, "init_strategy", strategy)
        return kernel


class Kernel(metaclass=_KernelType):
    """Base class of samplers. Subclasses are frozen dataclasses whose first field is
    ``model``.

    The guide "How to extend" writes a kernel in twenty lines.

    ``warmups`` are the lengths at which a warm-up of ``num_warmup="auto"`` may end, in
    increasing order. Until it ends,
    :meth:`adapt` receives the largest of them as ``num_warmup``; it must behave alike
    for all of them up to there.

    ``restarts`` are numbers of iterations after which chains in modes of negligible
    mass restart at the positions of others, if the class of the tuning defines a method
    ``of_chains(chains)`` that selects chains by their indices.
    """

    model: Model
    # whether gradients come from mini-batches, of ``batch_size`` rows of a
    # BayesianModel
    subsampled = False
    batch_size: int | None = None
    # approximate number of gradients in an iteration, if known in advance
    num_steps: int | None = None
    warmups: ClassVar[tuple[int, ...]] = (500,)
    restarts: ClassVar[tuple[int, ...]] = ()
    ignored: ClassVar[Names] = ()  # arguments that mean nothing
    # arguments of Pyro's kernels, and what to do instead
    refused: ClassVar[Mapping[str, str]] = {}
    # one of Pyro's, which places chains unless ``initial`` does
    init_strategy: ClassVar[Any] = None

    def __post_init__(self) -> None:
        # a kernel without a model can be run by hand on a Density
        if self.model is not None:
            require_model(self.model)

    @abstractmethod
    def init(
        self, density: Density, z: Tensor, num_warmup: int, generator: Generator
    ) -> State:
        """Return the initial state of chains at positions ``z``, ``(C, D)``.

        :param generator: source of all random numbers of this kernel, on the device of
            ``z``.
        """

    @abstractmethod
    def step(self, density: Density, state: State) -> State:
        """Advance all chains by one iteration."""

    def adapt(
        self, density: Density, state: State, iteration: int, num_warmup: int
    ) -> State:
        """Adapt after iteration ``iteration`` of a warm-up of ``num_warmup``, counted
        from 0; by default do nothing.
        """
        return state

    def energies(self, density: Density, state: State, z: Tensor) -> Tensor:
        """Return the energies ``(B,)`` of positions ``(B, D)`` between iterations, at
        most one for each chain.
        """
        return evaluated_once(density, z.to(state.z))[0]

    def settings(self) -> Json:
        """Return the settings, for the metadata of a posterior."""
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in names if name != "model"}
        return map_values(
            lambda value: value.tolist() if hasattr(value, "tolist") else value, values
        )

    def __repr__(self) -> str:
        """Show the name of the model and the settings that differ from the defaults."""
        defaults = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        parts = [getattr(self.model, "__name__", type(self.model).__name__)]
        parts += [
            f"{name}={value!r}"
            for name, value in self.settings().items()
            if value != defaults[name]
        ]
        return f"{type(self).__name__}({', '.join(parts)})"


# random numbers, never from global generators -----------------------------------------


def normal(example: Tensor, generator: Generator) -> Tensor:
    """Draw standard normal numbers with the shape, dtype and device of ``example``."""
    return torch.empty_like(example).normal_(generator=generator)


def uniform(example: Tensor, generator: Generator) -> Tensor:
    """Draw uniform numbers in [0, 1), with ``example``'s shape, dtype and device."""
    return torch.empty_like(example).uniform_(generator=generator)


def mini_batches(
    row_counts: Mapping[str, tuple[int, int]],
    num_chains: int,
    generator: Generator,
) -> Weights | None:
    """Draw row indices for each chain, name -> LongTensor ``(C, B)``; return ``None``
    if all data are used.

    Every chain has its own mini-batch: shared gradient noise would make the chains
    dependent.

    :param row_counts: name -> (rows in the data, rows in a mini-batch), as
        ``Density.row_counts``.
    """
    return {
        name: torch.randint(
            total, (num_chains, size), generator=generator, device=generator.device
        )
        for name, (total, size) in row_counts.items()
    } or None


# phase space --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Mass:
    r"""Diagonal mass matrix :math:`M = \Sigma^{-1} = W^\top W`, with :math:`\Sigma` the
    covariance of the coordinates.

    One step size then suits all directions. Vectors have shape ``(C, D)``.

    :param variance: the diagonal of :math:`\Sigma` of each chain, ``(C, D)``.
    """

    variance: Tensor

    @property
    def deviation(self) -> Tensor:
        """The roots of the variances."""
        return self.variance.sqrt()

    def of_chains(self, chains: Tensor) -> Mass:
        """Select the matrices of some chains, by their indices."""
        return replace(self, variance=self.variance[chains])

    def velocity(self, momentum: Tensor) -> Tensor:
        r"""Return :math:`M^{-1} p = \Sigma p`."""
        return momentum * self.variance

    def whiten(self, z: Tensor) -> Tensor:
        r"""Return :math:`W z`, whose coordinates have variance 1 and no
        correlations.
        """
        return z / self.deviation

    def momentum(self, noise: Tensor) -> Tensor:
        r"""Return :math:`W^\top \epsilon \sim \mathcal N(0, M)` from standard normal
        noise.
        """
        return noise / self.deviation

    def kinetic(self, momentum: Tensor) -> Tensor:
        r"""Return the kinetic energy :math:`\tfrac12 p^\top M^{-1} p`, of shape
        ``batch``.
        """
        return 0.5 * (momentum * self.velocity(momentum)).sum(-1)


@dataclass(frozen=True, eq=False)
class DenseMass(Mass):
    """Dense mass matrix: the correlations are shared by the chains.

    :param correlation: ``(D, D)``.
    :param whitener: inverse of its Cholesky factor.
    """

    correlation: Tensor
    whitener: Tensor

    @classmethod
    def of(cls, variance: Tensor, correlation: Tensor) -> DenseMass:
        """Return the matrix with a positive definite correlation matrix."""
        exact = correlation.double()
        eye = torch.eye(len(exact), dtype=exact.dtype, device=exact.device)
        whitener = torch.linalg.solve_triangular(
            torch.linalg.cholesky(exact), eye, upper=False
        )
        return cls(
            variance, correlation.to(variance.dtype), whitener.to(variance.dtype)
        )

    def velocity(self, momentum: Tensor) -> Tensor:
        deviation = self.deviation
        return (momentum * deviation) @ self.correlation * deviation

    def whiten(self, z: Tensor) -> Tensor:
        return (z / self.deviation) @ self.whitener.t()

    def momentum(self, noise: Tensor) -> Tensor:
        return noise @ self.whitener / self.deviation


class PhasePoint(NamedTuple):
    """Phase-space points of ``C`` chains; the fields are those of a
    :class:`~pyro_symmetric.mcmc.State`.
    """

    z: Tensor
    momentum: Tensor
    energy: Tensor
    gradient: Tensor

    def total_energy(self, mass: Mass) -> Tensor:
        """Return the Hamiltonian, potential plus kinetic energy, ``(C,)``."""
        return self.energy + mass.kinetic(self.momentum)


def resample_momenta(state: State, mass: Mass) -> PhasePoint:
    """Return the positions of the chains with momenta drawn from N(0, M)."""
    momentum = mass.momentum(normal(state.z, state.generator))
    return PhasePoint(state.z, momentum, state.energy, state.gradient)


def choose(mask: Tensor, if_true: PhasePoint, if_false: PhasePoint) -> PhasePoint:
    """Select one of two points for each chain, by a mask ``(C,)``."""
    rows = mask[:, None]
    return PhasePoint(
        *(
            torch.where(mask if a.dim() == 1 else rows, a, b)
            for a, b in zip(if_true, if_false, strict=True)
        )
    )


def leapfrog(
    evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass
) -> PhasePoint:
    """Take one leapfrog step: reversible, volume-preserving, with an energy error of
    O(step²).

    :param evaluate: positions ``(C, D)`` -> energies ``(C,)`` and gradients ``(C, D)``.
    :param step_size: ``(C, 1)``; negative steps integrate backwards in time.
    """
    momentum = torch.addcmul(start.momentum, step_size, start.gradient, value=-0.5)
    z = torch.addcmul(start.z, step_size, mass.velocity(momentum))
    energy, gradient = evaluate(z)
    return PhasePoint(
        z, torch.addcmul(momentum, step_size, gradient, value=-0.5), energy, gradient
    )


def runs_in_loops(density: Any, z: Tensor, mass: Mass) -> bool:
    """Return whether steps are loops over chains: those of a network of layers."""
    return (
        getattr(density, "engine", None) == "layers"
        and not isinstance(mass, DenseMass)
        and z.device.type == "cpu"
        and z.dtype in (torch.float32, torch.float64)
    )


def evaluated_at_rest(
    density: Density | Uncompiled, z: Tensor, mass: Mass
) -> PhasePoint:
    """Evaluate positions ``(C, D)`` by a leapfrog step of size 0, whose program
    iterations have anyway.
    """
    zeros = torch.zeros_like(z)
    at_rest = PhasePoint(z, zeros, z.new_zeros(len(z)), zeros)
    return fused(density, leapfrog, at_rest, z.new_zeros(len(z), 1), mass)


def energy_error(after: Tensor, before: Tensor) -> Tensor:
    """Return the energy error of trajectories, ``(C,)``; infinite outside the support
    and for NaN.

    In single precision, far out in the tails, energies may be so large that their
    rounding error exceeds 1. Differences within the rounding error count as 0 there.
    Otherwise half of all steps, however short, would be rejected.
    """
    error = after - before
    if error.dtype == torch.float32:
        rounding = ROUNDING * torch.finfo(before.dtype).eps * before.abs()
        error = torch.where((rounding > 1) & (error.abs() <= rounding), 0.0, error)
    return error.nan_to_num(torch.inf, torch.inf, torch.inf)
