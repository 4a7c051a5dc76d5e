"""Settings of a study: checked, comparable and writable as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyro_symmetric import arguments

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "leaky-relu": nn.LeakyReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "elu": nn.ELU,
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}

DEFAULT_METHODS = ("mean-field", "symmetrized", "symmetrized-blocks", "aligned", "ensemble", "sghmc", "hmc")

# Neither changes what a finished method has computed, so a study may be continued with others.
FREE_TO_CHANGE = frozenset({"methods", "reference", "budgets", "device", "data_root", "download"})


def option(default: Any, text: str, metavar: str | None = None) -> Any:
    """A setting that the command line offers under its name.

    :param text: the option's help.
    """
    return field(default=default, metadata={"help": text, "metavar": metavar})


@dataclass(frozen=True)
class StudySettings:
    """Everything that determines a study; each field is an option of ``pyro-symmetric compare``, whose help is its.

    :param prior_scales: overrides of ``prior_scale`` for parameters by pattern on their name, e.g. ``{"1.*": 0.5}``.
    :param budgets: overrides of methods' budgets, e.g. ``{"ensemble": {"modes": 1000}}``; a finished method whose
        budget changes is made anew.
    """

    data: str = option(
        "digits",
        "digits (default), wine, breast-cancer, diabetes; mnist, fashion-mnist, cifar10, cifar100, svhn; uci/<name>; "
        "csv:FILE",
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
    prior_scale: float = option(
        1.0,
        "standard deviation of the Gaussian prior (default: 1); with a pattern on parameters' names, such as 1.*=0.5, "
        "for these; may be repeated",
        "[PATTERN=]S",
    )
    prior_scales: Mapping[str, float] = field(default_factory=dict)
    prior_fan_in: bool = option(
        True, "divide it, for weight matrices, by the square root of the layer's number of inputs (default: yes)"
    )
    noise: float | None = option(None, "fixed noise of a regression on standardised targets (default: learnt)", "S")
    temperature: float = option(1.0, "likelihood temperature (default: 1)", "T")
    methods: tuple[str, ...] = option(
        DEFAULT_METHODS,
        f"methods to compare (default: {','.join(DEFAULT_METHODS)}); help lists all of them, with their budgets",
        "A[,B...]",
    )
    reference: str = option("hmc", "the method that the others are compared with (default: hmc)", "METHOD")
    budgets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    draws: int = option(400, "weight samples of each method to compare (default: 400)", "N")
    quick: bool = option(False, "small budgets: see that all works in under two minutes")
    seed: int = option(0, "seed of everything random (default: 0)", "N")
    device: str = option("auto", "cpu, cuda or auto (default)")
    dtype: str = option("float32", "float32 (default) or float64")

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        object.__setattr__(self, "prior_scales", dict(self.prior_scales))
        object.__setattr__(self, "budgets", {name: dict(budget) for name, budget in self.budgets.items()})
        for name in ("hidden", "methods"):
            if not getattr(self, name):
                raise ValueError(f"--{name} is empty; it must list one or more")
        for width in self.hidden:
            arguments.whole("a width of --hidden", width, 1)
        for name in self.budgets:
            arguments.one_of("a method of --budget", name, self.methods)
        arguments.one_of("--activation", self.activation, ACTIVATIONS)
        arguments.one_of("--dtype", self.dtype, DTYPES)
        arguments.one_of("--device", self.device, ("cpu", "cuda", "auto"))
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device is cuda, but PyTorch sees no CUDA device here; use cpu or auto")
        arguments.whole("--seed", self.seed, 0, 2**31 - 1)
        arguments.whole("--draws", self.draws, 8)
        arguments.whole("--max-train", self.max_train, 2, none="all")
        arguments.whole("--max-test", self.max_test, 2, none="all")
        arguments.positive("--noise", self.noise, none="one that is learnt")
        arguments.positive("--temperature", self.temperature)
        for scale in (self.prior_scale, *self.prior_scales.values()):
            arguments.positive("--prior-scale", scale)

    @property
    def torch_device(self) -> torch.device:
        """The device that ``device`` stands for here."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of that name."""
        return DTYPES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "hidden": list(self.hidden), "methods": list(self.methods)}

    def deciding(self) -> dict[str, Any]:
        """The settings that decide results, as JSON."""
        return {name: value for name, value in self.to_dict().items() if name not in FREE_TO_CHANGE}

    def command(self, out: str | Path) -> str:
        """The command line that repeats the study, as one types it: what differs from the defaults."""
        words = ["pyro-symmetric", "compare"]
        for one in fields(self):
            value, option = getattr(self, one.name), f"--{one.name.replace('_', '-')}"
            if one.name == "prior_scales":
                words += [word for pattern, scale in value.items() for word in ("--prior-scale", f"{pattern}={scale}")]
            elif one.name == "budgets":
                parts = [(method, *part) for method, budget in value.items() for part in budget.items()]
                words += [word for method, part, number in parts for word in ("--budget", f"{method}.{part}={number}")]
            elif value == one.default:
                continue
            elif isinstance(value, bool):
                words.append(option if value else f"--no-{option[2:]}")
            else:
                words += [option, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
        return shlex.join([*words, "--out", str(out)])
