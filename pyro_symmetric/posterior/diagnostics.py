"""Checks of Markov chains, each one number beside its limits: what was found, and what to do about it.

:func:`~pyro_symmetric.mcmc.sample` warns of checks that fail, and :func:`~pyro_symmetric.compare.diagnose` reports all
of them, so that both judge by the same limits.

Tables of convergence stand at the end. Numbers that can't be told are NaN: of sites without entries, of fewer than 4
draws, of weights that are constant or not finite. R-hat of one chain compares its halves, and so says nothing of other
modes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric.posterior.draws import entry_names
from pyro_symmetric.posterior.statistics import (
    also_of_one,
    chain_statistics,
    copied_chains,
    missing_energy,
    non_finite,
    standing_still,
    watched,
)

Status = Literal["fail", "warn", "pass", "unknown"]

# Beyond the first limit a check is a warning, beyond the second a failure.
R_HAT = (1.02, 1.05)
EFFECTIVE_DRAWS = (400.0, 50.0)  # Vehtari et al. 2021, section 4: 400 for stable estimates of R-hat and of quantiles
MOVING = (0.1, 0.01)  # share of the draws at which a chain moves, and its spread in units of the median chain's
ACCEPTANCE = (0.4, 0.1)  # of one chain, on average
DIVERGING = (0.0, 0.002)  # share of the draws; of a banana, 0.5 % went with second moments that lacked a third
CUT_OFF = (0.1, math.inf)  # share of the trajectories that reach the largest tree
ENERGY_FRACTION = (0.3, 0.1)  # E-BFMI of one chain
ENERGY_ERROR = (2.0, 10.0)  # of unadjusted steps, in units of what was asked
TEMPERATURE = (0.1, 0.3)  # distance from 1

MOST_ENTRIES_SHOWN = 32  # of a site, one by one
LEAST_DRAWS = 20  # of a chain, so that a low acceptance says something
SURE = 3.0  # standard errors that a temperature must be off
SURE_OF_ONE = 4.5  # of several sites: false alarms 7e-6 each

RELABELLED = (
    "If the model's components or units can be relabelled, diagnose(posterior, symmetry) tells whether that is all"
)
TOO_LARGE = "the step size is too large for all of them, or the density or its gradient is broken"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    :param name: what it is.
    :param status: ``"pass"``, ``"warn"``, ``"fail"``, or ``"unknown"`` if the draws don't suffice to tell.
    :param words: what was found, what it should be, and what to do about it.
    :param value: the number that it rests on; NaN if there is none.
    """

    name: str
    status: Status
    words: str
    value: float = math.nan


def graded(value: float, limits: tuple[float, float]) -> Status:
    """The status of a number by the limits of a warning and of a failure; NaN can't be told."""
    if math.isnan(value):
        return "unknown"
    warn, fail = limits
    sign = 1 if fail > warn else -1
    return "fail" if sign * value > sign * fail else "warn" if sign * value > sign * warn else "pass"


def checked(name: str, value: float, limits: tuple[float, float], found: str, advice: str) -> Check:
    """A number beside its limits; the advice is for numbers beyond them."""
    status, side = graded(value, limits), "below " if limits[1] > limits[0] else "above "
    right = f"{side if limits[0] else ''}{limits[0]:g}"
    words = f"{found}, should be {right}: {advice}" if status in ("warn", "fail") else found
    return Check(name, status, words, value)


# draws --------------------------------------------------------------------------------------------------------------


def finite(draws: Mapping[str, Tensor]) -> Check:
    """Check that all draws ``(chains, draws, ...)`` are finite; what they are called in the sentence -> the draws."""
    counts = {name: count for name, value in draws.items() if bool((count := non_finite(value)).any())}
    if not counts:
        return Check("finite", "pass", "all draws are finite")
    length = next(iter(draws.values())).shape[1]
    found = [
        f"{name} in {int(count.sum()):,} of {len(count) * length:,} draws ({named(count.nonzero().flatten().tolist())})"
        for name, count in list(counts.items())[:3]
    ]
    more = f" and of {len(counts) - 3} more" if len(counts) > 3 else ""
    advice = "leave them out by posterior.select, or draw anew with smaller steps or dtype=torch.float64"
    return Check("finite", "fail", f"NaN or infinite values of {', of '.join(found)}{more}: {advice}")


