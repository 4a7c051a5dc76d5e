"""Programs by XLA, the compiler of JAX, which makes one piece of machine code of loops within loops.

A kernel's arithmetic is the same flat graph that inductor compiles (:mod:`~pyro_symmetric.mcmc.density.flat`). Here
JAX's functions stand for PyTorch's operations, those that ``torchax`` registers for them. JAX and torchax are loaded
if they are asked for, and JAX's own settings stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, fx

from pyro_symmetric.mcmc.density.engine import Evaluation, Unavailable
from pyro_symmetric.mcmc.density.flat import Evaluate, Flat
from pyro_symmetric.mcmc.density.programs import Compute, Programs

# Overloads that torchax 0.0.13 names and PyTorch 2.13 has no more.
GONE = ((torch.ops.aten.prod, "dim_Dimname"), (torch.ops.aten.index_copy, "dimname"))
LOOP = "while_loop"


class XLAPrograms(Programs):
    """The programs of one density, by XLA.

    :raises ImportError: if JAX or torchax isn't installed.
    """

    name, in_stretches = "jax", True
    notice = "XLA makes a program of the model"

    def __init__(self, evaluate: Evaluate, most_chains: int):
        require_jax()
        super().__init__(evaluate, most_chains)
        self.versions = {package: version(package) for package in ("jax", "torchax")}

    def _flat_of(self, evaluate: Evaluate, inputs: Sequence[Tensor]) -> Flat:
        return FunctionalFlat(evaluate, inputs)

    def _program(self, function: Compute, evaluate: Flat, *others: Any) -> tuple[Callable[..., Any], Any]:
        assert isinstance(evaluate, FunctionalFlat)
        _ = evaluate.pure  # before anything is traced around it
        return super()._program(function, evaluate, *others)

    def _compiled(self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Callable[..., Any]:
        return compiled(function, inputs)

    def _placed(self, constants: tuple[Tensor, ...]) -> tuple[Any, ...]:
        with _settings():
            return tuple(_in_jax(value) for value in constants)


class FunctionalFlat(Flat):
    """A density's evaluation as a graph that changes nothing in place, of PyTorch's core operations."""

    def __init__(self, evaluate: Evaluate, inputs: Sequence[Tensor]):
        super().__init__(evaluate, inputs)
        self._given = *inputs, *self.constants

    def __call__(self, *inputs: Tensor) -> Evaluation:
        energy, gradient = self.pure(*inputs, *self.constants)
        return energy, gradient

    @cached_property
    def pure(self) -> fx.GraphModule:
        """That graph, which takes the constants after the inputs; of no use where a program is kept already."""
        from torch._decomp import core_aten_decompositions
        from torch.fx.experimental.proxy_tensor import make_fx

        changing = make_fx(torch.func.functionalize(self.graph), decomposition_table=dict(core_aten_decompositions()))
        return changing(*self._given)


def require_jax() -> None:
    """:raises ImportError: if JAX or torchax isn't installed, or can't be loaded."""
    try:
        operators()
    except ImportError as error:
        raise ImportError(
            f"engine is 'jax', which needs JAX and torchax ({error}); pip install 'pyro-symmetric[jax]'"
        ) from error


@cache
def operators() -> dict[Any, Callable[..., Any]]:
    """JAX's function for each of PyTorch's operations, as torchax registers them, and some of our own."""
    for packet, overload in GONE:
        if not hasattr(packet, overload):
            setattr(packet, overload, overload)
    import jax
    import jax.numpy as jnp
    import torchax.ops.jaten  # noqa: F401
    from torchax.ops.ops_registry import all_aten_ops

    aten = torch.ops.aten

    def index_select(x: Any, dim: int, index: Any) -> Any:
        if index.shape == (1,):
            return jax.lax.dynamic_slice_in_dim(x, index[0], 1, dim)
        return jnp.take(x, index, dim)

    def index_copy(x: Any, dim: int, index: Any, source: Any) -> Any:
        if index.shape == (1,):
            return jax.lax.dynamic_update_slice_in_dim(x, source, index[0], dim)
        return x.at[(slice(None),) * dim + (index,)].set(source)

    own = {
        operator.getitem: operator.getitem,
        aten.copy.default: lambda to, value, _=False: jnp.broadcast_to(value, to.shape).astype(to.dtype),
        aten.index_select.default: index_select,
        aten.index_copy.default: index_copy,
    }
    return {target: found.func for target, found in all_aten_ops.items()} | own


def compiled(function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """The program of a function of tensors, which takes arrays of JAX's, too.

    :raises Unavailable: naming an operation that torchax doesn't know.
    """
    import jax
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(function, dict(core_aten_decompositions()), tracing_mode="fake", _allow_non_fake_inputs=True)(
        *inputs
    )
    program = jax.jit(lambda *values: interpreted(traced, values))

    def call(*values: Any) -> list[Tensor]:
        with _settings():
            found = program(*[value.detach().numpy() if isinstance(value, Tensor) else value for value in values])
            return [torch.from_dlpack(value) for value in found]

    call(*inputs)  # so that what can't be compiled is told now
    return call


# small steps --------------------------------------------------------------------------------------------------------


def _settings() -> AbstractContextManager[Any]:
    """JAX on the CPU, with 64 bits where they are asked for."""
    import jax

    stack = ExitStack()
    stack.enter_context(jax.enable_x64(True))
    stack.enter_context(jax.default_device(jax.devices("cpu")[0]))
    return stack


def _in_jax(value: Tensor) -> Any:
    import jax.numpy as jnp

    return jnp.asarray(value.detach().numpy())


def interpreted(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """The results of a graph, by JAX's functions."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            held = operator.attrgetter(node.target)(graph)
            values[node] = _in_jax(held) if isinstance(held, Tensor) else held
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return tuple(args[0]) if isinstance(args[0], list | tuple) else args[0]
            values[node] = _as_told(node, _result(node, args, kwargs))
    raise AssertionError("a graph ends with its output")


def _result(node: fx.Node, args: Any, kwargs: Any) -> Any:
    if getattr(node.target, "__name__", "") == LOOP:
        return _loop(*args)
    if callable(node.target) and not node.all_input_nodes:  # numbers that depend on nothing
        return _in_jax(node.target(*args, **{**kwargs, "device": "cpu"}))
    known = operators()
    function = known.get(node.target) or known.get(getattr(node.target, "overloadpacket", None))
    if function is None:
        raise Unavailable(f"torchax has no {node.target}")
    return function(*args, **kwargs)


def _loop(going_on: fx.GraphModule, body: fx.GraphModule, carried: Sequence[Any], others: Sequence[Any]) -> Any:
    import jax

    return jax.lax.while_loop(
        lambda values: interpreted(going_on, (*values, *others)).reshape(()),
        lambda values: tuple(interpreted(body, (*values, *others))),
        tuple(carried),
    )


def _as_told(node: fx.Node, value: Any) -> Any:
    """A result in the dtype that PyTorch's would have.

    :raises Unavailable: if it is of another shape.
    """
    told = node.meta.get("val")
    if not isinstance(told, Tensor):
        return value
    if tuple(told.shape) != tuple(value.shape):
        raise Unavailable(f"torchax's {node.target} gives {tuple(value.shape)}, not {tuple(told.shape)}")
    return value.astype(_dtype(told.dtype))


@cache
def _dtype(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
