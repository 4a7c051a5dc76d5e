r"""The value of a fitted guide, and the evidence: bounds, importance sampling, and a bridge to chains.

.. math:: \mathrm{ELBO}(q) = \mathbb E_q[\log p(w, D) - \log q(w)] \;\le\; \mathrm{ELBO}(\bar q)
   \;\le\; \log p(D) = \log \mathbb E_{\bar q}\Big[\frac{p(w, D)}{\bar q(w)}\Big]

References: the bounds, Gelberg et al. 2024 (arXiv 2408.05496), Section 4; why a mixture of ``k`` components misses
up to ``log k!`` nats if its copies aren't counted, Neal 1999 ("Erroneous results in 'Marginal likelihood from the Gibbs
output'") and Frühwirth-Schnatter 2004; the estimates, :mod:`~pyro_symmetric.guides.log_ratios`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.chain_statistics import copied_chains
from pyro_symmetric.discovery.model_check import check_function
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import OrbitEstimator
from pyro_symmetric.distributions.orbit import require_estimator
from pyro_symmetric.groups import Action, Group, group_of
from pyro_symmetric.guides import doubts
from pyro_symmetric.guides.fitted import halves
from pyro_symmetric.guides.gaussian import plain_posterior, require_spread
from pyro_symmetric.guides.layout import GuideLayout, layout_of
from pyro_symmetric.guides.log_ratios import Estimate, bridge, chains_agree, importance, in_nats, pareto_k
from pyro_symmetric.guides.suggest import usual_estimator
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.weights import Weights, require_finite, require_sites

# So many draws show whether log_joint has the group, and how large its rounding errors are.
CHECKED = 4
# So many draws show how well an estimate of the symmetrised density is known.
CHECKED_DENSITIES = 64


@dataclass(frozen=True)
class Evidence:
    """The worth of a guide, and the evidence, all in nats.

    :param elbo: of the guide as it is.
    :param elbo_error: its standard error.
    :param symmetrized_elbo: of the guide averaged over the group.
    :param symmetrized_error: its standard error.
    :param estimator: by which the symmetrised density was estimated.
    :param bound: ``"lower"`` if the expectation of ``symmetrized_elbo`` is a lower bound of the symmetrised guide's
        ELBO, ``"exact"`` if it is that ELBO.
    :param log_order: the most that symmetrisation can add, ``log |G|``.
    :param importance: the log-evidence by importance sampling from the symmetrised guide.
    :param pareto_k: how heavy the tail of its weights is; above 0.7, or less for fewer than 2,200 draws,
        its error can't be trusted.
    :param bridge: the log-evidence by bridge sampling, if there was a posterior.
    :param doubts: what speaks against the estimates; empty if all checks passed.
    :param density_gap: between an upper and a lower bound of the mean symmetrised log-density: 0 if it is exact, NaN if
        the estimator can't tell. The symmetrised ELBO may be too low by as much.
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
    density_gap: float = 0.0

    @property
    def best(self) -> Estimate:
        """The bridge, if there is one, as its terms are bounded; else importance sampling. Mind the ``doubts``."""
        return self.bridge or self.importance

    def __repr__(self) -> str:
        relation, found, bridge = "=" if self.bound == "exact" else "≥", self.importance, self.bridge
        lines = [
            "Evidence, in nats",
            f"  ELBO                = {in_nats(self.elbo)} ± {in_nats(self.elbo_error)}",
            f"  symmetrised ELBO    {relation} {in_nats(self.symmetrized_elbo)} ± {in_nats(self.symmetrized_error)}, "
            f"by {self.estimator}; log |G| = {self.log_order:.1f}",
            f"  importance sampling ≈ {self._shown(found)}, Pareto-k {self.pareto_k:.2f}, {found.shown_draws}",
        ]
        if bridge:
            lines += [f"  bridge sampling     ≈ {self._shown(bridge)}, {bridge.shown_draws}"]
        if self.doubts:
            return "\n".join([*lines, "  in doubt, so that no error is known:", *(f"  ! {d}" for d in self.doubts)])
        low, high = self.best.interval()
        return "\n".join([*lines, f"  95 % interval: {low:.2f} to {high:.2f}"])

    def _shown(self, found: Estimate) -> str:
        return in_nats(found.log_evidence) + ("" if self.doubts else f" ± {in_nats(found.error)}")


