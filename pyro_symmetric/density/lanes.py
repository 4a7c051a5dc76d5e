"""A model's energies and gradients with the chains along the last axis.

:func:`torch.func.vmap` puts chains along the first axis. The innermost loops of a
compiled program then run over a model's own last axis, such as the three components of
a mixture, one number after another. Here one chain's energy and gradient are traced as
a graph, and the graph is interpreted with values of all chains, ``(*shape, C)``.
Innermost loops then run over chains. Broadcasting aligns last axes: constants of a
pointwise operator get an axis of size 1, and nothing else changes. Operators without a
rule are mapped over the last axis.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pyro_symmetric._process import running_pyro
from pyro_symmetric.arguments import Args, Entries
from pyro_symmetric.density.eager import (
    Eager,
    Evaluation,
    Unavailable,
    despite_singular,
    largest_size,
    num_stored,
)
from pyro_symmetric.density.graphs import graph_of
from pyro_symmetric.density.special_functions import SharedExponentials
from pyro_symmetric.weights import map_values

aten, prims = torch.ops.aten, torch.ops.prims

LARGEST_CONSTANT = 2**20  # numbers; larger ones are computed anew in each evaluation
MOST_REMEMBERED = 2**20  # numbers of all constants, for programs to serve later calls
LARGE_MATRIX = 20**2  # entries; LAPACK takes them with the chains first
SHORT_SUM = 16  # terms up to which cumulative sums are sums over a triangle
FEW_TERMS = 8  # up to which the products of two matrices of each chain are sums


@dataclass(frozen=True, eq=False)
class Lanes:
    """A value of each chain, ``(*shape, C)``."""

    values: Tensor


class Call(NamedTuple):
    """An operator of the graph with its arguments, some of which are Lanes."""

    op: Any
    arguments: Entries  # by their names in the operator's schema
    result: Any  # of one chain, as a fake tensor
    num_chains: int

    def aligned(self, value: Any) -> Any:
        """Return a tensor that broadcasts with values of all chains, or no tensor."""
        if isinstance(value, Lanes):
            return value.values
        is_array = isinstance(value, Tensor) and value.dim() > 0
        return value.unsqueeze(-1) if is_array else value

    def expanded(self, value: Any) -> Any:
        """Return the values of all chains, from a tensor or Lanes, or no tensor."""
        if isinstance(value, Lanes):
            return value.values
        if isinstance(value, Tensor):
            return value.unsqueeze(-1).expand(*value.shape, self.num_chains)
        return value

    def with_own_target(self) -> Call:
        """Return the call with a clone of the tensor that it writes into.

        PyTorch's compiler adds several times to an expanded tensor, whose numbers share
        memory.
        """
        target = Lanes(self.expanded(self.arguments["self"]).clone())
        return self._replace(arguments=self.arguments | {"self": target})


class ChainsLast:
    """The energy and gradient of a density, for any number of chains.

    :param z: position of a chain, ``(D,)``.
    :ivar constants: results of the graph's nodes that don't depend on the position.
    :ivar is_comparable: whether the graph's code and its constants, which are copies,
        determine what it computes.
    :ivar programs: compiled of it, by the functions and shapes that they are for.
    :raises Unavailable: if the model factors large matrices of each chain, which takes
        longer with the chains last.
    """

    def __init__(self, eager: Eager, z: Tensor):
        # operators of the graph may make tensors in the default dtype
        with running_pyro(z.dtype), torch.no_grad():
            self.graph = _graph_of_one_chain(eager, z)
            if any(_factors_large_matrix(node) for node in self.graph.graph.nodes):
                raise Unavailable("it factors large matrices")
            is_small = _holds_small_tensors(self.graph)
            self.constants = _constants(self.graph, copies=is_small)
        self.is_comparable = is_small and (
            sum(map(largest_size, self._constant_leaves)) <= MOST_REMEMBERED
        )
        self.programs: dict[Args, Any] = {}

    def is_same(self, other: ChainsLast) -> bool:
        """Return whether both are known to compute the same."""
        if not (self.is_comparable and other.is_comparable):
            return False
        if self._description != other._description:
            return False
        pairs = zip(self._constant_leaves, other._constant_leaves, strict=True)
        return all(starmap(_is_equal, pairs))

    @cached_property
    def _description(self) -> tuple[str, list[str]]:
        """The graph's code, with the shapes and dtypes of its results."""
        results = [str(node.meta.get("val")) for node in self.graph.graph.nodes]
        return self.graph.code, results

    @property
    def _constant_leaves(self) -> list[Any]:
        return tree_leaves([constant() for constant in self.constants.values()])

    def __call__(self, z: Tensor) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``."""
        results: dict[Any, Any] = map_values(
            lambda constant: constant(), self.constants
        )
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                results[node] = Lanes(z.t())
            elif node.op != "output" and node not in results:
                args, kwargs = fx.node.map_arg(
                    (node.args, node.kwargs), results.__getitem__
                )
                results[node] = _interpret(node, args, kwargs, len(z))
        call = Call(None, {}, None, len(z))
        outputs: Any = self.graph.graph.output_node().args[0]
        energy, gradient = [call.expanded(results[node]) for node in outputs]
        return energy.clone(), gradient.t()


def _graph_of_one_chain(eager: Eager, z: Tensor) -> fx.GraphModule:
    """Trace the energy and the gradient at one position, ``(D,)``, without mutations
    and in the operators that PyTorch's compiler is left with.
    """
    from torch._inductor.decomposition import select_decomp_table  # slow to import

    with SharedExponentials():
        pure = torch.func.functionalize(
            lambda position: despite_singular(lambda: eager.raw_of_one(position)),
            remove="mutations",
        )
        graph = graph_of(pure, dict(select_decomp_table()), z)
    graph.graph.eliminate_dead_code()
    return graph


def _factors_large_matrix(node: fx.Node) -> bool:
    operands = [parent.meta.get("val") for parent in node.all_input_nodes]
    return "linalg" in str(node.target) and any(
        isinstance(value, Tensor) and value.numel() > LARGE_MATRIX for value in operands
    )


def _holds_small_tensors(graph: fx.GraphModule) -> bool:
    """Return whether all that a graph holds is tensors, small enough to copy."""
    nodes = graph.graph.find_nodes(op="get_attr")
    values = [getattr(graph, node.target) for node in nodes]
    if not all(isinstance(value, Tensor) for value in values):
        return False
    return sum(map(num_stored, values)) <= MOST_REMEMBERED


def _constants(graph: fx.GraphModule, copies: bool) -> dict[fx.Node, Callable[[], Any]]:
    """Compute the nodes that don't depend on the position, such as ``lgamma(y + 1)``.

    :param copies: whether to copy the graph's tensors, such as data that may change.
    :return: functions that return them. They fill tensors of equal numbers anew, since
        programs then hold the number.
    """
    results: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            value = getattr(graph, node.target)
            results[node] = value.detach().clone() if copies else value
        if node.op != "call_function":
            continue
        value = node.meta.get("val")
        is_small = not isinstance(value, Tensor) or value.numel() <= LARGEST_CONSTANT
        if is_small and all(parent in results for parent in node.all_input_nodes):
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), results.__getitem__
            )
            results[node] = node.target(*args, **kwargs)
    return map_values(_source, results)


def _is_equal(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return type(value) is type(other) and bool(value == other)
    if (value.dtype, value.shape) != (other.dtype, other.shape):
        return False
    is_nan = value.isnan() & other.isnan()
    return bool((is_nan | (value == other)).all())


def _source(value: Any) -> Callable[[], Any]:
    """Return a function that returns a constant."""
    if isinstance(value, Tensor) and value.numel() and not value.is_complex():
        number = value.flatten()[0]
        if bool((value == number).all()):
            return functools.partial(
                torch.full,
                value.shape,
                number.item(),
                dtype=value.dtype,
                device=value.device,
            )
    return lambda: value


def _interpret(node: fx.Node, args: Args, kwargs: Entries, num_chains: int) -> Any:
    """Return the result of a node for all chains: Lanes, or the same for each."""
    op: Any = node.target
    if op is operator.getitem or not any(
        isinstance(leaf, Lanes) for leaf in tree_leaves((args, kwargs))
    ):
        return op(*args, **kwargs)
    arguments = {}
    for index, argument in enumerate(op._schema.arguments):
        if index < len(args):
            arguments[argument.name] = args[index]
        elif argument.name in kwargs or argument.has_default_value():
            arguments[argument.name] = kwargs.get(argument.name, argument.default_value)
    if op in WITH_AXES:
        op = WITH_AXES[op]
        arguments["dim"] = None
    result = node.meta.get("val")
    by_default = _pointwise if torch.Tag.pointwise in op.tags else _mapped
    rule = RULES.get(op) or RULES.get(op.overloadpacket, by_default)
    outcome = rule(Call(op, arguments, result, num_chains))
    if not isinstance(outcome, Lanes) or not isinstance(result, Tensor):
        return outcome
    return Lanes(outcome.values.to(result.dtype).expand(*result.shape, num_chains))


# rules of operators -------------------------------------------------------------------


def _mapped(call: Call) -> Any:
    """Map any operator over chains."""
    leaves, structure = tree_flatten(call.arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Lanes)]
    absent: list[int] = []

    def of_one(*values: Tensor) -> Any:
        for place, value in zip(places, values, strict=True):
            leaves[place] = value
        result = call.op(**tree_unflatten(leaves, structure))
        if not isinstance(result, tuple | list):
            return result
        absent[:] = [place for place, part in enumerate(result) if part is None]
        return tuple(part for part in result if part is not None)

    values = [leaves[place].values for place in places]
    result = torch.vmap(of_one, in_dims=-1, out_dims=-1)(*values)
    if isinstance(result, Tensor):
        return Lanes(result)
    parts: list[Any] = [Lanes(part) for part in result]
    for place in absent:
        parts.insert(place, None)
    return parts


def _pointwise(call: Call) -> Lanes:
    """Apply an operator to each number, to one of numbers that are repeated along an
    axis, as those of a parameter of all rows are.
    """
    arguments = tree_map(call.aligned, call.arguments)
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]
    rank = max(tensor.dim() for tensor in tensors)
    repeated = [
        axis
        for axis in range(-rank, -1)
        if all(_is_repeated(tensor, axis) for tensor in tensors)
    ]

    arguments = tree_map(lambda value: _without_repeats(value, repeated), arguments)
    return Lanes(call.op(**arguments))


def _is_repeated(value: Tensor, axis: int) -> bool:
    return value.dim() < -axis or value.shape[axis] == 1 or value.stride(axis) == 0


def _without_repeats(value: Any, axes: list[int]) -> Any:
    """Leave one number along axes, which are counted from the last."""
    for axis in axes:
        if isinstance(value, Tensor) and value.dim() >= -axis:
            value = value.narrow(axis, 0, min(1, value.shape[axis]))
    return value


def _same(call: Call) -> Any:
    """Return the first argument, whose dtype becomes the result's."""
    return next(iter(call.arguments.values()))


