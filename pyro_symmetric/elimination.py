"""Sums over discrete values, dimension by dimension, in log-space; and draws from what was summed.

Tables are Pyro's packed tensors: ``_pyro_dims`` names each dimension by a letter. Whatever order values are summed in,
the table of a dimension at its turn, seen as a function of that dimension alone, is the log of its probabilities given
the dimensions that are summed later. So one pass backwards draws all of them from their joint distribution: forward
filtering and backward sampling (Carter & Kohn 1994, Biometrika 81), for any graph of sites.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from pyro.ops.rings import LogRing
from torch import Tensor


class Elimination(LogRing):
    """Sums of products of tables, in log-space, for :func:`pyro.ops.contract.contract_to_tensor`."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: list[tuple[str, Any]] = []  # each dimension that was summed, and the table that it was summed of

    def sumproduct(self, terms: Sequence[Any], dims: Any) -> Any:
        terms = list(terms)
        sizes: dict[str, int] = {}
        for term in terms:
            sizes.update(zip(term._pyro_dims, term.shape, strict=True))
        order = _order(tuple(term._pyro_dims for term in terms), frozenset(dims), tuple(sorted(sizes.items())))
        for dim in order:
            met = [term for term in terms if dim in term._pyro_dims]
            table = _added(met)
            self._tables.append((dim, table))
            place = table._pyro_dims.index(dim)
            summed: Any = table.logsumexp(place)
            summed._pyro_dims = table._pyro_dims.replace(dim, "")
            terms = [term for term in terms if dim not in term._pyro_dims] + [summed]
        return _added(terms)

    def draw(self) -> dict[str, Tensor]:
        """Values of all dimensions that were summed, from their joint distribution.

        :return: dimension -> index of its value, a packed tensor over plates' dimensions.
        """
        drawn: dict[str, Tensor] = {}
        for dim, table in reversed(self._tables):
            for other in (own for own in table._pyro_dims if own in drawn):
                table = _at(table, other, drawn[other])
            place = table._pyro_dims.index(dim)
            uniform = torch.rand_like(table).clamp(min=torch.finfo(table.dtype).tiny)  # 0 would rule a value out
            gumbel = -torch.log(-torch.log(uniform))
            index: Any = (table + gumbel).argmax(place)  # is k with the probability of k
            index._pyro_dims = table._pyro_dims.replace(dim, "")
            drawn[dim] = index
        return drawn


@functools.lru_cache(maxsize=256)
def _order(terms: tuple[str, ...], dims: frozenset[str], sizes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """In which order to sum dimensions out: at each step the one that leaves the smallest table."""
    size, tables, order = dict(sizes), [frozenset(term) for term in terms], []
    left = sorted(dims & set(size))

    def table(dim: str) -> frozenset[str]:
        return frozenset().union(*(table for table in tables if dim in table))

    def entries(dim: str) -> int:
        count = 1
        for other in table(dim):
            count *= size[other]
        return count

    while left:
        best = min(left, key=entries)
        joined = table(best)
        tables = [table for table in tables if best not in table] + [joined - {best}]
        left.remove(best)
        order.append(best)
    return tuple(order)


def _added(terms: Sequence[Any]) -> Any:
    """The sum of packed tables, over the union of their dimensions."""
    dims = "".join(sorted(set("".join(term._pyro_dims for term in terms))))
    total: Any = sum(_aligned(term, dims) for term in terms)
    if total is terms[0]:
        total = total.clone()
    total._pyro_dims = dims
    return total


def _aligned(term: Any, dims: str) -> Tensor:
    """A packed table as one over more dimensions."""
    own: str = term._pyro_dims
    kept = [dim for dim in dims if dim in own]
    ordered = term.permute([own.index(dim) for dim in kept])
    sizes = dict(zip(kept, ordered.shape, strict=True))
    return ordered.reshape([sizes.get(dim, 1) for dim in dims])


def _at(table: Any, dim: str, index: Any) -> Any:
    """A packed table at given indices of one dimension, over its other dimensions and those of the indices."""
    dims = "".join(sorted(set(table._pyro_dims + index._pyro_dims)))
    place = dims.index(dim)
    taken: Any = torch.take_along_dim(_aligned(table, dims), _aligned(index, dims), place).squeeze(place)
    taken._pyro_dims = dims.replace(dim, "")
    return taken
