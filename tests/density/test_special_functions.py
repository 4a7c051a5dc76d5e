"""Arithmetic for lgamma and digamma against SciPy."""

import numpy as np
import pytest
import scipy.special
import torch

from pyro_symmetric.density.special_functions import digamma, lgamma


@pytest.mark.parametrize(
    ("function", "exact"),
    [(lgamma, scipy.special.gammaln), (digamma, scipy.special.digamma)],
)
def test_errors_are_at_most_1e6_of_the_value_on_the_whole_line(function, exact):
    positive = torch.logspace(-30, 30, 60_001)
    negative = -torch.logspace(-6, 2, 8_001)
    near = torch.linspace(0.5, 6, 20_001)
    x = torch.cat([positive, near, negative])
    x = x[np.isfinite(exact(x.double().numpy()))]  # without poles
    expected = exact(x.double().numpy())
    found = function(x).double().numpy()
    error = np.abs(found - expected) / (1 + np.abs(expected))
    assert error.max() < 1.4e-6
    assert function(x.double()) is NotImplemented


def test_ends_of_the_line_are_those_of_pytorch():
    x = torch.tensor([0.0, torch.inf, torch.nan])
    for function in (lgamma, digamma):
        expected = getattr(torch, function.__name__)(x)
        torch.testing.assert_close(function(x), expected, equal_nan=True)
