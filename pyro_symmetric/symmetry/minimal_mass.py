r"""The minimum scaled representation: of all positive rescalings of a network, the one with the least squared weights.

For a multilayer perceptron with squared weights :math:`M_l` and log-scales :math:`u_l` of its hidden units it minimises

.. math:: \sum_l \sum_{ij} M_l[i, j] \exp(2 u_l[i] - 2 u_{l-1}[j]),

and likewise, with the exponents of a :class:`~pyro_symmetric.symmetry.rescaling.ScalingGroup`, for any network. The
problem is convex, and strictly so in the scales of all units that lie on a path of nonzero weights from what isn't
rescaled (inputs) to what isn't rescaled (outputs): then the minimum is unique, and every point of an orbit leads to it.

Source: Laurent, Aldea & Franchi 2024, arXiv 2310.08287, section 3.3 and appendix (minimum scaled network mass).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.balancing import Array, Balance, minimise
from pyro_symmetric.symmetry.factored import acted_shape
from pyro_symmetric.symmetry.rescaling import RescaledAxis, Scaling, ScalingGroup
from pyro_symmetric.symmetry.weights import Weights, require_finite, require_sites

CHUNK_ENTRIES = 2**27
TOLERANCE = 1e-12

ScaleFree = Literal["leave_out", "hold"]


class HasScalings(Protocol):
    """What :func:`minimal_mass` reads off a symmetry."""

    @property
    def scalings(self) -> ScalingGroup: ...


@dataclass(frozen=True)
class MinimalMass:
    """The minimum scaled representation of a batch of weights.

    :param mass: float64 ``batch_shape``, the minimum: the squared L2 norm of ``weights``, biases and whatever a pinned
        unit multiplies left out.
    :param log_scales: factor -> float64 ``batch_shape + (n,)``, the logarithm of what each unit was multiplied by; zero
        for pinned units.
    :param weights: the rescaled weights, all sites, in the dtype they came in.
    :param pinned: factor -> bool ``batch_shape + (n,)``, units whose best scale isn't finite, held where they were.
    :param imbalance: float64 ``batch_shape``: at a minimum the squared weights that enter a unit equal those that leave
        it; the largest difference that is left, relative to their sum.
    """

    mass: Tensor
    log_scales: dict[str, Tensor]
    weights: Weights
    pinned: dict[str, Tensor]
    imbalance: Tensor

    @property
    def pinned_factors(self) -> dict[str, int]:
        """Factors that hold pinned units, with the largest number of them in any sample."""
        counts = {name: int(value.sum(-1).max()) for name, value in self.pinned.items() if value.numel()}
        return {name: count for name, count in counts.items() if count}

    def __repr__(self) -> str:
        found = self.mass.tolist() if self.mass.numel() < 10 else tuple(self.mass.shape)
        worst = float(self.imbalance.max()) if self.imbalance.numel() else 0.0
        return f"MinimalMass(mass={found}, pinned={self.pinned_factors or None}, imbalance={worst:.1e})"


def minimal_mass(
    weights: Mapping[str, Tensor],
    symmetry: HasScalings | ScalingGroup,
    scale_free: ScaleFree = "leave_out",
    sites: Iterable[str] | None = None,
) -> MinimalMass:
    """Minimise the squared L2 norm of weights, biases left out, over all positive scalings; the function stays.

    *Pinned units.* A unit whose incoming or outgoing weights are all zero, and one whose output is free of scale
    (before batch normalisation), has no best scale: the mass falls for ever as it grows or shrinks. So does a unit that
    feeds only such units, or is fed by them. They are pinned, reported, and the weights that they multiply, which the
    infimum sends to zero, are left out of the mass, so that the answer is the same for every point of the orbit. With
    ``scale_free="hold"`` these weights count at the scale they come with: the minimum over the other scales, for
    networks with batch normalisation; it then depends on the scale of the pinned units.

    :param weights: site -> tensor ``batch_shape + site_shape``; each sample has a minimum of its own, found in float64.
    :param symmetry: the scalings, or a symmetry that has them.
    :param scale_free: what becomes of weights that a pinned unit multiplies: ``"leave_out"`` or ``"hold"``.
    :param sites: the sites whose squared norm is the mass; by default all weights, see
        :attr:`~pyro_symmetric.symmetry.rescaling.RescalingGroup.weight_sites`.
    :raises ValueError: if weights (running statistics that scales move, too) are missing, misshaped, NaN or infinite,
        or another network's; if ``sites`` are unknown.
    """
    arguments.one_of("scale_free", scale_free, get_args(ScaleFree))
    group = symmetry if isinstance(symmetry, ScalingGroup) else getattr(symmetry, "scalings", None)
    if not isinstance(group, ScalingGroup):
        raise TypeError(f"symmetry must be a ScalingGroup or have one as .scalings, found {type(symmetry).__name__}")
    require_finite(weights)
    shape = acted_shape(group, weights)
    counted = [
        site for site in (group.weight_sites if sites is None else arguments.listed("sites", sites, str, "sites"))
    ]
    unknown = [site for site in counted if site not in group.site_shapes]
    if unknown:
        raise ValueError(f"sites {unknown} are unknown; the known sites are {sorted(group.site_shapes)}")
    counted = counted if sites is not None else [site for site in counted if site in weights]
    require_sites(weights, counted)
    samples = math.prod(shape)
    flat = {site: weights[site].reshape(samples, *group.view_shapes[site]) for site in counted}
    units = sum(group.factors.values())
    entries = sum(math.prod(group.site_shapes[site]) for site in counted)
    size = max(1, CHUNK_ENTRIES // max(1, entries))
    parts = [
        _minimise_chunk({site: value[i : i + size] for site, value in flat.items()}, group, scale_free, units)
        for i in range(0, max(samples, 1), size)
    ]
    mass, u, pinned, imbalance = (torch.cat(part) for part in zip(*parts, strict=True))
    log_scales = _by_factor(u, group, shape)
    if bool((imbalance > 1e-8).any()):
        warnings.warn(
            f"minimal_mass stopped with a relative imbalance of {float(imbalance.max()):.1e}; the mass is close to its "
            "minimum, the scales of weakly connected units may be off",
            stacklevel=2,
        )
    scaled = Scaling(group, {name: value.exp() for name, value in log_scales.items()})(weights)
    return MinimalMass(
        mass.reshape(shape), log_scales, scaled, _by_factor(pinned, group, shape), imbalance.reshape(shape)
    )


def _minimise_chunk(
    weights: Mapping[str, Tensor], group: ScalingGroup, scale_free: str, units: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mass, log-scales, pinned units and imbalance of ``(samples, ...)`` weights."""
    first = next(iter(weights.values()), torch.zeros(1))
    arrays, constant = [], first.new_zeros(len(first), dtype=torch.float64)
    offsets = dict(zip(group.factors, _starts(group), strict=True))
    for site, value in weights.items():
        if not group.members(site):
            constant = constant + value.double().square().flatten(1).sum(-1)
        else:
            arrays.append(_array(value, site, group, offsets, units))
    if not arrays or not units:
        none = constant.new_zeros(len(first), units)
        return constant, none, torch.ones_like(none, dtype=torch.bool), torch.zeros_like(constant)
    balance = Balance(arrays, units)
    free = _finite_units(balance, scale_free)
    if scale_free == "leave_out":
        balance = balance.without(~free)
    blocks = [slice(start, start + n) for start, n in zip(_starts(group), group.factors.values(), strict=True)]
    u, imbalance = minimise(balance, free, blocks, TOLERANCE)
    return balance.value(u) + constant, u, ~free, imbalance


