"""The evidence of models whose evidence is known: every method, and what it doubts."""

import math
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal

import pyro_symmetric as ps
from pyro_symmetric.guides.evidence import EvidenceEstimate, doubts_of, evidence

from .conjugate import DATA, exact_draws, log_evidence, mixture, relabellings


def assert_known(found: Any, truth: float, error: float = 0.1) -> None:
    """Bounds on their side, estimates within 5 errors (1 in 10^6), which are small,
    unless they are doubted.
    """
    assert found.elbo < truth + 5 * found.elbo_error
    assert found.symmetrized_elbo < truth + 5 * found.symmetrized_error
    assert found.bridge.error < error
    assert abs(found.bridge.log_evidence - truth) < 5 * found.bridge.error
    if not [
        doubt for doubt in found.doubts if doubt.startswith(("importance", "density"))
    ]:
        assert found.importance.error < error
        assert abs(found.importance.log_evidence - truth) < 5 * found.importance.error


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "estimator", [None, ps.SinkhornImportance(1), ps.InfoNCE(1)], ids=repr
)
@pytest.mark.parametrize("components", [2, 3])
def test_a_mixture_has_the_evidence_that_the_sum_over_allocations_has(
    components: int, estimator: Any
) -> None:
    """Simplex weights and locations, overlapping components; also by bounds of the
    density, of few elements.
    """
    guide = ps.guides.fit_gaussian(
        exact_draws(components, (1, 2000)), relabellings(components)
    )
    found = evidence(
        guide,
        log_joint=ps.log_joint(mixture(components), DATA),
        symmetry=relabellings(components),
        estimator=estimator,
        posterior=exact_draws(components, (4, 1000)),
        num_samples=4000,
        chunk=4000,
    )
    assert_known(found, log_evidence(components))
    assert found.bridge.error < found.importance.error or found.doubts
    assert found.best is found.bridge
    assert "R-hat" not in repr(found.doubts)
    assert (found.bound == "exact") == (estimator is None)


@pytest.mark.stochastic
def test_the_evidence_of_a_regression_with_equal_columns_is_in_closed_form() -> None:
    """Weights of equal columns can be exchanged; ``y`` is normal with covariance ``I +
    4 * 3 x x'``. The two methods differ by three of their errors for fewer than 1 of
    300 seeds."""
    x = torch.linspace(-1, 1, 12)
    y = 1.5 * x + 0.3 * torch.sin(9 * x)

    def model(x: torch.Tensor, y: torch.Tensor) -> None:
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        pyro.sample(
            "y", dist.Normal(w.sum(-1, keepdim=True) * x, 1.0).to_event(1), obs=y
        )

    covariance = torch.eye(12).double() + 12 * torch.outer(x, x).double()
    truth = dist.MultivariateNormal(torch.zeros(12).double(), covariance).log_prob(
        y.double()
    )
    precision = torch.eye(3).double() / 4 + float(x @ x) * torch.ones(3, 3).double()
    mean = torch.linalg.solve(precision, float(x @ y) * torch.ones(3).double())
    exact = dist.MultivariateNormal(mean, precision_matrix=precision)
    posterior = ps.Posterior.from_samples(
        {"w": exact.sample((1000,)).float()}, kind="independent"
    )
    sketch = AutoDiagonalNormal(model)
    sketch(x, y)
    tril = 1.3 * exact.scale_tril.float()
    wide = ps.AutoGaussian(
        sketch, dist.MultivariateNormal(mean.float() + 0.1, scale_tril=tril)
    )
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([3])})
    found = evidence(
        wide,
        log_joint=ps.log_joint(model, x, y),
        symmetry=group,
        posterior=posterior,
        num_samples=2000,
        chunk=2000,
    )
    assert_known(found, float(truth))
    assert found.doubts == ()
    assert "in doubt" not in repr(found)


@pytest.mark.stochastic
def test_chains_alone_have_an_evidence() -> None:
    """The guide is fitted to the first halves, the bridge is made of the second
    ones.
    """
    posterior = exact_draws(3, (4, 1000))
    first, second = (
        posterior.select(draws=half) for half in (slice(0, 500), slice(500, None))
    )
    guide = ps.guides.fit_gaussian(first, relabellings(3))
    assert_known(
        ps.evidence(guide, DATA, posterior=second, num_samples=2000, chunk=2000),
        log_evidence(3),
    )


