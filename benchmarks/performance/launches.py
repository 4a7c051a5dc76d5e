"""Kernel launches, host syncs and copies of one warm step of each flow: what the host costs a GPU.

    python -m benchmarks.performance.launches  # on a real GPU, counted by torch.profiler
    python -m benchmarks.performance.launches --pretend FOLDER --only align svi  # without one
    python -m benchmarks.performance.launches --pretend FOLDER --only mmd --where  # lines that wait or copy

A GPU is fed by the host, at about five microseconds a launch, so that their number, which doesn't depend on the size of
the network, bounds what a flow can gain from one; a sync (``item()``, a decision that needs a value) and a copy make
the host wait. FOLDER holds a module ``pretend_device`` with ``install()``, which makes ``"cuda"`` compute on the CPU,
and ``counted(package)``, a context that counts. The first two steps of a flow aren't counted: they fill caches.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import print_table

COUNTED = {"launches": "launches", "sync": "syncs", "to_cpu": "to host", "to_gpu": "to device", "float64": "float64"}
Counts = collections.Counter[str]
Run = Callable[[int], object]


@dataclass(frozen=True)
class Flow:
    """One row of the table.

    :param setup: makes everything on a device; returns a function that takes a number of steps.
    :param short: steps of a run that is taken away from a longer one, for flows with costs before their first step;
        0 runs none.
    :param long: steps of the run that is counted. A step's cost is the difference over ``long - short``.
    :param unit: the name of a step.
    """

    setup: Callable[[torch.device], Run]
    short: int = 0
    long: int = 1
    unit: str = "step"


def repeated(step: Callable[[], object]) -> Run:
    """A function of a number of steps, of one that takes a step."""

    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    return run


# guides -------------------------------------------------------------------------------------------------------------


def perceptron(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def svi(
    widths: list[int], estimator: ps.OrbitEstimator | None, loss: Any = None, validate: bool = True, **settings: Any
) -> Flow:
    """A step of SVI; without an estimator that of the stock guide.

    :param validate: whether Pyro and PyTorch check every distribution and value, as they do unless told otherwise.
    """

    def setup(device: torch.device) -> Run:
        pyro.set_rng_seed(0)
        net = perceptron(*widths).to(device)
        x, y = torch.randn(50, widths[0], device=device), torch.randint(widths[-1], (50,), device=device)
        model = ps.BayesianModel(net, prior=1.0, likelihood=ps.CategoricalLikelihood(), num_data=500)
        guide: Any = ps.distinct(pyro.infer.autoguide.AutoDiagonalNormal(model))
        if estimator is not None:
            guide = ps.AutoSymmetrized(
                model, ps.find_symmetry(net, x[:4]).permutations, estimator=estimator, **settings
            )
        inference = SVI(model, guide, Adam({"lr": 1e-3}), loss=loss() if loss else Trace_ELBO())

        def step() -> None:
            with pyro.validation_enabled(validate):
                inference.step(x, y)

        return repeated(step)

    return Flow(setup)


def posterior_of(kind: str) -> Flow:
    """``"sample"``: 100 draws of a guide; ``"evidence"``: its evidence."""

    def setup(device: torch.device) -> Run:
        pyro.set_rng_seed(0)
        net = perceptron(4, 10, 3).to(device)
        x, y = torch.randn(50, 4, device=device), torch.randint(3, (50,), device=device)
        model = ps.BayesianModel(net, prior=1.0, likelihood=ps.CategoricalLikelihood(), num_data=50)
        group = ps.find_symmetry(net, x[:4]).permutations
        guide = ps.AutoSymmetrized(model, group).setup(x, y)
        if kind == "sample":
            return repeated(lambda: guide.sample_posterior((100,), orbit=True))
        return repeated(lambda: ps.evidence(guide, ps.log_joint(model, x, y), group, num_samples=200))

    return Flow(setup, unit="call")


# what moves weights -------------------------------------------------------------------------------------------------


def weights_of(net: nn.Module, device: torch.device, *batch: int) -> dict[str, Tensor]:
    return {name: torch.randn(*batch, *p.shape, device=device) for name, p in net.named_parameters()}


def moving(call: Callable[[dict[str, Tensor], dict[str, Tensor], ps.Symmetry], object], *batch: int) -> Flow:
    """A function of two sets of weights of a small network and its symmetry."""

    def setup(device: torch.device) -> Run:
        pyro.set_rng_seed(0)
        net = perceptron(4, 8, 8, 2)
        symmetry = ps.find_symmetry(net, torch.randn(4, 4))
        first, second = weights_of(net, device, *batch), weights_of(net, device, *batch)
        return repeated(lambda: call(first, second, symmetry))

    return Flow(setup, unit="call")


def least_mass(device: torch.device) -> Run:
    pyro.set_rng_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))
    symmetry, weights = ps.find_symmetry(net, torch.randn(4, 8)), weights_of(net, device)
    return repeated(lambda: ps.minimal_mass(weights, symmetry))


# samplers and ensembles -----------------------------------------------------------------------------------------------


def regression(device: torch.device) -> tuple[ps.BayesianModel, Tensor, Tensor]:
    """A small network with data, and the same in each run."""
    pyro.set_rng_seed(0)
    model = ps.BayesianModel(perceptron(8, 16, 1), likelihood=ps.GaussianLikelihood(scale=0.3), num_data=100)
    return model.to(device), torch.randn(100, 8, device=device), torch.randn(100, device=device)


def sampling(kernel: Callable[..., ps.Kernel], warmup: int = 12, **settings: Any) -> Flow:
    """A draw of 8 chains."""

    def setup(device: torch.device) -> Run:
        model, x, y = regression(device)
        options: dict[str, Any] = {"num_warmup": warmup, "num_chains": 8, "seed": 0, "progress": False}
        return lambda steps: ps.sample(kernel(model, **settings), x, y, num_samples=steps, **options)

    return Flow(setup, short=4, long=12, unit="draw")


def training(device: torch.device) -> Run:
    model, x, y = regression(device)
    options: dict[str, Any] = {"num_members": 8, "batch_size": 20, "seed": 0, "progress": False}
    return lambda steps: ps.ensemble(model, (x, y), epochs=steps, **options)


BATCHES = {"batch_size": 20}
SAMPLERS: dict[str, Flow] = {
    "HMC, 4 leapfrogs": sampling(ps.HMC, num_steps=4, jitter=0.0),
    "NUTS, 7 leapfrogs": sampling(ps.NUTS, max_treedepth=3),
    "AdaptiveHMC, 4 leapfrogs": sampling(ps.AdaptiveHMC, max_steps=4, adapt_length=False),
    "MCLMC, 4 steps, 8 gradients": sampling(ps.MCLMC, max_steps=4, adapt_length=False),
    "SGHMC, 10 gradients": sampling(ps.SGHMC, **BATCHES),
    "SGLD, 10 gradients": sampling(ps.SGLD, **BATCHES),
    "pSGLD, 10 gradients": sampling(ps.pSGLD, **BATCHES),
    "ensemble, 5 gradients": Flow(training, short=2, long=6, unit="epoch"),
}


DEEP, SHALLOW = [8, 16, 16, 3], [8, 16, 3]
FLOWS: dict[str, Flow] = {
    "svi stock guide, two hidden layers": svi(DEEP, None),
    "svi Sinkhorn(4), two hidden layers": svi(DEEP, ps.SinkhornImportance(4)),
    "svi stock guide, unchecked": svi(DEEP, None, validate=False),
    "svi Sinkhorn(4), two hidden layers, unchecked": svi(DEEP, ps.SinkhornImportance(4), validate=False),
    "svi Sinkhorn(4), one hidden layer": svi(SHALLOW, ps.SinkhornImportance(4)),
    "svi Sinkhorn(4), unit blocks": svi(SHALLOW, ps.SinkhornImportance(4), base=ps.AutoUnitBlocks),
    "svi Sinkhorn(4), mean-field ELBO": svi(DEEP, ps.SinkhornImportance(4), ps.SymmetrizedMeanField_ELBO),
    "svi InfoNCE(4), two hidden layers": svi(DEEP, ps.InfoNCE(4)),
    "svi ExactOrbit, four units": svi([3, 4, 2], ps.ExactOrbit()),
    "guide.sample_posterior, 100 draws": posterior_of("sample"),
    "evidence, 200 draws": posterior_of("evidence"),
    "align": moving(lambda a, b, s: ps.align(a, b, s, progress=False)),
    "align_many, 12 members": moving(lambda a, b, s: ps.align_many(a, s, progress=False), 12),
    "canonicalize": moving(lambda a, b, s: ps.canonicalize(a, s)),
    "minimal_mass": Flow(least_mass, unit="call"),
    "mmd": moving(lambda a, b, s: ps.mmd(a, b), 20),
    **SAMPLERS,
}


# counting -----------------------------------------------------------------------------------------------------------


def counting(pretend: Path | None) -> tuple[torch.device, Callable[[], contextlib.AbstractContextManager[dict]]]:
    """A device, and a context that counts what happens on it."""
    if pretend is not None:
        sys.path.insert(0, str(pretend))
        device = importlib.import_module("pretend_device")
        device.install()
        return torch.device("cuda", 0), lambda: device.counted("/pyro_symmetric/")
    if not torch.cuda.is_available():
        raise SystemExit("this machine has no GPU; --pretend FOLDER names a folder with a module pretend_device")
    return torch.device("cuda", 0), profiled


@contextlib.contextmanager
def profiled() -> Iterator[dict]:
    """The counts of a real GPU, by the names of the runtime's calls and of the kernels."""
    result: dict = {}
    with torch.profiler.profile(activities=[*torch.profiler.supported_activities()]) as profile:
        yield result
        torch.cuda.synchronize()
    found: Counts = collections.Counter()
    for event in profile.events():
        name = event.name
        found["launches"] += "LaunchKernel" in name or "GraphLaunch" in name
        found["sync"] += name in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
        found["to_cpu"] += "Memcpy DtoH" in name
        found["to_gpu"] += "Memcpy HtoD" in name
        found["float64"] += "double" in name and event.device_type == torch.autograd.DeviceType.CUDA
    result.update(found)
    result["sync"] -= 1  # this function's own


