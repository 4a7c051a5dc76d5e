"""The tables of a report, which ``tables.toml`` lists: which numbers, under which heading, and what each means."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyro_symmetric.study.compare import Study

Row = Mapping[str, Any]

MISSING = "–"  # in place of a number
OWN_HALF = "its own other half"  # of the draws, to which the reference is compared
BEST = {"max": max, "min": min}
# Why a symmetrised guide may lie further away once symmetries are removed.
RISES = (
    "With symmetries removed the number can rise: as drawn, a method that is spread over all copies resembles any "
    "reference that is, whatever its shape within a copy; removed, only that shape is left to be compared."
)


@dataclass(frozen=True)
class Column:
    """One column: its heading, where to find it in a row of results (parted by /), how to print it, whether the largest
    (``"max"``) or the smallest (``"min"``) is best, if any, and what it means."""

    title: str
    path: str
    form: str
    best: str
    meaning: str

    def value(self, row: Row) -> Any:
        """The number in a row of results, or ``None``."""
        found: Any = row
        for key in self.path.split("/"):
            found = None if found is None else found.get(key)
        return found

    def text(self, row: Row) -> str:
        """The number as a person reads it."""
        value = self.value(row)
        if value is None or isinstance(value, str):
            return value or MISSING
        # Smaller p-values say nothing more, and their digits are those of an approximation.
        return "<1e-12" if self.form.endswith("g") and 0 <= value < 1e-12 else format(value, self.form)

    def winner(self, rows: list[Row]) -> Any:
        """The best of some rows; ``None`` if none is better, or there are no two."""
        known = [value for value in map(self.value, rows) if isinstance(value, int | float)]
        return BEST[self.best](known) if self.best and len(known) > 1 else None


@dataclass(frozen=True)
class Table:
    """A table of the report: its heading, what it is about, its columns after the one that names the method, and
    whether the reference, compared with its own half, may be the best of a column."""

    title: str
    lead: str
    columns: tuple[Column, ...]
    rivals: bool = True

    def rows(self, methods: Mapping[str, Row]) -> dict[str, list[tuple[str, bool]]]:
        """Method -> for each column the text, and whether it is the best. Methods without any number are left out."""
        shown = {name: row for name, row in methods.items() if any(c.value(row) is not None for c in self.columns)}
        rivals = [row for row in shown.values() if self._competes(row)]
        best = [(column, column.winner(rivals)) for column in self.columns]
        return {
            name: [(c.text(row), row in rivals and top is not None and c.value(row) == top) for c, top in best]
            for name, row in shown.items()
        }

    def _competes(self, row: Row) -> bool:
        return self.rivals or (bool(row["distance"]) and row["distance"]["to"] != OWN_HALF)


def _read() -> dict[str, Table]:
    text = resources.files(__package__).joinpath("tables.toml").read_text("utf-8")
    return {
        name: Table(**{**own, "columns": tuple(Column(*column) for column in own["columns"])})
        for name, own in tomllib.loads(text).items()
    }


TABLES = _read()


def tables(is_classification: bool) -> list[Table]:
    """All tables of a report."""
    other = "regression" if is_classification else "classification"
    return [table for name, table in TABLES.items() if name != other]


def conclusion(rows: Mapping[str, Row], reference: str) -> list[str]:
    """The findings in up to three sentences: of predictions, of distances in them, and in weights."""
    scored = {name: nll(row["prediction"]) for name, row in rows.items()}
    best = min(scored, key=scored.__getitem__)
    other = (
        f" (the reference {reference}: {scored[reference]:.4f})" if reference in scored and best != reference else ""
    )
    said = [f"{best} predicts the test rows best, at {scored[best]:.4f} nats a row{other}."]
    for words, path in (
        ("in what they predict", "distance/prediction/total_variation/mean"),
        ("in weights (symmetries removed)", "distance/removed/mmd/median"),
    ):
        values = {name: Column("", path, "", "", "").value(row) for name, row in rows.items()}
        found = {name: value for name, value in values.items() if name != reference and value is not None}
        if len(found) > 1:
            near, far = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
            said.append(
                f"Closest to the reference {words} is {near} ({found[near]:.3g}; the reference's own halves "
                f"{values[reference]:.3g}), furthest {far} ({found[far]:.3g})."
            )
    return said


def nll(scores: Row) -> float:
    """The mean negative log-likelihood among scores."""
    return float(scores["nll"] if "nll" in scores else -scores["log_predictive_density"])


def summary_table(study: Study) -> str:
    """The tables for a terminal."""
    import pandas as pd

    parts = []
    for table in tables(study.problem.is_classification):
        if cells := table.rows(study.results["methods"]):
            frame = pd.DataFrame([[text for text, _ in row] for row in cells.values()], index=list(cells))
            frame.columns = pd.Index([column.title for column in table.columns])
            parts.append(f"{table.title}\n{frame.to_string()}")
    return "\n\n".join(parts)
