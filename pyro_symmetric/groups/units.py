"""Units: named sets of interchangeable things, the axes of sites along which they lie, and what lies there."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from pyro_symmetric import arguments

Move = Literal["permute", "flip", "scale", "shift"]
MOVES: tuple[Move, ...] = get_args(Move)
LISTED = 6  # axes of each set of units in a table; of more, the number is told


@dataclass(frozen=True, eq=False)
class Axis:
    """One axis of one site along which units lie.

    >>> rows = ps.Axis("hidden.weight", 0, torch.arange(3)[None], exponent=1)
    >>> columns = ps.Axis("out.weight", 1, torch.arange(3)[None], exponent=-1)
    >>> units = ps.Units("hidden", 3, (rows, columns), moves=frozenset({"permute", "scale"}))
    >>> ps.Group([units], {"hidden.weight": torch.Size([3, 2]), "out.weight": torch.Size([1, 3])}).factors
    {'hidden': 3}

    :param index: LongTensor ``(blocks, count)``: unit ``u`` occupies the positions ``index[:, u]``; others stay. It is
        kept on the CPU.
    :param exponent: a sign or scale ``f`` of a unit multiplies these entries by ``f ** exponent``: 1 for what enters a
        unit (its rows and bias), -1 for what leaves it, 2 for a running variance, 0 for what no multiplier touches.
    :param buffer: whether the site is a buffer (running statistics), which guides and models needn't hold.
    :param epsilon: if given, a stored value ``v`` becomes ``f ** exponent * (v + epsilon) - epsilon``, which is exact
        for the running variances of batch normalisation.
    :param span: how many axes, from ``dim`` on, count as one that is flattened: input channels of group ``g`` of a
        grouped convolution occupy columns (axis 1) of the rows (axis 0) of that group only.
    """

    site: str
    dim: int
    index: Tensor
    exponent: int = 0
    buffer: bool = False
    epsilon: float | None = None
    span: int = 1

    def __post_init__(self) -> None:
        index = arguments.tensor("index", self.index)
        if index.dtype != torch.long or index.dim() != 2:
            raise ValueError(f"index is {index.dtype} {tuple(index.shape)}; it must be a LongTensor (blocks, count)")
        if index.is_inference() or index.device.type != "cpu":  # groups outlive the mode that they are made in
            with torch.inference_mode(False):
                object.__setattr__(self, "index", index.cpu().clone())

    def __str__(self) -> str:
        dims = ", ".join(map(str, range(self.dim, self.dim + self.span)))
        return f"{self.site}[{dims}]" + (f"^{self.exponent}" if self.exponent else "")

    def touched(self, moves: frozenset[Move]) -> bool:
        """True if moves of the units change what lies along the axis."""
        multiplied = bool(self.exponent) if "scale" in moves else "flip" in moves and bool(self.exponent % 2)
        return multiplied or "permute" in moves or "shift" in moves

    def length(self, site_shapes: Mapping[str, torch.Size]) -> int:
        """The number of positions along the axis; those along all of its axes, if it spans several."""
        return math.prod(site_shapes[self.site][self.dim : self.dim + self.span])

    def fills(self, length: int) -> bool:
        """True if unit ``i`` simply is position ``i`` of an axis of that length, and nothing else lies there."""
        return self.index.shape[1] == int(length) and self._in_order

    @functools.cached_property
    def _in_order(self) -> bool:
        blocks, count = self.index.shape
        return blocks == 1 and torch.equal(self.index[0], torch.arange(count, device=self.index.device))


@dataclass(frozen=True, eq=False)
class Units:
    """A named set of interchangeable things: hidden units, heads, mixture components, factors.

    Units may lie inside others: the rows of every attention head are ``Units("rows", d, parent="heads", copies=H)``,
    and row ``i`` of head ``c`` has the number ``c * d + i`` in the indices of the axes.

    >>> rows = ps.Axis("w", 0, torch.arange(3)[None])
    >>> units = ps.Units("hidden", 3, (rows,))
    >>> ps.Group([units], {"w": torch.Size([3, 2])}).order()
    6

    :param size: the number of units in one copy.
    :param parent: the units inside which these lie, if any.
    :param copies: the number of the parent's units; without a parent, of copies that move independently.
    :param moves: what the units may do: exchange places within their copy (``"permute"``), flip their sign
        (``"flip"``), be multiplied by a positive number (``"scale"``), be shifted by a constant (``"shift"``).
    """

    name: str
    size: int
    axes: tuple[Axis, ...] = ()
    parent: str | None = None
    copies: int = 1
    moves: frozenset[Move] = frozenset({"permute"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(arguments.listed("axes", self.axes, Axis, "Axis objects")))
        object.__setattr__(self, "moves", moves_of("moves", self.moves) if self.moves else frozenset())
        for axis in self.axes:
            if axis.index.shape[1] != self.count:
                raise ValueError(
                    f"the index of {self.name!r} on {axis} has shape {tuple(axis.index.shape)}; it must be "
                    f"(blocks, {self.count}), one column for each unit"
                )

    @property
    def number(self) -> str:
        """Their number in words: ``3``, or ``2 x 3`` for three in each of two copies."""
        return str(self.size) if self.copies == 1 else f"{self.copies} x {self.size}"

    @property
    def count(self) -> int:
        """The number of units in all copies together."""
        return self.copies * self.size

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one element's numbers, one for each unit: ``(size,)``, or ``(copies, size)``."""
        return (self.size,) if self.copies == 1 else (self.copies, self.size)


