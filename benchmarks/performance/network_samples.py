"""Effective samples of a network's worst prediction per second: this library beside
NumPyro's and Pyro's NUTS.

    python -m benchmarks.performance.network_samples [--root data] [--target a b]
    [--chains 4 64] [--json FILE]

The targets are those of ``sampler_gradients``, of which every tenth row is held out to
predict. Weights have copies, so that their own effective samples say nothing; the
predictions of held-out rows have none. All contestants are at their defaults, warm-up
included; seconds are processor time, without compiling. Pyro runs one chain for a tenth
of the iterations. NumPyro takes part where it is installed.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

import pyro_symmetric as ps
from benchmarks.contestants import Run, numpyro_run, ours, pyro_run
from benchmarks.harness import Results, parse
from benchmarks.performance.sampler_gradients import Target, target, target_parser

KERNELS = {"NUTS": ps.NUTS, "AdaptiveHMC": ps.AdaptiveHMC}


def held_out(whole: Target) -> tuple[Target, Tensor]:
    """The target without every tenth row, and the inputs of these."""
    out = torch.arange(len(whole.x)) % 10 == 0
    return Target(
        whole.x[~out].contiguous(),
        whole.y[~out].contiguous(),
        whole.hidden,
        whole.outputs,
    ), whole.x[out]


def predictions(draws: Tensor, own: Target, inputs: Tensor) -> Tensor:
    """``(C, S, rows)``: outputs, or the first logit less the mean of all; sites come in
    the order of the model.
    """
    found = inputs
    for layer, (below, above) in enumerate(own.sizes):
        if layer:
            found = found.relu() if own.classifies else found.tanh()
        weight, bias, draws = draws.split(
            [below * above, above, draws.shape[-1] - (below + 1) * above], -1
        )
        found = found @ weight.unflatten(-1, (above, below)).mT + bias.unsqueeze(-2)
    return (
        found[..., 0] - found.mean(-1) if own.classifies else found[..., 0]
    ).double()


def run(
    name: str, chains: int, sampler: str, seed: int, options: Any
) -> dict[str, Any]:
    torch.manual_seed(seed)
    own, inputs = held_out(target(name, options.root))
    problem = own.problem()
    if sampler in KERNELS:
        kernel = KERNELS[sampler](own.model())
        found: Run = ours(
            problem,
            options.warmup,
            options.draws,
            lambda _: kernel,
            chains,
            args=(own.x, own.y),
            seed=seed,
        )
    elif sampler == "NumPyro":
        found = numpyro_run(
            problem, options.warmup, options.draws, chains, dense=False, seed=seed
        )
    else:
        found = pyro_run(problem, options.warmup, options.draws, seed=seed)
    return found.row(functools.partial(predictions, own=own, inputs=inputs))


def main(argv: list[str] | None = None) -> None:
    arguments = target_parser(__doc__)
    arguments.add_argument("--chains", type=int, nargs="+", default=[4, 64])
    arguments.add_argument("--warmup", type=int, default=500)
    arguments.add_argument("--draws", type=int, default=500)
    options = parse(arguments, argv)
    if options.quick:
        options.chains, options.warmup, options.draws = [2], 20, 20
    samplers = [
        *KERNELS,
        *(["NumPyro"] if importlib.util.find_spec("numpyro") else []),
        "Pyro",
    ]
    results = Results.of(options, "warmup", "draws")
    grid = {
        "name": options.target,
        "chains": options.chains,
        "sampler": samplers,
        "seed": range(options.seeds),
    }
    results.fill(functools.partial(run, options=options), **grid)
    columns: dict[str, tuple[Any, int]] = {name: (name, 2) for name in Run.COLUMNS}
    results.table(
        f"{options.warmup} + {options.draws} iterations",
        ["name", "chains", "sampler"],
        columns,
    )


if __name__ == "__main__":
    main()
