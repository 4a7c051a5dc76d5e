r"""The minimum scaled representation: of all positive rescalings of a network, the one with the least squared weights.

For a multilayer perceptron with squared weights :math:`M_l` and log-scales :math:`u_l` of its hidden units it minimises

.. math:: \sum_l \sum_{ij} M_l[i, j] \exp(2 u_l[i] - 2 u_{l-1}[j]),

and likewise, with the exponents of the axes along which units lie, for any network. The
problem is convex, and strictly so in the scales of all units that lie on a path of nonzero weights from what isn't
rescaled (inputs) to what isn't rescaled (outputs): then the minimum is unique, and every point of an orbit leads to it.

Source: Laurent, Aldea & Franchi 2024, arXiv 2310.08287, section 3.3 and appendix (minimum scaled network mass).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.canonical.scales import Array, Balance, minimise, receding, without
from pyro_symmetric.discovery.symmetry import plain_weights, with_weights
from pyro_symmetric.groups.element import Element, acted_shape
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.groups.places import offsets, owners
from pyro_symmetric.placement import together
from pyro_symmetric.weights import require_finite, require_sites

CHUNK_ENTRIES = 2**26
TOLERANCE = 1e-12
# Up to so many entries the minimum is found on the CPU, wherever the weights are: steps depend on one another, and a
# processor goes through a quarter of a million numbers in the time in which a GPU begins thirty operations.
HOST_ENTRIES = 2**18

ScaleFree = Literal["leave_out", "hold"]


@dataclass(frozen=True)
class MinimalMass:
    """The minimum scaled representation of a batch of weights.

    :param mass: float64 ``batch_shape``, the minimum: the squared L2 norm of ``weights``, biases and whatever a pinned
        unit multiplies left out.
    :param log_scales: name -> float64 ``batch_shape + units.shape``, the logarithm of what each unit was multiplied by;
        zero for pinned units.
    :param weights: the rescaled weights, all sites, in the dtype they came in; a new network, if one was given.
    :param pinned: name -> bool ``batch_shape + units.shape``, units whose best scale isn't finite: they stay as they
        were.
    :param imbalance: float64 ``batch_shape``: at a minimum the squared weights that enter a unit equal those that leave
        it; the largest difference that is left, relative to their sum.
    """

    mass: Tensor
    log_scales: dict[str, Tensor]
    weights: Any
    pinned: dict[str, Tensor]
    imbalance: Tensor

    @property
    def pinned_factors(self) -> dict[str, int]:
        """Names of pinned units, with the largest number of them in any sample."""
        counts = {
            name: int(value.flatten(self.mass.dim()).sum(-1).max())
            for name, value in self.pinned.items()
            if value.numel()
        }
        return {name: count for name, count in counts.items() if count}

    def __repr__(self) -> str:
        found = self.mass.tolist() if self.mass.numel() < 10 else tuple(self.mass.shape)
        worst = float(self.imbalance.max()) if self.imbalance.numel() else 0.0
        return f"MinimalMass(mass={found}, pinned={self.pinned_factors or None}, imbalance={worst:.1e})"


@torch.no_grad()
def minimal_mass(
    weights: Mapping[str, Tensor] | nn.Module,
    symmetry: Any,
    scale_free: ScaleFree = "leave_out",
    sites: Iterable[str] | None = None,
) -> MinimalMass:
    """Minimise the squared L2 norm of weights, biases left out, over all positive scalings; the function stays.

    The weights of normalisations count, as in the paper. No gradients flow through it.

    *Pinned units.* A unit whose incoming or outgoing weights are all zero, and one whose output is free of scale
    (before batch normalisation), has no best scale: the mass falls for ever as it grows or shrinks. So does a unit that
    feeds only such units, or is fed by them, and so do units that can trade scale with a bias, which the mass doesn't
    count. They are pinned, reported, and the weights that they multiply, which the
    infimum sends to zero, are left out of the mass, so that the answer is the same for every point of the orbit. With
    ``scale_free="hold"`` these weights count at the scale they come with: the minimum over the other scales, for
    networks with batch normalisation; it then depends on the scale of the pinned units.

    >>> net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False))
    >>> symmetry = ps.find_symmetry(net, torch.randn(3, 1))
    >>> result = ps.minimal_mass({"0.weight": torch.tensor([[4.0]]), "2.weight": torch.tensor([[1.0]])}, symmetry)
    >>> round(float(result.mass), 3), {name: round(float(w), 3) for name, w in result.weights.items()}
    (8.0, {'0.weight': 2.0, '2.weight': 2.0})

    :param weights: site -> tensor ``batch_shape + site_shape``; each sample has a minimum of its own, found in float64.
        Or a network.
    :param symmetry: a symmetry or a group; its scalings count.
    :param scale_free: what becomes of weights that a pinned unit multiplies: ``"leave_out"`` or ``"hold"``.
    :param sites: the sites whose squared norm is the mass; by default all weights, see
        :attr:`~pyro_symmetric.groups.group.Group.weight_sites`.
    :raises ValueError: if weights (running statistics that scales move, too) are missing, misshaped, NaN or infinite,
        or another network's; if ``sites`` are unknown.
    """
    arguments.one_of("scale_free", scale_free, get_args(ScaleFree))
    whole = group_of(symmetry)
    group = whole.scalings
    if isinstance(weights, nn.Module):
        found = minimal_mass(plain_weights(weights, whole), whole, scale_free, sites)
        return replace(found, weights=with_weights(weights, found.weights))
    require_finite(weights)
    shape = acted_shape(group, weights)
    counted = _counted(weights, whole, sites)
    samples = math.prod(shape)
    flat = {site: weights[site].reshape(samples, *group.view_shapes[site]) for site in counted}
    entries = sum(math.prod(group.site_shapes[site]) for site in counted)
    device = next((value.device for value in flat.values()), None)
    if samples * entries <= HOST_ENTRIES:
        flat = dict(zip(flat, together(list(flat.values()), "cpu"), strict=True))
    size = max(1, CHUNK_ENTRIES // max(1, entries))
    parts = [
        minimise_chunk({site: value[i : i + size] for site, value in flat.items()}, group, scale_free)
        for i in range(0, max(samples, 1), size)
    ]
    mass, u, pinned, imbalance = (torch.cat(part) for part in zip(*parts, strict=True))
    if bool((imbalance > 1e-8).any()):
        warnings.warn(
            f"minimal_mass stopped with a relative imbalance of {float(imbalance.max()):.1e}; the mass is close to its "
            "minimum, the scales of weakly connected units may be off",
            stacklevel=2,
        )
    if device is not None:
        mass, u, pinned, imbalance = together([mass, u, pinned, imbalance], device)
    log_scales, held = (
        {name: value[:, at].reshape(*shape, *group[name].shape) for name, at in offsets(group, "scale").items()}
        for value in (u, pinned)
    )
    scaled = Element(group, log_scales=log_scales, batch_shape=shape)(weights)
    return MinimalMass(mass.reshape(shape), log_scales, scaled, held, imbalance.reshape(shape))


def _counted(weights: Mapping[str, Tensor], group: Group, sites: Iterable[str] | None) -> list[str]:
    """The sites whose squared norm is the mass."""
    if sites is None:
        return [site for site in group.weight_sites if site in weights]
    counted = arguments.listed("sites", sites, str, "sites")
    if unknown := [site for site in counted if site not in group.site_shapes]:
        raise ValueError(f"sites {unknown} are unknown; the known sites are {sorted(group.site_shapes)}")
    require_sites(weights, counted)
    return counted


def minimise_chunk(
    weights: Mapping[str, Tensor], group: Group, scale_free: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mass, log-scales, pinned units and imbalance of ``(samples, ...)`` weights."""
    first = next(iter(weights.values()), torch.zeros(1, device="cpu"))
    units = sum(group[name].count for name in group.names("scale"))
    arrays, constant = [], first.new_zeros(len(first), dtype=torch.float64)
    for site, value in weights.items():
        if group.members(site):
            arrays.append(_array(value, site, group))
        else:
            constant = constant + value.double().square().reshape(len(value), -1).sum(-1)
    if not arrays:
        none = constant.new_zeros(len(first), units)
        return constant, none, torch.ones_like(none, dtype=torch.bool), torch.zeros_like(constant)
    free = first.new_ones(len(first), units, dtype=torch.bool)
    if scale_free == "hold":
        free = _between(arrays, _one_sided(arrays, free))
    else:
        arrays, free = _attained(arrays, free, group, tuple(site for site in weights if group.members(site)))
    balance = Balance(arrays, units)
    u, imbalance = minimise(balance, free, TOLERANCE)
    return balance.value(u) + constant, u, ~free, imbalance


