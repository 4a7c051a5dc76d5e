"""Rules: their form, what they may say, and how to add one.

A rule states how the labels of an operator's operands pass to its results, and under which facts about units and their
multipliers. It is a function ``rule(labeller, call)`` that returns a :class:`~pyro_symmetric.discovery.labels.Value`,
or a list with one for each result. This operator subtracts the mean of the features; the units of an operand may be
exchanged, but not rescaled:

>>> @torch.library.custom_op("mylib::centred", mutates_args=())
... def centred(x: torch.Tensor) -> torch.Tensor:
...     return x - x.mean(-1, keepdim=True)
>>> @centred.register_fake
... def _(x):
...     return torch.empty_like(x)
>>> @register_rule(torch.ops.mylib.centred)
... def centring(labeller, call):
...     return labeller.normalise(call["x"], axes=[-1])

Operators without a rule are taken apart by PyTorch's own decompositions. What can't be taken apart pins all that
reaches it, with a warning.

Beside the methods that :func:`register_rule` lists, a ``labeller`` has these:

* ``settled``: labels that don't depend on what the data have chosen (an expert for each token).
* ``unscaled``: the same units without the operand's multipliers, or some kinds of them.
* ``still``: multipliers don't pass, apart from those that are named.

The labeller in turn states facts about atoms, entry by entry, in ``labeller.facts``:

* ``unify``: two atoms belong to one unit.
* ``relate``: the unit of one atom is a member of the unit of another.
* ``refine``: units can't be exchanged if their atoms have different colours.
* ``occur``: these atoms are all that lie in one tensor, so that a symmetry maps them onto each other.
* ``balance``: a linear equation between the logarithms of multipliers.
* ``still``: these multipliers are one.
* ``pin``: every unit has a colour of its own, and no multiplier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pyro_symmetric import arguments
from pyro_symmetric.discovery.labeller import Labeller
from pyro_symmetric.discovery.labels import Value
from pyro_symmetric.discovery.nodes import operator_name


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
    """Register a rule for operators (``torch.ops.aten.relu``, or an overload of one); a later rule replaces an earlier.

    Operators of PyTorch may be given by name (``"relu"``, ``"where.self"``), those of other libraries by their full
    name (``"mylib::centred"``). Names that this version of PyTorch doesn't have are passed over.

    >>> @torch.library.custom_op("mylib::centred", mutates_args=())
    ... def centred(x: torch.Tensor) -> torch.Tensor:
    ...     return x - x.mean(-1, keepdim=True)
    >>> fake = centred.register_fake(torch.empty_like)
    >>> @ps.discovery.register_rule("mylib::centred")
    ... def centring(labeller, call):
    ...     return labeller.normalise(call["x"], axes=[-1])
    >>> class Net(nn.Sequential):
    ...     def forward(self, x):
    ...         return self[1](centred(self[0](x)))
    >>> ps.find_symmetry(Net(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)).permutations.factors
    {'0': 4}

    The rule gets the ``call``, whose tensors it reads by the names of the operator's arguments (``call["x"]``), and a
    ``labeller``, and returns what one of the labeller's methods gives (a list for several results):

    * ``elementwise([x, ...], "sum", passes)``: a function of one entry of each operand, such as an activation.
      ``passes`` says which multipliers go through: ``LINEAR`` (all), ``HOMOGENEOUS`` (positive scales, as for ReLU),
      ``ODD`` (signs, as for tanh) or ``NOTHING``. All four are in ``pyro_symmetric.discovery.labels``.
    * ``elementwise([x, ...], "product")``: the operands are multiplied, and so are their multipliers.
    * ``normalise(x, axes)``: a function of an entry and of symmetric statistics along some axes.
    * ``reduce(x, axes, keepdim)``: a symmetric function (sum, mean, largest entry) of all entries along some axes.
    * ``combine([(x, letters), ...], out)``: a product of operands whose axes carry letters (numbers), as in
      ``torch.einsum``, with a sum over the letters that ``out`` lacks.
    * ``restrict(x, keep)``: units may be exchanged along the axes ``keep`` only; elsewhere their place counts.
    * ``relaid``, ``squeeze``, ``unsqueeze``, ``expand``, ``reshape``, ``take``: labels move as the entries do.
    * ``pin(x)``: nothing may move in this operand.
    * ``give_up(operands, shape, why)``: pin all operands, with a warning that says why.

    An activation that is odd, ``x * |x|``:

    >>> from pyro_symmetric.discovery.labels import ODD
    >>> @torch.library.custom_op("mylib::signed_square", mutates_args=())
    ... def signed_square(x: torch.Tensor) -> torch.Tensor:
    ...     return x * x.abs()
    >>> fake = signed_square.register_fake(torch.empty_like)
    >>> @ps.discovery.register_rule("mylib::signed_square")
    ... def activation(labeller, call):
    ...     return labeller.elementwise([call["x"]], passes=ODD)
    >>> class Net(nn.Sequential):
    ...     def forward(self, x):
    ...         return self[1](signed_square(self[0](x)))
    >>> ps.find_symmetry(Net(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)).finite.order()  # 4! 2^4
    384

    What a rule allows too much is found when :func:`find_symmetry` verifies the group, and left out with a warning
    (:class:`BrokenSymmetry`).

    :param sliced: whether the rule understands values that overlap or have routes, see
        :class:`~pyro_symmetric.discovery.labels.Value`.
    """
    arguments.flag("sliced", sliced)
    for operator in operators:
        if not isinstance(operator, str) and not callable(operator):
            raise TypeError(
                f"operators holds {operator!r}; it must hold operators, such as torch.ops.aten.relu, or names"
            )

    def decorate(rule: R) -> R:
        for operator in operators:
            found = _operator(operator) if isinstance(operator, str) else operator
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

    See :class:`~pyro_symmetric.discovery.labels.Value`.
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


def _operator(name: str) -> Any | None:
    if "::" in name:
        return name
    found: Any = torch.ops.aten
    for piece in name.split("."):
        found = getattr(found, piece, None)
    return found