def cost(flow: Flow, device: torch.device, count: Callable[[], Any]) -> tuple[dict[str, float], Counts]:
    """Counts a step, and where syncs and copies came from."""
    run = flow.setup(device)
    run(max(2, flow.short))
    totals: list[dict] = []
    for steps in (flow.short, flow.long):
        with count() as found:
            if steps:
                run(steps)
        totals.append(found)
    before, after = totals
    steps = flow.long - flow.short
    where = collections.Counter(after.get("where", {}))
    where.subtract(before.get("where", {}))
    return {title: (after.get(key, 0) - before.get(key, 0)) / steps for key, title in COUNTED.items()}, where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretend", type=Path, metavar="FOLDER", help="of a module pretend_device")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="flows whose name has one of these")
    parser.add_argument("--where", action="store_true", help="list the lines that sync or copy")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device, count = counting(options.pretend)
    table: dict[str, dict[str, Any]] = {}
    for name, flow in FLOWS.items():
        if any(word in name for word in options.only):
            counts, where = cost(flow, device, count)
            table[name] = {"unit": flow.unit, **counts}
            for line, times in where.most_common() if options.where else ():
                print(f"{name}: {times:4d} {line}")
    rows = [[name, row["unit"], *(f"{row[title]:g}" for title in COUNTED.values())] for name, row in table.items()]
    print_table("cost of a warm step", ["flow", "a", *COUNTED.values()], rows)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
