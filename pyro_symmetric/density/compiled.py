"""Engine ``"compiled"``: parts of a kernel's step, with the model's energy and gradient
in them, as compiled programs.

A kernel writes a part of its step as a function of tensors, and
:func:`~pyro_symmetric.density.density.fused` calls it.
With this engine the function is traced through Pyro, ``torch.func.vmap`` and autograd,
once for each number of chains, and the resulting graph is compiled by PyTorch into a
few loops. From 16 chains on the model is traced once, with the chains last
(:mod:`~pyro_symmetric.density.lanes`), and its programs serve later calls with an equal
model and equal data. PyTorch caches compiled programs on disk, so that the next process
loads them in a few seconds.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_symmetric._process import (
    OwnLock,
    running_pyro,
    without_messages,
    without_warnings,
)
from pyro_symmetric.arguments import Args, Entries, Function, Names
from pyro_symmetric.density.eager import (
    Eager,
    Evaluate,
    Evaluation,
    Rows,
    Unavailable,
    catches_errors,
    despite_singular,
)
from pyro_symmetric.density.graphs import graph_of
from pyro_symmetric.density.lanes import ChainsLast
from pyro_symmetric.density.special_functions import ARITHMETIC
from pyro_symmetric.density.traced import TracedTarget

# for which compiling, about 9 s, pays: an eager evaluation takes 2.5 ms or more
MIN_EVALUATIONS = 3500
# the last models that were traced with the chains last
RECENT_LANES = deque[ChainsLast](maxlen=4)
MIN_LANES = 16  # chains from which innermost loops over chains are faster
# With one thread PyTorch starts no worker processes. It detects vector instructions by
# compiling and loading test programs, which takes as long as all else; those of x86 are
# known from its own kernels.
KNOWN_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
OPTIONS: Entries = {
    "size_asserts": False,
    "compile_threads": 1,
    "cpp.vec_isa_ok": True if KNOWN_VECTORS else None,
}


def has_compiler(device: torch.device) -> bool:
    """Return whether PyTorch can compile for a device; on a CPU it needs a C++
    compiler.
    """
    names = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")
    return device.type != "cpu" or any(shutil.which(name) for name in names)


class Program(NamedTuple):
    """A compiled function of tensors."""

    function: Function
    results: Any  # their structure


class Compiled:
    """The compiled programs of one density.

    Those of :data:`MIN_LANES` chains and more hold the chains along the last axis, in
    memory as well, if the model can be traced so.

    :param most_chains: largest number of chains to compile for; intermediate results of
        more leave the cache.
    :param z: positions at which the model can be evaluated, ``(C, D)``.
    """

    name = "compiled"

    def __init__(self, eager: Eager, most_chains: int, z: Tensor):
        self.eager = eager
        self.most_chains = most_chains
        self._programs: dict[Args, Program] = {}
        self._lanes: ChainsLast | None = None
        self._has_lanes = (
            isinstance(eager.target, TracedTarget) and not eager.target.row_counts
        )
        # such a model is evaluated anew where a program meets a singular matrix
        self._catches_errors = self._has_lanes and catches_errors(lambda: eager.raw(z))
        self._has_lanes = self._has_lanes and not self._catches_errors
        self._lock = OwnLock()

    def energy_and_gradient(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``."""
        energy, gradient = self.run(
            _evaluate, z.detach(), *(rows or {}).values(), names=tuple(rows or ())
        )
        return energy, gradient

    def run(
        self, function: Function, *inputs: Any, names: Names = (), count: int = 1
    ) -> Any:
        """Run the program of a function, compiled for the shapes of its inputs; see
        :func:`~pyro_symmetric.density.density.fused`.

        :param names: of mini-batches, whose rows are the last inputs.
        :param count: how often it is run, from the second time on with the result as
            the first input.
        :raises Unavailable: if compiling fails, or the program's results differ from
            the model's.
        """
        flat: list[Tensor] = []
        structure = flatten(inputs, flat)
        if self._has_lanes and len(flat[0]) >= MIN_LANES and not flat[0].is_cuda:
            try:
                lanes = self._lanes_at(flat[0][0])
                return self._run(lanes, function, (), structure, flat, count)
            except Unavailable:
                self._has_lanes = False
                self._lanes = None
        evaluate = self._evaluation(names)
        return self._run(evaluate, function, names, structure, flat, count)

    def _lanes_at(self, z: Tensor) -> ChainsLast:
        """Return the evaluation with the chains last, traced at a position ``(D,)``."""
        lanes = self._lanes
        if lanes is None:
            with self._lock:
                lanes = self._lanes = self._lanes or self._traced_lanes(z)
        return lanes

    def _traced_lanes(self, z: Tensor) -> ChainsLast:
        try:
            with without_warnings():
                lanes = ChainsLast(self.eager, z.detach().clone())
        # the model's code, operators and their rules may raise anything
        except Exception as error:
            raise Unavailable(str(error)) from error
        for recent in tuple(RECENT_LANES):
            if recent.is_same(lanes):
                return recent
        if lanes.is_comparable:
            RECENT_LANES.append(lanes)
        return lanes

    def _run(
        self,
        evaluate: Evaluate,
        function: Function,
        names: Names,
        structure: Any,
        flat: list[Tensor],
        count: int,
    ) -> Any:
        """Run a program: this density's, one of an equal density, or a new one."""
        shared = getattr(evaluate, "programs", None)  # of chains last
        # programs rely on the strides of their inputs
        arranged = Tensor.contiguous if shared is None else _chains_last
        inputs = [arranged(value) for value in flat]
        shapes = [(value.shape, value.dtype) for value in inputs]
        key = (arranged, function, names, structure, *shapes)
        with self._lock:
            cached = self._programs.get(key)
            program = cached or (shared or {}).get(key)
            if program is None:
                examples = [value.detach() for value in inputs]
                program = self._compile(evaluate, function, structure, examples)
                if shared is not None:
                    shared[key] = program
        with torch.no_grad():
            results = program.function(*inputs)
            for _ in range(count - 1):
                following = [arranged(_copied_on_gpu(value)) for value in results]
                results = program.function(*following, *inputs[len(results) :])
            result = unflatten(program.results, map(_copied_on_gpu, results))
        if cached is None:
            if function is _evaluate:
                self._require_same(result, names, *flat)
            for point in _points(result):
                self._require_same((point.energy, point.gradient), names, point.z)
            self._programs[key] = program
        return result

    def _require_same(
        self, evaluation: Evaluation, names: Names, z: Tensor, *rows: Tensor
    ) -> None:
        """Compare a program's evaluation with the model's.

        :raises Unavailable: if they differ.
        """
        expected = self._evaluation(names)(z, *rows)
        batches = dict(zip(names, rows, strict=True))
        if not self.eager.are_alike(evaluation, expected, z, batches):
            raise Unavailable(
                "PyTorch's compiler made a program that computes something else"
            )

    def _evaluation(self, names: Names) -> Evaluate:
        """Return the eager evaluation as a function of positions and of mini-batches
        with these names.
        """

        def evaluate(z: Tensor, *batches: Tensor) -> Evaluation:
            rows = dict(zip(names, batches, strict=True)) or None
            if self._catches_errors:
                return self.eager.raw(z, rows)
            return despite_singular(lambda: self.eager.raw(z, rows))

        return evaluate

    def __getstate__(self) -> Entries:
        return {**vars(self), "_programs": {}, "_lanes": None}

    def _compile(
        self,
        evaluate: Evaluate,
        function: Function,
        structure: Any,
        inputs: list[Tensor],
    ) -> Program:
        out: list[Any] = []

        def of_tensors(*values: Tensor) -> list[Tensor]:
            results: list[Tensor] = []
            result = function(evaluate, *unflatten(structure, iter(values)))
            out[:] = [flatten(result, results)]
            return [
                value.clone()
                if any(value is value_in for value_in in values)
                else value
                for value in results
            ]

        try:
            # PyTorch logs programs that it can't cache on disk.
            with (
                running_pyro(inputs[0].dtype),
                without_warnings(),
                without_messages("torch._inductor.standalone_compile"),
                torch.no_grad(),
            ):
                graph = graph_of(of_tensors, ARITHMETIC, *inputs)
                # new in PyTorch 2.8
                if inputs[0].is_cuda or not hasattr(
                    torch._inductor, "standalone_compile"
                ):
                    # On a GPU all kernels are launched at once, as by
                    # mode="reduce-overhead"; main thread only.
                    graphs = (
                        inputs[0].is_cuda
                        and threading.current_thread() is threading.main_thread()
                    )
                    options = OPTIONS | {"triton.cudagraphs": graphs}
                    program = torch.compile(
                        graph, fullgraph=True, dynamic=False, options=options
                    )
                # without the guards of torch.compile, which make a call four times as
                # slow
                else:
                    program = torch._inductor.standalone_compile(
                        graph,
                        [*inputs],
                        dynamic_shapes="from_example_inputs",
                        options={"config_patches": OPTIONS},
                    )
                program(*inputs)  # compiles lazily
        except torch.linalg.LinAlgError:
            raise
        # the model's code and the compiler may raise anything
        except Exception as error:
            raise Unavailable(
                f"compiling failed: {type(error).__name__}: {str(error).strip()[:300]}"
            ) from error
        return Program(program, out[0])


