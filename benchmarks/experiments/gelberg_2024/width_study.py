r"""The worth of symmetrised training for classifiers of growing width.

    python -m benchmarks.experiments.gelberg_2024.width_study --data-dir data --json
    widths.json

Perceptrons 784-WIDTH-10 with ReLU and an isotropic prior N(0, 1), as in Table 1 of
Gelberg et al. 2024 (arXiv 2408.05496); mean-field Gaussian guides, trained by stock SVI
and Adam on the plain ELBO, on InfoNCE(15) and InfoNCE(127), which is the paper's bound,
and on SinkhornImportance(4). All methods get the same start, mini-batches, steps,
learning rate and noise, so that what differs is due to the objective.

What is reported, for training data and test data: test accuracy and NLL of the average
over draws of the guide; the ELBO of the guide; and its *symmetrised ELBO*, for all
methods alike by SinkhornImportance(JUDGE): a lower bound of the ELBO of the symmetrised
guide, which itself is a lower bound of the evidence. Their difference, of at most
log|G| = log WIDTH!, is what the orbit is worth; what each method's own objective saw of
it is shown beside it. Differences from the plain guide are paired by seed.
"""

from __future__ import annotations

import functools
import math
import time
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, load_images, mini_batches, parse, parser
from benchmarks.networks import perceptron

METHODS = ("mean-field", "infonce-15", "infonce-127", "sinkhorn-4")


def estimator_of(name: str) -> Any:
    kind, _, terms = name.partition("-")
    if name == "mean-field":
        return ps.InfoNCE(0)
    return {"infonce": ps.InfoNCE, "sinkhorn": ps.SinkhornImportance}[kind](int(terms))


