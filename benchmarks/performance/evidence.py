r"""Evidence by every method for mixtures and factors, beside annealed runs and
published values.

    python -m benchmarks.performance.evidence --seeds 4

*galaxies*: the mixtures of Chib (1995, "Marginal likelihood from the Gibbs output"), of
equal or free variances, with his priors: shares uniform, locations N(20, 100),
variances inverse gamma (3, 20). His table has -240.464, -228.620 and -224.138 for two
and three components of equal variance and three of free variance. Neal (1999,
"Erroneous results in 'Marginal likelihood from the Gibbs output'") found that the first
two lack log k! (0.693 and 1.792), as the chains saw one labelling alone, and that the
third is wrong: -239.76, -226.84 and -226.80 are averages of the likelihood over 10^8
draws of the prior, as a public replication of Chib's paper in Julia reports them.

*factors*: 60 rows of 6 columns made of two sparse factors; loadings Student(3), so that
nothing but exchanges and signs of factors is free.

``annealed`` is the mean over seeds of sequential Monte Carlo over powers of the
likelihood, from 0 to 1: rises that keep 95 % of particles effective, systematic
resampling, trajectories of HMC of five steps each, their step size adapted to accept 80
%; ± its standard error. The others: a Gaussian fitted to the first halves of 16 chains,
symmetrised by ``ExactOrbit``; bridge to the second halves.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, parse, parser, print_table
from pyro_symmetric.density.density import Density

GALAXIES = torch.tensor([
    9172, 9350, 9483, 9558, 9775, 10227, 10406, 16084, 16170, 18419, 18552, 18600, 18927, 19052, 19070, 19330, 19343,
    19349, 19440, 19473, 19529, 19541, 19547, 19663, 19846, 19856, 19863, 19914, 19918, 19973, 19989, 20166, 20175,
    20179, 20196, 20215, 20221, 20415, 20629, 20795, 20821, 20846, 20875, 20986, 21137, 21492, 21701, 21814, 21921,
    21960, 22185, 22209, 22242, 22249, 22314, 22374, 22495, 22746, 22747, 22888, 22914, 23206, 23241, 23263, 23484,
    23538, 23542, 23666, 23706, 23711, 24129, 24285, 24289, 24366, 24717, 24990, 25633, 26960, 26995, 32065, 32789,
    34279,
]).float() / 1000  # fmt: skip
PUBLISHED = {
    "galaxies 2 equal": -239.76,
    "galaxies 3 equal": -226.84,
    "galaxies 3": -226.80,
}
PROBLEMS = (
    "galaxies 2 equal",
    "galaxies 3 equal",
    "galaxies 3",
    "galaxies 4",
    "factors 1",
    "factors 2",
    "factors 3",
)


def mixture(count: int, equal: bool) -> tuple[Callable[..., None], ps.Group]:
    def model(data: Tensor, observed: bool = True) -> None:
        shares = pyro.sample("shares", dist.Dirichlet(torch.ones(count)))
        locs = pyro.sample("locs", dist.Normal(20.0, 10.0).expand([count]).to_event(1))
        variances = pyro.sample(
            "variances",
            dist.InverseGamma(3.0, 20.0).expand([1 if equal else count]).to_event(1),
        )
        if observed:
            rows = dist.MixtureSameFamily(
                dist.Categorical(shares),
                dist.Normal(locs, variances.sqrt().expand(count)),
            )
            pyro.sample("velocities", rows.expand([len(data)]).to_event(1), obs=data)

    sites = ("shares", "locs") if equal else ("shares", "locs", "variances")
    return model, ps.Group.declare(
        {s: ("component",) for s in sites}, {s: torch.Size([count]) for s in sites}
    )


def factors(count: int) -> tuple[Callable[..., None], ps.Group]:
    def model(data: Tensor, observed: bool = True) -> None:
        width = data.shape[-1]
        loadings = pyro.sample(
            "loadings", dist.StudentT(3.0, 0.0, 0.5).expand([width, count]).to_event(2)
        )
        noise = pyro.sample(
            "noise", dist.LogNormal(-0.5, 0.5).expand([width]).to_event(1)
        )
        if observed:
            rows = dist.LowRankMultivariateNormal(
                torch.zeros(width), loadings, noise.square()
            )
            pyro.sample("rows", rows.expand([len(data)]).to_event(1), obs=data)

    axes, shapes = {"loadings": (None, "factor")}, {"loadings": torch.Size([6, count])}
    return model, ps.Group.declare(axes, shapes, moves=("permute", "flip"))


def factor_data() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    loadings = torch.tensor(
        [[1.2, 0.0], [1.0, 0.0], [0.8, 0.1], [0.0, 1.1], [0.1, 0.9], [0.0, 0.8]]
    )
    hidden, noise = (
        torch.randn(60, 2, generator=generator),
        torch.randn(60, 6, generator=generator),
    )
    return hidden @ loadings.mT + 0.6 * noise


def problem(name: str) -> tuple[Callable[..., None], ps.Group, Tensor]:
    kind, count, *equal = name.split()
    if kind == "galaxies":
        return *mixture(int(count), bool(equal)), GALAXIES
    return *factors(int(count)), factor_data()


# the truth ----------------------------------------------------------------------------


def annealed(
    model: Callable[..., None], data: Tensor, particles: int, moves: int, seed: int
) -> float:
    """The log-evidence by sequential Monte Carlo over powers of the likelihood."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    joint, prior = (
        Density(model, (data,), dtype=torch.float64),
        Density(model, (data, False), dtype=torch.float64),
    )
    z = prior.draw_prior(particles, generator)
    power, total, step = 0.0, 0.0, 0.1
    while power < 1:
        gain = (prior.energy(z) - joint.energy(z)).double()
        rise = _rise(gain, 1 - power)
        power, weights = power + rise, (rise * gain).softmax(0)
        total += float((rise * gain).logsumexp(0)) - math.log(particles)
        places = (torch.rand(1) + torch.arange(particles)) / particles
        z = z[
            torch.searchsorted(weights.cumsum(0), places.double()).clamp(
                max=particles - 1
            )
        ]
        scale = z.std(0)
        for _ in range(moves):
            z, accepted = _trajectory(joint, prior, z, power, step * scale)
            step *= math.exp(accepted - 0.8) ** 0.3
    return total


