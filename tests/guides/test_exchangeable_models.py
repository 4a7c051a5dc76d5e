"""Models that aren't networks: declared, verified, symmetrised, trained; never above the evidence where it is known."""

import itertools
import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

from pyro_symmetric.discovery.model_check import verify_model
from pyro_symmetric.distributions import ExactOrbit, InfoNCE
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import AutoSymmetrized
from pyro_symmetric.guides.evidence import evidence_of
from pyro_symmetric.mcmc import log_joint


def train(model: Any, guide: Any, *data: Any, number: int, loss: Any = None, lr: float = 0.03) -> list[float]:
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), loss or Trace_ELBO())
    return [svi.step(*data) for _ in range(number)]


# a Gaussian mixture: simplex weights, positive scales ----------------------------------------------------------------


def mixture(data: torch.Tensor) -> None:
    weights = pyro.sample("weights", dist.Dirichlet(2 * torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 4.0))
        scales = pyro.sample("scales", dist.LogNormal(0.0, 0.5))
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(locs, scales)), obs=data)


MIXTURE_GROUP = Group.declare(
    {"weights": ("k",), "locs": ("k",), "scales": ("k",)},
    {site: torch.Size([3]) for site in ("weights", "locs", "scales")},
)


@pytest.mark.stochastic
@pytest.mark.parametrize("base", [AutoDiagonalNormal, AutoMultivariateNormal])
def test_a_mixture_is_declared_verified_and_trained_and_gains_log_6(base: type) -> None:
    """Three clusters far apart: the guide settles on one labelling, and symmetrising is worth all of log 3! nats."""
    data = torch.cat([torch.randn(20) - 8, torch.randn(30), torch.randn(25) + 8])
    assert verify_model(MIXTURE_GROUP, mixture, data)
    guide = AutoSymmetrized(mixture, MIXTURE_GROUP, base=base, estimator=ExactOrbit()).setup(data)
    with torch.no_grad():
        guide.base.loc.copy_(
            guide.pack({"weights": torch.ones(3) / 3, "locs": torch.tensor([-8.0, 0, 8]), "scales": torch.ones(3)})
        )
    losses = train(mixture, guide, data, number=60)
    assert sum(losses[-20:]) < sum(losses[:20])
    worth = evidence_of(guide, log_joint(mixture, data), MIXTURE_GROUP, ExactOrbit(), num_samples=64)
    assert worth.symmetrized_elbo - worth.elbo == pytest.approx(math.log(6), abs=1e-3)


# a mixture of known spread: the evidence by enumeration --------------------------------------------------------------


def known_mixture(data: torch.Tensor) -> None:
    """Two components of known weights and deviations; the locations are all there is to learn."""
    with pyro.plate("components", 2):
        locs = pyro.sample("locs", dist.Normal(0.0, 2.0))
    with pyro.plate("data", len(data)):
        pyro.sample(
            "x", dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(locs, torch.ones(2))), obs=data
        )


def known_evidence(data: torch.Tensor) -> float:
    """Sum over all assignments of the Gaussian evidence of each component's rows."""
    terms = []
    for assignment in itertools.product(range(2), repeat=len(data)):
        term = -len(data) * math.log(2)
        for k in range(2):
            x = data[torch.tensor(assignment) == k]
            if len(x):
                covariance = torch.eye(len(x), dtype=torch.float64) + 4.0
                normal = dist.MultivariateNormal(torch.zeros(len(x), dtype=torch.float64), covariance)
                term += float(normal.log_prob(x.double()))
        terms.append(term)
    return float(torch.tensor(terms, dtype=torch.float64).logsumexp(0))


@pytest.mark.stochastic
@pytest.mark.parametrize("estimator", [ExactOrbit(), InfoNCE(1)])
@pytest.mark.parametrize("seed", range(4))
def test_the_symmetrised_elbo_of_a_conjugate_mixture_stays_below_the_evidence(seed: int, estimator: Any) -> None:
    """One-sided at 5 standard errors over 8 cases: false alarm below 1 in 10^5. Before training and after."""
    pyro.set_rng_seed(seed)
    data = torch.cat([torch.randn(4) - 1, torch.randn(4) + 1])
    group = Group.declare({"locs": ("k",)}, {"locs": torch.Size([2])})
    guide = AutoSymmetrized(known_mixture, group, estimator=estimator, init_scale=0.5).setup(data)
    truth, density = known_evidence(data), log_joint(known_mixture, data)
    for number in (0, 400):
        train(known_mixture, guide, data, number=number)
        worth = evidence_of(guide, density, group, estimator, num_samples=2000, chunk=2000)
        assert worth.symmetrized_elbo < truth + 5 * worth.symmetrized_error
    assert worth.symmetrized_elbo > truth - 1.0
    assert worth.symmetrized_elbo >= worth.elbo - 5 * worth.elbo_error


