import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics

from pyro_symmetric.compare import mutual_information, scores
from pyro_symmetric.networks import prepare_torchvision

prepare_torchvision()  # torchmetrics imports it
torchmetrics = pytest.importorskip("torchmetrics.functional.classification")


@pytest.fixture
def predictions():
    labels = torch.randint(4, (300,))
    logits = torch.randn(5, 300, 4) + 1.5 * torch.nn.functional.one_hot(labels, 4)
    return logits.softmax(-1), labels


def test_classification_equals_torchmetrics_and_scikit_learn(predictions):
    members, labels = predictions
    mean = members.mean(0)
    found = scores.classification(members, labels, num_bins=12)
    assert found.accuracy == pytest.approx(float(torchmetrics.multiclass_accuracy(mean, labels, 4, average="micro")))
    assert found.nll == pytest.approx(metrics.log_loss(labels, mean.double() / mean.double().sum(-1, True)), rel=1e-5)
    expected = torchmetrics.multiclass_calibration_error(mean, labels, 4, n_bins=12, norm="l1")
    assert found.ece == pytest.approx(float(expected), abs=1e-6)
    one_hot = torch.nn.functional.one_hot(labels, 4)
    assert found.brier == pytest.approx(float(((mean - one_hot) ** 2).sum(-1).mean()), abs=1e-6)
    assert found.uncertainty["mutual_information"] == pytest.approx(float(mutual_information(members).mean()))
    assert found.uncertainty["entropy"] == pytest.approx(float(stats.entropy(mean.numpy(), axis=-1).mean()), abs=1e-6)


def test_adaptive_calibration_error_equals_a_loop_over_equal_counts(predictions):
    members, labels = predictions
    mean = members.mean(0).double().numpy()
    order = np.argsort(mean.max(-1), kind="stable")
    gap = ((mean.argmax(-1) == labels.numpy()) - mean.max(-1))[order]
    expected = sum(len(part) / 300 * abs(part.mean()) for part in np.array_split(gap, 15))
    assert scores.classification(members, labels).adaptive_ece == pytest.approx(expected, abs=1e-6)


def test_sure_and_right_is_perfect_sure_and_wrong_is_worst():
    sure = torch.eye(3)
    right, wrong = (scores.classification(sure, torch.arange(3).roll(k)) for k in (0, 1))
    assert (right.accuracy, right.nll, right.brier, right.ece, right.uncertainty["entropy"]) == (1, 0, 0, 0, 0)
    assert (wrong.accuracy, wrong.brier, wrong.ece) == (0, 2, 1)
    assert wrong.nll == pytest.approx(-math.log(torch.finfo(torch.float32).tiny))


def test_detection_equals_scikit_learn_and_torchmetrics_with_positive_out_of_distribution(predictions):
    members, labels = predictions
    ood = (0.3 * torch.randn(5, 200, 4)).softmax(-1)  # less sure than inside
    found = scores.classification(members, labels, ood)
    uncertainty = torch.cat([1 - p.mean(0).double().amax(-1) for p in (members, ood)])
    positive = torch.cat([torch.zeros(300), torch.ones(200)]).long()
    largest = found.detection["maximum_probability"]
    assert largest.auroc == pytest.approx(float(torchmetrics.binary_auroc(uncertainty, positive)), abs=1e-6)
    assert largest.aupr == pytest.approx(float(torchmetrics.binary_average_precision(uncertainty, positive)), abs=1e-6)
    assert largest.auroc > 0.5  # wrong sign fails
    outside = uncertainty[300:].sort(descending=True).values
    threshold = outside[math.ceil(0.95 * 200) - 1]
    assert largest.fpr95 == pytest.approx(float((uncertainty[:300] >= threshold).float().mean()))
    information = torch.cat([mutual_information(members), mutual_information(ood)])
    by_information = found.detection["mutual_information"]
    assert by_information.auroc == pytest.approx(metrics.roc_auc_score(positive, information))
    assert found.uncertainty_ood["mutual_information"] == pytest.approx(float(information[300:].mean()))


def test_fpr95_is_taken_where_exactly_95_percent_are_flagged():
    inside = torch.linspace(0, 1, 10)
    outside = torch.cat([torch.full((19,), 2.0), torch.tensor([-1.0])])  # one of twenty looks the surest of all
    assert scores.detect(inside, outside).fpr95 == 0
    assert scores.detect(inside, torch.cat([outside[:-2], outside[-1:], outside[-1:]])).fpr95 == 1
