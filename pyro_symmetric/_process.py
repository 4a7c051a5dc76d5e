"""State of the whole process that is changed for a while: behind one lock, so that threads undo it in order.

A thread that saves such a state while another has it changed, and puts it back last, would leave it changed for good.

The global generators belong here, too, for what can draw from nothing else: Pyro models, guides, other people's code.
All else in the library draws from a :class:`torch.Generator` of its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyro
import torch
from torch.utils import _pytree as pytree

# Held while any of it is changed, and while a Pyro model runs, whose handlers belong to the process.
LOCK: Any = threading.RLock()

# An entry for each who is within :func:`without_fast_attention`: what the first of them found. Its own lock is taken
# last of all: networks enter there while they hold the locks of their models.
_FAST: list[tuple[bool, bool]] = []
_FAST_LOCK = threading.Lock()

# A process is forked when nothing is changed: other threads, which would put it back, don't exist in the child.
if hasattr(os, "register_at_fork"):
    for lock in (_FAST_LOCK, LOCK):  # what is registered last comes first before a fork
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


@contextlib.contextmanager
def running_pyro(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Run a Pyro model: alone, and without the checks of values, which no map over chains or samples can hold.

    :param dtype: of what the model makes of plain numbers. A distribution such as ``Gamma(2.0, 1.0)`` would otherwise
        compute in float32 whatever the precision of its value. ``None``: PyTorch's default.
    """
    with LOCK, pyro.validation_enabled(False), without_fast_attention():
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype or before)
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def forked(
    source: int | torch.Generator | None = None, *devices: torch.device | str | None, host: bool = False
) -> Iterator[None]:
    """Let PyTorch's global generators be drawn from, and leave them as they were; meanwhile no other thread has them.

    :param source: a seed, or a generator from which one number is drawn as a seed; ``None``: they begin as they are.
    :param devices: those whose generators are seeded besides the CPU's. CUDA isn't woken up for any other: a process
        that is forked afterwards couldn't use it any more.
    :param host: whether NumPy's and Python's generators are seeded and put back, too.
    """
    if isinstance(source, torch.Generator):
        source = int(torch.randint(2**62, (), generator=source, device=source.device))
    with LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ())
        )
        for place in {torch.device(device or "cpu") for device in devices}:
            if place.type not in ("cpu", "meta"):
                module = torch.get_device_module(place)
                index = module.current_device() if place.index is None else place.index
                stack.enter_context(torch.random.fork_rng([index], device_type=place.type))
                if source is not None:
                    with module.device(index):
                        module.manual_seed(source)
        if source is not None:
            torch.default_generator.manual_seed(source)  # torch.manual_seed would seed all GPUs
        if host:
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 (other people's code uses it)
            random.seed(source)
            np.random.seed(None if source is None else source % 2**32)  # noqa: NPY002
        yield


def drawn_seed() -> int:
    """A seed drawn from PyTorch's global generator, when no other thread has it forked."""
    with LOCK:
        return int(torch.randint(2**62, (), device="cpu"))


class OwnLock:
    """A lock that one object holds, which may be copied and pickled: each copy gets a lock of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OwnLock], tuple[()]]:
        return OwnLock, ()


@contextlib.contextmanager
def without_warnings(category: type[Warning] = Warning) -> Iterator[None]:
    """Ignore warnings of a category."""
    with LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", category)
        yield


@contextlib.contextmanager
def without_fast_attention() -> Iterator[None]:
    """Without the fused paths of attention, which can't be mapped over weights (flash attention on a CPU) or know no
    derivative, and hide from tracing. PyTorch takes the latter if no weight asks for a gradient, and doesn't see that
    mapped weights do.

    Threads may overlap: the last to leave puts back what the first found.
    """
    mha, cuda = torch.backends.mha, torch.backends.cuda
    with _FAST_LOCK:
        _FAST.append(_FAST[0] if _FAST else (mha.get_fastpath_enabled(), cuda.flash_sdp_enabled()))
        mha.set_fastpath_enabled(False)
        cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        with _FAST_LOCK:
            layers, flash = _FAST.pop()
            if not _FAST:
                mha.set_fastpath_enabled(layers)
                cuda.enable_flash_sdp(flash)


@contextlib.contextmanager
def with_both_branches() -> Iterator[None]:
    """``torch.cond`` computes both of its branches, and chooses entry by entry: plain operators, to be traced."""
    with LOCK:
        cond = torch.cond
        torch.cond = _both_branches
        try:
            yield
        finally:
            torch.cond = cond


def _both_branches(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    if not isinstance(pred, torch.Tensor):
        return (true_fn if pred else false_fn)(*operands)
    results = true_fn(*operands), false_fn(*operands)
    return pytree.tree_map(lambda one, other: torch.where(pred.reshape(()), one, other), *results)


@contextlib.contextmanager
def without_messages(*loggers: str) -> Iterator[None]:
    """Without what is printed to standard error, and what loggers say of errors that are raised as well."""
    with LOCK, contextlib.ExitStack() as stack:
        for log in map(logging.getLogger, loggers):
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield
