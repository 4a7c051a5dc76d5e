"""What all groups of the library share: factors, and the axes of sites along which their units lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.view import AnyAxis, length_of, stretch, views_of
from pyro_symmetric.symmetry.weights import Weights, batch_shape, require_same_network, require_sites, shapes_of


class AnyFactor(Protocol):
    """A named set of units with the axes along which they lie: see ``Factor`` and ``RescalingFactor``."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def axes(self) -> Sequence[Any]: ...


F = TypeVar("F", bound=AnyFactor)
A = TypeVar("A", bound=AnyAxis)


class FactoredGroup(Generic[F, A]):
    """A product of groups, one for each factor, that act on axes of sites.

    Where an axis spans several axes of its site, these are flattened for all that acts there: :meth:`view` reshapes
    so, :attr:`view_shapes` are the shapes, and :meth:`members` and :meth:`axes` count axes in this view. All other
    sites are viewed as they are.

    :param factors: the factors of the product; their order is the order in which they are visited everywhere.
    :param site_shapes: shape of every site of the model, touched or not (without batch dimensions).
    :param spans: further axes ``(site, dim, span)`` to flatten in the view, so that several groups have the same one.
    :raises ValueError: if two factors share a name, or an axis doesn't fit its site.
    """

    verb = "moves"
    factor_kind: type = object

    def __init__(
        self, factors: Iterable[F], site_shapes: Mapping[str, torch.Size], spans: Iterable[tuple[str, int, int]] = ()
    ):
        self._factors: dict[str, F] = {}
        self.site_shapes = shapes_of(site_shapes, "site_shapes")
        for factor in arguments.listed("factors", factors, self.factor_kind, "factors, each with its axes"):
            if factor.name in self._factors:
                raise ValueError(f"two factors are called {factor.name!r}; every factor needs a name of its own")
            self._factors[factor.name] = factor
            for axis in factor.axes:
                self._check_axis(factor.name, axis)
        every = [axis for factor in self._factors.values() for axis in factor.axes]
        self.spans = frozenset(spans) | {(axis.site, axis.dim, axis.span) for axis in every if axis.span > 1}
        self._views = views_of(self.spans, self.site_shapes)
        self.view_shapes = {
            site: self._views[site].shape if site in self._views else shape for site, shape in self.site_shapes.items()
        }
        self._axes: dict[str, tuple[A, ...]] = {}
        self._members: dict[str, dict[int, list[tuple[str, A]]]] = {}
        for name, factor in self._factors.items():
            self._axes[name] = tuple(
                self._views[axis.site].lift(axis) if axis.site in self._views else axis for axis in factor.axes
            )
            for axis in self._axes[name]:
                self._members.setdefault(axis.site, {}).setdefault(axis.dim, []).append((name, axis))

    def _check_axis(self, name: str, axis: A) -> None:
        dims = f"axis {axis.dim}" if axis.span == 1 else f"axes {axis.dim} to {axis.dim + axis.span - 1}"
        where = f"factor {name!r} {self.verb} {dims} of {axis.site!r}"
        if axis.site not in self.site_shapes:
            raise ValueError(f"{where}, but the known sites are {sorted(self.site_shapes)}")
        shape = self.site_shapes[axis.site]
        if not (axis.span >= 1 and 0 <= axis.dim <= axis.dim + axis.span - 1 < len(shape)):
            raise ValueError(f"{where}, but that site has shape {tuple(shape)}")
        length = length_of(axis, self.site_shapes)
        if axis.index.numel() and not 0 <= int(axis.index.min()) <= int(axis.index.max()) < length:
            raise ValueError(f"{where}, whose length is {length}, but its index reaches outside")
        if axis.index.unique().numel() != axis.index.numel():
            raise ValueError(f"{where}, but its index names a position twice")

    def over(self, site_shapes: Mapping[str, torch.Size], spans: Iterable[tuple[str, int, int]] = ()) -> Self:
        """The same factors, for a model with these sites, flattening these axes, too, in the view."""
        return type(self)(self._factors.values(), site_shapes, spans)

    @property
    def factors(self) -> dict[str, int]:
        """Factor name -> number of its units."""
        return {name: factor.size for name, factor in self._factors.items()}

    def factor(self, name: str) -> F:
        """The factor of that name, with its axes."""
        if name not in self._factors:
            raise ValueError(f"the group has no factor {name!r}; its factors are {list(self._factors)}")
        return self._factors[name]

    def require_factors(self, names: Iterable[str]) -> None:
        """:raises ValueError: if the group lacks one of the factors."""
        arguments.mapping("images", names, "factor -> its element")
        unknown = [name for name in names if name not in self._factors]
        if unknown:
            raise ValueError(f"the group has no factors {unknown}; its factors are {list(self._factors)}")

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that the group acts on, buffers included."""
        return tuple(self._members)

    @property
    def required_sites(self) -> tuple[str, ...]:
        """The sites that weights must hold to be acted on: those of the factors, without buffers."""
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

    def leaving(self, sites: Iterable[str]) -> Self:
        """The same factors without their axes along ``sites``, of which the group then knows nothing."""
        left = set(sites) & set(self.site_shapes)
        if not left:
            return self
        factors = [
            replace(factor, axes=tuple(axis for axis in factor.axes if axis.site not in left))  # type: ignore[type-var]
            for factor in self._factors.values()
        ]
        shapes = {site: shape for site, shape in self.site_shapes.items() if site not in left}
        return type(self)(factors, shapes, (span for span in self.spans if span[0] not in left))

    def without_buffers(self) -> Self:
        """The same factors acting on parameters alone; buffers (running statistics) stay as they are.

        That changes what a network computes, unless buffers have the same values for all units: it serves to compare
        weights, and where the invariance of a density is checked by itself.
        """
        return self.leaving(self.buffers)

    def members(self, site: str) -> dict[int, list[tuple[str, A]]]:
        """For each axis of a viewed site that the group acts on: (factor name, axis) pairs, in the order of acting."""
        return self._members.get(site, {})

    def dims(self, site: str) -> tuple[int, ...]:
        """The axes of a site itself, rather than of its view, that the group acts on."""
        axes = (axis for factor in self._factors.values() for axis in factor.axes if axis.site == site)
        return tuple(sorted({dim for axis in axes for dim in range(axis.dim, axis.dim + axis.span)}))

    def axes(self, name: str) -> tuple[A, ...]:
        """The axes of a factor in the view, in the order of ``factor(name).axes``."""
        self.factor(name)
        return self._axes[name]

    def view(self, site: str, value: Tensor) -> Tensor:
        """A site, ``batch_shape + site_shape``, with the axes flattened that some factor's axis spans."""
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

    def batch_shape(self, weights: Mapping[str, Tensor]) -> torch.Size:
        """The batch shape of ``weights`` that are only looked at, checked against the sites' shapes."""
        require_sites(weights, self.required_sites)
        return batch_shape(weights, self.site_shapes)

    def acted_shape(self, weights: Mapping[str, Tensor]) -> torch.Size:
        """The batch shape of ``weights`` that are to be moved.

        :raises ValueError: if sites are missing, buffers included, or don't fit; if there are another network's.
        """
        arguments.weights("weights", weights)
        require_buffers(weights, self.buffers)
        require_same_network(weights, self.site_shapes)
        return self.batch_shape(weights)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, FactoredGroup)
            and type(self) is type(other)
            and self.site_shapes == other.site_shapes
            and self._signature() == other._signature()
        )

    def __hash__(self) -> int:
        return hash((tuple(self.factors.items()), tuple(sorted(self._members))))

    def _signature(self) -> list[object]:
        def plain(value: object) -> object:
            return str(value.tolist()) if isinstance(value, Tensor) else str(value)

        def fields(thing: Any) -> list[object]:
            return [plain(value) for key, value in sorted(vars(thing).items()) if key != "axes"]

        return [(fields(f), sorted(map(fields, f.axes), key=str)) for f in self._factors.values()]


