"""Gaussian processes, differential equations, a mixture and a hierarchy of posteriordb."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Data = dict[str, Array]

STEPS_A_YEAR = 8  # of Runge-Kutta: relative error 1.5e-5 at most at reference draws; Stan asks for 1e-5
STEPS_A_MEASUREMENT = 4  # of the drug: relative error 1e-5 at most, 2e-4 where K_m is under 0.001
FIRST_STEPS = 32  # until the first measurement, when the concentration rises fast


def eight_schools(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
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
    sample("observations", d.Unit(lib.logaddexp(first, second).sum()), obs=lib.zeros((0,)))


# Gaussian processes -------------------------------------------------------------------------------------------------


def _covariance(lib: Any, distances: Any, rho: Any, alpha: Any) -> Any:
    return alpha**2 * lib.exp(-0.5 * distances / rho**2)


def gp_regression(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    distances, unit, y = data
    rho, alpha = sample("rho", d.Gamma(25.0, 4.0)), sample("alpha", d.HalfNormal(2.0))
    sigma = sample("sigma", d.HalfNormal(1.0))
    root = lib.linalg.cholesky(_covariance(lib, distances, rho, alpha) + sigma * unit)
    sample("y", d.MultivariateNormal(lib.zeros_like(y), scale_tril=root), obs=y)


def gp_poisson(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    distances, unit, counts = data
    rho, alpha = sample("rho", d.Gamma(25.0, 4.0)), sample("alpha", d.HalfNormal(2.0))
    free = sample("f_tilde", d.Normal(0.0, 1.0).expand([len(counts)]).to_event(1))
    f = lib.linalg.cholesky(_covariance(lib, distances, rho, alpha) + 1e-10 * unit) @ free
    with plate("places", len(counts)):
        sample("k", d.Poisson(lib.exp(f)), obs=counts)


# differential equations ---------------------------------------------------------------------------------------------


def scan(lib: Any, step: Any, state: Any, inputs: Any) -> Any:
    """The states after each step ``(state, input) -> state``: a loop in PyTorch, ``lax.scan`` in JAX."""
    if lib.__name__ != "torch":
        import jax

        return jax.lax.scan(lambda old, x: (step(old, x),) * 2, state, inputs)[1]
    states = []
    for x in inputs:
        state = step(state, x)
        states.append(state)
    return lib.stack(states)


def lotka_volterra(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    r"""Hares ``u`` and lynx ``v``: :math:`(\log u)' = \alpha - \beta v,\ (\log v)' = \delta u - \gamma`.

    Runge and Kutta's method of order 4 for the logarithms, by fixed steps.
    """
    first, log_y, mean, deviation, sign, times = data
    theta = sample("theta", d.HalfNormal(1.0).expand([4]).to_event(1).mask(False))
    sample("theta_prior", d.Normal(mean, deviation).to_event(1), obs=theta)
    start = sample("z_init", d.LogNormal(float(np.log(10)), 1.0).expand([2]).to_event(1))
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


def one_compartment(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    r"""A drug's concentration: :math:`C' = \frac{D k_a}{V} e^{-k_a t} - \frac{V_m}{V} \frac{C}{K_m + C},\ C(0) = 0`.

    Runge and Kutta's method of order 4 by fixed steps, which are shorter at first.
    """
    log_y, times, steps, at, dose, volume = data
    k_a, k_m = sample("k_a", d.HalfCauchy(1.0)), sample("K_m", d.HalfCauchy(1.0))
    v_m, sigma = sample("V_m", d.HalfCauchy(1.0)), sample("sigma", d.HalfCauchy(1.0))
    doses = dose * k_a / volume * lib.exp(-k_a * times)  # at the beginning, the middle and the end of each step
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


# data ---------------------------------------------------------------------------------------------------------------


def read_schools(a: Data) -> tuple[Array, ...]:
    return a["y"], a["sigma"]


def read_mixture(a: Data) -> tuple[Array, ...]:
    return (a["y"],)


def read_gp(response: str) -> Any:
    return lambda a: (np.square(a["x"][:, None] - a["x"]), np.eye(len(a["x"])), a[response])


def read_hares(a: Data) -> tuple[Array, ...]:
    mean, deviation = np.array([1.0, 0.05, 1.0, 0.05]), np.array([0.5, 0.05, 0.5, 0.05])
    steps = np.zeros(STEPS_A_YEAR * int(a["N"]))
    return np.log(a["y_init"]), np.log(a["y"]), mean, deviation, np.array([1.0, -1.0]), steps


def read_drug(a: Data) -> tuple[Array, ...]:
    counts = [FIRST_STEPS, *[STEPS_A_MEASUREMENT] * (int(a["N_t"]) - 1)]
    between = np.diff(a["times"], prepend=a["t0"])
    steps = np.repeat(between / counts, counts)
    ends = np.cumsum(steps)
    times = np.stack([ends - steps, ends - steps / 2, ends], 1)
    return np.log(a["C_hat"]), times, steps, np.cumsum(counts) - 1, np.asarray(a["D"]), np.asarray(a["V"])
