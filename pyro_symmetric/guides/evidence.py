r"""ELBOs of a guide and estimates of its model's log-evidence: importance sampling, and
a bridge to chains.

.. math:: \mathrm{ELBO}(q) = \mathbb E_q[\log p(w, D) - \log q(w)]
   \;\le\; \mathrm{ELBO}(\bar q)
   \;\le\; \log p(D) = \log \mathbb E_{\bar q}\big[e^{\ell(w)}\big],
   \qquad \ell(w) = \log p(w, D) - \log \bar q(w)

*Importance sampling* averages the weights :math:`e^{\ell}` over draws of the guide; its
error is known if their tail is light, by the Pareto shape ``k`` (Vehtari et al. 2024,
arXiv 1507.02646), and grows with ``k``. *Bridge sampling* (Meng & Wong 1996; Gronau et
al. 2017, arXiv 1703.05984) also takes draws :math:`w_j` of the posterior, in any
copies, beside the guide's
:math:`w_i`: with :math:`s_1, s_2` the shares of effective draws of posterior and guide,
and :math:`\sigma` the logistic function, its estimate is the only root ``x`` of

.. math:: \frac1{s_1} \operatorname{mean}_i\, \sigma(\ell(w_i) - x - c)
    = \frac1{s_2} \operatorname{mean}_j\,
    \sigma(x + c - \ell(w_j)), \qquad c = \log\frac{s_2}{s_1} .

All of this holds for estimates of :math:`\log \bar q`, too: :math:`e^{\ell}` is then a
ratio of two joint densities of weights and drawn group elements. Reference for the
ELBOs: Gelberg et al. 2024 (arXiv 2408.05496).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from scipy.optimize import brentq
from scipy.special import log_expit, logsumexp
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import drawn_seed, forked
from pyro_symmetric.arguments import Names
from pyro_symmetric.discovery.model_carried import AUTO, Auto, is_auto
from pyro_symmetric.discovery.model_check import check_function
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import OrbitEstimator, usual_estimator
from pyro_symmetric.distributions.rotations import SURE_UNITS, rotation_remarks
from pyro_symmetric.groups import Group, group_of
from pyro_symmetric.guides.base import action_on, layout_of
from pyro_symmetric.guides.collapse import UnitDivergences, unit_divergences
from pyro_symmetric.guides.gaussian import (
    AutoGaussian,
    plain_posterior,
    require_spread,
)
from pyro_symmetric.guides.symmetrized import AutoSymmetrized
from pyro_symmetric.mcmc import log_joint as joint_of
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import (
    chain_statistics,
    copied_chains,
    effective_size,
)
from pyro_symmetric.posterior.tables import html_table
from pyro_symmetric.weights import Layout, Weights, pick, require_finite, require_sites

Joint = Callable[[Weights], Tensor]

# draws at which log_joint, and estimates of log q̄, are checked
CHECKED, CHECKED_DENSITIES = 4, 64
PRIORS = 16  # draws, at which priors that depend on other sites are taken
MANY_DRAWS = 1000  # effective draws, from which on the largest weights are among them
# effective draws, below which neither a tail's shape nor an error is known
FEW_DRAWS = 25
# Pareto shape of the upper sixth of the weights, beyond which their variance may be
# infinite
HEAVY_TAIL = 0.45
WIDENED_TO = 0.75  # Pareto shape, up to which errors grow with it
TRAIN = "train the guide for longer, take a richer one, or add chains by posterior="
LARGEST_ERROR = 20.0  # nats; larger standard errors are reported as infinite


@dataclass(frozen=True)
class EvidenceEstimate:
    """An estimate of the log-evidence.

    :param log_evidence: in nats.
    :param error: the standard error, in nats; infinite beyond 20.
    :param num_draws: the number of draws of the guide, or of the chains.
    :param effective_draws: the number of independent draws of equal weight that these
        are worth.
    """

    log_evidence: float
    error: float
    num_draws: int
    effective_draws: float

    def interval(self, prob: float = 0.95) -> tuple[float, float]:
        """Return the ends of the confidence interval of the log-evidence, by the normal
        approximation.
        """
        half = self.error * NormalDist().inv_cdf(
            0.5 + arguments.fraction("prob", prob) / 2
        )
        return self.log_evidence - half, self.log_evidence + half


class _Number(NamedTuple):
    """A line of what is shown: a number, its standard error, and a remark."""

    name: str
    relation: str
    value: float
    error: float
    remark: str = ""


@dataclass(frozen=True)
class Evidence:
    """ELBOs and log-evidence estimates, in nats.

    :param elbo: the ELBO of the plain guide; ``elbo_error`` is its standard error.
    :param symmetrized_elbo: the ELBO of the symmetrised guide; ``symmetrized_error`` is
        its standard error.
    :param estimator: the estimator of the symmetrised density.
    :param bound: ``"lower"`` if the expectation of ``symmetrized_elbo`` is a lower
        bound of the symmetrised guide's ELBO, ``"exact"`` if it is that ELBO.
    :param log_order: ``log |G|`` of permutations and signs, the most that averaging
        over these can add; over rotations it may add more.
    :param importance: the log-evidence by importance sampling from the symmetrised
        guide.
    :param pareto_k: the Pareto shape of the importance weights; above 0.7, or less for
        fewer than 2,200 draws, the standard error is unreliable.
    :param bridge: the log-evidence by bridge sampling, if a posterior was given.
    :param doubts: diagnostics that failed; empty if all passed.
    :param units: how far the guide's units are from their priors, if it is Gaussian.
    :param remarks: over which rotations was averaged, with how many effective
        proposals, and over which not.
    """

    elbo: float
    elbo_error: float
    symmetrized_elbo: float
    symmetrized_error: float
    estimator: str
    bound: str
    log_order: float
    importance: EvidenceEstimate
    pareto_k: float
    bridge: EvidenceEstimate | None = None
    doubts: Names = ()
    units: UnitDivergences | None = field(default=None, compare=False)
    remarks: Names = ()

    @property
    def best(self) -> EvidenceEstimate:
        """The bridge estimate if there is one, as its terms are bounded, else
        importance sampling: mind ``doubts``.
        """
        return self.bridge or self.importance

    @property
    def _bridge_stands(self) -> bool:
        """True if importance sampling alone is in doubt."""
        about = [doubt.startswith("importance sampling") for doubt in self.doubts]
        return self.bridge is not None and all(about)

    def _error_of(self, estimate: EvidenceEstimate) -> float:
        """Return the standard error; NaN if it is in doubt."""
        is_known = not self.doubts
        if estimate is self.bridge:
            is_known = self._bridge_stands
        return estimate.error if is_known else math.nan

    def _repr_html_(self) -> str:
        rows = [("", "nats", "standard error")]
        for name, _, value, error, _ in self._numbers():
            rows.append((name, f"{value:.7g}", f"{error:.2g}"))
        return html_table("Evidence", rows, self.doubts)

    def _numbers(self) -> Iterator[_Number]:
        """Yield the numbers as they are shown."""
        yield _Number("ELBO", "=", self.elbo, self.elbo_error)
        yield _Number(
            "symmetrised ELBO",
            "=" if self.bound == "exact" else "≥",
            self.symmetrized_elbo,
            self.symmetrized_error,
            f", by {self.estimator}; log |G| = {self.log_order:.1f}",
        )
        shape = f", Pareto-k {self.pareto_k:.2f}"
        for name, estimate, suffix in (
            ("importance", self.importance, shape),
            ("bridge", self.bridge, ""),
        ):
            if estimate:
                draws = (
                    f"{estimate.effective_draws:.0f} effective of {estimate.num_draws}"
                )
                yield _Number(
                    f"{name} sampling",
                    "≈",
                    estimate.log_evidence,
                    self._error_of(estimate),
                    f", {draws} draws{suffix}",
                )

    def __repr__(self) -> str:
        lines = ["Evidence, in nats"]
        for name, relation, value, error, remark in self._numbers():
            margin = "" if math.isnan(error) else f" ± {error:.2g}"
            lines.append(f"  {name:19} {relation} {value:.7g}{margin}{remark}")
        lines += [f"  {remark}" for remark in self.remarks]
        if self.units:
            lines.append(f"  {self.units}")
        if self.doubts:
            subject = "importance sampling is " * self._bridge_stands
            lines.append(f"  {subject}in doubt, so that no error is known:")
            lines += [f"  ! {doubt}" for doubt in self.doubts]
        if not self.doubts or self._bridge_stands:
            ends = "{:.2f} to {:.2f}".format(*self.best.interval())
            lines.append(f"  95 % interval: {ends}")
        return "\n".join(lines)


def evidence(
    guide: AutoGuide,
    *args: Any,
    posterior: Posterior | None = None,
    estimator: OrbitEstimator | None = None,
    num_samples: int = 512,
    chunk: int = 64,
    log_joint: Joint | None = None,
    symmetry: Group | Symmetry | Auto | None = AUTO,
    **kwargs: Any,
) -> Evidence:
    """Return the ELBOs of a guide, and estimates of its model's log-evidence by
    importance and bridge sampling.

    >>> # two components; the evidence is log(1/2) + 2 log N(5; 0, sqrt(10))
    >>> def model():
    ...     locs = pyro.sample("locs", dist.Normal(torch.zeros(2), 3.0).to_event(1))
    ...     y = (
    ...         dist.MixtureSameFamily(
    ...             dist.Categorical(torch.ones(2)), dist.Normal(locs, 1.0)
    ...         )
    ...         .expand([2])
    ...         .to_event(1)
    ...     )
    ...     pyro.sample("y", y, obs=torch.tensor([-5.0, 5.0]))
    >>> group = ps.Group.declare({"locs": ("k",)}, {"locs": torch.zeros(2)})
    >>> start = dict(init_loc_fn=lambda site: torch.tensor([-4.5, 4.5]), init_scale=1.0)
    >>> found = ps.evidence(ps.AutoSymmetrized(model, group, **start).setup())
    >>> (
    ...     round(found.symmetrized_elbo, 1),
    ...     round(found.best.log_evidence, 1),
    ...     found.doubts,
    ... )
    (-7.3, -7.3, ())

    Failed diagnostics are listed in ``doubts``; a mode that guide and chains both miss
    goes unnoticed. Mean-field guides of weights with correlations above about 0.5 are
    doubted at any number of draws: take a richer guide, such as that of
    :func:`~pyro_symmetric.guides.fit_gaussian`, or the bridge.

    :param guide: a set-up ``AutoSymmetrized``; or any Gaussian or continuous guide,
        with ``log_joint`` and ``symmetry``.
    :param args: the model's arguments, with all data; likewise ``kwargs``.
    :param posterior: for the bridge, draws of the posterior that the guide wasn't
        fitted to.
    :param estimator: of the symmetrised log-density; by default exact where that is
        cheap, else matched units. Of a Gaussian guide,
        :class:`~pyro_symmetric.distributions.RotationImportance` where units of
        ``symmetry`` rotate: 2 to 8, or up to 16 with a doubt. ``remarks`` says so.
    :param num_samples: draws of the guide, at least 2, and about as many of the
        posterior, evenly spaced.
    :param chunk: the number of draws evaluated at once.
    :param log_joint: weights of batch shape ``(S,)`` -> log of prior times likelihood
        of all data, ``(S,)``; by default the model's. ``symmetry``: of that function;
        by default the guide's own, else that of the posterior's model.
    :raises ValueError: naming the units whose exchange changes the model; for chains
        that never move or equal others.
    """
    kind = AutoSymmetrized if log_joint is None else AutoGuide
    wanted = (
        "an AutoSymmetrized, such as AutoSymmetrized(model, base=guide).setup(*args) "
        "of another guide, or another AutoGuide with log_joint= and symmetry="
    )
    arguments.instance("guide", guide, kind, wanted)
    arguments.whole("num_samples", num_samples, 2)
    if is_auto(symmetry):
        symmetry = _of_guide(guide, posterior)
    layout = layout_of(guide)
    if symmetry is None:
        symmetry = Group([], layout.site_shapes)
    group = group_of(symmetry).compact
    model = None
    if log_joint is None:
        if guide._raw_model is None:
            raise ValueError(
                "guide was read from a file or another process, without its model; "
                "take ps.AutoSymmetrized(model, base=guide).setup(*args)"
            )
        model = functools.partial(guide._raw_model[0], *args, **kwargs)
        log_joint = joint_of(model)
    base, action = plain_posterior(guide), action_on(guide, group)
    estimator = estimator or usual_estimator(base, action, training=False)
    group = estimator.averaged(base, action)
    training = guide.estimator if isinstance(guide, AutoSymmetrized) else estimator
    require_spread(base, guide)

    def joint(vectors: Tensor) -> Tensor:
        parts = vectors.split(chunk)
        return torch.cat([_joint(log_joint, layout, part) for part in parts])

    def density(log_prob: Callable[..., Tensor], vectors: Tensor) -> Tensor:
        parts = vectors.split(chunk)
        return torch.cat([log_prob(base, action, part).double() for part in parts])

    def gap(estimator: OrbitEstimator) -> float:
        """Return the nats between an estimator's upper bound, with the identity, and
        its lower bound, without.
        """
        with forked(), suppress(NotImplementedError):
            draws = base.sample((CHECKED_DENSITIES,))
            above = density(estimator.log_prob, draws)
            return float((above - density(estimator.log_prob_elsewhere, draws)).mean())
        return math.inf

    tensors = (*guide.parameters(), *guide.buffers())
    device = next((value.device for value in tensors), None)
    # The checks restore PyTorch's generator: of two threads at once, unforked, both
    # would have the same draws.
    with torch.no_grad(), forked(drawn_seed(), device):
        draws = base.sample((num_samples,))
        invariant = check_function(group, log_joint, layout.constrain(draws[:CHECKED]))
        if not invariant:
            raise ValueError(
                f"at draws of the guide, {invariant}\nWithout that symmetry the "
                "symmetrised ELBO would be no bound of "
                "the evidence: give the group that the model has (ps.verify_model "
                "names the sites), or mend the prior"
            )
        target = joint(draws)
        plain = target - base.log_prob(draws).double()
        symmetrized = target - density(estimator.log_prob, draws)
        # half the variance of log_joint
        noise = float((joint(draws[:CHECKED]) - target[:CHECKED]).square().mean() / 4)
        open_nats = (
            gap(training) > 0.05 * group.log_order() or gap(estimator) + noise > 0.5
        )
        k, bridged, r_hat = pareto_k(symmetrized), None, 1.0
        weighted = widened(importance(symmetrized), k)
        slow, mean = slow_tail(symmetrized), float(symmetrized.mean())
        units = _units(guide, group, model, draws[:PRIORS])
        checked = draws[:CHECKED_DENSITIES]
        remarks = rotation_remarks(estimator, base, action, checked)
        apart = 0.0
        if posterior is not None and math.isfinite(weighted.log_evidence):
            chains = _vectors(posterior, layout, num_samples).to(draws.device)
            vectors = chains.flatten(0, 1)
            ratios = joint(vectors) - density(estimator.log_prob_elsewhere, vectors)
            if not bool(ratios.isfinite().all()):
                raise ValueError(
                    "log_joint is infinite at draws of posterior; they must be draws "
                    "of the guide's model"
                )
            # invariant: chains in other copies agree
            ratios = ratios.reshape(chains.shape[:2])
            bridged = bridge(symmetrized, ratios, posterior.kind == "independent")
            apart = float(ratios.mean()) - mean
            if posterior.kind == "chains":
                r_hat = float(chain_statistics(ratios).r_hat)
    told = (open_nats, bridged, r_hat, apart, _advice(guide, posterior))
    doubts = doubts_of(weighted, k, slow, mean, *told)
    if getattr(guide, "at_least", False):
        doubts += ("symmetry: it says at least, and copies that it misses count less",)
    rotating = [group[name].size for name in group.names("rotate")]
    if max(rotating, default=0) > SURE_UNITS:
        doubts += (
            f"rotations: {max(rotating)} units have modes that proposals may miss, "
            f"good up to {SURE_UNITS}",
        )
    elbo = float(plain.mean())
    if units and group.log_order() and not rotating:
        units = replace(units, share=(mean - elbo) / group.log_order())
    return Evidence(
        elbo=elbo,
        elbo_error=float(plain.std() / num_samples**0.5),
        symmetrized_elbo=mean,
        symmetrized_error=float(symmetrized.std() / num_samples**0.5),
        estimator=repr(estimator),
        bound="lower" if estimator.bound == "upper" else estimator.bound,
        log_order=group.log_order(),
        importance=weighted,
        pareto_k=k,
        bridge=bridged,
        doubts=doubts,
        units=units,
        remarks=remarks,
    )


def _units(
    guide: AutoGuide, group: Group, model: Any, draws: Tensor
) -> UnitDivergences | None:
    """Return how far the units of a Gaussian guide are from their priors, which may
    depend on other sites.
    """
    priors = []
    for draw in draws if model else ():
        weights = layout_of(guide).constrain(draw)
        trace = poutine.trace(poutine.condition(model, data=weights)).get_trace()
        priors.append({site: trace.nodes[site]["fn"] for site in weights})
    with suppress(TypeError, NotImplementedError):
        return unit_divergences(guide, group, priors)
    return None


def _of_guide(guide: Any, posterior: Posterior | None) -> Any:
    """Return the symmetry of a guide, else that of the posterior's model."""
    if isinstance(guide, AutoSymmetrized):
        return guide.group
    symmetry = posterior.symmetry if isinstance(posterior, Posterior) else None
    if symmetry is None:
        raise ValueError(
            "neither guide nor posterior knows a symmetry; pass symmetry= (None for "
            "none), or take AutoSymmetrized(model, base=guide).setup(*args)"
        )
    return symmetry


