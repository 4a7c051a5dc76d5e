r"""Engine ``"layers"``: energy and gradient of Bayesian feed-forward networks, without
running the model.

.. math:: U(z) = \beta \sum_i \ell_i(w) - \log p(w) + \text{const},
    \qquad \beta = \frac{N}{B\,T}\,\tau

with :math:`\ell` the cross-entropy and :math:`\tau = 1`, or half the squared error and
:math:`\tau` the noise precision; :math:`T` is the likelihood's temperature, and a
mini-batch has :math:`B` of :math:`N` rows. The network must be a chain of linear layers
and activations with normal priors. The loss is evaluated by batched matrix products; on
a CPU, unless layers are wide, by a loop compiled with Numba, chain by chain and in
tiles of :data:`T` rows of the data, whose activations stay in the cache from the
forward to the backward pass. Tiles are flat arrays ``(features, T)``. The results of a
chain are bitwise independent of the other chains and of the number of threads. NaN
propagates.

Numba, and so this module, is slow to import.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.arguments import Args, Entries
from pyro_symmetric.density.eager import (
    ROWS,
    Evaluation,
    NetworkTarget,
    Rows,
    Unavailable,
)
from pyro_symmetric.density.traced import TracedTarget
from pyro_symmetric.models import CategoricalLikelihood, GaussianLikelihood

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
# of a chain in the cache; beyond, batched matrix products are faster
WEIGHT_BYTES = 2**19
THREAD_FLOPS = 2e7  # least work of a thread
NO_BATCHES = np.empty((0, 0), np.int64)
# PyTorch operator -> index in FUNCTIONS
ACTIVATIONS = {"relu": 1, "tanh": 2, "sigmoid": 3, "silu": 4}
FUNCTIONS = (lambda h: h, torch.relu, torch.tanh, torch.sigmoid, functional.silu)
SHAPES = {
    "view",
    "_unsafe_view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "flatten",
    "alias",
    "detach",
    "clone",
}
# Loop indices are unsigned. Signed ones may count from the end, and Numba's check
# prevents vectorisation.
# rows of a tile; features of an unrolled loop
T = np.uint64(128)
ONE = np.uint64(1)
EIGHT = np.uint64(8)
T2, T3, T4, T5, T6, T7 = (np.uint64(k * 128) for k in range(2, 8))
TAYLOR = tuple(1 / math.factorial(k) for k in range(14))
OPTIONS: Entries = {
    # sums in any order, but NaN and infinity as by IEEE
    "fastmath": {"reassoc", "contract", "nsz"},
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


class Layers:
    """Engine for a :class:`BayesianModel` with a feed-forward network; a density
    compares it with the model first.

    :raises Unavailable: naming the part of the model that isn't supported.
    """

    name = "layers"

    def __init__(self, target: NetworkTarget | TracedTarget):
        if not isinstance(target, NetworkTarget):
            raise Unavailable("the model isn't a BayesianModel")
        self._problem = problem_of(target)
        self._prior = prior_of(target, self._problem)
        self._temperature = target.model.likelihood.temperature
        self._rows = len(self._problem.x)
        self.tiles: Tiles | None = None
        if is_tiled(self._problem):
            self.tiles = Tiles(self._problem, self._prior)

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``."""
        z = z.detach()
        index = None if rows is None else rows[ROWS]
        share = (
            1 if index is None else self._rows / index.shape[-1]
        ) / self._temperature
        if self.tiles is not None:
            return self.tiles(z, share, index)
        prior = self._prior
        width = len(prior.loc)
        w = z[:, :width]
        log_noise = z[:, width:]  # (C, 1) if the scale of the noise is learnt
        precision = z.new_full((len(z),), share * prior.noise_precision)
        if log_noise.shape[1]:
            precision = share * (-2 * log_noise[:, 0]).exp()
        loss, gradient = batched_loss(self._problem, w, precision, index)
        misfit = loss.mul_(precision)
        centred = w - prior.loc
        energy = torch.addmv(misfit, centred.square(), prior.precision, alpha=0.5)
        energy = energy.add_(prior.constant)
        gradient.addcmul_(centred, prior.precision)
        noise = prior.noise_precision * (2 * log_noise).exp()
        # (C, 0), of sum 0, if the scale is known
        noise_energy = (prior.num_targets - 1) * log_noise + 0.5 * noise
        slope = prior.num_targets - 1 + noise - 2 * misfit[:, None]
        return energy + noise_energy.sum(1), torch.cat([gradient, slope], 1)


