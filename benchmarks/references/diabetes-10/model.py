"""The diabetes data of Efron et al. 2004, as in scikit-learn, by a network of 10 tanh
units.

Inputs and target are standardised by the 354 training rows. Biases have N(0, 1) priors, weights N(0, 1 / inputs);
the noise is half-normal of scale 1.
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


net = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 1))
prior = ps.GaussianPrior(1.0, fan_in=True)
model = ps.BayesianModel(net, prior, ps.GaussianLikelihood())
arguments = inputs(train), torch.tensor(train["y"].to_numpy("float32"))


def predict(weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return means ``(draws, 88, 1)`` of the test rows, and the noise of each draw."""
    means = model.likelihood.mean(model.outputs(weights, inputs(test)))
    return means, weights["noise_scale"]
