r"""Log-densities that are bounds only, and what may be done with them.

A mean of ``log p(w, D) - bound(w)`` over draws of the guide is an ELBO, or lies below it. ``exp`` of it is no
importance weight, as :math:`\mathbb E\,e^{X} \ne e^{\mathbb E X}`: an objective that exponentiates or ranks the
differences (Rényi, wake-sleep, tail-adaptive, importance sampling) would be off in a direction that nobody knows.
Such objectives can't be told by the calls that they make of a guide, but by what they do with its log-density: adding,
averaging and differentiating go through, exponentials and rankings raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor

from pyro_symmetric.distributions import Symmetrized
from pyro_symmetric.distributions.modes import score_parts

_NONLINEAR = (
    "exp exp_ exp2 expm1 logsumexp logaddexp logaddexp2 logcumsumexp softmax log_softmax sigmoid logsigmoid softplus "
    "argsort sort topk argmax argmin max min amax amin maximum minimum __rpow__"
)
_VALUELESS = "zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones"
NONLINEAR = frozenset(_NONLINEAR.split(" "))  # what makes no sense of a value that is right on average only
VALUELESS = frozenset(_VALUELESS.split(" "))  # results that hold nothing of the bound


class NotADensityError(TypeError):
    """A bound of a log-density was used as if it were the log-density."""


class OneSided(Tensor):
    """A bound of a log-density, and all that is computed from it by sums and products."""

    refused: frozenset[str] = NONLINEAR

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").removeprefix("special_")
        if name in cls.refused:
            raise NotADensityError(
                f"{name.strip('_')}() of a guide's log-density that is only a bound, true on average: objectives and "
                "algorithms that weight or rank draws by the guide's density (RenyiELBO, ReweightedWakeSleep, "
                "TraceTailAdaptive_ELBO, Importance and other importance weights) need the density itself. Give the "
                "guide estimator=ExactOrbit(), where the group is small enough, or use Trace_ELBO, "
                "TraceMeanField_ELBO or SymmetrizedMeanField_ELBO"
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) if name in VALUELESS else result


class AskedOutright(OneSided):
    """A bound that was asked for as a density, outside of any ELBO: it isn't turned into a plain number unseen.

    (``.item()`` shows it. :class:`~pyro.infer.Importance` makes numbers of its weights before it exponentiates them.)
    """

    refused: frozenset[str] = NONLINEAR | {"__float__"}


class GuideDensity(Symmetrized):
    """A symmetrised distribution as the latent site of a guide: a bound can't be mistaken for a density."""

    @classmethod
    def of(cls, posterior: Symmetrized) -> GuideDensity:
        """The same distribution."""
        return cls(
            posterior.base_distribution,
            posterior.flat,
            posterior.estimator,
            posterior.sticking_the_landing,
            validate_args=posterior._validate_args,
        )

    def log_prob(self, value: Tensor) -> Tensor:
        return self._marked(super().log_prob(value), AskedOutright)

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        """What Pyro's objectives ask for; as Pyro's own, but for the mark."""
        log_prob = super().log_prob(x)
        if self.has_rsample:
            parts = score_parts(self.base_distribution, log_prob, x)
            marked = self._marked(parts.entropy_term, OneSided)
            return ScoreParts(self._marked(log_prob, OneSided), parts.score_function, marked)
        log_prob = self._marked(log_prob, OneSided)
        return ScoreParts(log_prob, log_prob, 0)  # type: ignore[arg-type]

    def _marked(self, log_prob: Tensor, kind: type[OneSided]) -> Tensor:
        if self.estimator.bound == "exact" or torch._C._get_tracing_state():
            return log_prob
        return log_prob.as_subclass(kind)
