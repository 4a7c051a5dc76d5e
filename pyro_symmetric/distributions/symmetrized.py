r"""The symmetrised distribution as a Pyro distribution over flat weight vectors.

.. math:: \bar q(w) = \frac{1}{|G|} \sum_{g \in G} q(g \cdot w)\, |\det J_g(w)|
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from torch import Tensor
from torch.distributions import constraints

from pyro_symmetric import arguments
from pyro_symmetric.distributions.modes import Modes, score_parts
from pyro_symmetric.distributions.orbit import OrbitEstimator, require_estimator
from pyro_symmetric.distributions.sinkhorn_importance import SinkhornImportance
from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.groups.action import Action


class Symmetrized(TorchDistribution):
    r"""A base distribution averaged over the orbits of a group.

    ``sample`` and ``rsample`` draw *from the base*: every function of the weights that is invariant under the group (a
    network's predictions) is distributed as under :math:`\bar q`, reparametrised gradients flow, and the draws are what
    the bounds of ``estimator`` are stated for. :meth:`sample_orbit` draws from :math:`\bar q` itself.

    ``log_prob`` is the estimator's answer, which for a bound is random and evaluated once for each draw by
    :class:`~pyro.infer.Trace_ELBO`. An ELBO made of it never exceeds that of :math:`\bar q` in expectation, **if** the
    model is invariant under the group: then only are draws of the base as good as those of :math:`\bar q`. This class
    sees no model, so check yours by ``ps.verify_model(group, model, *args)``;
    :class:`~pyro_symmetric.guides.AutoSymmetrized` and :func:`~pyro_symmetric.guides.evidence` do so.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> base = dist.Normal(torch.tensor([-5.0, 0.0, 5.0]), 1.0).to_event(1)
    >>> orbit = ps.Symmetrized(base, ps.Action(group, ["w"]), ps.ExactOrbit())
    >>> w = torch.tensor([-5.0, 0.0, 5.0])
    >>> torch.allclose(orbit.log_prob(w), orbit.log_prob(w.flip(0)))
    True

    :param base_distribution: over vectors of event shape ``(D,)``.
    :param action: the group's action on those vectors, e.g. ``ps.Action(group, sites)``; the average is over its
        permutations and signs.
    :param estimator: of :math:`\log \bar q`; :class:`~pyro_symmetric.distributions.SinkhornImportance` by default.
    :param sticking_the_landing: differentiate ``log_prob`` through the draw only, not through the base's own parameters
        (Roeder, Wu & Duvenaud 2017, arXiv 1703.09194). What is left out, :math:`\mathbb E_q\,
        \partial_\theta \log \bar q_\theta(w)`, is zero for ``ExactOrbit``: averaged over :math:`w \sim q` it is the
        same as over :math:`\bar q`, whose score it is. It is zero for ``InfoNCE`` too, as its terms are
        exchangeable, so that gradients of its bound stay unbiased, and for ``SinkhornImportance``, whose proposals are
        held fixed. Gaussian bases only.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (torch's own declaration)

    def __init__(
        self,
        base_distribution: TorchDistribution,
        action: Action,
        estimator: OrbitEstimator | None = None,
        sticking_the_landing: bool = False,
        validate_args: bool | None = None,
    ):
        arguments.instance(
            "base_distribution", base_distribution, torch.distributions.Distribution, "a distribution over flat vectors"
        )
        arguments.instance("action", action, Action, "an Action(group, sites) on those vectors")
        if estimator is not None:
            require_estimator(estimator)
        arguments.flag("sticking_the_landing", sticking_the_landing)
        if tuple(base_distribution.event_shape) != (action.dim,):
            raise ValueError(
                f"base_distribution has event shape {tuple(base_distribution.event_shape)}, but the group acts on "
                f"vectors of {action.dim} numbers"
            )
        self.base_distribution = base_distribution
        self.action = action
        self.estimator = SinkhornImportance() if estimator is None else estimator
        self.sticking_the_landing = sticking_the_landing
        if sticking_the_landing:
            detached(base_distribution)  # which base can't be is reported here
        super().__init__(base_distribution.batch_shape, base_distribution.event_shape, validate_args=validate_args)

    def __repr__(self) -> str:
        return (
            f"Symmetrized({type(self.base_distribution).__name__}, batch_shape={tuple(self.batch_shape)}, "
            f"event_shape={tuple(self.event_shape)}, log_order={self.action.group.log_order():.1f}, "
            f"estimator={self.estimator!r} [{self.estimator.bound}])"
        )

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> Any:
        return self.base_distribution.support

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """True if draws of the base are reparametrised."""
        return self.base_distribution.has_rsample

    def expand(self, batch_shape: Sequence[int], _instance: Symmetrized | None = None) -> Symmetrized:
        new = self._get_checked_instance(Symmetrized, _instance)
        new.base_distribution = self.base_distribution.expand(arguments.shape("batch_shape", batch_shape))
        new.action = self.action
        new.estimator = self.estimator
        new.sticking_the_landing = self.sticking_the_landing
        super(Symmetrized, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Reparametrised draws of the base, ``sample_shape + batch_shape + (D,)``."""
        return self.base_distribution.rsample(arguments.shape("sample_shape", sample_shape))

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draws of the base, without gradient."""
        with torch.no_grad():
            return self.base_distribution.sample(arguments.shape("sample_shape", sample_shape))

    def sample_orbit(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        r"""Draws of :math:`\bar q` itself: draws of the base, each moved by a uniform group element."""
        value = self.sample(sample_shape)
        return self.action(value, self.action.group.finite.sample(value.shape[:-1], device=value.device))

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return self.estimator.log_prob(self.scored_distribution, self.action, value)

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        """Score parts as Pyro's objectives ask for them; of a mixture, with the score of its weights."""
        return score_parts(self.base_distribution, self.log_prob(x), x)

    @property
    def scored_distribution(self) -> TorchDistribution:
        """The base as ``log_prob`` sees it: without gradient to its parameters, when sticking the landing."""
        return detached(self.base_distribution) if self.sticking_the_landing else self.base_distribution


def detached(base: TorchDistribution) -> TorchDistribution:
    """The same Gaussian, or mixture of Gaussians, without gradient to its parameters.

    :raises TypeError: for a base that is neither normal (in blocks, multivariate, of low rank) nor a mixture of such.
    """
    if isinstance(base, Modes):
        return Modes(list(map(detached, base.components)), base.log_weights.detach(), base.stratum)
    if isinstance(base, UnitBlocks):
        return base.detach()
    if isinstance(base, torch.distributions.Independent):
        return dist.Independent(detached(base.base_dist), base.reinterpreted_batch_ndims)
    if isinstance(base, torch.distributions.Normal):
        return dist.Normal(base.loc.detach(), base.scale.detach())
    if isinstance(base, torch.distributions.MultivariateNormal):
        return dist.MultivariateNormal(base.loc.detach(), scale_tril=base.scale_tril.detach())
    if isinstance(base, torch.distributions.LowRankMultivariateNormal):
        return dist.LowRankMultivariateNormal(base.loc.detach(), base.cov_factor.detach(), base.cov_diag.detach())
    raise TypeError(
        f"sticking_the_landing needs a Gaussian base; that of {type(base).__name__} keeps its parameters to itself"
    )
