"""Does find_symmetry find the symmetries of Pyro models, and how fast? A table of the
models of :mod:`benchmarks.zoo.models`, by hand and found.

    python -m benchmarks.performance.model_zoo  # half a minute
    python -m benchmarks.performance.model_zoo --markdown docs/reference/models.md

Times are processor seconds of one thread, of the second call; the first one in a
process also imports and compiles.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import pyro
import torch

import pyro_symmetric as ps
from benchmarks.zoo.models import MODELS, ModelCase, Units, units_of

HEAD = """# Models

`find_symmetry(model, *args)` finds the units of these {count} models. They are written
as their number and the axes along which they lie; a trailing `-` marks an axis whose
signs flip. `python -m benchmarks.performance.model_zoo --markdown FILE` makes this page.
[The explanation](../explanation/model-symmetries.md) says how they are found. {right} of
{count} are found whole; of the others, what no group can hold is named. The median time
is {median:.2f} s of one core, the longest {most:.1f} s.

| model | units, by hand | found | s |
| --- | --- | --- | --- |
"""


class Row(NamedTuple):
    """The result for one model."""

    case: ModelCase
    symmetry: ps.Symmetry
    seconds: float

    @property
    def is_right(self) -> bool:
        """The verdict: all units were found, and no others."""
        whole = not self.case.not_expressed
        return whole and units_of(self.symmetry) == self.case.units


def measured(case: ModelCase) -> Row:
    """Find the symmetry of a model twice, and time the second call."""
    for _ in range(2):
        pyro.clear_param_store()
        start = time.process_time()
        symmetry = ps.find_symmetry(case.model, *case.args)
        seconds = time.process_time() - start
    return Row(case, symmetry, seconds)


def written(units: Units) -> str:
    """Return units as text for a cell of the table."""
    sets = [f"{number}: {', '.join(sorted(axes))}" for number, axes in sorted(units)]
    return "; ".join(sets) or "none"


def page(rows: list[Row]) -> str:
    """Return the table in Markdown."""
    seconds = sorted(row.seconds for row in rows)
    right = sum(row.is_right for row in rows)
    text = HEAD.format(
        count=len(rows), right=right, median=seconds[len(rows) // 2], most=seconds[-1]
    )
    for row in rows:
        verdict = "all" if row.is_right else written(units_of(row.symmetry))
        if row.case.not_expressed:
            named = f"named: {row.symmetry.remarks[0]}"
            verdict = f"{verdict}; {named}" if row.case.units else named
        hand = written(row.case.units)
        text += f"| {row.case.name} | {hand} | {verdict} | {row.seconds:.2f} |\n"
    return text


def main() -> None:
    """Measure all models, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="the page to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = page([measured(case) for case in MODELS])
    if options.markdown:
        options.markdown.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
