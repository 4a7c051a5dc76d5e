r"""Coordinate descent over permutations, signs and scales, for a batch of sources at once.

The objective falls with the inner product of the reference's features :math:`A` with the moved features
:math:`g \cdot B` of the source. With all factors but one held, it is linear in the permutation matrix of that one:

.. math:: \max_{\pi \in S_n} \sum_i S_{i \pi(i)}, \qquad S_{ij} = \max_{\sigma_j, \lambda_j}
    \langle A_i, \sigma_j \lambda_j (g_{\text{others}} \cdot B)_j \rangle - \dots

summed over every axis on which the factor lies; signs and scales that belong to the units are chosen for every pair
(:mod:`~pyro_symmetric.alignment.costs.rescale`), and units inside units are matched for every pair of the outer ones.
Where a factor lies on two axes of one site (a recurrent matrix, tied streams) the objective is quadratic in it and
:math:`S` its linearisation at the current element; the step is shortened until the true objective falls.

Two habits make this fast and good (compare Ainsworth et al. 2023, arXiv 2209.04836, Algorithm 1, which starts at the
identity and visits every factor in every sweep): the *forward start* solves each factor from those terms alone whose
other factors are already fixed, so that nothing is matched against units that lie in no meaningful order yet; the
*work-list* then re-solves only those factors whose neighbours have changed, from cached blocks of :math:`S`. Further
descents visit the factors in random order, from a *kick* of the best element so far (iterated local search).

All sources of a batch go through the same moves together; those for which there is nothing to do sit out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pyro_symmetric.alignment.costs.cost import Cost
from pyro_symmetric.alignment.costs.scores import Scorer
from pyro_symmetric.alignment.descent.descent import Descent, Events
from pyro_symmetric.alignment.descent.nesting import decide_units
from pyro_symmetric.alignment.parts.moves import moves_of
from pyro_symmetric.alignment.parts.problem import Parts
from pyro_symmetric.alignment.parts.state import State
from pyro_symmetric.alignment.parts.units import Move

# How many units a kick shuffles. On random networks of widths 16 to 256, shares of 0.2 and 0.3 ended lowest among
# 0.1 to 1; in tiny layers, six units (that is, all) reached the enumerated optimum more often than two to four.
KICKED_UNITS = 6
KICKED_SHARE = 0.25
# How often at most to shorten the step of a factor that is coupled with itself; a third time was never needed.
SHORTER_STEPS = 3
# How much more than another a step has to gain that changes scales alone: descents over scales of many layers converge
# slowly, by ever smaller steps that no one will notice.
SCALE_STEPS = 100.0


class Matcher:
    """The matching of a batch of sources to a reference.

    :param parts: what may be decided.
    :param reference: site -> moments of the reference, ``(1, *view_shape, channels)``, or of one for each source.
    :param source: site -> moments, ``(B, *view_shape, channels)``.
    :param cost: which cost to minimise.
    :param moves: what to decide; all of ``parts``, if left out.
    """

    def __init__(
        self,
        parts: Parts,
        reference: Mapping[str, Tensor],
        source: Mapping[str, Tensor],
        cost: Cost,
        moves: Sequence[Move] | None = None,
    ):
        self._cost = cost
        self._reference, self._source = dict(reference), dict(source)
        example = next(iter(source.values()), torch.zeros(1))
        self.batch, self.device = len(example), example.device
        self.moves = moves_of(parts.roots, parts.rescalings, set(source)) if moves is None else list(moves)
        self._scorer = Scorer(parts, self._reference, self._source, cost)
        # Row m: the moves to look at again when move m has changed something.
        self._coupled = torch.tensor(
            [[any(term.depends & m.actors for term in other.terms) for other in self.moves] for m in self.moves],
            dtype=torch.bool,
        ).reshape(len(self.moves), len(self.moves))
        self.parts = parts
        self._sites = list(source)

    @property
    def kickable(self) -> list[int]:
        """Numbers of the moves that a kick shuffles: coupled units, or else coupled signs.

        Without coupling, one assignment each is the exact optimum; between scales there are no barriers to jump over.
        """
        coupled = [m for m in range(len(self.moves)) if bool(self._coupled[m].any())]
        units = [m for m in coupled if self.moves[m].root is not None]
        return units or [m for m in coupled if (self.moves[m].multiplier or ("",))[0] == "sign"]

    def identity(self) -> State:
        """Nothing is moved."""
        return State.identity(self.parts, self.batch, self.device)

    def costs(self, state: State, rows: Tensor, sites: Sequence[str] | None = None) -> Tensor:
        """Cost of each site for some of the sources, summed in float64: ``(rows, sites)``, on the CPU.

        :param state: of these sources alone.
        """
        columns = [
            self._cost.distance(self._of(self._reference, site, rows), self._scorer.moved(site, state, rows))
            .flatten(1)
            .sum(1, dtype=torch.float64)
            for site in (self._sites if sites is None else sites)
        ]
        return torch.stack(columns, 1).cpu() if columns else torch.zeros(len(rows), 0, dtype=torch.float64)

    def forward_start(self) -> tuple[State, Tensor]:
        """Decide one move after the other, each from the terms whose other factors are fixed already.

        Next comes the move of which the largest part is known, so a chain of layers is walked from its wide end.

        :returns: the state, and the moves ``(B, moves)`` for which some term could not be used yet.
        """
        state, rows = self.identity(), torch.arange(self.batch)
        waiting, fixed = list(range(len(self.moves))), set[str]()
        unsettled = torch.zeros(self.batch, len(self.moves), dtype=torch.bool)
        while waiting:
            m = max(waiting, key=lambda m: self._known_share(self.moves[m], fixed))  # the first of several
            move = self.moves[m]
            usable = [k for k, term in enumerate(move.terms) if fixed.issuperset(term.depends)]
            if usable:
                state.put(rows, self._decide(move, state, rows, usable), move.actors)
            unsettled[:, m] = len(usable) < len(move.terms)
            waiting.remove(m)
            fixed |= move.actors
        return state, unsettled

    def kicked_start(self, state: State, rows: Tensor) -> tuple[State, Tensor, Tensor]:
        """Shuffle some units (or flip some signs) of one random factor of each source: starts near a good matching.

        They lie in other basins. Starts that are random altogether hardly ever beat the forward start in wide networks;
        small kicks mostly do.

        :param state: of the sources ``rows``.
        :returns: the new state, the moves to look at, and those to look at after them: the kicked ones themselves.
        """
        state = state.copy()
        names = self.kickable
        chosen = torch.tensor(names)[torch.randint(len(names), (len(rows),))]
        first = torch.zeros(len(rows), len(self.moves), dtype=torch.bool)
        later = first.clone()
        for m in names:
            hit = (chosen == m).nonzero().flatten()
            move = self.moves[m]
            if not len(hit):
                continue
            if move.root is not None:
                image = state.images[move.root.name]
                image[hit.to(image.device)] = _shuffled(image[hit.to(image.device)])
                state.touch(hit, [move.root.name])
            elif move.multiplier is not None:
                signs = state.multipliers["sign"]
                own = signs[hit.to(signs.device), self.parts.offsets("sign")[move.multiplier[1]]]
                signs[hit.to(signs.device), self.parts.offsets("sign")[move.multiplier[1]]] = _flipped(own)
                state.touch(hit, move.actors)
            first[hit] = self._coupled[m]
            first[hit, m] = False
            later[hit, m] = True
        return state, first, later

    def descend(
        self,
        state: State,
        waiting: Tensor,
        *,
        rows: Tensor | None = None,
        later: Tensor | None = None,
        max_sweeps: int,
        threshold: Tensor,
        shuffled: bool = False,
    ) -> Descent:
        """Re-decide moves until none improves the cost by more than ``threshold``.

        :param state: of the sources ``rows``; it isn't changed.
        :param waiting: bool ``(rows, moves)``: the moves to look at first; others follow when a neighbour changes.
        :param rows: the sources; all, if left out.
        :param later: moves to look at once these have been.
        :param max_sweeps: how often at most to go through the moves that wait.
        :param threshold: ``(rows,)``.
        :param shuffled: whether to visit the moves in random order.
        """
        rows = torch.arange(self.batch) if rows is None else rows
        state, waiting = state.copy(), waiting.clone()
        costs = self.costs(state, rows)
        total = costs.sum(1)
        events: Events = [(torch.arange(len(rows)), total.clone())]
        for _ in range(max_sweeps):
            order = torch.randperm(len(self.moves)) if shuffled else torch.arange(len(self.moves))
            for m in order.tolist():
                looking = waiting[:, m].nonzero().flatten()
                if not len(looking):
                    continue
                waiting[looking, m] = False
                accepted = self._step(self.moves[m], state, rows, looking, costs, total, threshold)
                if len(accepted):
                    events.append((accepted, total[accepted]))
                    waiting[accepted] |= self._coupled[m]
            if later is not None:
                waiting, later = waiting | later, None
            if not bool(waiting.any()):
                break
        return Descent(state, total, events, ~waiting.any(1))

    # small steps ----------------------------------------------------------------------------------------------------

    def _step(
        self, move: Move, state: State, rows: Tensor, looking: Tensor, costs: Tensor, total: Tensor, threshold: Tensor
    ) -> Tensor:
        """Decide one move for some sources, and accept where that improves; returns the sources that accepted.

        Where a move is coupled with itself its scores are a linearisation. Shorter steps follow, by a growing bonus for
        units that stay. It adds a constant to the (maximised) objective and makes it convex in the end; a convex
        objective lies nowhere below its linearisation, so that the step can't fail.
        """
        sites = list(dict.fromkeys(term.place[0] for term in move.terms))
        columns = [self._sites.index(site) for site in sites]
        taken = []
        for shorter in range(1 + SHORTER_STEPS if move.moves_itself else 1):
            here = state.rows(looking)
            proposal = self._decide(move, here, rows[looking], None, shorter)
            changed, rearranged = here.differs(proposal, move)
            looking, proposal = looking[changed], proposal.rows(changed.nonzero().flatten())
            least = threshold[looking] * torch.where(rearranged[changed], 1.0, SCALE_STEPS)
            if not len(looking):
                break
            found = self.costs(proposal, rows[looking], sites)
            fallen = (costs[looking][:, columns] - found).sum(1)
            good = fallen > least
            accepted = looking[good]
            if len(accepted):
                state.put(accepted, proposal.rows(good.nonzero().flatten()), move.actors)
                costs[accepted.unsqueeze(1), torch.tensor(columns)] = found[good]
                total[accepted] = costs[accepted].sum(1)
                taken.append(accepted)
            looking = looking[~good]
            if not len(looking):
                break
        return torch.cat(taken) if taken else torch.zeros(0, dtype=torch.long)

    def _decide(
        self, move: Move, state: State, rows: Tensor, usable: Sequence[int] | None = None, shorter: int = 0
    ) -> State:
        """The best element of one move given the others.

        :param state: of the sources ``rows``; it isn't changed.
        :param usable: numbers of the move's terms to look at; all, if left out.
        :param shorter: how often the step was shortened, of a move that is coupled with itself.
        """
        new = state.copy()
        terms = [term for k, term in enumerate(move.terms) if usable is None or k in usable]
        if move.multiplier is not None:
            self._scorer.decide_multiplier(move, terms, state, new, rows, shorter)
            return new
        choices = {units.name: self._scorer.choices(move, units, terms, state, rows) for units in move.active}
        decide_units(move, choices, state, new, shorter)
        return new

    def _known_share(self, move: Move, fixed: set[str]) -> float:
        """Which part of a move's weights lies in terms whose other factors are fixed."""
        sizes = [(self._scorer.size(term), fixed.issuperset(term.depends)) for term in move.terms]
        return sum(size for size, known in sizes if known) / max(1, sum(size for size, _ in sizes))

    def _of(self, moments: Mapping[str, Tensor], site: str, rows: Tensor) -> Tensor:
        value = moments[site]
        return value if len(value) == 1 or len(rows) == len(value) else value[rows.to(value.device)]


def _flipped(signs: Tensor) -> Tensor:
    """Flip some entries of each row of ``(B, n)``, one at least."""
    draws = torch.rand(signs.shape)
    flips = (draws <= draws.amin(-1, keepdim=True).clamp_min(KICKED_SHARE)).to(signs.device)
    return torch.where(flips, -signs, signs)


def _shuffled(images: Tensor) -> Tensor:
    """Shuffle some entries of each row of ``(B, n)`` among themselves."""
    n = images.shape[-1]
    count = min(n, max(KICKED_UNITS, int(KICKED_SHARE * n)))
    units = torch.rand(len(images), n).argsort(-1)[:, :count]
    to = units.gather(-1, torch.rand(len(images), count).argsort(-1)).to(images.device)
    units = units.to(images.device)
    return images.scatter(-1, units, images.gather(-1, to))
