"""Engine ``"compiled"``: a kernel's arithmetic, with the model's energy and gradient in it, as programs of PyTorch's
compiler.

A kernel writes a part of its step as a function of tensors and :func:`run` calls it. With this engine the function is
traced once for each number of chains, through Pyro, ``torch.func.vmap`` and autograd, and what remains is compiled:
plain operations in a few loops. PyTorch keeps what it compiled on disk, so that the next process takes a few seconds.
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
from pyro_symmetric.mcmc.density.eager import Eager, Evaluation, Rows, Unavailable, same_evaluation

LEAST_EVALUATIONS = 3500  # for which compiling, about 9 seconds, pays: one of the model itself takes 2.5 ms or more
# One thread starts no workers. PyTorch compiles and loads trial programs to see which vector instructions there are,
# which takes as long as all else; where its own kernels use the widest, that is known.
OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "compile_threads": 1,
    "cpp.vec_isa_ok": True if torch.backends.cpu.get_cpu_capability() == "AVX512" else None,
}


def run(density: Any, function: Callable[..., Any], *inputs: Any) -> Any:
    """``function(evaluate, *inputs)``, as one program if the density's engine compiles.

    :param density: a :class:`~pyro_symmetric.mcmc.density.density.Density`, or any object with its
        ``energy_and_gradient(z)``.
    :param function: of the module, not of a call, since it names the program. It computes with tensors, draws no random
        numbers and doesn't branch on values. ``evaluate`` takes points ``(C, D)``.
    :param inputs: tensors, and tuples and dataclasses of tensors. The first tensor are points ``(C, D)``.
    :return: a tensor, or tuples and dataclasses of tensors.
    """
    points = inputs[0]
    while not isinstance(points, Tensor):
        points = points[0]
    if compiles(density) and len(points) <= density.fast.most_chains:
        try:
            return density.fast.run(function, *inputs)
        except Unavailable as error:
            density.give_up(error)
        except RuntimeError:  # a singular matrix, which counts for its own chain only
            return function(density.without_compiling, *inputs)
    return function(density.energy_and_gradient, *inputs)


def compiles(density: Any) -> bool:
    """True if :func:`run` makes programs for this density."""
    return isinstance(getattr(density, "fast", None), Compiled)


def evaluated_once(density: Any, z: Tensor, *rows: Rows | None) -> Evaluation:
    """Energy and gradient where no program is worth its making, as at the points where chains start."""
    evaluate = density.without_compiling if compiles(density) else density.energy_and_gradient
    energy, gradient = evaluate(z, *rows)
    return energy, gradient


def has_compiler(device: torch.device) -> bool:
    """True if PyTorch's compiler finds what it needs: on a CPU a compiler of C++."""
    names = (os.environ.get("CXX", "g++"), "g++", "clang++", "cl")
    return device.type != "cpu" or any(shutil.which(name) for name in names)


