"""The methods of a study, each against what it should be in a case that can be
computed.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.guides.base import layout_of
from pyro_symmetric.study import StudySettings, variational
from pyro_symmetric.study.methods import Fit, make_method
from pyro_symmetric.study.networks import drop_units, outgoing_scales, swag
from pyro_symmetric.study.problem import build_problem


def fitted(name: str, problem: Any, **budget: Any) -> list[Fit]:
    method = make_method(
        ":".join([name, *(f"{part}={value}" for part, value in budget.items())])
    )
    return list(method.fit(problem, method.parts, False))


def test_dropped_weights_compute_what_dropped_units_compute() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, groups=2),
        nn.Flatten(),
        nn.Linear(6, 5),
    )
    net.extend([nn.Tanh(), nn.Linear(5, 2)])
    x = torch.randn(3, 1, 4, 4)
    group = outgoing_scales(ps.find_symmetry(net.eval(), x).permutations)
    torch.manual_seed(1)
    weights = drop_units(
        {
            name: value.detach().expand(7, *value.shape)
            for name, value in net.named_parameters()
        },
        group,
        0.4,
    )
    outputs = torch.func.vmap(lambda w: torch.func.functional_call(net, w, (x,)))(
        weights
    )
    for member in range(7):
        # Which units were kept is read off the columns of the weights: of the grouped
        # kernel group by group.
        first = (
            weights["2.weight"][member].reshape(2, 3, 2, 4).abs().amax((1, 3)).flatten()
            > 0
        ).float() / 0.6
        second = (weights["4.weight"][member].abs().amax(0) > 0).float() / 0.6
        units = (weights["6.weight"][member].abs().amax(0) > 0).float() / 0.6
        hidden = (
            net[2](net[1](net[0](x)) * first[:, None, None]) * second[:, None, None]
        )
        torch.testing.assert_close(
            outputs[member], net[6](net[5](net[4](net[3](hidden))) * units)
        )
    for name in ("2.weight", "4.weight", "6.weight"):
        assert 0 < float((weights[name] == 0).float().mean()) < 1


@pytest.mark.stochastic
def test_the_mean_of_dropped_weights_is_the_weights() -> None:
    net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 3))
    group = outgoing_scales(ps.find_symmetry(net, torch.randn(2, 2)).permutations)
    many = drop_units(
        {
            name: value.detach().expand(20000, *value.shape)
            for name, value in net.named_parameters()
        },
        group,
        0.3,
    )
    # Standard error sqrt(0.3 / 0.7 / 20000) = 0.0046 of a weight; five of them: false
    # alarms in 1e-5 of the seeds.
    error = (many["2.weight"].mean(0) - net[2].weight.detach()) / net[2].weight.detach()
    assert float(error.abs().max()) < 5 * 0.0046
    assert torch.equal(many["0.weight"][7], net[0].weight.detach())


@pytest.mark.stochastic
def test_swag_of_all_iterates_has_their_covariance_half_diagonal_half_full() -> None:
    """Of 100,000 draws: entries have errors of at most 0.0045 of the variances; six of
    them, 1 in 10^6.
    """
    model = ps.BayesianModel(nn.Linear(2, 1), likelihood="gaussian")
    iterates = {
        name: prior.sample((30,)).to(torch.float32)
        for name, prior in model.priors().items()
    }
    path = torch.cat(
        [
            iterates["weight"].reshape(30, 2),
            iterates["bias"],
            iterates["noise_scale"].log()[:, None],
        ],
        1,
    )
    found = swag(model, iterates, 30, 100_000)
    draws = torch.cat(
        [found["weight"][:, 0], found["bias"], found["noise_scale"].log()[:, None]], 1
    )
    expected = 0.5 * torch.cov(path.T) + 0.5 * torch.diag(path.var(0, correction=0))
    scale = expected.diagonal().sqrt()
    torch.testing.assert_close(
        (draws.mean(0) - path.mean(0)) / scale, torch.zeros(4), rtol=0, atol=6 * 0.0032
    )
    error = (torch.cov(draws.T) - expected) / torch.outer(scale, scale)
    torch.testing.assert_close(error, torch.zeros(4, 4), rtol=0, atol=6 * 0.0045)


def linear_problem() -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A linear regression with known noise, and the exact mean and covariance of its
    posterior.
    """
    torch.manual_seed(0)
    x = torch.randn(40, 2)
    y = x @ torch.tensor([1.0, -0.5]) + 0.3 + 0.5 * torch.randn(40)
    likelihood = ps.GaussianLikelihood(scale=0.5)
    model = ps.BayesianModel(
        nn.Linear(2, 1), ps.GaussianPrior(0.7), likelihood, num_data=40
    )
    problem = SimpleNamespace(
        model=model,
        x=x,
        y=y,
        num_weights=3,
        is_classification=False,
        settings=SimpleNamespace(draws=20000),
        seed=0,
    )
    features = torch.cat([x, torch.ones(40, 1)], 1).double()
    covariance = torch.linalg.inv(
        features.T @ features / 0.25 + torch.eye(3).double() / 0.49
    )
    return problem, covariance @ features.T @ y.double() / 0.25, covariance


