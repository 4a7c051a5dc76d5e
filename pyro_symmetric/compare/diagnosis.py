r"""Can these draws be trusted? Do the chains agree, on what, and what went wrong on the way.

Chains in different copies of a mode give a raw R-hat far above 1 although they predict alike, so R-hat on raw weights
says nothing of a model with symmetries. Three looks together do: at the weights as drawn; at the weights brought to one
frame, each draw to the canonical form of its orbit (Laurent et al. 2024, arXiv 2310.08287), and all of them aligned to
each other; and at what no symmetry touches, predictions and the log density. R-hat and effective sample sizes are those
of :mod:`pyro_symmetric.chain_statistics`, limits those of :mod:`pyro_symmetric.chain_findings`.

A frame is a function of a draw's orbit and of all draws together, never of the chain that the draw belongs to. So if
the chains' orbits are distributed alike, they are so in every frame, and disagreement in any one is real. Agreement in
one alone proves little: a canonical form sorts units by a key, and if two units' keys overlap it mixes them, which
hides that chains are apart.

If model and data are known, the energy is looked at, too (see :mod:`pyro_symmetric.compare.energy`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.calls import described
from pyro_symmetric.chain_findings import (
    EFFECTIVE_DRAWS,
    R_HAT,
    Finding,
    Status,
    finite,
    graded,
    moving,
    sampler_findings,
)
from pyro_symmetric.chain_statistics import (
    ChainStatistics,
    chain_statistics,
    copied_chains,
    evenly_spaced,
    never_changing,
    standing_still,
)
from pyro_symmetric.compare.energy import energy_findings
from pyro_symmetric.compare.frames import canonical_frame, one_frame
from pyro_symmetric.compare.results import plain, table
from pyro_symmetric.compare.verdict import verdict
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.predict import predict

Draws = Mapping[str, Tensor]

LEAST_DRAWS = 8  # of a chain: halves of four
MOST_ROWS = 256
MOST_NUMBERS, LEAST_ENTRIES = 2**28, 256  # of a site


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What there is to say of a posterior's draws; see :func:`diagnose`.

    >>> diagnosis["weights"].status
    'pass'

    :param verdict: what it comes to, in a few sentences.
    :param findings: everything that was looked at; ``diagnosis[name]`` is one of them.
    :param statistics: ``"weights"``, ``"canonical"``, ``"aligned"``, ``"predictions"``, ``"log density"``, as far as
        they are known -> site -> R-hat and effective sample sizes of every entry.
    """

    verdict: str
    findings: tuple[Finding, ...]
    statistics: dict[str, dict[str, ChainStatistics]]
    num_chains: int
    num_samples: int

    @property
    def ok(self) -> bool:
        """Whether nothing failed and nothing was warned of."""
        return not any(finding.status in ("warn", "fail") for finding in self.findings)

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"no finding {name!r}; there are {[finding.name for finding in self.findings]}")

    def __contains__(self, name: str) -> bool:
        return any(finding.name == name for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers for JSON."""
        found = {f.name: {"status": f.status, "words": f.words, "value": f.value} for f in self.findings}
        summaries = {
            space: {site: numbers.summary() for site, numbers in by_site.items()}
            for space, by_site in self.statistics.items()
        }
        return plain({"verdict": self.verdict, "ok": self.ok, "findings": found, "statistics": summaries})

    def plot(self) -> Any:
        """R-hat and bulk effective sample sizes of all entries, sorted: a curve for each space."""
        from pyro_symmetric.plots import chain_agreement  # which loads matplotlib

        curves: dict[str, dict[str, Any]] = {"r_hat": {}, "ess_bulk": {}}
        for space, by_site in self.statistics.items():
            for name, by_space in curves.items():
                by_space[space] = _known(by_site, name).numpy()
        return chain_agreement(curves["r_hat"], curves["ess_bulk"], R_HAT[1])

    def __repr__(self) -> str:
        counts = {status: sum(f.status == status for f in self.findings) for status in get_args(Status)}
        counted = ", ".join(f"{n} {status}" for status, n in counts.items() if n or status != "unknown")
        chains = "1 chain" if self.num_chains == 1 else f"{self.num_chains} chains"
        parts = [
            f"Diagnosis of {chains} of {self.num_samples} draws: {self.verdict}",
            f"Findings: {counted}",
            table([(finding.status, finding.name, finding.words) for finding in self.findings], left=(0, 1, 2)),
        ]
        if self.statistics:
            parts.append(table([HEAD, *self._rows()], left=(0, 1)))
        return "\n".join(parts)

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for space, by_site in self.statistics.items():
            for site, statistics in by_site.items():
                numbers = statistics.summary()
                r_hats = (f"{numbers[f'r_hat{kind}']:.3f}" for kind in ("", "_median"))
                sizes = (
                    f"{numbers[f'ess_{part}{kind}']:,.0f}" for part in ("bulk", "tail") for kind in ("", "_median")
                )
                rows.append((space, site, f"{statistics.r_hat.numel():,}", *r_hats, *sizes))
        return rows


HEAD = ("space", "site", "entries", "R-hat worst", "median", "ESS bulk worst", "median", "ESS tail worst", "median")


def diagnose(
    posterior: Posterior,
    symmetry: Symmetry | Group | None = None,
    model: BayesianModel | None = None,
    *,
    x: Tensor | None = None,
    predictions: Tensor | None = None,
    aligned: Posterior | None = None,
    num_draws: int = 256,
) -> Diagnosis:
    """Whether draws can be trusted, in one verdict, and everything that it rests on.

    >>> print(diagnose(posterior, find_symmetry(net, x), model, x=x))

    Of independent rows (an ensemble, draws of a guide) it is told how many they are, and whether they are finite. The
    findings for chains, of which a posterior gets those that it has the numbers for:

    * ``finite``: no draw is NaN or infinite, nor its log density. If one is, nothing else is looked at.
    * ``copies``, a failure: chains that equal others draw for draw. If there are any, nothing else is looked at.
    * ``moving``: every chain moves, and spreads as widely as the others.
    * ``constant entries``: entries that never change in any chain. They are left out of everything else.
    * ``weights``, ``canonical``, ``aligned``, ``predictions``, ``log density``: whether the chains agree there: the
      R-hat that one entry in a hundred exceeds (of fewer, the largest), of the worst site. Above 1.02 it is a warning,
      above 1.05 a failure. Where something else decides, disagreement is no more than a warning: weights may sit in
      copies of one mode, and modes may predict alike. One chain is compared with itself, half by half. Of sites of more
      than 2²⁸ numbers some entries are looked at, evenly spaced ones.
    * ``settled``: if chains disagree, whether each stays the same from its first half to its second.
    * ``effective draws``: the worst bulk or tail effective sample size of what decides. 400 are enough for means,
      deviations and this diagnosis to be trusted; below that it warns, below 50 it fails.
    * ``acceptance``, ``divergences``, ``tree depth``, ``energy`` (the fraction E-BFMI), ``level`` (no chain's log
      density stays far below the others'): the sampler's own numbers.
    * ``kinetic temperature``: mean squared momentum, 1 if a stochastic-gradient sampler's steps are small enough.
    * ``temperature`` and ``virial``: how widely draws spread, in units of how widely they should: the mean of
      ``z · ∇U(z) / D`` over ``D`` unconstrained coordinates, 1 under every posterior (the virial theorem). ``virial``
      is the sampler's own average over its mini-batches, ``temperature`` is computed here from all data.
    * ``mini-batch scale``: mini-batches count their likelihood ``N / B`` times.

    A symmetry takes memory for a canonical and an aligned copy of all draws, and time to align them: some seconds for
    4,000 draws of 50 units. ``posterior.thin(k)`` takes less.

    :param posterior: the draws, with the sampler's statistics, of which ``lp`` stands for the log density. If it
        remembers its model and data (as ``sample`` returns it; after loading, ``posterior.attach(model, x, y)``), the
        energy is looked at, and the function at the data.
    :param symmetry: what to remove, e.g. ``find_symmetry(net, x)``: by canonical form, and by alignment of all draws.
    :param model: the network's model, to predict with; by default the one that the posterior remembers.
    :param x: inputs to predict at, of more than 256 rows 256 evenly spaced ones; by default the data.
    :param predictions: instead of ``model`` and ``x``: anything that is a function of the weights alone, ``(chains,
        draws, ...)``, such as ``predict(posterior.samples, any_model, x, kind="mean")``.
    :param aligned: the same draws, brought to one frame otherwise, to stand for the alignment that is done here. Each
        draw must have been moved by itself: an element for each chain (``each="chain"``) looks at the chain.
    :param num_draws: at how many draws, of all chains together, to evaluate the gradient of the energy.
    :raises TypeError: if ``model`` is no ``BayesianModel``.
    :raises ValueError: if arguments don't fit.
    """
    _check_arguments(posterior, x, predictions, aligned, num_draws)
    model, x = _to_predict(posterior, model, x)
    density = {"log density": posterior.statistics["lp"]} if "lp" in posterior.statistics else {}
    sites = {f"site {site!r}": value for site, value in posterior.samples.items()}
    found = finite({**sites, **density, **({} if predictions is None else {"predictions": predictions})})
    if found.status == "fail":
        return _diagnosis(posterior, [found], {})
    if posterior.rows == "independent":
        return _of_independent_draws(posterior, found)
    if copies := copied_chains(posterior.samples):
        words = f"the chains {copies} equal others draw for draw; were they drawn with the same seed? Leave them out"
        return _diagnosis(posterior, [found, Finding("copies", "fail", words, float(len(copies)))], {})
    with torch.no_grad():
        spaces = _spaces(posterior, symmetry, aligned)
        if predictions is None and model is not None and x is not None:
            rows = x if len(x) <= MOST_ROWS else x[evenly_spaced(len(x), MOST_ROWS)]
            predictions = predict(posterior.samples, model, rows, kind="mean", progress=False)
        if predictions is not None:
            spaces["predictions"] = {"predictions": predictions}
    made = {space: by_site for space, by_site in spaces.items() if space not in ("weights", "log density")}
    found = finite({f"{space} {site!r}": v for space, by_site in made.items() for site, v in by_site.items()})
    if found.status == "fail":
        return _diagnosis(posterior, [found], {})
    statistics, agreement = {}, []
    if posterior.num_samples < LEAST_DRAWS:
        agreement = [Finding("weights", "unknown", "too few draws to tell whether chains agree")]
    else:
        statistics = {
            name: {s: chain_statistics(_chains(_looked_at(v))) for s, v in by.items()} for name, by in spaces.items()
        }
        agreement = _agreement(spaces, statistics, _is_network(posterior))
    arrived = all(finding.status != "fail" for finding in agreement)
    guess = "acceptance_rate" not in posterior.statistics
    subsampled = getattr(posterior.kernel, "subsampled", guess) if posterior.is_attached else guess
    findings = [
        found,
        moving(posterior.samples),
        *_constant(posterior.samples),
        *agreement,
        *sampler_findings(posterior.statistics, subsampled, arrived),
        *energy_findings(posterior, num_draws, subsampled, arrived),
    ]
    return _diagnosis(posterior, findings, statistics)


def _of_independent_draws(posterior: Posterior, found: Finding) -> Diagnosis:
    """Of an ensemble or a guide: there are no chains that could agree."""
    count = posterior.num_chains * posterior.num_samples
    few = count < EFFECTIVE_DRAWS[0]
    advice = f", fewer than {EFFECTIVE_DRAWS[0]:.0f}: means and deviations are rough" if few else ""
    words = f"{count} independent draws{advice}"
    findings = (found, Finding("effective draws", "warn" if few else "pass", words, float(count)))
    verdict = f"{words[0].upper()}{words[1:]}, all finite. There are no chains that could agree or disagree."
    return Diagnosis(verdict, findings, {}, posterior.num_chains, posterior.num_samples)


def _diagnosis(
    posterior: Posterior, findings: list[Finding], statistics: dict[str, dict[str, ChainStatistics]]
) -> Diagnosis:
    words = verdict({finding.name: finding for finding in findings}, posterior.num_chains)
    return Diagnosis(words, tuple(findings), statistics, posterior.num_chains, posterior.num_samples)


# what is looked at --------------------------------------------------------------------------------------------------


def _spaces(
    posterior: Posterior,
    symmetry: Symmetry | Group | None,
    aligned: Posterior | None,
) -> dict[str, Draws]:
    """Space -> site -> ``(chains, draws, ...)``: weights as drawn and without their symmetries, and the density."""
    spaces: dict[str, Draws] = {"weights": posterior.samples}
    if symmetry is not None:
        canonical = canonical_frame(posterior, symmetry)
        spaces["canonical"] = canonical.samples
        aligned = aligned or one_frame(canonical, symmetry)
    if aligned is not None:
        spaces["aligned"] = aligned.samples
    if "lp" in posterior.statistics:
        spaces["log density"] = {"log density": posterior.statistics["lp"]}
    return spaces


def _looked_at(draws: Tensor) -> Tensor:
    """All entries; of very many draws evenly spaced ones, as many as take some seconds."""
    most = max(LEAST_ENTRIES, MOST_NUMBERS // max(1, draws.shape[:2].numel()))
    entries = draws.shape[2:].numel()
    return draws if entries <= most else draws.flatten(2)[..., evenly_spaced(entries, most)]


def _chains(draws: Tensor) -> Tensor:
    """The draws; those of a single chain as two, its halves."""
    return draws if len(draws) > 1 else _halves(draws).squeeze(1)


def _halves(draws: Tensor) -> Tensor:
    """First and second half of each chain, ``(2, chains, draws // 2, ...)``."""
    half = draws.shape[1] // 2
    return torch.stack([draws[:, :half], draws[:, draws.shape[1] - half :]])


def _constant(samples: Draws) -> list[Finding]:
    """Entries that never change: the same everywhere, or another value in each chain."""
    fixed: list[str] = []
    stuck: list[str] = []
    for site, value in samples.items():
        alike = never_changing(value)
        apart = standing_still(value).all(0) & ~alike
        for counts, count in ((fixed, int(alike.sum())), (stuck, int(apart.sum()))):
            if count:
                counts.append(f"{count:,} {'entry' if count == 1 else 'entries'} of {site!r}")
    sentences = [f"{_few(fixed)}, the same in all draws of all chains"] if fixed else []
    sentences += [f"stuck: {_few(stuck)}, different from chain to chain but never changing in one"] if stuck else []
    return [Finding("constant entries", "warn" if stuck else "pass", "; ".join(sentences))] if sentences else []


def _few(parts: list[str]) -> str:
    return ", ".join(parts[:3]) + (f" and of {len(parts) - 3} more sites" if len(parts) > 3 else "")


# whether chains agree -----------------------------------------------------------------------------------------------


def _agreement(
    spaces: Mapping[str, Draws], statistics: Mapping[str, Mapping[str, ChainStatistics]], is_network: bool
) -> list[Finding]:
    """R-hat of each space; whether chains have settled, if what decides disagrees; effective draws."""
    decisive = _decisive(list(spaces), is_network)
    grave = [
        name for name in decisive if name != "weights" or not is_network
    ]  # a network's may sit in copies of a mode
    findings = [_r_hat(name, by_site, name in grave) for name, by_site in statistics.items()]
    if any(f.value > R_HAT[1] for f in findings if f.name in decisive):
        findings.append(_settled([value for name in decisive for value in spaces[name].values()]))
    measured = {name: statistics[name] for name in decisive}
    return [*findings, _effective(measured)]


def _decisive(spaces: list[str], is_network: bool) -> list[str]:
    """The spaces in which chains must agree: what no symmetry touches, else a frame, else the weights.

    The log density alone says little, unless symmetries forbid to look at the weights.
    """
    density = ["log density"] if "log density" in spaces else []
    if "predictions" in spaces:
        return ["predictions", *density]
    if frames := [name for name in ("canonical", "aligned") if name in spaces]:
        return [*frames, *density]
    return density if density and is_network else ["weights", *density]


def _r_hat(space: str, by_site: Mapping[str, ChainStatistics], grave: bool) -> Finding:
    """The R-hat of the worst site that one entry in a hundred exceeds: of hundreds, some stand out by chance."""
    worst = {site: _exceeded_by_few(_known({site: numbers}, "r_hat")) for site, numbers in by_site.items()}
    known = {site: value for site, value in worst.items() if not math.isnan(value)}
    if not known:
        return Finding(space, "unknown", "R-hat can't be told: the draws never change")
    site = max(known, key=known.__getitem__)
    status = graded(known[site], R_HAT)
    words = f"R-hat up to {known[site]:.3f}" + (f", of site {site!r}" if site != space else "")
    advice = {"fail": ": the chains disagree", "warn": ": run longer"}.get(status, "")
    return Finding(space, status if grave or status != "fail" else "warn", words + advice, known[site])


def _effective(measured: Mapping[str, Mapping[str, ChainStatistics]]) -> Finding:
    least = {
        (space, site): -_exceeded_by_few(-torch.minimum(*(_known({site: n}, f"ess_{k}") for k in ("bulk", "tail"))))
        for space, by_site in measured.items()
        if space != "canonical" or "aligned" not in measured  # of two frames, the one that tells units apart
        for site, n in by_site.items()
    }
    known = {name: size for name, size in least.items() if not math.isnan(size)}
    if not known:
        return Finding("effective draws", "unknown", "they can't be told: the draws never change")
    space, site = min(known, key=known.__getitem__)
    size = known[space, site]
    status = graded(size, EFFECTIVE_DRAWS)
    few = f": too few (< {EFFECTIVE_DRAWS[0]:.0f}) to be sure of means and deviations; more draws, or more chains"
    of = f"the {space}" if site == space else f"site {site!r} ({space})"
    return Finding("effective draws", status, f"at least {size:.0f}, of {of}{'' if status == 'pass' else few}", size)


def _known(by_site: Mapping[str, ChainStatistics], name: str) -> Tensor:
    """Values of all entries that have one, ``(K,)``."""
    values = torch.cat([getattr(statistics, name).flatten() for statistics in by_site.values()])
    return values[~values.isnan()]


def _exceeded_by_few(values: Tensor) -> float:
    """The value that one in a hundred exceeds; of fewer the largest."""
    return float(values.sort().values[-1 - len(values) // 100]) if len(values) else math.nan


def _settled(decisive: list[Tensor]) -> Finding:
    """Whether each chain stays where it is, from its first half to its second."""
    if decisive[0].shape[:2].numel() < EFFECTIVE_DRAWS[0]:
        return Finding("settled", "unknown", "too few draws to tell whether chains drift, or differ by chance")
    if all(map(_halves_agree, decisive)):
        return Finding("settled", "pass", "each chain stays the same from its first half to its second")
    return Finding("settled", "fail", "some chains still drift, or stand still")


def _halves_agree(draws: Tensor) -> bool:
    """Of each chain: a half is taken for a chain, each chain's value for a quantity."""
    draws = draws[:, :, ~never_changing(draws).to(draws.device)]
    compared = chain_statistics(_halves(draws).transpose(1, 2))
    stuck = bool(torch.isnan(compared.r_hat).any())
    return not stuck and _exceeded_by_few(compared.r_hat.flatten()) <= R_HAT[1]


# arguments ----------------------------------------------------------------------------------------------------------


def _check_arguments(posterior: Any, x: Any, predictions: Any, aligned: Any, num_draws: Any) -> None:
    arguments.instance("posterior", posterior, Posterior, "a Posterior")
    arguments.whole("num_draws", num_draws, 1)
    if aligned is not None:
        arguments.instance("aligned", aligned, Posterior, "a Posterior, or None")
    for name, value in {"x": x, "predictions": predictions}.items():
        if value is not None:
            arguments.tensor(name, value)
    shape = (posterior.num_chains, posterior.num_samples)
    compared = {} if predictions is None else {"predictions": [predictions]}
    compared |= {} if aligned is None else {"aligned": list(aligned.samples.values())}
    for name, values in compared.items():
        for value in values:
            if tuple(value.shape[:2]) != shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}; it must begin with the posterior's {shape} chains and "
                    "draws"
                )


def _to_predict(
    posterior: Posterior, model: BayesianModel | None, x: Tensor | None
) -> tuple[BayesianModel | None, Tensor | None]:
    """The network's model and inputs: those that are given, else those that the posterior was drawn from."""
    if not isinstance(model, BayesianModel | None):
        raise TypeError(
            f"model is {described(model)}; it must be a BayesianModel. Of another Pyro model, pass "
            "predictions=predict(posterior.samples, model, x, kind='mean')"
        )
    if model is None and x is not None and not posterior.is_attached:
        raise ValueError("x is given, but no model; pass model=, or predictions=")
    if model is None and posterior.is_attached and isinstance(posterior.model, BayesianModel):
        model = posterior.model
        if x is None:
            x = posterior._kwargs.get("x", next(iter(posterior._args), None))
    return model, x


def _is_network(posterior: Posterior) -> bool:
    """Whether the sites are a network's weights, by the model or, if none is known, by names like ``0.weight``."""
    if posterior.is_attached:
        return isinstance(posterior.model, nn.Module)
    return any("." in site for site in posterior.samples)
