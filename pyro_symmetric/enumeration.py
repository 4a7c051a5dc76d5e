r"""A model's discrete latent sites, summed out exactly, under :func:`torch.func.vmap` as well.

.. math:: \log p(w, y) = \log \sum_{k} p(w, k, y)

Pyro's handler lays the values of each discrete site along a tensor dimension of its own, left of all plates, so that
one run of the model gives the factors of all assignments. They are summed dimension by dimension, plates multiplied on
the way (tensor variable elimination, Obermeyer et al. 2019, ICML): the cost of a chain of sites in ``pyro.markov``
grows with its length, and sites in a plate don't meet.

Two things differ from Pyro's own evaluation, which no map over chains can hold: tables are added in log-space by
:func:`torch.logsumexp`, and a site's ``poutine.scale`` (that of a mini-batch's plate, say) multiplies the log of the
sum, as in Pyro's ``TraceEnum_ELBO``, and isn't a power within it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.distributions.util import scale_and_mask
from pyro.ops.contract import contract_to_tensor
from pyro.ops.packed import pack
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_symmetric.calls import is_enumerated
from pyro_symmetric.elimination import Elimination
from pyro_symmetric.placement import as_tensor

MOST_ENTRIES = 2**27  # of one chain's largest table

CLOSE = 1e-3  # to 0, the log of what probabilities add up to
DRAWS = 8  # of the discrete sites, at which tables are compared with what the model itself finds
Model = Callable[..., Any]


class Enumeration:
    """The discrete sites of a model, and where their values are laid.

    :param trace: of the model, with its discrete sites drawn.
    :raises ValueError: naming a discrete site that stands for many, but lies in no plate.
    """

    def __init__(self, trace: poutine.Trace):
        sites = [site for _, site in _sampled(trace)]
        self.sites: list[str] = [site["name"] for site in sites if is_enumerated(site)]
        """Names of the discrete sites."""
        for site in sites:
            if site["name"] in self.sites and (open_dims := _open_dims(site)):
                raise ValueError(
                    f"the discrete site {site['name']!r} has batch shape {tuple(site['fn'].batch_shape)}, whose "
                    f"dimensions {open_dims} lie in no pyro.plate; put it into plates, so that its values are summed "
                    "out one by one"
                )
        self._batch_shapes = {site["name"]: site["fn"].batch_shape for site in sites if site["name"] in self.sites}
        depths = [len(site["fn"].batch_shape) for site in sites]
        depths += [-frame.dim for site in sites for frame in site["cond_indep_stack"] if frame.dim is not None]
        self._first_dim = -1 - max(depths, default=0)

    def trace(
        self, model: Model, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> poutine.Trace:
        """A run of the model with its continuous sites given, and every value of its discrete ones side by side."""
        enumerated = poutine.condition(_Enumerate(self._first_dim)(model), data=dict(weights))
        return poutine.trace(enumerated).get_trace(*args, **kwargs)

    def log_prob(self, trace: poutine.Trace) -> Tensor:
        """The trace's log-density, with the discrete sites summed out.

        :raises ValueError: if sites that share a discrete site are scaled differently.
        """
        return sum((own for own, _ in self._sums(trace)), start=torch.zeros((), device="cpu"))

    def pointwise(self, trace: poutine.Trace, observed: Sequence[str]) -> dict[str, Tensor]:
        r"""The log-density of each row of observed sites given the continuous ones: site -> its plates' shape.

        .. math:: \log p(y_n \mid w) = \log \sum_k p(w, k, y_n) - \log \sum_k p(w, k)

        over the discrete sites of the row's own plates. No scale counts.

        :raises ValueError: naming the sites, if rows or observed sites share a discrete one: given the continuous sites
            they aren't independent then.
        """
        alone, components = self._parted(trace)
        found = {site["name"]: log_prob for site, log_prob in alone if site["name"] in observed}
        for component in components:
            sites: list[Any] = [site for site, _, _ in component]
            asked = [site["name"] for site in sites if site["name"] in observed]
            symbols = {dim for _, _, term in component for dim in term._pyro_dims}
            reused = len({trace.symbol_to_dim[symbol] for symbol in symbols}) < len(symbols)  # in pyro.markov
            if asked and (reused or len(asked) > 1 or len({plates for _, plates, _ in component}) > 1):
                shared = [site["name"] for site in sites if site["name"] in self.sites]
                raise ValueError(
                    f"the log-likelihood of each row is asked for, but rows of {_few(asked)} aren't independent given "
                    f"the continuous sites: they share the discrete sites {_few(shared)}, which are summed out. "
                    "Observe what belongs to one row as one site, in the plate of its discrete site"
                )
            for name in asked:
                terms = {
                    site["name"]: self._closed(masked_log_prob(site), site["infer"]["_dim_to_symbol"]) for site in sites
                }
                frames: list[Any] = [frame for frame in trace.nodes[name]["cond_indep_stack"] if frame.vectorized]
                depth = max((-frame.dim for frame in frames), default=0)
                joint = self._over_values(list(terms.values()), depth)
                found[name] = joint - self._over_values([own for site, own in terms.items() if site != name], depth)
        return found

    def draw(self, trace: poutine.Trace) -> tuple[dict[str, Tensor], Tensor]:
        """The discrete sites, drawn from their joint distribution given all else that is in the trace, and whether that
        is one, bool ``()``: it isn't if all values have the density 0, or NaN. No scale counts."""
        drawn: dict[str, Tensor] = {}
        sums = self._sums(trace)
        for _, eliminated in sums:
            drawn.update(eliminated.draw())
        possible = torch.stack([as_tensor(own).isfinite() for own, _ in sums]).all()
        return {name: self._unpacked(trace, name, drawn) for name in self.sites}, possible

    def require_enumerable(
        self, model: Model, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Try it once.

        :raises ValueError: in words, if the model can't be run with all values of its discrete sites at once, or if it
            then finds other densities than with one value of each.
        """
        try:
            with _AtMost(MOST_ENTRIES):
                trace = self.trace(model, weights, args, kwargs)
                self.log_prob(trace)
        except _TooMany as error:
            raise ValueError(
                f"the discrete sites {_few(self.sites)} have too many combinations to sum out: a table of {error} "
                "numbers for each chain. Put what is independent into pyro.plate, loops whose steps depend on the last "
                "one only into pyro.markov, or write the density of the sum"
            ) from None
        except _Scales:
            raise
        except Exception as error:  # it did run with its discrete sites drawn, so that it is this
            said = (str(error).strip() or repr(error)).splitlines()[0]
            raise ValueError(
                f"the discrete sites {_few(self.sites)} can't be summed out: the model fails on all of their values at "
                f"once ({type(error).__name__}: {said}). Usual causes: Python control flow on a discrete value (write "
                "torch.where), indexing that doesn't broadcast (pyro.ops.indexing.Vindex), or a long loop outside of "
                "pyro.plate and pyro.markov"
            ) from error
        for name in self.sites:
            _require_whole(trace.nodes[name])
        discrete: list[Any] = [trace.nodes[name] for name in self.sites]
        owners = {site["infer"].get("_enumerate_symbol"): site for site in discrete}
        for drawn in self._draws(model, trace, weights, args, kwargs):
            for name, site in _sampled(trace):
                expected = masked_log_prob(drawn.nodes[name])
                found = _at_drawn_values(masked_log_prob(site), site, owners, drawn)
                if found.numel() != expected.numel() or not _is_close(found.reshape(expected.shape), expected):
                    raise ValueError(
                        f"the discrete sites {_few(self.sites)} can't be summed out: site {name!r} has another density "
                        "with all of their values at once than with one value of each. Usual cause: it adds or "
                        "averages over a discrete value's dimensions, as .sum() or .mean() without dim= does; put what "
                        "depends on a plate's discrete site into that plate"
                    )

    def depending(
        self,
        names: Sequence[str],
        model: Model,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> list[str]:
        """Those of some deterministic sites whose values depend on discrete ones: they change with these."""
        trace = self.trace(model, weights, args, kwargs)
        runs: list[Any] = list(self._draws(model, trace, weights, args, kwargs))
        return [
            name
            for name in names
            if not all(_is_close(run.nodes[name]["value"], trace.nodes[name]["value"]) for run in runs)
        ]

    # small steps ----------------------------------------------------------------------------------------------------

    def _draws(
        self,
        model: Model,
        trace: poutine.Trace,
        weights: Mapping[str, Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Iterator[poutine.Trace]:
        """Runs with the discrete sites drawn and all else as in a trace, its mini-batches included."""
        nodes: dict[str, Any] = dict(trace.nodes)
        rows = {n: site["value"] for n, site in nodes.items() if site["type"] == "sample" and site_is_subsample(site)}
        for _ in range(DRAWS):
            yield poutine.trace(poutine.condition(model, data={**weights, **rows})).get_trace(*args, **kwargs)

    def _sums(self, trace: poutine.Trace) -> list[tuple[Tensor, Elimination]]:
        """The terms whose sum is the log-density, and how each was found."""
        alone, components = self._parted(trace)
        sums = [((log_prob * site["scale"]).sum(), Elimination()) for site, log_prob in alone]
        plates = set(trace.plate_to_symbol.values())
        for component in components:
            tree: OrderedDict[Any, list[Tensor]] = OrderedDict()
            for _, ordinal, term in component:
                tree.setdefault(ordinal, []).append(term)
            own = {dim for _, _, term in component for dim in term._pyro_dims} - plates
            eliminated = Elimination()
            total = contract_to_tensor(tree, own, ring=eliminated)
            sums.append((total * _common_scale([site for site, _, _ in component]), eliminated))
        return sums

    def _parted(self, trace: poutine.Trace) -> tuple[list[tuple[Any, Tensor]], list[list[Any]]]:
        """Sites that depend on no discrete one, with their log-densities; and those that do, in groups that share none:
        each with the symbols of its plates and its table of log-densities."""
        trace.symbolize_dims()
        plates: Mapping[str, str] = trace.plate_to_symbol
        discrete = set(trace.symbol_to_dim) - set(plates.values())
        alone: list[tuple[Any, Tensor]] = []
        factors = []
        for _, site in _sampled(trace):
            log_prob = masked_log_prob(site)
            ordinal = frozenset(plates[frame.name] for frame in site["cond_indep_stack"] if frame.vectorized)
            symbols = site["infer"]["_dim_to_symbol"]
            term = pack(self._closed(log_prob, symbols), symbols)
            if discrete.isdisjoint(term._pyro_dims):
                alone.append((site, log_prob))
            else:
                factors.append((site, ordinal, term))
        return alone, _components(factors, discrete)

    def _over_values(self, terms: list[Tensor], depth: int) -> Tensor:
        """The log of the sum of products over all values of the discrete sites, for each row of ``depth`` plates."""
        total = torch.stack(torch.broadcast_tensors(*terms)).sum(0)
        rows = total.flatten(0, self._first_dim).logsumexp(0)
        return rows.reshape(rows.shape[rows.dim() - depth :])

    def _unpacked(self, trace: poutine.Trace, name: str, drawn: Mapping[str, Any]) -> Tensor:
        """A discrete site's value, ``batch_shape + event_shape``, at the index that was drawn."""
        site: Any = trace.nodes[name]
        batch = self._batch_shapes[name]
        listed = site["value"].reshape(-1, *site["fn"].event_shape)
        index = drawn.get(site["infer"]["_enumerate_symbol"])
        if index is None:  # one value only
            return listed[0].expand(batch + listed.shape[1:])
        dims = {trace.plate_to_symbol[frame.name]: frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
        ordered = index.permute(sorted(range(index.dim()), key=lambda place: dims[index._pyro_dims[place]]))
        found = {dims[symbol] for symbol in index._pyro_dims}
        own = ordered.reshape([batch[dim] if dim in found else 1 for dim in range(-len(batch), 0)])
        return listed[own].expand(batch + listed.shape[1:])

    def _closed(self, log_prob: Tensor, symbols: Mapping[int, str]) -> Tensor:
        """Without dimensions that are neither plates nor values: entries of one site, which are added up."""
        dims = range(max(-log_prob.dim(), self._first_dim + 1), 0)
        extra = [dim for dim in dims if dim not in symbols and log_prob.shape[dim] > 1]
        return log_prob.sum(extra, keepdim=True) if extra else log_prob


# Pyro's handler, under vmap -------------------------------------------------------------------------------------------


class _Enumerate(EnumMessenger):
    """Enumerates every discrete latent site, however it is annotated, and reads no ``tensor.data``."""

    def _pyro_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg) and is_enumerated(msg):
            msg["infer"] = {**msg["infer"], "enumerate": "parallel", "expand": False, "num_samples": None}
        super()._pyro_sample(msg)

    def _pyro_post_sample(self, msg: Any) -> None:
        value, fn = msg["value"], msg["fn"]
        if value is None or not isinstance(fn, TorchDistributionMixin):
            return
        shape = value.shape[: value.dim() - fn.event_dim]
        ids = msg["infer"].setdefault("_dim_to_id", {})
        ids.update(self._param_dims.get(msg["name"], {}))
        kept = {dim: number for dim, number in ids.items() if len(shape) >= -dim and shape[dim] > 1}
        self._value_dims[msg["name"]] = kept


# small steps --------------------------------------------------------------------------------------------------------


class _TooMany(Exception):
    pass


class _Scales(ValueError):
    """Sites that are summed out together, but scaled apart."""


class _AtMost(TorchDispatchMode):
    """Ends a computation whose tables grow beyond a number of entries."""

    def __init__(self, entries: int):
        super().__init__()
        self.entries = entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.numel() > self.entries:
                raise _TooMany(leaf.numel())
        return result


def _require_whole(site: Any) -> None:
    """:raises ValueError: if the probabilities of the values that a site lists don't add up to 1."""
    fn, dim = site["fn"], site["infer"]["_enumerate_dim"]
    while isinstance(fn, dist.MaskedDistribution):  # whose density is 1 for each value where it is masked
        fn = fn.base_dist
    log_prob = fn.log_prob(site["value"], *site["args"])
    apart = log_prob.dim() >= -dim and log_prob.shape[dim] == site["value"].shape[dim - site["fn"].event_dim]
    if not apart or (site["mask"] is None and not bool((log_prob.logsumexp(dim).abs() < CLOSE).all())):
        raise ValueError(
            f"the discrete site {site['name']!r} ({site['fn']}) can't be summed out: the probabilities of the values "
            "that it lists don't add up to 1"
        )


def _sampled(trace: poutine.Trace) -> Iterator[tuple[str, Any]]:
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and not site_is_subsample(site):
            yield name, site


def masked_log_prob(site: Any) -> Any:
    """The log-density of a site's value, 0 where ``poutine.mask`` takes it out. No scale counts."""
    return scale_and_mask(site["fn"].log_prob(site["value"], *site["args"]), 1.0, site["mask"])


def _at_drawn_values(table: Tensor, site: Any, owners: Mapping[Any, Any], drawn: poutine.Trace) -> Tensor:
    """A site's table, where its discrete sites have the values that a run has drawn.

    :param owners: of the tables' dimensions: symbol -> the discrete site whose values lie there.
    """
    for dim, symbol in site["infer"]["_dim_to_symbol"].items():
        if symbol in owners and table.dim() >= -dim and table.shape[dim] > 1:
            place = _place(owners[symbol], drawn.nodes[owners[symbol]["name"]]["value"])
            table = torch.take_along_dim(table, place.reshape((1,) * (table.dim() - place.dim()) + place.shape), dim)
    return table


def _place(site: Any, drawn: Any) -> Tensor:
    """The index of drawn values, ``batch_shape + event_shape``, among those that a discrete site lists."""
    events = drawn.dim() - site["fn"].event_dim
    listed = site["value"].reshape(-1, *[1] * events, *drawn.shape[events:])
    return (listed == drawn).reshape(len(listed), *drawn.shape[:events], -1).all(-1).byte().argmax(0)


def _is_close(one: Any, other: Any) -> bool:
    """True if two values agree but for rounding; NaN agrees with NaN."""
    if one.shape != other.shape:
        return False
    return bool(torch.isclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True).all())


