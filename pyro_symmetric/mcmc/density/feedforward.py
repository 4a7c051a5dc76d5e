r"""Feed-forward networks read as a list of layers, so that many weights can be evaluated by hand.

A network qualifies if it is a chain of linear layers with activations between: an :class:`torch.nn.Sequential`, or any
module whose traced graph is such a chain. With features leading, layer :math:`l` of chain :math:`c` is

.. math:: A_{c,l} = f_l(W_{c,l} A_{c,l-1} + b_{c,l}),
    \qquad \frac{\partial E}{\partial W_{c,l}} = \Delta_{c,l} A_{c,l-1}^\top,
    \qquad \Delta_{c,l-1} = f_{l-1}' \odot W_{c,l}^\top \Delta_{c,l}

which :mod:`~pyro_symmetric.mcmc.density.batched` evaluates by batched matrix products and
:mod:`~pyro_symmetric.mcmc.density.native` by compiled code; each is a :class:`Loss`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from pyro_symmetric._process import LOCK
from pyro_symmetric.mcmc.density.engine import Unavailable

LOSSES = ("squares", "cross-entropy", "noise")
Activation = tuple[str, tuple[Any, ...]]  # name and settings


@dataclass(frozen=True)
class Layer:
    """``activation(weight @ inputs + bias)``; ``bias`` is ``None`` without one.

    :param activation: an elementwise function by name.
    :param settings: its own, in the order in which PyTorch takes them.
    """

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    activation: str = "identity"
    settings: tuple[Any, ...] = ()


@dataclass(frozen=True, eq=False)
class NetworkProblem:
    """A network and the data that it is fitted to.

    :param offsets: where each parameter begins in a flat vector of length ``dim``.
    :param x: inputs ``(N, inputs)``.
    :param y: labels ``(N,)``, or real targets ``(N, outputs)``, of ``"noise"`` half as many.
    :param loss: of a row, one of :data:`LOSSES`: the cross-entropy of its label; half the squared error; or that in
        units of a noise that the second half of the outputs gives, and the noise's logarithm.
    :param batch_size: rows of a mini-batch; ``None`` if all rows count.
    """

    layers: list[Layer]
    offsets: Mapping[str, int]
    dim: int
    x: Tensor
    y: Tensor
    loss: str
    batch_size: int | None


class Loss(Protocol):
    """Evaluates a :class:`NetworkProblem`, which it is made of, for many weights at once."""

    name: str
    """The engine's name: ``"native"`` or ``"torch"``."""

    def __init__(self, problem: NetworkProblem) -> None:
        """:raises Unavailable: if it can't evaluate such a problem."""

    def loss_and_gradient(self, w: Tensor, scale: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss ``(C,)``, summed over rows, and ``scale`` times its gradient ``(C, dim)``.

        :param w: flat weights ``(C, dim)``.
        :param scale: ``(C,)``.
        :param index: rows of each chain's mini-batch ``(C, B)``; ``None`` for all.
        """

    def gradient(self, w: Tensor, scale: Tensor, index: Tensor | None) -> Tensor:
        """``scale`` times the gradient alone, which may take less."""


def read_layers(net: nn.Module) -> list[Layer]:
    """The layers of a network in eval mode.

    :raises Unavailable: saying which part of it doesn't fit.
    """
    root = nn.Sequential(net)  # so that a network that is but one layer is read as a layer, too
    try:
        with LOCK:
            nodes = list(_OwnThread().trace(root).nodes)
    except Exception as error:  # tracing runs the module's own code, which may raise anything
        raise Unavailable(f"it can't be traced ({type(error).__name__})") from error
    names = {parameter: name for name, parameter in net.named_parameters()}
    layers: list[Layer] = []
    previous = None
    for node in nodes:
        if node.op == "output":
            if node.args[0] is not previous:
                raise Unavailable("it has more than one output")
            break
        if node.op != "placeholder":
            if node.all_input_nodes != [previous]:
                raise Unavailable(f"{node.name} doesn't follow the operation before it alone")
            _add(layers, node.name, _operation(root, node), names)
        elif previous is not None:
            raise Unavailable("it has more than one input")
        previous = node
    if not layers:
        raise Unavailable("it has no linear layer")
    used = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    if len(set(used)) < len(used):
        raise Unavailable("layers share parameters")
    for below, above in itertools.pairwise(layers):
        if below.outputs != above.inputs:
            raise Unavailable(f"{below.weight} has {below.outputs} outputs, {above.weight} {above.inputs} inputs")
    return layers


# small steps --------------------------------------------------------------------------------------------------------


class _OwnThread(fx.Tracer):
    """Tracing changes, for the whole process, what modules do when they are called; those of other threads pass."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        own = threading.get_ident() == self._thread
        return super().call_module(m, forward, args, kwargs) if own else forward(*args, **kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: Any) -> Any:
        own = threading.get_ident() == self._thread
        return super().getattr(attr, attr_val, parameter_proxy_cache) if own else attr_val


# Name, module class, functions and methods of the same meaning, and the settings that matter with their defaults. They
# are compared by identity: a subclass may do something else.
_ACTIVATIONS: list[tuple[str, type[nn.Module], tuple[Any, ...], dict[str, Any]]] = [
    ("relu", nn.ReLU, (torch.relu, nn.functional.relu, "relu"), {}),
    ("tanh", nn.Tanh, (torch.tanh, nn.functional.tanh, "tanh"), {}),
    ("sigmoid", nn.Sigmoid, (torch.sigmoid, nn.functional.sigmoid, "sigmoid"), {}),
    ("silu", nn.SiLU, (nn.functional.silu,), {}),
    ("gelu", nn.GELU, (nn.functional.gelu,), {"approximate": "none"}),
    ("softplus", nn.Softplus, (nn.functional.softplus,), {"beta": 1, "threshold": 20}),
    ("leaky_relu", nn.LeakyReLU, (nn.functional.leaky_relu,), {"negative_slope": 0.01}),
    ("elu", nn.ELU, (nn.functional.elu,), {"alpha": 1.0}),
    ("hardtanh", nn.Hardtanh, (nn.functional.hardtanh,), {"min_val": -1.0, "max_val": 1.0}),
]
_NOTHING: tuple[type[nn.Module], ...] = (nn.Identity, nn.Flatten, nn.Dropout, nn.AlphaDropout)


def _operation(root: nn.Module, node: fx.Node) -> nn.Linear | Activation | None:
    """The work of a node: a linear layer, an activation or, ``None``, nothing."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if type(module) is nn.Linear:
            return module
        if type(module) in _NOTHING and not (isinstance(module, nn.Flatten) and _reshapes(vars(module))):
            return None
        for name, kind, _, defaults in _ACTIVATIONS:
            if type(module) is kind:
                return name, tuple(vars(module)[setting] for setting in defaults)
        raise Unavailable(f"it has a {type(module).__name__}")
    if node.target in (torch.flatten, "flatten") and not _reshapes(_options(node, "start_dim", "end_dim")):
        return None
    if node.target in (torch.squeeze, "squeeze") and _options(node, "dim").get("dim") in (-1, 1):
        return None  # the last axis is left out if it is 1: outputs without a second axis
    for name, _, functions, defaults in _ACTIVATIONS:
        if any(node.target is f or (isinstance(f, str) and node.target == f) for f in functions):
            settings = {**defaults, **_options(node, *defaults)}
            return name, tuple(settings[setting] for setting in defaults)
    raise Unavailable(f"it calls {getattr(node.target, '__name__', node.target)}")


def _options(node: fx.Node, *names: str) -> dict[str, Any]:
    return {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}


def _reshapes(options: Mapping[str, Any]) -> bool:
    """True if a flattening isn't the one of all features."""
    return options.get("start_dim", 0) != 1 or options.get("end_dim", -1) != -1


def _add(layers: list[Layer], name: str, operation: nn.Linear | Activation | None, names: dict[Any, str]) -> None:
    if isinstance(operation, nn.Linear):
        if any(held not in names for held in (operation.weight, operation.bias) if held is not None):
            raise Unavailable(f"weights of {name} are frozen")
        bias = None if operation.bias is None else names[operation.bias]
        layers.append(Layer(names[operation.weight], bias, operation.in_features, operation.out_features))
    elif operation is not None:
        if not layers or layers[-1].activation != "identity":
            raise Unavailable(f"the activation {name} doesn't follow a linear layer")
        layers[-1] = replace(layers[-1], activation=operation[0], settings=operation[1])
