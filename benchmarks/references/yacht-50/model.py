"""Resistance of sailing yachts (UCI Machine Learning Repository, CC BY 4.0), by a
network of 50 tanh units.

Inputs and target are standardised by the 277 training rows. Biases have N(0, 1) priors,
weights N(0, 1 / inputs); the noise of 0.3 is known. An unknown noise becomes so small
that chains stay in modes which no symmetry connects.
"""

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import pyro_symmetric as ps

table = pd.read_csv(Path(__file__).with_name("data.csv"))
train, test = table[table["part"] == "train"], table[table["part"] == "test"]


def inputs(rows: pd.DataFrame) -> Tensor:
    return torch.tensor(rows.filter(regex="x").to_numpy("float32"))


net = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 1))
prior = ps.GaussianPrior(1.0, fan_in=True)
model = ps.BayesianModel(net, prior, ps.GaussianLikelihood(0.3))
arguments = inputs(train), torch.tensor(train["y"].to_numpy("float32"))


def predict(weights: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Return means ``(draws, 31, 1)`` of the test rows, and the noise."""
    means = model.likelihood.mean(model.outputs(weights, inputs(test)))
    return means, 0.3
