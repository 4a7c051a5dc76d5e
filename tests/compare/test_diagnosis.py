"""The diagnosis: sound draws pass, each fault is found and named, and the verdict says
what it comes to.

Where chains agree, their draws are independent and of one law: R-hat of 1,000 is near
1.01 in the worst entry, and over 1.05 with probability below 10^-10. What may fail is
that random copies of four chains are all one: with probability (1/48)^3, or (1/120)^3
for five units, so that a test fails for fewer than 1 of 10^4 seeds.
"""

import json
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from pyro_symmetric import Group, find_symmetry
from pyro_symmetric.compare.diagnosis import diagnose
from pyro_symmetric.compare.distances import mmd_test
from pyro_symmetric.mcmc import NUTS, sample
from pyro_symmetric.models import BayesianModel, GaussianLikelihood
from pyro_symmetric.posterior.diagnostics import sampler_failures
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import chain_statistics

CHAINS, DRAWS = 4, 500


@pytest.fixture
def model() -> BayesianModel:
    return BayesianModel(
        nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)),
        likelihood=GaussianLikelihood(0.1),
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 7)[:, None]


@pytest.fixture
def symmetry(model, x):
    return find_symmetry(model.net, x)


def one_mode() -> dict[str, torch.Tensor]:
    """Independent draws around one network, whose units can't be mistaken for each
    other.
    """
    centre = {
        "0.weight": torch.tensor([[1.0], [2.0], [3.0]]),
        "0.bias": torch.tensor([0.5, -0.5, 0.2]),
        "2.weight": torch.tensor([[1.0, -2.0, 0.7]]),
        "2.bias": torch.tensor([0.3]),
    }
    return {
        site: value + 0.05 * torch.randn(CHAINS, DRAWS, *value.shape)
        for site, value in centre.items()
    }


def in_copies(weights, symmetry):
    """Each chain moved by an element of its own."""
    moved = dict(weights)
    for chain in range(CHAINS):
        order = torch.randperm(3)
        signs = torch.tensor([1.0, -1.0])[torch.randint(2, (3,))]
        for site, dim in (("0.weight", 1), ("0.bias", 1), ("2.weight", 2)):
            shape = [-1 if k == dim else 1 for k in range(moved[site][chain].dim())]
            moved[site] = moved[site].clone()
            moved[site][chain] = moved[site][chain].index_select(
                dim, order
            ) * signs.reshape(shape)
    return moved


@pytest.mark.stochastic
def test_chains_in_copies_of_a_mode_agree_on_the_function_and_in_every_common_frame(
    model, x, symmetry
):
    weights = in_copies(one_mode(), symmetry)
    result = diagnose(Posterior(weights, kind="chains"), symmetry, model=model, x=x)
    found = {name: result[name].status for name in result.statistics}
    assert found == {
        "weights": "warn",
        "modulo symmetry": "pass",
        "predictions": "pass",
    }
    assert result.ok
    assert result["weights"].value > 1.5
    assert "copies of a mode" in result["weights"].words


@pytest.mark.stochastic
def test_chains_in_modes_that_predict_differently_are_told_apart_from_copies(
    model, x, symmetry
):
    weights = one_mode()
    weights["2.bias"] = (
        weights["2.bias"] + torch.tensor([0.0, 0.0, 5.0, 0.0])[:, None, None]
    )
    result = diagnose(Posterior(weights, kind="chains"), symmetry, model=model, x=x)
    assert result["predictions"].status == "fail"
    assert result["modulo symmetry"].status == "warn"
    assert not result.ok


# exchangeable units about known centres -----------------------------------------------

UNITS = Group.declare({"w": ("unit", None)}, {"w": torch.Size([5, 3])})
KEYS = torch.arange(5.0)
CENTRES = {
    "separated": torch.stack([8 * KEYS + 8, -3 * KEYS, -KEYS], 1),
    # The canonical form sorts by the largest weight, which is alike for all; another
    # weight tells the units apart.
    "tied": torch.stack([torch.full((5,), 30.0), 6 * KEYS - 18, -KEYS], 1),
    # no frame tells the units for sure
    "overlapping": torch.stack([KEYS, -torch.ones(5), -torch.ones(5)], 1),
}


