"""Normals in place of a base density, exact or fitted: what units are matched by.

Estimators that match units need the log-density of one unit's weights under another's factors, or under what is known
of a place once others are filled. A mean-field base gives the first exactly, a correlated normal both. Any other base
(a flow), and sites whose constrained values are permuted (a simplex), give them approximately, by a normal fitted to
draws; proposals made from it are as valid, bounds included, only less sharp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import Distribution, Independent, LowRankMultivariateNormal, MultivariateNormal, Normal

from pyro_symmetric.distributions.unit_blocks import UnitBlocks
from pyro_symmetric.distributions.unit_sets import unit_sets
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.group import Group
from pyro_symmetric.weights import Weights

# Draws to which normals are fitted if a base can't tell its moments, or if constrained values are permuted: means and
# deviations alone, or covariances, too, which need more of them.
FIT_DRAWS, FIT_DRAWS_CORRELATED = 128, 1024
# Entries up to which covariances are factorised, or fitted; beyond, that would cost more than what they serve.
LARGEST_COVARIANCE, LARGEST_FITTED = 400, 100


@dataclass(frozen=True)
class Covariance:
    """A correlated normal over all entries of the sites, one after the other, in the group's view.

    :param loc: means, ``(V,)``.
    :param covariance: ``(V, V)``.
    """

    loc: Tensor
    covariance: Tensor

    @classmethod
    def of(cls, loc: Tensor, covariance: Tensor) -> Covariance:
        """A standard normal if these aren't finite: of a guide whose training broke down, whose density says so."""
        finite = loc.isfinite().all() & covariance.isfinite().all()
        standard = torch.eye(len(loc), dtype=covariance.dtype, device=covariance.device)
        return cls(torch.where(finite, loc, 0.0), torch.where(finite, covariance, standard))


@dataclass(frozen=True)
class Blocks:
    """Independent units of one set, each with a covariance of its own.

    :param loc: means, ``(n, d)``: each unit's entries along the set's axes, one after the other.
    :param precision: inverse covariances, ``(n, d, d)``.
    """

    loc: Tensor
    precision: Tensor


@dataclass(frozen=True)
class Normals:
    """Normal densities of weights.

    :param loc: site -> means, ``(N, *view_shape)``, or ``(1, *view_shape)`` if all draws share them.
    :param scale: site -> deviations, likewise.
    :param blocks: set of units -> its normals; only of sets whose units are correlated inside and independent of each
        other, and of all else.
    :param covariance: of all entries; None if units are independent, or too many, or if draws don't share it.
    """

    loc: Weights
    scale: Weights
    blocks: Mapping[str, Blocks] = field(default_factory=dict)
    covariance: Covariance | None = None


def mean_field_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    """Means and deviations of a base that is a product of normals; None for any other."""
    while isinstance(base, Independent):
        base = base.base_dist
    return (base.loc, base.scale) if isinstance(base, Normal) else None


def is_mean_field(base: Distribution, action: Action) -> bool:
    """True if weights are independent normals that elements move themselves, so that unit densities are exact."""
    return not action.nonlinear_sites and mean_field_moments(base) is not None


def mean_field_log_prob(base: Distribution, value: Tensor) -> Tensor:
    """The log-density of a product of normals, whose gradient is written out; of any other base its own."""
    moments = mean_field_moments(base)
    if moments is None or len(base.event_shape) != 1:
        return base.log_prob(value)
    return _NormalDensity.apply(value, *moments)


