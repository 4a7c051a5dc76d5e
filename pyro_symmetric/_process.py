"""What belongs to the whole process and is changed for a while: behind one lock, so that threads undo it in order.

A thread that saves such a state while another has it changed, and puts it back last, would leave it changed for good.
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

# Held while any of it is changed; one thread may nest such changes.
LOCK = threading.RLock()

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
def running_pyro() -> Iterator[None]:
    """Run a Pyro model: alone, and without the checks of values, which no map over chains or samples can hold."""
    with PYRO, pyro.validation_enabled(False):
        yield


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
    """Without the fused fast paths, which hide attention from tracing and from dispatch modes."""
    with LOCK:
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


@contextlib.contextmanager
def without_messages(logger: str) -> Iterator[None]:
    """Without what is printed to standard error, and what a logger has to say below errors."""
    with LOCK:
        log = logging.getLogger(logger)
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            log.setLevel(level)
