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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from tqdm import tqdm

from pyro_symmetric import arguments
from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.alignment.geodesic import barycentre_gaussians, draw, require_ends
from pyro_symmetric.alignment.repair import Repair
from pyro_symmetric.calls import described, over_weights
from pyro_symmetric.discovery.symmetry import with_weights
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Weights, require_finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PointwiseLogLikelihood = Callable[[Weights], Tensor]
Data = tuple[Tensor, Tensor]

# Weights of all draws that are evaluated at once.
CHUNK_WEIGHTS = 2**24
# Outputs of the widest layer that one forward may hold for all draws and rows; it sets how many rows go at once.
CHUNK_NUMBERS = 2**24
LOSS_LABEL = "marginalised loss (nats per row)"


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
    _at: Callable[[float], nn.Module] | None = field(default=None, repr=False, compare=False, kw_only=True)

    def network(self, t: float) -> nn.Module:
        """The network at a position of the path between two networks, put right if ``repair`` asked for it.

        >>> first, second, x = nn.Linear(2, 1), nn.Linear(2, 1), torch.randn(20, 2)
        >>> curve = ps.loss_barrier(first, second, ps.BayesianModel(first, likelihood="gaussian"), (x, x[:, :1]))
        >>> torch.allclose(curve.network(0.5)(x), (first(x) + second(x)) / 2, atol=1e-5)
        True

        :param t: from 0 to 1.
        :return: a new network, in eval mode.
        :raises ValueError: if the ends are no plain networks, or the losses came without a model.
        """
        arguments.number("t", t, least=0, most=1)
        if self._at is None:
            raise ValueError("t names no network: the ends have deviations, or log_likelihood was no BayesianModel")
        return self._at(float(t))

    @property
    def barriers(self) -> dict[str, float]:
        """Barrier of every loss and metric: the largest excess over the straight line between the ends."""
        return {name: float(self.excess(name).max()) for name in (*self.losses, *self.metrics)}

    @property
    def barrier(self) -> float:
        """The loss barrier; of several data sets, the first."""
        return self.barriers[next(iter(self.losses))]

    def excess(self, name: str) -> Tensor:
        """The excess over the straight line between the ends, ``(T,)``."""
        values = self._curve("name", name)
        return values - torch.lerp(values[0], values[-1], self.t)

    def _curve(self, argument: str, name: str) -> Tensor:
        known = {**self.losses, **self.metrics}
        return known[arguments.one_of(argument, name, known)]

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

    def plot(self, ax: Axes | None = None, label: str = "", names: Sequence[str] | None = None) -> Axes:
        """Draw curves along the path, and the straight lines between their ends, dashed.

        :param ax: where to draw; a new figure by default.
        :param label: what the legend says before the name of each curve.
        :param names: which losses or metrics; all losses by default.
        """
        from matplotlib import pyplot as plt

        drawn = list(self.losses) if names is None else arguments.listed("names", names, str, "names")
        known = {name: self._curve("names", name) for name in drawn}
        arguments.instance("label", label, str, "a text")
        if ax is not None and not hasattr(ax, "plot"):
            raise TypeError(f"ax is {described(ax)}; it must be Matplotlib axes, or None for a new figure")
        if ax is None:
            ax = plt.subplots()[1]
        for name, values in known.items():
            (line,) = ax.plot(self.t, values, marker=".", label=f"{label} {name}".strip())
            ax.plot(self.t[[0, -1]], values[[0, -1]], ls="--", lw=0.8, color=line.get_color())
        kinds = dict.fromkeys(LOSS_LABEL if name in self.losses else name for name in drawn)
        ax.set(xlabel="position on the path t", ylabel=", ".join(kinds))
        ax.legend()
        return ax


