r"""The density of moved draws if the base is a product of normals: only what moves is computed.

With :math:`a_{ji}` the log-density of unit ``i``'s weights under position ``j``'s factors,

.. math:: \log q(p \cdot w) - \log q(w) = \sum_{j:\, p(j) \ne j} (a_{j\,p(j)} - a_{jj}) .

If a set of units shares no site with another, these numbers stand in its matrix ``A``, which the proposal needs anyway,
and the gradient is a weighted sum of rows (:class:`_MatchedGain`). Of other sites those rows and columns are moved that
any element changes: with ``v`` the moved and flipped draw,

.. math:: \sum_d - \frac{(v_d - w_d)(v_d + w_d - 2 m_d)}{2 s_d^2} .
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from pyro_symmetric.distributions.placements import Placements
from pyro_symmetric.distributions.unit_densities import UnitDensities
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.tensors import along_axis, permute_axes
from pyro_symmetric.placement import asks


def log_density_gain(units: UnitDensities, elements: Element) -> Tensor:
    r""":math:`\log q(g \cdot w) - \log q(w)` for a stack of elements.

    :param units: the densities of these draws, whose base is what is meant.
    :param elements: batch shape ``(K, N)``.
    :return: ``(K, N)``, differentiable in draws and moments; zero if nothing moves.
    """
    total = units.like.new_zeros(elements.batch_shape)
    alone = [name for name, one in units.sets.items() if one.alone]
    for name in alone:
        total = total + _gain_of_units(units, name, elements[name])
    done = {axis.own.site for name in alone for axis in units.sets[name].axes}
    sites = [site for site in elements.group.sites if site in units.draws and site not in done]
    if not sites:
        return total
    if not asks(total.expand(sum(units.draws[site][0].numel() for site in sites), *total.shape)):
        return total + _gain_of_all(units, elements, sites)
    for site in sites:
        total = total + _gain_of_site(units, elements, site)
    return total


def _moving(images: Tensor) -> Tensor:
    """Mask of the positions that any of the elements moves: ``(K, N, n)`` -> ``(n,)``."""
    return (images != torch.arange(images.shape[-1], device=images.device)).flatten(0, -2).any(0)


def _among(images: Tensor, moving: Tensor) -> Tensor:
    """The same images among the moving positions alone: a permutation maps what it moves onto itself."""
    return (moving.cumsum(0) - 1)[images[..., moving]]


# units that share no site -------------------------------------------------------------------------------------------


def _gain_of_units(units: UnitDensities, name: str, images: Tensor) -> Tensor:
    """The share of a set of units without neighbours, all its sites at once: ``(K, N)``."""
    moving = _moving(images) if asks(images) else None
    if moving is not None and not bool(moving.any()):
        return units.like.new_zeros(images.shape[:2])
    with torch.no_grad():
        densities = units.densities(name, Placements()).total[0].expand(images.shape[1], -1, -1)
        picked = densities.gather(-1, images.permute(1, 2, 0))
        gain = (picked - densities.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).sum(-2).mT.to(units.like.dtype)
    chosen: Any = slice(None)
    if moving is not None and not bool(moving.all()):
        chosen, images = moving.nonzero()[:, 0], _among(images, moving)
    for axis in units.sets[name].axes if torch.is_grad_enabled() else ():
        parts = (units.draws[axis.own.site], units.base.loc[axis.own.site], units.base.scale[axis.own.site])
        gain = _MatchedGain.apply(gain, images, *(axis.rows(part, 1)[:, chosen] for part in parts))
    return gain


class _MatchedGain(torch.autograd.Function):
    """Attaches to a gain, already computed, its gradient with respect to one site's draws, means and deviations.

    With weights ``g_k`` of the elements (and minus their sum for the identity), units ``v``, means ``m`` and precisions
    ``ρ``, the gradients are made of the rows ``Σ_k g_k v_{p_k(j)}``, the same of squares, and ``Σ_k g_k ρ_{p_k⁻¹(i)}``,
    the same of ``m ρ``: weighted sums of ``K + 1`` rows each, for which nothing needs to be copied.
    """

    @staticmethod
    def forward(ctx: Any, gain: Tensor, images: Tensor, value: Tensor, loc: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(images, value, loc, scale)
        return gain.view_as(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, value, loc, scale = ctx.saved_tensors
        centre, precision = loc.mean(1, keepdim=True), scale.square().reciprocal()
        value, loc = value - centre, loc - centre  # so that squares cancel less
        weights = torch.cat([grad, -grad.sum(0, keepdim=True)])
        images = torch.cat([images, torch.arange(images.shape[-1], device=images.device).expand_as(images[:1])])
        back = images.argsort(-1)
        to_value = _bags(back, weights, loc * precision)
        to_value.addcmul_(value, _bags(back, weights, precision), value=-1)
        first, second = _bags(images, weights, value), _bags(images, weights, value.square())
        to_loc = precision * first
        to_scale = second.addcmul_(loc, first, value=-2).mul_(precision).div_(scale)
        return grad, None, to_value, to_loc.sum_to_size(loc.shape), to_scale.sum_to_size(scale.shape)


def _bags(images: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """``Σ_k weights[k, n] rows[n, images[k, n, j]]``: ``(N, moved, everything else)``."""
    count, batch, moved = images.shape
    if len(rows) > 1:
        images = images + moved * torch.arange(batch, device=images.device)[:, None]
    index = images.permute(1, 2, 0).reshape(-1, count)
    share = weights.mT[:, None].expand(batch, moved, count).reshape(-1, count)
    table = rows.reshape(-1, rows.shape[-1]).contiguous()
    return embedding_bag(index, table, per_sample_weights=share, mode="sum").reshape(batch, moved, -1)


# other sites ----------------------------------------------------------------------------------------------------------


def _gain_of_site(units: UnitDensities, elements: Element, site: str) -> Tensor:
    """The share of one site, in blocks: what moves along one axis, then what stays there and moves along the next."""
    before, loc, scale = (part[None] for part in (units.draws[site], units.base.loc[site], units.base.scale[site]))
    total, site_dims = before.new_zeros(elements.batch_shape), before.dim() - 2
    moves = _moves_on(elements, site, before.dtype)
    while moves:
        dim, (index, signs, moving) = next(iter(moves.items()))
        positions, still = moving.nonzero()[:, 0], (~moving).nonzero()[:, 0]
        moves[dim] = _among(index, moving), None if signs is None else signs[..., positions], moving
        block, mean, deviation = (part.index_select(dim + 2, positions) for part in (before, loc, scale))
        after = block.expand(*elements.batch_shape, *block.shape[2:])
        for along, (source, factors, _) in moves.items():
            after = permute_axes(after, {along: source}, site_dims)
            after = after if factors is None else after * along_axis(factors, along, site_dims)
        gain = -0.5 * (after - block) * (after + block - 2 * mean) / deviation.square()
        total = total + gain.flatten(2).sum(-1)
        del moves[dim]
        before, loc, scale = (part.index_select(dim + 2, still) for part in (before, loc, scale))
    return total


def _moves_on(elements: Element, site: str, dtype: torch.dtype) -> dict[int, tuple[Tensor, Tensor | None, Tensor]]:
    """The moves along each axis of a viewed site that any of the elements changes.

    :return: axis -> where each position's value comes from, ``(K, N, length)``; what it is multiplied by, or None; and
        which positions any element changes, ``(length,)``.
    """
    found = {}
    for dim in elements.group.members(site):
        index, signs = _move_along(elements, site, dim, dtype)
        moving = _moving(index)
        if signs is not None:
            moving = moving | (signs != 1).flatten(0, -2).any(0)
        if bool(moving.any()):
            found[dim] = index, signs, moving
    return found


def _move_along(elements: Element, site: str, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The source of each position's value, ``(K, N, length)``, and what it is multiplied by, or None."""
    index, members = elements.axis_index(site, dim), elements.group.members(site)[dim]
    if any(name in elements.signs and axis.exponent % 2 for name, axis in members):
        return index, elements.axis_multiplier(site, dim, dtype).gather(-1, index)
    return index, None


