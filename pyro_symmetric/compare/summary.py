"""A table of means, deviations and R-hat of draws that are aligned first."""

from __future__ import annotations

from typing import Any

from pyro_symmetric import arguments
from pyro_symmetric.alignment.many import Frame, align_many
from pyro_symmetric.canonical.overlap import RARE, uncertain_share
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior import Posterior


def summary(
    posterior: Posterior, symmetry: Symmetry | Group | None = None, *, prob: float = 0.9, **alignment: Any
) -> None:
    """Print the summary of a posterior: modulo a symmetry if one is given, for which all draws are aligned first.

    Without a symmetry it is ``posterior.summary()``, of the draws as they are. With one, the lines above the table say
    how many draws were moved, which sites the symmetry doesn't know and so leaves as they were drawn, and in how many
    draws labels are uncertain: units that are alike get means of their own all the same. The labels are those in which
    most draws came. A declared group that the posterior's model lacks is refused.

    >>> group = ps.Group.declare({"locs": ("k",)}, {"locs": torch.zeros(2)})
    >>> locs = torch.tensor([-3.0, 5.0]) + 0.01 * torch.randn(4, 50, 2)
    >>> locs[1] = locs[1].flip(-1)  # one chain has the components in the other order
    >>> ps.summary(ps.Posterior({"locs": locs}, rows="chains"), group)  # doctest: +ELLIPSIS
    modulo Group of log-order 0.7: aligned, 50 of 200 draws moved, ...
    <BLANKLINE>
                 mean       std    median      5.0%     95.0%     n_eff     r_hat
    locs[0]     -3.00      0.01     -3.00 ...
    locs[1]      5.00      0.01      5.00 ...

    The aligned draws themselves are ``align_many(posterior, symmetry).posterior``.

    :param posterior: the draws.
    :param symmetry: whose copies count as one, e.g. ``find_symmetry(net, x)`` or a declared group; ``None``: no copies.
    :param prob: how much of an entry's draws its interval holds, between quantiles.
    :param alignment: options of :func:`~pyro_symmetric.alignment.align_many`, if a symmetry is given.
    """
    arguments.instance("posterior", posterior, Posterior, "a Posterior")
    arguments.fraction("prob", prob)
    if symmetry is None and not alignment:
        posterior.summary(prob)
        return
    group = group_of(symmetry, "symmetry")
    arguments.options(summary, alignment, align_many)
    frame = align_many(posterior, group, **alignment)
    print("\n".join([_head(frame, group), *_unknown(frame, group), *_doubt(frame, group), ""]))
    frame.posterior.summary(prob)


# small steps --------------------------------------------------------------------------------------------------------


def _head(frame: Frame, group: Group) -> str:
    """The line on what was done to the draws."""
    posterior, cost = frame.posterior, frame.history
    displaced = frame.displaced.expand(posterior.num_chains, posterior.num_samples)
    return (
        f"modulo {str(group).splitlines()[0]}: aligned, {int(displaced.sum()):,} of {displaced.numel():,} draws moved, "
        f"mean {frame.objective} cost {cost[0]:.4g} -> {cost[-1]:.4g}{'' if frame.converged else ', cut short'}"
    )


def _unknown(frame: Frame, group: Group) -> list[str]:
    """The sites that a declaration forgot, or that no unit has."""
    unknown = [site for site in frame.posterior.samples if site not in group.site_shapes]
    if not unknown:
        return []
    return [
        f"left as drawn: the sites {unknown}, which the symmetry doesn't know. If their entries belong to its units, "
        "declare them too; as it is they no longer fit the aligned sites"
    ]


def _doubt(frame: Frame, group: Group) -> list[str]:
    """Lines if the labels could as well be others, or other starts found others."""
    lines, share = [], uncertain_share(frame.posterior.samples, group)
    if share > RARE:
        lines.append(
            f"labels are uncertain: in {share:.0%} of the draws units could as well change places or signs (odds "
            "under 3 : 1), so means and deviations of single units depend on how they were labelled"
        )
    if not frame.starts_agree:
        lines.append(
            f"starts disagree: their frames cost {', '.join(f'{end:.4g}' for end in frame.ends)}; the least is kept, "
            "and more restarts may find a better one"
        )
    return lines
