"""The network of a study: built by name, by widths or by the user's own callable, and checked against the data."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric._torchvision import import_torchvision
from pyro_symmetric.datasets import Dataset
from pyro_symmetric.networks import NETWORKS
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


def import_callable(spec: str) -> Callable[..., Any]:
    """The callable that ``package.module:callable`` names; modules of the current folder count.

    :raises ValueError: if there is no such module or callable.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ValueError(f"{spec!r} doesn't name a callable; write package.module:callable, or {', '.join(NETWORKS)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if module_name.partition(".")[0] == "torchvision":
        import_torchvision()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises
        raise ValueError(f"the module of {spec!r} can't be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"module {module_name!r} has no callable {name!r}")
    return found


def net_from_callable(spec: str, input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    """The network that ``package.module:callable`` makes, of ``(input_shape, num_outputs)`` or of no arguments; or is.

    :param input_shape: of one row.
    :raises ValueError: if there is no such callable, it takes other arguments, fails, or returns no network.
    """
    build = import_callable(spec)
    if isinstance(build, nn.Module):
        return build
    taken = [p for p in inspect.signature(build).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = sum(p.default is p.empty for p in taken)
    if len(taken) != 2 and needed:
        raise ValueError(f"{spec} needs {needed} arguments; it is called with (input_shape, num_outputs), or with none")
    try:
        net = build(input_shape, num_outputs) if len(taken) == 2 else build()
    except Exception as error:  # whatever the user's callable raises
        raise ValueError(f"{spec} fails: {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ValueError(f"{spec} returned a {type(net).__name__}; it must return a torch.nn.Module")
    return net
