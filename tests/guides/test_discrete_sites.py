"""Guides of models with discrete sites, against the same models without."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDiagonalNormal, AutoMultivariateNormal

import pyro_symmetric as ps

DATA = torch.tensor([-4.0, -3.9, 0.0, 0.1, 5.0, 4.8])
SHAPES = {"shares": torch.Size([3]), "locs": torch.Size([3])}
GROUP = ps.Group.declare({"shares": ("k",), "locs": ("k",)}, SHAPES)


def components() -> tuple[torch.Tensor, torch.Tensor]:
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(3), 5.0).to_event(1))
    return shares, locs


@config_enumerate
def assigned(data: torch.Tensor = DATA) -> None:
    shares, locs = components()
    with pyro.plate("rows", len(data)):
        z = pyro.sample("z", dist.Categorical(shares))
        pyro.sample("x", dist.Normal(locs[z], 1.0), obs=data)


def summed(data: torch.Tensor = DATA) -> None:
    shares, locs = components()
    rows = dist.MixtureSameFamily(dist.Categorical(shares), dist.Normal(locs, 1.0))
    with pyro.plate("rows", len(data)):
        pyro.sample("x", rows, obs=data)


def poisson() -> None:
    pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("count", dist.Poisson(3.0))


def start(site: dict[str, Any]) -> torch.Tensor:
    values = {"shares": torch.tensor([0.3, 0.5, 0.2]), "locs": DATA[::2].clone()}
    return values[site["name"]]


BASES: list[Any] = [AutoDiagonalNormal, AutoMultivariateNormal, ps.AutoUnitBlocks]


@pytest.mark.parametrize("base", BASES)
def test_objective_gradients_and_evidence_are_those_of_the_model_summed_by_hand(
    base: Any,
) -> None:
    elbo = TraceEnum_ELBO(max_plate_nesting=1, strict_enumeration_warning=False)
    found, evidence = [], []
    for model in (assigned, summed):
        guide = ps.AutoSymmetrized(
            model, GROUP, base, ps.ExactOrbit(), init_loc_fn=start
        ).setup(DATA)
        pyro.set_rng_seed(3)
        loss = elbo.differentiable_loss(model, guide, DATA)
        found.append([loss, *torch.autograd.grad(loss, list(guide.parameters()))])
        pyro.set_rng_seed(3)
        evidence.append(ps.evidence(guide, DATA, num_samples=200).best.log_evidence)
    for enumerated, expected in zip(*found, strict=True):
        torch.testing.assert_close(enumerated, expected, rtol=1e-4, atol=1e-4)
    assert math.isclose(*evidence, abs_tol=1e-3)


def test_it_trains_travels_and_predicts() -> None:
    guide = ps.AutoSymmetrized(assigned, GROUP, init_loc_fn=start)
    loss = TraceEnum_ELBO(max_plate_nesting=1)
    svi = SVI(assigned, guide, pyro.optim.Adam({"lr": 0.02}), loss)
    for _ in range(5):
        assert math.isfinite(svi.step(DATA))
    copied = pickle.loads(pickle.dumps(guide))
    draws = copied.sample_posterior((50,))
    assert draws.keys() == SHAPES.keys()
    z = ps.predict(guide, assigned, DATA, kind="discrete", progress=False)["z"]
    assert z.shape == (100, 6)


@pytest.mark.parametrize(
    "make", [lambda: ps.AutoSymmetrized(poisson, None, AutoDiagonalNormal)]
)
def test_sites_that_nothing_sums_out_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"'count' is discrete.*can't be summed out"):
        make().setup()
