"""The last word on a symmetry: outputs before and after a random element of the whole group.

Done in float64 on a copy whose running statistics are random and whose constant parameters (zero-initialised heads,
ones in normalisation layers) are random too: with zeros a wrong group can pass with an error of exactly zero.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_symmetric import arguments
from pyro_symmetric._process import without_fast_attention, without_warnings
from pyro_symmetric.calls import described
from pyro_symmetric.symmetry.trace import has_training_branch, unfit
from pyro_symmetric.symmetry.weight_symmetry import SymmetryElement, WeightSymmetry, copied
from pyro_symmetric.symmetry.weights import Weights

KINDS = ("permutations", "scalings", "signs", "shifts")
ENOUGH = 100_000  # numbers in the images that are compared in eval mode
Named = tuple[str, str]


class BrokenSymmetry(UserWarning):
    """A factor that discovery had proposed failed verification, and was left out."""


@dataclass(frozen=True)
class Verification:
    """What verification found.

    :param ok: whether all errors are below the tolerance.
    :param error: largest change of an output, relative to the largest output, in eval mode.
    :param train_error: the same in train mode with batch statistics and without dropout (permutations and signs; a
        scaling in front of a batch normalisation is exact in eval mode only, up to epsilon in train mode).
    :param tolerance: the tolerance.
    """

    ok: bool
    error: float
    train_error: float
    tolerance: float

    def __bool__(self) -> bool:
        return self.ok


def verify(
    symmetry: WeightSymmetry,
    net: nn.Module,
    *inputs: Any,
    tolerance: float = 1e-6,
    trials: int = 1,
    dtype: torch.dtype = torch.float64,
) -> Verification:
    """Compare outputs before and after random elements of the whole group.

    :param net: the network; it isn't changed.
    :param inputs: an example of what its ``forward`` takes. Floating-point inputs are replaced by random numbers. In
        eval mode a batch of large images is cut to its first one or few, if the network takes so few.
    :param trials: how many elements are tried.
    :param dtype: the precision of the comparison.
    :raises ValueError: if the network doesn't take the inputs.
    """
    arguments.instance("net", net, nn.Module, "a torch.nn.Module")
    arguments.number("tolerance", tolerance, least=0)
    arguments.whole("trials", trials, 1)
    for number, value in enumerate(inputs):
        if isinstance(value, Tensor) and not value.numel():
            raise ValueError(f"inputs[{number}] is {described(value)}, which is empty; there is nothing to compare")
    test = _Test(symmetry, net, inputs, dtype)
    every = test.factors()
    errors = [(test.error(every, train=False), test.error(every, train=True)) for _ in range(trials)]
    error, train_error = (max(column) for column in zip(*errors, strict=True))
    return Verification(max(error, train_error) < tolerance, error, train_error, tolerance)


def repaired(
    symmetry: WeightSymmetry, net: nn.Module, inputs: Sequence[Any], tolerance: float = 1e-6
) -> WeightSymmetry:
    """The symmetry without the factors that fail; a warning names them."""
    dropped: list[Named] = []
    for _ in range(20):
        test = _Test(symmetry, net, inputs)
        every = test.factors()
        broken = [train for train in (False, True) if not test.error(every, train) < tolerance]
        if not broken:
            break
        guilty = _bisect(every, functools.partial(_fails, test, broken[0], tolerance))
        dropped += guilty
        symmetry = symmetry.without({kind: [name for k, name in guilty if k == kind] for kind in KINDS})
    if dropped:
        names = ", ".join(f"{name} ({kind})" for kind, name in dropped)
        warnings.warn(
            f"verification failed for the factors {names}: they are left out of the group. This is a bug in a rule of "
            "pyro_symmetric; please report the network.",
            BrokenSymmetry,
            stacklevel=3,
        )
    return symmetry


def _fails(test: _Test, train: bool, tolerance: float, factors: list[Named]) -> bool:
    # Small factors are the identity now and then: try a few elements before a factor counts as innocent.
    return any(not test.error(factors, train) < tolerance for _ in range(3))


def _bisect(factors: list[Named], fails: Callable[[list[Named]], bool]) -> list[Named]:
    """The factors that fail by themselves; if no half fails alone, all of them."""
    if len(factors) <= 1:
        return factors
    half = len(factors) // 2
    guilty = [name for part in (factors[:half], factors[half:]) if fails(part) for name in _bisect(part, fails)]
    return guilty or factors


class _WithoutDropout(TorchDispatchMode):
    """Every random mask has the value of its mean: dropout and stochastic depth do nothing, whoever calls them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet is torch.ops.aten.bernoulli_ and not isinstance(args[1:2] and args[1], Tensor):
            return args[0].fill_(args[1] if len(args) > 1 else kwargs.get("p", 0.5))
        if packet is torch.ops.aten.bernoulli and len(args) == 1:
            return args[0].clone()
        if packet is torch.ops.aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **kwargs)


