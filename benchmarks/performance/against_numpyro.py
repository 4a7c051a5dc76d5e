r"""Posteriors beside NumPyro's NUTS and quadrature: means, variances and quantiles within Monte Carlo error, or not.

    python -m benchmarks.performance.against_numpyro \
        --root DATA [--target energy weights schools logistic] [--json results.json]

Every target is written for Pyro and for NumPyro, and sampled by this library's Hamiltonian kernels and by NumPyro's
NUTS, each from its own starting points and with a warm-up of its own, all in float64:

* ``energy``: UCI energy (768 rows), an 8-50-1 tanh network with N(0, 1/fan-in) weights and noise 0.1. Compared are
  predictions within and beyond the data, and the log-likelihood. Weights have symmetric copies, of which no chain
  visits all.
* ``weights``: ``f(x) = relu(w1 x) + relu(w2 x)``, whose posterior is known by quadrature as well.
* ``schools``: eight schools, not centred, with a half-Cauchy spread.
* ``logistic``: a logistic regression whose intercept and slope differ between 15 groups, with a covariance of their
  own: positive scales, and the Cholesky factor of a correlation matrix.

Of every quantity are compared the mean, the mean squared deviation, and the shares of draws below five thresholds: the
quantiles 5, 25, 50, 75 and 95 % of both samples together. Chains are independent, so the spread of their means is the
standard error, whatever the autocorrelation. z is the difference over it, and p comes from Welch's t distribution
(against quadrature: Student's). All passes if no p is below 0.01 over the number of comparisons: samplers that draw
from the same posterior fail in at most one run of a hundred. ``effective`` is the worst quantity's number of
independent draws by the same standard error; a mean's difference shows from about 5 deviations over its root on.

Without NumPyro only the comparison with quadrature is made. Without --root, ``energy`` takes random numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy import stats
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, print_table
from benchmarks.performance.sampler_gradients import problem

ALARM = 0.01  # of a whole run
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
COMPARED = ("mean", "variance", *(f"{level:.0%}" for level in LEVELS))
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Grid:
    """Points that stand for a posterior.

    :param points: weights of batch shape ``(P,)``.
    :param mass: of each point, ``(P,)``.
    :param step: distance of neighbours along every axis.
    """

    points: Weights
    mass: Tensor
    step: float


@dataclass(frozen=True)
class Target:
    """A posterior in both languages.

    :param model: for Pyro, called with ``args``.
    :param numpyro_model: the same for NumPyro, from a function that imports it.
    :param quantities: weights of batch shape ``(S,)`` -> name -> ``(S,)``.
    :param grid: where quadrature is possible.
    :param from_prior: whether chains start from the prior, or uniformly in (-2, 2) of the unconstrained space.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...]
    numpyro_model: Callable[[], Callable[[], None]]
    quantities: Callable[[Weights], dict[str, Tensor]]
    grid: Grid | None = None
    from_prior: bool = False
    target_accept: float = 0.8
    sizes: tuple[int, int, int] = (64, 500, 500)  # chains, iterations of warm-up, draws of each chain


# targets ------------------------------------------------------------------------------------------------------------


def energy(root: Path | None) -> Target:
    data = problem("a", root)
    x, y = data.x.double(), data.y.double()
    model = data.model().double()
    places = torch.cat([x[::128], 1.5 * x[48::192], torch.zeros_like(x[:1])])

    def numpyro_model() -> Callable[[], None]:
        import jax.numpy as jnp
        import numpyro
        import numpyro.distributions as nd

        inputs, targets = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())

        def weight(name: str, *shape: int) -> Any:
            scale = shape[1] ** -0.5 if len(shape) == 2 else 1.0
            return numpyro.sample(name, nd.Normal(jnp.zeros(shape), scale).to_event(len(shape)))

        def run() -> None:
            hidden = jnp.tanh(inputs @ weight("0.weight", 50, 8).T + weight("0.bias", 50))
            outputs = hidden @ weight("2.weight", 1, 50).T + weight("2.bias", 1)
            with numpyro.plate("data", len(inputs)):
                numpyro.sample("y", nd.Normal(outputs[:, 0], 0.1), obs=targets)

        return run

    def quantities(w: Weights) -> dict[str, Tensor]:
        found = {f"f(x{k})": column for k, column in enumerate(model.outputs(w, places)[..., 0].T)}
        return {**found, "log-likelihood": model.log_likelihood(w, x, y).sum(-1)}

    return Target(model, (x, y), numpyro_model, quantities, from_prior=True, sizes=(16, 300, 200))


