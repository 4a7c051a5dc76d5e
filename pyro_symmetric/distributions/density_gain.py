r"""The density of moved draws if the base is a product of normals: only what moves is computed.

With :math:`a_{ji}` the log-density of unit ``i``'s weights under position ``j``'s factors,

.. math:: \log q(p \cdot w) - \log q(w) = \sum_{j:\, p(j) \ne j} (a_{j\,p(j)} - a_{jj}) .

If a set of units shares no site with another, these numbers stand in its matrix ``A``, which the proposal needs anyway,
and the gradient is a weighted sum of rows (:class:`_MatchedGain`). Other sites are taken coordinate by coordinate: with
``v`` the moved and flipped draw,

.. math:: -\sum_d \frac{(v_d - w_d)(v_d + w_d - 2 m_d)}{2 s_d^2} .
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from pyro_symmetric.distributions.placements import Placements
from pyro_symmetric.distributions.unit_scores import UnitScores
from pyro_symmetric.distributions.unit_sets import UnitAxis
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.tensors import along_axis

# Beyond this share of moved coordinates, taking a site as a whole is faster than a list (measured).
LISTED_SHARE = 0.3


def log_density_gain(units: UnitScores, elements: Element) -> Tensor:
    r""":math:`\log q(g \cdot w) - \log q(w)` for a stack of elements.

    :param units: the scores of these draws, whose base is what is meant.
    :param elements: batch shape ``(K, N)``.
    :return: ``(K, N)``, differentiable in draws and moments; zero if nothing moves.
    """
    total = next(iter(units.draws.values())).new_zeros(elements.batch_shape)
    alone = [name for name, one in units.sets.items() if one.alone]
    for name in alone:
        total = total + _gain_of_units(units, name, elements[name])
    done = {axis.site for name in alone for axis in units.sets[name].axes}
    for site, value in units.draws.items():
        moves = {} if site in done else _moves_on(elements, site, value.dtype)
        if moves:
            total = total + _gain_of_site(value, units.base.loc[site], units.base.scale[site], moves)
    return total


def _moved(images: Tensor) -> Tensor:
    """Which positions any of the elements moves: ``(..., n)`` -> ``(n,)``."""
    return (images != torch.arange(images.shape[-1], device=images.device)).flatten(0, -2).any(0)


# units that share no site -------------------------------------------------------------------------------------------


def _gain_of_units(units: UnitScores, name: str, images: Tensor) -> Tensor:
    """The share of a set of units without neighbours, all its sites at once: ``(K, N)``."""
    positions = _moved(images).nonzero()[:, 0]
    gain = next(iter(units.draws.values())).new_zeros(images.shape[:2])
    if len(positions) == 0:
        return gain
    with torch.no_grad():
        scores = units.scores(name, Placements()).total[0].expand(images.shape[1], -1, -1)
        picked = scores.gather(-1, images.permute(1, 2, 0))
        gain = (picked - scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).sum(-2).mT.to(gain.dtype)
    if not torch.is_grad_enabled():
        return gain
    # Images among the moved positions alone: a permutation maps what it moves onto itself.
    place = torch.zeros(images.shape[-1], dtype=torch.long, device=images.device)
    place[positions] = torch.arange(len(positions), device=images.device)
    inner = place[images[..., positions]]
    for axis in units.sets[name].axes:
        centred = [_rows(part, axis, positions) for part in units.centred(axis.site)]
        parameters = (units.draws[axis.site], units.base.loc[axis.site], units.base.scale[axis.site])
        gain = _MatchedGain.apply(gain, inner, *centred, *(_rows(part, axis, positions) for part in parameters))
    return gain


def _rows(value: Tensor, axis: UnitAxis, positions: Tensor) -> Tensor:
    """The moved units of a site: ``(N, moved, everything else)``."""
    view = axis.rows(value, 1)
    return view if len(positions) == view.shape[1] else view.index_select(1, positions)


class _MatchedGain(torch.autograd.Function):
    """Attaches to a gain, already computed, its gradient with respect to one site's draws, means and deviations.

    With weights ``g_k`` of the elements (and minus their sum for the identity), units ``v``, means ``m`` and precisions
    ``ρ``, the gradients are made of the rows ``Σ_k g_k v_{p_k(j)}``, the same of squares, and ``Σ_k g_k ρ_{p_k⁻¹(i)}``,
    the same of ``m ρ``: weighted sums of ``K + 1`` rows each, for which nothing needs to be copied.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gain: Tensor,
        images: Tensor,
        value: Tensor,
        loc: Tensor,
        precision: Tensor,
        own_value: Tensor,
        own_loc: Tensor,
        own_scale: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(images, value, loc, precision, own_scale)
        return gain.view_as(gain)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, value, loc, precision, scale = ctx.saved_tensors
        weights = torch.cat([grad, -grad.sum(0, keepdim=True)])
        images = torch.cat([images, torch.arange(images.shape[-1], device=images.device).expand_as(images[:1])])
        back = images.argsort(-1)
        to_value = _bags(back, weights, loc * precision)
        to_value.addcmul_(value, _bags(back, weights, precision), value=-1)
        first, second = _bags(images, weights, value), _bags(images, weights, value.square())
        to_loc = precision * first
        to_scale = second.addcmul_(loc, first, value=-2).mul_(precision).div_(scale)
        return grad, None, None, None, None, to_value, _summed_to(to_loc, loc), _summed_to(to_scale, scale)


