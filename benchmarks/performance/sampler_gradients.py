"""Chains times gradients per second of the potential that samplers use, beside its
peers, in one run.

(a) UCI energy (768 rows, 8 inputs), an 8-50-1 tanh network, N(0, 1/fan-in) weights,
noise 0.1 on standardised targets; (b) digits (1,437 rows), a 64-32-10 ReLU network,
softmax, N(0, 1) weights.

All contestants get the same weights, and their gradients are compared before they are
timed. Rounds are interleaved and the best of each is kept, so that other load disturbs
the ratios little; compile time isn't counted. NumPyro takes part where it is installed.

    python -m benchmarks.performance.sampler_gradients [--root data] [--target a b]
    [--chains 1 16 1024] [--cpu-time]

With --root, (a) reads <root>/uci/energy/data.txt; without, it takes random numbers of
the same shape.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyro.infer.mcmc.util import initialize_model
from pyro.ops.integrator import potential_grad
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.contestants import Problem
from benchmarks.harness import parse, parser, print_table
from pyro_symmetric import BayesianModel
from pyro_symmetric.mcmc import Density
from pyro_symmetric.models import GaussianLikelihood, GaussianPrior

NOISE = 0.1
# of the weights at which gradients are taken, in standard deviations of the prior
SPREAD = 0.1
SITES = ("w0", "b0", "w1", "b1")


@dataclass(frozen=True)
class Target:
    """A network of one hidden layer and its data, float32."""

    x: Tensor
    y: Tensor
    hidden: int
    outputs: int

    @property
    def classifies(self) -> bool:
        return self.outputs > 1

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer."""
        return [(self.x.shape[1], self.hidden), (self.hidden, self.outputs)]

    def scale(self, inputs: int) -> float:
        return 1.0 if self.classifies else inputs**-0.5

    def net(self) -> nn.Sequential:
        first, second = (nn.Linear(*size) for size in self.sizes)
        return nn.Sequential(first, nn.ReLU() if self.classifies else nn.Tanh(), second)

    def model(self) -> BayesianModel:
        likelihood = "categorical" if self.classifies else GaussianLikelihood(NOISE)
        return BayesianModel(
            self.net(), GaussianPrior(1.0, fan_in=not self.classifies), likelihood
        )

    def problem(self) -> Problem:
        """The model as users of Pyro and NumPyro write it."""

        def write(d: Any, sample: Any, plate: Any, lib: Any, data: Any) -> None:
            x, y = data
            found = x
            for layer, (below, above) in enumerate(self.sizes):
                weight = sample(
                    f"w{layer}",
                    d.Normal(lib.zeros((above, below)), self.scale(below)).to_event(2),
                )
                bias = sample(
                    f"b{layer}", d.Normal(lib.zeros((above,)), 1.0).to_event(1)
                )
                if layer:
                    found = (
                        lib.maximum(found, lib.zeros_like(found))
                        if self.classifies
                        else lib.tanh(found)
                    )
                found = found @ weight.T + bias
            with plate("data", len(x)):
                sample(
                    "y",
                    d.Categorical(logits=found)
                    if self.classifies
                    else d.Normal(found[:, 0], NOISE),
                    obs=y,
                )

        return Problem(write, (self.x.numpy(), self.y.numpy()))


def target(name: str, root: Path | None) -> Target:
    if name == "b":
        x, y = load_digits(return_X_y=True)
        return Target(
            torch.tensor(x / 16, dtype=torch.float32)[:1437],
            torch.tensor(y)[:1437],
            32,
            10,
        )
    table = np.random.default_rng(0).normal(size=(768, 9))
    table = table if root is None else np.loadtxt(root / "uci/energy/data.txt")
    rows = torch.tensor((table - table.mean(0)) / table.std(0), dtype=torch.float32)
    return Target(rows[:, :8].contiguous(), rows[:, 8].contiguous(), 50, 1)


