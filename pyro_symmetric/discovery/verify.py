"""The last word on a symmetry: outputs before and after a random element of the whole group.

Done in float64 on a copy whose running statistics are random and whose constant parameters (zero-initialised heads,
ones in normalisation layers) are random too: with zeros a wrong group can pass with an error of exactly zero. A network
that casts to less precise numbers casts to float64 meanwhile. One that doesn't run like this keeps its own precision;
then changes pass that are no larger than a few times its rounding errors, which are measured.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric import arguments
from pyro_symmetric._process import without_fast_attention, without_warnings
from pyro_symmetric.calls import described
from pyro_symmetric.discovery.invariance import BrokenMove, Change, Verification, broken_moves, drawn, only, parts_of
from pyro_symmetric.discovery.symmetry import Symmetry, copied, in_precision
from pyro_symmetric.discovery.trace import has_training_branch, unfit
from pyro_symmetric.groups.element import Element
from pyro_symmetric.weights import Weights

ENOUGH = 100_000  # numbers in the images that are compared in eval mode
# The largest relative change that passes in float64; in other precisions, as many times the rounding errors pass.
TOLERANCE, ROUNDINGS = 1e-6, 30.0


class BrokenSymmetry(UserWarning):
    """A move of some units that discovery had proposed failed verification, and was left out."""


def verify(
    symmetry: Symmetry,
    net: nn.Module,
    *inputs: Any,
    tolerance: float | None = None,
    trials: int = 1,
    dtype: torch.dtype | None = None,
) -> Verification:
    """Compare outputs before and after random elements of the whole group.

    >>> assert verify(symmetry, net, x)

    :param symmetry: what was found for the network, or for one like it.
    :param net: the network; it isn't changed.
    :param inputs: an example of what its ``forward`` takes. Floating-point inputs are replaced by random numbers. In
        eval mode a batch of large images is cut to its first one or few, if the network takes so few.
    :param tolerance: the largest relative change of an output that passes: 1e-6 in float64, in other precisions a few
        times the change that rounding errors make.
    :param trials: how many elements are tried.
    :param dtype: the precision of the comparison: float64, or the network's own if it doesn't run in float64.
    :raises ValueError: if the network doesn't take the inputs.
    """
    arguments.instance("symmetry", symmetry, Symmetry, "a Symmetry, such as find_symmetry(net, x)")
    arguments.instance("net", net, nn.Module, "a torch.nn.Module")
    if tolerance is not None:
        arguments.number("tolerance", tolerance, least=0)
    arguments.whole("trials", trials, 1)
    arguments.dtype("dtype", dtype, none="float64, or the network's own")
    for number, value in enumerate(inputs):
        if isinstance(value, Tensor) and not value.numel():
            raise ValueError(f"inputs[{number}] is {described(value)}, which is empty; there is nothing to compare")
    outputs = _prepared(symmetry, net, inputs, dtype)
    outputs.tolerance = outputs.tolerance if tolerance is None else tolerance
    errors = [outputs.errors(drawn(symmetry.group)) for _ in range(trials)]
    error, train_error = (max(column) for column in zip(*errors, strict=True))
    holds = max(error, train_error) < outputs.tolerance
    broken = () if holds else broken_moves(symmetry.group, outputs)
    return Verification(outputs.name, broken, error, outputs.tolerance, train_error)


def repaired(symmetry: Symmetry, net: nn.Module, inputs: Sequence[Any]) -> Symmetry:
    """The symmetry without the moves that fail; a warning names them."""
    dropped: list[BrokenMove] = []
    while found := verify(symmetry, net, *inputs).broken:
        dropped += found
        for one in found:
            symmetry = symmetry.without([one.name], one.move)
    if dropped:
        names = ", ".join(f"{one.name} ({one.move})" for one in dropped)
        warnings.warn(
            f"verification failed for the units {names}: these moves are left out of the group. This is a bug in a "
            "rule of pyro_symmetric; please report the network.",
            BrokenSymmetry,
            stacklevel=3,
        )
    return symmetry


class _Calm(TorchDispatchMode):
    """Random masks have the value of their mean, and casts go to one precision.

    So dropout and stochastic depth do nothing, whoever calls them, and no rounding hides behind a cast.

    :param dtype: the precision; each cast goes to its own if none is given.
    """

    def __init__(self, dtype: torch.dtype | None):
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        packet = func.overloadpacket
        if packet is torch.ops.aten.bernoulli_ and not isinstance(args[1:2] and args[1], Tensor):
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if packet is torch.ops.aten.bernoulli and len(args) == 1:
            return args[0].clone()
        if packet is torch.ops.aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if isinstance(kwargs.get("dtype"), torch.dtype):
            kwargs["dtype"] = in_precision(kwargs["dtype"], self.dtype)
        return func(*args, **kwargs)


def _prepared(symmetry: Symmetry, net: nn.Module, inputs: Sequence[Any], dtype: torch.dtype | None) -> Outputs:
    """In float64 if the network runs in it, else in its own precision."""
    try:
        return Outputs(symmetry, net, inputs, dtype or torch.float64)
    except ValueError:
        if dtype is not None:
            raise
        return Outputs(symmetry, net, inputs, None)


class Outputs:
    """The outputs of a randomised copy of a network in both modes, as functions of its weights.

    :param dtype: the copy's precision; the network's own by default.
    """

    name = "the network's outputs, relative to the largest"

    def __init__(self, symmetry: Symmetry, net: nn.Module, inputs: Sequence[Any], dtype: torch.dtype | None):
        self.symmetry, self.dtype = symmetry, dtype
        self.net = copied(net, dtype)
        with torch.no_grad():
            self.weights, self.origin = _randomised(symmetry, self.net, net)
        given = [_random_like(x, dtype) for x in inputs]
        self.inputs = {False: _enough(given), True: given}
        try:
            eval_outputs = self._outputs(False)
        except ValueError:  # a network may not take fewer images
            self.inputs[False] = given
            eval_outputs = self._outputs(False)
        self.before = {False: eval_outputs, True: self._outputs(True) if _differs_in_training(net) else None}
        self.tolerance = TOLERANCE if dtype == torch.float64 else max(TOLERANCE, ROUNDINGS * self._rounding())

    def change(self, element: Element) -> Change:
        """What an element does to the outputs in either mode."""
        error = max(self.errors(element))
        return Change(not error < self.tolerance, error)

    def errors(self, element: Element) -> tuple[float, float]:
        """The largest relative change of an output under an element, in eval and in train mode.

        Scales that are exact for running variances plus epsilon aren't for those of a batch: train mode is without.
        """
        group = self.symmetry.group
        inexact = {one.name for one in group.units.values() if any(a.buffer and a.exponent for a in one.axes)}
        exact = only(
            element, {(move, name) for move, name in parts_of(group) if move != "scale" or name not in inexact}
        )
        return self._error(element, False), self._error(exact, True)

    def _error(self, element: Element, train: bool) -> float:
        def acted(site: str, value: Tensor) -> Tensor:
            own = self.origin[site].to(value.device, in_precision(value.dtype, torch.float64))
            return element.on_site(site, own)

        return self._change(acted, train)

    def _rounding(self) -> float:
        """How much outputs change with the last digit of all weights."""

        def nudged(site: str, value: Tensor) -> Tensor:
            return self.origin[site].to(value) * (1 + torch.finfo(value.dtype).eps * (2 * torch.rand_like(value) - 1))

        return max(self._change(nudged, train) for train in (False, True) for _ in range(3))

    def _change(self, changed: Callable[[str, Tensor], Tensor], train: bool) -> float:
        """Largest relative change of an output if each site is changed, site by site from the untouched values."""
        if self.before[train] is None:
            return 0.0
        with torch.no_grad():  # into the copy: there is no second copy, and nothing to be put back
            for site, value in self.weights.items():
                value.copy_(changed(site, value))
        return difference(self.before[train], self._outputs(train))

    def _outputs(self, train: bool) -> list[Tensor] | None:
        outputs = outputs_of(self.net, self.inputs[train], train, self.dtype)
        if self.symmetry.logits and outputs is not None:
            outputs = [output.log_softmax(-1) if output.dim() else output for output in outputs]
        return outputs


def _differs_in_training(net: nn.Module) -> bool:
    """Whether training does something else than eval mode, dropout apart."""
    return has_training_branch(net) or any(isinstance(module, _NormBase) for module in net.modules())


def _randomised(symmetry: Symmetry, copy: nn.Module, net: nn.Module) -> tuple[Weights, Weights]:
    """Constant and tiny parameters, and running statistics that move, get random values; all else keeps its own.

    Returns the copy's tensors by site, and the values that they have now: those of the network where they are the same.
    """
    changed: dict[str, Tensor] = {}
    for name, value in copy.named_parameters():
        if _is_number(value) and value.numel() and float(value.std(correction=0)) < 1e-3:
            fan_in = max(1, value.numel() // value.shape[0]) if value.dim() > 1 else 1
            changed[name] = value.add_((0.3 if value.dim() < 2 else fan_in**-0.5) * torch.randn_like(value))
    for name, buffer in copy.named_buffers():
        own = name.rsplit(".", 1)[-1] if name in symmetry.site_shapes else ""
        if own == "running_mean":
            changed[name] = buffer.normal_(std=0.5)
        elif own == "running_var":
            changed[name] = buffer.uniform_(0.5, 2.0)
    weights, origin = symmetry.weights_of(copy), symmetry.weights_of(net)
    return weights, {
        site: changed[site].detach().clone() if site in changed else value.detach() for site, value in origin.items()
    }


def _is_number(value: Any) -> bool:
    """Whether something is a tensor of real or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _random_like(value: Any, dtype: torch.dtype | None) -> Any:
    return torch.randn_like(value, dtype=in_precision(value.dtype, dtype)) if _is_number(value) else value


