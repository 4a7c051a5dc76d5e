"""Sums over all matchings, and random ones: probabilities that add up to one, draws
that follow them.
"""

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from pyro_symmetric.distributions import random_matchings
from pyro_symmetric.distributions.estimators import log_permanent
from pyro_symmetric.distributions.random_matchings import (
    best_columns,
    doubly_stochastic,
    draw_matchings,
)
from pyro_symmetric.distributions.unit_densities import (
    Level,
    Product,
    multiplied,
    refined,
)


def drawn(
    densities: Tensor, count: int, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    return draw_matchings(densities[None], count, *best_columns(densities[None]), dtype)


def log_probability(densities: Tensor, matchings: Tensor) -> Tensor:
    """Of matchings ``(K, n)`` under one matrix: of the identity, once their columns are
    in place.
    """
    return drawn(densities[:, matchings].movedim(0, 1)[None], 0)[1][0]


def every_matching(n: int) -> Tensor:
    return torch.tensor(list(itertools.permutations(range(n))))


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
def test_sinkhorn_only_multiplies_rows_and_columns_which_then_sum_to_one(
    spread: float,
) -> None:
    scores = spread * torch.randn(3, 6, 6, dtype=torch.float64)
    matrix = doubly_stochastic(scores, 3000)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(3, 6, dtype=torch.float64))
    torch.testing.assert_close(
        matrix.sum(-2), torch.ones(3, 6, dtype=torch.float64), atol=1e-4, rtol=0
    )
    cross = [
        m[:, 0, 0] - m[:, 0, 1] - m[:, 1, 0] + m[:, 1, 1]
        for m in (scores, matrix.log())
    ]
    torch.testing.assert_close(cross[1], cross[0])
    shifted = scores + torch.randn(4, 3, 6, 1).sum(0) + 1e7 * torch.randn(3, 1, 6)
    torch.testing.assert_close(
        doubly_stochastic(shifted, 3000), matrix, atol=1e-7, rtol=1e-5
    )


@pytest.mark.parametrize("late", [1, 2, 4, 6])
@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_probabilities_of_all_matchings_add_up_to_one(
    n: int, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_matchings, "ENUMERATED_ROWS", late)
    densities = 2 * torch.randn(n, n, dtype=torch.float64)
    found = log_probability(densities, every_matching(n))
    assert float(found.exp().sum()) == pytest.approx(1.0)
    if n <= late:  # the exact law
        sums = torch.stack(
            [densities[torch.arange(n), p].sum() for p in every_matching(n)]
        )
        torch.testing.assert_close(found, sums.log_softmax(0))


def assert_frequencies(densities: Tensor, images: Tensor, told: Tensor) -> None:
    """24 frequencies of draws. Chernoff's bound of the probability that one is further
    off than the one found is ``exp(-count KL(found | stated))`` to either side: false
    alarm below 24 * 2 * exp(-14), 1 in 10^4."""
    assert torch.equal(images[0, 0], torch.arange(4))
    told, count = told[1:, 0], len(images) - 1
    some = told.isfinite().nonzero()[:100, 0]
    torch.testing.assert_close(
        log_probability(densities, images[1:, 0][some]), told[some]
    )
    found = Counter(map(tuple, images[1:, 0][told.isfinite()].tolist()))
    stated = log_probability(densities, every_matching(4)).exp().tolist()
    for permutation, expected in zip(
        itertools.permutations(range(4)), stated, strict=True
    ):
        share = found[permutation] / count
        pairs = ((share, expected), (1 - share, 1 - expected))
        assert count * sum(a * math.log(a / b) for a, b in pairs if a > 0) < 14


