r"""How permutations carry signs: :math:`p^{-1} \sigma p = \sigma'` with :math:`\sigma'_u = \sigma_{p^{-1}(u)}`.

Units of signs and units of permutations are declared apart, by the positions that they occupy on axes of sites; here
it is read off those positions which flipped unit a permutation puts in the place of which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric.symmetry.factored import gather_last
from pyro_symmetric.symmetry.permutation import Permutation, PermutationGroup
from pyro_symmetric.symmetry.rescaling import Sign, SignGroup


class SignCarrier:
    """Conjugates signs by permutations.

    :raises ValueError: if the permutations tear the units of a sign factor apart, so that both together are no group.
    """

    def __init__(self, permutations: PermutationGroup, signs: SignGroup):
        self.permutations, self.signs = permutations, signs
        self._places = _unit_places(signs)
        self._require_normal()

    def __call__(self, sign: Sign, permutation: Permutation) -> Sign:
        r""":math:`p^{-1} \sigma p`, which is a sign again; batch shapes broadcast."""
        names = list(self.signs.factors)
        if not names:
            return sign
        sizes = [self.signs.factors[name] for name in names]
        images = [sign.images[name].expand(*sign.batch_shape, size) for name, size in zip(names, sizes, strict=True)]
        moved = gather_last(torch.cat(images, -1), self.unit_index(permutation.inverse()).to(images[0].device))
        return Sign(self.signs, dict(zip(names, moved.split(sizes, -1), strict=True)))

    def unit_index(self, permutation: Permutation) -> Tensor:
        """LongTensor ``batch_shape + (N,)``: unit ``u`` of all signs receives what unit ``index[u]`` had."""
        parts = [place.unit_index(permutation) for place in self._places]
        shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts)) if parts else torch.Size()
        device = parts[0].device if parts else None
        empty = torch.zeros((*shape, 0), dtype=torch.long, device=device)
        return torch.cat([empty, *(part.expand(*shape, part.shape[-1]) for part in parts)], -1)

    def _require_normal(self) -> None:
        """Exchanges must carry each flipped unit, with all its positions, onto one other flipped unit."""
        if not self.signs.factors or not self.permutations.factors:
            return
        if all(self._carries(element) for element in _generators(self.permutations, list(self.permutations.factors))):
            return
        guilty = [
            name
            for name in self.permutations.factors
            if not all(self._carries(element) for element in _generators(self.permutations, [name]))
        ]
        raise ValueError(
            f"the permutations {guilty or list(self.permutations.factors)} don't carry the units of the sign factors "
            f"{list(self.signs.factors)} onto one another, so both together are no group. The units of a sign factor "
            "must be the units that are permuted, with all their axes, or units that stay"
        )

    def _carries(self, permutation: Permutation) -> bool:
        index = self.unit_index(permutation.inverse())
        if bool((index < 0).any()):
            return False
        # Distinct numbers in place of signs tell every unit from every other.
        codes = torch.rand(index.shape[-1], dtype=torch.float64)
        for site in self.signs.sites:
            for dim in self.signs.members(site):
                before, after = (_codes_on_axis(self.signs, site, dim, c) for c in (codes, codes[index]))
                if not torch.allclose(after[permutation.axis_index(site, dim)], before, rtol=0, atol=1e-12):
                    return False
        return True


# small steps --------------------------------------------------------------------------------------------------------


class _Place:
    """One axis on which all units of a sign factor can be told apart: where to read off how a permutation moves them.

    :param table: LongTensor ``(length,)``: position -> number of the unit among those of all factors, -1 for none.
    """

    def __init__(self, site: str, dim: int, positions: Tensor, table: Tensor):
        self.site, self.dim, self.positions, self.table = site, dim, positions, table

    def unit_index(self, permutation: Permutation) -> Tensor:
        source = permutation.axis_index(self.site, self.dim)
        return self.table.to(source.device)[source[..., self.positions.to(source.device)]]


def _unit_places(signs: SignGroup) -> list[_Place]:
    offsets, total = {}, 0
    for name, n in signs.factors.items():
        offsets[name], total = total, total + n
    return [_unit_place(signs, name, offsets) for name in signs.factors]


def _unit_place(signs: SignGroup, name: str, offsets: Mapping[str, int]) -> _Place:
    for axis in signs.axes(name):
        length = signs.view_shapes[axis.site][axis.dim]
        table, covered = torch.full((length,), -1), torch.zeros(length, dtype=torch.long)
        for other, member in signs.members(axis.site)[axis.dim]:
            table[member.index.cpu()] = offsets[other] + torch.arange(member.index.shape[1])
            covered[member.index.cpu().reshape(-1)] += 1
        positions = axis.index[0].cpu()
        if bool((covered[positions] == 1).all()):
            return _Place(axis.site, axis.dim, positions, table)
    raise ValueError(
        f"the units of the sign factor {name!r} share every position with those of another sign factor, so that what "
        "permutations do to them can't be told; declare the signs so that each factor has an axis of its own"
    )


def _codes_on_axis(signs: SignGroup, site: str, dim: int, codes: Tensor) -> Tensor:
    """Sum of the codes of the units that flip each position, ``(length,)``."""
    total, offset = torch.zeros(signs.view_shapes[site][dim], dtype=torch.float64), {}
    start = 0
    for name, n in signs.factors.items():
        offset[name], start = start, start + n
    for name, axis in signs.members(site)[dim]:
        if axis.exponent % 2:
            own = codes[offset[name] : offset[name] + axis.index.shape[1]]
            total[axis.index.cpu()] += own.expand(axis.index.shape)
    return total


def _generators(group: PermutationGroup, names: Sequence[str]) -> list[Permutation]:
    """A cycle, and an exchange, in each of the named factors."""
    cycles = {name: torch.arange(group.factors[name]).roll(1) for name in names}
    swaps = {
        name: torch.cat([units[:2].flip(0), units[2:]])
        for name, units in ((name, torch.arange(group.factors[name])) for name in names)
    }
    return [group.element(cycles), group.element(swaps)]
