r"""Convergence diagnostics of chains: of raw weights, modulo symmetry, and of
predictions.

Chains in different copies of a mode have a raw R-hat far above 1 although their
predictions agree. So chains are compared in three spaces: weights as drawn; weights
modulo symmetry, with all draws aligned; and invariants, namely predictions and the log
density. The aligned frame depends on the orbits of all draws, not on the chain that a
draw belongs to: chains whose orbits have the same distribution agree in it.

With model and data, the spread of the draws is compared with the energy's gradient.
Integration by parts gives the virial theorem :math:`\mathbb E[(z - a) \cdot \nabla
U(z)] = D` for every posterior over :math:`z \in \mathbb R^D` whose density vanishes at
infinity and every point :math:`a` independent of :math:`z`; here the mean of the other
chains. The average divided by :math:`D` is the *temperature* of the draws: above 1 they
spread too widely, below 1 too little. The theorem holds for the coordinates of each
site, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments, plots
from pyro_symmetric._process import without_warnings
from pyro_symmetric.arguments import Json, Names
from pyro_symmetric.canonical.forms import doubtful_axes
from pyro_symmetric.compare.frames import frame_of_orbits, one_frame
from pyro_symmetric.compare.labels import uncertain_labels
from pyro_symmetric.compare.results import plain
from pyro_symmetric.density import Density
from pyro_symmetric.discovery.model_carried import AUTO, Auto, carried_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior import diagnostics
from pyro_symmetric.posterior.diagnostics import (
    EFFECTIVE_DRAWS,
    R_HAT,
    Check,
    Status,
    checked,
    short,
)
from pyro_symmetric.posterior.posterior import FROM_ABOVE, Draws, Posterior, chains_of
from pyro_symmetric.posterior.predict import predict
from pyro_symmetric.posterior.statistics import (
    ChainStatistics,
    chain_statistics,
    evenly_spaced,
    exceeded_by_few,
)
from pyro_symmetric.posterior.tables import HEAD, html_table, site_row, table
from pyro_symmetric.weights import Weights, first_value, map_values, pick

MOST_ROWS = 256  # of inputs to predict at
MOST_NUMBERS, LEAST_ENTRIES = 2**25, 256  # of a site: a few seconds
LEAST_DRAWS = 8  # of a chain: halves of four
STANDS_OUT = 1.1  # R-hat above which a single entry isn't an outlier by chance
MAY_MISS = (
    "the symmetry says at least: chains in copies that it misses look as if they "
    "disagreed"
)
# draws of a chain, and entries of all sites, when a run asks whether chains agree
MOST_AGREEING, MOST_AGREEING_ENTRIES = 200, 1000
MORE_DRAWS = 16  # times as many for a temperature that few leave uncertain
CHUNK = 32  # chains whose energy is evaluated at once
WEIGHTS, MODULO, PREDICTIONS, DENSITY = (
    "weights",
    "modulo symmetry",
    "predictions",
    "log density",
)

SITES = "sites as drawn"  # what weights of a model that is no network are called

# space -> site -> statistics of every entry
Statistics = dict[str, dict[str, ChainStatistics]]
Spaces = dict[str, Weights]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Checks of a posterior's draws, and the statistics behind them; true if they are
    :attr:`ok`. See :func:`diagnose`.

    >>> diagnosis = ps.diagnose({"w": torch.randn(4, 500, 3)})
    >>> diagnosis["finite"].status, diagnosis["finite"].words
    ('pass', 'all draws are finite')

    :param checks: all checks; ``diagnosis[name]`` is one of them.
    :param statistics: ``"weights"``, ``"modulo symmetry"``, ``"predictions"``, ``"log
        density"``, as far as available -> site -> R-hat and effective sample sizes of
        every entry.
    :param draws: their number, such as ``4 chains of 100 draws``.
    :param remarks: what limits the diagnosis: symmetries that may have been missed.
    :param of_network: whether the draws are a network's weights, and called so.
    """

    checks: tuple[Check, ...]
    statistics: Statistics
    draws: str
    remarks: Names = ()
    of_network: bool = True

    @property
    def ok(self) -> bool:
        """True if every check passes or warns, and none is short of draws. Chains in
        different copies of a mode are only a warning.
        """
        return all(check.status in ("pass", "warn") for check in self.checks)

    @property
    def outcome(self) -> str:
        """In words: ``"ok"``, ``"short: run longer"`` if nothing else is amiss, or
        ``"not ok"``."""
        statuses = {check.status for check in self.checks}
        if statuses & {"fail", "unknown"}:
            return "not ok"
        return "short: run longer" if "short" in statuses else "ok"

    @property
    def failed(self) -> list[Check]:
        """The checks that don't pass, worst first."""
        order: list[Status] = ["fail", "unknown", "short", "warn"]
        return [
            check for status in order for check in self.checks if check.status == status
        ]

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, name: str) -> Check:
        return {check.name: check for check in reversed(self.checks)}[name]

    def __contains__(self, name: str) -> bool:
        return any(check.name == name for check in self.checks)

    def to_dict(self) -> Json:
        """Return checks and statistics as JSON."""
        summaries = {
            space: {site: s.summary() for site, s in sites.items()}
            for space, sites in self.statistics.items()
        }
        return plain(
            {
                "ok": self.ok,
                "outcome": self.outcome,
                "remarks": self.remarks,
                "checks": {c.name: vars(c) for c in self.checks},
                "statistics": summaries,
            }
        )

    def full(self) -> str:
        """Format all checks, and a table of each space by site."""
        rows = {
            space: [site_row(site, s) for site, s in sites.items()]
            for space, sites in self.statistics.items()
        }
        return "\n\n".join(
            [
                self._format(self.checks),
                *(
                    f"{self._shown(k)}\n{table([HEAD, *statistics])}"
                    for k, statistics in rows.items()
                ),
            ]
        )

    def __repr__(self) -> str:
        """Show the outcome, and the checks that don't pass."""
        return self._format(self.failed)

    def plot(self, ax: Any = None) -> Any:
        """Plot the worst R-hat of each site, as drawn, modulo symmetry and of
        predictions, beside the limit of convergence; return the axes."""
        worst = {
            self._shown(space): {
                site: numbers.summary()["r_hat"] for site, numbers in sites.items()
            }
            for space, sites in self.statistics.items()
        }
        ax = plots.dots(ax, worst, "worst R-hat")
        ax.axvline(R_HAT[0], color="0.5", ls="--", lw=1)
        ax.set(title=f"{self.draws}: {self.outcome}")
        return ax

    def _repr_html_(self) -> str:
        head = f"{self.draws}: {self.outcome}"
        rows = [("status", "check", "finding"), *self._rows(self.checks)]
        return html_table(head, rows, self.remarks)

    def _rows(self, checks: Sequence[Check]) -> list[Names]:
        return [
            (check.status, self._shown(check.name), check.words) for check in checks
        ]

    def _format(self, checks: Sequence[Check]) -> str:
        rows = self._rows(checks)
        lines = [f"{self.draws}: {self.outcome}", *self.remarks]
        if rows:
            lines.append(table(rows, left_aligned=(0, 1, 2)))
        return "\n".join(lines)

    def _shown(self, name: str) -> str:
        """Return what is printed for the name of a check or space."""
        return SITES if name == WEIGHTS and not self.of_network else name


