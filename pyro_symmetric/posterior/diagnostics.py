"""Convergence checks of Markov chains: a number, its limits, the finding and advice.

:func:`~pyro_symmetric.mcmc.sample` warns of failures among them
    (:func:`sampler_failures`), and
:func:`~pyro_symmetric.compare.diagnose` reports them all, by the same limits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from pyro_symmetric.arguments import Values
from pyro_symmetric.posterior.statistics import (
    chain_statistics,
    copied_chains,
    missing_energy,
    non_finite,
    standing_still,
    watched,
)
from pyro_symmetric.weights import Tensors

Status = Literal["fail", "short", "warn", "pass", "unknown"]

# Beyond the first limit a check is a warning, beyond the second a failure.
R_HAT = (1.02, 1.05)
# Vehtari et al. 2021, section 4: 400 for stable estimates of R-hat and of quantiles
EFFECTIVE_DRAWS = (400.0, 50.0)
# share of the draws at which a chain moves; its spread relative to the median chain's
MOVING = (0.1, 0.01)
ACCEPTANCE = (0.4, 0.1)  # mean of one chain
# share of the draws; with 0.5 %, a banana's second moments were a third too small
DIVERGING = (0.0, 0.002)
CUT_OFF = (0.1, math.inf)  # share of the trajectories that reach the largest tree
ENERGY_FRACTION = (0.3, 0.1)  # E-BFMI of one chain
ENERGY_ERROR = (2.0, 10.0)  # of unadjusted steps, relative to the requested one
TEMPERATURE = (0.1, 0.3)  # distance from 1

MIN_DRAWS = 20  # of a chain, for a low acceptance to be a failure
# of a chain, so that R-hat of a hundred converged entries fails once in 10,000 runs
MIN_DRAWS_TO_AGREE = 100
STANDARD_ERRORS = 3.0  # by which a temperature must be off
# likewise, of one of several sites: false alarms 7e-6 each
STANDARD_ERRORS_OF_SITE = 4.5

RELABELLED = (
    "If the model's components or units can be relabelled, diagnose(posterior) tells "
    "whether that is all"
)
TOO_LARGE = (
    "the step size is too large for all of them, or the density or its gradient is "
    "broken"
)


@dataclass(frozen=True)
class Check:
    """The result of one convergence check; true if it passes or warns.

    :param status: ``"unknown"`` if the draws don't suffice to tell; ``"short"`` if more
        of them would pass.
    :param words: the finding, its limit and advice.
    :param value: the number that was checked; NaN if there is none.
    """

    name: str
    status: Status
    words: str
    value: float = math.nan

    def __bool__(self) -> bool:
        return self.status in ("pass", "warn")


def graded(value: float, limits: tuple[float, float]) -> Status:
    """Grade a number by the limits of a warning and of a failure; NaN is
    ``"unknown"``.
    """
    if math.isnan(value):
        return "unknown"
    warn, fail = limits
    sign = 1 if fail > warn else -1
    if sign * value > sign * fail:
        return "fail"
    return "warn" if sign * value > sign * warn else "pass"


def short(check: Check) -> Check:
    """Return a check of draws of which more would help: its warning says so."""
    return replace(check, status="short") if check.status == "warn" else check


def checked(
    name: str, value: float, limits: tuple[float, float], finding: str, advice: str
) -> Check:
    """Check a number against its limits; the advice is for numbers beyond them."""
    status = graded(value, limits)
    side = "below " if limits[1] > limits[0] else "above "
    limit = f"{side if limits[0] else ''}{limits[0]:g}"
    words = (
        f"{finding}, should be {limit}: {advice}"
        if status in ("warn", "fail")
        else finding
    )
    return Check(name, status, words, value)


# draws --------------------------------------------------------------------------------


def finite(draws: Tensors) -> Check:
    """Check that all draws are finite: name in the message -> ``(chains, draws,
    ...)``.
    """
    for name, value in draws.items():
        count = non_finite(value)
        if count.any():
            chains = named(count.nonzero().flatten().tolist())
            finding = (
                f"{name} is NaN or infinite in {int(count.sum()):,} draws ({chains})"
            )
            advice = (
                "leave them out by posterior.select, or draw anew with smaller steps "
                "or dtype=torch.float64"
            )
            return Check("finite", "fail", f"{finding}: {advice}")
    return Check("finite", "pass", "all draws are finite")


def copies(samples: Tensors) -> Iterator[Check]:
    """Report chains that equal others draw for draw."""
    if copied := copied_chains(samples):
        words = (
            f"the chains {copied} equal others draw for draw; were they drawn with the "
            "same seed? Leave them out"
        )
        yield Check("copies", "fail", words, float(len(copied)))


def moving(samples: Tensors) -> Check:
    """Check the share of the draws at which each chain moves, and its spread relative
    to the median chain's.

    An accepted move changes every entry, so the first few of each site suffice. Entries
    that are constant in all chains, such as the zeros of a triangular matrix, are left
    out.
    """
    heads = torch.cat([watched(value) for value in samples.values()], dim=2).double()
    if heads.shape[1] < 2:
        return Check(
            "moving", "unknown", "one draw of each chain says nothing about its moves"
        )
    heads = heads[..., ~standing_still(heads).all(0)]
    if not heads.shape[2]:
        return Check("moving", "fail", f"no chain moves: {TOO_LARGE}", 0.0)
    moves = (heads.diff(dim=1) != 0).any(2).double().mean(1)
    spread = heads.std(1)
    shares = torch.minimum(
        moves, (spread / spread.median(0).values.clamp(min=1e-300)).median(1).values
    )
    slow = (shares < MOVING[0]).nonzero().flatten().tolist()
    finding = (
        f"{named(slow)} hardly move: {float(shares.min()):.2g} of the draws, or of the "
        "others' spread"
    )
    advice = (
        "start elsewhere (initial=), take smaller steps, or leave out by "
        "posterior.select"
    )
    return checked(
        "moving",
        float(shares.min()),
        MOVING,
        finding if slow else "every chain moves",
        advice,
    )


def disagreement(samples: Tensors, subsampled: bool) -> Check:
    """Check R-hat of the first few entries of each site."""
    worst = {}
    for site, value in samples.items():
        heads = watched(value)
        if heads.numel():
            r_hat = chain_statistics(heads).r_hat
            worst[site] = float(r_hat.nan_to_num(0.0).max())
    if not worst:
        return Check("weights", "unknown", f"no chain moves: {TOO_LARGE}")
    site = max(worst, key=worst.__getitem__)
    finding = (
        "the chains disagree, so the draws are no posterior's yet: R-hat of site "
        f"{site!r} is {worst[site]:.3f}"
    )
    advice = (
        "run longer, with a longer "
        f"warm-up{' and larger batches' if subsampled else f'. {RELABELLED}'}"
    )
    return checked("weights", worst[site], R_HAT, finding, advice)


# the run ------------------------------------------------------------------------------


def starts(metadata: Values, num_chains: int) -> Iterator[Check]:
    """Report that all chains of a run started at one point, or that most restarted at
    others' positions, so that their agreement shows little.
    """
    if metadata.get("one_start"):
        words = (
            "all chains started at one point, so that no R-hat shows a mode that they "
            "all missed; start them apart"
        )
        yield Check(
            "starts", "warn", f"{words} (initial='prior', 'uniform', or a guide)"
        )
    restarts = metadata.get("restarts", 0)
    if restarts > num_chains / 2:
        words = (
            f"{num_chains} chains restarted {restarts} times at the positions of "
            "others, from modes of negligible mass, so that R-hat shows less than of "
            "chains that stay apart; compare with a run from other starting points"
        )
        yield Check("starts", "warn", f"{words} (initial=)")


def warm_up(metadata: Values) -> Iterator[Check]:
    """Check R-hat at the end of a warm-up of ``num_warmup="auto"``, in the worst task
    of a run in tasks.
    """
    tasks = [
        task
        for task in (metadata, *metadata.get("parts", ()))
        if task.get("warmup_r_hat") is not None
    ]
    for worst in sorted(tasks, key=lambda task: task["warmup_r_hat"])[-1:]:
        length = worst.get("num_warmup", metadata.get("num_warmup"))
        r_hat = worst["warmup_r_hat"]
        finding = (
            f"the chains didn't agree when warm-up ended: R-hat {r_hat:.3g} over half "
            f"of {length} iterations"
        )
        advice = (
            f"{RELABELLED}. If not, pass full_mass=True or a larger num_warmup, or "
            "reparametrise the model"
        )
        yield checked("warm-up", r_hat, (R_HAT[1], math.inf), finding, advice)


# sampler statistics -------------------------------------------------------------------


def sampler_checks(
    statistics: Tensors, subsampled: bool, arrived: bool
) -> Iterator[Check]:
    """Check a sampler's statistics, ``(chains, draws)`` each.

    :param subsampled: whether the sampler takes mini-batches, and so has a tolerance
        instead of a target acceptance.
    :param arrived: whether the chains agree; otherwise their temperature doesn't depend
        on the step size alone.
    """
    if "acceptance_rate" in statistics:
        yield acceptance(statistics["acceptance_rate"])
    if "diverging" in statistics:
        share = float(statistics["diverging"].double().mean())
        setting = "or a larger target_accept_prob"
        if "energy_error" in statistics:
            setting = "or energy_error"
        if subsampled:
            setting = "or tolerance"
        finding = f"{share:.2%} of the draws diverged"
        advice = (
            f"parts of the posterior are missed. Use a smaller step_size {setting}, a "
            "longer warm-up, or reparametrise the model"
        )
        yield checked("divergences", share, DIVERGING, finding, advice)
    if "energy_error" in statistics:
        yield energy_error(statistics["energy_error"])
    if "reached_max_treedepth" in statistics:
        share = float(statistics["reached_max_treedepth"].double().mean())
        finding = f"{share:.1%} of the trajectories were cut off at the largest tree"
        advice = "raise max_tree_depth, or reparametrise"
        yield checked("tree depth", share, CUT_OFF, finding, advice)
    if "energy" in statistics and statistics["energy"].shape[1] > 2:
        worst = float(missing_energy(statistics["energy"]).min())
        finding = f"E-BFMI of the worst chain {worst:.2f}"
        advice = "momenta hardly change the energy, tails are missed; reparametrise"
        yield checked("energy", worst, ENERGY_FRACTION, finding, advice)
    for name in ("kinetic_temperature", "virial"):
        if name in statistics:
            title = name.replace("_", " ")
            yield temperature(title, statistics[name].double(), subsampled, arrived)


def acceptance(rates: Tensor) -> Check:
    """Check the mean acceptance rate of every chain, from rates ``(chains, draws)``."""
    by_chain = rates.double().mean(1).nan_to_num(0.0)  # NaN: no move
    finding = (
        f"mean acceptance {float(by_chain.mean()):.2f}, of the worst chain "
        f"{float(by_chain.min()):.2f}"
    )
    if stuck := (by_chain < ACCEPTANCE[1]).nonzero().flatten().tolist():
        finding = (
            f"{len(stuck)} of {len(by_chain)} chains hardly move ({named(stuck)}): "
            f"{finding}"
        )
    others_move = 0 < len(stuck) < len(by_chain)
    advice = (
        "start them elsewhere (initial=), or leave them out by posterior.select; "
        * others_move
    )
    advice += "use a smaller step_size, a longer warm-up or dtype=torch.float64"
    # fewer only warn
    limits = ACCEPTANCE if rates.shape[1] >= MIN_DRAWS else (ACCEPTANCE[0], -math.inf)
    return checked("acceptance", float(by_chain.min()), limits, finding, advice)


def energy_error(ratios: Tensor) -> Check:
    """Check the energy errors of a sampler that accepts every step, whose bias grows
    with them.

    :param ratios: squared errors relative to the requested one, ``(chains, draws)``;
        NaN for iterations undone.
    """
    by_chain = ratios.double().nanmean(1)
    mean = float(by_chain.nanmean())
    worst = float(by_chain.nan_to_num(math.inf).max())
    finding = (
        f"squared energy errors are {mean:.3g} times the requested one, in the worst "
        f"chain {worst:.3g}"
    )
    advice = "the draws are more biased than requested. Use a longer warm-up, or NUTS"
    return checked("energy error", mean, ENERGY_ERROR, finding, advice)


def temperature(
    name: str, values: Tensor, subsampled: bool, arrived: bool, site: str = ""
) -> Check:
    """Check that the mean of ``(chains, draws)`` is 1, within a tolerance and its
    standard error.

    :param site: empty: of all sites.
    """
    complete = values[~values.isnan().any(1)]  # chains without a NaN
    if complete.numel() < 2:
        return Check(name, "unknown", "no chain has values throughout")
    mean = float(complete.mean())
    error = _standard_error(complete)
    margin = error * (STANDARD_ERRORS_OF_SITE if site else STANDARD_ERRORS)
    off = abs(mean - 1)
    finding = f"{name}{f' of site {site!r}' if site else ''} {mean:.3g} ± {error:.2g}"
    if margin > TEMPERATURE[1] and off <= margin:
        hint = "more draws (diagnose looks at num_draws= of them) would tell"
        return Check(name, "unknown", f"{finding}: {hint}", mean)
    if off <= max(margin, TEMPERATURE[0]):
        return Check(name, "pass", finding, mean)
    if not arrived:
        advice = "the chains don't agree yet: first a longer warm-up"
    elif mean < 1:
        advice = (
            "the draws spread too little, or haven't reached the posterior yet; run "
            "longer"
        )
    else:
        advice = (
            f"they spread too widely; {'larger batches, ' * subsampled}smaller steps "
            "or a longer warm-up"
        )
    return Check(
        name, graded(off, TEMPERATURE), f"{finding}, should be 1: {advice}", mean
    )


def _standard_error(values: Tensor) -> float:
    """Estimate the standard error of the mean of correlated draws, at least that of the
    chains' means.
    """
    size = float(chain_statistics(values).ess_bulk)
    within = float(values.std()) / math.sqrt(size if size == size else 1.0)
    if len(values) == 1:
        return within
    return max(within, float(values.mean(1).std()) / math.sqrt(len(values)))


def named(chains: Sequence[int]) -> str:
    """Name chains by number, at most eight of them."""
    shown = ", ".join(map(str, chains[:8])) + (", ..." if len(chains) > 8 else "")
    return f"{'chain' if len(chains) == 1 else 'chains'} {shown}"


# the checks that a run warns of -------------------------------------------------------


def sampler_failures(
    statistics: Tensors,
    subsampled: bool,
    samples: Tensors | None = None,
) -> list[Check]:
    """Return the failed checks that a run warns of; with few draws, of acceptance,
    divergences and energy errors only.

    :param statistics: of the sampler, ``(chains, draws)`` each.
    :param samples: draws on which chains must agree; then E-BFMI, too, is checked.
        ``None``: they needn't.
    """
    names = {"acceptance", "divergences", "energy error", "weights"}
    length = min((value.shape[1] for value in statistics.values()), default=0)
    agreement = []
    if length >= (MIN_DRAWS if subsampled else MIN_DRAWS_TO_AGREE):
        names |= {"virial", "kinetic temperature"}
        if samples is not None:
            names.add("energy")
            agreement = [disagreement(samples, subsampled)]
    arrived = all(check.status != "fail" for check in agreement)
    failures = []
    for check in (*sampler_checks(statistics, subsampled, arrived), *agreement):
        warns = check.status == "warn" and check.name == "energy"
        if check.name in names and (check.status == "fail" or warns):
            failures.append(check)
    return failures