def _finite_units(balance: Balance, scale_free: str) -> Tensor:
    """Units whose best scale is finite: those between what isn't rescaled before and behind them."""
    nothing = torch.zeros(balance.samples, balance.num_units, dtype=torch.bool, device=balance.mass0.device)
    start = nothing
    if scale_free == "hold":
        marginals = balance.marginals(torch.ones_like(balance.lay_out(nothing.double())))
        total, difference = balance.collect(marginals, power=2), balance.collect(marginals)
        start = ~((total > difference.abs()) & (total > 0))
    return balance.reach(start) & balance.reach(start, outgoing=True) & ~start


def _array(value: Tensor, site: str, group: ScalingGroup, offsets: Mapping[str, int], units: int) -> Array:
    """The squared weights of a (viewed) site, summed over the axes that no factor rescales."""
    members = group.members(site)
    dims = sorted(members)
    rest = [dim + 1 for dim in range(value.dim() - 1) if dim not in members]
    mass = value.double().square()
    mass = mass.sum(rest) if rest else mass
    labels = [_labels(members[dim], group.view_shapes[site][dim], offsets, units, value.device) for dim in dims]
    return Array(mass, tuple(label for label, _ in labels), tuple(exponent for _, exponent in labels))


def _labels(
    members: list[tuple[str, RescaledAxis]], length: int, offsets: Mapping[str, int], units: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The units, and their exponents, at each position of an axis: ``(depth, length)`` each."""
    rows: list[tuple[Tensor, Tensor]] = []
    for name, axis in members:
        blocks, n = axis.index.shape
        positions = axis.index.reshape(-1).to(device)
        row = next((row for row in rows if bool((row[0][positions] == units).all())), None)
        if row is None:
            row = (torch.full((length,), units, device=device), torch.zeros(length, dtype=torch.float64, device=device))
            rows.append(row)
        row[0][positions] = offsets[name] + torch.arange(n, device=device).repeat(blocks)
        row[1][positions] = float(axis.exponent)
    return torch.stack([label for label, _ in rows]), torch.stack([exponent for _, exponent in rows])


def _starts(group: ScalingGroup) -> list[int]:
    sizes = list(group.factors.values())
    return [sum(sizes[:i]) for i in range(len(sizes))]


def _by_factor(value: Tensor, group: ScalingGroup, shape: torch.Size) -> dict[str, Tensor]:
    pieces = value.split(list(group.factors.values()), -1) if group.factors else ()
    return {name: piece.reshape(*shape, piece.shape[-1]) for name, piece in zip(group.factors, pieces, strict=True)}
