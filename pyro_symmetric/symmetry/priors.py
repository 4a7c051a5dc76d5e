"""Does a prior have the symmetries of the network? Only then does the posterior have them.

A prior breaks exchangeability if units of one factor have different priors: other scales within a layer, say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
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


def check_priors(symmetry: WeightSymmetry, priors: Any) -> PriorCheck:
    """Compare the prior density before and after a random element of each factor, site by site.

    :param priors: site -> distribution whose event dimensions are the site's, or a model with ``priors()``.
    :raises ValueError: if a site that the group moves has no prior.
    """
    given: Mapping[str, Any] = priors.priors() if hasattr(priors, "priors") else priors
    needed = {*symmetry.permutations.required_sites, *symmetry.signs.required_sites}
    missing = sorted(needed - set(given))
    if missing:
        raise ValueError(f"priors lacks the sites {missing}; it has {sorted(given)}")
    weights = {site: given[site].sample().detach() for site in sorted(needed)}
    shapes = symmetry.site_shapes
    permutations, signs = {}, {}
    for name in symmetry.permutations.factors:
        factor = replace(symmetry.permutations.factor(name), parent=None, slot=None)
        element = PermutationGroup([factor], shapes).sample(device=_device(weights))
        permutations[name] = _changed(given, weights, element, factor.axes)
    for name in symmetry.signs.factors:
        flip = symmetry.signs.factor(name)
        all_flipped = SignGroup([flip], shapes).element({name: -torch.ones(flip.size, device=_device(weights))})
        signs[name] = _changed(given, weights, all_flipped, flip.axes)
    return PriorCheck({k: v for k, v in permutations.items() if v}, {k: v for k, v in signs.items() if v})


def _device(weights: Mapping[str, Tensor]) -> torch.device | None:
    return next((value.device for value in weights.values()), None)


def _changed(priors: Mapping[str, Any], weights: Mapping[str, Tensor], element: Any, axes: Any) -> tuple[str, ...]:
    """The sites of a factor whose prior density, mean or deviation changes."""
    sites = [site for site in dict.fromkeys(axis.site for axis in axes) if site in weights]
    moved = element({site: weights[site] for site in sites}) if sites else {}
    return tuple(site for site in sites if not _same(priors[site], weights[site], moved[site], element, site))


def _same(prior: Any, before: Tensor, after: Tensor, element: Any, site: str) -> bool:
    old, new = prior.log_prob(before), prior.log_prob(after)
    if not torch.allclose(old, new, rtol=1e-5, atol=1e-4):
        return False
    for moment in ("mean", "stddev"):  # sharper than the density, where a distribution knows them
        try:
            value = getattr(prior, moment).expand(before.shape)
        except (NotImplementedError, AttributeError):
            continue
        sign = moment == "mean" or isinstance(element.group, PermutationGroup)
        if sign and not torch.allclose(element({site: value})[site], value, rtol=1e-6, atol=0.0, equal_nan=True):
            return False
    return True
