"""The log-density of any Pyro model, for many chains at once: traced, with its sites conditioned, under vmap."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import PYRO, running_pyro
from pyro_symmetric.calls import WRAP, explaining, name_of
from pyro_symmetric.mcmc.density.batch_scale import warn_of_batch_scale, warn_of_plate_scale
from pyro_symmetric.mcmc.density.layout import Layout
from pyro_symmetric.mcmc.density.targets import ROWS, Rows, require_batch_size, unchecked
from pyro_symmetric.placement import Placement, promoted
from pyro_symmetric.weights import Weights


class TracedTarget:
    """Any Pyro model: traced, with its sites conditioned, under :func:`torch.func.vmap`."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_size: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.model, self.args, self.kwargs = model, args, kwargs
        self._placement = Placement(device, dtype)
        self._data_rows = 0  # with mini-batches cut from the arguments: how many rows their tensors have
        if batch_size is not None:
            self._data_rows = _rows_of(args, kwargs)
            require_batch_size(batch_size, self._data_rows)
        rows = None if batch_size is None else {ROWS: torch.arange(batch_size)}
        with PYRO, explaining(model, args, kwargs):
            trace = self._prior_trace(rows)
        self.sites: Mapping[str, Distribution] = _latent_sites(trace)
        if not self.sites:
            raise ValueError(_nothing_to_sample(model, trace))
        observed = _observed_sites(trace)
        counts = [site["fn"].batch_shape.numel() * torch.as_tensor(site["scale"]).double().mean() for site in observed]
        self.num_rows = max((round(float(count)) for count in counts), default=0)
        self.row_counts = _subsampled_plates(trace, given_is_right=batch_size is not None)
        if batch_size is None and self.row_counts:
            warn_of_plate_scale(observed)
        if batch_size is not None and batch_size < self._data_rows:
            warn_of_batch_scale(observed, batch_size, self._data_rows)
            self.row_counts = {**self.row_counts, ROWS: (self._data_rows, batch_size)}
        self._require_fixed_layout()

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        with running_pyro():
            if rows is None:
                return torch.func.vmap(lambda own: self._log_joint(own, None))(weights)
            return torch.func.vmap(self._log_joint)(weights, dict(rows))

    def _log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        args, kwargs = self._cut(rows)
        plates = {name: index for name, index in (rows or {}).items() if name != ROWS}
        model = _Unchecked()(poutine.condition(self.model, data={**weights, **plates}))
        return torch.as_tensor(poutine.trace(model).get_trace(*args, **kwargs).log_prob_sum())

    def _cut(self, rows: Rows | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, or the mini-batch's rows of those that hold data."""
        if rows is None or ROWS not in rows:
            return self.args, self.kwargs

        def cut(value: Any) -> Any:
            holds_data = isinstance(value, Tensor) and value.dim() > 0 and len(value) == self._data_rows
            return value[rows[ROWS].to(value.device)] if holds_data else value

        return tree_map(cut, self.args), tree_map(cut, self.kwargs)

    def _prior_trace(self, rows: Rows | None = None) -> poutine.Trace:
        args, kwargs = self._cut(rows)
        with PYRO, torch.no_grad():
            return poutine.trace(self._placement(self.model)).get_trace(*args, **kwargs)

    def prior_weights(self, num_chains: int) -> Weights:
        # A model draws as it runs, one prior draw a run, and drawing inside vmap fails for many distributions. Starting
        # points are drawn once a sampling run, so this loop costs milliseconds.
        traces = [self._prior_trace() for _ in range(num_chains)]
        return {site: torch.stack([_value(trace, site) for trace in traces]) for site in self.sites}

    def arguments(self) -> Mapping[str, Any]:
        try:
            return dict(inspect.signature(self.model).bind(*self.args, **self.kwargs).arguments)
        except (TypeError, ValueError):  # whose names can't be told
            return {**{str(i): value for i, value in enumerate(self.args)}, **self.kwargs}

    def _require_fixed_layout(self) -> None:
        """:raises ValueError: if sites, shapes or supports depend on what was drawn; two draws are compared."""
        trace, layout = self._prior_trace(), Layout.of(self.sites)
        again = _latent_sites(trace)
        if set(again) != set(self.sites):
            changed = sorted(set(again) ^ set(self.sites))
            raise ValueError(
                f"the sites {changed} exist in some runs of the model only; a sampler needs the same ones in all"
            )
        other = Layout.of(again)
        like = [value for value in (_value(trace, site) for site in again) if value.is_floating_point()]
        device = self._placement.device or next((value.device for value in like), None)
        probe = torch.linspace(-1.5, 1.5, layout.dim, device=device, dtype=self._placement.dtype or promoted(like))
        first, second = layout.constrain(probe), other.constrain(probe) if other.dim == layout.dim else {}
        for site, value in first.items():
            if site not in second or value.shape != second[site].shape or not torch.equal(value, second[site]):
                raise ValueError(
                    f"the support or shape of site {site!r} depends on other sites; a sampler needs a fixed one. "
                    "Sample it on a fixed support and transform it, e.g. Uniform(0, 1) times the bound"
                )

    def __repr__(self) -> str:
        return f"sites={list(self.sites)}"


# small steps --------------------------------------------------------------------------------------------------------


class _Unchecked(Messenger):
    """Without the checks of distributions that were made with them, such as a ``PyroSample``'s.

    A chain that left all numbers behind mustn't stop the others, and no trace can hold a check.
    """

    def _pyro_sample(self, msg: Any) -> None:
        msg["fn"] = unchecked(msg["fn"])


def _value(trace: poutine.Trace, site: str) -> Tensor:
    value = trace.nodes[site]["value"]
    assert value is not None  # a finished trace holds a value at every sample site
    return value


def _latent_sites(trace: poutine.Trace) -> dict[str, Any]:
    return {name: site["fn"] for name, site in trace.iter_stochastic_nodes() if not site_is_subsample(site)}


def _observed_sites(trace: poutine.Trace) -> list[Any]:
    """What holds data; ``pyro.deterministic`` calls itself observed, too."""
    sites: list[Any] = [site for site in trace.nodes.values() if site["type"] == "sample" and site["is_observed"]]
    return [site for site in sites if not site_is_subsample(site) and not site["infer"].get("_deterministic")]


def _nothing_to_sample(model: Any, trace: poutine.Trace) -> str:
    """Why a model that ran has no latent site, and what to do about it."""
    found = f"{name_of(model)} has no latent site (a pyro.sample without obs=), so there is nothing to sample"
    if isinstance(model, nn.Module):
        return (
            f"{found}. A network by itself has weights without priors; make a model of it: {WRAP}, or give a "
            "PyroModule's parameters priors by PyroSample"
        )
    if parameters := [name for name, site in trace.nodes.items() if site["type"] == "param"]:
        return f"{found}. It has pyro.param {', '.join(map(repr, parameters))}; what is to be sampled needs a prior"
    observed = [site["name"] for site in _observed_sites(trace)]
    return f"{found}. All its sites are observed: {', '.join(map(repr, observed))}" if observed else found


def _subsampled_plates(trace: poutine.Trace, given_is_right: bool) -> dict[str, tuple[int, int]]:
    """Plates that draw their own subsample: name -> (full size, subsample size).

    :param given_is_right: whether a plate whose subsample the model itself gives (``subsample=``) is in order, because
        mini-batches are cut from the arguments.
    :raises ValueError: naming a subsampled plate that holds a latent site, or whose subsample would never change.
    """
    plates = {}
    for site in trace.nodes.values():
        for frame in site.get("cond_indep_stack", ()):
            if frame.full_size is None or not 0 <= frame.size < frame.full_size:
                continue
            total, size = int(frame.full_size), int(frame.size)
            if site["type"] == "sample" and not site["is_observed"]:
                raise ValueError(
                    f"the latent site {site['name']!r} lies in the subsampled plate {frame.name!r}, so a mini-batch "
                    "would move some of its values only; samplers here need global latent sites"
                )
            if getattr(trace.nodes[frame.name]["fn"], "subsample_size", None) is not None:
                plates[frame.name] = (total, size)
            elif not given_is_right:
                raise ValueError(
                    f"the plate {frame.name!r} holds {size} of {total} rows, always the same ones; pass the whole "
                    "data, and batch_size= to a stochastic-gradient sampler"
                )
    return plates


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.dim() > 0:
            return len(value)
    raise ValueError("batch_size needs data among the model's arguments (a tensor whose first axis are the rows)")