def _advice(guide: AutoGuide, posterior: Posterior | None) -> str:
    """Return what would help importance sampling, and hasn't been done yet."""
    if posterior is not None:
        return "bridge sampling needs no large weights; a richer guide helps both"
    if isinstance(getattr(guide, "plain", guide), AutoGaussian):  # fitted, not trained
        return "fit the guide to more draws, or add chains by posterior="
    return TRAIN


def doubts_of(
    weighted: EvidenceEstimate,
    k: float,
    slow: float = 0.0,
    elbo: float = -math.inf,
    open_nats: bool = False,
    bridged: EvidenceEstimate | None = None,
    r_hat: float = 1.0,
    apart: float = 0.0,
    advice: str = TRAIN,
) -> Names:
    """Return the diagnostics that the estimates by importance sampling, ``weighted``,
    and by the bridge fail.

    The largest weights may not have been drawn, and Pareto's ``k`` of those that were
    is then too small:
    :func:`slow_tail` looks at more of them, and log-normal weights whose log-mean lies
    ``above`` the ELBO, the mean of their logarithms, are worth ``exp(-2 above)`` of a
    draw each. ``advice`` says what would help. Importance sampling in doubt should be
    too low. The log-ratios of two
    normals whose means are ``d`` deviations apart differ by ``d**2``, ``apart``, and
    the share ``exp(-apart / 8)`` of their draws overlaps.
    """
    largest_k, count = (
        min(0.7, 1 - 1 / math.log10(max(weighted.num_draws, 11))),
        weighted.effective_draws,
    )
    finite = math.isfinite(elbo) and math.isfinite(weighted.log_evidence)
    above = max(0.0, weighted.log_evidence - elbo) if finite else 0.0
    worth = f"{count:.0f}" if count >= 1 else "less than one"
    drawn = weighted.num_draws
    is_finite = math.isfinite(weighted.error)
    error_shown = (
        f"{weighted.error:.2g}" if is_finite else f"more than {LARGEST_ERROR:g}"
    )
    reasons = {
        f"their tail is heavy (Pareto-k {k:.2f}, reliable up to {largest_k:.2f})": not k
        <= largest_k,
        "the upper sixth of all weights has a heavy tail (shape "
        f"{slow:.2f}, reliable up to {HEAVY_TAIL})": slow > HEAVY_TAIL,
        f"{drawn} draws are worth {worth} effective (reliable from {FEW_DRAWS} "
        "on)": not count >= FEW_DRAWS,
        f"the error is {error_shown} nats (reliable up to 0.5)": not weighted.error
        <= 0.5,
        f"it lies {above:.1f} nats above the ELBO, too far for {drawn} draws": drawn
        * math.exp(-2 * above)
        < 50,
    }
    missing = (
        "the largest weights may be missing, and the estimate too low: "
        f"{', '.join(reason for reason, wrong in reasons.items() if wrong)}; {advice}"
    )
    checks = [
        (any(reasons.values()), f"importance sampling: {missing}"),
        (
            open_nats,
            "density: its estimates, or log_joint, leave nats open; take a larger K, "
            "and give all data",
        ),
    ]
    if bridged:
        difference, error = (
            weighted.log_evidence - bridged.log_evidence,
            math.hypot(weighted.error, bridged.error),
        )
        difference = difference if checks[0][0] or open_nats else abs(difference)
        unreliable = {
            f"R-hat is {r_hat:.2f}": r_hat > 1.05,
            "too few draws": bridged.effective_draws < FEW_DRAWS,
            f"the error is {bridged.error:.2g} nats": bridged.error > 0.5,
        }
        unsure = [reason for reason, wrong in unreliable.items() if wrong]
        count_shown = f"by {bridged.effective_draws:.0f} effective draws"
        differs = f"it differs from importance sampling by {abs(difference):.2f} nats"
        checks += [
            (bool(unsure), f"bridge sampling: {', '.join(unsure)}, {count_shown}"),
            (difference > 3 * error, f"bridge sampling: {differs}"),
            (
                weighted.num_draws * math.exp(-max(apart, 0.0) / 8) < 50,
                "bridge sampling: draws of guide and posterior don't overlap, as their "
                f"log-ratios lie {apart:.4g} nats apart",
            ),
        ]
    return tuple(reason for wrong, reason in checks if wrong)


