import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.compare.layers import PairedSamples, group_sites


def test_sites_that_agree_up_to_the_last_dot_form_a_layer():
    found = group_sites(["net.0.weight", "net.0.bias", "net.2.weight", "noise_scale"])
    assert found == {
        "net.0": ("net.0.weight", "net.0.bias"),
        "net.2": ("net.2.weight",),
        "noise_scale": ("noise_scale",),
    }


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"a": ("x", "nowhere")}, r"\['nowhere'\], which the weights lack"),
        ({"a": ("x",), "b": ("x",)}, r"\['x'\] more than once"),
        ({"a": ()}, "at least one site"),
        ({}, "at least one site"),
    ],
)
def test_wrong_layers_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        group_sites(["x", "y"], layers)


def test_every_weight_comes_once_whatever_the_chunk():
    weights = {"0.weight": torch.randn(4, 3, 2), "0.bias": torch.randn(4, 3)}
    samples = PairedSamples(weights, weights)
    whole = torch.cat([weights["0.weight"].reshape(4, -1), weights["0.bias"]], dim=1)
    for chunk in (1, 4, 100):
        parts = list(samples.columns("0", chunk))
        assert torch.equal(torch.cat([p for p, _ in parts], dim=1), whole)
        assert max(p.shape[1] for p, _ in parts) <= chunk


def test_half_precision_is_widened_before_distances_are_taken():
    weights = {"w": torch.randn(4, 3).bfloat16()}
    ((p, _),) = PairedSamples(weights, weights).columns("w", 10)
    assert p.dtype == torch.float32


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ({"a": torch.zeros(3, 2)}, {"b": torch.zeros(3, 2)}, r"only in weights_p: \['a'\]"),
        ({"a": torch.zeros(3, 2)}, {"a": torch.zeros(3, 4)}, r"\(3, 2\) in weights_p and \(3, 4\) in weights_q"),
        ({"a": torch.zeros(2, 3, 2)}, {"a": torch.zeros(6, 2)}, "pass a Posterior"),
        ({"a": torch.tensor(1.0)}, {"a": torch.zeros(6)}, "site shape"),
        ({"a": torch.zeros(3, 2), "b": torch.zeros(4, 2)}, {"a": torch.zeros(3, 2), "b": torch.zeros(3, 2)}, "batch"),
        ({}, {}, "weights_p is empty"),
    ],
)
def test_weights_that_do_not_fit_are_refused(p, q, message):
    with pytest.raises(ValueError, match=message):
        PairedSamples(p, q)


def test_integer_weights_are_refused():
    weights = {"a": torch.zeros(3, 2, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"weights_p\['a'\] has dtype torch.int64"):
        PairedSamples(weights, weights).matrices("a")


def test_a_posterior_is_compared_as_its_draws():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    symmetry = ps.find_symmetry(net, torch.randn(2, 2))
    chains = [{name: torch.randn(2, 6, *p.shape) for name, p in net.named_parameters()} for _ in range(2)]
    first, second = (ps.Posterior(samples, rows="independent") for samples in chains)
    flat = [{name: value.flatten(0, 1) for name, value in samples.items()} for samples in chains]
    assert ps.mmd(first, second)["median"] == ps.mmd(*flat)["median"]
    assert ps.marginal_wasserstein(first, flat[1]).to_dict() == ps.marginal_wasserstein(*flat).to_dict()
    assert torch.equal(ps.excess_mass(first, symmetry), ps.excess_mass(flat[0], symmetry))
    found = []
    whole = ps.Posterior.from_samples(flat[0], rows="independent")
    for weights, group in ((first, symmetry), (whole, symmetry.permutations)):
        torch.manual_seed(1)  # of the null distribution that it simulates
        found.append(ps.invariance_tests(weights, group).to_dict())
    assert found[0] == found[1]


def test_running_statistics_are_no_weights_unless_they_are_named():
    weights = {"1.weight": torch.randn(5, 3), "1.running_mean": torch.randn(5, 3), "1.running_var": torch.rand(5, 3)}
    assert PairedSamples(weights, weights).sites == ("1.weight",)
    assert PairedSamples(weights, {"1.weight": weights["1.weight"]}).num_weights("1") == 3  # an ensemble and a guide
    named = PairedSamples(weights, weights, {"1": ("1.weight", "1.running_mean")})
    assert named.num_weights("1") == 6


def test_a_distance_of_batch_normalised_networks_ignores_the_scale_of_their_inputs():
    weights = {"1.weight": torch.randn(20, 3), "1.running_var": torch.rand(20, 3)}
    other = {**weights, "1.running_var": 100 * weights["1.running_var"]}
    assert ps.mmd(weights, other)["maximum"] == ps.mmd(weights, weights)["maximum"]


def test_what_is_no_weights_is_named():
    weights = {"w": torch.randn(5, 3)}
    with pytest.raises(TypeError, match="weights_p are a list; they must be a Posterior"):
        ps.mmd([weights], weights)
    with pytest.raises(ValueError, match="hold running statistics only"):
        ps.mmd({"1.running_var": torch.ones(5, 2)}, {"1.running_var": torch.ones(5, 2)})


def test_chains_and_draws_that_are_not_flattened_are_warned_of():
    draws = {"0.weight": torch.randn(4, 50, 3, 2), "0.bias": torch.randn(4, 50, 3), "2.bias": torch.randn(4, 50, 2)}
    with pytest.warns(UserWarning, match="4 samples, and all sites an axis of size 50 next; if these are chains"):
        ps.mmd(draws, draws)
    chains = ps.Posterior(draws, rows="chains")
    assert ps.mmd(chains, chains).num_samples == (200, 200)
