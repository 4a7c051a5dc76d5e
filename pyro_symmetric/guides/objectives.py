r"""ELBOs with less noise: with a divergence from the prior by a formula, or with a draw of every mode.

.. math:: \mathrm{ELBO}(\bar q) = \mathbb E_q \log p(D \mid w) - \mathrm{KL}(q \,\|\, p)
          + \underbrace{\mathbb E_q [\log q(w) - \log \bar q(w)]}_{I(g;\, w)}

For a Gaussian base and Gaussian priors :math:`-\mathrm{KL}(q\|p) = \mathrm H(q) + \mathbb E_q \log p(w)` is known, so
only the likelihood and the information :math:`I(g; w)` are estimated from draws. Pyro's own ``TraceMeanField_ELBO`` has
no such formula for automatic guides: their draws are deltas beside an auxiliary site.

Reference: Gelberg et al. 2024 (arXiv 2408.05496), Section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask, sum_rightmost
from pyro.infer import Trace_ELBO
from pyro.infer.util import torch_item
from torch import Tensor
from torch.distributions import (
    Distribution,
    Independent,
    LogNormal,
    LowRankMultivariateNormal,
    MultivariateNormal,
    Normal,
    biject_to,
)

from pyro_symmetric import arguments
from pyro_symmetric.distributions import Modes, Symmetrized, UnitBlocks
from pyro_symmetric.guides.gaussian import plain
from pyro_symmetric.guides.modes import AutoModes


class OwnParticle_ELBO(Trace_ELBO):
    """An ELBO whose value and gradient are both what ``_differentiable_loss_particle`` makes of a pair of traces.

    Pyro's own ``loss`` sums log-densities by itself, whatever a subclass makes of them.
    """

    def __init__(
        self,
        num_particles: int = 1,
        max_plate_nesting: float = math.inf,
        *,
        vectorize_particles: bool = False,
        strict_enumeration_warning: bool = True,
        retain_graph: bool | None = None,
    ):
        if max_plate_nesting != math.inf:
            arguments.whole("max_plate_nesting", max_plate_nesting, 0)
        super().__init__(
            arguments.whole("num_particles", num_particles, 1),
            max_plate_nesting,
            vectorize_particles=arguments.flag("vectorize_particles", vectorize_particles),
            strict_enumeration_warning=strict_enumeration_warning,
            retain_graph=retain_graph,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_particles} draw{'s' * (self.num_particles != 1)} a step)"

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """An estimate of the negative ELBO."""
        return torch_item(self.differentiable_loss(model, guide, *args, **kwargs))


class SymmetrizedMeanField_ELBO(OwnParticle_ELBO):
    """An ELBO with an analytic divergence from the prior, for guides with one flat Gaussian, symmetrised or not.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> guide = ps.AutoSymmetrized(model, group)
    >>> svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=ps.SymmetrizedMeanField_ELBO())
    >>> losses = [svi.step() for _ in range(50)]
    >>> losses[-1] < losses[0]
    True

    It estimates the same number as :class:`~pyro.infer.Trace_ELBO`, with the same arguments and less noise. What it
    takes from a formula:

    * the entropy of a Gaussian base, whatever its covariance;
    * the expected log-density of each site with a normal or log-normal prior, whose parameters may depend on other
      latent sites if the base is mean-field (a hierarchical prior given its scale), and may not otherwise.

    All else is estimated from the same draw of the guide: other priors, a base that is a normalising flow (then nothing
    is left to a formula, and this is ``Trace_ELBO``), the likelihood, the information of the symmetrisation.

    Several particles run in one batched pass with ``num_particles=K, vectorize_particles=True``, mini-batches included,
    if the model can be run under a plate of particles: every :class:`~pyro_symmetric.models.BayesianModel` can, a
    ``PyroModule`` with :class:`torch.nn.Linear` layers can't.

    :raises TypeError: in the first step, for a guide that isn't ``AutoSymmetrized``, ``AutoDiagonalNormal`` or another
        guide that draws one flat reparametrised vector.
    """

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        # Which prior depends on which site is told by gradients, even if the caller has switched them off.
        with torch.enable_grad():
            return super()._get_trace(model, guide, args, kwargs)

    def _differentiable_loss_particle(self, model_trace: Any, guide_trace: Any) -> tuple[float, Tensor]:
        latent = _flat_latent_site(model_trace, guide_trace)
        base = _base_of(latent["fn"])
        if isinstance(base, Modes):
            raise TypeError("SymmetrizedMeanField_ELBO has no formula for a guide with several modes; use Modes_ELBO")
        inner = base.base_dist if isinstance(base, Independent) else base
        analytic = isinstance(inner, Normal | MultivariateNormal | LowRankMultivariateNormal | UnitBlocks)
        elbo = _entropy_and_information(latent, base, analytic)
        position = 0
        for name, site in guide_trace.nodes.items():
            if site["type"] != "sample" or site is latent or name not in model_trace.nodes:
                continue
            prior = model_trace.nodes[name]
            shape = biject_to(prior["fn"].support).inverse_shape(site["value"].shape)
            size = shape.numel() // latent["value"].shape[:-1].numel()  # coordinates of the flat vector
            expected = None
            if analytic:
                expected = _expected_log_prob(prior, latent["value"], inner, slice(position, position + size))
            # A sampled prior needs the volume of the map to its support; the guide's delta carries it.
            elbo = elbo + (prior["log_prob_sum"] - site["log_prob_sum"] if expected is None else expected)
            position += size
        for site in model_trace.nodes.values():
            if site["type"] == "sample" and site["is_observed"]:
                elbo = elbo + site["log_prob_sum"]
        return -torch_item(elbo), -elbo


class Modes_ELBO(OwnParticle_ELBO):
    r"""The ELBO of :class:`~pyro_symmetric.guides.AutoModes`, symmetrised or not, by one draw of each mode.

    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> guide = ps.AutoModes(model, num_modes=2)
    >>> svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=ps.Modes_ELBO())
    >>> losses = [svi.step() for _ in range(50)]
    >>> losses[-1] < losses[0]
    True

    It estimates the same number as :class:`~pyro.infer.Trace_ELBO`, with the same arguments and less noise.

    .. math:: \mathrm{ELBO}(q) = \sum_k \pi_k\, \mathbb E_{q_k}[\log p(w, D) - \log q(w)]

    Drawn as it stands, with one draw of each component, the sum is differentiated exactly in the weights :math:`\pi`:
    the noise of a score function, which is as large as the ELBO itself, doesn't arise, nor do rare modes go without
    gradient. The price is one run of the model for each mode.

    Reference: Roeder, Wu & Duvenaud 2017 (arXiv 1703.09194), section 6 (stratified mixtures).

    :param num_particles: how often every mode is drawn in a step.
    :param vectorize_particles: run all draws of all modes in one batched pass, if the model can be run under a plate of
        particles: every :class:`~pyro_symmetric.models.BayesianModel` can.
    :raises TypeError: in the first step, for a guide without modes.
    """

    num_modes = 2  # of the guide that ran last; before the first, it makes room for a plate of particles

    @property
    def num_particles(self) -> int:
        """All draws of a step."""
        return self._draws_of_each * self.num_modes

    @num_particles.setter
    def num_particles(self, value: int) -> None:
        self._draws_of_each = value

    def _get_traces(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Iterator[Any]:
        modes = plain(guide)
        if not isinstance(modes, AutoModes):
            raise TypeError(
                f"Modes_ELBO needs a guide with several modes, AutoModes or AutoSymmetrized over it; found "
                f"{type(guide).__name__}. Use Trace_ELBO for it"
            )
        self.num_modes = modes.num_modes
        if self.vectorize_particles and math.isinf(self.max_plate_nesting):
            self._guess_max_plate_nesting(model, guide, args, kwargs)
        run = self._get_vectorized_trace if self.vectorize_particles else self._get_trace
        for draw in range(1 if self.vectorize_particles else self.num_particles):
            with modes.stratified(draw % self.num_modes):
                traces = run(model, guide, args, kwargs)
            yield traces

    def _differentiable_loss_particle(self, model_trace: Any, guide_trace: Any) -> tuple[float, Tensor]:
        latent = _flat_latent_site(model_trace, guide_trace)
        mixture, count = _base_of(latent["fn"]), latent["value"].shape[:-1].numel()
        log_ratio: Any = 0.0
        for trace, sign in ((model_trace, 1), (guide_trace, -1)):
            for site in trace.nodes.values():
                if site["type"] == "sample":
                    log_ratio = log_ratio + sign * _by_draw(site["log_prob"], count)
        log_ratio = log_ratio.reshape(count)
        which = ((mixture.stratum or 0) + torch.arange(count, device=log_ratio.device)) % self.num_modes
        elbo = self.num_modes * (mixture.log_weights.exp()[which] * log_ratio).sum()
        return -torch_item(elbo), -elbo


# small steps --------------------------------------------------------------------------------------------------------


def _base_of(distribution: Any) -> Any:
    """The base that is symmetrised, or the distribution itself."""
    return distribution.base_distribution if isinstance(distribution, Symmetrized) else distribution


def _flat_latent_site(model_trace: Any, guide_trace: Any) -> Any:
    """The site of the guide's flat vector, of which all its other sites are pieces."""
    sites = [
        site
        for name, site in guide_trace.nodes.items()
        if site["type"] == "sample" and name not in model_trace.nodes and site["infer"].get("is_auxiliary")
    ]
    if len(sites) != 1 or not getattr(sites[0]["fn"], "has_rsample", False) or sites[0]["fn"].event_dim != 1:
        raise TypeError(
            "SymmetrizedMeanField_ELBO needs a guide that draws all sites from one flat, reparametrised vector, such "
            "as AutoSymmetrized, AutoDiagonalNormal or AutoMultivariateNormal (AutoNormal has a vector for each site); "
            f"this guide has {len(sites)} such sites. Use Trace_ELBO or TraceMeanField_ELBO for it"
        )
    return sites[0]


