"""The checks: sound draws pass, each fault is found and named."""

import json

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_symmetric.compare.diagnosis import diagnose
from pyro_symmetric.mcmc import NUTS, sample
from pyro_symmetric.mcmc.sampling import sampler_failures
from pyro_symmetric.posterior.posterior import Posterior

CHAINS, DRAWS, ROWS = 8, 250, 60


def conjugate(x, y):
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("data", ROWS, subsample=torch.arange(len(x))):
        pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(ROWS, 2)
    return x, x @ torch.tensor([1.0, -1.0]) + torch.randn(ROWS)


def exact_draws(x, y, spread: float = 1.0) -> torch.Tensor:
    """Draws of the conjugate posterior; ``spread`` multiplies their deviation."""
    covariance = torch.linalg.inv(x.T @ x + torch.eye(2))
    noise = torch.distributions.MultivariateNormal(torch.zeros(2), covariance).sample((CHAINS, DRAWS))
    return covariance @ x.T @ y + spread * noise


def sound(**statistics) -> Posterior:
    return Posterior({"w": torch.randn(CHAINS, DRAWS, 3)}, statistics, kind="chains")


def test_exact_draws_of_a_conjugate_model_pass(data):
    posterior = Posterior({"w": exact_draws(*data)}, kind="chains").attach(conjugate, *data)
    result = diagnose(posterior)
    assert [check.name for check in result.checks] == [
        *("finite", "moving", "weights", "effective draws", "temperature")
    ]
    assert result.ok, result
    assert diagnose(posterior).ok
    json.dumps(result.to_dict())


@pytest.mark.stochastic
@pytest.mark.parametrize(("spread", "expected"), [(1.5, 2.25), (0.6, 0.36)])
def test_the_temperature_is_that_of_the_draws(data, spread, expected):
    # z.grad U / D of Gaussian draws with variances c times too large averages to c + (the mean's part, 1 - 1 = 0):
    # E z.(z - m) P = c D, whatever the mean, since E (z - m) = 0.
    x, y = data
    posterior = Posterior({"w": exact_draws(x, y, spread)}, kind="chains").attach(conjugate, x, y)
    finding = diagnose(posterior, num_draws=2000)["temperature"]
    assert finding.value == pytest.approx(expected, abs=0.5)  # 2,000 draws: a standard error of about 0.1
    assert finding.status == "fail"
    assert ("too widely" if spread > 1 else "too little") in finding.words


def test_stuck_and_slow_chains_are_named():
    posterior = sound()
    posterior.samples["w"][3] = posterior.samples["w"][3, :1]
    assert diagnose(posterior)["moving"].status == "fail"
    assert "chain 3 hardly move" in diagnose(posterior)["moving"].words
    slow = sound()
    slow.samples["w"][[1, 5]] *= 0.05
    assert diagnose(slow)["moving"].status == "warn"
    assert "chains 1, 5 hardly move" in diagnose(slow)["moving"].words


def test_chains_far_apart_fail_and_the_site_is_named():
    posterior = Posterior({"a": torch.randn(CHAINS, DRAWS), "b": torch.randn(CHAINS, DRAWS, 2)}, kind="chains")
    posterior.samples["b"][..., 1] += 10 * torch.arange(CHAINS)[:, None]
    result = diagnose(posterior)
    assert result["weights"].status == "fail"
    assert "site 'b'" in result["weights"].words
    assert diagnose(posterior)["effective draws"].status == "fail"
    drifting = Posterior({"a": torch.randn(1, DRAWS) + torch.linspace(0, 20, DRAWS)}, kind="chains")
    result = diagnose(drifting)
    assert result["weights"].status == "fail"  # one chain, by its halves


def test_a_networks_weights_in_copies_are_a_warning_and_its_log_density_decides():
    weights = {"0.weight": torch.randn(CHAINS, DRAWS, 3) + 10 * torch.arange(CHAINS)[:, None, None]}
    result = diagnose(Posterior(weights, {"lp": torch.randn(CHAINS, DRAWS)}, kind="chains"))
    assert (result["log density"].status, result["weights"].status) == ("pass", "warn")
    assert "symmetry= tells" in result["weights"].words
    assert result["effective draws"].status == "pass"
    apart = torch.randn(CHAINS, DRAWS) + 3 * torch.arange(CHAINS)[:, None]
    assert diagnose(Posterior(weights, {"lp": apart}, kind="chains"))["log density"].status == "fail"


