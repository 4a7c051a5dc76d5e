"""Every distribution of Pyro, observed and latent: energies and gradients of three chains equal plain PyTorch's.

Each distribution is made from real numbers ``t ~ Normal(0, 1)``, once as the site of data and once as a latent site. Of
three chains the energy and its gradient are compared with plain PyTorch in float64, chain by chain, without Pyro's
handlers: the distribution's own ``log_prob``, the log-determinant of the transform to its support, and for discrete
latent sites the sum over values.
"""

import math
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_symmetric.mcmc import Density

from .distribution_cases import ABSTRACT, CASES, Case

CHAINS = 3
CLOSE = 1e-8  # largest error of energies and gradients, relative to 1 and their size
ROLES = ("observed", "latent")


ALONE = {  # which PyTorch can't map over chains
    "NanMaskedMultivariateNormal": ROLES,
    "NanMaskedNormal": ROLES,
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
    "Empirical": "lists no probabilities",
    "GammaPoisson": "can't list its values",
    "GaussianScaleMixture": "can't be mapped",
    "Geometric": "can't list its values",
    "GroupedNormalNormal": "log_prob only supports values",
    "LinearHMM": "is not implemented",
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
REFUSED_AS_DATA = {"GaussianScaleMixture": "inplace operation", "LinearHMM": "is not implemented"}


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
    state, why = checked(CASES[name], role)
    refused = (REFUSED_AS_DATA if role == "observed" else REFUSED).get(name)
    if refused is not None:
        assert state == "refused"
        assert refused in why
    else:
        assert state == ("chain at a time" if role in ALONE.get(name, ()) else "works"), why


def model(case: Case, role: str, value: Tensor | None) -> None:
    """The distribution as a site of data or as a latent one."""
    t = pyro.sample("t", dist.Normal(torch.zeros(case.size), 1.0).to_event(1))
    if role == "observed":
        pyro.sample("x", case.make(t), obs=value)
        return
    x = pyro.sample("x", case.make(_fixed(case) if case.moving else t))
    pyro.sample("y", dist.Normal(_summary(x, case), 1.0), obs=torch.tensor(0.7))


def checked(case: Case, role: str) -> tuple[str, str]:
    """The state of a distribution in one role (works, goes chain by chain, is refused, differs from PyTorch), and
    why."""
    torch.manual_seed(0)
    value = None
    try:
        if role == "observed":
            value = case.make(_fixed(case)).sample() if case.value is None else case.value
            value = value.double() if value.is_floating_point() else value
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            density = Density(model, (case, role, value), dtype=torch.float64, engine="eager")
        z = torch.randn(CHAINS, density.dim, generator=torch.Generator().manual_seed(1)).to(density.device)
        energy, gradient = density.energy_and_gradient(z)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        return "refused", " ".join((str(error) or repr(error)).split())
    if not bool(torch.isfinite(energy).all()):
        return "wrong", "no finite density"
    expected = [_truth(case, role, value, z[c]) for c in range(CHAINS)]
    right = torch.stack([e for e, _ in expected]), torch.stack([g for _, g in expected])
    pairs = zip((energy, gradient), right, strict=True)
    error = max(float(((found - wanted) / (1 + wanted.abs())).abs().max()) for found, wanted in pairs)
    if not error < CLOSE:
        return "wrong", f"error {error:.1e}"
    alone = [str(w.message) for w in told if "one after another" in str(w.message)]
    return ("chain at a time", alone[0]) if alone else ("works", "")


def _truth(case: Case, role: str, value: Tensor | None, z: Tensor) -> tuple[Tensor, Tensor]:
    """Energy and gradient at one chain's unconstrained vector."""
    leaf = z.clone().requires_grad_()
    t = leaf[: case.size]
    log_joint = -0.5 * (t.square() + torch.log(torch.tensor(2 * torch.pi))).sum()
    made = case.make(_fixed(case) if case.moving and role == "latent" else t)
    if role == "observed":
        log_joint = log_joint + made.log_prob(value).sum()
    elif made.has_enumerate_support:
        values = [made.log_prob(x).sum() + _score(x, case) for x in made.enumerate_support()]
        log_joint = log_joint + torch.logsumexp(torch.stack(values), 0)
    else:
        transform = biject_to(_support(made))
        shape = transform.inverse_shape(torch.Size(made.batch_shape) + torch.Size(made.event_shape))
        free = leaf[case.size :].reshape(shape)
        x = transform(free)
        log_det = transform.log_abs_det_jacobian(free, x).sum()
        log_joint = log_joint + made.log_prob(x).sum() + log_det + _score(x, case)
    (gradient,) = torch.autograd.grad(-log_joint, leaf)
    return -log_joint.detach(), gradient


def _score(x: Tensor, case: Case) -> Tensor:
    gap = 0.7 - _summary(x, case)
    return -0.5 * (gap.square() + torch.log(torch.tensor(2 * torch.pi)))


def _summary(x: Tensor, case: Case) -> Tensor:
    """A number of a value, over its event; what lies left of it are values side by side."""
    made = case.make(_fixed(case))
    shape = torch.Size(made.batch_shape) + torch.Size(made.event_shape)
    own = len(shape)
    weights = torch.linspace(0.1, 0.5, shape.numel()).reshape(shape)
    scored = x.to(weights.dtype).clamp(-5, 5) * weights
    return scored.sum(tuple(range(-own, 0))) if own else scored


def _fixed(case: Case) -> Tensor:
    return torch.linspace(-0.4, 0.6, case.size)


def _support(made: Any) -> Any:
    support = made.support
    if "VonMises" in repr(made) or isinstance(made, dist.SineSkewed):  # angles, which Pyro has on the line
        return constraints.independent(constraints.interval(-math.pi, math.pi), len(made.event_shape))
    if isinstance(support, constraints.MixtureSameFamilyConstraint):
        return support.base_constraint
    if getattr(support, "upper_bound", None) == torch.inf:
        return constraints.greater_than_eq(support.lower_bound)
    return support


def exported() -> list[str]:
    """Names of all distributions that ``pyro.distributions`` exports."""
    kinds = {name: getattr(dist, name) for name in dist.__all__}
    base = torch.distributions.Distribution
    return [name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, base)]
