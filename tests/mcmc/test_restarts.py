"""Chains in modes of negligible mass that restart at the positions of others."""

import dataclasses
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.mcmc import HMC, MCLMC, NUTS, AdaptiveHMC, sample
from pyro_symmetric.mcmc.kernels.adaptation import HamiltonianTuning
from pyro_symmetric.mcmc.kernels.settling import ModeMasses, sources
from pyro_symmetric.posterior.diagnostics import starts

from .conftest import GaussianPotential, Killed, assert_same_draws

RUN = {"num_samples": 20, "num_chains": 32, "engine": "eager", "progress": False}
FAR = 60.0


def modes(*log_masses: float, scales=None, correlation: float = 0.0, dim: int = 2):
    """A model of Gaussian modes, ``FAR`` apart; the last one's coordinates correlate."""
    count = len(log_masses)
    places = FAR * torch.arange(float(count))
    spread = torch.ones(count) if scales is None else torch.tensor(scales)
    covariances = torch.eye(dim) * spread.square()[:, None, None]
    covariances[-1] += correlation * (1 - torch.eye(dim))

    def model():
        components = dist.MultivariateNormal(
            places[:, None].expand(count, dim), covariances
        )
        mixture = dist.Categorical(logits=torch.tensor(log_masses))
        pyro.sample("w", dist.MixtureSameFamily(mixture, components))

    return model


def near_modes(count: int, dim: int = 2):
    """Starts of 32 chains, in the modes by turns."""
    return {"w": FAR * (torch.arange(32) % count)[:, None] + torch.randn(32, dim)}


class Modes(GaussianPotential):
    """Gaussian modes, ``FAR`` apart.

    :param log_masses: ``(K,)``.
    :param covariances: ``(K, D, D)``.
    """

    def __init__(self, log_masses, covariances):
        super().__init__(torch.ones(covariances.shape[-1]).double(), rotated=False)
        self.dtype = torch.float64
        self.log_masses, self.covariances = log_masses, covariances
        means = FAR * torch.arange(len(log_masses)).double()[:, None]
        self.components = torch.distributions.MultivariateNormal(
            means.expand(covariances.shape[:2]), covariances, validate_args=False
        )

    def energy_and_gradient(self, z, rows=None):
        logs = self.components.log_prob(z[:, None]) + self.log_masses
        return -logs.logsumexp(1), torch.zeros_like(z)

    def energies(self, z):
        return self.energy_and_gradient(z)[0]

    def draws(self, mode, count):
        """Exact draws of a chain that stays in each given mode, ``(S, C, D)``."""
        return self.components.sample((count, len(mode)))[:, range(len(mode)), mode]


def masses_of(density, draws) -> ModeMasses:
    """The estimate of draws ``(S, C, D)``."""
    masses = ModeMasses()
    for iteration, z in enumerate(draws):
        energy = density.energy_and_gradient(z)[0]
        masses = masses.update(50 + iteration, z, energy)
    return masses


def negligible(density, draws, generator) -> list[bool]:
    """Tell which chains restart."""
    chains = sources_of(masses_of(density, draws), density, generator)
    return (chains != torch.arange(draws.shape[1])).tolist()


def sources_of(masses, density, generator) -> torch.Tensor:
    """The chains at whose positions chains continue."""
    return sources(masses.gaps(density.energies, generator), generator)


def two_modes(log_mass, scale, correlation=0.0, dim=4) -> Modes:
    """Modes of masses 1 and ``exp(log_mass)``; the second one has a scale, and
    correlations.
    """
    eye = torch.eye(dim).double()
    second = scale**2 * (eye + correlation * (1 - eye))
    return Modes(torch.tensor([0.0, log_mass]).double(), torch.stack([eye, second]))


