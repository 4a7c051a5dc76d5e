"""Every distribution of Pyro, observed and latent: energies and gradients of three
chains equal plain PyTorch's.

Each distribution is made from real numbers ``t ~ Normal(0, 1)``, once as the site of
data and once as a latent site. Of three chains the energy and its gradient are compared
with plain PyTorch in float64, chain by chain, without Pyro's handlers: the
distribution's own ``log_prob``, the log-determinant of the transform to its support,
and for discrete latent sites the sum over values.
"""

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.distributions import transforms
from torch import Tensor, eye, float64, tensor
from torch.distributions import biject_to, constraints

from pyro_symmetric.mcmc import Density

CHAINS, SIZE = 3, 3
CLOSE = 1e-8  # largest error of energies and gradients, relative to 1 and their size
ROLES = ("observed", "latent")


@dataclass(frozen=True)
class Case:
    """A distribution whose parameters are functions of ``SIZE`` real numbers, and what
    becomes of it.

    :param value: an observed value, if the distribution can't draw one.
    :param moving: whether its support moves with its parameters: a latent site gets
        constant ones then.
    :param latent: what is told of a latent site that is refused; ``observed`` likewise.
    :param alone: the roles in which PyTorch can't map it over chains.
    :param cpu: whether it, or this case, makes constants on the default device,
        whatever that of its parameters.
    """

    make: Callable[[Tensor], Any]
    value: Tensor | None = None
    moving: bool = False
    latent: str = ""
    observed: str = ""
    alone: tuple[str, ...] = ()
    cpu: bool = False


ABSTRACT = {
    "ExponentialFamily": "a base class",
    "TorchDistribution": "a base class",
    "Rejector": "tested through the distributions of PyTorch that it stands for; it takes functions, not numbers",
}
"""What is exported, but is no distribution of its own."""


def _gaussian(size: int, scale: Any = 1.0) -> Any:
    return dist.MultivariateNormal(torch.zeros(size), scale * eye(size))


def _tril(t: Tensor) -> Tensor:
    """A Cholesky factor ``(2, 2)`` of three numbers."""
    return torch.stack(
        [
            torch.stack([t[0].exp(), torch.zeros_like(t[0])]),
            torch.stack([t[1], t[2].exp()]),
        ]
    )


@functools.cache
def _flow() -> Any:
    flow = transforms.Spline(1, count_bins=4, bound=3.0).double()
    with torch.no_grad():
        for parameter in flow.parameters():  # which begin at random
            parameter.copy_(
                torch.linspace(-1.0, 1.0, parameter.numel()).reshape(parameter.shape)
            )
    return flow


_TIMES = tensor([0.0, 0.5, 1.0], dtype=float64)
_FIRST = tensor([0.6, 0.4], dtype=float64).log()
_NEXT = tensor([[0.8, 0.2], [0.3, 0.7]], dtype=float64).log()

