"""The Stan programs once more, line by line in NumPy and SciPy: what the models here are checked against.

Each function takes the database's data and one value of each of Stan's parameters, and returns the log-density of the
parameters themselves up to a constant (no Jacobian of a transformation). Loops are Stan's; differential equations are
solved by SciPy to 1e-10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import stats
from scipy.integrate import solve_ivp
from scipy.special import logsumexp

Data = dict[str, Any]
normal, cauchy, student = stats.norm.logpdf, stats.cauchy.logpdf, stats.t.logpdf


def arK(a: Data, alpha: Any, beta: Any, sigma: Any) -> float:
    total = normal(alpha, 0, 10) + normal(beta, 0, 10).sum() + cauchy(sigma, 0, 2.5)
    for t in range(int(a["K"]), int(a["T"])):
        mu = alpha
        for k in range(int(a["K"])):
            mu += beta[k] * a["y"][t - k - 1]
        total += normal(a["y"][t], mu, sigma)
    return total


def arma11(a: Data, mu: Any, phi: Any, theta: Any, sigma: Any) -> float:
    total = normal(mu, 0, 10) + normal(phi, 0, 2) + normal(theta, 0, 2) + cauchy(sigma, 0, 2.5)
    error = a["y"][0] - (mu + phi * mu)
    total += normal(error, 0, sigma)
    for t in range(1, int(a["T"])):
        error = a["y"][t] - (mu + phi * a["y"][t - 1] + theta * error)
        total += normal(error, 0, sigma)
    return total


def garch11(a: Data, mu: Any, alpha0: Any, alpha1: Any, beta1: Any) -> float:
    sigma, total = float(a["sigma1"]), normal(a["y"][0], mu, a["sigma1"])
    for t in range(1, int(a["T"])):
        sigma = np.sqrt(alpha0 + alpha1 * (a["y"][t - 1] - mu) ** 2 + beta1 * sigma**2)
        total += normal(a["y"][t], mu, sigma)
    return total


def forward(first: Any, emissions: Any, theta: Any) -> float:
    gamma = first
    for emission in emissions:
        gamma = np.array([logsumexp(gamma + np.log(theta[:, k]) + emission[k]) for k in range(2)])
    return float(logsumexp(gamma))


def _drive(a: Data, theta: Any, phi: Any, place: Any, emission: Any) -> float:
    total = sum(stats.dirichlet.logpdf(theta[k], a["alpha"][k]) for k in range(2))
    total += normal(phi[0], 0, 1) + normal(phi[1], 3, 1) + normal(place[0], 0, 1) + normal(place[1], 3, 1)
    return total + forward(emission[0], emission[1:], theta)


def hmm_drive_0(a: Data, theta1: Any, theta2: Any, phi: Any, **other: Any) -> float:
    rate = other["lambda"]
    exponential = stats.expon.logpdf
    emission = exponential(a["u"][:, None], scale=1 / phi) + exponential(a["v"][:, None], scale=1 / rate)
    return _drive(a, np.array([theta1, theta2]), phi, rate, emission)


def hmm_drive_1(a: Data, theta1: Any, theta2: Any, phi: Any, **other: Any) -> float:
    place = other["lambda"]
    emission = normal(a["u"][:, None], phi, a["tau"]) + normal(a["v"][:, None], place, a["rho"])
    return _drive(a, np.array([theta1, theta2]), phi, place, emission)


def hmm_example(a: Data, theta1: Any, theta2: Any, mu: Any) -> float:
    emission = normal(a["y"][:, None], mu, 1)
    prior = normal(mu[0], 3, 1) + normal(mu[1], 10, 1)
    return prior + forward(emission[0], emission[1:], np.array([theta1, theta2]))


def diamonds(a: Data, b: Any, Intercept: Any, sigma: Any) -> float:
    x = a["X"][:, 1:]
    mean = Intercept + (x - x.mean(0)) @ b
    prior = normal(b, 0, 1).sum() + student(Intercept, 3, 8, 10) + student(sigma, 3, 0, 10)
    return prior + normal(a["Y"], mean, sigma).sum()


def eight_schools_noncentered(a: Data, theta: Any, mu: Any, tau: Any) -> float:
    """The density of the untransformed effects, at those that give these ones."""
    untransformed = (theta - mu) / tau
    prior = normal(untransformed, 0, 1).sum() + normal(mu, 0, 5) + cauchy(tau, 0, 5)
    return prior + normal(a["y"], theta, a["sigma"]).sum()


def _squared_exponential(x: Any, alpha: Any, rho: Any) -> Any:
    return np.array([[alpha**2 * np.exp(-((s - t) ** 2) / (2 * rho**2)) for s in x] for t in x])


def _gp_prior(rho: Any, alpha: Any) -> float:
    return stats.gamma.logpdf(rho, 25, scale=1 / 4) + normal(alpha, 0, 2)


def gp_regr(a: Data, rho: Any, alpha: Any, sigma: Any) -> float:
    covariance = _squared_exponential(a["x"], alpha, rho) + sigma * np.eye(len(a["x"]))
    likelihood = stats.multivariate_normal.logpdf(a["y"], np.zeros(len(a["x"])), covariance)
    return _gp_prior(rho, alpha) + normal(sigma, 0, 1) + likelihood


def gp_pois_regr(a: Data, rho: Any, alpha: Any, f: Any) -> float:
    """The density of the untransformed values, at those that give these ones."""
    root = np.linalg.cholesky(_squared_exponential(a["x"], alpha, rho) + 1e-10 * np.eye(len(a["x"])))
    f_tilde = np.linalg.solve(root, f)
    return _gp_prior(rho, alpha) + normal(f_tilde, 0, 1).sum() + stats.poisson.logpmf(a["k"], np.exp(f)).sum()


def lotka_volterra(a: Data, theta: Any, z_init: Any, sigma: Any) -> float:
    def slope(t: float, z: Any) -> list[float]:
        return [(theta[0] - theta[1] * z[1]) * z[0], (-theta[2] + theta[3] * z[0]) * z[1]]

    found = solve_ivp(slope, (0, a["ts"][-1]), z_init, "DOP853", a["ts"], rtol=1e-10, atol=1e-12).y.T
    total = normal(theta[[0, 2]], 1, 0.5).sum() + normal(theta[[1, 3]], 0.05, 0.05).sum()
    for k in range(2):
        total += stats.lognorm.logpdf(sigma[k], 1, scale=np.exp(-1)) + stats.lognorm.logpdf(z_init[k], 1, scale=10)
        total += stats.lognorm.logpdf(a["y_init"][k], sigma[k], scale=z_init[k])
        total += stats.lognorm.logpdf(a["y"][:, k], sigma[k], scale=found[:, k]).sum()
    return total


def one_comp_mm_elim_abs(a: Data, k_a: Any, K_m: Any, V_m: Any, sigma: Any) -> float:
    def slope(t: float, c: Any) -> Any:
        return np.exp(-k_a * t) * a["D"] * k_a / a["V"] - (V_m / a["V"]) * c / (K_m + c)

    span = (float(a["t0"]), a["times"][-1])
    found = solve_ivp(slope, span, [0.0], "LSODA", a["times"], rtol=1e-10, atol=1e-12, first_step=1e-8).y[0]
    prior = cauchy(k_a) + cauchy(K_m) + cauchy(V_m) + cauchy(sigma)
    return prior + stats.lognorm.logpdf(a["C_hat"], sigma, scale=found).sum()


def low_dim_gauss_mix(a: Data, mu: Any, sigma: Any, theta: Any) -> float:
    prior = normal(sigma, 0, 2).sum() + normal(mu, 0, 2).sum() + stats.beta.logpdf(theta, 5, 5)
    parts = [np.log(theta) + normal(a["y"], mu[0], sigma[0]), np.log(1 - theta) + normal(a["y"], mu[1], sigma[1])]
    return prior + logsumexp(parts, axis=0).sum()


def kilpisjarvi(a: Data, alpha: Any, beta: Any, sigma: Any) -> float:
    prior = normal(alpha, a["pmualpha"], a["psalpha"]) + normal(beta, a["pmubeta"], a["psbeta"])
    return prior + normal(a["y"], alpha + beta * a["x"], sigma).sum()


def blr(a: Data, beta: Any, sigma: Any) -> float:
    return normal(beta, 0, 10).sum() + normal(sigma, 0, 10) + normal(a["y"], a["X"] @ beta, sigma).sum()


# regressions with a flat prior --------------------------------------------------------------------------------------


def earnings(a: Data, name: str, b: Any) -> tuple[Any, Any]:
    height, male = a["height"], a["male"]
    y = a["earn"] if name == "earn_height" else np.log10(a["earn"]) if name[:5] == "log10" else np.log(a["earn"])
    if name == "logearn_interaction_z":
        height = (height - np.mean(height)) / np.std(height, ddof=1)
    if name == "logearn_logheight_male":
        height = np.log(height)
    mean = b[0] + b[1] * height
    if "male" in name or "interaction" in name:
        mean = mean + b[2] * male
    if "interaction" in name:
        mean = mean + b[3] * height * male
    return y, mean


def kidscore(a: Data, name: str, b: Any) -> tuple[Any, Any]:
    school, iq, y = a["mom_hs"], a["mom_iq"], a["kid_score"]
    if name == "kidscore_mom_work":
        return y, b[0] + sum(b[k - 1] * (a["mom_work"] == k) for k in (2, 3, 4))
    if name == "kidscore_momhs":
        return y, b[0] + b[1] * school
    if name == "kidscore_momiq":
        return y, b[0] + b[1] * iq
    if name == "kidscore_momhsiq":
        return y, b[0] + b[1] * school + b[2] * iq
    if name == "kidscore_interaction_c":
        school, iq = school - np.mean(school), iq - np.mean(iq)
    if name == "kidscore_interaction_c2":
        school, iq = school - 0.5, iq - 100
    if name == "kidscore_interaction_z":
        school, iq = ((v - np.mean(v)) / (2 * np.std(v, ddof=1)) for v in (school, iq))
    return y, b[0] + b[1] * school + b[2] * iq + b[3] * school * iq


def mesquite(a: Data, name: str, b: Any) -> tuple[Any, Any]:
    one, two, high = a["diam1"], a["diam2"], a["canopy_height"]
    if name == "mesquite":
        sizes = b[1] * one + b[2] * two + b[3] * high + b[4] * a["total_height"] + b[5] * a["density"]
        return a["weight"], b[0] + sizes + b[6] * a["group"]
    y, mean = np.log(a["weight"]), b[0]
    if name == "logmesquite":
        mean = mean + b[1] * np.log(one) + b[2] * np.log(two) + b[3] * np.log(high) + b[4] * np.log(a["total_height"])
        return y, mean + b[5] * np.log(a["density"]) + b[6] * a["group"]
    mean = mean + b[1] * np.log(one * two * high)
    if name == "logmesquite_logvolume":
        return y, mean
    mean = mean + b[2] * np.log(one * two)
    if name == "logmesquite_logva":
        return y, mean + b[3] * a["group"]
    mean = mean + b[3] * np.log(one / two) + b[4] * np.log(a["total_height"])
    if name == "logmesquite_logvash":
        return y, mean + b[5] * a["group"]
    return y, mean + b[5] * np.log(a["density"]) + b[6] * a["group"]


def nes(a: Data, name: str, b: Any) -> tuple[Any, Any]:
    age = a["age_discrete"]
    mean = b[0] + b[1] * a["real_ideo"] + b[2] * a["race_adj"] + b[3] * (age == 2) + b[4] * (age == 3)
    return a["partyid7"], mean + b[5] * (age == 4) + b[6] * a["educ1"] + b[7] * a["gender"] + b[8] * a["income"]


FAMILIES = {"earn": earnings, "log10": earnings, "kid": kidscore, "mesq": mesquite, "logm": mesquite, "nes": nes}
FAMILIES["logearn"] = earnings
COMMON_CAUCHY = ("kidscore_interaction", "kidscore_momhs", "kidscore_momhsiq", "kidscore_momiq")


def log_density(program: str) -> Callable[..., float]:
    """The log-density ``(data, **parameters)`` of a Stan program."""
    if program in globals() and program not in FAMILIES and program not in ("mesquite", "nes"):
        return globals()[program]
    family = next(own for start, own in FAMILIES.items() if program.startswith(start))

    def regression(a: Data, beta: Any, sigma: Any) -> float:
        y, mean = family(a, program, beta)
        prior = cauchy(sigma, 0, 2.5) if program in COMMON_CAUCHY else 0.0
        return prior + normal(y, mean, sigma).sum()

    return regression
