"""Numbers of elements, one for each unit: what a user gives, and what moves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.groups.arrangement import Arrangement
from pyro_symmetric.groups.units import Move, Units


def neutral(move: Move, units: Units, device: torch.device | None, dtype: torch.dtype) -> Tensor:
    """The values of a move that moves nothing."""
    if move == "permute":
        return torch.arange(units.size, device=device).expand(units.shape)
    one = torch.ones if move == "flip" else torch.zeros
    return one(units.shape, device=device, dtype=dtype)


def checked(argument: str, group: Arrangement, move: Move, given: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """A user's values for one move, as tensors.

    :param argument: what messages call it.
    :raises ValueError: if units are unknown or don't admit the move, or numbers aren't what they must be.
    """
    found = {}
    for name, value in arguments.mapping(argument, given or {}, "name of the units -> numbers").items():
        if move not in group[name].moves:
            raise ValueError(f"{argument} holds {name!r}; only {list(group.names(move))} admit the move {move!r}")
        called = f"{argument}[{name!r}]"
        numbers = arguments.numbers(called, value)
        shape = group[name].shape
        if numbers.dim() < len(shape) or tuple(numbers.shape[numbers.dim() - len(shape) :]) != shape:
            raise ValueError(
                f"{called} has shape {tuple(numbers.shape)}; it must end in {shape}, one number for each unit"
            )
        found[name] = _images(called, numbers) if move == "permute" else _reals(called, numbers, move)
    return found


# small steps --------------------------------------------------------------------------------------------------------


def _images(name: str, images: Tensor) -> Tensor:
    """Integers, each row a permutation, as a LongTensor."""
    if images.is_floating_point() or images.is_complex() or images.dtype == torch.bool:
        raise ValueError(f"{name} has dtype {images.dtype}; it must hold integers")
    images, size = images.long(), images.shape[-1]
    fits = (images.sort(-1).values == torch.arange(size, device=images.device)).all(-1)
    if not bool(fits.all()):
        bad = images.reshape(-1, size)[~fits.reshape(-1)][0]
        raise ValueError(f"{name} is no permutation of 0 .. {size - 1}: {bad.tolist()}")
    return images


def _reals(name: str, numbers: Tensor, move: Move) -> Tensor:
    """Signs, log-scales or shifts, in floating point."""
    numbers = numbers if numbers.is_floating_point() else numbers.to(torch.get_default_dtype())
    bad = numbers.abs() != 1 if move == "flip" else ~torch.isfinite(numbers)
    if bool(bad.any()):
        wanted = "hold +1 or -1 only" if move == "flip" else "hold finite numbers"
        raise ValueError(f"{name} must {wanted}; it holds {float(numbers[bad][0])}")
    return numbers
