"""Meaning of ``ok``: nothing failed modulo symmetry; and what no R-hat can see."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric import Group, Posterior

GROUP = Group.declare({"weights": ("k",), "locs": ("k",)}, {"weights": torch.ones(3), "locs": torch.zeros(3)})


def in_copies() -> Posterior:
    """Well-mixed chains of a mixture of three, each with labels of its own."""
    weights = dist.Dirichlet(torch.tensor([50.0, 70.0, 30.0])).sample((4, 250))
    locs = torch.tensor([-4.0, 0.0, 5.0]) + 0.2 * torch.randn(4, 250, 3)
    moved = GROUP.sample((4, 1))({"weights": weights, "locs": locs})
    return Posterior(moved, {"lp": torch.randn(4, 250)}, {"warmup_r_hat": 2.0, "num_warmup": 100}, kind="chains")


@pytest.mark.stochastic
def test_well_mixed_chains_in_different_copies_are_ok_modulo_symmetry():
    # R-hat of 1,000 independent draws passes 1.05 with probability below 1e-10, and all labels agree once in 216.
    for _ in range(5):
        posterior = in_copies()
        assert ps.diagnose(posterior, GROUP).ok


def two_heights(where):
    pyro.sample("z", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def test_chains_that_started_at_one_point_are_told_of(tmp_path):
    options = {"num_samples": 60, "num_warmup": 20, "progress": False, "seed": 0}
    together = ps.sample(ps.NUTS(two_heights), None, initial={"z": torch.zeros(2)}, store=tmp_path / "run", **options)
    assert ps.diagnose(together)["starts"].status == "warn"
    assert ps.diagnose(Posterior.load(tmp_path / "run"))["starts"].status == "warn"
    apart = ps.sample(ps.NUTS(two_heights), None, **options)
    assert "starts" not in ps.diagnose(apart)


@pytest.mark.stochastic
def test_chains_in_two_modes_are_told_of_however_little_one_of_them_weighs():
    """Thirteen chains in a spike that holds a thousandth, three in the mode that holds the rest."""
    spike, broad = 0.01 * torch.randn(13, 200, 20), 3.0 + torch.randn(3, 200, 20)
    found = ps.diagnose(Posterior({"z": torch.cat([spike, broad])}, kind="chains"))
    assert not found.ok
    assert found["weights"].status == "fail"
