"""Results of comparisons: totals and numbers by part, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from pyro_symmetric import plots
from pyro_symmetric.arguments import Json, Names, Shape
from pyro_symmetric.posterior.tables import html_table, table

Parts = dict[str, Json]  # part -> name -> number or array


@dataclass(frozen=True, eq=False, repr=False)
class DistanceResult:
    """The distance between two sets of draws.

    >>> p, q = (
    ...     {"0.weight": torch.randn(50, 2, 3), "2.weight": torch.randn(50, 2)}
    ...     for _ in range(2)
    ... )
    >>> result = ps.mmd(p, q)
    >>> isinstance(result, ps.compare.DistanceResult), result.value == result["median"]
    (True, True)
    >>> list(result.parts), result.parts["0"]["num_weights"]  # by layer
    (['0', '2'], 6)

    :param title: the name of the distance.
    :param num_samples: the number of draws on each side.
    :param totals: name -> the distance of all layers (or inputs) together; the first is
        :attr:`value`.
    :param parts: layer -> name -> a number, or an array with one for each kernel.
    :param each: the distances of single weights, site -> tensor; of predictions, those
        of single inputs.
    """

    title: str
    num_samples: Shape
    totals: dict[str, float]
    parts: Parts = field(default_factory=dict)
    each: Any = None

    @property
    def value(self) -> float:
        """The distance as one number."""
        return next(iter(self.totals.values()))

    def __getitem__(self, name: str) -> float:
        return self.totals[name]

    def to_dict(self) -> Json:
        """Return the result as JSON."""
        totals = {"title": self.title, "value": self.value, **self.totals}
        return plain({**totals, "num_samples": self.num_samples, "parts": self.parts})

    def plot(self, ax: Any = None) -> Any:
        """Plot :attr:`value` by layer, of predictions a histogram over inputs; return
        the axes."""
        name = next(iter(self.totals))
        if not self.parts:
            return plots.histogram(ax, self.each, self.title)
        values = {part: numbers[name] for part, numbers in self.parts.items()}
        return plots.dots(ax, {name: values}, self.title)

    def _repr_html_(self) -> str:
        return html_table(repr(self).splitlines()[0], part_rows(self.parts))

    def __repr__(self) -> str:
        against = " against ".join(f"{count:,}" for count in self.num_samples)
        totals = ", ".join(f"{name} {value:.3g}" for name, value in self.totals.items())
        return (
            f"{self.title}, {against} samples: {totals}\n{by_part(self.parts)}".rstrip()
        )


@dataclass(frozen=True, eq=False, repr=False)
class SignificanceTest:
    """The result of a test of a null hypothesis; false if it is rejected.

    >>> p, q = {"w": torch.randn(50, 3)}, {"w": torch.randn(50, 3)}
    >>> test = ps.mmd_test(p, q)
    >>> test.rejected == (not test) == (test.p_value <= test.level)
    True

    :param title: the name of the test.
    :param num_samples: the number of draws on each side.
    :param p_value: the p-value, adjusted for multiple testing.
    :param level: the largest probability of rejecting a true null hypothesis.
    :param verdict: the outcome, in one line.
    :param parts: layer or set of units -> name -> number or array.
    """

    title: str
    num_samples: Shape
    p_value: float
    level: float
    verdict: str
    parts: Parts

    @property
    def rejected(self) -> bool:
        """True if the null hypothesis is rejected at :attr:`level`."""
        return self.p_value <= self.level

    def __bool__(self) -> bool:
        """Return whether the null hypothesis passes: true if it isn't rejected."""
        return not self.rejected

    def to_dict(self) -> Json:
        """Return the result as JSON."""
        return plain({**vars(self), "rejected": self.rejected})

    def _repr_html_(self) -> str:
        return html_table(f"{self.title}: {self.verdict}", part_rows(self.parts))

    def __repr__(self) -> str:
        return f"{self.title}: {self.verdict}\n{by_part(self.parts)}".rstrip()


class Scores(dict[str, Any]):
    """Scores by name, also as attributes: ``scores.nll`` is ``scores["nll"]``."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"no score {name!r}; there are {list(self)}")
        return self[name]

    def plot(self, ax: Any = None) -> Any:
        """Plot accuracy against confidence, or the coverage of intervals against their
        level, beside the diagonal; return the axes.

        :raises ValueError: if the scores hold neither.
        """
        lines: Json = {"calibrated": ((0, 1), (0, 1))}
        if "coverage" in self:
            xlabel = "level of the interval"
            ylabel = "share of targets inside"
            lines["model"] = (list(self["coverage"]), list(self["coverage"].values()))
        elif "calibration" in self:
            xlabel = "confidence"
            ylabel = "accuracy"
            curve = self["calibration"]
            lines["model"] = (curve.confidence, curve.accuracy)
        else:
            raise ValueError(
                f"scores hold {list(self)}; a plot takes those of "
                "scores.classification or scores.regression"
            )
        return plots.curves(ax, lines, xlabel, ylabel, marker=".")

    def to_dict(self) -> Json:
        """Return the result as JSON."""
        return plain(self)

    def __repr__(self) -> str:
        """Show single numbers, and the names of other entries."""
        numbers = [
            f"{name} {value:.4g}"
            for name, value in self.items()
            if isinstance(value, float)
        ]
        tensors = [name for name in self if not isinstance(self[name], float)]
        return f"Scores({', '.join([*numbers, *tensors])})"


def by_part(parts: Parts) -> str:
    """Format a line for each part, with a column for each of its single numbers."""
    rows = part_rows(parts)
    return table(rows) if rows else ""


def part_rows(parts: Parts) -> list[Names]:
    """Return a head, and a row of single numbers for each part; none without parts."""
    first = next(iter(parts.values()), {})
    names = [name for name, value in first.items() if isinstance(value, int | float)]
    rows = [("", *(name.replace("_", " ") for name in names))]
    for part, numbers in parts.items():
        rows.append((part, *(_short(numbers[name]) for name in names)))
    return rows if parts else []


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def plain(value: Any) -> Any:
    """Convert a value to JSON types; numbers that aren't finite become ``None``."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