class Compiled:
    """The programs of one density.

    :param most_chains: above which nothing is compiled, as intermediate results would leave the cache.
    """

    name = "compiled"

    def __init__(self, eager: Eager, most_chains: int):
        self.eager, self.most_chains = eager, most_chains
        self._programs: dict[tuple[Any, ...], tuple[Callable[..., Any], Any]] = {}
        self._lock = OwnLock()

    def energy_and_gradient(self, z: Tensor, rows: Rows | None = None) -> Evaluation:
        """Return energies ``(C,)`` and gradients ``(C, D)``."""
        energy, gradient = self.run(_evaluated, z.detach(), *(rows or {}).values(), names=tuple(rows or ()))
        return energy, gradient

    def run(self, function: Callable[..., Any], *inputs: Any, names: tuple[str, ...] = ()) -> Any:
        """:raises Unavailable: if a program can't be made, or computes something else."""
        flat: list[Tensor] = []
        kinds = flatten(inputs, flat)
        flat = [value.contiguous() for value in flat]  # one program, wherever its inputs come from
        key = (function, names, kinds, *[(value.shape, value.dtype) for value in flat])
        with self._lock:
            made = self._programs.get(key)
            program, kinds_out = made or self._made(function, names, kinds, [value.detach() for value in flat])
        with torch.no_grad():
            results = program(*flat)
            if flat[0].is_cuda:  # the next call of a CUDA graph writes to the same places
                results = [value.clone() for value in results]
            found = unflatten(kinds_out, iter(results))
        if made is None:
            evaluate = self._evaluation(names)
            pairs = [((at.energy, at.gradient), evaluate(at.z)) for at in _points(found)]
            if function is _evaluated:
                pairs = [(found, evaluate(*flat))]
            if not all(same_evaluation(one, other) for one, other in pairs):
                raise Unavailable("PyTorch's compiler made a program that computes something else")
            self._programs[key] = program, kinds_out
        return found

    def _evaluation(self, names: tuple[str, ...]) -> Callable[..., Evaluation]:
        """The model's own evaluation, of points and mini-batches with these names."""
        return lambda z, *batches: self.eager.raw(z, dict(zip(names, batches, strict=True)) or None)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_programs": {}}

    def _made(
        self, function: Callable[..., Any], names: tuple[str, ...], kinds: Any, inputs: list[Tensor]
    ) -> tuple[Callable[..., Any], Any]:
        """A program of tensors, and what to build of the tensors that it returns."""
        from torch.fx.experimental.proxy_tensor import make_fx  # which takes long to load

        kinds_out: list[Any] = []

        def flattened(*values: Tensor) -> list[Tensor]:
            results: list[Tensor] = []
            found = function(self._evaluation(names), *unflatten(kinds, iter(values)))
            kinds_out[:] = [flatten(found, results)]
            return [value.clone() if any(value is one for one in values) else value for value in results]

        try:
            # PyTorch logs it where it can't keep a program on disk.
            with LOCK, without_warnings(), without_messages("torch._inductor.standalone_compile"), torch.no_grad():
                graph = make_fx(flattened)(*inputs)
                if inputs[0].is_cuda or not hasattr(torch._inductor, "standalone_compile"):  # of PyTorch 2.8 on
                    # One launch for all kernels of a GPU, as by mode="reduce-overhead"; only in the main thread.
                    graphs = inputs[0].is_cuda and threading.current_thread() is threading.main_thread()
                    options = OPTIONS | {"triton.cudagraphs": graphs}
                    program = torch.compile(graph, fullgraph=True, dynamic=False, options=options)
                else:  # by itself: each call by torch.compile, which asks if all is as it was, takes four times as long
                    program = torch._inductor.standalone_compile(
                        graph, [*inputs], dynamic_shapes="from_example_inputs", options={"config_patches": OPTIONS}
                    )
                program(*inputs)  # what it takes is made now
        except torch.linalg.LinAlgError:
            raise
        except Exception as error:  # tracing and compiling run other people's code, which may raise anything
            raise Unavailable(f"compiling failed: {type(error).__name__}: {str(error).strip()[:300]}") from error
        return program, kinds_out[0]


# small steps --------------------------------------------------------------------------------------------------------


def _evaluated(evaluate: Callable[..., Evaluation], *inputs: Tensor) -> Evaluation:
    return evaluate(*inputs)


def flatten(value: Any, flat: list[Tensor]) -> Any:
    """Collect the tensors of nested tuples and dataclasses; what they are, to build them again."""
    if isinstance(value, Tensor):
        flat.append(value)
        return None
    parts = value if isinstance(value, tuple) else vars(value).values()
    return type(value), tuple([flatten(part, flat) for part in parts])


def unflatten(kinds: Any, flat: Iterator[Tensor]) -> Any:
    """The value that :func:`flatten` was given, made of other tensors."""
    if kinds is None:
        return next(flat)
    kind, parts = kinds
    values = [unflatten(part, flat) for part in parts]
    return tuple(values) if kind is tuple else kind(*values)


def _points(found: Any) -> list[Any]:
    """The points in phase space among nested results: what has energies and gradients with its positions."""
    if isinstance(found, Tensor):
        return []
    if all(hasattr(found, name) for name in ("z", "energy", "gradient")):
        return [found]
    return [at for part in (found if isinstance(found, tuple) else vars(found).values()) for at in _points(part)]
