"""A network as a function of its weights, and its two twins, in which scales and signs
can be followed.

A conservation law is only seen at some inputs. A twin is the network with other
functions in place of some, such that a law that holds in it at these inputs is likely
to hold in the network at all inputs.

The twin of scales keeps functions of one number that are positively homogeneous: they
pass scales on. Those that are homogeneous in places (a clamp that no input reaches, a
saturated sigmoid) are multiplied by a wave in the logarithm of their input, which is
homogeneous nowhere. So is what a comparison with a constant decides.

The twin of signs is linear but for products. Odd functions of one number pass signs on,
and become the identity; even ones pass none, and become constants; to all others one is
added, so that no law holds. Norms and deviations are even: division by them is division
by constants.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from pyro_symmetric._process import Replaced
from pyro_symmetric.discovery.reads import arguments_of, untied, viewed
from pyro_symmetric.discovery.registry import bound, operator_name
from pyro_symmetric.discovery.symmetry import in_precision
from pyro_symmetric.discovery.trace import Deterministic, Trace
from pyro_symmetric.groups.moves import Move
from pyro_symmetric.weights import Weights

RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
EVEN = ("linalg_vector_norm", "norm", "var", "std")
CHOICES = ("maximum", "minimum", "fmax", "fmin", "where")
PRODUCTS = ("mul", "mm", "bmm", "matmul", "dot", "vdot", "einsum")
# Positively homogeneous functions of several numbers that are neither odd nor even.
UNSIGNED = (
    *(
        "max",
        "min",
        "amax",
        "amin",
        "prelu",
        "_prelu_kernel",
        "rrelu_with_noise",
        "sort",
        "topk",
        "median",
        "cummax",
    ),
    *(
        "max_pool",
        "adaptive_max_pool",
        "fractional_max_pool",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
    ),
)
# Operators without bounds: analytic but where arguments change sign, as the corner of a
# ReLU. What holds at generic weights and ordinary inputs holds at all of them.
UNBOUNDED = frozenset(
    """
    linear addmm mm bmm baddbmm matmul mv dot vdot einsum bilinear mul div add sub rsub
    neg reciprocal relu leaky_relu prelu _prelu_kernel rrelu elu selu celu abs gelu silu
    mish tanh sigmoid softplus sin cos exp erf square sqrt rsqrt pow softmax log_softmax
    layer_norm group_norm rms_norm batch_norm instance_norm var std mean sum norm
    linalg_vector_norm amax amin conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_max_pool2d embedding lstm gru rnn_tanh rnn_relu
    scaled_dot_product_attention dropout view reshape _unsafe_view transpose permute t
    squeeze unsqueeze flatten unflatten expand select slice split unsafe_split chunk
    split_with_sizes unbind getitem cat stack contiguous clone alias detach zeros ones
    """.split()  # noqa: SIM905
)
# where functions of one number are tried
GRID = torch.logspace(-3.0, 3.0, 61, dtype=torch.float64, device="cpu")


class NotDifferentiable(Exception):
    """A network can't be evaluated at random weights and inputs, or has no derivatives
    there.
    """


@contextlib.contextmanager
def evaluation() -> Iterator[None]:
    """Turn what a network's operators raise into :class:`NotDifferentiable`."""
    try:
        yield
    # no derivative; an index that was read off random inputs
    except (RuntimeError, IndexError) as error:
        raise NotDifferentiable(f"{type(error).__name__}: {error}") from error


def gradients(
    outputs: Sequence[Tensor],
    weights: Weights,
    losses: int,
    generator: torch.Generator | None = None,
) -> Iterator[Weights]:
    """Iterate over the gradients of random losses of some outputs, by the weights on
    which these depend.
    """
    outputs = [out for out in outputs if out.requires_grad]
    for _ in range(losses):
        if not outputs:
            yield {}
            continue
        loss = torch.stack(
            [(out * random_like(out, generator)).real.sum() for out in outputs]
        ).sum()
        with evaluation():
            gradient = torch.autograd.grad(
                loss, [*weights.values()], retain_graph=True, allow_unused=True
            )
        yield {
            site: value
            for site, value in zip(weights, gradient, strict=True)
            if value is not None
        }


def is_bounded(trace: Trace) -> bool:
    """Return whether a network may compare numbers with bounds."""
    return any(
        node.op == "call_function" and operator_name(node.target) not in UNBOUNDED
        for node in trace.nodes()
    )


