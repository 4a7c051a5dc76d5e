"""The graph of one forward pass: a function from tensors to tensors, exported by
``torch.export``.

Tensors are found wherever they are among the inputs and outputs: in lists,
dictionaries, dataclasses, distributions, or objects of other libraries. All other
inputs are part of the architecture. Caches among the outputs are ignored: a later call
may reuse them, with the same order of heads and channels.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from pyro_symmetric._process import (
    Replaced,
    drawn_seed,
    forked,
    replaced,
    running_pyro,
    with_both_branches,
    without_fast_attention,
    without_messages,
    without_warnings,
)
from pyro_symmetric.arguments import Keywords
from pyro_symmetric.density.traced import require_call
from pyro_symmetric.discovery.registry import bound, operator_name, rule_for
from pyro_symmetric.discovery.symmetry import in_precision
from pyro_symmetric.errors import Error
from pyro_symmetric.networks import failing_layer

UNTRACEABLE = """\
{net} can't be traced by torch.export ({error}). A forward pass may not depend on the
numbers that flow through it (no `if x.sum() > 0`). Trace the part that has no such
branches, or declare the group:

    group = ps.Group.declare(
        {{  # per axis
            "0.weight": ("hidden", None),
            "0.bias": ("hidden",),
            "2.weight": (None, "hidden"),
        }},
        dict(net.named_parameters()),
    )"""
CACHES = frozenset(
    {"past_key_value", "past_key_values", "past_buckets_states", "cache_params", "mems"}
)


class UntraceableError(Error, ValueError):
    """The network can't be traced; the message says why, and what to do instead."""


class Trace:
    """The functional graph of one forward pass: in-place operators are replaced by pure
    ones.

    Operators without a rule are decomposed, if PyTorch knows how.

    :param net: the network; some modules keep marks of tracing.
    :param args: example arguments of its forward pass; so are ``kwargs``.
    :ivar program: the exported program.
    :ivar specs: the graph's inputs in order, with the network's names as targets.
    :ivar inputs: name of a graph's input -> its spec.
    :ivar sites: name of a parameter or buffer -> its site.
    :ivar tensors: the tensors among the example arguments, in the graph's order.
    :ivar returned: the nodes whose values the network returns, without new values of
        buffers.
    :raises UntraceableError: if there is no such graph.
    :raises ValueError: if the network returns no tensor.
    """

    def __init__(
        self,
        net: nn.Module,
        args: Sequence[Any],
        kwargs: Keywords | None = None,
    ):
        self.net = net
        # one draw from NumPy's or Python's generator stands for all
        with forked(drawn_seed(), host=True):
            function = TensorsOnly(net, args, kwargs)
            self.program = _exported(function)
        self.tensors = function.tensors
        signature = self.program.graph_signature
        self.specs = [
            replace(spec, target=spec.target and spec.target.removeprefix("net."))
            for spec in signature.input_specs
        ]
        self.inputs = {
            spec.arg.name: spec for spec in self.specs if hasattr(spec.arg, "name")
        }
        self.sites = site_names(net)
        self._graph = self.program.graph
        ends = tree_leaves(self._graph.output_node().args[0])
        ends = [
            n
            for n, s in zip(ends, signature.output_specs, strict=True)
            if s.kind == OutputKind.USER_OUTPUT
        ]
        self.returned = [node for node in ends if isinstance(node, Node)]
        if not self.returned:
            raise ValueError(
                f"{type(net).__name__} returns no tensor: there is nothing for a "
                "symmetry to leave alone"
            )

    def nodes(self) -> list[Node]:
        """Return all inputs, and the calls that results or new values of buffers depend
        on (assertions need others).
        """
        output = self._graph.output_node()
        needed = {output}
        for node in reversed(self._graph.nodes):
            if node.op != "call_function" or any(user in needed for user in node.users):
                needed.add(node)
        return [
            node for node in self._graph.nodes if node in needed and node is not output
        ]

    def results_read(self, node: Node) -> frozenset[int]:
        """Return the indices of an operator's results that other operators read or the
        network returns.
        """
        items = [user for user in node.users if user.target is operator.getitem]
        return frozenset(
            int(item.args[1])  # type: ignore[arg-type]
            for item in items
            if item in self.returned or any(user.op != "output" for user in item.users)
        )

    def constant(self, target: str | None) -> Any:
        """Return the value of a buffer or a constant of the graph, by its name in the
        network.
        """
        tables = self.program.state_dict, self.program.constants
        candidates = (
            table.get(name)
            for name in (f"net.{target}", str(target))
            for table in tables
        )
        return next((value for value in candidates if value is not None), None)

    def used_sites(self) -> set[str]:
        """Return the parameters and buffers that the graph reads."""
        used = [
            node.name
            for node in self._graph.nodes
            if node.op == "placeholder" and node.users
        ]
        targets = [self.inputs[name].target for name in used if name in self.inputs]
        return {self.sites.get(target, target) for target in targets if target}

    def calls_again(self) -> bool:
        """Return whether a module with parameters is called more than once."""
        stacks = (node.meta.get("nn_module_stack") or {} for node in self._graph.nodes)
        again = {
            path.removeprefix("net.")
            for stack in stacks
            for key, (path, _) in stack.items()
            if "@" in key
        }
        return any(
            site.startswith(f"{path}.")
            for path in again
            for site in self.sites.values()
        )


