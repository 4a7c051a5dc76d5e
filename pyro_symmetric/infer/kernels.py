"""The kernels with Pyro's arguments, which make ours."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyro.infer.autoguide.initialization import init_to_uniform
from torch import Tensor
from torch.distributions import Transform

from pyro_symmetric import arguments, mcmc
from pyro_symmetric.mcmc import Kernel

Potential = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class PyroKernel:
    """A kernel that was described as Pyro describes it; :func:`HMC` and :func:`NUTS` make it.

    :param kernel: ours, which holds the model; without one if there is a potential.
    :param potential_fn: takes unconstrained values, site -> tensor, and returns the potential energy, one number.
    :param transforms: of a potential: site -> map from its constrained to its unconstrained values, for
        :class:`MCMC` to give constrained draws.
    :param init_strategy: one of Pyro's, that draws a starting value for each site.
    """

    kernel: Kernel
    potential_fn: Potential | None = None
    transforms: Mapping[str, Transform] | None = None
    init_strategy: Callable[..., Any] = init_to_uniform

    def __post_init__(self) -> None:
        if (self.kernel.model is None) == (self.potential_fn is None):
            raise ValueError("exactly one of model and potential_fn must be given, found both or none of them")
        arguments.function("potential_fn", self.potential_fn, "a function of site -> tensor", none="there is a model")
        arguments.function("init_strategy", self.init_strategy, "one of pyro.infer.autoguide's init_to_* functions")
        require_transforms(self.transforms, self.potential_fn)

    def __repr__(self) -> str:
        if self.potential_fn is None:
            return repr(self.kernel)
        return f"{type(self.kernel).__name__}(potential_fn={getattr(self.potential_fn, '__name__', 'a function')})"

    @property
    def model(self) -> Callable[..., Any]:
        """The model; ``None`` if there is a potential."""
        return self.kernel.model


def HMC(
    model: Callable[..., Any] | None = None,
    potential_fn: Potential | None = None,
    step_size: float | None = 1.0,
    trajectory_length: float | None = None,
    num_steps: int | None = None,
    adapt_step_size: bool = True,
    adapt_mass_matrix: bool = True,
    full_mass: bool | Sequence[tuple[str, ...]] = False,
    transforms: Mapping[str, Transform] | None = None,
    max_plate_nesting: int | None = None,
    jit_compile: bool = False,
    jit_options: Mapping[str, Any] | None = None,
    ignore_jit_warnings: bool = False,
    target_accept_prob: float = 0.8,
    init_strategy: Callable[..., Any] = init_to_uniform,
    *,
    min_stepsize: float = 1e-10,
    max_stepsize: float = 1e10,
) -> PyroKernel:
    r"""Hamiltonian Monte Carlo with Pyro's arguments, for :class:`MCMC`.

    >>> MCMC(HMC(model, trajectory_length=1.0), num_samples=200)

    :param model: any Pyro model.
    :param potential_fn: instead of a model, a function of unconstrained values that returns their potential energy.
    :param step_size: of the leapfrog; if it is adapted, warm-up finds it, wherever it starts.
    :param trajectory_length: mean integration time of a trajectory. Each one's is drawn anew between 0 and twice the
        mean, against resonance; in Pyro all are of one length.
    :param num_steps: instead of a length: it is ``step_size * num_steps``, also when the step size is adapted. With
        neither, the length is :math:`2 \pi`.
    :param adapt_step_size: whether warm-up adapts the step size.
    :param adapt_mass_matrix: whether warm-up learns the mass matrix.
    :param full_mass: whether the mass matrix is dense. Of a list of blocks, a dense one is made, with a warning.
    :param transforms: of a ``potential_fn`` only: site -> map to its unconstrained values.
    :param max_plate_nesting: not needed, as are ``jit_compile`` and ``ignore_jit_warnings``.
    :param jit_options: has no counterpart, as have ``min_stepsize`` and ``max_stepsize``: a warning says so.
    :param target_accept_prob: mean acceptance that the step size is adapted to.
    :param init_strategy: one of ``pyro.infer.autoguide.initialization``.
    """
    arguments.positive("step_size", step_size, none="1")
    arguments.positive("trajectory_length", trajectory_length, none="of num_steps")
    arguments.whole("num_steps", num_steps, 1, none="of trajectory_length")
    first = 1.0 if step_size is None else step_size
    steps_length = 2 * math.pi if num_steps is None else first * num_steps
    kernel = mcmc.HMC(
        model,  # type: ignore[arg-type]
        trajectory_length=steps_length if trajectory_length is None else trajectory_length,
        max_steps=1024,  # as many as the No-U-Turn sampler takes; Pyro's know no limit
        **_settings(step_size, adapt_step_size, adapt_mass_matrix, full_mass, target_accept_prob),
    )
    _require_sensible(max_plate_nesting, jit_compile, ignore_jit_warnings)
    _warn_of_idle(full_mass, jit_options)
    bounds = arguments.positive("min_stepsize", min_stepsize), arguments.positive("max_stepsize", max_stepsize)
    if bounds != (1e-10, 1e10):
        warn("min_stepsize or max_stepsize is given, but the step size is adapted without bounds")
    return PyroKernel(kernel, potential_fn, transforms, init_strategy)


def NUTS(
    model: Callable[..., Any] | None = None,
    potential_fn: Potential | None = None,
    step_size: float | None = 1.0,
    adapt_step_size: bool = True,
    adapt_mass_matrix: bool = True,
    full_mass: bool | Sequence[tuple[str, ...]] = False,
    use_multinomial_sampling: bool = True,
    transforms: Mapping[str, Transform] | None = None,
    max_plate_nesting: int | None = None,
    jit_compile: bool = False,
    jit_options: Mapping[str, Any] | None = None,
    ignore_jit_warnings: bool = False,
    target_accept_prob: float = 0.8,
    max_tree_depth: int = 10,
    init_strategy: Callable[..., Any] = init_to_uniform,
) -> PyroKernel:
    """The No-U-Turn sampler with Pyro's arguments, for :class:`MCMC`.

    >>> MCMC(NUTS(model, full_mass=True), num_samples=500, num_chains=4)

    :param use_multinomial_sampling: ``False`` asks for slice sampling. Both draw from the same posterior; here the
        sampling is multinomial always, and a warning says so.
    :param max_tree_depth: a trajectory has at most ``2 ** max_tree_depth - 1`` steps.

    The other arguments are those of :func:`HMC`.
    """
    arguments.positive("step_size", step_size, none="1")
    arguments.whole("max_tree_depth", max_tree_depth, 1)
    arguments.flag("use_multinomial_sampling", use_multinomial_sampling)
    kernel = mcmc.NUTS(
        model,  # type: ignore[arg-type]
        max_treedepth=max_tree_depth,
        **_settings(step_size, adapt_step_size, adapt_mass_matrix, full_mass, target_accept_prob),
    )
    _require_sensible(max_plate_nesting, jit_compile, ignore_jit_warnings)
    _warn_of_idle(full_mass, jit_options)
    if not use_multinomial_sampling:
        warn("use_multinomial_sampling is False, but states are drawn multinomially: here is no slice sampling")
    return PyroKernel(kernel, potential_fn, transforms, init_strategy)


# small steps --------------------------------------------------------------------------------------------------------


def _settings(
    step_size: float | None, adapt_step_size: bool, adapt_mass: bool, full_mass: Any, target_accept: float
) -> dict[str, Any]:
    """The settings that our Hamiltonian kernels share."""
    arguments.flag("adapt_mass_matrix", adapt_mass)
    arguments.fraction("target_accept_prob", target_accept)
    if not isinstance(full_mass, bool):
        for block in arguments.listed("full_mass", full_mass, tuple, "True, False or a list of tuples of sites"):
            arguments.listed("full_mass", block, str, "True, False or a list of tuples of sites")
    fixed = None if adapt_step_size is True else 1.0 if step_size is None else float(step_size)
    return {
        "step_size": fixed,
        "adapt_step_size": adapt_step_size,
        "adapt_mass": adapt_mass,
        "mass": "dense" if full_mass else "diagonal",
        "target_accept": target_accept,
    }


def _require_sensible(max_plate_nesting: Any, jit_compile: Any, ignore_jit_warnings: Any) -> None:
    arguments.whole("max_plate_nesting", max_plate_nesting, 0, none="what the model has")
    arguments.flag("jit_compile", jit_compile)
    arguments.flag("ignore_jit_warnings", ignore_jit_warnings)


def require_transforms(transforms: Any, potential_fn: Potential | None) -> None:
    if transforms is None:
        return
    for site, transform in arguments.mapping("transforms", transforms, "site -> transform").items():
        arguments.instance(f"transforms[{site!r}]", transform, Transform, "a torch.distributions.Transform")
    if potential_fn is None:
        raise ValueError(
            "transforms is given, but a model's sites are transformed by their supports; reparametrise the model by "
            "pyro.poutine.reparam, or pass potential_fn"
        )


def _warn_of_idle(full_mass: Any, jit_options: Any) -> None:
    arguments.mapping("jit_options", jit_options, "of torch.jit.trace", none="none")
    if not isinstance(full_mass, bool) and full_mass:
        warn("full_mass names blocks; here the mass matrix is dense as a whole, which holds them", 4)
    if jit_options:
        warn("jit_options are given, but torch.jit isn't used; see the engine of sample", 4)


def warn(words: str, stacklevel: int = 3) -> None:
    """Say that something that was asked for has no meaning here; by default, to who called the caller."""
    warnings.warn(words, RuntimeWarning, stacklevel=stacklevel)