class _NormalDensity(torch.autograd.Function):
    """Summed over the last axis."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        away = (value - loc) / scale
        ctx.save_for_backward(away, scale)
        ctx.shapes = value.shape, loc.shape, scale.shape
        energy = torch.addcmul(scale.log(), away, away, value=0.5).sum(-1)
        return -0.5 * math.log(2 * math.pi) * away.shape[-1] - energy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        away, scale = ctx.saved_tensors
        share = grad.unsqueeze(-1) / scale
        pull = away * share
        found = -pull, pull, pull * away - share
        return tuple(part.sum_to_size(shape) for part, shape in zip(found, ctx.shapes, strict=True))


def sites_of(action: Action, flat: Tensor) -> Weights:
    """Flat vectors -> what the group moves, by site, in the group's view.

    Coordinates are as normal as the base, and so is what elements move entry by entry; of all other sites the
    constrained values are what is moved. Of a simplex, whose values are far from normal, their centred logarithms,
    which are normal for a logistic normal: all elements change volumes there alike.
    """
    layout = action.layout
    values = layout.unflatten(flat)
    for site in action.nonlinear_sites:
        values[site] = layout.transforms[site](values[site])
    for site in action.simplex_sites:
        logs = values[site].clamp(min=torch.finfo(flat.dtype).tiny).log()
        values[site] = logs - logs.mean(-1, keepdim=True)
    return action.group.viewed(values)


def normals_of(base: Distribution, action: Action, batch: Sequence[int]) -> Normals:
    """The base as normals of what the group moves.

    :param batch: batch shape of the draws; the moments are laid out for its ``N`` draws unless all share them.
    """
    moments = None if action.nonlinear_sites else mean_field_moments(base) or _known_moments(base)
    if moments is not None:
        loc, scale = (sites_of(action, laid_out(moment, base, batch)) for moment in moments)
        blocks = blocks_of(base, action, action.group.finite)
        exact = bool(blocks) and set(blocks) == set(unit_sets(action.group.finite, tuple(loc), _device_of(loc)))
        return Normals(loc, scale, blocks, None if exact else _covariance_of(base, action))
    return _fitted(base, action, batch)


@torch.no_grad()
def _fitted(base: Distribution, action: Action, batch: Sequence[int]) -> Normals:
    """Normals fitted to draws, with a covariance if these aren't for each draw another.

    Sample covariances are shrunk towards their diagonals, by the share of a parameter in the draws.
    """
    whole = not base.batch_shape and action.dim <= LARGEST_FITTED
    count = FIT_DRAWS_CORRELATED if whole else FIT_DRAWS
    draws = sites_of(action, laid_out(base.sample(torch.Size([count])), base, batch))
    tiny = torch.finfo(next(iter(draws.values())).dtype).tiny ** 0.25  # its inverse square is finite
    loc = {site: value.mean(0) for site, value in draws.items()}
    scale = {site: value.std(0).clamp(min=tiny) for site, value in draws.items()}
    if not whole:
        return Normals(loc, scale)
    flat = torch.cat([value.reshape(len(value), -1) for value in draws.values()], -1).double()
    found = flat.mT.cov()
    found = torch.lerp(found, found.diagonal().clamp(min=tiny**2).diag(), 1 / (1 + count / flat.shape[-1]))
    return Normals(loc, scale, covariance=Covariance.of(flat.mean(0), found))


@torch.no_grad()
def _covariance_of(base: Distribution, action: Action) -> Covariance | None:
    """The moments of a correlated normal that all draws share, in the order of entries; None if there is none."""
    if action.dim > LARGEST_COVARIANCE:
        return None
    if isinstance(base, UnitBlocks):
        loc, root, rest = base.loc, base.square_root, torch.zeros_like(base.loc)
    elif isinstance(base, MultivariateNormal):
        loc, root = _shared(base.loc, 1), _shared(base._unbroadcasted_scale_tril, 2)
        rest = torch.zeros_like(loc)
    elif isinstance(base, LowRankMultivariateNormal):
        loc, root = _shared(base.loc, 1), _shared(base._unbroadcasted_cov_factor, 2)
        rest = _shared(base._unbroadcasted_cov_diag, 1)
    else:
        return None
    if loc.dim() > 1 or root.dim() > 2 or rest.dim() > 1:
        return None
    entries = torch.arange(action.dim, device=loc.device)
    order = torch.cat([index.reshape(-1) for index in sites_of(action, entries[None]).values()])
    rows = root[order].double()
    return Covariance.of(loc[order].double(), rows @ rows.mT + rest[order].double().diag())


def _shared(value: Tensor, event_dims: int) -> Tensor:
    """Without batch dimensions along which it is only expanded."""
    batch = range(value.dim() - event_dims)
    alike = all(value.stride(dim) == 0 or value.shape[dim] == 1 for dim in batch)
    return value[(0,) * len(batch)] if alike else value


def blocks_of(base: Distribution, action: Action, group: Group) -> dict[str, Blocks]:
    """The normals of those sets of units of a group whose units are independent under the base, blocks by themselves.

    :param group: that of the action, or a part of it.
    """
    found: dict[str, Blocks] = {}
    if action.nonlinear_sites or not isinstance(base, UnitBlocks):
        return found
    for name, units in unit_entries(action, group, base.loc.device).items():
        if base.are_independent(units):
            factors = torch.linalg.cholesky(base.covariances(units).double())
            found[name] = Blocks(base.loc[units].double(), torch.cholesky_inverse(factors))
    return found


@functools.lru_cache(maxsize=64)
def unit_entries(action: Action, group: Group, device: torch.device) -> dict[str, Tensor]:
    """Set of units -> the entries of each in the flat vector, ``(n, d)``; of sets that no others move or lie inside."""
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        entries = group.viewed(action.layout.unflatten(torch.arange(action.dim, device=device)))
        sets = unit_sets(group, tuple(entries), device)
        return {
            name: torch.cat([axis.rows(entries[axis.own.site][None], 1)[0] for axis in one.axes], -1)
            for name, one in sets.items()
            if one.is_plain and not one.waits
        }


def _device_of(weights: Weights) -> torch.device:
    return next(iter(weights.values())).device


@torch.no_grad()
def _known_moments(base: Distribution) -> tuple[Tensor, Tensor] | None:
    try:
        return base.mean, base.stddev
    except NotImplementedError:
        return None


def laid_out(vectors: Tensor, base: Distribution, batch: Sequence[int]) -> Tensor:
    """``lead + base batch + (D,)`` -> ``lead + (1 or N, D)``."""
    lead = vectors.dim() - 1 - len(base.batch_shape)
    if not base.batch_shape:
        return vectors.unsqueeze(lead)
    return vectors.expand(*vectors.shape[:lead], *batch, vectors.shape[-1]).flatten(lead, -2)
