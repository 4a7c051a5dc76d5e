"""Rates of rejection: on truly invariant samples (never more than their level), and
where something is wrong.

    python -m benchmarks.performance.test_levels --repetitions 500

*Size.* Samples whose invariance holds by construction: weights that are far from
invariant, each draw moved by a random element of the group; a linear and a
convolutional network. For the two-sample test: both sides from one distribution.

*Power.* The same weights without the random elements (a chain that stays in one copy of
a mode), half of the draws in one copy and half in another, and for the two-sample test
a shift, a scale and a dependence.

*Columns.* For invariance: the test of the index of the largest weight and that of the
marginals, each of the first hidden layer alone, and the verdict over all tests of all
layers. For two samples: the kernel in the middle of the grid alone, and the verdict
over all kernels. The marginal tests are corrected for thousands of tests that depend on
each other, so that they may reject (and do) more rarely than their level; the others
should reject true hypotheses as often as the level says.

Each share of rejections comes with its standard error; at a level of 0.05 and 500
repetitions that is 0.01.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import pyro_symmetric as ps
from benchmarks.harness import Results, parse, parser, print_table
from pyro_symmetric.compare import invariance_tests, mmd_test

Weights = dict[str, Tensor]
Repetition = Callable[[], dict[str, bool]]  # test -> whether it rejects
LEVEL = 0.05


def independent(weights: Weights) -> ps.Posterior:
    return ps.Posterior.from_samples(weights, kind="independent")


def linear() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 1)
    ), torch.randn(2, 3)


def convolutional() -> tuple[nn.Module, Tensor]:
    net = nn.Sequential(
        nn.Conv2d(1, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    return net, torch.randn(2, 1, 6, 6)


def invariance(
    make: Callable[[], tuple[nn.Module, Tensor]], kind: str, draws: int
) -> Repetition:
    net, x = make()
    group = ps.find_symmetry(net, x).permutations

    def rejects() -> dict[str, bool]:
        # units that differ: each weight has a centre of its own, about which its draws
        # scatter
        centres = {name: torch.randn(p.shape) for name, p in net.named_parameters()}
        weights = {
            name: centre + torch.randn(draws, *centre.shape)
            for name, centre in centres.items()
        }
        if kind == "random elements":
            weights = group.sample((draws,))(weights)
        elif kind == "two copies":
            element = group.sample(())
            moved = element(weights)
            weights = {
                name: torch.cat([value[: draws // 2], moved[name][draws // 2 :]])
                for name, value in weights.items()
            }
        result = invariance_tests(independent(weights), group, level=LEVEL)
        first = next(iter(result.parts.values()))
        return {
            "index": first["index_p_value"] <= LEVEL,
            "marginals": first["marginal_p_value"] <= LEVEL,
            "verdict": result.rejected,
        }

    return rejects


def two_samples(kind: str, draws: int, permutations: int) -> Repetition:
    def rejects() -> dict[str, bool]:
        p, q = torch.randn(draws, 10), torch.randn(draws, 10)
        if kind == "a shift":
            q = q + 0.3
        elif kind == "a scale":
            q = q * 1.4
        elif kind == "dependence":
            q[:, 5:] = 0.9 * q[:, :5] + math.sqrt(1 - 0.81) * q[:, 5:]
        elif kind == "heavy tails, no difference":
            p, q = (value / torch.rand(draws, 1).sqrt() for value in (p, q))
        sides = (independent({"w": side}) for side in (p, q))
        result = mmd_test(*sides, level=LEVEL, num_permutations=permutations)
        return {"verdict": result.rejected}

    return rejects


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument(
        "--repetitions", type=int, default=500, help="where the null hypothesis is true"
    )
    arguments.add_argument(
        "--power-repetitions", type=int, default=100, help="where it is false"
    )
    arguments.add_argument("--draws", type=int, default=100)
    arguments.add_argument("--permutations", type=int, default=99)
    options = parse(arguments, argv)
    if options.quick:
        options.repetitions = options.power_repetitions = 40
    keys = ("repetitions", "power_repetitions", "draws", "permutations")
    results = Results.of(options, *keys)
    for seed in range(options.seeds):
        for test, case, true, make in cases(options):
            if results.find(seed=seed, test=test, case=case):
                continue
            torch.manual_seed(seed)
            repetition = make()
            rejected: Counter[str] = Counter()
            times = options.repetitions if true else options.power_repetitions
            for _ in tqdm(
                range(times), desc=f"{test}: {case}", disable=not options.progress
            ):
                rejected.update(repetition())
            results.add(
                {
                    "seed": seed,
                    "test": test,
                    "case": case,
                    "times": times,
                    "rejected": dict(rejected),
                }
            )
    for family in dict.fromkeys(test.partition(",")[0] for test, *_ in cases(options)):
        rows = []
        parts: list[str] = []
        for test, case, true, _ in cases(options):
            if not test.startswith(family):
                continue
            found = results.find(test=test, case=case)
            counts = sum((Counter(row["rejected"]) for row in found), Counter[str]())
            total = sum(row["times"] for row in found)
            parts = list(found[0]["rejected"])
            shares = (_share(counts[part], total) for part in parts)
            rows.append((test, case, "size" if true else "power", str(total), *shares))
        head = ("test", "samples", "", "repetitions", *parts)
        print_table(
            f"share of rejections at level {LEVEL}, {options.draws} draws", head, rows
        )


def _share(count: int, total: int) -> str:
    share = count / total
    return f"{share:.3f} ± {math.sqrt(share * (1 - share) / total):.3f}"


def cases(options: Any) -> list[tuple[str, str, bool, Callable[[], Repetition]]]:
    """Test, samples, whether the null hypothesis is true, how to make a repetition."""
    found: list[tuple[str, str, bool, Callable[[], Repetition]]] = []
    for name, net in (
        ("invariance, linear", linear),
        ("invariance, convolutional", convolutional),
    ):
        for kind in ("random elements", "one copy", "two copies"):
            true = kind == "random elements"
            found.append(
                (
                    name,
                    kind,
                    true,
                    lambda net=net, kind=kind: invariance(net, kind, options.draws),
                )
            )
    for kind in (
        "no difference",
        "heavy tails, no difference",
        "a shift",
        "a scale",
        "dependence",
    ):
        true = "no difference" in kind
        found.append(
            (
                "two samples",
                kind,
                true,
                lambda kind=kind: two_samples(
                    kind, options.draws, options.permutations
                ),
            )
        )
    return found


if __name__ == "__main__":
    main()
