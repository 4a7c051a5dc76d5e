r"""A Gaussian guide in which the weights of each unit are correlated, and units are independent.

.. math:: q(w) = \prod_{\text{units } u} \mathcal N(w_u \mid m_u, L_u L_u^\top)
          \prod_{\text{other weights } a} \mathcal N(w_a \mid m_a, s_a^2)

``w_u`` are the weights of one unit: its row of incoming weights, its bias, its outgoing weights. *A weight between two
hidden layers* lies in a unit of each: it goes to the unit along the first axis of its site, which it enters, as the
data correlate most what one pre-activation is made of. Of units inside others it goes to the innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import UnitBlocks
from pyro_symmetric.distributions.matching import sets_of
from pyro_symmetric.groups import Action, Group, group_of
from pyro_symmetric.groups.places import rows
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.gaussian import AutoGaussian, moments_of, plain
from pyro_symmetric.guides.layout import GuideLayout, LayoutModel, layout_of
from pyro_symmetric.guides.starts import InitLocFn, Start


class AutoUnitBlocks(WeightsGuide):
    """A Gaussian guide with a full covariance within each unit; what belongs to no unit is independent.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> guide = ps.AutoSymmetrized(model, group, base=ps.AutoUnitBlocks).setup()
    >>> type(guide.base).__name__
    'AutoUnitBlocks'

    Between mean-field and ``AutoMultivariateNormal``, the two ends in cost and in reach: block of one weight, and one
    block of all. Symmetrised, its units are matched by their exact densities.

    :param model: the Pyro model.
    :param group: whose units have blocks, or a symmetry. Sites that are constrained together and permuted inside (a
        simplex) have no weights of single units; they are independent.
    :param init_loc_fn: where the means start; by default where :class:`AutoSymmetrized` starts.
    :param init_scale: the deviation of each weight at the start, without correlations.
    """

    loc: Any
    scale: Any
    rest: Any  # the places of the weights that belong to no unit

    def __init__(
        self, model: Any, group: Group | Symmetry, *, init_loc_fn: InitLocFn | None = None, init_scale: float = 0.1
    ):
        self.group = group_of(group).finite
        self._init_scale = arguments.positive("init_scale", init_scale)
        super().__init__(model, init_loc_fn or Start(model, tuple(self.group.required_sites)))

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        positions = unit_positions(layout_of(self).action(self.group))
        self._adopt(self)
        self.num_sets, free = len(positions), torch.ones(self.latent_dim, dtype=torch.bool, device="cpu")
        self.loc = nn.Parameter(self._init_loc())
        self.scale = PyroParam(torch.full_like(self.loc, self._init_scale), constraints.softplus_positive)
        for number, where in enumerate(positions.values()):
            free[where] = False
            self.register_buffer(f"positions_{number}", where.to(self.loc.device), persistent=False)
            eye = torch.eye(where.shape[1], dtype=self.loc.dtype, device=self.loc.device)
            start = eye.expand(len(where), *eye.shape).contiguous()
            setattr(self, f"scale_tril_{number}", PyroParam(start, constraints.unit_lower_cholesky))
        self.register_buffer("rest", free.nonzero()[:, 0].to(self.loc.device), persistent=False)

    @property
    def positions(self) -> tuple[Tensor, ...]:
        """The places of the weights of each set of units in the flat vector, ``(units, weights of a unit)``."""
        return tuple(getattr(self, f"positions_{number}") for number in range(self.num_sets))

    @property
    def scale_trils(self) -> tuple[Tensor, ...]:
        """Cholesky factors of the units' covariances, ``(units, d, d)`` for each set."""
        return tuple(
            getattr(self, f"scale_tril_{number}") * self.scale[where].unsqueeze(-1)
            for number, where in enumerate(self.positions)
        )

    def get_posterior(self, *args: Any, **kwargs: Any) -> UnitBlocks:
        """The Gaussian over flat unconstrained vectors."""
        return UnitBlocks(self.loc, self.positions, self.scale_trils, self.scale[self.rest])

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.loc, self.get_posterior().stddev

    @classmethod
    def _of_moments(
        cls, layout: GuideLayout, group: Group, loc: Tensor, scale_trils: Sequence[Tensor], scale: Tensor
    ) -> AutoUnitBlocks:
        """A guide of its own with given moments, set up.

        :param scale: deviations of the weights that belong to no unit, ``(D,)``; the others don't count.
        """
        model = LayoutModel(layout, loc)
        guide = cls(model, group, init_loc_fn=model.init_loc_fn).setup()
        with torch.no_grad():
            guide.loc, diagonal = nn.Parameter(loc.clone()), scale.clone()
            for number, (where, tril) in enumerate(zip(guide.positions, scale_trils, strict=True)):
                diagonal[where] = tril.diagonal(dim1=-2, dim2=-1)
                setattr(guide, f"scale_tril_{number}", tril / diagonal[where].unsqueeze(-1))
            guide.scale = diagonal
        return guide


@torch.no_grad()
def gaussian_copy(guide: AutoGuide) -> AutoGaussian | AutoUnitBlocks:
    """A guide with copies of the moments of a set-up Gaussian guide; of a symmetrised one, of its base.

    :raises TypeError: for a guide that isn't Gaussian.
    """
    inner = plain(guide)
    if isinstance(inner, AutoUnitBlocks):
        trils = [tril.detach() for tril in inner.scale_trils]
        return AutoUnitBlocks._of_moments(layout_of(guide), inner.group, inner.loc.detach(), trils, inner.scale)
    return AutoGaussian(layout_of(guide), **moments_of(guide))


def unit_positions(action: Action) -> dict[str, Tensor]:
    """Set of units -> the places of each unit's weights in the flat vector, ``(units, d)``; no place is in two."""
    numbers = action.layout.unflatten(torch.arange(action.dim, device="cpu"))
    linear = {site: where for site, where in numbers.items() if site not in action.nonlinear_sites}
    view = action.group.viewed(linear)
    sets = sets_of(action.group, frozenset(view))
    axes = [(name, axis) for name, own in sets.items() for axis in own.lone + own.shared]
    found: dict[str, list[Tensor]] = {name: [] for name in sets}
    free = torch.ones(action.dim, dtype=torch.bool, device="cpu")
    for name, axis in sorted(axes, key=lambda pair: (pair[1].dim, -len(action.group.ancestors(pair[0])))):
        places = rows(view[axis.site], axis, view[axis.site].dim())
        places = places[:, free[places].all(0)]
        free[places] = False
        found[name].append(places)
    joined = {name: torch.cat(parts, -1) for name, parts in found.items() if parts}
    return {name: places for name, places in joined.items() if places.numel()}
