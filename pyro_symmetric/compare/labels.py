"""Certainty of the labels of aligned draws.

A posterior may be exchangeable and yet have one mode: two empty groups, or components
on top of one another. The labels of such units are a matter of chance in each draw, and
aligned draws, which are sorted by it, have other means than those of the posterior. So
a symmetry that was found, which nobody asked to remove, is removed where labels are
certain.
"""

from __future__ import annotations

from typing import NamedTuple

from pyro_symmetric.canonical.forms import FEW, uncertain_share
from pyro_symmetric.discovery.model_carried import moves_in_words
from pyro_symmetric.groups.group import Group
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.posterior.posterior import Posterior

# Labels of a draw are certain if the next best ones are this much less likely. Two
# independent normal numbers, sorted by size, have certain labels in one draw of five.
CERTAIN_ODDS = 20
# The share of draws in which labels may be uncertain.
MOST_UNCERTAIN = 0.25


class Uncertain(NamedTuple):
    """A set of units whose labels are uncertain.

    :param share: of the draws in which the labels of two units, or a sign, have low
        odds; ``None`` if there are too few draws to tell.
    """

    units: str
    move: Move
    share: float | None

    def in_words(self, group: Group) -> str:
        """Describe what is uncertain, and in how many draws."""
        words = moves_in_words(group.only([self.units]).restricted(self.move))
        if self.share is None:
            return f"{words}, as fewer than {FEW} draws tell nothing"
        deed = "two may as well swap" if self.move == "permute" else "one may change"
        return (
            f"{words}, of which {deed} in {self.share:.0%} of the draws (odds under "
            f"{CERTAIN_ODDS} : 1)"
        )


def uncertain_labels(aligned: Posterior, group: Group) -> list[Uncertain]:
    """Return the sets of units whose labels are uncertain in many aligned draws.

    Of fewer than 100 draws nothing is known.
    """
    samples = aligned.samples
    few = aligned.num_chains * aligned.num_samples < FEW
    uncertain = []
    moves: tuple[Move, ...] = ("permute", "flip")
    if few:
        moves = (*moves, "rotate")
    for move in moves:
        for name in group.names(move):
            units = group.restricted(move).only([name])
            share = uncertain_share(samples, units, CERTAIN_ODDS, [move])
            if few or share > MOST_UNCERTAIN:
                uncertain.append(Uncertain(name, move, None if few else share))
    return uncertain
