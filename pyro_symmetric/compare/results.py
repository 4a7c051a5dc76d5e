"""Results of comparisons: distances and tests, with the numbers of their parts, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.posterior.tables import table

MOST_LINES = 60  # of a table


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Result:
    """Numbers of the parts that were compared.

    :param title: what was measured, and of what.
    :param num_samples: how many draws of each side were used.
    :param axis: what the parts are: ``"layer"``, ``"units"``, ``"input"``.
    :param parts: their names.
    :param numbers: name -> one number for each part, or an array whose first axis runs over the parts.
    :param shown: the numbers in the printed table; by default all with one for each part.
    """

    title: str
    num_samples: tuple[int, ...]
    axis: str
    parts: tuple[str, ...]
    numbers: Mapping[str, Any]
    shown: Sequence[str] = ()

    @property
    def table(self) -> Any:
        """A :class:`pandas.DataFrame` of all that is one number for each part."""
        import pandas  # which takes half a second to load

        columns = {name: values for name, values in self.numbers.items() if np.ndim(values) == 1}
        return pandas.DataFrame(columns, index=pandas.Index(self.parts, name=self.axis))

    def of(self, part: str) -> dict[str, Any]:
        """The numbers of one part: a number, or an array if there are further axes.

        >>> mmd(p, q).of("0")["median"]
        """
        place = self.parts.index(arguments.one_of("part", part, self.parts))
        rows = {name: values[place] for name, values in self.numbers.items()}
        return {name: value if np.ndim(value) else plain(value) for name, value in rows.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON: of everything together, and ``parts`` of each part."""
        parts = {part: self.of(part) for part in self.parts}
        return plain({"title": self.title, **self._overall(), "num_samples": self.num_samples, "parts": parts})

    def __repr__(self) -> str:
        if not self.parts:
            return self._head()
        more = [f"... of {len(self.parts):,}"] if len(self.parts) > MOST_LINES else []
        shown = self.table[list(self.shown)] if self.shown else self.table
        rows = shown.head(MOST_LINES).rename_axis(index=None, columns=self.axis)
        text = rows.rename(columns=lambda name: name.replace("_", " ")).to_string(float_format="{:.3g}".format)
        return "\n".join([self._head(), text, *more])

    def _overall(self) -> dict[str, Any]:
        """The numbers of everything together."""
        raise NotImplementedError

    def _head(self) -> str:
        """The first line."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
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
        return self.totals[name]

    def _overall(self) -> dict[str, Any]:
        return {"value": self.value, **self.totals}

    def _head(self) -> str:
        against = " against ".join(f"{count:,}" for count in self.num_samples)
        totals = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in self.totals.items())
        return f"{self.title}, {against} samples: {totals}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
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


class Scores(dict[str, Any]):
    """Scores by name, which are attributes, too: ``scores.nll`` is ``scores["nll"]``."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"no score {name!r}; there are {list(self)}")
        return self[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return plain(self)

    def __repr__(self) -> str:
        """The numbers, one a line; curves are left out."""
        return f"Scores\n{table(list(_numbers_of(self)), left=(0, 1))}"


def _numbers_of(scores: Mapping[Any, Any], prefix: str = "") -> Any:
    """Name and text of every number."""
    for name, value in scores.items():
        if isinstance(value, float):
            yield f"{prefix}{name}", f"{value:.4g}"
        elif isinstance(value, dict):
            yield from _numbers_of(value, f"{prefix}{name} ")


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
    return value
