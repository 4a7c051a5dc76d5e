r"""The value of a symmetrised guide, and the evidence of its model: bounds, importance sampling, a bridge to chains.

.. math:: \mathrm{ELBO}(q) = \mathbb E_q[\log p(w, D) - \log q(w)] \;\le\; \mathrm{ELBO}(\bar q)
   \;\le\; \log p(D) = \log \mathbb E_{\bar q}\big[e^{\ell(w)}\big], \qquad \ell(w) = \log p(w, D) - \log \bar q(w)

*Importance sampling* averages :math:`e^{\ell}` over draws of the guide, whose weights' tail tells how far to trust it;
*bridge sampling* uses draws of the posterior, too, in any copies: :mod:`~pyro_symmetric.guides.log_ratios`.

An estimate of :math:`\log \bar q` leaves all of this as it is: then :math:`e^{\ell}` is the ratio of two densities of
the weights together with the elements that the estimate drew. The bounds: Gelberg et al. 2024 (arXiv 2408.05496),
Section 4; why copies count: Neal 1999 ("Erroneous results in 'Marginal likelihood from the Gibbs output'").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.discovery.model_check import check_function
from pyro_symmetric.distributions import OrbitEstimator, usual_estimator
from pyro_symmetric.distributions.estimators import require_estimator
from pyro_symmetric.groups import Action, Group
from pyro_symmetric.guides.gaussian import plain_posterior, require_spread
from pyro_symmetric.guides.layout import GuideLayout, LayoutModel, layout_of
from pyro_symmetric.guides.log_ratios import (
    FEWEST,
    Estimate,
    bridge,
    chains_agree,
    importance,
    largest_reliable_k,
    pareto_k,
)
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.mcmc import log_joint
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import copied_chains
from pyro_symmetric.weights import Weights, require_finite, require_sites

Joint = Callable[[Weights], Tensor]

CHECKED, CHECKED_DENSITIES = 4, 64  # draws at which log_joint, and an estimate of the density, are checked


@dataclass(frozen=True)
class Evidence:
    """The worth of a guide, and the evidence, all in nats.

    :param elbo: of the guide as it is; ``elbo_error`` is its standard error.
    :param symmetrized_elbo: of the guide averaged over the group; ``symmetrized_error`` is its standard error.
    :param estimator: by which the symmetrised density was estimated.
    :param bound: ``"lower"`` if the expectation of ``symmetrized_elbo`` is a lower bound of the symmetrised guide's
        ELBO, ``"exact"`` if it is that ELBO.
    :param log_order: the most that symmetrisation can add, ``log |G|``.
    :param importance: the log-evidence by importance sampling from the symmetrised guide.
    :param pareto_k: how heavy the tail of its weights is; above 0.7, or less for fewer than 2,200 draws,
        its error can't be trusted.
    :param bridge: the log-evidence by bridge sampling, if there was a posterior.
    :param doubts: what speaks against the estimates; empty if all checks passed.
    """

    elbo: float
    elbo_error: float
    symmetrized_elbo: float
    symmetrized_error: float
    estimator: str
    bound: str
    log_order: float
    importance: Estimate
    pareto_k: float
    bridge: Estimate | None = None
    doubts: tuple[str, ...] = ()

    @property
    def best(self) -> Estimate:
        """The bridge, if there is one, as its terms are bounded; else importance sampling. Mind the ``doubts``."""
        return self.bridge or self.importance

    def __repr__(self) -> str:
        relation = "=" if self.bound == "exact" else "≥"
        lines = [
            "Evidence, in nats",
            f"  ELBO                = {_in_nats(self.elbo)} ± {_in_nats(self.elbo_error)}",
            f"  symmetrised ELBO    {relation} {_in_nats(self.symmetrized_elbo)} ± {_in_nats(self.symmetrized_error)}, "
            f"by {self.estimator}; log |G| = {self.log_order:.1f}",
            f"  importance sampling ≈ {self._shown(self.importance)}, Pareto-k {self.pareto_k:.2f}",
        ]
        if self.bridge:
            lines += [f"  bridge sampling     ≈ {self._shown(self.bridge)}"]
        if self.doubts:
            return "\n".join([*lines, "  in doubt, so that no error is known:", *(f"  ! {d}" for d in self.doubts)])
        low, high = self.best.interval()
        return "\n".join([*lines, f"  95 % interval: {low:.2f} to {high:.2f}"])

    def _shown(self, found: Estimate) -> str:
        error = "" if self.doubts else f" ± {_in_nats(found.error)}"
        return (
            f"{_in_nats(found.log_evidence)}{error}, {found.effective_draws:.0f} effective of {found.num_draws} draws"
        )


def evidence(
    guide: AutoSymmetrized,
    *args: Any,
    posterior: Posterior | None = None,
    estimator: OrbitEstimator | None = None,
    num_samples: int = 512,
    chunk: int = 64,
    **kwargs: Any,
) -> Evidence:
    """Return bounds and estimates of the log-evidence of a guide's model, by the guide and by chains.

    >>> def model():  # two components; the evidence is log(1/2) + 2 log N(5; 0, sqrt(10))
    ...     locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    ...     y = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(locs, 1.0)).expand([2]).to_event(1)
    ...     pyro.sample("y", y, obs=torch.tensor([-5.0, 5.0]))
    >>> group = ps.Group.declare({"locs": ("k",)}, {"locs": torch.zeros(2)})
    >>> start = dict(init_loc_fn=lambda site: torch.tensor([-4.5, 4.5]), init_scale=1.0)
    >>> found = ps.evidence(ps.AutoSymmetrized(model, group, **start).setup())
    >>> round(found.symmetrized_elbo, 1), round(found.best.log_evidence, 1), found.doubts
    (-7.3, -7.3, ())

    What doesn't fit is told in ``doubts``. A mode that guide and chains both miss can't be noticed, nor can a heavy
    tail always: with 512 draws of a mean-field guide of a mixture, the interval without a doubt held the truth in 80
    of 100 reports, not in 95. More draws, a richer guide and the bridge do better.

    :param guide: a set-up ``AutoSymmetrized``; of any other guide, ``AutoSymmetrized(model, group, base=guide)``.
    :param args: what the model is called with, all of its data; so are ``kwargs``.
    :param posterior: draws of the posterior that the guide wasn't fitted to, for the bridge.
    :param estimator: of the symmetrised log-density; by default exact where that is cheap, else matched units.
    :param num_samples: draws of the guide, at least 2, and about as many of the posterior, evenly spaced.
    :param chunk: how many are evaluated at once.
    :raises ValueError: naming the units whose exchange changes the model; if chains never move, or equal others.
    """
    arguments.instance("guide", guide, AutoSymmetrized, "an AutoSymmetrized guide")
    model = guide._given[0] if guide._given else None
    if model is None or isinstance(model, LayoutModel):
        raise ValueError(
            "guide was read from a file or another process, without its model; take "
            "ps.AutoSymmetrized(model, group, base=guide).setup(*args)"
        )
    joint = log_joint(model, *args, **kwargs)
    return evidence_of(guide, joint, guide.group, estimator, posterior=posterior, num_samples=num_samples, chunk=chunk)


def evidence_of(
    guide: AutoGuide,
    log_joint: Joint,
    group: Group,
    estimator: OrbitEstimator | None = None,
    *,
    posterior: Posterior | None = None,
    num_samples: int = 512,
    chunk: int = 64,
) -> Evidence:
    """Return the :func:`evidence` of a joint density given as a function, by any Gaussian or continuous guide.

    :param log_joint: weights of batch shape ``(S,)`` -> log of prior times likelihood of all data, ``(S,)``.
    :param group: finite, of all that the density doesn't tell apart.
    """
    arguments.whole("num_samples", num_samples, 2)
    arguments.whole("chunk", chunk, 1)
    arguments.instance("posterior", posterior, (Posterior, type(None)), "a Posterior or None")
    require_estimator(estimator)
    layout, base = layout_of(guide), plain_posterior(guide)
    estimator = estimator or usual_estimator(base, layout.action(group), training=False)
    require_spread(base, guide)
    device = next((value.device for value in (*guide.parameters(), *guide.buffers())), None)
    # Draws come from PyTorch's generator, which the checks put back: of two threads at once both would have the same.
    with torch.no_grad(), forked(drawn_seed(), device):
        seen = _Seen(log_joint, layout, base, layout.action(group), estimator, chunk)
        draws = base.sample((num_samples,))
        _require_invariance(layout, log_joint, group, draws[:CHECKED])
        target, rounding = seen.joint(draws)
        plain, symmetrized = target - base.log_prob(draws).double(), target - seen.density(estimator.log_prob, draws)
        found, k = importance(symmetrized), pareto_k(symmetrized)
        gap, own_gap = seen.gap(estimator), seen.gap(guide.estimator) if isinstance(guide, AutoSymmetrized) else 0.0
        with forked():
            noise = float((seen.joint(draws[:CHECKED])[0] - target[:CHECKED]).square().mean() / 2) ** 0.5
        doubts = [
            *_doubts_of_importance(found, k, float(symmetrized.mean())),
            *_doubts_of_density(draws, estimator, gap, own_gap / max(group.log_order(), 1e-9), rounding, noise),
        ]
        connected = None
        if posterior is not None and math.isfinite(found.log_evidence):
            chains = _vectors(posterior, layout, num_samples).to(draws.device)
            at_chains = seen.at_chains(chains)
            connected = bridge(symmetrized, at_chains, posterior.kind == "independent")
            doubts += _doubts_of_bridge(connected, found, at_chains, posterior, layout, not doubts)
    bound = "lower" if estimator.bound == "upper" else estimator.bound
    means = *_mean_and_error(plain), *_mean_and_error(symmetrized)
    return Evidence(*means, repr(estimator), bound, group.log_order(), found, k, connected, tuple(doubts))


# doubts -------------------------------------------------------------------------------------------------------------


def doubts_of_weights(found: Estimate, k: float) -> list[str]:
    """Return what the weights' number and tail say against importance sampling."""
    most = largest_reliable_k(found.num_draws)
    if not math.isfinite(found.log_evidence):
        return [f"log_joint is {found.log_evidence} at draws of the guide"]
    if math.isnan(k):
        return ["too few draws to tell the tail of the weights"]
    if k == -math.inf:
        return ["all weights are equal but for rounding, as those of a point mass are, too"]
    return [f"Pareto-k is {k:.2f}, above {most:.2f}"] if k > most else _doubts_of_error(found)


