r"""The loss barrier between two posteriors.

With the marginalised loss and the mean prediction of a posterior,

.. math:: L(q) = -\frac1N \sum_n \log \mathbb E_{w \sim q}\, p(y_n \mid x_n, w), \qquad
          \hat y_n = \mathbb E_{w \sim q} \mathbb E[y \mid x_n, w],

the barrier along the Wasserstein geodesic :math:`q_t` is

.. math:: \max_t \; L(q_t) - \big[(1-t)\, L(q_0) + t\, L(q_1)\big] ,

and likewise that of the error: the misclassification rate, or, for real targets, the
root mean squared error. ``p`` is the model's likelihood, untempered.

Reference: Rossi et al. 2023 (arXiv 2310.10171), Definition 2.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from tqdm import tqdm

from pyro_symmetric import arguments, plots
from pyro_symmetric._process import drawn_seed
from pyro_symmetric.alignment.moments import (
    GaussianWeights,
    barycentre_gaussians,
    require_ends,
    to_gaussian,
)
from pyro_symmetric.arguments import Json, described
from pyro_symmetric.models import BayesianModel, require_targets
from pyro_symmetric.weights import ByName, Weights, map_values, pick, require_finite

PointwiseLogLikelihood = Callable[[Weights], Tensor]
Data = tuple[Tensor, Tensor]

# The most weights, over draws, that are evaluated at once.
CHUNK_WEIGHTS = 2**24
# The most outputs of the widest layer, over draws and rows, in one forward pass.
CHUNK_NUMBERS = 2**24


@dataclass(frozen=True)
class BarrierCurve:
    """Losses along a path between two posteriors.

    >>> curve = ps.alignment.BarrierCurve(
    ...     torch.tensor([0.0, 0.5, 1.0]), {"train": torch.tensor([1.0, 4.0, 2.0])}, {}
    ... )
    >>> curve.barrier  # the loss half-way, above the straight line between the ends
    2.5

    :param t: positions on the path, ``(T,)``, from 0 to 1.
    :param losses: name of the data (``"train"``, ``"test"`` ...) -> marginalised loss
        in nats per row, ``(T,)``.
    :param metrics: name -> error of the mean prediction (``"train error"``, ``"test
        RMSE"``), ``(T,)``.
    """

    t: Tensor
    losses: ByName
    metrics: ByName

    @property
    def barriers(self) -> dict[str, float]:
        """The barrier of every loss and metric: the largest excess over the straight
        line between the ends.
        """
        curves = {**self.losses, **self.metrics}
        return {
            name: float((v - torch.lerp(v[0], v[-1], self.t)).max())
            for name, v in curves.items()
        }

    @property
    def barrier(self) -> float:
        """The loss barrier, on the first data set."""
        return self.barriers[next(iter(self.losses))]

    def to_dict(self) -> Json:
        """Return the curve as JSON."""
        losses, metrics = (
            map_values(Tensor.tolist, v) for v in (self.losses, self.metrics)
        )
        return {
            "t": self.t.tolist(),
            "losses": losses,
            "metrics": metrics,
            "barriers": self.barriers,
        }

    def plot(self, ax: Any = None, label: str = "") -> Any:
        """Plot the losses along the path; return the axes.

        :param label: of the curve, in front of the names of its losses.
        """
        lines = {}
        for name, loss in self.losses.items():
            lines[f"{label} {name}".strip()] = (self.t, loss)
        xlabel = "position on the path t"
        return plots.curves(ax, lines, xlabel, "loss (nats per row)", marker=".")

    def __repr__(self) -> str:
        values = ", ".join(
            f"{name}: {value:.4f}" for name, value in self.barriers.items()
        )
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
    """Compute the loss along the geodesic between two mean-field posteriors, or between
    two networks.

    All points share their noise, so the curve is smooth and the barrier is not the
    maximum of independent errors. Marginalisation over finitely many draws overstates
    every loss slightly, equally at all points.

    >>> net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    >>> x = torch.randn(50, 2)
    >>> symmetry = ps.find_symmetry(net, x)
    >>> other = symmetry.act(symmetry.finite.sample(), net)
    >>> model = ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(scale=0.1))
    >>> before = ps.loss_barrier(net, other, model, (x, net(x).detach())).barrier
    >>> aligned = symmetry.act(ps.align(other, net, symmetry).element, other)
    >>> abs(
    ...     ps.loss_barrier(net, aligned, model, (x, net(x).detach())).barrier
    ... ) < 1e-3 < before
    True

    :param guide_0: a guide with Gaussian moments (correlations are dropped),
        ``GaussianWeights``, a ``Posterior`` of draws in one frame, or a network: a
        module, or its weights by name. A network with batch normalisation needs its
        running statistics, which the module holds; a warning tells if they are missing.
    :param guide_1: likewise.
    :param log_likelihood: a :class:`~pyro_symmetric.models.BayesianModel`, to evaluate
        on ``data``; or a function from weights of batch shape ``(S,)`` to the
        log-likelihood of every row, ``(S, N)``.
    :param data: with a model, ``(x, y)``, or several by name: ``{"train": (x, y),
        "test": ...}``.
    :param num_points: the number of points, ends included; at least 3.
    :param num_samples: draws at each point; for plain networks one.
    """
    arguments.whole("num_points", num_points, 3)
    first = to_gaussian(guide_0, "guide_0")
    second = to_gaussian(guide_1, "guide_1")
    require_ends(first, second)
    model = log_likelihood if isinstance(log_likelihood, BayesianModel) else None
    is_module = isinstance(log_likelihood, nn.Module)
    scores: dict[str, Callable[[Weights, int], tuple[Tensor, ...]]] = {}
    if model is not None:
        named = _data_by_name(model, data, first, second)
        _warn_of_statistics(model.net, first, second)
        for name, pair in named.items():
            scores[name] = functools.partial(_of_model, model, name, pair)
    elif is_module or not callable(log_likelihood) or data is not None:
        raise TypeError(
            f"log_likelihood is {described(log_likelihood)}; it must be a "
            "BayesianModel, or, without data, a function "
            "of weights, e.g. lambda w: model.log_likelihood(w, x, y)"
        )
    else:
        scores["loss"] = functools.partial(_of_function, log_likelihood)
    values = list(first.loc.values())
    scales = [*first.scale.values(), *second.scale.values()]
    random = any(bool(scale.any()) for scale in scales)
    if not random:
        num_samples = 1
    size = max(1, CHUNK_WEIGHTS // sum(value.numel() for value in values))
    parts = [min(size, num_samples - start) for start in range(0, num_samples, size)]
    seed = drawn_seed() if random else 0
    t = torch.linspace(0, 1, num_points, dtype=torch.float64, device="cpu")
    curve = BarrierCurve(t, {}, {})
    for k, position in enumerate(tqdm(t.tolist(), desc="path", disable=not progress)):
        point = barycentre_gaussians((first, second), (1 - position, position))
        generator = torch.Generator(values[0].device).manual_seed(seed)
        sums: dict[str, list[Tensor]] = {}
        for count in parts:
            weights = draw(point, count, generator)
            for name, score in scores.items():
                density, *mean = score(weights, count)
                if name in sums:
                    log_sum, *mean_sum = sums[name]
                    density = torch.logaddexp(log_sum, density)
                    mean = [*map(torch.add, mean_sum, mean)]
                sums[name] = [density, *mean]
        for name, (density, *mean) in sums.items():
            if density.isnan().any():
                raise ValueError(
                    f"the log-likelihood of {name!r} is NaN at t = {position:g}, where "
                    "weights give no numbers"
                )
            loss = math.log(num_samples) - density.mean()
            curve.losses.setdefault(name, torch.zeros_like(t))[k] = loss
            if model is not None:
                targets = model.likelihood.targets(named[name][1])
                kind, error = _error(mean[0] / num_samples, targets)
                metric = kind if name == "loss" else f"{name} {kind}"
                curve.metrics.setdefault(metric, torch.zeros_like(t))[k] = error
    return curve


# losses and errors --------------------------------------------------------------------


def _data_by_name(
    model: BayesianModel,
    data: Data | Mapping[str, Data] | None,
    first: GaussianWeights,
    second: GaussianWeights,
) -> dict[str, Any]:
    """Return name -> ``(x, y)``; raise ``ValueError`` if these, or the sites that the
    model infers, don't fit.
    """
    if data is None:
        raise ValueError("a model needs data: (x, y), or a name for each pair")
    if lacking := _lacking(model.site_shapes, first, second):
        raise ValueError(
            f"guide_0 or guide_1 holds no {lacking}, which the model infers; for plain "
            "networks take a likelihood "
            "that infers nothing, such as GaussianLikelihood(scale=0.1)"
        )
    named: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {"loss": data}
    for name, pair in named.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise TypeError(
                f"data[{name!r}] is {described(pair)}; it must be a pair of tensors "
                "with all rows, (x, y)"
            )
        x, y = pair
        require_finite({"x": x, "y": y}, f"data[{name!r}]")
        if len(x) != len(y):
            raise ValueError(f"data[{name!r}] has {len(x)} inputs and {len(y)} targets")
    return named


def draw(gaussian: GaussianWeights, count: int, generator: torch.Generator) -> Weights:
    """Draw constrained weights of batch shape ``(count,)``."""
    weights = {}
    for site, loc in gaussian.loc.items():
        noise = torch.randn(
            count, *loc.shape, dtype=loc.dtype, device=loc.device, generator=generator
        )
        value = loc + gaussian.scale[site] * noise
        bijection = gaussian.bijection(site)
        weights[site] = value if bijection is None else bijection(value)
    return weights


def _of_function(
    log_likelihood: PointwiseLogLikelihood, weights: Weights, count: int
) -> tuple[Tensor, ...]:
    """Return ``log Σ_s p(y|x, w_s)`` by row."""
    pointwise = log_likelihood(weights)
    if pointwise.dim() != 2 or len(pointwise) != count:
        raise ValueError(
            f"log_likelihood returned shape {tuple(pointwise.shape)}; it must be one "
            "value for each draw and row, "
            f"({count}, N), not summed"
        )
    return (torch.logsumexp(pointwise.double(), 0),)


def _of_model(
    model: BayesianModel, name: str, pair: Data, weights: Weights, count: int
) -> tuple[Tensor, ...]:
    """Return ``log Σ_s p(y|x, w_s)`` and the sum of predictions by row. Buffers among
    weights replace the network's.
    """
    x = pair[0]
    targets = model.likelihood.targets(pair[1])
    parameters = dict(model.net.named_parameters())
    latents = pick(weights, set(model.site_shapes) - parameters.keys())
    widest = max(value.shape[1] if value.dim() > 1 else 1 for value in weights.values())
    rows = max(1, CHUNK_NUMBERS // max(1, count * widest))
    densities = []
    means = []
    for part in torch.arange(len(x), device=x.device).split(rows):
        outputs = model.outputs(weights, x[part])
        distribution = model.likelihood.distribution(outputs, latents)
        expected = (len(part), *distribution.batch_shape[2:], *distribution.event_shape)
        if targets[part].shape != expected:
            raise ValueError(
                f"data[{name!r}] has targets of shape {tuple(targets.shape)}; for this "
                "network the "
                f"{type(model.likelihood).__name__} takes "
                f"{(len(targets), *expected[1:])}"
            )
        require_targets(model.likelihood, distribution, targets[part])
        log_prob = distribution.log_prob(targets[part])
        log_prob = log_prob.reshape(count, len(part), -1).sum(-1)
        densities.append(torch.logsumexp(log_prob.double(), 0))
        means.append(model.likelihood.mean(outputs).double().sum(0))
    return torch.cat(densities), torch.cat(means)


def _error(prediction: Tensor, targets: Tensor) -> tuple[str, Tensor]:
    if prediction.dim() == targets.dim() + 1 and prediction.shape[-1] > 1:
        wrong = prediction.argmax(-1) != targets
        return "error", wrong.double().mean()
    residuals = prediction.reshape(targets.shape) - targets.double()
    return "RMSE", residuals.square().mean().sqrt()


def _lacking(
    sites: Iterable[str], first: GaussianWeights, second: GaussianWeights
) -> list[str]:
    """Return the sites that the ends don't both have."""
    common = first.loc.keys() & second.loc.keys()
    return [site for site in sites if site not in common]


def _warn_of_statistics(
    net: nn.Module, first: GaussianWeights, second: GaussianWeights
) -> None:
    statistics = []
    for name, module in net.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None:
            statistics.append(f"{name}.running_mean".lstrip("."))
    if borrowed := _lacking(statistics, first, second):
        warnings.warn(
            "the ends hold no running statistics for batch normalisation "
            f"({borrowed[0]!r} ...), so both are evaluated "
            "with the model's, which may not fit their weights. Pass networks, which "
            "hold their own statistics",
            UserWarning,
            stacklevel=4,  # past the no_grad around the caller
        )
