r"""Warm-up of kernels with full gradients: the step size, shared by all chains, and
mass matrices.

**Windows.** As in Stan, the mass matrix is estimated in windows of doubling length,
between an initial phase in which chains reach the typical set and a final one in which
the step size settles (:func:`window_ends`). Many chains have enough draws in short
windows, too: before those of Stan come two that give a provisional matrix
(:func:`windows`), so that trajectories of few steps do.

**The step size** :math:`\varepsilon` is found by stochastic approximation
(:class:`StepSizeAdaptation`). Until the mass matrix is known, and while it is
provisional, each chain has its own step size, since scales differ far out in the tails.
As chains approach the typical set, much longer steps may become possible, so the search
for a first step size is repeated after 1, 2, 4, 8, ... iterations. Afterwards all
chains share one step size, adapted to their mean acceptance. A chain that lately
accepted less than half as often as it should takes shorter ones: its mass matrix may be
that of its way to the typical set. Its acceptance doesn't count in the mean.

**The mass matrix** is the covariance *within* chains: chains of a network usually sit
in different modes, and the distance between modes says nothing about the length of a
trajectory. It is pooled over the chains as far as they agree (:class:`MassEstimate`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Model, Names
from pyro_symmetric.density.density import Density, Uncompiled, evaluated_once, fused
from pyro_symmetric.mcmc.kernels.kernel import (
    DenseMass,
    Kernel,
    Mass,
    State,
    energy_error,
    evaluated_at_rest,
    leapfrog,
    resample_momenta,
)

DECAY = 0.6  # exponent of the gain; averaging requires one between 1/2 and 1
# gain and least logarithm of the factor by which a chain that is stuck takes shorter
# steps
SLOWING, MOST_SLOWING = 0.2, -20.0
LARGEST_GAIN = 8.0  # for targets near 1, where the acceptance curve is flat
LARGEST_CHANGE = 1.0  # of the log step size in one iteration
# iteration from which the gain is constant while chains approach the typical set
FOLLOWING = 4
BLIND_STEPS = 16  # of a trajectory while the mass matrix is unknown or provisional
# chains from which on short windows suffice; where those begin and end
MANY_CHAINS = 16
EARLY_BEGIN, EARLY_ENDS = 15, (25, 50)
LEAST_WARMUP = 100  # with such windows
MAX_TRIES = 60  # doublings or halvings of a first step size
DRAWS_PER_COORDINATE = 2  # from which on correlations are estimated
PRIOR_DRAWS, PRIOR_VARIANCE = 5.0, 1e-3  # shrinkage of variances, as in Stan
LEAST_VARIANCE = 1e-4  # of a chain, relative to the pooled one
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


@dataclass(frozen=True, eq=False)
class HamiltonianTuning:
    """Results of warm-up.

    :param step_size: of the integrator, ``(C,)``.
    :param search: adaptation of the step size.
    :param mass: mass matrix of each chain.
    :param estimate: covariance in the current window; ``None`` outside of windows.
    :param blind: whether the mass matrix is still unknown or provisional.
    :param slowing: logarithm of the factor of each chain's step size, ``(C,)``: below 0
        in chains that accepted less than half as often as they should; 0 in MCLMC.
    """

    step_size: Tensor
    search: StepSizeAdaptation
    mass: Mass
    estimate: MassEstimate | None
    blind: bool
    slowing: Tensor

    def of_chains(self, chains: Tensor) -> Self:
        """Select the results of some chains, by their indices."""
        estimate = self.estimate
        return replace(
            self,
            step_size=self.step_size[chains],
            search=self.search.of_chains(chains),
            mass=self.mass.of_chains(chains),
            estimate=None if estimate is None else estimate.of_chains(chains),
            slowing=self.slowing[chains],
        )


@dataclass(frozen=True, eq=False, repr=False)
class TunedKernel(Kernel):
    """Base class of kernels that follow trajectories with full gradients."""

    warmups = (150, 200, 300, 500, 900, 1700)  # with common windows
    restarts = (100, *warmups)
    # whether programs of single leapfrog steps are compiled for iterations
    compiles_leapfrog: ClassVar[bool] = False

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
        self, density: Density | Uncompiled, state: State, step_size: Tensor
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
        blind = bool(self._windows(num_warmup, len(z)).ends)
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
            # eager, so that a run's first iteration compiles, below its progress bar
            else self._find_step_size(Uncompiled(density), state, step)
        )

    def adapt(
        self, density: Density, state: State, iteration: int, num_warmup: int
    ) -> State:
        tuning: HamiltonianTuning = state.tuning
        windows = self._windows(num_warmup, len(state.z))
        trials = self._for_trials(density)
        done = iteration + 1
        if tuning.estimate is not None:
            state = tuned(state, estimate=tuning.estimate.update(state.z))
        if self.adapt_step_size:
            acceptance = self.acceptance(state)
            search = tuning.search.update(
                acceptance if tuning.blind else acceptance.mean().expand_as(acceptance)
            )
            step = at_least_tiny(search.log_step.exp().to(acceptance.dtype))
            state = tuned(state, search=search, step_size=step)
            # after 1, 2, 4, 8, ... iterations
            if tuning.blind and done & iteration == 0:
                state = self._find_step_size(trials, state, step)
        if done in windows.ends:
            mass = state.tuning.estimate.mass()
            is_provisional = done in windows.early
            state = tuned(state, mass=mass, estimate=None, blind=is_provisional)
            if self.adapt_step_size:
                state = self._find_step_size(trials, state, _average_step_size(state))
        length = windows.length_from(done)
        if length:
            empty = MassEstimate.start(state.z, length, full=self.full_mass)
            state = tuned(state, estimate=empty)
        if done == num_warmup:  # which may be within a window of a longer warm-up
            state = tuned(state, estimate=None)
            if self.adapt_step_size:
                state = tuned(state, step_size=_average_step_size(state))
        return state

    def energies(self, density: Density, state: State, z: Tensor) -> Tensor:
        # Positions repeat, so that the program of all chains serves.
        repeated = torch.arange(len(state.z), device=z.device) % len(z)
        positions = z.to(state.z)[repeated]
        point = evaluated_at_rest(
            self._for_trials(density), positions, state.tuning.mass
        )
        return point.energy[: len(z)]

    def _for_trials(self, density: Density) -> Density | Uncompiled:
        """Return the density for single steps, without compiling a program that
        iterations don't need.
        """
        return density if self.compiles_leapfrog else Uncompiled(density)

    def _windows(self, num_warmup: int, num_chains: int) -> Windows:
        """Return the windows of warm-up; none if the mass matrix isn't adapted."""
        if not self.adapt_mass_matrix:
            return Windows(num_warmup, ())
        return windows(num_warmup, num_chains)

    def _find_step_size(
        self, density: Density | Uncompiled, state: State, step: Tensor
    ) -> State:
        """Double or halve step sizes ``(C,)`` until the acceptance of one step crosses
        the target, as Stan does, and restart their adaptation. Chains do so separately
        while the mass matrix is unknown."""
        separate = state.tuning.blind
        mass = state.tuning.mass
        # A step of size 0 rounds energies like the steps below.
        point = evaluated_at_rest(density, state.z, mass)
        start = replace(state, energy=point.energy, gradient=point.gradient)
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
            step = at_least_tiny(step)
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
        self, density: Density | Uncompiled, state: State, step_size: Tensor
    ) -> Tensor:
        mass = state.tuning.mass
        start = resample_momenta(state, mass)
        end = fused(density, leapfrog, start, step_size[:, None], mass)
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
        step = at_least_tiny(tuning.step_size * slowing.exp())
        return tuned(state, slowing=slowing, step_size=step)