# estimates of log-ratios --------------------------------------------------------------


def importance(log_ratios: Tensor) -> EvidenceEstimate:
    r"""Return the log of the mean weight; its error is the relative error of the mean,
    :math:`\sqrt{1/N_e - 1/N}`.

    If the largest weights weren't drawn, tail and error are both too small. With fewer
    than 1,000 effective draws
    :math:`N_e` is therefore at most that of log-normal weights with the spread of the
    upper half, whose relative variance is :math:`e^{\sigma^2} - 1`: :math:`\sigma` is
    the larger step between upper quantiles one deviation apart.
    """
    values = log_ratios.double()
    total, count = float(values.logsumexp(0)), len(values)
    if not math.isfinite(total):
        return EvidenceEstimate(total - math.log(count), math.nan, count, math.nan)
    effective = math.exp(2 * total - float((2 * values).logsumexp(0)))
    variance = max(0.0, 1 / effective - 1 / count)
    if effective < MANY_DRAWS:
        middle, high, top = upper_quantiles(values)
        variance = max(
            variance,
            math.expm1(min(max(high - middle, top - high) ** 2, 700.0)) / count,
        )
    return EvidenceEstimate(
        total - math.log(count),
        _capped(math.sqrt(variance)),
        count,
        1 / (variance + 1 / count),
    )


