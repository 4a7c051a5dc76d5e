"""Checks of the sample sites of a traced model.

A model's log-density is summed over all axes of its sites. An axis that broadcasting
made would count every datum several times: ``Normal(x * w, 1.0)`` of ``x`` with shape
``(30, 1)`` in a plate of 30 scores 900 numbers. Pyro's ``SVI`` refuses such sites, its
``MCMC`` doesn't, as it switches validation off. Here, the axes of a latent site without
``to_event`` pass: each of its values has one density, whether its axis is declared or
not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from numbers import Number
from typing import Any, NamedTuple

import torch
from pyro.distributions import Delta, DirichletMultinomial, Unit
from pyro.distributions.hmm import HiddenMarkovModel
from pyro.distributions.torch_distribution import (
    MaskedDistribution,
    TorchDistributionMixin,
)
from pyro.poutine import Trace
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _PYRO_STACK
from pyro.poutine.util import site_is_subsample
from torch import Size, Tensor
from torch.distributions import Independent, Multinomial, biject_to, constraints

from pyro_symmetric._process import replaced
from pyro_symmetric.arguments import Function, Model, as_tensor, described
from pyro_symmetric.weights import base_of, is_angle, map_values

ROUNDING = 1e-4  # relative to 1 and a value's size: sums of simplices in float32
# Their log-densities take the number of trials from the value, as documented.
COUNTS = (Multinomial, DirichletMultinomial)


# kinds of sites -----------------------------------------------------------------------


def is_deterministic(site: Any) -> bool:
    """Return whether a site is deterministic: from ``pyro.deterministic``, or a site
    that ``poutine.reparam`` replaced.

    Pyro makes both observed sample sites: the distribution is a
    :class:`~pyro.distributions.Delta` at the value, whose density is masked out, or is
    the Jacobian of a change of variables.
    """
    if site["type"] != "sample" or not site["is_observed"]:
        return False
    fn = site["fn"]
    masked_out = (
        isinstance(fn, MaskedDistribution)
        and fn._mask is False
        and isinstance(fn.base_dist, Delta)
    )
    at_its_value = isinstance(fn, Delta) and fn.v is site["value"]
    return bool(site["infer"].get("_deterministic")) or masked_out or at_its_value


def sampled(trace: Trace) -> list[Any]:
    """Return the sample sites of a run, without the rows of subsampled plates."""
    return [
        site
        for site in trace.nodes.values()
        if site["type"] == "sample" and not site_is_subsample(site)
    ]


def is_scored(site: Any) -> bool:
    """Return whether a site is a distribution of Pyro that scores its value."""
    return (
        site["type"] == "sample"
        and isinstance(site["fn"], TorchDistributionMixin)
        and isinstance(site["value"], Tensor | Number)
        and not site_is_subsample(site)
        and not is_deterministic(site)
    )


# axes ---------------------------------------------------------------------------------


class SiteAxes(NamedTuple):
    """The batch axes of a site, right-aligned: axis ``-1`` comes last.

    :ivar scored: shape of the log-density.
    :ivar value: shape of the value, with ones in front of it.
    :ivar plates: axis -> size of its plate.
    """

    scored: Size
    value: Size
    plates: dict[int, int]

    def miscounted(self) -> list[int]:
        """Return the axes along which the log-density counts values otherwise than the
        plates say."""
        lengths = {dim: self.scored[dim] for dim in range(-len(self.scored), 0)}
        undeclared = [
            dim for dim, n in lengths.items() if n > 1 and dim not in self.plates
        ]
        misfit = [
            dim for dim, size in self.plates.items() if lengths.get(dim, 1) != size
        ]
        # Without broadcasting, each value counts once.
        repeated = undeclared if self.value != self.scored else []
        return repeated + misfit


def require_declared_axes(sites: Iterable[Any]) -> None:
    """Raise ``ValueError`` that names a site whose values count more often than its
    plates say, because they are broadcast along other axes."""
    for site in filter(is_scored, sites):
        for frame in site["cond_indep_stack"]:
            if not isinstance(frame.name, str):
                raise ValueError(
                    f"a plate around the site {site['name']!r} is called "
                    f"{frame.name!r} and has no size; write pyro.plate('rows', "
                    f"{frame.name!r}), its name first"
                )
        _require_event_axes(site)
        axes = _axes(site)
        if axes is None or not axes.miscounted():
            continue
        declared = axes.plates or "none"
        raise ValueError(
            f"the site {site['name']!r} has log-densities of shape "
            f"{tuple(axes.scored)} for values of shape {tuple(axes.value)} (batch "
            f"axes), but its plates declare the axes {declared} (axis: size), so that "
            "the sum would count values more than once. Give values and parameters "
            "one shape, as by .squeeze(-1), and declare other axes by pyro.plate or "
            ".to_event"
        )


def _axes(site: Any) -> SiteAxes | None:
    """Return a site's batch axes; ``None`` if its shapes can't be broadcast, about
    which its density complains."""
    fn = site["fn"]
    value = as_tensor(site["value"])
    batch_shape = value.shape[: max(value.dim() - fn.event_dim, 0)]
    factors = [
        site[name].shape for name in ("scale", "mask") if isinstance(site[name], Tensor)
    ]
    try:
        scored = torch.broadcast_shapes(fn.batch_shape, batch_shape, *factors)
    except RuntimeError:
        return None
    padding = (1,) * (len(scored) - len(batch_shape))
    plates = {
        frame.dim: int(frame.size)
        for frame in site["cond_indep_stack"]
        if frame.vectorized
    }
    return SiteAxes(scored, Size((*padding, *batch_shape)), plates)


def _require_event_axes(site: Any) -> None:
    """Raise ``ValueError`` if a site's value is broadcast along its event axes."""
    fn = site["fn"]
    value = as_tensor(site["value"])
    if isinstance(base_of(fn), HiddenMarkovModel):
        return  # whose event shape has 1 for any number of steps
    event_shape = tuple(fn.event_shape)
    lengths = tuple(value.shape[max(value.dim() - len(event_shape), 0) :])
    padded = (1,) * (len(event_shape) - len(lengths)) + lengths
    pairs = list(zip(padded, event_shape, strict=True))
    if any(
        actual != expected and 1 in (actual, expected) for actual, expected in pairs
    ):
        raise ValueError(
            f"the site {site['name']!r} has the event shape {event_shape}, but a value "
            f"of shape {tuple(value.shape)}, which would be broadcast and counted more "
            "than once; give the value the shape of the site's distribution"
        )


