"""Log-densities of weights for many chains at once: of a traced Pyro model, or of a Bayesian network without a trace.

A :class:`Target` is a model with its data: what :class:`~pyro_symmetric.mcmc.density.density.Density` asks for the
log-joint of weights. Networks run in parallel threads; a traced model runs alone, since Pyro's handlers belong to the
process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal

from pyro_symmetric._process import running_pyro
from pyro_symmetric.calls import over_weights, unmappable
from pyro_symmetric.likelihoods import CategoricalLikelihood, GaussianLikelihood
from pyro_symmetric.mcmc.density.data import require_data
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.weights import Weights

Rows = Mapping[str, Tensor]
ROWS = "rows"  # the name of mini-batches that are cut from the arguments, rather than by a plate


class Target(Protocol):
    """The contract."""

    sites: Mapping[str, Distribution]  # latent site -> its distribution, in the order of the layout
    row_counts: dict[str, tuple[int, int]]  # mini-batches: name -> (rows there are, rows in a batch); empty without
    num_rows: int  # observations in the likelihood, about: the scale of the potential's curvature
    computed: Mapping[str, torch.Size]  # deterministic sites, and their shapes
    one_by_one: str  # why chains are evaluated one after another; empty if they are all at once
    with_stand_ins: bool  # whether parts of Pyro that can't be mapped over chains are replaced meanwhile

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        """Log-density ``(C,)`` of constrained weights of batch shape ``(C,)``, on mini-batches ``(C, B)`` if given."""

    def compute(self, weights: Weights) -> Weights:
        """Values of :attr:`computed`, likewise."""

    def prior_weights(self, num_chains: int) -> Weights:
        """Draws from the prior, of batch shape ``(C,)``."""

    def arguments(self) -> Mapping[str, Any]:
        """The model's arguments, by name."""

    def unsupported(self) -> list[str]:
        """Observed sites with data outside of the support of their distribution, at a draw from the prior."""


class NetworkTarget:
    """A :class:`BayesianModel` with its data: batched ``functional_call`` and log-densities, no trace."""

    computed: Mapping[str, torch.Size] = {}
    one_by_one, with_stand_ins = "", False

    def __init__(self, model: BayesianModel, x: Tensor, y: Tensor, batch_size: int | None):
        model = model.twin()  # while it is evaluated, a network holds the weights: here those of no other density
        require_data(model, x, y)
        if batch_size is not None:
            require_batch_size(batch_size, len(x))
        if model.num_data not in (None, len(x)):
            raise ValueError(
                f"x has {len(x)} rows, but the model was told num_data={model.num_data}; samplers draw their own "
                "mini-batches (batch_size=), so pass the whole data"
            )
        labels = type(model.likelihood) is CategoricalLikelihood
        self.model, self.x, self.y = model, x, y.long() if labels else y
        self.num_rows = len(x)
        self.sites: Mapping[str, Distribution] = {name: unchecked(fn) for name, fn in model.priors().items()}
        self.row_counts = {ROWS: (len(x), batch_size)} if batch_size is not None and batch_size < len(x) else {}

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        log_prior: Any = 0
        for name, prior in self.sites.items():
            log_prior = log_prior + prior.log_prob(weights[name])
        if rows is None:
            total, scale = self._log_likelihood(weights, self.x, self.y), 1.0
        else:
            index = rows[ROWS]
            total = over_weights(self.model.net, self._log_likelihood, weights, self.x[index], self.y[index])
            scale = len(self.x) / index.shape[-1]
        self.one_by_one = unmappable(self.model.net)
        return log_prior + scale / self.model.likelihood.temperature * total

    def unsupported(self) -> list[str]:
        return []  # as data are checked before

    def _log_likelihood(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        """Log-likelihood summed over rows, for weights of batch shape ``(C,)`` or ``()``."""
        likelihood = self.model.likelihood
        if type(likelihood) not in (CategoricalLikelihood, GaussianLikelihood):
            with running_pyro():  # another's distributions may check values
                return self.model.log_likelihood(weights, x, y).sum(-1)
        # The same numbers without checks of values, and by a fused kernel that saves a fifth of the gradient's time.
        outputs = self.model.outputs(weights, x)
        if isinstance(likelihood, GaussianLikelihood):
            targets = likelihood.targets(y)
            outputs = outputs.squeeze(-1) if outputs.shape[-1] == 1 else outputs
            noise = weights["noise_scale"] if likelihood.scale is None else outputs.new_full((), likelihood.scale)
            noise = noise.reshape(*noise.shape, *[1] * (outputs.dim() - noise.dim()))
            log_prob = Normal(outputs, noise, validate_args=False).log_prob(targets)
            return log_prob.flatten(outputs.dim() - targets.dim()).sum(-1)
        labels = y.expand(outputs.shape[:-1]).reshape(-1)
        losses = nn.functional.cross_entropy(outputs.flatten(0, -2), labels, reduction="none")
        return -losses.reshape(outputs.shape[:-1]).sum(-1)

    def compute(self, weights: Weights) -> Weights:
        return {}

    def prior_weights(self, num_chains: int) -> Weights:
        return {name: prior.sample((num_chains,)) for name, prior in self.sites.items()}

    def arguments(self) -> Mapping[str, Any]:
        return {"x": self.x, "y": self.y}

    def __repr__(self) -> str:
        return repr(self.model)


def not_a_number(target: Target) -> list[str]:
    """Names of the arguments that hold NaN, or infinite values: where to look if no energy is finite."""
    floats = {n: v for n, v in target.arguments().items() if isinstance(v, Tensor) and v.is_floating_point()}
    return [name for name, value in floats.items() if not bool(torch.isfinite(value).all())]


def unchecked(fn: Any) -> Any:
    """A distribution that doesn't check values; a copy if it, or one that it is made of, did."""
    if not isinstance(fn, Distribution):
        return fn
    parts = {name: unchecked(part) for name, part in vars(fn).items() if isinstance(part, Distribution)}
    if not fn._validate_args and all(vars(fn)[name] is part for name, part in parts.items()):
        return fn
    own = copy.copy(fn)
    vars(own).update(parts, _validate_args=False)
    return own


def require_batch_size(batch_size: int, rows: int) -> None:
    if not 1 <= batch_size <= rows:
        raise ValueError(f"batch_size is {batch_size}; it must lie between 1 and the {rows} rows of the data")
