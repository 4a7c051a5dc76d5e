"""Log-densities as functions of weights, which can tell whether an element changes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.weights import Weights

# If others make up for a site's change, at most this share of it is left.
MADE_UP_FOR = 0.1
# Of a function's draws, how many are moved; all of them show how large the noise is.
MOVED = 2
# Changes up to so many times the largest noise seen pass, and up to so many nats, by which evidence may err.
NOISE, NATS = 10.0, 0.01
# How often a function is asked again that answers the same draws differently: dropout may give one answer a few times.
REPEATS = 8


class InconclusiveError(ValueError):
    """The model's density isn't a function of its sites alone, so that nothing can be compared."""


@dataclass(frozen=True)
class Point:
    """A draw from the prior: continuous sites, the rows of subsampled plates, and the log-density of each site."""

    weights: Weights
    rows: Weights
    log_probs: dict[str, Tensor]


class Change(NamedTuple):
    """Whether an element changes a density, by how many nats, and which sites' own densities."""

    broken: bool
    size: float
    sites: tuple[str, ...] = ()


class Density(Protocol):
    """A density that can be compared before and after an element."""

    def change(self, point: Point, element: Element) -> Change:
        """What an element does to the density at a point."""


class JointDensity:
    """The joint density of a Pyro model's sites, site by site, as a function of its continuous latent ones."""

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float):
        self.model, self.args, self.kwargs, self.tolerance = model, args, kwargs, tolerance
        self.summed_out: list[str] = []
        self.plate_nesting = 0

    def draw(self, group: Group) -> Point:
        """A draw from the prior, which must hold the sites that the group moves."""
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
        if self._compare(before, again).broken:
            raise InconclusiveError(
                "two evaluations of the model's density at the same sites differ, so that no symmetry can be told: is "
                "there dropout (call .eval()), or randomness outside of pyro.sample?"
            )
        return Point(weights, rows, before)

    def change(self, point: Point, element: Element) -> Change:
        """What an element does to the density at a point."""
        # Buffers stay in the model: whether it has the symmetry all the same is what its density tells.
        moved = {site: element.on_site(site, value) for site, value in point.weights.items()}
        try:
            after = self._log_probs(moved, point.rows)
        except ValueError:  # the model ran at the draw itself, but a distribution refuses the moved weights
            return Change(True, float("inf"))
        return self._compare(point.log_probs, after)

    def _compare(self, before: dict[str, Tensor], after: dict[str, Tensor]) -> Change:
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
        return Change(not holds, total if total == total else float("inf"), changed)

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


class FunctionDensity:
    """A log-density as a function of weights, with the noise of its values."""

    def __init__(self, log_joint: Callable[[Weights], Tensor], draws: Weights, nearby: Weights):
        self._log_joint = log_joint
        values = self._values(draws)
        others = [self._values(draws), self._values(nearby)]
        if not torch.equal(others[0], values):
            others += [self._values(draws) for _ in range(REPEATS)]
        noise = torch.cat([(other - values).abs() for other in others])
        digits = torch.finfo(min((v.dtype for v in draws.values()), key=lambda dtype: torch.finfo(dtype).bits)).eps
        sizes = torch.cat([noise, digits * values.abs()])
        self._allowed = NATS + NOISE * float(sizes[sizes.isfinite()].amax()) if bool(sizes.isfinite().any()) else NATS
        rows = [{site: value[row] for site, value in draws.items()} for row in range(min(MOVED, len(values)))]
        self.points = [Point(row, {}, {"": value}) for row, value in zip(rows, values, strict=False)]

    def _values(self, weights: Weights) -> Tensor:
        return torch.as_tensor(self._log_joint(weights)).detach().double().cpu()

    def change(self, point: Point, element: Element) -> Change:
        """What an element does to the density at a point; of which sites, a function can't tell."""
        # Running statistics may be missing: the density itself says whether it minds.
        moved = {site: element.on_site(site, value) for site, value in point.weights.items()}
        before = float(point.log_probs[""])
        try:
            after = float(self._values({site: value.unsqueeze(0) for site, value in moved.items()}))
        except ValueError:  # the draw itself was accepted, but a distribution refuses the moved weights
            after = float("nan")
        if before == after or before != before:
            return Change(False, 0.0)
        size = abs(after - before) if after == after else float("inf")
        return Change(size > self._allowed, size)


# small steps --------------------------------------------------------------------------------------------------------


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