def evidence(
    guide: AutoGuide | Posterior,
    log_joint: Callable[[Weights], Tensor],
    group: Group | Symmetry,
    estimator: OrbitEstimator | None = None,
    *,
    posterior: Posterior | None = None,
    num_samples: int = 512,
    chunk: int = 64,
) -> Evidence:
    """Bounds and estimates of the log-evidence, by a guide symmetrised, and by chains.

    The ELBO and the symmetrised ELBO are lower bounds. Importance sampling from the symmetrised guide has no bias (of
    the evidence, not of its log), with an exact density or with ``InfoNCE`` and ``SinkhornImportance``. With a
    ``posterior``, bridge sampling between it and the symmetrised guide is the second opinion: its draws may lie in any
    copies, as the symmetrised density is the same at all of them. What doesn't fit is told in ``doubts``: a Pareto-k
    above 0.7 (of S < 2,200 samples above 1 - 1 / log10 S), a guide so far from the evidence that the largest weights
    may be missing, two methods that differ by more than three of their errors, chains that disagree (one chain: with
    its own other half), fewer than 25 effective draws, errors above half a nat, a ``log_joint`` that changes from call
    to call, an estimate of the density that leaves as much open, rounding errors as large; and a guide that is trained
    by an estimate which leaves more than a twentieth of ``log |G|`` open. A mode that guide and chains both miss can't
    be noticed, nor can a heavy tail always: with 512 draws of a mean-field guide of a mixture, the interval without a
    doubt held the truth in 80 of 100 reports, not in 95. More draws, a richer guide and the bridge do better.

    The answer is worth something only if ``log_joint`` is invariant under the group: that is compared at draws of the
    guide, up to the function's own noise (rounding, subsampled data), at the price of about 60 more evaluations.

    >>> def model():  # two components; the evidence is log(1/2) + 2 log N(5; 0, sqrt(10))
    ...     locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    ...     y = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(locs, 1.0)).expand([2]).to_event(1)
    ...     pyro.sample("y", y, obs=torch.tensor([-5.0, 5.0]))
    >>> group = ps.Group.declare({"locs": ("k",)}, {"locs": torch.zeros(2)})
    >>> start = dict(init_loc_fn=lambda site: torch.tensor([-4.5, 4.5]), init_scale=1.0)
    >>> guide = ps.AutoSymmetrized(model, group, **start).setup()
    >>> found = ps.evidence(guide, ps.log_joint(model), group)
    >>> round(found.symmetrized_elbo, 1), round(found.best.log_evidence, 1), found.doubts
    (-7.3, -7.3, ())

    :param guide: a set-up guide of this library, or a stock ``AutoNormal`` or ``AutoContinuous``. Or a ``Posterior``
        that remembers its model: then a Gaussian is fitted to the first half of each chain, aligned, and the second
        half, which knows nothing of that fit, is the ``posterior``, unless another is given.
    :param log_joint: e.g. :func:`log_joint(model, *args) <pyro_symmetric.mcmc.log_joint>`; weights of batch shape
        ``(S,)`` -> log of prior times likelihood of all data, ``(S,)``.
    :param group: the symmetry of the model: permutations, signs, or both. Of a symmetry, the finite part.
    :param estimator: of the symmetrised log-density; by default exact where that is cheap, else
        ``SinkhornImportance(16)`` or more.
    :param posterior: draws of the posterior, which the guide wasn't fitted to.
    :param num_samples: Monte Carlo samples of the guide, at least 2, and about as many of the posterior, evenly spaced.
    :param chunk: how many are evaluated at once.
    :raises ValueError: naming the units whose exchange changes ``log_joint``; if chains never move, or equal others.
    """
    arguments.whole("num_samples", num_samples, 2)
    arguments.whole("chunk", chunk, 1)
    group = group_of(group).finite
    if estimator is not None:
        require_estimator(estimator)
    kind = "a function of weights, e.g. ps.log_joint(model, *args)"
    if isinstance(log_joint, nn.Module):  # which can be called, too, but with its data
        raise TypeError(f"log_joint is {arguments.shown(log_joint)}; it must be {kind}")
    arguments.function("log_joint", log_joint, kind)
    arguments.instance("posterior", posterior, (Posterior, type(None)), "a Posterior or None")
    arguments.instance("guide", guide, (AutoGuide, Posterior), "an automatic guide, or a Posterior")
    held = guide.samples.values() if isinstance(guide, Posterior) else [*guide.parameters(), *guide.buffers()]
    # Draws come from PyTorch's generator, which the checks put back: of two threads at once both would have the same.
    with torch.no_grad(), forked(drawn_seed(), next((value.device for value in held), None)):
        return _evidence(guide, log_joint, group, estimator, posterior, num_samples, chunk)


