"""Draws by chain and number, as tensors ``(chains, draws, ...)`` by name: their checks, and tables of them.

Tables name the entries of a site as posterior's and Pyro's summaries do: ``w[0,1]``, counted from 0.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_symmetric import arguments

if TYPE_CHECKING:
    import pandas

INDEX = ("chain", "draw")


class Metadata(dict[str, Any]):
    """Metadata of a run, which print short: of long lists the first entries."""

    _short = reprlib.Repr()
    _short.maxdict, _short.maxlist, _short.maxlevel, _short.maxstring = 40, 4, 1, 80

    def __repr__(self) -> str:
        return self._short.repr(dict(self))


def require_draws(samples: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
    """Check that all are real tensors of as many chains and draws as the first site.

    :raises ValueError: naming the entry that isn't.
    """
    first = next(iter(samples))
    shape: Any = getattr(samples[first], "shape", ())[:2]
    for kind, entries in (("samples", samples), ("statistics", statistics)):
        for name, value in entries.items():
            named = f"{kind}[{name!r}]"
            if not isinstance(value, Tensor) or value.dim() < 2:
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"{named} is of {found}; it must be a tensor (chains, draws, ...)")
            if value.is_complex():
                raise ValueError(f"{named} is of {value.dtype}; it must be real: keep .real and .imag as two sites")
            if value.shape[:2] != shape or (kind == "statistics" and value.dim() != 2):
                raise ValueError(
                    f"{named} has shape {tuple(value.shape)}, but samples[{first!r}] holds "
                    f"{shape[0]} chains of {shape[1]} draws"
                )


def in_chains(kind: str, entries: Mapping[str, Tensor], num_chains: int) -> dict[str, Tensor]:
    """Flat draws ``(S, ...)``, cut into chains of ``S / num_chains`` consecutive ones.

    :param kind: what messages call the entries.
    :raises ValueError: naming the entry that can't be cut.
    """
    for name, value in entries.items():
        if arguments.tensor(f"{kind}[{name!r}]", value).dim() < 1 or len(value) % num_chains:
            raise ValueError(
                f"{kind}[{name!r}] has shape {tuple(value.shape)}, which can't be cut into num_chains={num_chains} "
                "chains of equal length along its first axis"
            )
    return {name: v.reshape(num_chains, len(v) // num_chains, *v.shape[1:]) for name, v in entries.items()}


def beside(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The chains of several posteriors, one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def redrawn(draws: Mapping[str, Tensor], number: int, axis: int) -> dict[str, Tensor]:
    """As many draws along an axis, chosen with replacement, the same ones of every site."""
    count = next(iter(draws.values())).shape[axis]
    if not count:
        raise ValueError(f"num_samples is {number}, but the posterior holds no draws to draw from")
    index = torch.randint(count, (number,), device="cpu")
    return {site: value.index_select(axis, index.to(value.device)) for site, value in draws.items()}


def entry_names(site: str, shape: torch.Size) -> list[str]:
    """The names of a site's entries, in the order in which a tensor is flattened; a scalar site's is its own."""
    return [f"{site}[{','.join(map(str, place))}]" for place in np.ndindex(*shape)] if shape else [site]


def array(value: Tensor) -> np.ndarray:
    """A tensor as an array of NumPy's, which knows no bfloat16."""
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def wide_frame(draws: Mapping[str, Tensor]) -> pandas.DataFrame:
    """A row for each draw, indexed by chain and draw, and a column for each entry."""
    import pandas  # which takes half a second to load

    sizes = next(iter(draws.values())).shape[:2]
    index = pandas.MultiIndex.from_product([range(size) for size in sizes], names=INDEX)
    blocks = [
        pandas.DataFrame(
            array(value.reshape(len(index), value.shape[2:].numel())), index, entry_names(site, value.shape[2:])
        )
        for site, value in draws.items()
    ]
    return pandas.concat(blocks, axis=1)


def long_frame(draws: Mapping[str, Tensor]) -> pandas.DataFrame:
    """A row for each number: chain, draw, site, entry and value; the entries of a draw stand together."""
    import pandas

    arrays = {site: array(value).reshape(*value.shape[:2], value.shape[2:].numel()) for site, value in draws.items()}
    names = {site: entry_names(site, value.shape[2:]) for site, value in draws.items()}
    entries = [name for own in names.values() for name in own]
    dtype, first, parts = np.result_type(*arrays.values()), 0, []
    for number, (site, values) in enumerate(arrays.items()):
        chain, draw, entry = (places.reshape(-1) for places in np.indices(values.shape))
        columns = {
            "chain": chain,
            "draw": draw,
            "site": pandas.Categorical.from_codes(np.full(values.size, number), list(arrays)),
            "entry": pandas.Categorical.from_codes(first + entry, entries),
            "value": values.reshape(-1).astype(dtype),
        }
        parts.append(pandas.DataFrame(columns))
        first += len(names[site])
    return pandas.concat(parts, ignore_index=True)
