"""How the states of a batch of alignments act on sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric.alignment.parts.problem import Parts
from pyro_symmetric.alignment.parts.state import State
from pyro_symmetric.symmetry.factored import along_axis, permute_axis
from pyro_symmetric.symmetry.permutation import Permutation


class Mover:
    """Moves sites by states: multipliers first, then permutations, all of them or some."""

    def __init__(self, parts: Parts, device: torch.device | None):
        self._parts, self._device = parts, device
        self._layers: dict[tuple[str, int], list[tuple[str, Tensor, Tensor]]] = {}
        # Axes that one factor fills in order need no lookup.
        self._plain = {
            (site, dim): members[0][0]
            for site in parts.permutations.sites
            for dim, members in parts.permutations.members(site).items()
            if len(members) == 1 and _is_plain(members[0][1].index, parts.permutations.view_shapes[site][dim])
        }
        for kind, group in parts.rescalings.items():
            offsets, count = parts.offsets(kind), sum(group.factors.values())
            for site in group.sites:
                for dim, members in group.members(site).items():
                    length = group.view_shapes[site][dim]
                    unit, exponent = torch.full((length,), count), torch.zeros(length, dtype=torch.float64)
                    layers = []
                    for name, axis in members:
                        index = axis.index.cpu()
                        if bool((unit[index] < count).any()):  # two multipliers at one position: a layer each
                            layers.append((kind, unit.to(device), exponent.to(device)))
                            unit, exponent = torch.full((length,), count), torch.zeros(length, dtype=torch.float64)
                        unit[index] = offsets[name].start + torch.arange(index.shape[1])
                        exponent[index] = float(axis.exponent)
                    layers.append((kind, unit.to(device), exponent.to(device)))
                    self._layers.setdefault((site, dim), []).extend(layers)

    def moved(
        self,
        value: Tensor,
        site: str,
        state: State,
        dim: int | None = None,
        active: Sequence[str] = (),
        released: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """A site of every source, moved.

        :param value: moments ``(B, *view_shape, channels)``, the deviations (if any) in the second channel.
        :param dim: an axis on which the factors ``active`` don't act, nor the multipliers of the units ``released``
            (kind -> bool, all units of the kind and one more).
        """
        value = self._multiplied(value, site, state, dim, released or {})
        dims = value.dim() - 1
        for own, members in self._parts.permutations.members(site).items():
            held = [name for name, _ in members if own != dim or name not in active]
            if not held:
                continue
            index = self._index(site, own, state, held)
            value = permute_axis(value, own, dims, index if len(index) > 1 else index[0])
        return value

    def order(self, site: str, dim: int, state: State) -> Tensor:
        """Where each position of an axis is filled from, ``(B, length)``."""
        names = [name for name, _ in self._parts.permutations.members(site).get(dim, [])]
        return self._index(site, dim, state, names)

    def _index(self, site: str, dim: int, state: State, names: Sequence[str]) -> Tensor:
        """Where each position of an axis is filled from by these of its factors, the others left out."""
        if (site, dim) in self._plain:
            return state.images[self._plain[site, dim]]
        group = self._parts.permutations
        images = {name: state.images[name] for name in names}
        for name, _ in group.members(site).get(dim, []):
            if name not in images:
                images[name] = torch.arange(group.factors[name], device=self._device)
        index = Permutation(group, images).axis_index(site, dim)
        return index if index.dim() > 1 else index.to(self._device)[None]

    def _multiplied(
        self, value: Tensor, site: str, state: State, dim: int | None, released: Mapping[str, Tensor]
    ) -> Tensor:
        axes = [key for key in self._layers if key[0] == site]
        if not axes:
            return value
        flips: list[Tensor] = []
        for _, own in axes:
            for kind, unit, exponent in self._layers[site, own]:
                if own == dim and kind in released:
                    unit = torch.where(released[kind][unit], len(released[kind]) - 1, unit)
                # Units past the last are not multiplied.
                padded = torch.nn.functional.pad(state.multipliers[kind], (0, 1), value=float(kind == "sign"))[:, unit]
                factor = padded**exponent if kind == "sign" else (exponent * padded).exp()
                factor = along_axis(factor, own, value.dim() - 2).unsqueeze(-1).to(value)
                if kind == "sign":
                    flips.append(factor)
                else:
                    value = value * factor
        for flip in flips:
            # Signs flip means, never deviations.
            value = torch.cat([value[..., :1] * flip, value[..., 1:]], -1)
        return value


def _is_plain(index: Tensor, length: int) -> bool:
    """Whether unit ``i`` simply is position ``i``."""
    return index.shape == (1, length) and torch.equal(index[0].cpu(), torch.arange(length))
