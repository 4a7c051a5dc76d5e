"""Energies and gradients of any model through ``torch.compile``: traced once under vmap, then run as one program.

Pyro's handlers run while the model is traced and never again; what is left is the arithmetic. A program is made for one
number of chains, since one for all of them is slower: fewer chains are padded to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pyro_symmetric._process import PYRO, without_warnings
from pyro_symmetric.mcmc.density.engine import Evaluation, Unavailable, same_evaluation
from pyro_symmetric.mcmc.density.targets import Rows

FEW = 4  # up to a quarter of a chunk, such as NUTS leaves unfinished, a smaller program runs


class Inductor:
    """Evaluates up to ``chunk`` chains at once.

    :param evaluate: chains ``(C, D)`` and mini-batches -> energy ``(C,)`` and gradient ``(C, D)``.
    """

    name, by_chain = "inductor", False

    def __init__(self, evaluate: Callable[[Tensor, Rows | None], Evaluation], chunk: int):
        self._evaluate, self.chunk = evaluate, chunk
        self._programs: dict[tuple[object, ...], Callable[..., Evaluation]] = {}

    def serves(self, z: Tensor, rows: Rows | None) -> bool:
        return len(z) <= self.chunk

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """:raises Unavailable: if a program can't be made."""
        count = len(z)
        size = max(1, self.chunk // FEW) if count <= self.chunk // FEW else self.chunk
        names = tuple(rows or ())
        inputs = [_padded(value, size) for value in (z.detach(), *(rows or {}).values())]
        key = (size, names, *((tuple(value.shape), value.dtype) for value in inputs))
        if key not in self._programs:
            self._programs[key] = self._program(names, inputs)
        with torch.no_grad():
            energy, gradient = self._programs[key](*inputs)
        return energy[:count], gradient[:count]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}

    def _program(self, names: tuple[str, ...], inputs: list[Tensor]) -> Callable[..., Evaluation]:
        def evaluate(z: Tensor, *batches: Tensor) -> Evaluation:
            return self._evaluate(z, dict(zip(names, batches, strict=True)) or None)

        try:
            with PYRO, without_warnings():  # of the compiler about itself; they are many, and no one's here to heed
                program = torch.compile(make_fx(evaluate)(*inputs), fullgraph=True, dynamic=False)
                with torch.no_grad():
                    found = program(*inputs)  # compiles
        except torch.linalg.LinAlgError:
            raise
        except Exception as error:  # tracing and compiling run other people's code, which may raise anything
            raise Unavailable(f"torch.compile failed: {type(error).__name__}: {str(error).strip()[:300]}") from error
        if not same_evaluation(found, evaluate(*inputs)):
            raise Unavailable("torch.compile made a program that computes something else")
        return program


def _padded(value: Tensor, size: int) -> Tensor:
    """Repeat the last chain up to ``size`` chains."""
    if len(value) == size:
        return value.contiguous()
    return torch.cat([value, value[-1:].expand(size - len(value), *value.shape[1:])])