def copies(samples: Mapping[str, Tensor]) -> Iterator[Check]:
    """Tell of chains that equal others draw for draw."""
    if found := copied_chains(samples):
        words = f"the chains {found} equal others draw for draw; were they drawn with the same seed? Leave them out"
        yield Check("copies", "fail", words, float(len(found)))


def moving(samples: Mapping[str, Tensor]) -> Check:
    """Judge how often chains change place, and whether any spreads far less than the others.

    An accepted move changes all entries, so that the first ones of each site tell; entries that never change in any
    chain, such as the zeros of a triangle, are left out.
    """
    chains, draws = next(iter(samples.values())).shape[:2]
    if draws < 2:
        return Check("moving", "unknown", "one draw of each chain says nothing of its moves")
    heads = torch.cat([watched(value) for value in samples.values()], dim=2).double()
    changing = ~standing_still(heads).all(0)
    if not bool(changing.any()):
        return Check("moving", "fail", f"no chain moves: {TOO_LARGE}", 0.0)
    heads = heads[..., changing]
    moves = (heads.diff(dim=1) != 0).any(2).double().mean(1)
    spread = heads.std(1)
    relative = (spread / spread.median(0).values.clamp(min=1e-300)).median(1).values
    slowest, least = float(moves.min()), float(relative.min())
    slow, stuck = (((moves < limit) | (relative < limit)).nonzero().flatten().tolist() for limit in MOVING)
    if len(stuck) == chains:
        return Check("moving", "fail", f"no chain moves: {TOO_LARGE}", slowest)
    if stuck:
        words = (
            f"{named(stuck)} stuck: start elsewhere (initial=), take smaller steps, or leave out by posterior.select"
        )
        return Check("moving", "fail", words, slowest)
    if slow:
        found = f"moves in {slowest:.0%} of the draws, spread {least:.0%} of the median chain's"
        return Check("moving", "warn", f"{named(slow)} slow: {found}", slowest)
    return Check("moving", "pass", f"every chain moves in at least {slowest:.0%} of its draws", slowest)


def disagreement(samples: Mapping[str, Tensor], subsampled: bool) -> Check:
    """Judge by the first entries of each site whether chains agree."""
    heads = {site: watched(value) for site, value in samples.items() if value.numel()}
    worst = {site: float(chain_statistics(v).r_hat.nan_to_num(0.0).max()) for site, v in heads.items() if v.numel()}
    if not worst:
        return Check("weights", "unknown", f"no chain moves: {TOO_LARGE}")
    site = max(worst, key=worst.__getitem__)
    advice = f"run longer, with a longer warm-up{' and larger batches' if subsampled else f'. {RELABELLED}'}"
    found = f"the chains disagree, so the draws are no posterior's yet: R-hat of site {site!r} is {worst[site]:.3f}"
    return checked("weights", worst[site], R_HAT, found, advice)


# the run ------------------------------------------------------------------------------------------------------------


def starts(metadata: Mapping[str, Any]) -> Iterator[Check]:
    """Tell that the chains of a run all started at one point, of which their agreement says nothing."""
    if metadata.get("one_start"):
        words = (
            "all chains started at one point, so that no R-hat shows a mode that they all missed; start them apart "
            "(initial='prior', 'uniform', or a guide)"
        )
        yield Check("starts", "warn", words)


def warm_up(metadata: Mapping[str, Any]) -> Iterator[Check]:
    """Judge whether the chains of a run agreed when their warm-up ended, if that was left to them; of tasks the worst
    counts."""
    parts = [own for own in (metadata, *metadata.get("parts", ())) if own.get("warmup_r_hat") is not None]
    if parts:
        worst = max(parts, key=lambda own: float(own["warmup_r_hat"]))
        length = worst.get("num_warmup", metadata.get("num_warmup"))
        found = (
            f"the chains didn't agree when warm-up ended: R-hat {float(worst['warmup_r_hat']):.3g} over the second "
            f"half of {length} iterations"
        )
        dense = "" if metadata.get("settings", {}).get("mass") == "dense" else "mass='dense' or "
        advice = (
            f"{RELABELLED}. If not, pass {dense}a larger num_warmup, or reparametrise the model; modes that lie far "
            "apart keep chains apart however long they run"
        )
        yield checked("warm-up", float(worst["warmup_r_hat"]), (R_HAT[1], math.inf), found, advice)