@pytest.mark.stochastic
def test_nine_exchangeable_weights_have_an_evidence_though_their_orders_are_too_many_to_list() -> (
    None
):
    """Of places far apart in any order: 9! modes, of mass one each, within 5 errors (1
    in 10^6).
    """
    places, prior = dist.Normal(10.0 * torch.arange(9), 1.0), dist.Normal(0.0, 100.0)

    def nine() -> None:
        w = pyro.sample("w", prior.expand([9]).to_event(1))
        pyro.factor(
            "places", (places.log_prob(w.sort(-1).values) - prior.log_prob(w)).sum(-1)
        )

    posterior = ps.Posterior({"w": places.sample((2, 500))}, kind="independent").attach(
        nine
    )
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([9])})
    first, second = (
        posterior.select(draws=half) for half in (slice(0, 250), slice(250, None))
    )
    found = ps.evidence(
        ps.guides.fit_gaussian(first, group), posterior=second, num_samples=128
    )
    assert abs(found.best.log_evidence - math.lgamma(10)) < 5 * found.best.error + 1e-3


def two_orbits(weights: Any) -> torch.Tensor:
    """Two pairs of modes, the second of half the mass of the first, that no exchange
    connects; its integral is e^2.
    """
    w = weights["w"]
    near, far = (
        dist.Normal(torch.tensor(m), 0.3).to_event(1) for m in ([0.0, 2.0], [6.0, 9.0])
    )
    flipped = w.flip(-1)
    modes = torch.stack(
        [
            near.log_prob(w),
            near.log_prob(flipped),
            far.log_prob(w),
            far.log_prob(flipped),
        ]
    )
    return 2.0 + (
        modes + torch.tensor([1 / 3, 1 / 3, 1 / 6, 1 / 6]).log()[:, None]
    ).logsumexp(0)


def pair() -> None:
    pyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


@pytest.mark.stochastic
def test_a_guide_that_misses_a_mode_is_noticed() -> None:
    """Importance sampling finds two thirds of the integral, with a good Pareto-k: only
    the chains know better.
    """
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    guide = normal_guide(torch.tensor([0.0, 2.0]), torch.full((2,), 0.33))
    mean = torch.where(
        torch.rand(4, 500, 1) < 2 / 3,
        torch.tensor([0.0, 2.0]),
        torch.tensor([6.0, 9.0]),
    )
    draws = mean + 0.3 * torch.randn(4, 500, 2)
    posterior = ps.Posterior({"w": draws}, kind="chains")
    found = evidence(
        guide,
        log_joint=two_orbits,
        symmetry=group,
        posterior=posterior,
        num_samples=2000,
        chunk=2000,
    )
    assert found.pareto_k < 0.7
    assert found.bridge.log_evidence == pytest.approx(2.0, abs=0.2)
    assert found.importance.log_evidence == pytest.approx(
        2.0 + math.log(2 / 3), abs=0.1
    )
    assert any("differ" in doubt for doubt in found.doubts)
    assert "in doubt" in repr(found)


@pytest.mark.stochastic
def test_a_density_that_is_hardly_known_is_doubted() -> None:
    """Copies far apart: ``InfoNCE`` sees log 2 of log 6 nats, and never the draws that
    would make up for it. Weights are even, a good Pareto-k, and the answer is wrong;
    matched units leave nothing open."""
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([3])})

    def target(weights: Any) -> torch.Tensor:
        modes = dist.Normal(torch.tensor([-9.0, 0.0, 9.0]), 0.3).to_event(1)
        return modes.log_prob(weights["w"].sort(-1).values) - math.log(6)

    def triple() -> None:
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    guide = normal_guide(torch.tensor([-9.0, 0.0, 9.0]), torch.full((3,), 0.33), triple)
    found = {
        estimator: evidence(
            guide,
            log_joint=target,
            symmetry=group,
            estimator=estimator,
            num_samples=1000,
            chunk=1000,
        )
        for estimator in (ps.InfoNCE(1), ps.SinkhornImportance(1))
    }
    poor, good = found.values()
    assert poor.pareto_k < 0.7
    assert poor.importance.log_evidence < -0.5
    assert any("open" in doubt for doubt in poor.doubts)
    assert good.importance.log_evidence == pytest.approx(0.0, abs=0.1)
    assert good.doubts == ()