def contestants(own: Target) -> dict[str, Callable[[Tensor], Callable[[], Any]]]:
    """Name -> from flat weights ``(C, D)`` a function that returns their gradients,
    flat or by site.

    The first is the reference; Pyro's takes the first chain alone.
    """
    density = Density(own.model(), args=(own.x, own.y))
    shapes = dict(zip(SITES, density.layout.unconstrained_shapes.values(), strict=True))
    sizes = [shape.numel() for shape in shapes.values()]

    def sites(flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split(sizes, -1)
        return {
            n: p.reshape(*p.shape[:-1], *s)
            for (n, s), p in zip(shapes.items(), pieces, strict=True)
        }

    net, names = own.net(), list(density.layout.unconstrained_shapes)

    def energy(flat: Tensor) -> Tensor:
        weights = sites(flat)
        outputs = functional_call(
            net, dict(zip(names, weights.values(), strict=True)), (own.x,)
        )
        prior = (
            sum(
                w.square().sum() / own.scale(w.shape[-1]) ** (2 * (w.dim() - 1))
                for w in weights.values()
            )
            / 2
        )
        if own.classifies:
            return nn.functional.cross_entropy(outputs, own.y, reduction="sum") + prior
        return (outputs[:, 0] - own.y).square().sum() / (2 * NOISE**2) + prior

    def ours(
        engine: str, model: Any, *args: Tensor
    ) -> Callable[[Tensor], Callable[[], Tensor]]:
        made = Density(model, args=args, engine=engine)
        return lambda z: lambda: made.energy_and_gradient(z)[1]

    written = own.problem().in_pyro()
    _, potential, _, _ = initialize_model(written)
    by_vmap = vmap(grad(energy))
    found: dict[str, Callable[[Tensor], Callable[[], Any]]] = {
        "vmap(grad(functional_call))": lambda z: lambda: by_vmap(z),
        "Pyro, one chain": lambda z: lambda: potential_grad(potential, sites(z[0]))[0],
        "any Pyro model, eager": ours("eager", written),
        "any Pyro model, compiled": ours("compiled", written),
        "BayesianModel, eager": ours("eager", own.model(), own.x, own.y),
        f"BayesianModel, {density.engine}": ours("auto", own.model(), own.x, own.y),
    }
    if importlib.util.find_spec("numpyro") is not None:
        found["NumPyro, vectorised"] = numpyro(own, sites)
    return found


def numpyro(
    own: Target, sites: Callable[[Tensor], dict[str, Tensor]]
) -> Callable[[Tensor], Callable[[], Any]]:
    import jax
    import jax.numpy as jnp
    from numpyro.infer.util import initialize_model as initialize

    info = initialize(
        jax.random.PRNGKey(0), own.problem().in_numpyro(), dynamic_args=False
    )
    both = jax.jit(jax.vmap(jax.value_and_grad(info.potential_fn)))

    def prepared(z: Tensor) -> Callable[[], Any]:
        weights = {name: jnp.asarray(value.numpy()) for name, value in sites(z).items()}
        return lambda: jax.block_until_ready(both(weights)[1])

    return prepared


def flat(found: Any, chains: int) -> Tensor:
    """Gradients ``(chains, D)`` of any contestant."""
    if isinstance(found, Tensor):
        return found
    return torch.cat(
        [torch.from_dlpack(found[name]).reshape(chains, -1) for name in SITES], 1
    )


def measure(
    calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Best seconds of one call of each, over interleaved rounds of at least 10 ms."""
    times, best = {}, dict.fromkeys(calls, math.inf)
    for name, call in calls.items():
        start = clock()
        call()
        times[name] = max(1, int(0.01 / max(clock() - start, 1e-6)))
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            for _ in range(times[name]):
                call()
            best[name] = min(best[name], (clock() - start) / times[name])
    return best


def compare(name: str, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    own = target(name, options.root)
    everyone = contestants(own)
    priors = own.model().priors().values()
    z = SPREAD * torch.cat(
        [prior.sample((max(options.chains),)).flatten(1) for prior in priors], 1
    )
    expected, rates = None, {}
    for chains in options.chains:
        calls = {
            contestant: prepare(z[:chains]) for contestant, prepare in everyone.items()
        }
        for contestant, call in calls.items():
            found = flat(call(), 1 if contestant.startswith("Pyro") else chains)
            expected = (
                found if expected is None or len(found) > len(expected) else expected
            )
            error = float(
                (found - expected[: len(found)]).norm() / expected[: len(found)].norm()
            )
            if not error < 1e-4:
                raise RuntimeError(
                    f"{contestant} computes another gradient: off by {error:.2g}"
                )
        for contestant, seconds in measure(
            calls, options.rounds, options.clock
        ).items():
            rates[contestant, chains] = (
                1 if contestant.startswith("Pyro") else chains
            ) / seconds
    base = max(rates["Pyro, one chain", chains] for chains in options.chains)
    rows = []
    for contestant in everyone:
        found = [rates[contestant, chains] for chains in options.chains]
        rows.append(
            [
                contestant,
                *(f"{rate:,.0f}" for rate in found),
                f"{max(found) / base:.1f}",
            ]
        )
    sizes = f"{own.x.shape[1]}-{own.hidden}-{own.outputs}"
    print_table(
        f"({name}) {sizes}, {len(own.x)} rows: chains times gradients a second",
        ["", *(f"{chains} chains" for chains in options.chains), "best / Pyro"],
        rows,
    )


def target_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of options that choose targets, and the folder of their data."""
    arguments = parser(description, seeds=1)
    arguments.add_argument(
        "--target", nargs="+", choices=["a", "b"], default=["a", "b"]
    )
    arguments.add_argument(
        "--root",
        type=Path,
        help="folder that holds uci/energy; without, random numbers for (a)",
    )
    return arguments


def main() -> None:
    arguments = target_parser(__doc__)
    arguments.add_argument(
        "--chains", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024]
    )
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument(
        "--cpu-time",
        action="store_true",
        help="count processor time: for busy machines, 1 thread",
    )
    options = parse(arguments)
    if options.quick:
        options.chains, options.rounds = [1, 4], 1
    options.clock = time.process_time if options.cpu_time else time.perf_counter
    if options.threads == 1:  # before JAX starts its threads
        os.environ["XLA_FLAGS"] = (
            "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        )
    for name in options.target:
        compare(name, options)


if __name__ == "__main__":
    main()
