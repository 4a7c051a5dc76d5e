"""Warm-up that goes on until every chain has settled."""

import json
import warnings
from dataclasses import dataclass

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy import stats

from pyro_symmetric.compare import diagnose
from pyro_symmetric.mcmc import HMC, NUTS, AdaptiveHMC, sample
from pyro_symmetric.mcmc.kernels.adaptation import HamiltonianKernel, windows
from pyro_symmetric.mcmc.kernels.settling import LIMIT, Agreement

from .conftest import Killed, assert_same_draws

RUN = {"num_samples": 20, "num_chains": 4, "engine": "eager", "progress": False}
LENGTHS = HamiltonianKernel.warmups


def normal():
    pyro.sample(
        "w", dist.Normal(torch.zeros(3), torch.tensor([0.3, 1.0, 3.0])).to_event(1)
    )


def two_modes():
    """No copies of each other: one is narrower, and its energies are lower."""
    mixture, scales = dist.Categorical(torch.ones(2)), torch.tensor([1.0, 0.01])
    pyro.sample(
        "w",
        dist.MixtureSameFamily(
            mixture, dist.Normal(torch.tensor([-30.0, 30.0]), scales)
        ),
    )


def recorded(draws: torch.Tensor) -> Agreement:
    """The record that is kept of draws ``(C, S, D)``."""
    found = Agreement()
    z = draws.transpose(0, 1)
    for iteration, places in enumerate(z):
        found = found.update(iteration, places, places.square().sum(-1))
    return found


def r_hat(draws: np.ndarray) -> float:
    """Rank-normalised split R-hat of draws ``(C, S)``, by the formulas of Vehtari et
    al. 2021, section 4.
    """
    found = []
    for values in (draws, np.abs(draws - np.median(draws))):
        halves = np.concatenate(
            [values[:, : values.shape[1] // 2], values[:, -(values.shape[1] // 2) :]]
        )
        ranks = stats.rankdata(halves).reshape(halves.shape)
        scores = stats.norm.ppf((ranks - 0.375) / (ranks.size + 0.25))
        within, between = scores.var(1, ddof=1).mean(), scores.mean(1).var(ddof=1)
        found.append(
            np.sqrt((halves.shape[1] - 1) / halves.shape[1] + between / within)
        )
    return max(found)


# the criterion ------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("when", [76, 114])
def test_r_hat_is_the_largest_over_the_second_half_in_each_chains_own_units(
    shift, when
):
    draws = torch.randn(
        4,
        152,
        3,
        generator=torch.Generator(torch.empty(0).device).manual_seed(0),
        dtype=torch.float64,
    )
    draws[0, when:, 1] += shift
    draws[:, :76] += 100 * torch.arange(4.0)[:, None, None]  # long forgotten
    half = draws[:, 76:]
    energies = half.square().sum(-1).numpy()
    places = ((half - half.mean(1, keepdim=True)) / half.std(1, keepdim=True)).numpy()
    own = max(r_hat(places[..., k]) for k in range(3))
    expected = max(np.sqrt(1 + 2 * max(own**2 - 1, 0)), r_hat(energies))
    # the middle two tie, but for rounding
    assert recorded(draws).r_hat() == pytest.approx(expected, rel=1e-3)


def test_chains_at_several_places_have_settled_and_chains_on_their_way_have_not():
    torch.manual_seed(0)
    draws = torch.randn(4, 300, 3)
    far = draws + 100 * torch.arange(4.0)[:, None, None]
    noise = torch.randn(4, 300)

    def found(places: torch.Tensor, *told: torch.Tensor) -> float:
        kept = Agreement()
        for iteration in range(300):
            kept = kept.update(
                iteration,
                places[:, iteration],
                *(value[:, iteration] for value in told or (noise,)),
            )
        return kept.r_hat()

    assert found(far) < LIMIT
    # nor need they spread alike
    assert found(far * torch.tensor([1.0, 0.1, 1.0, 10.0])[:, None, None]) < LIMIT
    assert found(far + 0.02 * torch.arange(300.0)[:, None]) > LIMIT
    assert found(far, noise, torch.rand(4, 300)) < LIMIT
    assert (
        found(far, noise, torch.rand(4, 300) + 0.5 * torch.arange(4.0)[:, None]) > LIMIT
    )
    many, energies = torch.randn(32, 300, 3), torch.randn(32, 300)
    energies[:1] += 50.0  # in a lower mode
    assert found(many, energies) < LIMIT
    energies[1] += 50.0
    assert found(many, energies) > LIMIT


def test_chains_that_stand_still_or_are_no_numbers_never_agree():
    still = torch.arange(4.0)[:, None, None].expand(4, 100, 1)
    assert recorded(still).r_hat() >= 900
    assert recorded(torch.ones(4, 100, 1)).r_hat() >= 900
    assert recorded(torch.full((4, 100, 1), torch.nan)).r_hat() >= 900


def test_what_is_kept_stays_bounded_and_a_coordinate_that_differs_is_seen():
    wide = torch.randn(
        200, 300, 20, generator=torch.Generator(torch.empty(0).device).manual_seed(0)
    )
    kept = recorded(wide)
    assert torch.stack(kept.kept).shape[1] == 64  # chains
    assert kept.r_hat() < LIMIT
    wide[:50, 225:, 19] += 2.0  # on its way
    assert recorded(wide).r_hat() > 1.1


@pytest.mark.parametrize("chains", [1, 64])
def test_every_window_is_one_of_the_longest_warm_up(chains):
    """So that a warm-up which ends early has done what it would have done if it had
    been asked for.
    """
    longest = windows(LENGTHS[-1], chains)
    for length in LENGTHS:
        begin, ends, early = windows(length, chains)
        assert (begin, early) == (longest.begin, longest.early)
        assert ends == tuple(end for end in longest.ends if end < length)


# runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel",
    [
        HMC(normal, num_steps=4),
        NUTS(normal, max_tree_depth=2),
        AdaptiveHMC(normal, max_steps=8),
    ],
)
def test_a_warm_up_that_ends_itself_is_draw_for_draw_the_one_of_its_length(kernel):
    found = sample(kernel, seed=0, **RUN)
    assert found.metadata["num_warmup"] in LENGTHS[:-1]
    assert found.metadata["warmup_r_hat"] < LIMIT
    asked = sample(kernel, seed=0, num_warmup=found.metadata["num_warmup"], **RUN)
    assert asked.metadata["warmup_r_hat"] is None
    assert_same_draws(found, asked)
    json.dumps(found.metadata, allow_nan=False)


@dataclass(frozen=True, eq=False, repr=False)
class Brief(HMC):
    """HMC whose warm-up has short lengths."""

    warmups = (24, 32, 40)


def test_chains_whose_energies_differ_end_at_the_cap_and_say_so():
    kernel, start = (
        Brief(two_modes, max_steps=16),
        {"w": torch.tensor([-30.0, 30.0, 30.0, -30.0])},
    )
    with pytest.warns(
        RuntimeWarning,
        match=r"the chains didn't agree when warm-up ended: .* 40 iterations",
    ):
        found = sample(kernel, initial=start, seed=0, **RUN)
    assert found.metadata["num_warmup"] == 40
    assert found.metadata["warmup_r_hat"] > 1.5
    assert diagnose(found)["weights"].status == "fail"
    with pytest.warns(RuntimeWarning, match="didn't agree"):
        assert (
            sample(kernel, initial=start, seed=0, chains_per_task=2, **RUN).num_chains
            == 4
        )


@pytest.mark.slow
@pytest.mark.parametrize(("count", "most"), [(2, 300), (5, 300)])
def test_the_warm_up_of_a_label_switched_mixture_ends_when_chains_have_settled(
    count, most
):
    torch.manual_seed(0)
    y = torch.cat([0.7 * torch.randn(40) + 4 * k for k in range(count)])

    def mixture(y):
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(count)))
        means = pyro.sample("means", dist.Normal(0.0, 5.0).expand([count]).to_event(1))
        scale = pyro.sample("scale", dist.HalfNormal(2.0))
        with pyro.plate("rows", len(y)):
            pyro.sample(
                "y",
                dist.MixtureSameFamily(
                    dist.Categorical(weights), dist.Normal(means, scale)
                ),
                obs=y,
            )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # positions differ
        found = sample(
            mixture, y, num_samples=1, seed=0, engine="eager", progress=False
        )
    assert found.metadata["num_warmup"] <= most


