r"""A short battery of checks on what a sampler returned, each with a verdict in words.

Whether chains agree is asked by the rank-normalised split R-hat (Vehtari et al. 2021, arXiv 1903.08008) of the log
density and of the sites. A network's weights may sit in copies of a mode that predict alike, so theirs is no more than
a warning; :func:`~pyro_symmetric.compare.convergence` looks at weights and predictions closely.

Most other checks read what the sampler wrote down. If the posterior remembers its model and data, two more evaluate
them:

* *Temperature.* Integration by parts gives :math:`\mathbb E[z \cdot \nabla U(z)] = D` for every posterior over
  :math:`z \in \mathbb R^D` whose density vanishes at infinity (the virial theorem). Its average over :math:`D` is the
  configurational temperature of the draws: above 1 they spread too widely, as those of a stochastic-gradient sampler
  whose step is too large, or of chains on their way in; below 1 too little. The kinetic temperature
  :math:`\mathbb E\|r\|^2 / D` says the same of momenta.
* *Mini-batch scale.* The mean energy over the mini-batches of one pass through the data equals the energy of all data,
  if each mini-batch's likelihood counts ``N / B`` times. A model that forgets the factor samples a posterior of ``B``
  observations, silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric._process import without_warnings
from pyro_symmetric.chain_statistics import chain_statistics, evenly_spaced, missing_energy, never_changing, non_finite
from pyro_symmetric.compare._results import listed, non_finite_words, table
from pyro_symmetric.compare.verdict import NONE_MOVES
from pyro_symmetric.generators import turn
from pyro_symmetric.mcmc.batches import Batches
from pyro_symmetric.mcmc.potential import Potential
from pyro_symmetric.mcmc.targets import ROWS
from pyro_symmetric.samples import Posterior

Status = Literal["fail", "warn", "pass", "unknown"]

TEMPERATURE_BOUNDS = (0.1, 0.3)  # distance from 1 to warn of, and to fail at
SURE = 3.0  # standard errors
R_HAT_BOUNDS = (1.02, 1.05)  # to warn of, and to fail at
EFFECTIVE_BOUNDS = (400.0, 50.0)  # effective draws to warn of having fewer than, and to fail at
COMPARED_ENTRIES = 256  # of each site, evenly spaced, whose R-hat is taken
WATCHED_ENTRIES = 16  # of each site, where it is enough to see whether chains move
MOST_BATCHES = 64
CHUNK = 32


@dataclass(frozen=True)
class Finding:
    """One check.

    :param name: what was looked at.
    :param status: ``"pass"``, ``"warn"``, ``"fail"``, or ``"unknown"`` if the draws don't suffice to tell.
    :param words: what was found, and what to do about it.
    :param value: the number that it rests on; NaN if there is none.
    """

    name: str
    status: Status
    words: str
    value: float = math.nan


@dataclass(frozen=True)
class CheckResult:
    """All findings, in the order of the checks; see :func:`check`."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed and nothing was warned of."""
        return not any(finding.status in ("warn", "fail") for finding in self.findings)

    def __getitem__(self, name: str) -> Finding:
        for finding in self.findings:
            if finding.name == name:
                return finding
        raise KeyError(f"no check {name!r}; there are {[finding.name for finding in self.findings]}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {f.name: {"status": f.status, "words": f.words, "value": _plain(f.value)} for f in self.findings}

    def __repr__(self) -> str:
        counts = {status: sum(f.status == status for f in self.findings) for status in get_args(Status)}
        counted = ", ".join(f"{n} {status}" for status, n in counts.items() if n or status != "unknown")
        rows = [(finding.status, finding.name, finding.words) for finding in self.findings]
        return f"Checks: {counted}\n{table(rows, left=(0, 1, 2))}"


@turn()
def check(posterior: Posterior, *, num_draws: int = 256) -> CheckResult:
    """Check what a sampler returned.

    >>> print(check(sample(SGHMC(model, batch_size=64), args=(x, y))))

    The checks, of which a posterior gets those that it has the numbers for:

    * ``finite``: no draw is NaN or infinite, nor its log density.
    * ``moving``: every chain moves, and spreads as widely as the others. Entries that are the same in all draws of all
      chains, such as the zeros of a triangle, are left out.
    * ``convergence``: chains agree: the worst R-hat of the log density ``lp`` and of the sites; above 1.02 a warning,
      above 1.05 a failure. One chain is compared with itself, half by half.
    * ``weights``: the same of a network's weights, never more than a warning: chains may sit in copies of one mode.
    * ``effective draws``: the worst bulk effective sample size of the same quantities (of a network the log density
      alone). 400 are enough for means, deviations and this battery to be trusted; below that it warns, below 50 fails.
    * ``acceptance``, ``divergences``, ``tree depth``, ``energy`` (the fraction E-BFMI): the sampler's own numbers.
    * ``level``: no chain's log density stays far below the others'.
    * ``kinetic temperature``: mean squared momentum, 1 if a stochastic-gradient sampler's steps are small enough.
    * ``temperature`` and ``virial``: how widely draws spread, in units of how widely they should: the mean of
      ``z · ∇U(z) / D`` over ``D`` unconstrained coordinates, which is 1 under every posterior (the virial theorem) and
      larger for draws that spread too widely. ``virial`` is the sampler's own average over its mini-batches,
      ``temperature`` is computed here from all data.
    * ``mini-batch scale``: mini-batches count their likelihood ``N / B`` times.

    :param posterior: with its statistics; with its model and data (as ``sample`` returns it, or by
        :meth:`Posterior.attach`) the energy is looked at too.
    :param num_draws: of all chains together, at how many draws to evaluate the model's gradient.
    """
    arguments.instance("posterior", posterior, Posterior, "a Posterior")
    arguments.whole("num_draws", num_draws, 1)
    findings = [_finite(posterior)]
    if findings[0].status == "pass":
        agreement = _agreement(posterior)
        arrived = all(finding.status != "fail" for finding in agreement)
        findings += [_moving(posterior), *agreement, *_statistics(posterior, arrived)]
        if posterior.is_attached:
            findings += _energy(posterior, num_draws, arrived)
    return CheckResult(tuple(findings))


# draws --------------------------------------------------------------------------------------------------------------


def _finite(posterior: Posterior) -> Finding:
    values = {f"site {site!r}": value for site, value in posterior.samples.items()}
    if "lp" in posterior.statistics:
        values["the log density"] = posterior.statistics["lp"]
    counts = {name: count for name, value in values.items() if bool((count := non_finite(value)).any())}
    if counts:
        return Finding("finite", "fail", non_finite_words(counts, posterior.num_samples))
    return Finding("finite", "pass", "all draws are finite")


def _moving(posterior: Posterior) -> Finding:
    """How often chains change place, and whether any spreads far less than the others."""
    if posterior.num_samples < 2:
        return Finding("moving", "unknown", "one draw of each chain says nothing of its moves")
    watched = torch.cat(list(_heads(posterior)), dim=2).double()
    changing = ~never_changing(watched)
    if not bool(changing.any()):
        return Finding("moving", "fail", f"no chain moves: {NONE_MOVES}", 0.0)
    watched = watched[..., changing]
    moves = (watched.diff(dim=1) != 0).any(2).double().mean(1)
    spread = watched.std(1)
    relative = (spread / spread.median(0).values.clamp(min=1e-300)).median(1).values
    slowest, least = float(moves.min()), float(relative.min())
    stuck = ((moves < 0.01) | (relative < 0.01)).nonzero().flatten().tolist()
    slow = ((moves < 0.1) | (relative < 0.1)).nonzero().flatten().tolist()
    if len(stuck) == posterior.num_chains:
        return Finding("moving", "fail", f"no chain moves: {NONE_MOVES}", slowest)
    if stuck:
        return Finding("moving", "fail", f"{_chains(stuck)} stuck: restart from elsewhere, or smaller steps", slowest)
    if slow:
        words = f"{_chains(slow)} slow: moves in {slowest:.0%} of the draws, spread {least:.0%} of the median chain's"
        return Finding("moving", "warn", words, slowest)
    return Finding("moving", "pass", f"every chain moves in at least {slowest:.0%} of its draws", slowest)


def _heads(posterior: Posterior) -> Iterator[Tensor]:
    """The first entries of each site, ``(chains, draws, entries)``: an accepted move changes them all, but for entries
    that never change."""
    for value in posterior.samples.values():
        yield value.flatten(2)[..., :WATCHED_ENTRIES] if value.dim() > 2 else value[..., None]


# agreement ----------------------------------------------------------------------------------------------------------


def _agreement(posterior: Posterior) -> list[Finding]:
    """R-hat and effective draws: of the log density, and of the sites."""
    if posterior.num_samples < 8:
        return [Finding("convergence", "unknown", "too few draws to tell whether chains agree")]
    sites = {f"site {site!r}": _compared(value) for site, value in posterior.samples.items()}
    density = {"the log density": posterior.statistics["lp"]} if "lp" in posterior.statistics else {}
    in_copies = _is_network(posterior)
    told = density if in_copies else {**density, **sites}
    found = {name: _worst(values) for name, values in told.items()}
    findings = [_convergence(found), _effective(found)] if found else []
    return [*findings, _weights({name: _worst(values) for name, values in sites.items()})] if in_copies else findings


def _convergence(found: dict[str, tuple[float, float]]) -> Finding:
    name, r_hat = _largest(found)
    if math.isnan(r_hat):
        return Finding("convergence", "unknown", "R-hat can't be told: the draws never change")
    warn, fail = R_HAT_BOUNDS
    status: Status = "fail" if r_hat > fail else "warn" if r_hat > warn else "pass"
    advice = {
        "fail": ": the chains are at different places or still on their way; give them a longer warm-up. (Mixtures and "
        "networks have copies of each mode: see convergence)",
        "warn": ": run longer",
        "pass": "",
    }[status]
    return Finding("convergence", status, f"R-hat up to {r_hat:.3f}, of {name}{advice}", r_hat)


def _weights(found: dict[str, tuple[float, float]]) -> Finding:
    """Of a network, whose chains may sit in copies of a mode."""
    name, r_hat = _largest(found)
    if math.isnan(r_hat):
        return Finding("weights", "unknown", "R-hat can't be told: the draws never change")
    if r_hat > R_HAT_BOUNDS[1]:
        words = (
            f"R-hat up to {r_hat:.3f}, of {name}: chains in copies of a mode, or in other ones; "
            "convergence(posterior, symmetry) tells which"
        )
        return Finding("weights", "warn", words, r_hat)
    return Finding("weights", "pass", f"R-hat up to {r_hat:.3f}, of {name}", r_hat)


def _effective(found: dict[str, tuple[float, float]]) -> Finding:
    known = {name: size for name, (_, size) in found.items() if not math.isnan(size)}
    if not known:
        return Finding("effective draws", "unknown", "they can't be told: the draws never change")
    name = min(known, key=known.__getitem__)
    size = known[name]
    warn, fail = EFFECTIVE_BOUNDS
    status: Status = "fail" if size < fail else "warn" if size < warn else "pass"
    advice = "" if status == "pass" else f": {warn:.0f} are enough for means and deviations; more draws, or more chains"
    return Finding("effective draws", status, f"at least {size:.0f}, of {name}{advice}", size)


def _compared(value: Tensor) -> Tensor:
    """Evenly spaced entries of a site, ``(chains, draws, entries)``."""
    flat = value.flatten(2) if value.dim() > 2 else value[..., None]
    return flat[..., evenly_spaced(flat.shape[-1], COMPARED_ENTRIES)]


def _worst(draws: Tensor) -> tuple[float, float]:
    """R-hat exceeded by one entry in a hundred (the largest of fewer), and the smallest effective size likewise.

    Of hundreds of entries some stand out by chance. A single chain is taken for two, its halves.
    """
    if len(draws) == 1:
        half = draws.shape[1] // 2
        draws = torch.cat([draws[:, :half], draws[:, draws.shape[1] - half :]])
    statistics = chain_statistics(draws)
    r_hat, size = (v[~v.isnan()].flatten().sort().values for v in (statistics.r_hat, statistics.ess_bulk))
    spared = len(r_hat) // 100
    return (
        float(r_hat[-1 - spared]) if len(r_hat) else math.nan,
        float(size[len(size) // 100]) if len(size) else math.nan,
    )


def _largest(found: dict[str, tuple[float, float]]) -> tuple[str, float]:
    known = {name: r_hat for name, (r_hat, _) in found.items() if not math.isnan(r_hat)}
    name = max(known, key=known.__getitem__, default="")
    return name, known.get(name, math.nan)


def _is_network(posterior: Posterior) -> bool:
    """Whether the sites are a network's weights, by the model or, if none is known, by names like ``0.weight``."""
    if posterior.is_attached:
        return isinstance(posterior.model, nn.Module)
    return any("." in site for site in posterior.samples)


# the sampler's own statistics ---------------------------------------------------------------------------------------


def _statistics(posterior: Posterior, arrived: bool) -> Iterator[Finding]:
    statistics = posterior.statistics
    if "acceptance_rate" in statistics:
        yield _acceptance(statistics["acceptance_rate"].double().mean(1))
    if "diverging" in statistics:
        yield _divergences(posterior)
    if "reached_max_treedepth" in statistics:
        share = float(statistics["reached_max_treedepth"].double().mean())
        words = f"{share:.1%} of the trajectories were cut off at the largest tree"
        yield Finding("tree depth", "warn" if share > 0.1 else "pass", words, share)
    if "energy" in statistics and posterior.num_samples > 2:
        yield _missing_energy(missing_energy(statistics["energy"]))
    if "lp" in statistics and posterior.num_chains > 1 and posterior.num_samples > 2:
        yield _level(statistics["lp"].double())
    for name in ("kinetic_temperature", "virial"):
        if name in statistics:
            title = "kinetic temperature" if name == "kinetic_temperature" else "virial"
            yield _temperature(title, statistics[name].double(), arrived)


def _acceptance(by_chain: Tensor) -> Finding:
    least, mean = float(by_chain.min()), float(by_chain.mean())
    status: Status = "pass" if least >= 0.4 else "warn" if least >= 0.1 else "fail"  # NaN fails
    advice = "" if status == "pass" else ": a smaller step size, or a longer warm-up"
    words = f"mean acceptance {mean:.2f}, of the worst chain {least:.2f}{advice}"
    return Finding("acceptance", status, words, least)


def _divergences(posterior: Posterior) -> Finding:
    share = float(posterior.statistics["diverging"].double().mean())
    status: Status = "fail" if share > 0.05 else "warn" if share > 0 else "pass"
    advice = "" if share == 0 else ": parts of the posterior may be missed; smaller steps, or reparametrise"
    return Finding("divergences", status, f"{share:.2%} of the draws diverged{advice}", share)


def _missing_energy(fraction: Tensor) -> Finding:
    least = float(fraction.min())
    status: Status = "fail" if least < 0.1 else "warn" if least < 0.3 else "pass" if least == least else "unknown"
    advice = ": momenta hardly change the energy, tails are missed; reparametrise" if status != "pass" else ""
    return Finding("energy", status, f"E-BFMI of the worst chain {least:.2f}{advice}", least)


def _level(lp: Tensor) -> Finding:
    """Chains whose log-density stays far from the others'."""
    means, spread = lp.mean(1), lp.std(1).median()
    gap = means.median() - means
    behind = (gap > 5 * spread).nonzero().flatten().tolist()
    largest = float(gap.max())
    if behind:
        words = f"{_chains(behind)} up to {largest:.3g} nats below the others: still on the way in, or in a poor mode"
        return Finding("level", "warn", words, largest)
    return Finding("level", "pass", "no chain's log-density stays far below the others'", largest)


def _temperature(name: str, values: Tensor, arrived: bool) -> Finding:
    """Whether the mean of ``(chains, draws)`` is 1, within what is tolerable and what chance allows.

    :param arrived: whether chains agree; if not, steps aren't to blame.
    """
    known = values[~values.isnan().any(1)]  # without chains that lost their numbers on the way
    if known.numel() < 2:
        return Finding(name, "unknown", "no chain has values throughout")
    mean, error = float(known.mean()), _standard_error(known)
    off = abs(mean - 1)
    warn, fail = TEMPERATURE_BOUNDS
    sure = off > SURE * error
    status: Status = "fail" if sure and off > fail else "warn" if sure and off > warn else "pass"
    if not arrived and not (status == "pass" and SURE * error <= fail):
        words = f"{mean:.3g} ± {error:.2g} where 1 is right, of chains that don't agree yet: first a longer warm-up"
        return Finding(name, "unknown" if status == "pass" else status, words, mean)
    if status == "pass" and SURE * error > fail:
        words = f"{mean:.3g} ± {error:.2g} where 1 is right: uncertain by more than {fail:g}; more draws would tell"
        return Finding(name, "unknown", words, mean)
    advice = ""
    if status != "pass":
        wide = "spread too widely: smaller steps, larger batches, or a longer warm-up"
        advice = f": the draws {wide if mean > 1 else 'spread too little: a longer run'}"
    return Finding(name, status, f"{mean:.3f} ± {error:.2g} where 1 is right{advice}", mean)


def _standard_error(values: Tensor) -> float:
    """Of the mean of correlated draws; never below that of the chains' means."""
    size = float(chain_statistics(values).ess_bulk)
    within = float(values.std()) / math.sqrt(size) if size == size else float(values.std())
    between = float(values.mean(1).std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return max(within, between)


# the model's energy -------------------------------------------------------------------------------------------------


def _energy(posterior: Posterior, num_draws: int, arrived: bool) -> Iterator[Finding]:
    dtype = next(iter(posterior.samples.values())).dtype
    batch_size = getattr(posterior.kernel, "batch_size", None)
    args, kwargs = posterior._args, posterior._kwargs
    options: dict[str, Any] = {"device": posterior.origin_device, "dtype": dtype, "chain_chunk": CHUNK}
    options["subsampled"] = True
    with without_warnings(UserWarning):  # of a mini-batch's scale: that is looked at here
        full = Potential(posterior.model, args, kwargs, **options)
    if full.row_counts:
        return  # the model draws its own mini-batches, which Pyro's plates scale themselves
    per_chain = max(1, min(posterior.num_samples, num_draws // posterior.num_chains))
    draws = posterior.thin(max(1, posterior.num_samples // per_chain))
    z = full.unconstrain({site: draws.samples[site] for site in full.layout.site_shapes})
    _, gradient = full.value_and_grad(z.flatten(0, 1))
    own = (z.flatten(0, 1) * gradient).mean(1).reshape(z.shape[:2])
    yield _temperature("temperature", own.double().cpu(), arrived)
    if batch_size is not None:
        with without_warnings(UserWarning):
            parts = Potential(posterior.model, args, kwargs, batch_size=batch_size, **options)
        if ROWS in parts.row_counts:
            yield _batch_scale(full, parts, z[:, -1][:8])


@torch.no_grad()
def _batch_scale(full: Potential, parts: Potential, z: Tensor) -> Finding:
    total, size = parts.row_counts[ROWS]
    batches = Batches(parts.row_counts, len(z), str(z.device))
    energies = []
    for _ in range(min(MOST_BATCHES, total // size)):
        rows, batches = batches.next()
        energies.append(parts(z, rows).double())
    by_batch, whole = torch.stack(energies), full(z).double()
    gap = float((by_batch.mean(0) - whole).mean())
    spread = float(by_batch.std(0).mean()) if len(energies) > 1 else float(whole.abs().mean())
    error = spread / math.sqrt(by_batch.numel())
    name, size_of = "mini-batch scale", float(whole.abs().mean())
    if abs(gap) > 5 * error + 0.01 * size_of:
        words = (
            f"mini-batches of {size} of {total} rows have an energy {gap:+.4g} nats off that of all data "
            f"({size_of:.4g}): the likelihood must count N / B times; use pyro.plate(name, {total}, subsample=...)"
        )
        return Finding(name, "fail", words, gap)
    return Finding(name, "pass", f"mini-batches' mean energy is within {abs(gap):.2g} nats of all data's", gap)


# small steps --------------------------------------------------------------------------------------------------------


def _chains(indices: list[int]) -> str:
    return f"{'chain' if len(indices) == 1 else 'chains'} {listed(indices)} {'is' if len(indices) == 1 else 'are'}"


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
