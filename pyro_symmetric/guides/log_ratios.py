r"""The evidence from log-ratios of the joint density to a guide's, at draws of the guide and of chains.

With :math:`\ell(w) = \log p(w, D) - \log \bar q(w)`:

*Importance sampling* averages :math:`e^{\ell}` over draws of the guide. Its error can be trusted if the tail of the
weights is light, as their Pareto shape ``k`` tells (Vehtari et al. 2024, arXiv 1507.02646). If the largest weights
happen to be missing, tail and error are too small together; the bulk knows more: log-normal weights whose logarithms
have the deviation :math:`\sigma`, here from the median to the 84 % quantile, have a relative variance of
:math:`(e^{\sigma^2} - 1) / N`. With fewer than 1,000 effective draws the larger error counts.

*Bridge sampling* (Meng & Wong 1996; Gronau et al. 2017, arXiv 1703.05984) uses draws :math:`w_i` of the guide and
:math:`w_j` of the posterior, in any copies. Its estimate is the only root ``x`` of

.. math:: \frac1{s_1} \operatorname{mean}_i\, \sigma(\ell(w_i) - x - c) = \frac1{s_2} \operatorname{mean}_j\,
    \sigma(x + c - \ell(w_j)), \qquad c = \log\frac{s_2}{s_1},

:math:`\sigma` the logistic function, and :math:`s_1, s_2` the shares of effective draws. Terms are at most
one, whatever the tails. The error adds the relative variances of both means, that of chains by their autocorrelation.
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
from pyro_symmetric.posterior.statistics import chain_statistics, effective_size

ONE_DEVIATION = NormalDist().cdf(1.0)  # of a normal, the part below one deviation above the mean
SEEN = 1000  # so many effective draws have seen the largest weights
FEWEST = 25  # effective draws, below which neither a tail's shape nor an error is known
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


def importance(log_ratios: Tensor) -> Estimate:
    r"""Return the log of the mean weight; its error is that of the mean, divided by it: :math:`\sqrt{1/N_e - 1/N}`.

    :math:`N_e` is that of the weights, or of log-normal ones that spread as their upper half does, if that is less.

    :param log_ratios: at draws of the guide, ``(N,)``.
    """
    values = log_ratios.double()
    total, count = float(values.logsumexp(0)), len(values)
    if not math.isfinite(total):
        return Estimate(total - math.log(count), math.nan, count, math.nan)
    effective = math.exp(2 * total - float((2 * values).logsumexp(0)))
    variance = max(0.0, 1 / effective - 1 / count)
    if effective < SEEN:
        low, high = values[values.isfinite()].quantile(values.new_tensor([0.5, ONE_DEVIATION])).tolist()
        variance = max(variance, math.expm1(min((high - low) ** 2, 700.0)) / count)
    return Estimate(total - math.log(count), _known(math.sqrt(variance)), count, 1 / (variance + 1 / count))


def pareto_k(log_ratios: Tensor) -> float:
    """Return the shape of the largest weights' tail; ``-inf`` if they are all equal, ``inf`` if most of them are 0
    beside the largest, NaN if there are too few to tell.

    :param log_ratios: at draws of the guide, ``(N,)``.
    """
    values = log_ratios.double().cpu().numpy()
    if len(values) < FEWEST or not np.isfinite(values.max()):
        return math.nan
    from arviz_stats.base import array_stats  # which takes a second to load

    tail = np.sort(values)[-math.ceil(min(len(values) / 5, 3 * len(values) ** 0.5)) :]
    if tail[-1] - tail[0] < 1e-5:  # rounding, which has no shape
        return -math.inf
    if (
        tail[(len(tail) + 2) // 4 - 1] - tail[-1] < -650.0
    ):  # the fit divides by this one, and would say that all is well
        return math.inf
    with np.errstate(over="ignore"):
        return float(array_stats.psislw(-values)[1])


def largest_reliable_k(num_draws: int) -> float:
    """Return the Pareto shape up to which the error of so many draws can be trusted: at most 0.7."""
    return min(0.7, 1 - 1 / math.log10(num_draws)) if num_draws > 10 else 0.0


def bridge(of_guide: Tensor, of_chains: Tensor, independent: bool = False) -> Estimate:
    """Return the bridge between a guide and a posterior; ``effective_draws`` are the chains', of its own mean.

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

    known, room = np.concatenate([guide[np.isfinite(guide)], chains.ravel()]), 50.0 + abs(shift)
    x = float(brentq(excess, known.min() - room, known.max() + room, xtol=1e-10))
    # Terms up to a common factor: ratios of their moments are all that counts.
    terms = [np.exp(v - v.max()) for v in (log_expit(guide - x - shift), log_expit(x + shift - chains))]
    counts = len(guide), _effective(terms[1], independent)
    variance = sum(t.var(ddof=1) / t.mean() ** 2 / n for t, n in zip(terms, counts, strict=True))
    return Estimate(x, _known(math.sqrt(variance)), chains.size, counts[1])


def chains_agree(of_chains: Tensor) -> float:
    """Return R-hat of the log-ratio, a function of the orbit, so that chains in copies of one mode agree.

    One chain is compared with itself, half by half. NaN for fewer than 4 draws of each.

    :param of_chains: ``(chains, draws)``.
    """
    if len(of_chains) == 1:
        half = of_chains.shape[1] // 2
        of_chains = of_chains[0, -2 * half :].reshape(2, half) if half else of_chains
    return float(chain_statistics(of_chains.double()).r_hat) if of_chains.shape[1] >= 4 else math.nan


def _known(error: float) -> float:
    return error if error < UNKNOWN else math.inf


def _effective(values: NDArray[np.float64], independent: bool) -> float:
    """The number of independent draws that the mean of these ``(chains, draws)`` is worth."""
    if independent:
        return float(values.size)
    length = values.shape[1]
    split = np.concatenate([values[:, : length // 2], values[:, length - length // 2 :]])
    with np.errstate(invalid="ignore", divide="ignore"):  # of values that are all alike
        return min(float(effective_size(split[None])[0]), float(values.size))