def planted(kind, shifts, switching="chain", draws=250):
    """Four chains of independent draws, whose unit 2 is shifted in a weight that isn't
    the key, in random copies.
    """
    weights = CENTRES[kind] + torch.randn(4, draws, 5, 3)
    weights[:, :, 2, 2] += shifts[:, None]
    copies = UNITS.sample((4, 1) if switching == "chain" else (4, draws))
    return Posterior(copies({"w": weights}), kind="chains")


@pytest.mark.stochastic
def test_chains_apart_are_not_called_copies_where_units_tie_in_the_key():
    # 1 to 3 deviations between halves of the chains have an R-hat of 1.13 or more in
    # the frame that tells units apart, far above 1.05; in canonical forms a fifth of
    # the shift is left.
    for shift in torch.linspace(1, 3, 3):
        result = diagnose(
            planted("tied", torch.tensor([0.0, 0.0, shift, shift])), UNITS
        )
        assert result["modulo symmetry"].status == "fail"


@pytest.mark.stochastic
@pytest.mark.parametrize("kind", CENTRES)
def test_copies_of_one_mode_agree_however_their_units_overlap(kind):
    # 2 runs each; the least effective sample size is near 800, of which 400 are enough.
    for _ in range(2):
        result = diagnose(planted(kind, torch.zeros(4)), UNITS)
        assert (result["weights"].status, result["modulo symmetry"].status) == (
            "warn",
            "pass",
        )
        assert (
            result["effective draws"].status == "pass"
        )  # of the 1,000 independent draws, as seen in the aligned frame


@pytest.mark.stochastic
def test_agreement_as_drawn_is_not_enough():
    # Chains that change copies with every draw have a law of weights that hides which
    # unit is shifted.
    posterior = planted("tied", torch.tensor([0.0, 0.0, 2.0, 2.0]), switching="draw")
    assert diagnose(posterior).ok
    assert [c.name for c in diagnose(posterior, UNITS).failed if c.status == "fail"][
        :1
    ] == ["modulo symmetry"]
    seen = {"predictions": torch.randn(4, 250)}
    assert diagnose(posterior, UNITS, **seen)["modulo symmetry"].status == "warn"


# draws that say nothing ---------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_draws_that_are_not_finite_are_named_and_never_agree(value):
    draws = torch.randn(CHAINS, DRAWS, 3)
    draws[2, 250:, :2] = value  # half of a chain, two of three weights
    result = diagnose(
        Posterior({"w": draws, "v": torch.randn(CHAINS, DRAWS)}, kind="chains")
    )
    assert [check.status for check in result.checks] == ["fail"]
    assert not result.ok
    assert "'w' is NaN or infinite in 250 draws (chain 2)" in repr(result)
    draws[:, :, 1] = value
    everywhere = diagnose(Posterior({"w": draws}, kind="chains"))
    assert "'w' is NaN or infinite in 2,000 draws (chains 0, 1, 2, 3)" in repr(
        everywhere
    )
    json.dumps(result.to_dict())


@pytest.mark.stochastic
def test_entries_that_never_change_are_left_out_and_told():
    triangle = torch.randn(CHAINS, DRAWS, 3, 3).tril()
    result = diagnose(Posterior({"L": triangle}, kind="chains"))
    assert result["weights"].status == "pass"
    assert result.ok
    stuck = triangle.clone()
    stuck[:, :, 0, 2] = torch.arange(float(CHAINS))[:, None]  # one value in each chain
    apart = diagnose(Posterior({"L": stuck}, kind="chains"))
    assert apart["weights"].status == "fail"


def test_numbers_are_those_of_the_predictions(model, x):
    posterior = Posterior(one_mode(), kind="chains").thin(10)
    result = diagnose(posterior, model=model, x=x)
    outputs = chain_statistics(model.outputs(posterior.samples, x))
    assert torch.allclose(
        result.statistics["predictions"]["predictions"].r_hat, outputs.r_hat
    )
    given = diagnose(posterior, predictions=model.outputs(posterior.samples, x))
    assert torch.allclose(
        given.statistics["predictions"]["predictions"].r_hat, outputs.r_hat
    )
    # of fewer than a hundred
    assert result["predictions"].value == pytest.approx(float(outputs.r_hat.max()))


