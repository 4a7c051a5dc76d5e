"""Knowledge of the other sets of units when one set is matched, and entries of a site with those sets in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pyro_symmetric.distributions.unit_sets import Member, UnitAxis
from pyro_symmetric.groups.tensors import along_axis, lay_out, lift, permute_axes
from pyro_symmetric.groups.units import Axis


@dataclass(frozen=True, eq=False)
class Drawn:
    """Drawn moves of one set of units.

    :param images: LongTensor ``(L, N, count)``: the unit of the same copy that comes to each place, numbered through
        all copies, before what lies outside moves; None if none moves.
    :param signs: of each unit, before it moves, ``(L, N, count)``; None if it has none.
    """

    images: Tensor | None
    signs: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Expected:
    """Expectations of one set of units that isn't drawn yet.

    :param matrix: ``(L, N, count, count)``: probabilities that a place receives a unit, whatever moves outside.
    :param sign: the expected sign of the unit, if it comes to the place, likewise; None if units have none.
    """

    matrix: Tensor
    sign: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Placements:
    """Knowledge of other sets.

    :param drawn: moves of sets that are drawn already.
    :param expected: what to expect of sets still to come.
    :param assumed: signs that all units of a set are taken to have while a sum over both is made.
    """

    drawn: Mapping[str, Drawn] = field(default_factory=dict)
    expected: Mapping[str, Expected] = field(default_factory=dict)
    assumed: Mapping[str, float] = field(default_factory=dict)

    def assuming(self, name: str, sign: float) -> Placements:
        """The same with a sign for all units of a set."""
        return replace(self, assumed={**self.assumed, name: sign})

    def tell(self, axis: UnitAxis) -> bool:
        """True if all else that moves the entries of these units is placed, so that they count."""
        return self._all_drawn(axis.beside) and all(
            self._all_drawn(members) or self._all_expected(members) for members in axis.across
        )

    def placed(self, value: Tensor, axis: UnitAxis, signed: bool) -> Tensor:
        """A site's features, ``(L, N, *site)``, with all other units where they are drawn, or averaged over.

        :param signed: whether the features change their sign with the entries.
        """
        for member in axis.around if signed else ():
            value = self._flipped(value, member)
        for members in (axis.beside, *axis.across):
            for member in members:
                if self._all_drawn(members):
                    drawn = self.drawn[member.name]
                    value = _moved(value, member.axis, drawn.images, drawn.signs if signed and member.flips else None)
                elif member.own is not None:
                    value = self._averaged(value, member.own, member, signed)
        return value

    def _all_drawn(self, members: Sequence[Member]) -> bool:
        return all(member.name in self.drawn for member in members)

    def _all_expected(self, members: Sequence[Member]) -> bool:
        """True if each position may be averaged over: all sets have expectations, and no two hold it."""
        own = [member.own.index.reshape(-1) for member in members if member.own is not None]
        crossed = len(own) > 1 and sum(map(len, own)) > len(torch.cat(own).unique())
        return not crossed and all(member.name in self.expected for member in members)

    def _flipped(self, value: Tensor, member: Member) -> Tensor:
        """Features with the signs of units around: drawn, assumed, or open, so that they average out."""
        if member.name in self.drawn:
            return _moved(value, member.axis, None, self.drawn[member.name].signs)
        sign = self.assumed.get(member.name, 0.0)
        if sign == 1.0:
            return value
        return _moved(value, member.axis, None, value.new_full((1, 1, member.axis.index.shape[1]), sign))

    def _averaged(self, value: Tensor, own: Axis, member: Member, signed: bool) -> Tensor:
        """Features averaged over the units that may come to each place, with their expected signs."""
        matrix = self.expected[member.name].matrix
        for name in member.flipping if signed else ():
            sign = self.expected[name].sign
            assert sign is not None
            inside = matrix.shape[-1] // sign.shape[-1]
            matrix = matrix * sign.repeat_interleave(inside, -1).repeat_interleave(inside, -2)
        dim, positions = own.dim + 2, own.index.reshape(-1)
        filled = own.fills(value.shape[dim])
        units = value if filled else value.index_select(dim, positions)
        units = units.unflatten(dim, own.index.shape).movedim(dim + 1, -1)
        mixed = units.flatten(2, -2) @ matrix.mT.to(units.dtype)  # a neighbour may have been matched in float64
        mixed = mixed.reshape(*mixed.shape[:2], *units.shape[2:]).movedim(-1, dim + 1).flatten(dim, dim + 1)
        if filled:
            return mixed
        whole = value.expand(*mixed.shape[:2], *value.shape[2:]).clone()
        return whole.index_copy_(dim, positions, mixed)


# small steps --------------------------------------------------------------------------------------------------------


def _moved(value: Tensor, axis: Axis, images: Tensor | None, signs: Tensor | None) -> Tensor:
    """Features with units flipped, and then in other places."""
    site_dims, length = value.dim() - 2, value.shape[axis.dim + 2]
    plain = axis.fills(length)
    if signs is not None:
        along = signs if plain else lay_out(signs, axis.index, 1.0, length)
        value = value * along_axis(along.to(value.dtype), axis.dim, site_dims)
    if images is not None:
        positions = images if plain else lift([(images, axis.index)], length)
        value = permute_axes(value, {axis.dim: positions}, site_dims)
    return value
