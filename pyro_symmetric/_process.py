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

import torch

# Held while any of it is changed; one thread may nest such changes. Where it is asked for together with a turn to draw
# (pyro_symmetric.generators), the turn comes first.
LOCK = threading.RLock()

# A process is forked when nothing is changed: other threads, which would put it back, don't exist in the child.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release)


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
