"""One way of setting results as plain text and as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows of equally many cells as aligned lines; the columns ``left`` to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = (f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def layer_table(result: Any, further: Mapping[str, Mapping[str, float]] | None = None) -> str:
    """A distance by layer: median, mean and maximum of each of ``result.per_layer``, then of ``result`` itself.

    :param further: title -> a number for each layer, in a column of its own.
    """
    columns = dict(further or {})
    rows = [("layer", "weights", "median", "mean", "maximum", *columns)]
    total = sum(layer.num_weights for layer in result.per_layer.values())
    entries = [*((name, layer.num_weights, layer) for name, layer in result.per_layer.items()), ("all", total, result)]
    for name, count, entry in entries:
        values = (f"{value:.3g}" for value in (entry.median, entry.mean, entry.maximum))
        others = (f"{column[name]:.3g}" if name in column else "" for column in columns.values())
        rows.append((name, f"{count:,}", *values, *others))
    return table(rows)


def listed(numbers: Sequence[int]) -> str:
    """The first eight, for a sentence."""
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")


def non_finite_words(counts: Mapping[str, Tensor], num_samples: int) -> str:
    """Which of so many draws of each chain aren't finite.

    :param counts: name -> how many draws of each chain hold a NaN or an infinite value, ``(chains,)``.
    """
    found = []
    for name, count in list(counts.items())[:3]:
        chains = count.nonzero().flatten().tolist()
        where = f"{'chain' if len(chains) == 1 else 'chains'} {listed(chains)}"
        found.append(f"{name} in {int(count.sum()):,} of {len(count) * num_samples:,} draws ({where})")
    more = f" and of {len(counts) - 3} more" if len(counts) > 3 else ""
    return f"NaN or infinite values of {', of '.join(found)}{more}"


class Scores:
    """Results made of numbers, tensors, and results again."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]


def describe(scores: Any) -> str:
    """The numbers of scores, one a line; curves are left out."""
    rows = []
    for field in fields(scores):
        value = getattr(scores, field.name)
        if isinstance(value, float):
            rows.append((field.name, f"{value:.4g}"))
        elif isinstance(value, dict):
            for key, item in value.items():
                numbers = (
                    [f"{item:.4g}"] if isinstance(item, float) else [f"{k} {v:.4g}" for k, v in vars(item).items()]
                )
                rows.append((f"{field.name} {key}", ", ".join(numbers)))
    return f"{type(scores).__name__}\n{table(rows, left=(0, 1))}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.to_dict() if isinstance(value, Scores) else value