def _copied(call: Call) -> Lanes:
    return Lanes(call.expanded(call.arguments["src"]))


def _alike(call: Call) -> Any:
    """Make a tensor that depends on the shape of its argument only."""
    values = tree_map(
        lambda leaf: leaf.values[..., 0] if isinstance(leaf, Lanes) else leaf,
        call.arguments,
    )
    return call.op(**values)


def _reshaped(call: Call) -> Lanes:
    return Lanes(_same(call).values.reshape(*call.result.shape, call.num_chains))


def _padded(call: Call) -> Lanes:
    pad = [0, 0, *call.arguments["pad"]]
    return Lanes(call.op(_same(call).values, pad, call.arguments["value"]))


def _along_axes(call: Call) -> Any:
    """Apply an operator along axes, which are counted from the first."""
    values = tree_map(call.expanded, call.arguments)
    operand = next(iter(values.values()))
    rank = operand.dim() - 1 if isinstance(operand, Tensor) else call.result.dim()
    if rank == 0:
        return _mapped(call)
    for name in ("dim", "dims", "dim0", "dim1"):
        axes = values.get(name, ())
        if isinstance(axes, int):
            values[name] = axes % rank
        elif name in values:
            values[name] = [axis % rank for axis in axes or range(rank)]
    return tree_map(Lanes, call.op(**values))


