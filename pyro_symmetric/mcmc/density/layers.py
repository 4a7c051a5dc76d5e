r"""Engine ``"layers"``: the energy of a Bayesian feed-forward network and its gradient, without the model's evaluation.

.. math:: U(z) = \beta \sum_i \ell_i(w) - \log p(w) + \text{const}, \qquad \beta = \frac{N}{B\,T}\,\tau

with :math:`\ell` the cross-entropy and :math:`\tau = 1`, or half the squared error and :math:`\tau` the noise's
precision. A network qualifies if what it does to its inputs is a chain of linear layers with activations between, and
its priors are normal. Its loss is evaluated on a CPU in tiles of rows (:mod:`~pyro_symmetric.mcmc.density.tiles`),
elsewhere and for wide layers by batched products. Priors are added in closed form.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric.mcmc.density.eager import ROWS, Evaluate, Evaluation, NetworkTarget, Rows, Unavailable
from pyro_symmetric.models import CategoricalLikelihood, GaussianLikelihood, normal_base
from pyro_symmetric.traced import TracedTarget
from pyro_symmetric.weights import Layout, is_identity

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)
WEIGHT_BYTES = 2**19  # beyond it a chain's weights leave the cache, and packed matrix products are faster
THREAD_FLOPS = 2e7  # less work than this isn't worth a thread
ACTIVATIONS = {"relu": 1, "leaky_relu": 1, "tanh": 2, "sigmoid": 3, "silu": 4}  # PyTorch's operators, and their kinds
FUNCTIONS: tuple[Callable[[Tensor, float], Tensor], ...] = (
    lambda h, _: h,
    functional.leaky_relu,
    lambda h, _: h.tanh(),
    lambda h, _: h.sigmoid(),
    lambda h, _: functional.silu(h),
)
SHAPES = {"view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "flatten", "alias", "detach", "clone"}


class Layers:
    """The engine; it is compared with the model itself before it serves.

    :raises Unavailable: saying what about the model doesn't fit.
    """

    name = "layers"

    def __init__(self, target: NetworkTarget | TracedTarget, layout: Layout):
        if not isinstance(target, NetworkTarget):
            raise Unavailable("it serves a BayesianModel only")
        likelihood, problem = target.model.likelihood, problem_of(target, layout)
        names = list(target.sites)[: len(list(target.model.net.parameters()))]
        bases = [normal_base(target.sites[name]) for name in names]
        if any(base is None for base in bases) or not all(is_identity(layout.transforms[name]) for name in names):
            raise Unavailable("its priors aren't all normal")
        loc, scale = (torch.cat([getattr(base, name).reshape(-1) for base in bases]) for name in ("loc", "scale"))
        self._loc, self._precision = loc, scale**-2
        self._constant = float((scale.double().log() + HALF_LOG_2PI).sum())
        self._temperature, self._dim, self._rows = likelihood.temperature, len(self._loc), len(problem.x)
        # Observations with a normal density, and the logarithm of their noise; None if it is learnt.
        self._count = 0 if problem.labels else problem.y.numel() / likelihood.temperature
        noise = likelihood.scale if isinstance(likelihood, GaussianLikelihood) else 1.0
        self._log_noise = None if noise is None else math.log(noise)
        self._others = {name: fn for name, fn in target.sites.items() if name not in names}
        self._layout = Layout.of(self._others)
        self.tiled = is_tiled(problem)
        self._loss: Evaluate = Tiled(problem) if self.tiled else partial(batched_loss, problem)

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        index, z = None if rows is None else rows[ROWS], z.detach()
        share = 1 / self._temperature if index is None else self._rows / index.shape[-1] / self._temperature
        if self._log_noise is not None:
            scale = math.exp(-2 * self._log_noise) * share
            loss, gradient = self._loss(z, z.new_full((len(z),), scale), index)
            constant = self._constant + self._count * (self._log_noise + HALF_LOG_2PI)
            return self._with_prior(z, loss, gradient, scale, constant)
        with torch.enable_grad():
            leaf = z[:, self._dim :].requires_grad_()
            weights, log_det = self._layout.constrain_with_log_det(leaf)
            log_noise, rest = weights["noise_scale"].log(), -log_det
            for name, prior in self._others.items():
                rest = rest - prior.log_prob(weights[name])
            precision = (-2 * log_noise).exp() * share
            loss, gradient = self._loss(w := z[:, : self._dim], precision.detach(), index)
            energy = loss * precision + self._count * (log_noise + HALF_LOG_2PI) + rest
            (slope,) = torch.autograd.grad(energy.sum(), leaf)
        energy, gradient = self._with_prior(w, energy.detach(), gradient, 1.0, self._constant)
        return energy, torch.cat([gradient, slope], 1)

    def _with_prior(self, w: Tensor, energy: Tensor, gradient: Tensor, scale: float, constant: float) -> Evaluation:
        """Add the prior's part to ``scale`` times an energy and a constant, and to its gradient, both in place."""
        centred = w - self._loc
        energy.addmv_(centred.square(), self._precision, beta=scale, alpha=0.5).add_(constant)
        return energy, gradient.addcmul_(centred, self._precision)


