"""Scores, members' disagreement and total variation: against other packages, closed
forms, quadrature.
"""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.stats import pearsonr, spearmanr
from sklearn import metrics
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric import compare
from pyro_symmetric.compare import (
    functional_collapse,
    mutual_information,
    pairwise_mutual_information,
    scores,
)
from pyro_symmetric.networks import prepare_torchvision


@pytest.fixture
def torchmetrics():
    prepare_torchvision()  # torchmetrics imports it
    return pytest.importorskip("torchmetrics.functional.classification")


@pytest.fixture
def predictions():
    labels = torch.randint(4, (300,))
    logits = torch.randn(5, 300, 4) + 1.5 * torch.nn.functional.one_hot(labels, 4)
    return logits.softmax(-1), labels


def test_classification_equals_torchmetrics_and_scikit_learn(predictions, torchmetrics):
    members, labels = predictions
    mean = members.mean(0)
    found = scores.classification(members, labels, num_bins=12)
    assert found.accuracy == pytest.approx(
        float(torchmetrics.multiclass_accuracy(mean, labels, 4, average="micro"))
    )
    assert found.nll == pytest.approx(
        metrics.log_loss(labels, mean.double() / mean.double().sum(-1, True)), rel=1e-5
    )
    expected = torchmetrics.multiclass_calibration_error(
        mean, labels, 4, n_bins=12, norm="l1"
    )
    assert found.ece == pytest.approx(float(expected), abs=1e-6)
    one_hot = torch.nn.functional.one_hot(labels, 4)
    assert found.brier == pytest.approx(
        float(((mean - one_hot) ** 2).sum(-1).mean()), abs=1e-6
    )
    assert found.uncertainty["mutual_information"] == pytest.approx(
        float(mutual_information(members).mean())
    )
    assert found.uncertainty["entropy"] == pytest.approx(
        float(stats.entropy(mean.numpy(), axis=-1).mean()), abs=1e-6
    )


def test_adaptive_calibration_error_equals_a_loop_over_equal_counts(predictions):
    members, labels = predictions
    mean = members.mean(0).double().numpy()
    order = np.argsort(mean.max(-1), kind="stable")
    gap = ((mean.argmax(-1) == labels.numpy()) - mean.max(-1))[order]
    expected = sum(
        len(part) / 300 * abs(part.mean()) for part in np.array_split(gap, 15)
    )
    assert scores.classification(members, labels).adaptive_ece == pytest.approx(
        expected, abs=1e-6
    )


def test_sure_and_right_is_perfect_sure_and_wrong_is_worst():
    sure = torch.eye(3)
    right, wrong = (
        scores.classification(sure, torch.arange(3).roll(k)) for k in (0, 1)
    )
    assert (
        right.accuracy,
        right.nll,
        right.brier,
        right.ece,
        right.uncertainty["entropy"],
    ) == (1, 0, 0, 0, 0)
    assert (wrong.accuracy, wrong.brier, wrong.ece) == (0, 2, 1)
    assert wrong.nll == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))


def test_detection_equals_scikit_learn_and_torchmetrics_with_positive_out_of_distribution(
    predictions, torchmetrics
):
    members, labels = predictions
    ood = (0.3 * torch.randn(5, 200, 4)).softmax(-1)  # less sure than inside
    found = scores.classification(members, labels, ood)
    uncertainty = torch.cat([1 - p.mean(0).double().amax(-1) for p in (members, ood)])
    positive = torch.cat([torch.zeros(300), torch.ones(200)]).long()
    largest = found.detection["maximum_probability"]
    assert largest.auroc == pytest.approx(
        float(torchmetrics.binary_auroc(uncertainty, positive)), abs=1e-6
    )
    assert largest.aupr == pytest.approx(
        float(torchmetrics.binary_average_precision(uncertainty, positive)), abs=1e-6
    )
    assert largest.auroc > 0.5  # wrong sign fails
    outside = uncertainty[300:].sort(descending=True).values
    threshold = outside[math.ceil(0.95 * 200) - 1]
    assert largest.fpr95 == pytest.approx(
        float((uncertainty[:300] >= threshold).float().mean())
    )
    information = torch.cat([mutual_information(members), mutual_information(ood)])
    by_information = found.detection["mutual_information"]
    assert by_information.auroc == pytest.approx(
        metrics.roc_auc_score(positive, information)
    )
    assert found.uncertainty_ood["mutual_information"] == pytest.approx(
        float(information[300:].mean())
    )


