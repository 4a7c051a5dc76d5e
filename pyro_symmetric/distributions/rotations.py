r"""Averages over the orthogonal maps of units: :math:`\log \bar q(w) = \log \int q(R
\cdot w)\, dR`, with Haar's measure on :math:`O(n)`.

Under a Gaussian base, :math:`\log q(R \cdot w)` is quadratic in :math:`R`, a matrix
Bingham-von Mises-Fisher density (Hoff 2009),

.. math:: \log q(R \cdot w) = c + \langle b, R \rangle
    - \tfrac12 \operatorname{vec}(R)^\top Q \operatorname{vec}(R),

so that after one pass over the weights a rotation costs :math:`n^4`, however many
weights there are. Proposals lie around its modes, which Newton steps find from the
polar factors of :math:`b` and from random starts; each mode has its Laplace mass. The
Cayley map :math:`R = (I - X)^{-1} (I + X)\, R_m` of a normal skew matrix ``X`` has a
known density against Haar's measure, and a share of Haar draws bounds the weights.

The weights are turned by a Haar draw first, :math:`w' = h \cdot w`; the draw itself is
then :math:`R_0 = h^{-1}`, distributed as :math:`q(R \cdot w')` on the orbit. Without
that, a climb from the identity would depend on where in its orbit the draw lies, and
claim more nats than there are.

Where units permute around those that rotate, as attention heads do, the density is a
mean over permutations of products over places, a permanent: its matrix holds, for the
weights of each place at each other, the average over rotations there. With the identity
among the proposals of each place for itself, the bound is that of one average.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    Normal,
)

from pyro_symmetric import arguments
from pyro_symmetric._process import forked
from pyro_symmetric.discovery.rotations import rotated
from pyro_symmetric.distributions.estimators import (
    CHUNK_NUMBERS,
    LARGEST_PERMANENT,
    OrbitEstimator,
    finite_estimator,
    in_chunks,
    jackknifed,
    log_mean_exp,
    log_permanent,
)
from pyro_symmetric.distributions.unit_blocks import UnitBlocks, in_blocks
from pyro_symmetric.groups.action import Action
from pyro_symmetric.groups.axes import rows
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.moves import MOVES, skew_basis

# the most units that are averaged over, and up to which all modes should be found
MOST_UNITS, SURE_UNITS = 16, 8
# random ones, besides the two polar factors of the linear term, and how many go on
STARTS, MODES = 10, 6
NEWTON_STEPS = 14
STEP_SIZES = (1.0, 0.25, 0.06, 0.015, 0.0)  # of a Newton step; the best is taken
WIDENED = 1.2  # variance of proposals, times that of the Laplace approximation
JUDGED = 200  # draws, at which the spread along orbits is judged
LEAST_HAAR, PILOTS = 0.05, 32  # share of Haar draws, and how many choose it
SAME = 1e-3  # distance at which two modes are one


@dataclass(frozen=True)
class RotationImportance(OrbitEstimator):
    r"""The importance-sampling bound over rotations, with ``K`` proposals around the
    modes of the base on the orbit.

    Other units are averaged over their permutations and signs. Rotations need a
    Gaussian base that doesn't correlate the units with others that move, at most 16
    units, and weights that no others move, but for units around them that permute:
    attention heads, whose permutations are summed over exactly. Otherwise their
    permutations and signs count (:func:`plan`). From 9 units on, modes may be missed:
    the bound holds, but leaves
    nats open. Gradients are those of
    :class:`~pyro_symmetric.distributions.SinkhornImportance`.

    >>> group = ps.Group.declare(
    ...     {"w": (None, "factor")}, {"w": torch.zeros(9, 2)}, moves="rotate"
    ... )
    >>> loc = torch.randn(9, 2).flatten()
    >>> base = dist.Normal(loc, 0.1).to_event(1)
    >>> orbit = ps.Symmetrized(base, ps.groups.Action(group, ["w"]))
    >>> orbit.estimator, orbit.mutual_information(50).bound
    (RotationImportance(K=4), 'lower')

    :param K: number of proposals, at least 1.
    """

    K: int = 4

    def __post_init__(self) -> None:
        arguments.whole("K", self.K, 1)

    def averaged(self, base: Distribution, action: Action) -> Group:
        return plan(base, action).group

    def log_prob(self, base: Distribution, action: Action, value: Tensor) -> Tensor:
        planned = plan(base, action)
        estimator = finite_estimator(base, planned.finite)
        total = estimator.log_prob(base, planned.finite, value)
        for part in planned.parts:
            weights = log_rotation_weights(base, part, value, self.K)
            total = total + jackknifed(weights, _over_places).to(total.dtype)
        return total

    def log_prob_elsewhere(
        self, base: Distribution, action: Action, value: Tensor
    ) -> Tensor:
        planned = plan(base, action)
        estimator = finite_estimator(base, planned.finite)
        total = estimator.log_prob_elsewhere(base, planned.finite, value)
        for part in planned.parts:
            weights = log_rotation_weights(base, part, value, self.K + 1)
            total = total + _over_places(log_mean_exp(weights[1:])).to(total.dtype)
        return total


def rotation_remarks(
    estimator: OrbitEstimator, base: Distribution, action: Action, value: Tensor
) -> tuple[str, ...]:
    """Return remarks on the rotations over which an estimator averages, with how many
    effective proposals at some draws, and over which it doesn't.
    """
    names = action.group.names("rotate")
    planned = plan(base, action)
    if not isinstance(estimator, RotationImportance):
        if planned.remarks or not names:
            return planned.remarks
        return (
            f"averaged over the permutations and signs of {list(names)}, as by "
            f"{estimator!r}; RotationImportance averages over their rotations",
        )
    lines = list[str]()
    for part in planned.parts:
        weights = log_rotation_weights(base, part, value, estimator.K)
        weights = weights.diagonal(dim1=-2, dim2=-1)
        effective = 2 * weights.logsumexp(0) - (2 * weights).logsumexp(0)
        lines.append(
            f"averaged over {part.label}: {float(effective.exp().mean()):.1f} of "
            f"{estimator.K + 1} proposals are effective"
        )
    return (*lines, *planned.remarks)


# which units are averaged over --------------------------------------------------------


class RotatedPart(NamedTuple):
    """Sets of units that rotate in a place, or in places that permute as wholes.

    :param label: what is averaged over, in words.
    :param sets: the positions in the vector of each set's entries, ``(places, units,
        entries)``.
    """

    label: str
    sets: tuple[Tensor, ...]


class Plan(NamedTuple):
    """The parts of an average over a group.

    :param group: what is averaged over.
    :param parts: units that rotate, with the wholes around them; the sets and places
        of a part, and all other moves, are independent under the base.
    :param finite: the permutations and signs of the other units.
    :param remarks: the units that may rotate, and whose permutations and signs alone
        are averaged over, with the reason.
    """

    group: Group
    parts: tuple[RotatedPart, ...]
    finite: Action
    remarks: tuple[str, ...]


def plan(base: Distribution, action: Action) -> Plan:
    """Choose what is averaged over: permutations, signs, and some rotations."""
    with suppress(TypeError):
        return _plan(action, in_blocks(base).positions)
    return _plan(action, None)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the cache outlives the mode in which it is filled
def _plan(action: Action, blocks: tuple[Tensor, ...] | None) -> Plan:
    group = action.group.compact
    parts, remarks = list[RotatedPart](), list[str]()
    turning, settled = set[str](), set[str]()
    families = dict[str, list[str]]()
    for name in group.names("rotate"):
        if group[name].size > 1:
            families.setdefault(group[name].parent or name, []).append(name)
    for home, names in families.items():
        sets = {name: _positions(action, name) for name in names}
        if reason := _hindrance(action, home, sets, blocks):
            remarks += [
                f"averaged over the permutations and signs of {name!r}, and not over "
                f"their rotations: {reason}"
                for name in names
            ]
            continue
        turning.update(names)
        settled.update((home, *names))
        label = " and ".join(f"O({group[name].size}) of {name!r}" for name in names)
        if home in sets:
            places = sets[home].split(1)
            parts += [RotatedPart(label, (positions,)) for positions in places]
        else:
            label = f"{label} in each of {home!r}, and their permutations"
            parts.append(RotatedPart(label, tuple(sets.values())))
    finite = copy.copy(action)
    finite.group = group.finite.without(settled)
    averaged = rotated(group.finite, tuple(turning))
    return Plan(averaged, tuple(parts), finite, tuple(remarks))


def _positions(action: Action, name: str) -> Tensor:
    """Return the positions in the vector of all entries of units, ``(copies, size,
    entries)``.
    """
    group = action.group
    numbers = action.layout.unflatten(torch.arange(action.dim, device="cpu"))
    viewed = group.viewed(numbers)
    entries = [
        rows(viewed[axis.site], axis, viewed[axis.site].dim())
        for axis in group.axes(name)
        if axis.site in viewed
    ]
    return torch.cat(entries, -1).unflatten(0, (-1, group[name].size))


def _hindrance(
    action: Action,
    home: str,
    sets: Mapping[str, Tensor],
    blocks: tuple[Tensor, ...] | None,
) -> str:
    """Return why no average over the rotations of sets is taken; empty if one is.

    :param home: the units around the sets, or else the set itself.
    """
    group = action.group.compact
    moved = {n: _positions(action, n).flatten() for n in group.factors if n != home}
    turned = torch.cat([positions.flatten() for positions in sets.values()])
    beside = {name: moved[name] for name in moved if name not in sets}
    meeting = [n for n, places in beside.items() if torch.isin(places, turned).any()]
    largest = max(group[name].size for name in sets)
    if largest > MOST_UNITS:
        return f"they are {largest}, more than {MOST_UNITS}"
    if meeting:
        return (
            f"{meeting} move the same sites; group.without({meeting}) leaves the "
            "average over these"
        )
    if len(turned.unique()) < len(turned):
        return "they lie along two axes of one site"
    if home not in sets and (
        group[home].parent
        or group[home].moves != {"permute"}
        or group[home].size > LARGEST_PERMANENT
        or len(_positions(action, home).unique()) > len(turned)
    ):
        return (
            f"{home!r} around them should do nothing but permute, be at most "
            f"{LARGEST_PERMANENT}, and hold no weights that don't rotate"
        )
    if blocks is None:
        return "the guide isn't Gaussian"
    moving = torch.cat([turned, *beside.values()])
    for positions in (places for units in sets.values() for places in units):
        for block in blocks:
            inside = torch.isin(block.cpu(), positions)
            outside = torch.isin(block.cpu(), moving) & ~inside
            if bool((inside.any(-1) & outside.any(-1)).any()):
                return "the guide correlates them with other units that move"
    return ""


# the base along an orbit --------------------------------------------------------------


class _Form(NamedTuple):
    """Log-density of turned units, up to a constant: :math:`\\langle b, R \\rangle -
    \\operatorname{vec}(R)^\\top Q \\operatorname{vec}(R) / 2`, of a batch of draws.

    :param linear: ``b``, ``(draws, n * n)``.
    :param quadratic: ``Q``, ``(draws, n * n, n * n)``.
    """

    linear: Tensor
    quadratic: Tensor

    def at(self, rotations: Tensor) -> Tensor:
        """Evaluate at ``(draws, k, n, n)`` -> ``(draws, k)``."""
        entries = rotations.flatten(-2)
        linear = (entries @ self.linear.unsqueeze(-1)).squeeze(-1)
        return linear - 0.5 * (entries @ self.quadratic * entries).sum(-1)


def _form(base: Distribution, positions: Tensor, value: Tensor, units: Tensor) -> _Form:
    """Return the quadratic form of units ``(draws, n, entries)`` at some positions of
    the base, where other entries are those of ``value``.
    """
    normal, size = in_blocks(base), len(positions)
    # for each entry of R, what it adds to the vector
    added = units.new_zeros(len(units), size, size, value.shape[-1])
    for row, places in enumerate(positions):
        added[:, row][..., places] = units
    still = value.double().index_fill(-1, positions.flatten(), 0.0)
    whitened = _white(normal, added.flatten(1, 2))
    missing = _white(normal, (normal.loc - still).unsqueeze(1))
    return _Form((whitened @ missing.mT).squeeze(-1), whitened @ whitened.mT)


def _white(normal: UnitBlocks, vectors: Tensor) -> Tensor:
    """Solve by the Cholesky factors of a normal, for vectors ``(draws, k, D)``; entries
    have any order.
    """
    flat = vectors.flatten(0, 1)
    parts = [flat[:, normal.rest] / normal.scale[normal.rest]]
    for index, tril in zip(normal.positions, normal.scale_trils, strict=True):
        columns = flat[:, index].permute(1, 2, 0)
        solved = torch.linalg.solve_triangular(tril.double(), columns, upper=False)
        parts.append(solved.flatten(0, 1).mT)
    return torch.cat(parts, -1).unflatten(0, vectors.shape[:2])


# importance weights -------------------------------------------------------------------


def log_rotation_weights(
    base: Distribution, part: RotatedPart, value: Tensor, count: int
) -> Tensor:
    r"""Return the log importance weights :math:`\log [q_a(R_k \cdot w_b) / (q_a(w_a)\,
    \tau(R_k | w_b))]` of the units of each place ``b`` where those of ``a`` are, in
    float64, ``(count + 1,) + batch_shape + (sets, places, places)``.

    All are those of proposals, but for the first of a place itself: the identity's.

    :param value: draws of the base, or any vectors, ``batch_shape + (D,)``.
    """
    vectors = value.reshape(-1, value.shape[-1])
    weights = []
    for units in part.sets:
        of_places = [
            _log_weights_at(base, units.to(value.device), place, vectors, count)
            for place in range(len(units))
        ]
        weights.append(torch.stack(of_places, -2))
    stacked = torch.stack(weights, -3)
    return stacked.view(count + 1, *value.shape[:-1], *stacked.shape[2:])


def _log_weights_at(
    base: Distribution, positions: Tensor, place: int, vectors: Tensor, count: int
) -> Tensor:
    """Return the log importance weights of the units of all places at a place,
    ``(count + 1, draws, places)``.
    """
    places, size, _ = positions.shape

    def evaluate(rows: slice) -> Tensor:
        units = vectors[rows][:, positions].double().flatten(0, 1)
        chosen = vectors[rows].repeat_interleave(places, 0)
        turn = _haar((len(chosen), size), vectors.device)
        form = _form(base, positions[place], chosen, turn @ units)
        with torch.no_grad():
            proposals = _Proposals(form)
            rotations = proposals.draw(count + 1)
            rotations[place::places, 0] = turn[place::places].mT
            log_density = proposals.log_density(rotations)
        log_q = form.at(rotations).unflatten(0, (-1, places))
        ratios = log_q - log_q[:, place, 0, None, None]
        return ratios - log_density.view_as(ratios)

    numbers = places * (STARTS + count) * size**2 * max(size**2, vectors.shape[-1])
    weights = in_chunks(evaluate, len(vectors), CHUNK_NUMBERS // numbers)
    return weights.movedim(-1, 0)


def _over_places(weights: Tensor) -> Tensor:
    """Return the log of the mean over permutations of places, of weights ``(..., sets,
    places, places)``.
    """
    return log_permanent(weights.sum(-3)) - math.lgamma(weights.shape[-1] + 1)


class AngularSpread(NamedTuple):
    """The spread of aligned draws along their orbits.

    :param radians: standard deviations of the angle in each plane of two units.
    :param elsewhere: the share of the density of all draws, along a draw's orbit, that
        lies around other modes than the highest.
    """

    radians: Tensor
    elsewhere: float


@forked(0)
def angular_spread(units: Tensor) -> AngularSpread:
    """Return the spread of draws of units, ``(draws, n, entries)``, along their orbits,
    under independent Gaussians fitted to all of them.
    """
    draws, size, entries = units.shape
    loc, scale = units.double().mean(0).flatten(), units.double().std(0).flatten()
    base = Independent(Normal(loc, torch.where(scale > 0, scale, 1.0)), 1)
    numbers = size**2 * max(size**4, size * entries)
    few = max(1, min(JUDGED, CHUNK_NUMBERS // numbers))
    chosen = units[:: -(-draws // few)].double()
    places = torch.arange(len(loc), device=loc.device).view(size, entries)
    proposals = _Proposals(_form(base, places, chosen.flatten(1), chosen))
    best = proposals.log_share.argmax(-1)[:, None, None]
    precision = WIDENED * proposals.precision.take_along_dim(best, 1)
    axes = proposals.axes.take_along_dim(best.unsqueeze(-1), 1)
    variances = 4 * (axes.square() / precision.unsqueeze(-2)).sum(-1)
    share = proposals.log_share.exp().amax(-1)
    return AngularSpread(variances.mean((0, 1)).sqrt(), float(1 - share.mean()))


class _Proposals:
    """A mixture of normals around the modes of a form, in the coordinates of the Cayley
    map, and of Haar draws.

    :ivar modes: ``(draws, m, n, n)``; ``log_share``: of each, by its Laplace mass.
    :ivar precision: of the coordinates around each mode, ``(draws, m, d)``, along the
        columns of ``axes``, ``(draws, m, d, d)``.
    :ivar haar_share: of Haar draws, larger where the form is flat, ``(draws, 1)``.
    """

    def __init__(self, form: _Form):
        self.form, self.size = form, math.isqrt(form.linear.shape[-1])
        self.basis = skew_basis(self.size).to(form.linear.device)
        self.modes = self._climb(self._starts())
        flat = 2.0 * (self.size - 1)  # curvature of Haar's measure itself
        curvature, self.axes = torch.linalg.eigh(4 * self._slopes(self.modes).curvature)
        precision = (curvature + flat).clamp(min=flat)
        mass = form.at(self.modes) - 0.5 * precision.log().sum(-1)
        apart = (
            (self.modes.unsqueeze(2) - self.modes.unsqueeze(1)).flatten(-2).norm(dim=-1)
        )
        found_before = (apart < SAME).tril(-1).any(-1)
        self.log_share = mass.masked_fill(found_before, -math.inf).log_softmax(-1)
        self.precision = precision / WIDENED
        spread = form.at(self._haar(PILOTS)).var(-1, keepdim=True)
        self.haar_share = (-spread / 2).exp().clamp(LEAST_HAAR, 1.0)

    def draw(self, count: int) -> Tensor:
        """Draw rotations, ``(draws, count, n, n)``."""
        mode = Categorical(logits=self.log_share).sample((count,)).mT[..., None, None]
        noise = torch.randn_like(self.precision.unsqueeze(2).expand(-1, -1, count, -1))
        vectors = noise / self.precision.sqrt().unsqueeze(2) @ self.axes.mT
        proposals = _cayley(self._skew(vectors)) @ self.modes.unsqueeze(2)
        proposals = proposals.take_along_dim(mode.unsqueeze(1), 1).squeeze(1)
        is_haar = torch.rand_like(proposals[..., 0, 0]) < self.haar_share
        return torch.where(is_haar[..., None, None], self._haar(count), proposals)

    def log_density(self, rotations: Tensor) -> Tensor:
        """Return the log-density against Haar's measure, ``(draws, k)``."""
        relative = rotations.unsqueeze(1) @ self.modes.mT.unsqueeze(2)
        reached = torch.linalg.det(relative) > 0  # by the Cayley map
        still = torch.eye(self.size, dtype=relative.dtype, device=relative.device)
        relative = torch.where(reached[..., None, None], relative, still)
        skew = torch.linalg.solve(relative + still, relative - still)
        vectors = (skew.flatten(-2) @ self.basis.flatten(-2).mT / 2) @ self.axes
        normal = Normal(0.0, self.precision.rsqrt().unsqueeze(2), validate_args=False)
        # |det(I + X)| = 2^n / |det(R + I)|
        volume = -torch.linalg.slogdet((relative + still) / 2).logabsdet
        local = normal.log_prob(vectors).sum(-1) + (self.size - 1) * volume
        local = torch.where(reached, local + _log_volume(self.size), -math.inf)
        mixed = (local + self.log_share.unsqueeze(-1)).logsumexp(1)
        share = self.haar_share
        return torch.logaddexp(mixed + torch.log1p(-share), share.log())

    # modes

    def _starts(self) -> Tensor:
        """Return the polar factors of the linear term, of both determinants, and Haar
        draws.
        """
        matrices = self.form.linear.unflatten(-1, (self.size, self.size))
        left_vectors, _, right_vectors = torch.linalg.svd(matrices)
        reflected = torch.cat([left_vectors[..., :-1], -left_vectors[..., -1:]], -1)
        factors = torch.stack(
            [left_vectors @ right_vectors, reflected @ right_vectors], 1
        )
        return torch.cat([factors, self._haar(STARTS)], 1)

    def _climb(self, rotations: Tensor) -> Tensor:
        """Move the highest of some rotations ``(draws, m, n, n)`` to modes, by Newton
        steps.
        """
        highest = self.form.at(rotations).topk(MODES).indices[..., None, None]
        rotations = rotations.take_along_dim(highest, 1)
        sizes = rotations.new_tensor(STEP_SIZES).unsqueeze(-1)
        for _ in range(NEWTON_STEPS):
            slopes = self._slopes(rotations)
            values, axes = torch.linalg.eigh(slopes.curvature)
            values = values.abs()
            # away from saddles
            values = values.clamp(min=1e-3 * values.amax(-1, keepdim=True) + 1e-12)
            step = slopes.gradient.unsqueeze(-2) @ axes / values.unsqueeze(-2) @ axes.mT
            candidates = _cayley(self._skew(sizes * step / 2)) @ rotations.unsqueeze(2)
            heights = self.form.at(candidates.flatten(1, 2)).view(candidates.shape[:3])
            best = heights.argmax(-1)[..., None, None, None]
            rotations = candidates.take_along_dim(best, 2).squeeze(2)
        return rotations

    def _slopes(self, rotations: Tensor) -> _Slopes:
        """Return derivatives along the planes of rotations ``(draws, m, n, n)``."""
        entries = rotations.flatten(-2)
        slope = self.form.linear.unsqueeze(1) - entries @ self.form.quadratic
        turned = slope.view_as(rotations) @ rotations.mT
        basis = self.basis.flatten(-2)
        tangents = (self.basis @ rotations.unsqueeze(-3)).flatten(-2)
        # <S, E_a E_b> = <E_a', S E_b>, with S symmetric
        bent = (turned + turned.mT).unsqueeze(-3) @ self.basis / 2
        products = self.basis.mT.flatten(-2) @ bent.flatten(-2).mT
        quadratic = tangents @ self.form.quadratic.unsqueeze(1) @ tangents.mT
        return _Slopes(turned.flatten(-2) @ basis.mT, quadratic - products)

    def _haar(self, count: int) -> Tensor:
        linear = self.form.linear
        return _haar((len(linear), count, self.size), linear.device)

    def _skew(self, vectors: Tensor) -> Tensor:
        return (vectors @ self.basis.flatten(-2)).unflatten(-1, (self.size, self.size))


