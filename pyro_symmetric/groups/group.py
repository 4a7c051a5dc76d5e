r"""A group: units, and the moves of theirs that leave something unchanged.

Every set of ``n`` units that may exchange places is a symmetric group :math:`S_n`; signs multiply units by -1 (with
permutations :math:`n!\,2^n` elements), scales by positive numbers, shifts add a constant. Units that lie inside others
(rows inside attention heads) move first, then those outside: with :math:`H` units outside and :math:`d` inside each a
wreath product :math:`S_d \wr S_H`, of order :math:`(d!)^H H!`, of any depth.

Source: Ainsworth, Hayase & Srinivasa 2023, arXiv 2209.04836 (permutations); Laurent, Aldea & Franchi 2024, arXiv
2310.08287, section 3 (scales, shifts); Wiese et al. 2023, arXiv 2304.02902 (signs).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.arguments import described
from pyro_symmetric.groups.checks import check_axes, check_group
from pyro_symmetric.groups.element import Element, checked
from pyro_symmetric.groups.places import PlacedUnits
from pyro_symmetric.groups.units import MOVES, Axis, Move, Units, moves_of, pruned, table
from pyro_symmetric.weights import shapes_of

ENUMERATION_LIMIT = 1_000_000
Runs = Mapping[str, tuple[int, int]]


class Group(PlacedUnits):
    """Units with the moves that count, and where they lie.

    >>> weights = {"locs": torch.zeros(3, 2), "weights": torch.ones(3)}
    >>> group = ps.Group.declare({"locs": ("component", None), "weights": ("component",)}, weights)
    >>> group.factors, group.sample((4,))(weights)["locs"].shape
    ({'component': 3}, torch.Size([4, 3, 2]))

    :param units: the units; their order, outer ones before what lies inside them, is the order of all that visits them.
    :param site_shapes: shape of every site of the model, touched or not (without batch dimensions).
    :param of_network: whether the sites are all parameters of a network, so that weights with others are another's.
    :ivar factors: name of the units that move -> their number, in one copy if they lie inside others.
    :ivar moves: all moves that some units admit.
    :raises ValueError: if two sets share a name, an axis doesn't fit its site, units don't lie inside their parent's,
        or permutations don't carry multipliers along, so that both together are no group.
    """

    def __init__(self, units: Iterable[Units], site_shapes: Mapping[str, torch.Size], of_network: bool = False):
        shapes = shapes_of(site_shapes, "site_shapes")
        listed = arguments.listed("units", units, Units, "Units, each with its axes")
        check_axes(listed, shapes)
        self._begin(listed, shapes, of_network, {})
        check_group(self)

    def _begin(self, units: Sequence[Units], shapes: Mapping[str, torch.Size], of_network: bool, runs: Runs) -> Group:
        super().__init__(units, shapes, of_network, runs)
        self.factors = {name: one.size for name, one in self.units.items() if one.moves}
        self.moves = frozenset(move for move in MOVES if self.names(move))
        self._hash = self._hashed()
        return self

    def _hashed(self) -> int:
        return hash((tuple(self.factors.items()), tuple(sorted(self._members))))

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._hash = self._hashed()  # strings have other hashes in other processes

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
        shapes, even = shapes_of(example_weights), arguments.listed("even", even, str, "sites")
        lying: dict[str, list[tuple[str, int]]] = {}
        for site, names in axes.items():
            if site not in shapes:
                raise ValueError(f"axes tells of {site!r}; example_weights holds {list(shapes)}")
            if not isinstance(names, list | tuple) or len(names) != len(shapes[site]) or not names:
                raise ValueError(
                    f"axes[{site!r}] is {names!r}; it must name units or None for each axis of that site, whose shape "
                    f"is {shapes[site]}"
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

    def order(self) -> int:
        """The number of permutations with signs; signs that act alike (all rows, all columns) count apart."""
        permutations = (math.factorial(self[name].size) ** self[name].copies for name in self.names("permute"))
        return math.prod(permutations) * int(2 ** sum(self[name].count for name in self.names("flip")))

    def log_order(self) -> float:
        """Natural logarithm of :meth:`order`, the number of equivalent modes of an invariant posterior."""
        permutations = sum(self[name].copies * math.lgamma(self[name].size + 1) for name in self.names("permute"))
        return permutations + math.log(2.0) * sum(self[name].count for name in self.names("flip"))

    # parts of it ----------------------------------------------------------------------------------------------------

    def restricted(self, *moves: str) -> Group:
        """The same units with these moves only; those that keep none, and axes that none touches, are left out."""
        kept = moves_of("moves", moves)
        if kept not in self._kept:
            self._kept[kept] = self if kept >= self.moves else self.without(self.units, set(MOVES) - kept)
        return self._kept[kept]

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
        """Leave units out, or some moves of theirs; what lies inside them stays."""
        left = {self[name].name for name in arguments.listed("names", names, str, "names of units")}
        taken = frozenset(MOVES) if moves is None else moves_of("moves", moves)
        units = [replace(u, moves=u.moves - taken) if u.name in left else u for u in self.units.values()]
        return self._checked(pruned(units), self.site_shapes, self._runs)

    def without_buffers(self, buffers: Collection[str] | None = None) -> Group:
        """The same units acting on parameters alone; buffers (running statistics) stay as they are.

        That changes what a network computes, unless buffers are the same for all units: it serves to compare weights.

        :param buffers: of which the group then knows nothing; by default all that it acts on.
        """
        left = self.buffers if buffers is None else buffers
        units = [replace(u, axes=tuple(a for a in u.axes if a.site not in left)) for u in self.units.values()]
        shapes = {site: shape for site, shape in self.site_shapes.items() if site not in left}
        return self._checked(pruned(units), shapes, {site: run for site, run in self._runs.items() if site in shapes})

    def renamed(self, rename: Callable[[str], str]) -> Group:
        """The same group for weights whose sites have other names."""
        shapes = {rename(site): shape for site, shape in self.site_shapes.items()}
        if len(shapes) < len(self.site_shapes):
            raise ValueError("rename gives two sites the same name")
        units = [replace(u, axes=tuple(replace(a, site=rename(a.site)) for a in u.axes)) for u in self.units.values()]
        return self._checked(units, shapes, {rename(site): run for site, run in self._runs.items()})

    def _checked(self, units: Sequence[Units], shapes: Mapping[str, torch.Size], runs: Runs) -> Group:
        """A group of units that need no more checks, in the same view."""
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
        """A given element or batch of elements: numbers as :class:`~pyro_symmetric.groups.element.Element` holds them.

        Shifts act first, then signs and scales, then permutations.

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
        """A batch of independent elements: permutations and signs uniform, log-scales and shifts normal.

        :param spread: standard deviation of log-scales and shifts, on which no uniform distribution exists.
        :param device: where they are drawn, by default on the CPU; they move weights on any.
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
        permuted, flipped = ([self[name] for name in self.names(move)] for move in ("permute", "flip"))
        sizes = [math.factorial(one.size) for one in permuted for _ in range(one.copies)]
        sizes += [2] * sum(one.count for one in flipped)
        digits = iter(torch.unravel_index(torch.arange(self.order(), device="cpu"), sizes) if sizes else ())
        permutations, signs = {}, {}
        for one in permuted:
            table = torch.tensor(list(itertools.permutations(range(one.size))), device="cpu")
            permutations[one.name] = torch.stack([table[next(digits)] for _ in range(one.copies)], -2)
            permutations[one.name] = permutations[one.name].reshape(-1, *one.shape)
        for one in flipped:
            bits = torch.stack([next(digits) for _ in range(one.count)], -1)
            signs[one.name] = (1.0 - 2.0 * bits).reshape(-1, *one.shape)
        return Element(self, permutations, signs, batch_shape=(self.order(),))

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
        return self._hash

    def __repr__(self) -> str:
        return "\n".join([f"Group of log-order {self.log_order():.1f}", *table(self.units)])


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
