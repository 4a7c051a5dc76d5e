"""Sizes that depend on the data: of what a mask selects, of all that is not zero, of a set.

torch.export gives them symbols. Such an axis is never labelled, so that its length doesn't matter: each symbol has a
prime number as its stand-in, and reshaping finds the same axes as it would with any other numbers.
"""

from __future__ import annotations

import re
from typing import Any

import torch

# Operators that take such a size (or a factor) and make no other use of its value.
TAKE_SIZES = frozenset("view _unsafe_view reshape expand full full_like empty zeros ones new_full".split())  # noqa: SIM905
TAKE_SIZES |= frozenset("new_empty rand randn arange mul div add sub".split())  # noqa: SIM905
FIRST = 26  # the number of the first stand-in among all primes: 101


def is_open(value: Any) -> bool:
    """True if a number is known only when data flows."""
    return isinstance(value, torch.SymInt | torch.SymFloat) and bool(_symbols(value))


def closed(value: Any) -> Any:
    """A number, or its stand-in; no stand-in of a fraction may be taken for a number that is known."""
    if isinstance(value, torch.SymFloat) and is_open(value):
        return float("nan")
    if not isinstance(value, torch.SymInt):
        return value
    if not is_open(value):
        return int(value)
    from sympy import prime

    expression = value.node.expr
    return int(expression.subs({s: prime(FIRST + int(re.sub(r"\D", "", s.name) or 0)) for s in _symbols(value)}))


def _symbols(value: torch.SymInt | torch.SymFloat) -> list[Any]:
    expression = getattr(value.node, "expr", None)
    return sorted(getattr(expression, "free_symbols", ()), key=str)
