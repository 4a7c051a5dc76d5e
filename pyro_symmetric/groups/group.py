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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.calls import described
from pyro_symmetric.groups.checks import check_axis, check_group
from pyro_symmetric.groups.declaration import declared_units
from pyro_symmetric.groups.element import Element, checked
from pyro_symmetric.groups.units import MOVES, Axis, Move, Units, moves_of
from pyro_symmetric.weights import Weights, batch_shape, is_bias, require_same_network, require_sites, shapes_of

ENUMERATION_LIMIT = 1_000_000
LISTED = 6  # axes of each set of units in a table; of more, the number is told


class Layer(NamedTuple):
    """Units along one axis that lie inside one another, outer ones first, or apart.

    Of several layers, each permutes places by itself: rows and columns of a table that is flattened.

    :ivar shared: what the units lie inside of, and another layer's do, too; its moves are left to that layer.
    :ivar members: names of the units, and the axes along which they lie.
    :ivar owner: the innermost of the members at each place, -1 for none.
    """

    shared: str | None
    members: list[tuple[str, Axis]]
    owner: Tensor


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

    def __init__(
        self,
        units: Iterable[Units],
        site_shapes: Mapping[str, torch.Size],
        of_network: bool = False,
    ):
        shapes = shapes_of(site_shapes, "site_shapes")
        listed = arguments.listed("units", units, Units, "Units, each with its axes")
        for one in listed:
            for axis in one.axes:
                check_axis(one.name, axis, shapes)
        self._begin(listed, shapes, (), of_network)
        check_group(self)

    def _begin(
        self,
        units: Iterable[Units],
        shapes: Mapping[str, torch.Size],
        spans: Iterable[tuple[str, int, int]],
        of_network: bool,
        whole: Group | None = None,
    ) -> Group:
        self.site_shapes, self.of_network, self.whole = dict(shapes), of_network, whole or self
        self.units = _outer_first(units)
        every = [axis for one in self.units.values() for axis in one.axes]
        self._spans = frozenset(spans) | {(axis.site, axis.dim, axis.span) for axis in every if axis.span > 1}
        self._runs = {site: _runs(len(shape), site, self._spans) for site, shape in self.site_shapes.items()}
        self.view_shapes = {
            site: torch.Size(math.prod(shape[slice(*run)]) for run in self._runs[site])
            for site, shape in self.site_shapes.items()
        }
        self._axes = {
            name: tuple(_lifted(axis, self.site_shapes[axis.site], self._runs[axis.site]) for axis in one.axes)
            for name, one in self.units.items()
        }
        self._members: dict[str, dict[int, list[tuple[str, Axis]]]] = {}
        for name in self.units:
            for axis in self._axes[name]:
                self._members.setdefault(axis.site, {}).setdefault(axis.dim, []).append((name, axis))
        for members in (members for by_dim in self._members.values() for members in by_dim.values()):
            members.sort(key=lambda member: -len(self.ancestors(member[0])))
        self._by_move = {move: tuple(n for n, one in self.units.items() if move in one.moves) for move in MOVES}
        self.carried: tuple[str, ...] = ()
        for name, one in self.units.items():
            self.carried += (name,) if "permute" in one.moves or one.parent in self.carried else ()
        self._layers: dict[tuple[str, int], list[Layer]] = {}
        self._restrictions: dict[frozenset[Move], Group] = {}
        return self

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
        """
        shapes = shapes_of(example_weights)
        return cls(declared_units(axes, shapes, moves, even), shapes)

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
        self[name]
        return tuple(other for other, one in self.units.items() if one.parent == name)

    def ancestors(self, name: str) -> tuple[str, ...]:
        """The units that these lie inside of, the nearest first; none for most."""
        parent = self[name].parent
        return () if parent is None else (parent, *self.ancestors(parent))

    def family(self, name: str) -> tuple[str, ...]:
        """These units and all that lies inside them, outer ones first."""
        return (name, *(inner for child in self.children(name) for inner in self.family(child)))

    # where it acts --------------------------------------------------------------------------------------------------

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that the group acts on, buffers included."""
        return tuple(self._members)

    @property
    def required_sites(self) -> tuple[str, ...]:
        """The sites that weights must hold to be acted on: those of the units, without buffers."""
        return tuple(site for site in self.sites if not all(axis.buffer for _, axis in self._at(site)))

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers (running statistics) that the group acts on."""
        return tuple(site for site in self.sites if all(axis.buffer for _, axis in self._at(site)))

    @property
    def weight_sites(self) -> tuple[str, ...]:
        """The sites that are weights, whether the group acts on them or not: all but biases and buffers.

        A site that multipliers touch along its only axis is a bias if they enter with positive exponents, unless its
        name ends in ``weight`` (the affine weight of a normalisation). A site that isn't touched is a weight if it has
        two axes or more, or if its name ends in ``weight``. What :func:`~pyro_symmetric.weights.is_bias` calls a bias
        never is.
        """
        return tuple(site for site in self.site_shapes if self._is_weight(site))

    def _is_weight(self, site: str) -> bool:
        axes = [axis for _, axis in self._at(site)]
        if is_bias(site) or any(axis.buffer for axis in axes):
            return False
        many = len(self.site_shapes[site]) >= 2
        return many or site.endswith("weight") or any(axis.exponent < 0 for axis in axes)

    def epsilon(self, site: str) -> float:
        """The summand that is added to a site's values before they are multiplied, and subtracted afterwards."""
        return next((a.epsilon for _, a in self._at(site) if a.exponent and a.epsilon is not None), 0.0)

    def members(self, site: str) -> dict[int, list[tuple[str, Axis]]]:
        """For each axis of a viewed site that the group acts on: (name, axis) pairs, inner units before outer ones."""
        return self._members.get(site, {})

    def _at(self, site: str) -> list[tuple[str, Axis]]:
        return [pair for members in self.members(site).values() for pair in members]

    def dims(self, site: str) -> tuple[int, ...]:
        """The axes of a site itself, rather than of its view, that the group acts on."""
        axes = [axis for one in self.units.values() for axis in one.axes if axis.site == site]
        return tuple(sorted({dim for axis in axes for dim in range(axis.dim, axis.dim + axis.span)}))

    def axes(self, name: str) -> tuple[Axis, ...]:
        """The axes of some units in the view, in the order of ``group[name].axes``."""
        self[name]
        return self._axes[name]

    def layers(self, site: str, dim: int) -> list[Layer]:
        """The permuted units on a viewed axis; one layer for most."""
        if (site, dim) not in self._layers:
            layers: list[Layer] = []
            for name, axis in reversed(self.members(site).get(dim, [])):
                if "permute" in self[name].moves:
                    self._add(layers, name, axis, self.view_shapes[site][dim])
            self._layers[site, dim] = layers
        return self._layers[site, dim]

    def _add(self, layers: list[Layer], name: str, axis: Axis, length: int) -> None:
        places, outside, shared = axis.index.flatten().cpu(), self.ancestors(name), None
        for layer in layers:
            numbers = layer.owner[places].unique().tolist()
            strangers = {layer.members[number][0] for number in numbers if number >= 0} - set(outside)
            if not strangers and layer.shared == shared:
                break
            common = (one for one in outside if any(one in self.ancestors(other) for other in strangers))
            shared = next(common, shared)
        else:
            layers.append(layer := Layer(shared, [], torch.full((length,), -1, device="cpu")))
        layer.owner[places] = len(layer.members)
        layer.members.append((name, axis))

    def view(self, site: str, value: Tensor) -> Tensor:
        """A site, ``batch_shape + site_shape``, with the axes flattened that some axis spans."""
        shape, viewed = self.site_shapes.get(site), self.view_shapes.get(site)
        return value if shape == viewed else value.reshape((*value.shape[: value.dim() - len(shape)], *viewed))  # type: ignore

    def view_back(self, site: str, value: Tensor) -> Tensor:
        """The inverse of :meth:`view`."""
        shape, viewed = self.site_shapes.get(site), self.view_shapes.get(site)
        return value if shape == viewed else value.reshape((*value.shape[: value.dim() - len(viewed)], *shape))  # type: ignore

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

    def _part(self, units: Iterable[Units], whole: Group | None = None, sites: Collection[str] | None = None) -> Group:
        """A group of parts of this one, which has been checked, in the same view."""
        shapes = {site: shape for site, shape in self.site_shapes.items() if sites is None or site in sites}
        spans = (span for span in self._spans if span[0] in shapes)
        return Group.__new__(Group)._begin(units, shapes, spans, self.of_network, whole)

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
        """Permutations and signs: what a guide can be averaged over.

        Scales and shifts are continuous: no proper prior is invariant under them, so they are no symmetry of a
        posterior.
        """
        return self.restricted("permute", "flip")

    def without(self, names: Iterable[str], moves: str | Iterable[str] | None = None) -> Group:
        """Leave units out, or some moves of theirs; what lies inside them stays.

        :param moves: the moves to take from them; all by default.
        """
        names = arguments.listed("names", names, str, "names of units")
        for name in names:
            self[name]
        taken = frozenset(MOVES) if moves is None else moves_of("moves", moves)
        units = [replace(u, moves=u.moves - taken) if u.name in names else u for u in self.units.values()]
        return self._part(_with_moves(units))

    def leaving(self, sites: Iterable[str]) -> Group:
        """The same units without their axes along ``sites``, of which the group then knows nothing.

        Units that lie along no other sites are gone.
        """
        left = set(arguments.listed("sites", sites, str, "sites")) & set(self.site_shapes)
        axes = {name: [axis for axis in one.axes if axis.site not in left] for name, one in self.units.items()}
        return self._over(set(self.site_shapes) - left, axes) if left else self

    def along(self, site: str, axes: Mapping[str, Sequence[Axis]]) -> Group:
        """Part of how the group acts on one site: units along these axes of theirs only, in the same view.

        :param axes: name of the units -> axes of theirs at this site, perhaps with other exponents.
        """
        return self._over({site}, axes)

    def _over(self, sites: Collection[str], axes: Mapping[str, Sequence[Axis]]) -> Group:
        """Units along these axes of theirs only; those that lie along none, and hold none that do, are gone."""
        held: set[str | None] = set()
        for one in reversed(self.units.values()):
            held |= {one.name, one.parent} if axes.get(one.name) or one.name in held else set()
        units = [replace(one, axes=tuple(axes.get(name, ()))) for name, one in self.units.items() if name in held]
        return self._part(units, sites=sites)

    def without_buffers(self) -> Group:
        """The same units acting on parameters alone; buffers (running statistics) stay as they are.

        That changes what a network computes, unless buffers have the same values for all units: it serves to compare
        weights, and if the invariance of a density is checked by itself.
        """
        return self.leaving(self.buffers)

    def renamed(self, rename: Callable[[str], str]) -> Group:
        """The same group for weights whose sites have other names."""
        new = {site: rename(site) for site in self.site_shapes}
        for name in new.values():
            arguments.instance("what rename returns", name, str, "a site's name")
        if len(set(new.values())) < len(new):
            raise ValueError("rename gives two sites the same name")
        shapes = {new[site]: shape for site, shape in self.site_shapes.items()}
        units = [replace(u, axes=tuple(replace(a, site=new[a.site]) for a in u.axes)) for u in self.units.values()]
        spans = ((new[site], dim, span) for site, dim, span in self._spans)
        return Group.__new__(Group)._begin(units, shapes, spans, self.of_network)

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
        """As JSON: the sites' shapes, and the units with their axes."""
        return {
            "site_shapes": {site: list(shape) for site, shape in self.site_shapes.items()},
            "units": [one.to_dict(self.site_shapes) for one in self.units.values()],
            "of_network": self.of_network,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Group:
        """The inverse of :meth:`to_dict`."""
        shapes = {site: torch.Size(shape) for site, shape in data["site_shapes"].items()}
        return cls((Units.from_dict(one, shapes) for one in data["units"]), shapes, data["of_network"])

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Group)
            and self.site_shapes == other.site_shapes
            and self.factors == other.factors
            and {**self.to_dict(), "of_network": True} == {**other.to_dict(), "of_network": True}
        )

    def __hash__(self) -> int:
        return hash((tuple(self.factors.items()), tuple(sorted(self._members))))

    def __repr__(self) -> str:
        if not self.units:
            return "Group(trivial)"
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
        raise TypeError(
            f"{name} is {described(symmetry)}; it must be a Group or a Symmetry, e.g. find_symmetry(net, x) or "
            "Group.declare(...)"
        )
    return group


