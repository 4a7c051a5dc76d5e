r"""Engine ``"layers"``: the energy of a Bayesian feed-forward network and its gradient, without the model's evaluation.

.. math:: U(z) = \beta \sum_i \ell_i(w) - \log p(w) + \text{const}, \qquad \beta = \frac{N}{B\,T}\,\tau

with :math:`\ell` the cross-entropy and :math:`\tau = 1`, or half the squared error and :math:`\tau` the noise's
precision. A network qualifies if it is a chain of linear layers with activations between: an
:class:`torch.nn.Sequential`, or any module whose traced graph is such a chain. Its loss is evaluated on a CPU in tiles
of rows (:mod:`~pyro_symmetric.mcmc.density.tiles`), elsewhere and for wide layers by batched products. Gaussian priors
on its parameters are added in closed form, and whatever else is latent or not Gaussian by autograd.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributions import Distribution
from torch.nn import functional

from pyro_symmetric._process import LOCK
from pyro_symmetric.layout import Layout, is_identity
from pyro_symmetric.likelihoods import CategoricalLikelihood, GaussianLikelihood
from pyro_symmetric.mcmc.density.eager import Evaluation, Unavailable
from pyro_symmetric.mcmc.density.targets import ROWS, NetworkTarget, Rows
from pyro_symmetric.models import normal_base

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
WEIGHT_BYTES = 2**19  # beyond it a chain's weights leave the cache, and packed matrix products are faster
THREAD_FLOPS = 2e7  # less work than this isn't worth a thread
# Activations, PyTorch's functions and methods of the same meaning, and their settings. They are compared by identity: a
# subclass may do something else.
ACTIVATIONS: dict[type[nn.Module], tuple[tuple[Any, ...], tuple[str, ...]]] = {
    nn.ReLU: ((torch.relu, functional.relu, "relu"), ()),
    nn.Tanh: ((torch.tanh, functional.tanh, "tanh"), ()),
    nn.Sigmoid: ((torch.sigmoid, functional.sigmoid, "sigmoid"), ()),
    nn.SiLU: ((functional.silu,), ()),
    nn.GELU: ((functional.gelu,), ("approximate",)),
    nn.Softplus: ((functional.softplus,), ("beta", "threshold")),
    nn.LeakyReLU: ((functional.leaky_relu,), ("negative_slope",)),
    nn.ELU: ((functional.elu,), ("alpha",)),
    nn.Hardtanh: ((functional.hardtanh,), ("min_val", "max_val")),
}
NOTHING: tuple[type[nn.Module], ...] = (nn.Identity, nn.Flatten, nn.Dropout, nn.AlphaDropout)
TILED = {nn.Identity: 0, nn.ReLU: 1, nn.LeakyReLU: 1, nn.Tanh: 2, nn.Sigmoid: 3, nn.SiLU: 4, nn.ELU: 5}  # as tiles.py


class Layers:
    """The engine; it is compared with the model itself before it serves.

    :raises Unavailable: saying what about the model doesn't fit.
    """

    name = "layers"

    def __init__(self, target: NetworkTarget, layout: Layout):
        likelihood, problem = target.model.likelihood, problem_of(target, layout)
        self.dim, self.batch_size, self._sites, self._like = problem.dim, problem.batch_size, target.sites, problem.x
        self._names = [name for name, _ in target.model.net.named_parameters()]
        self._share = len(problem.x) / (problem.batch_size or len(problem.x)) / likelihood.temperature
        # observations with a normal density, and the logarithm of their noise; None if it is learnt
        self._count = 0 if problem.labels else problem.y.numel() / likelihood.temperature
        scale = likelihood.scale if isinstance(likelihood, GaussianLikelihood) else 1.0
        self._log_noise = None if scale is None else math.log(scale)
        self._prior = _GaussianPriors.of({name: target.sites[name] for name in self._names}, layout)
        # What autograd goes through, and where it begins in z: the sites whose log-density isn't in closed form.
        self._begin = 0 if self._prior is None else self.dim
        others = {name: fn for name, fn in target.sites.items() if self._prior is None or name not in self._names}
        self._others = Layout.of(others)
        self.tiled = is_tiled(problem)
        self._loss: Batched | Tiled = Tiled(problem) if self.tiled else Batched(problem)

    def serves(self, z: Tensor, rows: Rows | None) -> bool:
        """True if it was made for such points and mini-batches."""
        size = None if rows is None else rows[ROWS].shape[-1]
        return (z.dtype, z.device, size) == (self._like.dtype, self._like.device, self.batch_size) and len(z) > 0

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        index, z = None if rows is None else rows[ROWS], z.detach()
        if self._prior is None or self._log_noise is None or self._begin < z.shape[1]:
            return self._with_autograd(z, index)
        scale = math.exp(-2 * self._log_noise) * self._share
        loss, gradient = self._loss(z, z.new_full((len(z),), scale), index)
        return self._prior.add(z, loss, gradient, scale, self._count * (self._log_noise + HALF_LOG_2PI))

    def _with_autograd(self, z: Tensor, index: Tensor | None) -> Evaluation:
        with torch.enable_grad():
            leaf = z[:, self._begin :].requires_grad_()
            weights, log_det = self._others.constrain_with_log_det(leaf)
            rest = -log_det
            for name, value in weights.items():
                rest = rest - self._sites[name].log_prob(value).reshape(len(z), -1).sum(-1)
            known = z.new_full((len(z),), self._log_noise or 0.0)
            log_noise = weights["noise_scale"].log() if self._log_noise is None else known
            w = z[:, : self.dim]
            if self._prior is None:
                w = torch.cat([weights[name].reshape(len(z), -1) for name in self._names], 1)
            scale = (-2 * log_noise).exp() * self._share
            loss, gradient = self._loss(w.detach(), scale.detach(), index)
            energy = loss * scale + self._count * (log_noise + HALF_LOG_2PI) + rest
            if self._prior is None:
                (slope,) = torch.autograd.grad([energy, w], leaf, [torch.ones_like(energy), gradient])
                return energy.detach(), slope
            (slope,) = torch.autograd.grad(energy.sum(), leaf)
        energy, gradient = self._prior.add(w, energy.detach(), gradient)
        return energy, torch.cat([gradient, slope], 1)


@dataclass(frozen=True, eq=False)
class _GaussianPriors:
    """Independent normal distributions of flat weights."""

    loc: Tensor
    precision: Tensor
    constant: float

    @classmethod
    def of(cls, priors: Mapping[str, Distribution], layout: Layout) -> _GaussianPriors | None:
        """``None`` if one isn't normal, or is mapped to unconstrained values."""
        bases = [normal_base(prior) for prior in priors.values()]
        if any(base is None for base in bases) or not all(is_identity(layout.transforms[name]) for name in priors):
            return None
        loc, scale = (torch.cat([getattr(base, name).reshape(-1) for base in bases]) for name in ("loc", "scale"))
        return cls(loc, scale**-2, float((scale.double().log() + HALF_LOG_2PI).sum()))

    def add(self, w: Tensor, energy: Tensor, gradient: Tensor, scale: float = 1.0, constant: float = 0.0) -> Evaluation:
        """Add their part to ``scale`` times an energy and a constant, and to its gradient, both in place."""
        centred = w - self.loc
        energy.addmv_(centred.square(), self.precision, beta=scale, alpha=0.5).add_(self.constant + constant)
        return energy, gradient.addcmul_(centred, self.precision)