def _evidence(
    guide: AutoGuide | Posterior,
    log_joint: Callable[[Weights], Tensor],
    group: Group,
    estimator: OrbitEstimator | None,
    posterior: Posterior | None,
    num_samples: int,
    chunk: int,
) -> Evidence:
    if isinstance(guide, Posterior):
        guide, posterior = halves(guide, group, posterior)
    estimator = estimator or usual_estimator(guide, group, training=False)
    if posterior is not None and not estimator.knows_elsewhere:
        raise TypeError(
            f"estimator is {estimator!r}, which knows no density at draws of a posterior; take ExactOrbit, InfoNCE or "
            "SinkhornImportance, or leave the posterior out"
        )
    layout = layout_of(guide)
    of_chains = None if posterior is None else _unconstrained(posterior, layout, num_samples)
    base = plain_posterior(guide)
    require_spread(base, guide)
    weighing = _Weighing(log_joint, layout, base, layout.action(group), estimator, chunk)
    plain, symmetrized, rounding, noise = weighing.of_guide(num_samples)
    found, k, connected = importance(symmetrized), pareto_k(symmetrized), None
    gap = weighing.density_gap()
    log_order = group.log_order()
    bridged = posterior is not None and math.isfinite(found.log_evidence)
    poor = doubts.of_importance(found, k, float(symmetrized.mean()), bridged)
    told = (
        doubts.of_spread(base.sample((CHECKED_DENSITIES,)))
        + poor
        + doubts.of_density(estimator, gap)
        + doubts.of_digits(rounding)
        + doubts.of_noise(noise)
    )
    if isinstance(guide, AutoSymmetrized):
        told += doubts.of_training(guide.estimator, weighing.by(guide.estimator).density_gap(), log_order)
    if bridged and posterior is not None and of_chains is not None:
        at_draws = weighing.of_chains(of_chains.to(plain.device))
        connected = bridge(symmetrized, at_draws, posterior.rows == "independent")
        if posterior.rows == "chains":
            told += doubts.of_chains(chains_agree(at_draws))
        told += doubts.of_both(found, connected, not poor) + doubts.of_border(posterior, layout)
    bound = "lower" if estimator.bound == "upper" else estimator.bound
    means = (*_mean_and_error(plain), *_mean_and_error(symmetrized))
    return Evidence(*means, repr(estimator), bound, log_order, found, k, connected, tuple(told), gap)


