"""A network as a function of its weights, and its twins, which show where scales and signs go.

The law of gradients only tells what holds at the inputs that it sees. A twin is the same network with other functions
in place of some, so that what holds in it at some inputs is likely to hold in the network at all of them.

The twin of scales: a function of one number that is homogeneous passes scales on, and stays as it is. One that is
homogeneous in places (a clamp that no input reaches, a sigmoid that is saturated) is multiplied by a wave of its
input's logarithm, which is homogeneous nowhere. So is what a comparison with a constant decides.

The twin of signs is linear but for products: odd functions of one number pass signs on, and are the identity; even
ones let none pass, and are constants; others have no sign to pass on: one is added, so that no law holds. Norms and
deviations are even; the division by them is left out.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.export.graph_signature import InputKind, OutputKind
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pyro_symmetric.discovery.registry import bound, operator_name
from pyro_symmetric.discovery.symmetry import in_precision
from pyro_symmetric.discovery.trace import Deterministic, Trace, site_names
from pyro_symmetric.groups.units import Move
from pyro_symmetric.weights import Weights

EVEN = ("linalg_vector_norm", "norm", "var", "std")
# Functions that are homogeneous but pass no sign; those of one number are recognised by trying.
UNSIGNED = (
    *("max", "min", "amax", "amin", "prelu", "_prelu_kernel", "rrelu_with_noise", "sort", "topk", "median", "cummax"),
    *("max_pool", "adaptive_max_pool", "fractional_max_pool", "maximum", "minimum", "fmax", "fmin"),
)
WIDE = torch.logspace(-3.0, 3.0, 61, dtype=torch.float64, device="cpu")  # where functions of one number are tried


class NotDifferentiable(Exception):
    """A network can't be evaluated at random weights and inputs, or has no derivatives there."""


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    """Whatever the operators of a network raise is a :class:`NotDifferentiable`."""
    try:
        yield
    except (RuntimeError, IndexError) as error:  # no derivative; an index that was read off random inputs
        raise NotDifferentiable(f"{type(error).__name__}: {error}") from error


def gradients(
    outputs: Sequence[Tensor], weights: Weights, losses: int, generator: torch.Generator | None = None
) -> Iterator[Weights]:
    """The gradients of random losses of some outputs; of weights that these don't depend on, there are none."""
    outputs = [out for out in outputs if out.requires_grad]
    for _ in range(losses):
        if not outputs:
            yield {}
            continue
        loss = torch.stack([(out * random_like(out, generator)).real.sum() for out in outputs]).sum()
        with evaluation():
            every = torch.autograd.grad(loss, [*weights.values()], retain_graph=True, allow_unused=True)
        yield {site: gradient for site, gradient in zip(weights, every, strict=True) if gradient is not None}


class Pass:
    """A traced forward pass as a function of weights.

    :ivar epsilons: what batch normalisation adds to running variances, by their sites.
    :ivar draws: whether it draws random numbers, which are the same ones whenever it runs.
    """

    def __init__(self, trace: Trace, logits: bool):
        self.trace, self.logits, self.sites = trace, logits, site_names(trace.net)
        kinds = [spec.kind for spec in trace.program.graph_signature.output_specs]
        self.returned = [i for i, kind in enumerate(kinds) if kind == OutputKind.USER_OUTPUT]
        names = {spec.arg.name: spec.target for spec in trace.specs if getattr(spec.arg, "name", None) and spec.target}
        self.epsilons: dict[str, float] = {}
        self.draws = False
        self.graph = trace.program.graph_module
        last = {read: node for node in self.graph.graph.nodes for read in node.all_input_nodes}
        self.last = {node: [read for read in node.all_input_nodes if last[read] is node] for node in last.values()}
        self.lets_through: dict[tuple[fx.Node, Move], bool] = {}
        for node in self.graph.graph.nodes:
            given = bound(node.target, node.args, node.kwargs) if node.op == "call_function" else {}
            trains = given.get("train", given.get("training", True)) and given.get("dropout_p", 1.0)
            self.draws |= bool(trains) and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if isinstance(variance := given.get("running_var"), fx.Node) and variance.name in names:
                self.epsilons[self.sites.get(names[variance.name], names[variance.name])] = given["eps"]

    def outputs(
        self,
        weights: Weights,
        inputs: Sequence[Any],
        dtype: torch.dtype,
        twin: Move | None = None,
        unsettled: set[int] | None = None,
    ) -> list[Tensor]:
        """Results of the network, or of a twin, that have derivatives.

        :param twin: the move that it shows, ``"scale"`` or ``"flip"``; the network itself by default.
        :param unsettled: ids of running variances that are yet to fit what is normalised, as are their means; they
            change in place.
        """
        users, args = iter(inputs), []
        for spec in self.trace.specs:
            if spec.kind == InputKind.USER_INPUT:
                args.append(next(users))
            else:
                value = weights.get(self.sites.get(spec.target, spec.target))
                args.append(precise(self.trace.constant(spec.target), dtype) if value is None else value)
        with evaluation(), Deterministic(dtype) if self.draws else contextlib.nullcontext():
            every = _Run(self, dtype, twin, set() if unsettled is None else unsettled).outputs(args)
        found = [every[i] for i in self.returned if isinstance(every[i], Tensor)]
        found = [out for out in found if out.is_floating_point() or out.is_complex()]
        return [out.log_softmax(-1) if self.logits and out.dim() else out for out in found]


