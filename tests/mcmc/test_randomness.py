"""Streams of mini-batches."""

import pytest
import torch

from pyro_symmetric.mcmc.kernels.randomness import Batches


def test_a_pass_visits_every_row_once_in_each_chains_own_order(generator):
    stream = Batches({"rows": (12, 3)}, 5)
    seen = []
    for _ in range(4):
        rows, stream = stream.next(generator)
        seen.append(rows["rows"])
    order = torch.cat(seen, -1)
    assert torch.equal(order.sort(-1).values, torch.arange(12).expand(5, 12))
    assert not torch.equal(order[0], order[1])


def test_rows_that_fill_no_batch_are_left_out_of_that_pass_only(generator):
    stream, counts = Batches({"rows": (7, 3)}, 2000), torch.zeros(7)
    for _ in range(8):
        rows, stream = stream.next(generator)
        counts += rows["rows"].flatten().bincount(minlength=7)
    # 48,000 rows drawn uniformly: each count has a standard deviation below 83; six of them: false alarms
    # 2e-9 each.
    assert ((counts - counts.mean()).abs() < 500).all()


@pytest.mark.stochastic
def test_with_replacement_rows_are_independent_and_uniform(generator):
    rows, _ = Batches({"rows": (5, 4000)}, 10, replacement=True).next(generator)
    share = rows["rows"].flatten().bincount(minlength=5) / 40_000
    assert torch.allclose(share, torch.full((5,), 0.2), atol=0.012)  # six standard errors: false alarms 2e-9 each


def test_plates_have_streams_of_their_own_and_full_data_have_none(generator):
    rows, _ = Batches({"a": (10, 2), "b": (6, 3)}, 2).next(generator)
    assert {name: value.shape for name, value in rows.items()} == {"a": (2, 2), "b": (2, 3)}
    assert Batches({}, 2).next(generator)[0] is None
