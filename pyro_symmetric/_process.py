"""State of the whole process that is changed for a while: behind one lock, so that threads undo it in order.

A thread that saves such a state while another has it changed, and puts it back last, would leave it changed for good.

PyTorch's global generators belong here, too, for what can draw from nothing else: Pyro models, guides, other people's
code. All else in the library draws from a :class:`torch.Generator` of its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pyro
import torch
from torch.utils import _pytree as pytree

# Held while any of it is changed; one thread may nest such changes.
LOCK = threading.RLock()

# An entry for each who is within :func:`without_fast_attention`: what the first of them found.
_FAST: list[tuple[bool, bool]] = []

# Held while a Pyro model runs, whose handlers and validation belong to the process, or while PyTorch's generators are
# forked. Where both locks are asked for, this one comes first.
PYRO: Any = threading.RLock()


def _forget_other_threads() -> None:
    """In a forked process there are none, so none can let go of the lock."""
    if not PYRO._is_owned():
        PYRO._at_fork_reinit()


# A process is forked when nothing is changed: other threads, which would put it back, don't exist in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)
    os.register_at_fork(after_in_child=_forget_other_threads)


@contextlib.contextmanager
def running_pyro(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Run a Pyro model: alone, and without the checks of values, which no map over chains or samples can hold.

    :param dtype: of what the model makes of plain numbers. A distribution such as ``Gamma(2.0, 1.0)`` would otherwise
        compute in float32 whatever the precision of its value. ``None``: PyTorch's default.
    """
    with PYRO, pyro.validation_enabled(False), without_fast_attention():
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(dtype or before)
            yield
        finally:
            torch.set_default_dtype(before)


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
    with LOCK:
        _FAST.append(_FAST[0] if _FAST else (mha.get_fastpath_enabled(), cuda.flash_sdp_enabled()))
        mha.set_fastpath_enabled(False)
        cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        with LOCK:
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
    with LOCK:
        logs = [logging.getLogger(name) for name in loggers]
        levels = [log.level for log in logs]
        for log in logs:
            log.setLevel(logging.CRITICAL)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            for log, level in zip(logs, levels, strict=True):
                log.setLevel(level)
