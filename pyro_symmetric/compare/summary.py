"""A table of means, deviations and R-hat of draws that are aligned first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyro_symmetric import arguments
from pyro_symmetric.alignment.many import Frame, align_many
from pyro_symmetric.canonical.overlap import RARE, uncertain_share
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.groups.group import Group, group_of
from pyro_symmetric.posterior.posterior import Draws, chains_of


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
