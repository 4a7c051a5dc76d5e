"""What the diagnostics of chains come to, in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyro_symmetric.compare.convergence import ConvergenceResult, SpaceConvergence

ENOUGH_DRAWS = 400  # effective ones, for stable estimates of R-hat and of quantiles: Vehtari et al. 2021, section 4
LITTLE_ENERGY = 0.3


def verdict(result: ConvergenceResult) -> str:
    """Whether the chains agree and on what, whether their draws suffice, and what went wrong on the way."""
    return " ".join([_agreement(result), *_effort(result), *_trouble(result)])


# small steps --------------------------------------------------------------------------------------------------------


def _agreement(result: ConvergenceResult) -> str:
    weights, function = result.spaces["weights"], result.spaces.get("function")
    if weights.agrees is None and (function is None or function.agrees is None):
        return "Too few chains or draws to tell whether chains agree: it takes two chains of four draws."
    frames: dict[str, bool | None] = {
        name: result.spaces[name].agrees for name in ("canonical", "aligned") if name in result.spaces
    }
    if function is None:
        return _weights_only(weights, frames)
    if function.agrees is False:
        return (
            f"The chains don't agree on the function ({_numbers(function)}): "
            + {
                True: "each by itself has settled, so they sit in modes that predict differently.",
                False: "some still drift or stand still; run longer.",
                None: "they haven't mixed, or sit in modes that predict differently.",
            }[result.settled]
        )
    if weights.agrees:
        return "The chains agree on the function and on the weights."
    start = f"The chains agree on the function, but not on the weights ({_numbers(weights)}): "
    if any(frames.values()):
        return start + "brought to one frame, the weights agree too, so the chains sit in different copies of a mode."
    if frames:
        return (
            start + "nor do the weights agree in one frame, so the chains sit in different modes that predict alike, "
            "or the frame can't tell units apart."
        )
    return start + "they may sit in different copies of a mode; give symmetry= to see."


def _weights_only(weights: SpaceConvergence, frames: Mapping[str, bool | None]) -> str:
    unseen = " Give model= and x= (or predictions=) to see whether they agree on the function."
    if weights.agrees:
        return "The chains agree on the weights, and so on the function."
    start = f"The chains don't agree on the weights ({_numbers(weights)})"
    if any(frames.values()):
        return start + ", but do once brought to one frame: they sit in different copies of a mode."
    return start + (", nor in one frame." if frames else ".") + unseen


def _numbers(space: SpaceConvergence) -> str:
    return f"R-hat up to {space.worst['r_hat']:.3g}, above {space.threshold:g} for {space.share_above:.0%}"


def _effort(result: ConvergenceResult) -> list[str]:
    space = result.spaces.get("function", result.spaces["weights"])
    least = min(space.worst["ess_bulk"], space.worst["ess_tail"])
    if not least < ENOUGH_DRAWS:  # NaN included: too few draws were spoken of before
        return []
    what = "function" if "function" in result.spaces else "weights"
    return [f"The worst effective sample size of the {what} is {least:.0f}, too few (< {ENOUGH_DRAWS}) to be sure."]


def _trouble(result: ConvergenceResult) -> list[str]:
    sentences = []
    if result.divergent:
        sentences.append(f"{result.divergent:.2g} of the draws diverged: parts of the posterior may be missed.")
    if result.energy_fraction is not None and bool((low := result.energy_fraction < LITTLE_ENERGY).any()):
        sentences.append(f"{int(low.sum())} chains have an E-BFMI under {LITTLE_ENERGY}: they hardly reach the tails.")
    return sentences