def two_sites(x, y):
    pyro.sample("narrow", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    pyro.sample("wide", dist.Normal(3.0, 5.0))


@pytest.mark.stochastic
def test_a_single_site_that_spreads_too_little_is_named_among_many_coordinates(data):
    # 256 draws: a standard error of 0.09 for one coordinate; 0.1 is ten of them away from 1.
    narrow, wide = torch.randn(CHAINS, DRAWS, 8), torch.randn(CHAINS, DRAWS)
    sound = Posterior({"narrow": narrow, "wide": 3 + 5 * wide}, kind="chains").attach(two_sites, *data)
    assert diagnose(sound)["temperature"].status == "pass"
    cold = Posterior({"narrow": narrow, "wide": 3 + 1.5 * wide}, kind="chains").attach(two_sites, *data)
    finding = diagnose(cold)["temperature"]
    assert finding.status == "fail"
    assert "'wide'" in finding.words
    assert finding.value == pytest.approx(0.09, abs=0.05)


def test_a_sampler_whose_chains_must_agree_tells_of_disagreement_and_heavy_tails():
    """R-hat of 64 converged entries of four chains of 100 draws is under 1.05 but once in 10,000 times."""
    diverging, agree = torch.zeros(4, 100, dtype=torch.bool), {"w": torch.randn(4, 100, 64)}
    fine = {"diverging": diverging, "energy": torch.randn(4, 100)}
    assert sampler_failures(fine, False, agree) == []
    slow = {**fine, "energy": torch.randn(4, 100).cumsum(1)}
    apart = {"w": agree["w"] + 2 * torch.arange(4)[:, None, None]}
    found = [sampler_failures(*case) for case in ((slow, False, agree), (fine, False, apart))]
    assert [[finding.name for finding in own] for own in found] == [["energy"], ["weights"]]
    assert "relabelled" in found[1][0].words
    assert sampler_failures(fine, False) == []  # of a network, whose chains may sit in copies of one mode


@pytest.mark.parametrize(
    ("statistics", "name", "status"),
    [
        ({"acceptance_rate": torch.full((CHAINS, DRAWS), 0.8)}, "acceptance", "pass"),
        ({"acceptance_rate": torch.full((CHAINS, DRAWS), 0.3)}, "acceptance", "warn"),
        ({"acceptance_rate": torch.full((CHAINS, DRAWS), 0.01)}, "acceptance", "fail"),
        ({"diverging": torch.zeros(CHAINS, DRAWS, dtype=torch.bool)}, "divergences", "pass"),
        ({"diverging": torch.arange(CHAINS * DRAWS).reshape(CHAINS, DRAWS) % 1000 == 0}, "divergences", "warn"),
        ({"diverging": torch.arange(CHAINS * DRAWS).reshape(CHAINS, DRAWS) % 50 == 0}, "divergences", "fail"),
        ({"reached_max_treedepth": torch.ones(CHAINS, DRAWS, dtype=torch.bool)}, "tree depth", "warn"),
        ({"energy": torch.arange(DRAWS).expand(CHAINS, DRAWS).float()}, "energy", "fail"),
    ],
)
def test_the_samplers_own_numbers_are_read(statistics, name, status):
    assert diagnose(sound(**statistics))[name].status == status


@pytest.mark.stochastic
@pytest.mark.parametrize("name", ["kinetic_temperature", "virial"])
def test_temperatures_are_compared_with_one_within_their_error(name):
    title = name.replace("_", " ")
    # Means of 2,000 numbers of deviation 0.5: a standard error of 0.011.
    assert diagnose(sound(**{name: 1 + 0.5 * torch.randn(CHAINS, DRAWS)}))[title].status == "pass"
    assert diagnose(sound(**{name: 1.2 + 0.5 * torch.randn(CHAINS, DRAWS)}))[title].status == "warn"
    assert diagnose(sound(**{name: 1.5 + 0.5 * torch.randn(CHAINS, DRAWS)}))[title].status == "fail"
    assert diagnose(sound(**{name: 1 + 50 * torch.randn(CHAINS, DRAWS)}))[title].status == "unknown"
    lost = 1 + 0.1 * torch.randn(CHAINS, DRAWS)
    lost[2, 5] = torch.nan
    assert diagnose(sound(**{name: lost}))[title].status == "pass"


def two_heights(where):
    pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def test_chains_that_started_at_one_point_are_told_of(tmp_path):
    options = {"num_samples": 60, "num_warmup": 20, "progress": False, "seed": 0}
    together = sample(NUTS(two_heights), None, initial={"z": torch.zeros(2)}, store=tmp_path / "run", **options)
    assert diagnose(together)["starts"].status == "warn"
    assert diagnose(Posterior.load(tmp_path / "run"))["starts"].status == "warn"
    apart = sample(NUTS(two_heights), None, **options)
    assert "starts" not in diagnose(apart)
