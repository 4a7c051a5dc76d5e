r"""Marginalised loss and error of a Bayesian model, by many weights and many rows in bounded memory.

.. math:: L = -\frac1N \sum_n \log \frac1S \sum_s p(y_n \mid x_n, w_s), \qquad
          \hat y_n = \frac1S \sum_s \mathbb E[y \mid x_n, w_s]

``p`` is the model's likelihood, untempered. The error is the share of rows whose most probable class is wrong, or, for
real targets, the root of the mean squared distance.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

from pyro_symmetric.calls import over_weights
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Weights

# Outputs of the widest layer that one forward may hold for all draws and rows; it sets how many rows go at once.
CHUNK_NUMBERS = 2**24


class MarginalLikelihood:
    """The running sum of ``p(y_n | x_n, w_s)`` over draws, from pointwise log-likelihoods.

    :param name: of the data, for error messages.
    :param log_likelihood: weights of batch shape ``(S,)`` -> ``(S, N)``.
    """

    def __init__(self, name: str, log_likelihood: Any):
        self.name = name
        self._log_likelihood = log_likelihood
        self._total: Tensor | None = None
        self._count = 0

    def add(self, weights: Weights, count: int) -> None:
        """Take in ``count`` draws."""
        pointwise = self._log_likelihood(weights)
        if pointwise.dim() != 2 or len(pointwise) != count:
            raise ValueError(
                f"log_likelihood {self.name!r} returned shape {tuple(pointwise.shape)}; it must be one value for "
                f"each draw and row, ({count}, N), not summed"
            )
        self._include(torch.logsumexp(pointwise.double(), 0), count)

    def _include(self, total: Tensor, count: int) -> None:
        self._total = total if self._total is None else torch.logaddexp(self._total, total)
        self._count += count

    def results(self) -> dict[str, Tensor]:
        """The marginalised loss, in nats per row."""
        assert self._total is not None
        return {self.name: -(self._total - math.log(self._count)).mean().cpu()}


class MarginalPrediction(MarginalLikelihood):
    """Likelihood and mean prediction of a Bayesian model on labelled rows.

    Weights may hold buffers of the network, too (running statistics), which then take the place of the network's own.
    """

    def __init__(self, name: str, model: BayesianModel, x: Tensor, y: Tensor):
        super().__init__(name, None)
        self._model, self._x, self._targets = model, x, model.likelihood.targets(y)
        self._latents = set(model.site_shapes) - set(dict(model.net.named_parameters()))
        self._mean: Tensor | None = None

    def add(self, weights: Weights, count: int) -> None:
        parts = [self._scored(weights, part) for part in _parts(weights, count, len(self._x))]
        total, prediction = (torch.cat(column) for column in zip(*parts, strict=True))
        self._include(total, count)
        self._mean = prediction if self._mean is None else self._mean + prediction

    def _scored(self, weights: Weights, part: slice) -> tuple[Tensor, Tensor]:
        """``log Σ_s p(y|x,w_s)``, ``(N,)``, and ``Σ_s E[y|x,w_s]``, ``(N, ...)``, in float64."""
        likelihood = self._model.likelihood
        latents = {name: weights[name] for name in self._latents}
        of_net = {name: value for name, value in weights.items() if name not in latents}
        outputs = over_weights(self._model.net, lambda w: self._model.call(w, self._x[part]), of_net)
        distribution = likelihood.distribution(outputs, latents)
        self._require_fit(distribution)
        log_prob = distribution.log_prob(self._targets[part])
        by_row = log_prob.reshape(*outputs.shape[:2], -1).sum(-1).double()
        return torch.logsumexp(by_row, 0), likelihood.mean(outputs).double().sum(0)

    def _require_fit(self, distribution: Distribution) -> None:
        """:raises ValueError: if the targets aren't what the likelihood scores."""
        targets, likelihood = self._targets, type(self._model.likelihood).__name__
        if isinstance(distribution, Categorical) and targets.is_floating_point():
            raise ValueError(
                f"data[{self.name!r}] has targets of type {targets.dtype} and shape {tuple(targets.shape)}, but the "
                f"{likelihood} takes class numbers, whole and of shape {tuple(targets.shape[:1])}: y.long(), or "
                "y.argmax(-1) of one-hot rows"
            )
        expected = (len(targets), *distribution.batch_shape[2:], *distribution.event_shape)
        if targets.shape != expected:
            raise ValueError(
                f"data[{self.name!r}] has targets of shape {tuple(targets.shape)}; for this network the {likelihood} "
                f"takes {expected}"
            )

    def results(self) -> dict[str, Tensor]:
        """The marginalised loss, and the error of the mean prediction (of real targets: RMSE)."""
        assert self._mean is not None
        kind = "RMSE" if self._targets.is_floating_point() else "error"
        name = kind if self.name == "loss" else f"{self.name} {kind}"
        return {**super().results(), name: _error(self._mean / self._count, self._targets).cpu()}


def _parts(weights: Weights, draws: int, num_rows: int) -> list[slice]:
    widest = max(value.shape[1] if value.dim() > 1 else 1 for value in weights.values())
    step = max(1, min(num_rows, CHUNK_NUMBERS // max(1, draws * widest)))
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def _error(prediction: Tensor, targets: Tensor) -> Tensor:
    if not targets.is_floating_point():
        return (prediction.argmax(-1) != targets).double().mean()
    if prediction.dim() == targets.dim() + 1 and prediction.shape[-1] == 1:
        prediction = prediction.squeeze(-1)
    return (prediction - targets.double()).square().mean().sqrt()
