"""What a guide needs to know of its model to draw weights: the latent sites, their shapes, supports and plates.

A layout is read off a guide that has been set up, written to JSON, and turned back into a tiny Pyro model with the same
latent sites and no data. Guides that are pushed forward or loaded from a file are built over that model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints as pyro_constraints
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.constraints import Constraint

from pyro_symmetric.distributions.constrained import ConstrainedAction, action_on_unconstrained
from pyro_symmetric.symmetry.finite import AnyFiniteGroup, SignedFlatAction
from pyro_symmetric.symmetry.permutation import FlatAction
from pyro_symmetric.symmetry.weights import Weights


@dataclass(frozen=True)
class PlateLayout:
    """A plate around a site: its name, dimension, (sub)sample size and full size."""

    name: str
    dim: int
    size: int
    full_size: int


@dataclass(frozen=True)
class SiteLayout:
    """One latent site: its name, the shape of its (constrained) value, its support and event dimension, and its
    plates."""

    name: str
    shape: tuple[int, ...]
    support: Constraint
    event_dim: int
    plates: tuple[PlateLayout, ...] = ()

    @property
    def unconstrained_shape(self) -> torch.Size:
        """Shape of the site's unconstrained coordinates."""
        return biject_to(self.support).inverse_shape(torch.Size(self.shape))

    def unconstrain(self, value: Tensor) -> Tensor:
        """Values ``batch_shape + shape`` -> ``batch_shape + unconstrained_shape``."""
        return biject_to(self.support).inv(value)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "support": support_to_dict(self.support, self.name),
            "event_dim": self.event_dim,
            "plates": [asdict(plate) for plate in self.plates],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SiteLayout:
        """From JSON."""
        plates = tuple(PlateLayout(**plate) for plate in data["plates"])
        support = support_from_dict(data["support"])
        return cls(data["name"], tuple(data["shape"]), support, data["event_dim"], plates)


def layout_of(guide: AutoGuide) -> tuple[SiteLayout, ...]:
    """The layout of a guide, in the order in which it concatenates its sites.

    :raises ValueError: if the guide hasn't seen its model yet.
    """
    trace = getattr(guide, "prototype_trace", None)
    if trace is None:
        raise ValueError(
            f"this {type(guide).__name__} hasn't been set up: call guide.setup(*model_args) (or guide(*model_args), "
            "for a stock guide) or take one SVI step first"
        )
    sites = []
    for name, site in trace.iter_stochastic_nodes():
        plates = tuple(
            PlateLayout(frame.name, frame.dim, int(frame.size), int(frame.full_size or frame.size))
            for frame in site["cond_indep_stack"]
        )
        sites.append(SiteLayout(name, tuple(site["value"].shape), site["fn"].support, site["fn"].event_dim, plates))
    return tuple(sites)


def one_layout_of(guides: Sequence[AutoGuide]) -> tuple[SiteLayout, ...]:
    """The layout that all guides share.

    :raises ValueError: naming the first guide whose sites differ from those of ``guides[0]``.
    """

    def described(sites: Sequence[SiteLayout]) -> dict[str, str]:
        return {site.name: f"{tuple(site.shape)} {site.support}" for site in sites}

    sites = layout_of(guides[0])
    expected = described(sites)
    for number, guide in enumerate(guides):
        found = described(layout_of(guide))
        if list(found.items()) != list(expected.items()):
            raise ValueError(
                f"guides[{number}] has the sites {found}, but guides[0] has {expected}; all must be guides of one model"
            )
    return sites


def action_on(sites: Sequence[SiteLayout], group: AnyFiniteGroup) -> FlatAction | SignedFlatAction | ConstrainedAction:
    """How a group acts on the flat unconstrained vectors of a guide with these sites."""
    supports = {site.name: site.support for site in sites}
    return action_on_unconstrained(group, supports, {site.name: torch.Size(site.shape) for site in sites})


class LayoutModel:
    """A Pyro model with given latent sites and no data; its arguments are ignored.

    :param sites: the layout.
    :param like: a tensor whose dtype and device the sites' values take.
    """

    def __init__(self, sites: Sequence[SiteLayout], like: Tensor):
        self.sites = tuple(sites)
        self.like = like.detach().new_empty(0)

    def example(self) -> Weights:
        """A feasible value of every site: the image of zero."""
        return {
            site.name: biject_to(site.support)(self.like.new_zeros(site.unconstrained_shape)) for site in self.sites
        }

    def init_loc_fn(self, site: dict[str, Any]) -> Tensor:
        """For :class:`~pyro.infer.autoguide.AutoContinuous`: start at :meth:`example`."""
        return self.example()[site["name"]]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        plates: dict[str, pyro.plate] = {}
        for site in self.sites:
            split = len(site.shape) - site.event_dim
            shape = torch.Size(site.shape)
            prior = dist.ImproperUniform(site.support, shape[:split], shape[split:])
            with ExitStack() as stack:
                for p in site.plates:
                    if p.name not in plates:
                        plates[p.name] = pyro.plate(p.name, p.full_size, dim=p.dim, subsample_size=p.size)
                    stack.enter_context(plates[p.name])
                pyro.sample(site.name, prior)


# supports as JSON ---------------------------------------------------------------------------------------------------

_BY_NAME = {
    name: getattr(pyro_constraints, name)
    for name in (
        "real",
        "simplex",
        "lower_cholesky",
        "positive_definite",
        "corr_cholesky",
        "unit_lower_cholesky",
        "ordered_vector",
        "positive_ordered_vector",
        "softplus_positive",
        "softplus_lower_cholesky",
        "sphere",
    )
}
_BY_BOUNDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "greater_than": (constraints.greater_than, ("lower_bound",)),
    "greater_than_eq": (constraints.greater_than_eq, ("lower_bound",)),
    "less_than": (constraints.less_than, ("upper_bound",)),
    "interval": (constraints.interval, ("lower_bound", "upper_bound")),
    "half_open_interval": (constraints.half_open_interval, ("lower_bound", "upper_bound")),
}


def support_to_dict(support: Constraint, site: str) -> dict[str, Any]:
    """A support as JSON.

    :raises ValueError: for a support that has no such form (bounds that are tensors, a user's own constraint).
    """
    if isinstance(support, constraints.independent):
        inner = support_to_dict(support.base_constraint, site)
        return {"kind": "independent", "of": inner, "ndims": support.reinterpreted_batch_ndims}
    for name, simple in _BY_NAME.items():
        if type(support) is type(simple):
            return {"kind": name}
    for name, (bounded, fields) in _BY_BOUNDS.items():
        if type(support) is bounded:
            bounds = {field: torch.as_tensor(getattr(support, field)) for field in fields}
            if all(bound.numel() == 1 for bound in bounds.values()):
                return {"kind": name, **{field: float(bound) for field, bound in bounds.items()}}
    raise ValueError(f"the support {support} of site {site!r} can't be written to a file")


def support_from_dict(data: Mapping[str, Any]) -> Constraint:
    """The inverse of :func:`support_to_dict`."""
    kind = data["kind"]
    if kind == "independent":
        return constraints.independent(support_from_dict(data["of"]), data["ndims"])
    if kind in _BY_NAME:
        return _BY_NAME[kind]
    bounded, fields = _BY_BOUNDS[kind]
    return bounded(*(data[field] for field in fields))
