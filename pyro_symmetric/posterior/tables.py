"""Draws ``(chains, draws, *site_shape)`` by site as ArviZ's tree; tables as text and
HTML.

Entries of a site are named as in Pyro's summaries, ``w[0,1]``, counted from 0.
Statistics are NaN where they are undefined: for sites without entries, fewer than 4
draws, and weights that are constant or not finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from pyro_symmetric._process import forked
from pyro_symmetric.arguments import Args, Names, Values, as_tensor, described
from pyro_symmetric.density.traced import Placed, PriorMessenger, placed, promoted
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.predict import predict
from pyro_symmetric.posterior.statistics import ChainStatistics
from pyro_symmetric.weights import ByName, Tensors, drop_names, map_values

if TYPE_CHECKING:
    import xarray

HEAD = (
    "site",
    "entries",
    "R-hat worst",
    "median",
    "ESS bulk worst",
    "median",
    "ESS tail worst",
    "median",
)


def table(rows: Sequence[Sequence[str]], left_aligned: Sequence[int] = (0,)) -> str:
    """Align rows of cells in columns; the columns ``left_aligned`` to the left, the
    others to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            f"{c:{'<' if i in left_aligned else '>'}{widths[i]}}"
            for i, c in enumerate(row)
        )
        for row in rows
    )
    return "\n".join(f"  {line}".rstrip() for line in lines)


def site_row(site: str, statistics: ChainStatistics) -> Names:
    """Format the row of a site under :data:`HEAD`: worst and median R-hat and effective
    sample sizes.
    """
    numbers = statistics.summary()
    r_hats = (f"{numbers[f'r_hat{kind}']:.3f}" for kind in ("", "_median"))
    sizes = (
        f"{numbers[f'ess_{part}{kind}']:,.0f}"
        for part in ("bulk", "tail")
        for kind in ("", "_median")
    )
    return (site, f"{statistics.r_hat.numel():,}", *r_hats, *sizes)


def html_table(
    title: str, rows: Sequence[Sequence[Any]] = (), remarks: Sequence[str] = ()
) -> str:
    """Format a title, rows of which the first is the head, and remarks as HTML."""
    parts = [f"<b>{escape(title)}</b>"] if title else []
    if rows:
        lines = []
        for number, row in enumerate(rows):
            tag = "td" if number else "th"
            cells = (f"<{tag}>{escape(str(cell))}</{tag}>" for cell in row)
            lines.append(f"<tr>{''.join(cells)}</tr>")
        parts.append(f"<table>{''.join(lines)}</table>")
    return "".join([*parts, *(f"<div>{escape(remark)}</div>" for remark in remarks)])


# ArviZ's tree -------------------------------------------------------------------------


