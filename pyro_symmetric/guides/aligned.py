r"""Push-forward guides.

If ``w ~ q`` and the model is invariant under ``g``, then ``g·w`` explains the data as well as ``w``. The push-forward
:math:`g_\# q` is the distribution of ``g·w``. Permutations, scalings, signs and shifts act on real sites by affine maps
:math:`g \cdot w = A w + b`, so the push-forward of a Gaussian is one:

.. math:: g_\# \mathcal N(m, \Sigma) = \mathcal N(A m + b,\; A \Sigma A^\top) .

``A`` has one entry in each row: mean-field guides stay mean-field, and low-rank guides keep their rank.

Reference: Rossi et al. 2023 (arXiv 2310.10171), sections 3 and 4 (permutations of mean-field Gaussians).
"""

from __future__ import annotations

from typing import Any

from pyro.infer.autoguide import AutoGuide

from pyro_symmetric.guides.affine import AffineAction
from pyro_symmetric.guides.gaussian import (
    AutoFullRank,
    AutoLowRank,
    AutoMeanField,
    GaussianGuide,
    family_and_moments,
)
from pyro_symmetric.guides.layout import layout_of
from pyro_symmetric.guides.modes import AutoModes
from pyro_symmetric.symmetry.weight_symmetry import Action, WeightSymmetry, acted_on


def push_forward(guide: AutoGuide, element: Action) -> GaussianGuide | AutoModes:
    """The distribution of ``element(w)`` for ``w`` drawn from a Gaussian guide, as a guide of its own.

    The moments are copied, so training either guide later doesn't change the other. The result needs no model to draw
    from, can be trained further with stock SVI, and can be saved. ``symmetry.act(element, guide)`` does the same.
    Running statistics aren't sites of a guide: elements that move some are refused; those of ``symmetry.holding(net)``
    don't.

    :param guide: a set-up guide: ``AutoNormal`` or ``AutoDiagonalNormal`` (then the result is an
        :class:`AutoMeanField`), ``AutoLowRankMultivariateNormal`` (:class:`AutoLowRank`), ``AutoMultivariateNormal``
        (:class:`AutoFullRank`), or one of ours; of a symmetrised guide, its base is pushed forward. All components of
        an :class:`AutoModes` are moved alike.
    :param element: a permutation, scaling, sign, shift, or all together. Permutations may also move sites that are
        constrained entry by entry (positive ones), the others move real sites only.
    :raises TypeError: if the guide isn't Gaussian.
    :raises ValueError: for a batch of elements, for sites that the guide lacks or whose supports don't fit.
    """
    sites = layout_of(guide)
    action = AffineAction(element, sites)
    if isinstance(guide, AutoModes):
        modes = [action.pushed(moments) for moments in guide.moments()]
        return AutoModes.of_moments(sites, guide.family, modes, guide.logits, train_weights=guide.train_weights)
    family, moments = family_and_moments(guide)
    return family(sites, **action.pushed(moments))


@acted_on.register(AutoGuide)
def _(target: AutoGuide, element: Action, symmetry: WeightSymmetry) -> GaussianGuide | AutoModes:
    return push_forward(target, element)


class AutoAligned(GaussianGuide):
    """The push-forward ``P#q`` of a Gaussian guide by an element of a group: draws are ``P(w)`` for ``w ~ q``.

    It is of the guide's own family, correlations included: what comes out is an :class:`AutoMeanField`, an
    :class:`AutoLowRank` or an :class:`AutoFullRank` as well, and comes back from a file as that. The moments are
    copied, so training either guide later doesn't change the other. Mixtures are moved by :func:`push_forward`.

    >>> aligned = AutoAligned(guide, align(guide, reference, group).element)

    :param guide: a set-up Gaussian guide, stock or ours; of a symmetrised guide, its base counts.
    :param element: a permutation, scaling, sign, shift, or all together, as :func:`push_forward` takes them.
    :raises TypeError: if the guide isn't Gaussian, or the element is none.
    :raises ValueError: for a batch of elements, for sites that the guide lacks or whose supports don't fit.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> AutoAligned:
        if cls is AutoAligned:
            guide = args[0] if args else kwargs.get("guide")
            if isinstance(guide, AutoModes):
                raise TypeError("guide is a mixture, AutoModes; push_forward(guide, element) moves all of its modes")
            if isinstance(guide, AutoGuide):
                cls = _ALIGNED[family_and_moments(guide)[0]]
        return super().__new__(cls)

    def __init__(self, guide: AutoGuide, element: Action):
        if not isinstance(guide, AutoGuide):
            raise TypeError(f"guide is a {type(guide).__name__}; it must be a set-up Gaussian guide")
        sites = layout_of(guide)
        super().__init__(sites, **AffineAction(element, sites).pushed(family_and_moments(guide)[1]))


# small steps --------------------------------------------------------------------------------------------------------


class AlignedMeanField(AutoAligned, AutoMeanField):
    """Of a mean-field guide."""


class AlignedLowRank(AutoAligned, AutoLowRank):
    """Of a guide of low rank."""


class AlignedFullRank(AutoAligned, AutoFullRank):
    """Of a guide of full rank."""


_ALIGNED: dict[type[GaussianGuide], type[AutoAligned]] = {
    AutoMeanField: AlignedMeanField,
    AutoLowRank: AlignedLowRank,
    AutoFullRank: AlignedFullRank,
}
