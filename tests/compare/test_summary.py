"""The summary modulo a symmetry: that of aligned draws, and a word on how sure their labels are."""

import re

import pytest
import torch

import pyro_symmetric as ps
from pyro_symmetric.posterior.posterior import Posterior

GROUP = ps.Group.declare({"mu": ("k", None), "weights": ("k",)}, {"mu": torch.zeros(4, 2), "weights": torch.zeros(4)})
MU = torch.tensor([[0.0, 0.0], [2.5, 0.5], [0.3, 2.8], [3.0, 3.0]])


def mixture(*batch):
    """Draws around four clusters in two dimensions, of which no coordinate tells all of them apart."""
    weights = torch.distributions.Dirichlet(torch.tensor([20.0, 40.0, 60.0, 80.0])).sample(batch)
    return {"mu": MU + 0.4 * torch.randn(*batch, 4, 2), "weights": weights}


@pytest.mark.stochastic
def test_the_summary_modulo_a_symmetry_shows_aligned_draws_and_says_so(capsys):
    posterior = Posterior(GROUP.sample((4, 200))(mixture(4, 200)), kind="chains")
    torch.manual_seed(0)
    ps.summary(posterior, GROUP, progress=False)
    shown = capsys.readouterr().out
    head = shown.splitlines()[0]
    assert head.startswith("modulo Group of log-order 3.2: aligned, ")
    assert re.search(r"aligned, \d+ of 800 draws moved, mean gaussian cost [\d.e+-]+ -> [\d.e+-]+$", head)
    torch.manual_seed(0)
    ps.align_many(posterior, GROUP, progress=False).posterior.summary()
    assert shown.split("\n\n", 1)[1] == capsys.readouterr().out
    # Of the 0.4 of each cluster; mixed labels would spread by 1 and more.
    deviations = [float(line.split()[2]) for line in shown.splitlines() if line.strip().startswith("mu[")]
    assert len(deviations) == 8
    assert max(deviations) < 0.55


@pytest.mark.parametrize("moves", ["permute", "flip"])
def test_units_that_are_alike_are_said_to_have_uncertain_labels(moves, capsys):
    group = ps.Group.declare({"u": ("k",)}, {"u": torch.Size((4,))}, moves=moves)
    ps.summary(Posterior({"u": torch.randn(4, 250, 4)}, kind="chains"), group, progress=False)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("modulo ")
    assert shown[1].startswith("labels are uncertain: in ")
    means = [float(line.split()[1]) for line in shown if line.startswith("u[")]
    # All means are 0: units that are alike get means of their own all the same, which is what the line is about.
    assert max(means) - min(means) > 1.5 if moves == "permute" else min(map(abs, means)) > 0.5
