"""Costs of pairs of units that don't depend on where other units are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.alignment.costs.protocol import MatchCost, Matched
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group, group_of


class TableCost(MatchCost):
    """A matrix of scores for each set of units: the assignment of every set is optimal at once.

    >>> def cost(sources, reference, group):
    ...     distance = torch.cdist(reference["w"], sources["w"])  # rows of w are the units
    ...     return ps.alignment.TableCost(group, {"hidden": -distance})
    >>> group = ps.Group.declare({"w": ("hidden", None)}, {"w": torch.zeros(3, 2)})
    >>> reference = {"w": torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])}
    >>> ps.align({"w": reference["w"][[2, 0, 1]]}, reference, group, cost=cost).element["hidden"].tolist()
    [1, 2, 0]

    The cost of a match is minus the sum of its scores.

    :param group: the units.
    :param tables: name of the units -> ``(B, count, count)``, the score of each unit of the reference (rows) with each
        unit of every source, counted through all copies. More is better.
    :param signed: name of the units -> of which units, they or riders of theirs, the sign is that of the score. A
        match is as good as the score is far from zero.
    """

    def __init__(self, group: Group, tables: Mapping[str, Tensor], signed: Mapping[str, str] | None = None):
        self.group = group = group_of(group)
        self._names = group.names("permute")
        self._tables = {name: _checked(name, tables, group[name].count) for name in self._names}
        example = next(iter(self._tables.values()), torch.zeros(1, 1, 1, device="cpu"))
        self.batch, self.device = len(example), example.device
        self.parts = {name: [self._names.index(name)] if name in self._names else [] for name in group.units}
        self._signed = dict(signed or {})

    def pairs(self, name: str, element: Element, rows: Tensor, known: Collection[str]) -> Tensor:
        units, shape = self.group[name], element.batch_shape
        table = self._of(name, rows).unflatten(2, (units.copies, units.size)).unflatten(1, (units.copies, units.size))
        copies = torch.arange(units.copies, device=table.device).expand(*shape, -1)
        if units.parent is not None:
            copies = element.unit_index(units.parent).expand(*shape, -1)
        table = table.permute(0, 1, 3, 2, 4).expand(*shape, *[units.copies] * 2, *[units.size] * 2)
        index = copies[..., None, None, None].expand(*shape, units.copies, 1, units.size, units.size)
        found = table.gather(-3, index).squeeze(-3)
        return found.abs() if name in self._signed else found

    def matched(self, name: str, element: Element, rows: Tensor, known: Collection[str]) -> Matched:
        score = torch.zeros(*element.batch_shape, self.group[name].count, dtype=torch.float64, device=self.device)
        pulls = {}
        if name in self._names:
            score = self._in_place(name, element, rows)
            if name in self._signed:
                pulls, score = {self._signed[name]: score}, score.abs()
        for child in self.group.children(name):
            if child in self._names:
                inside = self.matched(child, element, rows, known).score
                score = score + inside.unflatten(-1, (-1, self.group[child].size)).sum(-1)
        return Matched(score, pulls)

    def costs(self, element: Element | None, rows: Tensor, parts: Sequence[int] | None = None) -> Tensor:
        element = self.group.identity((len(rows),), self.device) if element is None else element
        columns = []
        for part in range(len(self._names)) if parts is None else parts:
            name = self._names[part]
            score = self._in_place(name, element, rows)
            if name in self._signed:
                sign = element.signs[self._signed[name]].flatten(len(element.batch_shape))
                score = score * sign.gather(-1, element.unit_index(name))
            columns.append(-score.sum(-1).cpu())
        return torch.stack(columns, -1) if columns else torch.zeros(len(rows), 0, dtype=torch.float64, device="cpu")

    def riders(self, name: str) -> tuple[str, ...]:
        return tuple({self._signed[name]} - {name}) if name in self._signed else ()

    def _in_place(self, name: str, element: Element, rows: Tensor) -> Tensor:
        index = element.unit_index(name)
        table = self._of(name, rows).expand(*element.batch_shape, *[index.shape[-1]] * 2)
        return table.gather(-1, index.expand(*element.batch_shape, -1).unsqueeze(-1)).squeeze(-1)

    def _of(self, name: str, rows: Tensor) -> Tensor:
        return self._tables[name][rows.to(self.device)]


def _checked(name: str, tables: Mapping[str, Tensor], count: int) -> Tensor:
    given = arguments.mapping("tables", tables, "name of units -> scores")
    if name not in given:
        raise ValueError(f"tables holds no scores of {name!r}; it holds {list(given)}")
    value = arguments.tensor(f"tables[{name!r}]", given[name])
    if value.dim() != 3 or value.shape[1:] != (count, count):
        raise ValueError(
            f"tables[{name!r}] has shape {tuple(value.shape)}; it must be (sources, {count}, {count}), the units of "
            "all copies counted through"
        )
    if not bool(torch.isfinite(value).all()):
        raise ValueError(f"tables[{name!r}] holds NaN or infinite scores")
    return value.double()