def test_copies_of_a_chain_are_named_and_count_for_nothing() -> None:
    torch.manual_seed(0)
    one = Posterior({"w": torch.randn(2, 200, 3)}, kind="chains")
    twice = Posterior.concat([one, one])
    found = diagnose(twice)
    assert not found.ok
    assert found["copies"].status == "fail"
    assert "[2, 3]" in found["copies"].words
    assert "copies" not in diagnose(one)
    with pytest.raises(ValueError, match="copies"):
        mmd_test(twice, one)
    # which never move: nothing is copied
    stuck = Posterior({"w": torch.zeros(3, 200, 3)}, kind="chains")
    assert "copies" not in diagnose(stuck)


@pytest.mark.parametrize("shift", [1.2, 20.0])
def test_one_entry_of_many_that_stands_out_is_told(shift: float) -> None:
    """R-hat of 2,000 entries of chains that agree reaches 1.02 here, and 1.1 in none of
    a million runs.
    """
    draws = torch.randn(4, 250, 100)
    assert diagnose(Posterior({"w": draws}, kind="chains")).ok
    draws[:2, :, 7] += shift
    found = diagnose(Posterior({"w": draws}, kind="chains"))
    assert not found.ok
    assert found["weights"].status == "fail"


# the checks: sound draws pass, each fault is found and named --------------------------

MANY, EACH, ROWS = 8, 250, 60


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
    noise = torch.distributions.MultivariateNormal(torch.zeros(2), covariance).sample(
        (MANY, EACH)
    )
    return covariance @ x.T @ y + spread * noise


def sound(**statistics) -> Posterior:
    return Posterior({"w": torch.randn(MANY, EACH, 3)}, statistics, kind="chains")


def test_exact_draws_of_a_conjugate_model_pass(data):
    posterior = Posterior({"w": exact_draws(*data)}, kind="chains").attach(
        conjugate, *data
    )
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
    # z.grad U / D of Gaussian draws with variances c times too large averages to c +
    # (the mean's part, 1 - 1 = 0): E z.(z - m) P = c D, whatever the mean, since E (z -
    # m) = 0.
    x, y = data
    posterior = Posterior({"w": exact_draws(x, y, spread)}, kind="chains").attach(
        conjugate, x, y
    )
    finding = diagnose(posterior, num_draws=2000)["temperature"]
    # 2,000 draws: a standard error of about 0.1
    assert finding.value == pytest.approx(expected, abs=0.5)
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
    posterior = Posterior(
        {"a": torch.randn(MANY, EACH), "b": torch.randn(MANY, EACH, 2)}, kind="chains"
    )
    posterior.samples["b"][..., 1] += 10 * torch.arange(MANY)[:, None]
    result = diagnose(posterior)
    assert result["weights"].status == "fail"
    assert "site 'b'" in result["weights"].words
    assert diagnose(posterior)["effective draws"].status == "fail"
    drifting = Posterior(
        {"a": torch.randn(1, EACH) + torch.linspace(0, 20, EACH)}, kind="chains"
    )
    result = diagnose(drifting)
    assert result["weights"].status == "fail"  # one chain, by its halves


def test_a_networks_weights_in_copies_are_a_warning_and_its_log_density_decides():
    weights = {
        "0.weight": torch.randn(MANY, EACH, 3) + 10 * torch.arange(MANY)[:, None, None]
    }
    result = diagnose(
        Posterior(weights, {"lp": torch.randn(MANY, EACH)}, kind="chains")
    )
    assert (result["log density"].status, result["weights"].status) == ("pass", "warn")
    assert "symmetry= tells" in result["weights"].words
    assert result["effective draws"].status == "pass"
    apart = torch.randn(MANY, EACH) + 3 * torch.arange(MANY)[:, None]
    assert (
        diagnose(Posterior(weights, {"lp": apart}, kind="chains"))["log density"].status
        == "fail"
    )


def two_sites(x, y):
    pyro.sample("narrow", dist.Normal(torch.zeros(8), 1.0).to_event(1))
    pyro.sample("wide", dist.Normal(3.0, 5.0))


