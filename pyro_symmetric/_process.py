"""Context managers that change global state of the process, behind one lock, so that
threads restore it in order.

Without the lock, a thread that saved the state while another thread had it changed
could restore the change for good.

PyTorch's global generators are part of this state: Pyro models, guides and users' code
draw from nothing else. The rest of the library draws from a :class:`torch.Generator` of
its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyro
import torch
from torch import Generator
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# Held while global state is changed, and while a Pyro model runs: Pyro's stack of
# handlers is global, too.
LOCK: Any = threading.RLock()

# The settings before :func:`without_fast_attention`, once for each caller inside it.
# Its lock is always the last to be taken: networks enter there while they hold the
# locks of their models.
_FAST: list[tuple[bool, bool]] = []
_FAST_LOCK = threading.Lock()

# Fork only while nothing is changed: the threads that would restore the state don't
# exist in the child.
if hasattr(os, "register_at_fork"):
    for lock in (_FAST_LOCK, LOCK):  # before a fork, hooks run in reverse order
        os.register_at_fork(
            before=lock.acquire,
            after_in_parent=lock.release,
            after_in_child=lock.release,
        )


@contextlib.contextmanager
def running_pyro(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Run a Pyro model exclusively and without validation, which
    :func:`torch.func.vmap` can't trace.

    :param dtype: default dtype of the tensors that the model makes. A distribution such
        as ``Gamma(2.0, 1.0)`` would otherwise compute in float32 whatever the precision
        of its value. ``None``: PyTorch's default.
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
    source: int | Generator | None = None,
    *devices: torch.device | str | None,
    host: bool = False,
) -> Iterator[None]:
    """Seed PyTorch's global generators, exclude other threads, and restore the
    generators at the end.

    :param source: a seed, or a generator from which the seed is drawn; ``None`` keeps
        the generators' current states.
    :param devices: devices whose generators are seeded in addition to the CPU's. CUDA
        is never initialised for others: a process that is forked afterwards couldn't
        use it.
    :param host: whether NumPy's and Python's generators are seeded and restored, too.
    """
    if isinstance(source, Generator):
        source = int(torch.randint(2**62, (), generator=source, device=source.device))
    with LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(
            torch.random.fork_rng(
                range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            )
        )
        for device in {torch.device(device or "cpu") for device in devices}:
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
                index = (
                    module.current_device() if device.index is None else device.index
                )
                stack.enter_context(
                    torch.random.fork_rng([index], device_type=device.type)
                )
                if source is not None:
                    with module.device(index):
                        module.manual_seed(source)
        if source is not None:
            # torch.manual_seed would seed all GPUs
            torch.default_generator.manual_seed(source)
        if host:
            stack.callback(random.setstate, random.getstate())
            stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 (users' code uses it)
            random.seed(source)
            np.random.seed(None if source is None else source % 2**32)  # noqa: NPY002
        yield


def drawn_seed() -> int:
    """Draw a seed from PyTorch's global generator while no other thread has it
    forked.
    """
    with LOCK:
        return int(torch.randint(2**62, (), device="cpu"))


class OwnLock:
    """A reentrant lock for one object, which may be copied and pickled: each copy gets
    a lock of its own.
    """

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
    """Suppress warnings of a category."""
    with LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore", category)
        yield


@contextlib.contextmanager
def without_fast_attention() -> Iterator[None]:
    """Disable fused attention: flash attention can't be vmapped on a CPU, and the fast
    path of attention layers has no derivative and hides from tracing. PyTorch takes the
    fast path if no weight requires a gradient, and overlooks those that vmap batches.

    Threads may overlap: the last to leave restores the settings that the first one
    found.
    """
    mha = torch.backends.mha
    cuda = torch.backends.cuda
    with _FAST_LOCK:
        _FAST.append(
            _FAST[0]
            if _FAST
            else (mha.get_fastpath_enabled(), cuda.flash_sdp_enabled())
        )
        mha.set_fastpath_enabled(False)
        cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        with _FAST_LOCK:
            fastpath, flash = _FAST.pop()
            if not _FAST:
                mha.set_fastpath_enabled(fastpath)
                cuda.enable_flash_sdp(flash)


@contextlib.contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Replace an attribute of a module or class; other holders of the lock wait."""
    with LOCK:
        original = vars(owner)[name]
        setattr(owner, name, stand_in)
        try:
            yield
        finally:
            setattr(owner, name, original)


class Replaced(TorchFunctionMode):
    """A mode in which other functions take the place of some of PyTorch's."""

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]):
        super().__init__()
        self.functions = functions

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.functions.get(func, func)(*args, **(kwargs or {}))


def with_both_branches() -> contextlib.AbstractContextManager[None]:
    """Let ``torch.cond`` compute both of its branches and select by ``torch.where``, so
    that it can be traced.
    """
    return replaced(torch, "cond", _both_branches)


def _both_branches(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    if not isinstance(pred, torch.Tensor):
        return (true_fn if pred else false_fn)(*operands)
    results = true_fn(*operands), false_fn(*operands)
    return pytree.tree_map(
        lambda if_true, if_false: torch.where(pred.reshape(()), if_true, if_false),
        *results,
    )


@contextlib.contextmanager
def without_messages(*loggers: str) -> Iterator[None]:
    """Suppress standard error, and the logging of errors that are raised anyway."""
    with LOCK, contextlib.ExitStack() as stack:
        for log in map(logging.getLogger, loggers):
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.CRITICAL)
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def keep_freed_memory() -> None:
    """Let glibc reuse freed blocks of up to 32 MiB, instead of handing them back and
    taking page faults anew.

    It adapts its thresholds to the largest block freed so far, and to no more than
    that.
    """
    np.empty(2**25 - 2**16, dtype=np.uint8)