def site_names(net: nn.Module) -> dict[str, str]:
    """Map every name of a parameter or buffer to its first name: tied weights are one
    site.
    """
    first: dict[int, str] = {}
    tensors = [
        *net.named_parameters(remove_duplicate=False),
        *net.named_buffers(remove_duplicate=False),
    ]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


# from a module to its graph -----------------------------------------------------------


class TensorsOnly(nn.Module):
    """A network as a function from a list of tensors to a list of tensors.

    :param net: the network.
    :param args: example arguments of its forward pass, which can be copied; so are
        ``kwargs``.
    :ivar tensors: the distinct tensors among these, in whose place :meth:`forward`
        takes others.
    """

    def __init__(
        self,
        net: nn.Module,
        args: Sequence[Any],
        kwargs: Keywords | None = None,
    ):
        super().__init__()
        self.net = net
        self.given = tuple(args), dict(kwargs or {})
        tensors = dict[int, Tensor]()

        def collect(tensor: Tensor, memo: Any) -> Tensor:
            return tensors.setdefault(id(tensor), tensor)

        with Replaced({Tensor.__deepcopy__: collect}):
            copy.deepcopy(self.given)
        self.tensors = [*tensors.values()]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """Return the network's outputs for its example arguments, with these tensors in
        place of the example's.
        """
        args, kwargs = copy.deepcopy(
            self.given, dict(zip(map(id, self.tensors), tensors, strict=True))
        )
        return list(_outputs_in(self.net(*args, **kwargs)))


def _outputs_in(value: Any, name: str = "") -> Iterator[Tensor]:
    """Iterate over the tensors of a network's output, without caches, numbers and
    texts.

    :param name: the attribute or key that holds the value.
    """
    if (
        name in CACHES
        or type(value).__name__.endswith("Cache")
        or isinstance(value, type | str | nn.Module)
    ):
        return
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from _outputs_in(entry)
    # a dataclass, a distribution, any object with attributes
    elif isinstance(value, Mapping) or not callable(value):
        for key, entry in (
            value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        ).items():
            yield from _outputs_in(entry, str(key))


