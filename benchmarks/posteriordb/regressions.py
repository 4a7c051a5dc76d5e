"""Linear regressions of posteriordb: what the Stan programs have in common is here, and the columns of each.

A flat prior of Stan is a distribution with the right support under ``mask(False)``, as Pyro's documentation advises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Data = dict[str, Array]
Columns = Callable[[Data], tuple[list[Array], Array]]  # columns but the constant one, and the response


def flat(d: Any, size: int) -> Any:
    """No prior for a vector of real numbers."""
    return d.Normal(0.0, 1.0).expand([size]).to_event(1).mask(False)


def flat_positive(d: Any) -> Any:
    """No prior for a positive number."""
    return d.HalfNormal(1.0).mask(False)


def _rows(d: Any, sample: Any, plate: Any, mean: Any, sigma: Any, y: Any) -> None:
    with plate("rows", len(y)):
        sample("y", d.Normal(mean, sigma), obs=y)


def _linear(beta: Callable[[Any, int], Any], sigma: Callable[[Any], Any]) -> Callable[..., None]:
    """A regression with these priors of its coefficients and its noise."""

    def model(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
        x, y = data
        coefficients, noise = sample("beta", beta(d, x.shape[1])), sample("sigma", sigma(d))
        _rows(d, sample, plate, x @ coefficients, noise, y)

    return model


plain = _linear(flat, flat_positive)
half_cauchy_noise = _linear(flat, lambda d: d.HalfCauchy(2.5))
blr = _linear(lambda d, size: d.Normal(0.0, 10.0).expand([size]).to_event(1), lambda d: d.HalfNormal(10.0))


def kilpisjarvi(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    x, y, prior = data
    alpha, beta = sample("alpha", d.Normal(prior[0], prior[1])), sample("beta", d.Normal(prior[2], prior[3]))
    sigma = sample("sigma", flat_positive(d))
    _rows(d, sample, plate, alpha + beta * x, sigma, y)


def diamonds(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    x, y = data
    b = sample("b", d.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    intercept = sample("Intercept", d.StudentT(3.0, 8.0, 10.0))
    sigma = sample("sigma", flat_positive(d))
    sample("sigma_prior", d.StudentT(3.0, 0.0, 10.0), obs=sigma)  # neither library folds a Student's t
    _rows(d, sample, plate, intercept + x @ b, sigma, y)


def ar(d: Any, sample: Any, plate: Any, lib: Any, data: tuple[Any, ...]) -> None:
    lags, y = data
    alpha = sample("alpha", d.Normal(0.0, 10.0))
    beta = sample("beta", d.Normal(0.0, 10.0).expand([lags.shape[1]]).to_event(1))
    sigma = sample("sigma", d.HalfCauchy(2.5))
    _rows(d, sample, plate, alpha + lags @ beta, sigma, y)


# columns ------------------------------------------------------------------------------------------------------------


def designed(columns: Columns) -> Callable[[Data], tuple[Array, ...]]:
    """The design matrix with a constant column, and the response."""

    def read(data: Data) -> tuple[Array, ...]:
        found, y = columns(data)
        return np.stack([np.ones(len(y)), *found], 1), y

    return read


def _standardised(x: Array, deviations: float) -> Array:
    return (x - x.mean()) / (deviations * x.std(ddof=1))


def _with_product(x: Array, z: Array) -> list[Array]:
    return [x, z, x * z]


EARNINGS: dict[str, Columns] = {
    "earn_height": lambda a: ([a["height"]], a["earn"]),
    "log10earn_height": lambda a: ([a["height"]], np.log10(a["earn"])),
    "logearn_height": lambda a: ([a["height"]], np.log(a["earn"])),
    "logearn_height_male": lambda a: ([a["height"], a["male"]], np.log(a["earn"])),
    "logearn_interaction": lambda a: (_with_product(a["height"], a["male"]), np.log(a["earn"])),
    "logearn_interaction_z": lambda a: (_with_product(_standardised(a["height"], 1), a["male"]), np.log(a["earn"])),
    "logearn_logheight_male": lambda a: ([np.log(a["height"]), a["male"]], np.log(a["earn"])),
}
KIDIQ: dict[str, Columns] = {
    "kidscore_interaction": lambda a: (_with_product(a["mom_hs"], a["mom_iq"]), a["kid_score"]),
    "kidscore_momhs": lambda a: ([a["mom_hs"]], a["kid_score"]),
    "kidscore_momhsiq": lambda a: ([a["mom_hs"], a["mom_iq"]], a["kid_score"]),
    "kidscore_momiq": lambda a: ([a["mom_iq"]], a["kid_score"]),
}


def _centred(a: Data) -> list[Array]:
    return _with_product(a["mom_hs"] - a["mom_hs"].mean(), a["mom_iq"] - a["mom_iq"].mean())


KIDIQ_WITH_MOM_WORK: dict[str, Columns] = {
    "kidscore_interaction_c": lambda a: (_centred(a), a["kid_score"]),
    "kidscore_interaction_c2": lambda a: (_with_product(a["mom_hs"] - 0.5, a["mom_iq"] - 100), a["kid_score"]),
    "kidscore_interaction_z": lambda a: (
        _with_product(_standardised(a["mom_hs"], 2), _standardised(a["mom_iq"], 2)),
        a["kid_score"],
    ),
    "kidscore_mom_work": lambda a: ([1.0 * (a["mom_work"] == k) for k in (2, 3, 4)], a["kid_score"]),
}


def _volume(a: Data) -> Array:
    return np.log(a["diam1"] * a["diam2"] * a["canopy_height"])


def _area(a: Data) -> Array:
    return np.log(a["diam1"] * a["diam2"])


def _shape(a: Data) -> Array:
    return np.log(a["diam1"] / a["diam2"])


_SIZES = ("diam1", "diam2", "canopy_height", "total_height", "density")
MESQUITE: dict[str, Columns] = {
    "mesquite": lambda a: ([*(a[name] for name in _SIZES), a["group"]], a["weight"]),
    "logmesquite": lambda a: ([*(np.log(a[name]) for name in _SIZES), a["group"]], np.log(a["weight"])),
    "logmesquite_logvolume": lambda a: ([_volume(a)], np.log(a["weight"])),
    "logmesquite_logva": lambda a: ([_volume(a), _area(a), a["group"]], np.log(a["weight"])),
    "logmesquite_logvas": lambda a: (
        [_volume(a), _area(a), _shape(a), np.log(a["total_height"]), np.log(a["density"]), a["group"]],
        np.log(a["weight"]),
    ),
    "logmesquite_logvash": lambda a: (
        [_volume(a), _area(a), _shape(a), np.log(a["total_height"]), a["group"]],
        np.log(a["weight"]),
    ),
}


def nes(a: Data) -> tuple[list[Array], Array]:
    ages = [1.0 * (a["age_discrete"] == k) for k in (2, 3, 4)]
    return [a["real_ideo"], a["race_adj"], *ages, a["educ1"], a["gender"], a["income"]], a["partyid7"]


def read_matrix(a: Data) -> tuple[Array, ...]:
    return a["X"], a["y"]


def read_kilpisjarvi(a: Data) -> tuple[Array, ...]:
    return a["x"], a["y"], np.array([float(a[name]) for name in ("pmualpha", "psalpha", "pmubeta", "psbeta")])


def read_diamonds(a: Data) -> tuple[Array, ...]:
    return a["X"][:, 1:] - a["X"][:, 1:].mean(0), a["Y"]


def read_lags(a: Data) -> tuple[Array, ...]:
    order, y = int(a["K"]), a["y"]
    return np.stack([y[order - k : len(y) - k] for k in range(1, order + 1)], 1), y[order:]
