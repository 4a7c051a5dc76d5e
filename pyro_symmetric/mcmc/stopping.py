"""When a run ends: after as many draws as were asked for, or as many as are needed.

With ``num_samples="auto"`` the draws so far are looked at after 100, 150, 225 ... draws
of each chain (:data:`CHECKS`). The run ends at the first check at which every entry of
every site, and the log density, have :data:`EFFECTIVE` effective draws, of the bulk and
of the tails, and R-hat of :data:`R_HAT` at most: as drawn or, where that fails, modulo
the model's symmetry, which is found then. Otherwise it ends after :data:`MOST_DRAWS`.
With many chains R-hat decides, as it exceeds 1 by the inverse of the effective draws of
a chain: 64 chains need about 5,000 in all.

The decision depends on the draws alone, so that an interrupted run that resumes ends
where it would have ended. To stop when an estimate crosses a threshold favours
estimates that are too high, which biases moments a little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from pyro_symmetric._process import forked
from pyro_symmetric.arguments import Json
from pyro_symmetric.posterior.posterior import FROM_ABOVE, Posterior
from pyro_symmetric.posterior.statistics import (
    chain_statistics,
    evenly_spaced,
    slices,
    standing_still,
)

CHECKS = (100, 150, 225, 337, 506, 759, 1000)  # draws of each chain
MOST_DRAWS = CHECKS[-1]
EFFECTIVE = 1000.0
R_HAT = 1.01
MOST_ENTRIES, ENTRIES_AT_ONCE = 128, 16  # of a site
MOST_ALIGNED = 2**14  # draws of all chains, of which a few seconds are enough to align


class Precision(NamedTuple):
    """Precision of draws, by their worst entries.

    :param effective: least effective sample size of bulk and tails, and no more than
        the number of draws.
    :param r_hat: largest R-hat; 0 if nothing moves.
    """

    effective: float
    r_hat: float = 0.0

    @property
    def suffices(self) -> bool:
        """True if the draws are enough."""
        return self.effective >= EFFECTIVE and 0 < self.r_hat <= R_HAT

    def __str__(self) -> str:
        size = f"{self.effective:,.0f} effective draws"
        if self.suffices:
            return f"at least {size}, R-hat at most {self.r_hat:.3f}"
        return f"at most {size}, R-hat at least {self.r_hat:.3f}"


def precision(values: Iterable[Tensor]) -> Precision:
    """Return the precision of the entries of ``(chains, draws, ...)``, up to the first
    few that don't suffice; of large sites, evenly spaced entries are looked at.

    Entries that never change are left out, as zeros of a triangular matrix are. If they
    change in other chains, nothing suffices.
    """
    result = Precision(math.inf)
    for draws in values:
        if not draws.isfinite().all():
            return Precision(0.0, math.inf)
        entries = draws[..., None].flatten(2)
        entries = entries[..., evenly_spaced(entries.shape[2], MOST_ENTRIES)]
        still = standing_still(entries)
        if (still.any(0) & ~still.all(0)).any():
            return Precision(0.0, math.inf)
        for part in slices(entries.shape[2], ENTRIES_AT_ONCE):
            numbers = chain_statistics(entries[..., part])
            moves = ~numbers.r_hat.isnan()
            if not moves.any():
                continue
            sizes = [numbers.ess_bulk[moves].min(), numbers.ess_tail[moves].min()]
            result = Precision(
                min(result.effective, draws.shape[:2].numel(), *map(float, sizes)),
                max(float(numbers.r_hat[moves].max()), result.r_hat),
            )
            if not result.suffices:
                return result
    return result


class Finding(NamedTuple):
    """Precision of draws, in words too.

    :param agree_modulo_symmetry: whether chains are known to, in each entry.
    """

    precision: Precision
    words: str
    agree_modulo_symmetry: bool

    def metadata(self) -> Json:
        """Return the entries of a posterior's metadata."""
        entries: Json = {"ended": self.words}
        if self.agree_modulo_symmetry:
            entries["agree_modulo_symmetry"] = True
        return entries


def judge(posterior: Posterior) -> Finding:
    """Measure the precision of draws as they are and, if they don't suffice though
    their log density does, modulo symmetry.
    """
    statistics = posterior.statistics
    density = [statistics["lp"]] if "lp" in statistics else []
    result = drawn = precision([*density, *posterior.samples.values()])
    words = str(drawn)
    agree = False
    if not drawn.suffices and precision(density).suffices:
        total = posterior.num_chains * posterior.num_samples
        thinned = posterior.thin(-(-total // MOST_ALIGNED))
        with forked(0):  # what is found depends on the draws alone
            samples = FROM_ABOVE.modulo_symmetry(thinned)
        if samples:
            result = precision([*density, *samples.values()])
            words = f"modulo symmetry {result}; as drawn {drawn}"
            shapes = posterior.site_shapes.values()
            sees_all = all(shape.numel() <= MOST_ENTRIES for shape in shapes)
            agree = sees_all and result.suffices
    verdict = f"too few for {EFFECTIVE:,.0f} effective ones and R-hat {R_HAT}"
    if result.suffices:
        verdict = "enough"
    draws = f"{posterior.num_samples:,} draws of each chain"
    return Finding(result, f"{draws} were {verdict}: {words}", agree)
