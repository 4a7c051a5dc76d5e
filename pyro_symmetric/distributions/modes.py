r"""Mixtures of a few distributions over flat weight vectors, one for each mode.

.. math:: q(w) = \sum_{k=1}^{M} \pi_k\, q_k(w)

The density is exact. Draws are reparametrised given their component: gradients reach the components through the draws,
and the weights :math:`\pi` by the score function,

.. math:: \nabla_\pi\, \mathbb E_q f(w) = \mathbb E_q\big[ f(w)\, \nabla_\pi \log q(w) \big]
          = \mathbb E_q\Big[ f(w) \sum_k r_k(w)\, \nabla \log \pi_k \Big], \qquad
          r_k(w) = \frac{\pi_k\, q_k(w)}{q(w)},

which is the score of the drawn component averaged over all components that could have made the draw (Rao-Blackwell).
Transport through the mixture (Graves 2016, arXiv 1607.05690) has no score, but carries mass from mode to mode through
the desert between them, with a noise that grows like the inverse of the density there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor
from torch.distributions import Distribution, constraints


class Modes(TorchDistribution):
    r"""A mixture of ``M`` distributions over vectors of event shape ``(D,)``.

    Several draws made at once are spread over the components systematically: each by itself comes from component ``k``
    with probability :math:`\pi_k`, and of ``n`` draws :math:`n \pi_k` come from it, rounded up or down.

    :param components: ``M`` reparametrised distributions without batch shape.
    :param logits: log-weights of the components, up to a constant, ``(M,)``.
    :param stratum: draw ``i`` of a batch comes from component ``(stratum + i) mod M`` instead; for objectives that
        weight the components themselves.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (torch's own declaration)
    support = constraints.independent(constraints.real, 1)
    has_rsample = True

    def __init__(
        self,
        components: Sequence[Any],
        logits: Tensor,
        stratum: int | None = None,
        batch_shape: Sequence[int] = (),
        validate_args: bool | None = None,
    ):
        if len(components) == 0 or logits.shape != (len(components),):
            raise ValueError(
                f"{len(components)} components and logits of shape {tuple(logits.shape)}; there must be at least one "
                "component, and one logit for each"
            )
        shapes = {(tuple(c.batch_shape), tuple(c.event_shape)) for c in components}
        (batch, event), *others = sorted(shapes)
        if others or batch or len(event) != 1:
            raise ValueError(
                f"the components have (batch shape, event shape) {sorted(shapes)}; all must be ((), (D,)) with one D"
            )
        self.components = tuple(components)
        self.log_weights = logits.log_softmax(-1)
        self.stratum = stratum
        super().__init__(torch.Size(batch_shape), torch.Size(event), validate_args=validate_args)

    def __repr__(self) -> str:
        weights = ", ".join(f"{w:.3f}" for w in self.log_weights.exp().tolist())
        return f"Modes({type(self.components[0]).__name__} x {len(self.components)}, weights=[{weights}])"

    def expand(self, batch_shape: Sequence[int], _instance: Modes | None = None) -> Modes:
        new = self._get_checked_instance(Modes, _instance)
        new.components, new.log_weights, new.stratum = self.components, self.log_weights, self.stratum
        super(Modes, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    # densities ------------------------------------------------------------------------------------------------------

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        result = self.mixed([component.log_prob(value) for component in self.components])
        return result.expand(torch.broadcast_shapes(result.shape, self.batch_shape))

    def mixed(self, log_terms: Sequence[Tensor]) -> Tensor:
        r""":math:`\log \sum_k \pi_k e^{t_k}` of one term for each component."""
        return torch.logsumexp(self._weighted(log_terms), -1)

    def responsibilities(self, value: Tensor) -> Tensor:
        """Probability of each component to have made a draw, ``batch_shape + (M,)``."""
        return self._weighted([component.log_prob(value) for component in self.components]).softmax(-1)

    def _weighted(self, log_terms: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(log_terms), -1) + self.log_weights

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        """Score parts as Pyro's objectives ask for them: value and gradient, the score of the weights included."""
        return score_parts(self, self.log_prob(x), x)

    # moments --------------------------------------------------------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        means = torch.stack([c.mean for c in self.components])
        return (self.log_weights.exp() @ means).expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        means = torch.stack([c.mean for c in self.components])
        variances = torch.stack([c.variance for c in self.components])
        weights = self.log_weights.exp()
        result = weights @ (variances + (means - weights @ means).square())
        return result.expand(self.batch_shape + self.event_shape)

    # draws ----------------------------------------------------------------------------------------------------------

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draws, ``sample_shape + batch_shape + (D,)``, with gradient to the components that made them."""
        shape = torch.Size(sample_shape) + self.batch_shape
        which = self._assigned(shape.numel())
        # Draws component by component, then in their places: nothing is drawn in vain, M is small.
        counts = torch.bincount(which, minlength=len(self.components)).tolist()
        drawn = [c.rsample((n,)) for c, n in zip(self.components, counts, strict=True) if n]
        if not drawn:
            return self.log_weights.new_zeros(shape + self.event_shape)
        places = which.argsort(stable=True).argsort(stable=True)
        return torch.cat(drawn)[places].reshape(shape + self.event_shape)

    @torch.no_grad()
    def _assigned(self, count: int) -> Tensor:
        """The component of each of ``count`` draws."""
        device = self.log_weights.device
        if self.stratum is not None:
            return (self.stratum + torch.arange(count, device=device)) % len(self.components)
        order = torch.randperm(count, device=device)
        uniform = (order + torch.rand((), dtype=torch.float64, device=device)) / max(count, 1)
        edges = self.log_weights.double().exp().cumsum(-1)
        return torch.searchsorted(edges[:-1], uniform, right=True)


def score_parts(base: Distribution, log_prob: Tensor, value: Tensor) -> ScoreParts:
    """Pyro's parts of a gradient, for a log-density of draws from ``base``: the base's own, or another's.

    Of a mixture the weights need their score times all that the objective averages. Pyro multiplies the score by what
    it sees in the model; the rest, the guide's own log-density, is added to ``entropy_term``, whose value stays that of
    the log-density.
    """
    if not isinstance(base, Modes) or not base.log_weights.requires_grad:
        return ScoreParts(log_prob, 0, log_prob)  # type: ignore[arg-type]
    with torch.no_grad():
        terms = [component.log_prob(value) for component in base.components]
    score = base.mixed(terms)
    return ScoreParts(log_prob, score, log_prob + log_prob.detach() * (score - score.detach()))