def tuned(state: State, **parts: Any) -> State:
    """Replace parts of the tuning of a state."""
    return replace(state, tuning=replace(state.tuning, **parts))


def at_least_tiny(step_size: Tensor) -> Tensor:
    """Replace step sizes of 0 by the smallest normal number."""
    return step_size.clamp(min=torch.finfo(step_size.dtype).tiny)


def _average_step_size(state: State) -> Tensor:
    """Return the averaged step size, the median over chains, ``(C,)``."""
    average: Tensor = state.tuning.search.log_average
    return average.median().exp().to(state.z.dtype).expand(len(average)).clone()


# windows ------------------------------------------------------------------------------


class Windows(NamedTuple):
    """Successive windows of warm-up.

    :param begin: number of iterations before the first window.
    :param ends: numbers of iterations after which windows end.
    :param early: those of them that give a provisional mass matrix.
    """

    begin: int
    ends: tuple[int, ...]
    early: tuple[int, ...] = ()

    def length_from(self, done: int) -> int:
        """Return the length of the window that begins after ``done`` iterations; 0 if
        none does.
        """
        begins = (self.begin, *self.ends)
        for begin, end in zip(begins, self.ends, strict=False):
            if begin == done:
                return end - begin
        return 0


def windows(num_warmup: int, num_chains: int) -> Windows:
    """Return the windows of a warm-up.

    From :data:`MANY_CHAINS` chains on, :data:`EARLY_ENDS` come first: draws of all
    chains count, so that a few of each give a first mass matrix.
    """
    begin, ends = window_ends(num_warmup)
    if num_chains < MANY_CHAINS or num_warmup < LEAST_WARMUP:
        return Windows(begin, ends)
    return Windows(EARLY_BEGIN, (*EARLY_ENDS, *ends), EARLY_ENDS)


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

    def of_chains(self, chains: Tensor) -> StepSizeAdaptation:
        """Select the step sizes of some chains, by their indices."""
        return replace(
            self, log_step=self.log_step[chains], log_average=self.log_average[chains]
        )

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

    def of_chains(self, chains: Tensor) -> Spread:
        """Select the spread of some chains, by their indices."""
        return replace(self, mean=self.mean[chains], scatter=self.scatter[chains])

    def merged(self, later: Spread) -> Spread:
        """Return the spread of the draws of both (Chan, Golub & LeVeque 1983)."""
        count = self.count + later.count
        share = later.count / max(count, 1)
        change = later.mean - self.mean
        between = change.square() * (self.count * share)
        return Spread(
            self.mean + share * change, self.scatter + later.scatter + between, count
        )

    @property
    def variances(self) -> Tensor:
        """The variances of each chain, ``(C, D)``; 0 for fewer than two draws."""
        return self.scatter / max(self.count - 1, 1)

    @property
    def degrees(self) -> int:
        """Degrees of freedom of all chains' variances."""
        return len(self.scatter) * max(self.count - 1, 0)

    def pooled(self, *, robust: bool = False) -> Tensor:
        """Return the variance within chains, ``(D,)``, pooled over them and shrunk; 1
        for fewer than two draws of each chain.

        :param robust: whether to take the median over the chains, not the mean.
        """
        if self.count < 2:
            return torch.ones_like(self.scatter[0])
        variances = self.variances
        variance = variances.median(0).values if robust else variances.mean(0)
        share = self.degrees / (self.degrees + PRIOR_DRAWS)
        return variance * share + PRIOR_VARIANCE * (1 - share)

    def patterns(self, pooled: Tensor) -> Tensor:
        """Return the logs of the chains' variances relative to pooled ones, ``(C, D)``.
        All chains have the same mean over coordinates: a chain that hardly moves does
        so in all of them.
        """
        variance = torch.maximum(self.variances, LEAST_VARIANCE * pooled)
        logs = (variance / pooled).log().nan_to_num(0.0, 0.0)
        return logs - logs.mean(1, keepdim=True) + logs.mean()


@dataclass(frozen=True, eq=False)
class MassEstimate:
    r"""Running estimate of the mass matrices in a window.

    Chains in copies of one mode, as of a mixture, have the same variances in another
    order. With :math:`\bar v` the variances pooled over the chains (of many, their
    median, unless correlations are estimated), and :math:`v` those
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

    def of_chains(self, chains: Tensor) -> MassEstimate:
        """Select the spreads of some chains, by their indices."""
        first, second = self.halves
        return replace(self, halves=(first.of_chains(chains), second.of_chains(chains)))

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
        # some of many chains may still be on their way to the typical set
        pooled = window.pooled(robust=len(window.mean) >= MANY_CHAINS)
        correlation = None
        needed = DRAWS_PER_COORDINATE * len(pooled)
        if self.products is not None and window.degrees >= needed:
            correlation = self._correlation(window.degrees)
            # their units may differ by any factor, so that nothing is shrunk
            variance = window.variances.mean(0)
            pooled = torch.where(variance > 0, variance, pooled)
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
