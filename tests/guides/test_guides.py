"""Guides: symmetrised, pushed forward, interpolated; alone with their parameters; on
disk.
"""

import math
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from torch import nn

from pyro_symmetric.alignment import to_gaussian
from pyro_symmetric.distributions import ExactOrbit
from pyro_symmetric.groups import Group
from pyro_symmetric.guides import (
    AutoSymmetrized,
    load_guide,
    sample_posterior,
    save_guide,
)
from pyro_symmetric.models import BayesianModel

HIDDEN = 3


def network() -> tuple[BayesianModel, Group, torch.Tensor, torch.Tensor]:
    """A small regression with learnt noise, so that one site is constrained and unknown
    to the group.
    """
    net = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    model = BayesianModel(net, 1.0, "gaussian")
    group = Group.declare(
        {
            "0.weight": ("hidden", None),
            "0.bias": ("hidden",),
            "2.weight": (None, "hidden"),
        },
        {name: parameter.shape for name, parameter in net.named_parameters()},
    )
    x = torch.linspace(-2, 2, 30)[:, None]
    return model, group, x, torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(30)


def mixture(data: torch.Tensor) -> None:
    """Three exchangeable components, with a simplex and a positive site; one plate
    around components.
    """
    weights = pyro.sample("weights", dist.Dirichlet(torch.ones(3)))
    with pyro.plate("components", 3):
        locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
        scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    with pyro.plate("data", len(data)):
        pyro.sample(
            "x",
            dist.MixtureSameFamily(
                dist.Categorical(weights), dist.Normal(locs, scales)
            ),
            obs=data,
        )


MIXTURE_GROUP = Group.declare(
    {"weights": ("k",), "locs": ("k",), "scales": ("k",)},
    {"weights": torch.Size([3]), "locs": torch.Size([3]), "scales": torch.Size([3])},
)


def steps(
    model: Any, guide: Any, *data: torch.Tensor, number: int = 60, elbo: Any = None
) -> list[float]:
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), elbo or Trace_ELBO())
    return [svi.step(*data) for _ in range(number)]


# symmetrised --------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize("elbo", [Trace_ELBO, TraceMeanField_ELBO])
def test_the_symmetrised_elbo_is_the_elbo_plus_the_information(elbo: type) -> None:
    """ELBO(q̄) from draws of q̄ itself, every copy of them, against SVI's loss, which
    draws from q alone.

    Both are means of thousands of draws; the comparison is at 5 standard errors: false
    alarm below 1 in 10^6.
    """
    model, group, x, y = network()
    guide = AutoSymmetrized(model, group, estimator=ExactOrbit(), init_scale=0.5).setup(
        x, y
    )
    with torch.no_grad():
        latent = guide.get_posterior().sample((8000,))
        weights = guide.unpack(latent)
        log_volume = weights["noise_scale"].log()
        terms = (
            model.log_joint(weights, x, y)
            + log_volume
            - guide.get_posterior().log_prob(latent)
        )
        particles = elbo(
            num_particles=8000, vectorize_particles=True, max_plate_nesting=1
        )
        loss = particles.loss(model, guide, x, y)
        information = guide.base.get_posterior().log_prob(
            latent
        ) - guide.get_posterior().log_prob(latent)
    error = 5 * math.sqrt(2) * float(terms.std()) / math.sqrt(8000)
    assert -loss == pytest.approx(float(terms.mean()), abs=error)
    # The orbit's copies are further than q's own draws from q: without symmetrising,
    # the same terms would differ.
    assert float(information.mean()) < -5 * float(information.std()) / math.sqrt(8000)