def _chains_last(value: Tensor) -> Tensor:
    """Return a value of each chain with the chains last in memory."""
    if value.dim() != 2:
        return value.contiguous()
    if value.stride() == (1, len(value)):  # spares calls, of which each counts
        return value
    return value.t().contiguous().t()


def _copied_on_gpu(value: Tensor) -> Tensor:
    """Return a result of a program; on a GPU a copy, as a CUDA graph reuses the memory
    of its results.
    """
    return value.clone() if value.is_cuda else value


def _evaluate(evaluate: Evaluate, *inputs: Tensor) -> Evaluation:
    return evaluate(*inputs)


# nested tuples and dataclasses of tensors ---------------------------------------------


def flatten(value: Any, flat: list[Tensor]) -> Any:
    """Append the tensors of a nested value to ``flat``; return its structure."""
    if isinstance(value, Tensor):
        flat.append(value)
        return None
    parts = value if isinstance(value, tuple) else vars(value).values()
    return type(value), tuple([flatten(part, flat) for part in parts])


def unflatten(structure: Any, flat: Iterator[Tensor]) -> Any:
    """Build a value with this structure from tensors."""
    if structure is None:
        return next(flat)
    kind, parts = structure
    values = [unflatten(part, flat) for part in parts]
    return tuple(values) if kind is tuple else kind(*values)


def _points(value: Any) -> list[Any]:
    """Return the phase-space points in a nested value, which have positions, energies
    and gradients.
    """
    if isinstance(value, Tensor):
        return []
    if all(hasattr(value, name) for name in ("z", "energy", "gradient")):
        return [value]
    parts = value if isinstance(value, tuple) else vars(value).values()
    return [point for part in parts for point in _points(part)]
