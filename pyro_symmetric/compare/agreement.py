"""Do chains agree: R-hat and effective draws of each space, judged by the limits of the findings.

A space is one look at the draws: the weights as drawn, the weights in a frame, the predictions, the log density.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_symmetric.chain_findings import EFFECTIVE_DRAWS, R_HAT, Finding, Status, graded
from pyro_symmetric.chain_statistics import (
    ChainStatistics,
    chain_statistics,
    evenly_spaced,
    exceeded_by_few,
    halves,
    never_changing,
    standing_still,
)

Spaces = Mapping[str, Mapping[str, Tensor]]  # space -> site -> (chains, draws, ...)
Statistics = dict[str, dict[str, ChainStatistics]]  # space -> site -> numbers of every entry

LEAST_DRAWS = 8  # of a chain: halves of four
TOO_FEW = f"too few draws to tell whether chains agree: it takes {LEAST_DRAWS} of each"
STANDS_OUT = 1.1  # the R-hat of a single entry that isn't left out as one of the few that exceed a limit by chance
MOST_NUMBERS, LEAST_ENTRIES = 2**28, 256  # of a site


def statistics_of(spaces: Spaces) -> Statistics:
    """R-hat and effective sample sizes in each space; nothing if there are too few draws for them.

    A single chain is compared with itself, half by half. Of very large sites some entries are looked at.
    """
    first = next(iter(next(iter(spaces.values())).values()))
    if first.shape[1] < LEAST_DRAWS:
        return {}
    return {
        space: {
            site: chain_statistics(drawn if len(drawn) > 1 else halves(drawn).squeeze(1))
            for site, drawn in ((site, looked_at(value)) for site, value in by_site.items())
        }
        for space, by_site in spaces.items()
    }


def agreement(spaces: Spaces, statistics: Statistics, is_network: bool) -> list[Finding]:
    """The R-hat of each space; have chains settled, if what decides disagrees; effective draws."""
    if not statistics:
        return [Finding("weights", "unknown", TOO_FEW)]
    decisive = _decisive(list(spaces), is_network)
    # A network's weights that disagree tell nothing: they may sit in copies of a mode.
    blind: Status = "unknown" if is_network and decisive == ["weights"] else "warn"
    grave = [name for name in decisive if name != "weights" or not is_network]
    findings = [_r_hat(name, by_site, "fail" if name in grave else blind) for name, by_site in statistics.items()]
    if any(f.value > R_HAT[1] for f in findings if f.name in decisive):
        findings.append(_settled([value for name in decisive for value in spaces[name].values()]))
    return [*findings, _effective({name: statistics[name] for name in decisive})]


def constant_entries(samples: Mapping[str, Tensor]) -> list[Finding]:
    """Entries that never change: the same everywhere, or another value in each chain."""
    fixed: list[str] = []
    stuck: list[str] = []
    for site, value in samples.items():
        alike = never_changing(value)
        apart = standing_still(value).all(0) & ~alike
        for counts, count in ((fixed, int(alike.sum())), (stuck, int(apart.sum()))):
            if count:
                counts.append(f"{count:,} {'entry' if count == 1 else 'entries'} of {site!r}")
    sentences = [f"left out: {_few(fixed)}, the same in all draws of all chains"] if fixed else []
    sentences += [f"stuck: {_few(stuck)}, different from chain to chain but never changing in one"] if stuck else []
    return [Finding("constant entries", "warn" if stuck else "pass", "; ".join(sentences))] if sentences else []


def looked_at(draws: Tensor) -> Tensor:
    """All entries; of very many draws evenly spaced ones, as many as take some seconds."""
    most = max(LEAST_ENTRIES, MOST_NUMBERS // max(1, draws.shape[:2].numel()))
    entries = draws.shape[2:].numel()
    return draws if entries <= most else draws.flatten(2)[..., evenly_spaced(entries, most)]


def known(by_site: Mapping[str, ChainStatistics], name: str) -> Tensor:
    """The values of all entries that have one, ``(K,)``."""
    values = torch.cat([getattr(statistics, name).flatten() for statistics in by_site.values()])
    return values[~values.isnan()]


# small steps --------------------------------------------------------------------------------------------------------


def _decisive(spaces: list[str], is_network: bool) -> list[str]:
    """The spaces in which chains must agree: what no symmetry touches, else a frame, else the weights.

    The log density alone says little, unless symmetries forbid to look at the weights.
    """
    density = ["log density"] if "log density" in spaces else []
    if "predictions" in spaces:
        return ["predictions", *density]
    if frames := [name for name in ("canonical", "aligned") if name in spaces]:
        return [*frames, *density]
    return density if density and is_network else ["weights", *density]


def _r_hat(space: str, by_site: Mapping[str, ChainStatistics], at_worst: Status) -> Finding:
    """The R-hat of the worst site that one entry in a hundred exceeds: of hundreds, some stand out by chance. The
    largest, if it stands out by more than that.

    :param at_worst: the status of chains that disagree.
    """
    worst = {site: _beyond_chance(known({site: numbers}, "r_hat")) for site, numbers in by_site.items()}
    told = {site: value for site, value in worst.items() if not math.isnan(value)}
    if not told:
        return Finding(space, "unknown", "R-hat can't be told: the draws never change")
    site = max(told, key=told.__getitem__)
    status, of = graded(told[site], R_HAT), "" if site == space else f", of site {site!r}"
    advice = {"fail": ": the chains disagree", "warn": ": run longer"}.get(status, "")
    if math.isinf(told[site]):
        advice = ": the chains differ, and don't move"
    words = f"R-hat {'infinite' if math.isinf(told[site]) else f'up to {told[site]:.3f}'}{of}{advice}"
    return Finding(space, at_worst if status == "fail" else status, words, told[site])


def _beyond_chance(r_hats: Tensor) -> float:
    """The R-hat that few exceed, or the largest if it is over 1.1 and five times as far from 1 as that.

    Of chains that agree the largest of 2,000 entries is at most three times as far (two chains of 8 draws, the worst
    case)."""
    usual = exceeded_by_few(r_hats)
    largest = float(r_hats.max()) if len(r_hats) else usual
    return largest if largest > STANDS_OUT and largest - 1 > 5 * (usual - 1) else usual


def _effective(measured: Statistics) -> Finding:
    least = {
        (space, site): -exceeded_by_few(-torch.minimum(*(known({site: n}, f"ess_{k}") for k in ("bulk", "tail"))))
        for space, by_site in measured.items()
        if space != "canonical" or "aligned" not in measured  # of two frames, the one that tells units apart
        for site, n in by_site.items()
    }
    told = {name: size for name, size in least.items() if not math.isnan(size)}
    if not told:
        return Finding("effective draws", "unknown", "they can't be told: the draws never change")
    space, site = min(told, key=told.__getitem__)
    size = told[space, site]
    status = graded(size, EFFECTIVE_DRAWS)
    few = f": too few (< {EFFECTIVE_DRAWS[0]:.0f}) to be sure of means and deviations; more draws, or more chains"
    of = f"the {space}" if site == space else f"site {site!r} ({space})"
    return Finding("effective draws", status, f"at least {size:.0f}, of {of}{'' if status == 'pass' else few}", size)


def _settled(decisive: list[Tensor]) -> Finding:
    """Judge whether each chain stays the same from its first half to its second."""
    if decisive[0].shape[:2].numel() < EFFECTIVE_DRAWS[0]:
        return Finding("settled", "unknown", "too few draws to tell whether chains drift, or differ by chance")
    if all(map(_halves_agree, decisive)):
        return Finding("settled", "pass", "each chain stays the same from its first half to its second")
    return Finding("settled", "fail", "some chains still drift, or stand still")


def _halves_agree(draws: Tensor) -> bool:
    """Of each chain: a half is taken for a chain, each chain's value for a quantity."""
    draws = draws[:, :, ~never_changing(draws).to(draws.device)]
    compared = chain_statistics(halves(draws).transpose(1, 2))
    stuck = bool(torch.isnan(compared.r_hat).any())
    return not stuck and exceeded_by_few(compared.r_hat.flatten()) <= R_HAT[1]


def _few(parts: list[str]) -> str:
    return ", ".join(parts[:3]) + (f" and of {len(parts) - 3} more sites" if len(parts) > 3 else "")