# the sampler's own numbers ------------------------------------------------------------------------------------------


def sampler_checks(statistics: Mapping[str, Tensor], subsampled: bool, arrived: bool) -> Iterator[Check]:
    """Everything that the sampler's own numbers tell, ``(chains, draws)`` each.

    :param subsampled: whether the sampler takes mini-batches, and so has a tolerance instead of a target acceptance.
    :param arrived: whether the chains agree; if not, their temperature doesn't speak of the step size.
    """
    if "acceptance_rate" in statistics:
        yield acceptance(statistics["acceptance_rate"])
    if "diverging" in statistics:
        share = float(statistics["diverging"].double().mean())
        size = "tolerance" if subsampled else "energy_error" if "energy_error" in statistics else ""
        smaller = f"a smaller step_size or {size}" if size else "a smaller step_size or a larger target_accept"
        advice = (
            f"parts of the posterior are missed. Use {smaller}, a longer warm-up, dtype=torch.float64, or "
            "reparametrise the model"
        )
        yield checked("divergences", share, DIVERGING, f"{share:.2%} of the draws diverged", advice)
    if "energy_error" in statistics:
        yield energy_error(statistics["energy_error"])
    if "reached_max_treedepth" in statistics:
        share = float(statistics["reached_max_treedepth"].double().mean())
        found = f"{share:.1%} of the trajectories were cut off at the largest tree"
        yield checked("tree depth", share, CUT_OFF, found, "raise max_treedepth, or reparametrise")
    if "energy" in statistics and statistics["energy"].shape[1] > 2:
        least = float(missing_energy(statistics["energy"]).min())
        advice = "momenta hardly change the energy, tails are missed; reparametrise"
        yield checked("energy", least, ENERGY_FRACTION, f"E-BFMI of the worst chain {least:.2f}", advice)
    for name in ("kinetic_temperature", "virial"):
        if name in statistics:
            yield temperature(name.replace("_", " "), statistics[name].double(), subsampled, arrived)


def acceptance(rates: Tensor) -> Check:
    """Judge whether every chain's moves are accepted; of every draw, ``(chains, draws)``."""
    by_chain = rates.double().mean(1).nan_to_num(0.0)  # NaN is no move
    stuck = (by_chain < ACCEPTANCE[1]).nonzero().flatten().tolist()
    found = f"mean acceptance {float(by_chain.mean()):.2f}, of the worst chain {float(by_chain.min()):.2f}"
    advice, limits = "use a smaller step_size, or a longer warm-up", ACCEPTANCE
    if rates.shape[1] < LEAST_DRAWS:
        limits = (ACCEPTANCE[0], -math.inf)  # so few draws are no failure
    elif stuck:
        found = f"{len(stuck)} of {len(by_chain)} chains hardly move ({named(stuck)}): {found}"
        advice = (
            f"{TOO_LARGE}; use a smaller step_size, a longer warm-up or dtype=torch.float64"
            if len(stuck) == len(by_chain)
            else "give them a longer warm-up (num_warmup=), start them elsewhere (initial=), use a smaller step_size, "
            "or reparametrise the model; posterior.select leaves them out"
        )
    return checked("acceptance", float(by_chain.min()), limits, found, advice)


def energy_error(ratios: Tensor) -> Check:
    """Judge the energy errors of a sampler that accepts every step, and so has a bias that grows with them.

    :param ratios: squared errors in units of what was asked, ``(chains, draws)``; NaN of what was taken back.
    """
    by_chain = ratios.double().nanmean(1)
    mean, worst = float(by_chain.nanmean()), int(by_chain.nan_to_num(math.inf).argmax())
    found = f"squared energy errors are {mean:.3g} times what was asked (chain {worst}: {by_chain[worst]:.3g})"
    advice = "the draws are biased by more than was agreed to. Use a longer warm-up, or NUTS"
    return checked("energy error", mean, ENERGY_ERROR, found, advice)


