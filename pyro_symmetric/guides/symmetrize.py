r"""Guides written by hand, averaged over a group: their own draws, and one factor more.

With :math:`w` the values that a guide draws and :math:`q` their density,

.. math:: \bar q(w) = \frac1{|G|} \sum_{g \in G} q(g \cdot w), \qquad
    \text{factor} = \log \bar q(w) - \log q(w),

so that the guide's log-density is that of :math:`\bar q`. Reference: Gelberg et al. 2024 (arXiv 2408.05496), Section 4.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import TorchDistribution
from pyro.infer.autoguide import AutoGuide
from torch import Tensor
from torch.distributions import constraints

from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.distributions import OrbitEstimator, usual_estimator
from pyro_symmetric.groups import Action, Group, group_of
from pyro_symmetric.weights import unflatten

Guide = Callable[..., Any]


def symmetrize(guide: Guide, group: Group | Symmetry, estimator: OrbitEstimator | None = None) -> Guide:
    """Average a guide that was written by hand over the orbits of a group.

    >>> def guide():
    ...     loc = pyro.param("loc", torch.tensor([-1.0, 0.0, 1.0]))
    ...     pyro.sample("w", dist.Normal(loc, 0.5).to_event(1))
    >>> def model():
    ...     pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    >>> group = ps.Group.declare({"w": ("unit",)}, {"w": torch.zeros(3)})
    >>> svi = pyro.infer.SVI(model, ps.symmetrize(guide, group), pyro.optim.Adam({"lr": 0.01}), pyro.infer.Trace_ELBO())
    >>> loss = svi.step()

    The guide draws as it did, one copy of every mode, and gets one factor more, so that any objective of Pyro (but
    ``TraceTMC_ELBO``, which leaves factors of guides out) sees the symmetrised density. Its other sites stay as they
    are. Automatic guides go by :class:`~pyro_symmetric.guides.AutoSymmetrized`, which also checks that the model has
    the symmetry: here check yours by ``ps.verify_model(group, model, *args)``.

    :param guide: a function with ``pyro.sample`` statements. The sites that the group moves must be independent of
        each other and of all others, and lie in no subsampled plate. It is run twice for each draw.
    :param group: permutations and signs that the model has.
    :param estimator: of the symmetrised density; by default exact where that is cheap, else ``SinkhornImportance``.
    :raises ValueError: in a step: if a site is missing, has another shape, or depends on another one.
    """
    if isinstance(guide, AutoGuide):
        raise TypeError("guide is an automatic one; take ps.AutoSymmetrized(model, group, base=guide)")
    group = group_of(group).finite
    sites = group.required_sites
    shapes = {site: group.site_shapes[site] for site in sites}
    action = Action(group, sites)

    @functools.wraps(guide)
    def symmetrized(*args: Any, **kwargs: Any) -> Any:
        trace = poutine.trace(guide).get_trace(*args, **kwargs)
        with poutine.block():  # without the plates of particles, and unseen
            alone = poutine.trace(guide).get_trace(*args, **kwargs)
        _require_sites(trace, alone, action)
        nodes: Any = trace.nodes
        # The plates around the guide, those of particles: their sizes, and the shape that they make of one number.
        own = {frame.name for frame in alone.nodes[sites[0]]["cond_indep_stack"]}
        stack = nodes[sites[0]]["cond_indep_stack"]
        plates = {frame.dim: int(frame.size) for frame in stack if frame.vectorized and frame.name not in own}
        batch = [plates[dim] for dim in sorted(plates)]
        outer = [plates.get(dim, 1) for dim in range(min(plates, default=0), 0)]
        values = {site: nodes[site]["value"].reshape(*batch, *shape) for site, shape in shapes.items()}
        laws = {site: alone.nodes[site]["fn"] for site in sites}
        base, flat = _flat(laws, shapes), torch.cat([v.flatten(len(batch)) for v in values.values()], -1)
        chosen = estimator or usual_estimator(base, action)
        change = chosen.log_prob(base, action, flat) - base.log_prob(flat)
        pyro.factor("symmetrized", change.reshape(outer), has_rsample=True)
        return nodes["_RETURN"]["value"]

    return symmetrized


class _Product(TorchDistribution):
    """Independent sites as one vector of their values."""

    arg_constraints: dict[str, constraints.Constraint] = {}  # noqa: RUF012 (torch's own declaration)
    support = constraints.real_vector

    def __init__(self, laws: Mapping[str, Any], shapes: Mapping[str, torch.Size]):
        self.laws, self.shapes = laws, shapes
        super().__init__(torch.Size(), torch.Size([sum(shape.numel() for shape in shapes.values())]))

    def sample(self, sample_shape: Sequence[int] = torch.Size()) -> Tensor:
        return torch.cat([law.sample(sample_shape).reshape(*sample_shape, -1) for law in self.laws.values()], -1)

    def log_prob(self, value: Tensor) -> Tensor:
        pieces = unflatten(value, self.shapes)
        terms = [law.log_prob(pieces[site]).reshape(*value.shape[:-1], -1) for site, law in self.laws.items()]
        return torch.cat(terms, -1).sum(-1)


def _flat(laws: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> Any:
    """The joint law of all sites: a normal vector, of which estimators know more, if all are normal."""
    inner = dict(laws)
    while any(isinstance(law, torch.distributions.Independent) for law in inner.values()):
        inner = {site: getattr(law, "base_dist", law) for site, law in inner.items()}
    if not all(isinstance(law, torch.distributions.Normal) for law in inner.values()):
        return _Product(laws, shapes)
    loc, scale = (
        torch.cat([getattr(inner[site], name).expand(shape).reshape(-1) for site, shape in shapes.items()])
        for name in ("loc", "scale")
    )
    return dist.Normal(loc, scale).to_event(1)


def _require_sites(trace: Any, alone: Any, action: Action) -> None:
    """:raises ValueError: for a site that isn't there, of another shape or support, subsampled, or not independent."""
    for site, shape in action.layout.site_shapes.items():
        if site not in trace.nodes:
            raise ValueError(f"the group moves the site {site!r}, which the guide doesn't draw")
        node, other = trace.nodes[site], alone.nodes[site]
        if other["value"].shape != shape:
            raise ValueError(f"site {site!r} has shape {tuple(other['value'].shape)}; the group's is {tuple(shape)}")
        action.require_real(site, other["fn"].support)
        if other["scale"] != 1.0:
            raise ValueError(f"site {site!r} lies in a subsampled plate; a symmetrised guide takes no local variables")
        with torch.no_grad():
            same, found = (float(law.log_prob(node["value"]).sum()) for law in (node["fn"], other["fn"]))
        if not math.isclose(same, found, rel_tol=1e-4, abs_tol=1e-4):
            raise ValueError(f"site {site!r} depends on another site of the guide; those that the group moves must not")
