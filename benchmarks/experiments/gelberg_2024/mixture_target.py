r"""The distance at which a guide of one mode stops sitting between two equivalent modes, beside a symmetrised one.

    python -m benchmarks.experiments.gelberg_2024.mixture_target --json mixture.json --out plots

The target is two Gaussians of standard deviation sigma, ``d`` apart, that the two elements of a group exchange: two
units of ``n`` weights each, swapped. ``n = 0`` stands for one dimension, where the group flips the sign. The guide is a
mean-field Gaussian. Turned by 45 degrees the target is a one-dimensional mixture times a Gaussian, so for guides
``N(m, s^2)`` that treat both units alike every KL divergence here is a one-dimensional integral, done by quadrature in
float64. (Gelberg et al. 2024, arXiv 2408.05496, show such a mixture by simulation.)

1. Thresholds of the mean-field guide, by root finding, in units of sigma. Below *onset* the middle is the only optimum.
   Between *onset* and *loss* both the middle and the modes are local optima, and at *switch* they are equally good.
   Beyond *loss* the middle is no optimum at all (in one
   dimension it always is one). Where the three agree the guide leaves the middle gradually.
2. The switch at several sigma, each found anew: it is proportional to sigma.
3. Least KL(guide || target), over the distance, of the mean-field guide, of InfoNCE(K) with the group's two elements
   (the bound's expectation, an upper bound of the symmetrised guide's KL), and of the symmetrised guide (exact).
4. The same by stock SVI with the library's guides, two units of one weight, from random starts over seeds: what share
   of the seeds ends in the middle, and the KL reached, by quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide.initialization import init_to_value
from scipy.optimize import brentq, minimize
from scipy.special import logsumexp
from scipy.stats import binom
from tqdm import tqdm

import pyro_symmetric as ps
from benchmarks.harness import COLOURS, Results, mean_over, new_figure, parse, parser, print_table, save_figure, spread

# The trapezoid rule, which converges exponentially for what is smooth and falls off on both sides.
NODES = np.linspace(-10, 10, 1601)
WEIGHTS = np.exp(-0.5 * NODES**2) / np.exp(-0.5 * NODES**2).sum()
DISTANCES = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0]
THRESHOLDS = ("onset", "switch", "loss")
TRAINED = [1.0, 2.0, 3.0, 3.5, 4.0, 5.0, 6.0]
UNIT_WEIGHTS = [0, 1, 4, 16, 64, 256]

Divergence = Callable[[float, float, float], float]


# exact divergences, sigma = 1 unless said otherwise ------------------------------------------------------------------


def log_normal(x: np.ndarray, mean: float, scale: float) -> np.ndarray:
    return -0.5 * ((x - mean) / scale) ** 2 - math.log(scale) - 0.5 * math.log(2 * math.pi)


def log_mixture(x: np.ndarray, half: float, scale: float) -> np.ndarray:
    return np.logaddexp(log_normal(x, half, scale), log_normal(x, -half, scale)) - math.log(2)


def kl_mean_field(m: float, s: float, d: float, n: int = 0, sigma: float = 1.0) -> float:
    """KL of the guide to the mixture, ``m`` and ``d`` measured along the line through the modes.

    With ``n`` weights a unit the difference of the units is spread over ``2n`` coordinates, in which a mean-field guide
    has one scale for all: the other ``2n - 1`` directions pay for what the scale does along this one.
    """
    x = m + s * NODES
    along = float(WEIGHTS @ (log_normal(x, m, s) - log_mixture(x, d / 2, sigma)))
    across = max(2 * n - 1, 0) * (0.5 * (s / sigma) ** 2 - 0.5 - math.log(s / sigma))
    return along + across


def kl_symmetrized(m: float, s: float, d: float, n: int = 0, sigma: float = 1.0) -> float:
    """KL of the guide averaged over the group: what it gains is the mutual information of the element and the draw."""
    x = m + s * NODES
    return kl_mean_field(m, s, d, n, sigma) + float(WEIGHTS @ (log_mixture(x, m, s) - log_normal(x, m, s)))


def kl_infonce(m: float, s: float, d: float, K: int, n: int = 0) -> float:
    """Expectation of the KL that InfoNCE(K) reports: of ``K`` uniform elements, a binomial number are the swap."""
    x = m + s * NODES
    own, other = log_normal(x, m, s), log_normal(x, -m, s)
    swaps = np.arange(K + 1)[:, None]
    with np.errstate(divide="ignore"):
        counts = np.stack([np.broadcast_to(np.log(K + 1 - swaps), (K + 1, len(x))), np.log(swaps) + 0 * x])
    estimate = logsumexp(counts + np.stack([own, other])[:, None], axis=0) - math.log(K + 1)
    gain = binom.pmf(np.arange(K + 1), K, 0.5) @ (estimate - own)
    return kl_mean_field(m, s, d, n) + float(WEIGHTS @ gain)


def best_from(divergence: Divergence, d: float, starts: list[float]) -> tuple[float, float, float]:
    """The lowest of the local optima reached from means ``starts``: ``(divergence, m, s)``."""
    found = []
    for start in starts:
        result = minimize(
            lambda z: divergence(z[0], math.exp(z[1]), d),
            [start, 0.0],
            method="Nelder-Mead",
            options={"xatol": 1e-7, "fatol": 1e-12, "maxiter": 4000},
        )
        found.append((float(result.fun), abs(float(result.x[0])), math.exp(float(result.x[1]))))
    return min(found)


# thresholds ----------------------------------------------------------------------------------------------------------


def middle(d: float, n: int, sigma: float) -> tuple[float, float]:
    """The best guide of mean zero: ``(KL, scale)``."""
    bounds = [(math.log(0.3 * sigma), math.log(2 * sigma + d))]
    result = minimize(
        lambda z: kl_mean_field(0.0, math.exp(z[0]), d, n, sigma), [math.log(sigma + d / 8)], bounds=bounds
    )
    return float(result.fun), math.exp(float(result.x[0]))


def curvature(d: float, n: int, sigma: float) -> float:
    """Second derivative of the KL in the mean, at the best guide of mean zero; times sigma squared."""
    _, s = middle(d, n, sigma)
    slope = d / (2 * sigma**2)
    return 1 - (sigma * slope) ** 2 * float(WEIGHTS @ (1 - np.tanh(slope * s * NODES) ** 2))


def in_a_mode(d: float, n: int, sigma: float) -> tuple[float, float]:
    """The local optimum that is reached downhill from a mode: ``(KL, mean)``."""
    slope = d / (2 * sigma)

    def value_and_gradient(z: np.ndarray) -> tuple[float, np.ndarray]:  # in units of sigma: mean, log of the scale
        m, s = z[0], math.exp(z[1])
        pull = slope * np.tanh(slope * (m + s * NODES))
        across = max(2 * n - 1, 0) * (s**2 - 1)
        gradient = np.array([m - WEIGHTS @ pull, s**2 - 1 - s * (WEIGHTS @ (NODES * pull)) + across])
        return kl_mean_field(m * sigma, s * sigma, d, n, sigma), gradient

    bounds = [(0, d / sigma), (math.log(0.3), math.log(2 + d / sigma))]
    result = minimize(
        value_and_gradient, [slope, 0.0], jac=True, bounds=bounds, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-11}
    )
    return float(result.fun), float(result.x[0]) * sigma


def thresholds(n: int, sigma: float = 1.0) -> dict[str, float | None]:
    """Distances at which the optimum in the modes appears, becomes the better one, and the middle stops being one.

    In one dimension the middle never stops (``loss`` is ``None``): its best scale ``s`` makes the curvature 1/s^2.
    """
    low, high = 1.2 * sigma, 12 * sigma
    never = curvature(high, n, sigma) > 0
    loss = high if never else brentq(lambda d: curvature(d, n, sigma), low, high, xtol=1e-10)

    def left_middle(d: float) -> bool:
        return in_a_mode(d, n, sigma)[1] > 0.05 * sigma

    a, b = low, loss * 1.05
    for _ in range(40):
        a, b = (a, (a + b) / 2) if left_middle((a + b) / 2) else ((a + b) / 2, b)
    onset = b
    if onset > loss * (1 - 1e-3):  # no distance has two kinds of optima: the mean leaves zero gradually
        return {"onset": loss, "switch": loss, "loss": loss}

    def excess(d: float) -> float:
        return in_a_mode(d, n, sigma)[0] - middle(d, n, sigma)[0]

    switch = brentq(excess, onset * 1.0005, loss * 0.9999, xtol=1e-9)
    return {"onset": onset, "switch": switch, "loss": None if never else loss}


# the library's guides ------------------------------------------------------------------------------------------------


def fit(d: float, estimator: Any, steps: int, seed: int) -> tuple[float, float, float, float]:
    """Train on the target of two units of one weight; returns the guide's means and scales."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    centre = torch.tensor([1.0, -1.0]) * d / math.sqrt(8)

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1).mask(False))
        near = dist.Normal(centre, 1.0).to_event(1).log_prob(w)
        far = dist.Normal(-centre, 1.0).to_event(1).log_prob(w)
        pyro.factor("target", torch.logaddexp(near, far) - math.log(2))

    group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(2)})
    start = torch.randn(2) * 0.5
    guide = ps.AutoSymmetrized(
        model, group, estimator=estimator, init_loc_fn=init_to_value(values={"w": start}), init_scale=0.5
    )
    loss = Trace_ELBO(num_particles=64, vectorize_particles=True, max_plate_nesting=0)
    svi = SVI(model, guide, pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.02 ** (1 / steps)}), loss)
    for _ in range(steps):
        svi.step()
    base = guide.base.get_posterior()
    loc, scale = base.mean.tolist(), base.stddev.tolist()
    return (*loc, *scale)


