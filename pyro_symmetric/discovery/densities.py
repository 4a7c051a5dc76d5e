"""Log-densities as functions of weights, which tell whether an element changes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_symmetric._process import forked, running_pyro, without_warnings
from pyro_symmetric.calls import refuse_complex_observations
from pyro_symmetric.discovery.invariance import Change, InconclusiveError
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.placement import as_tensor
from pyro_symmetric.weights import Weights

# If others make up for a site's change, at most this share of it is left.
MADE_UP_FOR = 0.1
# Of a function's draws, how many are compared; all of them show how large the noise is.
COMPARED = 2
# Changes up to so many times the largest noise seen pass, and up to so many nats, by which evidence may err.
NOISE, NATS = 10.0, 0.01
# How often a function is asked again that answers the same draws differently: dropout may give one answer a few times.
REPEATS = 8


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Run Pyro models without gradients, and without a trace in generators, handlers and warnings."""
    with forked(), torch.no_grad(), poutine.block(), running_pyro(), without_warnings():
        yield


class Point(NamedTuple):
    """A draw from the prior: continuous sites and the rows of subsampled plates, and the log-density of each site."""

    values: Weights
    log_probs: dict[str, Tensor]


class JointDensity:
    """The joint density of a Pyro model's sites, site by site, at draws from its prior.

    :param model: the model, without arguments.
    :param group: what is to move its continuous latent sites.
    :param draws: the number of draws.
    :param tolerance: relative change of a site's log-density (in the norm over its entries) that passes as rounding.
    :raises ValueError: if the group moves sites that the model lacks.
    :raises InconclusiveError: if the density isn't a function of the sites.
    """

    name, unit = "the model's log-density", "nats"

    def __init__(self, model: Callable[[], Any], group: Group, draws: int, tolerance: float):
        self.model, self.tolerance = model, tolerance
        self.shapes = dict[str, torch.Size]()
        self.points = [self._draw(group) for _ in range(draws)]

    def change(self, element: Element) -> Change:
        """The effect of an element on the density: the largest change at one of the points."""
        changes = [self._change(element, point) for point in self.points]
        sites = (site for change in changes if change.broken for site in change.sites)
        size = max(change.size for change in changes)
        return Change(any(change.broken for change in changes), size, tuple(dict.fromkeys(sites)))

    def _change(self, element: Element, point: Point) -> Change:
        # Buffers stay in the model: whether it has the symmetry all the same is what its density tells.
        try:
            after = self._log_probs(element.on_sites(point.values))
        except ValueError:  # the model ran at the draw itself, but a distribution refuses the other weights
            return Change(True, float("inf"))
        return compared(point.log_probs, after, self.tolerance)

    def _draw(self, group: Group) -> Point:
        nodes = _sampled(self.model)
        refuse_complex_observations(site for site in nodes.values() if site["is_observed"])
        unseen = {name: site for name, site in nodes.items() if not site["is_observed"]}
        self.summed_out = [name for name, site in unseen.items() if _is_discrete(site)]
        frames = [frame for site in nodes.values() for frame in site["cond_indep_stack"]]
        self.plate_nesting = -min([0, *(frame.dim for frame in frames if frame.vectorized)])
        values = {name: site["value"] for name, site in unseen.items() if name not in self.summed_out}
        weights = {name: value for name, value in values.items() if not site_is_subsample(unseen[name])}
        if missing := sorted(set(group.required_sites) - set(weights)):
            raise ValueError(
                f"the model lacks the sites {missing} that the group moves; its continuous latent sites are "
                f"{list(weights)}, and its discrete ones {self.summed_out}"
            )
        group.batch_shape(weights)  # names the site whose shape doesn't fit
        self.shapes = {site: value.shape for site, value in weights.items()}
        before, again = self._log_probs(values), self._log_probs(values)
        if compared(before, again, self.tolerance).broken:
            raise InconclusiveError(
                "two evaluations of the model's density at the same sites differ, so that no symmetry can be told: is "
                "there dropout (call .eval()), or randomness outside of pyro.sample?"
            )
        return Point(values, before)

    def _log_probs(self, values: Weights) -> dict[str, Tensor]:
        conditioned = poutine.condition(self.model, data=values)
        if self.summed_out:  # of the whole density, which bears no site's name
            return {"": self._summed_out(conditioned)}
        result = {}
        for name, site in _sampled(conditioned).items():
            if name in values and not site_is_subsample(site) and not _in_support(site["fn"], site["value"]):
                result[name] = torch.full((1,), torch.nan, dtype=torch.float64, device=site["value"].device)
            elif not site_is_subsample(site):
                result[name] = _entries(site).double().reshape(-1)
        return result

    def _summed_out(self, conditioned: Callable[[], Any]) -> Tensor:
        """The log-density with discrete sites summed out, ``(1,)``."""
        from pyro.infer import config_enumerate
        from pyro.infer.mcmc.util import TraceEinsumEvaluator

        enumerated = poutine.enum(config_enumerate(conditioned), first_available_dim=-1 - self.plate_nesting)
        trace = poutine.trace(enumerated).get_trace()
        evaluator = TraceEinsumEvaluator(trace, has_enumerable_sites=True, max_plate_nesting=self.plate_nesting)
        return evaluator.log_prob(trace).double().reshape(1)


