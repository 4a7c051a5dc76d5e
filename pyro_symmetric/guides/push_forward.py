r"""Push-forward guides: the distribution :math:`g_\# q` of ``g·w`` for ``w ~ q`` (Rossi et al. 2023, arXiv 2310.10171).

Permutations, scales, signs and shifts act on real sites by affine maps :math:`g \cdot w = A w + b`, so the push-forward
of a Gaussian is :math:`g_\# \mathcal N(m, \Sigma) = \mathcal N(A m + b, A \Sigma A^\top)`. ``A`` has one entry in each
row: mean-field guides stay mean-field, and blocks stay blocks if they go to blocks.
"""

from __future__ import annotations

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.distributions import UnitBlocks
from pyro_symmetric.groups import Action, Element
from pyro_symmetric.groups.element import require_buffers
from pyro_symmetric.guides.base import action_on, layout_of
from pyro_symmetric.guides.gaussian import AutoGaussian, in_blocks, plain_posterior


@torch.no_grad()
def push_forward(guide: AutoGuide, element: Element) -> AutoGaussian:
    """The distribution of ``element(w)`` for ``w`` drawn from a Gaussian guide, as a guide of its own.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = pyro.infer.autoguide.AutoDiagonalNormal(model, init_loc_fn=lambda site: torch.tensor([1.0, 2.0, 3.0]))
    >>> draw = guide()
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> ps.push_forward(guide, group.element({"unit": torch.tensor([2, 0, 1])})).median()
    {'w': tensor([3., 1., 2.])}

    The moments are copied. Running statistics aren't sites of a guide: elements that move some are refused; those of
    ``symmetry.holding(net)`` don't.

    :param guide: a set-up Gaussian guide, stock or ours; of a symmetrised guide, its base is pushed forward.
    :param element: permutations, scales, signs and shifts. Permutations may also move sites that are constrained entry
        by entry (positive ones), the others move real sites only.
    :raises TypeError: if the guide isn't Gaussian, or ``element`` is no element of a group.
    :raises ValueError: for a batch of elements, for sites that the guide lacks or whose supports don't fit.
    """
    action, given, group = _affine(element, guide), in_blocks(plain_posterior(guide)), element.group
    # ``A`` puts the number at ``source[i]``, times ``factor[i]``, at place ``i``.
    numbers = torch.arange(action.dim, dtype=torch.float64, device=given.loc.device)
    source = action(numbers, group.element(element.permutations)).round().long()
    linear = group.element(element.permutations, signs=element.signs, log_scales=element.log_scales)
    factor, trils = action(torch.ones_like(given.loc), linear), []
    for positions, tril in zip(given.positions, given.scale_trils, strict=True):
        places = torch.full_like(source, -1)
        places[positions.flatten()] = torch.arange(positions.numel(), device=places.device)
        found = places[source[positions]]
        block, row = found // positions.shape[1], found % positions.shape[1]
        if bool((found < 0).any() or (block != block[:, :1]).any()):
            raise ValueError(
                "the element takes weights of one unit to several; a guide of unit blocks is pushed forward by "
                "elements that exchange whole units of its own"
            )
        trils.append(triangular(tril[block[:, :1], row] * factor[positions].unsqueeze(-1)))
    loc, scale = action(given.loc, element), given.scale[source] * factor.abs()
    return AutoGaussian(guide, UnitBlocks(loc, given.positions, trils, scale))


def triangular(rows: Tensor) -> Tensor:
    """The Cholesky factors of ``rows @ rows.mT``, ``(n, d, d)``, by a QR decomposition in float64: no squares, no lost
    digits."""
    upper = torch.linalg.qr(rows.double().mT, mode="r").R
    signs = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(upper)
    return (upper * signs.unsqueeze(-1)).mT.to(rows.dtype)


def _affine(element: Element, guide: AutoGuide) -> Action:
    """The action on a guide's vectors.

    :raises TypeError: for what is no element of a group.
    :raises ValueError: unless a single element acts affinely on the unconstrained coordinates of the guide's sites.
    """
    arguments.instance("element", element, Element, "an element of a group, as align(a, b, group).element is")
    if element.batch_shape:
        raise ValueError(
            f"element is a batch of shape {tuple(element.batch_shape)}; a guide is pushed forward by one element "
            "(element.select(0) is the first)"
        )
    layout, group = layout_of(guide), element.group
    group.require_own(layout.site_shapes, "the guide")
    require_buffers(layout.site_shapes, group.buffers, "the guide")
    action = action_on(guide, group)
    if action.nonlinear_sites:
        raise ValueError(
            f"the element permutes the entries of {list(action.nonlinear_sites)}, which are constrained together; the "
            "push-forward of a Gaussian need not be one"
        )
    return action
