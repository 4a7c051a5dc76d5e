"""Chains times gradients per second of the potential that samplers use, beside its peers, in one run.

(a) UCI energy (768 rows, 8 inputs), a 8-50-1 tanh network, N(0, 1/fan-in) weights, noise 0.1 on standardised targets;
(b) digits (1,437 rows), a 64-32-10 ReLU network, softmax, N(0, 1) weights.

All contestants get the same weights, and their energies' gradients are compared before they are timed. Rounds are
interleaved and the best of each is kept, so that other load disturbs the ratios little; compile time isn't counted.
JAX and NumPyro take part where they are installed.

    python -m benchmarks.performance.sampler_gradients [--root data] [--target a b] [--chains 1 16 1024] [--cpu-time]

With --root, (a) reads <root>/uci/energy/data.txt; without, it takes random numbers of the same shape.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.mcmc.util import initialize_model
from pyro.nn import PyroModule, PyroSample
from pyro.ops.integrator import potential_grad
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.harness import print_table
from pyro_symmetric import BayesianModel
from pyro_symmetric.likelihoods import GaussianLikelihood
from pyro_symmetric.mcmc import Density
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.models import GaussianPrior

Gradient = Callable[[Any], Any]
STEP = 0.1  # scale of the weights at which gradients are taken, in prior standard deviations


@dataclass(frozen=True)
class Problem:
    """Data, sizes and what the two targets differ in."""

    name: str
    x: Tensor
    y: Tensor
    hidden: int
    outputs: int
    fan_in: bool

    @property
    def inputs(self) -> int:
        return self.x.shape[1]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of each layer."""
        return [(self.inputs, self.hidden), (self.hidden, self.outputs)]

    @property
    def classifies(self) -> bool:
        return self.outputs > 1

    @property
    def flops(self) -> float:
        """Of the matrix products of one gradient: none is needed for the inputs' own gradient."""
        return 2.0 * len(self.x) * (2 * self.inputs * self.hidden + 3 * self.hidden * self.outputs)

    def scale(self, fan_in: int) -> float:
        return fan_in**-0.5 if self.fan_in else 1.0

    def net(self) -> nn.Sequential:
        activation = nn.ReLU() if self.classifies else nn.Tanh()
        return nn.Sequential(nn.Linear(self.inputs, self.hidden), activation, nn.Linear(self.hidden, self.outputs))

    def model(self) -> BayesianModel:
        likelihood = "categorical" if self.classifies else GaussianLikelihood(0.1)
        return BayesianModel(self.net(), GaussianPrior(1.0, fan_in=self.fan_in), likelihood)


def problem(name: str, root: Path | None) -> Problem:
    if name == "b":
        x, y = load_digits(return_X_y=True)
        return Problem("b", torch.tensor(x / 16, dtype=torch.float32)[:1437], torch.tensor(y)[:1437], 32, 10, False)
    rng = np.random.default_rng(0)
    table = rng.normal(size=(768, 9)) if root is None else np.loadtxt(root / "uci/energy/data.txt")
    table = (table - table.mean(0)) / table.std(0)
    table = torch.tensor(table, dtype=torch.float32)
    return Problem("a", table[:, :8].contiguous(), table[:, 8].contiguous(), 50, 1, True)


# contestants --------------------------------------------------------------------------------------------------------


