r"""Scales of an alignment: evened before units are matched, fitted afterwards.

Weights whose scales are a symmetry lie anywhere on an orbit. Before the match sources go to the point of theirs at
which weights are nearest to one (:func:`~pyro_symmetric.canonical.scales.evened`), moved back by what the reference's
units of one set have in common, so that layers keep the sizes that they have in the reference. Afterwards the scales of
all units are fitted at once: with entries :math:`A_t` of the reference and :math:`B_t` of the source in its place, of
which units multiply the latter by :math:`e^{a_t \cdot u}`,

.. math:: F(u) = \sum_t (A_t - e^{a_t \cdot u} B_t)^2 .

Scales of neighbouring layers pull at one another, so that unit by unit it takes hundreds of rounds; L-BFGS takes them
all together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_symmetric.alignment.features import Moments
from pyro_symmetric.canonical.scales import Mass, by_units, conjugate_gradients, evened
from pyro_symmetric.groups import Element, Group

# Steps of the search, and Newton's at its end, if they are so short.
STEPS, POLISH, SHORT = 200, 2, 1e-3


def evening(group: Group, source: Moments, reference: Moments | None = None) -> Element:
    """The scales that even all sources, ``(B,)``, where layers keep the sizes that they have in the reference.

    :param source: site -> moments ``(channels, B, *site_shape)``; ``reference``: likewise, by default all sources.
    """
    found = _even(group.scalings, source)
    like = found if reference is None else _even(group.scalings, reference)
    common = torch.zeros_like(found[:1])
    for at in group.scalings.slots.values():
        common[:, at] = like[:, at].mean()
    return _element(group, found - common)


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
    squares = Mass(scalings, {site: second.square().sum(0) for site, (_, second) in view.items()})
    products = Mass(scalings, {site: (first * second).sum(0) for site, (first, second) in view.items()})
    u = _least(squares, products)
    return _element(group, u)


# small steps ----------------------------------------------------------------------------------------------------------


def _even(scalings: Group, moments: Moments) -> Tensor:
    """The log-scales of all units, ``(B, units)``, at which weights are nearest to one; dead ones stay."""
    sizes = {s: v.double().square().sum(0).sqrt() for s, v in moments.items() if scalings.members(s)}
    viewed = {site: scalings.view(site, value) for site, value in sizes.items()}
    if not viewed:
        return torch.zeros(1, scalings.size, device="cpu").double()
    down, up = Mass(scalings, {site: value.square() for site, value in viewed.items()}).sides()
    return evened(scalings, viewed, down + up > 0)


def _element(group: Group, u: Tensor) -> Element:
    scalings = group.scalings
    return Element(group, log_scales=by_units(u, scalings, torch.Size([len(u)])), batch_shape=(len(u),))


def _least(squares: Mass, products: Mass) -> Tensor:
    """The log-scales at which the distance, but for the reference's own norm, is least, ``(B, units)``."""
    (up, down), (pulled_up, pulled_down) = squares.sides(), products.sides()
    # What pulls nowhere stays; so does what would shrink for ever: the pull of its one side keeps it away from zero.
    free = ((up > 0) & (down > 0)) | ((up + down > 0) & (torch.where(up > 0, pulled_up, pulled_down) > 0))

    def distance(u: Tensor) -> Tensor:
        return squares(u) - 2 * products(u / 2)

    with torch.inference_mode(False), torch.enable_grad():
        unit = torch.where(free, (up + down).clamp_min(1e-300).rsqrt(), 0.0)  # in such units all curve about alike
        position = torch.zeros_like(unit).requires_grad_()
        optimiser = torch.optim.LBFGS([position], max_iter=STEPS, history_size=20, line_search_fn="strong_wolfe")

        def total() -> Tensor:
            return distance(position * unit).sum()

        def closure() -> Tensor:
            optimiser.zero_grad()
            (value := total()).backward()
            return value

        optimiser.step(closure)
        for _ in range(POLISH):  # rounding hides from a search by values the last eight digits
            (gradient,) = torch.autograd.grad(total(), position, create_graph=True)
            hessian = lambda p: torch.autograd.grad(gradient, position, p, retain_graph=True)[0]  # noqa: B023, E731
            step = conjugate_gradients(
                hessian, -gradient.detach(), torch.ones_like(unit), torch.full_like(unit[:, :1], 1e-20)
            )
            position.data += torch.where((step * unit).abs().amax(1, keepdim=True) < SHORT, step, 0.0)
        u = (position * unit).detach()
    rounding = 1e-13 * distance(torch.zeros_like(u)).abs()
    return torch.where((distance(u) <= distance(torch.zeros_like(u)) + rounding).unsqueeze(-1), u, 0.0)
