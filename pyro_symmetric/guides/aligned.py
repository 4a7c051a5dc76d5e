r"""Push-forward guides and what lies between two of them.

If ``w ~ q`` and the model is invariant under ``P``, then ``P·w`` explains the data as well as ``w``. The push-forward
:math:`P_\# q` is the distribution of ``P·w``; for a mean-field Gaussian it is the Gaussian of permuted means and
    deviations.

Reference: Rossi et al. 2023 (arXiv 2310.10171), sections 3 and 4.
"""

from __future__ import annotations

from typing import Any

import torch
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuide
from torch import Tensor

from pyro_symmetric.alignment.gaussian import GaussianWeights, to_gaussian
from pyro_symmetric.alignment.geodesic import interpolate_gaussians
from pyro_symmetric.guides.base import WeightsGuide
from pyro_symmetric.guides.layout import LayoutModel, SiteLayout, action_on, layout_of
from pyro_symmetric.symmetry.permutation import FlatAction, Permutation


class AutoMeanField(WeightsGuide, AutoDiagonalNormal):
    """A mean-field Gaussian guide with given moments: what alignment, interpolation and loading make.

    It has parameters of its own from the start, needs no model to draw from, and can be trained further with stock SVI.

    :param sites: the layout, e.g. ``layout_of(other_guide)``.
    :param loc: means of the concatenated unconstrained sites, ``(D,)``.
    :param scale: standard deviations, ``(D,)``.
    """

    def __init__(self, sites: tuple[SiteLayout, ...], loc: Tensor, scale: Tensor):
        model = LayoutModel(sites, loc)
        super().__init__(model, init_loc_fn=model.init_loc_fn)
        self.setup()
        with torch.no_grad():
            self.loc.copy_(loc)
        self.scale = scale.detach().clone()  # type: ignore[assignment]  # a PyroParam by its class


class AutoAligned(AutoMeanField):
    """The push-forward ``P#q`` of a mean-field Gaussian guide by a permutation: draws are ``P(w)`` for ``w ~ q``.

    The moments are copied, so training either guide later doesn't change the other.

    :param guide: a set-up guide with Gaussian moments, stock or ours (correlations, if it has any, are dropped).
    :param permutation: one element of the group, e.g. ``align(guide, reference, group).permutation``.
    """

    def __init__(self, guide: AutoGuide, permutation: Permutation):
        if not isinstance(permutation, Permutation):
            raise TypeError(
                f"permutation is a {type(permutation).__name__}; it must be a Permutation, e.g. "
                "align(guide, reference, group).permutation"
            )
        if permutation.batch_shape:
            raise ValueError(
                f"permutation is a batch of shape {tuple(permutation.batch_shape)}; a guide is pushed forward by one "
                f"element "
                "(permutation.select(0) is the first)"
            )
        sites = layout_of(guide)
        action = action_on(sites, permutation.group)
        if not isinstance(action, FlatAction):
            raise ValueError(
                "the permutation moves sites whose entries are constrained together, where the push-forward of a "
                "Gaussian need not be one; "
                f"the guide's supports are { {site.name: str(site.support) for site in sites} }"
            )
        loc, scale = flat_moments(to_gaussian(guide), sites)
        element = Permutation(action.group, permutation.images)
        super().__init__(sites, action(loc, element), action(scale, element))


def interpolate(guide_0: AutoGuide, guide_1: AutoGuide, t: float) -> AutoMeanField:
    r"""The point ``t`` of the Wasserstein geodesic between two mean-field Gaussian guides, as a guide of its own.

    .. math:: m_t = (1-t)\, m_0 + t\, m_1, \qquad s_t = (1-t)\, s_0 + t\, s_1

    Align the guides first: between unaligned posteriors the midpoint is a mixture of unrelated units.
    """
    sites = layout_of(guide_0)
    moments = interpolate_gaussians(to_gaussian(guide_0), to_gaussian(guide_1), t)
    return AutoMeanField(sites, *flat_moments(moments, sites))


def flat_moments(moments: GaussianWeights, sites: tuple[SiteLayout, ...]) -> tuple[Tensor, Tensor]:
    """Means and deviations concatenated in the layout's order."""

    def flat(values: dict[str, Any]) -> Tensor:
        return torch.cat([values[site.name].reshape(-1) for site in sites])

    return flat(dict(moments.loc)), flat(dict(moments.scale))
