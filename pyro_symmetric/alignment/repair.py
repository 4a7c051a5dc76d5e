r"""Statistics of activations along a path between two networks, put right.

The units of an interpolated network vary less than those of either end, so that its outputs collapse, however well the
ends are aligned (Jordan et al. 2023, arXiv 2211.08403). Two remedies:

* where layers are normalised by batch statistics, their running means and variances are computed anew at every point
  of the path, from given inputs;
* elsewhere the units' preactivations are rescaled and shifted (REPAIR): to means and deviations that interpolate those
  of the two ends,

  .. math:: \mathbb E[z_t] = (1-t)\, \mathbb E[z_0] + t\, \mathbb E[z_1], \qquad
            \mathrm{sd}[z_t] = (1-t)\, \mathrm{sd}[z_0] + t\, \mathrm{sd}[z_1],

  layer by layer, in all linear and convolutional layers but the last; the factors go into their weights and biases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_symmetric.calls import with_weights
from pyro_symmetric.discovery.symmetry import copied, refreshed
from pyro_symmetric.weights import Weights

_AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Repair:
    """The repair of a network's statistics at the points of a path.

    :param net: the network, in eval mode; it stays as it is.
    :param inputs: inputs ``(N, ...)`` from which the statistics are computed, without labels; training data.
    :param ends: weights of both ends of the path, without batch shape; statistics of batches don't need them.
    :param batch_size: how many inputs, at least 2, go through the network at once, at most; batches are equally large.
        With batch normalisation, whose layers use statistics of their batch meanwhile, as in training, batches should
        be large; their statistics are averaged.
    :raises ValueError: if the network has nothing to repair.
    """

    def __init__(
        self, net: nn.Module, inputs: Tensor, ends: Sequence[Mapping[str, Tensor]] = (), batch_size: int = 512
    ):
        if not isinstance(inputs, Tensor) or len(inputs) < 2:
            raise ValueError("repair needs inputs, a tensor of at least 2 rows, to compute statistics from")
        self._net = copied(net).eval()
        # Equally large, up to one row: layers that see a small last batch normalise by the noise of its statistics.
        self._batches = inputs.tensor_split(min(math.ceil(len(inputs) / batch_size), len(inputs) // 2))
        self._norms = {
            name: module
            for name, module in self._net.named_modules()
            if isinstance(module, _BatchNorm) and module.running_mean is not None
        }
        self._affine = {} if self._norms else _affine_layers(self._net, inputs[:2])
        if not self._norms and not self._affine:
            raise ValueError(
                "the network has neither batch normalisation with running statistics nor linear or convolutional "
                "layers with biases before the last; there is nothing to repair"
            )
        for module in self._norms.values():
            module.running_mean = module.running_var = None  # so that it uses statistics of the batch
        with torch.no_grad():
            self._ends = [{name: self._statistics(self._own(end), name) for name in self._affine} for end in ends]

    @property
    def kind(self) -> str:
        """``"statistics"`` (batch normalisation) or ``"rescaling"``."""
        return "statistics" if self._norms else "rescaling"

    @torch.no_grad()
    def __call__(self, weights: Weights, t: float) -> Weights:
        """Weights of batch shape ``(S,)`` at the point ``t`` -> the same, put right; with buffers, if there are any."""
        mended = self._recomputed if self._norms else lambda own: self._rescaled(own, t)
        return {**weights, **torch.func.vmap(mended)(self._own(weights))}

    def _own(self, weights: Mapping[str, Tensor]) -> Weights:
        return {name: weights[name] for name, _ in self._net.named_parameters()}

    # batch normalisation --------------------------------------------------------------------------------------------

    def _recomputed(self, weights: Weights) -> Weights:
        """Running means and variances of one network: the averages of those of the batches, by their rows."""
        rows = sum(map(len, self._batches))
        averages: Weights = {}
        for batch in self._batches:
            with _calls(self._norms) as seen:
                with_weights(refreshed(self._net, train=False), weights, (batch,))
            for name, value in {name: given for name, given, _ in seen}.items():
                variance, mean = torch.var_mean(value, _all_but_units(value))
                for key, part in ((f"{name}.running_mean", mean), (f"{name}.running_var", variance)):
                    averages[key] = averages.get(key, 0.0) + part * (len(batch) / rows)
        return averages

    # rescaling ------------------------------------------------------------------------------------------------------

    def _statistics(self, weights: Weights, name: str) -> tuple[Tensor, Tensor]:
        """Means and deviations of a layer's units, over all inputs."""
        layer = self._affine[name]
        with _calls({name: layer}) as seen:
            for batch in self._batches:
                with_weights(refreshed(self._net, train=False), weights, (batch,))
        value = torch.cat([output for _, _, output in seen])
        if isinstance(layer, nn.Linear):  # whose units lie in the last axis; those of convolutions in the second
            value = value.movedim(-1, 1)
        deviation, mean = torch.std_mean(value, _all_but_units(value), correction=0)
        return mean, deviation

    def _rescaled(self, weights: Weights, t: float) -> Weights:
        """One layer after the other, as each changes what the next one sees."""
        for name in self._affine:
            mean, deviation = self._statistics(weights, name)
            (mean_0, deviation_0), (mean_1, deviation_1) = (end[name] for end in self._ends)
            wanted = torch.lerp(deviation_0, deviation_1, t)
            # A unit that never varies can't be made to vary.
            factor = torch.where(deviation > 0, wanted / deviation.clamp(min=torch.finfo(deviation.dtype).tiny), 1.0)
            weight, bias = f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".")
            shift = torch.lerp(mean_0, mean_1, t) - factor * mean
            along = (-1, *([1] * (weights[weight].dim() - 1)))
            weights = {
                **weights,
                weight: weights[weight] * factor.reshape(along),
                bias: weights[bias] * factor + shift,
            }
        return weights


# small steps --------------------------------------------------------------------------------------------------------


def _affine_layers(net: nn.Module, inputs: Tensor) -> dict[str, nn.Module]:
    """Linear and convolutional layers with biases in the order in which they are called, each once, without the
    last."""
    modules = {name: module for name, module in net.named_modules() if isinstance(module, _AFFINE)}
    with _calls(modules) as seen, torch.no_grad():
        net(inputs)
    names = [name for name, _, _ in seen]
    return {name: modules[name] for name in names[:-1] if names.count(name) == 1 and modules[name].bias is not None}


@contextmanager
def _calls(modules: Mapping[str, nn.Module]) -> Iterator[list[tuple[str, Tensor, Tensor]]]:
    """The calls of these modules, in their order: the module's name, what goes in and what comes out."""
    seen: list[tuple[str, Tensor, Tensor]] = []
    handles = [
        module.register_forward_hook(lambda m, given, out, name=name: seen.append((name, given[0], out)))
        for name, module in modules.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _all_but_units(value: Tensor) -> list[int]:
    return [dim for dim in range(value.dim()) if dim != 1]
