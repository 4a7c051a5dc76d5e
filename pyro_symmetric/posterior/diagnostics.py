"""Checks of Markov chains, each one number beside its limits: what was found, and what to do about it.

:func:`~pyro_symmetric.mcmc.sample` warns of checks that fail, and :func:`~pyro_symmetric.compare.diagnose` reports all
of them, so that both judge by the same limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pyro_symmetric.posterior.statistics import (
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

    :param status: ``"unknown"`` if the draws don't suffice to tell.
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
    for name, value in draws.items():
        count = non_finite(value)
        if bool(count.any()):
            where = named(count.nonzero().flatten().tolist())
            found = f"{name} is NaN or infinite in {int(count.sum()):,} draws ({where})"
            advice = "leave them out by posterior.select, or draw anew with smaller steps or dtype=torch.float64"
            return Check("finite", "fail", f"{found}: {advice}")
    return Check("finite", "pass", "all draws are finite")


def copies(samples: Mapping[str, Tensor]) -> Iterator[Check]:
    """Tell of chains that equal others draw for draw."""
    if found := copied_chains(samples):
        words = f"the chains {found} equal others draw for draw; were they drawn with the same seed? Leave them out"
        yield Check("copies", "fail", words, float(len(found)))


def moving(samples: Mapping[str, Tensor]) -> Check:
    """Judge at which share of the draws each chain changes place, or how far it spreads in units of the median chain.

    An accepted move changes all entries, so that the first ones of each site tell; entries that never change in any
    chain, such as the zeros of a triangle, are left out.
    """
    heads = torch.cat([watched(value) for value in samples.values()], dim=2).double()
    if heads.shape[1] < 2:
        return Check("moving", "unknown", "one draw of each chain says nothing of its moves")
    heads = heads[..., ~standing_still(heads).all(0)]
    if not heads.shape[2]:
        return Check("moving", "fail", f"no chain moves: {TOO_LARGE}", 0.0)
    moves, spread = (heads.diff(dim=1) != 0).any(2).double().mean(1), heads.std(1)
    shares = torch.minimum(moves, (spread / spread.median(0).values.clamp(min=1e-300)).median(1).values)
    slow = (shares < MOVING[0]).nonzero().flatten().tolist()
    found = f"{named(slow)} hardly move: {float(shares.min()):.2g} of the draws, or of the others' spread"
    advice = "start elsewhere (initial=), take smaller steps, or leave out by posterior.select"
    return checked("moving", float(shares.min()), MOVING, found if slow else "every chain moves", advice)


def disagreement(samples: Mapping[str, Tensor], subsampled: bool) -> Check:
    """Judge by the first entries of each site whether chains agree."""
    heads = {site: watched(value) for site, value in samples.items() if value.numel()}
    worst = {site: float(chain_statistics(v).r_hat.nan_to_num(0.0).max()) for site, v in heads.items() if v.numel()}
    if not worst:
        return Check("weights", "unknown", f"no chain moves: {TOO_LARGE}")
    site = max(worst, key=worst.__getitem__)
    found = f"the chains disagree, so the draws are no posterior's yet: R-hat of site {site!r} is {worst[site]:.3f}"
    advice = f"run longer, with a longer warm-up{' and larger batches' if subsampled else f'. {RELABELLED}'}"
    return checked("weights", worst[site], R_HAT, found, advice)


# the run ------------------------------------------------------------------------------------------------------------


def starts(metadata: Mapping[str, Any]) -> Iterator[Check]:
    """Tell that the chains of a run all started at one point, of which their agreement says nothing."""
    if metadata.get("one_start"):
        words = "all chains started at one point, so that no R-hat shows a mode that they all missed; start them apart"
        yield Check("starts", "warn", f"{words} (initial='prior', 'uniform', or a guide)")


def warm_up(metadata: Mapping[str, Any]) -> Iterator[Check]:
    """Judge whether the chains of a run agreed when their warm-up ended, if that was left to them; of tasks the worst
    counts."""
    parts = [own for own in (metadata, *metadata.get("parts", ())) if own.get("warmup_r_hat") is not None]
    for own in sorted(parts, key=lambda own: own["warmup_r_hat"])[-1:]:
        length, r_hat = own.get("num_warmup", metadata.get("num_warmup")), own["warmup_r_hat"]
        found = f"the chains didn't agree when warm-up ended: R-hat {r_hat:.3g} over half of {length} iterations"
        advice = f"{RELABELLED}. If not, pass mass='dense' or a larger num_warmup, or reparametrise the model"
        yield checked("warm-up", r_hat, (R_HAT[1], math.inf), found, advice)


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
        advice = f"parts of the posterior are missed. Use {smaller}, a longer warm-up, or reparametrise the model"
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
    found = f"mean acceptance {float(by_chain.mean()):.2f}, of the worst chain {float(by_chain.min()):.2f}"
    if stuck := (by_chain < ACCEPTANCE[1]).nonzero().flatten().tolist():
        found = f"{len(stuck)} of {len(by_chain)} chains hardly move ({named(stuck)}): {found}"
    alone = 0 < len(stuck) < len(by_chain)
    advice = "start them elsewhere (initial=), or leave them out by posterior.select; " * alone
    advice += "use a smaller step_size, a longer warm-up or dtype=torch.float64"
    limits = ACCEPTANCE if rates.shape[1] >= LEAST_DRAWS else (ACCEPTANCE[0], -math.inf)  # so few are no failure
    return checked("acceptance", float(by_chain.min()), limits, found, advice)


def energy_error(ratios: Tensor) -> Check:
    """Judge the energy errors of a sampler that accepts every step, and so has a bias that grows with them.

    :param ratios: squared errors in units of what was asked, ``(chains, draws)``; NaN of what was taken back.
    """
    by_chain = ratios.double().nanmean(1)
    mean, worst = float(by_chain.nanmean()), float(by_chain.nan_to_num(math.inf).max())
    found = f"squared energy errors are {mean:.3g} times what was asked, in the worst chain {worst:.3g}"
    advice = "the draws are biased by more than was agreed to. Use a longer warm-up, or NUTS"
    return checked("energy error", mean, ENERGY_ERROR, found, advice)


def temperature(name: str, values: Tensor, subsampled: bool, arrived: bool, site: str = "") -> Check:
    """Judge whether the mean of ``(chains, draws)`` is 1, within what is tolerable and what chance allows.

    :param site: whose temperature it is, if not that of all.
    """
    known = values[~values.isnan().any(1)]  # without chains that lost their numbers on the way
    if known.numel() < 2:
        return Check(name, "unknown", "no chain has values throughout")
    mean, error = float(known.mean()), _standard_error(known)
    margin, off = error * (SURE_OF_ONE if site else SURE), abs(mean - 1)
    found = f"{name}{f' of site {site!r}' if site else ''} {mean:.3g} ± {error:.2g}"
    if margin > TEMPERATURE[1] and off <= margin:
        more = "more draws (diagnose looks at num_draws= of them) would tell"
        return Check(name, "unknown", f"{found}: {more}", mean)
    if off <= max(margin, TEMPERATURE[0]):
        return Check(name, "pass", found, mean)
    if not arrived:
        advice = "the chains don't agree yet: first a longer warm-up"
    elif mean < 1:
        advice = "the draws spread too little, or aren't where they should be yet; run longer"
    else:
        advice = f"they spread too widely; {'larger batches, ' * subsampled}smaller steps or a longer warm-up"
    return Check(name, graded(off, TEMPERATURE), f"{found}, should be 1: {advice}", mean)


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
