"""A posterior as ArviZ's ``DataTree``: groups and the names of their axes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyro import poutine
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric._process import LOCK
from pyro_symmetric.arguments import as_tensor, described
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.posterior.predict import predict
from pyro_symmetric.traced import Placement, placed, promoted

if TYPE_CHECKING:
    import xarray


def to_arviz(
    posterior: Any,
    dims: Mapping[str, list[str]] | None,
    coords: Mapping[str, Any] | None,
    log_likelihood: bool | tuple[Any, ...],
    posterior_predictive: bool | tuple[Any, ...],
) -> xarray.DataTree:
    """The tree of a posterior; see its method ``to_arviz``."""
    import arviz_base  # which takes a second to load, with xarray and pandas

    def by_chain(values: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        return {s: array(v.unflatten(0, (posterior.num_chains, posterior.num_samples))) for s, v in values.items()}

    groups = {"posterior": {site: array(value) for site, value in posterior.samples.items()}}
    if posterior.statistics:
        groups["sample_stats"] = {name: array(value) for name, value in posterior.statistics.items()}
    if log_likelihood is not False:
        model, args, kwargs = _call(posterior, log_likelihood, "log_likelihood")
        values = predict(posterior, model, *args, kind="log_likelihood", **kwargs)
        groups["log_likelihood"] = by_chain(values)
        groups["observed_data"] = _observed(posterior, model, args, kwargs, values)
    if posterior_predictive is not False:
        model, args, kwargs = _call(posterior, posterior_predictive, "posterior_predictive")
        if isinstance(model, BayesianModel):
            args, kwargs = args[:1], {name: value for name, value in kwargs.items() if name != "y"}
        drawn = predict(posterior, model, *args, kind="samples", **kwargs)
        drawn = drawn if isinstance(drawn, dict) else {"y": model.likelihood.targets(drawn)}
        groups["posterior_predictive"] = by_chain(drawn)
    names: dict[str, list[str]] = {}
    for arrays in (groups.get(group, {}) for group in ("log_likelihood", "posterior_predictive")):
        row = ["row"] if len({held.shape[2:3] for held in arrays.values()}) == 1 else []  # one name, one length
        for site, held in arrays.items():
            own = [f"{site}_dim_{k}" for k in range(held.ndim - 2)]
            names.setdefault(site, [*row, *own[len(row) :]] if own else [])
    for site, axes in (dims or {}).items():
        arguments.one_of("a key of dims", site, {name for group in groups.values() for name in group})
        if site in posterior.samples and len(axes) != posterior.samples[site].dim() - 2:
            raise ValueError(f"dims[{site!r}] is {axes}; it must name the axes of {tuple(posterior.site_shapes[site])}")
    # Many short chains are what a vectorised sampler makes; ArviZ's check takes them for swapped axes.
    attributes = {"/": {"metadata": json.dumps(posterior.metadata), "inference_library": "pyro_symmetric"}}
    dims = {**names, **(dims or {})}
    return arviz_base.from_dict(groups, dims=dims, coords=coords, check_conventions=False, attrs=attributes)


def array(value: Tensor) -> np.ndarray:
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
) -> dict[str, np.ndarray]:
    dtype, device = promoted(list(posterior.samples.values())), posterior.source and posterior.source.device
    model, args, kwargs = placed(model, args, dict(kwargs), device, dtype)
    with LOCK, torch.no_grad(), poutine.block(), Placement(device, dtype):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return {site: array(as_tensor(trace.nodes[site]["value"])) for site in sites}
