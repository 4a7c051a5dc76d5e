"""Reference posteriors: files, certificates, and draws compared with them."""

import json
import shutil

import pandas as pd
import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric.references import CERTIFICATE, CHECKOUT, reference_names

NAMES = reference_names()


@pytest.fixture(scope="module")
def two_weights():
    return ps.datasets.reference("two-weights")


def grid_posterior(reference):
    """The posterior of the two weights on a grid: points, and their probabilities."""
    axis = torch.linspace(-6, 6, 301, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    x, y = (part.double() for part in reference.problem.arguments)
    means = torch.relu(grid[:, None, :] * x).sum(-1)
    log_joint = -0.5 * grid.square().sum(-1) - 0.5 * (means - y).square().sum(-1)
    return grid, log_joint.softmax(0)


@pytest.mark.parametrize("name", NAMES)
def test_a_reference_holds_a_thousand_draws_of_its_model(name):
    reference = ps.datasets.reference(name)
    posterior = reference.posterior
    assert posterior.num_chains * posterior.num_samples == 1000
    density = ps.log_joint(reference.problem.model, *reference.problem.arguments)
    few = {site: value[0, :3] for site, value in posterior.samples.items()}
    assert density(few).isfinite().all()
    predicted = reference.problem.predict(dict(posterior.get_samples()))
    means = predicted[0] if isinstance(predicted, tuple) else predicted
    assert len(means) == 1000
    assert means.isfinite().all()
    assert name in repr(reference)
    assert "certified" in repr(reference)
    assert reference.is_certified == ("not certified" not in repr(reference))


def test_certified_expectations_agree_with_quadrature(two_weights):
    """41 points, of which 20 are kept; the largest of 20 z-scores exceeds 4.5 with
    probability 1.4e-4."""
    grid, probabilities = grid_posterior(two_weights)
    test_x = two_weights.problem.test_x.double()[:, 0]
    means = torch.relu(grid[:, None, :] * test_x[:, None]).sum(-1)
    rows = ps.posterior.statistics.evenly_spaced(41, 20)
    exact = (probabilities[:, None] * means).sum(0)[rows]
    expectations = two_weights.certificate["expectations"]
    error = torch.tensor(expectations["error"])
    scores = (torch.tensor(expectations["mean"]) - exact) / error
    assert scores.abs().max() < 4.5


def test_exact_draws_are_at_the_noise_floor_and_wrong_ones_far_above(two_weights):
    """Exact draws from the grid, swapped at random; wrong ones are the prior's."""
    torch.manual_seed(0)
    grid, probabilities = grid_posterior(two_weights)
    rows = torch.multinomial(probabilities, 600, replacement=True)
    exact = {"hidden.weight": grid[rows].float()[..., None]}
    near = ps.compare.against_reference(exact, "two-weights")
    assert list(near.columns) == ["distance", "noise floor"]
    assert near.loc["Wasserstein", "distance"] < 3 * near.loc["Wasserstein"].iloc[1]
    assert near.loc["squared MMD", "distance"] < 0.01
    prior = {"hidden.weight": torch.randn(600, 2, 1)}
    far = ps.compare.against_reference(prior, "two-weights")
    assert far.loc["squared MMD", "distance"] > 0.05
    assert (far["distance"] > 5 * near["distance"]).all()
    pd.testing.assert_series_equal(near["noise floor"], far["noise floor"])


def test_draws_that_lack_a_site_or_have_another_shape_are_refused():
    with pytest.raises(ValueError, match="lack"):
        ps.compare.against_reference({"w": torch.zeros(5, 2)}, "two-weights")
    wrong = {"hidden.weight": torch.zeros(5, 3, 1)}
    with pytest.raises(ValueError, match="hidden"):
        ps.compare.against_reference(wrong, "two-weights")


def test_arrays_of_another_precision_give_the_same_distances():
    torch.manual_seed(0)
    draws = torch.randn(200, 2, 1)
    table = ps.compare.against_reference({"hidden.weight": draws}, "two-weights")
    double = {"hidden.weight": draws.double().numpy()}
    again = ps.compare.against_reference(double, "two-weights")
    pd.testing.assert_frame_equal(again, table, rtol=1e-6)


@pytest.mark.parametrize("rows", [slice(None, None, 2), slice(1, None, 2), slice(3, 4)])
def test_draws_that_are_not_finite_are_refused_whichever_they_are(rows):
    draws = torch.randn(1000, 2, 1)
    draws[rows] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        ps.compare.against_reference({"hidden.weight": draws}, "two-weights")


def test_few_draws_have_a_noise_floor_of_their_own_and_very_few_are_refused(
    two_weights,
):
    """Exact draws: the mean Wasserstein distance over both halves is a mean of two
    that are distributed as the floor; summed over 4 seeds it isn't twice the floor."""
    grid, probabilities = grid_posterior(two_weights)
    distances, floors = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        rows = torch.multinomial(probabilities, 60, replacement=True)
        exact = {"hidden.weight": grid[rows][..., None]}
        table = ps.compare.against_reference(exact, "two-weights")
        distances.append(table.loc["Wasserstein", "distance"])
        floors.append(table.loc["Wasserstein", "noise floor"])
    assert sum(distances) < 2 * sum(floors)
    with pytest.raises(ValueError, match="at least 50"):
        ps.compare.against_reference(
            {"hidden.weight": torch.randn(9, 2, 1)}, "two-weights"
        )


def test_unknown_names_and_folders_say_what_there_is(tmp_path):
    with pytest.raises(FileNotFoundError, match="did you mean 'two-weights'"):
        ps.datasets.reference("two-weight")
    with pytest.raises(FileNotFoundError, match=r"\.\."):
        ps.datasets.reference("../references/two-weights")
    with pytest.raises(FileNotFoundError, match="checkout"):
        ps.datasets.reference("two-weights", root=tmp_path)


def test_a_changed_model_or_data_file_is_refused(tmp_path):
    for file in ("data.csv", "model.py"):
        folder = tmp_path / file / "two-weights"
        shutil.copytree(CHECKOUT / "two-weights", folder)
        (folder / file).write_text((folder / file).read_text() + "\n# changed\n")
        with pytest.raises(ValueError, match="isn't the file"):
            ps.datasets.reference("two-weights", root=folder.parent)


def test_other_draws_under_a_certificate_are_refused(tmp_path, two_weights):
    folder = tmp_path / "two-weights"
    shutil.copytree(CHECKOUT / "two-weights", folder)
    moved = two_weights.posterior.map(
        lambda samples: {site: value + 1e-3 for site, value in samples.items()}
    )
    shutil.rmtree(folder / "draws")
    moved.save(folder / "draws")
    with pytest.raises(ValueError, match="other draws"):
        ps.datasets.reference("two-weights", root=tmp_path)


def test_certificates_name_their_samplers_and_checks():
    for name in NAMES:
        certificate = json.loads((CHECKOUT / name / CERTIFICATE).read_text())
        assert set(certificate["samplers"]) == {"NUTS", "adaptive HMC"}
        assert isinstance(certificate["doubts"], list)
        assert 0 <= certificate["two-sample test"]["p_value"] <= 1
        if not certificate["doubts"]:
            assert min(certificate["two-sample test"]["draws"]) >= 500
