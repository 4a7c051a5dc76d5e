"""Draws ``(chains, draws, *site_shape)`` by site, and what is known of them, as tables and as ArviZ's tree.

Entries of a site are named as in Pyro's summaries, ``w[0,1]``, counted from 0. Numbers that can't be told are NaN: of
sites without entries, of fewer than 4 draws, of weights that are constant or not finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from pyro_symmetric._process import LOCK
from pyro_symmetric.arguments import as_tensor, described
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.predict import predict
from pyro_symmetric.posterior.statistics import ChainStatistics, chain_statistics
from pyro_symmetric.traced import Drawn, placed, promoted

if TYPE_CHECKING:
    import xarray

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


# ArviZ's tree -------------------------------------------------------------------------------------------------------


def to_arviz(
    posterior: Any,
    dims: Mapping[str, list[str]] | None = None,
    coords: Mapping[str, Any] | None = None,
    *,
    log_likelihood: bool | tuple[Any, ...] = False,
    posterior_predictive: bool | tuple[Any, ...] = False,
) -> xarray.DataTree:
    """An ArviZ ``DataTree``, as ``arviz_stats`` takes it: ``summary``, ``ess``, ``bfmi``, ``loo``, ``compare``.

    >>> model, x, y = ps.BayesianModel(nn.Linear(2, 1), likelihood="gaussian"), torch.randn(5, 2), torch.randn(5)
    >>> draws = {name: prior.sample((4, 50)) for name, prior in model.priors().items()}
    >>> tree = ps.Posterior(draws, kind="chains").to_arviz(log_likelihood=(model, x, y))
    >>> sorted(tree.children), dict(tree["log_likelihood"].sizes)
    (['log_likelihood', 'observed_data', 'posterior'], {'chain': 4, 'draw': 50, 'row': 5})

    :param dims: site -> names of its axes; by default ``<site>_dim_<k>``, and of an axis of rows ``row``.
    :param coords: name of an axis -> its labels.
    :param log_likelihood: of every row, as ``arviz_stats.loo`` needs it: the model and what it is called with, or
        ``True`` for what the posterior was drawn from.
    :param posterior_predictive: draws of targets, likewise; leave targets out to predict other inputs.
    """
    import arviz_base  # which takes a second to load, with xarray and pandas

    groups = {"posterior": posterior.samples, "sample_stats": posterior.statistics}
    predicted = {}
    if log_likelihood is not False:
        model, args, kwargs = _call(posterior, log_likelihood, "log_likelihood")
        predicted["log_likelihood"] = predict(posterior, model, *args, kind="log_likelihood", **kwargs)
        groups["observed_data"] = _observed(posterior, model, args, kwargs, predicted["log_likelihood"])
    if posterior_predictive is not False:
        model, args, kwargs = _call(posterior, posterior_predictive, "posterior_predictive")
        if isinstance(model, BayesianModel):
            args, kwargs = args[:1], {name: value for name, value in kwargs.items() if name != "y"}
        drawn = predict(posterior, model, *args, kind="samples", **kwargs)
        predicted["posterior_predictive"] = drawn if isinstance(drawn, dict) else {"y": model.likelihood.targets(drawn)}
    names: dict[str, list[str]] = {}
    chains = (posterior.num_chains, posterior.num_samples)
    for group, values in predicted.items():
        row = ["row"] if len({value.shape[1:2] for value in values.values()}) == 1 else []  # one name, one length
        for site, value in values.items():
            own = [f"{site}_dim_{k}" for k in range(value.dim() - 1)]
            names.setdefault(site, [*row, *own[len(row) :]] if own else [])
        groups[group] = {site: value.unflatten(0, chains) for site, value in values.items()}
    arrays = {group: {s: _array(v) for s, v in values.items()} for group, values in groups.items() if values}
    # Many short chains are what a vectorised sampler makes; ArviZ's check takes them for swapped axes.
    attributes = {"/": {"metadata": json.dumps(posterior.metadata), "inference_library": "pyro_symmetric"}}
    dims = {**names, **(dims or {})}
    return arviz_base.from_dict(arrays, dims=dims, coords=coords, check_conventions=False, attrs=attributes)


def _array(value: Tensor) -> np.ndarray:
    """A tensor as an array of NumPy's, which knows no bfloat16."""
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _call(posterior: Any, asked: bool | tuple[Any, ...], name: str) -> tuple[Any, tuple[Any, ...], Mapping[str, Any]]:
    """The model and what it is called with."""
    if isinstance(asked, tuple) and asked:
        return asked[0], asked[1:], {}
    if asked is not True:
        raise TypeError(f"{name} is {described(asked)}; it must be True or a tuple (model, *args)")
    if posterior.source is None:
        raise ValueError(f"{name}=True needs the model, which this posterior doesn't know; pass {name}=(model, *args)")
    return posterior.source.model, posterior.source.args, posterior.source.kwargs


def _observed(
    posterior: Any, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], sites: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    dtype, device = promoted(list(posterior.samples.values())), posterior.source and posterior.source.device
    model, args, kwargs = placed(model, args, dict(kwargs), device, dtype)
    with LOCK, torch.no_grad(), poutine.block(), Drawn(device, dtype):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return {site: as_tensor(trace.nodes[site]["value"]) for site in sites}