CASES: dict[str, Case] = {
    "AVFMultivariateNormal": Case(
        lambda t: dist.AVFMultivariateNormal(
            t[:2], _tril(t), torch.full((2, 1, 2), 0.1)
        )
    ),
    "AffineBeta": Case(
        lambda t: dist.AffineBeta(t[0].exp(), t[1].exp(), t[2], 2.0), moving=True
    ),
    "AsymmetricLaplace": Case(
        lambda t: dist.AsymmetricLaplace(t[0], t[1].exp(), t[2].exp())
    ),
    "Bernoulli": Case(lambda t: dist.Bernoulli(logits=t[0])),
    "Beta": Case(lambda t: dist.Beta(t[0].exp(), t[1].exp())),
    "BetaBinomial": Case(
        lambda t: dist.BetaBinomial(t[0].exp(), t[1].exp(), total_count=4)
    ),
    "Binomial": Case(lambda t: dist.Binomial(4, logits=t[0])),
    "Categorical": Case(lambda t: dist.Categorical(logits=t)),
    "Cauchy": Case(lambda t: dist.Cauchy(t[0], t[1].exp())),
    "Chi2": Case(lambda t: dist.Chi2(t[0].exp())),
    "CoalescentTimes": Case(
        lambda t: dist.CoalescentTimes(_TIMES, t[0].exp()),
        value=tensor([-1.0, 0.2]),
        latent="can't be mapped",
        cpu=True,
    ),
    "CoalescentTimesWithRate": Case(
        lambda t: dist.CoalescentTimesWithRate(
            tensor([3.0, 3.5, 4.0]), t[0].exp().expand(5)
        ),
        value=tensor([0.5, 1.5]),
        latent="can't be mapped",
        cpu=True,
    ),
    "ContinuousBernoulli": Case(lambda t: dist.ContinuousBernoulli(logits=t[0])),
    "Delta": Case(
        lambda t: dist.Delta(tensor(1.0), log_density=t[0]),
        value=tensor(1.0),
        latent="use pyro.deterministic",
    ),
    "Dirichlet": Case(lambda t: dist.Dirichlet(t.exp())),
    "DirichletMultinomial": Case(
        lambda t: dist.DirichletMultinomial(t.exp(), 5), latent="can't list its values"
    ),
    "DiscreteHMM": Case(
        lambda t: dist.DiscreteHMM(
            _FIRST + t[2], _NEXT, dist.Normal(t[:2], 1.0), duration=3
        ),
        value=tensor([0.3, -1.0, 0.5]),
        cpu=True,
    ),
    "Empirical": Case(
        lambda t: dist.Empirical(tensor([1.0, 2.0, 3.0]), t.log_softmax(0)),
        value=tensor(2.0),
        latent="probabilities Pyro can't enumerate",
    ),
    "ExpandedDistribution": Case(
        lambda t: dist.ExpandedDistribution(
            dist.Normal(t[0], t[1].exp()), torch.Size([2])
        )
    ),
    "Exponential": Case(lambda t: dist.Exponential(t[0].exp())),
    "ExtendedBetaBinomial": Case(
        lambda t: dist.ExtendedBetaBinomial(t[0].exp(), t[1].exp(), tensor(4))
    ),
    "ExtendedBinomial": Case(lambda t: dist.ExtendedBinomial(tensor(4), logits=t[0])),
    "FisherSnedecor": Case(lambda t: dist.FisherSnedecor(t[0].exp(), t[1].exp())),
    "FoldedDistribution": Case(
        lambda t: dist.FoldedDistribution(dist.Normal(t[0], t[1].exp()))
    ),
    "Gamma": Case(lambda t: dist.Gamma(t[0].exp(), t[1].exp())),
    "GammaGaussianHMM": Case(
        lambda t: dist.GammaGaussianHMM(
            dist.Gamma(t[0].exp() + 1, 2.0),
            _gaussian(2),
            0.5 * eye(2),
            _gaussian(2),
            t[1:3, None].expand(2, 1),
            _gaussian(1),
            duration=4,
        ),
        value=tensor([[0.3], [-1.0], [0.5], [2.0]]),
        cpu=True,
    ),
    "GammaPoisson": Case(
        lambda t: dist.GammaPoisson(t[0].exp(), t[1].exp()),
        latent="can't list its values",
    ),
    "GaussianHMM": Case(
        lambda t: dist.GaussianHMM(
            _gaussian(2),
            t[0] * eye(2),
            _gaussian(2),
            t[1:3, None].expand(2, 1),
            _gaussian(1),
            duration=4,
        ),
        cpu=True,
    ),
    "GaussianMRF": Case(
        lambda t: dist.GaussianMRF(
            _gaussian(2),
            _gaussian(4, t[0].exp()).expand((4,)),
            _gaussian(3, t[1].exp()),
        ),
        value=tensor([[0.3], [-1.0], [0.5], [2.0]]),
        cpu=True,
    ),
    "GaussianScaleMixture": Case(
        lambda t: dist.GaussianScaleMixture(t[:2].exp(), t[:2], t[1:3].exp()),
        value=tensor([0.3, -1.0]),
        latent="can't be mapped",
        observed="inplace operation",
    ),
    "GeneralizedPareto": Case(
        lambda t: dist.GeneralizedPareto(t[0], t[1].exp(), t[2].sigmoid()), moving=True
    ),
    "Geometric": Case(
        lambda t: dist.Geometric(logits=t[0]), latent="can't list its values"
    ),
    "GroupedNormalNormal": Case(
        lambda t: dist.GroupedNormalNormal(
            t[:2], t[2].exp(), tensor(1.0), tensor([0, 0, 1, 1])
        ),
        value=tensor([0.3, -1.0, 0.5, 2.0]),
        latent="log_prob only supports values",
        cpu=True,
    ),
    "Gumbel": Case(lambda t: dist.Gumbel(t[0], t[1].exp())),
    "HalfCauchy": Case(lambda t: dist.HalfCauchy(t[0].exp())),
    "HalfNormal": Case(lambda t: dist.HalfNormal(t[0].exp())),
    "ImproperUniform": Case(
        lambda t: dist.ImproperUniform(constraints.positive, (), ()), value=tensor(0.4)
    ),
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
        value=tensor([[0.3, 0.1], [-1.0, 0.2], [0.5, 0.4], [2.0, 1.0]]),
    ),
    "InverseGamma": Case(lambda t: dist.InverseGamma(t[0].exp(), t[1].exp())),
    "Kumaraswamy": Case(lambda t: dist.Kumaraswamy(t[0].exp(), t[1].exp())),
    "LKJ": Case(lambda t: dist.LKJ(3, t[0].exp())),
    "LKJCholesky": Case(lambda t: dist.LKJCholesky(3, t[0].exp())),
    "LKJCorrCholesky": Case(lambda t: dist.LKJCorrCholesky(3, t[0].exp())),
    "Laplace": Case(lambda t: dist.Laplace(t[0], t[1].exp())),
    "LinearHMM": Case(
        lambda t: dist.LinearHMM(
            _gaussian(2), t[0] * eye(2), _gaussian(2), eye(2), _gaussian(2), duration=3
        ),
        value=torch.zeros(3, 2),
        latent="is not implemented",
        observed="is not implemented",
    ),
    "LogNormal": Case(lambda t: dist.LogNormal(t[0], t[1].exp())),
    "LogNormalNegativeBinomial": Case(
        lambda t: dist.LogNormalNegativeBinomial(5.0, t[0], t[1].exp()),
        value=tensor(3.0),
        latent="can't list its values",
    ),
    "Logistic": Case(lambda t: dist.Logistic(t[0], t[1].exp())),
    "LogisticNormal": Case(lambda t: dist.LogisticNormal(t[:2], t[1:3].exp())),
    "LowRankMultivariateNormal": Case(
        lambda t: dist.LowRankMultivariateNormal(t, t[:, None], t.exp())
    ),
    "MaskedDistribution": Case(
        lambda t: dist.Normal(t, 1.0).mask(tensor([True, False, True])).to_event(1)
    ),
    "MaskedMixture": Case(
        lambda t: dist.MaskedMixture(
            tensor([True, False]),
            dist.Normal(t[0], 1.0).expand((2,)),
            dist.Cauchy(t[1], 2.0).expand((2,)),
        )
    ),
    "MixtureOfDiagNormals": Case(
        lambda t: dist.MixtureOfDiagNormals(
            t[:, None].expand(3, 2), t[:, None].exp().expand(3, 2), t
        )
    ),
    "MixtureOfDiagNormalsSharedCovariance": Case(
        lambda t: dist.MixtureOfDiagNormalsSharedCovariance(
            t[:, None].expand(3, 2), t[:2].exp(), t
        )
    ),
    "MixtureSameFamily": Case(
        lambda t: dist.MixtureSameFamily(
            dist.Categorical(logits=t), dist.Normal(t, t.exp())
        )
    ),
    "Multinomial": Case(
        lambda t: dist.Multinomial(5, logits=t),
        latent="can't list its values",
        cpu=True,
    ),
    "MultivariateNormal": Case(
        lambda t: dist.MultivariateNormal(t[:2], scale_tril=_tril(t))
    ),
    "MultivariateStudentT": Case(
        lambda t: dist.MultivariateStudentT(t[0].exp() + 1, t[:2], _tril(t))
    ),
    "NanMaskedMultivariateNormal": Case(
        lambda t: dist.NanMaskedMultivariateNormal(t[:2], _tril(t) @ _tril(t).mT),
        value=tensor([0.3, torch.nan]),
        alone=ROLES,
        cpu=True,
    ),
    "NanMaskedNormal": Case(
        lambda t: dist.NanMaskedNormal(t[:2], t[2].exp()).to_event(1),
        value=tensor([0.3, torch.nan]),
        alone=ROLES,
        cpu=True,
    ),
    "NegativeBinomial": Case(
        lambda t: dist.NegativeBinomial(t[0].exp(), logits=t[1]),
        latent="can't list its values",
    ),
    "Normal": Case(lambda t: dist.Normal(t[0], t[1].exp())),
    "OMTMultivariateNormal": Case(
        lambda t: dist.OMTMultivariateNormal(t[:2], _tril(t))
    ),
    "OneHotCategorical": Case(lambda t: dist.OneHotCategorical(logits=t)),
    "OneHotCategoricalStraightThrough": Case(
        lambda t: dist.OneHotCategoricalStraightThrough(logits=t)
    ),
    "OneOneMatching": Case(
        lambda t: dist.OneOneMatching(t[:, None] * tensor([0.5, -1.0, 2.0]) + t.sin()),
        value=tensor([1, 0, 2]),
        cpu=True,
    ),
    "OneTwoMatching": Case(
        lambda t: dist.OneTwoMatching(
            torch.cat([t, t.cos()])[:4, None] * tensor([1.0, -1.0])
        ),
        value=tensor([1, 0, 1, 0]),
        cpu=True,
    ),
    "OrderedLogistic": Case(
        lambda t: dist.OrderedLogistic(
            t[2], t[0] + torch.stack([0 * t[1], t[1].exp()])
        ),
        cpu=True,
    ),
    "Pareto": Case(lambda t: dist.Pareto(t[0].exp(), t[1].exp()), moving=True),
    "Poisson": Case(lambda t: dist.Poisson(t[0].exp()), latent="can't list its values"),
    "ProjectedNormal": Case(
        lambda t: dist.ProjectedNormal(t), latent="can't be mapped"
    ),
    "RelaxedBernoulli": Case(lambda t: dist.RelaxedBernoulli(tensor(0.7), logits=t[0])),
    "RelaxedBernoulliStraightThrough": Case(
        lambda t: dist.RelaxedBernoulliStraightThrough(tensor(0.7), logits=t[0]),
        value=tensor(0.4),
    ),
    "RelaxedOneHotCategorical": Case(
        lambda t: dist.RelaxedOneHotCategorical(tensor(0.7), logits=t)
    ),
    "RelaxedOneHotCategoricalStraightThrough": Case(
        lambda t: dist.RelaxedOneHotCategoricalStraightThrough(tensor(0.7), logits=t),
        value=tensor([0.2, 0.5, 0.3]),
    ),
    "SineBivariateVonMises": Case(
        lambda t: dist.SineBivariateVonMises(
            t[0], t[1], t[2].exp() + 1, t[2].exp() + 2, correlation=0.3
        ),
        value=tensor([0.4, -1.0]),
        alone=ROLES,
    ),
    "SineSkewed": Case(
        lambda t: dist.SineSkewed(
            dist.VonMises(t[:2], t[2].exp()).to_event(1), 0.4 * t[:2].tanh()
        ),
        value=tensor([0.4, -1.0]),
        alone=ROLES,
    ),
    "SkewLogistic": Case(lambda t: dist.SkewLogistic(t[0], t[1].exp(), t[2].exp())),
    "SoftAsymmetricLaplace": Case(
        lambda t: dist.SoftAsymmetricLaplace(t[0], t[1].exp(), t[2].exp())
    ),
    "SoftLaplace": Case(lambda t: dist.SoftLaplace(t[0], t[1].exp())),
    "SpanningTree": Case(
        lambda t: dist.SpanningTree(t), value=tensor([[0, 1], [0, 2]]), cpu=True
    ),
    "Stable": Case(
        lambda t: dist.Stable(1 + t[0].sigmoid(), t[1].tanh(), t[2].exp(), 0.0),
        value=tensor(0.3),
        alone=ROLES,
        cpu=True,
    ),
    "StableWithLogProb": Case(
        lambda t: dist.StableWithLogProb(
            1.1 + 0.8 * t[0].sigmoid(), t[1].tanh(), t[2].exp(), 0.0
        ),
        value=tensor(0.3),
        alone=ROLES,
        cpu=True,
    ),
    "StudentT": Case(lambda t: dist.StudentT(t[2].exp(), t[0], t[1].exp())),
    "TransformedDistribution": Case(
        lambda t: dist.TransformedDistribution(
            dist.Normal(t[0], 1.0), [transforms.AffineTransform(t[1], t[2].exp())]
        )
    ),
    "TransformedDistribution (spline flow)": Case(
        lambda t: dist.TransformedDistribution(
            dist.Normal(t[:1], t[1:2].exp()).to_event(1), [_flow()]
        ),
        alone=("latent",),
    ),
    "TruncatedPolyaGamma": Case(
        lambda t: dist.TruncatedPolyaGamma(t.new_empty(())), value=tensor(0.4)
    ),
    "Uniform": Case(
        lambda t: dist.Uniform(t[0] - 5, t[0] + 5 + t[1].exp()),
        value=tensor(0.2),
        moving=True,
    ),
    "Unit": Case(lambda t: dist.Unit(t[0]), value=torch.zeros(0)),
    "VonMises": Case(lambda t: dist.VonMises(t[0], t[1].exp())),
    "VonMises3D": Case(
        lambda t: dist.VonMises3D(t),
        value=tensor([0.6, 0.0, 0.8]),
        latent="can't be mapped",
    ),
    "Weibull": Case(lambda t: dist.Weibull(t[0].exp(), t[1].exp())),
    "Wishart": Case(
        lambda t: dist.Wishart(t[0].exp() + 3, scale_tril=_tril(t)),
        latent="can't be mapped",
        alone=ROLES,
    ),
    "ZeroInflatedDistribution": Case(
        lambda t: dist.ZeroInflatedDistribution(
            dist.Binomial(4, logits=t[0]), gate=t[1].sigmoid()
        ),
        latent="can't list its values",
    ),
    "ZeroInflatedNegativeBinomial": Case(
        lambda t: dist.ZeroInflatedNegativeBinomial(
            t[0].exp(), logits=t[1], gate=t[2].sigmoid()
        ),
        latent="can't list its values",
    ),
    "ZeroInflatedPoisson": Case(
        lambda t: dist.ZeroInflatedPoisson(t[0].exp(), gate=t[1].sigmoid()),
        latent="can't list its values",
    ),
}


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_every_exported_distribution_has_a_case():
    assert set(exported()) == {name for name in CASES if "(" not in name} | set(
        ABSTRACT
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=[pytest.mark.cpu] * c.cpu) for n, c in CASES.items()],
)
def test_energies_and_gradients_are_those_of_plain_pytorch(case, role):
    state, why = checked(case, role)
    refused = case.observed if role == "observed" else case.latent
    if refused:
        assert state == "refused"
        assert refused in why
    else:
        assert state == ("chain at a time" if role in case.alone else "works"), why


