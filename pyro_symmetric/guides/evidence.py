r"""The value of a symmetrised guide, and the evidence of its model: bounds, importance sampling, a bridge to chains.

.. math:: \mathrm{ELBO}(q) = \mathbb E_q[\log p(w, D) - \log q(w)] \;\le\; \mathrm{ELBO}(\bar q)
   \;\le\; \log p(D) = \log \mathbb E_{\bar q}\big[e^{\ell(w)}\big], \qquad \ell(w) = \log p(w, D) - \log \bar q(w)

*Importance sampling* averages :math:`e^{\ell}` over draws of the guide; a light tail of the weights, by their Pareto
shape ``k``, makes its error known (Vehtari et al. 2024, arXiv 1507.02646). *Bridge sampling* (Meng & Wong 1996; Gronau
et al. 2017, arXiv 1703.05984) uses draws of the posterior, too, in any copies: with :math:`s_1, s_2` the shares of
effective draws :math:`w_i, w_j`, and :math:`\sigma` the logistic function, its estimate is the only root ``x`` of

.. math:: \frac1{s_1} \operatorname{mean}_i\, \sigma(\ell(w_i) - x - c) = \frac1{s_2} \operatorname{mean}_j\,
    \sigma(x + c - \ell(w_j)), \qquad c = \log\frac{s_2}{s_1} .

An estimate of :math:`\log \bar q` leaves all of this as it is: then :math:`e^{\ell}` is the ratio of two densities of
the weights together with the elements that the estimate drew. The bounds: Gelberg et al. 2024 (arXiv 2408.05496).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from pyro.infer.autoguide import AutoGuide
from scipy.optimize import brentq
from scipy.special import log_expit, logsumexp
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.discovery.model_check import check_function
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import OrbitEstimator, usual_estimator
from pyro_symmetric.groups import Group, group_of
from pyro_symmetric.guides.base import action_on, layout_of
from pyro_symmetric.guides.gaussian import plain_posterior, require_spread
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.mcmc import log_joint as joint_of
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import chain_statistics, copied_chains, effective_size
from pyro_symmetric.weights import Layout, Weights, require_finite, require_sites

Joint = Callable[[Weights], Tensor]

CHECKED, CHECKED_DENSITIES = 4, 64  # draws at which log_joint, and an estimate of the density, are checked
SEEN = 1000  # so many effective draws have seen the largest weights
FEWEST = 25  # effective draws, below which neither a tail's shape nor an error is known
HEAVY = 0.45  # Pareto shape of the upper sixth of the weights beyond which their variance may be infinite
UNKNOWN = 20.0  # nats of an error beyond which none is known


@dataclass(frozen=True)
class Estimate:
    """One estimate of the log-evidence.

    :param log_evidence: in nats.
    :param error: its standard error, in nats; infinite beyond 20, where none is known.
    :param num_draws: how many draws it is made of: those of the guide, or those of the chains.
    :param effective_draws: how many independent draws, of equal weight, these are worth.
    """

    log_evidence: float
    error: float
    num_draws: int
    effective_draws: float

    def interval(self, prob: float = 0.95) -> tuple[float, float]:
        """The ends of the interval that holds the log-evidence with this probability, by the normal approximation."""
        half = self.error * NormalDist().inv_cdf(0.5 + arguments.fraction("prob", prob) / 2)
        return self.log_evidence - half, self.log_evidence + half


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
        relation, tail = "=" if self.bound == "exact" else "≥", f", Pareto-k {self.pareto_k:.2f}"
        lines = [
            "Evidence, in nats",
            f"  ELBO                = {self.elbo:.7g} ± {self.elbo_error:.2g}",
            f"  symmetrised ELBO    {relation} {self.symmetrized_elbo:.7g} ± {self.symmetrized_error:.2g}, by "
            f"{self.estimator}; log |G| = {self.log_order:.1f}",
        ]
        for name, one, more in (("importance", self.importance, tail), ("bridge", self.bridge, "")):
            if one:
                spread = "" if self.doubts else f" ± {one.error:.2g}"
                worth = f"{one.effective_draws:.0f} effective of {one.num_draws} draws{more}"
                lines.append(f"  {name + ' sampling':19} ≈ {one.log_evidence:.7g}{spread}, {worth}")
        if self.doubts:
            return "\n".join([*lines, "  in doubt, so that no error is known:", *(f"  ! {d}" for d in self.doubts)])
        return "\n".join([*lines, "  95 % interval: {:.2f} to {:.2f}".format(*self.best.interval())])


def evidence(
    guide: AutoGuide,
    *args: Any,
    posterior: Posterior | None = None,
    estimator: OrbitEstimator | None = None,
    num_samples: int = 512,
    chunk: int = 64,
    log_joint: Joint | Any = None,
    group: Group | Symmetry | Any = None,
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

    What doesn't fit is told in ``doubts``. A mode that guide and chains both miss can't be noticed. Mean-field guides
    of weights that correlate by more than about 0.5 are doubted, however many draws there are: take a richer one, such
    as :func:`~pyro_symmetric.guides.fit_gaussian` makes, or the bridge.

    :param guide: a set-up ``AutoSymmetrized``. Or any Gaussian or continuous guide, with ``log_joint`` and ``group``.
    :param args: what the model is called with, all of its data; so are ``kwargs``.
    :param posterior: draws of the posterior that the guide wasn't fitted to, for the bridge.
    :param estimator: of the symmetrised log-density; by default exact where that is cheap, else matched units.
    :param num_samples: draws of the guide, at least 2, and about as many of the posterior, evenly spaced.
    :param chunk: how many are evaluated at once.
    :param log_joint: weights of batch shape ``(S,)`` -> log of prior times likelihood of all data, ``(S,)``; by default
        the model's. ``group``: of all that it doesn't tell apart. Anything else under these two names, such as
        the indices of a hierarchical model's groups, goes to the model.
    :raises ValueError: naming the units whose exchange changes the model; if chains never move, or equal others.
    """
    if log_joint is not None and not callable(log_joint):
        log_joint, kwargs = None, {**kwargs, "log_joint": log_joint}
    if log_joint is None and group is not None and not isinstance(group, Group | Symmetry):
        group, kwargs = None, {**kwargs, "group": group}
    alone = AutoSymmetrized if group is None or log_joint is None else AutoGuide
    arguments.instance("guide", guide, alone, "an AutoSymmetrized, or another AutoGuide with log_joint= and group=")
    group = group_of(group or guide.group).finite
    if log_joint is None:
        if guide._given is None:
            raise ValueError(
                "guide was read from a file or another process, without its model; take "
                "ps.AutoSymmetrized(model, group, base=guide).setup(*args)"
            )
        log_joint = joint_of(guide._given[0], *args, **kwargs)
    arguments.whole("num_samples", num_samples, 2)
    layout, base, action = layout_of(guide), plain_posterior(guide), action_on(guide, group)
    estimator = estimator or usual_estimator(base, action, training=False)
    training = guide.estimator if isinstance(guide, AutoSymmetrized) else estimator
    require_spread(base, guide)

    def joint(vectors: Tensor) -> Tensor:
        return torch.cat([_joint(log_joint, layout, part) for part in vectors.split(chunk)])

    def density(log_prob: Callable[..., Tensor], vectors: Tensor) -> Tensor:
        return torch.cat([log_prob(base, action, part).double() for part in vectors.split(chunk)])

    def gap(one: OrbitEstimator) -> float:
        """The nats that an estimate leaves open: above is its mean with the identity, below that without it."""
        with forked(), suppress(NotImplementedError):
            some = base.sample((CHECKED_DENSITIES,))
            return float((density(one.log_prob, some) - density(one.log_prob_elsewhere, some)).mean())
        return math.inf

    device = next((value.device for value in (*guide.parameters(), *guide.buffers())), None)
    # Draws come from PyTorch's generator, which the checks put back: of two threads at once both would have the same.
    with torch.no_grad(), forked(drawn_seed(), device):
        draws = base.sample((num_samples,))
        if not (invariant := check_function(group, log_joint, layout.constrain(draws[:CHECKED]))):
            raise ValueError(
                f"at draws of the guide, {invariant}\nWithout that symmetry the symmetrised ELBO would be no bound of "
                "the evidence: give the group that the model has (ps.verify_model names the sites), or mend the prior"
            )
        target = joint(draws)
        plain, symmetrized = target - base.log_prob(draws).double(), target - density(estimator.log_prob, draws)
        noise = float((joint(draws[:CHECKED]) - target[:CHECKED]).square().mean() / 4)  # half of its variance
        open_nats = gap(training) > 0.05 * group.log_order() or gap(estimator) + noise > 0.5
        found, k, connected, r_hat = importance(symmetrized), pareto_k(symmetrized), None, 1.0
        slow, mean = slow_tail(symmetrized), float(symmetrized.mean())
        if posterior is not None and math.isfinite(found.log_evidence):
            chains = _vectors(posterior, layout, num_samples).to(draws.device)
            at_chains = joint(chains.flatten(0, 1)) - density(estimator.log_prob_elsewhere, chains.flatten(0, 1))
            if not bool(at_chains.isfinite().all()):
                raise ValueError("log_joint is infinite at draws of posterior; they must be draws of the guide's model")
            at_chains = at_chains.reshape(chains.shape[:2])  # a function of the orbit: chains in other copies agree
            connected = bridge(symmetrized, at_chains, posterior.kind == "independent")
            r_hat = float(chain_statistics(at_chains).r_hat) if posterior.kind == "chains" else 1.0
    doubts = doubts_of(found, k, slow, mean, open_nats, connected, r_hat)
    (elbo, elbo_error), (above, above_error) = (
        (float(values.mean()), float(values.std() / num_samples**0.5)) for values in (plain, symmetrized)
    )
    settings = repr(estimator), "lower" if estimator.bound == "upper" else estimator.bound, group.log_order()
    return Evidence(elbo, elbo_error, above, above_error, *settings, found, k, connected, doubts)


