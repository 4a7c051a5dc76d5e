"""Divergences of a guide's units from their priors: planted guides, closed forms,
quadrature.
"""

import math
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal, AutoIAFNormal, AutoNormal
from pyro.infer.autoguide.initialization import init_to_value
from torch import nn

import pyro_symmetric as ps
from pyro_symmetric.guides import unit_divergences
from pyro_symmetric.guides.collapse import UnitDivergences
from pyro_symmetric.guides.gaussian import plain_posterior

UNITS = 50
NETWORKS = [
    nn.Sequential(nn.Linear(1, UNITS), nn.Tanh(), nn.Linear(UNITS, 1)),
    nn.Sequential(nn.Linear(4, UNITS), nn.ReLU(), nn.Linear(UNITS, 3)),
    nn.Sequential(nn.Linear(64, UNITS), nn.Tanh(), nn.Linear(UNITS, 1)),
    nn.Sequential(nn.Linear(2, UNITS, bias=False), nn.GELU(), nn.Linear(UNITS, 2)),
    nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 30), nn.ReLU())
    + nn.Sequential(nn.Linear(30, 1)),
]


def hidden_units(net: nn.Sequential) -> ps.Group:
    """Permute the units of every hidden layer."""
    axes: dict[str, tuple[str | None, ...]] = {}
    entering = None
    for name, layer in net.named_children():
        if isinstance(layer, nn.Linear):
            leaving = None if layer is net[-1] else f"layer {name}"
            axes[f"{name}.weight"] = (leaving, entering)
            axes[f"{name}.bias"] = (leaving,)
            entering = leaving
    weights = dict(net.named_parameters())
    return ps.Group.declare({k: v for k, v in axes.items() if k in weights}, weights)


def planted(guide: Any, model: Any, place: float) -> None:
    """Put a mean-field guide ``place`` deviations of the prior beside its mean."""
    priors = [prior.base_dist for prior in model.priors().values()]
    scale = torch.cat([prior.scale.flatten() for prior in priors])
    with torch.no_grad():
        guide.loc.copy_(place * scale)
        guide.scale = scale.clone()


@pytest.mark.parametrize("net", NETWORKS)
def test_all_units_at_the_prior_are_named_and_none_far_from_it(net: nn.Module) -> None:
    """Ten networks: five, with two priors each."""
    x, y = torch.randn(2, net[0].in_features), torch.randn(2)
    group = hidden_units(net)
    for fan_in in (False, True):
        model = ps.BayesianModel(net, ps.GaussianPrior(1.0, fan_in), "gaussian", 2)
        guide = AutoDiagonalNormal(model)
        guide(x, y)
        planted(guide, model, 0.0)
        at_prior = unit_divergences(guide, group)
        assert (at_prior.at_prior, sum(map(len, at_prior.nats))) == (UNITS, UNITS)
        assert f"{UNITS} of {UNITS} units are at the prior" in repr(at_prior)
        assert "train on the symmetrised ELBO" in repr(at_prior)
        planted(guide, model, 5.0)
        far = unit_divergences(guide, group)
        assert far.at_prior == 0
        assert repr(far).startswith(f"0 of {UNITS} units")
        assert "train" not in repr(far)


def locations(prior: Any) -> Any:
    """Three exchangeable locations and, beside them, a weight that isn't moved."""

    def model() -> None:
        with pyro.plate("units", 3):
            pyro.sample("w", prior)
        pyro.sample("other", dist.Normal(7.0, 1.0))

    return model


GROUP = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal])
@pytest.mark.parametrize(
    ("prior", "tolerance"),
    [
        (dist.Normal(0.5, 2.0), 1e-5),
        (dist.Laplace(0.0, 1.0), 0.25),
        (dist.Gamma(2.0, 1.0), 0.25),
        (dist.Beta(2.0, 3.0), 0.25),
    ],
)
def test_divergences_are_those_of_quadrature(
    kind: Any, prior: Any, tolerance: float
) -> None:
    """Of unconstrained values; five errors or more of 256 draws (1 in 10^6)."""
    guide = kind(locations(prior), init_scale=0.7)
    guide()
    transform = dist.transforms.biject_to(prior.support)
    for unit, nats in enumerate(unit_divergences(guide, GROUP).nats[0]):
        centre = transform.inv(guide.median()["w"][unit]).double()
        base = dist.Normal(centre, torch.tensor(0.7).double())
        z = centre + torch.linspace(-6, 6, 4001).double()
        log_prior = prior.log_prob(transform(z)) + transform.log_abs_det_jacobian(
            z, transform(z)
        )
        log_guide = base.log_prob(z)
        exact = torch.trapezoid(log_guide.exp() * (log_guide - log_prior), z)
        assert float(nats) == pytest.approx(float(exact), abs=tolerance)


def test_the_evidence_averages_over_the_scales_that_priors_depend_on() -> None:
    """Against the closed form of the expected divergence, whatever the start was."""

    def model() -> None:
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        with pyro.plate("units", 3):
            pyro.sample("w", dist.Normal(0.0, scale))

    guide = ps.AutoSymmetrized(model, GROUP, init_scale=0.1).setup()
    log_scale = -3.0
    with torch.no_grad():
        guide.base.loc.copy_(torch.tensor([log_scale, 0.0, 0.0, 1.0]))
        guide.base.scale = torch.tensor([1e-4, *[math.exp(log_scale)] * 3])
    units = ps.evidence(guide).units
    assert units is not None
    exact = torch.tensor([0.0, 0.0, 0.5 * math.exp(-2 * log_scale)])
    torch.testing.assert_close(units.nats[0], exact, rtol=2e-3, atol=1e-3)
    assert (units.at_prior, units.symmetrized) == (2, True)


