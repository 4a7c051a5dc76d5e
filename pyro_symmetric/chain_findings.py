"""Findings on Markov chains: what was looked at, what was found, and what to do about it, by one set of limits.

:func:`~pyro_symmetric.mcmc.sample` warns of findings that fail, and :func:`~pyro_symmetric.compare.diagnose` reports
all of them, so that both judge by the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_symmetric.chain_statistics import (
    chain_statistics,
    exceeded_by_few,
    missing_energy,
    non_finite,
    rounding,
    spacing,
    standing_still,
    watched,
)

Status = Literal["fail", "warn", "pass", "unknown"]

# The limits: beyond the first a finding is a warning, beyond the second a failure.
R_HAT = (1.02, 1.05)
EFFECTIVE_DRAWS = (400.0, 50.0)  # Vehtari et al. 2021, section 4: 400 for stable estimates of R-hat and of quantiles
ACCEPTANCE = (0.4, 0.1)  # of one chain, on average
DIVERGING = (0.0, 0.05)  # share of the draws
CUT_OFF = 0.1  # share of the trajectories that reach the largest tree: a warning only
ENERGY_FRACTION = (0.3, 0.1)  # E-BFMI of one chain
ENERGY_ERROR = (2.0, 10.0)  # of unadjusted steps, in units of what was asked
TEMPERATURE = (0.1, 0.3)  # distance from 1
BLURRED = (0.0, 0.05)  # share of the draws at energies that rounding changes by a unit or more
EDGE = 3e-4  # share of the draws at the last number before 1: of Beta(a, b) 1 / a times as many are missed
SPACING = (0.1, 0.5)  # distance of neighbouring numbers of the dtype, in deviations of a chain
MOVING = (0.1, 0.01)  # share of the draws at which a chain moves, and its spread in units of the median chain's
LATE = (0.03, 0.1)  # nats a draw that the first draws of a chain lack: half of what they add to a scaled variance
FARTHER = 4.0  # times as far below the median as any draw of the second half
LEFT_BEHIND = 5.0  # deviations of the log density that a chain lies below the others: a warning only

LEAST_AGREEING = 100  # draws of a chain, so that R-hat of a hundred converged entries fails once in 10,000 runs
LEAST_DRAWS = 20  # of a chain, so that a low acceptance says something
LEAST_LATER = 50  # draws of the second half, so that a converged chain is warned of once in 20,000 times
SURE = 3.0  # standard errors that a temperature must be off
SURE_OF_ONE = 4.5  # of several sites: false alarms 7e-6 each

TOO_LARGE = "step size is too large for all of them, or the density or its gradient is broken"
RELABELLED = (
    "If the model's components or units can be relabelled, diagnose(posterior, symmetry) tells whether that is all"
)
NO_CHAIN_MOVES = f"no chain moves: the {TOO_LARGE}"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    :param name: what it is.
    :param status: ``"pass"``, ``"warn"``, ``"fail"``, or ``"unknown"`` if the draws don't suffice to tell.
    :param words: what was found, and what to do about it.
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


# draws --------------------------------------------------------------------------------------------------------------


def finite(draws: Mapping[str, Tensor]) -> Finding:
    """Check that all draws ``(chains, draws, ...)`` are finite.

    :param draws: what they are called in the sentence -> the draws.
    """
    counts = {name: count for name, value in draws.items() if bool((count := non_finite(value)).any())}
    if not counts:
        return Finding("finite", "pass", "all draws are finite")
    length, found = next(iter(draws.values())).shape[1], []
    for name, count in list(counts.items())[:3]:
        chains = count.nonzero().flatten().tolist()
        found.append(f"{name} in {int(count.sum()):,} of {len(count) * length:,} draws ({_named(chains)})")
    more = f" and of {len(counts) - 3} more" if len(counts) > 3 else ""
    return Finding("finite", "fail", f"NaN or infinite values of {', of '.join(found)}{more}")


def resolved(draws: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Judge whether numbers lie densely enough for the spread of draws ``(chains, draws, ...)``.

    Nothing of whole numbers, nor of chains that never move.

    :param draws: their name in the sentence -> the draws. Of the entries of each, one in a hundred may be worse.
    """
    gaps = {name: exceeded_by_few(spacing(value)) for name, value in draws.items() if value.is_floating_point()}
    told = {name: gap for name, gap in gaps.items() if not math.isnan(gap)}
    if not told:
        return
    worst = max(told, key=told.__getitem__)
    status, gap = graded(told[worst], SPACING), f"{told[worst]:.2g} deviations apart"
    if status == "pass":
        yield Finding("resolution", status, f"numbers lie at most {gap}", told[worst])
        return
    words = f"numbers as large as those of {worst} lie {gap} in {draws[worst].dtype}, so moves are lost to rounding"
    words += ": draw anew with dtype=torch.float64, or let the model centre and scale what is so large"
    yield Finding("resolution", status, words, told[worst])


