r"""Feed-forward networks read as a list of layers, so that many weights can be evaluated by hand.

A network qualifies if it is a chain of linear layers with activations between: an :class:`torch.nn.Sequential`, or any
module whose traced graph is such a chain. With features leading, layer :math:`l` of chain :math:`c` is

.. math:: A_{c,l} = f_l(W_{c,l} A_{c,l-1} + b_{c,l}),
    \qquad \frac{\partial E}{\partial W_{c,l}} = \Delta_{c,l} A_{c,l-1}^\top,
    \qquad \Delta_{c,l-1} = f_{l-1}' \odot W_{c,l}^\top \Delta_{c,l}

which :mod:`~pyro_symmetric.mcmc.batched` evaluates by batched matrix products and
:mod:`~pyro_symmetric.mcmc.native` by compiled code.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn


@dataclass(frozen=True)
class Activation:
    """An elementwise function by name, with its settings in the order in which PyTorch takes them."""

    name: str = "identity"
    settings: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Layer:
    """``activation(weight @ inputs + bias)``; ``bias`` is ``None`` without one."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    activation: Activation = Activation()


class NotFeedForward(Exception):
    """Why a network is not such a chain."""


def read_layers(net: nn.Module) -> list[Layer]:
    """The layers of a network in eval mode.

    :raises NotFeedForward: saying which part of it doesn't fit.
    """
    root = nn.Sequential(net)  # so that a network that is but one layer is read as a layer, too
    try:
        nodes = list(fx.symbolic_trace(root).graph.nodes)
    except Exception as error:  # tracing runs the module's own code, which may raise anything
        raise NotFeedForward(f"it can't be traced ({type(error).__name__})") from error
    names = {parameter: name for name, parameter in net.named_parameters()}
    layers: list[Layer] = []
    previous = None
    for node in nodes:
        if node.op == "output":
            if node.args[0] is not previous:
                raise NotFeedForward("it has more than one output")
            break
        if node.op != "placeholder":
            if node.all_input_nodes != [previous]:
                raise NotFeedForward(f"{node.name} doesn't follow the operation before it alone")
            _add(layers, *_operation(root, node), names)
        elif previous is not None:
            raise NotFeedForward("it has more than one input")
        previous = node
    if not layers:
        raise NotFeedForward("it has no linear layer")
    used = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    if len(set(used)) < len(used):
        raise NotFeedForward("layers share parameters")
    for below, above in itertools.pairwise(layers):
        if below.outputs != above.inputs:
            raise NotFeedForward(f"{below.weight} has {below.outputs} outputs, {above.weight} {above.inputs} inputs")
    return layers


# small steps --------------------------------------------------------------------------------------------------------


def _settings(*names: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda options: tuple(options[name] for name in names)


# Name -> module class, functions and methods of the same meaning, and which of their options matter. They are compared
# by identity: a subclass may do something else.
_ACTIVATIONS: list[tuple[str, type[nn.Module], tuple[Any, ...], Callable[[Any], tuple[Any, ...]]]] = [
    ("relu", nn.ReLU, (torch.relu, nn.functional.relu, "relu"), _settings()),
    ("tanh", nn.Tanh, (torch.tanh, nn.functional.tanh, "tanh"), _settings()),
    ("sigmoid", nn.Sigmoid, (torch.sigmoid, nn.functional.sigmoid, "sigmoid"), _settings()),
    ("silu", nn.SiLU, (nn.functional.silu,), _settings()),
    ("gelu", nn.GELU, (nn.functional.gelu,), _settings("approximate")),
    ("softplus", nn.Softplus, (nn.functional.softplus,), _settings("beta", "threshold")),
    ("leaky_relu", nn.LeakyReLU, (nn.functional.leaky_relu,), _settings("negative_slope")),
    ("elu", nn.ELU, (nn.functional.elu,), _settings("alpha")),
    ("hardtanh", nn.Hardtanh, (nn.functional.hardtanh,), _settings("min_val", "max_val")),
]
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gelu": {"approximate": "none"},
    "softplus": {"beta": 1, "threshold": 20},
    "leaky_relu": {"negative_slope": 0.01},
    "elu": {"alpha": 1.0},
    "hardtanh": {"min_val": -1.0, "max_val": 1.0},
}
_NOTHING: tuple[type[nn.Module], ...] = (nn.Identity, nn.Flatten, nn.Dropout, nn.AlphaDropout)


def _operation(root: nn.Module, node: fx.Node) -> tuple[str, nn.Linear | Activation | None]:
    """A node's name and what it does: a linear layer, an activation or, ``None``, nothing."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if type(module) is nn.Linear:
            return node.name, module
        if type(module) in _NOTHING and not (isinstance(module, nn.Flatten) and _reshapes(vars(module))):
            return node.name, None
        for name, kind, _, settings in _ACTIVATIONS:
            if type(module) is kind:
                return node.name, Activation(name, settings(vars(module)))
        raise NotFeedForward(f"it has a {type(module).__name__}")
    if node.target in (torch.flatten, "flatten") and not _reshapes(_options(node, "start_dim", "end_dim")):
        return node.name, None
    if node.target in (torch.squeeze, "squeeze") and _options(node, "dim").get("dim") in (-1, 1):
        return node.name, None  # the last axis is left out if it is 1: outputs without a second axis
    for name, _, functions, settings in _ACTIVATIONS:
        if any(node.target is f or (isinstance(f, str) and node.target == f) for f in functions):
            names = tuple(_DEFAULTS.get(name, {}))
            given = _options(node, *names)
            return node.name, Activation(name, settings({**_DEFAULTS.get(name, {}), **given}))
    raise NotFeedForward(f"it calls {getattr(node.target, '__name__', node.target)}")


def _options(node: fx.Node, *names: str) -> dict[str, Any]:
    return {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}


def _reshapes(options: Mapping[str, Any]) -> bool:
    """Whether a flattening isn't the one of all features."""
    return options.get("start_dim", 0) != 1 or options.get("end_dim", -1) != -1


def _add(layers: list[Layer], name: str, operation: nn.Linear | Activation | None, names: dict[Any, str]) -> None:
    if isinstance(operation, nn.Linear):
        bias = None if operation.bias is None else names[operation.bias]
        layers.append(Layer(names[operation.weight], bias, operation.in_features, operation.out_features))
    elif operation is not None:
        if not layers or layers[-1].activation != Activation():
            raise NotFeedForward(f"the activation {name} doesn't follow a linear layer")
        layers[-1] = replace(layers[-1], activation=operation)


@dataclass(frozen=True, eq=False)
class Data:
    """What a network is fitted to.

    :param x: inputs ``(N, inputs)``.
    :param y: labels ``(N,)``, or real targets ``(N, outputs)``.
    :param categorical: whether the loss of a row is the cross-entropy of its label, or else half the squared error.
    """

    x: Tensor
    y: Tensor
    categorical: bool


@dataclass(frozen=True)
class Problem:
    """Layers, where their parameters lie in a flat vector of length ``dim``, and the data."""

    layers: list[Layer]
    offsets: Mapping[str, int]
    dim: int
    data: Data
    batch_size: int | None


class Engine:
    """Evaluates a :class:`Problem` for many weights at once."""

    name = ""

    def loss_and_gradient(self, w: Tensor, scale: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss ``(C,)``, summed over rows, and ``scale`` times its gradient ``(C, dim)``.

        :param w: flat weights ``(C, dim)``.
        :param scale: ``(C,)``.
        :param index: rows of each chain's mini-batch ``(C, B)``; ``None`` for all.
        """
        raise NotImplementedError
