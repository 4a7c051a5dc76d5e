"""Draws with their symmetries removed: one representative of each orbit, in a frame
common to all draws.

A *canonical form* is a function of a draw's orbit alone. It sorts units by one key, and
mixes units whose keys overlap. The *aligned frame* moves units and signs to where all
draws lie closest together, by all weights of a unit. Both are functions of the orbits
and of the set of all draws, not of the chain or sample that a draw belongs to. So
exchangeable draws stay exchangeable, and a comparison in the frame sees no difference
where there is none.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.alignment.many import Frame, align_many
from pyro_symmetric.arguments import Keywords
from pyro_symmetric.canonical.forms import (
    RARE,
    canonicalize,
    doubtful_axes,
    uncertain_share,
)
from pyro_symmetric.compare.labels import uncertain_labels
from pyro_symmetric.compare.rotations import in_certain_frames
from pyro_symmetric.discovery.model_carried import (
    AUTO,
    Auto,
    Carried,
    carried_symmetry,
    moves_in_words,
)
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior.posterior import (
    Draws,
    Posterior,
    as_given,
    chains_of,
    samples_of,
)
from pyro_symmetric.weights import Tensors, Weights, map_values, select_rows

if TYPE_CHECKING:
    from pyro_symmetric.posterior.summaries import Summary

SEED = 0  # of the alignment, so that a frame is a function of the draws

Side = TypeVar("Side", Weights, Posterior)
Other = TypeVar("Other", Weights, Posterior)


def canonical_frame(draws: Side, symmetry: Symmetry | Group) -> Side:
    """Bring draws to canonical form, at the scales that minimise the norm of all
    parameters, biases included.

    With unit norms, or the least norm of the weights alone, the bias of a nearly dead
    unit is unbounded, and a few such units dominate a distance.
    """
    flat = dict(samples_of(draws))
    return as_given(
        draws,
        canonicalize(
            flat, _group_on(symmetry, flat), scalings="minimal_norm", warn=False
        ),
    )


def one_frame(canonical: Side, symmetry: Symmetry | Group) -> Side:
    """Align canonical forms: permute, flip and turn units to where draws lie closest to
    their common mean; scales stay.

    Starting from canonical forms, the result depends on the draws' orbits, not on the
    copies in which they came. The draws are aligned in the order of their norms, with a
    fixed seed, so that the frame is a function of the set of draws, whichever chain or
    sample each belongs to.
    """
    flat = samples_of(canonical)
    squares = [
        value.reshape(len(value), -1).square().sum(1, dtype=torch.float64)
        for value in flat.values()
    ]
    order = torch.stack(squares).sum(0).argsort()  # by an invariant of each draw
    group = _group_on(group_of(symmetry).compact, flat)
    aligned = align_many(_select(flat, order), group, seed=SEED, progress=False).aligned
    return as_given(canonical, _select(aligned, order.argsort()))


def frame_of_orbits(draws: Side, symmetry: Symmetry | Group) -> Side:
    """Remove a symmetry from draws: align their canonical forms."""
    return one_frame(canonical_frame(draws, symmetry), symmetry)


def common_frame(
    weights_p: Side, weights_q: Other, symmetry: Symmetry | Group | Auto | None = AUTO
) -> tuple[Side, Other]:
    """Bring two sets of draws into one frame, in which distances and tests compare them
    modulo a symmetry.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> p = {"w": torch.randn(100, 3, 2) + 5 * torch.arange(3.0)[:, None]}
    >>> q = group.sample((80,))(
    ...     {"w": torch.randn(80, 3, 2) + 5 * torch.arange(3.0)[:, None]}
    ... )
    >>> abs(ps.mmd(*ps.common_frame(p, q, group)).value) < 0.05 < ps.mmd(p, q).value
    True

    Units are scaled to the least norm of all parameters. If the prior isn't invariant
    under scaling (a Gaussian one is not), scalings are no symmetry of the posterior:
    pass ``symmetry.finite``. Then units are permuted, flipped and turned to where the
    draws of both sides lie closest to their common mean (see
    :func:`~pyro_symmetric.alignment.align_many`). The frame doesn't depend on which
    side a draw is on, so equal distributions show no difference in it.
    ``canonicalize(draws, symmetry)`` is a frame of each draw by itself, but mixes units
    whose largest weights overlap, and so blurs differences.

    :param weights_p: a ``Posterior``, or site -> samples ``(m,) + site_shape``.
    :param weights_q: the same sites; sites that one side lacks are left out.
    :param symmetry: the group, or a network's symmetry, such as ``find_symmetry(net,
        x)``. ``"auto"``: that of the model of a posterior among the two; if there is
        none, draws stay as they are, with a warning.
    :returns: both sides, a ``Posterior`` for a ``Posterior``.
    :raises ValueError: if shapes don't fit, or the model of a posterior lacks a
        declared group.
    """
    sides = (weights_p, weights_q)
    carried = carried_symmetry(symmetry, *sides)
    group = carried.group
    if carried.is_trivial:
        if carried.line:
            warnings.warn(carried.line, stacklevel=2)
        return sides
    flat = []
    for name, side in zip(("weights_p", "weights_q"), sides, strict=True):
        samples = dict(samples_of(side, name, group.site_shapes))
        flat.append(canonical_frame(samples, group))
    moved = zip(sides, pooled_frame(flat, group), strict=True)
    return tuple(as_given(*pair) for pair in moved)


def pooled_frame(
    samples: Sequence[Tensors], symmetry: Symmetry | Group
) -> list[Weights]:
    """Align canonical forms ``(draws, *site_shape)`` of several samples with each
    other, in the sites that all have.
    """
    shared = [
        site
        for site in samples[0]
        if all(site in side_samples for side_samples in samples)
    ]
    sizes = [len(sample[shared[0]]) for sample in samples]
    moved = one_frame(
        {
            site: torch.cat([sample[site].detach() for sample in samples])
            for site in shared
        },
        symmetry,
    )
    parts = map_values(lambda value: value.split(sizes), moved)
    return [select_rows(parts, i) for i in range(len(samples))]


def summary(
    posterior: Draws,
    symmetry: Symmetry | Group | Auto | None = AUTO,
    *,
    prob: float = 0.9,
    **alignment: Any,
) -> Summary:
    """Summarise a posterior in a data frame; modulo a symmetry, its draws are aligned
    first.

    The symmetry is that of the posterior's model, which is removed where labels are
    certain in most draws, and with it rotations; a line says what was aligned, and what
    was left as drawn and why. Without a symmetry it prints as ``posterior.summary()``
    does.

    With a symmetry that is given, lines above the table say how many draws were moved,
    which sites the symmetry doesn't act on, and in how many draws labels are uncertain:
    units that can't be told apart get means of their own nevertheless. Labels are those
    of the majority of draws. A declared group that the posterior's model lacks is
    refused.

    >>> group = ps.Group.declare({"locs": ("k",)}, {"locs": torch.zeros(2)})
    >>> locs = torch.tensor([-3.0, 5.0]) + 0.01 * torch.randn(4, 50, 2)
    >>> locs[1] = locs[1].flip(-1)  # one chain has the components in the other order
    >>> ps.summary({"locs": locs}, group)  # doctest: +ELLIPSIS
    modulo Group of log-order 0.7: aligned, 50 of 200 draws moved, ...
    <BLANKLINE>
                 mean       std    median      5.0%     95.0%     n_eff     r_hat
    locs[0]     -3.00      0.01     -3.00 ...
    locs[1]      5.00      0.01      5.00 ...

    The aligned draws themselves are ``align_many(posterior, symmetry).posterior``.

    :param posterior: a ``Posterior``, or site -> chains ``(chains, draws,
        *site_shape)``.
    :param symmetry: the symmetry to remove, e.g. ``find_symmetry(net, x)`` or a
        declared group; ``"auto"``: that of the posterior's model, if it is known;
        ``None``: none.
    :param prob: the probability of the intervals, between quantiles.
    :param alignment: options of :func:`~pyro_symmetric.alignment.align_many`.
    """
    arguments.fraction("prob", prob)
    carried = carried_symmetry(symmetry, posterior)
    shapes = None if carried.is_trivial else carried.group.site_shapes
    chains = chains_of(posterior, shapes=shapes)
    lines: list[str] = []
    if carried.is_found or not carried.is_trivial:
        chains, lines = _aligned(chains, carried, alignment)
    return chains.summarised(prob, lines)


def _aligned(
    posterior: Posterior, carried: Carried, alignment: Keywords
) -> tuple[Posterior, list[str]]:
    """Align draws modulo a symmetry, of one that was found only the units whose labels
    are certain, and its rotations; return them, and what was done.
    """
    group = carried.group
    left = list[str]()
    told = list[str]()
    if carried.is_found:
        group = group.compact
        told = carried.line.splitlines()[1:]
        alignment = {"seed": SEED, **alignment}
    while group.units:
        frame = align_many(posterior, group, **alignment)
        uncertain = uncertain_labels(frame.posterior, group) if carried.is_found else []
        if not uncertain:
            left += _left_as_drawn(frame.posterior, group, posterior, carried)
            shown, frames = in_certain_frames(frame.posterior, group)
            remarks = [*left, *_remarks(frame, group), *frames, *told]
            return shown, [_moved(frame, group, carried), *remarks]
        for labels in uncertain:
            left.append(f"left as drawn: {labels.in_words(group)}")
        for labels in uncertain:
            group = group.without([labels.units], labels.move)
    return posterior, [*left, *told] if left else carried.line.splitlines()


# small steps --------------------------------------------------------------------------


def _group_on(symmetry: Symmetry | Group, weights: Tensors) -> Group:
    """Return the group that acts on weights to be compared: without running statistics,
    if these are missing.
    """
    group = group_of(symmetry)
    return (
        group
        if all(site in weights for site in group.buffers)
        else group.without_buffers()
    )


def _select(weights: Tensors, rows: Tensor) -> Weights:
    return map_values(lambda value: value[rows.to(value.device)], weights)


def _moved(frame: Frame, group: Group, carried: Carried) -> str:
    """Return a line on the draws that were moved."""
    modulo = carried.line or f"modulo {str(group).splitlines()[0]}"
    if carried.is_found:
        modulo = f"modulo {moves_in_words(group)}, found in the model"
    posterior = frame.posterior
    cost = frame.history
    displaced = frame.displaced.expand(posterior.num_chains, posterior.num_samples)
    return (
        f"{modulo}: aligned, {int(displaced.sum()):,} of {displaced.numel():,} draws "
        f"moved, mean {frame.objective} cost {cost[0]:.4g} -> "
        f"{cost[-1]:.4g}{'' if frame.converged else ', cut short'}"
    )


def _left_as_drawn(
    aligned: Posterior, group: Group, drawn: Posterior, carried: Carried
) -> Iterator[str]:
    """Yield a remark on sites that are left out, or of which a declaration may say too
    little.
    """
    if carried.is_found:
        if dropped := sorted(drawn.samples.keys() - aligned.samples.keys()):
            yield (
                f"{dropped} belong to the draws as they were and are left out; "
                "predict computes them anew"
            )
        return
    counts = {unit_set.count for unit_set in group.units.values()}
    moved = {*group.site_shapes}
    if not group.of_network:  # its example may hold sites that its axes don't name
        moved -= {
            s
            for s, shape in group.site_shapes.items()
            if s not in group.sites and counts & {*shape}
        }
    if unknown := [site for site in aligned.samples if site not in moved]:
        yield (
            f"left as drawn: the sites {unknown}, on which the symmetry doesn't act. "
            "If their entries belong to its "
            "units, declare them too, or they no longer match the aligned sites"
        )


def _remarks(frame: Frame, group: Group) -> Iterator[str]:
    """Yield remarks on the alignment: uncertain labels, starts that disagree."""
    permuted = group.without(group.names("rotate"))
    share = uncertain_share(frame.posterior.samples, permuted)
    if share > RARE:
        yield (
            f"labels are uncertain: in {share:.0%} of the draws units could as well "
            "swap, or change signs (odds under "
            "3 : 1), so the means and standard deviations of single units depend on "
            "their labels"
        )
    for name in doubtful_axes(frame.posterior.samples, group):
        yield (
            f"the principal axes of {name!r} are close to arbitrary: two of their "
            "second moments are too close for the spread of the draws, or zero; "
            "intervals hold in this frame alone"
        )
    if not frame.starts_agree:
        ends = ", ".join(f"{end:.4g}" for end in frame.ends)
        yield (
            f"starts disagree: their frames cost {ends}. The best is kept; more "
            "restarts may find a better one"
        )
