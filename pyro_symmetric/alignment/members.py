"""The members that are brought into one frame, read from whatever they came in, and put back into it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.alignment.gaussian import GaussianWeights, draws_of, moved_to, on_host, plain
from pyro_symmetric.alignment.moments import batch_shape_of, compared_sites
from pyro_symmetric.discovery.symmetry import with_weights
from pyro_symmetric.groups.element import Element, require_buffers
from pyro_symmetric.groups.group import Group
from pyro_symmetric.posterior import Posterior
from pyro_symmetric.weights import Weights


@dataclass(frozen=True, eq=False)
class Members:
    """Members as one batch.

    :param given: what they came in.
    :param gaussian: their moments, batch shape ``(S,)``, with the group's stacks, on the CPU.
    :param device: the device of what they came in.
    :param element_shape: batch shape of the elements that act on what was given.
    :param sites: the sites that are compared.
    """

    given: Any
    gaussian: GaussianWeights
    device: torch.device
    element_shape: tuple[int, ...]
    sites: list[str]

    @property
    def count(self) -> int:
        """The number of members."""
        return math.prod(self.element_shape)

    @property
    def vary(self) -> bool:
        """True if some have deviations."""
        return any(bool(value.any()) for value in self.gaussian.scale.values())

    @property
    def are_draws(self) -> bool:
        """True if they are plain draws of one posterior, or look like that: one batch, without deviations."""
        return isinstance(self.given, Posterior | Mapping) and not self.vary

    def gaussian_after(self, element: Element) -> GaussianWeights:
        """The moments of all sites, moved, those that weren't compared (buffers, what no group knows) with them."""
        own = self.gaussian
        # What a guide maps to values of another shape (a simplex) no element moves.
        bijections = {site: own.bijection(site) for site in own.supports}
        held = {site for site, b in bijections.items() if b is not None and b.domain.event_dim}

        def act(weights: Mapping[str, Tensor]) -> Weights:
            shaped = {s: v.reshape(*self.element_shape, *v.shape[1:]) for s, v in weights.items()}
            return shaped | element({site: value for site, value in shaped.items() if site not in held})

        loc, none = act(own.loc), {site: torch.zeros_like(value) for site, value in own.scale.items()}
        # Elements are affine, weight by weight: deviations go with what is linear, without its sign.
        scale, shift = (act(own.scale), act(none)) if self.vary else (loc, loc)
        moved = GaussianWeights(loc, {site: (v - shift[site]).abs() for site, v in scale.items()}, own.supports)
        return moved

    def after(self, element: Element, gaussian: GaussianWeights) -> Any:
        """The members as they were given, moved.

        :param element: on the members' device.
        :param gaussian: what :meth:`gaussian_after` returns.
        """
        if isinstance(self.given, Posterior):
            return self.given.map(element)
        if isinstance(self.given, Mapping):
            return element(self.given)
        if isinstance(self.given, GaussianWeights):
            return moved_to(gaussian, self.device)
        return [_moved(own, element.select(k), gaussian.each(itemgetter(k))) for k, own in enumerate(self.given)]


def read_members(sources: Any, group: Group, each: str) -> Members:
    """Read a list, a batch, or a posterior.

    :raises ValueError: if there are none, or naming the member and the site that doesn't fit.
    """
    arguments.one_of("each", each, ("draw", "chain"))
    if isinstance(sources, Posterior):
        samples = _with_moments(draws_of(sources, "posterior"), group)
        shape: tuple[int, ...] = (sources.num_chains, sources.num_samples if each == "draw" else 1)
        read: Any = (
            {site: value.flatten(0, 1) for site, value in samples.items()}
            if each == "draw"
            else GaussianWeights(
                {site: value.mean(1) for site, value in samples.items()},
                {site: value.std(1, correction=0) for site, value in samples.items()},
            )
        )
        gaussian, device = on_host(read, "posterior")
        named = {"sources": gaussian}
    elif isinstance(sources, Mapping | GaussianWeights):
        gaussian, device = on_host(
            _with_moments(sources, group) if isinstance(sources, Mapping) else sources, "sources"
        )
        shape = tuple(batch_shape_of(gaussian, group, "sources"))
        if len(shape) != 1:
            raise ValueError(f"sources has batch shape {shape}; it must be (number of members,), or a list of members")
        named = {"sources": gaussian}
    else:
        sources = arguments.listed("sources", sources, object, "members, or a batch")
        if not sources:
            raise ValueError("sources is an empty list; it must hold at least one set of weights, network or guide")
        names = [f"sources[{k}]" for k in range(len(sources))]
        read = {name: on_host(own, name) for name, own in zip(names, sources, strict=True)}
        named = {name: one for name, (one, _) in read.items()}
        device = read[names[0]][1]
        for name, one in named.items():
            if batch_shape_of(one, group, name):
                raise ValueError(f"{name} has batch dimensions; a list holds one set of weights in each place")
        gaussian, shape = _stacked(list(named.values())), (len(sources),)
    sites = compared_sites(named, group)
    batch_shape_of(gaussian, group, "sources")
    require_buffers(gaussian.loc, group.buffers, "sources")
    return Members(sources, gaussian, device, shape, sites)


# small steps --------------------------------------------------------------------------------------------------------


def _with_moments(weights: Mapping[str, Tensor], group: Group) -> Weights:
    """Without the sites that a group knows nothing of and that have no mean: counters, labels."""
    arguments.weights("sources", weights)
    return {s: value for s, value in weights.items() if value.is_floating_point() or s in group.site_shapes}


def _moved(own: Any, element: Element, gaussian: GaussianWeights) -> Any:
    """One member of a list, moved: weights for weights, a network for a network, and moments for all else."""
    weights = plain(own)
    if not isinstance(weights, Mapping):
        return moved_to(gaussian, element.device or torch.device("cpu"))
    return element(weights) if weights is own else with_weights(own, element(weights))


def _stacked(every: Sequence[GaussianWeights]) -> GaussianWeights:
    """One batch, of the sites that all have in one shape."""
    first = every[0].loc
    sites = [s for s in first if all(s in one.loc and one.loc[s].shape == first[s].shape for one in every)]
    return GaussianWeights(
        {site: torch.stack([one.loc[site].to(first[site]) for one in every]) for site in sites},
        {site: torch.stack([one.scale[site].to(first[site]) for one in every]) for site in sites},
        {site: support for site, support in every[0].supports.items() if site in sites},
    )
