"""Sites with some of their axes flattened, so that units may lie along several axes as along one.

The inputs of one group of a grouped convolution are columns of the kernel (axis 1), but in the rows (axis 0) of that
group only: no single axis says so, while axes 0 and 1, flattened, do. A group that has such an axis on a site looks at
the whole site in this view, and what else it knows about that site is lifted to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from pyro_symmetric.groups.units import Axis


class View:
    """One site with runs of its axes flattened.

    :param shape: its own shape.
    :param start: for each of its axes, the first axis of the run that it belongs to.
    """

    def __init__(self, shape: torch.Size, start: Sequence[int]):
        self.runs = {first: [dim for dim, own in enumerate(start) if own == first] for first in sorted(set(start))}
        self.old = shape
        self.start = start
        self.shape = torch.Size(math.prod(shape[dim] for dim in run) for run in self.runs.values())

    def lift(self, axis: Axis) -> Axis:
        """An axis of the site as one of the view: its units occupy all positions along the rest of the run."""
        first = self.start[axis.dim]
        run, end = self.runs[first], axis.dim + axis.span
        before = math.prod(self.old[dim] for dim in run if dim < axis.dim)
        own = math.prod(self.old[axis.dim : end])
        after = math.prod(self.old[dim] for dim in run if dim >= end)
        index = axis.index.unsqueeze(1) * after + torch.arange(after, device=axis.index.device)[:, None]
        index = index + own * after * torch.arange(before, device=axis.index.device)[:, None, None, None]
        return replace(axis, dim=list(self.runs).index(first), index=index.flatten(0, 2).contiguous(), span=1)


def views_of(spans: Iterable[tuple[str, int, int]], site_shapes: Mapping[str, torch.Size]) -> dict[str, View]:
    """The view of each site on which some axis spans more than one."""
    starts: dict[str, list[int]] = {}
    for site, dim, span in sorted(spans):
        if site in site_shapes:
            start = starts.setdefault(site, list(range(len(site_shapes[site]))))
            run = set(start[dim : dim + span])
            starts[site] = [min(run) if first in run else first for first in start]
    return {site: View(site_shapes[site], start) for site, start in starts.items()}
