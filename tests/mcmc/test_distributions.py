"""Every distribution of Pyro, observed and latent: energies and gradients of three chains equal plain PyTorch's."""

import pytest
import torch

from benchmarks.distribution_cases import ABSTRACT, CASES
from benchmarks.distributions import ROLES, checked, exported

ALONE = {  # which PyTorch can't map over chains
    "NanMaskedMultivariateNormal": ROLES,
    "SineBivariateVonMises": ROLES,
    "SineSkewed": ROLES,
    "Stable": ROLES,
    "StableWithLogProb": ROLES,
    "TransformedDistribution (spline flow)": ("latent",),
    "Wishart": ROLES,
}
# Latent sites that are refused, by what they are told.
REFUSED = {
    "CoalescentTimes": "can't be mapped",
    "CoalescentTimesWithRate": "can't be mapped",
    "Delta": "use pyro.deterministic",
    "DirichletMultinomial": "can't list its values",
    "Empirical": "don't add up to 1",
    "GammaPoisson": "can't list its values",
    "GaussianScaleMixture": "can't be mapped",
    "Geometric": "can't list its values",
    "GroupedNormalNormal": "log_prob only supports values",
    "LinearHMM": "isn't known",
    "LogNormalNegativeBinomial": "can't list its values",
    "Multinomial": "can't list its values",
    "NegativeBinomial": "can't list its values",
    "Poisson": "can't list its values",
    "ProjectedNormal": "can't be mapped",
    "VonMises3D": "can't be mapped",
    "Wishart": "can't be mapped",
    "ZeroInflatedDistribution": "can't list its values",
    "ZeroInflatedNegativeBinomial": "can't list its values",
    "ZeroInflatedPoisson": "can't list its values",
}
# They, or their cases, make constants on the default device, whatever that of their parameters.
ON_THE_CPU = {
    "CoalescentTimes",
    "CoalescentTimesWithRate",
    "DiscreteHMM",
    "GammaGaussianHMM",
    "GaussianHMM",
    "GaussianMRF",
    "GroupedNormalNormal",
    "Multinomial",
    "NanMaskedMultivariateNormal",
    "NanMaskedNormal",
    "OneOneMatching",
    "OneTwoMatching",
    "OrderedLogistic",
    "SpanningTree",
    "Stable",
    "StableWithLogProb",
}
REFUSED_AS_DATA = {"GaussianScaleMixture": "inplace operation", "LinearHMM": "isn't known"}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_every_exported_distribution_has_a_case():
    assert set(exported()) == {name for name in CASES if "(" not in name} | set(ABSTRACT)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.cpu if n in ON_THE_CPU else ()) for n in CASES])
def test_energies_and_gradients_are_those_of_plain_pytorch(name, role):
    row = checked(CASES[name], role)
    refused = (REFUSED_AS_DATA if role == "observed" else REFUSED).get(name)
    if refused is not None:
        assert row.state == "refused"
        assert refused in row.why
    else:
        assert row.state == ("chain at a time" if role in ALONE.get(name, ()) else "works"), row.why
        assert row.error < 1e-8
