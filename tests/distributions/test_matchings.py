"""Random matchings against the loop over rows that they stand for, doubly stochastic matrices against their sums."""

import itertools
import math
from collections import Counter

import pytest
import torch

from pyro_symmetric.distributions import matchings
from pyro_symmetric.distributions.matchings import (
    TAIL,
    certain_first,
    doubly_stochastic,
    draw_matchings,
    log_probability,
    with_spread,
)
from pyro_symmetric.distributions.questions import centred


def random_order(shape: tuple[int, ...], n: int) -> torch.Tensor:
    return torch.rand(*shape, n).argsort(-1).int()


def probability_by_loop(scores: torch.Tensor, rows: torch.Tensor, rank: torch.Tensor, choice: tuple[int, ...]) -> float:
    """Early rows one after the other, the last ones by all permutations of the columns that are left."""
    order = sorted(range(len(choice)), key=lambda r: int(rank[r]))
    free, probability = set(range(len(choice))), 1.0
    for row in order[: len(order) - TAIL]:
        probability *= float(rows[row, choice[row]]) / sum(float(rows[row, i]) for i in free)
        free.remove(choice[row])
    late = order[max(0, len(order) - TAIL) :]

    def weight(columns: tuple[int, ...]) -> float:
        return math.exp(sum(float(scores[row, column]) for row, column in zip(late, columns, strict=True)))

    return probability * weight(tuple(choice[r] for r in late)) / sum(map(weight, itertools.permutations(free)))


def divergence(p: float, q: float) -> float:
    """Kullback and Leibler's, of a coin with probability ``p`` from one with ``q``."""
    return sum(a * math.log(a / b) for a, b in ((p, q), (1 - p, 1 - q)) if a > 0)


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
def test_sinkhorn_gives_rows_and_columns_that_sum_to_one(spread: float) -> None:
    matrix = doubly_stochastic(spread * torch.randn(3, 6, 6, dtype=torch.float64), iterations=2000)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(3, 6, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(-2), torch.ones(3, 6, dtype=torch.float64), atol=1e-4, rtol=0)


def test_sinkhorn_only_multiplies_rows_and_columns() -> None:
    """Cross ratios of the kernel are kept, and constants added to rows and columns don't matter."""
    scores = torch.randn(4, 4, dtype=torch.float64)
    logs = doubly_stochastic(scores, iterations=500).log()
    cross = [m[0, 0] - m[0, 1] - m[1, 0] + m[1, 1] for m in (scores, logs)]
    torch.testing.assert_close(cross[1], cross[0])
    shifted = scores + torch.randn(4, 1) + torch.randn(1, 4)
    torch.testing.assert_close(doubly_stochastic(shifted, iterations=500).log(), logs)


def test_sinkhorn_follows_its_units_when_they_are_permuted() -> None:
    """The proposal may depend on the orbit only: relabelling the units of the draw relabels the columns."""
    scores, order = 3 * torch.randn(5, 5, dtype=torch.float64), torch.randperm(5)
    torch.testing.assert_close(doubly_stochastic(scores[:, order]), doubly_stochastic(scores)[:, order])


@pytest.mark.parametrize("proposals", [1, 3])
@pytest.mark.parametrize("n", [2, 6, 8])
def test_log_probability_equals_the_loop_over_rows(proposals: int, n: int) -> None:
    scores = 2 * torch.randn(proposals, 2, n, n, dtype=torch.float64)
    rows = with_spread(doubly_stochastic(scores))
    rank, choice = random_order((3, 2), n), torch.rand(3, 2, n).argsort(-1)
    logs = log_probability(scores, rows, rank, choice)
    for k, b in itertools.product(range(3), range(2)):
        of = min(k, proposals - 1), b
        expected = probability_by_loop(scores[of], rows[of], rank[k, b], tuple(choice[k, b].tolist()))
        assert float(logs[k, b].exp()) == pytest.approx(expected)


