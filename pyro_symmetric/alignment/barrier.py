r"""The loss barrier between two posteriors.

With the marginalised loss and the mean prediction of a posterior, by many weights and rows in bounded memory,

.. math:: L(q) = -\frac1N \sum_n \log \mathbb E_{w \sim q}\, p(y_n \mid x_n, w), \qquad
          \hat y_n = \mathbb E_{w \sim q} \mathbb E[y \mid x_n, w],

the barrier along the Wasserstein geodesic :math:`q_t` is

.. math:: \max_t \; L(q_t) - \big[(1-t)\, L(q_0) + t\, L(q_1)\big] ,

and likewise that of the error: the share of rows whose most probable class is wrong, or, for real targets, the root of
the mean squared distance. ``p`` is the model's likelihood, untempered.

Reference: Rossi et al. 2023 (arXiv 2310.10171), Definition 2.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.alignment.moments import GaussianWeights, barycentre_gaussians, require_ends, to_gaussian
from pyro_symmetric.arguments import described
from pyro_symmetric.models import BayesianModel, require_targets
from pyro_symmetric.weights import Weights, require_finite

PointwiseLogLikelihood = Callable[[Weights], Tensor]
Data = tuple[Tensor, Tensor]

# Weights of all draws that are evaluated at once.
CHUNK_WEIGHTS = 2**24
# Outputs of the widest layer that one forward may hold for all draws and rows; it sets how many rows go at once.
CHUNK_NUMBERS = 2**24


@dataclass(frozen=True)
class BarrierCurve:
    """Losses along a path between two posteriors.

    >>> curve = ps.alignment.BarrierCurve(torch.tensor([0.0, 0.5, 1.0]), {"train": torch.tensor([1.0, 4.0, 2.0])}, {})
    >>> curve.barrier  # the loss half-way, above the straight line between the ends
    2.5

    :param t: positions on the path, ``(T,)``, from 0 to 1.
    :param losses: name of the data (``"train"``, ``"test"`` ...) -> marginalised loss in nats per row, ``(T,)``.
    :param metrics: name -> error of the mean prediction (``"train error"``, ``"test RMSE"``), ``(T,)``.
    """

    t: Tensor
    losses: dict[str, Tensor]
    metrics: dict[str, Tensor]

    @property
    def barriers(self) -> dict[str, float]:
        """Barrier of every loss and metric: the largest excess over the straight line between the ends."""
        every = {**self.losses, **self.metrics}
        return {name: float((v - torch.lerp(v[0], v[-1], self.t)).max()) for name, v in every.items()}

    @property
    def barrier(self) -> float:
        """The loss barrier; of several data sets, the first."""
        return self.barriers[next(iter(self.losses))]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        listed = {"losses": self.losses, "metrics": self.metrics}
        values = {kind: {name: value.tolist() for name, value in own.items()} for kind, own in listed.items()}
        return {"t": self.t.tolist(), **values, "barriers": self.barriers}

    def __repr__(self) -> str:
        values = ", ".join(f"{name}: {value:.4f}" for name, value in self.barriers.items())
        return f"BarrierCurve({len(self.t)} points, barriers {{{values}}})"


@torch.no_grad()
def loss_barrier(
    guide_0: Any,
    guide_1: Any,
    log_likelihood: BayesianModel | PointwiseLogLikelihood,
    data: Data | Mapping[str, Data] | None = None,
    *,
    num_points: int = 11,
    num_samples: int = 64,
    progress: bool = False,
) -> BarrierCurve:
    """The loss along the geodesic between two mean-field posteriors, or between two networks.

    All points share their noise, so the curve is smooth and the barrier is not the maximum of independent errors. The
    marginalisation over a finite number of draws overstates every loss a little, at all points alike.

    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> x = torch.randn(50, 2)
    >>> symmetry = ps.find_symmetry(net, x)
    >>> other = symmetry.act(symmetry.finite.sample(), net)
    >>> model = ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(scale=0.1))
    >>> before = ps.loss_barrier(net, other, model, (x, net(x).detach())).barrier
    >>> aligned = symmetry.act(ps.align(other, net, symmetry).element, other)
    >>> abs(ps.loss_barrier(net, aligned, model, (x, net(x).detach())).barrier) < 1e-3 < before
    True

    :param guide_0: a guide with Gaussian moments (correlations are left out), ``GaussianWeights``, a ``Posterior`` of
        draws in one frame, or a network: a module, or its weights by name. Of a network with batch normalisation take
        the module: without running statistics of their own, ends are warned of.
    :param guide_1: likewise.
    :param log_likelihood: a :class:`~pyro_symmetric.models.BayesianModel`, whose untempered loss and error are measured
        on ``data``; or a function: weights of batch shape ``(S,)`` -> log-likelihood of every row ``(S, N)``.
    :param data: with a model, ``(x, y)``, or a name for each: ``{"train": (x, y), "test": ...}``.
    :param num_points: how many points, ends included; at least 3.
    :param num_samples: draws at each point; plain networks need, and take, one.
    """
    arguments.whole("num_points", num_points, 3)
    first, second = to_gaussian(guide_0, "guide_0"), to_gaussian(guide_1, "guide_1")
    require_ends(first, second)
    model = log_likelihood if isinstance(log_likelihood, BayesianModel) else None
    if model is not None:
        if data is None:
            raise ValueError("a model needs data: (x, y), or a name for each pair")
        if lacking := [site for site in model.site_shapes if site not in first.loc or site not in second.loc]:
            raise ValueError(
                f"guide_0 or guide_1 holds no {lacking}, which the model infers; for plain networks take a likelihood "
                "that infers nothing, such as GaussianLikelihood(scale=0.1)"
            )
        named: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"loss": data}
        for name, (x, y) in named.items():
            require_finite({"x": x, "y": y}, f"data[{name!r}]")
            if len(x) != len(y):
                raise ValueError(f"data[{name!r}] has {len(x)} inputs and {len(y)} targets")
        _warn_of_statistics(model.net, first, second)
        scores = {name: functools.partial(_of_model, model, name, pair) for name, pair in named.items()}
    elif isinstance(log_likelihood, nn.Module) or not callable(log_likelihood) or data is not None:
        raise TypeError(
            f"log_likelihood is {described(log_likelihood)}; it must be a BayesianModel, or, without data, a function "
            "of weights, e.g. lambda w: model.log_likelihood(w, x, y)"
        )
    else:
        scores = {"loss": functools.partial(_of_function, log_likelihood)}
    values = list(first.loc.values())
    if not any(bool(scale.any()) for end in (first, second) for scale in end.scale.values()):
        num_samples = 1
    size = max(1, CHUNK_WEIGHTS // sum(value.numel() for value in values))
    parts = [min(size, num_samples - start) for start in range(0, num_samples, size)]
    seed = int(torch.randint(2**62, (), device="cpu"))
    t = torch.linspace(0, 1, num_points, dtype=torch.float64, device="cpu")
    curve = BarrierCurve(t, {}, {})
    for k, position in enumerate(tqdm(t.tolist(), desc="path", disable=not progress)):
        between = barycentre_gaussians((first, second), (1 - position, position))
        generator = torch.Generator(values[0].device).manual_seed(seed)
        sums: dict[str, list[Tensor]] = {}
        for count in parts:
            weights = draw(between, count, generator)
            for name, score in scores.items():
                density, *mean = score(weights, count)
                before, *sofar = sums.get(name, (density - math.inf, *(0 * value for value in mean)))
                added = (one + other for one, other in zip(sofar, mean, strict=True))
                sums[name] = [torch.logaddexp(before, density), *added]
        for name, (density, *mean) in sums.items():
            if bool(density.isnan().any()):
                raise ValueError(
                    f"the log-likelihood of {name!r} is NaN at t = {position:g}, where weights give no numbers"
                )
            curve.losses.setdefault(name, torch.zeros_like(t))[k] = math.log(num_samples) - density.mean()
            if model is not None:
                kind, error = _error(mean[0] / num_samples, model.likelihood.targets(named[name][1]))
                curve.metrics.setdefault(kind if name == "loss" else f"{name} {kind}", torch.zeros_like(t))[k] = error
    return curve


# what is measured -----------------------------------------------------------------------------------------------------


def draw(gaussian: GaussianWeights, count: int, generator: torch.Generator) -> Weights:
    """Constrained weights of batch shape ``(count,)``; generators in one state give the same standard normals."""
    weights = {}
    for site, loc in gaussian.loc.items():
        noise = torch.randn(count, *loc.shape, dtype=loc.dtype, device=loc.device, generator=generator)
        value = loc + gaussian.scale[site] * noise
        bijection = gaussian.bijection(site)
        weights[site] = value if bijection is None else bijection(value)
    return weights


def _of_function(own: PointwiseLogLikelihood, weights: Weights, count: int) -> tuple[Tensor, ...]:
    """``log Σ_s p(y|x, w_s)`` by row."""
    pointwise = own(weights)
    if pointwise.dim() != 2 or len(pointwise) != count:
        raise ValueError(
            f"log_likelihood returned shape {tuple(pointwise.shape)}; it must be one value for each draw and row, "
            f"({count}, N), not summed"
        )
    return (torch.logsumexp(pointwise.double(), 0),)


def _of_model(model: BayesianModel, name: str, pair: Data, weights: Weights, count: int) -> tuple[Tensor, ...]:
    """``log Σ_s p(y|x, w_s)`` and the sum of predictions by row, a few rows at once. Weights may hold buffers, which
    take the place of the network's own."""
    x, targets = pair[0], model.likelihood.targets(pair[1])
    latents = {site: weights[site] for site in set(model.site_shapes) - set(dict(model.net.named_parameters()))}
    widest = max(value.shape[1] if value.dim() > 1 else 1 for value in weights.values())
    found = []
    for part in torch.arange(len(x), device=x.device).split(max(1, CHUNK_NUMBERS // max(1, count * widest))):
        outputs = model.outputs(weights, x[part])
        distribution = model.likelihood.distribution(outputs, latents)
        expected = (len(part), *distribution.batch_shape[2:], *distribution.event_shape)
        if targets[part].shape != expected:
            raise ValueError(
                f"data[{name!r}] has targets of shape {tuple(targets.shape)}; for this network the "
                f"{type(model.likelihood).__name__} takes {(len(targets), *expected[1:])}"
            )
        require_targets(model.likelihood, distribution, targets[part])
        by_row = distribution.log_prob(targets[part]).reshape(count, len(part), -1).sum(-1).double()
        found.append((torch.logsumexp(by_row, 0), model.likelihood.mean(outputs).double().sum(0)))
    return tuple(torch.cat(column) for column in zip(*found, strict=True))


def _error(prediction: Tensor, targets: Tensor) -> tuple[str, Tensor]:
    if prediction.dim() == targets.dim() + 1 and prediction.shape[-1] > 1:
        return "error", (prediction.argmax(-1) != targets).double().mean()
    return "RMSE", (prediction.reshape(targets.shape) - targets.double()).square().mean().sqrt()


def _warn_of_statistics(net: nn.Module, first: GaussianWeights, second: GaussianWeights) -> None:
    norms = [name for name, m in net.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    held = [f"{name}.running_mean".lstrip(".") for name in norms]
    if borrowed := [name for name in held if name not in first.loc or name not in second.loc]:
        warnings.warn(
            f"the ends bring no running statistics for batch normalisation ({borrowed[0]!r} ...), so both are measured "
            "with the model's: what was fitted to another network's, or moved by an element of the symmetry, isn't "
            "measured as itself. Pass networks, whose own statistics come along",
            UserWarning,
            stacklevel=4,  # past the no_grad around the caller
        )
