r"""Engine ``"layers"``: the energy of a Bayesian feed-forward network and its gradient, without the model's evaluation.

.. math:: U(z) = \beta \sum_i \ell_i(w) - \log p(w) + \text{const}, \qquad \beta = \frac{N}{B\,T}\,\tau

with :math:`\ell` the cross-entropy and :math:`\tau = 1`, or half the squared error and :math:`\tau` the noise's
precision. A network qualifies if what it does to its inputs is a chain of linear layers with activations between, and
its priors are normal, which are added in closed form. Its loss is evaluated by batched products; on a CPU, if layers
aren't wide, in a loop that Numba compiles and keeps: one chain after the other, tile after tile of :data:`T` rows of
the data, so that a tile's activations stay in the cache from the forward to the backward pass. Features lead there: an
activation is ``(features, T)``, flat. A chain's result depends neither on the other chains nor on the number of
threads, to the last bit. NaN goes through.

Numba takes long to load, and so does this module.
"""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.mcmc.density.eager import ROWS, Evaluate, Evaluation, NetworkTarget, Rows, Unavailable
from pyro_symmetric.models import CategoricalLikelihood, GaussianLikelihood
from pyro_symmetric.traced import TracedTarget

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
WEIGHT_BYTES = 2**19  # beyond it a chain's weights leave the cache, and packed matrix products are faster
THREAD_FLOPS = 2e7  # less work than this isn't worth a thread
ACTIVATIONS = {"relu": 1, "tanh": 2, "sigmoid": 3, "silu": 4}  # PyTorch's operators, and their kinds
FUNCTIONS = (lambda h: h, torch.relu, torch.tanh, torch.sigmoid, functional.silu)
SHAPES = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten", "alias", "detach", "clone"}
# Indices of the loops are unsigned: of signed ones Numba asks whether they count from the end, and no loop becomes
# vector code.
T, ONE, EIGHT = np.uint64(128), np.uint64(1), np.uint64(8)  # rows of a tile; features that are read at once
T2, T3, T4, T5, T6, T7 = (np.uint64(k * 128) for k in range(2, 8))
TAYLOR = tuple(1 / math.factorial(k) for k in range(14))
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz"},  # sums in any order; NaN and infinite values stay what they are
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


class Layers:
    """The engine; it is compared with the model itself before it serves.

    :raises Unavailable: saying what about the model doesn't fit.
    """

    name = "layers"

    def __init__(self, target: NetworkTarget | TracedTarget):
        if not isinstance(target, NetworkTarget):
            raise Unavailable("it serves a BayesianModel only")
        problem, likelihood = problem_of(target), target.model.likelihood
        bases = [_normal(target.sites[name]) for name, _ in target.model.net.named_parameters()]
        loc, scale = (
            torch.cat([getattr(base, name).detach().reshape(-1) for base in bases]).to(problem.x)
            for name in ("loc", "scale")
        )
        self._loc, self._precision, self._dim = loc, scale**-2, len(loc)
        self._temperature, self._rows = likelihood.temperature, len(problem.x)
        self._count = 0 if problem.labels else problem.y.numel() / likelihood.temperature  # of normal densities
        gaussian = likelihood if isinstance(likelihood, GaussianLikelihood) else GaussianLikelihood(1.0)
        self._noise = gaussian.scale  # 1 of labels, whose loss it then doesn't scale
        self._constant = float(scale.double().log().sum()) + (self._count + self._dim) * HALF_LOG_2PI
        if self._noise is not None:
            self._constant += self._count * math.log(self._noise)
        else:  # a half-normal prior of a positive number, which is the exponential of the last coordinate
            self._noise_precision = gaussian.prior_scale**-2
            self._constant += math.log(gaussian.prior_scale / 2) + HALF_LOG_2PI
        self.tiled = is_tiled(problem)
        self._loss: Evaluate = Tiled(problem) if self.tiled else partial(batched_loss, problem)

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``."""
        z, index = z.detach(), None if rows is None else rows[ROWS]
        share = (1 if index is None else self._rows / index.shape[-1]) / self._temperature
        if self._noise is None:
            w, log_noise = z[:, :-1], z[:, -1]
            precision = share * (-2 * log_noise).exp()
        else:
            w, precision = z, z.new_full((len(z),), share * self._noise**-2)
        loss, gradient = self._loss(w, precision, index)
        misfit, centred = loss.mul_(precision), w - self._loc
        energy = torch.addmv(misfit, centred.square(), self._precision, alpha=0.5).add_(self._constant)
        gradient.addcmul_(centred, self._precision)
        if self._noise is not None:
            return energy, gradient
        noise = self._noise_precision * (2 * log_noise).exp()
        slope = self._count - 1 + noise - 2 * misfit
        return energy + (self._count - 1) * log_noise + 0.5 * noise, torch.cat([gradient, slope[:, None]], 1)


def _normal(prior: Distribution) -> Any:
    """The normal distribution of a prior's entries, each by itself."""
    base = prior.base_dist if isinstance(prior, Independent) else prior
    if type(base).log_prob is not Normal.log_prob:
        raise Unavailable("its priors aren't all normal")
    return base