def table(group: Group) -> list[str]:
    """Lines with aligned columns: the units, their number, their moves, the axes along which they lie.

    Units that lie inside others stand below them, indented; ``3 x 2`` are two in each of three.
    """
    rows = [("units", "number", "moves", "axes")]
    for name in (name for root in group.roots for name in group.family(root)):
        one = group[name]
        number = str(one.size) if one.copies == 1 else f"{one.copies} x {one.size}"
        axes = ", ".join(map(str, one.axes[:LISTED]))
        more = f", ... {len(one.axes) - LISTED} more" if len(one.axes) > LISTED else ""
        moves = ", ".join(move for move in MOVES if move in one.moves)
        rows.append(("  " * len(group.ancestors(name)) + name, number, moves, axes + more))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]


# small steps --------------------------------------------------------------------------------------------------------


def _outer_first(units: Iterable[Units]) -> dict[str, Units]:
    """Units by name, in the given order, but each after its parent."""
    pending: dict[str, Units] = {}
    for one in units:
        if one.name in pending:
            raise ValueError(f"two sets of units are called {one.name!r}; each needs a name of its own")
        pending[one.name] = one
    ordered: dict[str, Units] = {}

    def place(one: Units) -> None:
        if one.parent in pending and one.parent not in ordered:
            place(pending.pop(one.parent))
        if one.parent is not None and (one.parent not in ordered or ordered[one.parent].count != one.copies):
            raise ValueError(
                f"the units {one.name!r} lie in {one.parent!r}, in {one.copies} copies; there must be such units, one "
                "copy in each, and none may lie inside themselves"
            )
        ordered[one.name] = one

    while pending:
        place(pending.pop(next(iter(pending))))
    return ordered


