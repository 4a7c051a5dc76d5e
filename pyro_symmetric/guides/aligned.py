r"""Push-forward guides and what lies between two of them.

If ``w ~ q`` and the model is invariant under ``g``, then ``g·w`` explains the data as well as ``w``. The push-forward
:math:`g_\# q` is the distribution of ``g·w``. Permutations, scalings, signs and shifts act on real sites by affine maps
:math:`g \cdot w = A w + b`, so the push-forward of a Gaussian is one:

.. math:: g_\# \mathcal N(m, \Sigma) = \mathcal N(A m + b,\; A \Sigma A^\top) .

``A`` has one entry in each row: mean-field guides stay mean-field, and low-rank guides keep their rank.

Reference: Rossi et al. 2023 (arXiv 2310.10171), sections 3 and 4 (permutations of mean-field Gaussians).
"""

from __future__ import annotations

from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import constraints

from pyro_symmetric.alignment.gaussian import to_gaussian
from pyro_symmetric.alignment.geodesic import interpolate_gaussians
from pyro_symmetric.distributions.constrained import commutes_with_permutations
from pyro_symmetric.guides.gaussian import AutoMeanField, GaussianGuide, family_and_moments, flat_moments
from pyro_symmetric.guides.layout import SiteLayout, layout_of
from pyro_symmetric.symmetry.permutation import Permutation
from pyro_symmetric.symmetry.rescaling import Multipliers
from pyro_symmetric.symmetry.shift import Shift
from pyro_symmetric.symmetry.weight_symmetry import Action, WeightSymmetry, acted_on
from pyro_symmetric.symmetry.weights import flatten, unflatten


def push_forward(guide: AutoGuide, element: Action) -> GaussianGuide:
    """The distribution of ``element(w)`` for ``w`` drawn from a Gaussian guide, as a guide of its own.

    The moments are copied, so training either guide later doesn't change the other. The result needs no model to draw
    from, can be trained further with stock SVI, and can be saved. ``symmetry.act(element, guide)`` does the same.
    Running statistics aren't sites of a guide: where the element moves some, ``symmetry.act(element, net)`` moves those
    of the network.

    :param guide: a set-up guide: ``AutoNormal`` or ``AutoDiagonalNormal`` (then the result is an
        :class:`AutoMeanField`), ``AutoLowRankMultivariateNormal`` (:class:`AutoLowRank`), ``AutoMultivariateNormal``
        (:class:`AutoFullRank`), or one of ours; of a symmetrised guide, its base is pushed forward.
    :param element: a permutation, scaling, sign, shift, or all together. Permutations may also move sites that are
        constrained entry by entry (positive ones), the others move real sites only.
    :raises TypeError: if the guide isn't Gaussian.
    :raises ValueError: for a batch of elements, for sites that the guide lacks or whose supports don't fit.
    """
    sites = layout_of(guide)
    family, moments = family_and_moments(guide)
    action = _AffineAction(element, sites)
    loc = moments["loc"]
    if "scale_tril" in moments:
        return family(sites, loc=action(loc), scale_tril=_triangular(action.linear(loc, moments["scale_tril"])))
    spread = {"scale": action.linear(loc, moments["scale"].unsqueeze(-1)).squeeze(-1).abs()}
    if "cov_factor" in moments:
        spread["cov_factor"] = action.linear(loc, moments["cov_factor"])
    return family(sites, loc=action(loc), **spread)


@acted_on.register(AutoGuide)
def _(target: AutoGuide, element: Action, symmetry: WeightSymmetry) -> GaussianGuide:
    return push_forward(target, element)


class AutoAligned(AutoMeanField):
    """The push-forward ``P#q`` of a mean-field Gaussian guide by a permutation: draws are ``P(w)`` for ``w ~ q``.

    The moments are copied, so training either guide later doesn't change the other. :func:`push_forward` takes any
    element, and keeps correlations.

    :param guide: a set-up guide with Gaussian moments, stock or ours (correlations, if it has any, are dropped).
    :param permutation: one element of the group, e.g. ``align(guide, reference, group).permutation``.
    """

    def __init__(self, guide: AutoGuide, permutation: Permutation):
        if not isinstance(permutation, Permutation):
            raise TypeError(
                f"permutation is a {type(permutation).__name__}; it must be a Permutation, e.g. "
                "align(guide, reference, group).permutation"
            )
        sites = layout_of(guide)
        action = _AffineAction(permutation, sites)
        loc, scale = flat_moments(to_gaussian(guide), sites)
        super().__init__(sites, action(loc), action(scale))


