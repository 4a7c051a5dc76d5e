r"""Stochastic-gradient samplers: Langevin dynamics, plain and preconditioned, and Hamiltonian Monte Carlo.

They follow a diffusion whose stationary law is the posterior, in steps that nothing accepts or rejects. Two things move
the law that they reach away from it, and both vanish with the step: the discretisation, by curvature, and the variance
``V`` of the mini-batches' gradients. Warm-up measures both (:class:`CurvatureEstimate`), so a kernel that is given no
``step_size`` takes one that keeps the predicted excess of the variance to a ``tolerance``.

Such a step is short where posteriors are narrow or data many, and then the wide directions take forever. So warm-up
learns the posterior's variances, too, pooled over the chains, at the ends of the windows in which Hamiltonian kernels
learn their mass matrix; steps are then taken in their units (a preconditioner that stays as it is needs no
correction). A ``step_size`` that is given is that of the plain recursion, in warm-up and afterwards.

**What explodes is told.** A chain whose energy rises in one iteration by more than ``MAX_ENERGY_ERROR + D``, both ends
evaluated on the same mini-batch, or which leaves all numbers behind, goes back to where the iteration began, and counts
as divergent. By ``D`` energies may rise, as from a mode to where its draws are.

Every draw brings the statistic ``virial``, :math:`(z - a) \cdot \nabla U(z) / D` averaged over the iteration's steps,
where :math:`a` is the other chains' mean in warm-up, or 0. Its mean is 1 under any posterior whose density vanishes at
infinity (integrate by parts), also with mini-batches, whose gradients are unbiased: the configurational temperature, to
be compared with 1 when a run has settled.

**SGLD** (Welling & Teh 2011, ICML):

.. math:: z \leftarrow z - \tfrac12 \varepsilon \nabla\tilde U(z) + \mathcal N(0, \varepsilon)

with a mini-batch's gradient :math:`\nabla\tilde U` of variance ``V``. Along a quadratic direction of curvature ``λ``
the recursion is an AR(1) process, so its stationary variance is known,

.. math:: \frac{1}{\lambda} \cdot \frac{1 + \varepsilon V / 4}{1 - \varepsilon \lambda / 4} ,

too large by about :math:`\varepsilon (\lambda + V) / 4` of it: the bias that a constant step leaves, stable for
:math:`\varepsilon < 4 / \lambda`.

**SGHMC** (Chen, Fox & Guestrin 2014, arXiv 1402.4102), with friction :math:`C` and unit mass:

.. math::
    r &\leftarrow r - \varepsilon \nabla\tilde U(z), \qquad z \leftarrow z + \tfrac12 \varepsilon r \\
    r &\leftarrow k r + \mathcal N\left(0,\ 1 - k^2\right), \qquad z \leftarrow z + \tfrac12 \varepsilon r,
        \qquad k = e^{-\varepsilon C} .

The paper discretises the same dynamics by Euler's method (its Algorithm 2), which biases even the variance under a
quadratic potential of curvature :math:`\lambda`, by :math:`\tfrac14 \varepsilon^2 \lambda` of it. This splitting
(BAOAB: Leimkuhler & Matthews 2013, arXiv 1203.5428) costs the same and with full gradients has no bias there.

There is no accept step. Other potentials add a bias of order :math:`\varepsilon^2`, and mini-batches, whose gradients
have the variance :math:`V`, make momenta and positions too wide. A kick displaces a chain in the end by
:math:`\tfrac12 (1 + k)` times what the same momentum does that friction injects, so that along directions in which
chains move slowly the excess of the variance is

.. math::
    \frac{\varepsilon^2 V}{1 - k^2} \left(\frac{1 + k}{2}\right)^2
    = \frac{\varepsilon^2 V}{4} \cdot \frac{1 + k}{1 - k} ,

from :math:`\tfrac12 \varepsilon V / C` at little friction to Langevin dynamics' :math:`\varepsilon^2 V / 4` where
nothing is kept. All of it vanishes with the step size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.kernels.adaptation import MassEstimate, tuned, window_ends
from pyro_symmetric.mcmc.kernels.kernel import MAX_ENERGY_ERROR, Kernel, State, mini_batches, normal

FIRST_ROUNDS = 6  # measurements of the curvature before the first step in new units
SMOOTHING, DAMPING = 0.99, 1e-5  # alpha and delta of pSGLD
MOST_KEPT = 0.95  # of the momentum in one step, if friction isn't given


@dataclass(frozen=True, eq=False)
class StochasticTuning:
    """The results of warm-up.

    :param step_size: ``()``.
    :param preconditioner: what multiplies gradients, ``(D,)``: the posterior's variances as warm-up has found them; or
        each chain's own, ``(C, D)``.
    :param centre: what the virial is taken from, ``(C, D)``, or ``()`` for the origin.
    :param curvature: what warm-up has measured, or ``None`` if nothing is left to find.
    :param estimate: of the variances in the current window; ``None`` if they aren't learnt.
    """

    step_size: Tensor
    preconditioner: Tensor
    centre: Tensor
    curvature: CurvatureEstimate | None
    estimate: MassEstimate | None


@dataclass(frozen=True, eq=False, repr=False)
class SGLD(Kernel):
    """Stochastic-gradient Langevin dynamics, with a constant step.

    >>> model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100)
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.SGLD(model, batch_size=20)
    >>> posterior = ps.sample(kernel, x, y, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["weight"].shape
    torch.Size([4, 20, 1, 3])

    :param model: any Pyro model with continuous latent sites, or a ``BayesianModel``.
    :param step_size: Welling & Teh's ``ε``. ``None``: ``4 tolerance / (λ + mean V)``, where ``λ`` is the largest
        curvature of the potential energy (eigenvalue of its Hessian) and ``V`` the variance of the mini-batches'
        gradients, coordinate by coordinate; warm-up measures both.
    :param batch_size: rows of a mini-batch of a ``BayesianModel``; each chain draws its own, independently. ``None``:
        all. Another model's mini-batches are what its plates with ``subsample_size`` draw.
    :param tolerance: with ``step_size=None``, the relative excess of the variance that the step may cause: by
        discretisation where curvature is largest, and by mini-batch noise on average over coordinates.
    :param num_steps: gradient steps for each iteration; the sampler's ``thinning`` multiplies it.
    """

    model: Callable[..., Any]
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

    # what the other kernels have in another form --------------------------------------------------------------------

    def best_step(self, estimate: CurvatureEstimate) -> Tensor:
        """The step size ``()`` that keeps the tolerance."""
        return 4 * self.tolerance / (estimate.stiffest + estimate.noise.mean())

    def mover(self, tuning: StochasticTuning) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        """A step, which moves positions and momenta in place, given gradients and standard normal noise."""
        step = tuning.step_size * tuning.preconditioner
        spread = step.sqrt()

        def move(z: Tensor, momentum: Tensor, gradient: Tensor, noise: Tensor) -> None:
            z.addcmul_(gradient, step, value=-0.5).addcmul_(noise, spread)

        return move

    def first_preconditioner(self, gradient: Tensor) -> Tensor:
        """The preconditioner before anything is learnt."""
        return torch.ones_like(gradient[0])

    @property
    def measures(self) -> bool:
        """True if warm-up has anything to measure."""
        return self.step_size is None

    # the contract ---------------------------------------------------------------------------------------------------

    def init(self, density: Density, z: Tensor, num_warmup: int, generator: torch.Generator) -> State:
        energy, gradient = density.energy_and_gradient(z, mini_batches(density.row_counts, len(z), generator))
        momentum = normal(z, generator) if self.has_momentum else torch.zeros_like(z)
        tuning = StochasticTuning(
            z.new_tensor(self.step_size or 0.0),
            self.first_preconditioner(gradient),
            z.new_zeros(()),
            CurvatureEstimate.start(z, generator) if self.measures else None,
            MassEstimate.start(z) if self.learns_variances and self.step_size is None else None,
        )
        return self._measured(density, State(z, momentum, energy, gradient, tuning, generator), FIRST_ROUNDS)

    def step(self, density: Density, state: State) -> State:
        tuning, generator, chains = state.tuning, state.generator, len(state.z)
        z, momentum, virial = state.z.clone(), state.momentum.clone(), torch.zeros_like(state.z)
        move = self.mover(tuning)
        for _ in range(self.num_steps):
            rows = mini_batches(density.row_counts, chains, generator)
            energy, gradient = density.energy_and_gradient(z, rows)
            virial.addcmul_(z - tuning.centre, gradient)
            move(z, momentum, gradient, normal(z, generator))
        extent = torch.linalg.vector_norm(z, torch.inf, dim=-1)  # the last step has moved z after the last energy
        error = energy - density.energy(state.z, rows) + 0 * extent  # NaN if either is no number
        diverging = ~(error <= MAX_ENERGY_ERROR + z.shape[-1])
        lost = diverging[:, None]
        energy = torch.where(diverging, state.energy, energy)
        statistics = {
            "lp": -energy,
            "virial": (virial.mean(-1) / self.num_steps).masked_fill(diverging, torch.nan),
            "diverging": diverging,
            "step_size": tuning.step_size.expand(chains),
            "n_steps": torch.full_like(energy, self.num_steps, dtype=torch.long),
        }
        if self.has_momentum:
            statistics["kinetic_temperature"] = momentum.square().mean(-1)
            momentum = torch.where(lost, normal(z, generator), momentum)
        gradient = torch.where(lost, state.gradient, gradient)
        return State(torch.where(lost, state.z, z), momentum, energy, gradient, tuning, generator, statistics)

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        state = self._measured(density, state)
        begin, ends = window_ends(num_warmup)
        window = state.tuning.estimate
        if window is None or not ends or not begin <= iteration < ends[-1]:
            return state
        window = window.update(state.z)
        if iteration + 1 not in ends:
            return tuned(state, estimate=window)
        others = len(state.z) - 1
        state = tuned(
            state,
            preconditioner=window.mass().variance,
            estimate=MassEstimate.start(state.z),
            centre=(window.mean.sum(0) - window.mean) / others if others else state.tuning.centre,
            curvature=CurvatureEstimate.start(state.z, state.generator),
        )
        return self._measured(density, state, FIRST_ROUNDS)

    def _measured(self, density: Density, state: State, rounds: int = 1) -> State:
        """The state after a look at the curvature, with the step that it suggests."""
        tuning: StochasticTuning = state.tuning
        estimate = tuning.curvature
        if estimate is None:
            return state
        for _ in range(rounds):
            estimate = estimate.update(density, state.z, state.generator, tuning.preconditioner)
        step = self.best_step(estimate) if self.step_size is None else tuning.step_size
        return tuned(state, curvature=estimate, step_size=step)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class pSGLD(SGLD):
    r"""Stochastic-gradient Langevin dynamics with RMSProp's preconditioner.

    Li, Chen, Carlson & Carin 2016 (arXiv 1512.07666),

    .. math::
        V &\leftarrow \alpha V + (1 - \alpha)\, \nabla\tilde U(z)^2, \qquad G = 1 / (\delta + \sqrt V) \\
        z &\leftarrow z - \tfrac12 \varepsilon\, G \nabla\tilde U(z) + \mathcal N(0, \varepsilon G)

    for each chain by itself, but ``G`` is learnt in warm-up and then kept. One that depends on where the chain is needs
    a further drift, which asks for second derivatives; the paper's experiments leave it out, and draw from another law.

    >>> model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100)
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.pSGLD(model, batch_size=20)
    >>> posterior = ps.sample(kernel, x, y, num_samples=20, num_warmup=20, num_chains=4, seed=0, progress=False)
    >>> posterior.samples["weight"].shape
    torch.Size([4, 20, 1, 3])

    Other settings are those of :class:`SGLD`, whose ``step_size`` is here that of the preconditioned coordinates.
    """

    learns_variances = False

    def first_preconditioner(self, gradient: Tensor) -> Tensor:
        # All coordinates start alike: one gradient's own small entries would make preconditioners that explode.
        return self._of(gradient.square().mean().expand_as(gradient))

    def adapt(self, density: Density, state: State, iteration: int, num_warmup: int) -> State:
        before = state.tuning.preconditioner
        moment = state.gradient.square().lerp((1 / before - DAMPING).square(), SMOOTHING)
        usable = torch.isfinite(moment).all(-1, keepdim=True)
        state = tuned(state, preconditioner=torch.where(usable, self._of(moment), before))
        return super().adapt(density, state, iteration, num_warmup)

    def _of(self, moment: Tensor) -> Tensor:
        return 1 / (moment.sqrt() + DAMPING)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SGHMC(SGLD):
    """Stochastic-gradient Hamiltonian Monte Carlo.

    ``step_size`` is stable below ``2 / sqrt(λ)`` for the largest curvature ``λ`` of the potential energy (eigenvalue of
    its Hessian), which grows with the number of rows. If not given, it is ``sqrt(4 tolerance / max(λ, 4 mean V))``,
    where ``V`` is the variance of the mini-batches' gradients, coordinate by coordinate; warm-up measures both. The
    statistic ``kinetic_temperature``, the mean of the squared momenta, averages to 1 where the step is small enough and
    friction outweighs the batches' noise.

    >>> model = ps.BayesianModel(nn.Linear(3, 1), likelihood=ps.GaussianLikelihood(scale=0.5), num_data=100)
    >>> x, y = torch.randn(100, 3), torch.randn(100)
    >>> kernel = ps.SGHMC(model, batch_size=20)
    >>> posterior = ps.sample(kernel, x, y, num_samples=20, num_warmup=100, num_chains=4, seed=0, progress=False)
    >>> posterior.statistics["kinetic_temperature"].shape
    torch.Size([4, 20])

    Other settings are those of :class:`SGLD`.

    :param friction: ``C``, the rate at which momentum is forgotten. ``None``: what keeps the mini-batches' excess
        to ``tolerance``, coordinate by coordinate, and at least ``0.05 / step_size``, so that a step forgets a
        twentieth, as in the paper's experiments.
    """

    friction: float | None = None

    has_momentum = True

    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.positive("friction", self.friction, none="one that is found")

    @property
    def measures(self) -> bool:
        return self.step_size is None or self.friction is None

    def best_step(self, estimate: CurvatureEstimate) -> Tensor:
        return (4 * self.tolerance / torch.maximum(estimate.stiffest, 4 * estimate.noise.mean())).sqrt()

    def kept(self, tuning: StochasticTuning) -> Tensor:
        """The share ``k`` of the momentum that a step keeps, ``()`` or ``(D,)``."""
        if self.friction is not None:
            return (-tuning.step_size * self.friction).exp()
        assert tuning.curvature is not None
        kicks = tuning.step_size.square() * tuning.curvature.noise
        return ((4 * self.tolerance - kicks) / (4 * self.tolerance + kicks)).clamp(min=0.0, max=MOST_KEPT)

    def mover(self, tuning: StochasticTuning) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
        keep, step = self.kept(tuning), tuning.step_size * tuning.preconditioner.sqrt()
        spread = (1 - keep.square()).sqrt()

        def move(z: Tensor, r: Tensor, gradient: Tensor, noise: Tensor) -> None:
            r.addcmul_(gradient, step, value=-1)
            z.addcmul_(r, step, value=0.5)
            r.mul_(keep).addcmul_(noise, spread)
            z.addcmul_(r, step, value=0.5)

        return move


# what warm-up measures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CurvatureEstimate:
    r"""Curvature and gradient noise where the chains are, averaged over warm-up with weights that grow linearly.

    With a preconditioner ``G`` both are those of the coordinates :math:`G^{-1/2} z`, in which the sampler is plain.

    :param direction: each chain's direction of largest curvature, unit vectors ``(C, D)``.
    :param curvature: each chain's largest curvature, ``(C,)``.
    :param noise: variance of the mini-batches' gradients, averaged over chains, ``(D,)``; 0 without mini-batches.
    :param count: measurements so far.
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
    def start(cls, z: Tensor, generator: torch.Generator) -> CurvatureEstimate:
        """Nothing measured yet, for chains ``(C, D)``: directions at random."""
        direction = torch.nn.functional.normalize(normal(z, generator), dim=-1)
        return cls(direction, torch.zeros_like(z[:, 0]), torch.zeros_like(z[0]))

    def update(
        self, density: Density, z: Tensor, generator: torch.Generator, preconditioner: Tensor
    ) -> CurvatureEstimate:
        """Measure once more, at ``z`` of shape ``(C, D)``: three gradients of each chain.

        :param preconditioner: its diagonal, ``(C, D)`` or ``(D,)``.
        """
        scale = preconditioner.sqrt()
        rows = mini_batches(density.row_counts, len(z), generator)
        _, gradient = density.energy_and_gradient(z, rows)
        along = scale * self.direction
        # The cube root of the precision balances the rounding of a difference against the curvature's own change.
        length = torch.finfo(z.dtype).eps ** (1 / 3) * (1 + z.square().mean(-1, keepdim=True).sqrt())
        distance = length / along.norm(dim=-1, keepdim=True)
        product = along.mul_(distance).add_(z)  # from here on in place: chains of networks are large
        product = density.energy_and_gradient(product, rows)[1].sub(gradient).mul_(scale).div_(distance)
        curvature = product.norm(dim=-1, keepdim=True)
        usable = torch.isfinite(curvature) & (curvature > 0)
        noise = torch.zeros_like(z[0])
        if rows is not None:
            others = mini_batches(density.row_counts, len(z), generator)
            change = gradient - density.energy_and_gradient(z, others)[1]
            # What is no number counts as 0.
            noise = (scale * change).square_().mul_(0.5).nan_to_num_(0.0, 0.0, 0.0).mean(0)
        weight = 2 / (self.count + 2)
        return CurvatureEstimate(
            torch.where(usable, product.div_(curvature), self.direction),
            self.curvature.lerp(torch.where(usable[:, 0], curvature[:, 0], self.curvature), weight),
            self.noise.lerp(noise, weight),
            self.count + 1,
        )
