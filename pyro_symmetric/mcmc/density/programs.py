"""A kernel's arithmetic as compiled programs: the model's density and what a kernel does with it, in one piece.

A kernel writes a part of its step as a function of tensors, :func:`run` calls it, and an engine that compiles makes one
program of it: traced once, with the density in its place, then run without Pyro, without ``torch.func.vmap``, without
autograd and with hardly any Python. A program serves one number of chains. Compiled files are kept by PyTorch in its
own cache, so that the next process takes a fraction of the time.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric._process import PYRO, without_warnings
from pyro_symmetric.mcmc.density.engine import Evaluation, Unavailable, same_evaluation
from pyro_symmetric.mcmc.density.targets import Rows

LOG = logging.getLogger("pyro_symmetric")
SAVED = 5e-6  # seconds of a machine's core, about, for each operation that PyTorch isn't asked for by itself
COMPILED, COMPILED_OPERATION = 5.0, 0.03  # seconds of it that compiling takes, and for each operation of the model
# Of inductor. Inputs are those that a program was made for, so it needn't compare sizes; one thread starts no workers.
OPTIONS: dict[str, Any] = {"size_asserts": False, "compile_threads": 1}

Evaluate = Callable[..., Evaluation]
Compute = Callable[..., Any]


def run(density: Any, function: Compute, *inputs: Any, **static: Any) -> Any:
    """``function(evaluate, *inputs, **static)``, as one program if the density's engine compiles.

    :param density: a :class:`~pyro_symmetric.mcmc.density.density.Density`, or any object with its
        ``energy_and_gradient(z)``.
    :param function: of the module, not of a call, since it names the program. It computes with tensors, draws no random
        numbers and doesn't branch on values. ``evaluate`` takes points ``(C, D)``.
    :param inputs: tensors, and tuples and dataclasses of tensors.
    :param static: plain values; each combination has a program of its own.
    :return: a tensor, or tuples and dataclasses of tensors.
    """
    programs: Programs | None = getattr(density, "programs", None)
    if programs is not None and programs.serves(_first(inputs)):
        try:
            return programs.run(function, inputs, static)
        except torch.linalg.LinAlgError:
            pass  # below, where singular matrices count for their own chains only
        except Unavailable as error:
            density.give_up_compiling(error)
    return function(density.energy_and_gradient, *inputs, **static)


def pays(operations: int, evaluations: int) -> bool:
    """Whether programs save more time than compiling them takes, if not in the cache: by a rule, not by timing, so that
    every run of the same length decides alike.

    :param operations: of PyTorch, that one evaluation of energy and gradient consists of.
    :param evaluations: how many of all chains at once are expected.
    """
    return evaluations * operations * SAVED > COMPILED + operations * COMPILED_OPERATION


def compiles(density: Any) -> bool:
    """Whether :func:`run` makes programs for this density."""
    return getattr(density, "programs", None) is not None


class Programs:
    """The programs of one density, an :class:`~pyro_symmetric.mcmc.density.engine.Engine`.

    :param evaluate: chains ``(C, D)`` and mini-batches -> energy ``(C,)`` and gradient ``(C, D)``, by operations that
        can be traced.
    :param most_chains: above which nothing is compiled, as intermediate results would leave the cache.
    """

    name, by_chain = "inductor", False

    def __init__(self, evaluate: Evaluate, most_chains: int):
        self._evaluate, self.most_chains = evaluate, most_chains
        self._announced = False
        self._programs: dict[tuple[Any, ...], tuple[Callable[..., Any], Any]] = {}
        self._lock = threading.RLock()

    def serves(self, z: Tensor, rows: Rows | None = None) -> bool:
        return len(z) <= self.most_chains

    def energy_and_gradient(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """:raises Unavailable: if a program can't be made, or computes something else."""
        count = len(z)
        size = 1 << (count - 1).bit_length()  # so that there are few programs, whatever the numbers of chains
        inputs = [_padded(value, size) for value in (z.detach(), *(rows or {}).values())]
        energy, gradient = self.run(_evaluated, tuple(inputs), {"names": tuple(rows or ())})
        return energy[:count], gradient[:count]

    def run(self, function: Compute, inputs: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """:raises Unavailable: if a program can't be made."""
        flat: list[Tensor] = []
        kinds = _flatten(inputs, flat)
        key = (function, *static.items(), kinds, *[(value.shape, value.stride(), value.dtype) for value in flat])
        found = self._programs.get(key)
        if found is None:
            with self._lock:
                found = self._programs.get(key) or self._made(function, kinds, flat, static)
                self._programs[key] = found
        program, kinds_out = found
        with torch.no_grad():
            return _unflatten(kinds_out, iter(program(*flat)))

    def __getstate__(self) -> dict[str, Any]:
        return {"_evaluate": self._evaluate, "most_chains": self.most_chains}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_evaluate"], state["most_chains"])  # type: ignore[misc]

    def _made(
        self, function: Compute, kinds: Any, flat: list[Tensor], static: dict[str, Any]
    ) -> tuple[Callable[..., Any], Any]:
        kinds_out: list[Any] = []

        def flattened(*values: Tensor) -> list[Tensor]:
            results: list[Tensor] = []
            found = function(self._evaluate, *_unflatten(kinds, iter(values)), **static)
            kinds_out[:] = [_flatten(found, results)]
            return [value.clone() if any(value is given for given in values) else value for value in results]

        if not self._announced:
            self._announced = True
            print(
                "pyro_symmetric: PyTorch's compiler makes programs of the model, some seconds; they are kept",
                file=sys.stderr,
            )
        began, inputs = time.perf_counter(), [value.detach() for value in flat]
        try:
            with PYRO, without_warnings(), torch.no_grad():  # the compiler's warnings about itself are no one's here
                program = _compiled(flattened, inputs)
                found = program(*inputs)
        except torch.linalg.LinAlgError:
            raise
        except Exception as error:  # tracing and compiling run other people's code, which may raise anything
            raise Unavailable(f"torch.compile failed: {type(error).__name__}: {str(error).strip()[:300]}") from error
        if function is _evaluated and not same_evaluation(
            (found[0], found[1]), function(self._evaluate, *inputs, **static)
        ):
            raise Unavailable("torch.compile made a program that computes something else")
        LOG.info("compiled %s in %.1f s", function.__name__.strip("_"), time.perf_counter() - began)
        return program, kinds_out[0]


def _compiled(function: Callable[..., list[Tensor]], inputs: list[Tensor]) -> Callable[..., Any]:
    from torch._guards import TracingContext, tracing  # which take long to load
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graph = make_fx(function)(*inputs)
    # Without an environment of shapes, inductor doesn't use its cache on disk.
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True))):
        return torch._inductor.compile(graph, [*inputs], options=OPTIONS)