def _open_dims(site: Any) -> list[int]:
    plates = {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
    shape = site["fn"].batch_shape
    return [dim for dim in range(-len(shape), 0) if shape[dim] > 1 and dim not in plates]


def _components(factors: list[Any], discrete: set[str]) -> list[list[Any]]:
    """Factors in groups that share no discrete dimension with each other."""
    groups: list[tuple[set[str], list[Any]]] = []
    for factor in factors:
        dims = discrete & set(factor[2]._pyro_dims)
        met = [group for group in groups if group[0] & dims]
        joined = (dims.union(*(group[0] for group in met)), [f for group in met for f in group[1]] + [factor])
        groups = [group for group in groups if not group[0] & dims] + [joined]
    return [group for _, group in groups]


def _common_scale(sites: list[Any]) -> Any:
    """:raises ValueError: if there is more than one."""
    first = sites[0]["scale"]
    if isinstance(first, Tensor) and first.numel() > 1:
        raise _Scales(
            f"the site {sites[0]['name']!r} has a scale of shape {tuple(first.shape)} (poutine.scale) and depends on a "
            "discrete site; what is summed out together needs one scale"
        )
    for site in sites[1:]:
        if site["scale"] is not first and bool(as_tensor(site["scale"] != first).any()):
            raise _Scales(
                f"the sites {sites[0]['name']!r} and {site['name']!r} are scaled differently (poutine.scale, or a "
                "plate that subsamples), but share a discrete site; what is summed out together needs one scale"
            )
    return first


def _few(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
