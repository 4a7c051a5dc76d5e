"""The densities of posteriordb's posteriors, in the words of Pyro and NumPyro.

A model is a function ``(distributions, sample, plate, library, data)`` of
``pyro.distributions, pyro.sample, pyro.plate, torch`` or ``numpyro.distributions,
numpyro.sample, numpyro.plate, jax.numpy``. A flat prior of Stan is a distribution with
the right support under ``mask(False)``, as Pyro's documentation advises. Recurrences of
time series are written as a few operations on arrays, of both libraries: a loop over
time costs PyTorch some microseconds an operation, and in JAX a ``lax.scan`` of such
small steps is slower than these, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

# of Runge-Kutta: relative error 1.5e-5 at most at reference draws; Stan asks for 1e-5
STEPS_A_YEAR = 8
# of the drug: relative error 1e-5 at most, 2e-4 where K_m is under 0.001
STEPS_A_MEASUREMENT = 4
FIRST_STEPS = 32  # until the first measurement, when the concentration rises fast


# linear regressions -------------------------------------------------------------------


def flat(d: Any, size: int) -> Any:
    """No prior for a vector of real numbers."""
    return d.Normal(0.0, 1.0).expand([size]).to_event(1).mask(False)


def flat_positive(d: Any) -> Any:
    """No prior for a positive number."""
    return d.HalfNormal(1.0).mask(False)


def _rows(d: Any, sample: Any, plate: Any, mean: Any, sigma: Any, y: Any) -> None:
    with plate("rows", len(y)):
        sample("y", d.Normal(mean, sigma), obs=y)


def _linear(
    beta: Callable[[Any, int], Any], sigma: Callable[[Any], Any]
) -> Callable[..., None]:
    """A regression with these priors of its coefficients and its noise."""

    def model(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
        x, y = data
        coefficients, noise = (
            sample("beta", beta(d, x.shape[1])),
            sample("sigma", sigma(d)),
        )
        _rows(d, sample, plate, x @ coefficients, noise, y)

    return model


plain = _linear(flat, flat_positive)
half_cauchy_noise = _linear(flat, lambda d: d.HalfCauchy(2.5))
blr = _linear(
    lambda d, size: d.Normal(0.0, 10.0).expand([size]).to_event(1),
    lambda d: d.HalfNormal(10.0),
)


def kilpisjarvi(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    x, y, prior = data
    alpha, beta = (
        sample("alpha", d.Normal(prior[0], prior[1])),
        sample("beta", d.Normal(prior[2], prior[3])),
    )
    sigma = sample("sigma", flat_positive(d))
    _rows(d, sample, plate, alpha + beta * x, sigma, y)


def diamonds(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    x, y = data
    b = sample("b", d.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    intercept = sample("Intercept", d.StudentT(3.0, 8.0, 10.0))
    sigma = sample("sigma", flat_positive(d))
    # neither library folds a Student's t
    sample("sigma_prior", d.StudentT(3.0, 0.0, 10.0), obs=sigma)
    _rows(d, sample, plate, intercept + x @ b, sigma, y)


def ar(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    lags, y = data
    alpha = sample("alpha", d.Normal(0.0, 10.0))
    beta = sample("beta", d.Normal(0.0, 10.0).expand([lags.shape[1]]).to_event(1))
    sigma = sample("sigma", d.HalfCauchy(2.5))
    _rows(d, sample, plate, alpha + lags @ beta, sigma, y)


# time series: ARMA, GARCH, and hidden Markov chains -----------------------------------


def filtered(lib: Any, coefficient: Any, inputs: Any) -> Any:
    r""":math:`x_t = \sum_{s \le t} a^{t - s} b_s`, which solves :math:`x_t = a x_{t-1}
    + b_t` from :math:`x_0 = 0`.

    In blocks of as many entries as there are blocks: sums within each, and what each
    hands on to those after it.
    """
    length = inputs.shape[0]
    size = math.isqrt(length - 1) + 1
    places = lib.arange(size)
    apart = lib.abs(places[:, None] - places)
    filled = lib.concatenate(
        [inputs, lib.zeros_like(inputs[:1]).repeat(size * size - length)]
    )
    within = filled.reshape(size, size) @ lib.tril(coefficient**apart).T
    ends = lib.tril((coefficient**size) ** apart) @ within[:, -1]
    before = lib.concatenate([lib.zeros_like(ends[:1]), ends[:-1]])
    return (within + before[:, None] * coefficient ** (places + 1)).reshape(-1)[:length]


def log_product(lib: Any, factors: Any) -> Any:
    """Product of ``(T, 2, 2)`` matrices in their order, all given and returned by their
    entries' logarithms.
    """
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
    theta, sigma = (
        sample("theta", d.Normal(0.0, 2.0)),
        sample("sigma", d.HalfCauchy(2.5)),
    )
    # as if the value before were the mean, without an error
    first = now[:1] - mu - phi * mu
    errors = filtered(
        lib, -theta, lib.concatenate([first, now[1:] - mu - phi * before])
    )
    with plate("times", len(now)):
        sample("error", d.Normal(0.0, sigma), obs=errors)


def garch(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    y, first = data
    mu, alpha0 = (
        sample("mu", d.Normal(0.0, 1.0).mask(False)),
        sample("alpha0", flat_positive(d)),
    )
    # Flat on the triangle alpha1 + beta1 < 1, whose width is 1 - alpha1.
    alpha1 = sample("alpha1", d.Beta(1.0, 2.0))
    beta1 = (1 - alpha1) * sample("share", d.Uniform(0.0, 1.0))
    moved = alpha0 + alpha1 * (y[:-1] - mu) ** 2
    variance = filtered(lib, beta1, lib.concatenate([first**2, moved]))
    with plate("times", len(y)):
        sample("y", d.Normal(mu, variance**0.5), obs=y)


def _hidden_chain(
    d: Any, sample: Any, lib: Any, first_row: Any, second_row: Any, emission: Any
) -> None:
    """The likelihood of the observations, given the log-densities ``(T, 2)`` of each in
    each state.
    """
    transition = lib.log(lib.stack([first_row, second_row]))
    log_likelihood = log_product(lib, transition + emission[1:, None, :])
    ends = lib.logaddexp(
        emission[0, 0] + log_likelihood[0], emission[0, 1] + log_likelihood[1]
    )
    sample("observations", d.Unit(lib.logaddexp(ends[0], ends[1])), obs=lib.zeros((0,)))


def _ordered(
    d: Any, sample: Any, lib: Any, name: str, mean: Any, positive: bool
) -> Any:
    """Two numbers in order, each with a normal prior of deviation 1 before they were
    ordered.
    """
    low = sample(
        f"{name}_low", flat_positive(d) if positive else d.Normal(0.0, 1.0).mask(False)
    )
    both = lib.stack([low, low + sample(f"{name}_gap", flat_positive(d))])
    sample(f"{name}_prior", d.Normal(mean, 1.0).to_event(1), obs=both)
    return both


def hmm_drive_0(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    u, v, alpha, means = data
    rows = [sample(f"theta{k + 1}", d.Dirichlet(alpha[k])) for k in range(2)]
    phi = _ordered(d, sample, lib, "phi", means, positive=True)
    rate = _ordered(d, sample, lib, "lambda", means, positive=True)
    emission = lib.log(phi) - phi * u[:, None] + lib.log(rate) - rate * v[:, None]
    _hidden_chain(d, sample, lib, *rows, emission)


def hmm_drive_1(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    u, v, alpha, means, scales = data
    rows = [sample(f"theta{k + 1}", d.Dirichlet(alpha[k])) for k in range(2)]
    phi = _ordered(d, sample, lib, "phi", means, positive=False)
    place = _ordered(d, sample, lib, "lambda", means, positive=False)
    emission = d.Normal(phi, scales[0]).log_prob(u[:, None]) + d.Normal(
        place, scales[1]
    ).log_prob(v[:, None])
    _hidden_chain(d, sample, lib, *rows, emission)


def hmm_example(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    y, alpha, means = data
    rows = [sample(f"theta{k + 1}", d.Dirichlet(alpha[k])) for k in range(2)]
    mu = _ordered(d, sample, lib, "mu", means, positive=True)
    _hidden_chain(d, sample, lib, *rows, d.Normal(mu, 1.0).log_prob(y[:, None]))


# a hierarchy and a mixture ------------------------------------------------------------


def eight_schools(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    y, sigma = data
    mu, tau = sample("mu", d.Normal(0.0, 5.0)), sample("tau", d.HalfCauchy(5.0))
    with plate("schools", len(y)):
        theta = sample("theta_trans", d.Normal(0.0, 1.0))
        sample("y", d.Normal(mu + tau * theta, sigma), obs=y)


def mixture(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    (y,) = data
    low = sample("mu_low", d.Normal(0.0, 2.0))
    high = low + sample("mu_gap", d.HalfNormal(1.0).mask(False))
    sample("mu_high", d.Normal(0.0, 2.0), obs=high)
    sigma = sample("sigma", d.HalfNormal(2.0).expand([2]).to_event(1))
    theta = sample("theta", d.Beta(5.0, 5.0))
    first = lib.log(theta) + d.Normal(low, sigma[0]).log_prob(y)
    second = lib.log1p(-theta) + d.Normal(high, sigma[1]).log_prob(y)
    sample(
        "observations", d.Unit(lib.logaddexp(first, second).sum()), obs=lib.zeros((0,))
    )


# Gaussian processes -------------------------------------------------------------------


def _covariance(lib: Any, distances: Any, rho: Any, alpha: Any) -> Any:
    return alpha**2 * lib.exp(-0.5 * distances / rho**2)


def gp_regression(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    distances, unit, y = data
    rho, alpha = sample("rho", d.Gamma(25.0, 4.0)), sample("alpha", d.HalfNormal(2.0))
    sigma = sample("sigma", d.HalfNormal(1.0))
    root = lib.linalg.cholesky(_covariance(lib, distances, rho, alpha) + sigma * unit)
    sample("y", d.MultivariateNormal(lib.zeros_like(y), scale_tril=root), obs=y)


def gp_poisson(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    distances, unit, counts = data
    rho, alpha = sample("rho", d.Gamma(25.0, 4.0)), sample("alpha", d.HalfNormal(2.0))
    free = sample("f_tilde", d.Normal(0.0, 1.0).expand([len(counts)]).to_event(1))
    f = (
        lib.linalg.cholesky(_covariance(lib, distances, rho, alpha) + 1e-10 * unit)
        @ free
    )
    with plate("places", len(counts)):
        sample("k", d.Poisson(lib.exp(f)), obs=counts)


# differential equations ---------------------------------------------------------------


def scan(lib: Any, step: Any, state: Any, inputs: Any) -> Any:
    """The states after each step ``(state, input) -> state``: a loop in PyTorch,
    ``lax.scan`` in JAX.
    """
    if lib.__name__ != "torch":
        import jax

        return jax.lax.scan(lambda old, x: (step(old, x),) * 2, state, inputs)[1]
    states = []
    for x in inputs:
        state = step(state, x)
        states.append(state)
    return lib.stack(states)


def lotka_volterra(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    r"""Hares ``u`` and lynx ``v``: :math:`(\log u)' = \alpha - \beta v,\ (\log v)' =
    \delta u - \gamma`.

    Runge and Kutta's method of order 4 for the logarithms, by fixed steps.
    """
    first, log_y, mean, deviation, sign, times = data
    theta = sample("theta", d.HalfNormal(1.0).expand([4]).to_event(1).mask(False))
    sample("theta_prior", d.Normal(mean, deviation).to_event(1), obs=theta)
    start = sample(
        "z_init", d.LogNormal(float(np.log(10)), 1.0).expand([2]).to_event(1)
    )
    sigma = sample("sigma", d.LogNormal(-1.0, 1.0).expand([2]).to_event(1))
    rate, pull, h = sign * theta[0::2], -sign * theta[1::2], 1 / STEPS_A_YEAR

    def slope(p: Any) -> Any:
        return rate + pull * lib.exp(lib.flip(p, (0,)))

    def step(p: Any, _: Any) -> Any:
        a = slope(p)
        b = slope(p + (h / 2) * a)
        c = slope(p + (h / 2) * b)
        return p + (h / 6) * (a + 2 * (b + c) + slope(p + h * c))

    states = scan(lib, step, lib.log(start), times)[STEPS_A_YEAR - 1 :: STEPS_A_YEAR]
    sample("y_init", d.Normal(lib.log(start), sigma).to_event(1), obs=first)
    with plate("years", len(log_y)):
        sample("y", d.Normal(states, sigma).to_event(1), obs=log_y)


def one_compartment(
    d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]
) -> None:
    r"""A drug's concentration: :math:`C' = \frac{D k_a}{V} e^{-k_a t} - \frac{V_m}{V}
    \frac{C}{K_m + C},\ C(0) = 0`.

    Runge and Kutta's method of order 4 by fixed steps, which are shorter at first.
    """
    log_y, times, steps, at, dose, volume = data
    k_a, k_m = sample("k_a", d.HalfCauchy(1.0)), sample("K_m", d.HalfCauchy(1.0))
    v_m, sigma = sample("V_m", d.HalfCauchy(1.0)), sample("sigma", d.HalfCauchy(1.0))
    # at the beginning, the middle and the end of each step
    doses = dose * k_a / volume * lib.exp(-k_a * times)
    fastest = v_m / volume

    def step(c: Any, x: Any) -> Any:
        first, middle, last, h = x
        k1 = first - fastest * c / (k_m + c)
        mid = c + (h / 2) * k1
        k2 = middle - fastest * mid / (k_m + mid)
        mid = c + (h / 2) * k2
        k3 = middle - fastest * mid / (k_m + mid)
        end = c + h * k3
        return c + (h / 6) * (k1 + 2 * (k2 + k3) + last - fastest * end / (k_m + end))

    inputs = lib.concatenate([doses, steps[:, None]], -1)
    states = scan(lib, step, lib.zeros_like(k_a), inputs)[at]
    with plate("times", len(log_y)):
        sample("y", d.Normal(lib.log(states), sigma), obs=log_y)