def to_arviz(
    posterior: Any,
    dims: Mapping[str, list[str]] | None = None,
    coords: Values | None = None,
    *,
    log_likelihood: bool | Args = False,
    posterior_predictive: bool | Args = False,
) -> xarray.DataTree:
    """Convert to an ArviZ ``DataTree``, for ``arviz_stats``: ``summary``, ``ess``,
    ``bfmi``, ``loo``, ``compare``.

    >>> model, x, y = (
    ...     ps.BayesianModel(nn.Linear(2, 1), likelihood="gaussian"),
    ...     torch.randn(5, 2),
    ...     torch.randn(5),
    ... )
    >>> draws = {name: prior.sample((4, 50)) for name, prior in model.priors().items()}
    >>> tree = ps.Posterior(draws, kind="chains").to_arviz(log_likelihood=(model, x, y))
    >>> sorted(tree.children)
    ['log_likelihood', 'observed_data', 'posterior']
    >>> dict(tree["log_likelihood"].sizes)
    {'chain': 4, 'draw': 50, 'row': 5}

    :param dims: site -> names of its axes; by default ``<site>_dim_<k>``, and ``row``
        for rows of data.
    :param coords: name of an axis -> its labels.
    :param log_likelihood: adds that of every row, for ``arviz_stats.loo``: ``(model,
        *args)``, or ``True`` for the model and arguments that the posterior was drawn
        from.
    :param posterior_predictive: adds draws of targets, likewise; leave targets out to
        predict at other inputs.
    """
    import arviz_base  # takes a second, with xarray and pandas

    groups = {"posterior": posterior.samples, "sample_stats": posterior.statistics}
    predicted = {}
    if log_likelihood is not False:
        call = _call(posterior, log_likelihood, "log_likelihood")
        log_probs = _predicted(posterior, call, "log_likelihood")
        predicted["log_likelihood"] = log_probs
        groups["observed_data"] = _observed(posterior, call, log_probs)
    if posterior_predictive is not False:
        call = _call(posterior, posterior_predictive, "posterior_predictive")
        if isinstance(call.model, BayesianModel):
            call = Placed(call.model, call.args[:1], drop_names(call.kwargs, {"y"}))
        draws = _predicted(posterior, call, "samples")
        if not isinstance(draws, dict):
            draws = {"y": call.model.likelihood.targets(draws)}
        predicted["posterior_predictive"] = draws
    names: dict[str, list[str]] = {}
    chains = (posterior.num_chains, posterior.num_samples)
    for group, values in predicted.items():
        # if all have as many
        row = (
            ["row"] if len({value.shape[1:2] for value in values.values()}) == 1 else []
        )
        for site, value in values.items():
            axes = [f"{site}_dim_{k}" for k in range(value.dim() - 1)]
            names.setdefault(site, [*row, *axes[len(row) :]] if axes else [])
        groups[group] = map_values(lambda value: value.unflatten(0, chains), values)
    arrays = {
        group: map_values(_array, values) for group, values in groups.items() if values
    }
    attributes = {
        "/": {
            "metadata": metadata_as_json(posterior.metadata),
            "inference_library": "pyro_symmetric",
        }
    }
    dims = {**names, **(dims or {})}
    # ArviZ's check would take many short chains for swapped axes.
    return arviz_base.from_dict(
        arrays, dims=dims, coords=coords, check_conventions=False, attrs=attributes
    )


def metadata_as_json(metadata: Values) -> str:
    """Convert metadata to JSON; raise ``ValueError`` naming an entry that can't be."""
    for name, value in metadata.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"metadata[{name!r}] is {described(value)}, which JSON can't represent "
                f"({error}); it must consist of dictionaries, lists, strings and "
                "numbers"
            ) from error
    return json.dumps(dict(metadata))


def _array(value: Tensor) -> np.ndarray:
    """Convert a tensor to a NumPy array; bfloat16, which NumPy lacks, to float32."""
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _call(posterior: Any, value: bool | Args, name: str) -> Placed:
    """Return the model and its arguments, as the value of the argument ``name``
    specifies them.
    """
    if isinstance(value, tuple) and value:
        return Placed(value[0], value[1:], {})
    if value is not True:
        raise TypeError(
            f"{name} is {described(value)}; it must be True or a tuple (model, *args)"
        )
    if posterior.source is None:
        raise ValueError(
            f"{name}=True needs the model, which this posterior doesn't know; pass "
            f"{name}=(model, *args)"
        )
    return Placed(*posterior.source[:3])


def _predicted(posterior: Any, call: Placed, kind: Any) -> Any:
    return predict(posterior, call.model, *call.args, kind=kind, **call.kwargs)


def _observed(posterior: Any, call: Placed, sites: Tensors) -> ByName:
    dtype = promoted(list(posterior.samples.values()))
    device = posterior.source and posterior.source.device
    model, args, kwargs = placed(*call, device, dtype)
    # the trace draws latent sites, which aren't read
    with (
        forked(None, device),
        torch.no_grad(),
        poutine.block(),
        PriorMessenger(device, dtype),
    ):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return {site: as_tensor(trace.nodes[site]["value"]) for site in sites}