def diagnose(
    posterior: Draws,
    symmetry: Symmetry | Group | Auto | None = AUTO,
    model: BayesianModel | None = None,
    *,
    x: Tensor | None = None,
    predictions: Tensor | None = None,
    num_draws: int = 256,
) -> Diagnosis:
    """Diagnose draws: whether they can be trusted, and which checks don't pass.

    ``print(diagnosis.full())`` shows all checks, and tables of the statistics behind
    them. The checks and their limits are explained in :doc:`/explanation/chains`.

    >>> draws = torch.randn(4, 200, 3)  # of four chains
    >>> ps.diagnose({"w": draws}).ok
    True
    >>> diagnosis = ps.diagnose({"w": draws + torch.arange(4.0)[:, None, None]})
    >>> diagnosis.ok, diagnosis["weights"].status
    (False, 'fail')

    The symmetry is that of the posterior's model, if it is known. It takes the memory
    of a copy of all draws, and a few seconds to align 4,000 draws of 50 units.

    :param posterior: a ``Posterior`` with the sampler's statistics (``lp`` is the log
        density), or site -> chains ``(chains, draws, *site_shape)``. If it has its
        model and data (from ``sample``, or after loading by ``posterior.attach(model,
        x, y)``), temperature and predictions at the data are checked.
    :param symmetry: the symmetry to remove, e.g. ``find_symmetry(net, x)``; ``"auto"``:
        that of the posterior's model, if it is known; ``None``: none.
    :param model: the network's model, for predictions; by default the posterior's own.
    :param x: inputs to predict at, at most 256 evenly spaced rows of them; by default
        the data.
    :param predictions: in place of ``model`` and ``x``, any function of the weights,
        ``(chains, draws, ...)``, such as ``predict(posterior.samples, any_model, x,
        kind="mean")``.
    :param num_draws: the number of draws, over all chains, at which to evaluate the
        energy's gradient; up to 16 times as many if the temperature stays uncertain.
    :raises ValueError: if arguments don't fit, there are no draws, or the model lacks a
        declared group.
    """
    arguments.whole("num_draws", num_draws, 1)
    carried = carried_symmetry(symmetry, posterior)
    group = None if carried.is_trivial else carried.group
    shapes = None if group is None else group.site_shapes
    posterior = chains_of(posterior, shapes=shapes)
    if not any(value.numel() for value in posterior.samples.values()):
        raise ValueError(
            "posterior is empty; it must have a chain, a draw and an entry"
        )
    shape = (posterior.num_chains, posterior.num_samples)
    if predictions is not None and tuple(predictions.shape[:2]) != shape:
        raise ValueError(
            f"predictions has shape {tuple(predictions.shape)}; it must be (chains, "
            f"draws, ...), {shape}"
        )
    model, x = _to_predict(posterior, model, x)
    spaces = {WEIGHTS: posterior.samples}
    if "lp" in posterior.statistics:
        spaces[DENSITY] = {DENSITY: posterior.statistics["lp"]}
    if predictions is not None:
        spaces[PREDICTIONS] = {PREDICTIONS: predictions}
    remarks = carried.line.splitlines()
    if carried.at_least and group is not None:
        remarks.append(MAY_MISS)
    checks = list(_soundness(posterior, spaces))
    statistics: Statistics = {}
    if posterior.kind == "chains" and all(check.status != "fail" for check in checks):
        spaces = _spaces(posterior, group, model, x, spaces)
        finite = _finite(spaces)
        if finite.status == "fail":
            checks = [finite]
        else:
            statistics = _statistics(posterior, spaces)
            checks += _convergence(posterior, group, statistics, num_draws)
        if carried.is_found and MODULO in statistics:
            aligned = replace(posterior, samples=spaces[MODULO])
            remarks += _on_uncertain_labels(aligned, carried.group, checks)
    return Diagnosis(
        tuple(checks),
        statistics,
        posterior.counted(),
        tuple(remarks),
        _is_network(posterior),
    )


