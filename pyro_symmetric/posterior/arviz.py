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
from pyro_symmetric._process import PYRO
from pyro_symmetric.calls import described, did_you_mean
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.placement import Placement, as_tensor, placed, promoted
from pyro_symmetric.posterior.draws import array
from pyro_symmetric.posterior.predict import pointwise_log_likelihood, predict
from pyro_symmetric.weights import Shapes

if TYPE_CHECKING:
    import xarray

ROW = "row"


def to_arviz(
    posterior: Any,
    dims: Mapping[str, list[str]] | None = None,
    coords: Mapping[str, Any] | None = None,
    *,
    log_likelihood: bool | tuple[Any, ...] = False,
    posterior_predictive: bool | tuple[Any, ...] = False,
) -> xarray.DataTree:
    """The tree of a posterior; see its method ``to_arviz``."""
    import arviz_base  # which takes a second to load, with xarray and pandas

    names = axis_names(posterior.site_shapes)
    for site, axes in (dims or {}).items():
        arguments.instance(f"dims[{site!r}]", axes, (list, tuple), "a list of names")
        if site in posterior.site_shapes and len(axes) != len(posterior.site_shapes[site]):
            shape = tuple(posterior.site_shapes[site])
            raise ValueError(f"dims[{site!r}] is {axes}; the site has shape {shape}: name each of its axes")
    groups: dict[str, dict[str, np.ndarray]]
    groups = {"posterior": {site: array(value) for site, value in posterior.samples.items()}}
    if posterior.statistics:
        groups["sample_stats"] = {name: array(value) for name, value in posterior.statistics.items()}
    if log_likelihood is not False:
        model, args, kwargs = _call(posterior, log_likelihood, "log_likelihood")
        values = pointwise_log_likelihood(posterior, model, *args, **kwargs)
        groups["log_likelihood"] = _by_chain(posterior, values)
        groups["observed_data"] = _observed(posterior, model, args, kwargs, values)
    if posterior_predictive is not False:
        model, args, kwargs = _call(posterior, posterior_predictive, "posterior_predictive")
        if isinstance(model, BayesianModel):
            args, kwargs = args[:1], {name: value for name, value in kwargs.items() if name != "y"}
        drawn = predict(posterior, model, *args, kind="samples", **kwargs)
        groups["posterior_predictive"] = _by_chain(
            posterior, drawn if isinstance(drawn, dict) else {"y": model.likelihood.targets(drawn)}
        )
    for group in ("log_likelihood", "posterior_predictive"):
        arrays = groups.get(group, {})
        row = ROW if len({held.shape[2:3] for held in arrays.values()}) == 1 else None  # one name, one length
        for site, held in arrays.items():
            own = [f"{site}_dim_{k}" for k in range(held.ndim - 2)]
            names.setdefault(site, [row or own[0], *own[1:]] if own else [])
    attributes = {"/": {"metadata": json.dumps(posterior.metadata), "inference_library": "pyro_symmetric"}}
    sites = {name for group in groups.values() for name in group}
    for name in dims or {}:
        if name not in sites:
            raise ValueError(f"dims has the key {name!r}; the tree holds {sorted(sites)}{did_you_mean(name, sites)}")
    # Many short chains are what a vectorised sampler makes; ArviZ's check takes them for swapped axes.
    return arviz_base.from_dict(
        groups, dims={**names, **(dims or {})}, coords=coords, check_conventions=False, attrs=attributes
    )


def axis_names(site_shapes: Shapes) -> dict[str, list[str]]:
    """Names of the axes of layers: ``l.out`` and ``l.in`` if ``l.weight`` has a bias ``l.bias`` of as many units."""
    names = {}
    for site, shape in site_shapes.items():
        layer, _, parameter = site.rpartition(".")
        bias = site_shapes.get(f"{layer}.bias")
        if not layer or parameter != "weight" or not shape or bias is None or bias != shape[:1]:
            continue
        names[f"{layer}.bias"] = [f"{layer}.out"]
        names[site] = [f"{layer}.out", f"{layer}.in", *(f"{layer}.kernel_{k}" for k in range(len(shape) - 2))]
        names[site] = names[site][: len(shape)]
    return names


# small steps --------------------------------------------------------------------------------------------------------


def _call(posterior: Any, asked: bool | tuple[Any, ...], name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model and what it is called with."""
    if isinstance(asked, tuple) and asked:
        return asked[0], asked[1:], {}
    if asked is not True:
        raise TypeError(
            f"{name} is {described(asked)}; it must be True or a tuple (model, *args), of which draws are made"
        )
    if not posterior.is_attached:
        raise ValueError(f"{name}=True needs the model, which this posterior doesn't know; pass {name}=(model, *args)")
    return posterior.model, posterior._args, posterior._kwargs


def _by_chain(posterior: Any, values: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    shape = (posterior.num_chains, posterior.num_samples)
    return {site: array(value.reshape(*shape, *value.shape[1:])) for site, value in values.items()}


def _observed(
    posterior: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sites: Mapping[str, Tensor]
) -> dict[str, np.ndarray]:
    dtype = promoted(list(posterior.samples.values()))
    model, args, kwargs = placed(model, args, kwargs, posterior.source_device, dtype)
    with PYRO, torch.no_grad(), poutine.block(), Placement(posterior.source_device, dtype):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return {site: array(as_tensor(trace.nodes[site]["value"])) for site in sites}
