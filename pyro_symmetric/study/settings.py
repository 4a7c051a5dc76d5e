"""Settings of a study: checked, comparable and writable as JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pyro_symmetric.calls import did_you_mean

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


@dataclass(frozen=True)
class StudySettings:
    """Everything that determines a study.

    :param data: name of the data set, see :func:`pyro_symmetric.datasets.load`.
    :param data_root: folder that holds data sets.
    :param download: whether missing data may be downloaded.
    :param target: target column of ``csv:FILE``.
    :param split: number of the split, where the data have several.
    :param max_train: use at most so many training rows.
    :param max_test: use at most so many test rows, and as many out-of-distribution rows.
    :param ood: data set of out-of-distribution inputs; ``None`` holds classes out.
    :param hidden: widths of the hidden layers.
    :param activation: of the hidden layers, one of :data:`ACTIVATIONS`.
    :param net: instead of the MLP, the name of one of :data:`pyro_symmetric.networks.NETWORKS`, or
        ``package.module:callable`` that builds the network from ``(input_shape, num_outputs)``.
    :param prior_scale: standard deviation of the Gaussian prior.
    :param prior_scales: overrides for parameters by pattern on their name, e.g. ``{"1.*": 0.5}``.
    :param prior_fan_in: divide the standard deviation of weight matrices by the square root of their number of inputs.
    :param noise: standard deviation of a regression's noise (standardised targets), ``None`` to learn it.
    :param temperature: of the likelihood.
    :param methods: names of the methods, see :mod:`pyro_symmetric.study.methods`.
    :param reference: the method that the others are compared with.
    :param budgets: overrides of methods' budgets, e.g. ``{"ensemble": {"modes": 1000}}``; a finished method whose
        budget changes is made anew.
    :param num_draws: weight samples of each method that are kept and compared.
    :param quick: smaller budgets everywhere: to see that all works, not to draw conclusions.
    :param seed: of everything random.
    :param device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
    :param dtype: ``"float32"`` or ``"float64"``.
    """

    data: str = "digits"
    data_root: str = "data"
    download: bool = False
    target: str | None = None
    split: int = 0
    max_train: int | None = None
    max_test: int | None = None
    ood: str | None = None
    hidden: tuple[int, ...] = (16,)
    activation: str = "relu"
    net: str | None = None
    prior_scale: float = 1.0
    prior_scales: Mapping[str, float] = field(default_factory=dict)
    prior_fan_in: bool = True
    noise: float | None = None
    temperature: float = 1.0
    methods: tuple[str, ...] = DEFAULT_METHODS
    reference: str = "hmc"
    budgets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    num_draws: int = 400
    quick: bool = False
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(self.hidden))
        object.__setattr__(self, "methods", tuple(dict.fromkeys(self.methods)))
        object.__setattr__(self, "prior_scales", dict(self.prior_scales))
        object.__setattr__(self, "budgets", {name: dict(budget) for name, budget in self.budgets.items()})
        _require(
            len(self.hidden) > 0 and all(width >= 1 for width in self.hidden),
            "--hidden",
            _listed(self.hidden),
            "one or more widths of at least 1, such as 32 or 32,32",
        )
        _require(len(self.methods) > 0, "--methods", "empty", "one or more names of methods, such as mean-field,hmc")
        for name in self.budgets:
            _require(name in self.methods, f"--budget {name}", "of no method asked for", f"of {_listed(self.methods)}")
        hint = did_you_mean(self.activation, ACTIVATIONS)
        names = ", ".join(ACTIVATIONS)
        _require(self.activation in ACTIVATIONS, "--activation", self.activation, f"one of {names}{hint}")
        _require(self.dtype in DTYPES, "--dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        _require(self.device in ("cpu", "cuda", "auto"), "--device", self.device, "cpu, cuda or auto")
        _require(self.num_draws >= 8, "--draws", self.num_draws, "at least 8")
        _require(self.max_train is None or self.max_train >= 2, "--max-train", self.max_train, "at least 2")
        _require(self.max_test is None or self.max_test >= 2, "--max-test", self.max_test, "at least 2")
        _require(0 <= self.seed < 2**31, "--seed", self.seed, "a whole number from 0 to 2147483647")
        for name, value in (
            ("--prior-scale", self.prior_scale),
            ("--temperature", self.temperature),
            ("--noise", self.noise),
            *((f"--prior-scale {k}", v) for k, v in self.prior_scales.items()),
        ):
            _require(value is None or (math.isfinite(value) and value > 0), name, value, "a positive number")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda was asked for, but PyTorch sees no CUDA device here; use cpu or auto")

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

    def command(self, out: str | Path) -> str:
        """The command line that repeats the study, as one types it: what differs from the defaults."""
        given = {name: value for name, value in self.to_dict().items() if value != getattr(StudySettings(), name)}
        given["hidden"] = None if self.hidden == StudySettings().hidden else ",".join(map(str, self.hidden))
        given["methods"] = None if self.methods == DEFAULT_METHODS else ",".join(self.methods)
        words = ["pyro-symmetric", "compare"]
        for name, value in given.items():
            option = f"--{ {'num_draws': 'draws'}.get(name, name).replace('_', '-') }"
            if name == "prior_scales":
                words += [word for pattern, scale in value.items() for word in ("--prior-scale", f"{pattern}={scale}")]
            elif name == "budgets":
                parts = [(method, *part) for method, budget in value.items() for part in budget.items()]
                words += [word for method, part, number in parts for word in ("--budget", f"{method}.{part}={number}")]
            elif isinstance(value, bool):
                words.append(option if value else f"--no-{option[2:]}")
            elif value is not None:
                words += [option, str(value)]
        return shlex.join([*words, "--out", str(out)])

    def deciding(self) -> dict[str, Any]:
        """The settings that decide results, as JSON."""
        return {name: value for name, value in self.to_dict().items() if name not in FREE_TO_CHANGE}


def _require(condition: bool, name: str, found: object, right: str) -> None:
    if not condition:
        raise ValueError(f"{name} is {found}; it must be {right}")


def _listed(values: tuple[Any, ...]) -> str:
    return ",".join(map(str, values)) or "empty"
