"""The tables of a report, which ``tables.toml`` lists: which numbers, under which heading, and what each means."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

Row = Mapping[str, Any]

MISSING = "–"  # in place of a number
OWN_HALF = "its own other half"  # of the draws, to which the reference is compared
BEST = {"max": max, "min": min}
# Why a symmetrised guide may lie further away once symmetries are removed.
RISES = (
    "With symmetries removed the number can rise: as drawn, a method that is spread over all copies resembles any "
    "reference that is, whatever its shape within a copy; removed, only that shape is left to be compared."
)
TABLES = tomllib.loads(resources.files(__package__).joinpath("tables.toml").read_text("utf-8"))


class Table(NamedTuple):
    """A table of the report.

    :param title: its heading.
    :param lead: what it is about.
    :param columns: heading and meaning of each column after the one that names the method.
    :param rows: method -> for each column the text, and whether it is the best.
    """

    title: str
    lead: str
    columns: list[tuple[str, str]]
    rows: dict[str, list[tuple[str, bool]]]


def tables(methods: Mapping[str, Row], is_classification: bool) -> list[Table]:
    """All tables of a report with any number in them. Methods without any are left out of a table."""
    other = "regression" if is_classification else "classification"
    found = [table_of(name, methods) for name in TABLES if name != other]
    return [table for table in found if table.rows]


def table_of(name: str, methods: Mapping[str, Row]) -> Table:
    """One of the tables that ``tables.toml`` lists, filled."""
    about, rows = TABLES[name], dict[str, list[tuple[str, bool]]]()
    for _, path, form, best, _ in about["columns"]:
        values = {method: value_at(row, path) for method, row in methods.items()}
        # In a table of distances the reference, compared with its own half, doesn't compete.
        rivals = [m for m in values if about.get("rivals", True) or value_at(methods[m], "distance/to") != OWN_HALF]
        known = [values[m] for m in rivals if values[m] is not None]
        top = BEST[best](known) if best and len(known) > 1 else None
        for method, value in values.items():
            rows.setdefault(method, []).append(
                (_text(value, form), method in rivals and top is not None and value == top)
            )
    shown = {method: cells for method, cells in rows.items() if any(text != MISSING for text, _ in cells)}
    return Table(about["title"], about["lead"], [(title, meaning) for title, *_, meaning in about["columns"]], shown)


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
        values = {name: value_at(row, path) for name, row in rows.items()}
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


def summary_table(methods: Mapping[str, Row], is_classification: bool) -> str:
    """The tables for a terminal."""
    import pandas as pd

    parts = []
    for table in tables(methods, is_classification):
        cells = [[text for text, _ in row] for row in table.rows.values()]
        frame = pd.DataFrame(cells, index=list(table.rows), columns=pd.Index([title for title, _ in table.columns]))
        parts.append(f"{table.title}\n{frame.to_string()}")
    return "\n\n".join(parts)


def value_at(row: Row, path: str) -> Any:
    """The number at a place in a row of results, keys parted by /; ``None`` if there is none."""
    found: Any = row
    for key in path.split("/"):
        found = None if found is None else found.get(key)
    return found


def _text(value: Any, form: str) -> str:
    if value is None or isinstance(value, str):
        return value or MISSING
    # Smaller p-values say nothing more, and their digits are those of an approximation.
    return "<1e-12" if form.endswith("g") and 0 <= value < 1e-12 else format(value, form)
