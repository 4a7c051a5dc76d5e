"""Gradients per second of the potential that samplers use, beside its peers, in one run.

The target: digits (1,437 rows), a 64-10-10 ReLU network, softmax likelihood, N(0, 1) weights: 760 of them. All
contestants get the same weights; their gradients are compared before they are timed. Rounds are interleaved and the
best of each is kept, so that other load on the machine disturbs the ratios little.

    python benchmarks/sampler_gradients.py [--chains 16] [--threads 1 2] [--rounds 7]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import pyro
import torch
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from pyro_symmetric import BayesianModel
from pyro_symmetric.mcmc import Potential

Contestant = Callable[[Tensor], Tensor]


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16, dtype=torch.float32)[:1437], torch.tensor(y)[:1437]


def contestants(chains: int) -> tuple[Tensor, dict[str, Contestant], dict[str, int]]:
    """A start, functions ``(C, D) -> gradient (C, D)``, and how many chains each evaluates."""
    torch.manual_seed(0)
    x, y = digits()
    net = nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10))
    model = BayesianModel(net)
    potential = Potential(model, x, y)
    z = potential.initial(chains)
    shapes = potential.layout.unconstrained_shapes
    _, pyro_potential, _, _ = initialize_model(model, (x, y))

    def split(flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([shape.numel() for shape in shapes.values()])
        return {site: piece.reshape(shape) for (site, shape), piece in zip(shapes.items(), pieces, strict=True)}

    def energy(flat: Tensor) -> Tensor:
        outputs = functional_call(net, split(flat), (x,))
        return nn.functional.cross_entropy(outputs, y, reduction="sum") + 0.5 * flat.square().sum()

    def stock_pyro(flat: Tensor) -> Tensor:
        with pyro.validation_enabled(False):
            gradients, _ = potential_grad(pyro_potential, split(flat[0]))
        return torch.cat([gradients[site].flatten() for site in shapes])[None]

    traced = Potential(lambda x, y: model(x, y), x, y)  # a function hides that it is a BayesianModel
    naive = vmap(grad(energy))
    rivals: dict[str, Contestant] = {
        "pyro HMC, one chain": stock_pyro,
        "vmap(grad(functional_call))": naive,
        "Potential, any Pyro model": lambda flat: traced.value_and_grad(flat)[1],
        "Potential, BayesianModel": lambda flat: potential.value_and_grad(flat)[1],
    }
    expected = naive(z)
    for name, rival in rivals.items():
        found = rival(z)
        if not torch.allclose(found, expected[: len(found)], rtol=1e-3, atol=1e-2):
            raise RuntimeError(f"{name} computes another gradient")
    return z, rivals, {name: 1 if name.startswith("pyro") else chains for name in rivals}


def measure(z: Tensor, rivals: dict[str, Contestant], rounds: int) -> dict[str, float]:
    """Best seconds of one call for each, over interleaved rounds of five calls."""
    best = dict.fromkeys(rivals, float("inf"))
    for _ in range(rounds):
        for name, rival in rivals.items():
            start = time.perf_counter()
            for _ in range(5):
                rival(z)
            best[name] = min(best[name], (time.perf_counter() - start) / 5)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    z, rivals, counts = contestants(options.chains)
    for threads in options.threads:
        torch.set_num_threads(threads)
        seconds = measure(z, rivals, options.rounds)
        rates = {name: counts[name] / seconds[name] for name in rivals}
        base = rates["pyro HMC, one chain"]
        print(f"\n{options.chains} chains, {threads} threads: gradients per second, and times stock Pyro")
        for name, rate in rates.items():
            print(f"  {name:<30} {rate:>9.0f}  {rate / base:>6.2f}x")


if __name__ == "__main__":
    main()