# losses -------------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """``activation(weight @ inputs + bias)``, and where weight and bias begin in a flat vector (-1: no bias)."""

    inputs: int
    outputs: int
    weight: int
    bias: int
    kind: int = 0  # of activation; 0: none
    slope: float = 0.0  # of a rectifier below 0


class Problem(NamedTuple):
    """A network and the data that it is fitted to.

    :param x: inputs ``(N, inputs)``.
    :param y: labels ``(N, 1)`` or real targets ``(N, outputs)``.
    :param labels: whether the loss of a row is the cross-entropy of its label, or half the squared error.
    """

    layers: list[Layer]
    x: Tensor
    y: Tensor
    labels: bool


def batched_loss(problem: Problem, w: Tensor, scale: Tensor, index: Tensor | None) -> Evaluation:
    """The loss ``(C,)``, summed over rows, and ``scale`` times its gradient ``(C, W)``, by batched products.

    :param w: flat weights ``(C, W)``.
    :param scale: ``(C,)``.
    :param index: rows of each chain's mini-batch ``(C, B)``; ``None`` for all.
    """
    h, y = (problem.x, problem.y) if index is None else (problem.x[index], problem.y[index])
    with torch.enable_grad():
        leaf = w.detach().requires_grad_()
        for layer in problem.layers:
            end = layer.weight + layer.outputs * layer.inputs
            h = h @ leaf[:, layer.weight : end].unflatten(1, (layer.outputs, layer.inputs)).mT
            if layer.bias >= 0:
                h = h + leaf[:, None, layer.bias : layer.bias + layer.outputs]
            h = FUNCTIONS[layer.kind](h, layer.slope)
        if problem.labels:
            loss = functional.cross_entropy(h.mT, y[..., 0].expand(h.shape[:2]), reduction="none").sum(1)
        else:
            loss = 0.5 * (h - y).square().sum((1, 2))
        (gradient,) = torch.autograd.grad((loss * scale).sum(), leaf)
    return loss.detach(), gradient


