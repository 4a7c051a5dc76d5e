"""The course of a run in a bounded number of points: the iterations that are kept, and their values."""

import json
import math

import pytest
import torch

from pyro_symmetric.mcmc.curves import NAMES, Curves, Thinned


def filled(most: int, iterations: int) -> Thinned:
    kept = Thinned(most)
    for iteration in range(iterations):
        kept.note(iteration, lambda iteration=iteration: torch.tensor([float(iteration)]))
    return kept


@pytest.mark.parametrize("iterations", [1, 5, 6, 7, 11, 12, 13, 24, 25, 100, 1000])
def test_every_stride_th_iteration_is_kept_and_never_more_than_most(iterations):
    kept = filled(6, iterations)
    stride = next(2**k for k in range(20) if (iterations - 1) // 2**k < 6)  # the least that leaves six at most
    assert kept.stride == stride
    assert [int(vector) for vector in kept.kept] == list(range(0, iterations, stride))
    assert len(kept.kept) <= 6


def test_vectors_are_made_only_for_iterations_whose_turn_it_is():
    made, kept = [], Thinned(4)
    for iteration in range(100):
        kept.note(iteration, lambda iteration=iteration: made.append(iteration) or torch.zeros(1))
    assert made == [*range(4), *range(4, 8, 2), *range(8, 16, 4), *range(16, 32, 8), *range(32, 64, 16), 64, 96]


@pytest.mark.parametrize("broken", [1, 3, 4, 5, 17, 40])
@pytest.mark.parametrize("ahead", [0, 1, 9])
def test_a_broken_run_keeps_what_an_unbroken_one_keeps(broken, ahead):
    # The process had come `ahead` iterations beyond its last checkpoint, which may have doubled the stride meanwhile.
    whole, first = filled(6, 60), filled(6, broken)
    found = first.to_dict(broken)
    for iteration in range(broken, broken + ahead):
        first.note(iteration, lambda: torch.tensor([math.nan]))
    again = Thinned(6)
    again.restore(found)
    for iteration in range(broken, 60):
        again.note(iteration, lambda iteration=iteration: torch.tensor([float(iteration)]))
    assert again.stride == whole.stride
    assert torch.equal(torch.stack(again.kept), torch.stack(whole.kept))


def test_what_came_after_an_iteration_gives_way_if_it_is_noted_again():
    kept = filled(8, 5)
    kept.note(2, lambda: torch.tensor([20.0]))
    assert [int(vector) for vector in kept.kept] == [0, 1, 20]


def test_the_first_iterations_are_those_before_a_number():
    kept = filled(6, 20)
    assert kept.stride == 4
    assert [[int(vector) for vector in kept.until(count)] for count in (0, 1, 4, 5, 20)] == [
        [],
        [0],
        [0],
        [0, 4],
        [0, 4, 8, 12, 16],
    ]


def test_nothing_noted_is_nothing_kept():
    found = Thinned(4).to_dict(0)
    again = Thinned(4)
    again.restore(found)
    assert (again.kept, again.stride) == ([], 1)
    assert Curves().curves(0) == {"iteration": [], **{name: [] for name in NAMES}}


def numbers(energy: list[float], **statistics: list[float]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Of a single iteration."""
    found = {name: torch.tensor(value) for name, value in statistics.items()}
    return torch.tensor(energy, dtype=torch.float64), found


def test_curves_are_the_chains_means_and_numbers_that_json_lacks_are_none():
    curves = Curves()
    curves.record(0, *numbers([1.0, 3.0], acceptance_rate=[0.5, 1.0], step_size=[0.25, 0.25]))
    curves.record(1, *numbers([1.0, math.inf], acceptance_rate=[math.nan, 1.0], step_size=[0.5, 0.5]))
    curves.record(2, *numbers([2.0, 2.0]))  # a kernel that knows neither
    found = curves.curves(3)
    assert found == {
        "iteration": [0, 1, 2],
        "energy": [2.0, None, 2.0],
        "acceptance_rate": [0.75, None, None],
        "step_size": [0.25, 0.5, None],
    }
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert curves.curves(1)["energy"] == [2.0]


def test_a_long_run_keeps_two_thousand_points():
    curves = Curves()
    for iteration in range(5000):
        curves.record(iteration, *numbers([float(iteration)]))
    found = curves.curves(5000)
    assert found["iteration"] == list(range(0, 5000, 4))
    assert found["energy"] == [float(i) for i in range(0, 5000, 4)]