class PyroNet(PyroModule):
    """The model as a Pyro user writes it, without this library."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.problem = problem
        self.first = PyroModule[nn.Linear](problem.inputs, problem.hidden)
        self.second = PyroModule[nn.Linear](problem.hidden, problem.outputs)
        for layer in (self.first, self.second):
            std = problem.scale(layer.in_features)
            layer.weight = PyroSample(dist.Normal(0.0, std).expand([layer.out_features, layer.in_features]).to_event(2))
            layer.bias = PyroSample(dist.Normal(0.0, 1.0).expand([layer.out_features]).to_event(1))

    def forward(self, x: Tensor, y: Tensor) -> None:
        hidden = self.first(x)
        outputs = self.second(hidden.relu() if self.problem.classifies else hidden.tanh())
        with pyro.plate("data", len(x)):
            if self.problem.classifies:
                pyro.sample("y", dist.Categorical(logits=outputs), obs=y)
            else:
                pyro.sample("y", dist.Normal(outputs.squeeze(-1), 0.1), obs=y)


def torch_contestants(problem: Problem, options: argparse.Namespace) -> tuple[Density, dict[str, Gradient]]:
    """Functions of chains ``(C, D)`` that return gradients ``(C, D)``; Pyro's of one chain."""
    x, y = problem.x, problem.y
    density = Density(problem.model(), args=(x, y))
    net, shapes = problem.net(), density.layout.unconstrained_shapes
    sizes = [shape.numel() for shape in shapes.values()]
    precision = torch.cat(
        [torch.full((s.numel(),), problem.scale(s[-1]) ** -2 if len(s) == 2 else 1.0) for s in shapes.values()]
    )

    def energy(flat: Tensor) -> Tensor:
        weights = {n: p.reshape(s) for (n, s), p in zip(shapes.items(), flat.split(sizes), strict=True)}
        outputs = functional_call(net, weights, (x,))
        prior = 0.5 * (precision * flat.square()).sum()
        if problem.classifies:
            return nn.functional.cross_entropy(outputs, y, reduction="sum") + prior
        return 50 * (outputs[:, 0] - y).square().sum() + prior

    def stock(jit: bool) -> Gradient:
        _, own, _, _ = initialize_model(
            PyroNet(problem), (x, y), jit_compile=jit, jit_options={"check_trace": False}, skip_jit_warnings=True
        )
        names = ["first.weight", "first.bias", "second.weight", "second.bias"]

        def gradient(flat: Tensor) -> Tensor:
            pieces = zip(names, shapes.values(), flat[0].split(sizes), strict=True)
            with pyro.validation_enabled(False):
                found, _ = potential_grad(own, {name: piece.reshape(shape) for name, shape, piece in pieces})
            return torch.cat([found[name].flatten() for name in names])[None]

        return gradient

    def ours(density: Density) -> Gradient:
        return lambda flat: density.energy_and_gradient(flat)[1]

    contestants = {
        "Pyro HMC, one chain": stock(jit=False),
        "Pyro HMC, one chain, jit": stock(jit=True),
        "vmap(grad(functional_call))": vmap(grad(energy)),
        "unmodified Pyro model": ours(Density(PyroNet(problem), args=(x, y))),
        "BayesianModel (eager)": ours(Density(problem.model(), args=(x, y), engine="eager")),
        f"BayesianModel ({density.engine})": ours(density),
    }
    if options.compile:
        contestants["unmodified Pyro model, compiled"] = ours(Density(PyroNet(problem), args=(x, y), engine="compiled"))
        contestants["BayesianModel (compiled)"] = ours(Density(problem.model(), args=(x, y), engine="compiled"))
        contestants["hand-batched, torch.compile"] = torch.compile(by_hand(problem, precision), dynamic=False)
    return density, contestants


def by_hand(problem: Problem, precision: Tensor) -> Gradient:
    """A density written for this network alone: features first, no autograd."""
    x = torch.cat([problem.x, problem.x.new_ones(len(problem.x), 1)], 1)
    xt, hidden, outputs = x.T.contiguous(), problem.hidden, problem.outputs
    one_hot = nn.functional.one_hot(problem.y, outputs).T.float() if problem.classifies else None
    cuts = [problem.inputs * hidden, hidden, hidden * outputs, outputs]

    def gradient(z: Tensor) -> Tensor:
        chains = len(z)
        w1, b1, w2, b2 = z.split(cuts, 1)
        first = torch.cat([w1.reshape(chains, hidden, -1), b1[:, :, None]], 2)
        a = (first.reshape(chains * hidden, -1) @ xt).reshape(chains, hidden, -1)
        h = a.relu() if problem.classifies else a.tanh()
        w2 = w2.reshape(chains, outputs, hidden)
        out = w2 @ h + b2[:, :, None]
        delta = 100 * (out - problem.y) if one_hot is None else out.softmax(1) - one_hot
        below = (w2.mT @ delta) * ((a > 0) if problem.classifies else 1 - h * h)
        d1 = (xt @ below.reshape(chains * hidden, -1).T).reshape(-1, chains, hidden).permute(1, 2, 0)
        parts = [d1[:, :, :-1].flatten(1), d1[:, :, -1], (delta @ h.mT).flatten(1), delta.sum(2)]
        return torch.cat(parts, 1) + precision * z

    return gradient