def doubts_of(
    found: Estimate,
    k: float,
    slow: float = 0.0,
    elbo: float = -math.inf,
    open_nats: bool = False,
    connected: Estimate | None = None,
    r_hat: float = 1.0,
) -> tuple[str, ...]:
    """Return what speaks against the estimates by importance sampling, ``found``, and by the bridge, ``connected``.

    Where the largest weights are missing, Pareto's shape ``k`` of those that are there is small: :func:`slow_tail` asks
    more of them. And log-normal weights whose log-mean lies ``far`` above the mean of their logarithms, the ELBO, are
    worth ``exp(-2 far)`` of a draw each. Importance sampling in doubt should be too low.
    """
    most, count = min(0.7, 1 - 1 / math.log10(max(found.num_draws, 11))), found.effective_draws
    far = max(0.0, found.log_evidence - elbo) if math.isfinite(elbo) and math.isfinite(found.log_evidence) else 0.0
    reasons = {
        f"Pareto-k is {k:.2f}, good up to {most:.2f}": not k <= most,
        f"more of the weights fall off like {slow:.2f}, good up to {HEAVY}": slow > HEAVY,
        f"effective draws are {count:.0f}, good from {FEWEST} on": not count >= FEWEST,
        f"the error is {found.error:.2g} nats": not found.error <= 0.5,
        f"it lies {far:.1f} nats above the ELBO": found.num_draws * math.exp(-2 * far) < 50,
    }
    told = "the largest weights may be missing: " + ", ".join(reason for reason, wrong in reasons.items() if wrong)
    checks = [
        (any(reasons.values()), f"importance sampling: {told}"),
        (open_nats, "density: its estimates, or log_joint, leave nats open; take a larger K, and give all data"),
    ]
    if connected:
        apart, error = found.log_evidence - connected.log_evidence, math.hypot(found.error, connected.error)
        apart = apart if checks[0][0] or open_nats else abs(apart)
        told = f"R-hat is {r_hat:.2f}, of {connected.effective_draws:.0f} effective draws"
        unknown = r_hat > 1.05 or connected.effective_draws < FEWEST or connected.error > 0.5
        checks += [
            (unknown, f"bridge sampling: {told}, with an error of {connected.error:.2g} nats"),
            (apart > 3 * error, f"bridge sampling: it differs from importance sampling by {abs(apart):.2f} nats"),
        ]
    return tuple(reason for wrong, reason in checks if wrong)