def moves_of(name: str, value: str | Iterable[str]) -> frozenset[Move]:
    """One move, or several, as a set: at least one."""
    moves = [value] if isinstance(value, str) else list(value)
    if not moves or not set(moves) <= set(MOVES):
        raise ValueError(f"{name} is {value!r}; it must hold one or several of {list(MOVES)}")
    return frozenset(moves)  # type: ignore[arg-type]


# several sets of units ------------------------------------------------------------------------------------------------


def outer_first(units: Sequence[Units]) -> dict[str, Units]:
    """Units by name, in the given order, but each after its parent."""
    named: dict[str | None, Units] = {one.name: one for one in units}
    ordered: dict[str, Units] = {}
    if len(named) < len(units):
        raise ValueError(f"two sets of units have one name: {[one.name for one in units]}; each needs its own")
    for one in units:
        line = [one]
        while (name := line[-1].parent) is not None:
            if name not in named or named[name].count != line[-1].copies or named[name] in line:
                raise ValueError(
                    f"the units {line[-1].name!r} lie in {name!r}, in {line[-1].copies} copies; there must be such "
                    "units, one copy in each, and none may lie inside themselves"
                )
            line.append(named[name])
        ordered |= {outer.name: outer for outer in reversed(line)}
    return ordered


def pruned(units: Sequence[Units]) -> list[Units]:
    """Units that do something, with the axes that it touches, and those that others lie inside, in the given order.

    Inside what nothing permutes there is no parent.
    """
    carried: set[str | None] = set()
    for one in units:
        carried |= {one.name} if "permute" in one.moves or one.parent in carried else set()
    kept: list[Units] = []
    carriers: set[str | None] = set()
    for one in reversed(units):
        axes = one.axes if one.name in carriers else tuple(axis for axis in one.axes if axis.touched(one.moves))
        if axes or one.name in carriers:
            kept.append(replace(one, axes=axes, parent=one.parent if one.parent in carried else None))
            carriers.add(kept[-1].parent)
    return kept[::-1]


