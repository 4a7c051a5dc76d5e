"""Which units mix: those between linear maps alone, for which any invertible linear map of them is a symmetry.

Units that permute, flip and scale wherever they lie are proposed; a random linear map of all of them decides, in the
outputs of the network itself. (Rotary positions, normalised queries, gates, a product entry by entry break it.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pyro_symmetric.discovery.invariance import Part, guilty
from pyro_symmetric.discovery.outputs import Outputs
from pyro_symmetric.groups import Group
from pyro_symmetric.groups.mixing import mixed


def mixing_units(group: Group, outputs: Outputs) -> list[str]:
    """The names of the units that mix."""
    proposed = [name for name in group.names("permute") if _may_mix(group, name)]
    broken = broken_mixes(group, outputs, proposed)
    return [name for name in proposed if name not in broken]


def broken_mixes(group: Group, outputs: Outputs, names: Sequence[str]) -> dict[str, float]:
    """Of units those whose random linear maps change the outputs, with the change, relative to the largest output."""

    def change(chosen: Sequence[Part]) -> float:
        weights = {site: value.detach() for site, value in outputs.origin.items()}
        for _, name in chosen:
            one = group[name]
            matrix = torch.randn(one.copies, one.size, one.size, dtype=torch.float64, device=outputs.device)
            weights = mixed(group, name, weights, torch.linalg.qr(matrix).Q * (1 + torch.rand_like(matrix[..., :1, :])))
        return outputs.error_at(weights)

    def fails(chosen: Sequence[Part]) -> bool:
        return not change(chosen) < outputs.tolerance

    parts: list[Part] = [("mix", name) for name in names]
    found = guilty(parts, fails) if parts and fails(parts) else []
    return {name: change([(move, name)]) for move, name in found}


def _may_mix(group: Group, name: str) -> bool:
    """True if all that lies along some units is rows of matrices, biases, and columns of what reads them."""
    one = group[name]
    if one.size < 2 or not {"permute", "flip", "scale"} <= one.moves or group.children(name):
        return False
    if any(abs(axis.exponent) != 1 or axis.buffer or axis.epsilon is not None for axis in one.axes):
        return False
    vectors = {axis.site for axis in one.axes if len(group.site_shapes[axis.site]) == 1}
    exponents = {axis.exponent for axis in one.axes if axis.site not in vectors}
    return len(exponents) == 2 and vectors.isdisjoint(group.weight_sites)
