"""Unit blocks equal the dense Gaussian that they stand for, in density, moments, moves
and files.
"""

import copy
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.distributions import ExactOrbit, UnitBlocks
from pyro_symmetric.groups import Axis, Units
from pyro_symmetric.guides.base import action_on, layout_of

X, Y = torch.randn(8, 2), torch.randn(8)


def network() -> ps.BayesianModel:
    net = nn.Sequential(
        nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)
    )
    return ps.BayesianModel(net.double(), likelihood=ps.GaussianLikelihood(0.5))


def drawn(model: ps.BayesianModel) -> tuple[ps.AutoUnitBlocks, ps.Group]:
    """A guide with random correlations, and its group of permutations and signs."""
    group = ps.find_symmetry(model.net, X.double()).finite
    guide = ps.AutoUnitBlocks(model, group).setup(X.double(), Y.double())
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return guide, group


def dense(guide: ps.AutoUnitBlocks) -> torch.distributions.MultivariateNormal:
    """The same Gaussian, block by block by hand."""
    covariance = guide.scale.detach().square().diag()
    law = guide.get_posterior()
    for positions, trils in zip(law.positions, law.scale_trils, strict=True):
        for where, tril in zip(positions, trils, strict=True):
            covariance[where[:, None], where] = (tril @ tril.mT).detach()
    return torch.distributions.MultivariateNormal(guide.loc.detach(), covariance)


def test_a_weight_between_two_layers_belongs_to_the_unit_that_it_enters() -> None:
    guide, _ = drawn(network())
    layout = layout_of(guide)
    numbers = layout.unflatten(torch.arange(layout.dim))
    first, second = sorted(
        (p.sort(-1).values.tolist() for p in guide.get_posterior().positions),
        key=lambda rows: len(rows[0]),
    )
    in_w, in_b, mid_w, mid_b, out_w, out_b = (
        numbers[f"net.{k}.{n}"] if f"net.{k}.{n}" in numbers else numbers[f"{k}.{n}"]
        for k in (0, 2, 4)
        for n in ("weight", "bias")
    )
    assert first == [sorted([*in_w[u].tolist(), int(in_b[u])]) for u in range(3)]
    assert second == [
        sorted([*mid_w[u].tolist(), int(mid_b[u]), int(out_w[0, u])]) for u in range(2)
    ]
    assert guide.get_posterior().rest.tolist() == out_b.tolist()


def test_a_weight_of_units_inside_others_belongs_to_the_innermost() -> None:
    """Two heads of two rows of three weights each."""
    row = torch.arange(4)
    units = [
        Units("heads", 2, (Axis("w", 0, row.reshape(2, 2).mT),)),
        Units("rows", 2, (Axis("w", 0, row[None]),), parent="heads", copies=2),
    ]

    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(4, 3), 1.0).to_event(2))

    group = ps.Group(units, {"w": torch.Size([4, 3])})
    guide = ps.AutoUnitBlocks(model, group).setup()
    (positions,) = guide.get_posterior().positions
    assert positions.tolist() == torch.arange(12).reshape(4, 3).tolist()


def test_every_deviation_starts_at_the_initial_scale() -> None:
    def model() -> None:
        pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        pyro.sample("beside", dist.Normal(torch.zeros(4), 1.0).to_event(1))

    group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.Size([3, 2])})
    guide = ps.AutoUnitBlocks(model, group, init_scale=0.3).setup()
    stddev = guide.get_posterior().stddev.detach()
    torch.testing.assert_close(stddev, torch.full((10,), 0.3))


def test_density_moments_and_entropy_are_those_of_the_dense_gaussian() -> None:
    torch.manual_seed(0)
    guide, _ = drawn(network())
    q, truth = guide.get_posterior(), dense(guide)
    draws = q.rsample((7,))
    torch.testing.assert_close(q.log_prob(draws), truth.log_prob(draws))
    torch.testing.assert_close(q.entropy(), truth.entropy())
    loc, scale = guide._loc_scale()
    torch.testing.assert_close(scale, truth.stddev)
    median, upper = (
        torch.cat([v[k].flatten() for v in guide.quantiles([0.5, 0.975]).values()])
        for k in (0, 1)
    )
    torch.testing.assert_close(upper, loc + 1.959964 * truth.stddev)
    torch.testing.assert_close(median, loc.detach())


