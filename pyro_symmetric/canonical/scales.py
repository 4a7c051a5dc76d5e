r"""Positive scales: minima over all rescalings of a network, among them the minimum
scaled representation.

For a multilayer perceptron with squared weights :math:`M_l` and log-scales :math:`u_l`
of hidden units the mass is

.. math:: \sum_l \sum_{ij} M_l[i, j] \exp(2 u_l[i] - 2 u_{l-1}[j]),

and for any network a sum of exponentials, :math:`f(u) = \sum_t m_t e^{2 a_t \cdot u}`:
each squared weight :math:`m_t` is multiplied by :math:`e^{2 e u_i}` for each unit ``i``
on its row, column, ..., with the exponent ``e`` of that axis. This is convex, and
strictly so in the scales of all units on a path of nonzero weights from inputs to
outputs, which aren't rescaled: then the minimum is unique, and every point of an orbit
leads to it. Units have one log-multiplier for positive exponents, ``u``, and one for
negative ones, ``-u``: the gradients by these are the masses that pull a unit down and
up.

Coordinate steps come first; once every unit is near its balance, Newton's method with
conjugate gradients. Along a direction ``p``, :math:`|\varphi'''| \le L \varphi''` with
:math:`L = \max_t |2 a_t \cdot p|`, so that a step of length
:math:`\log(1 + L) / L` never raises the sum and tends to a full one: no line search is
    needed.

Source: Laurent, Aldea & Franchi 2024, arXiv 2310.08287, section 3.3 and appendix
(minimum scaled network mass); Sun & Tran-Dinh 2019, "Generalized self-concordant
functions", case nu = 2 (the step).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.discovery.symmetry import plain_weights, with_weights
from pyro_symmetric.groups.axes import laid_out
from pyro_symmetric.groups.elements import acted_shape
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior.posterior import Posterior, as_given
from pyro_symmetric.weights import (
    ByName,
    Tensors,
    Weights,
    first_value,
    keep_names,
    map_values,
    require_finite,
    require_sites,
    select_rows,
)

STEPS = 500
CG_STEPS = 400
FAR, TOLERANCE = 0.5, 1e-12  # imbalances at which Newton's method begins, and ends
# an imbalance, or a curvature relative to the diagonal's, of the size of rounding
ROUNDED = 1e-14
GONE = -1e3  # a log-multiplier whose exponential is zero
CHUNK_ENTRIES = 2**26  # entries of weights that are minimised together


class MinimalMass(NamedTuple):
    """The minimum scaled representation of a batch of weights. Its text says what the
    mass leaves out.

    :ivar mass: float64 ``batch_shape``, the minimum: the squared L2 norm of ``weights``
        without biases and entries that pinned units multiply; ``given``: the same
        before.
    :ivar log_scales: name -> float64 ``batch_shape + units.shape``, the logarithm of
        each unit's multiplier.
    :ivar weights: the rescaled weights, all sites, in their own dtypes; a new network
        or posterior, if one was given.
    :ivar pinned: name -> bool ``batch_shape + units.shape``, units whose best scale
        isn't finite: they stay.
    :ivar imbalance: float64 ``batch_shape``: at a minimum the squared weights that
        enter a unit equal those that leave it; the largest remaining difference,
        relative to their sum.
    """

    mass: Tensor
    given: Tensor
    log_scales: ByName
    weights: Any
    pinned: ByName
    imbalance: Tensor

    def __repr__(self) -> str:
        if not self.mass.numel():
            return "MinimalMass(no samples)"
        samples = f"; {self.mass.numel()} samples" if self.mass.dim() else ""
        head = f"MinimalMass({_range(self.mass)}, from {_range(self.given)}{samples})"
        return "\n".join([head, *self._left_out()])

    def _left_out(self) -> list[str]:
        """Describe the units that are pinned in a sample, and what the mass then
        means.
        """
        counts = {}
        total = 0
        for name, pinned in self.pinned.items():
            anywhere = pinned.reshape(self.mass.numel(), -1).any(0)
            counts[name] = int(anywhere.sum())
            total += anywhere.numel()
        names = [f"{name!r}: {count}" for name, count in counts.items() if count]
        if not names:
            return []
        lines = [
            f"{sum(counts.values())} of {total} units have no best scale "
            f"({', '.join(names)}): they stay, and the weights that they multiply, "
            "which rescaling can make as small as one likes, are left out"
        ]
        if not self.mass.any():
            lines.append(
                "no weights are left to count: the mass is 0 whatever they are, and "
                "doesn't measure this network"
            )
        return lines


def _range(values: Tensor) -> str:
    low = float(values.min())
    high = float(values.max())
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


@torch.no_grad()
def minimal_mass(
    weights: Tensors | Posterior | nn.Module,
    symmetry: Any,
    sites: Iterable[str] | None = None,
) -> MinimalMass:
    """Minimise the squared L2 norm of weights, biases left out, over all positive
    scalings, which keep the function.

    The weights of normalisations count, as in the paper. The minimum has no gradients.
    Units that rotate keep their weights, as rotations keep the mass. Of units that may
    rotate and scale (queries and keys), scales alone are minimised; all invertible maps
    together may have a lower minimum.

    *Pinned units* have no best scale: the mass decreases for ever as they grow or
    shrink. Their incoming or outgoing weights are all zero, or their output is
    scale-free (before batch normalisation), or they trade scale with a bias, or they
    feed only such units, or are fed by them. They stay, and the weights that they
    multiply, which vanish at the infimum, are left out of the mass, so that all points
    of an orbit have the same minimum. If every weight belongs to pinned units, as in a
    network with a normalisation behind each layer, the mass is 0 and says nothing of
    the network: printing the result says what was left out.

    >>> net = nn.Sequential(
    ...     nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 1, bias=False)
    ... )
    >>> symmetry = ps.find_symmetry(net, torch.randn(3, 1))
    >>> result = ps.minimal_mass(
    ...     {"0.weight": torch.tensor([[4.0]]), "2.weight": torch.tensor([[1.0]])},
    ...     symmetry,
    ... )
    >>> (
    ...     round(float(result.mass), 3),
    ...     {name: round(float(w), 3) for name, w in result.weights.items()},
    ... )
    (8.0, {'0.weight': 2.0, '2.weight': 2.0})

    :param weights: site -> tensor ``batch_shape + site_shape``; each sample is
        minimised by itself, in float64. Or a ``Posterior``, draws chain after chain; or
        a network.
    :param symmetry: a symmetry or a group; its scalings count. Without any (tanh, say)
        the weights stay.
    :param sites: the sites whose squared norm is the mass; by default all weights, see
        :attr:`~pyro_symmetric.groups.group.Group.weight_sites`.
    :raises ValueError: if weights (with running statistics that scales move) are
        missing, misshaped, NaN or infinite, or another network's; if ``sites`` are
        unknown.
    """
    full_group = group_of(symmetry)
    group = full_group.scalings
    original = weights
    weights = weights_of(weights, full_group)
    require_finite(weights)
    shape = acted_shape(group, weights)
    counted = [site for site in full_group.weight_sites if site in weights]
    if sites is not None:
        counted = arguments.listed("sites", sites, str, "sites")
        require_sites(
            keep_names(weights, full_group.site_shapes),
            counted,
        )
    flat = {
        site: weights[site].reshape(shape.numel(), *group.view_shapes[site])
        for site in counted
    }
    size = max(
        1,
        CHUNK_ENTRIES
        // max(1, sum(math.prod(value.shape[1:]) for value in flat.values())),
    )
    parts = [
        _minimum(select_rows(flat, slice(i, i + size)), group)
        for i in range(0, max(shape.numel(), 1), size)
    ]
    mass, before, u, pinned, imbalance = (
        torch.cat(part) for part in zip(*parts, strict=True)
    )
    if (imbalance > 1e-8).any():
        warnings.warn(
            "minimal_mass stopped before the minimum: the squared weights that enter "
            "a unit and those that leave it still differ by a share of "
            f"{float(imbalance.max()):.1e} of their sum; the mass is at least the "
            "minimum, and the scales of weakly connected units may be off",
            stacklevel=3,  # past no_grad
        )
    log_scales, held = (
        group.by_name(value.reshape(*shape, group.size), "scale")
        for value in (u, pinned)
    )
    scaled = group.element(log_scales=log_scales).expand(shape)(weights)
    mass, before, imbalance = (
        value.reshape(shape) for value in (mass, before, imbalance)
    )
    return MinimalMass(
        mass, before, log_scales, as_it_came(original, scaled), held, imbalance
    )


class _Minimum(NamedTuple):
    """The minimum of samples' masses, the mass before, log-scales, pinned units, and
    the imbalance, ``(samples, ...)``.
    """

    mass: Tensor
    before: Tensor
    log_scales: Tensor
    pinned: Tensor
    imbalance: Tensor


def _minimum(weights: Tensors, group: Group) -> _Minimum:
    """Minimise the mass of weights of the view."""
    mass = Mass(group, map_values(lambda value: value.double().square(), weights))
    free = mass.bounded()
    of_free = mass.without(~free)
    u, imbalance = of_free.minimise(free)
    return _Minimum(of_free(u), of_free(torch.zeros_like(u)), u, ~free, imbalance)


def weights_of(source: Any, group: Group) -> Weights:
    """Return the weights of a network, or the draws of a posterior, chain after chain;
    return weights unchanged.
    """
    if isinstance(source, nn.Module):
        return plain_weights(source, group)
    return source.get_samples() if isinstance(source, Posterior) else source


def as_it_came(source: Any, weights: Weights) -> Any:
    """Return changed weights in the form in which :func:`weights_of` received them."""
    return (
        with_weights(source, weights)
        if isinstance(source, nn.Module)
        else as_given(source, weights)
    )


# sums of squares as functions of log-scales -------------------------------------------


class Mass:
    """The sum of squares of rescaled weights as a function of log-scales ``(samples,
    units)``.

    :param group: scalings; their units are the unknowns.
    :param squares: site -> squares, ``(samples, *view_shape)``, float64; one site at
        least.
    """

    def __init__(self, group: Group, squares: Tensors):
        first = first_value(squares)
        self.shape = (len(first), group.size)
        self._terms = []
        self._base = first.new_zeros(len(first), 2, group.size, dtype=torch.float64)
        with torch.inference_mode(False):  # autograd takes no inference tensors
            for site, value in squares.items():
                dims = sorted(group.members(site))
                summed = [dim + 1 for dim in range(value.dim() - 1) if dim not in dims]
                axes = [_Multiplied(group, site, dim) for dim in dims]
                self._terms.append(
                    (
                        value.detach().sum(summed)
                        if summed
                        else value.detach().clone(),
                        axes,
                    )
                )

    def without(self, removed: Tensor) -> Mass:
        """Return the sum without the entries that removed units multiply, bool
        ``(samples, units)``.
        """
        reduced = copy.copy(self)
        reduced._base = torch.zeros_like(self._base).masked_fill(
            removed.unsqueeze(1), GONE
        )
        return reduced

    def __call__(self, u: Tensor) -> Tensor:
        """Return ``f(u)`` of each sample, without a linear term."""
        return self.total(torch.stack([u, -u], 1))

    def total(self, logs: Tensor) -> Tensor:
        """Return the sum at log-multipliers of positive and of negative exponents,
        ``(samples, 2, units)``.
        """
        # which has a gradient, even without units
        logs, total = logs + self._base, 0.0 * logs.sum((1, 2))
        for term, axes in self._terms:
            factors = [(2 * axis(logs)).exp() for axis in axes]
            # row vectors from the left: columns take a batch up to twenty times as long
            for factor in factors[:0:-1]:
                term = (factor.unsqueeze(-2) @ term.flatten(1, -2).mT).reshape(
                    term.shape[:-1]
                )
            total = total + ((term * factors[0]).sum(-1) if factors else term)
        return total

    def sides(self, logs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the masses that pull each unit down, entries times positive exponents,
        and those that pull it up.
        """
        slope, _ = self._slope(
            torch.zeros_like(self._base) if logs is None else logs, False
        )
        return slope[:, 0], slope[:, 1]

    def bounded(self) -> Tensor:
        """Find the units whose best scale is finite, bool ``(samples, units)``.

        Mass flows along entries from units with negative exponents to those with
        positive ones. A unit that no flow from outside reaches can shrink, with all
        before it, at no cost; one from which none reaches outside can grow. The entries
        that such units multiply vanish, which may cut off others.
        """
        free = torch.ones(self.shape, dtype=torch.bool, device=self._base.device)
        bounded = self
        while True:
            bounded_units = bounded._reached(0) & bounded._reached(1) & free
            if torch.equal(bounded_units, free):
                return free
            free = bounded_units
            bounded = self.without(~bounded_units)

    def _reached(self, side: int) -> Tensor:
        """Find the units reached by an entry all of whose units on the other side are
        reached, to a fixed point.
        """
        reached = torch.zeros(self.shape, dtype=torch.bool, device=self._base.device)
        count = -1
        while count < (count := int(reached.sum())):
            logs = torch.zeros_like(self._base)
            logs[:, 1 - side] = torch.where(reached, 0.0, GONE)
            reached = reached | (self.sides(logs)[side] > 0)
        return reached

    def minimise(
        self, free: Tensor, counts: Mass | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""Minimise the sum over the free units, bool ``(samples, units)``; the others
        stay at zero.

        :param counts: the slope of this sum at zero is a linear term; without it, each
            free unit must have mass on both sides.
        :returns: ``u`` and each sample's imbalance: the largest difference of a unit's
            pulls, relative to their sum.
        """
        with torch.inference_mode(False):
            u = torch.zeros_like(free, dtype=torch.float64)
            imbalance = free.new_zeros(len(free), dtype=torch.float64)
            linear = counts.sides() if counts is not None else (u, u)
            powers = [axis.largest for _, axes in self._terms for axis in axes]
            # With exponents of p at most, a unit's own best step is log(up / down) / 4
            # p or more. If k units at most multiply one entry, a k-th of all these
            # steps at once never raises the sum, by convexity.
            overlap = max(
                (sum(axis.depth for axis in axes) for _, axes in self._terms), default=1
            )
            divisor = 4 * overlap * max(powers, default=1)
            worst = math.inf
            for _ in range(STEPS if free.numel() and powers else 0):
                slope, hessian = self._slope(torch.stack([u, -u], 1))
                pulls = [slope[:, side].clamp_min(1e-300) for side in (0, 1)]
                down, up = (
                    torch.where(free, pull + term, 1.0)
                    for pull, term in zip(pulls, linear[::-1], strict=True)
                )
                imbalance = ((up - down).abs() / (up + down)).amax(-1)
                before = worst
                worst = float(imbalance.max())
                # One step beyond the tolerance mostly reaches rounding.
                if worst <= ROUNDED or max(worst, before) <= TOLERANCE:
                    break
                if worst > FAR:
                    u = u + (up.log() - down.log()) / divisor
                else:
                    p = _newton_step(
                        hessian,
                        up - down,
                        torch.where(free, pulls[0] + pulls[1], 1.0),
                        free,
                    )
                    # no longer than one, where it could overshoot
                    u = u + p / p.abs().amax(-1, keepdim=True).clamp_min(1.0)
        return u, imbalance

    # small steps ----------------------------------------------------------------------

    def _slope(
        self, logs: Tensor, twice: bool = True
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return half the gradient by log-multipliers, and half the Hessian's product
        with directions.
        """
        with torch.inference_mode(False), torch.enable_grad():
            point = logs.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(
                self.total(point).sum() / 2, point, create_graph=twice
            )
        return gradient.detach(), lambda p: torch.autograd.grad(
            gradient, point, p, retain_graph=True
        )[0]


class _Multiplied:
    """An axis of a site, and the units that multiply entries along it; at most
    ``depth`` share a position.
    """

    def __init__(self, group: Group, site: str, dim: int):
        members = group.members(site)[dim]
        self._length = group.view_shapes[site][dim]
        self.largest = max(abs(axis.exponent) for _, axis in members)
        self._members = [(group.slots[name], axis) for name, axis in members]
        self.depth = int(
            torch.cat([axis.index.flatten() for _, axis in members]).bincount().max()
        )

    def __call__(self, logs: Tensor) -> Tensor:
        """Sum log-multipliers, ``(samples, 2, units)``, at all positions, ``(samples,
        length)``.
        """
        multiplier = (
            (abs(axis.exponent) * logs[:, int(axis.exponent < 0), slot], axis)
            for slot, axis in self._members
        )
        return torch.stack(
            [laid_out(value, axis, self._length, 0.0) for value, axis in multiplier]
        ).sum(0)


def evened(group: Group, weights: Tensors, free: Tensor) -> Tensor:
    r"""Return the log-scales of the free units at which weights are nearest to one,
    ``(samples, units)``.

    With :math:`x_t` the squares of all nonzero weights after rescaling, they minimise
    :math:`\sum_t x_t - \log x_t`, which has a minimum for all weights, the same for
    every point of an orbit.

    :param weights: sites of the view, ``(samples, *view_shape)``.
    :param free: bool ``(samples, units)``; the others stay at zero.
    """
    squares = map_values(lambda value: value.double().square(), weights)
    counts = Mass(group, map_values(lambda value: (value > 0).double(), squares))
    return Mass(group, squares).minimise(free, counts)[0]


def _newton_step(
    hessian: Callable[[Tensor], Tensor],
    downhill: Tensor,
    diagonal: Tensor,
    free: Tensor,
) -> Tensor:
    """Solve for Newton's step, the more exactly the smaller the gradient, so that
    convergence is superlinear.
    """
    size = (downhill / diagonal).abs().amax(-1, keepdim=True).clamp_min(1e-300)
    goal = torch.maximum(size, 0.1 * ROUNDED / size).clamp_max(0.1) ** 2

    def product(p: Tensor) -> Tensor:
        products = hessian(torch.stack([p, -p], 1))
        return free * (products[:, 0] - products[:, 1])

    return conjugate_gradients(product, downhill, 2 * diagonal, goal)


def conjugate_gradients(
    hessian: Callable[[Tensor], Tensor],
    downhill: Tensor,
    diagonal: Tensor,
    goal: Tensor,
) -> Tensor:
    """Solve ``H p = downhill`` for each sample by conjugate gradients, preconditioned
    by (about) the diagonal.

    A sample stops at a direction without positive curvature: units that scale the same
    entries have directions of curvature zero, and a gradient of rounding along them.

    :param goal: the share of the squared residual that may remain, ``(samples, 1)``.
    """
    residual = downhill
    z = downhill / diagonal
    p = torch.zeros_like(z)
    direction = z
    rho = (residual * z).sum(-1, keepdim=True)
    goal = rho * goal
    running = rho > 0
    for _ in range(CG_STEPS):
        running = running & (rho > goal)
        if not running.any():
            break
        h = hessian(direction)
        curvature = (direction * h).sum(-1, keepdim=True)
        running = running & (
            curvature > ROUNDED * (diagonal * direction.square()).sum(-1, keepdim=True)
        )
        alpha = torch.where(running, rho / curvature.clamp_min(1e-300), 0.0)
        p = p + alpha * direction
        residual = residual - alpha * h
        z = residual / diagonal
        before = rho
        rho = (residual * z).sum(-1, keepdim=True)
        direction = (
            z + torch.where(before > 0, rho / before.clamp_min(1e-300), 0.0) * direction
        )
    return p