class Layer(NamedTuple):
    """``activation(weight @ inputs + bias)``, and where weight and bias begin in a flat vector (-1: no bias)."""

    inputs: int
    outputs: int
    weight: int
    bias: int
    kind: int = 0  # of activation; 0: none


class Problem(NamedTuple):
    """A network and the data that it is fitted to.

    :param x: inputs ``(N, inputs)``.
    :param y: labels ``(N, 1)`` or real targets ``(N, outputs)``.
    :param labels: whether the loss of a row is the cross-entropy of its label, or half the squared error.
    """

    layers: list[Layer]
    x: Tensor
    y: Tensor
    labels: bool


# reading ------------------------------------------------------------------------------------------------------------


def problem_of(target: NetworkTarget) -> Problem:
    """:raises Unavailable: saying what about the model doesn't fit."""
    likelihood, x, y, net = target.model.likelihood, target.x.detach(), target.y.detach(), target.model.net
    names, like = [name for name, _ in net.named_parameters()], next(iter(net.parameters()))
    if list(target.sites)[: len(names)] != names:
        raise Unavailable("its sites come in another order than the network's parameters")
    if (x.dtype, x.device) != (like.dtype, like.device):
        raise Unavailable(f"x is of {x.dtype} on {x.device}, its weights aren't")
    labels = type(likelihood) is CategoricalLikelihood
    if not labels and type(likelihood) is not GaussianLikelihood:
        raise Unavailable(f"its likelihood is a {type(likelihood).__name__}")
    layers = read_layers(net, x[:2])
    y = y if labels else likelihood.targets(y)
    shape = (len(x),) if labels or layers[-1].outputs == 1 else (len(x), layers[-1].outputs)
    if y.shape != shape or y.device != x.device or (not labels and y.dtype != x.dtype):
        raise Unavailable(f"y has shape {tuple(y.shape)}, {y.dtype} on {y.device}")
    return Problem(layers, x.reshape(len(x), -1), y.reshape(len(x), -1), labels)


def read_layers(net: nn.Module, x: Tensor) -> list[Layer]:
    """The layers of a network in eval mode, from the operators that it meets on its way.

    :raises Unavailable: saying which part of it doesn't fit.
    """
    sizes = [parameter.numel() for parameter in net.parameters()]
    begins = {id(p): at for p, at in zip(net.parameters(), itertools.accumulate([0, *sizes]), strict=False)}
    with torch.no_grad(), _Recorded() as recorded:
        net(x)
    layers, current, transposed = list[Layer](), x, dict[int, Tensor]()
    for name, args, result in recorded.calls:
        if name == "t" and id(args[0]) in begins:
            transposed[id(result)] = args[0]
            continue
        if name in ("mm", "addmm") and args[-2] is current and id(args[-1]) in transposed:
            weight, biases = transposed[id(args[-1])], args[:-2]
            if any(id(bias) not in begins for bias in biases) or current.shape != (len(x), weight.shape[1]):
                raise Unavailable("a bias is frozen, or a layer doesn't take all features of a row")
            bias = begins[id(biases[0])] if biases else -1
            layers.append(Layer(weight.shape[1], weight.shape[0], begins[id(weight)], bias))
        elif name.rstrip("_") in ACTIVATIONS and args[0] is current and layers and not layers[-1].kind:
            layers[-1] = layers[-1]._replace(kind=ACTIVATIONS[name.rstrip("_")])
        elif not (name in SHAPES and args[0] is current and len(result) == len(x)):
            raise Unavailable(f"it calls {name}, where a layer or an activation should follow")
        current = result
    if sum(layer.outputs * (layer.inputs + (layer.bias >= 0)) for layer in layers) != sum(sizes):
        raise Unavailable("layers share parameters, or some have none")
    return layers