# losses -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """``activation(weight @ inputs + bias)``, and where weight and bias begin in a flat vector (-1: no bias)."""

    weight: int
    bias: int
    inputs: int
    outputs: int
    activation: nn.Module


@dataclass(frozen=True, eq=False)
class Problem:
    """A network, whose flat weights are of length ``dim``, and the data that it is fitted to.

    :param x: inputs ``(N, inputs)``.
    :param y: labels ``(N, 1)`` or real targets ``(N, outputs)``.
    :param labels: whether the loss of a row is the cross-entropy of its label, or half the squared error.
    :param batch_size: rows of a mini-batch; ``None`` if all rows count.
    """

    layers: list[Layer]
    dim: int
    x: Tensor
    y: Tensor
    labels: bool
    batch_size: int | None


class Batched:
    """Losses by batched products, on any device and in any dtype."""

    def __init__(self, problem: Problem):
        self.problem = problem

    def __call__(self, w: Tensor, scale: Tensor, index: Tensor | None) -> Evaluation:
        """Return the loss ``(C,)``, summed over rows, and ``scale`` times its gradient ``(C, dim)``.

        :param w: flat weights ``(C, dim)``.
        :param scale: ``(C,)``.
        :param index: rows of each chain's mini-batch ``(C, B)``; ``None`` for all.
        """
        problem, chains, leaves = self.problem, len(w), dict[int, Tensor]()
        x, y = (problem.x, problem.y) if index is None else (problem.x[index], problem.y[index])

        def part(at: int, *shape: int) -> Tensor:
            leaves[at] = w[:, at : at + math.prod(shape)].reshape(chains, *shape).detach().requires_grad_()
            return leaves[at]

        with torch.enable_grad():
            h = x
            for layer in problem.layers:
                h = h @ part(layer.weight, layer.outputs, layer.inputs).mT
                h = layer.activation(h if layer.bias < 0 else h + part(layer.bias, 1, layer.outputs))
            if problem.labels:
                loss = functional.cross_entropy(h.mT, y[..., 0].expand(h.shape[:2]), reduction="none").sum(1)
            else:
                loss = 0.5 * (h - y).square().sum((1, 2))
            slopes = torch.autograd.grad((loss * scale).sum(), list(leaves.values()))
        gradient = torch.empty_like(w)
        for at, slope in zip(leaves, slopes, strict=True):
            gradient[:, at : at + slope[0].numel()] = slope.flatten(1)
        return loss.detach(), gradient


