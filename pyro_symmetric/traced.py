r"""Any Pyro model with its arguments, run with its sites given, for many draws of them at once by vmap.

:class:`Traced` is what samplers and predictions share; :class:`TracedTarget` is what samplers move on. A model that
can't be mapped, such as one that branches on a sampled value, is run for one draw after another. Parts of Pyro that
:func:`torch.func.vmap` refuses have stand-ins, which choose or join in place of writing into a tensor; they compute the
same. Discrete latent sites are summed out exactly,

.. math:: \log p(w, y) = \log \sum_{k} p(w, k, y)

Pyro's handler lays the values of each along a tensor dimension of its own, left of all plates, so that one run of the
model gives the factors of all assignments, and Pyro's contraction sums them (tensor variable elimination, Obermeyer et
al. 2019, ICML): the cost of a chain of sites in ``pyro.markov`` grows with its length. A site's ``poutine.scale`` (that
of a mini-batch's plate, say) multiplies the log of the sum, as in Pyro's ``TraceEnum_ELBO``, where
``TraceEinsumEvaluator`` has it as a power within the sum.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import Delta, hmm
from pyro.distributions.torch_distribution import MaskedDistribution, TorchDistributionMixin
from pyro.distributions.util import scale_and_mask
from pyro.infer.autoguide import AutoGuide
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.infer.traceenum_elbo import _get_common_scale
from pyro.ops import gaussian, special, tensor_utils
from pyro.ops.contract import contract_to_tensor
from pyro.ops.packed import broadcast_all as aligned
from pyro.ops.packed import gather, pack, unpack
from pyro.ops.rings import LogRing
from pyro.poutine.enum_messenger import EnumMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.distributions.utils import broadcast_all
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import LOCK, running_pyro, without_warnings
from pyro_symmetric.arguments import as_tensor, described, described_call
from pyro_symmetric.weights import Weights, transform_of

RUNS = 10  # of a model, to see whether its sites and supports are always the same
MOST_ENTRIES = 2**27  # of one chain's largest table of discrete sites
DRAWS = 8  # of the discrete sites, at which the density is compared with what the model itself finds


class Traced:
    """A Pyro model with its arguments.

    :ivar discrete: the discrete sites that are summed out, and their batch shapes.
    :ivar one_by_one: why draws are evaluated one after another; empty if they are all at once.
    """

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.model, self.args, self.kwargs = model, args, kwargs
        self.discrete: dict[str, torch.Size] = {}
        self.one_by_one = ""

    def run(self, given: Mapping[str, Tensor], *, drawing: bool = False) -> poutine.Trace:
        """Run with these values of sites, and with all values of discrete sites that are summed out side by side;
        with ``drawing``, one of each, drawn unless it is given."""
        model = self.model if drawing or not self.discrete else _Enumerate(self._first_dim)(self.model)
        return poutine.trace(poutine.condition(model, data=dict(given))).get_trace(*self.args, **self.kwargs)

    def mapped(self, function: Callable[..., Any], *batches: Mapping[str, Tensor], randomness: str = "error") -> Any:
        """Results of a function of each draw, stacked."""
        with _running(promoted(tree_leaves(batches))):
            if not self.one_by_one:
                return torch.func.vmap(function, randomness=randomness)(*batches)
            count = len(tree_leaves(batches)[0])
            results = [function(*({n: value[s] for n, value in b.items()} for b in batches)) for s in range(count)]
            return tree_map(lambda *leaves: torch.stack(leaves), *results)

    def give_up_map(self, reason: object) -> None:
        """Evaluate draws one after another from now on, and say so."""
        said = (str(reason).strip() or repr(reason)).splitlines()[0]
        said = said.partition(" We don't support that yet")[0][:300].rstrip(".")  # PyTorch asks for a report of it
        self.one_by_one = f"the model can't be mapped over draws (torch.func.vmap): {said}"
        warnings.warn(
            f"draws are evaluated one after another, which takes longer: {self.one_by_one}. Usual causes: Python "
            "control flow or .item() on a sampled value, in-place changes, a distribution that PyTorch can't map",
            RuntimeWarning,
            stacklevel=5,
        )

    # discrete sites ---------------------------------------------------------------------------------------------------

    def sum_out(self, given: Mapping[str, Tensor]) -> None:
        """Sum the discrete sites out from now on.

        :param given: values of the continuous sites, at which the sum is tried out.
        :raises ValueError: naming a discrete site that can't be summed out: one that stands for many, but lies in no
            plate; or one with which the model has another density than with each value by itself.
        """
        with _running(promoted(list(given.values()))):
            sites = {site["name"]: site for site in _sampled(self.run(given))}
            self.discrete = {name: site["fn"].batch_shape for name, site in sites.items() if is_enumerated(site)}
            for name, shape in self.discrete.items():
                _require_plates(sites[name], shape)
            frames = [frame.dim for site in sites.values() for frame in site["cond_indep_stack"] if frame.vectorized]
            shapes = [site["fn"].batch_shape for site in sites.values()]
            self._first_dim = -1 - max([*map(len, shapes), *(-dim for dim in frames)])
            refused = f"the discrete sites {', '.join(map(repr, list(self.discrete)[:3]))} can't be summed out: "
            try:
                with _AtMost():
                    whole = self.run(given)
                    self.log_prob(whole)
            except Exception as error:  # it did run with its discrete sites drawn, so that it is this
                said = (str(error).strip() or repr(error)).splitlines()[0]
                raise ValueError(
                    f"{refused}the model fails on all of their values at once ({type(error).__name__}: {said}). Usual "
                    "causes: Python control flow on a discrete value (write torch.where), indexing that doesn't "
                    "broadcast (pyro.ops.indexing.Vindex), or a long loop outside of pyro.plate and pyro.markov"
                ) from error
            nodes: dict[str, Any] = dict(whole.nodes)
            rows = {n: s["value"] for n, s in nodes.items() if s["type"] == "sample" and site_is_subsample(s)}
            for _ in range(DRAWS):
                drawn, found = self.draw(whole)
                expected = as_tensor(self.run({**given, **rows, **drawn}, drawing=True).log_prob_sum())
                if bool(expected.isfinite()) and not _is_close(found, expected):
                    raise ValueError(
                        f"{refused}the model has another density with all of their values at once than with one value "
                        "of each. Usual cause: a site adds or averages over a discrete value's dimensions, as .sum() "
                        "or .mean() without dim= does; put what depends on a plate's discrete site into that plate"
                    )

    def log_prob(self, trace: poutine.Trace) -> Tensor:
        """The log-density of a :meth:`run`, with the discrete sites summed out.

        :raises ValueError: if sites that depend on discrete ones are scaled differently.
        """
        if not self.discrete:
            return as_tensor(trace.log_prob_sum())
        alone, total, scale, _ = self._summed(trace)
        return alone + scale * total

    def draw(self, trace: poutine.Trace) -> tuple[dict[str, Tensor], Tensor]:
        """The discrete sites, drawn from their joint distribution given all else that is in a :meth:`run`, and the log
        of the density with them, which isn't finite if no values are possible. No scale counts for the draws."""
        alone, total, scale, ring = self._summed(trace)
        drawn, log_prob = ring.draw()
        values, nodes = dict[str, Tensor](), dict[str, Any](trace.nodes)
        for name, batch in self.discrete.items():
            site = nodes[name]
            listed = site["value"].reshape(-1, *site["fn"].event_shape)
            index = drawn.get(site["infer"]["_enumerate_symbol"], 0)  # which isn't there if there is one value only
            values[name] = listed[unpack(index, trace.symbol_to_dim)].expand(batch + listed.shape[1:])
        return values, alone + scale * (total + log_prob)

    def _summed(self, trace: poutine.Trace) -> tuple[Any, Any, Any, _Elimination]:
        """The log-density of the sites without discrete ones, of the others' sum, the latter's scale, and the sum."""
        trace.symbolize_dims()
        ring = _Elimination(list(trace.symbol_to_dim))
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