def temperature(name: str, values: Tensor, subsampled: bool, arrived: bool, site: str = "") -> Check:
    """Judge whether the mean of ``(chains, draws)`` is 1, within what is tolerable and what chance allows.

    :param site: whose temperature it is, if not that of all.
    """
    sure = SURE_OF_ONE if site else SURE
    known = values[~values.isnan().any(1)]  # without chains that lost their numbers on the way
    if known.numel() < 2:
        return Check(name, "unknown", "no chain has values throughout")
    mean, error = float(known.mean()), _standard_error(known)
    off = abs(mean - 1)
    status: Status = graded(off, TEMPERATURE) if off > sure * error else "pass"
    of = f" of site {site!r}" if site else ""
    found = f"{name}{of} {mean:.3g} ± {error:.2g}"
    if status == "pass" and sure * error > TEMPERATURE[1]:
        advice = "more draws would tell" if arrived else "a longer warm-up comes first, as the chains don't agree yet"
        return Check(name, "unknown", f"{found}, should be 1, and is too uncertain: {advice}", mean)
    if status == "pass":
        return Check(name, status, found, mean)
    if not arrived:
        advice = "the chains don't agree yet: first a longer warm-up"
    elif mean < 1:
        advice = "the draws spread too little; run longer"
    else:
        smaller = "smaller steps, larger batches, or a longer warm-up" if subsampled else "a longer warm-up"
        advice = f"the draws spread too widely; take {smaller}"
    return Check(name, status, f"{found}, should be 1: {advice}", mean)


