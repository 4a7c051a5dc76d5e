"""Moments, site by site, checked against the group: the input of alignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.weights import Moments, WeightCost
from pyro_symmetric.alignment.gaussian import GaussianWeights
from pyro_symmetric.groups.element import Element
from pyro_symmetric.groups.group import Group
from pyro_symmetric.weights import batch_shape, require_finite

# How many numbers the sources that are matched together may hold, with their scores.
CHUNK_ENTRIES = 2**26


def batch_shape_of(weights: GaussianWeights, group: Group, name: str) -> torch.Size:
    """The leading dimensions of all sites.

    :raises ValueError: naming the site that doesn't fit, or if the batch is empty.
    """
    group.require_own(weights.loc, name)
    shapes = {site: weights.shape_of(site, group.site_shapes[site]) for site in comparable(group)}
    if shapes.keys().isdisjoint(weights.loc):
        return torch.Size()
    shape = batch_shape(weights.loc, shapes, name)
    if 0 in shape:
        raise ValueError(f"{name} has batch shape {tuple(shape)}, so it holds no weights at all")
    return shape


def comparable(group: Group) -> list[str]:
    """The sites that may be compared: all that the group knows, without buffers."""
    buffers = set(group.buffers)
    return [site for site in group.site_shapes if site not in buffers]


def compared_sites(given: Mapping[str, GaussianWeights], group: Group) -> list[str]:
    """The sites that are compared, which all hold.

    :param given: what messages call each -> its moments.
    :raises ValueError: naming the site that some lack, or whose values don't suit the group or one another.
    """
    required = set(group.required_sites)
    sites = [s for s in comparable(group) if s in required or any(s in own.loc for own in given.values())]
    for site in sites:
        for name, weights in given.items():
            if site not in weights.loc:
                raise ValueError(f"{name} lacks the site {site!r}, which alignment needs; it has {sorted(weights.loc)}")
            _check_site(site, weights, group, name)
        unconstrained = {site in weights.supports: name for name, weights in given.items()}
        if len(unconstrained) > 1:
            support = given[unconstrained[True]].supports[site]
            raise ValueError(
                f"{unconstrained[True]}[{site!r}] is unconstrained, as a guide has it, but {unconstrained[False]}"
                f"[{site!r}] isn't: map it by biject_to(support).inv and pass GaussianWeights(loc, scale, "
                f"supports={{{site!r}: {support}}})"
            )
    return sites


def moments_of(
    given: Sequence[GaussianWeights], sites: Sequence[str], group: Group, kind: type[WeightCost]
) -> list[Moments]:
    """Moments of each, site -> ``(channels, B, *site_shape)``, on the device of the last.

    Numbers have the widest dtype of all, at least float32, in which inner products are meaningful.
    """
    # Of plain weights no deviations need to be carried along.
    varies = kind.deviations and any(bool(weights.scale[site].any()) for weights in given for site in sites)
    result: list[Moments] = [{} for _ in given]
    for site in sites:
        device, dtype = given[-1].loc[site].device, torch.float32
        for weights in given:
            dtype = torch.promote_types(dtype, weights.loc[site].dtype)
        for moments, weights in zip(result, given, strict=True):
            shape = weights.shape_of(site, group.site_shapes[site])
            channels = (weights.loc[site], weights.scale[site])[: 1 + varies]
            moments[site] = torch.stack([value.to(device, dtype).reshape(-1, *shape) for value in channels])
    return result


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
        element = Element(group.shifts, shifts=shifts)
        for site in set(group.shifts.sites) & set(source):
            result[site] = torch.cat([element.on_site(site, source[site][0]).unsqueeze(0), source[site][1:]])
    return result, shifts


def chunks_of(group: Group, source: Mapping[str, Tensor]) -> list[Tensor]:
    """Numbers of the sources to match together, so that their weights and scores fit into memory."""
    batch = next((value.shape[1] for value in source.values()), 1)
    weights = sum(value[:, 0].numel() for value in source.values())
    scores = sum(u.count**2 * len(u.axes) for u in group.units.values() if "permute" in u.moves)
    return list(torch.arange(batch, device="cpu").split(max(1, CHUNK_ENTRIES // max(1, 3 * weights + 2 * scores))))


# small steps --------------------------------------------------------------------------------------------------------


def _check_site(site: str, weights: GaussianWeights, group: Group, name: str) -> None:
    members = [(other, axis) for by_dim in group.members(site).values() for other, axis in by_dim]
    rescaled = any(axis.exponent or "shift" in group[other].moves for other, axis in members)
    bijection = weights.bijection(site)
    if bijection is not None and (rescaled or (bijection.domain.event_dim and members)):
        how = "rescaled or shifted" if rescaled else "permuted"
        raise ValueError(
            f"the group moves site {site!r} of {name}, whose support {weights.supports[site]} isn't mapped to "
            f"unconstrained values {'linearly' if rescaled else 'element by element'}; its moments can't be {how}"
        )
    require_finite({site: weights.loc[site]}, name)
    require_finite({site: weights.scale[site]}, f"scale of {name}")
