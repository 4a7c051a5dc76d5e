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
    """The row of a site under :data:`HEAD`."""
    numbers = statistics.summary()
    r_hats = (f"{numbers[f'r_hat{kind}']:.3f}" for kind in ("", "_median"))
    sizes = (f"{numbers[f'ess_{part}{kind}']:,.0f}" for part in ("bulk", "tail") for kind in ("", "_median"))
    return (site, f"{statistics.r_hat.numel():,}", *r_hats, *sizes)


def sites_table(samples: Mapping[str, Tensor]) -> str:
    """One line for each site: worst and median R-hat and effective sample sizes."""
    return table([HEAD, *(site_row(site, chain_statistics(draws)) for site, draws in samples.items())])


def entries_table(samples: Mapping[str, Tensor], prob: float) -> str:
    """A line for every entry of the sites that have few of them, as Pyro's summary; empty if no site has, or no draws.

    :param prob: how much of an entry's draws its interval holds, between quantiles.
    """
    low, high = (1 - prob) / 2, (1 + prob) / 2
    rows: list[tuple[Any, ...]] = []
    for site, draws in samples.items():
        shape = draws.shape[2:]
        if not 0 < shape.numel() <= MOST_ENTRIES_SHOWN or draws.numel() == 0:
            continue
        statistics, flat = chain_statistics(draws), draws.double().cpu().reshape(-1, shape.numel())
        numbers = [flat.mean(0), flat.std(0), *np.quantile(flat.numpy(), [0.5, low, high], axis=0)]
        numbers += [statistics.ess_bulk.flatten(), statistics.r_hat.flatten()]
        rows += zip(entry_names(site, shape), *(number.tolist() for number in numbers), strict=True)
    if not rows:
        return ""
    width = max(len(row[0]) for row in rows)
    heads = ("mean", "std", "median", f"{low:.1%}", f"{high:.1%}", "n_eff", "r_hat")
    lines = [" " * width + "".join(f"{head:>10}" for head in heads)]
    return "\n".join([*lines, *(f"{name:>{width}}" + "".join(f"{v:>10.2f}" for v in row) for name, *row in rows)])


def chains_diagnostics(statistics: Mapping[str, Tensor], num_chains: int) -> dict[str, dict[str, Any]]:
    """Pyro's diagnostics of chains: ``"divergences"`` -> ``{"chain 0": [draws], ...}``, and ``"acceptance rate"`` ->
    ``{"chain 0": mean, ...}`` if the sampler knows one."""
    flags = statistics.get("diverging", torch.zeros(num_chains, 0, device="cpu"))
    found: dict[str, dict[str, Any]] = {}
    found["divergences"] = {f"chain {c}": row.nonzero().flatten().tolist() for c, row in enumerate(flags)}
    if (rates := statistics.get("acceptance_rate")) is not None:
        found["acceptance rate"] = {f"chain {c}": rate for c, rate in enumerate(rates.double().mean(1).tolist())}
    return found


def entry_names(site: str, shape: torch.Size) -> list[str]:
    """The names of a site's entries, in the order in which a tensor is flattened; a scalar site's is its own."""
    return [f"{site}[{','.join(map(str, place))}]" for place in np.ndindex(*shape)] if shape else [site]


def array(value: Tensor) -> np.ndarray:
    """A tensor as an array of NumPy's, which knows no bfloat16."""
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
