"""The log-density of any Pyro model, for many chains at once: traced, with its sites conditioned, under vmap.

Discrete latent sites are summed out (:mod:`~pyro_symmetric.enumeration`). A model that can't be mapped
over chains, such as one that branches on a sampled value, is evaluated one chain after another.
"""

from __future__ import annotations

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import PYRO, running_pyro, without_warnings
from pyro_symmetric.calls import (
    WRAP,
    described,
    described_call,
    explaining,
    is_deterministic,
    is_enumerated,
    name_of,
    refuse_complex_observations,
)
from pyro_symmetric.enumeration import Enumeration
from pyro_symmetric.layout import transform_of
from pyro_symmetric.mcmc.density.data import warn_of_batch_scale, warn_of_plate_scale
from pyro_symmetric.mcmc.density.mappable import mappable
from pyro_symmetric.mcmc.density.targets import ROWS, NetworkTarget, Rows, Target, require_batch_size, unchecked
from pyro_symmetric.models import BayesianModel
from pyro_symmetric.placement import Placement, as_tensor, promoted
from pyro_symmetric.weights import Weights

RUNS, SECONDS = 30, 0.2  # of a model, at most, to see whether its sites and supports are always the same


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
        rows = None if batch_size is None else {ROWS: torch.arange(batch_size, device="cpu")}
        with PYRO, explaining(model, args, kwargs):
            trace = self._prior_trace(rows)
        # Those that samplers move: discrete ones that can be summed out aren't.
        self.sites: Mapping[str, Any] = {site["name"]: site["fn"] for site in _latent(trace) if not is_enumerated(site)}
        if not self.sites:
            raise ValueError(_nothing_to_sample(model, trace))
        discrete = any(is_enumerated(site) for site in _latent(trace))
        self._enumeration = Enumeration(trace) if discrete else None
        self._programs: dict[Any, Callable[[Weights], Weights]] = {}
        self.one_by_one = ""
        """Why chains are evaluated one after another; empty if they are all at once."""
        self.with_stand_ins = False
        """True if parts of Pyro that can't be mapped over chains are replaced meanwhile."""
        observed = _observed_sites(trace)
        refuse_complex_observations(observed)
        counts = [
            torch.Size(site["fn"].batch_shape).numel() * as_tensor(site["scale"]).double().mean() for site in observed
        ]
        self.num_rows = max((round(float(count)) for count in counts), default=0)
        self.row_counts = _subsampled_plates(trace, given_changes=batch_size is not None)
        if batch_size is None and self.row_counts:
            warn_of_plate_scale(observed)
        if batch_size is not None and batch_size < self._data_rows:
            self._require_same_priors(trace)
            warn_of_batch_scale(observed, batch_size, self._data_rows)
            self.row_counts = {**self.row_counts, ROWS: (self._data_rows, batch_size)}
        self._probes: dict[str, tuple[Tensor, Tensor]] = {}
        self._require_fixed_layout(trace, rows)
        with running_pyro():
            self.computed: Mapping[str, torch.Size] = {} if self.row_counts else self._deterministic_sites(trace, rows)

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        return self._mapped(self._log_joint, weights, rows)

    def _mapped(self, function: Callable[[Weights, Rows | None], Any], weights: Weights, rows: Rows | None) -> Any:
        """Results of a function of each chain's weights and mini-batch, chains first."""
        with running_pyro(promoted(list(weights.values()))):
            if not self.one_by_one:
                with mappable() if self.with_stand_ins else contextlib.nullcontext():
                    if rows is None:
                        return torch.func.vmap(lambda own: function(own, None))(weights)
                    return torch.func.vmap(function)(weights, dict(rows))
            batches = [None if rows is None else _chain(rows, c) for c in range(len(next(iter(weights.values()))))]
            results = [function(_chain(weights, c), batch) for c, batch in enumerate(batches)]
            return tree_map(lambda *leaves: torch.stack(leaves), *results)

    def _log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        trace = self._trace(weights, rows)
        log_prob = trace.log_prob_sum() if self._enumeration is None else self._enumeration.log_prob(trace)
        return as_tensor(log_prob)

    def _trace(self, weights: Weights, rows: Rows | None) -> poutine.Trace:
        """A run with these values of one chain, and all values of discrete sites."""
        args, kwargs = self._cut(rows)
        plates = {name: index for name, index in (rows or {}).items() if name != ROWS}
        given, model = {**weights, **plates}, _Unchecked()(self.model)
        if self._enumeration is not None:
            trace = self._enumeration.trace(model, given, args, kwargs)
        else:
            trace = poutine.trace(poutine.condition(model, data=given)).get_trace(*args, **kwargs)
        # Only of a run by itself, which may branch on values, can the numbers be looked at.
        self._require_same_layout(trace, supports=bool(self.one_by_one))
        return trace

    def compute(self, weights: Weights) -> Weights:
        """Values of :attr:`computed` for weights of batch shape ``(C,)``.

        They come from a flat program, traced once for each ``C``, without Pyro and without what only the density needs.
        """
        if self.one_by_one:
            return self._mapped(self._compute, weights, None)
        key = tuple((value.shape, value.dtype, value.device) for value in weights.values())
        if key not in self._programs:
            from torch.fx.experimental.proxy_tensor import make_fx  # which takes long to load

            with PYRO, without_warnings():
                graph = make_fx(lambda own: self._mapped(self._compute, own, None))(weights)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            self._programs[key] = graph
        return self._programs[key](weights)

    def _compute(self, weights: Weights, rows: Rows | None) -> Weights:
        trace = self._trace(weights, rows)
        like = next(value for value in weights.values())
        return {site: _value(trace, site).to(like.dtype) for site in self.computed}

    def _deterministic_sites(self, trace: poutine.Trace, rows: Rows | None) -> dict[str, torch.Size]:
        """Deterministic sites and their shapes. Those of complex numbers are left out, and those that depend on
        discrete sites, which have no value if these are summed out."""
        found = {name: _value(trace, name) for name, site in trace.nodes.items() if is_deterministic(site)}
        shapes = {name: value.shape for name, value in found.items() if not value.is_complex()}
        if self._enumeration is None or not shapes:
            return shapes
        unclear = self._enumeration.depending(
            list(shapes), self.model, {site: _value(trace, site) for site in self.sites}, *self._cut(rows)
        )
        if unclear:
            warnings.warn(
                f"the deterministic sites {unclear} depend on discrete sites, which are summed out, so the posterior "
                "doesn't hold them",
                UserWarning,
                stacklevel=5,
            )
        return {name: shape for name, shape in shapes.items() if name not in unclear}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}

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
            return poutine.trace(_Drawn()(self._placement(self.model))).get_trace(*args, **kwargs)

    def prior_weights(self, num_chains: int) -> Weights:
        # A model draws as it runs, one prior draw a run, and drawing inside vmap fails for many distributions. Starting
        # points are drawn once a sampling run, so this loop costs milliseconds.
        traces = [self._prior_trace() for _ in range(num_chains)]
        return {site: torch.stack([_value(trace, site) for trace in traces]) for site in self.sites}

    def unsupported(self) -> list[str]:
        sites = [
            site for site in self._prior_trace().nodes.values() if site["type"] == "sample" and site["is_observed"]
        ]
        supports = [(site, getattr(site["fn"], "support", None)) for site in sites if not site_is_subsample(site)]
        impossible = [site for site, of in supports if of is not None and not bool(of.check(site["value"]).all())]
        return [str(site["name"]) for site in impossible]

    def arguments(self) -> Mapping[str, Any]:
        try:
            return dict(inspect.signature(self.model).bind(*self.args, **self.kwargs).arguments)
        except (TypeError, ValueError):  # whose names can't be told
            return {**{str(i): value for i, value in enumerate(self.args)}, **self.kwargs}

    def _require_same_priors(self, trace: poutine.Trace) -> None:
        """:raises ValueError: if a latent site's prior on a mini-batch isn't the one on all data."""
        given = {name: _value(trace, name) for name in self.sites}
        try:
            every = [self._prior_trace()]
            if all(_value(every[0], name).shape == value.shape for name, value in given.items()):
                with PYRO, torch.no_grad():
                    every += [poutine.trace(poutine.condition(self.model, given)).get_trace(*self.args, **self.kwargs)]
            laws = {name: (every[-1].nodes[name]["fn"], trace.nodes[name]["fn"]) for name in given}
            same = [name for name, (whole, part) in laws.items() if _is_same_law(whole, part, given[name])]
        except Exception:  # a model that is made for mini-batches alone
            return
        if changed := sorted(given.keys() - same):
            raise ValueError(
                f"the priors of the sites {changed} change with the mini-batch: an argument that they depend on is as "
                f"long as the data, {self._data_rows} rows, and is cut with them. Hold it outside of the arguments"
            )

    def _require_fixed_layout(self, trace: poutine.Trace, rows: Rows | None) -> None:
        """:raises ValueError: if sites, shapes or supports depend on what was drawn; several draws are compared, and
        all values of discrete sites."""
        given = {site: _value(trace, site) for site in self.sites}
        for site, fn in self.sites.items():
            transform, like = transform_of(site, fn), given[site]
            free = torch.Size(transform.inverse_shape(like.shape))
            dtype, device = self._placement.dtype or like.dtype, self._placement.device or like.device
            probe = torch.linspace(-1.5, 1.5, free.numel(), dtype=dtype, device=device).reshape(free)
            self._probes[site] = probe, transform(probe)
        began = time.monotonic()
        for _ in range(RUNS):
            self._require_same_layout(self._prior_trace())
            if time.monotonic() - began > SECONDS:
                break
        if self._enumeration is not None:
            with running_pyro():
                self._enumeration.require_enumerable(self.model, given, *self._cut(rows))
                self._require_same_layout(self._enumeration.trace(self.model, given, *self._cut(rows)))

    def _require_same_layout(self, trace: poutine.Trace, supports: bool = True) -> None:
        """:raises ValueError: if a run has other sites, shapes or supports than the first."""
        drawn = {site["name"] for site in _latent(trace) if not is_enumerated(site)}
        if changed := sorted(set(self._probes) ^ (drawn | (set(self._probes) & set(trace.nodes)))):
            raise ValueError(
                f"the sites {changed} exist in some runs of the model only; a sampler needs the same ones in all"
            )
        for name, (probe, expected) in self._probes.items() if supports else ():
            site: Any = trace.nodes[name]
            found = transform_of(name, site["fn"])(probe) if site["value"].shape == expected.shape else probe[:0]
            # A support for each value of a discrete site has them along dimensions on the left.
            shape = found.shape[max(found.dim() - expected.dim(), 0) :]
            if shape != expected.shape or not bool((found == expected).all()):
                raise ValueError(
                    f"the support or shape of site {name!r} depends on other sites; a sampler needs a fixed one. "
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


class _Drawn(Messenger):
    """Draws latent sites; those that have no draws (an improper prior, or no sampler) from the box of unconstrained
    values in (-2, 2), where chains start."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is not None or msg["done"] or site_is_subsample(msg):
            return
        with contextlib.suppress(NotImplementedError):
            msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])
        if msg["value"] is None:
            transform = transform_of(msg["name"], msg["fn"])
            shape = transform.inverse_shape(torch.Size(msg["fn"].batch_shape) + torch.Size(msg["fn"].event_shape))
            msg["value"] = transform(4 * torch.rand(shape, device="cpu") - 2)
        msg["done"] = True


def _value(trace: poutine.Trace, site: str) -> Tensor:
    value = trace.nodes[site]["value"]
    assert value is not None  # a finished trace holds a value at every sample site
    return value


def _is_same_law(one: Any, other: Any, value: Tensor) -> bool:
    return one.shape() == other.shape() and torch.allclose(one.log_prob(value), other.log_prob(value), equal_nan=True)


def _chain(values: Mapping[str, Tensor], chain: int) -> dict[str, Tensor]:
    return {name: value[chain] for name, value in values.items()}


def _latent(trace: poutine.Trace) -> list[Any]:
    return [site for _, site in trace.iter_stochastic_nodes() if not site_is_subsample(site)]


def _observed_sites(trace: poutine.Trace) -> list[Any]:
    """Sites that hold data, without deterministic sites, which call themselves observed, too."""
    sites: list[Any] = [site for site in trace.nodes.values() if site["type"] == "sample" and site["is_observed"]]
    return [site for site in sites if not site_is_subsample(site) and not is_deterministic(site)]


def _nothing_to_sample(model: Any, trace: poutine.Trace) -> str:
    """Why a model that ran has no latent site, and what to do about it."""
    if discrete := [site["name"] for site in _latent(trace)]:
        return (
            f"{name_of(model)} has discrete latent sites only ({', '.join(map(repr, discrete))}), which are summed out"
        )
    found = f"{name_of(model)} has no latent site (a pyro.sample without obs=), so there is nothing to sample"
    if not isinstance(model, nn.Module):
        return found
    return f"{found}. Of a network make a model: {WRAP}, or give a PyroModule's parameters priors by PyroSample"


def _subsampled_plates(trace: poutine.Trace, given_changes: bool) -> dict[str, tuple[int, int]]:
    """Plates that draw their own subsample: name -> (full size, subsample size).

    :param given_changes: whether a subsample that the model itself gives (``subsample=``) is another one each time,
        because mini-batches are cut from the arguments. Otherwise a warning says that it never changes.
    :raises ValueError: naming a subsampled plate that holds a latent site.
    """
    plates: dict[str, tuple[int, int]] = {}
    given: dict[str, tuple[int, int]] = {}
    for site in trace.nodes.values():
        for frame in site.get("cond_indep_stack", ()):
            if frame.full_size is None or not 0 <= frame.size < frame.full_size:
                continue
            total, size = int(frame.full_size), int(frame.size)
            drawn = getattr(trace.nodes[frame.name]["fn"], "subsample_size", None) is not None
            (plates if drawn else given)[frame.name] = (total, size)
            changing = drawn or given_changes
            if changing and site["type"] == "sample" and not site["is_observed"] and not is_enumerated(site):
                raise ValueError(
                    f"the latent site {site['name']!r} lies in the subsampled plate {frame.name!r}, so a mini-batch "
                    "would move some of its values only; samplers here need global latent sites"
                )
    for name, (total, size) in {} if given_changes else given.items():
        warnings.warn(
            f"the plate {name!r} holds {size} of {total} rows, always the same ones, and each counts "
            f"{total / size:.3g} times. The posterior is narrower than these rows can make it; pass the whole data, "
            "and batch_size= to a stochastic-gradient sampler",
            stacklevel=2,
        )
    return plates


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.dim() > 0:
            return len(value)
    raise ValueError("batch_size needs data among the model's arguments (a tensor whose first axis are the rows)")


# any model ------------------------------------------------------------------------------------------------------------


def target_of(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch_size: int | None,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Target:
    """The log-density of a model: a network's own, or that of any Pyro model."""
    if isinstance(model, BayesianModel):
        data = {**dict(zip(("x", "y"), args, strict=False)), **kwargs}
        if set(data) != {"x", "y"} or data["y"] is None or len(args) > 2:
            raise ValueError(
                "a BayesianModel is sampled given x and y, tensors with all rows, as in sample(kernel, x, y); found "
                f"{described_call(args, kwargs)}; mini-batches are drawn by kernels that have a batch_size"
            )
        return NetworkTarget(model, data["x"], data["y"], batch_size)
    return TracedTarget(model, args, kwargs, batch_size, device, dtype)


def require_model(model: Any) -> None:
    """:raises TypeError: if it can't be one."""
    if not callable(model) or isinstance(model, type | AutoGuide | MCMCKernel):
        raise TypeError(f"model is {described(model)}; it must be a Pyro model: callable, no class, guide or kernel")