class Pass:
    """A traced forward pass as a function of weights.

    :param graph: another graph to run; the trace's by default.
    :param leaves: the names of the graph's further leaves, and the sites that they
        copy; see :meth:`untied`.
    :ivar epsilons: site of a running variance -> the constant that batch normalisation
        adds to it.
    :ivar random: whether it draws random numbers; these are the same whenever it runs.
    """

    def __init__(
        self,
        trace: Trace,
        logits: bool,
        graph: fx.Graph | None = None,
        leaves: Mapping[str, str] | None = None,
    ):
        self.trace = trace
        self.logits = logits
        self.sites = trace.sites
        self.leaves = leaves or {}
        kinds = [spec.kind for spec in trace.program.graph_signature.output_specs]
        self.returned = [
            i for i, kind in enumerate(kinds) if kind == OutputKind.USER_OUTPUT
        ]
        self.site_of = {
            spec.arg.name: self.sites.get(spec.target, spec.target)
            for spec in trace.specs
            if getattr(spec.arg, "name", None) and spec.target
        }
        self.epsilons: dict[str, float] = {}
        self.random = False
        self.graph = graph or trace.program.graph
        last = {
            read: node for node in self.graph.nodes for read in node.all_input_nodes
        }
        self.last = defaultdict[fx.Node, list[fx.Node]](list)
        for read, node in last.items():
            self.last[node].append(read)
        self.equivariant: dict[tuple[fx.Node, Move], bool] = {}
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            call = bound(node.target, node.args, node.kwargs)
            trains = call.get("train", call.get("training", True))
            if trains and call.get("dropout_p", 1.0):
                tags = getattr(node.target, "tags", ())
                self.random |= torch.Tag.nondeterministic_seeded in tags
            variance = call.get("running_var")
            if isinstance(variance, fx.Node) and variance.name in self.site_of:
                self.epsilons[self.site_of[variance.name]] = call["eps"]

    def untied(self, sites: Collection[str]) -> Pass:
        """Return the pass with a leaf for each read of some sites."""
        graph, leaves = untied(self.graph, self.site_of, sites)
        if not leaves:
            return self
        return Pass(self.trace, self.logits, graph, leaves)

    def has_powers(self) -> bool:
        """Return whether a product or a choice has an operand that depends on no
        weights but those of another, as ``h * tanh(h)``.
        """
        leaves = {node: 0 for node in self.graph.nodes}  # one bit for each leaf
        for number, node in enumerate(self.graph.nodes):
            spec = self.trace.inputs.get(node.name)
            if node.op == "placeholder" and (spec is None or spec.target):
                leaves[node] = 1 << number
            for read in node.all_input_nodes:
                leaves[node] |= leaves[read]
            if operator_name(node.target) in (*PRODUCTS, *CHOICES):
                operands = [leaves[read] for read in arguments_of(node)]
                for first, second in itertools.combinations(operands, 2):
                    if first and second and first & second in (first, second):
                        return True
        return False

    def outputs(
        self,
        weights: Weights,
        inputs: Sequence[Any],
        dtype: torch.dtype,
        twin: Move | None = None,
        unfitted: set[int] | None = None,
    ) -> list[Tensor]:
        """Compute the differentiable outputs of the network, or of a twin.

        :param twin: the move that it follows, ``"scale"`` or ``"flip"``; the network
            itself by default.
        :param unfitted: ids of running variances that are to be fitted, with their
            means, to what they normalise; they change in place.
        """
        users = iter(inputs)
        args = list[Any]()
        for spec in self.trace.specs:
            site = self.sites.get(spec.target, spec.target)
            if spec.kind == InputKind.USER_INPUT:
                args.append(next(users))
            elif site in weights:
                args.append(weights[site])
            else:
                args.append(in_dtype(self.trace.constant(spec.target), dtype))
        args += [weights[leaf] for leaf in self.leaves]
        mode = Deterministic(dtype) if self.random else contextlib.nullcontext()
        run = _Run(self, dtype, twin, set() if unfitted is None else unfitted)
        with evaluation(), mode:
            results = run.results(args)
        outputs = list[Tensor]()
        for number in self.returned:
            out = results[number]
            if isinstance(out, Tensor) and (
                out.is_floating_point() or out.is_complex()
            ):
                outputs.append(
                    out.log_softmax(-1) if self.logits and out.dim() else out
                )
        return outputs


