"""The digits 3 and 8 of scikit-learn, 100 rows, by a network of 10 tanh units.

Pixels are divided by 16. Biases have N(0, 1) priors, weights N(0, 1 / inputs).
"""

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import pyro_symmetric as ps

table = pd.read_csv(Path(__file__).with_name("data.csv"))
train, test = table[table["part"] == "train"], table[table["part"] == "test"]


def inputs(rows: pd.DataFrame) -> Tensor:
    return torch.tensor(rows.filter(regex="x").to_numpy("float32") / 16)


net = nn.Sequential(nn.Linear(64, 10), nn.Tanh(), nn.Linear(10, 2))
model = ps.BayesianModel(net, ps.GaussianPrior(1.0, fan_in=True), "categorical")
arguments = inputs(train), torch.tensor(train["y"].to_numpy("int64"))


def predict(weights: dict[str, Tensor]) -> Tensor:
    """Return probabilities ``(draws, 257, 2)`` of the test rows."""
    return model.likelihood.mean(model.outputs(weights, inputs(test)))
