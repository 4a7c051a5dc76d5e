"""The random numbers of a network: to draw the same ones again, and to draw others.

A network draws from the process's generators of PyTorch, NumPy and Python, or from some that its modules keep.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pyro_symmetric._process import PYRO


@dataclass
class Draws:
    """The random numbers that were drawn inside :func:`repeated`.

    :ivar host: whether NumPy's or Python's generator was drawn from, known afterwards.
    """

    host: bool = False


@contextlib.contextmanager
def repeated(seed: int, devices: Iterable[torch.device] = ()) -> Iterator[Draws]:
    """Let a network draw the same random numbers each time, from PyTorch, NumPy or Python, and leave all as they were.

    :param seed: of all global generators.
    :param devices: the devices, besides the CPU, whose generators are seeded, too.
    """
    draws = Draws()
    with PYRO, contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all GPUs
        for device in {device for device in devices if device.type not in ("cpu", "meta")}:
            module = torch.get_device_module(device)
            index = module.current_device() if device.index is None else device.index
            stack.enter_context(torch.random.fork_rng([index], device_type=device.type))
            with module.device(index):
                module.manual_seed(seed)
        before = _host_states()
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (other people's code draws from it)
        seeded = _host_states()
        try:
            yield draws
        finally:
            draws.host = _host_states() != seeded
            random.setstate(before[0])
            np.random.set_state(before[1:])  # noqa: NPY002


def own_generators(net: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The places where modules keep generators of their own: their attributes, and the name among these."""
    kinds = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
    return [(vars(m), name) for m in net.modules() for name, value in vars(m).items() if isinstance(value, kinds)]


def moved_on(generator: Any) -> Any:
    """A generator of the same kind that will give other numbers."""
    other = copy.deepcopy(generator)
    torch.rand(1, generator=other, device=other.device) if isinstance(other, torch.Generator) else other.random()
    return other


def _host_states() -> tuple[Any, ...]:
    """The state of Python's generator, then NumPy's, in pieces that can be compared."""
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), numpy[0], numpy[1].tolist(), *numpy[2:]