def kl_in_the_plane(moments: tuple[float, float, float, float], d: float, symmetrized: bool) -> float:
    """KL of a fitted guide to the target by two-dimensional quadrature over the guide."""
    m1, m2, s1, s2 = moments
    nodes, weights = NODES[::8], WEIGHTS[::8] / WEIGHTS[::8].sum()
    x, y = np.meshgrid(m1 + s1 * nodes, m2 + s2 * nodes, indexing="ij")
    a = d / math.sqrt(8)
    target = np.logaddexp(
        log_normal(x, a, 1) + log_normal(y, -a, 1), log_normal(x, -a, 1) + log_normal(y, a, 1)
    ) - math.log(2)
    own = log_normal(x, m1, s1) + log_normal(y, m2, s2)
    swapped = log_normal(y, m1, s1) + log_normal(x, m2, s2)
    guide = np.logaddexp(own, swapped) - math.log(2) if symmetrized else own
    return float(weights @ (guide - target) @ weights)


# the experiment ------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=5)
    options = parse(arguments, argv)
    quick = options.quick
    steps = 60 if quick else 400
    unit_weights = UNIT_WEIGHTS[:2] if quick else UNIT_WEIGHTS
    distances = [1.0, 4.0] if quick else DISTANCES
    results = Results(options.json, {"steps": steps, "distances": distances, "unit_weights": unit_weights})

    for n in tqdm(unit_weights, desc="thresholds", disable=not options.progress):
        if not results.find(part="thresholds", n=n, sigma=1.0):
            results.add({"part": "thresholds", "n": n, "sigma": 1.0, **thresholds(n)})
    for sigma in tqdm([2.0] if quick else [0.25, 0.5, 2.0, 4.0], desc="sigma", disable=not options.progress):
        for n in (0, 1):
            if not results.find(part="thresholds", n=n, sigma=sigma):
                results.add({"part": "thresholds", "n": n, "sigma": sigma, **thresholds(n, sigma)})

    exact: dict[str, Divergence] = {
        "mean-field": lambda m, s, d: kl_mean_field(m, s, d, 1),
        "infonce-1": lambda m, s, d: kl_infonce(m, s, d, 1, 1),
        "infonce-15": lambda m, s, d: kl_infonce(m, s, d, 15, 1),
        "exact": lambda m, s, d: kl_symmetrized(m, s, d, 1),
    }
    for d in tqdm(distances, desc="least KL", disable=not options.progress):
        for name, divergence in exact.items():
            if not results.find(part="optimum", method=name, d=d):
                kl, m, s = best_from(divergence, d, [0.0, 0.05, d / 4, d / 2])
                results.add({"part": "optimum", "method": name, "d": d, "kl": kl, "mean": m, "scale": s})

    estimators = {"mean-field": ps.InfoNCE(0), "infonce-1": ps.InfoNCE(1), "exact": ps.ExactOrbit()}
    trained = [d for d in distances if d in TRAINED]
    runs = [(d, name, seed) for d in trained for name in estimators for seed in range(options.seeds)]
    for d, name, seed in tqdm(runs, desc="SVI", disable=not options.progress):
        if results.find(part="svi", method=name, d=d, seed=seed):
            continue
        moments = fit(d, estimators[name], steps, seed)
        gap = abs(moments[0] - moments[1]) / math.sqrt(2)
        kl = kl_in_the_plane(moments, d, symmetrized=name != "mean-field")
        row = {"part": "svi", "method": name, "d": d, "seed": seed, "kl": kl, "mean": gap, "moments": moments}
        results.add(row)

    report(results, unit_weights, distances, trained, options.seeds)
    if options.out is not None:
        plot(results, unit_weights, distances, trained, options.out)