@pytest.mark.stochastic
def test_full_laplace_of_a_linear_model_is_its_posterior() -> None:
    problem, mean, covariance = linear_problem()
    torch.manual_seed(0)
    fit = fitted("laplace-full", problem, steps=800, learning_rate=0.05, batch_size=40)[
        0
    ]
    draws = torch.cat(
        [
            fit.posterior.samples[site][0].reshape(-1, n)
            for site, n in (("weight", 2), ("bias", 1))
        ],
        1,
    )
    # 20,000 draws: five standard errors of mean and covariance; false alarms in under
    # 1e-4 of the seeds.
    deviation = covariance.diagonal().sqrt()
    assert bool(
        (
            (draws.double().mean(0) - mean).abs() < 5 * deviation / 20000**0.5 + 2e-3
        ).all()
    )
    scale = deviation[:, None] * deviation
    assert bool(
        (
            (torch.cov(draws.double().T) - covariance).abs()
            < 5 * scale * (2 / 20000) ** 0.5
        ).all()
    )


def test_a_method_is_asked_for_with_parts_of_its_budget() -> None:
    method = make_method("swag:modes=3:learning_rate=1", quick=True)
    assert method.budget == {
        **make_method("swag", quick=True).budget,
        "modes": 3,
        "learning_rate": 1.0,
    }
    assert method.rows == ["swag:modes=3:learning_rate=1"]
    assert make_method("aligned:modes=5").rows[1] == "aligned midpoint:modes=5"
    with pytest.raises(
        ValueError, match="budget of hmc has no 'member'; it has chains, warmup"
    ):
        make_method("hmc:member=3")
    for value in (0, -1, 2.5, "nan", ""):
        with pytest.raises(
            ValueError,
            match=r"draws of hmc is .*; it must be a positive number like 200",
        ):
            make_method(f"hmc:draws={value}")


def test_several_aligned_runs_lie_in_the_frame_of_the_first() -> None:
    settings = StudySettings(
        data="digits", max_train=60, max_test=40, hidden=(5,), draws=400
    )
    problem = build_problem(settings)
    assert len(problem.dataset.test_x) == 40
    budget = {"modes": 3, "steps": 5, "path_points": 3, "path_draws": 2}
    together, midpoint, unaligned = fitted("aligned", problem, **budget)
    samples = together.posterior.samples["1.weight"]
    assert samples.shape == (3, 400, 5, 64)
    # Means of 400 draws are within a twentieth of a deviation of the guides': aligning
    # them again moves nothing.
    means = [
        {site: value[run].mean(0) for site, value in together.posterior.samples.items()}
        for run in range(3)
    ]
    for other in means[1:]:
        again = ps.align(
            other, means[0], problem.symmetry.permutations, "l2", progress=False
        ).element
        assert torch.equal(again(other)["1.weight"], other["1.weight"])
    assert (
        together.found["details"]["squared_wasserstein_after"]
        < together.found["details"]["squared_wasserstein_before"]
    )
    assert together.found["evidence"] is None  # a mixture's isn't one of its parts'
    for fit in (midpoint, unaligned):
        assert fit.posterior.samples["1.weight"].shape == (1, 400, 5, 64)


def test_evidence_is_averaged_over_permutations_and_signs_as_by_enumeration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two tanh units: q(w) summed over 2! orders and 2^2 signs, written out by
    hand.
    """
    problem = build_problem(
        StudySettings(data="wine", hidden=(2,), activation="tanh", draws=8)
    )
    guides, estimate = [], variational.evidence

    def seeded(guide: Any, **options: Any) -> Any:
        guides.append(guide)
        torch.manual_seed(0)
        return estimate(guide, **options)

    monkeypatch.setattr(variational, "evidence", seeded)
    evidence = fitted("mean-field", problem, steps=20)[0].found["evidence"]
    assert evidence["log_order"] == pytest.approx(math.log(8))
    assert problem.symmetry.log_order() == pytest.approx(math.log(8))
    torch.manual_seed(0)
    base, layout = guides[0].get_posterior(), layout_of(guides[0])
    expected = []
    for _ in range(8):  # of 64 draws each, as evidence takes them
        latent = base.sample((64,))
        weights = layout.constrain(latent)
        copies = []
        for order in ([0, 1], [1, 0]):
            for signs in itertools.product((1.0, -1.0), repeat=2):
                s = torch.tensor(signs)
                moved = {
                    **weights,
                    "0.weight": s[:, None] * weights["0.weight"][:, order],
                    "0.bias": s * weights["0.bias"][:, order],
                    "2.weight": s * weights["2.weight"][:, :, order],
                }
                copies.append(
                    base.log_prob(
                        torch.cat(
                            [moved[site].flatten(1) for site in layout.site_shapes], -1
                        )
                    ).double()
                )
        density = torch.stack(copies).logsumexp(0) - math.log(8)
        expected.append(
            problem.model.log_joint(weights, problem.x, problem.y).double() - density
        )
    # of the difference of two means; six of them: 1 in 10^9 runs
    error = 2**0.5 * evidence["symmetrized_error"]
    assert evidence["symmetrized_elbo"] == pytest.approx(
        float(torch.cat(expected).detach().mean()), abs=6 * error
    )
    # densities are in float32
    assert evidence["symmetrized_elbo"] - evidence["elbo"] <= math.log(8) + 1e-4
