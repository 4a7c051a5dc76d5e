"""What the diagnostics of chains come to, in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyro_symmetric.compare._results import listed, non_finite_words

if TYPE_CHECKING:
    from pyro_symmetric.compare.convergence import ConvergenceResult, SpaceConvergence

FEW = "Too few chains or draws to tell whether chains agree: it takes two chains of four draws."
NONE_MOVES = "the step size is too large for all of them, or the density or its gradient is broken"
ENOUGH_DRAWS = 400  # effective ones, for stable estimates of R-hat and of quantiles: Vehtari et al. 2021, section 4
LITTLE_ENERGY = 0.3


def verdict(result: ConvergenceResult) -> str:
    """Whether the chains agree and on what, whether their draws suffice, and what went wrong on the way."""
    if hopeless := _hopeless(result):
        return " ".join([hopeless, *_trouble(result)])
    return " ".join([_agreement(result), *_effort(result), *_left_out(result), *_trouble(result)])


# small steps --------------------------------------------------------------------------------------------------------


def _hopeless(result: ConvergenceResult) -> str | None:
    """Why nothing can be said of the chains, or what is wrong before any comparison."""
    lost = {
        name if space == "function" else repr(name) if space == "weights" else f"{name!r} ({space})": count
        for space, found in result.spaces.items()
        for name, count in found.non_finite.items()
    }
    if lost:
        return (
            f"Nothing can be said of these chains: {non_finite_words(lost, result.num_samples)}. Leave them out by "
            "posterior.select, or draw anew with smaller steps or dtype=torch.float64."
        )
    if result.num_samples < 4:
        return FEW
    if len(result.still) == result.num_chains:
        return f"No chain moves, all draws of a chain are alike: {NONE_MOVES}."
    if result.num_chains < 2:
        return FEW
    if result.still:
        subject = (
            f"chain {result.still[0]} stands" if len(result.still) == 1 else f"chains {listed(result.still)} stand"
        )
        return (
            f"The chains don't agree: {subject} still, all draws alike. Start such chains elsewhere or take smaller "
            "steps; posterior.select leaves them out."
        )
    return None


def _agreement(result: ConvergenceResult) -> str:
    weights, function = result.spaces["weights"], result.spaces.get("function")
    frames: dict[str, SpaceConvergence] = {
        name: result.spaces[name] for name in ("canonical", "aligned") if name in result.spaces
    }
    if function is None or function.agrees is None:
        return _weights_only(weights, frames)
    if set(function.by_site) == {"log density"}:  # which says less than predictions
        seen, alike, unlike = "the log density", "of like density", "of different density"
        unseen = " Give predictions= to see whether they predict alike."
    else:
        seen, alike, unlike, unseen = "the function", "that predict alike", "that predict differently", ""
    if function.agrees is False:
        return (
            f"The chains don't agree on {seen} ({_numbers(function)}): "
            + {
                True: f"each by itself has settled, so they sit in modes {unlike}.",
                False: "some still drift or stand still; run longer.",
                None: f"they haven't mixed, or sit in modes {unlike}.",
            }[result.settled]
        )
    where = _where(weights, frames)
    if not where:
        return f"The chains agree on {seen} and on the weights."
    start = f"The chains agree on {seen}, but not on the weights ({where}): "
    if _apart(frames):
        return (
            f"{start}not even with their symmetries removed, so they sit in different modes {alike}, or haven't mixed."
            f"{unseen}"
        )
    if any(space.agrees for space in frames.values()):
        return start + "brought to one frame, the weights agree too, so the chains sit in different copies of a mode."
    return start + "they may sit in different copies of a mode; give symmetry= to see."


def _weights_only(weights: SpaceConvergence, frames: Mapping[str, SpaceConvergence]) -> str:
    unseen = " Give model= and x= (or predictions=) to see whether they agree on the function."
    where = _where(weights, frames)
    if not where:
        return "The chains agree on the weights, and so on the function."
    start = f"The chains don't agree on the weights ({where})"
    if _apart(frames):
        return start + ", not even with their symmetries removed." + unseen
    if any(space.agrees for space in frames.values()):
        return start + ", but do once brought to one frame: they sit in different copies of a mode."
    return start + "." + unseen


def _where(weights: SpaceConvergence, frames: Mapping[str, SpaceConvergence]) -> str:
    """The numbers of the weights as drawn and in each frame, if the chains disagree there."""
    raw = [] if weights.agrees else [_numbers(weights)]
    return "; ".join([*raw, *(f"{name}: {_numbers(space)}" for name, space in _apart(frames).items())])


def _apart(frames: Mapping[str, SpaceConvergence]) -> dict[str, SpaceConvergence]:
    """The frames in which chains disagree. Each is a function of the orbits, so any one of them decides."""
    return {name: space for name, space in frames.items() if space.agrees is False}


def _numbers(space: SpaceConvergence) -> str:
    return f"R-hat up to {space.worst['r_hat']:.3g}, above {space.threshold:g} for {space.share_above:.0%}"


def _effort(result: ConvergenceResult) -> list[str]:
    name = next(name for name in ("function", "aligned", "weights") if name in result.spaces)
    space = result.spaces[name]
    least = min(space.worst["ess_bulk"], space.worst["ess_tail"])
    if not least < ENOUGH_DRAWS:  # NaN included: too few draws were spoken of before
        return []
    what = "aligned weights" if name == "aligned" else name
    return [f"The worst effective sample size of the {what} is {least:.0f}, too few (< {ENOUGH_DRAWS}) to be sure."]


def _left_out(result: ConvergenceResult) -> list[str]:
    """Entries of the weights that never change."""
    weights, sentences = result.spaces["weights"], []
    if weights.fixed:
        sentences.append(f"Left out: {_entries(weights.fixed)}, the same in all draws of all chains.")
    if weights.stuck:
        sentences.append(f"Stuck: {_entries(weights.stuck)}, different from chain to chain but never changing in one.")
    return sentences


def _entries(counts: Mapping[str, int]) -> str:
    found = [f"{count:,} {'entry' if count == 1 else 'entries'} of {site!r}" for site, count in counts.items()]
    return ", ".join(found[:3]) + (f" and of {len(found) - 3} more sites" if len(found) > 3 else "")


def _trouble(result: ConvergenceResult) -> list[str]:
    sentences = []
    if result.divergent:
        sentences.append(f"{result.divergent:.2g} of the draws diverged: parts of the posterior may be missed.")
    if result.energy_fraction is not None and bool((low := result.energy_fraction < LITTLE_ENERGY).any()):
        sentences.append(f"{int(low.sum())} chains have an E-BFMI under {LITTLE_ENERGY}: they hardly reach the tails.")
    return sentences
