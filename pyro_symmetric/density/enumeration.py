r"""Exact sums over the discrete latent sites of a Pyro model, and draws of these sites.

.. math:: \log p(w, y) = \log \sum_{k} p(w, k, y)

Parallel enumeration lays the values of each discrete site along a tensor dimension of
its own, left of all plates, so one run of the model gives the factors of all
assignments. Pyro's contraction sums their products (tensor variable elimination,
Obermeyer et al. 2019, ICML): the cost of a chain of sites in ``pyro.markov`` is linear
in its length. A site's ``poutine.scale``, such as that of a mini-batch's plate,
multiplies the log of the sum, as in Pyro's ``TraceEnum_ELBO``; in
``TraceEinsumEvaluator`` it is a power inside the sum.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.distributions.util import scale_and_mask
from pyro.infer.traceenum_elbo import _get_common_scale
from pyro.ops.contract import contract_to_tensor
from pyro.ops.packed import broadcast_all, gather, pack, unpack
from pyro.ops.rings import LogRing
from pyro.poutine import Trace
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.arguments import Entries
from pyro_symmetric.density.site_checks import sampled
from pyro_symmetric.weights import ByName, Weights

MOST_ENTRIES = 2**27  # of the largest table of one chain


class Assignment(NamedTuple):
    """Values of the discrete sites, and the unscaled log-density of each site there."""

    values: Weights
    log_probs: ByName


class Enumeration(EnumMessenger):
    """Parallel enumeration of discrete sites under :func:`torch.func.vmap`, where no
    ``tensor.data`` can be read.

    :param sites: the sample sites of a trace.
    :param discrete: the sites to enumerate.
    :ivar batch_shapes: discrete site -> its batch shape.
    :raises ValueError: naming a discrete site whose values can't be enumerated one by
        one.
    """

    def __init__(self, sites: Sequence[Any], discrete: Sequence[Any]):
        for site in discrete:
            _require_enumerable(site)
        self.batch_shapes = {site["name"]: site["fn"].batch_shape for site in discrete}
        plate_dims = [
            frame.dim
            for site in sites
            for frame in site["cond_indep_stack"]
            if frame.vectorized
        ]
        num_dims = [len(site["fn"].batch_shape) for site in sites]
        self._first_dim = -1 - max([*num_dims, *(-dim for dim in plate_dims)])
        super().__init__(first_available_dim=self._first_dim)

    def _pyro_post_sample(self, msg: Any) -> None:
        value = msg["value"]
        fn = msg["fn"]
        if value is None or not isinstance(fn, TorchDistributionMixin):
            return
        shape = value.shape[: value.dim() - fn.event_dim]
        ids = msg["infer"].setdefault("_dim_to_id", {})
        ids.update(self._param_dims.get(msg["name"], {}))
        self._value_dims[msg["name"]] = {
            dim: id_
            for dim, id_ in ids.items()
            if len(shape) >= -dim and shape[dim] > 1
        }

    def log_prob(self, trace: Trace) -> Tensor:
        """Return the log-density of an enumerated trace with the discrete sites summed
        out.

        :raises ValueError: if sites that depend on discrete sites have different
            scales.
        """
        continuous, log_sum, scale, _ = self._contract(trace)
        return continuous + scale * log_sum

    def draw(self, trace: Trace) -> tuple[Weights, Tensor]:
        """Draw the discrete sites from their joint distribution given all other sites
        of an enumerated trace.

        :return: the draws, and the log-density with them, which isn't finite if no
            values are possible. Scales count for the density, not for the draws.
        """
        continuous, log_sum, scale, elimination = self._contract(trace)
        indices, log_prob = elimination.draw()
        draws = {}
        nodes = Entries(trace.nodes)
        for name, batch_shape in self.batch_shapes.items():
            site = nodes[name]
            support = site["value"].reshape(-1, *site["fn"].event_shape)
            # a support of one value has no dimension
            index = indices.get(site["infer"]["_enumerate_symbol"], 0)
            draws[name] = support[unpack(index, trace.symbol_to_dim)].expand(
                batch_shape + support.shape[1:]
            )
        return draws, continuous + scale * (log_sum + log_prob)

    def random_assignment(self, trace: Trace) -> Assignment:
        """Draw values of the discrete sites, each with equal probability and apart from
        the others, also those of one plate, and score them by the factors of an
        enumerated trace."""
        trace.symbolize_dims()
        draws = {}
        indices = {}
        nodes = Entries(trace.nodes)
        for name, batch_shape in self.batch_shapes.items():
            site = nodes[name]
            support = site["value"].reshape(-1, *site["fn"].event_shape)
            index = torch.randint(len(support), batch_shape, device=support.device)
            draws[name] = support[index]
            if symbol := site["infer"].get("_enumerate_symbol"):
                indices[symbol] = pack(index, site["infer"]["_dim_to_symbol"])
        log_probs = {}
        for site in sampled(trace):
            factor = self._factor(site)
            for symbol in filter(indices.__contains__, factor._pyro_dims):
                factor = gather(factor, indices[symbol], symbol)
            log_probs[site["name"]] = factor.sum()
        return Assignment(draws, log_probs)

    def _contract(self, trace: Trace) -> _Contraction:
        """Sum over the discrete sites."""
        trace.symbolize_dims()
        enumerated = set(trace.symbol_to_dim) - set(trace.plate_to_symbol.values())
        continuous = torch.zeros((), device="cpu")
        factors = OrderedDict[Any, list[Any]]()  # by their plates
        scales = []
        for site in sampled(trace):
            factor = self._factor(site)
            if enumerated.isdisjoint(factor._pyro_dims):
                continuous = continuous + (masked_log_prob(site) * site["scale"]).sum()
                continue
            plates = frozenset(trace.plate_to_symbol[name] for name in _plates(site))
            factors.setdefault(plates, []).append(factor)
            scales.append(site["scale"])
        elimination = _Elimination(list(trace.symbol_to_dim))
        if not factors:
            return _Contraction(continuous, 0.0, 1.0, elimination)
        scale = _get_common_scale(scales)
        log_sum = contract_to_tensor(factors, enumerated, ring=elimination)
        return _Contraction(continuous, log_sum, scale, elimination)

    def _factor(self, site: Any) -> Any:
        """Return a site's unscaled log-density, packed by its plates and the discrete
        sites that it depends on."""
        log_prob = masked_log_prob(site)
        symbols = site["infer"]["_dim_to_symbol"]
        # Batch dimensions that are neither plates nor enumerated belong to one site:
        # sum over them.
        dims = range(max(-log_prob.dim(), self._first_dim + 1), 0)
        extra = [dim for dim in dims if dim not in symbols and log_prob.shape[dim] > 1]
        return pack(log_prob.sum(extra, keepdim=True) if extra else log_prob, symbols)


class _Contraction(NamedTuple):
    """The log-density of the sites that depend on no discrete site, the log of the sum
    over the discrete sites of the others, its scale, and the elimination.
    """

    continuous: Tensor
    log_sum: Any
    scale: Any
    elimination: _Elimination


def _plates(site: Any) -> set[str]:
    """Return the names of the plates that a site lies in."""
    return {frame.name for frame in site["cond_indep_stack"] if frame.vectorized}


def masked_log_prob(site: Any) -> Any:
    """Return the unscaled log-density of a site's value, 0 where ``poutine.mask`` masks
    it.
    """
    return scale_and_mask(
        site["fn"].log_prob(site["value"], *site["args"]), 1.0, site["mask"]
    )


def _require_enumerable(site: Any) -> None:
    """Raise ``ValueError`` if Pyro can't enumerate the values of a discrete site one by
    one.
    """
    shape = site["fn"].batch_shape
    plates = {frame.dim for frame in site["cond_indep_stack"]}
    if isinstance(site["fn"], dist.Empirical):
        raise ValueError(
            f"the discrete site {site['name']!r} is Empirical, whose probabilities "
            "Pyro can't enumerate"
        )
    if any(shape[dim] > 1 and dim not in plates for dim in range(-len(shape), 0)):
        raise ValueError(
            f"the discrete site {site['name']!r} has batch shape {tuple(shape)}, with "
            "dimensions that lie in no "
            "pyro.plate; put it into plates, so that its values are summed out one by "
            "one"
        )


class _Elimination(LogRing):
    """Variable elimination in log space, for
    :func:`pyro.ops.contract.contract_to_tensor`, and joint draws.

    The last site is summed first: the sites that depend on a site come after it, so the
    tables of a tree stay small. The table of a dimension at its turn, as a function of
    that dimension, is the unnormalised log-probability given the dimensions that are
    summed later. So one backward pass draws all dimensions jointly: forward filtering,
    backward sampling (Carter & Kohn 1994, Biometrika 81), for any graph of sites.

    :param order: all dimensions, in the order in which the model allocates them.
    """

    def __init__(self, order: Sequence[str]) -> None:
        super().__init__()
        self._order = {dim: index for index, dim in enumerate(order)}
        # each dimension that was summed, with its table
        self._tables: list[tuple[str, Any]] = []

    def sumproduct(self, terms: Sequence[Any], dims: Any) -> Any:
        terms = list(terms)
        for dim in sorted(dims, key=self._order.__getitem__, reverse=True):
            if factors := [term for term in terms if dim in term._pyro_dims]:
                table = _product(factors)
                self._tables.append((dim, table))
                summed = _without(
                    table, dim, table.logsumexp(table._pyro_dims.index(dim))
                )
                terms = [term for term in terms if dim not in term._pyro_dims] + [
                    summed
                ]
        return _product(terms)

    def draw(self) -> tuple[Weights, Any]:
        """Draw an index along each dimension that was summed, a packed tensor over the
        plates' dimensions; return the log-probability of the draws, too."""
        indices = ByName()
        log_prob = 0.0
        for dim, table in reversed(self._tables):
            for drawn in filter(indices.__contains__, table._pyro_dims):
                table = gather(table, indices[drawn], drawn)
            axis = table._pyro_dims.index(dim)
            # 0 would exclude a value
            uniform = torch.rand_like(table).clamp(min=torch.finfo(table.dtype).tiny)
            # Gumbel-max trick
            index = (table - torch.log(-torch.log(uniform))).argmax(axis)
            log_prob = (
                log_prob
                + table.log_softmax(axis).gather(axis, index.unsqueeze(axis)).sum()
            )
            indices[dim] = _without(table, dim, index)
        return indices, log_prob


def _without(table: Any, dim: str, result: Any) -> Any:
    result._pyro_dims = table._pyro_dims.replace(dim, "")
    return result


def _product(factors: Sequence[Any]) -> Any:
    """Return the product of factors, the sum of their logs, over the union of their
    dimensions.
    """
    tables = broadcast_all(*factors)
    return _without(
        tables[0], "", functools.reduce(torch.add, tables, torch.zeros_like(tables[0]))
    )


class LimitedTables(TorchDispatchMode):
    """A mode that raises ``MemoryError`` before tables fill the memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() > MOST_ENTRIES:
            raise MemoryError(f"a table of {result.numel()} numbers for each chain")
        return result
