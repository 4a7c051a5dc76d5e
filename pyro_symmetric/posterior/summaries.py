"""Summaries of draws, as data frames of pandas."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from torch import Tensor

from pyro_symmetric.arguments import Names
from pyro_symmetric.posterior.statistics import ChainStatistics, chain_statistics
from pyro_symmetric.posterior.tables import HEAD, html_table, site_row, table
from pyro_symmetric.weights import Tensors, map_values

MAX_ENTRIES_SHOWN = 32  # of a site
MOST_DECIMALS = 6  # smaller numbers have exponents
OF_CHAINS = ["n_eff", "r_hat"]


class Summary(pd.DataFrame):
    """A row for each entry of the smaller sites: mean, standard deviation, quantiles
    and, of chains, ``n_eff`` and ``r_hat``.

    Printed, it has a line for each site, and remarks, too. Copies and selections are
    plain data frames.

    >>> draws = {"w": torch.zeros(4, 50, 2) + torch.tensor([1.0, 2.0])}
    >>> ps.summary(draws, None)["mean"].to_dict()
    {'w[0]': 1.0, 'w[1]': 2.0}

    :ivar sites: site -> the statistics of its chains; empty for independent draws.
    :ivar lead: what was done to the draws, in lines above the table.
    :ivar counted: the number of draws, in a line below.
    """

    _metadata: ClassVar = ["sites", "lead", "counted"]  # attributes, not columns
    sites: Mapping[str, ChainStatistics]
    lead: Sequence[str]
    counted: str

    @classmethod
    def of(
        cls, samples: Tensors, prob: float, chains: bool, lead: Sequence[str], end: str
    ) -> Summary:
        """Summarise draws ``(chains, draws, *site_shape)`` by site.

        :param prob: probability of the interval between quantiles.
        """
        sites = {}
        if chains:
            sites = map_values(chain_statistics, samples)
        low = (1 - prob) / 2
        high = (1 + prob) / 2
        heads = ["mean", "std", "median", f"{low:.1%}", f"{high:.1%}"]
        rows = dict[str, list[float]]()
        for site, draws in samples.items():
            if draws.numel() and draws.shape[2:].numel() <= MAX_ENTRIES_SHOWN:
                rows |= _entry_rows(site, draws, (0.5, low, high), sites.get(site))
        frame = cls.from_dict(rows, orient="index", columns=heads + OF_CHAINS * chains)
        result = cls(frame)
        result.sites = sites
        result.lead = lead
        result.counted = end
        return result

    def __repr__(self) -> str:
        lines = [*self.lead, ""] if self.lead else []
        if len(self):
            cells = self._cells()
            width = max(map(len, self.index))
            column = max(10, 1 + max(len(cell) for row in cells for cell in row))
            for name, row in zip(
                ["", *self.index], [self.columns, *cells], strict=True
            ):
                text = "".join(f"{cell:>{column}}" for cell in row)
                lines.append(f"{name:>{width}}{text}")
        if self.sites:
            lines += [""] * bool(len(self)) + [table(self._site_rows())]
        return "\n".join([*lines, self.counted])

    def _repr_html_(self) -> str:
        entries = ""
        if len(self):
            entries = pd.DataFrame(self._cells(), self.index, self.columns).to_html()
        sites = html_table("", self._site_rows()) if self.sites else ""
        return html_table("", remarks=self.lead) + entries + sites + self.counted

    def _cells(self) -> list[list[str]]:
        """Return the numbers of the entries as text: two decimals, or as many as show
        two digits of a small standard deviation.
        """
        rows = []
        for numbers in self.to_dict("records"):
            style = ".2f"
            if 0 < (std := numbers.get("std", 0.0)) < 0.005:
                decimals = 1 - math.floor(math.log10(std))
                style = f".{decimals}f" if decimals <= MOST_DECIMALS else ".2e"
            cells = []
            for name, number in numbers.items():
                cells.append(format(number, ".2f" if name in OF_CHAINS else style))
            rows.append(cells)
        return rows

    def _site_rows(self) -> list[Names]:
        return [HEAD, *(site_row(*site) for site in self.sites.items())]


def _entry_rows(
    site: str, draws: Tensor, probs: Any, statistics: ChainStatistics | None
) -> dict[str, list[float]]:
    """Return the name of each entry of a site -> its row."""
    shape = draws.shape[2:]
    flat = draws.double().cpu().reshape(-1, shape.numel())
    numbers = [flat.mean(0), flat.std(0), *np.quantile(flat.numpy(), probs, axis=0)]
    if statistics is not None:
        numbers += [statistics.ess_bulk.flatten(), statistics.r_hat.flatten()]
    names = [f"{site}[{','.join(map(str, index))}]" for index in np.ndindex(*shape)]
    columns = (column.tolist() for column in numbers)
    rows = map(list, zip(*columns, strict=True))
    return dict(zip(names if shape else [site], rows, strict=True))
