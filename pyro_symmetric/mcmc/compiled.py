"""Energies and gradients of any model through ``torch.compile``: traced once under vmap, then run as one program.

Pyro's handlers run while the model is traced and never again; what is left is the arithmetic. A program is made for one
number of chains, since one for all of them is slower: fewer chains are padded to it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_symmetric._process import LOCK, without_warnings
from pyro_symmetric.mcmc.network import Probe

Evaluate = Callable[[Tensor, Mapping[str, Tensor] | None], tuple[Tensor, Tensor]]
FEW = 4  # up to a quarter of a chunk, such as NUTS leaves unfinished, a smaller program runs


class CompileFailed(Exception):
    """Why ``torch.compile`` didn't serve."""


class Compiled:
    """Evaluates up to ``chunk`` chains at once.

    :param evaluate: chains ``(C, D)`` and mini-batches -> energy ``(C,)`` and gradient ``(C, D)``.
    """

    def __init__(self, evaluate: Evaluate, chunk: int):
        self._evaluate, self.chunk = evaluate, chunk
        self._programs: dict[tuple[object, ...], Callable[..., tuple[Tensor, Tensor]]] = {}

    def __call__(self, z: Tensor, rows: Mapping[str, Tensor] | None) -> tuple[Tensor, Tensor]:
        """:raises CompileFailed: if a program can't be made."""
        count = len(z)
        size = max(1, self.chunk // FEW) if count <= self.chunk // FEW else self.chunk
        names = tuple(rows or ())
        inputs = [_padded(value, size) for value in (z.detach(), *(rows or {}).values())]
        key = (size, names, *((tuple(value.shape), value.dtype) for value in inputs))
        if key not in self._programs:
            self._programs[key] = self._program(names, inputs)
        energy, gradient = self._programs[key](*inputs)
        return energy[:count], gradient[:count]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}

    def _program(self, names: tuple[str, ...], inputs: list[Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        def evaluate(z: Tensor, *batches: Tensor) -> tuple[Tensor, Tensor]:
            return self._evaluate(z, dict(zip(names, batches, strict=True)) or None)

        try:
            with without_warnings():  # of the compiler about itself; they are many, and no one's here to heed
                with _unchecked():
                    traced = make_fx(evaluate)(*inputs)
                program = torch.compile(traced, fullgraph=True, dynamic=False)
                with torch.no_grad():
                    found = program(*inputs)  # compiles
        except torch.linalg.LinAlgError:
            raise
        except Exception as error:  # tracing and compiling run other people's code, which may raise anything
            raise CompileFailed(f"{type(error).__name__}: {str(error).strip()[:300]}") from error

        rows = dict(zip(names, inputs[1:], strict=True)) or None
        if not Probe(inputs[0], rows, *self._evaluate(inputs[0], rows)).agrees(*found):
            raise CompileFailed("the compiled program computes something else")

        def run(*values: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return program(*values)

        return run


class _Unchecked:
    """Without distributions' checks of values, which no trace can hold; in the threads that are inside alone.

    ``pyro.validation_enabled(False)`` doesn't reach those that were made before, such as a ``PyroSample``'s. The check
    is replaced as the first thread enters and put back as the last one leaves, in whatever order they do.
    """

    def __init__(self) -> None:
        self._inside: Counter[int] = Counter()
        self._checking: Any = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        thread = threading.get_ident()
        with LOCK:
            if not self._inside:
                self._install()
            self._inside[thread] += 1
        try:
            yield
        finally:
            with LOCK:
                self._inside[thread] -= 1
                self._inside = +self._inside
                if not self._inside:
                    Distribution._validate_sample = self._checking  # type: ignore[method-assign]

    def _install(self) -> None:
        checking = self._checking = Distribution._validate_sample

        def check_outside(distribution: Distribution, value: Tensor) -> None:
            if threading.get_ident() not in self._inside:
                checking(distribution, value)

        Distribution._validate_sample = check_outside  # type: ignore[method-assign, assignment]


_unchecked = _Unchecked()


def _padded(value: Tensor, size: int) -> Tensor:
    """Repeat the last chain up to ``size`` chains."""
    if len(value) == size:
        return value.contiguous()
    return torch.cat([value, value[-1:].expand(size - len(value), *value.shape[1:])])
