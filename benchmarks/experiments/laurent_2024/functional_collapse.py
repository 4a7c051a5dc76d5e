"""Do independent networks collapse onto one function? Mutual information of all pairs
of members, in and out of distribution (figures 3, 15 and 16 of Laurent, Aldea & Franchi
2024, arXiv 2310.08287).

    python -m benchmarks.experiments.laurent_2024.functional_collapse

A thousand perceptrons of each width on scikit-learn's digits 0 to 7, trained at once;
digits 8 and 9 are out of distribution. Of every pair of members the mutual information
between prediction and member is taken on both kinds of inputs: pairs that predict alike
lie near 0, at most log 2 = 0.693 nats are possible. Printed are its mean, the share of
pairs below a hundredth of a nat, and how the two kinds go together over pairs.

Then the same for fewer residual networks of so many channels: a convolution, two
residual blocks of two convolutions each, and a linear layer.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import pyro_symmetric as ps
from benchmarks.harness import Results, parse, parser
from pyro_symmetric.compare import functional_collapse
from pyro_symmetric.ensembles import ensemble

COLLAPSED = 0.01


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.second(self.first(x).relu())).relu()


def perceptron(width: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, outputs)
    )


def residual(channels: int, outputs: int) -> nn.Module:
    first = nn.Conv2d(1, channels, 3, stride=2, padding=1)
    return nn.Sequential(
        first,
        nn.ReLU(),
        Block(channels),
        Block(channels),
        nn.Flatten(),
        nn.Linear(16 * channels, outputs),
    )


NETWORKS = {"perceptron": perceptron, "residual": residual}


def run(network: str, width: int, seed: int, data: Any, options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    few = network == "residual"
    members, epochs = (
        (options.residual_members, options.residual_epochs)
        if few
        else (options.members, options.epochs)
    )
    net = NETWORKS[network](width, data.num_outputs)
    posterior = ensemble(
        net,
        (data.train_x, data.train_y),
        members,
        epochs=epochs,
        optimizer=functools.partial(
            torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3
        ),
        progress=options.progress,
    )
    within, outside = (
        ps.predict(posterior, net, inputs[: options.inputs], progress=False).softmax(-1)
        for inputs in (data.test_x, data.ood_x)
    )
    result = functional_collapse(within, outside)
    scores = ps.scores.classification(within, data.test_y[: options.inputs], outside)
    return {
        "members": members,
        **{
            kind: {"mean": float(getattr(result, kind).mean())}
            for kind in ("within", "outside")
        },
        "below": [
            float((pairs < COLLAPSED).double().mean())
            for pairs in (result.within, result.outside)
        ],
        "correlation": result.correlation,
        "rank_correlation": result.rank_correlation,
        "accuracy": scores.accuracy,
        "auroc": scores.detection["maximum_probability"].auroc,
        "single_accuracy": float(
            (within.argmax(-1) == data.test_y[: options.inputs]).double().mean()
        ),
    }


def main(argv: list[str] | None = None) -> None:
    arguments = parser(__doc__, seeds=1)
    arguments.add_argument("--members", type=int, default=1_000)
    arguments.add_argument(
        "--widths", type=int, nargs="*", default=[4, 16], help="of perceptrons"
    )
    arguments.add_argument("--epochs", type=int, default=20)
    arguments.add_argument(
        "--channels", type=int, nargs="*", default=[8], help="of residual networks"
    )
    arguments.add_argument("--residual-members", type=int, default=200)
    arguments.add_argument("--residual-epochs", type=int, default=10)
    arguments.add_argument(
        "--inputs", type=int, default=200, help="inputs of each kind"
    )
    options = parse(arguments, argv)
    if options.quick:
        (
            options.members,
            options.epochs,
            options.residual_members,
            options.residual_epochs,
        ) = 50, 2, 10, 1
    data = ps.datasets.load("digits", hold_out="auto", dtype=torch.float32)
    results = Results.of(
        options, "members", "epochs", "residual_members", "residual_epochs", "inputs"
    )
    one = functools.partial(run, data=data, options=options)
    for network, sizes in (
        ("perceptron", options.widths),
        ("residual", options.channels),
    ):
        results.fill(one, seed=range(options.seeds), network=[network], width=sizes)
    columns: dict[str, tuple[Any, int]] = {
        "accuracy of one": ("single_accuracy", 3),
        "of all": ("accuracy", 3),
        "AUROC": ("auroc", 3),
        **{
            f"mean {kind}": (lambda row, kind=kind: row[kind]["mean"], 4)
            for kind in ("within", "outside")
        },
        **{
            f"< {COLLAPSED} {kind}": (lambda row, k=k: row["below"][k], 4)
            for k, kind in enumerate(("within", "outside"))
        },
        "correlation": ("correlation", 3),
        "of ranks": ("rank_correlation", 3),
    }
    results.table(
        "mutual information of pairs of members, nats",
        ["members", "network", "width"],
        columns,
    )


if __name__ == "__main__":
    main()
