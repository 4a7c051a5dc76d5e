"""Calls of models that fail keep their error, with a note of the call."""

import pytest
import torch
from torch import nn

from pyro_symmetric.calls import described, explaining, input_problem


def regression(x, y, *, scale=1.0):
    return len(x) + len(y)


def test_a_models_error_passes_as_it_is_with_a_note_of_the_call():
    with pytest.raises(TypeError, match="has no len") as error, explaining(regression, (torch.zeros(3), 4), {}):
        regression(torch.zeros(3), 4)
    (note,) = error.value.__notes__
    assert note == "This came from the model regression, called with a tensor (3,) of torch.float32, 4."


def test_inputs_that_a_network_cannot_take_are_told():
    net = nn.Sequential(nn.Linear(3, 2))
    assert input_problem(net, torch.zeros(4, 3)) == ""
    assert "(Sequential) can't take a tensor (4, 5) of torch.float32: " in input_problem(net, torch.zeros(4, 5))


@pytest.mark.parametrize(
    ("value", "words"), [(torch.zeros(2, 3).numpy(), "a numpy.ndarray"), ({}, "a dict"), (True, "True"), ("a", "'a'")]
)
def test_arguments_are_described_by_what_matters(value, words):
    assert described(value) == words
