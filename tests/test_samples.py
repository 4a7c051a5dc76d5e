"""Posterior: selection, diagnostics, ArviZ and the store."""

import json
import os
import resource
import struct

import numpy as np
import pytest
import torch
from pyro.infer.mcmc.util import select_samples
from safetensors.torch import save_file

from pyro_symmetric.samples import Posterior


@pytest.fixture
def posterior() -> Posterior:
    return Posterior(
        {"b": torch.randn(3, 50, 2, 4), "a": torch.randn(3, 50, dtype=torch.float64)},
        {"diverging": torch.rand(3, 50) < 0.1, "acceptance_rate": torch.rand(3, 50)},
        {"kernel": "HMC", "note": "é", "list": [1, 2.5, None]},
    )


def assert_same(found: Posterior, expected: Posterior) -> None:
    assert list(found.samples) == list(expected.samples)
    assert list(found.statistics) == list(expected.statistics)
    for entries, wanted in ((found.samples, expected.samples), (found.statistics, expected.statistics)):
        for name, value in wanted.items():
            assert entries[name].dtype == value.dtype
            assert torch.equal(entries[name], value)
    assert found.metadata == expected.metadata


@pytest.mark.parametrize("group_by_chain", [False, True])
@pytest.mark.parametrize("num_samples", [None, 70])
def test_get_samples_selects_as_pyro_does(posterior, num_samples, group_by_chain):
    torch.manual_seed(1)
    expected = select_samples(posterior.samples, num_samples, group_by_chain)
    torch.manual_seed(1)
    found = posterior.get_samples(num_samples, group_by_chain)
    assert all(torch.equal(found[site], expected[site]) for site in expected)
    batch = {(None, False): (150,), (None, True): (3, 50), (70, False): (70,), (70, True): (3, 70)}
    assert found["b"].shape == (*batch[num_samples, group_by_chain], 2, 4)


def test_sizes_and_shapes(posterior):
    assert (posterior.num_chains, posterior.num_samples) == (3, 50)
    assert posterior.site_shapes == {"b": (2, 4), "a": ()}
    assert posterior.divergences.tolist() == posterior.statistics["diverging"].sum(1).tolist()
    assert "3 chains of 50 draws, 9 weights, by HMC" in repr(posterior)


def test_from_samples_cuts_consecutive_draws_into_chains():
    w = torch.arange(24.0).reshape(12, 2)
    posterior = Posterior.from_samples({"w": w}, num_chains=3, statistics={"lp": torch.arange(12.0)})
    assert torch.equal(posterior.samples["w"][1], w[4:8])
    assert torch.equal(posterior.get_samples()["w"], w)
    assert posterior.statistics["lp"].shape == (3, 4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Posterior({}), "samples is empty"),
        (lambda: Posterior({"w": torch.zeros(3)}), r"samples\['w'\] is of shape \(3,\)"),
        (lambda: Posterior({"a": torch.zeros(2, 3), "b": torch.zeros(2, 4)}), r"samples\['b'\] has shape \(2, 4\)"),
        (lambda: Posterior({"a": torch.zeros(2, 3)}, {"lp": torch.zeros(2, 3, 1)}), r"statistics\['lp'\]"),
        (lambda: Posterior.from_samples({"a": torch.zeros(7)}, num_chains=2), "num_chains=2"),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


# diagnostics --------------------------------------------------------------------------------------------------------


def test_diagnostics_of_an_autoregression_match_its_known_effective_sample_size():
    # AR(1) with coefficient r has ESS/N = (1-r)/(1+r). Over 4 x 4000 draws the estimate's relative error is about 3 %
    # per weight; the median of 8 weights lies within 15 % but for a chance below 1e-6.
    r, chains, draws = 0.6, 4, 4000
    noise = torch.randn(chains, draws, 8, dtype=torch.float64)
    x = torch.zeros_like(noise)
    x[:, 0] = noise[:, 0]
    for t in range(1, draws):
        x[:, t] = r * x[:, t - 1] + (1 - r**2) ** 0.5 * noise[:, t]
    found = Posterior({"x": x}).diagnostics()["x"]
    expected = chains * draws * (1 - r) / (1 + r)
    assert found["ess_bulk_median"] == pytest.approx(expected, rel=0.15)
    assert found["ess_bulk"] <= found["ess_bulk_median"]
    assert found["r_hat_median"] <= found["r_hat"] < 1.02


def test_r_hat_names_the_worst_weight_of_a_site():
    x = torch.randn(4, 200, 10)
    x[2, :, 7] += 5
    found = Posterior({"x": x}).diagnostics()["x"]
    assert found["r_hat"] > 1.3
    assert found["r_hat_median"] < 1.05


@pytest.mark.parametrize("shape", [(1, 100), (4, 3), (1, 1), (2, 0)])
def test_too_few_draws_or_chains_give_nan(shape):
    posterior = Posterior({"x": torch.randn(*shape, 2)})
    assert np.isnan(posterior.diagnostics()["x"]["r_hat"])
    assert "nan" in posterior.summary_table()


def test_a_stuck_or_broken_weight_makes_the_worst_nan_but_not_the_median():
    x = torch.randn(4, 100, 5)
    x[..., 0] = 3.0
    stuck = Posterior({"x": x}).diagnostics()["x"]
    assert np.isnan(stuck["ess_bulk"])
    assert stuck["ess_bulk_median"] > 100
    x[0, 0, 1] = torch.inf
    assert np.isnan(Posterior({"x": x}).diagnostics()["x"]["r_hat"])


def test_summary_has_one_line_for_each_site(posterior, capsys):
    posterior.summary()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 + 1
    assert f"{int(posterior.divergences.sum())} of 150 diverged" in lines[-1]


