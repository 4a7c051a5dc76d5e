r"""A model's discrete latent sites, summed out exactly, under :func:`torch.func.vmap` as well; and drawn.

.. math:: \log p(w, y) = \log \sum_{k} p(w, k, y)

Pyro's handler lays the values of each discrete site along a tensor dimension of its own, left of all plates, so that
one run of the model gives the factors of all assignments, and Pyro's contraction sums them (tensor variable
elimination, Obermeyer et al. 2019, ICML): the cost of a chain of sites in ``pyro.markov`` grows with its length. A
site's ``poutine.scale`` (that of a mini-batch's plate, say) multiplies the log of the sum, as in Pyro's
``TraceEnum_ELBO``, where ``TraceEinsumEvaluator`` has it as a power within the sum.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.distributions.util import scale_and_mask
from pyro.infer.traceenum_elbo import _get_common_scale
from pyro.ops.contract import contract_to_tensor
from pyro.ops.packed import broadcast_all, gather, pack, unpack
from pyro.ops.rings import LogRing
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.arguments import as_tensor

MOST_ENTRIES = 2**27  # of one chain's largest table
DRAWS = 8  # of the discrete sites, at which the density is compared with what the model itself finds


class Enumeration:
    """The discrete sites of a model, and where their values are laid.

    :param trace: of the model, with its discrete sites drawn.
    :param weights: values of its continuous sites, at which the sum is tried out.
    :raises ValueError: naming a discrete site that can't be summed out: one that stands for many, but lies in no plate;
        or one with which the model has another density than with each value by itself.
    """

    def __init__(self, model: Any, trace: poutine.Trace, weights: Mapping[str, Tensor], args: Any, kwargs: Any):
        self._model, self._weights, self._args, self._kwargs = model, weights, args, kwargs
        sites = {site["name"]: site for site in _sampled(trace)}
        self.sites = [name for name, site in sites.items() if is_enumerated(site)]
        self._batch_shapes = {name: site["fn"].batch_shape for name, site in sites.items()}
        for name in self.sites:
            shape, plates = self._batch_shapes[name], {frame.dim for frame in sites[name]["cond_indep_stack"]}
            if isinstance(sites[name]["fn"], dist.Empirical):
                raise ValueError(f"the discrete site {name!r} is Empirical, of which Pyro lists no probabilities")
            if any(shape[dim] > 1 and dim not in plates for dim in range(-len(shape), 0)):
                raise ValueError(
                    f"the discrete site {name!r} has batch shape {tuple(shape)}, of which dimensions lie in no "
                    "pyro.plate; put it into plates, so that its values are summed out one by one"
                )
        frames = [frame.dim for site in sites.values() for frame in site["cond_indep_stack"] if frame.dim is not None]
        depth = max([*map(len, self._batch_shapes.values()), *(-dim for dim in frames)])
        self._first_dim = -1 - depth
        self._require_sum()

    def run(self, model: Any, weights: Mapping[str, Tensor], args: Any, kwargs: Any) -> poutine.Trace:
        """Run the model with its continuous sites given, and every value of its discrete ones side by side."""
        enumerated = poutine.condition(_Enumerate(self._first_dim)(model), data=dict(weights))
        return poutine.trace(enumerated).get_trace(*args, **kwargs)

    def log_prob(self, trace: poutine.Trace) -> Tensor:
        """The log-density of a :meth:`run`, with the discrete sites summed out.

        :raises ValueError: if sites that depend on discrete ones are scaled differently.
        """
        alone, total, scale, _ = self._summed(trace)
        return alone + scale * total

    def draw(self, trace: poutine.Trace) -> tuple[dict[str, Tensor], Tensor]:
        """The discrete sites, drawn from their joint distribution given all else that is in a :meth:`run`, and the log
        of the density with them, which isn't finite if no values are possible. No scale counts for the draws."""
        alone, total, scale, ring = self._summed(trace)
        drawn, log_prob = ring.draw()
        values, nodes = dict[str, Tensor](), dict[str, Any](trace.nodes)
        for name in self.sites:
            site = nodes[name]
            listed = site["value"].reshape(-1, *site["fn"].event_shape)
            index = drawn.get(site["infer"]["_enumerate_symbol"], 0)  # which isn't there if there is one value only
            shape = self._batch_shapes[name] + listed.shape[1:]
            values[name] = listed[unpack(index, trace.symbol_to_dim)].expand(shape)
        return values, alone + scale * (total + log_prob)

    def depending(self, names: Sequence[str]) -> list[str]:
        """Those of some deterministic sites whose values depend on discrete ones: they change with these."""
        trace = self.run(self._model, self._weights, self._args, self._kwargs)
        runs = [trace, *(self._with(trace, {}) for _ in range(DRAWS))]
        values = {name: [as_tensor(run.nodes[name]["value"]) for run in runs] for name in names}
        return [name for name, (own, *others) in values.items() if not all(_is_close(own, one) for one in others)]

    # small steps ----------------------------------------------------------------------------------------------------

    def _summed(self, trace: poutine.Trace) -> tuple[Any, Any, Any, Elimination]:
        """The log-density of the sites without discrete ones, of the others' sum, the latter's scale, and the sum."""
        trace.symbolize_dims()
        ring = Elimination(list(trace.symbol_to_dim))
        discrete = set(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())
        alone, tree, scales = torch.zeros((), device="cpu"), OrderedDict[Any, list[Any]](), []
        for site in _sampled(trace):
            log_prob, symbols = masked_log_prob(site), site["infer"]["_dim_to_symbol"]
            # Dimensions that are neither plates nor values are entries of one site, which are added up.
            dims = range(max(-log_prob.dim(), self._first_dim + 1), 0)
            extra = [dim for dim in dims if dim not in symbols and log_prob.shape[dim] > 1]
            term = pack(log_prob.sum(extra, keepdim=True) if extra else log_prob, symbols)
            if discrete.isdisjoint(term._pyro_dims):
                alone = alone + (log_prob * site["scale"]).sum()
            else:
                plates = (frame.name for frame in site["cond_indep_stack"] if frame.vectorized)
                tree.setdefault(frozenset(trace.plate_to_symbol[name] for name in plates), []).append(term)
                scales.append(site["scale"])
        if not tree:
            return alone, 0.0, 1.0, ring
        return alone, contract_to_tensor(tree, discrete, ring=ring), _get_common_scale(scales), ring

    def _require_sum(self) -> None:
        """Try it, and compare the density at drawn discrete values with the model's own."""
        refused = f"the discrete sites {', '.join(map(repr, self.sites[:3]))} can't be summed out: "
        try:
            with _AtMost():
                trace = self.run(self._model, self._weights, self._args, self._kwargs)
                self.log_prob(trace)
        except Exception as error:  # it did run with its discrete sites drawn, so that it is this
            said = (str(error).strip() or repr(error)).splitlines()[0]
            raise ValueError(
                f"{refused}the model fails on all of their values at once ({type(error).__name__}: {said}). Usual "
                "causes: Python control flow on a discrete value (write torch.where), indexing that doesn't broadcast "
                "(pyro.ops.indexing.Vindex), or a long loop outside of pyro.plate and pyro.markov"
            ) from error
        for _ in range(DRAWS):
            drawn, found = self.draw(trace)
            expected = as_tensor(self._with(trace, drawn).log_prob_sum())
            if bool(expected.isfinite()) and not _is_close(found, expected):
                raise ValueError(
                    f"{refused}the model has another density with all of their values at once than with one value of "
                    "each. Usual cause: a site adds or averages over a discrete value's dimensions, as .sum() or "
                    ".mean() without dim= does; put what depends on a plate's discrete site into that plate"
                )

    def _with(self, trace: poutine.Trace, drawn: Mapping[str, Tensor]) -> poutine.Trace:
        """A run with one value of each discrete site, drawn if it isn't given, and with a trace's mini-batches."""
        nodes: dict[str, Any] = dict(trace.nodes)
        rows = {n: site["value"] for n, site in nodes.items() if site["type"] == "sample" and site_is_subsample(site)}
        given = poutine.condition(self._model, data={**self._weights, **rows, **drawn})
        return poutine.trace(given).get_trace(*self._args, **self._kwargs)


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
        self._value_dims[msg["name"]] = {d: number for d, number in ids.items() if len(shape) >= -d and shape[d] > 1}


