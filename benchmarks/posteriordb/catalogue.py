"""The posteriors: each one's model in the words of Pyro and NumPyro, its data, and what the reference calls its draws.

A model is a function ``(distributions, sample, plate, library, data)`` of ``pyro.distributions, pyro.sample,
pyro.plate, torch`` or ``numpyro.distributions, numpyro.sample, numpyro.plate, jax.numpy``.

All 45 posteriors whose reference draws the database holds. The regressions have the Stan programs' scales: columns of
very different size and strong correlations, which a sampler must cope with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.posteriordb import others, regressions, series

Array = NDArray[Any]
Draws = Mapping[str, Array]  # Stan's parameter, or a site of ours -> (..., *event_shape)


def unchanged(draws: Draws) -> dict[str, Array]:
    return dict(draws)


@dataclass(frozen=True)
class Entry:
    """A posterior of the database.

    :param write: the model.
    :param read: data of the database -> the model's arrays.
    :param to_stan: draws of our sites -> draws of Stan's parameters.
    :param logarithms: parameters of infinite variance, of which the logarithm is compared.
    """

    write: Callable[..., None]
    read: Callable[[dict[str, Array]], tuple[Array, ...]]
    to_stan: Callable[[Draws], dict[str, Array]] = unchanged
    logarithms: tuple[str, ...] = ()


def named(parameters: Draws) -> dict[str, Array]:
    """Numbers ``(chains, draws)`` by Stan's names, such as ``beta[1]``, of parameters ``(chains, draws, ...)``."""
    found = {}
    for name, values in parameters.items():
        if values.ndim == 2:
            found[name] = values
        for place in np.ndindex(values.shape[2:]) if values.ndim > 2 else ():
            found[f"{name}[{','.join(str(i + 1) for i in place)}]"] = values[(..., *place)]
    return found


def gathered(numbers: Draws) -> dict[str, Array]:
    """Parameters, the other way round; none has more than one axis."""
    groups: dict[str, list[Array]] = {}
    for name, values in numbers.items():
        groups.setdefault(name.partition("[")[0], []).append(values)
    return {name: np.stack(v, -1) if f"{name}[1]" in numbers else v[0] for name, v in groups.items()}


# parameters that a site of ours isn't -----------------------------------------------------------------------------


def _with(draws: Draws, new: Draws, *gone: str) -> dict[str, Array]:
    return {**{name: value for name, value in draws.items() if name not in gone}, **new}


def _ordered(*names: str) -> Callable[[Draws], dict[str, Array]]:
    def to_stan(draws: Draws) -> dict[str, Array]:
        low_gap = {name: (draws[f"{name}_low"], draws[f"{name}_gap"]) for name in names}
        both = {name: np.stack([low, low + gap], -1) for name, (low, gap) in low_gap.items()}
        return _with(draws, both, *(f"{name}_{part}" for name in names for part in ("low", "gap")))

    return to_stan


def _garch(draws: Draws) -> dict[str, Array]:
    return _with(draws, {"beta1": draws["share"] * (1 - draws["alpha1"])}, "share")


def _schools(draws: Draws) -> dict[str, Array]:
    mu, tau = (draws[name][..., None] for name in ("mu", "tau"))
    return _with(draws, {"theta": mu + tau * draws["theta_trans"]}, "theta_trans")


def _gp_poisson(draws: Draws) -> dict[str, Array]:
    x = np.linspace(-10, 10, 11)  # the places of the only data set
    rho, alpha = (draws[name][..., None, None] for name in ("rho", "alpha"))
    covariance = alpha**2 * np.exp(-0.5 * (x[:, None] - x) ** 2 / rho**2) + 1e-10 * np.eye(len(x))
    return _with(draws, {"f": (np.linalg.cholesky(covariance) @ draws["f_tilde"][..., None])[..., 0]}, "f_tilde")


def _regressions(data: str, columns: Mapping[str, regressions.Columns], write: Any) -> dict[str, Entry]:
    return {f"{data}-{name}": Entry(write, regressions.designed(own)) for name, own in columns.items()}


YEARS = (1972, 1976, 1980, 1984, 1988, 1992, 1996, 2000)
ENTRIES: dict[str, Entry] = {
    "arK-arK": Entry(regressions.ar, regressions.read_lags),
    "arma-arma11": Entry(series.arma, series.read_arma),
    "garch-garch11": Entry(series.garch, series.read_garch, _garch),
    "bball_drive_event_0-hmm_drive_0": Entry(series.hmm_drive_0, series.read_drive, _ordered("phi", "lambda")),
    "bball_drive_event_1-hmm_drive_1": Entry(series.hmm_drive_1, series.read_drive, _ordered("phi", "lambda")),
    "hmm_example-hmm_example": Entry(series.hmm_example, series.read_hmm_example, _ordered("mu")),
    "eight_schools-eight_schools_noncentered": Entry(others.eight_schools, others.read_schools, _schools),
    "gp_pois_regr-gp_pois_regr": Entry(others.gp_poisson, others.read_gp("k"), _gp_poisson),
    "gp_pois_regr-gp_regr": Entry(others.gp_regression, others.read_gp("y")),
    "hudson_lynx_hare-lotka_volterra": Entry(others.lotka_volterra, others.read_hares),
    "one_comp_mm_elim_abs-one_comp_mm_elim_abs": Entry(
        others.one_compartment, others.read_drug, logarithms=("K_m", "V_m")
    ),
    "low_dim_gauss_mix-low_dim_gauss_mix": Entry(others.mixture, others.read_mixture, _ordered("mu")),
    "kilpisjarvi_mod-kilpisjarvi": Entry(regressions.kilpisjarvi, regressions.read_kilpisjarvi),
    "sblrc-blr": Entry(regressions.blr, regressions.read_matrix),
    "sblri-blr": Entry(regressions.blr, regressions.read_matrix),
    "diamonds-diamonds": Entry(regressions.diamonds, regressions.read_diamonds),
    **_regressions("earnings", regressions.EARNINGS, regressions.plain),
    **_regressions("kidiq", regressions.KIDIQ, regressions.half_cauchy_noise),
    **_regressions("kidiq_with_mom_work", regressions.KIDIQ_WITH_MOM_WORK, regressions.plain),
    **_regressions("mesquite", regressions.MESQUITE, regressions.plain),
    **{f"nes{year}-nes": Entry(regressions.plain, regressions.designed(regressions.nes)) for year in YEARS},
}
