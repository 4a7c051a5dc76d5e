"""Calls that models can't take: told in words, with the model's own error kept."""

import functools

import pytest
import torch
from torch import nn

from pyro_symmetric.calls import described, explaining, input_problem


def regression(x, y, *, scale=1.0):
    return len(x) + len(y)


def decorated(function):
    @functools.wraps(function)
    def with_scale(x):
        return function(x, x, scale=2.0)

    return with_scale


def called(model, *args, **kwargs):
    with explaining(model, args, kwargs):
        return model(*args, **kwargs)


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((torch.zeros(3),), {}, r"regression\(x, y, scale=1.0\) can't be called with a tensor \(3,\).*argument: 'y'"),
        ((torch.zeros(3), None, "text"), {}, "None, a str: too many positional arguments"),
        (([], []), {"noise": 2}, "a list, a list, noise=2: got an unexpected keyword argument 'noise'"),
    ],
)
def test_arguments_that_a_signature_cannot_take_are_told_and_chained(args, kwargs, reason):
    with pytest.raises(TypeError, match=reason) as error:
        called(regression, *args, **kwargs)
    assert isinstance(error.value.__cause__, TypeError)


def test_a_network_is_advised_to_become_a_model():
    with pytest.raises(TypeError, match=r"module Linear.forward\(input\) can't be.*too many.*BayesianModel\(net"):
        called(nn.Linear(2, 1), torch.zeros(3, 2), torch.zeros(3))


def test_the_models_own_errors_pass_as_they_are_with_a_note_of_the_call():
    with pytest.raises(TypeError, match="has no len") as error:  # of the model's own making: the call itself fits
        called(regression, torch.zeros(3), 4)
    assert error.value.__cause__ is None
    (note,) = error.value.__notes__
    assert (
        note == "This came from the model regression(x, y, scale=1.0), called with a tensor (3,) of torch.float32, 4."
    )


def test_a_decorated_model_that_takes_other_arguments_than_it_shows_is_not_refused():
    assert called(decorated(regression), [1, 2]) == 4


def test_inputs_that_a_network_cannot_take_are_told_with_what_it_has():
    net = nn.Sequential(nn.Linear(3, 2))
    assert input_problem(net, (torch.zeros(4, 3),)) == ""
    problem = input_problem(net, (torch.zeros(4, 5),))
    assert "(Sequential) can't take a tensor (4, 5) of torch.float32: " in problem
    assert "'0.weight', is a tensor (2, 3) of torch.float32.)" in problem
    assert "pass inputs.to(torch.float32)" in input_problem(net, (torch.zeros(4, 3).double(),))


def test_arguments_are_described_by_what_matters():
    assert described(torch.zeros(2, 3).numpy()) == "a numpy.ndarray"
    assert described({}) == "a dict"
    assert described(True) == "True"
