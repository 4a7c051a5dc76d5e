"""Stochastic-gradient samplers beside plain PyTorch, in one run: speed, and what the draws predict.

The target: digits (1,437 rows for training, 360 for testing), a 64-32-10 ReLU network, softmax likelihood, N(0, 1)
weights: 2,410 of them; mini-batches of 128. First, gradient steps of all chains per second: this library's kernels,
SGHMC by ``vmap(grad(functional_call))``, and by a loop over chains with autograd. Then the test set's negative
log-likelihood under the average of the draws of each kernel, all given the same number of gradient steps and left to
find their steps themselves, beside HMC on all data as the reference.

    python -m benchmarks.performance.stochastic_gradients [--chains 16] [--steps 4000] [--threads 1] [--rounds 5]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from pyro_symmetric import BayesianModel
from pyro_symmetric.mcmc import HMC, SGHMC, SGLD, Density, Kernel, pSGLD, sample
from pyro_symmetric.mcmc.starts import starting_points

BATCH, STEPS = 128, 20


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return x[:1437], y[:1437], x[1437:], y[1437:]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def kernels(model: BayesianModel) -> dict[str, Kernel]:
    """Every kernel with its default settings."""
    noisy = {"batch_size": BATCH, "replacement": True}
    return {
        "SGLD": SGLD(model, batch_size=BATCH),
        "pSGLD": pSGLD(model, batch_size=BATCH),
        "SGHMC": SGHMC(model, batch_size=BATCH),
        "SGHMC, noise estimated": SGHMC(model, noise_estimate="auto", **noisy),
    }


# speed --------------------------------------------------------------------------------------------------------------


def peers(chains: int) -> dict[str, Callable[[], None]]:
    """``STEPS`` steps of SGHMC on all chains, by means that everybody has at hand."""
    x, y, _, _ = digits()
    net = network()
    step, keep, spread = 1e-3, 0.95, math.sqrt(1 - 0.95**2)

    def energy(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(functional_call(net, weights, (x[rows],)), y[rows], reduction="sum")
        return loss * len(x) / BATCH + 0.5 * sum(w.square().sum() for w in weights.values())  # type: ignore[return-value]

    stacked = {name: 0.1 * torch.randn(chains, *p.shape) for name, p in net.named_parameters()}
    momenta = {name: torch.randn_like(w) for name, w in stacked.items()}
    gradient = vmap(grad(energy))

    def by_vmap() -> None:
        for _ in range(STEPS):
            gradients = gradient(stacked, torch.randint(len(x), (chains, BATCH)))
            for name, w in stacked.items():
                momenta[name].mul_(keep).sub_(step * gradients[name]).add_(spread * torch.randn_like(w))
                w.add_(step * momenta[name])

    nets = [network() for _ in range(chains)]

    def by_loop() -> None:
        for own in nets:
            parameters = list(own.parameters())
            speeds = [torch.randn_like(p) for p in parameters]
            for _ in range(STEPS):
                rows = torch.randint(len(x), (BATCH,))
                loss = nn.functional.cross_entropy(own(x[rows]), y[rows], reduction="sum") * len(x) / BATCH
                loss = loss + 0.5 * sum(p.square().sum() for p in parameters)
                with torch.no_grad():
                    for p, r, g in zip(parameters, speeds, torch.autograd.grad(loss, parameters), strict=True):
                        r.mul_(keep).sub_(step * g).add_(spread * torch.randn_like(r))
                        p.add_(step * r)

    return {"loop over chains, autograd": by_loop, "vmap(grad(functional_call))": by_vmap}


def ours(kernel: Kernel, chains: int) -> Callable[[], None]:
    """The same number of steps by a kernel after its warm-up."""
    x, y, _, _ = digits()
    kernel = replace(kernel, step_size=1e-6, num_steps=STEPS)  # type: ignore[call-arg]
    density = Density(kernel.model, args=(x, y), batch_size=BATCH, subsampled=True)
    state = kernel.init(density, starting_points(density, chains), 0, torch.Generator().manual_seed(0))

    def run() -> None:
        kernel.step(density, state)

    return run


def measure(runs: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Best seconds of each, over interleaved rounds."""
    best = dict.fromkeys(runs, math.inf)
    for _ in range(rounds + 1):  # the first warms up
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


# quality ------------------------------------------------------------------------------------------------------------


def quality(name: str, kernel: Kernel, chains: int, steps: int) -> str:
    """A row of the table: test likelihood and temperatures after ``steps`` gradient steps of each chain."""
    x, y, x_test, y_test = digits()
    warmup, draws = steps // 20, steps // 20  # in iterations of ten steps: half of the steps each
    if isinstance(kernel, HMC):
        warmup = draws = max(steps // (2 * 32), 1)
    posterior = sample(kernel, x, y, num_chains=chains, num_warmup=warmup, num_samples=draws, seed=0, progress=False)
    likelihood = kernel.model.log_likelihood(posterior.get_samples(), x_test, y_test)  # type: ignore[attr-defined]
    nll = -(likelihood.logsumexp(0) - math.log(len(likelihood))).mean()
    virial = posterior.statistics.get("virial")
    temperature = "" if virial is None else f"{float(virial.nanmean()):>8.3f}"
    seconds = sum(posterior.metadata["seconds"].values())
    return f"  {name:<28} {float(nll):>8.4f} {seconds:>8.1f} {temperature}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4000, help="gradient steps of each chain, for the quality")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = BayesianModel(network())
    contestants = {**peers(options.chains)}
    contestants |= {name: ours(kernel, options.chains) for name, kernel in kernels(model).items()}
    seconds = measure(contestants, options.rounds)
    base = seconds["loop over chains, autograd"]
    print(f"{options.chains} chains, {options.threads} threads: chains x gradients a second, and times the loop")
    for name, value in seconds.items():
        print(f"  {name:<28} {options.chains * STEPS / value:>8.0f} {base / value:>8.2f}x", flush=True)
    if options.steps:
        print(f"\n{options.steps} gradient steps of each chain: test negative log-likelihood, seconds, virial")
        reference: dict[str, Kernel] = {"HMC on all data": HMC(model, num_steps=32)}
        for name, kernel in (kernels(model) | reference).items():
            print(quality(name, kernel, options.chains, options.steps), flush=True)


if __name__ == "__main__":
    main()
