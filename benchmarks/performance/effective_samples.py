"""Effective samples of the worst prediction per second: our many-chain kernels beside Pyro's and NumPyro's NUTS.

The targets are those of ``sampler_gradients.py``, with every tenth row held out to predict. AdaptiveHMC warms chains
up once. From where they are, with the mass matrix that they have learnt, every contestant runs for the same time: our
kernels with a step size that they have settled on themselves, the NUTS of the others, whose algorithm is ours, with the
step size of our NUTS. Pyro runs one chain, which is what it can do in one process; the others run all chains at once.
Neither compiling nor predicting is counted.

``worst`` and ``median`` are effective sample sizes of the bulk (rank-normalised) over the held-out predictions. If a
contestant draws little in its time, that is a rough estimate. So ``by NUTS`` says what the gradients of the other
libraries are worth: their number per second times the worst effective samples per gradient of the one NUTS, ours or
theirs, that made the most gradients.

    python -m benchmarks.performance.effective_samples \
        [--root data] [--target a b] [--chains 16] [--seconds 60] [--json FILE]

Where JAX and NumPyro aren't installed a line says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import NUTS as PyroNUTS
from torch import Tensor

from benchmarks.harness import print_table
from benchmarks.performance.sampler_gradients import Problem, PyroNet, numpyro_model, problem
from pyro_symmetric.mcmc import HMC, NUTS, AdaptiveHMC, Density, State
from pyro_symmetric.mcmc.kernels.adaptation import StepSizeAdaptation
from pyro_symmetric.mcmc.starts import starting_points
from pyro_symmetric.posterior.statistics import chain_statistics

HELD_OUT = 10  # every tenth row
Step = Callable[[], tuple[Tensor, int]]  # one iteration -> positions of the chains (C, D), gradients that it needed


@dataclass(eq=False)
class Setting:
    """The setting that all contestants share.

    :param warm: the chains after warm-up, with their mass matrix.
    :param settle: iterations in which a kernel of ours finds its own step size, which aren't measured.
    """

    problem: Problem
    density: Density
    warm: State
    settle: int
    step_size: float = field(init=False)  # of our NUTS

    @property
    def names(self) -> list[str]:
        return list(self.density.layout.site_shapes)

    def pieces(self, z: Tensor) -> list[Tensor]:
        """Positions ``(C, D)`` -> each site's ``(C, *shape)``, in our order."""
        return list(self.density.layout.constrain(z).values())

    def variances(self) -> list[Tensor]:
        """Each site's flat diagonal of the inverse mass matrix."""
        return [piece.flatten() for piece in self.pieces(self.warm.tuning.mass.variance[None])]


# contestants --------------------------------------------------------------------------------------------------------


def ours(setting: Setting, kernel: HMC | NUTS | AdaptiveHMC) -> Step:
    fresh = kernel.init(setting.density, setting.warm.z, 0, setting.warm.generator).tuning
    step_size = setting.warm.tuning.step_size
    search = StepSizeAdaptation.start(step_size, kernel.target_accept)
    tuning = replace(fresh, step_size=step_size, search=search, mass=setting.warm.tuning.mass, learns=True)
    if isinstance(kernel, AdaptiveHMC):
        tuning = replace(tuning, length=setting.warm.tuning.length)
    held = [replace(setting.warm, tuning=tuning)]
    for iteration in range(setting.settle):
        held[0] = kernel.step(setting.density, held[0])
        held[0] = kernel.adapt(setting.density, held[0], iteration, setting.settle)
    if isinstance(kernel, NUTS):
        setting.step_size = float(held[0].tuning.step_size[0])

    def step() -> tuple[Tensor, int]:
        held[0] = kernel.step(setting.density, held[0])
        return held[0].z, int(held[0].statistics["n_steps"].sum())

    return step


