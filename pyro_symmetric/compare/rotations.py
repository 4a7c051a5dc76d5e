"""Aligned draws of units that rotate: how certain their common frame is, and what is
the same in all frames.

Where the data determine units poorly, each draw can be turned to many frames that fit
all draws about as well: deviations of single entries then say more of the alignment
than of the posterior. Inner products of entries, and communalities (sums of squares
over units), are the same in all frames.
"""

from __future__ import annotations

from pyro_symmetric.canonical.forms import MOST_RADIANS
from pyro_symmetric.canonical.order import entries_of
from pyro_symmetric.distributions.rotations import MOST_UNITS, angular_spread
from pyro_symmetric.groups.group import Group
from pyro_symmetric.posterior.posterior import Posterior
from pyro_symmetric.posterior.statistics import chain_statistics
from pyro_symmetric.weights import Weights

MOST_ELSEWHERE = 0.05  # of the density along an orbit, around other modes
MOST_ENTRIES = 32  # of a site, whose products are shown


def in_certain_frames(
    posterior: Posterior, group: Group
) -> tuple[Posterior, list[str]]:
    """Return aligned draws, in which invariants take the place of units whose common
    frame is uncertain, and a line on each set of units that rotate.
    """
    shown, lines = dict(posterior.samples), list[str]()
    for name in group.names("rotate"):
        fixed = invariants(posterior.samples, group, name)
        r_hats = ""
        if posterior.kind == "chains":
            worst = max(chain_statistics(v).r_hat.max() for v in fixed.values())
            r_hats = f", with R-hats up to {float(worst):.3f}"
        uncertain = _uncertainty(posterior.samples, group, name)
        if uncertain:
            for axis in group.axes(name):
                shown.pop(axis.site, None)
            shown |= fixed
            lines.append(
                f"{name!r} have no certain frame, {uncertain}: communalities and "
                f"products are shown instead{r_hats}"
            )
        else:
            lines.append(
                f"intervals of {name!r} are conditional on their common frame; their "
                f"communalities and products are not{r_hats}"
            )
    return posterior.map(lambda _: shown), lines


def invariants(samples: Weights, group: Group, name: str) -> Weights:
    """Return communalities of all entries of each site along which units rotate, copy
    by copy if there are several, and their products if they are few.
    """
    viewed, fixed = group.viewed(samples), Weights()
    for axis in group.axes(name):
        if axis.site in samples:
            units = entries_of(group, viewed, [axis])
            units = units.unflatten(-2, (group[name].copies, group[name].size))
            fixed[f"{axis.site} communalities"] = units.square().sum(-2).squeeze(-2)
            if units.shape[-1] <= MOST_ENTRIES:
                fixed[f"{axis.site} products"] = (units.mT @ units).squeeze(-3)
    return fixed


def _uncertainty(samples: Weights, group: Group, name: str) -> str:
    """Return why the common frame of some units is uncertain; empty if certain."""
    unit_set, axes = group[name], [a for a in group.axes(name) if a.site in samples]
    if unit_set.size > MOST_UNITS:
        return f"or none that is known for more than {MOST_UNITS} units"
    units = entries_of(group, group.viewed(samples), axes).flatten(0, 1)
    copies = units.unflatten(1, (unit_set.copies, unit_set.size)).unbind(1)
    spreads = [angular_spread(copy) for copy in copies] if unit_set.size > 1 else []
    radians = max((float(spread.radians.max()) for spread in spreads), default=0.0)
    elsewhere = max((spread.elsewhere for spread in spreads), default=0.0)
    if radians <= MOST_RADIANS and elsewhere <= MOST_ELSEWHERE:
        return ""
    return (
        f"as draws turn by {radians:.2f} rad in it, and {elsewhere:.0%} of their "
        "density lies in others"
    )