class TracedTarget(Traced):
    """Any Pyro model with its data; attributes and methods as of a density's ``NetworkTarget``.

    Mini-batches are what its plates with ``subsample_size`` draw. It runs alone, since Pyro's handlers belong to the
    process.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(model, args, kwargs)
        self._drawn, self._programs = Drawn(device, dtype), dict[Any, Callable[[Weights], Weights]]()
        with LOCK, explaining(model, args, kwargs):
            trace = self._prior_run()
        latent = _latent(trace)
        # Those that samplers move: discrete ones that can be summed out aren't.
        self.sites: Mapping[str, Any] = {site["name"]: site["fn"] for site in latent if not is_enumerated(site)}
        if not self.sites:
            names = [site["name"] for site in latent]
            why = f"discrete latent sites only, {names}, which are summed out" if names else "no latent site"
            hint = "; make a model of a network by BayesianModel(net)" if isinstance(model, torch.nn.Module) else ""
            raise ValueError(f"the model has {why}, so there is nothing to sample{hint}")
        observed: list[Any] = [trace.nodes[name] for name in trace.observation_nodes]
        check_observed(site for site in observed if not is_deterministic(site))
        self.row_counts = _subsampled_plates(trace)
        given = {site["name"]: site["value"] for site in latent if site["name"] in self.sites}
        self._probes = {site: _probe(site, self.sites[site], value) for site, value in given.items()}
        for _ in range(RUNS):
            self._require_same_layout(self._prior_run())
        if len(self.sites) < len(latent):
            self.sum_out(given)
        with _running():
            if self.discrete:
                self._require_same_layout(self.run(given))
            self.computed: Mapping[str, torch.Size] = {} if self.row_counts else self._deterministic_sites(trace, given)

    def log_joint(self, weights: Weights, rows: Mapping[str, Tensor] | None) -> Tensor:
        return self.mapped(self._log_joint, weights, dict(rows or {}))

    def _log_joint(self, weights: Weights, rows: Mapping[str, Tensor]) -> Tensor:
        trace = self.run({**weights, **rows})
        if self.one_by_one:  # which may branch on values
            self._require_same_layout(trace)
        return self.log_prob(trace)

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
        nodes: dict[str, Any] = self.run(weights).nodes
        like = next(iter(weights.values()))
        return {site: nodes[site]["value"].to(like.dtype) for site in self.computed}

    def prior_weights(self, num_chains: int) -> Weights:
        # A model draws as it runs, one prior draw a run, and drawing inside vmap fails for many distributions. Starting
        # points are drawn once a sampling run, so this loop costs milliseconds.
        runs: list[dict[str, Any]] = [self._prior_run().nodes for _ in range(num_chains)]
        return {site: torch.stack([nodes[site]["value"] for nodes in runs]) for site in self.sites}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}

    def __repr__(self) -> str:
        return f"sites={list(self.sites)}"

    # runs -----------------------------------------------------------------------------------------------------------

    def _prior_run(self) -> poutine.Trace:
        with LOCK, torch.no_grad():
            return poutine.trace(self._drawn(self.model)).get_trace(*self.args, **self.kwargs)

    def _require_same_layout(self, trace: poutine.Trace) -> None:
        """:raises ValueError: if a run has other sites, shapes or supports than the first."""
        drawn, nodes = {site["name"] for site in _latent(trace) if not is_enumerated(site)}, dict[str, Any](trace.nodes)
        if changed := sorted(set(self._probes) ^ (drawn | (set(self._probes) & set(nodes)))):
            raise ValueError(
                f"the sites {changed} exist in some runs of the model only; a sampler needs the same ones in all"
            )
        for name, (probe, expected) in self._probes.items():
            # With discrete sites summed out, each value's support is compared.
            same_shape = nodes[name]["value"].shape == expected.shape
            if not (same_shape and bool((transform_of(name, nodes[name]["fn"])(probe) == expected).all())):
                raise ValueError(
                    f"the support or shape of site {name!r} depends on other sites; a sampler needs a fixed one. "
                    "Sample it on a fixed support and transform it, e.g. Uniform(0, 1) times the bound"
                )

    def _deterministic_sites(self, trace: poutine.Trace, given: Weights) -> dict[str, torch.Size]:
        """Deterministic sites and their shapes. Those of complex numbers are left out, and those that depend on
        discrete sites, which have no value if these are summed out."""
        found: dict[str, Any] = {name: site["value"] for name, site in trace.nodes.items() if is_deterministic(site)}
        shapes = {name: value.shape for name, value in found.items() if not value.is_complex()}
        runs: list[Any] = [self.run(given, drawing=True).nodes for _ in range(DRAWS if self.discrete and shapes else 0)]
        whole: Any = self.run(given).nodes if runs else {}
        same = {name: all(_is_close(whole[name]["value"], own[name]["value"]) for own in runs) for name in shapes}
        if unclear := [name for name in shapes if not same[name]]:
            warnings.warn(
                f"the deterministic sites {unclear} depend on discrete sites, which are summed out, so the posterior "
                "doesn't hold them",
                UserWarning,
                stacklevel=4,
            )
        return {name: shape for name, shape in shapes.items() if name not in unclear}


# small steps --------------------------------------------------------------------------------------------------------


class Drawn(Messenger):
    """Draws latent sites on a device and in a dtype: a prior ``Normal(0.0, 1.0)`` draws on the CPU in float32. Those
    that have no draws (an improper prior, or no sampler) are drawn from the box of unconstrained values in (-2, 2),
    where chains start."""

    def __init__(self, device: torch.device | str | None, dtype: torch.dtype | None):
        super().__init__()
        self.device, self.dtype = device, dtype

    def _pyro_sample(self, msg: Any) -> None:
        if msg["value"] is not None or msg["done"] or site_is_subsample(msg):
            return
        with contextlib.suppress(NotImplementedError):
            msg["value"] = msg["fn"](*msg["args"], **msg["kwargs"])
        if msg["value"] is None:
            transform = transform_of(msg["name"], msg["fn"])
            shape = transform.inverse_shape(torch.Size(msg["fn"].batch_shape) + torch.Size(msg["fn"].event_shape))
            msg["value"] = transform(4 * torch.rand(shape, device="cpu") - 2)
        if isinstance(msg["value"], Tensor) and msg["value"].is_floating_point():
            msg["value"] = msg["value"].to(device=self.device, dtype=self.dtype)
        msg["done"] = True


def _probe(site: str, fn: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """Unconstrained values of a site, and what its first support makes of them."""
    transform = transform_of(site, fn)
    free = torch.Size(transform.inverse_shape(like.shape))
    probe = torch.linspace(-1.5, 1.5, free.numel(), device="cpu").reshape(free).to(like)
    return probe, transform(probe)


def _sampled(trace: poutine.Trace) -> list[Any]:
    return [s for s in trace.nodes.values() if s["type"] == "sample" and not site_is_subsample(s)]


def _latent(trace: poutine.Trace) -> list[Any]:
    return [site for site in _sampled(trace) if not site["is_observed"]]


def _subsampled_plates(trace: poutine.Trace) -> dict[str, tuple[int, int]]:
    """Plates that draw their own subsample: name -> (full size, subsample size).

    A warning tells of those whose subsample the model gives (``subsample=``): it never changes.

    :raises ValueError: naming a subsampled plate that holds a latent site.
    """
    plates = dict[str, tuple[int, int]]()
    for site in trace.nodes.values():
        for frame in site.get("cond_indep_stack", ()):
            total, size = frame.full_size, frame.size
            if total is None or not 0 <= size < total:
                continue
            if getattr(trace.nodes[frame.name]["fn"], "subsample_size", None) is None:
                warnings.warn(
                    f"the plate {frame.name!r} holds {size} of {total} rows, always the same ones, and each counts "
                    f"{total / size:.3g} times. The posterior is narrower than these rows can make it; pass the whole "
                    "data, and subsample_size= to the plate for a stochastic-gradient sampler",
                    stacklevel=2,
                )
                continue
            plates[frame.name] = int(total), int(size)
            if site["type"] == "sample" and not site["is_observed"] and not is_enumerated(site):
                raise ValueError(
                    f"the latent site {site['name']!r} lies in the subsampled plate {frame.name!r}, so a mini-batch "
                    "would move some of its values only; samplers here need global latent sites"
                )
    return plates


def require_model(model: Any) -> None:
    """:raises TypeError: if it can't be one."""
    if not callable(model) or isinstance(model, type | AutoGuide | MCMCKernel):
        raise TypeError(f"model is {described(model)}; it must be a Pyro model: callable, no class, guide or kernel")