def pyro_nuts(setting: Setting, jit: bool) -> Step:
    x, y = setting.problem.x, setting.problem.y
    model = PyroNet(setting.problem)
    options = {"jit_compile": jit, "ignore_jit_warnings": True, "jit_options": {"check_trace": False}}
    kernel = PyroNUTS(model, adapt_step_size=False, adapt_mass_matrix=False, step_size=setting.step_size, **options)
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    at = dict(zip(names, (piece[0] for piece in setting.pieces(setting.warm.z)), strict=True))
    kernel.initial_params = at  # before setup, which keeps the energy of where it starts
    kernel.setup(0, x, y)
    variances = dict(zip(names, setting.variances(), strict=True))
    kernel.mass_matrix_adapter.inverse_mass_matrix = {
        tuple(sorted(names)): torch.cat([variances[name] for name in sorted(names)])
    }
    held, count, potential_fn = [at], [0], kernel.potential_fn

    def counted(z: Any) -> Tensor:
        count[0] += 1
        return potential_fn(z)

    kernel.potential_fn = counted

    def step() -> tuple[Tensor, int]:
        before = count[0]
        held[0] = kernel.sample(held[0])
        return torch.cat([held[0][name].flatten() for name in names])[None], count[0] - before

    return step


def numpyro_nuts(setting: Setting) -> Step:
    import jax
    import jax.numpy as jnp
    from numpyro.infer import NUTS as NumPyroNUTS
    from numpyro.infer.util import initialize_model

    names = ["w1", "b1", "w2", "b2"]
    positions, variances = (
        {name: jnp.asarray(piece.numpy()) for name, piece in zip(names, pieces, strict=True)}
        for pieces in (setting.pieces(setting.warm.z), setting.variances())
    )
    info = initialize_model(jax.random.PRNGKey(0), numpyro_model(setting.problem), dynamic_args=False)
    kernel = NumPyroNUTS(  # of the potential, since starting points needn't be found
        potential_fn=info.potential_fn,
        step_size=setting.step_size,
        inverse_mass_matrix=jnp.concatenate([variances[name] for name in sorted(names)]),
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    keys = jax.random.split(jax.random.PRNGKey(0), len(setting.warm.z))
    held = [kernel.init(keys, 0, positions)]
    advance = jax.jit(lambda state: kernel.sample(state, (), {}))

    def step() -> tuple[Tensor, int]:
        held[0] = jax.block_until_ready(advance(held[0]))
        z = held[0].z
        flat = torch.cat([torch.tensor(np.asarray(z[n])).flatten(1) for n in names], 1)
        return flat, int(held[0].num_steps.sum())

    return step


def contestants(setting: Setting) -> dict[str, Callable[[], Step]]:
    """NUTS of ours comes first: it finds the step size of the others'."""
    found: dict[str, Callable[[], Step]] = {
        "NUTS": lambda: ours(setting, NUTS(None, adapt_mass=False)),
        "AdaptiveHMC": lambda: ours(setting, AdaptiveHMC(None, adapt_mass=False)),
        "HMC": lambda: ours(setting, HMC(None, adapt_mass=False)),
        "Pyro NUTS, one chain": lambda: pyro_nuts(setting, jit=False),
        "Pyro NUTS, one chain, jit": lambda: pyro_nuts(setting, jit=True),
    }
    if importlib.util.find_spec("numpyro") is not None:
        found["NumPyro NUTS, vectorised"] = lambda: numpyro_nuts(setting)
    return found


# measuring ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One contestant's result: effective draws of the worst and the median prediction, gradients, draws, seconds."""

    worst: float
    median: float
    r_hat: float
    gradients: int
    draws: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.gradients / self.seconds


def measure(step: Step, predict: Callable[[Tensor], Tensor], seconds: float, clock: Callable[[], float]) -> Measured:
    step()  # compiles what it compiles
    spent, gradients, draws = 0.0, 0, []
    while spent < seconds or len(draws) < 8:
        start = clock()
        z, needed = step()
        spent += clock() - start
        gradients += needed
        draws.append(predict(z))
    found = chain_statistics(torch.stack(draws, 1))
    ess = found.ess_bulk
    return Measured(float(ess.min()), float(ess.median()), float(found.r_hat.max()), gradients, len(draws), spent)


def is_rival(contestant: str) -> bool:
    return contestant.startswith(("Pyro", "NumPyro"))


def warmed_up(density: Density, chains: int, warmup: int, seconds: float, clock: Callable[[], float]) -> State:
    """Adapted chains that were run on, so that contestants don't start on their way to the posterior."""
    kernel = AdaptiveHMC(None)
    z, generator = starting_points(density, chains), torch.Generator().manual_seed(torch.initial_seed())
    state = kernel.init(density, z, warmup, generator)
    for iteration in range(warmup):
        state = kernel.step(density, state)
        state = kernel.adapt(density, state, iteration, warmup)
    start = clock()
    while clock() - start < seconds:
        state = kernel.step(density, state)
    return state


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    clock = time.process_time if options.cpu_time else time.perf_counter
    whole = problem(name, options.root)
    held_out = torch.arange(len(whole.x)) % HELD_OUT == 0
    target = replace(whole, x=whole.x[~held_out].contiguous(), y=whole.y[~held_out].contiguous())
    torch.manual_seed(options.seed)
    model = target.model()
    density = Density(model, args=(target.x, target.y))
    start = clock()
    warm = warmed_up(density, options.chains, options.warmup, options.burn_in, clock)
    setting = Setting(target, density, warm, options.settle)
    tuning = setting.warm.tuning
    print(
        f"\n({name}) warmed up in {clock() - start:.0f} s: step size {float(tuning.step_size):.3g}, longest trajectory "
        f"{float(tuning.length.log_length.exp()):.3g}, energy {float(setting.warm.density.mean()):.1f}"
    )

    def predict(z: Tensor) -> Tensor:
        with torch.no_grad():
            return model.outputs(density.layout.constrain(z), whole.x[held_out]).flatten(1)

    results: dict[str, Measured] = {}
    for contestant, make in contestants(setting).items():
        if options.only and contestant not in options.only:
            continue
        pyro.set_rng_seed(options.seed)
        seconds = options.rival_seconds if is_rival(contestant) else options.seconds
        results[contestant] = measure(make(), predict, seconds, clock)
        print(f"  {contestant}: {results[contestant]}", flush=True)
    report(name, target, results, options)
    return {contestant: vars(found) for contestant, found in results.items()}


def report(name: str, target: Problem, results: dict[str, Measured], options: argparse.Namespace) -> None:
    nuts = max((found for label, found in results.items() if "NUTS" in label), key=lambda found: found.gradients)
    best = results["AdaptiveHMC"].worst / results["AdaptiveHMC"].seconds
    rows = []
    for label, found in results.items():
        priced = found.rate * nuts.worst / nuts.gradients
        rows.append(
            [
                label,
                f"{1000 * found.worst / found.gradients:.2f}",
                f"{1000 * found.median / found.gradients:.2f}",
                f"{found.r_hat:.2f}",
                f"{found.rate:,.0f}",
                f"{found.worst / found.seconds:.2f}",
                f"{best / (found.worst / found.seconds):.1f}",
                f"{priced:.2f}" if is_rival(label) else "",
                f"{best / priced:.1f}" if is_rival(label) else "",
            ]
        )
    print_table(
        f"({name}) {target.inputs}-{target.hidden}-{target.outputs}, {len(target.x)} rows, {options.chains} chains, "
        f"{options.seconds:g} s each (others {options.rival_seconds:g} s), {options.threads} thread(s), "
        f"{'processor' if options.cpu_time else 'wall'} time",
        [
            "",
            "worst/1,000 gradients",
            "median",
            "R-hat",
            "gradients/s",
            "worst/s",
            "AdaptiveHMC is x",
            "by NUTS",
            "AdaptiveHMC is x",
        ],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", nargs="+", choices=["a", "b"], default=["a", "b"])
    parser.add_argument("--root", type=Path, help="folder that holds uci/energy; without, random numbers for (a)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the contestants, NUTS and AdaptiveHMC at least")
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=400, help="iterations of the common warm-up")
    parser.add_argument("--burn-in", type=float, default=60.0, help="seconds that the chains are then run on")
    parser.add_argument("--settle", type=int, default=50, help="iterations in which our kernels find their step size")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each contestant")
    parser.add_argument("--rival-seconds", type=float, help="for those of other libraries; short runs tell their rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time: for busy machines, 1 thread")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    options.rival_seconds = options.seconds if options.rival_seconds is None else options.rival_seconds
    if options.threads == 1:  # before JAX starts its threads
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")  # of torch.jit about itself
    if importlib.util.find_spec("numpyro") is None:
        print("NumPyro isn't installed: left out")
    found = {}
    for name in options.target:
        found[name] = compare(name, options)
        if options.json is not None:
            options.json.write_text(json.dumps({"settings": vars(options), "results": found}, indent=1, default=str))


if __name__ == "__main__":
    main()
