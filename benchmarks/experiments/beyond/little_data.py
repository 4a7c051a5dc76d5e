r"""The change of predictions by symmetrised training, with few rows and with many.

    python -m benchmarks.experiments.beyond.little_data --json little.json

A mean-field guide of a wide network with few rows ignores the data (Coker et al. 2022,
arXiv 2106.07052): its units stay at the prior, since each that leaves it costs KL. The
symmetrised ELBO pays about the logarithm of the number of units back for it. In every
case here two mean-field guides are trained from the same start, with the same data,
steps, rate and random numbers: one on the plain ELBO, one on the symmetrised ELBO by
SinkhornImportance(4). What differs is due to the objective.

Shown are, paired over seeds (data, start and noise are new with every seed): the
log-likelihood of 200 test rows, per row, of the average over draws of the guide; the
accuracy, or the error (RMSE) of the mean prediction; the units that are *live*, whose
KL from the prior is above two nats, and the KL of a live unit; the share of log|G| that
the symmetrised guide is worth.

The *fall-back* continues by plain training from the symmetrised optimum. The
*reference* has draws of Hamiltonian Monte Carlo (NUTS) in place of a guide's.

Seeds run in batches of 8; a results file keeps the batches that are made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.experiments.beyond.little_models import (
    FACTOR_NOISE,
    SINE_NOISE,
    Convolution,
    Data,
    Factors,
    Mixture,
    Model,
    Perceptron,
    Task,
)
from benchmarks.harness import Results, Row, parse, parser, print_table
from pyro_symmetric.guides.gaussian import unit_positions
from pyro_symmetric.posterior.statistics import chain_statistics

BATCH = 8  # seeds that are trained at once
PARTICLES = 4
ESTIMATOR = ps.SinkhornImportance(4)
LIVE = 2.0  # nats of a unit's KL
DRAWS, ORBIT_DRAWS = 256, 32
CHAINS, WARMUP, SAMPLES = 8, 100, 100


class Moments(NamedTuple):
    """Means and deviations of mean-field guides, ``(seeds, D)``."""

    loc: Tensor
    scale: Tensor


def library_start(normal: Tensor) -> Moments:
    """As the library's guides, near the prior's mean."""
    return Moments(0.01 * normal, torch.full_like(normal, 0.1))


def drawn_start(normal: Tensor) -> Moments:
    """At a draw of the prior."""
    return Moments(normal, torch.full_like(normal, 0.1))


def prior_start(normal: Tensor) -> Moments:
    """Nearly the prior."""
    return Moments(0.01 * normal, torch.full_like(normal, 0.9))


@dataclass(frozen=True)
class Case:
    """A model, data for it, and how its guides are trained."""

    name: str
    task: Task
    model: Model
    start: Callable[[Tensor], Moments] = drawn_start
    steps: int = 1000
    rate: float = 0.03
    seeds: int = 16
    references: int = 0  # seeds with Hamiltonian Monte Carlo
    falls_back: bool = False


# training -----------------------------------------------------------------------------


def divergences(moments: Moments) -> Tensor:
    """The KL from the prior of every weight."""
    loc, scale = moments
    return 0.5 * (loc.square() + scale.square() - 1) - scale.log()


def orbit_worth(
    model: Model, action: ps.groups.Action, moments: Moments, draws: Tensor
) -> Tensor:
    """The nats that the orbit adds to the ELBO, estimated at draws of the guides."""
    base = dist.Normal(*moments).to_event(1)
    symmetrized = ESTIMATOR.log_prob(base, action, draws)
    return (base.log_prob(draws) - symmetrized).mean(0)


def train(
    case: Case, data: Data, start: Moments, symmetrized: bool, seed: int
) -> Moments:
    """Train the guides of a batch of data sets at once: their parameters are separate,
    and Adam's steps, too.
    """
    action = case.model.action
    loc = start.loc.clone().requires_grad_()
    log_scale = start.scale.log().requires_grad_()
    optimiser = torch.optim.Adam([loc, log_scale], lr=case.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimiser, case.steps, eta_min=0.02 * case.rate
    )
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # of the estimator's own draws
    for _ in range(case.steps):
        moments = Moments(loc, log_scale.exp())
        noise = torch.randn(PARTICLES, *loc.shape, generator=random)
        draws = moments.loc + moments.scale * noise
        weights = action.layout.unflatten(draws)
        fit = case.model.log_likelihood(weights, data.x, data.y).sum(-1).mean(0)
        bound = fit - divergences(moments).sum(-1)
        if symmetrized:
            bound = bound + orbit_worth(case.model, action, moments, draws)
        optimiser.zero_grad()
        (-bound.sum()).backward()
        optimiser.step()
        schedule.step()
    return Moments(loc.detach(), log_scale.exp().detach())


# judgement ----------------------------------------------------------------------------


def predictive(model: Model, weights: Any, data: Data) -> Row:
    """Scores of draws ``(draws, seeds, ...)`` on test rows, for every seed."""
    rows = model.log_likelihood(weights, data.test_x, data.test_y)
    average = rows.logsumexp(0) - math.log(len(rows))
    scores = {"test": average.mean(-1).tolist()}
    expected = model.mean(weights, data.test_x)
    if expected is None:
        return scores
    expected = expected.mean(0)
    scores["rmse"] = (expected - data.test_y).square().mean(-1).sqrt().tolist()
    if getattr(model, "noise", None) is None:
        hits = (expected > 0.5).float() == data.test_y
        scores["accuracy"] = hits.float().mean(-1).tolist()
    return scores


@torch.no_grad()
def judge(case: Case, data: Data, moments: Moments) -> Row:
    torch.manual_seed(99)
    model, action = case.model, case.model.action
    draws = moments.loc + moments.scale * torch.randn(DRAWS, *moments.loc.shape)
    weights = action.layout.unflatten(draws)
    fit = model.log_likelihood(weights, data.x, data.y).sum(-1).mean(0)
    by_weight = divergences(moments)
    by_unit = torch.cat(
        [by_weight[:, places].sum(-1) for places in unit_positions(action)], -1
    )
    live = by_unit > LIVE
    elbo = fit - by_weight.sum(-1)
    worth = orbit_worth(model, action, moments, draws[:ORBIT_DRAWS])
    return {
        **predictive(model, weights, data),
        "elbo": elbo.tolist(),
        "symmetrized elbo": (elbo + worth).tolist(),
        "share": (worth / model.group.log_order()).tolist(),
        "live": live.sum(-1).tolist(),
        "kl": by_unit.tolist(),
    }


def fits(case: Case, seeds: range) -> Row:
    data = case.task.draw(seeds)
    action = case.model.action
    normal = torch.stack(
        [
            torch.randn(action.dim, generator=torch.Generator().manual_seed(seed))
            for seed in seeds
        ]
    )
    start = case.start(normal)
    plain = train(case, data, start, False, seeds.start)
    symmetrized = train(case, data, start, True, seeds.start)
    found = {
        "log order": case.model.group.log_order(),
        "plain": judge(case, data, plain),
        "symmetrised": judge(case, data, symmetrized),
    }
    if case.falls_back:
        back = train(case, data, symmetrized, False, seeds.start + 1)
        found["fall-back"] = judge(case, data, back)
    return found


def reference_of(case: Case, seeds: range) -> Row:
    """Predictions of Hamiltonian Monte Carlo, and the R-hat of their log-likelihood."""
    data = case.task.draw(seeds)
    shapes = case.model.shapes
    scores: dict[str, list[float]] = {"r_hat": []}
    for number, seed in enumerate(seeds):
        rows = Data(*(part[number] for part in data))

        def model(rows: Data = rows) -> None:
            weights = {
                site: pyro.sample(
                    site, dist.Normal(torch.zeros(shape), 1.0).to_event(len(shape))
                )
                for site, shape in shapes.items()
            }
            log_likelihood = case.model.log_likelihood(weights, rows.x, rows.y)
            pyro.factor("rows", log_likelihood.sum(-1))

        posterior = ps.sample(
            ps.NUTS(model),
            num_samples=SAMPLES,
            num_warmup=WARMUP,
            num_chains=CHAINS,
            seed=seed,
            progress=False,
        )
        fit = case.model.log_likelihood(posterior.samples, rows.x, rows.y).sum(-1)
        scores["r_hat"].append(float(chain_statistics(fit).r_hat))
        draws = {site: value.flatten(0, 1) for site, value in posterior.samples.items()}
        draws = {site: value.unsqueeze(1) for site, value in draws.items()}
        single = Data(*(part.unsqueeze(0) for part in rows))
        for name, values in predictive(case.model, draws, single).items():
            scores.setdefault(name, []).extend(values)
    return scores


# cases --------------------------------------------------------------------------------


def moons(
    rows: int = 20,
    widths: tuple[int, ...] = (50,),
    activation: str = "tanh",
    fan_in: bool = True,
    **options: Any,
) -> Case:
    model = Perceptron(2, widths, activation, 2.0, 4.0, None, fan_in)
    name = f"moons, {rows} rows, {units(widths)} {activation}"
    return Case(name, Task("moons", rows), model, **options)


def sine(
    rows: int = 20,
    widths: tuple[int, ...] = (50,),
    activation: str = "tanh",
    start: Callable[[Tensor], Moments] = prior_start,
    **options: Any,
) -> Case:
    model = Perceptron(1, widths, activation, 1.0, 1.0, SINE_NOISE)
    name = f"sine, {rows} rows, {units(widths)} {activation}"
    return Case(name, Task("sine", rows), model, start=start, **options)


def digits(rows: int = 40, widths: tuple[int, ...] = (50,), **options: Any) -> Case:
    model = Perceptron(64, widths, "tanh", 2.0, 3.0, None)
    name = f"digits 3 and 8, {rows} rows, {units(widths)} tanh"
    task = Task("digits 3 and 8", rows)
    return Case(name, task, model, steps=900, seeds=8, **options)


def units(widths: tuple[int, ...]) -> str:
    return " and ".join(map(str, widths))


def renamed(case: Case, remark: str) -> Case:
    return replace(case, name=f"{case.name}, {remark}")


def all_cases() -> list[Case]:
    """All cases, those that matter most first."""
    convolution = Convolution(32, 2.0, 3.0)
    mixture, factors = Mixture(10, 5.0), Factors(10, 8, FACTOR_NOISE)
    return [
        digits(falls_back=True, references=3),
        moons(falls_back=True, references=3),
        sine(falls_back=True, references=3),
        moons(widths=(10,)),
        sine(activation="relu"),
        moons(rows=80),
        digits(rows=150),
        Case(
            "digits 3 and 8, 40 rows, a convolution of 32 channels",
            Task("digits 3 and 8", 40),
            convolution,
            steps=900,
            seeds=8,
        ),
        Case("three clusters, 20 rows, a mixture of 10", Task("clusters", 20), mixture),
        Case("two factors, 20 rows, 8 factors", Task("two factors", 20), factors),
        moons(widths=(20, 20), seeds=8),
        renamed(moons(start=library_start), "the library's start"),
        moons(widths=(20,)),
        moons(rows=40),
        digits(widths=(10,)),
        sine(rows=80),
        sine(widths=(10,)),
        moons(widths=(100,), seeds=8),
        moons(rows=320),
        moons(activation="relu"),
        renamed(moons(fan_in=False), "a prior that isn't scaled by the width"),
        sine(widths=(20, 20), seeds=8),
        renamed(sine(start=drawn_start), "a start at a draw of the prior"),
        renamed(moons(start=prior_start), "a start at the prior"),
        renamed(digits(start=library_start), "the library's start"),
        renamed(sine(start=library_start), "the library's start"),
        moons(rows=10),
        sine(rows=40),
        sine(widths=(20,)),
    ]


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=16)
    arguments.add_argument(
        "--first", type=int, default=0, help="the first seed (default 0)"
    )
    arguments.add_argument(
        "--cases", nargs="+", metavar="NAME", help="these alone (default: all)"
    )
    arguments.add_argument(
        "--no-reference", dest="reference", action="store_false", help="without NUTS"
    )
    arguments.add_argument("--report", action="store_true", help="tables only")
    options = parse(arguments, argv)
    cases = [
        case for case in all_cases() if not options.cases or case.name in options.cases
    ]
    if options.quick:
        cases = [replace(case, steps=5, seeds=2, references=0) for case in cases[:4]]
    results = Results(options.json, {"quick": options.quick}, options.progress)
    for case in () if options.report else cases:
        fill(results, case, options)
    report(results, cases)


def fill(results: Results, case: Case, options: Any) -> None:
    """Add what is missing of a case: batches of fits, then references of single
    seeds.
    """
    end = options.first + min(options.seeds, case.seeds)

    def fit(case_name: str, first: int) -> Row:
        began = time.process_time()
        found = fits(case, range(first, min(first + BATCH, end)))
        return {"kind": "fits", "seconds": time.process_time() - began, **found}

    def refer(case_name: str, reference: int) -> Row:
        began = time.process_time()
        found = reference_of(case, range(reference, reference + 1))
        return {"kind": "reference", "seconds": time.process_time() - began, **found}

    results.fill(fit, case_name=[case.name], first=range(options.first, end, BATCH))
    count = case.references if options.reference else 0
    references = range(options.first, options.first + count)
    results.fill(refer, case_name=[case.name], reference=references)


# tables -------------------------------------------------------------------------------


def gathered(rows: Sequence[Row], method: str, name: str) -> list[float]:
    """The values of all seeds."""
    return [value for row in rows for value in row[method].get(name, ())]


def with_error(values: Sequence[float], digits: int = 3) -> str:
    """Mean and standard error."""
    if len(values) < 2:
        return f"{fmean(values):+.{digits}f}"
    error = stdev(values) / len(values) ** 0.5
    return f"{fmean(values):+.{digits}f} ± {error:.{digits}f}"


def change(rows: Sequence[Row], name: str, before: str, after: str) -> list[float]:
    pairs = zip(gathered(rows, before, name), gathered(rows, after, name), strict=True)
    return [end - start for start, end in pairs]


def both_means(rows: Sequence[Row], name: str, digits: int) -> str:
    means = [fmean(gathered(rows, m, name)) for m in ("plain", "symmetrised")]
    return " → ".join(f"{mean:.{digits}f}" for mean in means)


def kl_of_live_units(rows: Sequence[Row], method: str) -> str:
    units = [unit for row in rows for seed in row[method]["kl"] for unit in seed]
    live = [unit for unit in units if unit > LIVE]
    return f"{fmean(live):.1f}" if live else "-"


def report(results: Results, cases: Sequence[Case]) -> None:
    lines, backs, references = [], [], []
    for case in cases:
        rows = results.find(case_name=case.name, kind="fits")
        if not rows:
            continue
        lines.append(line_of(case, rows))
        if case.falls_back:
            backs.append(fall_back_line(case, rows))
        references += reference_lines(results, case, rows)
    head = ["case", "seeds", "test log-likelihood", "difference", "accuracy or RMSE"]
    head += [
        "difference",
        "live units",
        "KL of a live unit",
        "I / log|G|",
        "plain ELBO",
    ]
    title = "plain → symmetrised training; paired differences ± standard errors"
    print_table(title, head, lines)
    head = ["case", "test log-likelihood", "difference", "plain ELBO"]
    print_table("Plain training from the symmetrised optimum", head, backs)
    head = ["case", "seeds", "plain", "symmetrised", "NUTS", "gap closed", "R-hat"]
    print_table("Beside Hamiltonian Monte Carlo", head, references)


def line_of(case: Case, rows: Sequence[Row]) -> list[str]:
    score = next(
        (name for name in ("accuracy", "rmse") if name in rows[0]["plain"]), None
    )
    test = change(rows, "test", "plain", "symmetrised")
    scores = ["-", "-"]
    if score is not None:
        difference = with_error(change(rows, score, "plain", "symmetrised"))
        scores = [both_means(rows, score, 3), difference]
    kls = [kl_of_live_units(rows, method) for method in ("plain", "symmetrised")]
    return [
        case.name,
        str(len(test)),
        both_means(rows, "test", 2),
        with_error(test),
        *scores,
        both_means(rows, "live", 1),
        " → ".join(kls),
        both_means(rows, "share", 2),
        with_error(change(rows, "elbo", "plain", "symmetrised"), 1),
    ]


def fall_back_line(case: Case, rows: Sequence[Row]) -> list[str]:
    means = [
        fmean(gathered(rows, m, "test")) for m in ("symmetrised", "fall-back", "plain")
    ]
    return [
        case.name,
        "{:.2f} → {:.2f} (plain from the start {:.2f})".format(*means),
        with_error(change(rows, "test", "symmetrised", "fall-back")),
        with_error(change(rows, "elbo", "symmetrised", "fall-back"), 1),
    ]


def reference_lines(
    results: Results, case: Case, rows: Sequence[Row]
) -> list[list[str]]:
    """A line for the seeds that have a reference, if there are any."""
    found = results.find(case_name=case.name, kind="reference")
    if not found:
        return []
    tests = {}
    for method in ("plain", "symmetrised"):
        by_seed = {
            row["first"] + place: value
            for row in rows
            for place, value in enumerate(row[method]["test"])
        }
        tests[method] = fmean(by_seed[row["reference"]] for row in found)
    exact = fmean(row["test"][0] for row in found)
    closed = (tests["symmetrised"] - tests["plain"]) / (exact - tests["plain"])
    return [
        [
            case.name,
            str(len(found)),
            *(f"{value:.2f}" for value in (*tests.values(), exact)),
            f"{closed:.0%}",
            f"{max(row['r_hat'][0] for row in found):.2f}",
        ]
    ]


if __name__ == "__main__":
    main()