class Layer(NamedTuple):
    """Linear layer with activation; ``weight`` and ``bias`` are offsets in the flat
    weights (-1: no bias).
    """

    inputs: int
    outputs: int
    weight: int
    bias: int
    kind: int = 0  # of the activation, index in FUNCTIONS


class Prior(NamedTuple):
    """Normal priors of the weights, and the half-normal one of the noise scale, the
    exponential of the last coordinate, if that is learnt.

    :param loc: ``(W,)``; ``precision`` likewise. Arrays in :class:`Tiles`.
    :param constant: of the energy.
    :param num_targets: normal targets, over the likelihood's temperature.
    :param noise_precision: precision of the noise or, if its scale is learnt, of the
        half-normal prior.
    """

    loc: Any
    precision: Any
    constant: float
    num_targets: float
    noise_precision: float


class Problem(NamedTuple):
    """A network and its data.

    :param x: inputs ``(N, inputs)``.
    :param y: labels ``(N, 1)`` or real targets ``(N, outputs)``.
    :param labels: whether the loss is cross-entropy; otherwise half the squared error.
    """

    layers: list[Layer]
    x: Tensor
    y: Tensor
    labels: bool


# reading ------------------------------------------------------------------------------


def problem_of(target: NetworkTarget) -> Problem:
    """Read the network and the data; raise ``Unavailable`` naming a part of the model
    that isn't supported.
    """
    likelihood = target.model.likelihood
    x = target.x.detach()
    y = target.y.detach()
    net = target.model.net
    names = [name for name, _ in net.named_parameters()]
    weight = next(iter(net.parameters()))
    if list(target.sites)[: len(names)] != names:
        raise Unavailable("its sites and parameters are in different orders")
    if (x.dtype, x.device) != (weight.dtype, weight.device):
        raise Unavailable(f"x is {x.dtype} on {x.device}, unlike its weights")
    labels = type(likelihood) is CategoricalLikelihood
    if not labels and type(likelihood) is not GaussianLikelihood:
        raise Unavailable(f"its likelihood is a {type(likelihood).__name__}")
    layers = read_layers(net, x[:2])
    y = y if labels else likelihood.targets(y)
    shape = (
        (len(x),) if labels or layers[-1].outputs == 1 else (len(x), layers[-1].outputs)
    )
    if y.shape != shape or y.device != x.device or (not labels and y.dtype != x.dtype):
        raise Unavailable(f"y has shape {tuple(y.shape)}, {y.dtype} on {y.device}")
    return Problem(layers, x.reshape(len(x), -1), y.reshape(len(x), -1), labels)


def prior_of(target: NetworkTarget, problem: Problem) -> Prior:
    """Read the priors; raise ``Unavailable`` for one that isn't normal."""
    likelihood = target.model.likelihood
    names = [name for name, _ in target.model.net.named_parameters()]
    priors = [_normal(target.sites[name]) for name in names]
    loc = torch.cat([prior.loc.detach().reshape(-1) for prior in priors])
    scale = torch.cat([prior.scale.detach().reshape(-1) for prior in priors])
    loc, scale = loc.to(problem.x), scale.to(problem.x)
    count = 0.0
    if not problem.labels:
        count = problem.y.numel() / likelihood.temperature
    constant = float(scale.double().log().sum()) + (count + len(loc)) * HALF_LOG_2PI
    noise_precision = 1.0  # of labels
    if isinstance(likelihood, GaussianLikelihood):
        noise_scale = likelihood.scale
        if noise_scale is None:
            # half-normal prior of the noise scale, the exponential of the last
            # coordinate
            noise_scale = likelihood.prior_scale
            constant += math.log(noise_scale / 2) + HALF_LOG_2PI
        else:
            constant += count * math.log(noise_scale)
        noise_precision = noise_scale**-2
    return Prior(loc, scale**-2, constant, count, float(noise_precision))


def _normal(prior: Distribution) -> Any:
    """Return the prior as independent normal distributions of its entries."""
    base = prior.base_dist if isinstance(prior, Independent) else prior
    if type(base).log_prob is not Normal.log_prob:
        raise Unavailable("a prior isn't normal")
    return base


