"""Feed-forward networks on a CPU: loss and gradient of many weights, in a loop that Numba compiles and keeps.

One chain after the other, tile after tile of :data:`T` rows of the data, so that a tile's activations stay in the cache
from the forward to the backward pass. Features lead: an activation is ``(features, T)``, flat. A chain's result depends
neither on the other chains nor on the number of threads, to the last bit. NaN goes through.

Indices are unsigned: of signed ones Numba asks whether they count from the end, and no loop becomes vector code.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit

T, EIGHT = np.uint64(128), np.uint64(8)  # rows of a tile; features that are read at once
T2, T3, T4, T5, T6, T7 = (np.uint64(k * 128) for k in range(2, 8))
TAYLOR = tuple(1 / math.factorial(k) for k in range(14))
OPTIONS: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz"},  # sums in any order; NaN and infinite values stay what they are
    "error_model": "numpy",
    "nogil": True,
    "cache": True,
}


@njit(**OPTIONS)
def loss_and_gradient(layers, slopes_below, data, index, count, labels, w, scale, loss, gradient):
    """Write the losses ``(C,)``, and ``scale`` ``(C,)`` times their gradients ``(C, dim)``.

    :param layers: inputs, outputs, offsets of weight and bias (-1: none) and kind of activation of each,
        ``(L, 5)``.
    :param slopes_below: of rectifiers, below 0, ``(L,)``.
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
                _multiply(weights[layers[number, 2] :], n, np.uint64(1), below, n, out, m)
                _activate(layers[number, 4], slopes_below[number], out, slopes[at * T : (at + m) * T])
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
                    _add_rows(delta, m, found[layers[number, 3] :])
                if number:
                    below = values[(at - n) * T : at * T]
                _add_outer(delta, m, below, n, found[w_at:])
                if number:
                    below[:] = 0
                    _multiply(weights[w_at:], np.uint64(1), n, delta, m, below, n)
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
    for block in range(n // EIGHT):
        a0 = block * EIGHT * T
        a1, a2, a3, a4, a5, a6, a7 = a0 + T, a0 + T2, a0 + T3, a0 + T4, a0 + T5, a0 + T6, a0 + T7
        for i in range(m):
            w, o = weights[i * row + block * EIGHT * column :], i * T
            w0, w1, w2, w3 = w[0], w[column], w[2 * column], w[3 * column]
            w4, w5, w6, w7 = w[4 * column], w[5 * column], w[6 * column], w[7 * column]
            for r in range(T):
                low = w0 * a[a0 + r] + w1 * a[a1 + r] + w2 * a[a2 + r] + w3 * a[a3 + r]
                out[o + r] += low + w4 * a[a4 + r] + w5 * a[a5 + r] + w6 * a[a6 + r] + w7 * a[a7 + r]
    for p in range(n - n % EIGHT, n):
        for i in range(m):
            w0 = weights[i * row + p * column]
            for r in range(T):
                out[i * T + r] += w0 * a[p * T + r]


@njit(**OPTIONS)
def _add_outer(delta, m, a, n, out):
    """Add the products of rows ``delta[i]`` and ``a[p]`` to ``out[i * n + p]``, for i < m and p < n."""
    zero = out.dtype.type(0)
    for block in range(n // EIGHT):
        a0 = block * EIGHT * T
        a1, a2, a3, a4, a5, a6, a7 = a0 + T, a0 + T2, a0 + T3, a0 + T4, a0 + T5, a0 + T6, a0 + T7
        for i in range(m):
            s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
            for r in range(T):
                d = delta[i * T + r]
                s0, s1, s2, s3 = s0 + d * a[a0 + r], s1 + d * a[a1 + r], s2 + d * a[a2 + r], s3 + d * a[a3 + r]
                s4, s5, s6, s7 = s4 + d * a[a4 + r], s5 + d * a[a5 + r], s6 + d * a[a6 + r], s7 + d * a[a7 + r]
            own = out[i * n + block * EIGHT :]
            for place, value in enumerate((s0, s1, s2, s3, s4, s5, s6, s7)):
                own[place] += value
    for p in range(n - n % EIGHT, n):
        for i in range(m):
            s0 = zero
            for r in range(T):
                s0 += delta[i * T + r] * a[p * T + r]
            out[i * n + p] += s0


@njit(**OPTIONS)
def _add_rows(delta, m, out):
    """Add the sum of each row."""
    for i in range(m):
        total = out.dtype.type(0)
        for r in range(T):
            total += delta[i * T + r]
        out[i] += total


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
def _activate(kind, below, h, slope):
    """Write a function of ``h`` in its place, and its slope."""
    t = h.dtype.type
    one, gain, size = t(1), t(2 if kind == 2 else 1), np.uint64(len(h))
    if kind == 1:
        for j in range(size):
            slope[j] = one if h[j] > t(0) else below
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