# sums over discrete sites ---------------------------------------------------------------------------------------------


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


class _Elimination(LogRing):
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
    tables = aligned(*terms)
    return _without(tables[0], "", functools.reduce(torch.add, tables, torch.zeros_like(tables[0])))


class _AtMost(TorchDispatchMode):
    """Ends a computation whose tables would fill the memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > MOST_ENTRIES:
            raise MemoryError(f"a table of {result.numel()} numbers for each chain")
        return result


def _require_plates(site: Any, shape: torch.Size) -> None:
    """:raises ValueError: naming a discrete site whose values Pyro can't list one by one."""
    plates = {frame.dim for frame in site["cond_indep_stack"]}
    if isinstance(site["fn"], dist.Empirical):
        raise ValueError(f"the discrete site {site['name']!r} is Empirical, of which Pyro lists no probabilities")
    if any(shape[dim] > 1 and dim not in plates for dim in range(-len(shape), 0)):
        raise ValueError(
            f"the discrete site {site['name']!r} has batch shape {tuple(shape)}, of which dimensions lie in no "
            "pyro.plate; put it into plates, so that its values are summed out one by one"
        )


def is_enumerated(site: Any) -> bool:
    """True if a sample site is latent and has finitely many values, so that it can be summed out."""
    fn = site["fn"]
    return not site["is_observed"] and isinstance(fn, TorchDistributionMixin) and bool(fn.has_enumerate_support)


