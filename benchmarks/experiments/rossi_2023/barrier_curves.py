r"""The loss barrier between two independently trained posteriors, before and after
alignment.

    python -m benchmarks.experiments.rossi_2023.barrier_curves --data-dir data --json
    barriers.json python -m benchmarks.experiments.rossi_2023.barrier_curves \ --data
    mnist --width 64 128 256 512 1024 --json widths.json python -m
    benchmarks.experiments.rossi_2023.barrier_curves --data mnist --temperature 1 0.1
    0.01 --json cold.json python -m benchmarks.experiments.rossi_2023.barrier_curves \
    --data mnist --pool 2 --depth 2 --width 64 256 --prior-variance 0.001 0.02  #
    underfits, fits python -m benchmarks.experiments.rossi_2023.barrier_curves --data
    digits --net resnet20 --width 8 --json resnet.json python -m
    benchmarks.experiments.rossi_2023.barrier_curves \ --data cifar10 --net resnet20
    --width 16 --steps 20000 --device cuda

Two mean-field posteriors of a network from different starts; the second is aligned to
the first in Wasserstein distance over the permutations of hidden units; the
marginalised loss and the error are measured along the Wasserstein geodesic, on training
and test data. As in Rossi et al. 2023 (arXiv 2310.10171, sections 4 and 5): perceptrons
with three hidden layers of 512 ReLU units, deviations that start at 0.01, temperature
1. Beside it plain networks, trained by Adam on the cross-entropy and aligned by weight
matching (Ainsworth et al. 2023, arXiv 2209.04836).

Perceptrons are trained with the local reparametrisation (Kingma, Salimans & Welling
2015, arXiv 1506.02557) and the analytic divergence from the prior N(0,
--prior-variance): the ELBO that SVI has, with less noise, on one core in minutes.
``--net resnet20`` is ResNet-20 with filter-response normalisation, ``--width`` channels
wide at the stem (16 is the full one), trained by stock SVI on
:class:`~pyro.infer.Trace_ELBO`; its vectors (of normalisation, and the last bias) have
a standard normal prior.

What a barrier says depends on how well the ends fit: a posterior that the prior holds
back (784 inputs, three hidden layers and the default prior on 8,000 images err on 15 %
of the test rows) has little to lose along any path. Images of 14 x 14 pixels, two
hidden layers and a wider prior bring it to the error of plain networks, 5 %, at
temperature 1.

Every row of the results is written when it is there, so a run can be cut short and
taken up again with more seeds, widths or data. On one core a pair of perceptrons of
width 512 takes five to ten minutes at the defaults.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.autoguide.initialization import init_to_value
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import Results, Row, load_images, mini_batches, parse, parser
from benchmarks.networks import perceptron
from pyro_symmetric.alignment import GaussianWeights
from pyro_symmetric.networks import resnet20

PATHS = ("unaligned", "aligned")
KEPT = (
    "net",
    "depth",
    "pool",
    "train",
    "test",
    "steps",
    "batch",
    "lr",
    "points",
    "draws",
    "device",
)
INIT_SCALE, SCALE_LR = 0.01, 0.01  # of deviations, and the rate of their logarithms
SHOWN = 1000  # training rows on which the path is measured


# networks and their training ----------------------------------------------------------


def started(net: nn.Sequential) -> nn.Sequential:
    """The same, started as ReLU likes it."""
    for layer in net.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return net


def descend(
    groups: Sequence[tuple[float, Sequence[Tensor]]],
    loss: Callable[[Tensor], Tensor],
    rows: int,
    seed: int,
    options: Any,
) -> float:
    """Adam on the loss of mini-batches; its rates rise for a tenth of the steps and
    then fall to a thousandth. Returns the mean loss over the last tenth.

    :param groups: the highest rate of each group of parameters.
    :param loss: of the rows of these indices.
    """
    optimiser = torch.optim.Adam(
        [{"params": list(parameters)} for _, parameters in groups], fused=True
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser,
        [rate for rate, _ in groups],
        total_steps=options.steps,
        pct_start=0.1,
        div_factor=10,
        final_div_factor=100,
    )
    losses = []
    for batch in mini_batches(rows, options.batch, options.steps, seed):
        optimiser.zero_grad()
        found = loss(batch)
        found.backward()
        optimiser.step()
        schedule.step()
        losses.append(found.detach())
    return float(torch.stack(losses)[-max(1, len(losses) // 10) :].mean())


def fit_perceptron(
    net: nn.Sequential,
    x: Tensor,
    y: Tensor,
    temperature: float,
    prior: float,
    seed: int,
    options: Any,
) -> tuple[GaussianWeights, float]:
    """A mean-field posterior by local reparametrisation, and its loss (negative ELBO)
    per row.
    """
    layers = [
        (name, module)
        for name, module in net.named_children()
        if isinstance(module, nn.Linear)
    ]
    loc = {
        name: value.detach().clone().requires_grad_()
        for name, value in net.named_parameters()
    }
    log_scale = {
        name: torch.full_like(value, math.log(INIT_SCALE)).requires_grad_()
        for name, value in loc.items()
    }

    def loss(rows: Tensor) -> Tensor:
        variance = {name: (2 * value).exp() for name, value in log_scale.items()}
        hidden = x[rows]
        for name, _ in layers:
            weight, bias = f"{name}.weight", f"{name}.bias"
            mean = nn.functional.linear(hidden, loc[weight], loc[bias])
            deviation = nn.functional.linear(
                hidden.square(), variance[weight], variance[bias]
            ).sqrt()
            hidden = mean + deviation * torch.randn_like(mean)
            hidden = hidden.relu() if name != layers[-1][0] else hidden
        divergence: Any = sum(
            (variance[name].sum() + loc[name].square().sum()) / (2 * prior)
            - log_scale[name].sum()
            + (math.log(prior) - 1) / 2 * loc[name].numel()
            for name in loc
        )
        return nn.functional.cross_entropy(
            hidden, y[rows]
        ) / temperature + divergence / len(x)

    groups = ((options.lr, list(loc.values())), (SCALE_LR, list(log_scale.values())))
    last = descend(groups, loss, len(x), seed, options)
    scale = {name: value.detach().exp() for name, value in log_scale.items()}
    return GaussianWeights(
        {name: value.detach() for name, value in loc.items()}, scale
    ), last


def fit_by_svi(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    temperature: float,
    variance: float,
    seed: int,
    options: Any,
) -> Any:
    """A mean-field posterior of any network, and its loss (negative ELBO) per row."""
    pyro.clear_param_store()

    def prior(name: str, parameter: Tensor) -> dist.TorchDistribution:
        # Scales and shifts of normalisation, which start at one, aren't to be shrunk to
        # the size of a weight.
        spread_of = variance**0.5 if parameter.dim() > 1 else 1.0
        return dist.Normal(torch.zeros_like(parameter), spread_of).to_event(
            parameter.dim()
        )

    likelihood = ps.CategoricalLikelihood(temperature)
    model = ps.BayesianModel(net, prior, likelihood, num_data=len(x))
    start = init_to_value(values=model.initial_weights())
    pyro.clear_param_store()
    guide = AutoDiagonalNormal(model, init_loc_fn=start, init_scale=INIT_SCALE)
    optimiser = pyro.optim.ClippedAdam(
        {"lr": options.lr, "lrd": 0.02 ** (1 / options.steps)}
    )
    svi = SVI(model, guide, optimiser, Trace_ELBO())
    losses = [
        svi.step(x[b], y[b]) / len(x)
        for b in mini_batches(len(x), options.batch, options.steps, seed)
    ]
    last = losses[-max(1, len(losses) // 10) :]
    return ps.alignment.to_gaussian(guide), sum(last) / len(last)


def fit_plain(
    net: nn.Module, x: Tensor, y: Tensor, seed: int, options: Any
) -> tuple[dict[str, Tensor], float]:
    def loss(rows: Tensor) -> Tensor:
        return nn.functional.cross_entropy(net(x[rows]), y[rows])

    last = descend([(options.lr, list(net.parameters()))], loss, len(x), seed, options)
    return {name: value.detach() for name, value in net.named_parameters()}, last


# one comparison -----------------------------------------------------------------------


def compare(
    data: Any,
    kind: str,
    width: int,
    temperature: float,
    prior: float,
    seed: int,
    options: Any,
) -> dict[str, Any]:
    x, y, test_x = data.train_x, data.train_y, data.test_x
    if options.net == "mlp":
        x, test_x = x.flatten(1), test_x.flatten(1)

    def build() -> nn.Module:
        if options.net == "mlp":
            return started(
                perceptron(x.shape[1], *[width] * options.depth, data.num_outputs)
            ).to(x.device)
        return resnet20(x.shape[1:], data.num_outputs, width).to(x.device)

    fits, losses, seconds = [], [], 0.0
    for member in (2 * seed, 2 * seed + 1):
        pyro.set_rng_seed(member)
        net = build()
        start = time.perf_counter()
        if kind == "plain":
            found, loss = fit_plain(net, x, y, member, options)
        else:
            fit: Any = fit_perceptron if options.net == "mlp" else fit_by_svi
            found, loss = fit(net, x, y, temperature, prior, member, options)
        fits.append(found)
        losses.append(loss)
        seconds += time.perf_counter() - start
    net = build().eval()
    group = ps.find_symmetry(net, x[:2]).permutations
    pyro.set_rng_seed(seed)
    start = time.perf_counter()
    alignment = ps.align(fits[1], fits[0], group, "wasserstein")
    align_seconds = time.perf_counter() - start
    p = alignment.element
    moved = (
        p(fits[1])
        if kind == "plain"
        else GaussianWeights(p(fits[1].loc), p(fits[1].scale))
    )
    model = ps.BayesianModel(net, 1.0, "categorical")
    shown = {"train": (x[:SHOWN], y[:SHOWN]), "test": (test_x, data.test_y)}
    curves = {}
    for path, end in zip(PATHS, (fits[1], moved), strict=True):
        torch.manual_seed(seed)
        curve = ps.loss_barrier(
            fits[0],
            end,
            model,
            shown,
            num_points=options.points,
            num_samples=options.draws,
        )
        curves[path] = {
            **curve.to_dict(),
            "metrics": {name: v.tolist() for name, v in curve.metrics.items()},
        }
    return {
        "curves": curves,
        "fit_losses": losses,
        "cost_before": alignment.initial_cost,
        "cost_after": alignment.cost,
        "align_seconds": align_seconds,
        "train_seconds": seconds,
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--data", nargs="+", default=["mnist", "fashion-mnist"])
    arguments.add_argument("--data-dir", type=Path, default=Path("data"))
    arguments.add_argument("--download", action="store_true")
    arguments.add_argument("--net", choices=("mlp", "resnet20"), default="mlp")
    arguments.add_argument(
        "--depth", type=int, default=3, help="hidden layers of a perceptron"
    )
    arguments.add_argument(
        "--pool",
        type=int,
        default=1,
        help="side of the squares of pixels that are averaged",
    )
    arguments.add_argument(
        "--width",
        type=int,
        nargs="+",
        default=[512],
        help="hidden units; channels of a ResNet",
    )
    arguments.add_argument("--temperature", type=float, nargs="+", default=[1.0])
    arguments.add_argument("--prior-variance", type=float, nargs="+", default=[0.0025])
    arguments.add_argument("--train", type=int, default=8000)
    arguments.add_argument("--test", type=int, default=2000)
    arguments.add_argument("--steps", type=int, default=2000)
    arguments.add_argument("--batch", type=int, default=256)
    arguments.add_argument(
        "--lr", type=float, default=0.003, help="highest learning rate"
    )
    arguments.add_argument("--points", type=int, default=11)
    arguments.add_argument(
        "--draws", type=int, default=16, help="draws of the weights at every point"
    )
    arguments.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    options = parse(arguments, argv)
    torch.set_flush_denormal(True)  # of units that the prior has switched off
    if options.quick:
        options.data, options.width, options.steps = ["digits"], [16], 30
        options.train, options.test, options.points, options.draws = 300, 200, 5, 4
    results = Results.of(options, *KEPT)

    def run(
        data: str,
        seed: int,
        width: int,
        kind: str,
        temperature: float,
        prior_variance: float,
    ) -> Row:
        images = load_images(data, options)
        return {
            "title": images.name,
            **compare(images, kind, width, temperature, prior_variance, seed, options),
        }

    each = {"data": options.data, "seed": range(options.seeds), "width": options.width}
    posterior = {
        "temperature": options.temperature,
        "prior_variance": options.prior_variance,
    }
    results.fill(run, **each, kind=["posterior"], **posterior)
    # temperature and prior belong to the posterior
    results.fill(run, **each, kind=["plain"], temperature=[1.0], prior_variance=[0.0])
    report(results, options)


def report(results: Results, options: Any) -> None:
    for name in options.data:
        for measure in ("train", "test", "train error", "test error"):

            def barrier(row: Row, path: str, measure: str = measure) -> float:
                return row["curves"][path]["barriers"][measure]

            def left(row: Row, barrier: Any = barrier) -> float | None:
                before = barrier(row, "unaligned")
                return 100 * barrier(row, "aligned") / before if before > 0 else None

            def end(row: Row, measure: str = measure) -> float:
                curve = row["curves"]["aligned"]
                return {**curve["losses"], **curve["metrics"]}[measure][0]

            columns: dict[str, tuple[Any, int]] = {
                "at the end": (end, 4),
                "barrier": (functools.partial(barrier, path="unaligned"), 4),
                "aligned": (functools.partial(barrier, path="aligned"), 4),
                "% left": (left, 1),
                "align s": ("align_seconds", 1),
                "train s": ("train_seconds", 0),
            }
            unit = "nats per row" if "error" not in measure else "share of rows"
            images = results.find(data=name)[0]["title"]
            title = (
                f"{images}, {measure} ({unit}); {options.net}, {options.draws} draws a "
                f"point, {options.steps} steps"
            )
            results.table(
                title,
                ["kind", "width", "temperature", "prior_variance"],
                columns,
                data=name,
            )


if __name__ == "__main__":
    main()