@pytest.mark.parametrize("late", [1, 2, 5])
def test_probabilities_of_all_matchings_sum_to_one(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matchings, "_tail", lambda n, _: (late, torch.tensor([*itertools.permutations(range(late))])))
    scores = 3 * torch.randn(1, 1, 5, 5, dtype=torch.float64)
    rows = with_spread(doubly_stochastic(scores))
    choice = torch.tensor(list(itertools.permutations(range(5)))).unsqueeze(1)
    rank = random_order((1, 1), 5).expand(len(choice), 1, 5)
    assert float(log_probability(scores, rows, rank, choice).exp().sum()) == pytest.approx(1.0)


@pytest.mark.stochastic
@pytest.mark.parametrize("late", [1, 2, 4])
@pytest.mark.parametrize("sharpness", [0.0, 2.0])
def test_matchings_are_drawn_with_the_probabilities_that_are_stated(
    sharpness: float, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 frequencies of 40,000 draws. Chernoff's bound of the probability that one is further off than the one found is
    ``exp(-count KL(found | stated))`` to either side, also of matchings that are hardly ever drawn: false alarm below
    24 * 2 * exp(-14), 1 in 10^4."""
    monkeypatch.setattr(matchings, "_tail", lambda n, _: (late, torch.tensor([*itertools.permutations(range(late))])))
    count = 40_000
    scores = sharpness * torch.randn(1, 1, 4, 4, dtype=torch.float64)
    rows = with_spread(doubly_stochastic(scores))
    rank = random_order((1, 1), 4)
    found = Counter(map(tuple, draw_matchings(scores, rows, rank.expand(count, 1, 4))[:, 0].tolist()))
    choice = torch.tensor(list(itertools.permutations(range(4)))).unsqueeze(1)
    stated = log_probability(scores, rows, rank.expand(24, 1, 4), choice).exp()[:, 0]
    for permutation, expected in zip(itertools.permutations(range(4)), stated.tolist(), strict=True):
        assert count * divergence(found[permutation] / count, expected) < 14


@pytest.mark.parametrize("n", [1, 2, 37, 200])
@pytest.mark.parametrize("sharpness", [0.0, 40.0])
def test_draws_are_permutations_also_where_rows_compete(n: int, sharpness: float) -> None:
    # Every row wants the same few columns: the longest way to a matching.
    scores = sharpness * torch.arange(n, dtype=torch.float32).expand(1, 2, n, n) / n + torch.randn(1, 2, n, n)
    rows = with_spread(scores.softmax(-1))
    choice = draw_matchings(scores, rows, certain_first(rows).expand(5, 2, n))
    assert torch.equal(choice.sort(-1).values, torch.arange(n).expand(5, 2, n))


def test_chunks_of_proposals_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(7, 2, 9, 9, dtype=torch.float64)
    rows = with_spread(doubly_stochastic(scores))
    rank, choice = certain_first(rows), torch.rand(7, 2, 9).argsort(-1)
    whole = log_probability(scores, rows, rank, choice)
    monkeypatch.setattr(matchings, "CHUNK_NUMBERS", 1)
    torch.testing.assert_close(log_probability(scores, rows, rank, choice), whole)


def test_the_most_certain_rows_come_first() -> None:
    rows = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.7, 0.1]])
    assert certain_first(rows).tolist() == [2, 0, 1]


def test_what_is_left_of_large_densities_ranks_matchings_alike_in_float32():
    """The densities are differences of numbers that float32 couldn't tell apart; those of matchings are a few nats."""
    n, shape = 4, (2, 3)
    small = torch.randn(*shape, n, n, dtype=torch.float64)
    constants = 1e7 * torch.randn(*shape, n, 1, dtype=torch.float64) + 1e7 * torch.randn(*shape, 1, n).double()
    every = torch.tensor(list(itertools.permutations(range(n))))

    def chances(matrix: torch.Tensor) -> torch.Tensor:
        return matrix.double()[..., torch.arange(n), every].sum(-1).softmax(-1)

    left = centred(small + constants, torch.float32)
    assert left.dtype == torch.float32
    torch.testing.assert_close(chances(left), chances(small), atol=1e-5, rtol=1e-5)
    assert (chances((small + constants).float()) - chances(small)).abs().max() > 0.1
    torch.testing.assert_close(chances(centred(small, torch.float64)), chances(small))
