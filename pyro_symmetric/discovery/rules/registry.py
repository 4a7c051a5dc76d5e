"""Rules: their form, and how to add one.

A rule says how the axes of an operator's operands flow to its results. It is a function ``rule(flow, call)`` that
returns what a method of :class:`~pyro_symmetric.discovery.flow.Flow` gives, or a list with one for each result; results
of which nothing is known (indices, statistics) may be left out at the end.

Operators without a rule are taken apart by PyTorch's own decompositions. What can't be taken apart pins all that
reaches it, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from pyro_symmetric.discovery.flow import Flow, Value


@dataclass(frozen=True)
class Call:
    """One call of an operator in the traced graph.

    :param target: the operator.
    :param arguments: its arguments by the names of its schema, defaults filled in; tensors are :class:`Value` objects.
    :param shapes: the shapes of its results.
    :param read: the numbers of its results that something reads.
    """

    target: Any
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    read: frozenset[int] = frozenset({0})

    def __getitem__(self, name: str) -> Any:
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


def operator_name(target: Any) -> str:
    """The name of an operator, without its overload."""
    packet: Any = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


def bound(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, with its schema's defaults."""
    if not hasattr(target, "_schema"):
        return {"args": list(args), "kwargs": tree_leaves(list(kwargs.values()))}
    named = {argument.name: argument.default_value for argument in target._schema.arguments}
    return named | dict(zip(named, args, strict=False)) | dict(kwargs)


Rule = Callable[[Flow, Call], Value | Sequence[Value]]
R = TypeVar("R", bound=Rule)
RULES: dict[Any, Rule] = {}


def register_rule(*operators: Any) -> Callable[[R], R]:
    """Register a rule for operators (``torch.ops.aten.relu``, or an overload of one); a later rule replaces an earlier.

    Operators of PyTorch may be given by name (``"relu"``, ``"where.self"``), those of other libraries by their full
    name (``"mylib::centred"``). Names that this version of PyTorch doesn't have are passed over.

    >>> @torch.library.custom_op("mylib::centred", mutates_args=())
    ... def centred(x: torch.Tensor) -> torch.Tensor:
    ...     return x - x.mean(-1, keepdim=True)
    >>> fake = centred.register_fake(torch.empty_like)
    >>> @ps.discovery.register_rule("mylib::centred")
    ... def centring(flow, call):
    ...     return flow.normalise(call["x"], axes=[-1])
    >>> class Net(nn.Sequential):
    ...     def forward(self, x):
    ...         return self[1](centred(self[0](x)))
    >>> ps.find_symmetry(Net(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)).permutations.factors
    {'0': 4}

    The rule gets the ``call``, whose tensors it reads by the names of the operator's arguments (``call["x"]``), and the
    ``flow``, and returns what one of its methods gives (a list for several results):

    * ``elementwise([x, ...])``: a function of one entry of each operand, such as an activation.
    * ``normalise(x, axes)``: a function of an entry and of symmetric statistics along some axes.
    * ``reduce(x, axes, keepdim)``: a symmetric function (sum, mean, largest entry) of all entries along some axes.
    * ``combine([(x, letters), ...], out)``: a product of operands whose axes carry letters (numbers), as in
      ``torch.einsum``, with a sum over the letters that ``out`` lacks.
    * ``restrict(x, keep)``: units may be exchanged along the axes ``keep`` only; elsewhere their place counts.
    * ``relaid``, ``squeeze``, ``unsqueeze``, ``expand``, ``reshape``, ``take``: units move as the entries do.
    * ``pin(x)``: nothing may move in this operand.
    * ``give_up(operands, shape, why)``: pin all operands, with a warning that says why.

    Scales and signs need no rule: gradients tell them. What a rule allows too much is found when
    :func:`find_symmetry` verifies the group, and left out with a warning (:class:`BrokenSymmetry`).
    """

    def decorate(rule: R) -> R:
        for operator in operators:
            found = operator_of(operator) if isinstance(operator, str) else operator
            if found is not None:
                RULES[found] = rule
        return rule

    return decorate


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator overload: its own, that of all overloads, or that of PyTorch's tag."""
    packet, tags = getattr(target, "overloadpacket", None), getattr(target, "tags", ())
    keys = [target, packet, getattr(packet, "_qualified_op_name", None)]
    keys += [torch.Tag.pointwise] if torch.Tag.pointwise in tags else []
    return next((RULES[key] for key in keys if key in RULES), None)


def operator_of(name: str) -> Any | None:
    if "::" in name:
        return name
    found: Any = torch.ops.aten
    for piece in name.split("."):
        found = getattr(found, piece, None)
    return found
