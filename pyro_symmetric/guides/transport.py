r"""Push-forwards, geodesics and barycentres of Gaussian guides, and a Gaussian fitted
to chains.

*Push-forward.* Permutations, scales, signs and shifts act on real sites by affine maps
:math:`g \cdot w = A w + b`, so

.. math:: g_\# \mathcal N(m, \Sigma) = \mathcal N(A m + b, A \Sigma A^\top) .

``A`` has one entry in each row: mean-field guides stay mean-field, and blocks that map
to blocks stay blocks.

*Barycentre.* Of mean-field guides :math:`q_i = \mathcal N(m_i,
\operatorname{diag}(s_i^2))` with weights
:math:`\lambda_i` that sum to one, the minimiser of :math:`\sum_i \lambda_i W_2^2(q,
    q_i)` has

.. math:: m = \sum_i \lambda_i m_i, \qquad s = \sum_i \lambda_i s_i

in unconstrained coordinates; the geodesic of two guides has :math:`\lambda = (1 - t,
t)`. Align the guides first: the midpoint of unaligned posteriors of a network mixes
unrelated units.

Reference: Rossi et al. 2023 (arXiv 2310.10171).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pyro.distributions import MultivariateNormal, Normal
from pyro.infer.autoguide import AutoDiagonalNormal, AutoGuide
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor
from torch.distributions import Independent

from pyro_symmetric import arguments
from pyro_symmetric.alignment.many import align_many
from pyro_symmetric.alignment.moments import (
    barycentre_gaussians,
    require_ends,
    to_gaussian,
)
from pyro_symmetric.arguments import as_tensor
from pyro_symmetric.discovery.model_carried import AUTO, Auto, carried_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import UnitBlocks
from pyro_symmetric.distributions.unit_blocks import in_blocks
from pyro_symmetric.groups import Action, Element, Group
from pyro_symmetric.groups.elements import require_buffers
from pyro_symmetric.guides.base import action_on, layout_of
from pyro_symmetric.guides.gaussian import AutoGaussian, plain_posterior
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import map_values


@torch.no_grad()
def push_forward(guide: AutoGuide, element: Element) -> AutoGaussian:
    """Return the push-forward of a Gaussian guide, the distribution of ``element(w)``
    for ``w ~ q``, as a guide.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = pyro.infer.autoguide.AutoDiagonalNormal(
    ...     model, init_loc_fn=lambda site: torch.tensor([1.0, 2.0, 3.0])
    ... )
    >>> draw = guide()
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> ps.push_forward(
    ...     guide, group.element({"unit": torch.tensor([2, 0, 1])})
    ... ).median()
    {'w': tensor([3., 1., 2.])}

    The moments are copied. Elements that move running statistics are refused, as these
    aren't sites of a guide; those of ``symmetry.holding(net)`` move none.

    :param guide: a set-up Gaussian guide, stock or ours; of a symmetrised guide the
        base is pushed forward.
    :param element: permutations, scales, signs and shifts. Permutations may also move
        sites that are constrained entry by entry (positive ones); the others move real
        sites only.
    :raises TypeError: if the guide isn't Gaussian, or ``element`` is no element of a
        group.
    :raises ValueError: for a batch of elements, for sites that the guide lacks or whose
        supports don't fit.
    """
    action = _affine_action(element, guide)
    if element.batch_shape:
        raise ValueError(
            f"element is a batch of shape {tuple(element.batch_shape)}; a guide is "
            "pushed forward by one element, such as element.select(0)"
        )
    normal = in_blocks(plain_posterior(guide))
    group = element.group
    # (A w)_i = factor_i w_{source_i}
    numbers = torch.arange(action.dim, dtype=torch.float64, device=normal.loc.device)
    source = action(numbers, group.element(element.permutations)).round().long()
    linear = group.element(
        element.permutations, signs=element.signs, log_scales=element.log_scales
    )
    factor = action(torch.ones_like(normal.loc), linear)
    trils = []
    for positions, tril in zip(normal.positions, normal.scale_trils, strict=True):
        entries = torch.full_like(source, -1)  # of the blocks: d * block + row
        entries[positions.flatten()] = torch.arange(
            positions.numel(), device=entries.device
        )
        entry = entries[source[positions]]
        block = entry // positions.shape[1]
        row = entry % positions.shape[1]
        if (entry < 0).any() or (block != block[:, :1]).any():
            raise ValueError(
                "the element takes weights of one unit to several; a guide of unit "
                "blocks is pushed forward by "
                "elements that exchange whole units of its own"
            )
        trils.append(
            triangular(tril[block[:, :1], row] * factor[positions].unsqueeze(-1))
        )
    loc = action(normal.loc, element)
    scale = normal.scale[source] * factor.abs()
    pushed = AutoGaussian(guide, UnitBlocks(loc, normal.positions, trils, scale))
    pushed.reads_store = False
    return pushed


def triangular(rows: Tensor) -> Tensor:
    """Return the Cholesky factors of ``rows @ rows.mT``, ``(n, d, d)``, by QR in
    float64, which loses no digits.
    """
    upper = torch.linalg.qr(rows.double().mT, mode="r").R
    signs = torch.where(upper.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(upper)
    return (upper * signs.unsqueeze(-1)).mT.to(rows.dtype)


def _affine_action(element: Element, guide: AutoGuide) -> Action:
    """Return the action on a guide's vectors; raise ``ValueError`` unless it is affine
    and of a single element.
    """
    arguments.instance(
        "element",
        element,
        Element,
        "an element of a group, as align(a, b, group).element is",
    )
    layout = layout_of(guide)
    group = element.group
    group.require_own(layout.site_shapes, "the guide")
    require_buffers(layout.site_shapes, group.buffers, "the guide")
    action = action_on(guide, group)
    if action.nonlinear_sites:
        raise ValueError(
            f"the element permutes the entries of {list(action.nonlinear_sites)}, "
            "which are constrained together: the "
            "push-forward of a Gaussian isn't Gaussian"
        )
    return action


def interpolate(guide_0: Any, guide_1: Any, t: float) -> Any:
    """Return the point ``t`` of the Wasserstein geodesic between two mean-field guides,
    as a guide.

    >>> first, second = {"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([4.0, 2.0])}
    >>> ps.interpolate(first, second, 0.25).loc
    {'w': tensor([1.0000, 0.5000])}

    :param guide_0: the end at ``t = 0``: what :func:`barycentre` takes, or a network.
    :param guide_1: the end at ``t = 1``.
    :param t: from 0 to 1.
    """
    arguments.number("t", t, least=0, most=1)
    return _barycentre((guide_0, guide_1), (1.0 - t, t), ("guide_0", "guide_1"))


def barycentre(
    guides: Sequence[Any], weights: Sequence[float] | Tensor | None = None
) -> Any:
    r"""Return the Wasserstein barycentre of mean-field guides, as a guide.

    >>> members = [{"w": torch.tensor([0.0, 0.0])}, {"w": torch.tensor([4.0, 2.0])}]
    >>> ps.barycentre(members, weights=[0.5, 0.5]).loc
    {'w': tensor([2., 1.])}

    :param guides: set-up mean-field guides of one model; or, without any guide,
        ``GaussianWeights``, weights (site -> tensor) and ``Posterior`` (by their
        moments), whose barycentre is ``GaussianWeights``.
    :param weights: :math:`\lambda`, not negative, normalised to sum to one; equal by
        default.
    :raises ValueError: for guides with correlations, whose barycentre has no closed
        form.
    """
    guides = arguments.listed("guides", guides, object, "guides, or of weights")
    if not guides:
        raise ValueError("guides is empty; a barycentre needs at least one")
    shares = as_tensor(
        [1.0] * len(guides) if weights is None else weights, dtype=torch.float64
    )
    total = float(shares.sum())
    if shares.shape != (len(guides),) or min(shares) < 0 or not 0 < total < torch.inf:
        raise ValueError(
            f"weights are {weights}; there must be {len(guides)} numbers, none "
            "negative, one a guide"
        )
    names = [f"guides[{k}]" for k in range(len(guides))]
    return _barycentre(guides, (shares / total).tolist(), names)


@torch.no_grad()
def _barycentre(
    guides: Sequence[Any], shares: Sequence[float], names: Sequence[str]
) -> Any:
    """Return the barycentre for shares that sum to one; messages call the guides by
    their names.
    """
    if len(kinds := {isinstance(guide, AutoGuide) for guide in guides}) > 1:
        types = [type(guide).__name__ for guide in guides]
        raise TypeError(f"{', '.join(names)} are {types}; pass only guides, or none")
    moments = [
        to_gaussian(guide, name) for guide, name in zip(guides, names, strict=True)
    ]
    for guide_moments in moments:
        require_ends(moments[0], guide_moments)
    centre = barycentre_gaussians(moments, shares)
    if kinds == {False}:
        return centre
    for guide, name in zip(guides, names, strict=True):
        if not isinstance(plain_posterior(guide), Independent):
            raise ValueError(
                f"{name} has correlations; barycentres and geodesics are those of "
                "mean-field guides"
            )
    layout = layout_of(guides[0])
    normal = Normal(layout.flatten(centre.loc), layout.flatten(centre.scale))
    mean = AutoGaussian(guides[0], normal.to_event(1))
    mean.reads_store = False
    return mean


def fit_gaussian(
    posterior: Posterior, symmetry: Symmetry | Group | Auto | None = AUTO
) -> AutoSymmetrized:
    """Fit a Gaussian of full rank to a posterior's draws, modulo symmetry, and
    symmetrise it.

    It has the mean and covariance of the aligned draws, with correlations shrunk by ``S
    / (S + D)`` for ``S`` draws in ``D`` dimensions, so that the covariance has full
    rank.

    For :func:`~pyro_symmetric.evidence`, fit one half of each chain; the other half,
    independent of the fit, is the ``posterior``:

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> posterior = ps.Posterior({"w": torch.randn(2, 100, 3)}, kind="chains").attach(
    ...     model
    ... )  # as ps.sample does
    >>> first, second = (
    ...     posterior.select(draws=half) for half in (slice(0, 50), slice(50, None))
    ... )
    >>> guide = ps.guides.fit_gaussian(first)
    >>> abs(ps.evidence(guide, posterior=second).best.log_evidence) < 0.5
    True

    :param posterior: draws with their model, as :func:`~pyro_symmetric.sample` returns
        them.
    :param symmetry: the symmetry, or finite group, of the model; ``"auto"`` finds it.
    :raises ValueError: if the posterior has no model; ``posterior.attach(model,
        *args)`` attaches one.
    """
    arguments.instance("posterior", posterior, Posterior, "a Posterior")
    if posterior.source is None:
        raise ValueError(
            "posterior has no model; attach it by posterior.attach(model, *args)"
        )
    if posterior.num_chains * posterior.num_samples < 2:
        raise ValueError("posterior is one draw, which has no covariance; give more")
    model, args, kwargs = posterior.source[:3]
    # priors may be improper
    draw = map_values(lambda draws: draws[0, 0], posterior.samples)
    prototype = AutoDiagonalNormal(model, init_loc_fn=init_to_value(values=draw))
    prototype._setup_prototype(*args, **kwargs)
    layout = layout_of(prototype)
    group = carried_symmetry(symmetry, posterior).group.finite
    aligned = align_many(posterior, group, progress=False).posterior
    vectors = layout.unconstrain(
        {site: aligned.samples[site].flatten(0, 1) for site in layout.site_shapes}
    )
    count, dim = vectors.shape
    covariance = vectors.double().mT.cov()
    shrunk = torch.lerp(
        covariance.diagonal().diag_embed(), covariance, count / (count + dim)
    )
    tril = torch.linalg.cholesky(shrunk).to(vectors.dtype)
    gaussian = AutoGaussian(
        prototype, MultivariateNormal(vectors.mean(0), scale_tril=tril)
    )
    fitted = AutoSymmetrized(model, group, gaussian)
    fitted.reads_store = False
    return fitted.setup(*args, **kwargs)