@torch.no_grad()
def loss_barrier(
    guide_0: Any,
    guide_1: Any,
    log_likelihood: BayesianModel | PointwiseLogLikelihood | Mapping[str, PointwiseLogLikelihood],
    data: Data | Mapping[str, Data] | None = None,
    *,
    num_points: int = 11,
    num_samples: int = 64,
    repair: Tensor | None = None,
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

    :param guide_0: a guide with Gaussian moments (correlations are left out), ``GaussianWeights``, a ``Posterior`` (the
        moments of its draws), or a network: a module, or its weights by name, running statistics among them or not.
    :param guide_1: likewise.
    :param log_likelihood: a :class:`~pyro_symmetric.models.BayesianModel`, whose loss (untempered, whatever the
        temperature it was trained at) and error are measured on ``data``; or a function: weights of batch shape
        ``(S,)`` -> log-likelihood of every row ``(S, N)``; one, or one for each name of data.
    :param data: with a model, ``(x, y)``, or a name for each: ``{"train": (x, y), "test": ...}``.
    :param num_points: how many points, ends included; at least 3.
    :param num_samples: draws at each point; plain networks need, and take, one.
    :param repair: inputs, without labels, from which statistics of activations are put right at every point: the
        running statistics of batch normalisation are computed anew or, in a network without it, units are rescaled to
        means and deviations between those of the ends; see :mod:`pyro_symmetric.alignment.repair`. Needs a
        model, the latter plain networks.
    :return: the curve; between two networks its :meth:`~BarrierCurve.network` gives those on the path, repaired.

    Warns if the model has batch normalisation for which an end brings no running statistics, as no guide does, and
    nothing repairs them: the model's belong to one network.
    """
    arguments.whole("num_points", num_points, 3)
    arguments.whole("num_samples", num_samples, 1)
    first, second = to_gaussian(guide_0, "guide_0"), to_gaussian(guide_1, "guide_1")
    require_ends(first, second)
    model = log_likelihood if isinstance(log_likelihood, BayesianModel) else None
    measures = _measures(log_likelihood, data)
    plain = not any(bool(scale.any()) for end in (first, second) for scale in end.scale.values())
    if plain:
        num_samples = 1
    repairing = _repair(model, repair, first, second, plain)
    if model is not None and repairing is None:
        _warn_of_borrowed_statistics(model, first, second)
    values = list(first.loc.values())
    parts = torch.arange(num_samples, device="cpu").split(
        max(1, CHUNK_WEIGHTS // sum(value.numel() for value in values))
    )
    seed = int(torch.randint(2**62, (), device="cpu"))
    t = torch.linspace(0, 1, num_points, dtype=torch.float64, device="cpu")
    found: dict[str, list[Tensor]] = {}
    for position in tqdm(t.tolist(), desc="path", disable=not progress):
        between = barycentre_gaussians((first, second), (1 - position, position))
        generator = torch.Generator(values[0].device).manual_seed(seed)
        here = measures()
        for part in parts:
            weights = draw(between, len(part), generator)
            if repairing is not None:
                weights = repairing(weights, position)
            for measure in here:
                measure.add(weights, len(part))
        for measure in here:
            for name, value in measure.results().items():
                found.setdefault(name, []).append(value)
    curves = {name: torch.stack(points) for name, points in found.items()}
    losses = {measure.name: curves.pop(measure.name) for measure in here}
    at = functools.partial(_network_at, model.net, first, second, repairing) if model is not None and plain else None
    return BarrierCurve(t, losses, curves, _at=at)


# along the path -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _network_at(
    net: nn.Module, first: GaussianWeights, second: GaussianWeights, repairing: Repair | None, t: float
) -> nn.Module:
    """The network between two plain ones; what the ends don't hold is as in ``net``."""
    between = barycentre_gaussians((first, second), (1 - t, t)).loc
    weights = {name: value[None] for name, value in between.items()}
    if repairing is not None:
        weights = repairing(weights, t)
    own = dict(net.named_parameters()) | dict(net.named_buffers())
    return with_weights(net, {name: value[0] for name, value in weights.items() if name in own})


def _measures(log_likelihood: Any, data: Data | Mapping[str, Data] | None) -> Callable[[], list[MarginalLikelihood]]:
    """Measurements to be taken at a point, made anew at every call."""
    if isinstance(log_likelihood, BayesianModel):
        if data is None:
            raise ValueError('data is None; with a model give (x, y), or {"train": (x, y), "test": (x, y)}')
        rows = data if isinstance(data, Mapping) else {"loss": data}
        for name, pair in rows.items():
            if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(v, Tensor) for v in pair)):
                raise ValueError(f"data[{name!r}] is a {type(pair).__name__}; it must be a pair (x, y) of tensors")
            if len(pair[0]) != len(pair[1]):
                raise ValueError(f"data[{name!r}] has {len(pair[0])} inputs and {len(pair[1])} targets")
            require_finite({"x": pair[0], "y": pair[1]}, f"data[{name!r}]")
        if not rows:
            raise ValueError('data is empty; with a model give (x, y), or {"train": (x, y), "test": (x, y)}')
        return lambda: [MarginalPrediction(name, log_likelihood, x, y) for name, (x, y) in rows.items()]
    named = dict(log_likelihood) if isinstance(log_likelihood, Mapping) else {"loss": log_likelihood}
    for function in named.values() or [None]:
        if isinstance(function, nn.Module) or not callable(function):
            found = "a module" if isinstance(function, nn.Module) else described(function)
            raise TypeError(
                f"log_likelihood is {found}; it must be a BayesianModel, or a function of weights, e.g. "
                "lambda w: model.log_likelihood(w, x, y)"
            )
    if data is not None:
        raise ValueError("data go with a BayesianModel as log_likelihood; functions of weights know their own")
    return lambda: [MarginalLikelihood(name, function) for name, function in named.items()]


def _repair(
    model: BayesianModel | None,
    inputs: Tensor | None,
    first: GaussianWeights,
    second: GaussianWeights,
    plain: bool,
) -> Repair | None:
    if inputs is None:
        return None
    if model is None:
        raise ValueError("repair needs a BayesianModel as log_likelihood, whose network it looks into")
    repairing = Repair(model.net, inputs, (first.loc, second.loc))
    if repairing.kind == "rescaling" and not plain:
        raise ValueError(
            "the network has no batch normalisation, and rescaling is for plain networks: these ends have deviations"
        )
    return repairing


def _warn_of_borrowed_statistics(model: BayesianModel, first: GaussianWeights, second: GaussianWeights) -> None:
    held = [
        f"{name}.running_mean".lstrip(".")
        for name, module in model.net.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
    ]
    if borrowed := [name for name in held if name not in first.loc or name not in second.loc]:
        warnings.warn(
            f"the ends bring no running statistics for batch normalisation ({borrowed[0]!r} ...), so both are measured "
            "with the model's: what was fitted to another network's, or moved by an element of the symmetry, isn't "
            "measured as itself. Pass repair=x, or networks, whose own statistics come along",
            UserWarning,
            stacklevel=4,  # past loss_barrier and the no_grad around it
        )


# what is measured -------------------------------------------------------------------------------------------------


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