# estimates of log-ratios ----------------------------------------------------------------------------------------------


def importance(log_ratios: Tensor) -> Estimate:
    r"""Return the log of the mean weight; its error is that of the mean, divided by it: :math:`\sqrt{1/N_e - 1/N}`.

    If the largest weights happen to be missing, tail and error are too small together; the bulk knows more. With fewer
    than 1,000 effective draws :math:`N_e` is at most that of log-normal weights that spread as their upper half does:
    their logarithms' deviation, from one of their upper quantiles to the next, gives a variance of
    :math:`e^{\sigma^2} - 1`.
    """
    values = log_ratios.double()
    total, count = float(values.logsumexp(0)), len(values)
    if not math.isfinite(total):
        return Estimate(total - math.log(count), math.nan, count, math.nan)
    effective = math.exp(2 * total - float((2 * values).logsumexp(0)))
    variance = max(0.0, 1 / effective - 1 / count)
    if effective < SEEN:
        middle, high, top = upper_quantiles(values)
        variance = max(variance, math.expm1(min(max(high - middle, top - high) ** 2, 700.0)) / count)
    return Estimate(total - math.log(count), _known(math.sqrt(variance)), count, 1 / (variance + 1 / count))


def upper_quantiles(values: Tensor) -> list[float]:
    """Return the median of the finite numbers, and what of a normal lies one and two deviations above it."""
    shares = values.new_tensor([NormalDist().cdf(deviations) for deviations in (0.0, 1.0, 2.0)])
    return values[values.isfinite()].quantile(shares).tolist()


