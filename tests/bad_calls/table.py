"""The table of bad calls: a good call of each public function, and values that one argument mustn't have."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyro
import torch
from torch import nn

import pyro_symmetric as ps

NAN, INF = math.nan, math.inf
COUNTS = (0, -1, 1.5, True, "3", NAN)  # for a whole number that is at least 1
NOT_NEGATIVE = (-1, 1.5, True, "3")  # for one that is at least 0
POSITIVE = (0.0, -1.0, NAN, INF, "1", True)  # for a positive number
FRACTIONS = (0.0, 1.0, -0.5, 1.5, NAN, "0.5", True)  # for one between 0 and 1
FLAGS = (1, "yes", None)  # for True or False
DEVICES = ("banana", 3)
DTYPES = (torch.int32, "float32", 32)
THINGS = (None, 3, "banana")  # for what is neither a number nor a name
ARRAY = np.zeros((5, 3, 2), np.float32)


@dataclass(frozen=True)
class Calls:
    """Calls of one public function.

    :param name: its public name, such as ``"Posterior.thin"``.
    :param call: takes the arguments by keyword.
    :param good: makes arguments that it takes.
    :param bad: argument -> values that it mustn't have.
    :param words: argument -> what the message says instead of its name.
    :param misspelt: whether an unknown option must be refused by its name; not so where options belong to a model.
    :param quick: whether the good call is made, too.
    """

    name: str
    call: Callable[..., Any]
    good: Callable[[], Mapping[str, Any]] = dict
    bad: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    misspelt: bool = True
    quick: bool = True

    def rows(self) -> Iterator[tuple[str, str, Any]]:
        """The name of a bad call in a report: its argument and the value."""
        for argument, values in self.bad.items():
            for value in values:
                yield f"{argument}={in_words(value)}", argument, value
        if self.misspelt:
            yield "an unknown option", "banana", 1


def in_words(value: Any) -> str:
    """A value for the report of a test that failed."""
    if isinstance(value, Made):
        return value.name
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__}{list(value.shape)}"
    return repr(value)[:40] if isinstance(value, str | int | float | type(None)) else type(value).__name__


@dataclass(frozen=True)
class Made:
    """A value that is made when its test runs."""

    name: str
    make: Callable[[], Any]


def made(value: Any) -> Any:
    """A value, made if it has to be."""
    return value.make() if isinstance(value, Made) else value


# what good calls are made of ----------------------------------------------------------------------------------------


def network() -> nn.Module:
    """2 inputs, 3 hidden units, 2 outputs."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """6 rows of two classes."""
    torch.manual_seed(1)
    x = torch.randn(6, 2)
    return x, (x[:, 0] > 0).long()


def model(**options: Any) -> ps.BayesianModel:
    """The network with a prior."""
    return ps.BayesianModel(network(), **options)


@functools.cache
def symmetry() -> ps.Symmetry:
    """Of the network."""
    return ps.find_symmetry(network(), data()[0])


def group() -> ps.Group:
    """Its permutations."""
    return symmetry().permutations


def weights(*batch: int) -> dict[str, torch.Tensor]:
    """Draws of the network's weights, the same each time."""
    torch.manual_seed(2)
    return {site: torch.randn(*batch, *shape) for site, shape in group().site_shapes.items()}


def changed(site: str, value: Callable[[torch.Tensor], Any], *batch: int) -> dict[str, Any]:
    """Draws with one site changed."""
    return {**weights(*batch), site: value(weights(*batch)[site])}


def bad_weights(*batch: int) -> tuple[Any, ...]:
    """Values that are no set of weights of the network."""
    return (
        None,
        3,
        "banana",
        ARRAY,
        [("0.weight", torch.zeros(3, 2))],
        {},
        Made("entry-None", lambda: changed("0.weight", lambda _: None, *batch)),
        Made("entry-array", lambda: changed("0.weight", lambda value: value.numpy(), *batch)),
        Made("misshaped", lambda: changed("0.weight", lambda value: value[..., :-1], *batch)),
        Made("lacking", lambda: {site: value for site, value in weights(*batch).items() if site != "0.weight"}),
    )


NOT_FINITE = (
    Made("entry-NaN", lambda: changed("0.weight", lambda value: value * NAN)),
    Made("entry-inf", lambda: changed("0.weight", lambda value: value / 0)),
)


def not_finite(*batch: int) -> tuple[Made, ...]:
    """Weights with NaN or infinite values."""
    return (
        Made("entry-NaN", lambda: changed("0.weight", lambda value: value * NAN, *batch)),
        Made("entry-inf", lambda: changed("0.weight", lambda value: value / 0, *batch)),
    )


def posterior(chains: int = 2, draws: int = 8) -> ps.Posterior:
    """Chains of the network's weights."""
    return ps.Posterior(weights(chains, draws), {"lp": torch.randn(chains, draws)}, rows="chains")


def guide() -> Any:
    """A set-up Gaussian guide of the model."""
    torch.manual_seed(3)
    pyro.clear_param_store()
    stock = pyro.infer.autoguide.AutoDiagonalNormal(model())
    stock(*data())
    return ps.push_forward(stock, group().identity())


def unused_guide() -> Any:
    """A guide that isn't set up."""
    return pyro.infer.autoguide.AutoDiagonalNormal(model())


def exchanges() -> ps.Group:
    """Exchanges of a factor analysis's factors."""
    return ps.Group.declare({"loadings": (None, "factor"), "scores": ("factor", None)}, FACTORS)


def signed() -> ps.Group:
    """Exchanges and flips of the same factors."""
    axes = {"loadings": (None, "factor"), "scores": ("factor", None)}
    return ps.Group.declare(axes, FACTORS, moves=("permute", "flip"))


FACTORS = {"loadings": torch.zeros(4, 2), "scores": torch.zeros(2, 5)}
