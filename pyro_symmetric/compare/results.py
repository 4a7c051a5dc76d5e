"""Results of comparisons: numbers of everything together and of each part, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from pyro_symmetric.posterior.tables import table

Parts = dict[str, dict[str, Any]]  # part -> name -> a number, or an array of them


@dataclass(frozen=True, eq=False, repr=False)
class DistanceResult:
    """The distance between two sets of draws.

    >>> p, q = ({"0.weight": torch.randn(50, 2, 3), "2.weight": torch.randn(50, 2)} for _ in range(2))
    >>> result = ps.mmd(p, q)
    >>> isinstance(result, ps.compare.DistanceResult), result.value == result["median"]  # of everything together
    (True, True)
    >>> list(result.parts), result.parts["0"]["num_weights"]  # of each layer
    (['0', '2'], 6)

    :param title: what was measured.
    :param num_samples: how many draws of each side were used.
    :param totals: name -> the number for everything together; the first is :attr:`value`.
    :param parts: layer -> name -> a number, or an array of one for each kernel.
    :param each: what is known of smaller parts: site -> the distance of every weight; of predictions, of every input.
    """

    title: str
    num_samples: tuple[int, ...]
    totals: dict[str, float]
    parts: Parts = field(default_factory=dict)
    each: Any = None

    @property
    def value(self) -> float:
        """The distance in one number."""
        return next(iter(self.totals.values()))

    def __getitem__(self, name: str) -> float:
        return self.totals[name]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        found = {"title": self.title, "value": self.value, **self.totals}
        return plain({**found, "num_samples": self.num_samples, "parts": self.parts})

    def __repr__(self) -> str:
        against = " against ".join(f"{count:,}" for count in self.num_samples)
        totals = ", ".join(f"{name} {value:.3g}" for name, value in self.totals.items())
        return f"{self.title}, {against} samples: {totals}\n{by_part(self.parts)}".rstrip()


@dataclass(frozen=True, eq=False, repr=False)
class SignificanceTest:
    """The result of a test of a null hypothesis.

    >>> test = mmd_test(p, q)
    >>> test.rejected == (test.p_value <= test.level)
    True

    :param title: what was tested.
    :param num_samples: how many draws of each side were used.
    :param p_value: of the null hypothesis, adjusted for everything that was looked at.
    :param level: the probability of rejecting a true null hypothesis is at most this.
    :param verdict: what was found, in one line.
    :param parts: layer or units -> name -> a number, or an array of them.
    """

    title: str
    num_samples: tuple[int, ...]
    p_value: float
    level: float
    verdict: str
    parts: Parts

    @property
    def rejected(self) -> bool:
        """True if the null hypothesis is rejected at the level."""
        return self.p_value <= self.level

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        return plain({**vars(self), "rejected": self.rejected})

    def __repr__(self) -> str:
        return f"{self.title}: {self.verdict}\n{by_part(self.parts)}".rstrip()


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
        """The single numbers, and the names of what else there is."""
        numbers = [f"{name} {value:.4g}" for name, value in self.items() if isinstance(value, float)]
        return f"Scores({', '.join([*numbers, *(name for name in self if not isinstance(self[name], float))])})"


def by_part(parts: Parts) -> str:
    """A line for each part, and a column for each single number that it has."""
    first = next(iter(parts.values()), {})
    names = [name for name, value in first.items() if isinstance(value, int | float)]
    rows = [(part, *(_short(own[name]) for name in names)) for part, own in parts.items()]
    return table([("", *(name.replace("_", " ") for name in names)), *rows]) if rows else ""


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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