class FunctionDensity:
    """A log-density of which only values are known, with the noise of these.

    What passes is measured, not guessed: by how much the values change if the same draws are asked for again (which a
    function that subsamples its data, or is otherwise random, answers differently), or others in the last digit.

    :param log_joint: weights of batch shape ``(S,)`` -> ``(S,)``.
    :param draws: weights of batch shape ``(S,)`` at which the density matters.
    """

    name, unit = "the log-density", "nats"

    def __init__(self, log_joint: Callable[[Weights], Tensor], draws: Weights):
        self._log_joint = log_joint
        values = self._values(draws)
        nearby = {
            site: v * (1 + torch.finfo(v.dtype).eps * (4 * torch.randint_like(v, 2) - 2)) for site, v in draws.items()
        }
        others = [self._values(draws), self._values(nearby)]
        if not torch.equal(others[0], values):
            others += [self._values(draws) for _ in range(REPEATS)]
        digits = max(torch.finfo(value.dtype).eps for value in draws.values())
        sizes = torch.cat([digits * values.abs(), *((other - values).abs() for other in others)])
        self.tolerance = NATS + NOISE * float(torch.where(sizes.isfinite(), sizes, 0.0).amax())
        self.draws, self.before = {site: value[:COMPARED] for site, value in draws.items()}, values[:COMPARED]
        self.shapes = {site: value.shape[1:] for site, value in draws.items()}

    def change(self, element: Element) -> Change:
        """The effect of an element on the density; of which sites, a function can't tell."""
        # Running statistics may be missing: the density itself says whether it minds.
        try:
            after = self._values(element.on_sites(self.draws))
        except ValueError:  # the draws themselves were accepted, but a distribution refuses the other weights
            return Change(True, float("inf"))
        same = (after == self.before) | self.before.isnan()
        changes = torch.where(same, 0.0, (after - self.before).abs().nan_to_num(nan=torch.inf, posinf=torch.inf))
        return Change(float(changes.max()) > self.tolerance, float(changes.max()))

    def _values(self, weights: Weights) -> Tensor:
        return as_tensor(self._log_joint(weights)).detach().double().cpu()


def compared(before: dict[str, Tensor], after: dict[str, Tensor], tolerance: float) -> Change:
    """The change of a joint density, of which the log-density of every entry of every site is known."""
    changes = {name: float(after[name].sum() - old.sum()) for name, old in before.items()}
    # Rounding errors of independent entries add up like the entries' norm.
    allowed = {name: tolerance * (1 + float(old.norm())) for name, old in before.items()}
    # NaN, outside of a support, counts as a change.
    changed = tuple(name for name, change in changes.items() if not abs(change) <= allowed[name])
    # What is allowed to a large likelihood must not hide the change of a small prior, so sites that didn't change count
    # only if they make up for those that did, which sums of large numbers show less sharply.
    together, total = abs(sum(changes[name] for name in changed)), abs(sum(changes.values()))
    made_up_for = total <= MADE_UP_FOR * together < float("inf")
    holds = made_up_for or together <= sum(allowed[name] for name in changed)
    return Change(not holds, total if total == total else float("inf"), tuple(filter(None, changed)))


# small steps --------------------------------------------------------------------------------------------------------


def _sampled(model: Callable[[], Any]) -> dict[str, Any]:
    """The sample sites of one run of a model."""
    nodes: dict[str, Any] = dict(poutine.trace(model).get_trace().nodes)
    return {name: site for name, site in nodes.items() if site["type"] == "sample"}


def _is_discrete(site: Any) -> bool:
    return not site_is_subsample(site) and bool(getattr(site["fn"].support, "is_discrete", False))


def _entries(site: Any) -> Tensor:
    """Log-densities of a site's single entries: a change of one would drown in the rounding that is allowed to the sum
    that ``to_event`` makes."""
    fn, events = site["fn"], 0
    while type(fn) is dist.Independent:
        fn, events = fn.base_dist, events + fn.reinterpreted_batch_ndims
    value = fn.log_prob(site["value"], *site["args"], **site["kwargs"])
    for factor in (site["mask"], site["scale"]):
        if factor is not None:
            factor = as_tensor(factor)
            value = value * (factor.reshape(*factor.shape, *[1] * events) if factor.dim() else factor)
    return as_tensor(value)


def _in_support(fn: Any, value: Tensor) -> bool:
    try:
        return bool(fn.support.check(value).all())
    except NotImplementedError:
        return True
