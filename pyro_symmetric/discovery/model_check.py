r"""Does a Pyro model have a declared symmetry? If not, which units are wrong, and which axis.

A group is a symmetry of a model if the joint density of its sites doesn't change,
:math:`p(g \cdot w, D) = p(w, D)`. That is compared at draws from the prior, for elements that generate the group. If it
fails, the sites whose own (conditional) density changes are named, and declarations with one axis fewer, or a few more,
are tried until one holds. A posterior has the symmetries of its network only if the prior has them, which is compared
in the same way: a prior may tell units apart by other scales within a layer, say.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.calls import described_call
from pyro_symmetric.discovery.densities import FunctionDensity, JointDensity, undisturbed
from pyro_symmetric.discovery.invariance import BrokenMove, SiteAndDim, Verification, tried, verified
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.units import Axis
from pyro_symmetric.mcmc.density import Density
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import evenly_spaced
from pyro_symmetric.weights import Weights

MOST_REPAIRS = 200  # alternative declarations of the same units that are tried at most
PRIOR_DRAWS, PRIOR_TOLERANCE = 4, 1e-5
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
def check_priors(symmetry: Any, priors: Any, *args: Any, **kwargs: Any) -> Verification:
    """Compare the density of a prior before and after elements of a group, site by site.

    >>> net, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    >>> priors = {name: dist.Normal(torch.zeros(p.shape), 1.0).to_event() for name, p in net.named_parameters()}
    >>> bool(ps.discovery.check_priors(ps.find_symmetry(net, x), priors))
    True
    >>> priors["0.bias"] = dist.Normal(torch.arange(4.0), 1.0).to_event()
    >>> bool(ps.discovery.check_priors(ps.find_symmetry(net, x), priors))
    False

    Priors that aren't even in the units break their flips, which is common and harmless if guides are averaged over
    permutations alone: check ``symmetry.permutations`` then. If a model holds the network as its attribute ``net``,
    give ``symmetry.prefixed("net")``, whose sites have the model's names.

    :param symmetry: a symmetry or a group; its permutations and signs count.
    :param priors: site -> distribution whose event dimensions are the site's; a :class:`BayesianModel`; or any other
        Pyro model, whose observed sites are passed over.
    :param args: with a Pyro model, what it is called with; so are ``kwargs``.
    :raises ValueError: if a site that the group moves has no prior.
    """
    group = group_of(symmetry).finite
    given = priors.priors() if hasattr(priors, "priors") else priors
    model: Callable[..., Any]
    if isinstance(given, Mapping):
        if priors is given and (args or kwargs):
            raise TypeError(
                f"priors holds distributions, which take no arguments; found {described_call(args, kwargs)}"
            )
        moved = group.required_sites
        if missing := sorted(set(moved) - set(given)):
            raise ValueError(f"priors lacks the sites {missing}; it has {sorted(given)}")
        model = functools.partial(_sampled, {site: given[site] for site in moved})
    else:
        model = poutine.block(functools.partial(given, *args, **kwargs), hide_fn=_is_observed)
    return _verified(group, JointDensity(model, group, PRIOR_DRAWS, PRIOR_TOLERANCE))


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


def _sampled(priors: Mapping[str, Any]) -> None:
    for site, prior in priors.items():
        pyro.sample(site, prior)


def _is_observed(site: Any) -> bool:
    return site["type"] == "sample" and bool(site["is_observed"])


def _verified(group: Group, density: JointDensity | FunctionDensity) -> Verification:
    found = verified(group, density)
    return replace(found, broken=tuple(_with_hint(one, group, density) for one in found.broken))


def _with_hint(broken: BrokenMove, group: Group, density: JointDensity | FunctionDensity) -> BrokenMove:
    """With the smallest change of the declaration that holds: axes to leave out, and axes to add."""
    units = replace(group.restricted(broken.move)[broken.name], parent=None, moves=frozenset({broken.move}))
    declared = [(axis.site, axis.dim) for axis in units.axes]
    free = [
        (site, dim)
        for site, shape in density.shapes.items()
        for dim, length in enumerate(shape)
        if length == units.count and (site, dim) not in declared
    ]
    index = torch.arange(units.count, device="cpu")[None]
    for less, more in itertools.islice(_alternatives(declared, free), MOST_REPAIRS):
        kept_axes = tuple(axis for axis in units.axes if (axis.site, axis.dim) not in less)
        other = replace(units, axes=(*kept_axes, *(Axis(site, dim, index, 1) for site, dim in more)))
        shapes = group.site_shapes | {s: n for s, n in density.shapes.items() if s not in group.site_shapes}
        elements = tried(Group([other], shapes), [(broken.move, broken.name)])
        if not any(density.change(element).broken for element in elements):
            return replace(broken, superfluous=less, missing=more)
    return broken


def _alternatives(
    declared: Sequence[SiteAndDim], free: Sequence[SiteAndDim]
) -> Iterator[tuple[tuple[SiteAndDim, ...], tuple[SiteAndDim, ...]]]:
    """Pairs (axes to leave out, axes to add), the smallest changes first."""
    for changes in range(1, 4):
        for left_out in range(min(changes, len(declared) - 1, 2) + 1):
            for less in itertools.combinations(declared, left_out):
                for more in itertools.combinations(free, changes - left_out):
                    yield less, more
