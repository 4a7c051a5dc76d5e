"""Draws without their symmetries: each brought to one frame by what its orbit and all draws together say; a table.

*Canonical* forms are functions of a draw's orbit alone. They sort units by one key, and where the keys of two units
overlap they mix the two. In the *aligned* frame units and signs are moved to where all draws lie closest together, by
all that a unit has. Both are functions of orbits and of the set of all draws, never of who drew them: draws that are
exchangeable stay so, and what compares them sees no difference where there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyro_symmetric import arguments
from pyro_symmetric.alignment.many import Frame, align_many
from pyro_symmetric.canonical.forms import RARE, canonicalize, uncertain_share
from pyro_symmetric.discovery.model_check import require_of_posterior
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior.posterior import Draws, Posterior, as_given, chains_of, samples_of
from pyro_symmetric.weights import Weights

SEED = 0  # of the alignment's own random choices: a frame is a function of the draws

Side = TypeVar("Side", Weights, Posterior)
Other = TypeVar("Other", Weights, Posterior)


def canonical_frame(draws: Side, symmetry: Symmetry | Group) -> Side:
    """The draws in canonical form, at the scales of the least norm of all parameters, biases included.

    Biases must count. At unit norm, and at the least norm of weights alone, a unit that is nearly dead has a bias
    without bound, and a few of them decide a distance.
    """
    flat = dict(samples_of(draws))
    return as_given(draws, canonicalize(flat, _comparing(symmetry, flat), scalings="minimal_norm", warn=False))


def one_frame(canonical: Side, symmetry: Symmetry | Group) -> Side:
    """Canonical forms, their units and signs moved to where they lie closest to the mean of all draws.

    A canonical form sorts units by one key, and tells nothing of units whose keys overlap; alignment looks at all that
    a unit has. It starts from canonical forms, so that where it ends depends on the draws' orbits, not on the copies in
    which they came. It takes the draws in the order of their norms, and its random choices from a seed of its own: the
    frame is a function of the set of draws, whichever chain or sample each belongs to. Scales stay as they are.
    """
    flat = samples_of(canonical)
    squares = [value.reshape(len(value), -1).square().sum(1, dtype=torch.float64) for value in flat.values()]
    order = torch.stack(squares).sum(0).argsort()  # an invariant of each draw
    group = _comparing(group_of(symmetry, "symmetry").finite, flat)
    aligned = align_many(_select(flat, order), group, seed=SEED, progress=False).aligned
    return as_given(canonical, _select(aligned, order.argsort()))


def common_frame(weights_p: Side, weights_q: Other, symmetry: Symmetry | Group) -> tuple[Side, Other]:
    """Two sets of draws in one frame, in which distances and tests compare them modulo a symmetry.

    >>> group = ps.Group.declare({"w": ("unit", None)}, {"w": torch.zeros(3, 2)})
    >>> p = {"w": torch.randn(100, 3, 2) + 5 * torch.arange(3.0)[:, None]}
    >>> q = group.sample((80,))({"w": torch.randn(80, 3, 2) + 5 * torch.arange(3.0)[:, None]})
    >>> abs(ps.mmd(*ps.common_frame(p, q, group)).value) < 0.05 < ps.mmd(p, q).value
    True

    Scales become those of the least norm of all parameters; if a prior sees them (a Gaussian one does), they are no
    symmetry of the posterior, and ``symmetry.finite`` removes permutations and signs only. These move to where the
    draws of both sides together lie closest to their mean (see :func:`~pyro_symmetric.alignment.align_many`). Whose
    draw is whose doesn't count, so that draws without a difference show none in their frame. A frame that no other
    draw decides is ``canonicalize(draws, symmetry)``: it mixes units whose largest weights overlap, and blurs what
    differs between them.

    :param weights_p: a ``Posterior``, or site -> samples ``(m,) + site_shape``.
    :param weights_q: the same sites; sites that one side lacks are left out.
    :param symmetry: the group, or a network's symmetry, such as ``find_symmetry(net, x)``.
    :return: both as they came, a ``Posterior`` for a ``Posterior``.
    :raises ValueError: if shapes don't fit, or the model of a posterior lacks a declared group.
    """
    shapes, sides, flat = group_of(symmetry, "symmetry").site_shapes, (weights_p, weights_q), []
    for name, side in zip(("weights_p", "weights_q"), sides, strict=True):
        require_of_posterior(symmetry, side)
        flat.append(canonical_frame(dict(samples_of(side, name, shapes)), symmetry))
    moved: Any = zip(sides, pooled_frame(flat, symmetry), strict=True)
    return tuple(as_given(*pair) for pair in moved)


def pooled_frame(samples: Sequence[Mapping[str, Tensor]], symmetry: Symmetry | Group) -> list[Weights]:
    """Samples in canonical form, ``(draws, *site_shape)`` each, brought into one frame found from all draws together.

    Sites that some sample lacks are left out.
    """
    shared = [site for site in samples[0] if all(site in other for other in samples)]
    sizes = [len(sample[shared[0]]) for sample in samples]
    moved = one_frame({site: torch.cat([sample[site].detach() for sample in samples]) for site in shared}, symmetry)
    parts = {site: value.split(sizes) for site, value in moved.items()}
    return [{site: part[i] for site, part in parts.items()} for i in range(len(samples))]


def summary(posterior: Draws, symmetry: Symmetry | Group | None = None, *, prob: float = 0.9, **alignment: Any) -> None:
    """Print the summary of a posterior: modulo a symmetry if one is given, for which all draws are aligned first.

    Without a symmetry it is ``posterior.summary()``, of the draws as they are. With one, the lines above the table say
    how many draws were moved, which sites the symmetry doesn't know and so leaves as they were drawn, and in how many
    draws labels are uncertain: units that are alike get means of their own all the same. The labels are those in which
    most draws came. A declared group that the posterior's model lacks is refused.

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

    :param posterior: a ``Posterior``, or site -> chains ``(chains, draws, *site_shape)``.
    :param symmetry: whose copies count as one, e.g. ``find_symmetry(net, x)`` or a declared group; ``None``: no copies.
    :param prob: how much of an entry's draws its interval holds, between quantiles.
    :param alignment: options of :func:`~pyro_symmetric.alignment.align_many`, if a symmetry is given.
    """
    arguments.fraction("prob", prob)
    if symmetry is None and not alignment:
        chains_of(posterior).summary(prob)
        return
    group = group_of(symmetry, "symmetry")
    frame = align_many(chains_of(posterior, shapes=group.site_shapes), group, **alignment)
    print("\n".join([*_remarks(frame, group), ""]))
    frame.posterior.summary(prob)


# small steps --------------------------------------------------------------------------------------------------------


def _comparing(symmetry: Symmetry | Group, weights: Mapping[str, Tensor]) -> Group:
    """The group as it acts on weights that are compared, and predict nothing: running statistics may be missing."""
    group = group_of(symmetry, "symmetry")
    return group if all(site in weights for site in group.buffers) else group.without_buffers()


def _select(weights: Mapping[str, Tensor], rows: Tensor) -> Weights:
    return {site: value[rows.to(value.device)] for site, value in weights.items()}


def _remarks(frame: Frame, group: Group) -> Iterator[str]:
    """Lines on what was done to the draws, what was left as drawn, and whether labels could as well be others."""
    posterior, cost = frame.posterior, frame.history
    displaced = frame.displaced.expand(posterior.num_chains, posterior.num_samples)
    yield (
        f"modulo {str(group).splitlines()[0]}: aligned, {int(displaced.sum()):,} of {displaced.numel():,} draws moved, "
        f"mean {frame.objective} cost {cost[0]:.4g} -> {cost[-1]:.4g}{'' if frame.converged else ', cut short'}"
    )
    if unknown := [site for site in posterior.samples if site not in group.site_shapes]:
        yield (
            f"left as drawn: the sites {unknown}, which the symmetry doesn't know. If their entries belong to its "
            "units, declare them too, or they no longer fit the aligned sites"
        )
    if (share := uncertain_share(posterior.samples, group)) > RARE:
        yield (
            f"labels are uncertain: in {share:.0%} of the draws units could as well change places or signs (odds under "
            "3 : 1), so means and standard deviations of single units depend on their labels"
        )
    if not frame.starts_agree:
        ends = ", ".join(f"{end:.4g}" for end in frame.ends)
        yield f"starts disagree: their frames cost {ends}; the least is kept, more restarts may find a better one"