def weights(root: Path | None) -> Target:
    x = torch.linspace(-2, 2, 16, dtype=torch.float64)
    noise = torch.tensor(np.random.default_rng(2).normal(size=16))
    y = (0.5 * x).relu() + (-0.5 * x).relu() + noise

    def outputs(w: Tensor) -> Tensor:
        return (w[..., None, :] * x[:, None]).relu().sum(-1)

    def model(y: Tensor) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2).to(y), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(outputs(w), 1.0), obs=y)

    def numpyro_model() -> Callable[[], None]:
        import jax
        import jax.numpy as jnp
        import numpyro
        import numpyro.distributions as nd

        inputs, targets = jnp.asarray(x.numpy()), jnp.asarray(y.numpy())

        def run() -> None:
            w = numpyro.sample("w", nd.Normal(jnp.zeros(2), 1.0).to_event(1))
            with numpyro.plate("data", len(inputs)):
                numpyro.sample("y", nd.Normal(jax.nn.relu(w * inputs[:, None]).sum(-1), 1.0), obs=targets)

        return run

    def quantities(w: Weights) -> dict[str, Tensor]:
        first, second = w["w"].unbind(-1)
        return {
            "w1": first,
            "w2": second,
            "w1 - w2": first - second,
            "larger": w["w"].amax(-1),
            "w1 w2": first * second,
        }

    axis = torch.linspace(-5, 5, 1001, dtype=torch.float64)  # the prior alone leaves less than 1e-6 beyond
    points = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    log_density = torch.cat(
        [-0.5 * part.square().sum(-1) - 0.5 * (outputs(part) - y).square().sum(-1) for part in points.split(100_000)]
    )
    grid = Grid({"w": points}, log_density.softmax(0), 0.01)
    return Target(model, (y,), numpyro_model, quantities, grid, sizes=(512, 300, 200))


def schools(root: Path | None) -> Target:
    y = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=torch.float64)
    errors = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=torch.float64)

    def model(y: Tensor) -> None:
        mean = pyro.sample("mean", dist.Normal(torch.zeros(()).to(y), 5.0))
        spread = pyro.sample("spread", dist.HalfCauchy(torch.tensor(5.0).to(y)))
        with pyro.plate("schools", len(y)):
            offset = pyro.sample("offset", dist.Normal(torch.zeros(()).to(y), 1.0))
            pyro.sample("y", dist.Normal(mean + spread * offset, errors), obs=y)

    def numpyro_model() -> Callable[[], None]:
        import jax.numpy as jnp
        import numpyro
        import numpyro.distributions as nd

        targets, deviations = jnp.asarray(y.numpy()), jnp.asarray(errors.numpy())

        def run() -> None:
            mean = numpyro.sample("mean", nd.Normal(0.0, 5.0))
            spread = numpyro.sample("spread", nd.HalfCauchy(5.0))
            with numpyro.plate("schools", len(targets)):
                offset = numpyro.sample("offset", nd.Normal(0.0, 1.0))
                numpyro.sample("y", nd.Normal(mean + spread * offset, deviations), obs=targets)

        return run

    def quantities(w: Weights) -> dict[str, Tensor]:
        effects = w["mean"][:, None] + w["spread"][:, None] * w["offset"]
        found = {f"effect {k}": column for k, column in enumerate(effects.T)}
        return {"mean": w["mean"], "log spread": w["spread"].log(), **found}

    return Target(model, (y,), numpyro_model, quantities, target_accept=0.9, sizes=(512, 300, 200))