def declared_axes(
    axes: Mapping[str, Sequence[str | None]], shapes: Mapping[str, torch.Size]
) -> dict[str, tuple[int, list[tuple[str, int]]]]:
    """Read a declaration: factor -> its size and the (site, dim) pairs along which its units lie.

    :param axes: site -> for each of its axes, the name of a factor, or ``None``.
    :param shapes: site -> its shape.
    :raises ValueError: if a site is unknown, an axis is left out, or the axes of one factor differ in length.
    """
    factors: dict[str, tuple[int, list[tuple[str, int]]]] = {}
    for site, names in arguments.mapping("axes", axes, "site -> the name of a factor, or None, for each axis").items():
        if site not in shapes:
            raise ValueError(f"axes declares site {site!r}, which example_weights lacks; it has {sorted(shapes)}")
        if not isinstance(names, list | tuple) or len(names) != len(shapes[site]):
            raise ValueError(
                f"axes[{site!r}] is {names!r}, but the site has shape {tuple(shapes[site])}: "
                f"name a factor or None for each of its {len(shapes[site])} axes"
            )
        for dim, name in enumerate(names):
            if name is None:
                continue
            arguments.instance(f"axes[{site!r}][{dim}]", name, str, "the name of a factor, or None")
            n = shapes[site][dim]
            size, members = factors.setdefault(name, (n, []))
            if size != n:
                raise ValueError(
                    f"factor {name!r} has size {size} in {members[0][0]!r} but axis {dim} of {site!r} "
                    f"has length {n}; the axes of one factor must be equally long"
                )
            members.append((site, dim))
    return factors