# small steps --------------------------------------------------------------------------------------------------------


def _evaluated(evaluate: Evaluate, z: Tensor, *batches: Tensor, names: tuple[str, ...]) -> Evaluation:
    return evaluate(z, dict(zip(names, batches, strict=True)) or None)


def _padded(value: Tensor, size: int) -> Tensor:
    """Repeat the last chain up to ``size`` chains."""
    if len(value) == size:
        return value.contiguous()
    return torch.cat([value, value[-1:].expand(size - len(value), *value.shape[1:])])


def _first(inputs: Any) -> Tensor:
    """The first tensor, which has a row for each chain."""
    while not isinstance(inputs, Tensor):
        inputs = inputs[0]
    return inputs


def _flatten(value: Any, flat: list[Tensor]) -> Any:
    """Collect the tensors of nested tuples and dataclasses; what they are, to build them again."""
    if isinstance(value, Tensor):
        flat.append(value)
        return None
    parts: Iterable[Any] = vars(value).values() if is_dataclass(value) else value
    return type(value), tuple([_flatten(part, flat) for part in parts])


def _unflatten(kinds: Any, flat: Any) -> Any:
    if kinds is None:
        return next(flat)
    kind, parts = kinds
    values = [_unflatten(part, flat) for part in parts]
    return tuple(values) if kind is tuple else kind(*values)
