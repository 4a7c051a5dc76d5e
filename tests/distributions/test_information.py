"""Moments, entropy and information of the symmetrised law, and its divergence from a
prior.
"""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor
from torch.distributions import constraints, kl_divergence

from pyro_symmetric.distributions import (
    ExactOrbit,
    InfoNCE,
    SinkhornImportance,
    Symmetrized,
)
from pyro_symmetric.groups import Action, Group

from .groups import GROUPS, action_of, base, one_layer

PAIR = Action(Group.declare({"w": ("unit",)}, {"w": torch.Size([2])}), ["w"])
BASE = dist.Normal(
    torch.tensor([-0.6, 0.9], dtype=torch.float64), torch.tensor([0.5, 0.8]).double()
).to_event(1)
PRIOR = dist.Normal(
    torch.tensor([0.2, -0.1], dtype=torch.float64), torch.tensor([1.0, 1.5]).double()
).to_event(1)


def grid() -> tuple[Tensor, Tensor, float]:
    """Points, the symmetrised log-density there by its definition, and the area of
    each.
    """
    line = torch.linspace(-6, 6, 601, dtype=torch.float64)
    points = torch.cartesian_prod(line, line)
    log_density = torch.logaddexp(
        BASE.log_prob(points), BASE.log_prob(points.flip(-1))
    ) - math.log(2)
    return points, log_density, 0.02**2


@pytest.mark.parametrize("name", list(GROUPS))
@pytest.mark.parametrize("batch", [(), (2,)])
def test_mean_and_variance_are_averages_over_all_elements(
    name: str, batch: tuple[int, ...]
) -> None:
    action = action_of(GROUPS[name])
    q = base(action.dim, 1.0, *batch)
    elements = action.group.enumerate().select((slice(None), *[None] * len(batch)))
    means = action(q.mean, elements)
    variances = (
        action((q.variance + q.mean.square()).sqrt(), elements).square().mean(0)
        - means.mean(0).square()
    )
    symmetrized = Symmetrized(q, action)
    torch.testing.assert_close(symmetrized.mean, means.mean(0))
    torch.testing.assert_close(symmetrized.variance, variances)


def test_a_permuted_simplex_has_no_exact_moments() -> None:
    group = Group.declare({"p": ("k",)}, {"p": torch.Size([3])})
    symmetrized = Symmetrized(
        dist.Normal(torch.zeros(2), 1.0).to_event(1),
        Action(group, {"p": constraints.simplex}),
    )
    with pytest.raises(NotImplementedError, match="draws of sample"):
        symmetrized.mean  # noqa: B018


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "estimator", [ExactOrbit(), SinkhornImportance(2), InfoNCE(1)], ids=repr
)
@pytest.mark.parametrize("known", [True, False])
def test_entropy_and_information_are_those_of_quadrature_or_below(
    estimator: Any, known: bool
) -> None:
    """At 5 standard errors: false alarm below 1 in 10^6."""
    _, log_density, area = grid()
    # which has no entropy of its own
    q = BASE if known else dist.TransformedDistribution(BASE, [])
    symmetrized = Symmetrized(q, PAIR, estimator)
    entropy = -float((log_density.exp() * log_density).sum()) * area
    for found, truth in (
        (symmetrized.entropy(20_000), entropy),
        (symmetrized.mutual_information(20_000), entropy - float(BASE.entropy())),
    ):
        gap = float(found.value) - truth
        assert found.bound == ("exact" if estimator == ExactOrbit() else "lower")
        assert gap < 5 * float(found.standard_error)
        assert gap > -5 * float(found.standard_error) - (
            0.4 if estimator == InfoNCE(1) else 1e-3
        )
        assert 0 < float(found.standard_error) < 0.02


def test_information_has_the_base_s_batch_shape_and_ends_at_the_group_s_logarithm() -> (
    None
):
    action = action_of(one_layer(5))
    found = Symmetrized(
        base(action.dim, 30.0, 3), action, ExactOrbit()
    ).mutual_information(10)
    torch.testing.assert_close(
        found.value, torch.full((3,), math.log(120), dtype=torch.float64)
    )
    assert found.standard_error.shape == (3,)
    with pytest.raises(ValueError, match="num_samples"):
        Symmetrized(BASE, PAIR).entropy(1)


@pytest.mark.stochastic
@pytest.mark.parametrize("estimator", [ExactOrbit(), InfoNCE(1)], ids=repr)
def test_divergence_from_a_normal_prior_is_that_of_quadrature_or_above(
    estimator: Any,
) -> None:
    """The prior isn't invariant. At 5 standard errors: false alarm below 1 in 10^6."""
    points, log_density, area = grid()
    truth = (
        float((log_density.exp() * (log_density - PRIOR.log_prob(points))).sum()) * area
    )
    many = Symmetrized(BASE.expand((20_000,)), PAIR, estimator)
    found = kl_divergence(many, PRIOR)
    error = float(found.std()) / len(found) ** 0.5
    assert float(found.mean()) - truth > -5 * error
    assert float(found.mean()) - truth < 5 * error + (
        0.0 if estimator == ExactOrbit() else 0.4
    )


@pytest.mark.stochastic
def test_a_base_without_rsample_is_trained_by_its_score() -> None:
    """Gradients of a mixture's weights, against those of quadrature: 5 standard errors,
    false alarm below 1 in 10^5.
    """
    logits = torch.tensor([0.5, -0.5], dtype=torch.float64)
    pyro.param("logits", logits)

    def family(logits: Tensor) -> Any:
        loc = torch.tensor([[-1.0, 0.5], [2.0, 0.0]], dtype=torch.float64)
        return dist.MixtureSameFamily(
            dist.Categorical(logits=logits), dist.Normal(loc, 0.7).to_event(1)
        )

    target = dist.Normal(torch.full((2,), 1.0, dtype=torch.float64), 0.8).to_event(1)

    def guide() -> None:
        with pyro.plate("particles", 50):
            pyro.sample(
                "w", Symmetrized(family(pyro.param("logits")), PAIR, ExactOrbit())
            )

    def model() -> None:
        with pyro.plate("particles", 50):
            pyro.sample("w", target)

    leaf = logits.clone().requires_grad_()
    points, _, area = grid()
    q = family(leaf)
    log_density = torch.logaddexp(
        q.log_prob(points), q.log_prob(points.flip(-1))
    ) - math.log(2)
    loss = (log_density.exp() * (log_density - target.log_prob(points))).sum() * area
    (expected,) = torch.autograd.grad(loss, leaf)
    assert float(expected.abs().max()) > 0.1
    rows = []
    for _ in range(150):
        pyro.param("logits").unconstrained().grad = None
        SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), Trace_ELBO()).loss_and_grads(
            model, guide
        )
        rows.append(pyro.param("logits").unconstrained().grad / 50)
    found = torch.stack(rows)
    error = found.std(0) / len(found) ** 0.5
    assert bool(((found.mean(0) - expected).abs() < 5 * error).all())
    assert float(error.max()) < 0.3 * float(expected.abs().max())