def slow_tail(log_ratios: Tensor) -> float:
    """Return the shape of weights by their upper sixth, if their logarithms fall off more slowly than a normal; else 0.

    It is Hill's, the mean excess. Guides narrower than the posterior, as mean-field ones of correlated weights are,
    have such tails, of which few draws see the end.
    """
    values = log_ratios.double()
    if int(values.isfinite().sum()) < FEWEST:
        return 0.0
    middle, high, top = upper_quantiles(values)
    return float((values[values > high] - high).mean()) if top - high > 1.5 * (high - middle) else 0.0


def pareto_k(log_ratios: Tensor) -> float:
    """Return the shape of the largest weights' tail; ``-inf`` if they are equal, NaN if they are too few to tell."""
    values = log_ratios.double().cpu().numpy()
    if len(values) < FEWEST or not np.isfinite(values.max()):
        return math.nan
    from arviz_stats.base import array_stats  # which takes a second to load

    tail = np.sort(values)[-math.ceil(min(len(values) / 5, 3 * len(values) ** 0.5)) :]
    if tail[-1] - tail[0] < 1e-5:  # rounding, which has no shape
        return -math.inf
    if tail[(len(tail) + 2) // 4 - 1] - tail[-1] < -650.0:  # the fit divides by this one, and would say all is well
        return math.inf
    with np.errstate(over="ignore"):
        return float(array_stats.psislw(-values)[1])


def bridge(of_guide: Tensor, of_chains: Tensor, independent: bool = False) -> Estimate:
    """Return the bridge between a guide and a posterior; ``effective_draws`` are the chains', of its own mean.

    The error adds the relative variances of both means, that of chains by their autocorrelation.

    :param of_guide: log-ratios at draws of the guide, ``(N,)``.
    :param of_chains: log-ratios at draws of the posterior, ``(chains, draws)``.
    :param independent: whether draws of the posterior are independent, and no chains.
    """

    def effective(values: Any) -> float:
        """The number of independent draws that the mean of these ``(chains, draws)`` is worth."""
        if independent:
            return float(values.size)
        half = values.shape[1] // 2
        with np.errstate(invalid="ignore", divide="ignore"):  # of values that are all alike
            split = np.concatenate([values[:, :half], values[:, -half:]])
            return min(float(effective_size(split[None])[0]), float(values.size))

    guide, chains = (value.double().cpu().numpy() for value in (of_guide, of_chains))
    share = effective(chains) / (effective(chains) + len(guide))
    shift = math.log((1 - share) / share)

    def excess(x: float) -> float:
        left = logsumexp(log_expit(guide - x - shift)) - math.log(len(guide) * share)
        right = logsumexp(log_expit(x + shift - chains)) - math.log(chains.size * (1 - share))
        return float(left - right)

    known, room = np.concatenate([guide[np.isfinite(guide)], chains.ravel()]), 50.0 + abs(shift)
    x = float(brentq(excess, known.min() - room, known.max() + room, xtol=1e-10))
    # Terms up to a common factor: ratios of their moments are all that counts.
    terms = [np.exp(v - v.max()) for v in (log_expit(guide - x - shift), log_expit(x + shift - chains))]
    counts = len(guide), effective(terms[1])
    variance = sum(t.var(ddof=1) / t.mean() ** 2 / n for t, n in zip(terms, counts, strict=True))
    return Estimate(x, _known(math.sqrt(variance)), chains.size, counts[1])


def _known(error: float) -> float:
    return error if error < UNKNOWN else math.inf


# densities ------------------------------------------------------------------------------------------------------------


def _joint(log_joint: Joint, layout: Layout, vectors: Tensor) -> Tensor:
    """``log_joint`` with the volume of the bijections, ``(N,)``, in float64."""
    # Bijections in float64: near the border of a simplex a bijection in float32 loses the value.
    exact, tiny = vectors.double(), torch.finfo(vectors.dtype).tiny
    found, log_det = layout.constrain_with_log_det(exact)
    weights = {s: v.where((v == 0) | (v.abs() >= tiny), tiny * v.sign()).to(vectors.dtype) for s, v in found.items()}
    values = log_joint(weights)
    if values.shape != (len(vectors),):
        raise ValueError(f"log_joint gave shape {tuple(values.shape)} for {len(vectors)} sets of weights")
    return values.double() + log_det


def _vectors(posterior: Posterior, layout: Layout, num_samples: int) -> Tensor:
    """About so many of the draws, evenly spaced, unconstrained, ``(chains, draws, D)``."""
    require_sites(posterior.samples, layout.site_shapes, "posterior")
    if posterior.num_samples < 4:
        raise ValueError(f"posterior has {posterior.num_samples} draws of each chain; a bridge needs at least 4")
    every = max(1, posterior.num_chains * posterior.num_samples // num_samples)
    thinned = posterior.thin(min(every, posterior.num_samples // 4))
    vectors = layout.unconstrain({site: thinned.samples[site] for site in layout.site_shapes})
    require_finite({"vectors": vectors}, "posterior")
    still = (vectors == vectors[:, :1]).flatten(1).all(1).nonzero()[:, 0].tolist()
    if posterior.kind == "chains" and (left_out := still or copied_chains(posterior.samples)):
        raise ValueError(f"the chains {left_out} of posterior never move, or equal others; leave them out")
    return vectors