@pytest.mark.parametrize("ends", [24, 32, 40])
def test_a_warm_up_that_is_broken_ends_where_the_unbroken_one_does(
    ends, tmp_path, monkeypatch, break_after
):
    """Broken before, at and after every length at which the chains are asked."""
    answers = {24: [1.0], 32: [2.0, 1.0], 40: [2.0, 2.0, 1.0]}[ends]
    monkeypatch.setattr(
        Agreement, "r_hat", lambda self: answers[[24, 32, 40].index(len(self.kept))]
    )
    whole = sample(Brief(normal, num_steps=2), seed=1, **RUN)
    assert whole.metadata["num_warmup"] == ends
    for steps in (11, 14, 1, 2, 7, 2, 5, 4, 100):
        break_after(steps)
        try:
            found = sample(
                Brief(normal, num_steps=2), seed=1, store=tmp_path / "s", **RUN
            )
        except Killed:
            continue
        break
    assert_same_draws(found, whole)
    assert {**found.metadata, "seconds": 0} == {**whole.metadata, "seconds": 0}
    more = sample(
        Brief(normal, num_steps=2),
        seed=1,
        store=tmp_path / "s",
        **{**RUN, "num_samples": 30},
    )
    assert_same_draws(more.select(draws=slice(20)), whole)
    assert more.metadata["num_warmup"] == ends
    with pytest.raises(ValueError, match=f"num_warmup: 'auto' there, {ends} here"):
        sample(
            Brief(normal, num_steps=2),
            seed=1,
            store=tmp_path / "s",
            num_warmup=ends,
            **RUN,
        )
