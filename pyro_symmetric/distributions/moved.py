r"""The density of moved draws, where the base is a product of normals: only what moves is computed.

With :math:`a_{ji}` the log-density of unit ``i``'s weights under position ``j``'s factors,

.. math:: \log q(p \cdot w) - \log q(w) = \sum_{j:\, p(j) \ne j} (a_{j\,p(j)} - a_{jj}) .

Where a factor shares no site with another, these numbers stand in its matrix ``A``, which the proposal needs anyway,
and the gradient is a weighted sum of rows (:class:`_MatchedGain`). Sites between two factors are taken coordinate by
coordinate,

.. math:: -\sum_d \frac{(w_{p(d)} - w_d)(w_{p(d)} + w_d - 2 m_d)}{2 s_d^2} .
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag

from pyro_symmetric.distributions.normals import Normals
from pyro_symmetric.distributions.units import Term, UnitDensities, unit_view
from pyro_symmetric.symmetry.permutation import Permutation
from pyro_symmetric.symmetry.weights import Weights

# Beyond this share of moved coordinates, taking a site as a whole is faster than a list (measured).
LISTED_SHARE = 0.3


def log_density_gain(base: Normals, draws: Weights, units: UnitDensities, elements: Permutation) -> Tensor:
    r""":math:`\log q(p \cdot w) - \log q(w)` for a stack of elements.

    :param base: site -> moments, ``(1 or N, *site_shape)``.
    :param draws: site -> ``(N, *site_shape)``.
    :param units: the unit densities of these draws.
    :param elements: batch shape ``(K, N)``.
    :return: ``(K, N)``, differentiable in draws and moments; zero where nothing moves.
    """
    total = next(iter(draws.values())).new_zeros(elements.batch_shape)
    alone = [name for name in units.factors if units.is_alone(name)]
    for name in alone:
        total = total + _factor_gain(base, draws, units, name, elements[name])
    done = {term.axis.site for name in alone for term in units.terms(name)}
    for site in draws:
        if site not in done:
            maps = {dim: elements.axis_index(site, dim) for dim in elements.group.members(site)}
            moved = {dim: _moved(index) for dim, index in maps.items()}
            maps = {dim: index for dim, index in maps.items() if bool(moved[dim].any())}
            if maps:
                total = total + _site_gain(draws[site], base.loc[site], base.scale[site], maps, moved)
    return total


def _moved(images: Tensor) -> Tensor:
    """Which positions any of the elements moves: ``(..., n)`` -> ``(n,)``."""
    return (images != torch.arange(images.shape[-1], device=images.device)).flatten(0, -2).any(0)


# factors that share no site -----------------------------------------------------------------------------------------


def _factor_gain(base: Normals, draws: Weights, units: UnitDensities, name: str, images: Tensor) -> Tensor:
    """The share of a factor without neighbours, all its sites at once: ``(K, N)``."""
    positions = _moved(images).nonzero()[:, 0]
    gain = draws[units.terms(name)[0].axis.site].new_zeros(images.shape[:2])
    if len(positions) == 0:
        return gain
    scores = units.free_scores(name).total[0].expand(images.shape[1], -1, -1)
    picked = scores.gather(-1, images.permute(1, 2, 0))
    gain = (picked - scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)).sum(-2).mT.to(gain.dtype)
    if not torch.is_grad_enabled():
        return gain
    # Images among the moved positions alone: a permutation maps what it moves onto itself.
    place = torch.zeros(images.shape[-1], dtype=torch.long, device=images.device)
    place[positions] = torch.arange(len(positions), device=images.device)
    inner = place[images[..., positions]]
    for term in units.terms(name):
        site = term.axis.site
        centred = [_rows(part, term, positions) for part in units.centred(site)]
        parameters = [_rows(part[site], term, positions) for part in (draws, base.loc, base.scale)]
        gain = _MatchedGain.apply(gain, inner, *centred, *parameters)
    return gain


def _rows(value: Tensor, term: Term, positions: Tensor) -> Tensor:
    """The moved units of a site: ``(N, moved, everything else)``."""
    view = unit_view(value, term, 1)
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


# sites between factors ----------------------------------------------------------------------------------------------


def _site_gain(value: Tensor, loc: Tensor, scale: Tensor, maps: dict[int, Tensor], moved: dict[int, Tensor]) -> Tensor:
    """The share of one site: of a list of coordinates if they are few, else of all of it."""
    shape = value.shape[1:]
    some = torch.zeros(shape, dtype=torch.bool, device=value.device)
    for dim in maps:
        some |= moved[dim].reshape([-1 if d == dim else 1 for d in range(len(shape))])
    if float(some.sum()) <= LISTED_SHARE * some.numel():
        after, before, mean, deviation = _listed(value, loc, scale, maps, some.nonzero(as_tuple=True))
    else:
        after = value[None]
        for dim, index in maps.items():
            after = _gather_along(after, dim, index)
        after, before, mean, deviation = (t.flatten(-len(shape)) for t in (after, value, loc, scale))
    return -0.5 * ((after - before) * (after + before - 2 * mean) / deviation.square()).sum(-1)


def _listed(
    value: Tensor, loc: Tensor, scale: Tensor, maps: dict[int, Tensor], where: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Values after and before moving, means and deviations, at the listed coordinates: ``(..., coordinates)``."""
    strides = [math.prod(value.shape[dim + 2 :]) for dim in range(len(where))]
    here = torch.stack([positions * stride for positions, stride in zip(where, strides, strict=True)]).sum(0)
    source = here
    for dim, index in maps.items():
        source = source + (index[..., where[dim]] - where[dim]) * strides[dim]
    before = value.flatten(1)
    after = before.expand(*source.shape[:-1], -1).gather(-1, source)
    return after, before[:, here], loc.flatten(1)[:, here], scale.flatten(1)[:, here]


def _gather_along(value: Tensor, dim: int, index: Tensor) -> Tensor:
    """Take the positions ``index``, ``(K, N, length)``, along axis ``dim`` of the site: ``(K, N, *site_shape)``."""
    shape = value.shape[2:]
    lead = torch.broadcast_shapes(value.shape[:2], index.shape[:2])
    if dim == 0 and len(value) == 1:  # whole rows, copied as they lie
        offset = shape[0] * torch.arange(value.shape[1], device=index.device)[:, None]
        rows = value.reshape(-1, math.prod(shape[1:])).index_select(0, (index + offset).flatten())
        return rows.reshape(*lead, *shape)
    where = index.reshape(*index.shape[:2], *(-1 if d == dim else 1 for d in range(len(shape))))
    return value.expand(*lead, *shape).gather(dim + 2, where.expand(*lead, *shape))