def _enough(inputs: list[Any]) -> list[Any]:
    """Of a batch of images the first few that hold a hundred thousand numbers: in eval mode more tell no more.

    Other inputs stay whole, for nothing says which of their axes is the batch.
    """
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].dim() != 4 or not inputs[0].numel():
        return inputs
    return [inputs[0][: math.ceil(ENOUGH / inputs[0][0].numel())]]


def outputs_of(net: nn.Module, inputs: Sequence[Any], train: bool, dtype: torch.dtype | None) -> list[Tensor] | None:
    """All real and complex outputs; None if the network has no such mode (a batch of one, say). Statistics stay."""
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    net.train(train)
    try:
        with torch.no_grad(), without_fast_attention(), without_warnings(), _Calm(dtype):
            outputs = net(*inputs)
    except Exception as error:
        if not train:
            raise unfit(net, inputs, error) from error
        if not isinstance(error, ValueError | RuntimeError):
            raise
        return None
    finally:
        with torch.no_grad():
            for name, value in net.named_buffers():
                if name in buffers and value.shape == buffers[name].shape:
                    value.copy_(buffers[name])
    return [t for t in pytree.tree_leaves(outputs) if _is_number(t)]


def difference(before: list[Tensor] | None, after: list[Tensor] | None) -> float:
    if before is None or after is None:
        return 0.0 if before is after else float("inf")
    worst = 0.0
    for x, y in zip(before, after, strict=True):
        if x.numel():
            scale = x.abs().max().clamp_min(torch.finfo(x.dtype).tiny)
            worst = max(worst, float(((x - y).abs().max() / scale).nan_to_num(nan=float("inf"))))
    return worst
