"""Draws ``(chains, draws, *site_shape)`` by site, and what is known of them, as tables.

Entries of a site are named as in Pyro's summaries, ``w[0,1]``, counted from 0. Numbers that can't be told are NaN: of
sites without entries, of fewer than 4 draws, of weights that are constant or not finite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric.posterior.statistics import ChainStatistics, chain_statistics

MOST_ENTRIES_SHOWN = 32  # of a site, one by one
HEAD = ("site", "entries", "R-hat worst", "median", "ESS bulk worst", "median", "ESS tail worst", "median")


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows of equally many cells as aligned lines; the columns ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{c:{'<' if i in left else '>'}{widths[i]}}" for i, c in enumerate(row)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def site_row(site: str, statistics: ChainStatistics) -> tuple[str, ...]:
    """The row of a site under :data:`HEAD`: worst and median R-hat and effective sample sizes."""
    numbers = statistics.summary()
    r_hats = (f"{numbers[f'r_hat{kind}']:.3f}" for kind in ("", "_median"))
    sizes = (f"{numbers[f'ess_{part}{kind}']:,.0f}" for part in ("bulk", "tail") for kind in ("", "_median"))
    return (site, f"{statistics.r_hat.numel():,}", *r_hats, *sizes)


def summary_tables(samples: Mapping[str, Tensor], prob: float, chains: bool) -> list[str]:
    """A line for every entry of the sites that have few of them, as Pyro's summary; of chains, a line for each site.

    :param prob: how much of an entry's draws its interval holds, between quantiles.
    """
    statistics = {site: chain_statistics(draws) for site, draws in samples.items()} if chains else {}
    few = {s: v for s, v in samples.items() if v.numel() and v.shape[2:].numel() <= MOST_ENTRIES_SHOWN}
    rows = [row for site, draws in few.items() for row in _entry_rows(site, draws, prob, statistics.get(site))]
    found = []
    if rows:
        low, high = (1 - prob) / 2, (1 + prob) / 2
        heads = ("mean", "std", "median", f"{low:.1%}", f"{high:.1%}", *(("n_eff", "r_hat") if chains else ()))
        width = max(len(row[0]) for row in rows)
        found = [" " * width + "".join(f"{head:>10}" for head in heads)]
        found += [f"{name:>{width}}" + "".join(f"{v:>10.2f}" for v in row) for name, *row in rows]
    between = [""] if found and chains else []
    sites = [table([HEAD, *(site_row(*one) for one in statistics.items())])] if chains else []
    return [*found, *between, *sites]


def _entry_rows(site: str, draws: Tensor, prob: float, statistics: ChainStatistics | None) -> list[tuple[Any, ...]]:
    shape = draws.shape[2:]
    flat = draws.double().cpu().reshape(-1, shape.numel())
    quantiles = np.quantile(flat.numpy(), [0.5, (1 - prob) / 2, (1 + prob) / 2], axis=0)
    numbers = [flat.mean(0), flat.std(0), *quantiles]
    if statistics is not None:
        numbers += [statistics.ess_bulk.flatten(), statistics.r_hat.flatten()]
    names = [f"{site}[{','.join(map(str, place))}]" for place in np.ndindex(*shape)] if shape else [site]
    return list(zip(names, *(number.tolist() for number in numbers), strict=True))


def chains_diagnostics(statistics: Mapping[str, Tensor], num_chains: int) -> dict[str, dict[str, Any]]:
    """Pyro's diagnostics of chains: ``"divergences"`` -> ``{"chain 0": [draws], ...}``, and ``"acceptance rate"`` ->
    ``{"chain 0": mean, ...}`` if the sampler knows one."""
    flags = statistics.get("diverging", torch.zeros(num_chains, 0, device="cpu"))
    found: dict[str, dict[str, Any]] = {}
    found["divergences"] = {f"chain {c}": row.nonzero().flatten().tolist() for c, row in enumerate(flags)}
    if (rates := statistics.get("acceptance_rate")) is not None:
        found["acceptance rate"] = {f"chain {c}": rate for c, rate in enumerate(rates.double().mean(1).tolist())}
    return found
