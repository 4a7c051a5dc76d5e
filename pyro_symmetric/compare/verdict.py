"""The findings on chains in a few sentences."""

from __future__ import annotations

from collections.abc import Mapping

from pyro_symmetric.chain_findings import R_HAT, Finding
from pyro_symmetric.compare.agreement import TOO_FEW
from pyro_symmetric.draw_findings import NO_CHAIN_MOVES

Findings = Mapping[str, Finding]

# What the sentences on agreement speak of themselves.
SPOKEN_OF = ("finite", "copies", "moving", "weights", "canonical", "aligned", "predictions", "log density", "settled")
# What follows from chains that don't move.
FOLLOWS = ("constant entries", "effective draws", "acceptance", "level")


def verdict(findings: Findings, num_chains: int) -> str:
    """Sentences on whether and where the chains agree, whether their draws suffice, and what went wrong."""
    hopeless = _hopeless(findings)
    spoken_of = (*SPOKEN_OF, *(FOLLOWS if hopeless else ()))
    first = hopeless or _agreement(findings, num_chains)
    others = [f for name, f in findings.items() if name not in spoken_of and f.status in ("warn", "fail")]
    others = [finding for finding in others if finding.words not in first]
    left_out = [findings["constant entries"]] if "constant entries" in findings and not hopeless else []
    spoken = [*left_out, *(finding for finding in others if finding not in left_out)]
    return " ".join([first, *(_sentence(finding) for finding in spoken)])


# small steps --------------------------------------------------------------------------------------------------------


def _sentence(finding: Finding) -> str:
    words = f"effective draws: {finding.words}" if finding.name == "effective draws" else finding.words
    return f"{words[0].upper()}{words[1:]}."


def _hopeless(findings: Findings) -> str | None:
    """The reason why nothing can be said of the chains, or what is wrong before any comparison."""
    if findings["finite"].status == "fail":
        return (
            f"Nothing can be said of these chains: {findings['finite'].words}. Leave them out by posterior.select, or "
            "draw anew with smaller steps or dtype=torch.float64."
        )
    if "copies" in findings:
        return _sentence(findings["copies"])
    if "resolution" in findings and findings["resolution"].status == "fail":
        return f"Nothing can be said of these chains: {findings['resolution'].words}."
    if findings["moving"].status == "fail":
        words = findings["moving"].words
        return _sentence(findings["moving"]) if words == NO_CHAIN_MOVES else f"The chains don't agree: {words}."
    return _sentence(findings["weights"]) if findings["weights"].words == TOO_FEW else None


def _agreement(findings: Findings, num_chains: int) -> str:
    weights = findings["weights"]
    frames = [findings[name] for name in ("canonical", "aligned") if name in findings]
    function = [findings[name] for name in ("predictions", "log density") if name in findings]
    function = [finding for finding in function if finding.status != "unknown"]
    if num_chains == 1:
        return _one_chain(weights, function, findings)
    if not function:
        return _by_weights(weights, frames, findings)
    if "predictions" in findings:
        seen, alike, unlike, unseen = "the function", "that predict alike", "that predict differently", ""
    else:
        seen, alike, unlike = "the log density", "of like density", "of different density"
        unseen = " Give predictions= to see whether they predict alike."
    if apart := _apart(function):
        return f"The chains don't agree on {seen} ({_numbers(apart)}): {_why(findings, f'they sit in modes {unlike}')}"
    where = _apart([weights, *frames])
    if not where:
        return f"The chains agree on {seen} and on the weights."
    start = f"The chains agree on {seen}, but not on the weights ({_numbers(where)}): "
    if _apart(frames):
        return (
            f"{start}not even with their symmetries removed, so they sit in different modes {alike}, or haven't mixed."
            f"{unseen}"
        )
    if frames:
        return start + "brought to one frame, the weights agree too, so the chains sit in different copies of a mode."
    return start + "they may sit in different copies of a mode; give symmetry= to see."


def _by_weights(weights: Finding, frames: list[Finding], findings: Findings) -> str:
    """The verdict if nothing is known of the function that the weights make."""
    where = _apart([weights, *frames])
    if not where:
        return "The chains agree on the weights."
    unseen = " Give model= and x= (or predictions=) to see whether they agree on the function."
    start = f"The chains don't agree on the weights ({_numbers(where)})"
    if _apart(frames):
        why = _why(findings, "they sit in modes of their own")
        return f"{start}, not even with their symmetries removed: {why}{unseen}"
    if frames:
        return start + ", but do once brought to one frame: they sit in different copies of a mode."
    why = _why(findings, "they sit in modes of their own, or in copies of one (give symmetry= to see)")
    return f"{start}: {why}{unseen}"


def _one_chain(weights: Finding, function: list[Finding], findings: Findings) -> str:
    alone = "One chain can't be compared with others, which may find other modes; take several."
    if apart := _apart(function or [weights]):
        return f"The halves of the chain don't agree ({_numbers(apart)}): give it a longer warm-up. {alone}"
    return f"The halves of the chain agree. {alone}"


def _why(findings: Findings, where: str) -> str:
    """The reason why chains disagree: they are on their way, or at home in different places."""
    if "settled" not in findings:
        return f"{where}, or haven't mixed."
    return {
        "pass": f"each by itself has settled, so {where}.",
        "fail": "some still drift or stand still; give them a longer warm-up.",
    }.get(findings["settled"].status, "of so few draws it may be chance; draw more.")


def _apart(findings: list[Finding]) -> list[Finding]:
    """Those in which chains disagree. Each frame is a function of the orbits, so any one of them decides."""
    return [finding for finding in findings if finding.value > R_HAT[1]]


def _numbers(findings: list[Finding]) -> str:
    return "; ".join(f"{finding.name}: {finding.words.partition(':')[0]}" for finding in findings)