def index_to_json(axis: AnyAxis, site_shapes: Mapping[str, torch.Size]) -> list[list[int]] | None:
    """The index of an axis as lists; ``None`` where the units fill the axis in order."""
    plain = torch.arange(length_of(axis, site_shapes))[None]
    return None if torch.equal(axis.index.cpu(), plain) else axis.index.tolist()


def index_from_json(data: Mapping[str, Any], site_shapes: Mapping[str, torch.Size]) -> Tensor:
    """The inverse of :func:`index_to_json`, from the entries ``site``, ``dim``, ``span`` and ``index``."""
    if data["index"] is None:
        return torch.arange(stretch(site_shapes[data["site"]], data["dim"], data.get("span", 1)))[None]
    return torch.tensor(data["index"], dtype=torch.long)


def table(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Indented lines with aligned columns: left, right, ragged."""
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return [f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]}" for row in rows]


def require_buffers(weights: Iterable[str], buffers: Iterable[str], name: str = "weights") -> None:
    """:raises ValueError: if buffers that a group moves aren't there, so that moving the rest changes predictions."""
    missing = [site for site in buffers if site not in weights]
    if missing:
        raise ValueError(
            f"{name} holds no running statistics {missing}, which the symmetry moves along with the parameters: moved "
            "without them, the network computes something else. If they stay in the network as it is (a posterior over "
            "parameters alone), take symmetry.holding(net), which leaves them as they are; if every set of weights has "
            "its own, add them"
        )


def moved_weights(element: Any, weights: Mapping[str, Tensor], own: Sequence[int]) -> Weights:
    """All sites as an element moves them, whether or not buffers are among them; batch shapes broadcast.

    :param own: the batch shape of ``weights``.
    """
    shape = torch.broadcast_shapes(element.batch_shape, tuple(own))
    return {
        site: element.moved(site, value).expand((*shape, *value.shape[len(own) :])) for site, value in weights.items()
    }


def same_group(mine: object, other: object) -> None:
    """:raises ValueError: unless both groups are the same."""
    if mine != other:
        raise ValueError("only elements of one group compose; these belong to two different groups")


def along_axis(vector: Tensor, dim: int, site_dims: int) -> Tensor:
    """``batch + (n,)`` -> ``batch + (1, .., n, .., 1)``, lying along axis ``dim`` of a site of ``site_dims`` axes."""
    return vector.reshape(*vector.shape[:-1], *([1] * dim), vector.shape[-1], *([1] * (site_dims - 1 - dim)))


def gather_last(value: Tensor, index: Tensor) -> Tensor:
    """``value.gather(-1, index)`` with broadcasting of the leading dimensions."""
    shape = torch.broadcast_shapes(value.shape[:-1], index.shape[:-1])
    return value.expand(*shape, value.shape[-1]).gather(-1, index.expand(*shape, index.shape[-1]))


def permute_axis(value: Tensor, dim: int, site_dims: int, index: Tensor) -> Tensor:
    """Permute axis ``dim`` of ``batch + site_shape`` (a site of ``site_dims`` axes) by ``batch_p + (length,)``."""
    if index.dim() == 1:
        return value.index_select(dim - site_dims, index)
    batch = value.dim() - site_dims
    if site_dims > 1 and index.shape[:-1] == value.shape[:batch]:
        # One element for each set of weights: copying whole rows is several times faster than gathering entries.
        rows = value.movedim(batch + dim, batch)
        offsets = index.shape[-1] * torch.arange(index.shape[:-1].numel(), device=index.device).unsqueeze(-1)
        source = (index.reshape(-1, index.shape[-1]) + offsets).reshape(-1)
        moved = rows.flatten(0, batch).index_select(0, source).reshape(rows.shape)
        return moved.movedim(batch, batch + dim).contiguous()
    index = along_axis(index, dim, site_dims)
    dims = max(value.dim(), index.dim())
    value, index = (t.reshape(*([1] * (dims - t.dim())), *t.shape) for t in (value, index))
    return torch.take_along_dim(value, index, dim=dim - site_dims)