def _doubts_of_error(found: Estimate) -> list[str]:
    return _told(
        (found.error > 0.5, f"the error is {_in_nats(found.error)} nats"),
        (found.effective_draws < FEWEST, f"{found.effective_draws:.0f} effective draws are too few to know the error"),
    )


def _doubts_of_importance(found: Estimate, k: float, elbo: float) -> list[str]:
    """Log-normal weights whose log-mean lies ``gap`` above the mean of their logarithms are worth ``exp(-2 gap)`` of a
    draw each; the weights' own effective size doesn't know of those that are missing."""
    gap = max(0.0, found.log_evidence - elbo)
    far = f"the evidence lies {gap:.1f} nats above the symmetrised ELBO, so that the largest weights may be missing"
    reasons = doubts_of_weights(found, k) + _told((not found.num_draws * math.exp(-2 * gap) >= 50, far))
    return [f"importance sampling: {reason}" for reason in reasons]


def _doubts_of_density(
    draws: Tensor, estimator: OrbitEstimator, gap: float, left: float, rounding: float, noise: float
) -> list[str]:
    """:param gap: nats that the estimator leaves open; ``left``: that of the training, as a part of log |G|.
    :param rounding: of ``log_joint``; ``noise``: its deviation from call to call, of which the mean exponential is
        half the variance too high."""
    still = int((draws == draws[0]).all(0).sum())
    return _told(
        (still > 0, f"the guide's draws don't spread in {still} of {draws.shape[1]} directions"),
        (math.isnan(gap), f"importance sampling: {estimator!r} can't tell how well it knows the guide's density"),
        (gap > 0.5, f"importance sampling: {estimator!r} leaves {gap:.1f} nats of the density open; take a larger K"),
        (left > 0.05, f"training: the guide's estimator leaves {left:.0%} of log |G| open; train with a larger K"),
        (rounding > 0.5, f"log_joint is rounded to about {rounding:.1g} nats"),
        (
            noise**2 / 2 > 0.02,
            f"log_joint changes from call to call, by {noise:.1g} nats at the same weights, which raises the estimates "
            f"by about {noise**2 / 2:.1g}; give it all data",
        ),
    )


