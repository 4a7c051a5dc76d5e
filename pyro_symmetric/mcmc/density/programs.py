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
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric._process import PYRO, without_warnings
from pyro_symmetric.mcmc.density.engine import Evaluation, Unavailable, same_evaluation
from pyro_symmetric.mcmc.density.flat import Evaluate, Flat, compiled, flatten, unflatten
from pyro_symmetric.mcmc.density.targets import Rows

LOG = logging.getLogger("pyro_symmetric")
SAVED = 1.2e-5  # seconds of a machine's core, about, for each operation that PyTorch isn't asked for by itself,
SAVED_BYTE = 2e-10  # and for each byte of a result that needn't be written for the next operation to read
COMPILED, COMPILED_OPERATION = 12.0, 0.03  # seconds of it that compiling takes, and for each operation of the model
RUNS = 2  # of a model, that share its programs: PyTorch keeps them
MOST_KEPT = 64  # programs of this process
SILENT, BETWEEN = 4.0, 20.0  # seconds after which a compilation is spoken of, and between reports of its progress

Compute = Callable[..., Any]
ANNOUNCED = ContextVar("announced", default=True)  # whether compilations that take long are reported
_KEPT: dict[tuple[Any, ...], tuple[Callable[..., Any], Any]] = {}  # by all that they were made of, for the next density
_KEEPING = threading.Lock()


def run(density: Any, function: Compute, *inputs: Any, **static: Any) -> Any:
    """``function(evaluate, *inputs, **static)``, as one program if the density's engine compiles.

    :param density: a :class:`~pyro_symmetric.mcmc.density.density.Density`, or any object with its
        ``energy_and_gradient(z)``.
    :param function: of the module, not of a call, since it names the program. It computes with tensors, draws no random
        numbers and doesn't branch on values. ``evaluate`` takes points ``(C, D)``.
    :param inputs: tensors, and tuples and dataclasses of tensors. The first tensor are points ``(C, D)``, of as many
        chains as are to be evaluated.
    :param static: plain values; each combination has a program of its own.
    :return: a tensor, or tuples and dataclasses of tensors.
    """
    programs: Programs | None = getattr(density, "programs", None)
    if programs is not None and programs.serves(_first(inputs)):
        try:
            return programs.run(function, inputs, static)
        except RuntimeError:
            pass  # below, where singular matrices count for their own chains only, and errors say what they are
        except Unavailable as error:
            density.give_up_compiling(error)
    return function(density.energy_and_gradient, *inputs, **static)


@dataclass(frozen=True)
class Price:
    """The price of an evaluation of energy and gradient without a program.

    :param operations: of PyTorch, that it consists of.
    :param written: bytes of their results, for all chains at once.
    """

    operations: int
    written: float

    def pays(self, evaluations: int) -> bool:
        """True if programs save more time in so many evaluations, of all chains at once, than compiling them takes: by
        a rule, not by timing, so that every run decides alike."""
        saved = self.operations * SAVED + self.written * SAVED_BYTE
        return evaluations * saved > COMPILED + self.operations * COMPILED_OPERATION


def compiles(density: Any) -> bool:
    """True if :func:`run` makes programs for this density."""
    return getattr(density, "programs", None) is not None


def evaluated_once(density: Any, z: Tensor, *rows: Rows | None) -> Evaluation:
    """Energy and gradient where no program is worth its making, as at the points where chains start."""
    evaluate = getattr(density, "without_compiling", None) if compiles(density) else None
    energy, gradient = (evaluate or density.energy_and_gradient)(z, *rows)
    return energy, gradient


