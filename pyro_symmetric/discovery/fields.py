r"""Vector fields on weights that known families of symmetries consist of.

A field is linear in some numbers, its *raw* parameter, and gives for weights :math:`\theta` the direction in which they
move: ``E -> E @ W`` moves the rows of a matrix among one another. A family moves several sites with the same numbers,
as ``E @ W`` and ``-V @ E`` do, which leave ``V @ W`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_symmetric.discovery.parametrised import Spectral, parametrised
from pyro_symmetric.groups import Group
from pyro_symmetric.weights import Weights

Field = Callable[[Mapping[str, Tensor], Tensor], Weights]


@dataclass(frozen=True)
class Candidate:
    """A family that may leave the function alone: fields that share their numbers.

    :param name: the family in words.
    :param shape: shape of the numbers.
    :param main: moves weights with coefficient one.
    :param helpers: moves weights with some constant coefficient, which is zero if the family doesn't need it.
    :param project: from any numbers to those that the family admits.
    :param dimension: how many of the numbers are free, at most; all by default.
    """

    name: str
    shape: tuple[int, ...]
    main: Field
    helpers: tuple[Field, ...] = ()
    project: Callable[[Tensor], Tensor] = field(default=lambda raw: raw)
    dimension: int = -1

    def __post_init__(self) -> None:
        if self.dimension < 0:
            object.__setattr__(self, "dimension", math.prod(self.shape))


class Place(NamedTuple):
    """One block of units along an axis of a viewed site, or of all its axes flattened (-1): ``(copies, size)``."""

    site: str
    dim: int
    positions: Tensor
    buffer: bool
    exponent: int = 0


def places(group: Group, name: str) -> list[Place]:
    """The places of some units, block by block. One unit inside each of others counts as those."""
    one = group[name]
    parent = group[one.parent] if one.parent is not None and one.size == 1 else one
    shape = (parent.copies, parent.size)
    return [
        Place(axis.site, axis.dim, row.reshape(shape), axis.buffer, axis.exponent)
        for axis in group.axes(name)
        for row in axis.index.cpu()
    ]


class Fields:
    """Fields along the axes of a group's sites; of a weight that a parametrisation computes, along those of the weight.

    :param group: the group, whose views of sites say what an axis is.
    """

    def __init__(self, group: Group):
        self.group = group
        self.computed = {one.own: one for one in parametrised(group.plain_shapes)}
        self._beside = {site for one in self.computed.values() for site in one.beside}

    def places(self, name: str) -> list[Place]:
        """The places of some units, block by block, without what a computed weight is computed from besides."""
        return [place for place in places(self.group, name) if place.site not in self._beside]

    def whole(self) -> list[Place]:
        """Every axis of every site, as one block of units."""
        return [
            Place(site, dim, torch.arange(length, device="cpu")[None], site in self.group.buffers)
            for site, shape in self.group.view_shapes.items()
            for dim, length in enumerate(shape)
            if site not in self._beside
        ]

    def norms(self) -> Iterator[tuple[int, Field]]:
        """The count of numbers in the vectors of each spectral norm, and the field that moves them."""
        for one in self.computed.values():
            if isinstance(one, Spectral):
                yield sum(self.group.plain_shapes[site].numel() for site in one.beside), one.turned

    def stored(self, seen: Field) -> Field:
        """A field on the weights that layers multiply by, as one on the sites that are stored."""
        if not self.computed:
            return seen

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            computed = {own: one.weight(weights) for own, one in self.computed.items()}
            moved = seen({**weights, **computed}, raw)
            pieces = [self.computed[own].stored(weights, moved.pop(own)) for own in computed.keys() & moved.keys()]
            for site, value in ((site, value) for piece in pieces for site, value in piece.items()):
                moved[site] = moved[site] + value if site in moved else value
            return moved

        return along

    def mixed(
        self,
        place: Place,
        transposed: bool,
        gauge: Place | None = None,
        inverse: bool = False,
        variance: Place | None = None,
    ) -> Field:
        r"""Entries of units become sums over the units of the same copy: :math:`E w`, or :math:`E^\top w`.

        :param gauge: a vector :math:`\gamma` along the same units: :math:`\Gamma^{-1} E \Gamma w`, of what follows its
            multiplication.
        :param inverse: :math:`\Gamma E \Gamma^{-1} w`, of what is added to it.
        :param variance: a running variance; :math:`\gamma` is what a batch normalisation multiplies by then.
        """

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            matrix = self._in_gauge(weights, raw.mT if transposed != inverse else raw, gauge, variance)
            matrix = matrix.mT if inverse else matrix
            taken = self._taken(weights, place)
            return self._put(place, torch.einsum("cij,cj...->ci...", matrix, taken))

        return along

    def mixed_offset(self, place: Place, transposed: bool, gauge: Place, offset: Place, bias: str) -> Field:
        r"""The effect of :meth:`mixed` columns on an offset of the units, as a change of a bias."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            matrix = self._in_gauge(weights, raw.mT if transposed else raw, gauge)
            taken = torch.einsum("cij,cj...->ci...", matrix, self._taken(weights, place))
            beta = self._taken(weights, offset)
            return {bias: torch.einsum("ci...,ci->...", taken, beta).reshape(self.group.site_shapes[bias])}

        return along

    def _in_gauge(
        self, weights: Mapping[str, Tensor], raw: Tensor, gauge: Place | None, variance: Place | None = None
    ) -> Tensor:
        if gauge is None:
            return raw
        gamma = self._taken(weights, gauge)
        gamma = gamma if variance is None else gamma / self._deviation(weights, variance)
        return raw * gamma[:, None, :] / gamma[:, :, None]

    def along_offset(self, field: Field, bias: Place, writer: Place, centred: bool) -> Field:
        r"""Another field, of numbers times :math:`b_\perp b_\perp^\top / \lVert b_\perp \rVert^4`: their matrices move
        the part of an offset along itself that no column of a matrix writes.

        :param centred: whether the mean of the units doesn't count.
        """

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            offset = self._taken(weights, bias)[..., None]
            written = self._taken(weights, writer).reshape(*writer.positions.shape, -1)
            written = torch.cat([written, torch.ones_like(offset)], 2) if centred else written
            basis = torch.linalg.qr(written).Q
            left = offset - basis @ (basis.mT @ offset)
            return field(weights, raw[..., :1, :1] * (left @ left.mT) / (left**2).sum((-2, -1), keepdim=True) ** 2)

        return along

    def rotated(self, one: Place, other: Place) -> Field:
        """Each unit's entry at one place turns into its entry at another, by angles ``(copies, size)``."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            a, b = self._taken(weights, one), self._taken(weights, other)
            angle = raw.reshape(*raw.shape, *(1 for _ in a.shape[2:]))
            first, second = self._put(one, angle * b), self._put(other, -angle * a)
            return {one.site: first[one.site] + second[one.site]}

        return along

    def unread(
        self,
        place: Place,
        readers: Sequence[Place],
        gauge: Place | None = None,
        offset: tuple[Place, str] | None = None,
    ) -> Field:
        r"""Numbers ``(copies, size, rest)`` in the null space of what reads the units: :math:`P X, B P = 0`.

        :param gauge: a vector :math:`\gamma` along the same units: :math:`\Gamma^{-1} P X`, of what reads normalised
            units, of which others write the directions that don't count here.
        :param offset: what is added to normalised units, :math:`\beta`, and the bias that takes up what is read of it;
            the mean of units doesn't count either.
        """

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            read = torch.cat([self._taken(weights, other).reshape(*other.positions.shape, -1) for other in readers], 2)
            read = read if offset is None else read - read.mean(1, keepdim=True)
            left, values, _ = torch.linalg.svd(read, full_matrices=False)
            left = left * (values > 1e-9 * values[..., :1]).to(left)[..., None, :]
            moved = raw - left @ (left.mT @ raw)
            moved = moved if gauge is None else moved / self._taken(weights, gauge)[..., None]
            found = self._put(place, moved.reshape(*place.positions.shape, *self._taken(weights, place).shape[2:]))
            if offset is not None:
                taken_up = -torch.einsum("cir,ci->r", moved, self._taken(weights, offset[0]))
                found[offset[1]] = taken_up.reshape(self.group.site_shapes[offset[1]])
            return found

        return along

    def constant(self, place: Place) -> Field:
        """Numbers ``(copies, size)``, added to all entries of the units."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            rest = self._taken(weights, place).shape[2:]
            return self._put(place, raw.reshape(*raw.shape, *(1 for _ in rest)).expand(*raw.shape, *rest))

        return along

    def stretched(self, place: Place) -> Field:
        """Numbers ``(copies, size)`` times the entries of the units, with the epsilon that is added to them."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            taken = self._taken(weights, place) + self.group.epsilon(place.site)
            return self._put(place, raw.reshape(*raw.shape, *(1 for _ in taken.shape[2:])) * taken)

        return along

    def standardised(self, place: Place, gauge: Place, variance: Place) -> Field:
        r"""Numbers ``(copies, size)`` times :math:`\gamma / \sqrt{v + \epsilon}`."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            return self._put(place, raw * self._taken(weights, gauge) / self._deviation(weights, variance))

        return along

    def read(self, place: Place, bias: str) -> Field:
        """The effect of the readers on constants ``(copies, size)``, as a change of a bias."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            taken = self._taken(weights, place)
            return {bias: torch.einsum("ci...,ci->...", taken, raw).reshape(self.group.site_shapes[bias])}

        return along

    def weighed(self, place: Place, gauge: Place) -> Field:
        r"""Numbers ``(copies, size)`` times :math:`\sum_i \beta_i / \gamma_i`, which is what a mean of zero adds."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            return self._put(place, raw * (self._taken(weights, place) / self._taken(weights, gauge)).sum(1, True))

        return along

    def mean_read(self, place: Place, gauge: Place) -> Field:
        r"""Results of readers for numbers ``(copies, size)``, from a mean of zero: :math:`W c\, (1/\gamma)^\top`."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            read = torch.einsum("ci...,ci->c...", self._taken(weights, place), raw).flatten(1)
            moved = torch.einsum("ci,cr->cir", 1 / self._taken(weights, gauge), read)
            return self._put(place, moved.reshape(self._taken(weights, place).shape))

        return along

    def summed(self, place: Place, gauge: Place | None = None) -> Field:
        """Numbers ``(copies, rest)``, the same for all units of a copy, or divided by a vector along them."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            rest = self._taken(weights, place).shape[2:]
            ones = raw.new_ones(place.positions.shape)
            per_unit = ones if gauge is None else 1 / self._taken(weights, gauge)
            moved = torch.einsum("ci,cr->cir", per_unit, raw.reshape(len(ones), -1))
            return self._put(place, moved.reshape(*place.positions.shape, *rest))

        return along

    def summed_offset(self, bias: str, gauge: Place | None = None, offset: Place | None = None) -> Field:
        """The effect of :meth:`summed` columns on an offset of the units, or a sum of one, as a change of a bias."""

        def along(weights: Mapping[str, Tensor], raw: Tensor) -> Weights:
            own = raw.new_ones(len(raw))
            if offset is not None:
                beta = self._taken(weights, offset)
                own = (beta if gauge is None else beta / self._taken(weights, gauge)).sum(1)
            return {bias: torch.einsum("c,cr->r", own, raw.reshape(len(own), -1)).reshape(self.group.site_shapes[bias])}

        return along

    def _deviation(self, weights: Mapping[str, Tensor], variance: Place) -> Tensor:
        return (self._taken(weights, variance) + self.group.epsilon(variance.site)).sqrt()

    def _taken(self, weights: Mapping[str, Tensor], place: Place) -> Tensor:
        """Entries ``(copies, size) + rest``."""
        viewed = self.group.view(place.site, weights[place.site])
        return (viewed.flatten() if place.dim < 0 else viewed.movedim(place.dim, 0))[place.positions]

    def _put(self, place: Place, moved: Tensor) -> Weights:
        shape = self.group.view_shapes[place.site]
        flat = moved.reshape(-1, *moved.shape[2:])
        zeros = flat.new_zeros(shape.numel() if place.dim < 0 else shape[place.dim], *moved.shape[2:])
        full = zeros.index_put((place.positions.reshape(-1),), flat)
        full = full.reshape(shape) if place.dim < 0 else full.movedim(0, place.dim)
        return {place.site: self.group.view_back(place.site, full)}