class _Recorded(TorchDispatchMode):
    """Operators that are called, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.overloadpacket.__name__, args, result))
        return result


# losses ---------------------------------------------------------------------------------------------------------------


def batched_loss(problem: Problem, w: Tensor, scale: Tensor, index: Tensor | None) -> Evaluation:
    """The loss ``(C,)``, summed over rows, and ``scale`` times its gradient ``(C, W)``, by batched products.

    :param w: flat weights ``(C, W)``.
    :param scale: ``(C,)``.
    :param index: rows of each chain's mini-batch ``(C, B)``; ``None`` for all.
    """
    h, y = (problem.x, problem.y) if index is None else (problem.x[index], problem.y[index])
    with torch.enable_grad():
        leaf = w.detach().requires_grad_()
        for layer in problem.layers:
            end = layer.weight + layer.outputs * layer.inputs
            h = h @ leaf[:, layer.weight : end].unflatten(1, (layer.outputs, layer.inputs)).mT
            if layer.bias >= 0:
                h = h + leaf[:, None, layer.bias : layer.bias + layer.outputs]
            h = FUNCTIONS[layer.kind](h)
        if problem.labels:
            loss = functional.cross_entropy(h.mT, y[..., 0].expand(h.shape[:2]), reduction="none").sum(1)
        else:
            loss = 0.5 * (h - y).square().sum((1, 2))
        (gradient,) = torch.autograd.grad((loss * scale).sum(), leaf)
    return loss.detach(), gradient


class Tiled:
    """The same by code that Numba compiles, which goes chain by chain; large enough work is shared among threads."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._layers = np.array(problem.layers)
        self._flops = 6.0 * sum(layer.inputs * layer.outputs for layer in problem.layers)
        self._data = torch.cat([problem.x, problem.y.to(problem.x)], 1).contiguous().numpy()
        self._tiles: Any = None

    def __call__(self, w: Tensor, scale: Tensor, index: Tensor | None) -> Evaluation:
        """Return as :func:`batched_loss` does.

        :raises IndexError: if there are no such rows.
        """
        chains, rows, data = len(w), len(self._data), self._data
        if index is not None and not (int(index.min()) >= 0 and int(index.max()) < rows):
            raise IndexError(f"mini-batches must be of rows between 0 and {rows - 1}")
        if index is None:
            data = self._tiles = self._in_tiles(int(T)) if self._tiles is None else self._tiles
        batches = torch.empty((0, 0), dtype=torch.long, device="cpu") if index is None else index.long()
        loss, gradient = w.new_empty(chains), w.new_empty(w.shape)
        each = [value.contiguous().numpy() for value in (batches, w, scale, loss, gradient)]
        count = rows if index is None else index.shape[1]

        def evaluate(cut: slice) -> None:
            own = [value[cut] for value in each]
            loss_and_gradient(self._layers, data, own[0], count, self.problem.labels, *own[1:])

        threads = max(1, min(torch.get_num_threads(), chains, int(self._flops * count * chains / THREAD_FLOPS)))
        cuts = [slice(chains * t // threads, chains * (t + 1) // threads) for t in range(threads)]
        if threads == 1:
            evaluate(cuts[0])
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(evaluate, cuts))
        return loss, gradient

    def _in_tiles(self, size: int) -> Any:
        """The data ``(tiles, width * size)``, features leading, zeros after the last row; aligned as by PyTorch."""
        padded = functional.pad(torch.from_numpy(self._data), (0, 0, 0, -len(self._data) % size))
        return padded.reshape(-1, size, padded.shape[1]).mT.flatten(1).contiguous().numpy()


def is_tiled(problem: Problem) -> bool:
    """True if a problem is one for :class:`Tiled`."""
    x, numbers = problem.x, sum(layer.inputs * layer.outputs for layer in problem.layers)
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return fits and numbers * x.element_size() <= WEIGHT_BYTES


# the loop of tiles ----------------------------------------------------------------------------------------------------


@njit(**OPTIONS)
def loss_and_gradient(layers, data, index, count, labels, w, scale, loss, gradient):
    """Write the losses ``(C,)``, and ``scale`` ``(C,)`` times their gradients ``(C, dim)``.

    :param layers: the fields of each :class:`Layer`, ``(L, 5)``.
    :param data: tiles of inputs and targets ``(tiles, width * T)``; or rows ``(N, width)``, if there are mini-batches.
    :param index: each chain's mini-batch ``(C, B)``; ``(0, 0)`` without.
    :param count: rows of the data, or of a mini-batch.
    :param labels: whether the loss is the cross-entropy of labels, or half the squared error.
    :param w: flat weights ``(C, dim)``.
    """
    batched, last = len(index) > 0, len(layers) - 1
    inputs, units = np.uint64(layers[0, 0]), np.uint64(layers[:, 1].sum())
    own = np.empty(data.shape[1] * T if batched else 0, w.dtype)
    values, slopes, spare = np.empty(units * T, w.dtype), np.empty(units * T, w.dtype), np.empty(2 * T, w.dtype)
    ones = np.ones(T, w.dtype)  # the input that a bias weighs
    for c in range(len(w)):
        weights, found, total = w[c], gradient[c], 0.0
        found[:] = 0
        for start in range(0, count, T):
            tile, rows = own, np.uint64(min(np.int64(T), count - start))
            if batched:
                _gather(data, index[c, start : start + np.int64(rows)], own)
            else:
                tile = data[start // T]
            below, at = tile, np.uint64(0)
            for number in range(len(layers)):
                n, m = np.uint64(layers[number, 0]), np.uint64(layers[number, 1])
                out = values[at * T : (at + m) * T]
                _fill(weights, layers[number, 3], m, out)
                _multiply(weights[layers[number, 2] :], n, ONE, below, n, out, m)
                _activate(layers[number, 4], out, slopes[at * T : (at + m) * T])
                below, at = out, at + m
            if labels:
                total += _cross_entropy(below, np.uint64(layers[last, 1]), tile[inputs * T :], rows, spare)
            else:
                total += _squares(below, tile[inputs * T :], rows)
            if layers[last, 4]:
                below *= slopes[len(slopes) - len(below) :]
            for number in range(last, -1, -1):
                n, m, w_at = np.uint64(layers[number, 0]), np.uint64(layers[number, 1]), layers[number, 2]
                at -= m
                delta, below = values[at * T : (at + m) * T], tile
                if layers[number, 3] >= 0:
                    _add_outer(delta, m, ones, ONE, found[layers[number, 3] :])
                if number:
                    below = values[(at - n) * T : at * T]
                _add_outer(delta, m, below, n, found[w_at:])
                if number:
                    below[:] = 0
                    _multiply(weights[w_at:], ONE, n, delta, m, below, n)
                    if layers[number - 1, 4]:
                        below *= slopes[(at - n) * T : at * T]
        loss[c] = total
        found *= scale[c]


# rows of T numbers ----------------------------------------------------------------------------------------------------


@njit(**OPTIONS)
def _gather(data, index, tile):
    """Write rows of the data, features leading, again and again until the tile is full."""
    for r in range(T):
        row = data[index[np.int64(r) % len(index)]]
        for j in range(np.uint64(len(row))):
            tile[j * T + r] = row[j]


@njit(**OPTIONS)
def _fill(weights, start, m, out):
    """Write each unit's bias, or zeros."""
    for i in range(m):
        bias = weights[start + i] if start >= 0 else weights.dtype.type(0)
        for r in range(T):
            out[i * T + r] = bias


@njit(**OPTIONS)
def _multiply(weights, row, column, a, n, out, m):
    """Add the sum over p < n of ``weights[i * row + p * column] * a[p]`` to ``out[i]``, for i < m."""
    for first in range(np.uint64(0), n - n % EIGHT, EIGHT):
        rows = a[first * T :]
        for i in range(m):
            w, o = weights[i * row + first * column :], out[i * T :]
            own = (
                w[0],
                w[column],
                w[2 * column],
                w[3 * column],
                w[4 * column],
                w[5 * column],
                w[6 * column],
                w[7 * column],
            )
            for r in range(T):
                total = out.dtype.type(0)
                for k in range(8):
                    total += own[k] * rows[np.uint64(k) * T + r]
                o[r] += total
    for p in range(n - n % EIGHT, n):
        for i in range(m):
            w0 = weights[i * row + p * column]
            for r in range(T):
                out[i * T + r] += w0 * a[p * T + r]


@njit(**OPTIONS)
def _add_outer(delta, m, a, n, out):
    """Add the products of rows ``delta[i]`` and ``a[p]`` to ``out[i * n + p]``, for i < m and p < n."""
    zero = out.dtype.type(0)
    for first in range(np.uint64(0), n - n % EIGHT, EIGHT):
        b = a[first * T :]
        for i in range(m):
            s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
            for r in range(T):
                d = delta[i * T + r]
                s0, s1, s2, s3 = s0 + d * b[r], s1 + d * b[T + r], s2 + d * b[T2 + r], s3 + d * b[T3 + r]
                s4, s5, s6, s7 = s4 + d * b[T4 + r], s5 + d * b[T5 + r], s6 + d * b[T6 + r], s7 + d * b[T7 + r]
            own = out[i * n + first :]
            for place, value in enumerate((s0, s1, s2, s3, s4, s5, s6, s7)):
                own[place] += value
    for p in range(n - n % EIGHT, n):
        for i in range(m):
            s0 = zero
            for r in range(T):
                s0 += delta[i * T + r] * a[p * T + r]
            out[i * n + p] += s0


# functions ------------------------------------------------------------------------------------------------------------


@njit(inline="always", **OPTIONS)
def _exp(x, like):
    """Return the exponential in the precision of ``like``, between those of -87 and 87."""
    t = like.dtype.type
    x = t(-87) if x < t(-87) else x
    x = t(87) if x > t(87) else x
    power = np.floor(x * t(1 / math.log(2)) + t(0.5))
    x = (x - power * t(0.693359375)) + power * t(2.121944400546905827679e-4)  # less a multiple of log 2, in two parts
    p = t(TAYLOR[13])
    for k in range(12, -1, -1):
        p = p * x + t(TAYLOR[k])
    return p * t(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32))


@njit(**OPTIONS)
def _activate(kind, h, slope):
    """Write a function of ``h`` in its place, and its slope."""
    t = h.dtype.type
    one, gain, size = t(1), t(2 if kind == 2 else 1), np.uint64(len(h))
    if kind == 1:
        for j in range(size):
            slope[j] = one if h[j] > t(0) else t(0)
            h[j] *= slope[j]
    elif kind == 2 or kind == 3:  # the hyperbolic tangent is twice a logistic function, less 1
        for j in range(size):
            sigmoid = one / (one + _exp(-gain * h[j], h))
            slope[j] = gain * gain * sigmoid * (one - sigmoid)
            h[j] = gain * sigmoid - (gain - one)
    elif kind == 4:
        for j in range(size):
            sigmoid = one / (one + _exp(-h[j], h))
            slope[j] = sigmoid * (one + h[j] * (one - sigmoid))
            h[j] *= sigmoid


@njit(**OPTIONS)
def _squares(out, targets, rows):
    """Return half the squared error, and write its gradient over the outputs."""
    total = 0.0
    for i in range(np.uint64(len(out)) // T):
        part = out.dtype.type(0)
        for r in range(T):
            error = out[i * T + r] - targets[i * T + r] if r < rows else out.dtype.type(0)
            out[i * T + r] = error
            part += error * error
        total += 0.5 * part
    return total


@njit(**OPTIONS)
def _cross_entropy(out, classes, labels, rows, spare):
    """Return the cross-entropy, and write its gradient over the outputs."""
    top, mass, one, total = spare[:T], spare[T:], out.dtype.type(1), 0.0
    top[:], mass[:] = out[:T], 0
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
        mass[r] = one / mass[r] if r < rows else 0
    for i in range(classes):
        for r in range(T):
            out[i * T + r] *= mass[r]
    for r in range(rows):
        out[np.uint64(labels[r]) * T + r] -= one
    return total