class Programs:
    """The programs of one density, an :class:`~pyro_symmetric.mcmc.density.engine.Engine`.

    :param evaluate: chains ``(C, D)`` and mini-batches -> energy ``(C,)`` and gradient ``(C, D)``, by operations that
        can be traced.
    :param most_chains: above which nothing is compiled, as intermediate results would leave the cache.
    """

    name, by_chain = "inductor", False

    def __init__(self, evaluate: Evaluate, most_chains: int):
        self._evaluate, self.most_chains = evaluate, most_chains
        self._programs: dict[tuple[Any, ...], _Program] = {}
        self._flat: dict[tuple[Any, ...], Flat] = {}
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
        kinds = flatten(inputs, flat)
        flat = [value.contiguous() for value in flat]  # one program, wherever its inputs come from
        key = (function, *static.items(), kinds, *[(value.shape, value.dtype) for value in flat])
        program = self._programs.get(key)
        if program is None:
            with self._lock:
                program = self._programs.get(key) or self._made(function, kinds, flat, static)
                self._programs[key] = program
        with torch.no_grad():
            found = unflatten(program.kinds, iter(program.call(*flat, *program.constants)))
        if not program.checked:
            self._check(function, found, flat, static)
            program.checked = True
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"_evaluate": self._evaluate, "most_chains": self.most_chains}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_evaluate"], state["most_chains"])  # type: ignore[misc]

    def _made(self, function: Compute, kinds: Any, values: list[Tensor], static: dict[str, Any]) -> _Program:
        inputs = [value.detach() for value in values]
        try:
            with Notice(function.__name__.strip("_")), PYRO, without_warnings(), torch.no_grad():
                evaluate = self._traced(function, inputs, static)
                every = (*inputs, *evaluate.constants)  # whose layout the program takes as given
                shapes = [(value.shape, value.stride(), value.dtype, value.device) for value in every]
                key = (self.name, function, *static.items(), kinds, *shapes, evaluate.code, torch.get_num_threads())
                made = _KEPT.get(key) or self._program(function, evaluate, kinds, inputs, static)
                with _KEEPING:  # other densities' threads, too
                    while key not in _KEPT and len(_KEPT) >= MOST_KEPT:
                        _KEPT.pop(next(iter(_KEPT)))
                    _KEPT[key] = made
                call, kinds_out = made
        except torch.linalg.LinAlgError:
            raise
        except Exception as error:  # tracing and compiling run other people's code, which may raise anything
            raise Unavailable(
                f"compiling by {self.name} failed: {type(error).__name__}: {str(error).strip()[:300]}"
            ) from error
        return _Program(call, kinds_out, evaluate.constants)

    def _program(
        self, function: Compute, evaluate: Flat, kinds: Any, inputs: list[Tensor], static: dict[str, Any]
    ) -> tuple[Callable[..., Any], Any]:
        """A program of tensors, the model's constants last, and what to build of the tensors that it returns."""
        constants, kinds_out = evaluate.constants, list[Any]()

        def flattened(*values: Tensor) -> list[Tensor]:
            given, evaluate.constants = values[: len(inputs)], values[len(inputs) :]
            results: list[Tensor] = []
            found = function(evaluate, *unflatten(kinds, iter(given)), **static)
            kinds_out[:] = [flatten(found, results)]
            return [value.clone() if any(value is one for one in given) else value for value in results]

        try:
            return compiled(flattened, [*inputs, *constants]), kinds_out[0]
        finally:
            evaluate.constants = constants

    def _traced(self, function: Compute, inputs: list[Tensor], static: dict[str, Any]) -> Flat:
        """The density's graph for such inputs: their first is of points, and mini-batches follow to be evaluated."""
        own = inputs if function is _evaluated else inputs[:1]
        key = tuple([(value.shape, value.dtype) for value in own])
        if key not in self._flat:
            names = static.get("names", ())
            self._flat[key] = Flat(lambda *given: _with_batches(self._evaluate, *given, names=names), own)
        return self._flat[key]

    def _check(self, function: Compute, found: Any, inputs: list[Tensor], static: dict[str, Any]) -> None:
        """Compare the energies and gradients that a new program has found with the model's own.

        :raises Unavailable: if they differ.
        """
        if function is _evaluated:
            pairs = [(found, _with_batches(self._evaluate, *inputs, **static))]
        else:
            pairs = [((at.energy, at.gradient), self._evaluate(at.z, None)) for at in _points(found)]
        if not all(same_evaluation(one, other) for one, other in pairs):
            raise Unavailable(f"{self.name} made a program that computes something else")


@dataclass
class _Program:
    """A function that takes tensors and ``constants``, and what to build of the tensors that it returns."""

    call: Callable[..., Any]
    kinds: Any
    constants: tuple[Any, ...]
    checked: bool = False


class Notice:
    """Reports of a compilation that takes long; silent if PyTorch's cache answers, or progress isn't asked for.

    :param name: of the program.
    """

    def __init__(self, name: str):
        self._name, self._began = name, time.perf_counter()
        self._done = threading.Event()

    def __enter__(self) -> None:
        if ANNOUNCED.get():
            threading.Thread(target=self._watch, daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self._done.set()
        LOG.info("compiled %s in %.1f s", self._name, time.perf_counter() - self._began)

    def _watch(self) -> None:
        if self._done.wait(SILENT):
            return
        self._say("PyTorch's compiler makes a program of the model; it is kept for the next time")
        while not self._done.wait(BETWEEN):
            self._say(f"compiling for {time.perf_counter() - self._began:.0f} s so far")
        self._say(f"compiled in {time.perf_counter() - self._began:.0f} s")

    def _say(self, words: str) -> None:
        print(f"pyro_symmetric: {words}", file=sys.stderr)


# small steps --------------------------------------------------------------------------------------------------------


def _evaluated(evaluate: Evaluate, *inputs: Tensor, names: tuple[str, ...]) -> Evaluation:
    return evaluate(*inputs)


def _with_batches(evaluate: Evaluate, z: Tensor, *batches: Tensor, names: tuple[str, ...]) -> Evaluation:
    return evaluate(z, dict(zip(names, batches, strict=True)) or None)


def _points(found: Any) -> list[Any]:
    """The points in phase space among nested results: what has energies and gradients with its positions."""
    if isinstance(found, Tensor):
        return []
    if all(hasattr(found, name) for name in ("z", "energy", "gradient")):
        return [found]
    return [at for part in (vars(found).values() if is_dataclass(found) else found) for at in _points(part)]


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
