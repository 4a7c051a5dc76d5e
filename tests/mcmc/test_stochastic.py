"""Stochastic-gradient samplers of a Bayesian linear regression: their stationary law is
the one that the linear recursion predicts, mini-batch noise that depends on the weights
included.
"""

import math
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.linalg import eigvalsh, inv, solve_discrete_lyapunov, sqrtm
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.mcmc import SGHMC, SGLD, Density, pSGLD, sample
from pyro_symmetric.mcmc.kernels import stochastic
from pyro_symmetric.mcmc.kernels.adaptation import tuned, window_ends
from pyro_symmetric.mcmc.kernels.kernel import Kernel, State
from pyro_symmetric.mcmc.kernels.stochastic import CurvatureEstimate
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.models import BayesianModel, GaussianLikelihood

N, D, NOISE, BATCH = 60, 3, 0.5, 6
_GENERATOR = np.random.default_rng(0)
X = _GENERATOR.normal(size=(N, D)) * [0.6, 0.9, 1.2] + 0.2 * _GENERATOR.normal(
    size=(N, 1)
)
Y = X @ [1.0, -0.5, 0.3] + NOISE * _GENERATOR.normal(size=N)
PRECISION = np.eye(D) + X.T @ X / NOISE**2
EXACT = inv(PRECISION)
MEAN = EXACT @ X.T @ Y / NOISE**2
STIFFEST = eigvalsh(PRECISION)[-1]

# Covariances of 2,500 independent chains, whitened: entries have a standard error of at
# most sqrt(2 / 2500) = 0.028. Bounds at 4.5 of them: false alarms 7e-6 for each entry,
# 4e-5 for each matrix.
CHAINS = 2500
BOUND = 4.5 * math.sqrt(2 / CHAINS)


def regression() -> BayesianModel:
    model = BayesianModel(
        nn.Linear(D, 1, bias=False),
        prior=1.0,
        likelihood=GaussianLikelihood(scale=NOISE),
    )
    return model.to(torch.float64)


def potential_of(kernel: Kernel) -> Density:
    x, y = torch.tensor(X), torch.tensor(Y)
    return Density(
        kernel.model, args=(x, y), batch_size=kernel.batch_size, subsampled=True
    )


def fresh_generator() -> torch.Generator:
    """Seeded from the global one, so that a test's seed decides."""
    return torch.Generator(torch.empty(0).device).manual_seed(
        int(torch.randint(2**62, ()))
    )


def moved(
    kernel: Kernel,
    density: Density,
    z: Tensor,
    iterations: int,
    num_warmup: int = 0,
    **tuning: Tensor,
) -> Iterator[State]:
    """The state after each iteration, those of warm-up adapted; the first is that
    before them.
    """
    state = tuned(kernel.init(density, z, num_warmup, fresh_generator()), **tuning)
    yield state
    for iteration in range(num_warmup + iterations):
        state = kernel.step(density, state)
        if iteration < num_warmup:
            state = kernel.adapt(density, state, iteration, num_warmup)
        yield state


def run(
    kernel: Kernel,
    iterations: int,
    num_warmup: int = 0,
    chains: int = CHAINS,
    **tuning: Tensor,
) -> State:
    """The last state of chains that start at the posterior's mean, where nothing hides
    a wrong variance.
    """
    start = torch.tensor(MEAN).expand(chains, D).clone()
    *_, last = moved(
        kernel, potential_of(kernel), start, iterations, num_warmup, **tuning
    )
    return last


def gradient_noise(covariance: np.ndarray, batch: int | None) -> np.ndarray:
    """Covariance of a mini-batch's gradient, averaged over weights of the posterior's
    mean and this covariance.

    A row's gradient is ``x (x.w - y) / noise²``; ``N / B`` times the sum of ``B`` rows
    drawn with replacement.
    """
    if batch is None:
        return np.zeros((D, D))
    residuals = (
        (X @ MEAN - Y) ** 2 + np.einsum("ni,ij,nj->n", X, covariance, X)
    ) / NOISE**4
    second = np.einsum("n,ni,nj->ij", residuals, X, X) / N
    slope = X.T @ X / NOISE**2 / N
    # minus the mean gradient of a row at the mean, which the prior's gradient balances
    first = MEAN / N
    return N**2 / batch * (second - np.outer(first, first) - slope @ covariance @ slope)


