r"""Products of symmetric groups, :math:`G = S_{n_1} \times S_{n_2} \times \dots`, and how they act on weights.

One :class:`Factor` is one symmetric group :math:`S_n`, named after the units that it permutes; it lists the
:class:`Axis` objects, one for each axis of a site, along which those units lie. A :class:`Permutation` is a batch of
elements of the group. It acts by

.. math:: (p \cdot w)_i = w_{p(i)}

along every axis of its factors, so that ``(p @ r)(w) == p(r(w))`` with ``(p @ r)[i] = r[p[i]]``.

A factor may lie inside one unit of another (the rows of an attention head): then it acts first, and the group is a
wreath product; :mod:`~pyro_symmetric.symmetry.wreath` holds its algebra.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.factor import Axis, Factor
from pyro_symmetric.symmetry.factored import (
    FactoredGroup,
    acted_shape,
    declared_axes,
    gather_last,
    moved_weights,
    permute_axis,
    same_group,
    table,
)
from pyro_symmetric.symmetry.flat import FlatAction
from pyro_symmetric.symmetry.weights import Weights, shapes_of
from pyro_symmetric.symmetry.wreath import compose, families, invert

if TYPE_CHECKING:
    from pyro_symmetric.symmetry.model_check import ModelVerification

__all__ = ["Axis", "Factor", "FlatAction", "Permutation", "PermutationGroup"]

ENUMERATION_LIMIT = 1_000_000


class PermutationGroup(FactoredGroup[Factor, Axis]):
    """A product of symmetric groups that acts on weights.

    :param factors: the symmetric groups of the product. The order is the order in which alignment, enumeration and
        canonical forms visit them.
    :param site_shapes: shape of every site of the model, moved or not (without batch dimensions).
    :ivar families: the outermost factors, each with all that lies inside its units.
    """

    verb = "moves"
    factor_kind = Factor

    def __init__(
        self,
        factors: Iterable[Factor],
        site_shapes: Mapping[str, torch.Size],
        spans: Iterable[tuple[str, int, int]] = (),
    ):
        super().__init__(factors, site_shapes, spans)
        self.families = families(self._factors, self._axes)
        # Deepest factors act first; the order of the others is that in which they were given.
        for by_dim in self._members.values():
            for members in by_dim.values():
                members.sort(key=lambda member: -len(self.ancestors(member[0])))
        self._stages = {
            site: {dim: self._disjoint(members, self.view_shapes[site][dim]) for dim, members in by_dim.items()}
            for site, by_dim in self._members.items()
        }

    def _disjoint(self, members: list[tuple[str, Axis]], length: int) -> list[list[tuple[str, Axis]]]:
        """Cut the members of one axis into stages whose factors move different positions, so that they act at once."""
        stages: list[list[tuple[str, Axis]]] = []
        taken = torch.zeros(length, dtype=torch.bool)
        for name, axis in members:
            positions = axis.index.reshape(-1).cpu()
            if not stages or bool(taken[positions].any()):
                stages.append([])
                taken[:] = False
            taken[positions] = True
            stages[-1].append((name, axis))
        return stages

    @classmethod
    def declare(
        cls, axes: Mapping[str, Sequence[str | None]], example_weights: Mapping[str, Tensor | torch.Size]
    ) -> PermutationGroup:
        """Declare which axes of which sites hold exchangeable parts, for any Pyro model.

        >>> group = PermutationGroup.declare(
        ...     {"locs": ("component", None), "weights": ("component",)},
        ...     {"locs": torch.zeros(3, 2), "weights": torch.ones(3)},
        ... )
        >>> group.factors
        {'component': 3}

        :param axes: site -> for each of its axes, the name of the factor that permutes it, or ``None``.
        :param example_weights: one example (or the shape) of every site of the model, without batch dimensions.
        """
        shapes = shapes_of(example_weights)
        factors = []
        for name, (n, members) in declared_axes(axes, shapes).items():
            factors.append(Factor(name, n, tuple(Axis(site, dim, torch.arange(n)[None]) for site, dim in members)))
        return cls(factors, shapes)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: the sites' shapes and the factors with their axes."""
        return {
            "site_shapes": {site: list(shape) for site, shape in self.site_shapes.items()},
            "factors": [factor.to_dict(self.site_shapes) for factor in self._factors.values()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PermutationGroup:
        """The inverse of :meth:`to_dict`."""
        arguments.entries("data", data, ("site_shapes", "factors"))
        shapes = {site: torch.Size(shape) for site, shape in data["site_shapes"].items()}
        return cls((Factor.from_dict(factor, shapes) for factor in data["factors"]), shapes)

    # what the group is ----------------------------------------------------------------------------------------------

    def children(self, name: str) -> tuple[str, ...]:
        """The factors that lie inside the units of this one, in the group's order."""
        self.factor(name)
        return tuple(other for other, factor in self._factors.items() if factor.parent == name)

    def ancestors(self, name: str) -> tuple[str, ...]:
        """The factors that this one lies inside of, the nearest first; none for most."""
        parent = self.factor(name).parent
        return () if parent is None else (parent, *self.ancestors(parent))

    def stages(self, site: str, dim: int) -> list[list[tuple[str, Axis]]]:
        """The members of a viewed axis in the order of acting; those of one stage move different positions."""
        return self._stages.get(site, {}).get(dim, [])

    def order(self) -> int:
        """The number of elements of the group, exactly."""
        return math.prod(math.factorial(n) for n in self.factors.values())

    def log_order(self) -> float:
        """Natural logarithm of the number of elements."""
        return sum(math.lgamma(n + 1) for n in self.factors.values())

    def __repr__(self) -> str:
        if not self._factors:
            return "PermutationGroup(trivial)"
        rows = [("factor", "size", "axes")]

        def add(names: tuple[str, ...], depth: int) -> None:
            factor = self._factors[names[0]]
            times = f" (and {len(names) - 1} alike)" if len(names) > 1 else ""
            axes = ", ".join(map(str, factor.axes))
            rows.append((f"{'  ' * depth}{factor.name}{times}", str(factor.size), axes))

        for tree in self.families:
            pending = [(tree, 0)]
            while pending:
                family, depth = pending.pop()
                add(family.names, depth)
                pending += [(inner, depth + 1) for inner in reversed(family.inner)]
        return "\n".join([f"PermutationGroup of log-order {self.log_order():.1f}", *table(rows)])

    # its elements ---------------------------------------------------------------------------------------------------

    def identity(self, shape: Sequence[int] = (), device: torch.device | str | None = None) -> Permutation:
        """The neutral element, as a batch of the given shape."""
        shape, device = arguments.shape("shape", shape), arguments.device("device", device)
        return Permutation(
            self, {name: torch.arange(n, device=device).expand(*shape, n) for name, n in self.factors.items()}
        )

    def sample(self, shape: Sequence[int] = (), device: torch.device | str | None = None) -> Permutation:
        """A batch of uniform, independent elements, from PyTorch's generator."""
        shape, device = arguments.shape("shape", shape), arguments.device("device", device)
        # Sorting uniform keys gives uniform permutations up to ties; float64 keys make ties too rare to matter.
        return Permutation(
            self,
            {
                name: torch.rand(*shape, n, dtype=torch.float64, device=device).argsort(-1)
                for name, n in self.factors.items()
            },
        )

    def element(self, images: Mapping[str, Tensor | Sequence[int]]) -> Permutation:
        """A given element or batch of elements; factors that are left out stay at the identity.

        :param images: factor -> integers of shape ``batch_shape + (n,)``, each row a permutation of ``0 .. n-1``.
        :raises ValueError: if a factor is unknown or a row is no permutation.
        """
        self.require_factors(images)
        checked = {name: _checked_images(name, n, images[name]) for name, n in self.factors.items() if name in images}
        shape = torch.broadcast_shapes(*(value.shape[:-1] for value in checked.values())) if checked else torch.Size()
        device = next(iter(checked.values())).device if checked else None
        return Permutation(
            self,
            {
                name: checked.get(name, torch.arange(n, device=device)).expand(*shape, n)
                for name, n in self.factors.items()
            },
        )

    def enumerate(self) -> Permutation:
        """All elements, as one batch of shape ``(order,)`` that starts with the identity.

        :raises ValueError: if there are more than a million.
        """
        if self.order() > ENUMERATION_LIMIT:
            raise ValueError(
                f"the group has exp({self.log_order():.1f}) elements; at most {ENUMERATION_LIMIT} can be enumerated"
            )
        tables = {name: torch.tensor(list(itertools.permutations(range(n)))) for name, n in self.factors.items()}
        grids = torch.meshgrid(*(torch.arange(len(t)) for t in tables.values()), indexing="ij") if tables else ()
        return Permutation(
            self, {name: table[grid.reshape(-1)] for (name, table), grid in zip(tables.items(), grids, strict=True)}
        )

    def flat(self, sites: Sequence[str]) -> FlatAction:
        """The action on vectors that concatenate ``sites`` in this order."""
        return FlatAction(self, sites)

    def verify(self, model: Callable[..., Any], *args: Any, **kwargs: Any) -> ModelVerification:
        """Check that a Pyro model is invariant under the group; see
        :func:`~pyro_symmetric.symmetry.model_check.verify_model`."""
        from pyro_symmetric.symmetry.model_check import verify_model

        return verify_model(self, model, *args, **kwargs)


class Permutation:
    """A batch of elements of a :class:`PermutationGroup`; the group's ``sample`` and ``element`` build them.

    ``p(weights)`` acts, ``p @ r`` composes (``(p @ r)(w) == p(r(w))``), ``p.inverse()`` inverts, ``p["hidden.0"]`` is
    the LongTensor ``batch_shape + (n,)`` of one factor. Batch shapes of elements and weights broadcast.
    """

    def __init__(self, group: PermutationGroup, images: Mapping[str, Tensor]):
        self.group = arguments.instance("group", group, PermutationGroup, "a PermutationGroup")
        self.images = dict(images)
        shapes = {value.shape[:-1] for value in self.images.values()}
        self.batch_shape = torch.broadcast_shapes(*shapes) if shapes else torch.Size()

    def __getitem__(self, factor: str) -> Tensor:
        self.group.factor(factor)
        return self.images[factor]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}: {n}" for name, n in self.group.factors.items())
        return f"Permutation(batch_shape={tuple(self.batch_shape)}, {sizes})"

    def to(self, device: torch.device | str) -> Permutation:
        """The same element on another device."""
        arguments.device("device", device)
        return Permutation(self.group, {name: value.to(device) for name, value in self.images.items()})

    def select(self, index: int | slice | Tensor | tuple[slice | None, ...]) -> Permutation:
        """Index the batch: ``p.select(0)`` is the first element."""
        return Permutation(self.group, {name: value[index] for name, value in self.images.items()})

    # algebra --------------------------------------------------------------------------------------------------------

    def inverse(self) -> Permutation:
        """The element with ``p.inverse() @ p`` the identity."""
        images: dict[str, Tensor] = {}
        for tree in self.group.families:
            if tree.inner:
                images |= invert(tree, self._expanded(self.batch_shape))
            else:
                images[tree.names[0]] = self.images[tree.names[0]].argsort(-1)
        return Permutation(self.group, {name: images[name] for name in self.group.factors})

    def __matmul__(self, other: Permutation) -> Permutation:
        if not isinstance(other, Permutation):
            return NotImplemented
        same_group(self.group, other.group)
        shape = torch.broadcast_shapes(self.batch_shape, other.batch_shape)
        mine = self._expanded(shape)
        theirs = {name: value.to(mine[name].device) for name, value in other._expanded(shape).items()}
        images: dict[str, Tensor] = {}
        for tree in self.group.families:
            if tree.inner:
                images |= compose(tree, mine, theirs)
            else:
                images[tree.names[0]] = theirs[tree.names[0]].gather(-1, mine[tree.names[0]])
        return Permutation(self.group, {name: images[name] for name in self.group.factors})

    def _expanded(self, shape: Sequence[int]) -> dict[str, Tensor]:
        return {name: value.expand(*shape, value.shape[-1]) for name, value in self.images.items()}

    def equal(self, other: Permutation) -> bool:
        """Whether both are the same elements."""
        arguments.instance("other", other, Permutation, "a Permutation")
        return self.group.factors == other.group.factors and all(
            torch.equal(value, other.images[name].to(value.device)) for name, value in self.images.items()
        )

    # action ---------------------------------------------------------------------------------------------------------

    def axis_index(self, site: str, dim: int) -> Tensor:
        """LongTensor ``batch_shape + (length,)``: position ``i`` of this axis receives what was at ``index[i]``.

        :param dim: the axis, counted in the group's view of the site, see ``group.view``.
        """
        length = self.group.view_shapes[site][dim]
        full: Tensor | None = None
        for stage in self.group.stages(site, dim):
            step = _axis_step([(self.images[name], axis.index) for name, axis in stage], length)
            full = step if full is None else gather_last(full, step)
        return torch.arange(length) if full is None else full

    def __call__(self, weights: Mapping[str, Tensor]) -> Weights:
        """Act on weights: ``batch_shape`` of the result is that of the element and of the weights, broadcast.

        Sites that the group doesn't move are passed on, expanded to the same batch shape.
        """
        return moved_weights(self, weights, acted_shape(self.group, weights))

    def moved(self, site: str, value: Tensor) -> Tensor:
        """Act on one site alone; batch shapes broadcast."""
        viewed = self.group.view(site, value)
        for dim in self.group.members(site):
            index = self.axis_index(site, dim).to(value.device)
            viewed = permute_axis(viewed, dim, len(self.group.view_shapes[site]), index)
        return self.group.view_back(site, viewed)


# small steps --------------------------------------------------------------------------------------------------------


def _checked_images(name: str, n: int, images: Tensor | Sequence[int]) -> Tensor:
    value = arguments.numbers(f"element[{name!r}]", images)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        raise ValueError(f"element[{name!r}] has dtype {value.dtype}; it must hold integers")
    if value.dim() < 1 or value.shape[-1] != n:
        raise ValueError(f"element[{name!r}] has shape {tuple(value.shape)}; its last axis must be {n} long")
    value = value.long()
    is_permutation = (value.sort(-1).values == torch.arange(n, device=value.device)).all(-1)
    if not bool(is_permutation.all()):
        bad = value.reshape(-1, n)[~is_permutation.reshape(-1)][0]
        raise ValueError(f"element[{name!r}] is no permutation of 0 .. {n - 1}: {bad.tolist()}")
    return value


def _axis_step(moves: Sequence[tuple[Tensor, Tensor]], length: int) -> Tensor:
    """Lift permutations of units to the positions of an axis, by their (blocks, n) index maps, which don't overlap."""
    images, index = moves[0]
    if index.shape == (1, length) and bool((index[0] == torch.arange(length, device=index.device)).all()):
        return images
    batch = torch.broadcast_shapes(*(images.shape[:-1] for images, _ in moves))
    full = torch.arange(length, device=images.device).expand(*batch, length).clone()
    for images, index in moves:
        index = index.to(images.device)
        moved = index[:, images].movedim(0, -2)  # batch + (blocks, n): where each position's new occupant comes from
        full[..., index.reshape(-1)] = moved.flatten(-2)
    return full