def _standard_error(values: Tensor) -> float:
    """Error of the mean of correlated draws; never below that of the chains' means."""
    size = float(chain_statistics(values).ess_bulk)
    within = float(values.std()) / math.sqrt(size) if size == size else float(values.std())
    between = float(values.mean(1).std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return max(within, between)


def named(chains: Sequence[int]) -> str:
    """Chains, the first eight by number."""
    shown = ", ".join(map(str, chains[:8])) + (", ..." if len(chains) > 8 else "")
    return f"{'chain' if len(chains) == 1 else 'chains'} {shown}"


# tables -------------------------------------------------------------------------------------------------------------


def diagnostics(samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Convergence, summarised for every site over its weights.

    Rank-normalised split R-hat and bulk and tail effective sample size (Vehtari et al. 2021), each as the worst and the
    median over the site's weights. Draws mapped from a file are read block by block.

    :param samples: site -> ``(chains, draws, *site_shape)``.
    :param statistics: name -> ``(chains, draws)``.
    :return: site -> ``r_hat``, ``r_hat_median``, ``ess_bulk``, ``ess_bulk_median``, ``ess_tail``, ``ess_tail_median``
        (without suffix: the worst) and ``n_eff``, Pyro's name for ``ess_bulk``; and, as in Pyro, ``"divergences"`` ->
        ``{"chain 0": [draws], ...}``, with empty lists if the sampler knows no divergence, and ``"acceptance rate"`` ->
        ``{"chain 0": mean, ...}`` if it knows one.
    """
    table: dict[str, dict[str, Any]] = {site: also_of_one(value).summary() for site, value in samples.items()}
    for found in table.values():
        found["n_eff"] = found["ess_bulk"]
    return table | chains_diagnostics(statistics, len(next(iter(samples.values()))))


def chains_diagnostics(statistics: Mapping[str, Tensor], num_chains: int) -> dict[str, dict[str, Any]]:
    """The part of :func:`diagnostics` that speaks of chains rather than of sites."""
    flags = statistics.get("diverging", torch.zeros(num_chains, 0, device="cpu"))
    table: dict[str, dict[str, Any]] = {}
    table["divergences"] = {f"chain {c}": row.nonzero().flatten().tolist() for c, row in enumerate(flags)}
    if (rates := statistics.get("acceptance_rate")) is not None:
        table["acceptance rate"] = {f"chain {c}": rate for c, rate in enumerate(rates.double().mean(1).tolist())}
    return table


def sites_table(samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor], counts: str) -> str:
    """One line for each site: worst and median R-hat and effective sample sizes; then divergences and acceptance.

    :param counts: how many draws there are, in words.
    """
    found = diagnostics(samples, statistics)
    columns = ["r_hat", "r_hat_median", "ess_bulk", "ess_bulk_median", "ess_tail", "ess_tail_median"]
    width = max(len("site"), *(len(site) for site in samples))
    lines = [f"{'site':<{width}}  entries  R-hat worst  median  ESS bulk worst    median  ESS tail worst    median"]
    for site, draws in samples.items():
        r, r_median, bulk, bulk_median, tail, tail_median = (found[site][column] for column in columns)
        lines.append(
            f"{site:<{width}}  {draws.shape[2:].numel():>7}  {r:>11.3f}  {r_median:>6.3f}  {bulk:>14.0f}  "
            f"{bulk_median:>8.0f}  {tail:>14.0f}  {tail_median:>8.0f}"
        )
    lines.append(counts)
    if (diverging := statistics.get("diverging")) is not None:
        lines[-1] += f"; {int(diverging.sum())} of {diverging.numel()} diverged"
    if (rates := statistics.get("acceptance_rate")) is not None:
        lines[-1] += f"; mean acceptance {float(rates.double().mean()):.2f}"
    parts = [found[site] for site in samples]
    if any(math.isnan(part["ess_bulk"]) and not math.isnan(part["ess_bulk_median"]) for part in parts):
        lines.append("nan: entries that never change, such as the zeros of a triangle, or aren't finite")
    if any(math.isinf(part["r_hat"]) for part in parts):
        lines.append("inf: entries that differ between chains and never change in one")
    return "\n".join(lines)


def entries_table(samples: Mapping[str, Tensor], prob: float) -> str:
    """A line for every entry of the sites that have few of them, as Pyro's summary; empty if no site has, or no draws.

    :param prob: how much of an entry's draws its interval holds, between quantiles.
    """
    low, high = (1 - prob) / 2, (1 + prob) / 2
    rows: list[tuple[Any, ...]] = []
    for site, draws in samples.items():
        shape = draws.shape[2:]
        if not 0 < shape.numel() <= MOST_ENTRIES_SHOWN or draws.numel() == 0:
            continue
        statistics, flat = also_of_one(draws), draws.double().cpu().reshape(-1, shape.numel())
        numbers = [flat.mean(0), flat.std(0), *np.quantile(flat.numpy(), [0.5, low, high], axis=0)]
        numbers += [statistics.ess_bulk.flatten(), statistics.r_hat.flatten()]
        rows += zip(entry_names(site, shape), *(number.tolist() for number in numbers), strict=True)
    if not rows:
        return ""
    width = max(len(row[0]) for row in rows)
    heads = ("mean", "std", "median", f"{low:.1%}", f"{high:.1%}", "n_eff", "r_hat")
    lines = [" " * width + "".join(f"{head:>10}" for head in heads)]
    return "\n".join([*lines, *(f"{name:>{width}}" + "".join(f"{v:>10.2f}" for v in row) for name, *row in rows)])


def counts(kind: str, num_chains: int, num_samples: int) -> str:
    """The number of draws in words, such as ``4 chains of 100 draws``.

    :param kind: ``"chains"`` or ``"independent"``.
    """
    unit, of = ("row", "independent draws") if kind == "independent" else ("chain", "draws")
    return f"{num_chains} {unit}{'s' * (num_chains != 1)} of {num_samples} {of}"


def description(
    samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor], metadata: Mapping[str, Any], kind: str
) -> str:
    """The draws in words: their number, their sites with shapes, how they were made, their statistics."""
    num_chains, num_samples = next(iter(samples.values())).shape[:2]
    weights, width = sum(v.shape[2:].numel() for v in samples.values()), max(map(len, samples))
    alone = kind == "independent" and num_chains == 1
    held = f"{num_samples} independent draws" if alone else counts(kind, num_chains, num_samples)
    maker = f", by {metadata['kernel']}" if "kernel" in metadata else ""
    lines = [f"Posterior({held}, {weights} weight{'' if weights == 1 else 's'}{maker})"]
    lines += [f"  {site:<{width}}  {tuple(value.shape[2:])}" for site, value in samples.items()]
    more = {"chosen": metadata.get("chosen"), "statistics": ", ".join(statistics)}
    return "\n".join([*lines, *(f"  {name}: {text}" for name, text in more.items() if text)])
