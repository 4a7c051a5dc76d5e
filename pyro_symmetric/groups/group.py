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

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.groups.arrangement import Arrangement
from pyro_symmetric.groups.checks import check_axis, check_group
from pyro_symmetric.groups.declaration import declared_units
from pyro_symmetric.groups.dependence import independent_units
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.enumeration import cycles_and_exchanges, enumerated, sampled
from pyro_symmetric.groups.numbers import checked
from pyro_symmetric.groups.parts import with_axes, with_moves
from pyro_symmetric.groups.table import table
from pyro_symmetric.groups.units import MOVES, Axis, Move, Units, moves_of
from pyro_symmetric.weights import shapes_of

ENUMERATION_LIMIT = 1_000_000


class Group(Arrangement):
    """Units with the moves that count.

    >>> weights = {"locs": torch.zeros(3, 2), "weights": torch.ones(3)}
    >>> group = ps.Group.declare({"locs": ("component", None), "weights": ("component",)}, weights)
    >>> group.factors, group.sample((4,))(weights)["locs"].shape
    ({'component': 3}, torch.Size([4, 3, 2]))

    :param units: the units; their order, outer ones before what lies inside them, is the order of all that visits them.
    :param site_shapes: shape of every site of the model, touched or not (without batch dimensions).
    :param spans: further axes ``(site, dim, span)`` to flatten in the view.
    :param of_network: whether the sites are all parameters of a network, so that weights with others are another's.
    :ivar whole: the group that this one is a restriction of; itself, if it is none.
    :raises ValueError: if two sets share a name, an axis doesn't fit its site, units don't lie inside their parent's,
        or permutations don't carry multipliers along, so that both together are no group.
    """

    def __init__(
        self,
        units: Iterable[Units],
        site_shapes: Mapping[str, torch.Size],
        spans: Iterable[tuple[str, int, int]] = (),
        of_network: bool = False,
    ):
        shapes = shapes_of(site_shapes, "site_shapes")
        listed = arguments.listed("units", units, Units, "Units, each with its axes")
        for one in listed:
            for axis in one.axes:
                check_axis(one.name, axis, shapes)
        self._begin(listed, shapes, spans, arguments.flag("of_network", of_network))
        check_group(self)

    def _begin(
        self,
        units: Iterable[Units],
        shapes: Mapping[str, torch.Size],
        spans: Iterable[tuple[str, int, int]],
        of_network: bool,
        whole: Group | None = None,
    ) -> Group:
        super().__init__(units, shapes, spans, of_network)
        self.whole = whole or self
        self._restrictions: dict[frozenset[Move], Group] = {}
        self._independent: dict[str, dict[str, Tensor]] = {}
        return self

    def _part(self, units: Iterable[Units], whole: Group | None = None) -> Group:
        """A group of parts of this one, which has been checked, in the same view."""
        return Group.__new__(Group)._begin(units, self.site_shapes, self.spans, self.of_network, whole)

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

    # what the group is ----------------------------------------------------------------------------------------------

    def order(self) -> int:
        """The number of permutations with signs that act differently, exactly; scales and shifts are continuous."""
        permutations = (math.factorial(self[name].size) ** self[name].copies for name in self.names("permute"))
        return math.prod(permutations) * int(2 ** self._number_of_flips())

    def log_order(self) -> float:
        """Natural logarithm of :meth:`order`: of the number of equivalent modes of an invariant posterior."""
        permutations = sum(self[name].copies * math.lgamma(self[name].size + 1) for name in self.names("permute"))
        return permutations + self._number_of_flips() * math.log(2.0)

    def _number_of_flips(self) -> int:
        return sum(int(units.sum()) for units in self.independent("flip").values())

    def independent(self, move: Move) -> dict[str, Tensor]:
        """Bool ``units.shape`` by name: units whose multipliers are independent and together do what all units' do.

        Flips of some units may do together what flips of others do.

        :param move: ``"flip"`` or ``"scale"``.
        """
        arguments.one_of("move", move, ("flip", "scale"))
        if not self.names(move):
            return {}
        if move not in self._independent:
            with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
                self._independent[move] = independent_units(self, move)
        return self._independent[move]

    # parts of it ----------------------------------------------------------------------------------------------------

    def restricted(self, *moves: str) -> Group:
        """The same units with these moves only: a view that shares their axes.

        Units that keep no move, and axes that no kept move touches, are left out.
        """
        kept = moves_of("moves", moves)
        if kept >= self.moves:
            return self
        if kept not in self._restrictions:
            units = [replace(one, moves=one.moves & kept) for one in self._units.values()]
            self._restrictions[kept] = self._part(with_moves(units), self.whole)
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
        units = [replace(u, moves=u.moves - taken) if u.name in names else u for u in self._units.values()]
        return self._part(with_moves(units))

    def leaving(self, sites: Iterable[str]) -> Group:
        """The same units without their axes along ``sites``, of which the group then knows nothing.

        Units that lie along no other sites are gone.
        """
        left = set(arguments.listed("sites", sites, str, "sites")) & set(self.site_shapes)
        if not left:
            return self
        axes = {name: [axis for axis in one.axes if axis.site not in left] for name, one in self._units.items()}
        return self._over(set(self.site_shapes) - left, axes)

    def along(self, site: str, axes: Mapping[str, Sequence[Axis]]) -> Group:
        """Part of how the group acts on one site: units along these axes of theirs only, in the same view.

        :param axes: name of the units -> axes of theirs at this site, perhaps with other exponents.
        """
        return self._over({site}, axes)

    def _over(self, sites: Collection[str], axes: Mapping[str, Sequence[Axis]]) -> Group:
        """The group on some sites, of units along these axes of theirs only."""
        shapes = {site: shape for site, shape in self.site_shapes.items() if site in sites}
        spans = (span for span in self.spans if span[0] in sites)
        units = with_axes(list(self._units.values()), axes)
        return Group.__new__(Group)._begin(units, shapes, spans, self.of_network)

    def without_buffers(self) -> Group:
        """The same units acting on parameters alone; buffers (running statistics) stay as they are.

        That changes what a network computes, unless buffers have the same values for all units: it serves to compare
        weights, and if the invariance of a density is checked by itself.
        """
        return self.leaving(self.buffers)

    def renamed(self, rename: Callable[[str], str]) -> Group:
        """The same group for weights whose sites have other names."""
        arguments.function("rename", rename, "a function of a site's name")
        new = {site: rename(site) for site in self.site_shapes}
        for name in new.values():
            arguments.instance("what rename returns", name, str, "a site's name")
        if len(set(new.values())) < len(new):
            raise ValueError("rename gives two sites the same name")
        shapes = {new[site]: shape for site, shape in self.site_shapes.items()}
        units = [replace(u, axes=tuple(replace(a, site=new[a.site]) for a in u.axes)) for u in self._units.values()]
        spans = ((new[site], dim, span) for site, dim, span in self.spans)
        return Group.__new__(Group)._begin(units, shapes, spans, self.of_network)

    # its elements ---------------------------------------------------------------------------------------------------

    def identity(
        self, shape: Sequence[int] = (), device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Element:
        """The neutral element, as a batch of the given shape, on the CPU by default."""
        shape, device = arguments.shape("shape", shape), arguments.device("device", device)
        return Element(self, batch_shape=shape, device=device, dtype=arguments.dtype("dtype", dtype))

    def sample(
        self,
        shape: Sequence[int] = (),
        spread: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Element:
        """A batch of independent elements, from PyTorch's generator: permutations and signs uniform, log-scales and
        shifts normal. (No uniform distribution exists on these.)

        :param spread: standard deviation of log-scales and shifts.
        :param device: where they are drawn, by default on the CPU; they move weights on any.
        """
        shape, device = torch.Size(arguments.shape("shape", shape)), arguments.device("device", device)
        arguments.number("spread", spread, least=0, below=math.inf)
        return sampled(self, shape, spread, device, arguments.dtype("dtype", dtype))

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

    def enumerate(self) -> Element:
        """All permutations with signs that act differently, as a batch of shape ``(order,)``; the identity comes first.

        :raises ValueError: if there are more than a million.
        """
        if self.log_order() > math.log(ENUMERATION_LIMIT) + 1e-9:
            raise ValueError(
                f"the group has exp({self.log_order():.1f}) elements; at most {ENUMERATION_LIMIT} can be enumerated"
            )
        return enumerated(self, self.independent("flip"))

    def generators(self, name: str) -> Element:
        """A cycle and an exchange in each copy of some units, which make up all permutations of theirs.

        :return: a batch ``(2 copies,)``: first those of the first copy.
        """
        return cycles_and_exchanges(self, name)

    # the same group -------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As JSON: the sites' shapes, and the units with their axes."""
        return {
            "site_shapes": {site: list(shape) for site, shape in self.site_shapes.items()},
            "units": [one.to_dict(self.site_shapes) for one in self._units.values()],
            "of_network": self.of_network,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Group:
        """The inverse of :meth:`to_dict`."""
        arguments.entries("data", data, ("site_shapes", "units", "of_network"))
        shapes = {site: torch.Size(shape) for site, shape in data["site_shapes"].items()}
        return cls((Units.from_dict(one, shapes) for one in data["units"]), shapes, (), data["of_network"])

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
        if not self._units:
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
            f"{name} is {arguments.shown(symmetry)}; it must be a Group or a Symmetry, e.g. find_symmetry(net, x) or "
            "Group.declare(...)"
        )
    return group
