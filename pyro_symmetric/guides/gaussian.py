r"""Gaussian guides, all of them normal in blocks: without blocks mean-field, with one
block of full rank.

.. math:: q(w) = \prod_{\text{blocks } u} \mathcal N(w_u \mid m_u, L_u L_u^\top)
          \prod_{\text{other weights } a} \mathcal N(w_a \mid m_a, s_a^2)

The blocks of :class:`AutoUnitBlocks` are units: a unit's incoming weights, its bias,
its outgoing weights. *A weight between two hidden layers* belongs to the unit that it
enters, along the first axis of its site: the data correlate most the terms of one
pre-activation. With units inside others it belongs to the innermost.
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
from pyro_symmetric.distributions.unit_blocks import in_blocks
from pyro_symmetric.distributions.unit_densities import unit_sets
from pyro_symmetric.groups import Action, Group, group_of
from pyro_symmetric.groups.axes import rows
from pyro_symmetric.guides.base import (
    InitLocFn,
    Start,
    WeightsGuide,
    action_on,
    layout_of,
)
from pyro_symmetric.posterior.predict import FROM_ABOVE
from pyro_symmetric.weights import Weights, drop_names

NUM_EQUAL = 8  # equal draws reveal a point mass


class AutoGaussian(WeightsGuide):
    """A Gaussian guide with given moments over the concatenated unconstrained sites.

    It is set up at once, draws without a model, and can be trained further by stock
    SVI, with the covariance's block structure kept. Push-forwards, barycentres and
    loaded guides are of this class.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> fitted = pyro.infer.autoguide.AutoDiagonalNormal(model)
    >>> draw = fitted()  # sets it up
    >>> guide = ps.AutoGaussian(fitted, dist.Normal(torch.zeros(3), 0.5).to_event(1))
    >>> guide.sample_posterior((20,))["w"].shape
    torch.Size([20, 3])

    :param guide: any set-up guide of the model, for the sites.
    :param normal: independent (``dist.Normal(loc, scale).to_event(1)``),
        :class:`UnitBlocks`, or of full or low rank.
    :raises TypeError: if ``normal`` isn't Gaussian.
    """

    is_fresh = False
    loc: Any
    scale: Any

    def __init__(self, guide: AutoGuide, normal: Any):
        super().__init__(_no_model)
        self._adopt(guide)
        normal = in_blocks(normal)
        moments = torch.stack([normal.loc, normal.stddev])
        if moments.shape != (2, self.latent_dim) or not moments.isfinite().all():
            raise ValueError(
                f"normal needs {self.latent_dim} finite means and deviations; found "
                f"{normal.loc.shape[0]}"
            )
        self._hold(normal)

    @torch.no_grad()
    def _hold(self, normal: UnitBlocks) -> None:
        """Make a normal's moments parameters; ``scale`` holds the diagonals of the
        blocks' Cholesky factors.
        """
        scale = normal.stddev.clone()
        self.num_sets = len(normal.positions)
        for number, (positions, tril) in enumerate(
            zip(normal.positions, normal.scale_trils, strict=True)
        ):
            scale[positions] = tril.diagonal(dim1=-2, dim2=-1)
            unit_tril = PyroParam(
                tril / scale[positions].unsqueeze(-1), constraints.unit_lower_cholesky
            )
            setattr(self, f"scale_tril_{number}", unit_tril)
            self.register_buffer(f"positions_{number}", positions)
        self.loc = nn.Parameter(normal.loc.clone())
        self.scale = PyroParam(scale, constraints.softplus_positive)

    def get_posterior(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Gaussian over flat unconstrained vectors."""
        loc = self.loc
        scale = self.scale
        if not self.num_sets:
            return dist.Normal(loc, scale).to_event(1)
        positions = [
            getattr(self, f"positions_{number}") for number in range(self.num_sets)
        ]
        unit_trils = [
            getattr(self, f"scale_tril_{number}") for number in range(self.num_sets)
        ]
        trils = [
            tril * scale[index].unsqueeze(-1)
            for tril, index in zip(unit_trils, positions, strict=True)
        ]
        return UnitBlocks(loc, positions, trils, scale)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.loc, self.get_posterior().stddev