class Tiled:
    """The same by code that Numba compiles, which goes chain by chain; large enough work is shared among threads."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._layers = torch.tensor([layer[:5] for layer in problem.layers], device="cpu").numpy()
        self._slopes = problem.x.new_tensor([layer.slope for layer in problem.layers]).numpy()
        self._flops = 6.0 * sum(layer.inputs * layer.outputs for layer in problem.layers)
        self._data = torch.cat([problem.x, problem.y.to(problem.x)], 1).contiguous().numpy()
        self._tiles: Any = None

    def __call__(self, w: Tensor, scale: Tensor, index: Tensor | None) -> Evaluation:
        """Return as :func:`batched_loss` does.

        :raises IndexError: if there are no such rows.
        """
        from pyro_symmetric.mcmc.density.tiles import T, loss_and_gradient  # Numba takes long to load

        chains, rows, data = len(w), len(self._data), self._data
        if index is not None and not (int(index.min()) >= 0 and int(index.max()) < rows):
            raise IndexError(f"mini-batches must be of rows between 0 and {rows - 1}")
        if index is None:
            data = self._tiles = self._in_tiles(int(T)) if self._tiles is None else self._tiles
        batches = torch.empty((0, 0), dtype=torch.long, device="cpu") if index is None else index.long()
        loss, gradient = w.new_empty(chains), w.new_empty(w.shape)
        each = [value.contiguous().numpy() for value in (batches, w, scale, loss, gradient)]
        count = rows if index is None else index.shape[1]

        def evaluate(cut: slice) -> None:
            own = [value[cut] for value in each]
            loss_and_gradient(self._layers, self._slopes, data, own[0], count, self.problem.labels, *own[1:])

        threads = max(1, min(torch.get_num_threads(), chains, int(self._flops * count * chains / THREAD_FLOPS)))
        cuts = [slice(chains * t // threads, chains * (t + 1) // threads) for t in range(threads)]
        if threads == 1:
            evaluate(cuts[0])
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(evaluate, cuts))
        return loss, gradient

    def _in_tiles(self, size: int) -> Any:
        """The data ``(tiles, width * size)``, features leading, zeros after the last row; aligned as by PyTorch."""
        padded = functional.pad(torch.from_numpy(self._data), (0, 0, 0, -len(self._data) % size))
        return padded.reshape(-1, size, padded.shape[1]).mT.flatten(1).contiguous().numpy()


def is_tiled(problem: Problem) -> bool:
    """True if a problem is one for :class:`Tiled`."""
    x, numbers = problem.x, sum(layer.inputs * layer.outputs for layer in problem.layers)
    fits = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return fits and numbers * x.element_size() <= WEIGHT_BYTES


# reading ------------------------------------------------------------------------------------------------------------


def problem_of(target: NetworkTarget, layout: Layout) -> Problem:
    """:raises Unavailable: saying what about the model doesn't fit."""
    likelihood, x, y, net = target.model.likelihood, target.x, target.y, target.model.net
    names, like = [name for name, _ in net.named_parameters()], next(iter(net.parameters()))
    if list(layout.site_shapes)[: len(names)] != names:
        raise Unavailable("its sites come in another order than the network's parameters")
    if (x.dtype, x.device) != (like.dtype, like.device):
        raise Unavailable(f"x is of {x.dtype} on {x.device}, its weights aren't")
    labels = type(likelihood) is CategoricalLikelihood
    if not labels and type(likelihood) is not GaussianLikelihood:
        raise Unavailable(f"its likelihood is a {type(likelihood).__name__}")
    layers = read_layers(net, x[:2])
    y = y if labels else likelihood.targets(y)
    shape = (len(x),) if labels or layers[-1].outputs == 1 else (len(x), layers[-1].outputs)
    if y.shape != shape or y.device != x.device or (not labels and y.dtype != x.dtype):
        raise Unavailable(f"y has shape {tuple(y.shape)}, {y.dtype} on {y.device}")
    return Problem(layers, x.reshape(len(x), -1), y.reshape(len(x), -1), labels)


def read_layers(net: nn.Module, x: Tensor) -> list[Layer]:
    """The layers of a network in eval mode, from the operators that it meets on its way.

    :raises Unavailable: saying which part of it doesn't fit.
    """
    sizes = [parameter.numel() for parameter in net.parameters()]
    begins = {id(p): at for p, at in zip(net.parameters(), itertools.accumulate([0, *sizes]), strict=False)}
    with torch.no_grad(), _Recorded() as recorded:
        net(x)
    layers, current, transposed = list[Layer](), x, dict[int, Tensor]()
    for name, args, result in recorded.calls:
        if name == "t" and id(args[0]) in begins:
            transposed[id(result)] = args[0]
            continue
        if name in ("mm", "addmm") and args[-2] is current and id(args[-1]) in transposed:
            weight, biases = transposed[id(args[-1])], args[:-2]
            if any(id(bias) not in begins for bias in biases) or current.shape != (len(x), weight.shape[1]):
                raise Unavailable("a bias is frozen, or a layer doesn't take all features of a row")
            bias = begins[id(biases[0])] if biases else -1
            layers.append(Layer(weight.shape[1], weight.shape[0], begins[id(weight)], bias))
        elif name.rstrip("_") in ACTIVATIONS and args[0] is current and layers and not layers[-1].kind:
            slope = (*args[1:], 0.01)[0] if "leaky" in name else 0.0
            layers[-1] = layers[-1]._replace(kind=ACTIVATIONS[name.rstrip("_")], slope=float(slope))
        elif not (name in SHAPES and args[0] is current and len(result) == len(x)):
            raise Unavailable(f"it calls {name}, where a layer or an activation should follow")
        current = result
    if sum(layer.outputs * (layer.inputs + (layer.bias >= 0)) for layer in layers) != sum(sizes):
        raise Unavailable("layers share parameters, or some have none")
    return layers


class _Recorded(TorchDispatchMode):
    """Operators that are called, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.overloadpacket.__name__, args, result))
        return result