class _Test:
    """A randomised float64 copy of a network, with its outputs in both modes."""

    def __init__(
        self, symmetry: WeightSymmetry, net: nn.Module, inputs: Sequence[Any], dtype: torch.dtype = torch.float64
    ):
        self.symmetry = symmetry
        self.dtype = dtype
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

    def _outputs(self, train: bool) -> list[Tensor] | None:
        outputs = _outputs(self.net, self.inputs[train], train)
        if self.symmetry.logits and outputs is not None:
            outputs = [output.log_softmax(-1) if output.dim() else output for output in outputs]
        return outputs

    def factors(self) -> list[Named]:
        groups = (getattr(self.symmetry, kind) for kind in KINDS)
        return [
            (kind, name)
            for kind, group in zip(KINDS, groups, strict=True)
            for name in (group.sites if kind == "shifts" else group.factors)
        ]

    def error(self, factors: Sequence[Named], train: bool) -> float:
        """Largest relative change of an output under a random element of these factors."""
        if not factors or self.before[train] is None:
            return 0.0
        element = self._element(factors, train)
        with torch.no_grad():
            # Site by site from the untouched values into the copy: no second copy, and nothing to be put back.
            for site, value in self.weights.items():
                value.copy_(element.moved(site, self.origin[site].to(value)))
        return _difference(self.before[train], self._outputs(train))

    def _element(self, factors: Sequence[Named], train: bool) -> SymmetryElement:
        device = next(iter(self.net.parameters())).device
        chosen = {kind: {name for k, name in factors if k == kind} for kind in KINDS}
        steps = []
        for kind in reversed(KINDS):
            group = getattr(self.symmetry, kind)
            options = {} if kind == "permutations" else {"dtype": self.dtype}
            element, neutral = group.sample(device=device, **options), group.identity(device=device, **options)
            in_doubt = kind == "scalings" and train
            for name in element.images:
                if name not in chosen[kind] or (in_doubt and _enters_batch_norm(group, name)):
                    element.images[name] = neutral.images[name]
            steps.append(element)
        return SymmetryElement(tuple(steps))


def _enters_batch_norm(group: Any, name: str) -> bool:
    """Whether a scaling reaches running statistics: exact for them, but not for batch statistics plus epsilon."""
    return any(axis.buffer for axis in group.factor(name).axes)


def _differs_in_training(net: nn.Module) -> bool:
    """Whether training does something else than eval mode, dropout apart."""
    return has_training_branch(net) or any(isinstance(module, _NormBase) for module in net.modules())


def _randomised(symmetry: WeightSymmetry, copy: nn.Module, net: nn.Module) -> tuple[Weights, Weights]:
    """Constant and tiny parameters, and running statistics that move, get random values; all else keeps its own.

    Returns the copy's tensors by site, and the values that they have now: those of the network where they are the same.
    """
    changed: dict[str, Tensor] = {}
    for name, value in copy.named_parameters():
        if value.is_floating_point() and value.numel() and float(value.std(correction=0)) < 1e-3:
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


def _random_like(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.randn_like(value, dtype=dtype)
    return value


def _enough(inputs: list[Any]) -> list[Any]:
    """Of a batch of images the first few that hold a hundred thousand numbers: in eval mode more tell no more.

    Other inputs stay whole, for nothing says which of their axes is the batch.
    """
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].dim() != 4 or not inputs[0].numel():
        return inputs
    return [inputs[0][: math.ceil(ENOUGH / inputs[0][0].numel())]]


def _outputs(net: nn.Module, inputs: Sequence[Any], train: bool) -> list[Tensor] | None:
    """All floating-point outputs; None if the network has no such mode (a batch of one, say). Statistics stay."""
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    net.train(train)
    try:
        with torch.no_grad(), without_fast_attention(), without_warnings(), _WithoutDropout():
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
    return [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]


def _difference(before: list[Tensor] | None, after: list[Tensor] | None) -> float:
    if before is None or after is None:
        return 0.0 if before is after else float("inf")
    worst = 0.0
    for x, y in zip(before, after, strict=True):
        if x.numel():
            scale = x.abs().max().clamp_min(1e-300)
            worst = max(worst, float(((x - y).abs().max() / scale).nan_to_num(nan=float("inf"))))
    return worst
