"""Models of public bug reports, each beside its exact log-density: right, refused or
wrong.

    python -m benchmarks.checks.bug_reports
    python -m benchmarks.checks.bug_reports --only plate enumeration

The reports are of Pyro, NumPyro, PyMC and PyTorch; the models here are small ones of
the same kinds. ``log_joint`` of a model, at three draws of its weights, is compared
with a formula of SciPy, or with a sum over all values of its discrete sites, and its
gradient with central differences of that formula. A model that can't be right has to be
refused. The command fails if any result is wrong, or if a model that has a right
density is refused.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.ops.indexing import Vindex
from scipy import special, stats
from torch import Tensor

import pyro_symmetric as ps

Point = Mapping[str, np.ndarray]
STEP = 1e-5  # of central differences
CLOSE = 1e-7  # PyTorch's Bessel functions are as exact as that
Y = np.array([0.3, -1.2, 2.0, 0.8])
ROWS = torch.tensor(Y)
FLAGS = np.array([1.0, 0.0, 1.0, 1.0])
COUNTS = np.array([0.0, 3.0, 1.0, 0.0])
SHARES_OF_ROWS = np.array([0.5, 3.0, 1.0, 0.1])


@dataclass(frozen=True)
class Report:
    """A model of a public report.

    :ivar source: the report, as ``owner/repository#number``.
    :ivar points: draws of its weights, site -> ``(3, ...)``.
    :ivar exact: log-density of the weights of a point; ``None`` if the model has none,
        so that it must be refused.
    """

    name: str
    source: str
    model: Callable[[], Any]
    points: Mapping[str, Any]
    exact: Callable[[Point], float] | None = None


# axes that nobody declared ------------------------------------------------------------


def column_of_labels() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("batch", 4):
        labels = torch.tensor(FLAGS)[:, None]
        pyro.sample("y", dist.Bernoulli(logits=a * ROWS), obs=labels)


def several_outputs() -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", 4):
        outputs = dist.Normal(ROWS[:, None] * w, 0.5).to_event(1)
        pyro.sample("y", outputs, obs=torch.stack([ROWS, -ROWS], 1))


def exact_several_outputs(point: Point) -> float:
    means = Y[:, None] * point["w"]
    targets = np.stack([Y, -Y], 1)
    return normal(point["w"]) + normal(targets, means, 0.5)


def targets_without_outputs() -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    with pyro.plate("rows", 4):
        outputs = dist.Normal(ROWS[:, None] * w, 0.5).to_event(1)
        pyro.sample("y", outputs, obs=ROWS[:, None])


def plates_crossed() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("students", 4, dim=-1):
        skill = pyro.sample("skill", dist.Normal(a, 1.0))
    with pyro.plate("items", 2, dim=-1):
        pyro.sample("y", dist.Normal(skill[:, None], 1.0), obs=ROWS)


def crossed_plates() -> None:
    with pyro.plate("students", 4, dim=-2):
        skill = pyro.sample("skill", dist.Normal(0.0, 1.0))
    with pyro.plate("items", 2, dim=-1):
        ease = pyro.sample("ease", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 4, dim=-2), pyro.plate("columns", 2, dim=-1):
        answers = torch.tensor(np.stack([FLAGS, 1 - FLAGS], 1))
        pyro.sample("y", dist.Bernoulli(logits=skill - ease), obs=answers)


def exact_crossed_plates(point: Point) -> float:
    logits = point["skill"] - point["ease"]
    answers = np.stack([FLAGS, 1 - FLAGS], 1)
    return normal(point["skill"]) + normal(point["ease"]) + bernoulli(answers, logits)


def prior_without_event() -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 2.0))
    pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=ROWS[0])


def exact_prior_without_event(point: Point) -> float:
    return normal(point["w"], 0, 2) + normal(Y[0], point["w"].sum())


def scaled_site() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 4), poutine.scale(scale=2.5):
        pyro.sample("y", dist.Normal(a, 1.0), obs=ROWS)


def weighted_rows() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 4), poutine.scale(scale=torch.tensor(SHARES_OF_ROWS)):
        pyro.sample("y", dist.Normal(a, 1.0), obs=ROWS)


def exact_weighted_rows(point: Point) -> float:
    by_row = stats.norm.logpdf(Y, point["a"], 1)
    return normal(point["a"]) + float((SHARES_OF_ROWS * by_row).sum())


def weights_without_rows() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with poutine.scale(scale=torch.tensor(SHARES_OF_ROWS)):
        pyro.sample("y", dist.Normal(a, 1.0), obs=ROWS[0])


def subsampled_rows() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 4, subsample_size=2) as index:
        pyro.sample("y", dist.Normal(a, 1.0), obs=ROWS[index])


# masks --------------------------------------------------------------------------------


def masked_events() -> None:
    """Time series of different lengths, padded."""
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    known = torch.tensor([[True, True], [True, False]])
    with pyro.plate("series", 2):
        steps = dist.Normal(a, 1.0).expand([2, 2]).mask(known).to_event(1)
        pyro.sample("y", steps, obs=ROWS.reshape(2, 2))


def masked_nan() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    known = torch.tensor([True, True, True, False])
    with pyro.plate("rows", 4), poutine.mask(mask=known):
        pyro.sample("y", dist.Normal(a, 1.0), obs=torch.where(known, ROWS, 7.0))


def partly_observed() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    known = torch.tensor([True, False, True, False])
    with pyro.plate("rows", 4):
        pyro.sample("y", dist.Normal(a, 1.0), obs=ROWS, obs_mask=known)


def exact_partly_observed(point: Point) -> float:
    """The unobserved entries have a density, the places of observed ones have none."""
    return (
        normal(point["a"])
        + normal(Y[[0, 2]], point["a"])
        + normal(point["y_unobserved"][[1, 3]], point["a"])
    )


def unbroadcast_mask() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with poutine.mask(mask=torch.ones(4, dtype=torch.bool)):
        pyro.sample("y", dist.Normal(a, 0.1), obs=ROWS[0])


# enumeration --------------------------------------------------------------------------


def switched_coefficients() -> None:
    """Spike and slab in a loop, a site for each coefficient."""
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    mean = torch.zeros(())
    for k in range(3):
        used = pyro.sample(f"used_{k}", dist.Bernoulli(share))
        mean = mean + used * w[k]
    with pyro.plate("rows", 4):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=ROWS)


def exact_switched_coefficients(point: Point) -> float:
    terms = [
        bernoulli(np.array(used), special.logit(point["share"]))
        + normal(Y, (np.array(used) * point["w"]).sum())
        for used in itertools.product([0, 1], repeat=3)
    ]
    prior = beta(point["share"], 2, 2) + normal(point["w"])
    return prior + float(special.logsumexp(terms))


def switched_in_plate() -> None:
    """The same, with a sum over a plate of switches."""
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("coefficients", 3):
        used = pyro.sample("used", dist.Bernoulli(share))
    with pyro.plate("rows", 4):
        pyro.sample("y", dist.Normal((used * w).sum(-1), 1.0), obs=ROWS)


def coupled_downstream() -> None:
    with pyro.plate("a_axis", 2):
        a = pyro.sample("a", dist.Categorical(torch.tensor([0.2, 0.8])))
    c = pyro.sample("c", dist.Normal(0.0, 1.0))
    pyro.sample("b", dist.Normal(a.sum() + c, 1.0), obs=ROWS[0])


def branching_plates() -> None:
    """a -> b -> c in a plate, with a outside."""
    p = pyro.sample("p", dist.Dirichlet(torch.ones(2)))
    a = pyro.sample("a", dist.Categorical(torch.tensor([0.45, 0.55])))
    table = torch.stack([p, p.flip(0)])
    with pyro.plate("m", 2):
        b = pyro.sample("b", dist.Categorical(Vindex(table)[a]))
        c = pyro.sample("c", dist.Categorical(Vindex(table)[b]))
        pyro.sample("d", dist.Normal(c.double(), 1.0), obs=ROWS[:2])


def exact_branching_plates(point: Point) -> float:
    p = point["p"]
    table = np.stack([p, p[::-1]])
    total = 0.0
    for a in (0, 1):
        product = [0.45, 0.55][a]
        for value in Y[:2]:
            product *= sum(
                table[a, b] * table[b, c] * stats.norm.pdf(value, c)
                for b in (0, 1)
                for c in (0, 1)
            )
        total += product
    return float(np.log(total))  # the prior of the simplex is 1


def plate_of_one() -> None:
    share = pyro.sample("share", dist.Beta(2.0, 1.0))
    with pyro.plate("rows", 1):
        z = pyro.sample("z", dist.Bernoulli(share))
        pyro.sample("y", dist.Normal(3 * z, 1.0), obs=ROWS[2:3])


def exact_plate_of_one(point: Point) -> float:
    terms = np.array([1 - point["share"], point["share"]])
    return beta(point["share"], 2, 1) + float(
        np.log((terms * stats.norm.pdf(Y[2], [0, 3])).sum())
    )


def missing_category() -> None:
    """A covariate that is missing for two rows, imputed by enumeration."""
    share, slope = (
        pyro.sample("share", dist.Beta(1.0, 1.0)),
        pyro.sample("slope", dist.Normal(0.0, 1.0)),
    )
    with pyro.plate("known", 2):
        pyro.sample("x", dist.Bernoulli(share), obs=torch.tensor(FLAGS[:2]))
    with pyro.plate("unknown", 2):
        x = pyro.sample("x_missing", dist.Bernoulli(share))
        pyro.sample("y_missing", dist.Normal(slope * x, 1.0), obs=ROWS[2:])
    with pyro.plate("rows", 2):
        pyro.sample(
            "y", dist.Normal(slope * torch.tensor(FLAGS[:2]), 1.0), obs=ROWS[:2]
        )


def exact_missing_category(point: Point) -> float:
    share, slope = point["share"], point["slope"]
    likelihood = bernoulli(FLAGS[:2], special.logit(share)) + normal(
        Y[:2], slope * FLAGS[:2]
    )
    for value in Y[2:]:
        values = stats.norm.pdf(value, [0, slope])
        likelihood += float(np.log((1 - share) * values[0] + share * values[1]))
    return normal(slope) + likelihood


def change_point() -> None:
    rates = pyro.sample("rates", dist.Exponential(torch.ones(2)).to_event(1))
    when = pyro.sample("when", dist.Categorical(torch.ones(5)))
    with pyro.plate("days", 4):
        rate = torch.where(torch.arange(4) < when, rates[0], rates[1])
        pyro.sample("y", dist.Poisson(rate), obs=torch.tensor(COUNTS))


def change_point_in_steps() -> None:
    rates = pyro.sample("rates", dist.Exponential(torch.ones(2)).to_event(1))
    when = pyro.sample("when", dist.Categorical(torch.ones(5)))
    for day in range(4):
        rate = torch.where(day < when, rates[0], rates[1])
        pyro.sample(f"y_{day}", dist.Poisson(rate), obs=torch.tensor(COUNTS[day]))


def exact_change_point(point: Point) -> float:
    rates = point["rates"]
    terms = [
        stats.poisson.logpmf(COUNTS, np.where(np.arange(4) < when, *rates)).sum()
        for when in range(5)
    ]
    return float(-rates.sum() + special.logsumexp(terms) - math.log(5))


def hidden_block() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with poutine.block(hide=["z"]):
        z = pyro.sample("z", dist.Bernoulli(0.3))
    pyro.sample("y", dist.Normal(a + 3 * z, 1.0), obs=ROWS[0])


# supports -----------------------------------------------------------------------------


def label_of_three() -> None:
    a = pyro.sample("a", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", 4):
        pyro.sample("y", dist.Bernoulli(logits=a), obs=torch.tensor(COUNTS))


def long_correlations() -> None:
    a = pyro.sample("a", dist.Gamma(2.0, 1.0))
    matrix = torch.tensor([[0.1, 0.0], [0.1, 0.3]])
    pyro.sample("factor", dist.LKJCholesky(2, a), obs=matrix)


def correlations() -> None:
    factor = pyro.sample("factor", dist.LKJCholesky(2, 2.0))
    scales = torch.tensor([1.0, 2.0])
    law = dist.MultivariateNormal(torch.zeros(2), scale_tril=scales[:, None] * factor)
    with pyro.plate("rows", 2):
        pyro.sample("y", law, obs=ROWS.reshape(2, 2))


def exact_correlations(point: Point) -> float:
    """LKJ(2) of two is ``(1 - r^2) / B``, by quadrature ``4/3``; the factor has the
    row ``r, sqrt(1 - r^2)``, so densities in the factor are those in ``r``."""
    correlation = point["factor"][1, 0]
    covariance = np.array([[1, 2 * correlation], [2 * correlation, 4]])
    rows = stats.multivariate_normal.logpdf(Y.reshape(2, 2), np.zeros(2), covariance)
    return math.log((1 - correlation**2) / (4 / 3)) + float(rows.sum())


def ordered_cutpoints() -> None:
    normals = dist.Normal(torch.zeros(2), 1.0).to_event(1)
    ordered = dist.TransformedDistribution(normals, dist.transforms.OrderedTransform())
    cuts = pyro.sample("cuts", ordered)
    with pyro.plate("rows", 4):
        grades = torch.tensor([0, 2, 1, 0])
        pyro.sample("y", dist.OrderedLogistic(ROWS, cuts), obs=grades)


def exact_ordered_cutpoints(point: Point) -> float:
    cuts = point["cuts"]
    gap = cuts[1] - cuts[0]
    prior = normal(cuts[0]) + normal(np.log(gap)) - np.log(gap)
    below = special.expit(cuts - Y[:, None])
    edges = np.concatenate([np.zeros((4, 1)), below, np.ones((4, 1))], 1)
    shares = np.diff(edges, axis=1)
    return float(prior + np.log(shares[np.arange(4), [0, 2, 1, 0]]).sum())


def truncated() -> None:
    loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
    law = dist.Normal(loc, 1.0)
    with pyro.plate("rows", 4):
        pyro.sample("y", law, obs=ROWS)
        pyro.factor("cut", -torch.log1p(-law.cdf(torch.tensor(-2.0))).expand(4))


def exact_truncated(point: Point) -> float:
    loc = float(point["loc"])
    law = stats.truncnorm(-2 - loc, math.inf, loc=loc)
    return normal(loc) + float(law.logpdf(Y).sum())


def bounded_pareto() -> None:
    scale = pyro.sample("scale", dist.Uniform(0.1, 5.0))
    with pyro.plate("rows", 2):
        pyro.sample("y", dist.Pareto(scale, 2.0), obs=ROWS[2:])


def exact_bounded_pareto(point: Point) -> float:
    by_row = stats.pareto.logpdf(Y[2:], 2, scale=float(point["scale"]))
    return float(by_row.sum()) - math.log(4.9)


def angles() -> None:
    loc = pyro.sample("loc", dist.VonMises(3.0, 2.0))
    with pyro.plate("rows", 4):
        pyro.sample("y", dist.VonMises(loc, 3.0), obs=ROWS)


def exact_angles(point: Point) -> float:
    loc = float(point["loc"])
    prior = stats.vonmises.logpdf(loc, 2, loc=3.0)
    return float(prior + stats.vonmises.logpdf(Y, 3, loc=loc).sum())


# mixtures and counts ------------------------------------------------------------------


def zero_inflated() -> None:
    gate = pyro.sample("gate", dist.Normal(0.0, 1.0))
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", 4):
        law = dist.ZeroInflatedPoisson(rate, gate_logits=gate)
        pyro.sample("y", law, obs=torch.tensor(COUNTS))


def exact_zero_inflated(point: Point) -> float:
    gate, rate = special.expit(point["gate"]), float(point["rate"])
    masses = (1 - gate) * stats.poisson.pmf(COUNTS, rate) + gate * (COUNTS == 0)
    prior = normal(point["gate"]) + stats.gamma.logpdf(rate, 2)
    return float(prior + np.log(masses).sum())


def rows_of_mixtures() -> None:
    """Mixtures over the last axis, for each of several groups."""
    shares = pyro.sample("shares", dist.Dirichlet(torch.ones(2)))
    locs = pyro.sample("locs", dist.Normal(torch.zeros(4, 2), 2.0).to_event(2))
    law = dist.MixtureSameFamily(dist.Categorical(shares), dist.Normal(locs, 1.0))
    with pyro.plate("groups", 4):
        pyro.sample("y", law, obs=ROWS)


def exact_rows_of_mixtures(point: Point) -> float:
    densities = stats.norm.pdf(Y[:, None], point["locs"])
    mixed = np.log((point["shares"] * densities).sum(1)).sum()
    return normal(point["locs"], 0, 2) + float(mixed)


def mixture_of_vectors() -> None:
    locs = pyro.sample("locs", dist.Normal(torch.zeros(2, 2), 2.0).to_event(2))
    components = dist.Normal(locs, 1.0).to_event(1)
    shares = dist.Categorical(torch.tensor([0.3, 0.7]))
    with pyro.plate("rows", 2):
        law = dist.MixtureSameFamily(shares, components)
        pyro.sample("y", law, obs=ROWS.reshape(2, 2))


def exact_mixture_of_vectors(point: Point) -> float:
    rows = Y.reshape(2, 2)[:, None]
    densities = stats.norm.pdf(rows, point["locs"]).prod(-1)
    mixed = np.log(densities @ np.array([0.3, 0.7])).sum()
    return normal(point["locs"], 0, 2) + float(mixed)


def counts_of_two_coins() -> None:
    p = pyro.sample("p", dist.Beta(torch.ones(2), 1.0).to_event(1))
    with pyro.plate("coins", 2):
        pyro.sample("heads", dist.Binomial(5, p), obs=torch.tensor([0.0, 5.0]))


def exact_counts_of_two_coins(point: Point) -> float:
    return float(stats.binom.logpmf([0, 5], 5, point["p"]).sum())


def stick_breaking() -> None:
    with pyro.plate("sticks", 2):
        beta_ = pyro.sample("beta", dist.Beta(1.0, 2.0))
    left = torch.cumprod(1 - beta_, -1)
    shares = torch.cat([beta_[:1], beta_[1:] * left[:1], left[-1:]])
    with pyro.plate("rows", 4):
        z = pyro.sample("z", dist.Categorical(shares))
        pyro.sample("y", dist.Normal(z.double(), 1.0), obs=ROWS)


def exact_stick_breaking(point: Point) -> float:
    first, second = point["beta"]
    shares = np.array([first, second * (1 - first), (1 - first) * (1 - second)])
    densities = stats.norm.pdf(Y[:, None], np.arange(3))
    prior = stats.beta.logpdf(point["beta"], 1, 2).sum()
    return float(prior + np.log(densities @ shares).sum())


# formulas -----------------------------------------------------------------------------


def normal(value: Any, loc: Any = 0.0, scale: Any = 1.0) -> float:
    return float(np.sum(stats.norm.logpdf(value, loc, scale)))


def beta(value: Any, a: float, b: float) -> float:
    return float(np.sum(stats.beta.logpdf(value, a, b)))


def bernoulli(value: Any, logits: Any) -> float:
    """The sum of the log-masses of flags."""
    return float(np.sum(special.log_expit(np.where(value == 1, 1, -1) * logits)))


REAL = [-0.4, 0.3, 1.6]
POSITIVE = [0.4, 1.3, 2.6]
SHARE = [0.2, 0.5, 0.9]
TWO = [[0.2, -0.5], [1.0, 0.4], [-1.3, 0.1]]
THREE = [[0.2, -0.5, 1.0], [1.0, 0.4, 0.3], [-1.3, 0.1, 0.2]]
SIMPLEX = [[0.2, 0.8], [0.5, 0.5], [0.9, 0.1]]
SQUARE = [[[0.2, -0.5], [1.0, 0.4]], [[1.0, 0.2], [0.3, 2.0]], [[0.0, 1.0], [2.0, 0.5]]]
FACTOR = [[[1.0, 0.0], [r, math.sqrt(1 - r * r)]] for r in (-0.4, 0.1, 0.8)]
ITEMS = {"skill": np.array(SQUARE).reshape(3, 4, 1), "ease": TWO}
FOUR = np.array(SQUARE).reshape(3, 4)

REPORTS = [
    Report(
        "column of labels in a plate",
        "pyro-ppl/numpyro#1230",
        column_of_labels,
        {"a": REAL},
    ),
    Report(
        "several outputs",
        "pyro-ppl/pyro#1409",
        several_outputs,
        {"w": TWO},
        exact_several_outputs,
    ),
    Report(
        "one target for several outputs",
        "pymc-devs/pymc#6406",
        targets_without_outputs,
        {"w": TWO},
    ),
    Report(
        "latent axes across a plate",
        "pyro-ppl/numpyro#1045",
        plates_crossed,
        {"a": REAL, "skill": FOUR},
    ),
    Report(
        "crossed plates",
        "pyro-ppl/numpyro#1045",
        crossed_plates,
        ITEMS,
        exact_crossed_plates,
    ),
    Report(
        "prior without to_event",
        "aesara-devs/aeppl#49",
        prior_without_event,
        {"w": THREE},
        exact_prior_without_event,
    ),
    Report(
        "scaled site in a plate",
        "pyro-ppl/pyro#2397",
        scaled_site,
        {"a": REAL},
        lambda p: normal(p["a"]) + 2.5 * normal(Y, p["a"]),
    ),
    Report(
        "weighted rows",
        "pyro-ppl/pyro#2397",
        weighted_rows,
        {"a": REAL},
        exact_weighted_rows,
    ),
    Report(
        "weights without rows",
        "aesara-devs/aeppl#49",
        weights_without_rows,
        {"a": REAL},
    ),
    Report("subsample of a plate", "pyro-ppl/pyro#2394", subsampled_rows, {"a": REAL}),
    Report(
        "mask of padded events",
        "pyro-ppl/numpyro#506",
        masked_events,
        {"a": REAL},
        lambda p: normal(p["a"]) + normal(Y[:3], p["a"]),
    ),
    Report(
        "mask of unknown rows",
        "pyro-ppl/pyro#2447",
        masked_nan,
        {"a": REAL},
        lambda p: normal(p["a"]) + normal(Y[:3], p["a"]),
    ),
    Report(
        "mask longer than its site",
        "pyro-ppl/numpyro#568",
        unbroadcast_mask,
        {"a": REAL},
    ),
    Report(
        "obs_mask",
        "pyro-ppl/numpyro#1191",
        partly_observed,
        {"a": REAL, "y_unobserved": FOUR},
        exact_partly_observed,
    ),
    Report(
        "enumeration of a site for each switch",
        "pyro-ppl/numpyro#779",
        switched_coefficients,
        {"share": SHARE, "w": THREE},
        exact_switched_coefficients,
    ),
    Report(
        "enumeration of a plate that is summed",
        "pyro-ppl/numpyro#779",
        switched_in_plate,
        {"share": SHARE, "w": THREE},
    ),
    Report(
        "enumeration with downstream coupling",
        "pyro-ppl/numpyro#1537",
        coupled_downstream,
        {"c": REAL},
    ),
    Report(
        "enumeration of a tree in a plate",
        "pyro-ppl/pyro#2724",
        branching_plates,
        {"p": SIMPLEX},
        exact_branching_plates,
    ),
    Report(
        "enumeration in a plate of one",
        "pyro-ppl/numpyro#1448",
        plate_of_one,
        {"share": SHARE},
        exact_plate_of_one,
    ),
    Report(
        "enumeration of missing covariates",
        "pyro-ppl/numpyro#744",
        missing_category,
        {"share": SHARE, "slope": REAL},
        exact_missing_category,
    ),
    Report(
        "enumeration of a change point",
        "pyro-ppl/numpyro#779",
        change_point_in_steps,
        {"rates": np.abs(TWO)},
        exact_change_point,
    ),
    Report(
        "enumeration of a change point, in a plate",
        "pyro-ppl/numpyro#779",
        change_point,
        {"rates": np.abs(TWO)},
        exact_change_point,
    ),
    Report("block hides a site", "pyro-ppl/numpyro#868", hidden_block, {"a": REAL}),
    Report(
        "support: a label of three",
        "pytorch/pytorch#52724",
        label_of_three,
        {"a": REAL},
    ),
    Report(
        "support: no factor of correlations",
        "pyro-ppl/pyro#1902",
        long_correlations,
        {"a": POSITIVE},
    ),
    Report(
        "support: correlations",
        "pymc-devs/pymc#3473",
        correlations,
        {"factor": FACTOR},
        exact_correlations,
    ),
    Report(
        "support: ordered cutpoints",
        "pyro-ppl/numpyro#1045",
        ordered_cutpoints,
        {"cuts": np.sort(TWO)},
        exact_ordered_cutpoints,
    ),
    Report(
        "support: truncated normal",
        "pyro-ppl/numpyro#1492",
        truncated,
        {"loc": REAL},
        exact_truncated,
    ),
    Report(
        "support: latent bound",
        "pymc-devs/pymc#6128",
        bounded_pareto,
        {"scale": POSITIVE},
        exact_bounded_pareto,
    ),
    Report(
        "support: circle",
        "pyro-ppl/numpyro#1070",
        angles,
        {"loc": [-2.9, 0.4, 3.0]},
        exact_angles,
    ),
    Report(
        "mixture: zero-inflated",
        "pyro-ppl/pyro#3301",
        zero_inflated,
        {"gate": REAL, "rate": POSITIVE},
        exact_zero_inflated,
    ),
    Report(
        "mixture for each group",
        "pymc-devs/pymc#3044",
        rows_of_mixtures,
        {
            "shares": SIMPLEX,
            "locs": np.stack([np.array(SQUARE).reshape(3, 4)] * 2, -1) * [1, -1],
        },
        exact_rows_of_mixtures,
    ),
    Report(
        "mixture of vectors",
        "pymc-devs/pymc#1811",
        mixture_of_vectors,
        {"locs": SQUARE},
        exact_mixture_of_vectors,
    ),
    Report(
        "mixture by stick-breaking",
        "pymc-devs/pymc#1066",
        stick_breaking,
        {"beta": [[0.2, 0.6], [0.5, 0.1], [0.9, 0.3]]},
        exact_stick_breaking,
    ),
    Report(
        "counts at both ends",
        "pymc-devs/pymc#3524",
        counts_of_two_coins,
        {"p": SIMPLEX},
        exact_counts_of_two_coins,
    ),
]


# comparison ---------------------------------------------------------------------------


def outcome(report: Report) -> str:
    """Return ``"right"``, ``"refused"`` or ``"wrong"``, with the reason."""
    points = {
        site: torch.tensor(np.array(value), dtype=torch.float64)
        for site, value in report.points.items()
    }
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _compared(report, points)
    except ValueError as error:
        message = str(error).splitlines()[0]
        wrongly = "" if report.exact is None else "wrong, as it has a density: "
        return f"{wrongly}refused: {message}"
    finally:
        torch.set_default_dtype(before)


def _compared(report: Report, points: dict[str, Tensor]) -> str:
    leaves = {site: value.requires_grad_() for site, value in points.items()}
    found = ps.log_joint(report.model)(leaves)
    if report.exact is None:
        return f"wrong: {found.tolist()} for a model without a right density"
    exact = np.array([report.exact(_point(points, row)) for row in range(len(found))])
    values = found.detach().numpy()
    if not np.allclose(values, exact, rtol=CLOSE, atol=CLOSE):
        return f"wrong: {values.tolist()}, right {exact.tolist()}"
    finite = found[found.isfinite()].sum()
    gradients = torch.autograd.grad(finite, list(leaves.values()))
    for site, gradient in zip(points, gradients, strict=True):
        if site in ("shares", "p", "factor"):  # no free coordinates
            continue
        slopes = _slopes(report.exact, points, site)
        inside = torch.isfinite(slopes)
        if not torch.allclose(gradient[inside], slopes[inside], 1e-5, 1e-6):
            found_slopes, right = gradient.tolist(), slopes.tolist()
            return f"wrong: gradient {found_slopes} of {site}, right {right}"
    return "right"


def _point(points: Mapping[str, Tensor], row: int) -> Point:
    return {site: value[row].detach().numpy() for site, value in points.items()}


def _slopes(
    exact: Callable[[Point], float], points: Mapping[str, Tensor], site: str
) -> Tensor:
    """Return central differences of a formula in the entries of a site."""
    slopes = torch.zeros_like(points[site])
    for index in itertools.product(*map(range, slopes.shape)):
        values = []
        for step in (STEP, -STEP):
            point = dict(_point(points, index[0]))
            moved = np.array(point[site])
            moved[index[1:]] += step
            point[site] = moved
            values.append(exact(point))
        slopes[index] = (values[0] - values[1]) / (2 * STEP)
    return slopes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD")
    options = parser.parse_args(argv)
    chosen = [
        report
        for report in REPORTS
        if any(word in report.name for word in options.only)
    ]
    outcomes = [outcome(report) for report in chosen]
    for report, result in zip(chosen, outcomes, strict=True):
        print(f"{report.name} ({report.source}): {result}")
    counts = {
        kind: sum(result.startswith(kind) for result in outcomes)
        for kind in ("right", "refused", "wrong")
    }
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts["wrong"] > 0)


if __name__ == "__main__":
    sys.exit(main())
