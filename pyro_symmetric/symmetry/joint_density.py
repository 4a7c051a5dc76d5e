"""The joint density of a Pyro model's sites, site by site, as a function of its continuous latent ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_symmetric.symmetry.factored import moved_weights
from pyro_symmetric.symmetry.finite import AnyFiniteGroup
from pyro_symmetric.symmetry.weights import Weights

# Where others make up for a site's change, at most this share of it is left.
MADE_UP_FOR = 0.1


class InconclusiveError(ValueError):
    """The model's density isn't a function of its sites alone, so that nothing can be compared."""


@dataclass(frozen=True)
class Point:
    """A draw from the prior: continuous sites, the rows of subsampled plates, and the log-density of each site."""

    weights: Weights
    rows: Weights
    log_probs: dict[str, Tensor]


class JointDensity:
    """The joint density of a model's sites, site by site."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float):
        self.model, self.args, self.kwargs, self.tolerance = model, args, kwargs, tolerance
        self.summed_out: list[str] = []
        self.plate_nesting = 0

    def draw(self, group: AnyFiniteGroup) -> Point:
        trace = poutine.trace(self.model).get_trace(*self.args, **self.kwargs)
        nodes: dict[str, Any] = {name: site for name, site in trace.nodes.items() if site["type"] == "sample"}
        unseen = {name: site for name, site in nodes.items() if not site["is_observed"]}
        latent = {name: site for name, site in unseen.items() if not site_is_subsample(site)}
        self.summed_out = [name for name, site in latent.items() if getattr(site["fn"].support, "is_discrete", False)]
        frames = [frame for site in nodes.values() for frame in site["cond_indep_stack"]]
        self.plate_nesting = -min([0, *(frame.dim for frame in frames if frame.vectorized)])
        weights = {name: site["value"] for name, site in latent.items() if name not in self.summed_out}
        for site in group.required_sites:
            if site not in weights:
                raise ValueError(
                    f"the group moves the site {site!r}, which the model lacks as a continuous latent site; it has "
                    f"{list(weights)}" + (f", and the discrete sites {self.summed_out}" if self.summed_out else "")
                )
        group.batch_shape(weights)  # names the site whose shape doesn't fit
        rows = {name: site["value"] for name, site in unseen.items() if site_is_subsample(site)}
        before, again = self._log_probs(weights, rows), self._log_probs(weights, rows)
        if self._compare(before, again)[0]:
            raise InconclusiveError(
                "two evaluations of the model's density at the same sites differ, so that no symmetry can be told: is "
                "there dropout (call .eval()), or randomness outside of pyro.sample?"
            )
        return Point(weights, rows, before)

    def change(self, point: Point, element: Any) -> tuple[bool, float, tuple[str, ...]]:
        """Whether an element changes the joint density, by how many nats, and which sites' densities."""
        # Buffers stay in the model: whether it has the symmetry all the same is what its density tells.
        moved = moved_weights(element.to(next(iter(point.weights.values())).device), point.weights, ())
        try:
            after = self._log_probs(moved, point.rows)
        except ValueError:  # the model ran at the draw itself, but a distribution refuses the moved weights
            return True, float("inf"), ()
        return self._compare(point.log_probs, after)

    def _compare(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[bool, float, tuple[str, ...]]:
        changes = {name: float(after[name].sum() - old.sum()) for name, old in before.items()}
        # Rounding errors of independent entries add up like the entries' norm.
        allowed = {name: self.tolerance * (1 + float(old.norm())) for name, old in before.items()}
        # NaN, outside of a support, counts as a change.
        changed = tuple(name for name, change in changes.items() if not abs(change) <= allowed[name])
        # What is allowed to a large likelihood must not hide the change of a small prior, so sites that didn't change
        # count only if they make up for those that did, which sums of large numbers show less sharply.
        together, total = abs(sum(changes[name] for name in changed)), abs(sum(changes.values()))
        made_up_for = total <= MADE_UP_FOR * together < float("inf")
        holds = made_up_for or together <= sum(allowed[name] for name in changed)
        return not holds, total if total == total else float("inf"), changed

    def _log_probs(self, weights: Weights, rows: Weights) -> dict[str, Tensor]:
        conditioned = poutine.condition(self.model, data={**weights, **rows})
        if self.summed_out:
            return {"": self._summed_out(conditioned)}
        trace = poutine.trace(conditioned).get_trace(*self.args, **self.kwargs)
        result = {}
        nodes: dict[str, Any] = dict(trace.nodes)
        for name, site in nodes.items():
            if site["type"] != "sample" or site_is_subsample(site):
                continue
            if name in weights and not _in_support(site["fn"], site["value"]):
                result[name] = torch.full((1,), torch.nan, dtype=torch.float64)
                continue
            result[name] = _entries(site).double().reshape(-1)
        return result

    def _summed_out(self, conditioned: Callable[..., Any]) -> Tensor:
        """The log-density with discrete sites summed out, ``(1,)``."""
        from pyro.infer import config_enumerate
        from pyro.infer.mcmc.util import TraceEinsumEvaluator

        enumerated = poutine.enum(config_enumerate(conditioned), first_available_dim=-1 - self.plate_nesting)
        trace = poutine.trace(enumerated).get_trace(*self.args, **self.kwargs)
        evaluator = TraceEinsumEvaluator(trace, has_enumerable_sites=True, max_plate_nesting=self.plate_nesting)
        return evaluator.log_prob(trace).double().reshape(1)


def _entries(site: Any) -> Tensor:
    """Log-densities of a site's single entries: a change of one would drown in the rounding that is allowed to the sum
    that ``to_event`` makes."""
    fn, events = site["fn"], 0
    while type(fn) is dist.Independent:
        fn, events = fn.base_dist, events + fn.reinterpreted_batch_ndims
    value = fn.log_prob(site["value"], *site["args"], **site["kwargs"])
    for factor in (site["mask"], site["scale"]):
        if factor is not None:
            factor = torch.as_tensor(factor)
            value = value * (factor.reshape(*factor.shape, *[1] * events) if factor.dim() else factor)
    return torch.as_tensor(value)


def _in_support(fn: Any, value: Tensor) -> bool:
    try:
        return bool(fn.support.check(value).all())
    except NotImplementedError:
        return True
