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

from collections.abc import Iterator
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
    graded,
    sampler_findings,
    starts,
    warm_up,
)
from pyro_symmetric.chain_statistics import copied_chains, evenly_spaced
from pyro_symmetric.compare.agreement import Statistics, agreement, constant_entries, known, statistics_of
from pyro_symmetric.compare.energy import energy_findings
from pyro_symmetric.compare.frames import canonical_frame, one_frame
from pyro_symmetric.compare.results import plain, table
from pyro_symmetric.compare.verdict import verdict
from pyro_symmetric.discovery.model_check import require_of_posterior
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.draw_findings import finite, moving, resolved
from pyro_symmetric.groups.group import Group
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.predict import predict

MOST_ROWS = 256
RELOCATED = (0.25, 1.0)  # share of the chains that took over others' places


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The verdict on a posterior's draws, and what it rests on; see :func:`diagnose`.

    >>> diagnosis["weights"].status
    'pass'

    :param verdict: what it comes to, in a few sentences.
    :param findings: everything that was looked at; ``diagnosis[name]`` is one of them.
    :param statistics: ``"weights"``, ``"canonical"``, ``"aligned"``, ``"predictions"``, ``"log density"``, as far as
        they are known -> site -> R-hat and effective sample sizes of every entry.
    """

    verdict: str
    findings: tuple[Finding, ...]
    statistics: Statistics
    num_chains: int
    num_samples: int

    @property
    def ok(self) -> bool:
        """True if nothing failed and all could be told. Chains in different copies of a mode are warned of only."""
        return all(finding.status in ("pass", "warn") for finding in self.findings)

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
                by_space[space] = known(by_site, name).numpy()
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
    """Judge whether draws can be trusted: one verdict, and everything that it rests on.

    >>> draws = torch.randn(4, 200, 3)  # of four chains
    >>> ps.diagnose(ps.Posterior({"w": draws}, rows="chains")).ok
    True
    >>> diagnosis = ps.diagnose(ps.Posterior({"w": draws + torch.arange(4.0)[:, None, None]}, rows="chains"))
    >>> diagnosis.ok, diagnosis["weights"].status
    (False, 'fail')

    Of independent rows (an ensemble, draws of a guide) it is told how many they are, and whether they are finite. The
    findings for chains, of which a posterior gets those that it has the numbers for:

    * ``finite``: no draw is NaN or infinite, nor its log density. If one is, nothing else is looked at.
    * ``copies``, a failure: chains that equal others draw for draw. If there are any, nothing else is looked at.
    * ``moving``: every chain moves, and spreads as widely as the others.
    * ``resolution``: numbers of the draws' dtype lie densely enough for the chains' spread. If they lie more than half
      a deviation apart it fails, and nothing else is looked at.
    * ``constant entries``: entries that never change in any chain. Those that are the same in all chains are left out
      of everything else.
    * ``weights``, ``canonical``, ``aligned``, ``predictions``, ``log density``: whether the chains agree there: the
      R-hat that one entry in a hundred exceeds (of fewer, the largest), of the worst site. Above 1.02 it is a warning,
      above 1.05 a failure. If something else decides, disagreement is no more than a warning: weights may sit in
      copies of one mode, and modes may predict alike. One chain is compared with itself, half by half. Of sites of more
      than 2²⁸ numbers some entries are looked at, evenly spaced ones.
    * ``settled``: if chains disagree, whether each stays the same from its first half to its second.
    * ``effective draws``: the worst bulk or tail effective sample size of what decides. 400 are enough for means,
      deviations and this diagnosis to be trusted; below that it warns, below 50 it fails.
    * ``starts``: a warning if all chains of a run started at one point, as none of them may know of other modes.
    * ``relocated``: chains that warm-up took to be lost and moved to where others were. It warns if they are more than
      a quarter.
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
    :raises TypeError: if ``model`` is no ``BayesianModel``, or predictions are complex.
    :raises ValueError: if arguments don't fit, there are no draws, or the model lacks a declared group.
    """
    _check_arguments(posterior, x, predictions, aligned, num_draws)
    require_of_posterior(symmetry, posterior)
    model, x = _to_predict(posterior, model, x)
    density = {"log density": posterior.statistics["lp"]} if "lp" in posterior.statistics else {}
    drawn = {**{f"site {site!r}": value for site, value in posterior.samples.items()}, **density}
    found = finite({**drawn, **({} if predictions is None else {"predictions": predictions})})
    if found.status == "fail":
        return _diagnosis(posterior, [found])
    if posterior.rows == "independent":
        return _of_independent_draws(posterior, found)
    if copies := copied_chains(posterior.samples):
        words = f"the chains {copies} equal others draw for draw; were they drawn with the same seed? Leave them out"
        return _diagnosis(posterior, [found, Finding("copies", "fail", words, float(len(copies)))])
    resolution = list(resolved(drawn))
    if any(finding.status == "fail" for finding in resolution):
        return _diagnosis(posterior, [found, *resolution])
    spaces = _spaces(posterior, symmetry, model, x, predictions, aligned)
    made = {space: by_site for space, by_site in spaces.items() if space not in ("weights", "log density")}
    found = finite({f"{space} {site!r}": v for space, by_site in made.items() for site, v in by_site.items()})
    if found.status == "fail":
        return _diagnosis(posterior, [found])
    statistics = statistics_of(spaces)
    agreed = agreement(spaces, statistics, _is_network(posterior))
    arrived = all(finding.status != "fail" for finding in agreed)
    frames = [finding for finding in agreed if finding.name in ("canonical", "aligned")]
    in_copies = bool(frames) and all(finding.status == "pass" for finding in frames)
    guess = "acceptance_rate" not in posterior.statistics
    subsampled = getattr(posterior.kernel, "subsampled", guess) if posterior.is_attached else guess
    findings = [
        found,
        *resolution,
        moving(posterior.samples),
        *constant_entries(posterior.samples),
        *agreed,
        *starts(posterior.metadata),
        *warm_up(posterior.metadata, in_copies),
        *_relocated(posterior),
        *sampler_findings(posterior.statistics, subsampled, arrived),
        *energy_findings(posterior, num_draws, subsampled, arrived),
    ]
    return _diagnosis(posterior, findings, statistics)


def _relocated(posterior: Posterior) -> Iterator[Finding]:
    """Tell of chains that warm-up took to be lost."""
    chains = posterior.metadata.get("relocated_chains")
    if not chains:
        return
    share = len(chains) / posterior.num_chains
    words = (
        f"in warm-up {len(chains)} of {posterior.num_chains} chains, far above the others in energy, stood still, were "
        "still on their way, or were in a mode that holds next to nothing, and continued from where others were: modes "
        "that only these had found may be lost, and their R-hat is kinder than that of chains with starts of their own"
    )
    yield Finding("relocated", graded(share, RELOCATED), words, share)


def _of_independent_draws(posterior: Posterior, found: Finding) -> Diagnosis:
    """Of an ensemble or a guide: there are no chains that could agree."""
    count = posterior.num_chains * posterior.num_samples
    few = count < EFFECTIVE_DRAWS[0]
    advice = f", fewer than {EFFECTIVE_DRAWS[0]:.0f}: means and deviations are rough" if few else ""
    words = f"{count} independent draws{advice}"
    findings = (found, Finding("effective draws", "warn" if few else "pass", words, float(count)))
    verdict = f"{words[0].upper()}{words[1:]}, all finite. There are no chains that could agree or disagree."
    return Diagnosis(verdict, findings, {}, posterior.num_chains, posterior.num_samples)


def _diagnosis(posterior: Posterior, findings: list[Finding], statistics: Statistics | None = None) -> Diagnosis:
    words = verdict({finding.name: finding for finding in findings}, posterior.num_chains)
    return Diagnosis(words, tuple(findings), statistics or {}, posterior.num_chains, posterior.num_samples)


@torch.no_grad()
def _spaces(
    posterior: Posterior,
    symmetry: Symmetry | Group | None,
    model: BayesianModel | None,
    x: Tensor | None,
    predictions: Tensor | None,
    aligned: Posterior | None,
) -> dict[str, dict[str, Tensor]]:
    """The spaces in which chains are compared: weights as drawn and without symmetries, log density, predictions."""
    spaces = {"weights": posterior.samples}
    if symmetry is not None:
        canonical = canonical_frame(posterior, symmetry)
        spaces["canonical"] = canonical.samples
        aligned = aligned or one_frame(canonical, symmetry)
    if aligned is not None:
        spaces["aligned"] = aligned.samples
    if "lp" in posterior.statistics:
        spaces["log density"] = {"log density": posterior.statistics["lp"]}
    if predictions is None and model is not None and x is not None:
        rows = x if len(x) <= MOST_ROWS else x[evenly_spaced(len(x), MOST_ROWS)]
        predictions = predict(posterior.samples, model, rows, kind="mean", progress=False)
    if predictions is not None:
        spaces["predictions"] = {"predictions": predictions}
    return {space: {site: v for site, v in by_site.items() if v.numel()} for space, by_site in spaces.items()}


# arguments ----------------------------------------------------------------------------------------------------------


def _check_arguments(posterior: Any, x: Any, predictions: Any, aligned: Any, num_draws: Any) -> None:
    arguments.instance("posterior", posterior, Posterior, "a Posterior")
    arguments.whole("num_draws", num_draws, 1)
    if aligned is not None:
        arguments.instance("aligned", aligned, Posterior, "a Posterior, or None")
    for name, value in {"x": x, "predictions": predictions}.items():
        if value is not None:
            arguments.real(name, value)
    shape = (posterior.num_chains, posterior.num_samples)
    if not any(value.numel() for value in posterior.samples.values()):
        shapes = {site: tuple(value.shape) for site, value in posterior.samples.items()}
        raise ValueError(f"posterior holds no numbers; it must have a chain, a draw and an entry, and has {shapes}")
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
    """True if the sites are a network's weights, by the model or, if none is known, by names like ``0.weight``."""
    if posterior.is_attached:
        return isinstance(posterior.model, nn.Module)
    return any("." in site for site in posterior.samples)
