r"""Inference on the quotient, and guides that commute with the group: do they beat symmetrising?

    python -m benchmarks.experiments.beyond.trial --json runs/beyond.json --out plots

Guides of ``guides.py`` are trained on the problems of ``problems.py``, whose evidence is known. A guide is judged by
evidence minus ELBO (a Kullback-Leibler divergence, nats), by the efficiency of importance sampling with it (effective
share of the draws), and by the processor time of a step. All are invariant densities of the same posterior but for
``full-rank`` and ``coupling flow``, which pay up to log|G|.

**The quotient.** With ``c`` the canonical form of some frame, a guide ``q`` that is folded, ``q_fold(v) = sum_g
q(g v)`` on the canonical region, against the target there, ``|G| p(v)``, has the divergence of the symmetrised guide,
draw by draw: ``log q_fold(c(w)) - log |G| p(c(w)) = log mean_g q(g w) - log p(w)``. So training on the quotient by
folding *is* training the symmetrised guide, whatever the frame, learnt or not; the script shows values and gradients.
What differs is a guide that lives on the region alone. Three are tried: ``ordered``, trained there; ``kept in a cell``,
the full-rank guide as trained, cut off where its mean isn't nearest to this copy; and the shortcut ``unfolded``, which
takes ``q`` for the folded density: right only if copies don't overlap, otherwise it claims more than the evidence.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.experiments.beyond import guides
from benchmarks.experiments.beyond.problems import PROBLEMS, Problem, annealed_evidence
from benchmarks.harness import Results, new_figure, parse, parser, print_table, save_figure, spread

GUIDES: dict[str, Callable[[Problem], nn.Module]] = {
    "full-rank": guides.FullRank,
    "full-rank, symmetrised": lambda p: guides.Symmetrised(p, guides.FullRank(p)),
    "ordered region": guides.Ordered,
    "coupling flow": guides.Coupling,
    "coupling flow, symmetrised": lambda p: guides.Symmetrised(p, guides.Coupling(p)),
    "equivariant flow, mean": lambda p: guides.Equivariant(p, attention=False),
    "equivariant flow, attention": lambda p: guides.Equivariant(p, attention=True),
}


def fit(guide: Any, problem: Problem, options: Any) -> float:
    """Train by the reparametrised ELBO; processor seconds of a step."""
    optimiser = torch.optim.Adam(guide.parameters(), lr=options.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.lr, total_steps=options.steps, pct_start=0.1)
    began = time.process_time()
    for _ in range(options.steps):
        w, log_q = guide.draw(options.batch)
        loss = (log_q - problem.log_joint(w)).mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(guide.parameters(), 100.0)
        optimiser.step()
        schedule.step()
    return (time.process_time() - began) / options.steps


@torch.no_grad()
def judge(guide: Any, problem: Problem, draws: int) -> dict[str, float]:
    """ELBO and the efficiency of importance sampling."""
    parts = [guide.draw(min(draws, 5000)) for _ in range(max(1, draws // 5000))]
    w, log_q = (torch.cat(part) for part in zip(*parts, strict=True))
    log_weights = problem.log_joint(w) - log_q
    efficiency = float(log_weights.softmax(0).square().sum().reciprocal()) / len(log_weights)
    found = {"elbo": float(log_weights.mean()), "efficiency": efficiency}
    if isinstance(guide, guides.FullRank) and not isinstance(guide, guides.Ordered):
        found["unfolded"] = found["elbo"] + math.lgamma(problem.units + 1)
    if type(guide) is guides.FullRank:
        frame = guide.loc.unflatten(-1, guide.shape)
        kept = nearest(problem, w, frame) == 0
        share = float(kept.double().mean())
        found["cell"] = float(log_weights[kept].mean()) + math.log(share) + math.lgamma(problem.units + 1)
    return found


def nearest(problem: Problem, w: Tensor, frame: Tensor) -> Tensor:
    """Which copy of each ``w`` is nearest to the frame, ``(...,)``."""
    return (problem.on_orbit(w) - frame).square().sum((-2, -1)).argmin(0)


def folding_is_symmetrising(problem: Problem) -> tuple[float, float]:
    """Largest differences of the loss of each draw, and of the gradient of their mean, both relative."""
    torch.manual_seed(0)
    base = guides.FullRank(problem, scale=1.0)
    frame = torch.randn(problem.units, problem.features)
    w, _ = base.draw(200)
    canonical = problem.on_orbit(w)[nearest(problem, w, frame), torch.arange(len(w))]
    order = math.lgamma(problem.units + 1)
    folded = base.log_prob(problem.on_orbit(canonical)).logsumexp(0) - (problem.log_joint(canonical) + order)
    symmetrised = guides.Symmetrised(problem, base).log_prob(w) - problem.log_joint(w)
    one, other = (
        torch.cat([g.flatten() for g in torch.autograd.grad(loss.mean(), list(base.parameters()), retain_graph=True)])
        for loss in (folded, symmetrised)
    )
    return (
        float(((folded - symmetrised) / symmetrised).detach().abs().max()),
        float((one - other).norm() / other.norm()),
    )


def run(seed: int, problem: str, guide: str, options: Any) -> dict[str, float]:
    torch.manual_seed(seed)
    posterior = PROBLEMS[problem]()
    found = GUIDES[guide](posterior)
    seconds = fit(found, posterior, options)
    return {"seconds": seconds, **judge(found, posterior, options.draws)}


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    arguments.add_argument("--steps", type=int, default=1500)
    arguments.add_argument("--batch", type=int, default=64, help="draws of each step")
    arguments.add_argument("--lr", type=float, default=0.01)
    arguments.add_argument("--draws", type=int, default=20_000, help="draws that a guide is judged by")
    options = parse(arguments, argv)
    torch.set_default_dtype(torch.float64)
    if options.quick:
        options.problems, options.steps, options.draws = ["mixture, overlapping"], 30, 1000
    print_folding(options)
    results = Results.of(options, "steps", "batch", "lr", "draws")
    for name in options.problems:
        if not results.find(problem=name, guide="evidence"):
            problem = PROBLEMS[name]()
            annealed = [annealed_evidence(problem, seed, 500 if options.quick else 4000) for seed in range(8)]
            truth = problem.exact if problem.exact is not None else sum(annealed) / len(annealed)
            results.add({"problem": name, "guide": "evidence", "annealed": annealed, "truth": truth})
    results.fill(
        functools.partial(run, options=options), seed=range(options.seeds), problem=options.problems, guide=GUIDES
    )
    report(results, options)
    if options.out is not None:
        plot(results, options)


def print_folding(options: Any) -> None:
    found = {name: folding_is_symmetrising(PROBLEMS[name]()) for name in options.problems}
    lines = [[name, *(f"{value:.1e}" for value in values)] for name, values in found.items()]
    title = "folded on the quotient minus symmetrised, one full-rank guide and a random frame, 200 draws, relative"
    print_table(title, ["problem", "largest difference of a draw's loss", "difference of gradients"], lines)


def report(results: Results, options: Any) -> None:
    for name in options.problems:
        (evidence,) = results.find(problem=name, guide="evidence")
        truth = evidence["truth"]
        lines = []
        base = {row["seed"]: row["seconds"] for row in results.find(problem=name, guide="full-rank")}
        for guide in GUIDES:
            rows = [row for row in results.find(problem=name, guide=guide) if row["seed"] < options.seeds]
            gaps = [truth - row["elbo"] for row in rows]
            times = spread((row["seconds"] / base[row["seed"]] for row in rows), 1)
            efficiency = spread((row["efficiency"] for row in rows), 3)
            lines.append([guide, spread(gaps), f"{min(gaps):.3f}", efficiency, times])
            for key, label in (("cell", "kept in a cell"), ("unfolded", "unfolded (no bound)")):
                if all(key in row for row in rows):
                    gaps = [truth - row[key] for row in rows]
                    lines.append([f"  {guide}, {label}", spread(gaps), f"{min(gaps):.3f}", "", ""])
        annealed = spread(evidence["annealed"])
        exact = f"exact {truth:.3f}, " if PROBLEMS[name]().exact is not None else ""
        order = math.lgamma(PROBLEMS[name]().units + 1)
        print_table(
            f"{name}: log-evidence {exact}annealed {annealed} ({len(evidence['annealed'])} runs); "
            f"log|G| = {order:.2f}; seeds 0..{options.seeds - 1}, {options.steps} steps of {options.batch} draws; nats",
            ["guide", "evidence - ELBO", "best seed", "efficiency", "time of a step / full-rank"],
            lines,
        )


def plot(results: Results, options: Any) -> None:
    figure, axes = new_figure(1, len(options.problems), size=(3.6 * len(options.problems), 3.2))
    for ax, name in zip(axes[0], options.problems, strict=True):
        (evidence,) = results.find(problem=name, guide="evidence")
        for k, guide in enumerate(GUIDES):
            gaps = [evidence["truth"] - row["elbo"] for row in results.find(problem=name, guide=guide)]
            ax.plot(gaps, [k] * len(gaps), "o", ms=4)
        ax.set(title=name, xlabel="evidence - ELBO (nats)")
        ax.set_yticks(range(len(GUIDES)), list(GUIDES) if ax is axes[0, 0] else [""] * len(GUIDES))
        ax.invert_yaxis()
    save_figure(figure, options.out, "beyond.png")


if __name__ == "__main__":
    main()
