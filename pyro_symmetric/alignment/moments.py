"""What alignment is given as moments site by site, in the group's view and checked against it."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.cost import Cost, Moments
from pyro_symmetric.alignment.gaussian import GaussianWeights
from pyro_symmetric.alignment.parts.problem import Problem
from pyro_symmetric.symmetry.weights import require_finite, require_same_network


def batch_shape_of(weights: GaussianWeights, problem: Problem, name: str) -> torch.Size:
    """The leading dimensions of all sites.

    :raises ValueError: naming the site that doesn't fit.
    """
    require_same_network(weights.loc, problem.site_shapes, name)
    found: tuple[torch.Size, str] | None = None
    for site in problem.sites:
        if site not in weights.loc:
            continue
        loc, shape = weights.loc[site], _own_shape(weights, site, problem)
        split = loc.dim() - len(shape)
        if split < 0 or loc.shape[split:] != shape:
            raise ValueError(f"{name}[{site!r}] has shape {tuple(loc.shape)}, but the group expects {tuple(shape)}")
        if found is None:
            found = loc.shape[:split], site
        elif loc.shape[:split] != found[0]:
            raise ValueError(
                f"{name}[{site!r}] has batch shape {tuple(loc.shape[:split])}, but {name}[{found[1]!r}] has "
                f"{tuple(found[0])}; every site needs the same"
            )
    if found is not None and 0 in found[0]:
        raise ValueError(f"{name} has batch shape {tuple(found[0])}, so it holds no weights at all")
    return torch.Size() if found is None else found[0]


def varies(source: GaussianWeights, reference: GaussianWeights, problem: Problem) -> bool:
    """Whether either has a deviation above zero at a site that counts."""
    sites = _compared_sites(source, reference, problem)
    return any(bool(weights.scale[site].any()) for weights in (source, reference) for site in sites)


def moments_of(
    source: GaussianWeights, reference: GaussianWeights, problem: Problem, cost: Cost
) -> tuple[Moments, Moments, torch.Size]:
    """The moments of both, viewed and checked: ``(reference, source, batch_shape)``.

    The reference's are ``(1, *view_shape, channels)``, the source's ``(B, *view_shape, channels)``.
    """
    sites = _compared_sites(source, reference, problem)
    shape = batch_shape_of(source, problem, "source")
    if batch_shape_of(reference, problem, "reference"):
        batched = next(site for site in sites)
        raise ValueError(
            f"reference[{batched!r}] has shape {tuple(reference.loc[batched].shape)}, but the group expects "
            f"{tuple(_own_shape(reference, batched, problem))}: one set of weights at a time; align_many "
            "brings a batch into one frame"
        )
    for site in sites:
        _check_site(site, source, reference, problem, cost)
    # Of plain weights no deviations need to be carried along.
    channels = 2 if cost.uses_scale and (cost.needs_scale or varies(source, reference, problem)) else 1
    results: tuple[Moments, Moments] = ({}, {})
    for site in sites:
        device, dtype = source.loc[site].device, _dtype(source.loc[site], reference.loc[site])
        for result, weights in zip(results, (reference, source), strict=True):
            own = _own_shape(weights, site, problem)
            values = [value.to(device, dtype) for value in (weights.loc[site], weights.scale[site])[:channels]]
            viewed = [problem.parts.permutations.view(site, value.reshape(-1, *own)) for value in values]
            result[site] = torch.stack(viewed, -1)
    return (*results, shape)


# small steps --------------------------------------------------------------------------------------------------------


def _own_shape(weights: GaussianWeights, site: str, problem: Problem) -> torch.Size:
    bijection = weights.bijection(site)
    shape = problem.site_shapes[site]
    return shape if bijection is None else bijection.inverse_shape(shape)


def _compared_sites(source: GaussianWeights, reference: GaussianWeights, problem: Problem) -> list[str]:
    """The sites that count: those that the group knows, without buffers, held by both."""
    sites = []
    for site in problem.sites:
        held = {"source": site in source.loc, "reference": site in reference.loc}
        if not (any(held.values()) or site in problem.required):
            continue
        for name, holds in held.items():
            if not holds:
                found = sorted((source if name == "source" else reference).loc)
                raise ValueError(f"{name} lacks the site {site!r}, which alignment needs; it has {found}")
        sites.append(site)
    return sites


def _check_site(site: str, source: GaussianWeights, reference: GaussianWeights, problem: Problem, cost: Cost) -> None:
    rescaled = any(group.members(site) for group in problem.parts.rescalings.values()) or site in problem.shifts.sites
    moved = rescaled or bool(problem.parts.permutations.members(site))
    for name, weights in (("source", source), ("reference", reference)):
        bijection = weights.bijection(site)
        if bijection is not None and (rescaled or (bijection.domain.event_dim and moved)):
            how = "rescaled or shifted" if rescaled else "permuted"
            raise ValueError(
                f"the group moves site {site!r} of {name}, whose support {weights.supports[site]} isn't mapped to "
                f"unconstrained values {'linearly' if rescaled else 'element by element'}; its moments can't be {how}"
            )
        require_finite({site: weights.loc[site]}, name)
        require_finite({site: weights.scale[site]}, f"scale of {name}")
        if cost.needs_scale and not bool((weights.scale[site] > 0).all()):
            raise ValueError(f"{name} has deviations of zero at site {site!r}; cost 'kl' needs them positive")
    if (site in source.supports) != (site in reference.supports):
        transformed, plain = ("source", "reference") if site in source.supports else ("reference", "source")
        support = (source if site in source.supports else reference).supports[site]
        raise ValueError(
            f"{transformed}[{site!r}] is unconstrained, as a guide has it, but {plain}[{site!r}] isn't: map it by "
            f"biject_to(support).inv and pass GaussianWeights(loc, scale, supports={{{site!r}: {support}}})"
        )


def _dtype(source: Tensor, reference: Tensor) -> torch.dtype:
    """The wider of both dtypes, and at least float32, in which inner products are meaningful."""
    return torch.promote_types(torch.promote_types(source.dtype, reference.dtype), torch.float32)
