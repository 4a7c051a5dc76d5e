"""Feed-forward networks evaluated by compiled code, ``dense.cpp``; see :mod:`~pyro_symmetric.mcmc.compiler`.

Where it doesn't serve, PyTorch's own operations do. The results of a chain don't depend on the other chains nor on the
number of threads, to the last bit.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.mcmc.compiler import Unavailable, library
from pyro_symmetric.mcmc.feedforward import Engine, Layer, Problem

KINDS = {"identity": 0, "relu": 1, "leaky_relu": 2, "tanh": 3, "sigmoid": 4, "silu": 5, "elu": 6}
CACHE_BYTES = 192 * 1024  # of a tile's activations: they stay in the second-level cache of any recent processor
WEIGHT_BYTES = 512 * 1024  # beyond it a chain's weights leave the cache, and packed matrix products are faster
THREAD_FLOPS = 2e7  # less work than this isn't worth a thread


class NativeEngine(Engine):
    """Compiled code for one problem on the CPU, in float32 or float64.

    :raises Unavailable: where it doesn't serve: no compiler, an activation that it lacks, very wide layers.
    """

    name = "native"

    def __init__(self, problem: Problem):
        layers, data = problem.layers, problem.data
        self._problem, x = problem, data.x
        if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
            raise Unavailable(f"compiled code runs in float32 or float64 on the CPU, not in {x.dtype} on {x.device}")
        if missing := [layer.activation.name for layer in layers if layer.activation.name not in KINDS]:
            raise Unavailable(f"compiled code lacks {missing[0]}")
        if sum(layer.inputs * layer.outputs for layer in layers) * x.element_size() > WEIGHT_BYTES:
            raise Unavailable("its layers are wide enough for PyTorch's own matrix products")
        lanes = int(library().vector_bytes()) // x.element_size()
        rows = problem.batch_size or len(x)
        width = -(-layers[0].inputs // lanes) * lanes
        tile = _tile(layers, width, rows, x.element_size())
        lead = tile + 16  # so that the rows of a tile don't fall on the same lines of the cache
        self.dim, self.dtype, self.rows = problem.dim, x.dtype, len(x)
        self._flops = 6.0 * rows * sum(layer.inputs * layer.outputs for layer in layers)
        self._batch = problem.batch_size or 0
        self._scratch_size = _scratch_size(layers, width, tile, lead, x.element_size())
        sizes = [layers[0].inputs, *(layer.outputs for layer in layers)]
        head = [len(layers), len(x), tile, lead, width, self._batch, int(data.categorical), self.dim]
        offsets = [[problem.offsets.get(name, -1) if name else -1 for name in names] for names in _parameters(layers)]
        kinds = [KINDS[layer.activation.name] for layer in layers]
        self._shape = torch.tensor([*head, self._scratch_size, *sizes, *offsets[0], *offsets[1], *kinds])
        settings = [layer.activation.settings[0] if layer.activation.settings else 0.0 for layer in layers]
        self._settings = torch.tensor(settings, dtype=x.dtype)
        padded = x.new_zeros(-(-len(x) // tile) * tile, width)
        padded[: len(x), : x.shape[1]] = x
        self._x = padded
        self._tiles = x.new_zeros(0)
        if not self._batch:
            self._tiles = x.new_zeros(len(padded) // tile, x.shape[1], lead)
            self._tiles[:, :, :tile] = padded[:, : x.shape[1]].reshape(-1, tile, x.shape[1]).transpose(1, 2)
        self._y, self._labels = x.new_zeros(0), torch.zeros(0, dtype=torch.long)
        if data.categorical:
            self._labels = data.y.long().contiguous()
        else:
            self._y = data.y.contiguous()
        self._scratch: dict[int, Tensor] = {}

    def loss_and_gradient(self, w: Tensor, scale: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        chains = len(w)
        w = w if w.stride(-1) == 1 else w.contiguous()
        scale = scale.contiguous()
        loss, gradient = w.new_empty(chains), w.new_empty(chains, self.dim)
        threads = max(1, min(torch.get_num_threads(), chains, int(self._flops * chains / THREAD_FLOPS)))
        if index is not None:
            index = index.long().contiguous()
            if index.shape != (chains, self._batch) or int(index.min()) < 0 or int(index.max()) >= self.rows:
                raise IndexError(f"mini-batches must be ({chains}, {self._batch}) rows between 0 and {self.rows - 1}")
        call = library().loss_and_gradient_float if self.dtype == torch.float32 else library().loss_and_gradient_double
        inputs = (self._shape, self._tiles, self._x, self._y, self._labels, self._settings)
        call(
            *(tensor.data_ptr() or None for tensor in inputs),
            chains,
            w.data_ptr(),
            w.stride(0),
            None if index is None else index.data_ptr(),
            scale.data_ptr(),
            loss.data_ptr(),
            gradient.data_ptr(),
            self._room(threads).data_ptr(),
            threads,
        )
        return loss, gradient

    def __reduce__(self) -> tuple[Any, ...]:
        return NativeEngine, (self._problem,)  # laid out anew, for the processor that it arrives at

    def _room(self, threads: int) -> Tensor:
        """Working memory, each Python thread its own."""
        room = self._scratch.get(threading.get_ident())
        if room is None or len(room) < threads * self._scratch_size:
            room = torch.zeros(threads * self._scratch_size, dtype=self.dtype)
            self._scratch[threading.get_ident()] = room
        return room


# small steps --------------------------------------------------------------------------------------------------------


def _parameters(layers: list[Layer]) -> tuple[list[str], list[str | None]]:
    return [layer.weight for layer in layers], [layer.bias for layer in layers]


def _tile(layers: list[Layer], width: int, rows: int, size: int) -> int:
    """Rows of a tile: about as many as the cache holds, so that the last tile is nearly full as well."""
    numbers = layers[0].inputs + width + 2 * sum(layer.outputs for layer in layers)
    most = max(32, min(CACHE_BYTES // (numbers * size) // 16 * 16, 256))
    tiles = -(-rows // most)
    return -(-rows // (16 * tiles)) * 16


def _scratch_size(layers: list[Layer], width: int, tile: int, lead: int, size: int) -> int:
    first, last = layers[0], layers[-1]
    batch = first.inputs * lead + tile * (width + 2 + last.outputs + 8 // size)
    total = first.outputs * width + batch + 2 * lead * sum(layer.outputs for layer in layers)
    return -(-total // 16) * 16
