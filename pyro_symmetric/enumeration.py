r"""A model's discrete latent sites, summed out exactly, under :func:`torch.func.vmap` as well; and drawn.

.. math:: \log p(w, y) = \log \sum_{k} p(w, k, y)

Pyro's handler lays the values of each discrete site along a tensor dimension of its own, left of all plates, so that
one run of the model gives the factors of all assignments. Pyro's contraction sums them dimension by dimension, plates
multiplied on the way (tensor variable elimination, Obermeyer et al. 2019, ICML): the cost of a chain of sites in
``pyro.markov`` grows with its length. A site's ``poutine.scale`` (that of a mini-batch's plate, say) multiplies the log
of the sum, as in Pyro's ``TraceEnum_ELBO``, and isn't a power within it.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.distributions.util import scale_and_mask
from pyro.ops.contract import contract_to_tensor
from pyro.ops.packed import pack
from pyro.ops.rings import LogRing
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.calls import is_enumerated
from pyro_symmetric.placement import as_tensor

MOST_ENTRIES = 2**27  # of one chain's largest table
CLOSE = 1e-3  # to 0, the log of what probabilities add up to
DRAWS = 8  # of the discrete sites, at which the density is compared with what the model itself finds
Model = Callable[..., Any]


class _Tables(NamedTuple):
    """The factors of a density: those without discrete sites, summed; the others by plates; and their common scale."""

    alone: Tensor
    tree: OrderedDict[Any, list[Any]]
    scale: Any


class Enumeration:
    """The discrete sites of a model, and where their values are laid.

    :param trace: of the model, with its discrete sites drawn.
    :raises ValueError: naming a discrete site that stands for many, but lies in no plate.
    """

    def __init__(self, trace: poutine.Trace):
        sites = {site["name"]: site for site in _sampled(trace)}
        self.sites = [name for name, site in sites.items() if is_enumerated(site)]
        self._batch_shapes = {name: site["fn"].batch_shape for name, site in sites.items()}
        for name in self.sites:
            plates = {frame.dim for frame in sites[name]["cond_indep_stack"] if frame.vectorized}
            shape = self._batch_shapes[name]
            if open_dims := [dim for dim in range(-len(shape), 0) if shape[dim] > 1 and dim not in plates]:
                raise ValueError(
                    f"the discrete site {name!r} has batch shape {tuple(shape)}, whose dimensions {open_dims} lie in "
                    "no pyro.plate; put it into plates, so that its values are summed out one by one"
                )
        depths = [len(shape) for shape in self._batch_shapes.values()]
        frames = [frame for site in sites.values() for frame in site["cond_indep_stack"]]
        self._first_dim = -1 - max([*depths, *(-frame.dim for frame in frames if frame.dim is not None)])

    def trace(self, model: Model, weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> poutine.Trace:
        """Run the model with its continuous sites given, and every value of its discrete ones side by side."""
        enumerated = poutine.condition(_Enumerate(self._first_dim)(model), data=dict(weights))
        return poutine.trace(enumerated).get_trace(*args, **kwargs)

    def log_prob(self, trace: poutine.Trace) -> Tensor:
        """The trace's log-density, with the discrete sites summed out.

        :raises ValueError: if sites that depend on discrete ones are scaled differently.
        """
        return self._summed(trace, self._tables(trace), Elimination())

    def draw(self, trace: poutine.Trace) -> tuple[dict[str, Tensor], Tensor]:
        """The discrete sites, drawn from their joint distribution given all else that is in the trace, and whether that
        is one, bool ``()``: it isn't if all values have the density 0, or NaN. No scale counts."""
        ring = Elimination()
        total = self._summed(trace, self._tables(trace), ring)
        drawn = ring.draw()
        return {name: self._unpacked(trace, name, drawn) for name in self.sites}, total.isfinite()

    def require_enumerable(self, model: Model, weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> None:
        """Try it, and compare the density at drawn discrete values with the model's own.

        :raises ValueError: in words, if the model can't be run with all values of its discrete sites at once, or if it
            then has another density than with one value of each.
        """
        names = _few(self.sites)
        try:
            with _AtMost():
                trace = self.trace(model, weights, args, kwargs)
                tables = self._tables(trace)
                self._summed(trace, tables, Elimination())
        except _Scales:
            raise
        except Exception as error:  # it did run with its discrete sites drawn, so that it is this
            said = (str(error).strip() or repr(error)).splitlines()[0]
            raise ValueError(
                f"the discrete sites {names} can't be summed out: the model fails on all of their values at once "
                f"({type(error).__name__}: {said}). Usual causes: Python control flow on a discrete value (write "
                "torch.where), indexing that doesn't broadcast (pyro.ops.indexing.Vindex), or a long loop outside of "
                "pyro.plate and pyro.markov"
            ) from error
        for name in self.sites:
            _require_whole(trace.nodes[name])
        for drawn in self._draws(model, trace, weights, args, kwargs):
            tree = OrderedDict((ordinal, list(terms)) for ordinal, terms in tables.tree.items())
            for name in self.sites:
                site: Any = trace.nodes[name]
                if "_enumerate_symbol" in site["infer"]:
                    tree.setdefault(_ordinal(trace, site), []).append(_indicator(site, drawn.nodes[name]["value"]))
            found = self._summed(trace, tables._replace(tree=tree), Elimination())
            expected = as_tensor(drawn.log_prob_sum())
            if bool(expected.isfinite()) and not _is_close(found, expected):
                raise ValueError(
                    f"the discrete sites {names} can't be summed out: the model has another density with all of their "
                    "values at once than with one value of each. Usual cause: a site adds or averages over a discrete "
                    "value's dimensions, as .sum() or .mean() without dim= does; put what depends on a plate's "
                    "discrete site into that plate"
                )

    def depending(
        self, names: Sequence[str], model: Model, weights: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> list[str]:
        """Those of some deterministic sites whose values depend on discrete ones: they change with these."""
        trace = self.trace(model, weights, args, kwargs)
        runs = list(self._draws(model, trace, weights, args, kwargs))
        values = {name: [as_tensor(run.nodes[name]["value"]) for run in (trace, *runs)] for name in names}
        return [name for name, (own, *others) in values.items() if not all(_is_close(own, one) for one in others)]

    # small steps ----------------------------------------------------------------------------------------------------

    def _draws(
        self, model: Model, trace: poutine.Trace, weights: Mapping[str, Tensor], args: Any, kwargs: Any
    ) -> Iterator[poutine.Trace]:
        """Runs with the discrete sites drawn and all else as in a trace, its mini-batches included."""
        nodes: dict[str, Any] = dict(trace.nodes)
        rows = {n: site["value"] for n, site in nodes.items() if site["type"] == "sample" and site_is_subsample(site)}
        for _ in range(DRAWS):
            yield poutine.trace(poutine.condition(model, data={**weights, **rows})).get_trace(*args, **kwargs)

    def _tables(self, trace: poutine.Trace) -> _Tables:
        trace.symbolize_dims()
        discrete = set(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())
        alone, tree, sites = torch.zeros((), device="cpu"), OrderedDict[Any, list[Tensor]](), []
        for site in _sampled(trace):
            log_prob, symbols = masked_log_prob(site), site["infer"]["_dim_to_symbol"]
            # Dimensions that are neither plates nor values are entries of one site, which are added up.
            dims = range(max(-log_prob.dim(), self._first_dim + 1), 0)
            extra = [dim for dim in dims if dim not in symbols and log_prob.shape[dim] > 1]
            term = pack(log_prob.sum(extra, keepdim=True) if extra else log_prob, symbols)
            if discrete.isdisjoint(term._pyro_dims):
                alone = alone + (log_prob * site["scale"]).sum()
            else:
                tree.setdefault(_ordinal(trace, site), []).append(term)
                sites.append(site)
        return _Tables(alone, tree, _common_scale(sites))

    def _summed(self, trace: poutine.Trace, tables: _Tables, ring: Elimination) -> Tensor:
        if not tables.tree:
            return tables.alone
        discrete = {dim for terms in tables.tree.values() for term in terms for dim in term._pyro_dims}
        discrete -= set(trace.plate_to_symbol.values())
        return tables.alone + contract_to_tensor(tables.tree, discrete, ring=ring) * tables.scale

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


# Pyro's handler and ring, under vmap ----------------------------------------------------------------------------------


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


class Elimination(LogRing):
    """Sums of products of tables in log-space, for :func:`pyro.ops.contract.contract_to_tensor`; and draws.

    Whatever order values are summed in, the table of a dimension at its turn, seen as a function of that dimension
    alone, is the log of its probabilities given the dimensions that are summed later. So one pass backwards draws all
    jointly: forward filtering and backward sampling (Carter & Kohn 1994, Biometrika 81), for any graph of sites.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tables: list[tuple[str, Any]] = []  # each dimension that was summed, and the table that it was summed of

    def sumproduct(self, terms: Sequence[Any], dims: Any) -> Any:
        terms = list(terms)
        sizes = {dim: size for term in terms for dim, size in zip(term._pyro_dims, term.shape, strict=True)}
        for dim in _order(tuple(term._pyro_dims for term in terms), frozenset(dims), tuple(sorted(sizes.items()))):
            table = _added([term for term in terms if dim in term._pyro_dims])
            self._tables.append((dim, table))
            summed = _named(table.logsumexp(table._pyro_dims.index(dim)), table._pyro_dims.replace(dim, ""))
            terms = [term for term in terms if dim not in term._pyro_dims] + [summed]
        return _added(terms)

    def draw(self) -> dict[str, Tensor]:
        """Values of all dimensions that were summed: dimension -> index, a packed tensor over plates' dimensions."""
        drawn: dict[str, Tensor] = {}
        for dim, table in reversed(self._tables):
            for other in (own for own in table._pyro_dims if own in drawn):
                index: Any = drawn[other]
                dims = "".join(sorted(set(table._pyro_dims + index._pyro_dims)))
                place = dims.index(other)
                taken = torch.take_along_dim(_aligned(table, dims), _aligned(index, dims), place).squeeze(place)
                table = _named(taken, dims.replace(other, ""))
            uniform = torch.rand_like(table).clamp(min=torch.finfo(table.dtype).tiny)  # 0 would rule a value out
            gumbel = -torch.log(-torch.log(uniform))
            index = (table + gumbel).argmax(table._pyro_dims.index(dim))  # is k with the probability of k
            drawn[dim] = _named(index, table._pyro_dims.replace(dim, ""))
        return drawn


@functools.lru_cache(maxsize=256)
def _order(terms: tuple[str, ...], dims: frozenset[str], sizes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """In which order to sum dimensions out: at each step the one that leaves the smallest table."""
    size, tables, order = dict(sizes), [frozenset(term) for term in terms], []
    left = sorted(dims & set(size))
    while left:
        joined = {dim: frozenset().union(*(table for table in tables if dim in table)) for dim in left}
        best = min(left, key=lambda dim: math.prod(size[other] for other in joined[dim]))
        tables = [table for table in tables if best not in table] + [joined[best] - {best}]
        left.remove(best)
        order.append(best)
    return tuple(order)


def _named(table: Any, dims: str) -> Any:
    table._pyro_dims = dims
    return table


def _added(terms: Sequence[Any]) -> Any:
    """The sum of packed tables, over the union of their dimensions."""
    dims = "".join(sorted(set("".join(term._pyro_dims for term in terms))))
    total: Any = sum(_aligned(term, dims) for term in terms)
    return _named(total.clone() if total is terms[0] else total, dims)


def _aligned(term: Any, dims: str) -> Tensor:
    """A packed table as one over more dimensions."""
    kept = [dim for dim in dims if dim in term._pyro_dims]
    ordered = term.permute([term._pyro_dims.index(dim) for dim in kept])
    sizes = dict(zip(kept, ordered.shape, strict=True))
    return ordered.reshape([sizes.get(dim, 1) for dim in dims])


# small steps --------------------------------------------------------------------------------------------------------


class _Scales(ValueError):
    """Sites that are summed out together, but scaled apart."""


class _AtMost(TorchDispatchMode):
    """Ends a computation whose tables would fill the memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > MOST_ENTRIES:
            raise MemoryError(f"a table of {result.numel()} numbers for each chain")
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


def _sampled(trace: poutine.Trace) -> Iterator[Any]:
    for site in trace.nodes.values():
        if site["type"] == "sample" and not site_is_subsample(site):
            yield site


def masked_log_prob(site: Any) -> Any:
    """The log-density of a site's value, 0 where ``poutine.mask`` takes it out. No scale counts."""
    return scale_and_mask(site["fn"].log_prob(site["value"], *site["args"]), 1.0, site["mask"])


def _ordinal(trace: poutine.Trace, site: Any) -> frozenset[str]:
    """The plates that a site lies in."""
    return frozenset(trace.plate_to_symbol[frame.name] for frame in site["cond_indep_stack"] if frame.vectorized)


def _indicator(site: Any, drawn: Any) -> Tensor:
    """A factor that leaves drawn values, ``batch_shape + event_shape``, of all that a discrete site lists."""
    event, dim = site["fn"].event_dim, site["infer"]["_enumerate_dim"]
    batch = drawn.shape[: drawn.dim() - event]
    listed = site["value"].reshape(-1, *[1] * len(batch), *drawn.shape[len(batch) :])
    same = (listed == drawn).reshape(len(listed), *batch, -1).all(-1)
    table = torch.where(same, 0.0, -torch.inf).reshape(-1, *[1] * (-1 - dim - len(batch)), *batch)
    return pack(table, site["infer"]["_dim_to_symbol"])


def _is_close(one: Tensor, other: Tensor) -> bool:
    """True if two values agree but for rounding; NaN agrees with NaN."""
    if one.shape != other.shape:
        return False
    return bool(torch.isclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True).all())


def _common_scale(sites: list[Any]) -> Any:
    """:raises ValueError: if there is more than one."""
    first = sites[0]["scale"] if sites else 1.0
    several = isinstance(first, Tensor) and first.numel() > 1
    for site in sites:
        if several or (site["scale"] is not first and bool(as_tensor(site["scale"] != first).any())):
            raise _Scales(
                f"the sites {sites[0]['name']!r} and {site['name']!r} are scaled differently (poutine.scale, or a "
                "plate that subsamples), but depend on discrete sites; what is summed out together needs one scale"
            )
    return first


def _few(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