def numpyro_model(problem: Problem) -> Callable[[], None]:
    """The model as a NumPyro user writes it; ``w1``, ``b1`` and so on are its sites."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as nd

    x, y = jnp.asarray(problem.x.numpy()), jnp.asarray(problem.y.numpy())
    activation = jax.nn.relu if problem.classifies else jnp.tanh

    def model() -> None:
        found = x
        for layer, (below, above) in enumerate(problem.sizes, 1):
            prior = nd.Normal(jnp.zeros((above, below)), problem.scale(below)).to_event(2)
            weight = numpyro.sample(f"w{layer}", prior)
            bias = numpyro.sample(f"b{layer}", nd.Normal(jnp.zeros(above), 1.0).to_event(1))
            found = (activation(found) if layer > 1 else found) @ weight.T + bias
        with numpyro.plate("data", len(x)):
            fn = nd.Categorical(logits=found) if problem.classifies else nd.Normal(found[:, 0], 0.1)
            numpyro.sample("y", fn, obs=y)

    return model


def jax_contestants(problem: Problem) -> dict[str, Gradient]:
    """NumPyro's density, and the log-density that one writes by hand for BlackJAX, vectorised over chains."""
    import jax
    import jax.numpy as jnp
    from numpyro.infer.util import initialize_model as numpyro_initialize

    x, y = jnp.asarray(problem.x.numpy()), jnp.asarray(problem.y.numpy())
    activation = jax.nn.relu if problem.classifies else jnp.tanh

    def log_density(w: Any) -> Any:
        found, prior = activation(x @ w["w1"].T + w["b1"]) @ w["w2"].T + w["b2"], 0.0
        for layer, (below, _) in enumerate(problem.sizes, 1):
            prior -= 0.5 * (w[f"w{layer}"] ** 2).sum() / problem.scale(below) ** 2 + 0.5 * (w[f"b{layer}"] ** 2).sum()
        if problem.classifies:
            return jnp.take_along_axis(jax.nn.log_softmax(found), y[:, None], 1).sum() + prior
        return -50 * ((found[:, 0] - y) ** 2).sum() + prior

    def contestant(energy: Callable[[Any], Any]) -> Gradient:
        both = jax.jit(jax.vmap(jax.value_and_grad(energy)))

        def gradient(flat: Tensor) -> Any:
            pieces, at = {}, 0
            for layer, (below, above) in enumerate(problem.sizes, 1):
                for name, shape in ((f"w{layer}", (above, below)), (f"b{layer}", (above,))):
                    pieces[name] = jnp.asarray(flat[:, at : at + math.prod(shape)].numpy()).reshape(-1, *shape)
                    at += math.prod(shape)
            return Prepared(lambda: jax.block_until_ready(both(pieces)[1]))

        return gradient

    info = numpyro_initialize(jax.random.PRNGKey(0), numpyro_model(problem), dynamic_args=False)
    return {
        "NumPyro, vectorised": contestant(info.potential_fn),
        "JAX by hand, as for BlackJAX": contestant(lambda w: -log_density(w)),
    }