def widened(estimate: EvidenceEstimate, k: float) -> EvidenceEstimate:
    r"""Return an estimate with the error that heavy tails have, up to four times as
    large.

    Draws that miss the largest weights have a value and an error that are both too
    small, and are the ones that nobody doubts. Beyond the largest weight :math:`w`
    that was drawn, a tail of shape :math:`k` has the mean :math:`w / (1 - k)`: the
    error is multiplied by :math:`1 / (1 - k)`, at ``k`` plus two of its own
    deviations :math:`(1 + k) / \sqrt{M}`, of a fit to the :math:`M` largest weights.
    """
    if not k > -1:  # weights that are equal, or too few to know the shape
        return estimate
    shape = k + 2 * (1 + k) / math.sqrt(_tail_length(estimate.num_draws))
    factor = 1 / (1 - min(max(shape, 0.0), WIDENED_TO))
    return replace(estimate, error=_capped(estimate.error * factor))


def upper_quantiles(values: Tensor) -> list[float]:
    """Return the quantiles of the finite values at 0, 1 and 2 deviations of a
    normal.
    """
    shares = values.new_tensor(
        [NormalDist().cdf(deviations) for deviations in (0.0, 1.0, 2.0)]
    )
    return values[values.isfinite()].quantile(shares).tolist()