def _gain_of_all(units: UnitDensities, elements: Element, sites: Sequence[str]) -> Tensor:
    """The share of several sites at once, whatever moves: nothing is asked, and few operations are made of many."""
    before, loc, scale = (
        torch.cat([part[site].flatten(1) for site in sites], -1)
        for part in (units.draws, units.base.loc, units.base.scale)
    )
    entries = torch.arange(before.shape[-1], device=before.device)
    sources: list[Tensor] = []
    factors: list[Tensor] = []
    for site, own in zip(sites, entries.split([units.draws[site][0].numel() for site in sites]), strict=True):
        shape = units.draws[site].shape[1:]
        moves = {dim: _move_along(elements, site, dim, before.dtype) for dim in elements.group.members(site)}
        source = permute_axes(own.view(shape), {dim: index for dim, (index, _) in moves.items()}, len(shape))
        sources.append(source.flatten(2))
        if elements.signs:
            signs = [along_axis(signs, dim, len(shape)) for dim, (_, signs) in moves.items() if signs is not None]
            own_factors = functools.reduce(torch.mul, signs, before.new_ones(shape))
            factors.append(own_factors.flatten(-len(shape)).expand(sources[-1].shape))
    source = torch.cat(sources, -1)
    return _MovedGain.apply(before, loc, scale, source, torch.cat(factors, -1) if factors else None)


class _MovedGain(torch.autograd.Function):
    """The gain of moved entries, ``(K, N)``, whose gradient is written out: autograd's takes twice as many launches.

    With weights ``g_k`` of the elements (and minus their sum for the identity) and differences ``c`` of the moved
    entries from the means, the gradient is ``Σ_k g_k c_k ρ`` for means, ``Σ_k g_k c_k² ρ / s`` for deviations, and for
    each moved entry ``-g_k c_k ρ``, which goes back to where the entry came from.
    """

    @staticmethod
    def forward(ctx: Any, before: Tensor, loc: Tensor, scale: Tensor, source: Tensor, factors: Tensor | None) -> Tensor:
        after = before.expand(*source.shape[:-1], -1).gather(-1, source)
        after = after if factors is None else after * factors
        ctx.save_for_backward(before, after, loc, scale, source, factors)
        return (-0.5 * (after - before) * (after + before - 2 * loc) / scale.square()).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        before, after, loc, scale, source, factors = ctx.saved_tensors
        weights = torch.cat([grad, -grad.sum(0, keepdim=True)]).unsqueeze(-1)
        away = torch.cat([after, before.expand_as(after[:1])]).sub_(loc)
        pulls = away * scale.square().reciprocal_() * weights
        to_loc, to_scale = pulls.sum(0), away.mul_(pulls).sum(0).div_(scale)
        entries = torch.arange(source.shape[-1], device=source.device).expand_as(source)
        back = torch.empty_like(source).scatter_(-1, source, entries)
        moved = pulls[:-1] if factors is None else pulls[:-1] * factors
        to_before = -(moved.gather(-1, back).sum(0) + pulls[-1])
        return (
            to_before.sum_to_size(before.shape),
            to_loc.sum_to_size(loc.shape),
            to_scale.sum_to_size(scale.shape),
            None,
            None,
        )
