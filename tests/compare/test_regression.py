import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.compare import scores


def test_log_density_is_that_of_the_mixture():
    means, scale, targets = torch.randn(4, 30, 1), torch.rand(4) + 0.5, torch.randn(30)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(30, 4)),
        torch.distributions.Normal(means[..., 0].T.double(), scale.double().expand(30, 4)),
    )
    found = scores.regression(means, scale, targets)
    assert found.log_predictive_density == pytest.approx(float(mixture.log_prob(targets.double()).mean()))
    assert found.rmse == pytest.approx(metrics.root_mean_squared_error(targets, means.mean(0)[:, 0]), rel=1e-6)
    assert found.mae == pytest.approx(metrics.mean_absolute_error(targets, means.mean(0)[:, 0]), rel=1e-6)


def test_several_outputs_are_joint_given_the_member():
    means, targets = torch.randn(3, 10, 2).double(), torch.randn(10, 2).double()
    each = torch.distributions.Normal(means, 0.7).log_prob(targets).sum(-1)
    expected = (each.logsumexp(0) - math.log(3)).mean()
    assert scores.regression(means, 0.7, targets).log_predictive_density == pytest.approx(float(expected))


def test_coverage_of_a_mixture_is_that_of_its_own_quantiles():
    means, targets = torch.tensor([-2.0, 3.0])[:, None, None].expand(2, 200, 1), 3 * torch.randn(200)
    grid = np.linspace(-15, 15, 200_001)
    cdf = 0.5 * (stats.norm.cdf(grid, -2) + stats.norm.cdf(grid, 3))
    low, high = np.interp([0.1, 0.9], cdf, grid)
    expected = ((targets.numpy() >= low) & (targets.numpy() <= high)).mean()
    assert scores.regression(means, 1.0, targets).coverage[0.8] == pytest.approx(expected)


@pytest.mark.stochastic
def test_a_right_model_is_calibrated_and_a_sure_one_is_not():
    # 20,000 targets: the coverage's deviation is at most 0.0036; five of them: false alarm under 1e-5 over 19 levels
    means = torch.randn(20_000)
    targets = means + 0.5 * torch.randn(20_000)
    right = scores.regression(means[:, None], 0.5, targets)
    assert float(max(abs(share - level) for level, share in right.coverage.items())) < 0.018
    sure = scores.regression(means[:, None], 0.1, targets)
    assert all(share < level for level, share in sure.coverage.items())
    assert sure.calibration_error > 0.2
    assert sure.log_predictive_density < right.log_predictive_density


@pytest.mark.parametrize("outputs", [1, 2])
def test_all_kinds_of_predictions_have_one_shape_which_scores_take_as_they_are(outputs):
    model, x = ps.BayesianModel(nn.Linear(3, outputs), likelihood=ps.GaussianLikelihood(0.5)), torch.randn(5, 3)
    weights = {name: prior.sample((4,)) for name, prior in model.priors().items()}
    for kind in ("outputs", "mean", "samples"):
        found = ps.predict(weights, model, x, kind=kind, progress=False)
        assert found.shape == (4, 5, outputs)
        scores.regression(found, 0.5, torch.randn(5) if outputs == 1 else torch.randn(5, 2))
