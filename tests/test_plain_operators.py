"""Recurrent layers, cells and weight normalisation by plain operators: PyTorch's own values, states and gradients."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import pyro_symmetric as ps
from pyro_symmetric.ensembles import initialised_by
from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.plain_operators import PlainOperators

TIME, BATCH, INPUTS, UNITS = 5, 4, 3, 6
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "tanh": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
    "projected": lambda *args, **kwargs: nn.LSTM(*args, proj_size=2, **kwargs),
}
SHAPES = [dict(zip(("num_layers", "bidirectional", "bias"), v, strict=True)) for v in
          itertools.product((1, 2), (False, True), (True, False))]  # fmt: skip


def tensors(result):
    outputs, state = result
    outputs = outputs.data if isinstance(outputs, PackedSequence) else outputs
    return [outputs, *([state] if isinstance(state, torch.Tensor) else state)]


def agree(layer, *args, parameters=None):
    """Values and gradients, with weights for each number of what is returned."""
    own = tensors(layer(*args))
    with PlainOperators():
        plain = tensors(layer(*args))
    torch.testing.assert_close(plain, own)
    signs = [torch.randn_like(value) for value in own]
    parameters = parameters or list(layer.parameters())
    slopes = [
        torch.autograd.grad(sum((s * v).sum() for s, v in zip(signs, found, strict=True)), parameters)
        for found in (plain, own)
    ]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("kind", KINDS)
def test_whole_sequences(kind, shape):
    layer = KINDS[kind](INPUTS, UNITS, **shape).double()
    agree(layer, torch.randn(TIME, BATCH, INPUTS).double())
    agree(layer, torch.randn(TIME, INPUTS).double())  # one sequence by itself
    layer.batch_first = True
    agree(layer, torch.randn(BATCH, TIME, INPUTS).double())


@pytest.mark.cpu
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s.values())))
@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_of_different_lengths_and_given_states(kind, shape):
    layer = KINDS[kind](INPUTS, UNITS, **shape).double()
    packed = pack_padded_sequence(torch.randn(TIME, BATCH, INPUTS).double(), [2, 5, 1, 3], enforce_sorted=False)
    agree(layer, packed)
    states = [torch.randn_like(value) for value in tensors(layer(packed))[1:]]
    agree(layer, packed, states[0] if len(states) == 1 else tuple(states))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind, bias):
    cell = kind(INPUTS, UNITS, bias=bias).double()
    x, state = torch.randn(BATCH, INPUTS).double(), torch.randn(BATCH, UNITS).double()
    state = (state, torch.randn_like(state)) if kind is nn.LSTMCell else state
    agree(lambda *args: as_layer(cell(*args)), x, state, parameters=list(cell.parameters()))


def as_layer(new):
    return new if isinstance(new, tuple) else (new, new)


@pytest.mark.parametrize("axis", [0, 1, None])
def test_weight_normalisation(axis):
    layer = nn.utils.parametrizations.weight_norm(nn.Conv1d(INPUTS, UNITS, 2).double(), dim=axis)
    x = torch.randn(BATCH, INPUTS, TIME).double()
    agree(lambda *args: as_layer(layer(*args)), x, parameters=list(layer.parameters()))


@pytest.mark.cpu
@pytest.mark.parametrize("batch_first", [False, True])
def test_sequences_are_packed_and_padded_as_by_pytorch(batch_first):
    padded = torch.randn(TIME, BATCH, INPUTS, 2)
    padded = padded.transpose(0, 1) if batch_first else padded
    settings = {"batch_first": batch_first}

    def both(sequence):
        packed = pack_padded_sequence(sequence, [2, 4, 1, 3], enforce_sorted=False, **settings)
        back = pad_packed_sequence(packed, padding_value=-7.0, total_length=TIME + 1, **settings)
        return packed.data, packed.batch_sizes, *back, *pad_packed_sequence(packed, **settings)

    with PlainOperators():
        plain = both(padded)
        mapped = torch.func.vmap(lambda sequence: both(sequence)[2])(torch.stack((padded, 2 * padded)))
    torch.testing.assert_close(plain, both(padded))
    torch.testing.assert_close(mapped, torch.stack((both(padded)[2], both(2 * padded)[2])))


def test_dropout_lies_between_layers_in_training_alone():
    layer = nn.GRU(INPUTS, UNITS, 3, dropout=0.5)
    x = torch.randn(TIME, BATCH, INPUTS)
    with PlainOperators():
        assert not torch.equal(layer(x)[0], layer(x)[0])
        assert torch.equal(layer.eval()(x)[0], layer(x)[0])


class Cells(nn.Module):
    """A cell that goes through time by the user's own loop, and a layer with weight normalisation."""

    def __init__(self):
        super().__init__()
        self.cell, out = nn.GRUCell(INPUTS, UNITS), nn.Linear(UNITS, 1)
        self.out = nn.utils.parametrizations.weight_norm(out)

    def forward(self, x):
        state = x.new_zeros(len(x), UNITS)
        for moment in x.unbind(1):
            state = self.cell(moment, state)
        return self.out(state)


