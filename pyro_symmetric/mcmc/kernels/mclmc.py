r"""Microcanonical Langevin Monte Carlo: chains move at constant speed, the gradient and a little noise turn them.

In coordinates :math:`x = W z` that the mass matrix has whitened, with :math:`g = \nabla_x U` and D coordinates,

.. math:: \dot x = \sqrt D\, u, \qquad
    \dot u = -\frac{\sqrt D}{D - 1} (I - u u^\top)\, g, \qquad |u| = 1,

leaves :math:`e^{-U(x)}` times the uniform distribution of directions :math:`u` invariant (Robnik, De Luca, Silverstein
& Seljak 2023, arXiv 2212.08549; Ver Steeg & Galstyan 2021, arXiv 2111.02434). The papers' speed is 1. Here it is
:math:`\sqrt D`, about that of Hamiltonian chains, so times and step sizes of the two dynamics compare; the papers'
are :math:`\sqrt D` times ours.

**A kick** for the time :math:`\varepsilon`, with fixed :math:`g`, is exact. With :math:`e = -g / |g|`,
:math:`c = e \cdot u` and :math:`\delta = \varepsilon \sqrt D\, |g| / (D - 1)`,

.. math:: u' = \frac{u + e\,(\sinh \delta + c\,(\cosh \delta - 1))}{\cosh \delta + c \sinh \delta}
    = \frac{(1 - t^2)\, u + 2 t\,(1 + c t)\, e}{1 + t^2 + 2 c t}, \qquad t = \tanh \tfrac12 \delta,

which no :math:`\delta` makes overflow. It contracts the sphere of directions by :math:`(\cosh \delta + c \sinh
\delta)^{-(D - 1)}`, so that the error of the energy, which the exact flow conserves, is

.. math:: \Delta E = \Delta U + (D - 1) \sum_{\text{kicks}} \log(\cosh \delta + c \sinh \delta).

**A step** is the minimal-norm splitting of two gradients (McLachlan 1995; Omelyan, Mryglod & Folk 2002), palindromic,
so reversible and of second order:

.. math:: \text{kick}(\lambda \varepsilon)\ \text{drift}(\tfrac12 \varepsilon)\
    \text{kick}((1 - 2 \lambda) \varepsilon)\ \text{drift}(\tfrac12 \varepsilon)\
    \text{kick}(\lambda \varepsilon), \qquad \lambda = 0.1932.

Before it directions turn at random, :math:`u \leftarrow (u + \nu \xi) / |u + \nu \xi|` with normal :math:`\xi` and
:math:`\nu^2 = (e^{2 \varepsilon / L} - 1) / D`: after the time :math:`L` they have forgotten theirs (Robnik & Seljak
2023, arXiv 2303.18221). Momenta are held as elsewhere, :math:`p = \sqrt D\, W^\top u`, so that the velocity is
:math:`\Sigma p` and :math:`p^\top \Sigma\, p = D`.

**The step size.** Every step is accepted, so draws are biased, and the error of the energy tells how much: its square
per step and coordinate, :math:`\eta = \mathbb E (\Delta E)^2 / D`, falls with :math:`\varepsilon^6`, the bias of
variances with :math:`\varepsilon^2 \propto \eta^{1/3}`. Warm-up finds the step for which :math:`\eta` is what was
asked, over all chains: by the search of the other kernels, whose curve is here :math:`1 - \eta / \eta_0`.

**The length** :math:`L` is to be 0.4 autocorrelation lengths of the draws, as in the paper. Each iteration lasts for
:math:`L`. So if correlations fall geometrically, by the factor :math:`\rho` with each draw, the autocorrelation length
is :math:`L (1 + \rho) / (1 - \rho)`, and the rule is :math:`\rho = (1 - 0.4) / (1 + 0.4)`, which warm-up solves for
:math:`\log L`, with :math:`\rho` the mean over all chains and whitened coordinates, about each chain's own average. For
a Gaussian that gives :math:`L = 1.3`; the fastest decay of both means and squares is at 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.compiled import evaluated_once, run
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.eager import Evaluate
from pyro_symmetric.mcmc.kernels.adaptation import HamiltonianTuning, StepSizeAdaptation, TunedKernel, tuned
from pyro_symmetric.mcmc.kernels.hmc import typical, whole_steps
from pyro_symmetric.mcmc.kernels.kernel import Mass, PhasePoint, State, choose, normal, with_fresh_momenta

OUTER = 0.1931833275037836  # lambda, for which the leading error is least
GRADIENTS = 2  # of a step
START = 1.0  # L, until it is learnt
CORRELATION = 3 / 7  # of successive draws, which makes L 0.4 autocorrelation lengths
STEP_GAIN = 1 / 6  # of the search for log eps: Newton's, for an error that goes with the sixth power
LENGTH_GAIN = 1.0  # the change of log L for a correlation that is off by 1
LARGEST_RATIO = 100.0  # of an energy error to what was asked, that the search takes from one chain
DIVERGED = 1e4  # of the same ratio, beyond which an iteration is taken back


@dataclass(frozen=True, eq=False, repr=False)
class MCLMC(TunedKernel):
    r"""Microcanonical Langevin dynamics of many chains: no step is rejected, so draws have a bias, which is asked for.

    For posteriors of many dimensions and for networks, whose chains best start from a deep ensemble,
    ``initial=ps.ensemble(...)``, as MILE does (Sommer et al., ICLR 2025).

    **The bias**: a Gaussian's variances come out 2 % too small at the default. It shrinks with the third root of
    ``energy_error``. No comparison of chains shows it, since they agree on the biased law. The statistic
    ``energy_error`` of the draws says what was kept, in units of what was asked, and
    :func:`~pyro_symmetric.compare.diagnose` judges it.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(20), 1.0).to_event(1))
    >>> posterior = ps.sample(ps.MCLMC(model), num_samples=100, num_warmup=100, num_chains=8, seed=0, progress=False)
    >>> bool((posterior.samples["w"].std() - 1).abs() < 0.05)
    True

    Other settings, but for ``target_accept``, are those of :class:`~pyro_symmetric.mcmc.NUTS`.

    :param energy_error: :math:`\eta`, the mean squared energy error of a step and coordinate that the step size is
        adapted to. For predictions of networks 0.05 is enough; MILE takes 0.1 to 0.5.
    :param max_steps: upper limit of the steps of one iteration, each of two gradients.
    """

    energy_error: float = 5e-4
    max_steps: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("energy_error", self.energy_error)
        arguments.whole("max_steps", self.max_steps, 1)

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        if z.shape[-1] < 2:
            raise ValueError(
                f"model has {z.shape[-1]} coordinate, but MCLMC needs at least 2, as its chains move by turning; use "
                "HMC or NUTS"
            )
        search = StepSizeAdaptation.start(z.new_tensor(START), CORRELATION, gain=LENGTH_GAIN)
        # The search for log L, each chain's average, weighted to the last iterations, and where it was before.
        return tuned(super().init(density, z, num_warmup, generator), length=(search, z, z))

    def step(self, density: Density, state: State) -> State:
        tuning: HamiltonianTuning = state.tuning
        length, steps = tuning.length[0].log_step.exp(), tuning.step_size[:, None]
        num_steps = whole_steps(length / typical(tuning.step_size) - 0.5, self.max_steps, tuning)
        spread = torch.expm1(2 * steps / length.to(steps.dtype)).sqrt()
        start = at = PhasePoint(state.z, state.momentum, state.energy, state.gradient)
        squares = torch.zeros_like(state.energy)
        for _ in range(num_steps):
            noise = normal(state.z, state.generator)
            at, change = run(density, langevin, at, noise, spread, steps, tuning.mass)
            squares = squares + change.square()
        ratio = squares / (num_steps * state.z.shape[-1] * self.energy_error)
        kept = ratio < DIVERGED  # neither too much, nor NaN
        # What is taken back turns round, so that it doesn't meet the same end again.
        at = choose(kept, at, start._replace(momentum=-start.momentum))
        statistics = {
            "lp": -at.energy,
            "energy_error": torch.where(kept, ratio, torch.nan),
            "diverging": ~kept,
            "step_size": tuning.step_size,
            "n_steps": torch.full_like(ratio, GRADIENTS * num_steps, dtype=torch.long),
        }
        return State(*at, tuning, state.generator, statistics)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        tuning: HamiltonianTuning = state.tuning
        search, centre, before = tuning.length
        if not tuning.blind:
            shortest = typical(state.statistics["step_size"]).log()
            longest = shortest + math.log(self.max_steps)
            search = search.update(correlation(before, state.z, centre, tuning.mass))
            search = replace(search, log_step=search.log_step.clamp(min=shortest, max=longest))
        if iteration + 1 == num_warmup:
            search = replace(search, log_step=search.log_average)
        state = tuned(state, length=(search, centre.lerp(state.z, 2 / (iteration + 2)), state.z))
        return super().adapt(density, state, iteration, num_warmup)

    # the step size --------------------------------------------------------------------------------------------------

    def search(self, step_size: Tensor, follow: bool) -> StepSizeAdaptation:
        return StepSizeAdaptation.start(step_size, 0.0, follow, STEP_GAIN)

    def accepts(self, density: Density, state: State, step_size: Tensor) -> Tensor:
        mass, start = state.tuning.mass, with_fresh_momenta(state, state.tuning.mass)
        start = start._replace(momentum=directed(start.momentum, mass))
        error = isokinetic(lambda z: evaluated_once(density, z), start, step_size[:, None], mass)[1]
        return self._excess(error.square() / (state.z.shape[-1] * self.energy_error))

    def accepted(self, state: State) -> Tensor:
        return self._excess(state.statistics["energy_error"])

    def _excess(self, ratio: Tensor) -> Tensor:
        """The curve of the search, of ratios of energy errors to what was asked: 0 where they are equal."""
        return 1 - ratio.nan_to_num(LARGEST_RATIO).clamp(max=LARGEST_RATIO)


def kicked(momentum: Tensor, gradient: Tensor, time: Tensor, mass: Mass) -> tuple[Tensor, Tensor]:
    """Momenta ``(C, D)`` after a kick that lasts for ``time`` ``(C, 1)``, and what it adds to the energy's change,
    ``(C,)``."""
    dim, limits = momentum.shape[-1], torch.finfo(momentum.dtype)
    along = mass.velocity(gradient)
    norm = torch.linalg.vecdot(gradient, along).sqrt().clamp(min=limits.tiny)
    half = norm * time[:, 0] * (0.5 * math.sqrt(dim) / (dim - 1))
    t, gap = torch.tanh(half), 2 * torch.sigmoid(-2 * half)  # gap = 1 - t, which would round to nothing
    share = t / norm
    # t (1 + c), as far as directions tell: nothing cancels in what is made of it
    turn = t - (torch.linalg.vecdot(momentum, along) * share * dim**-0.5)
    turn = torch.maximum(turn, limits.eps * t)
    scale = 1 / (gap * gap + 2 * turn).clamp(min=limits.tiny)
    keep = (gap * (1 + t) * scale).clamp(min=limits.tiny)  # 1 / (cosh + c sinh)
    push = share * (gap + turn) * scale
    turned = torch.addcmul(keep[:, None] * momentum, push[:, None], gradient, value=-2 * math.sqrt(dim))
    return turned, (1 - dim) * keep.log()


def directed(momentum: Tensor, mass: Mass) -> Tensor:
    r"""Momenta ``(C, D)`` of the same directions and of length :math:`\sqrt D`."""
    return momentum * (momentum.shape[-1] / (2 * mass.kinetic(momentum))).sqrt()[:, None]


def isokinetic(evaluate: Evaluate, start: PhasePoint, step_size: Tensor, mass: Mass) -> tuple[PhasePoint, Tensor]:
    """One step of sizes ``(C, 1)``: where it ends, and the energy's change ``(C,)``. To go back in time, turn the
    momenta round."""
    z, half = start.z, 0.5 * step_size
    p, first = kicked(start.momentum, start.gradient, OUTER * step_size, mass)
    z = z + half * mass.velocity(p)
    p, inner = kicked(p, evaluate(z)[1], (1 - 2 * OUTER) * step_size, mass)
    z = z + half * mass.velocity(p)
    energy, gradient = evaluate(z)
    p, last = kicked(p, gradient, OUTER * step_size, mass)
    return PhasePoint(z, p, energy, gradient), energy - start.energy + first + inner + last


def langevin(
    evaluate: Evaluate, start: PhasePoint, noise: Tensor, spread: Tensor, step_size: Tensor, mass: Mass
) -> tuple[PhasePoint, Tensor]:
    r""":func:`isokinetic` of directions that standard normal noise ``(C, D)`` has turned.

    :param spread: :math:`\sqrt D\, \nu`, ``(C, 1)``.
    """
    turned = directed(start.momentum + spread * mass.momentum(noise), mass)
    return isokinetic(evaluate, start._replace(momentum=turned), step_size, mass)


def correlation(before: Tensor, after: Tensor, centre: Tensor, mass: Mass) -> Tensor:
    """Correlation of draws ``(C, D)`` of two successive iterations, ``()``, in double precision; 0 if nothing moved."""
    first, last = (mass.whiten(z - centre) for z in (before, after))
    squares = (first.square().sum() + last.square().sum()).double() / 2
    return torch.where(squares > 0, torch.linalg.vecdot(first, last).sum().double() / squares, 0.0)
