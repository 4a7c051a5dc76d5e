"""Arithmetic for lgamma and digamma against SciPy, and logsumexp against PyTorch."""

import contextlib

import numpy as np
import pytest
import scipy.special
import torch

from pyro_symmetric.density.special_functions import SharedExponentials, digamma, lgamma


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


@pytest.mark.parametrize("dim", [0, -1, (0, 2), (-2,)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_logarithms_of_sums_and_their_gradients_are_those_of_pytorch(dim, keepdim):
    """With and without the mode; also of numbers whose exponentials overflow, of terms
    that are 0, and of sums that are 0 or infinite, of which gradients aren't numbers.
    """
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)).double()
    x[1] *= 1e4
    x[2, :, 2:] = -torch.inf
    x[3] = -torch.inf
    values, gradients = [], []
    for mode in (contextlib.nullcontext(), SharedExponentials()):
        leaf = x.clone().requires_grad_()
        with mode:
            of_function = torch.logsumexp(leaf, dim, keepdim)
            of_method = leaf.logsumexp(dim, keepdim=keepdim)
        assert of_function.equal(of_method)
        with mode:
            named = torch.logsumexp(input=leaf, dim=dim, keepdim=keepdim)
            written = torch.empty_like(named).detach()
            torch.logsumexp(leaf.detach(), dim, keepdim, out=written)
        assert of_function.equal(named)
        torch.testing.assert_close(written, named.detach())
        finite = of_function.where(of_function.isfinite(), 0.0)
        gradients.append(torch.autograd.grad(finite.sin().sum(), leaf)[0].nan_to_num())
        values.append(of_function.detach())
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    exact = scipy.special.logsumexp(x.numpy(), dim, keepdims=keepdim)
    torch.testing.assert_close(values[1], torch.as_tensor(exact))
