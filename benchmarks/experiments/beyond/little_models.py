"""Models with few rows of data, each for a batch of data sets at once.

All weights are standard normal a priori; scales stand in the likelihood. Weights have
shapes ``(..., *site_shape)`` and data ``(..., rows, inputs)``, whose batches broadcast.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

import pyro_symmetric as ps

Weights = Mapping[str, Tensor]
TEST_ROWS = 200
ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu}
IMAGE, PATCH, STRIDE = 8, 4, 2
POSITIONS = ((IMAGE - PATCH) // STRIDE + 1) ** 2


class Model(ABC):
    """A likelihood of rows given weights, and the group that leaves it unchanged."""

    shapes: dict[str, tuple[int, ...]]
    axes: dict[str, tuple[str | None, ...]]
    moves: str | tuple[str, ...] = "permute"

    @property
    def group(self) -> ps.Group:
        shapes = {site: torch.Size(shape) for site, shape in self.shapes.items()}
        return ps.Group.declare(self.axes, shapes, self.moves)

    @property
    def action(self) -> ps.groups.Action:
        shapes = {site: torch.Size(shape) for site, shape in self.shapes.items()}
        return ps.groups.Action(self.group, list(shapes), shapes)

    @abstractmethod
    def log_likelihood(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        """Return the log-density of every row, ``(..., rows)``."""

    def mean(self, weights: Weights, x: Tensor) -> Tensor | None:
        """Return the expectation of every ``y``, if the model has one."""
        return None


class Network(Model):
    """A network with one output.

    :param noise: the standard deviation of a real ``y``; ``None`` if ``y`` is 0 or 1.
    """

    noise: float | None

    @abstractmethod
    def output(self, weights: Weights, x: Tensor) -> Tensor:
        """Return the network's output for every row."""

    def log_likelihood(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        output = self.output(weights, x)
        if self.noise is None:
            return y * logsigmoid(output) + (1 - y) * logsigmoid(-output)
        residual = (output - y) / self.noise
        return (
            -0.5 * residual.square()
            - math.log(self.noise)
            - 0.5 * math.log(2 * math.pi)
        )

    def mean(self, weights: Weights, x: Tensor) -> Tensor:
        output = self.output(weights, x)
        return output.sigmoid() if self.noise is None else output


class Perceptron(Network):
    """Hidden layers of the given widths.

    :param weight_scale: prior deviation of biases and, over the root of the number of
        inputs, of weights; ``output_scale``: likewise of the last layer's weights.
    :param fan_in: whether weights are divided by that root at all.
    """

    def __init__(
        self,
        inputs: int,
        widths: tuple[int, ...],
        activation: str,
        weight_scale: float,
        output_scale: float,
        noise: float | None,
        fan_in: bool = True,
    ):
        self.noise, self.weight_scale = noise, weight_scale
        self.activation = ACTIVATIONS[activation]
        self.shapes, self.axes, self.scales = {}, {}, []
        units = None
        for number, width in enumerate(widths):
            name = f"layer {number}"
            self.shapes |= {f"w{number}": (width, inputs), f"b{number}": (width,)}
            self.axes |= {f"w{number}": (name, units), f"b{number}": (name,)}
            self.scales.append(weight_scale / (inputs**0.5 if fan_in else 1.0))
            inputs, units = width, name
        self.shapes |= {"out": (inputs,), "shift": (1,)}
        self.axes |= {"out": (units,), "shift": (None,)}
        self.output_scale = output_scale / (inputs**0.5 if fan_in else 1.0)

    def output(self, weights: Weights, x: Tensor) -> Tensor:
        hidden = x
        for number, scale in enumerate(self.scales):
            bias = weights[f"b{number}"].unsqueeze(-2) * self.weight_scale
            hidden = self.activation(hidden @ (weights[f"w{number}"].mT * scale) + bias)
        summed = (hidden @ weights["out"].unsqueeze(-1)).squeeze(-1)
        return summed * self.output_scale + weights["shift"]


class Convolution(Network):
    """A convolution of images of 8 x 8 by patches of 4 x 4 with stride 2, tanh, and a
    linear map of all channels and positions to a logit.
    """

    noise = None

    def __init__(self, channels: int, weight_scale: float, output_scale: float):
        self.shapes = {
            "w": (channels, PATCH**2),
            "b": (channels,),
            "out": (channels, POSITIONS),
            "shift": (1,),
        }
        unit = "channel"
        self.axes = {
            "w": (unit, None),
            "b": (unit,),
            "out": (unit, None),
            "shift": (None,),
        }
        self.weight_scale = weight_scale
        self.output_scale = output_scale / (channels * POSITIONS) ** 0.5

    def output(self, weights: Weights, x: Tensor) -> Tensor:
        images = x.unflatten(-1, (IMAGE, IMAGE))
        patches = images.unfold(-2, PATCH, STRIDE).unfold(-2, PATCH, STRIDE)
        patches = patches.flatten(-2).flatten(-3, -2)  # (..., rows, positions, pixels)
        filters = weights["w"].mT.unsqueeze(-3) * (self.weight_scale / PATCH)
        bias = weights["b"][..., None, None, :] * self.weight_scale
        hidden = torch.tanh(patches @ filters + bias)
        summed = (hidden * weights["out"].mT.unsqueeze(-3)).sum((-2, -1))
        return summed * self.output_scale + weights["shift"]


class Mixture(Model):
    """Normal components of deviation one in the plane, with more of them than there are
    clusters.
    """

    def __init__(self, components: int, spread: float):
        self.spread = spread
        self.shapes = {"locs": (components, 2), "logits": (components,)}
        self.axes = {"locs": ("component", None), "logits": ("component",)}

    def log_likelihood(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        locs = weights["locs"].unsqueeze(-3) * self.spread
        squares = (x.unsqueeze(-2) - locs).square().sum(-1)
        shares = weights["logits"].log_softmax(-1).unsqueeze(-2)
        return (shares - 0.5 * squares).logsumexp(-1) - math.log(2 * math.pi)


class Factors(Model):
    """A factor analysis with more factors than the data have, whose scores are
    integrated out.
    """

    moves = ("permute", "flip")

    def __init__(self, dimension: int, factors: int, noise: float):
        self.noise = noise
        self.shapes = {"loadings": (dimension, factors)}
        self.axes = {"loadings": (None, "factor")}

    def log_likelihood(self, weights: Weights, x: Tensor, y: Tensor) -> Tensor:
        loadings = weights["loadings"]
        eye = torch.eye(loadings.shape[-2])
        covariance = loadings @ loadings.mT + self.noise**2 * eye
        tril = torch.linalg.cholesky(covariance)
        whitened = torch.linalg.solve_triangular(tril, x.mT, upper=False)
        log_det = tril.diagonal(dim1=-2, dim2=-1).log().sum(-1, keepdim=True)
        constant = 0.5 * loadings.shape[-2] * math.log(2 * math.pi)
        return -0.5 * whitened.square().sum(-2) - log_det - constant


# data ---------------------------------------------------------------------------------


class Data(NamedTuple):
    """Training rows ``x``, ``y`` and test rows, of a batch of data sets."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True)
class Task:
    """A number of training rows of a source."""

    source: str
    rows: int
    noise: float | None = None

    def draw(self, seeds: range) -> Data:
        sets = [
            SOURCES[self.source](
                self.rows + TEST_ROWS, torch.Generator().manual_seed(9000 + seed)
            )
            for seed in seeds
        ]
        x, y = (torch.stack(parts) for parts in zip(*sets, strict=True))
        n = self.rows
        return Data(x[:, :n], y[:, :n], x[:, n:], y[:, n:])


def moons(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    angle = torch.rand(rows, generator=random) * math.pi
    label = (torch.rand(rows, generator=random) < 0.5).float()
    side = 1 - 2 * label
    place = torch.stack(
        [angle.cos() * side + label, angle.sin() * side + label / 2], -1
    )
    place = place + 0.2 * torch.randn(rows, 2, generator=random)
    return (place - torch.tensor([0.5, 0.25])) * 1.5, label


def sine(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.rand(rows, 1, generator=random) * 4 - 2
    y = torch.sin(2 * x[:, 0] + 0.3)
    return x, y + SINE_NOISE * torch.randn(rows, generator=random)


def digits(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Threes and eights of scikit-learn's digits."""
    x, label = _digits_3_and_8()
    order = torch.randperm(len(label), generator=random)[:rows]
    return x[order], label[order]


def clusters(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Three clusters in the plane."""
    centres = torch.tensor([[-3.0, 0.0], [3.0, 0.0], [0.0, 4.0]])
    label = torch.randint(3, (rows,), generator=random)
    x = centres[label] + torch.randn(rows, 2, generator=random)
    return x, label.float()


def two_factors(rows: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Ten dimensions with two factors."""
    loadings = torch.randn(10, 2, generator=random)
    scores = torch.randn(rows, 2, generator=random)
    x = scores @ loadings.T + FACTOR_NOISE * torch.randn(rows, 10, generator=random)
    return x, torch.zeros(rows)


@functools.cache
def _digits_3_and_8() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images = load_digits()
    wanted = (images.target == 3) | (images.target == 8)
    x = torch.tensor(images.data[wanted], dtype=torch.float32) / 8 - 0.6
    return x, torch.tensor(images.target[wanted] == 8).float()


SINE_NOISE, FACTOR_NOISE = 0.2, 0.5
SOURCES = {
    "moons": moons,
    "sine": sine,
    "digits 3 and 8": digits,
    "clusters": clusters,
    "two factors": two_factors,
}
