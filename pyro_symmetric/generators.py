"""PyTorch's global random generators, for what can draw from nothing else: Pyro models, guides, other people's code.

They belong to the process. What draws from them for a while does so in :func:`forked`, one thread at a time, and leaves
them as they were. All else in the library draws from a :class:`torch.Generator` of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pyro_symmetric._process import PYRO


@contextlib.contextmanager
def forked(source: int | torch.Generator | None = None, device: torch.device | str | None = None) -> Iterator[None]:
    """Let PyTorch's global generators be drawn from, and leave them as they were; meanwhile no other thread has them.

    :param source: a seed, or a generator from which one number is drawn as a seed; ``None``: they begin as they are.
    :param device: a GPU whose generator is seeded, too. CUDA isn't woken up for any other: a process that is forked
        afterwards couldn't use it any more.
    """
    place = torch.device("cpu" if device is None else device)
    if isinstance(source, torch.Generator):
        source = int(torch.randint(2**62, (), generator=source, device=source.device))
    with PYRO:
        gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() or place.type == "cuda" else ()
        with torch.random.fork_rng(gpus):
            if source is not None:
                torch.default_generator.manual_seed(source)  # torch.manual_seed would seed all GPUs
            if source is not None and place.type == "cuda":
                index = torch.cuda.current_device() if place.index is None else place.index
                torch.cuda.default_generators[index].manual_seed(source)
            yield


def drawn_seed() -> int:
    """A seed drawn from PyTorch's global generator, when no other thread has it forked."""
    with PYRO:
        return int(torch.randint(2**62, ()))
