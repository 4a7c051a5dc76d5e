"""Several sources at once, and posteriors of draws, are aligned as one by one, and as
their definitions say.
"""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoLowRankMultivariateNormal

from pyro_symmetric.alignment import align
from pyro_symmetric.groups import Action, Group
from pyro_symmetric.posterior.posterior import Posterior

from .cases import squared_distance, weights_of


def posterior_of(group, centre, spread=0.1):
    noise = weights_of(group, 3, 40)
    return Posterior(
        {site: centre[site] + spread * noise[site] for site in centre}, kind="chains"
    )


def test_moments_of_a_posterior_are_those_of_its_draws(mlp):
    group = mlp([4, 6, 3]).permutations
    centre, planted = weights_of(group), group.sample()
    first, second = (
        posterior_of(group, centre),
        posterior_of(group, planted.inverse()(centre)),
    )
    result = align(second, first, group)
    assert result.element.equal(planted)
    flat = [{s: v.flatten(0, 1) for s, v in p.samples.items()} for p in (first, second)]
    expected = 0.0
    for reduce in (lambda v: v.mean(0), lambda v: v.std(0, correction=0)):
        one, other = ({s: reduce(v) for s, v in draws.items()} for draws in flat)
        expected += float(squared_distance(planted(other), one))
    assert result.cost == pytest.approx(expected, rel=1e-10)


def test_the_marginal_distance_of_correlated_guides_is_a_lower_bound_of_the_true_one():
    group = Group.declare({"w": ("h", None)}, {"w": torch.zeros(3, 2)})

    def model():
        pyro.sample("w", dist.Normal(0.0, 1.0).expand([3, 2]).to_event(2))

    guides = []
    for _ in range(2):
        guide = AutoLowRankMultivariateNormal(model, rank=2)
        guide._setup_prototype()
        for parameter in guide.parameters():
            parameter.data = torch.randn_like(parameter)
        guides.append(guide)
    result = align(guides[1], guides[0], group)
    q0, q1 = (guide.get_posterior() for guide in guides)
    action = Action(group, ["w"])
    index = action(torch.arange(6.0), result.element).long()
    s0, s1 = (
        q0.covariance_matrix.double(),
        q1.covariance_matrix.double()[index][:, index],
    )
    values, vectors = torch.linalg.eigh(s0)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ s1 @ root).clamp_min(0).sqrt().sum()
    true = (
        (q0.loc.double() - q1.loc.double()[index]).square().sum()
        + s0.trace()
        + s1.trace()
        - 2 * cross
    )
    assert 0 < result.cost <= float(true.detach())
