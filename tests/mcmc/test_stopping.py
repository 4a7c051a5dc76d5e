"""Runs that end when there are enough draws."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from arviz_stats.base import array_stats
from torch import Tensor, nn

from pyro_symmetric.mcmc import HMC, SGHMC, sample
from pyro_symmetric.mcmc.settings import Ending, Settings
from pyro_symmetric.mcmc.stopping import (
    CHECKS,
    EFFECTIVE,
    MOST_DRAWS,
    MOST_ENTRIES,
    R_HAT,
    judge,
    precision,
)
from pyro_symmetric.mcmc.tasks import cut
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.posterior import FROM_ABOVE, Posterior
from pyro_symmetric.posterior.statistics import evenly_spaced

from .conftest import Killed, assert_same_draws

OPTIONS = {"progress": False, "engine": "eager", "num_warmup": 50}
SCALES = (0.5, 1.0, 2.0)


def gaussian():
    scale = torch.tensor(SCALES)
    pyro.sample("w", dist.Normal(torch.ones(3), scale).to_event(1))


def two_means(y: Tensor):
    with pyro.plate("components", 2):
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    components = dist.Normal(mean, 1.0)
    weights = dist.Categorical(torch.ones(2))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.MixtureSameFamily(weights, components), obs=y)


def two_modes():
    """Which no symmetry maps to one another."""
    modes = dist.Normal(torch.tensor([-3.0, 3.0]), torch.tensor([0.4, 0.5]))
    weights = dist.Categorical(torch.ones(2))
    pyro.sample("w", dist.MixtureSameFamily(weights, modes))


def ending_of(draws: Tensor) -> tuple[int, Ending]:
    """The number of draws after which a run of these chains ends."""
    ending = Ending(MOST_DRAWS, CHECKS)
    posterior = Posterior({"w": draws}, {"lp": draws[..., -1]}, kind="chains")
    for count in CHECKS:
        first = posterior.select(draws=slice(count))
        if ending.ends(count, lambda first=first: first):
            return count, ending
    raise AssertionError("the run doesn't end")


def autoregressive(chains: int, correlation: float, generator: object) -> Tensor:
    """Stationary chains of standard normal numbers, ``(chains, draws, 3)``."""
    shape = (MOST_DRAWS, chains, 3)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    values = [noise[0]]
    for new in noise[1:]:
        values.append(correlation * values[-1] + (1 - correlation**2) ** 0.5 * new)
    return torch.stack(values, 1)


@pytest.mark.stochastic
def test_a_gaussian_needs_few_draws_and_its_moments_are_right():
    """Six standard errors of a thousand effective draws: false alarms 1e-8."""
    posterior = sample(HMC(gaussian, num_steps=4), num_chains=16, **OPTIONS)
    assert posterior.num_samples in CHECKS[:5]
    assert not posterior.metadata["interrupted"]
    words = f"{posterior.num_samples} draws of each chain were enough: at least "
    assert posterior.metadata["ended"].startswith(words)
    assert f"ended: {words}" in repr(posterior)
    draws = posterior.samples["w"].flatten(0, 1)
    scales = torch.tensor(SCALES)
    assert ((draws.mean(0) - 1).abs() < 6 * scales / EFFECTIVE**0.5).all()
    assert ((draws.std(0) / scales - 1).abs() < 6 / (2 * EFFECTIVE) ** 0.5).all()


@pytest.mark.stochastic
@pytest.mark.parametrize(("chains", "correlation"), [(4, 0.0), (64, 0.0), (64, 0.5)])
def test_draws_that_are_enough_have_as_many_effective_ones(chains, correlation):
    """Chains of correlation r have (1 - r) / (1 + r) effective draws a draw. Of 150
    trials of 4 chains and 50 of 64 each ended early, with at least 1,348 of them."""
    generator = torch.Generator("cpu").manual_seed(int(torch.randint(2**31, ())))
    draws = autoregressive(chains, correlation, generator)
    count, ending = ending_of(draws)
    assert ending.finding.precision.suffices
    assert chains * count * (1 - correlation) / (1 + correlation) > EFFECTIVE
    assert count < MOST_DRAWS


def test_labels_that_switch_are_modulo_symmetry(monkeypatch):
    """Draws that were enough aren't aligned again for the warning, which would fail
    here.
    """
    monkeypatch.delattr(FROM_ABOVE, "chains_agree")
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    y = torch.randn(40, generator=generator) + torch.tensor([-3.0, 3.0]).repeat(20)
    starts = {"mean": torch.tensor([[-3.0, 3.0], [3.0, -3.0]]).repeat(4, 1)}
    options = {**OPTIONS, "num_chains": 8, "initial": starts, "seed": 0}
    posterior = sample(HMC(two_means, num_steps=3), y, **options)
    assert posterior.num_samples < MOST_DRAWS
    words = posterior.metadata["ended"]
    assert "were enough: modulo symmetry at least" in words
    assert "as drawn at most" in words
    assert posterior.metadata["agree_modulo_symmetry"]


@pytest.mark.filterwarnings("ignore:the chains disagree:RuntimeWarning")
def test_modes_that_no_symmetry_connects_are_never_enough():
    posterior = sample(HMC(two_modes, num_steps=2), num_chains=8, seed=0, **OPTIONS)
    assert posterior.num_samples == MOST_DRAWS
    assert posterior.metadata["ended"].startswith("1,000 draws of each chain were too")
    assert not posterior.metadata["interrupted"]


@pytest.mark.parametrize("chains", [2, 4, 64])
def test_chains_in_different_places_are_never_enough(chains):
    for seed in range(5):
        generator = torch.Generator("cpu").manual_seed(seed)
        draws = autoregressive(chains, 0.0, generator)
        draws[: chains // 2, :, 0] += 1.0
        count, ending = ending_of(draws)
        assert count == MOST_DRAWS
        assert not ending.finding.precision.suffices
        assert ending.finding.precision.r_hat > R_HAT


def test_the_precision_is_that_of_entries_that_move_and_no_more_than_the_draws():
    generator = torch.Generator("cpu").manual_seed(0)
    draws = autoregressive(4, -0.9, generator)
    assert precision([draws[:, :200]]).effective <= 800
    with_zeros = torch.cat([draws, torch.zeros_like(draws)], -1)
    assert precision([with_zeros]) == precision([draws])
    assert not precision([torch.zeros_like(draws)]).suffices
    assert not precision([draws.index_fill(1, torch.tensor([5]), torch.nan)]).suffices
    stuck = torch.arange(4.0)[:, None, None].expand(4, 100, 1)
    assert not precision([stuck]).suffices


def test_the_precision_is_that_of_the_tails_where_they_mix_worse_than_the_bulk():
    """Signs are independent, magnitudes are not. By ArviZ."""
    generator = torch.Generator("cpu").manual_seed(0)
    slow = autoregressive(4, 0.98, generator)[..., :1]
    signs = torch.randn(slow.shape, generator=generator, device="cpu").sign()
    draws = signs * slow.exp()
    series = draws[..., 0].numpy()
    bulk = array_stats.ess(series, method="bulk")
    tail = array_stats.ess(series, method="tail", prob=(0.05, 0.95))
    assert bulk > 5 * tail
    assert precision([draws]).effective == pytest.approx(float(tail), rel=1e-6)


@pytest.mark.parametrize("broken_at", [51 + 100, 51 + 120])
def test_a_broken_run_that_resumes_ends_where_an_unbroken_one_does(tmp_path, broken_at):
    def break_off(number, weights):
        if number == broken_at:
            raise Killed

    options = {**OPTIONS, "num_chains": 16, "seed": 3}
    expected = sample(HMC(gaussian, num_steps=4), **options)
    assert 100 < expected.num_samples < MOST_DRAWS
    options["store"] = tmp_path / "s"
    with pytest.raises(Killed):
        sample(HMC(gaussian, num_steps=4), hook=break_off, **options)
    for _ in range(2):
        found = sample(HMC(gaussian, num_steps=4), **options)
        assert_same_draws(found, expected)
        assert found.metadata["ended"] == expected.metadata["ended"]
    assert Posterior.load(tmp_path / "s").metadata["ended"] == found.metadata["ended"]
    longer = sample(
        HMC(gaussian, num_steps=4), num_samples=expected.num_samples + 5, **options
    )
    assert longer.num_samples == expected.num_samples + 5
    assert "ended" not in longer.metadata


def test_thinned_draws_are_counted_as_they_are_kept():
    options = {**OPTIONS, "num_chains": 16, "seed": 3, "thinning": 2}
    posterior = sample(HMC(gaussian, num_steps=4), **options)
    assert posterior.num_samples in CHECKS[:-1]
    assert_same_draws(
        posterior,
        sample(
            HMC(gaussian, num_steps=4), num_samples=posterior.num_samples, **options
        ),
    )


def test_networks_stochastic_gradients_and_tasks_take_the_most_draws():
    x, y = torch.randn(5, 2), torch.randn(5)
    network = BayesianModel(nn.Linear(2, 1), likelihood="gaussian")
    for kernel in (HMC(network), SGHMC(network, batch_size=2)):
        settings = Settings(kernel, (x, y), engine="eager")
        ending = settings.ending(settings.build_density())
        assert (ending.most, ending.checks) == (MOST_DRAWS, ())
    settings = Settings(HMC(gaussian), num_chains=8)
    assert [task.num_samples for task in cut(settings, 4, 0)] == [MOST_DRAWS] * 2


@pytest.mark.parametrize("entries", [slice(0, 1), slice(None)])
def test_a_chain_that_never_moves_is_never_enough(entries):
    draws = torch.randn(64, MOST_DRAWS, 3, generator=torch.Generator().manual_seed(0))
    assert precision([draws]).suffices
    draws[5, :, entries] = 0.3
    assert not precision([draws]).suffices
    fixed = draws.clone()
    fixed[..., 1] = 0.5  # in all chains: an entry that can't move
    fixed[5] = fixed[4]
    assert precision([fixed[:5]]).suffices


@pytest.mark.parametrize("large", [True, False])
def test_an_entry_that_no_check_of_the_run_saw_may_disagree(large, monkeypatch):
    """Of 300 entries of a large site 128 are seen while a run goes on; another one
    moves apart. So the chains aren't known to agree modulo symmetry, and the warning
    looks at all. Without the site they are."""
    generator = torch.Generator("cpu").manual_seed(0)
    draws = torch.randn(16, 200, 300, generator=generator, device="cpu")
    label = torch.randn(16, 200, 1, generator=generator, device="cpu")
    energy = torch.randn(16, 200, generator=generator, device="cpu")
    in_copies = label + 10 * (torch.arange(16, device="cpu") < 8)[:, None, None]
    unseen = min({*range(300)} - {*evenly_spaced(300, MOST_ENTRIES).tolist()})
    draws[:8, :, unseen] += 5.0
    sites = {"x": draws} if large else {}
    monkeypatch.setattr(
        FROM_ABOVE, "modulo_symmetry", lambda _: {**sites, "label": label}
    )
    drawn = {**sites, "label": in_copies}
    found = judge(Posterior(drawn, statistics={"lp": energy}, kind="chains"))
    assert found.precision.suffices
    assert found.agree_modulo_symmetry != large
