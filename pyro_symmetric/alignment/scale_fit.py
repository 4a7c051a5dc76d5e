r"""Scales that bring weights closest to a reference.

Where scales are a symmetry, weights may lie anywhere on their orbit. Before the match
the scales of a source are *evened*: moved to the point of the orbit whose weights are
nearest to one in size (:func:`~pyro_symmetric.canonical.scales.evened`), times the mean
scale of each layer of the reference. Afterwards the scales of all units are fitted at
once. With entries :math:`A_t` of the reference and :math:`B_t` of the source, which
units multiply by :math:`e^{a_t \cdot u}`, they minimise

.. math:: F(u) = \sum_t (A_t - e^{a_t \cdot u} B_t)^2 .

Scales of neighbouring layers are coupled: unit by unit they take hundreds of sweeps,
and L-BFGS fits them jointly. In front of batch normalisation only running statistics,
which don't enter :math:`F`, compensate for a scale, and units that match badly would
vanish. So each scale ends within a factor of four of the one that evens the unit as its
partner in the reference is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.alignment.moments import Moments
from pyro_symmetric.canonical.scales import Mass, conjugate_gradients, evened
from pyro_symmetric.groups import Element, Group

# Steps of L-BFGS; then of Newton's method, while these are shorter than so much.
LBFGS_STEPS = 200
NEWTON_STEPS = 2
NEWTON_LENGTH = 1e-3
# The largest log-scale relative to that which evens a unit. Two scales multiply a
# running variance, squared: in 60 pairs of networks the smallest variance was 0.0003 of
# the reference's smallest.
BOUND = math.log(4)


class Evening(NamedTuple):
    """Scales that even units.

    :ivar of_source: of all sources, ``(B,)``, up to the mean of each layer of the
        reference.
    :ivar to_reference: those that give evened units the sizes of the reference's.
    """

    of_source: Element
    to_reference: Element


def evening(group: Group, source: Moments, reference: Moments | None = None) -> Evening:
    """Return the scales that even units.

    :param source: site -> moments ``(channels, B, *site_shape)``.
    :param reference: likewise, by default all sources.
    """
    scalings = group.scalings
    of_source = _evened(scalings, source)
    of_reference = of_source if reference is None else _evened(scalings, reference)
    common = torch.zeros_like(of_source[:1])
    for units in scalings.slots.values():
        common[:, units] = of_reference[:, units].mean()
    return Evening(
        _scales(group, of_source - common), _scales(group, common - of_reference)
    )


def fitted(group: Group, reference: Moments, source: Moments, even: Element) -> Element:
    """Fit the scales that minimise the squared distance from the reference.

    None raises it.

    :param even: the scales that give units the reference's sizes, which bound the fit.
    """
    scalings = group.scalings
    squares = {}
    products = {}
    sizes = {}
    for site, value in source.items():
        if scalings.members(site):
            first = scalings.view(site, reference[site].double())
            second = scalings.view(site, value.double())
            squares[site] = second.square().sum(0)
            products[site] = (first * second).sum(0)
            sizes[site] = (first * second).abs().sum(0)
    if not squares:
        batch = next((value.shape[1] for value in source.values()), 1)
        return Element(group, batch_shape=(batch,), dtype=torch.float64)
    distance = _Distance(Mass(scalings, squares), Mass(scalings, products))
    up, down = Mass(scalings, sizes).sides()
    bounds = even.within(scalings).numbers["scale"]
    return _scales(group, _minimum(distance, bounds, free=up + down > 0))


def _evened(scalings: Group, moments: Moments) -> Tensor:
    """Return the log-scales of all units, ``(B, units)``, that even the weights.

    Dead units stay.
    """
    sizes = {}
    squares = {}
    for site, value in moments.items():
        if scalings.members(site):
            size = value.double().square().sum(0).sqrt()
            sizes[site] = scalings.view(site, size)
            squares[site] = sizes[site].square()
    if not sizes:
        return torch.zeros(1, scalings.size, device="cpu").double()
    down, up = Mass(scalings, squares).sides()
    return evened(scalings, sizes, down + up > 0)


def _scales(group: Group, log_scales: Tensor) -> Element:
    by_name = group.scalings.by_name(log_scales, "scale")
    return Element(group, log_scales=by_name, batch_shape=(len(log_scales),))


class _Distance(NamedTuple):
    r"""The function :math:`F(u)`, up to the norm of the reference.

    :ivar squares: :math:`\sum_t e^{2 a_t \cdot u} B_t^2`.
    :ivar products: :math:`\sum_t e^{2 a_t \cdot u} A_t B_t`, at twice the log-scales.
    """

    squares: Mass
    products: Mass

    def at(self, log_scales: Tensor) -> Tensor:
        """Return the distance of each source, ``(B,)``."""
        return self.squares(log_scales) - 2 * self.products(log_scales / 2)


def _minimum(distance: _Distance, even: Tensor, free: Tensor) -> Tensor:
    """Minimise :math:`F` over log-scales, ``(B, units)``.

    :param even: the log-scales of the reference's sizes, which bound the result.
    :param free: units with entries that aren't zero in both; the others stay.
    """
    even = torch.where(free, even, 0.0)
    with torch.inference_mode(False), torch.enable_grad():
        up, down = distance.squares.sides()
        # A diagonal preconditioner: the search is over log_scales / unit.
        unit = torch.where(free, (up + down).clamp_min(1e-300).rsqrt(), 0.0)
        start = torch.where(even.abs() < BOUND, 0.0, even)
        position = torch.where(free, start / unit, 0.0).requires_grad_()

        def log_scales() -> Tensor:
            return (position * unit).clamp(even - BOUND, even + BOUND)

        def total() -> Tensor:
            return distance.at(log_scales()).sum()

        _lbfgs(position, total)
        for _ in range(NEWTON_STEPS):
            step = _newton_step(position, total)
            short = (step * unit).abs().amax(1, keepdim=True) < NEWTON_LENGTH
            if not short.any():
                break
            position.data += torch.where(short, step, 0.0)
        minimum = log_scales().detach()
    unmoved = distance.at(torch.zeros_like(minimum))
    lowered = distance.at(minimum) <= unmoved + 1e-13 * unmoved.abs()
    return torch.where(lowered.unsqueeze(-1), minimum, 0.0)


def _lbfgs(position: Tensor, total: Callable[[], Tensor]) -> None:
    """Move a position to a local minimum."""
    optimiser = torch.optim.LBFGS(
        [position],
        max_iter=LBFGS_STEPS,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = total()
        value.backward()
        return value

    optimiser.step(closure)


def _newton_step(position: Tensor, total: Callable[[], Tensor]) -> Tensor:
    """Return Newton's step, by conjugate gradients.

    It adds the last eight digits, which a line search by values loses to rounding.
    """
    (gradient,) = torch.autograd.grad(total(), position, create_graph=True)

    def hessian(vector: Tensor) -> Tensor:
        return torch.autograd.grad(gradient, position, vector, retain_graph=True)[0]

    identity = torch.ones_like(position)
    tolerance = torch.full_like(position[:, :1], 1e-10)
    return conjugate_gradients(hessian, -gradient.detach(), identity, tolerance)