def _exported(net: TensorsOnly) -> ExportedProgram:
    """Export the functional graph of one forward pass; decompose operators without a
    rule.

    :raises UntraceableError: if there is no such graph.
    """
    # distributions check their arguments
    with (
        running_pyro(),
        _quiet(),
        with_both_branches(),
        _without_stack_traces(),
        torch.enable_grad(),
    ):
        try:
            program = torch.export.export(net, tuple(net.tensors), strict=False)
            if _functionalise(program.graph):
                return program
            table = torch.export.default_decompositions()
            return program.run_decompositions(
                {op: steps for op, steps in table.items() if rule_for(op) is None}
            )
        except Exception as error:  # torch.export raises whatever the forward pass met
            reason = (
                f"{type(error).__name__}: "
                f"{str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            )
            raise UntraceableError(
                UNTRACEABLE.format(net=type(net.net).__name__, error=reason)
            ) from error


def _functionalise(graph: Graph) -> bool:
    """Replace in-place operators by pure ones, and return whether all operators have
    rules then.

    PyTorch's ``run_decompositions`` does this, too, in twice the time of all else. It
    is needed if a view of what is written may be read.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            packet = node.target.overloadpacket.__name__
            written = node.args[0]
            library = torch.ops.aten if node.target.namespace == "aten" else None
            pure = getattr(
                getattr(library, packet.removesuffix("_"), None),
                node.target._overloadname,
                None,
            )
            if (
                pure is None
                or pure is node.target
                or any(map(_is_view, (written, *written.users)))
            ):
                return False
            if [argument.type for argument in pure._schema.arguments] != [
                argument.type for argument in node.target._schema.arguments
            ]:
                # another operator of that name: pow.Scalar is a number's power
                return False
            node.target = pure
            written.replace_all_uses_with(
                node, delete_user_cb=lambda user, at=node: user > at
            )
        if not isinstance(node.target, OpOverload) or (
            node.target._schema.returns and rule_for(node.target) is None
        ):
            return False
    return True


def _is_view(node: Node) -> bool:
    """Return whether the result of an operator may share memory with an operand."""
    if not isinstance(node.target, OpOverload):
        return node.op == "call_function"
    if torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
        return operator_name(node.target) != "batch_norm"
    schema = node.target._schema
    return not schema.is_mutable and any(out.alias_info for out in schema.returns)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and logs of torch.export, and fused fast paths, which hide
    attention.

    If a pass branches on data, or shapes don't match, torch.export logs the graph or a
    traceback before it raises.
    """
    loggers = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    with without_fast_attention(), without_warnings(), without_messages(*loggers):
        yield


def _without_stack_traces() -> contextlib.AbstractContextManager[None]:
    """Leave out the stack traces of a graph's nodes, up to a fifth of the time of an
    export. Versions of PyTorch without this option always write them.
    """
    option = "do_not_emit_stack_traces"
    config = getattr(torch.fx, "config", None)
    if not hasattr(config, option):
        return contextlib.nullcontext()
    return replaced(config, option, True)


# runs ---------------------------------------------------------------------------------


def try_out(
    net: nn.Module, args: Sequence[Any], kwargs: Keywords | None = None
) -> None:
    """Run the network once, to tell inputs that don't fit from a network that can't be
    traced.

    :raises ValueError: if it doesn't run.
    """
    require_call(net, args, kwargs or {}, "the network")
    try:
        with _quiet(), torch.no_grad():
            net(*args, **(kwargs or {}))
    except Exception as error:
        failure = f"{type(net).__name__} fails on the example inputs"
        fits = kwargs or not isinstance(error, RuntimeError)
        layer = "" if fits else failing_layer(net, *args)
        message = f"in {layer}" if layer else f"{type(error).__name__}: {error}"
        raise ValueError(f"{failure}: {message}") from None


aten = torch.ops.aten
Mean = Callable[[Mapping[str, Any]], float]
# The means that replace masks and noise, as functions of an operator's arguments.
MASKS: dict[Any, Mean] = dict.fromkeys(
    (aten.bernoulli.p, aten.bernoulli_.float), lambda given: given["p"]
)
MEANS: dict[Any, Mean] = {
    **dict.fromkeys((aten.randn, aten.randn_like), lambda given: 0.0),
    **dict.fromkeys((aten.rand, aten.rand_like), lambda given: 0.5),
    aten.normal_: lambda given: given["mean"],
    aten.uniform_: lambda given: (given["from"] + given["to"]) / 2,
    aten.exponential_: lambda given: 1 / given["lambd"],
}


class Deterministic(TorchDispatchMode):
    """A mode in which masks of dropout are their means, and all real and complex
    numbers have one precision.

    Dropout and stochastic depth do nothing, whoever calls them, and no cast hides
    rounding errors.

    :param dtype: the precision.
    :param noise: whether to draw random numbers; otherwise normal, uniform and
        exponential ones are their means.
    """

    def __init__(self, dtype: torch.dtype, noise: bool = True):
        super().__init__()
        self.dtype = dtype
        self.noise = noise

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        schema = getattr(func, "_schema", None)
        mean = MASKS.get(func) or (None if self.noise else MEANS.get(packet))
        if mean is not None:
            return func(*args, **kwargs).fill_(mean(bound(func, args, kwargs)))
        if packet is aten.native_dropout:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if packet is aten.rrelu_with_noise and len(args) > 4:  # without train mode
            args = (*args[:4], False, *args[5:])
        writes = schema is not None and schema.is_mutable and bool(args)
        # else it would write into a copy
        if not writes or self._in_precision(args[0]) is args[0]:
            args = [self._in_precision(value) for value in args]
            kwargs = {name: self._in_precision(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        is_new = isinstance(result, Tensor) and not any(
            isinstance(x, Tensor) for x in (*args, *kwargs.values())
        )
        return self._in_precision(result) if is_new else result

    def _in_precision(self, value: Any) -> Any:
        """Cast a tensor, or those in a container; replace a dtype."""
        if isinstance(value, list | tuple | dict):
            return tree_map(self._leaf_in_precision, value)
        return self._leaf_in_precision(value)

    def _leaf_in_precision(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(in_precision(value.dtype, self.dtype))
        if isinstance(value, torch.dtype):
            return in_precision(value, self.dtype)
        return value