@pytest.mark.stochastic
@pytest.mark.parametrize("late", [1, 2, 4])
@pytest.mark.parametrize("sharpness", [0.0, 2.0])
@pytest.mark.parametrize("own", [False, True])
def test_matchings_are_drawn_with_the_probabilities_that_are_stated(
    sharpness: float, late: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one matrix or from one each."""
    monkeypatch.setattr(random_matchings, "ENUMERATED_ROWS", late)
    count, densities = 40_000, sharpness * torch.randn(4, 4, dtype=torch.float64)
    assert_frequencies(
        densities, *drawn(densities.expand(count + 1 if own else 1, 1, 4, 4), count)
    )


@pytest.mark.stochastic
@pytest.mark.parametrize("unsure", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("own", [False, True])
def test_beside_rows_that_are_sure_the_others_are_drawn_and_now_and_then_all(
    unsure: float, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows out of place, or all four; what is uniform and leaves them there, two or
    one of 24, counts as none.
    """
    monkeypatch.setattr(random_matchings, "CERTAIN", 1.0)
    monkeypatch.setattr(random_matchings, "UNIFORM_SHARE", 0.4)
    count, densities = 40_000, torch.randn(4, 4, dtype=torch.float64).clamp(-1, 0.5)
    densities[[0, 1, 2, 3], [2, 0, 1, 3]] = torch.tensor(
        [5.0, 5.0, 1.0 + unsure, 1.0 + unsure], dtype=torch.float64
    )
    densities[[2, 3], [3, 1]] = 1.0
    images, told = drawn(densities.expand(count + 1 if own else 1, 1, 4, 4), count)
    assert_frequencies(densities, images, told)
    inside = 1 if unsure > 1 else 2
    total = float(log_probability(densities, every_matching(4)).exp().sum())
    assert total == pytest.approx(1.0 - 0.4 * inside / 24)


@pytest.mark.parametrize("n", [37, 200])
@pytest.mark.parametrize("sharpness", [0.0, 40.0])
@pytest.mark.parametrize("copies", [1, 6])
def test_draws_are_permutations_also_where_rows_compete(
    n: int, sharpness: float, copies: int
) -> None:
    # Every row wants the same few columns: the longest way to a matching.
    scores = sharpness * torch.arange(n, dtype=torch.float32) / n + torch.randn(
        copies, 2, n, n
    )
    choice, log_tau = drawn(scores, 5)
    assert torch.equal(choice.sort(-1).values, torch.arange(n).expand(6, 2, n))
    assert bool(log_tau.isfinite().all())


def test_large_constants_of_rows_and_columns_rank_matchings_alike_in_float32() -> None:
    """The densities are differences of numbers that float32 couldn't tell apart; those
    of matchings are a few nats.
    """
    small = torch.randn(9, 9, dtype=torch.float64)
    large = small + 1e7 * torch.randn(9, 1) + 1e7 * torch.randn(1, 9)
    matchings = torch.stack([torch.randperm(9) for _ in range(20)])

    def told(matrix: Tensor) -> Tensor:
        return drawn(matrix[:, matchings].movedim(0, 1)[None], 0, torch.float32)[1][0]

    torch.testing.assert_close(told(large), told(small), atol=1e-3, rtol=1e-4)


# permanents ---------------------------------------------------------------------------


def summed(scores: Tensor) -> Tensor:
    n = scores.shape[-1]
    return torch.logsumexp(scores[..., torch.arange(n), every_matching(n)].sum(-1), -1)


@pytest.mark.parametrize("n", [1, 2, 5, 7])
@pytest.mark.parametrize("scale", [0.0, 1.0, 300.0])
def test_log_permanent_equals_enumeration(n: int, scale: float) -> None:
    scores = scale * torch.randn(4, 3, n, n, dtype=torch.float64)
    torch.testing.assert_close(log_permanent(scores), summed(scores))


def test_its_gradient_is_the_probability_of_each_match() -> None:
    scores = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    gradient = torch.autograd.grad(log_permanent(scores), scores)[0]
    other = torch.autograd.grad(summed(scores), scores)[0]
    torch.testing.assert_close(gradient, other)
    torch.testing.assert_close(gradient.sum(0), torch.ones(5, dtype=torch.float64))


def test_no_place_is_certain_of_what_depends_on_an_expectation():
    """Then all units keep a chance, though the draw's own are by far the best. The next
    level decides if rounding matters, as in huge densities.
    """
    product = multiplied(100 * torch.eye(3)[None], [torch.eye(3)[None]])
    levels = [Level(torch.float32), Level(torch.float64)]
    asked = []

    def products(level: Level) -> list[Product]:
        asked.append(level)
        return [product]

    assert refined(products, levels, permuted=True).certain.all()
    assert not refined(products, levels, permuted=True, expected=True).certain.any()
    assert asked == [levels[0]] * 2
    product = multiplied(1e9 * torch.eye(3)[None], [torch.eye(3)[None]])
    asked.clear()
    refined(products, levels, permuted=True, expected=True)
    assert asked == levels
