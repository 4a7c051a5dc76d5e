"""A network's loss and gradient by the compiled code of ``dense.cpp``: what it reads, laid out in memory."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.engine import Unavailable
from pyro_symmetric.mcmc.density.feedforward import LOSSES, Layer, NetworkProblem
from pyro_symmetric.mcmc.density.native.compiler import library

KINDS = {"identity": 0, "relu": 1, "leaky_relu": 2, "tanh": 3, "sigmoid": 4, "silu": 5, "elu": 6}
CACHE_BYTES = 192 * 1024  # of a tile's activations: they stay in the second-level cache of any recent processor
WEIGHT_BYTES = 512 * 1024  # beyond it a chain's weights leave the cache, and packed matrix products are faster
THREAD_FLOPS = 2e7  # less work than this isn't worth a thread


class NativeLoss:
    """Compiled code for one problem on the CPU, in float32 or float64.

    :raises Unavailable: if it can't serve: an activation that it lacks, very wide layers, no compiler.
    """

    name = "native"

    def __init__(self, problem: NetworkProblem):
        layers, x = problem.layers, problem.x
        _require_served(layers, x)
        self._problem = problem
        lanes = int(library().vector_bytes()) // x.element_size()
        rows, inputs = problem.batch_size or len(x), layers[0].inputs
        width = -(-inputs // lanes) * lanes
        tile = _tile(layers, width, rows, x.element_size())
        lead = tile + 16  # so that the rows of a tile don't fall on the same lines of the cache
        self._flops = 6.0 * rows * sum(layer.inputs * layer.outputs for layer in layers)
        self._scratch_size = _scratch_size(layers, width, tile, lead, x.element_size())
        loss = LOSSES.index(problem.loss)
        head = [len(layers), len(x), tile, lead, width, problem.batch_size or 0, loss, problem.dim]
        sizes = [inputs, *(layer.outputs for layer in layers)]
        weights = [problem.offsets[layer.weight] for layer in layers]
        biases = [-1 if layer.bias is None else problem.offsets[layer.bias] for layer in layers]
        kinds = [KINDS[layer.activation] for layer in layers]
        self._shape = torch.tensor([*head, self._scratch_size, *sizes, *weights, *biases, *kinds], device="cpu")
        self._settings = x.new_tensor([layer.settings[0] if layer.settings else 0.0 for layer in layers])
        self._x = x.new_zeros(-(-len(x) // tile) * tile, width)
        self._x[: len(x), :inputs] = x
        self._tiles = x.new_zeros(0)
        if problem.batch_size is None:
            self._tiles = x.new_zeros(len(self._x) // tile, inputs, lead)
            self._tiles[:, :, :tile] = self._x[:, :inputs].reshape(-1, tile, inputs).transpose(1, 2)
        categorical = problem.loss == "cross-entropy"
        self._y = x.new_zeros(0) if categorical else problem.y.contiguous()
        self._labels = problem.y.long().contiguous() if categorical else torch.zeros(0, dtype=torch.long, device="cpu")
        self._scratch: dict[int, Tensor] = {}

    def loss_and_gradient(self, w: Tensor, scale: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        chains = len(w)
        w = w if w.stride(-1) == 1 else w.contiguous()
        scale = scale.contiguous()
        loss, gradient = w.new_empty(chains), w.new_empty(chains, self._problem.dim)
        threads = max(1, min(torch.get_num_threads(), chains, int(self._flops * chains / THREAD_FLOPS)))
        if index is not None:
            index = self._checked(index, chains)
        call = library().loss_and_gradient_float if w.dtype == torch.float32 else library().loss_and_gradient_double
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

    def gradient(self, w: Tensor, scale: Tensor, index: Tensor | None) -> Tensor:
        return self.loss_and_gradient(w, scale, index)[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return NativeLoss, (self._problem,)  # laid out anew, for the processor that it arrives at

    def _checked(self, index: Tensor, chains: int) -> Tensor:
        index, shape, rows = index.long().contiguous(), (chains, self._problem.batch_size), len(self._problem.x)
        if index.shape != shape or int(index.min()) < 0 or int(index.max()) >= rows:
            raise IndexError(f"mini-batches must be {shape} rows between 0 and {rows - 1}")
        return index

    def _room(self, threads: int) -> Tensor:
        """Working memory, each Python thread its own."""
        room = self._scratch.get(threading.get_ident())
        if room is None or len(room) < threads * self._scratch_size:
            room = self._problem.x.new_zeros(threads * self._scratch_size)
            self._scratch[threading.get_ident()] = room
        return room


# small steps --------------------------------------------------------------------------------------------------------


def _require_served(layers: list[Layer], x: Tensor) -> None:
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        raise Unavailable(f"compiled code runs in float32 or float64 on the CPU, not in {x.dtype} on {x.device}")
    if missing := [layer.activation for layer in layers if layer.activation not in KINDS]:
        raise Unavailable(f"compiled code lacks {missing[0]}")
    if sum(layer.inputs * layer.outputs for layer in layers) * x.element_size() > WEIGHT_BYTES:
        raise Unavailable("its layers are wide enough for PyTorch's own matrix products")


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
