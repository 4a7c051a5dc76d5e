r"""Warm-up of kernels with full gradients: the step size, shared by all chains, mass
matrices, and the end of warm-up.

**Windows.** As in Stan, the mass matrix is estimated in windows of doubling length,
between an initial phase in which chains reach the typical set and a final one in which
the step size settles (:func:`window_ends`).

**The step size** :math:`\varepsilon` is found by stochastic approximation
(:class:`StepSizeAdaptation`). Until the mass matrix is first known each chain has its
own step size, since scales differ far out in the tails. As chains approach the typical
set, much longer steps may become possible, so the search for a first step size is
repeated after 1, 2, 4, 8, ... iterations. Afterwards all chains share one step size,
adapted to their mean acceptance. A chain that lately accepted less than half as often
as it should takes shorter ones: its mass matrix may be that of its way to the
typical set. Its acceptance doesn't count in the mean.

**The mass matrix** is the covariance *within* chains: chains of a network usually sit
in different modes, and the distance between modes says nothing about the length of a
trajectory. It is pooled over the chains as far as they agree (:class:`MassEstimate`).

**The end** of a warm-up of length ``"auto"`` is when each chain is stationary. A kernel
lists lengths at which its warm-up may end (``Kernel.warmups``). At each of them
:class:`Agreement` computes a split :math:`\hat R` of the second half of the iterations;
if it is below :data:`LIMIT`, or at the last length, warm-up ends. A run that ends after
300 iterations has the same draws as one with ``num_warmup=300``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Model, Names
from pyro_symmetric.density.density import Density, evaluated_once
from pyro_symmetric.mcmc.kernels.kernel import (
    DenseMass,
    Kernel,
    Mass,
    State,
    energy_error,
    leapfrog,
    resample_momenta,
)
from pyro_symmetric.posterior.diagnostics import R_HAT
from pyro_symmetric.posterior.statistics import chain_statistics

DECAY = 0.6  # exponent of the gain; averaging requires one between 1/2 and 1
# gain and least logarithm of the factor by which a chain that is stuck takes shorter
# steps
SLOWING, MOST_SLOWING = 0.2, -20.0
LARGEST_GAIN = 8.0  # for targets near 1, where the acceptance curve is flat
LARGEST_CHANGE = 1.0  # of the log step size in one iteration
# iteration from which the gain is constant while chains approach the typical set
FOLLOWING = 4
BLIND_STEPS = 16  # of a trajectory while the mass matrix is unknown
MAX_TRIES = 60  # doublings or halvings of a first step size
DRAWS_PER_COORDINATE = 2  # from which on correlations are estimated
PRIOR_DRAWS, PRIOR_VARIANCE = 5.0, 1e-3  # shrinkage of variances, as in Stan
LEAST_VARIANCE = 1e-4  # of a chain, relative to the pooled one
LIMIT = R_HAT[1]
OUTLIERS = 32  # one in so many chains may be stuck in a lower mode
LARGEST = 999.0  # R-hat of chains that don't move
# arguments of Pyro's kernels that mean nothing here, so that its programs run as they
# are
IGNORED = (
    "max_plate_nesting",
    "jit_compile",
    "jit_options",
    "ignore_jit_warnings",
    "use_multinomial_sampling",
)
REFUSED = {
    "potential_fn": (
        "write the density as a model, e.g. pyro.sample sites with improper priors and "
        "pyro.factor('energy', -potential)"
    ),
    "transforms": "sites are mapped by the bijections of their supports; for others "
    "reparametrise the model by pyro.poutine.reparam",
    "min_stepsize": "the step size is adapted without bounds; leave it out",
    "max_stepsize": "the step size is adapted without bounds; leave it out",
}
# limits of the thinned history; an even number of draws
CHAINS = 64
COORDINATES = 512
DRAWS = 512


@dataclass(frozen=True, eq=False)
class HamiltonianTuning:
    """Results of warm-up.

    :param step_size: of the integrator, ``(C,)``.
    :param search: adaptation of the step size.
    :param mass: mass matrix of each chain.
    :param estimate: covariance in the current window; ``None`` outside of windows.
    :param blind: whether the mass matrix is still unknown.
    :param slowing: logarithm of the factor of each chain's step size, ``(C,)``: below 0
        in chains that accepted less than half as often as they should; 0 in MCLMC.
    """

    step_size: Tensor
    search: StepSizeAdaptation
    mass: Mass
    estimate: MassEstimate | None
    blind: bool
    slowing: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class TunedKernel(Kernel):
    """Base class of kernels that follow trajectories with full gradients."""

    warmups = (150, 200, 300, 500, 900, 1700)  # with common windows

    model: Model
    _: KW_ONLY
    step_size: float | None = None
    adapt_step_size: bool = True
    adapt_mass_matrix: bool = True
    full_mass: bool = False

    ignored: ClassVar[Names] = IGNORED
    refused: ClassVar[Mapping[str, str]] = REFUSED

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        for name in ("adapt_step_size", "adapt_mass_matrix", "full_mass"):
            arguments.one_of(name, getattr(self, name), (True, False))

    # for subclasses to define ---------------------------------------------------------

    @abstractmethod
    def search(self, step_size: Tensor, follow: bool) -> StepSizeAdaptation:
        """Start the adaptation of step sizes ``(C,)``."""

    @abstractmethod
    def trial_acceptance(
        self, density: Density, state: State, step_size: Tensor
    ) -> Tensor:
        """Return the acceptance ``(C,)`` of one step with fresh momenta, or what is
        adapted in its place.
        """

    @abstractmethod
    def acceptance(self, state: State) -> Tensor:
        """Return the same for the iteration that led to a state."""

    # the contract ---------------------------------------------------------------------

    def init(
        self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator
    ) -> State:
        energy, gradient = evaluated_once(density, z)
        step = torch.full_like(
            energy, 0.1 if self.step_size is None else self.step_size
        )
        blind = self.adapt_mass_matrix and len(window_ends(num_warmup)[1]) > 0
        mass = mass_of(torch.ones_like(z), self.full_mass)
        tuning = HamiltonianTuning(
            step,
            self.search(step, blind),
            mass,
            None,
            blind,
            torch.zeros_like(step),
        )
        state = State(z, torch.zeros_like(z), energy, gradient, tuning, generator)
        return (
            state
            if self.step_size is not None
            else self._find_step_size(density, state, step)
        )

    def adapt(
        self, density: Density, state: State, iteration: int, num_warmup: int
    ) -> State:
        tuning: HamiltonianTuning = state.tuning
        done = iteration + 1
        begin, ends = (
            window_ends(num_warmup) if self.adapt_mass_matrix else (num_warmup, ())
        )
        if tuning.estimate is not None:
            state = tuned(state, estimate=tuning.estimate.update(state.z))
        if self.adapt_step_size:
            acceptance = self.acceptance(state)
            search = tuning.search.update(
                acceptance if tuning.blind else acceptance.mean().expand_as(acceptance)
            )
            step = (
                search.log_step.exp()
                .to(acceptance.dtype)
                .clamp(min=torch.finfo(acceptance.dtype).tiny)
            )
            state = tuned(state, search=search, step_size=step)
            # after 1, 2, 4, 8, ... iterations
            if tuning.blind and done & iteration == 0:
                state = self._find_step_size(density, state, step)
        if done in ends:
            state = tuned(
                state, mass=state.tuning.estimate.mass(), estimate=None, blind=False
            )
            if self.adapt_step_size:
                state = self._find_step_size(density, state, _average_step_size(state))
        if ends and (done == begin or done in ends[:-1]):
            length = min(end for end in ends if end > done) - done
            empty = MassEstimate.start(state.z, length, full=self.full_mass)
            state = tuned(state, estimate=empty)
        if done == num_warmup:  # which may be within a window of a longer warm-up
            state = tuned(state, estimate=None)
            if self.adapt_step_size:
                state = tuned(state, step_size=_average_step_size(state))
        return state

    def _find_step_size(self, density: Density, state: State, step: Tensor) -> State:
        """Double or halve step sizes ``(C,)`` until the acceptance of one step crosses
        the target, as Stan does, and restart their adaptation. Chains do so separately
        while the mass matrix is unknown."""
        separate = state.tuning.blind
        # rounded like the steps below; programs round otherwise
        energy, gradient = evaluated_once(density, state.z)
        start = replace(state, energy=energy, gradient=gradient)
        target = self.search(step, separate).target
        grow = None
        crossed = torch.zeros_like(step, dtype=torch.bool)
        for _ in range(MAX_TRIES):
            acceptance = self.trial_acceptance(density, start, step)
            high: Tensor = (
                acceptance if separate else acceptance.mean().expand_as(acceptance)
            ) > target
            grow = high if grow is None else grow
            crossed = crossed | (high != grow)
            if crossed.all():
                break
            step = torch.where(
                crossed, step, torch.where(grow, 2.0, 0.5).to(step) * step
            )
            step = step.clamp(min=torch.finfo(step.dtype).tiny)
        return tuned(state, step_size=step, search=self.search(step, separate))


@dataclass(frozen=True, eq=False, repr=False)
class HamiltonianKernel(TunedKernel):
    """Base class of kernels with an acceptance rate."""

    target_accept_prob: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.fraction("target_accept_prob", self.target_accept_prob)

    def search(self, step_size: Tensor, follow: bool) -> StepSizeAdaptation:
        return StepSizeAdaptation.start(step_size, self.target_accept_prob, follow)

    def trial_acceptance(
        self, density: Density, state: State, step_size: Tensor
    ) -> Tensor:
        mass = state.tuning.mass
        start = resample_momenta(state, mass)
        end = leapfrog(
            lambda z: evaluated_once(density, z), start, step_size[:, None], mass
        )
        return (
            (-energy_error(end.total_energy(mass), start.total_energy(mass)))
            .clamp(max=0)
            .exp()
        )

    def acceptance(self, state: State) -> Tensor:
        """Return acceptance rates, those of slowed chains replaced by the mean of the
        others, to which the shared step size is adapted.
        """
        rates = state.statistics["acceptance_rate"]
        is_slowed = state.tuning.slowing < 0
        if is_slowed.all():
            return rates
        return rates.where(~is_slowed, rates[~is_slowed].mean())

    def adapt(
        self, density: Density, state: State, iteration: int, num_warmup: int
    ) -> State:
        before: HamiltonianTuning = state.tuning
        rates = state.statistics["acceptance_rate"]
        state = super().adapt(density, state, iteration, num_warmup)
        tuning: HamiltonianTuning = state.tuning
        if not self.adapt_step_size or tuning.blind:
            return state
        excess = rates - self.target_accept_prob / 2
        slowing = (before.slowing + SLOWING * excess).clamp(MOST_SLOWING, 0)
        step = tuning.step_size * slowing.exp()
        step = step.clamp(min=torch.finfo(step.dtype).tiny)
        return tuned(state, slowing=slowing, step_size=step)


def tuned(state: State, **parts: Any) -> State:
    """Replace parts of the tuning of a state."""
    return replace(state, tuning=replace(state.tuning, **parts))


def _average_step_size(state: State) -> Tensor:
    """Return the averaged step size, the median over chains, ``(C,)``."""
    average: Tensor = state.tuning.search.log_average
    return average.median().exp().to(state.z.dtype).expand(len(average)).clone()


# windows ------------------------------------------------------------------------------


def window_ends(
    num_warmup: int, first: int = 75, last: int = 50, base: int = 25
) -> tuple[int, tuple[int, ...]]:
    """Return the iteration at which the first window begins, and those at which windows
    end.

    The phases before and after the windows have ``first`` and ``last`` iterations, or
    15 % and 10 % of a short warm-up. Below 20 iterations there are no windows.
    """
    if num_warmup < 20:
        return num_warmup, ()
    if first + base + last > num_warmup:
        first = int(0.15 * num_warmup)
        last = int(0.1 * num_warmup)
        base = num_warmup - first - last
    ends = []
    end = first
    length = base
    while end < num_warmup - last:
        end += length
        length *= 2
        # no room for the next window: extend this one
        if end + length > num_warmup - last:
            end = num_warmup - last
        ends.append(end)
    return first, tuple(ends)


# the step size ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StepSizeAdaptation:
    r"""Stochastic approximation of the log step size with a target acceptance; tensors
    in double precision.

    Robbins & Monro (1951), with the averaging of Polyak & Juditsky (1992): with
    :math:`\alpha_t` the acceptance,

    .. math:: x_{t+1} = x_t + \frac{c}{t^{0.6}} (\alpha_t - \delta), \qquad
        \bar x_t = \tfrac{2}{t + 1} x_t + \bigl(1 - \tfrac{2}{t + 1}\bigr) \bar x_{t-1}.

    The dual averaging of Stan (Hoffman & Gelman 2014, eq. 6) oscillates at first: with
    4 chains and a target of 0.65 its acceptance is off by 0.06 after 50 iterations,
    this one's by 0.003.

    :param log_step: :math:`x = \log \varepsilon` of the next iteration, ``(C,)`` or
        ``()``.
    :param log_average: :math:`\bar x`, the result.
    :param target: :math:`\delta`.
    :param gain: :math:`c`.
    :param most: count from which the gain is constant; ``None``: it always decreases.
    :param count: :math:`t`, iterations so far.
    """

    log_step: Tensor
    log_average: Tensor
    target: float
    gain: float
    most: int | None
    count: int = 0

    @classmethod
    def start(
        cls,
        step_size: Tensor,
        target: float,
        follow: bool = False,
        gain: float | None = None,
    ) -> StepSizeAdaptation:
        r"""Start from step sizes.

        :param follow: whether to keep the gain from decreasing, since the root still
            moves.
        :param gain: ``None``: Newton's gain, for the acceptance of many coordinates,
            :math:`2 \Phi(-\tfrac12 s)` with
            :math:`s \propto \varepsilon^2` (Beskos et al. 2013, arXiv 1001.4460,
                theorem 3.6). Its inverse is the slope
            :math:`2 s\, \varphi(\tfrac12 s)` in :math:`\log \varepsilon` at the target.
        """
        x = step_size.double().log()
        if gain is None:
            half = -NormalDist().inv_cdf(target / 2)  # s / 2
            gain = min(1 / (4 * half * NormalDist().pdf(half)), LARGEST_GAIN)
        return cls(x, x, target, gain, FOLLOWING if follow else None)

    def update(self, acceptance: Tensor) -> StepSizeAdaptation:
        """Update by the acceptance of one iteration, in the shape of the step sizes."""
        count = min(self.count + 1, self.most or self.count + 1)
        change = self.gain * count**-DECAY * (acceptance.double() - self.target)
        log_step = self.log_step + change.clamp(-LARGEST_CHANGE, LARGEST_CHANGE)
        average = torch.lerp(self.log_average, log_step, 2 / (count + 1))
        return replace(self, log_step=log_step, log_average=average, count=count)


# the mass matrix ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Spread:
    """Running mean and spread of each chain (Welford 1962).

    :param mean: ``(C, D)``.
    :param scatter: sum of squared deviations from the mean, ``(C, D)``.
    :param count: draws of each chain so far.
    """

    mean: Tensor
    scatter: Tensor
    count: int = 0

    @classmethod
    def start(cls, z: Tensor) -> Spread:
        """Return the spread of no draws of chains ``(C, D)``."""
        return cls(torch.zeros_like(z), torch.zeros_like(z))

    def update(self, z: Tensor) -> Spread:
        """Add one draw of every chain, ``(C, D)``."""
        count = self.count + 1
        delta = z - self.mean
        mean = self.mean + delta / count
        return Spread(mean, self.scatter + delta * (z - mean), count)

    def merged(self, later: Spread) -> Spread:
        """Return the spread of the draws of both (Chan, Golub & LeVeque 1983)."""
        count = self.count + later.count
        share = later.count / max(count, 1)
        change = later.mean - self.mean
        between = change.square() * (self.count * share)
        return Spread(
            self.mean + share * change, self.scatter + later.scatter + between, count
        )

    def pooled(self) -> Tensor:
        """Return the variance within chains, ``(D,)``, pooled over them and shrunk; 1
        for fewer than two draws of each chain.
        """
        if self.count < 2:
            return torch.ones_like(self.scatter[0])
        degrees = len(self.scatter) * (self.count - 1)
        share = degrees / (degrees + PRIOR_DRAWS)
        variance = self.scatter.sum(0) / degrees
        return variance * share + PRIOR_VARIANCE * (1 - share)

    def patterns(self, pooled: Tensor) -> Tensor:
        """Return the logs of the chains' variances relative to pooled ones, ``(C, D)``.
        All chains have the same mean over coordinates: a chain that hardly moves does
        so in all of them.
        """
        variance = torch.maximum(
            self.scatter / max(self.count - 1, 1), LEAST_VARIANCE * pooled
        )
        logs = (variance / pooled).log().nan_to_num(0.0, 0.0)
        return logs - logs.mean(1, keepdim=True) + logs.mean()


@dataclass(frozen=True, eq=False)
class MassEstimate:
    r"""Running estimate of the mass matrices in a window.

    Chains in copies of one mode, as of a mixture, have the same variances in another
    order. With :math:`\bar v` the variances pooled over the chains, and :math:`v` those
    of a chain, times a factor that makes the mean of :math:`\log (v / \bar v)` over the
    coordinates that of all chains,

    .. math:: \sigma^2 = \bar v \left(\frac{v}{\bar v}\right)^r, \qquad
        r = \frac{2 \rho}{1 + \rho},

    where :math:`\rho` is the correlation over the chains of :math:`\log v` in the first
    and the second half of the window, less its standard error without a correlation. So
    :math:`r` is the share of the differences between chains that isn't noise (Spearman
    1910; Brown 1910): near 0 where all chains sample one mode, and near 1 where their
    modes differ.

    :param halves: spread of the first and of the second half of the window.
    :param length: of the window.
    :param products: outer products of deviations, summed over chains and draws, ``(D,
        D)`` in double precision, for a dense matrix; ``None`` for a diagonal one.
    """

    halves: tuple[Spread, Spread]
    length: int
    products: Tensor | None = None

    @classmethod
    def start(cls, z: Tensor, length: int, *, full: bool) -> MassEstimate:
        """Return an empty estimate for chains ``(C, D)``.

        :param full: whether the matrix is dense.
        """
        dim = z.shape[-1]
        products = z.new_zeros(dim, dim, dtype=torch.double) if full else None
        empty = Spread.start(z)
        return cls((empty, empty), length, products)

    @property
    def window(self) -> Spread:
        """The spread of all draws."""
        first, second = self.halves
        return first.merged(second)

    def update(self, z: Tensor) -> MassEstimate:
        """Add one draw of every chain, ``(C, D)``."""
        first, second = self.halves
        products = self.products
        if products is not None:
            # The squares of these rows sum to the scatter about the final means.
            before = self.window
            shrinkage = before.count / (before.count + 1)
            rows = (z - before.mean).double() * shrinkage**0.5
            products = products + rows.mT @ rows
        if first.count < self.length // 2:
            first = first.update(z)
        else:
            second = second.update(z)
        return MassEstimate((first, second), self.length, products)

    def mass(self) -> Mass:
        """Return the mass matrices. Correlations are estimated from
        :data:`DRAWS_PER_COORDINATE` draws per coordinate on."""
        window = self.window
        pooled = window.pooled()
        degrees = len(window.mean) * (window.count - 1)
        correlation = None
        if self.products is not None and degrees >= DRAWS_PER_COORDINATE * len(pooled):
            correlation = self._correlation(degrees)
            # their units may differ by any factor, so that nothing is shrunk
            scatter = window.scatter.sum(0)
            pooled = torch.where(scatter > 0, scatter / degrees, pooled)
        share = self.reliability(pooled)
        variance = torch.exp(share * window.patterns(pooled)) * pooled
        return mass_of(variance, self.products is not None, correlation)

    def _correlation(self, degrees: int) -> Tensor:
        """Return the pooled correlations ``(D, D)``, slightly shrunk."""
        assert self.products is not None
        squares = self.products.diagonal()
        norms = torch.where(squares > 0, squares, 1.0).sqrt()
        observed = (self.products / norms / norms[:, None]).fill_diagonal_(1.0)
        shrinkage = PRIOR_VARIANCE * PRIOR_DRAWS / (degrees + PRIOR_DRAWS)
        return observed.lerp(torch.diag(torch.ones_like(squares)), shrinkage)

    def reliability(self, pooled: Tensor) -> Tensor:
        """Return :math:`r`, ``()``; 0 for one chain or one coordinate."""
        first, second = (half.patterns(pooled) for half in self.halves)
        first = first - first.mean(0)
        second = second - second.mean(0)
        chains, dim = first.shape
        degrees = (chains - 1) * (dim - 1)
        if not degrees:
            return torch.zeros_like(first[0, 0])
        variance = (first.square().sum() + second.square().sum()) / 2
        observed = torch.where(variance > 0, (first * second).sum() / variance, 0.0)
        correlation = (observed - degrees**-0.5).clamp(min=0)
        return 2 * correlation / (1 + correlation)


def mass_of(variance: Tensor, full: bool, correlation: Tensor | None = None) -> Mass:
    """Return the mass matrices of chains with variances ``(C, D)``.

    :param full: whether they are dense; ``correlation`` is the identity by default.
    """
    if not full:
        return Mass(variance)
    if correlation is None:
        correlation = torch.diag(torch.ones_like(variance[0]))
    return DenseMass.of(variance, correlation)


# the end ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Agreement:
    r"""Thinned history of warm-up, and the :math:`\hat R` that ends it; part of a
    checkpoint.

    Chains need not be in the same place, nor have the same scale: those of mixtures and
    networks sit in symmetric copies of a mode, and waiting doesn't bring them together.
    Whether they should is for
    :func:`~pyro_symmetric.compare.diagnose`. Here the two halves of each chain must
    agree in every coordinate, and all chains in energy and acceptance, apart from one
    in :data:`OUTLIERS`. Means of half chains of :math:`n` effective draws have
    :math:`\hat R^2 \approx 1 + 1/n`, so :data:`LIMIT` asks for about ten in each half.

    :param stride: iterations per draw. It doubles, and every second draw is dropped,
        when there are :data:`DRAWS`. The history thus depends on the iterations only,
        not on interruptions.
    :param kept: positions, energy and acceptance, ``(C, coordinates + 2)`` per draw.
    """

    stride: int = 1
    kept: tuple[Tensor, ...] = ()

    def update(
        self,
        iteration: int,
        z: Tensor,
        energy: Tensor,
        acceptance: Tensor | None = None,
    ) -> Agreement:
        """Add positions ``(C, D)``, energies and acceptances ``(C,)`` of an iteration,
        counted from 0.
        """
        if iteration % self.stride:
            return self
        full = len(self.kept) == DRAWS
        stride, history = (
            (2 * self.stride, self.kept[::2]) if full else (self.stride, self.kept)
        )
        levels = [
            energy,
            torch.ones_like(energy) if acceptance is None else acceptance.to(energy),
        ]
        positions = z[:, :: -(-z.shape[1] // COORDINATES)]
        return Agreement(
            stride,
            (*history, torch.cat([positions, torch.stack(levels, 1)], 1)[:CHAINS]),
        )

    def r_hat(self) -> float:
        r"""Return the largest split :math:`\hat R` of the second half of the
        iterations, at most :data:`LARGEST`.
        """
        draws = torch.stack(self.kept[len(self.kept) // 2 :], 1).cpu()
        if not draws.isfinite().all():
            return LARGEST
        # About the mean of its own chain, the mean of a half has half the variance: the
        # excess of R-hat is doubled.
        deviation, mean = torch.std_mean(draws[..., :-2].double(), 1, keepdim=True)
        positions = (draws[..., :-2] - mean) / deviation.clamp(min=1e-300)
        within = (
            1 + 2 * (chain_statistics(positions).r_hat.square() - 1).clamp(min=0)
        ).sqrt()
        energy = draws[..., -2].mean(1)
        inliers = (
            (energy - energy.median())
            .abs()
            .argsort()[: len(energy) - len(energy) // OUTLIERS]
        )
        values = torch.cat([within, chain_statistics(draws[inliers][..., -2:]).r_hat])
        values = values[~values.isnan()]  # NaN for constant coordinates
        return min(float(values.max()), LARGEST) if len(values) else LARGEST