def test_at_the_posterior_of_separate_regressions_the_elbo_is_the_evidence() -> None:
    """Weights of a unit are correlated by its inputs, units are independent: the family
    holds the posterior.
    """
    torch.manual_seed(0)
    x = torch.randn(12, 3, dtype=torch.float64)
    y = torch.randn(12, 4, dtype=torch.float64)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(4, 3).double(), 1.0).to_event(2))
        pyro.sample("y", dist.Normal(x @ w.mT, 0.3).to_event(2), obs=y)

    group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.Size([4, 3])})
    covariance = torch.linalg.inv(torch.eye(3).double() + x.mT @ x / 0.09)
    mean = (covariance @ x.mT @ y / 0.09).mT.reshape(-1)
    start = ps.AutoUnitBlocks(model, group).setup()
    tril = torch.linalg.cholesky(covariance).expand(4, 3, 3)
    guide = ps.AutoGaussian(
        start, UnitBlocks(mean, [torch.arange(12).reshape(4, 3)], [tril])
    )
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(12).double(), x @ x.mT + 0.09 * torch.eye(12)
    )
    evidence = float(marginal.log_prob(y.mT).sum())
    # whatever the draw
    assert Trace_ELBO().loss(model, guide) == pytest.approx(-evidence, rel=1e-6)


def test_the_symmetrised_density_is_the_sum_over_all_elements() -> None:
    torch.manual_seed(1)
    model = network()
    base, group = drawn(model)
    guide = ps.AutoSymmetrized(model, group, base=base, estimator=ExactOrbit()).setup(
        X.double(), Y.double()
    )
    action, q = action_on(guide, group), dense(base)
    value = guide.get_posterior().sample((3,))
    elements = group.enumerate()
    terms = torch.stack([q.log_prob(action(one, elements)) for one in value])
    truth = terms.logsumexp(-1) - group.log_order()
    torch.testing.assert_close(guide.get_posterior().log_prob(value), truth)


def test_the_push_forward_has_the_density_of_moved_draws() -> None:
    torch.manual_seed(2)
    guide, group = drawn(network())
    element = group.sample()
    moved = ps.push_forward(guide, element)
    draws = guide.get_posterior().sample((5,))
    found = moved.get_posterior().log_prob(action_on(guide, group)(draws, element))
    torch.testing.assert_close(found, guide.get_posterior().log_prob(draws))
    assert not torch.allclose(moved.loc, guide.loc)


def test_a_push_forward_that_would_tear_units_apart_is_refused() -> None:
    shapes = {"w": torch.Size([3, 2]), "v": torch.Size([3])}

    def model() -> None:
        for site, shape in shapes.items():
            pyro.sample(site, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape)))

    guide = ps.AutoUnitBlocks(
        model, ps.Group.declare({"w": ("unit", None), "v": ("unit",)}, shapes)
    ).setup()
    other = ps.Group.declare({"v": ("entry",)}, shapes)
    with pytest.raises(ValueError, match="element"):
        ps.push_forward(guide, other.element({"entry": torch.tensor([1, 0, 2])}))


@pytest.mark.parametrize("wrap", [lambda model, base, group: base, ps.AutoSymmetrized])
def test_files_pickles_and_copies_have_the_same_density(wrap, tmp_path) -> None:
    torch.manual_seed(3)
    model = network()
    base, group = drawn(model)
    if wrap is ps.AutoSymmetrized:
        guide = ps.AutoSymmetrized(
            model, group, base=base, estimator=ExactOrbit()
        ).setup(X.double(), Y.double())
    else:
        guide = base
    draws = guide.get_posterior().sample((4,))
    ps.save_guide(guide, tmp_path / "guide")
    loaded = ps.load_guide(tmp_path / "guide", device=X.device)
    for other in (loaded, pickle.loads(pickle.dumps(guide)), copy.deepcopy(guide)):
        torch.testing.assert_close(
            other.get_posterior().log_prob(draws), guide.get_posterior().log_prob(draws)
        )
        assert {
            site: value.shape for site, value in other.sample_posterior((2,)).items()
        } == {site: (2, *shape) for site, shape in layout_of(guide).site_shapes.items()}


def test_blocks_of_more_weights_than_a_sketch_have_an_estimate() -> None:
    net, x = (
        nn.Sequential(nn.Linear(300, 24), nn.Tanh(), nn.Linear(24, 1)),
        torch.randn(4, 300),
    )
    model = ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(0.5))
    group, estimator = ps.find_symmetry(net, x).finite, ps.SinkhornImportance(4)
    guide = ps.AutoSymmetrized(
        model, group, base=ps.AutoUnitBlocks, estimator=estimator
    ).setup(x, torch.randn(4))
    assert math.isfinite(Trace_ELBO().loss(model, guide, x, torch.randn(4)))
