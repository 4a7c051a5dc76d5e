"""The members that are brought into one frame, read from whatever they came in, and put back into it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.alignment.gaussian import GaussianWeights, gaussian_of, plain, require_draws
from pyro_symmetric.alignment.moments import batch_shape_of, compared
from pyro_symmetric.groups.element import Element, require_buffers
from pyro_symmetric.groups.group import Group
from pyro_symmetric.samples import Posterior
from pyro_symmetric.weights import Weights, require_finite


@dataclass(frozen=True, eq=False)
class Members:
    """Members as one batch.

    :param given: what they came in.
    :param gaussian: their moments, batch shape ``(S,)``.
    :param element_shape: batch shape of the elements that act on what was given.
    """

    given: Any
    gaussian: GaussianWeights
    element_shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many."""
        return math.prod(self.element_shape)

    @property
    def are_draws(self) -> bool:
        """Whether they are plain draws of one posterior, or look like that: one batch, without deviations."""
        if not isinstance(self.given, Posterior | Mapping):
            return False
        return not any(bool(value.any()) for value in self.gaussian.scale.values())

    def first(self) -> GaussianWeights:
        """The moments of the first member."""
        own = self.gaussian
        return GaussianWeights(
            {site: value[0] for site, value in own.loc.items()},
            {site: value[0] for site, value in own.scale.items()},
            own.supports,
        )

    def moved(self, element: Element, gaussian: GaussianWeights) -> Any:
        """What was given, moved.

        :param gaussian: what :meth:`moved_gaussian` returns.
        """
        if isinstance(self.given, Posterior):
            return self.given.map(element)
        if isinstance(self.given, Mapping):
            return element(self.given)
        if isinstance(self.given, GaussianWeights):
            return gaussian
        return [
            element.select(k)(source)
            if isinstance(source, Mapping)
            else GaussianWeights(_row(gaussian.loc, k), _row(gaussian.scale, k), gaussian.supports)
            for k, source in enumerate(self.given)
        ]

    def moved_gaussian(self, element: Element) -> GaussianWeights:
        """The moments of all sites, moved, those that weren't compared (buffers, what no group knows) with them."""

        # What a guide maps to values of another shape (a simplex) no element moves.
        bijections = {site: self.gaussian.bijection(site) for site in self.gaussian.supports}
        held = {site for site, b in bijections.items() if b is not None and b.domain.event_dim}

        def act(weights: Mapping[str, Tensor]) -> Weights:
            shaped = {s: v.reshape(*self.element_shape, *v.shape[1:]) for s, v in weights.items()}
            return shaped | element({site: value for site, value in shaped.items() if site not in held})

        loc, scale = act(self.gaussian.loc), self.gaussian.scale
        if not any(bool(value.any()) for value in scale.values()):
            return GaussianWeights(loc, {s: torch.zeros_like(v) for s, v in loc.items()}, self.gaussian.supports)
        # Elements are affine, weight by weight: deviations go with what is linear, without its sign.
        moved, shift = act(scale), act({site: torch.zeros_like(value) for site, value in scale.items()})
        return GaussianWeights(loc, {s: (v - shift[s]).abs() for s, v in moved.items()}, self.gaussian.supports)

    def barycentre(self, gaussian: GaussianWeights) -> GaussianWeights:
        """The mean of the means, and of the deviations, of what :meth:`moved_gaussian` returns."""
        dims = tuple(range(len(self.element_shape)))

        def mean(value: Tensor) -> Tensor:
            return value.to(torch.promote_types(value.dtype, torch.float32)).mean(dims)

        return GaussianWeights(
            {site: mean(value) for site, value in gaussian.loc.items()},
            {site: mean(value) for site, value in gaussian.scale.items()},
            gaussian.supports,
        )


def read_members(sources: Any, group: Group, each: str) -> Members:
    """Read a list, a batch, or a posterior.

    :raises ValueError: if there are none, or naming the member and the site that doesn't fit.
    """
    members = _read(sources, group, each)
    batch_shape_of(members.gaussian, group, "sources")
    require_buffers(members.gaussian.loc, group.buffers, "sources")
    return members