# which modes are negligible -----------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize(
    ("log_mass", "scale", "expected"),
    [
        (-20.0, 1.0, True),
        (-20.0, 100.0, True),
        (-20.0, 0.01, False),  # it might be wide, and its chains stand still
        (-40.0, 0.01, True),
        (-5.0, 1.0, False),
        (0.0, 0.01, False),
        (0.0, 100.0, False),
        (5.0, 1.0, False),
    ],
)
def test_a_mode_is_judged_by_its_mass_not_by_its_height(
    log_mass, scale, expected, generator
):
    """Of 20 chains 3 are in the mode; the others are in one of mass 1 and scale 1. By
    50 draws in 4 coordinates the bounds are within a nat.
    """
    density = two_modes(log_mass, scale)
    mode = torch.tensor([1] * 3 + [0] * 17)
    draws = density.draws(mode, 50)
    found = negligible(density, draws, generator)
    assert found == [expected] * 3 + [False] * 17


@pytest.mark.stochastic
@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_bounds_enclose_the_mass(correlation, generator):
    """Those of a Gaussian, of mass 1, by 2,000 draws: with the right moments, the lower
    one has no noise; the upper one is loose by the correlations.
    """
    eye = torch.eye(4).double()
    covariance = eye + correlation * (1 - eye)
    density = Modes(torch.zeros(1).double(), covariance[None])
    draws = density.draws(torch.zeros(20).long(), 2000)
    masses = masses_of(density, draws)
    lower = masses.lower_bounds(density.energies, generator)
    upper = masses.upper_bounds()
    # its looseness by shrinkage is at most that
    shrunk = covariance.lerp(eye, 0.05)
    ratio = torch.linalg.solve(covariance, shrunk)
    loose = 0.5 * (ratio.trace() - 4 - torch.linalg.slogdet(ratio)[1])
    # 160 points, each with a deviation of 0.55 if correlated: 3.4 errors
    assert lower.mean() == pytest.approx(-float(loose), abs=0.15)
    assert lower.max() < 1.0
    # energies of the last draws of 20 chains
    determinant = torch.linalg.slogdet(covariance)[1]
    assert upper.mean() == pytest.approx(-0.5 * float(determinant), abs=1.0)


@pytest.mark.stochastic
def test_a_mode_of_strong_correlations_does_not_make_wide_ones_negligible(generator):
    """Of equal masses; by its variances alone it would have exp(19) of the mass."""
    density = two_modes(0.0, 1.0, correlation=0.99, dim=10)
    mode = torch.tensor([0] * 10 + [1] * 10)
    draws = density.draws(mode, 50)
    assert not any(negligible(density, draws, generator))


@pytest.mark.parametrize("still", [1, 12, 19])
def test_chains_that_stand_still_are_not_judged(still, generator):
    density = two_modes(-40.0, 1.0)
    draws = density.draws(torch.zeros(20).long(), 50)
    draws[:, :still] = draws[0, :still]
    assert not any(negligible(density, draws, generator))


@pytest.mark.parametrize("still", [12, 20])
def test_a_coordinate_that_does_not_change_has_no_say(still, generator):
    density = two_modes(-40.0, 1.0)
    mode = torch.tensor([0] * 18 + [1] * 2)
    draws = density.draws(mode, 50)
    draws[:, :still, 3] = draws[0, :still, 3]
    assert negligible(density, draws, generator) == [False] * 18 + [True] * 2


def test_one_deep_and_narrow_mode_does_not_make_all_others_negligible(generator):
    density = two_modes(1000.0, 0.01)
    mode = torch.tensor([1] * 2 + [0] * 18)
    draws = density.draws(mode, 50)
    assert not any(negligible(density, draws, generator))


def test_a_chain_of_infinite_energy_does_not_keep_the_others(generator):
    density = two_modes(-40.0, 1.0)
    mode = torch.tensor([0] * 17 + [1] * 3)
    draws = density.draws(mode, 50)
    masses = masses_of(density, draws)
    level = masses.level.clone()
    level[0], level[1] = torch.inf, torch.nan
    masses = dataclasses.replace(masses, level=level)
    chains = sources_of(masses, density, generator)
    moved = (chains != torch.arange(20)).tolist()
    assert moved == [False] * 17 + [True] * 3
    assert set(chains[17:].tolist()) <= set(range(2, 17))


