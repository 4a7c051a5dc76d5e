"""Units: named sets of interchangeable things, with the axes along which they lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Shape
from pyro_symmetric.groups.axes import Axis
from pyro_symmetric.groups.moves import MOVES, Move
from pyro_symmetric.posterior import tables

LISTED = 6  # how many axes of each set of units a table lists


@dataclass(frozen=True, eq=False)
class Units:
    """A named set of interchangeable things: hidden units, heads, mixture components,
    factors.

    Units may lie inside others: the rows of the attention heads are ``Units("rows", d,
    parent="heads", copies=H)``, and row ``i`` of head ``c`` has the number ``c * d +
    i`` in the indices of the axes.

    >>> rows = ps.groups.Axis("w", 0, torch.arange(3)[None])
    >>> units = ps.groups.Units("hidden", 3, (rows,))
    >>> ps.Group([units], {"w": torch.Size([3, 2])}).order()
    6

    :param size: the number of units in one copy.
    :param parent: the units inside which these lie, if any.
    :param copies: the number of the parent's units; without a parent, the number of
        independent copies.
    :param moves: what the units may do: permute within their copy (``"permute"``), flip
        signs (``"flip"``), be multiplied by positive numbers (``"scale"``), be shifted
        by constants (``"shift"``); or be mixed by orthogonal maps (``"rotate"``), which
        permute and flip them as well, and can't be combined with other moves.
    """

    name: str
    size: int
    axes: tuple[Axis, ...] = ()
    parent: str | None = None
    copies: int = 1
    moves: frozenset[Move] = frozenset({"permute"})

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "axes",
            tuple(arguments.listed("axes", self.axes, Axis, "Axis objects")),
        )
        object.__setattr__(
            self, "moves", moves_of("moves", self.moves) if self.moves else frozenset()
        )
        if "rotate" in self.moves:
            _require_rotating(self)
        for axis in self.axes:
            if axis.index.shape[1] != self.count:
                raise ValueError(
                    f"the index of {self.name!r} on {axis} has shape "
                    f"{tuple(axis.index.shape)}; it must be "
                    f"(blocks, {self.count}), one column for each unit"
                )

    @property
    def size_text(self) -> str:
        """The number of units as text: ``3``, or ``2 x 3`` for three in each of two
        copies.
        """
        return str(self.size) if self.copies == 1 else f"{self.copies} x {self.size}"

    @property
    def count(self) -> int:
        """The number of units in all copies together."""
        return self.copies * self.size

    def within(self, moves: Set[Move]) -> frozenset[Move]:
        """Return what units can still do that may do these moves alone."""
        allowed = self.moves & moves
        for move in self.moves - moves:
            allowed |= MOVES[move].contains & moves
        return allowed

    def without(self, moves: Set[Move]) -> frozenset[Move]:
        """Return what units can still do that may not do these moves."""
        broken = {move for move in self.moves if moves & {move, *MOVES[move].contains}}
        remaining = self.moves - broken
        for move in broken:
            remaining |= MOVES[move].contains - moves
        return remaining

    @property
    def shape(self) -> Shape:
        """The shape of one element's numbers, one for each unit: ``(size,)``, or
        ``(copies, size)``.
        """
        return (self.size,) if self.copies == 1 else (self.copies, self.size)


def _require_rotating(units: Units) -> None:
    """Raise ``ValueError`` if units that rotate do more, or lie where they can't."""
    if len(units.moves) > 1:
        raise ValueError(
            f"the moves of {units.name!r} are {sorted(units.moves)}; units that rotate "
            "permute and flip by that, and can do nothing else"
        )
    for axis in units.axes:
        if abs(axis.exponent) != 1 or axis.epsilon is not None:
            raise ValueError(
                f"the units {units.name!r} rotate along {axis}, where a flip of one "
                "would not change its entries alone, by their sign; exponents must be "
                "1 or -1, without an epsilon"
            )


def moves_of(name: str, value: str | Iterable[str]) -> frozenset[Move]:
    """Return one or several moves as a set, checked."""
    moves = [value] if isinstance(value, str) else list(value)
    if not moves or not set(moves) <= set(MOVES):
        raise ValueError(
            f"{name} is {value!r}; it must hold one or several of {list(MOVES)}"
        )
    return frozenset(moves)  # type: ignore[arg-type]


def outer_first(units: Sequence[Units]) -> dict[str, Units]:
    """Sort units by name, in the given order but each after its parent."""
    named = {unit_set.name: unit_set for unit_set in units}
    ordered: dict[str, Units] = {}
    if len(named) < len(units):
        raise ValueError(
            "two sets of units have one name: "
            f"{[unit_set.name for unit_set in units]}; each needs its own"
        )
    for unit_set in units:
        line = [unit_set]
        while (name := line[-1].parent) is not None:
            if (
                name not in named
                or named[name].count != line[-1].copies
                or named[name] in line
            ):
                raise ValueError(
                    f"the units {line[-1].name!r} lie in {name!r}, in "
                    f"{line[-1].copies} copies; there must be such "
                    "units, one copy in each, and none may lie inside themselves"
                )
            line.append(named[name])
        ordered |= {outer.name: outer for outer in reversed(line)}
    return ordered


def pruned(units: Sequence[Units]) -> list[Units]:
    """Drop units without effect that hold no others, and axes that no move touches.

    Units inside others that never move lose their parent.
    """
    carried = set()
    for unit_set in units:
        carried |= (
            {unit_set.name}
            if "permute" in unit_set.moves or unit_set.parent in carried
            else set()
        )
    remaining = []
    carriers = set()
    for unit_set in reversed(units):
        axes = (
            unit_set.axes
            if unit_set.name in carriers
            else tuple(axis for axis in unit_set.axes if axis.touched(unit_set.moves))
        )
        if axes or unit_set.name in carriers:
            remaining.append(
                replace(
                    unit_set,
                    axes=axes,
                    parent=unit_set.parent if unit_set.parent in carried else None,
                )
            )
            carriers.add(remaining[-1].parent)
    return remaining[::-1]


def table(units: Mapping[str, Units]) -> str:
    """Format units as aligned lines; units inside others follow these, indented."""
    return tables.table(unit_rows(units), left_aligned=(0, 2, 3))


def unit_rows(units: Mapping[str, Units]) -> list[tuple[str, ...]]:
    """Return a head, and a row for each set of units, after those around it."""
    rows: list[tuple[str, ...]] = [("units", "number", "moves", "axes")]

    def add(parent: str | None, indent: str) -> None:
        for unit_set in (
            candidate for candidate in units.values() if candidate.parent == parent
        ):
            axes = list(map(str, unit_set.axes[:LISTED])) + [
                f"... {len(unit_set.axes) - LISTED} more"
            ] * bool(unit_set.axes[LISTED:])
            rows.append(
                (
                    indent + unit_set.name,
                    unit_set.size_text,
                    ", ".join(m for m in MOVES if m in unit_set.moves),
                    ", ".join(axes),
                )
            )
            add(unit_set.name, indent + "  ")

    add(None, "")
    return rows
