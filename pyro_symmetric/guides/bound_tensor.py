r"""Log-densities that are only bounds, and what may be done with them.

A mean of ``log p(w, D) - bound(w)`` over draws of the guide is an ELBO, or lies below it. ``exp`` of it is no
importance weight, as :math:`\mathbb E\,e^{X} \ne e^{\mathbb E X}`: an objective that exponentiates or ranks the
differences (Rényi, wake-sleep, tail-adaptive, importance sampling) would be off in a direction that nobody knows.
Such objectives are told not by the calls that they make of a guide, but by what they do with its log-density: adding,
averaging and differentiating go through, exponentials and rankings raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.distributions import Symmetrized

_NONLINEAR = (
    "exp exp_ exp2 expm1 logsumexp logaddexp logaddexp2 logcumsumexp softmax log_softmax sigmoid logsigmoid softplus "
    "argsort sort topk argmax argmin max min amax amin maximum minimum __rpow__ __float__"
)
_VALUELESS = "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones"
# What makes no sense of a value that is right on average only. (Importance turns its weights into plain numbers before
# it exponentiates them; ``.item()`` shows a value.)
NONLINEAR = frozenset(_NONLINEAR.split(" "))
VALUELESS = frozenset(_VALUELESS.split(" "))  # results that hold nothing of the bound


class NotADensityError(TypeError):
    """A bound of a log-density was used as if it were the log-density.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> guide = ps.AutoSymmetrized(model, group, estimator=ps.InfoNCE(2))
    >>> try:
    ...     pyro.infer.RenyiELBO(alpha=0.5, num_particles=2).loss(model, guide)
    ... except ps.NotADensityError:
    ...     print("RenyiELBO needs ExactOrbit")
    RenyiELBO needs ExactOrbit
    """


class BoundTensor(Tensor):
    """A bound of a log-density, and all that is computed from it by sums and products."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").removeprefix("special_")
        if name in NONLINEAR:
            shown = "loss.item() shows the value of a loss. " if name == "__float__" else ""
            raise NotADensityError(
                f"{shown}{name.strip('_')}() of a guide's log-density that is only a bound, true on average: "
                "objectives and algorithms that weight or rank draws by the guide's density (RenyiELBO, "
                "ReweightedWakeSleep, TraceTailAdaptive_ELBO, Importance and other importance weights) need the "
                "density itself. Give the guide estimator=ExactOrbit(), if the group is small enough, or use "
                "Trace_ELBO, TraceMeanField_ELBO or SymmetrizedMeanField_ELBO"
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) if name in VALUELESS else result


class GuideDensity(Symmetrized):
    """A symmetrised distribution as the latent site of a guide: a bound can't be mistaken for a density."""

    def log_prob(self, value: Tensor) -> Tensor:
        log_prob = super().log_prob(value)
        if self.estimator.bound == "exact" or torch._C._get_tracing_state():
            return log_prob
        return log_prob.as_subclass(BoundTensor)
