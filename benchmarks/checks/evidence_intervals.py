"""Share of the intervals of importance sampling that hold the exact evidence, of those
without a doubt.

    python -m benchmarks.checks.evidence_intervals
    python -m benchmarks.checks.evidence_intervals --only mixture --guides low mean

The guides are trained by SVI, so that they are narrower than the posterior, and their
weights have heavy tails. Exact evidences are sums over all allocations of rows to
components, or quadrature. The command fails if fewer than 85 % of the undoubted
intervals of a model, of which there are at least ten, hold the exact value.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import (
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.initialization import init_to_sample
from scipy import stats
from scipy.special import betaln, gammaln, logsumexp

import pyro_symmetric as ps

LEAST_SHARE, LEAST_INTERVALS = 0.85, 10
STEPS, FIRST_RATE, LAST_RATE = 700, 0.03, 0.0015
NINE_ROWS = np.array([-2.6, -1.9, -2.2, -1.1, 0.4, 0.9, 1.8, 2.5, 2.1])
COUNTS = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 11.0, 14.0])
X = np.linspace(-2.0, 2.0, 8)
TANH_SUM = np.tanh(1.5 * X) + np.tanh(-0.3 * X)
BASES = {
    "full": AutoMultivariateNormal,
    "low": AutoLowRankMultivariateNormal,
    "mean": AutoNormal,
}


class Problem(NamedTuple):
    model: Callable[[], None]
    group: ps.Group
    log_evidence: float


def exchangeable(shapes: dict[str, tuple[int, ...]]) -> ps.Group:
    """The exchanges of the units along the first axis of every site."""
    axes = {site: ("unit", *[None] * (len(s) - 1)) for site, s in shapes.items()}
    return ps.Group.declare(axes, {s: torch.Size(shape) for s, shape in shapes.items()})


def allocations(components: int, rows: int) -> np.ndarray:
    """All allocations as indicators, ``(allocations, components, rows)``."""
    chosen = np.array(list(itertools.product(range(components), repeat=rows)))
    return (chosen[:, None, :] == np.arange(components)[:, None]).astype(float)


def log_shares(members: np.ndarray) -> np.ndarray:
    """Log-probabilities of allocations, whose shares have a uniform prior."""
    counts = members.sum(-1)
    components, rows = members.shape[1:]
    constant = gammaln(components) - gammaln(components + rows)
    return gammaln(counts + 1).sum(-1) + constant


# models -------------------------------------------------------------------------------


def mixture(
    components: int, rows: np.ndarray, spread: float, shares: bool = False
) -> Problem:
    """Normal components of deviation one; locations N(0, spread)."""
    data = torch.tensor(rows).float()

    def model() -> None:
        probs = torch.ones(components) / components
        if shares:
            probs = pyro.sample("shares", dist.Dirichlet(torch.ones(components)))
        prior = dist.Normal(0.0, spread).expand([components]).to_event(1)
        parts = dist.Normal(pyro.sample("locs", prior), 1.0)
        with pyro.plate("rows", len(data)):
            law = dist.MixtureSameFamily(dist.Categorical(probs), parts)
            pyro.sample("y", law, obs=data)

    members = allocations(components, len(rows))
    counts, sums, squares = members.sum(-1), members @ rows, members @ rows**2
    precisions = counts + spread**-2
    log_joint = -0.5 * (squares - sums**2 / precisions)
    log_joint -= 0.5 * np.log(precisions * spread**2)
    log_joint -= 0.5 * counts * math.log(2 * math.pi)
    prior = log_shares(members) if shares else -len(rows) * math.log(components)
    sites = {"shares": (components,)} if shares else {}
    group = exchangeable(sites | {"locs": (components,)})
    return Problem(model, group, float(logsumexp(log_joint.sum(-1) + prior)))


def scales() -> Problem:
    """Two components of unknown location and variance, normal inverse gamma."""
    a, b, precision, data = 2.0, 1.0, 0.25, torch.tensor(NINE_ROWS).float()

    def model() -> None:
        prior = dist.InverseGamma(a, b).expand([2]).to_event(1)
        variances = pyro.sample("variances", prior)
        around = dist.Normal(torch.zeros(2), (variances / precision).sqrt())
        locs = pyro.sample("locs", around.to_event(1))
        parts = dist.Normal(locs, variances.sqrt())
        with pyro.plate("rows", len(data)):
            law = dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), parts)
            pyro.sample("y", law, obs=data)

    members = allocations(2, len(NINE_ROWS))
    counts, sums = members.sum(-1), members @ NINE_ROWS
    precisions, shapes = precision + counts, a + counts / 2
    rates = b + 0.5 * (members @ NINE_ROWS**2 - sums**2 / precisions)
    log_joint = gammaln(shapes) - gammaln(a) + a * np.log(b) - shapes * np.log(rates)
    log_joint += 0.5 * np.log(precision / precisions)
    log_joint -= 0.5 * counts * math.log(2 * math.pi)
    total = logsumexp(log_joint.sum(-1)) - len(NINE_ROWS) * math.log(2)
    return Problem(model, exchangeable({"variances": (2,), "locs": (2,)}), float(total))


def counts_of_three() -> Problem:
    """Three Poisson components with rates Gamma(2, 0.3)."""
    data = torch.tensor(COUNTS).float()

    def model() -> None:
        probs = pyro.sample("shares", dist.Dirichlet(torch.ones(3)))
        rates = pyro.sample("rates", dist.Gamma(2.0, 0.3).expand([3]).to_event(1))
        with pyro.plate("rows", len(data)):
            law = dist.MixtureSameFamily(dist.Categorical(probs), dist.Poisson(rates))
            pyro.sample("y", law, obs=data)

    members = allocations(3, len(COUNTS))
    shapes, precisions = 2 + members @ COUNTS, 0.3 + members.sum(-1)
    log_joint = 2 * math.log(0.3) + gammaln(shapes) - shapes * np.log(precisions)
    total = log_joint.sum(-1) + log_shares(members) - gammaln(COUNTS + 1).sum()
    return Problem(
        model, exchangeable({"shares": (3,), "rates": (3,)}), float(logsumexp(total))
    )


def classes() -> Problem:
    """Two latent classes of nine rows of four answers, with uniform priors."""
    likely = np.where(np.arange(9)[:, None] < 5, 0.85, 0.25)
    answers = (np.random.default_rng(0).random((9, 4)) < likely).astype(float)
    data = torch.tensor(answers).float()

    def model() -> None:
        probs = pyro.sample("shares", dist.Dirichlet(torch.ones(2)))
        yes = pyro.sample("yes", dist.Beta(1.0, 1.0).expand([2, 4]).to_event(2))
        parts = dist.Bernoulli(yes).to_event(1)
        with pyro.plate("rows", len(data)):
            law = dist.MixtureSameFamily(dist.Categorical(probs), parts)
            pyro.sample("y", law, obs=data)

    members = allocations(2, len(answers))
    positive, counts = members @ answers, members.sum(-1, keepdims=True)
    log_joint = betaln(1 + positive, 1 + counts - positive).sum((1, 2))
    total = float(logsumexp(log_joint + log_shares(members)))
    return Problem(model, exchangeable({"shares": (2,), "yes": (2, 4)}), total)


def tanh_units() -> Problem:
    """The sum of two tanh units at eight inputs; quadrature over both weights."""
    inputs, data = torch.tensor(X).float(), torch.tensor(TANH_SUM).float()

    def model() -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 2.0).to_event(1))
        outputs = torch.tanh(w[..., None] * inputs).sum(-2)
        pyro.sample("y", dist.Normal(outputs, 0.4).to_event(1), obs=data)

    grid = np.linspace(-12, 12, 601)
    unit, log_prior = np.tanh(np.outer(grid, X)), stats.norm.logpdf(grid, 0.0, 2.0)
    log_joint = log_prior[:, None] + log_prior
    for column, target in zip(unit.T, TANH_SUM, strict=True):
        log_joint += stats.norm.logpdf(target, column[:, None] + column, 0.4)
    total = logsumexp(log_joint) + 2 * math.log(grid[1] - grid[0])
    return Problem(model, exchangeable({"w": (2,)}), float(total))


def heavy_prior() -> Problem:
    """A sum of two weights with Student priors; quadrature in their areas sinh."""

    def model() -> None:
        prior = dist.StudentT(2.0, 0.0, 1.0).expand([2]).to_event(1)
        w = pyro.sample("w", prior)
        pyro.sample("y", dist.Normal(w.sum(-1), 1.0), obs=torch.tensor(1.0))

    grid = np.linspace(-9, 9, 1001)
    w, log_prior = np.sinh(grid), stats.t.logpdf(np.sinh(grid), 2)
    log_prior = log_prior + np.log(np.cosh(grid))
    log_joint = log_prior[:, None] + log_prior
    log_joint += stats.norm.logpdf(1.0, w[:, None] + w, 1.0)
    total = logsumexp(log_joint) + 2 * math.log(grid[1] - grid[0])
    return Problem(model, exchangeable({"w": (2,)}), float(total))


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mixture of three, nine rows": lambda: mixture(3, NINE_ROWS, 2.0),
    "mixture of three, even rows": lambda: mixture(3, np.linspace(-2, 2, 9), 2.0),
    "mixture of three, shares": lambda: mixture(3, NINE_ROWS, 2.0, shares=True),
    "mixture of three, close": lambda: mixture(3, NINE_ROWS / 3, 3.0),
    "mixture of two, shares": lambda: mixture(2, NINE_ROWS, 2.0, shares=True),
    "scales": scales,
    "counts": counts_of_three,
    "classes": classes,
    "tanh units": tanh_units,
    "heavy prior": heavy_prior,
}


# intervals ----------------------------------------------------------------------------


class Coverage(NamedTuple):
    """Numbers of intervals: of all, of those without a doubt, of those that hold the
    exact value as well.
    """

    intervals: int
    undoubted: int
    right: int

    @property
    def wrong(self) -> bool:
        return self.right < LEAST_SHARE * self.undoubted


def trained(problem: Problem, base: Any, seed: int) -> ps.AutoSymmetrized:
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    start = {"init_loc_fn": init_to_sample, "init_scale": 0.3}
    guide = ps.AutoSymmetrized(problem.model, problem.group, base=base, **start).setup()
    optimizer = torch.optim.Adam(guide.parameters(), FIRST_RATE)
    decay = (LAST_RATE / FIRST_RATE) ** (1 / STEPS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    objective = Trace_ELBO(
        num_particles=8, vectorize_particles=True, max_plate_nesting=1
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        objective.differentiable_loss(problem.model, guide).backward()
        optimizer.step()
        scheduler.step()
    return guide


def coverage(guide: Any, problem: Problem, repetitions: int) -> Coverage:
    """Count the intervals of so many calls of ``evidence``."""
    undoubted = right = 0
    log_joint = ps.log_joint(problem.model)
    for _ in range(repetitions):
        found = ps.evidence(
            guide, log_joint=log_joint, symmetry=problem.group, chunk=512
        )
        if found.doubts:
            continue
        low, high = found.importance.interval()
        undoubted += 1
        right += low <= problem.log_evidence <= high
    return Coverage(repetitions, undoubted, right)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], metavar="WORD")
    parser.add_argument("--guides", nargs="*", default=["full"], choices=BASES)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=48)
    options = parser.parse_args(argv)
    failed = False
    for name, make in PROBLEMS.items():
        if not any(word in name for word in options.only):
            continue
        problem = make()
        for kind in options.guides:
            counts = [
                coverage(
                    trained(problem, BASES[kind], seed), problem, options.repetitions
                )
                for seed in range(options.seeds)
            ]
            total = Coverage(*np.sum(counts, 0).tolist())
            wrong = total.wrong and total.undoubted >= LEAST_INTERVALS
            failed |= wrong
            print(
                f"{name}, {kind}: exact {problem.log_evidence:.3f}; of "
                f"{total.intervals} intervals {total.undoubted} are undoubted, of "
                f"which {total.right} hold it{', TOO FEW' if wrong else ''}",
                flush=True,
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