def masked_log_prob(site: Any) -> Any:
    """The log-density of a site's value, 0 where ``poutine.mask`` takes it out. No scale counts."""
    return scale_and_mask(site["fn"].log_prob(site["value"], *site["args"]), 1.0, site["mask"])


def _is_close(one: Any, other: Any) -> bool:
    """True if two values agree but for rounding; NaN agrees with NaN."""
    one, other = as_tensor(one), as_tensor(other)
    same = one.shape == other.shape
    return same and bool(torch.isclose(one.double(), other.double(), rtol=1e-4, atol=1e-6, equal_nan=True).all())


# sites and places ----------------------------------------------------------------------------------------------------


def is_deterministic(site: Any) -> bool:
    """True if a site's value follows from others: a ``pyro.deterministic``, or what ``poutine.reparam`` made of a site.

    Pyro makes an observed sample site of both: its distribution is a :class:`~pyro.distributions.Delta` at its value,
    whose density is switched off, or stands for the change of variables.
    """
    if site["type"] != "sample" or not site["is_observed"]:
        return False
    fn = site["fn"]
    switched_off = isinstance(fn, MaskedDistribution) and fn._mask is False and isinstance(fn.base_dist, Delta)
    at_its_value = isinstance(fn, Delta) and fn.v is site["value"]
    return bool(site["infer"].get("_deterministic")) or switched_off or at_its_value


