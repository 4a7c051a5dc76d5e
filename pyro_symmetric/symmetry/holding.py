"""What is left of a network's symmetry where its running statistics stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.factored import moved_weights
from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.weight_symmetry import WeightSymmetry
from pyro_symmetric.symmetry.weights import Weights, require_sites


def holding(symmetry: WeightSymmetry, net: nn.Module | Mapping[str, Tensor]) -> WeightSymmetry:
    """The factors under which no buffer changes, acting on parameters; see :meth:`WeightSymmetry.holding`."""
    held = dict(net.named_buffers()) if isinstance(net, nn.Module) else net
    arguments.instance("net", held, Mapping, "a torch.nn.Module, or its buffers by site")
    if not symmetry.buffers:
        return symmetry
    require_sites(held, symmetry.buffers, "net")
    for site in symmetry.buffers:
        if arguments.tensor(f"net[{site!r}]", held[site]).shape != symmetry.site_shapes[site]:
            raise ValueError(
                f"{site!r} has shape {tuple(held[site].shape)} in net, but {tuple(symmetry.site_shapes[site])} in the "
                "symmetry; is it the network that the symmetry was found for?"
            )
    buffers = {site: held[site].detach().double() for site in symmetry.buffers}
    groups = {"permutations": symmetry.permutations, "scalings": symmetry.scalings, "signs": symmetry.signs}
    broken = {
        kind: [name for name in group.factors if not _leaves(group, name, buffers)]  # type: ignore[attr-defined]
        for kind, group in groups.items()
    }
    return symmetry.without(broken).leaving(symmetry.buffers)


def _leaves(group: Any, name: str, buffers: Weights) -> bool:
    """Whether every element of one factor leaves all buffers as they are."""
    own = {axis.site for axis in group.factor(name).axes}
    touched = {site: value for site, value in buffers.items() if site in own}
    if not touched:
        return True
    n = group.factors[name]
    if isinstance(group, PermutationGroup):
        units = torch.arange(n)
        images = torch.stack([units.roll(1), torch.cat([units[:2].flip(0), units[2:]])])  # they generate all others
    else:
        images = torch.where(torch.eye(n, dtype=torch.bool), -1.0 if group.are_signs else 2.0, 1.0).double()
    moved = moved_weights(group.element({name: images}), touched, ())
    return all(bool((moved[site] == value).all()) for site, value in touched.items())
