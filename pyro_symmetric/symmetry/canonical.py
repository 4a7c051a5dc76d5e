r"""Canonical forms: one representative per orbit, so that equal functions get equal weights.

What is removed, in this order, each step leaving the function as it is:

1. *scalings*: every unit's incoming weights get norm (or standard deviation) one, or the network its minimal mass;
2. *signs*: every odd unit's largest incoming weight, by magnitude, becomes positive;
3. *permutations*: units are sorted by a key that is read off their weights;
4. *shifts*: the biases in front of a softmax get mean zero.

Two sets of weights of one orbit get the same canonical form, up to rounding: what a step reads is either unchanged by
everything that later steps remove, or was put in canonical form before (units nearer the input come first).

Source: Laurent, Aldea & Franchi 2024, arXiv 2310.08287, section 3 and appendix (removal of symmetries).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.symmetry.factored import along_axis
from pyro_symmetric.symmetry.finite import FiniteGroup
from pyro_symmetric.symmetry.minimal_mass import minimal_mass
from pyro_symmetric.symmetry.overlap import warn_of_overlap
from pyro_symmetric.symmetry.permutation import Axis, Permutation, PermutationGroup
from pyro_symmetric.symmetry.rescaling import Scaling, ScalingGroup, ShiftGroup, Sign, SignGroup
from pyro_symmetric.symmetry.unit_measures import largest_sign, norm, removing_element, spread
from pyro_symmetric.symmetry.weights import Weights, require_finite

# Keys closer than this many roundings tie: after unit norm, units with one incoming weight all have 1 or -1 there.
TIE = 16

Reduction = Callable[[Tensor, tuple[int, ...]], Tensor]
PermutationKey = Literal["first", "max", "norm"]
ScalingRule = Literal["unit_norm", "unit_std", "minimal_mass"]


class Symmetry(Protocol):
    """What :func:`canonicalize` reads off a symmetry; ``WeightSymmetry`` has it all."""

    @property
    def permutations(self) -> PermutationGroup: ...
    @property
    def scalings(self) -> ScalingGroup: ...
    @property
    def signs(self) -> SignGroup: ...
    @property
    def shifts(self) -> ShiftGroup: ...


def canonicalize(
    weights: Mapping[str, Tensor],
    symmetry: Symmetry | PermutationGroup | SignGroup | FiniteGroup,
    permutations: PermutationKey | None = "max",
    scalings: ScalingRule | None = "unit_norm",
    signs: bool = True,
    shifts: bool = True,
) -> Weights:
    """One representative of the orbit of each set of weights; the function that they compute stays the same.

    *What it is for.* Comparing orbits: two sets of weights compute the same function if they have the same canonical
    form, and tests and distances between posteriors may be taken between forms. It is not for means, deviations and
    R-hat of many draws: where two units' keys overlap, a label stands for one of them in some draws and for the other
    in others, and their average for neither. Of 100 draws or more this is warned of; bring the draws into one frame
    by :func:`~pyro_symmetric.alignment.align_many`, ``posterior.align`` or ``posterior.summary(symmetry=...)`` instead.

    *Incoming* weights of a unit are the matrix entries of its row, biases left out (for a permutation: axis 0 of sites
    with two axes or more). Where weights are shared in circles (recurrent nets, residual streams) only those incoming
    weights count whose other side is canonical already: a recurrent unit goes by its input weights.

    *Dead units.* A unit whose incoming weights are all zero takes its scale and sign from its bias. If that is zero too
    the unit says nothing: it is left out of what the units behind it are measured by, and its outgoing weights get norm
    one. A unit that is zero on both sides stays as it is.

    *Ties.* Units that tie in the sort key are ordered by their largest incoming weight, then the smallest, then their
    biases, then the largest and smallest outgoing weight; if all of these tie they stay in the order in which they
    came. Keys tie if they differ by no more than rounding.

    *Running statistics.* Where the symmetry moves buffers (batch normalisation), ``weights`` must hold them: moved
    without them, the network computes something else. A posterior over parameters alone, of a network whose statistics
    stay, has the symmetries ``symmetry.holding(net)``.

    :param weights: site -> tensor ``batch_shape + site_shape``; every element of the batch gets its own canonical form.
    :param symmetry: the symmetries to remove, or a bare ``PermutationGroup``, ``SignGroup`` or ``FiniteGroup``, of
        which only these are removed.
    :param permutations: the key that units are sorted by, ascending: their ``"first"`` incoming weight, the largest one
        (``"max"``), the ``"norm"`` of all their weights, in- and outgoing; ``None`` leaves the order.
    :param scalings: ``"unit_norm"`` or ``"unit_std"`` of each unit's incoming weights (units with one incoming weight
        get norm one for both), ``"minimal_mass"`` (see :func:`~pyro_symmetric.symmetry.minimal_mass.minimal_mass`;
        units that have no minimum get norm one), ``None`` leaves the scales.
    :param signs: whether to remove the signs of odd units.
    :param shifts: whether to remove the shift of a softmax.
    :raises ValueError: if an option is unknown, weights are missing, misshaped, NaN or infinite, or another network's.
    """
    form = canonical_form(weights, symmetry, permutations, scalings, signs, shifts)
    ordered = symmetry if isinstance(symmetry, PermutationGroup) else getattr(symmetry, "permutations", None)
    flipped = symmetry if isinstance(symmetry, SignGroup) else getattr(symmetry, "signs", None)
    warn_of_overlap(form, ordered if permutations else None, flipped if signs else None)
    return form


def canonical_form(
    weights: Mapping[str, Tensor],
    symmetry: Symmetry | PermutationGroup | SignGroup | FiniteGroup,
    permutations: PermutationKey | None = "max",
    scalings: ScalingRule | None = "unit_norm",
    signs: bool = True,
    shifts: bool = True,
) -> Weights:
    """:func:`canonicalize`, of what is only compared: without a look at whether labels are mixed."""
    _check_option("permutations", permutations, get_args(PermutationKey))
    _check_option("scalings", scalings, get_args(ScalingRule))
    arguments.flag("signs", signs)
    arguments.flag("shifts", shifts)
    if not isinstance(symmetry, PermutationGroup | SignGroup | FiniteGroup) and not hasattr(symmetry, "scalings"):
        raise TypeError(
            f"symmetry is {arguments.shown(symmetry)}; it must be a symmetry, such as find_symmetry(net, x), or a group"
        )
    require_finite(weights)
    if isinstance(symmetry, PermutationGroup):
        return remove_permutations(weights, symmetry, permutations) if permutations else dict(weights)
    if isinstance(symmetry, SignGroup):
        return remove_signs(weights, symmetry) if signs else dict(weights)
    result: Weights = dict(weights)
    if isinstance(symmetry, FiniteGroup):
        result = remove_signs(result, symmetry.signs) if signs else result
        return remove_permutations(result, symmetry.permutations, permutations) if permutations else result
    if scalings and symmetry.scalings.factors:
        if scalings == "unit_std" and signs and symmetry.signs.factors:
            # A deviation depends on the signs of the units behind: these are fixed first, at scales that don't.
            result = remove_signs(remove_scalings(result, symmetry.scalings, "unit_norm"), symmetry.signs)
        result = remove_scalings(result, symmetry.scalings, scalings)
    if signs and symmetry.signs.factors:
        result = remove_signs(result, symmetry.signs)
    if permutations and symmetry.permutations.factors:
        result = remove_permutations(result, symmetry.permutations, permutations)
    if shifts and symmetry.shifts.sites:
        result = remove_shifts(result, symmetry.shifts)
    return result


def remove_scalings(weights: Mapping[str, Tensor], group: ScalingGroup, rule: ScalingRule = "unit_norm") -> Weights:
    """Give every unit a canonical scale; see :func:`canonicalize`."""
    if rule == "minimal_mass":
        minimum = minimal_mass(weights, group)
        return removing_element(minimum.weights, group, Scaling, norm, minimum.pinned)(minimum.weights)
    return removing_element(weights, group, Scaling, spread if rule == "unit_std" else norm)(weights)


def remove_signs(weights: Mapping[str, Tensor], group: SignGroup) -> Weights:
    """Make every odd unit's largest incoming weight, by magnitude, positive; see :func:`canonicalize`."""
    return removing_element(weights, group, Sign, largest_sign)(weights)