def _rise(gain: Tensor, left: float) -> float:
    """The largest step of the power that leaves 95 % of the particles effective, by
    bisection.
    """

    def effective(rise: float) -> float:
        weights = (rise * gain).softmax(0)
        return float(1 / (weights**2).sum()) / len(gain)

    low, high = 0.0, left
    if effective(left) > 0.95:
        return left
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if effective(middle) > 0.95 else (low, middle)
    return high


def _trajectory(
    joint: Density, prior: Density, z: Tensor, power: float, step: Tensor
) -> tuple[Tensor, float]:
    """One trajectory of five steps; particles after it, and the share that was
    accepted.
    """

    def energy_and_gradient(z: Tensor) -> tuple[Tensor, Tensor]:
        (u, du), (v, dv) = (
            joint.energy_and_gradient(z)[:2],
            prior.energy_and_gradient(z)[:2],
        )
        return power * u + (1 - power) * v, power * du + (1 - power) * dv

    start = torch.randn_like(z)
    energy, gradient = energy_and_gradient(z)
    before, w, momentum = energy + start.square().sum(-1) / 2, z, start
    for _ in range(5):
        momentum = momentum - step * gradient / 2
        w = w + step * momentum
        energy, gradient = energy_and_gradient(w)
        momentum = momentum - step * gradient / 2
    accept = (
        (before - energy - momentum.square().sum(-1) / 2)
        .nan_to_num(-math.inf)
        .exp()
        .clamp(max=1)
    )
    taken = torch.rand_like(accept) < accept
    return torch.where(taken[:, None], w, z), float(accept.mean())


# ours ---------------------------------------------------------------------------------


def estimate(name: str, options: Any) -> Row:
    model, group, data = problem(name)
    begin = time.process_time()
    truths = [
        annealed(model, data, options.particles, options.moves, seed)
        for seed in range(options.seeds)
    ]
    middle, chains = time.process_time(), 16
    pyro.set_rng_seed(0)
    draws = options.draws
    posterior = ps.sample(
        ps.HMC(model, num_steps=10), data, num_samples=draws, num_warmup=draws, num_chains=chains, seed=0,
        progress=False,
    )  # fmt: skip
    first, second = (
        posterior.select(draws=half)
        for half in (slice(0, draws // 2), slice(draws // 2, None))
    )
    guide = ps.guides.fit_gaussian(first, group)
    found = ps.evidence(
        guide,
        data,
        posterior=second,
        estimator=ps.ExactOrbit(),
        num_samples=8 * draws,
        chunk=1000,
    )
    print(f"{name}\n{found}", flush=True)
    return {
        "truth": statistics.fmean(truths),
        "truth_error": statistics.stdev(truths) / math.sqrt(len(truths))
        if len(truths) > 1
        else math.nan,
        "truth_seconds": (middle - begin) / options.seeds,
        "seconds": time.process_time() - middle,
        "evidence": asdict(replace(found, units=None)),
    }


def main() -> None:
    arguments = parser(__doc__, seeds=4)
    arguments.add_argument("--only", help="problems whose names hold this")
    arguments.add_argument(
        "--particles", type=int, default=1000, help="of an annealed run"
    )
    arguments.add_argument(
        "--moves",
        type=int,
        default=10,
        help="trajectories after each rise of the power",
    )
    arguments.add_argument(
        "--draws",
        type=int,
        default=500,
        help="of each of 16 chains, after as many to warm up",
    )
    options = parse(arguments)
    if options.quick:
        options.particles, options.moves, options.draws = 64, 2, 50
    results = Results.of(options, "seeds", "particles", "moves", "draws")
    names = [name for name in PROBLEMS if not options.only or options.only in name]
    results.fill(lambda problem: estimate(problem, options), problem=names)
    found = {row["problem"]: row for row in results.rows if row["problem"] in names}
    print_table(
        "log-evidence, nats",
        [
            "problem",
            "published",
            "annealed",
            "ELBO",
            "symmetrised",
            "importance",
            "Pareto-k",
            "bridge",
            "doubts",
        ],
        [line(row) for row in found.values()],
    )


def line(row: Row) -> list[str]:
    found = SimpleNamespace(**row["evidence"])
    return [
        row["problem"],
        f"{PUBLISHED[row['problem']]:.2f}" if row["problem"] in PUBLISHED else "",
        f"{row['truth']:.2f} ± {row['truth_error']:.2f}",
        f"{found.elbo:.2f}",
        f"{found.symmetrized_elbo:.2f}",
        f"{found.importance['log_evidence']:.2f} ± {found.importance['error']:.2f}",
        f"{found.pareto_k:.2f}",
        f"{found.bridge['log_evidence']:.2f} ± {found.bridge['error']:.2f}"
        if found.bridge
        else "",
        str(len(found.doubts)),
    ]


if __name__ == "__main__":
    main()
