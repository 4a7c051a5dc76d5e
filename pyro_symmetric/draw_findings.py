"""Findings on the draws of Markov chains themselves: their numbers, their moves, their agreement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from pyro_symmetric.chain_findings import R_HAT, RELABELLED, TOO_LARGE, Finding, are, graded, named
from pyro_symmetric.chain_statistics import (
    chain_statistics,
    exceeded_by_few,
    non_finite,
    spacing,
    standing_still,
    watched,
)

# Beyond the first a finding is a warning, beyond the second a failure.
EDGE = 3e-4  # share of the draws at the last number before 1: of Beta(a, b) 1 / a times as many are missed
SPACING = (0.1, 0.5)  # distance of neighbouring numbers of the dtype, in deviations of a chain
MOVING = (0.1, 0.01)  # share of the draws at which a chain moves, and its spread in units of the median chain's

NO_CHAIN_MOVES = f"no chain moves: the {TOO_LARGE}"


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
        found.append(f"{name} in {int(count.sum()):,} of {len(count) * length:,} draws ({named(chains)})")
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
                    f"{share:.2%} of the draws of site {site!r} are as near to 1 as {value.dtype} has numbers. What "
                )
                words += "lies nearer, which may be many times as much, is missed, and everything else weighs more: "
                words += f"{single}sample the logit, or 1 less the value if only that is near 0"
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
        words = f"{named(stuck)} {are(stuck)} stuck: start elsewhere (initial=), or take smaller steps"
        return Finding("moving", "fail", f"{words}; posterior.select leaves such chains out", slowest)
    if slow:
        found = f"moves in {slowest:.0%} of the draws, spread {least:.0%} of the median chain's"
        return Finding("moving", "warn", f"{named(slow)} {are(slow)} slow: {found}", slowest)
    return Finding("moving", "pass", f"every chain moves in at least {slowest:.0%} of its draws", slowest)


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