def read_layers(net: nn.Module, x: Tensor) -> list[Layer]:
    """Read the layers of a network from the operators that it calls.

    :raises Unavailable: naming an operator or parameter that isn't supported.
    """
    offsets = {}
    size = 0
    for parameter in net.parameters():
        offsets[id(parameter)] = size
        size += parameter.numel()
    with torch.no_grad(), _Recorder() as recorder:
        net(x)
    layers: list[Layer] = []
    current = x
    transposed = {}
    for name, args, result in recorder.calls:
        if name == "t" and id(args[0]) in offsets:
            transposed[id(result)] = args[0]
            continue
        activation = name.rstrip("_")
        if (
            name in ("mm", "addmm")
            and args[-2] is current
            and id(args[-1]) in transposed
        ):
            weight = transposed[id(args[-1])]
            outputs, inputs = weight.shape
            bias = offsets.get(id(args[0])) if name == "addmm" else -1
            if bias is None or current.shape != (len(x), inputs):
                raise Unavailable(
                    "a bias is frozen, or the input of a layer isn't one vector for "
                    "each row"
                )
            layers.append(Layer(inputs, outputs, offsets[id(weight)], bias))
        elif (
            activation in ACTIVATIONS
            and args[0] is current
            and layers
            and not layers[-1].kind
        ):
            layers[-1] = layers[-1]._replace(kind=ACTIVATIONS[activation])
        elif not (name in SHAPES and args[0] is current and len(result) == len(x)):
            raise Unavailable(
                f"it calls {name}, which is neither a linear layer nor an activation "
                "after one"
            )
        current = result
    if size != sum(
        layer.outputs * (layer.inputs + (layer.bias >= 0)) for layer in layers
    ):
        raise Unavailable(
            "layers share parameters, or some parameters aren't of a linear layer"
        )
    return layers


class _Recorder(TorchDispatchMode):
    """Record of operators with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Args, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.overloadpacket.__name__, args, result))
        return result


# losses -------------------------------------------------------------------------------


def batched_loss(
    problem: Problem, w: Tensor, scale: Tensor, index: Tensor | None
) -> Evaluation:
    """Return the loss ``(C,)``, summed over rows, and ``scale`` times its gradient
    ``(C, W)``, by batched products.

    :param w: flat weights ``(C, W)``.
    :param scale: ``(C,)``.
    :param index: rows of each chain's mini-batch ``(C, B)``; ``None``: all.
    """
    h, y = (
        (problem.x, problem.y)
        if index is None
        else (problem.x[index], problem.y[index])
    )
    with torch.enable_grad():
        leaf = w.detach().requires_grad_()
        for layer in problem.layers:
            end = layer.weight + layer.outputs * layer.inputs
            h = (
                h
                @ leaf[:, layer.weight : end]
                .unflatten(1, (layer.outputs, layer.inputs))
                .mT
            )
            if layer.bias >= 0:
                h = h + leaf[:, None, layer.bias : layer.bias + layer.outputs]
            h = FUNCTIONS[layer.kind](h)
        if problem.labels:
            loss = functional.cross_entropy(
                h.mT, y[..., 0].expand(h.shape[:2]), reduction="none"
            ).sum(1)
        else:
            loss = 0.5 * (h - y).square().sum((1, 2))
        (gradient,) = torch.autograd.grad((loss * scale).sum(), leaf)
    return loss.detach(), gradient


class Tiles:
    """Energies by a compiled loop over chains, shared among threads if there is enough
    work.
    """

    def __init__(self, problem: Problem, prior: Prior):
        self.problem = problem
        self.prior = prior._replace(
            loc=prior.loc.numpy(), precision=prior.precision.numpy()
        )
        self._layers = np.array(problem.layers)
        self._flops = 6.0 * sum(
            layer.inputs * layer.outputs for layer in problem.layers
        )
        self._rows = torch.cat([problem.x, problem.y.to(problem.x)], 1)

    @cached_property
    def _tiles(self) -> Any:
        """Inputs and targets ``(tiles, width * T)``, features first, padded with
        zeros.
        """
        padded = functional.pad(self._rows, (0, 0, 0, -len(self._rows) % int(T)))
        # aligned by PyTorch
        return padded.unflatten(0, (-1, int(T))).mT.flatten(1).contiguous().numpy()

    def __call__(self, z: Tensor, share: float, index: Tensor | None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``.

        :param share: by which the loss is multiplied.
        :param index: rows of each chain's mini-batch ``(C, B)``; ``None``: all.
        :raises IndexError: if there are no such rows.
        """
        chains = len(z)
        count = rows = len(self._rows)
        if index is None:
            data, batches = self._tiles, NO_BATCHES
        else:
            data, batches = self._rows.numpy(), index.long().contiguous().numpy()
            count = index.shape[1]
            if not 0 <= int(index.min()) <= int(index.max()) < rows:
                raise IndexError(
                    f"mini-batches must be of rows between 0 and {rows - 1}"
                )
        energy = z.new_empty(chains)
        gradient = z.new_empty(z.shape)
        of_data = (self._layers, data, count, self.problem.labels, self.prior, share)
        arrays = (batches, z.contiguous().numpy(), energy.numpy(), gradient.numpy())

        def evaluate(chunk: slice) -> None:
            energies(*of_data, *[array[chunk] for array in arrays])

        work = int(self._flops * count * chains / THREAD_FLOPS)
        threads = max(1, min(torch.get_num_threads(), chains, work))
        if threads == 1:
            energies(*of_data, *arrays)
            return energy, gradient
        cuts = [chains * t // threads for t in range(threads + 1)]
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(evaluate, map(slice, cuts[:-1], cuts[1:])))
        return energy, gradient