def remove_permutations(weights: Mapping[str, Tensor], group: PermutationGroup, key: PermutationKey = "max") -> Weights:
    """Sort the units of every factor; see :func:`canonicalize`."""
    return sorting_permutation(weights, group, key)(weights)


def sorting_permutation(
    weights: Mapping[str, Tensor], group: PermutationGroup, key: PermutationKey = "max"
) -> Permutation:
    """The element, one per set of weights, that sorts the units of every factor; see :func:`canonicalize`."""
    shape = group.batch_shape(weights)
    device = next(iter(weights.values())).device
    images = {name: torch.arange(n, device=device).expand(*shape, n) for name, n in group.factors.items()}
    reduced = _Reduced(group.viewed(weights), group)
    for name, axis in _sort_order(group, key):
        keys = reduced.keys(name, key)
        if axis is not None:
            keys = itertools.chain([_first_entry(reduced.weights, Permutation(group, images), axis)], keys)
        images[name] = _sort(keys, reduced, name, key)
    return Permutation(group, images)


def remove_shifts(weights: Mapping[str, Tensor], group: ShiftGroup) -> Weights:
    """Give the biases in front of a softmax mean zero."""
    shape = group.batch_shape(weights)
    return group.element({site: -weights[site].flatten(len(shape)).mean(-1) for site in group.sites})(weights)


