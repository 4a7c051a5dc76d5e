r"""Scales of an alignment: evened before units are matched, fitted afterwards.

Weights whose scales are a symmetry lie anywhere on an orbit. Before the match sources go to the point of theirs at
which weights are nearest to one (:func:`~pyro_symmetric.canonical.scales.evened`), moved back by what the reference's
units of one set have in common, so that layers keep the sizes that they have in the reference. Afterwards the scales of
all units are fitted at once: with entries :math:`A_t` of the reference and :math:`B_t` of the source in its place, of
which units multiply the latter by :math:`e^{a_t \cdot u}`,

.. math:: F(u) = \sum_t (A_t - e^{a_t \cdot u} B_t)^2 .

Scales of neighbouring layers pull at one another, so that unit by unit it takes hundreds of rounds; Newton's method
with conjugate gradients takes a few steps, each shortened until it lowers the distance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pyro_symmetric.alignment.features import Moments
from pyro_symmetric.canonical.scales import Sum, by_units, conjugate_gradients, evened, places
from pyro_symmetric.groups import Element, Group

STEPS, SHORTER = 30, 8
LIMIT = 30.0  # of log-scales
# Newton steps shorter than this are right even if the distance seems to rise by a part that rounding explains.
SHORT, HIDDEN = 1e-4, 1e-13


def evening(group: Group, reference: Moments, source: Moments) -> Element:
    """The scales that even all sources, ``(B,)``, where layers keep the sizes that they have in the reference.

    :param reference: site -> moments ``(channels, 1, *site_shape)``; ``source``: ``(channels, B, *site_shape)``.
    """
    first, second = (_even(group.scalings, moments) for moments in (reference, source))
    return _element(group, second - _common(group.scalings, first))


def evened_together(group: Group, moments: Moments) -> Element:
    """The scales that even all members, ``(S,)``, where layers keep the sizes that they have in most."""
    found = _even(group.scalings, moments)
    return _element(group, found - _common(group.scalings, found))


def scaled(element: Element, moments: Moments) -> Moments:
    """All sites as scales move them, all channels alike."""
    own = element.within(element.group.scalings)
    return {site: own.on_site(site, value) for site, value in moments.items()} if own.log_scales else moments


def fitted(group: Group, reference: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> Element:
    """The scales where the squared distance of what is in place is least, near none; no source ends farther away."""
    scalings = group.scalings
    sites = [site for site in source if scalings.members(site)]
    batch = next((value.shape[1] for value in source.values()), 1)
    if not sites:
        return Element(group, batch_shape=(batch,), dtype=torch.float64)
    view = {s: [scalings.view(s, v.double()) for v in (reference[s], source[s])] for s in sites}
    squares = Sum(scalings, {site: second.square().sum(0) for site, (_, second) in view.items()})
    products = Sum(scalings, {site: (first * second).sum(0) for site, (first, second) in view.items()})
    u = _least(squares, products)
    return _element(group, u)


# small steps ----------------------------------------------------------------------------------------------------------


def _even(scalings: Group, moments: Moments) -> Tensor:
    """The log-scales of all units, ``(B, units)``, at which weights are nearest to one; dead ones stay."""
    sizes = {s: v.double().square().sum(0).sqrt() for s, v in moments.items() if scalings.members(s)}
    viewed = {site: scalings.view(site, value) for site, value in sizes.items()}
    if not viewed:
        return torch.zeros(1, sum(scalings[name].count for name in scalings.names("scale")), device="cpu").double()
    weights = Sum(scalings, {site: value.square() for site, value in viewed.items()})
    masses = weights.masses()
    return evened(scalings, viewed, weights.pulls(masses, 1) + weights.pulls(masses, -1) > 0)


def _common(scalings: Group, u: Tensor) -> Tensor:
    """The mean of each set of units, over all samples."""
    common = torch.zeros_like(u[:1])
    for at in places(scalings).values():
        common[:, at] = u[:, at].mean()
    return common


def _element(group: Group, u: Tensor) -> Element:
    scalings = group.scalings
    return Element(group, log_scales=by_units(u, scalings, torch.Size([len(u)])), batch_shape=(len(u),))


def _least(squares: Sum, products: Sum) -> Tensor:
    up, down = (squares.pulls(squares.masses(), side) for side in (1, -1))
    pulled_up, pulled_down = (products.pulls(products.masses(), side) for side in (1, -1))
    # What pulls nowhere stays; so does what would shrink for ever: the pull of its one side keeps it away from zero.
    free = ((up > 0) & (down > 0)) | ((up + down > 0) & (torch.where(up > 0, pulled_up, pulled_down) > 0))
    diagonal = 2 * (up + down).clamp_min(1e-300)

    def distance(u: Tensor) -> Tensor:
        """The distance, but for the reference's own norm, ``(B,)``."""
        return squares.value(u) - 2 * products.value(u / 2)

    u = torch.zeros_like(up)
    reached = distance(u)
    for _ in range(STEPS):
        step = _newton_step(distance, u, free, diagonal)
        before, waiting, part = reached, torch.ones_like(reached, dtype=torch.bool), 1.0
        # Near the optimum rounding hides the gain of a step, but not the step.
        enough = torch.where(step.abs().amax(-1) < SHORT, reached + HIDDEN * reached.abs(), reached)
        for _ in range(SHORTER):
            trial = (u + part * step).clamp(-LIMIT, LIMIT)
            found = distance(trial)
            better = waiting & (found < enough)
            u, reached = torch.where(better.unsqueeze(-1), trial, u), torch.where(better, found, reached)
            waiting = waiting & ~better
            if not bool(waiting.any()):
                break
            part *= 0.25
        if bool((before - reached <= HIDDEN * before.abs()).all()) and float(step.abs().max()) < 1e-8:
            break
    return u


def _newton_step(distance: Callable[[Tensor], Tensor], u: Tensor, free: Tensor, diagonal: Tensor) -> Tensor:
    """Newton's step by conjugate gradients, cut off where the distance curves downwards."""
    with torch.inference_mode(False), torch.enable_grad():
        here = u.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(distance(here).sum(), here, create_graph=True)
        downhill = torch.where(free, -gradient.detach(), 0.0)
        p = conjugate_gradients(
            lambda p: free * torch.autograd.grad(gradient, here, p, retain_graph=True)[0],
            downhill,
            diagonal,
            (downhill / diagonal).abs().amax(-1, keepdim=True).clamp_max(0.1).square().clamp_min(1e-20),
        )
    return p / p.abs().amax(-1, keepdim=True).clamp_min(1.0)