def model(case: Case, role: str, value: Tensor | None) -> None:
    """The distribution as a site of data or as a latent one."""
    t = pyro.sample("t", dist.Normal(torch.zeros(SIZE), 1.0).to_event(1))
    if role == "observed":
        pyro.sample("x", case.make(t), obs=value)
        return
    x = pyro.sample("x", case.make(_fixed() if case.moving else t))
    pyro.sample("y", dist.Normal(_summary(x, case), 1.0), obs=tensor(0.7))


def checked(case: Case, role: str) -> tuple[str, str]:
    """The state of a distribution in one role (works, goes chain by chain, is refused,
    differs from PyTorch), and why."""
    torch.manual_seed(0)
    value = None
    try:
        if role == "observed":
            value = case.make(_fixed()).sample() if case.value is None else case.value
            value = value.double() if value.is_floating_point() else value
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            density = Density(model, (case, role, value), dtype=float64, engine="eager")
        z = torch.randn(
            CHAINS, density.dim, generator=torch.Generator().manual_seed(1)
        ).to(density.device)
        energy, gradient = density.energy_and_gradient(z)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        return "refused", " ".join((str(error) or repr(error)).split())
    if not bool(torch.isfinite(energy).all()):
        return "wrong", "no finite density"
    expected = [_truth(case, role, value, z[c]) for c in range(CHAINS)]
    right = torch.stack([e for e, _ in expected]), torch.stack([g for _, g in expected])
    pairs = zip((energy, gradient), right, strict=True)
    error = max(
        float(((found - wanted) / (1 + wanted.abs())).abs().max())
        for found, wanted in pairs
    )
    if not error < CLOSE:
        return "wrong", f"error {error:.1e}"
    alone = [str(w.message) for w in told if "one after another" in str(w.message)]
    return ("chain at a time", alone[0]) if alone else ("works", "")


