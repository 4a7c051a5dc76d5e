"""Convergence of chains, as dictionaries and as text to print: by site, and entry by entry.

Numbers that can't be told are NaN: of sites without entries, of fewer than 4 draws, of weights that are constant or not
finite. R-hat of one chain compares its halves, and so says nothing of other modes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric.chain_statistics import also_of_one
from pyro_symmetric.draws import entry_names

MOST_ENTRIES_SHOWN = 32  # of a site, one by one


def diagnostics(samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Convergence, summarised for every site over its weights.

    Rank-normalised split R-hat and bulk and tail effective sample size (Vehtari et al. 2021), each as the worst and the
    median over the site's weights. Draws mapped from a file are read block by block.

    :param samples: site -> ``(chains, draws, *site_shape)``.
    :param statistics: name -> ``(chains, draws)``.
    :return: site -> ``r_hat``, ``r_hat_median``, ``ess_bulk``, ``ess_bulk_median``, ``ess_tail``, ``ess_tail_median``
        (without suffix: the worst) and ``n_eff``, Pyro's name for ``ess_bulk``; and, as in Pyro, ``"divergences"`` ->
        ``{"chain 0": [draws], ...}``, with empty lists if the sampler knows no divergence, and ``"acceptance rate"`` ->
        ``{"chain 0": mean, ...}`` if it knows one.
    """
    table: dict[str, dict[str, Any]] = {site: also_of_one(value).summary() for site, value in samples.items()}
    for found in table.values():
        found["n_eff"] = found["ess_bulk"]
    return table | chains_diagnostics(statistics, len(next(iter(samples.values()))))


def chains_diagnostics(statistics: Mapping[str, Tensor], num_chains: int) -> dict[str, dict[str, Any]]:
    """The part of :func:`diagnostics` that speaks of chains rather than of sites."""
    flags = statistics.get("diverging", torch.zeros(num_chains, 0, device="cpu"))
    table: dict[str, dict[str, Any]] = {}
    table["divergences"] = {f"chain {c}": row.nonzero().flatten().tolist() for c, row in enumerate(flags)}
    if (rates := statistics.get("acceptance_rate")) is not None:
        table["acceptance rate"] = {f"chain {c}": rate for c, rate in enumerate(rates.double().mean(1).tolist())}
    return table


def sites_table(samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor], counts: str) -> str:
    """One line for each site: worst and median R-hat and effective sample sizes; then divergences and acceptance.

    :param counts: how many draws there are, in words.
    """
    found = diagnostics(samples, statistics)
    columns = ["r_hat", "r_hat_median", "ess_bulk", "ess_bulk_median", "ess_tail", "ess_tail_median"]
    width = max(len("site"), *(len(site) for site in samples))
    lines = [f"{'site':<{width}}  entries  R-hat worst  median  ESS bulk worst    median  ESS tail worst    median"]
    for site, draws in samples.items():
        r, r_median, bulk, bulk_median, tail, tail_median = (found[site][column] for column in columns)
        lines.append(
            f"{site:<{width}}  {draws.shape[2:].numel():>7}  {r:>11.3f}  {r_median:>6.3f}  {bulk:>14.0f}  "
            f"{bulk_median:>8.0f}  {tail:>14.0f}  {tail_median:>8.0f}"
        )
    lines.append(counts)
    if (diverging := statistics.get("diverging")) is not None:
        lines[-1] += f"; {int(diverging.sum())} of {diverging.numel()} diverged"
    if (rates := statistics.get("acceptance_rate")) is not None:
        lines[-1] += f"; mean acceptance {float(rates.double().mean()):.2f}"
    parts = [found[site] for site in samples]
    if any(math.isnan(part["ess_bulk"]) and not math.isnan(part["ess_bulk_median"]) for part in parts):
        lines.append("nan: entries that never change, such as the zeros of a triangle, or aren't finite")
    if any(math.isinf(part["r_hat"]) for part in parts):
        lines.append("inf: entries that differ between chains and never change in one")
    return "\n".join(lines)


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
        statistics, flat = also_of_one(draws), draws.double().cpu().reshape(-1, shape.numel())
        numbers = [flat.mean(0), flat.std(0), *np.quantile(flat.numpy(), [0.5, low, high], axis=0)]
        numbers += [statistics.ess_bulk.flatten(), statistics.r_hat.flatten()]
        rows += zip(entry_names(site, shape), *(number.tolist() for number in numbers), strict=True)
    if not rows:
        return ""
    width = max(len(row[0]) for row in rows)
    heads = ("mean", "std", "median", f"{low:.1%}", f"{high:.1%}", "n_eff", "r_hat")
    lines = [" " * width + "".join(f"{head:>10}" for head in heads)]
    return "\n".join([*lines, *(f"{name:>{width}}" + "".join(f"{v:>10.2f}" for v in row) for name, *row in rows)])


def counts(rows: str, num_chains: int, num_samples: int) -> str:
    """The number of draws in words, such as ``4 chains of 100 draws``.

    :param rows: ``"chains"`` or ``"independent"``.
    """
    kind, of = ("row", "independent draws") if rows == "independent" else ("chain", "draws")
    return f"{num_chains} {kind}{'s' * (num_chains != 1)} of {num_samples} {of}"


def description(
    samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor], metadata: Mapping[str, Any], rows: str
) -> str:
    """The draws in words: their number, their sites with shapes, how they were made, their statistics."""
    num_chains, num_samples = next(iter(samples.values())).shape[:2]
    weights, width = sum(v.shape[2:].numel() for v in samples.values()), max(map(len, samples))
    alone = rows == "independent" and num_chains == 1
    held = f"{num_samples} independent draws" if alone else counts(rows, num_chains, num_samples)
    maker = f", by {metadata['kernel']}" if "kernel" in metadata else ""
    lines = [f"Posterior({held}, {weights} weight{'' if weights == 1 else 's'}{maker})"]
    lines += [f"  {site:<{width}}  {tuple(value.shape[2:])}" for site, value in samples.items()]
    more = {"chosen": metadata.get("chosen"), "statistics": ", ".join(statistics)}
    return "\n".join([*lines, *(f"  {name}: {text}" for name, text in more.items() if text)])