@pytest.mark.stochastic
def test_a_single_site_that_spreads_too_little_is_named_among_many_coordinates(data):
    # 256 draws: a standard error of 0.09 for one coordinate; 0.1 is ten of them away
    # from 1.
    narrow, wide = torch.randn(MANY, EACH, 8), torch.randn(MANY, EACH)
    sound = Posterior({"narrow": narrow, "wide": 3 + 5 * wide}, kind="chains").attach(
        two_sites, *data
    )
    assert diagnose(sound)["temperature"].status == "pass"
    cold = Posterior({"narrow": narrow, "wide": 3 + 1.5 * wide}, kind="chains").attach(
        two_sites, *data
    )
    finding = diagnose(cold)["temperature"]
    assert finding.status == "fail"
    assert "'wide'" in finding.words
    assert finding.value == pytest.approx(0.09, abs=0.05)


def test_a_sampler_whose_chains_must_agree_tells_of_disagreement_and_heavy_tails():
    """R-hat of 64 converged entries of four chains of 100 draws is under 1.05 but once
    in 10,000 times.
    """
    diverging, agree = (
        torch.zeros(4, 100, dtype=torch.bool),
        {"w": torch.randn(4, 100, 64)},
    )
    fine = {"diverging": diverging, "energy": torch.randn(4, 100)}
    assert sampler_failures(fine, False, agree) == []
    slow = {**fine, "energy": torch.randn(4, 100).cumsum(1)}
    apart = {"w": agree["w"] + 2 * torch.arange(4)[:, None, None]}
    found = [
        sampler_failures(*case) for case in ((slow, False, agree), (fine, False, apart))
    ]
    assert [[finding.name for finding in own] for own in found] == [
        ["energy"],
        ["weights"],
    ]
    assert "relabelled" in found[1][0].words
    # of a network, whose chains may sit in copies of one mode
    assert sampler_failures(fine, False) == []


@pytest.mark.parametrize(
    ("statistics", "name", "status"),
    [
        ({"acceptance_rate": torch.full((MANY, EACH), 0.8)}, "acceptance", "pass"),
        ({"acceptance_rate": torch.full((MANY, EACH), 0.3)}, "acceptance", "warn"),
        ({"acceptance_rate": torch.full((MANY, EACH), 0.01)}, "acceptance", "fail"),
        (
            {"diverging": torch.zeros(MANY, EACH, dtype=torch.bool)},
            "divergences",
            "pass",
        ),
        (
            {"diverging": torch.arange(MANY * EACH).reshape(MANY, EACH) % 1000 == 0},
            "divergences",
            "warn",
        ),
        (
            {"diverging": torch.arange(MANY * EACH).reshape(MANY, EACH) % 50 == 0},
            "divergences",
            "fail",
        ),
        (
            {"reached_max_treedepth": torch.ones(MANY, EACH, dtype=torch.bool)},
            "tree depth",
            "warn",
        ),
        ({"energy": torch.arange(EACH).expand(MANY, EACH).float()}, "energy", "fail"),
    ],
)
def test_the_samplers_own_numbers_are_read(statistics, name, status):
    assert diagnose(sound(**statistics))[name].status == status


@pytest.mark.stochastic
@pytest.mark.parametrize("name", ["kinetic_temperature", "virial"])
def test_temperatures_are_compared_with_one_within_their_error(name):
    title = name.replace("_", " ")
    # Means of 2,000 numbers of deviation 0.5: a standard error of 0.011.
    assert (
        diagnose(sound(**{name: 1 + 0.5 * torch.randn(MANY, EACH)}))[title].status
        == "pass"
    )
    assert (
        diagnose(sound(**{name: 1.2 + 0.5 * torch.randn(MANY, EACH)}))[title].status
        == "warn"
    )
    assert (
        diagnose(sound(**{name: 1.5 + 0.5 * torch.randn(MANY, EACH)}))[title].status
        == "fail"
    )
    assert (
        diagnose(sound(**{name: 1 + 50 * torch.randn(MANY, EACH)}))[title].status
        == "unknown"
    )
    lost = 1 + 0.1 * torch.randn(MANY, EACH)
    lost[2, 5] = torch.nan
    assert diagnose(sound(**{name: lost}))[title].status == "pass"