def test_fpr95_is_taken_where_exactly_95_percent_are_flagged():
    inside = torch.linspace(0, 1, 10)
    # one of twenty looks the surest of all
    outside = torch.cat([torch.full((19,), 2.0), torch.tensor([-1.0])])
    assert scores.detect(inside, outside).fpr95 == 0
    assert (
        scores.detect(
            inside, torch.cat([outside[:-2], outside[-1:], outside[-1:]])
        ).fpr95
        == 1
    )


def test_log_density_is_that_of_the_mixture():
    means, scale, targets = torch.randn(4, 30, 1), torch.rand(4) + 0.5, torch.randn(30)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(30, 4)),
        torch.distributions.Normal(
            means[..., 0].T.double(), scale.double().expand(30, 4)
        ),
    )
    found = scores.regression(means, scale, targets)
    assert found.log_predictive_density == pytest.approx(
        float(mixture.log_prob(targets.double()).mean())
    )
    assert found.rmse == pytest.approx(
        metrics.root_mean_squared_error(targets, means.mean(0)[:, 0]), rel=1e-6
    )
    assert found.mae == pytest.approx(
        metrics.mean_absolute_error(targets, means.mean(0)[:, 0]), rel=1e-6
    )


def test_several_outputs_are_joint_given_the_member():
    means, targets = torch.randn(3, 10, 2).double(), torch.randn(10, 2).double()
    each = torch.distributions.Normal(means, 0.7).log_prob(targets).sum(-1)
    expected = (each.logsumexp(0) - math.log(3)).mean()
    assert scores.regression(
        means, 0.7, targets
    ).log_predictive_density == pytest.approx(float(expected))


def test_coverage_of_a_mixture_is_that_of_its_own_quantiles():
    means, targets = (
        torch.tensor([-2.0, 3.0])[:, None, None].expand(2, 200, 1),
        3 * torch.randn(200),
    )
    grid = np.linspace(-15, 15, 200_001)
    cdf = 0.5 * (stats.norm.cdf(grid, -2) + stats.norm.cdf(grid, 3))
    low, high = np.interp([0.1, 0.9], cdf, grid)
    expected = ((targets.numpy() >= low) & (targets.numpy() <= high)).mean()
    assert scores.regression(means, 1.0, targets).coverage[0.8] == pytest.approx(
        expected
    )


@pytest.mark.stochastic
def test_a_right_model_is_calibrated_and_a_sure_one_is_not():
    # 20,000 targets: the coverage's deviation is at most 0.0036; five of them: false
    # alarm under 1e-5 over 19 levels
    means = torch.randn(20_000)
    targets = means + 0.5 * torch.randn(20_000)
    right = scores.regression(means[:, None], 0.5, targets)
    assert (
        float(max(abs(share - level) for level, share in right.coverage.items()))
        < 0.018
    )
    sure = scores.regression(means[:, None], 0.1, targets)
    assert all(share < level for level, share in sure.coverage.items())
    assert sure.calibration_error > 0.2
    assert sure.log_predictive_density < right.log_predictive_density


@pytest.mark.parametrize("outputs", [1, 2])
def test_all_kinds_of_predictions_have_one_shape_which_scores_take_as_they_are(outputs):
    model, x = (
        ps.BayesianModel(nn.Linear(3, outputs), likelihood=ps.GaussianLikelihood(0.5)),
        torch.randn(5, 3),
    )
    weights = {name: prior.sample((4,)) for name, prior in model.priors().items()}
    for kind in ("outputs", "mean", "samples"):
        found = ps.predict(weights, model, x, kind=kind, progress=False)
        assert found.shape == (4, 5, outputs)
        scores.regression(
            found, 0.5, torch.randn(5) if outputs == 1 else torch.randn(5, 2)
        )