class Tiled:
    """The same by code that Numba compiles, which goes chain by chain; large enough work is shared among threads."""

    def __init__(self, problem: Problem):
        x, layers, rows = problem.x, problem.layers, problem.batch_size or len(problem.x)
        self.problem = problem
        self._layers = torch.tensor(
            [(layer.inputs, layer.outputs, layer.weight, layer.bias, _kind(layer)) for layer in layers], device="cpu"
        ).numpy()
        settings = [_setting(layer.activation) for layer in layers]
        self._settings = x.new_tensor(settings).numpy()
        self._flops = 6.0 * rows * sum(layer.inputs * layer.outputs for layer in layers)
        data = torch.cat([x, problem.y.to(x)], 1)
        if problem.batch_size is None:
            from pyro_symmetric.mcmc.density.tiles import T  # Numba takes long to load

            tiles = -(-len(x) // int(T))
            padded = torch.cat([data, data.new_zeros(tiles * int(T) - len(x), data.shape[1])])
            data = padded.reshape(tiles, int(T), -1).mT.reshape(tiles, -1)
        self._data = data.contiguous().numpy()

    def __call__(self, w: Tensor, scale: Tensor, index: Tensor | None) -> Evaluation:
        """Return as :class:`Batched` does.

        :raises IndexError: if there are no such rows.
        """
        from pyro_symmetric.mcmc.density.tiles import loss_and_gradient

        chains, rows = len(w), len(self.problem.x)
        if index is not None and not (int(index.min()) >= 0 and int(index.max()) < rows):
            raise IndexError(f"mini-batches must be of rows between 0 and {rows - 1}")
        batches = torch.empty((0, 0), dtype=torch.long, device="cpu") if index is None else index.long()
        loss, gradient = w.new_empty(chains), w.new_empty(chains, self.problem.dim)
        each = [value.detach().contiguous().numpy() for value in (batches, w, scale, loss, gradient)]
        count = rows if index is None else index.shape[1]

        def evaluate(cut: slice) -> None:
            batches, *others = (value[cut] for value in each)
            loss_and_gradient(self._layers, self._settings, self._data, batches, count, self.problem.labels, *others)

        threads = max(1, min(torch.get_num_threads(), chains, int(self._flops * chains / THREAD_FLOPS)))
        cuts = [slice(chains * t // threads, chains * (t + 1) // threads) for t in range(threads)]
        if threads == 1:
            evaluate(cuts[0])
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(evaluate, cuts))
        return loss, gradient


def is_tiled(problem: Problem) -> bool:
    """True if a problem is one for :class:`Tiled`."""
    x, layers = problem.x, problem.layers
    numbers = sum(layer.inputs * layer.outputs for layer in layers)
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    known = all(type(layer.activation) in TILED for layer in layers)
    return fits and known and numbers * x.element_size() <= WEIGHT_BYTES


def _kind(layer: Layer) -> int:
    return TILED[type(layer.activation)]


def _setting(activation: nn.Module) -> float:
    """The number that a tiled activation depends on, if any."""
    return float(getattr(activation, "negative_slope", getattr(activation, "alpha", 0.0)))


# reading ------------------------------------------------------------------------------------------------------------


def problem_of(target: NetworkTarget, layout: Layout) -> Problem:
    """:raises Unavailable: saying what about the model doesn't fit."""
    likelihood, x, y, net = target.model.likelihood, target.x, target.y, target.model.net
    layers = read_layers(net)
    names = [name for name, _ in net.named_parameters()]
    if list(layout.site_shapes)[: len(names)] != names:
        raise Unavailable("its sites come in another order than the network's parameters")
    like = next(iter(net.parameters()))
    outputs, flat = layers[-1].outputs, x.flatten(1) if x.dim() > 1 else x[:, None]
    if not x.numel() or (x.dtype, x.device, flat.shape[1]) != (like.dtype, like.device, layers[0].inputs):
        raise Unavailable(f"x has shape {tuple(x.shape)}, {x.dtype} on {x.device}")
    labels = type(likelihood) is CategoricalLikelihood
    if not labels and type(likelihood) is not GaussianLikelihood:
        raise Unavailable(f"its likelihood is a {type(likelihood).__name__}")
    y = y if labels else likelihood.targets(y)
    shape = (len(x),) if labels or outputs == 1 else (len(x), outputs)
    if y.shape != shape or y.device != x.device or (not labels and y.dtype != x.dtype):
        raise Unavailable(f"y has shape {tuple(y.shape)}, {y.dtype} on {y.device}")
    dim = sum(parameter.numel() for parameter in net.parameters())
    batch_size = target.row_counts[ROWS][1] if target.row_counts else None
    return Problem(layers, dim, flat, y.reshape(len(x), -1), labels, batch_size)


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
    sizes = [parameter.numel() for parameter in net.parameters()]
    begins = dict(zip(net.parameters(), itertools.accumulate([0, *sizes]), strict=False))
    layers: list[Layer] = []
    for previous, node in itertools.pairwise(nodes):
        if node.op == "placeholder" or node.all_input_nodes != [previous]:
            raise Unavailable(f"{node.name} doesn't follow the operation before it alone")
        if node.op != "output" and (operation := _operation(root, node)) is not None:
            _add(layers, node.name, operation, begins)
    if not layers:
        raise Unavailable("it has no linear layer")
    if sum(layer.outputs * (layer.inputs + (layer.bias >= 0)) for layer in layers) != sum(sizes):
        raise Unavailable("layers share parameters, or some have none")
    for below, above in itertools.pairwise(layers):
        if below.outputs != above.inputs:
            raise Unavailable(f"a layer has {below.outputs} outputs, the next one {above.inputs} inputs")
    return layers


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


def _operation(root: nn.Module, node: fx.Node) -> nn.Module | None:
    """The work of a node: a linear layer, an activation or, ``None``, nothing."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        if type(module) in NOTHING and not (isinstance(module, nn.Flatten) and _reshapes(vars(module))):
            return None
        if type(module) in (nn.Linear, *ACTIVATIONS):
            return module
        raise Unavailable(f"it has a {type(module).__name__}")
    if node.target in (torch.flatten, "flatten") and not _reshapes(_options(node, "start_dim", "end_dim")):
        return None
    if node.target in (torch.squeeze, "squeeze") and _options(node, "dim").get("dim") in (-1, 1):
        return None  # the last axis is left out if it is 1: outputs without a second axis
    for kind, (functions, settings) in ACTIVATIONS.items():
        if any(node.target is f or (isinstance(f, str) and node.target == f) for f in functions):
            given = _options(node, *settings)
            return kind(**{name: value for name, value in given.items() if name in settings})
    raise Unavailable(f"it calls {getattr(node.target, '__name__', node.target)}")


def _options(node: fx.Node, *names: str) -> dict[str, Any]:
    return {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}


def _reshapes(options: Mapping[str, Any]) -> bool:
    """True if a flattening isn't the one of all features."""
    return options.get("start_dim", 0) != 1 or options.get("end_dim", -1) != -1


def _add(layers: list[Layer], name: str, operation: nn.Module, begins: Mapping[Any, int]) -> None:
    if isinstance(operation, nn.Linear):
        if any(held not in begins for held in (operation.weight, operation.bias) if held is not None):
            raise Unavailable(f"weights of {name} are frozen")
        bias = -1 if operation.bias is None else begins[operation.bias]
        weight, inputs, outputs = begins[operation.weight], operation.in_features, operation.out_features
        layers.append(Layer(weight, bias, inputs, outputs, nn.Identity()))
    elif not layers or not isinstance(layers[-1].activation, nn.Identity):
        raise Unavailable(f"the activation {name} doesn't follow a linear layer")
    else:
        layers[-1] = replace(layers[-1], activation=operation)