class _Slopes(NamedTuple):
    """The gradient, and minus the Hessian, along the planes of rotations."""

    gradient: Tensor
    curvature: Tensor


def _haar(shape: Sequence[int], device: torch.device) -> Tensor:
    """Draw orthogonal matrices uniformly, ``(..., n, n)`` for a shape ``(..., n)``."""
    full = (*shape, shape[-1])
    return MOVES["rotate"].draw(full, 1.0, torch.float64, device=device)


def _cayley(skew: Tensor) -> Tensor:
    still = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    return torch.linalg.solve(still - skew, still + skew)


def _log_volume(n: int) -> float:
    """Return the log of :math:`2 \\int |\\det(I + X)|^{-(n - 1)} dX` over skew
    matrices: the volume of :math:`O(n)` in the coordinates of the Cayley map.
    """
    spheres = (
        math.log(2) + (k + 1) / 2 * math.log(math.pi) - math.lgamma((k + 1) / 2)
        for k in range(1, n)
    )
    return sum(spheres) - n * (n - 1) / 2 * math.log(2) + math.log(2)


def usual_estimator(
    base: Distribution, action: Action, training: bool = True
) -> OrbitEstimator:
    """Choose :class:`RotationImportance` where units rotate, else
    :class:`~pyro_symmetric.distributions.ExactOrbit` where that costs about as much as
    an estimate, else :class:`~pyro_symmetric.distributions.SinkhornImportance`.

    :param training: whether it is evaluated at every step; otherwise once for a report,
        which affords more terms.
    """
    if action.group.names("rotate") and plan(base, action).parts:
        return RotationImportance(4 if training else 16)
    return finite_estimator(base, action, training)