@pytest.mark.parametrize("seed", range(5))
def test_no_chain_restarts_at_one_that_stands_still_or_is_lost(seed, generator):
    density = two_modes(-40.0, 1.0)
    mode = torch.tensor([0] * 12 + [1] * 8)
    draws = density.draws(mode, 50)
    draws[:, :5] = draws[0, :5] + 1000
    draws[45:, 5] = torch.nan
    generator.manual_seed(seed)
    chains = sources_of(masses_of(density, draws), density, generator)
    assert (chains[:12] == torch.arange(12)).all()
    assert set(chains[12:].tolist()) <= set(range(6, 12))


@pytest.mark.stochastic
@pytest.mark.parametrize("dim", [1, 30, 50, 64, 65, 100])
def test_few_draws_of_many_coordinates_are_enough(dim, generator):
    """Of independent ones, whose sample covariance may be all but singular. The bound
    of 100 coordinates is loose by 6 nats, and its noise has a deviation of 2.
    """
    density = two_modes(-30.0 if dim == 100 else -20.0, 1.0, dim=dim)
    mode = torch.tensor([0] * 28 + [1] * 4)
    found = negligible(density, density.draws(mode, 50), generator)
    assert found == [False] * 28 + [True] * 4


@pytest.mark.stochastic
def test_chains_on_their_way_are_judged_by_their_last_energies(generator):
    """Those that arrive in a mode of mass 1 stay, those that arrive in another don't;
    where they were in the first 50 iterations doesn't count.
    """
    density = two_modes(-40.0, 1.0)
    mode = torch.tensor([0] * 16 + [1] * 4)
    draws = density.draws(mode, 100)
    draws[:50] += 1e4
    draws[50:70, 12:16] += torch.linspace(20, 0, 20).double()[:, None, None]
    masses = ModeMasses()
    for iteration, z in enumerate(draws):
        energy = density.energy_and_gradient(z)[0]
        masses = masses.update(iteration, z, energy)
    assert masses.recent.count == 50
    chains = sources_of(masses, density, generator)
    assert (chains != torch.arange(20)).tolist() == [False] * 16 + [True] * 4


@pytest.mark.stochastic
def test_the_level_is_a_mean_over_about_twenty_draws(generator):
    energies = torch.randn(200, 1000, generator=generator, dtype=torch.float64)
    masses = ModeMasses()
    for iteration, energy in enumerate(energies):
        masses = masses.update(50 + iteration, energy[:, None], energy)
    # 0.1 / 1.9 is the variance of the fading mean; 5 errors of a variance of 1,000
    assert float(masses.level.var()) == pytest.approx(0.1 / 1.9, rel=5 * 0.045)


def test_of_more_than_64_chains_those_beyond_restart_at_the_first_ones(generator):
    density = two_modes(-40.0, 1.0)
    mode = torch.tensor(([0] * 9 + [1]) * 10)
    draws = density.draws(mode, 50)
    chains = sources_of(masses_of(density, draws), density, generator)
    assert (chains != torch.arange(100)).tolist() == (mode == 1).tolist()
    assert (chains[mode == 1] < 64).all()


# moves --------------------------------------------------------------------------------


