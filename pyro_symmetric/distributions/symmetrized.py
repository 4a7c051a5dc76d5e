r"""The symmetrised distribution as a Pyro distribution over flat weight vectors.

.. math:: \bar q(w) = \frac{1}{|G|} \sum_{g \in G} q(g \cdot w)\, |\det J_g(w)|
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.score_parts import ScoreParts
from pyro.ops.provenance import extract_provenance, track_provenance
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.kl import register_kl

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.arguments import as_tensor
from pyro_symmetric.distributions.estimators import OrbitEstimator
from pyro_symmetric.distributions.rotations import usual_estimator
from pyro_symmetric.groups.action import Action

ORBIT_ROUNDS = 64  # random elements that join entries to orbits
CHUNK = 500  # draws of an estimate evaluated at once


class Estimate(NamedTuple):
    """A Monte Carlo estimate.

    :param value: the mean over draws, of batch shape.
    :param standard_error: the standard error of ``value``.
    :param bound: ``"lower"`` if the expectation of ``value`` is a lower bound,
        ``"exact"`` if it is unbiased.
    """

    value: Tensor
    standard_error: Tensor
    bound: Literal["lower", "exact"]


class MovedDraws(NamedTuple):
    """Draws of a base, the same draws moved, the log-determinants of the moves'
    Jacobians, and how often the moved draws were changed in place when drawn."""

    base: Tensor
    value: Tensor
    log_det: Tensor | float = 0.0
    version: int = 0

    def of(self, value: Tensor) -> MovedDraws | None:
        """Return the draws if values are the moved draws; else nothing.

        Objectives may have detached them, or track what they depend on: so is what is
        returned.
        """
        extracted: Any = extract_provenance(value)
        plain, provenance = extracted
        if not _same_memory(plain, self.value) or version_of(plain) != self.version:
            return None
        base = self.base.reshape(plain.shape)
        log_det = as_tensor(self.log_det)
        if log_det.dim():
            log_det = log_det.reshape(plain.shape[:-1])
        if not plain.requires_grad:
            base = base.detach()
            log_det = log_det.detach()
        return self._replace(base=track_provenance(base, provenance), log_det=log_det)


class Symmetrized(TorchDistribution):
    r"""A base distribution averaged over the orbits of a group.

    ``sample`` and ``rsample`` draw from :math:`\bar q`: from the base, each draw moved
    by a uniform group element. ``log_prob`` is the estimate, random for a bound. The
    density of a moved draw is that of the draw: of its latest draws this distribution
    knows where they came from and evaluates the estimate there, where its bound holds.
    If the model is invariant under the group, as ``ps.verify_model(group, model,
    *args)`` checks, the expected ELBO made of it is at most that of :math:`\bar q`.
    One copy of every mode is drawn by ``base_distribution``.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> base = dist.Normal(torch.tensor([-5.0, 0.0, 5.0]), 1.0).to_event(1)
    >>> orbit = ps.Symmetrized(base, ps.groups.Action(group, ["w"]), ps.ExactOrbit())
    >>> w = torch.tensor([-5.0, 0.0, 5.0])
    >>> torch.allclose(orbit.log_prob(w), orbit.log_prob(w.flip(0)))
    True

    :param base_distribution: a distribution over vectors of event shape ``(D,)``.
    :param action: the group's action on these vectors, e.g. ``ps.groups.Action(group,
        sites)``; ``G`` are its permutations and signs.
    :param estimator: the estimator of :math:`\log \bar q`; by default
        :class:`~pyro_symmetric.distributions.ExactOrbit` where that is cheap, else
        :class:`~pyro_symmetric.distributions.SinkhornImportance`.
    :ivar moves_draws: whether draws are moved; objectives of invariant models are the
        same without.
    """

    moves_draws = True
    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (torch's own declaration)

    def __init__(
        self,
        base_distribution: TorchDistribution,
        action: Action,
        estimator: OrbitEstimator | None = None,
        validate_args: bool | None = None,
    ):
        if estimator is not None:
            wanted = "an OrbitEstimator such as SinkhornImportance(4)"
            arguments.instance("estimator", estimator, OrbitEstimator, wanted)
        if tuple(base_distribution.event_shape) != (action.dim,):
            raise ValueError(
                "base_distribution has event shape "
                f"{tuple(base_distribution.event_shape)}, but the group acts on "
                f"vectors of {action.dim} numbers"
            )
        self.base_distribution = base_distribution
        self.action = action
        self.estimator = estimator or usual_estimator(base_distribution, action)
        self._latest: MovedDraws | None = None
        super().__init__(
            base_distribution.batch_shape,
            base_distribution.event_shape,
            validate_args=validate_args,
        )

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> Any:
        return self.base_distribution.support

    @property
    def has_rsample(self) -> bool:  # type: ignore[override]
        """The flag of the base: reparametrised draws."""
        return self.base_distribution.has_rsample

    def expand(
        self, batch_shape: Sequence[int], _instance: Symmetrized | None = None
    ) -> Symmetrized:
        new = self._get_checked_instance(Symmetrized, _instance)
        new.base_distribution = self.base_distribution.expand(batch_shape)
        new.action = self.action
        new.estimator = self.estimator
        new.moves_draws = self.moves_draws
        new._latest = None
        super(Symmetrized, new).__init__(
            torch.Size(batch_shape), self.event_shape, validate_args=False
        )
        new._validate_args = self._validate_args
        return new

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draw with gradient, ``sample_shape + batch_shape + (D,)``."""
        return self._move(self.base_distribution.rsample(torch.Size(sample_shape)))

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draw without gradient, ``sample_shape + batch_shape + (D,)``."""
        with torch.no_grad():
            return self._move(self.base_distribution.sample(torch.Size(sample_shape)))

    def _move(self, base: Tensor) -> Tensor:
        """Move draws of the base by uniform elements, and remember them."""
        group = self.estimator.averaged(self.base_distribution, self.action)
        if not group.moves or not self.moves_draws:
            return base
        batch = tuple(map(int, base.shape[:-1]))
        element = group.sample(batch, device=base.device, dtype=base.dtype)
        value = self.action(base, element)
        log_det: Tensor | float = 0.0
        if self.action.nonlinear_sites:
            log_det = self.action.log_abs_det(base, element)
        self._latest = MovedDraws(base, value, log_det, version_of(value))
        return value

    def _drawn(self, value: Tensor) -> MovedDraws:
        """Return the draws of the base that values come from: the values themselves,
        unless they are the latest draws."""
        drawn = None if self._latest is None else self._latest.of(value)
        return drawn or MovedDraws(value, value)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        drawn = self._drawn(value)
        base = self.base_distribution
        return self.estimator.log_prob(base, self.action, drawn.base) - drawn.log_det

    def score_parts(self, x: Tensor, *args: Any, **kwargs: Any) -> ScoreParts:
        """Return the parts of Pyro's gradient estimators. Without reparametrisation the
        score function is the base's, and the gradient of ``log_prob`` itself, whose
        mean is zero, is left out."""
        log_prob = self.log_prob(x)
        zero: Any = 0
        if self.has_rsample:
            return ScoreParts(log_prob, zero, log_prob)
        score = self.base_distribution.log_prob(self._drawn(x).base)
        return ScoreParts(log_prob, score, zero)

    # moments and information ----------------------------------------------------------

    @property
    def mean(self) -> Tensor:
        r"""The exact mean of :math:`\bar q`: that of the base, averaged over the orbit
        of each entry.
        """
        return averaged_over_orbits(
            self.action, self.base_distribution.mean, signed=True
        )

    @property
    def variance(self) -> Tensor:
        r"""The exact variances of :math:`\bar q`."""
        second = self.base_distribution.variance + self.base_distribution.mean.square()
        return (
            averaged_over_orbits(self.action, second, signed=False) - self.mean.square()
        )

    @torch.no_grad()
    def mutual_information(self, num_samples: int = 1000) -> Estimate:
        r"""Estimate :math:`I(g; w) = \mathbb E_q[\log q(w) - \log \bar q(w)]`, the nats
        that symmetrising gains.

        It is 0 if the base is invariant, and :math:`\log|G|` if copies don't overlap.
        With a bound as estimator the expectation is a lower bound.

        >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
        >>> base = dist.Normal(torch.tensor([-50.0, 0.0, 50.0]), 1.0).to_event(1)
        >>> found = ps.Symmetrized(
        ...     base, ps.groups.Action(group, ["w"]), ps.ExactOrbit()
        ... ).mutual_information(100)
        >>> round(float(found.value), 3), found.bound  # log 3!
        (1.792, 'exact')
        """
        return self._mean_of(
            lambda w: self.base_distribution.log_prob(w) - self.log_prob(w), num_samples
        )

    @torch.no_grad()
    def entropy(self, num_samples: int = 1000) -> Estimate:  # type: ignore[override]
        r"""Estimate :math:`-\mathbb E_{\bar q} \log \bar q(w)`, the base's entropy plus
        the :meth:`mutual_information`.

        The base's entropy is exact where it is known. With a bound as estimator the
        expectation is a lower bound.
        """
        try:
            base_entropy = self.base_distribution.entropy()
        except NotImplementedError:
            return self._mean_of(lambda w: -self.log_prob(w), num_samples)
        information = self.mutual_information(num_samples)
        return information._replace(value=base_entropy + information.value)

    def _mean_of(
        self, integrand: Callable[[Tensor], Tensor], num_samples: int
    ) -> Estimate:
        count = arguments.whole("num_samples", num_samples, 2)
        sizes = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
        draw = self.base_distribution.sample
        with torch.no_grad():
            values = torch.cat([integrand(draw((size,))) for size in sizes])
        bound: Literal["lower", "exact"] = (
            "exact" if self.estimator.bound == "exact" else "lower"
        )
        return Estimate(values.mean(0), values.std(0) / math.sqrt(count), bound)


@register_kl(Symmetrized, dist.Independent)
def _kl_to_normal(q: Symmetrized, prior: dist.Independent) -> Tensor:
    r"""Estimate :math:`\mathrm{KL}(\bar q \| p) = H(\bar q, p) - H(q) - I(g; w)` to
    independent normals, from above in expectation. The cross entropy and, where known,
    the base's entropy are exact; one reparametrised draw estimates the mutual
    information."""
    normal = prior.base_dist
    if (
        not isinstance(normal, torch.distributions.Normal)
        or len(prior.event_shape) != 1
        or not q.has_rsample
    ):
        raise NotImplementedError
    square = q.variance + (q.mean - normal.loc).square()
    cross = (
        0.5 * square / normal.scale.square()
        + normal.scale.log()
        + 0.5 * math.log(2 * math.pi)
    ).sum(-1)
    w = q.base_distribution.rsample()
    try:
        return (
            cross
            - q.base_distribution.entropy()
            - (q.base_distribution.log_prob(w) - q.log_prob(w))
        )
    except NotImplementedError:
        return cross + q.log_prob(w)


def _same_memory(value: Tensor, draws: Tensor) -> bool:
    """Return whether values are draws, or a view of all of them in their order."""
    if value is draws:
        return True
    if value.numel() != draws.numel() or value.device != draws.device:
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    if not (value.is_contiguous() and draws.is_contiguous()):
        return False
    return value.data_ptr() == draws.data_ptr()


def version_of(value: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return 0 if value.is_inference() else value._version


def averaged_over_orbits(action: Action, values: Tensor, signed: bool) -> Tensor:
    """Average each entry over its orbit, ``batch_shape + (D,)``.

    :param signed: whether a flip changes the sign of a value; values that can be
        flipped then average to zero.
    :raises NotImplementedError: if the group permutes the entries of a simplex, whose
        coordinates it mixes.
    """
    if action.nonlinear_sites:
        raise NotImplementedError(
            f"the group mixes coordinates of {action.nonlinear_sites}: average draws "
            "of sample()"
        )
    of_either_sign = torch.cat([values, -values if signed else values], -1)
    orbit = _signed_orbits(action).to(values.device)
    size = torch.bincount(orbit, minlength=len(orbit)).to(values)
    total = torch.zeros_like(of_either_sign).index_add(-1, orbit, of_either_sign)
    return (total / size.clamp(min=1))[..., orbit[: values.shape[-1]]]


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cache outlives the mode in which it is filled
def _signed_orbits(action: Action) -> Tensor:
    """Label the orbit of each entry, and of each entry negated, ``(2 D,)``, by its
    smallest number.

    Each random element spreads the smaller of two labels, so that the entries that have
    the smallest double; two entries of one orbit keep different labels with a
    probability of about ``2**-ORBIT_ROUNDS``.
    """
    group = action.group.finite
    dim = action.dim
    numbered = torch.arange(1.0, dim + 1, dtype=torch.float64, device="cpu")
    orbit = torch.arange(2 * dim, device="cpu")
    with forked():
        for _ in range(ORBIT_ROUNDS):
            moved = action(numbered, group.sample(device="cpu"))
            source = moved.abs().long() - 1
            flipped = moved < 0
            orbit = torch.minimum(
                orbit,
                orbit[torch.cat([source + dim * flipped, source + dim * ~flipped])],
            )
    return orbit