def test_divergences_are_means_over_the_priors_that_are_given() -> None:
    """Against the closed form of two normals."""
    guide = AutoDiagonalNormal(locations(dist.Normal(0.0, 1.0)), init_scale=0.7)
    guide()
    other = dist.Normal(7.0, 1.0)
    scales = (0.5, 2.0)
    priors = [{"w": dist.Normal(0.0, scale), "other": other} for scale in scales]
    square = guide.median()["w"].square() + 0.7**2
    exact = [square / (2 * s**2) + math.log(s / 0.7) - 0.5 for s in scales]
    found = unit_divergences(guide, GROUP, priors).nats[0]
    torch.testing.assert_close(found, sum(exact) / 2)


@pytest.mark.parametrize(
    ("live", "nats", "advised"),
    [(0, 0.0, True), (24, 7.8, True), (25, 7.8, False), (24, 7.9, False)],
)
def test_the_symmetrised_elbo_is_advised_if_most_units_are_at_the_prior_and_none_far(
    live: int, nats: float, advised: bool
) -> None:
    """Of 50 units: far is beyond twice log 50 = 3.91, of the largest set."""
    units = torch.zeros(50)
    units[:live] = nats
    shown = repr(UnitDivergences((units, torch.full((7,), 99.0))))
    assert shown.startswith(f"{50 - live} of 57 units are at the prior")
    assert "; log n = 3.9" in shown
    assert ("train on the symmetrised ELBO" in shown) == advised
    assert "train" not in repr(UnitDivergences((units,), symmetrized=True))


def test_evidence_and_guide_show_the_units_in_a_line() -> None:
    model = locations(dist.Normal(0.0, 1.0))
    plain = AutoNormal(model, init_scale=1.0)
    plain()
    guide = ps.AutoSymmetrized(model, GROUP, base=plain).setup()
    state = torch.get_rng_state()
    assert "3 of 3 units are at the prior" in repr(guide)
    assert torch.equal(torch.get_rng_state(), state)
    found = ps.evidence(guide)
    assert found.units is not None
    share = (found.symmetrized_elbo - found.elbo) / math.log(6)
    assert found.units.share == pytest.approx(share)
    assert f"{found.units}" in repr(found)
    assert "train on the symmetrised ELBO" in repr(found)
    trained = ps.AutoSymmetrized(model, GROUP, init_scale=1.0)
    assert "units" not in repr(trained)  # not set up yet
    assert "train" not in repr(trained.setup())
    off = ps.AutoSymmetrized(model, GROUP, estimator=ps.InfoNCE(0), init_scale=1.0)
    assert "train on the symmetrised ELBO" in repr(off.setup())


def test_divergences_of_events_are_those_of_plates() -> None:
    def event() -> None:
        pyro.sample("w", dist.LogNormal(0.0, 1.0).expand([3]).to_event(1))
        pyro.sample("other", dist.Normal(7.0, 1.0))

    sets = list[torch.Tensor]()
    for model in (event, locations(dist.LogNormal(0.0, 1.0))):
        pyro.set_rng_seed(0)
        guide = AutoDiagonalNormal(model, init_scale=0.7)
        guide()
        sets.append(unit_divergences(guide, GROUP).nats[0])
    assert torch.allclose(*sets)


def test_of_a_flow_and_of_a_simplex_no_divergence_is_told() -> None:
    pyro.set_rng_seed(0)
    model = locations(dist.Normal(0.0, 1.0))
    flow = ps.AutoSymmetrized(model, GROUP, base=AutoIAFNormal).setup()
    assert "prior" not in repr(flow)
    assert ps.evidence(flow, num_samples=20).units is None

    def shares() -> None:
        pyro.sample("w", dist.Dirichlet(torch.ones(3)))

    guide = ps.AutoSymmetrized(shares, GROUP).setup()
    assert "prior" not in repr(guide)
    assert ps.evidence(guide, num_samples=20).units is None


class Noise:
    """Normal numbers one after the other, however many are asked for at once."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, shape: Any, dtype: Any, device: Any) -> torch.Tensor:
        return torch.from_numpy(self.random.standard_normal(tuple(shape))).to(dtype)


def test_stock_guides_train_as_a_symmetrised_one_whose_estimator_has_no_terms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From one start and the same noise: so what else changes is due to the objective.

    Stock guides may train the very tensors of ``init_to_value``: each gets copies.
    """
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 1))
    model = ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(0.3))
    x = torch.randn(15, 2)
    y = x[:, 0].sin()
    weights = model.initial_weights()
    makes = {
        "stock": lambda **start: AutoNormal(model, **start),
        "flat": lambda **start: AutoDiagonalNormal(model, **start),
        "symmetrised": lambda **start: ps.AutoSymmetrized(
            model, hidden_units(net), estimator=ps.InfoNCE(0), **start
        ),
    }
    losses, posteriors = {}, {}
    for name, make in makes.items():
        pyro.clear_param_store()
        start = {site: value.clone() for site, value in weights.items()}
        guide = make(init_loc_fn=init_to_value(values=start), init_scale=0.1)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), Trace_ELBO())
        with torch.no_grad():
            guide(x, y)
        monkeypatch.setattr(torch.distributions.normal, "_standard_normal", Noise())
        losses[name] = [svi.step(x, y) for _ in range(60)]
        posteriors[name] = plain_posterior(guide)
    for name in ("flat", "symmetrised"):
        assert losses[name] == pytest.approx(losses["stock"], rel=1e-4)
        for moment in ("mean", "stddev"):
            torch.testing.assert_close(
                getattr(posteriors[name], moment),
                getattr(posteriors["stock"], moment),
                rtol=1e-3,
                atol=1e-4,
            )
