"""How labels pass through operators: one rule for each, in a registry keyed by ATen operator.

A rule is a function ``rule(labeller, call) -> Value`` (or a tuple of values). It states under which facts about the
units of its operands the operator commutes with moving and rescaling them, and labels the result. To teach discovery
about a new operator::

    @register_rule(torch.ops.mylib.swish_norm)
    def swish_norm(labeller, call):
        return labeller.normalise(call["x"], axes=[-1])

Operators without a rule pin whatever reaches them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyro_symmetric.symmetry.labeller import Labeller
from pyro_symmetric.symmetry.labels import Value

Result = Value | Sequence[Value]


@dataclass(frozen=True)
class Call:
    """One call of an operator in the traced graph.

    :param target: the operator.
    :param arguments: its arguments by the names of its schema, defaults filled in; tensors are :class:`Value` objects.
    :param shapes: the shapes of its results.
    :param floating: whether its (first) result holds floating-point numbers.
    """

    target: Any
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    floating: bool = True

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.shapes[0]

    @property
    def operands(self) -> list[Value]:
        """All tensors among the arguments, also those in lists."""
        found: list[Value] = []
        for argument in self.arguments.values():
            for item in argument if isinstance(argument, list | tuple) else [argument]:
                found += [item] if isinstance(item, Value) else []
        return found


Rule = Callable[[Labeller, Call], Result]
RULES: dict[Any, Rule] = {}


def register_rule(*operators: Any) -> Callable[[Rule], Rule]:
    """Register a rule for operators (``torch.ops.aten.relu``, or an overload of one); a later rule replaces an earlier.

    Names that this version of PyTorch doesn't have may be given as strings (``"aten.relu"``) and are passed over.
    """

    def decorate(rule: Rule) -> Rule:
        for operator in operators:
            found = find_operator(operator) if isinstance(operator, str) else operator
            if found is not None:
                RULES[found] = rule
        return rule

    return decorate


def find_operator(name: str) -> Any | None:
    """``"aten.relu"`` -> ``torch.ops.aten.relu``, or None."""
    found: Any = torch.ops
    for piece in name.split("."):
        found = getattr(found, piece, None)
        if found is None:
            return None
    return found


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator overload: its own, or that of its packet."""
    return RULES.get(target) or RULES.get(getattr(target, "overloadpacket", None))


def as_value(argument: Any) -> Value:
    """A tensor's value; a number is a tensor without axes."""
    if isinstance(argument, Value):
        return argument
    return Value((), zero=argument == 0)


from pyro_symmetric.symmetry.rules import (  # noqa: E402  (the rules register themselves)
    attention,
    contraction,
    creation,
    elementwise,
    indexing,
    normalisation,
    recurrent,
    reduction,
    shape,
    spatial,
)

__all__ = [
    "RULES",
    "Call",
    "Rule",
    "as_value",
    "attention",
    "contraction",
    "creation",
    "elementwise",
    "find_operator",
    "indexing",
    "normalisation",
    "recurrent",
    "reduction",
    "register_rule",
    "rule_for",
    "shape",
    "spatial",
]
