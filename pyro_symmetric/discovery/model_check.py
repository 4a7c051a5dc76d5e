r"""Does a Pyro model have a declared symmetry? If not, which units are wrong, and which axis.

A group is a symmetry of a model if the joint density of its sites doesn't change,
:math:`p(g \cdot w, D) = p(w, D)`. That is compared at draws from the prior, for elements that generate the group. If it
fails, the sites whose own (conditional) density changes are named, and declarations with one axis fewer, or one more,
are tried. A posterior has the symmetries of its network only if the prior has them: it may tell units apart by other
scales within a layer, say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.discovery.densities import FunctionDensity, JointDensity, undisturbed
from pyro_symmetric.discovery.invariance import BrokenMove, Verification, tried, verified
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.mcmc.density import Density
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import evenly_spaced
from pyro_symmetric.weights import Weights

POSTERIOR_DRAWS = 4


@undisturbed()
def verify_model(
    group: Any, model: Callable[..., Any], *args: Any, trials: int = 2, tolerance: float = 1e-4, **kwargs: Any
) -> Verification:
    """Compare a model's joint density before and after elements of a group, at draws from the prior.

    Discrete sites are summed out if they can be enumerated; subsampled plates keep one draw of their rows.

    >>> def model(data):
    ...     with pyro.plate("k", 3):
    ...         locs = pyro.sample("locs", dist.Normal(0.0, 5.0))
    ...         scales = pyro.sample("scales", dist.LogNormal(0.0, 1.0))
    ...     with pyro.plate("data", len(data)):
    ...         components = dist.Normal(locs, scales)
    ...         pyro.sample("x", dist.MixtureSameFamily(dist.Categorical(torch.ones(3)), components), obs=data)
    >>> data, shapes = torch.randn(5), {"locs": torch.zeros(3), "scales": torch.zeros(3)}
    >>> bool(ps.verify_model(ps.Group.declare({"locs": ("k",), "scales": ("k",)}, shapes), model, data))
    True
    >>> result = ps.verify_model(ps.Group.declare({"locs": ("k",)}, shapes), model, data)
    >>> bool(result), "axis 0 of 'scales'" in str(result)  # it says what the declaration lacks
    (False, True)

    :param group: what was declared, or a symmetry; its permutations and signs count.
    :param model: any Pyro model; ``args`` and ``kwargs`` are what it is called with, data included. (If its own
        arguments are called ``trials`` or ``tolerance``, give ``functools.partial(model, ...)``.)
    :param trials: how many draws from the prior are compared.
    :param tolerance: relative change of a site's log-density (in the norm over its entries) that passes as rounding.
    :raises ValueError: if the group moves sites that the model lacks.
    :raises InconclusiveError: if the density isn't a function of the sites (dropout, other randomness).
    """
    arguments.whole("trials", trials, 1)
    arguments.number("tolerance", tolerance, least=0)
    finite = group_of(group).finite
    return _verified(finite, JointDensity(functools.partial(model, *args, **kwargs), finite, trials, tolerance))


@undisturbed()
def check_function(group: Group, log_joint: Callable[[Weights], Tensor], draws: Weights) -> Verification:
    """:func:`verify_model` for a log-density of which only values are known.

    :param log_joint: weights of batch shape ``(S,)`` -> ``(S,)``.
    :param draws: weights of batch shape ``(S,)`` at which the density matters.
    """
    return _verified(group.finite, FunctionDensity(log_joint, draws))


@undisturbed()
def require_of_posterior(symmetry: Any, posterior: Any) -> None:
    """Refuse a declared group that the model of a posterior lacks, by its density at some of the draws.

    Of draws that know no model nothing can be told. A network's symmetry was verified on the network.

    :raises ValueError: if the density changes when draws are moved.
    """
    known = isinstance(symmetry, Group) and isinstance(posterior, Posterior)
    if not known or posterior.source is None or posterior.num_chains * posterior.num_samples == 0:
        return
    dtype = next(iter(posterior.samples.values())).dtype
    density = Density(*posterior.source[:3], device=posterior.source.device, dtype=dtype, subsampled=True)
    sites, draws = density.layout.site_shapes, posterior.get_samples()
    if density.row_counts or not all(site in draws for site in sites):
        return  # rows of its own at every call, or draws that were cut
    some = evenly_spaced(len(next(iter(draws.values()))), POSTERIOR_DRAWS)
    at = density.layout.constrain(density.unconstrain({site: draws[site][some] for site in sites}))
    found = check_function(symmetry, lambda weights: density.target.log_joint(weights, None), at)
    if not found:
        raise ValueError(
            f"at draws of the posterior, {found}\nModulo that group they would be draws of another posterior: give the "
            "group that the model has (verify_model(group, model, ...) names the sites), or mend the prior or the "
            "likelihood that treats units differently"
        )


# small steps --------------------------------------------------------------------------------------------------------


def _verified(group: Group, density: JointDensity | FunctionDensity) -> Verification:
    found = verified(group, density)
    return replace(found, broken=tuple(replace(one, remedy=_remedy(one, group, density)) for one in found.broken))


def _remedy(broken: BrokenMove, group: Group, density: JointDensity | FunctionDensity) -> str:
    """The axis to leave out, or to add, with which the declaration of some units holds, in words."""
    units = replace(group.restricted(broken.move)[broken.name], parent=None, moves=frozenset({broken.move}))
    every, own = group.site_shapes | density.shapes, {(axis.site, axis.dim) for axis in units.axes}
    free = {(site, dim) for site, shape in density.shapes.items() for dim, n in enumerate(shape) if n == units.count}
    index = torch.arange(units.count, device="cpu")[None]
    for site, dim in sorted(own | free):
        axes = tuple(axis for axis in units.axes if (axis.site, axis.dim) != (site, dim))
        axes += () if len(axes) < len(units.axes) else (Axis(site, dim, index, 1),)
        elements = tried(Group([replace(units, axes=axes)], every), [(broken.move, broken.name)]) if axes else ()
        if axes and not any(density.change(element).broken for element in elements):
            return f"{'without' if (site, dim) in own else 'with'} axis {dim} of {site!r}"
    return ""
