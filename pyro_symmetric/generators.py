"""The random numbers of a network: to draw the same ones again.

A network draws from the process's generators of PyTorch, NumPy and Python.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from pyro_symmetric._process import PYRO


@contextlib.contextmanager
def repeated(seed: int, devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Let a network draw the same random numbers each time, from PyTorch, NumPy or Python, and leave all as they were.

    :param seed: of all global generators.
    :param devices: the devices, besides the CPU, whose generators are seeded, too.
    """
    with PYRO, contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed all GPUs
        for device in {device for device in devices if device.type not in ("cpu", "meta")}:
            module = torch.get_device_module(device)
            index = module.current_device() if device.index is None else device.index
            stack.enter_context(torch.random.fork_rng([index], device_type=device.type))
            with module.device(index):
                module.manual_seed(seed)
        before = random.getstate(), np.random.get_state()  # noqa: NPY002 (other people's code draws from it)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
