"""Make every record again that is older than the code it measures, in order of worth.

    python -m benchmarks.all --list
    python -m benchmarks.all --hours 9
    python -m benchmarks.all --only evidence alignment

A record is out of date if the benchmark itself, or a room of the package that it
measures, was changed after the record's commit. Each command runs as
``python -m benchmarks.record`` does, and its rows are kept in ``runs/all`` while it
runs, so a night that was cut short goes on where it stopped. A command that fails is
named at the end, and the others run. ``--hours`` starts nothing new after that time.
What needs a GPU or a night stands last, and has no record until a machine makes it.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks import record
from benchmarks.harness import print_table

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "runs" / "all"
GUIDES = ("guides", "distributions", "groups", "canonical")
SAMPLERS = ("mcmc", "density", "posterior")
ALIGNMENT = ("alignment", "discovery", "groups", "canonical")
COMPARISON = ("compare", "alignment", "canonical", "groups")


@dataclass(frozen=True)
class Record:
    """A file of ``benchmarks/results``, and how it is made.

    :ivar module: below ``benchmarks``.
    :ivar measures: rooms of the package whose changes make the record old.
    :ivar arguments: of its command.
    :ivar part: name of this run, of a module that has several.
    :ivar resumes: whether the module has ``--json``, for rows that are kept.
    :ivar needs: what this machine may lack; empty if nothing.
    """

    module: str
    measures: tuple[str, ...]
    arguments: str = ""
    part: str = ""
    resumes: bool = True
    needs: str = ""

    @property
    def name(self) -> str:
        return ".".join(filter(None, [self.module, self.part]))

    @property
    def path(self) -> Path:
        return record.RESULTS / f"{self.name}.json"

    def paths(self) -> Iterator[str]:
        """Yield the files and folders whose changes make the record old."""
        yield "benchmarks/" + self.module.replace(".", "/") + ".py"
        for room in self.measures:
            yield f"pyro_symmetric/{room}"

    def command(self) -> list[str]:
        """Return the arguments of ``benchmarks.record``."""
        part = ["--part", self.part] if self.part else []
        arguments = shlex.split(self.arguments)
        if self.resumes:
            arguments += ["--json", str((ROWS / f"{self.name}.json").relative_to(ROOT))]
        return [*part, self.module, *arguments]


# In order of worth: first what README and the explanations quote.
RECORDS = (
    Record("experiments.beyond.little_data", GUIDES, "--no-progress"),
    Record(
        "experiments.beyond.little_data", GUIDES, "--first 100 --no-progress", "fresh"
    ),
    Record("experiments.beyond.transformer_barrier", ALIGNMENT, "--no-progress"),
    Record(
        "performance.symmetrized_cost",
        GUIDES,
        "--widths 32 128 512 --rounds 5",
        resumes=False,
    ),
    Record(
        "posteriordb.speed",
        SAMPLERS,
        "--posteriors eight_schools-eight_schools_noncentered --seeds 3 --no-progress",
        needs="NumPyro, BlackJAX",
    ),
    Record(
        "experiments.gelberg_2024.width_study",
        GUIDES,
        "--data mnist --data-dir data --pool 4 --widths 32 128 --no-progress "
        "--methods mean-field infonce-15 sinkhorn-4",
        needs="mnist10k",
    ),
    Record(
        "experiments.gelberg_2024.training_scan",
        GUIDES,
        "--data-dir data --no-progress",
        needs="mnist10k",
    ),
    Record(
        "performance.evidence",
        (*GUIDES, *SAMPLERS),
        "--particles 200 --moves 3 --seeds 3 --draws 250 --no-progress",
    ),
    Record(
        "experiments.rossi_2023.barrier_curves",
        ALIGNMENT,
        "--data-dir data --data mnist --pool 2 --depth 2 --width 64 128 --seeds 3 "
        "--prior-variance 0.02 --steps 1000 --test 1000 --draws 8 --no-progress",
        needs="mnist10k",
    ),
    Record(
        "experiments.laurent_2024.functional_collapse",
        ("ensembles.py",),
        "--seeds 3 --residual-members 100 --no-progress",
    ),
    Record("experiments.gelberg_2024.mixture_target", GUIDES, "--no-progress"),
    Record(
        "experiments.gelberg_2024.two_weight_network",
        GUIDES,
        "--distances 0.5 1.5 2 4 --seeds 3 --no-progress",
    ),
    Record(
        "performance.calibration",
        SAMPLERS,
        "--replications 500 --draws 127 --only NUTS --seeds 3 --no-progress",
        part="nuts",
        resumes=False,
    ),
    Record("experiments.rossi_2023.mirrored_gaussians", ("alignment",), "--seeds 3"),
    Record(
        "performance.alignment",
        ALIGNMENT,
        "timing --depths 1 3 --widths 64 256 1024 --channels 4 16",
        part="timing",
        resumes=False,
    ),
    Record(
        "experiments.laurent_2024.unit_marginals",
        COMPARISON,
        "--root data --seeds 3 --no-progress",
        needs="uci",
    ),
    Record("experiments.laurent_2024.two_blobs", COMPARISON, "--no-progress"),
    Record(
        "experiments.laurent_2024.two_circles",
        COMPARISON,
        "--networks 2000 --no-progress",
    ),
    Record(
        "experiments.gelberg_2024.mode_proximity",
        ("alignment", "canonical", "groups"),
        "--widths 8 32 128 --no-progress",
    ),
    Record(
        "experiments.rossi_2023.log_posterior_map",
        ALIGNMENT,
        "--points 9 --no-progress",
    ),
    Record(
        "experiments.rossi_2023.barrier_curves",
        ALIGNMENT,
        "--data-dir data --data mnist --pool 2 --depth 2 --width 128 --seeds 3 "
        "--prior-variance 0.02 --train 200 --temperature 1 0.1 0.01 --steps 1000 --draws 8 "
        "--no-progress",
        part="few_images",
        needs="mnist10k",
    ),
    # A night of two cores, or a GPU, and what a machine may lack.
    Record(
        "experiments.laurent_2024.approximations",
        ("study", *COMPARISON, *GUIDES),
        "--data-root data --out runs/approximations --seeds 3 --max-train 1000 "
        "--members 400 --modes 4 --draws 400",
        resumes=False,
        needs="a night",
    ),
    Record(
        "posteriordb.accuracy", SAMPLERS, "--no-progress", needs="a night, posteriordb"
    ),
    Record(
        "posteriordb.speed",
        SAMPLERS,
        "--seeds 3 --no-progress",
        part="all",
        needs="a night, posteriordb, NumPyro, BlackJAX",
    ),
    Record("performance.saas", SAMPLERS, "--no-progress", needs="a night, NumPyro"),
    Record(
        "performance.first_use", SAMPLERS, "--no-progress", needs="a night, NumPyro"
    ),
    Record(
        "performance.effective_samples",
        SAMPLERS,
        "--no-progress",
        needs="a night, NumPyro",
    ),
    Record(
        "experiments.gelberg_2024.width_study",
        GUIDES,
        "--data mnist --data-dir data --widths 64 256 512 --no-progress "
        "--methods mean-field infonce-15 sinkhorn-4",
        part="images28",
        needs="a night, mnist10k",
    ),
    Record(
        "experiments.rossi_2023.barrier_curves",
        ALIGNMENT,
        "--data-dir data --data mnist --width 512 --prior-variance 0.02 --seeds 3 "
        "--no-progress",
        part="wide",
        needs="a GPU, mnist",
    ),
    Record(
        "experiments.rossi_2023.barrier_curves",
        ALIGNMENT,
        "--data digits --net resnet20 --width 4 16 --temperature 1 0.1 --seeds 3 "
        "--prior-variance 0.05 --steps 400 --lr 0.01 --batch 128 --draws 8 --points 9 "
        "--no-progress",
        part="resnet20",
        needs="a night",
    ),
    Record(
        "experiments.laurent_2024.hmc_or_ensemble",
        (*COMPARISON, *SAMPLERS),
        "--root data --noises 0.5 0.1 --draws 4000 --seeds 3 --no-progress",
        needs="a night, uci",
    ),
    Record(
        "experiments.laurent_2024.resnet18_mass",
        ("canonical",),
        "--no-progress",
        needs="a night",
    ),
    Record(
        "experiments.laurent_2024.optunet",
        COMPARISON,
        "--data-dir data --seeds 3 --no-progress",
        needs="a GPU, mnist",
    ),
    Record(
        "experiments.laurent_2024.residual_reference",
        ("study", *COMPARISON, *GUIDES),
        "--out runs/residual_reference",
        resumes=False,
        needs="a GPU",
    ),
)


class Age(NamedTuple):
    """Age of a record.

    :ivar commit: of the record; empty if there is none.
    :ivar changes: commits after it that changed what the record measures.
    """

    commit: str
    date: str
    changes: int

    @property
    def is_current(self) -> bool:
        return bool(self.commit) and self.changes == 0


def age(entry: Record) -> Age:
    """Return how old the file of a record is."""
    if not entry.path.exists():
        return Age("", "", 0)
    content = json.loads(entry.path.read_text())
    changes = _changes(content["commit"], tuple(entry.paths()))
    return Age(content["commit"], content["date"][:10], changes)


@functools.cache
def _changes(commit: str, paths: tuple[str, ...]) -> int:
    count = record.git("rev-list", "--count", f"{commit}..HEAD", "--", *paths)
    return int(count) if count else 1  # a commit that this history lacks is old


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show ages, run nothing")
    parser.add_argument("--hours", type=float, help="start nothing new after that")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD")
    options = parser.parse_args(argv)
    chosen = [
        entry for entry in RECORDS if any(word in entry.name for word in options.only)
    ]
    if options.list:
        show(chosen)
        return 0
    return make(chosen, options.hours)


def show(records: Sequence[Record]) -> None:
    """Print a line for each record: its age, and what its code went through since."""
    lines = []
    for entry in records:
        record_age = age(entry)
        verdict = "none" if not record_age.commit else f"{record_age.changes} changes"
        if record_age.is_current:
            verdict = "of today's code"
        lines.append([entry.name, record_age.date, verdict, entry.needs])
    print_table("records", ["record", "made", "since then", "needs"], lines)


def make(records: Sequence[Record], hours: float | None = None) -> int:
    """Make the records that are out of date, and return how many commands failed."""
    began = time.monotonic()
    ROWS.mkdir(parents=True, exist_ok=True)
    failed = []
    for entry in records:
        if hours is not None and time.monotonic() - began > 3600 * hours:
            print(f"{hours:g} hours are over; call again to go on")
            break
        if age(entry).is_current:
            continue
        print(f"\n{entry.name}")
        if record.main(entry.command()):
            failed.append(entry.name)
            continue
        (ROWS / f"{entry.name}.json").unlink(missing_ok=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