def report(results: Results, unit_weights: list[int], distances: list[float], trained: list[float], seeds: int) -> None:
    def name_of(n: int) -> str:
        return "one dimension" if n == 0 else f"units of {n} weight{'s' if n > 1 else ''}"

    rows = []
    for n in unit_weights:
        (row,) = results.find(part="thresholds", n=n, sigma=1.0)
        rows.append([name_of(n), *("never" if row[k] is None else f"{row[k]:.4f}" for k in THRESHOLDS)])
    print_table("1. Thresholds of the mean-field guide, in units of sigma", ["", *THRESHOLDS], rows)

    rows = []
    for row in sorted(results.find(part="thresholds"), key=lambda r: (r["n"], r["sigma"])):
        if row["n"] in (0, 1):
            rows.append(
                [name_of(row["n"]), f"{row['sigma']:g}", f"{row['switch']:.4f}", f"{row['switch'] / row['sigma']:.6f}"]
            )
    print_table("2. The switch against sigma", ["", "sigma", "switch", "switch / sigma"], rows)

    methods = ["mean-field", "infonce-1", "infonce-15", "exact"]
    rows = []
    for d in distances:
        found = {m: results.find(part="optimum", method=m, d=d)[0] for m in methods}
        means = [f"{found[m]['mean']:.3f}" for m in ("mean-field", "infonce-1", "exact")]
        rows.append([f"{d:g}", *(f"{found[m]['kl']:.4f}" for m in methods), *means])
    print_table(
        "3. Least KL by quadrature (nats), units of one weight; for InfoNCE the expectation of its upper bound; and "
        "where the mean is (a mode is at d/2)",
        [
            "d",
            "mean-field",
            "InfoNCE(1) ≥",
            "InfoNCE(15) ≥",
            "symmetrised",
            "|m| mean-field",
            "|m| InfoNCE(1)",
            "|m| symm.",
        ],
        rows,
    )
    rows = []
    for d in trained:
        cells = [f"{d:g}"]
        for name in ("mean-field", "infonce-1", "exact"):
            runs = [r for r in results.find(part="svi", method=name, d=d) if r["seed"] < seeds]
            between = sum(r["mean"] < 0.1 * d for r in runs)
            cells += [spread((r["kl"] for r in runs), 4), f"{between}/{len(runs)}"]
        rows.append(cells)
    print_table(
        f"4. Stock SVI, seeds 0..{seeds - 1}: KL by quadrature (of the symmetrised guide but for mean-field), mean "
        "± sd, and how many seeds end in the middle (|m| < d/10)",
        ["d", "mean-field", "middle", "trained by InfoNCE(1)", "middle", "trained exactly", "middle"],
        rows,
    )