def logistic(root: Path | None) -> Target:
    rng = np.random.default_rng(3)
    groups, rows = 15, 450
    group, inputs = rng.integers(groups, size=rows), rng.normal(size=rows)
    effects = rng.multivariate_normal([0.3, -0.8], [[0.8, 0.3], [0.3, 0.5]], size=groups)
    odds = effects[group, 0] + effects[group, 1] * inputs
    outcome = (rng.uniform(size=rows) < 1 / (1 + np.exp(-odds))).astype(float)
    index, x, y = torch.tensor(group), torch.tensor(inputs), torch.tensor(outcome)

    def model(x: Tensor, y: Tensor) -> None:
        one = torch.ones(2).to(x)
        centre = pyro.sample("centre", dist.Normal(0 * one, 2.0).to_event(1))
        scales = pyro.sample("scales", dist.Gamma(2 * one, 2.0).to_event(1))
        factor = pyro.sample("factor", dist.LKJCholesky(2, torch.tensor(2.0).to(x)))
        offsets = pyro.sample("offsets", dist.Normal(torch.zeros(groups, 2).to(x), 1.0).to_event(2))
        effects = centre[..., None, :] + offsets @ (scales[..., None] * factor).mT
        with pyro.plate("data", len(x)):
            logits = effects[..., index, 0] + effects[..., index, 1] * x
            pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    def numpyro_model() -> Callable[[], None]:
        import jax.numpy as jnp
        import numpyro
        import numpyro.distributions as nd

        place, features, targets = jnp.asarray(group), jnp.asarray(inputs), jnp.asarray(outcome)

        def run() -> None:
            centre = numpyro.sample("centre", nd.Normal(jnp.zeros(2), 2.0).to_event(1))
            scales = numpyro.sample("scales", nd.Gamma(2 * jnp.ones(2), 2.0).to_event(1))
            factor = numpyro.sample("factor", nd.LKJCholesky(2, 2.0))
            offsets = numpyro.sample("offsets", nd.Normal(jnp.zeros((groups, 2)), 1.0).to_event(2))
            effects = centre + offsets @ (scales[:, None] * factor).T
            with numpyro.plate("data", len(features)):
                logits = effects[place, 0] + effects[place, 1] * features
                numpyro.sample("y", nd.Bernoulli(logits=logits), obs=targets)

        return run

    def quantities(w: Weights) -> dict[str, Tensor]:
        centre, scales, factor = w["centre"], w["scales"], w["factor"]
        first = centre + ((scales[..., None] * factor) @ w["offsets"][:, 0, :, None])[..., 0]
        values = [*centre.T, *scales.log().T, factor[:, 1, 0], *first.T]
        names = ["centre 0", "centre 1", "log scale 0", "log scale 1", "correlation", "effect 0", "effect 1"]
        return dict(zip(names, values, strict=True))

    return Target(model, (x, y), numpyro_model, quantities, sizes=(128, 300, 300))


TARGETS = {"energy": energy, "weights": weights, "schools": schools, "logistic": logistic}
KERNELS = {"HMC": ps.HMC, "NUTS": ps.NUTS, "AdaptiveHMC": ps.AdaptiveHMC}


# samplers: draws (C, S, K) of the K quantities ----------------------------------------------------------------------


def by_numpyro(target: Target, seed: int, progress: bool) -> tuple[Tensor, list[str]]:
    import jax
    from numpyro.infer import MCMC, NUTS, init_to_sample, init_to_uniform

    chains, warmup, draws = target.sizes
    start = init_to_sample if target.from_prior else init_to_uniform
    kernel = NUTS(
        target.numpyro_model(),
        target_accept_prob=target.target_accept,
        init_strategy=start,
        max_tree_depth=(8, 10),  # in warm-up all chains wait for the longest trajectory: this library cuts them, too
    )
    run = MCMC(
        kernel,
        num_warmup=warmup,
        num_samples=draws,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=progress,
    )
    run.run(jax.random.PRNGKey(seed))
    found = run.get_samples(group_by_chain=True)
    return of_chains(target, {name: torch.tensor(np.array(value)) for name, value in found.items()})