def _doubts_of_bridge(
    connected: Estimate, found: Estimate, at_chains: Tensor, posterior: Posterior, layout: GuideLayout, trusted: bool
) -> list[str]:
    """:param trusted: whether importance sampling is. If not, it should be too low: the largest weights are missing."""
    gap, error = found.log_evidence - connected.log_evidence, math.hypot(found.error, connected.error)
    r_hat = chains_agree(at_chains) if posterior.kind == "chains" else 1.0
    at_border = _share_at_border(posterior, layout)
    reasons = _doubts_of_error(connected) + _told(
        (r_hat > 1.05, f"the chains disagree about the joint density, R-hat {r_hat:.2f}"),
        (at_border > 0.01, f"{at_border:.0%} of the draws lie on the border of a support, but for rounding"),
        ((abs(gap) if trusted else gap) > 3 * error, f"it differs from importance sampling by {abs(gap):.2f} nats"),
    )
    return [f"bridge sampling: {reason}" for reason in reasons]


def _share_at_border(posterior: Posterior, layout: GuideLayout) -> float:
    """The share of draws so near the border of a support that unconstrained vectors don't bring them back."""
    samples = {site: posterior.samples[site] for site in layout.site_shapes}
    back = layout.constrain(layout.unconstrain(samples).double())
    lost = [((back[s] - v).abs() > 0.01 * v.abs())[..., None].flatten(2).any(-1) for s, v in samples.items()]
    return float(torch.stack(lost).any(0).double().mean())


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def _told(*checks: tuple[bool, str]) -> list[str]:
    return [reason for wrong, reason in checks if wrong]


