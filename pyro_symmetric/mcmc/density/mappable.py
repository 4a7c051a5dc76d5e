"""Parts of Pyro and PyTorch that :func:`torch.func.vmap` refuses, written so that it takes them.

They compute the same: in place of writing into a tensor, or into its ``data``, they choose or join. While chains of a
model that needs them are mapped, they stand in for the originals, behind the lock that Pyro models run under; the
model's first evaluation is compared with one that uses the originals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import hmm, projected_normal
from pyro.infer.reparam import projected_normal as reparam_projected_normal
from pyro.ops import gaussian, special, tensor_utils
from torch import Tensor
from torch.distributions.utils import broadcast_all


@contextlib.contextmanager
def mappable() -> Iterator[None]:
    """Let the parts below stand in for the originals. Enter it with the lock ``PYRO`` held."""
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in _PARTS]
    for owner, name, part in _PARTS:
        setattr(owner, name, part)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


class _SafeLog(torch.autograd.Function):
    """The logarithm, whose slope at 0 is finite."""

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
    """With a jitter on the diagonal that no gradient goes through."""
    relative = tensor_utils.CHOLESKY_RELATIVE_JITTER
    if x.size(-1) == 1:
        return (x.clamp(min=torch.finfo(x.dtype).tiny) if relative else x).sqrt()
    if relative:
        jitter = relative * torch.finfo(x.dtype).eps * x.detach().abs().max(-1).values
        x = x + jitter.diag_embed()
    return torch.linalg.cholesky(x)


def _safe_normalize(x: Tensor, *, p: float = 2) -> Tensor:
    """A vector divided by its norm; zero becomes the first axis, and no gradient goes through that."""
    norm = torch.linalg.norm(x, dim=-1, ord=p, keepdim=True)
    x = x / norm.clamp(min=torch.finfo(x.dtype).tiny)
    zero = x.detach().eq(0).all(-1, keepdim=True).to(x.dtype)
    return x + torch.cat([zero, torch.zeros_like(x[..., 1:])], -1)


def _ordered_logistic(self: Any, predictor: Tensor, cutpoints: Tensor, validate_args: bool | None = None) -> None:
    below = torch.sigmoid(cutpoints - predictor.unsqueeze(-1))
    self.predictor, self.cutpoints = predictor.expand(below.shape[:-1]), cutpoints.expand(below.shape)
    steps = torch.cat([below[..., :1], below[..., 1:] - below[..., :-1], 1 - below[..., -1:]], -1)
    super(dist.OrderedLogistic, self).__init__(steps, validate_args=validate_args)


def _multinomial_log_prob(self: Any, value: Tensor) -> Tensor:
    if self._validate_args:
        self._validate_sample(value)
    logits, value = broadcast_all(self.logits, value)
    logits = torch.where((value == 0) & (logits == -torch.inf), 0.0, logits)
    ways = torch.lgamma(value.sum(-1) + 1) - torch.lgamma(value + 1).sum(-1)
    return ways + (logits * value).sum(-1)


def _nan_masked_log_prob(self: Any, value: Tensor) -> Tensor:
    known = value.isfinite()
    filled = torch.where(known, value, self.loc.detach())
    return torch.where(known, super(dist.NanMaskedNormal, self).log_prob(filled), 0.0)


_PARTS: list[tuple[Any, str, Any]] = [
    (special, "_SafeLog", _SafeLog),
    (gaussian, "safe_cholesky", _safe_cholesky),
    (hmm, "safe_cholesky", _safe_cholesky),
    (projected_normal, "safe_normalize", _safe_normalize),
    (reparam_projected_normal, "safe_normalize", _safe_normalize),
    (dist.OrderedLogistic, "__init__", _ordered_logistic),
    (torch.distributions.Multinomial, "log_prob", _multinomial_log_prob),
    (dist.NanMaskedNormal, "log_prob", _nan_masked_log_prob),
]