@pytest.mark.stochastic
def test_a_narrow_guide_is_doubted_by_its_weights() -> None:
    """The shape is 1 - 1/36 = 0.97, and its estimate from 735 draws of the tail has a
    deviation of 0.07: below 0.7 in fewer than 1 of 3000 runs."""
    guide = normal_guide(torch.tensor([0.0, 2.0]), torch.full((2,), 0.05))
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    found = evidence(
        guide, log_joint=two_orbits, symmetry=group, num_samples=60_000, chunk=60_000
    )
    assert found.pareto_k > 0.7
    assert any("Pareto" in doubt for doubt in found.doubts)
    assert found.bridge is None


@pytest.mark.stochastic
@pytest.mark.parametrize("chains", [1, 4])
def test_chains_that_hardly_move_and_single_ones_that_drift_are_doubted(
    chains: int,
) -> None:
    """The ratio is a function of both weights, whose correlation is 0.999 from draw to
    draw.
    """
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    guide = normal_guide(torch.tensor([0.3, 2.3]), torch.full((2,), 0.4))
    states = [torch.randn(chains, 2)]
    for _ in range(399):
        states.append(
            0.999 * states[-1] + (1 - 0.999**2) ** 0.5 * torch.randn(chains, 2)
        )
    draws = torch.tensor([0.0, 2.0]) + 0.3 * torch.stack(states, 1)
    found = evidence(
        guide,
        log_joint=two_orbits,
        symmetry=group,
        posterior=ps.Posterior({"w": draws}, kind="chains"),
        num_samples=400 * chains,
    )
    assert any("effective" in doubt for doubt in found.doubts) or chains == 4
    assert any("R-hat" in doubt for doubt in found.doubts)
    few = evidence(
        guide,
        log_joint=two_orbits,
        symmetry=group,
        posterior=ps.Posterior({"w": draws[:, :6]}, kind="independent"),
    )
    assert any("effective" in doubt for doubt in few.doubts)


def sparse() -> None:
    pyro.sample("p", dist.Dirichlet(torch.full((4,), 0.15)))


@pytest.mark.stochastic
def test_sparse_simplices_have_their_evidence() -> None:
    """In float32 the stick breaks into pieces of at least 6e-8: importance sampling
    would be off by 7 of its errors.

    The integral is one; an estimate of light tails is off by four of its errors in 1 of
    10^4 runs."""
    group = ps.Group.declare({"p": ("k",)}, {"p": torch.Size([4])})
    prior = dist.Dirichlet(torch.full((4,), 0.15))
    guide = normal_guide(torch.zeros(3), torch.full((3,), 12.0), sparse)
    found = evidence(
        guide,
        log_joint=lambda w: prior.log_prob(w["p"]),
        symmetry=group,
        num_samples=60_000,
        chunk=20_000,
    )
    assert abs(found.importance.log_evidence) < 4 * found.importance.error
    assert found.importance.error < 0.01


def normal_guide(
    loc: torch.Tensor, scale: torch.Tensor, model: Any = pair
) -> ps.AutoGaussian:
    guide = AutoDiagonalNormal(model)
    guide()
    return ps.AutoGaussian(guide, dist.Normal(loc, scale).to_event(1))


@pytest.mark.stochastic
@pytest.mark.parametrize(("loc", "doubted"), [(0.8, False), (2.5, True)])
def test_a_guide_far_from_the_posterior_is_doubted_though_no_weight_stands_out(
    loc: float, doubted: bool
) -> None:
    """A normal seen by one at a distance has log-normal weights: the evidence lies
    ``loc**2 / 2`` above the ELBO. At 0.8, 1 of 1,000 is doubted for its tail. At 2.5,
    fewer than e^6.25 draws don't see the largest, and the estimate is nearly always too
    low. The bridge is right, up to 4.5 of its errors, which 1 in 10^5 exceeds, and has
    no check."""
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    guide = normal_guide(torch.tensor([-30.0, 30.0 + loc]), torch.ones(2))

    def density(weights: Any) -> torch.Tensor:
        ordered = weights["w"].sort(-1).values
        return dist.Normal(torch.tensor([-30.0, 30.0]), 1.0).log_prob(ordered).sum(-1)

    found = evidence(guide, log_joint=density, symmetry=group)
    assert (
        any("largest weights may be missing" in doubt for doubt in found.doubts)
        == doubted
    )
    draws = ps.Posterior(
        {"w": torch.tensor([-30.0, 30.0]) + torch.randn(1, 2000, 2)}, kind="independent"
    )
    bridged = evidence(
        guide, log_joint=density, symmetry=group, posterior=draws, num_samples=2000
    )
    assert (
        abs(bridged.best.log_evidence + math.log(0.5)) < 4.5 * bridged.best.error + 0.01
    )
    assert all(doubt.startswith("importance sampling") for doubt in bridged.doubts)
    assert bool(bridged.doubts) == doubted


