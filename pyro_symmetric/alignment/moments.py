"""What alignment is given as moments site by site, checked against the group."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pyro_symmetric.alignment.gaussian import GaussianWeights
from pyro_symmetric.alignment.scores.weights import Moments, WeightScores
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.weights import require_finite, require_same_network

# How many numbers the sources that are matched together may hold, with their scores.
CHUNK_ENTRIES = 2**26


def batch_shape_of(weights: GaussianWeights, group: Group, name: str) -> torch.Size:
    """The leading dimensions of all sites.

    :raises ValueError: naming the site that doesn't fit.
    """
    require_same_network(weights.loc, group.site_shapes, name)
    found: tuple[torch.Size, str] | None = None
    for site in compared(group):
        if site not in weights.loc:
            continue
        loc, shape = weights.loc[site], _own_shape(weights, site, group)
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


def compared(group: Group) -> list[str]:
    """The sites that may be compared: all that the group knows, without buffers."""
    buffers = set(group.buffers)
    return [site for site in group.site_shapes if site not in buffers]


def moments_of(
    source: GaussianWeights, reference: GaussianWeights, group: Group, kind: type[WeightScores]
) -> tuple[Moments, Moments, torch.Size]:
    """The moments of both, checked: ``(reference, source, batch_shape)``.

    The reference's are ``(channels, 1, *site_shape)``, the source's ``(channels, B, *site_shape)``.
    """
    sites = _compared_sites(source, reference, group)
    shape = batch_shape_of(source, group, "source")
    if batch_shape_of(reference, group, "reference"):
        batched = next(iter(sites))
        raise ValueError(
            f"reference[{batched!r}] has shape {tuple(reference.loc[batched].shape)}, but the group expects "
            f"{tuple(_own_shape(reference, batched, group))}: one set of weights at a time; align_many brings a batch "
            "into one frame"
        )
    for site in sites:
        _check_site(site, source, reference, group)
    # Of plain weights no deviations need to be carried along.
    varies = any(bool(weights.scale[site].any()) for weights in (source, reference) for site in sites)
    channels = 2 if kind.deviations and varies else 1
    results: tuple[Moments, Moments] = ({}, {})
    for site in sites:
        device, dtype = source.loc[site].device, _dtype(source.loc[site], reference.loc[site])
        for result, weights in zip(results, (reference, source), strict=True):
            own = _own_shape(weights, site, group)
            values = [value.to(device, dtype) for value in (weights.loc[site], weights.scale[site])[:channels]]
            result[site] = torch.stack([value.reshape(-1, *own) for value in values])
    return (*results, shape)


def shifted(group: Group, reference: Moments, source: Moments) -> tuple[Moments, dict[str, Tensor]]:
    """Add to the biases in front of a softmax the constants that bring means closest; they concern nothing else.

    :return: the moments, and name of the units that shift -> constants ``(B, *units.shape)``.
    """
    result, shifts = dict(source), {}
    for name in group.names("shift"):
        gaps = []
        for axis in group.axes(name):
            if axis.site in source:
                gap = group.view(axis.site, reference[axis.site][0] - source[axis.site][0])
                gaps.append(gap.movedim(1 + axis.dim, -1)[..., axis.index.to(gap.device)].flatten(1, -2))
        if gaps:
            shifts[name] = torch.cat(gaps, 1).mean(1).reshape(-1, *group[name].shape)
    if shifts:
        only = group.shifts
        element = Element(only, shifts={name: shifts[name] for name in shifts})
        for site in set(only.sites) & set(source):
            result[site] = torch.cat([element.on_site(site, source[site][0]).unsqueeze(0), source[site][1:]])
    return result, shifts


def chunks_of(group: Group, source: Mapping[str, Tensor]) -> list[Tensor]:
    """Numbers of the sources to match together, so that their weights and scores fit into memory."""
    batch = next((value.shape[1] for value in source.values()), 1)
    weights = sum(value[:, 0].numel() for value in source.values())
    scores = sum(u.count**2 * len(u.axes) for u in group.units.values() if "permute" in u.moves)
    return list(torch.arange(batch).split(max(1, CHUNK_ENTRIES // max(1, 3 * weights + 2 * scores))))


# small steps --------------------------------------------------------------------------------------------------------


def _own_shape(weights: GaussianWeights, site: str, group: Group) -> torch.Size:
    bijection = weights.bijection(site)
    shape = group.site_shapes[site]
    return shape if bijection is None else bijection.inverse_shape(shape)


def _compared_sites(source: GaussianWeights, reference: GaussianWeights, group: Group) -> list[str]:
    """The sites that count: those that the group knows, without buffers, held by both."""
    sites, required = [], set(group.required_sites)
    for site in compared(group):
        held = {"source": site in source.loc, "reference": site in reference.loc}
        if not (any(held.values()) or site in required):
            continue
        for name, holds in held.items():
            if not holds:
                found = sorted((source if name == "source" else reference).loc)
                raise ValueError(f"{name} lacks the site {site!r}, which alignment needs; it has {found}")
        sites.append(site)
    return sites


def _check_site(site: str, source: GaussianWeights, reference: GaussianWeights, group: Group) -> None:
    members = [(name, axis) for by_dim in group.members(site).values() for name, axis in by_dim]
    rescaled = any(axis.exponent or "shift" in group[name].moves for name, axis in members)
    for name, weights in (("source", source), ("reference", reference)):
        bijection = weights.bijection(site)
        if bijection is not None and (rescaled or (bijection.domain.event_dim and members)):
            how = "rescaled or shifted" if rescaled else "permuted"
            raise ValueError(
                f"the group moves site {site!r} of {name}, whose support {weights.supports[site]} isn't mapped to "
                f"unconstrained values {'linearly' if rescaled else 'element by element'}; its moments can't be {how}"
            )
        require_finite({site: weights.loc[site]}, name)
        require_finite({site: weights.scale[site]}, f"scale of {name}")
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
