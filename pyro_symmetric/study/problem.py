"""One data set, one Bayesian network, and the symmetries of its posterior: what every method of a study works on."""

from __future__ import annotations

import fnmatch
import importlib
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from pyro_symmetric import datasets
from pyro_symmetric._torchvision import import_torchvision
from pyro_symmetric.canonical.forms import canonicalize
from pyro_symmetric.datasets import Dataset
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.fingerprint import digest
from pyro_symmetric.models import BayesianModel, CategoricalLikelihood, GaussianLikelihood, GaussianPrior, Likelihood
from pyro_symmetric.networks import NETWORKS
from pyro_symmetric.study.settings import ACTIVATIONS, StudySettings
from pyro_symmetric.weights import Weights

STATISTICS_ROWS = 256  # at a time


@dataclass(frozen=True)
class Problem:
    """The data, the model and its symmetry, on the study's device.

    :param settings: what was asked for.
    :param dataset: training, test and out-of-distribution rows.
    :param model: the Bayesian network.
    :param symmetry: of the posterior: of the network with its running statistics, if any, held as they are.
    :param scratch: where the method that is being fitted may keep what it has so far, to resume after a stop; a folder
        that needn't exist yet. ``None``: nowhere.
    """

    settings: StudySettings
    dataset: Dataset
    model: BayesianModel
    symmetry: Symmetry
    scratch: Path | None = None

    @property
    def x(self) -> Tensor:
        """Training inputs."""
        return self.dataset.train_x

    @property
    def y(self) -> Tensor:
        """Training targets."""
        return self.dataset.train_y

    @property
    def is_classification(self) -> bool:
        """Whether targets are classes."""
        return self.dataset.task == "classification"

    def canonical(self, weights: Weights) -> Weights:
        """One representative of each draw's orbit: units ordered by their largest incoming weight, scales balanced.

        Balanced (least total norm) rather than at unit norm: there, nearly dead units, common in trained networks,
        would have enormous biases.
        """
        return canonicalize(weights, self.symmetry, scalings="minimal_mass", warn=False)


def build_problem(settings: StudySettings) -> Problem:
    """Load the data, build the network, find its symmetries.

    :raises ValueError: if the data, the network or their combination can't be used.
    :raises FileNotFoundError: if the data aren't there.
    """
    pyro.set_rng_seed(settings.seed)
    device, dtype = settings.torch_device, settings.torch_dtype
    dataset = datasets.load(
        settings.data,
        root=settings.data_root,
        download=settings.download,
        target=settings.target,
        hold_out=None if settings.ood else "auto",
        split=settings.split,
        max_train=settings.max_train,
        max_test=settings.max_test,
        seed=settings.seed,
        dtype=dtype,
        device=device,
    )
    if settings.ood:
        dataset = datasets.ood(
            settings.ood,
            dataset,
            root=settings.data_root,
            download=settings.download,
            max_rows=len(dataset.test_x),
            seed=settings.seed,
        )
    net = build_net(settings, dataset).to(device=device, dtype=dtype)
    check_net(net, dataset)
    check_settings(settings, net, dataset)
    settle_statistics(net, dataset.train_x)
    symmetry = find_symmetry(net.eval(), dataset.train_x[:2], logits=dataset.task == "classification").holding(net)
    prior = GaussianPrior(settings.prior_scale, settings.prior_fan_in, settings.prior_scales)
    model = BayesianModel(net, prior, _likelihood(settings, dataset), num_data=len(dataset.train_x))
    return Problem(settings, dataset, model, symmetry)


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


def build_net(settings: StudySettings, dataset: Dataset) -> nn.Module:
    """The network: an MLP of the given widths, or what the user's callable makes."""
    if settings.net in NETWORKS:
        return NETWORKS[settings.net](tuple(dataset.input_shape), dataset.num_outputs)
    if settings.net is not None:
        return _from_callable(settings.net, dataset)
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


def check_settings(settings: StudySettings, net: nn.Module, dataset: Dataset) -> None:
    """:raises ValueError: for settings that would have no effect on these data and this network."""
    if settings.noise is not None and dataset.task == "classification":
        raise ValueError(f"--noise {settings.noise} is for regressions; {dataset.name} is a classification data set")
    names = [name for name, _ in net.named_parameters()]
    for pattern in settings.prior_scales:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"--prior-scale {pattern}=... matches no parameter; the network's are {', '.join(names)}")


def fingerprint(problem: Problem) -> dict[str, str]:
    """What settings only name: ``"data"`` and ``"network"`` -> a hash of their contents."""
    data = problem.dataset
    shapes = {name: tuple(shape) for name, shape in problem.model.site_shapes.items()}
    return {
        "data": digest([data.train_x, data.train_y, data.test_x, data.test_y, data.ood_x]),
        "network": digest([str(problem.model.net), shapes]),
    }


def noise_scale(model: BayesianModel, weights: Mapping[str, Tensor]) -> Tensor | float:
    """Standard deviation of a regression's noise: fixed, or one for each draw."""
    fixed = getattr(model.likelihood, "scale", None)
    return weights["noise_scale"] if fixed is None else fixed


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


def _from_callable(spec: str, dataset: Dataset) -> nn.Module:
    build = import_callable(spec)
    count = len(inspect.signature(build).parameters)
    if count not in (0, 2):
        raise ValueError(f"{spec} takes {count} arguments; it is called with (input_shape, num_outputs), or with none")
    try:
        net = build(tuple(dataset.input_shape), dataset.num_outputs) if count else build()
    except Exception as error:  # whatever the user's callable raises
        raise ValueError(f"{spec} fails: {type(error).__name__}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ValueError(f"{spec} returned a {type(net).__name__}; it must return a torch.nn.Module")
    return net


def _likelihood(settings: StudySettings, dataset: Dataset) -> Likelihood:
    if dataset.task == "classification":
        return CategoricalLikelihood(settings.temperature)
    return GaussianLikelihood(settings.noise, temperature=settings.temperature)