def test_a_group_of_another_model_is_refused_by_site() -> None:
    model, _, x, y = network()
    other = Group.declare({"5.weight": ("unit",)}, {"5.weight": torch.Size([3])})
    with pytest.raises(ValueError, match=r"5\.weight.*0\.weight"):
        AutoSymmetrized(model, other).setup(x, y)
    wider = Group.declare({"0.bias": ("unit",)}, {"0.bias": torch.Size([4])})
    with pytest.raises(ValueError, match=r"0\.bias.*\(3,\).*\(4,\)"):
        AutoSymmetrized(model, wider).setup(x, y)


# draws --------------------------------------------------------------------------------


@pytest.mark.stochastic
@pytest.mark.parametrize(
    "guide_class", [AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal]
)
def test_draws_of_stock_guides_have_their_moments(guide_class: type) -> None:
    """Means of 20,000 draws at 6 standard errors over 11 weights: false alarm below 1
    in 10^7.
    """
    model, _, x, y = network()
    guide = guide_class(model, init_scale=0.3)
    steps(model, guide, x, y, number=20)
    moments, draws = to_gaussian(guide), sample_posterior(guide, (20_000,))
    for site in ("0.weight", "2.weight"):
        error = moments.scale[site] / math.sqrt(20_000)
        assert bool(((draws[site].mean(0) - moments.loc[site]).abs() < 6 * error).all())
        torch.testing.assert_close(
            draws[site].std(0), moments.scale[site], rtol=0.05, atol=0
        )
    logs = draws["noise_scale"].log()
    assert abs(float(logs.mean() - moments.loc["noise_scale"])) < 6 * float(
        logs.std()
    ) / math.sqrt(20_000)


# on disk ------------------------------------------------------------------------------


def test_a_mixture_guide_survives_the_disk_with_its_plates(tmp_path: Path) -> None:
    data = torch.randn(30)
    guide = AutoSymmetrized(mixture, MIXTURE_GROUP, estimator=ExactOrbit()).setup(data)
    save_guide(guide, tmp_path / "guide.safetensors")
    loaded = load_guide(tmp_path / "guide.safetensors")
    torch.testing.assert_close(
        loaded.sample_posterior((4,))["weights"].sum(-1), torch.ones(4)
    )
    assert all(math.isfinite(loss) for loss in steps(mixture, loaded, data, number=5))


def test_what_is_no_guide_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no guide"):
        load_guide(tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("not a guide")
    with pytest.raises(ValueError, match="no guide or is damaged"):
        load_guide(tmp_path / "text.safetensors")
    model, _, x, y = network()
    stock = AutoDelta(model)
    stock(x, y)
    with pytest.raises(TypeError, match="AutoDelta"):
        save_guide(stock, tmp_path / "delta.safetensors")


def test_sites_of_a_guide_have_the_density_of_pyro_s_own() -> None:
    def model() -> None:
        pyro.sample("real", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("positive", dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        pyro.sample("simplex", dist.Dirichlet(torch.ones(4)))
        with pyro.plate("rows", 5):
            pyro.sample("in a plate", dist.Beta(2.0, 2.0))

    group = Group.declare({"real": ("k",)}, {"real": torch.zeros(3)})
    guide = AutoSymmetrized(model, group, estimator=ExactOrbit()).setup()
    trace = pyro.poutine.trace(guide).get_trace()
    for name in ("real", "positive", "simplex", "in a plate"):
        own, value = trace.nodes[name]["fn"], trace.nodes[name]["value"]
        stock = dist.Delta(
            value, own.log_density.expand(own.batch_shape), own.event_dim
        )
        support = guide.prototype_trace.nodes[name]["fn"].support
        map_to = torch.distributions.biject_to(support)
        jacobian = map_to.inv.log_abs_det_jacobian(value, map_to.inv(value))
        jacobian = jacobian.sum() if len(own.batch_shape) == 0 else jacobian
        torch.testing.assert_close(
            own.log_prob(value), jacobian + torch.zeros(own.batch_shape)
        )
        torch.testing.assert_close(own.log_prob(value.clone()), stock.log_prob(value))
        assert bool((own.log_prob(value + 1) == -torch.inf).all())