class Elimination(LogRing):
    """Sums of products of tables in log-space, for :func:`pyro.ops.contract.contract_to_tensor`; and draws.

    The last site's values are summed first: what depends on a site comes after it, so that a tree's tables stay small.
    The table of a dimension at its turn, seen as a function of that dimension alone, is the log of its probabilities
    given the dimensions that are summed later. So one pass backwards draws all jointly: forward filtering and backward
    sampling (Carter & Kohn 1994, Biometrika 81), for any graph of sites.

    :param order: all dimensions, as the model makes them.
    """

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self._order = {dim: place for place, dim in enumerate(order)}
        self._tables: list[tuple[str, Any]] = []  # each dimension that was summed, and the table that it was summed of

    def sumproduct(self, terms: Sequence[Any], dims: Any) -> Any:
        terms = list(terms)
        for dim in sorted(dims, key=self._order.__getitem__, reverse=True):
            if meeting := [term for term in terms if dim in term._pyro_dims]:
                table = _added(meeting)
                self._tables.append((dim, table))
                summed = _without(table, dim, table.logsumexp(table._pyro_dims.index(dim)))
                terms = [term for term in terms if dim not in term._pyro_dims] + [summed]
        return _added(terms)

    def draw(self) -> tuple[dict[str, Tensor], Any]:
        """Values of all dimensions that were summed: dimension -> index, a packed tensor over plates' dimensions; and
        the log of their probability."""
        drawn, log_prob = dict[str, Tensor](), 0.0
        for dim, table in reversed(self._tables):
            for other in [own for own in table._pyro_dims if own in drawn]:
                table = gather(table, drawn[other], other)
            place = table._pyro_dims.index(dim)
            uniform = torch.rand_like(table).clamp(min=torch.finfo(table.dtype).tiny)  # 0 would rule a value out
            index = (table - torch.log(-torch.log(uniform))).argmax(place)  # is k with the probability of k
            log_prob = log_prob + table.log_softmax(place).gather(place, index.unsqueeze(place)).sum()
            drawn[dim] = _without(table, dim, index)
        return drawn, log_prob


