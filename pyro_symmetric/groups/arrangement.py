"""Index from axes of sites to units: what a group and its elements read off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from pyro_symmetric.groups.units import MOVES, Axis, Move, Units
from pyro_symmetric.groups.views import views_of
from pyro_symmetric.weights import Weights, batch_shape, is_bias, require_same_network, require_sites


class Arrangement:
    """Units and the axes along which they lie, without the elements that move them.

    If an axis spans several axes of its site, these are flattened for all that acts there: :meth:`view` reshapes so,
    :attr:`view_shapes` are the shapes, and :meth:`members` and :meth:`axes` count axes in this view. All other sites
    are viewed as they are.

    :ivar site_shapes: shape of every site of the model, touched or not (without batch dimensions).
    :ivar spans: the axes ``(site, dim, span)`` that are flattened in the view.
    :ivar of_network: whether the sites are all parameters of a network; a model may have others.
    """

    def __init__(
        self,
        units: Iterable[Units],
        site_shapes: Mapping[str, torch.Size],
        spans: Iterable[tuple[str, int, int]] = (),
        of_network: bool = False,
    ):
        self.site_shapes, self.of_network = dict(site_shapes), of_network
        self._units = _outer_first(units)
        every = [axis for one in self._units.values() for axis in one.axes]
        self.spans = frozenset(spans) | {(axis.site, axis.dim, axis.span) for axis in every if axis.span > 1}
        self._views = views_of(self.spans, self.site_shapes)
        self.view_shapes = {
            site: self._views[site].shape if site in self._views else shape for site, shape in self.site_shapes.items()
        }
        self._axes: dict[str, tuple[Axis, ...]] = {}
        self._members: dict[str, dict[int, list[tuple[str, Axis]]]] = {}
        for name, one in self._units.items():
            self._axes[name] = tuple(
                self._views[axis.site].lift(axis) if axis.site in self._views else axis for axis in one.axes
            )
            for axis in self._axes[name]:
                self._members.setdefault(axis.site, {}).setdefault(axis.dim, []).append((name, axis))
        # What lies deepest acts first; the order of the others is that in which they were given.
        for by_dim in self._members.values():
            for members in by_dim.values():
                members.sort(key=lambda member: -len(self.ancestors(member[0])))
        self._stages: dict[tuple[str, int], list[list[tuple[str, Axis]]]] = {}

    # the units ------------------------------------------------------------------------------------------------------

    @property
    def units(self) -> dict[str, Units]:
        """The units by name, outer ones before what lies inside them."""
        return dict(self._units)

    def __getitem__(self, name: str) -> Units:
        if name not in self._units:
            raise ValueError(f"the group has no units {name!r}; it has {list(self._units)}")
        return self._units[name]

    @property
    def factors(self) -> dict[str, int]:
        """Name of the units -> their number, in one copy if they lie inside others."""
        return {name: one.size for name, one in self._units.items() if one.moves}

    def names(self, move: Move) -> tuple[str, ...]:
        """The units that admit a move."""
        return self._by_move.get(move, ())

    @cached_property
    def _by_move(self) -> dict[Move, tuple[str, ...]]:
        return {move: tuple(name for name, one in self._units.items() if move in one.moves) for move in MOVES}

    @property
    def moves(self) -> frozenset[Move]:
        """All moves that some units admit."""
        return frozenset().union(*(one.moves for one in self._units.values()))

    @property
    def roots(self) -> tuple[str, ...]:
        """The units that lie inside no others."""
        return tuple(name for name, one in self._units.items() if one.parent is None)

    def children(self, name: str) -> tuple[str, ...]:
        """The units that lie inside these, in the group's order."""
        self[name]
        return tuple(other for other, one in self._units.items() if one.parent == name)

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
        return tuple(
            site
            for site, by_dim in self._members.items()
            if not all(axis.buffer for members in by_dim.values() for _, axis in members)
        )

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers (running statistics) that the group acts on."""
        required = self.required_sites
        return tuple(site for site in self.sites if site not in required)

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
        axes = [axis for members in self.members(site).values() for _, axis in members]
        if is_bias(site) or any(axis.buffer for axis in axes):
            return False
        many = len(self.site_shapes[site]) >= 2
        return many or site.endswith("weight") or any(axis.exponent < 0 for axis in axes)

    def epsilon(self, site: str) -> float:
        """The summand that is added to a site's values before they are multiplied, and subtracted afterwards."""
        axes = (axis for members in self.members(site).values() for _, axis in members)
        return next((axis.epsilon for axis in axes if axis.exponent and axis.epsilon is not None), 0.0)

    def members(self, site: str) -> dict[int, list[tuple[str, Axis]]]:
        """For each axis of a viewed site that the group acts on: (name, axis) pairs, in the order of acting."""
        return self._members.get(site, {})

    def dims(self, site: str) -> tuple[int, ...]:
        """The axes of a site itself, rather than of its view, that the group acts on."""
        axes = (axis for one in self._units.values() for axis in one.axes if axis.site == site)
        return tuple(sorted({dim for axis in axes for dim in range(axis.dim, axis.dim + axis.span)}))

    def axes(self, name: str) -> tuple[Axis, ...]:
        """The axes of some units in the view, in the order of ``group[name].axes``."""
        self[name]
        return self._axes[name]

    def stages(self, site: str, dim: int) -> list[list[tuple[str, Axis]]]:
        """The permuted units on a viewed axis, in the order of acting; those of one stage have different positions."""
        if (site, dim) not in self._stages:
            stages: list[list[tuple[str, Axis]]] = []
            taken = torch.zeros(self.view_shapes[site][dim], dtype=torch.bool, device="cpu")
            for name, axis in self.members(site).get(dim, []):
                positions = axis.index.reshape(-1).cpu()
                if "permute" not in self[name].moves:
                    continue
                if not stages or bool(taken[positions].any()):
                    stages.append([])
                    taken[:] = False
                taken[positions] = True
                stages[-1].append((name, axis))
            self._stages[site, dim] = stages
        return self._stages[site, dim]

    def view(self, site: str, value: Tensor) -> Tensor:
        """A site, ``batch_shape + site_shape``, with the axes flattened that some axis spans."""
        if site not in self._views:
            return value
        return value.reshape((*value.shape[: value.dim() - len(self.site_shapes[site])], *self.view_shapes[site]))

    def view_back(self, site: str, value: Tensor) -> Tensor:
        """The inverse of :meth:`view`."""
        if site not in self._views:
            return value
        return value.reshape((*value.shape[: value.dim() - len(self.view_shapes[site])], *self.site_shapes[site]))

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


# small steps --------------------------------------------------------------------------------------------------------


def _outer_first(units: Iterable[Units]) -> dict[str, Units]:
    """Units by name, in the given order, but each after its parent."""
    given: dict[str, Units] = {}
    for one in units:
        if one.name in given:
            raise ValueError(f"two sets of units are called {one.name!r}; each needs a name of its own")
        given[one.name] = one
    ordered: dict[str, Units] = {}

    def visit(one: Units, below: tuple[str, ...]) -> None:
        if one.name in below:
            raise ValueError(f"the units {list(below)} lie inside one another in a circle")
        if one.parent is not None and one.parent not in ordered:
            if one.parent not in given:
                raise ValueError(f"the units {one.name!r} lie in {one.parent!r}, but the units are {list(given)}")
            visit(given[one.parent], (*below, one.name))
        if one.parent is not None and ordered[one.parent].count != one.copies:
            raise ValueError(
                f"there are {one.copies} copies of the units {one.name!r}; there must be one in each of the "
                f"{ordered[one.parent].count} units of {one.parent!r}"
            )
        ordered.setdefault(one.name, one)

    for one in given.values():
        visit(one, ())
    return ordered