def _in_nats(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 1e7 else f"{value:.1e}"


# the densities, at many draws ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """The joint density and the symmetrised guide's, at unconstrained vectors, ``chunk`` at once, in float64."""

    log_joint: Joint
    layout: GuideLayout
    base: Any
    action: Action
    estimator: OrbitEstimator
    chunk: int

    def joint(self, vectors: Tensor) -> tuple[Tensor, float]:
        """``log_joint`` with the volume of the bijections, ``(N,)``, and by how much it is rounded at most draws."""
        parts = [self._joint(part) for part in vectors.split(self.chunk)]
        values, rounding = (torch.cat(found) for found in zip(*parts, strict=True))
        return values, float(rounding.median())

    def _joint(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        # Bijections in float64: near the border of a simplex a bijection in float32 loses the value.
        exact, tiny = vectors.double(), torch.finfo(vectors.dtype).tiny
        found = self.layout.constrain(exact)
        weights = {
            s: v.where((v == 0) | (v.abs() >= tiny), tiny * v.sign()).to(vectors.dtype) for s, v in found.items()
        }
        values = self.log_joint(weights)
        if values.shape != (len(vectors),):
            raise ValueError(f"log_joint gave shape {tuple(values.shape)} for {len(vectors)} sets of weights")
        rounding = values.double().abs().nan_to_num() * torch.finfo(values.dtype).eps
        return values.double() + self.layout.log_det(exact), rounding

    def density(self, log_prob: Callable[..., Tensor], vectors: Tensor) -> Tensor:
        parts = [log_prob(self.base, self.action, part).double() for part in vectors.split(self.chunk)]
        return torch.cat(parts)

    def at_chains(self, vectors: Tensor) -> Tensor:
        """Log-ratios at draws of a posterior, ``(chains, draws, D)`` -> ``(chains, draws)``."""
        if not self.estimator.knows_elsewhere:
            raise TypeError(f"estimator {self.estimator!r} knows no density at draws of a posterior; leave these out")
        flat = vectors.flatten(0, 1)
        found = self.joint(flat)[0] - self.density(self.estimator.log_prob_elsewhere, flat)
        if not bool(found.isfinite().all()):
            raise ValueError("log_joint is infinite at draws of posterior; they must be draws of the guide's model")
        return found.reshape(vectors.shape[:2])

    def gap(self, estimator: OrbitEstimator) -> float:
        """The nats that an estimate leaves open: above is its mean with the identity, below that without it.

        Far apart, as of ``InfoNCE`` if copies lie apart, its weights look even, and lack what rare draws would bring.
        """
        if estimator.bound == "exact" or not estimator.knows_elsewhere:
            return 0.0 if estimator.bound == "exact" else math.nan
        with forked():
            draws = self.base.sample((CHECKED_DENSITIES,))
            bounds = (self.density(log_prob, draws) for log_prob in (estimator.log_prob, estimator.log_prob_elsewhere))
            above, below = bounds
            return float((above - below).mean())


def _vectors(posterior: Posterior, layout: GuideLayout, num_samples: int) -> Tensor:
    """About so many of the draws, evenly spaced, unconstrained, ``(chains, draws, D)``."""
    require_sites(posterior.samples, layout.site_shapes, "posterior")
    if posterior.num_samples < 4:
        raise ValueError(f"posterior has {posterior.num_samples} draws of each chain; a bridge needs at least 4")
    every = max(1, posterior.num_chains * posterior.num_samples // num_samples)
    thinned = posterior.thin(min(every, posterior.num_samples // 4))
    samples = {site: thinned.samples[site] for site in layout.site_shapes}
    require_finite(samples, "posterior")
    vectors = layout.unconstrain(samples)
    if not bool(vectors.isfinite().all()):
        raise ValueError("posterior holds draws on the border of a site's support, where the guide has no density")
    still = (vectors == vectors[:, :1]).flatten(1).all(1).nonzero()[:, 0].tolist()
    if posterior.kind == "chains" and (left_out := still or copied_chains(posterior.samples)):
        raise ValueError(f"the chains {left_out} of posterior never move, or equal others; leave them out")
    return vectors


def _require_invariance(layout: GuideLayout, log_joint: Joint, group: Group, latent: Tensor) -> None:
    """:raises ValueError: if ``log_joint`` changes when draws of the guide are moved."""
    found = check_function(group, log_joint, layout.constrain(latent))
    if not found:
        raise ValueError(
            f"at draws of the guide, {found}\nWithout that symmetry the symmetrised ELBO would be no bound of the "
            "evidence: give the group that the model has (ps.verify_model names the sites), or mend the prior"
        )
