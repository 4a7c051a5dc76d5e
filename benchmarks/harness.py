"""Shared by the experiments: their options, a results file that a broken run is taken
up from, tables with spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor
from tqdm import tqdm

import pyro_symmetric as ps

Row = dict[str, Any]


def parser(description: str | None, seeds: int) -> argparse.ArgumentParser:
    """The options of every experiment; its own come on top."""
    result = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    result.add_argument(
        "--seeds", type=int, default=seeds, help=f"seeds 0 .. SEEDS-1 (default {seeds})"
    )
    result.add_argument(
        "--quick",
        action="store_true",
        help="a small run that shows that everything works",
    )
    result.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write results as they come, and resume from there",
    )
    result.add_argument("--out", type=Path, metavar="DIR", help="folder for plots")
    result.add_argument("--threads", type=int, default=1)
    result.add_argument("--no-progress", dest="progress", action="store_false")
    return result


def parse(
    arguments: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    options = arguments.parse_args(argv)
    if options.seeds < 1:
        arguments.error(f"--seeds is {options.seeds}; at least one is needed")
    torch.set_num_threads(options.threads)
    pyro.enable_validation(False)
    return options


class Results:
    """Rows, each with a key of its own, kept in a JSON file after every one of them.

    :param path: the file, or ``None`` to keep them in memory only.
    :param settings: what the numbers depend on; a file that was made with other
        settings is refused.
    :param progress: whether :meth:`fill` shows a bar.
    """

    def __init__(
        self, path: Path | None, settings: Mapping[str, Any], progress: bool = False
    ):
        self.path, self.progress = path, progress
        self.rows: list[Row] = []
        self.head = {
            "settings": json.loads(json.dumps(dict(settings), default=str)),
            "versions": {
                "torch": torch.__version__,
                "pyro": pyro.__version__,
                "python": platform.python_version(),
            },
        }
        if path is not None and path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != self.head["settings"]:
                raise SystemExit(
                    f"{path} holds results of other settings:\n  there "
                    f"{found['settings']}\n  now   "
                    f"{self.head['settings']}\nname another file, or remove it"
                )
            self.rows = found["rows"]
            print(f"{len(self.rows)} rows taken over from {path}")

    @classmethod
    def of(cls, options: argparse.Namespace, *names: str) -> Results:
        """Results in the file that the options name; their numbers depend on the
        options of these names.
        """
        return cls(
            options.json,
            {name: getattr(options, name) for name in names},
            options.progress,
        )

    def find(self, **key: Any) -> list[Row]:
        """The rows with these entries."""
        return [
            row
            for row in self.rows
            if all(row.get(name) == value for name, value in key.items())
        ]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(self.path.name + ".part")
            part.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1))
            os.replace(part, self.path)

    def fill(self, run: Callable[..., Row], **grid: Iterable[Any]) -> None:
        """Add the rows that are missing, one for each combination of these entries;
        those of the last change fastest.

        :param run: takes the entries by name -> all else that the row holds.
        """
        keys = [
            dict(zip(grid, values, strict=True))
            for values in itertools.product(*grid.values())
        ]
        for key in tqdm(keys, disable=not self.progress):
            if not self.find(**key):
                self.add({**key, **run(**key)})

    def table(
        self,
        title: str,
        by: Sequence[str],
        columns: Mapping[str, tuple[str | Callable[[Row], float | None], int]],
        **key: Any,
    ) -> None:
        """Print mean and standard error over seeds, a line for each combination of the
        entries ``by``.

        :param columns: heading -> an entry, or a function of a row, and digits. Seeds
            of which it is ``None`` are left out.
        """
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.find(**key):
            groups.setdefault(tuple(row[name] for name in by), []).append(row)
        lines = []
        for group, rows in groups.items():
            lines.append([" ".join(map(str, group))])
            for what, digits in columns.values():
                values = (what(row) if callable(what) else row[what] for row in rows)
                lines[-1].append(
                    spread((value for value in values if value is not None), digits)
                )
        seeds = max(map(len, groups.values()), default=0)
        if seeds > 1:
            title += f"; mean ± standard error over {seeds} seeds"
        print_table(title, [", ".join(by), *columns], lines)


def spread(values: Iterable[float], digits: int = 3) -> str:
    """Return the mean and, from two values on, its standard error."""
    values = list(values)
    if not values:
        return "-"
    mean = f"{np.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return f"{mean} ± {error:.{digits}f}"


def print_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Columns as wide as they need be, texts to the left, numbers to the right."""
    lines = [list(header), *[list(map(str, row)) for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print(f"\n{title}")
    for line in lines:
        cells = (
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(line, widths, strict=True))
        )
        print("  " + "  ".join(cells))


# MNIST's 10,000 test images, split anew, may lie in a folder of their own: a smaller
# data set, under its own name.
FOLDERS = {"mnist": "mnist10k"}


def load_images(name: str, options: argparse.Namespace) -> ps.datasets.Dataset:
    """A data set as the options have it (``data_dir train test download device``),
    images pooled by ``pool``.
    """
    folder = FOLDERS.get(name, "")
    root = options.data_dir / folder
    part = bool(folder) and root.is_dir()
    data = ps.datasets.load(
        name,
        root=root if part else options.data_dir,
        hold_out=None,
        max_train=options.train,
        max_test=options.test,
        download=options.download,
        dtype=torch.float32,
        device=options.device,
    )
    pool = options.pool if len(data.input_shape) == 3 else 1
    train_x, test_x = (
        torch.nn.functional.avg_pool2d(x, pool) if pool > 1 else x
        for x in (data.train_x, data.test_x)
    )
    return dataclasses.replace(
        data, name=folder if part else data.name, train_x=train_x, test_x=test_x
    )


def mini_batches(num_rows: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Indices of the rows of every step; all rows come once before one comes again, a
    rest is left out.
    """
    order = torch.Generator().manual_seed(seed)
    rows = torch.empty(0, dtype=torch.long)
    size = min(size, num_rows)
    for _ in range(steps):
        if len(rows) < size:
            rows = torch.randperm(num_rows, generator=order)
        yield rows[:size]
        rows = rows[size:]


def without_symmetries(
    weights: dict[str, Tensor], symmetry: ps.Symmetry, scalings: Any = "unit_norm"
) -> dict[str, dict[str, Tensor]]:
    """Weights as trained, and after each removal."""
    return {
        "as trained": weights,
        "without scalings": ps.canonicalize(
            weights, symmetry, permutations=None, scalings=scalings
        ),
        "without scalings and permutations": ps.canonicalize(
            weights, symmetry, scalings=scalings
        ),
    }


def save_figure(figure: Any, folder: Path | None, name: str) -> None:
    """Write a figure where the user asked for plots."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / name, dpi=150)
    print(f"wrote {folder / name}")


def new_figure(*shape: int, size: tuple[float, float]) -> tuple[Any, Any]:
    """A figure of our looks that needs no display."""
    import matplotlib

    from pyro_symmetric.study.report import STYLE

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(STYLE)
    return plt.subplots(*shape, figsize=size, layout="constrained", squeeze=False)
