"""Likelihoods of targets given a network's outputs: class labels, real numbers with noise, or one's own object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyro.distributions as dist
from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments

PARTS = ("temperature", "latents", "distribution", "targets", "mean")  # what a likelihood object has


class Likelihood(Protocol):
    """A law of targets given outputs of the network; write your own by providing these."""

    @property
    def temperature(self) -> float:
        """``T`` of the tempered likelihood ``p(y|x,w)^(1/T)``."""

    def latents(self, like: Tensor) -> dict[str, dist.TorchDistribution]:
        """Priors of the likelihood's own latent sites, on the device and in the dtype of ``like``."""

    def distribution(self, outputs: Tensor, latents: Mapping[str, Tensor]) -> dist.TorchDistribution:
        """Distribution of the targets, of batch shape ``batch_shape + (N,)``, given outputs ``batch_shape + (N,
        ...)``."""

    def targets(self, y: Tensor) -> Tensor:
        """The targets in the shape that :meth:`distribution` scores."""

    def mean(self, outputs: Tensor) -> Tensor:
        """The expected target: class probabilities, or the regression function."""


# Their distributions check nothing: one network of many that diverges (a member of an ensemble, a chain) is for the
# caller to notice, and mustn't stop the others. Targets are checked where they enter, by ``require_targets``.


@dataclass(frozen=True)
class CategoricalLikelihood:
    """Class labels; the network's outputs are logits ``(N, C)``.

    >>> model = ps.BayesianModel(nn.Linear(4, 3), likelihood=ps.CategoricalLikelihood(temperature=0.5))
    >>> model.log_likelihood(model.initial_weights(), torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])).shape
    torch.Size([5])

    :param temperature: ``T`` of the tempered likelihood ``p(y|x,w)^(1/T)``; under 1 is a cold likelihood.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        arguments.positive("temperature", self.temperature)

    def latents(self, like: Tensor) -> dict[str, dist.TorchDistribution]:
        return {}

    def distribution(self, outputs: Tensor, latents: Mapping[str, Tensor]) -> dist.TorchDistribution:
        if outputs.shape[-1] < 2:
            raise ValueError(f"the network has {outputs.shape[-1]} output; a categorical likelihood needs at least 2")
        return dist.Categorical(logits=outputs, validate_args=False)

    def targets(self, y: Tensor) -> Tensor:
        return y

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1)


@dataclass(frozen=True)
class GaussianLikelihood:
    r"""Real targets with noise of one standard deviation; the network's outputs are means ``(N, D)``, ``(N, 1)`` or
    ``(N,)``.

    >>> model = ps.BayesianModel(nn.Linear(4, 1), likelihood=ps.GaussianLikelihood(prior_scale=0.5))
    >>> sorted(model.priors())
    ['bias', 'noise_scale', 'weight']

    :param scale: the noise's standard deviation, or ``None`` to learn it as the latent site ``noise_scale``.
    :param prior_scale: with ``scale=None``, the scale of the half-normal prior of ``noise_scale``.
    :param temperature: ``T`` of the tempered likelihood ``p(y|x,w)^(1/T)``.
    """

    scale: float | None = None
    prior_scale: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        arguments.positive("temperature", self.temperature)
        arguments.positive("scale", self.scale, none="one that is learnt")
        arguments.positive("prior_scale", self.prior_scale)

    def latents(self, like: Tensor) -> dict[str, dist.TorchDistribution]:
        return {"noise_scale": dist.HalfNormal(like.new_tensor(self.prior_scale))} if self.scale is None else {}

    def distribution(self, outputs: Tensor, latents: Mapping[str, Tensor]) -> dist.TorchDistribution:
        outputs = outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs
        scale = outputs.new_full((), self.scale) if self.scale is not None else latents["noise_scale"]
        per_row = outputs.dim() - scale.dim()
        scale = scale.reshape(*scale.shape, *([1] * per_row))
        return dist.Normal(outputs, scale, validate_args=False)

    def targets(self, y: Tensor) -> Tensor:
        return y.squeeze(-1) if y.dim() > 1 and y.shape[-1] == 1 else y

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs


def require_targets(likelihood: Likelihood, distribution: dist.TorchDistribution, targets: Tensor) -> None:
    """Check the targets of this library's likelihoods, unless Pyro's validation is off. A likelihood of one's own
    checks what it wants to.

    :raises ValueError: naming the support, if a target lies outside of it: a label that isn't whole, or NaN.
    """
    if not Distribution._validate_args or type(likelihood) not in (CategoricalLikelihood, GaussianLikelihood):
        return
    support: Any = distribution.support
    inside = support.check(targets)
    if not inside.all():
        found = targets[~inside][0].item()
        raise ValueError(f"y holds {found:g}, which isn't within the support of {type(likelihood).__name__}: {support}")


def likelihood_of(likelihood: str | Likelihood) -> Likelihood:
    """A likelihood by its name, or as it is.

    :raises ValueError: if it is neither.
    """
    known: dict[str, Likelihood] = {"categorical": CategoricalLikelihood(), "gaussian": GaussianLikelihood()}
    if isinstance(likelihood, type) or not all(hasattr(likelihood, name) for name in PARTS):
        return known[arguments.one_of("likelihood", likelihood, sorted(known), "a likelihood object")]
    return likelihood  # type: ignore[return-value]
