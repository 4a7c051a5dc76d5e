"""Sentences that speak against estimates of the evidence; none if all is well."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyro_symmetric.distributions import OrbitEstimator
from pyro_symmetric.guides.layout import GuideLayout
from pyro_symmetric.guides.log_ratios import FEWEST, Estimate, in_nats, largest_reliable_k
from pyro_symmetric.posterior import Posterior

# What is said aloud: methods that differ by more of their errors, errors of more nats, chains that agree less.
DISAGREEMENT, LARGE_ERROR, LARGE_R_HAT = 3.0, 0.5, 1.05
# Effective draws of log-normal weights, of which the largest are seen.
FEWEST_BY_DISTANCE = 50
# Nats that no number of draws makes up for.
FAR = 5.0
# Nats by which the noise of log_joint may raise an estimate.
LARGE_EXCESS = 0.02
# Of log |G|, what the estimator of a training may leave open.
LEFT_OPEN = 0.05
# Of a value, what may be lost on the way to unconstrained vectors and back; of draws, how many may lose more.
LOST = 0.01


def of_importance(found: Estimate, k: float, elbo: float, bridged: bool) -> list[str]:
    """Doubts of the weights' tail and the guide's distance from the posterior. They check a bridge, if there is one.

    :param elbo: of the guide, symmetrised.
    """
    reasons = of_weights(found, k) + _of_distance(found, elbo, bridged)
    if bridged and reasons:
        return [f"importance sampling can't check the bridge: {reasons[0]}"]
    return [f"importance sampling: {reason}" for reason in reasons]


def of_spread(draws: Tensor) -> list[str]:
    """Doubts of a guide that has no density in some direction, at least in the digits that there are.

    :param draws: of the guide, unconstrained, ``(N, D)``.
    """
    still = int((draws == draws[0]).all(0).sum())
    return [f"the guide's draws don't spread in {still} of {draws.shape[1]} directions"] if still else []


def of_density(estimator: OrbitEstimator, gap: float) -> list[str]:
    if math.isnan(gap):
        return [f"importance sampling: {estimator!r} can't tell how well it knows the guide's log-density"]
    if gap > LARGE_ERROR:
        return [
            f"importance sampling: {estimator!r} leaves {gap:.1f} nats of the guide's log-density open; take a larger "
            "K, or ExactOrbit() if the group allows"
        ]
    return []


def of_training(estimator: OrbitEstimator, gap: float, most: float) -> list[str]:
    """Doubts of the estimator by which a guide is trained, which may miss a part of what symmetrising adds, of ``most``
    nats, and of its gradient."""
    if not gap > LEFT_OPEN * most:
        return []
    return [
        f"training: {estimator!r} leaves {min(gap, most):.1f} of {most:.1f} nats open, so that gradients may lack a "
        "part; train with a larger K, or with ExactOrbit() if the group allows"
    ]


def of_digits(rounding: float) -> list[str]:
    """In float32, numbers of ten million nats have no digits left for one."""
    return [f"log_joint is rounded to about {rounding:.1g} nats"] if rounding > LARGE_ERROR else []


def of_noise(deviation: float) -> list[str]:
    """Of the exponential of a normal number the mean lies half its variance higher."""
    excess = deviation**2 / 2
    if not excess > LARGE_EXCESS:
        return []
    return [
        f"log_joint changes from call to call, by {deviation:.1g} nats at the same weights, as that of random rows "
        f"does: importance and bridge sampling are then too high, by about {excess:.1g} nats; give it all data"
    ]


def of_chains(r_hat: float) -> list[str]:
    if r_hat > LARGE_R_HAT:
        return [f"bridge sampling: the chains disagree about the joint density, R-hat {r_hat:.2f}"]
    return []


def of_border(posterior: Posterior, layout: GuideLayout) -> list[str]:
    """Draws so near the border of a support that unconstrained vectors don't bring them back."""
    samples = {site: posterior.samples[site] for site in layout.site_shapes}
    back = layout.constrain(layout.unconstrain(samples).double())
    lost = [
        ((back[s] - value).abs() > LOST * value.abs())[..., None].flatten(2).any(-1) for s, value in samples.items()
    ]
    share = float(torch.stack(lost).any(0).double().mean())
    if share <= LOST:
        return []
    return [f"bridge sampling: {share:.0%} of the draws lie so near the border of a support that they can't be told"]


def of_both(found: Estimate, connected: Estimate, trusted: bool) -> list[str]:
    """Doubts of the bridge, and of the two methods together.

    :param trusted: whether importance sampling is. If not, it should be too low: the largest weights are missing.
    """
    doubts = [f"bridge sampling: {reason}" for reason in _of_error(connected)]
    gap, error = found.log_evidence - connected.log_evidence, math.hypot(found.error, connected.error)
    if (abs(gap) if trusted else gap) > DISAGREEMENT * error:
        doubts.append(
            f"importance and bridge sampling differ by {abs(gap):.2f} nats, {abs(gap) / error:.1f} times their error: "
            "the guide or the chains miss a part of the posterior"
        )
    return doubts


# reasons ------------------------------------------------------------------------------------------------------------


def of_weights(found: Estimate, k: float) -> list[str]:
    """Doubts of the tail of the weights, and of their number; reasons, not sentences."""
    most = largest_reliable_k(found.num_draws)
    if not math.isfinite(found.log_evidence):
        return [f"log_joint is {found.log_evidence} at draws of the guide"]
    if math.isnan(k):
        return ["too few draws to tell the tail of the weights"]
    if k == -math.inf:
        return ["all weights are equal but for rounding, as those of a point mass are, too"]
    if k > most:
        return [f"Pareto-k is {k:.2f}, above {most:.2f}; its error can't be trusted"]
    return _of_error(found)


def _of_distance(found: Estimate, elbo: float, bridged: bool) -> list[str]:
    """Doubts of a guide so far off that the largest weights are rare: log-normal weights whose log-mean lies ``gap``
    above the mean of their logarithms are worth ``exp(-2 gap)`` of a draw each. The weights' own effective size doesn't
    know those that are missing."""
    gap = max(0.0, found.log_evidence - elbo)
    if not found.num_draws * math.exp(-2 * gap) < FEWEST_BY_DISTANCE:
        return []
    more = f"num_samples of {FEWEST_BY_DISTANCE * math.exp(2 * gap):,.0f} or more, or " if gap < FAR else ""
    bridge = "" if bridged else ", or a posterior, for a bridge"
    return [
        f"the evidence lies {gap:.1f} nats above the symmetrised ELBO, so that the largest weights may be missing; "
        f"take {more}a richer guide{bridge}"
    ]


def _of_error(found: Estimate) -> list[str]:
    reasons = []
    if found.error > LARGE_ERROR:
        reasons = [f"its error, {in_nats(found.error)} nats, can't be trusted"]
    if found.effective_draws < FEWEST:
        reasons += [f"{found.effective_draws:.0f} effective draws are too few to know its error"]
    return reasons
