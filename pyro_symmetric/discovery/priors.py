"""Does a prior have the symmetries of the network? Only then does the posterior have them.

A prior breaks exchangeability if units of one set have different priors: other scales within a layer, say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import group_of


@dataclass(frozen=True)
class PriorCheck:
    """Which units a prior tells apart.

    :param permutations: name of the units -> the sites whose prior tells them apart.
    :param signs: name -> the sites whose prior isn't symmetric around zero.
    """

    permutations: dict[str, tuple[str, ...]]
    signs: dict[str, tuple[str, ...]]

    def __bool__(self) -> bool:
        """Whether the prior has all permutations. (Priors without sign symmetry are common and harmless.)"""
        return not self.permutations

    def __str__(self) -> str:
        found = [
            f"the prior of {', '.join(sites)} {what} of {name!r}"
            for what, broken in (("tells apart the units", self.permutations), ("isn't even in the units", self.signs))
            for name, sites in broken.items()
        ]
        return "; ".join(found) or "the prior has all symmetries of the network"


def check_priors(symmetry: Any, priors: Any, *args: Any, **kwargs: Any) -> PriorCheck:
    """Compare prior densities and moments before and after elements that generate the group, site by site.

    >>> symmetry = find_symmetry(net, x).prefixed("net")  # the model holds the network as its attribute ``net``
    >>> print(check_priors(symmetry, model, x, y))

    :param symmetry: a symmetry or a group; its permutations and signs count.
    :param priors: site -> distribution whose event dimensions are the site's; a :class:`BayesianModel`; or any other
        Pyro model, whose sites' distributions are read off one run. (If they depend on further sites, they are
        compared at one draw of these.)
    :param args: with a Pyro model, what it is called with; so are ``kwargs``.
    :raises ValueError: if a site that the group moves has no prior.
    """
    group = group_of(symmetry)
    needed = set(group.finite.required_sites)
    given = _priors(priors, needed, args, kwargs)
    missing = sorted(needed - set(given))
    if missing:
        raise ValueError(f"priors lacks the sites {missing}; it has {sorted(given)}")
    weights = {site: given[site].sample().detach() for site in sorted(needed)}
    permuted = {name: group.permutations.generators(name) for name in group.names("permute")}
    flipped = {name: group.signs.element(signs={name: -torch.ones(group[name].shape)}) for name in group.names("flip")}
    broken = (
        {name: _changed(given, weights, name, element, moments) for name, element in elements.items()}
        for elements, moments in ((permuted, ("mean", "stddev")), (flipped, ("mean",)))
    )
    return PriorCheck(*({name: sites for name, sites in found.items() if sites} for found in broken))


def _priors(priors: Any, needed: Set[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(priors, Mapping):
        return priors
    if hasattr(priors, "priors"):
        return priors.priors()
    if not callable(priors):
        raise TypeError(f"priors is a {type(priors).__name__}; it must be a dict of distributions or a Pyro model")
    with torch.no_grad(), poutine.block():
        trace = poutine.trace(priors).get_trace(*args, **kwargs)
    found = {name: site["fn"] for name, site in trace.iter_stochastic_nodes()}
    # What lies in plates is compared as a whole, too.
    return {name: fn.to_event(len(fn.batch_shape)) if name in needed else fn for name, fn in found.items()}


def _changed(
    priors: Mapping[str, Any], weights: Mapping[str, Tensor], name: str, element: Element, moments: Sequence[str]
) -> tuple[str, ...]:
    """The sites of some units whose prior density, or moments (sharper, if a distribution knows them), change."""
    sites = dict.fromkeys(axis.site for axis in element.group[name].axes if axis.site in weights)
    return tuple(site for site in sites if not _same(priors[site], weights[site], element, site, moments))


def _same(prior: Any, value: Tensor, element: Element, site: str, moments: Sequence[str]) -> bool:
    before, after = prior.log_prob(value), prior.log_prob(element.on_site(site, value))
    if not torch.allclose(before.expand(after.shape), after, rtol=1e-5, atol=1e-4):
        return False
    for moment in moments:
        try:
            known = getattr(prior, moment).expand(value.shape)
        except (NotImplementedError, AttributeError):
            continue
        changed = element.on_site(site, known)
        if not torch.allclose(changed, known.expand(changed.shape), rtol=1e-6, atol=0.0, equal_nan=True):
            return False
    return True