# a mixture of regressions --------------------------------------------------------------------------------------------


def regressions(x: torch.Tensor, y: torch.Tensor) -> None:
    """Which line a point is on hangs on a gate, whose logits matter up to a constant only: one of them per line."""
    with pyro.plate("lines", 2):
        gates = pyro.sample("gates", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        coefficients = pyro.sample("coefficients", dist.Normal(torch.zeros(2), 3.0).to_event(1))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
    design = torch.stack([torch.ones_like(x), x], -1)
    with pyro.plate("data", len(x)):
        lines = dist.Normal(design @ coefficients.mT, noise)
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(logits=design @ gates.mT), lines), obs=y)


REGRESSION_GROUP = Group.declare(
    {"gates": ("line", None), "coefficients": ("line", None), "noise": ("line",)},
    {"gates": torch.Size([2, 2]), "coefficients": torch.Size([2, 2]), "noise": torch.Size([2])},
)


@pytest.mark.stochastic
def test_a_mixture_of_regressions_is_declared_verified_and_trained() -> None:
    x = torch.linspace(-2, 2, 40)
    y = torch.where(torch.arange(40) % 2 == 0, 1 + 2 * x, -1 - x) + 0.1 * torch.randn(40)
    assert verify_model(REGRESSION_GROUP, regressions, x, y)
    fewer = Group.declare({"coefficients": ("line", None), "noise": ("line",)}, REGRESSION_GROUP.site_shapes)
    wrong = verify_model(fewer, regressions, x, y)
    assert wrong.broken[0].missing == (("gates", 0),)
    guide = AutoSymmetrized(regressions, REGRESSION_GROUP, estimator=ExactOrbit()).setup(x, y)
    losses = train(regressions, guide, x, y, number=150)
    assert sum(losses[-20:]) < sum(losses[:20])


# factor analysis: signs and order ------------------------------------------------------------------------------------


def factors_marginalised(data: torch.Tensor) -> None:
    loadings = pyro.sample("loadings", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    covariance = loadings @ loadings.mT + 0.5 * torch.eye(2)
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.MultivariateNormal(torch.zeros(2), covariance), obs=data)


def factor_group() -> Group:
    axes, shapes = {"loadings": (None, "factor")}, {"loadings": torch.Size([2, 2])}
    return Group.declare(axes, shapes, moves=("permute", "flip"))


def factor_evidence(data: torch.Tensor, points: int = 41) -> float:
    """Quadrature over the four loadings; the integrand is smooth and decays as the prior, so that 41 points a side in
    (-5, 5) are exact to far below the Monte Carlo error."""
    axis = torch.linspace(-5, 5, points, dtype=torch.float64)
    a, b, c, d = torch.meshgrid(axis, axis, axis, axis, indexing="ij")
    s11, s22, s12 = a**2 + b**2 + 0.5, c**2 + d**2 + 0.5, a * c + b * d
    determinant = s11 * s22 - s12**2
    x = data.double()
    quadratic = (
        s22 * (x[:, 0] ** 2).sum() + s11 * (x[:, 1] ** 2).sum() - 2 * s12 * (x[:, 0] * x[:, 1]).sum()
    ) / determinant
    log_likelihood = -0.5 * (quadratic + len(x) * determinant.log()) - len(x) * math.log(2 * math.pi)
    log_prior = -0.5 * (a**2 + b**2 + c**2 + d**2) - 2 * math.log(2 * math.pi)
    return float((log_prior + log_likelihood).flatten().logsumexp(0) + 4 * (axis[1] - axis[0]).log())


@pytest.mark.stochastic
@pytest.mark.parametrize("loss", [Trace_ELBO, TraceMeanField_ELBO])
@pytest.mark.parametrize("seed", range(2))
def test_the_symmetrised_elbo_of_a_factor_analysis_stays_below_the_evidence(seed: int, loss: type) -> None:
    """One-sided at 5 standard errors; symmetrising over signs and order gains, up to log 8."""
    pyro.set_rng_seed(seed)
    data = torch.randn(15, 2) @ torch.tensor([[1.5, 0.6], [0.0, 0.8]])
    group = factor_group()
    assert verify_model(group, factors_marginalised, data)
    truth = factor_evidence(data)
    assert truth == pytest.approx(factor_evidence(data, 33), abs=1e-3)
    guide = AutoSymmetrized(factors_marginalised, group, estimator=ExactOrbit(), init_scale=0.3).setup(data)
    train(factors_marginalised, guide, data, number=150, loss=loss())
    worth = evidence_of(guide, log_joint(factors_marginalised, data), group, ExactOrbit(), num_samples=2000, chunk=2000)
    assert worth.symmetrized_elbo < truth + 5 * worth.symmetrized_error
    assert worth.symmetrized_elbo > truth - 2.0
    assert worth.elbo + 0.3 < worth.symmetrized_elbo < worth.elbo + math.log(8) + 1e-6