class _Run:
    """One run of a pass, with derivatives by the running statistics of batch
    normalisation.

    :param dtype: the precision, which casts in the network don't change.
    :param twin: see :meth:`Pass.outputs`, as for ``unfitted``.
    """

    def __init__(
        self, forward: Pass, dtype: torch.dtype, twin: Move | None, unfitted: set[int]
    ):
        self.forward = forward
        self.dtype = dtype
        self.twin = twin
        self.unfitted = unfitted
        # results without derivatives, and the number that they depend on
        self.decisions = dict[fx.Node, Tensor]()

    def results(self, args: Sequence[Any]) -> Any:
        """Evaluate the graph, and free each value after its last use."""
        placeholders = iter(args)
        values = dict[fx.Node, Any]()
        for node in self.forward.graph.nodes:
            call: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                break
            if node.op == "placeholder":
                values[node] = next(placeholders)
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(
                    self.forward.trace.program.graph_module
                )
            else:
                args, kwargs = self._in_precision(*call)
                result = in_dtype(self._call(node, args, kwargs), self.dtype)
                values[node] = self._law_broken(node, args, kwargs, result)
            for read in self.forward.last.get(node, ()):
                del values[read]
        return call[0][0]

    def _law_broken(self, node: fx.Node, args: Any, kwargs: Any, result: Any) -> Any:
        """Change a result so that no law holds behind functions that the twin's move
        doesn't pass.
        """
        if self.twin is None or not isinstance(result, Tensor):
            return result
        stopped_at = [
            self.decisions[read]
            for read in node.all_input_nodes
            if read in self.decisions
        ]
        x = _only_number(node.target, args, kwargs)
        # Results with derivatives are linearised already where signs are followed.
        linear = self.twin == "flip" and result.requires_grad
        if x is not None and x.requires_grad and not linear:
            key = (node, self.twin)
            equivariant = self.forward.equivariant
            if key not in equivariant:
                equivariant[key] = self._equivariant(node.target, x, args, kwargs)
            stopped_at += [] if equivariant[key] else [x]
        if not result.requires_grad:
            self.decisions.update((node, x) for x in stopped_at)
            return result
        for x in stopped_at:
            if self.twin == "flip":
                result = result + 1.0
            else:
                smallest = 0.01 * x.detach().square().mean().sqrt() + 1e-30
                wave = 1.0 + 0.3 * (3.0 * (x.abs() + smallest).log()).sin()
                result = result * (wave if wave.shape == result.shape else wave.mean())
        return result

    def _equivariant(self, target: Any, x: Tensor, args: Any, kwargs: Any) -> bool:
        """Return whether the twin's move passes a function of one number: a sign, if it
        is even.

        A scale does if the function is homogeneous at all inputs, or at none (an
        exponential, or what adds an epsilon): then its own gradient breaks the law.
        """
        grid = torch.cat([GRID, -GRID]).to(x.device)
        before = target(grid, *args[1:], **kwargs)
        if self.twin == "flip":
            return torch.equal(before, target(-grid, *args[1:], **kwargs))
        after = target(2.0 * grid, *args[1:], **kwargs)
        ratio = after / before
        ratio = ratio[~ratio.isnan()]  # zeros stay zero
        is_constant = (ratio[1:] - ratio[:-1]).abs() <= 1e-12 * ratio[1:].abs()
        return not bool(is_constant.any()) or bool(is_constant.all())

    def _in_precision(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replace the dtypes that an operator casts to by the run's precision."""
        dtypes = (
            {"dtype": in_precision(kwargs["dtype"], self.dtype)}
            if kwargs.get("dtype")
            else {}
        )
        numbers = [
            in_precision(x, self.dtype) if isinstance(x, torch.dtype) else x
            for x in args
        ]
        return numbers, {**kwargs, **dtypes}

    def _call(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        name = operator_name(target)
        # a twin's tensors may have other strides
        if target in RESHAPES:
            return args[0].reshape(args[1])
        if name == "copy":  # into what is written whole
            return args[1].to(args[0].dtype).expand_as(args[0])
        if "_norm" in name:
            normalised = self._normalised(name, bound(target, args, kwargs))
            if normalised is not None:
                further = [None] * (len(target._schema.returns) - 1)
                return (normalised, *further) if further else normalised
        if self.twin == "flip":
            if _is_square(node, name):
                return target(*args, **kwargs).detach()
            return self._linearised(target, name, args, kwargs)
        return target(*args, **kwargs)

    def _normalised(self, name: str, arguments: Mapping[str, Any]) -> Tensor | None:
        """Normalise by running statistics, also in train mode; in the twin of signs, in
        any layer, by constants.
        """
        x: Any = arguments.get("input")
        shape: Any = arguments.get("normalized_shape")
        variance = arguments.get("running_var")
        if shape is None and x is not None:
            shape = (1, -1, *(1 for _ in x.shape[2:]))
        if variance is not None:
            if id(variance) in self.unfitted:
                self.unfitted.discard(id(variance))
                _fit_statistics(x, arguments["running_mean"], variance)
            y = x - arguments["running_mean"].reshape(shape)
            if self.twin == "flip":  # the running variance fits another network
                y = _standardised(
                    y,
                    [dim for dim in range(y.dim()) if dim != 1],
                    arguments["eps"],
                    False,
                )
            else:
                y = y / (variance + arguments["eps"]).sqrt().reshape(shape)
        elif self.twin != "flip" or "weight" not in arguments:
            return None
        elif "group" in name:
            groups = arguments.get("num_groups") or arguments["group"]
            y = _standardised(
                x.reshape(len(x), groups, -1), [-1], arguments["eps"]
            ).reshape(x.shape)
        elif arguments.get("normalized_shape") is not None:
            y = _standardised(
                x,
                range(x.dim() - len(shape), x.dim()),
                arguments["eps"],
                "rms" not in name,
            )
        else:  # of each channel alone, which passes its sign on
            y = x
        y = y if arguments["weight"] is None else y * arguments["weight"].reshape(shape)
        return (
            y if arguments.get("bias") is None else y + arguments["bias"].reshape(shape)
        )

    def _linearised(self, target: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Call what replaces a function in the twin of signs."""
        if name in ("lstm", "gru", "rnn_tanh") and target in decomposition_table:
            with (
                Replaced({torch.tanh: _identity, Tensor.tanh: _identity}),
                # else one kernel computes a layer in single precision, tanh included
                torch.backends.mkldnn.flags(enabled=False),
            ):
                return decomposition_table[target](*args, **kwargs)
        result = target(*args, **kwargs)
        several = isinstance(result, tuple | list) and result
        first = result[0] if several else result
        tensors = _tensors_in(args, kwargs)
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return result
        if not any(x.requires_grad for x in tensors):
            return result
        if name in EVEN:
            return result.detach()
        if name.removesuffix("_with_indices").rstrip("123d") in UNSIGNED:
            shifted = first + 1.0
            return type(result)([shifted, *result[1:]]) if several else shifted
        x = _only_number(target, args, kwargs)
        if x is None:
            return result
        grid = GRID.to(x)
        positive = target(grid, *args[1:], **kwargs)
        negative = target(-grid, *args[1:], **kwargs)
        if torch.allclose(positive, -negative):
            return x
        return result.detach() if torch.allclose(positive, negative) else result + 1.0


def _is_square(node: fx.Node, name: str) -> bool:
    """Return whether a call multiplies a result by itself, or by a view of itself.

    Weights that are multiplied by themselves have a leaf for each read.
    """
    if name not in PRODUCTS:
        return False
    first, *further = [viewed(read) for read in arguments_of(node)]
    return further == [first] and first.op == "call_function"


def _tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    leaves = pytree.tree_leaves((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _only_number(target: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the tensor to which a function of one number is applied; None for other
    functions.
    """
    if torch.Tag.pointwise not in getattr(target, "tags", ()):
        return None
    tensors = _tensors_in(args, kwargs)
    return tensors[0] if len(tensors) == 1 else None


def _fit_statistics(x: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Move running statistics near those of what they normalise; constant channels keep
    theirs.
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    spread, centre = torch.var_mean(x, dims, correction=0)
    varies = spread > 1e-6 * spread.max()
    size = mean.square().mean().sqrt()
    fitted = centre + 0.3 * spread.sqrt() * mean / size
    mean.copy_(torch.where(varies, fitted, mean))
    variance.copy_(torch.where(varies, spread * variance / variance.mean(), variance))


def _identity(x: Tensor) -> Tensor:
    return x


def _standardised(
    x: Tensor, dims: Sequence[int], eps: float | None, centre: bool = True
) -> Tensor:
    """Standardise over some dimensions, by a deviation that counts as constant."""
    y = x - x.mean([*dims], keepdim=True) if centre else x
    return y * (y.square().mean([*dims], keepdim=True) + (eps or 0.0)).rsqrt().detach()


def in_double(value: Tensor) -> Tensor:
    """Cast a tensor to double precision, without its graph."""
    return in_dtype(value.detach(), torch.float64)


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Cast a tensor of real or complex numbers to a precision; leave all else alone."""
    return (
        value.to(in_precision(value.dtype, dtype))
        if isinstance(value, Tensor)
        else value
    )


def random_like(
    value: Tensor, generator: torch.Generator | None = None, size: float = 1.0
) -> Tensor:
    """Draw normal numbers of a size in place of real or complex ones; leave others
    alone.
    """
    if not (value.is_floating_point() or value.is_complex()):
        return value
    noise = torch.randn(
        value.shape, generator=generator, dtype=value.dtype, device="cpu"
    )
    return noise.to(value.device).mul_(size)