def is_tiled(problem: Problem) -> bool:
    """Return whether :class:`Tiles` serves a problem."""
    x = problem.x
    numbers = sum(layer.inputs * layer.outputs for layer in problem.layers)
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return fits and numbers * x.element_size() <= WEIGHT_BYTES


@njit(**OPTIONS)
def energies(layers, data, count, labels, prior, share, index, z, energy, gradient):
    """Write the energies ``(C,)`` and their gradients ``(C, D)``.

    :param share: of the data, by which the loss is multiplied: more for mini-batches,
        less for temperatures above 1.

    The others are those of :func:`loss_and_gradient`.
    """
    width = len(prior.loc)
    is_learnt = z.shape[1] > width
    scale = np.empty(len(z), z.dtype)
    for c in range(len(z)):
        precision = math.exp(-2 * z[c, width]) if is_learnt else prior.noise_precision
        scale[c] = share * precision
    loss_and_gradient(layers, data, count, labels, index, z, scale, energy, gradient)
    for c in range(len(z)):
        position = z[c]
        slope = gradient[c]
        misfit = np.float64(energy[c]) * scale[c]  # as yet it is the loss
        squares = 0.0
        for d in range(width):
            centred = position[d] - prior.loc[d]
            pull = prior.precision[d] * centred
            squares += pull * centred
            slope[d] += pull
        total = prior.constant + misfit + 0.5 * squares
        if is_learnt:
            log_noise = np.float64(position[width])
            noise = prior.noise_precision * math.exp(2 * log_noise)
            total += (prior.num_targets - 1) * log_noise + 0.5 * noise
            slope[width] = prior.num_targets - 1 + noise - 2 * misfit
        energy[c] = total


# the loop over tiles ------------------------------------------------------------------