def check_observed(observed: Iterable[Any]) -> None:
    """:raises ValueError: naming the observed sites that hold complex numbers, or arrays of NumPy and lists, which
    only a distribution of one's own may score."""
    sites = {site["name"]: site for site in observed}
    values = {name: site["value"] for name, site in sites.items() if isinstance(site["value"], Tensor | Number)}
    packages = {name: type(site["fn"]).__module__.partition(".")[0] for name, site in sites.items()}
    if others := [name for name in sites if name not in values and packages[name] in ("pyro", "torch")]:
        found = ", ".join(described(sites[name]["value"]) for name in others)
        raise ValueError(f"the observed sites {others} hold {found}; pass tensors, as torch.as_tensor gives them")
    if several := [name for name, value in values.items() if as_tensor(value).is_complex()]:
        raise ValueError(
            f"the observed sites {several} hold complex numbers, whose imaginary parts would be lost; observe both "
            "parts, as torch.view_as_real gives them"
        )


@contextlib.contextmanager
def explaining(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Around a call of a Pyro model: add to its error what it was called with."""
    try:
        yield
    except Exception as error:
        kind = "module" if isinstance(model, nn.Module) else "model"
        name = getattr(model, "__name__", type(model).__name__)
        error.add_note(f"This came from the {kind} {name}, called with {described_call(args, kwargs)}.")
        raise


def placed(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The model and its arguments on the device and, if floating-point, in the dtype; ``None``: as they are.

    The caller's own objects stay as they are: a module that isn't there yet is copied. Tensors are found in lists,
    tuples and dictionaries too, at any depth.
    """

    def place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device=device, dtype=dtype if value.is_floating_point() else None)

    if isinstance(model, nn.Module):
        parts = [*model.parameters(), *model.buffers()]
        if any(place(part) is not part for part in parts):
            model = copy.deepcopy(model).to(device=device, dtype=dtype)
    return model, tree_map(place, args), tree_map(place, kwargs)


