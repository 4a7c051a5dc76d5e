"""The form of a rule: values of tensors, calls of operators, and the registry.

A rule, ``rule(flow, call)``, says how the axes of an operator's operands flow to its
results; see
:func:`register_rule`. Unknown results (indices, statistics) may be left out at the end.
PyTorch decomposes operators without a rule, or else their operands are pinned, with a
warning.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from pyro_symmetric.arguments import Keywords, Shape

Array = np.ndarray
_U = np.uint64


@dataclass(frozen=True, eq=False)
class Part:
    """Atoms of a tensor's entries along some of its axes.

    :param axes: the axes on which the atoms depend, ascending. Without any, the whole
        tensor is a function of one unit.
    :param atoms: int64 array, one axis for each entry of ``axes``.
    :param history: hashes of what pieces of one tensor went through since it was cut;
        None if it wasn't cut.
    """

    axes: tuple[int, ...]
    atoms: Array
    history: Array | None = None

    def renumbered(self, to: Mapping[int, int]) -> Part:
        """Renumber the axes, old -> new; those that are left out have length one and
        are dropped.
        """
        order = sorted(
            (i for i, axis in enumerate(self.axes) if axis in to),
            key=lambda i: to[self.axes[i]],
        )
        axes = tuple(to[self.axes[i]] for i in order)
        if order == [*range(len(self.axes))]:
            return Part(axes, self.atoms, self.history)
        dropped = [i for i in range(len(self.axes)) if i not in order]
        shape = [self.atoms.shape[i] for i in order]
        return self.mapped(
            axes, lambda array: array.transpose([*order, *dropped]).reshape(shape)
        )

    def mapped(self, axes: tuple[int, ...], function: Callable[[Array], Array]) -> Part:
        """Move the entries to other places."""
        history = None if self.history is None else function(self.history)
        return Part(axes, function(self.atoms), history)

    def past(self, what: np.uint64) -> Part:
        """Note what the entries went through."""
        before = np.zeros(self.atoms.shape, np.uint64)
        before = before if self.history is None else self.history
        return Part(self.axes, self.atoms, hash64(before ^ what))


@dataclass(frozen=True, eq=False)
class Value:
    """Abstract value of a tensor: the units to which its entries belong.

    Entries along an axis belong to units (the axis is one of a part's), are told apart
    by their position (the axis is ``fixed``: batch, time, pixels, classes), or are all
    equal (neither).

    :param parts: their axes are disjoint, except in a matrix whose slices have columns
        of their own: these come second.
    :param constant: the tensor itself, if tracing knows it (index maps).
    :param mask: whether the entries are booleans.
    """

    shape: Shape
    parts: tuple[Part, ...] = ()
    fixed: frozenset[int] = frozenset()
    constant: torch.Tensor | None = None
    mask: bool = False

    @property
    def dim(self) -> int:
        return len(self.shape)

    def axis(self, axis: int) -> int:
        """Count a possibly negative axis from the front."""
        return axis % self.dim if self.dim else 0

    def part_on(self, axis: int) -> Part | None:
        """Return the first part that depends on this axis."""
        return next((part for part in self.parts if axis in part.axes), None)

    @property
    def columns(self) -> Part | None:
        """The columns of a matrix whose slices have columns of their own."""
        return next(
            (
                part
                for part in self.parts[1:2]
                if part.axes == (0, 1) and self.part_on(0) is not part
            ),
            None,
        )

    def past(self, what: np.uint64) -> Value:
        """Note in the history of pieces what they went through."""
        return replace(
            self,
            parts=tuple(
                part if part.history is None else part.past(what) for part in self.parts
            ),
        )

    def collapsed(self, axes: Collection[int]) -> Value:
        """Return the value at a single position along these axes, which get length
        one.
        """
        shape = tuple(1 if axis in axes else n for axis, n in enumerate(self.shape))
        parts = tuple(part for part in self.parts if not set(part.axes) & set(axes))
        return Value(shape, parts, self.fixed.difference(axes))


def hash64(values: Array) -> Array:
    """Hash integers to 64 bits (splitmix64): sums of hashes tell multisets apart but
    for a chance of 2^-64 a pair.
    """
    with np.errstate(over="ignore"):  # of arrays without axes
        z = values.astype(_U) + _U(0x9E3779B97F4A7C15)
        z = (z ^ (z >> _U(30))) * _U(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> _U(27))) * _U(0x94D049BB133111EB)
        return z ^ (z >> _U(31))


def salt(number: int) -> np.uint64:
    """Hash one number."""
    return hash64(np.array([number]))[0]


def salt_of(*what: Any) -> np.uint64:
    """Hash any objects by how they are printed."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return np.frombuffer(digest, np.uint64)[0]


def opaque(
    shape: Iterable[int], constant: torch.Tensor | None = None, mask: bool = False
) -> Value:
    """Return the value of a tensor in which nothing moves: data, masks, results of
    operators without a rule.
    """
    shape = tuple(int(n) for n in shape)
    return Value(
        shape, (), frozenset(i for i, n in enumerate(shape) if n > 1), constant, mask
    )


@dataclass(frozen=True)
class Call:
    """One call of an operator in the traced graph.

    :param target: the operator.
    :param arguments: its arguments by the names of its schema, with defaults; tensors
        are :class:`Value` objects.
    :param shapes: the shapes of its results.
    :param read: the indices of the results that something reads.
    """

    target: Any
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    read: frozenset[int] = frozenset({0})

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument that only some overloads of the operator take."""
        return self.arguments.get(name, default)

    @property
    def name(self) -> str:
        """The operator's name, without its overload."""
        return operator_name(self.target)

    @property
    def shape(self) -> Shape:
        """The shape of the first result."""
        return self.shapes[0]

    @property
    def operands(self) -> list[Value]:
        """All tensors among the arguments, also those in lists."""
        lists = (
            items if isinstance(items, list | tuple) else [items]
            for items in self.arguments.values()
        )
        return [item for items in lists for item in items if isinstance(item, Value)]

    @property
    def numbers(self) -> list[Any]:
        """All arguments but tensors, in order."""
        leaves = tree_leaves([*self.arguments.values()])
        return [leaf for leaf in leaves if not isinstance(leaf, Value)]

    @property
    def value(self) -> Value:
        """The first operand."""
        return self.operands[0]

    @property
    def axis(self) -> int:
        """The axis ``dim`` of the first operand, counted from the front."""
        return self.value.axis(self["dim"])


def operator_name(target: Any) -> str:
    """Return the name of an operator, without its overload."""
    packet: Any = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet))