def _attained(arrays: list[Array], free: Tensor, group: Group, sites: tuple[str, ...]) -> tuple[list[Array], Tensor]:
    """The entries that don't vanish at the infimum, and the units whose best scale is finite.

    What a pinned unit multiplies is gone, so that units may be pinned that hung on it.

    :param sites: the sites that the arrays come from.
    """
    nowhere = torch.zeros_like(free)
    while True:
        left = arrays if bool(free.all()) else [without(array, ~free) for array in arrays]
        found = _between(left, nowhere) & free
        if torch.equal(found, free):
            alive = free.any(0).cpu()
            held = frozenset(name for name, at in offsets(group, "scale").items() if not bool(alive[at].any()))
            pinned = _receding(group, sites, held)
            if not pinned:
                return left, free
            for at in pinned:
                found[:, at] = False
        free = found


@lru_cache(maxsize=256)
def _receding(group: Group, sites: tuple[str, ...], held: frozenset[str]) -> tuple[slice, ...]:
    """The places of the sets of units that can shrink together for nothing; worked out once.

    :param held: names of sets that are pinned already.
    """
    with torch.inference_mode(False):  # the cache outlives the mode that it is filled in
        places = offsets(group, "scale")
        numbers = [len(places) + 1 if name in held else number for number, name in enumerate(places)]
        counts = [group[name].count for name in places]
        sets = torch.tensor([*numbers, len(places)], device="cpu").repeat_interleave(
            torch.tensor([*counts, 1], device="cpu")
        )
        axes = [[owners(group, site, dim, "scale") for dim in sorted(group.members(site))] for site in sites]
        found = receding(axes, sets, len(places))
    return tuple(list(places.values())[number] for number in found)


def _one_sided(arrays: list[Array], like: Tensor) -> Tensor:
    """Units that mass pulls to one side only, ``(samples, units)``."""
    balance = Balance(arrays, like.shape[1])
    masses = balance.masses_at(torch.ones_like(balance.lay_out(like.double())))
    return ~((balance.collect(masses, 1) > 0) & (balance.collect(masses, -1) > 0))


def _between(arrays: list[Array], start: Tensor) -> Tensor:
    """Units that lie between what isn't rescaled before and behind them."""
    balance = Balance(arrays, start.shape[1])
    return balance.reached(start) & balance.reached(start, outgoing=True) & ~start


def _array(value: Tensor, site: str, group: Group) -> Array:
    """The squared weights of a (viewed) site, summed over the axes that no unit rescales."""
    dims = sorted(group.members(site))
    rest = [dim + 1 for dim in range(value.dim() - 1) if dim not in dims]
    mass = value.double().square()
    mass = mass.sum(rest) if rest else mass
    units, exponents = zip(*(owners(group, site, dim, "scale", value.device) for dim in dims), strict=True)
    return Array(mass, units, exponents)
