"""Elements of a group: all of a small one, random ones, and those that make up the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric.groups.arrangement import Arrangement
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.units import Move


def enumerated(group: Arrangement, independent: Mapping[str, Tensor]) -> Element:
    """All permutations with signs that act differently, as one batch; the identity comes first.

    :param independent: name -> bool ``units.shape``: the units whose flips do what all flips do.
    """
    permuted = [group[name] for name in group.names("permute")]
    number = sum(int(units.sum()) for units in independent.values())
    flips = torch.tensor(
        list(itertools.product((1.0, -1.0), repeat=number)), dtype=torch.get_default_dtype(), device="cpu"
    )
    tables = [torch.tensor(list(itertools.permutations(range(one.size))), device="cpu") for one in permuted]
    choices = [
        torch.arange(len(t), device="cpu") for t, one in zip(tables, permuted, strict=True) for _ in range(one.copies)
    ]
    grids = iter(
        grid.reshape(-1) for grid in torch.meshgrid(*choices, torch.arange(len(flips), device="cpu"), indexing="ij")
    )
    permutations = {}
    for table, one in zip(tables, permuted, strict=True):
        rows = torch.stack([table[next(grids)] for _ in range(one.copies)], -2)
        permutations[one.name] = rows.reshape(-1, *one.shape)
    drawn, signs, start = flips[next(grids)], {}, 0
    for name, own in independent.items():
        signs[name] = drawn.new_ones(len(drawn), *group[name].shape)
        end = start + int(own.sum())
        signs[name][:, own] = drawn[:, start:end]
        start = end
    return Element(group, permutations, signs, batch_shape=(len(drawn),))


def sampled(
    group: Arrangement,
    shape: Sequence[int],
    spread: float = 1.0,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Element:
    """Independent elements; see :meth:`~pyro_symmetric.groups.group.Group.sample`."""
    dtype = dtype or torch.get_default_dtype()
    device = device or (torch.device("cpu") if generator is None else generator.device)

    def each(move: Move, draw: Callable[[tuple[int, ...]], Tensor]) -> dict[str, Tensor]:
        return {name: draw((*shape, *group[name].shape)) for name in group.names(move)}

    def uniform(full: tuple[int, ...]) -> Tensor:
        return torch.rand(full, dtype=torch.float64, device=device, generator=generator)

    def normal(full: tuple[int, ...]) -> Tensor:
        return spread * torch.randn(full, dtype=dtype, device=device, generator=generator)

    def signs(full: tuple[int, ...]) -> Tensor:
        return torch.randint(0, 2, full, dtype=dtype, device=device, generator=generator).mul_(2).sub_(1)

    # Sorting uniform keys gives uniform permutations up to ties; float64 keys make ties too rare to matter.
    permutations = each("permute", lambda full: uniform(full).argsort(-1))
    return Element(group, permutations, each("flip", signs), each("scale", normal), each("shift", normal), shape)


def cycles_and_exchanges(group: Arrangement, name: str) -> Element:
    """A cycle and an exchange in each copy of some units; see :meth:`~pyro_symmetric.groups.group.Group.generators`."""
    one = group[name]
    images = torch.arange(one.size, device="cpu").repeat(2 * one.copies, one.copies, 1)
    for copy in range(one.copies):
        images[2 * copy, copy] = torch.arange(one.size, device="cpu").roll(1)
        images[2 * copy + 1, copy, :2] = images[2 * copy + 1, copy, :2].flip(0)
    return Element(group, {name: images.reshape(-1, *one.shape)})