def bound(target: Any, args: Sequence[Any], kwargs: Keywords) -> dict[str, Any]:
    """Bind an operator's arguments to the names of its schema, with defaults."""
    if not hasattr(target, "_schema"):
        return {"args": list(args), "kwargs": tree_leaves(list(kwargs.values()))}
    defaults = {
        argument.name: argument.default_value for argument in target._schema.arguments
    }
    return defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)


Rule = Callable[[Any, Call], Value | Sequence[Value]]  # of a Flow and a call
R = TypeVar("R", bound=Rule)
RULES: dict[Any, Rule] = {}
# Rules that keep the history of pieces: functions of one operand, views, selections.
CARRIERS: set[Any] = set()


def carrier(rule: R) -> R:
    """Mark a rule whose operands may be pieces that aren't noted yet."""
    CARRIERS.add(rule)
    return rule


def register_rule(*operators: Any) -> Callable[[R], R]:
    """Register a rule for operators (``torch.ops.aten.relu``, or an overload of one); a
    later rule replaces an earlier.

    Operators of PyTorch may be given by name (``"relu"``, ``"where.self"``), those of
    other libraries by their full name (``"mylib::centred"``). Names that this version
    of PyTorch lacks are ignored.

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
    >>> ps.find_symmetry(
    ...     Net(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    ... ).permutations.factors
    {'0': 4}

    A rule reads the tensors off the ``call`` by the names of the operator's arguments
    (``call["x"]``), and returns what a method of the ``flow`` gives (a list for several
    results):

    * ``elementwise([x, ...])``: a function of one entry of each operand, such as an
      activation.
    * ``normalise(x, axes)``: a function of an entry and of symmetric statistics along
      some axes.
    * ``reduce(x, axes, keepdim)``: a symmetric function (sum, mean, largest entry) of
      all entries along some axes.
    * ``einsum(equation, x, ...)``: a product of operands, as in ``torch.einsum``;
      ``combine([(x, letters), ...], out)`` takes lists of numbers in place of letters.
    * ``restrict(x, keep)``: units may be exchanged along the axes ``keep`` only;
      elsewhere their position counts.
    * ``relaid``, ``squeeze``, ``unsqueeze``, ``expand``, ``reshape``, ``take``: units
      move as the entries do.
    * ``pin(x)``: nothing may move in this operand.
    * ``give_up(operands, shape, why)``: pin all operands, with a warning that says why.

    Rules speak of permutations only; gradients give scales and signs.
    :func:`find_symmetry` verifies the group: moves that a rule wrongly allows are
    dropped with a warning (:class:`BrokenSymmetry`).
    """

    def decorate(rule: R) -> R:
        for operator in operators:
            key = _operator(operator) if isinstance(operator, str) else operator
            if key is not None:
                RULES[key] = rule
        return rule

    return decorate


def rule_for(target: Any) -> Rule | None:
    """Return the rule of an operator overload: its own, that of all overloads, or that
    of PyTorch's tag.
    """
    packet = getattr(target, "overloadpacket", None)
    tags = getattr(target, "tags", ())
    keys = [target, packet, getattr(packet, "_qualified_op_name", None)]
    keys += [torch.Tag.pointwise] if torch.Tag.pointwise in tags else []
    return next((RULES[key] for key in keys if key in RULES), None)


def _operator(name: str) -> Any | None:
    """Look up an operator of PyTorch by name; those of other libraries are registered
    by their full name.
    """
    if "::" in name:
        return name
    operator: Any = torch.ops.aten
    for attribute in name.split("."):
        operator = getattr(operator, attribute, None)
    return operator