class _Run:
    """A run of a pass in which batch normalisation has derivatives in its running statistics.

    :param dtype: the precision; what is cast to another stays in this one.
    :param twin: the move of which functions are replaced by what it sees of them.
    :param unsettled: see :meth:`Pass.outputs`.
    """

    def __init__(self, own: Pass, dtype: torch.dtype, twin: Move | None, unsettled: set[int]):
        self.own, self.dtype, self.twin, self.unsettled = own, dtype, twin, unsettled
        self.decided = dict[fx.Node, Tensor]()  # results without derivatives, and the number that decides on them

    def outputs(self, args: Sequence[Any]) -> Any:
        """The results of the graph; whatever nothing reads any more is forgotten."""
        left, values = iter(args), dict[fx.Node, Any]()
        for node in self.own.graph.graph.nodes:
            given: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                break
            if node.op == "placeholder":
                values[node] = next(left)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(self.own.graph)
            else:
                own, named = self._in_precision(*given)
                result = precise(self._called(node.target, own, named), self.dtype)
                values[node] = self._shown(node, own, named, result)
            for read in self.own.last.get(node, ()):
                del values[read]
        return given[0][0]

    def _shown(self, node: fx.Node, args: Any, kwargs: Any, result: Any) -> Any:
        """A result as the twin's move sees it: no law holds behind functions through which it doesn't pass."""
        if self.twin is None or not isinstance(result, Tensor):
            return result
        numbers = [self.decided[one] for one in node.all_input_nodes if one in self.decided]
        x = _only_number(node.target, args, kwargs)
        # A sign that meets a result with derivatives has been seen already.
        if x is not None and x.requires_grad and not (self.twin == "flip" and result.requires_grad):
            if (node, self.twin) not in self.own.lets_through:
                self.own.lets_through[node, self.twin] = self._lets_through(node.target, x, args, kwargs)
            numbers += [] if self.own.lets_through[node, self.twin] else [x]
        if not result.requires_grad:
            self.decided.update((node, x) for x in numbers)
            return result
        for x in numbers:
            if self.twin == "flip":
                result = result + 1.0
            else:
                least = 0.01 * x.detach().square().mean().sqrt() + 1e-30
                wave = 1.0 + 0.3 * (3.0 * (x.abs() + least).log()).sin()
                result = result * (wave if wave.shape == result.shape else wave.mean())
        return result

    def _lets_through(self, target: Any, x: Tensor, args: Any, kwargs: Any) -> bool:
        """False if a function of one number is homogeneous at some inputs, but not at all; for signs, if it isn't even.

        What is homogeneous nowhere (an exponential, or what adds an epsilon) needs no wave: its own gradients tell.
        """
        wide = torch.cat([WIDE, -WIDE]).to(x.device)
        before, after = (target(c * wide, *args[1:], **kwargs) for c in (1.0, -1.0 if self.twin == "flip" else 2.0))
        if self.twin == "flip":
            return torch.equal(before, after)
        ratio = after / before
        ratio = ratio[~ratio.isnan()]  # zeros stay so
        same = (ratio[1:] - ratio[:-1]).abs() <= 1e-12 * ratio[1:].abs()
        return not bool(same.any()) or bool(same.all())

    def _in_precision(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an operator, which casts to this precision."""
        args = tuple(in_precision(x, self.dtype) if isinstance(x, torch.dtype) else x for x in args)
        return args, {name: in_precision(x, self.dtype) if name == "dtype" and x else x for name, x in kwargs.items()}

    def _called(self, target: Any, args: Any, kwargs: Any) -> Any:
        name, given = operator_name(target), bound(target, args, kwargs)
        if name in ("view", "_unsafe_view") and "dtype" not in given:  # a twin's tensors may lie in another order
            return args[0].reshape(args[1])
        if name == "copy":  # into what is written whole
            return args[1].to(args[0].dtype).expand_as(args[0])
        normalised = self._normalised(name, given)
        if normalised is not None:
            returns = len(target._schema.returns)
            return normalised if returns == 1 else (normalised, *[None] * (returns - 1))
        if self.twin == "flip":
            return self._signed(target, name, args, kwargs)
        return target(*args, **kwargs)

    def _normalised(self, name: str, given: Mapping[str, Any]) -> Tensor | None:
        """Normalisation by running statistics, in train mode, too; in the twin any, by constants."""
        x: Any = given.get("input")
        shape: Any = given.get("normalized_shape")
        variance = given.get("running_var")
        if shape is None and x is not None:
            shape = (1, -1, *(1 for _ in x.shape[2:]))
        if variance is not None:
            if id(variance) in self.unsettled:
                self.unsettled.discard(id(variance))
                _settle(x, given["running_mean"], variance)
            y = x - given["running_mean"].reshape(shape)
            if self.twin == "flip":  # the running variance fits another network
                y = _standardised(y, [dim for dim in range(y.dim()) if dim != 1], given["eps"], False)
            else:
                y = y / (variance + given["eps"]).sqrt().reshape(shape)
        elif self.twin != "flip" or "_norm" not in name or "weight" not in given:
            return None
        elif "group" in name:
            groups = given.get("num_groups") or given["group"]
            y = _standardised(x.reshape(len(x), groups, -1), [-1], given["eps"]).reshape(x.shape)
        elif given.get("normalized_shape") is not None:
            y = _standardised(x, range(x.dim() - len(shape), x.dim()), given["eps"], "rms" not in name)
        else:  # of each channel alone, which passes its sign on
            y = x
        y = y if given["weight"] is None else y * given["weight"].reshape(shape)
        return y if given.get("bias") is None else y + given["bias"].reshape(shape)

    def _signed(self, target: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result as signs see it."""
        if name in ("lstm", "gru", "rnn_tanh") and target in decomposition_table:
            with _WithoutTanh():
                return decomposition_table[target](*args, **kwargs)
        result = target(*args, **kwargs)
        if not isinstance(first := result[0] if isinstance(result, tuple | list) and result else result, Tensor):
            return result
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not first.is_floating_point() or not any(x.requires_grad for x in tensors):
            return result
        if name in EVEN or (name == "mul" and args[0] is args[1]):
            return result.detach()
        if name.removesuffix("_with_indices").rstrip("123d") in UNSIGNED:
            return first + 1.0 if first is result else type(result)([first + 1.0, *result[1:]])
        if (x := _only_number(target, args, kwargs)) is None:
            return result
        one, other = (target(sign * WIDE.to(x), *args[1:], **kwargs) for sign in (1.0, -1.0))
        if torch.allclose(one, -other):
            return x
        return result.detach() if torch.allclose(one, other) else result + 1.0


def _only_number(target: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The one tensor that a function of one number is applied to; None if it is another function."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    return tensors[0] if len(tensors) == 1 and torch.Tag.pointwise in getattr(target, "tags", ()) else None


def _settle(x: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Move running statistics near those of what they normalise, unless this is always the same."""
    spread, centre = torch.var_mean(x, [dim for dim in range(x.dim()) if dim != 1], correction=0)
    told = spread > 1e-6 * spread.max()
    mean.copy_(torch.where(told, centre + 0.3 * spread.sqrt() * mean / mean.square().mean().sqrt(), mean))
    variance.copy_(torch.where(told, spread * variance / variance.mean(), variance))


class _WithoutTanh(TorchFunctionMode):
    """The hyperbolic tangent is the identity."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in (torch.tanh, Tensor.tanh) else func(*args, **(kwargs or {}))


def _standardised(x: Tensor, dims: Sequence[int], eps: float | None, centre: bool = True) -> Tensor:
    """Normalisation over some axes, whose division is by constants."""
    y = x - x.mean([*dims], keepdim=True) if centre else x
    return y * (y.square().mean([*dims], keepdim=True) + (eps or 0.0)).rsqrt().detach()


def precise(value: Any, dtype: torch.dtype) -> Any:
    """A tensor in a precision; complex numbers stay so, and whatever else is left alone."""
    return value.to(in_precision(value.dtype, dtype)) if isinstance(value, Tensor) else value


def random_like(value: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Normal numbers in place of real or complex ones; whatever else is left alone."""
    if not (value.is_floating_point() or value.is_complex()):
        return value
    return torch.randn(value.shape, generator=generator, dtype=value.dtype, device="cpu").to(value.device)
