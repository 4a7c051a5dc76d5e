r"""The loss barrier between two posteriors.

With the marginalised loss of a posterior, :math:`L(q) = -\frac1N \sum_n \log \mathbb E_{w \sim q}\, p(y_n \mid x_n,
w)`, the barrier along the Wasserstein geodesic :math:`q_t` is

.. math:: \max_t \; L(q_t) - \big[(1-t)\, L(q_0) + t\, L(q_1)\big] .

Reference: Rossi et al. 2023 (arXiv 2310.10171), Definition 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from pyro_symmetric.alignment.gaussian import to_gaussian
from pyro_symmetric.alignment.geodesic import draw, interpolate_gaussians, standard_normals
from pyro_symmetric.symmetry.weights import Weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PointwiseLogLikelihood = Callable[[Weights], Tensor]
Metric = Callable[[Weights], Tensor]


@dataclass(frozen=True)
class BarrierCurve:
    """Losses along a path between two posteriors.

    :param t: positions on the path, ``(T,)``, from 0 to 1.
    :param losses: name of the data (``"train"``, ``"test"`` ...) -> marginalised loss in nats per row, ``(T,)``.
    :param metrics: name -> any other measure asked for (an error rate, say), ``(T,)``.
    """

    t: Tensor
    losses: dict[str, Tensor]
    metrics: dict[str, Tensor]

    @property
    def barriers(self) -> dict[str, float]:
        """Barrier of every loss and metric: the largest excess over the straight line between the ends."""
        return {name: float(self.excess(name).max()) for name in (*self.losses, *self.metrics)}

    @property
    def barrier(self) -> float:
        """The loss barrier; of several data sets, the first."""
        return self.barriers[next(iter(self.losses))]

    def excess(self, name: str) -> Tensor:
        """What lies above the straight line between the ends, ``(T,)``."""
        values = {**self.losses, **self.metrics}[name]
        return values - torch.lerp(values[0], values[-1], self.t)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "t": self.t.tolist(),
            "losses": {name: value.tolist() for name, value in self.losses.items()},
            "metrics": {name: value.tolist() for name, value in self.metrics.items()},
            "barriers": self.barriers,
        }

    def __repr__(self) -> str:
        values = ", ".join(f"{name}: {value:.4f}" for name, value in self.barriers.items())
        return f"BarrierCurve({len(self.t)} points, barriers {{{values}}})"

    def plot(self, ax: Axes | None = None, label: str = "") -> Axes:
        """Draw the losses along the path."""
        from matplotlib import pyplot as plt

        if ax is None:
            ax = plt.subplots()[1]
        for name, values in self.losses.items():
            (line,) = ax.plot(self.t, values, marker=".", label=f"{label} {name}".strip())
            ax.plot(self.t[[0, -1]], values[[0, -1]], ls="--", lw=0.8, color=line.get_color())
        ax.set(xlabel="position on the path t", ylabel="marginalised loss (nats per row)")
        ax.legend()
        return ax


@torch.no_grad()
def loss_barrier(
    guide_0: Any,
    guide_1: Any,
    log_likelihood: PointwiseLogLikelihood | Mapping[str, PointwiseLogLikelihood],
    *,
    metrics: Mapping[str, Metric] | None = None,
    num_points: int = 11,
    num_samples: int = 64,
    progress: bool = False,
) -> BarrierCurve:
    """The loss along the geodesic between two mean-field posteriors (or, with zero deviations, between two networks).

    All points share their noise, so the curve is smooth and the barrier is not the maximum of independent errors. The
    marginalisation over a finite number of draws overstates every loss a little, at all points alike.

    >>> curve = loss_barrier(guide, aligned, lambda w: model.log_likelihood(w, x, y))

    :param guide_0: a guide with Gaussian moments, ``GaussianWeights``, or plain weights.
    :param guide_1: likewise.
    :param log_likelihood: weights of batch shape ``(S,)`` -> log-likelihood of every row ``(S, N)``; one, or one for
        each name of data.
    :param metrics: name -> weights of batch shape ``(S,)`` -> a scalar, measured along the path as well.
    :param num_points: how many points, ends included; at least 3.
    :param num_samples: draws at each point, evaluated by one batched forward.
    """
    if num_points < 3:
        raise ValueError(f"num_points is {num_points}; a path with an inside has at least 3")
    named = {"loss": log_likelihood} if callable(log_likelihood) else dict(log_likelihood)
    if any(isinstance(function, torch.nn.Module) for function in named.values()):
        raise TypeError(
            "log_likelihood is a module; it must be a function of weights, e.g. lambda w: model.log_likelihood(w, x, y)"
        )
    first, second = to_gaussian(guide_0), to_gaussian(guide_1)
    noise = standard_normals(first, (num_samples,))
    t = torch.linspace(0, 1, num_points, dtype=torch.float64)
    losses: dict[str, list[Tensor]] = {name: [] for name in named}
    measured: dict[str, list[Tensor]] = {name: [] for name in metrics or {}}
    for position in tqdm(t.tolist(), desc="path", disable=not progress):
        weights = draw(interpolate_gaussians(first, second, position), noise)
        for name, function in named.items():
            pointwise = function(weights)
            if pointwise.dim() != 2 or len(pointwise) != num_samples:
                raise ValueError(
                    f"log_likelihood {name!r} returned shape {tuple(pointwise.shape)}; it must be one value for "
                    f"each draw and row, ({num_samples}, N), not summed"
                )
            losses[name].append(marginalised_loss(pointwise).cpu())
        for name, metric in (metrics or {}).items():
            measured[name].append(torch.as_tensor(metric(weights)).double().cpu())
    return BarrierCurve(
        t,
        {name: torch.stack(values) for name, values in losses.items()},
        {name: torch.stack(values) for name, values in measured.items()},
    )


def marginalised_loss(log_likelihood: Tensor) -> Tensor:
    """``-mean_n log mean_s p(y_n | x_n, w_s)`` of pointwise log-likelihoods ``(S, N)``, in float64."""
    mixed = torch.logsumexp(log_likelihood.double(), 0) - math.log(len(log_likelihood))
    return -mixed.mean()
