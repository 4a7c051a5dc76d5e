"""Every distribution that Pyro exports, made from real numbers ``t``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import transforms
from torch import Tensor

Make = Callable[[Tensor], Any]


@dataclass(frozen=True)
class Case:
    """A distribution whose parameters are functions of ``size`` real numbers.

    :param value: an observed value, if the distribution can't draw one.
    :param moving: whether its support moves with its parameters: a latent site gets constant ones then.
    """

    make: Make
    size: int = 3
    value: Tensor | None = None
    moving: bool = False


ABSTRACT = {
    "ExponentialFamily": "a base class",
    "TorchDistribution": "a base class",
    "Rejector": "tested through the distributions of PyTorch that it stands for; it takes functions, not numbers",
}
"""What is exported, but is no distribution of its own."""


def _eye(size: int) -> Tensor:
    return torch.eye(size)


def _gaussian(size: int, scale: Any = 1.0) -> Any:
    return dist.MultivariateNormal(torch.zeros(size), scale * _eye(size))


def _tril(t: Tensor) -> Tensor:
    """A Cholesky factor ``(2, 2)`` of three numbers."""
    return torch.stack([torch.stack([t[0].exp(), torch.zeros_like(t[0])]), torch.stack([t[1], t[2].exp()])])


def _matching_logits(t: Tensor) -> Tensor:
    return t[:3, None] * torch.tensor([0.5, -1.0, 2.0]) + t[:3].sin()


@functools.cache
def _flow() -> Any:
    flow = transforms.Spline(1, count_bins=4, bound=3.0).double()
    with torch.no_grad():
        for parameter in flow.parameters():  # which begin at random
            parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).reshape(parameter.shape))
    return flow


def _spline(t: Tensor) -> Any:
    return dist.TransformedDistribution(dist.Normal(t[:1], t[1:2].exp()).to_event(1), [_flow()])


def _affine(t: Tensor) -> Any:
    return dist.TransformedDistribution(dist.Normal(t[0], 1.0), [transforms.AffineTransform(t[1], t[2].exp())])


def _lower(t: Tensor) -> Tensor:
    return torch.stack([t[0], t[0] + t[1].exp()])


_TIMES = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
_HMM = (
    torch.tensor([0.6, 0.4], dtype=torch.float64).log(),
    torch.tensor([[0.8, 0.2], [0.3, 0.7]], dtype=torch.float64).log(),
)

CASES: dict[str, Case] = {
    "AVFMultivariateNormal": Case(lambda t: dist.AVFMultivariateNormal(t[:2], _tril(t), torch.full((2, 1, 2), 0.1))),
    "AffineBeta": Case(lambda t: dist.AffineBeta(t[0].exp(), t[1].exp(), t[2], 2.0), moving=True),
    "AsymmetricLaplace": Case(lambda t: dist.AsymmetricLaplace(t[0], t[1].exp(), t[2].exp())),
    "Bernoulli": Case(lambda t: dist.Bernoulli(logits=t[0])),
    "Beta": Case(lambda t: dist.Beta(t[0].exp(), t[1].exp())),
    "BetaBinomial": Case(lambda t: dist.BetaBinomial(t[0].exp(), t[1].exp(), total_count=4)),
    "Binomial": Case(lambda t: dist.Binomial(4, logits=t[0])),
    "Categorical": Case(lambda t: dist.Categorical(logits=t)),
    "Cauchy": Case(lambda t: dist.Cauchy(t[0], t[1].exp())),
    "Chi2": Case(lambda t: dist.Chi2(t[0].exp())),
    "CoalescentTimes": Case(lambda t: dist.CoalescentTimes(_TIMES, t[0].exp()), value=torch.tensor([-1.0, 0.2])),
    "CoalescentTimesWithRate": Case(
        lambda t: dist.CoalescentTimesWithRate(torch.tensor([3.0, 3.5, 4.0]), t[0].exp().expand(5)),
        value=torch.tensor([0.5, 1.5]),
    ),
    "ContinuousBernoulli": Case(lambda t: dist.ContinuousBernoulli(logits=t[0])),
    "Delta": Case(lambda t: dist.Delta(torch.tensor(1.0), log_density=t[0]), value=torch.tensor(1.0)),
    "Dirichlet": Case(lambda t: dist.Dirichlet(t.exp())),
    "DirichletMultinomial": Case(lambda t: dist.DirichletMultinomial(t.exp(), 5)),
    "DiscreteHMM": Case(
        lambda t: dist.DiscreteHMM(_HMM[0] + t[2], _HMM[1], dist.Normal(t[:2], 1.0), duration=3),
        value=torch.tensor([0.3, -1.0, 0.5]),
    ),
    "Empirical": Case(
        lambda t: dist.Empirical(torch.tensor([1.0, 2.0, 3.0]), t.log_softmax(0)), value=torch.tensor(2.0)
    ),
    "ExpandedDistribution": Case(lambda t: dist.ExpandedDistribution(dist.Normal(t[0], t[1].exp()), torch.Size([2]))),
    "Exponential": Case(lambda t: dist.Exponential(t[0].exp())),
    "ExtendedBetaBinomial": Case(lambda t: dist.ExtendedBetaBinomial(t[0].exp(), t[1].exp(), torch.tensor(4))),
    "ExtendedBinomial": Case(lambda t: dist.ExtendedBinomial(torch.tensor(4), logits=t[0])),
    "FisherSnedecor": Case(lambda t: dist.FisherSnedecor(t[0].exp(), t[1].exp())),
    "FoldedDistribution": Case(lambda t: dist.FoldedDistribution(dist.Normal(t[0], t[1].exp()))),
    "Gamma": Case(lambda t: dist.Gamma(t[0].exp(), t[1].exp())),
    "GammaGaussianHMM": Case(
        lambda t: dist.GammaGaussianHMM(
            dist.Gamma(t[0].exp() + 1, 2.0),
            _gaussian(2),
            0.5 * _eye(2),
            _gaussian(2),
            t[1:3, None].expand(2, 1),
            _gaussian(1),
            duration=4,
        ),
        value=torch.tensor([[0.3], [-1.0], [0.5], [2.0]]),
    ),
    "GammaPoisson": Case(lambda t: dist.GammaPoisson(t[0].exp(), t[1].exp())),
    "GaussianHMM": Case(
        lambda t: dist.GaussianHMM(
            _gaussian(2), t[0] * _eye(2), _gaussian(2), t[1:3, None].expand(2, 1), _gaussian(1), duration=4
        )
    ),
    "GaussianMRF": Case(
        lambda t: dist.GaussianMRF(_gaussian(2), _gaussian(4, t[0].exp()).expand((4,)), _gaussian(3, t[1].exp())),
        value=torch.tensor([[0.3], [-1.0], [0.5], [2.0]]),
    ),
    "GaussianScaleMixture": Case(
        lambda t: dist.GaussianScaleMixture(t[:2].exp(), t[:2], t[1:3].exp()), value=torch.tensor([0.3, -1.0])
    ),
    "GeneralizedPareto": Case(lambda t: dist.GeneralizedPareto(t[0], t[1].exp(), t[2].sigmoid()), moving=True),
    "Geometric": Case(lambda t: dist.Geometric(logits=t[0])),
    "GroupedNormalNormal": Case(
        lambda t: dist.GroupedNormalNormal(t[:2], t[2].exp(), torch.tensor(1.0), torch.tensor([0, 0, 1, 1])),
        value=torch.tensor([0.3, -1.0, 0.5, 2.0]),
    ),
    "Gumbel": Case(lambda t: dist.Gumbel(t[0], t[1].exp())),
    "HalfCauchy": Case(lambda t: dist.HalfCauchy(t[0].exp())),
    "HalfNormal": Case(lambda t: dist.HalfNormal(t[0].exp())),
    "ImproperUniform": Case(lambda t: dist.ImproperUniform(dist.constraints.positive, (), ()), value=torch.tensor(0.4)),
    "Independent": Case(lambda t: dist.Independent(dist.Normal(t, 1.0), 1)),
    "IndependentHMM": Case(
        lambda t: dist.IndependentHMM(
            dist.GaussianHMM(
                _gaussian(1).expand((2,)),
                t[0].reshape(1, 1),
                _gaussian(1),
                t[1].reshape(1, 1),
                _gaussian(1),
                duration=4,
            )
        ),
        value=torch.tensor([[0.3, 0.1], [-1.0, 0.2], [0.5, 0.4], [2.0, 1.0]]),
    ),
    "InverseGamma": Case(lambda t: dist.InverseGamma(t[0].exp(), t[1].exp())),
    "Kumaraswamy": Case(lambda t: dist.Kumaraswamy(t[0].exp(), t[1].exp())),
    "LKJ": Case(lambda t: dist.LKJ(3, t[0].exp())),
    "LKJCholesky": Case(lambda t: dist.LKJCholesky(3, t[0].exp())),
    "LKJCorrCholesky": Case(lambda t: dist.LKJCorrCholesky(3, t[0].exp())),
    "Laplace": Case(lambda t: dist.Laplace(t[0], t[1].exp())),
    "LinearHMM": Case(
        lambda t: dist.LinearHMM(_gaussian(2), t[0] * _eye(2), _gaussian(2), _eye(2), _gaussian(2), duration=3),
        value=torch.zeros(3, 2),
    ),
    "LogNormal": Case(lambda t: dist.LogNormal(t[0], t[1].exp())),
    "LogNormalNegativeBinomial": Case(
        lambda t: dist.LogNormalNegativeBinomial(5.0, t[0], t[1].exp()), value=torch.tensor(3.0)
    ),
    "Logistic": Case(lambda t: dist.Logistic(t[0], t[1].exp())),
    "LogisticNormal": Case(lambda t: dist.LogisticNormal(t[:2], t[1:3].exp())),
    "LowRankMultivariateNormal": Case(lambda t: dist.LowRankMultivariateNormal(t, t[:, None], t.exp())),
    "MaskedDistribution": Case(lambda t: dist.Normal(t, 1.0).mask(torch.tensor([True, False, True])).to_event(1)),
    "MaskedMixture": Case(
        lambda t: dist.MaskedMixture(
            torch.tensor([True, False]), dist.Normal(t[0], 1.0).expand((2,)), dist.Cauchy(t[1], 2.0).expand((2,))
        )
    ),
    "MixtureOfDiagNormals": Case(
        lambda t: dist.MixtureOfDiagNormals(t[:, None].expand(3, 2), t[:, None].exp().expand(3, 2), t)
    ),
    "MixtureOfDiagNormalsSharedCovariance": Case(
        lambda t: dist.MixtureOfDiagNormalsSharedCovariance(t[:, None].expand(3, 2), t[:2].exp(), t)
    ),
    "MixtureSameFamily": Case(lambda t: dist.MixtureSameFamily(dist.Categorical(logits=t), dist.Normal(t, t.exp()))),
    "Multinomial": Case(lambda t: dist.Multinomial(5, logits=t)),
    "MultivariateNormal": Case(lambda t: dist.MultivariateNormal(t[:2], scale_tril=_tril(t))),
    "MultivariateStudentT": Case(lambda t: dist.MultivariateStudentT(t[0].exp() + 1, t[:2], _tril(t))),
    "NanMaskedMultivariateNormal": Case(
        lambda t: dist.NanMaskedMultivariateNormal(t[:2], _tril(t) @ _tril(t).mT),
        value=torch.tensor([0.3, torch.nan]),
    ),
    "NanMaskedNormal": Case(
        lambda t: dist.NanMaskedNormal(t[:2], t[2].exp()).to_event(1), value=torch.tensor([0.3, torch.nan])
    ),
    "NegativeBinomial": Case(lambda t: dist.NegativeBinomial(t[0].exp(), logits=t[1])),
    "Normal": Case(lambda t: dist.Normal(t[0], t[1].exp())),
    "OMTMultivariateNormal": Case(lambda t: dist.OMTMultivariateNormal(t[:2], _tril(t))),
    "OneHotCategorical": Case(lambda t: dist.OneHotCategorical(logits=t)),
    "OneHotCategoricalStraightThrough": Case(lambda t: dist.OneHotCategoricalStraightThrough(logits=t)),
    "OneOneMatching": Case(lambda t: dist.OneOneMatching(_matching_logits(t)), value=torch.tensor([1, 0, 2])),
    "OneTwoMatching": Case(
        lambda t: dist.OneTwoMatching(torch.cat([t, t.cos()])[:4, None] * torch.tensor([1.0, -1.0])),
        value=torch.tensor([1, 0, 1, 0]),
    ),
    "OrderedLogistic": Case(lambda t: dist.OrderedLogistic(t[2], _lower(t))),
    "Pareto": Case(lambda t: dist.Pareto(t[0].exp(), t[1].exp()), moving=True),
    "Poisson": Case(lambda t: dist.Poisson(t[0].exp())),
    "ProjectedNormal": Case(lambda t: dist.ProjectedNormal(t)),
    "RelaxedBernoulli": Case(lambda t: dist.RelaxedBernoulli(torch.tensor(0.7), logits=t[0])),
    "RelaxedBernoulliStraightThrough": Case(
        lambda t: dist.RelaxedBernoulliStraightThrough(torch.tensor(0.7), logits=t[0]), value=torch.tensor(0.4)
    ),
    "RelaxedOneHotCategorical": Case(lambda t: dist.RelaxedOneHotCategorical(torch.tensor(0.7), logits=t)),
    "RelaxedOneHotCategoricalStraightThrough": Case(
        lambda t: dist.RelaxedOneHotCategoricalStraightThrough(torch.tensor(0.7), logits=t),
        value=torch.tensor([0.2, 0.5, 0.3]),
    ),
    "SineBivariateVonMises": Case(
        lambda t: dist.SineBivariateVonMises(t[0], t[1], t[2].exp() + 1, t[2].exp() + 2, correlation=0.3),
        value=torch.tensor([0.4, -1.0]),
    ),
    "SineSkewed": Case(
        lambda t: dist.SineSkewed(dist.VonMises(t[:2], t[2].exp()).to_event(1), 0.4 * t[:2].tanh()),
        value=torch.tensor([0.4, -1.0]),
    ),
    "SkewLogistic": Case(lambda t: dist.SkewLogistic(t[0], t[1].exp(), t[2].exp())),
    "SoftAsymmetricLaplace": Case(lambda t: dist.SoftAsymmetricLaplace(t[0], t[1].exp(), t[2].exp())),
    "SoftLaplace": Case(lambda t: dist.SoftLaplace(t[0], t[1].exp())),
    "SpanningTree": Case(lambda t: dist.SpanningTree(t), value=torch.tensor([[0, 1], [0, 2]])),
    "Stable": Case(lambda t: dist.Stable(1 + t[0].sigmoid(), t[1].tanh(), t[2].exp(), 0.0), value=torch.tensor(0.3)),
    "StableWithLogProb": Case(
        lambda t: dist.StableWithLogProb(1.1 + 0.8 * t[0].sigmoid(), t[1].tanh(), t[2].exp(), 0.0),
        value=torch.tensor(0.3),
    ),
    "StudentT": Case(lambda t: dist.StudentT(t[2].exp(), t[0], t[1].exp())),
    "TransformedDistribution": Case(_affine),
    "TransformedDistribution (spline flow)": Case(_spline),
    "TruncatedPolyaGamma": Case(lambda t: dist.TruncatedPolyaGamma(t.new_empty(())), value=torch.tensor(0.4)),
    "Uniform": Case(lambda t: dist.Uniform(t[0] - 5, t[0] + 5 + t[1].exp()), value=torch.tensor(0.2), moving=True),
    "Unit": Case(lambda t: dist.Unit(t[0]), value=torch.zeros(0)),
    "VonMises": Case(lambda t: dist.VonMises(t[0], t[1].exp())),
    "VonMises3D": Case(lambda t: dist.VonMises3D(t), value=torch.tensor([0.6, 0.0, 0.8])),
    "Weibull": Case(lambda t: dist.Weibull(t[0].exp(), t[1].exp())),
    "Wishart": Case(lambda t: dist.Wishart(t[0].exp() + 3, scale_tril=_tril(t))),
    "ZeroInflatedDistribution": Case(
        lambda t: dist.ZeroInflatedDistribution(dist.Binomial(4, logits=t[0]), gate=t[1].sigmoid())
    ),
    "ZeroInflatedNegativeBinomial": Case(
        lambda t: dist.ZeroInflatedNegativeBinomial(t[0].exp(), logits=t[1], gate=t[2].sigmoid())
    ),
    "ZeroInflatedPoisson": Case(lambda t: dist.ZeroInflatedPoisson(t[0].exp(), gate=t[1].sigmoid())),
}
