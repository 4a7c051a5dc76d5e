"""The digits 3 and 8 of scikit-learn, 100 rows, by a convolution of 8 channels.

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


net = nn.Sequential(
    nn.Unflatten(-1, (1, 8, 8)),
    nn.Conv2d(1, 8, 4, stride=2),
    nn.Tanh(),
    nn.Flatten(-3),
    nn.Linear(72, 2),
)
model = ps.BayesianModel(net, ps.GaussianPrior(1.0, fan_in=True), "categorical")
arguments = inputs(train), torch.tensor(train["y"].to_numpy("int64"))


def predict(weights: dict[str, Tensor]) -> Tensor:
    """Return probabilities ``(draws, 257, 2)`` of the test rows."""
    return model.likelihood.mean(model.outputs(weights, inputs(test)))