def train(
    model: ps.BayesianModel,
    group: ps.Group,
    method: str,
    x: Tensor,
    y: Tensor,
    seed: int,
    options: Any,
) -> tuple[ps.AutoSymmetrized, float]:
    """The fitted guide, and seconds for one step."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = ps.AutoSymmetrized(
        model, group, estimator=estimator_of(method), init_scale=options.init_scale
    )
    guide.setup(x[:2], y[:2])
    optimiser = pyro.optim.ClippedAdam(
        {"lr": options.lr, "lrd": 0.05 ** (1 / options.steps), "clip_norm": math.inf}
    )
    svi = SVI(model, guide, optimiser, Trace_ELBO())
    start = time.perf_counter()
    for step, batch in enumerate(
        mini_batches(len(x), options.batch, options.steps, seed)
    ):
        # the guide draws first: the same noise for all methods
        torch.manual_seed(1_000_003 * seed + step)
        svi.step(x[batch], y[batch])
    if x.is_cuda:
        torch.cuda.synchronize()
    return guide, (time.perf_counter() - start) / options.steps


@torch.no_grad()
def judge(
    guide: ps.AutoSymmetrized,
    model: ps.BayesianModel,
    method: str,
    train_rows: tuple[Tensor, Tensor],
    test_rows: tuple[Tensor, Tensor],
    options: Any,
) -> dict[str, float]:
    pyro.set_rng_seed(99)
    weights = guide.sample_posterior((options.draws,))
    probabilities = model.outputs(weights, test_rows[0], chunk_size=8).softmax(-1)
    found = ps.scores.classification(probabilities, test_rows[1])
    result = {"accuracy": found.accuracy, "nll": found.nll}

    pyro.set_rng_seed(98)
    judge_of_all = ps.SinkhornImportance(options.judge)
    worth = ps.evidence(
        guide, *train_rows, estimator=judge_of_all, num_samples=options.draws, chunk=4
    )
    result["elbo"], result["symmetrized_elbo"] = worth.elbo, worth.symmetrized_elbo
    result["symmetrized_gain"] = worth.symmetrized_elbo - worth.elbo
    worth = ps.evidence(
        guide,
        *train_rows,
        estimator=estimator_of(method),
        num_samples=options.draws,
        chunk=4,
    )
    # from the same draws, so that it has little noise
    result["own_gain"] = worth.symmetrized_elbo - worth.elbo
    base = guide.base.get_posterior()
    prior_variance = torch.cat(
        [p.base_dist.scale.square().flatten() for p in model.priors().values()]
    )
    # A weight says something where its posterior is not its prior: in nats, by the
    # analytic KL.
    kl = 0.5 * (
        (base.variance + base.mean**2) / prior_variance
        - 1
        - (base.variance / prior_variance).log()
    )
    incoming = next(iter(guide.unpack(kl[None]).values()))[0]
    result["active_units"] = int((incoming.sum(-1) > 1.0).sum())
    return result


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=3)
    arguments.add_argument(
        "--data", nargs="+", default=["mnist"], help="names that datasets.load knows"
    )
    arguments.add_argument("--data-dir", type=Path, default=Path("data"))
    arguments.add_argument("--download", action="store_true")
    arguments.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    arguments.add_argument(
        "--methods", nargs="+", default=list(METHODS), metavar="METHOD"
    )
    arguments.add_argument(
        "--train", type=int, default=8000, help="training rows, a stratified subset"
    )
    arguments.add_argument("--test", type=int, default=2000)
    arguments.add_argument(
        "--pool",
        type=int,
        default=1,
        help="side of the squares of pixels that are averaged",
    )
    arguments.add_argument("--steps", type=int, default=800)
    arguments.add_argument("--batch", type=int, default=500)
    arguments.add_argument("--lr", type=float, default=0.03)
    arguments.add_argument("--init-scale", type=float, default=0.02)
    arguments.add_argument(
        "--draws", type=int, default=64, help="draws of the guide for every estimate"
    )
    arguments.add_argument(
        "--judge",
        type=int,
        default=16,
        help="K of the SinkhornImportance that judges all methods",
    )
    arguments.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parse(arguments, argv)
    if options.quick:
        options.data, options.widths, options.steps, options.train = (
            ["digits"],
            [8, 16],
            30,
            300,
        )
        options.test, options.draws, options.methods = (
            200,
            8,
            ["mean-field", "infonce-15", "sinkhorn-4"],
        )
    kept = (
        "train",
        "test",
        "pool",
        "steps",
        "batch",
        "lr",
        "init_scale",
        "draws",
        "judge",
        "device",
    )
    results = Results.of(options, *kept)

    def run(data: str, seed: int, width: int, method: str) -> Row:
        rows = load_images(data, options)
        x, test_x = rows.train_x.flatten(1), rows.test_x.flatten(1)
        torch.manual_seed(seed)
        net = perceptron(x.shape[1], width, rows.num_outputs).to(x.device)
        group = ps.find_symmetry(net.eval(), x[:2]).permutations
        model = ps.BayesianModel(
            net, ps.GaussianPrior(1.0, fan_in=False), "categorical", num_data=len(x)
        )
        guide, seconds = train(model, group, method, x, rows.train_y, seed, options)
        found = judge(
            guide, model, method, (x, rows.train_y), (test_x, rows.test_y), options
        )
        return {
            "title": rows.name,
            "log_order": group.log_order(),
            "seconds_per_step": seconds,
            **found,
        }

    results.fill(
        run,
        data=options.data,
        seed=range(options.seeds),
        width=options.widths,
        method=options.methods,
    )
    report(results, options)


def report(results: Results, options: Any) -> None:
    columns: dict[str, tuple[Any, int]] = {
        "accuracy": ("accuracy", 4),
        "test NLL": ("nll", 4),
        "ELBO": ("elbo", 1),
        "symmetrised ELBO ≥": ("symmetrized_elbo", 1),
        "gain ≥": ("symmetrized_gain", 1),
        "of log |G|": ("log_order", 1),
        "seen by own objective": ("own_gain", 1),
        "active units": ("active_units", 1),
        "s/step": ("seconds_per_step", 4),
    }

    def gained(row: Row, measure: str) -> float | None:
        """Return a measure less that of the plain guide of the same seed."""
        if row["method"] == "mean-field":
            return None
        key = {name: row[name] for name in ("data", "seed", "width")}
        plain = results.find(**key, method="mean-field")
        return row[measure] - plain[0][measure] if plain else None

    for measure, heading, digits in (
        ("accuracy", "accuracy gained", 4),
        ("nll", "NLL gained", 4),
        ("symmetrized_elbo", "symmetrised ELBO gained", 1),
    ):
        columns[heading] = (functools.partial(gained, measure=measure), digits)
    for name in options.data:
        rows = results.find(data=name)
        title = (
            f"{options.train} training rows of {rows[0]['title']}, inputs pooled {options.pool} x "
            f"{options.pool}, {options.steps} "
            f"steps of {options.batch} rows; in nats; symmetrised ELBO by "
            f"SinkhornImportance({options.judge}) for all"
        )
        results.table(title, ["width", "method"], columns, data=name)


if __name__ == "__main__":
    main()