def two_modes() -> None:
    means = torch.tensor([-4.0, 4.0])
    fn = dist.MixtureSameFamily(
        dist.Categorical(torch.ones(2)), dist.Normal(means, 1.0)
    )
    pyro.sample("z", fn)


@pytest.mark.stochastic
def test_a_temperature_that_few_draws_leave_uncertain_is_that_of_more():
    """Independent draws: 256 have a standard error of 0.25, 4,096 one of 0.06. To be
    found uncertain, or above 1.3, it would have to be 5 of them off.
    """
    draws = torch.randn(16, 256) + 4 * (2.0 * torch.randint(0, 2, (16, 256)) - 1)
    posterior = Posterior({"z": draws}, kind="chains").attach(two_modes)
    assert diagnose(posterior)["temperature"].status == "pass"
    few = replace(posterior, samples={"z": draws[:, ::16]})
    assert diagnose(few)["temperature"].status == "unknown"


def two_heights(where):
    pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def test_chains_that_started_at_one_point_are_told_of(tmp_path):
    options = {"num_samples": 60, "num_warmup": 20, "progress": False, "seed": 0}
    together = sample(
        NUTS(two_heights),
        None,
        initial={"z": torch.zeros(2)},
        store=tmp_path / "run",
        **options,
    )
    assert diagnose(together)["starts"].status == "warn"
    assert diagnose(Posterior.load(tmp_path / "run"))["starts"].status == "warn"
    apart = sample(NUTS(two_heights), None, **options)
    assert "starts" not in diagnose(apart)


def test_a_symmetry_that_says_at_least_is_repeated_in_a_line():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    symmetry = find_symmetry(net, torch.randn(5, 2))
    draws = {
        site: torch.randn(4, 50, *value.shape)
        for site, value in symmetry.weights_of(net).items()
    }
    said = diagnose(draws, replace(symmetry, at_least=True))
    assert repr(said).splitlines()[1].startswith("the symmetry says at least")
    assert said.to_dict()["remarks"] == list(said.remarks)
    assert "at least" not in repr(diagnose(draws, symmetry))


@pytest.mark.stochastic
def test_too_few_draws_are_short_and_not_ok() -> None:
    """Chains that agree, of 60 and of 600 draws: of 240 independent draws 400 can't be
    counted; false alarms of the long chains below 1 in 10^4."""
    for site, shown in (("mu", "sites as drawn"), ("0.weight", "weights")):
        short, long = (
            diagnose({site: torch.randn(4, number, 3)}) for number in (60, 600)
        )
        assert not short.ok
        assert short["effective draws"].status == "short"
        assert not short["effective draws"]
        assert str(short).splitlines()[0] == "4 chains of 60 draws: short: run longer"
        assert shown in long.full()
        assert ("weights" in long.full()) == (site == "0.weight")
        assert long["weights"].status == "pass"
    apart = torch.randn(4, 600, 3) + 0.3 * torch.arange(4.0)[:, None, None]
    assert diagnose({"mu": apart}).outcome == "not ok"
    few = diagnose(Posterior({"mu": torch.randn(1, 100, 3)}, kind="independent"))
    assert few.outcome == "short: run longer"


@pytest.mark.parametrize("slow", ["bulk", "tail"])
def test_effective_draws_are_the_fewer_of_bulk_and_tails(slow):
    """Chains whose place lasts, and chains whose spread does."""
    noise = torch.randn(4, 400)
    lasting = torch.zeros(4, 400)
    for draw in range(1, 400):
        lasting[:, draw] = 0.95 * lasting[:, draw - 1] + 0.3 * torch.randn(4)
    draws = lasting if slow == "bulk" else noise * (2 * lasting).exp()
    numbers = chain_statistics(draws)
    sizes = {"bulk": float(numbers.ess_bulk), "tail": float(numbers.ess_tail)}
    assert min(sizes, key=sizes.get) == slow
    found = diagnose(Posterior({"w": draws}, kind="chains"))["effective draws"]
    assert found.value == pytest.approx(sizes[slow], rel=1e-5)