def interpolate(guide_0: AutoGuide, guide_1: AutoGuide, t: float) -> AutoMeanField:
    r"""The point ``t`` of the Wasserstein geodesic between two mean-field Gaussian guides, as a guide of its own.

    .. math:: m_t = (1-t)\, m_0 + t\, m_1, \qquad s_t = (1-t)\, s_0 + t\, s_1

    Align the guides first: between unaligned posteriors the midpoint is a mixture of unrelated units.
    """
    sites = layout_of(guide_0)
    moments = interpolate_gaussians(to_gaussian(guide_0), to_gaussian(guide_1), t)
    return AutoMeanField(sites, *flat_moments(moments, sites))


# small steps --------------------------------------------------------------------------------------------------------


class _AffineAction:
    """How one element acts on a guide's flat unconstrained vectors, ``batch_shape + (D,)``."""

    def __init__(self, element: Action, sites: tuple[SiteLayout, ...]):
        self.steps: tuple[Any, ...] = getattr(element, "steps", (element,))  # of a product, the first one first
        self.names = [site.name for site in sites]
        self.shapes = {site.name: site.unconstrained_shape for site in sites}
        for step in self.steps:
            _require_affine(step, {site.name: site for site in sites})

    def __call__(self, vector: Tensor) -> Tensor:
        weights = unflatten(vector, self.names, self.shapes)
        for step in self.steps:
            moved = {site: weights[site] for site in step.group.required_sites}
            weights |= step(moved) if moved else {}
        return flatten(weights, self.names, self.shapes)

    def linear(self, loc: Tensor, columns: Tensor) -> Tensor:
        """The linear part on the columns of ``(D, k)``: the action's derivative, which no constant can spoil."""
        rows = columns.mT.contiguous()
        moved = torch.func.jvp(self, (loc.expand_as(rows).contiguous(),), (rows,))[1]
        return moved.mT.contiguous()


def _require_affine(step: Any, sites: dict[str, SiteLayout]) -> None:
    """:raises ValueError: unless one step of an element acts affinely on these unconstrained sites."""
    if not isinstance(step, Permutation | Multipliers | Shift):
        raise TypeError(
            f"element is a {type(step).__name__}; it must be a Permutation, Scaling, Sign, Shift, or a product of them"
        )
    if step.batch_shape:
        raise ValueError(
            f"element is a batch of shape {tuple(step.batch_shape)}; a guide is pushed forward by one element "
            "(element.select(0) is the first)"
        )
    shapes = step.group.site_shapes
    for name in step.group.required_sites:
        if name not in sites:
            raise ValueError(
                f"the element moves the site {name!r}, which the guide doesn't have; the guide's sites are "
                f"{sorted(sites)}. Where the network is an attribute 'net' of the model, take elements of "
                "symmetry.prefixed('net')"
            )
        site = sites[name]
        if torch.Size(site.shape) != shapes[name]:
            raise ValueError(
                f"site {name!r} has shape {tuple(site.shape)} in the guide, but {tuple(shapes[name])} in the group"
            )
        if isinstance(step, Permutation):
            if not commutes_with_permutations(site.support):
                raise ValueError(
                    f"the element permutes the entries of site {name!r}, which are constrained together (its support "
                    f"is {site.support}); the push-forward of a Gaussian need not be one"
                )
        elif getattr(site.support, "base_constraint", site.support) is not constraints.real:
            raise ValueError(
                f"the element is a {type(step).__name__} of site {name!r}, whose support is {site.support}; the "
                "push-forward of a Gaussian is one for real sites only"
            )


def _triangular(rows: Tensor) -> Tensor:
    """The Cholesky factor of ``rows @ rows.mT``, by a QR decomposition in float64: no squares, no lost digits."""
    upper = torch.linalg.qr(rows.double().mT, mode="r").R
    signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper)
    return (upper * signs.unsqueeze(-1)).mT.to(rows.dtype)
