"""Data that don't fit a network are named before the chains meet them."""

import pytest
import torch
from torch import nn

from pyro_symmetric.mcmc.density.density import Density
from pyro_symmetric.mcmc.density.eager import require_data
from pyro_symmetric.models import BayesianModel, GaussianLikelihood

X, LABELS = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])


def classifier(**options):
    return BayesianModel(nn.Sequential(nn.Linear(4, 3)), **options)


def regression(outputs):
    return BayesianModel(nn.Linear(4, outputs), likelihood=GaussianLikelihood(0.5))


@pytest.mark.parametrize(
    ("model", "x", "y", "error", "message"),
    [
        (classifier(), X, LABELS[:5], ValueError, "x has 6 rows but y has 5"),
        (classifier(), X[:, :2], LABELS, RuntimeError, "shapes cannot be multiplied"),
        (BayesianModel(nn.Linear(4, 1)), X, LABELS % 2, ValueError, "one output.*at least 2"),
        (classifier(), X, LABELS.float(), ValueError, r"pass y.long\(\)"),
        (classifier(), X, LABELS + 1, ValueError, "labels from 1 to 3, but the network has 3 outputs"),
        (classifier(), X, LABELS * -100, ValueError, "labels from -200 to 0"),
        (regression(1), X, torch.full((6,), torch.nan), ValueError, "y holds NaN"),
        (regression(2), X, torch.randn(6), ValueError, r"outputs \(6, 2\) it must have shape \(6, 2\)"),
    ],
)
def test_what_does_not_fit_is_named(model, x, y, error, message):
    with pytest.raises(error, match=message):
        require_data(model, x, y)


def test_labels_of_any_whole_kind_have_the_density_of_long_ones():
    z = torch.randn(2, 15)
    expected = Density(classifier(), args=(X, LABELS)).energy(z)
    for y in (LABELS.int(), LABELS.to(torch.uint8)):
        assert torch.allclose(Density(classifier(), args=(X, y)).energy(z), expected)
    flags = LABELS > 0
    assert torch.allclose(
        Density(classifier(), args=(X, flags)).energy(z), Density(classifier(), args=(X, flags.long())).energy(z)
    )


def test_a_network_made_for_one_number_of_rows_is_asked_for_all_of_them():
    class AllAtOnce(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x.view(6, 4))

    require_data(BayesianModel(AllAtOnce()), X, LABELS)
