r"""Stochastic-gradient samplers: SGLD, its preconditioned form pSGLD, and SGHMC.

They discretise a diffusion whose stationary law is the posterior, without accepting or
rejecting. Two errors bias the law that they reach, and both vanish with the step size:
the discretisation error, by curvature, and the variance ``V`` of mini-batch gradients.
Warm-up measures both (:class:`CurvatureEstimate`). A kernel without a ``step_size``
takes the one for which the predicted excess of the variance is ``tolerance``.

Such a step is short for narrow posteriors or many data, and wide directions mix slowly.
So warm-up also learns the posterior variances, pooled over chains, in the windows in
which Hamiltonian kernels learn their mass matrix. They become a diagonal preconditioner
``G``; a constant one needs no correction term. With a given ``step_size``, SGLD and
SGHMC keep ``G = 1``.

**Divergences.** A chain whose energy rises by more than ``MAX_ENERGY_ERROR + D`` in one
iteration, on one mini-batch, or isn't finite, returns to its previous position and
counts as divergent. The ``D`` allows for the rise from a mode to its typical set.

**The virial**, :math:`(z - a) \cdot \nabla U(z) / D` averaged over the steps of an
iteration, is a statistic of each draw; :math:`a` is the mean of the other chains in
warm-up, or 0. Its mean is 1 under any posterior whose density vanishes at infinity
(integrate by parts), also with the unbiased gradients of mini-batches. It is the
configurational temperature of a run that has converged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Generator, Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Model
from pyro_symmetric.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import Spread, tuned, window_ends
from pyro_symmetric.mcmc.kernels.kernel import (
    MAX_ENERGY_ERROR,
    Kernel,
    State,
    mini_batches,
    normal,
)

# curvature measurements before the first step with a new preconditioner
FIRST_ROUNDS = 6
SMOOTHING, DAMPING = 0.99, 1e-5  # alpha and delta of pSGLD
# largest share of the momentum that a step keeps, unless friction is given
MOST_KEPT = 0.95

# of positions, momenta; by gradients, standard normal noise
Update = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, eq=False)
class StochasticTuning:
    """Results of warm-up.

    :param step_size: ``()``.
    :param preconditioner: diagonal of ``G``, ``(D,)`` or one per chain ``(C, D)``.
    :param centre: centre of the virial, ``(C, D)``, or ``()`` for the origin.
    :param curvature: measured curvature and gradient noise, or ``None`` if nothing
        depends on them.
    :param estimate: variances in the current window, or ``None`` if they aren't learnt.
    """

    step_size: Tensor
    preconditioner: Tensor
    centre: Tensor
    curvature: CurvatureEstimate | None
    estimate: Spread | None


@dataclass(frozen=True, eq=False, repr=False)
class SGLD(Kernel):
    """Stochastic-gradient Langevin dynamics with a constant step size (Welling & Teh
    2011, ICML).

    >>> model = ps.BayesianModel(
    ...     nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100
    ... )
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.SGLD(model, batch_size=20)
    >>> posterior = ps.sample(
    ...     kernel,
    ...     x,
    ...     y,
    ...     num_samples=20,
    ...     num_warmup=20,
    ...     num_chains=4,
    ...     seed=0,
    ...     progress=False,
    ... )
    >>> posterior.samples["weight"].shape
    torch.Size([4, 20, 1, 3])

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: Welling & Teh's ``ε``. ``None``: ``4 tolerance / (λ + mean V)``,
        where ``λ`` is the largest curvature of the potential energy (eigenvalue of its
        Hessian) and ``V`` the variance of mini-batch gradients by coordinate, both
        measured in warm-up.
    :param batch_size: rows in a mini-batch of a ``BayesianModel``, drawn for each chain
        independently. ``None``: all. The mini-batches of other models come from their
        plates with ``subsample_size``.
    :param tolerance: with ``step_size=None``, the relative excess of the variance
        caused by a step: by discretisation in the direction of largest curvature, and
        by mini-batch noise on average over coordinates.
    :param num_steps: gradient steps per iteration; the sampler's ``thinning``
        multiplies it.
    """

    model: Model
    step_size: float | None = None
    _: KW_ONLY
    batch_size: int | None = None
    tolerance: float = 0.05
    num_steps: int = 10

    subsampled = True
    has_momentum = False
    learns_variances = True

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("step_size", self.step_size, none="one that is found")
        arguments.whole("batch_size", self.batch_size, 1, none="all data")
        arguments.fraction("tolerance", self.tolerance)
        arguments.whole("num_steps", self.num_steps, 1)

    # the method -----------------------------------------------------------------------

    def update_rule(self, tuning: StochasticTuning) -> Update:
        r"""Return the update of positions, in place.

        .. math:: z \leftarrow z - \tfrac12 \varepsilon\, G \nabla\tilde U(z)
            + \mathcal N(0, \varepsilon G)
        """
        step = tuning.step_size * tuning.preconditioner
        spread = step.sqrt()

        def update(
            z: Tensor, momentum: Tensor, gradient: Tensor, noise: Tensor
        ) -> None:
            z.addcmul_(gradient, step, value=-0.5).addcmul_(noise, spread)

        return update

    def suggested_step_size(self, estimate: CurvatureEstimate) -> Tensor:
        r"""Return the step size ``()`` whose excess of the variance is the tolerance.

        Along a quadratic direction of curvature :math:`\lambda` the recursion is an
        AR(1) process with the variance

        .. math:: \frac{1}{\lambda} \cdot
            \frac{1 + \varepsilon V / 4}{1 - \varepsilon \lambda / 4},

        too large by about :math:`\varepsilon (\lambda + V) / 4`, and stable for
        :math:`\varepsilon < 4 / \lambda`.
        """
        return 4 * self.tolerance / (estimate.stiffest + estimate.noise.mean())

    def initial_preconditioner(self, gradient: Tensor) -> Tensor:
        """Return the preconditioner at the initial positions."""
        return torch.ones_like(gradient[0])

    @property
    def measures_curvature(self) -> bool:
        """True if a setting depends on measurements of the curvature or gradient
        noise.
        """
        return self.step_size is None

    # the contract ---------------------------------------------------------------------

    def init(
        self, density: Density, z: Tensor, num_warmup: int, generator: Generator
    ) -> State:
        energy, gradient = density.energy_and_gradient(
            z, mini_batches(density.row_counts, len(z), generator)
        )
        momentum = normal(z, generator) if self.has_momentum else torch.zeros_like(z)
        tuning = StochasticTuning(
            z.new_tensor(self.step_size or 0.0),
            self.initial_preconditioner(gradient),
            z.new_zeros(()),
            CurvatureEstimate.start(z, generator) if self.measures_curvature else None,
            Spread.start(z)
            if self.learns_variances and self.step_size is None
            else None,
        )
        return self._measure(
            density,
            State(z, momentum, energy, gradient, tuning, generator),
            FIRST_ROUNDS,
        )

    def step(self, density: Density, state: State) -> State:
        tuning = state.tuning
        generator = state.generator
        chains = len(state.z)
        z = state.z.clone()
        momentum = state.momentum.clone()
        virial = torch.zeros_like(state.z)
        update = self.update_rule(tuning)
        for _ in range(self.num_steps):
            rows = mini_batches(density.row_counts, chains, generator)
            energy, gradient = density.energy_and_gradient(z, rows)
            virial.addcmul_(z - tuning.centre, gradient)
            update(z, momentum, gradient, normal(z, generator))
        # z has moved once more since the last energy
        extent = torch.linalg.vector_norm(z, torch.inf, dim=-1)
        # NaN if either isn't finite
        error = energy - density.energy(state.z, rows) + 0 * extent
        diverging = ~(error <= MAX_ENERGY_ERROR + z.shape[-1])
        lost = diverging[:, None]
        energy = torch.where(diverging, state.energy, energy)
        statistics = {
            "lp": -energy,
            "virial": (virial.mean(-1) / self.num_steps).masked_fill(
                diverging, torch.nan
            ),
            "diverging": diverging,
            "step_size": tuning.step_size.expand(chains),
            "n_steps": torch.full_like(energy, self.num_steps, dtype=torch.long),
        }
        if self.has_momentum:
            statistics["kinetic_temperature"] = momentum.square().mean(-1)
            momentum = torch.where(lost, normal(z, generator), momentum)
        gradient = torch.where(lost, state.gradient, gradient)
        return State(
            torch.where(lost, state.z, z),
            momentum,
            energy,
            gradient,
            tuning,
            generator,
            statistics,
        )

    def adapt(
        self, density: Density, state: State, iteration: int, num_warmup: int
    ) -> State:
        state = self._measure(density, state)
        begin, ends = window_ends(num_warmup)
        window = state.tuning.estimate
        if window is None or not ends or not begin <= iteration < ends[-1]:
            return state
        window = window.update(state.z)
        if iteration + 1 not in ends:
            return tuned(state, estimate=window)
        num_others = len(state.z) - 1
        state = tuned(
            state,
            preconditioner=window.pooled(),
            estimate=Spread.start(state.z),
            centre=(window.mean.sum(0) - window.mean) / num_others
            if num_others
            else state.tuning.centre,
            curvature=CurvatureEstimate.start(state.z, state.generator),
        )
        return self._measure(density, state, FIRST_ROUNDS)

    def _measure(self, density: Density, state: State, rounds: int = 1) -> State:
        """Update the curvature estimate, and the step size if it isn't given."""
        tuning: StochasticTuning = state.tuning
        estimate = tuning.curvature
        if estimate is None:
            return state
        for _ in range(rounds):
            estimate = estimate.update(
                density, state.z, state.generator, tuning.preconditioner
            )
        step = (
            self.suggested_step_size(estimate)
            if self.step_size is None
            else tuning.step_size
        )
        return tuned(state, curvature=estimate, step_size=step)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class pSGLD(SGLD):
    r"""Stochastic-gradient Langevin dynamics with RMSProp's preconditioner.

    Li, Chen, Carlson & Carin 2016 (arXiv 1512.07666): SGLD with

    .. math:: V \leftarrow \alpha V + (1 - \alpha)\, \nabla\tilde U(z)^2,
        \qquad G = 1 / (\delta + \sqrt V)

    for each chain separately. Here ``G`` is adapted in warm-up and then constant. If it
    depended on the position, the diffusion would need a drift with second derivatives,
    which the paper's experiments omit at the price of a bias.

    >>> model = ps.BayesianModel(
    ...     nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100
    ... )
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.pSGLD(model, batch_size=20)
    >>> posterior = ps.sample(
    ...     kernel,
    ...     x,
    ...     y,
    ...     num_samples=20,
    ...     num_warmup=20,
    ...     num_chains=4,
    ...     seed=0,
    ...     progress=False,
    ... )
    >>> posterior.samples["weight"].shape
    torch.Size([4, 20, 1, 3])

    Other settings are those of :class:`SGLD`; ``step_size`` is in preconditioned
    coordinates.
    """

    learns_variances = False

    def initial_preconditioner(self, gradient: Tensor) -> Tensor:
        # The same for all coordinates, since small entries of a single gradient would
        # make the first steps explode.
        return self._preconditioner(gradient.square().mean().expand_as(gradient))

    def adapt(
        self, density: Density, state: State, iteration: int, num_warmup: int
    ) -> State:
        before = state.tuning.preconditioner
        moment = state.gradient.square().lerp(
            (1 / before - DAMPING).square(), SMOOTHING
        )
        finite = torch.isfinite(moment).all(-1, keepdim=True)
        state = tuned(
            state,
            preconditioner=torch.where(finite, self._preconditioner(moment), before),
        )
        return super().adapt(density, state, iteration, num_warmup)

    def _preconditioner(self, moment: Tensor) -> Tensor:
        return 1 / (moment.sqrt() + DAMPING)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SGHMC(SGLD):
    """Stochastic-gradient Hamiltonian Monte Carlo (Chen, Fox & Guestrin 2014, arXiv
    1402.4102).

    ``step_size`` is stable below ``2 / sqrt(λ)`` for the largest curvature ``λ`` of the
    potential energy (eigenvalue of its Hessian), which grows with the number of rows.
    If ``None``, it is ``sqrt(4 tolerance / max(λ, 4 mean V))``, where ``V`` is the
    variance of mini-batch gradients by coordinate; warm-up measures both. The statistic
    ``kinetic_temperature``, the mean squared momentum, averages to 1 if the step size
    is small enough and friction outweighs the mini-batch noise.

    >>> model = ps.BayesianModel(
    ...     nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100
    ... )
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.SGHMC(model, batch_size=20)
    >>> posterior = ps.sample(
    ...     kernel,
    ...     x,
    ...     y,
    ...     num_samples=20,
    ...     num_warmup=100,
    ...     num_chains=4,
    ...     seed=0,
    ...     progress=False,
    ... )
    >>> posterior.statistics["kinetic_temperature"].shape
    torch.Size([4, 20])

    Other settings are those of :class:`SGLD`.

    :param friction: ``C``, the rate at which momentum decays. ``None``: for each
        coordinate, the value for which mini-batch noise causes an excess of
        ``tolerance``, and at least ``0.05 / step_size``: a step then dissipates a
        twentieth of the momentum, as in the paper's experiments.
    """

    friction: float | None = None

    has_momentum = True

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("friction", self.friction, none="one that is found")

    def update_rule(self, tuning: StochasticTuning) -> Update:
        r"""Return the update of positions and momenta, in place.

        With unit mass, in preconditioned coordinates,

        .. math::
            r &\leftarrow r - \varepsilon \nabla\tilde U(z), 
            \qquad z \leftarrow z + \tfrac12 \varepsilon r \\
            r &\leftarrow k r + \mathcal N\left(0,\ 1 - k^2\right), 
            \qquad z \leftarrow z + \tfrac12 \varepsilon r,
                \qquad k = e^{-\varepsilon C},

        a BAOAB splitting (Leimkuhler & Matthews 2013, arXiv 1203.5428). With full
        gradients it is exact for quadratic potentials, and otherwise has a bias of
        order :math:`\varepsilon^2`. The paper's Euler discretisation (Algorithm 2)
        costs the same and is biased by :math:`\tfrac14 \varepsilon^2 \lambda` even
        there.
        """
        keep = self.momentum_kept(tuning)
        step = tuning.step_size * tuning.preconditioner.sqrt()
        spread = (1 - keep.square()).sqrt()

        def update(z: Tensor, r: Tensor, gradient: Tensor, noise: Tensor) -> None:
            r.addcmul_(gradient, step, value=-1)
            z.addcmul_(r, step, value=0.5)
            r.mul_(keep).addcmul_(noise, spread)
            z.addcmul_(r, step, value=0.5)

        return update

    def momentum_kept(self, tuning: StochasticTuning) -> Tensor:
        r"""Return :math:`k`, the share of the momentum that a step keeps, ``()`` or
        ``(D,)``.

        Mini-batch noise displaces a slow direction :math:`\tfrac12 (1 + k)` times as
        far as noise injected by friction. So the excess of its variance is

        .. math:: \frac{\varepsilon^2 V}{1 - k^2} \left(\frac{1 + k}{2}\right)^2
            = \frac{\varepsilon^2 V}{4} \cdot \frac{1 + k}{1 - k},

        from :math:`\tfrac12 \varepsilon V / C` at small friction to :math:`\tfrac14
        \varepsilon^2 V` of Langevin dynamics, :math:`k = 0`.
        """
        if self.friction is not None:
            return (-tuning.step_size * self.friction).exp()
        assert tuning.curvature is not None
        kicks = tuning.step_size.square() * tuning.curvature.noise
        return ((4 * self.tolerance - kicks) / (4 * self.tolerance + kicks)).clamp(
            min=0.0, max=MOST_KEPT
        )

    def suggested_step_size(self, estimate: CurvatureEstimate) -> Tensor:
        return (
            4
            * self.tolerance
            / torch.maximum(estimate.stiffest, 4 * estimate.noise.mean())
        ).sqrt()

    @property
    def measures_curvature(self) -> bool:
        return self.step_size is None or self.friction is None


