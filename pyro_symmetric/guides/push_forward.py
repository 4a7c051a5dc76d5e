r"""Push-forward guides: the distribution :math:`g_\# q` of ``g·w`` for ``w ~ q`` (Rossi et al. 2023, arXiv 2310.10171).

Permutations, scales, signs and shifts act on real sites by affine maps :math:`g \cdot w = A w + b`, so the push-forward
of a Gaussian is :math:`g_\# \mathcal N(m, \Sigma) = \mathcal N(A m + b, A \Sigma A^\top)`. ``A`` has one entry in each
row: mean-field guides stay mean-field, low-rank guides keep their rank, and unit blocks stay unit blocks if units go to
units.
"""

from __future__ import annotations

from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.discovery.symmetry import Symmetry, acted_on
from pyro_symmetric.groups import Action, Element
from pyro_symmetric.groups.element import require_buffers
from pyro_symmetric.guides.gaussian import AutoGaussian, Moments, moments_of, plain, triangular
from pyro_symmetric.guides.layout import GuideLayout, layout_of
from pyro_symmetric.guides.unit_blocks import AutoUnitBlocks


@torch.no_grad()
def push_forward(guide: AutoGuide, element: Element) -> AutoGaussian | AutoUnitBlocks:
    """The distribution of ``element(w)`` for ``w`` drawn from a Gaussian guide, as a guide of its own.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = pyro.infer.autoguide.AutoDiagonalNormal(model, init_loc_fn=lambda site: torch.tensor([1.0, 2.0, 3.0]))
    >>> draw = guide()
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> ps.push_forward(guide, group.element({"unit": torch.tensor([2, 0, 1])})).median()
    {'w': tensor([3., 1., 2.])}

    The moments are copied. ``symmetry.act(element, guide)`` does the same. Running statistics aren't sites of a guide:
    elements that move some are refused; those of ``symmetry.holding(net)`` don't.

    :param guide: a set-up Gaussian guide, stock or ours; of a symmetrised guide, its base is pushed forward.
    :param element: permutations, scales, signs and shifts. Permutations may also move sites that are constrained entry
        by entry (positive ones), the others move real sites only.
    :raises TypeError: if the guide isn't Gaussian, or ``element`` is no element of a group.
    :raises ValueError: for a batch of elements, for sites that the guide lacks or whose supports don't fit.
    """
    layout, guide = layout_of(guide), plain(guide)
    if isinstance(guide, AutoUnitBlocks):
        return _pushed_blocks(guide, layout, element)
    return AutoGaussian(layout, **_pushed(moments_of(guide), element, _affine(element, layout)))


@acted_on.register(AutoGuide)
def _(target: AutoGuide, element: Element, symmetry: Symmetry) -> AutoGaussian | AutoUnitBlocks:
    return push_forward(target, element)


def _pushed(moments: Moments, element: Element, action: Action) -> dict[str, Tensor]:
    """The moments of a Gaussian pushed forward: ``loc`` and ``scale``, ``cov_factor`` or ``scale_tril``."""
    matrix = _linear_part(element)

    def linear(columns: Tensor) -> Tensor:
        return action(columns.mT, matrix).mT

    result = {"loc": action(moments["loc"], element)}
    if "scale_tril" in moments:
        return result | {"scale_tril": triangular(linear(moments["scale_tril"]))}
    result["scale"] = action(moments["scale"], matrix).abs()
    if "cov_factor" in moments:
        result["cov_factor"] = linear(moments["cov_factor"])
    return result


def _pushed_blocks(guide: AutoUnitBlocks, layout: GuideLayout, element: Element) -> AutoUnitBlocks:
    """The push-forward of unit blocks by an element that takes units to units.

    ``A`` puts the number at ``source[i]``, times ``factor[i]``, at place ``i``. The block that comes to a unit's places
    has its rows reordered if units of a neighbouring set are exchanged, too.
    """
    action, matrix = _affine(element, layout), _linear_part(element)
    loc, scale = guide.loc.detach(), guide.scale.detach()
    numbers = torch.arange(layout.dim, dtype=torch.float64, device=loc.device)
    source = action(numbers, element.group.element(element.permutations)).round().long()
    factor = action(torch.ones_like(loc), matrix)
    trils = []
    for positions, tril in zip(guide.positions, guide.scale_trils, strict=True):
        places = torch.full((layout.dim,), -1, device=loc.device)
        places[positions.flatten()] = torch.arange(positions.numel(), device=loc.device)
        found = places[source[positions]]
        unit, row = found // positions.shape[1], found % positions.shape[1]
        if bool((found < 0).any() or (unit != unit[:, :1]).any()):
            raise ValueError(
                "the element takes weights of one unit to several; a guide of unit blocks is pushed forward by "
                f"elements that exchange whole units of its own: {list(guide.group.units)}"
            )
        trils.append(triangular(tril[unit[:, :1], row] * factor[positions].unsqueeze(-1)))
    return AutoUnitBlocks._of_moments(layout, guide.group, action(loc, element), trils, scale[source] * factor.abs())


def _linear_part(element: Element) -> Element:
    """The element without its shifts."""
    return element.group.element(element.permutations, signs=element.signs, log_scales=element.log_scales)


def _affine(element: Any, layout: GuideLayout) -> Action:
    """The action on a guide's vectors.

    :raises TypeError: for what is no element of a group.
    :raises ValueError: unless a single element acts affinely on the unconstrained coordinates of these sites.
    """
    arguments.instance(
        "element", element, Element, "an element of a group, e.g. align(guide, reference, group).element"
    )
    if element.batch_shape:
        raise ValueError(
            f"element is a batch of shape {tuple(element.batch_shape)}; a guide is pushed forward by one element "
            "(element.select(0) is the first)"
        )
    group = element.group
    group.require_own(layout.site_shapes, "the guide")
    require_buffers(layout.site_shapes, group.buffers, "the guide")
    action = layout.action(group)
    for site in action.nonlinear_sites:
        raise ValueError(
            f"the element permutes the entries of site {site!r}, which are constrained together (its support is "
            f"{layout.transforms[site].codomain}); the push-forward of a Gaussian need not be one"
        )
    return action