@pytest.mark.stochastic
def test_factor_scores_can_stay_explicit() -> None:
    def model(data: torch.Tensor) -> None:
        loadings = pyro.sample("loadings", dist.Normal(torch.zeros(5, 3), 1.0).to_event(2))
        scores = pyro.sample("scores", dist.Normal(torch.zeros(3, 20), 1.0).to_event(2))
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        pyro.sample("x", dist.Normal(loadings @ scores, noise).to_event(2), obs=data)

    axes: dict[str, tuple[str | None, ...]] = {"loadings": (None, "factor"), "scores": ("factor", None)}
    shapes = {"loadings": torch.Size([5, 3]), "scores": torch.Size([3, 20])}
    group = Group.declare(axes, shapes, moves=("permute", "flip"))
    data = torch.randn(5, 3) @ torch.randn(3, 20)
    assert verify_model(group, model, data)
    assert group.order() == 48
    guide = AutoSymmetrized(model, group, estimator=ExactOrbit(), init_scale=0.05).setup(data)
    losses = train(model, guide, data, number=100)
    assert sum(losses[-20:]) < 0.9 * sum(losses[:20])
    copies = guide.sample_posterior((30,), orbit=True)
    assert copies["loadings"].shape == (30, 5, 3)


# a topic model -------------------------------------------------------------------------------------------------------


def topics(words: torch.Tensor) -> None:
    """Latent Dirichlet allocation with the words' assignments summed out: (documents, vocabulary) counts."""
    documents, vocabulary = words.shape
    with pyro.plate("topics", 3):
        content = pyro.sample("content", dist.Dirichlet(0.5 * torch.ones(vocabulary)))
    with pyro.plate("documents", documents):
        proportions = pyro.sample("proportions", dist.Dirichlet(torch.ones(3)))
        pyro.sample("words", dist.Multinomial(probs=proportions @ content, validate_args=False), obs=words)


def test_a_topic_model_is_declared_verified_and_trained() -> None:
    """Topics are whole simplexes that are exchanged; proportions of documents are simplexes whose entries are."""
    pyro.set_rng_seed(3)
    true_content = torch.eye(3).repeat_interleave(2, dim=1) / 2
    words = torch.stack([dist.Multinomial(50, p @ true_content).sample() for p in torch.eye(3)[torch.arange(8) % 3]])
    shapes = {"content": torch.Size([3, 6]), "proportions": torch.Size([8, 3])}
    group = Group.declare({"content": ("topic", None), "proportions": (None, "topic")}, shapes)
    assert verify_model(group, topics, words)
    wrong = verify_model(Group.declare({"content": ("topic", None)}, shapes), topics, words)
    assert wrong.broken[0].missing == (("proportions", 1),)
    guide = AutoSymmetrized(topics, group, estimator=ExactOrbit()).setup(words)
    losses = train(topics, guide, words, number=80)
    assert sum(losses[-20:]) < sum(losses[:20])
    draws = guide.sample_posterior((5,), orbit=True)
    for site in shapes:
        torch.testing.assert_close(draws[site].sum(-1), torch.ones(draws[site].shape[:-1]))


def test_the_density_of_a_topic_guide_is_that_of_loops_over_topics() -> None:
    """On the simplexes themselves, where exchanging has no Jacobian: log q̄ in unconstrained coordinates less the
    volume of the map is the mean over 3! orders of the same for q."""
    words = torch.randint(5, (4, 6)).float()
    shapes = {"content": torch.Size([3, 6]), "proportions": torch.Size([4, 3])}
    group = Group.declare({"content": ("topic", None), "proportions": (None, "topic")}, shapes)
    guide = AutoSymmetrized(topics, group, estimator=ExactOrbit(), init_scale=0.5).setup(words)
    to_simplex = torch.distributions.biject_to(dist.constraints.simplex)

    def on_simplexes(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        total = guide.base.get_posterior().log_prob(guide.pack(weights).float()).double()
        for site in shapes:
            value = weights[site]
            total = total - to_simplex.log_abs_det_jacobian(to_simplex.inv(value), value).sum(-1)
        return total

    with torch.no_grad():
        latent = guide.base.get_posterior().sample((5,))
        weights = {site: value.double() for site, value in guide.unpack(latent).items()}
        volume = guide.base.get_posterior().log_prob(latent).double() - on_simplexes(weights)
        terms = [
            on_simplexes({"content": weights["content"][:, p], "proportions": weights["proportions"][..., p]})
            for p in map(list, itertools.permutations(range(3)))
        ]
        expected = torch.stack(terms).logsumexp(0) - math.log(6) + volume
        torch.testing.assert_close(guide.get_posterior().log_prob(latent).double(), expected, rtol=1e-3, atol=1e-2)
