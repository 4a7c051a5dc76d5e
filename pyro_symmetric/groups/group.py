r"""The group that moves of units generate.

Permutations of a set of ``n`` units form the symmetric group :math:`S_n`; signs
multiply units by -1 (with permutations
:math:`n!\,2^n` elements), scales by positive numbers, shifts add a constant, rotations
mix units by all of :math:`O(n)`, which holds permutations and signs. Units inside
others (rows inside attention heads) move first: with :math:`d` units inside each
of :math:`H` they form the wreath product :math:`S_d \wr S_H`, of order :math:`(d!)^H
H!`. Wreath products nest to any depth.

Source: Ainsworth, Hayase & Srinivasa 2023, arXiv 2209.04836 (permutations); Laurent,
Aldea & Franchi 2024, arXiv 2310.08287, section 3 (scales, shifts); Wiese et al. 2023,
arXiv 2304.02902 (signs).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import Device, Json, Names, described
from pyro_symmetric.groups.axes import Axis
from pyro_symmetric.groups.elements import Element, checked
from pyro_symmetric.groups.moves import COMPACT, FINITE, MOVES, Move
from pyro_symmetric.groups.order import Effective, effective_moves
from pyro_symmetric.groups.units import Units, moves_of, outer_first, pruned, table
from pyro_symmetric.weights import (
    ByName,
    Shapes,
    Tensors,
    Weights,
    batch_shape,
    drop_names,
    is_bias,
    keep_names,
    map_values,
    require_same_network,
    require_sites,
    shapes_of,
)

ENUMERATION_LIMIT = 1_000_000
Members = list[tuple[str, Axis]]
# site -> first and last (excluded) of the axes that are flattened at least
Runs = Mapping[str, tuple[int, int]]


class Nesting(NamedTuple):
    """The copy that each unit of a group is part of, ``(size,)`` each.

    :param first: the first unit of the copy.
    :param parent: the unit that the copy lies in; an outermost unit itself.
    :param copy_size: the number of units in the copy; 0 of outermost units.
    """

    first: Tensor
    parent: Tensor
    copy_size: Tensor


class Group:
    """Units with their moves, and the axes of sites along which they lie.

    If an :class:`Axis` spans several axes of its site, these are flattened in the
    *view* of the site (:meth:`view`), to whose axes :meth:`members` and :meth:`axes`
    refer.

    >>> weights = {"locs": torch.zeros(3, 2), "weights": torch.ones(3)}
    >>> group = ps.Group.declare(
    ...     {"locs": ("component", None), "weights": ("component",)}, weights
    ... )
    >>> group.factors, group.sample((4,))(weights)["locs"].shape
    ({'component': 3}, torch.Size([4, 3, 2]))

    :param units: the units, in the order in which they are visited, but each after its
        parent.
    :param site_shapes: shape of every site of the model, touched or not (without batch
        dimensions).
    :param of_network: whether the sites are all parameters of a network, so that
        weights with others are another's.
    :ivar factors: name of the units that move -> their number, in one copy if they lie
        inside others.
    :ivar moves: all moves that some units admit.
    :ivar view_shapes: shapes of the sites in the view.
    :ivar slots: name of the units -> their slice of all units, which are numbered
        consecutively; ``size``: of all.
    :ivar depth: the levels of nesting below the outermost units; ``roots``: the
        outermost units.
    :ivar sites: the sites along which units lie: ``buffers`` (running statistics) and
        ``required_sites``.
    :raises ValueError: if two sets share a name, an axis doesn't fit its site, units
        don't lie inside their parent's, or moves generate more than the elements that
        the units describe.
    """

    def __init__(
        self,
        units: Iterable[Units],
        site_shapes: Shapes,
        of_network: bool = False,
    ):
        shapes = shapes_of(site_shapes, "site_shapes")
        listed = arguments.listed("units", units, Units, "Units, each with its axes")
        _check_axes(listed, shapes)
        self._build(listed, shapes, of_network, {})
        _check_group(self)

    def _build(
        self,
        units: Sequence[Units],
        shapes: Shapes,
        of_network: bool,
        runs: Runs,
    ) -> Group:
        self.site_shapes = dict(shapes)
        self.of_network = of_network
        self.units = outer_first(units)
        self._runs = dict(runs)
        self._index_units()
        self._view_sites()
        self._index_sites()
        self._restrictions: dict[frozenset[Move], Group] = {}
        # of numbers: hashes of names differ between processes
        self._hash = hash(tuple(self.factors.values()))
        return self

    def _index_units(self) -> None:
        """Number all units, and list those of each move."""
        self.size = 0
        self.slots = dict[str, slice]()
        self.factors = dict[str, int]()
        by_move: dict[Move, list[str]] = {move: [] for move in MOVES}
        for name, unit_set in self.units.items():
            start = self.size
            self.size += unit_set.count
            self.slots[name] = slice(start, self.size)
            if unit_set.moves:
                self.factors[name] = unit_set.size
            for move in unit_set.moves:
                by_move[move].append(name)
        self._by_move = map_values(tuple, by_move)
        self.moves = frozenset(move for move, names in by_move.items() if names)
        self.roots = tuple(name for name in self.units if not self.ancestors(name))
        self.depth = max((len(self.ancestors(name)) for name in self.units), default=0)

    def _view_sites(self) -> None:
        """Find the axes that are flattened in the view, and shapes there."""
        for unit_set in self.units.values():
            for axis in unit_set.axes:
                if axis.span != 1:
                    first, last = self._runs.get(axis.site, (axis.dim, 0))
                    last = max(last, axis.dim + axis.span)
                    self._runs[axis.site] = min(first, axis.dim), last
        self.view_shapes = dict(self.site_shapes)
        for site, (first, last) in self._runs.items():
            shape = self.site_shapes[site]
            length = math.prod(shape[first:last])
            self.view_shapes[site] = torch.Size([*shape[:first], length, *shape[last:]])

    def _index_sites(self) -> None:
        """List the axes of each set of units and, inner units first, of each site."""
        self._axes = map_values(
            lambda unit_set: tuple(map(self._viewed, unit_set.axes)), self.units
        )
        self._members: dict[str, dict[int, Members]] = {}
        for name in sorted(self.units, key=lambda name: -len(self.ancestors(name))):
            for axis in self._axes[name]:
                of_site = self._members.setdefault(axis.site, {})
                of_site.setdefault(axis.dim, []).append((name, axis))
        self.sites = tuple(filter(self._members.__contains__, self.site_shapes))
        buffers = []
        for site in self.sites:
            if all(axis.buffer for axis in self._along(site)):
                buffers.append(site)
        self.buffers = tuple(buffers)
        self.required_sites = tuple(site for site in self.sites if site not in buffers)

    @classmethod
    def declare(
        cls,
        axes: Mapping[str, Sequence[str | None]],
        example_weights: Mapping[str, Tensor | torch.Size],
        moves: str | Iterable[str] | Mapping[str, str | Iterable[str]] = "permute",
        even: Iterable[str] = (),
    ) -> Group:
        """Declare the exchangeable axes of any Pyro model's sites.

        The factors of a factor analysis can be permuted and flipped; their variances
        are permuted only:

        >>> group = ps.Group.declare(
        ...     {
        ...         "loadings": (None, "factor"),
        ...         "scores": ("factor", None),
        ...         "variances": ("factor",),
        ...     },
        ...     {
        ...         "loadings": torch.zeros(5, 2),
        ...         "scores": torch.zeros(2, 20),
        ...         "variances": torch.ones(2),
        ...     },
        ...     moves=("permute", "flip"),
        ...     even=["variances"],
        ... )
        >>> group.order()
        8

        :param axes: site -> for each of its axes, the name of the units that lie along
            it, or ``None``.
        :param example_weights: one example (or the shape) of every site of the model,
            without batch dimensions.
        :param moves: ``"permute"``, ``"flip"``, or both, or ``"rotate"``, which
            includes them; or, by the name of the units, what each may do.
        :param even: sites that no flip changes.
        """
        shapes = shapes_of(example_weights)
        even = arguments.listed("even", even, str, "sites")
        places: dict[str, list[tuple[str, int]]] = {}
        for site, names in axes.items():
            if site not in shapes:
                raise ValueError(
                    f"axes names {site!r}; example_weights holds {list(shapes)}"
                )
            fits = isinstance(names, list | tuple) and len(names) == len(shapes[site])
            if not fits or not all(isinstance(name, str | None) for name in names):
                raise ValueError(
                    f"axes[{site!r}] is {names!r}; it must name units or None for each "
                    "axis of that site, whose shape "
                    f"is {shapes[site]}"
                )
            for dim, name in enumerate(names):
                if name is not None:
                    places.setdefault(name, []).append((site, dim))
        by_name = moves if isinstance(moves, Mapping) else dict.fromkeys(places, moves)
        if set(by_name) != set(places) or not set(even) <= set(axes):
            raise ValueError(
                f"moves names {list(by_name)}, even {even}; axes holds {list(places)} "
                f"in {list(axes)}"
            )
        units = []
        for name, where in places.items():
            lengths = {shapes[site][dim] for site, dim in where}
            allowed = moves_of("moves", by_name[name])
            if len(lengths) > 1 or not allowed <= set(COMPACT):
                raise ValueError(
                    f"{name!r} lies along the axes {where} of lengths "
                    f"{sorted(lengths)}, and its moves are "
                    f"{sorted(allowed)}; lengths must be equal, and declared units may "
                    "only permute and flip, or rotate"
                )
            length = lengths.pop()
            index = torch.arange(length, device="cpu")[None]
            signed = bool(allowed & {"flip", "rotate"})
            if "rotate" in allowed and (fixed := set(dict(where)).intersection(even)):
                raise ValueError(
                    f"{name!r} rotates, but even names {sorted(fixed)}: no rotation "
                    "keeps the signs of a site; let the units permute and flip instead"
                )
            touched = []
            for site, dim in where:
                axis = Axis(site, dim, index, int(signed and site not in even))
                if axis.touched(allowed):
                    touched.append(axis)
            units.append(Units(name, length, tuple(touched), moves=allowed))
        return cls(units, shapes)

    def order(self) -> int:
        """Return the number of actions of permutations with signs.

        Elements that act alike count once: flipping all rows of a matrix flips all of
        its columns. Of rotations, the permutations and signs among them count;
        :attr:`dimension` counts the rest.
        """
        effective = self.effective
        order = int(2 ** len(effective.flipped))
        for name in effective.permuted:
            order *= math.factorial(self[name].size) ** self[name].copies
        return order

    def log_order(self) -> float:
        """Return the log of :meth:`order`, the number of equivalent modes of an
        invariant posterior.
        """
        effective = self.effective
        log_order = 0.0
        for name in effective.permuted:
            log_order += self[name].copies * math.lgamma(self[name].size + 1)
        return log_order + math.log(2.0) * len(effective.flipped)

    @property
    def dimension(self) -> int:
        """The number of real numbers on which scales, shifts and rotations depend; the
        dimension of an orbit, unless some of them act alike.
        """
        dimension = 0
        for unit_set in self.units.values():
            for move in unit_set.moves:
                dimension += MOVES[move].dimension(unit_set)
        return dimension

    @functools.cached_property
    def effective(self) -> Effective:
        """Permutations and signs of which no two act alike, and which act in all
        ways; of units that rotate, those of the finite part.
        """
        return self.finite.effective if self.names("rotate") else effective_moves(self)

    # its units, and where they lie ----------------------------------------------------

    def __getitem__(self, name: str) -> Units:
        if name not in self.units:
            raise ValueError(
                f"the group has no units {name!r}; it has {list(self.units)}"
            )
        return self.units[name]

    def names(self, move: Move) -> Names:
        """Return the names of the units that admit a move."""
        return self._by_move[move]

    def by_name(self, numbers: Tensor, move: Move) -> ByName:
        """Split numbers of all units, ``batch + (size,)``, into ``batch + units.shape``
        of those that admit a move; of rotations, into their matrices.
        """
        slots = self.number_slots(move)
        result = Weights()
        for name in self.names(move):
            shape = MOVES[move].shape(self[name])
            result[name] = numbers[..., slots[name]].unflatten(-1, shape)
        return result

    def number_slots(self, move: Move) -> dict[str, slice]:
        """Return the place of the numbers of each set of units among those of a move:
        ``slots``, or of rotations the slices of their entries.
        """
        if move != "rotate":
            return self.slots
        end = 0
        slots = {}
        for name, unit_set in MOVES[move].holders(self).items():
            start = end
            end = end + unit_set.count * unit_set.size
            slots[name] = slice(start, end)
        return slots

    def ancestors(self, name: str) -> Names:
        """Return the units around some units, the innermost first."""
        parent = self[name].parent
        return () if parent is None else (parent, *self.ancestors(parent))

    def family(self, name: str) -> Names:
        """Return some units and all inside them, outer ones first."""
        inside = [name]
        for child, unit_set in self.units.items():
            if unit_set.parent == name:
                inside += self.family(child)
        return tuple(inside)

    def axes(self, name: str) -> tuple[Axis, ...]:
        """Return the axes of some units in the view, in the order of
        ``group[name].axes``.
        """
        return self._axes[name]

    def members(self, site: str) -> dict[int, Members]:
        """Return (name, axis) for each axis of a viewed site along which units lie,
        inner units before outer ones.
        """
        return self._members.get(site, {})

    @property
    def weight_sites(self) -> Names:
        """The sites that are weights: no buffers, no biases by name, and of one axis
        only some.

        A vector is a weight if units multiply it with a negative exponent, or if its
        name ends in ``weight``.
        """
        sites = []
        for site, shape in self.site_shapes.items():
            outgoing = any(axis.exponent < 0 for axis in self._along(site))
            weight = len(shape) > 1 or outgoing or site.endswith("weight")
            if weight and not is_bias(site) and site not in self.buffers:
                sites.append(site)
        return tuple(sites)

    def epsilon(self, site: str) -> float:
        """Return the constant to add to a site before it is multiplied, and to subtract
        afterwards.
        """
        for axis in self._along(site):
            if axis.exponent and axis.epsilon is not None:
                return axis.epsilon
        return 0.0

    def view(self, site: str, value: Tensor) -> Tensor:
        """Flatten the spanned axes of a site, ``batch_shape + site_shape``."""
        if site not in self._runs:
            return value
        batch_shape = value.shape[: value.dim() - len(self.site_shapes[site])]
        return value.reshape(*batch_shape, *self.view_shapes[site])

    def viewed(self, weights: Tensors) -> Weights:
        """Apply :meth:`view` to all sites."""
        return {site: self.view(site, value) for site, value in weights.items()}

    def require_own(self, sites: Iterable[str], name: str = "weights") -> None:
        """Raise ``ValueError`` if a network's group lacks some of these parameters:
        they are another network's.
        """
        if self.of_network:
            require_same_network(sites, self.site_shapes, name)

    def batch_shape(self, weights: Tensors) -> torch.Size:
        """Return the batch shape of weights, checked against the sites' shapes; buffers
        may be missing.
        """
        require_sites(weights, self.required_sites)
        return batch_shape(weights, self.site_shapes)

    @functools.cached_property
    @torch.inference_mode(False)  # the cache outlives the mode it is built in
    def nesting(self) -> Nesting:
        """For each unit the copy that it is part of."""
        no_units = torch.zeros(3, 0, dtype=torch.long, device="cpu")
        columns = [no_units]
        for name, unit_set in self.units.items():
            number = torch.arange(unit_set.count, device="cpu")
            copies = number // unit_set.size
            start = self.slots[name].start
            parent = start + number
            size = torch.zeros_like(number)
            if unit_set.parent is not None:
                parent = self.slots[unit_set.parent].start + copies
                size += unit_set.size
            first = start + copies * unit_set.size
            columns.append(torch.stack([first, parent, size]))
        return Nesting(*torch.cat(columns, 1))

    def _along(self, site: str) -> list[Axis]:
        return [axis for members in self.members(site).values() for _, axis in members]

    def _viewed(self, axis: Axis) -> Axis:
        """Convert an axis to the view, where its units occupy all positions along the
        other flattened axes.
        """
        if axis.site not in self._runs:
            return axis
        if axis.span == 0:
            return replace(axis, span=1)
        start, end = self._runs[axis.site]
        if axis.dim < start:
            return axis
        if axis.dim >= end:
            return replace(axis, dim=axis.dim - (end - start - 1))
        shape = self.site_shapes[axis.site][start:end]
        first = axis.dim - start
        positions = torch.arange(shape.numel(), device=axis.index.device)
        positions = positions.reshape(*shape[:first], -1, *shape[first + axis.span :])
        positions = positions.movedim(first, 0)
        positions = positions.reshape(len(positions), -1)
        # (blocks, units, others) -> (blocks and others, units)
        index = positions[axis.index].movedim(-1, 1).flatten(0, 1)
        return replace(axis, dim=start, index=index.contiguous(), span=1)

    # restrictions ---------------------------------------------------------------------

    def restricted(self, *moves: str) -> Group:
        """Restrict to some moves; units that keep none, and axes that none touches, are
        dropped.
        """
        allowed = moves_of("moves", moves)
        if allowed >= self.moves:
            return self
        if allowed not in self._restrictions:
            units = [replace(u, moves=u.within(allowed)) for u in self.units.values()]
            self._restrictions[allowed] = self._rebuilt(
                pruned(units), self.site_shapes, self._runs
            )
        return self._restrictions[allowed]

    @property
    def permutations(self) -> Group:
        """The permutations alone."""
        return self.restricted("permute")

    @property
    def signs(self) -> Group:
        """The flips of signs alone."""
        return self.restricted("flip")

    @property
    def scalings(self) -> Group:
        """The positive scalings alone."""
        return self.restricted("scale")

    @property
    def shifts(self) -> Group:
        """The shifts alone."""
        return self.restricted("shift")

    @property
    def rotations(self) -> Group:
        """The rotations alone, without the moves of the units around them."""
        return self.restricted("rotate")

    @property
    def finite(self) -> Group:
        """Permutations and signs, over which a guide can be averaged; of units that
        rotate, those among their rotations.
        """
        return self.restricted(*FINITE)

    @property
    def compact(self) -> Group:
        """Permutations, signs and rotations. No proper prior is invariant under the
        others.
        """
        return self.restricted(*COMPACT)

    def without(
        self, names: Iterable[str], moves: str | Iterable[str] | None = None
    ) -> Group:
        """Drop units, or some of their moves; units inside them stay.

        Units that rotate, and shall not rotate, permute or flip, keep what else of that
        remains.
        """
        taken = frozenset(MOVES) if moves is None else moves_of("moves", moves)
        units = dict(self.units)
        for name in arguments.listed("names", names, str, "names of units"):
            units[name] = replace(self[name], moves=self[name].without(taken))
        return self._rebuilt(pruned([*units.values()]), self.site_shapes, self._runs)

    def only(self, names: Collection[str]) -> Group:
        """Drop all units but some."""
        return self.without(name for name in self.units if name not in names)

    def without_buffers(self, buffers: Collection[str] | None = None) -> Group:
        """Restrict the action to parameters; buffers (running statistics) stay.

        That changes the network's function, unless buffers are equal for all units: it
        serves to compare weights.

        :param buffers: the buffers to drop; by default all.
        """
        dropped = self.buffers if buffers is None else buffers
        units = [
            replace(u, axes=tuple(a for a in u.axes if a.site not in dropped))
            for u in self.units.values()
        ]
        shapes = drop_names(self.site_shapes, dropped)
        return self._rebuilt(
            pruned(units),
            shapes,
            keep_names(self._runs, shapes),
        )

    def renamed(self, rename: Callable[[str], str]) -> Group:
        """Rename the sites."""
        shapes = {rename(site): shape for site, shape in self.site_shapes.items()}
        if len(shapes) < len(self.site_shapes):
            raise ValueError("rename gives two sites the same name")
        units = [
            replace(u, axes=tuple(replace(a, site=rename(a.site)) for a in u.axes))
            for u in self.units.values()
        ]
        return self._rebuilt(
            units, shapes, {rename(site): run for site, run in self._runs.items()}
        )

    def _rebuilt(self, units: Sequence[Units], shapes: Shapes, runs: Runs) -> Group:
        """Build a group, in the same view, of units that were checked before."""
        return Group.__new__(Group)._build(units, shapes, self.of_network, runs)

    # elements -------------------------------------------------------------------------

    def identity(
        self,
        shape: Sequence[int] = (),
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> Element:
        """Return the neutral element, as a batch of a shape."""
        shape = arguments.shape("shape", shape)
        return Element(
            self,
            batch_shape=shape,
            device=device,
            dtype=arguments.dtype("dtype", dtype),
        )

    def element(
        self,
        permutations: Mapping[str, Any] | None = None,
        *,
        signs: Mapping[str, Any] | None = None,
        log_scales: Mapping[str, Any] | None = None,
        shifts: Mapping[str, Any] | None = None,
        rotations: Mapping[str, Any] | None = None,
    ) -> Element:
        """Build an element or a batch of elements, from numbers as
        :class:`~pyro_symmetric.groups.elements.Element` takes.

        Shifts act first, then signs and scales or rotations, then permutations.

        :raises ValueError: if units are unknown or don't admit the move, or numbers are
            invalid.
        """
        parts = (permutations, signs, log_scales, shifts, rotations)
        numbers = (
            checked(MOVES[move].argument, self, move, part)
            for move, part in zip(MOVES, parts, strict=True)
        )
        return Element(self, *numbers)

    def sample(
        self,
        shape: Sequence[int] = (),
        spread: float = 1.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> Element:
        """Sample independent elements: permutations, signs and rotations uniform,
        log-scales and shifts normal.

        :param spread: standard deviation of log-scales and shifts, on which no uniform
            distribution exists.
        :param device: of the generator, by default the CPU; elements act on weights on
            any device.
        """
        shape = tuple(arguments.shape("shape", shape))
        arguments.number("spread", spread, least=0, below=math.inf)
        real = arguments.dtype("dtype", dtype) or torch.get_default_dtype()
        options = {"device": device or torch.device("cpu"), "generator": generator}
        parts = []
        for move, kind in MOVES.items():
            drawn = {}
            for name in self.names(move):
                full = (*shape, *kind.shape(self[name]))
                drawn[name] = kind.draw(full, spread, real, **options)
            parts.append(drawn)
        return Element(self, *parts, batch_shape=shape)

    def enumerate(self) -> Element:
        """List permutations with signs, one for each action, as a batch of shape
        ``(order,)``, the identity first.

        :raises ValueError: if there are more than a million, or units rotate.
        """
        if self.names("rotate"):
            raise ValueError(
                f"the units {list(self.names('rotate'))} rotate, and rotations can't "
                "be listed; the group's .finite part holds their permutations and signs"
            )
        if self.log_order() > math.log(ENUMERATION_LIMIT) + 1e-9:
            raise ValueError(
                f"the group has exp({self.log_order():.1f}) elements; at most "
                f"{ENUMERATION_LIMIT} can be enumerated"
            )
        permuted = [self[name] for name in self.effective.permuted]
        flipped = torch.as_tensor(self.effective.flipped, device="cpu")
        order = self.order()
        sizes = list[int]()
        for unit_set in permuted:
            sizes += [math.factorial(unit_set.size)] * unit_set.copies
        sizes += [2] * len(flipped)
        numbers = torch.arange(order, device="cpu")
        digits = iter(torch.unravel_index(numbers, sizes) if sizes else ())
        permutations = {}
        for unit_set in permuted:
            orders = list(itertools.permutations(range(unit_set.size)))
            orders_of_copies = torch.tensor(orders, device="cpu")
            images = [orders_of_copies[next(digits)] for _ in range(unit_set.copies)]
            images_of_units = torch.stack(images, -2).reshape(-1, *unit_set.shape)
            permutations[unit_set.name] = images_of_units
        signs = torch.ones(order, self.size, device="cpu")
        for unit in flipped:
            signs[:, unit] = 1.0 - 2.0 * next(digits)
        flips = self.by_name(signs, "flip")
        return Element(self, permutations, flips, batch_shape=(order,))

    # equality and JSON ----------------------------------------------------------------

    def to_dict(self) -> Json:
        """Return the group as JSON; indices of units that fill an axis in order are
        ``None``.
        """

        def axis_data(axis: Axis) -> Json:
            data = {field.name: getattr(axis, field.name) for field in fields(axis)}
            fills = axis.fills(axis.length(self.site_shapes))
            return {**data, "index": None if fills else axis.index.tolist()}

        units = []
        for unit_set in self.units.values():
            axes = [*map(axis_data, unit_set.axes)]
            moves = sorted(unit_set.moves)
            units.append({**vars(unit_set), "axes": axes, "moves": moves})
        return {
            "site_shapes": map_values(list, self.site_shapes),
            "units": units,
            "of_network": self.of_network,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Group:
        """Build a group from :meth:`to_dict`."""
        shapes = map_values(torch.Size, data["site_shapes"])

        def axis_of(entries: Mapping[str, Any]) -> Axis:
            dim = entries["dim"]
            index = entries["index"]
            if index is None:
                length = math.prod(shapes[entries["site"]][dim : dim + entries["span"]])
                filling = torch.arange(length, device="cpu")[None]
                return Axis(**{**entries, "index": filling})
            return Axis(**{**entries, "index": torch.tensor(index, device="cpu")})

        units = []
        for entries in data["units"]:
            axes = [*map(axis_of, entries["axes"])]
            units.append(Units(**{**entries, "axes": axes}))
        return cls(units, shapes, data["of_network"])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Group) or self.factors != other.factors:
            return False
        data = self.to_dict()
        return data == {**other.to_dict(), "of_network": data["of_network"]}

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Group of log-order {self.log_order():.1f}\n{table(self.units)}"


# checks that moves form a group -------------------------------------------------------


class _Occupied(NamedTuple):
    """The positions that units occupy along an axis, ``(blocks, count)``, and the unit
    and block at each position.
    """

    units: Units
    power: int
    positions: Tensor
    unit: Tensor
    block: Tensor


def _check_axes(units: Iterable[Units], site_shapes: Shapes) -> None:
    """Check that each axis lies within its site, and that no two units of a set share a
    position.
    """
    for unit_set in units:
        for axis in unit_set.axes:
            shape = site_shapes.get(axis.site)
            index = axis.index
            if shape is None or axis.dim + axis.span > len(shape):
                raise ValueError(
                    f"the units {unit_set.name!r} lie along {axis}, but the known "
                    f"sites are {dict(site_shapes)}"
                )
            length = axis.length(site_shapes)
            outside = bool((index < 0).any() or (index >= length).any())
            if outside or index.unique().numel() != index.numel():
                raise ValueError(
                    f"the index of {unit_set.name!r} names a position of {axis} twice, "
                    f"or one outside: {index}"
                )


def _check_group(group: Group) -> None:
    """Check that the moves of all units form a group, in which every product has the
    form :math:`p\\,m\\,t`.
    """
    for name in group.names("rotate"):
        if inner := group.family(name)[1:]:
            raise ValueError(
                f"the units {name!r} rotate, but {list(inner)} lie inside them; units "
                "that rotate hold no others"
            )
    for site in group.sites:
        members = [*itertools.chain.from_iterable(group.members(site).values())]
        multiplied = [axis for _, axis in members if axis.exponent]
        if len(epsilons := {axis.epsilon for axis in multiplied}) > 1:
            raise ValueError(
                f"units multiply {site!r} with different epsilons, {epsilons}; a site "
                "has one"
            )
        multiplied_dims = {axis.dim for axis in multiplied}
        for name, shifted in members:
            if "shift" in group[name].moves and multiplied_dims - {shifted.dim}:
                raise ValueError(
                    f"the units {name!r} shift {site!r}, which other units multiply "
                    "along other axes"
                )
        for dim, pairs in group.members(site).items():
            occupied = _occupied(group, pairs, group.view_shapes[site][dim])
            if occupied and (conflicting := _conflicting(group, occupied)):
                raise ValueError(
                    f"the moves of the units {conflicting} along axis {dim} of "
                    f"{site!r} make up no group: units that "
                    "permute the same positions must lie inside one another, or be "
                    "rows and columns of a table; units "
                    "that are multiplied must be those that are permuted, lie inside "
                    "them, or be left alone by every "
                    "permutation; a shift needs units of its own"
                )


def _occupied(group: Group, members: Members, length: int) -> list[_Occupied]:
    """List the units that act along an axis; disjoint axes of the same units and power
    are joined.
    """
    occupied: list[_Occupied] = []
    for name, axis in members:
        unit_set = group[name]
        index = axis.index
        if axis.touched(unit_set.moves):
            power = 0
            if "scale" in unit_set.moves:
                power = axis.exponent
            elif "flip" in unit_set.moves:
                power = axis.exponent % 2
            for k, earlier in enumerate(occupied):
                similar = earlier.units is unit_set and earlier.power == power
                if similar and not (earlier.unit[index] >= 0).any():
                    index = torch.cat([occupied.pop(k).positions, index])
                    break
            unit = torch.full((length,), -1, device="cpu")
            block = unit.clone()
            unit[index] = torch.arange(unit_set.count, device="cpu")
            block[index] = torch.arange(len(index), device="cpu").unsqueeze(-1)
            occupied.append(_Occupied(unit_set, power, index, unit, block))
    return occupied


def _conflicting(group: Group, occupied: Sequence[_Occupied]) -> list[str]:
    """Return the names of the first units along an axis whose moves form no group; none
    if all do.
    """
    outer = [group.ancestors(occupation.units.name) for occupation in occupied]
    present = torch.stack([occupation.unit >= 0 for occupation in occupied])
    covered = dict[str, Tensor]()
    for occupation, mask in zip(occupied, present, strict=True):
        name = occupation.units.name
        covered[name] = mask | covered[name] if name in covered else mask
    for occupation, ancestors in zip(occupied, outer, strict=True):
        for name in ancestors:
            if "permute" not in group[name].moves or group[name].size == 1:
                continue
            if name not in covered or not covered[name][occupation.positions].all():
                return [name, occupation.units.name]
    overlap = present.double()
    for j, k in (overlap @ overlap.mT).nonzero().tolist():
        first = occupied[j]
        second = occupied[k]
        moves = first.units.moves | second.units.moves
        turning = [o for o in (first, second) if "rotate" in o.units.moves]
        powers = first.power or second.power
        plain = not powers and "shift" not in moves and len(turning) == 1
        mixed = bool(turning) and first is not second and not plain
        if mixed or not _normalises(first, second, first.units.name in outer[k]):
            return sorted({first.units.name, second.units.name})
    return []


def _normalises(permuting: _Occupied, moved: _Occupied, inside: bool) -> bool:
    """Return whether permutations of ``permuting`` map the moves of ``moved``, which
    may lie inside its units, to moves of ``moved``.
    """
    units = permuting.units
    shifts = "shift" in moved.units.moves
    rotates = "rotate" in moved.units.moves
    permutes = rotates or ("permute" in moved.units.moves and moved.units.size > 1)
    if shifts and permuting.power:
        return False
    if not units.moves & {"permute", "rotate"} or units.size == 1:
        return True
    if not (permutes or moved.power or shifts):
        return True
    if permuting is moved and not shifts:
        return True
    positions = permuting.positions.unflatten(-1, (units.copies, units.size))
    unit = moved.unit[positions]
    block = moved.block[positions]
    if inside and not shifts:  # counted from the first inside each unit
        first = torch.arange(units.count, device="cpu").view(units.copies, units.size)
        first = first * (moved.units.count // units.count)
        unit = torch.where(unit < 0, unit, unit - first)
    is_constant = bool((unit == unit[..., :1]).all())
    if not permutes or not is_constant:
        return is_constant
    # Sets of permuted units map to whole sets: a row of a table to a row.
    cells = (block * moved.units.copies + unit // moved.units.size).flatten(0, 1)
    number = len(cells.unique(dim=0))
    return all(len(column.unique()) == number for column in cells.T)


def group_of(symmetry: Any, name: str = "symmetry") -> Group:
    """Return the group of a symmetry, or a group itself.

    >>> symmetry = ps.find_symmetry(
    ...     nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    ...     torch.randn(5, 3),
    ... )
    >>> ps.groups.group_of(symmetry) is symmetry.group
    True

    :param name: what messages call it.
    :raises TypeError: if it is neither.
    """
    group = getattr(symmetry, "group", symmetry)
    if not isinstance(group, Group):
        raise TypeError(
            f"{name} is {described(symmetry)}; it must be find_symmetry(net, x), or a "
            "Group"
        )
    return group