def _reduced(call: Call) -> Any:
    """Reduce axes, for one number of those that are repeated along another axis."""
    values = _same(call).values
    rank = values.dim() - 1
    axes = call.arguments["dim"]
    if rank == 0 or axes is None or axes == []:
        return _along_axes(call)
    reduced = [axis % rank for axis in ([axes] if isinstance(axes, int) else axes)]
    others = [axis - rank - 1 for axis in range(rank) if axis not in reduced]
    repeated = [axis for axis in others if _is_repeated(values, axis)]
    operand = Lanes(_without_repeats(values, repeated))
    return _along_axes(call._replace(arguments=call.arguments | {"self": operand}))


def _cumulative_sum(call: Call) -> Lanes:
    values = _same(call).values
    rank = values.dim() - 1
    if rank == 0:
        return _same(call)
    axis = call.arguments["dim"] % rank
    size = values.shape[axis]
    if size > SHORT_SUM:
        along_last = _contiguous(values.movedim(axis, -1))
        return Lanes(along_last.cumsum(-1).movedim(-1, axis).contiguous())
    number = torch.arange(size, device=values.device)
    is_term = (number[:, None] >= number).reshape(size, size, *[1] * rank)
    terms = torch.where(is_term, values.movedim(axis, 0), 0)
    return Lanes(terms.sum(1).movedim(0, axis))