def test_mutual_information_equals_its_definition_as_a_divergence():
    # I = mean over members of KL(p_s || mean), another formula than the difference of
    # entropies
    p = torch.randn(5, 7, 3, dtype=torch.float64).softmax(-1)
    divergence = (p * (p.log() - p.mean(0).log())).sum(-1).mean(0)
    torch.testing.assert_close(mutual_information(p), divergence)


def test_pairs_equal_a_naive_loop_over_pairs():
    p = torch.randn(6, 9, 4).mul(2).softmax(-1)
    found = pairwise_mutual_information(p)
    for i in range(6):
        for j in range(6):
            expected = float(mutual_information(p[[i, j]]).mean())
            assert float(found[i, j]) == pytest.approx(expected, abs=1e-7)
    assert torch.equal(found, found.T)


def test_collapse_equals_the_correlation_over_pairs_in_scipy():
    within, outside = (torch.randn(7, n, 3).mul(2).softmax(-1) for n in (5, 8))
    found = functional_collapse(within, outside)
    rows, columns = np.triu_indices(7, 1)
    x, y = (
        pairwise_mutual_information(p).numpy()[rows, columns] for p in (within, outside)
    )
    np.testing.assert_array_equal([found.within, found.outside], [x, y])
    assert found.correlation == pytest.approx(pearsonr(x, y).statistic)
    assert found.rank_correlation == pytest.approx(spearmanr(x, y).statistic)


def test_copies_of_one_member_have_collapsed():
    p = torch.randn(1, 6, 3).softmax(-1).expand(4, -1, -1)
    found = functional_collapse(p, p)
    assert float(torch.cat([found.within, found.outside]).max()) < 1e-6
    assert math.isnan(found.correlation)
    with pytest.raises(ValueError, match="holds 4 members and ood_probabilities 3"):
        functional_collapse(p, p[:3])


NORMAL = torch.distributions.Normal(0.0, 1.0)


def total_variation(p, q):
    """Of each input."""
    return compare.total_variation(p, q).each


def test_of_two_classifiers_it_is_the_most_that_an_event_s_probabilities_differ_by():
    p, q = torch.rand(2, 7, 4, dtype=torch.float64).softmax(-1)
    events = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 4)
    torch.testing.assert_close(
        total_variation(p, q), ((p - q) @ events.T).abs().amax(-1)
    )


def test_members_count_by_their_mean_whatever_their_number():
    p, q = torch.rand(5, 6, 3).softmax(-1), torch.rand(9, 6, 3).softmax(-1)
    expected = (p.double().mean(0) - q.double().mean(0)).abs().sum(-1) / 2
    torch.testing.assert_close(total_variation(p, q), expected)
    torch.testing.assert_close(
        total_variation(p, p[torch.randperm(5)]), torch.zeros(6, dtype=torch.float64)
    )


@pytest.mark.parametrize("gap", [0.0, 0.01, 0.5, 1.0, 3.0, 20.0])
def test_of_gaussians_of_one_scale_it_is_the_closed_form(gap):
    """2 Φ(|gap| / 2) - 1, in units of the scale; from below."""
    means = torch.tensor([[-3.0], [100.0]], dtype=torch.float64)
    found = total_variation(
        (means, 0.2),
        (means + torch.tensor([[0.2], [-0.2]], dtype=torch.float64) * gap, 0.2),
    )
    exact = 2 * float(NORMAL.cdf(torch.tensor(gap / 2, dtype=torch.float64))) - 1
    assert float((exact - found).max()) < (1e-4 if gap < 5 else 0.002)
    assert float((exact - found).min()) > -1e-9