def stationary(
    linear: np.ndarray, noise_in: np.ndarray, injected: np.ndarray, batch: int | None
) -> np.ndarray:
    """Covariance of ``s <- linear s + noise_in g + N(0, injected)`` with a mini-batch's
    gradient noise ``g``, which itself depends on the covariance of the positions: the
    first D entries of ``s``.
    """
    covariance = solve_discrete_lyapunov(linear, injected)
    for _ in range(100):
        noise = gradient_noise(covariance[:D, :D], batch)
        covariance = solve_discrete_lyapunov(
            linear, injected + noise_in @ noise @ noise_in.T
        )
    return covariance


def langevin_covariance(
    step: float, batch: int | None, preconditioner: np.ndarray | None = None
) -> np.ndarray:
    g = np.eye(D) if preconditioner is None else np.diag(preconditioner)
    return stationary(
        np.eye(D) - step / 2 * g @ PRECISION, step / 2 * g, step * g, batch
    )


def hamiltonian_covariance(
    step: float, friction: float, batch: int | None
) -> np.ndarray:
    """Of positions and momenta: kick, half a drift, friction and noise, half a
    drift.
    """
    one, none = np.eye(D), np.zeros((D, D))
    keep = math.exp(-step * friction)
    kick = np.block([[one, none], [-step * PRECISION, one]])
    drift = np.block([[one, step / 2 * one], [none, one]])
    rest = drift @ np.block([[one, none], [none, keep * one]]) @ drift
    inject = drift @ np.block([[none, none], [none, (1 - keep**2) * one]]) @ drift.T
    return stationary(
        rest @ kick, step * rest @ np.block([[none], [one]]), inject, batch
    )


def whitened(z: Tensor, covariance: np.ndarray) -> np.ndarray:
    """The draws' covariance where ``covariance`` would be the identity."""
    root = inv(np.real(sqrtm(covariance)))
    return root @ np.cov(z.numpy().T) @ root


def assert_law(z: Tensor, covariance: np.ndarray) -> None:
    assert np.abs(whitened(z, covariance) - np.eye(D)).max() < BOUND
    errors = (z.mean(0).numpy() - MEAN) / np.sqrt(covariance.diagonal() / CHAINS)
    assert np.abs(errors).max() < 4.8  # false alarms 5e-6


PRECONDITIONER = np.array([2.0, 1.0, 0.5]) / 30


@pytest.mark.parametrize("batch", [None, BATCH])
@pytest.mark.parametrize("kind", [SGLD, pSGLD, SGHMC])
def test_chains_have_the_covariance_that_the_recursion_predicts(kind, batch):
    """pSGLD's preconditioner is kept as it is given. The temperature, or what stands
    for it, is predicted, too.
    """
    if kind is SGLD:
        step, name = 0.8 / STIFFEST, "virial"
        predicted = langevin_covariance(step, batch)
        state = run(SGLD(regression(), step_size=step, batch_size=batch), 8)
        temperature = np.trace(PRECISION @ predicted) / D
        # and not the posterior's own
        assert whitened(state.z, EXACT).diagonal().min() > 1
        assert temperature > (1.08 if batch is None else 2)
    elif kind is pSGLD:
        root, kept = (
            np.diag(PRECONDITIONER**0.5),
            torch.tensor(PRECONDITIONER).expand(CHAINS, D),
        )
        step = 0.6 / eigvalsh(root @ PRECISION @ root)[-1]
        predicted = langevin_covariance(step, batch, PRECONDITIONER)
        kernel = pSGLD(regression(), step_size=step, batch_size=batch)
        state = run(kernel, 10, preconditioner=kept)
        assert torch.equal(state.tuning.preconditioner, kept)
        name, temperature = "virial", np.trace(PRECISION @ predicted) / D
    else:
        step, name = 0.5 / math.sqrt(STIFFEST), "kinetic_temperature"
        both = hamiltonian_covariance(step, 0.3 / step, batch)
        predicted, temperature = both[:D, :D], np.trace(both[D:, D:]) / D
        state = run(
            SGHMC(regression(), step_size=step, friction=0.3 / step, batch_size=batch),
            12,
        )
        if batch is None:  # the splitting has no bias here
            assert predicted == pytest.approx(EXACT)
            assert temperature == pytest.approx(1.0)
        else:
            assert temperature > 1.3
    assert_law(state.z, predicted)
    measured = state.statistics[name]
    error = (
        temperature * BOUND
        if kind is SGHMC
        else 4.5 * measured.std().item() / math.sqrt(CHAINS) + 1e-3
    )
    assert measured.mean().item() == pytest.approx(temperature, abs=error)


