"""PyTorch's random generators: seeded for a run, written down, and set again."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device | str | None = None) -> Iterator[None]:
    """Seed PyTorch's generators for a while, and leave them as they were; ``None``: just use them.

    The CPU's and those of ``device``; of every GPU if none is named and CUDA is in use already. CUDA isn't woken up for
    a run on the CPU: a process that is forked afterwards couldn't use it any more.
    """
    if seed is None:
        yield
        return
    gpus = _gpus(device)
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all GPUs, now or when they wake up
        for gpu in gpus:
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield


def seed_of_task(seed: int, task: int | str) -> int:
    """A seed for one part of a run, independent of the others'."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{task}".encode(), digest_size=8).digest(), "big") >> 1


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Where the generators that a run on this device draws from stand: the CPU's and the device's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put them back there."""
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


# small steps --------------------------------------------------------------------------------------------------------


def _gpus(device: torch.device | str | None) -> list[int]:
    """GPUs whose generators a run on this device may draw from."""
    place = None if device is None else torch.device(device)
    if place is not None and place.type == "cuda" and torch.cuda.is_available():
        return [torch.cuda.current_device() if place.index is None else place.index]
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