def modulo_symmetry(posterior: Posterior) -> Weights:
    """Return samples modulo the symmetry of their model; none if that isn't known, or
    would take long.
    """
    shapes = posterior.site_shapes.values()
    if sum(shape.numel() for shape in shapes) <= MOST_AGREEING_ENTRIES:
        with suppress(Exception):  # whose end would lose the draws of a run
            group = carried_symmetry(AUTO, posterior).group
            if group.units:
                return frame_of_orbits(posterior, group).samples
    return {}


def agree_modulo_symmetry(posterior: Posterior) -> bool:
    """Return whether chains agree modulo the symmetry of their model, by at most 200
    draws of each; ``False`` if that isn't known, or would take long.
    """
    thinned = posterior.thin(max(1, posterior.num_samples // MOST_AGREEING))
    if aligned := modulo_symmetry(thinned):
        check = _r_hat(MODULO, map_values(chain_statistics, aligned), "")
        return check.status in ("pass", "warn")
    return False


FROM_ABOVE.chains_agree = agree_modulo_symmetry
FROM_ABOVE.modulo_symmetry = modulo_symmetry


def _on_uncertain_labels(
    aligned: Posterior, group: Group, checks: Sequence[Check]
) -> Iterator[str]:
    """Yield both R-hats where labels are uncertain, so that their removal may hide that
    chains differ, or feign it.
    """
    permuted = group.without(group.names("rotate")).finite
    uncertain = [
        labels.in_words(permuted) for labels in uncertain_labels(aligned, permuted)
    ]
    for name in doubtful_axes(aligned.samples, group):
        uncertain.append(f"the principal axes of {name!r}, of close second moments")
    if not uncertain:
        return
    r_hats = {check.name: check.words.partition(",")[0] for check in checks}
    for words in uncertain:
        yield f"uncertain are {words}"
    yield f"so both count: as drawn {r_hats[WEIGHTS]}; modulo symmetry {r_hats[MODULO]}"


def _soundness(posterior: Posterior, spaces: Spaces) -> Iterator[Check]:
    """Check that draws are finite; then count independent ones, or find chains that are
    copies of others.
    """
    yield (finite := _finite(spaces))
    if finite.status == "pass" and posterior.kind == "independent":
        count = posterior.num_chains * posterior.num_samples
        limits = (EFFECTIVE_DRAWS[0], 0.0)
        finding = f"{count} independent draws"
        size = checked(
            "effective draws", float(count), limits, finding, "means are rough"
        )
        yield short(size)
    elif finite.status == "pass":
        yield from diagnostics.copies(posterior.samples)


def _convergence(
    posterior: Posterior, symmetry: Any, statistics: Statistics, num_draws: int
) -> list[Check]:
    """Check movement and agreement of the chains, the sampler's statistics, and the
    temperature.
    """
    agreement = _agreement(statistics, _is_network(posterior))
    arrived = all(check.status != "fail" for check in agreement)
    recorded = posterior.source and posterior.source.subsampled
    subsampled = (
        "acceptance_rate" not in posterior.statistics if recorded is None else recorded
    )
    return [
        diagnostics.moving(posterior.samples),
        *agreement,
        *diagnostics.starts(posterior.metadata, posterior.num_chains),
        *diagnostics.sampler_checks(posterior.statistics, subsampled, arrived),
        *_temperature(posterior, symmetry, num_draws, subsampled, arrived),
    ]


def _finite(spaces: Spaces) -> Check:
    """Check that the values of all spaces are finite."""
    values = {}
    for space, by_site in spaces.items():
        for site, draws in by_site.items():
            values[f"{space} {site!r}"] = draws
    return diagnostics.finite(values)


def _to_predict(
    posterior: Posterior, model: BayesianModel | None, x: Tensor | None
) -> tuple[Any, Any]:
    """Return the network's model and inputs: the given ones, or those that the
    posterior was drawn from.
    """
    wanted = (
        "a BayesianModel; for another model pass "
        "predictions=predict(posterior.samples, model, x, kind='mean')"
    )
    arguments.instance("model", model, (BayesianModel, type(None)), wanted)
    source = posterior.source
    if model is None and source is not None and isinstance(source.model, BayesianModel):
        model = source.model
        x = source.kwargs.get("x", next(iter(source.args), None)) if x is None else x
    elif model is None and x is not None:
        raise ValueError(
            "x needs a model; pass model=, or predictions= in place of both"
        )
    return model, x


def _is_network(posterior: Posterior) -> bool:
    """Return whether the sites are a network's weights: by the model or, without one,
    by names like ``0.weight``.
    """
    if posterior.source is not None:
        return isinstance(posterior.source.model, nn.Module)
    return any("." in site for site in posterior.samples)


# agreement of chains ------------------------------------------------------------------


@torch.no_grad()
def _spaces(
    posterior: Posterior, symmetry: Any, model: Any, x: Any, samples: Spaces
) -> Spaces:
    """Add the aligned draws, and the predictions of a network, to the spaces in which
    chains are compared: space -> site -> ``(chains, draws, ...)``.
    """
    spaces = {WEIGHTS: samples[WEIGHTS]}
    if symmetry is not None:
        spaces[MODULO] = frame_of_orbits(posterior, symmetry).samples
    spaces |= samples
    if PREDICTIONS not in samples and model is not None and x is not None:
        rows = x[evenly_spaced(len(x), MOST_ROWS)]
        found = predict(posterior.samples, model, rows, kind="mean", progress=False)
        spaces[PREDICTIONS] = {PREDICTIONS: found}
    return spaces


def _statistics(posterior: Posterior, spaces: Spaces) -> Statistics:
    """Return the statistics of the entries of all sites; of chains of a few draws,
    none."""
    statistics: Statistics = {}
    for space, by_site in spaces.items():
        if posterior.num_samples >= LEAST_DRAWS:
            nonempty = {site: v for site, v in by_site.items() if v.numel()}
            if nonempty:
                statistics[space] = map_values(
                    lambda draws: chain_statistics(_subset(draws)), nonempty
                )
    return statistics


def _agreement(statistics: Statistics, is_network: bool) -> list[Check]:
    """Check the R-hat of each space, and the effective draws of the decisive ones:
    predictions, else weights modulo symmetry, else raw weights (of a network, the log
    density if it is known), each with the log density."""
    if not statistics:
        words = (
            f"too few draws to tell whether chains agree: at least {LEAST_DRAWS} of "
            "each are needed"
        )
        return [Check(WEIGHTS, "unknown", words)]
    best = next((name for name in (PREDICTIONS, MODULO) if name in statistics), None)
    decisive = [name for name in (best or WEIGHTS, DENSITY) if name in statistics]
    if best is None and is_network:
        decisive = decisive[-1:]
    # Raw weights of a network may disagree because chains are in different copies of a
    # mode.
    downgraded: Status = "unknown" if is_network and decisive == [WEIGHTS] else "warn"
    hint = ", or sit in copies of a mode (symmetry= tells)"
    if best:
        hint = ", as they do in copies of a mode"
    checks = []
    for name, by_site in statistics.items():
        may_fail = name in decisive and (name != WEIGHTS or not is_network)
        check = _r_hat(name, by_site, hint if name == WEIGHTS else "")
        if check.status == "fail" and not may_fail:
            check = replace(check, status=downgraded)
        checks.append(short(check) if name in decisive else check)
    size = _effective({name: statistics[name] for name in decisive})
    return [*checks, short(size)]


def _r_hat(space: str, by_site: dict[str, ChainStatistics], hint: str) -> Check:
    """Check the R-hat of the worst site: its 99 % quantile over entries, or the largest
    if that is above 1.1 and five times as far from 1. (Of chains that agree, the
    largest of 2,000 entries is at most three times as far, in the worst case of two
    chains of 8 draws.)

    :param hint: another reason for disagreement.
    """
    worst = {}
    for site, numbers in by_site.items():
        r_hats = numbers.r_hat[~numbers.r_hat.isnan()]
        worst[site] = exceeded_by_few(r_hats)
        largest = float(r_hats.max()) if len(r_hats) else 0.0
        if largest > STANDS_OUT and largest - 1 > 5 * (worst[site] - 1):
            worst[site] = largest
    site = max(worst, key=lambda site: (not math.isnan(worst[site]), worst[site]))
    if math.isnan(worst[site]):
        return Check(space, "unknown", "R-hat is undefined: the draws never change")
    of_site = "" if site == space else f" of site {site!r}"
    advice = "run longer" if worst[site] <= R_HAT[1] else f"the chains disagree{hint}"
    words = f"R-hat{of_site} {worst[site]:.3f}"
    return checked(space, worst[site], R_HAT, words, advice)


def _effective(statistics: Statistics) -> Check:
    """Check the least effective sample size of bulk and tails over sites, of each the 1
    % quantile over entries.
    """
    least = {}
    for space, by_site in statistics.items():
        for site, numbers in by_site.items():
            sizes = torch.minimum(numbers.ess_bulk, numbers.ess_tail)
            least[space, site] = -exceeded_by_few(-sizes[~sizes.isnan()])
    (space, site), size = min(
        least.items(), key=lambda item: (math.isnan(item[1]), item[1])
    )
    if math.isnan(size):
        return Check("effective draws", "unknown", "undefined: the draws never change")
    of_space = "" if space == WEIGHTS else f" ({space})"
    of_site = space if site == space else f"site {site!r}{of_space}"
    return checked(
        "effective draws",
        size,
        EFFECTIVE_DRAWS,
        f"{size:.0f} of {of_site}",
        "more draws, or more chains",
    )


def _subset(draws: Tensor) -> Tensor:
    """Return all entries, or evenly spaced ones if all would take more than a few
    seconds.
    """
    most = max(LEAST_ENTRIES, MOST_NUMBERS // max(1, draws.shape[:2].numel()))
    entries = draws.shape[2:].numel()
    if entries <= most:
        return draws
    return draws.flatten(2)[..., evenly_spaced(entries, most)]


# temperature --------------------------------------------------------------------------


def _temperature(
    posterior: Posterior, symmetry: Any, num_draws: int, subsampled: bool, arrived: bool
) -> list[Check]:
    """Check the temperature of few draws and, as long as it is too uncertain, of four
    times as many; none without the posterior's model.

    If it is too uncertain, that of the aligned draws is accepted if it passes. Copies
    far apart make the temperature uncertain: most of a draw's distance from the other
    chains is that between copies. The density between such copies is practically zero,
    so the theorem holds for aligned draws, too. If copies overlap it doesn't, so a
    failure of aligned draws doesn't count.
    """
    density = _density_of(posterior)
    if density is None:
        return []
    available = posterior.num_chains * posterior.num_samples
    most = min(available, MORE_DRAWS * num_draws)
    aligned: Posterior | None = None
    while True:
        drawn = _virial(density, posterior, num_draws, subsampled, arrived)
        if drawn.status == "unknown" and symmetry is not None:
            aligned = aligned or one_frame(posterior, symmetry)
            of_aligned = _virial(density, aligned, num_draws, subsampled, arrived)
            drawn = of_aligned if of_aligned.status == "pass" else drawn
        if drawn.status != "unknown" or num_draws >= most:
            return [drawn]
        num_draws = min(most, 4 * num_draws)


def _density_of(posterior: Posterior) -> Density | None:
    """Return the density of a posterior's model at all rows, if it has one."""
    if posterior.source is None:
        return None
    # about the scale of mini-batches; the run has given it
    with without_warnings(UserWarning):
        density = Density(
            *posterior.source[:3],
            device=posterior.source.device,
            dtype=first_value(posterior.samples).dtype,
            chain_chunk=CHUNK,
            subsampled=True,
        )
    # a model that draws mini-batches itself is scaled by Pyro's plates
    return None if density.row_counts else density


def _virial(
    full: Density,
    posterior: Posterior,
    num_draws: int,
    subsampled: bool,
    arrived: bool,
) -> Check:
    """Check the temperature of all coordinates, or of the worst site if one is off."""
    per_chain = max(1, min(posterior.num_samples, num_draws // posterior.num_chains))
    draws = posterior.thin(max(1, posterior.num_samples // per_chain))
    z = full.unconstrain(pick(draws.samples, full.layout.site_shapes))
    _, gradient = full.energy_and_gradient(z.flatten(0, 1))
    means = z.mean(1, keepdim=True)
    other_means = (means.sum(0) - means) / max(
        1, len(z) - 1
    )  # mean of the other chains
    virial = ((z - other_means) * gradient.reshape(z.shape)).detach().double().cpu()
    shapes = full.layout.unconstrained_shapes
    by_site = virial.split([shape.numel() for shape in shapes.values()], dim=-1)
    checks = [
        diagnostics.temperature("temperature", virial.mean(-1), subsampled, arrived)
    ]
    for site, value in zip(shapes, by_site, strict=True):
        if len(shapes) > 1 and value.shape[-1]:
            values = value.mean(-1)
            checks.append(
                diagnostics.temperature(
                    "temperature", values, subsampled, arrived, site
                )
            )
    off = [check for check in checks if check.status in ("warn", "fail")]
    return max(
        off,
        key=lambda check: (check.status == "fail", abs(check.value - 1)),
        default=checks[0],
    )