def test_divergences_are_listed_as_pyro_lists_them(posterior):
    listed = posterior.diagnostics()["divergences"]
    assert list(listed) == ["chain 0", "chain 1", "chain 2"]
    assert listed["chain 1"] == [d for d in range(50) if posterior.statistics["diverging"][1, d]]


# ArviZ --------------------------------------------------------------------------------------------------------------


def test_to_arviz_keeps_values_and_names(posterior):
    tree = posterior.to_arviz(dims={"b": ["out", "in"]})
    assert tree["posterior"]["b"].dims == ("chain", "draw", "out", "in")
    assert np.array_equal(tree["posterior"]["a"].values, posterior.samples["a"].numpy())
    assert np.array_equal(tree["sample_stats"]["diverging"].values, posterior.statistics["diverging"].numpy())
    assert json.loads(tree.attrs["metadata"]) == posterior.metadata


def test_many_short_chains_reach_arviz_without_a_warning():
    assert Posterior({"w": torch.randn(64, 5, 2)}).to_arviz()["posterior"]["w"].shape == (64, 5, 2)


# the store ----------------------------------------------------------------------------------------------------------


def test_save_and_load_round_trip(posterior, tmp_path):
    path = tmp_path / "posterior.safetensors"
    posterior.save(path)
    assert_same(Posterior.load(path), posterior)
    assert [p.name for p in tmp_path.iterdir()] == ["posterior.safetensors"]


def test_views_of_one_tensor_and_non_contiguous_draws_are_stored_whole(tmp_path):
    base = torch.randn(5, 3, 4)
    posterior = Posterior({"x": base.transpose(0, 1), "y": base.transpose(0, 1)[..., :2]})
    posterior.save(tmp_path / "p")
    assert_same(Posterior.load(tmp_path / "p"), posterior)


def test_saving_over_a_loaded_file_leaves_the_loaded_draws_alone(posterior, tmp_path):
    path = tmp_path / "p"
    posterior.save(path)
    loaded = Posterior.load(path)
    Posterior({"a": torch.zeros(3, 50)}).save(path)
    assert_same(loaded, posterior)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(posterior, tmp_path, keep):
    path = tmp_path / "p"
    posterior.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="damaged"):
        Posterior.load(path)


def test_foreign_newer_and_missing_files_are_named(posterior, tmp_path):
    (tmp_path / "text").write_text("no tensors here, only a long enough text")
    save_file({"x": torch.zeros(2)}, tmp_path / "foreign")
    header = {"format": "pyro_symmetric.posterior", "version": "99", "json": "{}"}
    save_file({"x": torch.zeros(2)}, tmp_path / "newer", header)
    save_file({"x": torch.zeros(2)}, tmp_path / "broken", {**header, "version": "1", "json": "{"})
    for name, message in (("text", "damaged"), ("foreign", "no posterior"), ("newer", "newer"), ("broken", "header")):
        with pytest.raises(ValueError, match=message):
            Posterior.load(tmp_path / name)
    with pytest.raises(OSError, match="no posterior at"):
        Posterior.load(tmp_path / "missing")


def test_a_header_whose_json_lacks_entries_is_named(tmp_path):
    header = {"format": "pyro_symmetric.posterior", "version": "1", "json": "{}"}
    save_file({"x": torch.zeros(2)}, tmp_path / "p", header)
    with pytest.raises(ValueError, match="header"):
        Posterior.load(tmp_path / "p")


def test_a_full_disk_gives_one_error_and_leaves_the_old_file(posterior, tmp_path):
    path = tmp_path / "p"
    posterior.save(path)
    large = Posterior({"w": torch.zeros(4, 1000, 100)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # stands for a disk with no room left
    try:
        with pytest.raises(OSError, match="couldn't be saved"):
            large.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_same(Posterior.load(path), posterior)
    assert [p.name for p in tmp_path.iterdir()] == ["p"]


def test_a_missing_folder_gives_one_error(posterior, tmp_path):
    with pytest.raises(OSError, match="couldn't be saved"):
        posterior.save(tmp_path / "nowhere" / "p")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_folder_gives_one_error(posterior, tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OSError, match="couldn't be saved"):
            posterior.save(tmp_path / "p")
    finally:
        tmp_path.chmod(0o700)


def test_metadata_that_json_cannot_hold_is_named(tmp_path):
    with pytest.raises(ValueError, match="metadata"):
        Posterior({"w": torch.zeros(1, 2)}, metadata={"x": torch.zeros(1)}).save(tmp_path / "p")
    assert not list(tmp_path.iterdir())


def test_the_file_is_plain_safetensors_with_a_readable_header(posterior, tmp_path):
    path = tmp_path / "p"
    posterior.save(path)
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert header["samples/b"]["shape"] == [3, 50, 2, 4]
    assert header["__metadata__"]["format"] == "pyro_symmetric.posterior"


def test_chains_in_two_copies_of_a_mode_agree_in_canonical_form():
    from pyro_symmetric.symmetry import PermutationGroup

    unit = torch.tensor([-3.0, 3.0]) + 0.1 * torch.randn(4, 50, 2)
    unit[2:] = unit[2:].flip(-1)
    posterior = Posterior({"w": unit}, {"lp": torch.zeros(4, 50)})
    group = PermutationGroup.declare({"w": ("unit",)}, {"w": torch.Size([2])})
    canonical = posterior.canonicalize(group)
    assert posterior.diagnostics()["w"]["r_hat"] > 1.5
    assert canonical.diagnostics()["w"]["r_hat"] < 1.1
    assert torch.equal(canonical.statistics["lp"], posterior.statistics["lp"])
