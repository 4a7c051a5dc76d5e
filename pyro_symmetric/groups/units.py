r"""Units: named sets of interchangeable things, the axes of sites along which they lie; and elements, which move them.

An element :math:`g = p\,m\,t` acts by its shifts ``t``, then its multipliers ``m`` (signs times scales), then its
permutations ``p``:

.. math:: (t \cdot w)_i = w_i + t_i, \qquad (m \cdot w)_i = m_i^{\,e}\, w_i, \qquad (p \cdot w)_i = w_{p(i)} .

All units are numbered through, and of each move an element holds one tensor, ``batch_shape + (units,)``. The image of a
unit is where it comes from, with the moves of all that it lies inside. So permutations of a product are one gather and
those of an inverse one argsort, :math:`(p r)(i) = r(p(i))`; they carry multipliers into multipliers,
:math:`p^{-1} m\, p = m'` with :math:`m'_i = m_{p^{-1}(i)}`. Elements are unique but for signs: flipping all rows of a
matrix flips all of its columns, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import as_tensor
from pyro_symmetric.weights import Weights

if TYPE_CHECKING:
    from pyro_symmetric.groups.group import Group

Move = Literal["permute", "flip", "scale", "shift"]
MOVES: tuple[Move, ...] = get_args(Move)
ByName = dict[str, Tensor]  # name of the units -> numbers
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


class Element:
    """A batch of elements of a :class:`~pyro_symmetric.groups.group.Group`, whose methods build them.

    ``g(weights)`` acts, ``(g @ h)(w) == g(h(w))``, ``g.inverse()`` inverts; batch shapes broadcast.

    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> g = group.element({"unit": torch.tensor([2, 0, 1])})
    >>> g({"w": torch.tensor([10.0, 20.0, 30.0])})
    {'w': tensor([30., 10., 20.])}
    >>> isinstance(g, ps.groups.Element), (g @ g.inverse()).equal(group.identity())
    (True, True)

    :param group: the group; the other arguments are trusted. Units that are left out stay, others' are passed over.
    :param permutations: name of the units -> LongTensor ``batch_shape + units.shape``: unit ``i`` of a copy receives
        what unit ``permutations[..., i]`` of that copy had, before what they lie inside moves.
    :param signs: name -> 1 and -1.
    :param log_scales: name -> logarithms of multipliers.
    :param shifts: name -> constants that are added.
    :param batch_shape: of the batch, if it is larger than what these tell.
    :ivar numbers: move that the group has -> the numbers of all units, ``batch_shape + (units,)``.
    """

    def __init__(
        self,
        group: Group,
        permutations: Mapping[str, Tensor] | None = None,
        signs: Mapping[str, Tensor] | None = None,
        log_scales: Mapping[str, Tensor] | None = None,
        shifts: Mapping[str, Tensor] | None = None,
        batch_shape: Sequence[int] = (),
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.group, given = group, {}
        for move, part in zip(MOVES, (permutations, signs, log_scales, shifts), strict=True):
            given[move] = {name: part[name] for name in group.names(move) if part and name in part}
        known = [(group[name], value) for part in given.values() for name, value in part.items()]
        device = device or (known[0][1].device if known else torch.device("cpu"))
        dtype = dtype or next((v.dtype for _, v in known if v.is_floating_point()), torch.get_default_dtype())
        shapes = (value.shape[: value.dim() - len(one.shape)] for one, value in known)
        self.batch_shape = torch.Size(np.broadcast_shapes(tuple(batch_shape), *shapes))  # faster than torch's
        self.numbers: dict[Move, Tensor] = {}
        for move in (move for move in MOVES if group.names(move)):
            pieces = []
            for name, one in group.units.items():
                value = given[move].get(name)
                if value is None and move == "permute":
                    value = torch.arange(one.size, device=device).expand(one.shape)
                elif value is None:
                    value = torch.full(one.shape, float(move == "flip"), device=device, dtype=dtype)
                pieces.append(value.expand(*self.batch_shape, *one.shape).flatten(len(self.batch_shape)))
            self.numbers[move] = torch.cat(pieces, -1)
        if "permute" in self.numbers:
            steps = images = self.numbers["permute"] + group.nesting[0].to(device)
            for _ in range(group.depth):  # each time one level further inside moves along
                images = steps.gather(-1, _carried(group, images))
            self.numbers["permute"] = images

    def changed(self, change: Callable[[Move, Tensor], Tensor], batch_shape: Sequence[int]) -> Element:
        """An element of the same group whose numbers are these, changed move by move."""
        element = Element.__new__(Element)
        element.group, element.batch_shape = self.group, torch.Size(batch_shape)
        element.numbers = {move: change(move, value) for move, value in self.numbers.items()}
        return element

    # its numbers ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def steps(self) -> Tensor:
        """Images as if what units lie inside stayed, counted through all copies: ``batch_shape + (units,)``."""
        images = self.numbers["permute"]
        return images.gather(-1, _carried(self.group, images).argsort(-1)) if self.group.depth else images

    @property
    def permutations(self) -> ByName:
        """Name of the units -> images within each copy, ``batch_shape + units.shape``."""
        return self._by_name("permute")

    @property
    def signs(self) -> ByName:
        """Name of the units -> 1 and -1, likewise."""
        return self._by_name("flip")

    @property
    def log_scales(self) -> ByName:
        """Name of the units -> logarithms of multipliers, likewise."""
        return self._by_name("scale")

    @property
    def shifts(self) -> ByName:
        """Name of the units -> constants that are added, likewise."""
        return self._by_name("shift")

    @property
    def parts(self) -> tuple[ByName, ByName, ByName, ByName]:
        """Permutations, signs, log-scales and shifts."""
        return self.permutations, self.signs, self.log_scales, self.shifts

    def _by_name(self, move: Move) -> ByName:
        if move not in self.numbers:
            return {}
        numbers = self.steps - self.group.nesting[0].to(self.device) if move == "permute" else self.numbers[move]
        return self.group.by_name(numbers, move)

    def __getitem__(self, name: str) -> Tensor:
        """The permutation of some units within each copy, ``batch_shape + units.shape``."""
        return self.permutations[name]

    def images(self, name: str) -> Tensor:
        """The place that each unit, counted through all copies, comes from: LongTensor ``batch_shape + (count,)``."""
        at = self.group.slots[name]
        if "permute" in self.numbers:
            return self.numbers["permute"][..., at] - at.start
        return torch.arange(self.group[name].count, device=self.device).expand(*self.batch_shape, -1)

    def __repr__(self) -> str:
        sizes = [f"{name}: {self.group[name].number}" for name in self.group.factors]
        return f"Element(batch_shape={tuple(self.batch_shape)}, {', '.join(sizes) or 'trivial'})"

    @property
    def device(self) -> torch.device | None:
        """The device of the numbers; None if there are none."""
        return next((value.device for value in self.numbers.values()), None)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Element:
        """The same elements on another device; signs, scales and shifts in another precision."""
        arguments.dtype("dtype", dtype)
        return self.changed(
            lambda move, value: value.to(device=device, dtype=None if move == "permute" else dtype), self.batch_shape
        )

    def select(self, index: int | slice | Tensor | tuple[Any, ...]) -> Element:
        """Index the batch: ``g.select(0)`` is the first element. An index on another device is moved."""
        device, given = self.device or torch.device("cpu"), index if isinstance(index, tuple) else (index,)
        here = tuple(part.to(device) if isinstance(part, Tensor) else part for part in given)
        shape = torch.empty(self.batch_shape, device=device)[here].shape
        return self.changed(lambda _, value: value[here], shape)

    def expand(self, batch_shape: Sequence[int]) -> Element:
        """The same elements, repeated to a larger batch."""
        return self.changed(lambda _, value: value.expand(*batch_shape, -1), batch_shape)

    def within(self, group: Group) -> Element:
        """The element of another group that has the same numbers for the units of both, and leaves all others."""
        return Element(group, *self.parts, self.batch_shape, device=self.device)

    def equal(self, other: Element) -> bool:
        """True if both are the same elements, bit by bit."""
        arguments.instance("other", other, Element, "an Element")
        same = self.batch_shape == other.batch_shape and self.group.slots == other.group.slots
        return (same and self.numbers.keys() == other.numbers.keys()) and all(
            torch.equal(value, other.numbers[move].to(value)) for move, value in self.numbers.items()
        )

    # algebra --------------------------------------------------------------------------------------------------------

    def inverse(self) -> Element:
        """The element with ``g.inverse() @ g`` the identity."""
        images = self.numbers.get("permute")

        def inverted(move: Move, value: Tensor) -> Tensor:
            if move == "permute":
                return value.argsort(-1)
            value = value.reciprocal() if move == "flip" else -value
            return value if images is None or move == "shift" else value.gather(-1, images)

        return self.changed(inverted, self.batch_shape)

    def __matmul__(self, other: Element) -> Element:
        if not isinstance(other, Element):
            return NotImplemented
        if self.group is not other.group and self.group != other.group:
            raise ValueError("only elements of one group compose; these are of two different groups, see within(group)")
        shape = torch.broadcast_shapes(self.batch_shape, other.batch_shape)
        mine, theirs = self.expand(shape), other.expand(shape).to(self.device)
        back = theirs.numbers["permute"].argsort(-1) if "permute" in theirs.numbers else None

        def product(move: Move, own: Tensor) -> Tensor:
            if move == "permute":
                return theirs.numbers[move].gather(-1, own)
            if move != "shift" and back is not None:
                own = own.gather(-1, back)
            return own * theirs.numbers[move] if move == "flip" else own + theirs.numbers[move]

        return mine.changed(product, shape)

    # action ---------------------------------------------------------------------------------------------------------

    def __call__(self, weights: Mapping[str, Tensor]) -> Weights:
        """Act on weights; sites that the group doesn't move are expanded to the same batch shape, dtypes stay.

        :raises ValueError: if sites are missing, running statistics included, or don't fit; or another network's.
        """
        own = acted_shape(self.group, weights)
        shape = torch.broadcast_shapes(self.batch_shape, own)
        return {
            site: v.expand((*shape, *weights[site].shape[len(own) :])) for site, v in self.on_sites(weights).items()
        }

    def on_sites(self, weights: Mapping[str, Tensor]) -> Weights:
        """Act on the sites that are there, whatever is missing; those that nothing moves keep their batch shape."""
        return {site: self.on_site(site, value) for site, value in weights.items()}

    def on_site(self, site: str, value: Tensor, site_dims: int | None = None) -> Tensor:
        """Act on one site alone; batch shapes broadcast. Large networks are moved so, without a second copy.

        :param site_dims: the number of trailing axes that are the site's, if its shape isn't that which the group knows
            (unconstrained coordinates may have fewer entries along axes that nothing moves).
        """
        members = self.group.members(site)
        if not members:
            return value
        if site_dims is None:
            dims = len(self.group.view_shapes[site])
            moved = self.on_site(site, self.group.view(site, value), dims)
            return moved.reshape(*moved.shape[: moved.dim() - dims], *self.group.site_shapes[site])
        for dim, own in members.items():
            for at, axis in ((self.group.slots[name], axis) for name, axis in own if "shift" in self.group[name].moves):
                shift = laid_out(self.numbers["shift"][..., at].to(value), axis, self.group.view_shapes[site][dim], 0.0)
                value = value + along_axis(shift, dim, site_dims)
        if "flip" in self.numbers or "scale" in self.numbers:
            epsilon = self.group.epsilon(site)
            value = value + epsilon if epsilon else value
            for dim in members:
                value = value * along_axis(self._axis_multiplier(site, dim, value.dtype).to(value), dim, site_dims)
            value = value - epsilon if epsilon else value
        permuted = (dim for dim, own in members.items() if any("permute" in self.group[name].moves for name, _ in own))
        return permute_axes(value, {dim: self._axis_index(site, dim).to(value.device) for dim in permuted}, site_dims)

    def _axis_index(self, site: str, dim: int) -> Tensor:
        """LongTensor ``batch_shape + (length,)``: position ``i`` of this axis of the view receives what was there."""
        length, full = self.group.view_shapes[site][dim], None
        for name, axis in reversed(self.group.members(site)[dim]):  # outer units first
            if "permute" not in self.group[name].moves:
                continue
            at = self.group.slots[name]
            step = self.steps[..., at] - at.start
            if not axis.fills(length):
                places = axis.index.T.to(step.device)  # of each unit
                came = places[step].flatten(-2)
                every = torch.arange(length, device=step.device).repeat(*self.batch_shape, 1)
                step = every.scatter_(-1, places.reshape(-1).expand(came.shape), came)
            full = step if full is None else step.gather(-1, full)
        return torch.arange(length, device=self.device).expand(*self.batch_shape, -1) if full is None else full

    def _axis_multiplier(self, site: str, dim: int, dtype: torch.dtype) -> Tensor:
        """The factor of each position before it is permuted, ``batch_shape + (length,)``, in this precision or more."""
        length = self.group.view_shapes[site][dim]
        factor = torch.ones(*self.batch_shape, length, dtype=dtype, device=self.device)
        for name, axis in self.group.members(site)[dim]:
            moves, at = self.group[name].moves, self.group.slots[name]
            if axis.exponent and "scale" in moves:
                logs = laid_out(self.numbers["scale"][..., at], axis, length, 0.0)
                factor = factor * (axis.exponent * logs.to(torch.promote_types(logs.dtype, dtype))).exp()
            if axis.exponent % 2 and "flip" in moves:
                factor = factor * laid_out(self.numbers["flip"][..., at], axis, length, 1.0)
        return factor


def acted_shape(group: Group, weights: Mapping[str, Tensor]) -> torch.Size:
    """The batch shape of weights that an element is to move, which must be its own network's, and all of them."""
    arguments.weights("weights", weights)
    require_buffers(weights, group.buffers)
    group.require_own(weights)
    return group.batch_shape(weights)