def at_the_edge(draws: Mapping[str, Tensor]) -> Iterator[Finding]:
    """A finding for each site of which many draws are the number below 1 at which PyTorch's sigmoid ends.

    That is ``1 - eps``; a density with mass beyond loses it, and the weight of what lies elsewhere grows.
    """
    for site, value in draws.items():
        if value.is_floating_point() and value.numel():
            share = float((value == 1 - torch.finfo(value.dtype).eps).double().mean((0, 1)).max())
            if share > EDGE:
                single = "use dtype=torch.float64, or " if value.dtype == torch.float32 else ""
                words = (
                    f"{share:.2%} of the draws of site {site!r} are as near to 1 as {value.dtype} has numbers, so what "
                )
                words += f"lies nearer is missed: {single}sample the logit, or 1 less the value if only that is near 0"
                yield Finding("edge", "fail", words, share)


def moving(samples: Mapping[str, Tensor]) -> Finding:
    """Judge how often chains change place, and whether any spreads far less than the others.

    An accepted move changes all entries, so that the first ones of each site tell; entries that never change in any
    chain, such as the zeros of a triangle, are left out.
    """
    chains, draws = next(iter(samples.values())).shape[:2]
    if draws < 2:
        return Finding("moving", "unknown", "one draw of each chain says nothing of its moves")
    heads = torch.cat([watched(value) for value in samples.values()], dim=2).double()
    changing = ~standing_still(heads).all(0)
    if not bool(changing.any()):
        return Finding("moving", "fail", NO_CHAIN_MOVES, 0.0)
    heads = heads[..., changing]
    moves = (heads.diff(dim=1) != 0).any(2).double().mean(1)
    spread = heads.std(1)
    relative = (spread / spread.median(0).values.clamp(min=1e-300)).median(1).values
    slowest, least = float(moves.min()), float(relative.min())
    slow, stuck = (((moves < limit) | (relative < limit)).nonzero().flatten().tolist() for limit in MOVING)
    if len(stuck) == chains:
        return Finding("moving", "fail", NO_CHAIN_MOVES, slowest)
    if stuck:
        words = f"{_named(stuck)} {_are(stuck)} stuck: start elsewhere (initial=), or take smaller steps"
        return Finding("moving", "fail", f"{words}; posterior.select leaves such chains out", slowest)
    if slow:
        found = f"moves in {slowest:.0%} of the draws, spread {least:.0%} of the median chain's"
        return Finding("moving", "warn", f"{_named(slow)} {_are(slow)} slow: {found}", slowest)
    return Finding("moving", "pass", f"every chain moves in at least {slowest:.0%} of its draws", slowest)


# the sampler's own statistics ---------------------------------------------------------------------------------------


def acceptance(rates: Tensor) -> Finding:
    """Judge whether every chain's moves are accepted.

    :param rates: of every draw, ``(chains, draws)``.
    """
    by_chain = rates.double().mean(1).nan_to_num(0.0)  # NaN is no move
    least, mean = float(by_chain.min()), float(by_chain.mean())
    status = graded(least, ACCEPTANCE)
    if status == "fail" and rates.shape[1] >= LEAST_DRAWS:
        limit = ACCEPTANCE[1]
        stuck = (by_chain < limit).nonzero().flatten().tolist()
        advice = (
            f"The {TOO_LARGE}; use a smaller step_size, a longer warm-up or dtype=torch.float64, and check the density "
            "where they start"
            if len(stuck) == len(by_chain)
            else "Give them a longer warm-up (num_warmup=), start them elsewhere (initial=), use a smaller step_size, "
            "or reparametrise the model; posterior.select leaves them out"
        )
        words = f"{len(stuck)} of {len(by_chain)} chains hardly move (acceptance below {limit:g}): {_listed(stuck)}"
        return Finding("acceptance", "fail", f"{words}. {advice}", least)
    words = f"mean acceptance {mean:.2f}, of the worst chain {least:.2f}"
    if status == "pass":
        return Finding("acceptance", "pass", words, least)
    return Finding("acceptance", "warn", f"{words}: use a smaller step_size, or a longer warm-up", least)


