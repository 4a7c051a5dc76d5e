"""Effective draws for each gradient and second, from one warmed-up state: HMC of several lengths, NUTS, MEADS, others.

    python -m benchmarks.performance.many_chain_kernels --data-dir DATA --targets energy digits schools --chains 16

Every contestant starts from the same chains, step size and mass matrix, which HMC has learnt, and spends the same
number of gradients. What counts is the worst prediction: its effective sample size (bulk, rank-normalised) over all
chains. Where R-hat is above 1.01 or so the run was too short for it: what the number then tells is how far chains are
apart.
MEADS (Hoffman & Sountsov 2022, AISTATS, algorithm 3) is written out here only, to be compared with.

Targets: ``energy``, UCI energy with an 8-50-1 tanh network and noise 0.1; ``digits``, a 64-32-10 ReLU network;
``schools``, eight schools, not centred.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import pyro_symmetric as ps
from pyro_symmetric.chain_statistics import chain_statistics
from pyro_symmetric.mcmc import HMC, NUTS, AdaptiveHMC, Density, State
from pyro_symmetric.mcmc.starts import starting_points


@dataclass(frozen=True)
class Target:
    """A density, and what is predicted from positions ``(C, D)``: ``(C, K)``."""

    density: Density
    predict: Callable[[Tensor], Tensor]


def network(net: nn.Module, likelihood: object, x: Tensor, y: Tensor, test: Tensor) -> Target:
    model = ps.BayesianModel(net, likelihood=likelihood)
    density = Density(model, args=(x, y))
    return Target(density, lambda z: model.outputs(density.layout.constrain(z), test).flatten(1))


def energy(folder: Path) -> Target:
    import numpy

    place = folder / "uci" / "energy"
    table = torch.tensor(numpy.loadtxt(place / "data.txt"))
    features = torch.tensor(numpy.loadtxt(place / "index_features.txt", dtype=int))
    target = int(numpy.loadtxt(place / "index_target.txt"))
    train = torch.tensor(numpy.loadtxt(place / "index_train_0.txt", dtype=int))
    test = torch.tensor(numpy.loadtxt(place / "index_test_0.txt", dtype=int))
    table = ((table - table[train].mean(0)) / table[train].std(0)).float()
    x, y = table[:, features], table[:, target]
    net = nn.Sequential(nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 1))
    return network(net, ps.GaussianLikelihood(0.1), x[train], y[train], x[test])


def digits(folder: Path) -> Target:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16).float(), torch.tensor(y)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return network(net, ps.CategoricalLikelihood(), x[:1437], y[:1437], x[1437:1497])


def schools(folder: Path) -> Target:
    y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
    errors = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64)

    def model() -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=torch.float64), 5.0))
        spread = pyro.sample("spread", dist.HalfCauchy(torch.tensor(5.0, dtype=torch.float64)))
        offsets = pyro.sample("offsets", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
        pyro.sample("y", dist.Normal(mean[..., None] + spread[..., None] * offsets, errors).to_event(1), obs=y)

    return Target(Density(model, dtype=torch.float64), lambda z: z)


TARGETS = {"energy": energy, "digits": digits, "schools": schools}


class Meads:
    """Generalised HMC: one leapfrog step, a momentum that is kept in part, a slice that moves on steadily."""

    def __init__(self, density: Density, state: State, multiplier: float, folds: int = 4):
        chains = len(state.z)
        self.density, self.multiplier, self.folds, self.iteration = density, multiplier, folds, 0
        self.z, self.energy, self.gradient = state.z.clone(), state.energy.clone(), state.gradient.clone()
        self.momentum, self.slice = torch.randn_like(self.z), 2 * torch.rand_like(self.energy) - 1
        self.fold = torch.arange(chains) % folds
        self.step_size = state.tuning.step_size.expand(chains, 1).clone()
        self.forgotten = torch.full_like(self.step_size, 0.5)
        self.scale = state.tuning.mass.variance.sqrt().expand_as(self.z).clone()

    def step(self) -> None:
        self._adapt()
        kept = (1 - self.forgotten).sqrt() * self.momentum + self.forgotten.sqrt() * torch.randn_like(self.z)
        level = (self.slice + 1 + self.forgotten[:, 0] / 2) % 2 - 1
        before = self.energy + 0.5 * kept.square().sum(-1)
        p = kept - 0.5 * self.step_size * self.scale * self.gradient
        z = self.z + self.step_size * self.scale * p
        energy, gradient = self.density.energy_and_gradient(z)
        p = p - 0.5 * self.step_size * self.scale * gradient
        error = energy + 0.5 * p.square().sum(-1) - before
        accept = level.abs().log() < -error
        moved = accept[:, None]
        self.slice = torch.where(accept, level * error.exp(), level)
        self.z, self.gradient = torch.where(moved, z, self.z), torch.where(moved, gradient, self.gradient)
        self.energy, self.momentum = torch.where(accept, energy, self.energy), torch.where(moved, p, -kept)
        self.iteration += 1

    def _adapt(self) -> None:
        """One fold's settings, from another fold's chains."""
        source = self.fold == self.iteration % self.folds
        aim = self.fold == (self.iteration + 1) % self.folds
        scale = self.z[source].std(0)
        step = (self.multiplier / largest_eigenvalue(self.gradient[source] * scale).sqrt()).clamp(max=1.0)
        slowest = largest_eigenvalue((self.z[aim] - self.z[aim].mean(0)) / scale).rsqrt()
        damping = torch.maximum(slowest, 1 / ((self.iteration + 1) * step))
        self.step_size[aim], self.scale[aim] = step, scale
        self.forgotten[aim] = 1 - (-2 * step * damping).exp()
        if self.iteration % self.folds == 0:
            self.fold = self.fold[torch.randperm(len(self.fold))]


def largest_eigenvalue(rows: Tensor) -> Tensor:
    gram = rows @ rows.mT
    return gram.square().sum() / gram.diagonal().sum() / len(rows)


def measure(target: Target, state: State, budget: int, lengths: list[float]) -> None:
    """Print a line for each contestant."""
    evaluate, count = target.density.energy_and_gradient, [0]

    def counted(z: Tensor, rows: object = None) -> tuple[Tensor, Tensor]:
        count[0] += len(z)
        return evaluate(z)

    target.density.energy_and_gradient = counted  # type: ignore[method-assign]

    def run(name: str, step: Callable[[], Tensor], thinning: int = 1) -> None:
        torch.manual_seed(2)
        count[0], draws, start = 0, [], time.perf_counter()
        while count[0] < budget * len(state.z):
            for _ in range(thinning):
                z = step()
            draws.append(target.predict(z).detach())
        seconds = time.perf_counter() - start
        if len(draws) < 4:
            print(f"  {name:<22} too few draws")
            return
        found = chain_statistics(torch.stack(draws, 1))
        worst, median, r_hat = float(found.ess_bulk.min()), float(found.ess_bulk.median()), float(found.r_hat.max())
        per = 1000 / count[0]
        row = f"{worst * per:>8.2f} {median * per:>8.2f} {worst / seconds:>9.2f} {r_hat:>7.3f} {len(draws):>7}"
        print(f"  {name:<22} {row}", flush=True)

    heads = f"{'worst':>8} {'median':>8} {'worst/s':>9} {'R-hat':>7} {'draws':>7}"
    print(f"  {'':<22} {heads}   (ESS per 1,000 gradients; per second)")
    contestants = {f"HMC, mean time {t:g}": HMC(None, trajectory_length=t, max_steps=4000) for t in lengths}
    for name, kernel in {**contestants, "AdaptiveHMC as it starts": AdaptiveHMC(None), "NUTS": NUTS(None)}.items():
        tuned = kernel.init(target.density, state.z, 0, state.generator).tuning
        tuning = replace(tuned, step_size=state.tuning.step_size, mass=state.tuning.mass)
        held = [replace(state, tuning=tuning)]

        def step(kernel: HMC | NUTS | AdaptiveHMC = kernel, held: list[State] = held) -> Tensor:
            held[0] = kernel.step(target.density, held[0])
            return held[0].z

        run(name, step)
    for multiplier in (0.5, 1.0):
        meads = Meads(target.density, state, multiplier)

        def advance(meads: Meads = meads) -> Tensor:
            meads.step()
            return meads.z

        run(f"MEADS, {multiplier:g}", advance, thinning=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--data-dir", type=Path, default=Path("data"), help="folder that holds uci/energy")
    parser.add_argument("--chains", type=int, default=16, help="a multiple of 4")
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--gradients", type=int, default=2000, help="for each chain and contestant")
    parser.add_argument("--lengths", type=float, nargs="*", default=[0.35, 0.7, 1.4, 2.8], help="mean times of HMC")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.targets:
        torch.manual_seed(1)
        target = TARGETS[name](options.data_dir)
        kernel = HMC(None, trajectory_length=0.7, max_steps=64)
        z, generator = starting_points(target.density, options.chains), torch.Generator().manual_seed(1)
        state = kernel.init(target.density, z, options.warmup, generator)
        for iteration in range(options.warmup):
            state = kernel.step(target.density, state)
            state = kernel.adapt(target.density, state, iteration, options.warmup)
        print(f"\n{name}: {options.chains} chains, step size {float(state.tuning.step_size):.3g}")
        measure(target, state, options.gradients, options.lengths)


if __name__ == "__main__":
    main()
