r"""The distance at which a guide of one mode stops sitting between two equivalent
modes, beside a symmetrised one.

    python -m benchmarks.experiments.gelberg_2024.mixture_target --json mixture.json

The target is two Gaussians of standard deviation one, ``d`` apart, that the two
elements of a group exchange: two units of ``n`` weights each, swapped. ``n = 0`` stands
for one dimension, where the group flips the sign. The guide is a mean-field Gaussian.
Turned by 45 degrees the target is a one-dimensional mixture times a Gaussian, so for
guides ``N(m, s^2)`` that treat both units alike every KL divergence here is a
one-dimensional integral, done by quadrature in float64. (Gelberg et al. 2024, arXiv
2408.05496, show such a mixture by simulation.)

1. Thresholds of the mean-field guide, by root finding. Below *onset* the middle is the
   only optimum. Between *onset* and *loss* both the middle and the modes are local
   optima, and at *switch* they are equally good. Beyond *loss* the middle is no optimum
   at all (in one dimension it always is one). Where the three agree the guide leaves
   the middle gradually.
2. Least KL(guide || target), over the distance, of the mean-field guide, of InfoNCE(K)
   with the group's two elements (the bound's expectation, an upper bound of the
   symmetrised guide's KL), and of the symmetrised guide (exact).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.optimize import brentq, minimize
from scipy.special import logsumexp
from scipy.stats import binom

from benchmarks.harness import Results, Row, parse, parser, print_table

# The trapezoid rule, which converges exponentially for what is smooth and falls off on
# both sides.
NODES = np.linspace(-10, 10, 1601)
WEIGHTS = np.exp(-0.5 * NODES**2) / np.exp(-0.5 * NODES**2).sum()
DISTANCES = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0]
THRESHOLDS = ("onset", "switch", "loss")
UNIT_WEIGHTS = [0, 1, 4, 16, 64, 256]

Divergence = Callable[[float, float, float], float]


# exact divergences --------------------------------------------------------------------


def log_normal(x: np.ndarray, mean: float, scale: float) -> np.ndarray:
    return (
        -0.5 * ((x - mean) / scale) ** 2 - math.log(scale) - 0.5 * math.log(2 * math.pi)
    )


def log_mixture(x: np.ndarray, half: float, scale: float) -> np.ndarray:
    return np.logaddexp(
        log_normal(x, half, scale), log_normal(x, -half, scale)
    ) - math.log(2)


def kl_mean_field(m: float, s: float, d: float, n: int = 0) -> float:
    """KL of the guide to the mixture, ``m`` and ``d`` measured along the line through
    the modes.

    With ``n`` weights a unit the difference of the units is spread over ``2n``
    coordinates, in which a mean-field guide has one scale for all: the other ``2n - 1``
    directions pay for what the scale does along this one.
    """
    x = m + s * NODES
    along = float(WEIGHTS @ (log_normal(x, m, s) - log_mixture(x, d / 2, 1.0)))
    return along + max(2 * n - 1, 0) * (0.5 * s**2 - 0.5 - math.log(s))


def kl_symmetrized(m: float, s: float, d: float, n: int = 0) -> float:
    """KL of the guide averaged over the group: what it gains is the mutual information
    of the element and the draw.
    """
    x = m + s * NODES
    return kl_mean_field(m, s, d, n) + float(
        WEIGHTS @ (log_mixture(x, m, s) - log_normal(x, m, s))
    )


def kl_infonce(m: float, s: float, d: float, K: int, n: int = 0) -> float:
    """Expectation of the KL that InfoNCE(K) reports: of ``K`` uniform elements, a
    binomial number are the swap.
    """
    x = m + s * NODES
    own, other = log_normal(x, m, s), log_normal(x, -m, s)
    swaps = np.arange(K + 1)[:, None]
    with np.errstate(divide="ignore"):
        counts = np.stack(
            [
                np.broadcast_to(np.log(K + 1 - swaps), (K + 1, len(x))),
                np.log(swaps) + 0 * x,
            ]
        )
    estimate = logsumexp(counts + np.stack([own, other])[:, None], axis=0) - math.log(
        K + 1
    )
    gain = binom.pmf(np.arange(K + 1), K, 0.5) @ (estimate - own)
    return kl_mean_field(m, s, d, n) + float(WEIGHTS @ gain)


def least(
    divergence: Divergence, d: float, starts: Sequence[float]
) -> tuple[float, float, float]:
    """The lowest of the local optima reached from means ``starts``: ``(divergence, |m|,
    s)``.
    """
    options = {"xatol": 1e-7, "fatol": 1e-12, "maxiter": 4000}
    found = []
    for start in starts:
        result = minimize(
            lambda z: divergence(z[0], math.exp(z[1]), d),
            [start, 0.0],
            method="Nelder-Mead",
            options=options,
        )
        found.append(
            (float(result.fun), abs(float(result.x[0])), math.exp(float(result.x[1])))
        )
    return min(found)


# thresholds ---------------------------------------------------------------------------


def middle(d: float, n: int) -> tuple[float, float]:
    """The best guide of mean zero: ``(KL, scale)``."""
    bounds = [(math.log(0.3), math.log(2 + d))]
    result = minimize(
        lambda z: kl_mean_field(0.0, math.exp(z[0]), d, n),
        [math.log(1 + d / 8)],
        bounds=bounds,
    )
    return float(result.fun), math.exp(float(result.x[0]))


def curvature(d: float, n: int) -> float:
    """Second derivative of the KL in the mean, at the best guide of mean zero."""
    _, s = middle(d, n)
    return 1 - (d / 2) ** 2 * float(WEIGHTS @ (1 - np.tanh(d / 2 * s * NODES) ** 2))


def in_a_mode(d: float, n: int) -> tuple[float, float]:
    """The local optimum that is reached downhill from a mode: ``(KL, mean)``."""

    # of the mean and of the log of the scale
    def value_and_gradient(z: np.ndarray) -> tuple[float, np.ndarray]:
        m, s = z[0], math.exp(z[1])
        pull = d / 2 * np.tanh(d / 2 * (m + s * NODES))
        across = max(2 * n - 1, 0) * (s**2 - 1)
        return kl_mean_field(m, s, d, n), np.array(
            [m - WEIGHTS @ pull, s**2 - 1 - s * (WEIGHTS @ (NODES * pull)) + across]
        )

    bounds = [(0, d), (math.log(0.3), math.log(2 + d))]
    options = {"ftol": 0, "gtol": 1e-11}
    result = minimize(
        value_and_gradient,
        [d / 2, 0.0],
        jac=True,
        bounds=bounds,
        method="L-BFGS-B",
        options=options,
    )
    return float(result.fun), float(result.x[0])


def thresholds(n: int) -> dict[str, float | None]:
    """Distances at which the optimum in the modes appears, becomes the better one, and
    the middle stops being one.

    In one dimension the middle never stops (``loss`` is ``None``): its best scale ``s``
    makes the curvature 1/s^2.
    """
    low, high = 1.2, 12.0
    never = curvature(high, n) > 0
    loss = high if never else brentq(lambda d: curvature(d, n), low, high, xtol=1e-10)
    a, b = low, loss * 1.05
    for _ in range(40):
        centre = (a + b) / 2
        a, b = (a, centre) if in_a_mode(centre, n)[1] > 0.05 else (centre, b)
    onset = b
    # no distance has two kinds of optima: the mean leaves zero gradually
    if onset > loss * (1 - 1e-3):
        return {"onset": loss, "switch": loss, "loss": loss}
    switch = brentq(
        lambda d: in_a_mode(d, n)[0] - middle(d, n)[0],
        onset * 1.0005,
        loss * 0.9999,
        xtol=1e-9,
    )
    return {"onset": onset, "switch": switch, "loss": None if never else loss}


# the experiment -----------------------------------------------------------------------

DIVERGENCES: dict[str, Divergence] = {
    "mean-field": lambda m, s, d: kl_mean_field(m, s, d, 1),
    "infonce-1": lambda m, s, d: kl_infonce(m, s, d, 1, 1),
    "infonce-15": lambda m, s, d: kl_infonce(m, s, d, 15, 1),
    "exact": lambda m, s, d: kl_symmetrized(m, s, d, 1),
}


def optimum(method: str, d: float) -> Row:
    kl, m, s = least(DIVERGENCES[method], d, [0.0, 0.05, d / 4, d / 2])
    return {"kl": kl, "mean": m, "scale": s}


def main(argv: list[str] | None = None) -> None:
    options = parse(parser(__doc__, seeds=1), argv)
    unit_weights = UNIT_WEIGHTS[:2] if options.quick else UNIT_WEIGHTS
    distances = [1.0, 4.0] if options.quick else DISTANCES
    results = Results(
        options.json,
        {"distances": distances, "unit_weights": unit_weights},
        options.progress,
    )
    results.fill(lambda part, n: thresholds(n), part=["thresholds"], n=unit_weights)
    results.fill(
        lambda part, **key: optimum(**key),
        part=["optimum"],
        d=distances,
        method=DIVERGENCES,
    )
    rows = []
    for n in unit_weights:
        (row,) = results.find(part="thresholds", n=n)
        name = f"units of {n} weights" if n else "one dimension"
        rows.append(
            [
                name,
                *("never" if row[k] is None else f"{row[k]:.4f}" for k in THRESHOLDS),
            ]
        )
    print_table("1. Thresholds of the mean-field guide", ["", *THRESHOLDS], rows)
    title = (
        "2. Least KL by quadrature (nats), units of one weight; for InfoNCE the "
        "expectation of its upper bound; and "
        "where the mean is (a mode is at d/2)"
    )
    results.table(
        title, ["d", "method"], {"KL": ("kl", 4), "|m|": ("mean", 3)}, part="optimum"
    )


if __name__ == "__main__":
    main()