class Last(nn.Module):
    """The output of the last moment, through a linear layer; ``packed``: of sequences of different lengths."""

    def __init__(self, layer, packed=False):
        super().__init__()
        self.layer, self.packed = layer, packed
        self.out = nn.Linear(UNITS * (2 if layer.bidirectional else 1), 1)

    def forward(self, x):
        if not self.packed:
            return self.out(self.layer(x)[0][:, -1])
        lengths = [1 + row % TIME for row in range(len(x))]
        state = self.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]
        last = state[0] if isinstance(state, tuple) else state
        return self.out(last[-1])


NETWORKS = {
    "lstm": lambda: Last(nn.LSTM(INPUTS, UNITS, 2, bidirectional=True, batch_first=True)),
    "gru": lambda: Last(nn.GRU(INPUTS, UNITS, batch_first=True)),
    "cells": Cells,
    "packed rnn": lambda: Last(nn.RNN(INPUTS, UNITS, batch_first=True), packed=True),
    "packed lstm": lambda: Last(nn.LSTM(INPUTS, UNITS, batch_first=True), packed=True),
}


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("kind", [pytest.param(n, marks=pytest.mark.cpu if "packed" in n else ()) for n in NETWORKS])
def test_chains_and_ensembles_of_recurrent_networks_compute_what_each_network_does(kind):
    net = NETWORKS[kind]().double()
    x, y = torch.randn(7, TIME, INPUTS).double(), torch.randn(7, 1).double()
    model = ps.BayesianModel(net, likelihood=ps.GaussianLikelihood(0.3))
    density = Density(model, args=(x, y))
    z = starting_points(density, 3, model.initial_weights())
    energy, gradient = density.energy_and_gradient(z)
    for row, found, slope in zip(z, energy, gradient, strict=True):
        net.load_state_dict(density.layout.constrain(row))
        net.zero_grad()
        loss = -torch.distributions.Normal(net(x), 0.3).log_prob(y).sum()
        loss = loss - sum(prior.log_prob(net.get_parameter(name)) for name, prior in model.priors().items())
        by_loop = torch.autograd.grad(loss, list(net.parameters()))
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(slope, torch.cat([part.flatten() for part in by_loop]))
    initial = initialised_by(lambda: NETWORKS[kind]().double())
    trained = ps.ensemble(net, (x, y), 3, epochs=2, batch_size=7, loss="mse", initial=initial, progress=False)
    predicted = ps.predict(trained, net, x, progress=False)
    for k, outputs in enumerate(predicted):
        net.load_state_dict({site: value[k] for site, value in trained.get_samples().items()})
        torch.testing.assert_close(outputs, net(x))
    kernel = ps.SGHMC(model, batch_size=3)
    drawn = ps.sample(kernel, x, y, num_samples=3, num_warmup=2, num_chains=2, progress=False)
    assert all(bool(value.isfinite().all()) for value in drawn.samples.values())


@pytest.mark.cpu
@pytest.mark.filterwarnings("error")
def test_a_pyro_model_with_a_recurrent_layer_is_mapped_over_chains():
    layer, x = nn.GRU(INPUTS, 1).double().requires_grad_(False), torch.randn(TIME, BATCH, INPUTS).double()

    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0).expand([INPUTS]).to_event(1))
        pyro.sample("y", dist.Normal(layer(x * scale)[0], 0.3).to_event(3), obs=y)

    y = torch.randn(TIME, BATCH, 1).double()
    density = Density(model, args=(y,))
    z = torch.randn(3, INPUTS).double()
    energy, gradient = density.energy_and_gradient(z)
    for row, found, slope in zip(z, energy, gradient, strict=True):
        own = row.clone().requires_grad_()
        loss = -dist.Normal(0.0, 1.0).log_prob(own).sum() - dist.Normal(layer(x * own.exp())[0], 0.3).log_prob(y).sum()
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(slope, torch.autograd.grad(loss, own)[0])