# small steps --------------------------------------------------------------------------------------------------------


def _read(sources: Any, group: Group, each: str) -> Members:
    if each not in ("draw", "chain"):
        raise ValueError(f"each is {each!r}; it must be 'draw' or 'chain'")
    if isinstance(sources, Posterior):
        chains, draws = sources.num_chains, sources.num_samples
        require_draws(sources, "posterior")
        require_finite(sources.samples, "posterior")
        if each == "chain":
            return Members(sources, _moments_of_chains(_with_moments(sources.samples, group)), (chains, 1))
        flat = {site: value.flatten(0, 1) for site, value in _with_moments(sources.samples, group).items()}
        return Members(sources, gaussian_of(flat, "posterior"), (chains, draws))
    if isinstance(sources, Mapping | GaussianWeights):
        own = _with_moments(sources, group) if isinstance(sources, Mapping) else sources
        gaussian = gaussian_of(own, "sources")
        shape = batch_shape_of(gaussian, group, "sources")
        if len(shape) != 1:
            raise ValueError(
                f"sources has batch shape {tuple(shape)}; it must be (number of members,), or a list of members"
            )
        return Members(sources, gaussian, tuple(shape))
    if not isinstance(sources, Sequence) or isinstance(sources, str):
        raise TypeError(f"sources is a {type(sources).__name__}; it must be a list, a batch of weights, or a Posterior")
    if not sources:
        raise ValueError("sources is an empty list; it must hold at least one set of weights or guide")
    sources = [plain(source) for source in sources]
    every = [gaussian_of(source, f"sources[{k}]") for k, source in enumerate(sources)]
    _check_alike(every, group)
    first = every[0].loc
    sites = [s for s in first if all(s in one.loc and one.loc[s].shape == first[s].shape for one in every)]
    return Members(
        sources,
        GaussianWeights(
            {site: torch.stack([one.loc[site].to(first[site]) for one in every]) for site in sites},
            {site: torch.stack([one.scale[site].to(first[site]) for one in every]) for site in sites},
            {site: support for site, support in every[0].supports.items() if site in sites},
        ),
        (len(every),),
    )


def _with_moments(weights: Mapping[str, Tensor], group: Group) -> Weights:
    """Without the sites that a group knows nothing of and that have no mean: counters, labels."""
    arguments.weights("sources", weights)
    return {s: value for s, value in weights.items() if value.is_floating_point() or s in group.site_shapes}


def _moments_of_chains(samples: Mapping[str, Tensor]) -> GaussianWeights:
    return GaussianWeights(
        {site: value.mean(1) for site, value in samples.items()},
        {site: value.std(1, correction=0) for site, value in samples.items()},
    )


def _check_alike(every: Sequence[GaussianWeights], group: Group) -> None:
    for k, one in enumerate(every):
        name = f"sources[{k}]"
        for site in compared(group):
            if (site in one.loc) != (site in every[0].loc) or (site in group.required_sites and site not in one.loc):
                lacks, has = (name, "sources[0]") if site in every[0].loc else ("sources[0]", name)
                if site not in one.loc and site not in every[0].loc:
                    raise ValueError(f"{name} lacks the site {site!r}, which alignment needs; it has {sorted(one.loc)}")
                raise ValueError(
                    f"{lacks} lacks the site {site!r}, which {has} has; are these different architectures?"
                )
            if site in one.loc and (site in one.supports) != (site in every[0].supports):
                raise ValueError(f"{name} and sources[0] differ in whether site {site!r} is unconstrained")
        if batch_shape_of(one, group, name):
            raise ValueError(f"{name} has batch dimensions; a list holds one set of weights in each place")
        require_finite(one.loc, name)


def _row(weights: Weights, k: int) -> Weights:
    return {site: value[k] for site, value in weights.items()}