def _scattered(call: Call) -> Any:
    """Scatter, or select where each row gets one number, which vectorises."""
    index = call.arguments["index"]
    shape = [*call.result.shape]
    call = call.with_own_target()
    target = call.arguments["self"].values
    axis = call.arguments["dim"] % max(1, len(shape))
    if isinstance(index, Lanes) or [*index.shape] != [
        *shape[:axis],
        1,
        *shape[axis + 1 :],
    ]:
        return _along_axes(call)
    number = torch.arange(shape[axis], device=index.device)
    number = number.reshape(-1, *[1] * (len(shape) - axis - 1))
    is_target = (number == index).unsqueeze(-1)
    source = call.expanded(call.arguments.get("src", call.arguments.get("value")))
    if isinstance(source, Tensor):
        source = source[tuple([slice(size) for size in index.shape])]
    if call.op is aten.scatter_add.default:
        return Lanes(target + torch.where(is_target, source, 0))
    return Lanes(torch.where(is_target, source, target))


def _indexed(call: Call) -> Any:
    values = call.arguments["self"]
    indices = call.arguments["indices"]
    if any(isinstance(index, Lanes) for index in indices):
        return _mapped(call)
    return Lanes(call.op(values.values, indices))


def _index_put(call: Call) -> Any:
    call = call.with_own_target()
    if any(isinstance(index, Lanes) for index in call.arguments["indices"]):
        return _mapped(call)
    changes = {name: call.aligned(call.arguments[name]) for name in ("self", "values")}
    return Lanes(call.op(**call.arguments | changes))


def _diagonal_scattered(call: Call) -> Any:
    return _mapped(call.with_own_target())


def _matrix_product(call: Call) -> Any:
    """Multiply by a constant matrix in one product, and vectors term by term."""
    first, second = call.arguments.values()
    if call.op is aten.dot.default:
        return Lanes((call.expanded(first) * call.expanded(second)).sum(0))
    if call.op is aten.mv.default and isinstance(first, Lanes):
        return Lanes((first.values * call.expanded(second)).sum(1))
    if isinstance(first, Tensor):
        return Lanes(torch.tensordot(first, second.values, 1))
    if isinstance(second, Tensor):
        return Lanes(torch.matmul(second.t(), first.values))
    return _product_of_each_chain(call)


