"""The symmetries of the zoo of Pyro models are those by hand."""

import pyro
import pytest

import pyro_symmetric as ps
from benchmarks.zoo.models import MODELS, units_of


@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_the_symmetry_of_a_model_is_that_by_hand(case):
    symmetry = ps.find_symmetry(case.model, *case.args)
    assert units_of(symmetry) == case.units
    assert symmetry.at_least == bool(case.not_expressed)
    assert case.not_expressed in str(symmetry)
    pyro.clear_param_store()


@pytest.mark.slow
@pytest.mark.stochastic
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_no_wrong_move_is_found_with_twenty_seeds(case):
    for seed in range(20):
        pyro.set_rng_seed(seed)
        assert units_of(ps.find_symmetry(case.model, *case.args)) == case.units