@dataclass(frozen=True)
class Prepared:
    """A contestant whose input was converted beforehand; converting isn't timed."""

    run: Callable[[], Any]

    def flat(self) -> Tensor:
        found = self.run()
        return torch.cat([torch.tensor(np.array(found[n])).flatten(1) for n in ("w1", "b1", "w2", "b2")], 1)


# measuring ----------------------------------------------------------------------------------------------------------


def ready(gradient: Gradient, z: Tensor) -> Callable[[], Any]:
    """A function without arguments, run once so that what it compiles is compiled."""
    found = gradient(z)
    call = found.run if isinstance(found, Prepared) else lambda: gradient(z)
    call()
    return call


def check(contestants: dict[str, Gradient], z: Tensor) -> None:
    expected = contestants["vmap(grad(functional_call))"](z)
    for name, gradient in contestants.items():
        found = gradient(z)
        found = found.flat() if isinstance(found, Prepared) else found
        error = (found - expected[: len(found)]).norm() / expected[: len(found)].norm()
        if not error < 1e-4:
            raise RuntimeError(f"{name} computes another gradient: off by {error:.2g}")


def measure(calls: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
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


def peak(clock: Callable[[], float]) -> float:
    """Operations per second of a large matrix product."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / measure({"": lambda: a @ b}, 9, clock)[""]


def compare(problem: Problem, options: argparse.Namespace) -> None:
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.manual_seed(0)
    density, contestants = torch_contestants(problem, options)
    if importlib.util.find_spec("numpyro") is not None:
        contestants |= jax_contestants(problem)
    else:
        print("JAX and NumPyro aren't installed: left out")
    z = STEP * starting_points(density, max(options.chains))
    check(contestants, z[:5])
    rates: dict[str, dict[int, float]] = {name: {} for name in contestants}
    for chains in options.chains:
        own = {n: c for n, c in contestants.items() if chains == min(options.chains) or not n.startswith("Pyro")}
        calls = {name: ready(contestant, z[:chains]) for name, contestant in own.items()}
        for name, seconds in measure(calls, options.rounds, clock).items():
            rates[name][chains] = (1 if name.startswith("Pyro") else chains) / seconds
    top, best = peak(clock), {name: max(found.values()) for name, found in rates.items()}
    rows = [
        [
            name,
            *(f"{found[chains]:,.0f}" if chains in found else "" for chains in options.chains),
            f"{best[name]:,.0f}",
            f"{best[name] / best['Pyro HMC, one chain']:.1f}",
            *([f"{best[name] / best['NumPyro, vectorised']:.2f}"] if "NumPyro, vectorised" in best else []),
            f"{100 * best[name] * problem.flops / top:.0f} %",
        ]
        for name, found in rates.items()
    ]
    rivals = [" x NumPyro"] if "NumPyro, vectorised" in best else []
    header = ["gradients per second at chains", *map(str, options.chains), "best", "x Pyro", *rivals, "of peak"]
    print_table(
        f"({problem.name}) {problem.inputs}-{problem.hidden}-{problem.outputs}, {len(problem.x)} rows, float32, "
        f"{options.threads} thread(s); peak of matrix products {top / 1e9:.0f} GFLOP/s",
        header,
        rows,
    )
    last = max(options.chains)
    if rivals and last in rates["NumPyro, vectorised"]:
        ours = next(found[last] for name, found in rates.items() if name.startswith("BayesianModel ("))
        print(f"  BayesianModel at {last} chains: {ours / rates['NumPyro, vectorised'][last]:.1f} x NumPyro")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", choices=["a", "b"], default=["a", "b"])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--root", type=Path, help="folder that holds uci/energy")
    parser.add_argument("--compile", action="store_true", help="also what goes through torch.compile: minutes")
    parser.add_argument("--cpu-time", action="store_true", help="count processor time: for busy machines, 1 thread")
    options = parser.parse_args()
    if options.threads == 1:  # before JAX starts its threads
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # of torch.jit about itself
    for name in options.target:
        compare(problem(name, options.root), options)


if __name__ == "__main__":
    main()
