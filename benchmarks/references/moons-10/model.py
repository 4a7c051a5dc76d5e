"""Two moons, 20 rows (scikit-learn, noise 0.25), by a network of 10 tanh units.

All weights and biases have N(0, 1) priors.
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


net = nn.Sequential(nn.Linear(2, 10), nn.Tanh(), nn.Linear(10, 2))
model = ps.BayesianModel(net, 1.0, "categorical")
arguments = inputs(train), torch.tensor(train["y"].to_numpy("int64"))


def predict(weights: dict[str, Tensor]) -> Tensor:
    """Return probabilities ``(draws, 200, 2)`` of the test rows."""
    return model.likelihood.mean(model.outputs(weights, inputs(test)))