def require_buffers(weights: Mapping[str, Any], buffers: Sequence[str], name: str = "weights") -> None:
    """:raises ValueError: if buffers that a group moves aren't there, so that moving the rest changes predictions."""
    if missing := [site for site in buffers if site not in weights]:
        raise ValueError(
            f"{name} holds no running statistics {missing}, which the symmetry moves along with the parameters. If "
            "they stay in the network as it is (a posterior over parameters alone), take symmetry.holding(net), which "
            "leaves them as they are; if every set of weights has its own, add them"
        )


def checked(argument: str, group: Group, move: Move, given: Mapping[str, Any] | None) -> ByName:
    """A user's numbers for one move, as tensors that are what they must be."""
    found = {}
    for name, value in (given or {}).items():
        if move not in group[name].moves:
            raise ValueError(f"{argument} holds {name!r}; only {list(group.names(move))} admit the move {move!r}")
        shape, numbers = group[name].shape, as_tensor(value)
        if move == "permute":
            wanted = f"rows, each a permutation of 0 .. {shape[-1] - 1}"
            right = numbers.sort(-1).values == torch.arange(numbers.shape[-1], device=numbers.device)
            numbers = numbers.long()
        else:
            wanted = "1 and -1" if move == "flip" else "finite numbers"
            right = numbers.abs() == 1 if move == "flip" else torch.isfinite(numbers)
            numbers = numbers if numbers.is_floating_point() else numbers.to(torch.get_default_dtype())
        if numbers.shape[max(0, numbers.dim() - len(shape)) :] != shape or not bool(right.all()):
            raise ValueError(f"{argument}[{name!r}] is {numbers}; its shape must end in {shape}, with {wanted}")
        found[name] = numbers
    return found


def _carried(group: Group, images: Tensor) -> Tensor:
    """The place that each unit comes from if only what it lies inside moves, as images tell."""
    _, parent, size = group.nesting.to(images.device)
    return torch.arange(group.size, device=images.device) + size * (images[..., parent] - parent)


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