def divergences(diverging: Tensor, subsampled: bool = False, adjusted: bool = True) -> Finding:
    """Judge the share of the draws ``(chains, draws)`` that diverged.

    :param subsampled: whether the sampler takes mini-batches, and so has a tolerance instead of a target acceptance.
    :param adjusted: whether it rejects steps, or has an energy error that is asked for instead.
    """
    share = float(diverging.double().mean())
    words = f"{share:.2%} of the draws diverged"
    if share > 0:
        smaller = "a smaller step_size or " + (
            "tolerance" if subsampled else "a larger target_accept" if adjusted else "energy_error"
        )
        words += f", so parts of the posterior are missed. Use {smaller}, a longer warm-up, "
        words += "dtype=torch.float64, or reparametrise the model"
    return Finding("divergences", graded(share, DIVERGING), words, share)


def energy_error(ratios: Tensor) -> Finding:
    """Judge the energy errors of a sampler that accepts every step, and so has a bias that grows with them.

    :param ratios: squared errors in units of what was asked, ``(chains, draws)``; NaN of what was taken back.
    """
    by_chain = ratios.double().nanmean(1)
    mean = float(by_chain.nanmean())
    worst = by_chain.nan_to_num(math.inf).argmax()
    words = f"squared energy errors are {mean:.3g} times what was asked (chain {int(worst)}: {by_chain[worst]:.3g})"
    status = graded(mean, ENERGY_ERROR)
    if status in ("warn", "fail"):
        words += ": the draws are biased by more than was agreed to. Use a longer warm-up, or AdjustedMCLMC"
    return Finding("energy error", status, words, mean)


def blurred(lp: Tensor) -> Finding:
    """Judge at how many draws rounding hides what decides on acceptance.

    There errors of a trajectory's energy below that count as none (or chains would be stuck), and the law of the draws
    isn't the posterior's.

    :param lp: log densities ``(chains, draws)``, in the dtype of the chains.
    """
    hidden = rounding(lp).nan_to_num(0.0, posinf=0.0)  # a density of zero is told by the acceptance
    share, worst = float((hidden > 1).double().mean()), float(hidden.max())
    status = graded(share, BLURRED)
    if status == "pass":
        return Finding("rounding", status, f"rounding changes log densities by at most {worst:.2g}", share)
    words = (
        f"at {share:.1%} of the draws log densities are so large that {lp.dtype} rounds them by a unit or more (up to "
        f"{worst:.3g}), so trajectories were accepted that should have been rejected: draw anew with "
        "dtype=torch.float64"
    )
    return Finding("rounding", status, words, share)