def _entropy_and_information(latent: Any, base: Distribution, analytic: bool) -> Tensor:
    r""":math:`\mathrm H(q) + \log q(u) - \log \bar q(u)`; without a formula for the first, :math:`-\log \bar q(u)`."""
    sampled = -latent["score_parts"].entropy_term.sum()
    if not analytic:
        return sampled
    entropy = scale_and_mask(base.entropy(), latent["scale"], latent["mask"]).sum()
    if not isinstance(latent["fn"], Symmetrized):
        return entropy
    own = latent["fn"].scored_distribution.log_prob(latent["value"])
    return entropy + scale_and_mask(own, latent["scale"], latent["mask"]).sum() + sampled


def _expected_log_prob(prior: Any, latent: Tensor, gaussian: Any, where: slice) -> Tensor | None:
    r""":math:`\mathbb E_q \log p` of one site in unconstrained coordinates; None if there is no formula.

    .. math:: \mathbb E_{\mathcal N(m, v)} \log \mathcal N(u; \mu, s) = \log \mathcal N(m; \mu, s) - v / 2 s^2

    :param gaussian: the base; its coordinates ``where`` are the site's.
    """
    normal = _as_normal(prior["fn"])
    if normal is None:
        return None
    # Independent of other sites? If the draw itself carries no gradient, that can't be told.
    fixed = latent.requires_grad and not normal.loc.requires_grad and not normal.scale.requires_grad
    if not fixed and not isinstance(gaussian, Normal):
        return None
    shape = prior["value"].shape
    loc, variance = (
        moment[..., where].expand(*latent.shape[:-1], -1).reshape(shape)
        for moment in (gaussian.mean, gaussian.variance)
    )
    terms = sum_rightmost(normal.log_prob(loc) - variance / (2 * normal.scale**2), prior["fn"].event_dim)
    return scale_and_mask(terms, prior["scale"], prior["mask"]).sum()


def _as_normal(prior: Distribution) -> Normal | None:
    """The prior as independent normals in unconstrained coordinates, if it is that."""
    while isinstance(prior, Independent):
        prior = prior.base_dist
    if not isinstance(prior, Normal | LogNormal):  # the bijection to positive numbers is exp
        return None
    return Normal(prior.loc, prior.scale, validate_args=False)


def _by_draw(log_prob: Tensor, count: int) -> Tensor:
    """Summed over all but the draws, whose plate is the outermost. Of a single draw a number: the zero of a
    site that its guide maps by the identity may lie on the CPU, and only numbers may be added across devices."""
    return log_prob.sum() if count == 1 else log_prob.reshape(count, -1).sum(-1)
