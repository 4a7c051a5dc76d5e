"""Results of comparisons: distances and tests, with their numbers on named axes, as text, as JSON and as a figure."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from torch import Tensor

from pyro_symmetric import arguments

MOST_LINES = 60  # of a table


@dataclass(frozen=True, eq=False, kw_only=True)
class Result:
    """Numbers on named axes, of which the first runs over the parts that were compared (layers, sets of units).

    :param title: what was measured, and of what.
    :param num_samples: how many draws of each side were used.
    :param labels: axis -> the names along it; the first axis is that of the parts.
    :param arrays: name -> (axes, values).
    :param settings: the options that it was computed with.
    :param columns: the arrays that are shown in the table of parts; by default all with one number for each part.
    """

    title: str
    num_samples: tuple[int, ...]
    labels: Mapping[str, Sequence[str]]
    arrays: Mapping[str, tuple[tuple[str, ...], Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    columns: Sequence[str] = ()

    @functools.cached_property
    def data(self) -> Any:
        """All arrays as one :class:`xarray.Dataset`.

        >>> result.data["median"].sel(layer="0")
        """
        import xarray  # which takes half a second to load

        labels = {axis: list(names) for axis, names in self.labels.items()}
        return xarray.Dataset(dict(self.arrays), coords=labels, attrs=self.settings)

    @property
    def axis(self) -> str:
        """The name of the first axis: ``"layer"``, say."""
        return next(iter(self.labels))

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what was compared part by part: layers, or sets of units."""
        return tuple(self.labels[self.axis])

    def of(self, part: str) -> dict[str, Any]:
        """The numbers of one part: a number, or an array if there are further axes.

        >>> mmd(p, q).of("0")["median"]
        """
        place = self.parts.index(arguments.one_of("part", part, self.parts))
        rows = {name: values[place] for name, (axes, values) in self.arrays.items() if axes[:1] == (self.axis,)}
        return {name: value if np.ndim(value) else plain(value) for name, value in rows.items()}

    def plot(self) -> Any:
        """A bar for each part: of the array that says most."""
        from pyro_symmetric.plots import bars  # which loads matplotlib

        name = next((name for name in self._overall() if name in self.arrays), next(iter(self.arrays)))
        return bars(self.parts, [self.of(part)[name] for part in self.parts], self.axis, name, self.title)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: of everything together, and ``parts`` of each part."""
        parts = {part: self.of(part) for part in self.parts}
        found = {"title": self.title, **self._overall(), **self.settings, "num_samples": self.num_samples}
        return plain(found | {"parts": parts})

    def __repr__(self) -> str:
        columns = self.columns or [name for name, (axes, _) in self.arrays.items() if axes == (self.axis,)]
        rows = [(self.axis, *(name.replace("_", " ") for name in columns))]
        rows += [(part, *(_cell(self.of(part)[name]) for name in columns)) for part in self.parts[:MOST_LINES]]
        more = [f"  ... of {len(self.parts):,}"] if len(self.parts) > MOST_LINES else []
        return "\n".join([self._head(), *([table(rows)] if self.parts else []), *more])

    def _overall(self) -> dict[str, Any]:
        """The numbers of everything together."""
        raise NotImplementedError

    def _head(self) -> str:
        """The first line."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class DistanceResult(Result):
    """The distance between two sets of draws.

    >>> p, q = ({"0.weight": torch.randn(50, 2, 3), "2.weight": torch.randn(50, 2)} for _ in range(2))
    >>> result = ps.mmd(p, q)
    >>> isinstance(result, ps.compare.DistanceResult), result.value == result["median"]  # of everything together
    (True, True)
    >>> result.parts, result.of("0")["num_weights"]  # of one layer
    (('0', '2'), 6)

    :param totals: name -> the number for everything together; the first is :attr:`value`.
    """

    totals: Mapping[str, float]

    @property
    def value(self) -> float:
        """The distance in one number."""
        return next(iter(self.totals.values()))

    def __getitem__(self, name: str) -> float:
        if name not in self.totals:
            raise KeyError(f"no total {name!r}; there are {list(self.totals)}")
        return self.totals[name]

    def _overall(self) -> dict[str, Any]:
        return {"value": self.value, **self.totals}

    def _head(self) -> str:
        against = " against ".join(f"{count:,}" for count in self.num_samples)
        totals = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in self.totals.items())
        return f"{self.title}, {against} samples: {totals}"


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SignificanceTest(Result):
    """The result of a test of a null hypothesis.

    >>> test = mmd_test(p, q)
    >>> test.rejected == (test.p_value <= test.level)
    True

    :param verdict: what was found, in one line.
    :param p_value: of the null hypothesis, adjusted for everything that was looked at.
    :param level: the probability of rejecting a true null hypothesis is at most this.
    """

    verdict: str
    p_value: float
    level: float

    @property
    def rejected(self) -> bool:
        """True if the null hypothesis is rejected at the level."""
        return self.p_value <= self.level

    def _overall(self) -> dict[str, Any]:
        return {"p_value": self.p_value, "level": self.level, "rejected": self.rejected, "verdict": self.verdict}

    def _head(self) -> str:
        return f"{self.title}: {self.verdict}"


class Scores:
    """Results made of numbers, tensors, and results again."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return {entry.name: plain(getattr(self, entry.name)) for entry in fields(self)}  # type: ignore[arg-type]

    def __repr__(self) -> str:
        """The numbers, one a line; curves are left out."""
        rows = []
        for name, value in vars(self).items():
            if isinstance(value, float):
                rows.append((name, f"{value:.4g}"))
            elif isinstance(value, dict):
                for key, item in value.items():
                    numbers = vars(item).items() if isinstance(item, Scores) else [("", item)]
                    rows.append((f"{name} {key}", ", ".join(f"{k} {v:.4g}".strip() for k, v in numbers)))
        return f"{type(self).__name__}\n{table(rows, left=(0, 1))}"


# as text and as plain numbers ---------------------------------------------------------------------------------------


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows of equally many cells as aligned lines; the columns ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{c:{'<' if i in left else '>'}{widths[i]}}" for i, c in enumerate(row)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def plain(value: Any) -> Any:
    """A value in types that JSON knows; a number that isn't finite becomes ``None``."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.to_dict() if isinstance(value, Scores) else value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