def table(units: Mapping[str, Units]) -> list[str]:
    """Lines with aligned columns; units that lie inside others stand below them, indented."""
    rows = [("units", "number", "moves", "axes")]

    def add(parent: str | None, indent: str) -> None:
        for one in (own for own in units.values() if own.parent == parent):
            axes = list(map(str, one.axes[:LISTED])) + [f"... {len(one.axes) - LISTED} more"] * bool(one.axes[LISTED:])
            rows.append((indent + one.name, one.number, ", ".join(m for m in MOVES if m in one.moves), ", ".join(axes)))
            add(one.name, indent + "  ")

    add(None, "")
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]


# entries along axes ---------------------------------------------------------------------------------------------------


def rows(value: Tensor, axis: Axis, site_dims: int) -> Tensor:
    """All entries of each unit along one axis.

    :param value: a site in the group's view, ``batch_shape + site_shape``.
    :param axis: an axis of the view.
    :param site_dims: the number of the viewed site's axes.
    :return: ``batch_shape + (count, entries)``; a view of ``value`` if unit ``i`` is position ``i``.
    """
    batch = value.dim() - site_dims
    if not axis.fills(value.shape[batch + axis.dim]):
        value = value.index_select(batch + axis.dim, axis.index.reshape(-1).to(value.device))
    along = value.movedim(batch + axis.dim, batch)
    along = along.flatten(batch + 1) if site_dims > 1 else along.unsqueeze(-1)
    blocks, count = axis.index.shape
    return along if blocks == 1 else along.unflatten(-2, (blocks, count)).transpose(-3, -2).flatten(-2)


def along_axis(vector: Tensor, dim: int, site_dims: int) -> Tensor:
    """``batch + (n,)`` -> ``batch + (1, .., n, .., 1)``, lying along axis ``dim`` of a site of ``site_dims`` axes."""
    return vector.reshape(*vector.shape[:-1], *([1] * dim), vector.shape[-1], *([1] * (site_dims - 1 - dim)))


def laid_out(numbers: Tensor, axis: Axis, length: int, elsewhere: float) -> Tensor:
    """Numbers of units, ``batch + (count,)``, at the positions of an axis, ``batch + (length,)``."""
    if axis.fills(length):
        return numbers
    full = numbers.new_full((*numbers.shape[:-1], length), elsewhere)
    full[..., axis.index.to(numbers.device)] = numbers.unsqueeze(-2)
    return full


def permute_axes(value: Tensor, indices: Mapping[int, Tensor], site_dims: int) -> Tensor:
    """Permute axes of ``batch + site_shape``, each by ``batch_p + (length,)``; batch shapes broadcast."""
    batch, site = value.shape[: value.dim() - site_dims], value.shape[value.dim() - site_dims :]
    several = [index.shape[:-1] for index in indices.values() if index.shape[:-1].numel() > 1]
    if len(indices) > 1 and any(shape != batch for shape in several):
        # Elements that meet several values: one gather with flat indices, which are computed once for an element.
        flat = torch.zeros((), dtype=torch.long, device=value.device)
        for dim, length in enumerate(site):
            index = indices.get(dim, torch.arange(length, device=value.device))
            flat = flat + along_axis(index * math.prod(site[dim + 1 :]), dim, site_dims)
        return permute_axes(value.flatten(len(batch)), {0: flat.flatten(-site_dims)}, 1).unflatten(-1, site)
    for dim, index in indices.items():
        own, rest = value.shape[: value.dim() - site_dims], site[dim + 1 :]
        if index.shape[:-1].numel() == 1 and index.dim() <= len(own) + 1:
            value = value.index_select(dim - site_dims, index.reshape(-1))
        elif dim == 0 and rest:  # whole rows, which are copied many times as fast as their entries one by one
            chosen = index + site[0] * torch.arange(own.numel(), device=value.device).reshape(*own, 1)
            value = value.reshape(-1, *rest).index_select(0, chosen.flatten()).reshape(*chosen.shape, *rest)
        else:
            full = (*torch.broadcast_shapes(own, index.shape[:-1]), *site)
            value = value.expand(full).gather(dim - site_dims, along_axis(index, dim, site_dims).expand(full))
    return value