def _truth(
    case: Case, role: str, value: Tensor | None, z: Tensor
) -> tuple[Tensor, Tensor]:
    """Energy and gradient at one chain's unconstrained vector."""
    leaf = z.clone().requires_grad_()
    t = leaf[:SIZE]
    log_joint = -0.5 * (t.square() + torch.log(tensor(2 * torch.pi))).sum()
    made = case.make(_fixed() if case.moving and role == "latent" else t)
    if role == "observed":
        log_joint = log_joint + made.log_prob(value).sum()
    elif made.has_enumerate_support:
        values = [
            made.log_prob(x).sum() + _score(x, case) for x in made.enumerate_support()
        ]
        log_joint = log_joint + torch.logsumexp(torch.stack(values), 0)
    else:
        transform = biject_to(_support(made))
        shape = transform.inverse_shape(
            torch.Size(made.batch_shape) + torch.Size(made.event_shape)
        )
        free = leaf[SIZE:].reshape(shape)
        x = transform(free)
        log_det = transform.log_abs_det_jacobian(free, x).sum()
        log_joint = log_joint + made.log_prob(x).sum() + log_det + _score(x, case)
    (gradient,) = torch.autograd.grad(-log_joint, leaf)
    return -log_joint.detach(), gradient


def _score(x: Tensor, case: Case) -> Tensor:
    gap = 0.7 - _summary(x, case)
    return -0.5 * (gap.square() + torch.log(tensor(2 * torch.pi)))