# permutations -------------------------------------------------------------------------------------------------------


def _incoming(group: PermutationGroup, name: str) -> tuple[list[Axis], list[Axis], list[Axis]]:
    """The axes of a factor along which lie incoming weights, biases, outgoing weights; the first is never empty.

    Axes are those of the view; incoming are rows of the site itself.
    """
    pairs = zip(group.factor(name).axes, group.axes(name), strict=True)
    axes = [(viewed, axis.dim == 0 and axis.span == 1) for axis, viewed in pairs if not axis.buffer]
    matrices = [(axis, is_row) for axis, is_row in axes if len(group.site_shapes[axis.site]) > 1]
    vectors = [axis for axis, _ in axes if len(group.site_shapes[axis.site]) == 1]
    rows = [axis for axis, is_row in matrices if is_row]
    if not matrices:
        return vectors[:1], vectors[1:], []
    if not rows:
        return [axis for axis, _ in matrices], vectors, []
    return rows, vectors, [axis for axis, is_row in matrices if not is_row]


def _sort_order(group: PermutationGroup, key: str) -> list[tuple[str, Axis | None]]:
    """Factors in the order of sorting, each with the axis that holds its "first" weights if these are well-defined.

    They are where every other factor of that site is sorted already; a factor with none (two factors around one matrix
    and nothing else) goes by its largest weights, whatever the order of its neighbours. Units are sorted once all that
    lies inside them is.
    """
    innermost_first = sorted(group.factors, key=lambda name: -len(group.ancestors(name)))
    if key != "first":
        return [(name, None) for name in innermost_first]
    order: list[tuple[str, Axis | None]] = []
    inside = {name: set(group.children(name)) for name in group.factors}
    pending, done = innermost_first, set[str]()
    while pending:
        ready = [name for name in pending if inside[name] <= done]
        found = ((name, _settled_axis(group, name, done)) for name in ready)
        step = next(((name, axis) for name, axis in found if axis is not None), (ready[0], None))
        order.append(step)
        done.add(step[0])
        pending.remove(step[0])
    return order


def _settled_axis(group: PermutationGroup, name: str, done: set[str]) -> Axis | None:
    """The first incoming axis of which all that decides its first entries is done; outer factors don't decide."""
    outer = group.ancestors(name)
    for axis in _incoming(group, name)[0]:
        others = [
            other
            for dim, members in group.members(axis.site).items()
            for other, entry in members
            if dim != axis.dim
            or (entry is not axis and other not in outer and bool(torch.isin(entry.index, axis.index).any()))
        ]
        if all(other in done for other in others):
            return axis
    return None