# data ---------------------------------------------------------------------------------


def check_observed(observed: Iterable[Any]) -> None:
    """Raise ``ValueError`` that names observed sites with complex values, or with lists
    or NumPy arrays, which only a user-defined distribution may score."""
    sites = {site["name"]: site for site in observed}
    values = {
        name: site["value"]
        for name, site in sites.items()
        if isinstance(site["value"], Tensor | Number)
    }
    packages = map_values(
        lambda site: type(site["fn"]).__module__.partition(".")[0], sites
    )
    if not_tensors := [
        name
        for name in sites
        if name not in values and packages[name] in ("pyro", "torch")
    ]:
        types = ", ".join(described(sites[name]["value"]) for name in not_tensors)
        raise ValueError(
            f"the observed sites {not_tensors} hold {types}; pass tensors "
            "(torch.as_tensor)"
        )
    if complex_sites := [
        name for name, value in values.items() if as_tensor(value).is_complex()
    ]:
        raise ValueError(
            f"the observed sites {complex_sites} hold complex numbers, whose imaginary "
            "parts would be lost; observe both parts (torch.view_as_real)"
        )


def require_possible_data(sites: Iterable[Any]) -> None:
    """Raise ``ValueError`` that names an observed site with data outside of its support
    to which its distribution doesn't give the log-density ``-inf``, as a
    Bernoulli to 3.

    Run it without Pyro's validation. Rows that are masked out may hold anything.
    """
    for site in sites:
        if not is_scored(site) or not site["is_observed"]:
            continue
        outside = _outside_of_support(site["fn"], as_tensor(site["value"]))
        if outside is None or not outside.any():
            continue
        if (outside & _would_count(site) & _mask(site)).any():
            raise ValueError(
                f"the observed site {site['name']!r} holds "
                f"{_example(site, outside)} outside of its support, "
                f"{site['fn'].support}, for which {type(base_of(site['fn'])).__name__} "
                "has no density; pass data in the support, or mask unknown rows "
                "(poutine.mask)"
            )


def _outside_of_support(fn: Any, value: Tensor) -> Tensor | None:
    """Return a mask over the batch shape of values outside of a support; ``None`` where
    that isn't known."""
    masked_within = isinstance(fn, Independent) and isinstance(
        fn.base_dist, MaskedDistribution
    )
    unchecked = (*COUNTS, Unit, Delta, HiddenMarkovModel)
    if masked_within or isinstance(base_of(fn), unchecked):
        return None
    try:
        inside = in_support(fn, value)
    except NotImplementedError:
        return None
    # NaN may stand for unknown values, which a user's distribution leaves out.
    is_nan = value.isnan()
    return ~inside & ~(
        is_nan.flatten(value.dim() - fn.event_dim).any(-1) if fn.event_dim else is_nan
    )