def promoted(values: list[Tensor]) -> torch.dtype | None:
    """The dtype that holds all floating-point tensors of a list; ``None`` if it has none."""
    dtypes = [value.dtype for value in values if value.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


# stand-ins ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Run models alone, as :func:`running_pyro`, with the parts below in place of the originals."""
    with running_pyro(dtype), contextlib.ExitStack() as stack:
        for owner, name, part in _PARTS:
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, part)
        yield


_check = Distribution._validate_sample


def _unchecked(self: Any, value: Tensor) -> None:
    """No check by distributions that were made while checks were on, such as a ``PyroSample``'s: a chain that left all
    numbers behind mustn't stop the others, and no map can hold a check. Those of other threads check as ever."""
    if not LOCK._is_owned():
        _check(self, value)


class _SafeLog(torch.autograd.Function):
    """The logarithm, whose slope at 0 is finite."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / x.clamp(min=torch.finfo(x.dtype).eps)


def _safe_cholesky(x: Tensor) -> Tensor:
    """With a jitter on the diagonal that no gradient goes through."""
    relative = tensor_utils.CHOLESKY_RELATIVE_JITTER
    if x.size(-1) == 1:
        return (x.clamp(min=torch.finfo(x.dtype).tiny) if relative else x).sqrt()
    jitter = relative * torch.finfo(x.dtype).eps * x.detach().abs().max(-1).values
    return torch.linalg.cholesky(x + jitter.diag_embed())


def _ordered_logistic(self: Any, predictor: Tensor, cutpoints: Tensor, validate_args: bool | None = None) -> None:
    below = torch.sigmoid(cutpoints - predictor.unsqueeze(-1))
    self.predictor, self.cutpoints = predictor.expand(below.shape[:-1]), cutpoints.expand(below.shape)
    steps = torch.cat([below[..., :1], below[..., 1:] - below[..., :-1], 1 - below[..., -1:]], -1)
    super(dist.OrderedLogistic, self).__init__(steps, validate_args=validate_args)


def _multinomial_log_prob(self: Any, value: Tensor) -> Tensor:
    if self._validate_args:
        self._validate_sample(value)
    logits, value = broadcast_all(self.logits, value)
    logits = torch.where((value == 0) & (logits == -torch.inf), 0.0, logits)
    ways = torch.lgamma(value.sum(-1) + 1) - torch.lgamma(value + 1).sum(-1)
    return ways + (logits * value).sum(-1)


_PARTS: list[tuple[Any, str, Any]] = [
    (special, "_SafeLog", _SafeLog),
    (gaussian, "safe_cholesky", _safe_cholesky),
    (hmm, "safe_cholesky", _safe_cholesky),
    (dist.OrderedLogistic, "__init__", _ordered_logistic),
    (torch.distributions.Multinomial, "log_prob", _multinomial_log_prob),
    (Distribution, "_validate_sample", _unchecked),
]
