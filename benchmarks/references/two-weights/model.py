"""The network of two weights of Gelberg et al. 2024 (arXiv 2408.05496, section 5.1):
``f(x) = relu(w1 x) + relu(w2 x)``, N(0, 1) priors, Gaussian noise of deviation 1.

Data come from the weights (1, -1): ``y = |x| + noise`` at ten points from -2 to 2.
"""

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

import pyro_symmetric as ps

table = pd.read_csv(Path(__file__).with_name("data.csv"), dtype="float32")
x, y = torch.tensor(table[["x"]].values), torch.tensor(table["y"].values)
test_x = torch.linspace(-2, 2, 41)[:, None]


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.hidden(x)).sum(-1, keepdim=True)


model = ps.BayesianModel(TwoWeights(), 1.0, ps.GaussianLikelihood(1.0))
arguments = (x, y)


def predict(weights: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Return means ``(draws, 41, 1)`` at points from -2 to 2, and the noise."""
    return model.likelihood.mean(model.outputs(weights, test_x)), 1.0
