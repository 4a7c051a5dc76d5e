"""CUDA graphs of an evaluation: a GPU is told once what to do, then a single launch repeats it.

An evaluation of energy and gradient is some tens of kernels, or hundreds for a traced model, each of which the host
starts anew; of small models that takes longer than the arithmetic. A graph computes in memory of its own: points are
copied in, results are copied out. Shapes are its own, too, so that there is one for each number of chains. What waits
for the device, or decides by values, can't be captured; such a density is evaluated as it was.

No graph is taken on trust. It is captured at other points than the first ones that it is asked for, and what it says of
those must be what the evaluation itself says.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_symmetric.mcmc.density.engine import Evaluation, same_evaluation
from pyro_symmetric.mcmc.density.network import NetworkEngine
from pyro_symmetric.mcmc.density.targets import Rows

WARM_UPS = 3  # evaluations before the one that is captured, as PyTorch asks for
MOST = 16  # graphs, each of which holds the memory of an evaluation

Evaluate = Callable[[Tensor, Rows | None], Evaluation]


@dataclass(frozen=True, eq=False)
class Graph:
    """A captured evaluation.

    :param z: where points go.
    :param rows: where mini-batches go.
    :param results: where energies and gradients are found after a ``replay``.
    :param owner: what was evaluated. It holds memory that the graph uses, so nothing else may call it.
    """

    z: Tensor
    rows: dict[str, Tensor] | None
    results: Evaluation
    replay: Callable[[], Any]
    owner: Any

    def __call__(self, z: Tensor, rows: Rows | None) -> Evaluation:
        self.z.copy_(z)
        for name, index in (self.rows or {}).items():
            index.copy_((rows or {})[name])
        self.replay()
        energy, gradient = self.results
        return energy.clone(), gradient.clone()


class Graphs:
    """An engine that repeats another evaluation by CUDA graphs.

    :param inner: a network's engine, or ``None``.
    :param plain: the evaluation itself, by autograd, if there is none.
    """

    name, by_chain = "graphs", False

    def __init__(self, inner: NetworkEngine | None, plain: Evaluate):
        self._inner, self._plain = inner, plain
        self._graphs: dict[Any, Graph | None] = {}

    def serves(self, z: Tensor, rows: Rows | None) -> bool:
        return self._inner is None or self._inner.serves(z, rows)

    def energy_and_gradient(self, z: Tensor, rows: Rows | None) -> Evaluation:
        kind = (z.shape, z.dtype, *((name, index.shape, index.dtype) for name, index in (rows or {}).items()))
        graph = self._graphs.get(kind)
        if graph is not None:
            return graph(z, rows)
        expected = self._evaluate(z, rows)
        if kind not in self._graphs and len(self._graphs) < MOST and bool(expected[0].isfinite().any()):
            self._graphs[kind] = self._verified(z, rows, expected)
        return expected

    def _evaluate(self, z: Tensor, rows: Rows | None) -> Evaluation:
        return self._plain(z, rows) if self._inner is None else self._inner.energy_and_gradient(z, rows)

    def _verified(self, z: Tensor, rows: Rows | None, expected: Evaluation) -> Graph | None:
        """A graph that gives what is expected at ``z``; ``None``, with a warning, if there is none."""
        try:
            graph = self._captured(z, rows)
            if same_evaluation(graph(z, rows), expected):
                return graph
            reason = "its results differ from the evaluation's own"
        except RuntimeError as error:  # PyTorch's, of what can't be captured
            reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"no CUDA graph serves {len(z)} chains, which are evaluated launch by launch: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None

    def _captured(self, z: Tensor, rows: Rows | None) -> Graph:
        own = Graphs(None if self._inner is None else self._inner.fresh(), self._plain)
        points = 0.5 * z.detach()
        indices = None if rows is None else {name: index.flip(-1).contiguous() for name, index in rows.items()}
        replay, results = capture(lambda: own._evaluate(points, indices))
        return Graph(points, indices, results, replay, own)


def capture(evaluate: Callable[[], Evaluation]) -> tuple[Callable[[], Any], Evaluation]:
    """A function that repeats an evaluation, and where its results lie.

    :raises RuntimeError: if it can't be captured, or the device isn't one that captures.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            evaluate()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = evaluate()
    return graph.replay, results
