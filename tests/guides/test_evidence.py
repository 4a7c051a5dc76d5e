"""Evidence of any Gaussian guide, and what it says of arguments that don't fit."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoLowRankMultivariateNormal, AutoNormal

import pyro_symmetric as ps

GROUP = ps.PermutationGroup.declare({"locs": ("k",)}, {"locs": torch.Size([3])})


def model(data: torch.Tensor) -> None:
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 2.0).to_event(1))
    with pyro.plate("data", len(data)):
        pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.ones(3) / 3), dist.Normal(locs, 1.0)), obs=data)


DATA = torch.linspace(-3, 3, 12)


@pytest.mark.parametrize("kind", [AutoNormal, AutoDiagonalNormal, AutoLowRankMultivariateNormal])
def test_stock_guides_have_an_evidence_too(kind: Any) -> None:
    """As our guide of the same moments: the same draws if mean-field, else within 5 errors (1 in 10^6)."""
    stock = ps.distinct(kind(model, init_scale=0.5))
    stock(DATA)
    pyro.set_rng_seed(1)
    worth = ps.evidence(stock, ps.log_joint(model, DATA), GROUP)
    pyro.set_rng_seed(1)
    ours = ps.evidence(ps.push_forward(stock, GROUP.identity()), ps.log_joint(model, DATA), GROUP)
    tolerance = 5 * (worth.elbo_error + ours.elbo_error) if kind is AutoLowRankMultivariateNormal else 3e-3
    assert worth.elbo == pytest.approx(ours.elbo, abs=tolerance)
    assert worth.symmetrized_elbo == pytest.approx(ours.symmetrized_elbo, abs=tolerance)
    assert worth.symmetrized_elbo > worth.elbo


def test_arguments_that_do_not_fit_are_named() -> None:
    guide = ps.AutoSymmetrized(model, GROUP).setup(DATA)
    joint = ps.log_joint(model, DATA)
    with pytest.raises(ValueError, match=r"shape \(\) for 64"):
        ps.evidence(guide, lambda w: joint(w).sum(), GROUP)
    with pytest.raises(TypeError, match="log_joint is a Tensor"):
        ps.evidence(guide, torch.zeros(3), GROUP)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="estimator is"):
        ps.evidence(guide, joint, GROUP, ps.InfoNCE)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="hasn't been set up"):
        ps.evidence(ps.AutoSymmetrized(model, GROUP), joint, GROUP)
    point = AutoDelta(model)
    point(DATA)
    with pytest.raises(TypeError, match="AutoDelta"):
        ps.evidence(point, joint, GROUP)


def test_a_refused_guide_is_refused_again() -> None:
    """The second call must not train what the first call found to be wrong."""

    def lopsided(data: torch.Tensor) -> None:
        pyro.sample("locs", dist.Normal(torch.arange(3.0), 1.0).to_event(1))

    guide = ps.AutoSymmetrized(lopsided, GROUP)
    for _ in range(3):
        with pytest.raises(ValueError, match="k"):
            guide(DATA)


def test_local_latent_variables_are_refused() -> None:
    def local(data: torch.Tensor) -> None:
        pyro.sample("locs", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 12, subsample_size=4):
            pyro.sample("z", dist.Normal(0.0, 1.0))

    with pytest.raises(ValueError, match="draws 4 of 12 rows"):
        ps.AutoSymmetrized(local, GROUP).setup(DATA)
