r"""Features of a reference and of a source, site by site, whose inner product is the score of an alignment.

A cost is one elementwise function that falls linearly, over all permutations and signs, with the inner product of the
reference's features and the moved source's:

========================  ==================================  ===========================  =============================
cost                      cost of one weight                  features of the reference    features of the source
========================  ==================================  ===========================  =============================
``"l2"``                  :math:`(m_0 - m_1)^2`               :math:`m_0`                  :math:`m_1`
``"wasserstein"``         and :math:`(s_0 - s_1)^2`           :math:`m_0, s_0`             :math:`m_1, s_1`
``"gaussian"``            :math:`-E \log N(w; m_0, s_0^2)`    :math:`m_0/s_0^2,            :math:`m_1, s_1^2 + m_1^2`
                                                              -1/2s_0^2`
activations               minus the product                   standardised                 standardised
========================  ==================================  ===========================  =============================

``"wasserstein"`` is the squared 2-Wasserstein distance of mean-field Gaussians (Rossi et al. 2023, arXiv 2310.10171),
``"l2"``, and it of plain networks, weight matching (Ainsworth et al. 2023, arXiv 2209.04836). ``"gaussian"`` is, up to
the source's entropy, the divergence from the reference: every weight counts by its precision, so that no site counts
for more because of its units of measurement; but the few weights known best decide.

Activations are correlated input by input (and pixel by pixel, token by token), for every set of units by itself (Li et
al. 2016, arXiv 1511.07543). They are what enters the layers that read them: channel ``j`` of a layer's input belongs to
the unit that lies on column ``j`` of its weight. So a layer's input is a site of its own, ``(columns, samples)``, on
which the group acts as on the weight's columns, nested units, heads and flattened pixels included. Units that no layer
reads whole (of the lower layers of an ``nn.LSTM``, say) are left to their weights.

Moments and features are tensors ``(channels, batch, *site_shape)``; a sign flips the first channel only. Units are
compared place by place: blocks of an axis along which they lie, all multiplied alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.alignment.gaussian import GaussianWeights, on_host
from pyro_symmetric.discovery.symmetry import with_weights
from pyro_symmetric.groups import Axis, Group, Units
from pyro_symmetric.groups.element import require_buffers
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Weights, batch_shape, require_finite

Moments = dict[str, Tensor]

# A weight that varies by less than this part of its size, such as the zeros of a triangle, says nothing of any label.
LEAST_SPREAD = 1e-7
# Layers, and the name of the weight whose columns read their first input.
LAYERS = (
    (nn.Linear, "weight"),
    (nn.modules.conv._ConvNd, "weight"),
    (nn.RNNBase, "weight_ih_l0"),
    (nn.RNNCellBase, "weight_ih"),
    (nn.MultiheadAttention, "in_proj_weight"),
)


@dataclass(frozen=True)
class Cost:
    """A cost of pairs of moments.

    :param distance: moments of the reference and features of the moved source -> costs, elementwise.
    :param of_reference: moments -> features; ``of_source``: likewise.
    :param centre: the mean of the features of many sources -> the moments of the reference that is best for them.
    :param deviations: whether deviations count, if there are any.
    :param squared: whether scales have a best value.
    """

    distance: Callable[[Tensor, Tensor], Tensor] = lambda reference, moved: (reference - moved).square()
    of_reference: Callable[[Tensor], Tensor] = lambda moments: moments
    of_source: Callable[[Tensor], Tensor] = lambda moments: moments
    centre: Callable[[Tensor], Tensor] = lambda features: features
    deviations: bool = True
    squared: bool = True

    def total(self, reference: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> Tensor:
        """The cost of each source over all sites, float64 ``(B,)``."""
        parts = [self.of_site(reference[site], value) for site, value in moved.items()]
        return torch.stack(parts).sum(0) if parts else torch.zeros(1, dtype=torch.float64, device="cpu")

    def of_site(self, reference: Tensor, moved: Tensor) -> Tensor:
        """The cost of one site, float64 ``(B,)``."""
        distance = self.distance(reference, moved)
        return distance.reshape(-1, moved.shape[1], moved[0, 0].numel()).sum((0, 2), dtype=torch.float64)


def _divergence(reference: Tensor, moved: Tensor) -> Tensor:
    loc, scale = reference
    variance = moved[0].square().neg_().add_(moved[1])  # in place: this is most of what many draws cost
    variance.add_((moved[0] - loc).square_()).mul_(0.5 / scale.square())
    return variance.add_(scale.log() + 0.5 * math.log(2 * math.pi))


def _fitted(features: Tensor) -> Tensor:
    loc, square = features
    variance = square - loc**2
    return torch.stack([loc, torch.where(variance > LEAST_SPREAD**2 * square, variance, 1.0).sqrt()])


COSTS = {
    "wasserstein": Cost(),
    "l2": Cost(deviations=False),
    "gaussian": Cost(
        _divergence,
        lambda moments: torch.stack([moments[0] / moments[1] ** 2, -0.5 / moments[1] ** 2]),
        lambda moments: torch.stack([moments[0], moments[0] ** 2 + moments[1:].square().sum(0)]),
        _fitted,
        squared=False,
    ),
}
CORRELATION = Cost(lambda reference, moved: -reference * moved)


def require_fit(cost: str, group: Group) -> None:
    """:raises ValueError: if a cost has no least value over scales."""
    if not COSTS[cost].squared and group.names("scale"):
        raise ValueError(
            f"cost is {cost!r}, but the group scales {group.names('scale')[0]!r}, and scales make any density as high "
            "as one likes: use cost='wasserstein', or the symmetry's .finite part"
        )


# reading --------------------------------------------------------------------------------------------------------------


def batch_shape_of(weights: GaussianWeights, group: Group, name: str) -> torch.Size:
    """The leading dimensions of all sites.

    :raises ValueError: naming the site that doesn't fit, or if the batch is empty.
    """
    group.require_own(weights.loc, name)
    shapes = {site: weights.shape_of(site, group.site_shapes[site]) for site in _comparable(group)}
    if shapes.keys().isdisjoint(weights.loc):
        return torch.Size()
    shape = batch_shape(weights.loc, shapes, name)
    if 0 in shape:
        raise ValueError(f"{name} has batch shape {tuple(shape)}, so it holds no weights at all")
    return shape


def compared_sites(given: Mapping[str, GaussianWeights], group: Group) -> list[str]:
    """The sites that are compared, which all hold: those that the group knows, without buffers.

    :param given: what messages call each -> its moments.
    :raises ValueError: naming the site that some lack, or whose values don't suit the group or one another.
    """
    required = set(group.required_sites)
    sites = [s for s in _comparable(group) if s in required or any(s in own.loc for own in given.values())]
    for site in sites:
        for name, weights in given.items():
            if site not in weights.loc:
                raise ValueError(f"{name} lacks the site {site!r}, which alignment needs; it has {sorted(weights.loc)}")
            require_finite({site: weights.loc[site]}, name)
            require_finite({site: weights.scale[site]}, f"scale of {name}")
            members = [(other, axis) for by_dim in group.members(site).values() for other, axis in by_dim]
            rescaled = any(axis.exponent for _, axis in members)
            bijection = weights.bijection(site)
            if bijection is not None and members and (rescaled or bijection.domain.event_dim):
                raise ValueError(
                    f"the group moves site {site!r} of {name}, whose support {weights.supports[site]} isn't mapped to "
                    "unconstrained values as the group moves it: linearly if it is rescaled, else element by element"
                )
        if len(kinds := {site in weights.supports: name for name, weights in given.items()}) > 1:
            raise ValueError(
                f"{kinds[True]}[{site!r}] is unconstrained, as a guide has it, but {kinds[False]}[{site!r}] isn't: "
                "give draws, or map it by biject_to(support).inv and pass GaussianWeights(loc, scale, supports)"
            )
    return sites


def members_of(sources: Any, group: Group) -> tuple[dict[str, GaussianWeights], torch.device, tuple[int, ...]]:
    """The moments of a list, a batch or a posterior, by what messages call them; their device, and the batch shape of
    the elements that act on them.

    :raises ValueError: if there are none, or naming the member and the site that doesn't fit.
    """
    if not isinstance(sources, Posterior | Mapping | GaussianWeights):
        members = arguments.listed("sources", sources, object, "members, or a batch")
        if not members:
            raise ValueError("sources is an empty list; it must hold at least one set of weights, network or guide")
        found = {f"sources[{k}]": on_host(own, f"sources[{k}]") for k, own in enumerate(members)}
        for name, (one, _) in found.items():
            if batch_shape_of(one, group, name):
                raise ValueError(f"{name} has batch dimensions; a list holds one set of weights in each place")
            require_buffers(one.loc, group.buffers, name)
        return {name: one for name, (one, _) in found.items()}, found["sources[0]"][1], (len(found),)
    shape, read = None, sources
    if isinstance(sources, Posterior):
        shape, read = (sources.num_chains, sources.num_samples), sources.get_samples()
    if isinstance(read, Mapping):  # without what a group knows nothing of and has no mean: counters, labels
        read = {s: v for s, v in read.items() if v.is_floating_point() or s in group.site_shapes}
    gaussian, device = on_host(read, "sources")
    batch = tuple(batch_shape_of(gaussian, group, "sources"))
    if len(batch) != 1:
        raise ValueError(f"sources has batch shape {batch}; it must be (number of members,), or a list of members")
    require_buffers(gaussian.loc, group.buffers, "sources")
    return {"sources": gaussian}, device, shape or batch


def moments_of(given: Sequence[GaussianWeights], sites: Sequence[str], group: Group, cost: Cost) -> list[Moments]:
    """Moments of each, site -> ``(channels, B, *site_shape)``.

    Numbers have the widest dtype of all, at least float32, in which inner products are meaningful.
    """
    # Of plain weights no deviations need to be carried along.
    varies = cost.deviations and any(bool(weights.scale[site].any()) for weights in given for site in sites)
    result: list[Moments] = [{} for _ in given]
    for site in sites:
        dtype = torch.float32
        for weights in given:
            dtype = torch.promote_types(dtype, weights.loc[site].dtype)
        for moments, weights in zip(result, given, strict=True):
            shape = weights.shape_of(site, group.site_shapes[site])
            channels = (weights.loc[site], weights.scale[site])[: 1 + varies]
            moments[site] = torch.stack([value.to(dtype).reshape(-1, *shape) for value in channels])
    return result


def _comparable(group: Group) -> list[str]:
    buffers = set(group.buffers)
    return [site for site in group.site_shapes if site not in buffers]


# what units do --------------------------------------------------------------------------------------------------------


class Shown(NamedTuple):
    """Features of what units do.

    :ivar group: the units whose activations show, and the signs that these tell, along the layers' inputs.
    :ivar left: the permutations and signs of the weights' group that don't show.
    :ivar reference: weight that reads them -> features ``(1, 1, columns, samples)``; ``source``: ``(1, B, ...)``.
    """

    group: Group
    left: Group
    reference: Weights
    source: Weights


def shown_by(activations: Sequence[Any], sources: Weights, reference: Weights, group: Group) -> Shown:
    """Standardised activations of all units that show.

    :param activations: the network, in whose place weights are put, in eval mode, and what its ``forward`` takes.
    :param sources: weights with one leading batch dimension.
    :raises ValueError: if no units show.
    """
    net, *inputs = activations
    arguments.instance("activations[0]", net, nn.Module, "a torch.nn.Module")
    first = _entering(net, inputs, reference, group)
    count = len(next(iter(sources.values())))
    every = [_entering(net, inputs, {s: value[k] for s, value in sources.items()}, group) for k in range(count)]
    shown = _on_inputs(group.finite, {site: value.shape for site, value in first.items()})
    if not shown.units:
        raise ValueError(f"no layer of the network reads any of the units {list(group.names('permute'))} whole")
    left = group.finite.without(shown.names("permute"), "permute")
    left = left.without([name for name in shown.names("flip") if name in left.names("flip")], "flip")
    blocks = {site: min(len(axis.index) for _, axis in shown.members(site)[0]) for site in shown.sites}
    known = {site: first[site][None, None] / number for site, number in blocks.items()}
    return Shown(shown, left, known, {site: torch.stack([own[site] for own in every])[None] for site in blocks})


def _entering(net: nn.Module, inputs: Sequence[Any], weights: Mapping[str, Tensor], group: Group) -> Weights:
    """Weight of a layer -> its input, ``(columns, samples)``: of mean zero and norm one, or zero if constant."""
    own = dict(net.named_parameters()) | dict(net.named_buffers())
    net = with_weights(net, {name: value for name, value in weights.items() if name in own}).eval()
    found: dict[str, list[Tensor]] = {}
    for name, module in net.named_modules():
        site = next((f"{name}.{weight}".lstrip(".") for kind, weight in LAYERS if isinstance(module, kind)), "")
        if site in group.site_shapes and not getattr(module, "transposed", False):
            axis = 1 if isinstance(module, nn.modules.conv._ConvNd) else -1
            calls = found.setdefault(site, [])

            def keep(module: nn.Module, given: Any, calls: list[Tensor] = calls, axis: int = axis) -> None:
                calls += [value.detach().movedim(axis, 0).flatten(1).double() for value in given[:1]]

            module.register_forward_pre_hook(keep)
    net(*inputs)
    result = {}
    for site, calls in found.items():
        if calls and len(calls[0]) == group.site_shapes[site][1]:
            value = torch.cat(calls, 1)
            value = value - value.mean(1, keepdim=True)
            norm = value.norm(dim=1, keepdim=True)
            result[site] = torch.where(norm > 0, value / norm.clamp_min(1e-300), 0.0).cpu()
    return result


def _on_inputs(group: Group, shapes: Mapping[str, torch.Size]) -> Group:
    """The units that lie along columns of these weights, along what enters them; signs if these columns take part."""
    units, held = [], set()
    for one in reversed(group.units.values()):
        axes = tuple(replace(a, dim=0) for a in one.axes if a.site in shapes and (a.dim, a.span) == (1, 1))
        moves = one.moves & ({"permute", "flip"} if any(axis.exponent % 2 for axis in axes) else {"permute"})
        if (axes and moves) or one.name in held:
            held.add(one.parent)
            units.append(replace(one, axes=axes, moves=moves if axes else frozenset()))
    found = {axis.site for one in units for axis in one.axes}
    return Group(reversed(units), {site: shape for site, shape in shapes.items() if site in found})


# where units lie ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """Some blocks of an axis of a set of units: the same places in every unit, all multiplied alike.

    :param axis: in the group's view.
    :param shape: copies and size of the units.
    :param flips: the units, these or those of size one inside them, whose signs enter.
    :param others: the roots that have a part in these entries, but for the units along this axis.
    :param size: the number of entries.
    """

    axis: Axis
    shape: tuple[int, int]
    flips: frozenset[str]
    others: frozenset[str]
    size: int


@lru_cache(maxsize=4096)
def family_of(group: Group, root: str) -> Group:
    """The group of some units and all that lies inside them, alone."""
    return group.without([name for name in group.units if name not in group.family(root)])


@lru_cache(maxsize=4096)
def places_of(group: Group, root: str, sites: tuple[str, ...]) -> tuple[Place, ...]:
    """The places of the units of a root, at some sites."""
    found, family, units = [], group.family(root), group[root]
    signed = [name for name in (family if is_simple(group, root) else (root,)) if "flip" in group[name].moves]
    for axis in group.axes(root):
        if axis.site not in sites:
            continue
        others = {
            [name, *group.ancestors(name)][-1]
            for dim, members in group.members(axis.site).items()
            for name, other in members
            if dim != axis.dim or (name not in family and bool(torch.isin(axis.index, other.index).any()))
        }
        alike: dict[frozenset[str], list[int]] = {}
        for block, row in enumerate(axis.index):
            entering = [
                name
                for name in signed
                for own in group.axes(name)
                if (own.site, own.dim) == (axis.site, axis.dim) and own.exponent % 2
                if bool((own.index == row).all(-1).any())
            ]
            alike.setdefault(frozenset(entering), []).append(block)
        shape = group.view_shapes[axis.site]
        for flips, blocks in alike.items():
            part = replace(axis, index=axis.index[blocks])
            size = part.index.numel() * math.prod(shape) // shape[axis.dim]
            found.append(Place(part, (units.copies, units.size), flips, frozenset(others), size))
    return tuple(found)


@lru_cache(maxsize=4096)
def is_simple(group: Group, root: str) -> bool:
    """True if nothing lies inside these units but sets of size one, which have signs of their own."""
    return all(group[name].size == 1 and group[name].parent == root for name in group.family(root)[1:])


@lru_cache(maxsize=256)
def inside_of(group: Group, root: str, sites: tuple[str, ...]) -> tuple[Group, list[tuple[Place, str]]]:
    """The group of what lies inside one unit, and its sites: for each axis of the unit, the positions that it holds."""
    outer, named, shapes = group[root], [], {}
    axes: dict[str, list[Axis]] = {name: [] for name in group.family(root)}
    for number, place in enumerate(places_of(group, root, sites)):
        axis, site = place.axis, f"{number}: {place.axis.site}"
        named.append((place, site))
        shape = group.view_shapes[axis.site]
        shapes[site] = torch.Size((len(axis.index), math.prod(shape) // shape[axis.dim]))
        block = torch.full((shape[axis.dim],), -1, device="cpu")
        block[axis.index[:, 0]] = torch.arange(len(axis.index), device="cpu")
        for name in axes:
            for own in group.axes(name):
                if (own.site, own.dim) == (axis.site, axis.dim):
                    local = block[own.index[:, : group[name].count // outer.count]]
                    if bool((local := local[(local >= 0).all(-1)]).numel()):
                        axes[name].append(Axis(site, 0, local, own.exponent))
    units = []
    for name, own_axes in axes.items():
        one = group[name]
        if name == root:
            units += [Units(name, 1, tuple(own_axes), moves=frozenset({"flip"}))] if "flip" in one.moves else []
        else:
            parent = None if one.parent == root else one.parent
            copies = one.count // outer.count // one.size
            units.append(Units(name, one.size, tuple(own_axes), parent, copies, one.moves))
    return Group(units, shapes), named
