"""Rules by which labels and multipliers pass through operators: their form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pyro_symmetric.discovery.rules.registry import operator_name, operator_of
from pyro_symmetric.discovery.scaling.labeller import Labeller
from pyro_symmetric.discovery.scaling.labels import Value


@dataclass(frozen=True)
class Call:
    """One call of an operator in the traced graph.

    :param target: the operator.
    :param arguments: its arguments by the names of its schema, defaults filled in; tensors are :class:`Value` objects.
    :param shapes: the shapes of its results.
    :param floating: whether its (first) result holds real or complex numbers.
    :param read: which of its results something reads.
    """

    target: Any
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    floating: bool = True
    read: tuple[bool, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """:raises ValueError: if the operator has no such argument."""
        if name not in self.arguments:
            raise ValueError(f"a rule asks for {name!r} of {self.name}, whose arguments are {list(self.arguments)}")
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that not all overloads of the operator take."""
        return self.arguments.get(name, default)

    @property
    def name(self) -> str:
        """The operator's name, without its overload."""
        return operator_name(self.target)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.shapes[0]

    @property
    def operands(self) -> list[Value]:
        """All tensors among the arguments, also those in lists."""
        found: list[Value] = []
        for argument in self.arguments.values():
            for item in argument if isinstance(argument, list | tuple) else [argument]:
                found += [item] if isinstance(item, Value) else []
        return found

    @property
    def value(self) -> Value:
        """The first operand."""
        return self.operands[0]

    @property
    def axis(self) -> int:
        """The axis ``dim`` of the first operand, counted from the front."""
        return self.value.axis(self["dim"])


Rule = Callable[[Labeller, Call], Value | Sequence[Value]]
R = TypeVar("R", bound=Rule)
RULES: dict[Any, Rule] = {}
SLICED: set[Any] = set()
NUMBERS: set[Any] = set()


def register_rule(*operators: Any, sliced: bool = False) -> Callable[[R], R]:
    """Register a rule for operators, given by name or as they are; a later rule replaces an earlier."""
    for operator in operators:
        if not isinstance(operator, str) and not callable(operator):
            raise TypeError(
                f"operators holds {operator!r}; it must hold operators, such as torch.ops.aten.relu, or names"
            )

    def decorate(rule: R) -> R:
        for operator in operators:
            found = operator_of(operator) if isinstance(operator, str) else operator
            if found is not None:
                RULES[found] = rule
                (SLICED.add if sliced else SLICED.discard)(found)
        return rule

    return decorate


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator overload: its own, or that of all overloads."""
    return next((RULES[key] for key in _keys(target) if key in RULES), None)


def takes_slices(target: Any) -> bool:
    """True if the rule of an operator understands values that overlap or have routes."""
    return next((key in SLICED for key in _keys(target) if key in RULES), False)


def reads_numbers(rule: R) -> R:
    """Mark a rule that knows what numbers of units are; in the operands of all others, numbered units stay.

    See :class:`~pyro_symmetric.discovery.scaling.labels.Value`.
    """
    NUMBERS.add(rule)
    return rule


def _keys(target: Any) -> tuple[Any, ...]:
    """The names that the rule of an operator may be registered for: the overload, all of its overloads, their name."""
    packet = getattr(target, "overloadpacket", None)
    return target, packet, getattr(packet, "_qualified_op_name", None)


def as_value(argument: Any) -> Value:
    """A tensor's value; a number is a tensor without axes."""
    if isinstance(argument, Value):
        return argument
    return Value((), zero=argument == 0)