@pytest.mark.parametrize("scale", [0.05, 0.9, 1.1, 7.0])
def test_of_gaussians_of_one_mean_it_is_the_closed_form(scale):
    """The densities cross at ±x, x² = 2 s² ln s / (s² - 1)."""
    found = total_variation((torch.zeros(1, 1), 1.0), (torch.zeros(1, 1), scale))
    x = math.sqrt(2 * scale**2 * math.log(scale) / (scale**2 - 1))
    inside = [
        2 * float(NORMAL.cdf(torch.tensor(x / s, dtype=torch.float64))) - 1
        for s in (1.0, scale)
    ]
    assert float(found) == pytest.approx(abs(inside[0] - inside[1]), abs=2e-4)


def test_of_mixtures_it_is_what_quadrature_gives():
    m, n = (
        1.5 * torch.randn(30, 4, dtype=torch.float64),
        torch.randn(50, 4, dtype=torch.float64) + 0.5,
    )
    s, t = (
        0.2 + torch.rand(30, dtype=torch.float64),
        0.2 + torch.rand(50, dtype=torch.float64),
    )
    grid = torch.linspace(-20, 20, 20_001, dtype=torch.float64)

    def density(means, scale):
        law = torch.distributions.Normal(means[..., None], scale[:, None, None])
        return law.log_prob(grid).exp().mean(0)

    expected = torch.trapezoid((density(m, s) - density(n, t)).abs(), grid) / 2
    torch.testing.assert_close(
        total_variation((m[..., None], s), (n[..., None], t)),
        expected,
        atol=1e-3,
        rtol=0,
    )
    assert (
        float(
            total_variation(
                (m[..., None], s), (m[torch.arange(29, -1, -1), :, None], s.flip(0))
            ).max()
        )
        < 1e-12
    )


def test_marginals_of_several_outputs_are_averaged():
    m, n = torch.randn(3, 5, 2), torch.randn(4, 5, 2)
    each = [
        total_variation((m[..., k : k + 1], 0.5), (n[..., k : k + 1], 0.7))
        for k in range(2)
    ]
    torch.testing.assert_close(
        total_variation((m, 0.5), (n, 0.7)), (each[0] + each[1]) / 2
    )


def test_many_members_with_little_noise_lie_as_far_apart_as_a_fine_grid_has_it() -> (
    None
):
    """To three thousandths, and from below; with a warning if bins as fine as they get
    still matter.
    """
    noise = 0.01
    p, q = torch.randn(2, 500, dtype=torch.float64)
    edges = torch.arange(-6, 6, noise / 8, dtype=torch.float64)
    below = [
        torch.special.ndtr((edges[:, None] - side) / noise).mean(1) for side in (p, q)
    ]
    expected = float((below[0].diff() - below[1].diff()).abs().sum() / 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = ps.total_variation(
            (p[:, None, None], noise), (q[:, None, None], noise)
        ).value
    assert expected - 0.003 < found < expected + 1e-6


def test_members_in_a_regular_order_are_all_seen() -> None:
    """Modes at 0 and 10 against modes at 3 and 10, in alternation: half of the total
    variation of the first two.
    """
    p = torch.tensor([0.0, 10.0], dtype=torch.float64).repeat(64)
    q = torch.tensor([3.0, 10.0], dtype=torch.float64).repeat(64)
    expected = 0.5 * (2 * float(NORMAL.cdf(torch.tensor(1.5, dtype=torch.float64))) - 1)
    assert ps.total_variation(
        (p[:, None, None], 1.0), (q[:, None, None], 1.0)
    ).value == pytest.approx(expected, abs=1e-3)


def test_a_confidence_on_an_edge_is_in_the_bin_above():
    members = torch.tensor([[[0.5, 0.3, 0.2], [0.4, 0.3, 0.3], [1.0, 0.0, 0.0]]])
    found = scores.classification(members, torch.tensor([0, 0, 0]), num_bins=2)
    assert found.calibration.count.tolist() == [1, 2]