def _summary(x: Tensor, case: Case) -> Tensor:
    """A number of a value, over its event; what lies left of it are values side by
    side.
    """
    made = case.make(_fixed())
    shape = torch.Size(made.batch_shape) + torch.Size(made.event_shape)
    own = len(shape)
    weights = torch.linspace(0.1, 0.5, shape.numel()).reshape(shape)
    scored = x.to(weights.dtype).clamp(-5, 5) * weights
    return scored.sum(tuple(range(-own, 0))) if own else scored


def _fixed() -> Tensor:
    return torch.linspace(-0.4, 0.6, SIZE)


def _support(made: Any) -> Any:
    support = made.support
    # angles, which Pyro has on the line
    if "VonMises" in repr(made) or isinstance(made, dist.SineSkewed):
        return constraints.independent(
            constraints.interval(-math.pi, math.pi), len(made.event_shape)
        )
    if isinstance(support, constraints.MixtureSameFamilyConstraint):
        return support.base_constraint
    if getattr(support, "upper_bound", None) == torch.inf:
        return constraints.greater_than_eq(support.lower_bound)
    return support


def exported() -> list[str]:
    """Names of all distributions that ``pyro.distributions`` exports."""
    kinds = {name: getattr(dist, name) for name in dist.__all__}
    base = torch.distributions.Distribution
    return [
        name
        for name, kind in kinds.items()
        if isinstance(kind, type) and issubclass(kind, base)
    ]
