"""The symmetrised log-density bracketed by the Bethe permanent: deterministic, at any width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.distributions import Distribution

from pyro_symmetric import arguments
from pyro_symmetric.distributions.modes import Modes
from pyro_symmetric.distributions.normals import is_mean_field, normals_of, sites_of
from pyro_symmetric.distributions.orbit import Action, Bound
from pyro_symmetric.distributions.permanent import bethe_permanent
from pyro_symmetric.distributions.unit_sets import unit_sets
from pyro_symmetric.distributions.units import UnitDensities, independent_factors, pair_log_densities
from pyro_symmetric.symmetry.permutation import PermutationGroup


@dataclass(frozen=True)
class BetheBound:
    r"""An upper bound without chance: the permanent over a layer's units is at most its Bethe approximation, corrected.

    .. math:: \log \bar q(w) = \log q(w) + \sum_f \Big[ \log \operatorname{perm}(e^{A^f}) - \operatorname{tr} A^f
       - \log n_f! \Big], \qquad \log \operatorname{bethe} \le \log \operatorname{perm} \le \log \operatorname{bethe}
       + \tfrac{n_f}{2} \log 2 .

    It holds for every ``w``, not only on average over draws of ``q``. Converged, it leaves out at most ``0.35 n`` nats,
    which it does leave out where units are far apart: :class:`~pyro_symmetric.distributions.SinkhornImportance` is
    tighter on average. Use this one where chance is unwelcome, and its :meth:`bracket` to check another estimate.

    For mean-field bases and factors of which no two share a site (one hidden layer). Cost: three products of ``n × n``
    by ``n × (weights of a unit)`` matrices and up to ``iterations`` rounds of ``n × n`` messages, in float64; memory
    ``samples · n²``.

    References: Anari & Rezaei 2019, "A Tight Analysis of Bethe Approximation for Permanent" (arXiv 1811.02933), for the
    upper side, which is stated for the Bethe permanent, not for the value at Sinkhorn's scaling; Gurvits 2011 (arXiv
    1106.2844) for the lower side; Vontobel 2013 (arXiv 1107.4196).

    :param iterations: most rounds of belief propagation. Stopping early keeps the bound valid: what the maximum can lie
        above the value reached is added.
    """

    iterations: int = 300
    bound: ClassVar[Bound] = "upper"

    def __post_init__(self) -> None:
        arguments.whole("iterations", self.iterations, 1)

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        """The upper bound; differentiable by the envelope theorem (the marginals are held fixed)."""
        return self._sides(base, action, value)[1]

    def bracket(self, base: Distribution, action: Action, value: Tensor) -> tuple[Tensor, Tensor]:
        r"""A lower and an upper bound of :math:`\log \bar q`, each ``batch_shape``."""
        return self._sides(base, action, value)

    def _sides(self, base: Distribution, action: Action, value: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(base, Modes):  # a bound that holds for every w, so for each component at any draw
            sides = [self._sides(component, action, value) for component in base.components]
            return base.mixed([lower for lower, _ in sides]), base.mixed([upper for _, upper in sides])
        group = self._checked(base, action)
        own = base.log_prob(value)
        flat = value.expand(*own.shape, value.shape[-1]).reshape(-1, value.shape[-1])
        units = UnitDensities(
            unit_sets(group), normals_of(base, action, own.shape).double(), sites_of(action, flat.double())
        )
        lower = upper = own.reshape(-1).double() - group.log_order()
        for name in units.factors:
            pairs = pair_log_densities(units, name)
            bethe = bethe_permanent(pairs.detach(), self.iterations)
            linear = (bethe.marginals * pairs).sum((-2, -1))
            change = linear - linear.detach() - pairs.diagonal(dim1=-2, dim2=-1).sum(-1)
            lower, upper = lower + bethe.lower + change, upper + bethe.upper + change
        return tuple(side.to(own.dtype).reshape(own.shape) for side in (lower, upper))  # type: ignore[return-value]

    def _checked(self, base: Distribution, action: Action) -> PermutationGroup:
        group = action.group
        if not isinstance(group, PermutationGroup) or not is_mean_field(base, action):
            raise ValueError(
                f"BetheBound needs a mean-field normal base whose coordinates the group permutes, without signs; found "
                f"{type(base).__name__} and {type(action).__name__}; use SinkhornImportance(16)"
            )
        moving = [name for name, n in group.factors.items() if n > 1]
        if set(independent_factors(group)) != set(moving):
            raise ValueError(
                f"BetheBound needs factors of which no two share a site, such as one hidden layer; the group has "
                f"{moving}, of which some do; use SinkhornImportance(16)"
            )
        return group