@dataclass(frozen=True)
class _Weighing:
    """Log-ratios of the joint density to a guide's, at unconstrained vectors, ``chunk`` at once, in float64."""

    log_joint: Callable[[Weights], Tensor]
    layout: GuideLayout
    base: Any
    action: Action
    estimator: OrbitEstimator
    chunk: int

    def of_guide(self, num_samples: int) -> tuple[Tensor, Tensor, float, float]:
        """At draws of the guide, to its own density and to the symmetrised one, ``(num_samples,)`` each; by how much
        ``log_joint`` is rounded, at most draws; and its deviation from call to call."""
        plain, symmetrized, rounding, noise = [], [], [], 0.0
        for start in range(0, num_samples, self.chunk):
            latent = self.base.sample((min(self.chunk, num_samples - start),))
            target, rounded = self._target(latent)
            if start == 0:
                _require_invariance(self.layout, self.log_joint, self.action.group, latent[:CHECKED])
                with forked():
                    again, _ = self._target(latent[:CHECKED])
                noise = float((again - target[:CHECKED]).square().mean() / 2) ** 0.5
            plain.append(target - self.base.log_prob(latent).double())
            symmetrized.append(target - self.estimator.log_prob(self.base, self.action, latent).double())
            rounding.append(rounded)
        return torch.cat(plain), torch.cat(symmetrized), float(torch.cat(rounding).median()), noise

    def of_chains(self, vectors: Tensor) -> Tensor:
        """At draws of a posterior, ``(chains, draws, D)``, to the symmetrised density: ``(chains, draws)``.

        :raises ValueError: if some draws have no density, or an infinite one.
        """
        parts = [
            self._target(part)[0] - self.estimator.log_prob_elsewhere(self.base, self.action, part).double()
            for part in vectors.flatten(0, 1).split(self.chunk)
        ]
        found = torch.cat(parts)
        if not bool(found.isfinite().all()):
            raise ValueError(
                f"log_joint minus the guide's log-density isn't finite at {int((~found.isfinite()).sum())} draws of "
                "the posterior; log_joint must be that of the model that they were drawn from"
            )
        return found.reshape(vectors.shape[:2])

    def by(self, estimator: OrbitEstimator) -> _Weighing:
        """The same with another estimator of the symmetrised density."""
        return replace(self, estimator=estimator)

    def density_gap(self) -> float:
        """An estimate of the symmetrised density lies between two bounds: above from the identity on, below without it.

        Far apart, as of ``InfoNCE`` if copies lie apart, its weights look even, and lack what rare draws would bring.
        """
        if self.estimator.bound == "exact" or not self.estimator.knows_elsewhere:
            return 0.0 if self.estimator.bound == "exact" else math.nan
        with forked():
            draws = self.base.sample((CHECKED_DENSITIES,))
            above = self.estimator.log_prob(self.base, self.action, draws).double()
            return float((above - self.estimator.log_prob_elsewhere(self.base, self.action, draws).double()).mean())

    def _target(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """``log_joint`` with the volume of the bijections, and by how much it is rounded, ``(S,)`` each."""
        # Bijections in float64: near the border of a simplex a bijection in float32 loses the value.
        exact, tiny = latent.double(), torch.finfo(latent.dtype).tiny
        found = self.layout.constrain(exact)
        weights = {s: v.where((v == 0) | (v.abs() >= tiny), tiny * v.sign()).to(latent.dtype) for s, v in found.items()}
        values = _checked(self.log_joint(weights), len(latent))
        rounded = values.double().abs().nan_to_num() * torch.finfo(values.dtype).eps
        return values.double() + self.layout.log_det(exact), rounded


def _unconstrained(posterior: Posterior, layout: GuideLayout, num_samples: int) -> Tensor:
    """About so many of the draws, evenly spaced, ``(chains, draws, D)``.

    :raises ValueError: if the posterior lacks a site, or holds too few draws or infinite ones.
    """
    require_sites(posterior.samples, layout.site_shapes, "posterior")
    if posterior.num_samples < 4:
        raise ValueError(f"posterior has {posterior.num_samples} draws of each chain; a bridge needs at least 4")
    if posterior.rows == "chains" and (copies := copied_chains(posterior.samples)):
        raise ValueError(f"the chains {copies} of posterior equal others draw for draw; leave them out")
    every = max(1, posterior.num_chains * posterior.num_samples // num_samples)
    thinned = posterior.thin(min(every, posterior.num_samples // 4))
    samples = {site: thinned.samples[site] for site in layout.site_shapes}
    require_finite(samples, "posterior")
    vectors = layout.unconstrain(samples)
    still = (vectors == vectors[:, :1]).flatten(1).all(1)
    if posterior.rows == "chains" and bool(still.any()):
        raise ValueError(f"the chains {still.nonzero()[:, 0].tolist()} of posterior never move; leave them out")
    if not bool(vectors.isfinite().all()):
        raise ValueError("posterior holds draws on the border of a site's support, where the guide has no density")
    return vectors


# the group must be the model's --------------------------------------------------------------------------------------


def _require_invariance(
    layout: GuideLayout, log_joint: Callable[[Weights], Tensor], group: Group, latent: Tensor
) -> None:
    """:raises ValueError: if ``log_joint`` changes when draws of the guide are moved."""
    with forked():
        last_digit = torch.finfo(latent.dtype).eps * (4 * torch.randint(2, latent.shape, device="cpu") - 2)
    draws, nearby = (layout.constrain(value) for value in (latent, latent * (1 + last_digit.to(latent))))
    found = check_function(group, log_joint, draws, nearby)
    if not found:
        raise ValueError(
            f"at draws of the guide, {found}\nWithout that symmetry the symmetrised ELBO would be no bound of the "
            "evidence: give the group that the model has (verify_model(group, model, ...) names the sites; of networks "
            "with running statistics it is symmetry.holding(net)), or mend the prior or the likelihood that treats "
            "units differently"
        )


def _checked(log_target: Any, num_samples: int) -> Tensor:
    shape = tuple(getattr(log_target, "shape", ()))
    if not isinstance(log_target, Tensor) or shape != (num_samples,):
        raise ValueError(
            f"log_joint gave {type(log_target).__name__} of shape {shape} for {num_samples} sets of weights; it must "
            f"give one number for each, shape ({num_samples},); of a Pyro model, give log_joint(model, *args)"
        )
    return log_target


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std() / len(values) ** 0.5)