def arrival(lp: Tensor) -> Finding:
    """Judge whether chains had arrived when their draws began: first draws far below all later ones falsify moments.

    Below the log density's median by ``s`` nats, as after a warm-up that was too short, they lie some
    :math:`\\sqrt{2 s}` deviations out, and add :math:`2 s / n` to the scaled variance of ``n`` draws.

    :param lp: log densities ``(chains, draws)``, of :data:`LEAST_LATER` draws twice, or chance may look like a fault.
    """
    later = lp[:, lp.shape[1] // 2 :].double()
    median, least = later.median(1, keepdim=True).values, later.amin(1, keepdim=True)
    below = (median - lp.double()).nan_to_num(0.0, posinf=0.0)
    outside = (below > FARTHER * (median - least)).cummin(1).values  # from the first draw on
    lacking = (below * outside).sum(1) / lp.shape[1]
    worst, status = float(lacking.max()), graded(float(lacking.max()), LATE)
    if status == "pass":
        return Finding("arrival", status, "no chain's first draws lie far below its later ones", worst)
    late = (lacking > LATE[0]).nonzero().flatten().tolist()
    count = int(outside[late].sum(1).max())
    words = f"warm-up ended before {_named(late)} had arrived: first draws lie up to {float(below[late, 0].max()):.3g} "
    words += "nats below all of the second half, which falsifies means and deviations. Use a longer warm-up, or leave "
    words += f"out the first {count:,} draws: posterior.select(draws=slice({count}, None))"
    return Finding("arrival", status, words, worst)


def _of_densities(statistics: Mapping[str, Tensor]) -> Iterator[Finding]:
    if "lp" in statistics:
        if "acceptance_rate" in statistics:
            yield blurred(statistics["lp"])
        if statistics["lp"].shape[1] >= 2 * LEAST_LATER:
            yield arrival(statistics["lp"])


def sampler_failures(
    statistics: Mapping[str, Tensor], subsampled: bool, samples: Mapping[str, Tensor] | None = None
) -> list[Finding]:
    """The findings that a sampler warns of at once: chains that hardly move, and many divergences.

    If chains must agree, also disagreement, and momenta that hardly change the energy. Of a sampler of
    mini-batches, which accepts and rejects nothing, also temperatures that are off.

    :param statistics: the sampler's own numbers of every draw, ``(chains, draws)`` each.
    :param samples: the draws, if chains must agree on them.
    """
    found = [acceptance(statistics["acceptance_rate"])] if "acceptance_rate" in statistics else []
    found += (
        [divergences(statistics["diverging"], subsampled, "energy_error" not in statistics)]
        if "diverging" in statistics
        else []
    )
    found += [energy_error(statistics["energy_error"])] if "energy_error" in statistics else []
    found += _of_densities(statistics)
    if subsampled and found and next(iter(statistics.values())).shape[1] >= LEAST_DRAWS:
        apart = [] if samples is None else [disagreement(samples, subsampled)]
        arrived = all(finding.status != "fail" for finding in apart)
        found += [*apart, *_temperatures(statistics, subsampled, arrived)]
    elif samples is not None and next(iter(samples.values())).shape[1] >= LEAST_AGREEING:
        found += [disagreement(samples, subsampled), *_energy(statistics), *at_the_edge(samples)]
        return [one for one in found if one.status == "fail" or (one.status == "warn" and one.name == "energy")]
    return [finding for finding in found if finding.status == "fail"]


def disagreement(samples: Mapping[str, Tensor], subsampled: bool) -> Finding:
    """Judge by the first entries of each site whether chains agree."""
    heads = {site: watched(value) for site, value in samples.items() if value.numel()}
    worst = {site: float(chain_statistics(v).r_hat.nan_to_num(0.0).max()) for site, v in heads.items() if v.numel()}
    if not worst:
        return Finding("weights", "unknown", NO_CHAIN_MOVES)
    site = max(worst, key=worst.__getitem__)
    words = f"R-hat of site {site!r} is {worst[site]:.3f}"
    status = graded(worst[site], R_HAT)
    if status == "fail":
        words = f"the chains disagree, so the draws are no posterior's yet: {words}, and 1 is right. Run longer, with "
        words += f"a longer warm-up{' and larger batches' if subsampled else f'. {RELABELLED}'}"
    return Finding("weights", status, words, worst[site])


def warm_up(metadata: Mapping[str, Any], in_copies: bool = False) -> Iterator[Finding]:
    """Judge whether the chains of a run agreed when their warm-up ended, if that was left to them.

    :param metadata: the posterior's; of a run in tasks, their worst counts.
    :param in_copies: whether the draws are known to agree once they are brought to one frame.
    """
    parts = [own for own in (metadata, *metadata.get("parts", ())) if own.get("warmup_r_hat") is not None]
    if not parts:
        return
    worst = max(parts, key=lambda own: float(own["warmup_r_hat"]))
    found, limit = float(worst["warmup_r_hat"]), R_HAT[1]
    words = (
        f"R-hat {found:.3g} over the second half of {worst.get('num_warmup', metadata.get('num_warmup'))} iterations"
    )
    if found < limit:
        yield Finding("warm-up", "pass", f"the chains agreed when warm-up ended: {words}", found)
        return
    if in_copies:
        words = f"{words} of warm-up, for chains in different copies of a mode; in one frame their draws agree"
        yield Finding("warm-up", "pass", words, found)
        return
    dense = "" if metadata.get("settings", {}).get("mass") == "dense" else "mass='dense' or "
    advice = (
        f"{RELABELLED}. If not, pass {dense}a larger num_warmup, or reparametrise the model; modes that lie far apart "
        "keep chains apart however long they run"
    )
    words = f"the chains didn't agree when warm-up ended: {words}, not below {limit}. {advice}"
    yield Finding("warm-up", "warn", words, found)


def sampler_findings(statistics: Mapping[str, Tensor], subsampled: bool, arrived: bool) -> Iterator[Finding]:
    """Everything that the sampler's own numbers tell.

    :param arrived: whether the chains agree; if not, their temperature doesn't speak of the step size.
    """
    if "acceptance_rate" in statistics:
        yield acceptance(statistics["acceptance_rate"])
    if "diverging" in statistics:
        yield divergences(statistics["diverging"], subsampled, "energy_error" not in statistics)
    if "energy_error" in statistics:
        yield energy_error(statistics["energy_error"])
    yield from _of_densities(statistics)
    if "reached_max_treedepth" in statistics:
        share = float(statistics["reached_max_treedepth"].double().mean())
        status: Status = "warn" if share > CUT_OFF else "pass"
        advice = "" if status == "pass" else ": raise max_treedepth, or reparametrise"
        words = f"{share:.1%} of the trajectories were cut off at the largest tree{advice}"
        yield Finding("tree depth", status, words, share)
    yield from _energy(statistics)
    if "lp" in statistics and min(statistics["lp"].shape) > 1 and statistics["lp"].shape[1] > 2:
        yield _level(statistics["lp"].double())
    yield from _temperatures(statistics, subsampled, arrived)


def _energy(statistics: Mapping[str, Tensor]) -> Iterator[Finding]:
    if "energy" in statistics and statistics["energy"].shape[1] > 2:
        least = float(missing_energy(statistics["energy"]).min())
        status = graded(least, ENERGY_FRACTION)
        advice = "" if status == "pass" else ": momenta hardly change the energy, tails are missed; reparametrise"
        yield Finding("energy", status, f"E-BFMI of the worst chain {least:.2f}{advice}", least)


def _temperatures(statistics: Mapping[str, Tensor], subsampled: bool, arrived: bool) -> Iterator[Finding]:
    for name in ("kinetic_temperature", "virial"):
        if name in statistics:
            yield temperature(name.replace("_", " "), statistics[name].double(), subsampled, arrived)


def _level(lp: Tensor) -> Finding:
    """Chains whose log density stays far below the others'."""
    means, spread = lp.mean(1), lp.std(1).median()
    gap = means.median() - means
    behind, largest = (gap > LEFT_BEHIND * spread).nonzero().flatten().tolist(), float(gap.max())
    if not behind:
        return Finding("level", "pass", "no chain's log density stays far below the others'", largest)
    words = f"{_named(behind)} {_are(behind)} up to {largest:.3g} nats below the others: still on the way in, or in a "
    return Finding("level", "warn", f"{words}poor mode", largest)


def temperature(name: str, values: Tensor, subsampled: bool, arrived: bool, site: str = "") -> Finding:
    """Judge whether the mean of ``(chains, draws)`` is 1, within what is tolerable and what chance allows.

    :param site: whose temperature it is, if not that of all.
    """
    sure = SURE_OF_ONE if site else SURE
    known = values[~values.isnan().any(1)]  # without chains that lost their numbers on the way
    if known.numel() < 2:
        return Finding(name, "unknown", "no chain has values throughout")
    mean, error = float(known.mean()), _standard_error(known)
    off, fail = abs(mean - 1), TEMPERATURE[1]
    status: Status = graded(off, TEMPERATURE) if off > sure * error else "pass"
    of = f" of site {site!r}" if site else ""
    found = f"{name}{of} {mean:.3g} ± {error:.2g}, and 1 is right"
    if status == "pass" and sure * error > fail:
        advice = "more draws would tell" if arrived else "a longer warm-up comes first, as the chains don't agree yet"
        return Finding(name, "unknown", f"{found}: uncertain by more than {fail:g}; {advice}", mean)
    if status == "pass":
        return Finding(name, status, found, mean)
    if not arrived:
        return Finding(name, status, f"{found}, of chains that don't agree yet: first a longer warm-up", mean)
    if mean < 1:
        return Finding(name, status, f"{found}: the draws spread too little; run longer", mean)
    smaller = "smaller steps, larger batches, or a longer warm-up" if subsampled else "a longer warm-up"
    return Finding(name, status, f"{found}: the draws spread too widely; take {smaller}", mean)


# small steps --------------------------------------------------------------------------------------------------------


def _standard_error(values: Tensor) -> float:
    """Of the mean of correlated draws; never below that of the chains' means."""
    size = float(chain_statistics(values).ess_bulk)
    within = float(values.std()) / math.sqrt(size) if size == size else float(values.std())
    between = float(values.mean(1).std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return max(within, between)


def _named(chains: Sequence[int]) -> str:
    return f"{'chain' if len(chains) == 1 else 'chains'} {_listed(chains)}"


def _are(chains: Sequence[int]) -> str:
    return "is" if len(chains) == 1 else "are"


def _listed(numbers: Sequence[int]) -> str:
    """The first eight, for a sentence."""
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
