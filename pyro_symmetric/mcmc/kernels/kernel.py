"""The contract of a sampler: pure steps of all chains at once over one immutable state.

A :class:`Kernel` holds settings and the model, nothing that changes. What changes is the :class:`State`: where the
chains are and what warm-up has learnt so far. A run drives it: :meth:`Kernel.init` once, then :meth:`Kernel.step` for
each iteration, and in warm-up :meth:`Kernel.adapt` after each. The state, its random generator included, determines
all that follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.traced import require_model


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


def required(state: Any, z: Tensor, kernel: Kernel, method: str) -> State:
    """The state that a kernel returned, checked: chains at as many places as ``z``."""
    name = f"what {type(kernel).__name__}.{method} returned"
    arguments.instance(name, state, State, "a pyro_symmetric.mcmc.State")
    if state.z.shape != z.shape:
        raise ValueError(f"{name} has z of shape {tuple(state.z.shape)}; it must be {tuple(z.shape)}")
    return state


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