# measurements in warm-up --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CurvatureEstimate:
    r"""Curvature and gradient noise at the positions of the chains, averaged with
    linearly growing weights.

    Both are in preconditioned coordinates :math:`G^{-1/2} z`.

    :param direction: each chain's direction of largest curvature, unit vectors ``(C,
        D)``.
    :param curvature: each chain's largest curvature, ``(C,)``.
    :param noise: variance of mini-batch gradients, averaged over chains, ``(D,)``; 0
        without mini-batches.
    :param count: number of measurements.
    """

    direction: Tensor
    curvature: Tensor
    noise: Tensor
    count: int = 0

    @property
    def stiffest(self) -> Tensor:
        """The largest of the chains' curvatures, ``()``."""
        return self.curvature.max()

    @classmethod
    def start(cls, z: Tensor, generator: Generator) -> CurvatureEstimate:
        """Return an empty estimate with random directions, for chains ``(C, D)``."""
        direction = torch.nn.functional.normalize(normal(z, generator), dim=-1)
        return cls(direction, torch.zeros_like(z[:, 0]), torch.zeros_like(z[0]))

    def update(
        self,
        density: Density,
        z: Tensor,
        generator: Generator,
        preconditioner: Tensor,
    ) -> CurvatureEstimate:
        """Measure at positions ``(C, D)``: one power iteration by a finite difference,
        and one difference of gradients.

        :param preconditioner: diagonal of ``G``, ``(C, D)`` or ``(D,)``.
        """
        scale = preconditioner.sqrt()
        rows = mini_batches(density.row_counts, len(z), generator)
        _, gradient = density.energy_and_gradient(z, rows)
        along = scale * self.direction
        # The cube root of the precision balances rounding against the change of the
        # curvature.
        length = torch.finfo(z.dtype).eps ** (1 / 3) * (
            1 + z.square().mean(-1, keepdim=True).sqrt()
        )
        distance = length / along.norm(dim=-1, keepdim=True)
        # in place, since chains of networks are large
        product = along.mul_(distance).add_(z)
        product = (
            density.energy_and_gradient(product, rows)[1]
            .sub(gradient)
            .mul_(scale)
            .div_(distance)
        )
        curvature = product.norm(dim=-1, keepdim=True)
        usable = torch.isfinite(curvature) & (curvature > 0)
        noise = torch.zeros_like(z[0])
        if rows is not None:
            new_rows = mini_batches(density.row_counts, len(z), generator)
            change = gradient - density.energy_and_gradient(z, new_rows)[1]
            noise = (
                (scale * change).square_().mul_(0.5).nan_to_num_(0.0, 0.0, 0.0).mean(0)
            )
        weight = 2 / (self.count + 2)
        return CurvatureEstimate(
            torch.where(usable, product.div_(curvature), self.direction),
            self.curvature.lerp(
                torch.where(usable[:, 0], curvature[:, 0], self.curvature), weight
            ),
            self.noise.lerp(noise, weight),
            self.count + 1,
        )
