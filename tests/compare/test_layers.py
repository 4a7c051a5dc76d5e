import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric.compare.layers import PairedSamples


def test_running_statistics_are_no_weights_unless_they_are_named():
    weights = {"1.weight": torch.randn(5, 3), "1.running_mean": torch.randn(5, 3), "1.running_var": torch.rand(5, 3)}
    assert PairedSamples(weights, weights).layers == {"1": ("1.weight",)}
    assert PairedSamples(weights, {"1.weight": weights["1.weight"]}).num_weights("1") == 3  # an ensemble and a guide


@pytest.mark.parametrize("function", [ps.mmd, ps.mmd_test, ps.marginal_wasserstein])
@pytest.mark.parametrize("shape", [(3, 2), ()])
def test_chains_and_draws_in_a_dictionary_are_refused(function, shape):
    draws = {"0.weight": torch.randn(4, 50, *shape), "0.bias": torch.randn(4, 50), "2.bias": torch.randn(4, 50)}
    with pytest.raises(ValueError, match="4 samples, and all sites an axis of size 50 next: if these are chains"):
        function(draws, draws)
    known = ps.Posterior(draws, kind="independent")
    assert function(known, known).num_samples == (200, 200)
