"""The settings of a study, and the problem that they name: data set, Bayesian network
and its symmetry.
"""

from __future__ import annotations

import itertools
import shlex
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pyro_symmetric import arguments, datasets
from pyro_symmetric.arguments import Json
from pyro_symmetric.datasets import Dataset
from pyro_symmetric.discovery.find import find_symmetry
from pyro_symmetric.discovery.symmetry import Symmetry
from pyro_symmetric.mcmc.digest import digest
from pyro_symmetric.mcmc.resume import as_json
from pyro_symmetric.models import (
    BayesianModel,
    CategoricalLikelihood,
    GaussianLikelihood,
    GaussianPrior,
    Likelihood,
)
from pyro_symmetric.networks import NETWORKS, net_from_callable
from pyro_symmetric.weights import Tensors, drop_names, map_values

KINDS: tuple[type[nn.Module], ...] = (
    nn.ReLU,
    nn.Tanh,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.ELU,
)
ACTIVATIONS = {
    **{kind.__name__.lower(): kind for kind in KINDS},
    "leaky-relu": nn.LeakyReLU,
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
STATISTICS_ROWS = 256  # of a batch whose moments batch normalisation takes

DEFAULT_METHODS = (
    "mean-field",
    "symmetrized",
    "symmetrized-blocks",
    "aligned",
    "ensemble",
    "sghmc",
    "hmc",
)

# They leave the results of finished methods alone, so a study may resume with other
# values.
FREE_TO_CHANGE = frozenset({"methods", "reference", "device", "data_root", "download"})


def option(default: Any, text: str, metavar: str | None = None) -> Any:
    """Declare a setting, with the help that the command line shows for it."""
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass(frozen=True)
class StudySettings:
    """The settings of a study; each field is an option of ``pyro-symmetric compare``,
    documented by its help.
    """

    data: str = option(
        "digits",
        "digits (default), wine, breast-cancer, diabetes; mnist, fashion-mnist, "
        "cifar10, cifar100, svhn; uci/<name>; "
        "csv:FILE; images:FOLDER, with a subfolder of images per class",
        "NAME",
    )
    data_root: str = option("data", "folder of the data sets (default: data)", "FOLDER")
    download: bool = option(False, "download a missing data set to the data root")
    target: str | None = option(None, "target column of csv:FILE", "COLUMN")
    split: int = option(0, "number of the train/test split (default: 0)", "K")
    max_train: int | None = option(None, "use at most N training rows", "N")
    max_test: int | None = option(
        None, "use at most N test rows, and as many out-of-distribution rows", "N"
    )
    ood: str | None = option(
        None,
        "data set of out-of-distribution inputs (default: held-out classes)",
        "NAME",
    )
    hidden: tuple[int, ...] = option(
        (16,), "widths of the hidden layers (default: 16)", "N[,N...]"
    )
    activation: str = option(
        "relu", "relu (default), tanh, leaky-relu, gelu, silu, sigmoid, elu"
    )
    net: str | None = option(
        None,
        "optunet, resnet20 (filter-response normalisation), resnet18, or "
        "package.module:callable, called as "
        "callable(input_shape, num_outputs)",
        "NAME",
    )
    prior_scale: tuple[str, ...] = option(
        ("1",),
        "standard deviation of the Gaussian prior (default: 1), also by pattern of "
        "parameter names: 2,1.*=0.5",
        "S[,PATTERN=S...]",
    )
    prior_fan_in: bool = option(
        True,
        "divide the prior scale of weight matrices by the square root of their number "
        "of inputs (default: yes)",
    )
    noise: float | None = option(
        None,
        "fixed noise of a regression on standardised targets (default: learnt)",
        "S",
    )
    temperature: float = option(1.0, "likelihood temperature (default: 1)", "T")
    methods: tuple[str, ...] = option(
        DEFAULT_METHODS,
        f"methods to compare (default: {','.join(DEFAULT_METHODS)}); one may appear on "
        "several budgets: "
        "swag,swag:modes=10,hmc:chains=64:draws=100; 'help' lists all methods and "
        "their budgets",
        "A[:PART=N...][,B...]",
    )
    reference: str = option(
        "hmc", "method that the others are compared with (default: hmc)", "METHOD"
    )
    draws: int = option(400, "draws of each method to compare (default: 400)", "N")
    quick: bool = option(
        False, "small budgets, to see in under two minutes that everything works"
    )
    seed: int = option(0, "random seed (default: 0)", "N")
    device: str = option("auto", "cpu, cuda or auto (default)")
    dtype: str = option("float32", "float32 (default) or float64")

    def __post_init__(self) -> None:
        scales: Any = self.prior_scale
        if isinstance(scales, str | int | float):
            scales = str(scales).split(",")
        lists = {
            "hidden": tuple(self.hidden),
            "methods": tuple(dict.fromkeys(self.methods)),
            "prior_scale": tuple(str(scale).removesuffix(".0") for scale in scales),
        }
        for name, values in lists.items():
            object.__setattr__(self, name, values)
            if not values:
                raise ValueError(f"--{name} is empty; it must list one or more")
        for width in self.hidden:
            arguments.whole("a width of --hidden", width, 1)
        arguments.one_of("--activation", self.activation, ACTIVATIONS)
        arguments.one_of("--dtype", self.dtype, DTYPES)
        arguments.one_of("--device", self.device, ("cpu", "cuda", "auto"))
        arguments.whole("--seed", self.seed, 0, 2**31 - 1)
        arguments.whole("--draws", self.draws, 8)
        arguments.positive("--noise", self.noise, none="a learnt one")
        arguments.positive("--temperature", self.temperature)

    @property
    def torch_device(self) -> torch.device:
        """The device, with ``auto`` resolved."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def prior(self) -> GaussianPrior:
        """Return the prior of the network's parameters."""
        scales = {
            pattern: float(scale)
            for pattern, _, scale in (
                scale_of_sites.rpartition("=") for scale_of_sites in self.prior_scale
            )
        }
        return GaussianPrior(scales.pop("", 1.0), self.prior_fan_in, scales)

    def to_dict(self) -> Json:
        """Return the settings as JSON."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def command(self, out: str | Path) -> str:
        """Return the command line that repeats the study, with the options that differ
        from their defaults.
        """
        words = ["pyro-symmetric", "compare"]
        for setting in fields(self):
            value = getattr(self, setting.name)
            name = setting.name.replace("_", "-")
            if value == setting.default:
                continue
            words.append(f"--{name}" if value is not False else f"--no-{name}")
            if not isinstance(value, bool):
                words.append(
                    ",".join(map(str, value))
                    if isinstance(value, tuple)
                    else str(value)
                )
        return shlex.join([*words, "--out", str(out)])


@dataclass(frozen=True)
class Problem:
    """The data, the model and its symmetry, on the study's device.

    :param settings: the settings of the study.
    :param dataset: training, test and out-of-distribution rows.
    :param model: the Bayesian network.
    :param symmetry: of the posterior: that of the network with its running statistics,
        if any, held fixed.
    :param seed: seed of the method being fitted.
    :param scratch: folder in which the method being fitted may save its progress, to
        resume after an interrupt; it needn't exist yet. ``None``: nowhere.
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
        """The number of weights, a learnt noise included."""
        return sum(shape.numel() for shape in self.model.site_shapes.values())

    def describe(self) -> list[str]:
        """Describe data, network and symmetry, a line each."""
        symmetry = self.symmetry
        permuted = ", ".join(
            f"the {n} units of layer {name}"
            for name, n in symmetry.permutations.factors.items()
        )
        flips = sum(symmetry.signs.factors.values())
        order = symmetry.log_order()
        return [
            f"Data: {self.dataset.describe()}",
            f"Network: {self.num_weights:,} weights.",
            f"Symmetry: permutations of {permuted or 'nothing'}"
            + (f", sign flips of {flips} units" if flips else "")
            + (
                f"; every mode has exp({order:.1f}) copies (log |G| = {order:.1f})."
                if order
                else "."
            ),
        ]

    def fingerprint(self) -> Json:
        """Identify the study: its settings, and hashes of the data and the network,
        which settings only name.
        """
        data = self.dataset
        shapes = map_values(tuple, self.model.site_shapes)
        return as_json(
            settings=drop_names(self.settings.to_dict(), FREE_TO_CHANGE),
            data=digest(
                [data.train_x, data.train_y, data.test_x, data.test_y, data.ood_x]
            ),
            network=digest([str(self.model.net), shapes]),
        )


def build_problem(settings: StudySettings) -> Problem:
    """Load the data, build the network and find its symmetry.

    The network's initial values are drawn from PyTorch's global generator.

    :raises ValueError: if the data, the network or their combination can't be used.
    :raises FileNotFoundError: if the data are missing.
    """
    source: Any = {
        "root": settings.data_root,
        "download": settings.download,
        "seed": settings.seed,
    }
    dataset = datasets.load(
        settings.data,
        # held-out classes serve as out-of-distribution inputs
        hold_out=None if settings.ood else "auto",
        dtype=DTYPES[settings.dtype],
        device=settings.torch_device,
        target=settings.target,
        split=settings.split,
        max_train=settings.max_train,
        max_test=settings.max_test,
        **source,
    )
    if settings.ood:
        dataset = datasets.ood(
            settings.ood, dataset, max_rows=len(dataset.test_x), **source
        )
    is_classification = dataset.task == "classification"
    if settings.noise is not None and is_classification:
        raise ValueError(
            f"--noise {settings.noise} is for regressions; {dataset.name} is a "
            "classification data set"
        )
    net = build_net(settings, dataset)
    settle_statistics(net, dataset.train_x)
    found = find_symmetry(net, dataset.train_x[:2], logits=is_classification)
    likelihood: Likelihood = GaussianLikelihood(
        settings.noise, temperature=settings.temperature
    )
    if is_classification:
        likelihood = CategoricalLikelihood(settings.temperature)
    model = BayesianModel(net, settings.prior(), likelihood, len(dataset.train_x))
    return Problem(settings, dataset, model, found.holding(net))


def build_net(settings: StudySettings, dataset: Dataset) -> nn.Module:
    """Build the network by name, from the user's callable, or as an MLP; on the data's
    device and in their dtype.

    :raises ValueError: if it doesn't fit the data.
    """
    shape = tuple(dataset.input_shape)
    outputs = dataset.num_outputs
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
            output = tuple(net(dataset.train_x[:2]).shape)
    except Exception as error:
        raise ValueError(
            f"the network fails on two rows of {dataset.name}, of shape {shape} each: "
            f"{error}"
        ) from error
    if output != (2, outputs) and not (output == (2,) and outputs == 1):
        raise ValueError(
            f"the network's output for two rows has shape {output}; {dataset.name} "
            f"needs {(2, outputs)}"
        )
    return net


def settle_statistics(net: nn.Module, x: Tensor) -> None:
    """Set the running statistics of batch normalisation that has seen no data to those
    of ``x`` at initial weights.

    A Bayesian network holds them fixed; at their initial mean 0 and variance 1 they
    would normalise nothing.
    """
    layers = [
        module
        for module in net.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if not any(
        layer.num_batches_tracked is None or int(layer.num_batches_tracked)
        for layer in layers
    ):
        torch.optim.swa_utils.update_bn(
            x.tensor_split(-(-len(x) // STATISTICS_ROWS)), net
        )


def noise_scale(model: BayesianModel, weights: Tensors) -> Tensor | float:
    """Return the noise scale of a regression: the fixed one, or one per draw."""
    fixed = getattr(model.likelihood, "scale", None)
    return weights["noise_scale"] if fixed is None else fixed