def _product_of_each_chain(call: Call) -> Any:
    """Multiply the matrices of each chain, term by term if few terms are summed, which
    vectorises; else with the chains first, as products of strided matrices are slow.
    """
    first, second = call.arguments.values()
    if not (isinstance(first, Lanes) and isinstance(second, Lanes)):
        return _mapped(call)
    if first.values.shape[-2] <= FEW_TERMS:
        terms = first.values.unsqueeze(-2) * second.values.unsqueeze(-4)
        return Lanes(terms.sum(-3))
    chains_first = [_contiguous(x.values.movedim(-1, 0)) for x in (first, second)]
    return Lanes(torch.matmul(*chains_first).movedim(0, -1))


def _contiguous(value: Tensor) -> Tensor:
    """Copy a tensor into its order of axes, which programs would choose otherwise."""
    from torch._inductor.inductor_prims import force_stride_order

    value = value.contiguous()
    return force_stride_order(value, value.stride())


def _sum_with_product(call: Call) -> Any:
    product = Call(
        aten.mm.default,
        {name: call.arguments[name] for name in ("mat1", "mat2")},
        call.result,
        call.num_chains,
    )
    if call.arguments["beta"] != 1 or call.arguments["alpha"] != 1:
        return _mapped(call)
    if any(isinstance(factor, Lanes) for factor in product.arguments.values()):
        term = _matrix_product(product).values
    else:
        term = call.expanded(torch.mm(*product.arguments.values()))
    return Lanes(term + call.expanded(call.arguments["self"]))


def _checked(call: Call) -> None:
    """Raise where a matrix of any chain is singular."""
    call.op(**tree_map(call.expanded, call.arguments))


WITH_AXES = {
    aten.sum.default: aten.sum.dim_IntList,
    aten.mean.default: aten.mean.dim,
    aten.any.default: aten.any.dims,
    aten.all.default: aten.all.dims,
}


_BY_RULE: dict[Callable[[Call], Any], Args] = {
    _same: (
        aten.clone,
        aten.detach,
        aten.alias,
        aten.lift_fresh_copy,
        aten._to_copy,
        prims.convert_element_type,
    ),
    _copied: (aten.copy,),
    _alike: (
        aten.full_like,
        aten.zeros_like,
        aten.ones_like,
        aten.empty_like,
        aten.new_full,
        aten.new_zeros,
        aten.new_ones,
        aten.new_empty,
    ),
    _reshaped: (
        aten.view.default,
        aten.reshape,
        aten._unsafe_view,
        aten.squeeze,
        aten.unsqueeze,
    ),
    _reduced: (
        aten.sum.dim_IntList,
        aten.mean.dim,
        aten.prod.dim_int,
        aten.amax,
        aten.amin,
        aten.any.dim,
        aten.any.dims,
        aten.all.dim,
        aten.all.dims,
    ),
    _along_axes: (
        aten.cumprod,
        aten.max.dim,
        aten.min.dim,
        aten.sort,
        aten.cat,
        aten.stack,
        aten.gather,
        aten.slice_scatter,
        aten.select_scatter,
        aten.flip,
        prims.rev,
    ),
    _padded: (aten.constant_pad_nd,),
    _cumulative_sum: (aten.cumsum,),
    _scattered: (
        aten.scatter_add,
        aten.scatter.src,
        aten.scatter.value,
    ),
    _indexed: (aten.index, aten._unsafe_index),
    _index_put: (aten.index_put, aten._unsafe_index_put),
    _diagonal_scattered: (aten.diagonal_scatter,),
    _matrix_product: (aten.mm, aten.mv, aten.dot),
    _product_of_each_chain: (aten.bmm,),
    _sum_with_product: (aten.addmm,),
    _checked: (aten._linalg_check_errors,),
}
# by overloads, or by operators of which all overloads follow the rule
RULES = {op: rule for rule, operators in _BY_RULE.items() for op in operators}
