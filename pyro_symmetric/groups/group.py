r"""A group: units, and the moves of theirs that leave something unchanged.

Every set of ``n`` units that may exchange places is a symmetric group :math:`S_n`; signs multiply units by -1, scales
by positive numbers, shifts add a constant. Units that lie inside others (rows inside attention heads, channels inside
the groups of a convolution) move first, then those outside: a wreath product, of any depth. With :math:`H` units
outside and :math:`d` inside each it is :math:`S_d \wr S_H`, of order :math:`(d!)^H H!`. With signs, :math:`n` units
have the hyperoctahedral group of order :math:`n!\,2^n`.

Source: Ainsworth, Hayase & Srinivasa 2023, arXiv 2209.04836 (permutations); Laurent, Aldea & Franchi 2024, arXiv
2310.08287, section 3 (scales, shifts); Wiese et al. 2023, arXiv 2304.02902 (signs).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.calls import described
from pyro_symmetric.groups.checks import check_axis, check_group
from pyro_symmetric.groups.element import Element, checked
from pyro_symmetric.groups.units import MOVES, Axis, Move, Units, moves_of
from pyro_symmetric.weights import Weights, batch_shape, is_bias, require_same_network, require_sites, shapes_of

ENUMERATION_LIMIT = 1_000_000
LISTED = 6  # axes of each set of units in a table; of more, the number is told
Members = list[tuple[str, Axis]]


class Group:
    """Units with the moves that count, and where they lie.

    If an axis spans several axes of its site, these are flattened for all that acts there: :meth:`view` reshapes so,
    and :meth:`members` and :meth:`axes` count axes in this view.

    >>> weights = {"locs": torch.zeros(3, 2), "weights": torch.ones(3)}
    >>> group = ps.Group.declare({"locs": ("component", None), "weights": ("component",)}, weights)
    >>> group.factors, group.sample((4,))(weights)["locs"].shape
    ({'component': 3}, torch.Size([4, 3, 2]))

    :param units: the units; their order, outer ones before what lies inside them, is the order of all that visits them.
    :param site_shapes: shape of every site of the model, touched or not (without batch dimensions).
    :param of_network: whether the sites are all parameters of a network, so that weights with others are another's.
    :ivar view_shapes: shapes of the sites in the view.
    :ivar carried: names of the units that some permutation moves, their own or one outside.
    :ivar whole: the group that this one is a restriction of; itself, if it is none.
    :raises ValueError: if two sets share a name, an axis doesn't fit its site, units don't lie inside their parent's,
        or permutations don't carry multipliers along, so that both together are no group.
    """

    def __init__(self, units: Iterable[Units], site_shapes: Mapping[str, torch.Size], of_network: bool = False):
        shapes = shapes_of(site_shapes, "site_shapes")
        listed = arguments.listed("units", units, Units, "Units, each with its axes")
        for one in listed:
            for axis in one.axes:
                check_axis(one.name, axis, shapes)
        self._begin(listed, shapes, of_network, {})
        check_group(self)

    def _begin(
        self,
        units: Sequence[Units],
        shapes: Mapping[str, torch.Size],
        of_network: bool,
        runs: Mapping[str, tuple[int, int]],
        whole: Group | None = None,
    ) -> Group:
        self.site_shapes, self.of_network, self.whole = dict(shapes), of_network, whole or self
        self.units = _outer_first(units)
        self._runs = {site: run for site, run in runs.items() if site in shapes}  # axes that are flattened
        for axis in (axis for one in self.units.values() for axis in one.axes if axis.span > 1):
            first, last = self._runs.get(axis.site, (axis.dim, 0))
            self._runs[axis.site] = min(first, axis.dim), max(last, axis.dim + axis.span)
        self.view_shapes = {
            site: torch.Size((*shape[: (run := self._runs[site])[0]], math.prod(shape[slice(*run)]), *shape[run[1] :]))
            if site in self._runs
            else shape
            for site, shape in self.site_shapes.items()
        }
        self._axes = {name: tuple(map(self._viewed, one.axes)) for name, one in self.units.items()}
        self._members: dict[str, dict[int, Members]] = {}
        for name in sorted(self.units, key=lambda name: -len(self.ancestors(name))):
            for axis in self._axes[name]:
                self._members.setdefault(axis.site, {}).setdefault(axis.dim, []).append((name, axis))
        self._by_move = {move: tuple(n for n, one in self.units.items() if move in one.moves) for move in MOVES}
        self.carried: tuple[str, ...] = ()
        for name, one in self.units.items():
            self.carried += (name,) if "permute" in one.moves or one.parent in self.carried else ()
        self._restrictions: dict[frozenset[Move], Group] = {}
        return self

    def _viewed(self, axis: Axis) -> Axis:
        """An axis of a site as one of the view: its units occupy all positions along the rest of the run."""
        if axis.site not in self._runs:
            return axis
        start, end = self._runs[axis.site]
        if not start <= axis.dim < end:
            return axis if axis.dim < start else replace(axis, dim=axis.dim - (end - start - 1))
        shape, first = self.site_shapes[axis.site][start:end], axis.dim - start
        places = torch.arange(shape.numel(), device=axis.index.device)
        along = places.reshape(*shape[:first], -1, *shape[first + axis.span :]).movedim(first, 0)
        index = along.reshape(len(along), -1)[axis.index].movedim(-1, 1).flatten(0, 1).contiguous()
        return replace(axis, dim=start, index=index, span=1)

    @classmethod
    def declare(
        cls,
        axes: Mapping[str, Sequence[str | None]],
        example_weights: Mapping[str, Tensor | torch.Size],
        moves: str | Iterable[str] | Mapping[str, str | Iterable[str]] = "permute",
        even: Iterable[str] = (),
    ) -> Group:
        """Declare which axes of which sites hold exchangeable parts, for any Pyro model.

        The factors of a factor analysis can be exchanged and flipped; their variances are exchanged only:

        >>> group = ps.Group.declare(
        ...     {"loadings": (None, "factor"), "scores": ("factor", None), "variances": ("factor",)},
        ...     {"loadings": torch.zeros(5, 2), "scores": torch.zeros(2, 20), "variances": torch.ones(2)},
        ...     moves=("permute", "flip"),
        ...     even=["variances"],
        ... )
        >>> group.order()
        8

        :param axes: site -> for each of its axes, the name of the units that lie along it, or ``None``.
        :param example_weights: one example (or the shape) of every site of the model, without batch dimensions.
        :param moves: ``"permute"``, ``"flip"``, or both; or, by the name of the units, what each may do.
        :param even: sites that no flip changes.
        :raises ValueError: if axes don't fit their sites, or one set of units would have axes of different lengths.
        """
        shapes, even = shapes_of(example_weights), arguments.listed("even", even, str, "sites")
        lying: dict[str, list[tuple[str, int]]] = {}
        for site, names in axes.items():
            if not isinstance(names, list | tuple) or len(names) != len(shapes.get(site, ())) or not names:
                raise ValueError(
                    f"axes[{site!r}] is {names!r}; it must name units or None for each axis of that site, whose shape "
                    f"is {shapes.get(site, 'unknown')}"
                )
            for dim, name in enumerate(names):
                if name is not None:
                    lying.setdefault(name, []).append((site, dim))
        given = moves if isinstance(moves, Mapping) else dict.fromkeys(lying, moves)
        if set(given) != set(lying) or not set(even) <= set(axes):
            raise ValueError(f"moves tells of {list(given)}, even of {even}; axes holds {list(lying)} in {list(axes)}")
        units = []
        for name, where in lying.items():
            lengths, allowed = {shapes[site][dim] for site, dim in where}, moves_of("moves", given[name])
            if len(lengths) > 1 or not allowed <= {"permute", "flip"}:
                raise ValueError(
                    f"{name!r} lies along the axes {where} of lengths {sorted(lengths)}, and its moves are "
                    f"{sorted(allowed)}; lengths must be equal, and declared units may only permute and flip"
                )
            index = torch.arange(lengths.pop(), device="cpu")[None]
            own = (Axis(site, dim, index, int("flip" in allowed and site not in even)) for site, dim in where)
            units.append(Units(name, index.shape[1], tuple(a for a in own if a.touched(allowed)), moves=allowed))
        return cls(units, shapes)

    # its units ------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Units:
        if name not in self.units:
            raise ValueError(f"the group has no units {name!r}; it has {list(self.units)}")
        return self.units[name]

    @property
    def factors(self) -> dict[str, int]:
        """Name of the units -> their number, in one copy if they lie inside others."""
        return {name: one.size for name, one in self.units.items() if one.moves}

    def names(self, move: Move) -> tuple[str, ...]:
        """The units that admit a move."""
        return self._by_move.get(move, ())

    @property
    def moves(self) -> frozenset[Move]:
        """All moves that some units admit."""
        return frozenset().union(*(one.moves for one in self.units.values()))

    @property
    def roots(self) -> tuple[str, ...]:
        """The units that lie inside no others."""
        return tuple(name for name, one in self.units.items() if one.parent is None)

    def children(self, name: str) -> tuple[str, ...]:
        """The units that lie inside these, in the group's order."""
        return tuple(other for other, one in self.units.items() if one.parent == name)

    def ancestors(self, name: str) -> tuple[str, ...]:
        """The units that these lie inside of, the nearest first; none for most."""
        parent = self[name].parent
        return () if parent is None else (parent, *self.ancestors(parent))

    def family(self, name: str) -> tuple[str, ...]:
        """These units and all that lies inside them, outer ones first."""
        return (name, *(inner for child in self.children(name) for inner in self.family(child)))

    # where it acts --------------------------------------------------------------------------------------------------

    def axes(self, name: str) -> tuple[Axis, ...]:
        """The axes of some units in the view, in the order of ``group[name].axes``."""
        return self._axes[self[name].name]

    def members(self, site: str) -> dict[int, Members]:
        """For each axis of a viewed site that the group acts on: (name, axis) pairs, inner units before outer ones."""
        return self._members.get(site, {})

    def movers(self, site: str, dim: int) -> Members:
        """The members at one axis that permute, outer units first."""
        return [pair for pair in reversed(self.members(site).get(dim, [])) if "permute" in self.units[pair[0]].moves]

    def _at(self, site: str) -> list[Axis]:
        return [axis for members in self.members(site).values() for _, axis in members]

    def dims(self, site: str) -> tuple[int, ...]:
        """The axes of a site itself, rather than of its view, that the group acts on."""
        axes = [axis for one in self.units.values() for axis in one.axes if axis.site == site]
        return tuple(sorted({dim for axis in axes for dim in range(axis.dim, axis.dim + axis.span)}))

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that the group acts on, buffers included."""
        return tuple(site for site in self.site_shapes if site in self._members)

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers (running statistics) that the group acts on."""
        return tuple(site for site in self.sites if all(axis.buffer for axis in self._at(site)))

    @property
    def required_sites(self) -> tuple[str, ...]:
        """The sites that weights must hold to be acted on: those of the units, without buffers."""
        return tuple(site for site in self.sites if not all(axis.buffer for axis in self._at(site)))

    @property
    def weight_sites(self) -> tuple[str, ...]:
        """The sites that are weights, whether the group acts on them or not: all but biases and buffers.

        A site with one axis is a weight if units that leave along it multiply it (with a negative exponent), or if its
        name ends in ``weight``. What :func:`~pyro_symmetric.weights.is_bias` calls a bias never is.
        """
        found = []
        for site, shape in self.site_shapes.items():
            leaves = any(axis.exponent < 0 for axis in self._at(site))
            if not is_bias(site) and site not in self.buffers and (len(shape) > 1 or leaves or site.endswith("weight")):
                found.append(site)
        return tuple(found)

    def epsilon(self, site: str) -> float:
        """The summand that is added to a site's values before they are multiplied, and subtracted afterwards."""
        return next((a.epsilon for a in self._at(site) if a.exponent and a.epsilon is not None), 0.0)

    def view(self, site: str, value: Tensor) -> Tensor:
        """A site, ``batch_shape + site_shape``, with the axes flattened that some axis spans."""
        if site not in self._runs:
            return value
        start, end = (dim - len(self.site_shapes[site]) for dim in self._runs[site])
        return value.flatten(start, end - 1)

    def view_back(self, site: str, value: Tensor) -> Tensor:
        """The inverse of :meth:`view`."""
        if site not in self._runs:
            return value
        start, end = self._runs[site]
        return value.unflatten(start - len(self.view_shapes[site]), self.site_shapes[site][start:end])

    def viewed(self, weights: Mapping[str, Tensor]) -> Weights:
        """All sites as :meth:`view` shows them."""
        return {site: self.view(site, value) for site, value in weights.items()}

    def require_own(self, sites: Iterable[str], name: str = "weights") -> None:
        """:raises ValueError: if there are parameters that a network's group doesn't know: another network's."""
        if self.of_network:
            require_same_network(sites, self.site_shapes, name)

    def batch_shape(self, weights: Mapping[str, Tensor]) -> torch.Size:
        """The batch shape of ``weights`` that are only looked at, checked against the sites' shapes."""
        require_sites(weights, self.required_sites)
        return batch_shape(weights, self.site_shapes)

    # its order ------------------------------------------------------------------------------------------------------

    def order(self) -> int:
        """The number of permutations with signs; scales and shifts are continuous.

        Signs that act alike count apart: flipping all rows of a matrix flips all of its columns, too. That is rare in
        networks, and changes no average over the group.
        """
        permutations = (math.factorial(self[name].size) ** self[name].copies for name in self.names("permute"))
        return math.prod(permutations) * int(2 ** sum(self[name].count for name in self.names("flip")))

    def log_order(self) -> float:
        """Natural logarithm of :meth:`order`: of the number of equivalent modes of an invariant posterior."""
        permutations = sum(self[name].copies * math.lgamma(self[name].size + 1) for name in self.names("permute"))
        return permutations + math.log(2.0) * sum(self[name].count for name in self.names("flip"))

    # parts of it ----------------------------------------------------------------------------------------------------

    def _part(self, units: Sequence[Units], whole: Group | None = None, leaving: Iterable[str] = ()) -> Group:
        """A group of parts of this one, which has been checked, in the same view."""
        shapes = {site: shape for site, shape in self.site_shapes.items() if site not in leaving}
        return Group.__new__(Group)._begin(units, shapes, self.of_network, self._runs, whole)

    def restricted(self, *moves: str) -> Group:
        """The same units with these moves only: a view that shares their axes.

        Units that keep no move, and axes that no kept move touches, are left out.
        """
        kept = moves_of("moves", moves)
        if kept >= self.moves:
            return self
        if kept not in self._restrictions:
            units = [replace(one, moves=one.moves & kept) for one in self.units.values()]
            self._restrictions[kept] = self._part(_with_moves(units), self.whole)
        return self._restrictions[kept]

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
    def finite(self) -> Group:
        """Permutations and signs: what a guide can be averaged over. No proper prior is invariant under the others."""
        return self.restricted("permute", "flip")

    def without(self, names: Iterable[str], moves: str | Iterable[str] | None = None) -> Group:
        """Leave units out, or some moves of theirs; what lies inside them stays.

        :param moves: the moves to take from them; all by default.
        """
        left = {self[name].name for name in arguments.listed("names", names, str, "names of units")}
        taken = frozenset(MOVES) if moves is None else moves_of("moves", moves)
        units = [replace(u, moves=u.moves - taken) if u.name in left else u for u in self.units.values()]
        return self._part(_with_moves(units))

    def leaving(self, sites: Iterable[str]) -> Group:
        """The same units without their axes along ``sites``, of which the group then knows nothing.

        Units that lie along no other sites are gone.
        """
        left, held = set(arguments.listed("sites", sites, str, "sites")), set[str | None]()
        axes = {name: tuple(a for a in one.axes if a.site not in left) for name, one in self.units.items()}
        for name, one in reversed(self.units.items()):
            held |= {name, one.parent} if axes[name] or name in held else set()
        return self._part([replace(self[name], axes=axes[name]) for name in self.units if name in held], leaving=left)

    def without_buffers(self) -> Group:
        """The same units acting on parameters alone; buffers (running statistics) stay as they are.

        That changes what a network computes, unless buffers have the same values for all units: it serves to compare
        weights, and if the invariance of a density is checked by itself.
        """
        return self.leaving(self.buffers)

    def renamed(self, rename: Callable[[str], str]) -> Group:
        """The same group for weights whose sites have other names."""
        new = {site: rename(site) for site in self.site_shapes}
        if len(set(new.values())) < len(new):
            raise ValueError("rename gives two sites the same name")
        shapes = {new[site]: shape for site, shape in self.site_shapes.items()}
        units = [replace(u, axes=tuple(replace(a, site=new[a.site]) for a in u.axes)) for u in self.units.values()]
        runs = {new[site]: run for site, run in self._runs.items()}
        return Group.__new__(Group)._begin(units, shapes, self.of_network, runs)

    # its elements ---------------------------------------------------------------------------------------------------

    def identity(
        self, shape: Sequence[int] = (), device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Element:
        """The neutral element, as a batch of the given shape, on the CPU by default."""
        shape = arguments.shape("shape", shape)
        return Element(self, batch_shape=shape, device=device, dtype=arguments.dtype("dtype", dtype))

    def element(
        self,
        permutations: Mapping[str, Any] | None = None,
        *,
        signs: Mapping[str, Any] | None = None,
        log_scales: Mapping[str, Any] | None = None,
        shifts: Mapping[str, Any] | None = None,
    ) -> Element:
        """A given element or batch of elements; what is left out stays as it is. Shifts act first, then signs and
        scales, then permutations.

        :param permutations: name of the units -> integers ``batch_shape + units.shape``, each row a permutation of
            ``0 .. size - 1``.
        :param signs: name -> 1 or -1 for each unit.
        :param log_scales: name -> the logarithm of each unit's multiplier.
        :param shifts: name -> the constant that is added.
        :raises ValueError: if units are unknown or don't admit the move, or the numbers aren't what they must be.
        """
        return Element(
            self,
            checked("permutations", self, "permute", permutations),
            checked("signs", self, "flip", signs),
            checked("log_scales", self, "scale", log_scales),
            checked("shifts", self, "shift", shifts),
        )

    def sample(
        self,
        shape: Sequence[int] = (),
        spread: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        generator: torch.Generator | None = None,
    ) -> Element:
        """A batch of independent elements: permutations and signs uniform, log-scales and shifts normal. (No uniform
        distribution exists on these.)

        :param spread: standard deviation of log-scales and shifts.
        :param device: where they are drawn, by default on the CPU; they move weights on any.
        :param generator: by default PyTorch's own.
        """
        shape = tuple(arguments.shape("shape", shape))
        arguments.number("spread", spread, least=0, below=math.inf)
        options: Any = {"device": device or torch.device("cpu"), "generator": generator}
        real: Any = {**options, "dtype": arguments.dtype("dtype", dtype) or torch.get_default_dtype()}

        def each(move: Move, draw: Callable[[tuple[int, ...]], Tensor]) -> dict[str, Tensor]:
            return {name: draw((*shape, *self[name].shape)) for name in self.names(move)}

        # Sorting uniform keys gives uniform permutations up to ties; float64 keys make ties too rare to matter.
        permutations = each("permute", lambda full: torch.rand(full, dtype=torch.float64, **options).argsort(-1))
        signs = each("flip", lambda full: torch.randint(0, 2, full, **real).mul_(2).sub_(1))
        scales, shifts = (each(move, lambda full: spread * torch.randn(full, **real)) for move in ("scale", "shift"))
        return Element(self, permutations, signs, scales, shifts, shape)

    def enumerate(self) -> Element:
        """All permutations with signs, as a batch of shape ``(order,)``; the identity comes first.

        :raises ValueError: if there are more than a million.
        """
        if self.log_order() > math.log(ENUMERATION_LIMIT) + 1e-9:
            raise ValueError(
                f"the group has exp({self.log_order():.1f}) elements; at most {ENUMERATION_LIMIT} can be enumerated"
            )
        order = left = self.order()
        every = torch.arange(order, device="cpu")

        def chosen(table: Tensor) -> Tensor:
            """The row of a table in each element; what is chosen last changes fastest."""
            nonlocal left
            left //= len(table)
            return table[every // left % len(table)]

        permutations, signs = {}, {}
        for one in (self[name] for name in self.names("permute")):
            table = torch.tensor(list(itertools.permutations(range(one.size))), device="cpu")
            permutations[one.name] = torch.stack([chosen(table) for _ in range(one.copies)], -2).reshape(-1, *one.shape)
        for one in (self[name] for name in self.names("flip")):
            flips = [chosen(torch.tensor([1.0, -1.0], device="cpu")) for _ in range(one.count)]
            signs[one.name] = torch.stack(flips, -1).reshape(-1, *one.shape)
        return Element(self, permutations, signs, batch_shape=(order,))

    def generators(self, name: str) -> Element:
        """A cycle and an exchange in each copy of some units, which make up all permutations of theirs.

        :return: a batch ``(2 copies,)``: first those of the first copy.
        """
        one = self[name]
        images = torch.arange(one.size, device="cpu").repeat(one.copies, 2, one.copies, 1)
        for copy in range(one.copies):
            images[copy, 0, copy] = images[copy, 0, copy].roll(1)
            images[copy, 1, copy, :2] = images[copy, 1, copy, :2].flip(0)
        return Element(self, {name: images.reshape(-1, *one.shape)})

    # the same group -------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As JSON: the sites' shapes, and the units with their axes; indices are left out if units fill an axis."""

        def axis_data(axis: Axis) -> dict[str, Any]:
            data = {field.name: getattr(axis, field.name) for field in fields(axis)}
            return {**data, "index": None if axis.fills(axis.length(self.site_shapes)) else axis.index.tolist()}

        return {
            "site_shapes": {site: list(shape) for site, shape in self.site_shapes.items()},
            "units": [
                {**vars(one), "axes": [axis_data(axis) for axis in one.axes], "moves": sorted(one.moves)}
                for one in self.units.values()
            ],
            "of_network": self.of_network,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Group:
        """The inverse of :meth:`to_dict`."""
        shapes = {site: torch.Size(shape) for site, shape in data["site_shapes"].items()}

        def axis_of(given: Mapping[str, Any]) -> Axis:
            dim, index = given["dim"], given["index"]
            if index is None:
                index = [list(range(math.prod(shapes[given["site"]][dim : dim + given["span"]])))]
            return Axis(**{**given, "index": torch.tensor(index, device="cpu")})

        units = (Units(**{**one, "axes": [axis_of(axis) for axis in one["axes"]]}) for one in data["units"])
        return cls(units, shapes, data["of_network"])

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Group) or self.factors != other.factors:
            return self is other
        return {**self.to_dict(), "of_network": None} == {**other.to_dict(), "of_network": None}

    def __hash__(self) -> int:
        return hash((tuple(self.factors.items()), tuple(sorted(self._members))))

    def __repr__(self) -> str:
        return "\n".join([f"Group of log-order {self.log_order():.1f}", *table(self)])


def group_of(symmetry: Any, name: str = "group") -> Group:
    """The group of a symmetry, or a group itself.

    >>> symmetry = ps.find_symmetry(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    >>> ps.groups.group_of(symmetry) is symmetry.group
    True

    :param name: what messages call it.
    :raises TypeError: if it is neither.
    """
    group = symmetry if isinstance(symmetry, Group) else getattr(symmetry, "group", None)
    if not isinstance(group, Group):
        raise TypeError(f"{name} is {described(symmetry)}; it must be find_symmetry(net, x), or a Group")
    return group


def table(group: Group) -> list[str]:
    """Lines with aligned columns: the units, their number, their moves, the axes along which they lie.

    Units that lie inside others stand below them, indented.
    """
    rows = [("units", "number", "moves", "axes")]
    for name in (name for root in group.roots for name in group.family(root)):
        one = group[name]
        axes = ", ".join(map(str, one.axes[:LISTED]))
        more = f", ... {len(one.axes) - LISTED} more" if len(one.axes) > LISTED else ""
        moves = ", ".join(move for move in MOVES if move in one.moves)
        rows.append(("  " * len(group.ancestors(name)) + name, one.number, moves, axes + more))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]


# small steps --------------------------------------------------------------------------------------------------------


def _outer_first(units: Sequence[Units]) -> dict[str, Units]:
    """Units by name, in the given order, but each after its parent."""
    named = {one.name: one for one in units}
    if len(named) < len(units):
        raise ValueError(f"two sets of units have one name: {[one.name for one in units]}; each needs its own")
    ordered: dict[str, Units] = {}
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


def _with_moves(units: Sequence[Units]) -> list[Units]:
    """Units that have a move, with the axes that it touches; outer ones come first.

    Units that lie between others that move, and have no move themselves, stay: their unit is still what carries those
    inside. What lies inside nothing that permutes has no parent.
    """
    carried: set[str | None] = set()
    for one in units:
        carried |= {one.name} if "permute" in one.moves or one.parent in carried else set()
    carriers: set[str | None] = set()
    for one in reversed(units):
        if one.parent in carried and (one.moves or one.name in carriers):
            carriers.add(one.parent)
    return [
        # What carries others stays where it is, so that they still lie inside it.
        replace(
            one,
            axes=tuple(axis for axis in one.axes if one.name in carriers or axis.touched(one.moves)),
            parent=one.parent if one.parent in carried else None,
        )
        for one in units
        if one.moves or one.name in carriers
    ]