def by_us(target: Target, kernel: str, seed: int, progress: bool) -> tuple[Tensor, list[str]]:
    chains, warmup, draws = target.sizes
    posterior = ps.sample(
        KERNELS[kernel](target.model, target_accept=target.target_accept),
        *target.args,
        num_chains=chains,
        num_warmup=warmup,
        num_samples=draws,
        initial="prior" if target.from_prior else "uniform",
        seed=seed,
        dtype=torch.float64,
        progress=progress,
    )
    return of_chains(target, posterior.samples)


def of_chains(target: Target, samples: Weights) -> tuple[Tensor, list[str]]:
    """Quantities chain by chain, to spare the memory."""
    chains = len(next(iter(samples.values())))
    found = [target.quantities({name: value[c] for name, value in samples.items()}) for c in range(chains)]
    return torch.stack([torch.stack(list(values.values()), -1) for values in found]), list(found[0])


# comparing ----------------------------------------------------------------------------------------------------------


def functions(values: Tensor, centre: Tensor, scale: Tensor, thresholds: Tensor) -> Tensor:
    """The quantities that are averaged, ``batch + (K,)`` -> ``batch + (K, 7)``, in the order of :data:`COMPARED`."""
    standard = (values - centre) / scale
    below = (values[..., None] <= thresholds).double()
    return torch.cat([torch.stack([standard, standard.square()], -1), below], -1)


def quantiles(values: Tensor) -> Tensor:
    """``(S, K)`` -> ``(K, 5)``."""
    return torch.tensor(np.quantile(values.numpy(), LEVELS, axis=0).T)


def compare(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
    """z and p ``(K, 7)`` of draws ``(C, S, K)`` beside others, by Welch's test of the chains' means."""
    both = torch.cat([ours.flatten(0, 1), theirs.flatten(0, 1)])
    centre, scale, thresholds = both.mean(0), both.std(0), quantiles(both)
    means = [functions(draws, centre, scale, thresholds).mean(1).numpy() for draws in (ours, theirs)]
    test = stats.ttest_ind(*means, axis=0, equal_var=False)
    return torch.tensor(test.statistic), torch.tensor(test.pvalue)


def compare_with_grid(draws: Tensor, target: Target, grid: Grid) -> tuple[Tensor, Tensor]:
    """z and p ``(K, 7)`` of draws ``(C, S, K)`` beside quadrature."""
    points = torch.stack(list(target.quantities(grid.points).values()), -1)
    centre = grid.mass @ points
    scale = (grid.mass @ (points - centre).square()).sqrt()
    # Halfway between neighbours, where counting points by their mass errs in second order of the step only.
    thresholds = (torch.floor(quantiles(draws.flatten(0, 1)) / grid.step) + 0.5) * grid.step
    parts = zip(points.split(100_000), grid.mass.split(100_000), strict=True)
    truth = sum(torch.einsum("p,pkf->kf", mass, functions(part, centre, scale, thresholds)) for part, mass in parts)
    means = functions(draws, centre, scale, thresholds).mean(1)
    test = stats.ttest_1samp(means.numpy(), torch.as_tensor(truth).numpy(), axis=0)
    return torch.tensor(test.statistic), torch.tensor(test.pvalue)


def effective(draws: Tensor) -> float:
    """Independent draws that would give the worst quantity's mean its standard error, from draws ``(C, S, K)``."""
    return float((len(draws) * draws.flatten(0, 1).var(0) / draws.mean(1).var(0)).min())


def row_of(found: tuple[Tensor, Tensor], names: list[str], **entries: Any) -> Row:
    z, p = found
    quantity, function = divmod(int(p.argmin()), len(COMPARED))
    return {
        **entries,
        "comparisons": p.numel(),
        "smallest_p": float(p.min()),
        "worst": f"{COMPARED[function]} of {names[quantity]}",
        "worst_z": float(z[quantity, function]),
        "mean_square_z": float(z.square().mean()),
        "z": {name: [round(float(value), 3) for value in row] for name, row in zip(names, z, strict=True)},
    }


def kept(
    folder: Path | None, name: str, draw: Callable[[], tuple[Tensor, list[str]]]
) -> tuple[Tensor, list[str], float]:
    """Draws, names of the quantities and seconds: from the folder, or made and put there."""
    file = None if folder is None else folder / f"{name}.npz"
    if file is not None and file.exists():
        with np.load(file) as found:
            return torch.tensor(found["draws"]), found["names"].tolist(), float(found["seconds"])
    start = time.perf_counter()
    draws, names = draw()
    seconds = round(time.perf_counter() - start, 1)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, draws=draws.numpy(), names=np.array(names), seconds=seconds)
    return draws, names, seconds