def in_support(fn: Any, values: Tensor) -> Tensor:
    """Return which values lie in the support of a distribution, a mask over all axes in
    front of its event axes.

    Sums to 1 and the like hold up to rounding: such values must return from
    unconstrained values.
    """
    support = fn.support
    if isinstance(support, constraints.MixtureSameFamilyConstraint):
        support = support.base_constraint
    scalar = support
    while isinstance(scalar, constraints.independent):
        scalar = scalar.base_constraint
    if is_angle(fn):
        inside = values.abs() <= math.pi
        return (
            inside.flatten(values.dim() - fn.event_dim).all(-1)
            if fn.event_dim
            else inside
        )
    if support.is_discrete or not scalar.event_dim:
        return support.check(values)
    return _returns(biject_to(support), values.double(), fn.event_dim)


def _returns(transform: Any, values: Tensor, event_dim: int) -> Tensor:
    """Return which values are images of their own inverses, up to rounding."""
    batch_dims = values.dim() - event_dim
    try:
        image = transform(transform.inv(values))
    except torch.linalg.LinAlgError:  # not positive definite
        if values.shape[:batch_dims].numel() == 1:
            return torch.zeros(
                values.shape[:batch_dims], dtype=torch.bool, device=values.device
            )
        rows = values.reshape(-1, *values.shape[batch_dims:])
        inside = torch.cat([_returns(transform, row[None], event_dim) for row in rows])
        return inside.reshape(values.shape[:batch_dims])
    close = (image - values).abs() <= ROUNDING * (1 + values.abs())
    return close.flatten(batch_dims).all(-1)


def _would_count(site: Any) -> Tensor:
    """Return a mask of values that have a finite log-density; or none at all, in a
    support that doesn't move with the parameters."""
    value = as_tensor(site["value"])
    everywhere = torch.ones((), dtype=torch.bool, device=value.device)
    try:
        log_prob = site["fn"].log_prob(value, *site["args"])
    except (RuntimeError, IndexError):  # as of a label that has no probability
        return everywhere
    moves = any(isinstance(bound, Tensor) for bound in _bounds(site["fn"].support))
    return log_prob.isfinite() if moves else log_prob != -torch.inf


def _bounds(support: Any) -> list[Any]:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return list(vars(support).values())


def _mask(site: Any) -> Tensor:
    """Return the mask of a site and of its distribution."""
    masks = [site["mask"], getattr(site["fn"], "_mask", None)]
    result = torch.ones((), dtype=torch.bool, device=as_tensor(site["value"]).device)
    for mask in masks:
        if mask is not None:
            result = result & as_tensor(mask).bool()
    return result


def _example(site: Any, outside: Tensor) -> str:
    value = as_tensor(site["value"])
    if site["fn"].event_dim or value.shape != outside.shape:
        return "values"
    return f"{value[outside][0].item():g}"


def require_possible_targets(fn: Any, targets: Tensor) -> None:
    """Raise ``ValueError`` if targets lie outside of a likelihood's support.

    Supports with bounds for each row aren't checked.
    """
    try:
        support = fn.support
    except NotImplementedError:
        return
    if any(isinstance(bound, Tensor) and bound.dim() for bound in _bounds(support)):
        return
    outside = _outside_of_support(fn, targets)
    if outside is not None and outside.any():
        shown = "" if fn.event_dim else f" {targets[outside][0].item():g},"
        raise ValueError(
            f"y holds{shown} values outside of the support of the likelihood's "
            f"{type(base_of(fn)).__name__}, {support}; pass targets in the support"
        )


# sites out of sight -------------------------------------------------------------------


def seen_through(model: Model) -> Function:
    """Let a model that ``poutine.block`` wraps show the discrete sites that it asks to
    enumerate.

    Pyro's recipe hides them from guides, ``poutine.block(model, hide=["z"])``, where
    the model is ``config_enumerate``'s: they are summed out of its density.
    """
    if not isinstance(model, functools.partial):
        return model
    if not model.args or not isinstance(model.args[0], Messenger):
        inner = seen_through(model.func)
        return functools.partial(inner, *model.args, **model.keywords)
    handler, inner = model.args
    if isinstance(handler, BlockMessenger):
        hides = handler.hide_fn
        handler = BlockMessenger(
            lambda msg: hides(msg) and not (msg["infer"] or {}).get("enumerate")
        )
    return handler(seen_through(inner))


def hidden_sites(run: Callable[[], Any], observed: bool = False) -> list[str]:
    """Return the names of the latent, or observed, sites that a model hides by
    ``poutine.block``.

    No handler around the model sees such a site, so for the time of this run
    ``BlockMessenger`` itself notes what it hides.
    """
    names = []
    process = BlockMessenger._process_message
    outer = {id(handler) for handler in _PYRO_STACK}  # the caller's, not the model's

    def note(self: BlockMessenger, msg: Any) -> None:
        process(self, msg)
        if not msg["stop"] or id(self) in outer:
            return
        if msg["type"] != "sample" or site_is_subsample(msg):
            return
        if msg["is_observed"] == observed and not is_deterministic(msg):
            names.append(msg["name"])

    with replaced(BlockMessenger, "_process_message", note):
        run()
    return sorted(set(names))