def _bags(images: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """``Σ_k weights[k, n] rows[n, images[k, n, j]]``: ``(N, moved, everything else)``."""
    count, batch, moved = images.shape
    if len(rows) > 1:
        images = images + moved * torch.arange(batch, device=images.device)[:, None]
    index = images.permute(1, 2, 0).reshape(-1, count)
    share = weights.mT[:, None].expand(batch, moved, count).reshape(-1, count)
    table = rows.reshape(-1, rows.shape[-1]).contiguous()
    return embedding_bag(index, table, per_sample_weights=share, mode="sum").reshape(batch, moved, -1)


def _summed_to(value: Tensor, like: Tensor) -> Tensor:
    return value.sum(0, keepdim=True) if len(like) == 1 else value


# other sites ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Move:
    """What elements do along one axis of a site.

    :param index: where each position's value comes from, ``(K, N, length)``.
    :param signs: what that value is multiplied by; None if nothing flips.
    :param moved: the positions that any element changes, ``(length,)``.
    """

    index: Tensor
    signs: Tensor | None
    moved: Tensor


def _moves_on(elements: Element, site: str, dtype: torch.dtype) -> dict[int, _Move]:
    """By axis of the viewed site, what elements do there; nothing for axes that none changes."""
    found = {}
    for dim, members in elements.group.members(site).items():
        index, signs = elements.axis_index(site, dim), None
        moved = _moved(index)
        if any(name in elements.signs and axis.exponent % 2 for name, axis in members):
            signs = elements.axis_multiplier(site, dim, dtype).gather(-1, index)
            moved = moved | (signs != 1).flatten(0, -2).any(0)
        if bool(moved.any()):
            found[dim] = _Move(index, signs, moved)
    return found


def _gain_of_site(value: Tensor, loc: Tensor, scale: Tensor, moves: dict[int, _Move]) -> Tensor:
    """The share of one site: of a list of coordinates if they are few, else of all of it."""
    shape = value.shape[1:]
    some = torch.zeros(shape, dtype=torch.bool, device=value.device)
    for dim, move in moves.items():
        some |= along_axis(move.moved, dim, len(shape))
    if float(some.sum()) <= LISTED_SHARE * some.numel():
        after, before, mean, deviation = _listed(value, loc, scale, moves, some.nonzero(as_tuple=True))
    else:
        after = value[None]
        for dim, move in moves.items():
            after = _gather_along(after, dim, move.index)
            after = after if move.signs is None else after * along_axis(move.signs, dim, len(shape))
        after, before, mean, deviation = (t.flatten(-len(shape)) for t in (after, value, loc, scale))
    return -0.5 * ((after - before) * (after + before - 2 * mean) / deviation.square()).sum(-1)


def _listed(
    value: Tensor, loc: Tensor, scale: Tensor, moves: dict[int, _Move], where: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Values after and before moving, means and deviations, at the listed coordinates: ``(..., coordinates)``."""
    strides = [math.prod(value.shape[dim + 2 :]) for dim in range(len(where))]
    here = torch.stack([positions * stride for positions, stride in zip(where, strides, strict=True)]).sum(0)
    source = here
    for dim, move in moves.items():
        source = source + (move.index[..., where[dim]] - where[dim]) * strides[dim]
    before = value.flatten(1)
    after = before.expand(*source.shape[:-1], -1).gather(-1, source)
    for dim, move in moves.items():
        after = after if move.signs is None else after * move.signs[..., where[dim]]
    return after, before[:, here], loc.flatten(1)[:, here], scale.flatten(1)[:, here]


def _gather_along(value: Tensor, dim: int, index: Tensor) -> Tensor:
    """Take the positions ``index``, ``(K, N, length)``, along axis ``dim`` of the site: ``(K, N, *site_shape)``."""
    shape = value.shape[2:]
    lead = torch.broadcast_shapes(value.shape[:2], index.shape[:2])
    if dim == 0 and len(value) == 1:  # whole rows, copied as they lie
        offset = shape[0] * torch.arange(value.shape[1], device=index.device)[:, None]
        rows = value.reshape(-1, math.prod(shape[1:])).index_select(0, (index + offset).flatten())
        return rows.reshape(*lead, *shape)
    where = along_axis(index, dim, len(shape))
    return value.expand(*lead, *shape).gather(dim + 2, where.expand(*lead, *shape))
