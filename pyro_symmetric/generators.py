"""PyTorch's random generators: whose turn it is to draw from them, seeded for a run, written down, and set again.

They belong to the process, as the stack of Pyro's handlers does. So what draws from them for long waits for its turn:
runs of several threads go one after another, and each finds the generators as it would alone. What a thread calls has
the thread's turn; another thread that it waits for hasn't, and would wait for ever unless the turn is :func:`lent`.
Locks of files are asked for before, and refuse at once: a thread that is refused has touched no generator.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_States = dict[int | None, Tensor]  # number of a GPU, or None for the CPU -> where its generator stands

_lock: Any = threading.RLock()
_outside: list[_States] = []  # what the seeded runs of the thread in turn will put back, the outermost first


def _forget_other_threads() -> None:
    """In a forked process there are none, so none can end its turn."""
    if not _lock._is_owned():
        _lock._at_fork_reinit()
        _outside.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


@contextlib.contextmanager
def turn() -> Iterator[None]:
    """Wait until no other thread draws, and draw alone."""
    with _lock:
        yield


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """Let other threads have this one's turn, if it has it, while it waits for them.

    They find the generators as they were before this thread's turn; afterwards it finds them as it left them.
    """
    if not _lock._is_owned():
        yield
        return
    forks = _outside.copy()
    found = {gpu: state for states in reversed(forks) for gpu, state in states.items()}
    own = _states(found)
    _set_states(found)
    _outside.clear()
    held = _lock._release_save()  # as threading.Condition lets go of a lock that its thread holds several times
    try:
        yield
    finally:
        _lock._acquire_restore(held)
        _outside[:] = forks
        for gpu, state in _states(found).items():  # others may have drawn
            next(states for states in forks if gpu in states)[gpu] = state
        _set_states(own)


@contextlib.contextmanager
def kept(device: torch.device | str | None = None) -> Iterator[None]:
    """Leave PyTorch's generators as they were.

    The CPU's and those of ``device``; of every GPU if none is named and CUDA is in use already. CUDA isn't woken up for
    a run on the CPU: a process that is forked afterwards couldn't use it any more.
    """
    with turn():
        _outside.append(_states([None, *_gpus(device)]))
        try:
            yield
        finally:
            _set_states(_outside.pop())


@contextlib.contextmanager
def seeded(seed: int | None, device: torch.device | str | None = None) -> Iterator[None]:
    """Seed the generators of :func:`kept` for a while, and leave them as they were; ``None``: just use them.

    Either way it is this thread's turn meanwhile.
    """
    if seed is None:
        with turn():
            yield
        return
    with kept(device):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all GPUs, now or when they wake up
        for gpu in _gpus(device):
            torch.cuda.default_generators[gpu].manual_seed(seed)
        yield


def drawn_seed() -> int:
    """A seed drawn from PyTorch's generator."""
    with turn():
        return int(torch.randint(2**62, ()))


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


def _states(gpus: Iterable[int | None]) -> _States:
    return {gpu: torch.get_rng_state() if gpu is None else torch.cuda.get_rng_state(gpu) for gpu in gpus}


def _set_states(states: _States) -> None:
    for gpu, state in states.items():
        if gpu is None:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, gpu)


def _gpus(device: torch.device | str | None) -> list[int]:
    """GPUs whose generators a run on this device may draw from."""
    place = None if device is None else torch.device(device)
    if place is not None and place.type == "cuda" and torch.cuda.is_available():
        return [torch.cuda.current_device() if place.index is None else place.index]
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