def plot(results: Results, unit_weights: list[int], distances: list[float], trained: list[float], folder: Any) -> None:
    figure, axes = new_figure(1, 3, size=(11, 3.3))
    left, centre, right = axes[0]
    for name in ("mean-field", "infonce-1", "infonce-15", "exact"):
        rows = [results.find(part="optimum", method=name, d=d)[0] for d in distances]
        left.plot(distances, [r["kl"] for r in rows], color=COLOURS[name], label=name)
        centre.plot(distances, [r["mean"] for r in rows], color=COLOURS[name], label=name)
    for name in ("mean-field", "exact"):
        means = [mean_over(results.find(part="svi", method=name, d=d), "kl") for d in trained]
        left.plot(trained, means, "o", ms=3, color=COLOURS[name])
    left.axhline(math.log(2), color="#999", ls="--", lw=0.8)
    left.set(xlabel="distance of the modes / sigma", ylabel="KL(guide ‖ target), nats", title="least KL (dots: SVI)")
    centre.plot(distances, [d / 2 for d in distances], color="#ccc", ls="--", lw=0.8)
    centre.set(
        xlabel="distance of the modes / sigma", ylabel="|mean of the guide| / sigma", title="where the guide sits"
    )
    left.legend(loc="center right")
    rows = [results.find(part="thresholds", n=n, sigma=1.0)[0] for n in unit_weights]
    for key in THRESHOLDS:
        right.plot(range(len(rows)), [math.nan if r[key] is None else r[key] for r in rows], "o-", ms=3, label=key)
    right.set_xticks(range(len(rows)), ["1-D", *(str(n) for n in unit_weights[1:])])
    right.set(xlabel="weights of a unit", ylabel="distance / sigma", title="thresholds, mean-field")
    right.legend()
    save_figure(figure, folder, "mixture_target.png")


if __name__ == "__main__":
    main()