class AutoUnitBlocks(AutoGaussian):
    """A Gaussian guide with a full covariance within each unit; weights of no unit are
    independent.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> guide = ps.AutoSymmetrized(model, group, base=ps.AutoUnitBlocks).setup()
    >>> type(guide.base).__name__
    'AutoUnitBlocks'

    In cost and in flexibility it lies between mean-field and
    ``AutoMultivariateNormal``. Symmetrised, its units are matched by their exact
    densities.

    :param model: the Pyro model.
    :param symmetry: the symmetry, or group, whose units are the blocks. Entries of a
        simplex are independent: its unconstrained coordinates belong to no single unit.
    :param init_loc_fn: the initial means; by default those of :class:`AutoSymmetrized`.
    :param init_scale: the initial standard deviation of each weight; correlations start
        at zero.
    """

    is_fresh = True

    def __init__(
        self,
        model: Any,
        symmetry: Group | Symmetry,
        *,
        init_loc_fn: InitLocFn | None = None,
        init_scale: float = 0.1,
    ):
        self.group = group_of(symmetry).finite
        self._init_scale = arguments.positive("init_scale", init_scale)
        WeightsGuide.__init__(
            self, model, init_loc_fn or Start(model, self.group.required_sites)
        )

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self._adopt(self)
        loc = self._init_loc()
        positions = unit_positions(action_on(self, self.group))
        trils = [
            loc.new_full(index.shape, self._init_scale).diag_embed()
            for index in positions
        ]
        self._hold(
            UnitBlocks(loc, positions, trils, torch.full_like(loc, self._init_scale))
        )


def unit_positions(action: Action) -> list[Tensor]:
    """Return the positions of every unit's weights in the flat vector, ``(units, d)`` a
    set; units share none.
    """
    numbers = action.layout.unflatten(torch.arange(action.dim, device="cpu"))
    view = action.group.viewed(drop_names(numbers, action.nonlinear_sites))
    sets = unit_sets(action.group, tuple(view))
    axes = [
        (name, axis)
        for name, unit_set in sets.items()
        for axis in unit_set.exclusive + unit_set.shared
    ]
    parts: dict[str, list[Tensor]] = {name: [] for name in sets}
    free = torch.ones(action.dim, dtype=torch.bool, device="cpu")
    for name, axis in sorted(
        axes, key=lambda pair: (pair[1].dim, -len(action.group.ancestors(pair[0])))
    ):
        positions = rows(view[axis.site], axis, view[axis.site].dim())
        positions = positions[:, free[positions].all(0)]
        free[positions] = False
        parts[name].append(positions)
    joined = [torch.cat(pieces, -1) for pieces in parts.values() if pieces]
    return [positions for positions in joined if positions.numel()]


# any guide ----------------------------------------------------------------------------


def plain_posterior(guide: AutoGuide) -> Any:
    """Return the distribution of a set-up guide over flat unconstrained vectors, before
    any symmetrisation.

    :raises TypeError: for a guide that is neither continuous nor ``AutoNormal``.
    """
    layout = layout_of(guide)
    if isinstance(guide, WeightsGuide):
        guide.read_store()
    guide = getattr(guide, "plain", guide)
    if isinstance(guide, AutoNormal):
        moments = to_gaussian(guide)
        return dist.Normal(
            layout.flatten(moments.loc), layout.flatten(moments.scale)
        ).to_event(1)
    if isinstance(guide, AutoContinuous):
        return guide.get_posterior()
    raise TypeError(
        f"the density of {type(guide).__name__} isn't known; pass an AutoContinuous or "
        "AutoNormal"
    )


def require_spread(distribution: Any, guide: Any) -> None:
    """Raise ``TypeError`` if all draws agree in some direction: a point mass has no
    density.
    """
    with torch.no_grad(), forked():
        draws = distribution.sample((NUM_EQUAL,))
    if still := int((draws == draws[0]).all(0).sum()):
        raise TypeError(
            f"{type(guide).__name__} is a point mass in {still} of {draws.shape[-1]} "
            "directions, and has no density. "
            "Take a guide that spreads; of an AutoLaplaceApproximation that is "
            "guide.laplace_approximation(*args)"
        )


def sample_posterior(guide: AutoGuide, sample_shape: Sequence[int] = ()) -> Weights:
    """Draw weights of any automatic guide, stock or ours, without data: ``sample_shape
    + site_shape``.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = pyro.infer.autoguide.AutoNormal(model)
    >>> draw = guide()  # sets it up
    >>> ps.guides.sample_posterior(guide, (20,))["w"].shape
    torch.Size([20, 3])

    :raises TypeError: for a guide that is neither continuous nor ``AutoNormal`` nor
        ``AutoDelta``.
    """
    shape = arguments.shape("sample_shape", sample_shape)
    layout = layout_of(guide)
    if isinstance(guide, WeightsGuide):
        return guide.sample_posterior(shape)
    with torch.no_grad():
        if isinstance(guide, AutoDelta):
            return {
                name: value.expand(*shape, *value.shape)
                for name, value in guide.median().items()
            }
        return layout.constrain(plain_posterior(guide).sample(shape))


FROM_ABOVE.sample_guide = sample_posterior


def _no_model() -> None:
    """Do nothing: the model of guides with given moments."""