def _first_entry(weights: Mapping[str, Tensor], so_far: Permutation, axis: Axis) -> Tensor:
    """The first incoming weight of each unit, ``batch + (n,)``, once ``so_far`` has sorted the other axes."""
    value = weights[axis.site]
    site_dims = len(so_far.group.view_shapes[axis.site])
    batch = value.shape[: value.dim() - site_dims]
    for dim in reversed(range(site_dims)):
        positions = so_far.axis_index(axis.site, dim).to(value.device)
        positions = positions[..., axis.index[0].to(value.device)] if dim == axis.dim else positions[..., :1]
        positions = positions.expand(*batch, positions.shape[-1])
        value = torch.take_along_dim(value, along_axis(positions, dim, site_dims), dim=dim - site_dims)
    return value.reshape(*batch, axis.index.shape[1])


class _Reduced:
    """Viewed weights reduced to one number per position of an axis; factors that share an axis share the work."""

    def __init__(self, weights: Mapping[str, Tensor], group: PermutationGroup):
        self.weights = weights
        self.group = group
        self._positions: dict[tuple[str, int, Reduction], Tensor] = {}

    def per_unit(self, axes: Sequence[Axis], how: Reduction) -> Tensor:
        """Reduce all that belongs to each unit of a factor, ``batch + (n,)``; sums are those of squares."""
        parts = [how(self._along(a, how)[..., a.index.to(self.weights[a.site].device)], (-2,)) for a in axes]
        return parts[0] if len(parts) == 1 else how(torch.stack(parts, -1), (-1,))

    def _along(self, axis: Axis, how: Reduction) -> Tensor:
        where = (axis.site, axis.dim, how)
        if where not in self._positions:
            value = self.weights[axis.site]
            value = value.double().square() if how is torch.sum else value
            site_dims = len(self.group.view_shapes[axis.site])
            others = tuple(dim - site_dims for dim in range(site_dims) if dim != axis.dim)
            self._positions[where] = how(value, others) if others else value
        return self._positions[where]

    def select(self, samples: Tensor, sites: set[str]) -> _Reduced:
        """The same for some of the samples, of some sites."""
        return _Reduced({site: self.weights[site][samples] for site in sites}, self.group)

    def keys(self, name: str, key: str) -> Iterator[Tensor]:
        """The key, then the tie-breakers that :func:`canonicalize` names; none depends on the order of neighbours."""
        incoming, vectors, outgoing = _incoming(self.group, name)
        if key == "norm":
            yield self.per_unit([*incoming, *outgoing], torch.sum)
        yield self.per_unit(incoming, torch.amax)
        yield self.per_unit(incoming, torch.amin)
        for axis in vectors:
            yield self.per_unit([axis], torch.amax)
        if outgoing:
            yield self.per_unit(outgoing, torch.amax)
            yield self.per_unit(outgoing, torch.amin)


def _sort(keys: Iterator[Tensor], reduced: _Reduced, name: str, key: str) -> Tensor:
    """Sort units by the first key; samples in which it ties, up to rounding, are sorted again by all keys."""
    sites = {axis.site for axis in reduced.group.factor(name).axes if not axis.buffer}
    dtypes = {reduced.weights[site].dtype for site in sites}
    eps = max(torch.finfo(dtype).eps if dtype.is_floating_point else 0.0 for dtype in dtypes)
    first = next(keys)
    order, tied = _refined(first, torch.zeros_like(first, dtype=torch.long), eps)
    tied = tied.any(-1)
    if not bool(tied.any()):
        return order
    rank = torch.zeros_like(order[tied])
    for values in itertools.chain([first[tied]], reduced.select(tied, sites).keys(name, key)):
        suborder, ties = _refined(values, rank, eps)
        rank = torch.zeros_like(rank).scatter(-1, suborder[..., 1:], (~ties).cumsum(-1))
    order[tied] = rank.argsort(dim=-1, stable=True)
    return order


def _refined(key: Tensor, rank: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Sort by rank, then by key: the order, and where neighbours in that order still tie, ``batch + (n - 1,)``."""
    order = key.argsort(dim=-1, stable=True)
    order = order.gather(-1, rank.gather(-1, order).argsort(dim=-1, stable=True))
    key, rank = key.gather(-1, order), rank.gather(-1, order)
    close = key.diff(dim=-1) <= TIE * eps * key.abs().amax(-1, keepdim=True)
    return order, close & (rank.diff(dim=-1) == 0)


def _check_option(name: str, value: object, options: Sequence[str]) -> None:
    if value is not None and value not in options:
        raise ValueError(f"{name} must be one of {list(options)} or None, found {value!r}")
