"""Misspelt names are answered by the nearest right one, public signatures are real, and objects say what they are."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoIAFNormal
from torch import nn

import pyro_symmetric as ps

GROUP = ps.Group.declare({"w": ("k",)}, {"w": torch.zeros(3)})


def model() -> None:
    pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))


NET = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "meant"),
    [
        (lambda: ps.BayesianModel(NET, likelihood="gausian"), "gaussian"),
        (lambda: ps.align({"w": torch.zeros(3)}, {"w": torch.zeros(3)}, GROUP, cost="wasserstien"), "wasserstein"),
        (lambda: ps.datasets.load("digit"), "digits"),
    ],
)
def test_a_misspelt_name_is_answered_by_the_nearest(call: Callable[[], Any], meant: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"did you mean '{meant}'"):
        call()


def test_what_a_base_takes_is_passed_on() -> None:
    guide = ps.AutoSymmetrized(model, GROUP, base=AutoIAFNormal, hidden_dim=[4], log_scale_min_clip=-3.0)
    assert guide()["w"].shape == (3,)
