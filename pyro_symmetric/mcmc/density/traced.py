"""The log-joint density of any Pyro model, for many chains at once; discrete latent sites are summed out."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import LOCK, running_pyro, without_warnings
from pyro_symmetric.calls import (
    described,
    explaining,
    is_deterministic,
    is_enumerated,
    name_of,
    refuse_complex_observations,
)
from pyro_symmetric.enumeration import Enumeration
from pyro_symmetric.layout import transform_of
from pyro_symmetric.mcmc.density.data import ROWS, require_batch_size, warn_of_batch_scale
from pyro_symmetric.mcmc.density.targets import Rows
from pyro_symmetric.placement import Placement, as_tensor
from pyro_symmetric.traced import Traced
from pyro_symmetric.weights import Weights

RUNS = 10  # of a model, to see whether its sites and supports are always the same


class TracedTarget(Traced):
    """Any Pyro model with its data; attributes and methods as of
    :class:`~pyro_symmetric.mcmc.density.targets.NetworkTarget`. It runs alone, since Pyro's handlers belong to the
    process."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_size: int | None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(model, args, kwargs)
        self._placement, self._programs = Placement(device, dtype), dict[Any, Callable[[Weights], Weights]]()
        rows = None
        if batch_size is not None:  # mini-batches are cut from the arguments: how many rows their tensors have
            data = [v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor) and v.dim() > 0]
            self._data_rows = len(data[0]) if data else 0
            require_batch_size(batch_size, self._data_rows)
            rows = {ROWS: torch.arange(batch_size, device="cpu")}
        with LOCK, explaining(model, args, kwargs):
            trace = self._prior_run(rows)
        latent = _latent(trace)
        # Those that samplers move: discrete ones that can be summed out aren't.
        self.sites: Mapping[str, Any] = {site["name"]: site["fn"] for site in latent if not is_enumerated(site)}
        if not self.sites:
            names = [site["name"] for site in latent]
            why = f"discrete latent sites only, {names}, which are summed out" if names else "no latent site"
            hint = "; make a model of a network by BayesianModel(net)" if isinstance(model, torch.nn.Module) else ""
            raise ValueError(f"{name_of(model)} has {why}, so there is nothing to sample{hint}")
        given = {site: _value(trace, site) for site in self.sites}
        observed: list[Any] = [trace.nodes[name] for name in trace.observation_nodes]
        observed = [site for site in observed if not site_is_subsample(site) and not is_deterministic(site)]
        refuse_complex_observations(observed)
        self.row_counts = _subsampled_plates(trace, given_changes=batch_size is not None)
        if batch_size is not None and batch_size < self._data_rows:
            self._require_same_priors(trace, given)
            warn_of_batch_scale(observed, batch_size, self._data_rows)
            self.row_counts = {**self.row_counts, ROWS: (self._data_rows, batch_size)}
        self._probes = {site: _probe(site, self.sites[site], self._placement, value) for site, value in given.items()}
        for _ in range(RUNS):
            self._require_same_layout(self._prior_run())
        with running_pyro():
            if len(self.sites) < len(latent):
                self.enumeration = Enumeration(self.model, trace, given, *self._cut(rows))
                self._require_same_layout(self.run(given, *self._cut(rows)))
            self.computed: Mapping[str, torch.Size] = {} if self.row_counts else self._deterministic_sites(trace, given)

    def log_joint(self, weights: Weights, rows: Rows | None) -> Tensor:
        return self.mapped(self._log_joint, *((weights,) if rows is None else (weights, dict(rows))))

    def _log_joint(self, weights: Weights, rows: Rows | None = None) -> Tensor:
        trace = self._checked_run(weights, rows)
        log_prob = trace.log_prob_sum() if self.enumeration is None else self.enumeration.log_prob(trace)
        return as_tensor(log_prob)

    def compute(self, weights: Weights) -> Weights:
        """Values of :attr:`computed` for weights of batch shape ``(C,)``, by a program without Pyro and without what
        only the density needs; it is traced once for each ``C``."""
        if not self.computed or self.one_by_one:
            return self.mapped(self._compute, weights) if self.computed else {}
        key = tuple((value.shape, value.dtype, value.device) for value in weights.values())
        if key not in self._programs:
            from torch.fx.experimental.proxy_tensor import make_fx  # which takes long to load

            with LOCK, without_warnings():
                graph = make_fx(lambda own: self.mapped(self._compute, own))(weights)
            graph.graph.eliminate_dead_code()
            graph.recompile()
            self._programs[key] = graph
        return self._programs[key](weights)

    def _compute(self, weights: Weights) -> Weights:
        trace, like = self._checked_run(weights), next(iter(weights.values()))
        return {site: _value(trace, site).to(like.dtype) for site in self.computed}

    def prior_weights(self, num_chains: int) -> Weights:
        # A model draws as it runs, one prior draw a run, and drawing inside vmap fails for many distributions. Starting
        # points are drawn once a sampling run, so this loop costs milliseconds.
        traces = [self._prior_run() for _ in range(num_chains)]
        return {site: torch.stack([_value(trace, site) for trace in traces]) for site in self.sites}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}

    def __repr__(self) -> str:
        return f"sites={list(self.sites)}"

    # runs -----------------------------------------------------------------------------------------------------------

    def _cut(self, rows: Rows | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, or the mini-batch's rows of those that hold data."""
        if rows is None or ROWS not in rows:
            return self.args, self.kwargs

        def cut(value: Any) -> Any:
            holds_data = isinstance(value, Tensor) and value.dim() > 0 and len(value) == self._data_rows
            return value[rows[ROWS].to(value.device)] if holds_data else value

        return tree_map(cut, self.args), tree_map(cut, self.kwargs)

    def _prior_run(self, rows: Rows | None = None) -> poutine.Trace:
        args, kwargs = self._cut(rows)
        with LOCK, torch.no_grad():
            return poutine.trace(_Drawn()(self._placement(self.model))).get_trace(*args, **kwargs)

    def _checked_run(self, weights: Weights, rows: Rows | None = None) -> poutine.Trace:
        plates = {name: index for name, index in (rows or {}).items() if name != ROWS}
        trace = self.run({**weights, **plates}, *self._cut(rows))
        # Only of a run by itself, which may branch on values, can the numbers be looked at.
        self._require_same_layout(trace, supports=bool(self.one_by_one))
        return trace

    def _deterministic_sites(self, trace: poutine.Trace, given: Weights) -> dict[str, torch.Size]:
        """Deterministic sites and their shapes. Those of complex numbers are left out, and those that depend on
        discrete sites, which have no value if these are summed out."""
        found = {name: _value(trace, name) for name, site in trace.nodes.items() if is_deterministic(site)}
        shapes = {name: value.shape for name, value in found.items() if not value.is_complex()}
        if self.enumeration is None or not shapes:
            return shapes
        if unclear := self.enumeration.depending(list(shapes)):
            warnings.warn(
                f"the deterministic sites {unclear} depend on discrete sites, which are summed out, so the posterior "
                "doesn't hold them",
                UserWarning,
                stacklevel=4,
            )
        return {name: shape for name, shape in shapes.items() if name not in unclear}

    # what is refused ------------------------------------------------------------------------------------------------

    def _require_same_priors(self, trace: poutine.Trace, given: Weights) -> None:
        """:raises ValueError: if a latent site's prior on a mini-batch isn't the one on all data."""
        with LOCK, torch.no_grad():
            try:
                whole = poutine.trace(poutine.condition(self.model, given)).get_trace(*self.args, **self.kwargs)
            except Exception:  # a model that is made for mini-batches alone, or a prior as wide as they are
                whole = self._prior_run()

        def changes(name: str, value: Tensor) -> bool:
            fns: list[Any] = [run.nodes[name]["fn"] for run in (whole, trace)]
            one, other = fns
            same = one.shape() == other.shape()
            return not (same and torch.allclose(one.log_prob(value), other.log_prob(value), equal_nan=True))

        if changed := sorted(name for name, value in given.items() if changes(name, value)):
            raise ValueError(
                f"the priors of the sites {changed} change with the mini-batch: an argument that they depend on is as "
                f"long as the data, {self._data_rows} rows, and is cut with them. Hold it outside of the arguments"
            )

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


def _probe(site: str, fn: Any, placement: Placement, like: Tensor) -> tuple[Tensor, Tensor]:
    """Unconstrained values of a site, and what its first support makes of them."""
    transform = transform_of(site, fn)
    free = torch.Size(transform.inverse_shape(like.shape))
    probe = torch.linspace(-1.5, 1.5, free.numel(), device="cpu").reshape(free)
    probe = probe.to(placement.device or like.device, placement.dtype or like.dtype)
    return probe, transform(probe)


def _latent(trace: poutine.Trace) -> list[Any]:
    return [site for _, site in trace.iter_stochastic_nodes() if not site_is_subsample(site)]


def _subsampled_plates(trace: poutine.Trace, given_changes: bool) -> dict[str, tuple[int, int]]:
    """Plates that draw their own subsample: name -> (full size, subsample size).

    :param given_changes: whether a subsample that the model itself gives (``subsample=``) is another one each time,
        because mini-batches are cut from the arguments. Otherwise a warning says that it never changes.
    :raises ValueError: naming a subsampled plate that holds a latent site.
    """
    plates, given = dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
    for site in trace.nodes.values():
        for frame in site.get("cond_indep_stack", ()):
            if frame.full_size is None or not 0 <= frame.size < frame.full_size:
                continue
            drawn = getattr(trace.nodes[frame.name]["fn"], "subsample_size", None) is not None
            (plates if drawn else given)[frame.name] = int(frame.full_size), int(frame.size)
            latent = site["type"] == "sample" and not site["is_observed"] and not is_enumerated(site)
            if latent and (drawn or given_changes):
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


def require_model(model: Any) -> None:
    """:raises TypeError: if it can't be one."""
    if not callable(model) or isinstance(model, type | AutoGuide | MCMCKernel):
        raise TypeError(f"model is {described(model)}; it must be a Pyro model: callable, no class, guide or kernel")
