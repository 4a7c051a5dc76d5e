"""The rates at which ``mmd_test`` and ``diagnose`` see a difference modulo symmetry: if there is none, and if there is.

    python -m benchmarks.performance.level_and_power  # about 15 minutes on one core
    python -m benchmarks.performance.level_and_power --only mmd_test tied  # the cases that have all of these words
    python -m benchmarks.performance.level_and_power --level-repetitions 500 --shifts 0 --only mmd_test

*Posteriors.* Five exchangeable units, Gaussian about centres of their own. ``chains``: four autoregressive chains
(successive draws correlate by 0.5), each in a copy of its own. ``independent``: each draw in a copy of its own.

*Units.* Of three weights each, with deviation 1. ``separated``: far apart, also by the largest weight, by which the
canonical form sorts them. ``tied``: the largest weight is distributed alike for all, another one is far apart.
``overlapping``: one weight has centres one deviation apart, the others none, so that no frame can tell the units for
sure. ``mixture``: components of a Gaussian mixture given 60 observations each, a site each for their locations (two
are equal), log-scales and log-weights, with the spread that each has in large samples.

*Difference.* One weight of one unit, not the one that units are sorted by, is shifted by so many deviations: in all of
the second posterior for ``mmd_test``, in half of the chains (rows) for ``diagnose``.

*Columns.* Share of repetitions in which the test rejects at level 0.05, or the chains are said to disagree; a shift of
0 is the level, or the rate of false alarms. Of ``mmd_test``: ``raw``, draws as they come; ``canonical`` and
``aligned``, each draw by itself and all together. Of ``diagnose``: ``modulo symmetry``. A shift of 0.4 between halves
of the chains has an R-hat of 1.02, under the threshold of 1.05: it isn't meant to be seen.

``test_levels.py`` asks the same of the tests of invariance, and of the two-sample test without symmetry.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from tqdm import tqdm

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser, print_table
from pyro_symmetric.compare import mmd_test
from pyro_symmetric.compare.frames import canonical_frame

LEVEL = 0.05
SHIFTS = (0.0, 0.8)
CHAINS = 4
CORRELATION = 0.5  # of successive draws of a chain
DRAWS = {  # of each row: test, rows
    ("mmd_test", "chains"): 100,
    ("mmd_test", "independent"): 25,
    ("diagnose", "chains"): 250,
    ("diagnose", "independent"): 250,
}
UNITS = 5


@dataclass(frozen=True)
class Truth:
    """A posterior: of each site ``(units, ...)`` the centre and the deviation, and which entry is shifted."""

    centres: dict[str, Tensor]
    deviations: dict[str, float]
    site: str
    shifted: tuple[int, ...]

    @property
    def group(self) -> ps.Group:
        """Its units may be exchanged."""
        axes = {site: ("unit", *[None] * (value.dim() - 1)) for site, value in self.centres.items()}
        return ps.Group.declare(axes, {site: value.shape for site, value in self.centres.items()})


_STEPS = torch.arange(float(UNITS))
_SEPARATED = torch.stack([8 * _STEPS + 8, -3 * _STEPS, -_STEPS], 1)
_TIED = torch.stack([torch.full((UNITS,), 30.0), 6 * _STEPS - 18, torch.tensor([2.0, -1.0, 0.0, 1.0, -2.0])], 1)
_OVERLAPPING = torch.stack([_STEPS, torch.full((UNITS,), -1.0), torch.full((UNITS,), -1.0)], 1)
_MIXTURE = {
    "locs": torch.tensor([0.0, 0.0, 2.0, 4.0, 6.0]),
    "log_scales": torch.tensor([0.5, 3.0, 0.7, 0.6, 0.8]).log(),
    "log_weights": torch.full((UNITS,), 1 / UNITS).log(),
}
TRUTHS = {
    "separated": Truth({"w": _SEPARATED}, {"w": 1.0}, "w", (2, 2)),
    "tied": Truth({"w": _TIED}, {"w": 1.0}, "w", (2, 2)),
    "overlapping": Truth({"w": _OVERLAPPING}, {"w": 1.0}, "w", (2, 2)),
    "mixture": Truth(_MIXTURE, {"locs": 0.15, "log_scales": 120**-0.5, "log_weights": 0.12}, "log_scales", (2,)),
}


def posterior(test: str, units: str, rows: str, shifts: Tensor) -> ps.Posterior:
    """Four rows of draws, one entry of each row shifted by its own ``shifts`` ``(4,)`` deviations."""
    truth, draws = TRUTHS[units], DRAWS[test, rows]
    correlation = CORRELATION if rows == "chains" else 0.0
    weights = {}
    for site, centre in truth.centres.items():
        noise = torch.randn(draws, CHAINS, *centre.shape)
        states = [noise[0]]
        for step in noise[1:]:
            states.append(correlation * states[-1] + math.sqrt(1 - correlation**2) * step)
        path = torch.stack(states, 1)
        if site == truth.site:
            path[(slice(None), slice(None), *truth.shifted)] += shifts[:, None]
        weights[site] = centre + truth.deviations[site] * path
    copies = truth.group.sample((CHAINS, 1) if rows == "chains" else (CHAINS, draws))
    # diagnose looks at chains alone; those of independent draws are the best that there are
    independent = rows == "independent" and test == "mmd_test"
    return ps.Posterior(copies(weights), rows="independent" if independent else "chains")


def two_samples(units: str, rows: str, shift: float, options: Namespace) -> dict[str, bool]:
    group = TRUTHS[units].group
    p = posterior("mmd_test", units, rows, torch.zeros(CHAINS))
    q = posterior("mmd_test", units, rows, torch.full((CHAINS,), shift))
    frames = {
        "raw": (p, q),
        "canonical": (canonical_frame(p, group), canonical_frame(q, group)),
        "aligned": ps.common_frame(p, q, group),
    }
    return {
        name: mmd_test(*pair, level=LEVEL, num_permutations=options.permutations).rejected
        for name, pair in frames.items()
    }


def chains(units: str, rows: str, shift: float, options: Namespace) -> dict[str, bool]:
    halves = torch.tensor([0.0, 0.0, shift, shift])
    found = ps.diagnose(posterior("diagnose", units, rows, halves), TRUTHS[units].group)
    return {"modulo symmetry": found["modulo symmetry"].status == "fail"}


TESTS = {"mmd_test": two_samples, "diagnose": chains}
COLUMNS = {
    "mmd_test": ("raw", "canonical", "aligned"),
    "diagnose": ("modulo symmetry",),
}


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--repetitions", type=int, default=100)
    arguments.add_argument("--level-repetitions", type=int, default=200, help="at a shift of 0")
    arguments.add_argument("--shifts", type=float, nargs="+", default=SHIFTS)
    arguments.add_argument("--permutations", type=int, default=99, help="of mmd_test")
    arguments.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with all of these words")
    options = parse(arguments, argv)
    if options.quick:
        options.repetitions = options.level_repetitions = 4
    results = Results.of(options, "repetitions", "level_repetitions", "permutations")
    cases = [case for case in product(TESTS, ("chains", "independent"), TRUTHS) if set(options.only) <= set(case)]
    for (test, rows, units), shift, seed in product(cases, options.shifts, range(options.seeds)):
        key: Row = {"test": test, "rows": rows, "units": units, "shift": shift, "seed": seed}
        if results.find(**key):
            continue
        torch.manual_seed(seed)
        seen: Counter[str] = Counter()
        looked: Counter[str] = Counter()
        title = f"{test}, {rows}, {units}, shift {shift:g}"
        times = options.repetitions if shift else options.level_repetitions
        for _ in tqdm(range(times), desc=title, disable=not options.progress):
            found = TESTS[test](units, rows, shift, options)
            seen.update(found)
            looked.update(dict.fromkeys(found, 1))
        results.add({**key, "times": dict(looked), "seen": dict(seen)})
    for test in dict.fromkeys(case[0] for case in cases):
        report(test, [case for case in cases if case[0] == test], options.shifts, results)


def report(test: str, cases: list[tuple[str, str, str]], at: Sequence[float], results: Results) -> None:
    lines = []
    for _, rows, units in cases:
        for column in COLUMNS[test]:
            shares = []
            for shift in at:
                found = results.find(test=test, rows=rows, units=units, shift=shift)
                shares.append(
                    share_of(
                        sum(row["seen"].get(column, 0) for row in found),
                        sum(row["times"].get(column, 0) for row in found),
                    )
                )
            lines.append((rows, units, column, *shares))
    header = ("rows", "units", "seen by", *(f"shift {shift:g}" for shift in at))
    print_table(f"{test}: share of repetitions in which a difference is seen", header, lines)


def share_of(count: int, total: int) -> str:
    if not total:
        return "-"
    share = count / total
    return f"{share:.3f} ± {math.sqrt(share * (1 - share) / total):.3f}"


if __name__ == "__main__":
    main()
