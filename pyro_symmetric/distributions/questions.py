"""Matchings that several walks through sets of units ask for at the same time, and doubly stochastic matrices likewise.

In a network of equal layers each walk is at a set of the same size as the others' at every step. Matrices of one shape
are handled as one batch: of small ones, calls of operators rather than their work are what takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.distributions.matchings import (
    certain_first,
    doubly_stochastic,
    draw_matchings,
    log_probability,
    with_spread,
    without_constants,
)

# Numbers of a matrix up to which those of several walks are handled at once; beyond, copying them takes longer.
TOGETHER = 2**18
# Alternations of rows and columns for what is expected of sets to come: what is drawn from them is scaled anew.
ROUGHLY = 6


@dataclass(frozen=True, eq=False)
class Matrix:
    """The matrices from which matchings of one set of units are drawn; ``M`` counts draws times copies.

    :param densities: log-densities, up to a constant for each place, ``(L, M, n, n)``.
    :param rows: distributions of each place, likewise.
    :param rank: of each place in the order in which they are filled, ``(L, M, n)``.
    """

    densities: Tensor
    rows: Tensor
    rank: Tensor

    @classmethod
    def of(cls, densities: Tensor, precision: torch.dtype) -> Matrix:
        densities = centred(densities, precision)
        rows = with_spread(doubly_stochastic(densities, centred=True))
        return cls(densities, rows, certain_first(rows))

    def drawn(self, count: int) -> Tensor:
        """The identity and ``count`` matchings, ``(count + 1, M, n)``."""
        batch, n = self.rank.shape[1:]
        own = (self.densities[1:], self.rows[1:]) if len(self.rows) > 1 else (self.densities, self.rows)
        identity = torch.arange(n, device=self.rank.device).expand(1, batch, n)
        return torch.cat([identity, draw_matchings(*own, self.rank.expand(count + 1, batch, n)[1:])])

    def log_probability(self, matched: Tensor) -> Tensor:
        """Of matchings, ``(K + 1, M, n)`` -> ``(K + 1, M)``."""
        return log_probability(self.densities, self.rows, self.rank.expand(matched.shape), matched)


@dataclass(frozen=True, eq=False)
class Question:
    """A question of a walk: matchings of one set of units, or the probabilities of given ones.

    :param matrix: or the log-densities ``(L, M, n, n)`` that it is to be made of.
    :param given: the matchings, ``(K + 1, M, n)``; drawn if None.
    :param count: how many are drawn besides the identity.
    :param scored: whether probabilities are wanted.
    """

    matrix: Matrix | Tensor
    given: Tensor | None
    count: int
    scored: bool = True

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors, which lie along the draws by their second dimension."""
        matrix, given = self.matrix, self.given
        found = (matrix,) if isinstance(matrix, Tensor) else (matrix.densities, matrix.rows, matrix.rank)
        return found if given is None else (*found, given)

    def joined(self, parts: Sequence[Tensor]) -> Question:
        """The same question about others."""
        known = len(parts) - (self.given is not None)
        matrix = parts[0] if isinstance(self.matrix, Tensor) else Matrix(*parts[:known])
        return replace(self, matrix=matrix, given=None if self.given is None else parts[-1])


Answer = tuple[Tensor, Tensor | None, Matrix]


def side_by_side(
    walks: Mapping[int, Generator[Any, Any, Any]], answers: Callable[[list[Any]], list[Any]]
) -> dict[int, Any]:
    """The results of generators that ask questions, all of which are answered together."""
    results: dict[int, Any] = {}
    replies: dict[int, Any] = dict.fromkeys(walks)
    while replies:
        asked = {}
        for k, reply in replies.items():
            try:
                asked[k] = walks[k].send(reply)
            except StopIteration as end:
                results[k] = end.value
        replies = dict(zip(asked, answers(list(asked.values())), strict=True))
    return results


def centred(densities: Tensor, precision: torch.dtype) -> Tensor:
    """Without constants of places and units, which don't matter, but would swallow what does when late rows are added.

    :param precision: of the draws. Differences of large densities may have needed more, but what is left of them
        doesn't.
    """
    if densities.dtype == precision:
        return without_constants(densities)
    return densities.log_softmax(-1).log_softmax(-2).to(precision)


def matched(asked: list[Question], precision: torch.dtype) -> list[Answer]:
    """The answers to several questions; to those of small matrices that are shaped alike at once.

    :param precision: of the draws.
    """
    alike: dict[Any, list[int]] = {}
    for k, one in enumerate(asked):
        few = one.parts[0].numel() <= TOGETHER
        kind: Any = tuple((part.shape[0], part.shape[2:], part.dtype) for part in one.parts) if few else k
        alike.setdefault(kind, []).append(k)
    answers: dict[int, Answer] = {}
    for numbers in alike.values():
        own = [asked[k] for k in numbers]
        every = (
            own[0]
            if len(own) == 1
            else own[0].joined([torch.cat(part, 1) for part in zip(*(o.parts for o in own), strict=True)])
        )
        matrix = Matrix.of(every.matrix, precision) if isinstance(every.matrix, Tensor) else every.matrix
        images = matrix.drawn(every.count) if every.given is None else every.given
        told = (matrix.log_probability(images),) if own[0].scored else ()
        parts = images, matrix.densities, matrix.rows, matrix.rank, *told
        split = zip(*(part.split([one.parts[0].shape[1] for one in own], 1) for part in parts), strict=True)
        for k, (own_images, densities, rows, rank, *own_told) in zip(numbers, split, strict=True):
            answers[k] = own_images, own_told[0] if own_told else None, Matrix(densities, rows, rank)
    return [answers[k] for k in range(len(asked))]


def made_doubly_stochastic(asked: list[Tensor], precision: torch.dtype) -> list[Tensor]:
    """Of several matrices, roughly; those that are small and shaped alike at once."""
    if len({(one.shape, one.dtype) for one in asked}) == 1 and len(asked) > 1 and asked[0].numel() <= TOGETHER:
        return list(doubly_stochastic(centred(torch.stack(asked), precision), ROUGHLY, centred=True).unbind())
    return [doubly_stochastic(centred(one, precision), ROUGHLY, centred=True) for one in asked]
