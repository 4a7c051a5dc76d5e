"""Random networks of at most 15 weights: signs and permutations by brute force, scales
by a null space.
"""

import pytest

from benchmarks.checks.random_networks import compared, network


@pytest.mark.parametrize("seed", [0, 10, 13, 22, 40])
def test_nothing_is_wrong_or_missed_in_silence(seed: int) -> None:
    result = compared(network(seed))
    assert not result.wrong, result
    assert not result.missed_in_silence, result
