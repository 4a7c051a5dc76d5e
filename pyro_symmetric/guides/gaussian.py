r"""Gaussian guides, all normals in blocks: no block is mean-field, one of all weights is full rank.

.. math:: q(w) = \prod_{\text{blocks } u} \mathcal N(w_u \mid m_u, L_u L_u^\top)
          \prod_{\text{other weights } a} \mathcal N(w_a \mid m_a, s_a^2)

The blocks of :class:`AutoUnitBlocks` are units: a unit's row of incoming weights, its bias, its outgoing weights. *A
weight between two hidden layers* lies in a unit of each: it goes to the unit along the first axis of its site, which it
enters, as the data correlate most what one pre-activation is made of. Of units inside others it goes to the innermost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoContinuous, AutoDelta, AutoGuide, AutoNormal
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.alignment.moments import to_gaussian
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import UnitBlocks
from pyro_symmetric.distributions.matching import unit_sets
from pyro_symmetric.groups import Action, Group, group_of
from pyro_symmetric.groups.units import rows
from pyro_symmetric.guides.base import InitLocFn, Start, WeightsGuide, action_on, layout_of
from pyro_symmetric.weights import Weights

NO_COINCIDENCE = 8  # so many draws agree only if all do


class AutoGaussian(WeightsGuide):
    """A Gaussian guide that begins at a given normal over the concatenated unconstrained sites.

    It is set up from the start, needs no model to draw from, and can be trained further with stock SVI: a mean-field
    one, each block, or the whole covariance. Pushing forward, interpolating and loading make such guides.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> fitted = pyro.infer.autoguide.AutoDiagonalNormal(model)
    >>> draw = fitted()  # sets it up
    >>> guide = ps.AutoGaussian(fitted, dist.Normal(torch.zeros(3), 0.5).to_event(1))
    >>> guide.sample_posterior((20,))["w"].shape
    torch.Size([20, 3])

    :param guide: any set-up guide of the model, whose sites these are.
    :param normal: independent (``dist.Normal(loc, scale).to_event(1)``), in :class:`UnitBlocks`, or with a whole
        covariance.
    :raises TypeError: if that is no normal.
    """

    loc: Any
    scale: Any

    def __init__(self, guide: AutoGuide, normal: Any):
        super().__init__(_no_model)
        self._adopt(guide)
        normal = in_blocks(normal)
        moments = torch.stack([normal.loc, normal.stddev])
        if moments.shape != (2, self.latent_dim) or not bool(moments.isfinite().all()):
            raise ValueError(f"normal needs {self.latent_dim} finite means and deviations; found {normal.loc.shape[0]}")
        self._hold(normal)

    @torch.no_grad()
    def _hold(self, normal: UnitBlocks) -> None:
        """Make parameters of a normal: the factors of blocks have their diagonals in ``scale``."""
        diagonal, self.num_sets = normal.stddev.clone(), len(normal.positions)
        for number, (where, tril) in enumerate(zip(normal.positions, normal.scale_trils, strict=True)):
            diagonal[where] = tril.diagonal(dim1=-2, dim2=-1)
            unit = PyroParam(tril / diagonal[where].unsqueeze(-1), constraints.unit_lower_cholesky)
            setattr(self, f"scale_tril_{number}", unit)
            self.register_buffer(f"positions_{number}", where)
        self.loc, self.scale = nn.Parameter(normal.loc.clone()), PyroParam(diagonal, constraints.softplus_positive)

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """The Gaussian over flat unconstrained vectors."""
        loc, scale = self.loc, self.scale
        if not self.num_sets:
            return dist.Normal(loc, scale).to_event(1)
        positions = [getattr(self, f"positions_{number}") for number in range(self.num_sets)]
        units = [getattr(self, f"scale_tril_{number}") for number in range(self.num_sets)]
        trils = [unit * scale[where].unsqueeze(-1) for unit, where in zip(units, positions, strict=True)]
        return UnitBlocks(loc, positions, trils, scale)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.loc, self.get_posterior().stddev


class AutoUnitBlocks(AutoGaussian):
    """A Gaussian guide with a full covariance within each unit; what belongs to no unit is independent.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> guide = ps.AutoSymmetrized(model, group, base=ps.AutoUnitBlocks).setup()
    >>> type(guide.base).__name__
    'AutoUnitBlocks'

    Between mean-field and ``AutoMultivariateNormal``, the two ends in cost and in reach. Symmetrised, its units are
    matched by their exact densities.

    :param model: the Pyro model.
    :param group: whose units have blocks, or a symmetry. Sites that are constrained together and permuted inside (a
        simplex) have no weights of single units; they are independent.
    :param init_loc_fn: where the means start; by default where :class:`AutoSymmetrized` starts.
    :param init_scale: the deviation of each weight at the start, without correlations.
    """

    def __init__(
        self, model: Any, group: Group | Symmetry, *, init_loc_fn: InitLocFn | None = None, init_scale: float = 0.1
    ):
        self.group = group_of(group).finite
        self._init_scale = arguments.positive("init_scale", init_scale)
        WeightsGuide.__init__(self, model, init_loc_fn or Start(model, self.group.required_sites))

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self._adopt(self)
        loc, positions = self._init_loc(), unit_positions(action_on(self, self.group))
        trils = [loc.new_full(where.shape, self._init_scale).diag_embed() for where in positions]
        self._hold(UnitBlocks(loc, positions, trils, torch.full_like(loc, self._init_scale)))


def unit_positions(action: Action) -> list[Tensor]:
    """The places of each unit's weights in the flat vector, ``(units, d)`` for each set; no place is in two."""
    numbers = action.layout.unflatten(torch.arange(action.dim, device="cpu"))
    view = action.group.viewed({s: where for s, where in numbers.items() if s not in action.nonlinear_sites})
    sets = unit_sets(action.group, view)
    axes = [(name, axis) for name, own in sets.items() for axis in own.exclusive + own.shared]
    found: dict[str, list[Tensor]] = {name: [] for name in sets}
    free = torch.ones(action.dim, dtype=torch.bool, device="cpu")
    for name, axis in sorted(axes, key=lambda pair: (pair[1].dim, -len(action.group.ancestors(pair[0])))):
        places = rows(view[axis.site], axis, view[axis.site].dim())
        places = places[:, free[places].all(0)]
        free[places] = False
        found[name].append(places)
    joined = [torch.cat(parts, -1) for parts in found.values() if parts]
    return [places for places in joined if places.numel()]


