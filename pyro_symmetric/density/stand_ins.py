"""Stand-ins for parts of Pyro and PyTorch that vmap refuses, or whose density is wrong
where chains may go.

A stand-in returns the same values, but selects or concatenates instead of writing into
a tensor or branching on a value. They are in place only while this library runs a model
(65 µs a run), so that other threads and the user's own code have Pyro as it is.
:data:`STAND_INS` says why each is needed.
"""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import hmm
from pyro.ops import gaussian, special, tensor_utils
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.utils import broadcast_all

from pyro_symmetric._process import LOCK

_validate_sample = Distribution._validate_sample


def _unvalidated_here(self: Any, value: Tensor) -> None:
    """Skip the validation by distributions that were built while it was on, such as a
    ``PyroSample``'s: a diverging chain mustn't stop the others, and vmap can't trace
    the checks. Other threads validate as usual."""
    if not LOCK._is_owned():
        _validate_sample(self, value)


class _SafeLog(torch.autograd.Function):
    """Logarithm with a finite derivative at 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / x.clamp(min=torch.finfo(x.dtype).eps)


def _safe_cholesky(x: Tensor) -> Tensor:
    """Return the Cholesky factor of a matrix with jitter on its diagonal, which is
    constant for gradients.
    """
    relative = tensor_utils.CHOLESKY_RELATIVE_JITTER
    if x.size(-1) == 1:
        return (x.clamp(min=torch.finfo(x.dtype).tiny) if relative else x).sqrt()
    jitter = relative * torch.finfo(x.dtype).eps * x.detach().abs().max(-1).values
    return torch.linalg.cholesky(x + jitter.diag_embed())


def _ordered_logistic(
    self: Any, predictor: Tensor, cutpoints: Tensor, validate_args: bool | None = None
) -> None:
    cdf = torch.sigmoid(cutpoints - predictor.unsqueeze(-1))
    self.predictor = predictor.expand(cdf.shape[:-1])
    self.cutpoints = cutpoints.expand(cdf.shape)
    probs = torch.cat(
        [cdf[..., :1], cdf[..., 1:] - cdf[..., :-1], 1 - cdf[..., -1:]], -1
    )
    super(dist.OrderedLogistic, self).__init__(probs, validate_args=validate_args)


def _multinomial_log_prob(self: Any, value: Tensor) -> Tensor:
    if self._validate_args:
        self._validate_sample(value)
    logits, value = broadcast_all(self.logits, value)
    logits = torch.where((value == 0) & (logits == -torch.inf), 0.0, logits)
    log_coefficient = torch.lgamma(value.sum(-1) + 1) - torch.lgamma(value + 1).sum(-1)
    return log_coefficient + (logits * value).sum(-1)


_exponential_log_prob = torch.distributions.Exponential.log_prob


def _supported_exponential_log_prob(self: Any, value: Tensor) -> Tensor:
    """Return the log-density, ``-inf`` for negative values, where PyTorch's is finite:
    below the scale of a Pareto, say, which may be a latent site."""
    return torch.where(value >= 0, _exponential_log_prob(self, value), -torch.inf)


# owner, attribute, stand-in
STAND_INS: list[tuple[Any, str, Any]] = [
    # Pyro's has no rule for vmap.
    (special, "_SafeLog", _SafeLog),
    # Pyro's adds its jitter in place, to a diagonal of `.data`.
    (gaussian, "safe_cholesky", _safe_cholesky),
    (hmm, "safe_cholesky", _safe_cholesky),
    # Pyro's writes probabilities into a tensor of zeros.
    (dist.OrderedLogistic, "__init__", _ordered_logistic),
    # PyTorch's writes into the logits where a count is 0.
    (torch.distributions.Multinomial, "log_prob", _multinomial_log_prob),
    # PyTorch's is finite below 0 (https://github.com/pytorch/pytorch/issues/14672).
    (torch.distributions.Exponential, "log_prob", _supported_exponential_log_prob),
    # PyTorch's branches on values (https://github.com/pytorch/pytorch/issues/92033).
    (Distribution, "_validate_sample", _unvalidated_here),
]