def test_an_iteration_is_the_recursion_of_its_description():
    density, z = (
        potential_of(kernel := SGLD(regression(), step_size=1e-3, num_steps=4)),
        torch.randn(5, D).double(),
    )
    state = kernel.init(density, z, 0, fresh_generator())
    twin = state.generator.clone_state()
    after = kernel.step(density, state)
    expected, virial = z.clone(), torch.zeros(5, dtype=torch.float64)
    for _ in range(4):
        gradient = density.energy_and_gradient(expected)[1]
        virial += (expected * gradient).sum(-1) / D / 4
        noise = torch.empty_like(z).normal_(generator=twin)
        expected = expected - 0.5e-3 * gradient + math.sqrt(1e-3) * noise
    assert torch.allclose(after.z, expected, rtol=1e-10)
    assert torch.allclose(after.statistics["virial"], virial, rtol=1e-10)
    assert torch.equal(state.z, z)  # a step moves copies
    assert torch.equal(after.momentum, torch.zeros_like(z))


@pytest.mark.parametrize("batch", [None, BATCH])
@pytest.mark.parametrize("kind", [SGLD, SGHMC])
def test_the_step_and_friction_that_are_found_keep_the_excesses_of_their_formulas_to_the_tolerance(
    kind, batch
):
    kernel = kind(regression(), batch_size=batch)
    tuning = run(kernel, 0, chains=1000).tuning
    step, noise, stiffest = (
        tuning.step_size,
        tuning.curvature.noise,
        tuning.curvature.stiffest,
    )
    assert batch is not None or stiffest.item() == pytest.approx(STIFFEST, rel=0.02)
    # 6,000 squared differences, of a relative standard error of 0.03: at five of them,
    # false alarms below 1e-5.
    assert noise.numpy() == pytest.approx(
        gradient_noise(np.zeros((D, D)), batch).diagonal(), rel=0.15
    )
    if kind is SGLD:
        assert (step * (stiffest + noise.mean()) / 4).item() == pytest.approx(0.05)
        return
    assert (
        step.square() * torch.maximum(stiffest, 4 * noise.mean()) / 4
    ).item() == pytest.approx(0.05)
    keep = kernel.momentum_kept(tuning)
    assert (step.square() * noise * (1 + keep) <= 4 * 0.05 * (1 - keep) + 1e-9)[
        keep > 0
    ].all()


def test_chains_draw_mini_batches_of_their_own():
    kernel = SGHMC(regression(), batch_size=BATCH, step_size=0.02)
    # one place, three mini-batches
    assert run(kernel, 0, chains=3).energy.unique().numel() == 3


def test_psgld_learns_the_root_mean_square_of_its_gradients_in_warm_up(monkeypatch):
    monkeypatch.setattr(stochastic, "SMOOTHING", 0.8)
    kernel = pSGLD(regression(), step_size=0.1, batch_size=BATCH, num_steps=5)
    state = run(kernel, 0, num_warmup=30)
    moment = (1 / state.tuning.preconditioner - stochastic.DAMPING).square().mean(0)
    covariance = np.cov(state.z.numpy().T)
    expected = (
        gradient_noise(covariance, BATCH).diagonal()
        + (PRECISION @ covariance @ PRECISION).diagonal()
    )
    assert moment.sqrt().numpy() == pytest.approx(np.sqrt(expected), rel=0.1)
    first = run(kernel, 0)
    root = first.gradient.square().mean().sqrt()
    assert first.tuning.preconditioner.unique().item() == pytest.approx(
        1 / (root.item() + stochastic.DAMPING)
    )


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", [SGLD, pSGLD, SGHMC])
@pytest.mark.parametrize("batch", [None, BATCH])
def test_the_step_that_warm_up_finds_keeps_the_excess_to_the_tolerance(kind, batch):
    kernel = kind(regression(), batch_size=batch, tolerance=0.1)
    state = run(kernel, 25, num_warmup=25, chains=800)
    assert not state.statistics["diverging"].any()
    # The trace over D of 800 chains' covariance has a standard error of at most sqrt(2
    # / 800) = 0.05; at 4.5 of them: false alarms 7e-6.
    excess = whitened(state.z, EXACT).trace() / D - 1
    # of discretisation and of noise, the tolerance each
    assert -0.23 < excess < 0.2 + 0.23
    virial = state.statistics["virial"]
    error = 4.5 * virial.std().item() / math.sqrt(800)
    assert 1 - error < virial.mean().item() < 1.2 + error