@njit(**OPTIONS)
def loss_and_gradient(layers, data, count, labels, index, w, scale, loss, gradient):
    """Write the losses ``(C,)``, and ``scale`` ``(C,)`` times their gradients ``(C,
    W)``.

    :param layers: the fields of each :class:`Layer`, ``(L, 5)``.
    :param data: inputs and targets: tiles ``(tiles, width * T)``, or rows ``(N,
        width)`` for mini-batches.
    :param count: rows of the data, or of a mini-batch.
    :param labels: whether the loss is cross-entropy; otherwise half the squared error.
    :param index: rows of each chain's mini-batch ``(C, B)``; ``(0, 0)`` without.
    :param w: flat weights, ``(C, W)`` or with more coordinates, whose gradient is 0.
    """
    batched = len(index) > 0
    inputs = np.uint64(layers[0, 0])
    classes = np.uint64(layers[-1, 1])
    units = np.uint64(layers[:, 1].sum())
    gathered = np.empty(data.shape[1] * T if batched else 0, w.dtype)
    values = np.empty(units * T, w.dtype)
    slopes = np.empty(units * T, w.dtype)
    spare = np.empty(2 * T, w.dtype)
    ones = np.ones(T, w.dtype)
    outputs = values[(units - classes) * T :]
    for c in range(len(w)):
        weights = w[c]
        of_chain = gradient[c]
        total = 0.0
        of_chain[:] = 0
        for start in range(0, count, T):
            rows = np.uint64(min(np.int64(T), count - start))
            if batched:
                tile = gathered
                _gather(data, index[c, start : start + np.int64(rows)], tile)
            else:
                tile = data[start // T]
            _forward(layers, weights, tile, values, slopes)
            if labels:
                total += _cross_entropy(
                    outputs, classes, tile[inputs * T :], rows, spare
                )
            else:
                total += _squares(outputs, tile[inputs * T :], rows)
            _backward(layers, weights, tile, values, slopes, units, ones, of_chain)
        loss[c] = total
        of_chain *= scale[c]


@njit(**OPTIONS)
def _forward(layers, weights, tile, values, slopes):
    """Write the values of all units, and the slopes of their activations."""
    h = tile
    unit = np.uint64(0)
    for k in range(len(layers)):
        n = np.uint64(layers[k, 0])
        m = np.uint64(layers[k, 1])
        out = values[unit * T : (unit + m) * T]
        _fill(weights, layers[k, 3], m, out)
        _multiply(weights[layers[k, 2] :], n, ONE, h, n, out, m)
        _activate(layers[k, 4], out, slopes[unit * T : (unit + m) * T])
        h = out
        unit = unit + m


@njit(**OPTIONS)
def _backward(layers, weights, tile, values, slopes, unit, ones, gradient):
    """Add the gradient of a tile, given that of the outputs at the end of ``values``,
    which is overwritten.
    """
    for k in range(len(layers) - 1, -1, -1):
        n = np.uint64(layers[k, 0])
        m = np.uint64(layers[k, 1])
        unit -= m
        delta = values[unit * T : (unit + m) * T]
        if layers[k, 4]:
            delta *= slopes[unit * T : (unit + m) * T]
        if layers[k, 3] >= 0:
            # a bias is the weight of the input 1
            _add_outer(delta, m, ones, ONE, gradient[layers[k, 3] :])
        h = values[(unit - n) * T : unit * T] if k > 0 else tile
        _add_outer(delta, m, h, n, gradient[layers[k, 2] :])
        if k > 0:
            h[:] = 0
            _multiply(weights[layers[k, 2] :], ONE, n, delta, m, h, n)


# matrix products, with rows of T numbers ----------------------------------------------


@njit(**OPTIONS)
def _gather(data, index, tile):
    """Write rows of the data, features first, repeated until the tile is full."""
    for r in range(T):
        row = data[index[np.int64(r) % len(index)]]
        for j in range(np.uint64(len(row))):
            tile[j * T + r] = row[j]


@njit(**OPTIONS)
def _fill(weights, start, m, out):
    """Write the bias of each unit, or zeros."""
    for i in range(m):
        bias = weights[start + i] if start >= 0 else weights.dtype.type(0)
        for r in range(T):
            out[i * T + r] = bias


@njit(**OPTIONS)
def _multiply(weights, row, column, a, n, out, m):
    """Add the sum over p < n of ``weights[i * row + p * column] * a[p]`` to ``out[i]``,
    for i < m.
    """
    for first in range(np.uint64(0), n - n % EIGHT, EIGHT):
        b = a[first * T :]
        for i in range(m):
            w, o = weights[i * row + first * column :], out[i * T :]
            w0, w1, w2, w3 = w[0], w[column], w[2 * column], w[3 * column]
            w4, w5, w6, w7 = w[4 * column], w[5 * column], w[6 * column], w[7 * column]
            for r in range(T):
                low = w0 * b[r] + w1 * b[T + r] + w2 * b[T2 + r] + w3 * b[T3 + r]
                o[r] += (
                    low
                    + w4 * b[T4 + r]
                    + w5 * b[T5 + r]
                    + w6 * b[T6 + r]
                    + w7 * b[T7 + r]
                )
    for p in range(n - n % EIGHT, n):
        for i in range(m):
            w0 = weights[i * row + p * column]
            for r in range(T):
                out[i * T + r] += w0 * a[p * T + r]


@njit(**OPTIONS)
def _add_outer(delta, m, a, n, out):
    """Add the inner products of rows ``delta[i]`` and ``a[p]`` to ``out[i * n + p]``,
    for i < m and p < n.
    """
    zero = out.dtype.type(0)
    for first in range(np.uint64(0), n - n % EIGHT, EIGHT):
        b = a[first * T :]
        for i in range(m):
            d = delta[i * T :]
            s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = zero
            for r in range(T):
                s0 += d[r] * b[r]
                s1 += d[r] * b[T + r]
                s2 += d[r] * b[T2 + r]
                s3 += d[r] * b[T3 + r]
                s4 += d[r] * b[T4 + r]
                s5 += d[r] * b[T5 + r]
                s6 += d[r] * b[T6 + r]
                s7 += d[r] * b[T7 + r]
            block = out[i * n + first :]
            for k, value in enumerate((s0, s1, s2, s3, s4, s5, s6, s7)):
                block[k] += value
    for p in range(n - n % EIGHT, n):
        for i in range(m):
            total = zero
            for r in range(T):
                total += delta[i * T + r] * a[p * T + r]
            out[i * n + p] += total


# activations and losses ---------------------------------------------------------------


@njit(inline="always", **OPTIONS)
def _exp(x, array):
    """Return the exponential in the precision of ``array``, of x limited to -87 and
    87.
    """
    t = array.dtype.type
    x = t(-87) if x < t(-87) else x
    x = t(87) if x > t(87) else x
    power = np.floor(x * t(1 / math.log(2)) + t(0.5))
    # minus a multiple of log 2, in two parts
    x = (x - power * t(0.693359375)) + power * t(2.121944400546905827679e-4)
    p = t(TAYLOR[13])
    for k in range(12, -1, -1):
        p = p * x + t(TAYLOR[k])
    return p * t(
        np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
    )


@njit(**OPTIONS)
def _activate(kind, h, slope):
    """Apply an activation to ``h`` in place, and write its slope."""
    t = h.dtype.type
    unit = t(1)
    gain = t(2 if kind == 2 else 1)
    size = np.uint64(len(h))
    if kind == 1:
        for j in range(size):
            slope[j] = unit if h[j] > t(0) else t(0)
            h[j] *= slope[j]
    elif kind == 2 or kind == 3:  # tanh(h) = 2 sigmoid(2 h) - 1
        for j in range(size):
            sigmoid = unit / (unit + _exp(-gain * h[j], h))
            slope[j] = gain * gain * sigmoid * (unit - sigmoid)
            h[j] = gain * sigmoid - (gain - unit)
    elif kind == 4:
        for j in range(size):
            sigmoid = unit / (unit + _exp(-h[j], h))
            slope[j] = sigmoid * (unit + h[j] * (unit - sigmoid))
            h[j] *= sigmoid


@njit(**OPTIONS)
def _squares(out, targets, rows):
    """Return half the squared error, and overwrite the outputs by its gradient."""
    total = 0.0
    for i in range(np.uint64(len(out)) // T):
        part = out.dtype.type(0)
        for r in range(T):
            error = (
                out[i * T + r] - targets[i * T + r] if r < rows else out.dtype.type(0)
            )
            out[i * T + r] = error
            part += error * error
        total += 0.5 * part
    return total


@njit(**OPTIONS)
def _cross_entropy(out, classes, labels, rows, spare):
    """Return the cross-entropy, and overwrite the outputs by its gradient."""
    top = spare[:T]
    mass = spare[T:]
    unit = out.dtype.type(1)
    total = 0.0
    top[:] = out[:T]
    mass[:] = 0
    for i in range(classes):
        for r in range(T):
            top[r] = max(top[r], out[i * T + r])
    for r in range(rows):
        total += top[r] - out[np.uint64(labels[r]) * T + r]
    for i in range(classes):
        for r in range(T):
            out[i * T + r] = _exp(out[i * T + r] - top[r], out)
            mass[r] += out[i * T + r]
    for r in range(T):
        total += math.log(mass[r]) if r < rows else 0.0
        mass[r] = unit / mass[r] if r < rows else 0
    for i in range(classes):
        for r in range(T):
            out[i * T + r] *= mass[r]
    for r in range(rows):
        out[np.uint64(labels[r]) * T + r] -= unit
    return total
