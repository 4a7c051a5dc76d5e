r"""Canonical forms: one representative per orbit, so that equal functions get equal
weights.

Symmetries are removed in this order; no step changes the function:

1. *scalings*: every unit's incoming weights get norm one, or the network its minimal
  mass or norm;
2. *signs*: every odd unit's largest incoming weight, by magnitude, becomes positive;
3. *permutations*: units are sorted by a key of their weights;
4. *shifts*: the biases in front of a softmax get mean zero.

Two points of one orbit get the same canonical form, up to rounding: every step reads
what later steps leave invariant, or what is in canonical form already (units nearer the
input come first).

Source: Laurent, Aldea & Franchi 2024, arXiv 2310.08287, section 3 and appendix (removal
of symmetries).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator
from functools import partial
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments
from pyro_symmetric.canonical.order import entries_of
from pyro_symmetric.canonical.removal import (
    PermutationKey,
    largest_sign,
    principal_axes,
    removing_element,
    sorting_permutation,
)
from pyro_symmetric.canonical.scales import as_it_came, evened, minimal_mass, weights_of
from pyro_symmetric.discovery.model_carried import AUTO, Auto, required_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.elements import Element, acted_shape
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.weights import Tensors, Weights, map_values, require_finite

Given = TypeVar("Given", Weights, nn.Module, Posterior)
ScalingRule = Literal["unit_norm", "minimal_mass", "minimal_norm"]
# Labels are judged from so many draws on, at so many evenly spaced ones that hold at
# most so many numbers.
FEW = 100
JUDGED = 250
NUMBERS = 2**24
# the share of draws up to which other labels may be likelier: distant tails, without
# weight in a summary
RARE = 0.05
# labels are uncertain if the odds against the next best are lower than so many to one
ODDS = 3
MOST_RADIANS = 0.15  # by which principal axes may turn
LEAST_SPREAD = 1e-7  # relative deviation below which a weight doesn't count
SCORES = 2**24  # scores of units for places that are held at once
NORM = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float64)


def canonicalize(
    weights: Given,
    symmetry: Symmetry | Group | Auto = AUTO,
    permutations: PermutationKey | None = "max",
    scalings: ScalingRule | None = "unit_norm",
    signs: bool = True,
    shifts: bool = True,
    warn: bool = True,
) -> Given:
    """Return the representative of each orbit: weights that compute the same function.

    Canonical forms serve to compare orbits, not for means and R-hat of many draws:
    where two units' keys overlap, a label means one of them in some draws and the other
    in others (a warning says so from 100 draws on). Use
    :func:`~pyro_symmetric.alignment.align_many` or
    :func:`~pyro_symmetric.compare.summary` instead.
    :doc:`/explanation/canonical-forms` explains dead units, circles and ties. Units
    that rotate are turned to their principal axes, of decreasing second moments.

    >>> net, x = (
    ...     nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
    ...     torch.randn(5, 3),
    ... )
    >>> symmetry = ps.find_symmetry(net, x)
    >>> moved = symmetry.act(symmetry.sample(), net)
    >>> form, same = ps.canonicalize(net, symmetry), ps.canonicalize(moved, symmetry)
    >>> torch.allclose(form[0].weight, same[0].weight, atol=1e-5)
    True

    :param weights: site -> tensor ``batch_shape + site_shape``, with the running
        statistics that the symmetry moves (see ``symmetry.holding(net)``); a network,
        or a ``Posterior``.
    :param symmetry: the symmetries to remove: ``find_symmetry(net, x)``, or a group;
        ``"auto"`` is that of the posterior's model.
    :param permutations: the key by which units are sorted, ascending: their ``"first"``
        incoming weight, the largest one (``"max"``), the ``"norm"`` of all their
        weights, in- and outgoing; ``None`` keeps the order.
    :param scalings: ``"unit_norm"`` of each unit's incoming weights,
        ``"minimal_mass"``, or ``"minimal_norm"``, which counts biases too (without
        them, those of nearly dead units have no bound); ``None`` keeps the scales.
    :param signs: whether to remove the signs of odd units; ``shifts``: the shift of a
        softmax.
    :param warn: whether to warn if labels are mixed; not needed for forms that are only
        compared.
    :raises ValueError: if an option is unknown, weights are missing, misshaped, NaN or
        infinite, or another network's.
    """
    arguments.one_of("permutations", permutations, (*get_args(PermutationKey), None))
    arguments.one_of("scalings", scalings, (*get_args(ScalingRule), None))
    group = required_symmetry(symmetry, weights)
    form = weights_of(weights, group)
    require_finite(form)
    acted_shape(group, form)
    form = dict(form)
    if scalings and group.names("scale"):
        unit_norm = scalings == "unit_norm"
        form = (
            removing_element(form, group, "scale", NORM).on_sites(form)
            if unit_norm
            else _least(form, group, scalings)
        )
    sorted_units = group
    rotating = group.names("rotate")
    if rotating:
        sorted_units = group.without(rotating)
        form = principal_axes(form, group.rotations).on_sites(form)
    flips = group.signs if signs else group.rotations.signs
    if flips.names("flip"):
        rounding = 16 * max(
            (
                torch.finfo(v.dtype).eps
                for v in form.values()
                if v.dtype.is_floating_point
            ),
            default=0.0,
        )
        form = removing_element(
            form, flips, "flip", partial(largest_sign, tie=rounding)
        ).on_sites(form)
    if permutations and sorted_units.names("permute"):
        form = sorting_permutation(form, sorted_units, permutations).on_sites(form)
    if shifts and group.names("shift"):
        form = _centring(form, group.shifts).on_sites(form)
    removed: dict[Move, bool] = {"permute": permutations is not None, "flip": signs}
    if (
        warn
        and (
            share := uncertain_share(
                form, group, 1, [move for move in removed if removed[move]]
            )
        )
        > RARE
    ):
        warnings.warn(
            f"the units' keys overlap: labels are mixed in {share:.0%} of draws; "
            "canonical forms are for comparing "
            "orbits (tests, distances), use align_many or summary for means and "
            "deviations",
            UserWarning,
            stacklevel=2,
        )
    return as_it_came(weights, form)


# small steps --------------------------------------------------------------------------


def _least(weights: Weights, group: Group, rule: ScalingRule) -> Weights:
    """Return weights of minimal mass, or norm; those of pinned units get magnitudes
    near one (:func:`evened`).
    """
    scalings = group.scalings
    shape = group.batch_shape(weights)
    parameters = [
        site
        for site in group.site_shapes
        if site in weights and site not in group.buffers
    ]
    minimum = minimal_mass(
        weights, scalings, sites=parameters if rule == "minimal_norm" else None
    )
    pinned = torch.cat(
        [value.reshape(shape.numel(), -1) for value in minimum.pinned.values()], -1
    )
    if not pinned.any():
        return minimum.weights
    values = {
        site: minimum.weights[site] for site in parameters if scalings.members(site)
    }
    flat = {
        site: value.reshape(-1, *scalings.view_shapes[site])
        for site, value in values.items()
    }
    u = evened(scalings, flat, pinned).reshape(*shape, scalings.size)
    return scalings.element(log_scales=scalings.by_name(u, "scale"))(minimum.weights)


def _centring(weights: Weights, group: Group) -> Element:
    """Return the shift after which the entries of each unit (biases in front of a
    softmax) have mean zero.
    """
    shape = group.batch_shape(weights)
    viewed = group.viewed(weights)
    means = {
        name: entries_of(group, viewed, group.axes(name)).mean(-1)
        for name in group.names("shift")
    }
    return group.element(
        shifts={
            name: -v.reshape(*shape, *group[name].shape) for name, v in means.items()
        }
    )


# uncertainty of labels ----------------------------------------------------------------


def uncertain_share(
    draws: Tensors,
    group: Group,
    odds: float = ODDS,
    moves: Collection[Move] = ("permute", "flip"),
) -> float:
    r"""Return the share of draws in which the labels of two units, or one sign, have
    lower odds than these.

    Averages over a label that units take in turns mix these units; even the best
    labels, of aligned draws, may be uncertain. With independent Gaussians fitted to all
    draws of each unit, the odds of a draw's labels against those with units ``i`` and
    ``j`` exchanged, or with unit ``i`` flipped, are

    .. math:: \frac{\mathcal N(v_i; m_i, s_i^2)\, \mathcal N(v_j; m_j, s_j^2)}
        {\mathcal N(v_j; m_i, s_i^2)\, \mathcal N(v_i; m_j, s_j^2)}, \qquad
        \frac{\mathcal N(v_i; m_i, s_i^2)}{\mathcal N(-v_i; m_i, s_i^2)}.

    The largest share of all sets of units counts. Fewer than 100 draws give 0.
    """
    worst = 0.0
    for move in moves if group.batch_shape(draws).numel() >= FEW else ():
        for units in _units(draws, group, move):
            worst = max(
                worst,
                float(
                    (_log_odds(units, move) < math.log(odds))
                    .any(-1)
                    .double()
                    .mean(0)
                    .max()
                ),
            )
    return worst


def doubtful_axes(draws: Tensors, group: Group) -> list[str]:
    r"""Return the units that rotate whose principal axes aligned draws don't tell.

    With second moments :math:`\lambda` and entries of deviation :math:`\epsilon`, two
    axes turn by :math:`\epsilon \sqrt{\lambda_1 + \lambda_2} / |\lambda_1 - \lambda_2|`
    radians; more than 0.15 is too much.
    """
    group = group.rotations
    doubtful = []
    batch = group.batch_shape(draws)
    flat = {s: draws[s].double().flatten(0, len(batch) - 1) for s in group.sites}
    mean = map_values(lambda value: value.mean(0), flat)
    viewed = group.viewed(mean)
    for name in group.names("rotate") if batch else ():
        unit_set = group[name]
        axes = group.axes(name)
        spread = sum(float(flat[a.site].var(0, correction=0).mean()) for a in axes)
        epsilon = math.sqrt(spread / len(axes))
        units = entries_of(group, viewed, axes).unflatten(
            0, (unit_set.copies, unit_set.size)
        )
        moments = torch.linalg.eigvalsh(units @ units.mT)
        first = moments[:, :-1]
        second = moments[:, 1:]
        angles = epsilon * (first + second).clamp_min(0).sqrt() / (second - first)
        if (angles > MOST_RADIANS).any():
            doubtful.append(name)
    return doubtful


def _units(form: Tensors, group: Group, move: Move) -> Iterator[Tensor]:
    """Iterate over the weights of each set of units at some draws, ``(draws, copies,
    units, weights)``.
    """
    group = group.restricted(move)
    shape = group.batch_shape(form)
    numbers = sum(form[site].numel() for site in group.required_sites) // shape.numel()
    stride = -(-shape.numel() // max(FEW, min(JUDGED, NUMBERS // max(1, numbers))))
    viewed = group.viewed(
        {
            site: form[site].flatten(0, len(shape) - 1)[::stride]
            for site in group.required_sites
        }
    )
    for name in group.names(move):
        axes = [
            a
            for a in group.axes(name)
            if a.site in viewed and (move == "permute" or a.exponent % 2)
        ]
        if axes:  # a sign leaves even powers
            yield (
                entries_of(group, viewed, axes)
                .unflatten(1, (group[name].copies, group[name].size))
                .double()
            )


def _log_odds(units: Tensor, move: Move) -> Tensor:
    """Return log-odds of a draw's labels against those with one sign flipped, or two
    units exchanged.

    :returns: ``(draws, copies, units or pairs)``; of many units at fewer draws.
        Constant weights have precision 1.
    """
    mean = units.mean(0)
    variance = units.var(0, correction=0)
    precision = torch.where(
        variance > LEAST_SPREAD**2 * mean.square(), variance, 1.0
    ).reciprocal()
    if move == "flip":
        return 2 * (units * mean * precision).sum(-1)
    copies, n = units.shape[1:3]
    units = units[: max(1, SCORES // (copies * n**2))]
    # of units (rows) for places
    scores = units @ (mean * precision).mT - 0.5 * units.square() @ precision.mT
    scores -= 0.5 * (mean.square() * precision - precision.log()).sum(-1).unsqueeze(-2)
    own_scores = scores.diagonal(dim1=-2, dim2=-1)
    odds = own_scores.unsqueeze(-1) + own_scores.unsqueeze(-2) - scores - scores.mT
    first, second = torch.triu_indices(n, n, 1, device=units.device)
    return odds[..., first, second]
