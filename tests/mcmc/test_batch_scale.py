"""Warnings of likelihoods that count a mini-batch's rows too often or too seldom, and of those only."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import Tensor

from pyro_symmetric.mcmc import Density

ROWS, BATCH = 20, 4
X, Y = torch.randn(ROWS, 3), torch.randn(ROWS)


def factor(x: Tensor, y: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.factor("y", -0.5 * (y - x @ w).square().sum())


def in_plate(size: int, scale: float = 1.0, event: bool = False):
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("other", dist.Normal(w.sum(), 1.0), obs=torch.tensor(0.3))  # of no row: it stays unscaled
        with pyro.plate("data", size, subsample=torch.arange(len(x))), poutine.scale(scale=scale):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    return model


def joint(scale: float):
    """The rows as one event."""

    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with poutine.scale(scale=scale):
            pyro.sample("y", dist.Normal(x @ w, 1.0).to_event(1), obs=y)

    return model


def drawing_plate(scale: float):
    def model(x: Tensor, y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", ROWS, subsample_size=BATCH) as rows, poutine.scale(scale=scale):
            pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])

    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (in_plate(BATCH), "'y' is scaled by 1: .*5 times too little"),
        (in_plate(2 * ROWS), "must count 5 times, but the site 'y' is scaled by 10: .*2 times too much"),
        (in_plate(ROWS, scale=5.0), "'y' is scaled by 25: .*5 times too much"),
        (joint(1.0), "'y' is scaled by 1: .*5 times too little"),
        (joint(2.5), "'y' is scaled by 2.5: .*2 times too little"),
        (factor, "no observed site is scaled so: .*5 times too little"),
    ],
)
def test_a_wrong_scale_is_warned_of_with_its_numbers(model, message):
    with pytest.warns(UserWarning, match=message):
        Density(model, args=(X, Y), batch_size=BATCH, subsampled=True)


@pytest.mark.parametrize("model", [in_plate(ROWS), in_plate(ROWS, scale=0.1), joint(5.0)])
def test_the_right_scale_and_a_temperature_on_top_are_passed_over(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Density(model, args=(X, Y), batch_size=BATCH, subsampled=True)
