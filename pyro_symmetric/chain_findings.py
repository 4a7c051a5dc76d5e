"""Findings on Markov chains, by the numbers that a sampler keeps of every draw: what was looked at, what was found, and
what to do about it.

Those on the draws themselves are in :mod:`~pyro_symmetric.draw_findings`, by one set of limits:
:func:`~pyro_symmetric.mcmc.sample` warns of findings that fail, and :func:`~pyro_symmetric.compare.diagnose` reports
all of them, so that both judge by the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from pyro_symmetric.chain_statistics import (
    chain_statistics,
    missing_energy,
    rounding,
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
LATE = (0.03, 0.1)  # nats a draw that the first draws of a chain lack: half of what they add to a scaled variance
FARTHER = 4.0  # times as far below the median as any draw of the second half
LEFT_BEHIND = 5.0  # deviations of the log density that a chain lies below the others: a warning only

LEAST_DRAWS = 20  # of a chain, so that a low acceptance says something
LEAST_LATER = 50  # draws of the second half, so that a converged chain is warned of once in 20,000 times
SURE = 3.0  # standard errors that a temperature must be off
SURE_OF_ONE = 4.5  # of several sites: false alarms 7e-6 each

TOO_LARGE = "step size is too large for all of them, or the density or its gradient is broken"
RELABELLED = (
    "If the model's components or units can be relabelled, diagnose(posterior, symmetry) tells whether that is all"
)


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
        words = f"{len(stuck)} of {len(by_chain)} chains hardly move (acceptance below {limit:g}): {listed(stuck)}"
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
        words += (
            ": the draws are biased by more than was agreed to. Use a longer warm-up, a smaller energy_error, or NUTS"
        )
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
    words = f"warm-up ended before {named(late)} had arrived: first draws lie up to {float(below[late, 0].max()):.3g} "
    words += "nats below all of the second half, which falsifies means and deviations. Use a longer warm-up, or leave "
    words += f"out the first {count:,} draws: posterior.select(draws=slice({count}, None))"
    return Finding("arrival", status, words, worst)


def of_densities(statistics: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Judge log densities: rounding, and the way in."""
    if "lp" in statistics:
        if "acceptance_rate" in statistics:
            yield blurred(statistics["lp"])
        if statistics["lp"].shape[1] >= 2 * LEAST_LATER:
            yield arrival(statistics["lp"])


def starts(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    """Tell that the chains of a run all started at one point, of which their agreement says nothing."""
    if metadata.get("one_start"):
        words = (
            "all chains started at one point, so that no R-hat shows a mode that they all missed; start them apart "
            "(initial='prior', 'uniform', or a guide)"
        )
        yield Finding("starts", "warn", words)


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
    yield from of_densities(statistics)
    if "reached_max_treedepth" in statistics:
        share = float(statistics["reached_max_treedepth"].double().mean())
        status: Status = "warn" if share > CUT_OFF else "pass"
        advice = "" if status == "pass" else ": raise max_treedepth, or reparametrise"
        words = f"{share:.1%} of the trajectories were cut off at the largest tree{advice}"
        yield Finding("tree depth", status, words, share)
    yield from of_energy(statistics)
    if "lp" in statistics and min(statistics["lp"].shape) > 1 and statistics["lp"].shape[1] > 2:
        yield _level(statistics["lp"].double())
    yield from of_temperatures(statistics, subsampled, arrived)


def of_energy(statistics: Mapping[str, Tensor]) -> Iterator[Finding]:
    """Judge by how much momenta change the energy, if it is known."""
    if "energy" in statistics and statistics["energy"].shape[1] > 2:
        least = float(missing_energy(statistics["energy"]).min())
        status = graded(least, ENERGY_FRACTION)
        advice = "" if status == "pass" else ": momenta hardly change the energy, tails are missed; reparametrise"
        yield Finding("energy", status, f"E-BFMI of the worst chain {least:.2f}{advice}", least)


def of_temperatures(statistics: Mapping[str, Tensor], subsampled: bool, arrived: bool) -> Iterator[Finding]:
    """Of a sampler of mini-batches: see :func:`temperature`."""
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
    words = f"{named(behind)} {are(behind)} up to {largest:.3g} nats below the others: still on the way in, or in a "
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


def named(chains: Sequence[int]) -> str:
    """Chains, for a sentence."""
    return f"{'chain' if len(chains) == 1 else 'chains'} {listed(chains)}"


def are(chains: Sequence[int]) -> str:
    """The verb for them."""
    return "is" if len(chains) == 1 else "are"


def listed(numbers: Sequence[int]) -> str:
    """The first eight, for a sentence."""
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