@pytest.mark.parametrize("kind", [SGLD, pSGLD, SGHMC])
def test_a_chain_that_explodes_goes_back_and_is_counted(kind):
    kernel = kind(regression(), step_size=1e4, num_steps=200)
    density = potential_of(kernel)
    state, after = moved(kernel, density, starting_points(density, 3), 1)
    assert after.statistics["diverging"].all()
    assert after.statistics["virial"].isnan().all()
    assert torch.equal(after.z, state.z)
    assert torch.isfinite(after.momentum).all()


def plain_normal() -> None:
    pyro.sample("z", dist.Normal(torch.zeros(1), 1.0).to_event(1))


@pytest.mark.stochastic
@pytest.mark.parametrize(("kind", "step"), [(SGHMC, 0.7), (SGHMC, 1.5), (SGLD, 1.5)])
def test_a_given_step_within_the_documented_limit_stays_within_it_in_warm_up_too(
    kind, step
):
    """Stable are steps below 2 (SGHMC) and 4 (SGLD). Of 2,000 independent draws the
    variance has a relative standard error of 0.032; at 4.5 of them: false alarms
    7e-6."""
    kernel, density = (
        kind(plain_normal, step_size=step),
        Density(plain_normal, subsampled=True),
    )
    for state in list(moved(kernel, density, torch.zeros(2000, 1), 0, 20))[1:]:
        assert not state.statistics["diverging"].any()
    assert state.z.var().item() == pytest.approx(
        1 / (1 - step / 4) if kind is SGLD else 1.0, rel=0.145
    )


@pytest.mark.parametrize(("kind", "step"), [(SGHMC, 2.1), (SGLD, 100.0)])
def test_energies_that_blow_up_count_as_divergences_and_are_told(kind, step):
    options: dict = {
        "num_warmup": 20,
        "num_samples": 50,
        "num_chains": 4,
        "seed": 0,
        "progress": False,
    }
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        posterior = sample(kind(plain_normal, step_size=step), **options)
    assert any("diverg" in str(one.message) for one in told)
    assert posterior.statistics["diverging"].float().mean() > 0.2
    assert posterior.samples["z"].abs().max() < 1e3


def wide_normal() -> None:
    pyro.sample("z", dist.Normal(torch.zeros(4000), 1.0).to_event(1))


@pytest.mark.stochastic
def test_the_rise_from_a_mode_of_many_coordinates_is_no_divergence():
    """By half of 4,000 nats and a third more, as the step is long, with a deviation of
    60: no bound is within 20 of these."""
    kernel = SGLD(wide_normal, step_size=1.0)
    density = Density(wide_normal, engine="eager", subsampled=True)
    state, after = moved(kernel, density, torch.zeros(2, 4000), 1)
    rise = after.energy - state.energy
    assert ((rise > 1400) & (rise < 4000)).all()
    assert not after.statistics["diverging"].any()


def test_the_virial_is_centred_at_the_mean_of_the_other_chains_in_the_last_window():
    kernel = SGLD(plain_normal, num_steps=1)
    density = Density(plain_normal, engine="eager", subsampled=True)
    states = list(moved(kernel, density, torch.randn(3, 1), 0, 20))
    begin, ends = window_ends(20)
    window = states[[begin, *ends][-2] + 1 : ends[-1] + 1]
    means = torch.stack([state.z for state in window]).mean(0)
    others = torch.stack([means[[1, 2]], means[[0, 2]], means[[0, 1]]]).mean(1)
    assert torch.allclose(states[-1].tuning.centre, others, atol=1e-6)


class Looks(TorchDispatchMode):
    """Counts what makes the host wait for a device: values that are looked at, and
    copies.
    """

    WAITS = ("_local_scalar_dense", "nonzero", "equal", "_to_copy", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        # to another dtype, where it lies
        copies = name == "_to_copy" and (kwargs or {}).get("device") is None
        if name in self.WAITS and not copies:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [SGLD, pSGLD, SGHMC])
@pytest.mark.parametrize("settings", [{}, {"batch_size": BATCH}])
def test_an_iteration_never_waits_for_the_device(kind, settings) -> None:
    kernel = kind(regression(), **settings)
    data = torch.tensor(X), torch.tensor(Y)
    density = Density(
        kernel.model,
        data,
        engine="eager",
        batch_size=kernel.batch_size,
        subsampled=True,
    )
    state = kernel.init(
        density, torch.tensor(MEAN).expand(4, D).clone(), 4, fresh_generator()
    )
    for iteration in range(6):
        with Looks() as looks:
            state = kernel.step(density, state)
        assert looks.found == [], iteration
        if iteration < 4:
            state = kernel.adapt(density, state, iteration, 4)


