"""The joint log-density of a Pyro model, site by site, at many points at once.

Symmetries of a model are found from values of this density alone
(:mod:`~pyro_symmetric.discovery.model_symmetry`). Sites are compared one by one, so
that the rounding of a large likelihood hides no change of a small prior. Discrete sites
are summed out; what depends on them is one term.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.trace_struct import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints
from tqdm import tqdm

from pyro_symmetric.arguments import Keywords, Model, Names, as_tensor, holding_nan
from pyro_symmetric.density.traced import TracedTarget, is_deterministic, placed
from pyro_symmetric.discovery.verify import Change, InconclusiveError
from pyro_symmetric.groups.elements import Element
from pyro_symmetric.weights import (
    Weights,
    first_value,
    map_values,
    select_rows,
    transform_of,
)

CHUNK = 512  # points evaluated at once
SCALES = (1.0, 0.5, 3.0)  # of unconstrained points: near, nearer and beyond a clamp
POINTS = 3  # generic points of each scale
MARGIN = 30.0  # a change is seen if it exceeds this multiple of the rounding error
LEAST_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
MOST_TOLERANCE = 1e-3  # relative; a density that is less smooth tells nothing


class Terms(NamedTuple):
    """Log-densities of a model's sites at some points.

    :param values: the sum over each site's entries, ``(points, terms)``.
    :param norms: the Euclidean norm of these entries: rounding errors of independent
        entries add up as their norm.
    """

    values: Tensor
    norms: Tensor

    def at(self, points: Any) -> Terms:
        """Select points, by an index or a slice."""
        return Terms(self.values[points], self.norms[points])


class ModelDensity:
    """The log-density of a Pyro model at points of its continuous latent sites.

    :param model: the Pyro model; ``args`` and ``kwargs`` are its arguments.
    :param points: the number of generic points of each scale.
    :ivar shapes: latent site -> its shape.
    :ivar names: the terms that :meth:`terms` returns; what depends on discrete sites is
        called ``""``.
    :ivar generic: points in the support, of several scales, at which the density is
        finite; ``before``: the density there.
    :ivar tolerance: the relative change of a term that passes as rounding.
    :raises InconclusiveError: if the density isn't a function of the sites.
    """

    def __init__(
        self,
        model: Model,
        args: Sequence[Any],
        kwargs: Keywords,
        points: int = POINTS,
    ):
        self.points = points
        self.dtype = torch.float64
        try:
            self.target = _target(model, args, kwargs, torch.float64)
            self._prepare()
        except RuntimeError:  # constants of the model's own, in single precision
            self.dtype = torch.float32
            self.target = _target(model, args, kwargs, torch.float32)
            self._prepare()
        self.tolerance = self._measured_tolerance()

    def with_model(self, model: Model) -> ModelDensity:
        """Return the density of a model with the same sites, such as one with other
        data, which isn't checked again.
        """
        density = copy.copy(self)
        density.target = copy.copy(self.target)
        density.target.model = model
        density._prepare()
        density.tolerance = density._measured_tolerance()
        return density

    def _prepare(self) -> None:
        example = self.target.prior_weights(1)
        self.shapes = map_values(lambda value: value.shape[1:], example)
        self.device = first_value(example).device
        self.rows = dict[str, Tensor]()
        for plate, (full, size) in self.target.row_counts.items():
            rows = torch.randperm(full, device="cpu")[:size]
            self.rows[plate] = rows.to(self.device)
        self.names: Names = ()
        self.generic, self.before = self._generic_points()

    def points_of_scale(self, count: int, scale: float) -> Weights:
        """Draw points of unconstrained standard deviation ``scale``: site ->
        ``(count,) + shape``.
        """
        drawn = {}
        for site, shape in self.shapes.items():
            transform = transform_of(site, self.target.sites[site])
            free = transform.inverse_shape(shape)
            normal = torch.randn(count, *free, dtype=self.dtype, device="cpu")
            drawn[site] = transform(scale * normal.to(self.device))
        return drawn

    def _generic_points(self) -> tuple[Weights, Terms]:
        """Draw points of several scales at which the density is finite.

        :raises InconclusiveError: if there are none.
        """
        batches = [self.points_of_scale(2 * self.points, scale) for scale in SCALES]
        points = {
            site: torch.cat([batch[site] for batch in batches]) for site in self.shapes
        }
        terms = self.terms(points)
        finite = terms.values.isfinite().all(1) & self.inside(points)
        by_scale = finite.reshape(len(SCALES), -1)
        first = by_scale & (by_scale.cumsum(1) <= self.points)
        # the first point of each scale, then the second, and so on
        rank = torch.where(first, by_scale.cumsum(1), 0).flatten()
        order = [
            n for r in range(1, self.points + 1) for n in (rank == r).nonzero()[:, 0]
        ]
        if not order:
            target = self.target
            nan = holding_nan(target.model, target.args, target.kwargs)
            raise InconclusiveError(
                "the model's density isn't finite at any point that was tried, so that "
                f"no symmetry can be told{nan}"
            )
        chosen = torch.stack(order)
        generic = select_rows(points, chosen)
        return generic, self.terms(generic)

    def is_real(self, site: str) -> bool:
        """Return whether a site takes all real values, so that signs may flip."""
        support = self.target.sites[site].support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        return support is constraints.real

    def site_inside(self, site: str, values: Tensor) -> Tensor:
        """Return which values ``(points,) + shape`` of a site lie in its support."""
        try:
            checked = self.target.sites[site].support.check(values)
        except NotImplementedError:
            return torch.ones(len(values), dtype=torch.bool, device="cpu")
        return checked.reshape(len(values), -1).all(1).cpu()

    def inside(self, points: Weights) -> Tensor:
        """Return which points lie in the support of all sites."""
        inside = [self.site_inside(site, value) for site, value in points.items()]
        return torch.stack(inside).all(0)

    def terms(self, points: Weights) -> Terms:
        """Evaluate the density, with a progress bar if that takes long."""
        count = len(first_value(points))
        starts: Iterable[int] = range(0, count, CHUNK)
        if self.target.one_by_one and count > CHUNK:
            starts = tqdm(starts, desc="find_symmetry", leave=False)
        chunks = []
        for start in starts:
            chunk = slice(start, start + CHUNK)
            chunks.append(self._mapped(select_rows(points, chunk)))
        if not chunks:
            empty = torch.zeros(0, len(self.names), dtype=torch.float64, device="cpu")
            return Terms(empty, empty)
        stacked = torch.cat(chunks).double().cpu()
        return Terms(stacked[:, 0], stacked[:, 1])

    def same(self, after: Terms, before: Terms) -> Tensor:
        """Return at which points two densities agree.

        Sites agree one by one, or those that differ compensate one another. NaN agrees
        with nothing.
        """
        change = after.values - before.values
        allowed = self.tolerance * (1 + torch.maximum(after.norms, before.norms))
        differs = ~(change.abs() <= allowed)
        together = torch.where(differs, change, 0.0).sum(1).abs()
        return together <= torch.where(differs, allowed, 0.0).sum(1)

    def changed_terms(self, after: Terms, before: Terms) -> list[str]:
        """Return the names of the terms that differ, the most changed first."""
        change = (after.values - before.values).abs()
        allowed = self.tolerance * (1 + torch.maximum(after.norms, before.norms))
        excess = (change / allowed).nan_to_num(nan=torch.inf).amax(0)
        order = excess.argsort(descending=True).tolist()
        return [self.names[number] for number in order if excess[number] > 1]

    def change(self, element: Element) -> Change:
        """Return the change of the density by an element, at the generic points."""
        moved = element.on_sites(self.generic)
        outside = [s for s, v in moved.items() if not self.site_inside(s, v).all()]
        if outside:
            return Change(True, math.inf, tuple(outside))
        after = self.terms(moved)
        sizes = (after.values - self.before.values).sum(1).abs()
        size = float(sizes.nan_to_num(nan=math.inf).max())
        if self.same(after, self.before).all():
            return Change(False, size)
        sites = filter(None, self.changed_terms(after, self.before))
        return Change(True, size, tuple(sites))

    def _measured_tolerance(self) -> float:
        """Return the tolerance that the density's own rounding asks for.

        :raises InconclusiveError: if two evaluations differ, or rounding hides all.
        """
        points = self.generic
        before = self.before
        again = self.terms(points)
        if not torch.equal(before.values, again.values):
            raise InconclusiveError(str(self.target.is_random()))
        epsilon = torch.finfo(self.dtype).eps
        nearby = map_values(lambda value: value * (1 + epsilon), points)
        after = self.terms(nearby)
        noise = (after.values - before.values).abs() / (1 + before.norms)
        measured = MARGIN * float(noise.nan_to_num(nan=0.0, posinf=0.0).max())
        if measured > MOST_TOLERANCE:
            raise InconclusiveError(
                "the model's density changes by more than 0.1 % with the last digit of "
                "its sites, so that no symmetry can be told; pass data and constants "
                "in double precision"
            )
        return max(LEAST_TOLERANCE[self.dtype], measured)

    def _mapped(self, points: Weights) -> Tensor:
        """Return values and norms of the terms, ``(points, 2, terms)``."""
        count = len(first_value(points))
        rows = map_values(lambda index: index.expand(count, -1), self.rows)
        try:
            return self.target.mapped(self._terms, points, rows)
        except RuntimeError as error:
            if self.target.one_by_one:
                raise
            self.target.give_up_map(error)
            return self.target.mapped(self._terms, points, rows)

    def _terms(self, weights: Weights, rows: Weights) -> Tensor:
        trace = self.target.run({**weights, **rows})
        nodes: dict[str, Any] = dict(trace.nodes)
        sums = {}
        norms = {}
        summed_out = self.target.enumeration is not None
        for name, site in nodes.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            if summed_out and self._is_enumerated(site):
                continue
            entries = site_entries(site).to(self.dtype)
            sums[name], norms[name] = entries.sum(), entries.square().sum().sqrt()
        if summed_out:
            dependent = self.target.log_prob(trace) - sum(sums.values())
            sums[""], norms[""] = dependent, dependent.abs()
        self.names = tuple(sums)
        return torch.stack(
            [torch.stack([*sums.values()]), torch.stack([*norms.values()])]
        )

    def _is_enumerated(self, site: Any) -> bool:
        """Return whether a site is discrete, or depends on a discrete site."""
        assert self.target.enumeration is not None
        if site["name"] in self.target.enumeration.batch_shapes:
            return True
        first = self.target.enumeration._first_dim
        value = site["value"]
        fn = site["fn"]
        of_value = value.shape[: value.dim() - fn.event_dim]
        shape = torch.broadcast_shapes(of_value, fn.batch_shape)
        left_of_plates = shape[: max(0, len(shape) + first + 1)]
        return any(size > 1 for size in left_of_plates)


def site_entries(site: Any) -> Tensor:
    """Return the log-densities of a site's single entries, scaled and masked: rounding
    of the sums of ``to_event`` would hide changes.
    """
    fn = site["fn"]
    events = 0
    while type(fn) is dist.Independent:
        fn, events = fn.base_dist, events + fn.reinterpreted_batch_ndims
    value = fn.log_prob(site["value"], *site["args"], **site["kwargs"])
    for factor in (site["mask"], site["scale"]):
        if factor is not None:
            factor = as_tensor(factor)
            value = value * (
                factor.reshape(*factor.shape, *[1] * events) if factor.dim() else factor
            )
    return as_tensor(value)


class Simulation(NamedTuple):
    """A model with data of its own.

    :param is_discrete: whether some of these are discrete, so that rows may be equal.
    """

    model: Model
    is_discrete: bool


def simulated(target: TracedTarget) -> Simulation:
    """Return the model with a draw of all that it observes in place of its data."""
    model = target.model
    args = target.args
    kwargs = target.kwargs
    conditioned = _Conditioned()
    with conditioned:
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    original: dict[str, Any] = dict(trace.nodes)
    fixed = {}
    for name in conditioned.names:
        if _others_depend(name, model, args, kwargs, trace):
            fixed[name] = original[name]["value"]
    unconditioned = poutine.condition(poutine.uncondition(model), data=fixed)
    drawn: dict[str, Any] = dict(
        poutine.trace(unconditioned).get_trace(*args, **kwargs).nodes
    )
    data = {}
    is_discrete = False
    for name, site in original.items():
        if site["type"] != "sample" or not site["is_observed"]:
            continue
        if name in drawn and not _has_no_data(site):
            value = drawn[name]["value"]
            data[name] = value.to(as_tensor(site["value"]).dtype)
            is_discrete |= bool(getattr(site["fn"].support, "is_discrete", False))
    return Simulation(poutine.condition(model, data=data), is_discrete)


class _Conditioned(Messenger):
    """Notes the sites whose values ``poutine.condition`` sets."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        handlers = [h for h in _PYRO_STACK if isinstance(h, ConditionMessenger)]
        if msg["is_observed"] and any(msg["name"] in h.data for h in handlers):
            self.names.add(msg["name"])


def _others_depend(
    name: str, model: Model, args: Sequence[Any], kwargs: Keywords, trace: Trace
) -> bool:
    """Return whether the density of any other site depends on an observed one, which
    then is a parameter that is held, and no data.
    """
    fn: Any = trace.nodes[name]["fn"]
    drawn = {name: fn.sample()}
    redrawn = poutine.condition(poutine.replay(model, trace=trace), data=drawn)
    after: dict[str, Any] = dict(
        poutine.trace(redrawn).get_trace(*args, **kwargs).nodes
    )
    for site_name, site in trace.nodes.items():
        if site_name == name or site["type"] != "sample" or site_is_subsample(site):
            continue
        if not torch.equal(site_entries(site), site_entries(after[site_name])):
            return True
    return False


def _has_no_data(site: Any) -> bool:
    """Return whether an observed site is a factor or a deterministic value."""
    return isinstance(site["fn"], dist.Unit) or is_deterministic(site)


def _target(
    model: Model,
    args: Sequence[Any],
    kwargs: Keywords,
    dtype: torch.dtype,
) -> TracedTarget:
    moved = placed(model, tuple(args), dict(kwargs), None, dtype)
    return TracedTarget(*moved, dtype=dtype)
