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
from pyro_symmetric.mcmc.kernels.settling import ModeMasses

from .conftest import GaussianPotential, Killed, assert_same_draws

RUN = {"num_samples": 20, "num_chains": 32, "engine": "eager", "progress": False}
FAR = 60.0


def modes(*log_masses: float, scales: tuple[float, ...] | None = None):
    """A model of Gaussian modes in two coordinates, ``FAR`` apart."""
    count = len(log_masses)
    places = FAR * torch.arange(float(count))
    spread = torch.ones(count) if scales is None else torch.tensor(scales)

    def model():
        components = dist.Normal(
            places[:, None].expand(count, 2), spread[:, None].expand(count, 2)
        ).to_event(1)
        mixture = dist.Categorical(logits=torch.tensor(log_masses))
        pyro.sample("w", dist.MixtureSameFamily(mixture, components))

    return model


def near_modes(count: int):
    """Starts of 32 chains, in the modes by turns."""
    return {"w": FAR * (torch.arange(32) % count)[:, None] + torch.randn(32, 2)}


def masses_of(energies, draws) -> ModeMasses:
    """The estimate of draws ``(S, C, D)`` with energies ``(S, C)``."""
    masses = ModeMasses()
    for iteration, (energy, z) in enumerate(zip(energies, draws, strict=True)):
        masses = masses.update(50 + iteration, z, energy)
    return masses


# which modes are negligible -----------------------------------------------------------


@pytest.mark.parametrize(
    ("log_mass", "scale", "negligible"),
    [
        (-20.0, 1.0, True),
        (-20.0, 0.01, False),  # it might be wide, and its chains stand still
        (-40.0, 0.01, True),
        (-20.0, 100.0, True),
        (-2.0, 1.0, False),
        (0.0, 0.01, False),
        (0.0, 100.0, False),
        (5.0, 1.0, False),
    ],
)
def test_a_mode_is_judged_by_its_mass_not_by_its_height(log_mass, scale, negligible):
    """Of 20 chains 3 are in the mode; the others are in one of mass 1 and scale 1."""
    torch.manual_seed(0)
    noise = torch.randn(50, 20, 4, dtype=torch.float64)
    scales = torch.ones(20, 1).double()
    scales[:3] = scale
    log_masses = torch.zeros(20).double()
    log_masses[:3] = log_mass
    energies = 0.5 * noise.square().sum(-1) + 4 * scales[:, 0].log() - log_masses
    found = masses_of(energies, scales * noise).negligible()
    assert found.tolist() == [negligible] * 3 + [False] * 17


def test_the_margin_is_eight_nats_and_half_a_nat_a_coordinate():
    torch.manual_seed(0)
    noise = torch.randn(50, 1, 4, dtype=torch.float64).expand(50, 20, 4)
    energies = torch.zeros(50, 20).double()
    energies[:, 0] = 8 + 4 * 0.5 + 0.01
    energies[:, 1] = 8 + 4 * 0.5 - 0.01
    found = masses_of(energies, noise).negligible()
    assert found.nonzero().flatten().tolist() == [0]


def test_a_chain_that_stands_still_is_not_in_a_mode_of_no_mass():
    """And a coordinate that never changes has no say."""
    torch.manual_seed(0)
    draws = torch.randn(50, 20, 4, dtype=torch.float64)
    draws[..., 3] = 1.0
    energies = 0.5 * draws.square().sum(-1)
    draws[:, 0] = draws[0, 0]
    energies[:, 0] = energies[0, 0]
    assert not masses_of(energies, draws).negligible().any()


def test_one_deep_and_narrow_mode_does_not_make_all_others_negligible():
    torch.manual_seed(0)
    draws = torch.randn(50, 20, 4, dtype=torch.float64)
    energies = 0.5 * draws.square().sum(-1)
    energies[:, 0] -= 1000.0
    assert not masses_of(energies, draws).negligible().any()


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


def start_near(monkeypatch, count: int) -> None:
    """Make the default starts lie in the modes by turns."""
    torch.manual_seed(0)
    place = near_modes(count)["w"]
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
    assert posterior.metadata["restarted"] == 16


@pytest.mark.parametrize(
    ("log_masses", "scales"), [((0.0, -3.0), None), ((0.0, 0.0), (1.0, 0.05))]
)
def test_modes_that_matter_keep_their_chains(log_masses, scales, monkeypatch):
    start_near(monkeypatch, 2)
    model = modes(*log_masses, scales=scales)
    posterior = sample(HMC(model), seed=0, num_warmup=150, **RUN)
    far = (posterior.samples["w"] > FAR / 2).all(2).all(1)
    assert int(far.sum()) == 16
    assert "restarted" not in posterior.metadata


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
    assert "restarted" not in posterior.metadata


def test_chains_of_networks_stay_where_they_are():
    x = torch.linspace(-1, 1, 10)[:, None]
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    model = ps.BayesianModel(net, likelihood="gaussian", num_data=10)
    settings = ps.mcmc.settings.Settings(HMC(model), (x, x), num_chains=32)
    assert not settings.may_restart(settings.build_density())


@pytest.mark.parametrize("kind", [AdaptiveHMC, HMC])
def test_a_warm_up_with_restarts_is_draw_for_draw_the_one_of_its_length(
    kind, monkeypatch, tmp_path, break_after
):
    """Broken and resumed, too, before and after the moves."""
    start_near(monkeypatch, 2)
    kernel = kind(modes(0.0, -40.0))
    whole = sample(kernel, seed=0, **RUN)
    assert whole.metadata["restarted"] == 16
    # histories move with the chains, so that moves don't lengthen it
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
    assert resumed.metadata["restarted"] == 16


@pytest.mark.stochastic
def test_draws_of_chains_that_moved_have_the_moments_of_the_mode(monkeypatch):
    """32 chains x 300 draws of a standard normal; half of the chains began elsewhere.
    Means of chains have a standard error of about 1 / sqrt(300) by draws that hardly
    correlate: that of all is within 5 errors with a chance of 1 - 6e-7.
    """
    start_near(monkeypatch, 2)
    seed = torch.initial_seed() % 1000
    call = {**RUN, "num_samples": 300, "num_warmup": 200}
    draws = sample(HMC(modes(0.0, -40.0)), seed=seed, **call).samples["w"]
    error = 1 / math.sqrt(32 * 300)
    assert draws.mean((0, 1)).abs().max() < 5 * 2 * error
    assert (draws.var((0, 1)) - 1).abs().max() < 5 * 2 * math.sqrt(2) * error
