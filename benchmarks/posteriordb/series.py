"""Time series of posteriordb: ARMA, GARCH, and hidden Markov chains.

Recurrences are written as a few operations on arrays, of both libraries: a loop over time costs PyTorch some
microseconds an operation, and in JAX a ``lax.scan`` of such small steps is slower than these, too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.posteriordb.regressions import flat_positive

Array = NDArray[Any]
Data = dict[str, Array]


def filtered(lib: Any, coefficient: Any, inputs: Any) -> Any:
    r""":math:`x_t = \sum_{s \le t} a^{t - s} b_s`, which solves :math:`x_t = a x_{t-1} + b_t` from :math:`x_0 = 0`.

    In blocks of as many entries as there are blocks: sums within each, and what each hands on to those after it.
    """
    length = inputs.shape[0]
    size = math.isqrt(length - 1) + 1
    places = lib.arange(size)
    apart = lib.abs(places[:, None] - places)
    filled = lib.concatenate([inputs, lib.zeros_like(inputs[:1]).repeat(size * size - length)])
    within = filled.reshape(size, size) @ lib.tril(coefficient**apart).T
    ends = lib.tril((coefficient**size) ** apart) @ within[:, -1]
    before = lib.concatenate([lib.zeros_like(ends[:1]), ends[:-1]])
    return (within + before[:, None] * coefficient ** (places + 1)).reshape(-1)[:length]


def log_product(lib: Any, factors: Any) -> Any:
    """Product of ``(T, 2, 2)`` matrices in their order, all given and returned by their entries' logarithms."""
    while factors.shape[0] > 1:
        pairs = factors.shape[0] // 2
        a, b = factors[0 : 2 * pairs : 2], factors[1 : 2 * pairs : 2]
        products = lib.logaddexp(a[:, :, :1] + b[:, :1, :], a[:, :, 1:] + b[:, 1:, :])
        rest = factors[2 * pairs :]
        factors = lib.concatenate([products, rest]) if rest.shape[0] else products
    return factors[0]


def arma(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    now, before = data
    mu, phi = sample("mu", d.Normal(0.0, 10.0)), sample("phi", d.Normal(0.0, 2.0))
    theta, sigma = sample("theta", d.Normal(0.0, 2.0)), sample("sigma", d.HalfCauchy(2.5))
    first = now[:1] - mu - phi * mu  # as if the value before were the mean, without an error
    errors = filtered(lib, -theta, lib.concatenate([first, now[1:] - mu - phi * before]))
    with plate("times", len(now)):
        sample("error", d.Normal(0.0, sigma), obs=errors)


def garch(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    y, first = data
    mu, alpha0 = sample("mu", d.Normal(0.0, 1.0).mask(False)), sample("alpha0", flat_positive(d))
    # Flat on the triangle alpha1 + beta1 < 1, whose width is 1 - alpha1.
    alpha1 = sample("alpha1", d.Beta(1.0, 2.0))
    beta1 = (1 - alpha1) * sample("share", d.Uniform(0.0, 1.0))
    moved = alpha0 + alpha1 * (y[:-1] - mu) ** 2
    variance = filtered(lib, beta1, lib.concatenate([first**2, moved]))
    with plate("times", len(y)):
        sample("y", d.Normal(mu, variance**0.5), obs=y)


def _hidden_chain(d: Any, sample: Any, lib: Any, first_row: Any, second_row: Any, emission: Any) -> None:
    """The likelihood of the observations, given the log-densities ``(T, 2)`` of each in each state."""
    transition = lib.log(lib.stack([first_row, second_row]))
    log_likelihood = log_product(lib, transition + emission[1:, None, :])
    ends = lib.logaddexp(emission[0, 0] + log_likelihood[0], emission[0, 1] + log_likelihood[1])
    sample("observations", d.Unit(lib.logaddexp(ends[0], ends[1])), obs=lib.zeros((0,)))


def _ordered(d: Any, sample: Any, lib: Any, name: str, mean: Any, positive: bool) -> Any:
    """Two numbers in order, each with a normal prior of deviation 1 before they were ordered."""
    low = sample(f"{name}_low", flat_positive(d) if positive else d.Normal(0.0, 1.0).mask(False))
    both = lib.stack([low, low + sample(f"{name}_gap", flat_positive(d))])
    sample(f"{name}_prior", d.Normal(mean, 1.0).to_event(1), obs=both)
    return both


def hmm_drive_0(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    u, v, alpha, means = data
    rows = [sample(f"theta{k + 1}", d.Dirichlet(alpha[k])) for k in range(2)]
    phi = _ordered(d, sample, lib, "phi", means, positive=True)
    rate = _ordered(d, sample, lib, "lambda", means, positive=True)
    emission = lib.log(phi) - phi * u[:, None] + lib.log(rate) - rate * v[:, None]
    _hidden_chain(d, sample, lib, *rows, emission)


def hmm_drive_1(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    u, v, alpha, means, scales = data
    rows = [sample(f"theta{k + 1}", d.Dirichlet(alpha[k])) for k in range(2)]
    phi = _ordered(d, sample, lib, "phi", means, positive=False)
    place = _ordered(d, sample, lib, "lambda", means, positive=False)
    emission = d.Normal(phi, scales[0]).log_prob(u[:, None]) + d.Normal(place, scales[1]).log_prob(v[:, None])
    _hidden_chain(d, sample, lib, *rows, emission)


def hmm_example(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    y, alpha, means = data
    rows = [sample(f"theta{k + 1}", d.Dirichlet(alpha[k])) for k in range(2)]
    mu = _ordered(d, sample, lib, "mu", means, positive=True)
    _hidden_chain(d, sample, lib, *rows, d.Normal(mu, 1.0).log_prob(y[:, None]))


# data ---------------------------------------------------------------------------------------------------------------


def read_arma(a: Data) -> tuple[Array, ...]:
    return a["y"], a["y"][:-1]


def read_garch(a: Data) -> tuple[Array, ...]:
    return a["y"], a["sigma1"].reshape(1)


def read_drive(a: Data) -> tuple[Array, ...]:
    scales = (np.array([a["tau"], a["rho"]]),) if "tau" in a else ()
    return a["u"], a["v"], a["alpha"], np.array([0.0, 3.0]), *scales


def read_hmm_example(a: Data) -> tuple[Array, ...]:
    return a["y"], np.ones((2, 2)), np.array([3.0, 10.0])