@pytest.mark.stochastic
@pytest.mark.parametrize(("distance", "doubted"), [(1.0, False), (30.0, True)])
def test_a_bridge_between_sets_that_do_not_overlap_is_doubted(
    distance: float, doubted: bool
) -> None:
    """Guide and posterior are normal in two weights: of such draws a bridge over 30
    deviations knows nothing, and over one it is right up to 4.5 errors, which 1 in
    10^5 exceeds."""
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    guide = normal_guide(torch.zeros(2), torch.ones(2))
    there = torch.tensor(distance / math.sqrt(2))

    def density(weights: Any) -> torch.Tensor:
        return dist.Normal(there, 1.0).log_prob(weights["w"]).sum(-1)

    draws = ps.Posterior({"w": there + torch.randn(1, 1000, 2)}, kind="independent")
    found = evidence(guide, log_joint=density, symmetry=group, posterior=draws)
    assert any("don't overlap" in doubt for doubt in found.doubts) == doubted
    if not doubted:
        assert abs(found.best.log_evidence) < 4.5 * found.best.error


def test_a_gaussian_of_a_single_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="one draw, which has no covariance"):
        ps.guides.fit_gaussian(exact_draws(2, (1, 1)), relabellings(2))


def test_doubts_advise_what_is_left_to_do_and_leave_the_bridge_its_error() -> None:
    group = ps.Group.declare({"w": ("k",)}, {"w": torch.Size([2])})
    guide = normal_guide(torch.tensor([-30.0, 33.0]), torch.ones(2))

    def density(weights: Any) -> torch.Tensor:
        ordered = weights["w"].sort(-1).values
        return dist.Normal(torch.tensor([-30.0, 30.0]), 1.0).log_prob(ordered).sum(-1)

    torch.manual_seed(0)
    options = dict(log_joint=density, symmetry=group, num_samples=500)
    (alone,) = evidence(guide, **options).doubts  # type: ignore[arg-type]
    assert alone.endswith("; fit the guide to more draws, or add chains by posterior=")
    near = torch.tensor([-30.0, 31.0]) + torch.randn(1, 500, 2)
    draws = ps.Posterior({"w": near}, kind="independent")
    found = evidence(guide, posterior=draws, **options)  # type: ignore[arg-type]
    estimate = EvidenceEstimate(-5.0, 0.1, 100, 80.0)
    doubts = found.doubts[:1]
    assert "posterior=" not in doubts[0]
    assert "train" not in doubts[0]
    bridged = replace(found, doubts=doubts, bridge=estimate)
    assert "bridge sampling     ≈ -5 ± 0.1" in repr(bridged)
    assert "importance sampling is in doubt" in repr(bridged)
    assert repr(bridged).endswith("95 % interval: -5.20 to -4.80")
    assert "0.1</td>" in bridged._repr_html_()
    doubted = repr(replace(bridged, doubts=(*doubts, "symmetry: it says at least")))
    assert "±" not in doubted.splitlines()[4]
    assert "interval" not in doubted
    few = EvidenceEstimate(-5.0, 0.1, 100, 8.0)
    good = EvidenceEstimate(-5.0, 0.01, 512, 400.0)
    (doubt,) = doubts_of(good, 0.2, 0.1, -5.1, bridged=few, r_hat=0.99)
    assert doubt == "bridge sampling: too few draws, by 8 effective draws"


def test_a_model_whose_data_are_missing_is_named() -> None:
    with pytest.raises(TypeError, match=r"model model takes \(data.*no arguments"):
        evidence(ps.AutoSymmetrized(mixture(2)).setup(DATA))