def tensors_of(value, name=""):
    """Every tensor within dataclasses and tuples, by its name."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name), f"{name}.{field.name}")
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from tensors_of(part, f"{name}.{key}")
    elif isinstance(value, tuple):
        for number, part in enumerate(value):
            yield from tensors_of(part, f"{name}.{number}")


@pytest.mark.parametrize("kind", [HMC, NUTS, AdaptiveHMC, MCLMC])
@pytest.mark.parametrize("full_mass", [False, True])
def test_a_chain_that_moves_takes_all_that_is_its_own(kind, full_mass, generator):
    """17 is the number of chains, and of nothing else."""
    density = GaussianPotential(torch.ones(3, dtype=torch.float64), rotated=False)
    kernel = kind(None, full_mass=full_mass)
    state = kernel.init(density, density.sample(17), 200, generator)
    for iteration in range(110):
        state = kernel.adapt(density, kernel.step(density, state), iteration, 200)
    assert state.tuning.estimate.window.count == 10
    chains = torch.arange(17)
    chains[5] = 11
    moved = dict(tensors_of(state.of_chains(chains)))
    checked = 0
    for name, value in tensors_of(state):
        of_chains = value.dim() > 0 and len(value) == 17
        expected = value[chains] if of_chains else value
        assert torch.equal(moved[name], expected), name
        checked += of_chains
    assert checked >= 12


# runs ---------------------------------------------------------------------------------


def start_near(monkeypatch, count: int, dim: int = 2) -> None:
    """Make the default starts lie in the modes by turns."""
    torch.manual_seed(0)
    place = near_modes(count, dim)["w"]
    monkeypatch.setattr(
        "pyro_symmetric.mcmc.run.starting_points",
        lambda density, chains, initial, generator: (
            place[:chains] if initial is None else initial["w"]
        ),
    )


@pytest.mark.parametrize("kind", [HMC, NUTS, AdaptiveHMC, MCLMC])
def test_no_draws_come_from_a_negligible_mode(kind, monkeypatch):
    start_near(monkeypatch, 2)
    model = modes(0.0, -40.0)
    posterior = sample(kind(model), seed=0, num_warmup=150, **RUN)
    assert (posterior.samples["w"] < FAR / 2).all()
    assert posterior.metadata["restarts"] == 16


@pytest.mark.parametrize(
    "form",
    [
        {"log_masses": (0.0, -3.0)},
        {"log_masses": (0.0, 0.0), "scales": (1.0, 0.05)},
        {"log_masses": (0.0, 0.0), "correlation": 0.99, "dim": 10},
    ],
)
def test_modes_that_matter_keep_their_chains(form, monkeypatch):
    start_near(monkeypatch, 2, form.get("dim", 2))
    log_masses = form.pop("log_masses")
    kernel = HMC(modes(*log_masses, **form))
    posterior = sample(kernel, seed=0, num_warmup=210, **RUN)
    far = (posterior.samples["w"] > FAR / 2).all(2).all(1)
    assert int(far.sum()) == 16
    assert "restarts" not in posterior.metadata


def test_warm_up_goes_on_while_chains_may_be_on_their_way(monkeypatch):
    """In a mode of exp(-5) of the mass, which isn't negligible: they never arrive, and
    warm-up takes all iterations. One chain of 32 is too few to show by energies.
    """
    place = near_modes(1)["w"]
    place[7] += FAR
    monkeypatch.setattr(
        "pyro_symmetric.mcmc.run.starting_points", lambda *arguments: place
    )
    for log_mass, length in ((-5.0, 1700), (-1.0, 150)):
        posterior = sample(HMC(modes(0.0, log_mass)), seed=0, **RUN)
        assert posterior.metadata["num_warmup"] == length
        assert "restarts" not in posterior.metadata


@pytest.mark.parametrize("reason", ["placed", "few", "short"])
def test_chains_stay_where_users_put_them_and_where_few_are(reason, monkeypatch):
    start_near(monkeypatch, 2)
    chains = 15 if reason == "few" else 32
    initial = near_modes(2) if reason == "placed" else None
    warmup = 90 if reason == "short" else 150
    call = {**RUN, "num_chains": chains, "num_warmup": warmup, "initial": initial}
    posterior = sample(HMC(modes(0.0, -40.0)), seed=0, **call)
    far = (posterior.samples["w"] > FAR / 2).all(2).all(1)
    assert int(far.sum()) == chains // 2
    assert "restarts" not in posterior.metadata


def test_chains_of_networks_stay_where_they_are():
    x = torch.linspace(-1, 1, 10)[:, None]
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    model = ps.BayesianModel(net, likelihood="gaussian", num_data=10)
    for target, expected in ((model, False), (modes(0.0), True)):
        args = (x, x) if target is model else ()
        settings = ps.mcmc.settings.Settings(HMC(target), args, num_chains=32)
        density = settings.build_density()
        z = torch.zeros(32, density.dim)
        state = settings.kernel.init(density, z, 100, torch.Generator())
        assert settings.may_restart(density, state) == expected


def test_chains_stay_where_a_tuning_of_the_users_may_hold_more_of_them(monkeypatch):
    @dataclasses.dataclass(frozen=True, eq=False)
    class Tuning(HamiltonianTuning):
        memory: torch.Tensor

    class Remembering(HMC):
        def init(self, density, z, num_warmup, generator):
            state = super().init(density, z, num_warmup, generator)
            tuning = Tuning(**vars(state.tuning), memory=z)
            return dataclasses.replace(state, tuning=tuning)

    start_near(monkeypatch, 2)
    kernel = Remembering(modes(0.0, -40.0))
    posterior = sample(kernel, seed=0, num_warmup=150, **RUN)
    assert "restarts" not in posterior.metadata


def test_restarts_of_tasks_are_summed_and_told(monkeypatch):
    start_near(monkeypatch, 2)
    kernel = HMC(modes(0.0, -40.0))
    call = {**RUN, "num_warmup": 150, "chains_per_task": 16}
    posterior = sample(kernel, seed=0, **call)
    assert posterior.metadata["restarts"] == 16
    assert "restarts: 16 from modes of negligible mass" in repr(posterior)
    assert not list(starts(posterior.metadata, 32))
    (check,) = starts({"restarts": 17}, 32)
    assert check.status == "warn"


@pytest.mark.parametrize("kind", [AdaptiveHMC, HMC])
def test_a_warm_up_with_restarts_is_draw_for_draw_the_one_of_its_length(
    kind, monkeypatch, tmp_path, break_after
):
    """Broken and resumed, too, before and after the moves."""
    start_near(monkeypatch, 2)
    kernel = kind(modes(0.0, -40.0))
    whole = sample(kernel, seed=0, **RUN)
    assert whole.metadata["restarts"] == 16
    # histories move with the chains, so that moves at 100 don't lengthen it
    length = whole.metadata["num_warmup"]
    assert length == 150
    assert_same_draws(sample(kernel, seed=0, num_warmup=length, **RUN), whole)
    for steps in (60, 40, 1, 2, 48, 100):
        break_after(steps)
        try:
            resumed = sample(kernel, seed=0, store=tmp_path / "s", **RUN)
        except Killed:
            continue
        break
    assert_same_draws(resumed, whole)
    assert resumed.metadata["restarts"] == 16


@pytest.mark.stochastic
def test_draws_of_chains_that_moved_have_the_moments_of_the_mode(monkeypatch):
    """32 chains x 300 draws of a standard normal; half of the chains began elsewhere.
    Draws hardly correlate; with half as many effective ones the means and variances are
    within 5 standard errors with a chance of 1 - 3e-6.
    """
    start_near(monkeypatch, 2)
    seed = torch.initial_seed() % 1000
    call = {**RUN, "num_samples": 300, "num_warmup": 200}
    draws = sample(HMC(modes(0.0, -40.0)), seed=seed, **call).samples["w"]
    error = 1 / math.sqrt(32 * 300 / 2)
    assert draws.mean((0, 1)).abs().max() < 5 * error
    assert (draws.var((0, 1)) - 1).abs().max() < 5 * math.sqrt(2) * error


def test_chains_of_which_each_stands_still_in_a_coordinate_stay(generator):
    """In all of them, or in one that moves in others: no bounds are known."""
    density = two_modes(-20.0, 1.0)
    mode = torch.tensor([1] * 3 + [0] * 17)
    draws = density.draws(mode, 50)
    stuck = draws[:1].expand_as(draws)
    assert negligible(density, stuck, generator) == [False] * 20
    still_in_one = draws.clone()
    still_in_one[..., 0] = draws[0, :, 0]
    still_in_one[:, :10, 0] = draws[:, :10, 0]
    still_in_one[:, :10, 1] = draws[0, :10, 1]
    assert negligible(density, still_in_one, generator) == [False] * 20


def test_a_run_in_which_no_chain_ever_moves_ends():
    def model():
        pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))

    kernel = HMC(model, step_size=1e4, num_steps=3, adapt_step_size=False)
    with pytest.warns(RuntimeWarning):
        posterior = sample(
            kernel, num_chains=16, num_samples=4, engine="eager", progress=False
        )
    assert posterior.num_samples == 4
