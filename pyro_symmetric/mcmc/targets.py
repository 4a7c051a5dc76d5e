"""Log-densities of weights for many chains at once: of a traced Pyro model, or of a Bayesian network without a trace.

A :class:`Target` is what :class:`~pyro_symmetric.mcmc.potential.Potential` asks for the log-joint of weights. A
faster evaluation of some family of models (a hand-batched forward pass, say) is one more class here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric.calls import WRAP, explaining, name_of
from pyro_symmetric.mcmc.batch_scale import warn_of_batch_scale, warn_of_plate_scale
from pyro_symmetric.mcmc.data_checks import require_data
from pyro_symmetric.mcmc.layout import Layout
from pyro_symmetric.models import BayesianModel, CategoricalLikelihood
from pyro_symmetric.placement import Placement, promoted
from pyro_symmetric.weights import Weights

Rows = Mapping[str, Tensor]
ROWS = "rows"  # the name of mini-batches that are cut from the arguments, rather than by a plate


class Target(Protocol):
    """The contract."""

    sites: Mapping[str, Distribution]
    """Latent site -> a distribution with its support and shapes, in the order of the layout."""

    row_counts: dict[str, tuple[int, int]]
    """What mini-batches draw from: name -> (rows there are, rows in a batch); empty if all data are used."""

    num_rows: int
    """How many observations the likelihood counts, about: the scale of the potential's curvature. 0 without any."""

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        """Log-density ``(C,)`` of constrained weights of batch shape ``(C,)``, on mini-batches ``(C, B)`` if given."""

    def prior_weights(self, num_chains: int) -> Weights:
        """Draws from the prior, of batch shape ``(C,)``."""

    def check_layout(self, layout: Layout) -> None:
        """:raises ValueError: if a site's support isn't the same everywhere."""


def not_a_number(target: Target) -> list[str]:
    """Names of the arguments that hold NaN, or infinite values: where to look if no energy is finite."""
    if isinstance(target, NetworkTarget):
        named: dict[str, Any] = {"x": target.x, "y": target.y}
    elif isinstance(target, TracedTarget):
        named = _named(target.model, target.args, target.kwargs)
    else:
        return []
    floats = {name: v for name, v in named.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return [name for name, value in floats.items() if not bool(torch.isfinite(value).all())]


class NetworkTarget:
    """A :class:`BayesianModel` with its data: batched ``functional_call`` and log-densities, no trace."""

    def __init__(self, model: BayesianModel, x: Tensor, y: Tensor, batch_size: int | None):
        require_data(model, x, y)
        if batch_size is not None:
            _check_batch_size(batch_size, len(x))
        if model.num_data not in (None, len(x)):
            raise ValueError(
                f"x has {len(x)} rows, but the model was told num_data={model.num_data}; samplers draw their own "
                "mini-batches (batch_size=), so pass the whole data"
            )
        labels = type(model.likelihood) is CategoricalLikelihood
        self.model, self.x, self.y = model, x, y.long() if labels else y
        self.num_rows = len(x)
        self.sites: Mapping[str, Distribution] = model.priors()
        self.row_counts = {ROWS: (len(x), batch_size)} if batch_size is not None and batch_size < len(x) else {}

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        if rows is None:
            total, scale = self._log_likelihood(weights, self.x, self.y), 1.0
        else:
            index = rows[ROWS]
            total = torch.func.vmap(self._log_likelihood)(weights, self.x[index], self.y[index])
            scale = len(self.x) / index.shape[-1]
        return self.model.log_prior(weights) + scale / self.model.likelihood.temperature * total

    def _log_likelihood(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        """Log-likelihood summed over rows, for weights of batch shape ``(C,)`` or ``()``."""
        if type(self.model.likelihood) is not CategoricalLikelihood:
            return self.model.log_likelihood(weights, x, y).sum(-1)
        # The same number as above by a fused kernel, which saves a fifth of the gradient's time.
        outputs = self.model.outputs(weights, x)
        labels = y.expand(outputs.shape[:-1]).reshape(-1)
        losses = nn.functional.cross_entropy(outputs.flatten(0, -2), labels, reduction="none")
        return -losses.reshape(outputs.shape[:-1]).sum(-1)

    def prior_weights(self, num_chains: int) -> Weights:
        return {name: prior.sample((num_chains,)) for name, prior in self.model.priors().items()}

    def check_layout(self, layout: Layout) -> None:
        pass  # priors of a network are fixed distributions

    def __repr__(self) -> str:
        return repr(self.model)


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
            _check_batch_size(batch_size, self._data_rows)
        rows = None if batch_size is None else {ROWS: torch.arange(batch_size)}
        with explaining(model, args, kwargs):
            trace = self._prior_trace(rows)
        self.sites: Mapping[str, Distribution] = _latent_sites(trace)
        if not self.sites:
            raise ValueError(_nothing_to_sample(model, trace))
        self.num_rows = max((round(_weight(site)) for site in _observed_sites(trace)), default=0)
        self.row_counts = _subsampled_plates(trace, given_is_right=batch_size is not None)
        if batch_size is None:
            warn_of_plate_scale(_observed_sites(trace))
        if batch_size is not None and batch_size < self._data_rows:
            warn_of_batch_scale(_observed_sites(trace), batch_size, self._data_rows)
            self.row_counts = {**self.row_counts, ROWS: (self._data_rows, batch_size)}

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        if rows is None:
            return torch.func.vmap(lambda own: self._log_joint(own, None))(weights)
        return torch.func.vmap(self._log_joint)(weights, dict(rows))

    def _log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        args, kwargs = self._cut(rows)
        plates = {name: index for name, index in (rows or {}).items() if name != ROWS}
        model = poutine.condition(self.model, data={**weights, **plates})
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
        with torch.no_grad():
            return poutine.trace(self._placement(self.model)).get_trace(*args, **kwargs)

    def prior_weights(self, num_chains: int) -> Weights:
        # A model draws as it runs, one prior draw a run, and drawing inside vmap fails for many distributions. Starting
        # points are drawn once a sampling run, so this loop costs milliseconds.
        traces = [self._prior_trace() for _ in range(num_chains)]
        return {site: torch.stack([_value(trace, site) for trace in traces]) for site in self.sites}

    def check_layout(self, layout: Layout) -> None:
        """Compare two draws: sites, shapes and supports must not depend on what was drawn."""
        trace = self._prior_trace()
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


def _weight(site: Any) -> float:
    """How many observations an observed site counts for, its scale included."""
    return site["fn"].batch_shape.numel() * float(torch.as_tensor(site["scale"]).double().mean())


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


def _named(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of the model's parameters, or by their number where these can't be told."""
    try:
        return dict(inspect.signature(model).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{str(i): value for i, value in enumerate(args)}, **kwargs}


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.dim() > 0:
            return len(value)
    raise ValueError("batch_size needs data among the model's arguments (a tensor whose first axis are the rows)")


def _check_batch_size(batch_size: int, rows: int) -> None:
    if not 1 <= batch_size <= rows:
        raise ValueError(f"batch_size is {batch_size}; it must lie between 1 and the {rows} rows of the data")
