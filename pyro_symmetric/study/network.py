"""The network of a study: built by name, by widths or by the user's own callable, and checked against the data."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from pyro_symmetric.datasets import Dataset
from pyro_symmetric.networks import NETWORKS, net_from_callable
from pyro_symmetric.study.settings import ACTIVATIONS, StudySettings

STATISTICS_ROWS = 256  # at a time


def build_net(settings: StudySettings, dataset: Dataset) -> nn.Module:
    """The network: an MLP of the given widths, or what the user's callable makes."""
    if settings.net in NETWORKS:
        return NETWORKS[settings.net](tuple(dataset.input_shape), dataset.num_outputs)
    if settings.net is not None:
        return net_from_callable(settings.net, tuple(dataset.input_shape), dataset.num_outputs)
    widths = (dataset.num_features, *settings.hidden)
    layers: list[nn.Module] = [nn.Flatten()] if len(dataset.input_shape) > 1 else []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), ACTIVATIONS[settings.activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], dataset.num_outputs))


def check_net(net: nn.Module, dataset: Dataset) -> None:
    """:raises ValueError: if the network doesn't take the data's rows or gives outputs of another shape."""
    wanted = (2, dataset.num_outputs)
    try:
        with torch.no_grad():
            found = tuple(net.eval()(dataset.train_x[:2]).shape)
    except Exception as error:
        shape = tuple(dataset.input_shape)
        raise ValueError(f"the network fails on two rows of {dataset.name}, of shape {shape} each: {error}") from error
    if found != wanted and not (found == (2,) and wanted == (2, 1)):
        raise ValueError(f"the network's output for two rows has shape {found}; {dataset.name} needs {wanted}")


def settle_statistics(net: nn.Module, x: Tensor) -> None:
    """Give batch normalisation that has seen no data the statistics of these, at the weights that ``net`` has.

    A Bayesian network holds them fixed; at mean 0 and variance 1, where they start, such layers normalise nothing.
    """
    layers = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    fresh = [layer for layer in layers if layer.num_batches_tracked is not None and layer.num_batches_tracked == 0]
    if not fresh:
        return
    momenta = [layer.momentum for layer in fresh]
    net.eval()
    for layer in fresh:
        layer.train().momentum = None  # the average over all parts
    with torch.no_grad():
        for rows in x.tensor_split(-(-len(x) // STATISTICS_ROWS)):
            net(rows)
    for layer, momentum in zip(fresh, momenta, strict=True):
        layer.eval().momentum = momentum
