"""One data set, one Bayesian network, and the symmetries of its posterior: what every method of a study works on."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric import datasets
from pyro_symmetric.datasets import Dataset
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.mcmc.resume import as_json, digest
from pyro_symmetric.models import BayesianModel, CategoricalLikelihood, GaussianLikelihood
from pyro_symmetric.networks import NETWORKS, net_from_callable
from pyro_symmetric.study.settings import ACTIVATIONS, DTYPES, StudySettings

STATISTICS_ROWS = 256  # at a time


@dataclass(frozen=True)
class Problem:
    """The data, the model and its symmetry, on the study's device.

    :param settings: what was asked for.
    :param dataset: training, test and out-of-distribution rows.
    :param model: the Bayesian network.
    :param symmetry: of the posterior: of the network with its running statistics, if any, held as they are.
    :param seed: from which the method that is being fitted takes its random numbers.
    :param scratch: where the method that is being fitted may keep what it has so far, to resume after a stop; a folder
        that needn't exist yet. ``None``: nowhere.
    """

    settings: StudySettings
    dataset: Dataset
    model: BayesianModel
    symmetry: Symmetry
    seed: int = 0
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
        """True if targets are classes."""
        return self.dataset.task == "classification"

    @property
    def num_weights(self) -> int:
        """The number of weights, and of a learnt noise."""
        return sum(shape.numel() for shape in self.model.site_shapes.values())

    def describe(self) -> list[str]:
        """The problem in a few lines."""
        data, symmetry = self.dataset, self.symmetry
        permuted = ", ".join(f"{n} units of layer {name}" for name, n in symmetry.permutations.factors.items())
        flips, order = sum(symmetry.signs.factors.values()), symmetry.log_order()
        return [
            f"Data: {data.describe()}",
            f"Network: {self.num_weights} weights; symmetries permute {permuted or 'nothing'}"
            + (f" and flip the signs of {flips}" if flips else "")
            + (f": every mode has exp({order:.1f}) copies (log |G| = {order:.1f})" if order else ""),
        ]

    def fingerprint(self) -> dict[str, Any]:
        """All that decides results: the settings, and by their hash the data and the network that these only name."""
        data = self.dataset
        shapes = {name: tuple(shape) for name, shape in self.model.site_shapes.items()}
        return as_json(
            settings=self.settings.deciding(),
            data=digest([data.train_x, data.train_y, data.test_x, data.test_y, data.ood_x]),
            network=digest([str(self.model.net), shapes]),
        )


def build_problem(settings: StudySettings) -> Problem:
    """Load the data, build the network, find its symmetries.

    The network's initial values are drawn from PyTorch's global generator.

    :raises ValueError: if the data, the network or their combination can't be used.
    :raises FileNotFoundError: if the data aren't there.
    """
    place: Any = {"dtype": DTYPES[settings.dtype], "device": settings.torch_device}
    there: Any = {"root": settings.data_root, "download": settings.download, "seed": settings.seed}
    asked = {name: getattr(settings, name) for name in ("target", "split", "max_train", "max_test")}
    held = None if settings.ood else "auto"  # some classes are the inputs from out of the distribution
    dataset = datasets.load(settings.data, hold_out=held, **place, **asked, **there)
    if settings.ood:
        dataset = datasets.ood(settings.ood, dataset, max_rows=len(dataset.test_x), **there)
    is_classification = dataset.task == "classification"
    if settings.noise is not None and is_classification:
        raise ValueError(f"--noise {settings.noise} is for regressions; {dataset.name} is a classification data set")
    net = build_net(settings, dataset)
    settle_statistics(net, dataset.train_x)
    symmetry = find_symmetry(net, dataset.train_x[:2], logits=is_classification).holding(net)
    noise = {"temperature": settings.temperature}
    likelihood = CategoricalLikelihood(**noise) if is_classification else GaussianLikelihood(settings.noise, **noise)
    model = BayesianModel(net, settings.prior(), likelihood, len(dataset.train_x))
    return Problem(settings, dataset, model, symmetry)


def build_net(settings: StudySettings, dataset: Dataset) -> nn.Module:
    """The network by name, by widths (an MLP), or by the user's own callable, where the data are and in their dtype.

    :raises ValueError: if it doesn't fit the data.
    """
    shape, outputs = tuple(dataset.input_shape), dataset.num_outputs
    if settings.net in NETWORKS:
        net = NETWORKS[settings.net](shape, outputs)
    elif settings.net is not None:
        net = net_from_callable(settings.net, shape, outputs)
    else:
        widths = (dataset.input_shape.numel(), *settings.hidden)
        layers: list[nn.Module] = [nn.Flatten()] if len(shape) > 1 else []
        for first, second in itertools.pairwise(widths):
            layers += [nn.Linear(first, second), ACTIVATIONS[settings.activation]()]
        net = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
    try:
        with torch.no_grad():
            net = net.to(dataset.train_x).eval()
            found = tuple(net(dataset.train_x[:2]).shape)
    except Exception as error:
        raise ValueError(f"the network fails on two rows of {dataset.name}, of shape {shape} each: {error}") from error
    if found != (2, outputs) and not (found == (2,) and outputs == 1):
        raise ValueError(f"the network's output for two rows has shape {found}; {dataset.name} needs {(2, outputs)}")
    return net


def settle_statistics(net: nn.Module, x: Tensor) -> None:
    """Give batch normalisation that has seen no data the statistics of these, at the weights that ``net`` has.

    A Bayesian network holds them fixed; at mean 0 and variance 1, where they start, such layers normalise nothing.
    """
    layers = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if not any(layer.num_batches_tracked is None or int(layer.num_batches_tracked) for layer in layers):
        torch.optim.swa_utils.update_bn(x.tensor_split(-(-len(x) // STATISTICS_ROWS)), net)


def noise_scale(model: BayesianModel, weights: Mapping[str, Tensor]) -> Tensor | float:
    """Standard deviation of a regression's noise: fixed, or one for each draw."""
    fixed = getattr(model.likelihood, "scale", None)
    return weights["noise_scale"] if fixed is None else fixed
