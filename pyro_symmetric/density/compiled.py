"""Engine ``"compiled"``: parts of a kernel's step, with the model's energy and gradient
in them, as compiled programs.

A kernel writes a part of its step as a function of tensors, and
:func:`~pyro_symmetric.density.density.fused` calls it.
With this engine the function is traced through Pyro, ``torch.func.vmap`` and autograd,
once for each number of chains, and the resulting graph is compiled by PyTorch into a
few loops. PyTorch caches compiled programs on disk, so that the next process loads them
in a few seconds.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric._process import LOCK, OwnLock, without_messages, without_warnings
from pyro_symmetric.density.eager import (
    Eager,
    Evaluation,
    Rows,
    Unavailable,
    same_evaluation,
)

# for which compiling, about 9 s, pays: an eager evaluation takes 2.5 ms or more
MIN_EVALUATIONS = 3500
# With one thread PyTorch starts no worker processes. It detects vector instructions by
# compiling and loading test programs, which takes as long as all else; AVX512 is known
# from its own kernels.
OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "compile_threads": 1,
    "cpp.vec_isa_ok": True
    if torch.backends.cpu.get_cpu_capability() == "AVX512"
    else None,
}


def has_compiler(device: torch.device) -> bool:
    """Return whether PyTorch can compile for a device; on a CPU it needs a C++
    compiler.
    """
    names = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")
    return device.type != "cpu" or any(shutil.which(name) for name in names)


class Compiled:
    """The compiled programs of one density.

    :param most_chains: largest number of chains to compile for; intermediate results of
        more leave the cache.
    """

    name = "compiled"

    def __init__(self, eager: Eager, most_chains: int):
        self.eager, self.most_chains = eager, most_chains
        self._programs: dict[tuple[Any, ...], tuple[Callable[..., Any], Any]] = {}
        self._lock = OwnLock()

    def energy_and_gradient(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``."""
        energy, gradient = self.run(
            _evaluate, z.detach(), *(rows or {}).values(), names=tuple(rows or ())
        )
        return energy, gradient

    def run(
        self, function: Callable[..., Any], *inputs: Any, names: tuple[str, ...] = ()
    ) -> Any:
        """Run the program of a function, compiled for the shapes of its inputs; see
        :func:`~pyro_symmetric.density.density.fused`.

        :param names: of mini-batches, whose rows are the last inputs.
        :raises Unavailable: if compiling fails, or the program's results differ from
            the model's.
        """
        flat: list[Tensor] = []
        structure = flatten(inputs, flat)
        flat = [value.contiguous() for value in flat]  # so that strides don't matter
        key = (
            function,
            names,
            structure,
            *[(value.shape, value.dtype) for value in flat],
        )
        with self._lock:
            cached = self._programs.get(key)
            program, out = cached or self._compile(
                function, names, structure, [value.detach() for value in flat]
            )
        with torch.no_grad():
            results = program(*flat)
            if flat[0].is_cuda:  # a CUDA graph reuses the memory of its results
                results = [value.clone() for value in results]
            result = unflatten(out, iter(results))
        if cached is None:
            evaluate = self._evaluation(names)
            pairs = [
                ((point.energy, point.gradient), evaluate(point.z))
                for point in _points(result)
            ]
            if function is _evaluate:
                pairs = [(result, evaluate(*flat))]
            if not all(same_evaluation(actual, expected) for actual, expected in pairs):
                raise Unavailable(
                    "PyTorch's compiler made a program that computes something else"
                )
            self._programs[key] = program, out
        return result

    def _evaluation(self, names: tuple[str, ...]) -> Callable[..., Evaluation]:
        """Return the eager evaluation as a function of positions and of mini-batches
        with these names.
        """
        return lambda z, *batches: self.eager.raw(
            z, dict(zip(names, batches, strict=True)) or None
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}

    def _compile(
        self,
        function: Callable[..., Any],
        names: tuple[str, ...],
        structure: Any,
        inputs: list[Tensor],
    ) -> tuple[Callable[..., Any], Any]:
        """Return a program of tensors, and the structure of its results."""
        from torch.fx.experimental.proxy_tensor import make_fx  # slow to import

        out: list[Any] = []

        def of_tensors(*values: Tensor) -> list[Tensor]:
            results: list[Tensor] = []
            result = function(
                self._evaluation(names), *unflatten(structure, iter(values))
            )
            out[:] = [flatten(result, results)]
            return [
                value.clone() if any(value is one for one in values) else value
                for value in results
            ]

        try:
            # PyTorch logs programs that it can't cache on disk.
            with (
                LOCK,
                without_warnings(),
                without_messages("torch._inductor.standalone_compile"),
                torch.no_grad(),
            ):
                graph = make_fx(of_tensors)(*inputs)
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
        return program, out[0]


def _evaluate(evaluate: Callable[..., Evaluation], *inputs: Tensor) -> Evaluation:
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
