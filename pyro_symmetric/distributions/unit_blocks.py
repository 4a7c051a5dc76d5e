"""Normals with a full covariance within each unit and none between units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import (
    Independent,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    constraints,
)


class UnitBlocks(TorchDistribution):
    r"""A normal over vectors of event shape ``(D,)``, independent between blocks of
    positions.

    .. math:: q(w) = \prod_{\text{units}} \mathcal N(w_u \mid m_u, L_u L_u^\top)
       \;\prod_{\text{rest}} \mathcal N(w_r \mid m_r, s_r^2)

    The number of parameters is linear in the number of units. As under a mean-field
    normal, the log-density of one unit's weights under another's block is known
    exactly.

    :param loc: means, ``(D,)``.
    :param positions: for each set of units a LongTensor ``(n, d)``: row ``u`` lists the
        positions of unit ``u`` in the vector, column ``a`` holds corresponding weights.
        No position is listed twice.
    :param scale_trils: for each set the Cholesky factors of the units' covariances,
        ``(n, d, d)``.
    :param scale: standard deviations, ``(D,)``, of the positions that aren't listed;
        one by default.
    :ivar rest: the positions that aren't listed, LongTensor.
    """

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (torch's own declaration)
    support = constraints.independent(constraints.real, 1)
    has_rsample = True

    def __init__(
        self,
        loc: Tensor,
        positions: Sequence[Tensor],
        scale_trils: Sequence[Tensor],
        scale: Tensor | None = None,
        batch_shape: Sequence[int] = (),
        validate_args: bool | None = None,
    ):
        self.loc = loc
        self.scale = torch.ones_like(loc) if scale is None else scale
        self.positions = tuple(index.to(loc.device) for index in positions)
        self.scale_trils = tuple(scale_trils)
        self._sets = tuple(zip(self.positions, self.scale_trils, strict=True))
        listed = torch.cat(
            [
                loc.new_zeros(0, dtype=torch.long),
                *(index.reshape(-1) for index in self.positions),
            ]
        )
        self._require_fitting(listed)
        unlisted = torch.ones(len(loc), dtype=torch.bool, device=loc.device)
        unlisted[listed] = False
        self.rest = unlisted.nonzero()[:, 0]
        # The index of each position in the concatenation of all blocks and the rest.
        self._order = torch.cat([listed, self.rest]).argsort()
        batch_shape = torch.Size(batch_shape)
        super().__init__(batch_shape, loc.shape, validate_args=validate_args)

    def _require_fitting(self, listed: Tensor) -> None:
        fitting = self.scale.shape == self.loc.shape
        shapes = []
        for index, tril in self._sets:
            shapes.append((tuple(index.shape), tuple(tril.shape)))
            fitting = fitting and tril.shape == (*index.shape, index.shape[-1])
        distinct = len(listed.unique()) == len(listed)
        negative = bool((listed < 0).any())
        if not fitting or not distinct or negative:
            raise ValueError(
                "positions are (n, d), no two alike, scale_trils (n, d, d), and scale "
                f"has a number for every position; found {shapes} "
                f"and {tuple(self.scale.shape)}"
            )

    def expand(
        self, batch_shape: Sequence[int], _instance: UnitBlocks | None = None
    ) -> UnitBlocks:
        new = self._get_checked_instance(UnitBlocks, _instance)
        vars(new).update(vars(self))
        super(UnitBlocks, new).__init__(
            torch.Size(batch_shape), self.event_shape, validate_args=False
        )
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        shape = torch.broadcast_shapes(value.shape[:-1], self.batch_shape)
        centred = (value - self.loc).reshape(-1, len(self.loc))
        scale = self.scale[self.rest]
        white = centred[:, self.rest] / scale
        total = -0.5 * white.square().sum(-1)
        total = total - scale.log().sum()
        for index, tril in self._sets:
            # Draws are columns of one triangular system a unit: factors aren't copied
            # for the batch.
            columns = centred[:, index].permute(1, 2, 0)
            white = torch.linalg.solve_triangular(tril, columns, upper=False)
            total = total - 0.5 * white.square().sum((0, 1))
            total = total - tril.diagonal(dim1=-2, dim2=-1).log().sum()
        total = total - 0.5 * len(self.loc) * math.log(2 * math.pi)
        return total.reshape(value.shape[:-1]).expand(shape)

    def rsample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        """Draw with gradient, ``sample_shape + batch_shape + (D,)``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        count = shape.numel()
        parts = []
        for index, tril in self._sets:
            noise = torch.randn(
                *index.shape, count, dtype=tril.dtype, device=tril.device
            )
            parts.append((tril @ noise).flatten(0, 1).mT)
        noise = torch.randn(
            count, len(self.rest), dtype=self.loc.dtype, device=self.loc.device
        )
        parts.append(noise * self.scale[self.rest])
        drawn = torch.cat(parts, -1)[:, self._order]
        return (self.loc + drawn).reshape(*shape, len(self.loc))

    @property
    def mean(self) -> Tensor:
        return self.loc.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        parts = [tril.square().sum(-1).reshape(-1) for tril in self.scale_trils]
        parts.append(self.scale[self.rest].square())
        variances = torch.cat(parts)[self._order]
        return variances.expand(self.batch_shape + self.event_shape)

    def entropy(self) -> Tensor:
        parts = []
        for tril in self.scale_trils:
            parts.append(tril.diagonal(dim1=-2, dim2=-1).reshape(-1))
        parts.append(self.scale[self.rest])
        log_volume = torch.cat(parts).log().sum()
        of_unit_normal = 0.5 * len(self.loc) * (1 + math.log(2 * math.pi))
        return (log_volume + of_unit_normal).expand(self.batch_shape)

    def precisions(self, units: Tensor) -> Tensor | None:
        """Return the precision matrices of one set's blocks, in float64, in the order
        of ``units``, ``(n, d)`` -> ``(n, d, d)``; None unless the rows of ``units`` are
        these blocks, with the positions in any order."""
        wanted = units.sort(-1)
        for index, tril in self._sets:
            if index.shape != units.shape:
                continue
            listed = index.sort(-1)
            if torch.equal(listed.values, wanted.values):
                ranks = wanted.indices.argsort(-1)
                order = listed.indices.gather(-1, ranks)
                matrices = torch.cholesky_inverse(tril.double())
                rows = matrices.take_along_dim(order.unsqueeze(-1), -2)
                return rows.take_along_dim(order.unsqueeze(-2), -1)
        return None


def in_blocks(normal: Any) -> UnitBlocks:
    """Return a normal over vectors as unit blocks: none of a mean-field one, one block
    of a correlated one.

    :raises TypeError: if it isn't Gaussian.
    """
    if isinstance(normal, UnitBlocks):
        return normal
    if isinstance(normal, MultivariateNormal | LowRankMultivariateNormal):
        loc = normal.loc
        block = torch.arange(len(loc), device=loc.device)[None]
        return UnitBlocks(loc, [block], [normal.scale_tril[None]])
    if isinstance(normal, Independent) and isinstance(normal.base_dist, Normal):
        base = normal.base_dist
        return UnitBlocks(base.loc, [], [], base.scale)
    raise TypeError(f"{normal} isn't Gaussian; take AutoNormal, AutoGaussian or alike")
