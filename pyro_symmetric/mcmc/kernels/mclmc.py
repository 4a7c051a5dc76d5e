r"""Microcanonical Langevin Monte Carlo: chains move at constant speed, steered by the
gradient and a little noise.

In coordinates :math:`x = W z` whitened by the mass matrix, with :math:`g = \nabla_x U`
and D coordinates,

.. math:: \dot x = \sqrt D\, u, \qquad
    \dot u = -\frac{\sqrt D}{D - 1} (I - u u^\top)\, g, \qquad |u| = 1,

leaves the product of :math:`e^{-U(x)}` and the uniform distribution of directions
:math:`u` invariant (Robnik, De Luca, Silverstein & Seljak 2023, arXiv 2212.08549; Ver
Steeg & Galstyan 2021, arXiv 2111.02434). The papers' speed is 1. Here it is
:math:`\sqrt D`, about that of Hamiltonian chains, so that times and step sizes of the
two dynamics compare; the papers' are :math:`\sqrt D` times ours. Momenta are :math:`p =
\sqrt D\, W^\top u`, so that the velocity is
:math:`\Sigma p` and :math:`p^\top \Sigma\, p = D`.

**The step size.** Every step is accepted, so draws are biased. The energy error
measures the bias: its square per step and coordinate, :math:`\eta = \mathbb E (\Delta
E)^2 / D`, is proportional to :math:`\varepsilon^6`, and the bias of variances to
:math:`\varepsilon^2 \propto \eta^{1/3}`. Warm-up finds the step size at which
:math:`\eta`, averaged over chains, is the target :math:`\eta_0`: by the stochastic
approximation of the other kernels, with
:math:`1 - \eta / \eta_0` as the function whose root is sought.

**The length** :math:`L`, the time of an iteration and of the decay of directions, is to
be 0.4 autocorrelation lengths of the draws, as in the paper. If correlations fall
geometrically, by the factor :math:`\rho` with each draw, the autocorrelation length is
:math:`L (1 + \rho) / (1 - \rho)`, and the rule is :math:`\rho = (1 - 0.4) / (1 + 0.4)`.
Warm-up solves it for :math:`\log L`, with :math:`\rho` averaged over chains and
whitened coordinates, centred at each chain's running mean. For a Gaussian :math:`L =
1.3`; means and squares decay fastest at :math:`L = 1`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.density.density import Density, Uncompiled, fused
from pyro_symmetric.density.eager import Evaluate
from pyro_symmetric.mcmc.kernels.adaptation import (
    HamiltonianTuning,
    StepSizeAdaptation,
    TunedKernel,
    tuned,
)
from pyro_symmetric.mcmc.kernels.hmc import median_step_size, round_up_steps
from pyro_symmetric.mcmc.kernels.kernel import (
    Mass,
    PhasePoint,
    State,
    choose,
    normal,
    resample_momenta,
)

OUTER = 0.1931833275037836  # lambda of the minimal-norm integrator
GRADIENTS = 2  # of a step
START = 1.0  # initial L
CORRELATION = 3 / 7  # target correlation of successive draws, (1 - 0.4) / (1 + 0.4)
# Newton's gain for log eps, as the energy error goes with the sixth power
STEP_GAIN = 1 / 6
LENGTH_GAIN = 1.0  # change of log L for a correlation that is off by 1
# limit of a chain's energy error, relative to its target, in the adaptation
LARGEST_RATIO = 100.0
DIVERGED = 1e4  # relative energy error beyond which an iteration is rejected


@dataclass(frozen=True, eq=False)
class MicrocanonicalTuning(HamiltonianTuning):
    """Results of warm-up, with the length :math:`L`.

    :param length: adaptation of the log of :math:`L`.
    :param centre: each chain's running mean, ``(C, D)``.
    :param last: positions of the previous iteration, ``(C, D)``.
    """

    length: StepSizeAdaptation
    centre: Tensor
    last: Tensor

    def of_chains(self, chains: Tensor) -> MicrocanonicalTuning:
        return replace(
            super().of_chains(chains),
            centre=self.centre[chains],
            last=self.last[chains],
        )


@dataclass(frozen=True, eq=False, repr=False)
class MCLMC(TunedKernel):
    r"""Microcanonical Langevin dynamics without rejections, so draws have a small bias,
    whose size is a setting.

    For posteriors of many dimensions and for networks, whose chains best start from a
    deep ensemble, ``initial=ps.ensemble(...)``, as in MILE (Sommer et al., ICLR 2025).

    **The bias**: with the default, variances of a Gaussian are 2 % too small. It is
    proportional to the cube root of ``energy_error``. Comparing chains doesn't show it,
    since all have the same bias. The statistic ``energy_error`` of the draws is
    relative to the setting, and :func:`~pyro_symmetric.compare.diagnose` checks it.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(20), 1.0).to_event(1))
    >>> posterior = ps.sample(
    ...     ps.MCLMC(model),
    ...     num_samples=100,
    ...     num_warmup=100,
    ...     num_chains=8,
    ...     seed=0,
    ...     progress=False,
    ... )
    >>> bool((posterior.samples["w"].std() - 1).abs() < 0.05)
    True

    Other settings, except ``target_accept_prob``, are those of
    :class:`~pyro_symmetric.mcmc.NUTS`.

    :param energy_error: :math:`\eta_0`, the mean squared energy error per step and
        coordinate that the step size is adapted to. For predictions of networks 0.05
        suffices; MILE uses 0.1 to 0.5.
    :param max_steps: upper limit of the steps of one iteration, of two gradients each.
    """

    energy_error: float = 5e-4
    max_steps: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("energy_error", self.energy_error)
        arguments.whole("max_steps", self.max_steps, 1)

    def init(
        self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator
    ) -> State:
        if z.shape[-1] < 2:
            raise ValueError(
                f"model has {z.shape[-1]} coordinate, but MCLMC needs at least 2, as "
                "its chains move by turning; use "
                "HMC or NUTS"
            )
        search = StepSizeAdaptation.start(
            z.new_tensor(START), CORRELATION, gain=LENGTH_GAIN
        )
        state = super().init(density, z, num_warmup, generator)
        tuning = MicrocanonicalTuning(
            **vars(state.tuning), length=search, centre=z, last=z
        )
        return replace(state, tuning=tuning)

    def step(self, density: Density, state: State) -> State:
        tuning: MicrocanonicalTuning = state.tuning
        length = tuning.length.log_step.exp()
        step_size = tuning.step_size[:, None]
        steps = length / median_step_size(tuning.step_size) - 0.5
        num_steps = round_up_steps(steps, self.max_steps, tuning)
        spread = torch.expm1(2 * step_size / length.to(step_size.dtype)).sqrt()
        start = point = PhasePoint(
            state.z, state.momentum, state.energy, state.gradient
        )
        squares = torch.zeros_like(state.energy)
        for _ in range(num_steps):
            noise = normal(state.z, state.generator)
            point, error = fused(
                density, langevin_step, point, noise, spread, step_size, tuning.mass
            )
            squares = squares + error.square()
        ratio = squares / (num_steps * state.z.shape[-1] * self.energy_error)
        accept = ratio < DIVERGED  # False for NaN
        # A rejected chain turns round, so that it takes another path.
        point = choose(accept, point, start._replace(momentum=-start.momentum))
        statistics = {
            "lp": -point.energy,
            "energy_error": torch.where(accept, ratio, torch.nan),
            "diverging": ~accept,
            "step_size": tuning.step_size,
            "n_steps": torch.full_like(ratio, GRADIENTS * num_steps, dtype=torch.long),
        }
        return State(*point, tuning, state.generator, statistics)

    def adapt(
        self, density: Density, state: State, iteration: int, num_warmup: int
    ) -> State:
        tuning: MicrocanonicalTuning = state.tuning
        search = tuning.length
        if not tuning.blind:
            shortest = median_step_size(state.statistics["step_size"]).log()
            longest = shortest + math.log(self.max_steps)
            search = search.update(
                correlation(tuning.last, state.z, tuning.centre, tuning.mass)
            )
            log_step = search.log_step.clamp(min=shortest, max=longest)
            search = replace(search, log_step=log_step)
        if iteration + 1 == num_warmup:
            search = replace(search, log_step=search.log_average)
        centre = tuning.centre.lerp(state.z, 2 / (iteration + 2))
        state = tuned(state, length=search, centre=centre, last=state.z)
        return super().adapt(density, state, iteration, num_warmup)

    # step-size adaptation -------------------------------------------------------------

    def search(self, step_size: Tensor, follow: bool) -> StepSizeAdaptation:
        return StepSizeAdaptation.start(step_size, 0.0, follow, STEP_GAIN)

    def trial_acceptance(
        self, density: Density | Uncompiled, state: State, step_size: Tensor
    ) -> Tensor:
        mass = state.tuning.mass
        start = resample_momenta(state, state.tuning.mass)
        start = start._replace(momentum=normalise(start.momentum, mass))
        error = fused(density, isokinetic_step, start, step_size[:, None], mass)[1]
        return self._margin(error.square() / (state.z.shape[-1] * self.energy_error))

    def acceptance(self, state: State) -> Tensor:
        return self._margin(state.statistics["energy_error"])

    def _margin(self, ratio: Tensor) -> Tensor:
        r"""Return :math:`1 - \eta / \eta_0`, with :math:`\eta` limited, in place of an
        acceptance rate.
        """
        return 1 - ratio.nan_to_num(LARGEST_RATIO).clamp(max=LARGEST_RATIO)


# the integrator -----------------------------------------------------------------------


def kick(
    momentum: Tensor, gradient: Tensor, time: Tensor, mass: Mass
) -> tuple[Tensor, Tensor]:
    r"""Turn momenta ``(C, D)`` by a constant gradient for ``time`` ``(C, 1)``; return
    them and the energy change.

    The solution is exact. With :math:`e = -g / |g|`, :math:`c = e \cdot u` and
    :math:`\delta = \varepsilon \sqrt D\, |g| / (D - 1)`,

    .. math:: u' = \frac{u + e\,(\sinh \delta + c\,(\cosh \delta - 1))}
        {\cosh \delta + c \sinh \delta}
        = \frac{(1 - t^2)\, u + 2 t\,(1 + c t)\, e}{1 + t^2 + 2 c t},
        \qquad t = \tanh \tfrac12 \delta,

    which can't overflow. It contracts the sphere of directions by :math:`(\cosh \delta
    + c \sinh \delta)^{-(D - 1)}`. So the energy, which the exact flow conserves,
    changes by :math:`(D - 1) \log(\cosh \delta + c \sinh \delta)`.
    """
    dim = momentum.shape[-1]
    limits = torch.finfo(momentum.dtype)
    velocity = mass.velocity(gradient)
    norm = torch.linalg.vecdot(gradient, velocity).sqrt().clamp(min=limits.tiny)
    half = norm * time[:, 0] * (0.5 * math.sqrt(dim) / (dim - 1))
    # gap = 1 - t without cancellation
    t = torch.tanh(half)
    gap = 2 * torch.sigmoid(-2 * half)
    share = t / norm
    # turn = t (1 + c): all terms below are positive, so nothing cancels
    turn = t - (torch.linalg.vecdot(momentum, velocity) * share * dim**-0.5)
    turn = torch.maximum(turn, limits.eps * t)
    scale = 1 / (gap * gap + 2 * turn).clamp(min=limits.tiny)
    keep = (gap * (1 + t) * scale).clamp(min=limits.tiny)  # 1 / (cosh + c sinh)
    push = share * (gap + turn) * scale
    turned = torch.addcmul(
        keep[:, None] * momentum, push[:, None], gradient, value=-2 * math.sqrt(dim)
    )
    return turned, (1 - dim) * keep.log()


def isokinetic_step(
    evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass
) -> tuple[PhasePoint, Tensor]:
    r"""Take one step of sizes ``(C, 1)``; return its end and the energy error ``(C,)``,
    of potential and kicks.

    The minimal-norm splitting of two gradients (McLachlan 1995; Omelyan, Mryglod & Folk
    2002),

    .. math:: \text{kick}(\lambda \varepsilon)\ \text{drift}(\tfrac12 \varepsilon)\
        \text{kick}((1 - 2 \lambda) \varepsilon)\ \text{drift}(\tfrac12 \varepsilon)\
        \text{kick}(\lambda \varepsilon), \qquad \lambda = 0.1932,

    is of second order and reversible: after a change of sign of the momenta it goes
    back in time.
    """
    z = start.z
    half = 0.5 * step_size
    p, first = kick(start.momentum, start.gradient, OUTER * step_size, mass)
    z = z + half * mass.velocity(p)
    p, inner = kick(p, evaluate(z)[1], (1 - 2 * OUTER) * step_size, mass)
    z = z + half * mass.velocity(p)
    energy, gradient = evaluate(z)
    p, last = kick(p, gradient, OUTER * step_size, mass)
    error = energy - start.energy + first + inner + last
    return PhasePoint(z, p, energy, gradient), error


def langevin_step(
    evaluate: Evaluate,
    start: PhasePoint,
    noise: Tensor,
    spread: Tensor,
    step_size: Tensor,
    mass: Mass,
) -> tuple[PhasePoint, Tensor]:
    r"""Perturb directions by standard normal noise :math:`\xi`, ``(C, D)``, then take
    an :func:`isokinetic_step`.

    .. math:: u \leftarrow \frac{u + \nu \xi}{|u + \nu \xi|},
        \qquad \nu^2 = (e^{2 \varepsilon / L} - 1) / D,

    makes directions decorrelate in the time :math:`L` (Robnik & Seljak 2023, arXiv
    2303.18221).

    :param spread: :math:`\sqrt D\, \nu`, ``(C, 1)``.
    """
    perturbed = normalise(start.momentum + spread * mass.momentum(noise), mass)
    return isokinetic_step(
        evaluate, start._replace(momentum=perturbed), step_size, mass
    )


def normalise(momentum: Tensor, mass: Mass) -> Tensor:
    r"""Scale momenta ``(C, D)`` to :math:`p^\top \Sigma\, p = D`."""
    scale = (momentum.shape[-1] / (2 * mass.kinetic(momentum))).sqrt()
    return momentum * scale[:, None]


def correlation(before: Tensor, after: Tensor, centre: Tensor, mass: Mass) -> Tensor:
    """Return the correlation of two successive draws ``(C, D)``, ``()`` in double
    precision; 0 if no chain moved.
    """
    first = mass.whiten(before - centre)
    last = mass.whiten(after - centre)
    squares = (first.square().sum() + last.square().sum()).double() / 2
    products = torch.linalg.vecdot(first, last).sum().double()
    return torch.where(squares > 0, products / squares, 0.0)