# any guide ------------------------------------------------------------------------------------------------------------


def plain_posterior(guide: AutoGuide) -> Any:
    """The distribution of a set-up guide over flat unconstrained vectors, before any symmetrisation.

    :raises TypeError: for a guide that is neither continuous nor ``AutoNormal``.
    """
    layout, guide = layout_of(guide), getattr(guide, "plain", guide)
    if isinstance(guide, AutoNormal):
        moments = to_gaussian(guide)
        return dist.Normal(layout.flatten(moments.loc), layout.flatten(moments.scale)).to_event(1)
    if isinstance(guide, AutoContinuous):
        return guide.get_posterior()
    raise TypeError(f"the density of {type(guide).__name__} isn't known; pass an AutoContinuous or AutoNormal")


def gaussian_copy(guide: AutoGuide) -> AutoGaussian:
    """A guide with copies of the moments of a set-up Gaussian guide; of a symmetrised one, of its base.

    :raises TypeError: for a guide that isn't Gaussian.
    """
    return AutoGaussian(guide, plain_posterior(guide))


@torch.no_grad()
def in_blocks(normal: Any) -> UnitBlocks:
    """A normal over vectors as one in blocks: none, its own, or one of all; so also that of low rank.

    :raises TypeError: for what is no normal.
    """
    if isinstance(normal, UnitBlocks):
        return normal
    if isinstance(normal, dist.MultivariateNormal | dist.LowRankMultivariateNormal):
        whole = torch.arange(len(normal.loc), device=normal.loc.device)
        return UnitBlocks(normal.loc, [whole[None]], [normal.scale_tril[None]])
    if isinstance(normal, dist.Independent) and isinstance(normal.base_dist, dist.Normal):
        return UnitBlocks(normal.base_dist.loc, [], [], normal.base_dist.scale)
    raise TypeError(f"{normal} isn't Gaussian; take AutoNormal, AutoGaussian or alike")


def require_spread(distribution: Any, guide: Any) -> None:
    """:raises TypeError: if all draws are alike in some direction: a point mass has no density."""
    with torch.no_grad(), forked():
        draws = distribution.sample((NO_COINCIDENCE,))
    if still := int((draws == draws[0]).all(0).sum()):
        raise TypeError(
            f"{type(guide).__name__} is a point mass in {still} of {draws.shape[-1]} directions, and has no density. "
            "Take a guide that spreads; of an AutoLaplaceApproximation that is guide.laplace_approximation(*args)"
        )


def sample_posterior(guide: AutoGuide, sample_shape: Sequence[int] = ()) -> Weights:
    """Draws of the weights of any automatic guide, stock ones included, without data: ``sample_shape + site_shape``.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = pyro.infer.autoguide.AutoNormal(model)
    >>> draw = guide()  # sets it up
    >>> ps.guides.sample_posterior(guide, (20,))["w"].shape
    torch.Size([20, 3])

    :raises TypeError: for a guide that is neither continuous nor ``AutoNormal`` nor ``AutoDelta``.
    """
    shape, layout = arguments.shape("sample_shape", sample_shape), layout_of(guide)
    with torch.no_grad():
        if isinstance(guide, AutoDelta):
            return {name: value.expand(*shape, *value.shape) for name, value in guide.median().items()}
        return layout.constrain(plain_posterior(guide).sample(shape))


def _no_model() -> None:
    """The model of guides that were given their moments."""