def run(name: str, options: argparse.Namespace, results: Results) -> None:
    """Sample a target by all samplers, compare what they drew, and keep the rows."""
    if results.find(target=name):
        return
    target = TARGETS[name](options.root)
    if options.sizes is not None:
        target = replace(target, sizes=tuple(options.sizes))
    samplers = {k: partial(by_us, target, k) for k in options.kernels}
    if importlib.util.find_spec("numpyro") is not None:
        samplers["NumPyro"] = partial(by_numpyro, target)
    draws, entries, names = {}, {}, list[str]()
    for sampler, draw in samplers.items():
        draws[sampler], names, seconds = kept(
            options.draws, f"{name}-{sampler}", partial(draw, options.seed, options.progress)
        )
        entries[sampler] = {"target": name, "sampler": sampler, "seconds": seconds, "sizes": target.sizes}
        entries[sampler]["effective"] = effective(draws[sampler])
        print(f"{name}, {sampler}: {seconds} s, {entries[sampler]['effective']:.0f} effective draws", flush=True)
    for sampler in draws:
        if target.grid is not None:
            found = compare_with_grid(draws[sampler], target, target.grid)
            results.add(row_of(found, names, against="quadrature", **entries[sampler]))
        if "NumPyro" in draws and sampler != "NumPyro":
            found = compare(draws[sampler], draws["NumPyro"])
            results.add(row_of(found, names, against="NumPyro", **entries[sampler]))


def report(rows: list[Row]) -> bool:
    """Print the table; whether all of it is within Monte Carlo error."""
    header = ["target", "sampler", "against", "comparisons", "effective", "largest |z|", "of", "p", "mean z²"]
    table = [
        [
            row["target"],
            row["sampler"],
            row["against"],
            str(row["comparisons"]),
            f"{row['effective']:.0f}",
            f"{abs(row['worst_z']):.2f}",
            row["worst"],
            f"{row['smallest_p']:.2g}",
            f"{row['mean_square_z']:.2f}",
        ]
        for row in rows
    ]
    print_table("differences over their standard errors", header, table)
    total = sum(row["comparisons"] for row in rows)
    smallest = min((row["smallest_p"] for row in rows), default=1.0)
    passed = smallest >= ALARM / max(total, 1)
    print(
        f"\n{'passed' if passed else 'FAILED'}: the smallest p of {total} comparisons is {smallest:.2g}; below "
        f"{ALARM / max(total, 1):.1g} the run would fail, which happens by chance in at most {ALARM:.0%} of runs"
    )
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--root", type=Path, help="folder that holds uci/energy")
    parser.add_argument("--kernels", nargs="+", choices=list(KERNELS), default=list(KERNELS), help="of this library")
    parser.add_argument("--seed", type=int, default=0, help="of all samplers")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs=3,
        metavar=("CHAINS", "WARMUP", "DRAWS"),
        help="of all targets, in place of their own",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="keep results there as they come, and go on from them"
    )
    parser.add_argument("--draws", type=Path, metavar="DIR", help="keep draws there, for a broken run to go on from")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--progress", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if importlib.util.find_spec("numpyro") is None:
        print("NumPyro isn't installed: quadrature alone is compared with")
    else:
        import numpyro

        numpyro.enable_x64()
    results = Results(options.json, {"sizes": options.sizes, "seed": options.seed, "uci": options.root is not None})
    for name in options.target:
        run(name, options, results)
    sys.exit(0 if report([row for row in results.rows if row["target"] in options.target]) else 1)


if __name__ == "__main__":
    main()