def slow_tail(log_ratios: Tensor) -> float:
    """Return Hill's estimate of the weights' Pareto shape, by the mean excess of the
    upper sixth of their logarithms; 0 if these fall off like a normal's.

    Guides narrower than the posterior, such as mean-field ones of correlated weights,
    have heavy tails, whose end few draws reach.
    """
    values = log_ratios.double()
    if int(values.isfinite().sum()) < FEW_DRAWS:
        return 0.0
    middle, high, top = upper_quantiles(values)
    return (
        float((values[values > high] - high).mean())
        if top - high > 1.5 * (high - middle)
        else 0.0
    )


def pareto_k(log_ratios: Tensor) -> float:
    """Return the Pareto shape of the largest weights; ``-inf`` if they are equal, NaN
    if they are too few.
    """
    values = log_ratios.double().cpu().numpy()
    if len(values) < FEW_DRAWS or not np.isfinite(values.max()):
        return math.nan
    from arviz_stats.base import array_stats  # takes a second to load

    tail = np.sort(values)[-_tail_length(len(values)) :]
    if tail[-1] - tail[0] < 1e-5:  # equal but for rounding
        return -math.inf
    # the fit divides by this weight, which underflows
    if tail[(len(tail) + 2) // 4 - 1] - tail[-1] < -650.0:
        return math.inf
    with np.errstate(over="ignore"):
        return float(array_stats.psislw(-values)[1])


def _tail_length(count: int) -> int:
    """Return the number of the largest of all weights, to which a tail is fitted."""
    return math.ceil(min(count / 5, 3 * count**0.5))


def bridge(
    of_guide: Tensor, of_chains: Tensor, independent: bool = False
) -> EvidenceEstimate:
    """Return the bridge estimate; ``effective_draws`` are those of the chains' mean.

    The error adds the relative variances of both means; the autocorrelation of chains
    is accounted for.

    :param of_guide: log-ratios at draws of the guide, ``(N,)``.
    :param of_chains: log-ratios at draws of the posterior, ``(chains, draws)``.
    :param independent: whether the draws of the posterior are independent.
    """

    def effective(values: Any) -> float:
        """Return the effective sample size of the mean of values, ``(chains,
        draws)``.
        """
        if independent:
            return float(values.size)
        half = values.shape[1] // 2
        with np.errstate(invalid="ignore", divide="ignore"):  # equal values
            split = np.concatenate([values[:, :half], values[:, -half:]])
            return min(float(effective_size(split[None])[0]), float(values.size))

    guide, chains = (value.double().cpu().numpy() for value in (of_guide, of_chains))
    share = effective(chains) / (effective(chains) + len(guide))
    shift = math.log((1 - share) / share)

    def log_sides(x: float) -> float:
        guide_side = logsumexp(log_expit(guide - x - shift)) - math.log(
            len(guide) * share
        )
        chain_side = logsumexp(log_expit(x + shift - chains)) - math.log(
            chains.size * (1 - share)
        )
        return float(guide_side - chain_side)

    finite, margin = (
        np.concatenate([guide[np.isfinite(guide)], chains.ravel()]),
        50.0 + abs(shift),
    )
    x = float(
        brentq(log_sides, finite.min() - margin, finite.max() + margin, xtol=1e-10)
    )
    # Up to a common factor, which relative variances don't see.
    terms = [
        np.exp(v - v.max())
        for v in (log_expit(guide - x - shift), log_expit(x + shift - chains))
    ]
    counts = len(guide), effective(terms[1])
    variance = sum(
        t.var(ddof=1) / t.mean() ** 2 / n for t, n in zip(terms, counts, strict=True)
    )
    return EvidenceEstimate(x, _capped(math.sqrt(variance)), chains.size, counts[1])


def _capped(error: float) -> float:
    return error if error < LARGEST_ERROR else math.inf


# densities ----------------------------------------------------------------------------


def _joint(log_joint: Joint, layout: Layout, vectors: Tensor) -> Tensor:
    """Return ``log_joint`` plus the log-determinant of the transforms, ``(N,)``, in
    float64.
    """
    # Transforms in float64: near the border of a simplex float32 loses the value.
    wide, log_det = layout.constrain_with_log_det(vectors.double())
    tiny = torch.finfo(vectors.dtype).tiny
    weights = {
        s: v.where((v == 0) | (v.abs() >= tiny), tiny * v.sign()).to(vectors.dtype)
        for s, v in wide.items()
    }
    values = log_joint(weights)
    if values.shape != (len(vectors),):
        raise ValueError(
            f"log_joint gave shape {tuple(values.shape)} for {len(vectors)} sets of "
            "weights"
        )
    return values.double() + log_det


def _vectors(posterior: Posterior, layout: Layout, num_samples: int) -> Tensor:
    """Return about ``num_samples`` of the draws, evenly spaced, as unconstrained
    vectors, ``(chains, draws, D)``.
    """
    require_sites(posterior.samples, layout.site_shapes, "posterior")
    if posterior.num_samples < 4:
        raise ValueError(
            f"posterior has {posterior.num_samples} draws of each chain; a bridge "
            "needs at least 4"
        )
    stride = max(1, posterior.num_chains * posterior.num_samples // num_samples)
    thinned = posterior.thin(min(stride, posterior.num_samples // 4))
    vectors = layout.unconstrain(pick(thinned.samples, layout.site_shapes))
    require_finite({"vectors": vectors}, "posterior")
    if posterior.kind == "independent":
        return vectors
    still = (vectors == vectors[:, :1]).flatten(1).all(1).nonzero()[:, 0].tolist()
    if left_out := still or copied_chains(posterior.samples):
        raise ValueError(
            f"the chains {left_out} of posterior never move, or equal others; leave "
            "them out"
        )
    return vectors
