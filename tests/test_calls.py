"""Calls that models can't take: told in words, with the model's own error kept."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_symmetric as ps
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


def multiplied(x, y):
    return x @ y


def test_arguments_that_pytorch_cannot_compute_with_are_told_and_chained():
    partial = functools.partial(multiplied, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"multiplied\(x, y\).*tensor \(2, 3\).*tensor \(2,\)") as error:
        called(partial, torch.zeros(2))
    assert type(error.value.__cause__) is RuntimeError


def test_errors_that_stand_for_more_than_shapes_keep_their_type():
    def hungry():
        raise torch.OutOfMemoryError("a lot")

    with pytest.raises(torch.OutOfMemoryError):
        called(hungry)


def improper(value=None):
    prior = dist.ImproperUniform(dist.constraints.real, (), (3,)).mask(True).expand([2])
    with pyro.plate("rows", 2):
        return pyro.sample("w", prior, obs=value)


def test_a_prior_that_cannot_be_drawn_from_is_named_unless_its_value_is_given():
    with pytest.raises(ValueError, match="prior of site 'w'"):
        called(improper)
    assert called(improper, torch.ones(2, 3)).sum() == 6
    assert called(poutine.condition(improper, data={"w": torch.ones(2, 3)})).sum() == 6


@pytest.mark.cpu
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


@pytest.mark.cpu
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


def test_a_loader_in_place_of_tensors_is_told_how_to_give_its_rows() -> None:
    x, y = torch.randn(10, 2), torch.arange(10) % 2
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    net = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"torch\.cat"):
        ps.ensemble(net, loader, num_members=1, epochs=1, progress=False)
    with pytest.raises(ValueError, match=r"torch\.cat"):
        ps.sample(ps.BayesianModel(net), loader, num_samples=1, num_warmup=0, progress=False)
    inputs, targets = map(torch.cat, zip(*loader, strict=True))  # what the sentence says
    assert torch.equal(inputs, x)
    assert torch.equal(targets, y)
