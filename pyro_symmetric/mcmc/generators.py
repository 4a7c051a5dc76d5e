"""PyTorch's random generators: seeded for a run, written down, and set again."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed PyTorch's generators for a while, and leave them as they were; ``None``: just use them."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):  # all, since the model may choose its own
        torch.manual_seed(seed)
        yield


def seed_of_task(seed: int, task: int | str) -> int:
    """A seed for one part of a run, independent of the others'."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{task}".encode(), digest_size=8).digest(), "big") >> 1


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Where the generators that a run on this device draws from stand: the CPU's and the device's."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        states["mps"] = torch.mps.get_rng_state()
    return states


def set_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Put them back there."""
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), device)
    elif device.type == "mps":
        torch.mps.set_rng_state(states["mps"].clone())
