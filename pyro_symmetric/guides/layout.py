"""The latent sites of a guide, and the flat vector of their unconstrained values.

A layout is read off a guide that has been set up, written to JSON, and turned back into a tiny Pyro model with the same
latent sites and no data. Guides with given moments and guides from files are built over that model.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import constraints as pyro_constraints
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import biject_to, constraints
from torch.distributions.constraints import Constraint

from pyro_symmetric import arguments
from pyro_symmetric.groups import Action, Group
from pyro_symmetric.layout import Layout


class Plate(NamedTuple):
    """A plate around a site: its name, dimension, (sub)sample size and full size."""

    name: str
    dim: int
    size: int
    full_size: int


@dataclass(frozen=True)
class LatentSite:
    """One latent site: its name, the shape of its (constrained) value, its support, event dimension and plates."""

    name: str
    shape: tuple[int, ...]
    support: Constraint
    event_dim: int
    plates: tuple[Plate, ...] = ()


class GuideLayout(Layout):
    """The layout of a guide's vector, with all that a model of its latent sites needs.

    :param sites: in the order in which the vector concatenates their unconstrained values.
    """

    def __init__(self, sites: Sequence[LatentSite]):
        self.sites = tuple(sites)
        super().__init__(
            {site.name: site.shape for site in sites}, {site.name: biject_to(site.support) for site in sites}
        )

    def __iter__(self) -> Iterator[LatentSite]:
        return iter(self.sites)

    def action(self, group: Group) -> Action:
        """The action of a group on the vectors.

        :raises ValueError: if the group moves sites that aren't there, or whose shapes or supports don't fit.
        """
        for site in group.required_sites:
            if site not in self.site_shapes:
                raise ValueError(
                    f"the group moves the site {site!r}, which the guide doesn't have; the guide's sites are "
                    f"{list(self.site_shapes)}. If the network is an attribute 'net' of the model, take "
                    "symmetry.prefixed('net')"
                )
            if self.site_shapes[site] != group.site_shapes[site]:
                raise ValueError(
                    f"site {site!r} has shape {tuple(self.site_shapes[site])} in the guide, but "
                    f"{tuple(group.site_shapes[site])} in the group"
                )
        return Action(group, {site.name: site.support for site in self}, self.site_shapes)

    def to_dict(self) -> list[dict[str, Any]]:
        """As JSON.

        :raises ValueError: for a support that has no such form (bounds that are tensors, a user's own constraint).
        """
        return [{**vars(site), "support": _support_to_dict(site.support), "plates": list(site.plates)} for site in self]

    @classmethod
    def from_dict(cls, data: Sequence[Mapping[str, Any]]) -> GuideLayout:
        """From JSON."""
        sites = []
        for site in data:
            plates = tuple(Plate(*plate) for plate in site["plates"])
            read = {"shape": tuple(site["shape"]), "support": _support_from_dict(site["support"]), "plates": plates}
            sites.append(LatentSite(**{**site, **read}))
        return cls(sites)


def layout_of(guide: AutoGuide) -> GuideLayout:
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
            Plate(frame.name, frame.dim, int(frame.size), int(frame.full_size or frame.size))
            for frame in site["cond_indep_stack"]
        )
        sites.append(LatentSite(name, tuple(site["value"].shape), site["fn"].support, site["fn"].event_dim, plates))
    return GuideLayout(sites)


class LayoutModel:
    """A Pyro model with given latent sites and no data; its arguments are ignored.

    :param layout: the sites.
    :param like: a tensor whose dtype and device the sites' values take.
    """

    def __init__(self, layout: GuideLayout, like: Tensor):
        self.layout = arguments.instance("layout", layout, GuideLayout, "a layout, as layout_of(guide) gives it")
        if not layout.dim:
            raise ValueError("layout holds no weights; a guide needs at least one")
        self.like = arguments.tensor("like", like).detach().new_empty(0)

    def init_loc_fn(self, site: dict[str, Any]) -> Tensor:
        """For :class:`~pyro.infer.autoguide.AutoContinuous`: start at the image of zero."""
        return self.layout.constrain(self.like.new_zeros(self.layout.dim))[site["name"]]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        plates: dict[str, pyro.plate] = {}
        for site in self.layout:
            split, shape = len(site.shape) - site.event_dim, torch.Size(site.shape)
            prior = dist.ImproperUniform(site.support, shape[:split], shape[split:])
            with ExitStack() as stack:
                for p in site.plates:
                    if p.name not in plates:
                        plates[p.name] = pyro.plate(p.name, p.full_size, dim=p.dim, subsample_size=p.size)
                    stack.enter_context(plates[p.name])
                pyro.sample(site.name, prior)


# supports as JSON ---------------------------------------------------------------------------------------------------

_KNOWN = [*vars(constraints).values(), *vars(pyro_constraints).values()]
_KINDS = {kind.__name__: kind for kind in _KNOWN if isinstance(kind, type) and issubclass(kind, Constraint)}


def _support_to_dict(support: Constraint) -> dict[str, Any]:
    """The kind of a constraint, and the arguments that make it, which it keeps as attributes."""
    kind = type(support)
    found: dict[str, Any] = {"kind": kind.__name__}
    for name in inspect.signature(kind).parameters if _KINDS.get(kind.__name__) is kind else ("kind",):
        value = getattr(support, name, None)
        if isinstance(value, Constraint):
            found[name] = _support_to_dict(value)
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1):
            found[name] = value if isinstance(value, int) else float(value)
        else:
            raise ValueError(f"the support {support} can't be written to a file")
    return found


def _support_from_dict(data: Mapping[str, Any]) -> Constraint:
    given = {name: value for name, value in data.items() if name != "kind"}
    return _KINDS[data["kind"]](
        **{name: _support_from_dict(v) if isinstance(v, dict) else v for name, v in given.items()}
    )
