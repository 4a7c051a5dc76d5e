"""Does a prior have the symmetries of the network? Only then does the posterior have them.

A prior breaks exchangeability if units of one factor have different priors: other scales within a layer, say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_symmetric.symmetry.permutation import PermutationGroup
from pyro_symmetric.symmetry.rescaling import SignGroup
from pyro_symmetric.symmetry.weight_symmetry import WeightSymmetry


@dataclass(frozen=True)
class PriorCheck:
    """Which factors a prior breaks.

    :param permutations: factor -> the sites whose prior tells its units apart.
    :param signs: factor -> the sites whose prior isn't symmetric around zero.
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


def check_priors(symmetry: WeightSymmetry, priors: Any, *args: Any, **kwargs: Any) -> PriorCheck:
    """Compare prior densities and moments before and after elements that generate each factor, site by site.

    >>> symmetry = find_symmetry(net, x).prefixed("net")  # the model holds the network as its attribute ``net``
    >>> print(check_priors(symmetry, model, x, y))

    :param priors: site -> distribution whose event dimensions are the site's; a :class:`BayesianModel`; or any other
        Pyro model, whose sites' distributions are read off one run. (Where they depend on further sites, they are
        compared at one draw of these.)
    :param args: with a Pyro model, what it is called with; so are ``kwargs``.
    :raises ValueError: if a site that the group moves has no prior.
    """
    needed = {*symmetry.permutations.required_sites, *symmetry.signs.required_sites}
    given = _priors(priors, needed, args, kwargs)
    missing = sorted(needed - set(given))
    if missing:
        raise ValueError(f"priors lacks the sites {missing}; it has {sorted(given)}")
    weights = {site: given[site].sample().detach() for site in sorted(needed)}
    permutations, signs = {}, {}
    for name in symmetry.permutations.factors:
        factor = replace(symmetry.permutations.factor(name), parent=None, slot=None)
        permutations[name] = _changed(given, weights, factor, PermutationGroup)
    for name in symmetry.signs.factors:
        signs[name] = _changed(given, weights, symmetry.signs.factor(name), SignGroup)
    return PriorCheck({k: v for k, v in permutations.items() if v}, {k: v for k, v in signs.items() if v})


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


def _changed(priors: Mapping[str, Any], weights: Mapping[str, Tensor], factor: Any, kind: Any) -> tuple[str, ...]:
    """The sites of a factor whose prior density, mean or deviation changes."""
    changed = []
    for site in dict.fromkeys(axis.site for axis in factor.axes if axis.site in weights):
        alone = replace(factor, axes=tuple(axis for axis in factor.axes if axis.site == site))
        group = kind([alone], {site: weights[site].shape})
        if not all(_same(priors[site], weights[site], element, site) for element in _generators(group, weights[site])):
            changed.append(site)
    return tuple(changed)


def _generators(group: Any, like: Tensor) -> list[Any]:
    """Elements that make up the whole group of one factor: a cycle and an exchange; all signs."""
    ((name, n),) = group.factors.items()
    if isinstance(group, SignGroup):
        return [group.element({name: -torch.ones(n, device=like.device)})]
    units = torch.arange(n, device=like.device)
    return [group.element({name: images}) for images in (units.roll(1), torch.cat([units[:2].flip(0), units[2:]]))]


def _same(prior: Any, value: Tensor, element: Any, site: str) -> bool:
    if not torch.allclose(prior.log_prob(value), prior.log_prob(element({site: value})[site]), rtol=1e-5, atol=1e-4):
        return False
    even = not isinstance(element.group, PermutationGroup)
    for moment in (
        ("mean",) if even else ("mean", "stddev")
    ):  # sharper than the density, where a distribution knows them
        try:
            known = getattr(prior, moment).expand(value.shape)
        except (NotImplementedError, AttributeError):
            continue
        if not torch.allclose(element({site: known})[site], known, rtol=1e-6, atol=0.0, equal_nan=True):
            return False
    return True