def _runs(dims: int, site: str, spans: Iterable[tuple[str, int, int]]) -> list[tuple[int, int]]:
    """The first axis of each run of a site's axes that are flattened together, and the axis after its last."""
    first = list(range(dims))
    for dim, span in sorted((dim, span) for own, dim, span in spans if own == site):
        first = [first[dim] if first[dim] <= other <= first[dim + span - 1] else other for other in first]
    starts = [*sorted(set(first)), dims]
    return list(itertools.pairwise(starts))


def _lifted(axis: Axis, shape: torch.Size, runs: Sequence[tuple[int, int]]) -> Axis:
    """An axis of a site as one of the view: its units occupy all positions along the rest of the run."""
    number = next(k for k, (start, end) in enumerate(runs) if start <= axis.dim < end)
    if len(runs) == len(shape):
        return axis
    (start, end), last = runs[number], axis.dim + axis.span
    before, own, after = (math.prod(shape[a:b]) for a, b in ((start, axis.dim), (axis.dim, last), (last, end)))
    outer = torch.arange(before, device=axis.index.device)[:, None, None, None] * own
    index = (outer + axis.index.unsqueeze(1)) * after + torch.arange(after, device=axis.index.device)[:, None]
    return replace(axis, dim=number, index=index.flatten(0, 2), span=1)


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
