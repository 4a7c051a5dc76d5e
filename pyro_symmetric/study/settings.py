"""Settings of a study: checked, comparable and writable as JSON."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyro_symmetric import arguments
from pyro_symmetric.models import GaussianPrior

KINDS: tuple[type[nn.Module], ...] = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU)
ACTIVATIONS = {**{kind.__name__.lower(): kind for kind in KINDS}, "leaky-relu": nn.LeakyReLU}
DTYPES = {"float32": torch.float32, "float64": torch.float64}

DEFAULT_METHODS = ("mean-field", "symmetrized", "symmetrized-blocks", "aligned", "ensemble", "sghmc", "hmc")

# Neither changes what a finished method has computed, so a study may be continued with others.
FREE_TO_CHANGE = frozenset({"methods", "reference", "device", "data_root", "download"})


def option(default: Any, text: str, metavar: str | None = None) -> Any:
    """A setting that the command line offers under its name.

    :param text: the option's help.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass(frozen=True)
class StudySettings:
    """Everything that determines a study: each field is an option of ``pyro-symmetric compare``, whose help is its."""

    data: str = option(
        "digits",
        "digits (default), wine, breast-cancer, diabetes; mnist, fashion-mnist, cifar10, cifar100, svhn; uci/<name>; "
        "csv:FILE; images:FOLDER, a folder of pictures for each class",
        "NAME",
    )
    data_root: str = option("data", "where data sets lie (default: data)", "FOLDER")
    download: bool = option(False, "download a missing data set to the data root")
    target: str | None = option(None, "target column of csv:FILE", "COLUMN")
    split: int = option(0, "number of the train/test split (default: 0)", "K")
    max_train: int | None = option(None, "use at most N training rows", "N")
    max_test: int | None = option(None, "use at most N test rows, and as many out-of-distribution rows", "N")
    ood: str | None = option(None, "data set of out-of-distribution inputs (default: held-out classes)", "NAME")
    hidden: tuple[int, ...] = option((16,), "widths of the hidden layers (default: 16)", "N[,N...]")
    activation: str = option("relu", "relu (default), tanh, leaky-relu, gelu, silu, sigmoid, elu")
    net: str | None = option(
        None,
        "optunet, resnet20 (filter-response normalisation), resnet18, or package.module:callable, called as "
        "callable(input_shape, num_outputs)",
        "NAME",
    )
    prior_scale: tuple[str, ...] = option(
        ("1",),
        "standard deviation of the Gaussian prior (default: 1); after a pattern on parameters' names, that of these: "
        "2,1.*=0.5",
        "S[,PATTERN=S...]",
    )
    prior_fan_in: bool = option(
        True, "divide it, for weight matrices, by the square root of the layer's number of inputs (default: yes)"
    )
    noise: float | None = option(None, "fixed noise of a regression on standardised targets (default: learnt)", "S")
    temperature: float = option(1.0, "likelihood temperature (default: 1)", "T")
    methods: tuple[str, ...] = option(
        DEFAULT_METHODS,
        f"methods to compare (default: {','.join(DEFAULT_METHODS)}); a method may come more than once, on other "
        "budgets: swag,swag:modes=10,hmc:chains=64:draws=100; help lists all of them, with their budgets",
        "A[:PART=N...][,B...]",
    )
    reference: str = option("hmc", "the method that the others are compared with (default: hmc)", "METHOD")
    draws: int = option(400, "weight samples of each method to compare (default: 400)", "N")
    quick: bool = option(False, "small budgets: see that all works in under two minutes")
    seed: int = option(0, "seed of everything random (default: 0)", "N")
    device: str = option("auto", "cpu, cuda or auto (default)")
    dtype: str = option("float32", "float32 (default) or float64")

    def __post_init__(self) -> None:
        if isinstance(self.prior_scale, str | int | float):
            object.__setattr__(self, "prior_scale", str(self.prior_scale).split(","))
        object.__setattr__(self, "prior_scale", [str(scale).removesuffix(".0") for scale in self.prior_scale])
        for name in ("hidden", "methods", "prior_scale"):
            values = tuple(dict.fromkeys(getattr(self, name))) if name == "methods" else tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if not values:
                raise ValueError(f"--{name} is empty; it must list one or more")
        for width in self.hidden:
            arguments.whole("a width of --hidden", width, 1)
        arguments.one_of("--activation", self.activation, ACTIVATIONS)
        arguments.one_of("--dtype", self.dtype, DTYPES)
        arguments.one_of("--device", self.device, ("cpu", "cuda", "auto"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device is cuda, but PyTorch sees no CUDA device here; use cpu or auto")
        arguments.whole("--seed", self.seed, 0, 2**31 - 1)
        arguments.whole("--draws", self.draws, 8)
        arguments.positive("--noise", self.noise, none="one that is learnt")
        arguments.positive("--temperature", self.temperature)

    @property
    def torch_device(self) -> torch.device:
        """The device that ``device`` stands for here."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def prior(self) -> GaussianPrior:
        """The prior of the network's parameters."""
        scales = {pattern: float(scale) for pattern, _, scale in (one.rpartition("=") for one in self.prior_scale)}
        return GaussianPrior(scales.pop("", 1.0), self.prior_fan_in, scales)

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    def deciding(self) -> dict[str, Any]:
        """The settings that decide results, as JSON."""
        return {name: value for name, value in self.to_dict().items() if name not in FREE_TO_CHANGE}

    def command(self, out: str | Path) -> str:
        """The command line that repeats the study, as one types it: what differs from the defaults."""
        words = ["pyro-symmetric", "compare"]
        for one in fields(self):
            value, name = getattr(self, one.name), one.name.replace("_", "-")
            if value == one.default:
                continue
            words.append(f"--{name}" if value is not False else f"--no-{name}")
            if not isinstance(value, bool):
                words.append(",".join(map(str, value)) if isinstance(value, tuple) else str(value))
        return shlex.join([*words, "--out", str(out)])
