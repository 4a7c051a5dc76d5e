"""Posterior: selection, diagnostics, ArviZ and the store."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import arviz_stats
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc.util import select_samples
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.posterior import Posterior


@pytest.fixture
def posterior() -> Posterior:
    return Posterior(
        {"b": torch.randn(3, 50, 2, 4), "a": torch.randn(3, 50, dtype=torch.float64)},
        {"diverging": torch.rand(3, 50) < 0.1, "acceptance_rate": torch.rand(3, 50)},
        {"kernel": "HMC", "note": "é", "list": [1, 2.5, None]},
        kind="chains",
    )


def assert_same(found: Posterior, expected: Posterior) -> None:
    assert list(found.samples) == list(expected.samples)
    assert list(found.statistics) == list(expected.statistics)
    for entries, wanted in (
        (found.samples, expected.samples),
        (found.statistics, expected.statistics),
    ):
        for name, value in wanted.items():
            assert entries[name].dtype == value.dtype
            assert torch.equal(entries[name], value)
    assert found.metadata == expected.metadata


@pytest.mark.cpu
@pytest.mark.parametrize("group_by_chain", [False, True])
@pytest.mark.parametrize("num_samples", [None, 70])
def test_get_samples_selects_as_pyro_does(posterior, num_samples, group_by_chain):
    torch.manual_seed(1)
    expected = select_samples(posterior.samples, num_samples, group_by_chain)
    torch.manual_seed(1)
    found = posterior.get_samples(num_samples, group_by_chain)
    assert all(torch.equal(found[site], expected[site]) for site in expected)
    batch = {
        (None, False): (150,),
        (None, True): (3, 50),
        (70, False): (70,),
        (70, True): (3, 70),
    }
    assert found["b"].shape == (*batch[num_samples, group_by_chain], 2, 4)


def test_from_samples_cuts_consecutive_draws_into_chains():
    w = torch.arange(24.0).reshape(12, 2)
    posterior = Posterior.from_samples({"w": w}, num_chains=3, kind="chains")
    assert torch.equal(posterior.samples["w"][1], w[4:8])
    assert torch.equal(posterior.get_samples()["w"], w)


@pytest.mark.parametrize(
    ("weights", "num_chains", "words"),
    [
        ({"w": torch.zeros(12, 2)}, 0, "num_chains is 0"),
        ({"w": torch.zeros(12, 2)}, -3, "num_chains is -3"),
        ({"w": torch.zeros(12, 2)}, 2.0, "num_chains is 2.0"),
        ({"w": torch.zeros(12, 2)}, 5, "num_chains is 5; it must divide the 12 draws"),
        ({"w": torch.zeros(12), "b": torch.zeros(6)}, 3, r"weights\['b'\] has shape"),
        ({"w": torch.zeros(())}, 1, r"weights\['w'\] has shape \(\)"),
    ],
)
def test_from_samples_says_which_draws_are_not_chains(weights, num_chains, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Posterior.from_samples(weights, kind="chains", num_chains=num_chains)


@pytest.mark.parametrize(
    "value", [{1, 2}, torch.zeros(2), {"a": [b"x"]}, {(1, 2): 3}, print]
)
def test_metadata_that_json_lacks_are_named_before_anything_is_written(value, tmp_path):
    posterior = Posterior({"w": torch.zeros(1, 4)}, {}, {"mine": value}, kind="chains")
    with pytest.raises(ValueError, match=r"metadata\['mine'\] is .* JSON can't"):
        posterior.save(tmp_path / "draws")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"metadata\['mine'\] is .* JSON can't"):
        posterior.to_arviz()


def test_a_save_that_fails_names_the_folder_and_no_temporary_one(posterior, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match=r"File too large\. What was there") as full:
            posterior.save(tmp_path / "draws")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(FileNotFoundError) as missing:
        posterior.save(tmp_path / "nowhere" / "draws")
    for error, folder in ((full, "draws"), (missing, "nowhere/draws")):
        assert f"to {tmp_path / folder}: " in str(error.value)
        assert "/." not in str(error.value)
        assert "resumes" not in str(error.value)
    assert not list(tmp_path.iterdir())


# diagnostics --------------------------------------------------------------------------


@pytest.mark.stochastic
def test_diagnostics_of_an_autoregression_match_its_known_effective_sample_size():
    # AR(1) with coefficient r has ESS/N = (1-r)/(1+r). Over 4 x 4000 draws the
    # estimate's relative error is about 3 % per weight; the median of 8 weights lies
    # within 15 % but for a chance below 1e-6.
    r, chains, draws = 0.6, 4, 4000
    noise = torch.randn(chains, draws, 8, dtype=torch.float64)
    x = torch.zeros_like(noise)
    x[:, 0] = noise[:, 0]
    for t in range(1, draws):
        x[:, t] = r * x[:, t - 1] + (1 - r**2) ** 0.5 * noise[:, t]
    found = Posterior({"x": x}, kind="chains").diagnostics()["x"]
    expected = chains * draws * (1 - r) / (1 + r)
    assert float(found["n_eff"].median()) == pytest.approx(expected, rel=0.15)
    assert found["r_hat"].max() < 1.02


# ArviZ --------------------------------------------------------------------------------


def test_to_arviz_keeps_values_and_names(posterior):
    tree = posterior.to_arviz(dims={"b": ["out", "in"]})
    assert tree["posterior"]["b"].dims == ("chain", "draw", "out", "in")
    assert np.array_equal(tree["posterior"]["a"].values, posterior.samples["a"].numpy())
    assert np.array_equal(
        tree["sample_stats"]["diverging"].values,
        posterior.statistics["diverging"].numpy(),
    )
    assert json.loads(tree.attrs["metadata"]) == posterior.metadata


def test_log_likelihood_and_predictions_reach_arviz_by_row():
    model = BayesianModel(nn.Linear(2, 3))
    x, y = torch.randn(7, 2), torch.randint(3, (7,))
    posterior = Posterior(
        {name: prior.sample((2, 5)) for name, prior in model.priors().items()},
        kind="chains",
    )
    tree = posterior.to_arviz(
        log_likelihood=(model, x, y), posterior_predictive=(model, x)
    )
    attached = posterior.attach(model, x, y).to_arviz(
        log_likelihood=True, posterior_predictive=True
    )
    for found in (tree, attached):
        assert found["log_likelihood"]["y"].dims == ("chain", "draw", "row")
        expected = model.log_likelihood(posterior.samples, x, y).numpy()
        np.testing.assert_allclose(
            found["log_likelihood"]["y"].values, expected, atol=1e-5
        )
        assert found["posterior_predictive"]["y"].shape == (2, 5, 7)
        assert np.array_equal(found["observed_data"]["y"].values, y.numpy())
    assert posterior.attach(model, x, y).thin(2).source[:2] == (model, (x, y))
    with pytest.raises(ValueError, match="doesn't know"):
        posterior.to_arviz(log_likelihood=True)


@pytest.mark.stochastic
def test_arvizs_loo_of_exact_draws_is_the_exact_one():
    """Mean ~ N(0, 3²), y ~ N(mean, 1): each row given the others is normal, with known
    mean and variance.
    """

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    y = torch.randn(20)
    precision = 1 / 9 + 20
    draws = y.sum() / precision + torch.randn(4, 2000) / precision**0.5
    tree = Posterior({"mean": draws}, kind="chains").to_arviz(log_likelihood=(model, y))
    others = precision - 1
    exact = (
        dist.Normal((y.sum() - y) / others, (1 + 1 / others) ** 0.5).log_prob(y).sum()
    )
    # its standard error is 0.018
    assert arviz_stats.loo(tree).elpd == pytest.approx(float(exact), abs=0.1)
    assert float(arviz_stats.ess(tree)["mean"]) > 5000


# where it comes from, and parts of it -------------------------------------------------


def test_chains_and_draws_are_selected_together_and_thinning_keeps_the_last_draw_as_a_view(
    posterior,
):
    part = posterior.select(chains=[2, 0], draws=slice(40, None))
    assert torch.equal(part.samples["b"], posterior.samples["b"][[2, 0], 40:])
    assert torch.equal(
        part.statistics["diverging"], posterior.statistics["diverging"][[2, 0], 40:]
    )
    assert posterior.select(chains=1, draws=-1).samples["a"].shape == (1, 1)
    thin = posterior.thin(4)
    assert torch.equal(thin.samples["b"], posterior.samples["b"][:, 1::4])
    assert torch.equal(
        thin.statistics["diverging"], posterior.statistics["diverging"][:, 1::4]
    )
    assert (
        posterior.thin(7).samples["b"].data_ptr() == posterior.samples["b"].data_ptr()
    )
    assert thin.metadata == posterior.metadata


# the store ----------------------------------------------------------------------------


@pytest.fixture
def saved(posterior, tmp_path):
    """Its folder, and that nothing but it is there in the end."""
    posterior.save(tmp_path / "p")
    yield tmp_path / "p"
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_save_and_load_round_trip(posterior, saved):
    turned = torch.randn(50, 3, 4).transpose(0, 1)
    other = replace(
        posterior,
        samples={**posterior.samples, "turned": turned, "its part": turned[..., :2]},
    )
    loaded = Posterior.load(saved)
    other.save(saved)
    assert_same(loaded, posterior)  # which the new ones leave alone
    assert_same(Posterior.load(saved), other)


def test_a_full_disk_gives_one_error_and_leaves_the_old_file(posterior, saved):
    large = Posterior({"w": torch.zeros(4, 1000, 100)}, kind="chains")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # stands for a disk with no room left
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="couldn't be written"):
            large.save(saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same(Posterior.load(saved), posterior)


def test_ctrl_c_between_two_moves_leaves_the_old_posterior(
    posterior, saved, monkeypatch
):
    rename = Path.rename

    def interrupted(self, target):
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Posterior({"w": torch.zeros(1, 2)}, kind="chains").save(saved)
    assert_same(Posterior.load(saved), posterior)


def test_map_applies_a_function_to_all_draws_and_keeps_the_rest(posterior):
    doubled = posterior.attach(print, 3).map(
        lambda weights, by: {site: by * v for site, v in weights.items()}, by=2
    )
    assert all(
        torch.equal(doubled.samples[site], 2 * value)
        for site, value in posterior.samples.items()
    )
    assert doubled.statistics == posterior.statistics
    assert doubled.metadata == posterior.metadata
    assert doubled.kind == posterior.kind
    assert doubled.source.model is print


def test_chains_in_two_copies_of_a_mode_agree_in_canonical_form():
    unit = torch.tensor([-3.0, 3.0]) + 0.1 * torch.randn(4, 50, 2)
    unit[2:] = unit[2:].flip(-1)
    posterior = Posterior({"w": unit}, {"lp": torch.zeros(4, 50)}, kind="chains")
    group = ps.Group.declare({"w": ("unit",)}, {"w": torch.Size([2])})
    canonical = posterior.map(ps.canonicalize, group)
    assert posterior.diagnostics()["w"]["r_hat"].max() > 1.5
    assert canonical.diagnostics()["w"]["r_hat"].max() < 1.1
    assert torch.equal(canonical.statistics["lp"], posterior.statistics["lp"])


def test_summary_and_diagnostics_say_what_those_of_pyros_mcmc_say(capsys):
    generator = torch.Generator(torch.empty(0).device).manual_seed(0)
    draws = {
        "a": torch.randn(2, 50, generator=generator),
        "b": torch.randn(2, 50, 1, 2, generator=generator),
    }
    rates = torch.rand(2, 50, generator=generator)
    posterior = Posterior(
        {**draws, "large": torch.randn(2, 50, 40, generator=generator)},
        {"acceptance_rate": rates},
        kind="chains",
    )
    found = posterior.diagnostics()
    assert found["acceptance rate"] == pytest.approx(
        {f"chain {c}": float(rates[c].mean()) for c in (0, 1)}
    )
    assert found["b"]["n_eff"].shape == found["b"]["r_hat"].shape == (1, 2)
    assert found["divergences"] == {"chain 0": [], "chain 1": []}
    posterior.summary(prob=0.5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "mean",
        "std",
        "median",
        "25.0%",
        "75.0%",
        "n_eff",
        "r_hat",
    ]
    for line, name, values in zip(
        lines[1:4],
        ("a", "b[0,0]", "b[0,1]"),
        (draws["a"], *draws["b"].flatten(2).unbind(-1)),
        strict=True,
    ):
        shown = line.split()
        low, middle, high = np.quantile(values.numpy(), [0.25, 0.5, 0.75])
        assert shown[0] == name
        assert [float(v) for v in shown[1:6]] == pytest.approx(
            [values.mean().item(), values.std().item(), middle, low, high], abs=0.06
        )
    assert "large[" not in "".join(lines)


def test_independent_draws_are_counted_as_such_and_have_no_r_hat(capsys):
    posterior = Posterior.from_samples({"w": torch.randn(500, 2)}, kind="independent")
    assert str(ps.diagnose(posterior)).splitlines()[0] == "500 independent draws: ok"
    posterior.summary()
    shown = capsys.readouterr().out
    assert "w[1]" in shown
    assert "r_hat" not in shown
    assert "R-hat" not in shown


def test_concat_lays_chains_side_by_side_with_summed_seconds_and_what_differs_by_part():
    def part(chains: int, value: float, spent: object) -> Posterior:
        metadata = {
            "kernel": "k",
            "seconds": spent,
            "seed": int(value),
            "interrupted": value > 4,
        }
        draws = torch.full((chains, 3, 2), value)
        return Posterior(
            {"w": draws}, {"lp": torch.zeros(chains, 3)}, metadata, kind="chains"
        )

    for spent, both in (
        ({"warmup": 1.0, "sampling": 2.0}, {"warmup": 2.0, "sampling": 4.0}),
        (1.5, 3.0),
    ):
        whole = Posterior.concat([part(1, 2.0, spent), part(3, 6.0, spent)])
        assert whole.samples["w"][:, 0, 0].tolist() == [2.0, 6.0, 6.0, 6.0]
        assert whole.kind == "chains"
        assert [
            whole.metadata[name] for name in ("kernel", "seconds", "interrupted")
        ] == ["k", both, True]
        assert [(part["chains"], part["seed"]) for part in whole.metadata["parts"]] == [
            (1, 2),
            (3, 6),
        ]
        json.dumps(whole.metadata)


def test_concat_refuses_parts_that_do_not_belong_together(posterior):
    independent = replace(posterior, kind="independent")
    bare = Posterior(posterior.samples, kind="chains")
    fewer = Posterior(
        {"b": posterior.samples["b"]}, posterior.statistics, kind="chains"
    )
    for other in (independent, bare, fewer, posterior.select(draws=slice(5))):
        with pytest.raises(ValueError, match="they must agree"):
            Posterior.concat([posterior, other])


# draws that are unusual ---------------------------------------------------------------


def test_complex_draws_are_refused_by_name():
    with pytest.raises(ValueError, match=r"samples\['w'\]"):
        Posterior({"w": torch.randn(2, 5).to(torch.complex64)}, kind="chains")


@pytest.mark.parametrize("shape", [(2, 10, 0), (2, 0, 3), (0, 5, 3)])
def test_a_posterior_without_entries_or_draws_goes_through_everything(tmp_path, shape):
    chains, draws, entries = shape
    statistics = {
        "acceptance_rate": torch.zeros(shape[:2]),
        "diverging": torch.zeros(shape[:2]).bool(),
    }
    posterior = Posterior({"w": torch.zeros(shape)}, statistics, kind="chains")
    posterior.summary()
    assert posterior.diagnostics()["w"]["n_eff"].isnan().all()
    assert posterior.get_samples()["w"].shape == (chains * draws, entries)
    assert posterior.thin(2).samples["w"].shape == (chains, (draws + 1) // 2, entries)
    assert Posterior.concat([posterior, posterior]).num_chains == 2 * chains
    posterior.save(tmp_path / "p")
    assert Posterior.load(tmp_path / "p").samples["w"].shape == shape
    assert posterior.to_arviz().posterior["w"].shape == shape


def test_a_printed_summary_shows_two_digits_of_small_deviations_and_parts_columns():
    noise = torch.randn(2, 100, 1, dtype=torch.float64)
    draws = {
        "plain": noise,
        "small": 3 + 1e-3 * noise,
        "tiny": 1e-9 * noise,
        "large": 1e6 + noise,
    }
    lines = repr(ps.summary(draws, None)).splitlines()
    std = noise.std().item()
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:5]}
    assert cells["plain[0]"][1] == f"{std:.2f}"
    assert cells["small[0]"][1] in (f"{1e-3 * std:.4f}", f"{1e-3 * std:.5f}")
    assert cells["small[0]"][0].startswith(("2.999", "3.000"))
    assert cells["tiny[0]"][1] == f"{1e-9 * std:.2e}"
    assert all(len(row) == 7 for row in cells.values())  # no two run together
    shown = ps.summary(draws, None)._repr_html_()
    assert f"<td>{1e-9 * std:.2e}</td>" in shown