def scaled(y: Tensor) -> None:
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(5), scale).to_event(1))
    pyro.sample("y", dist.Normal(w, 0.1).to_event(1), obs=y)


SHIFTS = torch.tensor([0.3, -0.2, 0.4, 0.1, -0.3])


@pytest.mark.slow
@pytest.mark.stochastic
def test_a_scale_to_infer_loses_no_chain():
    """Steps too large fling chains to where a scale is 0 or infinite, from where none
    returns. The scale's mean by quadrature; errors of 0.015 at most in 20 seeds, by the
    tolerance and by 1,600 correlated draws."""
    torch.manual_seed(0)
    posterior = sample(
        SGHMC(scaled, num_steps=5),
        SHIFTS,
        num_chains=8,
        num_warmup=150,
        num_samples=200,
        progress=False,
    )
    assert not posterior.statistics["diverging"].any()
    assert posterior.samples["scale"].mean() == pytest.approx(0.3504, abs=0.04)


# curvature ----------------------------------------------------------------------------


def measured(
    density: Any, z: Tensor, rounds: int, generator: torch.Generator, g: Tensor
) -> CurvatureEstimate:
    found = CurvatureEstimate.start(z, generator)
    for _ in range(rounds):
        found = found.update(density, z, generator, g)
    return found


@pytest.mark.stochastic
@pytest.mark.parametrize("g", [[1.0, 1.0, 1.0], [0.2, 1.0, 3.0]])
def test_curvature_and_noise_are_those_of_the_coordinates_in_which_the_sampler_is_plain(
    g, generator
):
    g, mean = np.array(g), torch.tensor(MEAN).expand(500, D).clone()
    diagonal, root = torch.tensor(g).expand(500, D), np.diag(np.sqrt(g))
    full = measured(potential_of(SGLD(regression())), mean, 26, generator, diagonal)
    values, vectors = np.linalg.eigh(root @ PRECISION @ root)
    assert full.stiffest.item() == pytest.approx(values[-1], rel=0.05)
    assert torch.equal(full.noise, torch.zeros(D, dtype=torch.float64))
    assert torch.allclose(
        full.direction.norm(dim=-1), torch.ones(500, dtype=torch.float64)
    )
    assert np.abs(full.direction.numpy() @ vectors[:, -1]).min() > 0.99
    # 3,000 squared differences, of a relative standard error of 0.04 (heavier tails
    # than normal ones): at five of them, false alarms below 1e-5 each.
    noisy = measured(
        potential_of(SGLD(regression(), batch_size=BATCH)), mean, 6, generator, diagonal
    )
    assert noisy.noise.numpy() == pytest.approx(
        g * gradient_noise(np.zeros((D, D)), BATCH).diagonal(), rel=0.2
    )


def test_the_step_suits_the_chain_of_the_largest_curvature():
    """By the formulas of the docstrings, at a tolerance of 0.05."""
    noise = torch.tensor([1.0, 3.0])
    found = CurvatureEstimate(torch.eye(2), torch.tensor([1.0, 7.0]), noise)
    step = SGLD(plain_normal).suggested_step_size(found).item()
    assert step == pytest.approx(4 * 0.05 / (7 + 2))
    step = SGHMC(plain_normal).suggested_step_size(found).item()
    assert step == pytest.approx(math.sqrt(4 * 0.05 / (4 * 2)))
    step = SGHMC(plain_normal).suggested_step_size(
        CurvatureEstimate(torch.eye(2), torch.tensor([1.0, 9.0]), noise)
    )
    assert step.item() == pytest.approx(math.sqrt(4 * 0.05 / 9))


def test_measurements_that_are_no_numbers_are_left_out(generator):
    class Wall:
        row_counts: ClassVar[dict[str, tuple[int, int]]] = {}

        def energy_and_gradient(
            self, z: Tensor, rows: None = None
        ) -> tuple[Tensor, Tensor]:
            gradient = torch.where(z[:, :1] > 0, z, torch.nan)
            return gradient.sum(-1), gradient

    z = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], dtype=torch.float64)
    found = measured(Wall(), z, 3, generator, torch.ones(2).double())
    assert torch.isfinite(found.direction).all()
    assert found.curvature[0].item() == pytest.approx(1.0)
    assert found.curvature[1] == 0
