"""How often ``mmd_test`` and ``diagnose`` see a difference modulo symmetry: where there is none, and where there is.

    python -m benchmarks.performance.level_and_power  # 200 repetitions of every case, about 20 minutes
    python -m benchmarks.performance.level_and_power --only mmd_test tied  # the cases that have all of these words

*Posteriors.* Five units of three weights each, Gaussian about centres of their own with deviation 1, exchangeable.
``chains``: four autoregressive chains, each in a copy of its own. ``independent``: each draw in a copy of its own.

*Units.* ``separated``: far apart, also by the largest weight, by which the canonical form sorts them. ``tied``: the
largest weight is distributed alike for all, another one is far apart. ``overlapping``: one weight has centres one
deviation apart, the others none, so that no frame can tell the units for sure.

*Difference.* One weight of one unit, not the one that units are sorted by, is shifted by so many deviations: in all of
the second posterior for ``mmd_test``, in half of the chains (rows) for ``diagnose``.

*Columns.* Share of repetitions in which the test rejects at level 0.05, or the chains are said to disagree; a shift of
0 is the level, or the rate of false alarms. ``canonical`` looks at canonical forms alone, ``aligned`` at the aligned
frame alone, ``verdict`` is what is reported: of ``mmd_test`` the aligned frame's, of ``diagnose`` either's. A shift
of 0.4 between halves of the chains has an R-hat of 1.02, under the threshold of 1.05: it isn't meant to be seen.

``test_levels.py`` asks the same of the tests of invariance, and of the two-sample test without symmetry.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from functools import partial
from itertools import product

import torch
from torch import Tensor
from tqdm import tqdm

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser, print_table
from pyro_symmetric.compare import mmd_test
from pyro_symmetric.compare.frames import canonical_frame

LEVEL = 0.05
SHIFTS = (0.0, 0.4, 0.8, 1.6)
CHAINS = 4
CORRELATION = 0.5  # of successive draws of a chain
DRAWS = {  # of each row: test, rows
    ("mmd_test", "chains"): 100,
    ("mmd_test", "independent"): 25,
    ("diagnose", "chains"): 250,
    ("diagnose", "independent"): 250,
}
UNITS = 5
GROUP = ps.Group.declare({"w": ("unit", None)}, {"w": torch.Size([UNITS, 3])})

_STEPS = torch.arange(float(UNITS))
CENTRES = {
    "separated": torch.stack([8 * _STEPS + 8, -3 * _STEPS, -_STEPS], 1),
    "tied": torch.stack([torch.full((UNITS,), 30.0), 6 * _STEPS - 18, torch.tensor([2.0, -1.0, 0.0, 1.0, -2.0])], 1),
    "overlapping": torch.stack([_STEPS, torch.full((UNITS,), -1.0), torch.full((UNITS,), -1.0)], 1),
}


def posterior(test: str, units: str, rows: str, shifts: Tensor) -> ps.Posterior:
    """Four rows of draws, the weight of each row shifted by its own ``shifts`` ``(4,)``."""
    correlation = CORRELATION if rows == "chains" else 0.0
    draws = DRAWS[test, rows]
    noise = torch.randn(draws, CHAINS, UNITS, 3)
    states = [noise[0]]
    for step in noise[1:]:
        states.append(correlation * states[-1] + math.sqrt(1 - correlation**2) * step)
    weights = CENTRES[units] + torch.stack(states, 1)
    weights[:, :, 2, 2] += shifts[:, None]
    copies = GROUP.sample((CHAINS, 1) if rows == "chains" else (CHAINS, draws))
    return ps.Posterior(copies({"w": weights}), rows="chains" if rows == "chains" else "independent")


def two_samples(units: str, rows: str, shift: float, options: Namespace) -> dict[str, bool]:
    p = posterior("mmd_test", units, rows, torch.zeros(CHAINS))
    q = posterior("mmd_test", units, rows, torch.full((CHAINS,), shift))
    test = partial(mmd_test, p, q, level=LEVEL, num_permutations=options.permutations)
    canonical = test(symmetry=lambda weights: canonical_frame(weights, GROUP)).rejected
    aligned = test(symmetry=GROUP).rejected
    return {"canonical": canonical, "aligned": aligned, "verdict": aligned}


def chains(units: str, rows: str, shift: float, options: Namespace) -> dict[str, bool]:
    halves = torch.tensor([0.0, 0.0, shift, shift])
    found = ps.diagnose(posterior("diagnose", units, rows, halves), GROUP)
    apart = {name: found[name].status == "fail" for name in ("canonical", "aligned")}
    return {**apart, "verdict": "not even with their symmetries removed" in found.verdict}


TESTS = {"mmd_test": two_samples, "diagnose": chains}


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--repetitions", type=int, default=200)
    arguments.add_argument("--permutations", type=int, default=99, help="of mmd_test")
    arguments.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with all of these words")
    options = parse(arguments, argv)
    if options.quick:
        options.repetitions = 4
    results = Results.of(options, "repetitions", "permutations")
    cases = [case for case in product(TESTS, ("chains", "independent"), CENTRES) if set(options.only) <= set(case)]
    for (test, rows, units), shift, seed in product(cases, SHIFTS, range(options.seeds)):
        key: Row = {"test": test, "rows": rows, "units": units, "shift": shift, "seed": seed}
        if results.find(**key):
            continue
        torch.manual_seed(seed)
        seen: Counter[str] = Counter()
        title = f"{test}, {rows}, {units}, shift {shift:g}"
        for _ in tqdm(range(options.repetitions), desc=title, disable=not options.progress):
            seen.update(TESTS[test](units, rows, shift, options))
        results.add({**key, "times": options.repetitions, "seen": dict(seen)})
    for test in dict.fromkeys(case[0] for case in cases):
        report(test, [case for case in cases if case[0] == test], results)


def report(test: str, cases: list[tuple[str, str, str]], results: Results) -> None:
    lines = []
    for _, rows, units in cases:
        for column in ("canonical", "aligned", "verdict"):
            shares = []
            for shift in SHIFTS:
                found = results.find(test=test, rows=rows, units=units, shift=shift)
                shares.append(_share(sum(row["seen"][column] for row in found), sum(row["times"] for row in found)))
            lines.append((rows, units, column, *shares))
    header = ("rows", "units", "seen by", *(f"shift {shift:g}" for shift in SHIFTS))
    print_table(f"{test}: share of repetitions in which a difference is seen", header, lines)


def _share(count: int, total: int) -> str:
    if not total:
        return "-"
    share = count / total
    return f"{share:.3f} ± {math.sqrt(share * (1 - share) / total):.3f}"


if __name__ == "__main__":
    main()
