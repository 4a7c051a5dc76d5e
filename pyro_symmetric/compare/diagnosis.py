r"""Can these draws be trusted? Convergence of chains: raw, modulo symmetry, and of predictions.

Chains in different copies of a mode give a raw R-hat far above 1 although they predict alike. So three looks are taken:
at the weights as drawn; modulo symmetry, all draws aligned to each other; and at what no symmetry touches, predictions
and the log density. The aligned frame is a function of the draws' orbits and of all draws together, never of the chain
that a draw belongs to: if the chains' orbits are distributed alike, they are so in it.

If model and data are known, the energy is looked at, too. Integration by parts gives :math:`\mathbb E[(z - a) \cdot
\nabla U(z)] = D` for every posterior over :math:`z \in \mathbb R^D` whose density vanishes at infinity, and every point
:math:`a` that doesn't depend on :math:`z` (the virial theorem); here it is the mean of the other chains. Its average
over :math:`D` is the *temperature* of the draws: above 1 they spread too widely, below 1 too little. It holds for the
coordinates of each site by themselves, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric._process import without_warnings
from pyro_symmetric.compare.frames import canonical_frame, one_frame
from pyro_symmetric.compare.results import plain
from pyro_symmetric.discovery.model_check import require_of_posterior
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.mcmc.density import Density
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior import diagnostics
from pyro_symmetric.posterior.diagnostics import EFFECTIVE_DRAWS, R_HAT, Check, Status, checked
from pyro_symmetric.posterior.posterior import Draws, Posterior, chains_of
from pyro_symmetric.posterior.predict import predict
from pyro_symmetric.posterior.statistics import ChainStatistics, chain_statistics, evenly_spaced, exceeded_by_few
from pyro_symmetric.posterior.tables import HEAD, site_row, table

MOST_ROWS = 256
MOST_NUMBERS, LEAST_ENTRIES = 2**25, 256  # of a site: some seconds
LEAST_DRAWS = 8  # of a chain: halves of four
STANDS_OUT = 1.1  # the R-hat of a single entry that isn't left out as one of the few that exceed a limit by chance
CHUNK = 32  # chains whose energy is evaluated at once
WEIGHTS, MODULO, PREDICTIONS, DENSITY = "weights", "modulo symmetry", "predictions", "log density"

Statistics = dict[str, dict[str, ChainStatistics]]  # space -> site -> numbers of every entry


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """Checks of a posterior's draws, and the numbers that they rest on; see :func:`diagnose`.

    >>> diagnosis["weights"].status
    'pass'

    :param checks: everything that was looked at; ``diagnosis[name]`` is one of them.
    :param statistics: ``"weights"``, ``"modulo symmetry"``, ``"predictions"``, ``"log density"``, as far as they are
        known -> site -> R-hat and effective sample sizes of every entry.
    :param draws: how many there are, such as ``4 chains of 100 draws``.
    """

    checks: tuple[Check, ...]
    statistics: Statistics
    draws: str

    @property
    def ok(self) -> bool:
        """True if nothing failed and all could be told. Chains in different copies of a mode are warned of only."""
        return all(check.status in ("pass", "warn") for check in self.checks)

    @property
    def failed(self) -> list[Check]:
        """The checks that didn't pass, the worst first."""
        order: list[Status] = ["fail", "unknown", "warn"]
        return [check for status in order for check in self.checks if check.status == status]

    def __getitem__(self, name: str) -> Check:
        return {check.name: check for check in reversed(self.checks)}[name]

    def __contains__(self, name: str) -> bool:
        return any(check.name == name for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        numbers = {space: {site: n.summary() for site, n in own.items()} for space, own in self.statistics.items()}
        return plain({"ok": self.ok, "checks": {c.name: vars(c) for c in self.checks}, "statistics": numbers})

    def full(self) -> str:
        """All checks, and a table of each space by site."""
        rows = {space: [site_row(site, n) for site, n in own.items()] for space, own in self.statistics.items()}
        return "\n\n".join([self._shown(self.checks), *(f"{k}\n{table([HEAD, *own])}" for k, own in rows.items())])

    def __repr__(self) -> str:
        """The outcome in a word, and the checks that didn't pass."""
        return self._shown(self.failed)

    def _shown(self, checks: Any) -> str:
        head = f"{self.draws}: {'ok' if self.ok else 'not ok'}"
        rows = [(check.status, check.name, check.words) for check in checks]
        return "\n".join([head, *([table(rows, left=(0, 1, 2))] if rows else [])])


def diagnose(
    posterior: Draws,
    symmetry: Symmetry | Group | None = None,
    model: BayesianModel | None = None,
    *,
    x: Tensor | None = None,
    predictions: Tensor | None = None,
    num_draws: int = 256,
) -> Diagnosis:
    """Judge whether draws can be trusted: a word, and the checks that didn't pass. ``print(d.full())`` shows all,
    and the tables that they rest on. What each check is, and where its limits lie: :doc:`/explanation/chains`.

    >>> draws = torch.randn(4, 200, 3)  # of four chains
    >>> ps.diagnose({"w": draws}).ok
    True
    >>> diagnosis = ps.diagnose({"w": draws + torch.arange(4.0)[:, None, None]})
    >>> diagnosis.ok, diagnosis["weights"].status
    (False, 'fail')

    A symmetry takes memory for a copy of all draws, and time to align them: some seconds for 4,000 draws of 50 units.

    :param posterior: a ``Posterior``, with the sampler's statistics, of which ``lp`` stands for the log density; or
        site -> chains ``(chains, draws, *site_shape)``. If it remembers its model and data (as ``sample`` returns it;
        after loading, ``posterior.attach(model, x, y)``), the energy is looked at, and the function at the data.
    :param symmetry: what to remove, e.g. ``find_symmetry(net, x)``.
    :param model: the network's model, to predict with; by default the one that the posterior remembers.
    :param x: inputs to predict at, of more than 256 rows 256 evenly spaced ones; by default the data.
    :param predictions: instead of ``model`` and ``x``: anything that is a function of the weights alone, ``(chains,
        draws, ...)``, such as ``predict(posterior.samples, any_model, x, kind="mean")``.
    :param num_draws: at how many draws, of all chains together, to evaluate the gradient of the energy.
    :raises ValueError: if arguments don't fit, there are no draws, or the model lacks a declared group.
    """
    arguments.whole("num_draws", num_draws, 1)
    posterior = chains_of(posterior, shapes=None if symmetry is None else group_of(symmetry, "symmetry").site_shapes)
    if not any(value.numel() for value in posterior.samples.values()):
        raise ValueError("posterior holds no numbers; it must have a chain, a draw and an entry")
    shape = (posterior.num_chains, posterior.num_samples)
    if predictions is not None and tuple(predictions.shape[:2]) != shape:
        raise ValueError(f"predictions has shape {tuple(predictions.shape)}; it must be (chains, draws, ...), {shape}")
    require_of_posterior(symmetry, posterior)
    model, x = _to_predict(posterior, model, x)
    given = {WEIGHTS: posterior.samples}
    given |= {DENSITY: {DENSITY: posterior.statistics["lp"]}} if "lp" in posterior.statistics else {}
    given |= {} if predictions is None else {PREDICTIONS: {PREDICTIONS: predictions}}
    checks = [_finite(given)]
    if checks[0].status == "pass" and posterior.kind == "independent":
        count = math.prod(shape)
        limits, found = (EFFECTIVE_DRAWS[0], 0.0), f"{count} independent draws"
        checks.append(checked("effective draws", float(count), limits, found, "means are rough"))
    elif checks[0].status == "pass":
        checks += diagnostics.copies(posterior.samples)
    if posterior.kind == "independent" or any(check.status == "fail" for check in checks):
        return Diagnosis(tuple(checks), {}, posterior.counted())
    spaces = _spaces(posterior, symmetry, model, x, given)
    if (sound := _finite(spaces)).status == "fail":
        return Diagnosis((sound,), {}, posterior.counted())
    statistics = {}
    if posterior.num_samples >= LEAST_DRAWS:
        statistics = {k: {s: chain_statistics(_looked_at(v)) for s, v in own.items()} for k, own in spaces.items()}
    agreed = _agreement(statistics, _is_network(posterior))
    arrived = all(check.status != "fail" for check in agreed)
    guess = "acceptance_rate" not in posterior.statistics
    known = posterior.source and posterior.source.subsampled
    subsampled = guess if known is None else known
    checks += [
        diagnostics.moving(posterior.samples),
        *agreed,
        *diagnostics.starts(posterior.metadata),
        *diagnostics.sampler_checks(posterior.statistics, subsampled, arrived),
        *_temperature(posterior, symmetry, num_draws, subsampled, arrived),
    ]
    return Diagnosis(tuple(checks), statistics, posterior.counted())


def _finite(spaces: dict[str, Any]) -> Check:
    return diagnostics.finite({f"{space} {s!r}": value for space, own in spaces.items() for s, value in own.items()})


def _to_predict(posterior: Posterior, model: BayesianModel | None, x: Tensor | None) -> tuple[Any, Any]:
    """The network's model and inputs: those that are given, else those that the posterior was drawn from."""
    what = "a BayesianModel; of another model, pass predictions=predict(posterior.samples, model, x, kind='mean')"
    arguments.instance("model", model, (BayesianModel, type(None)), what)
    source = posterior.source
    if model is None and source is not None and isinstance(source.model, BayesianModel):
        model = source.model
        x = source.kwargs.get("x", next(iter(source.args), None)) if x is None else x
    elif model is None and x is not None:
        raise ValueError("x is given, but no model; pass model=, or predictions=")
    return model, x


def _is_network(posterior: Posterior) -> bool:
    """True if the sites are a network's weights, by the model or, if none is known, by names like ``0.weight``."""
    if posterior.source is not None:
        return isinstance(posterior.source.model, nn.Module)
    return any("." in site for site in posterior.samples)


# do the chains agree ------------------------------------------------------------------------------------------------


@torch.no_grad()
def _spaces(
    posterior: Posterior, symmetry: Any, model: Any, x: Any, given: dict[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """The spaces in which chains are compared: space -> site -> ``(chains, draws, ...)``."""
    spaces = {WEIGHTS: given[WEIGHTS]}
    if symmetry is not None:
        spaces[MODULO] = one_frame(canonical_frame(posterior, symmetry), symmetry).samples
    spaces |= given
    if PREDICTIONS not in given and model is not None and x is not None:
        rows = x if len(x) <= MOST_ROWS else x[evenly_spaced(len(x), MOST_ROWS)]
        spaces[PREDICTIONS] = {PREDICTIONS: predict(posterior.samples, model, rows, kind="mean", progress=False)}
    held = {space: {site: v for site, v in by_site.items() if v.numel()} for space, by_site in spaces.items()}
    return {space: by_site for space, by_site in held.items() if by_site}


def _agreement(statistics: Statistics, is_network: bool) -> list[Check]:
    """The R-hat of each space, and the effective draws of those that decide: what no symmetry touches, else modulo
    symmetry, else the weights. The log density alone says little, unless symmetries forbid to look at the weights."""
    if not statistics:
        words = f"too few draws to tell whether chains agree: it takes {LEAST_DRAWS} of each"
        return [Check(WEIGHTS, "unknown", words)]
    density = [DENSITY] if DENSITY in statistics else []
    best = next((name for name in (PREDICTIONS, MODULO) if name in statistics), None)
    decisive = [best, *density] if best else density if density and is_network else [WEIGHTS, *density]
    # A network's weights that disagree tell nothing: they may sit in copies of a mode.
    blind: Status = "unknown" if is_network and decisive == [WEIGHTS] else "warn"
    hint = ", as they do in copies of a mode" if best else ", or sit in copies of a mode (symmetry= tells)"
    checks = []
    for name, by_site in statistics.items():
        grave = name in decisive and (name != WEIGHTS or not is_network)
        found = _r_hat(name, by_site, hint if name == WEIGHTS else "")
        checks.append(replace(found, status=blind) if found.status == "fail" and not grave else found)
    return [*checks, _effective({name: statistics[name] for name in decisive})]


def _r_hat(space: str, by_site: dict[str, ChainStatistics], hint: str) -> Check:
    """The R-hat of the worst site; of a site's entries the one that few exceed, or the largest if it is over 1.1 and
    five times as far from 1 as that. (Of chains that agree the largest of 2,000 entries is at most three times as far:
    two chains of 8 draws, the worst case.)

    :param hint: what else their disagreement may come of.
    """
    worst = {}
    for site, numbers in by_site.items():
        known = numbers.r_hat[~numbers.r_hat.isnan()]
        usual, largest = exceeded_by_few(known), float(known.max()) if len(known) else math.nan
        worst[site] = largest if largest > STANDS_OUT and largest - 1 > 5 * (usual - 1) else usual
    site = max(worst, key=lambda site: (not math.isnan(worst[site]), worst[site]))
    if math.isnan(worst[site]):
        return Check(space, "unknown", "R-hat can't be told: the draws never change")
    of = "" if site == space else f" of site {site!r}"
    advice = "run longer" if worst[site] <= R_HAT[1] else f"the chains disagree{hint}"
    return checked(space, worst[site], R_HAT, f"R-hat{of} {worst[site]:.3f}", advice)


def _effective(measured: Statistics) -> Check:
    """The least effective draws of bulk and tails, of each site's entries but the few that are worse by chance."""
    least = {}
    for space, by_site in measured.items():
        for site, numbers in by_site.items():
            sizes = torch.minimum(numbers.ess_bulk, numbers.ess_tail)
            least[space, site] = -exceeded_by_few(-sizes[~sizes.isnan()])
    space, site = min(least, key=lambda name: (math.isnan(least[name]), least[name]))
    if math.isnan(least[space, site]):
        return Check("effective draws", "unknown", "they can't be told: the draws never change")
    found = f"{least[space, site]:.0f} of {space if site == space else f'site {site!r} ({space})'}"
    return checked("effective draws", least[space, site], EFFECTIVE_DRAWS, found, "more draws, or more chains")


def _looked_at(draws: Tensor) -> Tensor:
    """All entries; of very many draws evenly spaced ones, as many as take some seconds."""
    most, entries = max(LEAST_ENTRIES, MOST_NUMBERS // max(1, draws.shape[:2].numel())), draws.shape[2:].numel()
    return draws if entries <= most else draws.flatten(2)[..., evenly_spaced(entries, most)]


# the energy ---------------------------------------------------------------------------------------------------------


def _temperature(posterior: Posterior, symmetry: Any, num_draws: int, subsampled: bool, arrived: bool) -> list[Check]:
    """The temperature of the draws as they came or, where that is too uncertain to tell, a pass of the aligned ones.

    Copies that lie far apart make it uncertain, as most of a draw's distance to the other chains is that to their
    copies. Between such copies the density is as good as zero, so that the theorem holds of the aligned draws as well;
    where copies overlap it doesn't, wherefore only a pass counts."""
    drawn = list(_of_energy(posterior, num_draws, subsampled, arrived))
    if symmetry is None or all(check.status != "unknown" for check in drawn):
        return drawn
    aligned = list(_of_energy(one_frame(posterior, symmetry), num_draws, subsampled, arrived))
    return aligned if all(check.status == "pass" for check in aligned) else drawn


def _of_energy(posterior: Posterior, num_draws: int, subsampled: bool, arrived: bool) -> Iterator[Check]:
    """The temperature of the draws; nothing if the posterior doesn't know its model."""
    if posterior.source is None:
        return
    origin, device = posterior.source[:3], posterior.source.device
    options: dict[str, Any] = {"device": device, "chain_chunk": CHUNK, "subsampled": True}
    with without_warnings(UserWarning):  # of a mini-batch's scale, of which the run told
        full = Density(*origin, dtype=next(iter(posterior.samples.values())).dtype, **options)
    if full.row_counts:
        return  # the model draws its own mini-batches, which Pyro's plates scale themselves
    per_chain = max(1, min(posterior.num_samples, num_draws // posterior.num_chains))
    draws = posterior.thin(max(1, posterior.num_samples // per_chain))
    z = full.unconstrain({site: draws.samples[site] for site in full.layout.site_shapes})
    _, gradient = full.energy_and_gradient(z.flatten(0, 1))
    others = (z.mean(1, keepdim=True).sum(0) - z.mean(1, keepdim=True)) / max(1, len(z) - 1)  # means of other chains
    own = ((z - others) * gradient.reshape(z.shape)).detach().double().cpu()
    sizes = [shape.numel() for shape in full.layout.unconstrained_shapes.values()]
    found = [diagnostics.temperature("temperature", own.mean(-1), subsampled, arrived)]
    for site, value in zip(full.layout.unconstrained_shapes, own.split(sizes, dim=-1), strict=True):
        if len(sizes) > 1 and value.shape[-1]:
            found.append(diagnostics.temperature("temperature", value.mean(-1), subsampled, arrived, site))
    grave = [check for check in found if check.status in ("warn", "fail")]
    yield max(grave, key=lambda check: (check.status == "fail", abs(check.value - 1)), default=found[0])
