r"""The evidence from log-ratios of the joint density to a guide's, at draws of the guide and of chains.

With :math:`\ell(w) = \log p(w, D) - \log \bar q(w)`:

*Importance sampling* averages :math:`e^{\ell}` over draws of the guide. It has no bias, and an error to be trusted
if the weights' tail is light: the Pareto shape ``k`` of the largest ones tells (Vehtari, Simpson, Gelman, Yao & Gabry
2024, arXiv 1507.02646).

If the largest weights happen to be missing, the tail, the error and the estimate are too small together, so that the
runs that look best are the worst. The bulk of the weights knows more: if their logarithms are normal with deviation
:math:`\sigma`, here that from the median to the 84 % quantile, the mean weight has the relative variance
:math:`(e^{\sigma^2} - 1) / N`. With fewer than 1,000 effective draws the larger of both errors counts.

*Bridge sampling* (Meng & Wong 1996) uses draws :math:`w_i` of the guide and :math:`w_j` of the posterior. For every
function ``h``, :math:`p(D) = \mathbb E_{\bar q}[p(w, D)\,h(w)] / \mathbb E_{p}[\bar q(w)\,h(w)]`; the best one of
independent draws depends on the answer, :math:`h = 1 / (s_1 p(w, D) / p(D) + s_2 \bar q(w))`, which makes the estimate
:math:`e^x` the only root of

.. math:: \frac1{s_1} \operatorname{mean}_i\, \sigma(\ell(w_i) - x - c) = \frac1{s_2} \operatorname{mean}_j\,
    \sigma(x + c - \ell(w_j)), \qquad c = \log\frac{s_2}{s_1},

:math:`\sigma` the logistic function, and :math:`s_1, s_2` the shares of effective draws (Gronau et al. 2017,
arXiv 1703.05984, whose iteration has this fixed point). Terms are at most one, whatever the tails. The error adds the
relative variances of both means, that of chains by their autocorrelation (Frühwirth-Schnatter 2004).

An estimate of :math:`\log \bar q` instead of its value leaves all of this as it is if it is that of
:mod:`~pyro_symmetric.distributions.orbit`: then :math:`e^{\ell}` is the ratio of two densities of the weights together
with the elements that the estimate drew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import log_expit, logsumexp
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.chain_statistics import chain_statistics, effective_size

# A weight whose logarithm lies so far below that of the largest is 0 beside it.
NONE = -650.0
# So many effective draws have seen the largest weights.
SEEN = 1000
# Of a normal, the part below one deviation above the mean.
ONE_DEVIATION = NormalDist().cdf(1.0)
# Tails of fewer draws tell no shape; those of chains, no autocorrelation.
FEWEST = 25
# Nats of an error beyond which none is known.
LARGEST_ERROR = 20.0
# Nats of rounding, which has no shape.
ROUNDING = 1e-5
# Nats of which hundredths say nothing more.
HUGE = 1e7


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

    @property
    def shown_draws(self) -> str:
        """The numbers of draws as they are printed."""
        return f"{self.effective_draws:.0f} effective of {self.num_draws} draws"

    def interval(self, prob: float = 0.95) -> tuple[float, float]:
        """The ends of the interval that holds the log-evidence with this probability, by the normal approximation."""
        half = self.error * NormalDist().inv_cdf(0.5 + arguments.fraction("prob", prob) / 2)
        return self.log_evidence - half, self.log_evidence + half


def in_nats(value: float) -> str:
    """A number of nats as it is printed."""
    return f"{value:.2f}" if abs(value) < HUGE else f"{value:.1e}"


def importance(log_ratios: Tensor) -> Estimate:
    r"""The log of the mean weight; the error is that of the mean, divided by it: :math:`\sqrt{1/N_{eff} - 1/N}`.

    :math:`N_{eff}` is that of the weights, or of log-normal ones that spread as their upper half does, if that is less.

    :param log_ratios: at draws of the guide, ``(N,)``.
    """
    values = log_ratios.double()
    total, count = float(values.logsumexp(0)), len(values)
    if not math.isfinite(total):
        return Estimate(total - math.log(count), math.nan, count, math.nan)
    effective = math.exp(2 * total - float((2 * values).logsumexp(0)))
    variance = max(0.0, 1 / effective - 1 / count)
    if effective < SEEN:
        variance = max(variance, _log_normal_variance(values) / count)
    return Estimate(total - math.log(count), _known(math.sqrt(variance)), count, 1 / (variance + 1 / count))


def pareto_k(log_ratios: Tensor) -> float:
    """The shape of the largest weights' tail; ``-inf`` if they are all equal, ``inf`` if most of them are 0 beside the
    largest, NaN if there are too few to tell.

    :param log_ratios: at draws of the guide, ``(N,)``.
    """
    values = log_ratios.double().cpu().numpy()
    if len(values) < FEWEST or not np.isfinite(values.max()):
        return math.nan
    from arviz_stats.base import array_stats  # which takes a second to load

    tail = np.sort(values)[-math.ceil(min(len(values) / 5, 3 * len(values) ** 0.5)) :]
    if tail[-1] - tail[0] < ROUNDING:
        return -math.inf
    if tail[(len(tail) + 2) // 4 - 1] - tail[-1] < NONE:  # the fit divides by this one, and would say that all is well
        return math.inf
    with np.errstate(over="ignore"):
        return float(array_stats.psislw(-values)[1])


def largest_reliable_k(num_draws: int) -> float:
    """Up to this Pareto shape the error of so many draws can be trusted: 0.7, and less for fewer than 2,200 draws."""
    return min(0.7, 1 - 1 / math.log10(num_draws)) if num_draws > 10 else 0.0


def bridge(of_guide: Tensor, of_chains: Tensor, independent: bool = False) -> Estimate:
    """The bridge between a guide and a posterior; ``effective_draws`` are the chains', of the bridge's own mean.

    :param of_guide: log-ratios at draws of the guide, ``(N,)``.
    :param of_chains: log-ratios at draws of the posterior, ``(chains, draws)``.
    :param independent: whether draws of the posterior are independent, and no chains.
    """
    guide, chains = (value.double().cpu().numpy() for value in (of_guide, of_chains))
    worth = _effective(chains, independent)
    share = worth / (worth + len(guide))
    shift = math.log((1 - share) / share)

    def excess(x: float) -> float:
        left = logsumexp(log_expit(guide - x - shift)) - math.log(len(guide) * share)
        right = logsumexp(log_expit(x + shift - chains)) - math.log(chains.size * (1 - share))
        return float(left - right)

    known = np.concatenate([guide[np.isfinite(guide)], chains.ravel()])
    room = 50.0 + abs(shift)
    x = float(brentq(excess, known.min() - room, known.max() + room, xtol=1e-10))
    of_mean, of_chain_mean = _scaled(log_expit(guide - x - shift)), _scaled(log_expit(x + shift - chains))
    effective = _effective(of_chain_mean, independent)
    variance = _relative_variance(of_mean) / len(guide) + _relative_variance(of_chain_mean) / effective
    return Estimate(x, _known(math.sqrt(variance)), chains.size, effective)


def _known(error: float) -> float:
    return error if error < LARGEST_ERROR else math.inf


def chains_agree(of_chains: Tensor) -> float:
    """R-hat of the log-ratio, a function of the orbit: chains in copies of one mode agree; 1 if they do.

    One chain is compared with itself, half by half. NaN for fewer than 4 draws of each.

    :param of_chains: ``(chains, draws)``.
    """
    if len(of_chains) == 1:
        half = of_chains.shape[1] // 2
        of_chains = of_chains[0, -2 * half :].reshape(2, half) if half else of_chains
    return float(chain_statistics(of_chains.double()).r_hat) if of_chains.shape[1] >= 4 else math.nan


# small steps --------------------------------------------------------------------------------------------------------


def _log_normal_variance(values: Tensor) -> float:
    """Relative variance of log-normal weights whose logarithms spread above their median as these do."""
    low, high = values[values.isfinite()].quantile(values.new_tensor([0.5, ONE_DEVIATION])).tolist()
    return math.expm1(min((high - low) ** 2, 700.0))


def _effective(values: NDArray[np.float64], independent: bool) -> float:
    """The number of independent draws that the mean of these ``(chains, draws)`` is worth."""
    length = values.shape[1]
    if independent:
        return float(values.size)
    split = np.concatenate([values[:, : length // 2], values[:, length - length // 2 :]])
    with np.errstate(invalid="ignore", divide="ignore"):  # of values that are all alike
        return min(float(effective_size(split[None])[0]), float(values.size))


def _scaled(log_terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Terms up to a common factor, none of them above 1: ratios of their moments are all that counts."""
    return np.exp(log_terms - log_terms.max())


def _relative_variance(terms: NDArray[np.float64]) -> float:
    return float(terms.var(ddof=1) / terms.mean() ** 2)