def _without(table: Any, dim: str, result: Any) -> Any:
    result._pyro_dims = table._pyro_dims.replace(dim, "")
    return result


def _added(terms: Sequence[Any]) -> Any:
    """The sum of packed tables, over the union of their dimensions."""
    aligned = broadcast_all(*terms)
    return _without(aligned[0], "", functools.reduce(torch.add, aligned, torch.zeros_like(aligned[0])))


class _AtMost(TorchDispatchMode):
    """Ends a computation whose tables would fill the memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > MOST_ENTRIES:
            raise MemoryError(f"a table of {result.numel()} numbers for each chain")
        return result


def _sampled(trace: poutine.Trace) -> Iterator[Any]:
    yield from (s for s in trace.nodes.values() if s["type"] == "sample" and not site_is_subsample(s))


def is_enumerated(site: Any) -> bool:
    """True if a sample site is latent and has finitely many values, so that it can be summed out."""
    fn = site["fn"]
    return not site["is_observed"] and isinstance(fn, TorchDistributionMixin) and bool(fn.has_enumerate_support)


def masked_log_prob(site: Any) -> Any:
    """The log-density of a site's value, 0 where ``poutine.mask`` takes it out. No scale counts."""
    return scale_and_mask(site["fn"].log_prob(site["value"], *site["args"]), 1.0, site["mask"])


def _is_close(one: Tensor, other: Tensor) -> bool:
    """True if two values agree but for rounding; NaN agrees with NaN."""
    same = one.shape == other.shape
    return same and bool(torch.isclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True).all())
