"""The posteriors: each one's model, its data, and what the reference calls its draws.

All 45 posteriors whose reference draws the database holds. The regressions have the
Stan programs' scales: columns of very different size and strong correlations, which a
sampler must cope with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.posteriordb import models

Array = NDArray[Any]
Data = dict[str, Array]
# columns but the constant one, and the response
Columns = Callable[[Data], tuple[list[Array], Array]]
# Stan's parameter, or a site of ours -> (..., *event_shape)
Draws = Mapping[str, Array]


def unchanged(draws: Draws) -> dict[str, Array]:
    return dict(draws)


@dataclass(frozen=True)
class Entry:
    """A posterior of the database.

    :param write: the model.
    :param read: data of the database -> the model's arrays.
    :param to_stan: draws of our sites -> draws of Stan's parameters.
    :param logarithms: parameters of infinite variance, of which the logarithm is
        compared.
    """

    write: Callable[..., None]
    read: Callable[[dict[str, Array]], tuple[Array, ...]]
    to_stan: Callable[[Draws], dict[str, Array]] = unchanged
    logarithms: tuple[str, ...] = ()


def named(parameters: Draws) -> dict[str, Array]:
    """Numbers ``(chains, draws)`` by Stan's names, such as ``beta[1]``, of parameters
    ``(chains, draws, ...)``.
    """
    found = {}
    for name, values in parameters.items():
        if values.ndim == 2:
            found[name] = values
        for place in np.ndindex(values.shape[2:]) if values.ndim > 2 else ():
            found[f"{name}[{','.join(str(i + 1) for i in place)}]"] = values[
                (..., *place)
            ]
    return found


def gathered(numbers: Draws) -> dict[str, Array]:
    """Parameters, the other way round; none has more than one axis."""
    groups: dict[str, list[Array]] = {}
    for name, values in numbers.items():
        groups.setdefault(name.partition("[")[0], []).append(values)
    return {
        name: np.stack(v, -1) if f"{name}[1]" in numbers else v[0]
        for name, v in groups.items()
    }


# parameters that a site of ours isn't -------------------------------------------------


def _with(draws: Draws, new: Draws, *gone: str) -> dict[str, Array]:
    return {**{name: value for name, value in draws.items() if name not in gone}, **new}


def _ordered(*names: str) -> Callable[[Draws], dict[str, Array]]:
    def to_stan(draws: Draws) -> dict[str, Array]:
        low_gap = {name: (draws[f"{name}_low"], draws[f"{name}_gap"]) for name in names}
        both = {
            name: np.stack([low, low + gap], -1) for name, (low, gap) in low_gap.items()
        }
        return _with(
            draws,
            both,
            *(f"{name}_{part}" for name in names for part in ("low", "gap")),
        )

    return to_stan


def _garch(draws: Draws) -> dict[str, Array]:
    return _with(draws, {"beta1": draws["share"] * (1 - draws["alpha1"])}, "share")


def _schools(draws: Draws) -> dict[str, Array]:
    mu, tau = (draws[name][..., None] for name in ("mu", "tau"))
    return _with(draws, {"theta": mu + tau * draws["theta_trans"]}, "theta_trans")


def _gp_poisson(draws: Draws) -> dict[str, Array]:
    x = np.linspace(-10, 10, 11)  # the places of the only data set
    rho, alpha = (draws[name][..., None, None] for name in ("rho", "alpha"))
    covariance = alpha**2 * np.exp(
        -0.5 * (x[:, None] - x) ** 2 / rho**2
    ) + 1e-10 * np.eye(len(x))
    return _with(
        draws,
        {"f": (np.linalg.cholesky(covariance) @ draws["f_tilde"][..., None])[..., 0]},
        "f_tilde",
    )


# data of the models -------------------------------------------------------------------


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
    "logearn_interaction": lambda a: (
        _with_product(a["height"], a["male"]),
        np.log(a["earn"]),
    ),
    "logearn_interaction_z": lambda a: (
        _with_product(_standardised(a["height"], 1), a["male"]),
        np.log(a["earn"]),
    ),
    "logearn_logheight_male": lambda a: (
        [np.log(a["height"]), a["male"]],
        np.log(a["earn"]),
    ),
}
KIDIQ: dict[str, Columns] = {
    "kidscore_interaction": lambda a: (
        _with_product(a["mom_hs"], a["mom_iq"]),
        a["kid_score"],
    ),
    "kidscore_momhs": lambda a: ([a["mom_hs"]], a["kid_score"]),
    "kidscore_momhsiq": lambda a: ([a["mom_hs"], a["mom_iq"]], a["kid_score"]),
    "kidscore_momiq": lambda a: ([a["mom_iq"]], a["kid_score"]),
}


def _centred(a: Data) -> list[Array]:
    return _with_product(
        a["mom_hs"] - a["mom_hs"].mean(), a["mom_iq"] - a["mom_iq"].mean()
    )


KIDIQ_WITH_MOM_WORK: dict[str, Columns] = {
    "kidscore_interaction_c": lambda a: (_centred(a), a["kid_score"]),
    "kidscore_interaction_c2": lambda a: (
        _with_product(a["mom_hs"] - 0.5, a["mom_iq"] - 100),
        a["kid_score"],
    ),
    "kidscore_interaction_z": lambda a: (
        _with_product(_standardised(a["mom_hs"], 2), _standardised(a["mom_iq"], 2)),
        a["kid_score"],
    ),
    "kidscore_mom_work": lambda a: (
        [1.0 * (a["mom_work"] == k) for k in (2, 3, 4)],
        a["kid_score"],
    ),
}


def _crown(a: Data) -> list[Array]:
    """Logarithms of its volume, its area and its shape."""
    area = np.log(a["diam1"] * a["diam2"])
    return [area + np.log(a["canopy_height"]), area, np.log(a["diam1"] / a["diam2"])]


_SIZES = ("diam1", "diam2", "canopy_height", "total_height", "density")
MESQUITE: dict[str, Columns] = {
    "mesquite": lambda a: ([*(a[name] for name in _SIZES), a["group"]], a["weight"]),
    "logmesquite": lambda a: (
        [*(np.log(a[name]) for name in _SIZES), a["group"]],
        np.log(a["weight"]),
    ),
    "logmesquite_logvolume": lambda a: (_crown(a)[:1], np.log(a["weight"])),
    "logmesquite_logva": lambda a: ([*_crown(a)[:2], a["group"]], np.log(a["weight"])),
    "logmesquite_logvas": lambda a: (
        [*_crown(a), np.log(a["total_height"]), np.log(a["density"]), a["group"]],
        np.log(a["weight"]),
    ),
    "logmesquite_logvash": lambda a: (
        [*_crown(a), np.log(a["total_height"]), a["group"]],
        np.log(a["weight"]),
    ),
}


def nes(a: Data) -> tuple[list[Array], Array]:
    ages = [1.0 * (a["age_discrete"] == k) for k in (2, 3, 4)]
    return [
        a["real_ideo"],
        a["race_adj"],
        *ages,
        a["educ1"],
        a["gender"],
        a["income"],
    ], a["partyid7"]


def read_lags(a: Data) -> tuple[Array, ...]:
    order, y = int(a["K"]), a["y"]
    return np.stack([y[order - k : len(y) - k] for k in range(1, order + 1)], 1), y[
        order:
    ]


def _matrix(a: Data) -> tuple[Array, ...]:
    return a["X"], a["y"]


def _places(response: str) -> Callable[[Data], tuple[Array, ...]]:
    return lambda a: (
        np.square(a["x"][:, None] - a["x"]),
        np.eye(len(a["x"])),
        a[response],
    )


def read_kilpisjarvi(a: Data) -> tuple[Array, ...]:
    return (
        a["x"],
        a["y"],
        np.array(
            [float(a[name]) for name in ("pmualpha", "psalpha", "pmubeta", "psbeta")]
        ),
    )


def read_drive(a: Data) -> tuple[Array, ...]:
    scales = (np.array([a["tau"], a["rho"]]),) if "tau" in a else ()
    return a["u"], a["v"], a["alpha"], np.array([0.0, 3.0]), *scales


def read_hares(a: Data) -> tuple[Array, ...]:
    mean, deviation = np.array([1.0, 0.05, 1.0, 0.05]), np.array([0.5, 0.05, 0.5, 0.05])
    steps = np.zeros(models.STEPS_A_YEAR * int(a["N"]))
    return (
        np.log(a["y_init"]),
        np.log(a["y"]),
        mean,
        deviation,
        np.array([1.0, -1.0]),
        steps,
    )


def read_drug(a: Data) -> tuple[Array, ...]:
    counts = [models.FIRST_STEPS, *[models.STEPS_A_MEASUREMENT] * (int(a["N_t"]) - 1)]
    between = np.diff(a["times"], prepend=a["t0"])
    steps = np.repeat(between / counts, counts)
    ends = np.cumsum(steps)
    times = np.stack([ends - steps, ends - steps / 2, ends], 1)
    return (
        np.log(a["C_hat"]),
        times,
        steps,
        np.cumsum(counts) - 1,
        np.asarray(a["D"]),
        np.asarray(a["V"]),
    )


def _regressions(
    data: str, columns: Mapping[str, Columns], write: Any
) -> dict[str, Entry]:
    return {
        f"{data}-{name}": Entry(write, designed(own)) for name, own in columns.items()
    }


YEARS = (1972, 1976, 1980, 1984, 1988, 1992, 1996, 2000)
ENTRIES: dict[str, Entry] = {
    "arK-arK": Entry(models.ar, read_lags),
    "arma-arma11": Entry(models.arma, lambda a: (a["y"], a["y"][:-1])),
    "garch-garch11": Entry(
        models.garch, lambda a: (a["y"], a["sigma1"].reshape(1)), _garch
    ),
    "bball_drive_event_0-hmm_drive_0": Entry(
        models.hmm_drive_0, read_drive, _ordered("phi", "lambda")
    ),
    "bball_drive_event_1-hmm_drive_1": Entry(
        models.hmm_drive_1, read_drive, _ordered("phi", "lambda")
    ),
    "hmm_example-hmm_example": Entry(
        models.hmm_example,
        lambda a: (a["y"], np.ones((2, 2)), np.array([3.0, 10.0])),
        _ordered("mu"),
    ),
    "eight_schools-eight_schools_noncentered": Entry(
        models.eight_schools, lambda a: (a["y"], a["sigma"]), _schools
    ),
    "gp_pois_regr-gp_pois_regr": Entry(models.gp_poisson, _places("k"), _gp_poisson),
    "gp_pois_regr-gp_regr": Entry(models.gp_regression, _places("y")),
    "hudson_lynx_hare-lotka_volterra": Entry(models.lotka_volterra, read_hares),
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs": Entry(
        models.one_compartment, read_drug, logarithms=("K_m", "V_m")
    ),
    "low_dim_gauss_mix-low_dim_gauss_mix": Entry(
        models.mixture, lambda a: (a["y"],), _ordered("mu")
    ),
    "kilpisjarvi_mod-kilpisjarvi": Entry(models.kilpisjarvi, read_kilpisjarvi),
    "sblrc-blr": Entry(models.blr, _matrix),
    "sblri-blr": Entry(models.blr, _matrix),
    "diamonds-diamonds": Entry(
        models.diamonds, lambda a: (a["X"][:, 1:] - a["X"][:, 1:].mean(0), a["Y"])
    ),
    **_regressions("earnings", EARNINGS, models.plain),
    **_regressions("kidiq", KIDIQ, models.half_cauchy_noise),
    **_regressions("kidiq_with_mom_work", KIDIQ_WITH_MOM_WORK, models.plain),
    **_regressions("mesquite", MESQUITE, models.plain),
    **{f"nes{year}-nes": Entry(models.plain, designed(nes)) for year in YEARS},
}
